"""Attention heads, however their projections are stored: queries against keys, values against the output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from conserved.kind import ComplexScaling, GeneralLinear, OneScale, Scaling, Translation
from conserved.recognize.site import Linear, Norm, Site
from conserved.symmetry import Symmetry
from conserved.view import Pick, View

Pairing = Literal["interleaved", "half"]
"""Which features rotary positions turn together: (2j, 2j + 1), or (j, j + half the width)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The outputs (or inputs) of an affine map as heads.

    `grid` unflattens those features, the last axis being a head; `at` picks each head on the axes before it. `span`
    narrows every head to a range of its features.

    | stored as | grid | head h is at |
    |---|---|---|
    | heads in a row | (H, width) | h |
    | grouped: R query heads to a key head | (G, R, width) | h // R, h % R |
    | queries, keys, values stacked (GPT-2) | (3, H, width) | which, h |
    | queries, keys, values interleaved (GPT-NeoX) | (H, 3, width) | h, which |
    | H queries, then G keys, then G values (Phi-3) | (H + 2G, width) | start + h |
    """

    affine: Linear
    grid: tuple[int, ...]
    at: tuple[tuple[int, ...], ...]
    span: tuple[int, int] | None = None
    side: Literal["outputs", "inputs"] = "outputs"

    @staticmethod
    def row(
        affine: Linear,
        heads: int,
        width: int,
        *,
        groups: int | None = None,
        side: Literal["outputs", "inputs"] = "outputs",
    ) -> Heads:
        """Heads one after the other; with `groups`, as that many groups of equally many heads."""
        sizes = (heads,) if groups is None else (groups, heads // groups)
        return Heads(affine=affine, grid=(*sizes, width), at=tuple(product(*indices(sizes))), side=side)

    @property
    def width(self) -> int:
        """Features of a head that are meant."""
        start, stop = self.span or (0, self.grid[-1])
        return stop - start

    def within(self, start: int, stop: int) -> Heads:
        """The same heads, narrowed to features from `start` to before `stop`."""
        return self if (start, stop) == (0, self.grid[-1]) else replace(self, span=(start, stop))

    def views(self, head: int, pairing: Pairing | None = None) -> list[View]:
        """One head's rows of the weight, and of the bias where outputs are meant; rotary planes side by side."""
        last = len(self.grid) - 1
        grid: tuple[int, ...] = self.grid
        axes: tuple[int, ...] = (last,)
        rows: tuple[int, ...] | None = None
        pick = self._pick(head)
        if pairing is not None and self.span is None:
            pairs, axes = planes(self.grid[-1], pairing)
            grid, axes = (*self.grid[:-1], *pairs), tuple(last + axis for axis in axes)
        elif pairing is not None:
            rows = paired(self.width, pairing)
        if self.side == "outputs":
            return self.affine.outputs(grid, axes, pick, rows)
        return self.affine.inputs(grid, axes, pick, rows)

    def _pick(self, head: int) -> dict[int, Pick]:
        pick: dict[int, Pick] = dict(enumerate(self.at[head]))
        return pick if self.span is None else pick | {len(self.grid) - 1: self.span}

    def biases(self) -> Iterator[tuple[str, View]]:
        """The bias as one row for all heads where they are everything the map makes, else a row for each head."""
        name, grid = self.affine.bias, (1, *self.grid)
        if self.span is None and list(self.at) == list(product(*indices(self.grid[:-1]))):
            yield "", self.affine.site.view(name, grid=grid)
            return
        for head in range(len(self.at)):
            pick = {1 + axis: chosen for axis, chosen in self._pick(head).items()}
            yield str(head), self.affine.site.view(name, grid=grid, pick=pick)


def indices(sizes: Sequence[int]) -> list[range]:
    """All indices along each axis."""
    return [range(size) for size in sizes]


