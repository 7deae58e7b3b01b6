"""How well inferred laws are known: tested on the program in float64, never called proved; spoiled ones are seen."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import program_grammar
from conserved import LawSet, Symmetry, Verdict, blocks, recognize
from conserved.inference import infer
from conserved.inference.types.signed_sets import SignedSets
from conserved.inference.validation.program_check import POINTS, check_on_program
from conserved.symmetry import GeneralLinear, Leg, Scaling
from conserved.verdict import Status
from law_checks import check as check_laws
from law_checks import subject


def decoder() -> tuple[nn.Module, Tensor, str]:
    return blocks.DecoderLM(12, 8, 2, 4, 6, kv_heads=2), torch.tensor([[0, 4, 2, 6, 1], [3, 3, 9, 11, 5]]), "any"


class Fused(nn.Module):
    """Attention with one map for queries, keys and values, biases, and a learned key."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, add_bias_kv=True)
        self.up, self.down = nn.Linear(4, 3), nn.Linear(3, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention(x, x, x, need_weights=False)[0]
        return self.down(F.relu(self.up(y)))


class Scan(nn.Module):
    """A state that starts at zero, a gate, a convolution that pads, a batch norm, a share, a look-up."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.gate, self.write = nn.Embedding(7, 4), nn.Linear(4, 3), nn.Linear(4, 3, bias=False)
        self.conv, self.norm, self.head = nn.Conv1d(3, 4, 3, padding=1), nn.BatchNorm1d(4), nn.Linear(4, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        state, states = torch.zeros(tokens.shape[0], 3), []
        for t in range(tokens.shape[1]):
            state = torch.sigmoid(self.gate(x[:, t])) * state + self.write(x[:, t])
            states.append(state)
        y = self.norm(self.conv(torch.stack(states, -1))).transpose(1, 2)
        return self.head(F.relu(y))


TOKENS = torch.tensor([[0, 4, 2, 6, 1]])

MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor, str]]] = {
    "rotary grouped decoder": decoder,
    "fused attention and ReLU": lambda: (Fused(), torch.randn(2, 3, 4), "any"),
    "layer norm": lambda: (
        nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)),
        torch.randn(5, 3),
        "any",
    ),
    "rotary attention": lambda: (blocks.Attention(dim=8, heads=2, rotary=True), torch.randn(1, 3, 8), "any"),
    "scan": lambda: (Scan(), TOKENS.expand(3, -1), "cross_entropy"),
}


@cache
def inferred(model: str) -> tuple[LawSet, Any]:
    """The laws of a model, and how to hold others against the same program."""
    torch.manual_seed(0)
    module, x, loss = MODELS[model]()
    _, program, run = infer._infer(module, (x,), {}, loss)

    def checked(other: LawSet) -> LawSet:
        return check_on_program(other, program, run, classes=-1 if loss == "cross_entropy" else None)

    return recognize(module, x, loss=loss), checked


@pytest.mark.parametrize("model", MODELS)
def test_every_law_is_verified_and_none_is_called_proved(model: str) -> None:
    laws, _ = inferred(model)
    assert len(laws) > 2
    for symmetry in laws:
        verdict = laws.verdict(symmetry.name)
        assert verdict.status is Status.VERIFIED, (symmetry.name, str(verdict))
        assert verdict.evidence[0].samples == POINTS


def test_all_kinds_of_laws_occur_among_them() -> None:
    kinds = {symmetry.kind.code for model in MODELS for symmetry in inferred(model)[0]}
    assert kinds == {"general_linear", "complex_scaling", "scaling", "one_scale", "translation"}


def test_a_law_up_to_epsilon_is_verified_with_epsilon_at_zero() -> None:
    laws, _ = inferred("rotary grouped decoder")
    stream = next(symmetry for symmetry in laws if symmetry.epsilon)
    verdict = laws.verdict(stream.name)
    assert verdict == Verdict.VERIFIED
    assert "ε" in verdict.scope
    assert laws.checked is not None
    assert laws.checked.residuals[stream.name] < 1e-10


def test_a_law_up_to_epsilon_that_is_not_a_law_is_left_out() -> None:
    laws, checked = inferred("rotary grouped decoder")
    stream = next(symmetry for symmetry in laws if symmetry.epsilon)
    half = replace(stream, legs=stream.legs[:-1])
    remaining = checked(replace(laws, symmetries=(half,)))
    assert not len(remaining)
    assert [item.name for item in remaining.dropped][-1] == half.name


def other_degree(law: Symmetry) -> Symmetry | None:
    """One leg moves the other way."""
    if len(law.legs) < 2:
        return None
    return replace(law, legs=(Leg(law.legs[0].view, -law.legs[0].degree), *law.legs[1:]))


def leg_left_out(law: Symmetry) -> Symmetry | None:
    """One of the parameters stays where it is."""
    return replace(law, legs=law.legs[1:]) if len(law.legs) > 1 else None


def mixed_rows(law: Symmetry) -> Symmetry | None:
    """Scales are taken for a general linear group."""
    if not isinstance(law.kind, Scaling) or law.n < 2 or any(abs(leg.degree) != 1 for leg in law.legs):
        return None
    return replace(law, kind=GeneralLinear())


def _built(module: nn.Module, x: Tensor) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return module, (x,), {}


@pytest.mark.parametrize("mutation", [other_degree, leg_left_out, mixed_rows])
def test_a_spoiled_law_is_left_out(mutation: Callable[[Symmetry], Symmetry | None]) -> None:
    """Unless what came out is a law as well, which the tests' own backward pass says."""
    tried = 0
    for model in ("fused attention and ReLU", "layer norm"):
        laws, checked = inferred(model)
        module, x, loss = MODELS[model]()
        prepared = subject(partial(_built, module, x), loss="regression" if loss == "any" else loss)
        for law in laws:
            spoiled = mutation(law) if law.exact else None
            if spoiled is None:
                continue
            other = replace(laws, symmetries=(spoiled,))
            wrong = bool(check_laws(other, prepared, moves=False).wrong)
            assert (not len(checked(other))) == wrong, (law.name, mutation.__name__)
            tried += wrong
    assert tried >= 1


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


class CheckpointFunction(Doubled):
    """Called as torch's own is, and nothing like it."""


class Around(Doubled):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return checkpoint(torch.mul, x, 2, use_reentrant=True)


class Within(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.b(self.function(self.a(x)))


@pytest.mark.parametrize("function", [Doubled, CheckpointFunction, Around])
def test_assumed_laws_are_not_verified(function: Any) -> None:
    laws = recognize(Within(function.apply), torch.randn(5, 3))
    assert [laws.verdict(symmetry.name).status for symmetry in laws] == [Status.INCONCLUSIVE]
    assert "author" in laws.verdict(laws.symmetries[0].name).message


@pytest.mark.parametrize("reentrant", [True, False])
def test_laws_through_checkpoints_of_torch_are_verified(reentrant: bool) -> None:
    model = Within(lambda x: checkpoint(torch.mul, x, 2, use_reentrant=reentrant))
    laws = recognize(model, torch.randn(5, 3))
    assert [laws.verdict(symmetry.name).status for symmetry in laws] == [Status.VERIFIED]
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("seed", range(0, 60, 12))
def test_laws_of_random_programs_pass_and_spoiled_ones_do_not(seed: int) -> None:
    """Laws with rows paired across, which the tests' own backward pass refutes, are left out."""
    program, x, loss, words = program_grammar.compose(seed)
    laws, captured, run = infer._infer(program, (x,), {}, "cross_entropy" if loss == "cross_entropy" else "any")
    classes = -1 if loss == "cross_entropy" else None
    assert not check_on_program(laws, captured, run, classes=classes).dropped[len(laws.dropped) :], words
    spoiled = laws.baselines()
    wrong = check_laws(spoiled, subject(program_grammar.build(seed), loss=loss), moves=False).wrong
    remaining = check_on_program(spoiled, captured, run, classes=classes)
    assert not [law.name for law in remaining if law.exact and law.name in wrong], words


@pytest.mark.parametrize("seed", range(20))
def test_sets_of_equal_and_opposite_numbers_are_those_of_a_naive_closure(seed: int) -> None:
    """Merging many at a time against propagating one equation after the other until nothing changes."""
    generator = np.random.default_rng(seed)
    count, equations = 12, int(generator.integers(1, 14))
    left, right = generator.integers(0, count, (2, equations))
    signs = generator.choice([-1, 1], equations)
    sets = SignedSets()
    sets.grow(count)
    torn = [sets.join(left[signs == s], right[signs == s], int(s)) for s in (1, -1)]
    root, sign = sets.roots()
    vanish = np.isin(root, sets.find(np.concatenate(torn))[0])
    rows = np.zeros((equations, count))
    for n, (a, b, s) in enumerate(zip(left, right, signs, strict=True)):
        rows[n, a] += 1
        rows[n, b] -= s
    kernel = np.linalg.svd(rows)[2][np.linalg.matrix_rank(rows) :]
    for a in range(count):
        assert vanish[a] == bool(np.allclose(kernel[:, a], 0))
        if not vanish[a]:
            assert np.allclose(kernel[:, a], sign[a] * kernel[:, root[a]])
    assert len(set(root[~vanish])) == kernel.shape[0]


class Copied(torch.autograd.Function):
    """The identity, by a kernel that is given pointers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.zeros(x.shape, dtype=x.dtype)
        ctypes.memmove(out.data_ptr(), x.data_ptr(), x.numel() * x.element_size())
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


@pytest.mark.parametrize("function", [Doubled, Copied])
def test_no_law_is_read_through_a_function_that_was_bound_to_c(function: Any) -> None:
    """In PyTorch 2.15 that is what `op = Doubled.apply` binds; here it is beneath what is public."""
    applied = vars(torch._C._FunctionBase)["apply"].__get__(None, function)
    assert len(recognize(Within(applied), torch.randn(5, 3))) == 0


class SoftmaxWithoutCorrection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        shares = x.softmax(-1)
        ctx.save_for_backward(shares)
        return shares

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (shares,) = ctx.saved_tensors
        result: Tensor = shares * grads[0]
        return result


def test_a_shift_that_ends_in_a_function_with_a_backward_of_its_own_is_not_verified() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.head = nn.Linear(4, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(SoftmaxWithoutCorrection.apply(self.router(x)).tanh())

    model, x = Router(), torch.randn(6, 4)
    laws = recognize(model, x)
    model(x).square().mean().backward()
    assert len(laws)
    assert min(laws.residuals().values()) > 0.1
    assert all(symmetry.source == "assumed" for symmetry in laws)
    assert all(laws.verdict(symmetry.name).status is Status.INCONCLUSIVE for symmetry in laws)


@pytest.mark.parametrize("sort", ["register_prehook", "register_hook"])
def test_laws_of_a_parameter_with_a_hook_on_its_accumulator_are_assumed(sort: str) -> None:
    first = nn.Linear(3, 4)
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(4, 2))
    node: Any = torch.autograd.graph.get_gradient_edge(first.weight).node
    calls = []
    getattr(node, sort)(lambda *given: calls.append(given))
    laws = recognize(model, torch.randn(5, 3))
    assert [(law.source, laws.verdict(law.name).status) for law in laws] == [("assumed", Status.INCONCLUSIVE)]
    assert not calls
    model(torch.randn(5, 3)).sum().backward()
    assert len(calls) == 1


def test_laws_of_a_parameter_that_a_graph_holds_are_not_assumed() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    loss = model(torch.randn(5, 3)).sum()
    laws = recognize(model, torch.randn(5, 3))
    assert [law.source for law in laws] == ["typed"]
    loss.backward()
