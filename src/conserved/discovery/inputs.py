"""Inputs of a function that is studied, drawn or imitated, and its outputs as one vector."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from conserved._torch_compat import tree_map
from conserved.errors import InvalidInputError

Inputs = Callable[[torch.Generator], Any] | Tensor | tuple[Any, ...] | Mapping[str, Any]
"""A function from a generator to one input, or an example whose shapes and types are imitated."""


class UnsuitableError(InvalidInputError, ValueError):
    """Raised if a function cannot be studied; the message says what was expected and what to change."""


def in_double(tensor: Tensor) -> Tensor:
    """Return a tensor in double precision: complex tables (rotary positions) stay complex, whole numbers stay whole."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor


def arguments(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return how one input is passed to a module.

    A tuple becomes several arguments, a mapping keyword arguments, and anything else the only argument.
    """
    if isinstance(x, tuple):
        return x, {}
    return ((), dict(x)) if isinstance(x, Mapping) else ((x,), {})


def logits_of(output: Any) -> Tensor:
    """Return the logits of an output."""
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or not logits.ndim:
        raise UnsuitableError(
            'Expected logits for loss="cross_entropy", got an output without them. Return a tensor of logits, or '
            "an output with .logits."
        )
    return logits


def flat_output(output: Any, *, class_axis: int | None) -> Float[Tensor, " out"]:
    """Return all floating-point numbers of an output as one vector; logits are centred over classes for cross-entropy.

    Centring puts the whole pull-back into the function: the gradients of ⟨f − mean f, v⟩ over all v are those of
    ⟨f, v⟩ over v with sum zero, which is what cross-entropy can reach.
    """
    if class_axis is not None:
        logits = logits_of(output)
        if not -logits.ndim <= class_axis < logits.ndim:
            raise UnsuitableError(
                f"Expected class_axis to be an axis of the outputs {tuple(logits.shape)}, got {class_axis}. Pass "
                "the axis of classes."
            )
        return (logits - logits.mean(class_axis, keepdim=True)).flatten()
    parts = list(tensors_in(output))
    if any(part.is_complex() for part in parts):
        raise UnsuitableError("Expected a real output, got complex numbers. Return torch.view_as_real of them.")
    parts = [tensor.flatten() for tensor in parts if tensor.is_floating_point()]
    if not parts:
        raise UnsuitableError(
            f"Expected an output with a floating-point tensor, got {type(output).__name__}. Return the outputs of "
            "the model."
        )
    return torch.cat(parts)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor inside tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value):
        for entry in dataclasses.fields(value):
            yield from tensors_in(getattr(value, entry.name))


def imitating(inputs: Inputs) -> Callable[[torch.Generator, int], Any]:
    """Return a sampler of stacked inputs: many calls of the given one, or tensors like the example."""
    if callable(inputs) and not isinstance(inputs, Tensor):
        draw = inputs
        return lambda generator, count: stack_inputs([draw(generator) for _ in range(count)])
    example = inputs

    def like(value: Any, generator: torch.Generator, count: int) -> Any:
        if isinstance(value, Tensor):
            shape = (count, *value.shape)
            where: dict[str, Any] = {"generator": generator, "device": generator.device}
            if value.is_floating_point():
                # Inputs of all sizes: they reach both sides of a kink that lies far from the origin.
                sizes = torch.randn((count, *(1 for _ in value.shape)), dtype=torch.float64, **where).exp()
                return sizes * torch.randn(shape, dtype=torch.float64, **where)
            if value.is_complex():
                raise UnsuitableError(
                    "Expected real inputs, got a complex one. Pass torch.view_as_real of it, and draw pairs of reals."
                )
            if value.dtype == torch.bool:
                return torch.rand(shape, **where) < 0.5
            low, high = int(value.min()), int(value.max())
            return torch.randint(low, high + 1, shape, dtype=value.dtype, **where)
        if isinstance(value, tuple):
            return tuple(like(item, generator, count) for item in value)
        if isinstance(value, Mapping):
            return {key: like(item, generator, count) for key, item in value.items()}
        return value

    return lambda generator, count: like(example, generator, count)


def stack_inputs(samples: list[Any]) -> Any:
    """Return samples as one, with a leading axis; what is not a tensor must be the same in all."""
    return tree_map(lambda *parts: torch.stack(parts) if isinstance(parts[0], Tensor) else parts[0], *samples)


def to_device(value: Any, device: torch.device) -> Any:
    """Return tensors of an input on a device, floating-point ones in float64."""
    if isinstance(value, Tensor):
        return in_double(value.to(device))
    if isinstance(value, tuple):
        return tuple(to_device(item, device) for item in value)
    if isinstance(value, Mapping):
        return {key: to_device(item, device) for key, item in value.items()}
    return value
