"""Directions that an optimizer does not keep: a/(√b + c) of many pairs of tensors, in one pass over their memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from conserved._torch_compat import foreach_add_, foreach_div, foreach_sqrt
from conserved.moment import triton_backend
from conserved.moment.host_copies import send_to_device
from conserved.moment.layouts import PlainTensors

_BLOCK, _BLOCKS = 1024, 8
"""Entries that a program reads at a time, and how often."""

_TOGETHER = 4
"""Results begin at multiples of so many entries, 16 bytes."""


def root_quotients(
    tops: Sequence[Float[Tensor, "..."]], squares: Sequence[Float[Tensor, "..."]], shift: float | Tensor
) -> list[Float[Tensor, "..."]]:
    """Return a/(√b + shift) for pairs of tensors of equal shapes, at least in float32.

    Args:
        tops: every a.
        squares: every b.
        shift: a number, or a tensor of one number that stays on its device.

    Returns:
        One tensor for each. Nothing waits for the device.
    """
    alike = len({top.dtype for top in tops}) == len({square.dtype for square in squares}) == 1
    if alike and not isinstance(shift, Tensor) and [a.shape for a in tops] == [b.shape for b in squares]:
        tensors = triton_backend.readable([*tops, *squares])
        if tensors is not None:
            return _by_kernel(tensors, tops, squares[0].dtype, shift)
    divisors = foreach_sqrt([_wide(square) for square in squares])
    # One number for all takes fewer launches than a list of them.
    foreach_add_(divisors, [shift] * len(tops) if isinstance(shift, Tensor) else shift)
    return list(foreach_div([_wide(top) for top in tops], divisors))


def _by_kernel(tensors: PlainTensors, tops: Sequence[Tensor], below: torch.dtype, shift: float) -> list[Tensor]:
    """Compute the quotients in one launch, from the addresses of every a and then of every b, all of one type."""
    from conserved.moment import kernels

    device, sizes = tops[0].device, tuple(map(Tensor.numel, tops))
    programs, ends = _programs(sizes, device)
    out = torch.empty(int(ends[-1]), device=device)
    table = send_to_device(np.concatenate((tensors.addresses, ends[:-1], np.array(sizes))), device)
    with torch.cuda.device_of(out):
        if programs.shape[0]:
            kernels.root_quotients[(programs.shape[0],)](
                programs,
                table,
                out,
                len(tops),
                shift,
                A=kernels.TYPES[tops[0].dtype],
                B=kernels.TYPES[below],
                BLOCK=_BLOCK,
                BLOCKS=_BLOCKS,
                ALIGNED=tensors.aligned,
            )
    return [out[begin : begin + top.numel()].view(top.shape) for begin, top in zip(ends.tolist(), tops, strict=False)]


@lru_cache(maxsize=64)
def _programs(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, NDArray[np.int64]]:
    """Return the pair and blocks of every program, and where the results of every pair begin and the last one ends."""
    counts = -(-np.array(sizes) // (_BLOCK * _BLOCKS))
    numbers = np.repeat(np.arange(len(sizes)), counts)
    blocks = np.arange(len(numbers)) - np.repeat(np.cumsum(counts) - counts, counts)
    programs = send_to_device(np.stack((numbers, blocks), -1).astype(np.int32), device)
    rounded = -(-np.array(sizes) // _TOGETHER) * _TOGETHER
    return programs, np.concatenate(([0], np.cumsum(rounded)))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
