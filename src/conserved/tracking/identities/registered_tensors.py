"""Is every tensor that needs a gradient a parameter? Tensors of a module that were converted when they were made."""

from __future__ import annotations

import weakref

from torch import Tensor, nn
from torch.optim import Optimizer

from conserved._torch_compat import buffers_of, unsaved_buffers
from conserved.tracking.identities.finding import StepFinding, name_tensors
from conserved.tracking.identities.step_identity import StepIdentity, TrainingStep, is_plain, on_host


class RegisteredTensors(StepIdentity):
    """Looks for attributes of modules that require a gradient before any pass and are not parameters.

    `nn.Parameter(…).to(device)` is a plain tensor: `parameters()` does not list it and no optimizer steps it. What a
    pass leaves in an attribute is another tensor after every pass.
    """

    name = "parameters registered"

    def __init__(self) -> None:
        self._suspects: dict[str, weakref.ref[Tensor]] = {}

    def begin(self, step: TrainingStep) -> None:
        self._suspects = {name: weakref.ref(tensor) for name, tensor in _plain_tensors(step.model).items()}
        empty = _empty_buffers(step.model)
        if empty:
            step.notes.append(f"buffers that no checkpoint has are all zeros: {name_tensors(empty)}")

    def with_gradients(self, step: TrainingStep, optimizer: Optimizer) -> None:
        suspects, self._suspects = self._suspects, {}
        if not suspects:
            return
        now, optimized = _plain_tensors(step.model), step.optimized_ids()
        names = [n for n, ref in suspects.items() if n in now and now[n] is ref() and id(now[n]) not in optimized]
        if names:
            step.report(
                StepFinding(
                    code="not registered",
                    tensor=names[0],
                    others=tuple(names[1:]),
                    message=f"{name_tensors(names)} requires a gradient and is a plain tensor, not a parameter: "
                    "model.parameters() does not list it, and no optimizer steps it. Convert or move the numbers "
                    "first, then make nn.Parameter of them.",
                )
            )


def _plain_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return attributes of modules that hold a derived tensor which requires a gradient."""
    return {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and value.requires_grad and _is_derived(value)
    }


def _empty_buffers(model: nn.Module) -> list[str]:
    """Return float buffers that are not saved and all zeros, as after `to_empty()` of a model made on no device."""
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name, buffer in buffers_of(module).items()
        if name in unsaved_buffers(module)
        and buffer is not None
        and buffer.is_floating_point()
        and buffer.numel() > 1
        and is_plain(buffer)
        and on_host(buffer)
        and not bool(buffer.any())
    ]


def _is_derived(tensor: Tensor) -> bool:
    """Return whether autograd computed a tensor; False for views whose base was overwritten, as FSDP1 leaves them."""
    try:
        return tensor.grad_fn is not None
    except RuntimeError:
        return False
