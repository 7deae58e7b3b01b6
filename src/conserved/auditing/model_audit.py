"""The audit itself: every gradient identity of a model after a backward pass, held against that pass's rounding; which
hold, which are broken and why, and one verdict on all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property, partial
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from conserved.auditing.audit_result import Audit, GradientFinding, Judgement, Row
from conserved.auditing.backward_pass import BackwardPass, Residuals, precision_of, residuals_of
from conserved.auditing.causes import step_size, suggestions
from conserved.auditing.diagnosis import Diagnosis, Origin, SuspectIdentities, diagnose
from conserved.auditing.epsilon_replay import decide_up_to_epsilon
from conserved.auditing.explanations import (
    EITHER,
    EXPLAINED,
    clipped_at,
    decay_in_gradient,
    lost_since,
    of_another_way,
    untrue,
)
from conserved.auditing.gradient_peaks import CorruptedEntry, PeakHistory, corruption_verdict
from conserved.auditing.kernel_precision import explained_by_predictions, explained_by_rounding
from conserved.auditing.law_places import described
from conserved.auditing.loss_scale import loss_scale
from conserved.auditing.noise import (
    least_factor,
    linear_bounds,
    shows_factors,
    subnormal_bound,
    unmistakable,
    wrong_factors,
)
from conserved.auditing.reference_comparison import compare_with_reference
from conserved.auditing.replay import ClosureReplay, RecordedPass, Replay, alone
from conserved.auditing.sensitivity import Sensitivity, of_legs, sensitivity
from conserved.auditing.softmax_gauge import Gauge
from conserved.auditing.tested_parameters import coverage
from conserved.inference import laws_of_model
from conserved.inference.live import parts_of
from conserved.laws import Dropped, LawSet
from conserved.laws.identities import HALF, TOLERANCE, Balance, PendingBalance, residual_evidence, status
from conserved.layout import GivenLayout
from conserved.rank_agreement import confirm_together
from conserved.symmetry import Symmetry, Tensors
from conserved.verdict import Evidence, Status, Verdict

LOGGER = logging.getLogger("conserved.audit")

_DECIDED = f"{EITHER}; moving the parameters along it leaves the outputs as they are, so it is the backward"
"""What is said of a broken law that is not proved by the program itself."""


_MAY_BE_FACTOR = (
    "it looks like a factor of {factor:.3f} on one side, which the rounding of fused attention may look like too. Pass "
    "closure= to measure rounding and decide it"
)
"""What is said of a small factor in half precision in a pass that was not run again."""

_MAY_ROUND = (
    "rounding may explain it: the residual is above the floor of the precision, but neither gross nor along one side "
    "of the identity. Pass closure= to measure rounding and decide it"
)
"""What is said of an identity above the floor in a pass that was not run again."""


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
    if precision is not None and precision not in TOLERANCE:
        raise ValueError(
            f"Expected a floating-point type as precision, got {precision}. Pass torch.bfloat16, for example."
        )
    if accumulated < 1:
        raise ValueError(f"Expected accumulated of at least 1, got {accumulated}. Pass the number of backward passes.")
    parts = parts_of(model)
    found = laws_of_model(model, loss=loss, parts=parts) if laws is None else laws
    if closure is not None:
        replay = ClosureReplay(model, closure)
    with torch.no_grad():
        confirm_together("audit")
        backward = BackwardPass.of(parts, found, layout)
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
        judge = partial(_judge, backward if wait else replace(backward, gradients=None), pending)
        judge = partial(judge, replay=replay, former=known or {}, sized=sized and wait, reference=reference)
        judge = partial(judge, peaks=peaks)
        result = Audit(
            partial(judge, precision=precision, accumulated=accumulated, unused=tuple(unused), gauge=gauge),
            lambda: pending.numbers.arrived,
        )
        if wait:
            _ = result.judgement
        return result


@torch.no_grad()
def _judge(
    backward: BackwardPass,
    pending: PendingBalance,
    *,
    precision: torch.dtype | None,
    accumulated: int,
    unused: tuple[str, ...],
    gauge: Gauge | None,
    replay: Replay | None,
    former: Mapping[str, Diagnosis],
    sized: bool,
    reference: bool,
    peaks: PeakHistory | None,
) -> Judgement:
    """Once the numbers are there: hold every residual against its limit, look into those too large, worst first."""
    balance = pending.balance(backward.points, backward.gradients)
    used, known = precision_of(precision, backward, balance)
    left = residuals_of(
        backward, balance, used, accumulated, gauge, given=known == "given", replayed=replay is not None
    )
    case = _Case(backward, left)
    findings = _findings(backward, left.balance, unused)
    moved: float | None = None
    clipped: float | None = None
    gradients = backward.gradients
    finite = not any(item.trouble == "not finite" for item in findings)
    if not finite and used == torch.float16:
        # A scaled loss overflows now and then, and the step is skipped: no identity is refuted by that.
        case.leave_open(case.broken)
    if finite and gradients is not None:
        case.suspect_factors()
        if replay is not None and backward.together == ():
            if accumulated <= 1:
                case.decide_up_to_epsilon(replay, used, former)
            else:
                case.leave_sums_open()
    if case.broken:
        case.set_aside(lost_since(backward, case.suspected), into=case.late)
        if case.broken and gradients is not None and finite:
            moved = step_size(case.suspected[:EXPLAINED], backward.points, gradients)
        if moved is None:
            clipped = case.settle(used, accumulated, replay, former)
    if gauge is not None and used in HALF:
        _accept_kernel_rounding(gauge, replay, backward)
    failures = case.failures(moved)
    verdict = _verdict(case, failures, findings, used, moved=moved, clipped=clipped, gauge=gauge)
    comparison = scale = None
    if reference and replay is not None and finite and gradients is not None and moved is None:
        closed = isinstance(replay, ClosureReplay)
        own = gradients if closed and accumulated == 1 and alone() else None
        comparison = compare_with_reference(replay, backward.points, used, gradients=own)
        if isinstance(replay, ClosureReplay) and not comparison.obstacle:
            scale = loss_scale(replay, backward.points, own, comparison)
        wrong = next((item.verdict for item in (comparison, scale) if item is not None and not item.ok), None)
        verdict = verdict if wrong is None or verdict == Status.REFUTED else wrong
    corrupted: tuple[CorruptedEntry, ...] = ()
    if peaks is not None and gradients is not None and finite and moved is None:
        made = backward.assembly.sums
        own_gradients = {name: gradient for name, gradient in gradients.items() if name not in made}
        corrupted = peaks.corrupted(backward.points, own_gradients, replay if accumulated == 1 and alone() else None)
        if corrupted and verdict != Status.REFUTED:
            verdict = corruption_verdict(corrupted)
    if backward.disagreements and verdict != Status.REFUTED:
        first = backward.disagreements[0]
        evidence = Evidence(
            what=f"{first.what} of {first.name} across processes", value=first.spread, limit=first.limit
        )
        verdict = _said(Status.REFUTED, first.text(), evidence)
    seen = _sensitivity(case, used, replayed=replay is not None) if sized and finite else None
    # An audit that is kept must not keep the gradients, nor the model.
    laws, tested = backward.laws, left.balance.tested
    read, points = backward.read, {n: p for n, p in backward.points.items() if n not in backward.assembly.sums}
    seen_there = None if seen is None else seen.renamed(backward.assembly.origin)
    del case.backward
    return Judgement(
        verdict=verdict,
        failures=failures,
        left_open=case.left_open,
        worst=float(left.residuals.max(initial=0.0)),
        others=lambda: map(case.row, sorted(set(range(len(case.symmetries))).difference(case.broken))),
        tested=len(case.held) if case.late or case.noisy else int(tested.sum()),
        by_family=lambda: _by_family(laws.symmetries, case.excess, tested),
        covers=lambda: coverage(read, frozenset(laws.names[place] for place in case.held), points, seen_there),
        sensitivity=seen,
        comparison=comparison,
        scale=scale,
        corrupted=corrupted,
        diagnoses={case.names[place]: found for place, found in case.diagnoses.items()},
        findings=tuple(findings),
        unclaimed=laws.unclaimed,
        dropped=(*backward.dropped, *(Dropped(name, reason) for name, reason in case.late.items())),
        unknown=laws.unknown,
        precision=used,
        known=known,
        ranks=left.balance.ranks,
        moved_bytes=backward.moved_bytes,
        disagreements=backward.disagreements,
        moved=moved,
        gauge=gauge,
        changed=clipped is not None or case.decayed is not None,
        clipped=clipped,
    )


@dataclass(eq=False)
class _Case:
    """The identities of a pass while they are judged: symmetries by their places."""

    backward: BackwardPass
    left: Residuals
    late: dict[str, str] = field(default_factory=dict)
    """By name, laws that are none any more because of what training did, and why."""
    no_laws: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By name, laws that the forward pass does not keep either, and what was seen."""
    decayed: float | None = None
    """λ, if the gradients are those of a loss with a penalty λ/2 ‖θ‖² on the weights."""
    noisy: frozenset[int] = frozenset()
    """Identities above the floor that rounding may explain: nothing they span counts as tested."""
    factors: dict[int, float] = field(default_factory=dict)
    """By place, the factor that a leg is off by, where one explains the residual."""
    diagnoses: dict[int, Diagnosis] = field(default_factory=dict)
    """By place, where a residual above the floor comes from, if the pass was run again."""

    def __post_init__(self) -> None:
        found, self.limits = self.left, self.left.limits
        self.symmetries, self.names = self.backward.laws.symmetries, self.backward.laws.names
        self.tested = found.balance.tested
        self.doubtful: list[int] = np.flatnonzero(~((found.residuals <= found.limits) & self.tested)).tolist()
        self.statuses = {
            place: status(
                found.residuals[place],
                found.limits[place],
                tested=bool(self.tested[place]),
                nearly=bool(found.nearly[place]),
            )
            for place in self.doubtful
        }
        self.broken = [place for place in self.doubtful if self.statuses[place] is Status.REFUTED]

    @property
    def suspected(self) -> list[Symmetry]:
        """The symmetries whose identities are broken."""
        return [self.symmetries[place] for place in self.broken]

    def suspect_factors(self) -> None:
        """Break identities whose residual is within the limit and lies along one of their legs: a wrong factor."""
        gradients, residuals = self.backward.gradients, self.left.residuals
        assert gradients is not None
        near = np.flatnonzero(self.tested & (residuals > self.left.floors) & ~self.left.nearly).tolist()
        factors = wrong_factors([self.symmetries[place] for place in near], self.backward.points, gradients)
        self.factors = {place: factor for place, factor in zip(near, factors, strict=True) if factor is not None}
        more = [place for place in self.factors if place not in self.broken and place not in self.doubtful]
        self.doubtful += more
        self.broken += more
        self.statuses |= dict.fromkeys(more, Status.REFUTED)

    def decide_up_to_epsilon(self, replay: Replay, used: torch.dtype, former: Mapping[str, Diagnosis]) -> None:
        """Measure by a replay what ε leaves of identities beyond √ε, and hold them to measured rounding.

        Where hooks have measured what ε leaves, a residual above the floor may still be rounding: a gain whose scale
        norms forget has a gradient that cancels.
        """
        left = self.left
        measured = [place for place in self.broken if not self.symmetries[place].exact and not left.nearly[place]]
        known = {place: former[self.names[place]] for place in measured if self._is_decided(place, former)}
        places = [place for place in self.doubtful if left.nearly[place] and self.tested[place]]
        places += [place for place in measured if place not in known]
        if places:
            roots = np.where(left.nearly[places], self.backward.laws.plan.epsilons[places] ** 0.5, 0.0)
            floors, scales = self.limits[places] - roots, left.balance.scales[places]
            for place, exact in decide_up_to_epsilon(self.backward, places, floors, scales, replay, used).items():
                left.residuals[place], self.limits[place], left.nearly[place] = exact.residual, exact.limit, False
                known[place] = self._in_series(place, exact.diagnosis, former)
        for place, diagnosis in known.items():
            self.diagnoses[place] = diagnosis
            if diagnosis.wrong:
                self.statuses[place] = Status.REFUTED
                self.broken = list(dict.fromkeys((*self.broken, place)))
            elif diagnosis.origin is Origin.PRECISION:
                self._mark_noisy([place])
            else:
                self._verify([place])

    def leave_sums_open(self) -> None:
        """Leave laws up to ε open where gradients are sums over passes: only the last pass can be replayed.

        Residuals that are gross in any precision stay refuted.
        """
        measured = [p for p in self.broken if not self.symmetries[p].exact and not self.left.nearly[p]]
        residuals, symmetries = self.left.residuals, self.symmetries
        self._mark_noisy([p for p in measured if residuals[p] <= unmistakable(torch.float16, symmetries[p])])

    def settle(
        self, used: torch.dtype, accumulated: int, replay: Replay | None, former: Mapping[str, Diagnosis]
    ) -> float | None:
        """Decide identities above the floor; return the value gradients were clipped at, if they were."""
        gradients = self.backward.gradients
        if gradients is not None:
            self._widen_underflow(gradients)
            self._widen_linear(gradients, used)
            if replay is not None:
                self._replay(replay, used, accumulated, former)
        self._leave_noise_open(used)
        if not self.backward.assembly.groups:
            # Moving parameters runs the model again, which processes with different suspicions would not do together.
            self.set_aside(untrue(self.backward, self.suspected), into=self.no_laws)
            if isinstance(replay, RecordedPass) and replay.call is not None:
                strange = [self.symmetries[place] for place in self.broken if self._is_of_program(place)]
                self.set_aside(
                    of_another_way(self.backward, strange, replay.call, replay.restore_random), into=self.no_laws
                )
        clipped = clipped_at(self.suspected, gradients) if self.broken and gradients is not None else None
        if clipped is not None:
            self.leave_open(self.broken)
        elif self.broken and gradients is not None:
            self.decayed = decay_in_gradient(self.suspected, self.backward.points, gradients)
            if self.decayed is not None:
                self.leave_open(self.broken)
        return clipped

    def _is_of_program(self, place: int) -> bool:
        found = self.diagnoses.get(place)
        return found is not None and found.origin is Origin.PROGRAM

    def _widen_underflow(self, gradients: Tensors) -> None:
        """Hold identities of gradients in float16 against what underflow leaves of them."""
        if all(gradient.dtype != torch.float16 for gradient in gradients.values()):
            return
        points, scales = self.backward.points, self.left.balance.scales
        for place in self.broken:
            bound = subnormal_bound(self.symmetries[place], points, gradients, float(scales[place]))
            self.limits[place] = max(self.limits[place], bound)
        self._verify([place for place in self.broken if self.left.residuals[place] <= self.limits[place]])

    def _widen_linear(self, gradients: Tensors, used: torch.dtype) -> None:
        """Hold linear laws against what rounding all entries in one direction leaves of their sums."""
        plan = self.backward.laws.plan
        places = [place for place in self.broken if place in plan.linear and self.left.balance.scales[place] > 0]
        bounds = linear_bounds(plan, places, gradients, used, self.left.balance.scales)
        for place, bound in bounds.items():
            self.limits[place] = max(self.limits[place], bound)
        within = [place for place in places if self.left.residuals[place] <= self.limits[place]]
        self._verify([place for place in within if place not in self.factors])

    def _replay(self, replay: Replay, used: torch.dtype, accumulated: int, former: Mapping[str, Diagnosis]) -> None:
        """Run the pass again for the identities that are exact; laws up to ε keep what the gauge said of them."""
        exact = [place for place in self.broken if self.symmetries[place].exact]
        self.diagnoses |= {place: former[self.names[place]] for place in exact if self._is_decided(place, former)}
        places = [place for place in exact if place not in self.diagnoses]
        if places:
            self._diagnose(places, replay, used, accumulated, former)
        for place, found in self.diagnoses.items():
            if found.origin is not Origin.UNKNOWN:
                self.limits[place] = max(self.limits[place], found.limit)
        self._verify([place for place, found in self.diagnoses.items() if found.origin is Origin.ROUNDING])
        excused = (Origin.PRECISION, Origin.DESIGN)
        self._mark_noisy([place for place, found in self.diagnoses.items() if found.origin in excused])

    def _is_decided(self, place: int, former: Mapping[str, Diagnosis]) -> bool:
        """Whether an earlier replay has decided this residual too: a defect that stays, or noise of the same size."""
        known = former.get(self.names[place])
        if known is None or known.origin in (Origin.UNKNOWN, Origin.TRANSIENT):
            return False
        if known.origin in (Origin.ROUNDING, Origin.PRECISION):
            # Noise that has grown by more than half is measured again.
            return place not in self.factors and float(self.left.residuals[place]) <= 1.5 * known.limit
        return True

    def _diagnose(
        self,
        places: list[int],
        replay: Replay,
        used: torch.dtype,
        accumulated: int,
        former: Mapping[str, Diagnosis],
    ) -> None:
        """Replay the pass for these identities."""
        suspects = SuspectIdentities(
            symmetries=[self.symmetries[place] for place in places],
            residuals=self.left.residuals[places],
            floors=self.limits[places],
            theta=self.backward.points,
            factors=np.array([place in self.factors for place in places]),
            precision=used,
            passes=accumulated,
        )
        for place, diagnosis in zip(places, diagnose(suspects, replay), strict=True):
            self.diagnoses[place] = self._in_series(place, diagnosis, former)

    def _in_series(self, place: int, diagnosis: Diagnosis, former: Mapping[str, Diagnosis]) -> Diagnosis:
        """Return a diagnosis in the light of the last audit: what is never reproducible is not hardware."""
        known = former.get(self.names[place])
        again = known is not None and known.origin is diagnosis.origin is Origin.TRANSIENT
        return diagnosis.repeated() if again else diagnosis

    def _leave_noise_open(self, used: torch.dtype) -> None:
        """Without a replay, refute what rounding cannot look like and leave the rest open.

        Gross residuals are not rounding, and a residual along one side of its identity is a wrong factor.
        """
        decided = {place for place, found in self.diagnoses.items() if found.origin is not Origin.UNKNOWN}
        small = {
            place
            for place, factor in self.factors.items()
            if used in HALF and abs(factor - 1) < least_factor(self.symmetries[place])
        }
        rest = [
            place for place in self.broken if place not in decided and (place not in self.factors or place in small)
        ]
        residuals, symmetries = self.left.residuals, self.symmetries
        self._mark_noisy([place for place in rest if residuals[place] <= unmistakable(used, symmetries[place])])

    def _verify(self, places: Collection[int]) -> None:
        self.statuses |= dict.fromkeys(places, Status.VERIFIED)
        self.broken = [place for place in self.broken if place not in {*places}]

    def _mark_noisy(self, places: Collection[int]) -> None:
        self.noisy = self.noisy.union(places)
        self.leave_open(places)

    def leave_open(self, places: Collection[int]) -> None:
        """Mark these identities INCONCLUSIVE."""
        gone = frozenset(places)
        self.statuses |= dict.fromkeys(gone, Status.INCONCLUSIVE)
        self.broken = [place for place in self.broken if place not in gone]

    def set_aside(self, reasons: Mapping[str, Any], into: dict[str, Any]) -> None:
        """Laws, by name, that a broken identity says nothing against."""
        into.update(reasons)
        self.leave_open([place for place in self.doubtful if self.names[place] in reasons])

    @cached_property
    def excess(self) -> NDArray[np.float64]:
        """Every residual over its limit; asked for when limits are settled."""
        residuals = self.left.residuals
        return np.where(np.isnan(residuals), np.inf, residuals / self.limits)

    @property
    def held(self) -> frozenset[int]:
        """The places of the laws that were tested."""
        tested = (place for place in np.flatnonzero(self.tested).tolist() if self.names[place] not in self.late)
        return frozenset(tested).difference(self.noisy)

    def nearest(self) -> Evidence:
        """The identity that is furthest off among those tested."""
        places = np.flatnonzero(self.tested)
        place = int(places[self.excess[places].argmax()])
        return residual_evidence(self.names[place], float(self.left.residuals[place]), float(self.limits[place]))

    def row(self, place: int, suggests: tuple[str, ...] = ()) -> Row:
        """One identity, for people."""
        symmetry = self.symmetries[place]
        return Row(
            name=self.names[place],
            family=symmetry.family,
            parameters=symmetry.parameters,
            where=tuple(described(leg, symmetry) for leg in symmetry.legs),
            part=symmetry.part,
            residual=float(self.left.residuals[place]),
            tolerance=float(self.limits[place]),
            status=self.statuses.get(place, Status.VERIFIED),
            checked=bool(self.tested[place]) and self.names[place] not in self.late,
            source=symmetry.source,
            suggests=suggests,
        )

    def failures(self, moved: float | None) -> tuple[Row, ...]:
        """Broken identities, worst first, with where to look."""
        points, gradients = self.backward.points, self.backward.gradients
        found = []
        for number, place in enumerate(self._worst_first(self.broken)):
            symmetry = self.symmetries[place]
            known = self.diagnoses.get(place)
            # A replay has found out more than that the forward pass keeps the law.
            decided = () if symmetry.source == "typed" or known is not None else (_DECIDED,)
            seen = suggestions(symmetry, points, gradients, moved) if number < EXPLAINED else ()
            said = () if known is None else (known.message,)
            ranks = self.left.balance.worst_ranks
            said = said if ranks is None else (*said, f"the largest residual is that of rank {ranks[place]}")
            found.append(self.row(place, (*said, *decided, *seen)))
        return tuple(found)

    @cached_property
    def left_open(self) -> tuple[Row, ...]:
        """Identities that were tested and of which nothing can be said, worst first."""
        open_ones = [place for place in self.doubtful if self.statuses[place] is Status.INCONCLUSIVE]
        tested = [place for place in open_ones if self.tested[place] and self.names[place] not in self.late]
        return tuple(self.row(place, self._reason(place)) for place in self._worst_first(tested))

    def _reason(self, place: int) -> tuple[str, ...]:
        """Why nothing is said of an identity that is above its limit."""
        if self.names[place] in self.no_laws:
            return self.no_laws[self.names[place]]
        if place in self.diagnoses:
            return (self.diagnoses[place].message,)
        if not np.isfinite(self.left.residuals[place]):
            return ("gradients are not finite",)
        if place in self.factors:
            return (_MAY_BE_FACTOR.format(factor=self.factors[place]),)
        return (_MAY_ROUND,) if place in self.noisy else ()

    def _worst_first(self, places: Sequence[int]) -> list[int]:
        return sorted(places, key=lambda place: -self.excess[place])


