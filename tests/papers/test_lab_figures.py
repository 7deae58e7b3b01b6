"""The figures of the paper from real small runs: the numbers they must show, and that they can be drawn."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jaxtyping
import pytest

from conserved.output.figure import Figure, Table
from conserved_papers.lab.accounts import Account
from conserved_papers.lab.counts import COMPONENTS, Count
from conserved_papers.lab.exponents import at_flow_time, by_rate, growth, in_step_size
from conserved_papers.lab.figures import CODES, all_figures
from conserved_papers.lab.levels import RATES, Levels
from conserved_papers.lab.places import Here
from conserved_papers.lab.recipes import named
from conserved_papers.lab.sweep import keep, sweep, trainings, trajectories
from conserved_papers.lab.task import Task
from conserved_papers.lab.trajectory import Trajectory
from made_once import made_once

pytestmark = pytest.mark.slow

STEPS = {
    "digits": 12,
    "bytes": 12,
    "digits-sgd": 32,
    "bytes-sgd": 16,
    "bytes-sigmoid": 8,
    "relu-attention": 8,
    "digits-decaying": 8,
}
"""Of the small reproduction, which has 64 of each: batches need more of them before their noise is small enough."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A part of the small reproduction, with all its seeds, in float64."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield made_once("small reproduction", tmp_path_factory, reproduced)
    jaxtyping.config.update("jaxtyping_disable", False)


