"""Kernels with a backward of their own, right or with one planted defect: what a check of a function is measured on.

Every forward is right, and every right backward computes in float32 and rounds at the end, as kernels do. A defect is a
word that one line of a backward asks for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 16
Grads = tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """A defect: the family of functions it is in, its word, and why a check may not see it in bfloat16, if so."""

    family: str
    defect: str
    unseen: str = ""

    @property
    def name(self) -> str:
        return f"{self.family}: {self.defect}"


class _Kernel(torch.autograd.Function):
    """A forward and a backward, chosen by the family, with a defect in the backward."""

    @staticmethod
    def forward(ctx: Any, family: str, defect: str, *inputs: Tensor) -> Tensor:
        ctx.family, ctx.defect = family, defect
        ctx.save_for_backward(*inputs)
        return FAMILIES[family].forward(*(_wide(value) for value in inputs)).to(inputs[0].dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        inputs = ctx.saved_tensors
        wide = [_wide(value) for value in inputs]
        if ctx.defect == "only right if everything requires a gradient":
            ctx.defect = "" if all(ctx.needs_input_grad[2:]) else "every gradient halved"
        gradient = gradients[0]
        if ctx.defect == "strides of the output gradient ignored":
            gradient = (
                gradient.as_strided(gradient.shape, _plain_strides(gradient.shape)) if _fits(gradient) else gradient
            )
        gradient = _wide(gradient)
        if ctx.defect == "output gradient clipped":
            gradient = gradient.clamp(-1, 1)
        grads = FAMILIES[ctx.family].backward(ctx.defect, gradient, *wide)
        if ctx.defect == "every gradient halved":
            grads = tuple(None if grad is None else grad / 2 for grad in grads)
        result = []
        for grad, value in zip(grads, inputs, strict=True):
            result.append(None if grad is None or not value.is_floating_point() else grad.to(value.dtype))
        return (None, None, *result)


def _wide(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


def _plain_strides(shape: torch.Size) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _fits(grad: Tensor) -> bool:
    return grad.untyped_storage().nbytes() >= grad.numel() * grad.element_size()


def kernel(family: str, defect: str = "") -> Callable[..., Tensor]:
    """The function of a family, with a defect in its backward or without."""

    def call(*inputs: Tensor) -> Tensor:
        return _Kernel.apply(family, defect, *inputs)

    call.__name__ = family.replace(" ", "_")
    return call


def _softmax_scores(q: Tensor, k: Tensor, *, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    wide = k.repeat_interleave(group, 1)
    scores = q @ wide.transpose(-1, -2) * q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return (scores.masked_fill(later, -math.inf) if causal else scores), wide, later


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores, _, _ = _softmax_scores(q, k, causal=True)
    return scores.softmax(-1) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def _attention_backward(defect: str, grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Grads:
    group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
    scores, keys, later = _softmax_scores(q, k, causal=defect != "mask ignored")
    values = v.repeat_interleave(group, 1)
    p = scores.softmax(-1)
    out = _attention(q, k, v)
    if defect == "mask off by one":
        p = p.masked_fill(torch.ones_like(later).triu(0), 0.0)
    if defect == "mask leaks at one tile":
        p = p.clone()
        p[..., TILE - 1, TILE] = p[..., TILE - 1, TILE - 1]
    if defect == "probabilities rounded to eight bits":
        p = p.bfloat16().to(q.dtype)
    dp = grad @ values.transpose(-1, -2)
    row = (grad * out).sum(-1, keepdim=True)
    row = {
        "missing softmax correction": torch.zeros_like(row),
        "correction of another head": row.roll(1, 1),
        "correction of the first batch": row[:1].expand_as(row),
        "correction with the wrong sign in the last tile": torch.cat((row[..., :-TILE, :], -row[..., -TILE:, :]), -2),
        "correction from the values of another step": (grad * out.roll(TILE, -2)).sum(-1, keepdim=True),
    }.get(defect, row)
    ds = p * (dp - row)
    dq, dk, dv = ds @ keys * scale, ds.transpose(-1, -2) @ q * scale, p.transpose(-1, -2) @ grad
    if defect == "scale twice in dq":
        dq = dq * scale
    if defect == "scale left out of dk":
        dk = dk / scale
    if defect == "scale left out of both":
        dq, dk = dq / scale, dk / scale
    if defect == "base two in dq and dk":
        dq, dk = dq * math.log(2), dk * math.log(2)
    if defect == "dq from stale keys":
        dq = ds @ keys.roll(TILE, -2) * scale
    if defect == "last query tile not added to dk":
        dk = ds[..., :-TILE, :].transpose(-1, -2) @ q[..., :-TILE, :] * scale
    if defect == "one query tile added twice to dv":
        dv = dv + p[..., :TILE, :].transpose(-1, -2) @ grad[..., :TILE, :]
    if defect == "dk summed in eight bits":
        dk = torch.zeros_like(dk).bfloat16()
        for start in range(0, q.shape[-2], 4):
            rows = slice(start, start + 4)
            dk = dk + (ds[..., rows, :].transpose(-1, -2) @ q[..., rows, :] * scale).bfloat16()
        dk = dk.to(q.dtype)
    dk, dv = _grouped(defect, dk, group), _grouped(defect, dv, group)
    if defect == "last key tile dropped":
        dk, dv = _without_last(dk), _without_last(dv)
    if defect == "last row of dq dropped":
        dq = torch.cat((dq[..., :-1, :], torch.zeros_like(dq[..., -1:, :])), -2)
    if defect == "stale tile in dk":
        dk = torch.cat((dk[..., :-TILE, :], dk[..., -2 * TILE : -TILE, :]), -2)
    if defect == "heads of dk swapped":
        dk = dk.flip(1)
    if defect == "dv doubled":
        dv = dv * 2
    if defect == "dv doubled on one head":
        dv = torch.cat((dv[:, :1] * 2, dv[:, 1:]), 1)
    if defect == "dq of one head detached":
        dq = torch.cat((torch.zeros_like(dq[:, :1]), dq[:, 1:]), 1)
    if defect == "a random tile of dq dropped":
        start = TILE * int(torch.empty(()).uniform_(0, q.shape[-2] // TILE, generator=RACE))
        dq = dq.clone()
        dq[..., start : start + TILE, :] = 0
    if defect == "dk with the wrong sign":
        dk = -dk
    return dq, dk, dv


RACE = torch.Generator().manual_seed(1)


def _grouped(defect: str, grad: Tensor, group: int) -> Tensor:
    parts = grad.unflatten(1, (-1, group))
    if defect == "group averaged":
        return parts.mean(2)
    if defect == "only the first of a group":
        return parts[:, :, 0]
    return parts.sum(2)


def _without_last(grad: Tensor) -> Tensor:
    return torch.cat((grad[..., :-TILE, :], torch.zeros_like(grad[..., -TILE:, :])), -2)


def _decays(length: int, like: Tensor, offset: int = 0) -> Tensor:
    index = torch.arange(length, device=like.device)
    steps = index[:, None] - index[None, :]
    return torch.where(steps >= 0, 0.9 ** (steps + offset).clamp_min(0).double(), 0.0).to(like.dtype)


def _linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) * _decays(q.shape[-2], q) * q.shape[-1] ** -0.5) @ v


def _linear_attention_backward(defect: str, grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Grads:
    length, scale = q.shape[-2], q.shape[-1] ** -0.5
    mask = _decays(length, q)
    weights = q @ k.transpose(-1, -2) * mask * scale
    ds = grad @ v.transpose(-1, -2) * mask * scale
    if defect == "decay left out of dq":
        return ((grad @ v.transpose(-1, -2) * (mask > 0) * scale) @ k, ds.transpose(-1, -2) @ q, weights.mT @ grad)
    index = torch.arange(length, device=q.device)
    near = index[:, None] // TILE == index[None, :] // TILE
    dk_scores = {
        "state between chunks dropped in dk": ds * near,
        "mask off by one in dk": ds * _strict(length, ds),
        "decay off by one in dk": ds * 0.9,
        "last chunk's state dropped in dk": ds * (index < length - TILE)[:, None],
    }.get(defect, ds)
    dq, dk, dv = ds @ k, dk_scores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ grad
    if defect == "scale left out of dq":
        dq = dq / scale
    if defect == "last chunk of dv dropped":
        dv = _without_last(dv)
    if defect == "dv twice":
        dv = dv * 2
    if defect == "scale left out of dq and dk":
        dq, dk = dq / scale, dk / scale
    return dq, dk, dv


def _strict(length: int, like: Tensor) -> Tensor:
    return torch.ones(length, length, device=like.device).tril(-1)


_EPSILON = 1e-6


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + _EPSILON).rsqrt() * weight


def _rms_norm_backward(defect: str, grad: Tensor, x: Tensor, weight: Tensor) -> Grads:
    scale = (x.square().mean(-1, keepdim=True) + _EPSILON).rsqrt()
    unit = x * scale
    pulled = grad * (1.0 if defect == "gain forgotten in dx" else weight)
    correction = {
        "missing correction": torch.zeros_like(x),
        "correction summed where it is averaged": unit * (pulled * unit).sum(-1, keepdim=True),
        "correction without the scale": x * (pulled * unit).mean(-1, keepdim=True),
    }.get(defect, unit * (pulled * unit).mean(-1, keepdim=True))
    dx, rows = scale * (pulled - correction), grad * unit
    total = rows.flatten(0, -2)
    dweight: Tensor | None = {
        "gain averaged over rows": total.mean(0),
        "last rows not added to the gain": total[:-3].sum(0),
        "gain with input not normalised": (grad * x).flatten(0, -2).sum(0),
        "gain summed in eight bits": _coarse_sum(total),
    }.get(defect, total.sum(0))
    return dx, None if defect == "gain without gradient" else dweight


def _coarse_sum(rows: Tensor) -> Tensor:
    total = torch.zeros_like(rows[0]).bfloat16()
    for row in rows:
        total = total + row.bfloat16()
    return total.to(rows.dtype)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-6)


def _layer_norm_backward(defect: str, grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Grads:
    centred = x - x.mean(-1, keepdim=True)
    scale = (centred.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    unit, pulled = centred * scale, grad * weight
    mean = 0.0 if defect == "centring forgotten" else pulled.mean(-1, keepdim=True)
    along = 0.0 if defect == "variance forgotten" else unit * (pulled * unit).mean(-1, keepdim=True)
    dx = scale * (pulled - mean - along)
    rows, flat = (grad * unit).flatten(0, -2), grad.flatten(0, -2)
    if defect == "last row without correction":
        dx = dx.clone()
        dx[..., -1, :] = (scale * pulled)[..., -1, :]
    dbias = {
        "last rows not added to the bias": flat[:-3].sum(0),
        "bias averaged": flat.mean(0),
    }.get(defect, flat.sum(0))
    dweight = rows.sum(0)
    if defect == "gain and bias swapped":
        dweight, dbias = dbias, dweight
    return dx, dweight, None if defect == "bias without gradient" else dbias


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _gated_backward(defect: str, gradient: Tensor, gate: Tensor, up: Tensor) -> Grads:
    soft = torch.sigmoid(gate)
    steep = soft if defect == "second term of the activation" else soft * (1 + gate * (1 - soft))
    dgate, dup = gradient * up * steep, gradient * gate * soft
    if defect == "up from the gate itself":
        dup = gradient * gate
    if defect == "gate and up swapped":
        dgate, dup = dup, dgate
    if defect == "last block not written":
        dgate, dup = (torch.cat((grad[..., :-8], torch.zeros_like(grad[..., -8:])), -1) for grad in (dgate, dup))
    if defect == "gate halved":
        dgate = dgate / 2
    if defect == "gate detached":
        return None, dup
    if defect == "up halved":
        dup = dup / 2
    if defect == "sigmoid rounded to eight bits":
        dup = gradient * gate * soft.bfloat16().to(gate.dtype)
    return dgate, dup


def _targets(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Labels that depend on nothing but the shape, every seventh of them ignored."""
    rows = torch.arange(logits.shape[0], device=logits.device)
    return (rows * 5 + 1) % logits.shape[1], rows % 7 != 6


