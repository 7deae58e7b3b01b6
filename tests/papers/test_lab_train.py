"""Training of stacked seeds against plain loops, schedules, precision, resuming, and what is recorded on the way."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from conserved import LawSet, Monitor, recognize
from conserved_papers.lab.checkpoint import ForeignError
from conserved_papers.lab.data import Examples
from conserved_papers.lab.memory import bytes_kept, micro_batch
from conserved_papers.lab.recipes import (
    FULL,
    SMALL,
    Precision,
    Recipe,
    build,
    examples_of,
    named,
    small_images,
    small_text,
)
from conserved_papers.lab.schedule import Schedule
from conserved_papers.lab.train import DivergedError, Limits, batch_indices, loss_of, marks, train
from conserved_papers.lab.trajectory import Trajectory
from conserved_papers.lab.watched import watch, watch_recipe
from reference.descent import descend

pytestmark = pytest.mark.usefixtures("as_users_run_it")

TINY_SIZES = {"image": 8, "patch": 4, "dim": 8, "depth": 1, "heads": 2, "hidden": 6, "channels": 1, "classes": 10}


def tiny(batch: int | None = None, steps: int = 12) -> Recipe:
    return replace(small_images(batch), sizes=TINY_SIZES, examples=12, steps=steps, seeds=(0, 1, 2))


def tiny_text(gate: str = "softmax", steps: int = 8) -> Recipe:
    recipe = small_text()
    sizes = {**recipe.sizes, "dim": 8, "depth": 1, "hidden": 4, "experts": 3, "gate": gate, "top_k": 2}
    return replace(recipe, sizes=sizes, examples=4, length=8, steps=steps, seeds=(0, 1))


def test_the_laws_of_a_recipe_are_read_once_for_all_step_sizes_and_again_for_another_model() -> None:
    recipe, slower = tiny_text(), replace(tiny_text(), rates=(1e-6,), steps=3)
    other = tiny_text("sigmoid")
    examples = examples_of(recipe)
    first = watch_recipe(recipe, 0, build(recipe, 0), examples)
    assert watch_recipe(slower, 0, build(slower, 0), examples) is first
    result = watch_recipe(other, 0, build(other, 0), examples)
    plain = watch(build(other, 0), examples.loss, examples.inputs[:2])
    assert [symmetry.name for symmetry in result.laws] == [symmetry.name for symmetry in plain.laws]
    assert result.roles == plain.roles != first.roles
    assert watch_recipe(recipe, 1, build(recipe, 1), examples) is not first


def watched(loss: str, examples: Examples) -> Callable[[nn.Module], LawSet]:
    inputs = examples.to(torch.device("cpu"), torch.float64).inputs[:2]

    def both(model: nn.Module) -> LawSet:
        laws = recognize(model, inputs, loss=loss).select(lambda symmetry: symmetry.exact)
        return LawSet(symmetries=(*laws, *laws.baselines()), parameters=laws.parameters)

    return both


def objective(examples: Examples) -> Callable[[nn.Module], Tensor]:
    data = examples.to(torch.device("cpu"), torch.float64)
    return lambda model: loss_of(model(data.inputs), data.targets, data.loss)


@pytest.mark.parametrize(
    ("recipe", "rate"), [(tiny(), 0.05), (tiny_text(), 0.05), (named("relu-attention"), 1e-5)], ids=lambda v: str(v)[:0]
)
def test_seeds_trained_together_are_seeds_trained_one_by_one(recipe: Recipe, rate: float) -> None:
    recipe = replace(recipe, steps=8, seeds=(3, 4))
    examples = examples_of(recipe)
    result = train(recipe, examples, rate=rate)
    kind = "cross_entropy" if examples.loss == "cross_entropy" else "regression"
    for run in result:
        alone = descend(
            build(recipe, run.seed).double(),
            objective(examples),
            watched(kind, examples),
            step=rate,
            time=rate * recipe.steps,
        )
        assert run.loss == pytest.approx([alone.losses[step] for step in run.at], rel=1e-12)
        for family, drift in alone.drift.items():
            assert run.quantity(family).drift[-1] == pytest.approx(drift, rel=1e-6, abs=1e-15), family
        laws = watched(kind, examples)(alone.model)
        start = laws.reference(dict(build(recipe, run.seed).double().named_parameters()))
        by_family, by_block = laws.errors(start, by="family"), laws.errors(start, by="law")
        for family, error in by_family.items():
            assert run.quantity(family).mean[-1] == pytest.approx(error, rel=1e-6, abs=1e-14), family
        for symmetry in laws:
            if sum(s.block == symmetry.block and s.family == symmetry.family for s in laws) == 1:
                listed = run.quantity(symmetry.family).errors[symmetry.block][-1]
                assert listed == pytest.approx(by_block[symmetry.name], rel=1e-6, abs=1e-14), symmetry.name


def same(first: Trajectory, second: Trajectory, *, rel: float = 1e-9) -> None:
    assert first.at == second.at
    assert first.loss == pytest.approx(second.loss, rel=rel)
    for quantity in first.quantities:
        other = second.quantity(quantity.family)
        assert quantity.mean == pytest.approx(other.mean, rel=1e-5, abs=1e-14), quantity.family
        assert quantity.drift == pytest.approx(other.drift, rel=1e-5, abs=1e-14), quantity.family


def test_with_mini_batches_every_seed_sees_its_own_whether_alone_or_not() -> None:
    recipe = tiny(4)
    together = train(recipe, examples_of(recipe), rate=0.02)
    for run in together:
        (alone,) = train(recipe, examples_of(recipe), rate=0.02, seeds=[run.seed])
        same(run, alone)
    assert not torch.equal(batch_indices(0, 5, 4, 100), batch_indices(1, 5, 4, 100))
    assert not torch.equal(batch_indices(0, 5, 4, 100), batch_indices(0, 6, 4, 100))


@pytest.mark.parametrize("batch", [None, 8], ids=["full batch", "mini-batches"])
def test_micro_batches_add_up_to_the_batch(batch: int | None) -> None:
    recipe = tiny(batch, steps=4)
    whole, pieces = (train(recipe, examples_of(recipe), rate=0.02, limits=Limits(memory=m)) for m in (1 << 30, 1))
    for one, other in zip(whole, pieces, strict=True):
        same(one, other)


def test_a_micro_batch_fits_its_budget() -> None:
    recipe = small_images()
    examples, model = examples_of(recipe), build(recipe, 0)
    one = bytes_kept(model, examples, torch.float32)
    assert bytes_kept(model, examples, torch.float64) == pytest.approx(2 * one, rel=0.1)
    assert micro_batch(model, examples, torch.float32, 2, torch.device("cpu"), 60 * one) == 10
    assert micro_batch(model, examples, torch.float32, 2, torch.device("cpu"), 1) == 1


def test_schedules_add_up_as_theory_has_them() -> None:
    steps = 12
    cases: tuple[tuple[Literal["constant", "linear", "inverse"], list[float]], ...] = (
        ("constant", [0.02] * steps),
        ("linear", [0.02 * (1 - k / steps) for k in range(steps)]),
        ("inverse", [0.02 / (k + 1) for k in range(steps)]),
    )
    for kind, rates in cases:
        recipe = replace(tiny(steps=steps), schedule=Schedule(kind=kind), seeds=(0,))
        (run,) = train(recipe, examples_of(recipe), rate=0.02)
        assert run.time == pytest.approx([sum(rates[:k]) for k in run.at]), kind
        assert run.squares == pytest.approx([sum(rate**2 for rate in rates[:k]) for k in run.at]), kind


def test_recorded_steps_are_log_spaced_with_all_powers_of_two() -> None:
    result = marks(300)
    assert result[0] == 0
    assert result[-1] == 300
    assert {1, 2, 4, 8, 16, 32, 64, 128, 256} <= set(result)
    assert len(result) < 30
    assert marks(1) == [0, 1]


def test_the_bound_of_equation_9_holds_and_is_no_weaker_than_the_monitors() -> None:
    recipe = replace(tiny(steps=4), seeds=(0,))
    examples = examples_of(recipe)
    (run,) = train(recipe, examples, rate=0.05)
    assert run.at == (0, 1, 2, 3, 4), "every step is recorded, so the largest gradient is among them"
    model = build(recipe, 0).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    laws = recognize(model, loss="cross_entropy").select(lambda symmetry: symmetry.exact)
    monitor = Monitor(model, optimizer, laws)
    for _ in range(4):
        optimizer.zero_grad()
        objective(examples)(model).backward()
        optimizer.step()
        monitor.step()
    bounds = {bound.law: bound.bound for bound in monitor.bounds()}
    for family in ("query_key", "value_output", "gated_neurons", "gain"):
        quantity = run.quantity(family)
        assert quantity.bound is not None
        assert all(error <= bound * (1 + 1e-9) for error, bound in zip(quantity.mean, quantity.bound, strict=True))
        assert quantity.mean[-1] > 0.01 * quantity.bound[-1], "a bound that is never near says little"
    heads = [s for s in laws if s.family == "value_output"]
    mean = sum(bounds[s.name] / float(torch.linalg.vector_norm(monitor.reference.values[s.name])) for s in heads)
    assert (run.quantity("value_output").bound or ())[-1] <= mean / len(heads)


def test_quantities_are_told_apart_by_role() -> None:
    (softmax, *_), (sigmoid, *_) = (train(tiny_text(gate), examples_of(tiny_text(gate)), rate=0.05) for gate in GATES)
    assert softmax.quantity("shift").role == "law"
    assert softmax.quantity("shift").linear
    assert softmax.quantity("shift").mean[-1] < 1e-14
    assert softmax.quantity("not_shift").role == "impostor"
    assert not sigmoid.has("shift")
    assert sigmoid.quantity("claimed_shift").role == "claim"
    assert sigmoid.quantity("claimed_shift").mean[-1] > 1e-5
    # What Appendix E.2 names, sums over the input dimensions, is not conserved by softmax gating either.
    assert softmax.quantity("claimed_row_sums").mean[-1] > 1e-5
    assert softmax.quantity("claimed_row_sums").bound is None


GATES = ("softmax", "sigmoid")


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_coarse_gradients_leave_linear_laws_at_their_own_rounding(precision: Precision) -> None:
    recipe = replace(tiny(), precision=precision, weights="float64" if precision == "float32" else "float32")
    fine = train(tiny(), examples_of(recipe), rate=0.05)
    coarse = train(recipe, examples_of(recipe), rate=0.05)
    limit = {"float32": 1e-6, "bfloat16": 3e-2}[precision]
    for one, other in zip(fine, coarse, strict=True):
        assert one.quantity("class_shift").mean[-1] < 1e-13
        assert 1e-13 < other.quantity("class_shift").mean[-1] < limit
        assert other.loss[-1] == pytest.approx(one.loss[-1], rel=10 * limit)


class Stop(KeyboardInterrupt):
    """What Ctrl-C raises, from a place of the test's choosing."""


