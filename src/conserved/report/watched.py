"""Runs under a Monitor: drift over steps, the exact ledger by family, causes, readings and alarms."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from conserved.report.numerals import format_number, numeral, without_folders
from conserved.report.plot import Plot, axes, line, trace
from conserved.report.table import ReportTable
from conserved.store.run_digest import Digest, FamilyStep
from conserved.verdict import Status

_FAMILIES_DRAWN = 12
_READINGS_DRAWN = 12

_BOOKKEEPING = ("seconds", "of_rounding")
"""Endings of readings that are not drawn: the monitor's own time, and what the figure of residuals shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection:
    """One watched run."""

    name: str
    status: Status
    message: str
    trouble: str
    """The problem in a few words; empty if there is none."""
    started: str
    steps: int
    shown: int
    laws: int
    skipped: int
    config: ReportTable | None
    errors: Plot | None
    ledgers: tuple[Plot, ...]
    causes: Plot | None
    residuals: Plot | None
    """How far the account is from closing, step by step, with the alarms."""
    readings: tuple[Plot, ...]
    last: ReportTable | None
    drifts: ReportTable | None
    alarms: ReportTable | None
    alarm_count: int
    state: str
    """What the monitor was doing last, and what it stated without an alarm."""
    first_alarms: tuple[tuple[int, str, str], ...]
    """First step, law and message of every defect."""


def run_section(run: Digest) -> RunSection:
    """Return a section from a run's digest; its verdict is whether the account closed to rounding in every step."""
    trouble = _trouble(run)
    status, message = _judge(run, trouble)
    config = [(str(key), format_number(value)) for key, value in without_folders(run.config).items()]
    first = tuple((alarm.step, alarm.law, alarm.text) for alarm in run.alarms)
    drawn = sorted(run.ledger, key=lambda family: -_peak(run.ledger[family]))[:_FAMILIES_DRAWN]
    return RunSection(
        name=run.name,
        status=status,
        message=message,
        trouble=trouble,
        started=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run.started)),
        steps=run.steps,
        shown=len(run.shown),
        laws=run.laws,
        skipped=run.skipped,
        config=ReportTable.of(("setting", "value"), config, 100) if config else None,
        errors=_errors(run) if run.errors else None,
        ledgers=tuple(_ledger(run, family) for family in sorted(drawn)),
        causes=_causes(run) if run.totals else None,
        residuals=_residuals(run) if run.ledger else None,
        readings=_readings(run),
        last=_last(run) if run.ledger else None,
        drifts=_drifts(run) if run.drifts else None,
        alarms=_alarms(run) if run.alarms else None,
        alarm_count=len(run.alarms),
        state=run.state,
        first_alarms=first,
    )


_WRONG_GRADIENTS = ("gradient", "hardware")
"""Alarms of audits that found the identities of gradients broken, in every pass or in one that cannot be reproduced."""

_TROUBLES = {
    **dict.fromkeys(_WRONG_GRADIENTS, "gradients are wrong"),
    "gauge": "gradients of attention scores are wrong",
    "not finite": "gradients are not finite",
    "stale": "gradients are not those of the parameters",
    "order": "monitor.step() is called before optimizer.step()",
}
"""Meanings of the alarm codes; any other code is one of the account."""


def _trouble(run: Digest) -> str:
    if run.not_finite:
        return "the run has diverged"
    first: dict[str, int] = {}
    for alarm in run.alarms:
        first.setdefault(_TROUBLES.get(alarm.code, "the account does not close"), alarm.step)
    if not first and run.worst is not None and run.worst[0] > 1:
        first["the account does not close"] = run.worst[2]
    return "; ".join(f"{text} from step {step:,} on" for text, step in first.items())


