r"""The interface of a kind of group: its action, its products, and how its elements are combined and chosen.

A group element moves the n rows of an n × m leg A. Write ξ·A for its infinitesimal action. The moment map of two legs
is defined by pairing with every generator,

    ⟨ξᵀ, μ(A, B)⟩ = ⟨ξ·A, B⟩        for all ξ (the transpose matters for matrices only),

so a kind is fully described by `act` (the group) and `products` (the adjoint of its generator). Products are those of a
leg of degree +1; a leg of degree −1 moves by g^{-T} and contributes −μ(B, A), for the general linear group −(A Bᵀ)ᵀ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from conserved.errors import ConservedError, InvalidInputError
from conserved.symmetry.products import Products
from conserved.symmetry.scale_fitting import least_norm_scales, nearest_scales

Degree = int | float
"""How a leg moves: +1 by g, −1 by g^{-T}, and where a scale acts by any power of it."""

Element = Shaped[Tensor, "*element"]
"""An element of a group, as a kind of group writes it."""


class UnmovableError(InvalidInputError, ValueError):
    """A symmetry, an element or a tensor cannot be moved; the message names it and says what to do."""


class NoBestPointError(ConservedError, ValueError):
    """The objective has no best point on the orbit of a symmetry; the message says why."""


class Kind(ABC):
    """A group that acts on the rows of every leg of a symmetry.

    `act`, `element`, `group` and `products` give laws, identities, audits and the account of a run. The methods in
    the table are optional, and moving weights along the symmetry uses them; `defines` says whether a kind has one.

    | method | meaning | without it |
    |---|---|---|
    | `inverse`, `compose` | invert and multiply elements | only `Symmetry.act` moves along it |
    | `scaling_element` | the element that scales units | `equalize`, `align` and `mappings` skip it |
    | `rotation_element` | the element that rotates rows | `equalize` does not rotate it |
    | `canonical_element` | the element that leads to one point of the orbit | `canonical` and `fingerprint` warn |
    | `element_problem` | why numbers are not an element | finite numbers of the right shape are one |
    | `least_norm_element`, `nearest_element` | better choices than scales of units | units are scaled |
    """

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
    rotates: ClassVar[bool] = True
    """Whether elements may rotate or exchange rows, and not only scale or shift them."""
    positive: ClassVar[bool] = False
    """Whether every element multiplies rows by positive numbers, so that elements have logarithms and powers."""
    separates: ClassVar[str] = "the operations between the maps pass a positive scale of every channel on"
    """Why two maps do not see scales of the channels between them, for the reports of `mappings`."""

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
        """Return a random group element.

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
        """Return the name of the group for legs of this size.

        Args:
            n: rows of a leg.
            m: columns of a leg.

        Returns:
            A name such as GL(64).
        """

    def defines(self, method: Callable[..., Any]) -> bool:
        """Return whether this kind overrides an optional method.

        Args:
            method: a method of `Kind`, such as `Kind.inverse`.

        Returns:
            True if the class has an implementation of its own.
        """
        return getattr(type(self), method.__name__) is not method

    @property
    def movable(self) -> bool:
        """Whether elements can be multiplied and inverted, which moving weights needs."""
        return self.defines(Kind.inverse) and self.defines(Kind.compose)

    @property
    def scales_units(self) -> bool:
        """Whether every unit of rows has a positive scale of its own."""
        return self.defines(Kind.scaling_element) and self.shared == "rows"

    @property
    def scales_rows(self) -> bool:
        """Whether every row has a positive scale of its own."""
        return self.scales_units and self.products.unit == 1

    def undefined(self) -> str:
        """Return the message for a kind along which nothing can be moved and moved back."""
        return (
            f"{self.title} defines no inverse or no product of elements. Define Kind.inverse and Kind.compose, "
            "or use Symmetry.act."
        )

    def identity(self, n: int, m: int) -> Element:
        """Return the element that moves nothing, for legs of n rows and m columns."""
        return self.element(n, m, spread=0.0, generator=torch.Generator())

    def inverse(self, g: Element) -> Element:
        """Return the inverse of an element."""
        raise UnmovableError(self.undefined())

    def compose(self, later: Element, earlier: Element) -> Element:
        """Return the product of two elements: `earlier` acts first."""
        raise UnmovableError(self.undefined())

    def element_problem(self, g: Element, name: str) -> str:
        """Return why finite numbers of the right shape are not an element for symmetry `name`; empty if they are."""
        return ""

    def scaling_element(self, factors: Float[Tensor, " units"]) -> Element:
        """Return the element that multiplies rows of legs of degree +1 by positive factors, one for each unit."""
        raise UnmovableError(f"{self.title} defines no scaling of units. Define Kind.scaling_element.")

    def row_scales(self, g: Element) -> Float[Tensor, "*n"] | None:
        """Return the factors by which an element multiplies rows of degree one; None if it mixes rows."""
        return None

    def rotation_element(self, matrix: Float[Tensor, "n n"]) -> Element:
        """Return the element that multiplies the rows of all legs by an orthogonal matrix."""
        raise UnmovableError(f"{self.title} defines no rotation of rows. Define Kind.rotation_element.")

    def canonical_element(self, legs: Sequence[Tensor], degrees: Sequence[Degree]) -> Element | None:
        """Return the element that leads from any balanced point of an orbit to the same one; None for the identity."""
        raise UnmovableError(f"{self.title} defines no representative of an orbit. Define Kind.canonical_element.")

    def by_unit(self, rows: Float[Tensor, " n"], reduce: str) -> Float[Tensor, " units"]:
        """Reduce numbers of rows, by "sum" or "amax", to one number for everything that shares a scale."""
        if self.products.faces == "entries":
            return getattr(rows, reduce)().reshape(1)
        unit = self.products.unit
        return rows if unit == 1 else getattr(rows.unflatten(0, (-1, unit)), reduce)(1)

    def least_norm_element(self, legs: Sequence[Tensor], degrees: Sequence[Degree]) -> Element:
        """Return the element that leads to the point of the orbit with the smallest norm, where the law is zero.

        The squared norm is geodesically convex along the orbit (Kempf and Ness), so that this point is unique up to
        elements that keep norms. By default only scales of units are chosen.

        Args:
            legs: the matrices of all legs.
            degrees: their degrees.

        Returns:
            The element.

        Raises:
            NoBestPointError: the infimum is not attained, or the kind defines no scales.
        """
        if not self.defines(Kind.scaling_element):
            raise NoBestPointError(f"{self.title} defines no scaling of units, which balancing needs")
        squares = [self.by_unit(torch.linalg.vecdot(leg, leg), "sum") for leg in legs]
        scales, problem = least_norm_scales(squares, degrees)
        if problem:
            raise NoBestPointError(problem)
        return self.scaling_element(scales)

    def nearest_element(
        self, wanted: Sequence[Tensor], legs: Sequence[Tensor], degrees: Sequence[Degree]
    ) -> Element | None:
        """Return the element that brings legs nearest to those wanted; by default only scales of units are chosen.

        Args:
            wanted: the matrices to approach.
            legs: the matrices that are moved.
            degrees: their degrees.

        Returns:
            The element, or None if the kind defines no scales.
        """
        if not self.defines(Kind.scaling_element):
            return None
        squares = torch.stack([self.by_unit(b.square().sum(1), "sum") for b in legs])
        products = torch.stack([self.by_unit((a * b).sum(1), "sum") for a, b in zip(wanted, legs, strict=True)])
        powers = torch.tensor(degrees, dtype=torch.float64)[:, None]
        return self.scaling_element(nearest_scales(squares, products, powers))

    def check(self, degrees: tuple[Degree, ...], n: int) -> None:
        """Refuse legs that the group cannot act on.

        Args:
            degrees: the degree of every leg.
            n: rows of the first leg.

        Raises:
            ValueError: a degree has no action, or the rows do not divide into units (pairs, for complex numbers).
        """
        if any(degree == 0 for degree in degrees):
            raise ValueError("Expected degrees other than 0, got a leg of degree 0, which does not move. Leave it out.")
        if not self.weighted and any(abs(degree) != 1 for degree in degrees):
            raise ValueError(f"Expected degrees +1 and −1 for {self.title}, got {degrees}. Use Scaling for others.")
        unit = self.products.unit
        if n % unit:
            raise ValueError(f"Expected a multiple of {unit} rows for {self.title}, got {n}. Choose other axes.")

    def numbers(self, n: int, m: int) -> int:
        """Return how many conserved numbers the law of one symmetry holds.

        Args:
            n: rows of a leg.
            m: columns of a leg.

        Returns:
            Entries of the law, without repeated ones.
        """
        return self.products.numbers(n, m)

    def identities(self, n: int, m: int) -> int:
        """Return how many scalar gradient identities one symmetry gives.

        Args:
            n: rows of a leg.
            m: columns of a leg.

        Returns:
            Entries of μ.
        """
        return self.products.identities(n, m)

    def conserved(self, mu: Float[Tensor, "*out"]) -> Float[Tensor, "*law"]:
        """Return the part of μ(θ, θ) that is not identically zero.

        Args:
            mu: the whole moment map of θ with itself.

        Returns:
            The law.
        """
        return self.products.law(mu)

    def coordinates(self, law: Float[Tensor, "*law"]) -> Float[Tensor, "*batch numbers"]:
        """Return the law as a vector without repeated entries.

        Args:
            law: a law as `conserved` gives it; leading axes are batched over.

        Returns:
            A tensor with `numbers` entries along its last axis.
        """
        return self.products.coordinates(law)

    def units(self, law: Float[Tensor, "*law"]) -> Float[Tensor, "laws size"]:
        """Return the law split into the laws h_i that equation (10) averages over.

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
