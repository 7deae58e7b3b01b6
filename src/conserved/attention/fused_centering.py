"""Launch the kernels of centered attention where they apply, with gradients."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from conserved._torch_compat import dispatch_modes, in_function_transform
from conserved.attention.sampled_rows import SampledPositions

WIDEST = 256
"""The widest head of which a tile fits the registers of a program."""

_BLOCK = 64
"""Tokens that a program shifts."""

_TILE = 8192
"""Numbers in a tile of keys: two of keys and two of values are 64 KiB, which the shared memory of a processor holds."""

_PROGRAMS = 512
"""Programs that a device runs at a time, about: long sequences are split until there are as many."""

ENABLED = True
"""Whether kernels are used where they apply; a benchmark compares both."""


def kernels_apply(*tensors: Tensor) -> bool:
    """Return whether the kernels can take tensors with axes (batch, heads, length, width).

    They take plain tensors in half precision on a GPU, of equal widths. Under compilation, transforms of functions and
    dispatch modes PyTorch's own operations are used, because only those are seen there.
    """
    first = tensors[0]
    return (
        ENABLED
        and not torch.compiler.is_compiling()
        and all(_readable(tensor) and tensor.shape[-1] == first.shape[-1] for tensor in tensors)
        and not in_function_transform()
        and not dispatch_modes()
        and _can_compile(first)
    )


def _readable(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.device.type == "cuda"
        and tensor.dtype in (torch.bfloat16, torch.float16)
        and tensor.ndim == 4
        and tensor.stride(-1) == 1
        and 16 <= tensor.shape[-1] <= WIDEST
        and tensor.numel() > 0
    )


def _can_compile(tensor: Tensor) -> bool:
    """Return whether kernels can be compiled for the device, width and precision of a tensor; tried once for each.

    That takes a C compiler, and enough shared memory for a tile. Nothing can be tried while a CUDA graph is recorded.
    """
    key = (tensor.device, tensor.shape[-1], tensor.dtype)
    if key not in _COMPILED:
        if torch.cuda.is_current_stream_capturing():
            return False
        _COMPILED[key] = find_spec("triton") is not None and _try_kernels(tensor)
    return _COMPILED[key]


_COMPILED: dict[tuple[torch.device, int, torch.dtype], bool] = {}
"""Whether kernels can be compiled, by device, width and precision."""


def _try_kernels(tensor: Tensor) -> bool:
    ones = torch.ones(1, 1, 16, tensor.shape[-1], device=tensor.device, dtype=tensor.dtype)
    positions = SampledPositions.of(16, 16, 1)
    try:
        constants = sampled_constants(ones, ones, ones, positions, 0.25, causal=True, gates=(2.0, 0.75, 1.0))
        shifted, _ = ShiftedKeysAndValues.apply(ones, ones, *constants)
        restored = ShiftedOutput.apply(shifted, constants[0])
        return bool((shifted == 0).all()) and bool((restored == 1).all())
    except Exception as problem:
        warnings.warn(
            f"Triton cannot compile kernels for {tensor.device} ({type(problem).__name__}: {str(problem)[:200]}). "
            "Centered attention uses PyTorch's operations, which are slower and give the same numbers.",
            RuntimeWarning,
            stacklevel=2,
        )
        return False


def sampled_constants(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: SampledPositions,
    scale: float,
    *,
    causal: bool,
    gates: tuple[float, float, float],
) -> tuple[Tensor, Tensor]:
    """Return the constants of keys and values, (batch, key heads, 1, width), from sampled rows, in two launches.

    Args:
        query: (batch, heads, queries, width).
        key: (batch, key heads, keys, width).
        value: as `key`.
        positions: the sampled queries.
        scale: the factor of the scores.
        causal: whether a query sees the keys up to its own only.
        gates: how many standard deviations a component must exceed, the least share that a head must gain, and the
            largest change of scores by rounding.

    Returns:
        Constants in the precision of keys and values.
    """
    from conserved.attention.centering_kernels import choose_constants, sum_rows

    batch, heads, keys, width = key.shape
    groups = query.shape[1] // heads
    used = positions.number * groups
    block = max(16, min(128, _TILE // _power(width)))
    stride = -(-keys // block)
    splits = min(-(-keys // block), max(1, _PROGRAMS // (batch * heads)))
    split = block * -(-keys // (block * splits))
    splits = -(-keys // split)
    sizes = {"GROUPS": groups, "WIDTH": width, "COLUMNS": _power(width), "ROWS": _power(used), "BLOCK": block}
    parts = (batch * heads, splits, 2, _power(used))
    sums = torch.empty(*parts, _power(width), device=key.device, dtype=torch.float32)
    scalars = torch.empty(parts, device=key.device, dtype=torch.float32)
    constants = [torch.empty(batch, heads, 1, width, device=key.device, dtype=t.dtype) for t in (key, value)]
    strides = [stride for tensor in (query, key, value) for stride in tensor.stride()[:3]]
    rows = (positions.first, positions.step, positions.number, used)
    with torch.cuda.device_of(key):
        sum_rows[(batch * heads, splits)](
            *(query, key, value, sums, scalars),
            *strides,
            *(heads, keys, *rows, split, scale),
            CAUSAL=causal,
            **sizes,
            num_warps=8,
            num_stages=2,
        )
        choose_constants[(batch * heads,)](
            *(query, key, sums, scalars, *constants),
            *strides[:6],
            *(heads, *rows, splits, stride, -(-keys // stride), scale, *gates),
            **sizes,
        )
    return constants[0], constants[1]


class ShiftedKeysAndValues(torch.autograd.Function):
    """Keys and values minus one constant per head; gradients pass unchanged."""

    @staticmethod
    def forward(key: Tensor, value: Tensor, key_constant: Tensor, value_constant: Tensor) -> tuple[Tensor, Tensor]:
        """Subtract both in one launch."""
        from conserved.attention.centering_kernels import subtract_constants

        shifted = torch.empty_like(key), torch.empty_like(value)
        batch, heads, keys, width = key.shape
        strides = (stride for tensor in (key, value, *shifted) for stride in tensor.stride()[:3])
        with torch.cuda.device_of(key):
            subtract_constants[(-(-keys // _BLOCK), batch * heads)](
                *(key, value, key_constant, value_constant, *shifted),
                *strides,
                *(heads, keys),
                WIDTH=width,
                COLUMNS=_power(width),
                BLOCK=_BLOCK,
            )
        return shifted

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradients of the shifted tensors."""
        return (*gradients, None, None)


class ShiftedOutput(torch.autograd.Function):
    """The output of attention plus one constant per key head; the gradient passes unchanged."""

    @staticmethod
    def forward(output: Tensor, constant: Tensor) -> Tensor:
        """Add the constant in one launch."""
        from conserved.attention.centering_kernels import add_constants

        result = torch.empty_like(output)
        batch, heads, queries, width = output.shape
        strides = (stride for tensor in (output, result) for stride in tensor.stride()[:3])
        with torch.cuda.device_of(output):
            add_constants[(-(-queries // _BLOCK), batch * heads)](
                *(output, constant, result),
                *strides,
                *(heads, queries),
                GROUPS=heads // constant.shape[1],
                WIDTH=width,
                COLUMNS=_power(width),
                BLOCK=_BLOCK,
            )
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient of the output."""
        return (*gradients, None)


def _power(number: int) -> int:
    """Return the least power of two that is not smaller than a number, and at least 16, which matrix products need."""
    return max(16, 1 << (number - 1).bit_length())