def _judge(run: Digest, trouble: str) -> tuple[Status, str]:
    if not run.steps or (run.worst is None and not run.not_finite):
        return Status.INCONCLUSIVE, "No step has been recorded yet."
    if run.not_finite:
        return Status.REFUTED, f"{run.not_finite:,} rows of the ledger are not finite: {trouble}."
    assert run.worst is not None
    excess, law, step = run.worst
    if excess > 1:
        account = f"The account of step {step:,} leaves {numeral(excess)} times what rounding explains of {law}."
    else:
        account = (
            f"The account closes: in all {run.steps:,} steps and {run.laws:,} laws what is neither first nor second "
            f"order is at most {numeral(excess)} of what rounding explains."
        )
    account += _attention_precision(run)
    if not trouble:
        return Status.VERIFIED, account
    return Status.REFUTED, f"{trouble[0].upper()}{trouble[1:]}. {account}"


def _attention_precision(run: Digest) -> str:
    """Say in how many audited steps attention's gradients were mostly rounding; nothing if in none."""
    share = [value for value in run.readings.get("audit/mostly_rounding", ()) if math.isfinite(value)]
    high = [value for value in share if value > 0]
    if not high:
        return ""
    return (
        f" Attention in half precision: in {len(high):,} of {len(share):,} audited steps the gradients of up to "
        f"{max(high):.0%} of its heads were mostly rounding of the kernel, not a wrong backward pass; "
        "conserved.attention.centered mends it."
    )


def _peak(steps: Sequence[FamilyStep]) -> float:
    sizes = [abs(step.numbers["observed"]) for step in steps]
    return max((math.inf if math.isnan(value) else value for value in sizes), default=0.0)


def _positive(values: Sequence[float]) -> list[float | None]:
    """Return magnitudes for a logarithmic axis, where zero has no place."""
    return [abs(value) if value == value and value != 0 else None for value in values]


def _errors(run: Digest) -> Plot:
    last = {family: values[-1] for family, values in run.errors.items()}
    listing = ", ".join(f"{family} {numeral(value)}" for family, value in last.items())
    return Plot(
        anchor=f"run-{run.name}-errors",
        title="Relative drift of the laws",
        alt=f"Lines of the relative drift over {run.steps:,} steps by law; at the end: {listing}.",
        caption="Mean of ‖h(θₖ) − h(θ₀)‖ / ‖h(θ₀)‖ over the laws of a kind: equation (10) of the paper. Adam, momentum "
        "and weight decay make laws drift; that is no defect.",
        data=[line(family, run.shown, _positive(values)) for family, values in run.errors.items()],
        layout=axes("step", "relative drift", log=True),
    )


def _ledger(run: Digest, family: str) -> Plot:
    steps = run.ledger[family]
    x = [step.step for step in steps]
    lines: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("observed", "observed", {}),
        ("first order", "first_order", {"dash": "dash"}),
        ("second order", "second_order", {"dash": "dashdot"}),
        ("residual", "residual", {"width": 1.5}),
        ("rounding", "bound", {"dash": "dot", "width": 1.5, "color": "var(--muted)"}),
    )
    data = [
        line(title, x, _positive([step.numbers[field] for step in steps]), line=style) for title, field, style in lines
    ]
    final = steps[-1].numbers
    return Plot(
        anchor=f"run-{run.name}-ledger-{family}",
        title=family,
        alt=(
            f"Lines of the change of {family} in each step and its parts. In the last step shown: observed "
            f"{numeral(final['observed'])}, first order {numeral(final['first_order'])}, second order "
            f"{numeral(final['second_order'])}, residual {numeral(final['residual'])}."
        ),
        data=data,
        layout=axes("step", "|change in the step|", log=True),
        small=True,
    )


def _causes(run: Digest) -> Plot:
    return Plot(
        anchor=f"run-{run.name}-causes",
        title="What the first-order change is due to",
        alt=f"Lines over steps of the first-order change by cause: {', '.join(run.totals)}.",
        caption="Magnitudes added over all laws. Plain gradient descent has none of this; the optimizer puts it there.",
        data=[line(cause, run.shown, _positive(values)) for cause, values in run.totals.items()],
        layout=axes("step", "Σ |first order|", log=True),
    )


