"""Every private name of PyTorch that the package uses, in one place.

Tried with torch 2.6 (smoke test of the lowest supported version), 2.11 and 2.13. When a new torch breaks something
here, this file is the only one to change. Names that PyTorch documents are imported where they are used instead.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo as disable_dynamo
from torch._ops import HigherOrderOperator
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserve_version_counter
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.dropout import _DropoutNd as DropoutBase
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNormBase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

__all__ = [
    "COMPILED_CODE_RUNS_INSIDE_MODES",
    "SCALED_DOT_PRODUCT",
    "AutogradFunctionBase",
    "BatchNormBase",
    "DisableTorchFunction",
    "DropoutBase",
    "FlatUnit",
    "HigherOrderOperator",
    "InstanceNormBase",
    "TorchDispatchMode",
    "adjusted_muon_rate",
    "buffers_of",
    "children_of",
    "core_aten_decompositions",
    "default_store",
    "disable_dynamo",
    "dispatch_modes",
    "finished_work",
    "flat_units",
    "foreach_add_",
    "foreach_div",
    "foreach_norm",
    "foreach_sqrt",
    "forward_hooks_of",
    "has_step_hooks",
    "hooks_of",
    "in_backward",
    "in_function_transform",
    "is_compiled",
    "orthogonalized",
    "parameters_of",
    "preserve_version_counter",
    "runs_compiled_code",
    "schema_of",
    "storage_key",
    "traced_with_fake_tensors",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "version_of",
    "without_mkldnn",
]

SCALED_DOT_PRODUCT = torch._C._nn.scaled_dot_product_attention
"""The kernel's own binding. `torch.nn.functional` holds the same object, but anyone may replace it there."""

DisableTorchFunction = torch._C.DisableTorchFunction

AutogradFunctionBase: Any = (
    torch.autograd.function._SingleLevelFunction
    if isinstance(vars(torch.autograd.Function)["apply"], classmethod)
    else torch.autograd.Function
)
"""The class whose `apply` functions run through. In PyTorch 2.13 `Function.apply` is Python and calls that of its base,
so that `op = MyFunction.apply` is seen too, also if it was bound before. In 2.15 it is C, and what was bound before is
not seen."""

# Fused elementwise operations over lists of tensors. torch.optim is built on them; they have no public names.
foreach_norm = torch._foreach_norm
foreach_sqrt = torch._foreach_sqrt
foreach_add_ = torch._foreach_add_
foreach_div = torch._foreach_div


def runs_compiled_code() -> bool:
    """Return whether code that `torch.compile` made in this process runs as such, and not eagerly."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is None or not dynamo.utils.counters["frames"]["total"]:
        return False
    return bool(dynamo.eval_frame._stance.stance != "force_eager")


COMPILED_CODE_RUNS_INSIDE_MODES: bool = hasattr(TorchDispatchMode, "ignore_compile_internals") and hasattr(
    torch._C._dynamo.guards, "set_is_in_mode_without_ignore_compile_internals"
)
"""Whether a dispatch mode can leave compiled code as it is. Elsewhere that runs eagerly inside any mode, and after."""


def storage_key(tensor: Tensor) -> int:
    """Return a number that tensors share exactly if they share a storage, also where there is no data pointer."""
    return int(tensor.untyped_storage()._cdata)


def schema_of(operator: Any) -> Any:
    """Return the schema of an ATen operator: its name, arguments and results, and which of them it writes to."""
    return operator._schema


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written to in place; 0 for inference tensors, which do not count."""
    return 0 if tensor.is_inference() else int(tensor._version)


def in_backward() -> bool:
    """Return whether autograd runs a backward pass in this thread now."""
    return torch._C._current_graph_task_id() != -1


def in_function_transform() -> bool:
    """Return whether this runs inside vmap, grad or another transform of `torch.func`, on tensors that are not real."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def default_store() -> Any:
    """Return the key-value store that the processes of the default group met by."""
    return torch.distributed.distributed_c10d._get_default_store()


def finished_work() -> Any:
    """Return a handle of a collective that has finished."""
    from torch._C._distributed_c10d import FakeWork, Work

    return Work.boxed(FakeWork())


@contextlib.contextmanager
def without_mkldnn() -> Iterator[None]:
    """Switch oneDNN off. `torch.backends.mkldnn.flags` warns of TF32 on machines without such a device."""
    before = torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def core_aten_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return PyTorch's decompositions into core ATen operators."""
    from torch._decomp import core_aten_decompositions as table

    return dict(table())


