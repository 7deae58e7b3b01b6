"""conserved.check: defects are seen and described, right functions pass, bad input gets a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import conserved
from broken_kernels import CATALOGUE, FAMILIES, RACE, Planted, inputs_for, kernel
from conserved.checking import Method, UncheckableError, check
from conserved.testing import Setup, assert_backward, over_dtypes_and_lengths
from kernel_zoo import DTYPES, ZOO, drawn

pytestmark = [pytest.mark.usefixtures("as_users_run_it"), pytest.mark.filterwarnings("ignore")]


def checked(planted: Planted, dtype: torch.dtype) -> conserved.Check:
    family = FAMILIES[planted.family]
    # A dropped tile is drawn at random, and in bfloat16 not every draw is seen: every run begins with the same.
    RACE.manual_seed(1)
    return check(kernel(planted.family, planted.defect), *inputs_for(planted.family, dtype), names=family.names)


@pytest.mark.parametrize("planted", CATALOGUE[::4], ids=lambda planted: planted.name)
def test_a_planted_defect_is_seen_in_single_precision(planted: Planted) -> None:
    result = checked(planted, torch.float32)
    assert result.verdict == conserved.Verdict.REFUTED
    assert not result.ok
    assert result.conclusive


@pytest.mark.parametrize("planted", CATALOGUE[2::8], ids=lambda planted: planted.name)
def test_a_planted_defect_is_seen_in_bfloat16_or_is_rounding(planted: Planted) -> None:
    result = checked(planted, torch.bfloat16)
    assert bool(result.failures) != bool(planted.unseen), result


@pytest.mark.parametrize("defect", ["mask leaks at one tile", "a random tile of dq dropped"])
def test_defects_that_once_passed_for_rounding_in_bfloat16_are_seen(defect: str) -> None:
    assert checked(Planted(family="attention", defect=defect), torch.bfloat16).failures


def test_the_catalogue_is_as_large_as_promised() -> None:
    assert len(CATALOGUE) >= 60
    assert len({planted.name for planted in CATALOGUE}) == len(CATALOGUE)


@pytest.mark.parametrize("seed", range(5, 2000, 75))
def test_a_right_function_raises_no_alarm(seed: int) -> None:
    name, dtype, fn, inputs = drawn(seed)
    result = check(fn, *inputs, seed=seed)
    assert not result.failures, f"{name} {dtype}\n{result}"


def test_the_sample_of_right_functions_reaches_every_function_and_precision() -> None:
    seeds = range(5, 2000, 75)
    assert {seed % len(ZOO) for seed in seeds} == set(range(len(ZOO)))
    assert {(seed // len(ZOO)) % len(DTYPES) for seed in seeds} == set(range(len(DTYPES)))


MEANINGS = [
    ("attention", "scale twice in dq", "q", "1/√d with d = 8 applied twice"),
    ("attention", "base two in dq and dk", "k", "ln 2"),
    ("attention", "missing softmax correction", "k", "a missing correction term"),
    ("attention", "dv doubled", "v", "dv is 2 times what it should be"),
    ("attention", "group averaged", "v", "2 times too small"),
    ("attention", "strides of the output gradient ignored", "q", "strides of the output gradient are not read"),
    ("attention", "a random tile of dq dropped", "q", "from run to run"),
    ("rms norm", "gain without gradient", "weight", "returns None"),
    ("cross-entropy", "output gradient ignored", "logits", "not linear in the output gradient"),
]


@pytest.mark.parametrize(("family", "defect", "name", "said"), MEANINGS, ids=[row[1] for row in MEANINGS])
def test_a_failure_says_what_it_means(family: str, defect: str, name: str, said: str) -> None:
    result = checked(Planted(family=family, defect=defect), torch.float32)
    assert name in result.suspects
    assert said in " ".join(test.meaning for test in result.failures if name in test.gradients), result


def test_a_failure_says_where() -> None:
    q = torch.randn(2, 4, 48, 8)
    k, v = torch.randn(2, 2, 48, 8), torch.randn(2, 2, 48, 8)
    result = check(kernel("attention", "stale tile in dk"), q, k, v, names=("q", "k", "v"))
    assert result.suspects == ("k",)
    assert any("32–47 (the last tile of 16) of axis 2 of dk" in test.where for test in result.failures), result


def test_each_gradient_has_its_tests_and_the_verdict_its_evidence() -> None:
    q, k, v = (torch.randn(2, 2, 12, 8) for _ in range(3))
    result = check(F.scaled_dot_product_attention, q, k, v, names=("q", "k", "v"))
    assert result.ok
    assert result.conclusive
    assert result.verdict == conserved.Verdict.VERIFIED
    assert result.untested == {}
    for name, tests in result.tested.items():
        assert {test.method for test in tests} == set(Method), name
        assert max(test.residual for test in tests if test.method is Method.IDENTITY) < 1e-5
    assert json.loads(json.dumps(result.record()))["ok"] is True
    assert "dq" in str(result)


def test_a_wrong_factor_that_nothing_can_see_leaves_the_check_inconclusive() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            # So coarse that no slope can be taken, and no symmetry seen.
            return (x.exp() * 4).round() / 4

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * ctx.saved_tensors[0].exp()

    result = check(Square.apply, torch.randn(3, 5), names=("x",))
    if not result.failures:
        assert not result.conclusive
        assert "factor" in " ".join(result.untested["x"])
    else:
        assert {test.method for test in result.failures} <= {Method.DERIVATIVE, Method.RELATION}


def test_the_parameters_of_a_module_are_inputs() -> None:
    result = check(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(5, 6))
    assert set(result.inputs) == {"input", "0.weight", "0.bias", "2.weight", "2.bias"}
    assert result.ok


def test_an_autograd_function_gives_its_name_and_those_of_its_inputs() -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: Tensor, factor: Tensor) -> Tensor:
            ctx.save_for_backward(values, factor)
            return values * factor

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
            values, factor = ctx.saved_tensors
            return grads[0] * factor, grads[0] * values

    result = check(Scaled.apply, torch.randn(4, 3), torch.randn(4, 3))
    assert (result.function, list(result.inputs)) == ("Scaled", ["values", "factor"])
    assert result.ok, result


def test_the_users_random_numbers_are_left_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    check(torch.tanh, torch.ones(3, 4).cumsum(1))
    assert torch.equal(before, torch.get_rng_state())


def test_inputs_and_their_gradients_are_left_alone() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    saved = x.detach().clone()
    check(torch.tanh, x)
    assert x.grad is None
    assert torch.equal(x, saved)


def test_a_gain_of_ones_does_not_hide_that_it_was_forgotten() -> None:
    result = check(kernel("rms norm", "gain forgotten in dx"), torch.randn(4, 6, 16), torch.ones(16), names=("x", "w"))
    assert "x" in result.suspects
    assert any("w had all entries equal" in note for note in result.notes)


def _inplace(x: Tensor) -> Tensor:
    class Scribble(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x.clone())
            out = x.sin()
            x.zero_()
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * ctx.saved_tensors[0].cos()

    return Scribble.apply(x)


def test_a_function_that_writes_into_its_input_is_given_copies() -> None:
    x = torch.randn(4, 5)
    saved = x.clone()
    result = check(_inplace, x)
    assert result.ok
    assert torch.equal(x, saved)
    assert any("writes into x" in note for note in result.notes)


def test_a_backward_that_overwrites_the_output_gradient_is_noted() -> None:
    class Greedy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 3

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad.mul_(3)

    result = check(Greedy.apply, torch.randn(4, 5), names=("x",))
    assert any("overwrites the output gradient" in note for note in result.notes)


def test_several_outputs_and_dropout_with_a_seed() -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.dropout(x, 0.3), x.square(), x.argmax(-1)

    assert check(both, torch.randn(6, 20)).ok


def test_an_input_without_influence_needs_no_gradient() -> None:
    result = check(lambda x, y: x * 2, torch.randn(3, 4), torch.randn(5))
    assert result.ok
    assert "does not depend on it" in result.untested["y"][0]


_CALLS = iter(range(10**6))

BAD: dict[str, tuple[Callable[..., Any], list[Any], str]] = {
    "random": (lambda x: x * (1 + next(_CALLS)), [torch.randn(3, 4)], "to be deterministic, got results that differ"),
    "returns nothing": (lambda x: None, [torch.randn(3, 4)], "to return a floating-point tensor, got none"),
    "returns integers": (lambda x: x.argmax(-1), [torch.randn(3, 4)], "to return a floating-point tensor, got none"),
    "takes integers": (lambda x: x * 2, [torch.arange(4)], "only tensors of int64"),
    "no graph": (lambda x: x.detach() * 2, [torch.randn(3, 4)], "with a grad_fn, got none"),
    "not a function": (3, [torch.randn(3, 4)], "cannot be called"),  # type: ignore[dict-item]
    "infinite input": (torch.tanh, [torch.full((3,), torch.inf)], "got infinities or NaN in"),
    "infinite output": (torch.log, [-torch.ones(3).cumsum(0)], "Expected finite outputs"),
    "empty": (torch.tanh, [torch.empty(0, 4)], "at least one non-empty floating-point tensor"),
    "no tensor": (lambda x: x, [2.0], "no tensor"),
}


@pytest.mark.parametrize(("fn", "inputs", "said"), BAD.values(), ids=BAD)
def test_bad_input_gets_one_clear_sentence(fn: Callable[..., Any], inputs: list[Any], said: str) -> None:
    with pytest.raises(UncheckableError, match=said):
        check(fn, *inputs)


def test_a_function_that_refuses_other_shapes_says_so_in_a_note() -> None:
    def stubborn(x: Tensor) -> Tensor:
        if x.shape != (4, 16):
            raise RuntimeError("only 4 by 16")
        return x.sin()

    result = check(stubborn, torch.randn(4, 16))
    assert result.ok
    refused = [note for note in result.notes if "refuses them (RuntimeError: only 4 by 16)" in note]
    assert len(refused) == 2, "one note for each axis"


def test_what_the_function_itself_raises_reaches_the_user() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        check(torch.matmul, torch.randn(3, 4), torch.randn(3, 4))


@over_dtypes_and_lengths(lengths=(5, 17))
def test_a_parametrised_kernel(setup: Setup) -> None:
    q, k, v = (setup.tensor(2, 2, setup.length, 8) for _ in range(3))
    assert_backward(F.scaled_dot_product_attention, q, k, v, is_causal=True, names=("q", "k", "v"))


def test_assert_backward_says_what_failed() -> None:
    with pytest.raises(AssertionError, match="dv is 2 times what it should be"):
        assert_backward(
            kernel("attention", "dv doubled"), *inputs_for("attention", torch.float32), names=("q", "k", "v")
        )


def test_assert_backward_shows_no_code_of_this_package_for_bad_input() -> None:
    with pytest.raises(UncheckableError, match="with a grad_fn, got none") as caught:
        assert_backward(torch.Tensor.detach, torch.randn(3))
    files = [str(entry.path) for entry in caught.traceback]
    assert sum("conserved" in Path(file).parts[-2:] for file in files) <= 1
    assert not any("numerical_function" in file for file in files)


class _Halved(torch.autograd.Function):
    """The sine with half of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * x.cos() / 2


def test_a_backward_that_is_wrong_only_where_it_is_compiled_is_seen_there() -> None:
    def sine(x: Tensor) -> Tensor:
        return _Halved.apply(x) if torch.compiler.is_compiling() else x.sin()

    x = torch.randn(5, 4)
    assert check(sine, x).ok
    result = check(sine, x, compiled="aot_eager")
    assert {test.what for test in result.failures} == {"under torch.compile the gradient is the same"}
    assert check(torch.sin, x, compiled="aot_eager").ok


def test_a_function_that_cannot_be_compiled_is_checked_all_the_same() -> None:
    result = check(torch.sin, torch.randn(5, 4), compiled="no such backend")
    assert result.ok
    assert any("compiled function was not tested" in note for note in result.notes)