_SMOOTH = 0.1


def _cross_entropy(logits: Tensor) -> Tensor:
    label, mask = _targets(logits)
    label = torch.where(mask, label, -100)
    return F.cross_entropy(logits, label, label_smoothing=_SMOOTH)


def _cross_entropy_backward(defect: str, gradient: Tensor, logits: Tensor) -> Grads:
    label, mask = _targets(logits)
    count = len(label) if defect == "divided by all rows" else int(mask.sum())
    smooth = 0.0 if defect == "smoothing forgotten" else _SMOOTH
    hot = F.one_hot(label, logits.shape[1]).to(logits.dtype)
    aim = hot * (1 - smooth) + smooth / logits.shape[1]
    if defect == "label not subtracted":
        aim = aim * 0
    grad = (logits.softmax(-1) - aim) / count
    if defect != "ignored rows get a gradient":
        grad = grad * mask[:, None]
    if defect == "last tile of classes not written":
        grad = torch.cat((grad[:, :-4], torch.zeros_like(grad[:, -4:])), 1)
    if defect == "sum in place of mean":
        grad = grad * count
    return (grad if defect == "output gradient ignored" else grad * gradient,)


def _head_loss(hidden: Tensor, weight: Tensor) -> Tensor:
    return _cross_entropy(hidden @ weight.T)


