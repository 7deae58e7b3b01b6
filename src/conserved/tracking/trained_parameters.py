"""Which parameters a run trains, and what becomes of a monitor when they change."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from conserved._torch_compat import BatchNormBase
from conserved.alarm import Alarm
from conserved.inference.model_parts import ModelParts, parts_of

Signature = tuple[Any, ...]
"""The identity, the shape and whether it is trained, of every parameter: laws depend on all of it."""

Outline = tuple[Hashable, tuple[torch.Size, ...]]
"""The values that are compared in every step, before the signature."""


def signature(model: nn.Module) -> Signature:
    """Return which parameters the model has, which of them are trained, and their shapes."""
    parameters = tuple((id(p), p.requires_grad, p.shape) for p in parts_of(model).parameters)
    # A batch norm in eval mode does not forget the scale of what it gets.
    return (*parameters, *((id(m), m.training) for m in model.modules() if isinstance(m, BatchNormBase)))


def outline(parts: ModelParts) -> Outline:
    """Return what stays the same as long as the signature does, in a tenth of the time; it may change more often."""
    return parts.state, tuple(map(attrgetter("shape"), parts.parameters))


def orphan_alarm(model: nn.Module, optimizers: Sequence[Optimizer], before: Signature, step: int) -> Alarm | None:
    """Return an alarm if an optimizer steps tensors that the model had and has no longer.

    Args:
        model: the model as it is now.
        optimizers: its optimizers.
        before: the signature of the model when its laws were read.
        step: the number of the step that is about to be made.

    Returns:
        The alarm; None if the optimizers hold parameters of the model only, or do not hold all of them.
    """
    before_ids, present_ids = {key for key, *_ in before}, {id(p) for p in model.parameters()}
    optimized = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    orphans = (before_ids - present_ids) & optimized
    # Parameters that nobody trains are reported by `HeldParameters`, once for one defect.
    if not orphans or any(p.requires_grad and id(p) not in optimized for p in model.parameters()):
        return None
    message = (
        f"The optimizer steps {len(orphans)} tensor{'s' if len(orphans) > 1 else ''} that the model does not have "
        f"any more. Parameters were replaced or tied after the optimizer was made; make it again."
    )
    return Alarm(step=step, code="replaced", law="", value=1.0, limit=0.0, message=message, family="replaced")
