"""Every rule allows just what its operator commutes with: tested on the operator itself, by moving its inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from conserved.inference.program.capture import capture
from conserved.inference.program.captured_program import CapturedProgram
from conserved.inference.symmetries.exponentials import separate
from conserved.inference.types.tensor_type import Field, Type
from conserved.inference.typing import Typing, type_program

Function = Callable[..., Tensor]

COMMUTES = 1e-9
"""Largest part of a tangent, relative to the whole, that a motion may leave unexplained in float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """An operator, the shapes it is tried on, and whether the rule finds all charges there are.

    `short` says why a rule allows less than the operator: soundness is tested anyway.
    """

    name: str
    run: Function
    shapes: tuple[tuple[int, ...], ...]
    short: str = ""
    positive: bool = False
    points: int = field(default=4)


def op(name: str, run: Function, *shapes: tuple[int, ...], short: str = "", positive: bool = False) -> Operator:
    return Operator(name=name, run=run, shapes=shapes, short=short, positive=positive)


LARGEST = "at a few points, entries that are never the largest look free"
CONVOLVED = "a kernel may also scale geometrically along the image, which no network does"
UNUSED = "entries that are not used are listed as such, not as charges"
MASK = torch.tensor([True, False, True])

OPERATORS = [
    op("mul", lambda x, y: x * y, (2, 3), (3,)),
    op("mul in place", lambda x, y: x.clone().mul_(y), (2, 3), (3,)),
    op("hypot", torch.hypot, (2, 3), (3,)),
    op("hypot in place", lambda x, y: x.clone().hypot_(y), (2, 3), (3,)),
    op("copysign", torch.copysign, (2, 3), (3,)),
    op("mul by a constant", lambda x: x * torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), (2, 3)),
    op("div", lambda x, y: x / y, (2, 3), (2, 3)),
    op("x / x", lambda x: x / x.sum(-1, keepdim=True), (3, 1), short="a parameter without effect is listed as such"),
    op("outer product with itself", lambda x: x.unsqueeze(-1) * x.unsqueeze(-2), (2, 3)),
    op("quotients of entries", lambda x: x.unsqueeze(-1) / x.unsqueeze(-2), (2, 3)),
    op("add", lambda x, y: x + y, (2, 3), (3,)),
    op("sub", lambda x, y: x - 2 * y, (2, 3), (2, 1)),
    op("add a number", lambda x, y: x * y + 1.5, (2, 3), (2, 3)),
    op("lerp", lambda x, y: torch.lerp(x, y, 0.3), (2, 3), (2, 3)),
    op("lerp by a share of its own", lambda x, y, w: torch.lerp(x, y, w), (2, 3), (2, 3), (2, 1)),
    op("neg", lambda x: -x, (3,)),
    op("relu", torch.relu, (2, 3)),
    op("leaky relu", F.leaky_relu, (2, 3)),
    op("abs", torch.abs, (2, 3)),
    op("square", lambda x: x**2, (2, 3)),
    op("cube", lambda x: x.pow(3), (2, 3)),
    op("sqrt", torch.sqrt, (3,), positive=True),
    op("rsqrt", torch.rsqrt, (3,), positive=True),
    op("reciprocal", torch.reciprocal, (3,)),
    op("gelu", F.gelu, (3,)),
    op("silu", F.silu, (3,)),
    op("tanh", torch.tanh, (3,)),
    op("exp", torch.exp, (3,)),
    op("clamp at zero", lambda x: x.clamp(min=0), (3,)),
    op("hardtanh", F.hardtanh, (3,), short="beyond its bounds it is constant"),
    op("glu", lambda x: F.glu(x, -1), (2, 4)),
    op("matrix product", lambda x, y: x @ y, (2, 3), (3, 2)),
    op("batched product", lambda x, y: x @ y, (2, 2, 3), (2, 3, 2)),
    op("linear", lambda x, w, b: F.linear(x, w, b), (2, 3), (2, 3), (2,)),
    op("einsum", lambda x, y: torch.einsum("hd,hde->he", x, y), (2, 3), (2, 3, 2)),
    op("dot", lambda x, y: x @ y, (3,), (3,)),
    op("summed product", lambda x, y: (x * y).sum(-1), (2, 3), (2, 3)),
    op("convolution", lambda x, w, b: F.conv1d(x, w, b), (2, 2, 4), (3, 2, 2), (3,)),
    op("grouped convolution", lambda x, w: F.conv1d(x, w, groups=2), (1, 4, 3), (4, 2, 2), short=CONVOLVED),
    op("transposed convolution", lambda x, w: F.conv_transpose1d(x, w), (1, 2, 3), (2, 3, 2), short=CONVOLVED),
    op("sum", lambda x: x.sum(-1), (2, 3)),
    op("mean", lambda x: x.mean(0, keepdim=True), (2, 3)),
    op("cumsum", lambda x: x.cumsum(0), (3, 2)),
    op("amax", lambda x: x.amax(1), (2, 3), short=LARGEST),
    op("max", lambda x: x.max(0).values, (3, 2), short=LARGEST),
    op("sort", lambda x: x.sort(0).values, (3, 2)),
    op("topk", lambda x: x.topk(2, dim=1).values, (2, 3), short=LARGEST),
    op("vector norm", lambda x: torch.linalg.vector_norm(x, dim=-1), (2, 3)),
    op("std", lambda x: x.std(-1), (2, 3)),
    op("softmax", lambda x: x.softmax(-1), (2, 3)),
    op("log softmax", lambda x: x.log_softmax(0), (3, 2)),
    op("logsumexp", lambda x: x.logsumexp(-1), (2, 3)),
    op("layer norm", lambda x, g, b: F.layer_norm(x, (3,), g, b, 0.0), (2, 3), (3,), (3,)),
    op("layer norm, bare", lambda x: F.layer_norm(x, (4,), eps=0.0), (2, 4)),
    op("rms norm", lambda x, g: F.rms_norm(x, (3,), g, 0.0), (2, 3), (3,)),
    op("group norm", lambda x, g, b: F.group_norm(x, 2, g, b, 0.0), (2, 4, 3), (4,), (4,)),
    op(
        "batch norm",
        lambda x, g, b: F.batch_norm(x, None, None, g, b, True, eps=1e-300),
        (3, 2),
        (2,),
        (2,),
        short="the scale is free up to ε only",
    ),
    op("view", lambda x: x.view(2, 2, 3), (4, 3)),
    op("merge", lambda x: x.reshape(-1), (2, 3)),
    op("permute", lambda x: x.permute(2, 0, 1), (2, 3, 2)),
    op("slice", lambda x: x[1:, ::2], (3, 4), short=UNUSED),
    op("select", lambda x: x[1], (3, 2), short=UNUSED),
    op("chunk", lambda x: x.chunk(2, -1)[0] * x.chunk(2, -1)[1], (2, 4)),
    op("cat", lambda x, y: torch.cat([x, -y], 1), (2, 2), (2, 1)),
    op("stack", lambda x, y: torch.stack([x, y], 1), (2, 2), (2, 2)),
    op("flip", lambda x: x.flip(0), (3, 2)),
    op("roll", lambda x: x.roll(1, 0), (3, 2)),
    op("expand", lambda x: x.expand(3, 2), (1, 2)),
    op("repeat", lambda x: x.repeat(2, 1), (2, 2)),
    op("pad", lambda x: F.pad(x, (1, 0)), (2, 2), short="padding is taken to need one charge along its axis"),
    op("tril", torch.tril, (3, 3)),
    op("unfold", lambda x: x.unfold(0, 2, 1), (3,), short="entries that occur twice are followed as one"),
    op("diagonal", lambda x: x.diagonal(), (3, 3), short=UNUSED),
    op(
        "written slice",
        lambda x, y: torch.zeros(4, dtype=x.dtype).index_copy(0, torch.arange(2), x) + y,
        (2,),
        (4,),
        short="places that are written are taken to move alike",
    ),
    op("masked fill", lambda x: x.masked_fill(MASK, 0.0), (2, 3)),
    op(
        "masked fill with −∞, softmax",
        lambda x: x.masked_fill(MASK, float("-inf")).softmax(-1),
        (2, 3),
        short="with one entry left it is constant",
    ),
    op("where", lambda x, y: torch.where(MASK, x, y), (2, 3), (2, 3), short="the condition is not looked at"),
    op("where on its sign", lambda x: torch.where(x > 0, x, 0.1 * x), (2, 3)),
    op("maximum", torch.maximum, (3,), (3,)),
    op(
        "embedding",
        lambda w: F.embedding(torch.tensor([[0, 2], [1, 0]]), w),
        (3, 2),
        short="rows are taken to move alike, whatever the index",
    ),
    op("gather", lambda x: x.gather(1, torch.tensor([[0, 2], [1, 1]])), (2, 3), short="the index is not looked at"),
    op("max pool", lambda x: F.max_pool1d(x, 2), (1, 2, 4), short="nothing may depend on the place"),
    op("average pool", lambda x: F.avg_pool1d(x, 2), (1, 2, 4), short="nothing may depend on the place"),
    op("weight norm", lambda v, g: g * v / v.norm(dim=1, keepdim=True), (2, 3), (2, 1)),
]


