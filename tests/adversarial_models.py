"""Small models that try to get a wrong law out of inference: every sort of operator between trained maps.

`MIDDLES` are functions of a tensor of 3 samples, 4 channels, 6 places. Frames put maps, biases and norms around them,
so that each operator meets free charges along both axes, along one, and shifts. `adversarial_layers` has models of
their own. `models()` names all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adversarial_layers import Function, layers

SAMPLES, CHANNELS, PLACES, WIDTH = 3, 4, 6, 5

Middle = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Adversary:
    """A model with the inputs it is called with."""

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    loss: str = "any"


def _complex(h: Tensor) -> Tensor:
    return torch.view_as_complex(h.reshape(*h.shape[:-1], -1, 2).contiguous())


def _real(z: Tensor) -> Tensor:
    return torch.view_as_real(z.resolve_conj()).flatten(-2)


def _index(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


PERMUTED = _index(2, 0, 3, 1, 5, 4)
REPEATED = _index(0, 2, 2, -1, 1, 1)
CHANNEL = _index(3, 0, 2, 1)


def _scattered(h: Tensor, reduce: str, include_self: bool) -> Tensor:
    index = REPEATED.remainder(PLACES).expand(SAMPLES, CHANNELS, PLACES)
    return torch.zeros_like(h).scatter_reduce(2, index, h, reduce, include_self=include_self)


def _uneven(h: Tensor, *, dim: int) -> Tensor:
    """An index that differs from row to row."""
    size = h.shape[dim]
    grid = torch.arange(h.numel()).reshape(h.shape)
    return (grid * 7 // 3) % size


def _in_place(h: Tensor, write: Callable[[Tensor], Any]) -> Tensor:
    h = h.clone()
    write(h)
    return h


def _write_slice(h: Tensor) -> None:
    h[:, 1:3] = h[:, :2].clone()


def _write_rows(h: Tensor) -> None:
    h[:, :, ::2] *= 2
    h[:, 0].relu_()


def _write_index(h: Tensor) -> None:
    h[:, :, _index(0, 3)] = 0.0


def _write_add(h: Tensor) -> None:
    h[:, 1].add_(h[:, 2])


def _out(h: Tensor) -> Tensor:
    target = torch.zeros_like(h.detach())
    target.copy_(h)
    view = target.flatten(1)
    view[:, :3].mul_(2.0)
    return target


def _recursion(h: Tensor) -> Tensor:
    state: Any = 0
    result = []
    for index in range(PLACES):
        state = 0.5 * state + h[:, :, index]
        result.append(state)
    return torch.stack(result, 2)


def _gated_recursion(h: Tensor) -> Tensor:
    state = torch.zeros(SAMPLES, CHANNELS, dtype=h.dtype)
    for index in range(PLACES):
        state = torch.sigmoid(h[:, :, index]) * state + h[:, :, index]
    return state.unsqueeze(2).expand(-1, -1, 2)


def _grid(h: Tensor, mode: str, padding: str) -> Tensor:
    image = h.reshape(SAMPLES, 2, 2, PLACES)
    grid = torch.linspace(-1.2, 1.2, 2 * PLACES * 2).reshape(1, 2, PLACES, 2).expand(SAMPLES, -1, -1, -1)
    return F.grid_sample(image, grid.to(h.dtype), mode=mode, padding_mode=padding, align_corners=False)


def _image(h: Tensor) -> Tensor:
    return h.reshape(SAMPLES, 2, 4, 3)


MIDDLES: dict[str, Middle] = {
    # moves
    "identity": lambda h: h,
    "diff": lambda h: h[:, :, 1:] - h[:, :, :-1],
    "diff_channels": lambda h: h[:, 1:] - h[:, :-1],
    "diff_prepend": lambda h: torch.diff(h, dim=2, prepend=h[:, :, :1]),
    "diff_append": lambda h: torch.diff(h, dim=1, append=h[:, :1]),
    "diff_twice": lambda h: torch.diff(h, n=2, dim=2),
    "minus_roll": lambda h: h - h.roll(1, 2),
    "minus_roll_both": lambda h: h - h.roll((1, 2), (1, 2)),
    "minus_roll_flat": lambda h: h - h.roll(1),
    "minus_flip": lambda h: h - h.flip(2),
    "minus_flip_both": lambda h: h - h.flip(1, 2),
    "minus_permuted": lambda h: h - h[:, :, PERMUTED],
    "minus_permuted_channels": lambda h: h - h[:, CHANNEL],
    "plus_repeated": lambda h: h + h[:, :, REPEATED],
    "repeated": lambda h: h[:, :, REPEATED],
    "two_indices": lambda h: h[:, _index(0, 1, 2, 3), _index(0, 2, 2, 5)],
    "two_indices_apart": lambda h: h[_index(0, 1), :, _index(0, 3)],
    "negative_step": lambda h: h[:, :, ::2] - h[:, :, 1::2],
    "ellipsis": lambda h: h[..., None, 1:4],
    "boolean": lambda h: h[:, torch.tensor([True, False, True, True])],
    "boolean_entries": lambda h: h[:, h[0] > 0][:, :2] if False else h[:, :, h[0, 0].detach() == h[0, 0].detach()],
    "transposed": lambda h: h - h.reshape(SAMPLES, PLACES, CHANNELS).transpose(1, 2),
    "square_minus_transposed": lambda h: h[:, :, :4] - h[:, :, :4].mT,
    "square_plus_transposed": lambda h: h[:, :, :4] + h[:, :, :4].transpose(1, 2),
    "swapped": lambda h: h.movedim(2, 1).reshape(SAMPLES, CHANNELS, PLACES) + h,
    "rot90": lambda h: h[:, :, :4] - torch.rot90(h[:, :, :4], 1, (1, 2)),
    "diagonal": lambda h: torch.diagonal(h, 0, 1, 2),
    "diagonal_offset": lambda h: h.diagonal(1, 1, 2),
    "diag_embed": lambda h: torch.diag_embed(h[:, :, 0]),
    "tril": lambda h: h.tril(),
    "triu": lambda h: h.triu(1),
    "skew": lambda h: h[:, :, :4].tril(-1) - h[:, :, :4].tril(-1).mT,
    "unfold": lambda h: h.unfold(2, 3, 2),
    "unfold_overlapping": lambda h: h.unfold(1, 2, 1),
    "as_strided": lambda h: torch.as_strided(h.contiguous(), (3, 4, 3), (24, 6, 2)),
    "repeat": lambda h: h.repeat(1, 2, 1) - h.repeat_interleave(2, 1),
    "tile": lambda h: h.tile(1, 1, 2),
    "repeat_interleave": lambda h: h.repeat_interleave(2, 2),
    "expand": lambda h: h[:, :1].expand(-1, 3, -1) - h[:, 1:],
    "chunks": lambda h: torch.stack(h.chunk(3, 2)[::-1], 1),
    "split_uneven": lambda h: torch.cat([part.flip(1) for part in h.split([1, 3, 2], 2)], 2),
    "cat_scaled": lambda h: torch.cat([h, 2 * h.flip(2)], 1),
    "stack": lambda h: torch.stack([h, h.roll(1, 1)], 1).sum(1),
    "hstack": lambda h: torch.hstack([h, -h]),
    "narrow": lambda h: h.narrow(2, 1, 3) * h.narrow(2, 2, 3),
    "pixel_shuffle": lambda h: F.pixel_shuffle(h.reshape(SAMPLES, 4, 2, 3), 2),
    "pixel_unshuffle": lambda h: F.pixel_unshuffle(h.reshape(SAMPLES, 1, 4, 6), 2),
    "channel_shuffle": lambda h: F.channel_shuffle(h.reshape(SAMPLES, 4, 2, 3), 2),
    "kron": lambda h: torch.stack([torch.kron(one[:2, :2], one[2:, :2]) for one in h]),
    "block_diag": lambda h: torch.stack([torch.block_diag(one[:2], one[2:]) for one in h]),
    "cartesian": lambda h: h[:, :, :, None] * h[:, :, None, :],
    "outer_channels": lambda h: h[:, :, None] * h[:, None],
    "vander": lambda h: torch.linalg.vander(h[:, 0, :3], N=3),
    "meshgrid": lambda h: torch.stack(
        [sum(torch.meshgrid(one[0], one[1], indexing="ij")[::-1]) for one in h]  # type: ignore[misc]
    ),
    # look-ups
    "gather": lambda h: h.gather(2, _uneven(h, dim=2)),
    "gather_channels": lambda h: h.gather(1, _uneven(h, dim=1)),
    "gather_small": lambda h: h.gather(2, _uneven(h, dim=2)[:2, :3]),
    "gather_alike": lambda h: h.gather(2, PERMUTED.expand(SAMPLES, CHANNELS, PLACES)),
    "take_along": lambda h: torch.take_along_dim(h, h.detach().argsort(2), 2),
    "take": lambda h: torch.take(h, _index(0, 30, 7, 70)),
    "index_select": lambda h: h.index_select(1, _index(3, 3, 0)),
    "index_add": lambda h: torch.zeros_like(h).index_add(2, REPEATED.remainder(PLACES), h, alpha=2),
    "index_copy": lambda h: torch.zeros_like(h).index_copy(1, CHANNEL, h),
    "index_reduce_prod": lambda h: torch.ones_like(h).index_reduce(2, REPEATED.remainder(PLACES), h, "prod"),
    "index_reduce_amax": lambda h: torch.zeros_like(h).index_reduce(2, REPEATED.remainder(PLACES), h, "amax"),
    "index_reduce_mean": lambda h: torch.zeros_like(h).index_reduce(2, REPEATED.remainder(PLACES), h, "mean"),
    "index_fill": lambda h: h.index_fill(2, _index(1), 0.0),
    "index_put": lambda h: torch.zeros_like(h).index_put((_index(0, 1, 2), _index(0, 1, 1)), h[:, 0]),
    "index_put_add": lambda h: torch.zeros_like(h).index_put((_index(0, 0, 2),), h, accumulate=True),
    "scatter": lambda h: torch.zeros_like(h).scatter(2, PERMUTED.expand(SAMPLES, CHANNELS, PLACES), h),
    "scatter_uneven": lambda h: torch.zeros_like(h).scatter(1, _uneven(h, dim=1), h),
    "scatter_add": lambda h: torch.zeros_like(h).scatter_add(1, _uneven(h, dim=1), h),
    "scatter_add_alike": lambda h: torch.zeros_like(h).scatter_add(1, CHANNEL[:, None].expand(SAMPLES, 4, PLACES), h),
    "scatter_small": lambda h: torch.zeros_like(h).scatter_add(2, _uneven(h, dim=2)[:, :2], h),
    "scatter_multiply": lambda h: torch.ones_like(h).scatter(2, _uneven(h, dim=2), h, reduce="multiply"),
    "masked_fill": lambda h: h.masked_fill(torch.ones(PLACES, PLACES).tril()[:CHANNELS] == 0, 0.0),
    "masked_fill_one": lambda h: h.masked_fill(torch.ones(PLACES, PLACES).tril()[:CHANNELS] == 0, 1.0),
    "masked_scatter": lambda h: torch.zeros_like(h).masked_scatter(torch.eye(4, 6).bool().expand_as(h), h),
    "masked_select": lambda h: h.masked_select(torch.eye(4, 6).bool()).reshape(SAMPLES, 4),
    "slice_scatter": lambda h: h.slice_scatter(h[:, :, :2], 2, 2, 4),
    "select_scatter": lambda h: h.select_scatter(h[:, :, 0], 2, 3),
    "diagonal_scatter": lambda h: h.diagonal_scatter(h[:, :, 0], 0, 1, 2),
    **{
        f"scatter_{reduce}{'_self' if own else ''}": lambda h, reduce=reduce, own=own: _scattered(h, reduce, own)  # type: ignore[misc]
        for reduce in ("sum", "mean", "amax", "amin", "prod")
        for own in (False, True)
    },
    "segment_max": lambda h: torch.segment_reduce(h.reshape(-1, PLACES), "max", lengths=_index(5, 3, 4)),
    "segment_mean": lambda h: torch.segment_reduce(h.reshape(-1, PLACES), "mean", lengths=_index(5, 3, 4)),
    # order
    "sort": lambda h: h.sort(2).values,
    "sort_descending": lambda h: h.sort(1, descending=True).values - h,
    "sort_stable": lambda h: torch.sort(h, stable=True, dim=1).values,
    "msort": lambda h: torch.msort(h),
    "topk": lambda h: h.topk(3, 2).values,
    "topk_channels": lambda h: h.topk(2, 1, largest=False).values,
    "kthvalue": lambda h: h.kthvalue(2, 1).values,
    "median": lambda h: h.median(2).values,
    "quantile": lambda h: h.quantile(0.3, 2),
    "mode": lambda h: h.mode(2).values,
    "max_all": lambda h: h / h.max(),
    "max_along": lambda h: h.max(1).values,
    "amax_keep": lambda h: h - h.amax(2, keepdim=True),
    "amin_two": lambda h: h - h.amin((1, 2), keepdim=True),
    "aminmax": lambda h: torch.stack(tuple(h.aminmax(dim=2)), 2),
    "maximum": lambda h: torch.maximum(h, h.flip(2)),
    "minimum_zero": lambda h: torch.minimum(h, torch.zeros_like(h)),
    "clamp_tensor": lambda h: torch.clamp(h, max=h.flip(1)),
    "clamp_between": lambda h: h.clamp(-0.5, 0.5),
    "clamp_zero": lambda h: h.clamp(min=0),
    "cummax": lambda h: h.cummax(2).values,
    "cummin": lambda h: h.cummin(1).values,
    "where": lambda h: torch.where(h > 0, h, 0.1 * h),
    "where_threshold": lambda h: torch.where(h > 0.5, h, torch.zeros_like(h)),
    "where_other": lambda h: torch.where(h > h.flip(2), h, 2 * h),
    "heaviside": lambda h: h * torch.heaviside(h, torch.zeros(1, dtype=h.dtype)),
    "bucketize": lambda h: h * torch.bucketize(h.detach(), torch.tensor([-0.5, 0.5], dtype=h.dtype)),
    "argmax": lambda h: h * (torch.arange(PLACES) == h.argmax(2, keepdim=True)),
    "one_hot": lambda h: F.one_hot(h.argmax(2), PLACES).to(h) * h,
    "gumbel": lambda h: F.gumbel_softmax(h, hard=True, dim=2) * h,
    "straight_through": lambda h: h + (h.sign() - h).detach(),
    "rounded": lambda h: h + (h.round() - h).detach(),
    "sign_times": lambda h: h.sign() * h,
    # sums and products
    "cumsum": lambda h: h.cumsum(2),
    "cumsum_channels": lambda h: h.cumsum(1) - h,
    "cumprod": lambda h: h.cumprod(2),
    "logcumsumexp": lambda h: h.logcumsumexp(2),
    "prod": lambda h: h.prod(2),
    "prod_keep": lambda h: h / h.prod(1, keepdim=True),
    "nansum": lambda h: h.nansum(2),
    "logsumexp": lambda h: h.logsumexp(2),
    "minus_logsumexp": lambda h: h - h.logsumexp(2, keepdim=True),
    "minus_mean": lambda h: h - h.mean(2, keepdim=True),
    "minus_mean_channels": lambda h: h - h.mean(1, keepdim=True),
    "minus_mean_mismatch": lambda h: h[:, :, :4] - h[:, :, :4].mean(1).unsqueeze(2),
    "var": lambda h: h.var(2),
    "var_biased": lambda h: h.var(1, unbiased=False, keepdim=True) * h,
    "std_mean": lambda h: torch.cat(torch.std_mean(h, 2), 1),
    "norm_one": lambda h: h.norm(1, 2),
    "norm_inf": lambda h: h / h.norm(float("inf"), 2, keepdim=True),
    "norm_zero": lambda h: h * torch.linalg.vector_norm(h, 0, 2, keepdim=True),
    "norm_frobenius": lambda h: h / torch.linalg.matrix_norm(h, keepdim=True),
    "norm_nuclear": lambda h: h / torch.linalg.matrix_norm(h, "nuc", keepdim=True),
    "normalise": lambda h: F.normalize(h, dim=1, eps=0.0),
    "normalise_p": lambda h: F.normalize(h, p=3, dim=2, eps=0.0),
    "renorm": lambda h: h.renorm(2, 1, 0.5),
    "cross": lambda h: torch.cross(h[:, :3], h[:, 1:], 1),
    "dot_pairs": lambda h: torch.einsum("ncl,nml->ncm", h, h),
    "einsum_repeated": lambda h: torch.einsum("ncc->nc", h[:, :, :4]),
    "einsum_trace": lambda h: torch.einsum("ncc->n", h[:, :, :4])[:, None],
    "einsum_three": lambda h: torch.einsum("nci,ncj,ndi->nj", h, h, h),
    "einsum_outer": lambda h: torch.einsum("nci,ndj->ncdij", h[:, :2, :2], h[:, 2:, 2:4]),
    "tensordot": lambda h: torch.tensordot(h, h[0], ([2], [1])),
    "baddbmm": lambda h: torch.baddbmm(h[:, :, :4], h, h.mT, beta=0.5, alpha=2),
    "addcmul": lambda h: torch.addcmul(h, h.flip(2), h.flip(1), value=0.5),
    "addcdiv": lambda h: torch.addcdiv(h, h.flip(2), h.abs() + 1),
    "lerp": lambda h: torch.lerp(h, h.flip(2), 0.3),
    "lerp_tensor": lambda h: torch.lerp(h, h.flip(2), torch.rand(PLACES, dtype=h.dtype)),
    "trapezoid": lambda h: torch.trapezoid(h, dim=2),
    "cdist": lambda h: torch.cdist(h, h.flip(1)),
    "cdist_one": lambda h: torch.cdist(h, h.flip(1), p=1),
    "pairwise": lambda h: F.pairwise_distance(h[:, :2], h[:, 2:], eps=0.0),
    "cosine": lambda h: F.cosine_similarity(h[:, :2], h[:, 2:], dim=2),
    "cov": lambda h: torch.stack([one.cov() for one in h]),
    "corrcoef": lambda h: torch.stack([one.corrcoef() for one in h]),
    "inverse": lambda h: torch.linalg.inv(h[:, :, :4] + 3 * torch.eye(4)),
    "solve": lambda h: torch.linalg.solve(h[:, :, :4], h[:, :, 4:]),
    "det": lambda h: torch.linalg.det(h[:, :, :4])[:, None],
    "slogdet": lambda h: torch.linalg.slogdet(h[:, :, :4])[1][:, None],
    "qr": lambda h: torch.linalg.qr(h.mT)[0],
    "cholesky": lambda h: torch.linalg.cholesky(h @ h.mT + torch.eye(4)),
    "svdvals": lambda h: torch.linalg.svdvals(h),
    "matrix_exp": lambda h: torch.matrix_exp(h[:, :, :4] - h[:, :, :4].mT),
    "matrix_power": lambda h: torch.matrix_power(h[:, :, :4], 3),
    "pinv": lambda h: torch.linalg.pinv(h),
    # functions of entries
    "relu_squared": lambda h: h.relu().square(),
    "leaky": lambda h: F.leaky_relu(h, 0.3),
    "leaky_negative": lambda h: F.leaky_relu(h, -0.5),
    "abs_power": lambda h: h.abs().pow(1.5),
    "power_three": lambda h: h**3,
    "power_zero": lambda h: h**0 + h,
    "power_tensor": lambda h: h.abs() ** torch.tensor([1.0, 2.0, 3.0, 1.0, 2.0, 0.5]),
    "base_power": lambda h: 2.0**h,
    "reciprocal": lambda h: h.reciprocal(),
    "rsqrt": lambda h: h.abs().rsqrt(),
    "hardshrink": lambda h: F.hardshrink(h, 0.2),
    "softsign": lambda h: F.softsign(h),
    "threshold": lambda h: F.threshold(h, 0.0, 0.0),
    "threshold_value": lambda h: F.threshold(h, 0.0, 0.3),
    "threshold_moved": lambda h: F.threshold(h, 0.3, 0.0),
    "relu6": lambda h: F.relu6(h),
    "elu": lambda h: F.elu(h, alpha=0.0),
    "celu": lambda h: F.celu(h),
    "crelu": lambda h: torch.cat([h.relu(), (-h).relu()], 1),
    "maxout": lambda h: h.reshape(SAMPLES, 2, 2, PLACES).amax(2),
    "glu": lambda h: F.glu(h, 1),
    "glu_last": lambda h: F.glu(h, 2),
    "reglu": lambda h: h[:, :2] * h[:, 2:].relu(),
    "rrelu_eval": lambda h: F.rrelu(h, training=False),
    "remainder": lambda h: h.remainder(1.0),
    "fmod": lambda h: torch.fmod(h, h.flip(2)),
    "floor_divide": lambda h: h - torch.floor_divide(h, 2.0),
    "div_floor": lambda h: h + torch.div(h, 0.5, rounding_mode="floor").detach(),
    "div_self": lambda h: h / h.flip(2),
    "atan2": lambda h: torch.atan2(h, h.flip(2)),
    "hypot": lambda h: torch.hypot(h, h.flip(2)),
    "copysign": lambda h: torch.copysign(h, h.flip(2)),
    "xlogy": lambda h: torch.xlogy(h, h.abs()),
    "ldexp": lambda h: torch.ldexp(h, _index(1)),
    "nan_to_num": lambda h: torch.nan_to_num(h),
    "softmax": lambda h: h.softmax(2),
    "softmax_channels": lambda h: h.softmax(1) - h.softmax(2),
    "softmin": lambda h: F.softmin(h, 2),
    "log_softmax": lambda h: h.log_softmax(1),
    "softmax_diff": lambda h: (h[:, :, 1:] - h[:, :, :-1]).softmax(2),
    "attention": lambda h: F.scaled_dot_product_attention(h, h, h),
    "attention_causal": lambda h: F.scaled_dot_product_attention(h, h.flip(1), h, is_causal=True),
    "attention_relu": lambda h: (h @ h.mT).relu() @ h,
    "linear_attention": lambda h: (F.elu(h) + 1) @ ((F.elu(h) + 1).mT @ h),
    "layer_norm": lambda h: F.layer_norm(h, (PLACES,)),
    "layer_norm_both": lambda h: F.layer_norm(h, (CHANNELS, PLACES), eps=0.0),
    "rms_norm": lambda h: F.rms_norm(h, (PLACES,), eps=0.0),
    "group_norm": lambda h: F.group_norm(h, 2, eps=0.0),
    "instance_norm": lambda h: F.instance_norm(h, eps=0.0),
    "batch_norm": lambda h: F.batch_norm(h, None, None, training=True, eps=1e-30),
    "batch_norm_eval": lambda h: F.batch_norm(h, torch.ones(4, dtype=h.dtype), torch.full((4,), 2.0, dtype=h.dtype)),
    "local_response": lambda h: F.local_response_norm(h, 2),
    # complex numbers
    "complex_unit": lambda h: _real(_complex(h) / _complex(h).abs()),
    "complex_sgn": lambda h: _real(_complex(h).sgn()),
    "complex_normalise": lambda h: _real(_complex(h) / torch.linalg.vector_norm(_complex(h), dim=2, keepdim=True)),
    "complex_abs": lambda h: _complex(h).abs(),
    "complex_angle": lambda h: _complex(h).angle(),
    "complex_square": lambda h: _real(_complex(h) ** 2),
    "complex_product": lambda h: _real(_complex(h) * _complex(h).flip(2)),
    "complex_conjugate": lambda h: _real(_complex(h) * _complex(h).flip(2).conj()),
    "complex_inner": lambda h: _real(_complex(h) @ _complex(h).mH),
    "complex_real": lambda h: (_complex(h) * torch.polar(torch.ones(3), torch.arange(3.0))).real,
    "complex_imag": lambda h: (_complex(h) * torch.polar(torch.ones(3), torch.arange(3.0))).imag,
    "complex_parts": lambda h: torch.complex(h[:, :2], h[:, 2:]).abs(),
    "complex_rotary": lambda h: _real(_complex(h) * torch.polar(torch.ones(4, 3), torch.arange(12.0).reshape(4, 3))),
    "complex_exp": lambda h: _real(_complex(h).exp()),
    "complex_polar": lambda h: torch.view_as_real(torch.polar(h.abs(), h)).flatten(2),
    "complex_relu": lambda h: (_complex(h).abs() - 0.1).relu() * _complex(h).sgn().real,
    "complex_phase": lambda h: (_complex(h) * _complex(h).flip(2).conj()).angle(),
    "fft": lambda h: _real(torch.fft.fft(h, dim=2)),
    "rfft_filter": lambda h: torch.fft.irfft(torch.fft.rfft(h) * torch.tensor([1.0, 2.0, 0.5, 0.0]), n=PLACES),
    "fft_power": lambda h: torch.fft.rfft(h).abs().square(),
    "fft_channels": lambda h: torch.fft.fft2(h).real,
    "fft_orthonormal": lambda h: torch.fft.hfft(_complex(h), n=PLACES, norm="ortho"),
    "fft_phase": lambda h: torch.fft.irfft(torch.fft.rfft(h).sgn(), n=PLACES),
    "fftshift": lambda h: h - torch.fft.fftshift(h, dim=2),
    # images
    "pad_zero": lambda h: F.pad(h, (1, 2)),
    "pad_one": lambda h: F.pad(h, (1, 0), value=1.0),
    "pad_negative": lambda h: F.pad(h, (-1, 1)),
    "pad_reflect": lambda h: F.pad(h, (2, 1), mode="reflect"),
    "pad_replicate": lambda h: F.pad(h, (1, 1), mode="replicate") - F.pad(h, (1, 1)),
    "pad_circular": lambda h: F.pad(h, (2, 1), mode="circular"),
    "avg_pool": lambda h: F.avg_pool1d(h, 3, 2, 1),
    "avg_pool_excluded": lambda h: F.avg_pool1d(h, 3, 2, 1, count_include_pad=False),
    "avg_pool_2d": lambda h: F.avg_pool2d(_image(h), 2, 1, 1, divisor_override=3),
    "max_pool": lambda h: F.max_pool1d(h, 3, 1, 1),
    "max_pool_2d": lambda h: F.max_pool2d(_image(h), 2, 1, 1, dilation=1, ceil_mode=True),
    "lp_pool": lambda h: F.lp_pool1d(h, 2.0, 3),
    "adaptive_avg": lambda h: F.adaptive_avg_pool1d(h, 4),
    "adaptive_max": lambda h: F.adaptive_max_pool1d(h, 4),
    "max_unpool": lambda h: F.max_unpool1d(*F.max_pool1d(h, 2, return_indices=True), (2,)),
    "fractional": lambda h: F.fractional_max_pool2d(
        _image(h), 2, output_size=2, _random_samples=torch.full((SAMPLES, 2, 2), 0.3)
    ),
    "interpolate": lambda h: F.interpolate(h, size=9, mode="linear"),
    "interpolate_corners": lambda h: F.interpolate(h, size=9, mode="linear", align_corners=True),
    "interpolate_nearest": lambda h: F.interpolate(h, scale_factor=2) - F.interpolate(h, size=12, mode="linear"),
    "interpolate_bicubic": lambda h: F.interpolate(_image(h), size=(5, 5), mode="bicubic"),
    "grid_sample": lambda h: _grid(h, "bilinear", "zeros"),
    "grid_sample_border": lambda h: _grid(h, "bilinear", "border"),
    "grid_sample_nearest": lambda h: _grid(h, "nearest", "reflection"),
    "im2col": lambda h: F.unfold(_image(h), 2, padding=1),
    "col2im": lambda h: F.fold(h, (3, 4), 2, padding=0),
    "fold_unfold": lambda h: F.fold(F.unfold(_image(h), 2, padding=1), (4, 3), 2, padding=1),
    # writes, aliases, control flow
    "written_slice": lambda h: _in_place(h, _write_slice),
    "written_rows": lambda h: _in_place(h, _write_rows),
    "written_index": lambda h: _in_place(h, _write_index),
    "written_sum": lambda h: _in_place(h, _write_add),
    "written_out": _out,
    "out_argument": lambda h: torch.add(h, h.flip(2)) if h.requires_grad else torch.add(h, h, out=torch.empty_like(h)),
    "recursion": _recursion,
    "gated_recursion": _gated_recursion,
    "detached": lambda h: h * h.detach(),
    "detached_norm": lambda h: h / h.detach().norm(dim=2, keepdim=True),
    "no_gradient": lambda h: h - h.mean(2, keepdim=True).detach(),
    "dropout": lambda h: F.dropout(h, 0.3),
    "dropout_channels": lambda h: F.dropout1d(h, 0.5),
    "dropout_alpha": lambda h: F.alpha_dropout(h, 0.3, training=True),
    "noise": lambda h: h + torch.randn_like(h),
    "noise_times": lambda h: h * torch.randn_like(h),
}

_FEATURES = 4


def _frame_full(middle: Middle, x: Tensor, p: Any) -> Tensor:
    """Every entry of what goes in has its own charge, and every entry of what comes out a reader of its own."""
    y = middle(torch.einsum("nd,dcl->ncl", x[:, 0], p.a))
    return y.reshape(y.shape[0], -1) @ p.b


def _frame_last(middle: Middle, x: Tensor, p: Any) -> Tensor:
    """Charges along the places only; the reader is shared by all channels."""
    y = middle(x @ p.a)
    return y @ p.b


def _frame_biased(middle: Middle, x: Tensor, p: Any) -> Tensor:
    """Shifts of every channel and place, seen through a centring norm."""
    y = middle(torch.einsum("nid,dl->nil", x, p.a) + p.c + p.d[:, None])
    y = y.reshape(y.shape[0], -1)
    return (y - y.mean(1, keepdim=True)) @ p.b


def _frame_channels(middle: Middle, x: Tensor, p: Any) -> Tensor:
    """Charges along the channels, with a bias, and a reader that adds up places."""
    y = middle(torch.einsum("nid,ci->ncd", x.repeat(1, 1, 2)[:, :, :PLACES], p.a) + p.d[:, None])
    y = y.reshape(y.shape[0], y.shape[1], -1) if y.ndim > 2 else y[:, :, None]
    return torch.einsum("ncl,ck->nkl", y, p.b)


def _probe(middle: Middle) -> Tensor:
    torch.manual_seed(3)
    with torch.no_grad():
        return middle(torch.randn(SAMPLES, CHANNELS, PLACES))


def _framed(name: str, middle: Middle) -> Iterator[Adversary]:
    y = _probe(middle)
    flat, last, channels = y[0].numel() if y.ndim > 1 else 1, y.shape[-1], y.shape[1] if y.ndim > 1 else 1
    x = torch.randn(SAMPLES, CHANNELS, WIDTH)
    frames: list[tuple[str, Any, dict[str, Tensor]]] = [
        ("full", _frame_full, {"a": torch.randn(WIDTH, CHANNELS, PLACES), "b": torch.randn(flat, 2)}),
        ("last", _frame_last, {"a": torch.randn(WIDTH, PLACES), "b": torch.randn(last, 2)}),
        (
            "biased",
            _frame_biased,
            {
                "a": torch.randn(WIDTH, PLACES),
                "b": torch.randn(flat, 2),
                "c": torch.randn(PLACES),
                "d": torch.randn(CHANNELS),
            },
        ),
        (
            "channels",
            _frame_channels,
            {"a": torch.randn(CHANNELS, CHANNELS), "b": torch.randn(channels, 2), "d": torch.randn(CHANNELS)},
        ),
    ]
    if y.ndim < 2 or y.is_complex():
        frames = []
    for title, frame, parameters in frames:

        def function(module: Any, given: Tensor, frame: Any = frame) -> Any:
            return frame(middle, given, module)

        yield Adversary(f"{name}/{title}", Function(function, **parameters), (x,))


def models(seed: int = 0) -> Iterator[Adversary]:
    """All of them, with parameters and inputs drawn from a seed."""
    for name, middle in MIDDLES.items():
        torch.manual_seed(seed)
        yield from _framed(name, middle)
    torch.manual_seed(seed)
    for name, (model, args) in layers():
        yield Adversary(name, model, args)
