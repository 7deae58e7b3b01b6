"""The moment map against its definition and against naive loops, and its four consequences."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conserved.moment import Plan, row_dots
from conserved.symmetry import (
    KINDS,
    ComplexScaling,
    GeneralLinear,
    Kind,
    Leg,
    OneScale,
    RowProducts,
    Scaling,
    Symmetry,
    Term,
    Translation,
    View,
    moment_map,
)
from conserved.symmetry.evaluation import Evaluator, evaluator
from reference.moment_map import BY_CODE
from tolerances import AGREE, EXACT_STEP

Collection = dict[str, Tensor]


@dataclass(frozen=True)
class Draw:
    """A symmetry of any kind as plain data: (shape, transposed, degree) for each leg, and a seed for its values."""

    code: str
    legs: tuple[tuple[tuple[int, int], bool, float], ...]
    seed: int

    def build(self) -> tuple[Symmetry, int]:
        legs = tuple(
            Leg(View.of(f"w{index}", shape[::-1] if transposed else shape, axes=int(transposed)), degree)
            for index, (shape, transposed, degree) in enumerate(self.legs)
        )
        return Symmetry(block="b", family="f", kind=KINDS[self.code], legs=legs), self.seed


@st.composite
def symmetries(draw: st.DrawFn) -> Draw:
    code = draw(st.sampled_from(sorted(KINDS)))
    kind = KINDS[code]
    unit = getattr(kind.products, "unit", 1)
    n = unit * draw(st.integers(1, 5 if unit == 1 else 3))
    m = draw(st.integers(1, 4))
    sizes = st.integers(1, 4)
    degrees = st.sampled_from([1.0, -1.0, 2.0, -0.5] if kind.weighted else [1.0, -1.0])
    rows = st.just(n) if kind.shared == "rows" else sizes
    columns = st.just(m) if kind.shared == "columns" else sizes
    legs = draw(st.lists(st.tuples(st.tuples(rows, columns), st.booleans(), degrees), min_size=1, max_size=3))
    return Draw(code, tuple(legs), draw(st.integers(0, 2**30)))


def collections(symmetry: Symmetry, seed: int, count: int, dtype: torch.dtype = torch.float64) -> list[Collection]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {leg.view.parameter: torch.randn(leg.view.shape, generator=generator, dtype=dtype) for leg in symmetry.legs}
        for _ in range(count)
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@given(symmetries())
@settings(max_examples=60, deadline=None)
def test_moment_map_agrees_with_naive_loops(dtype: torch.dtype, drawn: Draw) -> None:
    symmetry, seed = drawn.build()
    a, b = collections(symmetry, seed, 2, dtype)
    naive = BY_CODE[symmetry.kind.code](symmetry.degrees, symmetry.matrices(a), symmetry.matrices(b))
    result = symmetry.moment_map(a, b)
    assert result.dtype == dtype
    assert torch.allclose(result, naive, rtol=AGREE[dtype], atol=AGREE[dtype])


@given(symmetries())
@settings(max_examples=60, deadline=None)
def test_moment_map_is_the_adjoint_of_the_generator(drawn: Draw) -> None:
    """⟨ξᵀ, μ(A, B)⟩ = d/dt Σ ⟨exp(tξ)·A_ℓ, B_ℓ⟩ at t = 0, with the group action as `act` performs it."""
    symmetry, seed = drawn.build()
    a, b = collections(symmetry, seed, 2)
    mu = symmetry.moment_map(a, b)
    xi = torch.randn(mu.shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)

    def paired(t: Tensor) -> Tensor:
        g = exponential(symmetry.kind, t * xi)
        moved = [symmetry.kind.act(g, leg.view.matrix(a[leg.view.parameter]), leg.degree) for leg in symmetry.legs]
        return sum(
            ((x * leg.view.matrix(b[leg.view.parameter])).sum() for x, leg in zip(moved, symmetry.legs, strict=True)),
            torch.zeros((), dtype=torch.float64),
        )

    if isinstance(symmetry.kind, GeneralLinear):
        mu = mu.mT
    grad = torch.func.jacfwd(paired)(torch.zeros((), dtype=torch.float64))
    assert float(grad) == pytest.approx(float((xi * mu).sum()), rel=1e-9, abs=1e-9)


def exponential(kind: Kind, xi: Tensor) -> Tensor:
    if isinstance(kind, GeneralLinear):
        return torch.linalg.matrix_exp(xi)
    if isinstance(kind, ComplexScaling):
        return torch.exp(torch.complex(xi[..., 0], xi[..., 1]))
    return xi if isinstance(kind, Translation) else torch.exp(xi)


@given(symmetries())
@settings(max_examples=60, deadline=None)
def test_the_step_formula_is_exact(drawn: Draw) -> None:
    symmetry, seed = drawn.build()
    theta, update = collections(symmetry, seed, 2)
    after = {name: theta[name] - update[name] for name in theta}
    change = symmetry.law(after) - symmetry.law(theta)
    assert torch.allclose(symmetry.drift(theta, update), change, rtol=0, atol=1000 * EXACT_STEP)


@given(symmetries())
@settings(max_examples=60, deadline=None)
def test_acting_twice_is_acting_with_the_product_and_the_inverse_undoes_it(drawn: Draw) -> None:
    symmetry, seed = drawn.build()
    (theta,) = collections(symmetry, seed, 1)
    g, later = (symmetry.element(generator=torch.Generator().manual_seed(seed + n)) for n in (0, 1))
    moved = symmetry.act(theta, g)
    back = symmetry.act(moved, symmetry.kind.inverse(g))
    assert all(torch.allclose(back[name], theta[name], rtol=1e-10, atol=1e-10) for name in theta)
    twice, once = symmetry.act(moved, later), symmetry.act(theta, symmetry.kind.compose(later, g))
    assert all(torch.allclose(twice[name], once[name], rtol=1e-10, atol=1e-10) for name in theta)


@given(st.integers(0, 2**30), st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_a_matrix_law_turns_with_rotations(seed: int, n: int) -> None:
    """h(g·θ) = g h(θ) gᵀ for orthogonal g: a law is equivariant under its own group, not constant along it."""
    symmetry = Symmetry(
        block="", family="f", kind=GeneralLinear(), legs=(Leg(View.of("q", (n, 3))), Leg(View.of("k", (n, 2)), -1))
    )
    (theta,) = collections(symmetry, seed, 1)
    g = torch.linalg.qr(symmetry.element(generator=torch.Generator().manual_seed(seed))).Q
    assert torch.allclose(symmetry.law(symmetry.act(theta, g)), g @ symmetry.law(theta) @ g.mT, atol=1e-12)


def test_a_gradient_law_of_translation_has_no_second_order_part() -> None:
    symmetry = Symmetry(block="", family="f", kind=Translation(), legs=(Leg(View.of("w", (3, 2))),))
    theta, update = {"w": torch.randn(3, 2)}, {"w": torch.randn(3, 2)}
    assert torch.equal(symmetry.drift(theta, update), -update["w"].sum(0))


@pytest.mark.parametrize(
    ("kind", "shape", "numbers", "identities", "group"),
    [
        (GeneralLinear(), (4, 7), 10, 16, "GL(4)"),
        (ComplexScaling(), (4, 7), 2, 4, "(C*)^2"),
        (Scaling(), (4, 7), 4, 4, "(R₊)^4"),
        (OneScale(), (4, 7), 1, 1, "R₊"),
        (Translation(), (4, 7), 7, 7, "(R^7, +)"),
    ],
    ids=lambda value: value.code if isinstance(value, Kind) else "",
)
def test_each_kind_counts_its_laws_and_identities(
    kind: Kind, shape: tuple[int, int], numbers: int, identities: int, group: str
) -> None:
    symmetry = Symmetry(block="layer", family="f", part="0", kind=kind, legs=(Leg(View.of("w", shape)),))
    theta = {"w": torch.randn(shape)}
    law = symmetry.law(theta)
    assert symmetry.numbers == numbers == kind.coordinates(law).numel()
    assert symmetry.identities == identities == symmetry.identity(theta, theta).numel()
    assert kind.units(law).numel() == law.numel()
    assert repr(symmetry) == f"<layer.f[0]: {group} on w (+); {numbers} conserved>"


FORMULAS = [
    (
        GeneralLinear(),
        [("q.weight", (4, 6), {}), ("o.weight", (6, 4), {"axes": 1})],
        "q.weight·q.weightᵀ − o.weightᵀ·o.weight",
        r"\mathtt{q.weight} \mathtt{q.weight}^{\top} - \mathtt{o.weight}^{\top} \mathtt{o.weight}",
    ),
    (
        ComplexScaling(),
        [("q", (4, 3), {}), ("k", (4, 3), {})],
        "‖q⁽ʲ⁾‖² − ‖k⁽ʲ⁾‖²",
        r"\lVert \mathtt{q}^{(j)} \rVert^{2} - \lVert \mathtt{k}^{(j)} \rVert^{2}",
    ),
    (
        Scaling(),
        [("down", (3, 4), {"axes": 1}), ("up_1", (4, 3), {})],
        "‖down[:,i]‖² − ‖up_1[i,:]‖²",
        r"\lVert \mathtt{down}_{:,i} \rVert^{2} - \lVert \mathtt{up\_1}_{i,:} \rVert^{2}",
    ),
    (
        OneScale(),
        [("a", (3, 4), {}), ("b", (2,), {})],
        "‖a‖² − ‖b‖²",
        r"\lVert \mathtt{a} \rVert^{2} - \lVert \mathtt{b} \rVert^{2}",
    ),
    (
        Translation(),
        [("e", (5, 4), {}), ("p", (2, 4), {})],
        "Σᵢ e[i,:] − Σᵢ p[i,:]",
        r"\sum_{i} \mathtt{e}_{i,:} - \sum_{i} \mathtt{p}_{i,:}",
    ),
]


@pytest.mark.parametrize(("kind", "views", "text", "latex"), FORMULAS, ids=[f[0].code for f in FORMULAS])
def test_laws_read_as_formulas(
    kind: Kind, views: list[tuple[str, tuple[int, ...], dict[str, int]]], text: str, latex: str
) -> None:
    legs = [View.of(name, shape, **options) for name, shape, options in views]  # type: ignore[arg-type]
    symmetry = Symmetry(block="", family="f", kind=kind, legs=(Leg(legs[0]), Leg(legs[1], -1)))
    assert symmetry.formula == text
    assert symmetry.latex == latex


def test_degrees_show_in_the_formula() -> None:
    legs = (Leg(View.of("a", (2, 2)), -2), Leg(View.of("b", (2, 2)), 1))
    symmetry = Symmetry(block="", family="f", kind=Scaling(), legs=legs)
    assert symmetry.formula == "−2·‖a[i,:]‖² + ‖b[i,:]‖²"
    assert "a (−2)" in repr(symmetry)


def test_squared_relu_is_a_weighted_scaling() -> None:
    """relu(s·z)² = s² relu(z)²: the incoming row has degree +1, the outgoing column −2."""
    up, down = torch.randn(4, 3, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    theta = {"up": up.requires_grad_(), "down": down.requires_grad_()}
    legs = (Leg(View.of("up", (4, 3))), Leg(View.of("down", (3, 4), axes=1), -2))
    symmetry = Symmetry(block="", family="neurons", kind=Scaling(), legs=legs)
    x = torch.randn(3, 6, dtype=torch.float64)

    def f(theta: Collection) -> Tensor:
        return theta["down"] @ torch.relu(theta["up"] @ x) ** 2

    g = symmetry.element()
    assert torch.allclose(
        f({n: t.detach() for n, t in theta.items()}), f(symmetry.act({n: t.detach() for n, t in theta.items()}, g))
    )
    gradients = dict(zip(theta, torch.autograd.grad(f(theta).sin().sum(), list(theta.values())), strict=True))
    weights = Symmetry(block="", family="wrong", kind=Scaling(), legs=(legs[0], Leg(legs[1].view, -1)))
    assert symmetry.identity(theta, gradients).abs().max() < 1e-12
    assert weights.identity(theta, gradients).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("legs", "kind", "message"),
    [
        ((), Scaling(), "at least one leg"),
        ((Leg(View.of("a", (2, 3))), Leg(View.of("b", (3, 3)), -1)), Scaling(), "same number of rows"),
        ((Leg(View.of("a", (2, 3))), Leg(View.of("b", (2, 2)), -1)), Translation(), "same number of columns"),
        ((Leg(View.of("a", (3, 3))),), ComplexScaling(), "a multiple of 2 rows for .*, got 3"),
        ((Leg(View.of("a", (3, 3)), 2),), GeneralLinear(), "degrees"),
        ((Leg(View.of("a", (3, 3)), 0),), Scaling(), "degree 0"),
    ],
    ids=["no legs", "rows differ", "columns differ", "odd pairs", "degree of GL", "degree zero"],
)
def test_impossible_symmetries_are_refused(legs: tuple[Leg, ...], kind: Kind, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Symmetry(block="", family="f", kind=kind, legs=legs)


def test_a_missing_parameter_is_named() -> None:
    symmetry = Symmetry(block="", family="f", kind=Scaling(), legs=(Leg(View.of("w", (2, 2))),))
    with pytest.raises(KeyError, match="without w"):
        symmetry.law({})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    symmetry = Symmetry(block="", family="f", kind=GeneralLinear(), legs=(Leg(View.of("w", (4, 64))),))
    weight = torch.randn(4, 64).to(dtype)
    assert torch.equal(symmetry.law({"w": weight}), weight.float() @ weight.float().mT)


def test_autocast_does_not_lower_the_precision() -> None:
    symmetry = Symmetry(block="", family="f", kind=GeneralLinear(), legs=(Leg(View.of("w", (4, 64))),))
    theta = {"w": torch.randn(4, 64)}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = symmetry.law(theta)
    assert torch.equal(result, symmetry.law(theta))


LONG = [(1500, 700), (64, 9000), (9000, 64), (700, 1500), (5, 200_001)]
"""Large enough that the product is taken in slices, with and without remainders."""


@pytest.mark.parametrize("shape", LONG, ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_long_row_dots_are_those_of_the_plain_product(shape: tuple[int, int], transposed: bool) -> None:
    a, b = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
    a, b = (a.mT, b.mT) if transposed else (a, b)
    assert torch.allclose(row_dots(a, b), (a * b).sum(-1), rtol=1e-11, atol=1e-11)


def test_long_row_dots_can_be_differentiated() -> None:
    a, b = (torch.randn(1500, 700, dtype=torch.float64).mT for _ in range(2))
    grad = torch.func.grad(lambda x: row_dots(x, b).sum())(a)
    assert torch.allclose(grad, b)


def test_weight_decay_shrinks_laws_exponentially() -> None:
    """μ(θ, λθ) = λh: one step of pure decay multiplies h by (1 − τλ)²."""
    symmetry = Symmetry(block="", family="f", kind=GeneralLinear(), legs=(Leg(View.of("w", (4, 6))),))
    theta = {"w": torch.randn(4, 6, dtype=torch.float64)}
    rate = 0.01
    drift = symmetry.drift(theta, {"w": rate * theta["w"]})
    assert torch.allclose(symmetry.law(theta) + drift, (1 - rate) ** 2 * symmetry.law(theta))
    assert math.isclose(
        float(moment_map(OneScale(), [1], [theta["w"]], [rate * theta["w"]])), rate * float(theta["w"].square().sum())
    )


ALONE = """
import sys
import torch
from conserved.symmetry import GeneralLinear, Leg, Symmetry, View, moment_map

