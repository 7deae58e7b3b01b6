r"""Gradients of the paper's two models in half precision, arranged so that rounding does not add up in conserved laws.

Inputs and slopes of every product are rounded to half precision, weights are kept in two pieces of it (22 digits). Each
product that follows from a rounded number uses the same rounded number, so what rounding does to μ(θ, G) differs in
sign from token to token. To make it differ from step to step too, where one batch is used over and over, all numbers
are multiplied before rounding by a factor in [1, 2) that is drawn anew for every step and divided out afterwards: the
*shift*. Then the leak of a run grows as √k and not as k.

Functions here are plain PyTorch apart from two products, so that `torch.compile` makes few kernels of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved.papers.blocks import DecoderLM, MixtureOfExperts, SwiGLU, VisionTransformer
from conserved.papers.blocks.attention import rotate
from conserved.papers.blocks.transformer import TransformerBlock
from conserved.papers.lab.pieces import stretch

_WEIGHTS, _INPUTS = 16.0, 4.0
"""Powers of two that bring weights and inputs into the range of half precision."""

_SLOPES = {DecoderLM: 2.0**6, VisionTransformer: 2.0**10}
"""The same for slopes, as a factor of the loss; an image's slope is spread over its tokens."""

_NARROW = 1024
"""Rows up to this wide are laid down twice, to meet both pieces of a weight in one product; wider ones, in two."""

_HEIGHT, _ACROSS = 16, 128
"""Tile of a kernel."""

_SHORT = 64
"""Sequences up to this long are so short that attention is faster in plain products than in a kernel for long ones."""


@dataclass(slots=True)
class _Kernels:
    """Whether gates go through kernels of our own on a GPU."""

    use: bool = True


KERNELS = _Kernels()


