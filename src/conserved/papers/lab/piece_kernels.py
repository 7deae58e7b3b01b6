"""Triton kernels for gates, and those that cut float32 rows into half-precision pieces, without a detour.

`papers.lab.pieces` says what pieces are, holds the same in plain PyTorch, and launches these on a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _store_pieces(out, rows, columns, mask, values, WIDTH, SCALE, COUNT: tl.constexpr, LOW: tl.constexpr):
    """Pieces of a tile into a (rows, COUNT, WIDTH) tensor; the remainder at place LOW, the leading part elsewhere.

    With no pieces, the tile as it is into a (rows, WIDTH) tensor.
    """
    if COUNT == 0:
        tl.store(out + rows.to(tl.int64)[:, None] * WIDTH + columns[None, :], values, mask=mask)
    else:
        scaled = values * SCALE
        high = scaled.to(tl.float16)
        low = (scaled - high.to(tl.float32)).to(tl.float16)
        start = rows.to(tl.int64)[:, None] * (COUNT * WIDTH) + columns[None, :]
        for place in tl.static_range(COUNT):
            if place == LOW:
                tl.store(out + start + place * WIDTH, low, mask=mask)
            else:
                tl.store(out + start + place * WIDTH, high, mask=mask)


@triton.jit
def cut_rows(
    x, out, ROWS, WIDTH, SCALE,
    COUNT: tl.constexpr, LOW: tl.constexpr, HEIGHT: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """x of (ROWS, WIDTH) as pieces."""
    rows = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    columns = tl.program_id(1) * ACROSS + tl.arange(0, ACROSS)
    mask = (rows < ROWS)[:, None] & (columns < WIDTH)[None, :]
    values = tl.load(x + rows.to(tl.int64)[:, None] * WIDTH + columns[None, :], mask=mask, other=0.0)
    _store_pieces(out, rows, columns, mask, values, WIDTH, SCALE, COUNT, LOW)


@triton.jit
def _branches(both, bias, rows, columns, mask, WIDTH, BIASED: tl.constexpr):
    start = both + rows.to(tl.int64)[:, None] * (2 * WIDTH) + columns[None, :]
    gate = tl.load(start, mask=mask, other=0.0)
    up = tl.load(start + WIDTH, mask=mask, other=0.0)
    if BIASED:
        gate += tl.load(bias + columns, mask=columns < WIDTH, other=0.0)[None, :]
        up += tl.load(bias + WIDTH + columns, mask=columns < WIDTH, other=0.0)[None, :]
    return gate, up


@triton.jit
def gate_rows(
    both, bias, share, out, ROWS, WIDTH, HIDDEN, SCALE,
    BIASED: tl.constexpr, SHARED: tl.constexpr, COUNT: tl.constexpr, LOW: tl.constexpr,
    HEIGHT: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """SiLU(gate) · up · share of each row's expert, as pieces."""
    rows = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    columns = tl.program_id(1) * ACROSS + tl.arange(0, ACROSS)
    mask = (rows < ROWS)[:, None] & (columns < WIDTH)[None, :]
    gate, up = _branches(both, bias, rows, columns, mask, WIDTH, BIASED)
    values = gate * tl.sigmoid(gate) * up
    if SHARED:
        expert = tl.program_id(1) * ACROSS // HIDDEN
        experts = WIDTH // HIDDEN
        values *= tl.load(share + rows.to(tl.int64) * experts + expert, mask=rows < ROWS, other=0.0)[:, None]
    _store_pieces(out, rows, columns, mask, values, WIDTH, SCALE, COUNT, LOW)


