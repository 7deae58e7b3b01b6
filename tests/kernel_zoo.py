"""Functions with right gradients, on random shapes and precisions: what a check must never call wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from broken_kernels import FAMILIES, kernel
from hidden_defects import FUNCTIONS, hidden_function

Drawn = tuple[Callable[..., Any], list[Any]]


class Draw:
    """Random sizes and tensors from one seed."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype

    def size(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def tensor(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, generator=self.generator)).to(self.dtype)

    def chance(self) -> bool:
        return bool(self.size(0, 1))


def _rotated(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    index, pair = torch.arange(x.shape[-2], device=x.device), torch.arange(half, device=x.device)
    angle = index[:, None] * torch.exp(-pair / 2)
    cos, sin = angle.cos().to(x), angle.sin().to(x)
    left, right = x[..., :half], x[..., half:]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


def _attention(draw: Draw) -> Drawn:
    batch, heads, width = draw.size(1, 3), draw.size(1, 3), 2 * draw.size(2, 10)
    group, queries = draw.size(1, 2), draw.size(3, 40)
    causal, rotary, capped, window = (draw.chance() for _ in range(4))
    keys = queries if causal or window else draw.size(3, 40)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if rotary:
            q, k = _rotated(q), _rotated(k)
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if capped:
            scores = 5 * torch.tanh(scores / 5)
        queries_at, keys_at = (torch.arange(each.shape[-2], device=q.device) for each in (q, k))
        steps = queries_at[:, None] - keys_at[None, :]
        hidden = torch.zeros_like(steps, dtype=torch.bool)
        hidden |= (steps < 0) if causal else hidden
        hidden |= (steps.abs() > 5) if window else hidden
        return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v

    sizes = [(group * heads, queries), (heads, keys), (heads, keys)]
    return attention, [draw.tensor(batch, count, length, width) for count, length in sizes]


def _sdpa(draw: Draw) -> Drawn:
    shape = (draw.size(1, 3), draw.size(1, 4), draw.size(2, 70), 8 * draw.size(1, 8))
    causal = draw.chance()

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return attention, [draw.tensor(*shape) for _ in range(3)]


def _norm(draw: Draw) -> Drawn:
    shape, width = [draw.size(1, 5) for _ in range(draw.size(1, 3))], draw.size(4, 70)
    x, weight, bias = draw.tensor(*shape, width), draw.tensor(width), draw.tensor(width)
    if draw.chance():
        return (lambda x, weight: F.rms_norm(x, (width,), weight, 1e-6)), [x, weight]
    return (lambda x, weight, bias: F.layer_norm(x, (width,), weight, bias)), [x, weight, bias]


def _group_norm(draw: Draw) -> Drawn:
    groups, each = draw.size(1, 4), draw.size(2, 5)
    x = draw.tensor(draw.size(1, 3), groups * each, draw.size(3, 12))
    channels = [draw.tensor(groups * each) for _ in range(2)]
    return (lambda x, weight, bias: F.group_norm(x, groups, weight, bias)), [x, *channels]


def _activation(draw: Draw) -> Drawn:
    options: list[Callable[[Tensor], Tensor]] = [
        F.gelu,
        F.silu,
        torch.tanh,
        lambda x: F.relu(x) ** 2,
        F.softplus,
        lambda x: x.softmax(-1),
        lambda x: F.normalize(x.float(), dim=-1).to(x.dtype),
        lambda x: x.cumsum(-1),
        F.elu,
        lambda x: torch.tanh(0.05 * x),
    ]
    chosen = options[draw.size(0, len(options) - 1)]
    return (lambda x: chosen(x)), [draw.tensor(draw.size(1, 9), draw.size(2, 50))]


def _gated(draw: Draw) -> Drawn:
    act = (F.silu, F.gelu, torch.sigmoid, F.relu)[draw.size(0, 3)]
    shape = (draw.size(1, 4), draw.size(1, 9), draw.size(3, 40))
    return (lambda gate, up: act(gate) * up), [draw.tensor(*shape), draw.tensor(*shape)]


def _losses(draw: Draw) -> Drawn:
    rows, classes, width = draw.size(2, 30), draw.size(3, 50), draw.size(3, 20)
    target = torch.randint(classes, (rows,), generator=draw.generator)
    target[0] = -100 if draw.chance() and rows > 2 else target[0]
    how = ("mean", "sum", "none")[draw.size(0, 2)]
    smooth = 0.1 * draw.size(0, 1)
    if draw.chance():
        return (
            lambda logits: F.cross_entropy(
                logits.float(), target.to(logits.device), reduction=how, label_smoothing=smooth
            )
        ), [draw.tensor(rows, classes)]
    return (
        lambda hidden, weight: F.cross_entropy(
            (hidden @ weight.T).float(), target.to(hidden.device), reduction=how, label_smoothing=smooth
        )
    ), [draw.tensor(rows, width), draw.tensor(classes, width, scale=width**-0.5)]


def _linear(draw: Draw) -> Drawn:
    rows, wide, out = draw.size(1, 12), draw.size(2, 40), draw.size(2, 40)
    if draw.chance():
        return F.linear, [draw.tensor(rows, wide), draw.tensor(out, wide), draw.tensor(out)]
    return (lambda x, w, b: torch.relu(x @ w) @ b), [
        draw.tensor(rows, wide),
        draw.tensor(wide, out),
        draw.tensor(out, 3),
    ]


def _convolution(draw: Draw) -> Drawn:
    batch, into, out, taps = draw.size(1, 3), draw.size(1, 6), draw.size(1, 6), draw.size(1, 4)
    x, weight = draw.tensor(batch, into, draw.size(6, 20)), draw.tensor(out, into, taps)
    return (lambda x, weight, bias: F.conv1d(x, weight, bias, padding=taps - 1)), [x, weight, draw.tensor(out)]


def _recurrence(draw: Draw) -> Drawn:
    """A gated linear recurrence, step by step, that keeps its state in float32."""
    batch, length, width, value = draw.size(1, 3), draw.size(2, 14), draw.size(2, 6), draw.size(2, 6)

    def scan(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        kind = torch.promote_types(q.dtype, torch.float32)
        state = torch.zeros(q.shape[0], q.shape[2], v.shape[2], dtype=kind, device=q.device)
        outs = []
        for step in range(q.shape[1]):
            decay = torch.sigmoid(gate[:, step].to(state.dtype))[:, :, None]
            state = decay * state + k[:, step, :, None] * v[:, step, None, :]
            outs.append((q[:, step, :, None] * state).sum(1))
        return torch.stack(outs, 1).to(q.dtype), state

    shapes = [(batch, length, width), (batch, length, width), (batch, length, value), (batch, length, width)]
    return scan, [draw.tensor(*shape) for shape in shapes]


def _embedding(draw: Draw) -> Drawn:
    rows, width = draw.size(3, 12), draw.size(2, 20)
    index = torch.randint(rows, (draw.size(1, 4), draw.size(1, 9)), generator=draw.generator)
    return (lambda table, index: F.embedding(index, table)), [draw.tensor(rows, width), index]


def _residual(draw: Draw) -> Drawn:
    shape = (draw.size(1, 4), draw.size(1, 6), draw.size(4, 40))

    def add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return F.rms_norm(total, shape[-1:], weight, 1e-6), total

    return add_norm, [draw.tensor(*shape), draw.tensor(*shape), draw.tensor(shape[-1])]


def _right_kernel(draw: Draw) -> Drawn:
    name = list(FAMILIES)[draw.size(0, len(FAMILIES) - 1)]
    return kernel(name), [draw.tensor(*shape) for shape in FAMILIES[name].draw(draw.size)]


def _rounded(draw: Draw) -> Drawn:
    """A function whose backward computes in float32 and rounds at the end, on small, usual or large inputs."""
    name = list(FUNCTIONS)[draw.size(0, len(FUNCTIONS) - 1)]
    scale = (0.25, 1.0, 1.0, 3.0)[draw.size(0, 3)]
    shapes = [tuple(min(size, 256) for size in shape) for shape in FUNCTIONS[name][1]]
    return hidden_function(name), [draw.tensor(*shape, scale=scale) for shape in shapes]


def _only(fn: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """The function as a kernel that takes one precision and has no more precise form."""

    def call(*inputs: Any) -> Any:
        other = [each.dtype for each in inputs if isinstance(each, Tensor) and each.is_floating_point()]
        if any(kind != dtype for kind in other):
            raise TypeError(f"Expected {dtype}, got {other}.")
        return fn(*inputs)

    return call


ZOO: tuple[Callable[[Draw], Drawn], ...] = (
    _attention,
    _sdpa,
    _norm,
    _group_norm,
    _activation,
    _gated,
    _losses,
    _linear,
    _convolution,
    _recurrence,
    _embedding,
    _residual,
    _right_kernel,
    _rounded,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def drawn(seed: int) -> tuple[str, torch.dtype, Callable[..., Any], list[Any]]:
    """A function of the zoo with inputs: its name, the precision, itself, the inputs.

    In half precision every second one takes no other precision.
    """
    maker = ZOO[seed % len(ZOO)]
    dtype = DTYPES[(seed // len(ZOO)) % len(DTYPES)]
    fn, inputs = maker(Draw(seed, dtype))
    name = maker.__name__.strip("_")
    if dtype in (torch.bfloat16, torch.float16) and (seed // (len(ZOO) * len(DTYPES))) % 2:
        return f"{name}, no other precision", dtype, _only(fn, dtype), inputs
    return name, dtype, fn, inputs
