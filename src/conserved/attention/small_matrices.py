"""Where the small matrices of a few heads are factored, and how they get there without stopping the device.

A factorisation of one 64 × 64 matrix takes a GPU milliseconds and a processor a fraction of one, so a few heads are
brought to the processor. A copy is queued behind the work it needs, and waited for only when it is used: what is queued
after it goes on in the meantime. Of many heads a device factors all at once, and they stay on it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

HOST_HEADS = 16
"""Up to this many heads the processor is faster."""


def fetched(x: Tensor, heads: int) -> Callable[[], Tensor]:
    """Queue a copy to where matrices of so many heads are factored, and return a function that waits for it."""
    if x.device.type == "cpu" or heads > HOST_HEADS:
        return lambda: x
    if x.device.type != "cuda":
        return lambda: x.cpu()
    copy = x.to("cpu", non_blocking=True)
    event = torch.cuda.current_stream(x.device).record_event()

    def arrived() -> Tensor:
        event.synchronize()
        return copy

    return arrived


def placed(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    """Return small tensors of one dtype on the device, by one copy that the host does not wait for."""
    if all(x.device == device for x in tensors):
        return list(tensors)
    flat = torch.cat([x.reshape(-1) for x in tensors])
    if device.type == "cuda":
        flat = flat.pin_memory().to(device, non_blocking=True)
    parts = flat.to(device).split([x.numel() for x in tensors])
    return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]