def interrupted_at(step: int) -> Callable[[int, int], None]:
    def progress(done: int, planned: int) -> None:
        if done == step:
            raise Stop

    return progress


def untimed(run: Trajectory) -> Trajectory:
    return replace(run, seconds=0.0, examples_per_second=0.0)


def test_an_interrupted_run_goes_on_and_gives_the_same_numbers(tmp_path: Path) -> None:
    recipe, file = tiny(4), tmp_path / "deep" / "run.pt"
    whole = train(recipe, examples_of(recipe), rate=0.02)
    for stop in (3, 7):
        with pytest.raises(Stop):
            train(
                recipe,
                examples_of(recipe),
                rate=0.02,
                limits=Limits(checkpoint=file),
                progress=interrupted_at(stop),
            )
        assert file.exists()
    resumed = train(recipe, examples_of(recipe), rate=0.02, limits=Limits(checkpoint=file))
    assert not file.exists()
    for one, other in zip(whole, resumed, strict=True):
        assert untimed(one) == untimed(other)


def test_a_checkpoint_of_another_run_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    recipe, limits = tiny(), Limits(checkpoint=tmp_path / "run.pt")
    with pytest.raises(Stop):
        train(recipe, examples_of(recipe), rate=0.02, limits=limits, progress=interrupted_at(2))
    with pytest.raises(ForeignError, match=r"its rate is 0\.02"):
        train(recipe, examples_of(recipe), rate=0.03, limits=limits)
    (tmp_path / "run.pt").write_bytes((tmp_path / "run.pt").read_bytes()[:200])
    with pytest.raises(ForeignError, match="Delete it"):
        train(recipe, examples_of(recipe), rate=0.02, limits=limits)


