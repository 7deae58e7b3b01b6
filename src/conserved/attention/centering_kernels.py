"""Triton kernels that choose the constants of centered attention, subtract them and add them back: four launches.

In PyTorch's own operations the constants take a dozen launches, and a subtraction that broadcasts runs below the speed
of memory. The numbers are those of `gauge_constants`, which the tests compare these kernels with and which is used
where they do not apply.
"""

from __future__ import annotations

import triton
import triton.language as tl

# fmt: off


@triton.jit
def sum_rows(
    query, key, value, sums, scalars,
    query_batch, query_head, query_token, key_batch, key_head, key_token, value_batch, value_head, value_token,
    HEADS, KEYS, FIRST, STEP, NUMBER, USED, SPLIT, scale,
    CAUSAL: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the sums over SPLIT keys that softmax rows of one key head are made of, and what they are relative to.

    Rows are NUMBER positions of each of GROUPS query heads, in ROWS >= USED places. A head and split has ROWS × COLUMNS
    sums of keys and as many of values in `sums`, and ROWS largest scores and totals of weights in `scalars`.
    """
    batch = (tl.program_id(0) // HEADS).to(tl.int64)
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = columns < WIDTH
    positions = FIRST + (rows % NUMBER) * STEP
    q = _sampled_queries(
        query, key, batch, head, rows, positions, columns, query_batch, query_head, query_token, NUMBER, USED, scale,
        GROUPS, WIDTH,
    )
    largest = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mean_keys = tl.zeros([ROWS, COLUMNS], tl.float32)
    outputs = tl.zeros([ROWS, COLUMNS], tl.float32)
    begin = tl.program_id(1) * SPLIT
    end = tl.minimum(KEYS, begin + SPLIT)
    if CAUSAL:
        end = tl.minimum(end, FIRST + (NUMBER - 1) * STEP + 1)
    for start in range(begin, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        seen = (tokens < KEYS)[:, None] & inside[None, :]
        k = tl.load(
            key + batch * key_batch + head * key_head + tokens.to(tl.int64)[:, None] * key_token + columns[None, :],
            mask=seen, other=0.0,
        )
        v = tl.load(
            value + batch * value_batch + head * value_head + tokens.to(tl.int64)[:, None] * value_token
            + columns[None, :],
            mask=seen, other=0.0,
        )
        scores = tl.dot(q, tl.trans(k))
        visible = (tokens < KEYS)[None, :] & (rows >= 0)[:, None]
        if CAUSAL:
            visible = visible & (tokens[None, :] <= positions[:, None])
        scores = tl.where(visible, scores, -1e30)
        raised = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.where(visible, tl.exp(scores - raised[:, None]), 0.0)
        shrink = tl.exp(largest - raised)
        total = total * shrink + tl.sum(weights, 1)
        half = weights.to(key.dtype.element_ty)
        mean_keys = mean_keys * shrink[:, None] + tl.dot(half, k)
        outputs = outputs * shrink[:, None] + tl.dot(half, v)
        largest = raised
    part = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tile = part * (2 * ROWS * COLUMNS) + rows[:, None] * COLUMNS + columns[None, :]
    tl.store(sums + tile, mean_keys)
    tl.store(sums + tile + ROWS * COLUMNS, outputs)
    tl.store(scalars + part * (2 * ROWS) + rows, largest)
    tl.store(scalars + part * (2 * ROWS) + ROWS + rows, total)


@triton.jit
def choose_constants(
    query, key, sums, scalars, key_constant, value_constant,
    query_batch, query_head, query_token, key_batch, key_head, key_token,
    HEADS, FIRST, STEP, NUMBER, USED, SPLITS, STRIDE, SAMPLED, scale, gate, least_gain, most_noise,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Write the gated means of k̄_i and O_i over sampled rows of one key head, from the sums over SPLITS parts.

    The constant of the keys is zero if its subtraction from SAMPLED keys, which are STRIDE apart, would move scores by
    more than `most_noise`.
    """
    batch = (tl.program_id(0) // HEADS).to(tl.int64)
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    used, inside = rows < USED, columns < WIDTH
    largest = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mean_keys = tl.zeros([ROWS, COLUMNS], tl.float32)
    outputs = tl.zeros([ROWS, COLUMNS], tl.float32)
    for split in range(0, SPLITS):
        part = tl.program_id(0).to(tl.int64) * SPLITS + split
        tile = part * (2 * ROWS * COLUMNS) + rows[:, None] * COLUMNS + columns[None, :]
        theirs = tl.load(scalars + part * (2 * ROWS) + rows)
        raised = tl.maximum(largest, theirs)
        shrink, grow = tl.exp(largest - raised), tl.exp(theirs - raised)
        total = total * shrink + tl.load(scalars + part * (2 * ROWS) + ROWS + rows) * grow
        mean_keys = mean_keys * shrink[:, None] + tl.load(sums + tile) * grow[:, None]
        outputs = outputs * shrink[:, None] + tl.load(sums + tile + ROWS * COLUMNS) * grow[:, None]
        largest = raised
    target = tl.program_id(0).to(tl.int64) * WIDTH + columns
    constant = _gated_mean(mean_keys / total[:, None], used, USED, gate, least_gain)
    constant = constant.to(key.dtype.element_ty)
    positions = FIRST + (rows % NUMBER) * STEP
    q = _sampled_queries(
        query, key, batch, head, rows, positions, columns, query_batch, query_head, query_token, NUMBER, USED, scale,
        GROUPS, WIDTH,
    )
    indices = tl.arange(0, BLOCK)
    k = tl.load(
        key + batch * key_batch + head * key_head + (indices * STRIDE).to(tl.int64)[:, None] * key_token
        + columns[None, :],
        mask=(indices < SAMPLED)[:, None] & inside[None, :], other=0.0,
    )
    exact = k.to(tl.float32) - constant.to(tl.float32)[None, :]
    rounding = tl.where((indices < SAMPLED)[:, None], exact.to(key.dtype.element_ty).to(tl.float32) - exact, 0.0)
    noise = tl.dot(q.to(tl.float32), tl.trans(rounding))
    square = tl.sum(tl.sum(noise * noise, 1), 0) / (USED * SAMPLED)
    quiet = tl.where(square <= most_noise * most_noise, 1.0, 0.0)
    constant = constant.to(tl.float32) * quiet
    tl.store(key_constant + target, constant.to(key_constant.dtype.element_ty), mask=inside)
    constant = _gated_mean(outputs / total[:, None], used, USED, gate, least_gain)
    tl.store(value_constant + target, constant.to(value_constant.dtype.element_ty), mask=inside)


@triton.jit
def _sampled_queries(
    query, key, batch, head, rows, positions, columns, query_batch, query_head, query_token, NUMBER, USED, scale,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr,
):
    """Return sampled queries times the scale, in the precision of the keys."""
    indices = (head * GROUPS + rows // NUMBER) * query_head + positions.to(tl.int64) * query_token
    q = tl.load(
        query + batch * query_batch + indices[:, None] + columns[None, :],
        mask=(rows < USED)[:, None] & (columns < WIDTH)[None, :], other=0.0,
    )
    return (q.to(tl.float32) * scale).to(key.dtype.element_ty)


@triton.jit
def _gated_mean(samples, used, USED, gate, least_gain):
    """Return the mean over rows where it exceeds the spread, or zeros if that takes away too little of the head."""
    samples = tl.where(used[:, None], samples, 0.0)
    mean = tl.sum(samples, 0) / USED
    difference = tl.where(used[:, None], samples - mean[None, :], 0.0)
    variance = tl.sum(difference * difference, 0) / USED
    square = mean * mean
    passes = square > gate * gate * variance
    gain = tl.sum(tl.where(passes, square, 0.0), 0)
    size = tl.sum(square + variance, 0)
    worth = tl.where(gain > least_gain * size, 1.0, 0.0)
    return tl.where(passes, mean * worth, 0.0)


@triton.jit
def subtract_constants(
    key, value, key_constant, value_constant, shifted_key, shifted_value,
    key_batch, key_head, key_token, value_batch, value_head, value_token,
    to_key_batch, to_key_head, to_key_token, to_value_batch, to_value_head, to_value_token,
    HEADS, KEYS, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Subtract the constants of one head from a block of its keys and of its values."""
    batch = (tl.program_id(1) // HEADS).to(tl.int64)
    head = (tl.program_id(1) % HEADS).to(tl.int64)
    tokens = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    inside = (tokens < KEYS)[:, None] & (columns < WIDTH)[None, :]
    source = tl.program_id(1).to(tl.int64) * WIDTH + columns
    constant = tl.load(key_constant + source, mask=columns < WIDTH, other=0.0).to(tl.float32)
    _shift_block(
        key + batch * key_batch + head * key_head, shifted_key + batch * to_key_batch + head * to_key_head,
        -constant, tokens[:, None] * key_token + columns[None, :], tokens[:, None] * to_key_token + columns[None, :],
        inside,
    )
    constant = tl.load(value_constant + source, mask=columns < WIDTH, other=0.0).to(tl.float32)
    _shift_block(
        value + batch * value_batch + head * value_head,
        shifted_value + batch * to_value_batch + head * to_value_head,
        -constant, tokens[:, None] * value_token + columns[None, :],
        tokens[:, None] * to_value_token + columns[None, :], inside,
    )


@triton.jit
def add_constants(
    output, constant, result,
    output_batch, output_head, output_token, result_batch, result_head, result_token,
    HEADS, QUERIES, GROUPS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Add the constant of a key head to a block of the outputs of one of its query heads."""
    batch = (tl.program_id(1) // HEADS).to(tl.int64)
    head = (tl.program_id(1) % HEADS).to(tl.int64)
    tokens = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    inside = (tokens < QUERIES)[:, None] & (columns < WIDTH)[None, :]
    source = (batch * (HEADS // GROUPS) + head // GROUPS) * WIDTH + columns
    shift = tl.load(constant + source, mask=columns < WIDTH, other=0.0).to(tl.float32)
    _shift_block(
        output + batch * output_batch + head * output_head, result + batch * result_batch + head * result_head,
        shift, tokens[:, None] * output_token + columns[None, :], tokens[:, None] * result_token + columns[None, :],
        inside,
    )


@triton.jit
def _shift_block(source, target, constant, source_offsets, target_offsets, inside):
    block = tl.load(source + source_offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + target_offsets, (block + constant[None, :]).to(target.dtype.element_ty), mask=inside)
