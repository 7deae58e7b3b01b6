"""The coarsest precision a function computes in, which may be coarser than that of its inputs and outputs.

A function of float32 that casts to bfloat16 inside is a staircase: seen in steps of float32 it is flat or jumps, and
its backward rounds to bfloat16. It is checked as what it is, a function of bfloat16.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conserved._torch_compat import TorchDispatchMode, tree_leaves
from conserved.inference.probing.numerical_function import NumericalFunction
from conserved.tolerances import UNIT


class _RecordTypes(TorchDispatchMode):
    """Records the floating-point types of results that depend on the inputs.

    Constants are left out: an identity matrix is often made in float32 and then converted. Results of unknown origin,
    as of a kernel that is given a pointer, do not count either.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()
        self._dependent: dict[int, weakref.ref[Tensor]] = {id(value): weakref.ref(value) for value in inputs}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(self._depends(leaf) for leaf in tree_leaves((args, kwargs))):
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and leaf.dtype in UNIT:
                    self.seen.add(leaf.dtype)
                    self._dependent[id(leaf)] = weakref.ref(leaf)
        return result

    def _depends(self, leaf: Any) -> bool:
        known = self._dependent.get(id(leaf)) if isinstance(leaf, Tensor) else None
        return known is not None and known() is leaf


def inner_precision(function: NumericalFunction) -> torch.dtype:
    """Return the coarsest precision among the inputs of a function and the results of the operators it runs.

    Kernels are opaque: the precision they compute in shows in the measured noise.
    """
    plain = function.uncompiled
    values = [value.detach().clone() for value in plain.values]
    mode = _RecordTypes(values)
    try:
        with torch.no_grad(), mode:
            plain._ran(values)
    except Exception:  # a kernel may refuse a mode in any way it likes
        return function.precision
    return max((function.precision, *mode.seen), key=lambda dtype: UNIT[dtype])


def in_inner_precision(function: NumericalFunction) -> NumericalFunction:
    """Return the function with inputs of the precision that it computes in, where that is coarser than theirs."""
    inner = inner_precision(function)
    if UNIT[inner] <= UNIT[function.precision]:
        return function
    own = [value.dtype for value in function.values]

    def widen(call: Callable[[Sequence[Tensor]], Any]) -> Callable[[Sequence[Tensor]], Any]:
        return lambda values: call([value.to(dtype) for value, dtype in zip(values, own, strict=True)])

    note = f"it computes in {str(inner)[6:]} inside, and was checked as a function of {str(inner)[6:]} inputs."
    return replace(
        function,
        call=widen(function.call),
        eager=None if function.eager is None else widen(function.eager),
        values=tuple(value.to(inner) if UNIT[inner] > UNIT[value.dtype] else value for value in function.values),
        notes=(*function.notes, note),
    )
