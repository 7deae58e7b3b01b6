"""A law as an explicit polynomial of degree two: h(θ) = ½ Σ a_ij θ_i θ_j + Σ b_i θ_i, what a certificate carries.

How it reads is computed from its terms and from the shapes of the parameters. Nothing that a file says about itself is
shown beside a verdict.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from conserved.output.printable import printable

Index = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One conserved number; its gradient is A θ + b with A symmetric and sparse."""

    quadratic: tuple[tuple[int, int, float], ...]
    """(i, j, a_ij), both (i, j) and (j, i)."""
    linear: tuple[tuple[int, float], ...]

    def gradient(self, theta: Sequence[Fraction]) -> list[Fraction]:
        """Return ∇h(θ), exactly."""
        result = [Fraction(0)] * len(theta)
        for i, j, a in self.quadratic:
            result[i] += Fraction(a) * theta[j]
        for i, b in self.linear:
            result[i] += Fraction(b)
        return result


def formula(forms: Sequence[Form], parameters: Mapping[str, Index]) -> str:
    """Return how the laws of one symmetry read, up to a factor: in one formula with letters, if they are alike.

    >>> pair = {"up": (2, 2), "down": (2, 2)}
    >>> one = Form(quadratic=((0, 0, 2.0), (1, 1, 2.0), (4, 4, -2.0), (6, 6, -2.0)), linear=())
    >>> other = Form(quadratic=((2, 2, 2.0), (3, 3, 2.0), (5, 5, -2.0), (7, 7, -2.0)), linear=())
    >>> formula([one], pair)
    '‖up[0,:]‖² − ‖down[:,0]‖²'
    >>> formula([one, other], pair)
    '‖up[i,:]‖² − ‖down[:,i]‖²'
    """
    entries = _EntryIndex(parameters)
    for norms in (True, False):
        read = [_read(form, entries, norms) for form in forms]
        if len({template for template, _ in read}) == 1:
            return _to_letters(read[0][0], [numbers for _, numbers in read])
    template, numbers = _read(forms[0], entries, True)
    return f"{_fill(template, [str(n) for n in numbers])}, and {len(forms) - 1} more"


class _EntryIndex:
    """Map from an index of θ to the parameter it belongs to and the index in that parameter."""

    def __init__(self, parameters: Mapping[str, Index]) -> None:
        self.names = list(parameters)
        self.shapes = list(parameters.values())
        self.starts = [0, *itertools.accumulate(map(prod, self.shapes))]

    def entry(self, index: int) -> tuple[int, Index]:
        which = bisect_right(self.starts, index) - 1
        rest, indices = index - self.starts[which], []
        for size in reversed(self.shapes[which]):
            rest, last = divmod(rest, size)
            indices.append(last)
        return which, tuple(reversed(indices))


_HOLE = "\0"
Read = tuple[str, list[int]]
"""A formula with a hole for every index, and the indices."""


def _read(form: Form, entries: _EntryIndex, norms: bool) -> Read:
    """Return terms with one coefficient between the same parameters, together; coefficients relative to the first."""
    terms: dict[tuple[int, ...], dict[float, list[tuple[Index, ...]]]] = {}
    for i, j, a in form.quadratic:
        if i <= j and a:
            (p, first), (q, right) = entries.entry(i), entries.entry(j)
            square = (int(i != j),) if norms else ()
            value = a / 2 if i == j else a
            terms.setdefault((p, q, *square), {}).setdefault(value, []).append((first, right))
    for i, b in form.linear:
        if b:
            p, where = entries.entry(i)
            terms.setdefault((p,), {}).setdefault(b, []).append((where,))
    pieces = [(value, key, sorted(result)) for key, groups in terms.items() for value, result in groups.items()]
    if not pieces:
        return "0", []
    text, numbers = "", list[int]()
    unit = abs(pieces[0][0])
    for value, key, result in pieces:
        size = abs(value) / unit
        sign = ("−" if value < 0 else "") if not text else (" − " if value < 0 else " + ")
        term, indices = _term(key, result, entries)
        text += sign + ("" if size == 1 else f"{size:.6g}·") + term
        numbers += indices
    return text, numbers


def _term(key: tuple[int, ...], indices: list[tuple[Index, ...]], entries: _EntryIndex) -> Read:
    names = [printable(entries.names[which]).replace(_HOLE, "") for which in key[:2]]
    sides = [_slice([entry[side] for entry in indices], entries.shapes[key[side]]) for side in range(len(indices[0]))]
    if len(key) == 1:
        if sides[0] is None:
            return f"Σ of {len(indices)} entries of {names[0]}", []
        return f"{'Σ' if len(indices) > 1 else ''}{names[0]}{sides[0][0]}", sides[0][1]
    squares = all(left == right for left, right in indices)
    if any(side is None for side in sides) or [e[1] for e in indices] != sorted(e[1] for e in indices):
        description = f"squares of {names[0]}" if squares else f"products {names[0]}·{names[1]}"
        return f"Σ of {len(indices)} {description}", []
    (a, first), (b, second) = sides  # type: ignore[misc]
    if squares and len(key) == 3:
        return (f"‖{names[0]}{a}‖²" if len(indices) > 1 else f"{names[0]}{a}²"), first
    return f"⟨{names[0]}{a}, {names[1]}{b}⟩", [*first, *second]


def _slice(entries: list[Index], shape: Index) -> Read | None:
    """Return the entries as one slice of the parameter, if they are one."""
    axes = [sorted({entry[axis] for entry in entries}) for axis in range(len(shape))]
    if prod(map(len, axes)) != len(entries) or len(set(entries)) != len(entries):
        return None
    if all(len(axis) == size for axis, size in zip(axes, shape, strict=True)):
        return "", []
    parts, numbers = [], list[int]()
    for axis, size in zip(axes, shape, strict=True):
        if len(axis) == size and size > 1:
            parts.append(":")
        elif len(axis) > 2 and axis == list(range(axis[0], axis[-1] + 1)):
            parts.append(f"{_HOLE}:{_HOLE}")
            numbers += [axis[0], axis[-1] + 1]
        else:
            parts.append(_HOLE if len(axis) == 1 else "{" + ",".join(_HOLE for _ in axis) + "}")
            numbers += axis
    return f"[{','.join(parts)}]", numbers


def _to_letters(template: str, rows: list[list[int]]) -> str:
    """Return indices that vary from law to law as letters, the same letter for those that vary together."""
    letters: dict[Index, str] = {}
    shown = []
    for column in zip(*rows, strict=True):
        if len(set(column)) == 1:
            shown.append(str(column[0]))
        else:
            shown.append(letters.setdefault(column, "ijklmnpqrstuvw"[len(letters) % 14] + "'" * (len(letters) // 14)))
    return _fill(template, shown)


def _fill(template: str, indices: Sequence[str]) -> str:
    parts = template.split(_HOLE)
    return "".join(part + index for part, index in itertools.zip_longest(parts, indices, fillvalue=""))
