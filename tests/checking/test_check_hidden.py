"""conserved.check sees defects in tails, last blocks and single rows, in half precision too, and states its limits."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import conserved
from conserved.checking import check
from hidden_defects import FUNCTIONS, HIDDEN, Hidden, hidden_function, hidden_inputs, names_of

pytestmark = [pytest.mark.usefixtures("as_users_run_it"), pytest.mark.filterwarnings("ignore")]


def checked(hidden: Hidden | str, dtype: torch.dtype, *, alone: bool = False) -> conserved.Check:
    name = hidden if isinstance(hidden, str) else hidden.function
    function = hidden_function(hidden, only=dtype if alone else None)
    return check(function, *hidden_inputs(name, dtype), names=names_of(name))


@pytest.mark.parametrize("hidden", [*HIDDEN[:5], *HIDDEN[5::7]], ids=lambda hidden: hidden.name)
def test_a_defect_that_hides_is_seen_in_bfloat16(hidden: Hidden) -> None:
    result = checked(hidden, torch.bfloat16)
    assert result.verdict == conserved.Verdict.REFUTED, result


@pytest.mark.parametrize("hidden", HIDDEN[8::9], ids=lambda hidden: hidden.name)
def test_a_defect_that_hides_is_seen_in_single_precision(hidden: Hidden) -> None:
    assert checked(hidden, torch.float32).verdict == conserved.Verdict.REFUTED


ALONE = (
    "causal attention: dk of the last 16 of 256 keys zero",
    "gelu: zero beyond 4",
    "gelu: dx times 0.97",
    "attention: dk of the last 8 keys zero",
)


@pytest.mark.parametrize("name", ALONE)
def test_a_kernel_that_runs_in_bfloat16_alone_is_tested_there(name: str) -> None:
    hidden = next(each for each in HIDDEN if each.name == name)
    assert checked(hidden, torch.bfloat16, alone=True).verdict == conserved.Verdict.REFUTED


@pytest.mark.parametrize("name", ["softmax", "gelu", "layer norm", "attention"])
def test_the_same_functions_without_a_defect_raise_no_alarm(name: str) -> None:
    assert name in FUNCTIONS
    for alone in (False, True):
        result = checked(name, torch.bfloat16, alone=alone)
        assert not result.failures, result


class TestSensitivity:
    def test_a_check_states_the_size_of_errors_it_would_not_have_seen(self) -> None:
        result = checked("gelu", torch.bfloat16)
        size = result.sensitivity["x"]
        assert 0 < size.share < 0.04
        assert size.share <= size.row < 1
        assert "would not have been seen" in result.verdict.message
        assert "would not have been seen" in result.unseen
        assert result.badge in repr(result)
        assert "verified, errors above" in result.badge
        assert json.loads(json.dumps(result.record()))["sensitivity"]["x"]["share"] == size.share

    def test_a_factor_above_the_stated_size_is_seen_and_one_far_below_is_not(self) -> None:
        size = checked("gelu", torch.bfloat16, alone=True).sensitivity["x"].share

        def scaled(factor: float) -> conserved.Check:
            wrong = Hidden(function="gelu", where="", kind="size", change=lambda g, *_: [g[0] * factor])
            return checked(wrong, torch.bfloat16, alone=True)

        assert scaled(1 + 2 * size).failures
        assert not scaled(1 + size / 20).failures

    def test_half_precision_is_less_sensitive_than_single(self) -> None:
        sizes = [checked("softmax", dtype).sensitivity["x"].share for dtype in (torch.float32, torch.bfloat16)]
        assert 100 * sizes[0] < sizes[1]
        assert math.isfinite(sizes[1])


class TestReferenceForm:
    def test_a_defect_of_half_precision_alone_is_seen_against_the_finer_form(self) -> None:
        class Sine(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                ctx.save_for_backward(x)
                return x.sin()

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> Tensor:
                (x,) = ctx.saved_tensors
                grad = grads[0] * x.cos()
                if x.dtype == torch.bfloat16:
                    grad[-1] = 0
                return grad

        x = torch.randn(32, 16)
        assert check(Sine.apply, x, names=("x",)).ok
        result = check(Sine.apply, x.bfloat16(), names=("x",))
        assert result.suspects == ("x",)
        assert any("in this form alone (bfloat16)" in test.meaning for test in result.failures)

    def test_rounding_on_purpose_is_right_in_the_precision_it_rounds_to(self) -> None:
        class Rounded(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                ctx.save_for_backward(x)
                return x.sin()

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> Tensor:
                (x,) = ctx.saved_tensors
                return grads[0] * x.cos().bfloat16().to(x.dtype)

        x = torch.randn(32, 16)
        assert check(Rounded.apply, x.bfloat16(), names=("x",)).ok
        assert check(Rounded.apply, x, names=("x",)).failures


def scaled_in_half(factor: float) -> Any:
    """Return flash attention whose dq is multiplied by a factor in bfloat16 alone."""

    def flash(q: Tensor, k: Tensor, v: Tensor) -> Any:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Any:
        half = q.dtype == torch.bfloat16 and q.requires_grad
        return flash(_scaled_gradient(q, factor) if half else q, k, v)

    return attention


def _scaled_gradient(x: Tensor, factor: float) -> Tensor:
    scaled: Tensor = _Scaled.apply(x, factor)
    return scaled


class _Scaled(torch.autograd.Function):
    """The same tensor; its gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.factor * gradients[0], None


