"""Rules for constants, copies, dropout and stopped gradients."""

from __future__ import annotations

import math
from typing import Any

from conserved.inference.rules.step import Known, Step, fix_all, number, rule
from conserved.inference.types.reindexing import broadcast
from conserved.inference.types.tensor_type import FIXED, ZERO, Type


@rule(
    *("zeros", "zeros_like", "new_zeros", "zero", "empty", "empty_like", "new_empty", "empty_strided"),
    *("new_empty_strided", "empty_permuted"),
)
def _zeros(s: Step) -> Known:
    return ZERO


_MADE = (
    *("fill", "full", "full_like", "new_full", "ones", "ones_like", "new_ones", "arange", "scalar_tensor"),
    *("linspace", "eye", "rand", "randn", "rand_like", "randn_like", "bernoulli", "randint", "randperm", "normal"),
    *("uniform", "argmax", "argmin", "isnan", "isinf", "logical_not", "logical_and"),
    *("logical_or", "logical_xor", "any", "all", "bitwise_and", "bitwise_or", "bitwise_not", "nonzero", "bincount"),
    *("histc", "searchsorted", "bucketize", "multinomial", "floor_divide"),
    *("tril_indices", "triu_indices", "exponential", "random", "_local_scalar_dense", "_assert_async"),
    *("is_same_size", "equal", "_unique2", "unique_consecutive", "heaviside", "signbit"),
)
"""Operations that create, draw, compare or count."""


@rule(*_MADE)
def constant(s: Step) -> Known | list[Known]:
    """Type an operation whose result does not move: it creates, draws, compares or counts."""
    result: list[Known] = [FIXED] * max(1, len(s.operation.results))
    return result


@rule("eq", "ne", "lt", "le", "gt", "ge")
def _compare(s: Step) -> Known:
    """Type a comparison: its result depends on the scale of a value, unless the threshold is zero."""
    left, right = s.arg(0), s.arg(1)
    for value, other in ((left, right), (right, left)):
        threshold = number(other, s)
        if threshold is not None and math.isfinite(threshold) and threshold != 0 and s.floating(value):
            s.engine.zero(s.type(value))
    return FIXED


@rule("copy")
def _copy(s: Step) -> Known:
    count = len(s.out)
    source = s.arg(1)
    return broadcast(s.shape(source), count).type(s.type(source))


@rule("native_dropout")
def _dropout(s: Step) -> Any:
    """Type a random mask, which keeps positive scales and mixes nothing."""
    if s.arg(2) is False or s.arg(1) == 0:
        return [s.raw(s.arg(0)), FIXED]
    x = s.type(s.arg(0))
    s.engine.split_by(x.factors, range(len(s.out)), batch=False)
    return [Type(x.factors, (), s.engine.imaged(x, range(len(s.out))), x.zero), FIXED]


@rule("detach")
def _detach(s: Step) -> Known:
    """Type a detach: no gradient passes, so the identity holds only for motions that leave the value alone."""
    known = s.raw(s.arg(0))
    return known if isinstance(known, Type) and known.fixed else fix_all(s)
