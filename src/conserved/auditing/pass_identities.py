"""The identities of one backward pass while an audit decides them: which hold, which are broken, which stay open."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from conserved.auditing.audit_result import Row
from conserved.auditing.backward_pass import BackwardPass, Residuals
from conserved.auditing.causes import suggestions
from conserved.auditing.diagnosis import Diagnosis, Origin, SuspectIdentities, diagnose
from conserved.auditing.epsilon_replay import decide_up_to_epsilon
from conserved.auditing.explanations import EITHER, EXPLAINED, clipped_at, decay_in_gradient, of_another_way, untrue
from conserved.auditing.law_places import described
from conserved.auditing.noise import least_factor, linear_bounds, subnormal_bound, unmistakable, wrong_factors
from conserved.auditing.replay import RecordedPass, Replay
from conserved.laws.identities import HALF, residual_evidence, status
from conserved.symmetry import Symmetry, Tensors
from conserved.verdict import Evidence, Status

_DECIDED = f"{EITHER}; moving the parameters along it leaves the outputs as they are, so it is the backward"
"""The message for a broken law that the program itself does not prove."""

_MAY_BE_FACTOR = (
    "it looks like a factor of {factor:.3f} on one side, which the rounding of fused attention may look like too. Pass "
    "closure= to measure rounding and decide it"
)
"""The message for a small factor in half precision, in a pass that was not run again."""

_MAY_ROUND = (
    "rounding may explain it: the residual is above the floor of the precision, but neither gross nor along one side "
    "of the identity. Pass closure= to measure rounding and decide it"
)
"""The message for an identity above the floor, in a pass that was not run again."""


@dataclass(eq=False)
class PassIdentities:
    """The identities of one pass while they are decided: symmetries are named by their index."""

    backward: BackwardPass
    left: Residuals
    late: dict[str, str] = field(default_factory=dict)
    """By name, laws that training has broken for good, and why."""
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
        """Return whether an earlier replay has decided this residual: a lasting defect, or noise of the same size."""
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
        """Leave these laws open, and keep the reason of each: a broken identity does not refute them."""
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
        """Return the evidence of the tested identity that is nearest to its limit or furthest beyond it."""
        places = np.flatnonzero(self.tested)
        place = int(places[self.excess[places].argmax()])
        return residual_evidence(self.names[place], float(self.left.residuals[place]), float(self.limits[place]))

    def row(self, place: int, suggests: tuple[str, ...] = ()) -> Row:
        """Return one identity as a row of the result."""
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
        """Return the broken identities, worst first, with suggestions where to look."""
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
        """The tested identities that stay undecided, worst first."""
        open_ones = [place for place in self.doubtful if self.statuses[place] is Status.INCONCLUSIVE]
        tested = [place for place in open_ones if self.tested[place] and self.names[place] not in self.late]
        return tuple(self.row(place, self._reason(place)) for place in self._worst_first(tested))

    def _reason(self, place: int) -> tuple[str, ...]:
        """Return why an identity above its limit stays undecided."""
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