@dataclass(frozen=True, slots=True)
class Followed:
    """An operator whose inputs were typed as parameters."""

    typing: Typing
    theta: list[Tensor]
    output: int


def follow(case: Operator, seed: int = 0) -> Followed:
    theta = point(case, seed)
    names = {f"p{n}": x.requires_grad_() for n, x in enumerate(theta)}
    program = capture(lambda: case.run(*names.values()), names)
    typing = type_program(program, fix_outputs=False)
    # Scales of an operator alone: test_exponentials has those that trade with a shift.
    separate(typing.engine)
    return Followed(typing, [x.detach() for x in theta], program.outputs[0])


def point(case: Operator, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    theta = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in case.shapes]
    return [x.abs() + 0.1 for x in theta] if case.positive else theta


def spread_out(one: Field, shape: tuple[int, ...]) -> np.ndarray:
    index = tuple(slice(None) if dim in one.dims else None for dim in range(len(shape)))
    return np.broadcast_to(one.atoms[index], shape)


def charges(type_: Type, shape: tuple[int, ...], values: np.ndarray, program: CapturedProgram) -> np.ndarray:
    """The charge of every entry of a tensor."""
    total = np.zeros(shape)
    for one in type_.factors:
        chosen = looked_up(one, shape, program) if one.virtual else spread_out(one, shape)
        total = total + float(one.weight) * values[chosen]
    return total


