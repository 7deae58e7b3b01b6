"""One representative of every orbit: checkpoints that compute the same function in the same way compare equal."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from conserved.laws import LawSet
from conserved.output.result import PrintableResult
from conserved.symmetry import Kind, Symmetry, Tensors
from conserved.symmetry.view import whole
from conserved.transform.coupling import exchanges as equal_units
from conserved.transform.equalizing import equalize
from conserved.transform.finding import symmetries_of
from conserved.transform.moving import ABOUT_GRADIENTS, ABOUT_LOSS, STORED, Weights, act_on, is_plain

DIGITS = 4
"""Significant digits of the numbers that a digest is made of."""


def canonical(
    target: nn.Module | Mapping[str, Tensor],
    *args: Any,
    laws: LawSet | None = None,
    exchanges: Iterable[Symmetry] | None = None,
    **kwargs: Any,
) -> dict[str, Tensor]:
    """The weights at one fixed point of their orbit, the same for every checkpoint on it.

    Laws are made zero first, which fixes scales and leaves rotations; then rows of general linear spaces become
    eigenvectors of their Gram matrix, largest first, with a positive sum of cubes; pairs of rotary planes get the phase
    at which theirs is real; and equal units are put in the order of their norms. Where eigenvalues or norms coincide
    the representative is not unique.

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
    exact, swaps = found_symmetries(target, args, kwargs, laws, exchanges)
    tensors = dict(target.named_parameters()) if isinstance(target, nn.Module) else dict(target)
    weights = Weights(tensors)
    for symmetry in (*exact, *swaps):
        for name in symmetry.parameters:
            weights.movable(name, symmetry)
    for title in dict.fromkeys(s.kind.title for s in (*exact, *swaps) if not s.kind.defines(Kind.canonical_element)):
        warnings.warn(
            f"{title} defines no representative of an orbit, so the result depends on where on it the weights were. "
            "Define Kind.canonical_element.",
            stacklevel=2,
        )
    state, _ = representative({n: whole(t.detach()).double() for n, t in tensors.items() if _counts(t)}, exact, swaps)
    return {**tensors, **state}


def _counts(tensor: object) -> bool:
    """Whether something in a dictionary of weights is numbers that can be computed with."""
    return isinstance(tensor, Tensor) and is_plain(tensor) and tensor.dtype in STORED and bool(tensor.numel())


def found_symmetries(
    target: nn.Module | Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    laws: LawSet | Iterable[Symmetry] | None,
    exchanges: Iterable[Symmetry] | None,
) -> tuple[list[Symmetry], list[Symmetry]]:
    """Exact symmetries of the function, and units that may change places: those given, or the model's own."""
    if laws is None:
        if not isinstance(target, nn.Module):
            raise ValueError("Of a dictionary of weights the symmetries are not known: pass laws=symmetries_of(model).")
        laws = symmetries_of(target, *args, **kwargs)
        exchanges = equal_units(target, *args, laws=laws, **kwargs) if exchanges is None else exchanges
    listed = laws.symmetries if isinstance(laws, LawSet) else laws
    exact = [s for s in listed if s.exact and s.family not in (*ABOUT_GRADIENTS, *ABOUT_LOSS)]
    return exact, list(exchanges or ())


def representative(
    state: Tensors, exact: Sequence[Symmetry], swaps: Sequence[Symmetry]
) -> tuple[dict[str, Tensor], list[tuple[Symmetry, Tensor]]]:
    """Weights in float64 at the point of their orbit that does not depend on where they were, and the way there."""
    balanced = equalize(state, laws=exact).moved
    steps = [(s, s.kind.inverse(element)) for s, element in reversed(list(balanced.inverse.items()))]
    weights = Weights(balanced.state)
    work = {name: weights.read(name).cpu() for symmetry in (*exact, *swaps) for name in symmetry.parameters}
    with torch.no_grad():
        # Exchanging units inside a head undoes the order of its eigenvectors, so what is exact comes again after that.
        for symmetry in (*exact, *swaps, *exact):
            kind = symmetry.kind
            if not kind.defines(Kind.canonical_element):
                continue
            element = kind.canonical_element(symmetry.matrices(work), symmetry.degrees)
            if element is not None:
                act_on(symmetry, element, work)
                steps.append((symmetry, element))
    return {**balanced.state, **work}, steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint(PrintableResult):
    """Numbers of a checkpoint that do not change along its orbit."""

    numbers: dict[str, tuple[float, float, float]]
    """For every parameter: its norm, the norm of its fourth powers and its largest entry, at the canonical point."""

    @property
    def digest(self) -> str:
        """A short text that is equal for equal fingerprints; numbers on the edge of a digit may make it differ."""
        listed = [f"{name}:{v:.{DIGITS - 1}e}" for name, values in sorted(self.numbers.items()) for v in values]
        return hashlib.sha256("\n".join(listed).encode()).hexdigest()[:16]

    def __repr__(self) -> str:
        return f"<Fingerprint {self.digest}: {len(self.numbers)} parameters>"

    def summary(self) -> str:
        """Return the digest and the size of what it identifies as text."""
        return (
            f"fingerprint {self.digest} of {len(self.numbers)} parameters\n"
            "  equal for all checkpoints on one orbit of the symmetries; .difference(other) compares two"
        )

    def difference(self, other: Fingerprint) -> float:
        """The largest relative difference of the numbers of two checkpoints.

        Args:
            other: the fingerprint of the other checkpoint.

        Returns:
            A number of the size of rounding if both lie on one orbit; infinite if their parameters have other names.
        """
        if self.numbers.keys() != other.numbers.keys():
            return float("inf")
        pairs = [(a, b) for n, mine in self.numbers.items() for a, b in zip(mine, other.numbers[n], strict=True)]
        return max((abs(a - b) / max(abs(a), abs(b), 1e-12) for a, b in pairs), default=0.0)


def fingerprint(
    target: nn.Module | Mapping[str, Tensor],
    *args: Any,
    laws: LawSet | None = None,
    exchanges: Iterable[Symmetry] | None = None,
    **kwargs: Any,
) -> Fingerprint:
    """Numbers that identify a checkpoint wherever on its orbit it is, taken of its `canonical` form.

    Args:
        target: a module or a dictionary of weights, which stays as it is.
        *args: example inputs, as for `canonical`.
        laws: the symmetries, as for `canonical`.
        exchanges: units that may change places, as for `canonical`.
        **kwargs: more example inputs, by name.

    Returns:
        Three norms of every parameter; `.digest` is a short text, `.difference(other)` compares two.

    Raises:
        UnmovableError: a tensor is missing, of another shape or quantised.
        ValueError: the target is a dictionary and no laws are given.
    """
    found = {}
    for name, tensor in canonical(target, *args, laws=laws, exchanges=exchanges, **kwargs).items():
        if _counts(tensor):
            found[name] = (float(tensor.norm()), float(tensor.pow(4).sum() ** 0.25), float(tensor.abs().max()))
    return Fingerprint(numbers=found)
