"""Functions that tempt a certificate to prove something false, each with the number of laws it really has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

P = Mapping[str, Tensor]


def numbers(*shape: int) -> Tensor:
    return torch.arange(1, 1 + int(torch.tensor(shape).prod()), dtype=torch.float64).reshape(shape) / 4


@dataclass(frozen=True, kw_only=True)
class Trap:
    """f(params, x) with parameters and an example input, and what is true of it.

    `laws` is the number of independent laws of what training does to it; None where nothing may be said. `refused` is
    what the refusal says, where the function has no program.
    """

    name: str
    f: Callable[[Any, Any], Tensor]
    start: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: {"a": (2,), "b": (2,)})
    x: Any = field(default_factory=lambda: torch.zeros(2))
    laws: int | None = None
    refused: str = ""
    sharp: bool = True
    """Whether the bound is reached; samples need not activate everything that there is."""

    def params(self) -> dict[str, Tensor]:
        return {name: numbers(*shape) for name, shape in self.start.items()}


W2: Mapping[str, tuple[int, ...]] = {"W": (2,)}
PAIR: Mapping[str, tuple[int, ...]] = {"a": (1,), "b": (1,)}
ONE = torch.zeros(1)


class _Doubled(torch.autograd.Function):
    """The identity, with twice its gradient."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g


def _written_under_no_grad(p: P, x: Tensor) -> Tensor:
    y = p["a"] * x
    with torch.no_grad():
        y.mul_(p["b"])
    return y


def _written_through_detach(p: P, x: Tensor) -> Tensor:
    y = p["a"] * x * 1.0
    y.detach().mul_(p["b"])
    return y


def _into_a_view(p: P, x: Tensor) -> Tensor:
    y = torch.zeros(2, 2, dtype=torch.float64)
    y[0] = p["a"] * x
    y[:, 1] += p["b"]
    return y.sum(0)


def _no_grad_table(p: P, x: Tensor) -> Tensor:
    with torch.no_grad():
        table = torch.zeros(2, dtype=torch.float64)
        table[0] = p["a"].sum()
    return p["a"] * p["b"] * x * 1.0 + 0 * table


def _hooked(p: P, x: Tensor) -> Tensor:
    y = p["a"] * x
    if y.requires_grad:
        y.register_hook(lambda g: 3 * g)
    else:
        y.register_hook(lambda g: g)
    return y * p["b"]


def _baked(p: P, x: Tensor) -> Tensor:
    return p["a"] * x * torch.nn.Parameter(p["b"] * 1.0)


def _copied(p: P, x: Tensor) -> Tensor:
    return p["a"] * x * torch.tensor(p["b"].tolist(), dtype=torch.float64)


def _item(p: P, x: Tensor) -> Tensor:
    return p["a"] * x * float(p["b"][0])


