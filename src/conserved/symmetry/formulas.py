"""Laws as formulas, in plain text and in LaTeX: read off the products that a kind of group is made of."""

from __future__ import annotations

from collections.abc import Iterable

from conserved.symmetry.kind import Degree, Kind
from conserved.symmetry.products import RowProducts
from conserved.symmetry.view import View


def formula(kind: Kind, legs: Iterable[tuple[View, Degree, bool]], *, latex: bool) -> str:
    """Return the law of a kind on legs, each a view, its degree, and whether a logarithm is added to it."""
    pieces: list[str] = []
    for view, degree, logarithmic in legs:
        # Of a leg that is shifted μ(θ, θ) has both orders: 2 ⟨1, θ⟩.
        size = abs(degree) * (2 if logarithmic else 1)
        weight = "" if size == 1 else f"{size:g}" + (r"\," if latex else "·")
        minus = "-" if latex else "−"
        joint = ("" if degree > 0 else minus) if not pieces else (" + " if degree > 0 else f" {minus} ")
        term = _total(kind, view, latex=latex) if logarithmic else _term(kind, view, latex=latex)
        pieces.append(f"{joint}{weight}{term}")
    return "".join(pieces)


def _total(kind: Kind, view: View, *, latex: bool) -> str:
    """Return the sum of what a scale reads of one leg: of each row, or of all entries."""
    by_row = kind.products.faces == "rows"
    face = view.row("i", latex=latex) if by_row else view.text(latex=latex)
    single = view.m == 1 if by_row else view.n * view.m == 1
    return face if single else (r"\sum " if latex else "Σ ") + face


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
    if products.faces != "rows":
        return _square(face, view.n * view.m, latex=latex)
    if products.unit == 1:
        return _square(view.row("i", latex=latex), view.m, latex=latex)
    laws = products.squared_rows()
    face += "^{(j)}" if latex else "⁽ʲ⁾"
    if len(laws) == 1 and [sign for _, sign in laws[0]] == [1] * products.unit:
        return _square(face, products.unit, latex=latex)
    terms = [_signed_squares(face, rows, view.m, latex=latex) for rows in laws]
    return f"({', '.join(terms)})"


def _square(face: str, entries: int, *, latex: bool) -> str:
    """Return the square of a number, or the squared norm of several."""
    if entries == 1:
        return face + ("^{2}" if latex else "²")
    return rf"\lVert {face} \rVert^{{2}}" if latex else f"‖{face}‖²"


def _signed_squares(face: str, rows: Iterable[tuple[int, int]], entries: int, *, latex: bool) -> str:
    """Return squares of single rows of a unit with their signs, as ‖q⁽ʲ⁾[0]‖² − ‖q⁽ʲ⁾[1]‖²."""
    text = ""
    for row, sign in rows:
        joint = (" + " if text else "") if sign > 0 else (" - " if latex else " − ") if text else "-" if latex else "−"
        text += joint + _square(f"{face}[{row}]", entries, latex=latex)
    return text
