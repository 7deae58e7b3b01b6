"""Models that stand for others: a sharded one without its sharding, one without values with made-up ones."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def unsharded(model: nn.Module) -> nn.Module:
    """A copy of the modules of a model that computes what the model computes, on one process.

    FSDP2 and tensor parallelism leave a model's code alone: one gives modules another class, both give them hooks. A
    module of the copy has its first class again and none of these hooks; parameters and everything else are shared.
    """
    made: dict[int, nn.Module] = {}

    def twin(module: nn.Module) -> nn.Module:
        if id(module) in made:
            return made[id(module)]
        cls = type(module)
        if cls.__name__.startswith("FSDP") and any(base.__name__ == "FSDPModule" for base in cls.__bases__):
            cls = next(base for base in cls.__bases__ if base.__name__ != "FSDPModule")
        found = made[id(module)] = cls.__new__(cls)
        vars(found).update(vars(module))
        if "_hf_hook" in vars(found):
            # Accelerate puts a forward of its own in the place of the class's, which fetches weights from elsewhere.
            for name in ("forward", "_hf_hook", "_old_forward"):
                vars(found).pop(name, None)
        found._parameters = dict(module._parameters)
        found._buffers = dict(module._buffers)
        found._modules = {name: child if child is None else twin(child) for name, child in module._modules.items()}
        for name in _HOOKS:
            kept = ((key, hook) for key, hook in getattr(module, name).items() if not _shards(hook))
            setattr(found, name, OrderedDict(kept))
        return found

    return twin(model)


def materialised(model: nn.Module) -> nn.Module | None:
    """A copy of a model on the meta device with random parameters in memory.

    None if it holds integers without values: what they index cannot be made up.
    """
    buffers = [buffer for buffer in model.buffers() if buffer.is_meta]
    if any(not buffer.is_floating_point() for buffer in buffers):
        return None
    found = copy.deepcopy(model)
    filled: dict[int, Tensor] = {}
    for module in found.modules():
        kinds: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for kind in kinds:
            for name, tensor in kind.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in filled:
                    value = made_up(tensor)
                    if isinstance(tensor, nn.Parameter):
                        value = nn.Parameter(value, requires_grad=tensor.requires_grad)
                    filled[id(tensor)] = value
                kind[name] = filled[id(tensor)]
    return found


def made_up(tensor: Tensor) -> Tensor:
    """A tensor without values with random ones; zeros and ones if it holds integers. Others are left as they are."""
    if not tensor.is_meta:
        return tensor
    generator = torch.Generator().manual_seed(tensor.numel())
    if tensor.is_floating_point():
        return torch.rand(tensor.shape, generator=generator).to(tensor.dtype) - 0.5
    return torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.dtype)


def _shards(hook: Any) -> bool:
    """Whether a hook belongs to PyTorch's own distributed code."""
    hook = getattr(hook, "func", hook)
    hook = getattr(hook, "__wrapped__", hook)
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed")
