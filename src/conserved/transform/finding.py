"""The symmetries of the function a model computes: what may be moved, whether it is trained or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from conserved.laws import LawSet
from conserved.transform.moving import ABOUT_GRADIENTS


def symmetries_of(model: nn.Module, *args: Any, **kwargs: Any) -> LawSet:
    """The symmetries of a model's function in use.

    Laws of training differ from them in three ways: a frozen parameter may be moved like any other; dropout and batch
    statistics are out of the way (the model is read in evaluation mode); and what only says that a gradient is zero,
    such as a row of padding, is left out. No loss is assumed: outputs stay as they are.

    Args:
        model: a module.
        *args: example inputs, as it is called; they may be left out where the model says how.
        **kwargs: more of them, by name.

    """
    # Solving for symmetries needs scipy, which those who only move weights need not load.
    from conserved.inference import recognize

    with as_a_function(model):
        found = recognize(model, *args, **kwargs)
    return replace(found, symmetries=tuple(one for one in found.symmetries if one.family not in ABOUT_GRADIENTS))


@contextmanager
def as_a_function(model: nn.Module) -> Iterator[None]:
    """Within it the model is in evaluation mode and all of its floating-point parameters count as free."""
    modes = {module: module.training for module in model.modules()}
    frozen = [p for p in model.parameters() if p.is_floating_point() and not p.requires_grad]
    try:
        model.eval()
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for parameter in frozen:
            parameter.requires_grad_(False)
