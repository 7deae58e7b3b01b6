"""How much of a model its laws span: a share of trained parameters, of their gradients' directions, and by module."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from conserved.symmetry import Symmetry, View

LARGEST = 4_000_000
"""Largest parameter, in entries, for which overlaps of legs are resolved; in larger ones they count twice."""


class Coverage(float):
    """The share of trained parameters that some law spans; `.tree` prints it by module.

    An entry that a law spans is compared with others, and not determined by them: `directions` is the share of the
    gradients' directions in which an error would change an identity.
    """

    spanned: Mapping[str, int]
    trained: Mapping[str, int]
    constrained: Mapping[str, int]

    @property
    def directions(self) -> float:
        """The share of all directions of the trained parameters' gradients that identities constrain."""
        total = sum(self.trained.values())
        return sum(self.constrained.values()) / total if total else 0.0

    @staticmethod
    def of(symmetries: Iterable[Symmetry], parameters: Mapping[str, Tensor]) -> Coverage:
        """Return the coverage of parameters by symmetries.

        Args:
            symmetries: their legs are what is covered.
            parameters: the model's own, by name; those without `requires_grad` are not counted.
        """
        symmetries = list(symmetries)
        trained = {name: p.numel() for name, p in parameters.items() if p.requires_grad}
        legs: dict[str, set[View]] = defaultdict(set)
        for symmetry in symmetries:
            for leg in symmetry.legs:
                legs[leg.view.parameter].add(leg.view.squeezed())
        spanned = {name: _entries(legs[name], tuple(parameters[name].shape)) if name in legs else 0 for name in trained}
        total = sum(trained.values())
        result = Coverage(sum(spanned.values()) / total if total else 0.0)
        result.spanned, result.trained = spanned, trained
        result.constrained = constrained_directions(symmetries, spanned)
        return result

    @property
    def tree(self) -> str:
        """The share of every module's parameters that laws span, nested as the modules are."""
        lines: list[tuple[str, int, int]] = []

        def visit(prefix: str, depth: int, name: str) -> None:
            below = [p for p in self.trained if p == prefix or p.startswith(f"{prefix}.") or not prefix]
            lines.append(
                ("  " * depth + name, sum(self.spanned[p] for p in below), sum(self.trained[p] for p in below))
            )
            start = f"{prefix}." if prefix else ""
            for child in dict.fromkeys(p[len(start) :].split(".")[0] for p in below if p != prefix):
                visit(f"{start}{child}", depth + 1, child)

        visit("", 0, "model")
        width = max(len(name) for name, _, _ in lines)
        return "\n".join(
            f"{name:{width}s}  {'·' if covered == 0 else f'{covered / max(1, size):4.0%}':>4s}  of {size:,}"
            for name, covered, size in lines
        )


def constrained_directions(symmetries: Iterable[Symmetry], spanned: Mapping[str, int]) -> dict[str, int]:
    r"""Count, for each parameter, the directions of its gradient that identities constrain.

    The identities of one symmetry are linear in the gradient G of a parameter: G ↦ μ(θ, G). Their rank is the number of
    identities, or the number of entries that the legs have there if that is smaller: n² identities of GL(n) against a
    leg of n × m entries, n of n × m for a scale of each row, m of n × m for a sum over n rows. Identities of different
    symmetries overlap in few directions (the trace of a matrix counts for its rows and for its columns), so the sum,
    cut off at the number of entries, is an upper bound that is nearly reached.

    Args:
        symmetries: the symmetries whose identities count.
        spanned: by name, the entries of each parameter that some leg sees; names that are missing are not counted.
    """
    ranks = dict.fromkeys(spanned, 0)
    for symmetry in symmetries:
        entries: dict[str, int] = defaultdict(int)
        for leg in symmetry.legs:
            entries[leg.view.parameter] += leg.view.n * leg.view.m
        for name, count in entries.items():
            if name in ranks:
                ranks[name] += min(symmetry.identities, count)
    return {name: min(rank, spanned[name]) for name, rank in ranks.items()}


def _entries(views: Collection[View], shape: tuple[int, ...]) -> int:
    """Return how many entries of a parameter are in one of the views; overlaps count twice in large parameters."""
    total = prod(shape)
    return seen_entries(frozenset(views), shape) if total <= LARGEST else min(total, sum(v.n * v.m for v in views))


@lru_cache(maxsize=1 << 14)
def seen_entries(views: frozenset[View], shape: tuple[int, ...]) -> int:
    """Return how many entries of a parameter of this shape some view sees.

    A mask of all entries is made, once: every audit of a run asks the same, and a mask of 10⁸ entries takes as long as
    the audit itself.

    Args:
        views: views of the parameter.
        shape: its shape.

    Returns:
        The number of entries in the union of the views.
    """
    total = prod(shape)
    if not views or any(view.n * view.m >= total for view in views):
        return total if views else 0
    seen = torch.zeros(shape, dtype=torch.bool)
    for view in views:
        part = view.face(seen)
        if view.rows is None:
            part.fill_(True)
        else:
            flags = torch.zeros(view.faced, dtype=torch.bool)
            flags[list(view.rows)] = True
            part |= flags.reshape(part.shape[: len(view.axes)] + (1,) * (part.ndim - len(view.axes)))
    return int(seen.sum())
