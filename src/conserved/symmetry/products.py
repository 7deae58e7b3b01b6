r"""The products a moment map is made of: of single rows, or one outer product. A kind of group says them once.

For two legs A and B of degree +1 the moment map is bilinear in their rows. Either it is all of A Bᵀ (`OuterProduct`),
or rows come in units and every unit has a few numbers of its own (`RowProducts`):

    μ[u, k] = Σ over terms (i, j, k, s) of  s · ⟨row i of unit u of A, row j of unit u of B⟩

Everything else follows from this list: how many laws and identities there are, what |μ| could be if nothing cancelled
(every sign plus, every entry its absolute value), the law (terms of a row with itself) and the angular momentum (the
others, which are antisymmetric). How to compute it on some device is no matter of this file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

Faces = Literal["rows", "columns", "entries"]


class Term(NamedTuple):
    """Row `first` of a unit of A times row `second` of the same unit of B, added to one number of the unit."""

    first: int
    second: int
    number: int = 0
    sign: int = 1


class Products(ABC):
    """The products that the moment map of two legs is made of.

    In all methods `mu` is a moment map of this kind and `law` the part of it that `law(mu)` gives; leading axes are
    batched over.
    """

    __slots__ = ()

    @property
    def unit(self) -> int:
        """Rows that make up one unit, of which every number is made."""
        return 1

    @property
    def faces(self) -> Faces:
        """Which vectors count as the rows of a leg: its rows, its columns, or all its entries as one row."""
        return "rows"

    def squared_rows(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return for every law of a unit the rows whose squares it adds up, each with its sign."""
        return (((0, 1),),)

    @abstractmethod
    def shape(self, n: int, m: int) -> tuple[int, ...]:
        """Return the shape of the moment map μ of one symmetry, without batch axes.

        Args:
            n: rows of a leg.
            m: columns of a leg.

        Returns:
            Its sizes, without leading axes.
        """

    @abstractmethod
    def numbers(self, n: int, m: int) -> int:
        """Return the number of conserved numbers of the law.

        Args:
            n: rows of a leg.
            m: columns of a leg.

        Returns:
            The length of `coordinates`.
        """

    @abstractmethod
    def summands(self, n: int, m: int) -> int:
        """Return how many products of entries one leg adds to one number of the law.

        Args:
            n: rows of a leg.
            m: columns of a leg.

        Returns:
            The number of products, by which rounding errors grow.
        """

    def identities(self, n: int, m: int) -> int:
        """Return the number of entries of μ. Each is one gradient identity.

        Args:
            n: rows of a leg.
            m: columns of a leg.

        Returns:
            The product of `shape`.
        """
        return prod(self.shape(n, m))

    @abstractmethod
    def law(self, mu: Float[Tensor, "*out"]) -> Float[Tensor, "*law"]:
        """Return the part of μ(θ, θ) that is not identically zero: the pairing with symmetric generators."""

    @abstractmethod
    def rotation(self, mu: Float[Tensor, "*out"]) -> Float[Tensor, "*part"] | None:
        """Return the pairing of μ(θ, V) with antisymmetric generators, an angular momentum.

        The result is None where there are no such generators.
        """

    def polar(self, law: Float[Tensor, "*law"]) -> Float[Tensor, "*law"]:
        """Return ½(μ(A, B) + μ(B, A)), from the law part of μ(A, B)."""
        return law

    @abstractmethod
    def coordinates(self, law: Float[Tensor, "*law"]) -> Float[Tensor, "*batch numbers"]:
        """Return the law as a vector without repeated entries; leading axes are batched over."""

    def multiplicities(self, n: int, m: int) -> Float[Tensor, " numbers"]:
        """Return how often each coordinate occurs among the entries of the law.

        Args:
            n: rows of a leg.
            m: columns of a leg.

        Returns:
            A vector in the order of `coordinates`: for a symmetric matrix 1 on the diagonal and 2 elsewhere.
        """
        return torch.ones(self.numbers(n, m))

    def squares(self, law: Float[Tensor, "*law"]) -> Float[Tensor, "*batch rows"]:
        """Return the entries of a law that are sums of squares: all of them, or the diagonal of a matrix."""
        return self.coordinates(law)

    def reach(self, squares: Float[Tensor, "*batch rows"]) -> Float[Tensor, "*batch numbers"]:
        """Return upper bounds of all coordinates of a law from these sums of squares of rows."""
        return squares


