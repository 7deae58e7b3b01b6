"""Rules of the checker for sums, norms, look-ups and what chooses entries: nothing may depend on what is left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from conserved.inference.checker_contractions import contracted, row_labels, with_bias
from conserved.inference.checker_places import placed
from conserved.inference.checker_rules import CheckedStep, image, labelled, rule, values_in
from conserved.inference.motions import (
    Array,
    Motion,
    MovedImage,
    Unchecked,
    Wrong,
    alike,
    level,
    need,
    same_numbers,
    spread,
    taken,
    transposed,
)

ALIKE = "what is summed does not move alike"


def axes_of(given: Any, rank: int) -> list[int]:
    """Axes as an argument names them; all of them if it names none."""
    if given is None or given == []:
        return list(range(rank))
    return sorted({axis % rank for axis in ([given] if isinstance(given, int) else given)}) if rank else []


@rule("sum", "mean")
def _total(step: CheckedStep) -> Motion:
    """What is summed moves alike; shifts are added up."""
    x = step.tensor(0)
    rank = len(x.shape)
    axes = axes_of(step.given(1, "dim"), rank) if "dim" in step.record["operation"] else list(range(rank))
    shape = step.shape()
    found = replace(level(x, axes, ALIKE, shifts=False), shape=shape)
    inner = prod(x.shape[axis] for axis in axes)
    scale = 1.0 / inner if step.name == "mean" and inner else 1.0
    kept = [axis for axis in range(rank) if axis not in axes]
    shift = None if x.shift is None else x.shift.reshape(x.shape).sum(tuple(axes)).reshape(-1) * scale
    images = []
    for one in x.images:
        turned = transposed(replace(x, mixed=None, images=(one,)), [*kept, *axes], (-1,)).images[0]
        labels, weights = turned.labels.reshape(-1, max(inner, 1)), turned.weights.reshape(-1, max(inner, 1))
        if (labels == labels[:, :1]).all():
            images.append(MovedImage(one.key, labels[:, 0].copy(), weights.sum(1) * scale))
        else:
            images.append(_joint(labels, weights))
    if step.name == "mean":
        value = step.number_of(0)
        if value is not None:
            step.means[step.record["results"][0]] = (value, frozenset(axes))
    return replace(found, shift=shift, images=tuple(images))


def _joint(labels: Array, weights: Array) -> MovedImage:
    """A number that depends on a whole row of labels."""
    table = np.concatenate([labels.astype(np.float64), np.round(weights, 9)], 1)
    _, rows = np.unique(table, axis=0, return_inverse=True)
    return image(np.where((labels >= 0).any(1), rows.reshape(-1), -1))


@rule("summed_product")
def _summed_product(step: CheckedStep) -> Motion:
    """A product of which nothing but a sum is used: a contraction over the axes that are summed."""
    left, right = step.tensor(0), step.tensor(1)
    wide = tuple(np.broadcast_shapes(left.shape, right.shape))
    rank = len(wide)
    axes = axes_of(step.given(2, "dim"), rank) if "dim" in step.record["operation"] else list(range(rank))

    def own(one: Motion) -> list[bool]:
        padded = (1,) * (rank - len(one.shape)) + one.shape
        return [size > 1 for size in padded]

    mine, other = own(left), own(right)
    kept = [axis for axis in range(rank) if axis not in axes]
    rows = [axis for axis in kept if mine[axis] and not other[axis]]
    columns = [axis for axis in kept if other[axis] and not mine[axis]]
    batch = [axis for axis in kept if axis not in rows and axis not in columns]

    def size(chosen: Sequence[int]) -> int:
        return prod(wide[axis] for axis in chosen)

    def laid(one: Motion, stays: Sequence[int], first: bool) -> Motion:
        one = replace(one, shape=(1,) * (rank - len(one.shape)) + one.shape)
        grown = tuple(wide[axis] if axis in batch or axis in axes or axis in stays else 1 for axis in range(rank))
        dropped = columns if first else rows
        order = [*batch, *rows, *axes, *columns] if first else [*batch, *axes, *columns, *rows]
        order = [axis for axis in order if axis not in dropped] + list(dropped)
        return transposed(spread(one, grown), order, (-1,))

    x, y = laid(left, rows, True), laid(right, columns, False)
    sizes = (size(batch), size(rows), size(axes), size(columns))
    found = contracted(x, y, sizes, (False, False))
    order = [*batch, *rows, *columns]
    grid = tuple(wide[axis] for axis in order)
    return transposed(replace(found, shape=grid), [order.index(axis) for axis in kept], step.shape())


@rule("softmax", "log_softmax", "safe_softmax", "logsumexp")
def _share(step: CheckedStep) -> Motion:
    """Sees every scale, and no shift along its axis; the logarithm of a sum of exponentials moves by it."""
    x = step.tensor(0)
    axes = axes_of(step.given(1, "dim"), len(x.shape))
    if step.name != "logsumexp" and prod(x.shape[axis] for axis in axes) == 1:
        step.sized = not x.still
        return Motion.still_one(step.shape())
    need(not x.scaled, "it sees every scale")
    small = level(x, axes, "it sees what differs along its axis")
    return replace(small, shape=step.shape()) if step.name == "logsumexp" else Motion.still_one(step.shape())


@rule(
    "amax", "amin", "max", "min", "cummax", "sort", "topk", "median", "kthvalue", "cumsum", "logcumsumexp", "std", "var"
)
def _along(step: CheckedStep) -> list[Motion | None]:
    """What is chosen or added up along an axis moves alike along it."""
    x, name = step.tensor(0), step.name
    if name in ("max", "min") and step.number_of(1) is not None:
        raise Unchecked("no rule here")
    place = {"topk": 2, "kthvalue": 2}.get(name, 1)
    default = -1 if name in ("sort", "topk", "kthvalue") else None
    axes = axes_of(step.given(place, "dim", default), len(x.shape))
    if name not in ("cumsum",):
        x.unmixed("it is not linear")
    if name == "logcumsumexp":
        need(not x.scaled, "it sees every scale")
    if name in ("cumsum", "std"):
        x.unshifted("what is added up is shifted")
    small = level(x, axes, ALIKE)
    if name in ("var", "std"):
        factor = 2.0 if name == "var" else 1.0
        small = replace(small, charge=factor * small.charge, shift=None, images=())
    if name in ("sort", "cumsum", "cummax", "logcumsumexp"):
        return [spread(small, x.shape), None]
    if name == "topk":
        return [spread(small, step.shape()), None]
    return [replace(small, shape=step.shape()), None]


@rule("argmax", "argmin", "argsort")
def _which(step: CheckedStep) -> Motion:
    """Which is largest does not depend on a common factor or shift."""
    x = step.tensor(0)
    x.unmixed("it is not linear")
    default = -1 if step.name == "argsort" else None
    level(x, axes_of(step.given(1, "dim", default), len(x.shape)), "what is compared does not move alike")
    return Motion.still_one(step.shape())


@rule("linalg_vector_norm", "norm")
def _length(step: CheckedStep) -> Motion:
    x = step.tensor(0)
    axes = axes_of(step.given(2, "dim"), len(x.shape))
    if x.shifted and prod(x.shape[axis] for axis in axes) == 1:
        raise Unchecked("the length of a single number")
    x.unmixed("it is not linear")
    x.unshifted("it sees every shift")
    small = level(x, axes, ALIKE)
    return replace(small, shape=step.shape())


@rule("max_pool2d_with_indices", "avg_pool2d", "adaptive_avg_pool2d", "avg_pool1d", "max_pool2d", "upsample_nearest2d")
def _pooled(step: CheckedStep) -> list[Motion | None]:
    """Places are mixed: nothing may depend on the place."""
    x = step.tensor(0)
    axes = [-1, -2] if "2d" in step.name else [-1]
    if "max" in step.name:
        x.unmixed("it is not linear")
    small = level(x, axes, "it depends on the place")
    padded = step.name != "upsample_nearest2d" and any(values for values in _flat(step.record["arguments"][3:4]))
    need(not (padded and x.shifted), "padding is not shifted")
    return [spread(small, step.shape()), None]


RULES_2D = ("upsample_bilinear2d", "adaptive_avg_pool3d", "adaptive_avg_pool1d", "upsample_nearest1d")
rule(*RULES_2D)(_pooled)


def _flat(given: Any) -> list[Any]:
    return [v for one in given for v in _flat(one)] if isinstance(given, list | tuple) else [given]


# --- norms ----------------------------------------------------------------------------------------------------------


def _forgotten(x: Motion, axes: Sequence[int], step: CheckedStep, epsilon: Any, *, centres: bool) -> None:
    """A scale that is common along the axes, up to ε; and a shift, if it centres."""
    x.unmixed("it is not linear")
    small = level(x, axes, "what is normalised does not move alike")
    need(step.soft or not small.scaled or epsilon in (0, 0.0), "exact only without ε")
    need(centres or not small.shifted, "it does not centre")


def _affine(
    step: CheckedStep, shape: tuple[int, ...], gain: Motion | None, bias: Motion | None, places: Array
) -> Motion:
    """What comes out moves as gain and bias do, which are read at `places`."""
    total = Motion.still_one(shape)
    if gain is not None:
        wide = taken(gain, places, shape)
        wide.unmixed("it is not linear")
        images = tuple(image(np.where(one >= 0, np.arange(one.size), -1)) for one in labelled(wide))
        total = replace(total, charge=wide.charge, images=images)
    return total if bias is None else with_bias(total, taken(bias, places, shape))


@rule("native_layer_norm", "fused_rms_norm", "rms_norm")
def _norm(step: CheckedStep) -> list[Motion | None]:
    """Along the last axes."""
    x = step.tensor(0)
    rank, count = len(x.shape), len(step.given(1))
    axes = list(range(rank - count, rank))
    centres = step.name == "native_layer_norm"
    _forgotten(x, axes, step, step.given(4 if centres else 3, "eps"), centres=centres)
    inner = prod(x.shape[axis] for axis in axes)
    places = np.arange(x.size) % max(inner, 1)
    gain, bias = step.operand(2, "weight"), step.operand(3, "bias") if centres else None
    if gain is None and centres:
        step.centred[step.record["results"][0]] = frozenset(axes) if count == 1 else frozenset()
    return [_affine(step, x.shape, gain, bias, places)]


@rule("native_group_norm")
def _group_norm(step: CheckedStep) -> list[Motion | None]:
    """Along the channels of each group and all places."""
    x = step.tensor(0)
    n, channels, inner, groups = (int(step.given(place)) for place in (3, 4, 5, 6))
    whole = replace(x, shape=(n, groups, channels // groups * inner))
    _forgotten(whole, [2], step, step.given(7, "eps"), centres=True)
    places = np.arange(x.size) // max(inner, 1) % channels
    return [_affine(step, x.shape, step.operand(1), step.operand(2), places)]


@rule("native_batch_norm", "native_batch_norm_legit", "cudnn_batch_norm", "native_batch_norm_legit_no_training")
def _batch_norm(step: CheckedStep) -> list[Motion | None]:
    """In training along samples and places, for every channel; in use a product with numbers of the channel."""
    x = step.tensor(0)
    kept = "no_training" in step.name
    no_statistics = step.record["operation"].endswith("no_stats")
    training = not kept and bool(step.given(3 if no_statistics else 5))
    epsilon = step.given(5 if no_statistics else 6 if kept else 7)
    channels = np.arange(x.size) // max(prod(x.shape[2:]), 1) % x.shape[1]
    gain, bias = step.operand(1), step.operand(2)
    if training:
        _forgotten(x, [0, *range(2, len(x.shape))], step, epsilon, centres=True)
        return [_affine(step, x.shape, gain, bias, channels)]
    # (x − m) g / s + b with numbers m and s of the channel: scales of x are seen, those of gain and bias are not.
    need(not x.scaled, "it sees every scale")
    total = _affine(step, x.shape, gain, bias, channels)
    data = labelled(x)
    images = tuple(image(np.where(one >= 0, one * x.shape[1] + channels, -1)) for one in data)
    return [replace(total, images=total.images + images)]


@rule("weight_norm_interface")
def _weight_norm(step: CheckedStep) -> list[Motion | None]:
    """g v / ‖v‖ along all axes but one: forgets the length of v."""
    v, g = step.tensor(0), step.tensor(1)
    rank = len(v.shape)
    kept = int(step.given(2, "dim", 0)) % rank
    v.unmixed("it is not linear")
    v.unshifted("it sees every shift")
    g.unshifted("it sees every shift")
    level(v, [axis for axis in range(rank) if axis != kept], "what is normalised does not move alike")
    small = Motion(v.shape, spread(g, v.shape).charge)
    g.unmixed("it is not linear")
    return [small]


# --- look-ups -------------------------------------------------------------------------------------------------------


@rule("embedding")
def _embedding(step: CheckedStep) -> Motion:
    """All rows of the table move alike, or each by a number that depends on which row is looked up."""
    table, index = step.tensor(0), step.number_of(1)
    assert index is not None
    shape, padding = step.shape(), int(step.given(2, "padding_idx", -1))
    if padding >= 0:
        table = _without_padding(step, table, padding)
        if table.still:
            return Motion.still_one(shape)
    return looked_up(step, table, index, shape)


def looked_up(step: CheckedStep, table: Motion, index: int, shape: tuple[int, ...]) -> Motion:
    """Rows of a table by an index tensor."""
    width = prod(table.shape[1:])
    constant = step.values[index].get("constant")
    if constant is not None:
        rows = np.asarray(constant, dtype=np.int64).reshape(-1)
        step.sized = _uniform_rows(table) is None
        return taken(table, rows[:, None] * width + np.arange(width), shape)
    times = prod(step.values[index]["shape"])
    if not table.shifted:
        first = _any_of(table, [0])
        return taken(first, np.broadcast_to(np.arange(width), (times, width)), shape)
    need(not table.scaled, "rows are scaled and shifted")
    same = _uniform_rows(table)
    if same is not None:
        return taken(same, np.broadcast_to(np.arange(width), (times, width)), shape)
    images = []
    for labels in labelled(table):
        column, _ = row_labels(np.ascontiguousarray(labels.reshape(-1, width).T), width)
        data = np.arange(times)[:, None]
        images.append(image(np.where(column >= 0, column * times + data, -1)))
    return Motion(shape, np.zeros(times * width), images=tuple(images))


def _uniform_rows(table: Motion) -> Motion | None:
    try:
        return level(table, [0], "")
    except Wrong:
        return None


def _any_of(source: Motion, axes: Sequence[int]) -> Motion:
    """Any of the entries along axes; which one depends on numbers that are not known here."""
    try:
        return level(source, axes, "")
    except Wrong as problem:
        raise Unchecked("entries that move differently are looked up by numbers") from problem


def _without_padding(step: CheckedStep, table: Motion, row: int) -> Motion:
    """A padding row gets no gradient from look-ups: it may not move, or it is zero, or it moves alone."""
    width = prod(table.shape[1:])
    inside = np.arange(table.size) // max(width, 1) == row
    others = replace(
        table,
        charge=np.where(inside, 0.0, table.charge),
        shift=None if table.shift is None else np.where(inside, 0.0, table.shift),
    )
    if others.still:
        return others
    zero = bool(step.record.get("padding_zero"))
    if table.mixed is not None or table.shifted or not zero:
        raise Unchecked("the table has a padding row that takes no part in the gradient")
    mask = inside if table.zero is None else inside | table.zero
    return replace(others, zero=mask)


@rule("index", "index_select", "gather", "take_along_dim", "unsafe_index")
def _indexed(step: CheckedStep) -> list[Motion | None]:
    """Entries looked up along axes: nothing may depend on the place along them if the index is not known."""
    x = step.number_of(0)
    assert x is not None
    index = values_in(step.record["arguments"][1:])
    unknown = [value for value in index if step.values[value].get("constant") is None]
    for value in index:
        need(step.at(value).still, "what decides moves")
    if not unknown:
        return placed(step, [x])
    source = step.at(x)
    if step.name in ("index", "unsafe_index"):
        axes = [axis for axis, one in enumerate(step.given(1)) if one is not None]
        if source.shifted and axes == [0] and len(index) == 1 and step.values[index[0]].get("dtype") != "bool":
            return [looked_up(step, source, index[0], step.shape())]
    else:
        axes = [int(step.given(1, "dim")) % max(len(source.shape), 1)]
        if step.name == "gather" and source.mixed is not None:
            raise Unchecked("entries that mix are looked up by numbers, which may differ between them")
    if any(step.values[value].get("dtype") == "bool" for value in index):
        return [_masked(step, source, index[0])]
    small = _any_of(source, axes)
    wide = spread(small, source.shape)
    inner = CheckedStep(step.record, step.values, {**step.motions, x: wide}, step.soft)
    return placed(inner, [x], zeros=unknown)


def _masked(step: CheckedStep, source: Motion, mask: int) -> Motion:
    """Entries where a mask holds: nothing may depend on the place."""
    rank = len(step.values[mask]["shape"])
    small = _any_of(source, list(range(rank)))
    width = prod(source.shape[rank:])
    shape = step.shape()
    times = prod(shape) // max(width, 1)
    return taken(small, np.broadcast_to(np.arange(width), (times, width)), shape)


@rule(
    "index_add",
    "scatter_add",
    "scatter",
    "index_put",
    "index_copy",
    "scatter_reduce",
    "masked_scatter",
    "index_put_impl",
)
def _scattered(step: CheckedStep) -> Motion:
    """Entries put at places that numbers decide: nothing may depend on the place."""
    base = step.tensor(0)
    given = step.given(2 if step.name in ("index_put", "masked_scatter", "index_put_impl") else 3)
    source = step.at(int(given["value"])) if isinstance(given, dict) and "value" in given else Motion.still_one(())
    rank = len(base.shape)
    if step.name.startswith("index_put"):
        axes = [axis for axis, one in enumerate(step.given(1)) if one is not None]
        if any(step.values[value].get("dtype") == "bool" for value in values_in(step.given(1))):
            raise Unchecked("a mask decides where entries are put")
    elif step.name == "masked_scatter":
        axes = list(range(rank))
    else:
        axes = [int(step.given(1, "dim")) % rank]
    for value in values_in(step.record["arguments"][1:3]):
        if value != (given.get("value") if isinstance(given, dict) else None):
            need(step.at(value).still, "what decides moves")
    why = "entries differ, and where they are put is not known"
    if step.name.startswith("scatter"):
        reduce = step.given(4, "reduce", "sum")
        need(reduce in ("sum", "add", "mean", "amax", "amin", None), "products multiply scales")
        if base.mixed is not None or source.mixed is not None:
            raise Unchecked("entries that mix are put where numbers decide, which may differ between them")
    base.unshifted("what is scattered is shifted")
    source.unshifted("what is scattered is shifted")
    small = _any_of(base, axes)
    if step.name.startswith("index_put"):
        wide = len(base.shape) - len(axes)
        lead = len(source.shape) - wide
        inner = _any_of(source, list(range(lead))) if lead > 0 else source
        shape = tuple(base.shape[axis] for axis in range(rank) if axis not in axes)
        other = replace(spread(replace(inner, shape=inner.shape[max(lead, 0) :]), shape), shape=small.shape)
    elif step.name == "masked_scatter":
        other = _any_of(source, list(range(len(source.shape))))
        other = replace(other, shape=small.shape)
    elif len(source.shape) == rank:
        other = _any_of(source, axes)
        if other.shape != small.shape:
            need(bool((np.abs(other.charge - other.charge[:1]) < 1).all()) and other.mixed is None, why)
            other = Motion(small.shape, np.full(small.size, other.charge[0] if other.size else 0.0))
    else:
        other = spread(source, small.shape)
    if small.vanishes:
        small, other = other, small
    need(other.vanishes or alike(small, other), "what is put there does not move alike")
    return spread(small, base.shape)


@rule("masked_select")
def _selected(step: CheckedStep) -> Motion:
    return _masked(step, step.tensor(0), int(step.given(1)["value"]))


@rule("repeat_interleave")
def _repeated(step: CheckedStep) -> list[Motion | None]:
    raise Unchecked("how often entries are repeated depends on numbers")


# --- complex numbers ------------------------------------------------------------------------------------------------


@rule("view_as_complex")
def _complex(step: CheckedStep) -> Motion:
    """Both parts of a number move alike."""
    x = step.tensor(0)
    return replace(level(x, [len(x.shape) - 1], "the parts of a number do not move alike"), shape=step.shape())


@rule("view_as_real")
def _parts(step: CheckedStep) -> Motion:
    x, shape = step.tensor(0), step.shape()
    x.unshifted("parts of what is shifted")
    return taken(x, np.repeat(np.arange(x.size), 2), shape)


@rule("conj", "conj_physical", "real", "imag")
def _conjugate(step: CheckedStep) -> Motion:
    x = step.tensor(0)
    x.unshifted("parts of what is shifted")
    return replace(x, shape=step.shape())


@rule("trace", "diag")
def _diagonal(step: CheckedStep) -> Motion:
    x = step.tensor(0)
    need(not x.scaled and not x.shifted and same_numbers(x.charge, np.zeros(x.size)), "it sees every scale")
    return Motion.still_one(step.shape())
