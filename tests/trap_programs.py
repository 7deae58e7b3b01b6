"""Programs made to fool whoever reads laws off code: what autograd makes of them is not what it seems.

Each trap looks like a chain with laws that it does not have, or only some of them. Beside each stands an honest ReLU
network, so that finding nothing at all is no way to pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 4
TRAPS: dict[str, Callable[[], nn.Module]] = {}


def trap(name: str) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Enter a module class into the table."""

    def enter(cls: type[nn.Module]) -> type[nn.Module]:
        assert name not in TRAPS
        TRAPS[name] = cls
        return cls

    return enter


class Pair(nn.Module):
    """Two linear maps with something between them: GL(4) if that were nothing."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, WIDTH, bias=bias), nn.Linear(WIDTH, 2, bias=bias)

    def between(self, h: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x)))


class Beside(nn.Module):
    """A trap and an honest network, side by side."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.honest = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2))

    def forward(self, x: Tensor) -> tuple[Any, Tensor]:
        return self.inner(x), self.honest(x)


HONEST = 2
"""Laws of the honest network."""


def between(name: str, bias: bool = False) -> Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]:
    """A trap that is a function between two linear maps."""

    def enter(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        class Trap(Pair):
            def between(self, h: Tensor) -> Tensor:
                return function(h)

        TRAPS[name] = lambda: Trap(bias)
        return function

    return enter


@between("one entry raised in place")
def _(h: Tensor) -> Tensor:
    h[:, 0] += 1.0
    return h


@between("some entries scaled in place")
def _(h: Tensor) -> Tensor:
    h[:, :2].mul_(3.0)
    return h


@between("a view rectified in place")
def _(h: Tensor) -> Tensor:
    v = h.view(-1, 2, 2)[:, 1]
    v.relu_()
    return h


@between("a transposed view written through")
def _(h: Tensor) -> Tensor:
    h.t()[1].copy_(h.t()[0])
    return h


@between("a copy written, the original used")
def _(h: Tensor) -> Tensor:
    c = h.clone()
    c[:, 0] = 0.0
    return h + 0.0 * c.sum()


@between("products of all pairs of entries")
def _(h: Tensor) -> Tensor:
    return (h.unsqueeze(-1) * h.unsqueeze(-2)).sum(-1)


@between("quotients of all pairs of entries")
def _(h: Tensor) -> Tensor:
    return (h.unsqueeze(-1) / h.unsqueeze(-2)).sum(-1)


@between("an expanded view added to in place")
def _(h: Tensor) -> Tensor:
    return h.unsqueeze(0).expand(2, -1, -1).clone().add_(h.sum(0)).sum(0)


@between("overlapping slices of the hidden vector")
def _(h: Tensor) -> Tensor:
    return torch.cat((h[:, :3] + h[:, 1:], h[:, :1]), 1)


@between("overlapping windows by as_strided")
def _(h: Tensor) -> Tensor:
    return h.contiguous().as_strided((h.shape[0], 3, 2), (h.shape[1], 1, 1)).sum(-1).repeat(1, 2)[:, :4]


@between("overlapping windows by unfold")
def _(h: Tensor) -> Tensor:
    return F.pad(h, (0, 1)).unfold(1, 2, 1).prod(-1)


@between("detached on the way")
def _(h: Tensor) -> Tensor:
    return h.detach() + 0.5 * h


@between("divided by its own detached norm")
def _(h: Tensor) -> Tensor:
    return h / h.detach().norm(dim=-1, keepdim=True)


@between("a scale computed without gradients")
def _(h: Tensor) -> Tensor:
    with torch.no_grad():
        scale = h.abs().mean()
    return h / scale


@between("doubled behind autograd's back")
def _(h: Tensor) -> Tensor:
    h.data.mul_(2.0)
    return h


@between("a number read out")
def _(h: Tensor) -> Tensor:
    return h * float(h[0, 0].detach())


@between("a gradient hook on the hidden vector")
def _(h: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda g: 0.5 * g)
    return h


@between("rounded straight through")
def _(h: Tensor) -> Tensor:
    return h + (torch.round(h) - h).detach()


@between("a threshold that is not zero")
def _(h: Tensor) -> Tensor:
    return torch.where(h > 0.3, h, torch.zeros_like(h))


@between("gated by a comparison of two entries")
def _(h: Tensor) -> Tensor:
    return h * (h > h.roll(1, -1))


@between("clamped on both sides")
def _(h: Tensor) -> Tensor:
    return h.clamp(-1.0, 0.5)


@between("hard shrinkage")
def _(h: Tensor) -> Tensor:
    return F.hardshrink(h, 0.2)


@between("cast to integers and back")
def _(h: Tensor) -> Tensor:
    return (3 * h).to(torch.int64).to(h.dtype) * 0.1 + h.relu()


@between("cast to truth values and back")
def _(h: Tensor) -> Tensor:
    return h.bool().to(h.dtype) + h


@between("sorted")
def _(h: Tensor) -> Tensor:
    return h.sort(-1).values


@between("the two largest only")
def _(h: Tensor) -> Tensor:
    values, indices = h.topk(2, dim=-1)
    return torch.zeros_like(h).scatter(1, indices, values)


@between("summed along itself")
def _(h: Tensor) -> Tensor:
    return h.cumsum(-1)


@between("added to its own reflection")
def _(h: Tensor) -> Tensor:
    return h + h.flip(-1)


@between("added to its own shift, biased", bias=True)
def _(h: Tensor) -> Tensor:
    return h + torch.roll(h, 1, dims=-1)


@between("divided by its largest entry")
def _(h: Tensor) -> Tensor:
    return h / h.max(dim=-1, keepdim=True).values


@between("a hand-made dropout mask")
def _(h: Tensor) -> Tensor:
    return h * (torch.rand_like(h) > 0.5) * 2


@between("noise in proportion")
def _(h: Tensor) -> Tensor:
    return h + 0.1 * torch.randn_like(h)


@between("a complex product")
def _(h: Tensor) -> Tensor:
    z = torch.view_as_complex(h.reshape(-1, 2, 2).contiguous())
    return torch.view_as_real(z * z).flatten(1)


@between("lengths of complex numbers")
def _(h: Tensor) -> Tensor:
    return torch.view_as_complex(h.reshape(-1, 2, 2).contiguous()).abs().repeat(1, 2)


@between("joined with itself, then halved")
def _(h: Tensor) -> Tensor:
    return torch.cat((h, h), -1).view(-1, 4, 2).mean(-1)


@between("written at places that repeat")
def _(h: Tensor) -> Tensor:
    return torch.zeros_like(h).index_add(1, torch.tensor([0, 1, 1, 0]), h)


@between("put into a buffer by an out argument")
def _(h: Tensor) -> Tensor:
    with torch.no_grad():
        room = torch.empty_like(h)
        torch.mul(h, 2.0, out=room)
    return room * h


@between("the sign and the size apart")
def _(h: Tensor) -> Tensor:
    return h.sign() * (h.abs() + 0.1).sqrt()


@between("a remainder")
def _(h: Tensor) -> Tensor:
    return h.remainder(1.0)


@between("a softmax over the hidden vector, times it")
def _(h: Tensor) -> Tensor:
    return h.softmax(-1) * h


@between("a log of the size")
def _(h: Tensor) -> Tensor:
    return h * torch.log(h.abs() + 1e-3)


@between("in place through a view of a view")
def _(h: Tensor) -> Tensor:
    h = h.clone()
    h.view(-1, 2, 2)[:, 1].transpose(0, 1).view(2, -1)[1].tanh_()
    return h


@between("NaN where it is small, taken for zero")
def _(h: Tensor) -> Tensor:
    return torch.where(h > 0.1, h, float("nan")).nan_to_num(0.0)


@between("written by out= behind autograd's back")
def _(h: Tensor) -> Tensor:
    h = h.clone()
    with torch.no_grad():
        torch.mul(h, h.sigmoid(), out=h)
    return h


@between("rounded, straight through by detach")
def _(h: Tensor) -> Tensor:
    return h + (h.round() - h).detach()


@between("complex numbers by their sizes")
def _(h: Tensor) -> Tensor:
    z = torch.view_as_complex(h.reshape(-1, 2, 2).contiguous())
    return torch.view_as_real(z * z.abs()).reshape(h.shape)


@between("complex views written in place")
def _(h: Tensor) -> Tensor:
    h = h.clone()
    z = torch.view_as_complex(h.view(-1, 2, 2))
    torch.view_as_real(z)[:, 0, 1] = 1.0
    return h


@between("entries put twice in one place")
def _(h: Tensor) -> Tensor:
    where = torch.tensor([0, 0, 1, 3])
    return h.index_put((torch.arange(h.shape[0])[:, None], where), h.flip(-1).square(), accumulate=False)


@between("entries added up in one place")
def _(h: Tensor) -> Tensor:
    where = torch.tensor([0, 0, 1, 3])
    return h.index_put((torch.arange(h.shape[0])[:, None], where), h.flip(-1), accumulate=True)


@trap("parameters swapped by functional_call")
class Swapped(nn.Module):
    """What is called first uses the weight of what is called second, turned round."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.out = nn.Linear(4, 2, bias=False)

    def forward(self, x: Tensor) -> Any:
        x = F.pad(x, (0, 1))
        first = torch.func.functional_call(self.a, {"weight": self.b.weight.T}, (x,))
        return self.out(torch.func.functional_call(self.b, {"weight": self.a.weight}, (first,)) + self.b(x))


@trap("a branch on the data")
class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        return self.b(h) if float(x.sum()) > 0 else self.c(h)


@trap("a branch on a parameter")
class ParameterBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        return self.b(h) * 2 if float(self.a.weight.norm()) > 1e-6 else self.b(h)


@trap("another way on every second call")
class Alternating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, WIDTH, bias=False), nn.Linear(WIDTH, 2, bias=False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.a(x)
        return self.b(h.tanh() if self.calls % 2 == 0 else torch.tanh(h * 1.0))


@trap("overlapping slices of one weight")
class OverlappingSlices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 3))
        self.b, self.c = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.linear(x, self.w[:4]).relu()) + self.c(F.linear(x, self.w[2:]).tanh())


@trap("a Toeplitz weight by as_strided")
class Toeplitz(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.t = nn.Parameter(torch.randn(6))
        self.b = nn.Linear(WIDTH, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.linear(x, self.t.as_strided((WIDTH, 3), (1, 1))).relu())


@trap("a weight and its transpose")
class OwnTranspose(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w @ self.w.t() @ self.w


@trap("queries that are keys")
class SharedQueryKey(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qk, self.v = nn.Linear(3, WIDTH), nn.Linear(3, WIDTH)
        self.o = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        q = self.qk(x)
        return self.o((q @ q.t()).softmax(-1) @ self.v(x))


@trap("the diagonal of a weight")
class Diagonal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 3))
        self.b = nn.Linear(3, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b((x @ self.w).relu() * torch.einsum("ii->i", self.w))


@trap("the inverse of a weight")
class Inverse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 3))
        self.b = nn.Linear(3, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(x @ torch.linalg.inv(self.w + 3 * torch.eye(3, dtype=x.dtype)))


@trap("a weight through its singular values")
class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.linear(x, self.a.weight / torch.linalg.svdvals(self.a.weight)[0]))


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -0.5 * g


class _Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class _WrongLinear(torch.autograd.Function):
    """x Wᵀ with the gradient of W short by a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        grad = g.t() @ x
        grad[0] *= 1.1
        return g @ w, grad


@trap("a gradient turned round")
class GradientReversal(Pair):
    def between(self, h: Tensor) -> Tensor:
        return _Reversed.apply(h)


@trap("binary hidden units, straight through")
class Binary(Pair):
    def between(self, h: Tensor) -> Tensor:
        return _Sign.apply(h)


@trap("an integer path")
class IntegerPath(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.table, self.b = nn.Linear(3, WIDTH), nn.Embedding(WIDTH, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.table(self.a(x).argmax(-1)))


@trap("a table with rows written over")
class WrittenTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.patch, self.b = (
            nn.Parameter(torch.randn(WIDTH, 3)),
            nn.Parameter(torch.randn(2, 3)),
            nn.Linear(3, 2, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        whole = self.table.clone()
        whole[torch.tensor([0, 2])] = self.patch
        return self.b(x @ whole.t() @ whole)


@trap("an embedding renormalised in place")
class MaxNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.b = nn.Embedding(5, 3, max_norm=0.5), nn.Linear(3, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.table((x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()))


@trap("a weight clamped in place before use")
class Clamped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, WIDTH, bias=False), nn.Linear(WIDTH, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.a.weight.clamp_(-0.3, 0.3)
        return self.b(self.a(x).relu())


@trap("a running mean kept in a buffer")
class Running(nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.training:
            # The new mean depends on the weights, the old one does not; both are subtracted without a gradient.
            mean = 0.9 * self.mean.to(h.dtype) + 0.1 * h.detach().mean(0)
            self.mean = mean.detach().to(self.mean.dtype) * 0
        return self.b((h - mean).relu() if self.training else h.relu())


@trap("a hook that scales one parameter's gradient")
class HookedParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, WIDTH, bias=False), nn.Linear(WIDTH, 2, bias=False)
        self.a.weight.register_hook(lambda g: 0.5 * g)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())


@trap("a forward hook that squashes")
class HookedModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, WIDTH, bias=False), nn.Linear(WIDTH, 2, bias=False)
        self.a.register_forward_hook(lambda module, args, output: output.tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


@trap("two parameters on one storage")
class OneStorage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.b.weight.data = self.a.weight.data

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())


@trap("part of a parameter's storage shared")
class PartOfStorage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        room = torch.randn(5, 3)
        self.a, self.b = nn.Parameter(room[:4]), nn.Parameter(room[1:])

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.a.t()).relu() @ self.b


@trap("dimensions that all coincide")
class Coinciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(3, 3, bias=False) for _ in range(4))
        self.mix = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = x[:3]
        return self.o(self.mix @ (self.q(x) @ self.k(x).t()).softmax(-1) @ self.v(x)) * self.mix


@trap("a sum of squares, no vector left")
class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, WIDTH, bias=False), nn.Linear(3, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).square().sum(-1) - (self.b(x) ** 4).sum(-1).sqrt()


@trap("a wrong linear backward, written by hand")
class WrongLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(WIDTH, 3)), nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return _WrongLinear.apply(_WrongLinear.apply(x, self.a).relu(), self.b)


def build(name: str) -> Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """A builder of one trap beside its honest network, with an input."""

    def make() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(7)) + 0.2
        return Beside(TRAPS[name]()), (x,), {}

    return make


EXPECTED_FALSE = {
    "a wrong linear backward, written by hand": "a wrong gradient: laws of the function fail on it, as they must",
}
"""Traps whose identities fail because the program's backward is wrong, which is what an audit is for."""
