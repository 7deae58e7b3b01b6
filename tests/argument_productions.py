"""Productions of the program grammar that draw the arguments of operators: dims, modes, indices, slices, reductions.

Each draws a function of one value as text and as code; `program_grammar.compose(seed, arguments=True)` uses them beside
the others, and more often than those.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from program_grammar import Grower, Production, Shape

Drawn = tuple[str, Callable[[Tensor], Tensor]]
Draw = Callable[[random.Random, Shape], Drawn | None]

ARGUMENTS: dict[str, tuple[Production, int]] = {}


def drawn(name: str, weight: int = 3) -> Callable[[Draw], Draw]:
    """Register a function that draws arguments for a value of a shape; {v} in its text is the value."""

    def enter(draw: Draw) -> Draw:
        def grow(g: Grower) -> bool:
            i = g.pick(lambda shape: len(shape) > 1 and 0 not in shape)
            result = None if i is None else draw(g.rng, g.shapes[i])
            if i is None or result is None:
                return False
            text, function = result
            g.add(text.format(v=f"v{i}"), lambda _, pool: function(pool[i]), i)
            return True

        ARGUMENTS[name] = (grow, weight)
        return draw

    return enter


def _dim(rng: random.Random, shape: Shape, least: int = 1) -> int | None:
    """An axis other than the samples', counted from the front or the back."""
    fitting = [d for d in range(1, len(shape)) if shape[d] >= least]
    if not fitting:
        return None
    dim = rng.choice(fitting)
    return dim if rng.random() < 0.5 else dim - len(shape)


def _indices(rng: random.Random, size: int, *, negative: bool = True) -> list[int]:
    low = -size if negative else 0
    return [rng.randrange(low, size) for _ in range(rng.randint(1, size + 1))]


@drawn("slices", 6)
def _slices(rng: random.Random, shape: Shape) -> Drawn | None:
    index: list[Any] = [slice(None)]
    for size in shape[1:]:
        start = rng.choice((None, 0, 1, -2, -size))
        index.append(slice(start, rng.choice((None, size, -1, size - 1)), rng.choice((None, 1, 2))))
    chosen = tuple(index)
    if 0 in torch.empty(shape)[chosen].shape:
        return None
    return f"{{v}}[{chosen}]", lambda v: v[chosen]


@drawn("difference of slices", 4)
def _differences(rng: random.Random, shape: Shape) -> Drawn | None:
    dim = _dim(rng, shape, 2)
    if dim is None:
        return None
    size = shape[dim]
    a, b = rng.choice(((0, 1), (1, 0)))
    sign = rng.choice((1, -1))
    return (
        f"{{v}} narrow {a} {sign} narrow {b} along {dim}",
        lambda v: v.narrow(dim, a, size - 1) + sign * v.narrow(dim, b, size - 1),
    )


@drawn("indexed", 5)
def _indexed(rng: random.Random, shape: Shape) -> Drawn | None:
    dim = _dim(rng, shape)
    if dim is None:
        return None
    index = torch.tensor(_indices(rng, shape[dim]))
    position = (slice(None),) * (dim % len(shape))
    return f"{{v}}[{position}, {index.tolist()}]", lambda v: v[(*position, index)]


@drawn("indexed twice", 2)
def _indexed_twice(rng: random.Random, shape: Shape) -> Drawn | None:
    if len(shape) < 3:
        return None
    count = rng.randint(1, 4)
    a, b = (torch.tensor([rng.randrange(-n, n) for _ in range(count)]) for n in shape[1:3])
    return f"{{v}}[:, {a.tolist()}, {b.tolist()}]", lambda v: v[:, a, b]


@drawn("moved and subtracted", 6)
def _moved(rng: random.Random, shape: Shape) -> Drawn | None:
    dim = _dim(rng, shape, 2)
    if dim is None:
        return None
    order = torch.tensor(rng.sample(range(shape[dim]), shape[dim]))
    how = rng.choice(("roll", "flip", "permuted", "sorted", "cummax", "shifted by zeros"))
    descending, shift = rng.random() < 0.5, rng.randint(-2, 2)
    moves: dict[str, Callable[[Tensor], Tensor]] = {
        "roll": lambda v: v.roll(shift, dim),
        "flip": lambda v: v.flip(dim),
        "permuted": lambda v: v.index_select(dim, order),
        "sorted": lambda v: v.sort(dim, descending=descending).values,
        "cummax": lambda v: v.cummax(dim).values,
        "shifted by zeros": lambda v: torch.cat(
            [torch.zeros_like(v.narrow(dim, 0, 1)), v.narrow(dim, 0, shape[dim] - 1)], dim
        ),
    }
    sign = rng.choice((1, -1, 0))
    text = f"{sign} * {{v}} + {{v}} {how} {order.tolist() if how == 'permuted' else shift} along {dim}"
    return text, lambda v: sign * v + moves[how](v) if sign else moves[how](v)


