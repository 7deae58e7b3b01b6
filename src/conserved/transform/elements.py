"""Group elements: what each kind of symmetry is moved by, its inverse, and the two kinds that conserve nothing.

| kind | element | a leg of degree +1 becomes | of degree −1 |
|---|---|---|---|
| general linear | n × n matrix g | g·A | g^{-T}·A |
| orthogonal | n × n matrix with g gᵀ = 1 | g·A | g·A |
| complex scaling | n/2 complex numbers | c·A, pair by pair | A·c/|c|² |
| positive scaling | n positive numbers | s_i·A_i | A_i/s_i |
| one scale | a positive number | s·A | A/s |
| translation | m numbers | A + c | A − c |
| exchange | an order of the n rows | A[order] | A[order] |
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from conserved.symmetry import (
    ComplexScaling,
    Degree,
    GeneralLinear,
    Kind,
    OneScale,
    RowProducts,
    Scaling,
    Symmetry,
    Translation,
)

CONDITION = 1e12
"""Matrices worse conditioned than this are refused: their inverse would lose the weights in rounding."""


NOT_SAID = "How elements of {} are multiplied and undone is not known: move along it with Symmetry.act."


class Unmovable(ValueError):
    """A symmetry, an element or a tensor that cannot be moved; the message names it and says what to do."""


class _WithoutLaw(Kind):
    """A group without symmetric generators: it moves parameters and leaves no law behind."""

    __slots__ = ()
    products = RowProducts(())


class Exchange(_WithoutLaw):
    """S_n: equal units change places, along all legs at once. The element lists, for every row, the row it was."""

    __slots__ = ()
    code = "exchange"
    title = "exchange of units"

    def act(self, g: Shaped[Tensor, "*element"], a: Float[Tensor, "n m"], degree: Degree) -> Shaped[Tensor, "n m"]:
        return a[g.to(a.device)]

    def element(
        self, n: int, m: int, *, spread: float, generator: torch.Generator | None
    ) -> Shaped[Tensor, "*element"]:
        return torch.randperm(n, generator=generator)

    def group(self, n: int, m: int) -> str:
        return f"S_{n}"


class Orthogonal(_WithoutLaw):
    """O(n): acts on a space of which only lengths are seen, such as a residual stream whose norms have no gains."""

    __slots__ = ()
    code = "orthogonal"
    title = "orthogonal"

    def act(self, g: Shaped[Tensor, "*element"], a: Float[Tensor, "n m"], degree: Degree) -> Shaped[Tensor, "n m"]:
        return g @ a

    def element(
        self, n: int, m: int, *, spread: float, generator: torch.Generator | None
    ) -> Shaped[Tensor, "*element"]:
        noise = torch.randn(n, n, generator=generator, dtype=torch.float64)
        return torch.linalg.matrix_exp(spread * (noise - noise.mT) / max(n, 1) ** 0.5)

    def group(self, n: int, m: int) -> str:
        return f"O({n})"


def checked(symmetry: Symmetry, element: Tensor) -> Tensor:
    """An element in the precision it acts in.

    Args:
        symmetry: the symmetry it is meant for.
        element: numbers in the shape of the table above.

    Returns:
        The element in float64, complex128 for complex scalings, or int64 for exchanges.

    Raises:
        Unmovable: it is no element of this symmetry; the message says why.
    """
    kind, n, m = symmetry.kind, symmetry.n, symmetry.m
    shape = element_shape(symmetry)
    try:
        element = torch.as_tensor(element).detach()
    except (TypeError, ValueError, RuntimeError) as problem:
        raise Unmovable(f"The element for {symmetry.name} is no tensor of numbers: {problem}.") from problem
    if tuple(element.shape) != shape:
        raise Unmovable(
            f"{symmetry.name} is {kind.group(n, m)}: its elements have shape {shape}; got {tuple(element.shape)}."
        )
    if isinstance(kind, Exchange):
        order = element.real.long()
        if not torch.equal(order.to(element.dtype), element) or not torch.equal(
            order.sort().values.cpu(), torch.arange(n)
        ):
            raise Unmovable(f"{symmetry.name} exchanges {n} units: an element lists each of 0 … {n - 1} once.")
        return order
    if element.is_complex() != isinstance(kind, ComplexScaling) and element.is_complex():
        raise Unmovable(f"{symmetry.name} is {kind.group(n, m)}, which complex numbers do not act on.")
    element = element.to(torch.complex128 if isinstance(kind, ComplexScaling) else torch.float64)
    if not bool(torch.isfinite(torch.view_as_real(element) if element.is_complex() else element).all()):
        raise Unmovable(f"The element for {symmetry.name} has entries that are not finite.")
    if isinstance(kind, Scaling | OneScale) and not bool((element > 0).all()):
        raise Unmovable(f"{symmetry.name} scales by positive numbers; got {float(element.min()):g}.")
    if isinstance(kind, ComplexScaling) and not bool((element.abs() > 0).all()):
        raise Unmovable(f"{symmetry.name} scales by complex numbers other than zero; got zero.")
    if isinstance(kind, GeneralLinear):
        condition = float(torch.linalg.cond(element))
        if not condition < CONDITION:
            raise Unmovable(
                f"The matrix for {symmetry.name} has condition {condition:.1e} and cannot be undone; "
                f"matrices up to {CONDITION:.0e} can."
            )
    if isinstance(kind, Orthogonal):
        error = float((element @ element.mT - torch.eye(n, dtype=torch.float64, device=element.device)).abs().max())
        if error > 1e-9:
            raise Unmovable(f"The matrix for {symmetry.name} is not orthogonal: |g gᵀ − 1| is {error:.1e}.")
    return element


def element_shape(symmetry: Symmetry) -> tuple[int, ...]:
    """The shape of a symmetry's elements."""
    kind, n, m = symmetry.kind, symmetry.n, symmetry.m
    if isinstance(kind, GeneralLinear | Orthogonal):
        return (n, n)
    if isinstance(kind, ComplexScaling):
        return (n // 2,)
    if isinstance(kind, Translation):
        return (m,)
    if isinstance(kind, Scaling | Exchange):
        return (n,)
    return tuple(kind.element(n, m, spread=0.0, generator=None).shape)


def inverse(kind: Kind, element: Tensor) -> Tensor:
    """The element that undoes another.

    Args:
        kind: the group.
        element: an element of it.

    Returns:
        Its inverse.

    Raises:
        Unmovable: it is not known how elements of this kind are undone.
    """
    if isinstance(kind, GeneralLinear):
        return torch.linalg.inv(element)
    if isinstance(kind, Orthogonal):
        return element.mT
    if isinstance(kind, Translation):
        return -element
    if isinstance(kind, Exchange):
        return element.argsort()
    if isinstance(kind, Scaling | OneScale | ComplexScaling):
        return 1 / element
    raise Unmovable(NOT_SAID.format(kind.title))


def acted(symmetry: Symmetry, element: Tensor, matrix: Float[Tensor, "n m"], degree: Degree) -> Float[Tensor, "n m"]:
    """One leg moved by an element; a negative degree of the general linear group inverts the matrix.

    Args:
        symmetry: the symmetry.
        element: an element of it.
        matrix: the leg, n × m.
        degree: the degree of the leg.

    Returns:
        The moved leg, n × m.
    """
    if isinstance(symmetry.kind, GeneralLinear) and degree < 0:
        return torch.linalg.inv(element).mT.to(matrix.device) @ matrix
    return symmetry.kind.act(element.to(matrix.device), matrix, degree)


def identity(symmetry: Symmetry) -> Tensor:
    """The element that moves nothing."""
    kind, shape = symmetry.kind, element_shape(symmetry)
    if isinstance(kind, GeneralLinear | Orthogonal):
        return torch.eye(symmetry.n, dtype=torch.float64)
    if isinstance(kind, Exchange):
        return torch.arange(symmetry.n)
    if isinstance(kind, Translation):
        return torch.zeros(shape, dtype=torch.float64)
    if isinstance(kind, ComplexScaling | Scaling):
        return torch.ones(shape, dtype=torch.complex128 if isinstance(kind, ComplexScaling) else torch.float64)
    return kind.element(symmetry.n, symmetry.m, spread=0.0, generator=None)


def is_known(kind: Kind) -> bool:
    """Whether elements of a kind can be multiplied and undone."""
    return isinstance(kind, GeneralLinear | Orthogonal | Exchange | Translation | Scaling | OneScale | ComplexScaling)


def composed(kind: Kind, later: Tensor, earlier: Tensor) -> Tensor:
    """The one element that does the work of two.

    Args:
        kind: the group.
        later: the element that acts second.
        earlier: the element that acts first.

    Returns:
        Their product.

    Raises:
        Unmovable: it is not known how elements of this kind are multiplied.
    """
    if isinstance(kind, GeneralLinear | Orthogonal):
        return later @ earlier
    if isinstance(kind, Exchange):
        return earlier[later]
    if isinstance(kind, Translation):
        return later + earlier
    if isinstance(kind, Scaling | OneScale | ComplexScaling):
        return later * earlier
    raise Unmovable(NOT_SAID.format(kind.title))


def scaling_element(symmetry: Symmetry, factors: Float[Tensor, " units"]) -> Tensor:
    """The element that multiplies the rows of legs of degree +1 by positive factors, one for each unit."""
    kind = symmetry.kind
    if isinstance(kind, GeneralLinear):
        return torch.diag(factors)
    if isinstance(kind, OneScale):
        return factors.reshape(())
    return factors.to(torch.complex128) if isinstance(kind, ComplexScaling) else factors


def row_scales(symmetry: Symmetry, element: Tensor) -> Float[Tensor, "*n"] | None:
    """The numbers, or the one number, that an element multiplies rows of degree one by; None if it mixes rows."""
    kind = symmetry.kind
    if isinstance(kind, Scaling | OneScale):
        return element
    if isinstance(kind, ComplexScaling) and bool((element.imag == 0).all()):
        return element.real.repeat_interleave(2)
    if isinstance(kind, GeneralLinear) and torch.equal(element, torch.diag(element.diagonal())):
        return element.diagonal()
    return None


def by_unit(kind: Kind, rows: Float[Tensor, " n"], reduce: str) -> Float[Tensor, " units"]:
    """Numbers of rows as numbers of what has one scale: a row, a pair of rows, or all of them; "sum" or "amax"."""
    if isinstance(kind, ComplexScaling):
        return getattr(rows.unflatten(0, (-1, 2)), reduce)(1)
    return getattr(rows, reduce)().reshape(1) if isinstance(kind, OneScale) else rows
