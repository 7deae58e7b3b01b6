"""Every way of evaluating moment maps against naive loops: both backends, at once and in portions."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from as_written import import_as_written
from conserved.moment import Direction, LawPairs, Magnitudes, Moments, Pair, Plan, Point, Source, triton_backend
from conserved.moment.forms import WantedNumbers
from conserved.moment.portions import in_portions as read_in_portions
from conserved.moment.sources import GatheredTensors
from conserved.symmetry import KINDS, Leg, OuterProduct, Pick, RowProducts, Symmetry, View
from reference.moment_map import BY_CODE
from tolerances import AGREE

PAIRS = ((0, 1), (0, 0), (1, 0), (1, 1))
"""Of a point and a direction."""


@dataclass(frozen=True)
class DrawnLeg:
    rows: int
    columns: int
    transposed: bool
    degree: float
    offset: float
    heads: bool
    """Whether every symmetry sees a head of its own, and not all of them the same."""
    picked: tuple[int, ...] | None

    def leg(self, name: str, head: int, heads: int) -> Leg:
        faced = self.rows if self.picked is None else self.rows + 2
        grid = (self.columns, heads, faced) if self.transposed else (heads, faced, self.columns)
        axes, pick = (2, 1) if self.transposed else (1, 0)
        shape = (self.columns, heads * faced) if self.transposed else (heads * faced, self.columns)
        chosen: dict[int, Pick] = {pick: head if self.heads else 0}
        view = View.of(name, shape, grid=grid, axes=axes, pick=chosen, rows=self.picked, offset=self.offset)
        return Leg(view, self.degree)


@dataclass(frozen=True)
class Drawn:
    """Symmetries of one kind that differ by the heads they see, in two layers."""

    code: str
    heads: int
    legs: tuple[DrawnLeg, ...]
    seed: int

    def symmetries(self) -> list[Symmetry]:
        return [
            Symmetry(
                block=f"layer{layer}",
                family="f",
                part=str(head),
                kind=KINDS[self.code],
                legs=tuple(leg.leg(f"{layer}.w{k}", head, self.heads) for k, leg in enumerate(self.legs)),
            )
            for layer in range(2)
            for head in range(self.heads)
        ]


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    code = draw(st.sampled_from(sorted(KINDS)))
    kind = KINDS[code]
    sizes = st.integers(1, 4)
    unit = getattr(kind.products, "unit", 1)
    n = unit * draw(st.integers(1, 5 if unit == 1 else 3))
    m = draw(sizes)
    legs = []
    for _ in range(draw(st.integers(1, 3))):
        rows = n if kind.shared == "rows" else draw(sizes)
        order = draw(st.one_of(st.none(), st.permutations(range(rows + 2))))
        legs.append(
            DrawnLeg(
                rows=rows,
                columns=m if kind.shared == "columns" else draw(sizes),
                transposed=draw(st.booleans()),
                degree=draw(st.sampled_from([1.0, -1.0, 2.0, -0.5] if kind.weighted else [1.0, -1.0])),
                offset=draw(st.sampled_from([0.0, 1.0])),
                heads=draw(st.booleans()),
                picked=None if order is None else tuple(order[:rows]),
            )
        )
    return Drawn(code, draw(st.integers(1, 3)), tuple(legs), draw(st.integers(0, 2**30)))


def sources_of(symmetries: Sequence[Symmetry], seed: int, dtype: torch.dtype) -> tuple[Point, Direction]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {leg.view.parameter: leg.view.shape for symmetry in symmetries for leg in symmetry.legs}
    theta, grads = (
        {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()} for _ in range(2)
    )
    return Point(theta), Direction(grads)


def slowly(symmetry: Symmetry, sources: tuple[Point, Direction], i: int, j: int) -> Tensor:
    """μ by loops over entries; a translation acts on points alone."""
    a, b = (
        [
            (leg.view.of_point if k == 0 else leg.view.matrix)(sources[k].tensors[leg.view.parameter]).double()
            for leg in symmetry.legs
        ]
        for k in (i, j)
    )
    result = BY_CODE[symmetry.kind.code](symmetry.degrees, a, b)
    return torch.zeros_like(result) if symmetry.kind.linear and i == 1 else result


Way = Callable[..., Moments]


def at_once(plan: Plan, sources: Sequence[Source], pairs: Sequence[Pair], *, sizes: bool = False) -> Moments:
    return plan.evaluate(sources, pairs, sizes=sizes)


def in_portions(plan: Plan, sources: Sequence[Source], pairs: Sequence[Pair], *, sizes: bool = False) -> Moments:
    wanted = WantedNumbers(
        isinstance(pairs, LawPairs), any(isinstance(source, Magnitudes) for source in sources), sizes
    )
    return Moments(len(plan.symmetries), read_in_portions(plan, GatheredTensors(sources, tuple(pairs)), wanted, None))


def in_kernels(plan: Plan, sources: Sequence[Source], pairs: Sequence[Pair], *, sizes: bool = False) -> Moments:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(triton_backend, "available", lambda device: True)
        return plan.evaluate(sources, pairs[:1] if sizes else pairs, sizes=sizes)


def holds(way: Way, case: Drawn, dtype: torch.dtype) -> None:
    symmetries = case.symmetries()
    plan, sources = Plan.of(symmetries), sources_of(symmetries, case.seed, dtype)
    close = partial(torch.testing.assert_close, rtol=AGREE[dtype], atol=AGREE[dtype])
    everything, laws = way(plan, sources, PAIRS), way(plan, sources, LawPairs(PAIRS))
    sizes = way(plan, sources, PAIRS, sizes=True)
    bounds = way(plan, [Magnitudes(source) for source in sources], LawPairs(PAIRS)).values(1)
    for number, (i, j) in enumerate(PAIRS):
        values, parts = everything.values(number), laws.values(number)
        for symmetry, value, part in zip(symmetries, values, parts, strict=True):
            expected = slowly(symmetry, sources, i, j)
            assert value.dtype == dtype
            close(value.double(), expected)
            close(symmetry.moment_map(sources[i], sources[j]).double(), expected)
            symmetric = symmetry.kind.products.polar(part)
            close(symmetric.double(), symmetry.kind.products.polar(symmetry.kind.conserved(expected)))
    absolute = Point({name: tensor.abs() for name, tensor in sources[0].tensors.items()})
    plain = all(leg.view.offset == 0 for one in symmetries for leg in one.legs)
    indices, tables = sizes.sizes()
    norms = dict(zip(indices, torch.cat([table.double() for table in tables])[:, 0].tolist(), strict=True))
    for index, symmetry in enumerate(symmetries):
        size = float(slowly(symmetry, sources, 0, 1).norm())
        assert norms[index] == pytest.approx(size, rel=AGREE[dtype], abs=AGREE[dtype])
        if plain:
            positive = replace(symmetry, legs=tuple(Leg(leg.view, abs(leg.degree)) for leg in symmetry.legs))
            expected = symmetry.kind.conserved(slowly(positive, (absolute, sources[1]), 0, 0))
            close(bounds[index].double(), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("way", [at_once, in_portions], ids=["at once", "in portions"])
@given(drawn())
@settings(max_examples=25, deadline=None)
def test_moment_maps_are_those_of_naive_loops(way: Way, dtype: torch.dtype, case: Drawn) -> None:
    holds(way, case, dtype)


def test_copies_are_of_what_is_planned_and_not_of_what_was_worked_out_since() -> None:
    symmetry = Symmetry(block="", family="f", kind=KINDS["scaling"], legs=(Leg(View.of("w", (4, 3))),))
    theta = {"w": torch.randn(4, 3)}
    values, plan = symmetry.law(theta), symmetry.plan
    for made in (copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):
        again, planned = made(symmetry), made(plan)
        assert again == symmetry
        assert {*vars(again)} == {field.name for field in fields(Symmetry)}
        assert {*vars(planned)} == {field.name for field in fields(Plan)}
        assert torch.equal(again.law(theta), values)
        assert torch.equal(planned.evaluate([Point(theta)], LawPairs([(0, 0)])).values()[0], values)


@given(drawn())
@settings(max_examples=6, deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])
def test_kernels_give_what_naive_loops_give(case: Drawn) -> None:
    pytest.importorskip("triton")
    import_as_written("conserved.moment.kernels")
    holds(in_kernels, case, torch.float32)


@pytest.mark.parametrize("kind", KINDS.values(), ids=repr)
def test_a_kind_is_mathematics_alone(kind: object) -> None:
    products = getattr(kind, "products")  # noqa: B009
    assert isinstance(products, RowProducts | OuterProduct)
    if isinstance(products, RowProducts):
        # What is not symmetric comes in opposite pairs, so that it vanishes on (θ, θ).
        for number in products.antisymmetric:
            terms = {(t.first, t.second, t.sign) for t in products.into(number)}
            assert terms == {(second, first, -sign) for first, second, sign in terms}
