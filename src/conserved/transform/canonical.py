"""One representative of every orbit: checkpoints that compute the same function in the same way compare equal."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from conserved.laws import LawSet
from conserved.symmetry import ComplexScaling, GeneralLinear, Symmetry, Tensors
from conserved.transform.elements import Exchange
from conserved.transform.equalizing import equalize
from conserved.transform.finding import symmetries_of
from conserved.transform.moving import Weights, act_on

DIGITS = 4
"""Significant digits of the numbers that a digest is made of."""


def canonical(
    target: nn.Module | Mapping[str, Tensor],
    *args: Any,
    laws: LawSet | None = None,
    exchanges: Iterable[Symmetry] = (),
    **kwargs: Any,
) -> dict[str, Tensor]:
    """The weights at a point of the orbit that does not depend on where on it they were.

    Laws are made zero first, which fixes scales and leaves rotations; then rows of general linear spaces become
    eigenvectors of their Gram matrix, largest first, with a positive sum; pairs of rotary planes get the phase at which
    their sum is real; and equal units are put in the order of their norms. Where eigenvalues or norms coincide the
    representative is not unique.

    Args:
        target: a module or a dictionary of weights, which stays as it is.
        *args: example inputs, as the model is called; not needed with `laws`.
        laws: the symmetries, which a dictionary needs.
        exchanges: units that may change places, as `conserved.transform.exchanges` finds them.
        **kwargs: more example inputs, by name.

    Returns:
        The moved weights in float64; names that no symmetry moves are passed on.

    """
    if laws is None:
        if not isinstance(target, nn.Module):
            raise ValueError("Of a dictionary of weights the symmetries are not known: pass laws=.")
        laws = symmetries_of(target, *args, **kwargs)
    tensors = dict(target.named_parameters()) if isinstance(target, nn.Module) else dict(target)
    state = {n: t.detach().double() if t.is_floating_point() else t for n, t in tensors.items()}
    state = equalize(state, laws=laws).state
    weights = Weights(state)
    exact = [s for s in laws.symmetries if s.exact]
    swaps = list(exchanges)
    names = dict.fromkeys(name for symmetry in (*exact, *swaps) for name in symmetry.parameters)
    work = {name: weights.read(name) for name in names}
    with torch.no_grad():
        for symmetry in exact:
            if isinstance(symmetry.kind, GeneralLinear):
                act_on(symmetry, _principal(symmetry, work), work)
        for symmetry in swaps:
            act_on(symmetry, _sorted(symmetry, work), work)
        # Sums of rows do not change when columns change places, so signs and phases come last.
        for symmetry in exact:
            if isinstance(symmetry.kind, GeneralLinear | ComplexScaling):
                act_on(symmetry, _signed(symmetry, work), work)
        # Exchanging units inside a head undoes the order of its eigenvectors.
        for symmetry in exact:
            if isinstance(symmetry.kind, GeneralLinear):
                act_on(symmetry, _ordered(symmetry, work), work)
    return {**state, **work}


def _gram(symmetry: Symmetry, work: Tensors) -> Tensor:
    found = torch.zeros(symmetry.n, symmetry.n, dtype=torch.float64)
    for leg, matrix in zip(symmetry.legs, symmetry.matrices(work), strict=True):
        if leg.degree > 0:
            found += (matrix @ matrix.mT).cpu()
    return found


def _principal(symmetry: Symmetry, work: Tensors) -> Tensor:
    _, vectors = torch.linalg.eigh(_gram(symmetry, work))
    return vectors.flip(1).mT


def _ordered(symmetry: Symmetry, work: Tensors) -> Tensor:
    order = _gram(symmetry, work).diagonal().argsort(descending=True)
    return torch.eye(symmetry.n, dtype=torch.float64)[order]


def _sorted(symmetry: Symmetry, work: Tensors) -> Tensor:
    assert isinstance(symmetry.kind, Exchange)
    sizes = torch.stack([matrix.square().sum(1).cpu() for matrix in symmetry.matrices(work)]).sum(0)
    return sizes.argsort(descending=True, stable=True)


def _signed(symmetry: Symmetry, work: Tensors) -> Tensor:
    first = symmetry.matrices(work)[0].sum(1).cpu()
    if isinstance(symmetry.kind, GeneralLinear):
        return torch.diag(torch.where(first < 0, -1.0, 1.0).double())
    pairs = first.unflatten(0, (-1, 2))
    whole = torch.complex(pairs[:, 0], pairs[:, 1])
    return torch.where(whole.abs() > 0, whole.conj() / whole.abs().clamp_min(1e-300), torch.ones_like(whole))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Numbers of a checkpoint that do not change along its orbit."""

    numbers: dict[str, tuple[float, float, float]]
    """For every parameter: its norm, the norm of its fourth powers and its largest entry, at the canonical point."""

    @property
    def digest(self) -> str:
        """A short text that is equal for equal fingerprints; numbers on the edge of a digit may make it differ."""
        listed = [f"{name}:{v:.{DIGITS - 1}e}" for name, values in sorted(self.numbers.items()) for v in values]
        return hashlib.sha256("\n".join(listed).encode()).hexdigest()[:16]

    def difference(self, other: Fingerprint) -> float:
        """The largest relative difference of the numbers of two checkpoints; infinite if parameters differ."""
        if self.numbers.keys() != other.numbers.keys():
            return float("inf")
        pairs = [(a, b) for n, mine in self.numbers.items() for a, b in zip(mine, other.numbers[n], strict=True)]
        return max((abs(a - b) / max(abs(a), abs(b), 1e-12) for a, b in pairs), default=0.0)


def fingerprint(
    target: nn.Module | Mapping[str, Tensor],
    *args: Any,
    laws: LawSet | None = None,
    exchanges: Iterable[Symmetry] = (),
    **kwargs: Any,
) -> Fingerprint:
    """What identifies a checkpoint wherever on its orbit it is; takes what `canonical` does."""
    found = {}
    for name, tensor in canonical(target, *args, laws=laws, exchanges=exchanges, **kwargs).items():
        if tensor.is_floating_point():
            found[name] = (float(tensor.norm()), float(tensor.pow(4).sum() ** 0.25), float(tensor.abs().max()))
    return Fingerprint(numbers=found)