class TestOutputGradient:
    def test_the_error_against_the_finest_precision_is_reported_on_the_runs_own_tensors(self) -> None:
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, 2, 32, 16).bfloat16() for _ in range(3))
        dout = torch.randn(1, 2, 32, 16).bfloat16()
        result = check(F.scaled_dot_product_attention, q, k, v, grad=dout, names=("q", "k", "v"))
        assert result.ok, result
        leaves = [each.double().requires_grad_() for each in (q, k, v)]
        attention: Any = F.scaled_dot_product_attention
        right = torch.autograd.grad(attention(*leaves), leaves, dout.double())
        given = [each.clone().requires_grad_() for each in (q, k, v)]
        got = torch.autograd.grad(attention(*given), given, dout)
        for name, grad, exact in zip("qkv", got, right, strict=True):
            expected = float((grad.double() - exact).norm() / exact.norm())
            assert result.errors[name].error == pytest.approx(expected, rel=1e-6)

    def test_a_gradient_that_is_mostly_rounding_is_a_note_and_not_a_wrong_backward(self) -> None:
        """Keys far from zero: the correction of the softmax, read off a rounded output, is multiplied by their mean."""
        torch.manual_seed(1)
        q, v = (torch.randn(1, 2, 64, 32).bfloat16() for _ in range(2))
        k = (torch.randn(1, 2, 64, 32) * 0.05 + 8).bfloat16()
        dout = torch.randn(1, 2, 64, 32).bfloat16()
        result = check(F.scaled_dot_product_attention, q, k, v, grad=dout, names=("q", "k", "v"))
        assert not result.failures, result
        assert result.errors["q"].error > 0.05
        assert any("precision: dq" in note and "rounding" in note for note in result.precision_notes)
        assert "precision: dq" in str(result)

    @pytest.mark.parametrize(("factor", "right"), [(1.0, True), (1.5, False), (-1.0, False)])
    def test_rounding_that_stays_the_same_at_nearby_inputs_is_a_note_and_a_factor_is_not(
        self, factor: float, right: bool
    ) -> None:
        """Values that are nearly equal: their rounded mean is the same at all nearby inputs."""
        torch.manual_seed(0)

        def common(spread: float, size: float) -> Tensor:
            return (spread * torch.randn(1, 3, 48, 16) + size * torch.randn(1, 3, 1, 16)).bfloat16()

        inputs = (torch.randn(1, 3, 48, 16).bfloat16(), common(0.3, 2.0), common(0.2, 1.0))
        dout = torch.randn(1, 3, 48, 16).bfloat16()
        result = check(scaled_in_half(factor), *inputs, grad=dout, names=("q", "k", "v"), seconds=5)
        assert result.ok == right, result
        if right:
            assert any("precision: dq" in note for note in result.precision_notes)

    def test_an_output_gradient_of_another_shape_is_refused(self) -> None:
        with pytest.raises(conserved.checking.UncheckableError, match="Expected the gradient of out to have shape"):
            check(torch.sin, torch.randn(3, 4), grad=torch.ones(3))


