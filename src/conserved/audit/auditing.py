"""The audit itself: every gradient identity of a model after a backward pass, held against that pass's rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from conserved.audit.causes import factor, step_size, usual
from conserved.audit.lookups import Loses, lost, tables
from conserved.audit.report import Audit, Finding, Row
from conserved.backward import coarsest
from conserved.balance import Balance, weigh
from conserved.inference import laws_of_model
from conserved.judging import TOLERANCE, rounding, status
from conserved.laws import Dropped, LawSet
from conserved.shared_memory import overlapping
from conserved.symmetry import Symmetry, Tensors
from conserved.verdict import Evidence, Status, Verdict
from conserved.view import whole

_HALF = (torch.bfloat16, torch.float16)

_EXPLAINED = 24
"""Failures that are looked into one by one, worst first; each costs a transfer from the device."""


def audit(
    model: nn.Module,
    laws: LawSet | None = None,
    *,
    loss: str = "any",
    precision: torch.dtype | None = None,
    accumulated: int = 1,
    unused: Sequence[str] = (),
) -> Audit:
    """Hold every gradient identity against rounding. Call it after `loss.backward()`, before `optimizer.step()`.

    Without `laws`, those of the model are inferred for `loss` and kept with it. A model that does not say how it is
    called needs `laws=conserved.recognize(model, x)`. `precision` is the coarsest that the forward or backward pass
    was computed in, for instance torch.bfloat16 under autocast; without it, it is taken from the stored types and
    read off the gradients' bits (conserved.grain).
    `accumulated` backward passes were added up in the gradients; it matters if those are stored in half precision.
    Parameters whose names match a pattern in `unused` may have no gradient.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"audit takes a torch.nn.Module; got {type(model).__name__}.")
    if precision is not None and precision not in TOLERANCE:
        raise ValueError(f"precision is a floating-point type such as torch.bfloat16; got {precision}.")
    if accumulated < 1:
        raise ValueError(f"At least one backward pass was accumulated; got {accumulated}.")
    found = laws_of_model(model, loss=loss) if laws is None else laws
    with torch.no_grad():
        backward = _Backward.of(model, found)
        balance = weigh(backward.laws.plan, backward.points, backward.slopes)
        used, known = _precision(precision, backward, balance)
        limits = _limits(backward, used, accumulated, given=known == "given")
        return _judged(backward, balance, limits, used, known, found.unclaimed, tuple(unused))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Backward:
    """What a backward pass left behind, and the laws it is held against."""

    laws: LawSet
    points: Tensors
    slopes: Tensors
    absent: tuple[str, ...]
    """Trained parameters that have no gradient; those that laws need are taken to have a zero one."""
    dropped: tuple[Dropped, ...]
    """Laws of the architecture that this model does not keep, and why."""
    types: frozenset[tuple[torch.dtype, torch.dtype]]
    """Of a parameter and of its gradient, as they occur."""

    @staticmethod
    def of(model: nn.Module, laws: LawSet) -> _Backward:
        theta = dict(model.named_parameters())
        trained = {name: p for name, p in theta.items() if p.requires_grad}
        strangers = [name for name in laws.plan.needs if name not in theta]
        if strangers:
            raise ValueError(
                f"The laws speak of {strangers[0]}, which the model does not have. "
                "Pass laws=conserved.recognize(model, x) of this model."
            )
        away = [name for name, p in trained.items() if p.is_meta]
        if away:
            raise ValueError(f"{away[0]} is on the meta device and has no gradient to audit. Load the weights first.")
        slopes: dict[str, Tensor] = {name: p.grad for name, p in trained.items() if p.grad is not None}
        if trained and not slopes:
            raise ValueError(f"None of the {len(trained)} trainable parameters has a gradient. Call backward() first.")
        # A law that a frozen leg takes away is not listed; one that was frozen since is not held against anything. Nor
        # is one with a parameter that shares its memory with another since: a step of that one moves it too; nor one of
        # an embedding whose padding row is no longer zero.
        beside, looked_up = overlapping(theta), tables(model)
        gone = tuple(Dropped(s.name, reason) for s in laws if (reason := _lost(s, trained, beside, looked_up)))
        names = {item.name for item in gone}
        lawful = laws.select(lambda s: s.name not in names) if gone else laws
        absent = tuple(name for name in trained if name not in slopes)
        slopes |= {name: torch.zeros_like(trained[name]) for name in lawful.plan.needs if name not in slopes}
        return _Backward(
            laws=lawful,
            points=trained,
            slopes=slopes,
            absent=absent,
            dropped=(*laws.dropped, *gone),
            types=frozenset((trained[name].dtype, slope.dtype) for name, slope in slopes.items()),
        )