def test_a_run_stops_when_its_time_is_up_and_says_where() -> None:
    recipe = tiny(steps=10_000)
    for run in train(recipe, examples_of(recipe), rate=1e-4, limits=Limits(seconds=0.2)):
        assert 0 < run.steps < 10_000
        assert run.at[-1] == run.steps
        assert run.planned == 10_000


def test_a_loss_that_is_not_finite_ends_the_run_with_its_seed_and_step() -> None:
    recipe = replace(named("relu-attention"), seeds=(0, 1))
    with pytest.raises(DivergedError, match=r"seed \d is no longer finite at step .*smaller step"):
        train(recipe, examples_of(recipe), rate=10.0)


def test_seeds_must_differ() -> None:
    with pytest.raises(ValueError, match="differ"):
        train(tiny(), examples_of(tiny()), rate=0.1, seeds=[1, 1])


def test_trajectories_survive_json() -> None:
    recipe = replace(tiny(steps=2), seeds=(0,))
    (run,) = train(recipe, examples_of(recipe), rate=0.02)
    assert Trajectory.of(json.loads(json.dumps(run.record()))) == run
    with pytest.raises(ValueError, match="is missing"):
        Trajectory.of({"recipe": "x"})


def test_recipes_are_those_of_appendix_d() -> None:
    by_name = {recipe.name: recipe for recipe in FULL}
    sizes = {name: tuple(by_name[name].sizes[k] for k in ("dim", "depth", "heads", "hidden")) for name in by_name}
    assert sizes["cifar"] == (256, 6, 4, 1024)
    assert sizes["imagenet"] == (192, 12, 4, 768)
    assert sizes["penn"] == sizes["wikitext"] == (192, 12, 3, 768)
    assert by_name["cifar"].rates == (1e-4, 4e-4, 7e-4)
    assert by_name["imagenet"].rates == (1e-3, 2e-3, 3e-3)
    assert by_name["penn"].rates == (5e-6, 1e-5, 5e-5)
    assert by_name["wikitext"].rates == (2e-6, 5e-6, 1e-5)
    assert by_name["penn-sigmoid"].rates == (0.01, 0.02, 0.05)
    assert all(len(recipe.seeds) == 10 for recipe in FULL)
    assert {recipe.name for recipe in FULL if recipe.sizes.get("top_k") == 2} == {
        "penn-sparse", "wikitext-sparse", "penn-sparse-sigmoid", "wikitext-sparse-sigmoid",
    }  # fmt: skip


@pytest.mark.parametrize("recipe", [*SMALL, *FULL], ids=lambda recipe: recipe.name)
def test_every_recipe_builds_a_model_whose_laws_are_recognised(recipe: Recipe) -> None:
    """At its own width and, since layers are alike, with two of them."""
    layers = {"depth": 2} if "depth" in recipe.sizes else {}
    with torch.device("meta"):
        model = build(replace(recipe, sizes={**recipe.sizes, **layers}), 0)
    laws = recognize(model, loss="cross_entropy" if recipe.architecture != "relu_attention" else "any")
    assert len(laws) > 0