class TestHints:
    def test_a_fresh_dropout_mask_is_called_that(self) -> None:
        class Dropped(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x * (torch.rand_like(x) < 0.5) * 2

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> Tensor:
                return grads[0] * (torch.rand_like(grads[0]) < 0.5) * 2

        result = check(Dropped.apply, torch.randn(16, 24), names=("x",))
        meanings = " ".join(test.meaning for test in result.failures)
        assert "draws random numbers of its own" in meanings
        assert "strides of the output gradient are not read" not in str(result)

    def test_an_output_that_is_ignored_is_named(self) -> None:
        class Both(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
                ctx.save_for_backward(x)
                return x.sin(), x.square()

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> Tensor:
                return grads[0] * ctx.saved_tensors[0].cos()

        result = check(Both.apply, torch.randn(8, 12), names=("x",))
        assert any("ignores the gradient of out1" in test.meaning for test in result.failures), result
        assert "dx is zero" not in str(result)

    def test_an_output_that_is_used_alone_is_tested(self) -> None:
        class Both(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
                ctx.set_materialize_grads(False)
                ctx.save_for_backward(x)
                return x.sin(), x.square()

            @staticmethod
            def backward(ctx: Any, *slopes: Tensor | None) -> Tensor | None:
                (x,) = ctx.saved_tensors
                if slopes[0] is None:
                    return None
                return slopes[0] * x.cos() + (0 if slopes[1] is None else 2 * slopes[1] * x)

        result = check(Both.apply, torch.randn(8, 12), names=("x",))
        assert {test.what.partition(" gives")[0] for test in result.failures} == {"a loss of out1 alone"}, result


RARE = [
    each for each in HIDDEN if "output gradient is" in each.name or "equal" in each.name or each.name[-4:] == "zero"
]


@pytest.mark.parametrize("hidden", [each for each in RARE if each.kind == "rare"], ids=lambda hidden: hidden.name)
def test_special_values_of_inputs_and_output_gradients_are_tried(hidden: Hidden) -> None:
    assert checked(hidden, torch.float32).verdict == conserved.Verdict.REFUTED


def test_what_the_last_call_left_behind_is_not_read() -> None:
    """A workspace of the function, not of the call: right as long as every forward is followed by its backward."""
    workspace: list[Tensor] = []

    class Shared(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            workspace[:] = [x.detach().clone()]
            return F.silu(x)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            (x,) = workspace
            s = x.sigmoid()
            return grads[0] * (s + x * s * (1 - s))

    result = check(Shared.apply, torch.randn(8, 12), names=("x",))
    assert {test.what.partition(" between")[0] for test in result.failures} == {"a call with other inputs"}, result


@pytest.mark.parametrize(
    "function", [torch.sqrt, torch.Tensor.abs, lambda x: x.norm(dim=-1), lambda x: torch.xlogy(x, x)]
)
def test_a_gradient_that_is_infinite_where_there_is_no_derivative_is_no_alarm(function: Any) -> None:
    x = torch.rand(16, 12) + 0.1
    x[:, 3] = 0
    assert not check(function, x).failures


@pytest.mark.parametrize("function", [F.relu, F.leaky_relu, torch.abs])
def test_a_kink_at_zeros_of_inputs_that_are_not_negative_is_no_alarm(function: Any) -> None:
    """Sums of them stay on one side of the kink, where the function is linear; its gradient at zero is of neither."""
    assert not check(function, torch.randn(16, 12).relu()).failures


def test_a_gradient_that_divides_by_an_input_of_zero_is_refuted() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, v: Tensor) -> Tensor:
            out = x * v
            ctx.save_for_backward(x, out)
            return out

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
            x, out = ctx.saved_tensors
            return grads[0] * out / x, grads[0] * x

    result = check(Product.apply, torch.randn(8, 12), torch.randn(8, 12), names=("x", "v"))
    assert any(test.what.startswith("a finite gradient") and test.gradients == ("x",) for test in result.failures)


def test_a_compiled_function_is_compiled_once() -> None:
    import torch._dynamo

    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def act(x: Tensor, w: Tensor) -> Tensor:
        return F.gelu(x) * w

    result = check(torch.compile(act, backend=backend), torch.randn(6, 8), torch.randn(6, 8), names=("x", "w"))
    assert result.ok, result
    assert result.reference == "float64, not compiled"
    assert len(graphs) == 1