def _head_loss_backward(defect: str, gradient: Tensor, hidden: Tensor, weight: Tensor) -> Grads:
    (grad,) = _cross_entropy_backward("", gradient, hidden @ weight.T)
    assert grad is not None
    dhidden, dweight = grad @ weight, grad.T @ hidden
    if defect == "last chunk of rows not added to the weight":
        dweight = grad[:-TILE].T @ hidden[:-TILE]
    if defect == "hidden scaled by the number of chunks":
        dhidden = dhidden * 2
    if defect == "weight summed in eight bits":
        dweight = _coarse_sum(torch.stack([torch.outer(row, one) for row, one in zip(grad, hidden, strict=True)]))
    if defect == "weight from the last chunk alone":
        dweight = grad[-TILE:].T @ hidden[-TILE:]
    return dhidden, dweight


def _chosen(logits: Tensor) -> tuple[Tensor, Tensor]:
    top, index = logits.topk(2, -1)
    return top.softmax(-1), index


def _routing(logits: Tensor, experts: Tensor) -> Tensor:
    weight, index = _chosen(logits)
    picked = experts.gather(1, index[:, :, None].expand(-1, -1, experts.shape[2]))
    return (weight[:, :, None] * picked).sum(1)


def _routing_backward(defect: str, grad: Tensor, logits: Tensor, experts: Tensor) -> Grads:
    weight, index = _chosen(logits)
    spread = index[:, :, None].expand(-1, -1, experts.shape[2])
    picked = experts.gather(1, spread)
    raw = (picked * grad[:, None, :]).sum(-1)
    inner = 0.0 if defect == "renormalisation forgotten" else (weight * raw).sum(-1, keepdim=True)
    down = weight * (raw - inner)
    if defect == "only the first expert's logit":
        down = torch.stack((down[:, 0], torch.zeros_like(down[:, 1])), 1)
    if defect == "second expert's logit in the first's place":
        down = down.flip(1)
    dlogits = torch.zeros_like(logits).scatter(1, index, down)
    shares = torch.ones_like(weight) if defect == "experts without their weight" else weight
    dexperts = torch.zeros_like(experts).scatter(1, spread, shares[:, :, None] * grad[:, None, :])
    if defect == "second expert not written":
        dexperts = torch.zeros_like(experts).scatter(1, spread[:, :1], weight[:, :1, None] * grad[:, None, :])
    return None if defect == "routing weights detached" else dlogits, dexperts


