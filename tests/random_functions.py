"""Random functions in PyTorch, as people write them: broadcasting, views, writes in place, indices of every sort, mixed
types, shared and unused parameters. Each is traced to a program, which is compared with it."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from conserved.certificates.trace import trace
from conserved.discovery.function import ParameterFunction, function_of
from random_programs import Case, Compared, compare

Step = Callable[[list[Tensor]], Tensor]
"""The next tensor, made of those before it."""

SMOOTH: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "sin": torch.sin,
    "cos": torch.cos,
    "erf": torch.erf,
    "exp": lambda a: torch.exp(torch.tanh(a)),
    "expm1": lambda a: torch.expm1(torch.sin(a)),
    "log": lambda a: torch.log(a * a + 1),
    "log1p": lambda a: torch.log1p(a**2),
    "sqrt": lambda a: torch.sqrt(a * a + 0.5),
    "rsqrt": lambda a: torch.rsqrt(a * a + 0.5),
    "reciprocal": lambda a: 1 / (a * a + 0.7),
    "power": lambda a: a**3 / 4 + (a * a + 1) ** -1.5 + a**0,
    "neg": lambda a: -a,
    "gelu": F.gelu,
    "gelu tanh": lambda a: F.gelu(a, approximate="tanh"),
    "silu": F.silu,
    "softplus": lambda a: F.softplus(a, beta=2, threshold=0.5),
    "elu": F.elu,
    "leaky relu": lambda a: F.leaky_relu(a, 0.2),
    "relu": torch.relu,
    "abs": torch.abs,
    "clamp": lambda a: a.clamp(-0.7, 0.9),
    "detach": lambda a: a.detach(),
    "cast": lambda a: a.to(torch.float64),
}
ALONG: dict[str, Callable[[Tensor, int], Tensor]] = {
    "softmax": lambda a, axis: a.softmax(axis),
    "log softmax": lambda a, axis: a.log_softmax(axis),
    "sum": lambda a, axis: a.sum(axis),
    "mean": lambda a, axis: a.mean(axis, keepdim=True),
    "var": lambda a, axis: a.var(axis, correction=0),
    "cumsum": lambda a, axis: a.cumsum(axis),
    "amax": lambda a, axis: a.amax(axis),
    "max": lambda a, axis: a.max(axis).values,
    "sort": lambda a, axis: a.sort(axis, descending=True).values,
    "flip": lambda a, axis: a.flip(axis),
    "roll": lambda a, axis: a.roll(1, axis),
    "norm": lambda a, axis: torch.linalg.vector_norm(a + 3, dim=axis),
    "layer norm": lambda a, axis: F.layer_norm(a.movedim(axis, -1) * 2, (a.shape[axis],), eps=0.3),
    "stack": lambda a, axis: torch.stack([a, a * 2], axis),
    "cat": lambda a, axis: torch.cat([a, a.flip(axis)], axis),
    "unbind": lambda a, axis: a.unbind(axis)[-1],
    "first": lambda a, axis: a.select(axis, -1),
    "narrow": lambda a, axis: a.narrow(axis, 0, 1),
    "repeat": lambda a, axis: a.repeat_interleave(2, axis),
    "unsqueeze": lambda a, axis: a.unsqueeze(axis),
    "transpose": lambda a, axis: a.transpose(0, axis),
    "argmax": lambda a, axis: (a.argmax(axis) - 1) * 1.0,
    "topk": lambda a, axis: a.topk(1, axis).values,
    "masked": lambda a, axis: (
        a.masked_fill(torch.arange(a.shape[axis]) > 0, -torch.inf).softmax(-1) if axis in (-1, a.ndim - 1) else a
    ),
    "pad": lambda a, axis: F.pad(a, (1, 0), value=0.5),
    "tril": lambda a, axis: a[None].tril() if a.ndim == 1 else a.tril(),
    "diagonal": lambda a, axis: (a[:, None] * a[None]).diagonal() if a.ndim == 1 else a.diagonal(),
    "unfold": lambda a, axis: a.unfold(axis, 1, 1),
    "strided": lambda a, axis: a.clone().contiguous().as_strided((2, a.numel()), (0, 1)),
}


class Written:
    """Steps that make a function, grown beside the values they give at an example."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.start = {
            name: self.drawn(tuple(self.rng.choice((1, 2, 3)) for _ in range(self.rng.randint(0, 2)))) for name in "abc"
        }
        self.tokens = (self.rng.randint(1, 3),)
        self.real = tuple(self.rng.randint(1, 3) for _ in range(self.rng.randint(1, 2)))
        self.steps: list[Step] = []
        self.used: list[str] = []
        self.values = [*self.start.values(), *self.inputs()]

    def drawn(self, shape: tuple[int, ...]) -> Tensor:
        return (torch.randn(shape, generator=self.generator, dtype=torch.float64) * 64).round() / 64

    def inputs(self) -> tuple[Tensor, Tensor]:
        return self.drawn(self.real), torch.randint(-1, 2, self.tokens, generator=self.generator)

    def some(self, real: bool = True) -> int:
        result = [i for i, value in enumerate(self.values) if value.is_floating_point() == real]
        return result[max(self.rng.randrange(len(result)), self.rng.randrange(len(result)))]

    def add(self, name: str, step: Step) -> None:
        """Keep a step if it works, and its values stay moderate and away from kinks."""
        try:
            value = step(self.values)
        except (RuntimeError, IndexError, ValueError, ZeroDivisionError):
            return
        if value.numel() > 40 or value.ndim > 4 or (value.numel() and not bool((value.double().abs() < 60).all())):
            return
        self.steps.append(step)
        self.values.append(value)
        self.used.append(name)

    def grow(self) -> None:
        rng = self.rng
        kind = rng.choice(
            ("smooth", "smooth", "along", "along", "two", "two", "product", "index", "whole", "write", "view")
        )
        getattr(self, kind)()

    def smooth(self) -> None:
        name, i = self.rng.choice(list(SMOOTH)), self.some()
        self.add(name, lambda values: SMOOTH[name](values[i]))

    def along(self) -> None:
        name, i = self.rng.choice(list(ALONG)), self.some()
        axis = self.rng.randint(-1, max(0, self.values[i].ndim - 1))
        self.add(name, lambda values: ALONG[name](values[i], axis))

    def two(self) -> None:
        i, j = self.some(), self.some(self.rng.random() < 0.8)
        name = self.rng.choice(("add", "sub", "mul", "div", "maximum", "where", "outer"))
        self.add(
            name,
            {
                "add": lambda values: torch.add(values[i], values[j], alpha=2),
                "sub": lambda values: values[i] - values[j],
                "mul": lambda values: values[i] * values[j],
                "div": lambda values: values[i] / (values[j] ** 2 + 1),
                "maximum": lambda values: torch.maximum(values[i], values[j].double()),
                "where": lambda values: torch.where(values[i] > values[j] + 0.01, values[i] * 2, values[j]),
                "outer": lambda values: values[i].reshape(-1, 1) * values[j].reshape(1, -1),
            }[name],
        )

    def product(self) -> None:
        i, j, k = self.some(), self.some(), self.rng.randint(1, 3)
        picked = [self.rng.randrange(-64, 64) for _ in range(12 * k)]
        name = self.rng.choice(("matmul", "einsum", "addmm", "bmm", "linear", "conv"))

        def sides(values: list[Tensor]) -> tuple[Tensor, Tensor]:
            a, b = values[i].flatten(), values[j].flatten()
            left = a[torch.tensor([p % len(a) for p in picked[: 2 * k]])].reshape(2, k)
            return left, b[torch.tensor([p % len(b) - len(b) for p in picked[2 * k : 5 * k]])].reshape(k, 3)

        self.add(
            name,
            {
                "matmul": lambda values: torch.matmul(*sides(values)),
                "einsum": lambda values: torch.einsum("ij,jk->ki", *sides(values)),
                "addmm": lambda values: torch.addmm(values[0].flatten()[0], *sides(values), beta=0.5, alpha=2),
                "bmm": lambda values: torch.bmm(*(side[None].expand(2, -1, -1) for side in sides(values))),
                "linear": lambda values: F.linear(
                    sides(values)[0], sides(values)[1].T, values[1].flatten()[0].expand(3)
                ),
                "conv": lambda values: F.conv1d(
                    sides(values)[1].T[None], sides(values)[0][:, None].expand(2, k, k) / 2, padding=k
                ),
            }[name],
        )

    def index(self) -> None:
        """Index lists: negative, repeated, empty; constants, inputs, and computed ones."""
        i, t = self.some(), self.some(False)
        size = max(1, self.values[i].shape[0] if self.values[i].ndim else 1)
        fixed = torch.tensor(
            [self.rng.randrange(-size, size) for _ in range(self.rng.randint(0, 3))], dtype=torch.int64
        )
        front = fixed % size
        name = self.rng.choice(
            ("fixed", "computed", "gather", "select", "embedding", "scatter", "take_along", "mask", "two")
        )
        padding = self.rng.choice((None, 0))

        def inside(values: list[Tensor]) -> Tensor:
            return (values[t] > 0).long() * (size - 1)

        def flat(values: list[Tensor]) -> Tensor:
            return values[i].reshape(size, -1)

        self.add(
            f"index {name}",
            {
                "fixed": lambda values: values[i][fixed],
                "computed": lambda values: values[i][inside(values) - size],
                "gather": lambda values: flat(values).gather(0, front[:, None].expand(-1, flat(values).shape[1])),
                "select": lambda values: values[i].index_select(0, front),
                "embedding": lambda values: F.embedding(inside(values), flat(values), padding_idx=padding),
                "scatter": lambda values: torch.scatter(flat(values), 0, flat(values).argsort(0), flat(values) * 2),
                "take_along": lambda values: torch.take_along_dim(flat(values), front[:, None], 0),
                "mask": lambda values: values[i][torch.arange(size) % 2 == 0],
                "two": lambda values: flat(values)[front, torch.zeros_like(front) - 1],
            }[name],
        )

    def whole(self) -> None:
        t, i = self.some(False), self.some()
        name = self.rng.choice(
            ("arithmetic", "compare", "logic", "truths", "narrow", "equal", "order", "count", "promote")
        )
        self.add(
            f"whole {name}",
            {
                "arithmetic": lambda values: values[t] * 3 - values[t] + 1,
                "compare": lambda values: (values[t] > 0) | (values[t] <= -1),
                "logic": lambda values: torch.logical_and(values[t], values[t] - 1).logical_not(),
                "truths": lambda values: (values[i] > 0.01) + (values[i] < -0.01),
                "narrow": lambda values: values[t].to(torch.int8) + 1,
                "equal": lambda values: torch.where(values[t] == 1, values[t], -values[t]),
                "order": lambda values: values[i].argsort(-1),
                "count": lambda values: (values[i] > 0.02).sum(),
                "promote": lambda values: values[t] * 0.5 + True,
            }[name],
        )

    def write(self) -> None:
        i, j = self.some(), self.some()
        name = self.rng.choice(("row", "column", "add", "fill", "no_grad"))

        def written(values: list[Tensor]) -> Tensor:
            y = values[i].clone()
            if name == "row":
                y[0] = values[j].sum() / 4
            elif name == "column":
                y[..., -1] += values[j].mean()
            elif name == "add":
                y.add_(values[j]).mul_(0.5)
            elif name == "fill":
                y[..., :1] = 0.25
            else:
                with torch.no_grad():
                    y = torch.tanh(values[i]) * values[j]
            return y

        self.add(f"write {name}", written)

    def view(self) -> None:
        i = self.some()
        order = list(range(self.values[i].ndim))
        self.rng.shuffle(order)
        name = self.rng.choice(("flatten", "permute", "expand", "step", "split", "squeeze"))
        self.add(
            name,
            {
                "flatten": lambda values: values[i].reshape(-1),
                "permute": lambda values: values[i].permute(order),
                "expand": lambda values: values[i].expand(2, *values[i].shape),
                "step": lambda values: values[i][..., ::2],
                "split": lambda values: values[i].split(1, -1)[0],
                "squeeze": lambda values: values[i].squeeze(),
            }[name],
        )

    def __call__(self, p: dict[str, Tensor], x: tuple[Tensor, Tensor]) -> Tensor:
        values = [*p.values(), *x]
        for step in self.steps:
            values.append(step(values))
        parts = [value.reshape(-1) for value in values[5:] if value.is_floating_point()][-3:]
        return torch.cat([part[:2] for part in parts] + [values[0].reshape(-1)[:1]])


