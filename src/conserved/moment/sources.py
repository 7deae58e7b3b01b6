"""Arguments of moment maps: points, directions, and readers that supply a few parameters at a time.

All that is known of a symmetry is a sum over pairs of sources: its law is the pair (θ, θ), its identity (θ, G), the
drift of a step (θ, U), (U, θ) and (U, U). A source is a collection of tensors of the parameters' shapes that knows
whether it is a point (parameters) or a direction (a gradient, an update): its `constant` is what an offset that a view
adds, as in 1 + γ, and the 1 by which a translation acts are multiplied by, 1 for points and 0 for directions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from conserved.symmetry.pairs import Direction, Pair, Point, Tensors
from conserved.symmetry.view import whole


@dataclass(frozen=True, slots=True, eq=False)
class Magnitudes:
    """The absolute values of the matrices that laws see in a source; every sign is plus then: the largest |μ|."""

    of: Point | Direction

    @property
    def tensors(self) -> Tensors:
        """Those of the source, with their signs."""
        return self.of.tensors

    @property
    def constant(self) -> float:
        """That of the source."""
        return self.of.constant


Source = Point | Direction | Magnitudes


@dataclass(frozen=True, slots=True, eq=False)
class PairedTensors:
    """The tensors of one parameter, one for each source, and the pairs of them that are asked for."""

    tensors: tuple[Tensor, ...]
    constants: tuple[float, ...]
    pairs: tuple[Pair, ...]
    key: int = 0
    """Legs of one law are added up where this is equal."""
    bounded: tuple[int, ...] = ()
    """Request bounds of sums of absolute values too, which linear laws need."""


@runtime_checkable
class ParameterTensors(Protocol):
    """The tensors that a reader has of one parameter."""

    @property
    def made(self) -> bool:
        """Whether tensors are temporary copies, made for one evaluation and freed after it."""
        ...

    def paired(self, *, linear: bool, offset: float) -> PairedTensors:
        """Return the tensors as a law sees them that is `linear` or not, through a view with an `offset`."""
        ...


@runtime_checkable
class Reader(Protocol):
    """Hands out parameters in portions that fit in memory: gathered from shards, expanded, or loaded from files."""

    portion: int
    """Entries of parameters that are read at a time; a larger parameter is read by itself."""
    kernels: bool
    """Whether kernels may read the tensors together."""

    def stored(self, names: Sequence[str]) -> Sequence[Sequence[Tensor]]:
        """Return, for each parameter, tensors of the types and device it will be read in; values are not read.

        Args:
            names: the parameters.

        Returns:
            For each, one tensor per source.
        """
        ...

    def read(self, names: Sequence[str]) -> Iterable[ParameterTensors]:
        """Read parameters, a portion at a time.

        Args:
            names: the parameters.

        Returns:
            A tensors for each, in this order.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Whole:
    """Tensors that have the same pairs for every law."""

    content: PairedTensors
    made: bool = True

    def paired(self, *, linear: bool, offset: float) -> PairedTensors:
        """Return all tensors and all pairs."""
        return self.content


@dataclass(slots=True, eq=False)
class PresentTensors:
    """Tensors that are there, all of them at once, for kernels."""

    sources: Sequence[Source]
    pairs: tuple[Pair, ...]
    portion: int = sys.maxsize
    kernels: bool = True

    def stored(self, names: Sequence[str]) -> list[tuple[Tensor, ...]]:
        """Return the tensors unchanged."""
        return [*zip(*(map(source.tensors.__getitem__, names) for source in self.sources), strict=True)]

    def read(self, names: Sequence[str]) -> Iterator[ParameterTensors]:
        """Yield the parameters one after the other."""
        constants = tuple(source.constant for source in self.sources)
        return (_Whole(PairedTensors(tensors, constants, self.pairs), made=False) for tensors in self.stored(names))


@dataclass(eq=False)
class GatheredTensors:
    """Sharded tensors that are gathered one parameter at a time, because all of them together may not fit in memory."""

    sources: Sequence[Source]
    pairs: tuple[Pair, ...]
    norms: dict[str, Tensor] = field(default_factory=dict)
    """The norm of the last source, for every parameter that was gathered."""
    portion: int = 0
    kernels: bool = False

    def stored(self, names: Sequence[str]) -> list[tuple[Tensor, ...]]:
        """Return the tensors unchanged, in pieces."""
        return [*zip(*(map(source.tensors.__getitem__, names) for source in self.sources), strict=True)]

    def read(self, names: Sequence[str]) -> Iterator[ParameterTensors]:
        """Yield the parameters, each gathered when its turn comes."""
        for name in names:
            given = [source.tensors[name] for source in self.sources]
            tensors = tuple(map(whole, given))
            if hasattr(given[-1], "full_tensor"):
                self.norms[name] = torch.linalg.vector_norm(tensors[-1])
            yield _Whole(PairedTensors(tensors, tuple(source.constant for source in self.sources), self.pairs))
