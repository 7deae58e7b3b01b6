"""Weights that share memory though they are several parameters: every part of the library must see it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conserved import Status, audit, certify, discover, recognize
from conserved.blocks import Attention, FeedForward
from conserved.discovery import UnsuitableError
from conserved.inference.model_parts import parameters_of, parts_of
from conserved.laws.shared_memory import overlapping

pytestmark = pytest.mark.usefixtures("as_users_run_it")


class Pair(nn.Module):
    """Two linear maps in a row, and a third that is added."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3, bias=False)
        self.outer = nn.Linear(3, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x))


def networks() -> nn.Sequential:
    """Two ReLU networks in a row."""
    torch.manual_seed(0)
    return nn.Sequential(*(FeedForward(3, 4, activation="relu") for _ in range(2))).double()


def tied_networks() -> nn.Module:
    """The same, the input weights of the second those of the first, through `.data`."""
    model = networks()
    first, second = (part.get_parameter("up.weight") for part in model)
    second.data = first.data
    return model


def drift(model: nn.Module, names: set[str], rate: float) -> float:
    """How far the laws that an untied twin has move in gradient descent for a fixed time."""
    laws = recognize(networks()).select(lambda s: s.name in names)
    theta = dict(model.named_parameters())
    before = laws.values(theta)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    x = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for _ in range(round(0.4 / rate)):
        optimizer.zero_grad()
        (model(x) - x.roll(1, 0)).square().mean().backward()
        optimizer.step()
    after = laws.values(theta)
    return max(float((after[name] - before[name]).abs().max()) for name in before)


def test_a_law_of_weights_tied_through_data_drifts_at_every_step_size_and_is_not_listed() -> None:
    laws = recognize(tied_networks())
    tied = {"0.up.weight", "1.up.weight"}
    assert not any(tied & set(symmetry.parameters) for symmetry in laws)
    assert {item.name for item in laws.dropped if "shares memory with" in item.reason} == tied
    names = {symmetry.name for symmetry in recognize(networks()) if tied & set(symmetry.parameters)}
    coarse, fine = (drift(tied_networks(), names, rate) for rate in (0.02, 0.005))
    assert coarse > 1e-2
    assert fine > 0.9 * coarse, "a law's drift would be a quarter"


def test_laws_from_before_the_tie_are_neither_verified_nor_audited() -> None:
    model = networks()
    laws = recognize(model)
    first, second = (part.get_parameter("up.weight") for part in model)
    second.data = first.data
    x = torch.randn(8, 3, dtype=torch.float64)
    verdict = laws.verify(lambda: model(x).square().mean())
    assert verdict.status is Status.INCONCLUSIVE
    assert "shares memory" in verdict.message
    model(x).square().mean().backward()
    result = audit(model, laws)
    assert not result.ok
    assert not result.rows
    assert "shares memory" in result.summary()
    # Inferred now, the two output maps have a law of their own, and the tied ones have none.
    result = audit(model)
    assert [row.parameters for row in result.rows] == [("0.down.weight", "1.down.weight")]
    assert "shares memory" in result.summary()


def test_counting_and_proving_take_weights_tied_through_data_for_one_parameter() -> None:
    def tied(how: Callable[[Pair], None]) -> nn.Module:
        torch.manual_seed(0)
        model = Pair().double()
        how(model)
        return model

    def through_data(model: Pair) -> None:
        model.outer.weight.data = model.inner.weight.data

    def as_one(model: Pair) -> None:
        model.outer.weight = model.inner.weight

    x = torch.zeros(3)
    alike, one, two = (discover(tied(how), x) for how in (through_data, as_one, lambda model: None))
    assert (alike.parameters, alike.count) == (one.parameters, one.count) == (9, 0)
    assert (two.parameters, two.count) == (18, 6)
    assert certify(tied(through_data), x).at_most == 0
    assert recognize(nn.Sequential(*tied(through_data).children())).numbers == 0


def overlapped(model: Attention) -> None:
    both = torch.randn(9, 4, dtype=torch.float64)
    model.q.weight.data, model.k.weight.data = both[:8], both[1:]


def as_buffer(model: Attention) -> None:
    model.register_buffer("copy", model.q.weight.data)


def as_attribute(model: Attention) -> None:
    model.copy = model.q.weight.data


@pytest.mark.parametrize("how", [overlapped, as_buffer, as_attribute])
def test_a_parameter_that_is_part_of_something_else_loses_its_laws_and_cannot_be_counted(
    how: Callable[[Attention], None],
) -> None:
    model = Attention(4, 2, head_dim=4) if how is overlapped else Attention(4, 2)
    model = model.double()
    how(model)
    laws = recognize(model)
    if how is overlapped:
        assert {symmetry.family for symmetry in laws} == {"value_output"}
        assert all("shares memory" in item.reason for item in laws.dropped)
    else:
        # What the forward pass does not read takes no law away.
        assert {symmetry.family for symmetry in laws} == {"query_key", "value_output"}
    with pytest.raises(UnsuitableError, match=r"[qk]\.weight, which shares memory with"):
        discover(model, torch.zeros(3, 4))


