"""Functions whose backward is wrong in tails, last blocks, single rows or for rare inputs only.

Every forward is right. The right gradient is PyTorch's own, computed in float32 (or float64) and rounded at the end; a
defect changes it afterwards: where an input is large, in the last tile, in one row of thousands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Grads = list[Tensor]
Forward = Callable[..., Tensor]
Change = Callable[[Grads, Sequence[Tensor], Tensor, Tensor], Grads]
"""From gradients, inputs, output gradient and output to wrong gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hidden:
    """A defect: the function, its inputs, where it hides, and how it changes gradients."""

    function: str
    where: str
    kind: str
    """One of tail, block, row, rare, size."""
    change: Change

    @property
    def name(self) -> str:
        return f"{self.function}: {self.where}"


class _Changed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Forward, change: Change | None, *inputs: Tensor) -> Tensor:
        ctx.forward_, ctx.change = forward, change
        ctx.save_for_backward(*inputs)
        return forward(*(_wide(value) for value in inputs)).to(inputs[0].dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        inputs = ctx.saved_tensors
        with torch.enable_grad():
            leaves = [_wide(value).detach().requires_grad_() for value in inputs]
            out = ctx.forward_(*leaves)
            grads = list(torch.autograd.grad(out, leaves, _wide(gradients[0])))
        if ctx.change is not None:
            plain = [leaf.detach() for leaf in leaves]
            grads = ctx.change([grad.clone() for grad in grads], plain, _wide(gradients[0]), out.detach())
        return (None, None, *(grad.to(value.dtype) for grad, value in zip(grads, inputs, strict=True)))


def _wide(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, -torch.inf).softmax(-1) @ v


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def _rms(x: Tensor, w: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w


def _layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b, 1e-5)


FUNCTIONS: dict[str, tuple[Forward, tuple[tuple[int, ...], ...]]] = {
    "causal attention": (_causal, ((1, 2, 256, 32),) * 3),
    "attention": (_attention, ((1, 2, 64, 16), (1, 2, 96, 16), (1, 2, 96, 16))),
    "rms norm": (_rms, ((4096, 64), (64,))),
    "layer norm": (_layer, ((512, 48), (48,), (48,))),
    "gelu": (F.gelu, ((64, 128),)),
    "silu": (F.silu, ((64, 128),)),
    "tanh": (torch.tanh, ((64, 128),)),
    "sigmoid": (torch.sigmoid, ((64, 128),)),
    "softplus": (F.softplus, ((64, 128),)),
    "softmax": (lambda x: x.softmax(-1), ((32, 256),)),
    "log softmax": (lambda x: x.log_softmax(-1), ((32, 256),)),
    "logsumexp": (lambda x: x.logsumexp(-1), ((64, 128),)),
    "gated": (lambda gate, up: F.silu(gate) * up, ((64, 96), (64, 96))),
    "linear": (lambda x, w: x @ w.mT, ((1024, 48), (40, 48))),
    "cumulative sum": (lambda x: x.cumsum(-1), ((16, 512),)),
    "convolution": (lambda x, w: F.conv1d(x, w, padding=2), ((2, 8, 128), (8, 8, 5))),
    "huber": (lambda x: F.huber_loss(x, torch.zeros_like(x), reduction="none", delta=2.0), ((64, 64),)),
    "squared relu": (lambda x: F.relu(x) ** 2, ((64, 128),)),
    "product": (lambda x: x.prod(-1), ((64, 6),)),
    "soft cap": (lambda x: 5 * torch.tanh(x / 5), ((64, 128),)),
}


def _scaled(index: int, where: Callable[..., Tensor], factor: float) -> Change:
    """Multiply entries of one gradient, chosen by gradients, inputs, output gradient and output."""

    def change(grads: Grads, inputs: Sequence[Tensor], grad: Tensor, out: Tensor) -> Grads:
        chosen = where(grads[index], inputs[index], grad, out)
        grads[index] = torch.where(chosen, grads[index] * factor, grads[index])
        return grads

    return change


def _span(index: int, axis: int, start: int | None, stop: int | None, factor: float) -> Change:
    """Multiply a span of one gradient along an axis."""

    def change(grads: Grads, inputs: Sequence[Tensor], grad: Tensor, out: Tensor) -> Grads:
        span: list[Any] = [slice(None)] * grads[index].ndim
        span[axis] = slice(start, stop)
        grads[index][tuple(span)] *= factor
        return grads

    return change


def _beyond(limit: float) -> Callable[..., Tensor]:
    return lambda grad, value, gradient, out: value.abs() > limit


def _all(grad: Tensor, value: Tensor, gradient: Tensor, out: Tensor) -> Tensor:
    return torch.ones_like(grad, dtype=torch.bool)


def _one_row_left_out(grads: Grads, inputs: Sequence[Tensor], grad: Tensor, out: Tensor) -> Grads:
    """dw of the RMS norm without row 1,234."""
    x = inputs[0][1234]
    unit = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    return [grads[0], grads[1] - grad[1234] * unit]


def _row_of_linear(row: int) -> Change:
    def change(grads: Grads, inputs: Sequence[Tensor], grad: Tensor, out: Tensor) -> Grads:
        return [grads[0], grads[1] - grad[row][:, None] * inputs[0][row][None, :]]

    return change


def _bias_without_last(grads: Grads, inputs: Sequence[Tensor], grad: Tensor, out: Tensor) -> Grads:
    return [grads[0], grads[1], grads[2] - grad[-1]]


def _softmax_small(limit: float, factor: float) -> Change:
    return _scaled(0, lambda grad, value, gradient, out: out < limit, factor)


def _log_softmax_small(grads: Grads, inputs: Sequence[Tensor], grad: Tensor, out: Tensor) -> Grads:
    """The product with small probabilities is dropped."""
    p = out.exp()
    return [torch.where(p < 1e-3, grad, grads[0])]


def _large_slopes(limit: float) -> Change:
    """An output gradient beyond a limit is clipped."""

    def change(grads: Grads, inputs: Sequence[Tensor], gradient: Tensor, out: Tensor) -> Grads:
        ratio = (limit / float(gradient.abs().max().clamp_min(1e-30))) if float(gradient.abs().max()) > limit else 1.0
        return [grad * ratio for grad in grads]

    return change


def _if_sorted(grads: Grads, inputs: Sequence[Tensor], grad: Tensor, out: Tensor) -> Grads:
    rising = (inputs[0].diff(dim=-1) >= 0).all(-1, keepdim=True)
    return [torch.where(rising, grads[0] * 0.5, grads[0])]


def _if_constant(grads: Grads, inputs: Sequence[Tensor], grad: Tensor, out: Tensor) -> Grads:
    same = (inputs[0] == inputs[0][..., :1]).all(-1, keepdim=True)
    return [torch.where(same, grads[0] * 0.5, grads[0]), *grads[1:]]


def _if_mostly_zero(grads: Grads, inputs: Sequence[Tensor], grad: Tensor, out: Tensor) -> Grads:
    empty = (inputs[0] == 0).double().mean(-1, keepdim=True) > 0.5
    return [torch.where(empty, grads[0] * 0.5, grads[0]), *grads[1:]]


def _if_one_dominates(grads: Grads, inputs: Sequence[Tensor], grad: Tensor, out: Tensor) -> Grads:
    x = inputs[0].abs()
    alone = x.max(-1, keepdim=True).values > 0.9 * x.sum(-1, keepdim=True)
    return [torch.where(alone, grads[0] * 0.5, grads[0]), *grads[1:]]


def _if_offset(grads: Grads, inputs: Sequence[Tensor], grad: Tensor, out: Tensor) -> Grads:
    x = inputs[0]
    far = x.mean(-1, keepdim=True).abs() > 4 * x.std(-1, keepdim=True)
    return [torch.where(far, grads[0] * 0.5, grads[0]), *grads[1:]]


def _if_tiny(grads: Grads, inputs: Sequence[Tensor], grad: Tensor, out: Tensor) -> Grads:
    small = inputs[0].abs().max() < 0.05
    return [grads[0] * (0.5 if bool(small) else 1.0), *grads[1:]]


def _where_gradient(chosen: Callable[[Tensor], Tensor | bool]) -> Change:
    """Gradients are halved where the output gradient is of a kind."""

    def change(grads: Grads, inputs: Sequence[Tensor], gradient: Tensor, out: Tensor) -> Grads:
        return [grad * (0.5 if bool(chosen(gradient)) else 1.0) for grad in grads]

    return change


def _mostly_zero(gradient: Tensor) -> Tensor:
    return (gradient == 0).double().mean() > 0.8


def _constant(gradient: Tensor) -> Tensor:
    return gradient.min() == gradient.max()


def _if_alike(grads: Grads, inputs: Sequence[Tensor], grad: Tensor, out: Tensor) -> Grads:
    return [grads[0] * (0.5 if torch.equal(inputs[0], inputs[1]) else 1.0), *grads[1:]]


def _if_row_is_small(grads: Grads, inputs: Sequence[Tensor], grad: Tensor, out: Tensor) -> Grads:
    size = inputs[0].square().mean(-1, keepdim=True)
    return [torch.where(size < 1e-4 * size.mean(), grads[0] * 0.5, grads[0]), *grads[1:]]


def _sums_off(grads: Grads, inputs: Sequence[Tensor], grad: Tensor, out: Tensor) -> Grads:
    """The running sum of the backward starts again every 256 entries."""
    parts = grad.unflatten(-1, (-1, 256)).flip(-1).cumsum(-1).flip(-1)
    return [parts.flatten(-2)]


def _zeroed_small_keys(grads: Grads, inputs: Sequence[Tensor], grad: Tensor, out: Tensor) -> Grads:
    return [grads[0], torch.where(grads[1].abs() < 1e-3 * grads[1].abs().max(), 0.0, grads[1]), grads[2]]


def _hidden(function: str, where: str, kind: str, change: Change) -> Hidden:
    return Hidden(function=function, where=where, kind=kind, change=change)


HIDDEN: tuple[Hidden, ...] = (
    # What half precision let through.
    _hidden("causal attention", "dk of the last 16 of 256 keys zero", "block", _span(1, -2, -16, None, 0.0)),
    _hidden("rms norm", "dx times 1.05", "size", _scaled(0, _all, 1.05)),
    _hidden("rms norm", "dw without one of 4,096 rows", "row", _one_row_left_out),
    _hidden("gelu", "zero beyond 4", "tail", _scaled(0, _beyond(4.0), 0.0)),
    _hidden("softmax", "zero where p < 1e-4", "tail", _softmax_small(1e-4, 0.0)),
    # Tails.
    _hidden("gelu", "10 % off beyond 3.5", "tail", _scaled(0, _beyond(3.5), 1.1)),
    _hidden("gelu", "halved below -5", "tail", _scaled(0, lambda g, x, s, o: x > 5, 0.5)),
    _hidden("silu", "zero beyond 6", "tail", _scaled(0, _beyond(6.0), 0.0)),
    _hidden("silu", "5 % off beyond 4.5", "tail", _scaled(0, _beyond(4.5), 1.05)),
    _hidden("tanh", "twice where saturated", "tail", _scaled(0, lambda g, x, s, o: o.abs() > 0.999, 2.0)),
    _hidden("sigmoid", "zero where saturated", "tail", _scaled(0, lambda g, x, s, o: (o - 0.5).abs() > 0.49, 0.0)),
    _hidden("softplus", "zero above the threshold", "tail", _scaled(0, lambda g, x, s, o: x > 10, 0.0)),
    _hidden("softmax", "twice where p < 1e-5", "tail", _softmax_small(1e-5, 2.0)),
    _hidden("log softmax", "small probabilities dropped", "tail", _log_softmax_small),
    _hidden("logsumexp", "zero far below the largest", "tail", _scaled(0, lambda g, x, s, o: x < o[:, None] - 9, 0.0)),
    _hidden("gated", "gate's gradient zero below -6", "tail", _scaled(0, lambda g, x, s, o: x < -6, 0.0)),
    _hidden("gated", "up's gradient halved for large up", "tail", _scaled(1, _beyond(5.0), 0.5)),
    _hidden("huber", "slope one beyond delta", "tail", _scaled(0, _beyond(2.0), 0.5)),
    _hidden("squared relu", "clipped beyond 5", "tail", _scaled(0, _beyond(5.0), 0.6)),
    _hidden("soft cap", "zero near the cap", "tail", _scaled(0, lambda g, x, s, o: o.abs() > 4.9, 0.0)),
    _hidden("tanh", "zero for tiny inputs", "tail", _scaled(0, lambda g, x, s, o: x.abs() < 1e-3, 0.0)),
    _hidden("rms norm", "halved for large inputs", "tail", _scaled(0, _beyond(6.0), 0.5)),
    # Last blocks and tiles.
    _hidden("causal attention", "dk of the last key zero", "block", _span(1, -2, -1, None, 0.0)),
    _hidden("causal attention", "dv of the last 8 keys twice", "block", _span(2, -2, -8, None, 2.0)),
    _hidden("causal attention", "dq of the last 16 queries halved", "block", _span(0, -2, -16, None, 0.5)),
    _hidden("causal attention", "dq of the first query tile 20 % off", "block", _span(0, -2, 0, 16, 1.2)),
    _hidden("attention", "dk of the last 8 keys zero", "block", _span(1, -2, -8, None, 0.0)),
    _hidden("attention", "dv of keys 32 to 47 off by 10 %", "block", _span(2, -2, 32, 48, 1.1)),
    _hidden("attention", "last channel of dq halved", "block", _span(0, -1, -1, None, 0.5)),
    _hidden("layer norm", "dx of the last 4 channels off", "block", _span(0, -1, -4, None, 1.2)),
    _hidden("layer norm", "dw of the last channel zero", "block", _span(1, 0, -1, None, 0.0)),
    _hidden("linear", "dw of the last 8 outputs off by 10 %", "block", _span(1, 0, -8, None, 1.1)),
    _hidden("linear", "dx of the last 3 columns zero", "block", _span(0, 1, -3, None, 0.0)),
    _hidden("convolution", "dw of the last tap zero", "block", _span(1, -1, -1, None, 0.0)),
    _hidden("convolution", "dx of the last 2 steps zero", "block", _span(0, -1, -2, None, 0.0)),
    _hidden("cumulative sum", "restarted every 256 entries", "block", _sums_off),
    # Single rows.
    _hidden("rms norm", "dx of the last of 4,096 rows zero", "row", _span(0, 0, -1, None, 0.0)),
    _hidden("rms norm", "dx of row 2,000 of 4,096 twice", "row", _span(0, 0, 2000, 2001, 2.0)),
    _hidden("layer norm", "db without the last of 512 rows", "row", _bias_without_last),
    _hidden("layer norm", "dx of row 100 halved", "row", _span(0, 0, 100, 101, 0.5)),
    _hidden("linear", "dw without row 17 of 1,024", "row", _row_of_linear(17)),
    _hidden("linear", "dw without the last of 1,024 rows", "row", _row_of_linear(-1)),
    _hidden("softmax", "dx of row 31 of 32 off by 10 %", "row", _span(0, 0, 31, 32, 1.1)),
    _hidden("gelu", "dx of row 63 of 64 zero", "row", _span(0, 0, 63, 64, 0.0)),
    # Rare inputs.
    _hidden("softmax", "halved where inputs are sorted", "rare", _if_sorted),
    _hidden("layer norm", "halved where a row is constant", "rare", _if_constant),
    _hidden("softmax", "halved where a row is constant", "rare", _if_constant),
    _hidden("rms norm", "halved where most entries are zero", "rare", _if_mostly_zero),
    _hidden("softmax", "halved where one entry dominates", "rare", _if_one_dominates),
    _hidden("layer norm", "halved where the mean is far from zero", "rare", _if_offset),
    _hidden("gelu", "halved where all inputs are tiny", "rare", _if_tiny),
    _hidden("gelu", "an output gradient beyond 100 is clipped", "rare", _large_slopes(100.0)),
    _hidden("rms norm", "an output gradient beyond 1,000 is clipped", "rare", _large_slopes(1000.0)),
    _hidden("gelu", "halved where the output gradient is mostly zero", "rare", _where_gradient(_mostly_zero)),
    _hidden("silu", "halved where the output gradient is constant", "rare", _where_gradient(_constant)),
    _hidden("causal attention", "dq halved where queries are keys", "rare", _if_alike),
    _hidden("gated", "dgate halved where gate and up are equal", "rare", _if_alike),
    _hidden("gated", "not a number where up is zero", "rare", _scaled(0, lambda g, x, s, o: o == 0, float("nan"))),
    _hidden("product", "zero where an entry is zero", "rare", _scaled(0, lambda g, x, s, o: x == 0, 0.0)),
    _hidden("rms norm", "halved where a row is small beside others", "rare", _if_row_is_small),
    # Small everywhere.
    _hidden("causal attention", "dk times 1.05", "size", _scaled(1, _all, 1.05)),
    _hidden("gelu", "dx times 0.97", "size", _scaled(0, _all, 0.97)),
    _hidden("attention", "small entries of dk zeroed", "size", _zeroed_small_keys),
)


def hidden_function(hidden: Hidden | str, *, only: torch.dtype | None = None, clean: bool = False) -> Forward:
    """The function with its defect, or clean; with `only`, it refuses every other precision, as many kernels do."""
    name = hidden if isinstance(hidden, str) else hidden.function
    change = None if clean or isinstance(hidden, str) else hidden.change
    forward = FUNCTIONS[name][0]

    def call(*inputs: Tensor) -> Tensor:
        if only is not None and inputs[0].dtype != only:
            raise TypeError(f"Expected {only}, got {inputs[0].dtype}.")
        return _Changed.apply(forward, change, *inputs)

    call.__name__ = name.replace(" ", "_")
    return call


def hidden_inputs(name: str, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Normally distributed inputs of the function of that name."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in FUNCTIONS[name][1]]


def names_of(name: str) -> tuple[str, ...]:
    """Names of the inputs of the function of that name."""
    given = {
        "causal attention": ("q", "k", "v"),
        "attention": ("q", "k", "v"),
        "rms norm": ("x", "w"),
        "layer norm": ("x", "w", "b"),
        "gated": ("gate", "up"),
        "linear": ("x", "w"),
        "convolution": ("x", "w"),
    }
    return given.get(name, ("x",))
