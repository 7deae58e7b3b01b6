"""Long runs: float32 products in pieces, half precision, the exact ledger, and interrupted runs bit for bit."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from as_written import import_as_written
from conserved.papers.lab import half, pieces
from conserved.papers.lab.checkpoint import Foreign
from conserved.papers.lab.data import Examples
from conserved.papers.lab.fast import Unsupported, operations, outputs, summed_loss
from conserved.papers.lab.fits import slope
from conserved.papers.lab.long import Arithmetic, LongRun, recorded_steps, train_on
from conserved.papers.lab.pieces import MatrixProducts
from conserved.papers.lab.recipes import Recipe, build, cifar, penn
from conserved.papers.lab.schedule import Schedule
from conserved.papers.lab.step_account import RunLedger
from conserved.papers.lab.train import Diverged, Limits, loss_of
from conserved.papers.lab.trajectory import Trajectory
from conserved.papers.lab.watched import watch
from conserved.papers.lab.windows import comparison, in_step_size_at, windows

pytest.importorskip("triton")
import_as_written("conserved.papers.lab.piece_kernels")

pytestmark = pytest.mark.usefixtures("as_users_run_it")
"""Thousands of small evaluations, each of which the type checks of the tests would make several times as long."""

RECIPES: dict[str, Recipe] = {
    "decoder": penn(),
    "decoder, sigmoid gate, top 2": penn("sigmoid", 2),
    "vision": cifar(),
}
TINY: dict[str, dict[str, Any]] = {
    "decoder": {"vocab": 40, "dim": 24, "depth": 1, "heads": 3, "hidden": 16, "max_length": 12},
    "vision": {"image": 8, "patch": 4, "dim": 16, "depth": 1, "heads": 2, "hidden": 24},
}
ROUNDING: dict[MatrixProducts, float] = {"double": 1e-13, "single": 2e-6, "pieces": 2e-6, "half": 3e-3}
"""Relative error of a gradient in each arithmetic."""


def tiny(name: str, *, batch: int | None = None, steps: int = 6) -> Recipe:
    recipe = RECIPES[name]
    sizes = {**recipe.sizes, **TINY[recipe.architecture]}
    return replace(recipe, sizes=sizes, batch=batch, steps=steps, schedule=Schedule(kind="linear"))


def data_of(recipe: Recipe, count: int = 8) -> Examples:
    generator = torch.Generator().manual_seed(7)
    if recipe.wants == "text":
        stretch = torch.randint(40, (count, 13), generator=generator)
        return Examples(name="random", inputs=stretch[:, :-1].contiguous(), targets=stretch[:, 1:].contiguous())
    images = torch.randn(count, 3, 8, 8, generator=generator)
    return Examples(name="random", inputs=images, targets=torch.randint(10, (count,), generator=generator))


def exact_gradient(recipe: Recipe, examples: Examples) -> Tensor:
    """By the model's own forward pass in float64."""
    model = build(recipe, 0).double()
    inputs = examples.to(torch.device("cpu"), torch.float64).inputs
    loss = loss_of(model(inputs), examples.targets, examples.loss)
    return torch.cat([slope.flatten() for slope in torch.autograd.grad(loss, list(model.parameters()))])


def fast_gradient(recipe: Recipe, examples: Examples, products: MatrixProducts, shift: float = 1.3) -> Tensor:
    precision = torch.float64 if products == "double" else torch.float32
    model = build(recipe, 0).to(precision)
    examples = examples.to(torch.device("cpu"), precision)
    factor = float(examples.targets.numel())
    if products == "half":
        both = {name: half.two_pieces(p.detach()) for name, p in model.named_parameters()}
        computed = half.HalfModel(model, compiled=False)
        high, low = ({name: pair[place] for name, pair in both.items()} for place in (0, 1))
        loss = computed.summed_loss(examples.inputs, examples.targets, torch.tensor(shift), high, low)
        factor *= computed.factor * shift
    else:
        loss = summed_loss(model, examples.inputs, examples.targets, examples.loss, products)
    found = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([slope.flatten() for slope in found]).double() / factor