def reproduced(folder: Path) -> Path:
    recipes = [replace(named(name), steps=steps) for name, steps in STEPS.items()]
    tasks: list[Task] = [*trainings(recipes), *(Levels(rate=rate) for rate in RATES)]
    tasks += [Account(optimizer=name) for name in ("sgd", "adam", "momentum")]
    tasks += [Count(component=name) for name in ("swiglu", "sigmoid", "softmax")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("conserved_papers.lab.accounts._STEPS", 20)
        assert not sweep(tasks, folder / "store.db", Here()).failures
    return folder / "store.db"


@pytest.fixture(scope="module")
def figures(store: Path) -> dict[str, Figure]:
    return {figure.code: figure for figure in all_figures(store)}


def runs(store: Path, recipe: str) -> dict[float, list[Trajectory]]:
    return by_rate([run for run in trajectories(store) if run.recipe == recipe])


LAWS = [
    pytest.param("digits", "query_key", id="attention"),
    pytest.param("digits", "value_output", id="values and output"),
    pytest.param("bytes", "query_key", id="rotary attention"),
    pytest.param("digits", "gated_neurons", id="SwiGLU"),
    pytest.param("bytes", "gated_neurons", id="SwiGLU experts"),
    pytest.param("digits-sgd", "query_key", id="attention, mini-batches"),
    pytest.param("bytes-sgd", "query_key", id="rotary attention, mini-batches"),
    pytest.param("digits-sgd", "gated_neurons", id="SwiGLU, mini-batches"),
]


@pytest.mark.parametrize(("recipe", "family"), LAWS)
def test_the_drift_of_a_quadratic_law_is_as_tau_squared_k(store: Path, recipe: str, family: str) -> None:
    result = runs(store, recipe)
    assert min(len(group) for group in result.values()) >= 5
    assert growth(result[max(result)], family).value == pytest.approx(1, abs=0.15)
    assert in_step_size(result, family).value == pytest.approx(2, abs=0.2)
    assert at_flow_time(result, family).value == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize("recipe", ["bytes", "bytes-sgd"])
def test_softmax_gating_stays_at_rounding(store: Path, recipe: str) -> None:
    worst = max(max(run.quantity("shift").mean) for group in runs(store, recipe).values() for run in group)
    assert 0 < worst < 1e-14


def test_sigmoid_gating_drifts_at_fixed_flow_time_whatever_the_step(store: Path) -> None:
    result = runs(store, "bytes-sigmoid")
    order = at_flow_time(result, "claimed_shift")
    assert order.value == pytest.approx(0, abs=0.02)
    assert min(run.quantity("claimed_shift").mean[-1] for run in result[max(result)]) > 1e-6
    # Growth with the step size at fixed k, which the paper reads as O(τ²k), has exponent 1 and not 2.
    assert in_step_size(result, "claimed_shift").value == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(
    ("recipe", "family"),
    [("digits", "query_key"), ("digits", "gated_neurons"), ("bytes", "query_key"), ("bytes", "shift")],
)
def test_what_is_not_conserved_drifts_a_hundred_times_more(store: Path, recipe: str, family: str) -> None:
    for group in runs(store, recipe).values():
        spoiled, lawful = (sum(run.quantity(name).mean[-1] for run in group) for name in (f"not_{family}", family))
        assert spoiled > 100 * lawful
        for run in group:
            # Not swayed by a law that starts near zero, and so for every single seed.
            assert run.quantity(f"not_{family}").drift[-1] > 100 * run.quantity(family).drift[-1]


def test_every_figure_with_data_is_there_and_every_finding_is_as_expected(figures: dict[str, Figure]) -> None:
    assert list(figures) == list(CODES)
    for figure in figures.values():
        assert figure.findings, figure.code
        for finding in figure.findings:
            assert math.isfinite(finding.value), finding
            assert finding.holds, finding


def test_findings_that_are_not_as_expected_say_so(store: Path, tmp_path: Path) -> None:
    """A gate's law that drifts, a law with the exponents of an impostor."""
    spoiled = tmp_path / "spoiled.db"
    for run in trajectories(store):
        if run.recipe == "bytes":
            swapped = {"shift": run.quantity("not_shift"), "query_key": run.quantity("not_query_key")}
            quantities = tuple(
                replace(q, mean=swapped[q.family].mean, drift=swapped[q.family].drift) if q.family in swapped else q
                for q in run.quantities
            )
            keep(spoiled, "trajectory", run.name, replace(run, quantities=quantities).record())
    (figure,) = all_figures(spoiled)
    verdicts = {finding.what: finding.holds for finding in figure.findings}
    assert verdicts == {
        "rotary attention: exponent of the drift in iteration k": True,
        "rotary attention: exponent of the drift in step size τ at fixed k": False,
        "rotary attention: largest share of the bound (9) at the largest step size": False,
        "softmax gate Σ Wᵢ: largest drift at any step size": False,
    }


def axes(figure: Figure) -> set[str]:
    return {key for key in figure.layout if key.startswith(("xaxis", "yaxis"))}


def test_figures_are_plain_data_that_can_be_drawn(figures: dict[str, Figure]) -> None:
    for figure in figures.values():
        record = json.loads(json.dumps(figure.record(), allow_nan=False))
        assert set(record) == {
            "code", "title", "caption", "alt", "data", "layout", "findings", "table", "section",
        }  # fmt: skip
        assert record["data"], figure.code
        for trace in record["data"]:
            assert len(trace["x"]) == len(trace["y"]) > 0, (figure.code, trace["name"])
            assert any(value is not None for value in trace["y"]), (figure.code, trace["name"])
            for key in ("xaxis", "yaxis"):
                shown = trace.get(key, key[0])
                assert shown.replace(key[0], key, 1) in axes(figure), (figure.code, shown)
        for key in axes(figure):
            assert record["layout"][key]["title"]["text"]
        assert not coloured(record["layout"]), "backgrounds and text are coloured by whoever shows the figure"
        assert figure.alt
        assert figure.caption


def coloured(layout: dict[str, Any]) -> bool:
    return any(key in layout for key in ("paper_bgcolor", "plot_bgcolor", "font", "template"))


def test_each_step_size_has_layers_a_mean_a_band_and_the_bound(figures: dict[str, Figure]) -> None:
    traces = [trace for trace in figures["figure3"].data if trace["xaxis"] == "x"]
    names = [trace["name"] for trace in traces]
    for rate in ("0.0001", "0.0002", "0.0004"):
        mine = [trace for trace in traces if trace["name"] == f"τ = {rate}"]
        widths = sorted(trace["line"]["width"] for trace in mine)
        assert widths == [0, 0.8, 0.8, 3.2], "a band, two layers, their mean"
        assert f"bound (9), τ = {rate}" in names


def test_a_table_has_as_many_cells_as_columns() -> None:
    with pytest.raises(ValueError, match="Expected rows of 2 cells"):
        Table(columns=("a", "b"), rows=(("only one",),))


def test_the_sigmoid_mixture_has_fewer_laws_than_claimed(figures: dict[str, Figure]) -> None:
    table = figures["counts"].table
    assert table is not None
    rows = {row[0]: row for row in table.rows}
    assert rows["sigmoid mixture"][2:5] == (6, 6, 9)
    assert "sigmoid mixture" in figures["counts"].caption


def test_every_counted_component_is_named_once() -> None:
    titles = [title for title, *_ in COMPONENTS.values()]
    assert len(set(titles)) == len(titles)


def test_an_empty_store_has_no_figures(tmp_path: Path) -> None:
    keep(tmp_path / "store.db", "other", "x", {})
    assert all_figures(tmp_path / "store.db") == []