@drawn("reduction", 6)
def _reduced(rng: random.Random, shape: Shape) -> Drawn | None:
    dims = rng.sample(range(1, len(shape)), rng.randint(1, len(shape) - 1))
    keep = rng.random() < 0.7
    p, correction = rng.choice((1, 2, 3, float("inf"))), rng.choice((0, 1))
    how = rng.choice(("sum", "mean", "amax", "amin", "var", "std", "norm", "logsumexp", "prod", "median"))
    one = dims[0]
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "sum": lambda v: v.sum(dims, keepdim=keep),
        "mean": lambda v: v.mean(dims, keepdim=keep),
        "amax": lambda v: v.amax(dims, keepdim=keep),
        "amin": lambda v: v.amin(dims, keepdim=keep),
        "var": lambda v: v.var(dims, correction=correction, keepdim=keep),
        "std": lambda v: v.std(dims, correction=correction, keepdim=keep),
        "norm": lambda v: torch.linalg.vector_norm(v, p, dims, keepdim=keep),
        "logsumexp": lambda v: v.logsumexp(dims, keepdim=keep),
        "prod": lambda v: v.prod(one, keepdim=keep),
        "median": lambda v: v.median(one, keepdim=keep).values,
    }
    after = rng.choice(("", "minus", "over")) if keep else ""
    reduce = functions[how]
    text = f"{{v}} {after} {how}({dims}, {keep}, p={p}, correction={correction})"
    if after == "minus":
        return text, lambda v: v - reduce(v)
    if after == "over":
        return text, lambda v: v / reduce(v)
    return (text, reduce) if keep or len(shape) - len(dims) > 1 else None


@drawn("cumulative", 3)
def _cumulative(rng: random.Random, shape: Shape) -> Drawn | None:
    dim = _dim(rng, shape, 2)
    if dim is None:
        return None
    how = rng.choice(("cumsum", "cumprod", "logcumsumexp", "cummin", "diff", "topk"))
    n = rng.randint(1, 2)
    if how == "diff":
        ahead = rng.random() < 0.5
        return f"diff({{v}}, {dim}, prepend={ahead})", lambda v: torch.diff(
            v, dim=dim, prepend=v.narrow(dim, 0, 1) if ahead else None
        )
    if how == "topk":
        largest = rng.random() < 0.5
        return f"topk({{v}}, {n}, {dim}, {largest})", lambda v: v.topk(n, dim, largest=largest).values
    if how == "cummin":
        return f"cummin({{v}}, {dim})", lambda v: v.cummin(dim).values
    return f"{how}({{v}}, {dim})", lambda v: getattr(v, how)(dim)


@drawn("scatter", 6)
def _scattered(rng: random.Random, shape: Shape) -> Drawn | None:
    dim = _dim(rng, shape, 2)
    if dim is None:
        return None
    size = shape[dim]
    how = rng.choice(("sum", "mean", "amax", "amin", "prod", "index_add", "gather", "gather alike"))
    own = rng.random() < 0.5
    alike = how == "gather alike" or rng.random() < 0.5
    if alike:
        index = torch.tensor([rng.randrange(size) for _ in range(size)])
        index = index.reshape([-1 if d == dim % len(shape) else 1 for d in range(len(shape))])
    else:
        index = torch.tensor([rng.randrange(size) for _ in range(torch.empty(shape).numel())]).reshape(shape)
    flat = torch.tensor([rng.randrange(size) for _ in range(size)])
    start = rng.choice((0.0, 0.0, 1.0))

    def run(v: Tensor) -> Tensor:
        whole = index.expand(v.shape)
        if how == "index_add":
            return torch.zeros_like(v).index_add(dim, flat, v)
        if how.startswith("gather"):
            return v.gather(dim, whole)
        return torch.full_like(v, start).scatter_reduce(dim, whole, v, how, include_self=own)

    return f"{how}({{v}}, {dim}, {index.flatten().tolist()}, alike={alike}, self={own}, start={start})", run