@pytest.mark.parametrize("products", ["double", "single", "pieces", "half"])
@pytest.mark.parametrize("name", RECIPES)
def test_fast_gradients_are_those_of_the_model(name: str, products: MatrixProducts) -> None:
    recipe = tiny(name)
    examples = data_of(recipe)
    exact = exact_gradient(recipe, examples)
    error = (fast_gradient(recipe, examples, products) - exact).norm() / exact.norm()
    assert error < ROUNDING[products]


def test_half_precision_differs_from_shift_to_shift_and_not_otherwise() -> None:
    recipe = tiny("vision")
    examples = data_of(recipe)
    first, again, other = (fast_gradient(recipe, examples, "half", shift) for shift in (1.3, 1.3, 1.7))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_pieces_hold_a_number_to_22_digits() -> None:
    x = torch.randn(64, 48) * torch.logspace(-3, 1, 48)
    high, low, same = pieces.cut(x, pieces._INPUT_ORDER, 2.0**8).float().unbind(1)
    assert torch.equal(high, same)
    assert bool(((high.double() + low.double()) / 2**8 - x.double()).abs().le(x.abs() * 2.0**-22 + 2.0**-33).all())


@pytest.mark.parametrize("count", [1, 7, 2048, 4099, 49_152])
def test_a_stretch_divides_the_tokens(count: int) -> None:
    assert count % pieces.stretch(count) == 0
    assert pieces.stretch(count) <= 2048


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("biased", [False, True])
class TestKernels:
    """In Triton's interpreter, against the same in PyTorch; two rows more than a tile."""

    rows, width, experts = 18, 256, 2

    def inputs(self, shared: bool, biased: bool) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        torch.manual_seed(0)
        bias = torch.randn(2 * self.width) if biased else None
        share = torch.rand(self.rows, self.experts) if shared else None
        return torch.randn(self.rows, 2 * self.width), bias, share, torch.randn(self.rows, self.width)

    def test_gates_in_pieces(self, shared: bool, biased: bool) -> None:
        from conserved.papers.lab.piece_kernels import gate_rows, gate_slopes

        branches, bias, share, above = self.inputs(shared, biased)
        hidden = self.width // (self.experts if shared else 1)
        order = pieces._INPUT_ORDER
        out = torch.empty(self.rows, 3, self.width, dtype=torch.float16)
        flags = {"BIASED": biased, "SHARED": shared, "COUNT": 3, "LOW": 1, "HEIGHT": 16, "ACROSS": 128}
        dummy = torch.zeros(1)
        places = (dummy if bias is None else bias, dummy if share is None else share)
        gate_rows[2, 2](branches, *places, out, self.rows, self.width, hidden, pieces._INPUTS, **flags)
        together(out, pieces.gate(branches, bias, share, order))
        wide = torch.empty(self.rows, 3, 2 * self.width, dtype=torch.float16)
        shares, biases = torch.zeros(self.rows, 2), torch.zeros(2, 2 * self.width)
        gate_slopes[2, 2](
            above, branches, *places, wide, shares, biases, self.rows, self.width, hidden, pieces._SLOPES, **flags
        )
        expected, of_bias, of_share = pieces.gate_back(above, branches, bias, share, order)
        together(wide, expected)
        if of_bias is not None:
            torch.testing.assert_close(biases.sum(0), of_bias, rtol=1e-5, atol=1e-4)
        if of_share is not None:
            torch.testing.assert_close(shares.unflatten(1, (self.experts, -1)).sum(-1), of_share, rtol=1e-5, atol=1e-4)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_gates_of_whole_numbers(self, shared: bool, biased: bool, dtype: torch.dtype) -> None:
        from conserved.papers.lab.piece_kernels import gate_rows, gate_slopes

        branches, bias, share, above = self.inputs(shared, biased)
        branches, above = branches.to(dtype).requires_grad_(), above.to(dtype)
        bias = None if bias is None else bias.to(dtype).requires_grad_()
        share = None if share is None else share.to(dtype).requires_grad_()
        hidden = self.width // (self.experts if shared else 1)
        flags = {"BIASED": biased, "SHARED": shared, "COUNT": 0, "LOW": 0, "HEIGHT": 16, "ACROSS": 128}
        places = [torch.zeros(1) if tensor is None else tensor.detach() for tensor in (bias, share)]
        sizes = (self.rows, self.width, hidden, 1.0)
        out, wide = torch.empty_like(above), torch.empty_like(branches.detach())
        shares, biases = above.new_zeros(self.rows, 2), above.new_zeros(2, 2 * self.width)
        gate_rows[2, 2](branches.detach(), *places, out, *sizes, **flags)
        gate_slopes[2, 2](above, branches.detach(), *places, wide, shares, biases, *sizes, **flags)

        gates, ups = (branches if bias is None else branches + bias).chunk(2, 1)
        plain = torch.nn.functional.silu(gates) * ups
        plain = plain if share is None else plain * share.repeat_interleave(hidden, 1)
        slopes = torch.autograd.grad(plain, [leaf for leaf in (branches, bias, share) if leaf is not None], above)
        found = [wide]
        found += [] if bias is None else [biases.sum(0)]
        found += [] if share is None else [shares.unflatten(1, (self.experts, -1)).sum(-1)]
        near = 1e-12 if dtype == torch.float64 else 1e-5
        for mine, expected in zip([out, *found], [plain, *slopes], strict=True):
            torch.testing.assert_close(mine, expected.detach(), rtol=near, atol=near)

    def test_gates_in_half_precision(self, shared: bool, biased: bool) -> None:
        from conserved.papers.lab.piece_kernels import half_gate, half_gate_slopes

        branches, bias, share, above = self.inputs(shared, biased)
        shift = torch.tensor(1.4)
        branches, above = (branches * 64 * shift).half(), (above * 16).half()
        hidden = self.width // (self.experts if shared else 1)
        places = (shift if bias is None else bias, shift if share is None else share, shift)
        flags = {"BIASED": biased, "SHARED": shared, "HEIGHT": 16, "ACROSS": 128}
        out = torch.empty(self.rows, self.width, dtype=torch.float16)
        half_gate[2, 2](branches, *places, out, self.rows, self.width, hidden, 64.0, 4.0, **flags)
        torch.testing.assert_close(out, half.half_gate(branches, bias, share, shift), rtol=2e-3, atol=1e-4)
        wide, sums = torch.empty(self.rows, 2 * self.width, dtype=torch.float16), torch.zeros(self.rows, 2)
        half_gate_slopes[2, 2](above, branches, *places, wide, sums, self.rows, self.width, hidden, 64.0, 16.0, **flags)
        slopes, expected = half.half_gate_slopes(above, branches, bias, share, shift)
        torch.testing.assert_close(wide, slopes, rtol=2e-3, atol=1e-4)
        if shared:
            torch.testing.assert_close(sums, expected, rtol=1e-5, atol=1e-4)


