"""The alarms of an audit: one for each defect, with the laws that it breaks and the reason."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from conserved.alarm import Alarm
from conserved.auditing import Audit, Gauge
from conserved.auditing.audit_result import Row
from conserved.auditing.diagnosis import Origin
from conserved.auditing.gradient_peaks import corruption_verdict
from conserved.auditing.reference_comparison import ReferenceComparison
from conserved.laws.independence import connected_groups
from conserved.tracking.identities.finding import name_tensors


def alarms_of(audit: Audit, step: int) -> Iterator[Alarm]:
    """Yield what is wrong with the gradients of a step, one alarm for each defect.

    Laws of one family, and laws that share a parameter with them, are broken by one defect as far as anyone can tell.
    """
    if audit.moved is not None and audit.failures:
        worst = audit.failures[0]
        yield _alarm(step, "stale", "", [worst], audit.verdict.message)
        return
    if audit.disagreements:
        yield _disagreement(audit, step)
    infinite = [item.parameter for item in audit.findings if item.trouble == "not finite"]
    if infinite:
        message = f"The gradients of {len(infinite)} parameters are not finite, that of {infinite[0]} among them."
        yield Alarm(step=step, code="not finite", law=infinite[0], value=math.nan, limit=0.0, message=message)
    for code, failures in _by_code(audit).items():
        # Identities of gradients that are not finite say nothing else.
        finite = [row for row in failures if math.isfinite(row.residual) or not {*row.parameters} & {*infinite}]
        for rows in _connected(finite):
            yield _alarm(step, code, rows[0].family, rows, _describe(rows) + _zeros(audit, rows))
    if audit.comparison is not None and not audit.comparison.ok and not audit.failures:
        yield _difference_from_reference(audit.comparison, step)
    if audit.corrupted and not audit.failures:
        yield _corruption(audit, step)
    if audit.gauge is not None and audit.gauge.seen and any(not row.ok for row in audit.gauge.rows):
        yield _broken_gauge(audit.gauge, step)


def _disagreement(audit: Audit, step: int) -> Alarm:
    first = audit.disagreements[0]
    names = tuple(dict.fromkeys(item.name for item in audit.disagreements if item.what == first.what))
    return Alarm(
        step=step,
        code="replicas",
        law=first.name,
        value=first.spread,
        limit=first.limit,
        message=first.text(),
        family="replicas",
        laws=names,
        count=len(names),
    )


def _difference_from_reference(comparison: ReferenceComparison, step: int) -> Alarm:
    different = comparison.failures
    return Alarm(
        step=step,
        code="gradient",
        law=different[0].parameter,
        value=different[0].difference,
        limit=different[0].limit,
        message=comparison.verdict.message,
        family="reference",
        laws=tuple(item.parameter for item in different),
        count=len(different),
    )


def _corruption(audit: Audit, step: int) -> Alarm:
    entry = audit.corrupted[0]
    return Alarm(
        step=step,
        code="hardware",
        law=entry.parameter,
        value=entry.share,
        limit=0.0,
        message=corruption_verdict(audit.corrupted).message,
        family="corrupted entry",
        laws=tuple(item.parameter for item in audit.corrupted),
        count=len(audit.corrupted),
    )


def _broken_gauge(gauge: Gauge, step: int) -> Alarm:
    broken = [row for row in gauge.rows if not row.ok]
    names = tuple(f"{row.name}[{row.head}]" for row in broken)
    return Alarm(
        step=step,
        code="gauge",
        law=names[0],
        value=broken[0].residual,
        limit=broken[0].tolerance,
        message=f"{gauge.verdict.message} The largest sum, in {names[0]}, is {broken[0].residual:.2g} of its terms; "
        f"rounding explains {broken[0].tolerance:.1g}.",
        family="gauge",
        laws=names,
        count=len(names),
    )


def _by_code(audit: Audit) -> dict[str, list[Row]]:
    """Return broken identities by the kind of alarm they raise.

    The code is "hardware" where the same pass does not break them again.
    """
    codes: dict[str, list[Row]] = {}
    for row in audit.failures:
        diagnosis = audit.diagnoses.get(row.name)
        transient = diagnosis is not None and diagnosis.origin is Origin.TRANSIENT
        codes.setdefault("hardware" if transient else "gradient", []).append(row)
    return codes


def _connected(rows: Sequence[Row]) -> list[list[Row]]:
    """Return broken identities in groups that have a family or a parameter in common, worst first."""
    groups = connected_groups(rows, lambda row: {f"family {row.family}", *row.parameters})
    return [sorted(members, key=lambda row: -row.excess) for members in groups]


def _alarm(step: int, code: str, family: str, rows: Sequence[Row], message: str) -> Alarm:
    worst = rows[0]
    names = name_tensors(list(worst.parameters), 4)
    alone = len(worst.parameters) == 1
    headline = f"The gradient of {names} is wrong" if alone else f"One of the gradients of {names} is wrong"
    return Alarm(
        step=step,
        code=code,
        law=worst.name,
        value=worst.residual,
        limit=worst.tolerance,
        message=message,
        family=family,
        laws=tuple(row.name for row in rows),
        count=len(rows),
        headline=f"{headline} in step {step}." if code in ("gradient", "hardware") else "",
    )


def _zeros(audit: Audit, rows: Sequence[Row]) -> str:
    """Return a sentence about gradients of broken identities that are exactly zero; empty if there are none."""
    zero = {item.parameter for item in audit.findings if item.trouble == "zero"}
    names = [name for name in dict.fromkeys(name for row in rows for name in row.parameters) if name in zero]
    return f" The gradient of {name_tensors(names)} is exactly zero." if names else ""


def _describe(rows: Sequence[Row]) -> str:
    """Return the worst identity in words: the law, by how much, between which rows, and what would mend it."""
    worst = rows[0]
    between = " and ".join(worst.where[:4]) + (f" and {len(worst.where) - 4} more" if len(worst.where) > 4 else "")
    text = (
        f"The gradient identity of {worst.name} does not hold: residual {worst.residual:.3g}, {worst.excess:.3g} times "
        f"what rounding explains ({worst.tolerance:.3g}). It stands between {between}."
    )
    return " ".join([text, *(f"{suggest[0].upper()}{suggest[1:]}." for suggest in worst.suggests)])