def _residuals(run: Digest) -> Plot:
    """Return the worst law of every step and of every audit, in units of what rounding explains; alarms are marked."""
    worst: dict[int, float] = {}
    for steps in run.ledger.values():
        for step_record in steps:
            worst[step_record.step] = max(worst.get(step_record.step, 0.0), abs(step_record.numbers["excess"]))
    at = sorted(worst)
    data = [
        line("account", at, _positive([worst[step] for step in at])),
        line("what rounding explains", [at[0], at[-1]], [1.0, 1.0], line={"dash": "dot", "color": "var(--muted)"}),
    ]
    if "audit/of_rounding" in run.readings:
        data.insert(1, line("audited gradients", run.shown, _positive(run.readings["audit/of_rounding"])))
    alarms = [alarm for alarm in run.alarms if alarm.value > 0]
    if alarms:
        heights = [alarm.value / alarm.limit if alarm.limit > 0 else None for alarm in alarms]
        labels = [f"{alarm.code} of {alarm.law}" for alarm in alarms]
        marker = {"symbol": "x", "size": 10, "color": "var(--refuted)"}
        data.append(trace("markers", "alarm", [alarm.step for alarm in alarms], heights, text=labels, marker=marker))
    return Plot(
        anchor=f"run-{run.name}-residuals",
        title="Residuals of audits and of the account",
        alt=f"The largest residual of each step and audit over what rounding explains; {len(run.alarms):,} alarms.",
        caption="The law whose residual is largest, over what rounding explains. Above 1, audited gradients are not "
        "those of one loss; and of the account, something else than the optimizer changed parameters.",
        data=data,
        layout=axes("step", "residual / rounding", log=True),
    )


def _readings(run: Digest) -> tuple[Plot, ...]:
    """Return one small figure for each series that changes; series have units of their own, and share no axis."""
    plots = []
    for name, values in run.readings.items():
        known = {value for value in values if math.isfinite(value)}
        if len(known) < 2 or name.endswith(_BOOKKEEPING):
            continue
        last = next(value for value in reversed(values) if math.isfinite(value))
        positive = min(known) > 0 and max(known) > 100 * min(known)
        plots.append(
            Plot(
                anchor=f"run-{run.name}-reading-{name}",
                title=name,
                alt=f"{name} over steps; {numeral(last)} at the end.",
                data=[line(name, run.shown, list(values))],
                layout=axes("step", "value", log=positive),
                small=True,
            )
        )
    return tuple(plots[:_READINGS_DRAWN])


def _last(run: Digest) -> ReportTable:
    """Return the ledger of the last step that was written."""
    causes = list(run.totals)
    fields = ("observed", "first_order", "second_order", "residual", "bound")
    rows = []
    for family, (*_, family_step) in run.ledger.items():
        numbers = [family_step.numbers[field] for field in fields]
        rows.append([family, family_step.law, *numbers, *(family_step.causes.get(cause) for cause in causes)])
    parts = ("observed", "= first order", "+ second order", "+ residual", "rounding")
    named = (f"first order: {cause}" for cause in causes)
    return ReportTable.of(("kind", "law that changed most", *parts, *named), rows)


def _drifts(run: Digest) -> ReportTable:
    return ReportTable.of(
        ("kind", "laws", "relative drift", "law that drifted most", "its drift since the start", "accounted for"),
        [(drift.family, drift.laws, drift.error, drift.law, drift.drift, drift.predicted) for drift in run.drifts],
    )


def _alarms(run: Digest) -> ReportTable:
    rows = [
        (alarm.step, max(alarm.last, alarm.step), alarm.count, alarm.kind, alarm.law or alarm.tensor, alarm.text)
        for alarm in run.alarms
    ]
    return ReportTable.of(("first step", "last step", "times", "what", "where", "what to look at"), rows, 200)