def _by_family(
    symmetries: Sequence[Symmetry], excess: NDArray[np.float64], tested: NDArray[np.bool_]
) -> dict[str, float]:
    found: dict[str, float] = {}
    for symmetry, value, reached in zip(symmetries, excess.tolist(), tested.tolist(), strict=True):
        if reached:
            found[symmetry.family] = max(found.get(symmetry.family, 0.0), value)
    return found


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


def _sensitivity(case: _Case, used: torch.dtype, *, replayed: bool) -> Sensitivity | None:
    gradients, points = case.backward.gradients, case.backward.points
    if gradients is None:
        return None
    terms = of_legs(case.backward.laws.plan, points, gradients)
    # A wrong factor is told from rounding by its direction, down to twice the residual that is there without it.
    factors = np.maximum(case.left.floors, 2 * np.nan_to_num(case.left.residuals))
    limits = case.limits
    if not replayed:
        # Without a replay only gross residuals are refuted, and in half precision only factors that kernels do not
        # leave. Of two legs of one size, a factor on one leaves 1/√2 of itself.
        limits = np.maximum(limits, [unmistakable(used, symmetry) for symmetry in case.symmetries])
        if used in HALF:
            factors = np.maximum(factors, [least_factor(symmetry) / 2**0.5 for symmetry in case.symmetries])
    sided = np.array([shows_factors(symmetry) for symmetry in case.symmetries], dtype=bool)
    limits = np.where(sided & ~case.left.nearly, np.minimum(limits, factors), limits)
    return sensitivity(case.symmetries, case.held, limits, case.left.balance.scales, terms)


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
    excused = _zero_by_law(backward.laws.symmetries)
    there = [(balance.names[place], balance.norms[place]) for place in odd if balance.names[place] not in absent]
    needed = [n for n in backward.absent if n not in excused and not any(fnmatchcase(n, pattern) for pattern in unused)]
    found = [GradientFinding(parameter=name, trouble="missing") for name in needed]
    found += [GradientFinding(parameter=name, trouble="not finite") for name, norm in there if norm != 0]
    found += [
        GradientFinding(parameter=name, trouble="zero") for name, norm in there if norm == 0 and name not in excused
    ]
    return found


