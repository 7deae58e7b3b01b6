"""Rules for contractions: what is summed over pairs a space with its dual."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from conserved.inference.rules.step import Known, Step, fix_all, moved, rule, virtual_axes
from conserved.inference.rules.sums import add, adopt
from conserved.inference.types.engine import Engine, Number, ReadPart, renumbered, scaled
from conserved.inference.types.field_groups import components
from conserved.inference.types.parameter_types import first_use
from conserved.inference.types.reindexing import Regroup, Renumber, broadcast
from conserved.inference.types.tensor_type import FIXED, ZERO, Field, Type


@dataclass(frozen=True, slots=True)
class OperandAxes:
    """How the axes of two operands meet: names for all of them, and what becomes of each."""

    left: tuple[int, ...]
    right: tuple[int, ...]
    result: tuple[int, ...]
    sizes: dict[int, int]

    @property
    def summed(self) -> set[int]:
        return (set(self.left) | set(self.right)) - set(self.result)

    @property
    def batch(self) -> set[int]:
        return {axis for axis in set(self.left) & set(self.right) & set(self.result) if self.sizes[axis] != 1}


def contraction(s: Step, left: Any, right: Any, axes: OperandAxes) -> Type:
    """Return the type of a sum of products, Σ left · right, over the axes that are not in the result.

    Args:
        s: the operation.
        left: one operand.
        right: the other.
        axes: which axes of the two are the same, and which are summed over.

    Returns:
        The type of the result.
    """
    engine = s.engine
    x, y = s.raw(left), s.raw(right)
    if any(isinstance(operand, Type) and operand.zero for operand in (x, y)):
        return ZERO
    count = max(axes.sizes) + 1
    to_left = Renumber(axes.left)
    to_right = Renumber(axes.right)
    own_dims = set(axes.left) - set(axes.right)
    other = set(axes.right) - set(axes.left)
    if isinstance(x, ReadPart) and isinstance(y, ReadPart):
        x = first_contraction(engine, x, to_left, FIXED, axes, fresh_sum=True)
    if isinstance(x, ReadPart):
        assert isinstance(y, Type)
        x = first_contraction(engine, x, to_left, to_right.type(y), axes, rows=True)
    elif isinstance(y, ReadPart):
        y = first_contraction(engine, y, to_right, to_left.type(x), axes, rows=True)
    assert isinstance(x, Type)
    assert isinstance(y, Type)
    result = engine.contract(
        to_left.type(x),
        to_right.type(y),
        summed=axes.summed,
        batch=axes.batch,
        own_dims={axis for axis in own_dims if axes.sizes[axis] != 1},
        other={axis for axis in other if axes.sizes[axis] != 1},
        sizes=axes.sizes,
    )
    return renumbered(result, {axis: index for index, axis in enumerate(axes.result)}, count)


def first_contraction(
    engine: Engine,
    view: ReadPart,
    renumber: Renumber,
    partner: Type,
    axes: OperandAxes,
    *,
    fresh_sum: bool = False,
    rows: bool = False,
) -> Type:
    """Type the first use of a parameter in a contraction.

    Charges are free along axes that stay, and dual to the partner's along axes that are summed.
    """
    moved_view = view.moved(renumber)
    own = sorted({dim for coordinate in moved_view.coordinates for dim in coordinate.dims})
    virtual, counts = virtual_axes(moved_view)
    remaining = [dim for dim in own if dim not in axes.summed]
    fields = []
    if remaining or virtual:
        fields.append(engine.fresh(remaining, [axes.sizes[dim] for dim in remaining], virtual, counts))
    else:
        fields.append(engine.fresh((), ()))
    if fresh_sum:
        inner = [dim for dim in own if dim in axes.summed or dim in axes.batch] if axes.summed & set(own) else []
        if inner:
            fields.append(engine.fresh(inner, [axes.sizes[dim] for dim in inner]))
    else:
        # A charge that all of the partner has can be taken up here, so that what comes out does not have it.
        touching = [
            factor for factor in partner.factors if factor.touches(axes.summed) or not (factor.dims or factor.virtual)
        ]
        for group in components([field for field in touching if field.dims or field.virtual]):
            foreign = sorted({dim for field in group for dim in field.dims if dim not in own})
            other_axes = [axis for field in group for axis in field.virtual if not any(axis.same(v) for v in virtual)]
            inner = sorted({dim for field in group for dim in field.dims if dim in own})
            if len(group) == 1 and inner and foreign and not group[0].virtual:
                # It takes up what the partner's charges have in common along its own axes; what is left of them (a
                # scale for every index of the others) goes on into the result.
                fields.append(engine.fresh(inner, [axes.sizes[dim] for dim in inner]))
            elif foreign or other_axes:
                fields += [field.times(-1) for field in engine.uniform(group, foreign, other_axes)]
            else:
                fields += [field.times(-1) for field in group]
        fields += [field.times(-1) for field in touching if not (field.dims or field.virtual)]
    known = first_use(engine, moved_view, fields, role="map", rows=remaining if rows and not virtual else ())
    back = {new: old for old, new in enumerate(renumber.targets) if new is not None}
    return renumbered(known, back, max(axes.sizes) + 1)


@rule("mm")
def _mm(s: Step) -> Known:
    return matrix_product(s, s.arg(0), s.arg(1))


@rule("bmm")
def _bmm(s: Step) -> Known:
    return batched_product(s, s.arg(0), s.arg(1))


def batched_product(s: Step, left: Any, right: Any) -> Type:
    """Return products of matrices, one for every index of the first axis."""
    b, n, k = s.shape(left)
    m = s.shape(right)[2]
    return contraction(s, left, right, OperandAxes((0, 1, 2), (0, 2, 3), (0, 1, 3), {0: b, 1: n, 2: k, 3: m}))


def matrix_product(s: Step, left: Any, right: Any) -> Type:
    """Return the product of two matrices."""
    n, k = s.shape(left)
    m = s.shape(right)[1]
    return contraction(s, left, right, OperandAxes((0, 1), (1, 2), (0, 2), {0: n, 1: k, 2: m}))


@rule("mv")
def _mv(s: Step) -> Known:
    n, k = s.shape(s.arg(0))
    return contraction(s, s.arg(0), s.arg(1), OperandAxes((0, 1), (1,), (0,), {0: n, 1: k}))


@rule("dot", "vdot")
def _dot(s: Step) -> Known:
    return contraction(s, s.arg(0), s.arg(1), OperandAxes((0,), (0,), (), {0: s.shape(s.arg(0))[0]}))


@rule("linear")
def _linear(s: Step) -> Known:
    """Return x Wᵀ + b, as fused kernels record it."""
    x, w, b = s.arg(0), s.arg(1), s.arg(2, "bias")
    count = len(s.shape(x))
    sizes = {**dict(enumerate(s.shape(x))), count: s.shape(w)[0]}
    lead = tuple(range(count - 1))
    result: Known = contraction(s, x, w, OperandAxes((*lead, count - 1), (count, count - 1), (*lead, count), sizes))
    return result if b is None else with_bias(s, result, b)


def with_bias(s: Step, result: Known, bias: Any, factor: Number = 1.0) -> Type:
    """Return a product to which a parameter or tensor is added."""
    assert isinstance(result, Type)
    if factor == 0:
        return result
    count = len(s.out)
    known = s.raw(bias)
    if isinstance(known, ReadPart):
        known = adopt(s, bias, known, result, count)
    return add(s.engine, result, scaled(s.engine, broadcast(s.shape(bias), count).type(known), factor))


@rule("addmm")
def _addmm(s: Step) -> Known:
    return with_bias(
        s,
        scaled(s.engine, matrix_product(s, s.arg(1), s.arg(2)), s.operation.kwargs.get("alpha", 1)),
        s.arg(0),
        s.operation.kwargs.get("beta", 1),
    )


@rule("_sparse_addmm")
def _sparse_addmm(s: Step) -> Any:
    """Return a sparse matrix times a dense one; the sparse one is data, such as the edges of a graph."""
    s.engine.zero(s.type(s.arg(1)))
    return _addmm(s)


@rule("baddbmm")
def _baddbmm(s: Step) -> Known:
    beta = s.operation.kwargs.get("beta", 1)
    inner = scaled(s.engine, batched_product(s, s.arg(1), s.arg(2)), s.operation.kwargs.get("alpha", 1))
    return with_bias(s, inner, s.arg(0), beta)


@rule("addmv")
def _addmv(s: Step) -> Known:
    n, k = s.shape(s.arg(1))
    inner = contraction(s, s.arg(1), s.arg(2), OperandAxes((0, 1), (1,), (0,), {0: n, 1: k}))
    return with_bias(s, inner, s.arg(0), s.operation.kwargs.get("beta", 1))


@rule("convolution", "convolution_overrideable", "_convolution")
def _convolution(s: Step) -> Known:
    """Return a contraction over channels (within groups) that mixes places: nothing may depend on the place.

    An axis along which the kernel has one entry and stays in place is not mixed: what is there may differ.
    """
    x, w, b = s.arg(0), s.arg(1), s.arg(2)
    transposed, groups = bool(s.arg(6)), int(s.arg(8))
    shape, weight = s.shape(x), s.shape(w)
    batched = len(s.out) == len(weight)
    if not batched:
        return fix_all(s)
    indices = list(range(2, len(shape)))
    known = s.raw(x)
    if isinstance(known, ReadPart):
        known = s.type(x)
    stride, padding = (_each(s.arg(n), len(indices)) for n in (3, 4))
    mixed = [
        dim
        for dim in indices
        if weight[dim] > 1 or shape[dim] != s.out[dim] or stride[dim - 2] != 1 or padding[dim - 2] != 0
    ]
    level = Type(tuple(s.engine.uniform(known.factors, mixed)), known.shifts, known.images, known.zero)
    edges = mixed if transposed else [dim for dim in mixed if padding[dim - 2] != 0]
    if edges:
        # At an edge with zeros beyond it, and between the places of a transposed one, a constant is not a constant.
        level = Type(level.factors, (), s.engine.imaged(level, edges), level.zero)
    # Axes: 0 batch, 1 group, 2 inputs of a group, 3 outputs of a group, 4 the kernel's and the image's places.
    inputs, outputs = shape[1] // groups, s.out[1] // groups
    split_x = Regroup(shape, (shape[0], groups, inputs, *shape[2:]))
    split_w = Regroup(
        weight, (groups, inputs, outputs, *weight[2:]) if transposed else (groups, outputs, inputs, *weight[2:])
    )
    data = split_x.type(level)
    kernel = prod(weight[2:])
    raw = moved(s.raw(w), split_w)
    spatial = tuple(5 + n for n in range(len(weight) - 2))
    names = (1, 2, 3, *spatial) if transposed else (1, 3, 2, *spatial)
    image = tuple(5 + len(spatial) + n for n in range(len(indices)))
    sizes = {0: shape[0], 1: groups, 2: inputs, 3: outputs, 4: 1}
    sizes |= dict(zip(spatial, weight[2:], strict=True)) | dict(zip(image, shape[2:], strict=True))
    axes = OperandAxes((0, 1, 2, *image), names, (0, 1, 3, *image), sizes)
    result = conv_contraction(s, data, raw, axes, kernel)
    merged = Regroup((shape[0], groups, outputs, *s.out[2:]), s.out)
    result = merged.type(
        renumbered(result, {0: 0, 1: 1, 3: 2, **{axis: 3 + n for n, axis in enumerate(image)}}, max(sizes) + 1)
    )
    if b is None:
        return result
    known_b = s.raw(b)
    if isinstance(known_b, ReadPart):
        fields = s.engine.uniform(result.factors, [d for d in range(len(s.out)) if d != 1])
        known_b = first_use(
            s.engine,
            known_b,
            [Field(tuple(0 for _ in field.dims), field.atoms, field.weight) for field in fields],
            role="bias",
            entries=True,
        )
    return add(s.engine, result, Renumber((1,)).type(known_b))


def _each(given: Any, count: int) -> list[int]:
    """Return one number for every axis; a single one stands for all."""
    numbers = [given] if isinstance(given, int) else list(given)
    return numbers * count if len(numbers) == 1 else numbers


def conv_contraction(s: Step, data: Type, raw: Known, axes: OperandAxes, kernel: int) -> Type:
    """Return the contraction over the channels of a group, with a kernel that is the same at every place."""
    engine = s.engine
    renumber = Renumber(axes.right)
    x = Renumber(axes.left).type(data)
    y = (
        renumber.type(first_contraction(engine, raw, renumber, x, axes))
        if isinstance(raw, ReadPart)
        else renumber.type(raw)
    )
    level = engine.uniform(y.factors, [axis for axis in axes.right if axis >= 5])
    y = Type(tuple(level), y.shifts, y.images, y.zero)
    sizes = axes.sizes
    images = {axis for axis in axes.left if axis >= 5 and sizes[axis] != 1}
    own_dims = {axis for axis in {0} | images if sizes[axis] != 1}
    other = {3} if sizes[3] != 1 else set()
    return engine.contract(x, y, summed=axes.summed, batch=axes.batch, own_dims=own_dims, other=other, sizes=sizes)


@rule("_trilinear")
def _trilinear(s: Step) -> Known:
    """Return Σ x[n, i] W[o, i, j] z[n, j], as `bilinear` records it; other forms of three factors fix them."""
    x, w, z = (s.arg(index) for index in range(3))
    if [list(s.arg(index)) for index in range(3, 7)] != [[1, 3], [0], [1, 2], [2, 3]]:
        return fix_all(s)
    (n, i), (o, _, j) = s.shape(x), s.shape(w)
    sizes = {0: n, 1: i, 2: o, 3: j}
    second = s.type(z)
    first = contraction(s, x, w, OperandAxes((0, 1), (2, 1, 3), (0, 2, 3), sizes))
    wide = {axis for axis, size in sizes.items() if size != 1}
    result = s.engine.contract(
        Renumber((0, 2, 3)).type(first),
        Renumber((0, 3)).type(second),
        summed={3},
        batch={0} & wide,
        own_dims={2} & wide,
        other=set(),
        sizes=sizes,
    )
    return renumbered(result, {0: 0, 2: 1}, 4)
