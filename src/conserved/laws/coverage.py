"""How much of a model its laws span: a share of the trained parameters, and the same as a tree of modules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from conserved.symmetry import Symmetry, View

LARGEST = 4_000_000
"""Entries of the largest parameter of which each entry is looked at; of larger ones overlaps of legs are not seen."""


class Coverage(float):
    """The share of trained parameters that some law spans; `.tree` prints it by module."""

    spanned: Mapping[str, int]
    trained: Mapping[str, int]

    @staticmethod
    def of(symmetries: Iterable[Symmetry], parameters: Mapping[str, Tensor]) -> Coverage:
        """The coverage of parameters by symmetries.

        Args:
            symmetries: their legs are what is covered.
            parameters: the model's own, by name; those without `requires_grad` are not counted.
        """
        trained = {name: p.numel() for name, p in parameters.items() if p.requires_grad}
        legs: dict[str, set[View]] = defaultdict(set)
        for symmetry in symmetries:
            for leg in symmetry.legs:
                legs[leg.view.parameter].add(leg.view.squeezed())
        spanned = {name: _entries(legs[name], size) if name in legs else 0 for name, size in trained.items()}
        total = sum(trained.values())
        found = Coverage(sum(spanned.values()) / total if total else 0.0)
        found.spanned, found.trained = spanned, trained
        return found

    @property
    def tree(self) -> str:
        """The share of every module's parameters that laws span, nested as the modules are."""
        lines: list[tuple[str, int, int]] = []

        def visit(prefix: str, depth: int, name: str) -> None:
            mine = [p for p in self.trained if p == prefix or p.startswith(f"{prefix}.") or not prefix]
            lines.append(("  " * depth + name, sum(self.spanned[p] for p in mine), sum(self.trained[p] for p in mine)))
            start = f"{prefix}." if prefix else ""
            for child in dict.fromkeys(p[len(start) :].split(".")[0] for p in mine if p != prefix):
                visit(f"{start}{child}", depth + 1, child)

        visit("", 0, "model")
        width = max(len(name) for name, _, _ in lines)
        return "\n".join(
            f"{name:{width}s}  {'·' if covered == 0 else f'{covered / max(1, size):4.0%}':>4s}  of {size:,}"
            for name, covered, size in lines
        )


def _entries(views: Iterable[View], size: int) -> int:
    """How many entries of a parameter are in one of the views."""
    counts = [view.n * view.m for view in views]
    if max(counts) >= size or size > LARGEST or len(counts) == 1:
        return min(size, sum(counts))
    mask = torch.zeros(size, dtype=torch.bool)
    for view in views:
        mask[view.matrix(torch.arange(size).reshape(view.shape)).reshape(-1)] = True
    return int(mask.sum())
