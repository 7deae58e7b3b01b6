"""A catalogue of broken backward passes: real classes of defects, planted one at a time in small models.

Every forward pass is right; what differs is the backward. `seen` says which checks notice, and `why` why others do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved import Audit, Gauge, LawSet, audit, blocks, gauge, recognize
from conserved_papers.blocks.attention import rotate

SCALES = ("stream_scale", "query_scale", "key_scale")
"""Families of laws that say that a norm forgets the scale of its input."""

Spoil = Callable[[nn.Module], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A defect: where one of its class was reported, if known, how to plant it, and which checks see it.

    `seen` names "identity" (a gradient identity between tensors), "scale" (the scale of a stream or a head that a norm
    forgets), "gauge" and "missing" (a parameter without a gradient). Where none of them sees anything, the pass is
    replayed: "reference" (a gradient differs from the pass in reference form) and "loss" (the derivative of the loss
    along the gradient). `in_half` is what is seen in bfloat16, where that differs.
    """

    name: str
    source: str
    spoil: Spoil
    seen: frozenset[str]
    in_half: frozenset[str] | None = None
    why: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def expected(self, dtype: torch.dtype) -> frozenset[str]:
        return self.seen if dtype != torch.bfloat16 or self.in_half is None else self.in_half


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the checks said of one defect."""

    audit: Audit
    gauge: Gauge

    @property
    def seen(self) -> frozenset[str]:
        rows = (*self.audit.failures, *self.audit.left_open)
        result = {"scale" if row.family in SCALES else "identity" for row in rows}
        result |= {"missing"} if any(item.trouble == "missing" for item in self.audit.findings) else set()
        result |= set() if self.audit.comparison is None or self.audit.comparison.ok else {"reference"}
        result |= set() if self.audit.scale is None or self.audit.scale.ok else {"loss"}
        return frozenset(result | (set() if self.gauge.ok else {"gauge"}))

    def residual(self) -> float:
        """The largest residual of what is broken: of an identity, else of the gauge, the reference or the loss."""
        result = [row.residual for row in (*self.audit.failures, *self.audit.left_open)]
        result += [] if self.gauge.ok else [self.gauge.worst]
        if not result and self.audit.comparison is not None:
            result += [item.difference for item in self.audit.comparison.failures]
        if not result and self.audit.scale is not None and not self.audit.scale.ok:
            result.append(abs(self.audit.scale.factor - 1))
        return max(result, default=0.0)


def small(**options: Any) -> nn.Module:
    """A decoder of two layers with grouped heads, rotary positions, RMS norms and SwiGLU, generic parameters."""
    torch.manual_seed(0)
    model = blocks.DecoderLM(64, 32, 2, 4, 48, **({"kv_heads": 2, "max_length": 24} | options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "embedding" in name:
                parameter.mul_(3.0)
            else:
                parameter.mul_(2.0)
    return model


def run(case: Broken | None, dtype: torch.dtype, options: dict[str, Any] | None = None) -> Outcome:
    """One backward pass of a small decoder in `dtype`, with a defect planted or none."""
    chosen = case.options if case is not None else options or {}
    model = small(**chosen).to(dtype)
    laws = _laws_of(model, repr(sorted(chosen.items())), dtype)
    if case is not None:
        case.spoil(model)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(64, (4, 25), generator=generator)

    def loss() -> Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())

    with gauge(model) as watched:
        loss().backward()
    for change in _AFTERWARDS.pop(id(model), []):
        change()
    outcome = Outcome(audit=audit(model, laws), gauge=watched)
    return outcome if outcome.seen else Outcome(audit=audit(model, laws, closure=loss, reference=True), gauge=watched)


def _laws_of(model: nn.Module, options: str, dtype: torch.dtype) -> LawSet:
    """The laws of a model without a defect; read off once for all models that are built alike."""
    if (options, dtype) not in _KNOWN:
        _KNOWN[options, dtype] = recognize(model, loss="cross_entropy")
    known, own = _KNOWN[options, dtype], dict(model.named_parameters())
    return replace(known, parameters={name: own[name] for name in known.parameters})


_KNOWN: dict[tuple[str, torch.dtype], LawSet] = {}

_AFTERWARDS: dict[int, list[Callable[[], None]]] = {}


def afterwards(change: Callable[[nn.Module], None]) -> Spoil:
    """A change of the gradients once they are there."""

    def spoil(model: nn.Module) -> None:
        _AFTERWARDS.setdefault(id(model), []).append(lambda: change(model))

    return spoil


# Attention. The backward of softmax(scale·q kᵀ) v written out, so that each of its steps can be got wrong.


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a backward pass of attention has at hand; a defect returns another one, or changes its results."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    p: Tensor
    do: Tensor
    scale: float
    logits: Tensor


Slopes = tuple[Tensor, Tensor, Tensor]


def right(s: Step, *, delta: Tensor | None = None, p: Tensor | None = None, dp: Tensor | None = None) -> Slopes:
    """dQ, dK, dV; any intermediate can be replaced."""
    p = s.p if p is None else p
    delta = (s.do * s.o).sum(-1, keepdim=True) if delta is None else delta
    dp = s.do @ s.v.mT if dp is None else dp
    ds = p * (dp - delta)
    return s.scale * ds @ s.k, s.scale * ds.mT @ s.q, p.mT @ s.do


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, wrong: Callable[[Step], Slopes]) -> Tensor:
        future = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
        logits = scale * q @ k.mT
        p = logits.masked_fill(future, float("-inf")).softmax(-1)
        o = p @ v
        ctx.save_for_backward(q, k, v, o, p, logits)
        ctx.scale, ctx.wrong = scale, wrong
        return o

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, p, logits = ctx.saved_tensors
        dq, dk, dv = ctx.wrong(Step(q=q, k=k, v=v, o=o, p=p, do=grads[0], scale=ctx.scale, logits=logits))
        return dq, dk, dv, None, None


class _Shared(torch.autograd.Function):
    """Keys or values repeated for every query head of a group; what is made of their gradients is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, repeat: int, wrong: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.repeat, ctx.wrong = repeat, wrong
        return x.repeat_interleave(repeat, -3)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.wrong(grads[0].unflatten(-3, (-1, ctx.repeat))), None, None


