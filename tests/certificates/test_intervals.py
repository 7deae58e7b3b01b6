"""Float64 intervals contain what they enclose, and the ranks they prove are those that balls prove."""

from __future__ import annotations

from fractions import Fraction

import flint
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from conserved import Verdict, blocks, certify
from conserved.blocks import Attention, FeedForward, SwiGLU, TransformerBlock
from conserved.certificates import intervals, proof
from conserved.certificates.arithmetic import BALL_FUNCTIONS, Array, Balls, precision
from conserved.certificates.batches import NotBatchedError, SampleBatch
from conserved.certificates.certifying import _arrays, _first_sample
from conserved.certificates.chosen_brackets import bracket_rows
from conserved.certificates.intervals import Interval, independence_bounds
from conserved.certificates.program import Program
from conserved.certificates.proof import Input, field_intervals, field_rows, prove_rank
from conserved.certificates.trace import trace
from conserved.discovery.function import function_of
from conserved.discovery.inputs import to_device

FLOATS = st.floats(-1e6, 1e6, allow_nan=False) | st.floats(-1e-300, 1e-300)
RADII = st.floats(0, 1) | st.sampled_from([0.0, 1e-17, 1e-310])
ENDS = (-1, 0, 1)


def interval(*pairs: tuple[float, float]) -> Interval:
    middle, radius = np.array(pairs, dtype=np.float64).T
    return Interval(middle.copy(), radius.copy())


def contains(result: Interval, exact: Fraction, index: int = 0) -> bool:
    middle, radius = float(result.middle.ravel()[index]), float(result.radius.ravel()[index])
    return radius == np.inf or abs(exact - Fraction(middle)) <= Fraction(radius)