def _checkpointed(p: P, x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(lambda a, b: a * b * x, p["a"], p["b"], use_reentrant=False)


def _accumulated(p: P, x: Tensor) -> Tensor:
    return torch.zeros(2, dtype=torch.float64).index_put((torch.tensor([0, 0]),), p["a"] * p["b"] * x, accumulate=True)


def _buffer(p: P, x: Tensor) -> Tensor:
    _STATE.add_(1.0)
    return p["a"] * p["b"] * x + 0 * _STATE


_STATE = torch.zeros(2, dtype=torch.float64)

INDEX = torch.tensor([-1, 1])
TOKENS = torch.tensor([0, 1])
LONG = torch.tensor([3, 5])

TRAPS: tuple[Trap, ...] = (
    # Indices.
    Trap(
        name="a repeated place written as −1 and as n − 1",
        f=lambda p, x: x[:1] * (p["W"][INDEX] ** 3 * x).sum(),
        start=W2,
        laws=1,
    ),
    Trap(
        name="the same place as −1 and as n − 1 in an input",
        f=lambda p, x: x[0] * (p["W"][x[1]] ** 3 * torch.tensor([1.0, 2.0])).sum(),
        start=W2,
        x=lambda g: (torch.randn(1, generator=g), torch.tensor([-1, 1])),
        laws=1,
    ),
    Trap(
        name="two places of which one counts from the end, in an input",
        f=lambda p, x: x[0] * (p["W"][x[1]] ** 3 * torch.tensor([1.0, 2.0])).sum(),
        start=W2,
        x=lambda g: (torch.randn(1, generator=g), torch.tensor([-1, 0])),
        laws=1,
    ),
    Trap(
        name="a computed index that counts from the end",
        f=lambda p, x: (p["W"][(x > 0).long() - 2] ** 2 * x).sum()[None],
        start=W2,
        laws=0,
    ),
    Trap(name="a computed mask", f=lambda p, x: p["W"][x > 0].sum()[None] * x[:1], start=W2, refused="mask|shape"),
    Trap(
        name="gather with the same place twice",
        f=lambda p, x: p["W"].gather(0, torch.tensor([1, 1, 1])) * x[0],
        start={"W": (2,)},
        laws=1,
    ),
    Trap(
        name="scatter to one place twice",
        f=lambda p, x: torch.zeros(2, dtype=torch.float64).scatter(0, torch.tensor([1, 1]), p["W"] * x),
        start=W2,
        refused="twice",
    ),
    Trap(name="index_put with accumulate", f=_accumulated, refused="index_put"),
    Trap(
        name="scatter_add",
        f=lambda p, x: torch.zeros(2).double().scatter_add(0, TOKENS * 0, p["a"] * x),
        refused="scatter_add",
    ),
    Trap(name="index_add", f=lambda p, x: p["b"].index_add(0, TOKENS * 0, p["a"] * x), refused="index|scatter"),
    Trap(name="take_along_dim", f=lambda p, x: torch.take_along_dim(p["a"], TOKENS.flip(0)) * p["b"] * x, laws=2),
    Trap(
        name="an empty index",
        f=lambda p, x: torch.cat([p["a"][torch.tensor([], dtype=torch.long)], p["b"] * x]),
        laws=2,
    ),
    # Stopped gradients.
    Trap(name="a detached factor", f=lambda p, x: p["a"].detach() * p["b"] * x, laws=2),
    Trap(
        name="a detached maximum that cancels",
        f=lambda p, x: torch.softmax(p["a"] - p["a"].max().detach(), 0) * x,
        start={"a": (2,)},
        laws=1,
    ),
    Trap(
        name="a detach that few inputs see",
        f=lambda p, x: torch.where(x > 1, p["a"].detach(), p["a"]) * p["b"] * x,
        laws=0,
        sharp=False,
    ),
    Trap(
        name="straight through",
        f=lambda p, x: (p["a"] + (torch.tanh(p["a"]) - p["a"]).detach()) * x,
        start={"a": (2,)},
        laws=0,
    ),
    Trap(name="detach in place", f=lambda p, x: (p["a"] * 1).detach_() * p["b"] * x, refused="detach_"),
    Trap(
        name="huge against small",
        f=lambda p, x: (1e40 * p["a"] + p["b"]) * x,
        start=PAIR,
        x=ONE,
        laws=1,
    ),
    Trap(name="written under no_grad", f=_written_under_no_grad, refused="writes into"),
    Trap(name="written through detach", f=_written_through_detach, refused="writes into"),
    Trap(name="a table made under no_grad", f=_no_grad_table, laws=2),
    Trap(
        name="an autograd function of one's own", f=lambda p, x: _Doubled.apply(p["a"] * x) * p["b"], refused="_Doubled"
    ),
    Trap(name="a hook on a gradient", f=_hooked, refused="hook"),
    Trap(name="a value taken out as a new parameter", f=_baked, refused="values of the function|traced"),
    Trap(name="a value taken out as a list", f=_copied, refused="tolist"),
    Trap(name="a value taken out as a number", f=_item, refused="traced|item"),
    Trap(name="through .data", f=lambda p, x: p["a"].data * p["b"] * x, refused="data"),
    Trap(
        name="through NumPy",
        f=lambda p, x: torch.as_tensor(p["a"].detach().numpy()) * p["b"] * x,
        refused="storage|numpy",
    ),
    Trap(name="checkpointed", f=_checkpointed, refused="saved tensor hooks"),
    Trap(
        name="the padding row of an embedding",
        f=lambda p, x: F.embedding(x, p["E"], padding_idx=0).sum(0) * p["w"],
        start={"E": (3, 2), "w": (2,)},
        x=torch.tensor([0, 2, 1]),
        laws=2,
    ),
    Trap(
        name="an embedding that scales gradients by frequency",
        f=lambda p, x: F.embedding(x, p["E"], scale_grad_by_freq=True).sum(0) * p["w"],
        start={"E": (3, 2), "w": (2,)},
        x=torch.tensor([0, 2, 1]),
        refused="frequency|scale_grad",
    ),
    # Whole numbers and types.
    Trap(
        name="int64 that wraps around",
        f=lambda p, x: p["a"] * (x * (2**40) * (2**40)).double() + p["b"] * x,
        start=PAIR,
        x=torch.tensor([1, 2**20]),
        refused="wrap",
    ),
    Trap(
        name="int8 that wraps around",
        f=lambda p, x: p["a"] * (x.to(torch.int8) * 100).double() + p["b"] * x,
        start=PAIR,
        x=torch.tensor([1, 100]),
        refused="wrap",
    ),
    Trap(name="truth plus truth", f=lambda p, x: p["a"] * ((x > 0) + (x > -1)).double() * x, start={"a": (2,)}, laws=0),
    Trap(name="not of whole numbers", f=lambda p, x: p["a"] * x.logical_not().double() + p["b"] * x, x=LONG, laws=2),
    Trap(name="and of whole numbers", f=lambda p, x: p["a"] * (x & 3).double() + p["b"], x=LONG, refused="bits"),
    Trap(name="complement of whole numbers", f=lambda p, x: p["a"] * (~x).double() + p["b"], x=LONG, refused="bits"),
    Trap(
        name="logical and of whole numbers",
        f=lambda p, x: p["a"] * torch.logical_and(x, x - 3).double() + p["b"] * x,
        x=LONG,
        laws=0,
    ),
    Trap(name="integer division", f=lambda p, x: p["a"] * (x // 2).double() + p["b"], x=LONG, refused="rounding_mode"),
    Trap(name="remainder", f=lambda p, x: p["a"] * (x % 2).double() + p["b"], x=LONG, refused="remainder"),
    Trap(
        name="bits read as numbers",
        f=lambda p, x: p["a"].view(torch.int64).double() * x + p["b"],
        refused="view.dtype|traced",
    ),
    Trap(name="rounding", f=lambda p, x: torch.round(p["a"] * 4) * x + p["b"], refused="round"),
    Trap(name="the sign", f=lambda p, x: torch.sign(p["a"]) * p["b"] * x, refused="sign"),
    Trap(
        name="half precision inside",
        f=lambda p, x: (p["a"].half() * x.half()).double() * p["b"],
        refused="values|rounds",
    ),
    # Kinks, ties and masks.
    Trap(
        name="sort with ties", f=lambda p, x: p["a"][torch.sort(torch.relu(x)).indices] * x, start={"a": (2,)}, laws=0
    ),
    Trap(name="a sorted product", f=lambda p, x: torch.sort(p["a"] * p["b"]).values * x, laws=2),
    Trap(name="the larger of the same", f=lambda p, x: torch.maximum(p["a"], p["a"]) * x, start={"a": (2,)}, laws=None),
    Trap(
        name="where with an infinite branch",
        f=lambda p, x: torch.where(x > -1e9, p["a"] * p["b"] * x, torch.log(-(p["a"] ** 2))),
        laws=2,
    ),
    Trap(
        name="masked scores",
        f=lambda p, x: (p["a"] * x).masked_fill(torch.tensor([True, False]), -torch.inf).softmax(0) * p["b"],
        laws=3,
    ),
    Trap(
        name="a mask of +∞",
        f=lambda p, x: 1 / (p["a"] * x).masked_fill(torch.tensor([True, False]), torch.inf) * p["b"],
        refused="∞",
    ),
    Trap(
        name="NaN in a branch that is not taken",
        f=lambda p, x: torch.where(torch.tensor([True, True]), p["a"] * p["b"] * x, torch.nan),
        refused="NaN|∞",
    ),
    Trap(
        name="softplus with a threshold of zero", f=lambda p, x: F.softplus(p["a"] * x, threshold=0.0) * p["b"], laws=0
    ),
    Trap(
        name="clamp between tensors",
        f=lambda p, x: torch.clamp(p["a"] * x, -p["b"].abs() - 9, p["b"].abs() + 9),
        laws=None,
    ),
    # Views and memory.
    Trap(name="in place on views", f=_into_a_view, laws=1),
    Trap(
        name="as_strided of a transpose",
        f=lambda p, x: p["M"].t().as_strided((2,), (1,)) * x,
        start={"M": (2, 2)},
        refused="as_strided",
    ),
    Trap(
        name="as_strided that overlaps",
        f=lambda p, x: p["a"].clone().as_strided((2, 2), (0, 1)).sum(0) * p["b"] * x,
        laws=2,
    ),
    Trap(name="a flipped cumulative sum", f=lambda p, x: torch.cumsum((p["a"] * p["b"]).flip(0), 0) * x, laws=2),
    Trap(name="a cumulative product", f=lambda p, x: torch.cumprod(p["a"], 0) * p["b"] * x, refused="cumprod"),
    Trap(name="a buffer that counts", f=_buffer, refused="in-place|changes"),
    Trap(name="random numbers", f=lambda p, x: p["a"] * p["b"] * x + 1e-40 * torch.rand(2), refused="random"),
    Trap(
        name="dropout of almost nothing", f=lambda p, x: F.dropout(p["a"] * p["b"] * x, 1e-12, True), refused="random"
    ),
    # Shapes.
    Trap(
        name="an empty parameter",
        f=lambda p, x: p["a"] * p["b"] * x + p["none"].sum(),
        start={"a": (2,), "b": (2,), "none": (0,)},
        laws=2,
    ),
    Trap(name="a sum over nothing", f=lambda p, x: p["a"] * p["b"] * x + p["a"][:0].sum(), laws=2),
    Trap(
        name="an unused parameter", f=lambda p, x: p["a"] * p["b"] * x, start={"a": (2,), "b": (2,), "c": (1,)}, laws=3
    ),
    Trap(name="a shared parameter", f=lambda p, x: p["a"] * p["a"] * p["b"] * x, laws=2),
    Trap(name="broadcasting", f=lambda p, x: p["a"][:, None] * p["b"][None] * x, laws=1),
    Trap(
        name="a product of nothing",
        f=lambda p, x: p["a"] * p["b"] * x + (torch.zeros(2, 0).double() @ torch.zeros(0, 2).double()).sum(0),
        laws=2,
    ),
    Trap(name="a pair that cancels", f=lambda p, x: (p["a"] - p["a"]) * x + p["b"] * x, laws=2),
    Trap(name="a power of zero", f=lambda p, x: p["a"] ** 0 * p["b"] * x, laws=2),
)
