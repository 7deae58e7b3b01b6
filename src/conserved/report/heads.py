"""Attention of live models: rank, participation and coherence of every head's energy field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conserved.report.plot import Plot, PlotAxis
from conserved.report.table import ReportTable
from conserved.verdict import Status


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSection:
    """One probe of a model."""

    name: str
    status: Status
    message: str
    layers: int
    heads: int
    plots: tuple[Plot, ...]
    table: ReportTable
    skipped: ReportTable | None


_COLUMNS = (
    ("layer", "layer"),
    ("head", "head"),
    ("mask", "attention"),
    ("keys", "length"),
    ("rank", "rank"),
    ("at most", "bound"),
    ("effective rank", "effective_rank"),
    ("stable rank", "stable_rank"),
    ("participation", "participation"),
    ("of Gaussian keys", "gaussian_participation"),
    ("coherence", "coherence"),
    ("of Gaussian keys", "gaussian_coherence"),
    ("largest logit", "largest_logit"),
    ("entropy / log n", "evenness"),
    ("row sums", "zero_sum_error"),
)


def attention_section(name: str, content: Mapping[str, Any]) -> AttentionSection:
    """A section from a probe's record."""
    heads: Sequence[Mapping[str, Any]] = content["heads"]
    skipped = [(item["layer"], item["reason"]) for item in content.get("skipped") or ()]
    return AttentionSection(
        name=name,
        status=Status(content["verdict"]),
        message=str(content.get("message", "")),
        layers=len({head["layer"] for head in heads}),
        heads=len(heads),
        plots=_plots(name, heads) if heads else (),
        table=ReportTable.of(
            [title for title, _ in _COLUMNS], [[head.get(field) for _, field in _COLUMNS] for head in heads]
        ),
        skipped=ReportTable.of(("layer", "why it is not described"), skipped, 100) if skipped else None,
    )


def _plots(name: str, heads: Sequence[Mapping[str, Any]]) -> tuple[Plot, ...]:
    return (
        _ranks(name, heads),
        _beside_gaussian(
            name,
            heads,
            "participation",
            title="How evenly energy spreads over keys",
            axis="participation ratio",
            caption="1 is all keys alike, 1/L a single key. The line marks Gaussian keys of the same covariance.",
        ),
        _beside_gaussian(
            name,
            heads,
            "coherence",
            title="Key coherence",
            axis="coherence",
            caption="1 is the least there can be; a key that stands alone raises it. The line marks Gaussian keys.",
        ),
        *((_evenness(name, heads),) if any(head.get("evenness") is not None for head in heads) else ()),
    )


def _labels(heads: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{head['layer'] or '(model)'} · {head['head']}" for head in heads]


def _by_layer(heads: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for head in heads:
        found.setdefault(str(head["layer"]), []).append(head)
    return found


def _ranks(name: str, heads: Sequence[Mapping[str, Any]]) -> Plot:
    labels = _labels(heads)
    places = list(range(1, len(heads) + 1))
    kinds = (("rank", "rank"), ("effective rank", "effective_rank"), ("stable rank", "stable_rank"))
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": title,
            "x": places,
            "y": [head.get(field) for head in heads],
            "text": labels,
            "hovertemplate": f"%{{text}}<br>{title} %{{y:.3g}}<extra></extra>",
            "marker": {"size": 9, "symbol": symbol},
        }
        for (title, field), symbol in zip(kinds, ("circle", "diamond", "square"), strict=True)
    ]
    data.append(
        {
            "type": "scatter",
            "mode": "lines",
            "name": "bound",
            "x": places,
            "y": [head.get("bound") for head in heads],
            "line": {"dash": "dot", "shape": "hvh", "color": "var(--muted)"},
        }
    )
    return Plot(
        anchor=f"attention-{name}-ranks",
        title="Rank of the energy field",
        alt=f"Rank, effective and stable rank of {len(heads)} heads, beside the bound on the rank.",
        caption="Heads in the order of the model; no rank exceeds the bound min(d_h, L − 1).",
        data=data,
        layout={
            "xaxis": PlotAxis("head").layout(),
            "yaxis": PlotAxis("rank", options={"rangemode": "tozero"}).layout(),
        },
        small=True,
    )


def _beside_gaussian(
    name: str, heads: Sequence[Mapping[str, Any]], field: str, *, title: str, axis: str, caption: str
) -> Plot:
    data: list[dict[str, Any]] = []
    place = 0
    layers = _by_layer(heads)
    for layer, members in layers.items():
        data.append(
            {
                "type": "bar",
                "name": layer or "(model)",
                "x": [place + number + 1 for number in range(len(members))],
                "y": [head.get(field) for head in members],
                "text": _labels(members),
                "textposition": "none",
                "hovertemplate": f"%{{text}}<br>{axis} %{{y:.3g}}<extra></extra>",
                "showlegend": len(layers) <= 8,
            }
        )
        place += len(members)
    gaussian = [head.get(f"gaussian_{field}") for head in heads]
    if any(value is not None for value in gaussian):
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "Gaussian keys",
                "x": list(range(1, len(heads) + 1)),
                "y": gaussian,
                "line": {"dash": "dot", "shape": "hvh", "width": 3, "color": "var(--ink)"},
                "hovertemplate": "Gaussian keys %{y:.3g}<extra></extra>",
            }
        )
    known = [float(head[field]) for head in heads if head.get(field) is not None]
    span = f"from {min(known):.3g} to {max(known):.3g}" if known else "unknown"
    return Plot(
        anchor=f"attention-{name}-{field}",
        title=title,
        alt=f"Bars of {axis} of {len(heads)} heads, {span}, beside that of Gaussian keys.",
        caption=caption,
        data=data,
        layout={"xaxis": PlotAxis("head").layout(), "yaxis": PlotAxis(axis).layout(), "bargap": 0.25},
        small=True,
    )


def _evenness(name: str, heads: Sequence[Mapping[str, Any]]) -> Plot:
    layers = _by_layer(heads)
    widest = max(len(members) for members in layers.values())
    grid = [
        [head.get("evenness") for head in members] + [None] * (widest - len(members)) for members in layers.values()
    ]
    known = [float(value) for row in grid for value in row if value is not None]
    return Plot(
        anchor=f"attention-{name}-evenness",
        title="Entropy of attention",
        alt=f"A map of entropy over log n by layer and head, from {min(known):.2g} to {max(known):.2g}.",
        caption="Entropy of each head's attention over that of even attention: 1 is even, 0 is a single key.",
        data=[
            {
                "type": "heatmap",
                "z": grid,
                "x": list(range(widest)),
                "y": [layer or "(model)" for layer in layers],
                "zmin": 0,
                "zmax": 1,
                "hovertemplate": "%{y}, head %{x}<br>%{z:.2f}<extra></extra>",
                "colorbar": {"thickness": 12, "outlinewidth": 0},
            }
        ],
        layout={
            "xaxis": PlotAxis("head", options={"dtick": 1} if widest <= 16 else {}).layout(),
            "yaxis": {"autorange": "reversed", "type": "category"},
            "height": max(220, min(120 + 34 * len(layers), 700)),
        },
        small=True,
    )
