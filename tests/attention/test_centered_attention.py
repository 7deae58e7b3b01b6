"""Centered attention: the same function, refused where it would not be, with a more accurate backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from conserved.attention import NotInvariantError, centered
from conserved.attention.attention_calls import observe_attention

Function = Callable[..., Any]


def inputs(
    *, queries: int = 24, keys: int = 24, heads: int = 4, groups: int = 1, width: int = 16, dtype: Any = torch.float64
) -> list[Tensor]:
    """Queries, keys, values and an output gradient; keys and values share a large component in every head."""
    torch.manual_seed(0)
    q = torch.randn(2, heads * groups, queries, width)
    k = 0.3 * torch.randn(2, heads, keys, width) + 2 * torch.randn(2, heads, 1, width)
    v = 0.1 * torch.randn(2, heads, keys, width) + torch.randn(2, heads, 1, width)
    return [tensor.to(dtype) for tensor in (q, k, v, torch.randn(2, heads * groups, queries, width))]


def passes(attend: Function, q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> list[Tensor]:
    """Output and gradients."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (q, k, v)]
    output = attend(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient.to(output.dtype))]


def errors(attend: Function, reference: Function, tensors: list[Tensor]) -> list[float]:
    """Relative errors of output, dQ, dK and dV against float64, median over heads."""
    actual = passes(attend, *tensors)
    exact = passes(reference, *(tensor.double() for tensor in tensors))
    return [
        float(((a.double() - b).flatten(-2).norm(dim=-1) / b.flatten(-2).norm(dim=-1)).median())
        for a, b in zip(actual, exact, strict=True)
    ]


def sdpa(**options: Any) -> Function:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


def written_out(q: Tensor, k: Tensor, v: Tensor, *, hidden: Tensor) -> Tensor:
    """Attention as many write it, with a mask under a name of its own."""
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v


TRIANGLE = torch.ones(24, 24, dtype=torch.bool).tril()
WINDOW = TRIANGLE & ~torch.ones(24, 24, dtype=torch.bool).tril(-7)
DISTANCE = -(torch.arange(24)[:, None] - torch.arange(24)).abs().double() / 4
PACKED = TRIANGLE & (torch.arange(24)[:, None] // 10 == torch.arange(24) // 10)

EXACT: dict[str, tuple[Function, Function, dict[str, Any]]] = {
    "full": (sdpa(), centered(), {}),
    "causal": (sdpa(is_causal=True), lambda q, k, v: centered()(q, k, v, is_causal=True), {}),
    "window": (sdpa(attn_mask=WINDOW), lambda q, k, v: centered()(q, k, v, attn_mask=WINDOW), {}),
    "packed": (sdpa(attn_mask=PACKED), lambda q, k, v: centered()(q, k, v, PACKED), {}),
    "bias": (
        sdpa(attn_mask=DISTANCE),
        lambda q, k, v: centered()(q, k, v, attn_mask=DISTANCE),
        {},
    ),
    "grouped": (
        sdpa(is_causal=True, enable_gqa=True),
        lambda q, k, v: centered()(q, k, v, is_causal=True, enable_gqa=True),
        {"groups": 3},
    ),
    "grouped mask": (
        sdpa(attn_mask=WINDOW, enable_gqa=True),
        lambda q, k, v: centered()(q, k, v, attn_mask=WINDOW, enable_gqa=True),
        {"groups": 3},
    ),
    "cross": (sdpa(), centered(), {"queries": 10, "keys": 17}),
    "lower right": (
        sdpa(attn_mask=causal_lower_right(10, 17)),
        lambda q, k, v: centered(written_out)(q, k, v, hidden=~torch.ones(10, 17, dtype=torch.bool).tril(7)),
        {"queries": 10, "keys": 17},
    ),
    "tokens first": (
        sdpa(is_causal=True, enable_gqa=True),
        lambda q, k, v: _heads_first(centered(_tokens_first, axis=-3, causal=True))(q, k, v),
        {"groups": 2},
    ),
    "one key": (sdpa(), centered(), {"keys": 1}),
    "tiny scale": (sdpa(scale=1e-3), lambda q, k, v: centered()(q, k, v, scale=1e-3), {}),
}


def _in_window(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (query >= key) & (query - key < 7)


def _tokens_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def _heads_first(attend: Function) -> Function:
    return lambda q, k, v: attend(*(tensor.transpose(1, 2) for tensor in (q, k, v))).transpose(1, 2)


@pytest.mark.parametrize("variant", EXACT)
def test_output_and_gradients_are_the_same_in_float64(variant: str) -> None:
    plain, mended, sizes = EXACT[variant]
    tensors = inputs(**sizes)
    for actual, expected in zip(passes(mended, *tensors), passes(plain, *tensors), strict=True):
        scale = float(expected.abs().max()) or 1.0
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12 * max(scale, 1.0))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_read_through_its_block_mask() -> None:
    # On a CPU it has no backward pass; benchmarks/attention_precision.py measures that on a GPU.
    q, k, v, _ = inputs(groups=2)
    mask = create_block_mask(_in_window, None, None, 24, 24, device="cpu")
    output = centered(flex_attention)(q, k, v, enable_gqa=True, block_mask=mask)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=WINDOW, enable_gqa=True)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_with_capped_scores_is_refused() -> None:
    def cap(score: Tensor, *_: Tensor) -> Tensor:
        return 50 * torch.tanh(score / 50)

    with pytest.raises(NotInvariantError, match="scores are capped"):
        centered(flex_attention)(*inputs()[:3], score_mod=cap)


