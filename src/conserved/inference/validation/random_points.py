"""Random parameters and inputs of a program, away from where training begins.

At initialisation biases are zero, gains one and one factor of an adapter zero, which hides errors. A drawn point keeps
what the program relies on: rows of look-up tables that are zero by design, the sign of values, the range of indices.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from conserved._torch_compat import tree_map_only
from conserved.inference.program.captured_program import CapturedProgram, ValueRef

WIDE_PRODUCT = 2.0
"""A matrix with n columns is drawn with standard deviation WIDE_PRODUCT / √n: products neither vanish nor explode."""


class Draw(Enum):
    """How far from the given values a point is drawn."""

    ANYWHERE = "anywhere"
    SAME_SIGNS = "same signs"
    NEARBY = "nearby"


def draw_parameters(
    program: CapturedProgram, parameters: Mapping[str, Tensor], draw: Draw, generator: torch.Generator
) -> dict[str, Tensor]:
    """Return float64 values for every parameter, trained or not."""
    padding = _padding_rows(program)
    result = {}
    for name, parameter in parameters.items():
        value = parameter.detach()
        if not (value.is_floating_point() or value.is_complex()):
            continue
        drawn = _draw(_wide(value), draw, generator)
        row = padding.get(name)
        if row is not None and not bool(value[row].any()):
            drawn[row] = 0.0
        result[name] = drawn
    return result


def _draw(value: Tensor, draw: Draw, generator: torch.Generator) -> Tensor:
    noise = _noise(value, generator)
    if draw is Draw.NEARBY:
        size = float(value.abs().mean()) if value.numel() else 0.0
        return value + 1e-3 * (size or 1.0) * noise
    if draw is Draw.SAME_SIGNS:
        # A zero has no sign to keep: it becomes a small positive number.
        return torch.where(value == 0, 0.1 * noise.abs(), value * torch.exp(0.3 * noise.real))
    if value.ndim >= 2:
        columns = max(value[0].numel(), 1)
        # Convolutions and stacks of matrices have more than two axes; the entries that one output sums count.
        return noise * (WIDE_PRODUCT / columns**0.5)
    centre = value.mean() if value.numel() else 0.0
    return centre + 0.5 * noise


def _noise(value: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(value.shape, generator=generator, dtype=value.dtype).to(value.device)


def _wide(value: Tensor) -> Tensor:
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def nudge_values(value: Tensor, size: float, generator: torch.Generator) -> Tensor:
    """Return values of which each is moved by a random part of itself; zeros stay."""
    return value * (1 + size * _noise(value, generator).real)


def _padding_rows(program: CapturedProgram) -> dict[str, int]:
    """Return rows of trained tables that look-ups never train, by the name of the table."""
    result = {}
    for operation in program.operations:
        if operation.name.startswith(("aten::embedding.", "aten::_embedding_bag")) and operation.args:
            argument, name = (2, "padding_idx") if operation.name.startswith("aten::embedding.") else (8, "padding_idx")
            padding = operation.args[argument] if argument < len(operation.args) else operation.kwargs.get(name, -1)
            table = operation.args[0]
            if isinstance(table, ValueRef) and isinstance(padding, int) and padding >= 0:
                parameter = program.values[table.value].parameter
                if parameter is not None:
                    result[parameter] = padding
    return result


def draw_inputs(inputs: Any, generator: torch.Generator) -> Any:
    """Return inputs of the same shapes and ranges with other values; whole numbers in another order, masks as given."""
    return tree_map_only(Tensor, lambda tensor: _draw_input(tensor, generator), inputs)


def _draw_input(value: Tensor, generator: torch.Generator) -> Tensor:
    if type(value) is not Tensor or not value.numel() or value.dtype == torch.bool:
        return value
    if not (value.is_floating_point() or value.is_complex()):
        order = torch.randperm(value.numel(), generator=generator).to(value.device)
        return value.reshape(-1)[order].reshape(value.shape)
    if value.is_sparse or value.layout != torch.strided or not bool(torch.isfinite(value).all()):
        return value
    wide = _wide(value.detach())
    if value.is_complex():
        return _noise(wide, generator) * wide.abs().mean()
    if not bool(wide.any()):
        return _noise(wide, generator)
    if bool(((wide == 0) | (wide == 1)).all()):
        # A mask.
        return wide
    low, high = float(wide.min()), float(wide.max())
    if low >= 0:
        return low + (high - low) * torch.rand(wide.shape, generator=generator, dtype=torch.float64).to(wide.device)
    return wide.mean() + (float(wide.std()) if wide.numel() > 1 else 1.0) * _noise(wide, generator)
