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
from conserved.laws.identities import residual_evidence, status
from conserved.symmetry import Symmetry, Tensors
from conserved.tolerances import HALF
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
    measurement: Residuals
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
        residuals, self.limits = self.measurement, self.measurement.limits
        self.symmetries, self.names = self.backward.laws.symmetries, self.backward.laws.names
        self.tested = residuals.balance.tested
        self.doubtful: list[int] = np.flatnonzero(~((residuals.residuals <= residuals.limits) & self.tested)).tolist()
        self.statuses = {
            index: status(
                residuals.residuals[index],
                residuals.limits[index],
                tested=bool(self.tested[index]),
                nearly=bool(residuals.nearly[index]),
            )
            for index in self.doubtful
        }
        self.broken = [index for index in self.doubtful if self.statuses[index] is Status.REFUTED]

    @property
    def suspected(self) -> list[Symmetry]:
        """The symmetries whose identities are broken."""
        return [self.symmetries[index] for index in self.broken]

    def suspect_factors(self) -> None:
        """Break identities whose residual is within the limit and lies along one of their legs: a wrong factor."""
        gradients, residuals = self.backward.gradients, self.measurement.residuals
        assert gradients is not None
        near = np.flatnonzero(self.tested & (residuals > self.measurement.floors) & ~self.measurement.nearly).tolist()
        factors = wrong_factors([self.symmetries[index] for index in near], self.backward.points, gradients)
        self.factors = {index: factor for index, factor in zip(near, factors, strict=True) if factor is not None}
        more = [index for index in self.factors if index not in self.broken and index not in self.doubtful]
        self.doubtful += more
        self.broken += more
        self.statuses |= dict.fromkeys(more, Status.REFUTED)

    def decide_up_to_epsilon(self, replay: Replay, used: torch.dtype, former: Mapping[str, Diagnosis]) -> None:
        """Measure by a replay what ε leaves of identities beyond √ε, and hold them to measured rounding.

        Where hooks have measured what ε leaves, a residual above the floor may still be rounding: a gain whose scale
        norms forget has a gradient that cancels.
        """
        measurement = self.measurement
        measured = [
            index for index in self.broken if not self.symmetries[index].exact and not measurement.nearly[index]
        ]
        known = {index: former[self.names[index]] for index in measured if self._is_decided(index, former)}
        indices = [index for index in self.doubtful if measurement.nearly[index] and self.tested[index]]
        indices += [index for index in measured if index not in known]
        if indices:
            roots = np.where(measurement.nearly[indices], self.backward.laws.plan.epsilons[indices] ** 0.5, 0.0)
            floors, scales = self.limits[indices] - roots, measurement.balance.scales[indices]
            for index, exact in decide_up_to_epsilon(self.backward, indices, floors, scales, replay, used).items():
                measurement.residuals[index], self.limits[index], measurement.nearly[index] = (
                    exact.residual,
                    exact.limit,
                    False,
                )
                known[index] = self._in_series(index, exact.diagnosis, former)
        for index, diagnosis in known.items():
            self.diagnoses[index] = diagnosis
            if diagnosis.wrong:
                self.statuses[index] = Status.REFUTED
                self.broken = list(dict.fromkeys((*self.broken, index)))
            elif diagnosis.origin is Origin.PRECISION:
                self._mark_noisy([index])
            else:
                self._verify([index])

    def leave_sums_open(self) -> None:
        """Leave laws up to ε open where gradients are sums over passes: only the last pass can be replayed.

        Residuals that are gross in any precision stay refuted.
        """
        measured = [p for p in self.broken if not self.symmetries[p].exact and not self.measurement.nearly[p]]
        residuals, symmetries = self.measurement.residuals, self.symmetries
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
            if isinstance(replay, RecordedPass):
                strange = [self.symmetries[index] for index in self.broken if self._is_of_program(index)]
                self.set_aside(of_another_way(self.backward, strange, replay), into=self.no_laws)
        clipped = clipped_at(self.suspected, gradients) if self.broken and gradients is not None else None
        if clipped is not None:
            self.leave_open(self.broken)
        elif self.broken and gradients is not None:
            self.decayed = decay_in_gradient(self.suspected, self.backward.points, gradients)
            if self.decayed is not None:
                self.leave_open(self.broken)
        return clipped

    def _is_of_program(self, index: int) -> bool:
        diagnosis = self.diagnoses.get(index)
        return diagnosis is not None and diagnosis.origin is Origin.PROGRAM

    def _widen_underflow(self, gradients: Tensors) -> None:
        """Hold identities of gradients in float16 against what underflow leaves of them."""
        if all(gradient.dtype != torch.float16 for gradient in gradients.values()):
            return
        points, scales = self.backward.points, self.measurement.balance.scales
        for index in self.broken:
            bound = subnormal_bound(self.symmetries[index], points, gradients, float(scales[index]))
            self.limits[index] = max(self.limits[index], bound)
        self._verify([index for index in self.broken if self.measurement.residuals[index] <= self.limits[index]])

    def _widen_linear(self, gradients: Tensors, used: torch.dtype) -> None:
        """Hold linear laws against what rounding all entries in one direction leaves of their sums."""
        plan = self.backward.laws.plan
        indices = [
            index for index in self.broken if index in plan.linear and self.measurement.balance.scales[index] > 0
        ]
        bounds = linear_bounds(plan, indices, gradients, used, self.measurement.balance.scales)
        for index, bound in bounds.items():
            self.limits[index] = max(self.limits[index], bound)
        within = [index for index in indices if self.measurement.residuals[index] <= self.limits[index]]
        self._verify([index for index in within if index not in self.factors])

    def _replay(self, replay: Replay, used: torch.dtype, accumulated: int, former: Mapping[str, Diagnosis]) -> None:
        """Run the pass again for the identities that are exact; laws up to ε keep what the gauge said of them."""
        exact = [index for index in self.broken if self.symmetries[index].exact]
        self.diagnoses |= {index: former[self.names[index]] for index in exact if self._is_decided(index, former)}
        indices = [index for index in exact if index not in self.diagnoses]
        if indices:
            self._diagnose(indices, replay, used, accumulated, former)
        for index, diagnosis in self.diagnoses.items():
            if diagnosis.origin is not Origin.UNKNOWN:
                self.limits[index] = max(self.limits[index], diagnosis.limit)
        self._verify([index for index, diagnosis in self.diagnoses.items() if diagnosis.origin is Origin.ROUNDING])
        explained = (Origin.PRECISION, Origin.DESIGN)
        self._mark_noisy([index for index, diagnosis in self.diagnoses.items() if diagnosis.origin in explained])

    def _is_decided(self, index: int, former: Mapping[str, Diagnosis]) -> bool:
        """Return whether an earlier replay has decided this residual: a lasting defect, or noise of the same size."""
        known = former.get(self.names[index])
        if known is None or known.origin in (Origin.UNKNOWN, Origin.TRANSIENT):
            return False
        if known.origin in (Origin.ROUNDING, Origin.PRECISION):
            # Noise that has grown by more than half is measured again.
            return index not in self.factors and float(self.measurement.residuals[index]) <= 1.5 * known.limit
        return True

    def _diagnose(
        self,
        indices: list[int],
        replay: Replay,
        used: torch.dtype,
        accumulated: int,
        former: Mapping[str, Diagnosis],
    ) -> None:
        """Replay the pass for these identities."""
        suspects = SuspectIdentities(
            symmetries=[self.symmetries[index] for index in indices],
            residuals=self.measurement.residuals[indices],
            floors=self.limits[indices],
            theta=self.backward.points,
            factors=np.array([index in self.factors for index in indices]),
            precision=used,
            passes=accumulated,
        )
        for index, diagnosis in zip(indices, diagnose(suspects, replay), strict=True):
            self.diagnoses[index] = self._in_series(index, diagnosis, former)

    def _in_series(self, index: int, diagnosis: Diagnosis, former: Mapping[str, Diagnosis]) -> Diagnosis:
        """Return a diagnosis in the light of the last audit: what is never reproducible is not hardware."""
        known = former.get(self.names[index])
        again = known is not None and known.origin is diagnosis.origin is Origin.TRANSIENT
        return diagnosis.repeated() if again else diagnosis

    def _leave_noise_open(self, used: torch.dtype) -> None:
        """Without a replay, refute what rounding cannot look like and leave the rest open.

        Gross residuals are not rounding, and a residual along one side of its identity is a wrong factor.
        """
        decided = {index for index, diagnosis in self.diagnoses.items() if diagnosis.origin is not Origin.UNKNOWN}
        small = {
            index
            for index, factor in self.factors.items()
            if used in HALF and abs(factor - 1) < least_factor(self.symmetries[index])
        }
        rest = [
            index for index in self.broken if index not in decided and (index not in self.factors or index in small)
        ]
        residuals, symmetries = self.measurement.residuals, self.symmetries
        self._mark_noisy([index for index in rest if residuals[index] <= unmistakable(used, symmetries[index])])

    def _verify(self, indices: Collection[int]) -> None:
        self.statuses |= dict.fromkeys(indices, Status.VERIFIED)
        self.broken = [index for index in self.broken if index not in {*indices}]

    def _mark_noisy(self, indices: Collection[int]) -> None:
        self.noisy = self.noisy.union(indices)
        self.leave_open(indices)

    def leave_open(self, indices: Collection[int]) -> None:
        """Mark these identities INCONCLUSIVE."""
        gone = frozenset(indices)
        self.statuses |= dict.fromkeys(gone, Status.INCONCLUSIVE)
        self.broken = [index for index in self.broken if index not in gone]

    def set_aside(self, reasons: Mapping[str, Any], into: dict[str, Any]) -> None:
        """Leave these laws open, and keep the reason of each: a broken identity does not refute them."""
        into.update(reasons)
        self.leave_open([index for index in self.doubtful if self.names[index] in reasons])

    @cached_property
    def excess(self) -> NDArray[np.float64]:
        """Every residual over its limit; read once limits are final."""
        residuals = self.measurement.residuals
        return np.where(np.isnan(residuals), np.inf, residuals / self.limits)

    @property
    def decided(self) -> frozenset[int]:
        """The indices of the laws that were tested, without late and noisy ones."""
        tested = (index for index in np.flatnonzero(self.tested).tolist() if self.names[index] not in self.late)
        return frozenset(tested).difference(self.noisy)

    def nearest(self) -> Evidence:
        """Return the evidence of the tested identity that is nearest to its limit or furthest beyond it."""
        indices = np.flatnonzero(self.tested)
        index = int(indices[self.excess[indices].argmax()])
        return residual_evidence(self.names[index], float(self.measurement.residuals[index]), float(self.limits[index]))

    def row(self, index: int, suggests: tuple[str, ...] = ()) -> Row:
        """Return one identity as a row of the result."""
        symmetry = self.symmetries[index]
        return Row(
            name=self.names[index],
            family=symmetry.family,
            parameters=symmetry.parameters,
            where=tuple(described(leg, symmetry) for leg in symmetry.legs),
            part=symmetry.part,
            residual=float(self.measurement.residuals[index]),
            tolerance=float(self.limits[index]),
            status=self.statuses.get(index, Status.VERIFIED),
            checked=bool(self.tested[index]) and self.names[index] not in self.late,
            source=symmetry.source,
            suggests=suggests,
        )

    def failures(self, moved: float | None) -> tuple[Row, ...]:
        """Return the broken identities, worst first, with suggestions where to look."""
        points, gradients = self.backward.points, self.backward.gradients
        rows = []
        for number, index in enumerate(self._worst_first(self.broken)):
            symmetry = self.symmetries[index]
            known = self.diagnoses.get(index)
            # A replay has found out more than that the forward pass keeps the law.
            decided = () if symmetry.source == "typed" or known is not None else (_DECIDED,)
            seen = suggestions(symmetry, points, gradients, moved) if number < EXPLAINED else ()
            reasons = () if known is None else (known.message,)
            ranks = self.measurement.balance.worst_ranks
            reasons = reasons if ranks is None else (*reasons, f"the largest residual is that of rank {ranks[index]}")
            rows.append(self.row(index, (*reasons, *decided, *seen)))
        return tuple(rows)

    @cached_property
    def left_open(self) -> tuple[Row, ...]:
        """The tested identities that stay undecided, worst first."""
        open_ones = [index for index in self.doubtful if self.statuses[index] is Status.INCONCLUSIVE]
        tested = [index for index in open_ones if self.tested[index] and self.names[index] not in self.late]
        return tuple(self.row(index, self._reason(index)) for index in self._worst_first(tested))

    def _reason(self, index: int) -> tuple[str, ...]:
        """Return why an identity above its limit stays undecided."""
        if self.names[index] in self.no_laws:
            return self.no_laws[self.names[index]]
        if index in self.diagnoses:
            return (self.diagnoses[index].message,)
        if not np.isfinite(self.measurement.residuals[index]):
            return ("gradients are not finite",)
        if index in self.factors:
            return (_MAY_BE_FACTOR.format(factor=self.factors[index]),)
        return (_MAY_ROUND,) if index in self.noisy else ()

    def _worst_first(self, indices: Sequence[int]) -> list[int]:
        return sorted(indices, key=lambda index: -self.excess[index])