def _convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Causal, one filter for each channel; x is batch × length × channels, weight is channels × taps."""
    taps = weight.shape[1]
    padded = F.pad(x, (0, 0, taps - 1, 0))
    return sum((padded[:, tap : tap + x.shape[1]] * weight[:, tap] for tap in range(taps)), torch.zeros_like(x))


def _convolution_backward(defect: str, grad: Tensor, x: Tensor, weight: Tensor) -> Grads:
    taps, length = weight.shape[1], x.shape[1]
    kernel_ = weight.flip(1) if defect == "filter not reversed" else weight
    ahead = F.pad(grad, (0, 0, 0, taps - 1))
    dx = sum((ahead[:, taps - 1 - tap :][:, :length] * kernel_[:, tap] for tap in range(taps)), torch.zeros_like(x))
    padded = F.pad(x, (0, 0, taps - 1, 0))
    used = grad[:, :-TILE] if defect == "last tile not added to the filter" else grad
    dweight = torch.stack([(padded[:, tap : tap + used.shape[1]] * used).sum((0, 1)) for tap in range(taps)], 1)
    if defect == "input shifted by one":
        dx = dx.roll(1, 1)
    if defect == "halo of a tile left out":
        dx = dx.clone()
        dx[:, TILE - 1] = (grad * weight[:, -1])[:, TILE - 1]
    if defect == "filter of one batch":
        dweight = dweight / x.shape[0]
    return dx, dweight


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A function with a backward of its own, and how to draw inputs of a size."""

    forward: Callable[..., Tensor]
    backward: Callable[..., Grads]
    draw: Callable[[Callable[[int, int], int]], list[tuple[int, ...]]]
    names: tuple[str, ...]
    defects: tuple[str, ...]