def test_something_is_subtracted() -> None:
    q, k, v, _ = inputs()
    seen: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen[:] = [k, v]
        return F.scaled_dot_product_attention(q, k, v)

    centered(attend)(q, k, v)
    assert seen[0].mean(-2).norm() < 0.2 * k.mean(-2).norm()
    # One column of the values marks rows that see no key.
    assert seen[1].mean(-2).norm() < 0.2 * v.mean(-2).norm()


def test_a_head_that_would_gain_less_than_a_factor_of_two_is_left_alone() -> None:
    q, k, v, gradient = inputs(dtype=torch.bfloat16)
    # Heads 0 and 1 have nothing in common; the others keep what they share.
    k[:, :2], v[:, :2] = torch.randn_like(k[:, :2]), torch.randn_like(v[:, :2])
    plain = passes(sdpa(is_causal=True), q, k, v, gradient)
    mended = passes(lambda q, k, v: centered()(q, k, v, is_causal=True), q, k, v, gradient)
    for a, b in zip(mended, plain, strict=True):
        assert torch.equal(a[:, :2], b[:, :2])
    assert not torch.equal(mended[1][:, 2:], plain[1][:, 2:])


def packed(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Tensor, causal: bool, window_size: tuple[int, int] = (-1, -1)
) -> Tensor:
    """Attention of packed sequences with the layout and the options of flash-attn: (length, heads, width)."""
    index = torch.arange(len(q))
    document = torch.searchsorted(cu_seqlens[1:-1], index, right=True)
    distance = index[:, None] - index
    allowed = (document[:, None] == document) & ((distance >= 0) if causal else torch.ones_like(distance).bool())
    if window_size[0] >= 0:
        allowed &= distance <= window_size[0]
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)[0].transpose(0, 1)


@pytest.mark.parametrize("window", [(-1, -1), (6, 0)])
@pytest.mark.parametrize("causal", [True, False])
def test_packed_sequences_are_exact_and_become_accurate(causal: bool, window: tuple[int, int]) -> None:
    options: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 9, 40, 64]), "causal": causal, "window_size": window}
    tensors = [tensor[0] for tensor in inputs(queries=64, keys=64, width=64)]

    def heads_first(attend: Function) -> Function:
        return lambda *qkv: attend(*(tensor.transpose(0, 1) for tensor in qkv), **options).transpose(0, 1)

    plain, mended = heads_first(packed), heads_first(centered(packed, axis=-3))
    for actual, expected in zip(passes(mended, *tensors), passes(plain, *tensors), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12 * max(1.0, float(expected.abs().max())))
    halves = [tensor.bfloat16() for tensor in tensors]
    before, after = errors(plain, plain, halves), errors(mended, plain, halves)
    assert after[1] < before[1] / 20


