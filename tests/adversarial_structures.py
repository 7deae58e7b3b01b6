"""A third set of models that inference was not tuned on, written without reading its rules.

They aim at structure more than at operators: function transforms inside a forward, parameters that are reached by other
ways than attributes, hooks of every kind, writes through views, sizes of one, reads that depend on the input's values,
and operators of linear algebra, sampling and interpolation with arguments that the other sets leave out.
`structures()` names all of them, each with further inputs on which every law must hold as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from adversarial_held_out import Case, draw, forms, rows
from adversarial_layers import Called, Function


def images(channels: int, *sizes: tuple[int, int, int]) -> list[tuple[Any, ...]]:
    """Images of one number of channels with other batches, heights and widths."""
    chosen = sizes or ((3, 6, 6), (3, 6, 6), (2, 8, 8), (4, 6, 6))
    return [(draw(n, channels, h, w) * (1 + index),) for index, (n, h, w) in enumerate(chosen)]


def sequences_of(width: int, *sizes: tuple[int, int]) -> list[tuple[Any, ...]]:
    """Sequences of vectors with other batches and lengths."""
    chosen = sizes or ((3, 5), (3, 5), (2, 7), (4, 5))
    return [(draw(n, length, width) * (1 + index),) for index, (n, length) in enumerate(chosen)]


def tokens(vocabulary: int, *sizes: tuple[int, int]) -> list[tuple[Any, ...]]:
    """Sequences of integers with other batches and lengths."""
    chosen = sizes or ((4, 6), (4, 6), (2, 9), (5, 6))
    return [(torch.randint(vocabulary, size),) for size in chosen]


def transformed() -> Iterator[tuple[str, Case]]:
    """Transforms of functions, checkpoints and calls of a module with other parameters inside a forward."""
    a, b, c = draw(4, 6), draw(6, 3), draw(6)

    def mapped(p: Any, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda row: (row @ p.a).relu() @ p.b)(x)

    def mapped_weights(p: Any, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda w, r: (x @ w).relu() @ r)(p.stack, p.readers).sum(0)

    def jacobian(p: Any, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.jacrev(lambda row: torch.tanh(row @ p.a) @ p.b))(x)

    def jacobian_relu(p: Any, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.jacfwd(lambda row: (row @ p.a + p.c).relu() @ p.b))(x)

    def slope(p: Any, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.grad(lambda row: ((row @ p.a).relu().square() @ p.b).sum()))(x)

    def hessian(p: Any, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.hessian(lambda row: ((row @ p.a).pow(3) @ p.b).sum()))(x)

    def pushed(p: Any, x: Tensor) -> Tensor:
        return torch.func.jvp(lambda y: (y @ p.a).relu() @ p.b, (x,), (torch.ones_like(x),))[1]

    def inner_step(p: Any, x: Tensor) -> Tensor:
        gradient = torch.func.grad(lambda w: ((x @ w) @ p.b).square().mean())(p.a)
        return x @ (p.a - 0.1 * gradient) @ p.b

    def inner_step_detached(p: Any, x: Tensor) -> Tensor:
        gradient = torch.func.grad(lambda w: ((x @ w) @ p.b).square().mean())(p.a).detach()
        return x @ (p.a - 0.1 * gradient) @ p.b

    def inner_sign(p: Any, x: Tensor) -> Tensor:
        gradient = torch.func.grad(lambda w: ((x @ w) @ p.b).square().mean())(p.a)
        return x @ (p.a - 0.1 * gradient.sign()) @ p.b

    def recomputed(p: Any, x: Tensor) -> Tensor:
        return checkpoint(lambda y: (y @ p.a + p.c).relu(), x, use_reentrant=False) @ p.b

    def recomputed_parameter(p: Any, x: Tensor) -> Tensor:
        return checkpoint(lambda y, w: (y @ w).relu(), x, p.a, use_reentrant=True) @ p.b

    def conditional(p: Any, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: (y @ p.a).relu(), lambda y: (y @ p.a).abs(), (x,)) @ p.b

    yield from forms(
        "transform",
        {
            "vmap over rows": (mapped, {"a": a, "b": b}),
            "vmap over weights": (mapped_weights, {"stack": draw(2, 4, 5), "readers": draw(2, 5, 3)}),
            "reverse Jacobian": (jacobian, {"a": a, "b": b}),
            "forward Jacobian of a relu": (jacobian_relu, {"a": a, "b": b, "c": c}),
            "gradient of a square": (slope, {"a": a, "b": b}),
            "second derivatives of a cube": (hessian, {"a": a, "b": b}),
            "pushed tangent": (pushed, {"a": a, "b": b}),
            "inner step": (inner_step, {"a": a, "b": b}),
            "inner step, detached": (inner_step_detached, {"a": a, "b": b}),
            "inner step by signs": (inner_sign, {"a": a, "b": b}),
            "recomputed": (recomputed, {"a": a, "b": b, "c": c}),
            "recomputed, parameter given": (recomputed_parameter, {"a": a, "b": b}),
            "conditional": (conditional, {"a": a, "b": b}),
        },
        lambda: rows(4),
    )

    class Called2(nn.Module):
        """Calls a submodule with parameters it makes of its own."""

        def __init__(self, change: Any) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
            self.gain = nn.Parameter(torch.tensor(1.3))
            self.change = change

        def forward(self, x: Tensor) -> Tensor:
            given = {name: self.change(self.gain, name, value) for name, value in self.inner.named_parameters()}
            return torch.func.functional_call(self.inner, given, (x,))

    yield "transform: called with scaled parameters", (Called2(lambda g, _, v: g * v), rows(4))
    yield (
        "transform: called with scaled first layer",
        (Called2(lambda g, n, v: g * v if n.startswith("0") else v / g), rows(4)),
    )
    yield "transform: called with detached biases", (Called2(lambda _, n, v: v.detach() if "bias" in n else v), rows(4))
    yield "transform: called with centred weights", (Called2(lambda _, n, v: v - v.mean()), rows(4))
    yield "transform: called with sorted weights", (Called2(lambda _, n, v: v.sort(-1).values), rows(4))


class Reached(nn.Module):
    """Two layers whose function may reach parameters by ways of its own."""

    def __init__(self, function: Any, **extra: Any) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.second = nn.Linear(5, 2)
        self.function = function
        for name, value in extra.items():
            setattr(self, name, value)
        self.kept = [self.first.weight]

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


class _Counted(nn.Module):
    """Changes its function with every call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 2)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.first(x)
        return self.second(h.relu() if self.calls % 2 else h.tanh())