def _judged(
    backward: _Backward,
    balance: Balance,
    limits: NDArray[np.float64],
    used: torch.dtype,
    known: Literal["given", "stored", "bits"],
    unclaimed: tuple[str, ...],
    unused: tuple[str, ...],
) -> Audit:
    """Hold every residual against its limit, and look into those that are too large, worst first."""
    symmetries, points, slopes = backward.laws.symmetries, backward.points, backward.slopes
    residuals, tested = balance.residuals, balance.tested
    doubtful = np.flatnonzero(~((residuals <= limits) & tested)).tolist()
    statuses = {
        place: status(residuals[place], limits[place], tested=bool(tested[place]), nearly=not symmetries[place].exact)
        for place in doubtful
    }
    findings = _findings(backward, balance, unused)
    excess = np.where(np.isnan(residuals), np.inf, residuals / limits)

    def row(place: int, suggests: tuple[str, ...] = ()) -> Row:
        symmetry = symmetries[place]
        return Row(
            name=symmetry.name,
            family=symmetry.family,
            parameters=symmetry.parameters,
            part=symmetry.part,
            residual=float(residuals[place]),
            tolerance=float(limits[place]),
            status=statuses.get(place, Status.VERIFIED),
            checked=bool(tested[place]),
            suggests=suggests,
        )

    broken = [place for place in doubtful if statuses[place] is Status.REFUTED]
    moved: float | None = None
    if broken and not any(item.trouble == "not finite" for item in findings):
        moved = _moved([symmetries[place] for place in broken[:_EXPLAINED]], points, slopes)
    failures = [
        row(place, _suggestions(symmetries[place], points, slopes, moved) if number < _EXPLAINED else ())
        for number, place in enumerate(sorted(broken, key=lambda place: -excess[place]))
    ]
    unsure = [place for place in doubtful if statuses[place] is Status.INCONCLUSIVE and tested[place]]
    left_open = tuple(row(place) for place in sorted(unsure, key=lambda place: -excess[place]))
    places = np.flatnonzero(tested)
    return Audit(
        verdict=_verdict(
            failures,
            left_open,
            findings,
            moved,
            used,
            count=len(symmetries),
            tested=len(places),
            nearest=row(int(places[excess[places].argmax()])) if len(places) else None,
            nearly=int((backward.laws.plan.epsilons > 0).sum()),
        ),
        failures=tuple(failures),
        left_open=left_open,
        worst=float(residuals.max(initial=0.0)),
        others=lambda: map(row, sorted(set(range(len(symmetries))).difference(broken))),
        findings=tuple(findings),
        unclaimed=unclaimed,
        dropped=backward.dropped,
        precision=used,
        known=known,
        ranks=balance.ranks,
        moved=moved,
    )


def _lost(
    symmetry: Symmetry, trained: Mapping[str, Tensor], beside: Mapping[str, str], looked_up: dict[str, Loses]
) -> str:
    """Why a law is one no longer; empty if it still is."""
    for name in symmetry.parameters:
        if name not in trained:
            return f"{name} is frozen, so the other legs are not balanced against it"
        if name in beside:
            return f"{name} shares memory with {beside[name]}, so that steps of one move the other"
    return lost(symmetry, looked_up)


def _precision(
    given: torch.dtype | None, backward: _Backward, balance: Balance
) -> tuple[torch.dtype, Literal["given", "stored", "bits"]]:
    """The coarsest precision of the pass, and how it is known."""
    if given is not None:
        return given, "given"
    stored = coarsest(*(slope for _, slope in backward.types))
    seen = None if stored in _HALF else balance.grain
    return (stored, "stored") if seen is None else (seen, "bits")


def _limits(backward: _Backward, used: torch.dtype, accumulated: int, *, given: bool) -> NDArray[np.float64]:
    """The residual that rounding explains, for every symmetry: its tensors may be stored more coarsely than others."""
    # Libraries run norms, softmax and routers in float32 inside a float64 model, and gradients do not show it.
    least = used if given else coarsest(used, torch.float32)
    plan = backward.laws.plan

    def limits(kind: torch.dtype) -> NDArray[np.float64]:
        # Each pass that is added to a half-precision gradient rounds it once more.
        more = math.sqrt(accumulated) if kind in _HALF else 1.0
        return more * rounding(coarsest(least, kind), plan.entries) + plan.epsilons**0.5

    by_kind = {kind: limits(kind) for kind in {coarsest(*pair) for pair in backward.types}}
    if len(by_kind) == 1:
        return next(iter(by_kind.values()))
    stored = {name: coarsest(backward.points[name].dtype, slope.dtype) for name, slope in backward.slopes.items()}
    kinds = (coarsest(*(stored[name] for name in symmetry.parameters)) for symmetry in plan.symmetries)
    return np.array([by_kind[kind][place] for place, kind in enumerate(kinds)])