@torch.library.custom_op("conserved::wide_product", mutates_args=(), schema="(Tensor a, Tensor b) -> Tensor")
def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a b of halves in float32; three axes are batched over the first."""
    if not a.is_cuda:
        return a.float() @ b.float()
    return torch.mm(a, b, out_dtype=torch.float32) if a.ndim == 2 else torch.bmm(a, b, out_dtype=torch.float32)


@wide_product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=torch.float32)


@torch.library.custom_op(
    "conserved::half_gate",
    mutates_args=(),
    schema="(Tensor branches, Tensor? bias, Tensor? share, Tensor shift) -> Tensor",
)
def half_gate(branches: Tensor, bias: Tensor | None, share: Tensor | None, shift: Tensor) -> Tensor:
    """SiLU(gates) ⊙ ups ⊙ shares as an input of the next product, from (rows, 2 · width) gates and ups."""
    rows, width = branches.shape[0], branches.shape[1] // 2
    hidden = width if share is None else width // share.shape[1]
    if branches.is_cuda and KERNELS.use and hidden % _ACROSS == 0:
        from conserved.papers.lab.piece_kernels import half_gate as kernel

        out = branches.new_empty(rows, width)
        kernel[-(-rows // _HEIGHT), width // _ACROSS](
            branches, shift if bias is None else bias, shift if share is None else share.contiguous(), shift, out,
            rows, width, hidden, _INPUTS * _WEIGHTS, _INPUTS,
            BIASED=bias is not None, SHARED=share is not None, HEIGHT=_HEIGHT, ACROSS=_ACROSS,
        )  # fmt: skip
        return out
    gates, ups = _branches(branches, bias, shift)
    found = F.silu(gates) * ups
    return ((found if share is None else found * _spread(share, width)) * (_INPUTS * shift)).half()


@half_gate.register_fake
def _(branches: Tensor, bias: Tensor | None, share: Tensor | None, shift: Tensor) -> Tensor:
    return branches.new_empty(branches.shape[0], branches.shape[1] // 2)


@torch.library.custom_op(
    "conserved::half_gate_slopes",
    mutates_args=(),
    schema="(Tensor above, Tensor branches, Tensor? bias, Tensor? share, Tensor shift) -> (Tensor, Tensor)",
)
def half_gate_slopes(
    above: Tensor, branches: Tensor, bias: Tensor | None, share: Tensor | None, shift: Tensor
) -> tuple[Tensor, Tensor]:
    """Slopes of gates and ups, and of the shares tile by tile, from slopes in units of the weights."""
    rows, width = above.shape
    experts = 1 if share is None else share.shape[1]
    hidden = width // experts
    if above.is_cuda and KERNELS.use and hidden % _ACROSS == 0:
        from conserved.papers.lab.piece_kernels import half_gate_slopes as kernel

        out = above.new_empty(rows, 2 * width)
        sums = above.new_empty(rows, width // _ACROSS, dtype=torch.float32)
        kernel[-(-rows // _HEIGHT), width // _ACROSS](
            above, branches, shift if bias is None else bias, shift if share is None else share.contiguous(), shift,
            out, sums, rows, width, hidden, _INPUTS * _WEIGHTS, _WEIGHTS,
            BIASED=bias is not None, SHARED=share is not None, HEIGHT=_HEIGHT, ACROSS=_ACROSS,
        )  # fmt: skip
        return out, sums
    gates, ups = _branches(branches, bias, shift)
    slope = above.float() / _WEIGHTS
    part = gates.sigmoid()
    through = gates * part
    tiles = _tiles(width, hidden)
    sums = (slope * through * ups).unflatten(1, (tiles, -1)).sum(-1)
    if share is not None:
        slope = slope * _spread(share, width)
    return torch.cat((slope * ups * (part * (1 + gates * (1 - part))), slope * through), 1).half(), sums


def _tiles(width: int, hidden: int) -> int:
    return width // _ACROSS if hidden % _ACROSS == 0 else width // hidden


@half_gate_slopes.register_fake
def _(
    above: Tensor, branches: Tensor, bias: Tensor | None, share: Tensor | None, shift: Tensor
) -> tuple[Tensor, Tensor]:
    rows, width = above.shape
    tiles = _tiles(width, width if share is None else width // share.shape[1])
    return above.new_empty(rows, 2 * width), above.new_empty(rows, tiles, dtype=torch.float32)


def narrow_product(a: Tensor, b: Tensor) -> Tensor:
    """a b of halves in half precision, summed in float32."""
    return a @ b if a.is_cuda else (a.float() @ b.float()).half()


def two_pieces(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weights in two pieces of half precision; not to be compiled, where a conversion and back may be left out."""
    scaled = weights * _WEIGHTS
    high = scaled.half()
    return high, (scaled - high.to(scaled.dtype)).half()


def _twice(x: Tensor) -> Tensor:
    return torch.cat((x, x), 1)


def _over_tokens(slopes: Tensor, inputs: Tensor, shift: Tensor) -> Tensor:
    """Σ_t ∂y_t x_tᵀ."""
    size = stretch(len(slopes))
    left, right = slopes.reshape(-1, size, slopes.shape[1]).transpose(1, 2), inputs.reshape(-1, size, inputs.shape[1])
    return wide_product(left, right).sum(0) / (_INPUTS * shift)


def _bias_slope(slopes: Tensor) -> Tensor:
    """Sums over tokens, as a product with ones: faster than a sum."""
    size = stretch(len(slopes))
    parts = slopes.reshape(-1, size, slopes.shape[1])
    return wide_product(parts.new_ones(len(parts), 1, size), parts).sum((0, 1))


