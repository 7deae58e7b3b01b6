"""Rules for looking up and putting entries by index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import torch

from conserved.inference.program.captured_program import ValueRef
from conserved.inference.rules.step import Known, Step, at, base_name, fix_all, origin_of, rule, wide
from conserved.inference.rules.sums import add, choose
from conserved.inference.rules.views import cut_axis, take, unvirtual
from conserved.inference.types.engine import ReadPart
from conserved.inference.types.parameter_types import first_use
from conserved.inference.types.reindexing import Renumber
from conserved.inference.types.tensor_type import FIXED, Field, Image, Type, Virtual, distinct, tidy


@rule("embedding")
def _embedding(s: Step) -> Known:
    """Return rows of a table: all rows move alike. Rows that are trained otherwise than they are used do not move."""
    table, index = s.arg(0), s.arg(1)
    padding = s.arg(2, "padding_idx", -1)
    shape, index_shape = s.shape(table), s.shape(index)
    known = s.raw(table)
    move = Renumber((None, *range(len(index_shape), len(index_shape) + len(shape) - 1)))
    if isinstance(known, ReadPart):
        sizes = shape[1:]
        dims = [dim + 1 for dim in range(len(sizes))]
        known = first_use(s.engine, known, [s.engine.fresh(dims, sizes)], role="table")
    if bool(s.arg(3, "scale_grad_by_freq", False)):
        s.engine.zero(known)
    elif padding is not None and padding >= 0:
        s.engine.steady(known)
        constant = s.program.padding_row(table.value, padding)
        if constant is None or bool(constant.any()):
            s.engine.zero(known)
    level = s.engine.uniform(known.factors, [0])
    return look_up(s, Type(tuple(level), known.shifts, known.images, known.zero), move, frozenset(wide(index_shape)))


@rule("_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(s: Step) -> list[Known]:
    """Return sums, means or maxima of rows of a table: all rows move alike, and empty bags are zero."""
    table, weights = s.arg(0), s.arg(6, "per_sample_weights")
    known = s.raw(table)
    if isinstance(known, ReadPart):
        sizes = s.shape(table)[1:]
        known = first_use(s.engine, known, [s.engine.fresh([1], sizes)], role="table")
    s.engine.steady(known)
    if isinstance(weights, ValueRef):
        s.engine.zero(s.type(weights))
    if bool(s.arg(3, "scale_grad_by_freq", False)):
        s.engine.zero(known)
    if s.arg(4, "mode", 0) == 2:
        for factor in known.factors:
            s.engine.partition.shatter(factor.atoms)
    level = Type(tuple(s.engine.uniform(known.factors, [0])), zero=known.zero)
    return [level, *[FIXED] * (len(s.operation.results) - 1)]


def look_up(s: Step, source: Type, move: Renumber, index_dims: frozenset[int]) -> Type:
    """Return a type after its first axis was looked up by an index that varies along `places`."""
    shifts, images = [], []
    for shift in source.shifts:
        if 0 in shift.dims:
            varies = frozenset(new for dim in shift.dims if dim for new in move.carry(dim)) | index_dims
            images.append(Image(s.engine.key(), varies, distinct(shift.atoms)))
        else:
            shifts.append(move.field(shift))
    for image in source.images:
        varies = frozenset(new for dim in image.varies if dim for new in move.carry(dim))
        images.append(Image(s.engine.key(), varies | (index_dims if 0 in image.varies else frozenset()), image.atoms))
    return Type(tuple(move.field(factor) for factor in source.factors), tuple(shifts), tuple(images), source.zero)


LOOKED_UP = 2048
"""Tables of at most this many entries along an axis keep apart what different indices look up."""


@rule("index", "index_select")
def _index(s: Step) -> Known:
    """Return advanced indexing with one index tensor (or several, for axes along which nothing moves)."""
    x = s.arg(0)
    shape = s.shape(x)
    if "index_select" in s.operation.name:
        dim, index = at(s.arg(1), len(shape)), s.arg(2)
        indices: list[Any] = [None] * dim + [index]
    else:
        indices = list(s.arg(1))
    used = [n for n, item in enumerate(indices) if item is not None]
    boolean = any(
        isinstance(indices[n], ValueRef) and s.program.values[indices[n].value].dtype == torch.bool for n in used
    )
    if not shape:
        return fix_all(s)
    known = s.raw(x)
    if boolean:
        covered = list(range(used[0], used[0] + len(s.shape(indices[used[0]])))) if len(used) == 1 else []
        if not covered:
            return fix_all(s)
        return compress(s, s.type(x), covered, len(shape))
    if len(used) == 1:
        return one_index(s, x, known, used[0], indices[used[0]])
    type_ = s.type(x)
    factors = s.engine.uniform(type_.factors, used)
    if any(shift.touches(used) for shift in type_.shifts) or any(image.varies & set(used) for image in type_.images):
        s.engine.steady(type_)
        type_ = Type(tuple(factors), zero=type_.zero)
    # Where the looked-up axes go: to the place of the first if the indexed axes are neighbours, else to the front.
    together = used == list(range(used[0], used[-1] + 1))
    width = len(s.out) - (len(shape) - len(used))
    start = used[0] if together else 0
    axes: list[int | None] = []
    for dim in range(len(shape)):
        if dim in used:
            axes.append(None)
        else:
            before = len([d for d in range(dim) if d not in used])
            axes.append(before if before < start else before + width)
    return Renumber(tuple(axes)).type(Type(tuple(factors), type_.shifts, type_.images, type_.zero))


def compress(s: Step, type_: Type, covered: Sequence[int], count: int) -> Type:
    """Return entries where a mask is set, in a row: nothing may depend on the masked axes."""
    factors = s.engine.uniform(type_.factors, covered)
    start = covered[0]
    axes = [dim if dim < start else None if dim in covered else dim - len(covered) + 1 for dim in range(count)]
    move = Renumber(tuple(axes))
    shifts = []
    images = list(type_.images)
    for shift in type_.shifts:
        if shift.touches(covered):
            images.append(Image(s.engine.key(), frozenset(shift.occupied), distinct(shift.atoms)))
        else:
            shifts.append(shift)
    runs = []
    for image in images:
        varies = frozenset(new for dim in image.varies if dim not in covered for new in move.carry(dim))
        runs.append(
            replace(image, key=s.engine.key(), varies=varies | ({start} if image.varies & set(covered) else set()))
        )
    return Type(tuple(map(move.field, factors)), tuple(map(move.field, shifts)), tuple(runs), type_.zero)


def one_index(s: Step, x: Any, known: Known, dim: int, index: Any) -> Known:
    """Return x[:, …, index]: a table looked up along one axis."""
    shape, index_shape = s.shape(x), s.shape(index)
    constant = s.constant(index)
    if constant is not None and len(index_shape) == 1 and isinstance(known, Type | ReadPart):
        return take(s, x, dim, at_array(constant.numpy(), shape[dim]))
    width = len(index_shape)
    axes = tuple(d if d < dim else None if d == dim else d + width - 1 for d in range(len(shape)))
    move = Renumber(axes)
    real = tuple(dim + n for n in range(width))
    slots_dims, slots = tidy(real, np.arange(prod(index_shape)).reshape(index_shape))
    virtual = Virtual(origin_of(s, index) + 1_000_000_000, slots_dims, slots)

    def read_field(field: Field) -> Field:
        if dim not in field.dims:
            return move.field(field)
        axis = len(field.virtual) + field.dims.index(dim)
        array = np.moveaxis(field.atoms, axis, len(field.virtual))
        rest = tuple(d for d in field.dims if d != dim)
        return Field(
            tuple(d if d < dim else d + width - 1 for d in rest),
            array,
            field.weight,
            (*(Virtual(v.key, *move.array(v.dims, v.slots, 0)) for v in field.virtual), virtual),
        )

    if isinstance(known, ReadPart):
        if shape[dim] <= LOOKED_UP and not any(
            dim in v.dims for coordinate in known.coordinates for v in coordinate.virtual
        ):
            return replace(known, coordinates=tuple(map(read_field, known.coordinates)))
        known = s.type(x)
    touching = [factor for factor in known.factors if factor.touches([dim])]
    if touching and (shape[dim] > LOOKED_UP or any(field.virtual for field in touching)):
        level = s.engine.uniform(known.factors, [dim])
        factors = tuple(map(move.field, level))
    else:
        for field in touching:
            s.engine.split_by([field], [dim], batch=True)
        factors = tuple(map(read_field, known.factors))
    shifts, images = [], []
    for field in known.shifts:
        if field.touches([dim]):
            varies = frozenset(new for d in field.occupied if d != dim for new in move.carry(d)) | set(real)
            images.append(Image(s.engine.key(), varies, distinct(field.atoms)))
        else:
            shifts.append(move.field(field))
    for image in known.images:
        varies = frozenset(new for d in image.varies if d != dim for new in move.carry(d))
        images.append(Image(s.engine.key(), varies | (set(real) if dim in image.varies else set()), image.atoms))
    return Type(factors, tuple(shifts), tuple(images), known.zero)


def at_array(index: np.ndarray, size: int) -> np.ndarray:
    """Return indices counted from the front."""
    return np.where(index < 0, index + size, index)


@rule("gather", "topk", "sort")
def _gather(s: Step) -> Any:
    """Return entries chosen along an axis: nothing may depend on the place along it."""
    x = s.arg(0)
    name = base_name(s.operation.name).removeprefix("aten::")
    count = len(s.shape(x))
    position = {"topk": 2, "sort": 1}.get(name, 1)
    dim = s.operation.kwargs.get("dim", s.arg(position, default=-1))
    if isinstance(dim, bool) or not isinstance(dim, int):
        dim = s.arg(2, default=-1)
    dim = at(dim, count)
    if not count:
        return fix_all(s)
    type_ = s.type(x)
    index = s.arg(2, "index") if name == "gather" else None
    if index is not None and len(s.shape(index)) != count:
        return fix_all(s)
    if index is not None:
        for d, (size, taken_size) in enumerate(zip(s.shape(x), s.shape(index), strict=True)):
            if d != dim and taken_size != size:
                type_ = cut_axis(s, type_, d, np.arange(taken_size), size)
    s.engine.split_by(type_.factors, range(count) if index is None else expanded_less(s, index), batch=False)
    factors = s.engine.uniform(type_.factors, [dim])
    shifts = [shift for shift in type_.shifts if not shift.touches([dim])]
    touched = [shift for shift in type_.shifts if shift.touches([dim])]
    everything = frozenset(range(count))
    images = [Image(s.engine.key(), everything, distinct(factor.atoms)) for factor in touched]
    images += [
        image if dim not in image.varies else Image(s.engine.key(), everything, image.atoms) for image in type_.images
    ]
    result = Type(tuple(factors), tuple(shifts), tuple(images), type_.zero)
    return [result] + [FIXED] * (len(s.operation.results) - 1)


def expanded_less(s: Step, ref: Any) -> set[int]:
    """Return the axes along which a tensor varies; not those it was expanded along."""
    shape = s.shape(ref)
    maker = s.program.maker(ref.value) if isinstance(ref, ValueRef) else None
    if maker is not None and base_name(maker.name) == "aten::expand" and isinstance(maker.args[0], ValueRef):
        source = s.shape(maker.args[0])
        offset = len(shape) - len(source)
        return {dim + offset for dim in wide(source)}
    return wide(shape)


_DISTINCT = ("topk", "sort", "argsort", "argmax", "argmin", "randperm", "nonzero", "arange", "max", "min")
"""Operations whose results, used as indices along one axis, name no place twice."""

_SAME_ENTRIES = ("expand", "unsqueeze", "view", "clone", "_to_copy", "slice", "squeeze", "alias", "select", "unbind")


def distinct_places(s: Step, ref: Any) -> bool:
    """Return whether an index is known to name no place twice.

    Where it does, which entry stays is not defined, and PyTorch's backward gives a gradient to the others as well.
    """
    if not isinstance(ref, ValueRef):
        return False
    constant = s.constant(ref)
    if constant is not None:
        rows = constant.reshape(constant.shape[0], -1) if constant.ndim else constant.reshape(1, 1)
        return all(bool(column.unique().numel() == column.numel()) for column in (*rows, *rows.T))
    value = ref.value
    while (maker := s.program.maker(value)) is not None:
        name = base_name(maker.name).removeprefix("aten::")
        if name in _DISTINCT:
            return True
        if name not in _SAME_ENTRIES or not maker.inputs():
            return False
        value = maker.inputs()[0]
    return False


@rule(
    "index_add",
    "scatter_add",
    "scatter",
    "scatter_reduce",
    "index_copy",
)
def _index_add(s: Step) -> Known:
    """Type a write or sum into positions along an axis: nothing may depend on the position.

    How entries that meet at one place are combined decides: sums and means are linear, extremes keep positive scales
    and mix nothing, products multiply charges as often as entries meet, which the index alone knows.
    """
    base, dim, source = s.arg(0), s.arg(1), s.arg(3)
    name = base_name(s.operation.name)
    reduce = s.arg(4, "reduce") if "scatter" in name else "sum"
    if not isinstance(source, ValueRef) or reduce not in (None, "sum", "add", "mean", "amax", "amin"):
        return fix_all(s)
    puts = name == "aten::index_copy" or (name == "aten::scatter" and reduce is None)
    if puts and not distinct_places(s, s.arg(2)):
        return fix_all(s)
    dim = at(dim, len(s.shape(base)))
    before, given = s.type(base), s.type(source)
    if "scatter" in name:
        index = s.arg(2)
        others = [d for d in range(len(s.shape(base))) if d != dim]
        if s.shape(index) != s.shape(source) or any(s.shape(source)[d] != s.shape(base)[d] for d in others):
            return fix_all(s)
        # Entries whose index differs along another axis go different ways, and do not mix along it.
        apart = expanded_less(s, index) | ({dim} if reduce is None else set())
        apart = set(range(len(s.out))) if reduce in ("amax", "amin") else apart
        for type_ in (before, given):
            s.engine.split_by(type_.factors, apart, batch=False)
    if given.shifted or before.shifted:
        s.engine.steady(given)
        s.engine.steady(before)
    given = unvirtual(s.engine, Type(given.factors, zero=given.zero))
    given = Type(tuple(s.engine.uniform(given.factors, [dim])), zero=given.zero)
    before = Type(tuple(s.engine.uniform(before.factors, [dim])), zero=before.zero)
    return add(s.engine, before, given)


@rule("index_put", "_index_put_impl", "_unsafe_index_put")
def _index_put(s: Step) -> Known:
    base, indices, source = s.arg(0), list(s.arg(1)), s.arg(2)
    shape = s.shape(base)
    used = [n for n, index in enumerate(indices) if index is not None]
    before, given = s.type(base), s.type(source)
    if len(used) != 1 or used[0] != 0:
        return fix_all(s)
    boolean = s.program.values[indices[0].value].dtype == torch.bool
    adds = bool(s.arg(3, "accumulate", False))
    if boolean and not adds and s.shape(indices[0]) == shape and s.shape(source) == ():
        return choose(s, indices[0], base, source)
    if not adds and not boolean and not distinct_places(s, indices[0]):
        return fix_all(s)
    depth = len(s.shape(indices[0])) if boolean else 1
    width = 1 if boolean else len(s.shape(indices[0]))
    if given.shifted or before.shifted:
        s.engine.steady(given)
        s.engine.steady(before)
    given = unvirtual(s.engine, Type(given.factors, zero=given.zero))
    offset = width + len(shape) - depth - len(s.shape(source))
    given = Renumber(tuple(d + offset for d in range(len(s.shape(source))))).type(given)
    given = Type(tuple(s.engine.uniform(given.factors, list(range(width)))), zero=given.zero)
    axes = [None] * width + [d + depth for d in range(len(shape) - depth)]
    given = Renumber(tuple(axes)).type(given)
    before = Type(tuple(s.engine.uniform(before.factors, list(range(depth)))), zero=before.zero)
    return add(s.engine, before, given)


@rule("slice_scatter", "select_scatter", "masked_scatter", "masked_select", "diagonal_scatter")
def _scatter_views(s: Step) -> Known:
    return fix_all(s)