class TestArithmetic:
    @settings(max_examples=300, deadline=None)
    @given(FLOATS, RADII, FLOATS, RADII)
    def test_sums_and_products_contain_those_of_every_member(self, a: float, r: float, b: float, s: float) -> None:
        x, y = interval((a, r)), interval((b, s))
        for i in ENDS:
            for j in ENDS:
                p, q = Fraction(a) + i * Fraction(r), Fraction(b) + j * Fraction(s)
                assert contains(x + y, p + q)
                assert contains(x - y, p - q)
                assert contains(x * y, p * q)

    @settings(max_examples=200, deadline=None)
    @given(FLOATS, RADII)
    def test_reciprocals_and_roots_contain_those_of_every_member(self, a: float, r: float) -> None:
        result, root = interval((a, r)).apply("reciprocal"), interval((abs(a), r)).apply("sqrt")
        for i in ENDS:
            x, y = Fraction(a) + i * Fraction(r), Fraction(abs(a)) + i * Fraction(r)
            if x:
                assert contains(result, 1 / x)
            low, high = (
                Fraction(float(root.middle[0])) + k * Fraction(min(float(root.radius[0]), 1e300)) for k in (-1, 1)
            )
            assert root.radius[0] == np.inf or (max(low, Fraction(0)) ** 2 <= y <= high**2)

    @pytest.mark.parametrize("function", sorted(BALL_FUNCTIONS))
    def test_functions_contain_those_of_balls(self, function: str) -> None:
        rng = np.random.default_rng(0)
        middle = np.abs(rng.standard_normal(60)) * 10.0 ** rng.integers(-3, 2, 60) + 1e-3
        radius = middle * 10.0 ** rng.integers(-17, -2, 60) * rng.integers(0, 2, 60)
        result = Interval(middle, radius).apply(function)
        with precision(256):
            for index in range(60):
                for i in ENDS:
                    exact = BALL_FUNCTIONS[function](
                        flint.arb(float(middle[index])) + i * flint.arb(float(radius[index]))
                    )
                    gap = abs(exact - float(result.middle[index])).abs_lower()
                    assert float(gap) <= float(result.radius[index])

    @settings(max_examples=50, deadline=None)
    @given(st.integers(0, 10**6))
    def test_matrix_products_and_long_sums_contain_exact_ones(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        a, b = (rng.standard_normal((3, 7)) * 10.0 ** rng.integers(-12, 12, (3, 7)) for _ in range(2))
        r, s = (np.abs(m) * 10.0 ** rng.integers(-18, -3, m.shape) for m in (a, b))
        product = Interval(a, r) @ Interval(b.T.copy(), s.T.copy())
        total = Interval(a, r).sum_last()
        for i in range(3):
            row = [Fraction(v) + Fraction(e) * int(k) for v, e, k in zip(a[i], r[i], rng.choice(ENDS, 7), strict=True)]
            assert contains(total, sum(row, Fraction(0)), i)
            for j in range(3):
                other = [Fraction(v) - Fraction(e) for v, e in zip(b[j], s[j], strict=True)]
                exact = sum((p * q for p, q in zip(row, other, strict=True)), Fraction(0))
                assert contains(product, exact, 3 * i + j)

    def test_infinities_of_masks_are_exact_and_overflow_is_unknown(self) -> None:
        masked = interval((2.0, 1e-3)) + interval((-np.inf, 0.0))
        assert masked.apply("exp").middle[0] == 0.0
        assert masked.apply("exp").radius[0] == 0.0
        with np.errstate(all="ignore"):
            huge = interval((1e300, 0.0)) * interval((1e300, 0.0))
            assert not huge.radius[0] < np.inf
            assert not (huge + interval((1.0, 0.0))).radius[0] < np.inf

    def test_this_process_rounds_as_assumed(self) -> None:
        assert intervals.rounds_to_nearest()


class TestIndependence:
    @pytest.mark.parametrize("seed", range(5))
    def test_rows_that_are_dependent_within_their_radii_are_never_proved(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        rows = rng.standard_normal((12, 20))
        spread = np.full(rows.shape, 1e-12)
        assert independence_bounds(Interval(rows, spread)).max() < 1
        rows[5] = rng.standard_normal(11) @ np.delete(rows, 5, 0) + 1e-13 * rng.standard_normal(20)
        assert not independence_bounds(Interval(rows, spread)).max() < 1
        assert not independence_bounds(Interval(rng.standard_normal((21, 20)), np.zeros((21, 20)))).max() < 1
        rows[5] = 0
        assert not independence_bounds(Interval(rows, spread)).max() < 1

    def test_the_bound_is_that_of_balls_up_to_rounding(self) -> None:
        rng = np.random.default_rng(0)
        rows, spread = rng.standard_normal((10, 15)), np.full((10, 15), 1e-6)
        balls = np.array([flint.arb(m, r) for m, r in zip(rows.ravel(), spread.ravel(), strict=True)], dtype=object)
        with precision(128):
            exact = proof.independence_bound(balls.reshape(10, 15))
        assert float(independence_bounds(Interval(rows, spread)).max()) == pytest.approx(exact, rel=1e-3)


class Routed(nn.Module):
    """A mixture that picks its experts, so that programs gather and compare."""

    def __init__(self) -> None:
        super().__init__()
        self.mixture = blocks.MixtureOfExperts(dim=3, hidden=2, experts=3, top_k=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.mixture(x)
        return result


MODELS: dict[str, tuple[nn.Module, torch.Tensor, str]] = {
    "pre-norm": (TransformerBlock(Attention(4, 2, bias=True), FeedForward(4, 3, bias=True)), torch.zeros(3, 4), ""),
    "rotary, RMS": (TransformerBlock(Attention(4, 2, rotary=True), SwiGLU(4, 3), "rms"), torch.zeros(3, 4), ""),
    "ReLU": (FeedForward(3, 4, activation="relu"), torch.zeros(2, 3), ""),
    "mixture": (Routed(), torch.zeros(2, 3), ""),
    "decoder": (blocks.DecoderLM(5, 4, 1, 2, 3), torch.tensor([0, 1, 4]), "cross_entropy"),
}


def traced(name: str) -> tuple[Program, list[float], list[Input]]:
    model, x, loss = MODELS[name]
    torch.manual_seed(0)
    function = function_of(model.double(), x, loss=loss or "regression", params=None, device="cpu")
    generator = torch.Generator().manual_seed(0)
    theta = (function.generic_point(generator) * 4096).round() / 4096
    inputs = [to_device(_first_sample(function, generator), function.device) for _ in range(4)]
    return trace(function, theta, inputs[0]), theta.tolist(), [Input(_arrays(x)) for x in inputs]


def some_words(program: Program, inputs: list[Input], lengths: tuple[int, ...]) -> list[list[tuple[Input, list[int]]]]:
    rng = np.random.default_rng(1)
    return [
        [(inputs[int(rng.integers(len(inputs)))], rng.integers(-3, 4, program.outputs).tolist()) for _ in range(n)]
        for n in lengths
    ]


def middles(balls: Array) -> Array:
    return np.array([float(ball.mid()) for ball in balls.ravel()]).reshape(balls.shape)


@pytest.mark.parametrize("name", MODELS)
def test_fields_and_brackets_in_intervals_contain_those_of_balls(name: str) -> None:
    program, theta, inputs = traced(name)
    words = some_words(program, inputs, (1, 1, 1, 2, 2, 3))
    result = field_intervals(program, theta, words, 128)
    with precision(256):
        exact = field_rows(program, theta, words, Balls())
        for ball, m, r in zip(exact.ravel(), result.middle.ravel(), result.radius.ravel(), strict=True):
            assert abs(ball - float(m)).abs_lower() <= flint.arb(float(r))
    sizes = np.abs(middles(exact)).max(axis=1, keepdims=True)
    assert (result.radius[:3] < 1e-10 * sizes[:3]).all()


@pytest.mark.parametrize("name", MODELS)
def test_batches_of_floats_are_the_brackets_of_balls(name: str) -> None:
    program, theta, inputs = traced(name)
    for length in (1, 2, 3):
        words = some_words(program, inputs, (length,) * 3)
        rows = bracket_rows(program, theta, [[(x.tensors, v) for x, v in word] for word in words])
        with precision(128):
            exact = middles(field_rows(program, theta, words, Balls()))
        for row, other in zip(rows, exact, strict=True):
            size = np.linalg.norm(other)
            if size > 0:
                assert np.allclose(row * size, other * np.linalg.norm(row), atol=1e-9 * size)


def test_small_certificates_are_proved_in_intervals_too(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Attention(4, 2), torch.zeros(5, 4)
    monkeypatch.setattr(proof, "LARGE", 1)
    quick = certify(model, x)
    assert quick.verdict == Verdict.PROVED
    assert quick.complete
    assert "53 bits" in quick.verdict.evidence[0].what
    words = quick.contents.spelled()
    theta, program = quick.contents.theta, quick.contents.program
    assert prove_rank(program, theta, words, 128).bits == 53
    assert not prove_rank(program, theta, [*words, words[0]], 128, most_bits=128).proved


def test_operators_that_are_not_batched_are_computed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    program, theta, inputs = traced("mixture")
    words = [[(x.tensors, v) for x, v in word] for word in some_words(program, inputs, (2, 2))]
    together = bracket_rows(program, theta, words)

    def refuse(*_: object) -> None:
        raise NotBatchedError("not today")

    monkeypatch.setattr(SampleBatch, "terms", refuse)
    assert np.allclose(bracket_rows(program, theta, words), together, atol=1e-12)
