"""Weights read at the one scale that their orbit has in common: gains of norms are one, and all other laws are zero.

Folding gains first makes the point the same for a model whose residual stream was rotated: its gains were folded
before. At this point every symmetry that is left is orthogonal: rotations of heads and streams, phases of rotary
planes, exchanges of equal units.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from conserved.symmetry import Symmetry
from conserved.transform.equalizing import equalize
from conserved.transform.moving import Weights, write
from conserved.transform.objectives import is_matrix


def is_gain(symmetry: Symmetry) -> bool:
    """Return whether a symmetry scales the gain of a norm against the maps that read it."""
    gain = symmetry.legs[0]
    exact = symmetry.exact and symmetry.kind.positive and symmetry.kind.scales_rows
    return exact and symmetry.family == "gain" and not is_matrix(gain) and gain.degree == 1


def folding(symmetry: Symmetry, gain: Tensor) -> Tensor:
    """Return the element that makes the entries of a gain one or minus one; entries that are zero stay."""
    values = symmetry.legs[0].view.of_point(gain.detach())[:, 0].double().abs()
    return torch.where(values > 0, 1 / values.clamp_min(torch.finfo(torch.float64).tiny), 1.0)


def _shift_fixing(symmetry: Symmetry, weights: Weights) -> Tensor:
    """Return the element after which entries that are shifted equal their degrees on average, in every row.

    The target is not zero, around which fingerprints would compare rounding.
    """
    legs = [leg for leg in symmetry.legs if leg.logarithmic]
    totals = [leg.degree * leg.view.of_point(weights.read(leg.view.parameter)).sum(1) for leg in legs]
    # One scale moves all rows, so that all of them count in its only sum.
    counts = [1 if symmetry.kind.scales_rows else leg.view.n for leg in legs]
    weight = sum(leg.degree**2 * leg.view.m * count for leg, count in zip(legs, counts, strict=True))
    total = torch.stack([symmetry.kind.by_unit(rows, "sum") for rows in totals]).sum(0)
    return symmetry.kind.scaling_element((1 - total / weight).exp())


class FixedGauge(Weights):
    """Weights that are moved while they are read, tensor by tensor. The source stays as it is.

    Args:
        source: a model's weights or a `Checkpoint`.
    """

    def __init__(self, source: Weights) -> None:
        self._source = source
        self._moves: dict[str, list[tuple[Symmetry, Tensor]]] = defaultdict(list)
        self.steps: list[tuple[Symmetry, Tensor]] = []
        """The elements that lead from the source to here, in order."""
        self.state, self.written = {}, []

    def movable(self, name: str, symmetry: Symmetry) -> None:
        self._source.movable(name, symmetry)

    def read(self, name: str, least: torch.dtype = torch.float64) -> Tensor:
        """Return a moved copy in float64."""
        tensor = self._source.read(name).cpu()
        for symmetry, element in self._moves[name]:
            for leg in symmetry.legs:
                if leg.view.parameter == name:
                    write(leg.view, tensor, leg.acted(symmetry.kind, element, leg.view.of_point(tensor)))
        return tensor

    def write(self, work: Mapping[str, Tensor]) -> None:
        """Keep the source as it is: `move` records elements instead."""

    def move(self, symmetry: Symmetry, element: Tensor) -> None:
        """Read the tensors of a symmetry moved by an element from now on."""
        self.steps.append((symmetry, element))
        for name in symmetry.parameters:
            self._moves[name].append((symmetry, element))


def fix_scales(source: Weights, exact: Sequence[Symmetry]) -> FixedGauge:
    """Return weights at the point of their orbit where gains are one and all other laws are zero."""
    fixed = FixedGauge(source)
    gains = [symmetry for symmetry in exact if is_gain(symmetry)]
    for symmetry in exact:
        for name in symmetry.parameters:
            source.movable(name, symmetry)
    with torch.no_grad():
        for symmetry in gains:
            fixed.move(symmetry, folding(symmetry, fixed.read(symmetry.legs[0].view.parameter)))
        traded = [symmetry for symmetry in exact if symmetry.logarithmic]
        for symmetry in traded:
            fixed.move(symmetry, _shift_fixing(symmetry, fixed))
        balanced = equalize(fixed, laws=[s for s in exact if s not in gains and s not in traded]).moved
    for symmetry, element in reversed(list(balanced.inverse.items())):
        fixed.move(symmetry, symmetry.kind.inverse(element))
    return fixed


class RoundedAnew(Weights):
    """Weights read with random errors as large as those of rounding them once more, the same in every reading.

    Args:
        source: a model's weights or a `Checkpoint`, which stays as it is.
        seed: of the errors.
    """

    def __init__(self, source: Weights, seed: int) -> None:
        self._source, self._seed = source, seed
        self.state, self.written = {}, []

    def movable(self, name: str, symmetry: Symmetry) -> None:
        self._source.movable(name, symmetry)

    def read(self, name: str, least: torch.dtype = torch.float64) -> Tensor:
        """Return a copy in float64 with errors of up to half a spacing."""
        tensor = self._source.read(name)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) ^ self._seed)
        errors = torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype).to(tensor.device) - 0.5
        return tensor * (1 + torch.finfo(self._source.precision(name)).eps * errors)

    def write(self, work: Mapping[str, Tensor]) -> None:
        """Keep the source as it is."""
