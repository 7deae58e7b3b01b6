"""Quantities that look like laws and are not: the baselines of the paper's Appendix E.2.

They are forms of the same legs with a sign or a pairing spoiled, so they cost the same and are measured the same way.
Under gradient descent at a fixed flow time a law's drift vanishes with the step size; a baseline's does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from conserved.symmetry import Leg, OuterProduct, Scaling, Symmetry


def spoil(symmetries: Iterable[Symmetry]) -> tuple[Symmetry, ...]:
    """Return one spoiled form for every law that has one."""
    return tuple(form for symmetry in symmetries for form in _spoil(symmetry))


def _spoil(symmetry: Symmetry) -> Iterator[Symmetry]:
    """Spoil the sign or the pairing that the products of the kind depend on."""
    legs: tuple[Leg, ...] = ()
    kind, products = symmetry.kind, symmetry.kind.products
    unit, faces = products.unit, products.faces
    plus = [leg for leg in symmetry.legs if leg.degree > 0]
    minus = [leg for leg in symmetry.legs if leg.degree < 0]
    if kind.linear:
        # A single row is not conserved where the sum of all rows is.
        if len(symmetry.legs) == 1 and symmetry.n > 1:
            legs = (_first_row(symmetry.legs[0]),)
    elif unit > 1:
        # Only the sum over the rows of a unit is conserved, not the difference of two of them.
        kind = Scaling()
        legs = tuple(row for leg in symmetry.legs for row in _row_difference(leg, unit))
    elif isinstance(products, OuterProduct) or faces == "entries":
        if plus and minus:
            legs = tuple(replace(leg, degree=abs(leg.degree)) for leg in symmetry.legs)
    elif plus and minus and plus[0].view.m == minus[0].view.m:
        legs = tuple(_entrywise(leg) for leg in (plus[0], minus[0]))
    if legs:
        yield replace(symmetry, kind=kind, legs=legs, family=f"not_{symmetry.family}", epsilon=0.0)


def _row_difference(leg: Leg, unit: int) -> Iterator[Leg]:
    """Yield ‖first row of each unit‖² − ‖second row‖²."""
    rows = tuple(range(leg.view.faced)) if leg.view.rows is None else leg.view.rows
    for which, degree in ((0, 1), (1, -1)):
        yield Leg(replace(leg.view, rows=rows[which::unit]), degree)


def _entrywise(leg: Leg) -> Leg:
    """Return the leg with a row for every entry, in the order of the view."""
    view = leg.view
    return Leg(replace(view, axes=view.axes + view.rest), leg.degree)


def _first_row(leg: Leg) -> Leg:
    """Return the first of the rows whose sum is conserved."""
    view = leg.view
    pick = tuple((0, 1) if axis in view.axes else chosen for axis, chosen in enumerate(view.pick))
    return Leg(replace(view, pick=pick), leg.degree)