class _Linear(torch.autograd.Function):
    """y = x Wᵀ + b; `roomy` outputs are float32, others half precision in units of inputs times weights.

    The weight itself only says where its gradient belongs; products use its pieces.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        shift: Tensor,
        roomy: bool,
        high: Tensor,
        low: Tensor,
    ) -> Tensor:
        x16 = (x * (_INPUTS * shift)).half()
        ctx.save_for_backward(x16, shift, high, low)
        ctx.biased = bias is not None
        doubled, both = _twice(x16), torch.cat((high, low), 1).T
        if not roomy:
            return narrow_product(doubled, both)
        found = wide_product(doubled, both) / (_INPUTS * _WEIGHTS * shift)
        return found if bias is None else found + bias

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        x16, shift, high, low = ctx.saved_tensors
        dy = slopes[0].half()
        if dy.shape[1] <= _NARROW:
            dx = wide_product(_twice(dy), torch.cat((high, low), 0)) / _WEIGHTS
        else:
            dx = (wide_product(dy, high) + wide_product(dy, low)) / _WEIGHTS
        return dx, _over_tokens(dy, x16, shift), _bias_slope(dy) if ctx.biased else None, None, None, None, None


class _Gated(torch.autograd.Function):
    """y = (SiLU(x Bᵀ) ⊙ x Cᵀ ⊙ shares) Aᵀ, with B over C in one matrix; hidden units of all experts in a row."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        both: Tensor,
        bias: Tensor | None,
        down: Tensor,
        share: Tensor | None,
        shift: Tensor,
        high: Tensor,
        low: Tensor,
        down_high: Tensor,
        down_low: Tensor,
    ) -> Tensor:
        x16 = (x * (_INPUTS * shift)).half()
        branches = narrow_product(_twice(x16), torch.cat((high, low), 1).T)
        h16 = half_gate(branches, bias, share, shift)
        ctx.save_for_backward(x16, bias, share, shift, branches, h16, high, low, down_high, down_low)
        return (wide_product(h16, down_high.T) + wide_product(h16, down_low.T)) / (_INPUTS * _WEIGHTS * shift)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        x16, bias, share, shift, branches, h16, high, low, *down_pieces = ctx.saved_tensors
        dy = slopes[0].half()
        above = narrow_product(_twice(dy), torch.cat(down_pieces, 0))
        of_down = _over_tokens(dy, h16, shift)
        d16, sums = half_gate_slopes(above, branches, bias, share, shift)
        of_share = None if share is None else sums.unflatten(1, (share.shape[1], -1)).sum(-1)
        dx = (wide_product(d16, high) + wide_product(d16, low)) / _WEIGHTS
        of_bias = None if bias is None else _bias_slope(d16)
        return dx, _over_tokens(d16, x16, shift), of_bias, of_down, of_share, None, None, None, None, None


def _branches(branches: Tensor, bias: Tensor | None, shift: Tensor) -> tuple[Tensor, Tensor]:
    whole = branches.float() / (_INPUTS * _WEIGHTS * shift)
    gates, ups = (whole if bias is None else whole + bias).chunk(2, 1)
    return gates, ups


