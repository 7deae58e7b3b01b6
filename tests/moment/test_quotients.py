"""Directions of an optimizer by one kernel, against PyTorch's own operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from as_written import import_as_written
from conserved.moment import root_quotients, triton_backend

SHAPES = [(3, 5), (), (1024 * 8 + 3,), (2, 4, 8), (0,), (1,), (70, 130)]


@pytest.fixture(params=[True, False], ids=["kernel", "torch"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        pytest.importorskip("triton")
        import_as_written("conserved.moment.kernels")
    monkeypatch.setattr(triton_backend, "available", lambda device: request.param)


def averages(first: torch.dtype, second: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    tops = [torch.randn(shape).to(first) for shape in SHAPES]
    return tops, [(torch.rand(shape) * 10.0 ** torch.randint(-12, 3, shape)).to(second) for shape in SHAPES]


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("second", [torch.float32, torch.float16])
def test_quotients_are_those_of_pytorch(first: torch.dtype, second: torch.dtype) -> None:
    tops, squares = averages(first, second)
    result = root_quotients(tops, squares, 1e-8)
    for top, square, one in zip(tops, squares, result, strict=True):
        assert one.shape == top.shape
        torch.testing.assert_close(one, top.float() / (square.float().sqrt() + 1e-8), rtol=2.5e-7, atol=0.0)


@pytest.mark.usefixtures("_way")
def test_a_shift_on_the_device_other_types_and_strides_are_left_to_pytorch() -> None:
    tops, squares = averages(torch.float64, torch.float64)
    tops[0], squares[0] = tops[0].mT, squares[0].mT
    for shift in (1e-8, torch.tensor(1e-8, dtype=torch.float64)):
        for top, square, one in zip(tops, squares, root_quotients(tops, squares, shift), strict=True):
            torch.testing.assert_close(one, top / (square.sqrt() + 1e-8))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels are compiled for a GPU")
def test_a_gpu_rounds_as_pytorch_does() -> None:
    tops, squares = ([one.cuda() for one in part] for part in averages(torch.float32, torch.float32))
    for top, square, one in zip(tops, squares, root_quotients(tops, squares, 1e-8), strict=True):
        assert torch.equal(one, top / (square.sqrt() + 1e-8))