@pytest.mark.parametrize("groups", [1, 2])
def test_packed_documents_get_constants_of_their_own(groups: int) -> None:
    bounds = torch.tensor([0, 9, 9, 40, 64])
    tensors = [tensor[0] for tensor in inputs(queries=64, keys=64, width=64, groups=groups)]
    documents = torch.searchsorted(bounds[1:-1], torch.arange(64), right=True)
    for tensor in tensors[1:3]:  # documents have nothing in common
        tensor += (2 * torch.randn(tensor.shape[0], 4, 64, dtype=tensor.dtype))[:, documents]

    def heads_first(attend: Function) -> Function:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
            q, k, v = (tensor.transpose(0, 1) for tensor in (q, k, v))
            return attend(q, k, v, cu_seqlens=bounds, causal=True).transpose(0, 1)

        return call

    def grouped(q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Tensor, causal: bool) -> Tensor:
        k, v = (tensor.repeat_interleave(groups, 1) for tensor in (k, v))
        return packed(q, k, v, cu_seqlens=cu_seqlens, causal=causal)

    plain, mended = heads_first(grouped), heads_first(centered(grouped, axis=-3))
    for actual, expected in zip(passes(mended, *tensors), passes(plain, *tensors), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12 * max(1.0, float(expected.abs().max())))
    halves = [tensor.bfloat16() for tensor in tensors]
    before, after = errors(plain, plain, halves), errors(mended, plain, halves)
    assert before[1] > 0.1
    assert after[1] < 3 * 2**-8
    assert after[2] < 3 * 2**-8


def test_a_function_that_ignores_the_bounds_of_documents_is_refused() -> None:
    def unpacked(q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Tensor) -> Tensor:
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1)

    q, k, v, _ = (tensor[0].transpose(0, 1) for tensor in inputs())
    with pytest.raises(NotInvariantError, match="constant added to all keys"):
        centered(unpacked, axis=-3)(q, k, v, cu_seqlens=torch.tensor([0, 10, 24]))


HALF = (torch.bfloat16, torch.float16)
ACCURATE: dict[str, tuple[Function, Function, Function]] = {
    "flash": (sdpa(is_causal=True), lambda q, k, v: centered()(q, k, v, is_causal=True), sdpa(is_causal=True)),
    "flash, full": (sdpa(), centered(), sdpa()),
    "flash, masked": (
        sdpa(attn_mask=WINDOW),
        lambda q, k, v: centered()(q, k, v, attn_mask=WINDOW),
        sdpa(attn_mask=WINDOW),
    ),
    "written out": (
        lambda q, k, v: written_out(q, k, v, hidden=~TRIANGLE),
        lambda q, k, v: centered(written_out)(q, k, v, hidden=~TRIANGLE),
        sdpa(is_causal=True),
    ),
}


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("kernel", ACCURATE)
def test_gradients_in_half_precision_become_accurate(kernel: str, dtype: torch.dtype) -> None:
    plain, mended, reference = ACCURATE[kernel]
    tensors = inputs(width=64, dtype=dtype)
    before, after = errors(plain, reference, tensors), errors(mended, reference, tensors)
    roundoff = torch.finfo(dtype).eps / 2
    assert before[1] > 10 * roundoff
    assert after[1] < 3 * roundoff
    assert after[2] < max(before[2], 3 * roundoff)
    assert after[0] < max(1.2 * before[0], roundoff)


def test_the_math_backend_stays_as_it_is() -> None:
    tensors = inputs(width=64, dtype=torch.bfloat16)
    with sdpa_kernel(SDPBackend.MATH):
        before = errors(sdpa(is_causal=True), sdpa(is_causal=True), tensors)
        after = errors(lambda q, k, v: centered()(q, k, v, is_causal=True), sdpa(is_causal=True), tensors)
    assert max(after) < 1.3 * max(before)


def _random_with_large_scores() -> list[Tensor]:
    torch.manual_seed(0)
    return [(size * torch.randn(2, 4, 128, 64)).bfloat16() for size in (4, 4, 1, 1)]


def _attention_sink() -> list[Tensor]:
    torch.manual_seed(0)
    q = 0.3 * torch.randn(2, 4, 128, 64) + torch.randn(2, 4, 1, 64)
    k = 0.3 * torch.randn(2, 4, 128, 64) + 0.3 * torch.randn(2, 4, 1, 64)
    v = 0.1 * torch.randn(2, 4, 128, 64) + torch.randn(2, 4, 1, 64)
    k[..., 0, :], v[..., 0, :] = 1.5 * q.mean(-2), 0.01 * torch.randn(2, 4, 64)
    return [tensor.bfloat16() for tensor in (q, k, v, torch.randn(2, 4, 128, 64))]


