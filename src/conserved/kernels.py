"""Triton kernels that sum products of legs lying anywhere in memory; `conserved.fused` launches them.

Legs are given by a table with the address of each, and by the strides they have in common.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""What kernels read; they add up in float32."""


@triton.jit
def _along(index, INNER, outer_stride, inner_stride):
    """Where an index along two axes gone through as one lies, in entries."""
    return (index // INNER).to(tl.int64) * outer_stride + (index % INNER).to(tl.int64) * inner_stride


@triton.jit
def _tile(table, entry, offsets, shift, mask, KIND: tl.constexpr):
    """A tile of one leg in float32, zero outside of it."""
    start = tl.load(table + entry).to(tl.pointer_type(KIND))
    values = tl.load(start + offsets, mask=mask, other=0.0).to(tl.float32)
    return tl.where(mask, values + shift, 0.0)


# fmt: off
@triton.jit
def row_sums(
    table, sums, squares, a_shift, b_shift, ENTRIES,
    BATCH, BATCH_INNER, batch_outer, batch_inner,
    ROWS, ROWS_INNER, rows_outer, rows_inner,
    COLUMNS, COLUMNS_INNER, columns_outer, columns_inner,
    A: tl.constexpr, B: tl.constexpr, SPREAD: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):
    """Σ_k a_ik b_ik of a tile of rows, and the same of the squared products."""
    tiles = tl.cdiv(ROWS, HEIGHT)
    member = tl.program_id(0) // tiles
    entry = member // BATCH
    rows = (tl.program_id(0) % tiles) * HEIGHT + tl.arange(0, HEIGHT)
    here = _along(member % BATCH, BATCH_INNER, batch_outer, batch_inner)
    down = here + _along(rows, ROWS_INNER, rows_outer, rows_inner)
    total = tl.zeros((HEIGHT, WIDTH), tl.float32)
    spread = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for begin in range(0, COLUMNS, WIDTH):
        columns = begin + tl.arange(0, WIDTH)
        mask = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
        offsets = down[:, None] + _along(columns, COLUMNS_INNER, columns_outer, columns_inner)[None, :]
        a = _tile(table, entry, offsets, a_shift, mask, A)
        b = _tile(table + ENTRIES, entry, offsets, b_shift, mask, B)
        product = a * b
        total += product
        if SPREAD:
            spread += product * product
    where = member.to(tl.int64) * ROWS + rows
    tl.store(sums + where, tl.sum(total, 1), mask=rows < ROWS)
    if SPREAD:
        tl.store(squares + where, tl.sum(spread, 1), mask=rows < ROWS)


@triton.jit
def survey(
    programs, fields, shifts, table, sums, squares,
    FIELDS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    TURNED: tl.constexpr, MERGED: tl.constexpr, ALIGNED: tl.constexpr,
):
    """Σ_k a_ik b_ik of some rows of some product, and the sum of all squared products of them."""
    program = tl.program_id(0)
    number = tl.load(programs + 3 * program)
    member = tl.load(programs + 3 * program + 1)
    rows = tl.load(programs + 3 * program + 2) * HEIGHT + tl.arange(0, HEIGHT)
    field = fields + number * FIELDS
    a = tl.load(table + tl.load(field)).to(tl.pointer_type(A))
    b = tl.load(table + tl.load(field + 1)).to(tl.pointer_type(B))
    a_begin = tl.load(field + 2)
    b_begin = tl.load(field + 3)
    out = tl.load(field + 4)
    batch_inner = tl.load(field + 6)
    batch_far = tl.load(field + 7)
    batch_near = tl.load(field + 8)
    count = tl.load(field + 9)
    row_inner = tl.load(field + 10)
    row_far = tl.load(field + 11)
    row_near = tl.load(field + 12)
    length = tl.load(field + 13)
    column_inner = tl.load(field + 14)
    column_far = tl.load(field + 15)
    column_near = tl.load(field + 16)
    if ALIGNED:
        a = tl.multiple_of(a, 16)
        b = tl.multiple_of(b, 16)
        a_begin = tl.multiple_of(a_begin, 8)
        b_begin = tl.multiple_of(b_begin, 8)
        batch_far = tl.multiple_of(batch_far, 8)
        batch_near = tl.multiple_of(batch_near, 8)
        row_far = tl.multiple_of(row_far, 8)
        column_far = tl.multiple_of(column_far, 8)
    here = member * batch_near
    if MERGED:
        here = (member // batch_inner) * batch_far + (member % batch_inner) * batch_near
    a += here + a_begin
    b += here + b_begin
    shift = tl.load(shifts + number)
    if TURNED:
        if ALIGNED:
            column_near = tl.multiple_of(column_near, 8)
        down = rows.to(tl.int64)
        if MERGED:
            down = (rows // row_inner) * row_far + rows % row_inner
        total = tl.zeros((WIDTH, HEIGHT), tl.float32)
        spread = tl.zeros((WIDTH, HEIGHT), tl.float32)
        for begin in range(0, length, WIDTH):
            columns = begin + tl.arange(0, WIDTH)
            across = columns * column_near
            if MERGED:
                across = (columns // column_inner) * column_far + (columns % column_inner) * column_near
            mask = (columns < length)[:, None] & (rows < count)[None, :]
            offsets = across[:, None] + down[None, :]
            x = tl.load(a + offsets, mask=mask, other=0.0).to(tl.float32) + shift
            product = tl.where(mask, x * tl.load(b + offsets, mask=mask, other=0.0).to(tl.float32), 0.0)
            total += product
            spread += product * product
        found = tl.sum(total, 0)
    else:
        if ALIGNED:
            row_near = tl.multiple_of(row_near, 8)
        down = rows * row_near
        if MERGED:
            down = (rows // row_inner) * row_far + (rows % row_inner) * row_near
        total = tl.zeros((HEIGHT, WIDTH), tl.float32)
        spread = tl.zeros((HEIGHT, WIDTH), tl.float32)
        for begin in range(0, length, WIDTH):
            columns = begin + tl.arange(0, WIDTH)
            across = columns.to(tl.int64)
            if MERGED:
                across = (columns // column_inner) * column_far + (columns % column_inner) * column_near
            elif not ALIGNED:
                across = columns * column_near
            mask = (rows < count)[:, None] & (columns < length)[None, :]
            offsets = down[:, None] + across[None, :]
            x = tl.load(a + offsets, mask=mask, other=0.0).to(tl.float32) + shift
            product = tl.where(mask, x * tl.load(b + offsets, mask=mask, other=0.0).to(tl.float32), 0.0)
            total += product
            spread += product * product
        found = tl.sum(total, 1)
    tl.store(sums + out + member * count + rows, found, mask=rows < count)
    tl.store(squares + program, tl.sum(spread))


@triton.jit
def outer_products(
    table, sums, squares, a_shift, b_shift, ENTRIES,
    BATCH, BATCH_INNER, batch_outer, batch_inner,
    ROWS, ROWS_INNER, rows_outer, rows_inner,
    COLUMNS, COLUMNS_INNER, columns_outer, columns_inner,
    A: tl.constexpr, B: tl.constexpr, SPREAD: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A Bᵀ of legs whose rows fit one tile, and Σ_k ‖a_:k‖² ‖b_:k‖²."""
    member = tl.program_id(0)
    entry = member // BATCH
    rows = tl.arange(0, HEIGHT)
    here = _along(member % BATCH, BATCH_INNER, batch_outer, batch_inner)
    down = here + _along(rows, ROWS_INNER, rows_outer, rows_inner)
    total = tl.zeros((HEIGHT, HEIGHT), tl.float32)
    spread = tl.zeros((WIDTH,), tl.float32)
    for begin in range(0, COLUMNS, WIDTH):
        columns = begin + tl.arange(0, WIDTH)
        mask = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
        offsets = down[:, None] + _along(columns, COLUMNS_INNER, columns_outer, columns_inner)[None, :]
        a = _tile(table, entry, offsets, a_shift, mask, A)
        b = _tile(table + ENTRIES, entry, offsets, b_shift, mask, B)
        total += tl.dot(a, tl.trans(b), input_precision=PRECISION)
        if SPREAD:
            spread += tl.sum(a * a, 0) * tl.sum(b * b, 0)
    inside = (rows < ROWS)[:, None] & (rows < ROWS)[None, :]
    where = member.to(tl.int64) * ROWS * ROWS + rows[:, None] * ROWS + rows[None, :]
    tl.store(sums + where, total, mask=inside)
    if SPREAD:
        tl.store(squares + member, tl.sum(spread, 0))
# fmt: on
