"""Draw the documentation's figures from stored results, once for light and once for dark pages.

python docs_build/figures.py
"""

from __future__ import annotations

import gzip
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch

from conserved_papers.claims.full_size import ARITHMETIC, runs_that_count
from conserved_papers.lab.long import LongRun
from results import RESULTS, stored

ASSETS = Path(__file__).parent.parent / "docs" / "assets"

NAMES = {
    "value_output": "V Vᵀ − Oᵀ O",
    "gain": "γ² − Σ‖readers‖²",
    "gated_neurons": "‖down‖² − ‖up‖²",
    "query_key": "Q Qᵀ − K Kᵀ",
    "shift": "Σ router rows",
    "class_shift": "Σ head rows",
    "positions": "Σ embeddings − Σ positions",
}
"""What each family of laws says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Colours of a page: text, faint lines, laws, exact laws, what is no law, and the middle of a diverging scale."""

    name: str
    text: str
    faint: str
    law: str
    exact: str
    other: str
    middle: str


LIGHT = Scheme(
    name="light", text="#1b1f24", faint="#d5dae0", law="#14426b", exact="#1a7332", other="#b3261e", middle="#ffffff"
)
DARK = Scheme(
    name="dark", text="#e6e8eb", faint="#454b54", law="#7fb6e6", exact="#6ccf8a", other="#ff8a80", middle="#1e2129"
)


def order_test(scheme: Scheme) -> Figure:
    """Drift against step size, logarithmic in both: slope one, nothing, or flat."""
    runs = stored("order_test")["runs"]
    steps = [run["step"] for run in runs]
    figure, axes = _figure(scheme, 7.4, 4.3)
    colours = {"law": scheme.law, "exact": scheme.exact, "other": scheme.other}
    ends: list[tuple[float, str, str]] = []
    for name in runs[0]["drift"]:
        drifts = [run["drift"][name] for run in runs]
        kind = "other" if name.startswith("not_") else "exact" if max(drifts) < 1e-12 else "law"
        axes.plot(steps, drifts, color=colours[kind], marker="o", markersize=4, linewidth=1.6)
        ends.append((drifts[0], NAMES[name.removeprefix("not_")] if kind != "other" else "", kind))
    axes.set(xscale="log", yscale="log", xlabel="step size τ (the same flow time each)", ylabel="relative drift")
    axes.set_xticks(steps, [f"{step:g}" for step in steps])
    axes.minorticks_off()
    axes.set_xlim(steps[-1] * 0.85, steps[0] * 3.4)
    for height, text, kind in _apart([end for end in ends if end[1]]):
        axes.text(steps[0] * 1.12, height, text, color=colours[kind], va="center", fontsize=9)
    others = [end[0] for end in ends if end[2] == "other"]
    middle = float(np.exp(np.mean(np.log(others))))
    axes.text(steps[0] * 1.12, middle, "one sign spoiled", color=scheme.other, va="center", fontsize=9)
    for height, text, kind in (
        (0.1 * min(others), "not laws: as much however small the step", "other"),
        (3e-9, "laws: in proportion to the step", "law"),
        (2e-14, "linear laws: rounding, at any step", "exact"),
    ):
        axes.text(steps[2], height, text, color=colours[kind], ha="center", va="center", fontsize=9, style="italic")
    axes.grid(True, color=scheme.faint, linewidth=0.6)
    return figure


def _apart(ends: list[tuple[float, str, str]], factor: float = 5.0) -> list[tuple[float, str, str]]:
    """Labels moved up until each stands clear of the one below it, on a logarithmic axis."""
    placed: list[tuple[float, str, str]] = []
    for height, text, kind in sorted(ends):
        placed.append((max(height, factor * placed[-1][0]) if placed else height, text, kind))
    return placed