def random_function(seed: int, steps: int = 7) -> Written:
    """A function of three parameters, a real and a whole input."""
    written = Written(seed)
    for _ in range(steps):
        written.grow()
    return written


def traced_case(written: Written) -> Case:
    """Its program, at the example it was grown at."""
    example = (written.values[3], written.values[4])

    def sample(generator: torch.Generator) -> Any:
        return written.inputs()

    function: ParameterFunction = function_of(written, sample, loss="regression", params=written.start, device=None)
    theta = torch.cat([value.flatten() for value in written.start.values()])
    program = trace(function, theta, example)
    v = torch.randint(-3, 4, (program.outputs,), generator=written.generator).double()
    return Case(program, theta, [([*example], v)])


def compared(written: Written) -> Compared:
    """The four evaluations of the program, and the function itself."""
    case = traced_case(written)
    result = compare(case)
    if result.open or result.refused:
        return result
    sizes = [value.numel() for value in written.start.values()]
    shapes = [value.shape for value in written.start.values()]
    x, v = case.samples[0]

    def f(theta: Tensor) -> Tensor:
        parts = [part.reshape(shape) for part, shape in zip(theta.split(sizes), shapes, strict=True)]
        return written(dict(zip(written.start, parts, strict=True)), (x[0], x[1]))

    grad = torch.func.grad(lambda t: (f(t) * v).sum())(case.theta)
    from random_programs import _floats

    mine = _floats(case.program, None, case.theta, case.samples[:1])
    for name, theirs in (("value", f(case.theta)), ("gradient", grad)):
        scale = 1 + float(theirs.abs().max()) if prod(theirs.shape) else 1.0
        if not torch.allclose(torch.as_tensor(mine[name]), theirs, rtol=1e-7, atol=1e-9 * scale):
            result.disagreements.append(f"{name}: program {mine[name]}, function {theirs}")
    return result
