"""Rules for softmax and normalisation: what does not see a shift or a scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from conserved.inference.rules.step import Known, Step, at, rule
from conserved.inference.rules.sums import EPSILON, add
from conserved.inference.types.engine import ReadPart
from conserved.inference.types.parameter_types import first_use
from conserved.inference.types.reindexing import Regroup, Renumber
from conserved.inference.types.tensor_type import FIXED, Field, Type


@rule("_softmax", "_log_softmax", "_safe_softmax", "softmax", "log_softmax")
def _softmax(s: Step) -> Known:
    """Type a softmax, which ignores a shift along its axis and sees every scale."""
    x = s.type(s.arg(0))
    dim = at(s.arg(1), len(s.out)) if s.out else 0
    if not s.out or s.out[dim] == 1:
        return FIXED
    s.engine.equate(x.factors, ())
    for factor in x.factors:
        s.engine.partition.shatter(factor.atoms)
    s.engine.forget_shift(x, [dim])
    return FIXED


def normalize(s: Step, x: Type, dims: Sequence[int], epsilon: int | float, *, centres: bool) -> Type:
    """Return the type of x over its size along some axes: a scale common along them is forgotten, up to ε.

    Args:
        s: the operation.
        x: the type of the input.
        dims: the axes that are normalised over.
        epsilon: the ε that is added to the squares; 0 for none.
        centres: whether the mean is taken away first, so that a common shift is forgotten as well.

    Returns:
        The type of the output, which does not move.
    """
    level = s.engine.uniform(x.factors, dims)
    for factor in x.factors:
        s.engine.partition.shatter(factor.atoms)
    if epsilon and level:
        # A negative or a large number beside the squares is no small correction: then the scale is seen.
        s.engine.equate(level, (), soft=epsilon if 0 < epsilon <= EPSILON else 0)
    if centres:
        s.engine.forget_shift(x, dims)
    else:
        s.engine.steady(x)
    return FIXED


def affine(s: Step, weight: Any, bias: Any, dims: Sequence[int]) -> Type:
    """Return a gain and a bias over `dims` on something that does not move."""
    result = FIXED
    renumber = Renumber(tuple(dims))
    for ref in (weight, bias):
        known = s.raw(ref) if ref is not None else None
        if isinstance(known, Type):
            # A gain that is computed is multiplied with data, row by row.
            s.engine.let_go(known)
    if weight is not None:
        result = renumber.type(s.type(weight, entries=True))
        s.engine.split_by(result.factors, range(len(s.out)), batch=False)
        result = Type(result.factors, (), s.engine.imaged(result, range(len(s.out))))
    zeros = s.constant(bias)
    # A norm without a bias of its own is given zeros, as a constant that nothing updates.
    if bias is not None and (zeros is None or bool(zeros.any())):
        known = s.raw(bias)
        if isinstance(known, ReadPart):
            fields = [
                Field(tuple(dims.index(dim) for dim in factor.dims), factor.atoms, factor.weight)
                for factor in result.factors
            ]
            known = first_use(s.engine, known, fields, role="bias", entries=True)
        result = add(s.engine, result if weight is not None else FIXED, renumber.type(known))
    return result


def _statistics(s: Step, x: Any) -> None:
    """Fix the input if the program reads its mean or size, which move with it."""
    if any(s.program.is_read(number) for number in s.operation.results[1:]):
        s.engine.zero(s.type(x))


@rule("native_layer_norm")
def _layer_norm(s: Step) -> Any:
    x, shape, weight, bias, epsilon = (s.arg(n) for n in range(5))
    count = len(s.out)
    dims = list(range(count - len(shape), count))
    normalize(s, s.type(x), dims, float(epsilon), centres=True)
    _statistics(s, x)
    if weight is None and bias is None and len(dims) == 1:
        return [Type(centred=frozenset(dims)), FIXED, FIXED]
    return [affine(s, weight, bias, dims), FIXED, FIXED]


@rule("_fused_rms_norm")
def _rms_norm(s: Step) -> Any:
    x, shape, weight, epsilon = (s.arg(n) for n in range(4))
    count = len(s.out)
    dims = list(range(count - len(shape), count))
    normalize(s, s.type(x), dims, float(epsilon or torch.finfo(s.program.values[x.value].dtype).eps), centres=False)
    _statistics(s, x)
    return [affine(s, weight, None, dims), FIXED]


@rule("native_group_norm")
def _group_norm(s: Step) -> Any:
    x, weight, bias, _, channels, _, groups, epsilon = (s.arg(n) for n in range(8))
    shape = s.shape(x)
    apart = (shape[0], groups, channels // groups, *shape[2:])
    grouped = Regroup(shape, apart).type(s.type(x))
    normalize(s, grouped, list(range(2, len(apart))), float(epsilon), centres=True)
    _statistics(s, x)
    return [affine(s, weight, bias, [1]), FIXED, FIXED]


@rule(
    "native_batch_norm",
    "_native_batch_norm_legit",
    "cudnn_batch_norm",
    "_native_batch_norm_legit_functional",
    "miopen_batch_norm",
    "_batch_norm_with_update",
    "_native_batch_norm_legit_no_training",
    "_batch_norm_no_update",
)
def _batch_norm(s: Step) -> Any:
    x, weight, bias = s.arg(0), s.arg(1), s.arg(2)
    name = s.operation.name
    if "no_training" in name or "no_update" in name:
        training, epsilon = False, s.arg(6)
    elif "with_update" in name:
        training, epsilon = True, s.arg(6)
    else:
        training, epsilon = bool(s.arg(5)), s.arg(7)
    if name.startswith("aten::_native_batch_norm_legit.no_stats"):
        training, epsilon = bool(s.arg(3)), s.arg(5)
    type_ = s.type(x)
    if training:
        if any(s.program.is_read(number) for number in s.operation.results[1:3]):
            s.engine.zero(type_)
        normalize(s, type_, [dim for dim in range(len(s.out)) if dim != 1], float(epsilon), centres=True)
    else:
        s.engine.zero(type_)
    return [affine(s, weight, bias, [1])] + [FIXED] * (len(s.operation.results) - 1)


@rule("_weight_norm_interface")
def _weight_norm(s: Step) -> Any:
    """Return g v / ‖v‖ along an axis: forgets the length of v."""
    v, g, dim = s.arg(0), s.arg(1), s.arg(2, default=0)
    type_ = s.type(v)
    dims = [d for d in range(len(s.out)) if d != at(dim, len(s.out))]
    s.engine.uniform(type_.factors, dims)
    for factor in type_.factors:
        s.engine.partition.shatter(factor.atoms)
    s.engine.steady(type_)
    if any(s.program.is_read(number) for number in s.operation.results[1:]):
        s.engine.zero(type_)
    gain = s.type(g)
    s.engine.split_by(gain.factors, range(len(s.out)), batch=False)
    return [Type(gain.factors, (), s.engine.imaged(gain, range(len(s.out)))), FIXED]
