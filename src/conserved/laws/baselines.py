"""Quantities that look like laws and are not: the baselines of the paper's Appendix E.2.

They are forms of the same legs with a sign or a pairing spoiled, so they cost the same and are measured the same way.
Under gradient descent at a fixed flow time a law's drift vanishes with the step size; a baseline's does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from conserved.symmetry import Leg, OuterProduct, Scaling, Symmetry
from conserved.symmetry.products import Products


def spoil(symmetries: Iterable[Symmetry]) -> tuple[Symmetry, ...]:
    """Return one spoiled form for every law that has one."""
    return tuple(form for symmetry in symmetries for form in _spoil(symmetry))


def _spoil(symmetry: Symmetry) -> Iterator[Symmetry]:
    """Spoil the sign or the pairing that the products of the kind depend on."""
    legs: tuple[Leg, ...] = ()
    kind, products = symmetry.kind, symmetry.kind.products
    plus = [leg for leg in symmetry.legs if leg.degree > 0]
    minus = [leg for leg in symmetry.legs if leg.degree < 0]
    if kind.linear:
        # A single row is not conserved where the sum of all rows is.
        if len(symmetry.legs) == 1 and symmetry.n > 1:
            legs = (_first_row(symmetry.legs[0]),)
    elif products.unit > 1 and products.squared_rows() and len(products.squared_rows()[0]) > 1:
        # Squares of the rows of a unit are conserved with their signs only; here one sign of two is another.
        kind = Scaling()
        legs = tuple(row for leg in symmetry.legs for row in _one_sign_flipped(leg, products))
    elif isinstance(products, OuterProduct) or products.faces == "entries":
        if plus and minus:
            legs = tuple(replace(leg, degree=abs(leg.degree)) for leg in symmetry.legs)
    elif plus and minus and plus[0].view.m == minus[0].view.m:
        legs = tuple(_entrywise(leg) for leg in (plus[0], minus[0]))
    if legs:
        yield replace(symmetry, kind=kind, legs=legs, family=f"not_{symmetry.family}", epsilon=0.0)


def _one_sign_flipped(leg: Leg, products: Products) -> Iterator[Leg]:
    """Yield the squares of two rows of each unit, one with the sign that it has in the law and one with the other."""
    rows = tuple(range(leg.view.faced)) if leg.view.rows is None else leg.view.rows
    first, second = products.squared_rows()[0][:2]
    for (which, sign), flip in ((first, 1), (second, -1)):
        yield Leg(replace(leg.view, rows=rows[which :: products.unit]), flip * sign)


def _entrywise(leg: Leg) -> Leg:
    """Return the leg with a row for every entry, in the order of the view."""
    view = leg.view
    return Leg(replace(view, axes=view.axes + view.rest), leg.degree)


def _first_row(leg: Leg) -> Leg:
    """Return the first of the rows whose sum is conserved."""
    view = leg.view
    pick = tuple((0, 1) if axis in view.axes else chosen for axis, chosen in enumerate(view.pick))
    return Leg(replace(view, pick=pick), leg.degree)
