"""The audit of a model after a backward pass: it reads the pass, decides its identities and returns one verdict."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from conserved.auditing.audit_result import Audit, GradientFinding, Judgement
from conserved.auditing.audit_verdict import verdict_of_pass
from conserved.auditing.backward_pass import BackwardPass, precision_of, residuals_of
from conserved.auditing.causes import step_size
from conserved.auditing.diagnosis import Diagnosis
from conserved.auditing.explanations import EXPLAINED, lost_since
from conserved.auditing.gradient_peaks import CorruptedEntry, PeakHistory, corruption_verdict
from conserved.auditing.kernel_precision import explained_by_predictions, explained_by_rounding
from conserved.auditing.loss_scale import LossScale, loss_scale
from conserved.auditing.noise import expected_limits, least_factor, shows_factors, unmistakable
from conserved.auditing.pass_identities import PassIdentities
from conserved.auditing.reference_comparison import ReferenceComparison, compare_with_reference
from conserved.auditing.replay import ClosureReplay, Replay, alone
from conserved.auditing.sensitivity import Sensitivity, of_legs, sensitivity
from conserved.auditing.softmax_gauge import Gauge
from conserved.auditing.tested_parameters import coverage
from conserved.inference import laws_of_model
from conserved.inference.model_parts import parts_of
from conserved.laws import Dropped, LawSet
from conserved.laws.identities import Balance, PendingBalance
from conserved.layout import GivenLayout
from conserved.layout.replicas import Disagreement
from conserved.rank_agreement import confirm_together
from conserved.symmetry import Symmetry
from conserved.tolerances import HALF, RESIDUAL_TOLERANCE
from conserved.verdict import Evidence, Status, Verdict

LOGGER = logging.getLogger("conserved.audit")


def audit(
    model: nn.Module,
    laws: LawSet | None = None,
    *,
    closure: Callable[[], Tensor] | None = None,
    loss: str = "any",
    precision: torch.dtype | None = None,
    accumulated: int = 1,
    unused: Sequence[str] = (),
    gauge: Gauge | None = None,
    wait: bool = True,
    replay: Replay | None = None,
    known: Mapping[str, Diagnosis] | None = None,
    sized: bool = True,
    layout: GivenLayout | None = None,
    reference: bool = False,
    peaks: PeakHistory | None = None,
) -> Audit:
    """Test every gradient identity of a model against rounding, after `loss.backward()` and before `optimizer.step()`.

    Weights and gradients are read once and held against a floor of the precision. Identities above it are decided by
    running the pass again, if `closure` or `replay` makes that possible: how large rounding is, whether the residual is
    reproducible, and in which kernels or precision. Without, only a residual that rounding cannot leave is refuted, and
    the others are left open.

    Args:
        model: the model, with gradients on its parameters.
        laws: the laws whose identities are tested. By default the laws of the model are inferred for `loss` and kept
            with it; a model that does not say how it is called needs `laws=conserved.recognize(model, x)`.
        loss: the loss the laws are inferred for, as for `conserved.recognize`.
        precision: the coarsest precision of the forward and backward pass, for instance torch.bfloat16 under autocast.
            By default it is taken from the stored types and read off the gradients' bits.
        accumulated: number of backward passes added up in the gradients; it matters if those are stored in half
            precision.
        unused: patterns of names of parameters that may have no gradient.
        gauge: the `Gauge` that `conserved.gauge(model)` gave for the same passes. The verdict is then on both, and laws
            up to a norm's ε are held to rounding.
        wait: False returns as soon as everything is queued on the device, and the audit is judged when it is first
            read, `.ready` or not. Gradients may be clipped, used and freed in the meantime. As they are not looked at
            again, a failure comes without the factor that would mend it, and identities whose products over- or
            underflow count as not tested. With a gauge, a replay, or parameters sharded over processes that have to
            agree, the audit is judged at once all the same.
        replay: the recorded pass, where one is at hand; `closure` makes one.
        known: by law, what replays of earlier passes have found out, so that they are not made again.
        sized: whether `Audit.sensitivity` is worked out, which reads weights and gradients a second time.
        layout: where the pieces of parameters are, by patterns of names, for stacks that do not say so: the axis that
            is cut over all processes, or None for what is replicated. DTensors and Megatron's attributes need none.
        reference: whether the pass is also replayed in reference form, and the gradients of all parameters compared
            (`Audit.comparison`). With `closure`, the gradients are also held against the same pass run again and
            against the derivative of the loss.
        peaks: the largest entries of the gradients of earlier steps. An entry that sticks out is looked up in the
            replayed pass (`Audit.corrupted`).

    Returns:
        An `Audit`: `.ok`, `.conclusive`, `.coverage`, `.failures`, `.summary()`.

    Raises:
        TypeError: `model` is not a module.
        ValueError: `precision` is not a floating-point type, or `accumulated` is less than one.
        NoExampleError: no laws are given, and the model does not say how it is called.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"Expected a torch.nn.Module, got {type(model).__name__}. Pass the model whose gradients are audited."
        )
    if precision is not None and precision not in RESIDUAL_TOLERANCE:
        raise ValueError(
            f"Expected a floating-point type as precision, got {precision}. Pass torch.bfloat16, for example."
        )
    if accumulated < 1:
        raise ValueError(f"Expected accumulated of at least 1, got {accumulated}. Pass the number of backward passes.")
    parts = parts_of(model)
    read = laws_of_model(model, loss=loss, parts=parts) if laws is None else laws
    if closure is not None:
        replay = ClosureReplay(model, closure)
    with torch.no_grad():
        confirm_together("audit")
        backward = BackwardPass.of(parts, read, layout)
        assert backward.gradients is not None
        # A second pass of one process would wait for the others in its collectives.
        replay = None if backward.assembly.groups else replay
        pending = PendingBalance.start(
            backward.laws.plan,
            backward.points,
            backward.gradients,
            lengths=not wait,
            groups=backward.together,
            made=backward.assembly.sums,
        )
        wait = wait or gauge is not None or replay is not None or bool(pending.meshes) or bool(pending.groups)
        request = _Request(
            precision=precision,
            accumulated=accumulated,
            unused=tuple(unused),
            gauge=gauge,
            replay=replay,
            former=known or {},
            sized=sized and wait,
            reference=reference,
            peaks=peaks,
        )
        judged = backward if wait else replace(backward, gradients=None)
        result = Audit(partial(_judge, judged, pending, request), lambda: pending.numbers.arrived)
        if wait:
            _ = result.judgement
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """The arguments of `audit` that decide about the identities of a pass."""

    precision: torch.dtype | None
    accumulated: int
    unused: tuple[str, ...]
    gauge: Gauge | None
    replay: Replay | None
    former: Mapping[str, Diagnosis]
    sized: bool
    reference: bool
    peaks: PeakHistory | None

    @property
    def one_pass(self) -> bool:
        """Whether the gradients are those of one pass of this process, so that a replay gives the same."""
        return self.accumulated == 1 and alone()


