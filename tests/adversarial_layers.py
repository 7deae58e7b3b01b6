"""Layers of torch with every mode, and models that use one parameter in two ways, for `adversarial_models`."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

Built = tuple[nn.Module, tuple[Any, ...]]


class Function(nn.Module):
    """A function of named parameters and inputs as a module."""

    def __init__(self, function: Callable[..., Any], **parameters: Tensor) -> None:
        super().__init__()
        self.function = function
        for name, value in parameters.items():
            setattr(self, name, nn.Parameter(value))

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


class Called(nn.Module):
    """Modules and a function of them and the inputs."""

    def __init__(self, function: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def convolutions() -> Iterator[tuple[str, Built]]:
    """Convolutions of every mode between biased ones, under norms that centre and without."""
    modes: list[dict[str, Any]] = [
        {"padding": padding, "padding_mode": mode, "stride": stride, "dilation": dilation, "groups": groups}
        for (padding, mode), (stride, dilation), groups in itertools.product(
            ((0, "zeros"), (1, "zeros"), (2, "reflect"), (1, "replicate"), (2, "circular")),
            ((1, 1), (2, 1), (1, 2)),
            (1, 2),
        )
    ]
    for number, mode in enumerate(modes):
        title = "-".join(str(value) for value in mode.values())
        end = nn.InstanceNorm1d(4) if number % 2 else nn.Identity()
        model = nn.Sequential(nn.Conv1d(2, 4, 1), nn.Conv1d(4, 4, 3, **mode), end, nn.Conv1d(4, 2, 1))
        yield f"conv1d {title}", (model, (torch.randn(2, 2, 11),))
    for stride, padding, output, groups in itertools.product((1, 2), (0, 1), (0, 1), (1, 2)):
        if output >= stride:
            continue
        layer = nn.ConvTranspose1d(4, 4, 3, stride, padding, output, groups)
        norm = nn.GroupNorm(1, 4)
        name = f"transposed {stride}-{padding}-{output}-{groups}"
        yield name, (nn.Sequential(nn.Conv1d(2, 4, 1), layer, norm), (torch.randn(2, 2, 5),))
    depthwise = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.Conv2d(4, 2, 1))
    yield "depthwise", (depthwise, (torch.randn(2, 3, 4, 4),))
    same = nn.Sequential(nn.Conv2d(3, 4, 2, padding="same"), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    yield "same", (same, (torch.randn(3, 3, 5, 5),))
    stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4))
    in_use = copy.deepcopy(stem).eval()
    yield "biased stem", (stem, (torch.randn(3, 3, 5, 5),))
    yield "biased stem in use", (in_use, (torch.randn(3, 3, 5, 5),))
    yield "unbatched", (nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Conv1d(4, 2, 3)), (torch.randn(2, 9),))
    yield "conv3d", (nn.Sequential(nn.Conv3d(1, 3, 2), nn.ReLU(), nn.Conv3d(3, 2, 2)), (torch.randn(2, 1, 4, 4, 4),))


def recurrent() -> Iterator[tuple[str, Built]]:
    """Recurrent layers, with projections, directions, layers and states."""
    x = torch.randn(5, 3, 4)
    options: list[dict[str, Any]] = [{}, {"bidirectional": True}, {"num_layers": 2}, {"batch_first": True}]
    for option in options:
        for kind in (nn.LSTM, nn.GRU, nn.RNN):
            layer = kind(4, 3, **option)
            yield f"{kind.__name__} {option}", (Called(lambda m, x: m.layer(x)[0], layer=layer), (x,))
    yield (
        "RNN relu",
        (
            Called(lambda m, x: m.head(m.layer(x)[0]), layer=nn.RNN(4, 3, nonlinearity="relu"), head=nn.Linear(3, 2)),
            (x,),
        ),
    )
    for layers in (1, 2):
        projected = nn.LSTM(4, 5, num_layers=layers, proj_size=2)
        model = Called(lambda m, x: m.head(m.layer(x)[0]), layer=projected, head=nn.Linear(2, 3))
        yield f"LSTM projected {layers}", (model, (x,))
    for cell in (nn.LSTMCell(4, 3), nn.GRUCell(4, 3), nn.RNNCell(4, 3, nonlinearity="relu")):

        def unrolled(m: Any, x: Tensor) -> Tensor:
            state = None
            for step in x:
                state = m.cell(step, state)
            return state[0] if isinstance(state, tuple) else state  # type: ignore[return-value]

        yield type(cell).__name__, (Called(unrolled, cell=cell), (x,))

    def decayed(p: Any, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[1], 3, dtype=x.dtype)
        for step in x:
            h = torch.exp(-p.r.exp()) * h + step @ p.a
        return h @ p.b

    yield "decay", (Function(decayed, r=torch.randn(3), a=torch.randn(4, 3), b=torch.randn(3, 2)), (x,))

    def number(p: Any, x: Tensor) -> Tensor:
        h: Any = 0
        for step in x:
            h = p.w * h + step @ p.a
        return (h.relu() if isinstance(h, Tensor) else h) @ p.b

    yield "a number first", (Function(number, w=torch.rand(3), a=torch.randn(4, 3), b=torch.randn(3, 2)), (x,))


def attentions() -> Iterator[tuple[str, Built]]:
    """Multi-head attention with every option."""
    x, other = torch.randn(3, 5, 4), torch.randn(3, 6, 6)
    for bias, kv, zero, norm in itertools.product((True, False), repeat=4):
        layer = nn.MultiheadAttention(4, 2, bias=bias, add_bias_kv=kv, add_zero_attn=zero, batch_first=True)
        parts: dict[str, nn.Module] = {"layer": layer, "norm": nn.LayerNorm(4) if norm else nn.Identity()}

        def run(m: Any, x: Tensor) -> Tensor:
            h = m.norm(x)
            result: Tensor = m.layer(h, h, h, need_weights=False)[0]
            return result

        yield f"attention bias={bias} kv={kv} zero={zero} norm={norm}", (Called(run, **parts), (x,))
    crossed = nn.MultiheadAttention(4, 2, kdim=6, vdim=6, batch_first=True)
    yield "attention crossed", (Called(lambda m, x, y: m.layer(x, y, y)[0], layer=crossed), (x, other))
    weights = nn.MultiheadAttention(4, 2, batch_first=True)
    yield "attention weights", (Called(lambda m, x: m.layer(x, x, x)[1], layer=weights), (x,))
    mask = torch.ones(5, 5).triu(1).bool()
    yield (
        "attention masked",
        (
            Called(
                lambda m, x: m.layer(x, x, x, attn_mask=mask)[0], layer=nn.MultiheadAttention(4, 2, batch_first=True)
            ),
            (x,),
        ),
    )
    for first, act in itertools.product((True, False), ("relu", "gelu")):
        encoder = nn.TransformerEncoderLayer(4, 2, 6, 0.0, act, batch_first=True, norm_first=first)
        yield f"encoder {first} {act}", (encoder, (x,))
    yield "decoder", (nn.TransformerDecoderLayer(4, 2, 6, 0.0, batch_first=True), (x, x.flip(1)))


def lookups() -> Iterator[tuple[str, Built]]:
    """Look-up tables with every option."""
    index = torch.tensor([[0, 2, 1], [2, 2, 5], [4, 0, 0]])
    options: list[dict[str, Any]] = [
        {},
        {"padding_idx": 0},
        {"padding_idx": -1},
        {"scale_grad_by_freq": True},
        {"max_norm": 1.0},
    ]
    for option in options:
        table = nn.Embedding(6, 4, **option)
        yield f"embedding {option}", (nn.Sequential(table, nn.Linear(4, 3)), (index,))
        centred = nn.Sequential(nn.Embedding(6, 4, **option), nn.LayerNorm(4), nn.Linear(4, 3))
        yield f"embedding normed {option}", (centred, (index,))
    for mode, option in itertools.product(("sum", "mean", "max"), options[:4]):
        if mode == "max" and "scale_grad_by_freq" in option:
            continue
        bag = nn.EmbeddingBag(6, 4, mode=mode, **option)
        yield f"bag {mode} {option}", (nn.Sequential(bag, nn.Linear(4, 3)), (index,))
    weighted = nn.EmbeddingBag(6, 4, mode="sum")
    given = torch.rand(3, 3)
    yield (
        "bag weighted",
        (
            Called(lambda m, i, w: m.head(m.bag(i, per_sample_weights=w)), bag=weighted, head=nn.Linear(4, 2)),
            (index, given),
        ),
    )

    def positions(p: Any, i: Tensor) -> Tensor:
        h = p.e[i] + p.s * p.p[: i.shape[1]]
        return F.layer_norm(h, (4,)) @ p.b

    tables = {"e": torch.randn(6, 4), "p": torch.randn(8, 4), "s": torch.tensor(0.5), "b": torch.randn(4, 2)}
    yield "scaled positions", (Function(positions, **tables), (index,))
    tied = Function(lambda p, i: F.layer_norm(p.e[i], (4,)) @ p.e.T, e=torch.randn(6, 4))
    yield "tied table", (tied, (index,))
    rows = Function(
        lambda p, i: (p.e[i] @ p.b).relu() @ p.c, e=torch.randn(6, 4), b=torch.randn(4, 3), c=torch.randn(3, 2)
    )
    yield "indexed table", (rows, (index,))
    experts = Function(
        lambda p, i, x: torch.einsum("nd,ndh,nhk->nk", x, p.a[i], p.b[i]),
        a=torch.randn(6, 4, 3),
        b=torch.randn(6, 3, 2),
    )
    yield "indexed experts", (experts, (index[:, 0], torch.randn(3, 4)))
    crossed = Function(
        lambda p, i, x: torch.einsum("nd,ndh,nhk->nk", x, p.a[i], p.b[i.flip(0)]),
        a=torch.randn(6, 4, 3),
        b=torch.randn(6, 3, 2),
    )
    yield "experts crossed", (crossed, (index[:, 0], torch.randn(3, 4)))


def parametrised() -> Iterator[tuple[str, Built]]:
    """Weights that are functions of parameters."""

    def net() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))

    x = torch.randn(6, 4)
    axes: tuple[Any, ...] = (0, 1, None)
    for dim in axes:
        model = net()
        parametrizations.weight_norm(model[0], dim=dim)
        yield f"weight norm {dim}", (model, (x,))
    for mode in (True, False):
        model = net().train(mode)
        parametrizations.spectral_norm(model[0])
        yield f"spectral norm {mode}", (model, (x,))
    for kind in ("matrix_exp", "cayley", "householder"):
        model = net()
        parametrizations.orthogonal(model[0], orthogonal_map=kind)
        yield f"orthogonal {kind}", (model, (x,))
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "symmetric": lambda w: w.triu() + w.triu(1).mT,
        "skew": lambda w: w.triu(1) - w.triu(1).mT,
        "positive": lambda w: w.abs(),
        "exponential": lambda w: w.exp(),
        "softmax": lambda w: w.softmax(1),
        "centred": lambda w: w - w.mean(1, keepdim=True),
        "standardised": lambda w: (w - w.mean(1, keepdim=True)) / w.std(1, keepdim=True),
        "square": lambda w: w * w,
        "low rank": lambda w: w @ w.mT @ w,
        "cumulative": lambda w: w.cumsum(0),
        "circulant": lambda w: torch.stack([w[0].roll(k) for k in range(4)]),
        "toeplitz": lambda w: torch.stack([F.pad(w[0], (k, 0))[:4] for k in range(4)]),
        "binarised": lambda w: w.sign() * w.abs().mean(),
        "masked": lambda w: w * torch.eye(4, dtype=w.dtype),
        "doubly centred": lambda w: w - w.mean(0) - w.mean(1, keepdim=True) + w.mean(),
    }
    for name, function in functions.items():
        weight = nn.Linear(4, 4)
        parametrize.register_parametrization(weight, "weight", Called(lambda m, w, f=function: f(w)), unsafe=True)
        yield f"weight {name}", (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), weight, nn.ReLU(), nn.Linear(4, 2)), (x,))


def reused() -> Iterator[tuple[str, Built]]:
    """One parameter in two places, contractions with repeated operands, higher forms."""
    x = torch.randn(6, 4)
    w, v = torch.randn(4, 3), torch.randn(3, 4)
    square, other = torch.randn(4, 4), torch.randn(4, 4)
    forms: dict[str, tuple[Callable[..., Any], dict[str, Tensor]]] = {
        "w wT": (lambda p, x: x @ p.w @ p.w.T, {"w": w}),
        "w wT v": (lambda p, x: x @ p.w @ p.w.T @ p.a, {"w": w, "a": square}),
        "w relu wT": (lambda p, x: (x @ p.w).relu() @ p.w.T, {"w": w}),
        "w v w": (lambda p, x: x @ p.w @ p.v @ p.w, {"w": w, "v": v}),
        "a a": (lambda p, x: x @ p.a @ p.a, {"a": square}),
        "a aT": (lambda p, x: x @ p.a @ p.a.T, {"a": square}),
        "a relu a": (lambda p, x: (x @ p.a).relu() @ p.a, {"a": square}),
        "a b a": (lambda p, x: x @ p.a @ p.b @ p.a, {"a": square, "b": other}),
        "a b aT": (lambda p, x: x @ p.a @ p.b @ p.a.T, {"a": square, "b": other}),
        "a plus aT": (lambda p, x: x @ (p.a + p.a.T) @ p.b, {"a": square, "b": other}),
        "commutator": (lambda p, x: x @ (p.a @ p.b - p.b @ p.a), {"a": square, "b": other}),
        "tucker": (
            lambda p, x: torch.einsum("abc,ia,jb,kc,ni,nj->nk", p.g, p.u, p.w, p.w, x, x),
            {"g": torch.randn(2, 3, 3), "u": torch.randn(4, 2), "w": w},
        ),
        "tucker thrice": (
            lambda p, x: torch.einsum("abc,ia,jb,kc,ni,nj->nk", p.g, p.w, p.w, p.w, x, x),
            {"g": torch.randn(3, 3, 3), "w": w},
        ),
        "cp": (
            lambda p, x: torch.einsum("ir,jr,kr,ni,nj->nk", p.u, p.w, p.z, x, x),
            {"u": torch.randn(4, 3), "w": w, "z": torch.randn(4, 3)},
        ),
        "cp tied": (
            lambda p, x: torch.einsum("ir,jr,kr,ni,nj->nk", p.w, p.w, p.z, x, x),
            {"w": w, "z": torch.randn(4, 3)},
        ),
        "cp all tied": (lambda p, x: torch.einsum("ir,jr,kr,ni,nj->nk", p.w, p.w, p.w, x, x), {"w": w}),
        "train": (
            lambda p, x: torch.einsum("ia,ajb,bk,ni,nj->nk", p.u, p.g, p.v, x, x),
            {"u": w, "g": torch.randn(3, 4, 2), "v": torch.randn(2, 4)},
        ),
        "train tied": (
            lambda p, x: torch.einsum("ia,ajb,bkc,c,ni,nj->nk", p.u, p.g, p.g, p.c, x, x),
            {"u": w, "g": torch.randn(3, 4, 3), "c": torch.randn(3)},
        ),
        "ring": (
            lambda p, x: torch.einsum("aib,bjc,cka,ni,nj->nk", p.g, p.h, p.l, x, x),
            {"g": torch.randn(2, 4, 3), "h": torch.randn(3, 4, 2), "l": torch.randn(2, 4, 2)},
        ),
        "ring tied": (
            lambda p, x: torch.einsum("aib,bjc,cka,ni,nj->nk", p.g, p.g, p.g, x, x),
            {"g": torch.randn(2, 4, 2)},
        ),
        "diagonal": (lambda p, x: torch.einsum("ni,ii,ij->nj", x, p.a, p.b), {"a": square, "b": other}),
        "trace": (lambda p, x: x * torch.einsum("ij,ji->", p.a, p.b), {"a": square, "b": other}),
        "traced": (lambda p, x: x * torch.trace(p.a @ p.b), {"a": square, "b": other}),
        "hadamard": (lambda p, x: x @ (p.a * p.b), {"a": square, "b": other}),
        "hadamard transposed": (lambda p, x: x @ (p.a * p.b.T), {"a": square, "b": other}),
        "hadamard self": (lambda p, x: x @ (p.a * p.a.T), {"a": square}),
        "ratio": (lambda p, x: x @ (p.a / p.b), {"a": square, "b": other}),
        "ratio transposed": (lambda p, x: x @ (p.a / p.a.T), {"a": square}),
        "kronecker": (lambda p, x: x @ torch.kron(p.u, p.v), {"u": torch.randn(2, 3), "v": torch.randn(2, 2)}),
        "kronecker tied": (lambda p, x: x @ torch.kron(p.u, p.u), {"u": torch.randn(2, 3)}),
        "outer": (lambda p, x: x @ torch.outer(p.u, p.v), {"u": torch.randn(4), "v": torch.randn(3)}),
        "outer tied": (lambda p, x: x @ torch.outer(p.u, p.u), {"u": torch.randn(4)}),
        "bilinear": (
            lambda p, x: F.bilinear(x, x.flip(0), p.g, p.c) @ p.v,
            {"g": torch.randn(3, 4, 4), "c": torch.randn(3), "v": torch.randn(3, 2)},
        ),
        "sliced twice": (
            lambda p, x: (x @ p.a[:, :2]) @ p.b[:2] + (x @ p.a[:, 2:]) @ p.b[:2],
            {"a": square, "b": other},
        ),
        "overlapping": (
            lambda p, x: (x @ p.a[:, :3]) @ p.b[:3] + (x @ p.a[:, 1:]) @ p.b[1:],
            {"a": square, "b": other},
        ),
        "overlapping relu": (
            lambda p, x: (x @ p.a[:, :3]).relu() @ p.b[:3] + (x @ p.a[:, 1:]).relu() @ p.b[1:],
            {"a": square, "b": other},
        ),
        "strided parts": (
            lambda p, x: (x @ p.a[:, ::2]) @ p.b[::2] + (x @ p.a[:, 1::2]) @ p.b[1::2],
            {"a": square, "b": other},
        ),
        "swapped halves": (lambda p, x: (x @ p.a.roll(2, 1)) @ p.b + (x @ p.a) @ p.b, {"a": square, "b": other}),
        "flipped reader": (lambda p, x: (x @ p.a) @ p.b.flip(0) + (x @ p.a) @ p.b, {"a": square, "b": other}),
        "two readers": (
            lambda p, x: torch.cat([(x @ p.a) @ p.b, (x @ p.a).flip(1) @ p.c], 1),
            {"a": square, "b": other, "c": torch.randn(4, 2)},
        ),
        "reshaped": (lambda p, x: x @ p.a.reshape(8, 2)[:4] @ p.a.reshape(2, 8), {"a": square}),
        "scaled": (lambda p, x: (p.s * x) @ p.a * p.t, {"a": square, "s": torch.tensor(2.0), "t": torch.rand(4)}),
        "exp scaled": (lambda p, x: p.s.exp() * (x @ p.a), {"a": square, "s": torch.tensor(0.5)}),
        "norm scaled": (lambda p, x: x @ p.a / p.a.norm() * p.b.norm(), {"a": square, "b": other}),
        "row scaled": (lambda p, x: x @ (p.a / p.a.norm(dim=1, keepdim=True)) @ p.b, {"a": square, "b": other}),
        "column scaled": (lambda p, x: x @ (p.a / p.a.amax(0)) @ p.b, {"a": square, "b": other}),
        "maximum of two": (lambda p, x: torch.maximum(x @ p.a, x @ p.b) @ p.c, {"a": square, "b": other, "c": w}),
        "difference of two": (lambda p, x: (x @ p.a - x @ p.b).relu() @ p.c, {"a": square, "b": other, "c": w}),
        "product of two": (lambda p, x: ((x @ p.a) * (x @ p.b)) @ p.c, {"a": square, "b": other, "c": w}),
        "product of three": (
            lambda p, x: ((x @ p.a) * (x @ p.b) * (x @ p.a).flip(1)) @ p.c,
            {"a": square, "b": other, "c": w},
        ),
        "polynomial": (lambda p, x: (x @ p.a) ** 2 @ p.b + (x @ p.a) @ p.b, {"a": square, "b": other}),
        "homogeneous": (lambda p, x: ((x @ p.a) ** 2 @ p.b).abs().sqrt(), {"a": square, "b": other}),
        "cosine": (
            lambda p, x: F.normalize(x @ p.a, dim=1, eps=0.0) @ F.normalize(p.b, dim=0, eps=0.0),
            {"a": square, "b": other},
        ),
        "distance": (lambda p, x: torch.cdist(x @ p.a, p.b), {"a": square, "b": other}),
        "softmax twice": (lambda p, x: (x @ p.a).softmax(1) @ p.b.softmax(0), {"a": square, "b": other}),
        "sinkhorn": (lambda p, x: x @ (p.a - p.a.logsumexp(0)).exp() @ p.b, {"a": square, "b": other}),
        "complex pair": (
            lambda p, x: torch.view_as_real(torch.complex(x @ p.a, x @ p.b) @ torch.complex(p.c, p.d)),
            {"a": square, "b": other, "c": w, "d": torch.randn(4, 3)},
        ),
        "complex size": (lambda p, x: torch.complex(x @ p.a, x @ p.b).abs() @ p.c, {"a": square, "b": other, "c": w}),
        "complex unit": (
            lambda p, x: torch.view_as_real(torch.complex(x @ p.a, x @ p.b).sgn()).flatten(1) @ p.c,
            {"a": square, "b": other, "c": torch.randn(8, 2)},
        ),
        "complex parameter": (
            lambda p, x: (x.to(p.z.dtype) @ p.z).abs() @ p.c,
            {"z": torch.randn(4, 4, dtype=torch.complex64), "c": w},
        ),
        "spectral mixing": (
            lambda p, x: torch.fft.irfft(torch.fft.rfft(x @ p.a) * torch.view_as_complex(p.k), n=4) @ p.b,
            {"a": square, "k": torch.randn(3, 2), "b": other},
        ),
        "polynomial norm": (lambda p, x: (x @ p.a).norm(dim=1, keepdim=True) * p.b.sum(0), {"a": square, "b": other}),
        "determinant": (lambda p, x: x * torch.linalg.det(p.a @ p.b), {"a": square, "b": other}),
        "inverse": (lambda p, x: x @ torch.linalg.inv(p.a) @ p.b, {"a": square, "b": other}),
        "conjugated": (lambda p, x: x @ p.a @ p.b @ torch.linalg.inv(p.a), {"a": square, "b": other}),
        "branch on shape": (lambda p, x: x @ p.a if x.shape[0] > 2 else x @ p.b, {"a": square, "b": other}),
        "branch on value": (
            lambda p, x: x @ p.a if float(x.detach().sum()) > -1e9 else x @ p.b,
            {"a": square, "b": other},
        ),
        "branch on parameter": (
            lambda p, x: x @ p.a @ p.b if float(p.a.detach().sum()) > -1e9 else x,
            {"a": square, "b": other},
        ),
        "nested": (lambda p, x: {"out": [x @ p.a @ p.b, (x @ p.a,)]}, {"a": square, "b": other}),
        "chained views": (lambda p, x: x @ p.a.view(2, 8).t().contiguous().view(4, 4) @ p.b, {"a": square, "b": other}),
        "clamped weight": (lambda p, x: x @ p.a.clamp(-1, 1) @ p.b, {"a": square, "b": other}),
        "hinge": (lambda p, x: (1 - x @ p.a).relu() @ p.b, {"a": square, "b": other}),
        "soft threshold": (lambda p, x: F.softshrink(x @ p.a, 0.1) @ p.b, {"a": square, "b": other}),
        "learned threshold": (
            lambda p, x: ((x @ p.a).abs() - p.t.abs()).relu() @ p.b,
            {"a": square, "t": torch.rand(4), "b": other},
        ),
        "prelu": (lambda p, x: F.prelu(x @ p.a, p.t) @ p.b, {"a": square, "t": torch.rand(4), "b": other}),
        "prelu weighted": (lambda p, x: F.prelu(x, p.t) @ p.b, {"t": torch.rand(1), "b": other}),
        "spline": (
            lambda p, x: ((x[..., None] - p.k).relu() ** 2 * p.c).sum(-1),
            {"k": torch.randn(5), "c": torch.randn(5)},
        ),
        "gaussian mixture": (
            lambda p, x: (-(x[:, None] - p.m).square().sum(-1)).softmax(1) @ p.b,
            {"m": torch.randn(5, 4), "b": torch.randn(5, 2)},
        ),
        "vector quantised": (
            lambda p, x: p.m[torch.cdist(x, p.m).argmin(1)] @ p.b,
            {"m": torch.randn(5, 4), "b": other},
        ),
    }
    for name, (function, parameters) in forms.items():
        yield f"reused {name}", (Function(function, **{k: t.clone() for k, t in parameters.items()}), (x,))


def losses() -> Iterator[tuple[str, Built]]:
    """Programs that end in a loss of torch."""
    x, target = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    ends: dict[str, Callable[[Tensor], Tensor]] = {
        "cross entropy": lambda z: F.cross_entropy(z, target),
        "smoothed": lambda z: F.cross_entropy(z, target, label_smoothing=0.1),
        "weighted": lambda z: F.cross_entropy(z, target, weight=torch.tensor([1.0, 2.0, 0.5], dtype=z.dtype)),
        "ignored": lambda z: F.cross_entropy(z, target, ignore_index=1),
        "probabilities": lambda z: F.cross_entropy(z, z.detach().softmax(1).flip(1)),
        "unnormalised": lambda z: F.cross_entropy(z, torch.rand(6, 3, dtype=z.dtype)),
        "nll": lambda z: F.nll_loss(z, target),
        "binary": lambda z: F.binary_cross_entropy_with_logits(z, (z > 0).to(z)),
        "mse": lambda z: F.mse_loss(z, torch.ones_like(z)),
        "margin": lambda z: F.multi_margin_loss(z, target),
        "multilabel": lambda z: F.multilabel_soft_margin_loss(z, (z > 0).to(z)),
        "hinge": lambda z: F.hinge_embedding_loss(z, torch.where(z > 0, 1, -1)),
        "cosine": lambda z: F.cosine_embedding_loss(z[:3], z[3:], torch.ones(3)),
        "triplet": lambda z: F.triplet_margin_loss(z[:2], z[2:4], z[4:]),
        "ranking": lambda z: F.margin_ranking_loss(z[:3, 0], z[3:, 0], torch.ones(3)),
        "kl": lambda z: F.kl_div(z.log_softmax(1), z.flip(1).softmax(1), reduction="batchmean"),
        "poisson": lambda z: F.poisson_nll_loss(z, z.detach().abs()),
        "gaussian": lambda z: F.gaussian_nll_loss(z[:, :1], z[:, 1:2], z[:, 2:].exp()),
        "ctc": lambda z: F.ctc_loss(
            z[:, None].log_softmax(2), torch.tensor([[1, 2]]), torch.tensor([6]), torch.tensor([2])
        ),
        "contrastive": lambda z: F.cross_entropy(F.normalize(z, dim=1) @ F.normalize(z, dim=1).T, torch.arange(6)),
        "dpo": lambda z: -F.logsigmoid(z.log_softmax(1)[:3, 0] - z.log_softmax(1)[3:, 1]).mean(),
        "entropy": lambda z: -(z.softmax(1) * z.log_softmax(1)).sum(1).mean(),
        "z loss": lambda z: F.cross_entropy(z, target) + 1e-2 * z.logsumexp(1).square().mean(),
        "soft margin": lambda z: F.soft_margin_loss(z, torch.where(z > 0, 1.0, -1.0).to(z)),
        "smooth l1": lambda z: F.smooth_l1_loss(z, z.flip(0)),
    }
    for name, end in ends.items():
        model = Called(lambda m, x, end=end: end(m.b(m.a(x).relu())), a=nn.Linear(4, 5), b=nn.Linear(5, 3))
        yield f"loss {name}", (model, (x,))


def layers() -> Iterator[tuple[str, Built]]:
    """All of them."""
    for family in (convolutions, recurrent, attentions, lookups, parametrised, reused, losses):
        yield from family()