def _verdict(
    case: _Case,
    failures: Sequence[Row],
    findings: Sequence[GradientFinding],
    used: torch.dtype,
    *,
    moved: float | None,
    clipped: float | None,
    gauge: Gauge | None,
) -> Verdict:
    """Return one verdict on the pass; a missing gradient leaves it open unless an identity is broken as well."""
    count, tested, unsure = len(case.symmetries), int(case.tested.sum()), case.left_open
    unknown = case.backward.laws.unknown
    infinite = [item for item in findings if item.trouble == "not finite"]
    missing = [item for item in findings if item.trouble == "missing"]
    if infinite:
        message = f"{len(infinite)} gradients are not finite, that of {infinite[0].parameter} among them."
        if used == torch.float16:
            # The largest number is 65,504: scaled losses overflow now and then, and a scaler skips such a step.
            message += " In float16 a scaled loss may overflow, and a scaler skips the step: nothing is said of it."
            return _said(Status.INCONCLUSIVE, message)
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
    elif case.decayed is not None:
        message = (
            f"The gradients contain {case.decayed:.3g} times the parameters: the loss has a penalty on the weights, so "
            "that the identities of the outputs are not those of the loss."
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
    elif case.no_laws:
        message = (
            f"{len(case.no_laws)} of {count} identities do not hold, but they are not laws of the model as it runs "
            "now: moving its parameters along them changes the outputs. A function in it is not what its place "
            "suggests, or the model took another way than in the call its laws were read off. The others hold."
        )
    elif case.noisy:
        worst = next(row for row in unsure if row.name in {case.names[place] for place in case.noisy})
        message = (
            f"{len(case.noisy)} of {count} identities are above the floor of {str(used).removeprefix('torch.')}, "
            f"{worst.name} the furthest ({worst.residual:.2g}): {worst.suggests[0]}. The others hold."
        )
        return _said(Status.INCONCLUSIVE, message, *(row.evidence for row in unsure))
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
        nearly = int(case.left.nearly.sum())
        message = f"All {tested} gradient identities hold to the rounding of {str(used).removeprefix('torch.')}"
        message += f", {nearly} of them up to a norm's ε." if nearly else "."
        return _said(Status.VERIFIED, message, case.nearest())
    return _said(Status.INCONCLUSIVE, message)


def _said(status: Status, message: str, *evidence: Evidence) -> Verdict:
    return Verdict(status=status, message=message, evidence=evidence)