@drawn("padding", 4)
def _padded(rng: random.Random, shape: Shape) -> Drawn | None:
    if len(shape) != 3 or shape[2] < 2:
        return None
    mode = rng.choice(("constant", "constant", "reflect", "replicate", "circular"))
    widths = (rng.randint(0, 1), rng.randint(0, 1))
    value = rng.choice((0.0, 0.0, 1.0)) if mode == "constant" else 0.0
    return f"pad({{v}}, {widths}, {mode}, {value})", lambda v: F.pad(v, widths, mode, value)


@drawn("pooling", 4)
def _pooled(rng: random.Random, shape: Shape) -> Drawn | None:
    if len(shape) != 3 or shape[2] < 2:
        return None
    stride, padding, ceil, include = rng.randint(1, 2), rng.randint(0, 1), rng.random() < 0.5, rng.random() < 0.5
    how = rng.choice(("avg", "max", "lp", "adaptive avg", "adaptive max", "linear", "nearest", "corners"))
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "avg": lambda v: F.avg_pool1d(v, 2, stride, padding, ceil, include),
        "max": lambda v: F.max_pool1d(v, 2, stride, padding, 1, ceil),
        "lp": lambda v: F.lp_pool1d(v, 2.0, 2, stride, ceil),
        "adaptive avg": lambda v: F.adaptive_avg_pool1d(v, 2),
        "adaptive max": lambda v: F.adaptive_max_pool1d(v, 2),
        "linear": lambda v: F.interpolate(v, size=4, mode="linear"),
        "nearest": lambda v: F.interpolate(v, size=4),
        "corners": lambda v: F.interpolate(v, size=3, mode="linear", align_corners=True),
    }
    return f"{how} pool({{v}}, stride={stride}, padding={padding}, ceil={ceil}, include={include})", functions[how]


@drawn("einsum", 4)
def _einsum(rng: random.Random, shape: Shape) -> Drawn | None:
    two = ("bi,bi->bi", "bi,bj->bij", "bi,bj,bi->bj", "bi,bi,bi->bi")
    three = ("bti,bui->btu", "bti,btj->bij", "bti,bti->bi", "bti,bui,btk->buk", "bti,bti->bt", "bti,bui->bti")
    square = ("btt->bt", "bij,bjk->bik", "bij,bji->bi", "bij,bik->bjk", "bij,bji->bij")
    if len(shape) == 2:
        equation = rng.choice(two)
    elif len(shape) == 3:
        equation = rng.choice(three + (square * 2 if shape[1] == shape[2] else ()))
    else:
        return None
    count = equation.count(",") + 1
    return f"einsum({equation!r}, {{v}} × {count})", lambda v: torch.einsum(equation, *([v] * count))


