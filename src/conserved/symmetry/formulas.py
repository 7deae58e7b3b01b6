"""Laws as formulas, in plain text and in LaTeX: read off the products that a kind of group is made of."""

from __future__ import annotations

from collections.abc import Iterable

from conserved.symmetry.kind import Degree, Kind
from conserved.symmetry.products import RowProducts
from conserved.symmetry.view import View


def formula(kind: Kind, legs: Iterable[tuple[View, Degree]], *, latex: bool) -> str:
    """Return the law of a kind on legs, each a view and its degree."""
    pieces: list[str] = []
    for view, degree in legs:
        weight = "" if abs(degree) == 1 else f"{abs(degree):g}" + (r"\," if latex else "·")
        minus = "-" if latex else "−"
        joint = ("" if degree > 0 else minus) if not pieces else (" + " if degree > 0 else f" {minus} ")
        pieces.append(f"{joint}{weight}{_term(kind, view, latex=latex)}")
    return "".join(pieces)


def _term(kind: Kind, view: View, *, latex: bool) -> str:
    """Return the law of one leg."""
    products, face = kind.products, view.text(latex=latex)
    if not isinstance(products, RowProducts):
        t, dot = (r"^{\top}", " ") if latex else ("ᵀ", "·")
        return f"{face}{t}{dot}{face}" if view.transposed else f"{face}{dot}{face}{t}"
    if not products.terms:
        return face
    if products.lifted:
        return face if view.n == 1 else (r"\sum_{i} " if latex else "Σᵢ ") + view.row("i", latex=latex)
    if products.faces == "rows":
        face = view.row("i", latex=latex) if products.unit == 1 else face + ("^{(j)}" if latex else "⁽ʲ⁾")
    return rf"\lVert {face} \rVert^{{2}}" if latex else f"‖{face}‖²"
