"""Rules of the checker for operations that only put entries elsewhere: PyTorch runs them on the numbers of entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import torch

from conserved.inference.checker_rules import CheckedStep, rule, values_in
from conserved.inference.motions import (
    Array,
    Motion,
    Unchecked,
    joined,
    need,
    spread,
    taken,
)

SAME = (
    "clone",
    "to_copy",
    "alias",
    "contiguous",
    "lift_fresh",
    "lift",
    "detach",
    "view_as",
    "resolve_conj",
    "positive",
)
ELSEWHERE = (
    *("view", "unsafe_view", "reshape", "reshape_alias", "flatten", "unflatten", "t", "transpose", "permute", "expand"),
    *("unsqueeze", "squeeze", "slice", "select", "split", "split_with_sizes", "unbind", "flip", "repeat", "roll"),
    *("chunk", "movedim", "narrow", "diagonal", "unfold", "tile", "cat", "stack", "tril", "triu", "constant_pad_nd"),
    *("slice_scatter", "select_scatter", "diagonal_scatter", "unsafe_split", "swapaxes", "pixel_shuffle", "diag_embed"),
    *(
        "channel_shuffle",
        "pixel_unshuffle",
        "im2col",
        "rot90",
        "concat",
        "hstack",
        "vstack",
        "view_copy",
        "permute_copy",
    ),
)


@rule(*SAME)
def _same(step: CheckedStep) -> Motion:
    """The same entries."""
    found = step.tensor(0)
    if step.name == "detach":
        need(found.still, "no gradient flows through what moves")
    return replace(found, shape=step.shape())


@rule(*ELSEWHERE)
def _elsewhere(step: CheckedStep) -> list[Motion | None]:
    """Entries in other places take their motions along."""
    operands = values_in(step.record["arguments"])
    if step.name == "constant_pad_nd" and any(step.given(1)):
        need(float(step.given(2, "value", 0.0)) == 0 or not step.tensor(0).scaled, "padded with a number")
        need(not step.tensor(0).shifted, "what is padded is not shifted")
    return placed(step, operands)


def placed(step: CheckedStep, operands: Sequence[int], zeros: Sequence[int] = ()) -> list[Motion | None]:
    """Run an operation on the numbers of its operands' entries; index tensors in `zeros` are taken as zeros."""
    motions, starts, start = [], {}, 1
    for value in dict.fromkeys(operands):
        starts[value] = start
        motions.append(step.at(value))
        start += motions[-1].size
    arguments = [_numbered(step, one, starts, zeros) for one in step.record["arguments"]]
    named = {k: _numbered(step, v, starts, zeros) for k, v in step.record["named"].items() if _plain_argument(v)}
    base, _, overload = step.record["operation"].split("::")[-1].partition(".")
    inner = base.rstrip("_") if base.endswith("_") else base
    try:
        operator = getattr(getattr(torch.ops.aten, inner), overload or "default")
        out = operator(*arguments, **named)
    except Exception as problem:
        raise Unchecked(f"it could not be run on numbers of entries: {type(problem).__name__}") from problem
    results = list(out) if isinstance(out, tuple | list) else [out]
    whole = joined(motions)
    shapes = [step.shape(n) for n in range(min(len(results), len(step.record["results"])))]
    return [
        taken(whole, np.round(one.numpy()).astype(np.int64) - 1, shape)
        for one, shape in zip(results, shapes, strict=False)
    ]


def _plain_argument(argument: Any) -> bool:
    return not isinstance(argument, str)


def _numbered(step: CheckedStep, argument: Any, starts: Mapping[int, int], zeros: Sequence[int]) -> Any:
    if isinstance(argument, Mapping) and "value" in argument:
        value = int(argument["value"])
        shape = tuple(step.values[value]["shape"])
        if value in starts:
            return torch.arange(starts[value], starts[value] + prod(shape), dtype=torch.float64).reshape(shape)
        if value in zeros:
            return torch.zeros(shape, dtype=torch.int64)
        constant = step.values[value].get("constant")
        if constant is None:
            raise Unchecked("where entries are put depends on numbers")
        return torch.as_tensor(constant).reshape(shape)
    if isinstance(argument, list | tuple):
        return [_numbered(step, one, starts, zeros) for one in argument]
    return argument


def _positions(geometry: Any) -> Array:
    """The place in memory of every entry of a tensor."""
    shape, strides, offset = geometry
    if len(strides) != len(shape):
        raise Unchecked("memory that is not laid out by strides")
    found = np.full(tuple(shape), offset, dtype=np.int64)
    for axis, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        found = found + (np.arange(size) * stride).reshape([-1 if n == axis else 1 for n in range(len(shape))])
    return found.reshape(-1)


@rule("read")
def _read(step: CheckedStep) -> Motion:
    """A view of memory that was written since."""
    base, mine = step.given(1), step.given(2)
    places = _positions(base)
    where = np.full(int(max(places.max(initial=0), _positions(mine).max(initial=0))) + 1, -1, dtype=np.int64)
    where[places] = np.arange(places.size)
    chosen = where[_positions(mine)]
    need((chosen >= 0).all(), "it reads outside what is known")
    return taken(step.tensor(0), chosen, step.shape())


@rule("write")
def _write(step: CheckedStep) -> Motion:
    """Memory of which a part was written."""
    base, part = _positions(step.given(1)), _positions(step.given(3))
    where = np.full(int(max(base.max(initial=0), part.max(initial=0))) + 1, -1, dtype=np.int64)
    where[base] = np.arange(base.size)
    chosen = np.arange(base.size)
    chosen[where[part]] = base.size + np.arange(part.size)
    return taken(joined([step.tensor(0), step.tensor(2)]), chosen, step.shape())


@rule("copy")
def _copy(step: CheckedStep) -> Motion:
    return spread(step.tensor(1), step.shape())


@rule("zeros_like", "zero", "zeros", "new_zeros", "empty_like", "new_empty", "empty")
def _zeros(step: CheckedStep) -> Motion:
    return Motion.still_one(step.shape(), zero=True)


@rule("fill", "full_like", "ones_like", "new_full", "new_ones", "sym_size", "rand_like", "randn_like", "isnan", "isinf")
def _unrelated(step: CheckedStep) -> Motion:
    """What does not depend on the values of its operands, or not on how they move."""
    if step.name == "fill" and step.number_of(1) is not None:
        return spread(step.tensor(1), step.shape())
    return Motion.still_one(step.shape())
