"""Units, heads and streams that may be moved; two checkpoints brought together; one representative of an orbit."""

from __future__ import annotations

import copy
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from catalogue import named
from conserved import LawSet, Symmetry
from conserved.transform import align, canonical, equalize, exchanges, fingerprint, move, symmetries_of
from conserved.transform.aligning import nearest
from conserved.transform.coupling import keeping_ones
from conserved.transform.lawless_kinds import assignment
from test_transform_move import difference, outputs

pytestmark = pytest.mark.filterwarnings("ignore")


def two_layers() -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 9), nn.GELU(), nn.Linear(9, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    return model, torch.randn(4, 5, dtype=torch.float64)


def scrambled(model: nn.Module, laws: LawSet, swaps: list[Symmetry]) -> nn.Module:
    """The same function at a random place of its orbit."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(5)
    elements = {s: s.element(generator=generator) for s in laws if s.exact}
    move(other, elements | {s: s.element(generator=generator) for s in swaps})
    return other


def test_units_of_any_activation_are_found_and_nothing_else() -> None:
    model, x = two_layers()
    result = exchanges(model, x)
    assert [s.n for s in result] == [9, 6]
    assert {s.parameters for s in result} == {("0.weight", "0.bias", "2.weight"), ("2.weight", "2.bias", "4.weight")}


def test_units_are_found_behind_operations_in_place() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh_(self.a(x).add_(0.5)))

    (units,) = exchanges(InPlace(), torch.randn(3, 3))
    assert units.parameters == ("a.weight", "a.bias", "b.weight")


def test_units_that_differ_are_not_exchanged() -> None:
    class Different(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x) * torch.arange(1.0, 5.0)))

    assert exchanges(Different(), torch.randn(3, 3)) == []


def test_heads_units_and_the_stream_of_a_transformer() -> None:
    case = named("nanoGPT, width 4").subject()
    case.model.eval()
    result = exchanges(case.model, *case.args, **case.kwargs)
    before = outputs(case.model, case.args, case.kwargs)
    assert {"heads", "units"} == {s.family for s in result}
    stream = max(result, key=lambda s: len(s.legs))
    assert any("wte" in name for name in stream.parameters)
    move(case.model, {s: s.element(generator=torch.Generator().manual_seed(3)) for s in result})
    assert difference(before, outputs(case.model, case.args, case.kwargs)) < 1e-10


def test_assignments_are_the_best_of_all_permutations() -> None:
    score = torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    best = max(permutations(range(6)), key=lambda order: float(score[range(6), order].sum()))
    assert assignment(score).tolist() == list(best)


@pytest.mark.parametrize("model", ["ReLU", "linear"])
def test_no_element_near_by_is_nearer_than_the_nearest(model: str) -> None:
    torch.manual_seed(0)
    nets: list[Any] = [
        nn.Sequential(nn.Linear(4, 5), *([nn.ReLU()] if model == "ReLU" else []), nn.Linear(5, 6)).double()
        for _ in range(2)
    ]
    (symmetry,) = symmetries_of(nets[0], torch.randn(2, 4, dtype=torch.float64))
    goal, mine = ({n: p.detach() for n, p in net.named_parameters()} for net in nets)

    def cost(state: Any) -> float:
        return sum(float((goal[n] - state[n]).square().sum()) for n in symmetry.parameters)

    element = nearest(symmetry, goal, mine)
    assert element is not None
    moved = symmetry.act(mine, element)
    assert cost(moved) < cost(mine)
    for seed in range(20):
        near = symmetry.element(spread=1e-2, generator=torch.Generator().manual_seed(seed))
        assert cost(symmetry.act(moved, near)) >= cost(moved) * (1 - 1e-9)


@pytest.mark.parametrize("name", ["two layers", "llama2.c, width 4", "nanoGPT, width 4"])
def test_checkpoints_that_differ_by_a_gauge_are_brought_together_and_have_one_representative(name: str) -> None:
    if name == "two layers":
        model, x = two_layers()
        args: Any = (x,)
        kwargs: Any = {}
    else:
        case = named(name).subject()
        model, args, kwargs = case.model.eval(), case.args, case.kwargs
    laws = symmetries_of(model, *args, **kwargs)
    swaps = exchanges(model, *args, laws=laws, **kwargs)
    other = scrambled(model, laws, swaps)
    prints = [fingerprint(one, laws=laws, exchanges=swaps) for one in (model, other)]
    assert prints[0].digest == prints[1].digest
    a, b = (canonical(one, laws=laws, exchanges=swaps) for one in (model, other))
    assert max(difference(a[n], b[n]) for n in a) < 1e-8
    before = outputs(other, args, kwargs)
    result = align(model, other, laws=laws, exchanges=swaps)
    assert result.before > 1
    assert result.after < 1e-6 * result.before
    assert max(result.remains.values()) < 1e-6
    assert difference(before, outputs(other, args, kwargs)) < 1e-10
    with torch.no_grad():
        next(iter(model.parameters())).mul_(1.02)
    changed = fingerprint(model, laws=laws, exchanges=swaps)
    assert changed.digest != prints[0].digest
    assert changed.difference(prints[0]) > 1e-3


def test_a_rotation_that_keeps_the_ones() -> None:
    rotation = keeping_ones(torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    torch.testing.assert_close(rotation @ rotation.mT, torch.eye(7, dtype=torch.float64))
    torch.testing.assert_close(rotation.sum(1), torch.ones(7, dtype=torch.float64))


@pytest.mark.parametrize(("name", "family"), [("llama2.c, mask, untied", "rotation"), ("nanoGPT, width 4", "")])
def test_a_stream_is_rotated_where_its_gains_can_be_folded(name: str, family: str) -> None:
    case = named(name).subject()
    with torch.no_grad():
        for p in case.model.parameters():
            if p.ndim == 1:
                p.copy_(p.abs() + 0.1)
    case.model.eval()
    before = outputs(case.model, case.args, case.kwargs)
    done = equalize(case.model, *case.args, objective="incoherent", **case.kwargs)
    rotated = [name for name in done.moved.moved if "rotation" in name]
    assert bool(rotated) == bool(family)
    assert difference(before, outputs(case.model, case.args, case.kwargs)) < 1e-6
