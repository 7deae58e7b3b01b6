"""One representative of every orbit: checkpoints that compute the same function in the same way compare equal."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from conserved.laws import LawSet
from conserved.output.lines import counted
from conserved.output.result import PrintableResult
from conserved.symmetry import Kind, Symmetry, Tensors
from conserved.symmetry.view import whole
from conserved.transform.coupling import coupled_spaces, rotatable
from conserved.transform.coupling import exchanges as equal_units
from conserved.transform.finding import example_call, symmetries_of
from conserved.transform.gauge_fixing import RoundedAnew, fix_scales
from conserved.transform.invariants import orthogonal_invariants, rotating_spaces
from conserved.transform.moving import ABOUT_GRADIENTS, STORED, Weights, act_on, is_plain

DIGITS = 4
"""Significant digits of the sizes that a digest is made of, and decimals less one of the shares."""

SIZES = 2
"""How many numbers of a parameter are sizes; the others are shares between −1 and 1."""


def _round(value: float, index: int) -> str:
    """Return a size to significant digits, a share to decimals; never a negative zero."""
    return f"{value:.{DIGITS - 1}e}" if index < SIZES else f"{round(value, DIGITS - 1) + 0.0:.{DIGITS - 1}f}"


def canonical(
    target: nn.Module | Mapping[str, Tensor],
    *args: Any,
    laws: LawSet | None = None,
    exchanges: Iterable[Symmetry] | None = None,
    **kwargs: Any,
) -> dict[str, Tensor]:
    """Return the weights at one fixed point of their orbit, the same for every checkpoint on it.

    Gains of norms become one and all other laws zero, which fixes scales and leaves rotations. Then rows of residual
    streams and of general linear spaces become eigenvectors of their Gram matrix, largest first, with a positive sum of
    cubes; pairs of rotary planes get the phase at which theirs is real; and equal units are put in the order of their
    norms. Where eigenvalues or norms coincide the representative is not unique.

    Args:
        target: a module or a dictionary of weights, which stays as it is.
        *args: example inputs, as the model is called; not needed with `laws`.
        laws: the symmetries, which a dictionary needs.
        exchanges: units that may change places, as `conserved.transform.exchanges` finds them; they are looked for
            where neither they nor laws are given.
        **kwargs: more example inputs, by name.

    Returns:
        The moved weights in float64; names that no symmetry moves are passed on.

    Raises:
        UnmovableError: a tensor is missing, of another shape or quantised.
        ValueError: the target is a dictionary and no laws are given.
    """
    gauge = find_gauge(target, args, kwargs, laws, exchanges)
    tensors = dict(target.named_parameters()) if isinstance(target, nn.Module) else dict(target)
    weights = Weights(tensors)
    for symmetry in gauge.all:
        for name in symmetry.parameters:
            weights.movable(name, symmetry)
    for title in dict.fromkeys(s.kind.title for s in gauge.all if not s.kind.defines(Kind.canonical_element)):
        warnings.warn(
            f"{title} defines no representative of an orbit, so the result depends on where on it the weights were. "
            "Define Kind.canonical_element.",
            stacklevel=2,
        )
    state, _ = representative({n: whole(t.detach()).double() for n, t in tensors.items() if _counts(t)}, gauge)
    return {**tensors, **state}


def _counts(tensor: object) -> bool:
    """Return whether an entry of a dictionary of weights is a tensor of plain numbers."""
    return isinstance(tensor, Tensor) and is_plain(tensor) and tensor.dtype in STORED and bool(tensor.numel())


@dataclass(frozen=True, slots=True, kw_only=True)
class GaugeFreedom:
    """Everything a checkpoint may be moved along without changing its function."""

    exact: list[Symmetry]
    """Symmetries with an element for every scale, rotation of a head or shift."""
    exchanges: list[Symmetry]
    """Units that may change places."""
    rotations: list[Symmetry]
    """Residual streams that may be rotated once the gains of their norms are one."""

    @property
    def all(self) -> list[Symmetry]:
        """Every symmetry."""
        return [*self.exact, *self.exchanges, *self.rotations]

    @property
    def still_exchanged(self) -> list[Symmetry]:
        """Exchanges of units that no rotation has already put into an order."""
        turned = {leg.view for s in self.rotations for leg in s.legs}
        return [s for s in self.exchanges if turned.isdisjoint(leg.view for leg in s.legs)]


def find_gauge(
    target: nn.Module | Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    laws: LawSet | Iterable[Symmetry] | None,
    exchanges: Iterable[Symmetry] | None,
) -> GaugeFreedom:
    """Return the symmetries of a function: those given, or the model's own, units and rotations probed."""
    rotations: list[Symmetry] = []
    if laws is None:
        if not isinstance(target, nn.Module):
            raise ValueError("Expected laws for a dictionary of weights, got none. Pass laws=symmetries_of(model).")
        laws = symmetries_of(target, *args, **kwargs)
        if exchanges is None:
            exchanges = equal_units(target, *args, laws=laws, **kwargs)
            rotations, _ = rotatable(target, example_call(target, args, kwargs), laws)
    listed = laws.symmetries if isinstance(laws, LawSet) else laws
    exact = [s for s in listed if s.exact and not s.of_loss and s.family not in ABOUT_GRADIENTS]
    return GaugeFreedom(exact=exact, exchanges=list(exchanges or ()), rotations=rotations)


