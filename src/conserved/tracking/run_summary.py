"""Where a monitored run stands, in a few lines or as a panel of a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from conserved.output import html
from conserved.output.lines import counted
from conserved.verdict import Status

if TYPE_CHECKING:
    from conserved.tracking.run_results import RunResults


def summary(monitor: RunResults) -> str:
    """Return alarms first, then the last audit and the drift, as text."""
    alarms, audits, last = monitor.alarms, monitor.audits, monitor.last_audit
    lines = [f"{counted(len(alarms), 'alarm')} in {counted(monitor.count, 'step')}"]
    lines += [f"  {alarm}" for alarm in alarms]
    lines += [f"  no alarm, as a program may mean it: {statement}" for statement in monitor.statements]
    if monitor.waiting:
        return "\n".join([*lines, "The laws are not known yet: they are read off the first forward pass."])
    if last is not None:
        refuted = sum(audit.status == Status.REFUTED for audit in audits)
        left_open = sum(not audit.conclusive and audit.status != Status.REFUTED for audit in audits)
        lines.append(
            f"{counted(len(audits), 'audit')}, {refuted} refuted, {left_open} not conclusive; the last in step "
            f"{audits[-1].step}: {last.badge}, largest residual {audits[-1].excess:.2g} of what rounding explains"
        )
        lines += [f"  {text}" for text in last.coverage.lines()]
    if monitor.records:
        drift = monitor.records[-1].errors("family")
        lines.append(f"{counted(len(monitor.laws), 'law')}; relative drift since the start (normal under Adam):")
        lines += [f"  {family}: {value:.2e}" for family, value in drift.items()]
    return "\n".join(lines)


def panel(monitor: RunResults) -> str:
    """Return the summary for notebooks, alarms first."""
    last = monitor.last_audit
    parts = [html.paragraph(str(alarm)) for alarm in monitor.alarms] or [html.paragraph("no alarms", quiet=True)]
    if last is not None:
        parts.append(html.badge(last.verdict, last.badge))
    rest = [line for line in summary(monitor).splitlines() if not line.startswith("  step")]
    return html.panel(*parts, *(html.paragraph(line, quiet=True) for line in rest[1:]))