def test_rows_are_cut_by_the_kernel_as_by_pytorch() -> None:
    from conserved.papers.lab.piece_kernels import cut_rows

    x = torch.randn(19, 130)
    out = torch.empty(19, 3, 130, dtype=torch.float16)
    cut_rows[2, 2](x, out, 19, 130, 256.0, COUNT=3, LOW=1, HEIGHT=16, ACROSS=128)
    assert torch.equal(out, pieces.cut(x, pieces._INPUT_ORDER, 256.0))


def together(found: Tensor, expected: Tensor) -> None:
    """Pieces may round differently; what they add up to may not."""
    for tensor, other in ((found[:, 0], expected[:, 0]), (found[:, :2].float().sum(1), expected[:, :2].float().sum(1))):
        torch.testing.assert_close(tensor.float(), other.float(), rtol=2e-3, atol=1e-2)
    scale = expected.float().abs().max()
    assert (found[:, :2].float().sum(1) - expected[:, :2].float().sum(1)).abs().max() < 2e-6 * scale


def test_operations_are_six_per_weight_and_twelve_per_logit() -> None:
    model = build(tiny("decoder"), 0)
    linear = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embedding" not in name)
    assert operations(model, 12) == 6 * linear + 12 * 12 * 24


def test_models_of_other_parts_are_refused() -> None:
    with pytest.raises(Unsupported, match="decoder or a vision transformer"):
        outputs(torch.nn.Linear(2, 2), torch.zeros(1, 2), "single")


