"""The verdict on one audited pass, in words that say what to do next."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from conserved.auditing.audit_result import GradientFinding, Row
from conserved.auditing.pass_identities import PassIdentities
from conserved.auditing.softmax_gauge import Gauge
from conserved.verdict import Evidence, Status, Verdict


def verdict_of_pass(
    case: PassIdentities,
    failures: Sequence[Row],
    findings: Sequence[GradientFinding],
    used: torch.dtype,
    *,
    moved: float | None,
    clipped: float | None,
    gauge: Gauge | None,
) -> Verdict:
    """Return one verdict on the pass; a missing gradient leaves it open unless an identity is broken as well."""
    failed = _verdict_on_failures(case, failures, findings, used, moved, gauge)
    if failed is not None:
        return failed
    missing = [item for item in findings if item.trouble == "missing"]
    message, rows = _reason_left_open(case, missing, used, clipped)
    if message:
        return _verdict(Status.INCONCLUSIVE, message, *(row.evidence for row in rows))
    nearly = int(case.measurement.nearly.sum())
    message = f"All {int(case.tested.sum())} gradient identities hold to the rounding of {_name_of(used)}"
    message += f", {nearly} of them up to a norm's ε." if nearly else "."
    return _verdict(Status.VERIFIED, message, case.nearest())


def _verdict_on_failures(
    case: PassIdentities,
    failures: Sequence[Row],
    findings: Sequence[GradientFinding],
    used: torch.dtype,
    moved: float | None,
    gauge: Gauge | None,
) -> Verdict | None:
    """Return the verdict if gradients are not finite or an identity is broken; None otherwise."""
    infinite = [item for item in findings if item.trouble == "not finite"]
    if infinite:
        message = f"{len(infinite)} gradients are not finite, that of {infinite[0].parameter} among them."
        if used == torch.float16:
            # The largest number is 65,504: scaled losses overflow now and then, and a scaler skips such a step.
            message += " In float16 a scaled loss may overflow, and a scaler skips the step: nothing is said of it."
            return _verdict(Status.INCONCLUSIVE, message)
        return _verdict(
            Status.REFUTED, message, Evidence(what="gradients that are not finite", value=len(infinite), limit=0)
        )
    if failures:
        message = f"{len(failures)} of {len(case.symmetries)} gradient identities do not hold"
        if moved is not None:
            message += ", because the parameters are no longer those the gradient was taken at: a step of size "
            message += f"{moved:.3g} explains all. Audit before optimizer.step()."
        else:
            message += ". Either the backward pass is wrong there, parameters or gradients were changed since, or the "
            message += "model computed something else than in the call its laws were read off."
        return _verdict(Status.REFUTED, message, *(row.evidence for row in failures))
    if gauge is not None and gauge.seen and gauge.verdict == Status.REFUTED:
        return _verdict(Status.REFUTED, gauge.verdict.message, *gauge.verdict.evidence)
    return None


def _reason_left_open(
    case: PassIdentities, missing: Sequence[GradientFinding], used: torch.dtype, clipped: float | None
) -> tuple[str, Sequence[Row]]:
    """Return why a pass without a broken identity is not verified, with the rows that show it; empty if it is."""
    count, tested, unsure = len(case.symmetries), int(case.tested.sum()), case.left_open
    unknown = case.backward.laws.unknown
    if clipped is not None:
        message = (
            f"Gradients look clipped by value at ±{clipped:.3g}, which no identity survives: audit before clipping."
        )
        return message, ()
    if case.decayed is not None:
        message = (
            f"The gradients contain {case.decayed:.3g} times the parameters: the loss has a penalty on the weights, so "
            "that the identities of the outputs are not those of the loss."
        )
        return message, ()
    if missing:
        message = (
            f"{len(missing)} trainable parameters have no gradient, {missing[0].parameter} among them. If nothing "
            "should reach them, freeze them or name them in unused=."
        )
        return message, ()
    if not count:
        message = "No law is known of this model, so nothing can be said of its gradients."
        return message, ()
    if not tested:
        message = "No gradient reached the parameters of any law, or those it reached are zero."
        return message, ()
    if case.no_laws:
        message = (
            f"{len(case.no_laws)} of {count} identities do not hold, but they are not laws of the model as it runs "
            "now: moving its parameters along them changes the outputs. A function in it is not what its place "
            "suggests, or the model took another way than in the call its laws were read off. The others hold."
        )
        return message, ()
    if case.noisy:
        worst = next(row for row in unsure if row.name in {case.names[index] for index in case.noisy})
        message = (
            f"{len(case.noisy)} of {count} identities are above the floor of {_name_of(used)}, "
            f"{worst.name} the furthest ({worst.residual:.2g}): {worst.suggests[0]}. The others hold."
        )
        return message, unsure
    if unsure:
        message = (
            f"{len(unsure)} of {count} identities are further off than the √ε of the norms they hold up to: either "
            "inputs of those norms are small against √ε, or the backward pass is wrong there. The others hold. Within "
            "conserved.gauge(model), or with a Monitor, what ε leaves is measured and these are decided too."
        )
        return message, unsure
    if unknown:
        listed = ", ".join(f"{name} ({times}×)" for name, times in list(unknown.items())[:4])
        message = (
            f"All {tested} identities that are known hold, but nothing is known of operations the model runs: {listed}."
            " conserved.register_operator says what they keep; conserved.check tests their backward."
        )
        return message, ()
    return "", ()


def _name_of(precision: torch.dtype) -> str:
    return str(precision).removeprefix("torch.")


def _verdict(status: Status, message: str, *evidence: Evidence) -> Verdict:
    return Verdict(status=status, message=message, evidence=evidence)
