"""The coarsest precision that a backward pass runs in, which is what its identities can be held against.

Models are not computed in the precision of their parameters throughout: libraries run norms and routers in float32
inside a float64 model, and autocast runs products in half precision. The graph of a loss knows.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

_FINEST_FIRST = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

_OPAQUE = ("CompiledFunctionBackward", "CheckpointFunctionBackward")
"""Nodes that run a graph of their own: what precision that uses is not visible, so single is assumed."""


def coarsest(*precisions: torch.dtype) -> torch.dtype:
    """The least precise of some floating-point types; others are passed over."""
    known = [precision for precision in precisions if precision in _FINEST_FIRST]
    return max(known, key=_FINEST_FIRST.index, default=torch.float64)


def of_backward(loss: Float[Tensor, "..."]) -> torch.dtype:
    """The coarsest precision of any gradient that flows when `loss` is differentiated."""
    found = {loss.dtype}
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found.update(part.dtype for part in getattr(node, "_input_metadata", ()) if part is not None)
        if node.name().split("::")[-1] in _OPAQUE:
            found.add(torch.float32)
        waiting += [following for following, _ in node.next_functions]
    return coarsest(*found)
