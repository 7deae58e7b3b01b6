"""Audits of backward passes: every identity's residual against what rounding explains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conserved.report.lawtables import share
from conserved.report.plot import Plot, axes, trace
from conserved.report.table import ReportTable
from conserved.verdict import Status

_DRAWN = 1500
"""Identities that are drawn; failures come first in a record, so the ones left out held."""

_MARKS = (("holds", "circle", "var(--line-1)", True), ("does not hold", "x", "var(--refuted)", False))


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSection:
    """One audit, failures first."""

    name: str
    status: Status
    message: str
    worst: float | None
    precision: str
    coverage: float | None
    """The share of trained parameters that identities tested to the stated size."""
    planted: str
    """The defect that was planted for it, in words."""
    identities: int
    failed: int
    plot: Plot | None
    failures: ReportTable | None
    families: ReportTable
    findings: ReportTable | None
    gauge: ReportTable | None
    gauge_message: str
    unclaimed: int
    blind: str
    expected: str
    """The finding that was expected, where a defect was planted."""

    @property
    def as_expected(self) -> bool:
        """Whether it came out as expected: clean, unless something else is said."""
        return self.status.value == self.expected if self.expected else self.status is Status.VERIFIED


def audit_section(name: str, content: Mapping[str, Any]) -> AuditSection:
    """Return a section from an audit's record, or a trial's, which has the softmax gauge beside it."""
    rows: Sequence[Mapping[str, Any]] = content["rows"]
    failed = [row for row in rows if not row["ok"]]
    findings = [(item["parameter"], item["trouble"]) for item in content.get("findings") or ()]
    gauge = content.get("gauge") or {}
    status = Status(content["status"])
    if status is not Status.REFUTED and not content.get("ok", True):
        status = Status(gauge["status"]) if gauge.get("status") == "refuted" else status
    return AuditSection(
        name=name,
        status=status,
        message=str(content.get("message", "")),
        worst=content.get("worst"),
        precision=str(content.get("precision", "")),
        coverage=share(content.get("coverage")),
        planted=str(content.get("planted") or ""),
        identities=len(rows),
        failed=len(failed),
        plot=_residuals(name, rows) if rows else None,
        failures=_failures(failed) if failed else None,
        families=_families(rows),
        findings=ReportTable.of(("parameter", "its gradient"), findings, 100) if findings else None,
        gauge=_gauge(gauge["rows"]) if gauge.get("rows") else None,
        gauge_message=str(gauge.get("message", "")),
        unclaimed=len(content.get("unclaimed") or ()),
        blind=str(content.get("not_seen", "")),
        expected=str(content.get("expected", "")),
    )


def _failures(failed: Sequence[Mapping[str, Any]]) -> ReportTable:
    rows = []
    for row in failed:
        where, suggests = row.get("where") or row.get("parameters") or (), row.get("suggests") or ()
        rows.append((row["name"], ", ".join(where), row["residual"], row["tolerance"], " ".join(suggests)))
    return ReportTable.of(("identity", "between", "residual", "rounding explains", "this suggests"), rows, 100)


def _families(rows: Sequence[Mapping[str, Any]]) -> ReportTable:
    grouped: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        grouped.setdefault(str(row["family"]), []).append(row)
    listed = []
    for family, members in grouped.items():
        worst = max(_magnitude(row["residual"]) for row in members)
        limit = max(float(row["tolerance"]) for row in members)
        listed.append((family, len(members), sum(not row["ok"] for row in members), worst, limit))
    return ReportTable.of(("law", "identities", "fail", "largest residual", "rounding explains"), listed)


def _magnitude(residual: Any) -> float:
    """Return the magnitude of a residual; one that is not a number counts as the largest."""
    value = float("nan") if residual is None else float(residual)
    return math.inf if math.isnan(value) else value


def _gauge(rows: Sequence[Mapping[str, Any]]) -> ReportTable:
    columns = ("name", "head", "residual", "tolerance", "ok")
    return ReportTable.of(
        ("attention", "head", "Σ of key gradients, relative", "rounding explains", "holds"),
        [tuple(row.get(column) for column in columns) for row in rows],
        60,
    )


def _residuals(name: str, rows: Sequence[Mapping[str, Any]]) -> Plot:
    drawn = rows[:_DRAWN]
    traces: list[dict[str, Any]] = []
    for label, symbol, shade, ok in _MARKS:
        chosen = [(index, row) for index, row in enumerate(drawn, 1) if bool(row["ok"]) is ok]
        if chosen:
            indices, names = [index for index, _ in chosen], [str(row["name"]) for _, row in chosen]
            sizes = [_magnitude(row["residual"]) for _, row in chosen]
            # What is not finite is drawn at the largest residual there can be; an exact zero, which has no place on a
            # logarithmic axis, where no float64 residual is.
            heights = [1.0 if math.isinf(size) else max(size, 1e-18) for size in sizes]
            marker = {"symbol": symbol, "color": shade, "size": 7 if ok else 10}
            traces.append(trace("markers", label, indices, heights, text=names, marker=marker))
    limits = [float(row["tolerance"]) for row in drawn]
    style = {"dash": "dot", "shape": "hvh", "color": "var(--muted)"}
    everywhere = range(1, len(drawn) + 1)
    traces.append(trace("lines", "what rounding explains", everywhere, limits, line=style))
    failed = sum(not row["ok"] for row in rows)
    cut = f" The first {len(drawn):,} of {len(rows):,} are drawn." if len(drawn) < len(rows) else ""
    return Plot(
        anchor=f"audit-{name}",
        title="Residual of every gradient identity",
        alt=f"Residuals of {len(rows):,} identities, worst first, with what rounding explains; {failed:,} lie above.",
        caption=f"One mark for each identity μ(θ, G) = 0, failures and worst first.{cut}",
        data=traces,
        layout=axes("identity", "relative residual", log=True),
    )
