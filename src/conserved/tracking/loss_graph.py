"""What a loss makes of a model's outputs, read off the graph that autograd recorded."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

MOST_BETWEEN = 1_000
"""Nodes of a loss that are looked at between it and the outputs."""

MOST = 100_000
"""Nodes of a graph that are visited; a loss beside a model has tens of them."""


def reaches_beside(loss: Tensor, outputs: Sequence[Any], parameters: Iterable[Tensor]) -> bool:
    """Return whether the graph of a loss reaches a parameter on a way that does not lead through the outputs.

    Args:
        loss: the loss, with its graph; the graph may have been used already.
        outputs: the nodes (`grad_fn`) of the model's outputs in the passes of the step.
        parameters: the parameters of the model.

    Returns:
        True for a penalty on the weights or a loss on features inside the model. False if no such way was found.
    """
    ends = {id(parameter) for parameter in parameters}
    # Nodes are kept: those of C++ are wrapped again when they are asked for, and a wrapper's identity is used again.
    seen, waiting = {id(node): node for node in outputs}, [loss.grad_fn]
    while waiting and len(seen) < MOST:
        node = waiting.pop()
        if node is None or id(node) in seen:
            continue
        seen[id(node)] = node
        if id(getattr(node, "variable", None)) in ends:
            return True
        waiting += [parent for parent, _ in node.next_functions]
    return False


def loss_under_way(outputs: Sequence[Any]) -> Tensor | None:
    """Return the loss whose backward pass calls this, from a hook; None where the pass runs in another thread.

    Args:
        outputs: the nodes of the model's outputs that the loss has to reach.
    """
    frame = sys._getframe(1)
    while frame is not None:
        # `Tensor.backward(self)` and `torch.autograd.backward(tensors)`.
        if frame.f_code.co_name == "backward" and frame.f_code.co_filename.endswith(_BACKWARD):
            tensors = frame.f_locals.get("self", frame.f_locals.get("tensors"))
            first = tensors[0] if isinstance(tensors, list | tuple) and tensors else tensors
            if isinstance(first, Tensor) and first.numel() == 1 and first.grad_fn is not None:
                return first
        frame = frame.f_back  # type: ignore[assignment]
    return None


_BACKWARD = ("torch/_tensor.py", "torch/autograd/__init__.py")

_PAIRED = ("Unsqueeze", "Expand", "View", "Reshape", "Cdist", "Mm", "Bmm", "Addmm")
"""Operations that make pairs of rows on purpose, or take part in it."""


@dataclass(frozen=True, slots=True)
class CrossedShapes:
    """A shape (n,) or (n, 1) that an operation of a loss broadcasts to (n, n)."""

    own: tuple[int, ...]
    square: tuple[int, ...]
    difference: bool
    """Whether the operation is a difference, as of outputs and targets; a product may be with a matrix of pairs."""


def crossed_shapes(loss: Tensor, outputs: Sequence[Any]) -> CrossedShapes | None:
    """Return a shape (n,) or (n, 1) and the shape (n, n) that an operation of the loss broadcasts it to.

    Only operations whose other argument is a constant count, as labels and weights of examples are: pairs of outputs
    with each other are a loss of their own.

    Args:
        loss: the loss, with its graph.
        outputs: the nodes of the model's outputs, where the search ends.
    """
    for node in _between(loss, outputs):
        shape = _shape(node)
        parents = [(parent, index) for parent, index in node.next_functions if parent is not None]
        if shape is None or len(parents) != 1 or len(shape) != 2 or shape[0] != shape[1] or shape[0] < 2:
            continue
        own = _shape(*parents[0])
        size = shape[0]
        made = type(node).__name__.startswith(_PAIRED) or type(parents[0][0]).__name__.startswith(_PAIRED[:1])
        if own in ((size,), (size, 1)) and not made:
            return CrossedShapes(own, shape, type(node).__name__.startswith(("Sub", "Rsub")))
    return None


def _between(loss: Tensor, outputs: Sequence[Any]) -> Iterator[Any]:
    """Yield the nodes of a graph from a loss to the nodes of some outputs."""
    seen, waiting = {id(node): node for node in outputs}, [loss.grad_fn]
    while waiting and len(seen) < MOST_BETWEEN:
        node = waiting.pop()
        if node is None or id(node) in seen:
            continue
        seen[id(node)] = node
        yield node
        waiting += [parent for parent, _ in node.next_functions]


def _shape(node: Any, index: int = 0) -> tuple[int, ...] | None:
    """Return the shape of what a node made in the forward pass; None where PyTorch does not say."""
    metadata = getattr(node, "_input_metadata", None)
    return tuple(metadata[index].shape) if metadata is not None and index < len(metadata) else None
