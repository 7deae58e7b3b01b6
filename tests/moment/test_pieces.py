"""Long legs in pieces, and all entries in rows: the same entries, each of them once."""

from __future__ import annotations

import itertools
from math import prod

import pytest
import torch
from torch import Tensor

from as_written import import_as_written
from conserved.moment import triton_backend
from conserved.moment.forms import WantedNumbers
from conserved.moment.layouts import Axes, Layout, PlainTensors
from conserved.moment.leg_programs import LegProgram, ProgramLeg
from conserved.symmetry.products import RowProducts, Term

pytest.importorskip("triton")
import_as_written("conserved.moment.kernels")


def places(axes: Axes) -> list[int]:
    (many, far), (few, near) = axes
    return [i * far + j * near for i, j in itertools.product(range(many), range(few))]


def entries(layout: Layout) -> list[list[int]]:
    """Of every member of the batch, in order, where its entries lie."""
    members = [layout.offset + index for index in places(layout.batch)]
    inner = [a + b for a, b in itertools.product(places(layout.rows), places(layout.columns))]
    return [[begin + one for one in inner] for begin in members]


@pytest.mark.parametrize("size", [1, 7, 96, 1024, 3 * 4096, 50_257 * 2])
def test_folded_rows_have_the_same_entries_in_the_same_order(size: int) -> None:
    layout = Layout(5, ((1, 0), (2, size)), ((1, 0), (size, 1)), ((1, 0), (1, 0)))
    result = layout.folded(1024)
    assert entries(result) == entries(layout)
    assert result.count("columns") == max(power for power in (2**k for k in range(11)) if size % power == 0)


@pytest.mark.parametrize("columns", [0, 3, 512, 513, 1024, 1536, 3000, 50_257])
@pytest.mark.parametrize("batch", [((1, 0), (1, 0)), ((1, 0), (3, 7)), ((2, 11), (3, 7))])
def test_pieces_have_the_same_entries(columns: int, batch: Axes) -> None:
    layout = Layout(2, batch, ((1, 0), (4, 1)), ((1, 0), (columns, 40)))
    result, pieces = layout.in_pieces(512)
    assert result.count("batch") == pieces * layout.count("batch")
    members = entries(result)
    together = [sorted(itertools.chain(*members[i : i + pieces])) for i in range(0, len(members), pieces)]
    assert together == [sorted(entry) for entry in entries(layout)]
    assert result.count("columns") <= 512 or batch[0][0] > 1 or columns in (513, 50_257)
    if columns == 3000 and batch[0][0] == 1:
        assert result.count("columns") == 500


def _program(leg: ProgramLeg, tensors: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor | None]:
    monkeypatch.setattr(triton_backend, "available", lambda device: True)
    program = LegProgram.of([(leg, [(0, 0)])])
    plain = PlainTensors.of(tensors)
    assert plain is not None
    return program.blocks[0].forms(program.run(plain))


@pytest.mark.parametrize("sizes", [False, True])
def test_columns_in_pieces_are_added_up(sizes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(2, 2, 1200, 5)
    layout = Layout(0, ((1, 0), (2, 6000)), ((1, 0), (5, 1)), ((1, 0), (1200, 5)))
    products = RowProducts(terms=(Term(0, 0, 0, 1),))
    leg = ProgramLeg(products, 1, layout, ((0, 1),), (torch.float32,) * 2, WantedNumbers(sizes=sizes))
    values, squares = _program(leg, [a.contiguous(), b.contiguous()], monkeypatch)
    torch.testing.assert_close(values.reshape(2, 5), (a * b).sum(1), rtol=1e-5, atol=1e-4)
    if sizes:
        assert squares is not None
        torch.testing.assert_close(squares.reshape(2), (a * b).square().sum((1, 2)))


@pytest.mark.parametrize("sizes", [False, True])
def test_all_entries_are_added_up_in_rows(sizes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(2, 3 * 1024 * 3)
    layout = Layout(0, ((1, 0), (1, 0)), ((1, 0), (prod(a.shape), 1)), ((1, 0), (1, 0)))
    products = RowProducts(terms=(Term(0, 0, 0, 1),), faces="entries")
    leg = ProgramLeg(products, 1, layout, ((0, 1),), (torch.float32,) * 2, WantedNumbers(sizes=sizes))
    values, squares = _program(leg, [a, b], monkeypatch)
    torch.testing.assert_close(values.flatten(), (a @ b).reshape(1), rtol=1e-5, atol=1e-3)
    if sizes:
        assert squares is not None
        torch.testing.assert_close(squares.flatten(), (a * b).square().sum().reshape(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(4, 6, 700), (2, 70, 33), (1, 1, 1), (3, 64, 256)])
@pytest.mark.parametrize("turned", [False, True])
def test_totals_of_rows(
    dtype: torch.dtype, shape: tuple[int, int, int], turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_backend, "available", lambda device: True)
    leg = torch.randn(shape[0], shape[2], shape[1]).mT if turned else torch.randn(shape)
    leg = (leg * (1e-30 if dtype == torch.float32 else 1.0)).to(dtype)
    result = triton_backend.row_totals(leg)
    assert result is not None
    torch.testing.assert_close(result[0], leg.double().sum(-1), rtol=1e-12, atol=1e-42)
    torch.testing.assert_close(result[1], leg.double().square().sum((-2, -1)), rtol=1e-12, atol=0.0)
