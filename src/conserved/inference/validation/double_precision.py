"""Runs a program in float64, whatever precision it was written for.

Libraries cast to float32 inside norms, softmax and routers, and programs make tensors of the default precision. Within
`in_double_precision` every function sees float64 tensors, a cast to a lower precision is one to float64, and a tensor
that is made in a lower precision is converted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from conserved._torch_compat import tree_map

WIDE: dict[torch.dtype, torch.dtype] = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}
"""By lower precision, the one that stands for it."""

_CASTS = {
    Tensor.float: torch.float64,
    Tensor.half: torch.float64,
    Tensor.bfloat16: torch.float64,
    getattr(Tensor, "cfloat"): torch.complex128,  # noqa: B009  (missing from the stubs)
    getattr(Tensor, "chalf"): torch.complex128,  # noqa: B009
}

_WRITES = {Tensor.__setitem__, Tensor.copy_}
"""Functions that write to their first argument and do not end in an underscore, or must keep its memory."""


class DoublePrecision(TorchFunctionMode):
    """Functions of torch compute in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__"):
            return func(*args, **kwargs)
        if func in _CASTS:
            return widen(args[0]).to(_CASTS[func])
        if _writes(func, kwargs):
            # The tensor that is written to keeps its memory: other tensors may be views of it.
            first = args[:1]
            args = (*first, *tree_map(widen, tuple(args[1:])))
            kwargs = {name: value if name == "out" else tree_map(widen, value) for name, value in kwargs.items()}
            return func(*args, **kwargs)
        if _is_view(func):
            return func(*args, **kwargs)
        args, kwargs = tree_map(widen, (tuple(args), dict(kwargs)))
        return tree_map(widen, func(*args, **kwargs))


def widen(value: Any) -> Any:
    """Return a tensor, or the name of a precision, in double precision; anything else as it is."""
    if isinstance(value, torch.dtype):
        return WIDE.get(value, value)
    if isinstance(value, Tensor) and type(value) in (Tensor, nn.Parameter) and value.dtype in WIDE:
        return value.to(WIDE[value.dtype])
    return value


def _writes(func: Any, kwargs: Any) -> bool:
    name = getattr(func, "__name__", "")
    return func in _WRITES or kwargs.get("out") is not None or (name.endswith("_") and not name.endswith("__"))


_VIEWS = frozenset(
    (
        *("view", "reshape", "__getitem__", "select", "narrow", "slice", "t", "transpose", "permute", "unbind"),
        *("split", "expand", "expand_as", "view_as", "unsqueeze", "squeeze", "diagonal", "as_strided", "detach"),
        *("unfold", "movedim", "swapaxes", "numel", "size", "dim", "stride", "is_floating_point", "is_complex"),
        *("tolist", "data_ptr", "storage_offset", "untyped_storage", "requires_grad_", "retain_grad", "chunk"),
        *("register_hook", "item", "flatten"),
    )
)
"""Functions that return a view of their argument, or something about it: a converted copy would not be a view."""


def _is_view(func: Any) -> bool:
    return getattr(func, "__name__", "") in _VIEWS


@contextmanager
def in_double_precision(tensors: Sequence[Tensor] = ()) -> Iterator[None]:
    """Compute in float64 within the context; attention runs as the formula it stands for.

    Args:
        tensors: parameters and buffers that hold float64 values within it and their own afterwards.
    """
    former = [(tensor, tensor.data) for tensor in tensors]
    try:
        with ExitStack() as stack:
            for tensor in tensors:
                # A copy also of what is wide already: a norm in training writes to its buffers.
                tensor.data = widen(tensor.data) if tensor.dtype in WIDE else tensor.data.clone()
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autocast("cpu", enabled=False))
            if torch.cuda.is_initialized():
                stack.enter_context(torch.autocast("cuda", enabled=False))
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.enter_context(DoublePrecision())
            yield
    finally:
        for tensor, value in former:
            tensor.data = value