@torch.no_grad()
def _judge(backward: BackwardPass, pending: PendingBalance, request: _Request) -> Judgement:
    """Compare every residual with its limit once the device has computed it, and diagnose those that exceed it."""
    balance = pending.balance(backward.points, backward.gradients)
    used, known = precision_of(request.precision, backward, balance)
    measurement = residuals_of(
        backward,
        balance,
        used,
        request.accumulated,
        request.gauge,
        given=known == "given",
        replayed=request.replay is not None,
    )
    case = PassIdentities(backward, measurement)
    findings = _findings(backward, measurement.balance, request.unused)
    finite = not any(item.trouble == "not finite" for item in findings)
    moved, clipped = _decide(case, request, used, finite=finite)
    if request.gauge is not None and used in HALF:
        _accept_kernel_rounding(request.gauge, request.replay, backward)
    failures = case.failures(moved)
    verdict = verdict_of_pass(case, failures, findings, used, moved=moved, clipped=clipped, gauge=request.gauge)
    corrupted: tuple[CorruptedEntry, ...] = ()
    comparison = scale = None
    if finite and moved is None:
        comparison, scale = _compare_with_replay(backward, request, used, shortened=known == "products")
        corrupted = _corrupted_entries(backward, request)
    verdict = _with_other_checks(verdict, comparison, scale, corrupted, backward.disagreements)
    seen = _sensitivity(case, used, replayed=request.replay is not None) if request.sized and finite else None
    # An audit that is kept must not keep the gradients, nor the model.
    laws, tested = backward.laws, measurement.balance.tested
    read, points = backward.read, {n: p for n, p in backward.points.items() if n not in backward.assembly.sums}
    seen_there = None if seen is None else seen.renamed(backward.assembly.origin)
    del case.backward
    return Judgement(
        verdict=verdict,
        failures=failures,
        left_open=case.left_open,
        worst=float(measurement.residuals.max(initial=0.0)),
        others=lambda: map(case.row, sorted(set(range(len(case.symmetries))).difference(case.broken))),
        tested=len(case.decided) if case.late or case.noisy else int(tested.sum()),
        by_family=lambda: _by_family(laws.symmetries, case.excess, tested),
        covers=lambda: coverage(read, frozenset(laws.names[index] for index in case.decided), points, seen_there),
        sensitivity=seen,
        comparison=comparison,
        scale=scale,
        corrupted=corrupted,
        diagnoses={case.names[index]: found for index, found in case.diagnoses.items()},
        findings=tuple(findings),
        unclaimed=laws.unclaimed,
        dropped=(*backward.dropped, *(Dropped(name, reason) for name, reason in case.late.items())),
        unknown=laws.unknown,
        precision=used,
        known=known,
        ranks=measurement.balance.ranks,
        moved_bytes=backward.moved_bytes,
        disagreements=backward.disagreements,
        moved=moved,
        gauge=request.gauge,
        changed=clipped is not None or case.decayed is not None,
        clipped=clipped,
    )