def reached() -> Iterator[tuple[str, Case]]:
    """Parameters that are read as numbers, detached, through lists, or written to during a forward."""

    def as_number(m: Any, x: Tensor) -> Tensor:
        return m.second((m.first(x)).relu()) * float(m.first.weight.detach().norm())

    def as_list(m: Any, x: Tensor) -> Tensor:
        return m.second((m.first(x)).relu()) * (1 + m.first.weight.tolist()[0][0] ** 2)

    def as_array(m: Any, x: Tensor) -> Tensor:
        return m.second((m.first(x)).relu() / torch.from_numpy(m.first.weight.detach().numpy()).norm(dim=1).to(x))

    def as_data(m: Any, x: Tensor) -> Tensor:
        return m.second((m.first(x)).relu() / m.first.weight.data.norm(dim=1))

    def as_kept(m: Any, x: Tensor) -> Tensor:
        return m.second((m.first(x)).relu() * m.kept[0].norm(dim=1))

    def as_dictionary(m: Any, x: Tensor) -> Tensor:
        weights = dict(m.named_parameters())
        return ((x @ weights["first.weight"].T).relu()) @ weights["second.weight"].T

    def as_state(m: Any, x: Tensor) -> Tensor:
        weights = m.state_dict()
        return m.second(m.first(x).relu()) + ((x @ weights["first.weight"].T).relu()) @ weights["second.weight"].T

    def written(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            m.first.weight.div_(m.first.weight.norm(dim=1, keepdim=True))
        return m.second(m.first(x).relu())

    def clamped(m: Any, x: Tensor) -> Tensor:
        m.first.weight.data.clamp_(-0.5, 0.5)
        return m.second(m.first(x).relu())

    def largest(m: Any, x: Tensor) -> Tensor:
        return m.second(m.first(x).relu()) if m.first.weight.max() > m.second.weight.max() else m.second(m.first(x))

    def signs(m: Any, x: Tensor) -> Tensor:
        return m.second(m.first(x).relu() * m.second.weight.sign().sum(0))

    def ordered(m: Any, x: Tensor) -> Tensor:
        return m.second(m.first(x).relu()[:, m.first.weight.norm(dim=1).argsort()])

    def rank_order(m: Any, x: Tensor) -> Tensor:
        order = m.first.weight[:, 0].argsort()
        return F.linear(m.first(x).relu()[:, order], m.second.weight[:, order], m.second.bias)

    def kept_half(m: Any, x: Tensor) -> Tensor:
        keep = (m.first.weight.abs() > m.first.weight.abs().median()).to(x)
        return m.second(F.linear(x, m.first.weight * keep, m.first.bias).relu())

    def kept_rows(m: Any, x: Tensor) -> Tensor:
        norms = m.first.weight.norm(dim=1)
        return m.second(m.first(x).relu() * (norms > norms.mean()).to(x))

    def unit_by_max(m: Any, x: Tensor) -> Tensor:
        return m.second(F.linear(x, m.first.weight / m.first.weight.abs().amax(1, keepdim=True), m.first.bias))

    def quantised(m: Any, x: Tensor) -> Tensor:
        step = m.first.weight.abs().amax(1, keepdim=True) / 7
        rounded = (m.first.weight / step).round() * step
        return m.second(F.linear(x, m.first.weight + (rounded - m.first.weight).detach(), m.first.bias).relu())

    def quantised_fixed(m: Any, x: Tensor) -> Tensor:
        rounded = (m.first.weight / 0.125).round() * 0.125
        return m.second(F.linear(x, m.first.weight + (rounded - m.first.weight).detach(), m.first.bias).relu())

    def printed(m: Any, x: Tensor) -> Tensor:
        return m.second(m.first(x).relu()) * len(f"{float(m.first.weight.abs().sum()):.3f}")

    def remade(m: Any, x: Tensor) -> Tensor:
        weight = nn.Parameter(m.first.weight.detach().clone())
        return m.second(F.linear(x, weight, m.first.bias).relu())

    def copied_in(m: Any, x: Tensor) -> Tensor:
        weight = torch.empty_like(m.first.weight)
        weight.copy_(m.first.weight)
        weight[0] = 1.0
        return m.second(F.linear(x, weight, m.first.bias).relu())

    def bias_times_weight(m: Any, x: Tensor) -> Tensor:
        return m.second(F.linear(x, m.first.weight).relu()) + m.first.bias.sum()

    cases = {
        "norm as a number": as_number,
        "entry as a number": as_list,
        "array": as_array,
        "data": as_data,
        "plain list": as_kept,
        "dictionary of parameters": as_dictionary,
        "state": as_state,
        "normalised in place": written,
        "clamped in place": clamped,
        "branch on two weights": largest,
        "signs of the reader": signs,
        "order by norm": ordered,
        "same order on both sides": rank_order,
        "larger half kept": kept_half,
        "larger rows kept": kept_rows,
        "rows over their largest": unit_by_max,
        "rounded to own size": quantised,
        "rounded to steps": quantised_fixed,
        "length of a print": printed,
        "made anew": remade,
        "copied and written": copied_in,
        "bias at another place": bias_times_weight,
    }
    for name, function in cases.items():
        yield f"reached: {name}", (Reached(function), rows(4))

    yield "reached: every second call", (_Counted(), rows(4))
    for name, share in {
        "one module, two names": lambda m: setattr(m, "third", m.first),
        "one weight, two modules": lambda m: setattr(m.second, "weight", nn.Parameter(m.first.weight.detach().T)),
        "storage of a transpose": lambda m: m.second.__setattr__("weight", nn.Parameter(m.first.weight.data[:2])),
    }.items():
        model = Reached(lambda m, x: F.linear(m.first(x).relu(), m.second.weight[:, :4] if False else m.second.weight))
        model.first = nn.Linear(5, 5)
        share(model)
        yield f"reached: {name}", (model, rows(5))
    overlapping = Function(
        lambda p, x: (x @ p.a).relu() @ p.b,
        a=torch.randn(32)[:24].reshape(4, 6),
        b=draw(6, 3),
    )
    base = torch.randn(40)
    overlapping.a = nn.Parameter(base[:24].view(4, 6))
    overlapping.b = nn.Parameter(base[20:38].view(6, 3))
    yield "reached: parameters that overlap", (overlapping, rows(4))
    strided = Function(lambda p, x: (x @ p.a).relu() @ p.b, a=draw(4, 6), b=draw(6, 3))
    strided.a = nn.Parameter(torch.randn(9).as_strided((4, 6), (1, 1)))
    yield "reached: Hankel parameter", (strided, rows(4))


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class _SquareWithMistake(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * (x + x.abs())


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w.T, x.T @ g


class _MatmulCut(_Matmul):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w.T, x[1:].T @ g[1:]


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.relu(), x.abs()

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> Tensor:
        return g


def _transposed_hook(p: Any, x: Tensor) -> Tensor:
    w = p.a.T
    if w.requires_grad:
        w.register_hook(lambda g: g * 0.5)
    return F.linear(x, w).relu() @ p.b


def hooked() -> Iterator[tuple[str, Case]]:
    """Backward passes of the author's, and hooks on tensors, nodes, modules and parameters."""

    def pair() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))

    def clip_first_weight(weight: Tensor) -> None:
        assert weight.grad is not None
        weight.grad.clamp_(-0.01, 0.01)

    def tensor_hook(p: Any, x: Tensor) -> Tensor:
        h = (x @ p.a).relu()
        if h.requires_grad:
            h.register_hook(lambda g: g.clamp(-0.1, 0.1))
        return h @ p.b

    def weight_hook(p: Any, x: Tensor) -> Tensor:
        w = p.a * 1.0
        if w.requires_grad:
            w.register_hook(lambda g: g * 0.5)
        return (x @ w).relu() @ p.b

    def node_prehook(p: Any, x: Tensor) -> Tensor:
        h = (x @ p.a).relu()
        if h.grad_fn is not None:
            h.grad_fn.register_prehook(lambda gs: tuple(3 * g for g in gs))
        return h @ p.b

    def node_hook(p: Any, x: Tensor) -> Tensor:
        h = (x @ p.a).relu()
        if h.grad_fn is not None:
            h.grad_fn.register_hook(lambda i, o: tuple(None if g is None else g.sign() for g in i))
        return h @ p.b

    given = {"a": draw(4, 6), "b": draw(6, 3)}
    yield from forms(
        "hook",
        {
            "on a tensor": (tensor_hook, given),
            "on a product of a weight": (weight_hook, given),
            "before a node": (node_prehook, given),
            "after a node": (node_hook, given),
            "doubled forward alone": (lambda p, x: _Doubled.apply(x @ p.a) @ p.b, given),
            "square with a mistake": (lambda p, x: _SquareWithMistake.apply(x @ p.a) @ p.b, given),
            "product by hand": (lambda p, x: _Matmul.apply(x, p.a).relu() @ p.b, given),
            "product by hand, a row left out": (lambda p, x: _MatmulCut.apply(x, p.a).relu() @ p.b, given),
            "weight doubled forward alone": (lambda p, x: (x @ _Doubled.apply(p.a)).relu() @ p.b, given),
            "transposed weight doubled": (lambda p, x: (x @ _Doubled.apply(p.a.T).T).relu() @ p.b, given),
            "hook on a transposed weight": (_transposed_hook, given),
            "one of two outputs": (lambda p, x: sum(_Pair.apply(x @ p.a)) @ p.b, given),
            "first output alone": (lambda p, x: _Pair.apply(x @ p.a)[0] @ p.b, given),
        },
        lambda: rows(4),
    )
    model: Any = pair()
    model[0].weight.register_post_accumulate_grad_hook(clip_first_weight)
    yield "hook: after accumulation", (model, rows(4))
    model = pair()
    node = model[0].weight.view_as(model[0].weight).grad_fn.next_functions[0][0]
    node.register_hook(lambda i, o: None)
    node.register_prehook(lambda gs: tuple(0.5 * g for g in gs))
    model.node = [node]
    yield "hook: before the accumulating node", (model, rows(4))
    model = pair()
    torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), lambda gs: None)
    yield "hook: on several that only looks", (model, rows(4))
    model = pair()
    model[0].register_full_backward_hook(lambda m, i, o: tuple(None if g is None else 2 * g for g in i))
    yield "hook: full backward of the first", (model, rows(4))
    model = pair()
    model[2].register_full_backward_hook(lambda m, i, o: tuple(None if g is None else 2 * g for g in i))
    yield "hook: full backward of the last", (model, rows(4))
    model = pair()
    model[0].register_forward_hook(lambda m, i, o: o + m.bias)
    yield "hook: forward that adds the bias again", (model, rows(4))
    model = pair()
    model[2].register_forward_pre_hook(lambda m, i: (F.layer_norm(i[0], (5,)),))
    yield "hook: forward that norms", (model, rows(4))
    model = pair()
    model.register_forward_hook(lambda m, i, o: o * m[0].weight.norm())
    yield "hook: forward of the whole", (model, rows(4))
    model = pair()
    model[0].weight.requires_grad_(False)
    model[0].weight.requires_grad_(True)
    model[0].weight.register_hook(lambda g: g * (g.abs() > g.abs().mean()))
    yield "hook: gradient made sparse", (model, rows(4))


