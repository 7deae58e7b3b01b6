"""Random programs over the whole operator table, run by PyTorch with autograd, in floats, in balls and by the second
checker: four evaluations that share nothing but the specification."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from math import prod
from typing import Any

import flint
import numpy as np
import torch
from torch import Tensor

import conserved_verify as second
from conserved.certificates.arithmetic import Balls, Floats, UndecidedError, precision
from conserved.certificates.differentiate import Sample, bracket, gradient, run
from conserved.certificates.jets import Jet
from conserved.certificates.program import UNARY, MalformedError, Node, Program
from conserved.certificates.validate import fitting, read_program, well_formed

BITS = 100
BINARY = ("add", "subtract", "multiply")
MOVING = ("matmul", "sum", "take", "stop", "real", "greater", "order", "equal", "choose", "gather", "scatter")
OPERATORS = (*UNARY, *BINARY, *MOVING, "constant")


def torch_node(node: Node, given: list[Tensor], theta: Tensor, x: list[Tensor]) -> Tensor:
    """One node as PyTorch computes it."""
    op, shape = node.op, node.shape
    if op == "parameters":
        return theta
    if op == "input":
        return x[node.which]
    if op == "constant":
        return torch.tensor(node.values, dtype=torch.int64 if node.discrete else torch.float64).reshape(shape)
    if op in UNARY:
        return getattr(torch, op)(given[0])
    if op in BINARY:
        return getattr(torch, op)(*given)
    if op == "take":
        flat = torch.cat([*(part.flatten() for part in given), torch.zeros(1, dtype=given[0].dtype)])
        indices = torch.as_tensor(node.places)
        return flat[torch.where(indices < 0, len(flat) - 1, indices)].reshape(shape)
    if op == "scatter":
        return given[0].flatten().index_put((given[1].flatten(),), given[2].flatten()).reshape(shape)
    rules: dict[str, Any] = {
        "matmul": lambda a, b: a @ b,
        "sum": lambda a: a.sum(-1),
        "stop": lambda a: a.detach(),
        "real": lambda a: a.double(),
        "greater": lambda a, b: (a > b).long(),
        "equal": lambda a, b: (a == b).long(),
        "order": lambda a: torch.argsort(a.detach(), dim=-1, descending=True, stable=True),
        "choose": lambda c, a, b: torch.where(c != 0, a, b),
        "gather": lambda a, i: a.flatten()[i],
    }
    return rules[op](*given)


def torch_value(program: Program, theta: Tensor, x: list[Tensor]) -> Tensor:
    """f(x; θ) as PyTorch computes it."""
    values: list[Tensor] = []
    for node in program.nodes:
        values.append(torch_node(node, [values[i] for i in node.inputs], theta, x))
    return values[program.output]


@dataclass
class Case:
    """A program with a point and samples."""

    program: Program
    theta: Tensor
    samples: list[tuple[list[Tensor], Tensor]]


@dataclass
class Maker:
    """Grows a program node by node, at a sample that keeps its values in their domains."""

    rng: random.Random
    size: int = 0
    nodes: list[Node] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    x: list[Tensor] = field(default_factory=list)
    moving: list[int] = field(default_factory=lambda: [0])
    """Reals that depend on θ."""

    def put(self, op: str, *inputs: int, shape: tuple[int, ...], **rest: Any) -> int | None:
        """Append a node, unless its value leaves its domain or is too near to a kink."""
        node = fitting(Node(op=op, inputs=inputs, shape=shape, **rest), [self.nodes[i] for i in inputs], op, self.size)
        given = [self.values[i] for i in inputs]
        if op in ("greater", "order") and not self.nodes[inputs[0]].discrete:
            flat = (given[0] - given[1]).abs() if op == "greater" else given[0].sort(-1).values.diff(dim=-1).abs()
            if flat.numel() and float(flat.min()) < 1e-3:
                return None
        if op in ("log", "sqrt", "reciprocal") and given[0].numel():
            low = float(given[0].abs().min() if op == "reciprocal" else given[0].min())
            if low < 0.05:
                return None
        value = torch_node(node, given, self.theta, self.x)
        if value.numel() and (not bool(torch.isfinite(value).all()) or float(value.abs().max()) > 50):
            return None
        self.nodes.append(node)
        self.values.append(value)
        fed = op == "parameters" or any(i in self.moving for i in inputs)
        if fed and not node.discrete and value.numel():
            self.moving.append(len(self.nodes) - 1)
        return len(self.nodes) - 1

    @property
    def theta(self) -> Tensor:
        return self.values[0]

    def some(self, discrete: bool) -> int:
        """A node of a kind, late ones rather than early ones."""
        result = [i for i, node in enumerate(self.nodes) if node.discrete == discrete]
        if not discrete and self.rng.random() < 0.7:
            result = self.moving
        return result[max(self.rng.randrange(len(result)), self.rng.randrange(len(result)))]

    def shape(self, most: int = 3) -> tuple[int, ...]:
        return tuple(
            self.rng.choice((1, 2, 2, 3, 0 if self.rng.random() < 0.1 else 1)) for _ in range(self.rng.randint(0, most))
        )

    def fitted(self, shape: tuple[int, ...], discrete: bool = False, inputs: list[int] | None = None) -> int:
        """Entries of some nodes, repeated and left out, in a shape."""
        inputs = inputs or [self.some(discrete) for _ in range(self.rng.choice((1, 1, 2)))]
        total = sum(prod(self.nodes[i].shape) for i in inputs)
        low = -1 if self.rng.random() < 0.2 or not total else 0
        indices = np.array([self.rng.randrange(low, total) for _ in range(prod(shape))], dtype=np.int64)
        result = self.put("take", *inputs, shape=shape, places=indices)
        assert result is not None
        return result

    def grow(self) -> None:
        """One more operator."""
        rng, op = self.rng, self.rng.choice(OPERATORS)
        if op == "constant":
            shape, discrete = self.shape(), rng.random() < 0.5
            values = tuple(rng.randint(-3, 3) if discrete else rng.randint(-9, 9) / 4 for _ in range(prod(shape)))
            self.put(op, shape=shape, values=values, discrete=discrete)
        elif op in UNARY or op == "stop":
            a = self.some(False)
            self.put(op, a, shape=self.nodes[a].shape)
        elif op in (*BINARY, "greater", "equal"):
            discrete = op == "equal" or rng.random() < 0.3
            a = self.some(discrete)
            shape = self.nodes[a].shape
            self.put(op, a, self.fitted(shape, discrete), shape=shape)
        elif op == "matmul":
            batch, n, k, m = self.shape(1), rng.randint(0, 2), rng.randint(1, 3), rng.randint(1, 3)
            self.put(op, self.fitted((*batch, n, k)), self.fitted((*batch, k, m)), shape=(*batch, n, m))
        elif op == "sum":
            shape = (*self.shape(2), rng.randint(1, 3))
            self.put(op, self.fitted(shape, rng.random() < 0.2), shape=shape[:-1])
        elif op == "take":
            self.fitted(self.shape(), rng.random() < 0.2)
        elif op == "real":
            a = self.some(True)
            self.put(op, a, shape=self.nodes[a].shape)
        elif op == "order":
            shape = (*self.shape(1), rng.randint(1, 3))
            self.put(op, self.fitted(shape, rng.random() < 0.2), shape=shape)
        elif op == "choose":
            discrete, shape = rng.random() < 0.2, self.shape()
            self.put(
                op, self.fitted(shape, True), self.fitted(shape, discrete), self.fitted(shape, discrete), shape=shape
            )
        else:
            self.indexed(op)

    def indexed(self, op: str) -> None:
        """`gather` or `scatter`, with a constant index or a computed one."""
        discrete = self.rng.random() < 0.2
        a = self.some(discrete)
        size = prod(self.nodes[a].shape)
        once = op == "scatter"
        usable = [i for i, node in enumerate(self.nodes) if node.discrete and self._usable(i, size, once)]
        if usable and self.rng.random() < 0.6:
            index = self.rng.choice(usable)
        else:
            count = self.rng.randint(0, min(size, 3))
            indices = self.rng.sample(range(size), count)
            if not once and size:
                indices = [self.rng.randrange(size) for _ in indices]
            index = self.put("constant", shape=(count,), values=tuple(indices), discrete=True) or len(self.nodes) - 1
        shape = self.nodes[index].shape
        if op == "gather":
            self.put(op, a, index, shape=shape)
        else:
            self.put(op, a, index, self.fitted(shape, discrete), shape=self.nodes[a].shape)

    def _usable(self, index: int, size: int, once: bool) -> bool:
        value = self.values[index]
        inside = bool(((value >= 0) & (value < size)).all())
        return inside and (not once or len(value.unique()) == value.numel())


def random_case(seed: int, steps: int = 14) -> Case:
    """A program, a point and three samples."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    size = rng.randint(2, 6)
    theta = (torch.randn(size, generator=generator, dtype=torch.float64) * 64).round() / 64
    real, whole = (rng.randint(1, 3),), (rng.randint(1, 3),)

    def drawn() -> list[Tensor]:
        tokens = torch.randint(-1, 3, whole, generator=generator)
        return [(torch.randn(real, generator=generator, dtype=torch.float64) * 64).round() / 64, tokens]

    maker = Maker(rng, size=size, x=drawn())
    maker.nodes = [Node(op="parameters", shape=(size,))]
    maker.values = [theta]
    maker.put("input", shape=real, which=0)
    maker.put("input", shape=whole, which=1, discrete=True)
    for _ in range(steps):
        maker.grow()
    output = maker.fitted((rng.randint(1, 3),), inputs=[*maker.moving[-2:], maker.some(False)])
    program = well_formed(Program(nodes=tuple(maker.nodes), output=output, size=size))
    program = read_program(program.record())
    vs = [torch.randint(-3, 4, (program.outputs,), generator=generator).double() for _ in range(3)]
    return Case(program, theta, [(x, v) for x, v in zip([maker.x, drawn(), drawn()], vs, strict=True)])


