"""The audit itself: every gradient identity of a model after a backward pass, held against that pass's rounding."""

from __future__ import annotations

import math
import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from conserved.audit.causes import factor, step_size, usual
from conserved.audit.coverage import coverage
from conserved.audit.gauging import Gauge
from conserved.audit.lookups import Loses, lost, tables
from conserved.audit.places import described
from conserved.audit.report import Audit, Finding, Row
from conserved.backward import coarsest
from conserved.balance import Balance, balance_of
from conserved.inference import laws_of_model
from conserved.inference.derivation import Derivation
from conserved.inference.moved import moved, runs
from conserved.judging import HALF, TOLERANCE, rounding, status
from conserved.laws import Dropped, LawSet
from conserved.shared_memory import overlapping
from conserved.symmetry import Symmetry, Tensors, whole
from conserved.verdict import Evidence, Status, Verdict

_EXPLAINED = 24
"""Failures that are looked into one by one, worst first; each costs a transfer from the device."""

_SEEDS = 6
"""Random group elements, and seeds of the model's own randomness, that a law in doubt is tried with."""

_SOFT = 0.2
"""The share of what half a motion does to the outputs that a law up to ε may do to them."""

_FAINT = 1 / 64
"""The share of rounding of all gradients that reaches a single one in half precision, where all of it would be much."""

_CUT = 16
"""Entries of several gradients that have one magnitude, the largest, if gradients were clipped by value."""


