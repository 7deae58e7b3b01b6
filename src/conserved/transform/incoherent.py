"""Random rotations of spaces that allow any: no single channel stays large, so that few bits serve all of them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from conserved.symmetry import Kind, Symmetry, Tensors
from conserved.transform.coupling import keeping_ones
from conserved.transform.objectives import Objective, is_matrix, row_ranges


def hadamard(n: int, generator: torch.Generator | None = None) -> Float[Tensor, "n n"]:
    """Return an orthogonal n × n matrix that spreads every axis over all: a Hadamard matrix with random signs.

    Where n is not a power of two it is the Kronecker product of the largest Hadamard factor and a random rotation.
    """
    power = n & -n
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < power:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    matrix = matrix / power**0.5
    rest = n // power
    if rest > 1:
        noise = torch.randn(rest, rest, generator=generator, dtype=torch.float64)
        q, r = torch.linalg.qr(noise)
        matrix = torch.kron((q * r.diagonal().sign()).contiguous(), matrix)
    signs = torch.randint(0, 2, (n,), generator=generator).to(torch.float64) * 2 - 1
    return matrix * signs


@dataclass
class IncoherentObjective(Objective):
    """Hadamard elements of groups that have all rotations, as general linear and orthogonal ones."""

    seed: int = 0
    folds: Mapping[Symmetry, Tensor] = field(default_factory=dict)
    """Elements that make gains one, where a space behind them is rotated."""
    sweeps: int = 1

    def applies(self, symmetry: Symmetry) -> bool:
        turns = symmetry.kind.defines(Kind.rotation_element) and symmetry.n > 1
        return turns or symmetry in self.folds

    def element(self, symmetry: Symmetry, work: Tensors) -> Tensor | None:
        if symmetry in self.folds:
            return self.folds[symmetry]
        generator = torch.Generator().manual_seed(self.seed + zlib.crc32(symmetry.name.encode()))
        n = symmetry.n
        if symmetry.family == "rotation_about_ones":
            matrix = keeping_ones(torch.randn(n - 1, n - 1, generator=generator, dtype=torch.float64))
        else:
            matrix = hadamard(n, generator)
        return symmetry.kind.rotation_element(matrix)

    def value(self, symmetry: Symmetry, work: Tensors) -> float:
        """Return the largest coherence of a matrix: its largest entry over its root mean square."""
        values = [0.0]
        for leg in filter(is_matrix, symmetry.legs):
            matrix = leg.view.matrix(work[leg.view.parameter])
            size = float(torch.linalg.vector_norm(matrix)) / matrix.numel() ** 0.5
            values.append(float(row_ranges(leg, work).max()) / size if size else 0.0)
        return max(values)