def planes(width: int, pairing: Pairing) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """How a head's features split into rotary planes, and the order that puts the two of a plane side by side."""
    return ((width // 2, 2), (0, 1)) if pairing == "interleaved" else ((2, width // 2), (1, 0))


def paired(width: int, pairing: Pairing) -> tuple[int, ...]:
    """The features of a head, the two of each plane side by side."""
    if pairing == "interleaved":
        return tuple(range(width))
    return tuple(feature for j in range(width // 2) for feature in (j, j + width // 2))


def query_key(
    site: Site, queries: Heads, keys: Heads, *, turned: int = 0, pairing: Pairing = "half", shift_seen: bool = False
) -> Iterator[Symmetry]:
    """Scores see q·k only, so any g with its g^{-T} cancels; rotary leaves the g that commute with its phases.

    A key head that several query heads share is one leg against all of theirs. The first `turned` features of a head
    carry rotary positions. `shift_seen` says that a shift of a whole row of scores is not invisible (a cap on scores,
    a key that no projection makes): then the bias of the other features is not inert.
    """
    width = keys.width
    if turned:
        yield from scores(site, queries.within(0, turned), keys.within(0, turned), pairing)
    if turned < width:
        unturned = keys.within(turned, width)
        family = "query_key_unturned" if turned else "query_key"
        yield from scores(site, queries.within(turned, width), unturned, None, family=family)
        if not shift_seen:
            yield from inert_bias(unturned)


def scores(
    site: Site, queries: Heads, keys: Heads, pairing: Pairing | None, *, family: str = "query_key"
) -> Iterator[Symmetry]:
    """The part of q·k that these features make: one symmetry for each key head, on all query heads that it serves."""
    repeat = len(queries.at) // len(keys.at)
    for group in range(len(keys.at)):
        yield site.symmetry(
            family,
            GeneralLinear() if pairing is None else ComplexScaling(),
            plus=[view for one in range(repeat) for view in queries.views(group * repeat + one, pairing)],
            minus=keys.views(group, pairing),
            part=str(group),
        )


def inert_bias(keys: Heads) -> Iterator[Symmetry]:
    """q·b_k is the same for every key, and softmax does not see a shift of a whole row: b_k has no gradient."""
    if keys.affine.site.has(keys.affine.bias):
        for part, view in keys.biases():
            yield keys.affine.site.symmetry("inert_bias", Translation(), plus=[view], minus=[], part=part)


def forgotten_scales(site: Site, family: str, heads: Heads, norm: Norm) -> Iterator[Symmetry]:
    """A norm on each head forgets the head's scale, up to its ε."""
    for head in range(len(heads.at)):
        yield site.symmetry(family, OneScale(), plus=heads.views(head), minus=[], part=str(head), epsilon=norm.epsilon)


def query_key_gain(site: Site, query: Norm, key: Norm, pairing: Pairing | None) -> Iterator[Symmetry]:
    """What is left between normalised queries and keys are the two gains.

    With rotary a gain may only be scaled plane by plane: turning it does not commute with the entrywise product.
    """
    if not query.gain() or not key.gain():
        return
    width = query.gain()[0].n
    grid, axes = ((width,), (0,)) if pairing is None else planes(width, pairing)
    legs = [
        norm.site.view("weight", grid=grid, axes=axes[:1], shape=(width,), offset=norm.offset) for norm in (query, key)
    ]
    yield site.symmetry("query_key_gain", Scaling(), plus=legs[:1], minus=legs[1:])


def value_output(site: Site, values: Heads, outputs: Heads) -> Iterator[Symmetry]:
    """Between values and output projection there are only linear maps and sums, so all of GL(width) cancels."""
    repeat = len(outputs.at) // len(values.at)
    for group in range(len(values.at)):
        yield site.symmetry(
            "value_output",
            GeneralLinear(),
            plus=values.views(group),
            minus=[view for one in range(repeat) for view in outputs.views(group * repeat + one)],
            part=str(group),
        )
