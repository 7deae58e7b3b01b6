"""A fifth set of models, written without reading the rules: small forms of architectures from papers.

Flows with their log-determinants, recurrences, attention of every kind, graphs, routers, memories, implicit layers,
and blocks for images, each with a twist: a weight that is used twice, a gain that stands before or behind a norm, a
bias that cancels or nearly does, or a size that decides. Objectives inside a model, made weights, rounded weights and
nearly symmetric forms follow.
`architectures()` names all of them, each with further inputs on which every law must hold as well.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adversarial_held_out import Case, draw, forms, rows
from adversarial_layers import Called
from adversarial_structures import images, sequences_of


def _ones(*shape: int) -> Tensor:
    return torch.ones(shape)


def _coupling(p: Any, x: Tensor, *, shared: bool = False) -> tuple[Tensor, Tensor]:
    first, second = x[:, :2], x[:, 2:]
    h = (first @ p.a).tanh()
    scale, shift = h @ p.s, h @ p.t
    second = second * scale.exp() + shift
    h = (second @ (p.a if shared else p.c)).tanh()
    return torch.cat([first * (h @ p.u).exp(), second], 1), scale.sum(1)


def _planar(p: Any, x: Tensor, *, constrained: bool) -> tuple[Tensor, Tensor]:
    u = p.u
    if constrained:
        inner = p.w @ u
        u = u + (F.softplus(inner) - 1 - inner) * p.w / (p.w @ p.w)
    h = (x @ p.w + p.c).tanh()
    return x + h[:, None] * u, ((1 - h**2) * (p.w @ u)).abs().log1p()


def _sylvester(p: Any, x: Tensor) -> Tensor:
    q = torch.linalg.qr(p.q)[0]
    return x + (x @ q @ p.r.triu() + p.c).tanh() @ p.t.triu().T @ q.T


def _householder(p: Any, x: Tensor) -> Tensor:
    for v in p.v:
        x = x - 2 * (x @ v)[:, None] * v / (v @ v)
    return x @ p.b


def _lu(p: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    lower = p.l.tril(-1) + torch.eye(4, dtype=x.dtype)
    upper = p.u.triu(1) + (p.s.abs() + 0.1).diag()
    return x @ lower @ upper, (p.s.abs() + 0.1).log().sum() * len(x)


def _spline(p: Any, x: Tensor) -> Tensor:
    widths = p.w.softmax(0).cumsum(0)
    heights = F.softplus(p.h).cumsum(0)
    place = torch.searchsorted(widths.detach(), x.sigmoid().contiguous()).clamp(max=len(p.w) - 1)
    return heights[place] * (x @ p.a)


def _masked_flow(p: Any, x: Tensor) -> Tensor:
    mask = torch.tril(_ones(4, 4), -1).to(x.dtype)
    h = x @ (p.a * mask.T)
    return (x - h @ p.m) * (-(h @ p.s)).exp()


def flows() -> Iterator[tuple[str, Case]]:
    """Normalising flows, with and without what their determinants add."""
    a, s = draw(2, 6), draw(6, 2)
    yield from forms(
        "flow",
        {
            "coupling": (_coupling, {"a": a, "s": s, "t": s, "c": a, "u": s}),
            "coupling, one encoder": (
                lambda p, x: _coupling(p, x, shared=True),
                {"a": a, "s": s, "t": s, "u": s},
            ),
            "planar": (lambda p, x: _planar(p, x, constrained=False), {"u": draw(4), "w": draw(4), "c": draw(1)}),
            "planar, invertible": (
                lambda p, x: _planar(p, x, constrained=True),
                {"u": draw(4), "w": draw(4), "c": draw(1)},
            ),
            "sylvester": (_sylvester, {"q": draw(4, 2), "r": draw(2, 2), "t": draw(2, 2), "c": draw(2)}),
            "householder": (_householder, {"v": draw(3, 4), "b": draw(4, 2)}),
            "householder of one, twice": (
                lambda p, x: _householder(p, _householder(p, x) @ p.b.T),
                {"v": draw(1, 4), "b": draw(4, 2)},
            ),
            "triangular": (_lu, {"l": draw(4, 4), "u": draw(4, 4), "s": draw(4)}),
            "actnorm and its determinant": (
                lambda p, x: (x * p.s.exp() + p.c, p.s.sum()),
                {"s": draw(4), "c": draw(4)},
            ),
            "actnorm, then a map": (
                lambda p, x: (x * p.s.exp() + p.c) @ p.a,
                {"s": draw(4), "c": draw(4), "a": a[:1].expand(4, 6).contiguous()},
            ),
            "monotone spline": (_spline, {"w": draw(5), "h": draw(5), "a": draw(4, 1)}),
            "autoregressive": (_masked_flow, {"a": draw(4, 4), "m": draw(4, 4), "s": draw(4, 4)}),
            "radial": (
                lambda p, x: x + F.softplus(p.k) * (x - p.z) / (p.r.exp() + (x - p.z).norm(dim=1, keepdim=True)),
                {"k": draw(1), "r": draw(1), "z": draw(4)},
            ),
            "matrix exponential": (
                lambda p, x: (x @ torch.matrix_exp(p.s) @ p.b, p.s.diagonal().sum()),
                {"s": draw(4, 4) / 2, "b": draw(4, 2)},
            ),
            "cayley": (
                lambda p, x: (
                    x
                    @ torch.linalg.solve(
                        torch.eye(4, dtype=x.dtype) + p.s - p.s.T, torch.eye(4, dtype=x.dtype) - p.s + p.s.T
                    )
                    @ p.b
                ),
                {"s": draw(4, 4), "b": draw(4, 2)},
            ),
            "additive coupling over a shared shift": (
                lambda p, x: torch.cat([x[:, :2], x[:, 2:] + (x[:, :2] @ p.a).relu() @ p.s + p.c - p.c.mean()], 1),
                {"a": a, "s": s, "c": draw(2)},
            ),
            "density of a mixture": (
                lambda p, x: torch.logsumexp(
                    p.l.log_softmax(0) - 0.5 * (((x[:, None] - p.m) * p.s.exp()) ** 2).sum(-1) + p.s.sum(-1), 1
                ),
                {"l": draw(3), "m": draw(3, 4), "s": draw(3, 4)},
            ),
            "density of a mixture, map before": (
                lambda p, x: torch.logsumexp(p.l - 0.5 * ((((x @ p.a)[:, None] - p.m) * p.s) ** 2).sum(-1), 1),
                {"l": draw(3), "m": draw(3, 6), "s": draw(3, 6), "a": draw(4, 6)},
            ),
        },
        lambda: rows(4),
    )


def _unrolled(step: Callable[[Any, Tensor, Tensor], Tensor], width: int) -> Callable[[Any, Tensor], Tensor]:
    def run(p: Any, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), width)
        for place in range(x.shape[1]):
            h = step(p, x[:, place], h)
        return h @ p.b

    return run


def _minimal_gru(p: Any, x: Tensor) -> Tensor:
    z = (x @ p.z).sigmoid()
    return _scan(1 - z, z * (x @ p.a)) @ p.b


def _scan(decay: Tensor, value: Tensor) -> Tensor:
    h, states = torch.zeros_like(value[:, 0]), []
    for place in range(value.shape[1]):
        h = decay[:, place] * h + value[:, place]
        states.append(h)
    return torch.stack(states, 1)


def _matrix_memory(p: Any, x: Tensor, *, normaliser: str) -> Tensor:
    q, k, v, f, i = x @ p.q, x @ p.k, x @ p.v, (x @ p.f).sigmoid(), (x @ p.i).exp()
    memory, total, outputs = x.new_zeros(len(x), 3, 2), x.new_zeros(len(x), 3), []
    for place in range(x.shape[1]):
        memory = f[:, place, None] * memory + i[:, place, None] * k[:, place, :, None] * v[:, place, None]
        total = f[:, place] * total + i[:, place] * k[:, place]
        read = torch.einsum("nk,nkv->nv", q[:, place], memory)
        size = (q[:, place] * total).sum(-1, keepdim=True).abs()
        if normaliser == "clamped":
            read = read / size.clamp(min=1.0)
        elif normaliser == "plain":
            read = read / size
        outputs.append(read)
    return torch.stack(outputs, 1) @ p.o


def _delta(p: Any, x: Tensor, *, unit: bool) -> Tensor:
    q, k, v, rate = x @ p.q, x @ p.k, x @ p.v, (x @ p.f).sigmoid()
    if unit:
        k = F.normalize(k, dim=-1, eps=0.0)
    memory, outputs = x.new_zeros(len(x), 3, 2), []
    for place in range(x.shape[1]):
        old = torch.einsum("nk,nkv->nv", k[:, place], memory)
        change = rate[:, place] * (v[:, place] - old)
        memory = memory + k[:, place, :, None] * change[:, None]
        outputs.append(torch.einsum("nk,nkv->nv", q[:, place], memory))
    return torch.stack(outputs, 1) @ p.o


def _inner_trained(p: Any, x: Tensor) -> Tensor:
    fast, outputs = p.w.expand(len(x), 3, 3), []
    for place in range(x.shape[1]):
        k, v, q = x[:, place] @ p.k, x[:, place] @ p.v, x[:, place] @ p.q
        error = torch.einsum("nk,nkj->nj", k, fast) - v
        fast = fast - 0.1 * k[:, :, None] * error[:, None]
        outputs.append(torch.einsum("nk,nkj->nj", q, fast))
    return torch.stack(outputs, 1) @ p.o


def _selective(p: Any, x: Tensor) -> Tensor:
    u = x @ p.a
    rate = F.softplus(u @ p.d + p.c)
    decay = (rate[..., None] * -p.l.exp()).exp()
    inputs = rate[..., None] * (u @ p.i)[:, :, None] * u[..., None]
    states = _scan(decay, inputs)
    return ((states * (u @ p.r)[:, :, None]).sum(-1) + p.s * u) @ p.b


def _diagonal_complex(p: Any, x: Tensor) -> Tensor:
    pole = torch.exp(torch.complex(-p.n.exp(), p.t))
    h = torch.zeros(len(x), 3, dtype=pole.dtype)
    outputs = []
    for place in range(x.shape[1]):
        h = pole * h + (x[:, place] @ p.a).to(pole.dtype) * (1 - pole.abs() ** 2).sqrt()
        outputs.append(torch.view_as_real(h).flatten(1))
    return torch.stack(outputs, 1) @ p.b


def _long_convolution(p: Any, x: Tensor) -> Tensor:
    u = x @ p.a
    n = u.shape[1]
    time = torch.arange(n, dtype=x.dtype)[:, None] / 7
    kernel = ((time * p.t).sin() @ p.k) * (-time * p.d.abs()).exp()
    mixed = torch.fft.irfft(torch.fft.rfft(u, 2 * n, 1) * torch.fft.rfft(kernel, 2 * n, 0), 2 * n, 1)[:, :n]
    return (mixed * (x @ p.g)) @ p.b


def _clockwork(p: Any, x: Tensor) -> Tensor:
    h = x.new_zeros(len(x), 4)
    for place in range(x.shape[1]):
        new = (x[:, place] @ p.a + h @ p.w).tanh()
        h = torch.cat([new[:, :2], new[:, 2:] if place % 2 == 0 else h[:, 2:]], 1)
    return h @ p.b


def recurrences() -> Iterator[tuple[str, Case]]:
    """Recurrent and linear-time sequence models."""
    a, w, b, z = draw(4, 6), draw(6, 6) / 2, draw(6, 3), draw(4, 6)
    gates = {"q": draw(4, 3), "k": draw(4, 3), "v": draw(4, 2), "f": draw(4, 1), "i": draw(4, 1), "o": draw(2, 3)}

    def independent(p: Any, x: Tensor, h: Tensor) -> Tensor:
        return (x @ p.a + h * p.u + p.c).relu()

    def highway(p: Any, x: Tensor, h: Tensor) -> Tensor:
        gate = (x @ p.z).sigmoid()
        return gate * (x @ p.a + h @ p.w).tanh() + (1 - gate) * h

    def antisymmetric(p: Any, x: Tensor, h: Tensor) -> Tensor:
        return h + 0.1 * (h @ (p.w - p.w.T) + x @ p.a).tanh()

    def identity(p: Any, x: Tensor, h: Tensor) -> Tensor:
        return (x @ p.a + h @ p.w).relu()

    def linear(p: Any, x: Tensor, h: Tensor) -> Tensor:
        return x @ p.a + h @ p.w

    def multiplicative(p: Any, x: Tensor, h: Tensor) -> Tensor:
        return ((x @ p.m) * (h @ p.w) + x @ p.a) @ p.r

    def reset_only(p: Any, x: Tensor, h: Tensor) -> Tensor:
        return (x @ p.a + ((x @ p.z).sigmoid() * h) @ p.w).relu()

    def unit_norm(p: Any, x: Tensor, h: Tensor) -> Tensor:
        return F.normalize(x @ p.a + h, dim=-1, eps=0.0)

    def leaky(p: Any, x: Tensor, h: Tensor) -> Tensor:
        return p.l.sigmoid() * h + x @ p.a

    def coupled(p: Any, x: Tensor, h: Tensor) -> Tensor:
        return p.l.sigmoid() * h + (1 - p.l.sigmoid()) * (x @ p.a)

    yield from forms(
        "recurrence",
        {
            "independent units": (_unrolled(independent, 6), {"a": a, "u": draw(6), "c": draw(6), "b": b}),
            "highway": (_unrolled(highway, 6), {"a": a, "w": w, "z": z, "b": b}),
            "antisymmetric": (_unrolled(antisymmetric, 6), {"a": a, "w": w, "b": b}),
            "rectified": (_unrolled(identity, 6), {"a": a, "w": w, "b": b}),
            "linear": (_unrolled(linear, 6), {"a": a, "w": w, "b": b}),
            "multiplicative": (_unrolled(multiplicative, 6), {"a": a, "m": z, "w": w, "r": w, "b": b}),
            "reset gate alone": (_unrolled(reset_only, 6), {"a": a, "z": z, "w": w, "b": b}),
            "state of unit norm": (_unrolled(unit_norm, 6), {"a": a, "b": b}),
            "leaky, one rate a unit": (_unrolled(leaky, 6), {"a": a, "l": draw(6), "b": b}),
            "leaky, both ways": (_unrolled(coupled, 6), {"a": a, "l": draw(6), "b": b}),
            "minimal gates": (_minimal_gru, {"a": a, "z": z, "b": b}),
            "matrix memory": (lambda p, x: _matrix_memory(p, x, normaliser="none"), gates),
            "matrix memory, normalised": (lambda p, x: _matrix_memory(p, x, normaliser="plain"), gates),
            "matrix memory, clamped": (lambda p, x: _matrix_memory(p, x, normaliser="clamped"), gates),
            "delta rule": (lambda p, x: _delta(p, x, unit=False), {k: v for k, v in gates.items() if k != "i"}),
            "delta rule, unit keys": (
                lambda p, x: _delta(p, x, unit=True),
                {k: v for k, v in gates.items() if k != "i"},
            ),
            "trained at test time": (
                _inner_trained,
                {"w": draw(3, 3), "k": draw(4, 3), "v": draw(4, 3), "q": draw(4, 3), "o": draw(3, 2)},
            ),
            "selective state": (
                _selective,
                {
                    "a": draw(4, 3),
                    "d": draw(3, 3),
                    "c": draw(3),
                    "l": draw(3, 2),
                    "i": draw(3, 2),
                    "r": draw(3, 2),
                    "s": draw(3),
                    "b": draw(3, 2),
                },
            ),
            "complex diagonal": (
                _diagonal_complex,
                {"n": draw(3), "t": draw(3), "a": draw(4, 3), "b": draw(6, 2)},
            ),
            "long convolution": (
                _long_convolution,
                {"a": draw(4, 3), "t": draw(5), "k": draw(5, 3), "d": draw(3), "g": draw(4, 3), "b": draw(3, 2)},
            ),
            "clockwork": (_clockwork, {"a": draw(4, 4), "w": draw(4, 4) / 2, "b": draw(4, 2)}),
            "read from the last place alone": (
                lambda p, x: (x.cumsum(1) @ p.a).relu()[:, -1] @ p.b,
                {"a": a, "b": b},
            ),
            "differences of states": (
                lambda p, x: (x.cumsum(1) @ p.a + p.c).diff(dim=1) @ p.b,
                {"a": a, "c": draw(6), "b": b},
            ),
            "first place subtracted": (
                lambda p, x: ((x @ p.a + p.c) - (x @ p.a + p.c)[:, :1]) @ p.b,
                {"a": a, "c": draw(6), "b": b},
            ),
        },
        lambda: sequences_of(4),
    )


def _heads(x: Tensor, n: int) -> Tensor:
    return x.unflatten(-1, (n, -1)).transpose(1, 2)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, score: Callable[[Tensor], Tensor] = lambda s: s, causal: bool = False
) -> Tensor:
    s = score(q @ k.mT / math.sqrt(q.shape[-1]))
    if causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf)
    return s.softmax(-1) @ v


def _rotated(h: Tensor, *, speed: Tensor | None = None) -> Tensor:
    n, d = h.shape[-2:]
    frequency = 10.0 ** -torch.arange(0, d, 2, dtype=h.dtype).div(d) if speed is None else speed
    angle = torch.arange(n, dtype=h.dtype)[:, None] * frequency
    even, odd = h[..., ::2], h[..., 1::2]
    return torch.stack([even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()], -1).flatten(-2)


def attentions() -> Iterator[tuple[str, Case]]:
    """Attention in forms of many papers."""
    q, k, v, o = draw(4, 6), draw(4, 6), draw(4, 6), draw(6, 3)
    full = {"q": q, "k": k, "v": v, "o": o}

    def latent(p: Any, x: Tensor) -> Tensor:
        c = x @ p.d
        return _attend(x @ p.q, c @ p.k, c @ p.v, causal=True) @ p.o

    def latent_normed(p: Any, x: Tensor) -> Tensor:
        c = F.rms_norm(x @ p.d, (3,), p.g, eps=0.0)
        return _attend(x @ p.q, c @ p.k, c @ p.v) @ p.o

    def multi_query(p: Any, x: Tensor) -> Tensor:
        h = _attend(_heads(x @ p.q, 2), (x @ p.k)[:, None], (x @ p.v)[:, None])
        return h.transpose(1, 2).flatten(2) @ p.o

    def grouped(p: Any, x: Tensor) -> Tensor:
        k, v = (_heads(x @ w, 2).repeat_interleave(2, 1) for w in (p.k, p.v))
        return _attend(_heads(x @ p.q, 4), k, v).transpose(1, 2).flatten(2) @ p.o

    def grouped_wrongly(p: Any, x: Tensor) -> Tensor:
        k, v = (_heads(x @ w, 2).repeat(1, 2, 1, 1) for w in (p.k, p.v))
        return _attend(_heads(x @ p.q, 4), k, v).transpose(1, 2).flatten(2) @ p.o

    def talking(p: Any, x: Tensor) -> Tensor:
        s = _heads(x @ p.q, 2) @ _heads(x @ p.k, 2).mT
        s = torch.einsum("nhij,hg->ngij", s, p.m).softmax(-1)
        s = torch.einsum("ngij,gf->nfij", s, p.r)
        return (s @ _heads(x @ p.v, 2)).transpose(1, 2).flatten(2) @ p.o

    def differential(p: Any, x: Tensor) -> Tensor:
        q, k = (x @ p.q).chunk(2, -1), (x @ p.k).chunk(2, -1)
        weight = (p.l * p.m).sum().exp() - (p.n * p.z).sum().exp()
        s = (q[0] @ k[0].mT).softmax(-1) - weight * (q[1] @ k[1].mT).softmax(-1)
        return F.rms_norm(s @ x @ p.v, (6,), eps=0.0) @ p.o

    def rotary(p: Any, x: Tensor) -> Tensor:
        return _attend(_rotated(x @ p.q), _rotated(x @ p.k), x @ p.v, causal=True) @ p.o

    def rotary_half(p: Any, x: Tensor) -> Tensor:
        q, k = x @ p.q, x @ p.k
        q, k = (torch.cat([_rotated(t[..., :4]), t[..., 4:]], -1) for t in (q, k))
        return _attend(q, k, x @ p.v) @ p.o

    def rotary_values(p: Any, x: Tensor) -> Tensor:
        return _attend(_rotated(x @ p.q), _rotated(x @ p.k), _rotated(x @ p.v)) @ p.o

    def rotary_learned(p: Any, x: Tensor) -> Tensor:
        return _attend(_rotated(x @ p.q, speed=p.f), _rotated(x @ p.k, speed=p.f), x @ p.v) @ p.o

    def rotary_queries_only(p: Any, x: Tensor) -> Tensor:
        return _attend(_rotated(x @ p.q), x @ p.k, x @ p.v) @ p.o

    def query_norm(p: Any, x: Tensor) -> Tensor:
        q, k = (F.rms_norm(x @ w, (6,), g, eps=0.0) for w, g in ((p.q, p.g), (p.k, p.h)))
        return _attend(q, k, x @ p.v) @ p.o

    def query_norm_rotary(p: Any, x: Tensor) -> Tensor:
        q, k = (_rotated(F.rms_norm(x @ w, (6,), g, eps=0.0)) for w, g in ((p.q, p.g), (p.k, p.h)))
        return _attend(q, k, x @ p.v) @ p.o

    def query_norm_shared_gain(p: Any, x: Tensor) -> Tensor:
        q, k = (F.rms_norm(x @ w, (6,), p.g, eps=0.0) for w in (p.q, p.k))
        return _attend(q, k, x @ p.v) @ p.o

    def layer_query_norm(p: Any, x: Tensor) -> Tensor:
        q, k = (F.layer_norm(x @ w, (6,), g, None, eps=0.0) for w, g in ((p.q, p.g), (p.k, p.h)))
        return _attend(q, k, x @ p.v) @ p.o

    def cosine(p: Any, x: Tensor) -> Tensor:
        q, k = (F.normalize(x @ w, dim=-1, eps=0.0) for w in (p.q, p.k))
        return _attend(q, k, x @ p.v, lambda s: s * p.t.exp()) @ p.o

    def capped(p: Any, x: Tensor) -> Tensor:
        return _attend(x @ p.q, x @ p.k, x @ p.v, lambda s: 5 * (s / 5).tanh()) @ p.o

    def off_by_one(p: Any, x: Tensor) -> Tensor:
        e = (x @ p.q @ (x @ p.k).mT).exp()
        return e / (1 + e.sum(-1, keepdim=True)) @ x @ p.v @ p.o

    def sinks(p: Any, x: Tensor) -> Tensor:
        s = x @ p.q @ (x @ p.k).mT
        s = torch.cat([s, p.s.expand(*s.shape[:2], 1)], -1).softmax(-1)[..., :-1]
        return s @ x @ p.v @ p.o

    def alibi(p: Any, x: Tensor) -> Tensor:
        n = x.shape[1]
        away = (torch.arange(n)[:, None] - torch.arange(n)).abs().to(x.dtype)
        return _attend(x @ p.q, x @ p.k, x @ p.v, lambda s: s - p.m * away, causal=True) @ p.o

    def bucketed(p: Any, x: Tensor) -> Tensor:
        n = x.shape[1]
        place = (torch.arange(n)[:, None] - torch.arange(n)).clamp(-2, 2) + 2
        return _attend(x @ p.q, x @ p.k, x @ p.v, lambda s: s + p.e[place]) @ p.o

    def bucketed_by_key(p: Any, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1]).clamp(max=3)
        return _attend(x @ p.q, x @ p.k, x @ p.v, lambda s: s + p.e[place]) @ p.o

    def bucketed_by_query(p: Any, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1]).clamp(max=3)
        return _attend(x @ p.q, x @ p.k, x @ p.v, lambda s: s + p.e[place][:, None]) @ p.o

    def key_bias(p: Any, x: Tensor) -> Tensor:
        return _attend(x @ p.q + p.c, x @ p.k + p.e, x @ p.v + p.f) @ p.o

    def performer(p: Any, x: Tensor) -> Tensor:
        features = torch.linspace(-1, 1, 30, dtype=x.dtype).reshape(6, 5)
        q, k = (((x @ w) @ features).exp() for w in (p.q, p.k))
        return (q @ (k.mT @ (x @ p.v))) / (q @ k.sum(1)[..., None]) @ p.o

    def linear_elu(p: Any, x: Tensor) -> Tensor:
        q, k = (F.elu(x @ w) + 1 for w in (p.q, p.k))
        return (q @ (k.mT @ (x @ p.v))) / (q @ k.sum(1)[..., None]) @ p.o

    def linear_relu(p: Any, x: Tensor) -> Tensor:
        q, k = ((x @ w).relu() + 0.0 for w in (p.q, p.k))
        return (q @ (k.mT @ (x @ p.v))) / (q @ k.sum(1)[..., None] + 1e-6) @ p.o

    def softmax_both(p: Any, x: Tensor) -> Tensor:
        return (x @ p.q + p.c).softmax(-1) @ ((x @ p.k + p.e).softmax(1).mT @ (x @ p.v)) @ p.o

    def gated(p: Any, x: Tensor) -> Tensor:
        return (_attend(x @ p.q, x @ p.k, x @ p.v) * (x @ p.g).sigmoid()) @ p.o

    def gated_unit(p: Any, x: Tensor) -> Tensor:
        z = F.silu(x @ p.k)
        s = ((z * p.g + p.c) @ (z * p.h + p.e).mT / x.shape[1]).relu().square()
        return ((x @ p.q) * (s @ F.silu(x @ p.v))) @ p.o

    def external(p: Any, x: Tensor) -> Tensor:
        s = (x @ p.m.T).softmax(1)
        return (s / s.sum(-1, keepdim=True)) @ p.r @ p.o

    def slots(p: Any, x: Tensor) -> Tensor:
        slot = p.s.expand(len(x), 2, 6)
        for _ in range(2):
            weight = (x @ p.k @ slot.mT).softmax(-1)
            weight = weight / weight.sum(1, keepdim=True)
            slot = weight.mT @ (x @ p.v)
        return slot @ p.o

    def latents_read(p: Any, x: Tensor) -> Tensor:
        return _attend(p.s @ p.z, x @ p.k, x @ p.v) @ p.o

    def low_rank_keys(p: Any, x: Tensor) -> Tensor:
        return _attend(x @ p.q, p.e[:, : x.shape[1]] @ (x @ p.k), p.e[:, : x.shape[1]] @ (x @ p.v)) @ p.o

    def quadratic(p: Any, x: Tensor) -> Tensor:
        return (x @ p.q @ (x @ p.k).mT).square() @ (x @ p.v) @ p.o

    def tied_qk(p: Any, x: Tensor) -> Tensor:
        return _attend(x @ p.q, x @ p.q, x @ p.v) @ p.o

    def tied_all(p: Any, x: Tensor) -> Tensor:
        return _attend(x @ p.q, x @ p.q, x @ p.q) @ p.o

    def tied_out(p: Any, x: Tensor) -> Tensor:
        return _attend(x @ p.q, x @ p.k, x @ p.v) @ p.v.T

    def distance(p: Any, x: Tensor) -> Tensor:
        return (-(torch.cdist(x @ p.q, x @ p.k) ** 2)).softmax(-1) @ x @ p.v @ p.o

    def additive(p: Any, x: Tensor) -> Tensor:
        s = ((x @ p.q)[:, :, None] + (x @ p.k)[:, None] + p.c).tanh() @ p.u
        return s.softmax(-1) @ x @ p.v @ p.o

    def additive_linear(p: Any, x: Tensor) -> Tensor:
        s = F.leaky_relu((x @ p.q @ p.u)[:, :, None] + (x @ p.k @ p.u)[:, None])
        return s.softmax(-1) @ x @ p.v @ p.o

    def pooled(p: Any, x: Tensor) -> Tensor:
        return ((x @ p.k).tanh() @ p.u + p.c).softmax(1).mul(x @ p.v)[:, :, :6].sum(1) @ p.o

    def shifted_tokens(p: Any, x: Tensor) -> Tensor:
        back = F.pad(x, (0, 0, 1, -1))
        mixed = p.m * x + (1 - p.m) * back
        return (mixed @ p.k).relu().square() @ p.o * (mixed @ p.g[:, :3]).sigmoid()

    def weighted_keys(p: Any, x: Tensor) -> Tensor:
        k, v = (x @ p.k).exp(), x @ p.v
        decay = torch.cumsum(-p.w.exp().expand(x.shape[1], 6), 0)
        up = (-decay).exp()
        return (x @ p.q).sigmoid() * ((k * v * up).cumsum(1) / (k * up).cumsum(1)) @ p.o

    yield from forms(
        "attention",
        {
            "latent keys": (latent, {"d": draw(4, 3), "q": q, "k": draw(3, 6), "v": draw(3, 6), "o": o}),
            "latent keys, normed": (
                latent_normed,
                {"d": draw(4, 3), "g": draw(3), "q": q, "k": draw(3, 6), "v": draw(3, 6), "o": o},
            ),
            "one key for all": (multi_query, {"q": q, "k": draw(4, 3), "v": draw(4, 3), "o": o}),
            "grouped": (grouped, {"q": draw(4, 8), "k": draw(4, 4), "v": draw(4, 4), "o": draw(8, 3)}),
            "grouped the other way": (
                grouped_wrongly,
                {"q": draw(4, 8), "k": draw(4, 4), "v": draw(4, 4), "o": draw(8, 3)},
            ),
            "talking heads": (talking, {**full, "m": draw(2, 2), "r": draw(2, 2)}),
            "differential": (
                differential,
                {**full, "l": draw(3), "m": draw(3), "n": draw(3), "z": draw(3)},
            ),
            "rotary": (rotary, full),
            "rotary of a part": (rotary_half, full),
            "rotary, values too": (rotary_values, full),
            "rotary, learned": (rotary_learned, {**full, "f": draw(3)}),
            "rotary, queries alone": (rotary_queries_only, full),
            "normed queries": (query_norm, {**full, "g": draw(6), "h": draw(6)}),
            "normed queries, rotary": (query_norm_rotary, {**full, "g": draw(6), "h": draw(6)}),
            "normed queries, one gain": (query_norm_shared_gain, {**full, "g": draw(6)}),
            "layer-normed queries": (layer_query_norm, {**full, "g": draw(6), "h": draw(6)}),
            "cosine": (cosine, {**full, "t": draw(1)}),
            "capped": (capped, full),
            "off by one": (off_by_one, full),
            "sinks": (sinks, {**full, "s": draw(1)}),
            "distance bias, learned": (alibi, {**full, "m": draw(1)}),
            "bucketed bias": (bucketed, {**full, "e": draw(5)}),
            "bias by key": (bucketed_by_key, {**full, "e": draw(4)}),
            "bias by query": (bucketed_by_query, {**full, "e": draw(4)}),
            "three biases": (key_bias, {**full, "c": draw(6), "e": draw(6), "f": draw(6)}),
            "exponential features": (performer, full),
            "linear, elu": (linear_elu, full),
            "linear, relu and a small number": (linear_relu, full),
            "softmax of both": (softmax_both, {**full, "c": draw(6), "e": draw(6)}),
            "gated": (gated, {**full, "g": draw(4, 6)}),
            "gated unit": (gated_unit, {**full, "g": draw(6), "c": draw(6), "h": draw(6), "e": draw(6)}),
            "external": (external, {"m": draw(5, 4), "r": draw(5, 6), "o": o}),
            "slots": (slots, {"s": draw(1, 2, 6), "k": k, "v": v, "o": o}),
            "latents read": (latents_read, {"s": draw(1, 2, 4), "z": draw(4, 6), "k": k, "v": v, "o": o}),
            "shortened keys": (low_rank_keys, {**full, "e": draw(2, 9)}),
            "squared scores": (quadratic, full),
            "queries are keys": (tied_qk, {"q": q, "v": v, "o": o}),
            "queries are values": (tied_all, {"q": q, "o": o}),
            "values read back": (tied_out, {"q": q, "k": k, "v": v}),
            "distances": (distance, full),
            "additive": (additive, {**full, "c": draw(6), "u": draw(6)}),
            "additive, linear": (additive_linear, {**full, "u": draw(6)}),
            "pooled": (pooled, {"k": k, "u": draw(6, 6), "c": draw(6), "v": v, "o": o}),
            "shifted tokens": (shifted_tokens, {"m": draw(4), "k": k, "g": draw(4, 6), "o": o}),
            "decayed averages": (weighted_keys, {**full, "w": draw(6)}),
        },
        lambda: sequences_of(4),
    )


def graph(*sizes: tuple[int, int]) -> list[tuple[Any, ...]]:
    """Features of nodes and pairs of them, of other sizes."""
    result: list[tuple[Any, ...]] = []
    for nodes, edges in sizes or ((5, 9), (5, 9), (4, 6), (7, 15)):
        ends = torch.randint(nodes, (2, edges))
        result.append((draw(nodes, 4), torch.cat([ends, torch.arange(nodes).expand(2, -1)], 1)))
    return result


def _gathered(h: Tensor, to: Tensor, n: int, reduce: str) -> Tensor:
    if reduce in ("sum", "mean"):
        total = h.new_zeros(n, h.shape[1]).index_add(0, to, h)
        return total if reduce == "sum" else total / torch.bincount(to, minlength=n).clamp(min=1)[:, None]
    return h.new_zeros(n, h.shape[1]).scatter_reduce(0, to[:, None].expand_as(h), h, reduce, include_self=False)


def _edge_softmax(s: Tensor, to: Tensor, n: int) -> Tensor:
    top = s.new_full((n,), -torch.inf).scatter_reduce(0, to, s, "amax").detach()
    e = (s - top[to]).exp()
    return e / s.new_zeros(n).index_add(0, to, e)[to]


def graphs() -> Iterator[tuple[str, Case]]:
    """Graph networks with every aggregation."""
    a, b, c = draw(4, 6), draw(6, 3), draw(6)

    def aggregated(reduce: str) -> Callable[[Any, Tensor, Tensor], Tensor]:
        return lambda p, x, e: _gathered((x @ p.a + p.c)[e[0]], e[1], len(x), reduce) @ p.b

    def spread(p: Any, x: Tensor, e: Tensor) -> Tensor:
        h = (x @ p.a + p.c)[e[0]]
        mean, square = _gathered(h, e[1], len(x), "mean"), _gathered(h**2, e[1], len(x), "mean")
        return (square - mean**2).clamp(min=0).add(1e-5).sqrt() @ p.b

    def principal(p: Any, x: Tensor, e: Tensor) -> Tensor:
        h = (x @ p.a + p.c)[e[0]]
        parts = [_gathered(h, e[1], len(x), r) for r in ("mean", "amax", "amin", "sum")]
        degree = torch.bincount(e[1], minlength=len(x)).to(x.dtype)[:, None]
        return torch.cat([*parts, degree.log1p() * parts[0]], 1) @ p.d

    def attended(p: Any, x: Tensor, e: Tensor) -> Tensor:
        h = x @ p.a
        s = F.leaky_relu((h @ p.s)[e[0]] + (h @ p.t)[e[1]] + p.k, 0.2)
        return _gathered(h[e[0]] * _edge_softmax(s, e[1], len(x))[:, None], e[1], len(x), "sum") @ p.b

    def attended_again(p: Any, x: Tensor, e: Tensor) -> Tensor:
        s = F.leaky_relu((x @ p.a)[e[0]] + (x @ p.d)[e[1]], 0.2) @ p.s
        return _gathered((x @ p.a)[e[0]] * _edge_softmax(s, e[1], len(x))[:, None], e[1], len(x), "sum") @ p.b

    def edge_convolution(p: Any, x: Tensor, e: Tensor) -> Tensor:
        h = torch.cat([x[e[1]], x[e[0]] - x[e[1]]], 1) @ p.d + p.c
        return _gathered(h.relu(), e[1], len(x), "amax") @ p.b

    def edge_shift(p: Any, x: Tensor, e: Tensor) -> Tensor:
        h = x @ p.a + p.c
        return _gathered((h[e[0]] - h[e[1]]).relu(), e[1], len(x), "sum") @ p.b

    def isomorphism(p: Any, x: Tensor, e: Tensor) -> Tensor:
        return (((1 + p.k) * x + _gathered(x[e[0]], e[1], len(x), "sum")) @ p.a + p.c).relu() @ p.b

    def normalised(p: Any, x: Tensor, e: Tensor) -> Tensor:
        degree = torch.bincount(e[1], minlength=len(x)).to(x.dtype).rsqrt()
        h = (x @ p.a)[e[0]] * (degree[e[0]] * degree[e[1]])[:, None]
        return _gathered(h, e[1], len(x), "sum").relu() @ p.b

    def laplacian(p: Any, x: Tensor, e: Tensor) -> Tensor:
        h = x @ p.a + p.c
        return (_gathered(h[e[0]], e[1], len(x), "mean") - h) @ p.b

    def chebyshev(p: Any, x: Tensor, e: Tensor) -> Tensor:
        one = _gathered(x[e[0]], e[1], len(x), "mean")
        two = 2 * _gathered(one[e[0]], e[1], len(x), "mean") - x
        return torch.stack([x, one, two]).matmul(p.w).sum(0).relu() @ p.b

    def equivariant(p: Any, x: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        away = x[e[0], :2] - x[e[1], :2]
        m = F.silu(torch.cat([x[e[0], 2:], x[e[1], 2:], away.square().sum(1, keepdim=True)], 1) @ p.m)
        move = _gathered(away * (m @ p.s), e[1], len(x), "mean")
        return x[:, :2] + move, _gathered(m, e[1], len(x), "sum") @ p.b

    def filtered(p: Any, x: Tensor, e: Tensor) -> Tensor:
        away = (x[e[0]] - x[e[1]]).square().sum(1, keepdim=True)
        weight = (-(away - p.m).square() * p.s.exp()).exp() @ p.f
        return _gathered((x @ p.a)[e[0]] * weight, e[1], len(x), "sum") @ p.b

    def gated(p: Any, x: Tensor, e: Tensor) -> Tensor:
        gate = ((x @ p.d)[e[0]] + (x @ p.g)[e[1]]).sigmoid()
        top = _gathered((x @ p.a)[e[0]] * gate, e[1], len(x), "sum")
        return top / _gathered(gate, e[1], len(x), "sum") @ p.b

    def relational(p: Any, x: Tensor, e: Tensor) -> Tensor:
        kind = (e[0] + e[1]) % 3
        weight = torch.einsum("rk,kij->rij", p.k, p.w)
        return _gathered(torch.einsum("ei,eij->ej", x[e[0]], weight[kind]), e[1], len(x), "sum").relu() @ p.b

    def jumping(p: Any, x: Tensor, e: Tensor) -> Tensor:
        h = (x @ p.a).relu()
        after = (_gathered(h[e[0]], e[1], len(x), "mean") @ p.w).relu()
        return torch.maximum(h, after) @ p.b

    def paired(p: Any, x: Tensor, e: Tensor) -> Tensor:
        h = (x @ p.a + p.c).relu()
        return (h[e[0]] * p.r * h[e[1]]).sum(1)

    def translated(p: Any, x: Tensor, e: Tensor) -> Tensor:
        h = x @ p.a + p.c
        return (h[e[0]] + p.r - h[e[1]]).norm(p=1, dim=1)

    def embedded(p: Any, x: Tensor, e: Tensor) -> Tensor:
        return (p.e[e[0]] * p.r - p.e[e[1]]).square().sum(1)

    def pooled(p: Any, x: Tensor, e: Tensor) -> Tensor:
        h = _gathered((x @ p.a)[e[0]], e[1], len(x), "sum").relu()
        assign = (h @ p.s).softmax(1)
        return (assign.T @ h) @ p.b

    def top_nodes(p: Any, x: Tensor, e: Tensor) -> Tensor:
        h = (x @ p.a).relu()
        score = h @ p.s / p.s.norm()
        best = score.topk(3).indices
        return (h[best] * score[best].tanh()[:, None]) @ p.b

    plain = {"a": a, "c": c, "b": b}
    yield from forms(
        "graph",
        {
            **{f"aggregated by {r}": (aggregated(r), plain) for r in ("sum", "mean", "amax", "amin", "prod")},
            "spread of neighbours": (spread, plain),
            "four aggregations": (principal, {"a": a, "c": c, "d": draw(30, 3)}),
            "attention": (attended, {"a": a, "s": draw(6), "t": draw(6), "k": draw(1), "b": b}),
            "attention, dynamic": (attended_again, {"a": a, "d": draw(4, 6), "s": draw(6), "b": b}),
            "convolution of edges": (edge_convolution, {"d": draw(8, 6), "c": c, "b": b}),
            "differences along edges": (edge_shift, plain),
            "isomorphism": (isomorphism, {**plain, "k": draw(1)}),
            "normalised by degrees": (normalised, {"a": a, "b": b}),
            "laplacian": (laplacian, plain),
            "chebyshev": (chebyshev, {"w": draw(3, 4, 6), "b": b}),
            "equivariant": (equivariant, {"m": draw(5, 6), "s": draw(6, 1), "b": b}),
            "filtered by distance": (filtered, {"a": a, "m": draw(5), "s": draw(5), "f": draw(5, 6), "b": b}),
            "gated edges": (gated, {"a": a, "d": draw(4, 6), "g": draw(4, 6), "b": b}),
            "relations from a basis": (relational, {"k": draw(3, 2), "w": draw(2, 4, 6), "b": b}),
            "maximum of layers": (jumping, {"a": a, "w": draw(6, 6), "b": b}),
            "pairs scored": (paired, {"a": a, "c": c, "r": draw(6)}),
            "pairs translated": (translated, {"a": a, "c": c, "r": draw(6)}),
            "rows embedded": (embedded, {"e": draw(9, 6), "r": draw(6)}),
            "pooled to clusters": (pooled, {"a": a, "s": draw(6, 2), "b": b}),
            "best nodes": (top_nodes, {"a": a, "s": draw(6), "b": b}),
        },
        graph,
    )


def _experts(p: Any, x: Tensor) -> Tensor:
    return torch.einsum("nei,eij->nej", torch.einsum("ni,eij->nej", x, p.w).relu(), p.v)


def routed() -> Iterator[tuple[str, Case]]:
    """Mixtures of experts and other choices by scores."""
    w, v, g = draw(3, 4, 5), draw(3, 5, 2), draw(4, 3)
    plain = {"w": w, "v": v, "g": g}

    def soft(p: Any, x: Tensor) -> Tensor:
        return ((x @ p.g).softmax(1)[:, :, None] * _experts(p, x)).sum(1)

    def top(p: Any, x: Tensor, k: int = 2) -> Tensor:
        s, best = (x @ p.g).topk(k, 1)
        return (s.softmax(1)[:, :, None] * _experts(p, x).take_along_dim(best[:, :, None], 1)).sum(1)

    def top_then_all(p: Any, x: Tensor) -> Tensor:
        s, best = (x @ p.g).softmax(1).topk(2, 1)
        return (s[:, :, None] * _experts(p, x).take_along_dim(best[:, :, None], 1)).sum(1)

    def top_renormalised(p: Any, x: Tensor) -> Tensor:
        s, best = (x @ p.g).sigmoid().topk(2, 1)
        s = s / s.sum(1, keepdim=True)
        return (s[:, :, None] * _experts(p, x).take_along_dim(best[:, :, None], 1)).sum(1)

    def bias_chooses(p: Any, x: Tensor) -> Tensor:
        s = (x @ p.g).sigmoid()
        best = (s + p.c).topk(2, 1).indices
        s = s.gather(1, best)
        return ((s / s.sum(1, keepdim=True))[:, :, None] * _experts(p, x).take_along_dim(best[:, :, None], 1)).sum(1)

    def expert_choice(p: Any, x: Tensor) -> Tensor:
        s = (x @ p.g).softmax(1)
        weight, rows_ = s.topk(2, 0)
        out = x.new_zeros(len(x), 2)
        for number in range(3):
            y = (x[rows_[:, number]] @ p.w[number]).relu() @ p.v[number]
            out = out.index_add(0, rows_[:, number], weight[:, number, None] * y)
        return out

    def hard(p: Any, x: Tensor) -> Tensor:
        best = (x @ p.g).argmax(1)
        return torch.einsum("ni,nij->nj", torch.einsum("ni,nij->nj", x, p.w[best]).relu(), p.v[best])

    def straight(p: Any, x: Tensor) -> Tensor:
        s = (x @ p.g).softmax(1)
        one = F.one_hot(s.argmax(1), 3).to(x.dtype) - s.detach() + s
        return (one[:, :, None] * _experts(p, x)).sum(1)

    def dispatched(p: Any, x: Tensor) -> Tensor:
        s = (x @ p.g).softmax(1)
        out = torch.zeros(len(x), 2, dtype=x.dtype)
        best = s.argmax(1)
        for number in range(3):
            here = (best == number).nonzero().squeeze(1)
            out = out.index_copy(0, here, ((x[here] @ p.w[number]).relu() @ p.v[number]) * s[here, number, None])
        return out

    def balanced(p: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        s = (x @ p.g).softmax(1)
        share = F.one_hot(s.argmax(1), 3).to(x.dtype).mean(0)
        return soft(p, x), 3 * (share * s.mean(0)).sum()

    def z_loss(p: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return soft(p, x), (x @ p.g).logsumexp(1).square().mean()

    def sinkhorn(p: Any, x: Tensor) -> Tensor:
        s = x @ p.g + p.c
        for _ in range(3):
            s = s - s.logsumexp(1, keepdim=True)
            s = s - s.logsumexp(0, keepdim=True)
        return (s.exp()[:, :, None] * _experts(p, x)).sum(1)

    def sinkhorn_rows_last(p: Any, x: Tensor) -> Tensor:
        s = x @ p.g + p.c
        s = s - s.logsumexp(0, keepdim=True)
        s = s - s.logsumexp(1, keepdim=True)
        return (s.exp()[:, :, None] * _experts(p, x)).sum(1)

    def shared(p: Any, x: Tensor) -> Tensor:
        return soft(p, x) + (x @ p.w[0]).relu() @ p.v[0]

    def shared_reader(p: Any, x: Tensor) -> Tensor:
        h = torch.einsum("ni,eij->nej", x, p.w).relu()
        return ((x @ p.g).softmax(1)[:, :, None] * h).sum(1) @ p.v[0]

    def cosine_router(p: Any, x: Tensor) -> Tensor:
        s = F.normalize(x, dim=1) @ F.normalize(p.g, dim=0, eps=0.0) * p.t
        return (s.softmax(1)[:, :, None] * _experts(p, x)).sum(1)

    def tree(p: Any, x: Tensor) -> Tensor:
        left = (x @ p.g + p.c).sigmoid()
        leaf = torch.stack(
            [
                left[:, 0] * left[:, 1],
                left[:, 0] * (1 - left[:, 1]),
                (1 - left[:, 0]) * left[:, 2],
                (1 - left[:, 0]) * (1 - left[:, 2]),
            ],
            1,
        )
        return leaf @ p.q

    def product_keys(p: Any, x: Tensor) -> Tensor:
        s, first = (x[:, :2] @ p.k.T).topk(2, 1)
        t, second = (x[:, 2:] @ p.m.T).topk(2, 1)
        total = (s[:, :, None] + t[:, None]).flatten(1).softmax(1)
        rows_ = (first[:, :, None] * 3 + second[:, None]).flatten(1)
        return (total[:, :, None] * p.u[rows_]).sum(1)

    def depth(p: Any, x: Tensor) -> Tensor:
        score = x @ p.s
        best = score.topk(2, 0).indices.sort().values
        return x.index_add(0, best, ((x[best] @ p.w[0]).relu() @ p.w[0].T) * score[best, None])

    def halting(p: Any, x: Tensor) -> Tensor:
        remainder, out, h = torch.ones(len(x), dtype=x.dtype), 0.0 * x @ p.b, x @ p.a
        for step in range(3):
            h = (h @ p.r).tanh()
            halt = (h @ p.s).sigmoid() if step < 2 else torch.ones_like(remainder)
            out = out + (remainder * halt)[:, None] * (h @ p.q)
            remainder = remainder * (1 - halt)
        return out

    yield from forms(
        "router",
        {
            "soft": (soft, plain),
            "soft, biased": (
                lambda p, x: ((x @ p.g + p.c).softmax(1)[:, :, None] * _experts(p, x)).sum(1),
                {**plain, "c": draw(3)},
            ),
            "top two": (top, plain),
            "top one": (lambda p, x: top(p, x, 1), plain),
            "top two of all": (top_then_all, plain),
            "sigmoid, renormalised": (top_renormalised, plain),
            "bias chooses": (bias_chooses, {**plain, "c": draw(3)}),
            "experts choose": (expert_choice, plain),
            "hard": (hard, plain),
            "straight through": (straight, plain),
            "dispatched": (dispatched, plain),
            "balanced": (balanced, plain),
            "scores kept small": (z_loss, plain),
            "sinkhorn": (sinkhorn, {**plain, "c": draw(3)}),
            "sinkhorn, rows last": (sinkhorn_rows_last, {**plain, "c": draw(3)}),
            "a shared expert": (shared, plain),
            "a shared reader": (shared_reader, plain),
            "cosine": (cosine_router, {**plain, "t": draw(1)}),
            "tree": (tree, {"g": draw(4, 3), "c": draw(3), "q": draw(4, 2)}),
            "product keys": (product_keys, {"k": draw(3, 2), "m": draw(3, 2), "u": draw(9, 2)}),
            "rows chosen": (depth, {"s": draw(4), "w": w}),
            "halting": (halting, {"a": draw(4, 5), "r": draw(5, 5), "s": draw(5), "q": draw(5, 2), "b": draw(4, 2)}),
        },
        lambda: rows(4),
    )


def _fixed_point(p: Any, x: Tensor, steps: int = 25) -> Tensor:
    z = x.new_zeros(len(x), 5)
    for _ in range(steps):
        z = (z @ p.w * 0.2 / (1 + p.w.norm()) + x @ p.a).tanh()
    return z @ p.b


def _runge_kutta(p: Any, x: Tensor) -> Tensor:
    def slope(h: Tensor) -> Tensor:
        return (h @ p.w + p.c).tanh() @ p.v

    h = x @ p.a
    for _ in range(2):
        one = slope(h)
        two = slope(h + 0.1 * one)
        h = h + 0.2 * two
    return h @ p.b


def _energy_descended(p: Any, x: Tensor) -> Tensor:
    def energy(y: Tensor) -> Tensor:
        return ((y @ p.a).relu().square() @ p.b).sum()

    y = x
    for _ in range(2):
        y = y - 0.1 * torch.func.grad(energy)(y)
    return y


def implicit() -> Iterator[tuple[str, Case]]:
    """Fixed points, differential equations, energies, memories, fields and functions by kernels."""
    a, b, c, w, v = draw(4, 5), draw(5, 2), draw(5), draw(5, 5), draw(5, 5)

    def hamiltonian(p: Any, x: Tensor) -> Tensor:
        slope = torch.func.grad(lambda y: ((y @ p.a + p.c).tanh() @ p.b[:, 0]).sum())(x)
        return torch.cat([slope[:, 2:], -slope[:, :2]], 1)

    def score(p: Any, x: Tensor) -> Tensor:
        return torch.func.grad(lambda y: ((y @ p.a + p.c).relu().square() @ p.b).sum())(x)

    def divergence(p: Any, x: Tensor) -> Tensor:
        def field(y: Tensor) -> Tensor:
            return (y @ p.a + p.c).tanh() @ p.a.T

        return torch.func.vmap(lambda y: torch.func.jacrev(field)(y).diagonal().sum())(x)

    def physics(p: Any, x: Tensor) -> Tensor:
        def solution(t: Tensor) -> Tensor:
            return ((t * p.u + p.c).sin() @ p.b[:, 0]) * p.k[0]

        first = torch.func.vmap(torch.func.grad(solution))(x[:, 0])
        second = torch.func.vmap(torch.func.grad(torch.func.grad(solution)))(x[:, 0])
        return second + p.m * first

    def hopfield(p: Any, x: Tensor) -> Tensor:
        y = x
        for _ in range(2):
            y = (p.t * (y @ p.a)).softmax(1) @ p.a.T
        return y

    def turing(p: Any, x: Tensor) -> Tensor:
        weight = (F.normalize(x @ p.a, dim=1, eps=0.0) @ F.normalize(p.m, dim=1, eps=0.0).T * p.k.exp()).softmax(1)
        memory = p.m * (1 - weight.mean(0)[:, None] * (p.e).sigmoid()) + weight.mean(0)[:, None] * p.d
        return (weight @ memory) @ p.b

    def radial(p: Any, x: Tensor) -> Tensor:
        return (-torch.cdist(x, p.m).square() * p.s.exp()).exp() @ p.b

    def radial_normalised(p: Any, x: Tensor) -> Tensor:
        weight = (-torch.cdist(x, p.m).square() * p.s.exp() + p.c).softmax(1)
        return weight @ p.b

    def spline_edges(p: Any, x: Tensor) -> Tensor:
        grid = torch.linspace(-2, 2, 6, dtype=x.dtype)
        basis = (1 - (x[:, :, None] - grid).abs()).relu()
        h = torch.einsum("nig,igj->nj", basis, p.s) + F.silu(x) @ p.a
        basis = (1 - (h[:, :, None] - grid).abs()).relu()
        return torch.einsum("nig,igj->nj", basis, p.t)

    def sines(p: Any, x: Tensor) -> Tensor:
        return ((x @ p.a + p.c).sin() @ p.w).sin() @ p.b

    def fourier_features(p: Any, x: Tensor) -> Tensor:
        h = x @ p.a
        return torch.cat([h.sin(), h.cos()], 1) @ p.d

    def phase_only(p: Any, x: Tensor) -> Tensor:
        return (x @ p.a + p.c).cos() @ p.b

    def wavelets(p: Any, x: Tensor) -> Tensor:
        z = ((x @ p.a) - p.c) / p.s
        return ((1 - z**2) * (-(z**2) / 2).exp()) @ p.b

    def hashed(p: Any, x: Tensor) -> Tensor:
        place = (x[:, :2] * 4).floor()
        key = (place[:, 0].long() * 73 ^ place[:, 1].long() * 199) % 7
        return (p.e[key] @ p.h).relu() @ p.b

    def two_planes(p: Any, x: Tensor) -> Tensor:
        place = (x[:, :2].sigmoid() * 5).long()
        return (p.e[place[:, 0]] * p.f[place[:, 1]]) @ p.h @ p.b

    def ridge(p: Any, x: Tensor) -> Tensor:
        h = x @ p.a
        solved = torch.linalg.solve(h.T @ h + p.l.exp() * torch.eye(5, dtype=x.dtype), h.T @ x)
        return h @ solved

    def ridge_bare(p: Any, x: Tensor) -> Tensor:
        h = x @ p.d
        solved = torch.linalg.solve(h.T @ h, h.T @ (x @ p.d.flip(0)))
        return h @ solved

    def process(p: Any, x: Tensor) -> Tensor:
        kernel = p.v.exp() * (-torch.cdist(x * p.l, x * p.l).square()).exp() + p.n.exp() * torch.eye(
            len(x), dtype=x.dtype
        )
        return torch.linalg.solve(kernel, x[:, :1]) + torch.logdet(kernel)

    def meta(p: Any, x: Tensor) -> Tensor:
        half = len(x) // 2
        step = torch.func.grad(lambda u: ((x[:half] @ p.a).relu() @ u).square().mean())(p.b)
        return (x[half:] @ p.a).relu() @ (p.b - p.r.exp() * step)

    def optimal_transport(p: Any, x: Tensor) -> Tensor:
        cost = -torch.cdist(x @ p.a, p.z).square()
        for _ in range(3):
            cost = cost.log_softmax(1).log_softmax(0)
        return cost.exp().T @ x @ p.d

    def lagrangian(p: Any, x: Tensor) -> Tensor:
        def kinetic(velocity: Tensor, place: Tensor) -> Tensor:
            lower = (place @ p.g).reshape(2, 2).tril()
            return (velocity @ lower).square().sum()

        mass = torch.func.vmap(torch.func.hessian(kinetic))(x[:, :2], x[:, 2:])
        return torch.linalg.solve(mass + torch.eye(2, dtype=x.dtype), x[:, :2])

    yield from forms(
        "implicit",
        {
            "fixed point": (_fixed_point, {"a": a, "w": w, "b": b}),
            "runge kutta": (_runge_kutta, {"a": a, "w": w, "c": c, "v": v, "b": b}),
            "energy descended": (_energy_descended, {"a": a, "b": b}),
            "hamiltonian": (hamiltonian, {"a": a, "c": c, "b": b}),
            "score": (score, {"a": a, "c": c, "b": b}),
            "divergence": (divergence, {"a": a, "c": c}),
            "residual of an equation": (physics, {"u": draw(5), "c": c, "b": b, "k": draw(1), "m": draw(1)}),
            "hopfield": (hopfield, {"a": draw(4, 6), "t": draw(1)}),
            "turing": (turing, {"a": a, "m": draw(3, 5), "k": draw(1), "e": draw(5), "d": draw(5), "b": b}),
            "radial": (radial, {"m": draw(5, 4), "s": draw(5), "b": b}),
            "radial, normalised": (radial_normalised, {"m": draw(5, 4), "s": draw(1), "c": c, "b": b}),
            "splines on edges": (spline_edges, {"s": draw(4, 6, 5), "a": a, "t": draw(5, 6, 2)}),
            "sines": (sines, {"a": a, "c": c, "w": w, "b": b}),
            "fourier features": (fourier_features, {"a": a, "d": draw(10, 2)}),
            "phase": (phase_only, {"a": a, "c": c, "b": b}),
            "wavelets": (wavelets, {"a": a, "c": c, "s": draw(5), "b": b}),
            "hashed": (hashed, {"e": draw(7, 3), "h": draw(3, 5), "b": b}),
            "two planes": (two_planes, {"e": draw(5, 3), "f": draw(5, 3), "h": draw(3, 5), "b": b}),
            "ridge": (ridge, {"a": a, "l": draw(1)}),
            "ridge, bare": (ridge_bare, {"d": draw(4, 2)}),
            "gaussian process": (process, {"v": draw(1), "l": draw(4), "n": draw(1)}),
            "learned at test time": (meta, {"a": a, "b": b, "r": draw(1)}),
            "transport": (optimal_transport, {"a": a, "z": draw(3, 5), "d": draw(4, 2)}),
            "lagrangian": (lagrangian, {"g": draw(2, 4)}),
        },
        lambda: rows(4),
    )


class _Filtered(nn.Module):
    """Filter response norm with a threshold for each channel."""

    def __init__(self, channels: int, epsilon: float) -> None:
        super().__init__()
        self.gain, self.bias, self.top = (nn.Parameter(draw(1, channels, 1, 1)) for _ in range(3))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        x = x * (x.square().mean((2, 3), keepdim=True) + self.epsilon).rsqrt()
        return torch.maximum(self.gain * x + self.bias, self.top)


class _Response(nn.Module):
    """Global response norm."""

    def __init__(self, channels: int, epsilon: float) -> None:
        super().__init__()
        self.gain, self.bias = (nn.Parameter(draw(1, channels, 1, 1)) for _ in range(2))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        size = x.norm(dim=(2, 3), keepdim=True)
        return self.gain * (x * size / (size.mean(1, keepdim=True) + self.epsilon)) + self.bias + x


def _standardised(w: Tensor) -> Tensor:
    return (w - w.mean((1, 2, 3), keepdim=True)) / w.std((1, 2, 3), keepdim=True)


def _demodulated(m: Any, x: Tensor) -> Tensor:
    style = m.style(x.mean((2, 3)))
    weight = m.conv.weight[None] * style[:, None, :, None, None]
    weight = weight * weight.square().sum((2, 3, 4), keepdim=True).rsqrt()
    n, _, height, width = x.shape
    y = F.conv2d(x.reshape(1, -1, height, width), weight.flatten(0, 1), padding=1, groups=n)
    return m.out(y.reshape(n, -1, height, width).relu())


def _involution(m: Any, x: Tensor) -> Tensor:
    n, channels, height, width = x.shape
    kernel = m.kernel(m.small(x).relu()).reshape(n, 1, 9, height, width)
    patches = F.unfold(x, 3, padding=1).reshape(n, channels, 9, height, width)
    return m.out((kernel * patches).sum(2))


def _shuffled(x: Tensor, groups: int) -> Tensor:
    n, channels, *size = x.shape
    return x.reshape(n, groups, channels // groups, *size).transpose(1, 2).reshape(n, channels, *size)


def _octave(m: Any, x: Tensor) -> Tensor:
    low = F.avg_pool2d(x, 2)
    high = m.hh(x) + F.interpolate(m.lh(low), scale_factor=2)
    low = m.ll(low) + m.hl(F.avg_pool2d(x, 2))
    return m.out(torch.cat([high.relu(), F.interpolate(low.relu(), scale_factor=2)], 1))


def _capsules(m: Any, x: Tensor) -> Tensor:
    u = m.conv(x).flatten(2).transpose(1, 2)
    size = u.norm(dim=2, keepdim=True)
    u = u * size / (1 + size**2)
    vote = torch.einsum("npc,ocd->npod", u, m.vote.weight.reshape(2, 4, 3))
    score = torch.zeros_like(vote[..., 0])
    out = vote.mean(1)
    for _ in range(2):
        out = (score.softmax(2)[..., None] * vote).sum(1)
        score = score + torch.einsum("npod,nod->npo", vote, out)
    return out.norm(dim=2)


def blocks() -> Iterator[tuple[str, Case]]:
    """Blocks of convolutional networks."""
    conv = nn.Conv2d

    def module(name: str, function: Callable[..., Any], **modules: nn.Module) -> tuple[str, Case]:
        return f"block: {name}", (Called(function, **copy.deepcopy(modules)), images(2))

    out = {"out": conv(4, 2, 1)}
    yield module("plain", lambda m, x: m.out(m.a(x).relu()), a=conv(2, 4, 3, padding=1), **out)
    for epsilon in (0.0, 1e-6):
        yield module(
            f"filter response {epsilon}",
            lambda m, x: m.out(m.f(m.a(x))),
            a=conv(2, 4, 3, padding=1),
            f=_Filtered(4, epsilon),
            **out,
        )
        yield module(
            f"global response {epsilon}",
            lambda m, x: m.out(m.f(m.a(x))),
            a=conv(2, 4, 3, padding=1),
            f=_Response(4, epsilon),
            **out,
        )
    yield module(
        "weights standardised",
        lambda m, x: m.out(F.group_norm(F.conv2d(x, _standardised(m.a.weight), m.a.bias), 2, eps=0.0).relu()),
        a=conv(2, 4, 3),
        **out,
    )
    yield module(
        "weights standardised, gain",
        lambda m, x: m.out((F.conv2d(x, _standardised(m.a.weight) * m.g.weight[:, :, None, None]) + 0).relu()),
        a=conv(2, 4, 3, bias=False),
        g=nn.Linear(1, 4, bias=False),
        **out,
    )
    yield module("demodulated", _demodulated, style=nn.Linear(2, 2), conv=conv(2, 4, 3, bias=False), **out)
    yield module("involution", _involution, small=conv(2, 3, 1), kernel=conv(3, 9, 1), out=conv(2, 2, 1))
    yield module(
        "squeezed and excited",
        lambda m, x: m.out(m.a(x) * m.u(m.d(m.a(x).mean((2, 3), keepdim=True)).relu()).sigmoid()),
        a=conv(2, 4, 3),
        d=conv(4, 2, 1),
        u=conv(2, 4, 1),
        **out,
    )
    yield module(
        "squeezed, spatial",
        lambda m, x: m.out(
            m.a(x) * m.u(torch.cat([m.a(x).mean(1, keepdim=True), m.a(x).amax(1, keepdim=True)], 1)).sigmoid()
        ),
        a=conv(2, 4, 3),
        u=conv(2, 1, 3, padding=1),
        **out,
    )
    yield module(
        "efficient channels",
        lambda m, x: m.out(m.a(x) * m.u(m.a(x).mean((2, 3))[:, None])[:, 0, :, None, None].sigmoid()),
        a=conv(2, 4, 3),
        u=nn.Conv1d(1, 1, 3, padding=1, bias=False),
        **out,
    )
    yield module(
        "shuffled groups",
        lambda m, x: m.out(_shuffled(m.a(x), 2).relu()),
        a=conv(2, 4, 3, groups=2),
        out=conv(4, 2, 1, groups=2),
    )
    yield module(
        "shuffled, then by channel",
        lambda m, x: m.out(m.d(_shuffled(m.a(x), 2)).relu()),
        a=conv(2, 4, 1),
        d=conv(4, 4, 3, groups=4, padding=1),
        **out,
    )
    yield module(
        "inverted residual",
        lambda m, x: x + m.out(F.relu6(m.d(F.relu6(m.a(x))))),
        a=conv(2, 4, 1),
        d=conv(4, 4, 3, groups=4, padding=1),
        **out,
    )
    yield module(
        "ghost",
        lambda m, x: m.out(torch.cat([m.a(x), m.d(m.a(x))], 1).relu()),
        a=conv(2, 2, 1),
        d=conv(2, 2, 3, groups=2, padding=1),
        **out,
    )
    yield module(
        "split and added",
        lambda m, x: m.out((m.a(x)[:, :2] + m.a(x)[:, 2:]).relu()),
        a=conv(2, 4, 3),
        out=conv(2, 2, 1),
    )
    yield module(
        "split and multiplied", lambda m, x: m.out(m.a(x)[:, :2] * m.a(x)[:, 2:]), a=conv(2, 4, 3), out=conv(2, 2, 1)
    )
    yield module("maxout", lambda m, x: m.out(m.a(x).unflatten(1, (2, 2)).amax(2)), a=conv(2, 4, 3), out=conv(2, 2, 1))
    yield module(
        "scales in turn",
        lambda m, x: m.out(torch.cat([m.a(x), m.c(m.a(x) + x)], 1).relu()),
        a=conv(2, 2, 3, padding=1),
        c=conv(2, 2, 3, padding=1),
        **out,
    )
    yield module(
        "octaves",
        _octave,
        hh=conv(2, 2, 3, padding=1),
        hl=conv(2, 2, 1),
        lh=conv(2, 2, 1),
        ll=conv(2, 2, 3, padding=1),
        **out,
    )
    yield module("capsules", _capsules, conv=conv(2, 4, 3), vote=nn.Linear(12, 2, bias=False))
    yield module(
        "pyramid",
        lambda m, x: m.out(m.l(x) + F.interpolate(m.t(m.a(x)), scale_factor=2, mode="nearest")),
        a=conv(2, 3, 3, stride=2, padding=1),
        l=conv(2, 4, 1),
        t=conv(3, 4, 1),
        **out,
    )
    yield module(
        "dense",
        lambda m, x: m.out(torch.cat([x, m.a(x).relu(), m.c(torch.cat([x, m.a(x).relu()], 1)).relu()], 1)),
        a=conv(2, 2, 3, padding=1),
        c=conv(4, 2, 3, padding=1),
        out=conv(6, 2, 1),
    )
    yield module(
        "dense, normed",
        lambda m, x: m.out(m.n(torch.cat([x, m.a(x)], 1)).relu()),
        a=conv(2, 2, 3, padding=1),
        n=nn.BatchNorm2d(4),
        **out,
    )
    yield module(
        "three branches to one",
        lambda m, x: m.out((m.n(m.a(x)) + m.k(m.c(x)) + m.i(x)).relu()),
        a=conv(2, 2, 3, padding=1, bias=False),
        n=nn.BatchNorm2d(2),
        c=conv(2, 2, 1, bias=False),
        k=nn.BatchNorm2d(2),
        i=nn.BatchNorm2d(2),
        out=conv(2, 2, 1),
    )
    yield module("residual of two maps", lambda m, x: x + m.out(m.a(x)), a=conv(2, 4, 1), **out)
    yield module(
        "concatenated rectifier",
        lambda m, x: m.out(torch.cat([m.a(x).relu(), (-m.a(x)).relu()], 1)),
        a=conv(2, 2, 3),
        **out,
    )
    yield module(
        "coordinates",
        lambda m, x: m.out(
            m.a(
                torch.cat([x, torch.linspace(-1, 1, x.shape[3], dtype=x.dtype).expand(len(x), 1, x.shape[2], -1)], 1)
            ).relu()
        ),
        a=conv(3, 4, 3),
        **out,
    )
    yield module(
        "blurred before pooling",
        lambda m, x: m.out(F.conv2d(m.a(x).relu(), torch.ones(4, 1, 2, 2, dtype=x.dtype) / 4, stride=2, groups=4)),
        a=conv(2, 4, 3),
        **out,
    )
    yield module(
        "masked kernel",
        lambda m, x: m.out(F.conv2d(x, m.a.weight * torch.tensor([1.0, 1, 0]).to(x.dtype), m.a.bias, padding=1).relu()),
        a=conv(2, 4, 3),
        **out,
    )
    yield module(
        "kernel and its mirror",
        lambda m, x: m.out((F.conv2d(x, m.a.weight) + F.conv2d(x, m.a.weight.flip(3))).relu()),
        a=conv(2, 4, 3, bias=False),
        **out,
    )
    yield module(
        "four turns of a kernel",
        lambda m, x: m.out(torch.stack([F.conv2d(x, m.a.weight.rot90(k, (2, 3)), m.a.bias) for k in range(4)]).amax(0)),
        a=conv(2, 4, 3),
        **out,
    )
    yield module(
        "dynamic mixture of kernels",
        lambda m, x: m.out(
            torch.cat(
                [
                    F.conv2d(one[None], torch.einsum("k,koihw->oihw", s, m.a.weight.reshape(2, 4, 2, 3, 3)))
                    for one, s in zip(x, m.s(x.mean((2, 3))).softmax(1), strict=True)
                ]
            ).relu()
        ),
        a=conv(2, 8, 3, bias=False),
        s=nn.Linear(2, 2),
        **out,
    )
    yield module(
        "gated activation",
        lambda m, x: m.out(m.a(x).tanh() * m.c(x).sigmoid()),
        a=conv(2, 4, 3, dilation=2),
        c=conv(2, 4, 3, dilation=2),
        **out,
    )
    yield module(
        "sub-pixels", lambda m, x: m.out(F.pixel_shuffle(m.a(x).relu(), 2)), a=conv(2, 4, 3), out=conv(1, 2, 3)
    )
    yield module(
        "sub-pixels, linear", lambda m, x: m.out(F.pixel_shuffle(m.a(x), 2)), a=conv(2, 4, 3), out=conv(1, 2, 3)
    )
    yield module(
        "deconvolved",
        lambda m, x: m.out(m.t(m.a(x).relu()).relu()),
        a=conv(2, 4, 3),
        t=nn.ConvTranspose2d(4, 4, 2, stride=2),
        **out,
    )
    yield module(
        "style of features",
        lambda m, x: torch.einsum("nchw,ndhw->ncd", m.a(x), m.a(x)) / x[0, 0].numel(),
        a=conv(2, 4, 3),
    )
    yield module(
        "adaptive instance norm",
        lambda m, x: m.out(
            F.instance_norm(m.a(x), eps=0.0) * m.g(x.mean((2, 3)))[:, :, None, None]
            + m.h(x.mean((2, 3)))[:, :, None, None]
        ),
        a=conv(2, 4, 3),
        g=nn.Linear(2, 4),
        h=nn.Linear(2, 4),
        **out,
    )
    yield module(
        "spatial norm by a map",
        lambda m, x: m.out(F.instance_norm(m.a(x), eps=1e-5) * (1 + m.g(x)) + m.h(x)),
        a=conv(2, 4, 3, padding=1),
        g=conv(2, 4, 3, padding=1),
        h=conv(2, 4, 3, padding=1),
        **out,
    )
    yield module(
        "switched norms",
        lambda m, x: m.out(
            torch.stack([F.instance_norm(m.a(x), eps=0.0), F.group_norm(m.a(x), 1, eps=0.0)], -1)
            @ m.s.weight[0].softmax(0)
        ),
        a=conv(2, 4, 3),
        s=nn.Linear(2, 1, bias=False),
        **out,
    )
    yield module(
        "cosine classifier",
        lambda m, x: F.normalize(m.a(x).mean((2, 3)), eps=0.0) @ F.normalize(m.c.weight, dim=1, eps=0.0).T * 16,
        a=conv(2, 4, 3),
        c=nn.Linear(4, 3, bias=False),
    )
    yield module(
        "bilinear pooling",
        lambda m, x: m.out(F.normalize(torch.einsum("nchw,ndhw->ncd", m.a(x), m.c(x)).flatten(1), eps=0.0)),
        a=conv(2, 3, 3),
        c=conv(2, 3, 3),
        out=nn.Linear(9, 2),
    )
    yield module(
        "generalised mean",
        lambda m, x: m.out(m.a(x).abs().pow(m.p.weight.abs() + 1).mean((2, 3)).pow(1 / (m.p.weight.abs() + 1))),
        a=conv(2, 4, 3),
        p=nn.Linear(1, 1, bias=False),
        out=nn.Linear(4, 2),
    )
    yield module(
        "vlad",
        lambda m, x: m.out(
            F.normalize(
                torch.einsum(
                    "nkp,nkpc->nkc",
                    m.s(x).flatten(2).softmax(1),
                    x.flatten(2).mT[:, None] - m.c.weight[None, :, None],
                ),
                dim=2,
                eps=0.0,
            ).flatten(1)
        ),
        s=conv(2, 3, 1),
        c=nn.Linear(2, 3, bias=False),
        out=nn.Linear(6, 2),
    )


def _contrast(p: Any, x: Tensor, *, norm: bool = True, centred: bool = False) -> Tensor:
    u, v = (x @ p.a).relu() @ p.b, (x.flip(1) @ p.a).relu() @ p.b
    if centred:
        u, v = u - u.mean(0), v - v.mean(0)
    if norm:
        u, v = F.normalize(u, dim=1, eps=0.0), F.normalize(v, dim=1, eps=0.0)
    return (u @ v.T * 5).log_softmax(1).diagonal()


def _barlow(p: Any, x: Tensor) -> Tensor:
    u, v = (((h - h.mean(0)) / h.std(0)) for h in (x @ p.a @ p.b, x.flip(1) @ p.a @ p.b))
    return u.T @ v / len(x)


def _variances(p: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    u = x @ p.a @ p.b
    u = u - u.mean(0)
    return (1 - u.var(0)).relu(), (u.T @ u).square().triu(1).sum()


def _teacher(p: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        goal = ((x.flip(1) @ p.a @ p.b) / 0.1).softmax(1)
    return -(goal * (x @ p.a @ p.b).log_softmax(1)).sum(1)


def _arc(p: Any, x: Tensor) -> Tensor:
    cosine = F.normalize(x @ p.a, dim=1, eps=0.0) @ F.normalize(p.b, dim=0, eps=0.0)
    label = torch.arange(len(x)) % cosine.shape[1]
    margin = F.one_hot(label, cosine.shape[1]).to(x.dtype) * 0.3
    return 8 * (cosine.clamp(-0.99, 0.99).acos() + margin).cos()


def _centres(p: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    h = (x @ p.a + p.c).relu()
    label = torch.arange(len(x)) % 3
    return h @ p.b, (h - p.z[label]).square().sum(1)


def _vq(p: Any, x: Tensor, *, through: bool = True) -> tuple[Tensor, Tensor]:
    h = x @ p.a
    code = p.e[torch.cdist(h, p.e).argmin(1)]
    read = h + (code - h).detach() if through else code
    return read @ p.b, (h.detach() - code).square().sum() + (h - code.detach()).square().sum()


def _lookup_free(p: Any, x: Tensor) -> Tensor:
    h = x @ p.a
    return (h + (h.sign() - h).detach()) @ p.b


def _scalar_levels(p: Any, x: Tensor) -> Tensor:
    h = (x @ p.a).tanh() * 2
    return (h + (h.round() - h).detach()) @ p.b


def _gumbel(p: Any, x: Tensor) -> Tensor:
    soft = (x @ p.a).softmax(1)
    hard = F.one_hot(soft.argmax(1), soft.shape[1]).to(x.dtype)
    return (hard - soft.detach() + soft) @ p.b


def _levels(w: Tensor, step: Tensor) -> Tensor:
    scaled = w / step
    return (scaled + (scaled.round() - scaled).detach()) * step


def _per_row(w: Tensor) -> Tensor:
    step = w.detach().abs().amax(0, keepdim=True) / 7
    return w + (torch.round(w / step) * step - w).detach()


def _ternary(w: Tensor) -> Tensor:
    scale = w.abs().mean()
    return w + ((w / scale).round().clamp(-1, 1) * scale - w).detach()


def objectives() -> Iterator[tuple[str, Case]]:
    """Losses, quantisers and targets that are part of the model."""
    a, b, c = draw(4, 6), draw(6, 3), draw(6)
    both = {"a": a, "b": b}
    yield from forms(
        "objective",
        {
            "contrast": (_contrast, both),
            "contrast, no norm": (lambda p, x: _contrast(p, x, norm=False), both),
            "contrast, centred": (lambda p, x: _contrast(p, x, centred=True), both),
            "cross correlation": (_barlow, both),
            "variances and covariances": (_variances, both),
            "teacher of itself": (_teacher, both),
            "angular margin": (_arc, both),
            "centres": (_centres, {**both, "c": c, "z": draw(3, 6)}),
            "codebook": (_vq, {**both, "e": draw(5, 6)}),
            "codebook, not straight": (lambda p, x: _vq(p, x, through=False), {**both, "e": draw(5, 6)}),
            "signs as codes": (_lookup_free, both),
            "levels as codes": (_scalar_levels, both),
            "hard choice": (_gumbel, both),
            "learned step": (lambda p, x: (x @ _levels(p.a, p.s)).relu() @ p.b, {**both, "s": draw(1)}),
            "learned steps": (lambda p, x: (x @ _levels(p.a, p.s)).relu() @ p.b, {**both, "s": draw(6)}),
            "rounded by row": (lambda p, x: (x @ _per_row(p.a)).relu() @ p.b, both),
            "rounded by row, both": (lambda p, x: (x @ _per_row(p.a)).relu() @ _per_row(p.b), both),
            "ternary": (lambda p, x: (x @ _ternary(p.a)).relu() @ p.b, both),
            "clipped straight through": (
                lambda p, x: (x @ (p.a + (p.a.clamp(-1, 1) - p.a).detach())).relu() @ p.b,
                both,
            ),
            "focal": (
                lambda p, x: ((1 - ((x @ p.a).relu() @ p.b).softmax(1)) ** 2) * ((x @ p.a).relu() @ p.b).log_softmax(1),
                both,
            ),
            "pairwise ranks": (
                lambda p, x: F.softplus(((x @ p.a).relu() @ p.b)[:, None] - ((x @ p.a).relu() @ p.b)[None]),
                both,
            ),
            "ranks, biased": (
                lambda p, x: ((x @ p.a).relu() @ p.b + p.k)[:, None] - ((x @ p.a).relu() @ p.b + p.k)[None],
                {**both, "k": draw(3)},
            ),
            "survival": (
                lambda p, x: (h := (x @ p.a @ p.b)[:, 0]) - h.flip(0).logcumsumexp(0).flip(0),
                both,
            ),
            "survival, biased": (
                lambda p, x: (h := ((x @ p.a).relu() @ p.b + p.k)[:, 0]) - h.flip(0).logcumsumexp(0).flip(0),
                {**both, "k": draw(3)},
            ),
            "ordinal": (
                lambda p, x: ((x @ p.a).relu() @ p.b[:, :1] - p.t.exp().cumsum(0)).sigmoid(),
                {**both, "t": draw(4)},
            ),
            "ordinal, bias and cuts": (
                lambda p, x: ((x @ p.a).relu() @ p.b[:, :1] + p.k - p.t).sigmoid(),
                {**both, "k": draw(1), "t": draw(4)},
            ),
            "mixture density": (
                lambda p, x: (h := (x @ p.a).relu() @ p.m)[:, :2].log_softmax(1).logsumexp(1) + h[:, 2:].sum(1),
                {"a": a, "m": draw(6, 4)},
            ),
            "policy and value": (
                lambda p, x: (h := (x @ p.a).tanh()) @ p.v + (h @ p.b - (h @ p.b).mean(1, keepdim=True)),
                {**both, "v": draw(6, 1)},
            ),
            "policy and value, biased": (
                lambda p, x: (h := (x @ p.a).tanh()) @ p.v + (q := h @ p.b + p.k) - q.mean(1, keepdim=True),
                {**both, "v": draw(6, 1), "k": draw(3)},
            ),
            "policy and value, largest": (
                lambda p, x: (h := (x @ p.a).tanh()) @ p.v + (q := h @ p.b + p.k) - q.amax(1, keepdim=True),
                {**both, "v": draw(6, 1), "k": draw(3)},
            ),
        },
        lambda: rows(4),
    )


def made_weights() -> Iterator[tuple[str, Case]]:
    """Weights that are functions of parameters: adapters, hypernetworks, factors, normalised and shared ones."""
    a, b, s = draw(4, 6), draw(6, 3), draw(6, 6)
    u, v = draw(4, 2), draw(2, 6)
    base = draw(4, 6)

    def adapted(weight: Callable[[Any], Tensor]) -> Callable[[Any, Tensor], Tensor]:
        return lambda p, x: (x @ weight(p)).relu() @ p.b

    def unit(w: Tensor, dim: int = 0) -> Tensor:
        return w / w.norm(dim=dim, keepdim=True)

    pair = {"u": u, "v": v, "b": b}
    yield from forms(
        "made weight",
        {
            "adapter": (adapted(lambda p: base.to(p.u.dtype) + p.u @ p.v), pair),
            "adapter, scaled": (adapted(lambda p: base.to(p.u.dtype) + p.s * (p.u @ p.v)), {**pair, "s": draw(1)}),
            "adapter, gain inside": (adapted(lambda p: p.a + p.u * p.g @ p.v), {**pair, "a": a, "g": draw(2)}),
            "adapter, frozen factors": (
                adapted(lambda p: p.a + (u.to(p.a.dtype) * p.g) @ v.to(p.a.dtype) * p.h),
                {"a": a, "g": draw(2), "h": draw(6), "b": b},
            ),
            "magnitude and direction": (
                adapted(lambda p: p.m * unit(base.to(p.u.dtype) + p.u @ p.v)),
                {**pair, "m": draw(6)},
            ),
            "magnitude, direction by rows": (
                adapted(lambda p: p.m[:, None] * unit(p.a, 1)),
                {"a": a, "b": b, "m": draw(4)},
            ),
            "direction alone": (adapted(lambda p: unit(p.a)), {"a": a, "b": b}),
            "direction, then a sum": (adapted(lambda p: unit(p.a).sum(0, keepdim=True).expand(4, 6)), {"a": a, "b": b}),
            "product of entries": (adapted(lambda p: p.u @ p.v * (p.m @ p.n)), {**pair, "m": u, "n": v}),
            "square of factors": (adapted(lambda p: (p.u @ p.v).square()), pair),
            "exponential of factors": (adapted(lambda p: (p.u @ p.v).exp()), pair),
            "outer sum": (adapted(lambda p: p.m[:, None] + p.n), {"m": draw(4), "n": draw(6), "b": b}),
            "outer difference, twice": (
                lambda p, x: (x @ (p.m[:, None] - p.n)).relu() @ (p.n[:, None] - p.k),
                {"m": draw(4), "n": draw(6), "k": draw(3)},
            ),
            "kronecker": (adapted(lambda p: torch.kron(p.m, p.n)), {"m": draw(2, 2), "n": draw(2, 3), "b": b}),
            "kronecker plus its own": (
                adapted(lambda p: torch.kron(p.m, p.n) + torch.kron(p.m, p.k)),
                {"m": draw(2, 2), "n": draw(2, 3), "k": draw(2, 3), "b": b},
            ),
            "tensor train": (
                adapted(lambda p: torch.einsum("aik,kbj->abij", p.m, p.n).flatten(2).flatten(0, 1)),
                {"m": draw(2, 2, 3), "n": draw(3, 2, 3), "b": b},
            ),
            "tensor ring": (
                adapted(lambda p: torch.einsum("laik,kbjl->abij", p.m, p.n).flatten(2).flatten(0, 1)),
                {"m": draw(2, 2, 2, 3), "n": draw(3, 2, 3, 2), "b": b},
            ),
            "block diagonal": (adapted(lambda p: torch.block_diag(p.m, p.m)), {"m": draw(2, 3), "b": b}),
            "butterfly": (
                lambda p, x: (
                    torch.einsum(
                        "nij,jik->nki", torch.einsum("nij,ijk->nik", x.unflatten(1, (2, 2)), p.m), p.n
                    ).flatten(1)
                    @ p.o
                ),
                {"m": draw(2, 2, 2), "n": draw(2, 2, 3), "o": draw(6, 2)},
            ),
            "circulant": (
                lambda p, x: torch.stack([p.c.roll(k) for k in range(4)]).mul(x[:, :, None]).sum(1).relu() @ p.o,
                {"c": draw(4), "o": draw(4, 2)},
            ),
            "toeplitz by strides": (
                lambda p, x: (x @ p.c.unfold(0, 4, 1).T).relu() @ p.o,
                {"c": draw(9), "o": draw(6, 2)},
            ),
            "hypernetwork of the input": (
                lambda p, x: torch.einsum("ni,nij->nj", x, (x @ p.h).unflatten(1, (4, 3))).relu() @ p.o,
                {"h": draw(4, 12), "o": draw(3, 2)},
            ),
            "hypernetwork of a code": (
                adapted(lambda p: (p.z @ p.h).reshape(4, 6)),
                {"z": draw(5), "h": draw(5, 24), "b": b},
            ),
            "one code for two": (
                lambda p, x: (x @ (p.z @ p.h).reshape(4, 6)).relu() @ (p.z @ p.k).reshape(6, 3),
                {"z": draw(5), "h": draw(5, 24), "k": draw(5, 18)},
            ),
            "interpolated weights": (
                adapted(lambda p: torch.lerp(p.a, p.d, p.t)),
                {"a": a, "d": draw(4, 6), "t": draw(1), "b": b},
            ),
            "interpolated, twice": (
                lambda p, x: (x @ torch.lerp(p.a, p.d, p.t)).relu() @ torch.lerp(p.b, p.e, p.t),
                {"a": a, "d": draw(4, 6), "t": draw(6), "b": b, "e": draw(6, 3)} | {"t": draw(1)},
            ),
            "orthogonal by steps": (
                lambda p, x: (
                    (x @ p.a @ (1.5 * unit(p.s, 0) - 0.5 * unit(p.s, 0) @ unit(p.s, 0).T @ unit(p.s, 0))) @ p.b
                ),
                {"a": a, "s": s, "b": b},
            ),
            "spectral norm by a step": (
                lambda p, x: (x @ (p.a / (p.a @ unit(p.a.T @ torch.ones(4, dtype=x.dtype))).norm())).relu() @ p.b,
                {"a": a, "b": b},
            ),
            "symmetric middle": (lambda p, x: x @ p.a @ (p.s + p.s.T) @ p.b, {"a": a, "s": s, "b": b}),
            "upper middle": (lambda p, x: x @ p.a @ p.s.triu() @ p.b, {"a": a, "s": s, "b": b}),
            "doubly normalised middle": (
                lambda p, x: x @ p.a @ p.s.log_softmax(0).log_softmax(1).exp() @ p.b,
                {"a": a, "s": s, "b": b},
            ),
            "permutation, soft": (lambda p, x: (x @ p.a).relu() @ p.s.softmax(1) @ p.b, {"a": a, "s": s, "b": b}),
            "nonnegative by squares": (lambda p, x: (x @ p.a.square()).relu() @ p.b.square(), {"a": a, "b": b}),
            "nonnegative by softplus": (lambda p, x: (x @ F.softplus(p.a)).relu() @ p.b, {"a": a, "b": b}),
            "difference of squares": (
                lambda p, x: x @ (p.a.square() - p.d.square()),
                {"a": a, "d": draw(4, 6)},
            ),
            "difference of products": (
                lambda p, x: x @ (p.a * p.d - p.e * p.f),
                {"a": a, "d": a, "e": a, "f": a},
            ),
            "deep product of entries": (lambda p, x: x @ (p.a * p.d * p.e), {"a": a, "d": a, "e": a}),
            "cube of entries": (lambda p, x: x @ p.a.pow(3) @ p.b, {"a": a, "b": b}),
            "signed power": (lambda p, x: x @ (p.a.sign() * p.a.abs().pow(1.5)) @ p.b, {"a": a, "b": b}),
            "weights of weights": (
                lambda p, x: (x @ p.a).relu() @ (p.a.T @ p.d).relu() @ p.o,
                {"a": a, "d": draw(4, 3), "o": draw(3, 2)},
            ),
            "weight read as its own bias": (lambda p, x: (x @ p.a + p.a[0]).relu() @ p.b, {"a": a, "b": b}),
            "gain of a column sum": (lambda p, x: (x @ p.a * p.b.sum(1)).relu() @ p.b, {"a": a, "b": b}),
            "gain of a column norm": (lambda p, x: (x @ p.a * p.b.norm(dim=1)).relu() @ unit(p.b, 1), {"a": a, "b": b}),
            "divided by its size": (lambda p, x: (x @ p.a / p.a.abs().amax()) @ p.b, {"a": a, "b": b}),
            "sizes exchanged": (
                lambda p, x: (x @ p.a / p.a.norm() * p.b.norm()).relu() @ p.b / p.b.norm() * p.a.norm(),
                {"a": a, "b": b},
            ),
            "masked by a rank": (
                lambda p, x: (x @ (p.a * (p.a.abs() >= p.a.abs().flatten().kthvalue(12).values))).relu() @ p.b,
                {"a": a, "b": b},
            ),
            "two of four kept": (
                lambda p, x: (
                    (
                        x @ p.a.new_zeros(6, 4).scatter(1, (i := p.a.T.abs().topk(2, 1).indices), p.a.T.gather(1, i)).T
                    ).relu()
                    @ p.b
                ),
                {"a": a, "b": b},
            ),
        },
        lambda: rows(4),
    )


def nearly() -> Iterator[tuple[str, Case]]:
    """Forms that look like ones with a symmetry, and differ from these in one place."""
    a, b, c, d = draw(4, 6), draw(6, 3), draw(6), draw(4, 6)
    plain = {"a": a, "c": c, "b": b}
    yield from forms(
        "nearly",
        {
            "one neuron is linear": (
                lambda p, x: torch.cat([(h := x @ p.a + p.c)[:, :1], h[:, 1:].relu()], 1) @ p.b,
                plain,
            ),
            "one neuron is shifted": (
                lambda p, x: ((x @ p.a + p.c) - torch.eye(6, dtype=x.dtype)[0]).relu() @ p.b,
                plain,
            ),
            "slopes by neuron": (
                lambda p, x: torch.where((h := x @ p.a + p.c) > 0, h, h * torch.arange(6, dtype=x.dtype)) @ p.b,
                plain,
            ),
            "maximum with a neighbour": (
                lambda p, x: torch.maximum(h := x @ p.a + p.c, h.roll(1, 1)) @ p.b,
                plain,
            ),
            "maximum with its negative": (lambda p, x: torch.maximum(h := x @ p.a + p.c, -h) @ p.b, plain),
            "maximum with a tenth": (lambda p, x: torch.maximum(h := x @ p.a + p.c, h / 10) @ p.b, plain),
            "maximum with another's tenth": (
                lambda p, x: torch.maximum(h := x @ p.a + p.c, h.flip(1) / 10) @ p.b,
                plain,
            ),
            "clamped from both sides by itself": (
                lambda p, x: torch.minimum(torch.maximum(h := x @ p.a + p.c, -h.abs()), h.abs()) @ p.b,
                plain,
            ),
            "norm without one neuron": (
                lambda p, x: (h := x @ p.a + p.c) / h[:, 1:].norm(dim=1, keepdim=True) @ p.b,
                plain,
            ),
            "mean without one neuron": (
                lambda p, x: ((h := x @ p.a + p.c) - h[:, 1:].mean(1, keepdim=True)) @ p.b,
                plain,
            ),
            "mean of one neuron": (lambda p, x: ((h := x @ p.a + p.c) - h[:, :1].mean(1, keepdim=True)) @ p.b, plain),
            "median instead of mean": (
                lambda p, x: ((h := x @ p.a + p.c) - h.median(1, keepdim=True).values) @ p.b,
                plain,
            ),
            "softmax of a part, joined": (
                lambda p, x: torch.cat([(h := x @ p.a + p.c)[:, :3].softmax(1), h[:, 3:].softmax(1)], 1) @ p.b,
                plain,
            ),
            "softmax and one logit": (
                lambda p, x: torch.cat([(h := x @ p.a + p.c).softmax(1), h[:, :1]], 1)[:, :6] @ p.b,
                plain,
            ),
            "softmax, one logit counted twice": (
                lambda p, x: (x @ p.a + p.c)[:, [0, 0, 1, 2, 3, 4, 5]].softmax(1)[:, 1:] @ p.b,
                plain,
            ),
            "softmax with weights": (
                lambda p, x: (
                    ((e := (x @ p.a + p.c).exp()) / (e * torch.arange(1, 7, dtype=x.dtype)).sum(1, keepdim=True)) @ p.b
                ),
                plain,
            ),
            "softmax with one left out": (
                lambda p, x: ((e := (x @ p.a + p.c).exp()) / e[:, 1:].sum(1, keepdim=True)) @ p.b,
                plain,
            ),
            "exponentials of differences": (
                lambda p, x: ((h := x @ p.a + p.c)[:, None] - h[None]).exp().sum(1) @ p.b,
                plain,
            ),
            "sigmoid of differences": (
                lambda p, x: ((h := x @ p.a + p.c)[:, :, None] - h[:, None] - 1).sigmoid().sum(2) @ p.b,
                plain,
            ),
            "differences weighted": (
                lambda p, x: (((h := x @ p.a + p.c)[:, :, None] - 2 * h[:, None]).relu()).sum(2) @ p.b,
                plain,
            ),
            "ratios of neighbours": (lambda p, x: ((h := (x @ p.a).exp() + 1) / h.roll(1, 1)) @ p.b, plain),
            "ratios of neighbours, pure": (lambda p, x: ((h := (x @ p.a + p.c).exp()) / h.roll(1, 1)) @ p.b, plain),
            "angle of pairs": (
                lambda p, x: torch.atan2((h := x @ p.a)[:, ::2], h[:, 1::2]).repeat(1, 2) @ p.b,
                plain,
            ),
            "angle of pairs, crossed": (
                lambda p, x: torch.atan2(x @ p.a, (x @ p.d).roll(1, 1)) @ p.b,
                {**plain, "d": d},
            ),
            "two gates, one crossed": (
                lambda p, x: (x @ p.a) * (x @ p.d).roll(1, 1).relu() @ p.b,
                {**plain, "d": d},
            ),
            "gate by itself moved": (lambda p, x: (h := x @ p.a) * h.roll(2, 1).relu() @ p.b, plain),
            "gate by its own sign": (lambda p, x: (h := x @ p.a + p.c) * h.roll(3, 1).sign() @ p.b, plain),
            "square and its root": (lambda p, x: ((x @ p.a + p.c).square() + 1e-30).sqrt() @ p.b, plain),
            "square and its root, plus one": (lambda p, x: ((x @ p.a + p.c).square() + 1).sqrt() @ p.b, plain),
            "read at half precision": (lambda p, x: ((x @ p.a + p.c).half().to(x.dtype)).relu() @ p.b, plain),
            "hidden far threshold": (lambda p, x: F.threshold(x @ p.a + p.c, -1e6, 0.0) @ p.b, plain),
            "hidden tiny bias": (lambda p, x: (x @ p.a + 1e-9).relu() @ p.b, plain),
            "hidden tiny curvature": (lambda p, x: ((h := x @ p.a) + 1e-8 * h.square()).relu() @ p.b, plain),
            "hidden large scale": (lambda p, x: (h := (x @ p.a) * 1e6).tanh() / 1e6 @ p.b + h @ p.b, plain),
            "same at odd sizes": (
                lambda p, x: ((x @ p.a).relu() if len(x) % 2 == 0 else x @ p.a) @ p.b,
                plain,
            ),
            "last row apart": (
                lambda p, x: torch.cat([(h := x @ p.a)[:-1].relu(), h[-1:].tanh()]) @ p.b,
                plain,
            ),
            "beyond the tenth row": (
                lambda p, x: torch.cat([(h := x @ p.a)[:10].relu(), h[10:].tanh()]) @ p.b,
                plain,
            ),
            "beyond the fourth row, other weights": (
                lambda p, x: torch.cat([x[:4] @ p.a, x[4:] @ p.d]).relu() @ p.b,
                {**plain, "d": d},
            ),
        },
        lambda: rows(4),
    )


def architectures() -> Iterator[tuple[str, Case]]:
    """All of these models with their inputs."""
    torch.manual_seed(61)
    for group in (flows, recurrences, attentions, graphs, routed, implicit, blocks, objectives, made_weights, nearly):
        yield from group()