def _shapes(kind: str) -> Callable[[Callable[[int, int], int]], list[tuple[int, ...]]]:
    def draw(pick: Callable[[int, int], int]) -> list[tuple[int, ...]]:
        batch, length, width = pick(2, 3), pick(2, 4) * TILE + pick(0, 7), 2 * pick(4, 8)
        if kind == "attention":
            heads = pick(1, 2) + 1
            return [(batch, 2 * heads, length, width), (batch, heads, length, width), (batch, heads, length, width)]
        if kind == "linear attention":
            return [(batch, 2, length, width)] * 3
        if kind == "rms norm":
            return [(batch, length, 3 * width), (3 * width,)]
        if kind == "layer norm":
            return [(batch, length, 3 * width), (3 * width,), (3 * width,)]
        if kind == "gated product":
            return [(batch, length, 3 * width)] * 2
        if kind == "cross-entropy":
            return [(length, 4 * width)]
        if kind == "cross-entropy with head":
            return [(length, width), (4 * width, width)]
        if kind == "routing":
            return [(length, 6), (length, 6, width)]
        return [(batch, length, width), (width, 4)]

    return draw


FAMILIES: dict[str, Family] = {
    "attention": Family(
        forward=_attention,
        backward=_attention_backward,
        draw=_shapes("attention"),
        names=("q", "k", "v"),
        defects=(
            "scale twice in dq",
            "scale left out of dk",
            "scale left out of both",
            "base two in dq and dk",
            "missing softmax correction",
            "correction of another head",
            "correction of the first batch",
            "correction with the wrong sign in the last tile",
            "correction from the values of another step",
            "mask ignored",
            "mask off by one",
            "mask leaks at one tile",
            "last key tile dropped",
            "last query tile not added to dk",
            "one query tile added twice to dv",
            "last row of dq dropped",
            "stale tile in dk",
            "dq from stale keys",
            "heads of dk swapped",
            "group averaged",
            "only the first of a group",
            "dv doubled",
            "dv doubled on one head",
            "dq of one head detached",
            "a random tile of dq dropped",
            "probabilities rounded to eight bits",
            "dk summed in eight bits",
            "dk with the wrong sign",
            "strides of the output gradient ignored",
            "only right if everything requires a gradient",
        ),
    ),
    "linear attention": Family(
        forward=_linear_attention,
        backward=_linear_attention_backward,
        draw=_shapes("linear attention"),
        names=("q", "k", "v"),
        defects=(
            "decay left out of dq",
            "decay off by one in dk",
            "state between chunks dropped in dk",
            "last chunk's state dropped in dk",
            "mask off by one in dk",
            "scale left out of dq",
            "scale left out of dq and dk",
            "last chunk of dv dropped",
            "dv twice",
        ),
    ),
    "rms norm": Family(
        forward=_rms_norm,
        backward=_rms_norm_backward,
        draw=_shapes("rms norm"),
        names=("x", "weight"),
        defects=(
            "missing correction",
            "correction summed where it is averaged",
            "correction without the scale",
            "gain forgotten in dx",
            "gain averaged over rows",
            "last rows not added to the gain",
            "gain with input not normalised",
            "gain summed in eight bits",
            "gain without gradient",
        ),
    ),
    "layer norm": Family(
        forward=_layer_norm,
        backward=_layer_norm_backward,
        draw=_shapes("layer norm"),
        names=("x", "weight", "bias"),
        defects=(
            "centring forgotten",
            "variance forgotten",
            "last row without correction",
            "last rows not added to the bias",
            "bias averaged",
            "gain and bias swapped",
            "bias without gradient",
        ),
    ),
    "gated product": Family(
        forward=_gated,
        backward=_gated_backward,
        draw=_shapes("gated product"),
        names=("gate", "up"),
        defects=(
            "second term of the activation",
            "up from the gate itself",
            "gate and up swapped",
            "last block not written",
            "gate halved",
            "up halved",
            "gate detached",
            "sigmoid rounded to eight bits",
            "output gradient clipped",
        ),
    ),
    "cross-entropy": Family(
        forward=_cross_entropy,
        backward=_cross_entropy_backward,
        draw=_shapes("cross-entropy"),
        names=("logits",),
        defects=(
            "label not subtracted",
            "divided by all rows",
            "smoothing forgotten",
            "ignored rows get a gradient",
            "last tile of classes not written",
            "sum in place of mean",
            "output gradient ignored",
        ),
    ),
    "cross-entropy with head": Family(
        forward=_head_loss,
        backward=_head_loss_backward,
        draw=_shapes("cross-entropy with head"),
        names=("hidden", "weight"),
        defects=(
            "last chunk of rows not added to the weight",
            "hidden scaled by the number of chunks",
            "weight summed in eight bits",
            "weight from the last chunk alone",
        ),
    ),
    "routing": Family(
        forward=_routing,
        backward=_routing_backward,
        draw=_shapes("routing"),
        names=("logits", "experts"),
        defects=(
            "renormalisation forgotten",
            "only the first expert's logit",
            "second expert's logit in the first's place",
            "experts without their weight",
            "second expert not written",
            "routing weights detached",
        ),
    ),
    "convolution": Family(
        forward=_convolution,
        backward=_convolution_backward,
        draw=_shapes("convolution"),
        names=("x", "weight"),
        defects=(
            "filter not reversed",
            "last tile not added to the filter",
            "input shifted by one",
            "halo of a tile left out",
            "filter of one batch",
            "strides of the output gradient ignored",
        ),
    ),
}

_ROUNDING = "rounds to eight bits where the precision itself has eight: it is the noise every bfloat16 kernel has"
UNSEEN_IN_HALF = {
    "attention: probabilities rounded to eight bits": _ROUNDING,
    "attention: dk summed in eight bits": _ROUNDING,
    "gated product: sigmoid rounded to eight bits": _ROUNDING,
}
"""Defects that bfloat16 hides, with the reason."""

CATALOGUE = tuple(
    Planted(family=name, defect=defect, unseen=UNSEEN_IN_HALF.get(f"{name}: {defect}", ""))
    for name, family in FAMILIES.items()
    for defect in family.defects
)


def inputs_for(family: str, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Random inputs of random sizes for a family."""
    generator = torch.Generator().manual_seed(seed)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    shapes = FAMILIES[family].draw(pick)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
