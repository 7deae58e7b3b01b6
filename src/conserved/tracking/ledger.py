"""The account of one step for every law: one pass over the parameters.

Legs are read parameter by parameter, so that few temporaries exist at a time, and their numbers p(B_i, B_j) are added
up over the legs of each law. On a GPU legs that lie in memory alike wait for each other and are read at once. Laws of
one kind and size lie on one *stack*, one row each, where all that follows is a few operations on whole stacks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan, sqrt

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from conserved.moment import (
    LawPairs,
    PairedTensors,
    Part,
    Plan,
    Sums,
    full_precision,
    reads_together,
    send_to_device,
    working_dtype,
)
from conserved.symmetry import Kind, Symmetry, Tensors
from conserved.tracking.combination import Scalar
from conserved.tracking.step_expansion import Coefficients, Expansion, Slot, SlotWeights, StepWeights

_TEMPORARY = 1 << 25
"""Entries of parameters whose steps are expanded together at least: for each of them a rule may make a tensor."""

_PORTIONS = 3
"""About how many portions parameters are read in where there are more: each costs as many launches as a small model."""


@dataclass(frozen=True, slots=True)
class LawStack:
    """Laws of one kind and size: `indices` are their numbers in the law set, in the order of the rows."""

    kind: Kind
    n: int
    m: int
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAccount:
    """The results of one pass for the laws of a stack, one row each."""

    law: Float[Tensor, "laws numbers"]
    """h(θ') after the step."""
    sizes: Float[Tensor, "laws rows"]
    """Sums of squares of the rows of all legs, to which rounding errors are proportional."""
    first: Mapping[str, Float[Tensor, "laws numbers"]]
    """First order by cause, without the gradient itself."""
    gradient_term: Float[Tensor, "laws numbers"]
    """First order of the gradient at rate one; zero for an exact law."""
    second: Float[Tensor, "laws numbers"]
    moved: Float[Tensor, " laws"]
    """‖U‖² over the legs."""
    steepness: Float[Tensor, " laws"]
    """The largest entry the gradient's first order could have, at rate one, if nothing cancelled."""
    rate: Scalar | Float[Tensor, "laws 1"]


_SUMS = ("law", "sizes", "gradient_term", "second", "moved", "steepness")
"""Fields that are one tensor of every account, added up over legs and joined over batches."""


@dataclass(frozen=True, slots=True, eq=False)
class _SlotWeights:
    """The weights of each pair of tensors in the account, as numbers and as matrices, with all pairs and the rate."""

    weights: StepWeights
    slots: tuple[Slot, ...]
    rate: Scalar
    matrices: dict[Hashable, Tensor] = field(default_factory=dict)
    """Copies of the weights on devices, by device and type."""

    def combined(self, forms: Float[Tensor, "..."], named: Mapping[str, SlotWeights]) -> dict[str, Tensor]:
        """Return Σ weight · form of every quantity: one product of matrices, if all weights are known on the host.

        A form that is not finite spoils the quantities that have it, and no others.
        """
        if any(isinstance(weight, Tensor) for weights in named.values() for weight in weights.values()):
            return {name: _combine(forms, self.slots, weights) for name, weights in named.items()}
        rows = [[float(weights.get(slot, 0.0)) for slot in self.slots] for weights in named.values()]
        weights, flat = self._on(forms, rows), forms.flatten(1)
        usual = flat.isfinite()
        with full_precision((forms.device.type,)):
            product = weights @ flat.where(usual, 0.0)
            spoiled = (weights != 0).to(flat) @ usual.logical_not().to(flat)
        product = product.masked_fill_(spoiled > 0, nan)
        return dict(zip(named, product.unflatten(1, forms.shape[1:]), strict=True))

    def _on(self, like: Tensor, rows: Sequence[Sequence[float]]) -> Tensor:
        """Return rows of weights as a matrix on the device and in the type of `like`, from a cache."""
        key = like.device, like.dtype, (*map(tuple, rows),)
        if key not in self.matrices:
            self.matrices[key] = send_to_device(np.array(rows), like.device).to(like.dtype)
        return self.matrices[key]


@dataclass(slots=True, eq=False)
class _Steps:
    """A reader of the steps of parameters: a few tensors for each, and the coefficients that combine them."""

    expand: Callable[[Sequence[str]], Sequence[Expansion]]
    like: Mapping[str, Tensor]
    portion: int
    kernels: bool = True
    numbers: dict[tuple[Hashable, bool], int] = field(default_factory=dict)
    """By coefficients, and for linear laws or others: where `weights` has them."""
    weights: list[_SlotWeights] = field(default_factory=list)
    """The weight of each pair in the account."""
    known: dict[tuple[int, bool], tuple[Coefficients, PairedTensors]] = field(default_factory=dict)
    """By the identity of coefficients that many parameters share: how their tensors are paired, but for the tensors."""

    def paired(self, coefficients: Coefficients, *, linear: bool) -> PairedTensors:
        """Return how tensors with these coefficients are paired, θ after the step first, without the tensors."""
        known_pair = self.known.get((id(coefficients), linear))
        if known_pair is not None:
            return known_pair[1]
        key = coefficients.key, linear
        number = self.numbers.get(key)
        if number is None:
            number = self.numbers[key] = len(self.weights)
            weights = coefficients.weights(linear=linear)
            self.weights.append(_SlotWeights(weights, weights.slots(), coefficients.rate))
        # θ is a point, whose constant leg is 1; the other tensors are directions, whose constant leg is 0.
        constants = (1.0,) + (0.0,) * (len(coefficients.before) - 1)
        bounded: tuple[int, ...] = ()
        if linear:
            gradient = coefficients.gradient
            bounded = (0,) if gradient is None else (0, _index(gradient))
        paired = PairedTensors((), constants, self.weights[number].slots, number, bounded)
        self.known[id(coefficients), linear] = coefficients, paired
        return paired

    def stored(self, names: Sequence[str]) -> list[tuple[Tensor, ...]]:
        """Return in the precision that watching began in."""
        return [*zip(map(self.like.__getitem__, names), strict=True)]

    def read(self, names: Sequence[str]) -> list[_Step]:
        """Return the steps of some parameters; called once for each portion."""
        return [_Step(expansion, self) for expansion in self.expand(names)]


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """The step of one parameter."""

    expansion: Expansion
    reader: _Steps

    @property
    def made(self) -> bool:
        """Whether the rule made new tensors for this step."""
        return self.expansion.made

    def paired(self, *, linear: bool, offset: float) -> PairedTensors:
        """Return its tensors, θ after the step first, and all pairs of them that the account needs."""
        step = self.expansion.shifted(offset) if offset else self.expansion
        tensors = self.reader.paired(step.coefficients, linear=linear)
        return PairedTensors(step.sources, tensors.constants, tensors.pairs, tensors.key, tensors.bounded)


class Ledger:
    """Evaluates laws and the account of a step for a fixed set of symmetries."""

    def __init__(self, symmetries: Sequence[Symmetry], theta: Tensors, *, dtype: torch.dtype | None = None) -> None:
        self.symmetries = tuple(symmetries)
        self._plan, self._dtype = Plan.of(self.symmetries), dtype
        grouped: dict[tuple[Kind, int, int, torch.device], list[int]] = defaultdict(list)
        for batch in self._plan.batches:
            first = self.symmetries[batch.members[0]]
            # Columns matter to the size of a translation's law alone.
            columns = first.m if first.kind.linear else 0
            grouped[first.kind, first.n, columns, theta[first.legs[0].view.parameter].device] += batch.members
        self.stacks = tuple(LawStack(kind, n, m, tuple(indices)) for (kind, n, m, _), indices in grouped.items())
        self._stack_of = {index: number for number, stack in enumerate(self.stacks) for index in stack.indices}
        self.parameters = tuple(self._plan.uses)
        self._portion = max(_TEMPORARY, sum(self._plan.counts.values()) // _PORTIONS)
        self._like = {
            name: torch.empty((), dtype=theta[name].dtype, device=theta[name].device) for name in self.parameters
        }

    def account(self, expand: Callable[[Sequence[str]], Sequence[Expansion]]) -> list[StepAccount]:
        """Return the account of a step for every stack.

        `expand` gives the steps of some parameters when their turn comes.
        """
        # Where layers are read together, their parameters' steps are expanded together too.
        together = reads_together(self._like[self.parameters[0]].device)
        steps = _Steps(expand, self._like, self._portion if together else 0)
        with torch.no_grad():
            by_stack: list[list[Part]] = [[] for _ in self.stacks]
            for part in self._plan.evaluate(steps, LawPairs(), dtype=self._dtype).parts:
                by_stack[self._stack_of[part.members[0]]].append(part)
            return [self._assemble(parts, steps) for parts in by_stack]

    def _assemble(self, parts: Sequence[Part], steps: _Steps) -> StepAccount:
        """Put the sums of all batches of a stack together."""
        kind = self.symmetries[parts[0].members[0]].kind
        keys = {key for part in parts for key in part.sums}
        if len(keys) == 1:
            (key,) = keys
            return _account_of(kind, [part.expanded(key) for part in parts], steps.weights[key])
        return _stack_batches(
            [
                _merge_legs([_account_of(kind, [part.expanded(key)], steps.weights[key]) for key in part.sums])
                for part in parts
            ]
        )


def _side_by_side(single_sums: Sequence[Sums]) -> list[Sums]:
    """Join batches of the same legs, so that the remaining work is done once for all of them."""
    if len(single_sums) == 1 or len({(len(sums.plus), len(sums.minus)) for sums in single_sums}) > 1:
        return list(single_sums)

    def joined(side: str) -> list[Tensor]:
        return [torch.cat(legs, 1) for legs in zip(*(getattr(sums, side) for sums in single_sums), strict=True)]

    return [Sums(single_sums[0].pairs, plus=joined("plus"), minus=joined("minus"), columns=joined("columns"))]


def _index(gradient: Sequence[Scalar]) -> int:
    return next(j for j, weight in enumerate(gradient) if isinstance(weight, Tensor) or weight != 0)


def _combine(forms: Tensor, slots: tuple[Slot, ...], weights: SlotWeights) -> Tensor:
    """Return Σ weight · form."""
    total: Tensor | None = None
    for slot, weight in weights.items():
        form = forms[slots.index(slot)]
        if total is None:
            total = form * weight
        elif isinstance(weight, Tensor):
            total = total + form * weight
        else:
            total.add_(form, alpha=weight)
    return torch.zeros_like(forms[0]) if total is None else total


def _account_of(kind: Kind, account_sums: Sequence[Sums], pairs: _SlotWeights) -> StepAccount:
    """Return the account of batches whose legs all step with the same coefficients."""
    products, weights = kind.products, pairs.weights
    account_sums = _side_by_side(account_sums)
    # h(θ − U) − h(θ) = −2 μ(θ, U) + μ(U, U) needs only the symmetric part of μ, which is what `polar` takes.
    forms = _cat([products.coordinates(products.polar(sums.signed())) for sums in account_sums], 1)
    if kind.linear:
        # A linear law is a signed sum, so its scale is the sum of magnitudes; nothing about it is of second order.
        absolute = _cat([_add_up(sums.columns) for sums in account_sums], 1)
        sizes, moved = absolute[0], forms.new_zeros(forms.shape[1])
        steepness = absolute[1].amax(-1) if len(absolute) > 1 else torch.zeros_like(moved)
    else:
        # For a quadratic law, squares of terms give the scale, and Cauchy–Schwarz bounds how fast h can change.
        spread = _cat([products.squares(sums.unsigned()) for sums in account_sums], 1)
        sizes = spread[0]
        squared = pairs.combined(spread, {"moved": weights.second, "steepness": weights.steepness})
        moved = squared["moved"].sum(-1)
        steepness = 2 * (squared["steepness"].amax(-1).clamp(min=0) * sizes.amax(-1)).sqrt()
    first = {f"first, {cause}": part for cause, part in weights.first.items()}
    combined = pairs.combined(forms, {"gradient_term": weights.gradient_term, "second": weights.second, **first})
    return StepAccount(
        law=forms[0],
        sizes=sizes,
        first={cause: combined[f"first, {cause}"] for cause in weights.first},
        gradient_term=combined["gradient_term"],
        second=combined["second"],
        moved=moved,
        steepness=steepness,
        rate=pairs.rate,
    )


def _cat(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _merge_legs(parts: list[StepAccount]) -> StepAccount:
    """Return one batch whose legs step with different coefficients.

    Only a common rate times the gradient leaves a law alone. What a leg moves at another rate than the first is a cause
    of its own.
    """
    if len(parts) == 1:
        return parts[0]
    # A leg that did not move has no rate; it is held against those that did.
    common = next((part.rate for part in parts if isinstance(part.rate, Tensor) or part.rate != 0), 0.0)
    first: dict[str, Tensor] = {}
    for part in parts:
        unequal = {"rates": (part.rate - common) * part.gradient_term} if part.rate is not common else {}
        for cause, value in (*part.first.items(), *unequal.items()):
            first[cause] = first[cause] + value if cause in first else value
    return StepAccount(first=first, rate=common, **{name: _add_up([getattr(p, name) for p in parts]) for name in _SUMS})


def _add_up(tensors: list[Tensor]) -> Tensor:
    return sum(tensors[1:], tensors[0])


def _stack_batches(pieces: list[StepAccount]) -> StepAccount:
    """Return batches of one stack, one after the other."""
    causes = dict.fromkeys(cause for piece in pieces for cause in piece.first)
    rates = [torch.ones_like(piece.law[:, :1]) * piece.rate for piece in pieces]
    return StepAccount(
        first={c: _cat([piece.first.get(c, torch.zeros_like(piece.law)) for piece in pieces], 0) for c in causes},
        rate=_cat(rates, 0),
        **{name: _cat([getattr(piece, name) for piece in pieces], 0) for name in _SUMS},
    )


def rounding(stack: LawStack, symmetries: Sequence[Symmetry], theta: Tensors, dtype: torch.dtype | None) -> list[float]:
    """Return the rounding error of one step over the size of its terms, for each law of a stack.

    Storing θ' rounds every entry once, and the update that is read back carries a few rounding errors of its own:
    3 ε of the parameters' type. Summing N products in the working type leaves 4 √N ε with overwhelming probability
    (Higham and Mary, 2019), in the law before and after and in the account.
    """
    result = []
    for index in stack.indices:
        symmetry = symmetries[index]
        stored = max(torch.finfo(theta[name].dtype).eps for name in symmetry.parameters)
        work = torch.finfo(working_dtype((theta[name].dtype for name in symmetry.parameters), dtype)).eps
        terms = sum(symmetry.kind.products.summands(leg.view.n, leg.view.m) for leg in symmetry.legs)
        result.append(3 * stored + 4 * sqrt(terms) * work)
    return result