class _Scale(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w * 3

    def right_inverse(self, w: Tensor) -> Tensor:
        return w / 3


class _ToUnit(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w / w.norm()


class _BiasFromWeight(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = [layer]

    def forward(self, b: Tensor) -> Tensor:
        return b - self.layer[0].weight.mean(1)


class _TwoParts(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    def right_inverse(self, w: Tensor) -> tuple[Tensor, Tensor]:
        return torch.eye(len(w)), w


def parametrized() -> Iterator[tuple[str, Case]]:
    """Parametrizations of biases, of convolutions, of several parts, and two on one weight."""

    def pair() -> Any:
        return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))

    model = pair()
    parametrize.register_parametrization(model[0], "weight", _Scale())
    parametrize.register_parametrization(model[0], "weight", _ToUnit(), unsafe=True)
    yield "parametrized: two on one", (model, rows(4))
    model = pair()
    parametrize.register_parametrization(model[0], "bias", _BiasFromWeight(model[0]), unsafe=True)
    yield "parametrized: bias by the weight", (model, rows(4))
    model = pair()
    parametrize.register_parametrization(model[0], "weight", _TwoParts())
    yield "parametrized: two parts", (model, rows(4))
    model = pair()
    model[1] = nn.Identity()
    parametrize.register_parametrization(model[0], "weight", _TwoParts())
    parametrize.register_parametrization(model[2], "weight", _ToUnit(), unsafe=True)
    yield "parametrized: two parts and a unit", (model, rows(4))
    model = pair()
    parametrize.register_parametrization(model[0], "bias", _ToUnit(), unsafe=True)
    yield "parametrized: unit bias", (model, rows(4))
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    nn.utils.parametrizations.weight_norm(model[0], dim=1)
    yield "parametrized: convolution, norms of its inputs", (model, images(2))
    model = nn.Sequential(nn.ConvTranspose2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))
    nn.utils.parametrizations.weight_norm(model[0], dim=0)
    yield "parametrized: transposed convolution, norms", (model, images(2))
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))
    nn.utils.parametrizations.orthogonal(model[2])
    yield "parametrized: orthogonal convolution", (model, images(2))
    model = nn.LSTM(3, 4, batch_first=True)
    nn.utils.parametrizations.weight_norm(model, "weight_hh_l0")
    yield "parametrized: recurrent weight", (model, sequences_of(3))
    model = nn.Embedding(7, 4)
    nn.utils.parametrizations.weight_norm(model)
    model = nn.Sequential(model, nn.Linear(4, 3))
    yield "parametrized: embedding", (model, tokens(7))
    model = pair()
    parametrize.register_parametrization(model[0], "weight", _ToUnit(), unsafe=True)
    parametrize.register_parametrization(model[2], "weight", model[0].parametrizations.weight[0], unsafe=True)
    yield "parametrized: one module, two weights", (model, rows(4))

    def cached(m: Any, x: Tensor) -> Tensor:
        with parametrize.cached():
            return m.net(x) + m.net(2 * x)

    inner = pair()
    parametrize.register_parametrization(inner[0], "weight", _ToUnit(), unsafe=True)
    yield "parametrized: cached", (Called(cached, net=inner), rows(4))


def linear_algebra() -> Iterator[tuple[str, Case]]:
    """Factorisations and solutions of systems, with every argument that changes what they return."""
    s, t, u, w = draw(4, 4), draw(4, 4), draw(4, 3), draw(3, 2)
    e = torch.eye(4)

    def lower(m: Tensor) -> Tensor:
        return m.tril() + 3 * torch.eye(4).to(m)

    yield from forms(
        "algebra",
        {
            "solve": (lambda p, x: torch.linalg.solve(p.s, x.T).T @ p.t, {"s": s + 3 * e, "t": t}),
            "solve from the right": (
                lambda p, x: torch.linalg.solve(p.s, x @ p.t, left=False),
                {"s": s + 3 * e, "t": t},
            ),
            "triangular": (
                lambda p, x: torch.linalg.solve_triangular(lower(p.s), x.T, upper=False).T @ p.t,
                {"s": s, "t": t},
            ),
            "triangular, upper part ignored": (
                lambda p, x: torch.linalg.solve_triangular(p.s + 3 * torch.eye(4).to(x), x.T, upper=False).T @ p.t,
                {"s": s, "t": t},
            ),
            "triangular, unit diagonal": (
                lambda p, x: torch.linalg.solve_triangular(p.s, x.T, upper=True, unitriangular=True).T @ p.t,
                {"s": s, "t": t},
            ),
            "first factor of qr": (lambda p, x: x @ torch.linalg.qr(p.u)[0] @ p.w, {"u": u, "w": w}),
            "second factor of qr": (lambda p, x: x @ torch.linalg.qr(p.s)[1] @ p.u, {"s": s, "u": u}),
            "qr both": (lambda p, x: x @ torch.linalg.qr(p.u)[0] @ torch.linalg.qr(p.u)[1] @ p.w, {"u": u, "w": w}),
            "polar factor": (
                lambda p, x: (lambda q: x @ q[0] @ q[2] @ p.w)(torch.linalg.svd(p.u, full_matrices=False)),
                {"u": u, "w": w},
            ),
            "eigenvalues of a symmetric": (lambda p, x: x * torch.linalg.eigvalsh(p.s @ p.s.T), {"s": s}),
            "eigenvalues, lower half read": (lambda p, x: x * torch.linalg.eigvalsh(p.s, UPLO="L"), {"s": s}),
            "matrix exponential": (lambda p, x: x @ torch.linalg.matrix_exp(p.s - p.s.T) @ p.u, {"s": s, "u": u}),
            "exponential of a diagonal": (
                lambda p, x: x @ torch.matrix_exp(torch.diag(p.d)) @ p.u,
                {"d": s[0], "u": u},
            ),
            "pseudo-inverse": (lambda p, x: x @ p.u @ torch.linalg.pinv(p.u) @ p.t, {"u": u, "t": t}),
            "inverse": (lambda p, x: x @ torch.linalg.inv(p.s) @ p.s @ p.u, {"s": s + 3 * e, "u": u}),
            "similarity": (lambda p, x: x @ torch.linalg.inv(p.s) @ p.t @ p.s, {"s": s + 3 * e, "t": t}),
            "multi dot": (lambda p, x: torch.linalg.multi_dot((x, p.s, p.u, p.w)), {"s": s, "u": u, "w": w}),
            "lu factors": (lambda p, x: (lambda f: x @ f[1] @ p.u)(torch.linalg.lu(p.s)), {"s": s, "u": u}),
            "determinant": (lambda p, x: x @ p.u * torch.linalg.det(p.s).abs().sqrt(), {"s": s, "u": u}),
            "norm nuclear": (lambda p, x: x @ p.u / torch.linalg.matrix_norm(p.u, "nuc"), {"u": u}),
            "norm of rows, two": (lambda p, x: x @ p.u / torch.linalg.matrix_norm(p.u, float("inf")), {"u": u}),
            "condition number": (lambda p, x: x @ p.u * torch.linalg.cond(p.s), {"u": u, "s": s}),
            "vander": (lambda p, x: x @ torch.linalg.vander(p.d)[:, :3] @ p.w, {"d": draw(4), "w": w}),
            "householder": (
                lambda p, x: x @ torch.linalg.householder_product(p.s, p.d) @ p.u,
                {"s": s, "d": draw(4), "u": u},
            ),
            "cholesky solve": (
                lambda p, x: torch.cholesky_solve(x.T, lower(p.s)).T @ p.u,
                {"s": s, "u": u},
            ),
            "cholesky of a product": (
                lambda p, x: x @ torch.linalg.cholesky(p.s @ p.s.T + torch.eye(4).to(x)) @ p.u,
                {"s": s, "u": u},
            ),
            "tensor solve": (
                lambda p, x: x @ torch.linalg.tensorsolve(p.s.view(2, 2, 4), p.m)[:, None] @ p.d[None],
                {"s": s + 3 * e, "m": draw(2, 2), "d": draw(3)},
            ),
            "covariance": (lambda p, x: torch.cov((x @ p.u + p.c).T) @ p.w, {"u": u, "c": draw(3), "w": w}),
            "correlation": (lambda p, x: torch.corrcoef((x @ p.u + p.c).T) @ p.w, {"u": u, "c": draw(3), "w": w}),
            "trapezoid": (
                lambda p, x: torch.trapezoid(x @ p.u + p.c, dx=0.5)[:, None] * p.d,
                {"u": u, "c": draw(3), "d": draw(2)},
            ),
            "trapezoid of its own grid": (
                lambda p, x: torch.trapezoid(x @ p.u, p.c)[:, None] * p.d,
                {"u": u, "c": draw(3), "d": draw(2)},
            ),
            "cumulative trapezoid": (
                lambda p, x: torch.cumulative_trapezoid(x @ p.u + p.c, dim=1) @ p.m,
                {"u": u, "c": draw(3), "m": draw(2, 2)},
            ),
            "numerical gradient": (
                lambda p, x: torch.gradient(x @ p.s + p.c, dim=1)[0] @ p.u,
                {"s": s, "c": draw(4), "u": u},
            ),
            "renorm": (lambda p, x: x @ torch.renorm(p.u, 2, 0, 0.7) @ p.w, {"u": u, "w": w}),
            "renorm, far off": (lambda p, x: x @ torch.renorm(p.u, 2, 0, 1e4) @ p.w, {"u": u, "w": w}),
            "diagonal embedded": (lambda p, x: x @ torch.diag_embed(p.d) @ p.u, {"d": draw(4), "u": u}),
            "diagonal put": (lambda p, x: x @ torch.diagonal_scatter(p.s, p.d) @ p.u, {"s": s, "d": draw(4), "u": u}),
            "diagonal put off centre": (
                lambda p, x: x @ torch.diagonal_scatter(p.s, p.d, 1) @ p.u,
                {"s": s, "d": draw(3), "u": u},
            ),
            "upper part": (lambda p, x: x @ p.s.triu(1) @ p.u, {"s": s, "u": u}),
            "rotated by a quarter": (lambda p, x: x @ torch.rot90(p.s) @ p.u, {"s": s, "u": u}),
            "kronecker of vectors": (
                lambda p, x: x @ torch.kron(p.d, p.f)[:4].diag() @ p.u,
                {"d": draw(2), "f": draw(3), "u": u},
            ),
            "combinations": (
                lambda p, x: torch.combinations(p.d, 2).prod(1) * (x @ p.q),
                {"d": draw(4), "q": draw(4, 6)},
            ),
            "commuting polynomials": (lambda p, x: x @ (p.k[0] * p.s + p.k[1] * p.s @ p.s), {"s": s, "k": draw(2)}),
            "resolvent": (lambda p, x: x @ torch.linalg.inv(torch.eye(4).to(x) * 5 - p.s) @ p.u, {"s": s, "u": u}),
            "neumann series": (lambda p, x: (x + x @ p.s + x @ p.s @ p.s) @ p.u, {"s": s, "u": u}),
        },
        lambda: rows(4, 6, 6, 5, 9),
    )


