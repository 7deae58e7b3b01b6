"""Symmetries found by moving inputs: the right ones, no others, and identities that a naive computation confirms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conserved.checking import probe
from conserved.inference.probing.axis_moves import Axis, axes_of, coordinates_of, describe_leg, move, probed, view_of
from conserved.inference.probing.noise import measure_output_noise
from conserved.inference.probing.numerical_function import function_of
from conserved.inference.probing.probed_kinds import BlockGeneralLinear, BlockRotation, RowTranslation
from conserved.symmetry import Kind, Scaling
from kernel_zoo import _rotated

pytestmark = pytest.mark.usefixtures("as_users_run_it")


def found_by(fn: Callable[..., Any], *tensors: Any, **options: Any) -> set[str]:
    result = probe(fn, *tensors, **options)
    return {result.describe(symmetry).partition(" (up to")[0] for symmetry in result.symmetries}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_symmetries_of_attention(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 3, 20, 8).to(dtype) for _ in range(3))
    assert found_by(F.scaled_dot_product_attention, q, k, v, names=("q", "k", "v"), is_causal=True) == {
        "positive scaling of v[0, 1, 3] moves out[0, 1, 3]",
        "positive scaling of q[0, 1, 3] against k[0, 1, 3]^-1",
        "translation of k[0, 1, 3]",
        "translation of v[0, 1, 3] moves out[0, 1, 3]",
        "general linear of v[0, 1, 3] moves out[0, 1, 3]",
        "general linear of q[0, 1, 3] against k[0, 1, 3]^-1",
    }


def test_grouped_heads_and_rotary_pairs_are_found() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(_rotated(q), _rotated(k), v, enable_gqa=True)

    q, k, v = torch.randn(2, 6, 20, 8), torch.randn(2, 2, 20, 8), torch.randn(2, 2, 20, 8)
    result = found_by(attention, q, k, v)
    assert "positive scaling of v[0, 1, 3] moves out[0, 1 (adjacent by 3), 3]" in result
    assert "complex scaling of q[0, 1 (adjacent by 3), 3 (strided by 2)] against k[0, 1, 3 (strided by 2)]^-1" in result
    assert not any("general linear of q" in text for text in result)


@pytest.mark.parametrize(
    ("fn", "shapes", "expected"),
    [
        (lambda g, u: F.silu(g) * u, [(4, 8), (4, 8)], {"positive scaling of u[0, 1] moves out[0, 1]"}),
        (lambda x: F.relu(x) ** 2, [(4, 8)], {"positive scaling of x[0, 1] moves out[0, 1]^2"}),
        (lambda x: F.cross_entropy(x, torch.arange(5)), [(5, 9)], {"translation of x[0]"}),
        (torch.nn.functional.gelu, [(4, 8)], set()),
        (lambda x: torch.tanh(0.05 * x), [(6, 8)], set()),
        (lambda x: torch.tanh(0.3 * x), [(6, 8)], set()),
        (lambda x: torch.sin(2 * torch.pi * x), [(6, 8)], set()),
    ],
    ids=["gated product", "squared relu", "cross-entropy", "gelu", "nearly linear", "tanh", "periodic"],
)
def test_a_function_has_these_symmetries_and_no_others(
    fn: Callable[..., Any], shapes: list[tuple[int, ...]], expected: set[str]
) -> None:
    result = found_by(fn, *(torch.randn(shape) for shape in shapes))
    assert {text for text in result if "general linear" not in text} == expected


def test_a_norm_forgets_scale_and_shift_up_to_its_epsilon() -> None:
    result = probe(F.layer_norm, torch.randn(3, 5, 16), (16,), torch.randn(16), torch.randn(16), eps=1e-3)
    scale = next(outcome for outcome in result.of("input") if outcome.kind == Scaling())
    assert not scale.exact
    assert 1e-5 < scale.epsilon < 1e-2
    assert scale.epsilon == result.errors[scale]
    shift = next(outcome for outcome in result.of("input") if outcome.kind == RowTranslation())
    assert shift.exact


def test_rotations_are_found_where_nothing_larger_is() -> None:
    def unit(x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True)

    kinds = {result.kind for result in probe(unit, torch.randn(4, 6, 8)).symmetries}
    assert BlockRotation(8) in kinds
    assert BlockGeneralLinear(8) not in kinds


def test_an_output_too_coarse_to_tell_proves_nothing() -> None:
    def loss(x: Tensor) -> Tensor:
        return F.cross_entropy(x.float(), torch.arange(60) % 40).to(x.dtype)

    assert probe(loss, torch.randn(60, 40).bfloat16()).symmetries == ()


def test_an_input_of_zeros_is_not_called_symmetric() -> None:
    result = probe(lambda x, y: torch.sin(x) + torch.sin(y), torch.zeros(4, 5), torch.randn(4, 5)).symmetries
    assert result == ()


def test_two_outputs_move_each_along_its_own_axis() -> None:
    def both(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return q.tanh() @ v, v.sum(0)

    result = probe(both, torch.randn(4, 5), torch.randn(5, 6))
    scaling = next(outcome for outcome in result.of("v") if outcome.kind == Scaling())
    assert {describe_leg(leg) for leg in scaling.legs} == {"v[1]", "out0[1]", "out1[0]"}


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([False, True]), st.sampled_from([1, 2, 3]), st.booleans())
def test_a_view_has_a_row_for_every_coordinate(tiled: bool, every: int, with_pairs: bool) -> None:
    axes = (Axis(axis=0), Axis(axis=2, every=every, tiled=tiled and every > 1))
    pairs = with_pairs and every == 2
    view = view_of("x", (3, 4, 2 * every), axes, pairs=pairs)
    tensor = torch.arange(24 * every).reshape(3, 4, 2 * every)
    split = tensor.unflatten(2, (every, 2) if tiled and every > 1 else (2, every))
    by_coordinate = split.transpose(-1, -2) if tiled and every > 1 else split
    rows = by_coordinate.permute(0, 2, 3, 1) if pairs else by_coordinate.permute(0, 2, 1, 3)
    assert sorted(map(sorted, view.matrix(tensor).tolist())) == sorted(map(sorted, rows.reshape(view.n, -1).tolist()))
    assert axes_of(view) == axes
    assert coordinates_of(view) == ((3, 2, 2) if pairs else (3, 2))


def test_the_identity_of_blocks_is_the_naive_sum() -> None:
    value, gradient = (torch.randn(2, 6, 5, 4, dtype=torch.float64) for _ in range(2))
    view = view_of("q", value.shape, (Axis(axis=0), Axis(axis=1, every=3), Axis(axis=3)))
    naive = torch.einsum("bhrni,bhrnj->bhij", value.unflatten(1, (2, 3)), gradient.unflatten(1, (2, 3)))
    for kind, expected in ((BlockGeneralLinear(4), naive), (BlockRotation(4), naive - naive.mT)):
        identity = probed(kind, [(view, 1)]).identity({"q": value}, {"q": gradient})
        torch.testing.assert_close(identity, expected.flatten(0, 1))


@pytest.mark.parametrize("kind", [RowTranslation(), BlockGeneralLinear(4), BlockRotation(4)], ids=repr)
def test_the_moment_map_of_a_probed_kind_is_the_adjoint_of_its_generator(kind: Kind) -> None:
    """⟨ξᵀ, μ(A, B)⟩ = d/dt Σ ⟨exp(tξ)·A_ℓ, B_ℓ⟩ at t = 0, for legs whose coordinates lie along different axes."""
    torch.manual_seed(3)
    views = view_of("x", (2, 4, 5), (Axis(axis=0), Axis(axis=1))), view_of("y", (5, 4, 2), (Axis(axis=2), Axis(axis=1)))
    symmetry = probed(kind, zip(views, (1, -1), strict=True))
    a, b = ({view.parameter: torch.randn(view.shape, dtype=torch.float64) for view in views} for _ in range(2))
    mu = symmetry.moment_map(a, b)
    xi = torch.randn(mu.shape, dtype=torch.float64)

    def paired(t: Tensor) -> Tensor:
        generator = t * (xi - xi.mT if isinstance(kind, BlockRotation) else xi)
        element = generator if kind.linear else torch.linalg.matrix_exp(generator)
        moved = [kind.act(element, leg.view.matrix(a[leg.view.parameter]), leg.degree) for leg in symmetry.legs]
        terms = zip(moved, symmetry.legs, strict=True)
        return torch.stack([(x * leg.view.matrix(b[leg.view.parameter])).sum() for x, leg in terms]).sum()

    derivative = torch.func.jacfwd(paired)(torch.zeros((), dtype=torch.float64))
    assert float(derivative) == pytest.approx(float((xi * (mu if kind.linear else mu.mT)).sum()), rel=1e-9)


def test_moving_tensors_rounds_each_once_to_its_own_precision() -> None:
    x = torch.randn(3, 4).bfloat16()
    scaled = move(
        probed(Scaling(), [(view_of("x", (3, 4), (Axis(axis=1),)), 1)]), {"x": x, "y": x}, torch.tensor([0.3] * 4)
    )
    assert torch.equal(scaled["x"], (x.double() * torch.tensor(0.3)).bfloat16())
    assert scaled["y"] is x


@pytest.mark.parametrize("bits", [8, 11, 16])
def test_the_noise_of_a_function_is_that_of_its_arithmetic(bits: int) -> None:
    def rounded(x: Tensor) -> Tensor:
        """Numbers between one and two with so many bits behind the point."""
        return torch.round((1.5 + 0.4 * torch.sin(x)) * 2**bits) / 2**bits + 0 * x

    function = function_of(lambda x: rounded(x), [torch.randn(200, 32).double()], {})
    (noise,) = measure_output_noise(function, function.values, 2.0**-5)
    uniform = 2.0**-bits / 12**0.5
    assert 0.7 * uniform < float(noise.median()) / 2**0.5 < 1.5 * uniform


@pytest.mark.parametrize("order", [[0, 2, 1], [2, 1, 0], [1, 0, 2]])
def test_coordinates_that_a_function_exchanges_are_told_apart(order: list[int]) -> None:
    """With few coordinates, random moves by a few powers of two often move two of them alike."""
    index = torch.tensor(order)
    for seed in range(8):
        torch.manual_seed(seed)
        result = found_by(lambda x: x[index], torch.randn(6, 4), names=("x",), seed=seed)
        assert not any("strided" in each for each in result)