def moment_map(scheme: Scheme) -> Figure:
    """How far the two parts of a head's law moved over training, and their difference, on one scale."""
    heads = stored("order_test")["heads"]
    moved = {key: np.array(heads["end"][key]) - np.array(heads["start"][key]) for key in ("plus", "minus", "law")}
    largest = max(float(np.abs(change).max()) for change in moved.values())
    titles = {"plus": "change of V Vᵀ", "minus": "change of Oᵀ O", "law": "change of V Vᵀ − Oᵀ O"}
    figure = _canvas(7.4, 2.9)
    colours = LinearSegmentedColormap.from_list("balance", [scheme.other, scheme.middle, scheme.law])
    panels = figure.subplots(1, 3)
    for panel, (key, change) in zip(panels, moved.items(), strict=True):
        drawn = panel.imshow(change, cmap=colours, vmin=-largest, vmax=largest)
        panel.set_title(titles[key], color=scheme.text, fontsize=10)
        panel.set_xlabel(f"largest {np.abs(change).max():.1e}", color=scheme.text, fontsize=9)
        panel.set(xticks=[], yticks=[])
        for side in panel.spines.values():
            side.set_color(scheme.faint)
    bar = figure.colorbar(drawn, ax=panels, shrink=0.85, format="%.0e")
    bar.ax.tick_params(colors=scheme.text, labelsize=8)
    bar.outline.set_edgecolor(scheme.faint)
    return figure


def attention_precision(scheme: Scheme) -> Figure:
    """Error of dQ by layer and step in a run without warm-up, as the kernel has it and centered."""
    runs = stored("attention_moments", "h200")["moments"]
    looks = max((run["moments"] for run in runs if run["kind"] == "learned" and not run["warm up"]), key=len)
    figure = _canvas(7.4, 3.0)
    panels = figure.subplots(1, 2, sharey=True)
    steps = [look["step"] for look in looks]
    for panel, (kernel, title) in zip(panels, (("flash", "flash"), ("centered", "flash, centered")), strict=True):
        errors = np.array([look["errors"][kernel]["dQ"]["median"] for look in looks]).T
        image = panel.imshow(np.log10(errors), aspect="auto", cmap="viridis", vmin=-3, vmax=1.5, origin="lower")
        panel.set_title(f"{title}: error of dQ over dQ", color=scheme.text, fontsize=10)
        panel.set_xticks(range(len(steps)), [str(step) if step < 1000 else f"{step / 1000:g}k" for step in steps])
        panel.set_xlabel("step", color=scheme.text, fontsize=9)
        panel.tick_params(colors=scheme.text, labelsize=8)
        for side in panel.spines.values():
            side.set_color(scheme.faint)
    panels[0].set_ylabel("layer", color=scheme.text, fontsize=9)
    bar = figure.colorbar(image, ax=panels, shrink=0.9, ticks=[-3, -2, -1, 0, 1])
    bar.ax.set_yticklabels(["0.001", "0.01", "0.1", "1", "10"])
    bar.ax.tick_params(colors=scheme.text, labelsize=8)
    bar.outline.set_edgecolor(scheme.faint)
    return figure


def _canvas(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08))
    figure.patch.set_alpha(0)
    return figure


def _figure(scheme: Scheme, width: float, height: float) -> tuple[Figure, Any]:
    figure = _canvas(width, height)
    axes = figure.subplots()
    _plain(axes, scheme)
    return figure, axes


def _plain(axes: Any, scheme: Scheme) -> None:
    """Two lines and text in the page's colour."""
    axes.patch.set_alpha(0)
    axes.tick_params(colors=scheme.text, labelsize=9)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(scheme.text)
    for name, side in axes.spines.items():
        side.set_visible(name in ("left", "bottom"))
        side.set_color(scheme.text)