def _large_scores_with_common_keys() -> list[Tensor]:
    torch.manual_seed(0)
    q = 16 * torch.randn(1, 4, 256, 64)
    k = 16 * (torch.randn(1, 4, 256, 64) + 4 * torch.randn(1, 4, 1, 64))
    v = torch.randn(1, 4, 256, 64) + 4 * torch.randn(1, 4, 1, 64)
    return [tensor.bfloat16() for tensor in (q, k, v, torch.randn(1, 4, 256, 64))]


def test_keys_are_left_alone_where_rounding_would_move_large_scores() -> None:
    tensors = _large_scores_with_common_keys()
    before = errors(sdpa(is_causal=True), sdpa(is_causal=True), tensors)
    after = errors(lambda q, k, v: centered()(q, k, v, is_causal=True), sdpa(is_causal=True), tensors)
    values = errors(lambda q, k, v: centered(keys=False)(q, k, v, is_causal=True), sdpa(is_causal=True), tensors)
    assert after == values
    assert after[1] < before[1] / 2
    assert after[2] < before[2] / 2


@pytest.mark.parametrize("tensors", [_random_with_large_scores, _attention_sink], ids=lambda make: make.__name__)
@pytest.mark.parametrize("masked", [False, True])
def test_heads_that_would_lose_by_the_mean_do_not(tensors: Callable[[], list[Tensor]], masked: bool) -> None:
    triangle = torch.ones(128, 128, dtype=torch.bool).tril()

    def unread(q: Tensor, k: Tensor, v: Tensor, *, box: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=box.mask)

    def mended(q: Tensor, k: Tensor, v: Tensor) -> Any:
        if masked:
            return centered(unread, causal=True)(q, k, v, box=SimpleNamespace(mask=triangle))
        return centered()(q, k, v, is_causal=True)

    before = errors(sdpa(is_causal=True), sdpa(is_causal=True), tensors())
    after = errors(mended, sdpa(is_causal=True), tensors())
    assert all(a < 1.3 * b for a, b in zip(after, before, strict=True)), (before, after)


def test_the_mean_over_tokens_loses_with_an_attention_sink() -> None:
    """The reason why constants are means over rows: it fails if that stops being so."""
    before = errors(sdpa(is_causal=True), sdpa(is_causal=True), _attention_sink())

    def mended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        c, e = (tensor.detach().mean(-2, keepdim=True) for tensor in (k, v))
        return F.scaled_dot_product_attention(q, k - c, v - e, is_causal=True) + e

    after = errors(mended, sdpa(is_causal=True), _attention_sink())
    assert after[1] > 5 * before[1]


@pytest.mark.parametrize("read", [True, False])
def test_rows_that_see_no_key_stay_zero(read: bool) -> None:
    q, k, v, gradient = inputs()
    allowed = TRIANGLE.clone()
    allowed[:5] = False

    def unread(q: Tensor, k: Tensor, v: Tensor, *, box: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=box.mask)

    attend: Function = (
        (lambda q, k, v: centered()(q, k, v, attn_mask=allowed))
        if read
        else (lambda q, k, v: centered(unread)(q, k, v, box=SimpleNamespace(mask=allowed)))
    )
    actual, expected = passes(attend, q, k, v, gradient), passes(sdpa(attn_mask=allowed), q, k, v, gradient)
    assert torch.equal(actual[0][..., :5, :], torch.zeros_like(actual[0][..., :5, :]))
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_equal_values_are_not_taken_for_empty_rows() -> None:
    q, k, v, _ = inputs()
    v = v[:, :, :1].expand_as(v).contiguous()
    output = centered(written_out)(q, k, v, hidden=~TRIANGLE)
    torch.testing.assert_close(output, v, rtol=0, atol=1e-12)


def test_dropout_centers_keys_only_and_is_exact() -> None:
    tensors = inputs()
    results = []
    for attend in (sdpa(dropout_p=0.3), lambda q, k, v: centered()(q, k, v, dropout_p=0.3)):
        torch.manual_seed(7)
        results.append(passes(attend, *tensors))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_dropout_under_an_unknown_name_is_noticed() -> None:
    def dropping(q: Tensor, k: Tensor, v: Tensor, *, rate: float) -> Tensor:
        return F.dropout((q @ k.mT / 4).softmax(-1), rate) @ v

    tensors = inputs()
    results = []
    for attend in (dropping, centered(dropping)):
        torch.manual_seed(7)
        results.append(passes(lambda q, k, v, attend=attend: attend(q, k, v, rate=0.3), *tensors))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def with_sinks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    sink = torch.full((*scores.shape[:-1], 1), -3.0, dtype=q.dtype)
    return torch.cat((scores, sink), -1).softmax(-1)[..., :-1] @ v


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (50 * torch.tanh(q @ k.mT / math.sqrt(q.shape[-1]) / 50)).softmax(-1) @ v


