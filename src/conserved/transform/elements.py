"""Group elements: what each kind of symmetry is moved by, and what moving has to know of a kind.

| kind | element | a leg of degree +1 becomes | of degree −1 |
|---|---|---|---|
| general linear | n × n matrix g | g·A | g^{-T}·A |
| orthogonal | n × n matrix with g gᵀ = 1 | g·A | g·A |
| complex scaling | n/2 complex numbers | c·A, pair by pair | A·c/|c|² |
| positive scaling | n positive numbers | s_i·A_i | A_i/s_i |
| one scale | a positive number | s·A | A/s |
| translation | m numbers | A + c | A − c |
| exchange | an order of the n rows | A[order] | A[order] |

No function of `conserved.transform` looks at what kind of group it is given: it calls one of these, to which a kind of
your own is added in its own file, as in `inverse.register(MyKind, lambda kind, element: …)`.

| function | says of a kind | without it |
|---|---|---|
| `inverse`, `composed` | how elements are undone and multiplied | nothing moves along it but `Symmetry.act` |
| `scaling_element` | which element scales its units | `equalize`, `align` and `mappings` leave it alone |
| `turning_element` | which element is a rotation of its rows | `equalize` does not rotate it |
| `settled` | the one point to take where balancing leaves several | `canonical` and `fingerprint` warn |
| `refusal` | what is no element | any finite numbers of the right shape are one |
| `identity`, `acted`, `row_scales` | the same, faster | they follow from the kind itself |

Two more choose better than by scales of units, `objectives.balancing` and `aligning.nearest_element`, and
`mapping.between` says why a function does not see the scales.
"""

from __future__ import annotations

from functools import singledispatch
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from conserved.errors import InvalidInputError
from conserved.symmetry import (
    ComplexScaling,
    Degree,
    GeneralLinear,
    Kind,
    OneScale,
    Scaling,
    Symmetry,
    Tensors,
    Translation,
)
from conserved.transform.lawless_kinds import Exchange, Orthogonal

CONDITION = 1e12
"""Matrices worse conditioned than this are refused: their inverse would lose the weights in rounding."""

NOT_SAID = "How elements of {} are multiplied and undone is not known: move along it with Symmetry.act."


class Unmovable(InvalidInputError, ValueError):
    """A symmetry, an element or a tensor that cannot be moved; the message names it and says what to do."""


def is_registered(function: Any, kind: Kind) -> bool:
    """Whether a function of this file was told about a kind."""
    return function.dispatch(type(kind)) is not function.dispatch(object)


def is_known(kind: Kind) -> bool:
    """Whether elements of a kind can be multiplied and undone."""
    return is_registered(inverse, kind) and is_registered(composed, kind)


@singledispatch
def inverse(kind: Kind, element: Tensor) -> Tensor:
    """The element that undoes this one."""
    raise Unmovable(NOT_SAID.format(kind.title))


inverse.register(GeneralLinear, lambda _, element: torch.linalg.inv(element))
inverse.register(Orthogonal, lambda _, element: element.mT)
inverse.register(Scaling | OneScale | ComplexScaling, lambda _, element: 1 / element)
inverse.register(Translation, lambda _, element: -element)
inverse.register(Exchange, lambda _, element: element.argsort())


@singledispatch
def composed(kind: Kind, later: Tensor, earlier: Tensor) -> Tensor:
    """The one element that does what two do after each other."""
    raise Unmovable(NOT_SAID.format(kind.title))


composed.register(GeneralLinear | Orthogonal, lambda _, later, earlier: later @ earlier)
composed.register(Scaling | OneScale | ComplexScaling, lambda _, later, earlier: later * earlier)
composed.register(Translation, lambda _, later, earlier: later + earlier)
composed.register(Exchange, lambda _, later, earlier: earlier[later])


@singledispatch
def identity(kind: Kind, n: int, m: int) -> Tensor:
    """The element that moves nothing."""
    return kind.element(n, m, spread=0.0, generator=torch.Generator())


identity.register(GeneralLinear | Orthogonal, lambda _, n, m: torch.eye(n, dtype=torch.float64))
identity.register(Exchange, lambda _, n, m: torch.arange(n))