def test_parameters_in_one_buffer_that_do_not_overlap_keep_their_laws() -> None:
    """Flat buffers of optimizers and data parallelism, and columns of one matrix that interleave."""
    model = Attention(4, 2).double()
    flat = torch.randn(4, 16, dtype=torch.float64)
    for number, name in enumerate("qkvo"):
        model.get_submodule(name).weight.data = flat.view(4, 4, 4)[number]
    assert recognize(model).numbers == 12
    for number, name in enumerate("qkvo"):
        model.get_submodule(name).weight.data = flat[:, number::4]
    assert recognize(model).numbers == 12
    assert overlapping(dict(model.named_parameters())) == {}


def test_an_lstm_and_a_tied_head_are_as_before() -> None:
    assert overlapping(dict(nn.LSTM(4, 4).named_parameters())) == {}
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    assert overlapping(dict(model.named_parameters(remove_duplicate=False))) == {}


class Prefixed(nn.Linear):
    """Lists its parameters under other names, as wrappers that shard do."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return ((f"flat.{name}", parameter) for name, parameter in super().named_parameters(*args, **kwargs))


def _tied() -> nn.Sequential:
    shared = nn.Linear(3, 3)
    model = nn.Sequential(nn.Embedding(5, 3), shared, nn.ReLU(), shared, nn.Linear(3, 5, bias=False), nn.LSTM(5, 2))
    model[4].weight = model[0].weight
    model.register_parameter("absent", None)
    model.append(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    return model


@pytest.mark.parametrize("make", [_tied, lambda: nn.Linear(2, 2), nn.Identity, lambda: Prefixed(2, 3)])
def test_parameters_listed_without_names_are_those_that_torch_lists(make: Callable[[], nn.Module]) -> None:
    model = make()
    for _ in range(2):
        parts = parts_of(model)
        assert list(parameters_of(parts).items()) == list(model.named_parameters())
        assert {*map(id, parts.parameters)} == {*map(id, model.parameters())}


def _replace(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(torch.zeros(5, 3))


def _rename(model: nn.Sequential) -> None:
    model[1].register_parameter("other", model[1]._parameters.pop("bias"))


def _move(model: nn.Sequential) -> None:
    """The last of one part becomes the first of the next, under its old name."""
    first, second = model[7], model[8]
    part = first._modules.pop("b")
    second._modules = {"b": part, **second._modules}


def _rename_part(model: nn.Sequential) -> None:
    model.other = model._modules.pop("8")


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "a part moves": _move,
    "a part is renamed": _rename_part,
    "a part without parameters gets one": lambda model: setattr(model[2], "bias", nn.Parameter(torch.zeros(3))),
    "a part gets parts": lambda model: setattr(model[2], "inside", nn.ReLU()),
    "a part is of another class": lambda model: setattr(model[2], "__class__", nn.Tanh),
    "a parameter is replaced": _replace,
    "a parameter is renamed": _rename,
    "a parameter is added": lambda model: model.register_parameter("absent", nn.Parameter(torch.zeros(2))),
    "a parameter is frozen": lambda model: model[1].bias.requires_grad_(False),
    "a part is added": lambda model: model.append(nn.ReLU()),
    "a part is replaced": lambda model: model.__setitem__(2, nn.GELU()),
    "a part evaluates": lambda model: model[2].eval(),
    "a part has another forward": lambda model: setattr(model[2], "forward", torch.abs),
    "weights are untied": lambda model: setattr(model[4], "weight", nn.Parameter(torch.zeros(5, 3))),
}


@pytest.mark.parametrize("change", [*CHANGES.values()], ids=[*CHANGES])
def test_the_state_of_a_model_tells_a_change(change: Callable[[nn.Sequential], object]) -> None:
    model = _tied()
    model.append(nn.ModuleDict({"a": nn.Tanh(), "b": nn.Linear(2, 1)}))
    model.append(nn.ModuleDict({"c": nn.Linear(2, 1)}))
    before = parts_of(model)
    assert list(parameters_of(before).items()) == list(model.named_parameters())
    assert before.state == parts_of(model).state
    change(model)
    after = parts_of(model)
    assert before.state != after.state
    assert list(parameters_of(after).items()) == list(model.named_parameters())


def test_the_parts_of_a_model_are_not_kept_alive() -> None:
    model = _tied()
    parameters_of(parts_of(model))
    parts_of(model)
    gone: list[weakref.ref[nn.Module]] = [weakref.ref(model), weakref.ref(model[1])]
    del model
    gc.collect()
    assert [one() for one in gone] == [None, None]


def test_a_part_that_is_gone_is_noticed() -> None:
    model = _tied()
    parts_of(model)
    model[2] = nn.Identity()
    gc.collect()
    assert list(parameters_of(parts_of(model)).items()) == list(model.named_parameters())