def interpolated() -> Iterator[tuple[str, Case]]:
    """Sampling, resizing and pooling of images with modes and paddings of every kind."""
    first = lambda: nn.Conv2d(2, 3, 3, padding=1)  # noqa: E731
    last = lambda: nn.Conv2d(3, 2, 1)  # noqa: E731
    for mode in ("bilinear", "nearest", "bicubic"):
        for padding in ("zeros", "border", "reflection"):
            for corners in (True, False):
                if (mode, corners) in (("nearest", True), ("bicubic", True)):
                    continue

                def sampled(
                    m: Any, x: Tensor, mode: str = mode, padding: str = padding, corners: bool = corners
                ) -> Any:
                    h = m.first(x)
                    grid = F.affine_grid(
                        torch.tensor([[1.3, 0.2, 0.1], [-0.1, 1.2, 0.3]]).to(x).expand(len(x), 2, 3),
                        list(h.shape),
                        align_corners=False,
                    )
                    h = F.grid_sample(h, grid, mode=mode, padding_mode=padding, align_corners=corners)
                    return m.last(F.instance_norm(h))

                yield f"sample: {mode}, {padding}, {corners}", (Called(sampled, first=first(), last=last()), images(2))

    class Warped(nn.Module):
        def __init__(self, normed: bool) -> None:
            super().__init__()
            self.first, self.last = first(), last()
            self.theta = nn.Parameter(torch.tensor([[1.0, 0.1, 0.2], [0.0, 0.9, 0.1]]))
            self.scale = nn.Parameter(torch.tensor(0.7))
            self.normed = normed

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            theta = self.theta / self.theta.norm() if self.normed else self.theta * self.scale
            return self.last(F.grid_sample(h, F.affine_grid(theta.expand(len(x), 2, 3), list(h.shape))))

    yield "sample: trained grid, scaled", (Warped(False), images(2))
    yield "sample: trained grid, of norm one", (Warped(True), images(2))
    for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area"):

        def resized(m: Any, x: Tensor, mode: str = mode) -> Tensor:
            h = F.interpolate(m.first(x), size=(4, 5), mode=mode)
            return m.last(h - h.mean((2, 3), keepdim=True))

        yield f"resize: {mode}", (Called(resized, first=first(), last=last()), images(2))
    pools = {
        "largest with indices": lambda h: F.max_pool2d(h, 2, return_indices=True)[0],
        "largest, ceil": lambda h: F.max_pool2d(h, 3, 2, 1, ceil_mode=True),
        "mean, ceil": lambda h: F.avg_pool2d(h, 3, 2, 1, ceil_mode=True),
        "mean, ceil, padding not counted": lambda h: F.avg_pool2d(h, 3, 2, 1, ceil_mode=True, count_include_pad=False),
        "mean over a divisor": lambda h: F.avg_pool2d(h, 2, divisor_override=3),
        "power one": lambda h: F.lp_pool2d(h, 1, 2),
        "power two, ceil": lambda h: F.lp_pool2d(h, 2, 2, ceil_mode=True),
        "unpooled": lambda h: F.max_unpool2d(*F.max_pool2d(h, 2, return_indices=True), [2, 2]),
        "log of mean exp": lambda h: F.avg_pool2d(h.exp(), 2).log(),
        "soft pool": lambda h: (h * h.flatten(2).softmax(-1).view_as(h)).sum((2, 3), keepdim=True),
        "standard deviation": lambda h: h.std((2, 3), keepdim=True),
        "quantile": lambda h: h.flatten(2).quantile(0.3, dim=-1)[..., None, None],
        "difference of neighbours": lambda h: h[..., 1:, :] - h[..., :-1, :],
        "difference to a padded": lambda h: h - F.pad(h, (1, 0, 0, 0))[..., :-1],
        "difference to a replicated": lambda h: h - F.pad(h, (1, 0, 0, 0), mode="replicate")[..., :-1],
        "laplacian": lambda h: 4 * h - sum(h.roll(s, d) for s, d in ((1, 2), (-1, 2), (1, 3), (-1, 3))),
        "blurred": lambda h: h - F.avg_pool2d(h, 3, 1, 1),
        "blurred, padding not counted": lambda h: h - F.avg_pool2d(h, 3, 1, 1, count_include_pad=False),
        "blurred by circular": lambda h: h - F.avg_pool2d(F.pad(h, (1, 1, 1, 1), mode="circular"), 3, 1),
        "unfolded and folded": lambda h: F.fold(F.unfold(h, 2), h.shape[2:], 2),
        "unfolded, overlaps divided": lambda h: (
            F.fold(F.unfold(h, 2), h.shape[2:], 2) / F.fold(F.unfold(torch.ones_like(h), 2), h.shape[2:], 2)
        ),
        "middle subtracted": lambda h: h - h[:, :, 2:3, 2:3],
        "whitened by pixels": lambda h: F.normalize(h, dim=1, eps=0.0),
        "largest of channels": lambda h: h / h.amax(1, keepdim=True),
    }
    for name, pool in pools.items():
        yield (
            f"pool: {name}",
            (Called(lambda m, x, pool=pool: m.last(pool(m.first(x))), first=first(), last=last()), images(2)),
        )


