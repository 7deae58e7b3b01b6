"""Views see the entries they say they see, in any tensor of the parameter's shape."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from conserved.symmetry import View

W = torch.arange(2.0 * 3 * 4 * 5).reshape(24, 5)
"""Stored as (24, 5): three parts of two heads of four rows, or other readings of the same rows."""

SEEN = [
    ("whole", View.of("w", (24, 5)), W, "w"),
    ("head", View.of("w", (24, 5), grid=(6, 4, 5), axes=1, pick={0: 2}), W[8:12], "w[8:12]"),
    ("columns", View.of("w", (24, 5), axes=1), W.mT, "w"),
    ("some columns", View.of("w", (24, 5), axes=1, pick={1: (1, 3)}), W[:, 1:3].mT, "w[:,1:3]"),
    (
        "key of head 1 in a fused projection",
        View.of("w", (24, 5), grid=(3, 2, 4, 5), axes=2, pick={0: 1, 1: 1}),
        W[12:16],
        "w[12:16]",
    ),
    (
        "key of head 1, interleaved by head",
        View.of("w", (24, 5), grid=(2, 3, 4, 5), axes=2, pick={0: 1, 1: 1}),
        W[16:20],
        "w[16:20]",
    ),
    (
        "interleaved rotary pairs",
        View.of("w", (24, 5), grid=(6, 2, 2, 5), axes=(1, 2), pick={0: 1}),
        W[4:8],
        "w[4:8]",
    ),
    (
        "half-split rotary pairs",
        View.of("w", (24, 5), grid=(6, 2, 2, 5), axes=(2, 1), pick={0: 1}),
        W[[4, 6, 5, 7]],
        "w[4:8]",
    ),
    (
        "first half of every head",
        View.of("w", (24, 5), grid=(6, 4, 5), axes=1, pick={1: (0, 2)}),
        torch.cat([W[0:24:4], W[1:24:4]]).reshape(2, 30),
        "w.reshape(6×4×5)[:,0:2,:]",
    ),
    ("everything in one row", View.of("w", (24, 5), grid=(1, 120)), W.reshape(1, 120), "w.reshape(1×120)[:,:]"),
]


@pytest.mark.parametrize(("view", "expected"), [s[1:3] for s in SEEN], ids=[s[0] for s in SEEN])
def test_a_view_sees_what_it_says(view: View, expected: Tensor) -> None:
    assert torch.equal(view.matrix(W), expected)
    assert (view.n, view.m) == expected.shape


@pytest.mark.parametrize(("view", "text"), [(s[1], s[3]) for s in SEEN], ids=[s[0] for s in SEEN])
def test_a_view_reads_as_a_slice_of_the_parameter(view: View, text: str) -> None:
    assert str(view) == text


@pytest.mark.parametrize("view", [s[1] for s in SEEN], ids=[s[0] for s in SEEN])
def test_writing_through_a_view_changes_what_it_sees_and_nothing_else(view: View) -> None:
    new = -torch.rand(view.n, view.m) - 1
    written = view.written(W, new)
    assert torch.equal(view.matrix(written), new)
    assert int((written != W).sum()) == view.n * view.m
    assert W.min() == 0


def test_one_expert_of_a_fused_tensor() -> None:
    experts = torch.randn(3, 8, 5)
    view = View.of("gate_up", (3, 8, 5), grid=(3, 2, 4, 5), axes=2, pick={0: 2, 1: 1})
    assert torch.equal(view.matrix(experts), experts[2, 4:])
    assert str(view) == "gate_up[2,4:8]"


def test_a_bias_is_one_column() -> None:
    view = View.of("bias", (24,), grid=(6, 4), axes=1, pick={0: 5})
    assert torch.equal(view.matrix(W[:, 0]), W[20:24, :1])
    assert str(view) == "bias[20:24]"
    assert view.row("i") == "bias[20:24][i]"


def test_a_view_applies_to_noncontiguous_tensors() -> None:
    transposed = W.mT.contiguous().mT
    view = View.of("w", (24, 5), grid=(6, 4, 5), axes=1, pick={0: 2})
    assert not transposed.is_contiguous()
    assert torch.equal(view.matrix(transposed), W[8:12])
    assert torch.equal(view.written(transposed, -W[8:12] - 1)[8:12], -W[8:12] - 1)


def test_reading_does_not_copy() -> None:
    view = View.of("w", (24, 5), grid=(6, 4, 5), axes=1, pick={0: 2})
    assert view.matrix(W).data_ptr() == W[8:].data_ptr()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"grid": (5, 5)}, "Expected a grid of"),
        ({"axes": 2}, "Expected an axis of the grid"),
        ({"axes": (0, 0)}, "each once"),
        ({"axes": ()}, "at least one"),
        ({"axes": 0, "pick": {0: 3}}, "Expected an axis of the grid"),
        ({"axes": 1, "pick": {0: 24}}, "a pick inside axis 0"),
        ({"axes": 1, "pick": {0: (3, 3)}}, "a pick inside axis 0"),
        ({"axes": 1, "pick": {2: 0}}, "to pick from, got 2"),
    ],
    ids=["grid", "axis", "axis twice", "no axis", "picked axis", "index", "empty range", "picked nothing"],
)
def test_impossible_views_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        View.of("w", (24, 5), **arguments)  # type: ignore[arg-type]


def test_a_tensor_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(24, 5\) for .*, got \(5, 24\)"):
        View.of("w", (24, 5)).matrix(W.mT)


@pytest.mark.parametrize(
    ("rows", "shares"), [((1, 4, 7, 10), True), ((3,), True), ((0, 1, 2), True), ((7, 4, 1), False), ((0, 1, 5), False)]
)
def test_rows_that_are_equally_far_apart_are_read_without_a_copy(rows: tuple[int, ...], shares: bool) -> None:
    stored = torch.randn(12, 5, dtype=torch.float64)
    view = replace(View.of("w", (12, 5)), rows=rows)
    result = view.matrix(stored)
    assert torch.equal(result, stored[list(rows)])
    assert (result.untyped_storage().data_ptr() == stored.untyped_storage().data_ptr()) is shares