legs = Leg(View.of("q", (2, 3))), Leg(View.of("k", (2, 3)), -1)
law = Symmetry(block="", family="pair", kind=GeneralLinear(), legs=legs)
assert "conserved.moment" not in sys.modules
q, k = torch.arange(12.0).reshape(2, 2, 3)
assert torch.equal(law.law({"q": q, "k": k}), q @ q.T - k @ k.T)
assert torch.equal(moment_map(GeneralLinear(), (1, -1), (q, k), (q, k)), q @ q.T - k @ k.T)
"""


def test_a_symmetry_finds_what_evaluates_it_when_it_is_asked_and_no_sooner() -> None:
    subprocess.run([sys.executable, "-c", ALONE], check=True)


def test_what_is_provided_evaluates_as_a_symmetry_asks_for_it() -> None:
    promised: Evaluator = Plan
    assert evaluator() is promised


@pytest.mark.parametrize("terms", [(Term(0, 1),), (Term(0, 1), Term(1, 0))], ids=["nilpotent", "symmetric, mixed rows"])
def test_products_that_are_neither_squares_nor_antisymmetric_are_refused(terms: tuple[Term, ...]) -> None:
    with pytest.raises(ValueError, match="number 0 to be squares of rows or antisymmetric"):
        RowProducts(terms, unit=2)