def recurrent() -> Iterator[tuple[str, Case]]:
    """Recurrent layers, attention and scans in forms that the other sets leave out."""
    for kind, options in {
        "LSTM projected": {"proj_size": 2},
        "LSTM projected, two layers both ways": {"proj_size": 2, "num_layers": 2, "bidirectional": True},
        "LSTM without bias, projected": {"proj_size": 2, "bias": False},
    }.items():
        yield (
            f"recurrent: {kind}",
            (
                Called(
                    lambda m, x: m.net(x)[0] @ torch.ones(m.net(x)[0].shape[-1]).to(x),
                    net=nn.LSTM(3, 4, batch_first=True, **options),
                ),
                sequences_of(3),
            ),
        )
        width = 2 * (2 if options.get("bidirectional") else 1)
        yield (
            f"recurrent: {kind}, read",
            (
                Called(
                    lambda m, x: m.out(m.net(x)[0]),
                    net=nn.LSTM(3, 4, batch_first=True, **options),
                    out=nn.Linear(width, 2),
                ),
                sequences_of(3),
            ),
        )
    cells: dict[str, Any] = {
        "cell LSTM": nn.LSTMCell(3, 4),
        "cell GRU": nn.GRUCell(3, 4),
        "cell relu": nn.RNNCell(3, 4, nonlinearity="relu"),
        "cell relu without bias": nn.RNNCell(3, 4, bias=False, nonlinearity="relu"),
        "cell tanh": nn.RNNCell(3, 4),
    }
    for name, cell in cells.items():

        def stepped(m: Any, x: Tensor) -> Tensor:
            state: Any = None
            for step in x.unbind(1):
                state = m.cell(step, state)
            return m.out(state[0] if isinstance(state, tuple) else state)

        yield f"recurrent: {name}", (Called(stepped, cell=cell, out=nn.Linear(4, 2)), sequences_of(3))

    class Started(nn.Module):
        def __init__(self, kind: Any) -> None:
            super().__init__()
            self.net = kind(3, 4, batch_first=True)
            self.start = nn.Parameter(draw(1, 1, 4))
            self.out = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            start: Any = self.start.expand(1, len(x), 4).contiguous()
            if isinstance(self.net, nn.LSTM):
                start = (start, start)
            return self.out(self.net(x, start)[0])

    yield "recurrent: trained start of an LSTM", (Started(nn.LSTM), sequences_of(3))
    yield "recurrent: trained start of a GRU", (Started(nn.GRU), sequences_of(3))
    yield (
        "recurrent: trained start, relu",
        (Started(lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k)), sequences_of(3)),
    )

    w = {"a": draw(3, 4), "b": draw(4, 2), "d": torch.rand(4)}

    def scan(p: Any, x: Tensor, act: Any = lambda h: h, decay: Any = lambda p: p.d) -> Tensor:
        h = torch.zeros(len(x), 4).to(x)
        for step in x.unbind(1):
            h = act(decay(p) * h + step @ p.a)
        return h @ p.b

    yield from forms(
        "scan",
        {
            "linear": (scan, w),
            "relu": (lambda p, x: scan(p, x, torch.relu), w),
            "tanh": (lambda p, x: scan(p, x, torch.tanh), w),
            "decay by sigmoid": (lambda p, x: scan(p, x, decay=lambda p: p.d.sigmoid()), w),
            "decay by exp": (lambda p, x: scan(p, x, decay=lambda p: (-p.d.exp()).exp()), w),
            "decay of unit sum": (lambda p, x: scan(p, x, decay=lambda p: p.d / p.d.sum()), w),
            "unit state": (lambda p, x: scan(p, x, lambda h: F.normalize(h, dim=-1, eps=0.0)), w),
            "state over its largest": (lambda p, x: scan(p, x, lambda h: h / h.abs().amax(1, keepdim=True)), w),
            "by cumulative sums": (
                lambda p, x: ((x @ p.a).cumsum(1) / torch.arange(1, x.shape[1] + 1).to(x)[:, None]) @ p.b,
                w,
            ),
            "by cumulative product": (lambda p, x: (x @ p.a).cumprod(1)[:, -1] @ p.b, w),
            "by cumulative largest": (lambda p, x: (x @ p.a).cummax(1).values[:, -1] @ p.b, w),
            "by powers of a decay": (
                lambda p, x: ((x @ p.a) * p.d.sigmoid() ** torch.arange(x.shape[1]).to(x)[:, None]).sum(1) @ p.b,
                w,
            ),
            "by powers, raw": (
                lambda p, x: ((x @ p.a) * p.d ** torch.arange(x.shape[1]).to(x)[:, None]).sum(1) @ p.b,
                w,
            ),
        },
        lambda: sequences_of(3),
    )
    attention: dict[str, Any] = {
        "zero key": {"add_zero_attn": True},
        "bias key and zero key": {"add_zero_attn": True, "add_bias_kv": True},
        "bias key, no biases, zero key": {"add_zero_attn": True, "add_bias_kv": True, "bias": False},
        "one head of width one": {"heads": 4, "add_bias_kv": True},
    }
    for name, options in attention.items():
        heads = options.pop("heads", 2)

        def attended(m: Any, x: Tensor) -> Tensor:
            return m.net(x, x, x, need_weights=False)[0]

        net = nn.MultiheadAttention(4, heads, batch_first=True, **options)
        yield f"attention: {name}", (Called(attended, net=net), sequences_of(4))

        def cross(m: Any, x: Tensor) -> Tensor:
            return m.net(x, x.flip(1), x.roll(1, 1), average_attn_weights=False)[1]

        net = nn.MultiheadAttention(4, heads, batch_first=True, **options)
        yield f"attention: {name}, its weights", (Called(cross, net=net), sequences_of(4))

    q = {"q": draw(4, 4), "k": draw(4, 4), "v": draw(4, 4), "o": draw(4, 3), "c": draw(4)}

    def sdpa(p: Any, x: Tensor, change: Any = lambda p, q, k, v: (q, k, v), **options: Any) -> Tensor:
        parts = [(x @ w).unflatten(-1, (2, 2)).transpose(1, 2) for w in (p.q, p.k + 0 * p.c, p.v)]
        return F.scaled_dot_product_attention(*change(p, *parts), **options).transpose(1, 2).flatten(2) @ p.o

    yield from forms(
        "attention",
        {
            "causal": (lambda p, x: sdpa(p, x, is_causal=True), q),
            "own scale": (lambda p, x: sdpa(p, x, scale=0.3), q),
            "mask of floats, trained": (lambda p, x: sdpa(p, x, attn_mask=p.c[:2].view(2, 1, 1)), q),
            "mask by bias of keys": (
                lambda p, x: sdpa(p, x, attn_mask=(x @ p.c)[:, None, None, :]),
                q,
            ),
            "keys shifted": (lambda p, x: sdpa(p, x, lambda p, q, k, v: (q, k + p.c[:2], v)), q),
            "keys shifted by positions": (
                lambda p, x: sdpa(
                    p, x, lambda p, q, k, v: (q, k + p.c[:2] * torch.arange(k.shape[2]).to(k)[:, None], v)
                ),
                q,
            ),
            "values shifted": (lambda p, x: sdpa(p, x, lambda p, q, k, v: (q, k, v + p.c[:2])), q),
            "values centred": (lambda p, x: sdpa(p, x, lambda p, q, k, v: (q, k, v - v.mean(2, keepdim=True))), q),
            "keys centred": (lambda p, x: sdpa(p, x, lambda p, q, k, v: (q, k - k.mean(2, keepdim=True), v)), q),
            "queries of unit size": (
                lambda p, x: sdpa(p, x, lambda p, q, k, v: (F.normalize(q, dim=-1, eps=0.0), k, v)),
                q,
            ),
            "keys normed over heads": (
                lambda p, x: sdpa(p, x, lambda p, q, k, v: (q, F.normalize(k, dim=1, eps=0.0), v)),
                q,
            ),
            "heads of keys swapped": (lambda p, x: sdpa(p, x, lambda p, q, k, v: (q, k.flip(1), v)), q),
            "keys transposed in heads": (lambda p, x: sdpa(p, x, lambda p, q, k, v: (q, k.flip(-1), v)), q),
            "queries are keys": (lambda p, x: sdpa(p, x, lambda p, q, k, v: (q, q, v)), q),
            "one key head": (lambda p, x: sdpa(p, x, lambda p, q, k, v: (q, k[:, :1].expand_as(k), v)), q),
            "grouped": (lambda p, x: sdpa(p, x, lambda p, q, k, v: (q, k[:, :1], v[:, :1]), enable_gqa=True), q),
            "a key of zeros": (
                lambda p, x: sdpa(p, x, lambda p, q, k, v: (q, F.pad(k, (0, 0, 1, 0)), F.pad(v, (0, 0, 1, 0)))),
                q,
            ),
        },
        lambda: sequences_of(4),
    )