@drawn("complex", 5)
def _complex(rng: random.Random, shape: Shape) -> Drawn | None:
    if shape[-1] % 2:
        return None
    how = rng.choice(
        ("unit", "sgn", "abs", "square", "conjugate", "phase", "real", "angle", "fft", "normalise", "inner")
    )
    turn = torch.polar(torch.ones(shape[-1] // 2), torch.tensor([rng.random() for _ in range(shape[-1] // 2)]))

    def run(v: Tensor) -> Tensor:
        z = torch.view_as_complex(v.unflatten(-1, (-1, 2)).clone(memory_format=torch.contiguous_format))
        if how in ("abs", "angle"):
            return z.abs() if how == "abs" else z.angle()
        if how == "real":
            return (z * turn).real
        result = {
            "unit": lambda: z / z.abs(),
            "sgn": lambda: z.sgn(),
            "square": lambda: z * z,
            "conjugate": lambda: z * z.flip(-1).conj(),
            "phase": lambda: z * turn,
            "fft": lambda: torch.fft.fft(z, dim=-1),
            "normalise": lambda: z / torch.linalg.vector_norm(z, dim=-1, keepdim=True),
            "inner": lambda: z.unsqueeze(-1) * z.unsqueeze(-2).conj(),
        }[how]()
        return torch.view_as_real(result.resolve_conj()).flatten(-2)

    return f"complex {how}({{v}})", run


@drawn("choice", 4)
def _chosen(rng: random.Random, shape: Shape) -> Drawn | None:
    how = rng.choice(("above", "between", "least", "against flip", "mask zero", "mask one", "tril", "threshold"))
    bound, value = rng.choice((0.0, 0.0, 0.3)), rng.choice((0.0, 0.0, 1.0))
    mask = torch.rand(shape[1:], generator=torch.Generator().manual_seed(rng.randrange(1000))) < 0.5
    offset = rng.randint(-1, 1)
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "above": lambda v: torch.where(v > bound, v, value * torch.ones_like(v)),
        "between": lambda v: v.clamp(-bound, bound) if bound else v.clamp(max=0),
        "least": lambda v: torch.minimum(v, torch.full_like(v, bound)),
        "against flip": lambda v: torch.where(v > v.flip(-1), v, 0.5 * v),
        "mask zero": lambda v: v.masked_fill(mask, 0.0),
        "mask one": lambda v: v.masked_fill(mask, 1.0),
        "tril": lambda v: v.tril(offset) if v.ndim > 2 else v,
        "threshold": lambda v: F.threshold(v, bound, value),
    }
    return f"{how}({{v}}, {bound}, {value}, {offset})", functions[how]


@drawn("windows and diagonals", 3)
def _windows(rng: random.Random, shape: Shape) -> Drawn | None:
    dim = _dim(rng, shape, 2)
    if dim is None:
        return None
    step = rng.randint(1, 2)
    if len(shape) == 3 and rng.random() < 0.4:
        offset = rng.randint(0, 1)
        if min(shape[1], shape[2] - offset) < 1:
            return None
        return f"diagonal({{v}}, {offset})", lambda v: v.diagonal(offset, 1, 2)
    return f"unfold({{v}}, {dim}, 2, {step})", lambda v: v.unfold(dim, 2, step).flatten(1)


@drawn("written", 4)
def _written(rng: random.Random, shape: Shape) -> Drawn | None:
    dim = _dim(rng, shape, 2)
    if dim is None:
        return None
    how = rng.choice(("zero", "copy", "scale", "relu", "add", "square"))
    a, b = rng.sample(range(shape[dim]), 2)

    def run(v: Tensor) -> Tensor:
        v = v.clone()
        target, source = v.select(dim, a), v.select(dim, b)
        if how == "zero":
            target.zero_()
        elif how == "copy":
            target.copy_(source.clone())
        elif how == "scale":
            target.mul_(2.0)
        elif how == "relu":
            target.relu_()
        elif how == "add":
            target.add_(source.clone(), alpha=-1)
        else:
            v.select(dim, a).copy_(source.clone() * target.clone())
        return v

    return f"{{v}} with {how} at {a} from {b} along {dim}", run


@drawn("transposes", 4)
def _transposed(rng: random.Random, shape: Shape) -> Drawn | None:
    if len(shape) != 3:
        return None
    if shape[1] == shape[2]:
        sign = rng.choice((1, -1))
        return f"{{v}} + {sign} * {{v}}.mT", lambda v: v + sign * v.mT
    return "{v}.mT", lambda v: v.mT


@drawn("repeated", 3)
def _repeated(rng: random.Random, shape: Shape) -> Drawn | None:
    dim = _dim(rng, shape)
    if dim is None:
        return None
    if rng.random() < 0.5:
        return f"repeat_interleave({{v}}, 2, {dim})", lambda v: v.repeat_interleave(2, dim)
    return f"cat({{v}}, -{{v}}.flip({dim}), {dim})", lambda v: torch.cat([v, -v.flip(dim)], dim)


def _convolution(g: Grower) -> bool:
    """A convolution with drawn stride, padding, mode, dilation, groups and bias, or a transposed one."""
    i = g.pick(lambda s: len(s) == 3 and s[2] >= 3)
    if i is None:
        return False
    n, rng = g.shapes[i][1], g.rng
    groups = n if rng.random() < 0.3 else 1
    m = groups if groups > 1 else g.width()
    mode = rng.choice(("zeros", "zeros", "reflect", "replicate", "circular", "transposed"))
    stride, padding, dilation = rng.randint(1, 2), rng.randint(0, 1), rng.randint(1, 2)
    b = g.parameter(m) if rng.random() < 0.5 else None
    w = g.parameter(n, m // groups, 2) if mode == "transposed" else g.parameter(m, n // groups, 2)

    def run(c: Any, pool: list[Tensor]) -> Tensor:
        x, bias = pool[i], None if b is None else c.p[b]
        if mode == "transposed":
            return F.conv_transpose1d(x, c.p[w], bias, stride, padding, stride - 1, groups, dilation)
        if mode != "zeros" and padding:
            x = F.pad(x, (padding, padding), mode)
        return F.conv1d(x, c.p[w], bias, stride, padding if mode == "zeros" else 0, dilation, groups)

    g.add(f"conv1d(v{i}, p{w}, {b}, {stride}, {padding}, {mode}, {dilation}, {groups})", run, i)
    return True


ARGUMENTS["convolution with arguments"] = (_convolution, 8)
