"""Which calls of torch a pass makes, and what it draws or selects on the way: shared by replays of one pass.

Two passes are comparable if they differ by rounding alone. A mask of dropout and the experts a router selects are not
rounding, so a replay takes over those of the first pass. A call whose result was stored in half precision is one whose
rounding can be sampled; results that a program computes in float32 inside of a bfloat16 model are not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from conserved._torch_compat import tree_leaves
from conserved.tolerances import HALF

_SELECTS = {torch.topk, Tensor.topk}
"""Functions that return the largest entries and their indices."""

_DRAWS = {
    torch.rand,
    torch.randn,
    torch.rand_like,
    torch.randn_like,
    torch.bernoulli,
    Tensor.bernoulli,
    torch.multinomial,
    Tensor.multinomial,
    torch.normal,
}
"""Functions whose results are random numbers."""

_DROPS = {F.dropout, torch.dropout}


@dataclass(eq=False)
class CallLog:
    """The calls of one forward pass, in order."""

    names: list[str] = field(default_factory=list)
    half: list[bool] = field(default_factory=list)
    """Whether each call returned a tensor in half precision."""
    pinned: dict[int, Tensor] = field(default_factory=dict)
    """By call, what was drawn or selected: random numbers, masks, indices."""
    longest: int = 1
    """The largest number of terms that a sum over a dimension, or over all positions, may have."""
    opaque: str = ""
    """A call that draws random numbers inside of a kernel, so that no other form repeats them; empty if none does."""

    def follows(self, position: int, func: Callable[..., Any]) -> bool:
        """Return whether the pass that is under way makes the same call here."""
        return position < len(self.names) and self.names[position] == name_of(func)


class CallRecording(TorchFunctionMode):
    """Write down every call, and change nothing."""

    def __init__(self, log: CallLog) -> None:
        super().__init__()
        self._log = log

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if is_attribute(func):
            return out
        log, position = self._log, len(self._log.names)
        log.names.append(name_of(func))
        log.half.append(any(isinstance(leaf, Tensor) and leaf.dtype in HALF for leaf in tree_leaves(out)))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim:
                width = leaf.shape[-1] or 1
                log.longest = max(log.longest, width, leaf.numel() // width)
        if func in _SELECTS:
            log.pinned[position] = out[1].detach()
        elif func in _DRAWS:
            log.pinned[position] = out.detach()
        elif func in _DROPS and _active(args, kwargs):
            # What is zero in the input is zero with either mask.
            log.pinned[position] = (out != 0) | (args[0] == 0)
        elif func is F.scaled_dot_product_attention and kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0):
            log.opaque = "attention draws a mask of dropout inside of its kernel"
        return out


def repeat_pinned(
    recorded: Tensor, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], wide: torch.dtype
) -> Any:
    """Return the result of a call with what was drawn or selected in an earlier pass."""
    if func in _SELECTS:
        dim = kwargs.get("dim", args[2] if len(args) > 2 else -1)
        source: Tensor = args[0] if args else kwargs["input"]
        return torch.return_types.topk((source.gather(dim, recorded), recorded))
    if func in _DRAWS:
        return recorded.to(wide) if recorded.is_floating_point() else recorded
    share = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    return args[0] * recorded / (1 - share)


def is_attribute(func: Callable[..., Any]) -> bool:
    """Return whether a call reads an attribute of a tensor."""
    return getattr(func, "__name__", "") == "__get__"


def name_of(func: Callable[..., Any]) -> str:
    """Return the name by which two calls are compared."""
    return str(getattr(func, "__name__", func))


def _active(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    share = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    return bool(training) and 0 < share < 1
