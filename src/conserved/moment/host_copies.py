"""Copies between the host and a device that do not make either wait for the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Shaped
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class HostCopy:
    """A tensor that is being copied to the host."""

    host: Tensor
    event: torch.cuda.Event | None

    @staticmethod
    def of(tensor: Shaped[Tensor, "..."]) -> HostCopy:
        """Start copying; on a GPU the copy is queued behind the work that makes the numbers.

        Args:
            tensor: a tensor on any device.

        Returns:
            The copy, which `read` waits for.
        """
        if tensor.device.type != "cuda":
            return HostCopy(tensor.detach().cpu(), None)
        with torch.cuda.device_of(tensor):
            # By name: the default device may be another.
            host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            host.copy_(tensor.detach(), non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return HostCopy(host, event)

    @property
    def arrived(self) -> bool:
        """Whether reading does not wait."""
        return self.event is None or self.event.query()

    def read(self) -> Shaped[Tensor, "..."]:
        """Return the numbers, once they are there."""
        if self.event is not None:
            self.event.synchronize()
        return self.host


def send_to_device(numbers: NDArray[Any], device: torch.device) -> Shaped[Tensor, "*numbers"]:
    """Return numbers of the host on a device, without making a GPU wait for them."""
    host = torch.from_numpy(numbers)
    # From memory that may be paged out, more than a few kilobytes are copied only once the device has caught up.
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def to_host(tensors: Sequence[Shaped[Tensor, "..."]]) -> list[NDArray[np.float64]]:
    """Return small tensors on the host in float64. Tensors of one device share one copy, because each copy waits."""
    arrays: dict[int, NDArray[np.float64]] = {}
    for device in {tensor.device for tensor in tensors}:
        on_device = {index: tensor for index, tensor in enumerate(tensors) if tensor.device == device}
        together = torch.cat([tensor.detach().double().flatten() for tensor in on_device.values()]).cpu().numpy()
        parts = np.split(together, np.cumsum([tensor.numel() for tensor in on_device.values()])[:-1])
        arrays |= {
            index: part.reshape(tensor.shape) for (index, tensor), part in zip(on_device.items(), parts, strict=True)
        }
    return [arrays[index] for index in range(len(tensors))]
