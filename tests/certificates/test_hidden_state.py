"""Nothing is proved of a gradient that a hook changes, of memory that overlaps, or of values that leave the program."""

from __future__ import annotations

import copy
import datetime
import itertools
import os
import random
import secrets
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import conserved
from conserved import Verdict
from conserved.discovery import UnsuitableError
from conserved.laws.shared_memory import overlaps_itself

pytestmark = [pytest.mark.usefixtures("as_users_run_it"), pytest.mark.filterwarnings("ignore")]


class Two(nn.Module):
    """relu between two maps: four laws, one for each neuron."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)
        self.listed: Any = [self.a.weight]
        weight = self.a.weight
        self.closed: Callable[[], Tensor] = lambda: weight.detach()

    def plain(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(F.relu(self.a(x)))
        return y

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(x)


def reading(read: Callable[[Any, Tensor], bool]) -> type[Two]:
    """A module that decides by something it reads."""

    class Reading(Two):
        def forward(self, x: Tensor) -> Tensor:
            y = self.plain(x)
            return y if read(self, y) else y * self.a.weight.sum()

    return Reading


def computing(compute: Callable[[Any, Tensor], Tensor]) -> type[Two]:
    """A module with another formula."""

    class Computing(Two):
        def forward(self, x: Tensor) -> Tensor:
            return compute(self, x)

    return Computing


def _expanded() -> Two:
    model = Two()
    model.a.weight = nn.Parameter(torch.randn(3).expand(4, 3))
    return model


def _strided() -> Two:
    model = Two()
    model.a.weight = nn.Parameter(torch.as_strided(torch.randn(6), (4, 3), (1, 1)))
    return model


def _hooked(hook: Callable[[Two], Any]) -> Callable[[], Two]:
    def make() -> Two:
        model = Two()
        model.listed = hook(model)
        return model

    return make


_KEPT: list[Any] = []


def _node_hook(model: Two) -> Any:
    node = torch.autograd.graph.get_gradient_edge(model.a.weight).node
    node.register_prehook(lambda grads: (2 * grads[0],))
    _KEPT.append(node)
    return None


def _on_grad_fn(self: Any, x: Tensor) -> Tensor:
    hidden = F.relu(self.a(x))
    if hidden.grad_fn is not None:
        hidden.grad_fn.register_hook(lambda given, _: tuple(None if g is None else g * g for g in given))
    y: Tensor = self.b(hidden)
    return y


def _saved(self: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * t):
        y: Tensor = self.plain(x)
        return y


def _twice(grads: Any) -> Any:
    return tuple(2 * grad for grad in grads)


def _doubled(grad: Tensor) -> Tensor:
    return 2 * grad


HOOKS: dict[str, Callable[[], nn.Module]] = {
    "post-accumulate hook": _hooked(lambda m: m.a.weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2))),
    "tensor hook": _hooked(lambda m: m.a.weight.register_hook(_doubled)),
    "module hook": _hooked(lambda m: m.a.register_full_backward_hook(lambda mod, gi, go: _twice(go))),
    "module pre-hook": _hooked(lambda m: m.b.register_full_backward_pre_hook(lambda mod, go: _twice(go))),
    "multi-gradient hook": _hooked(
        lambda m: torch.autograd.graph.register_multi_grad_hook([m.a.weight], lambda grads: grads[0].mul_(2))
    ),
    "hook on a node inside": computing(_on_grad_fn),
    "hook on the accumulating node": _hooked(_node_hook),
    "saved tensors that are changed": computing(_saved),
}

MEMORY: dict[str, Callable[[], nn.Module]] = {"expanded": _expanded, "strided": _strided}

READS: dict[str, Callable[[], nn.Module]] = {
    "f-string": reading(lambda m, y: f"{y.sum()}" != "0"),
    "str": reading(lambda m, y: "-" in str(m.a.weight)),
    "repr": reading(lambda m, y: len(repr(m.a.weight)) > -1),
    "dictionary keyed by text": reading(lambda m, y: {str(m.a.weight): True}.get(str(m.a.weight), False)),
    "item": reading(lambda m, y: y.sum().item() < 1e9),
    "float": reading(lambda m, y: float(y.sum()) < 1e9),
    "bool": reading(lambda m, y: bool(y.sum() < 1e9)),
    "tolist": reading(lambda m, y: m.a.weight.tolist()[0][0] < 1e9),
    "numpy": reading(lambda m, y: m.a.weight.detach().numpy().sum() < 1e9),
    "equal": reading(lambda m, y: torch.equal(m.a.weight, m.a.weight.clone())),
    "contains": reading(lambda m, y: 0.125 not in m.a.weight),
    "storage": reading(lambda m, y: m.a.weight.untyped_storage()[0] > -1),
    "address": reading(lambda m, y: m.a.weight.data_ptr() > 0),
    "the last gradient": reading(lambda m, y: m.a.weight.grad is None),
    "data": computing(lambda m, x: m.plain(x) * m.a.weight.data.sum()),
    "a parameter made inside": computing(lambda m, x: F.relu(x @ nn.Parameter(m.a.weight * 2).T) @ m.b.weight.T),
    "a parameter made beside": computing(lambda m, x: m.plain(x) * nn.Parameter(m.a.weight.square()).sum()),
}

OUTSIDE: dict[str, Callable[[], nn.Module]] = {
    "a list": computing(lambda m, x: m.plain(x) * m.listed[0].detach().sum()),
    "a list, not detached": computing(lambda m, x: F.relu(x @ m.listed[0].T) @ m.b.weight.T),
    "a closure": computing(lambda m, x: m.plain(x) * m.closed().sum()),
}

CHANCE: dict[str, Callable[[], nn.Module]] = {
    "random numbers of Python": reading(lambda m, y: random.random() < 2),
    "random numbers of NumPy": reading(lambda m, y: np.random.rand() < 2),
    "secret numbers": reading(lambda m, y: secrets.randbits(3) < 8),
}


def _counts(model: Any, y: Tensor) -> bool:
    model.calls = getattr(model, "calls", 0) + 1
    return bool(model.calls < 1000)


CALLS = itertools.count()

AMBIENT: dict[str, Callable[[], nn.Module]] = {
    "the clock": reading(lambda m, y: time.time() > 0),
    "a clock of the process": reading(lambda m, y: time.perf_counter() >= 0),
    "the date": reading(lambda m, y: datetime.datetime.now().year > 2000),
    "the environment": reading(lambda m, y: os.environ.get("HOME") != "nowhere"),
    "a name in the environment": reading(lambda m, y: "NOWHERE" not in os.environ),
    "the working directory": reading(lambda m, y: bool(os.getcwd())),
    "whether a file exists": reading(lambda m, y: not os.path.exists("nowhere")),
    "a global counter": reading(lambda m, y: next(CALLS) < 1000),
}

EVERY = HOOKS | MEMORY | READS | CHANCE | AMBIENT


@pytest.mark.parametrize("make", EVERY.values(), ids=EVERY)
def test_inference_verifies_nothing(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    laws = conserved.recognize(make(), torch.randn(5, 3))
    assert [symmetry.name for symmetry in laws if laws.verdict(symmetry.name).holds] == []


CERTIFIED = EVERY | OUTSIDE | {"a count of calls": reading(_counts)}


@pytest.mark.parametrize("make", CERTIFIED.values(), ids=CERTIFIED)
def test_certify_refuses_it(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    with pytest.raises(UnsuitableError):
        conserved.certify(make(), torch.randn(3))


def test_the_plain_model_is_proved() -> None:
    torch.manual_seed(0)
    model = Two()
    laws = conserved.recognize(model, torch.randn(5, 3))
    assert all(laws.verdict(symmetry.name) == Verdict.VERIFIED for symmetry in laws)
    certificate = conserved.certify(copy.deepcopy(model), torch.randn(3))
    assert (certificate.verdict.status, certificate.found, certificate.at_most) == (Verdict.PROVED, 4, 4)


def test_a_callable_that_reads_its_parameters_from_outside_is_refused() -> None:
    start = {"a": torch.ones(2, dtype=torch.float64), "b": torch.ones(2, dtype=torch.float64)}

    def f(p: Any, x: Tensor) -> Tensor:
        return p["a"] * p["b"] * start["a"].detach().sum() * x

    with pytest.raises(UnsuitableError, match="reads a from outside"):
        conserved.certify(f, torch.zeros(2), params=start)


@pytest.mark.parametrize(
    ("tensor", "overlaps"),
    [
        (torch.zeros(4, 3), False),
        (torch.zeros(4, 3).T, False),
        (torch.zeros(8, 6)[::2, ::3], False),
        (torch.zeros(3).expand(4, 3), True),
        (torch.zeros(3)[None].expand(1, 3), False),
        (torch.as_strided(torch.zeros(6), (4, 3), (1, 1)), True),
        (torch.as_strided(torch.zeros(20), (3, 2), (2, 3)), False),
        (torch.as_strided(torch.zeros(20), (4, 3), (2, 3)), True),
        (torch.zeros(()), False),
        (torch.zeros(0, 3), False),
    ],
)
def test_whether_a_tensor_overlaps_itself(tensor: Tensor, overlaps: bool) -> None:
    assert overlaps_itself(tensor) is overlaps


class TestBetweenForwardAndBackward:
    """`recognize` may be called while a graph is alive, and the graph is differentiated afterwards."""

    @pytest.mark.parametrize("name", ["Bert", "Gemma2"])
    def test_models_of_transformers(self, name: str) -> None:
        transformers = pytest.importorskip("transformers")
        sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        more = {"intermediate_size": 32, "max_position_embeddings": 16}
        if name == "Gemma2":
            more |= {"num_key_value_heads": 1, "head_dim": 8}
        config = getattr(transformers, f"{name}Config")(**sizes, **more)
        kind = "ForMaskedLM" if name == "Bert" else "ForCausalLM"
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}{kind}")(config).eval()
        ids = torch.randint(1, 50, (2, 8))
        model(input_ids=ids, labels=ids).loss.backward()
        expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        saved = [(t, t._version, t.data_ptr()) for t in (*model.parameters(), *model.buffers())]
        assert len(conserved.recognize(model, input_ids=ids))
        assert all(t._version == version and t.data_ptr() == index for t, version, index in saved)
        loss.backward()
        assert all(torch.equal(p.grad, expected[n]) for n, p in model.named_parameters() if n in expected)

    def test_running_statistics_are_as_before_and_the_graph_is_alive(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3))
        x = torch.randn(4, 2, 8)
        loss = model(x).square().sum()
        saved = {name: buffer.clone() for name, buffer in model.named_buffers()}
        conserved.recognize(model, x)
        assert all(torch.equal(buffer, saved[name]) for name, buffer in model.named_buffers())
        loss.backward()

    def test_hooks_of_a_data_parallel_wrapper_stay_on_the_node_that_accumulates(self) -> None:
        model = Two()
        node = torch.autograd.graph.get_gradient_edge(model.a.weight).node
        calls: list[int] = []
        node.register_hook(lambda *_: calls.append(1))
        laws = conserved.recognize(model, torch.randn(5, 3))
        assert laws.checked is not None
        assert laws.checked.points > 0
        model(torch.randn(5, 3)).sum().backward()
        assert calls == [1]