def _spread(share: Tensor, width: int) -> Tensor:
    """One column per hidden unit from one column per expert."""
    return share.unsqueeze(-1).expand(-1, -1, width // share.shape[1]).flatten(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """What a layer's weights do not tell."""

    heads: int
    width: int
    scale: float
    causal: bool
    rotary: Any
    rms: bool
    epsilon: float
    experts: int
    sigmoid: bool
    active: int


Layer = Callable[..., Tensor]
BlockWeights = dict[str, Tensor]
"""By short names: q, k, v, o; n1, n2 for norms; g, u, d and the number of an expert; router; b at the end of biases."""


def _layer(form: _Form) -> Layer:
    """A transformer block as a function of its input, the shift and its weights."""

    def norm(x: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
        if form.rms:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + form.epsilon) * gain
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + form.epsilon) * gain
        return scaled if bias is None else scaled + bias

    def attention(x: Tensor, s: Tensor, w: BlockWeights, high: BlockWeights, low: BlockWeights) -> Tensor:
        count, length, dim = x.shape
        joint, bias = joined(w, "qkv"), torch.cat((w["qb"], w["kb"], w["vb"])) if "qb" in w else None
        wide = _Linear.apply(x.reshape(-1, dim), joint, bias, s, True, joined(high, "qkv"), joined(low, "qkv"))
        q, k, v = wide.view(count, length, 3, form.heads, form.width).permute(2, 0, 3, 1, 4)
        if form.rotary is not None:
            q, k = rotate(q, form.rotary), rotate(k, form.rotary)
        q, k, v = (q * s).half(), (k / s).half(), (v * s).half()
        if length <= _SHORT and not form.causal:
            mixed = ((q @ k.mT).float() * form.scale).softmax(-1).half() @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=form.causal, scale=form.scale)
        flat = mixed.transpose(1, 2).reshape(-1, dim).float() / s
        found: Tensor = _Linear.apply(flat, w["o"], w.get("ob"), s, True, high["o"], low["o"])
        return found.view(count, length, dim)

    def shares(x: Tensor, router: Tensor) -> Tensor:
        logits = x @ router.T
        inactive = None
        if form.active < form.experts:
            order = logits.sort(dim=-1, descending=True, stable=True).indices
            inactive = torch.ones_like(logits, dtype=torch.bool).scatter(-1, order[..., : form.active], False)
        if form.sigmoid:
            scores = logits.sigmoid()
            scores = scores if inactive is None else scores.masked_fill(inactive, 0.0)
            return scores / scores.sum(-1, keepdim=True)
        return (logits if inactive is None else logits.masked_fill(inactive, float("-inf"))).softmax(-1)

    count = max(1, form.experts)

    def joined(w: BlockWeights, parts: str) -> Tensor:
        return torch.cat([w[part] for part in parts])

    def branches(w: BlockWeights) -> Tensor:
        return torch.cat([w[f"g{e}"] for e in range(count)] + [w[f"u{e}"] for e in range(count)])

    def downs(w: BlockWeights) -> Tensor:
        return torch.cat([w[f"d{e}"] for e in range(count)], 1)

    def layer(x: Tensor, s: Tensor, w: BlockWeights, high: BlockWeights, low: BlockWeights) -> Tensor:
        x = x + attention(norm(x, w["n1"], w.get("n1b")), s, w, high, low)
        y = norm(x, w["n2"], w.get("n2b")).flatten(0, 1)
        bias = torch.cat((w["g0b"], w["u0b"])) if "g0b" in w else None
        share = shares(y, w["router"]) if form.experts else None
        found: Tensor = _Gated.apply(
            y, branches(w), bias, downs(w), share, s, branches(high), branches(low), downs(high), downs(low)
        )
        if "d0b" in w:
            found = found + w["d0b"]
        return x + found.view(x.shape)

    return layer