@dataclass
class Compared:
    """What a comparison found.

    `open` if balls left a comparison open, `refused` if an index left its range, `undefined` if a value left the domain
    of its operator.
    """

    disagreements: list[str] = field(default_factory=list)
    open: bool = False
    refused: bool = False
    undefined: bool = False


def compare(case: Case, *, brackets: int = 0) -> Compared:
    """Values and gradients at the first sample, or a bracket of several samples, by all four evaluations."""
    result = Compared()
    program, theta = case.program, case.theta
    word = case.samples[: brackets + 1]
    twin = second.read_program(program.record())
    results: dict[str, Any] = {}
    for name, evaluate in {"floats": _floats, "balls": _balls, "second": _second}.items():
        try:
            results[name] = evaluate(program, twin, theta, word)
        except (UndecidedError, second.OpenError):
            results[name] = "open"
        except (MalformedError, second.RefusedError):
            results[name] = "refused"
    if "refused" in results.values():
        result.refused = True
        if list(results.values()).count("refused") != 3:
            result.disagreements.append(f"refused by some: { {k: v for k, v in results.items() if v == 'refused'} }")
        return result
    if "open" in (results["balls"], results["second"]):
        result.open = True
        if results["balls"] != results["second"]:
            result.disagreements.append("open for one of the checkers")
        return result
    wanted = _torch(program, theta, word)
    for key, balls in results["balls"].items():
        others = results["second"][key]
        if not all(b.is_finite() for b in balls):
            # Another sample of the word lies outside the domain of an operator: both must say so.
            result.undefined = True
            if all(b.is_finite() for b in others):
                result.disagreements.append(f"{key} is finite for one of the checkers")
            continue
        scale = 1 + max((abs(float(b.mid())) for b in balls), default=0.0)
        # float64 has 53 bits where balls have BITS, and loses what the balls' radius shows to be lost.
        lost = max((float(b.rad()) for b in balls), default=0.0) * 2.0 ** (BITS - 53) * 64
        for index, (one, other) in enumerate(zip(balls, others, strict=True)):
            if not one.overlaps(other) or not float(one.rad()) < 1e-12 * scale**2:
                result.disagreements.append(f"{key}[{index}]: ball {one.str(10)}, second checker {other.str(10)}")
        for name, theirs in {"floats": results["floats"][key], "PyTorch": wanted.get(key)}.items():
            if theirs is None:
                continue
            middle = np.array([float(b.mid()) for b in balls])
            if not np.allclose(middle, theirs, rtol=1e-7, atol=1e-9 * scale + lost):
                result.disagreements.append(f"{key}: balls {middle}, {name} {theirs}")
    return result