class _Turned(torch.autograd.Function):
    """Rotary positions whose backward turns the way the forward does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return rotate(x, "interleaved")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return rotate(grads[0], "interleaved")


def summed(grad: Tensor) -> Tensor:
    """What the gradient of shared keys is: the sum over the query heads of a group."""
    return grad.sum(-3)


def attention(
    wrong: Callable[[Step], Slopes] = right,
    *,
    dk: Callable[[Tensor], Tensor] = summed,
    dv: Callable[[Tensor], Tensor] = summed,
    turn_k: Callable[[Tensor], Tensor] | None = None,
    detach_v: bool = False,
) -> Spoil:
    """The attention of the first layer with another backward pass."""

    def spoil(model: nn.Module) -> None:
        layer: Any = model.layers[0].attention  # type: ignore[index, union-attr]

        def forward(x: Tensor) -> Tensor:
            q, k = layer._split(layer.q(x), layer.q_norm), layer._split(layer.k(x), layer.k_norm)
            v = layer.v(x).unflatten(-1, (layer.kv_heads, layer.head_dim)).transpose(-2, -3)
            v = v.detach() if detach_v else v
            q = rotate(q, layer.rotary)
            k = rotate(k, layer.rotary) if turn_k is None else turn_k(k)
            k = layer.keys(k)
            repeat = layer.heads // layer.kv_heads
            k, v = _Shared.apply(k, repeat, dk), _Shared.apply(v, repeat, dv)
            return layer.o(_Attend.apply(q, k, v, layer.scale, wrong).transpose(-2, -3).flatten(-2))

        layer.forward = forward

    return spoil


def on_slopes(change: Callable[[Step, Tensor, Tensor, Tensor], Slopes]) -> Spoil:
    """Right derivatives, then changed."""
    return attention(lambda s: change(s, *right(s)))


def without_tail(x: Tensor, block: int = 8) -> Tensor:
    """The last block of rows as if it were not there."""
    return torch.cat((x[..., :-block, :], torch.zeros_like(x[..., -block:, :])), -2)


def swapped(x: Tensor) -> Tensor:
    return x[..., [1, 0, 2, 3], :, :]


def unmasked(s: Step) -> Tensor:
    """The weights as a backward that forgets the mask recomputes them from the stored log of row sums."""
    future = torch.ones(s.p.shape[-2:], dtype=torch.bool).triu(1)
    log_sum = s.logits.masked_fill(future, float("-inf")).logsumexp(-1, keepdim=True)
    return (s.logits - log_sum).exp()


def misread(x: Tensor) -> Tensor:
    """A transposed gradient whose memory is read as if it were laid out in its own order."""
    return x.transpose(1, 2).contiguous().view(x.shape)


# Norms, feed-forward networks, routers: the same idea.


class _Norm(torch.autograd.Function):
    """RMS norm without gain whose input gradient leaves out the projection off the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        inverse = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(inverse)
        return x * inverse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return grads[0] * inverse, None