@contextlib.contextmanager
def traced_with_fake_tensors() -> Iterator[None]:
    """Let operators without a meta kernel run while a function is traced with fake tensors."""
    from torch._guards import TracingContext, tracing
    from torch._subclasses import FakeTensorMode

    with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
        yield


# Tables of a module. The public iterators skip None and shared entries, and cannot be written to.
def parameters_of(module: nn.Module) -> MutableMapping[str, nn.Parameter | None]:
    """Return the table of a module's own parameters."""
    return module._parameters


def buffers_of(module: nn.Module) -> MutableMapping[str, Tensor | None]:
    """Return the table of a module's own buffers."""
    return module._buffers


def unsaved_buffers(module: nn.Module) -> set[str]:
    """Return the names of buffers that state dicts leave out."""
    return set(module._non_persistent_buffers_set)


def children_of(module: nn.Module) -> MutableMapping[str, nn.Module | None]:
    """Return the table of a module's own children."""
    return module._modules


def forward_hooks_of(module: nn.Module) -> tuple[Callable[..., Any], ...]:
    """Return the hooks that run before and after a module's forward."""
    return (*module._forward_hooks.values(), *module._forward_pre_hooks.values())


def hooks_of(module: nn.Module) -> tuple[Callable[..., Any], ...]:
    """Return all hooks that run in passes of a module: around its forward and backward, and of its own parameters."""
    own = (p._backward_hooks for p in module._parameters.values() if p is not None)
    return (
        *forward_hooks_of(module),
        *module._backward_hooks.values(),
        *module._backward_pre_hooks.values(),
        *(hook for hooks in own if hooks for hook in hooks.values()),
    )


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module runs through `torch.compile`, as a wrapper or in place."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def orthogonalized(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return what torch's Muon makes of a momentum buffer, bit for bit."""
    from torch.optim import _muon

    return _muon._zeropower_via_newtonschulz(matrix, coefficients, steps, eps)


def adjusted_muon_rate(rate: float, rule: str | None, shape: torch.Size) -> float:
    """Return the learning rate that torch's Muon uses for a matrix of this shape."""
    from torch.optim import _muon

    return _muon._adjust_lr(rate, rule, shape)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether hooks can be put on the steps of an optimizer, which its base class makes possible."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


FSDP1_CHILD = "_fsdp_wrapped_module"
"""The name under which `FullyShardedDataParallel` keeps the module inside it."""

FSDP1_FLAT = "_flat_param"
"""The name of the flat tensor on the module that was wrapped."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlatUnit:
    """Parameters that FSDP1 joined in one flat tensor, of which each process holds a range."""

    flat: Any
    group: Any
    """Processes among which the flat tensor is cut; it is whole on each if `sharded` is False."""
    replicas: Any
    """Processes that hold the same range, of a hybrid strategy; None without one."""
    sharded: bool
    length: int
    """Entries on each process, with padding at the end."""
    members: tuple[tuple[nn.Module, str, torch.Size, int, Tensor], ...]
    """Module, attribute, shape, first entry, and the tensor whose `.grad` an optimizer reads."""
    tied: tuple[tuple[nn.Module, str, nn.Module, str], ...]
    """Attributes that are the same parameter as another one."""

    def shard(self) -> Tensor:
        """Return the range that this process holds: the flat tensor itself before the first forward pass."""
        shard: Tensor = getattr(self.flat, "_local_shard", self.flat) if self.sharded else self.flat
        return shard.detach().flatten()


def flat_units(model: nn.Module) -> list[FlatUnit]:
    """Return what FSDP1 made of the parameters of a model; nothing without it."""
    units = []
    for module in model.modules():
        handle: Any = getattr(module, "_handle", None) if FSDP1_CHILD in module._modules else None
        if handle is None:
            continue
        flat, sharded = handle.flat_param, bool(handle.uses_sharded_strategy)
        counts = flat._numels_with_padding
        starts = [
            end - count
            for end, count, padding in zip(accumulate(counts), counts, flat._is_padding_mask, strict=True)
            if not padding
        ]
        originals = flat._params or [flat] * len(starts)
        described = zip(flat._param_infos, flat._shapes, starts, originals, strict=True)
        units.append(
            FlatUnit(
                flat=flat,
                group=handle.process_group,
                replicas=getattr(module, "_inter_node_pg", None),
                sharded=sharded,
                length=flat._sharded_size.numel() if sharded else sum(counts),
                members=tuple((info[1], info[0], shape, start, own) for info, shape, start, own in described),
                tied=tuple((info[1], info[0], info[4], info[3]) for info in flat._shared_param_infos),
            )
        )
    return units