@dataclass(frozen=True, slots=True, eq=False)
class RowProducts(Products):
    """Products of single rows, unit by unit."""

    terms: tuple[Term, ...] = (Term(0, 0),)
    unit: int = 1
    faces: Faces = "rows"
    lifted: bool = False
    """Whether A counts as all ones where it is a point, and as zero where it is a direction, as for translations."""

    def __post_init__(self) -> None:
        for number in range(self.width):
            terms = {(term.first, term.second, term.sign) for term in self.into(number)}
            squares = all(first == second for first, second, _ in terms)
            if not squares and terms != {(second, first, -sign) for first, second, sign in terms}:
                raise ValueError(
                    f"Expected terms of number {number} to be squares of rows or antisymmetric, got {sorted(terms)}. "
                    "Other generators give identities that are neither laws nor angular momenta."
                )

    @property
    def width(self) -> int:
        """Numbers of a unit."""
        return 1 + max((term.number for term in self.terms), default=-1)

    @property
    def symmetric(self) -> tuple[int, ...]:
        """The numbers of a unit that pair rows with themselves, which make up the law."""
        return tuple(k for k in range(self.width) if all(term.first == term.second for term in self.into(k)))

    @property
    def antisymmetric(self) -> tuple[int, ...]:
        """The other numbers, which vanish on (θ, θ)."""
        return tuple(k for k in range(self.width) if k not in self.symmetric)

    def squared_rows(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        return tuple(tuple((term.first, term.sign) for term in self.into(k)) for k in self.symmetric)

    def into(self, number: int) -> tuple[Term, ...]:
        """Return the terms whose sum is number `number` of a unit."""
        return tuple(term for term in self.terms if term.number == number)

    def shape(self, n: int, m: int) -> tuple[int, ...]:
        if not self.terms:
            return (0,)
        units = () if self.faces == "entries" else ((n if self.faces == "rows" else m) // self.unit,)
        return units if self.width == 1 else (*units, self.width)

    def numbers(self, n: int, m: int) -> int:
        return self.identities(n, m) // self.width * len(self.symmetric) if self.terms else 0

    def summands(self, n: int, m: int) -> int:
        length = {"rows": m, "columns": n, "entries": n * m}[self.faces]
        return length * max((len(self.into(number)) for number in self.symmetric), default=0)

    def law(self, mu: Float[Tensor, "*out"]) -> Float[Tensor, "*law"]:
        return self._chosen(mu, self.symmetric)

    def rotation(self, mu: Float[Tensor, "*out"]) -> Float[Tensor, "*part"] | None:
        return self._chosen(mu, self.antisymmetric) if self.antisymmetric else None

    def _chosen(self, mu: Tensor, numbers: tuple[int, ...]) -> Tensor:
        if len(numbers) == self.width:
            return mu
        return mu[..., numbers[0]] if len(numbers) == 1 else torch.stack([mu[..., k] for k in numbers], -1)

    def coordinates(self, law: Float[Tensor, "*law"]) -> Float[Tensor, "*batch numbers"]:
        several = len(self.symmetric) > 1
        if self.faces == "entries":
            return law if several else law.unsqueeze(-1)
        return law.flatten(-2) if several else law


@dataclass(frozen=True, slots=True, eq=False)
class OuterProduct(Products):
    """All of A Bᵀ: every row of A with every row of B."""

    def shape(self, n: int, m: int) -> tuple[int, ...]:
        return n, n

    def numbers(self, n: int, m: int) -> int:
        return n * (n + 1) // 2

    def summands(self, n: int, m: int) -> int:
        return m

    def law(self, mu: Float[Tensor, "*out"]) -> Float[Tensor, "*law"]:
        return mu

    def rotation(self, mu: Float[Tensor, "*out"]) -> Float[Tensor, "*part"] | None:
        return mu - mu.mT

    def polar(self, law: Float[Tensor, "*law"]) -> Float[Tensor, "*law"]:
        return (law + law.mT) / 2

    def coordinates(self, law: Float[Tensor, "*law"]) -> Float[Tensor, "*batch numbers"]:
        row, column = _upper(law.shape[-1], law.device)
        return law[..., row, column]

    def multiplicities(self, n: int, m: int) -> Float[Tensor, " numbers"]:
        row, column = torch.triu_indices(n, n)
        return torch.where(row == column, 1.0, 2.0)

    def squares(self, law: Float[Tensor, "*law"]) -> Float[Tensor, "*batch rows"]:
        return law.diagonal(dim1=-2, dim2=-1)

    def reach(self, squares: Float[Tensor, "*batch rows"]) -> Float[Tensor, "*batch numbers"]:
        # |Σ_k a_ik a_jk| ≤ ‖a_i‖ ‖a_j‖.
        root = squares.sqrt()
        return self.coordinates(root.unsqueeze(-1) * root.unsqueeze(-2))


@dataclass(frozen=True, slots=True, eq=True)
class BlockOuterProducts(OuterProduct):
    """A Bᵀ of every block of rows by itself."""

    width: int
    """Rows of a block."""
    antisymmetric: bool = False
    """Whether only A Bᵀ − B Aᵀ counts: the pairing with rotations, which gives identities and no law."""

    def shape(self, n: int, m: int) -> tuple[int, ...]:
        return n // self.width, self.width, self.width

    def numbers(self, n: int, m: int) -> int:
        return 0 if self.antisymmetric else n // self.width * OuterProduct.numbers(self, self.width, m)

    def identities(self, n: int, m: int) -> int:
        pairs = self.width * (self.width - 1) // 2 if self.antisymmetric else self.width**2
        return n // self.width * pairs

    def law(self, mu: Float[Tensor, "*out"]) -> Float[Tensor, "*law"]:
        return mu[..., :0, :0] if self.antisymmetric else mu

    def rotation(self, mu: Float[Tensor, "*out"]) -> Float[Tensor, "*part"] | None:
        return mu if self.antisymmetric else mu - mu.mT

    def coordinates(self, law: Float[Tensor, "*law"]) -> Float[Tensor, "*batch numbers"]:
        return OuterProduct.coordinates(self, law).flatten(-2)

    def multiplicities(self, n: int, m: int) -> Float[Tensor, " numbers"]:
        single = OuterProduct.multiplicities(self, self.width, m)
        return single.new_zeros(0) if self.antisymmetric else single.repeat(n // self.width)

    def squares(self, law: Float[Tensor, "*law"]) -> Float[Tensor, "*batch rows"]:
        return OuterProduct.squares(self, law).flatten(-2)

    def reach(self, squares: Float[Tensor, "*batch rows"]) -> Float[Tensor, "*batch numbers"]:
        return OuterProduct.reach(self, squares.unflatten(-1, (-1, self.width))).flatten(-2)


@cache
def _upper(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    row, column = torch.triu_indices(n, n, device=device)
    return row, column
