"""Kinds of group that act on tensors with batch axes: a matrix for every block of rows, a shift for every row.

A model has a symmetry for every head. A function has one for every head of every sequence of its inputs; that is one
symmetry here, whose group is a power of the group of one block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from conserved.symmetry import Degree, Kind, RowProducts
from conserved.symmetry.kind import Element
from conserved.symmetry.products import BlockOuterProducts


class RowTranslation(Kind):
    """(R^n, +): row i of a leg of degree p gets p·c_i added to all its entries, where `Translation` moves columns."""

    __slots__ = ()
    code = "row_translation"
    title = "translation"
    products = RowProducts(lifted=True)
    weighted = True
    rotates = False
    linear = True

    def act(self, g: Element, a: Float[Tensor, "n m"], degree: Degree) -> Shaped[Tensor, "n m"]:
        return a + degree * g[:, None]

    def element(self, n: int, m: int, *, spread: float, generator: torch.Generator | None) -> Element:
        return spread * torch.randn(n, generator=generator, dtype=torch.float64)

    def group(self, n: int, m: int) -> str:
        return f"(R^{n}, +)"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class _BlockKind(Kind):
    """A group of matrices, one for every block of `width` rows."""

    width: int

    @property
    def products(self) -> BlockOuterProducts:  # type: ignore[override]
        return BlockOuterProducts(self.width)

    def check(self, degrees: tuple[Degree, ...], n: int) -> None:
        Kind.check(self, degrees, n)
        if n % self.width:
            raise ValueError(f"Expected a multiple of {self.width} rows for {self.title}, got {n}. Choose other axes.")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.width == other.width

    def __hash__(self) -> int:
        return hash((type(self), self.width))


class BlockGeneralLinear(_BlockKind):
    """GL(width)^k: an invertible matrix for every block of rows."""

    __slots__ = ()
    code = "block_general_linear"
    title = "general linear"

    def act(self, g: Element, a: Float[Tensor, "n m"], degree: Degree) -> Shaped[Tensor, "n m"]:
        matrices = g if degree > 0 else torch.linalg.inv(g).mT
        return (matrices @ a.unflatten(0, (-1, self.width))).flatten(0, 1)

    def element(self, n: int, m: int, *, spread: float, generator: torch.Generator | None) -> Element:
        noise = torch.randn(n // self.width, self.width, self.width, generator=generator, dtype=torch.float64)
        return torch.linalg.matrix_exp(spread * noise / self.width**0.5)

    def group(self, n: int, m: int) -> str:
        return f"GL({self.width})^{n // self.width}"


class BlockRotation(_BlockKind):
    """SO(width)^k: a rotation of every block of rows. It has identities, and no law."""

    __slots__ = ()
    code = "block_rotation"
    title = "rotation"

    @property
    def products(self) -> BlockOuterProducts:  # type: ignore[override]
        return BlockOuterProducts(self.width, antisymmetric=True)

    def act(self, g: Element, a: Float[Tensor, "n m"], degree: Degree) -> Shaped[Tensor, "n m"]:
        return (g @ a.unflatten(0, (-1, self.width))).flatten(0, 1)

    def element(self, n: int, m: int, *, spread: float, generator: torch.Generator | None) -> Element:
        noise = torch.randn(n // self.width, self.width, self.width, generator=generator, dtype=torch.float64)
        return torch.linalg.matrix_exp(spread * (noise - noise.mT) / self.width**0.5)

    def group(self, n: int, m: int) -> str:
        return f"SO({self.width})^{n // self.width}"
