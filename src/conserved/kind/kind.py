"""What every kind of group must say of itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from conserved.grams import row_grams
from conserved.sheaf import Layout, Legs, RowProduct
from conserved.view import View

Degree = int | float
"""How a leg moves: +1 by g, −1 by g^{-T}, and where a scale acts by any power of it."""


class Kind(ABC):
    """A group that acts on the rows of every leg of a symmetry."""

    __slots__ = ()
    code: ClassVar[str]
    """Stable tag used in files."""
    title: ClassVar[str]
    """What people call the group."""
    weighted: ClassVar[bool] = False
    """Whether legs may have degrees other than +1 and −1."""
    shared: ClassVar[str] = "rows"
    """What the legs must have in common: "rows" (n), "columns" (m) or "nothing"."""
    together: ClassVar[bool] = False
    """Whether the law of one symmetry is one law h_i of equation (10); otherwise each of its numbers is."""
    linear: ClassVar[bool] = False
    """Whether the law is linear in the parameters; gradient descent, with momentum or without, does not move it."""

    def lift(self, a: Float[Tensor, "*batch n m"], *, point: bool) -> Float[Tensor, "*batch n k"]:
        """What generators act on: the leg itself, for every linear action, at points and directions alike."""
        return a

    def in_sheaves(self, n: int) -> bool:
        """Whether `weighed` and `pairings` take legs of n rows that lie in many tensors."""
        return True

    def row_products(self, layout: Layout) -> tuple[RowProduct, ...] | None:
        """The products of single rows that `contract` adds up, for a leg of degree +1; None if it does more."""
        return None

    @abstractmethod
    def contract(self, a: Float[Tensor, "*batch n k"], b: Float[Tensor, "*batch n l"]) -> Float[Tensor, "*out"]:
        """The moment map of one leg of degree +1."""

    def bound(self, a: Float[Tensor, "*batch n k"], b: Float[Tensor, "*batch n l"]) -> Float[Tensor, "*out"]:
        """What |contract(a, b)| could be, entry by entry, if nothing cancelled."""
        return self.contract(a.abs(), b.abs())

    @abstractmethod
    def weighed(self, a: Legs, b: Legs) -> tuple[Float[Tensor, "*out"], Float[Tensor, "*batch"]]:
        """contract(a, b), and the sum of the squares of all products that its entries add up.

        The root of the latter is the size contract(a, b) would have if the products had random signs, and, times the
        unit of rounding, what independent rounding errors of b leave in it.
        """

    @abstractmethod
    def act(self, g: Shaped[Tensor, "*element"], a: Float[Tensor, "n m"], degree: Degree) -> Shaped[Tensor, "n m"]:
        """Move one leg by the group element `g`."""

    @abstractmethod
    def element(
        self, n: int, m: int, *, spread: float, generator: torch.Generator | None
    ) -> Shaped[Tensor, "*element"]:
        """A random float64 group element, about `spread` away from the identity."""

    def conserved(self, mu: Float[Tensor, "*out"]) -> Float[Tensor, "*law"]:
        """The part of μ(θ, θ) that is not identically zero: the pairing with symmetric generators."""
        return mu

    def rotation(self, mu: Float[Tensor, "*out"]) -> Float[Tensor, "*part"] | None:
        """The pairing of μ(θ, V) with antisymmetric generators, an angular momentum; None where there are none."""
        return None

    def pairings(
        self, sources: Sequence[Legs], pairs: Sequence[tuple[int, int]], dtype: torch.dtype
    ) -> Float[Tensor, " pairs *law"]:
        """For one leg of degree +1, what `polar` turns into ½(μ(A, B) + μ(B, A)), for every listed pair of directions.

        `polar` is linear and does not depend on the leg, so legs are added up first.
        """
        return row_grams(sources, pairs, dtype)

    def polar(self, pairing: Float[Tensor, "*law"]) -> Float[Tensor, "*law"]:
        """The symmetric bilinear form whose value on (θ, θ) is the law, from a sum of what `pairings` gives."""
        return pairing

    def coordinates(self, law: Float[Tensor, "*law"]) -> Float[Tensor, "*batch numbers"]:
        """The law as a vector without repeated entries; leading axes are batched over."""
        return law

    def multiplicities(self, n: int, m: int) -> Float[Tensor, " numbers"]:
        """How often each coordinate occurs among the entries of the law."""
        return torch.ones(self.numbers(n, m))

    def sizes(self, law: Float[Tensor, "*law"]) -> Float[Tensor, "*batch rows"]:
        """The entries of a law that are sums of squares row by row: its diagonal, or all of it."""
        return law

    def reach(self, sizes: Float[Tensor, "*batch rows"]) -> Float[Tensor, "*batch numbers"]:
        """Upper bounds of all coordinates of a law whose legs have these sizes, if nothing cancelled."""
        return sizes

    @abstractmethod
    def units(self, law: Float[Tensor, "*law"]) -> Float[Tensor, "laws size"]:
        """One row for each law h_i that equation (10) averages over: a matrix law is one, a neuron's is one."""

    @abstractmethod
    def numbers(self, n: int, m: int) -> int:
        """How many conserved numbers the law of one symmetry holds."""

    def terms(self, n: int, m: int) -> int:
        """How many products one n × m leg adds to one number of the law."""
        return m

    @abstractmethod
    def identities(self, n: int, m: int) -> int:
        """How many scalar gradient identities one symmetry gives."""

    @abstractmethod
    def group(self, n: int, m: int) -> str:
        """The group's name, such as GL(64)."""

    @abstractmethod
    def term(self, view: View, *, latex: bool) -> str:
        """How the law of one leg reads."""

    def check(self, degrees: tuple[Degree, ...]) -> None:
        """Refuse degrees the group has no action for."""
        if any(degree == 0 for degree in degrees):
            raise ValueError("A leg of degree 0 does not move; leave it out of the symmetry.")
        if not self.weighted and any(abs(degree) != 1 for degree in degrees):
            raise ValueError(f"{self.title} acts with degrees +1 and −1 only; got {degrees}. Use Scaling for others.")

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))


def norm_squared(face: str, latex: bool) -> str:
    """‖face‖², as text or LaTeX."""
    return rf"\lVert {face} \rVert^{{2}}" if latex else f"‖{face}‖²"