class TestLedger:
    def test_a_step_is_what_the_moment_map_says(self) -> None:
        recipe = tiny("vision")
        model = build(recipe, 0).double()
        laws = watch(model, "cross_entropy", data_of(recipe).inputs[:2]).laws.select(lambda s: s.exact)
        theta = {name: p.detach().clone() for name, p in model.named_parameters()}
        slopes = {name: torch.randn_like(p) for name, p in theta.items()}  # not a gradient: both parts are there
        ledger = RunLedger(laws, theta, slopes)
        ledger.add(0.01)
        drift = laws.drift({name: 0.01 * s for name, s in slopes.items()}, theta)
        expected = torch.cat([value.flatten() for value in drift.values()])
        torch.testing.assert_close(ledger.first + ledger.second, expected, rtol=1e-11, atol=1e-13)
        assert ledger.first.norm() > 10 * ledger.second.norm()

    @pytest.mark.parametrize("batch", [None, 4])
    def test_in_float64_the_prediction_is_the_drift(self, batch: int | None) -> None:
        recipe = tiny("decoder", batch=batch)
        run = trained(recipe, "double", rate=0.05).trajectory
        for quantity in laws_of(run):
            ledger = ledger_of(run, quantity.family)
            assert ledger["leak"][-1] < 1e-17
            assert ledger["residual"][-1] < 1e-14
            if not quantity.linear:
                assert ledger["apart"][-1] < 1e-6 * quantity.drift[-1]

    @pytest.mark.parametrize("products", ["single", "pieces", "half"])
    def test_in_any_arithmetic_drift_is_prediction_and_leak(self, products: MatrixProducts) -> None:
        run = trained(tiny("vision"), products, rate=0.02).trajectory
        for quantity in laws_of(run):
            ledger = ledger_of(run, quantity.family)
            assert ledger["residual"][-1] < 1e-14
            # Coarser arithmetic leaks more than float64 does, and the account shows where the difference comes from.
            assert ledger["apart"][-1] == pytest.approx(ledger["leak"][-1], rel=1e-3, abs=1e-14)
        assert ledger_of(run, "value_output")["leak"][-1] > 1e-14


@pytest.mark.parametrize("products", ["double", "pieces", "half"])
@pytest.mark.parametrize(("name", "batch"), [("decoder", None), ("vision", 4)])
def test_a_run_interrupted_twice_is_the_one_that_was_not(
    name: str, batch: int | None, products: MatrixProducts, tmp_path: Path
) -> None:
    recipe = tiny(name, batch=batch)
    whole = trained(recipe, products)
    parts = [trained(recipe, products, checkpoint=tmp_path / "run.pt", steps=2) for _ in range(3)]
    assert [part.trajectory.steps for part in parts] == [2, 4, 6]
    assert parts[-1].finished
    assert [(piece["from"], piece["to"]) for piece in parts[-1].pieces] == [(0, 2), (2, 4), (4, 6)]
    assert parts[-1].pieces[-1]["weights_sha256"] == whole.pieces[-1]["weights_sha256"]
    assert parts[-1].trajectory.quantities == whole.trajectory.quantities
    assert parts[-1].trajectory.loss == whole.trajectory.loss


def test_a_checkpoint_of_another_arithmetic_is_refused(tmp_path: Path) -> None:
    recipe = tiny("vision")
    trained(recipe, "pieces", checkpoint=tmp_path / "run.pt", steps=2)
    with pytest.raises(Foreign, match="arithmetic"):
        trained(recipe, "single", checkpoint=tmp_path / "run.pt")


