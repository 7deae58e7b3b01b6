"""Whether a loss is a function of a model's outputs alone, read off the graph that autograd recorded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

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
