"""The quick answers for tensors without data are those of PyTorch, in shape, type and layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x,
    "turned": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "reversed": lambda x: x.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    "stretched": lambda x: x[:, :1].expand(2, 3, 4),
    "row": lambda x: x[0, 0],
    "column": lambda x: x[0, :, :1],
    "turned row": lambda x: x.transpose(0, 2)[:, :, :1].transpose(0, 2),
    "number": lambda x: x[0, 0, 0],
    "empty": lambda x: x[:, :, :0].sum(2, keepdim=True),
    "every second": lambda x: torch.cat([x, x], 2)[:, :, ::2],
}
TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


@pytest.mark.parametrize(("one", "other"), [*itertools.product(SHAPES, SHAPES)])
def test_layouts_are_those_of_tensors_with_data(one: str, other: str) -> None:
    a, b = SHAPES[one](torch.randn(2, 3, 4)), SHAPES[other](torch.randn(2, 3, 4))
    for operation in (torch.mul, torch.add):
        expected, result = operation(a, b), operation(*_without_data(a, b))
        assert result.device.type == "meta"
        assert (result.shape, result.stride(), result.dtype) == (expected.shape, expected.stride(), expected.dtype)


@pytest.mark.parametrize(("one", "other"), [*itertools.product(TYPES, TYPES)], ids=str)
def test_types_are_those_of_tensors_with_data(one: torch.dtype, other: torch.dtype) -> None:
    vector, number = torch.ones(3, dtype=one), torch.ones((), dtype=other)
    for operation in (torch.mul, torch.add):
        assert operation(*_without_data(vector, number)).dtype == operation(vector, number).dtype
        assert operation(_without_data(vector)[0], 0.5).dtype == operation(vector, 0.5).dtype


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"broadcast|must match"):
        torch.mul(*_without_data(torch.ones(3), torch.ones(4)))


def _without_data(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors)