def audit(
    model: nn.Module,
    laws: LawSet | None = None,
    *,
    loss: str = "any",
    precision: torch.dtype | None = None,
    accumulated: int = 1,
    unused: Sequence[str] = (),
    gauge: Gauge | None = None,
) -> Audit:
    """Hold every gradient identity against rounding. Call it after `loss.backward()`, before `optimizer.step()`.

    Args:
        model: the model, with gradients on its parameters.
        laws: what to hold them against. Without it, the laws of the model are inferred for `loss` and kept with it; a
            model that does not say how it is called needs `laws=conserved.recognize(model, x)`.
        loss: as for `conserved.recognize`.
        precision: the coarsest that the forward or backward pass was computed in, for instance torch.bfloat16 under
            autocast; without it, it is taken from the stored types and read off the gradients' bits (conserved.grain).
        accumulated: backward passes that were added up in the gradients; it matters if those are stored in half
            precision.
        unused: patterns of names of parameters that may have no gradient.
        gauge: what `conserved.gauge(model)` saw of the same passes. The verdict is then on both, and laws up to a
            norm's ε are held to rounding.

    Returns:
        An `Audit`: `.ok`, `.conclusive`, `.coverage`, `.failures`, `.summary()`.

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
        balance = balance_of(backward.laws.plan, backward.points, backward.slopes)
        used, known = _precision(precision, backward, balance)
        settled = _settled(backward, balance, used, accumulated, gauge, given=known == "given")
        return _judged(backward, settled, used, known, tuple(unused), gauge)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Backward:
    """What a backward pass left behind, and the laws it is held against."""

    model: nn.Module
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
        slopes: dict[str, Tensor] = {name: p.grad for name, p in trained.items() if p.grad is not None}
        lawful, gone = _lawful(model, theta, laws)
        if trained and not slopes:
            raise ValueError(f"None of the {len(trained)} trainable parameters has a gradient. Call backward() first.")
        absent = tuple(name for name in trained if name not in slopes)
        slopes |= {name: torch.zeros_like(trained[name]) for name in lawful.plan.needs if name not in slopes}
        return _Backward(
            model=model,
            laws=lawful,
            points=trained,
            slopes=slopes,
            absent=absent,
            dropped=(*laws.dropped, *gone),
            types=frozenset((trained[name].dtype, slope.dtype) for name, slope in slopes.items()),
        )


_LAWFUL: weakref.WeakKeyDictionary[nn.Module, tuple[Hashable, LawSet, LawSet, tuple[Dropped, ...]]] = (
    weakref.WeakKeyDictionary()
)
"""For every model the laws it was last audited with, and those of them that it keeps."""


def _lawful(model: nn.Module, theta: Mapping[str, Tensor], laws: LawSet) -> tuple[LawSet, tuple[Dropped, ...]]:
    """The laws that this model keeps as it is now, and why it does not keep the others; found out once.

    A law that a frozen leg takes away is not listed; one that was frozen since is not held against anything. Nor is one
    with a parameter that shares its memory with another since: a step of that one moves it too; nor one of an embedding
    whose padding row is no longer zero.
    """
    state = tuple((name, id(p), p.requires_grad, _address(p)) for name, p in theta.items())
    known = _LAWFUL.get(model)
    if known is not None and known[0] == state and known[1] is laws:
        return known[2], known[3]
    strangers = [name for name in laws.plan.needs if name not in theta]
    if strangers:
        raise ValueError(
            f"The laws speak of {strangers[0]}, which the model does not have. "
            "Pass laws=conserved.recognize(model, x) of this model."
        )
    trained = {name: p for name, p in theta.items() if p.requires_grad}
    away = [name for name, p in trained.items() if p.is_meta]
    if away:
        raise ValueError(f"{away[0]} is on the meta device and has no gradient to audit. Load the weights first.")
    beside, looked_up = overlapping(theta), tables(model)
    gone = tuple(Dropped(s.name, reason) for s in laws if (reason := _lost(s, trained, beside, looked_up)))
    names = {item.name for item in gone}
    lawful = laws.select(lambda s: s.name not in names) if gone else laws
    _LAWFUL[model] = (state, laws, lawful, gone)
    return lawful, gone


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:
        # A wrapper around other tensors has no memory of its own.
        return 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Settled:
    """Residuals and what rounding explains of them, after laws up to ε were made exact where that is possible."""

    balance: Balance
    residuals: NDArray[np.float64]
    limits: NDArray[np.float64]
    nearly: NDArray[np.bool_]
    """Laws that still hold only up to ε."""


def _settled(
    backward: _Backward,
    balance: Balance,
    used: torch.dtype,
    accumulated: int,
    gauge: Gauge | None,
    *,
    given: bool,
) -> _Settled:
    plan = backward.laws.plan
    rounding_alone = _limits(backward, used, accumulated, given=given)
    residuals, limits = balance.residuals.copy(), rounding_alone + plan.epsilons**0.5
    nearly = plan.epsilons > 0
    terms = None if gauge is None else gauge.terms
    for place in np.flatnonzero(nearly).tolist() if terms is not None else ():
        symmetry = plan.symmetries[place]
        side = terms.of(symmetry, backward.slopes) if terms is not None else None
        if side is None or not balance.tested[place]:
            continue
        mu = symmetry.identity(backward.points, backward.slopes, dtype=torch.float64).flatten()
        value = side.value.to(mu.device)
        size = math.hypot(balance.scales[place], float(value.norm()), side.spread**0.5)
        residuals[place] = float((mu - value).norm()) / size if size else 0.0
        limits[place], nearly[place] = rounding_alone[place], False
    return _Settled(balance=balance, residuals=residuals, limits=limits, nearly=nearly)


def _judged(
    backward: _Backward,
    settled: _Settled,
    used: torch.dtype,
    known: Literal["given", "stored", "bits"],
    unused: tuple[str, ...],
    gauge: Gauge | None,
) -> Audit:
    """Hold every residual against its limit, and look into those that are too large, worst first."""
    symmetries, points, slopes = backward.laws.symmetries, backward.points, backward.slopes
    balance, residuals, limits = settled.balance, settled.residuals, settled.limits
    tested = balance.tested
    doubtful = np.flatnonzero(~((residuals <= limits) & tested)).tolist()
    statuses = {
        place: status(residuals[place], limits[place], tested=bool(tested[place]), nearly=bool(settled.nearly[place]))
        for place in doubtful
    }
    findings = _findings(backward, balance, unused)
    broken = [place for place in doubtful if statuses[place] is Status.REFUTED]
    late = _lost_since(backward, [symmetries[place] for place in broken])
    broken = [place for place in broken if symmetries[place].name not in late]
    statuses |= {place: Status.INCONCLUSIVE for place in doubtful if symmetries[place].name in late}
    limits = _with_noise(backward, settled, broken, used)
    # What drowns in the noise of the others is neither right nor wrong, and nothing it spans counts as tested.
    drowned = {place for place in broken if residuals[place] <= limits[place]}
    statuses |= dict.fromkeys(drowned, Status.INCONCLUSIVE)
    broken = [place for place in broken if place not in drowned]
    excess = np.where(np.isnan(residuals), np.inf, residuals / limits)
    failed = [symmetries[place] for place in broken]
    untrue = _untrue(backward, failed)
    statuses |= {place: Status.INCONCLUSIVE for place in broken if symmetries[place].name in untrue}
    broken = [place for place in broken if symmetries[place].name not in untrue]
    clipped = _clipped([symmetries[place] for place in broken], slopes) if broken else None
    if clipped is not None:
        statuses |= dict.fromkeys(broken, Status.INCONCLUSIVE)
        broken = []

    def row(place: int, suggests: tuple[str, ...] = ()) -> Row:
        symmetry = symmetries[place]
        return Row(
            name=symmetry.name,
            family=symmetry.family,
            parameters=symmetry.parameters,
            where=tuple(described(leg, symmetry) for leg in symmetry.legs),
            part=symmetry.part,
            residual=float(residuals[place]),
            tolerance=float(limits[place]),
            status=statuses.get(place, Status.VERIFIED),
            checked=bool(tested[place]) and symmetry.name not in late,
            source=symmetry.source,
            suggests=suggests,
        )

    moved: float | None = None
    if broken and not any(item.trouble == "not finite" for item in findings):
        moved = _moved([symmetries[place] for place in broken[:_EXPLAINED]], points, slopes)
    failures = [
        row(place, _suggestions(symmetries[place], points, slopes, moved) if number < _EXPLAINED else ())
        for number, place in enumerate(sorted(broken, key=lambda place: -excess[place]))
    ]
    failures = [replace(one, suggests=(*_decided(one), *one.suggests)) for one in failures]
    unsure = [
        place
        for place in doubtful
        if statuses[place] is Status.INCONCLUSIVE and tested[place] and symmetries[place].name not in late
    ]
    left_open = tuple(
        row(place, untrue.get(symmetries[place].name, ())) for place in sorted(unsure, key=lambda place: -excess[place])
    )
    places = np.flatnonzero(tested)
    verdict = _verdict(
        failures,
        left_open,
        findings,
        used,
        moved=moved,
        clipped=clipped,
        untrue=len(untrue),
        gauge=gauge,
        count=len(symmetries),
        tested=len(places),
        nearest=row(int(places[excess[places].argmax()])) if len(places) else None,
        nearly=int(settled.nearly.sum()),
        unknown=backward.laws.unknown,
    )
    held = frozenset(symmetries[place].name for place in places.tolist() if place not in drowned) - frozenset(late)
    return Audit(
        verdict=verdict,
        failures=tuple(failures),
        left_open=left_open,
        worst=float(residuals.max(initial=0.0)),
        others=lambda: map(row, sorted(set(range(len(symmetries))).difference(broken))),
        tested=len(held),
        by_family=lambda: _by_family(symmetries, excess, tested),
        covers=lambda: coverage(backward.laws, held, points),
        findings=tuple(findings),
        unclaimed=backward.laws.unclaimed,
        dropped=(*backward.dropped, *(Dropped(name, reason) for name, reason in late.items())),
        unknown=backward.laws.unknown,
        precision=used,
        known=known,
        ranks=balance.ranks,
        moved=moved,
        gauge=gauge,
    )


def _by_family(
    symmetries: Sequence[Symmetry], excess: NDArray[np.float64], tested: NDArray[np.bool_]
) -> dict[str, float]:
    found: dict[str, float] = {}
    for symmetry, value, reached in zip(symmetries, excess.tolist(), tested.tolist(), strict=True):
        if reached:
            found[symmetry.family] = max(found.get(symmetry.family, 0.0), value)
    return found


def _with_noise(
    backward: _Backward, settled: _Settled, broken: Sequence[int], used: torch.dtype
) -> NDArray[np.float64]:
    """Limits, those of broken identities with the noise of all gradients together added.

    Where softmax is saturated or has one key to attend to, gradients are differences of equal numbers: what is left of
    them is rounding of the numbers, not of the difference. Rounding of the largest gradients is taken to reach every
    other one; a wrong gradient of a millionth of them is not seen.
    """
    found = settled.limits.copy()
    lengths = settled.balance.norms
    everything = math.hypot(*map(float, lengths)) if np.isfinite(lengths).all() else 0.0
    kind = coarsest(used, torch.float32)
    share = torch.finfo(kind).eps / TOLERANCE[kind] * (_FAINT if kind in HALF else 1.0)
    for place in broken:
        symmetry = backward.laws.plan.symmetries[place]
        if symmetry.kind.linear or not everything:
            continue
        sizes = [float(matrix.norm()) for matrix in symmetry.matrices(backward.points)]
        floor = share * everything * math.hypot(*sizes)
        scale = settled.balance.scales[place]
        found[place] *= math.hypot(scale, floor) / scale if scale else 1.0
    return found


_EITHER = "either the backward is wrong or this function is not what its place suggests"


def _untrue(backward: _Backward, broken: Sequence[Symmetry]) -> dict[str, tuple[str, ...]]:
    """Of broken laws that were not read off the program as a proof, those that the forward pass does not keep either.

    Parameters are moved along them, with the inputs that the laws were read off and the randomness of several seeds.
    """
    found = _longer(broken)
    known = backward.laws.derivation
    broken = [symmetry for symmetry in broken if symmetry.name not in found]
    doubted = [symmetry for symmetry in broken if symmetry.source != "typed"][:_EXPLAINED]
    if not doubted or not isinstance(known, Derivation) or known.call is None:
        return found
    run = runs(backward.model, *known.call)
    theta = dict(backward.model.named_parameters())
    try:
        if all(moved(run, theta, doubted, seed=seed).holds for seed in range(_SEEDS)):
            return found
        for symmetry in doubted:
            changes = [moved(run, theta, [symmetry], seed=seed) for seed in range(_SEEDS)]
            worst = max(changes, key=lambda one: one.change)
            # A law up to ε changes the outputs by as much as ε is worth.
            bound = 0.0 if symmetry.exact else _SOFT
            if any(one.holds is False and one.change > bound * one.half for one in changes):
                text = f"moving the parameters along it changes the outputs by {worst.change:.1g}: it is no law here"
                found[symmetry.name] = (f"{_EITHER}: {text}",)
    except Exception:
        # A model that cannot be called again decides nothing.
        return found
    return found


def _longer(broken: Sequence[Symmetry]) -> dict[str, tuple[str, ...]]:
    """Broken laws of tables with rows that the call the laws were read off did not reach, and that are reached now."""
    reached = {name for symmetry in broken if symmetry.family == "unused" for name in symmetry.parameters}
    text = "rows have a gradient that inputs did not reach when the laws were read off: infer them from longer inputs"
    return {symmetry.name: (text,) for symmetry in broken if reached.intersection(symmetry.parameters)}


def _decided(row: Row) -> tuple[str, ...]:
    """What is said of a broken law that is not proved by the program itself."""
    if row.source == "typed":
        return ()
    return (f"{_EITHER}; moving the parameters along it leaves the outputs as they are, so it is the backward",)


def _lost_since(backward: _Backward, broken: Sequence[Symmetry]) -> dict[str, str]:
    """Of laws that seem broken, those that are none any more because of what training did to a table."""
    looked_up = tables(backward.model) if broken else {}
    return {symmetry.name: reason for symmetry in broken if (reason := lost(symmetry, looked_up))}


def _clipped(broken: Sequence[Symmetry], slopes: Tensors) -> float | None:
    """The value at which gradients were cut off, if they look as if they were; no law survives that.

    Many entries have exactly the largest magnitude of all; one or two may by chance, or by symmetry.
    """
    names = dict.fromkeys(name for symmetry in broken for name in symmetry.parameters)
    tensors = [whole(slopes[name]).detach() for name in names if not slopes[name].is_sparse]
    tensors = [one for one in tensors if one.numel() and one.dtype not in HALF]
    if not tensors:
        return None
    peaks = [one.abs().max() for one in tensors]
    peak = float(torch.stack([one.double().to(peaks[0].device) for one in peaks]).max())
    if not 0 < peak < math.inf:
        return None
    cut = [one.abs() == peak for one in tensors]
    many = sum(int(one.sum()) for one in cut)
    pairs = zip(tensors, cut, strict=True)
    both = any(bool((one[where] > 0).any()) and bool((one[where] < 0).any()) for one, where in pairs)
    return peak if many >= _CUT and both and sum(bool(one.any()) for one in cut) > 1 else None


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
    seen = None if stored in HALF else balance.grain
    return (stored, "stored") if seen is None else (seen, "bits")


def _limits(backward: _Backward, used: torch.dtype, accumulated: int, *, given: bool) -> NDArray[np.float64]:
    """The residual that rounding explains, for every symmetry: its tensors may be stored more coarsely than others."""
    # Libraries run norms, softmax and routers in float32 inside a float64 model, and gradients do not show it.
    least = used if given else coarsest(used, torch.float32)
    plan = backward.laws.plan

    def limits(kind: torch.dtype) -> NDArray[np.float64]:
        # Each pass that is added to a half-precision gradient rounds it once more.
        more = math.sqrt(accumulated) if kind in HALF else 1.0
        return more * rounding(coarsest(least, kind), plan.entries)

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
    used: torch.dtype,
    *,
    moved: float | None,
    clipped: float | None,
    untrue: int,
    gauge: Gauge | None,
    count: int,
    tested: int,
    nearest: Row | None,
    nearly: int,
    unknown: Mapping[str, int],
) -> Verdict:
    """One verdict on the pass; a gradient that is missing leaves it open unless an identity is broken as well."""
    infinite = [item for item in findings if item.trouble == "not finite"]
    missing = [item for item in findings if item.trouble == "missing"]
    if infinite:
        message = f"{len(infinite)} gradients are not finite, that of {infinite[0].parameter} among them."
        return _said(
            Status.REFUTED, message, Evidence(what="gradients that are not finite", value=len(infinite), limit=0)
        )
    if failures:
        message = f"{len(failures)} of {count} gradient identities do not hold"
        if moved is not None:
            message += ", because the parameters are no longer those the gradient was taken at: a step of size "
            message += f"{moved:.3g} explains all. Audit before optimizer.step()."
        else:
            message += ". Either the backward pass is wrong there, parameters or gradients were changed since, or the "
            message += "model computed something else than in the call its laws were read off."
        return _said(Status.REFUTED, message, *(row.evidence for row in failures))
    if gauge is not None and gauge.seen and gauge.verdict == Status.REFUTED:
        return _said(Status.REFUTED, gauge.verdict.message, *gauge.verdict.evidence)
    if clipped is not None:
        message = (
            f"Gradients look clipped by value at ±{clipped:.3g}, which no identity survives: audit before clipping."
        )
    elif missing:
        message = (
            f"{len(missing)} trainable parameters have no gradient, {missing[0].parameter} among them. If nothing "
            "should reach them, freeze them or name them in unused=."
        )
    elif not count:
        message = "No law is known of this model, so nothing can be said of its gradients."
    elif not tested:
        message = "No gradient reached the parameters of any law, or those it reached are zero."
    elif untrue:
        message = (
            f"{untrue} of {count} identities do not hold, but they are not laws of the model as it runs now: moving "
            "its parameters along them changes the outputs. A function in it is not what its place suggests, or the "
            "model took another way than in the call its laws were read off. The others hold."
        )
    elif unsure:
        message = (
            f"{len(unsure)} of {count} identities are further off than the √ε of the norms they hold up to: either "
            "inputs of those norms are small against √ε, or the backward pass is wrong there. The others hold. Within "
            "conserved.gauge(model), or with a Monitor, what ε leaves is measured and these are decided too."
        )
        return _said(Status.INCONCLUSIVE, message, *(row.evidence for row in unsure))
    elif unknown:
        listed = ", ".join(f"{name} ({times}×)" for name, times in list(unknown.items())[:4])
        message = (
            f"All {tested} identities that are known hold, but nothing is known of operations the model runs: {listed}."
            " conserved.register_operator says what they keep; conserved.check tests their backward."
        )
    else:
        assert nearest is not None
        message = f"All {tested} gradient identities hold to the rounding of {str(used).removeprefix('torch.')}"
        message += f", {nearly} of them up to a norm's ε." if nearly else "."
        return _said(Status.VERIFIED, message, nearest.evidence)
    return _said(Status.INCONCLUSIVE, message)


def _said(status: Status, message: str, *evidence: Evidence) -> Verdict:
    return Verdict(status=status, message=message, evidence=evidence)
