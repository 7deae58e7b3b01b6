"""Residual layers: norms before their branches, after them, or both, and branches in a row or side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from conserved.kind import OneScale, Translation
from conserved.laws import Dropped
from conserved.recognize.norms import Writer, centre, gain_against, norm_at, residual_stream
from conserved.recognize.registry import reads, stranger_above, writes
from conserved.recognize.site import Norm, Site, Unreadable
from conserved.symmetry import Symmetry
from conserved.view import View


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """x ↦ x + after(dropout(body(norm(x)))), with `after` a second norm if there is one.

    `reads` and `writes` say how the body does; a body that is no module of its own brings its own two.
    """

    norm: Site
    body: Site
    after: Site | None = None
    dropout: float = 0.0
    reads: Callable[[Site], Iterable[View]] = reads
    writes: Callable[[Site], Iterable[View]] = writes

    def writer(self) -> Writer:
        """What it adds to the stream."""
        if self.after is not None:
            return Writer.of(self.after)
        return Writer.made_by(list(self.writes(self.body)), dropout=self.dropout)

    def biases(self) -> list[View]:
        """The constant it adds to the stream."""
        return [] if self.after is not None else [v for v in self.writes(self.body) if len(v.shape) == 1]


def pre_norm_layer(layer: Site, branches: Sequence[Branch], *, parallel: bool = False) -> Iterator[Symmetry | Dropped]:
    """Each norm against its branch; a norm after a branch, which forgets its scale; biases that add up."""
    for branch in branches:
        yield from gain_against(branch.norm, lambda one=branch: one.reads(one.body))  # type: ignore[misc]
        if branch.after is not None:
            yield from forgotten(branch)
    for first, second in pairwise(branches):
        part = second.norm.path.rpartition(".")[2] if len(branches) > 2 else ""
        yield from _common_bias(layer, first, second, parallel=parallel, part=part)


def _common_bias(
    layer: Site, first: Branch, second: Branch, *, parallel: bool, part: str
) -> Iterator[Symmetry | Dropped]:
    """Two branches add constants to the stream. Side by side, any vector can move from one bias to the other.

    In a row, the norm between them reads the first: if it centres, c·**1** can still move.
    """
    family = "bias_shift" if parallel else "bias_centre"
    try:
        if not parallel and not norm_at(second.norm).centres:
            return
        biases = [*first.biases(), *second.biases()]
    except Unreadable as problem:
        yield Dropped(layer.join(family), str(problem))
        return
    if len(biases) != 2:
        return
    dropout = max(first.dropout, second.dropout)
    if dropout:
        yield Dropped(layer.join(family), f"dropout of {dropout:g} follows the two biases")
        return
    if parallel:
        biases = [View.of(bias.parameter, bias.shape, grid=(1, *bias.shape)) for bias in biases]
    yield layer.symmetry(family, Translation(), plus=biases[:1], minus=biases[1:], part=part)


def forgotten(branch: Branch) -> Iterator[Symmetry | Dropped]:
    """A norm right behind a branch forgets the scale of what it writes, and its mean if it centres."""
    body = branch.body
    assert branch.after is not None
    try:
        norm, views = norm_at(branch.after), list(branch.writes(body))
    except Unreadable as problem:
        yield Dropped(body.join("output_scale"), str(problem))
        return
    yield body.symmetry("output_scale", OneScale(), plus=views, minus=[], epsilon=norm.epsilon)
    if norm.centres:
        yield from centre(body, [Writer.made_by(views, dropout=branch.dropout)])


def pre_norm_stack(
    model: Site, sources: Sequence[Writer], branches: Sequence[Branch], final: Site, *, fixed: bool = False
) -> Iterator[Symmetry | Dropped]:
    """The residual stream of a whole model: what starts it, every branch, and the norm at its end."""
    stranger = stranger_above(model)
    if stranger and not fixed:
        yield Dropped(model.join("stream_scale"), stranger)
        fixed = True
    try:
        norms: list[Norm] = [norm_at(branch.norm) for branch in branches] + [norm_at(final)]
        writers = [*sources, *(branch.writer() for branch in branches)]
    except Unreadable as problem:
        yield Dropped(model.join("stream"), str(problem))
        return
    yield from residual_stream(model, writers, norms, fixed=fixed)


def post_norm_sum(
    block: Site, start: Sequence[View], readers: Sequence[View], writer: Writer, norm: Norm, *, part: str = ""
) -> Iterator[Symmetry | Dropped]:
    """norm(x + body(x)): the norm forgets the mean of what the body writes, and the scale of the whole sum.

    `start` is what makes x (the gain and bias of the norm before). Scaled together with what the body writes, and
    against all that reads x in the body, only the sum is scaled. Empty if x comes from outside.
    """
    if norm.centres:
        yield from centre(block, [writer])
    if start:
        plus = [*start, *writer.views]
        yield block.symmetry("sum_scale", OneScale(), plus=plus, minus=list(readers), part=part, epsilon=norm.epsilon)
