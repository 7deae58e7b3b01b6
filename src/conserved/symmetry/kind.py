r"""What every kind of group must say of itself.

A group element moves the n rows of an n × m leg A. Write ξ·A for its infinitesimal action. The moment map of two legs
is defined by pairing with every generator,

    ⟨ξᵀ, μ(A, B)⟩ = ⟨ξ·A, B⟩        for all ξ (the transpose matters for matrices only),

so a kind is fully described by `act` (the group) and `products` (the adjoint of its generator). Products are those of a
leg of degree +1; a leg of degree −1 moves by g^{-T} and contributes −μ(B, A), for the general linear group −(A Bᵀ)ᵀ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from conserved.symmetry.products import Products

Degree = int | float
"""How a leg moves: +1 by g, −1 by g^{-T}, and where a scale acts by any power of it."""

Element = Shaped[Tensor, "*element"]
"""An element of a group, as a kind of group writes it."""


class Kind(ABC):
    """A group that acts on the rows of every leg of a symmetry."""

    __slots__ = ()
    code: ClassVar[str]
    """Stable tag used in files."""
    title: ClassVar[str]
    """The name of the group in words."""
    products: ClassVar[Products]
    """The products that the moment map of a leg of degree +1 is made of."""
    weighted: ClassVar[bool] = False
    """Whether legs may have degrees other than +1 and −1."""
    shared: ClassVar[str] = "rows"
    """The size that all legs must have in common: "rows" (n), "columns" (m) or "nothing"."""
    together: ClassVar[bool] = False
    """Whether the law of one symmetry is one law h_i of equation (10); otherwise each of its numbers is."""
    linear: ClassVar[bool] = False
    """Whether the law is linear in the parameters; gradient descent, with momentum or without, does not move it."""

    @abstractmethod
    def act(self, g: Element, a: Float[Tensor, "n m"], degree: Degree) -> Shaped[Tensor, "n m"]:
        """Move one leg by a group element.

        Args:
            g: an element as `element` makes it, in the precision of the leg and on its device.
            a: the leg, n × m.
            degree: +1 moves by g, −1 by its inverse transposed; a scale by this power of it.

        Returns:
            The moved leg, n × m.
        """

    @abstractmethod
    def element(self, n: int, m: int, *, spread: float, generator: torch.Generator | None) -> Element:
        """A random group element.

        Args:
            n: rows of a leg.
            m: columns of a leg.
            spread: about how far it is from the identity.
            generator: where random numbers come from; torch's own if None.

        Returns:
            The element in float64, in the shape that `act` takes.
        """

    @abstractmethod
    def group(self, n: int, m: int) -> str:
        """The name of the group for legs of this size.

        Args:
            n: rows of a leg.
            m: columns of a leg.

        Returns:
            A name such as GL(64).
        """

    def check(self, degrees: tuple[Degree, ...], n: int) -> None:
        """Refuse legs that the group cannot act on.

        Args:
            degrees: the degree of every leg.
            n: rows of the first leg.

        Raises:
            ValueError: a degree has no action, or the rows do not divide into units (pairs, for complex numbers).
        """
        if any(degree == 0 for degree in degrees):
            raise ValueError("A leg of degree 0 does not move; leave it out of the symmetry.")
        if not self.weighted and any(abs(degree) != 1 for degree in degrees):
            raise ValueError(f"{self.title} acts with degrees +1 and −1 only; got {degrees}. Use Scaling for others.")
        unit = getattr(self.products, "unit", 1)
        if n % unit:
            rows = "pairs up rows, and {} is odd" if unit == 2 else f"takes {unit} rows at a time, and {{}} do not fit"
            raise ValueError(f"{self.title} {rows.format(n)}.")

    def numbers(self, n: int, m: int) -> int:
        """How many conserved numbers the law of one symmetry holds.

        Args:
            n: rows of a leg.
            m: columns of a leg.

        Returns:
            Entries of the law, without repeated ones.
        """
        return self.products.numbers(n, m)

    def identities(self, n: int, m: int) -> int:
        """How many scalar gradient identities one symmetry gives.

        Args:
            n: rows of a leg.
            m: columns of a leg.

        Returns:
            Entries of μ.
        """
        return self.products.identities(n, m)

    def conserved(self, mu: Float[Tensor, "*out"]) -> Float[Tensor, "*law"]:
        """The part of μ(θ, θ) that is not identically zero.

        Args:
            mu: the whole moment map of θ with itself.

        Returns:
            The law.
        """
        return self.products.law(mu)

    def coordinates(self, law: Float[Tensor, "*law"]) -> Float[Tensor, "*batch numbers"]:
        """The law as a vector without repeated entries.

        Args:
            law: a law as `conserved` gives it; leading axes are batched over.

        Returns:
            A tensor with `numbers` entries along its last axis.
        """
        return self.products.coordinates(law)

    def units(self, law: Float[Tensor, "*law"]) -> Float[Tensor, "laws size"]:
        """The law split into the laws h_i that equation (10) averages over.

        Args:
            law: a law as `conserved` gives it.

        Returns:
            One row for each h_i: a matrix law is one, the number of a neuron is one.
        """
        return law.reshape(1, -1) if self.together else law.reshape(-1, 1)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))
