r"""Derivatives of gradient fields and of their brackets, for many samples at once, by plain reverse mode.

Let φ_i(θ) = ⟨f(x_i; θ), v_i⟩. Every derivative that a nested bracket needs is the gradient of a derivative of some φ_i
along fixed directions,

    L_i[d_1, …, d_m] = ∇ (D^m φ_i [d_1, …, d_m]),        L_i[] = X_i, the gradient field itself,

and reverse mode gives each from the one with a direction less: L_i[…, d] = ∇ ⟨L_i[…], d⟩. How fields made of others
change along directions follows from the product rule: the field DE·B, the derivative of E along B, has

    D^m (DE·B) [d_1, …, d_m] = Σ_{T ⊂ {1, …, m}} D^{m − |T| + 1} E [d_k (k ∉ T), D^{|T|} B [d_k (k ∈ T)]].

Samples are rows: each has a copy of θ, so one backward pass of the sum over samples gives the gradients of all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import combinations
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from conserved._torch_compat import tree_map
from conserved.discovery.function import ParameterFunction

FieldRows = Float[Tensor, "count D"]


def one_of(samples: Any, index: int) -> Any:
    """Return one of several stacked samples."""
    return tree_map(lambda part: part[index] if isinstance(part, Tensor) else part, samples)


class Derivatives:
    """Derivatives of gradient fields at given points, one sample (x, v) of every letter for each point.

    Each is computed once. `order` is how many directions are asked for at most, beyond which no graph is kept.
    """

    def __init__(self, function: ParameterFunction, points: FieldRows, letters: Sequence[Any], order: int) -> None:
        self._order = order
        self._points: list[Tensor] = []
        self._sums: list[Tensor] = []
        self._known: dict[tuple[Any, ...], Tensor] = {}
        # Directions are compared by identity, so none may be freed and its address reused.
        self._numbers: dict[int, int] = {}
        self._kept: list[Tensor] = []
        with torch.enable_grad():
            for x, v in letters:
                point = points.detach().requires_grad_()
                self._points.append(point)
                self._sums.append((outputs_at(function, point, x) * v).sum())

    def letter(self, index: int, directions: tuple[FieldRows, ...]) -> FieldRows:
        """Return L_i[d_1, …, d_m].

        It does not depend on the order of the directions, so those known longest come first.
        """
        directions = tuple(sorted(directions, key=self._number))
        return self.once(index, directions, lambda: self._gradient_of(index, directions))

    def once(self, identifier: Hashable, directions: tuple[FieldRows, ...], compute: Callable[[], Tensor]) -> FieldRows:
        """Return a derivative along directions that was computed before, or is now."""
        key = (identifier, *map(self._number, directions))
        if key not in self._known:
            self._known[key] = compute()
        return self._known[key]

    def _number(self, direction: FieldRows) -> int:
        if id(direction) not in self._numbers:
            self._numbers[id(direction)] = len(self._kept)
            self._kept.append(direction)
        return self._numbers[id(direction)]

    def _gradient_of(self, index: int, directions: tuple[FieldRows, ...]) -> FieldRows:
        point = self._points[index]
        with torch.enable_grad():
            if directions:
                total = torch.tensordot(self.letter(index, directions[:-1]), directions[-1].detach(), 2)
            else:
                total = self._sums[index]
            if not total.requires_grad:
                return torch.zeros_like(point)
            more = len(directions) < self._order
            (gradient,) = torch.autograd.grad(total, point, create_graph=more, retain_graph=True, allow_unused=True)
        return torch.zeros_like(point) if gradient is None else gradient


def outputs_at(function: ParameterFunction, points: FieldRows, x: Any) -> Float[Tensor, "count out"]:
    """Return f at rows of parameters, each with an input of its own: vectorised, or one by one where vmap cannot."""
    stacked = tree_map(lambda part: 0 if isinstance(part, Tensor) else None, x)

    # A function with a name: vmap prints an unnamed one with all tensors it holds.
    def evaluate(point: Tensor, sample: Any) -> Tensor:
        return function(point, sample)

    try:
        result: Tensor = torch.func.vmap(evaluate, in_dims=(0, stacked))(points, x)
    except (RuntimeError, NotImplementedError) as problem:
        if "out of memory" in str(problem).lower():
            raise
        return torch.stack([function(point, one_of(x, index)) for index, point in enumerate(points)])
    return result


FieldDerivatives = Callable[[Derivatives, tuple[FieldRows, ...]], FieldRows]
"""A field as its derivatives: D^m E [d_1, …, d_m] at the points, its value for no directions."""


def letter(index: int) -> FieldDerivatives:
    """Return the gradient field of one letter of each word."""
    return lambda at, directions: at.letter(index, directions)


def along(outer: FieldDerivatives, inner: FieldDerivatives) -> FieldDerivatives:
    """Return DE·B, the derivative of one field along another."""

    def derivative(at: Derivatives, directions: tuple[FieldRows, ...]) -> FieldRows:
        indices = range(len(directions))
        parts = []
        for size in range(len(directions) + 1):
            for chosen in combinations(indices, size):
                direction = _value(inner, at, tuple(directions[k] for k in chosen))
                others = tuple(directions[k] for k in indices if k not in chosen)
                parts.append(_value(outer, at, (*others, direction)).detach())
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    return derivative


def bracket(field: FieldDerivatives, base: FieldDerivatives) -> FieldDerivatives:
    """Return [A, X] = DX·A − DA·X."""
    forward, backward = along(base, field), along(field, base)
    return lambda at, directions: _value(forward, at, directions) - _value(backward, at, directions)


def _value(field: FieldDerivatives, at: Derivatives, directions: tuple[FieldRows, ...]) -> FieldRows:
    return at.once(field, directions, lambda: field(at, directions))