def with_a_zero_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (F.pad(tensor, (0, 0, 0, 1)) for tensor in (k, v))
    return F.scaled_dot_product_attention(q, k, v)


def norming_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, F.rms_norm(k, k.shape[-1:]), v)


def sigmoid_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.sigmoid(q @ k.mT / math.sqrt(q.shape[-1])) @ v


def with_log_sum_exp(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (with_sinks, "rows do not sum to one"),
        (capped, "scores are capped"),
        (with_a_zero_key, "extra key"),
        (norming_keys, "normalises or rotates keys"),
        (sigmoid_attention, "rows do not sum to one"),
        (with_log_sum_exp, "log-sum-exp"),
    ],
)
def test_functions_that_are_not_invariant_are_refused(function: Function, reason: str, dtype: torch.dtype) -> None:
    q, k, v, _ = inputs(dtype=dtype)
    with pytest.raises(NotInvariantError, match=reason):
        centered(function)(q, k, v)


def quantising_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, (4 * k).round() / 4, v)


def test_steps_of_quantised_keys_do_not_hide_from_the_probe() -> None:
    with pytest.raises(NotInvariantError, match="rotates keys"):
        centered(quantising_keys)(*inputs()[:3])


def _cap(size: float) -> Callable[..., Tensor]:
    return lambda score: size * torch.tanh(score / size)


class _Steepness:
    def __init__(self, size: float) -> None:
        self.size = size

    def cap(self, score: Tensor) -> Tensor:
        return _cap(self.size)(score)


def _negligible(score: Tensor) -> Tensor:
    return score + 1.0


@pytest.mark.parametrize(
    ("harmless", "capping"),
    [
        (_negligible, _cap(5.0)),
        (_cap(1e9), _cap(5.0)),
        (partial(_negligible), partial(_cap(5.0))),
        (_Steepness(1e9).cap, _Steepness(5.0).cap),
        ({"cap": _cap(1e9)}, {"cap": _cap(5.0)}),
        ((1, _cap(1e9)), (1, _cap(5.0))),
        (_Steepness(1e9), _Steepness(5.0)),
    ],
    ids=["function", "closure", "partial", "method", "mapping", "tuple", "object"],
)
def test_options_that_change_the_function_are_probed_again(harmless: Any, capping: Any) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, *, option: Any) -> Tensor:
        option = option["cap"] if isinstance(option, dict) else option[1] if isinstance(option, tuple) else option
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        return getattr(option, "cap", option)(scores).softmax(-1) @ v

    q, k, v, _ = inputs()
    wrapped = centered(attend)
    wrapped(q, k, v, option=harmless)
    with pytest.raises(NotInvariantError, match="scores are capped"):
        wrapped(q, k, v, option=capping)


def test_parameters_are_probed_one_by_one() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor) -> Tensor:
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        return torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1).softmax(-1)[..., :-1] @ v

    q, k, v, _ = inputs()
    closed, learned = (nn.Parameter(torch.full((4, 1, 1), size).double()) for size in (-torch.inf, 0.0))
    wrapped = centered(attend)
    wrapped(q, k, v, sinks=closed)
    with pytest.raises(NotInvariantError, match="rows do not sum to one"):
        wrapped(q, k, v, sinks=learned)


@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
@pytest.mark.parametrize("bias", [causal_lower_right, causal_upper_left])
@pytest.mark.parametrize("queries", [10, 17, 20])
def test_causal_biases_of_pytorch_are_read(bias: Callable[..., Any], queries: int) -> None:
    tensors = inputs(queries=queries, keys=17)
    plain = passes(sdpa(attn_mask=bias(queries, 17)), *tensors)
    mended = passes(lambda q, k, v: centered()(q, k, v, attn_mask=bias(queries, 17)), *tensors)
    for a, b in zip(mended, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12, equal_nan=True)
        assert type(a) is Tensor