def element_shape(symmetry: Symmetry) -> tuple[int, ...]:
    """The shape of a symmetry's elements."""
    return tuple(identity(symmetry.kind, symmetry.n, symmetry.m).shape)


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
    one = identity(kind, n, m)
    try:
        element = torch.as_tensor(element).detach()
    except (TypeError, ValueError, RuntimeError) as problem:
        raise Unmovable(f"The element for {symmetry.name} is no tensor of numbers: {problem}.") from problem
    if element.shape != one.shape:
        raise Unmovable(
            f"{symmetry.name} is {kind.group(n, m)}: its elements have shape {tuple(one.shape)}; "
            f"got {tuple(element.shape)}."
        )
    if element.is_complex() and not one.is_complex():
        raise Unmovable(f"{symmetry.name} is {kind.group(n, m)}, which complex numbers do not act on.")
    element = element.to(torch.complex128 if one.is_complex() else torch.float64)
    if not bool(torch.isfinite(torch.view_as_real(element) if element.is_complex() else element).all()):
        raise Unmovable(f"The element for {symmetry.name} has entries that are not finite.")
    if why := refusal(kind, element, symmetry.name):
        raise Unmovable(why)
    return element.to(one.dtype)


@singledispatch
def refusal(kind: Kind, element: Tensor, name: str) -> str:
    """Why finite numbers of the right shape are no element for the symmetry of this name; empty if they are one."""
    return ""


@refusal.register(Scaling | OneScale)
def _not_positive(kind: Kind, element: Tensor, name: str) -> str:
    return "" if bool((element > 0).all()) else f"{name} scales by positive numbers; got {float(element.min()):g}."


@refusal.register(ComplexScaling)
def _zero(kind: Kind, element: Tensor, name: str) -> str:
    return "" if bool((element != 0).all()) else f"{name} scales by complex numbers other than zero; got zero."


@refusal.register(GeneralLinear)
def _singular(kind: Kind, element: Tensor, name: str) -> str:
    condition = float(torch.linalg.cond(element))
    if condition < CONDITION:
        return ""
    return (
        f"The matrix for {name} has condition {condition:.1e} and cannot be undone; matrices up to {CONDITION:.0e} can."
    )


@refusal.register(Orthogonal)
def _skewed(kind: Kind, element: Tensor, name: str) -> str:
    error = float((element @ element.mT - torch.eye(len(element)).to(element)).abs().max())
    return "" if error <= 1e-9 else f"The matrix for {name} is not orthogonal: |g gᵀ − 1| is {error:.1e}."


@refusal.register(Exchange)
def _no_order(kind: Kind, element: Tensor, name: str) -> str:
    n = len(element)
    if torch.equal(element.sort().values, torch.arange(n).to(element)):
        return ""
    return f"{name} exchanges {n} units: an element lists each of 0 … {n - 1} once."


@singledispatch
def acted(kind: Kind, element: Tensor, matrix: Float[Tensor, "n m"], degree: Degree) -> Float[Tensor, "n m"]:
    """One leg moved."""
    return kind.act(element.to(matrix.device), matrix, degree)


@acted.register(GeneralLinear)
def _multiplied(kind: Kind, element: Tensor, matrix: Float[Tensor, "n m"], degree: Degree) -> Float[Tensor, "n m"]:
    """A matrix that is diagonal, or orthogonal, never meets a solver."""
    return (element if degree > 0 else torch.linalg.inv(element).mT).to(matrix.device) @ matrix


@singledispatch
def scaling_element(kind: Kind, factors: Float[Tensor, " units"]) -> Tensor:
    """The element that multiplies the rows of legs of degree +1 by positive factors, one for each unit."""
    raise Unmovable(f"Which elements of {kind.title} are positive scales is not known, or none are.")


scaling_element.register(Scaling, lambda _, factors: factors)
scaling_element.register(OneScale, lambda _, factors: factors.reshape(()))
scaling_element.register(ComplexScaling, lambda _, factors: factors.to(torch.complex128))
scaling_element.register(GeneralLinear, lambda _, factors: torch.diag(factors))


@singledispatch
def row_scales(kind: Kind, element: Tensor) -> Float[Tensor, "*n"] | None:
    """The numbers, or the one number, that an element multiplies rows of degree one by; None if it mixes rows."""
    return None


row_scales.register(Scaling | OneScale, lambda _, element: element)


@row_scales.register(ComplexScaling)
def _without_phases(kind: Kind, element: Tensor) -> Float[Tensor, "*n"] | None:
    return element.real.repeat_interleave(2) if bool((element.imag == 0).all()) else None