def _decide(
    case: PassIdentities, request: _Request, used: torch.dtype, *, finite: bool
) -> tuple[float | None, float | None]:
    """Decide the identities above their floor.

    Returns:
        The size of the step that the weights made since the pass, if they moved; the value that gradients are clipped
        at, if they are.
    """
    backward, replay = case.backward, request.replay
    gradients = backward.gradients
    if not finite and used == torch.float16:
        # A scaled loss overflows now and then, and the step is skipped: no identity is refuted by that.
        case.leave_open(case.broken)
    if finite and gradients is not None:
        case.suspect_factors()
        if replay is not None and backward.together == ():
            if request.accumulated <= 1:
                case.decide_up_to_epsilon(replay, used, request.former)
            else:
                case.leave_sums_open()
    if not case.broken:
        return None, None
    case.set_aside(lost_since(backward, case.suspected), into=case.late)
    if case.broken and gradients is not None and finite:
        moved = step_size(case.suspected[:EXPLAINED], backward.points, gradients)
        if moved is not None:
            return moved, None
    return None, case.settle(used, request.accumulated, replay, request.former)


def _compare_with_replay(
    backward: BackwardPass, request: _Request, used: torch.dtype, *, shortened: bool
) -> tuple[ReferenceComparison | None, LossScale | None]:
    """Compare the gradients with those of the pass in reference form, and with the derivative of the loss."""
    replay, gradients = request.replay, backward.gradients
    if not request.reference or replay is None or gradients is None:
        return None, None
    # Products that round their factors store results in single precision all the same.
    compare = partial(
        compare_with_reference,
        replay,
        backward.points,
        torch.float32 if shortened else used,
        factors=used if shortened else None,
    )
    if not isinstance(replay, ClosureReplay):
        return compare(), None
    own = gradients if request.one_pass else None
    comparison = compare(gradients=own)
    scale = None if comparison.obstacle else loss_scale(replay, backward.points, own, comparison)
    return comparison, scale


def _corrupted_entries(backward: BackwardPass, request: _Request) -> tuple[CorruptedEntry, ...]:
    """Return entries that stick out of the gradients of earlier steps and that a replay does not give again."""
    if request.peaks is None or backward.gradients is None:
        return ()
    made = backward.assembly.sums
    own = {name: gradient for name, gradient in backward.gradients.items() if name not in made}
    return request.peaks.corrupted(backward.points, own, request.replay if request.one_pass else None)


def _with_other_checks(
    verdict: Verdict,
    comparison: ReferenceComparison | None,
    scale: LossScale | None,
    corrupted: tuple[CorruptedEntry, ...],
    disagreements: Sequence[Disagreement],
) -> Verdict:
    """Return the verdict on the identities, replaced by that of other checks until one refutes the gradients."""
    others = [next((item.verdict for item in (comparison, scale) if item is not None and not item.ok), None)]
    others.append(corruption_verdict(corrupted) if corrupted else None)
    others.append(_disagreement_verdict(disagreements[0]) if disagreements else None)
    for other in others:
        if other is not None and verdict != Status.REFUTED:
            verdict = other
    return verdict


