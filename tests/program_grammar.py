"""Random small programs over all kinds of operators: each production says what shapes it takes and makes.

A program is a list of steps over a growing pool of values; a step picks values whose shapes fit, may create parameters
or use old ones again, and appends its result. `compose(seed)` gives the same program for the same seed, as a module
that prints as the text of what it computes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shape = tuple[int, ...]
Run = Callable[["Program", list[Tensor]], Tensor]

BATCH = 3
LARGEST_VALUE = 48
"""Entries of a value, per sample."""
MOST_PARAMETERS = 70


@dataclass(frozen=True, slots=True)
class Instruction:
    """One step: what it computes, as text and as a function of the program and the pool."""

    text: str
    run: Run


class Program(nn.Module):
    """A list of instructions with their parameters, from one input to the values that nothing else used."""

    def __init__(self, steps: list[Instruction], parameters: list[Tensor], outputs: list[int]) -> None:
        super().__init__()
        self.p = nn.ParameterList([nn.Parameter(tensor) for tensor in parameters])
        self.steps, self.outputs = steps, outputs
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        pool = [x]
        for step in self.steps:
            pool.append(step.run(self, pool))
        result = tuple(pool[i] for i in self.outputs)
        return result[0] if len(result) == 1 else result

    def __str__(self) -> str:
        shapes = ", ".join(f"p{i}{tuple(p.shape)}" for i, p in enumerate(self.p))
        lines = [f"v{i + 1} = {step.text}" for i, step in enumerate(self.steps)]
        return "\n".join([shapes, *lines, f"return {', '.join(f'v{i}' for i in self.outputs)}"])


@dataclass
class Grower:
    """A program in the making."""

    rng: random.Random
    generator: torch.Generator
    shapes: list[Shape]
    steps: list[Instruction] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    used: set[int] = field(default_factory=set)
    words: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.parameters)

    def pick(self, fits: Callable[[Shape], bool] = lambda shape: True) -> int | None:
        """A value whose shape fits; those that nothing has used yet are more likely."""
        result = [i for i, shape in enumerate(self.shapes) if fits(shape)]
        if not result:
            return None
        return self.rng.choices(result, weights=[1 if i in self.used else 8 for i in result])[0]

    def parameter(self, *shape: int, reuse: bool = True) -> int:
        """A parameter of a shape: a new one, or sometimes an old one."""
        same = [i for i, p in enumerate(self.parameters) if tuple(p.shape) == shape]
        if reuse and same and self.rng.random() < 0.15:
            return self.rng.choice(same)
        self.parameters.append(torch.randn(shape, generator=self.generator))
        return len(self.parameters) - 1

    def width(self) -> int:
        return self.rng.choice((2, 2, 3, 4))

    def add(self, text: str, run: Run, *sources: int) -> None:
        self.steps.append(Instruction(text, run))
        self.used.update(sources)


Production = Callable[[Grower], bool]
PRODUCTIONS: dict[str, tuple[Production, int]] = {}


def production(name: str, weight: int = 2) -> Callable[[Production], Production]:
    def enter(function: Production) -> Production:
        PRODUCTIONS[name] = (function, weight)
        return function

    return enter


def unary(
    name: str,
    text: str,
    function: Callable[[Tensor], Tensor],
    fits: Callable[[Shape], bool] = lambda shape: True,
    weight: int = 1,
) -> None:
    """A production of one value and no parameter; {v} in the text is the value."""

    def grow(g: Grower) -> bool:
        i = g.pick(lambda shape: len(shape) > 1 and fits(shape))
        if i is None:
            return False
        g.add(text.format(v=f"v{i}"), lambda _, pool: function(pool[i]), i)
        return True

    PRODUCTIONS[name] = (grow, weight)


def even(shape: Shape) -> bool:
    return shape[-1] % 2 == 0 and shape[-1] > 0


def sequence(shape: Shape) -> bool:
    return len(shape) == 3


def channels(shape: Shape) -> bool:
    return len(shape) == 3 and shape[2] >= 2


def picture(shape: Shape) -> bool:
    return len(shape) == 4 and shape[2] >= 2 and shape[3] >= 2


# Parametric maps.


@production("linear", 10)
def _(g: Grower) -> bool:
    i = g.pick(lambda s: len(s) in (2, 3) and s[-1] > 0)
    if i is None:
        return False
    m, n = g.width(), g.shapes[i][-1]
    w = g.parameter(m, n)
    if g.rng.random() < 0.4:
        b = g.parameter(m)
        g.add(f"linear(v{i}, p{w}, p{b})", lambda c, pool: F.linear(pool[i], c.p[w], c.p[b]), i)
    else:
        g.add(f"linear(v{i}, p{w})", lambda c, pool: F.linear(pool[i], c.p[w]), i)
    return True


@production("transposed use", 2)
def _(g: Grower) -> bool:
    for w in g.rng.sample(range(len(g.parameters)), len(g.parameters)):
        if g.parameters[w].ndim == 2 and _times(g, w, g.parameters[w].shape[0]):
            return True
    return False


def _times(g: Grower, w: int, size: int) -> bool:
    i = g.pick(lambda s: len(s) in (2, 3) and s[-1] == size)
    if i is None:
        return False
    g.add(f"v{i} @ p{w}", lambda c, pool: pool[i] @ c.p[w], i)
    return True


@production("half of a fused weight", 2)
def _(g: Grower) -> bool:
    i = g.pick(lambda s: len(s) in (2, 3))
    if i is None:
        return False
    n, m = g.shapes[i][-1], 2
    w = g.parameter(2 * m, n)
    half = g.rng.randrange(2)
    g.add(f"linear(v{i}, p{w}.chunk(2)[{half}])", lambda c, pool: F.linear(pool[i], c.p[w].chunk(2)[half]), i)
    return True


@production("fused map", 2)
def _(g: Grower) -> bool:
    i = g.pick(lambda s: len(s) in (2, 3))
    if i is None:
        return False
    w = g.parameter(4, g.shapes[i][-1])
    how = g.rng.choice(("mul", "silu gate", "add"))

    def run(c: Program, pool: list[Tensor]) -> Tensor:
        a, b = F.linear(pool[i], c.p[w]).split(2, dim=-1)
        return a * b if how == "mul" else F.silu(a) * b if how == "silu gate" else a.tanh() + b

    g.add(f"{how} of linear(v{i}, p{w}).split(2)", run, i)
    return True


@production("mixing over positions", 2)
def _(g: Grower) -> bool:
    i = g.pick(lambda s: sequence(s) and s[1] <= 4)
    if i is None:
        return False
    w = g.parameter(g.width(), g.shapes[i][1])
    g.add(f"p{w} @ v{i}", lambda c, pool: c.p[w] @ pool[i], i)
    return True


@production("gain", 3)
def _(g: Grower) -> bool:
    i = g.pick(lambda s: len(s) in (2, 3))
    if i is None:
        return False
    w = g.parameter(g.shapes[i][-1])
    one = g.rng.random() < 0.3
    run: Run = (lambda c, pool: pool[i] * (1 + c.p[w])) if one else (lambda c, pool: pool[i] * c.p[w])
    g.add(f"v{i} * (1 + p{w})" if one else f"v{i} * p{w}", run, i)
    return True


@production("shift", 2)
def _(g: Grower) -> bool:
    i = g.pick(lambda s: len(s) in (2, 3))
    if i is None:
        return False
    shape = g.shapes[i]
    w = g.parameter(*(shape[1:] if g.rng.random() < 0.4 else shape[-1:]))
    g.add(f"v{i} + p{w}", lambda c, pool: pool[i] + c.p[w], i)
    return True


@production("one scale", 1)
def _(g: Grower) -> bool:
    i = g.pick(lambda s: len(s) > 1)
    if i is None:
        return False
    w = g.parameter(1)
    how = g.rng.choice(("times", "exp", "over"))
    run: Run = {
        "times": lambda c, pool: pool[i] * c.p[w],
        "exp": lambda c, pool: pool[i] * c.p[w].exp(),
        "over": lambda c, pool: pool[i] / (c.p[w] ** 2 + 0.5),
    }[how]
    g.add(f"v{i} {how} p{w}", run, i)
    return True


@production("stacked heads", 2)
def _(g: Grower) -> bool:
    i = g.pick(lambda s: sequence(s) and s[2] <= 4)
    if i is None:
        return False
    w = g.parameter(2, g.shapes[i][2], 2)
    g.add(
        f"einsum('btd,hde->bthe', v{i}, p{w}).flatten(2)",
        lambda c, pool: torch.einsum("btd,hde->bthe", pool[i], c.p[w]).flatten(2),
        i,
    )
    return True


@production("bilinear form", 1)
def _(g: Grower) -> bool:
    i = g.pick(lambda s: len(s) == 2 and s[1] <= 3)
    j = g.pick(lambda s: len(s) == 2 and s[1] <= 3)
    if i is None or j is None:
        return False
    w = g.parameter(2, g.shapes[i][1], g.shapes[j][1])
    g.add(f"bilinear(v{i}, v{j}, p{w})", lambda c, pool: F.bilinear(pool[i], pool[j], c.p[w]), i, j)
    return True


@production("convolution", 4)
def _(g: Grower) -> bool:
    i = g.pick(channels)
    if i is None:
        return False
    n = g.shapes[i][1]
    depthwise = g.rng.random() < 0.3
    m = n if depthwise else g.width()
    w = g.parameter(m, 1 if depthwise else n, 2)
    groups = n if depthwise else 1
    b = g.parameter(m) if g.rng.random() < 0.4 else None

    def run(c: Program, pool: list[Tensor]) -> Tensor:
        return F.conv1d(pool[i], c.p[w], None if b is None else c.p[b], padding=1, groups=groups)

    g.add(f"conv1d(v{i}, p{w}, {'None' if b is None else f'p{b}'}, padding=1, groups={groups})", run, i)
    return True


@production("transposed convolution", 2)
def _(g: Grower) -> bool:
    i = g.pick(channels)
    if i is None:
        return False
    w = g.parameter(g.shapes[i][1], g.width(), 2)
    g.add(f"conv_transpose1d(v{i}, p{w})", lambda c, pool: F.conv_transpose1d(pool[i], c.p[w]), i)
    return True


@production("convolution of pictures", 3)
def _(g: Grower) -> bool:
    i = g.pick(picture)
    if i is None:
        return False
    w = g.parameter(g.width(), g.shapes[i][1], 2, 2)
    g.add(f"conv2d(v{i}, p{w})", lambda c, pool: F.conv2d(pool[i], c.p[w]), i)
    return True


@production("weight norm", 1)
def _(g: Grower) -> bool:
    i = g.pick(lambda s: len(s) == 2)
    if i is None:
        return False
    m = g.width()
    w, s = g.parameter(m, g.shapes[i][1]), g.parameter(m, 1)
    g.add(
        f"linear(v{i}, p{s} * p{w} / p{w}.norm(dim=1))",
        lambda c, pool: F.linear(pool[i], c.p[s] * c.p[w] / c.p[w].norm(dim=1, keepdim=True)),
        i,
    )
    return True


@production("low rank", 1)
def _(g: Grower) -> bool:
    i = g.pick(lambda s: len(s) in (2, 3))
    if i is None:
        return False
    a, b = g.parameter(2, g.shapes[i][-1]), g.parameter(3, 2)
    g.add(f"linear(v{i}, p{b} @ p{a})", lambda c, pool: F.linear(pool[i], c.p[b] @ c.p[a]), i)
    return True


@production("attention", 4)
def _(g: Grower) -> bool:
    i = g.pick(lambda s: sequence(s) and s[2] <= 4)
    if i is None:
        return False
    n = g.shapes[i][2]
    q, k, v = g.parameter(4, n, reuse=False), g.parameter(4, n), g.parameter(4, n)
    heads, how = g.rng.choice((1, 2)), g.rng.choice(("softmax", "sdpa", "linear", "relu", "causal"))

    def run(c: Program, pool: list[Tensor]) -> Tensor:
        x = pool[i]
        a, b, d = (F.linear(x, c.p[w]).unflatten(-1, (heads, -1)).transpose(1, 2) for w in (q, k, v))
        if how in ("sdpa", "causal"):
            y = F.scaled_dot_product_attention(a, b, d, is_causal=how == "causal")
        else:
            scores = a @ b.mT
            y = (scores.softmax(-1) if how == "softmax" else scores.relu() if how == "relu" else scores / 3) @ d
        return y.transpose(1, 2).flatten(2)

    g.add(f"attention(v{i}; p{q}, p{k}, p{v}; {heads} heads, {how})", run, i)
    return True


@production("normalisation", 5)
def _(g: Grower) -> bool:
    i = g.pick(lambda s: len(s) in (2, 3) and s[-1] >= 3)
    if i is None:
        return False
    n = g.shapes[i][-1]
    how = g.rng.choice(("layer", "rms", "rms by hand", "unit", "layer by hand"))
    affine = g.rng.random() < 0.6
    w = g.parameter(n) if affine else None

    def run(c: Program, pool: list[Tensor]) -> Tensor:
        x, gain = pool[i], None if w is None else c.p[w]
        if how == "layer":
            return F.layer_norm(x, (n,), gain)
        if how == "rms":
            return F.rms_norm(x, (n,), gain, eps=c.eps)
        if how == "unit":
            y = F.normalize(x, dim=-1)
        elif how == "rms by hand":
            y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + c.eps)
        else:
            y = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + c.eps).sqrt()
        return y if gain is None else y * gain

    g.add(f"{how} norm(v{i}{'' if w is None else f', p{w}'})", run, i)
    return True


@production("channel norm", 2)
def _(g: Grower) -> bool:
    i = g.pick(lambda s: len(s) == 3 and s[1] % 2 == 0 and s[2] >= 2)
    if i is None:
        return False
    n = g.shapes[i][1]
    w, b = g.parameter(n), g.parameter(n)
    how = g.rng.choice(("group", "batch", "instance"))

    def run(c: Program, pool: list[Tensor]) -> Tensor:
        if how == "group":
            return F.group_norm(pool[i], 2, c.p[w], c.p[b])
        if how == "instance":
            return F.instance_norm(pool[i], weight=c.p[w], bias=c.p[b])
        return F.batch_norm(pool[i], None, None, c.p[w], c.p[b], training=True)

    g.add(f"{how} norm(v{i}, p{w}, p{b})", run, i)
    return True


@production("PReLU", 1)
def _(g: Grower) -> bool:
    i = g.pick(lambda s: len(s) == 2)
    if i is None:
        return False
    w = g.parameter(g.shapes[i][1] if g.rng.random() < 0.5 else 1)
    g.add(f"prelu(v{i}, p{w})", lambda c, pool: F.prelu(pool[i], c.p[w]), i)
    return True


@production("router", 2)
def _(g: Grower) -> bool:
    i = g.pick(lambda s: len(s) == 2 and s[1] <= 4)
    if i is None:
        return False
    n = g.shapes[i][1]
    w, e = g.parameter(2, n, reuse=False), g.parameter(2, 2, n)
    gate = g.rng.choice(("softmax", "sigmoid"))

    def run(c: Program, pool: list[Tensor]) -> Tensor:
        scores = F.linear(pool[i], c.p[w])
        weight = scores.softmax(-1) if gate == "softmax" else scores.sigmoid()
        return torch.einsum("be,eon,bn->bo", weight, c.p[e], pool[i])

    g.add(f"experts(v{i}; router p{w} {gate}, p{e})", run, i)
    return True


@production("look-up", 2)
def _(g: Grower) -> bool:
    i = g.pick(lambda s: len(s) in (2, 3))
    if i is None:
        return False
    w = g.parameter(3, g.shapes[i][-1])

    def run(c: Program, pool: list[Tensor]) -> Tensor:
        indices = (pool[0].flatten(1)[:, 0] > 0).long() + (pool[0].flatten(1)[:, 1] > 0).long()
        result = F.embedding(indices, c.p[w])
        return pool[i] + (result if pool[i].ndim == 2 else result[:, None])

    g.add(f"v{i} + embedding(signs of v0, p{w})", run, i)
    return True


# Functions of one value.

unary("relu", "relu({v})", torch.relu, weight=5)
unary("leaky relu", "leaky_relu({v}, 0.1)", lambda v: F.leaky_relu(v, 0.1), weight=2)
unary("abs", "{v}.abs()", torch.abs)
unary("square", "{v} ** 2", lambda v: v**2)
unary("cube", "{v} ** 3", lambda v: v**3)
unary("relu squared", "relu({v}) ** 2", lambda v: torch.relu(v).square())
unary("tanh", "tanh({v})", torch.tanh, weight=2)
unary("gelu", "gelu({v})", F.gelu)
unary("silu", "silu({v})", F.silu)
unary("sigmoid", "sigmoid({v})", torch.sigmoid)
unary("softplus", "softplus({v})", F.softplus)
unary("exp", "exp({v} / 4)", lambda v: torch.exp(v / 4))
unary("elu", "elu({v})", F.elu)
unary("clamp from below", "{v}.clamp(min=0)", lambda v: v.clamp(min=0))
unary("clamp", "{v}.clamp(-1, 1)", lambda v: v.clamp(-1, 1))
unary("relu6", "relu6({v})", F.relu6)
unary("negative", "-{v}", torch.neg)
unary("constant factor", "0.5 * {v}", lambda v: 0.5 * v)
unary("constant term", "{v} + 0.3", lambda v: v + 0.3)
unary("root", "sqrt({v} ** 2 + 0.1)", lambda v: torch.sqrt(v**2 + 0.1))
unary("sin", "sin({v})", torch.sin)
unary("softmax", "softmax({v}, -1)", lambda v: v.softmax(-1), weight=2)
unary("softmax over positions", "softmax({v}, 1)", lambda v: v.softmax(1), sequence)
unary("log-softmax", "log_softmax({v}, -1)", lambda v: v.log_softmax(-1))
unary("log-sum-exp", "logsumexp({v}, -1, keepdim)", lambda v: v.logsumexp(-1, keepdim=True))
unary("mean", "{v}.mean(-1, keepdim)", lambda v: v.mean(-1, keepdim=True))
unary("sum over positions", "{v}.sum(1)", lambda v: v.sum(1), sequence)
unary("mean over positions", "{v}.mean(1)", lambda v: v.mean(1), sequence)
unary("largest over positions", "{v}.amax(1)", lambda v: v.amax(1), sequence)
unary("largest", "{v}.max(-1, keepdim).values", lambda v: v.max(-1, keepdim=True).values)
unary("norm", "{v}.norm(dim=-1, keepdim)", lambda v: v.norm(dim=-1, keepdim=True))
unary("product", "{v}.prod(-1, keepdim)", lambda v: v.prod(-1, keepdim=True), lambda s: s[-1] <= 3)
unary("centred", "{v} - {v}.mean(-1, keepdim)", lambda v: v - v.mean(-1, keepdim=True))
unary("running sum", "{v}.cumsum(1)", lambda v: v.cumsum(1))
unary("flip", "{v}.flip(-1)", lambda v: v.flip(-1))
unary("roll", "{v}.roll(1, -1)", lambda v: v.roll(1, -1))
unary("sorted", "{v}.sort(-1).values", lambda v: v.sort(-1).values)
unary("transpose", "{v}.transpose(1, 2)", lambda v: v.transpose(1, 2), sequence, 2)
unary("flatten", "{v}.flatten(1)", lambda v: v.flatten(1), lambda s: len(s) > 2, 2)
unary(
    "split the last axis",
    "{v}.unflatten(-1, (2, -1))",
    lambda v: v.unflatten(-1, (2, -1)),
    lambda s: len(s) == 2 and even(s),
    2,
)
unary("first half", "{v}[..., :n/2]", lambda v: v[..., : v.shape[-1] // 2], lambda s: s[-1] >= 2)
unary("all but the first", "{v}[..., 1:]", lambda v: v[..., 1:], lambda s: s[-1] >= 2)
unary("every second", "{v}[..., ::2]", lambda v: v[..., ::2], lambda s: s[-1] >= 3)
unary("one entry", "{v}[..., 0]", lambda v: v[..., 0], lambda s: len(s) > 2)
unary("pad", "pad({v}, (1, 0))", lambda v: F.pad(v, (1, 0)))
unary("repeat", "{v}.repeat(…, 2)", lambda v: torch.cat((v, v), -1))
unary("repeat each", "{v}.repeat_interleave(2, -1)", lambda v: v.repeat_interleave(2, -1))
unary("pick entries", "{v}[..., [0, 0]]", lambda v: v[..., torch.tensor([0, 0])])
unary("permute entries", "{v}[..., reversed]", lambda v: v.index_select(-1, torch.arange(v.shape[-1] - 1, -1, -1)))
unary("mask", "{v}.masked_fill(first, 0)", lambda v: v.masked_fill(torch.arange(v.shape[-1]) == 0, 0.0))
unary("lower triangle", "{v}.tril()", lambda v: v.tril(), sequence)
unary("glu", "glu({v})", F.glu, even)
unary("gate by itself", "{v}_a * relu({v}_b)", lambda v: v.chunk(2, -1)[0] * v.chunk(2, -1)[1].relu(), even)
unary("rotate by constants", "rotary({v})", lambda v: _rotated(v), even)
unary("pairwise maximum", "{v} pairs .amax", lambda v: v.unflatten(-1, (-1, 2)).amax(-1), even)
unary("max-pool", "max_pool1d({v}, 2)", lambda v: F.max_pool1d(v, 2), lambda s: channels(s) and s[2] >= 2)
unary("avg-pool", "avg_pool1d({v}, 2)", lambda v: F.avg_pool1d(v, 2), lambda s: channels(s) and s[2] >= 2)
unary(
    "upsample", "interpolate({v}, 2)", lambda v: F.interpolate(v, scale_factor=2), lambda s: channels(s) and s[2] <= 3
)
unary("global pool", "{v}.mean((2, 3))", lambda v: v.mean((2, 3)), picture, 2)
unary("scores with itself", "{v} @ {v}ᵀ", lambda v: v @ v.mT, sequence)
unary("detached factor", "{v} * {v}.detach()", lambda v: v * v.detach())
unary("straight through", "{v} + (tanh({v}) − {v}).detach()", lambda v: v + (v.tanh() - v).detach())
unary("over its largest", "{v} / ({v}.abs().amax(-1, keepdim) + 1)", lambda v: v / (v.abs().amax(-1, keepdim=True) + 1))
unary(
    "over its norm", "{v} / {v}.norm(dim=-1, keepdim)", lambda v: v / v.norm(dim=-1, keepdim=True), lambda s: s[-1] >= 2
)
unary("over its sum", "softplus({v}) / sum", lambda v: F.softplus(v) / F.softplus(v).sum(-1, keepdim=True))
unary("threshold", "where({v} > 0.2, {v}, 0)", lambda v: torch.where(v > 0.2, v, torch.zeros_like(v)))
unary("written in place", "{v}.clone(), first entry added to", lambda v: _raised(v))
unary(
    "scattered",
    "zeros.index_add(-1, …, {v})",
    lambda v: torch.zeros_like(v).index_add(-1, torch.arange(v.shape[-1]) // 2, v),
)


def _rotated(v: Tensor) -> Tensor:
    half = v.shape[-1] // 2
    angle = torch.arange(1, half + 1, dtype=v.dtype) * 0.7
    a, b = v[..., :half], v[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def _raised(v: Tensor) -> Tensor:
    w = v.clone()
    w[..., 0] += 1.0
    return w


# Functions of two values.


def binary(name: str, sign: str, function: Callable[[Tensor, Tensor], Tensor], weight: int = 2) -> None:
    def grow(g: Grower) -> bool:
        i = g.pick(lambda s: len(s) > 1)
        if i is None:
            return False
        j = g.pick(
            lambda s: s == g.shapes[i] or (len(s) == len(g.shapes[i]) and s[:-1] == g.shapes[i][:-1] and s[-1] == 1)
        )
        if j is None or (j == i and len(g.shapes) > 1 and g.rng.random() < 0.8):
            return False
        g.add(f"v{i} {sign} v{j}", lambda _, pool: function(pool[i], pool[j]), i, j)
        return True

    PRODUCTIONS[name] = (grow, weight)


binary("add", "+", torch.add, 6)
binary("subtract", "−", torch.sub, 2)
binary("multiply", "*", torch.mul, 5)
binary("divide", "/ (1 + ²)", lambda a, b: a / (1 + b * b), 1)
binary("gate", "* sigmoid", lambda a, b: a * torch.sigmoid(b), 2)
binary("maximum", "max", torch.maximum, 1)
binary("choice", "where > 0 else", lambda a, b: torch.where(a > 0, a, b.expand_as(a)), 1)
binary("mix", "lerp 0.3", lambda a, b: torch.lerp(a, b.expand_as(a), 0.3), 1)


@production("concatenate", 3)
def _(g: Grower) -> bool:
    i = g.pick(lambda s: len(s) > 1)
    if i is None:
        return False
    j = g.pick(lambda s: len(s) == len(g.shapes[i]) and s[:-1] == g.shapes[i][:-1])
    if j is None:
        return False
    g.add(f"cat(v{i}, v{j})", lambda _, pool: torch.cat((pool[i], pool[j]), -1), i, j)
    return True


@production("matrix product", 2)
def _(g: Grower) -> bool:
    i = g.pick(sequence)
    if i is None:
        return False
    j = g.pick(lambda s: sequence(s) and s[-1] == g.shapes[i][-1])
    if j is None:
        return False
    g.add(f"v{i} @ v{j}ᵀ", lambda _, pool: pool[i] @ pool[j].mT, i, j)
    return True


@production("scalar product", 1)
def _(g: Grower) -> bool:
    i = g.pick(lambda s: len(s) == 2)
    j = g.pick(lambda s: len(s) == 2 and i is not None and s == g.shapes[i])
    if i is None or j is None or i == j:
        return False
    g.add(f"(v{i} * v{j}).sum(-1, keepdim)", lambda _, pool: (pool[i] * pool[j]).sum(-1, keepdim=True), i, j)
    return True


INPUTS: list[Shape] = [(BATCH, 3), (BATCH, 3), (BATCH, 3, 2), (BATCH, 3, 4), (BATCH, 2, 3, 3)]


def compose(seed: int, *, arguments: bool = False) -> tuple[Program, Tensor, str, str]:
    """The program of a seed, an example input, the loss and the productions it was made with.

    With `arguments`, operators are drawn with all their arguments as well: see `argument_productions`.
    """
    table = PRODUCTIONS
    if arguments:
        from argument_productions import ARGUMENTS

        table = {**PRODUCTIONS, **ARGUMENTS}
    for retry in range(100):
        made = _compose(random.Random(1000 * seed + retry), seed + 7919 * retry, table)
        if made is not None:
            return made
    raise AssertionError(f"No program for seed {seed}.")


def _compose(
    rng: random.Random, seed: int, table: dict[str, tuple[Production, int]]
) -> tuple[Program, Tensor, str, str] | None:
    generator = torch.Generator().manual_seed(seed)
    shape = rng.choice(INPUTS)
    x = torch.randn(shape, generator=generator)
    g = Grower(rng=rng, generator=generator, shapes=[shape])
    pool = [x]
    wanted = rng.randint(3, 9)
    names, weights = list(table), [weight for _, weight in table.values()]
    for _ in range(60):
        if len(g.steps) >= wanted:
            break
        word = rng.choices(names, weights)[0]
        before = (len(g.steps), len(g.parameters), set(g.used))
        if not table[word][0](g):
            continue
        try:
            with torch.no_grad():
                value = g.steps[-1].run(_Trial(g.parameters), pool)  # type: ignore[arg-type]
        except RuntimeError:
            if table is PRODUCTIONS:
                raise
            # Arguments that do not fit a shape, such as a padding wider than what is padded.
            value = torch.full((1,), torch.inf)
        too_much = value.numel() // BATCH > LARGEST_VALUE or g.size > MOST_PARAMETERS
        if too_much or not bool(torch.isfinite(value).all()) or float(value.abs().max()) > 1e3:
            del g.steps[before[0] :], g.parameters[before[1] :]
            g.used = before[2]
            continue
        pool.append(value)
        g.shapes.append(tuple(value.shape))
        g.words.append(word)
    if not g.parameters or not g.steps:
        return None
    outputs = [i for i in range(1, len(pool)) if i not in g.used]
    width = sum(pool[i].numel() // BATCH for i in outputs)
    if width <= 8 and rng.random() < 0.6:
        w = g.parameter(2, width)
        read = tuple(outputs)
        text = ", ".join(f"v{i}" for i in read)
        g.add(
            f"linear(cat({text}), p{w})", lambda c, p: F.linear(torch.cat([p[i].flatten(1) for i in read], 1), c.p[w])
        )
        with torch.no_grad():
            pool.append(g.steps[-1].run(_Trial(g.parameters), pool))  # type: ignore[arg-type]
        g.words.append("readout")
        outputs = [len(pool) - 1]
    last = pool[outputs[0]]
    classes = len(outputs) == 1 and last.ndim >= 2 and last.shape[-1] >= 2 and rng.random() < 0.4
    program = Program(g.steps, g.parameters, outputs)
    result = program(x)
    flat = torch.cat([t.flatten() for t in (result if isinstance(result, tuple) else (result,))])
    if not flat.requires_grad:
        return None
    return program, x, "cross_entropy" if classes else "regression", ", ".join(g.words)


class _Trial:
    """Stands for the program while it grows."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.p = parameters
        self.eps = 1e-6


def build(
    seed: int, *, arguments: bool = False
) -> Callable[[], tuple[nn.Module, tuple[Tensor, ...], dict[str, Tensor]]]:
    """A builder of one program, for the checks."""

    def make() -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Tensor]]:
        program, x, _, _ = compose(seed, arguments=arguments)
        return program, (x,), {}

    return make