def test_progress_says_steps_and_time_left(tmp_path: Path) -> None:
    said: list[str] = []
    recipe = tiny("vision")
    trained(recipe, "single", checkpoint=tmp_path / "run.pt", steps=3)
    trained(recipe, "single", checkpoint=tmp_path / "run.pt", said=said)
    assert said[0].endswith("goes on from step 3 of 6")
    assert "step 6 of 6" in said[-1]
    assert "s left" in said[-1]


def test_numbers_beyond_half_precision_stop_the_run() -> None:
    with pytest.raises(Diverged, match="no longer finite"):
        trained(tiny("decoder"), "half", rate=1e8)


def test_a_run_survives_json() -> None:
    run = trained(tiny("vision"), "single")
    assert LongRun.of(run.record()) == run
    record = run.trajectory.record()
    for quantity in record["quantities"]:
        del quantity["ledger"]  # as written before there was one
    assert all(quantity.ledger is None for quantity in Trajectory.of(record).quantities)


class TestWindows:
    def test_exponents_are_found_where_they_differ(self) -> None:
        run = trained(tiny("vision", steps=1), "double").trajectory
        at = tuple(recorded_steps(60))
        bent = tuple(0.0 if not k else float(k) ** 0.5 if k > 30 else k / 30**0.5 for k in at)
        quantities = tuple(replace(q, drift=bent, ledger=None) for q in run.quantities)
        squares = tuple(float(k) for k in at)
        long = replace(run, at=at, squares=squares, steps=60, planned=60, quantities=quantities)
        early, middle, late = windows(long, "query_key")
        assert (early.first, late.last) == (2, 60)
        assert early.in_k.value == pytest.approx(1, abs=1e-9)
        assert middle.in_k.value == pytest.approx(1, abs=1e-9)
        assert late.in_k.value == pytest.approx(0.5, abs=0.02)

    def test_small_steps_give_two_in_the_step_size_and_one_in_the_sum_of_squares(self) -> None:
        runs = [trained(tiny("vision", steps=12), "double", rate=rate).trajectory for rate in (1e-4, 2e-4)]
        for share in (0.5, 1.0):
            found = in_step_size_at(runs, "value_output", share)
            assert found.value == pytest.approx(2, abs=0.02)
            predicted = in_step_size_at(runs, "value_output", share, predicted=True)
            assert predicted.value == pytest.approx(found.value, abs=1e-4)
        for window in windows(runs[0], "value_output"):
            assert window.in_squares.value == pytest.approx(1, abs=0.02)
        assert comparison(runs[0], "value_output").apart < 1e-4

    def test_an_interval_holds_the_slope_of_a_noisy_line(self) -> None:
        generator = torch.Generator().manual_seed(3)
        x = [float(k) for k in range(1, 40)]
        y = [k**1.5 * math.exp(0.05 * float(torch.randn((), generator=generator))) for k in x]
        found = slope(x, y)
        assert found.low is not None
        assert found.high is not None
        assert found.low < 1.5 < found.high
        assert found.high - found.low < 0.1


def test_steps_are_recorded_evenly_too() -> None:
    steps = recorded_steps(15_000)
    assert {0, 15_000, 7_500, 1, 2, 4, 1024} <= set(steps)
    assert max(b - a for a, b in pairwise(steps)) <= 15_000 / 16 + 1


def trained(
    recipe: Recipe,
    products: MatrixProducts,
    *,
    rate: float = 1e-3,
    checkpoint: Path | None = None,
    steps: int | None = None,
    said: list[str] | None = None,
) -> LongRun:
    return train_on(
        recipe,
        data_of(recipe),
        rate=rate,
        seed=0,
        arithmetic=Arithmetic(products=products, micro=4),
        limits=Limits(checkpoint=checkpoint, steps=steps),
        say=(lambda _: None) if said is None else said.append,
    )


def laws_of(run: Trajectory) -> list[Any]:
    return [quantity for quantity in run.quantities if quantity.role == "law"]


def ledger_of(run: Trajectory, family: str) -> Any:
    ledger = run.quantity(family).ledger
    assert ledger is not None
    return ledger