def test_a_list_of_outputs_stays_a_list() -> None:
    q, k, v, _ = inputs()
    (output,) = centered(lambda q, k, v: [F.scaled_dot_product_attention(q, k, v)])(q, k, v)
    torch.testing.assert_close(output, F.scaled_dot_product_attention(q, k, v), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("size", [1e-4, 1e-3])
def test_the_mark_of_empty_rows_is_no_larger_than_small_values(dtype: torch.dtype, size: float) -> None:
    q, k, v, gradient = inputs(width=64)
    tensors = [tensor.to(dtype) for tensor in (q, k, size * v, gradient)]
    before = errors(lambda q, k, v: written_out(q, k, v, hidden=~TRIANGLE), sdpa(is_causal=True), tensors)
    after = errors(lambda q, k, v: centered(written_out)(q, k, v, hidden=~TRIANGLE), sdpa(is_causal=True), tensors)
    assert all(a < max(1.3 * b, torch.finfo(dtype).eps) for a, b in zip(after, before, strict=True)), (before, after)


def test_capped_scores_may_have_their_values_centered() -> None:
    tensors = inputs()
    actual = passes(centered(capped, keys=False), *tensors)
    for a, b in zip(actual, passes(capped, *tensors), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_kind_of_call_is_probed_once_and_leaves_random_numbers_alone() -> None:
    calls: list[int] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(1)
        return F.scaled_dot_product_attention(q, k, v)

    mended = centered(attend)
    (q, k, v, _), (short, *_) = inputs(), inputs(queries=7)
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    mended(q, k, v)
    assert torch.equal(torch.rand(1), expected)
    probed = len(calls)
    assert probed > 1
    mended(short, k, v)
    assert len(calls) == probed + 1


def test_probes_are_not_told_to_listeners() -> None:
    class Attention(torch.nn.Module):
        attend = staticmethod(centered())

        def forward(self, x: Tensor) -> Any:
            return self.attend(x, x, x, attn_mask=TRIANGLE)

    model, text = Attention(), []
    with observe_attention(model, lambda call: text.append(call.at)):
        model(inputs()[0])
    assert text == ["product"]


def test_autocast_rounds_the_constant_once() -> None:
    q, k, v, _ = inputs(dtype=torch.float32, width=64)
    with torch.autocast("cpu", torch.bfloat16):
        output = centered()(q, k, v)
    assert output.dtype == torch.bfloat16
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    assert (output.double() - exact).norm() / exact.norm() < torch.finfo(torch.bfloat16).eps / 2


def test_decoding_without_gradients_is_left_alone() -> None:
    q, k, v, _ = inputs(queries=1, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(centered()(q, k, v), F.scaled_dot_product_attention(q, k, v))


def test_arguments_are_validated() -> None:
    with pytest.raises(TypeError, match="Expected an attention function"):
        centered(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Expected axis"):
        centered(axis=1)


@pytest.mark.parametrize("options", [{"is_causal": True}, {"attn_mask": WINDOW}])
def test_it_compiles_into_one_graph(options: dict[str, Any]) -> None:
    tensors = inputs()
    attend = centered()
    compiled = torch.compile(lambda q, k, v: attend(q, k, v, **options), backend="aot_eager", fullgraph=True)
    for actual, expected in zip(passes(compiled, *tensors), passes(sdpa(**options), *tensors), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_transforms_of_functions_are_followed() -> None:
    q, k, v, _ = inputs()

    def loss(attend: Function) -> Function:
        return lambda q, k, v: attend(q, k, v, hidden=~TRIANGLE).square().sum()

    actual, expected = (
        torch.func.vmap(torch.func.grad(loss(attend)))(q, k, v) for attend in (centered(written_out), written_out)
    )
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("queries", "keys"), [(0, 3), (3, 0)])
def test_nothing_to_attend_is_left_to_the_function(queries: int, keys: int) -> None:
    q, k, v, _ = inputs(queries=queries, keys=keys)
    assert torch.equal(centered()(q, k, v), F.scaled_dot_product_attention(q, k, v))


def test_two_axes_are_enough() -> None:
    q, k, v = (tensor[0, 0] for tensor in inputs()[:3])
    torch.testing.assert_close(centered()(q, k, v), F.scaled_dot_product_attention(q, k, v), rtol=0, atol=1e-12)


def test_a_batch_of_values_that_are_not_finite_stays_so() -> None:
    q, k, v, _ = inputs()
    v[0, 0, 0, 0] = torch.inf
    expected = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(centered()(q, k, v), expected, rtol=0, atol=1e-12, equal_nan=True)
