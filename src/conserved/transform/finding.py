"""The symmetries of the function a model computes: what may be moved, whether it is trained or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from conserved.laws import LawSet
from conserved.transform.activations import Call
from conserved.transform.moving import ABOUT_GRADIENTS


def symmetries_of(model: nn.Module, *args: Any, **kwargs: Any) -> LawSet:
    """Return the symmetries of a model's function in use.

    Laws of training differ from them in three ways: a frozen parameter may be moved like any other, and so may a row of
    padding, which is looked up though it gets no gradient; dropout and batch statistics are out of the way (the model
    is read in evaluation mode); and laws that only say that a gradient is zero are left out. No loss is assumed:
    outputs stay as they are.

    Args:
        model: a module.
        *args: example inputs, as it is called; they may be left out where the model says how.
        **kwargs: more of them, by name.

    Returns:
        The symmetries, for `move`, `equalize`, `align` and `canonical`.

    Raises:
        NoExampleError: there are no inputs, and the model does not say how it is called.
    """
    # Solving for symmetries needs scipy, which those who only move weights need not load.
    from conserved.inference import recognize

    with as_a_function(model):
        laws = recognize(model, *args, **kwargs)
    return replace(
        laws, symmetries=tuple(symmetry for symmetry in laws.symmetries if symmetry.family not in ABOUT_GRADIENTS)
    )


def example_call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """Return the call that was given or, where none was, the first that the model can be run with."""
    if args or kwargs:
        return Call(args, kwargs)
    from conserved.inference.examples import NoExampleError, example_inputs

    for made, named in example_inputs(model):
        try:
            with torch.no_grad():
                model(*made, **named)
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError):
            continue
        return Call(made, named)
    raise NoExampleError(
        f"Expected example inputs, got none, and how {type(model).__name__} is called cannot be guessed. Pass "
        "inputs as it is called."
    )


@contextmanager
def as_a_function(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode, free its floating-point parameters and treat padding as any row.

    A table's `padding_idx` stays readable: some models ask for it.
    """
    modes = {module: module.training for module in model.modules()}
    frozen = [p for p in model.parameters() if p.is_floating_point() and not p.requires_grad]
    tables = [
        module
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module.padding_idx is not None and _is_plain(module)
    ]
    try:
        model.eval()
        for parameter in frozen:
            parameter.requires_grad_(True)
        for table in tables:
            vars(table)["forward"] = partial(_look_up, table)
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for parameter in frozen:
            parameter.requires_grad_(False)
        for table in tables:
            vars(table).pop("forward", None)


def _is_plain(table: nn.Embedding) -> bool:
    """Return whether a table is looked up as torch does it, and nothing has been put in the way."""
    return type(table).forward is nn.Embedding.forward and "forward" not in vars(table)


def _look_up(table: nn.Embedding, index: Tensor) -> Tensor:
    return nn.functional.embedding(
        index, table.weight, None, table.max_norm, table.norm_type, table.scale_grad_by_freq, table.sparse
    )
