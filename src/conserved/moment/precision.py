"""The precision moment maps are computed in, whatever surrounds the computation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import reduce

import torch


def working_dtype(types: Iterable[torch.dtype], dtype: torch.dtype | None) -> torch.dtype:
    """The precision laws are computed in: `dtype` if given, else the legs' common one and at least float32."""
    return dtype or reduce(torch.promote_types, types, torch.float32)


@contextmanager
def full_precision(devices: Iterable[str]) -> Iterator[None]:
    """Keeps a surrounding autocast region, or TF32, from computing laws in less than the working precision.

    Args:
        devices: the types of the devices that are computed on, such as "cpu" or "cuda".

    """
    kinds = set(devices)
    with ExitStack() as undo:
        # There is nothing to keep away from a device without values (meta), which readers refuse in their own words.
        for kind in filter(torch.amp.is_autocast_available, kinds):
            undo.enter_context(torch.autocast(kind, enabled=False))
        if "cuda" in kinds:
            switch = torch.backends.cuda.matmul
            name, exact = ("fp32_precision", "ieee") if hasattr(switch, "fp32_precision") else ("allow_tf32", False)
            undo.callback(setattr, switch, name, getattr(switch, name))
            setattr(switch, name, exact)
        yield