@triton.jit
def gate_slopes(
    slope, both, bias, share, out, share_sums, bias_sums, ROWS, WIDTH, HIDDEN, SCALE,
    BIASED: tl.constexpr, SHARED: tl.constexpr, COUNT: tl.constexpr, LOW: tl.constexpr,
    HEIGHT: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """The way back: slopes of gate and up as pieces, and sums of a tile for the shares and the biases."""
    rows = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    columns = tl.program_id(1) * ACROSS + tl.arange(0, ACROSS)
    mask = (rows < ROWS)[:, None] & (columns < WIDTH)[None, :]
    gate, up = _branches(both, bias, rows, columns, mask, WIDTH, BIASED)
    above = tl.load(slope + rows.to(tl.int64)[:, None] * WIDTH + columns[None, :], mask=mask, other=0.0)
    part = tl.sigmoid(gate)
    through = gate * part
    if SHARED:
        expert = tl.program_id(1) * ACROSS // HIDDEN
        experts = WIDTH // HIDDEN
        tiles = tl.num_programs(1)
        sums = tl.sum(above * through * up, 1)
        tl.store(share_sums + rows.to(tl.int64) * tiles + tl.program_id(1), sums, mask=rows < ROWS)
        above *= tl.load(share + rows.to(tl.int64) * experts + expert, mask=rows < ROWS, other=0.0)[:, None]
    of_gate = above * up * (part * (1.0 + gate * (1.0 - part)))
    of_up = above * through
    if BIASED:
        here = bias_sums + tl.program_id(0).to(tl.int64) * (2 * WIDTH) + columns
        tl.store(here, tl.sum(of_gate, 0), mask=columns < WIDTH)
        tl.store(here + WIDTH, tl.sum(of_up, 0), mask=columns < WIDTH)
    wide = mask & (columns < WIDTH)[None, :]
    _store_pieces(out, rows, columns, wide, of_gate, 2 * WIDTH, SCALE, COUNT, LOW)
    _store_pieces(out, rows, columns + WIDTH, wide, of_up, 2 * WIDTH, SCALE, COUNT, LOW)


@triton.jit
def _half_branches(both, bias, factor, rows, columns, mask, WIDTH, BIASED: tl.constexpr):
    start = both + rows.to(tl.int64)[:, None] * (2 * WIDTH) + columns[None, :]
    gate = tl.load(start, mask=mask, other=0.0).to(tl.float32) * factor
    up = tl.load(start + WIDTH, mask=mask, other=0.0).to(tl.float32) * factor
    if BIASED:
        gate += tl.load(bias + columns, mask=columns < WIDTH, other=0.0)[None, :]
        up += tl.load(bias + WIDTH + columns, mask=columns < WIDTH, other=0.0)[None, :]
    return gate, up


@triton.jit
def half_gate(
    both, bias, share, shift, out, ROWS, WIDTH, HIDDEN, UNIT, SCALE,
    BIASED: tl.constexpr, SHARED: tl.constexpr, HEIGHT: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """SiLU(gate) · up · share in half precision, from units of 1/(UNIT · shift) to those of 1/(SCALE · shift)."""
    rows = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    columns = tl.program_id(1) * ACROSS + tl.arange(0, ACROSS)
    mask = (rows < ROWS)[:, None] & (columns < WIDTH)[None, :]
    moved = tl.load(shift)
    gate, up = _half_branches(both, bias, 1.0 / (UNIT * moved), rows, columns, mask, WIDTH, BIASED)
    values = gate * tl.sigmoid(gate) * up * (SCALE * moved)
    if SHARED:
        expert = tl.program_id(1) * ACROSS // HIDDEN
        experts = WIDTH // HIDDEN
        values *= tl.load(share + rows.to(tl.int64) * experts + expert, mask=rows < ROWS, other=0.0)[:, None]
    where = out + rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    tl.store(where, values.to(tl.float16), mask=mask)


@triton.jit
def half_gate_slopes(
    slope, both, bias, share, shift, out, share_sums, ROWS, WIDTH, HIDDEN, UNIT, SLOPE_UNIT,
    BIASED: tl.constexpr, SHARED: tl.constexpr, HEIGHT: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """The way back, from slopes in units of 1/SLOPE_UNIT to slopes of gate and up as they are."""
    rows = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    columns = tl.program_id(1) * ACROSS + tl.arange(0, ACROSS)
    mask = (rows < ROWS)[:, None] & (columns < WIDTH)[None, :]
    gate, up = _half_branches(both, bias, 1.0 / (UNIT * tl.load(shift)), rows, columns, mask, WIDTH, BIASED)
    here = slope + rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    above = tl.load(here, mask=mask, other=0.0).to(tl.float32) / SLOPE_UNIT
    part = tl.sigmoid(gate)
    through = gate * part
    if SHARED:
        expert = tl.program_id(1) * ACROSS // HIDDEN
        experts = WIDTH // HIDDEN
        tiles = tl.num_programs(1)
        sums = tl.sum(above * through * up, 1)
        tl.store(share_sums + rows.to(tl.int64) * tiles + tl.program_id(1), sums, mask=rows < ROWS)
        above *= tl.load(share + rows.to(tl.int64) * experts + expert, mask=rows < ROWS, other=0.0)[:, None]
    where = out + rows.to(tl.int64)[:, None] * (2 * WIDTH) + columns[None, :]
    tl.store(where, (above * up * (part * (1.0 + gate * (1.0 - part)))).to(tl.float16), mask=mask)
    tl.store(where + WIDTH, (above * through).to(tl.float16), mask=mask)
