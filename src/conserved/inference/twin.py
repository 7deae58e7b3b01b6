"""A sharded model without its sharding: the same modules and parameters, without hooks that gather or scatter."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import nn

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
        found._parameters = dict(module._parameters)
        found._buffers = dict(module._buffers)
        found._modules = {name: child if child is None else twin(child) for name, child in module._modules.items()}
        for name in _HOOKS:
            kept = ((key, hook) for key, hook in getattr(module, name).items() if not _shards(hook))
            setattr(found, name, OrderedDict(kept))
        return found

    return twin(model)


def _shards(hook: Any) -> bool:
    """Whether a hook belongs to PyTorch's own distributed code."""
    hook = getattr(hook, "func", hook)
    hook = getattr(hook, "__wrapped__", hook)
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed")