Word = list[tuple[list[Tensor], Tensor]]


def _torch(program: Program, theta: Tensor, word: Word) -> dict[str, Any]:
    def field_of(x: list[Tensor], v: Tensor) -> Any:
        return torch.func.grad(lambda t: (torch_value(program, t, x) * v).sum())

    if len(word) == 1:
        return {"value": torch_value(program, theta, word[0][0]).numpy(), "gradient": field_of(*word[0])(theta).numpy()}
    if any(node.op == "stop" for node in program.nodes):
        return {}  # PyTorch does not differentiate a field through detach.

    def nested(parts: Word) -> Any:
        if len(parts) == 1:
            return field_of(*parts[0])
        a, b = nested(parts[:-1]), field_of(*parts[-1])

        def lie(t: Tensor) -> Tensor:
            return torch.func.jvp(b, (t,), (a(t),))[1] - torch.func.jvp(a, (t,), (b(t),))[1]

        return lie

    return {"bracket": nested(word)(theta).numpy()}


def _floats(program: Program, twin: Any, theta: Tensor, word: Word) -> dict[str, Any]:
    numbers, point = Floats(), Jet({0: theta.numpy()})
    samples = [Sample(tuple(t.numpy() for t in x), v.numpy()) for x, v in word]
    if len(word) > 1:
        return {"bracket": bracket(program, numbers, point, samples).parts.get(0, np.zeros(program.size))}
    value = run(program, numbers, point, samples[0].x)[program.output]
    assert isinstance(value, Jet)
    return {"value": value.value, "gradient": gradient(program, numbers, point, samples[0]).value}