def _excused(symmetries: Sequence[Symmetry]) -> set[str]:
    """Parameters of which a law says that all of their gradient is zero, so that none need be stored."""
    return {
        leg.view.parameter
        for symmetry in symmetries
        if symmetry.inert
        for leg in symmetry.legs
        if leg.view.n * leg.view.m == math.prod(leg.view.shape)
    }


def _findings(backward: _Backward, balance: Balance, unused: tuple[str, ...]) -> list[Finding]:
    absent = set(backward.absent)
    odd = np.flatnonzero(~np.isfinite(balance.norms) | (balance.norms == 0)).tolist()
    if not odd and not absent:
        return []
    excused = _excused(backward.laws.symmetries)
    there = [(balance.names[place], balance.norms[place]) for place in odd if balance.names[place] not in absent]
    needed = [n for n in backward.absent if n not in excused and not any(fnmatchcase(n, pattern) for pattern in unused)]
    found = [Finding(parameter=name, trouble="missing") for name in needed]
    found += [Finding(parameter=name, trouble="not finite") for name, norm in there if norm != 0]
    found += [Finding(parameter=name, trouble="zero") for name, norm in there if norm == 0 and name not in excused]
    return found


def _moved(failed: list[Symmetry], theta: Tensors, slopes: Tensors) -> float | None:
    # In one order on every process: sharded tensors are gathered here.
    involved = dict.fromkeys(name for symmetry in failed for name in symmetry.parameters)
    return step_size(
        failed, {name: whole(theta[name]) for name in involved}, {name: whole(slopes[name]) for name in involved}
    )


def _suggestions(symmetry: Symmetry, theta: Tensors, slopes: Tensors, moved: float | None) -> tuple[str, ...]:
    if moved is not None:
        return (f"the parameters moved by −{moved:.3g} times this gradient after it was taken",)
    return tuple(filter(None, (factor(symmetry, theta, slopes), usual(symmetry))))


def _verdict(
    failures: Sequence[Row],
    unsure: Sequence[Row],
    findings: Sequence[Finding],
    moved: float | None,
    used: torch.dtype,
    *,
    count: int,
    tested: int,
    nearest: Row | None,
    nearly: int,
) -> Verdict:
    """One verdict on the pass; a gradient that is missing leaves it open unless an identity is broken as well."""
    infinite = [item for item in findings if item.trouble == "not finite"]
    missing = [item for item in findings if item.trouble == "missing"]
    evidence = tuple(row.evidence for row in failures)
    status = Status.INCONCLUSIVE
    if infinite:
        status = Status.REFUTED
        message = f"{len(infinite)} gradients are not finite, that of {infinite[0].parameter} among them."
        evidence = (Evidence(what="gradients that are not finite", value=len(infinite), limit=0),)
    elif failures:
        status = Status.REFUTED
        message = f"{len(failures)} of {count} gradient identities do not hold"
        if moved is not None:
            message += ", because the parameters are no longer those the gradient was taken at: a step of size "
            message += f"{moved:.3g} explains all. Audit before optimizer.step()."
        else:
            message += ". Either the backward pass is wrong there, parameters or gradients were changed since, or the "
            message += "model computed something else than in the call its laws were read off."
    elif missing:
        message = (
            f"{len(missing)} trainable parameters have no gradient, {missing[0].parameter} among them. If nothing "
        )
        message += "should reach them, freeze them or name them in unused=."
    elif not count:
        message = "No law is known of this model, so nothing can be said of its gradients."
    elif not tested:
        message = "No gradient reached the parameters of any law, or those it reached are zero."
    elif unsure:
        message = f"{len(unsure)} of {count} identities are further off than the √ε of the norms they hold up to: "
        message += "either inputs of those norms are small against √ε, or the backward pass is wrong there. "
        message += "The others hold."
        evidence = tuple(row.evidence for row in unsure)
    else:
        assert nearest is not None
        status = Status.VERIFIED
        message = f"All {tested} gradient identities hold to the rounding of {str(used).removeprefix('torch.')}"
        message += f", {nearly} of them up to a norm's ε." if nearly else "."
        evidence = (nearest.evidence,)
    return Verdict(status=status, message=message, evidence=evidence)
