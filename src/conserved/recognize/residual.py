"""Residual layers: norms before their branches, after them, or both, and branches in a row or side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from conserved.kind import OneScale
from conserved.laws import Dropped
from conserved.recognize.norms import Writer, bias_centre, bias_shift, centre, gain, norm_at, residual_stream
from conserved.recognize.registry import reads, writes
from conserved.recognize.site import Norm, Site, Unreadable
from conserved.symmetry import Symmetry
from conserved.view import View


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """x ↦ x + after(dropout(body(norm(x)))), with `after` a second norm if there is one."""

    norm: Site
    body: Site
    after: Site | None = None
    dropout: float = 0.0

    def writer(self) -> Writer:
        """What it adds to the stream."""
        return Writer.of(self.body if self.after is None else self.after, dropout=self.dropout)


def pre_norm_layer(layer: Site, branches: Sequence[Branch], *, parallel: bool = False) -> Iterator[Symmetry | Dropped]:
    """Each norm against its branch; a norm after a branch, which forgets its scale; biases that add up."""
    for branch in branches:
        yield from gain(branch.norm, [branch.body])
        if branch.after is not None:
            yield from forgotten(branch.body, branch.after)
    for first, second in pairwise(branches):
        dropout = max(first.dropout, second.dropout)
        if first.after is not None or second.after is not None:
            continue
        if parallel:
            yield from bias_shift(layer, first.body, second.body, dropout=dropout)
        else:
            yield from bias_centre(layer, first.body, second.norm, second.body, dropout=dropout)


def forgotten(body: Site, after: Site) -> Iterator[Symmetry | Dropped]:
    """A norm right behind a module forgets the scale of what the module writes, and its mean if it centres."""
    try:
        norm, views = norm_at(after), writes(body)
    except Unreadable as problem:
        yield Dropped(body.join("output_scale"), str(problem))
        return
    yield body.symmetry("output_scale", OneScale(), plus=views, minus=[], epsilon=norm.epsilon)
    if norm.centres:
        yield from centre(body, [Writer(views=views, shiftable=views)])


def pre_norm_stack(
    model: Site, sources: Sequence[Writer], branches: Sequence[Branch], final: Site, *, fixed: bool = False
) -> Iterator[Symmetry | Dropped]:
    """The residual stream of a whole model: what starts it, every branch, and the norm at its end."""
    try:
        norms: list[Norm] = [norm_at(branch.norm) for branch in branches] + [norm_at(final)]
        writers = [*sources, *(branch.writer() for branch in branches)]
    except Unreadable as problem:
        yield Dropped(model.join("stream"), str(problem))
        return
    yield from residual_stream(model, writers, norms, fixed=fixed)


def post_norm_segment(
    block: Site, start: Sequence[View], body: Site, norm: Site, *, dropout: float = 0.0
) -> Iterator[Symmetry | Dropped]:
    """norm(x + dropout(body(x))): the norm forgets the mean of what the body writes, and the scale of the whole sum.

    `start` is what makes x (the gain and bias of the norm before). Scaled together with what the body writes, and
    against all that reads x in the body, only the sum is scaled. Empty if x comes from outside.
    """
    try:
        forgets, writer, readers = norm_at(norm), Writer.of(body, dropout=dropout), reads(body)
    except Unreadable as problem:
        yield Dropped(block.join("sum"), str(problem))
        return
    if forgets.centres:
        yield from centre(block, [writer])
    if start:
        plus = [*start, *writer.views]
        yield block.symmetry("sum_scale", OneScale(), plus=plus, minus=readers, epsilon=forgets.epsilon)
