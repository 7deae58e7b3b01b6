"""A float64 model that stays in float64: casts to lower precisions are passed over.

Libraries run norms, softmax and routers in float32 whatever the precision of a model. Laws hold all the same, but to
the rounding of that precision. To see them to 1e-11, and to differentiate three times, the casts must be out of the
way; nothing else about the computation changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_NAMED = {torch.float32, torch.float16, torch.bfloat16}


class _NoLowerPrecision(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        subject = args[0] if args and isinstance(args[0], Tensor) else None
        if subject is not None and subject.dtype == torch.float64:
            if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
                return subject
            if func in (Tensor.to, Tensor.type) and (
                kwargs.get("dtype") in _NAMED or any(a in _NAMED for a in args[1:])
            ):
                kwargs.pop("dtype", None)
                rest = [a for a in args[1:] if a not in _NAMED]
                return func(subject, *rest, **kwargs) if rest or kwargs else subject
            if kwargs.get("dtype") in _NAMED:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


@contextmanager
def kept() -> Iterator[None]:
    """Within it, float64 tensors are not cast to lower precisions."""
    with _NoLowerPrecision():
        yield
