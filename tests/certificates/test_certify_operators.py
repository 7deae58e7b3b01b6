"""Every operator of programs: what a ball encloses, and what each ATen operator is rewritten to."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any

import flint
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from conserved.certificates.arithmetic import Balls, Floats, UndecidedError, precision
from conserved.certificates.builder import NoRuleError
from conserved.certificates.differentiate import Sample, bracket, gradient, run
from conserved.certificates.jets import Jet, apply, derivative
from conserved.certificates.operators import MOVES, RULES
from conserved.certificates.program import UNARY, Program
from conserved.certificates.trace import trace
from conserved.discovery.fields import bracket_field
from conserved.discovery.function import function_of, without_fused_kernels
from conserved.discovery.inputs import to_device
from sampling import sampled
from zoo import CASES, Case

DOMAINS = {"log": (0.01, 4.0), "sqrt": (0.01, 4.0), "reciprocal": (0.01, 4.0)}


def traced(f: Callable[..., Tensor], *shape: int, seed: int = 0) -> tuple[Program, Tensor, Tensor]:
    """The program of f(p, x) with p and x of a shape, a point and an input."""
    generator = torch.Generator().manual_seed(seed)
    params = {"p": torch.zeros(shape, dtype=torch.float64)}
    function = function_of(lambda v, x: f(v["p"], x), torch.zeros(shape), loss="regression", params=params, device=None)
    theta = torch.randn(function.size, generator=generator, dtype=torch.float64)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return trace(function, theta, x), theta, x


def in_balls(program: Program, theta: Tensor, x: Tensor, bits: int) -> list[flint.arb]:
    with precision(bits):
        numbers = Balls()
        point = Jet({0: numbers.array(theta.tolist(), (len(theta),))})
        given = x.numpy() if not x.is_floating_point() else numbers.array(x.flatten().tolist(), tuple(x.shape))
        output = run(program, numbers, point, [given])[program.output]
        assert isinstance(output, Jet)
        return list(output.value)


class TestBalls:
    @given(function=st.sampled_from(UNARY), where=st.fractions(0, 1, max_denominator=2**20), bits=st.integers(20, 45))
    def test_the_ball_contains_the_float64_and_the_high_precision_value(
        self, function: str, where: Fraction, bits: int
    ) -> None:
        low, high = DOMAINS.get(function, (-4.0, 4.0))
        value = low + (high - low) * float(where)
        with precision(bits):
            (enclosed,) = Balls().apply(function, Balls().array([value], (1,)))
        with precision(1000):
            (sharp,) = Balls().apply(function, Balls().array([value], (1,)))
            (rough,) = Floats().apply(function, np.array([value]))
            assert enclosed.contains(sharp)
            # float64 is exact to about 52 bits, so its error is far inside a ball of 45.
            assert enclosed.contains(flint.arb(float(rough))) or enclosed.rad() == 0
            assert enclosed.overlaps(sharp)

    @given(function=st.sampled_from(UNARY), where=st.integers(0, 1000))
    def test_slopes_are_those_of_difference_quotients(self, function: str, where: int) -> None:
        low, high = DOMAINS.get(function, (-4.0, 4.0))
        value = low + (high - low) * where / 1000
        with precision(400):
            numbers = Balls()
            a = Jet({0: numbers.array([value], (1,))})
            (exact,) = derivative(numbers, function, a, apply(numbers, function, a)).value
            step = flint.arb(2) ** -120
            ends = [numbers.apply(function, a.value + sign * step)[0] for sign in (1, -1)]
            quotient = (ends[0] - ends[1]) / (2 * step)
            assert abs(quotient - exact) < (1 + abs(exact)) * flint.arb(2) ** -150

    def test_a_matrix_product_contains_the_exact_one(self) -> None:
        generator = np.random.default_rng(0)
        a, b = generator.integers(-(2**40), 2**40, (2, 3, 4)), generator.integers(-(2**40), 2**40, (2, 4, 2))
        with precision(20):
            numbers = Balls()
            product = numbers.matmul(
                numbers.array(a.ravel().tolist(), a.shape), numbers.array(b.ravel().tolist(), b.shape)
            )
        exact = np.matmul(a.astype(object), b.astype(object))
        assert all(p.contains(e) for p, e in zip(product.ravel(), exact.ravel(), strict=True))

    def test_an_open_comparison_is_undecided_and_more_bits_decide_it(self) -> None:
        program, _, _ = traced(lambda p, x: torch.relu(torch.exp(p) - torch.exp(x)), 1)
        theta, x = (torch.tensor([value], dtype=torch.float64) for value in (1 + 2.0**-40, 1.0))
        with pytest.raises(UndecidedError, match="kink"):
            in_balls(program, theta, x, 20)
        assert in_balls(program, theta, x, 100)[0] > 0

    def test_a_tie_that_moves_is_undecided_with_any_precision(self) -> None:
        program, theta, x = traced(lambda p, x: (p * x).topk(2).values, 3)
        tied = torch.ones(3, dtype=torch.float64)
        with pytest.raises(UndecidedError):
            in_balls(program, tied, tied, 4000)
        assert len(in_balls(program, theta, x, 64)) == 2

    def test_a_kink_exactly_at_zero_is_undecided(self) -> None:
        program, theta, x = traced(lambda p, x: torch.relu(p * x), 2)
        with pytest.raises(UndecidedError):
            in_balls(program, theta, torch.zeros_like(x), 4000)


def _written(p: Tensor, x: Tensor) -> Tensor:
    """Rows, columns and a diagonal written in place."""
    y = torch.zeros(3, 4, dtype=torch.float64)
    y[1] = p[0] * x[1]
    y[:, 2:] = p[:, :2]
    y.diagonal().copy_(p[:, 3])
    y[0, 0] = 1
    return y * x


OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda p, x: torch.add(p, x, alpha=3),
    "sub": lambda p, x: torch.sub(p, x, alpha=2),
    "rsub": lambda p, x: 3 - p * x,
    "mul": lambda p, x: p * x,
    "div": lambda p, x: p / (x * x + 1),
    "neg": lambda p, x: -p + x,
    "reciprocal": lambda p, x: (p * p + 1).reciprocal() * x,
    "square": lambda p, x: p.square() * x,
    "pow": lambda p, x: p**3 * x + (p * p + 1) ** 1.5 + (p * p + 1) ** -0.5 + p**0,
    "exp": lambda p, x: torch.exp(p * x),
    "expm1": lambda p, x: torch.expm1(p * x),
    "log": lambda p, x: torch.log(p * p + 1) * x,
    "log1p": lambda p, x: torch.log1p(p * p) * x,
    "sqrt": lambda p, x: torch.sqrt(p * p + 1) * x,
    "rsqrt": lambda p, x: torch.rsqrt(p * p + 1) * x,
    "tanh": lambda p, x: torch.tanh(p * x),
    "sigmoid": lambda p, x: torch.sigmoid(p * x),
    "erf": lambda p, x: torch.erf(p * x),
    "sin": lambda p, x: torch.sin(p * x),
    "cos": lambda p, x: torch.cos(p * x),
    "gelu": lambda p, x: F.gelu(p * x) + F.gelu(p + x, approximate="tanh"),
    "silu": lambda p, x: F.silu(p * x),
    "relu": lambda p, x: F.relu(p * x),
    "leaky_relu": lambda p, x: F.leaky_relu(p * x, 0.1),
    "elu": lambda p, x: F.elu(p * x, 0.7) + F.selu(p + x),
    "softplus": lambda p, x: F.softplus(p * x),
    "abs": lambda p, x: (p * x).abs(),
    "maximum": lambda p, x: torch.maximum(p, x),
    "minimum": lambda p, x: torch.minimum(p, x),
    "clamp": lambda p, x: (p * x).clamp(-0.5, 0.5),
    "mm": lambda p, x: p @ x.T,
    "bmm": lambda p, x: torch.bmm(p[None].expand(2, -1, -1), x.T[None].expand(2, -1, -1)),
    "addmm": lambda p, x: torch.addmm(p[:, :3], p, x.T, beta=2, alpha=3),
    "baddbmm": lambda p, x: torch.baddbmm(x[None, :, :3], p[None], x.T[None], beta=2, alpha=3),
    "sum": lambda p, x: (p * x).sum(0) + (p * x).sum(),
    "mean": lambda p, x: (p * x).mean(1, keepdim=True) * p,
    "var": lambda p, x: (p * x).var(1) + (p * x).var(1, correction=0),
    "_softmax": lambda p, x: (p * x).softmax(0),
    "_log_softmax": lambda p, x: (p * x).log_softmax(1),
    "layer_norm": lambda p, x: F.layer_norm(x + p, (4,), p[0], p[1]),
    "rms_norm": lambda p, x: F.rms_norm(x + p, (4,), p[0], 1e-5),
    "attention": lambda p, x: F.scaled_dot_product_attention(p[None], x[None], (p * x)[None], is_causal=True),
    "sort": lambda p, x: (p * x).sort(dim=0).values * x,
    "topk": lambda p, x: (p * x).topk(2, dim=-1).values + (p * x).topk(2, largest=False).values,
    "argmax": lambda p, x: p.gather(1, (p * x).argmax(1, keepdim=True)) * x,
    "amax": lambda p, x: (p * x).amax((0, 1)) * p,
    "max": lambda p, x: (p * x).max(1).values + (p * x).max(),
    "gather": lambda p, x: p.gather(0, torch.tensor([[2, 1, 0, 0]])) * x,
    "scatter": lambda p, x: (
        torch.scatter(p, 1, torch.tensor([[1], [0], [2]]), x) + p.scatter(1, torch.tensor([[1]]), 0.5)
    ),
    "index": lambda p, x: p[torch.tensor([2, 0]), torch.tensor([1, 3])] * x[0, 0],
    "index_select": lambda p, x: p.index_select(1, torch.tensor([3, 1])) * x[:, :1],
    "where": lambda p, x: torch.where(x > 0, p, p * x),
    "masked_fill": lambda p, x: (p * x).masked_fill(torch.eye(3, 4, dtype=torch.bool), float("-inf")).softmax(-1),
    "gt": lambda p, x: p * (x > 0.1),
    "lt": lambda p, x: p * (x < 0.1),
    "ge": lambda p, x: p * (x >= 0.1),
    "le": lambda p, x: p * (x <= 0.1),
    "logical_not": lambda p, x: p * (x > 0.1).logical_not(),
    "bitwise_not": lambda p, x: p * ~(x > 0.1),
    "logical_and": lambda p, x: p * torch.logical_and(x > 0, x < 1),
    "bitwise_and": lambda p, x: p * ((x > 0) & (x < 1)),
    "logical_or": lambda p, x: p * torch.logical_or(x < 0, x > 1),
    "bitwise_or": lambda p, x: p * ((x < 0) | (x > 1)),
    "eq": lambda p, x: p * ((x > 0).long() == 1),
    "ne": lambda p, x: p * ((x > 0).long() != 1),
    "full_like": lambda p, x: p * torch.full_like(x, 2.5) * x,
    "_to_copy": lambda p, x: p * (x > 0).to(torch.float64).to(torch.float32).double(),
    "constant_pad_nd": lambda p, x: F.pad(p * x, (1, 0, 0, 2)) + F.pad(p, (1, 0, 0, 2), value=1.5),
    "convolution": lambda p, x: F.conv1d(x[None], p.reshape(2, 3, 2), p[0, :2], padding=1, stride=2, dilation=1),
    "view": lambda p, x: p.view(4, 3) @ x.reshape(3, 4),
    "permute": lambda p, x: p.permute(1, 0) @ x,
    "expand": lambda p, x: p[:, :1].expand(3, 4) * x,
    "slice": lambda p, x: p[1:, ::2] * x[1:, 1::2],
    "select": lambda p, x: p[1] * x[:, 0].sum(),
    "nothing": lambda p, x: torch.cat([p[:, :0], p * x], 1),
    "cat": lambda p, x: torch.cat([p, x, p * x], 1),
    "stack": lambda p, x: torch.stack([p, x], 1),
    "unsqueeze": lambda p, x: p.unsqueeze(1) * x,
    "squeeze": lambda p, x: p.unsqueeze(1).squeeze(1) * x,
    "split_with_sizes": lambda p, x: p.split([1, 3], 1)[1] * x[:, 1:],
    "split": lambda p, x: p.split(2, 1)[1] * x[:, 2:],
    "unbind": lambda p, x: p.unbind(0)[2] * x,
    "repeat": lambda p, x: p.repeat(2, 1) * x.sum(),
    "flip": lambda p, x: p.flip(0) * x,
    "roll": lambda p, x: p.roll(1, 1) * x,
    "unfold": lambda p, x: p.unfold(1, 2, 1) * x[0, 0],
    "diagonal": lambda p, x: p.diagonal() * x[:, 0],
    "tril": lambda p, x: p.tril() * x,
    "triu": lambda p, x: p.triu(1) * x,
    "clone": lambda p, x: p.clone() * x,
    "as_strided": lambda p, x: p.clone().as_strided((2, 3), (1, 4)) * x[0, 0],
    "transpose": lambda p, x: p.transpose(0, 1) @ x,
    "t": lambda p, x: p.t() @ x,
    "narrow": lambda p, x: p.narrow(1, 1, 2) * x[:, :2],
    "einsum": lambda p, x: torch.einsum("ij,kj->ik", p, x),
    "group_norm": lambda p, x: F.group_norm((x + p).reshape(1, 4, 3), 2, p[0], p[1]),
    "repeat_interleave": lambda p, x: p.repeat_interleave(2, 0) * x[0, 0],
    "embedding": lambda p, x: F.embedding((x[:, 0] > 0).long(), p) * x,
    "computed index": lambda p, x: p[(x[:, 0] > 0).long()] * x,
    "norm": lambda p, x: (p * x).norm(dim=1) + torch.linalg.vector_norm(p + x),
    "cumsum": lambda p, x: torch.cumsum(p * x, 0) + (p + x).cumsum(1),
    "stop": lambda p, x: p.detach() * p * x,
    "copy": lambda p, x: _written(p, x),
}


@cache
def program_of(name: str) -> tuple[Program, frozenset[str]]:
    """The program of one of them, and the rules that were asked for it."""
    seen: set[str] = set()

    def spied(name: str, rule: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*args: Any, **kwargs: Any) -> Any:
            seen.add(name)
            return rule(*args, **kwargs)

        return asked

    with pytest.MonkeyPatch.context() as patch:
        for rule in list(RULES):
            patch.setitem(RULES, rule, spied(rule, RULES[rule]))
        program, _, _ = traced(OPERATORS[name], 3, 4)
    return program, frozenset(seen)


class TestOperators:
    @pytest.mark.parametrize("name", OPERATORS)
    def test_the_program_computes_what_pytorch_does_and_differentiates_it_alike(self, name: str) -> None:
        f = OPERATORS[name]
        program, _ = program_of(name)
        for seed in (1, 2):
            generator = torch.Generator().manual_seed(seed)
            point = torch.randn(12, generator=generator, dtype=torch.float64)
            given = torch.randn(3, 4, generator=generator, dtype=torch.float64)
            expected = f(point.reshape(3, 4), given).flatten()
            enclosed = in_balls(program, point, given, 40)
            # Balls of 40 bits are wider than the rounding of float64, unless the value is exact in both.
            for ball, value in zip(enclosed, expected.tolist(), strict=True):
                assert abs(ball - value) <= 1e-12 + abs(value) * 2.0**-30 + ball.rad()
                assert ball.contains(flint.arb(value)) or ball.rad() < 1e-13 * (1 + abs(value))
            v = torch.randn(len(expected), generator=generator, dtype=torch.float64)
            wanted = torch.func.grad(lambda t, x=given, v=v: (f(t.reshape(3, 4), x).flatten() * v).sum())(point)
            mine = gradient(program, Floats(), Jet({0: point.numpy()}), Sample((given.numpy(),), v.numpy())).value
            np.testing.assert_allclose(mine, wanted.numpy(), rtol=1e-9, atol=1e-11)

    def test_every_rule_is_reached_by_the_table(self) -> None:
        assert set(RULES) == set().union(*(program_of(name)[1] for name in OPERATORS))

    def test_an_operator_without_a_rule_is_named(self) -> None:
        with pytest.raises(NoRuleError, match=r"aten\.digamma"):
            traced(lambda p, x: torch.digamma(p) * x, 3)

    @pytest.mark.parametrize(
        ("f", "says"),
        [
            (lambda p, x: p * x + torch.div(p, 2, rounding_mode="floor"), "rounding_mode"),
            (lambda p, x: (p * p) ** 0.3 * x, "power 0.3"),
            (lambda p, x: p * x * (1 - (x == p).double()), "equal"),
            (lambda p, x: torch.linalg.vector_norm(p * x, 3) * p, "order 3"),
            (lambda p, x: p * x.long(), "Rounding"),
            (lambda p, x: torch.view_as_complex((p * x).reshape(3, 2, 2)).abs(), "complex|Complex"),
        ],
        ids=["floor division", "fractional power", "equality of reals", "other norm", "rounding", "complex"],
    )
    def test_what_has_no_rule_says_so(self, f: Callable[..., Tensor], says: str) -> None:
        with pytest.raises(NoRuleError, match=says):
            traced(f, 3, 4)

    def test_moves_are_operators_that_exist(self) -> None:
        assert all(hasattr(torch.ops.aten, name) for name in MOVES)


class TestDerivatives:
    """By their own rules, compared with PyTorch's where those are right."""

    @pytest.mark.parametrize("case", sampled(CASES, 24), ids=lambda case: case.name)
    def test_brackets_agree_with_those_of_discovery(self, case: Case) -> None:
        function = function_of(case.model(), case.sample, loss=case.loss, params=None, device=None)
        generator = torch.Generator().manual_seed(3)
        theta = function.generic_point(generator)
        xs = [to_device(case.sample(generator), function.device) for _ in range(3)]
        vs = [torch.randn(function.outputs, generator=generator, dtype=torch.float64) for _ in range(3)]
        program = trace(function, theta, xs[0])
        samples = [Sample((x.numpy(),), v.numpy()) for x, v in zip(xs, vs, strict=True)]
        word: Any = (xs[0], vs[0])
        for depth in range(3):
            word = word if depth == 0 else (word, (xs[depth], vs[depth]))
            with without_fused_kernels():
                wanted = bracket_field(function, depth)(theta, word).numpy()
            result = bracket(program, Floats(), Jet({0: theta.numpy()}), samples[: depth + 1])
            mine = result.parts.get(0, np.zeros(program.size))
            np.testing.assert_allclose(mine, wanted, rtol=1e-8, atol=1e-11 * (1 + float(np.abs(wanted).max())))

    def test_the_third_derivative_of_layer_norm_is_right_where_pytorch_is_wrong(self) -> None:
        """Along one direction, in balls of 400 bits, against differences of second derivatives; then PyTorch's own."""
        norm = nn.LayerNorm(3, elementwise_affine=False)
        weights = torch.tensor([0.3, -1.1, 0.7], dtype=torch.float64)
        direction = torch.tensor([0.5, 1.0, -0.25], dtype=torch.float64)
        program, theta, x = traced(lambda p, x: (norm(p + x) * weights).sum()[None], 3)
        along = direction.tolist()

        def derivative(bits_set: int, shift: flint.arb) -> flint.arb:
            numbers = Balls()
            value = numbers.array(theta.tolist(), (3,)) + shift * numbers.array(along, (3,))
            parts = {0: value} | {1 << i: numbers.array(along, (3,)) for i in range(bits_set)}
            given = numbers.array(x.tolist(), (3,))
            output = run(program, numbers, Jet(parts), [given])[program.output]
            assert isinstance(output, Jet)
            return output.parts[(1 << bits_set) - 1][0]

        with precision(400):
            exact = derivative(3, flint.arb(0))
            step = flint.arb(2) ** -100
            quotient = (derivative(2, step) - derivative(2, -step)) / (2 * step)
            assert abs(quotient - exact) < flint.arb(2) ** -120

        def nested(f: Callable[[Tensor], Tensor], times: int) -> Callable[[Tensor], Tensor]:
            return f if not times else nested(lambda t: torch.func.jvp(f, (t,), (direction,))[1], times - 1)

        def plain(t: Tensor) -> Tensor:
            return (norm(t + x) * weights).sum()

        with without_fused_kernels():
            assert float(nested(plain, 3)(theta)) == pytest.approx(float(exact.mid()), rel=1e-9)
        if torch.__version__.startswith("2.13"):
            assert abs(float(nested(plain, 3)(theta)) / float(exact.mid()) - 1) > 1e-3
