"""Long runs: gradients in two precisions, the exact ledger, and interrupted runs bit for bit."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conserved_papers.lab.checkpoint import ForeignError
from conserved_papers.lab.data import Examples
from conserved_papers.lab.fits import fitted_exponent
from conserved_papers.lab.long import Arithmetic, LongRun, _Long, operations, recorded_steps, train_on
from conserved_papers.lab.recipes import Recipe, build, cifar, penn
from conserved_papers.lab.schedule import Schedule
from conserved_papers.lab.step_account import RunLedger
from conserved_papers.lab.train import DivergedError, Limits, loss_of
from conserved_papers.lab.trajectory import Trajectory
from conserved_papers.lab.watched import watch
from conserved_papers.lab.windows import comparison, in_step_size_at, windows

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
ROUNDING = {"double": 1e-13, "single": 2e-6}
"""Relative error of a gradient in each precision."""


def tiny(name: str, *, batch: int | None = None, steps: int = 6) -> Recipe:
    recipe = RECIPES[name]
    sizes = {**recipe.sizes, **TINY[recipe.architecture]}
    return replace(recipe, sizes=sizes, batch=batch, steps=steps, schedule=Schedule(kind="linear"))


def data_of(recipe: Recipe, count: int = 8) -> Examples:
    generator = torch.Generator().manual_seed(7)
    if recipe.wants == "text":
        span = torch.randint(40, (count, 13), generator=generator)
        return Examples(name="random", inputs=span[:, :-1].contiguous(), targets=span[:, 1:].contiguous())
    images = torch.randn(count, 3, 8, 8, generator=generator)
    return Examples(name="random", inputs=images, targets=torch.randint(10, (count,), generator=generator))


def exact_gradient(recipe: Recipe, examples: Examples) -> Tensor:
    """By the model's own forward pass over all examples at once, in float64."""
    model = build(recipe, 0).double()
    inputs = examples.to(torch.device("cpu"), torch.float64).inputs
    loss = loss_of(model(inputs), examples.targets, examples.loss)
    return torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, list(model.parameters()))])


@pytest.mark.parametrize("products", ROUNDING)
@pytest.mark.parametrize("name", RECIPES)
def test_accumulated_gradients_are_those_of_the_whole_batch(name: str, products: str) -> None:
    recipe = tiny(name)
    examples = data_of(recipe)
    run = _Long(recipe, examples, 1e-3, 0, Arithmetic(products=products, micro=3), torch.device("cpu"))
    run.gradient()
    result = torch.cat([gradient.flatten() for gradient in run.gradients.values()])
    exact = exact_gradient(recipe, examples)
    assert (result - exact).norm() / exact.norm() < ROUNDING[products]


def test_operations_are_six_per_weight_and_twelve_per_logit() -> None:
    model = build(tiny("decoder"), 0)
    linear = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embedding" not in name)
    assert operations(model, 12) == 6 * linear + 12 * 12 * 24


@pytest.mark.parametrize("products", ["half", "pieces"])
def test_a_precision_of_stored_runs_that_is_no_longer_computed_is_refused(products: str) -> None:
    with pytest.raises(ValueError, match="Expected products to be one of double, single"):
        trained(tiny("vision"), products)


class TestLedger:
    def test_a_step_is_what_the_moment_map_says(self) -> None:
        recipe = tiny("vision")
        model = build(recipe, 0).double()
        laws = watch(model, "cross_entropy", data_of(recipe).inputs[:2]).laws.select(lambda s: s.exact)
        theta = {name: p.detach().clone() for name, p in model.named_parameters()}
        grads = {name: torch.randn_like(p) for name, p in theta.items()}  # not a gradient: both parts are there
        ledger = RunLedger(laws, theta, grads)
        ledger.add(0.01)
        drift = laws.drift({name: 0.01 * s for name, s in grads.items()}, theta)
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

    def test_in_float32_drift_is_prediction_and_leak(self) -> None:
        run = trained(tiny("vision"), "single", rate=0.02).trajectory
        for quantity in laws_of(run):
            ledger = ledger_of(run, quantity.family)
            assert ledger["residual"][-1] < 1e-14
            # Coarser arithmetic leaks more than float64 does, and the account shows where the difference comes from.
            assert ledger["apart"][-1] == pytest.approx(ledger["leak"][-1], rel=1e-3, abs=1e-14)
        assert ledger_of(run, "value_output")["leak"][-1] > 1e-14


@pytest.mark.parametrize("products", ["double", "single"])
@pytest.mark.parametrize(("name", "batch"), [("decoder", None), ("vision", 4)])
def test_a_run_interrupted_twice_is_the_one_that_was_not(
    name: str, batch: int | None, products: str, tmp_path: Path
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
    trained(recipe, "double", checkpoint=tmp_path / "run.pt", steps=2)
    with pytest.raises(ForeignError, match="arithmetic"):
        trained(recipe, "single", checkpoint=tmp_path / "run.pt")


def test_progress_says_steps_and_time_left(tmp_path: Path) -> None:
    text: list[str] = []
    recipe = tiny("vision")
    trained(recipe, "single", checkpoint=tmp_path / "run.pt", steps=3)
    trained(recipe, "single", checkpoint=tmp_path / "run.pt", said=text)
    assert text[0].endswith("goes on from step 3 of 6")
    assert "step 6 of 6" in text[-1]
    assert "s left" in text[-1]


def test_numbers_that_are_no_longer_finite_stop_the_run() -> None:
    with pytest.raises(DivergedError, match="no longer finite"):
        trained(tiny("decoder"), "single", rate=1e30)


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
            result = in_step_size_at(runs, "value_output", share)
            assert result.value == pytest.approx(2, abs=0.02)
            predicted = in_step_size_at(runs, "value_output", share, predicted=True)
            assert predicted.value == pytest.approx(result.value, abs=1e-4)
        for window in windows(runs[0], "value_output"):
            assert window.in_squares.value == pytest.approx(1, abs=0.02)
        assert comparison(runs[0], "value_output").apart < 1e-4

    def test_an_interval_holds_the_slope_of_a_noisy_line(self) -> None:
        generator = torch.Generator().manual_seed(3)
        x = [float(k) for k in range(1, 40)]
        y = [k**1.5 * math.exp(0.05 * float(torch.randn((), generator=generator))) for k in x]
        result = fitted_exponent(x, y)
        assert result.low is not None
        assert result.high is not None
        assert result.low < 1.5 < result.high
        assert result.high - result.low < 0.1


def test_steps_are_recorded_evenly_too() -> None:
    steps = recorded_steps(15_000)
    assert {0, 15_000, 7_500, 1, 2, 4, 1024} <= set(steps)
    assert max(b - a for a, b in pairwise(steps)) <= 15_000 / 16 + 1


def trained(
    recipe: Recipe,
    products: str,
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