def norm_without_projection(where: Callable[[Any], Any]) -> Spoil:
    def spoil(model: nn.Module) -> None:
        norm = where(model)
        norm.forward = lambda x: _Norm.apply(x, norm.eps) * norm.weight

    return spoil


class _SwiGLU(torch.autograd.Function):
    """silu(g)·u with a given backward."""

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, u: Tensor, wrong: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    ) -> Tensor:
        ctx.save_for_backward(g, u)
        ctx.wrong = wrong
        return F.silu(g) * u

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.wrong(grads[0], *ctx.saved_tensors), None


def gated(wrong: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> Spoil:
    def spoil(model: nn.Module) -> None:
        network: Any = model.layers[0].feedforward  # type: ignore[index, union-attr]
        network.forward = lambda x: network.down(_SwiGLU.apply(network.gate(x), network.up(x), wrong))

    return spoil


def silu_slope(g: Tensor) -> Tensor:
    s = g.sigmoid()
    return s * (1 + g * (1 - s))


def first_row_only(grad: Tensor) -> Tensor:
    """Every row's gradient written to the first row."""
    flat = grad.flatten(0, -2)
    return torch.cat((flat.sum(0, keepdim=True), torch.zeros_like(flat[1:]))).view(grad.shape)


class _Scaled(torch.autograd.Function):
    """The identity, with a gradient times a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] * ctx.factor, None


def expert_input(model: nn.Module) -> None:
    """A fused expert whose input gradient leaves out the up half; its weight gradients are right."""
    network: Any = model.layers[0].feedforward  # type: ignore[index, union-attr]
    network.forward = lambda x: network.down(F.silu(network.gate(x)) * network.up(_Scaled.apply(x, 0.0)))


class _Softmax(torch.autograd.Function):
    """Softmax whose backward leaves out the correction term."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        p = z.softmax(-1)
        ctx.save_for_backward(p)
        return p

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (p,) = ctx.saved_tensors
        return p * grads[0]


def partial_router(model: nn.Module) -> None:
    mixture: Any = model.layers[0].feedforward  # type: ignore[index, union-attr]
    mixture.weights = lambda x: _Softmax.apply(mixture.router(x))


def severed_router(model: nn.Module) -> None:
    mixture: Any = model.layers[0].feedforward  # type: ignore[index, union-attr]
    right_weights = mixture.weights
    mixture.weights = lambda x: right_weights(x).detach()


def lost_gain(model: nn.Module) -> None:
    norm: Any = model.layers[0].norm1  # type: ignore[index, union-attr]
    norm.forward = lambda x: F.rms_norm(x, norm.normalized_shape, norm.weight.detach(), norm.eps)


def detached_skip(model: nn.Module) -> None:
    layer: Any = model.layers[1]  # type: ignore[index]

    def forward(x: Tensor) -> Tensor:
        x = x.detach() + layer.attention(layer.norm1(x))
        return x + layer.feedforward(layer.norm2(x))

    layer.forward = forward


def times(pattern: str, factor: float) -> Spoil:
    """The gradients of matching parameters off by a factor."""

    def change(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if pattern in name and parameter.grad is not None:
                parameter.grad.mul_(factor)

    return afterwards(change)


def half_stored(model: nn.Module) -> None:
    """dK of the first layer passed through bfloat16."""
    weight: Any = model.layers[0].attention.k.weight  # type: ignore[index, union-attr]
    weight.grad = weight.grad.to(torch.bfloat16).to(weight.dtype)


def padding_tokens(model: nn.Module) -> None:
    """The gradient of half of the embedding's rows dropped."""
    weight: Any = model.embedding.weight  # type: ignore[union-attr]
    weight.grad[:32] = 0


def off_classes(model: nn.Module) -> None:
    """A fused loss that leaves the last classes, its padding to a multiple of 16, out of the head's gradient."""
    weight: Any = model.head.weight  # type: ignore[union-attr]
    weight.grad[48:] = 0


NOBODY: frozenset[str] = frozenset()
IDENTITY = frozenset({"identity"})
SCALE = frozenset({"scale"})
GAUGE = frozenset({"gauge"})
MISSING = frozenset({"missing", "identity"})
REFERENCE = frozenset({"reference"})
LOSS = frozenset({"loss"})

SAME_M = "dQ = MK and dK = MᵀQ share the same wrong M, and each of its rows still sums to zero"
LINEAR = "identities are linear in the gradient"
NO_LAW = "no law spans the derivative of a nonlinearity"

CATALOGUE = [
    Broken(
        name="dK without the softmax scale",
        source="https://github.com/tile-ai/tilelang-ascend/pull/1670",
        spoil=on_slopes(lambda s, dq, dk, dv: (dq, dk / s.scale, dv)),
        seen=IDENTITY,
    ),
    Broken(
        name="dQ and dK both without the softmax scale",
        source="https://github.com/tile-ai/tilelang-ascend/pull/1670",
        spoil=on_slopes(lambda s, dq, dk, dv: (dq / s.scale, dk / s.scale, dv)),
        seen=REFERENCE | LOSS,
        why=SAME_M,
    ),
    Broken(
        name="stale keys in dQ",
        source="https://github.com/huggingface/diffusers/issues/14265",
        spoil=attention(lambda s: (right(replace(s, k=s.k.roll(8, -2)), p=s.p)[0], *right(s)[1:])),
        seen=IDENTITY,
    ),
    Broken(
        name="softmax correction term missing",
        source="",
        spoil=attention(lambda s: right(s, delta=torch.zeros_like(s.o[..., :1]))),
        seen=GAUGE,
        why=SAME_M.replace("and each of its rows still sums to zero", "but its rows no longer sum to zero"),
    ),
    Broken(
        name="softmax correction of the next row",
        source="",
        spoil=attention(lambda s: right(s, delta=(s.do * s.o).sum(-1, keepdim=True).roll(1, -2))),
        seen=GAUGE,
    ),
    Broken(
        name="causal mask ignored in the backward",
        source="https://github.com/triton-lang/triton/issues/7216",
        spoil=attention(lambda s: right(s, p=unmasked(s))),
        seen=IDENTITY | GAUGE,
    ),
    Broken(
        name="causal mask ignored in dQ and dK only",
        source="https://github.com/triton-lang/triton/issues/4541",
        spoil=attention(lambda s: (*right(s, p=unmasked(s))[:2], right(s)[2])),
        seen=GAUGE,
    ),
    Broken(
        name="two heads of dQ swapped",
        source="https://github.com/XunhaoLai/native-sparse-attention-triton/issues/27",
        spoil=on_slopes(lambda s, dq, dk, dv: (swapped(dq), dk, dv)),
        seen=IDENTITY,
    ),
    Broken(
        name="query heads of a group not summed in dK",
        source="https://github.com/marin-community/levanter/pull/449",
        spoil=attention(dk=lambda slope: slope[..., 0, :, :]),
        seen=IDENTITY,
    ),
    Broken(
        name="query heads of a group averaged in dK and dV",
        source="https://github.com/XunhaoLai/native-sparse-attention-triton/issues/27",
        spoil=attention(dk=lambda slope: slope.mean(-3), dv=lambda slope: slope.mean(-3)),
        seen=IDENTITY,
    ),
    Broken(
        name="non-contiguous dO misread",
        source="https://github.com/Dao-AILab/flash-attention/issues/355",
        spoil=attention(lambda s: right(replace(s, do=misread(s.do)))),
        seen=IDENTITY,
    ),
    Broken(
        name="rotary of dK turned the wrong way",
        source="https://github.com/PaddlePaddle/Paddle/pull/74716",
        spoil=attention(turn_k=_Turned.apply),
        seen=IDENTITY,
    ),
    Broken(
        name="dV with weights not transposed",
        source="https://github.com/ooples/AiDotNet.Tensors/issues/49",
        spoil=on_slopes(lambda s, dq, dk, dv: (dq, dk, s.p @ s.do)),
        seen=IDENTITY,
    ),
    Broken(
        name="values detached",
        source="https://github.com/huggingface/candle/issues/3568",
        spoil=attention(detach_v=True),
        seen=MISSING,
    ),
    Broken(
        name="last block of queries skipped in dK and dV",
        source="",
        spoil=attention(lambda s: (right(s)[0], *right(replace(s, do=without_tail(s.do)))[1:])),
        seen=IDENTITY,
    ),
    Broken(
        name="norm gain's gradient lost",
        source="https://github.com/NVIDIA/TransformerEngine/issues/435",
        spoil=lost_gain,
        seen=MISSING,
    ),
    Broken(
        name="norm gain's gradient halved",
        source="https://github.com/NVIDIA/Megatron-LM/issues/1446",
        spoil=times("layers.0.norm1.weight", 0.5),
        seen=IDENTITY,
    ),
    Broken(
        name="norm gain's gradient averaged instead of summed",
        source="https://github.com/EleutherAI/gpt-neox/pull/1259",
        spoil=times("norm.weight", 0.25),
        seen=IDENTITY,
    ),
    Broken(
        name="norm's input gradient without its projection",
        source="",
        spoil=norm_without_projection(lambda model: model.layers[1].norm2),
        seen=SCALE,
        why="the norm's output gradient and its gain's are right; only what flows below the norm is wrong",
    ),
    Broken(
        name="key norm's input gradient without its projection",
        source="",
        spoil=norm_without_projection(lambda model: model.layers[0].attention.k_norm),
        seen=SCALE,
        options={"qk_norm": True},
    ),
    Broken(
        name="fused SwiGLU: the two gradients swapped",
        source="https://github.com/unslothai/unsloth/issues/3314",
        spoil=gated(lambda d, g, u: (d * F.silu(g), d * u * silu_slope(g))),
        seen=IDENTITY,
    ),
    Broken(
        name="fused SwiGLU: the gate's derivative wrong",
        source="https://github.com/unslothai/unsloth/issues/3314",
        spoil=gated(lambda d, g, u: (d * u * g.sigmoid(), d * F.silu(g))),
        seen=REFERENCE | LOSS,
        why=NO_LAW,
    ),
    Broken(
        name="fused SwiGLU: all rows written to the first",
        source="https://github.com/ByteDance-Seed/Triton-distributed/issues/180",
        spoil=gated(lambda d, g, u: (first_row_only(d * u * silu_slope(g)), first_row_only(d * F.silu(g)))),
        seen=IDENTITY,
    ),
    Broken(
        name="fused expert's input gradient without the up half",
        source="https://github.com/linkedin/Liger-Kernel/pull/1413",
        spoil=expert_input,
        seen=IDENTITY,
    ),
    Broken(
        name="router's softmax without its correction term",
        source="",
        spoil=partial_router,
        seen=IDENTITY,
        options={"experts": 3},
    ),
    Broken(
        name="router severed",
        source="https://github.com/TIML-Group/Robust-MoE-Dual-Model/issues/2",
        spoil=severed_router,
        seen=frozenset({"missing"}),
        why="the router's identity is that its own gradients sum to zero, which nothing does too",
        options={"experts": 3},
    ),
    Broken(
        name="residual branch detached",
        source="",
        spoil=detached_skip,
        seen=SCALE,
    ),
    Broken(
        name="dK kept in bfloat16",
        source="",
        spoil=afterwards(half_stored),
        seen=IDENTITY,
        in_half=NOBODY,
        why="in a bfloat16 run that is no defect",
    ),
    Broken(
        name="one group of parameters not unscaled",
        source="",
        spoil=times("attention", 8.0),
        seen=IDENTITY | SCALE,
    ),
    Broken(
        name="all gradients twice too large by accumulation",
        source="https://github.com/huggingface/transformers/pull/34191",
        spoil=times("", 2.0),
        seen=LOSS,
        why=LINEAR,
    ),
    Broken(
        name="embedding rows dropped from the gradient",
        source="",
        spoil=afterwards(padding_tokens),
        seen=SCALE,
    ),
    Broken(
        name="classes dropped from the head's gradient",
        source="",
        spoil=afterwards(off_classes),
        seen=IDENTITY,
    ),
]
"""LoRA factors that are not reduced need processes, and are in test_audit_distributed.py."""


def ids(case: Broken) -> str:
    return case.name
