"""Runs one backward pass and determines its coarsest precision, which sets the tolerance of gradient identities.

Models are not computed in the precision of their parameters throughout: libraries run norms and routers in float32
inside a float64 model, and autocast runs products in half precision. The graph of a loss knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

_FINEST_FIRST = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

_COMPILED, _CHECKPOINTED = "CompiledFunctionBackward", "CheckpointFunctionBackward"
"""Nodes that run a graph of their own: what precision that uses is not visible, so single is assumed."""


def coarsest(*precisions: torch.dtype) -> torch.dtype:
    """The least precise of some floating-point types; others are passed over."""
    known = [precision for precision in precisions if precision in _FINEST_FIRST]
    return max(known, key=_FINEST_FIRST.index, default=torch.float64)


def _nodes(loss: Float[Tensor, "..."]) -> Iterator[Any]:
    """Every node of the graph behind a loss."""
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [following for following, _ in node.next_functions]


def _kind(node: Any) -> str:
    return str(node.name()).rpartition("::")[2]


def precision_of(loss: Float[Tensor, "..."]) -> torch.dtype:
    """The coarsest precision of any gradient that flows when `loss` is differentiated."""
    found = {loss.dtype}
    for node in _nodes(loss):
        found.update(part.dtype for part in getattr(node, "_input_metadata", ()) if part is not None)
        if _kind(node) in (_COMPILED, _CHECKPOINTED):
            found.add(torch.float32)
    return coarsest(*found)


def gradients_of(loss: Float[Tensor, "..."], parameters: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """The gradient of a loss in each parameter, None where it reaches none; `.grad` is left as it was."""
    names = [name for name, parameter in parameters.items() if parameter.requires_grad]
    if not any(_kind(node) == _CHECKPOINTED for node in _nodes(loss)):
        found = torch.autograd.grad(loss, [parameters[name] for name in names], allow_unused=True)
        return dict(zip(names, found, strict=True))
    # Reentrant checkpointing refuses autograd.grad: let it accumulate, and put back what was there.
    before = {name: parameters[name].grad for name in names}
    try:
        for name in names:
            parameters[name].grad = None
        loss.backward()
        return {name: parameters[name].grad for name in names}
    finally:
        for name in names:
            parameters[name].grad = before[name]