def representative(state: Tensors, gauge: GaugeFreedom) -> tuple[dict[str, Tensor], list[tuple[Symmetry, Tensor]]]:
    """Return weights in float64 at the point of their orbit that does not depend on where they were, and the way
    there.
    """
    fixed = fix_scales(Weights(state), gauge.exact)
    work = {name: fixed.read(name) for symmetry in gauge.all for name in symmetry.parameters}
    steps = list(fixed.steps)
    # Rotations of streams come first: the signs of all others depend on the frame. Exchanging units inside a head
    # undoes the order of its eigenvectors, so what is exact comes again after that.
    order = (*gauge.rotations, *gauge.exact, *gauge.still_exchanged, *gauge.exact)
    with torch.no_grad():
        for symmetry in order:
            kind = symmetry.kind
            if not kind.defines(Kind.canonical_element) or symmetry.logarithmic:
                continue
            element = kind.canonical_element(symmetry.matrices(work), symmetry.degrees)
            if element is not None:
                act_on(symmetry, element, work)
                steps.append((symmetry, element))
    return {**state, **work}, steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint(PrintableResult):
    """Numbers of a checkpoint that do not change along its orbit."""

    numbers: dict[str, tuple[float, ...]]
    """For every parameter: its norm, the fourth-order norm of its singular values and, if it has partners, how it
    stands to them. All are taken where gains are one and laws are zero (`conserved.transform.invariants`).
    """

    @property
    def digest(self) -> str:
        """A short text that is equal for equal fingerprints; numbers on the edge of a digit may make it differ."""
        listed = [
            f"{name}:{_round(value, index)}"
            for name, values in sorted(self.numbers.items())
            for index, value in enumerate(values)
        ]
        return hashlib.sha256("\n".join(listed).encode()).hexdigest()[:16]

    def __repr__(self) -> str:
        return f"<Fingerprint {self.digest}: {counted(len(self.numbers), 'parameter')}>"

    def summary(self) -> str:
        """Return the digest and the size of what it identifies as text."""
        return (
            f"fingerprint {self.digest} of {counted(len(self.numbers), 'parameter')}\n"
            "  equal for all checkpoints on one orbit of the symmetries; .difference(other) compares two"
        )

    def difference(self, other: Fingerprint) -> float:
        """Return the largest relative difference of the numbers of two checkpoints.

        Args:
            other: the fingerprint of the other checkpoint.

        Returns:
            A number of the size of rounding if both lie on one orbit; infinite if their parameters have other names.
        """
        if self.numbers.keys() != other.numbers.keys():
            return float("inf")
        if any(len(numbers) != len(other.numbers[name]) for name, numbers in self.numbers.items()):
            return float("inf")
        return max(
            (
                abs(a - b) / (max(abs(a), abs(b), 1e-12) if index < SIZES else 1.0)
                for name, numbers in self.numbers.items()
                for index, (a, b) in enumerate(zip(numbers, other.numbers[name], strict=True))
            ),
            default=0.0,
        )


def fingerprint(
    target: nn.Module | Mapping[str, Tensor] | Weights,
    *args: Any,
    laws: LawSet | None = None,
    exchanges: Iterable[Symmetry] | None = None,
    rounding_seed: int | None = None,
    **kwargs: Any,
) -> Fingerprint:
    """Return numbers that identify a checkpoint wherever on its orbit it is: no symmetry changes them.

    Scales, rotations of heads and of residual streams, phases, shifts and exchanges of equal units leave them as they
    are. Different checkpoints may have equal numbers, as other singular vectors with the same overlaps;
    `align` decides.

    Args:
        target: a module, a dictionary of weights or a `Checkpoint`, which stays as it is.
        *args: example inputs, as the model is called; not needed with `laws`.
        laws: the symmetries, which a dictionary and a `Checkpoint` need.
        exchanges: spaces whose entries may change places or be rotated, as `conserved.transform.coupled_spaces` reads
            them off a model. They are looked for where neither they nor laws are given.
        rounding_seed: take the numbers of weights with random errors as large as their rounding, drawn with this
            seed. The difference to the fingerprint without is what rounding explains.
        **kwargs: more example inputs, by name.

    Returns:
        Sizes of every parameter and overlaps of pairs; `.digest` is a short text, `.difference(other)` compares two.

    Raises:
        UnmovableError: a tensor is missing, of another shape or quantised.
        ValueError: the target is a dictionary and no laws are given.
    """
    if laws is None:
        if not isinstance(target, nn.Module):
            raise ValueError("Expected laws for a dictionary of weights, got none. Pass laws=symmetries_of(model).")
        laws = symmetries_of(target, *args, **kwargs)
        exchanges = coupled_spaces(target, *args, **kwargs) if exchanges is None else exchanges
    gauge = find_gauge({}, (), {}, laws, exchanges)
    if isinstance(target, Weights):
        names: Iterable[str] = laws.parameters if isinstance(laws, LawSet) else ()
        source = target
    else:
        tensors = dict(target.named_parameters()) if isinstance(target, nn.Module) else dict(target)
        names = [name for name, tensor in tensors.items() if _counts(tensor)]
        source = Weights(target)
    if rounding_seed is not None:
        source = RoundedAnew(source, rounding_seed)
    spaces = rotating_spaces([*gauge.exact, *gauge.exchanges])
    with torch.no_grad():
        invariants = orthogonal_invariants(fix_scales(source, gauge.exact), names, spaces)
    return Fingerprint(numbers={name: tuple(values) for name, values in invariants.items()})
