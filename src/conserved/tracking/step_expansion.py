r"""A step of one parameter over the tensors it is made of, and what the moment map on them says about the law.

Let B_0 = θ' (after the step), B_1, … be the tensors an update is combined from: θ = Σ β_i B_i before the step,
U = Σ υ_i B_i with parts P_c = Σ γ_ci B_i. With p(A, B) = ½(μ(A, B) + μ(B, A)), so that h(θ) = p(θ, θ),

    first order, by cause   −2 p(θ, P_c) = −2 Σ_ij β_i γ_cj p(B_i, B_j)
    second order             p(U, U)     =    Σ_ij υ_i υ_j p(B_i, B_j)

so the numbers p(B_i, B_j) of every leg are all that is read from the parameters. A linear law (a translation) needs the
sums ℓ(B_i) of rows only: its first order is −Σ γ_ci ℓ(B_i), its second order zero.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from conserved.symmetry import whole
from conserved.tracking.combination import Combination, Scalar
from conserved.tracking.optimizer_rules import Update

Slot = tuple[int, int]
"""A pair of tensors, i ≤ j; for a linear law (0, j) stands for the sum of rows of tensor j."""

SlotWeights = dict[Slot, Scalar]
"""A quantity as a combination of slots."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Coefficients:
    """The effect of a step on its tensors; parameters with the same coefficients share one object."""

    before: tuple[Scalar, ...]
    total: tuple[Scalar, ...]
    parts: Mapping[str, tuple[Scalar, ...]]
    gradient: tuple[Scalar, ...] | None
    """The direction of the gradient, without its rate; None where the rule does not know one."""
    rate: Scalar

    def shifted(self) -> Coefficients:
        """Return the same step of θ + c, as a law of 1 + γ sees it.

        B_0 is then θ' + c, and c one more tensor, the last.

        Directions take no shift, so B_0 in them becomes (θ' + c) − c.
        """
        gradient = self.gradient
        return Coefficients(
            before=(*self.before, 1 - self.before[0]),
            total=(*self.total, -self.total[0]),
            parts={cause: (*part, -part[0]) for cause, part in self.parts.items()},
            gradient=None if gradient is None else (*gradient, -gradient[0]),
            rate=self.rate,
        )

    @property
    def key(self) -> Hashable:
        """Equal for parameters whose steps have equal coefficients, so that their legs may be added up first."""
        return self.before, self.total, tuple(self.parts.items()), self.gradient, self.rate

    def weights(self, *, linear: bool) -> StepWeights:
        """Return what each quantity of the account weighs every slot with."""
        point = [-2 * a for a in self.before]

        def first(direction: Sequence[Scalar]) -> SlotWeights:
            return _nonzero({(0, j): -1 * b for j, b in enumerate(direction)}) if linear else _paired(point, direction)

        return StepWeights(
            first={cause: first(part) for cause, part in self.parts.items()},
            gradient_term={} if self.gradient is None else first(self.gradient),
            second={} if linear else _paired(self.total, self.total),
            steepness={} if self.gradient is None or linear else _paired(self.gradient, self.gradient),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Expansion:
    """One parameter's step over its tensors."""

    sources: tuple[Tensor, ...]
    """The tensors, whole, θ after the step first."""
    coefficients: Coefficients
    origins: tuple[int, ...] = ()
    """The identities of the tensors that the sources are, or are gathered from."""
    made: bool = False
    """Whether some of the tensors exist for this account only."""

    @staticmethod
    def of(
        parameter: Tensor, update: Update | None = None, *, causes: bool = True, held: Collection[int] = ()
    ) -> Expansion:
        """Expand an update; None is a parameter that did not move. `held` are identities of tensors kept elsewhere."""
        update = update or Update()
        moved = update.total()
        before = Combination.of(parameter) + moved
        tensors: dict[int, Tensor] = {id(parameter): parameter}
        for part in (before, moved, update.gradient, *(update.parts.values() if causes else ())):
            tensors |= {id(tensor): tensor for tensor in part.tensors()}
        order = list(tensors.values())

        def over(combination: Combination) -> tuple[Scalar, ...]:
            return tuple(combination.coefficient(tensor) for tensor in order)

        rest = update.parts if causes else {"update": moved - update.rate * update.gradient}
        return Expansion(
            sources=tuple(whole(tensor.detach()) for tensor in order),
            coefficients=Coefficients(
                before=over(before),
                total=over(moved),
                parts={cause: over(part) for cause, part in rest.items()},
                gradient=over(update.gradient) if update.gradient.terms else None,
                rate=update.rate,
            ),
            origins=tuple(tensors),
            made=any(hasattr(tensor, "full_tensor") or id(tensor) not in {id(parameter), *held} for tensor in order),
        )

    def of_others(self, tensors: Sequence[tuple[Tensor, ...]]) -> list[Expansion]:
        """Return the same step of other parameters, whose tensors these are.

        Gradients are not to be followed through it.
        """
        coefficients, origins = self.coefficients, self.origins
        gathered = any(hasattr(kind, "full_tensor") for kind in {*map(type, chain.from_iterable(tensors))})
        sources = [tuple(map(whole, own)) for own in tensors] if gathered else tensors
        return [Expansion(own, coefficients, origins, self.made or gathered) for own in sources]

    def shifted(self, offset: float) -> Expansion:
        """Return the same step of θ + c; see `Coefficients.shifted`."""
        sources = (*self.sources, torch.full_like(self.sources[0], offset))
        return Expansion(sources, self.coefficients.shifted(), self.origins, self.made)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWeights:
    """The account of a step as combinations of slots: first order by cause, of the gradient per rate, and second."""

    first: Mapping[str, SlotWeights]
    gradient_term: SlotWeights
    second: SlotWeights
    steepness: SlotWeights
    """The squared size of the gradient."""

    def slots(self) -> tuple[Slot, ...]:
        """Return every slot that occurs, that of the law itself first."""
        used: dict[Slot, None] = {(0, 0): None}
        for weights in (self.gradient_term, self.second, self.steepness, *self.first.values()):
            used |= dict.fromkeys(weights)
        return tuple(used)


def _nonzero(weights: Mapping[Slot, Scalar]) -> SlotWeights:
    return {slot: w for slot, w in weights.items() if isinstance(w, Tensor) or w != 0}


def _paired(left: Sequence[Scalar], right: Sequence[Scalar]) -> SlotWeights:
    """Return Σ_ij a_i b_j p(B_i, B_j)."""
    slot_weights: SlotWeights = {}
    for i, a in enumerate(left):
        for j, b in enumerate(right):
            slot = (min(i, j), max(i, j))
            slot_weights[slot] = slot_weights.get(slot, 0.0) + a * b
    return _nonzero(slot_weights)