def _disagreement_verdict(first: Disagreement) -> Verdict:
    evidence = Evidence(what=f"{first.what} of {first.name} across processes", value=first.spread, limit=first.limit)
    return Verdict(status=Status.REFUTED, message=first.text(), evidence=(evidence,))


def _by_family(
    symmetries: Sequence[Symmetry], excess: NDArray[np.float64], tested: NDArray[np.bool_]
) -> dict[str, float]:
    by_family: dict[str, float] = {}
    for symmetry, value, reached in zip(symmetries, excess.tolist(), tested.tolist(), strict=True):
        if reached:
            by_family[symmetry.family] = max(by_family.get(symmetry.family, 0.0), value)
    return by_family


def _accept_kernel_rounding(gauge: Gauge, replay: Replay | None, backward: BackwardPass) -> None:
    """Predict the rounding of attention kernels if key gradients do not add up to zero in half precision.

    A replay predicts it for every sequence. Without one, the predictions that were made in the pass have to do.
    """
    broken = [row for row in gauge.rows if not row.ok and np.isfinite(row.residual)]
    if not broken:
        return
    if replay is None:
        flags = explained_by_predictions(broken, gauge.attention_precision)
        gauge.explain([row for row, flag in zip(broken, flags, strict=True) if flag])
        return
    try:
        flags = explained_by_rounding(broken, replay, backward.points)
    except Exception as problem:
        # The one boundary to the user's program: it may refuse to run a second time.
        LOGGER.info("the rounding of attention was not predicted: %s", problem)
        return
    gauge.explain([row for row, flag in zip(broken, flags, strict=True) if flag])


def _sensitivity(case: PassIdentities, used: torch.dtype, *, replayed: bool) -> Sensitivity | None:
    gradients, points = case.backward.gradients, case.backward.points
    if gradients is None:
        return None
    terms = of_legs(case.backward.laws.plan, points, gradients)
    # Its direction distinguishes a wrong factor from rounding, down to twice the residual that is there without it.
    factors = np.maximum(case.measurement.floors, 2 * np.nan_to_num(case.measurement.residuals))
    limits = case.limits
    if replayed:
        limits = np.maximum(limits, expected_limits(used, case.symmetries))
    else:
        # Without a replay only gross residuals are refuted, and in half precision only factors that kernels do not
        # leave. Of two legs of one size, a factor on one leaves 1/√2 of itself.
        limits = np.maximum(limits, [unmistakable(used, symmetry) for symmetry in case.symmetries])
        if used in HALF:
            factors = np.maximum(factors, [least_factor(symmetry) / 2**0.5 for symmetry in case.symmetries])
    sided = np.array([shows_factors(symmetry) for symmetry in case.symmetries], dtype=bool)
    limits = np.where(sided & ~case.measurement.nearly, np.minimum(limits, factors), limits)
    return sensitivity(case.symmetries, case.decided, limits, case.measurement.balance.scales, terms)


def _zero_by_law(symmetries: Sequence[Symmetry]) -> set[str]:
    """Return the parameters whose whole gradient is zero by some law, so that none need be stored."""
    return {
        leg.view.parameter
        for symmetry in symmetries
        if symmetry.inert
        for leg in symmetry.legs
        if leg.view.n * leg.view.m == prod(leg.view.shape)
    }


def _findings(backward: BackwardPass, balance: Balance, unused: tuple[str, ...]) -> list[GradientFinding]:
    absent = set(backward.absent)
    odd = np.flatnonzero(~np.isfinite(balance.norms) | (balance.norms == 0)).tolist()
    if not odd and not absent:
        return []
    zero_by_law = _zero_by_law(backward.laws.symmetries)
    there = [(balance.names[index], balance.norms[index]) for index in odd if balance.names[index] not in absent]
    needed = [
        n for n in backward.absent if n not in zero_by_law and not any(fnmatchcase(n, pattern) for pattern in unused)
    ]
    findings = [GradientFinding(parameter=name, trouble="missing") for name in needed]
    findings += [GradientFinding(parameter=name, trouble="not finite") for name, norm in there if norm != 0]
    findings += [
        GradientFinding(parameter=name, trouble="zero") for name, norm in there if norm == 0 and name not in zero_by_law
    ]
    return findings