@row_scales.register(GeneralLinear)
def _of_a_diagonal(kind: Kind, element: Tensor) -> Float[Tensor, "*n"] | None:
    return element.diagonal() if torch.equal(element, torch.diag(element.diagonal())) else None


def scales_units(kind: Kind) -> bool:
    """Whether every unit of rows has a positive scale of its own."""
    return is_registered(scaling_element, kind) and kind.shared == "rows"


def scales_rows(kind: Kind) -> bool:
    """Whether every row has a positive scale of its own."""
    return scales_units(kind) and getattr(kind.products, "unit", 1) == 1


def by_unit(kind: Kind, rows: Float[Tensor, " n"], reduce: str) -> Float[Tensor, " units"]:
    """Numbers of rows as numbers of what has one scale: a row, several rows, or all of them; "sum" or "amax"."""
    if getattr(kind.products, "faces", "rows") == "entries":
        return getattr(rows, reduce)().reshape(1)
    unit = getattr(kind.products, "unit", 1)
    return rows if unit == 1 else getattr(rows.unflatten(0, (-1, unit)), reduce)(1)


@singledispatch
def turning_element(kind: Kind, matrix: Float[Tensor, "n n"]) -> Tensor:
    """The element that multiplies the rows of all legs by an orthogonal matrix."""
    raise Unmovable(f"Which elements of {kind.title} are rotations is not known, or not all are there.")


turning_element.register(GeneralLinear | Orthogonal, lambda _, matrix: matrix)


@singledispatch
def settled(kind: Kind, symmetry: Symmetry, work: Tensors) -> Tensor | None:
    """The element that leads to one point from all that balanced weights can still be moved to; None if it is one."""
    raise Unmovable(f"Which point of an orbit of {kind.title} stands for all of it is not known.")


settled.register(Scaling | OneScale | Translation, lambda *_: None)


@settled.register(GeneralLinear | Orthogonal)
def _principal_axes(kind: Kind, symmetry: Symmetry, work: Tensors) -> Tensor:
    """Rows become eigenvectors of their Gram matrix, largest first, with positive sums of cubes.

    Plain sums may be zero, as where a norm centres. Rotations that keep (1, …, 1) do the same across it.
    """
    legs = symmetry.matrices(work)
    basis = torch.eye(symmetry.n, dtype=torch.float64)
    if symmetry.family == "rotation_about_ones":
        basis = across_ones(symmetry.n)[1:]
        legs = [basis @ matrix for matrix in legs]
    gram = torch.zeros(len(basis), len(basis), dtype=torch.float64)
    for leg, matrix in zip(symmetry.legs, legs, strict=True):
        if leg.degree > 0:
            gram += matrix @ matrix.mT
    axes = torch.linalg.eigh(gram).eigenvectors.flip(1).mT
    axes = torch.where((axes @ legs[0]).pow(3).sum(1) < 0, -1.0, 1.0).double()[:, None] * axes
    if len(basis) == symmetry.n:
        return axes
    ones = torch.full((symmetry.n, symmetry.n), 1 / symmetry.n, dtype=torch.float64)
    return basis.mT @ axes @ basis + ones


def across_ones(n: int) -> Float[Tensor, "n n"]:
    """Return an orthogonal, symmetric matrix whose first row is parallel to (1, …, 1)."""
    v = torch.full((n,), n**-0.5, dtype=torch.float64)
    v[0] += 1
    return torch.eye(n, dtype=torch.float64) - 2 * torch.outer(v, v) / v.dot(v)


@settled.register(ComplexScaling)
def _phases(kind: Kind, symmetry: Symmetry, work: Tensors) -> Tensor:
    """Phases at which sums of z|z|² are real and positive."""
    pairs = symmetry.matrices(work)[0].unflatten(0, (-1, 2))
    numbers = torch.complex(pairs[:, 0], pairs[:, 1])
    total = (numbers * numbers.abs().square()).sum(1)
    return torch.where(total.abs() > 0, total.conj() / total.abs().clamp_min(1e-300), torch.ones_like(total))


@settled.register(Exchange)
def _by_size(kind: Kind, symmetry: Symmetry, work: Tensors) -> Tensor:
    """Units in the order of their norms."""
    sizes = torch.stack([matrix.square().sum(1) for matrix in symmetry.matrices(work)]).sum(0)
    return sizes.argsort(descending=True, stable=True)
