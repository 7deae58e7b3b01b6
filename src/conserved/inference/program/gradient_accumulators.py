"""Nodes of the graph of gradients: whether something holds on to those of parameters, or has hooks on any.

Such a node exists as long as a graph, a data-parallel wrapper or a hook's owner keeps it. PyTorch forgets it when the
data of its parameter gets another precision for a moment: later graphs accumulate through a new node, without the
hooks of the old one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

_MARK = "conserved"


def held_elsewhere(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters whose accumulating node is kept by someone else.

    A node that only this function looked at is gone once it returns, and what was written on it too.
    """
    return [tensor for tensor in parameters if tensor.requires_grad and tensor.is_leaf and _is_kept(tensor)]


def has_hooks(parameter: Tensor) -> bool:
    """Return whether hooks are registered on a parameter that may change its gradient before or after it is
    accumulated.
    """
    on_tensor = getattr(parameter, "_backward_hooks", None) or getattr(parameter, "_post_accumulate_grad_hooks", None)
    return bool(on_tensor) or has_accumulator_hooks(parameter)


def has_accumulator_hooks(tensor: Tensor) -> bool:
    """Return whether Python hooks are registered on the node that accumulates the gradient of a parameter.

    Such hooks may change the gradient and are not among the hooks of the tensor. A node that nobody keeps has none.
    """
    if not (tensor.requires_grad and tensor.is_leaf and _is_kept(tensor)):
        return False
    with torch.inference_mode(False), torch.enable_grad():
        return _has_hooks(get_gradient_edge(tensor).node)


def has_node_hooks(outputs: Iterable[Tensor]) -> bool:
    """Return whether hooks are registered on a node of the graph that made some tensors.

    A forward may put hooks on `grad_fn` of its intermediate results. Nodes that accumulate gradients are left to
    `has_accumulator_hooks`, which knows whose they are.
    """
    waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node: Any = waiting.pop()
        if not hasattr(node, "variable") and _has_hooks(node):
            return True
        following = {child for child, _ in node.next_functions if child is not None} - seen
        seen |= following
        waiting.extend(following)
    return False


def _has_hooks(node: Any) -> bool:
    # The handle of a hook refers to the dictionary of all hooks of its sort: ours is taken out again at once.
    for register in (node.register_prehook, node.register_hook):
        handle = register(_do_nothing)
        hooks = handle.hooks_dict_ref()
        others = len(hooks) - 1 if hooks is not None else 0
        handle.remove()
        if others:
            return True
    return False


def _do_nothing(*_: Any) -> None:
    return None


def _is_kept(tensor: Tensor) -> bool:
    _notes(tensor)[_MARK] = True
    return _notes(tensor).pop(_MARK, None) is not None


def _notes(tensor: Tensor) -> dict[str, bool]:
    """Return what is written on a tensor's accumulating node, and goes with it."""
    with torch.inference_mode(False), torch.enable_grad():
        node: Any = get_gradient_edge(tensor).node
    notes: dict[str, bool] = node.metadata
    return notes