def architecture(scheme: Scheme) -> Figure:
    """The parts of the package in layers, as the import rules have them: what is above may import what is below."""
    rules = tomllib.loads((ASSETS.parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = [layer.replace("conserved.", "").split(" | ") for layer in rules["contracts"][0]["layers"]]
    figure = _canvas(7.4, 0.4 * len(layers) + 0.4)
    axes = figure.subplots()
    axes.set(xlim=(0, 10), ylim=(-0.75, len(layers)))
    axes.axis("off")
    for row, parts in enumerate(layers):
        wide = 9.2 / len(parts)
        for place, part in enumerate(parts):
            box = FancyBboxPatch(
                (0.1 + place * wide, len(layers) - 1 - row + 0.12),
                wide - 0.16,
                0.7,
                boxstyle="round,pad=0,rounding_size=0.08",
                facecolor="none",
                edgecolor=scheme.exact if part in ("symmetry", "laws") else scheme.law,
                linewidth=1.8 if part in ("symmetry", "laws") else 1.0,
            )
            axes.add_patch(box)
            middle = (0.02 + (place + 0.5) * wide, len(layers) - 1 - row + 0.47)
            axes.text(*middle, part, ha="center", va="center", color=scheme.text, fontsize=8.5)
    arrow = {"arrowstyle": "->", "color": scheme.faint, "linewidth": 1.5}
    axes.annotate("", xy=(9.6, 0.2), xytext=(9.6, len(layers) - 0.2), arrowprops=arrow)
    axes.text(9.75, len(layers) / 2, "imports", rotation=-90, ha="center", va="center", color=scheme.text, fontsize=8.5)
    axes.text(
        0.1, -0.45, "green: the one abstraction, and all laws of a model at once", color=scheme.exact, fontsize=8.5
    )
    return figure


def long_runs(scheme: Scheme) -> Figure:
    """Drift against steps to the end of a run: measured, predicted by the ledger, and what rounding leaks."""
    packed = next(iter(sorted(RESULTS.glob("long_runs_h200_*.trajectories.json.gz"), reverse=True)))
    runs = runs_that_count([LongRun.of(run) for run in json.loads(gzip.decompress(packed.read_bytes()))])
    figure = _canvas(9.2, 3.8 * -(-len(runs) // 2))
    colours = {"value_output": scheme.law, "gated_neurons": scheme.exact, "query_key": scheme.other}
    for place, found in enumerate(runs.values(), 1):
        axes = figure.add_subplot(-(-len(runs) // 2), 2, place)
        _plain(axes, scheme)
        run = found.trajectory
        for family, colour in colours.items():
            quantity = run.quantity(family)
            ledger = quantity.ledger or {}
            for values, dash in ((quantity.drift, "-"), (ledger["predicted"], "--"), (ledger["leak"], ":")):
                axes.plot(run.at[1:], values[1:], color=colour, linestyle=dash, linewidth=1.5)
        exact = ARITHMETIC[found.arithmetic.products]
        done = f"{run.recipe}, {run.steps:,} of {run.planned:,} steps, {exact}"
        axes.set_title(done, color=scheme.text, fontsize=10)
        axes.set(xscale="log", yscale="log", xlabel="step k")
    for axes in figure.axes[::2]:
        axes.set_ylabel("relative drift")
    keys = [Line2D([], [], color=colour, label=NAMES[family]) for family, colour in colours.items()]
    keys += [
        Line2D([], [], color=scheme.text, linestyle=dash, label=name)
        for dash, name in (("-", "measured"), ("--", "predicted, Σ τ² μ(G, G)"), (":", "leak of rounding"))
    ]
    figure.legend(handles=keys, loc="outside lower center", ncols=6, frameon=False, labelcolor=scheme.text, fontsize=9)
    return figure


def ranges(scheme: Scheme) -> Figure:
    """Ranges of the input channels of one weight, sorted, before and after equalising."""
    found = stored("quantisation")["models"]["vision"]["ranges"]
    ways = {"as trained": scheme.other, "balanced, then range": scheme.law}
    figure, axes = _figure(scheme, 7.4, 3.2)
    for way, colour in ways.items():
        sizes = np.sort(found[way]["rows"])[::-1]
        axes.plot(np.arange(len(sizes)), sizes / np.median(sizes), color=colour, linewidth=1.8, label=way)
    axes.set(xlabel="input channels, widest first", ylabel="range over its median")
    axes.set_ylim(0, None)
    axes.set_title(f"{found['as trained']['name']} of a vision transformer", color=scheme.text, fontsize=10)
    axes.grid(True, color=scheme.faint, linewidth=0.6)
    axes.legend(frameon=False, labelcolor=scheme.text, fontsize=9, loc="lower left")
    return figure


FIGURES = {
    "attention_precision": attention_precision,
    "ranges": ranges,
    "order_test": order_test,
    "long_runs": long_runs,
    "moment_map": moment_map,
    "architecture": architecture,
}


def drawn(folder: Path, *names: str) -> list[Path]:
    """Figures (all by default) in both schemes; the same results give the same bytes."""
    written = []
    with mpl.rc_context({"svg.hashsalt": "conserved", "svg.fonttype": "none", "font.family": "sans-serif"}):
        for name in names or FIGURES:
            make = FIGURES[name]
            for scheme in (LIGHT, DARK):
                path = folder / f"{name}_{scheme.name}.svg"
                make(scheme).savefig(path, metadata={"Date": None, "Creator": None}, transparent=True)
                written.append(path)
    return written


if __name__ == "__main__":
    drawn(ASSETS)
