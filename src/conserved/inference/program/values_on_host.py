"""Values of constants in a program that runs on the meta device. Only these are computed on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from conserved._torch_compat import schema_of, tree_flatten, tree_map
from conserved.inference.program.captured_program import Operation, ValueRef

COMPUTED = 16_000_000
"""Constants of at most this many entries are computed."""

FROM_PYTHON = (torch.tensor, torch.as_tensor, torch.asarray)
"""Functions that make a tensor from Python's numbers: on the meta device these would be lost, and nothing recorded."""

INDEXING = (Tensor.__getitem__, Tensor.__setitem__)
"""Functions that make tensors from lists of numbers on the way."""


def compute_on_host(
    operation: Operation, func: Any, results: Sequence[Tensor], constants: Mapping[int, Tensor | None]
) -> Sequence[Tensor]:
    """Return what an operation on constants makes.

    Args:
        operation: the operation, as it was recorded.
        func: the operator of PyTorch.
        results: its results on the meta device.
        constants: entries of constants, by value; None where nobody has them.

    Returns:
        The results with their entries; nothing where they are too large or the operator cannot run on the host.
    """
    inputs = operation.inputs()
    if sum(tensor.numel() for tensor in results) > COMPUTED or any(constants[value] is None for value in inputs):
        return ()
    copies = schema_of(func).is_mutable

    def given(leaf: Any) -> Any:
        if isinstance(leaf, ValueRef):
            entries = constants[leaf.value]
            assert entries is not None
            return entries.detach().to("cpu", copy=copies)
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    args, kwargs = tree_map(given, (operation.args, operation.kwargs))
    try:
        made = [leaf for leaf in tree_flatten(func(*args, **kwargs))[0] if isinstance(leaf, Tensor)]
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
        return ()
    return made if [tensor.shape for tensor in made] == [tensor.shape for tensor in results] else ()


def make_with_values(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return a meta tensor of Python's numbers, copied from one on the host; None if it is to be another tensor."""
    device = torch.device(kwargs.get("device") or torch.get_default_device())
    given = tree_flatten((args, dict(kwargs)))[0]
    if device.type != "meta" or kwargs.get("requires_grad") or any(isinstance(leaf, Tensor) for leaf in given):
        return None
    made: Tensor = func(*args, **{**kwargs, "device": "cpu"})
    return made.to(device)


def index_with_values(index: Any, device: torch.device) -> Any:
    """Return an index of a meta tensor with lists of numbers as tensors."""
    if isinstance(index, tuple):
        return tuple(index_with_values(entry, device) for entry in index)
    if isinstance(index, list) and index and all(isinstance(entry, (int, bool)) for entry in index):
        return make_with_values(torch.tensor, (index,), {"device": device})
    return index
