"""Attention of live models: rank, participation and coherence of every head's energy field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conserved.report.plot import Plot, axes, axis, trace
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
    """Return a section from a probe's record."""
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


_MEASURES = (
    (
        "participation", "How evenly energy spreads over keys", "participation ratio",
        "1 is all keys alike, 1/L a single key. The line marks Gaussian keys of the same covariance.",
    ),
    (
        "coherence", "Key coherence", "coherence",
        "1 is the least there can be; a key that stands alone raises it. The line marks Gaussian keys.",
    ),
)  # fmt: skip
"""Numbers of heads that are drawn beside those of Gaussian keys: the field, a title, the axis and a caption."""


def _plots(name: str, heads: Sequence[Mapping[str, Any]]) -> tuple[Plot, ...]:
    measured = (_beside_gaussian(name, heads, *measure) for measure in _MEASURES)
    even = [_evenness(name, heads)] if any(head.get("evenness") is not None for head in heads) else []
    return (_ranks(name, heads), *measured, *even)


def _labels(heads: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{head['layer'] or '(model)'} · {head['head']}" for head in heads]


def _by_layer(heads: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    result: dict[str, list[Mapping[str, Any]]] = {}
    for head in heads:
        result.setdefault(str(head["layer"]), []).append(head)
    return result


def _ranks(name: str, heads: Sequence[Mapping[str, Any]]) -> Plot:
    labels = _labels(heads)
    abscissae = range(1, len(heads) + 1)
    data = [
        trace("markers", kind, abscissae, [head.get(field) for head in heads], text=labels,
              marker={"size": 9, "symbol": symbol})
        for kind, field, symbol in (
            ("rank", "rank", "circle"),
            ("effective rank", "effective_rank", "diamond"),
            ("stable rank", "stable_rank", "square"),
        )
    ]  # fmt: skip
    style = {"dash": "dot", "shape": "hvh", "color": "var(--muted)"}
    data.append(trace("lines", "bound", abscissae, [head.get("bound") for head in heads], line=style))
    return Plot(
        anchor=f"attention-{name}-ranks",
        title="Rank of the energy field",
        alt=f"Rank, effective and stable rank of {len(heads)} heads, beside the bound on the rank.",
        caption="Heads in the order of the model; no rank exceeds the bound min(d_h, L − 1).",
        data=data,
        layout={"xaxis": axis("head"), "yaxis": axis("rank", rangemode="tozero")},
        small=True,
    )


def _beside_gaussian(
    name: str, heads: Sequence[Mapping[str, Any]], field: str, title: str, label: str, caption: str
) -> Plot:
    data: list[dict[str, Any]] = []
    offset = 0
    layers = _by_layer(heads)
    for layer, members in layers.items():
        abscissae, heights = range(offset + 1, offset + 1 + len(members)), [head.get(field) for head in members]
        shown = len(layers) <= 8
        data.append(trace("bar", layer or "(model)", abscissae, heights, text=_labels(members), showlegend=shown))
        offset += len(members)
    gaussian = [head.get(f"gaussian_{field}") for head in heads]
    if any(value is not None for value in gaussian):
        style = {"dash": "dot", "shape": "hvh", "width": 3, "color": "var(--ink)"}
        everywhere = range(1, len(heads) + 1)
        data.append(trace("lines", "Gaussian keys", everywhere, gaussian, line=style))
    known = [float(head[field]) for head in heads if head.get(field) is not None]
    span = f"from {min(known):.3g} to {max(known):.3g}" if known else "unknown"
    return Plot(
        anchor=f"attention-{name}-{field}",
        title=title,
        alt=f"Bars of {label} of {len(heads)} heads, {span}, beside that of Gaussian keys.",
        caption=caption,
        data=data,
        layout=axes("head", label, bargap=0.25),
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
        data=[trace("heatmap", "", range(widest), [layer or "(model)" for layer in layers], z=grid, zmin=0, zmax=1)],
        layout={
            "xaxis": axis("head"),
            "yaxis": {"autorange": "reversed", "type": "category"},
            "height": max(220, min(120 + 34 * len(layers), 700)),
        },
        small=True,
    )