def looked_up(one: Field, shape: tuple[int, ...], program: CapturedProgram) -> np.ndarray:
    """The atoms of a field that an index tensor chooses from."""
    (axis,) = one.virtual
    index = program.values[axis.key - 1_000_000_000].constant
    assert index is not None
    assert not one.dims
    return spread_out(Field(axis.dims, one.atoms[index.numpy().reshape(-1)[axis.slots]]), shape)


def allowed(result: Followed) -> tuple[list[np.ndarray], np.ndarray]:
    """For every free charge of the rule: the charges of all entries of the inputs, and of the output."""
    engine = result.typing.engine
    solution = engine.charges.solve()
    basis = solution.expand[:, solution.soft == 0].toarray()
    shapes = [tuple(x.shape) for x in result.theta]
    output_shape = result.typing.program.values[result.output].shape
    output = result.typing.known[result.output]
    assert isinstance(output, Type)
    inputs = []
    for n, shape in enumerate(shapes):
        columns = np.zeros((basis.shape[1], *shape))
        for region in engine.regions.get(f"p{n}", []):
            sizes = tuple(chosen.size for chosen in region.sets)
            for z in range(basis.shape[1]):
                columns[z][np.ix_(*region.sets)] = charges(region.type, sizes, basis[:, z], result.typing.program)
        inputs.append(columns)
    outputs = np.zeros((basis.shape[1], *output_shape))
    for z in range(basis.shape[1]):
        outputs[z] = charges(output, output_shape, basis[:, z], result.typing.program)
    return inputs, outputs


@pytest.mark.parametrize("case", OPERATORS, ids=lambda case: case.name)
def test_an_operator_commutes_with_every_charge_its_rule_allows(case: Operator) -> None:
    result = follow(case)
    inputs, outputs = allowed(result)
    for seed in range(case.points):
        theta = point(case, seed)
        for z in range(len(outputs)):
            tangents = tuple(torch.from_numpy(c[z]) * x for c, x in zip(inputs, theta, strict=True))
            pair: tuple[Tensor, Tensor] = torch.func.jvp(case.run, tuple(theta), tangents)  # type: ignore[assignment]
            y, moved = pair
            expected = torch.as_tensor(outputs[z]) * y
            expected = torch.where(torch.isfinite(expected), expected, moved)
            assert (moved - expected).norm() <= COMMUTES * (1 + moved.norm() + y.norm()), z


@pytest.mark.parametrize("case", [case for case in OPERATORS if not case.short], ids=lambda case: case.name)
def test_charges_that_a_rule_forbids_are_no_symmetry_of_the_operator(case: Operator) -> None:
    """As many independent charges as there are: the null space of δf = c·f over all charges of inputs and outputs."""
    inputs, _ = allowed(follow(case))
    count = inputs[0].shape[0]
    mine = np.concatenate(
        [c.reshape(count, c[0].size if count else x.numel()) for c, x in zip(inputs, point(case, 0), strict=True)], 1
    )
    blocks = []
    for seed in range(2 * case.points):
        theta = tuple(point(case, seed))
        y = case.run(*theta).reshape(-1)
        grads = torch.func.jacrev(lambda *t: case.run(*t).reshape(-1), argnums=tuple(range(len(theta))))(*theta)
        blocks.append(
            np.concatenate(
                [(j.reshape(y.numel(), -1) * x.reshape(-1)).numpy() for j, x in zip(grads, theta, strict=True)]
                + [-np.diag(y.numpy())],
                1,
            )
        )
    system = np.concatenate(blocks)
    _, values, vectors = np.linalg.svd(system)
    rank = int((values > 1e-9 * values[0]).sum())
    null = vectors[rank:, : mine.shape[1]]
    there = int(np.linalg.matrix_rank(null, tol=1e-7)) if null.size else 0
    assert (np.linalg.matrix_rank(mine, tol=1e-9) if count else 0) == there