class HalfModel:
    """A decoder or vision transformer whose summed loss is computed in half precision, compiled if asked for."""

    def __init__(self, model: nn.Module, *, compiled: bool) -> None:
        assert isinstance(model, DecoderLM | VisionTransformer)
        self.model, self.compiled = model, compiled
        self.decoder = isinstance(model, DecoderLM)
        self.factor = _SLOPES[type(model)]
        block = cast(TransformerBlock, model.layers[0])
        attention, mixture, norm = block.attention, block.feedforward, block.norm1
        if attention.q_norm is not None or attention.kv_heads != attention.heads:
            raise ValueError("Query/key norms and shared key heads are not computed the fast way.")
        if not isinstance(mixture, MixtureOfExperts | SwiGLU):
            raise ValueError(f"A gated network or a mixture was expected; got {type(mixture).__name__}.")
        assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
        self.form = _Form(
            heads=attention.heads,
            width=attention.head_dim,
            scale=attention.scale,
            causal=attention.causal,
            rotary=attention.rotary,
            rms=isinstance(norm, nn.RMSNorm),
            epsilon=norm.eps or 0.0,
            experts=len(mixture.experts) if isinstance(mixture, MixtureOfExperts) else 0,
            sigmoid=isinstance(mixture, MixtureOfExperts) and mixture.gate == "sigmoid",
            active=mixture.active if isinstance(mixture, MixtureOfExperts) else 0,
        )
        self.names = self._names()
        self.layer: Layer = _layer(self.form)
        self.ends: Layer = self._loss
        if compiled:
            self.layer = torch.compile(self.layer, dynamic=False, fullgraph=True)
            self.ends = torch.compile(self._loss, dynamic=False, fullgraph=True)

    def summed_loss(
        self, inputs: Tensor, targets: Tensor, shift: Tensor, high: Mapping[str, Tensor], low: Mapping[str, Tensor]
    ) -> Tensor:
        """The sum of all cross-entropies, times `factor` and the shift; with the pieces of all weights."""
        model = self.model
        if isinstance(model, DecoderLM):
            x = model.positions(F.embedding(inputs, model.embedding.weight))
        else:
            assert isinstance(model, VisionTransformer)
            x = F.linear(model.patches(inputs), model.embedding.weight, model.embedding.bias)
            x = model.positions(x)
        weights = dict(model.named_parameters())
        for place in range(len(model.layers)):
            named = {short: f"layers.{place}.{long}" for short, long in self.names.items()}
            wide = {short: long for short, long in named.items() if weights[long].ndim == 2 and short != "router"}
            x = self.layer(
                x,
                shift,
                {short: weights[long] for short, long in named.items()},
                {short: high[long] for short, long in wide.items()},
                {short: low[long] for short, long in wide.items()},
            )
        ends = [weights.get(name) for name in ("norm.weight", "norm.bias", "head.weight", "head.bias")]
        return self.ends(x, targets, shift, *ends, high["head.weight"], low["head.weight"])

    def _loss(
        self,
        x: Tensor,
        targets: Tensor,
        shift: Tensor,
        gain: Tensor,
        bias: Tensor | None,
        head: Tensor,
        head_bias: Tensor | None,
        high: Tensor,
        low: Tensor,
    ) -> Tensor:
        form = self.form
        if form.rms:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + form.epsilon) * gain
        else:
            x = x - x.mean(-1, keepdim=True)
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + form.epsilon) * gain
            x = x if bias is None else x + bias
        if self.decoder:
            raw = _Linear.apply(x.flatten(0, 1), head, None, shift, False, high, low)
            # The slope with respect to the logits themselves is what half precision holds well.
            logits = _Scaled.apply(raw, shift)
        else:
            logits = F.linear(x.mean(1), head, head_bias)
        return F.cross_entropy(logits, targets.flatten(), reduction="sum") * (self.factor * shift)

    def _names(self) -> dict[str, str]:
        """Short names of a layer's weights, with their names in the layer."""
        block = self.model.layers[0]
        found = {part: f"attention.{part}.weight" for part in "qkvo"}
        found |= {f"n{place}": f"norm{place}.weight" for place in (1, 2)}
        if self.form.experts:
            found["router"] = "feedforward.router.weight"
        for place in range(max(1, self.form.experts)):
            stem = f"feedforward.experts.{place}" if self.form.experts else "feedforward"
            found |= {f"{part[0]}{place}": f"{stem}.{part}.weight" for part in ("gate", "up", "down")}
        here = dict(block.named_parameters())
        biases = {f"{short}b": long.replace("weight", "bias") for short, long in found.items()}
        return found | {short: long for short, long in biases.items() if long in here}


class _Scaled(torch.autograd.Function):
    """Logits from a product in units of inputs times weights; slopes pass as they are."""

    @staticmethod
    def forward(ctx: Any, raw: Tensor, shift: Tensor) -> Tensor:
        return raw.float() / (_INPUTS * _WEIGHTS * shift)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None]:
        return slopes[0].half(), None
