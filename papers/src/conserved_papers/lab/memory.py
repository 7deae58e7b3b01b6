"""How many examples fit through a stack of models at a time, from what one forward pass keeps for its backward pass."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from conserved_papers.lab.data.examples import Examples

_MARGIN = 3.0
"""Temporaries and gradients of activations beside what is kept, as a factor."""

_SHARE = 0.7
"""The share of the device's free memory that is used."""

_CPU_BUDGET = 2 << 30
_SAMPLES = 2


def bytes_kept(model: nn.Module, examples: Examples, dtype: torch.dtype) -> int:
    """Bytes per example that a forward pass in a precision keeps until its backward pass, weights not counted."""
    model = copy.deepcopy(model).to(dtype)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    seen: dict[int, int] = {}

    def kept(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    inputs = examples.inputs[:_SAMPLES]
    with saved_tensors_hooks(kept, lambda tensor: tensor):
        output = model(inputs.to(dtype) if inputs.is_floating_point() else inputs)
        # The loss keeps the log-probabilities too.
        seen[-1] = output.numel() * output.element_size()
    return -(-sum(seen.values()) // len(inputs))


def micro_batch(
    model: nn.Module, examples: Examples, dtype: torch.dtype, models: int, device: torch.device, budget: int | None
) -> int:
    """Examples per model that go through all models at once within a budget of bytes, at least one."""
    if budget is None and device.type == "cuda":
        torch.cuda.empty_cache()
    if budget is None:
        budget = int(_SHARE * torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else _CPU_BUDGET
    return max(1, int(budget / (_MARGIN * models * bytes_kept(model, examples, dtype))))