def _balls(program: Program, twin: Any, theta: Tensor, word: Word) -> dict[str, Any]:
    with precision(BITS):
        numbers = Balls()
        point = Jet({0: numbers.array(theta.tolist(), (len(theta),))})
        samples = []
        for x, v in word:
            given = [
                t.numpy() if not t.is_floating_point() else numbers.array(t.flatten().tolist(), tuple(t.shape))
                for t in x
            ]
            samples.append(Sample(tuple(given), numbers.array(v.tolist(), (len(v),))))
        if len(word) > 1:
            lie = bracket(program, numbers, point, samples).parts.get(0)
            return {"bracket": list(numbers.zeros((program.size,)) if lie is None else lie)}
        value = run(program, numbers, point, samples[0].x)[program.output]
        assert isinstance(value, Jet)
        return {"value": list(value.value), "gradient": list(gradient(program, numbers, point, samples[0]).value)}


def _second(program: Program, twin: second.Program, theta: Tensor, word: Word) -> dict[str, Any]:
    with precision(BITS):
        point = second.point(theta.tolist())
        inputs = [[t.flatten().tolist() for t in x] for x, _ in word]
        vs = [[int(e) for e in v.tolist()] for _, v in word]
        if len(word) > 1:
            contents = second.Contents(twin, theta.tolist(), inputs, [], [], BITS, 0)
            lie = second.bracket(contents, point, list(enumerate(vs)))
            return {"bracket": lie.get(0, [flint.arb(0)] * twin.size)}
        value = second.forward(twin, second.Balls(), point, inputs[0])[twin.output]
        return {"value": value[0], "gradient": second.gradient(twin, point, inputs[0], vs[0])[0]}