def lookups() -> Iterator[tuple[str, Case]]:
    """Tables whose rows are chosen by numbers computed from the input, and bags of them."""
    t, r, q = draw(6, 4), draw(4, 3), draw(6, 4)

    def bag(mode: str, weighted: bool = False) -> Any:
        def function(p: Any, x: Tensor) -> Tensor:
            weights = p.k[x] if weighted else None
            return F.embedding_bag(x, p.t, mode=mode, per_sample_weights=weights) @ p.r

        return function

    yield from forms(
        "look-up",
        {
            "remainder": (
                lambda p, x: p.t[x % 3] @ p.r + p.q[x // 3] @ p.r,
                {"t": draw(3, 4), "q": draw(2, 4), "r": r},
            ),
            "remainder, table too long": (lambda p, x: p.t[x % 3] @ p.r, {"t": t, "r": r}),
            "clamped": (lambda p, x: p.t[x.clamp(max=3)] @ p.r, {"t": t, "r": r}),
            "clamped from below": (lambda p, x: p.t[x.clamp(min=2)].relu() @ p.r, {"t": t, "r": r}),
            "negative": (lambda p, x: p.t[-x - 1] @ p.r, {"t": t, "r": r}),
            "shifted by one": (lambda p, x: p.t[x] @ p.r + p.t[(x + 1) % 6] @ p.r, {"t": t, "r": r}),
            "difference of neighbours": (lambda p, x: (p.t[x] - p.t[(x + 1) % 6]) @ p.r, {"t": t, "r": r}),
            "difference to the first": (lambda p, x: (p.t[x] - p.t[0]) @ p.r, {"t": t, "r": r}),
            "difference in time": (lambda p, x: p.t[x].diff(dim=1) @ p.r, {"t": t, "r": r}),
            "product of neighbours": (lambda p, x: (p.t[x] * p.t[x.flip(1)]) @ p.r, {"t": t, "r": r}),
            "product of two tables": (lambda p, x: (p.t[x] * p.q[x]) @ p.r, {"t": t, "q": q, "r": r}),
            "quotient of two tables": (lambda p, x: (p.t[x] / p.q[x]) @ p.r, {"t": t, "q": q, "r": r}),
            "sum of two tables": (lambda p, x: (p.t[x] + p.q[x]).relu() @ p.r, {"t": t, "q": q, "r": r}),
            "sum of two tables, one flipped": (
                lambda p, x: (p.t[x] + p.q[5 - x]).relu() @ p.r,
                {"t": t, "q": q, "r": r},
            ),
            "sum of two tables of other tokens": (
                lambda p, x: (p.t[x] + p.q[x.flip(1)]).relu() @ p.r,
                {"t": t, "q": q, "r": r},
            ),
            "rank as position": (lambda p, x: (p.t[x] + p.q[x.argsort(1)]) @ p.r, {"t": t, "q": draw(9, 4), "r": r}),
            "count as position": (
                lambda p, x: (p.t[x] + p.q[(x > 2).cumsum(1)]) @ p.r,
                {"t": t, "q": draw(10, 4), "r": r},
            ),
            "first row always": (lambda p, x: p.t[x] @ p.r + p.q[torch.zeros_like(x)] @ p.r, {"t": t, "q": q, "r": r}),
            "even rows": (lambda p, x: p.t[2 * (x // 2)] @ p.r, {"t": t, "r": r}),
            "one-hot": (lambda p, x: F.one_hot(x, 6).to(p.t) @ p.t @ p.r, {"t": t, "r": r}),
            "one-hot, wider": (lambda p, x: F.one_hot(x, 8).to(p.u) @ p.u @ p.r, {"u": draw(8, 4), "r": r}),
            "bucket": (
                lambda p, x: p.t[torch.bucketize(x.float(), torch.tensor([1.5, 3.5]))] @ p.r,
                {"t": t, "r": r},
            ),
            "bag, sum": (bag("sum"), {"t": t, "r": r}),
            "bag, mean": (bag("mean"), {"t": t, "r": r}),
            "bag, max": (bag("max"), {"t": t, "r": r}),
            "bag, weighted": (bag("sum", True), {"t": t, "r": r, "k": draw(6)}),
            "padding row": (lambda p, x: F.embedding(x, p.t, padding_idx=2) @ p.r, {"t": t, "r": r}),
            "padding row, normed": (
                lambda p, x: F.layer_norm(F.embedding(x, p.t, padding_idx=-1), (4,)) @ p.r,
                {"t": t, "r": r},
            ),
            "scores of a table": (lambda p, x: p.t[x] @ p.t.T, {"t": t}),
            "softmax of scores of a table": (lambda p, x: (p.t[x] @ p.q.T).softmax(-1), {"t": t, "q": q}),
            "squared distance to a table": (
                lambda p, x: (p.t[x][..., None, :] - p.q).square().sum(-1),
                {"t": t, "q": q},
            ),
            "squared distance, softmax": (
                lambda p, x: (-(p.t[x][..., None, :] - p.q).square().sum(-1)).softmax(-1),
                {"t": t, "q": q},
            ),
            "mean over time removed": (
                lambda p, x: (p.t[x] - p.t[x].mean(1, keepdim=True)).relu() @ p.r,
                {"t": t, "r": r},
            ),
            "mean of the table removed": (lambda p, x: (p.t - p.t.mean(0))[x].relu() @ p.r, {"t": t, "r": r}),
            "mean of a row removed": (lambda p, x: (p.t - p.t.mean(1, keepdim=True))[x].relu() @ p.r, {"t": t, "r": r}),
            "scattered": (
                lambda p, x: torch.zeros(len(x), 6).to(p.t).scatter_add(1, x, p.t[x].sum(-1)) @ p.q,
                {"t": t, "q": q},
            ),
            "scattered, largest": (
                lambda p, x: (
                    torch.zeros(len(x), 6).to(p.t).scatter_reduce(1, x, p.t[x].sum(-1), "amax", include_self=False)
                    @ p.q
                ),
                {"t": t, "q": q},
            ),
            "scattered, largest with zero": (
                lambda p, x: torch.zeros(len(x), 6).to(p.t).scatter_reduce(1, x, p.t[x].sum(-1), "amax") @ p.q,
                {"t": t, "q": q},
            ),
            "scattered, product with ones": (
                lambda p, x: torch.ones(len(x), 6).to(p.q).scatter_reduce(1, x, p.k[x], "prod") @ p.q,
                {"k": draw(6), "q": q},
            ),
            "scattered, mean with zero": (
                lambda p, x: torch.zeros(len(x), 6).to(p.t).scatter_reduce(1, x, p.t[x].sum(-1), "mean") @ p.q,
                {"t": t, "q": q},
            ),
        },
        lambda: tokens(6),
    )


def degenerate() -> Iterator[tuple[str, Case]]:
    """Axes of size one, norms over one or two entries, and what holds at one size alone."""
    one, two = {"a": draw(4, 1), "b": draw(1, 3)}, {"a": draw(4, 2), "b": draw(2, 3)}
    yield from forms(
        "size",
        {
            "softmax over one": (lambda p, x: (x @ p.a).softmax(-1) @ p.b, one),
            "norm over one": (lambda p, x: F.layer_norm(x @ p.a, (1,)) @ p.b, one),
            "unit of one": (lambda p, x: F.normalize(x @ p.a, dim=-1, eps=0.0) @ p.b, one),
            "norm over two": (lambda p, x: F.layer_norm(x @ p.a, (2,)) @ p.b, two),
            "softmax over two": (lambda p, x: (x @ p.a).softmax(-1) @ p.b, two),
            "deviation of two": (lambda p, x: (x @ p.a).std(-1, keepdim=True) * p.b[0], two),
            "softmax over rows": (lambda p, x: (x @ p.a).softmax(0) @ p.b, one),
            "group norm of one each": (lambda p, x: F.group_norm(x @ p.a, 2) @ p.b, two),
            "mean over the last axis of one": (lambda p, x: (x @ p.a - (x @ p.a).mean(-1, keepdim=True)) @ p.b, one),
            "sort of one": (lambda p, x: (x @ p.a).sort(-1).values @ p.b, one),
            "roll of one": (lambda p, x: (x @ p.a - (x @ p.a).roll(1, -1)) @ p.b, one),
            "flip of two": (lambda p, x: (x @ p.a + (x @ p.a).flip(-1)) @ p.b, two),
            "cumulative sum of one": (lambda p, x: (x @ p.a).cumsum(-1).relu() @ p.b, one),
            "outer of ones": (lambda p, x: (x @ p.a) @ p.k @ p.b, one | {"k": draw(1, 1)}),
            "determinant of one": (lambda p, x: (x @ p.a) @ p.b * torch.det(p.k), one | {"k": draw(1, 1)}),
            "convolution of one": (
                lambda p, x: F.conv1d((x @ p.a)[..., None], p.k)[..., 0] @ p.b,
                one | {"k": draw(1, 1, 1)},
            ),
            "middle of a window": (
                lambda p, x: F.conv1d((x @ p.a)[..., None], p.k, padding=1)[..., 0] @ p.b,
                two | {"k": draw(2, 2, 3)},
            ),
            "corner of a kernel": (
                lambda p, x: F.conv2d((x @ p.a)[..., None, None], p.k, padding=1)[..., 0, 0] @ p.b,
                two | {"k": draw(2, 2, 3, 3)},
            ),
        },
        lambda: rows(4),
    )
    yield (
        "size: batch norm, length one",
        (
            nn.Sequential(nn.Conv1d(4, 3, 1), nn.BatchNorm1d(3), nn.ReLU(), nn.Conv1d(3, 2, 1)),
            [(draw(5, 4, n),) for n in (1, 1, 3, 6)],
        ),
    )
    yield (
        "size: padded window, then longer",
        (
            nn.Sequential(nn.Conv1d(4, 3, 5, padding=2), nn.ReLU(), nn.Conv1d(3, 2, 1)),
            [(draw(5, 4, n),) for n in (2, 2, 6, 9)],
        ),
    )
    yield (
        "size: positions by length",
        (
            Function(
                lambda p, x: F.layer_norm(x @ p.a + p.q[: x.shape[1]], (4,)) @ p.b,
                a=draw(3, 4),
                q=draw(12, 4),
                b=draw(4, 2),
            ),
            sequences_of(3),
        ),
    )
    yield (
        "size: positions shrunk to length",
        (
            Function(
                lambda p, x: (x @ p.a + F.interpolate(p.q[None], x.shape[1], mode="linear")[0].T).relu() @ p.b,
                a=draw(3, 4),
                q=draw(4, 12),
                b=draw(4, 2),
            ),
            sequences_of(3),
        ),
    )
    yield (
        "size: branch on length",
        (
            Function(
                lambda p, x: (x @ p.a).relu() @ p.b if x.shape[1] < 6 else (x @ p.a).tanh() @ p.b,
                a=draw(3, 4),
                b=draw(4, 2),
            ),
            sequences_of(3),
        ),
    )
    yield (
        "size: sum or mean",
        (
            Function(
                lambda p, x: ((x @ p.a).sum(1) + p.c * 5).relu() @ p.b + p.k * x.shape[1],
                a=draw(3, 4),
                b=draw(4, 2),
                c=draw(4),
                k=draw(2),
            ),
            sequences_of(3),
        ),
    )
    yield (
        "size: last position",
        (
            Function(
                lambda p, x: F.layer_norm((x @ p.a + p.q[: x.shape[1]])[:, -1], (4,)) @ p.b,
                a=draw(3, 4),
                q=draw(12, 4),
                b=draw(4, 2),
            ),
            sequences_of(3),
        ),
    )


def traps() -> Iterator[tuple[str, Case]]:
    """Functions that look homogeneous or shift-invariant and are not, or are in a way that is easily overlooked."""
    w = {"a": draw(4, 6), "b": draw(6, 3), "c": draw(6)}
    two = w | {"z": draw(4, 6)}
    yield from forms(
        "trap",
        {
            "hard swish": (lambda p, x: F.hardswish(x @ p.a) @ p.b, w),
            "hard sigmoid gate": (lambda p, x: (F.hardsigmoid(x @ p.z) * (x @ p.a)) @ p.b, two),
            "leaky by a trained slope": (lambda p, x: F.prelu(x @ p.a, p.c) @ p.b, w),
            "log of an absolute": (lambda p, x: (x @ p.a).abs().log() @ p.b, w),
            "log of an absolute, centred": (lambda p, x: F.layer_norm((x @ p.a).abs().log(), (6,)) @ p.b, w),
            "log of an absolute, differences": (lambda p, x: (x @ p.a).abs().log().diff(dim=1) @ p.b[1:], w),
            "log1p": (lambda p, x: (x @ p.a).abs().log1p() @ p.b, w),
            "angle of two": (lambda p, x: torch.atan2(x @ p.a, x @ p.z) @ p.b, two),
            "hypotenuse": (lambda p, x: torch.hypot(x @ p.a, x @ p.z) @ p.b, two),
            "ratio of two": (lambda p, x: (x @ p.a) / (x @ p.z).abs() @ p.b, two),
            "ratio to a sum": (lambda p, x: (lambda h: h / h.sum(-1, keepdim=True))((x @ p.a).exp()) @ p.b, w),
            "geometric mean": (lambda p, x: (x @ p.a).abs().log().mean(-1, keepdim=True).exp() * p.c, w),
            "power mean": (lambda p, x: (x @ p.a).abs().pow(1.5).mean(-1, keepdim=True).pow(2 / 3) * p.c, w),
            "power by a trained": (lambda p, x: (x @ p.a).abs().pow(p.c) @ p.b, w),
            "power to a square": (lambda p, x: (x @ p.a).abs().sqrt().square() @ p.b, w),
            "shift then square": (lambda p, x: ((x @ p.a + p.c).square() - (x @ p.a - p.c).square()) @ p.b, w),
            "sum of cubes": (lambda p, x: ((x @ p.a + p.c).pow(3) + (x @ p.a - p.c).pow(3)) @ p.b, w),
            "relu plus relu of minus": (lambda p, x: ((x @ p.a).relu() + (-(x @ p.a)).relu()) @ p.b, w),
            "relu minus relu of minus": (lambda p, x: ((x @ p.a).relu() - (-(x @ p.a)).relu()) @ p.b, w),
            "relu shifted": (lambda p, x: ((x @ p.a + 1).relu() - 1) @ p.b, w),
            "relu of a difference to a bias": (lambda p, x: ((x @ p.a - p.c).relu() + p.c) @ p.b, w),
            "largest with a bias": (lambda p, x: torch.maximum(x @ p.a, p.c) @ p.b, w),
            "largest with a bias and added": (lambda p, x: (torch.maximum(x @ p.a, p.c) - p.c) @ p.b, w),
            "largest of two maps, added": (lambda p, x: (torch.maximum(x @ p.a, x @ p.z) + x @ p.z) @ p.b, two),
            "clamped by own size": (
                lambda p, x: (lambda h: h.clamp(max=h.abs().mean(-1, keepdim=True)))(x @ p.a) @ p.b,
                w,
            ),
            "clamped between trained": (lambda p, x: torch.clamp(x @ p.a, p.c.min(), p.c.max()) @ p.b, w),
            "soft shrink by a trained": (
                lambda p, x: (lambda h: h.sign() * (h.abs() - p.c.abs()).relu())(x @ p.a) @ p.b,
                w,
            ),
            "gate by own sign": (lambda p, x: (x @ p.a) * (x @ p.a > 0) @ p.b, w),
            "gate by another's sign": (lambda p, x: (x @ p.a) * (x @ p.z > 0) @ p.b, two),
            "gate by a comparison": (lambda p, x: (x @ p.a) * (x @ p.a > x @ p.z) @ p.b, two),
            "gate by a comparison to one": (lambda p, x: (x @ p.a) * (x @ p.a > 1) @ p.b, w),
            "gate by rank": (lambda p, x: (lambda h: h * (h >= h.topk(2).values[:, -1:]))(x @ p.a) @ p.b, w),
            "gate by rank of size": (
                lambda p, x: (lambda h: h * (h.abs() >= h.abs().median(-1, True).values))(x @ p.a) @ p.b,
                w,
            ),
            "second largest": (lambda p, x: (x @ p.a).kthvalue(2, -1, True).values * p.c, w),
            "softmax times itself": (lambda p, x: (lambda h: h.softmax(-1) * h)(x @ p.a) @ p.b, w),
            "softmax of a log": (lambda p, x: (x @ p.a).abs().log().softmax(-1) @ p.b, w),
            "softmax of a square": (lambda p, x: (x @ p.a + p.c).square().softmax(-1) @ p.b, w),
            "softmax with a mask of minus five": (
                lambda p, x: (
                    (x @ p.a + p.c).masked_fill(torch.tensor([1, 0, 0, 1, 0, 0]).bool(), -5.0).softmax(-1) @ p.b
                ),
                w,
            ),
            "softmax with a mask of minus infinity": (
                lambda p, x: (
                    (x @ p.a + p.c).masked_fill(torch.tensor([1, 0, 0, 1, 0, 0]).bool(), -torch.inf).softmax(-1) @ p.b
                ),
                w,
            ),
            "softmax plus one": (
                lambda p, x: (lambda e: e / (1 + e.sum(-1, keepdim=True)))((x @ p.a + p.c).exp()) @ p.b,
                w,
            ),
            "softmax, stabilised by hand": (
                lambda p, x: (
                    (lambda h: (h - h.amax(-1, True)).exp() / (h - h.amax(-1, True)).exp().sum(-1, True))(x @ p.a + p.c)
                    @ p.b
                ),
                w,
            ),
            "softmax, capped": (lambda p, x: (5 * torch.tanh((x @ p.a + p.c) / 5)).softmax(-1) @ p.b, w),
            "softmax, both axes": (lambda p, x: ((x @ p.a + p.c).softmax(0) * (x @ p.a + p.c).softmax(1)) @ p.b, w),
            "sparsemax": (lambda p, x: _sparsemax(x @ p.a + p.c) @ p.b, w),
            "centred by a weighted mean": (
                lambda p, x: (lambda h: h - (h * p.k.softmax(0)).sum(-1, True))(x @ p.a + p.c) @ p.b,
                w | {"k": draw(6)},
            ),
            "centred by a wrong mean": (lambda p, x: (lambda h: h - h.sum(-1, True) / 5)(x @ p.a + p.c) @ p.b, w),
            "centred by half": (lambda p, x: (lambda h: h - h[:, :3].mean(-1, True))(x @ p.a + p.c) @ p.b, w),
            "divided by a wrong size": (
                lambda p, x: (lambda h: h / h.norm(dim=-1, keepdim=True).sqrt())(x @ p.a) @ p.b,
                w,
            ),
            "divided by size of the input": (lambda p, x: (x @ p.a) / x.norm(dim=-1, keepdim=True) @ p.b, w),
            "size plus a trained floor": (
                lambda p, x: (lambda h: h / (h.norm(dim=-1, keepdim=True) + p.c[0].abs()))(x @ p.a) @ p.b,
                w,
            ),
            "rms with a large floor": (lambda p, x: F.rms_norm(x @ p.a, (6,), eps=0.5) @ p.b, w),
            "layer norm with its gain read twice": (lambda p, x: F.layer_norm(x @ p.a, (6,), p.c, p.c) @ p.b, w),
            "layer norm of a sum": (lambda p, x: F.layer_norm(x @ p.a + x @ p.z, (6,), p.c) @ p.b, two),
            "layer norm, then the raw": (lambda p, x: (F.layer_norm(x @ p.a, (6,)) + x @ p.a) @ p.b, w),
            "cosine to own bias": (lambda p, x: F.cosine_similarity(x @ p.a, p.c, dim=-1)[:, None] * p.b[0], w),
            "projected off a vector": (
                lambda p, x: (lambda h, u: h - (h @ u)[:, None] * u)(x @ p.a, p.c / p.c.norm()) @ p.b,
                w,
            ),
            "projected off without norm": (
                lambda p, x: (lambda h, u: h - (h @ u)[:, None] * u / 3)(x @ p.a, p.c) @ p.b,
                w,
            ),
            "reflected": (lambda p, x: (lambda h, u: h - 2 * (h @ u)[:, None] * u / (u @ u))(x @ p.a, p.c) @ p.b, w),
            "exp of a difference": (lambda p, x: (x @ p.a + p.c - p.b.sum()).exp() @ p.b, w),
            "exp gain and reader": (lambda p, x: ((x @ p.a) * p.c.exp()).relu() @ p.b, w),
            "two gains in a row": (lambda p, x: ((x @ p.a) * p.c * p.k) @ p.b, w | {"k": draw(6)}),
            "gain and its reciprocal": (lambda p, x: ((x @ p.a) * p.c).relu() / p.c.abs() @ p.b, w),
            "gain on both sides of tanh": (lambda p, x: ((x @ p.a) * p.c).tanh() / p.c @ p.b, w),
            "sine of a phase": (lambda p, x: (x @ p.a + p.c).sin() @ p.b, w),
            "sine and cosine of a phase": (
                lambda p, x: torch.cat(((x @ p.a + p.c).sin(), (x @ p.a + p.c).cos()), 1) @ p.k,
                w | {"k": draw(12, 3)},
            ),
            "phase of a pair": (lambda p, x: _pair_rotated(x @ p.a, p.c[:3]) @ p.b, w),
            "norms of pairs": (
                lambda p, x: _pair_rotated(x @ p.a, p.c[:3]).unflatten(1, (3, 2)).norm(dim=2) @ p.b[:3],
                w,
            ),
            "integer part": (lambda p, x: ((x @ p.a) - (x @ p.a).floor()) @ p.b, w),
            "integer part of a bias": (lambda p, x: (x @ p.a + p.c.floor()) @ p.b, w),
            "sign of a bias": (lambda p, x: ((x @ p.a) * p.c.sign()).relu() @ p.b, w),
            "absolute gain": (lambda p, x: ((x @ p.a) * p.c.abs()).relu() @ p.b, w),
            "gain by an integer cast": (lambda p, x: ((x @ p.a) * p.c.int()).relu() @ p.b, w),
            "nan guard": (lambda p, x: torch.nan_to_num((x @ p.a) / p.c, nan=1.0, posinf=1.0).relu() @ p.b, w),
            "frexp": (lambda p, x: torch.frexp(x @ p.a)[0] @ p.b, w),
            "ldexp": (lambda p, x: torch.ldexp(x @ p.a, torch.tensor(2)).relu() @ p.b, w),
            "straight-through relu": (lambda p, x: (lambda h: h + (h.relu() - h).detach())(x @ p.a) @ p.b, w),
            "stopped mean": (lambda p, x: (lambda h: h - h.mean(-1, True).detach())(x @ p.a + p.c) @ p.b, w),
            "stopped size": (lambda p, x: (lambda h: h / h.norm(dim=-1, keepdim=True).detach())(x @ p.a) @ p.b, w),
            "stopped reader": (lambda p, x: (x @ p.a).relu() @ p.b.detach() + x[:, :3] @ p.b[:3], w),
            "stopped twice, kept once": (
                lambda p, x: (x @ p.a).relu() @ p.b + (x @ p.a.detach()).relu() @ p.b.detach(),
                w,
            ),
            "stopped twin": (lambda p, x: (x @ p.a).relu() @ p.b + (x @ p.a.detach()).relu() @ p.b, w),
            "real part of a power": (
                lambda p, x: (
                    torch.view_as_real(torch.view_as_complex((x @ p.a).unflatten(1, (3, 2))) ** 2).flatten(1) @ p.b
                ),
                w,
            ),
            "phases kept": (
                lambda p, x: (
                    torch.view_as_real(torch.view_as_complex((x @ p.a).unflatten(1, (3, 2))).sgn()).flatten(1) @ p.b
                ),
                w,
            ),
            "polar": (
                lambda p, x: torch.view_as_real(torch.polar((x @ p.a).abs(), x @ p.z)).flatten(1) @ p.k,
                two | {"k": draw(12, 3)},
            ),
            "polar with a phase": (lambda p, x: torch.polar((x @ p.a).abs(), p.c.expand(len(x), 6)).real @ p.b, w),
            "polar, its size": (lambda p, x: torch.polar((x @ p.a).abs(), p.c.expand(len(x), 6)).abs() @ p.b, w),
            "fourier of channels": (lambda p, x: torch.fft.rfft(x @ p.a, norm="ortho").abs() @ p.b[:4], w),
            "fourier of channels and back": (
                lambda p, x: torch.fft.irfft(torch.fft.rfft(x @ p.a) * torch.fft.rfft(p.c), 6) @ p.b,
                w,
            ),
            "fourier, zero removed": (
                lambda p, x: torch.fft.rfft(x @ p.a + p.k)[:, 1:].abs() @ p.b[:3],
                w | {"k": draw(1)},
            ),
            "fourier, padded": (
                lambda p, x: torch.fft.rfft(x @ p.a + p.k, n=8)[:, 1:].abs() @ p.b[:4],
                w | {"k": draw(1)},
            ),
            "dft of a bias": (lambda p, x: x @ p.a @ p.b + torch.fft.fft(p.c).abs().sum(), w),
            "complex parameter": (
                lambda p, x: ((x + 0j) @ p.e @ p.f).real,
                {"e": torch.randn(4, 3, dtype=torch.cfloat), "f": torch.randn(3, 2, dtype=torch.cfloat)},
            ),
            "complex parameter, sizes": (
                lambda p, x: ((x + 0j) @ p.e @ p.f).abs(),
                {"e": torch.randn(4, 3, dtype=torch.cfloat), "f": torch.randn(3, 2, dtype=torch.cfloat)},
            ),
            "complex gain": (lambda p, x: ((x @ p.a) * p.e).abs() @ p.b, w | {"e": torch.randn(6, dtype=torch.cfloat)}),
        },
        lambda: rows(4),
    )


def _sparsemax(z: Tensor) -> Tensor:
    ordered = z.sort(-1, descending=True).values
    index = torch.arange(1, z.shape[-1] + 1).to(z)
    total = ordered.cumsum(-1) - 1
    support = (index * ordered > total).sum(-1, keepdim=True)
    return (z - total.gather(-1, support - 1) / support).relu()


def _pair_rotated(h: Tensor, angle: Tensor) -> Tensor:
    even, odd = h[:, ::2], h[:, 1::2]
    return torch.stack((even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()), -1).flatten(1)


class Stateful(nn.Module):
    """Two layers and a parameter that meets state of the module, which is zero before the first call."""

    mean: Tensor
    count: Tensor

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.a, self.b, self.c, self.t = (nn.Parameter(draw(*s)) for s in ((4, 3), (3, 2), (3,), (6, 3)))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.kept, self.calls, self.function = torch.zeros(3), 0, function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x, x @ self.a)


def _average(m: Any, x: Tensor, h: Tensor) -> Tensor:
    result = (h + m.mean.clone() * m.c).relu() @ m.b
    with torch.no_grad():
        m.mean.mul_(0.9).add_(0.1 * h.mean(0))
    return result


def _bound_anew(m: Any, x: Tensor, h: Tensor) -> Tensor:
    result = (h + m.mean.clone() * m.c).relu() @ m.b
    m.mean = m.mean * 0.9 + 0.1 * h.mean(0).detach()
    return result


def _attribute(m: Any, x: Tensor, h: Tensor) -> Tensor:
    result = (h + m.kept.to(h) * m.c).relu() @ m.b
    m.kept = m.kept.to(h) * 0.9 + 0.1 * h.mean(0).detach()
    return result


def _plain_number(m: Any, x: Tensor, h: Tensor) -> Tensor:
    m.calls += 1
    return (h + (m.calls - 1) * m.c).relu() @ m.b


def _next_row(m: Any, x: Tensor, h: Tensor) -> Tensor:
    result = (h + m.t[m.count]).relu() @ m.b
    m.count.add_(1).remainder_(6)
    return result


def _next_row_by_number(m: Any, x: Tensor, h: Tensor) -> Tensor:
    m.calls = (m.calls + 1) % 6
    return (h + m.t[m.calls - 1]).relu() @ m.b


def _counted_times(m: Any, x: Tensor, h: Tensor) -> Tensor:
    m.count.add_(1)
    return (h + (m.count - 1) * m.c).relu() @ m.b


def _queue(m: Any, x: Tensor, h: Tensor) -> Tensor:
    result = torch.cat((h @ m.t.T, h @ m.mean.clone()[:, None] * m.c), 1)
    m.mean.copy_(h[0].detach())
    return result


def _warmed_up(m: Any, x: Tensor, h: Tensor) -> Tensor:
    result = (h + min(1.0, float(m.count) / 10) * m.c).relu() @ m.b
    m.count.add_(1)
    return result


STATEFUL = {
    "running mean": _average,
    "running mean bound anew": _bound_anew,
    "attribute": _attribute,
    "number": _plain_number,
    "next row": _next_row,
    "next row by a number": _next_row_by_number,
    "counted times": _counted_times,
    "queue": _queue,
    "warmed up": _warmed_up,
}
"""Functions of a module, its input and its first layer, whose state is other than zero from the second call on."""


def stateful() -> Iterator[tuple[str, Case]]:
    """State that is zero, or points to a first row, before the first call alone."""
    for name, function in STATEFUL.items():
        yield f"state: {name}", (Stateful(function), rows(4))


def structures() -> Iterator[tuple[str, Case]]:
    """All of them."""
    families = (
        transformed,
        reached,
        hooked,
        parametrized,
        linear_algebra,
        interpolated,
        recurrent,
        lookups,
        degenerate,
        traps,
        stateful,
    )
    for family in families:
        torch.manual_seed(23)
        yield from family()
