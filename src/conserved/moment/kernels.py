"""Triton kernels that sum products of legs lying anywhere in memory; `triton_backend` and `launches` launch them.

Legs are given by a table with the address of each, and by the strides they have in common; the table of a product has
all first factors, all second factors and so on, and where the results of each entry go.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""Dtypes that kernels read; they add up in float32."""


@triton.jit
def _along(index, inner, far, near, NEXT: tl.constexpr, MERGED: tl.constexpr):
    """Compute the offset of an index along two axes traversed as one, in entries.

    The compiler must know which neighbours lie NEXT to each other to fetch many at once.
    """
    if NEXT:
        near = 1
    result = index.to(tl.int64) * near
    if MERGED:
        result = (index // inner).to(tl.int64) * far + (index % inner).to(tl.int64) * near
    return result


@triton.jit
def _tile(table, entry, offsets, mask, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Load a tile of one leg in float32, zero outside of it."""
    start = tl.load(table + entry).to(tl.pointer_type(KIND))
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    return tl.load(start + offsets, mask=mask, other=0.0).to(tl.float32)


# fmt: off
@triton.jit
def row_sums(
    table, sums, ENTRIES,
    BATCH, BATCH_INNER, batch_outer, batch_inner,
    ROWS, ROWS_INNER, rows_outer, rows_inner,
    COLUMNS, COLUMNS_INNER, columns_outer, columns_inner,
    FACTORS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    AA: tl.constexpr, AB: tl.constexpr, AC: tl.constexpr, AD: tl.constexpr, BB: tl.constexpr, BC: tl.constexpr,
    BD: tl.constexpr, CC: tl.constexpr, CD: tl.constexpr, DD: tl.constexpr,
    SPREAD: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    TURNED: tl.constexpr, MERGED: tl.constexpr, ALIGNED: tl.constexpr,
):
    """Compute Σ_k a_ik b_ik of a tile of rows, for several pairs of up to four factors that are read once each.

    AA to DD are the numbers of the pairs among those that are asked for; −1 for the others. With SPREAD only the first
    two factors are multiplied, and the sums of their squared products follow.
    """
    tiles = tl.cdiv(ROWS, HEIGHT)
    member = tl.program_id(0) // tiles
    entry = member // BATCH
    rows = (tl.program_id(0) % tiles) * HEIGHT + tl.arange(0, HEIGHT)
    member_offsets = _along(member % BATCH, BATCH_INNER, batch_outer, batch_inner, False, MERGED)
    down = member_offsets + _along(rows, ROWS_INNER, rows_outer, rows_inner, TURNED, MERGED)
    aa = tl.zeros((HEIGHT, WIDTH), tl.float32)
    ab = tl.zeros((HEIGHT, WIDTH), tl.float32)
    ac = tl.zeros((HEIGHT, WIDTH), tl.float32)
    ad = tl.zeros((HEIGHT, WIDTH), tl.float32)
    bb = tl.zeros((HEIGHT, WIDTH), tl.float32)
    bc = tl.zeros((HEIGHT, WIDTH), tl.float32)
    bd = tl.zeros((HEIGHT, WIDTH), tl.float32)
    cc = tl.zeros((HEIGHT, WIDTH), tl.float32)
    cd = tl.zeros((HEIGHT, WIDTH), tl.float32)
    dd = tl.zeros((HEIGHT, WIDTH), tl.float32)
    spread = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for begin in range(0, COLUMNS, WIDTH):
        columns = begin + tl.arange(0, WIDTH)
        mask = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
        across = _along(columns, COLUMNS_INNER, columns_outer, columns_inner, ALIGNED and not TURNED, MERGED)
        offsets = down[:, None] + across[None, :]
        a = _tile(table, entry, offsets, mask, A, ALIGNED)
        b = a
        c = a
        d = a
        if FACTORS > 1:
            b = _tile(table + ENTRIES, entry, offsets, mask, B, ALIGNED)
        if FACTORS > 2:
            c = _tile(table + 2 * ENTRIES, entry, offsets, mask, C, ALIGNED)
        if FACTORS > 3:
            d = _tile(table + 3 * ENTRIES, entry, offsets, mask, D, ALIGNED)
        if AA >= 0:
            aa += a * a
        if AB >= 0:
            ab += a * b
        if AC >= 0:
            ac += a * c
        if AD >= 0:
            ad += a * d
        if BB >= 0:
            bb += b * b
        if BC >= 0:
            bc += b * c
        if BD >= 0:
            bd += b * d
        if CC >= 0:
            cc += c * c
        if CD >= 0:
            cd += c * d
        if DD >= 0:
            dd += d * d
        if SPREAD:
            spread += (a * b) * (a * b)
    inside = rows < ROWS
    where = tl.load(table + FACTORS * ENTRIES + entry) + (member % BATCH) * ROWS + rows
    size = BATCH * ROWS
    if AA >= 0:
        tl.store(sums + where + AA * size, tl.sum(aa, 1), mask=inside)
    if AB >= 0:
        tl.store(sums + where + AB * size, tl.sum(ab, 1), mask=inside)
    if AC >= 0:
        tl.store(sums + where + AC * size, tl.sum(ac, 1), mask=inside)
    if AD >= 0:
        tl.store(sums + where + AD * size, tl.sum(ad, 1), mask=inside)
    if BB >= 0:
        tl.store(sums + where + BB * size, tl.sum(bb, 1), mask=inside)
    if BC >= 0:
        tl.store(sums + where + BC * size, tl.sum(bc, 1), mask=inside)
    if BD >= 0:
        tl.store(sums + where + BD * size, tl.sum(bd, 1), mask=inside)
    if CC >= 0:
        tl.store(sums + where + CC * size, tl.sum(cc, 1), mask=inside)
    if CD >= 0:
        tl.store(sums + where + CD * size, tl.sum(cd, 1), mask=inside)
    if DD >= 0:
        tl.store(sums + where + DD * size, tl.sum(dd, 1), mask=inside)
    if SPREAD:
        tl.store(sums + where + size, tl.sum(spread, 1), mask=inside)


@triton.jit
def placed_sums(
    programs, fields, shifts, table, sums, squares, norms, sizes,
    FIELDS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    TURNED: tl.constexpr, MERGED: tl.constexpr, ALIGNED: tl.constexpr, LIFTED: tl.constexpr,
):
    """Compute Σ_k a_ik b_ik of some rows of a product, and over all rows Σ (a_ik b_ik)², Σ b_ik² and Σ a_ik².

    With LIFTED, a is 1 and is not read.
    """
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
    batch_inner = tl.load(field + 6).to(tl.int32)
    batch_far = tl.load(field + 7)
    batch_near = tl.load(field + 8)
    count = tl.load(field + 9).to(tl.int32)
    row_inner = tl.load(field + 10).to(tl.int32)
    row_far = tl.load(field + 11)
    row_near = tl.load(field + 12)
    length = tl.load(field + 13).to(tl.int32)
    column_inner = tl.load(field + 14).to(tl.int32)
    column_far = tl.load(field + 15)
    column_near = tl.load(field + 16)
    if ALIGNED:
        a = tl.multiple_of(a, 16)
        b = tl.multiple_of(b, 16)
        a_begin = tl.multiple_of(a_begin, 8)
        b_begin = tl.multiple_of(b_begin, 8)
        batch_near = tl.multiple_of(batch_near, 8)
        batch_far = tl.multiple_of(batch_far, 8)
        row_far = tl.multiple_of(row_far, 8)
        column_far = tl.multiple_of(column_far, 8)
        if TURNED:
            column_near = tl.multiple_of(column_near, 8)
        else:
            row_near = tl.multiple_of(row_near, 8)
        # A mask that may end anywhere among neighbours has every one of them fetched alone.
        if TURNED:
            count = tl.multiple_of(count, 8)
        else:
            length = tl.multiple_of(length, 8)
    member_offsets = _along(member, batch_inner, batch_far, batch_near, False, MERGED)
    down = _along(rows, row_inner, row_far, row_near, TURNED, MERGED)
    a += member_offsets + a_begin
    b += member_offsets + b_begin
    shift = tl.load(shifts + number)
    total = tl.zeros((HEIGHT, WIDTH), tl.float32)
    spread = tl.zeros((HEIGHT, WIDTH), tl.float32)
    norm = tl.zeros((HEIGHT, WIDTH), tl.float32)
    size = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for begin in range(0, length, WIDTH):
        columns = begin + tl.arange(0, WIDTH)
        across = _along(columns, column_inner, column_far, column_near, ALIGNED and not TURNED, MERGED)
        mask = (rows < count)[:, None] & (columns < length)[None, :]
        offsets = down[:, None] + across[None, :]
        y = tl.load(b + offsets, mask=mask, other=0.0).to(tl.float32)
        product = y
        if not LIFTED:
            x = tl.load(a + offsets, mask=mask, other=0.0).to(tl.float32)
            product = (x + shift) * y
            size += x * x
        total += product
        spread += product * product
        norm += y * y
    tl.store(sums + out + member * count + rows, tl.sum(total, 1), mask=rows < count)
    tl.store(squares + program, tl.sum(spread))
    tl.store(norms + program, tl.sum(norm))
    if not LIFTED:
        tl.store(sizes + program, tl.sum(size))


@triton.jit
def outer_products(
    table, sums, ENTRIES,
    BATCH, BATCH_INNER, batch_outer, batch_inner,
    ROWS, ROWS_INNER, rows_outer, rows_inner,
    COLUMNS, COLUMNS_INNER, columns_outer, columns_inner,
    A: tl.constexpr, B: tl.constexpr, SPREAD: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    TURNED: tl.constexpr, MERGED: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
):
    """Compute A Bᵀ of legs whose rows fit one tile; with SPREAD also Σ_k ‖a_:k‖² ‖b_:k‖² of each, after all of them."""
    member = tl.program_id(0)
    entry = member // BATCH
    rows = tl.arange(0, HEIGHT)
    member_offsets = _along(member % BATCH, BATCH_INNER, batch_outer, batch_inner, False, MERGED)
    down = member_offsets + _along(rows, ROWS_INNER, rows_outer, rows_inner, TURNED, MERGED)
    total = tl.zeros((HEIGHT, HEIGHT), tl.float32)
    spread = tl.zeros((WIDTH,), tl.float32)
    for begin in range(0, COLUMNS, WIDTH):
        columns = begin + tl.arange(0, WIDTH)
        mask = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
        across = _along(columns, COLUMNS_INNER, columns_outer, columns_inner, ALIGNED and not TURNED, MERGED)
        offsets = down[:, None] + across[None, :]
        a = _tile(table, entry, offsets, mask, A, ALIGNED)
        b = _tile(table + ENTRIES, entry, offsets, mask, B, ALIGNED)
        total += tl.dot(a, tl.trans(b), input_precision=PRECISION)
        if SPREAD:
            spread += tl.sum(a * a, 0) * tl.sum(b * b, 0)
    inside = (rows < ROWS)[:, None] & (rows < ROWS)[None, :]
    index = tl.load(table + 2 * ENTRIES + entry)
    size = ROWS * ROWS
    where = index + (member % BATCH) * size + rows[:, None] * ROWS + rows[None, :]
    tl.store(sums + where, total, mask=inside)
    if SPREAD:
        tl.store(sums + index + BATCH * size + member % BATCH, tl.sum(spread, 0))


@triton.jit
def norm_remainders(
    x, gradient, gain, out, ROWS, COLUMNS, epsilon,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CENTRED: tl.constexpr, GAINED: tl.constexpr,
):
    """Compute ε (s + ε)^(−3/2) Σ_i x_i g_i d_i of rows that a norm divides by √(s + ε), and its squared terms' sum."""
    rows = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    columns = tl.arange(0, WIDTH)
    mask = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
    offsets = rows.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
    values = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    gradients = tl.load(gradient + offsets, mask=mask, other=0.0).to(tl.float32)
    if CENTRED:
        values = tl.where(mask, values - (tl.sum(values, 1) / COLUMNS)[:, None], 0.0)
    root = tl.sqrt(tl.sum(values * values, 1) / COLUMNS + epsilon)
    weight = epsilon / (root * root * root)
    products = values * gradients
    if GAINED:
        products *= tl.load(gain + columns, mask=columns < COLUMNS, other=0.0).to(tl.float32)[None, :]
    products *= weight[:, None]
    tl.store(out + rows, tl.sum(products, 1), mask=rows < ROWS)
    tl.store(out + ROWS + rows, tl.sum(products * products, 1), mask=rows < ROWS)


@triton.jit
def root_quotients(
    programs, table, quotients, COUNT, shift,
    A: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ALIGNED: tl.constexpr,
):
    """Compute a/(√b + shift) by entry: a program does some blocks of one of COUNT pairs of tensors.

    The table has the addresses of all first and all second tensors, where results go, and how many entries there are.
    """
    number = tl.load(programs + 2 * tl.program_id(0))
    begin = tl.load(programs + 2 * tl.program_id(0) + 1).to(tl.int64) * BLOCK * BLOCKS
    a = tl.load(table + number).to(tl.pointer_type(A))
    b = tl.load(table + COUNT + number).to(tl.pointer_type(B))
    out = quotients + tl.load(table + 2 * COUNT + number)
    size = tl.load(table + 3 * COUNT + number)
    if ALIGNED:
        a = tl.multiple_of(a, 16)
        b = tl.multiple_of(b, 16)
        out = tl.multiple_of(out, 16)
    for block in range(BLOCKS):
        entries = begin + block * BLOCK + tl.arange(0, BLOCK)
        inside = entries < size
        top = tl.load(a + entries, mask=inside, other=0.0).to(tl.float32)
        below = tl.load(b + entries, mask=inside, other=0.0).to(tl.float32)
        # Rounded as PyTorch rounds them: the account of a step must not differ from the step.
        tl.store(out + entries, tl.div_rn(top, tl.sqrt_rn(below) + shift), mask=inside)


@triton.jit
def row_totals(
    leg, sums, squares, ROWS, COLUMNS, PIECES, batch_stride, row_stride, column_stride,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):
    """Compute Σ_j b_ij of rows over a piece of the columns, and Σ b_ij² over all of them, summed in float64."""
    piece = tl.program_id(0) % PIECES
    member = tl.program_id(0) // PIECES
    rows = tl.program_id(1) * HEIGHT + tl.arange(0, HEIGHT)
    length = tl.cdiv(COLUMNS, PIECES)
    end = tl.minimum((piece + 1) * length, COLUMNS)
    start = leg + member.to(tl.int64) * batch_stride + rows.to(tl.int64)[:, None] * row_stride
    total = tl.zeros((HEIGHT,), tl.float64)
    square = tl.zeros((HEIGHT,), tl.float64)
    for begin in range(piece * length, end, WIDTH):
        columns = begin + tl.arange(0, WIDTH)
        mask = (rows < ROWS)[:, None] & (columns < end)[None, :]
        values = tl.load(start + columns.to(tl.int64)[None, :] * column_stride, mask=mask, other=0.0).to(tl.float64)
        total += tl.sum(values, 1)
        square += tl.sum(values * values, 1)
    where = tl.program_id(0).to(tl.int64) * ROWS + rows
    tl.store(sums + where, total, mask=rows < ROWS)
    tl.store(squares + where, square, mask=rows < ROWS)
# fmt: on
