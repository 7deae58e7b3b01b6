"""Models that were written after inference was finished, to see what it gets wrong on programs nobody tuned it on.

Each is given with further inputs: other batch sizes, lengths, ranges and orders, on which every law must hold as well.
`held_out()` names all of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from adversarial_layers import Called, Function

Case = tuple[nn.Module, list[tuple[Any, ...]]]
"""A model with the inputs that its laws are read off, followed by others."""


def draw(*shape: int) -> Tensor:
    """A random tensor."""
    return torch.randn(shape)


def rows(width: int, *counts: int) -> list[tuple[Any, ...]]:
    """Matrices of one width with other numbers of rows and other sizes of entries."""
    return [(draw(count, width) * (1 + 2 * index) + index,) for index, count in enumerate(counts or (6, 6, 3, 11))]


def forms(title: str, cases: dict[str, tuple[Any, ...]], inputs: Callable[[], list[tuple[Any, ...]]]) -> Iterator[Any]:
    """Functions of parameters, each with its own copies and its own inputs."""
    for name, (function, parameters, *own) in cases.items():
        given = own[0]() if own else inputs()
        yield f"{title}: {name}", (Function(function, **{k: v.clone() for k, v in parameters.items()}), given)


def contractions() -> Iterator[tuple[str, Case]]:
    """Contractions with repeated letters, operands and ellipses, and products that are written without them."""
    a, b, s, t = draw(4, 3), draw(3, 2), draw(4, 4), draw(3, 3)
    yield from forms(
        "contraction",
        {
            "same operand thrice": (lambda p, x: torch.einsum("ni,ij,kj,kl->nl", x, p.a, p.a, p.a), {"a": a}),
            "diagonal of a product": (lambda p, x: torch.einsum("ni,ij,ji->n", x, p.a, p.c), {"a": a, "c": draw(3, 4)}),
            "trace of a cube": (lambda p, x: x * torch.einsum("ij,jk,ki->", p.s, p.s, p.s), {"s": s}),
            "determinant pair": (lambda p, x: x * torch.det(p.t @ p.u), {"t": t, "u": draw(3, 3)}),
            "log determinant": (lambda p, x: x.sum() * torch.linalg.slogdet(p.t @ p.u)[1], {"t": t, "u": draw(3, 3)}),
            "tensordot": (
                lambda p, x: torch.tensordot(torch.tensordot(x, p.g, ([1], [1])), p.b, ([2], [0])),
                {"g": draw(2, 4, 3), "b": b},
            ),
            "tensordot two axes": (
                lambda p, x: torch.tensordot(x[:, :, None] * p.r, p.g, ([1, 2], [0, 1])) @ p.b,
                {"r": draw(2), "g": draw(4, 2, 3), "b": b},
            ),
            "baddbmm": (
                lambda p, x: torch.baddbmm(p.c, x[:, None].expand(-1, 2, -1), p.a.expand(len(x), 4, 3), beta=0.5) @ p.b,
                {"c": draw(1, 2, 3), "a": a, "b": b},
            ),
            "addbmm": (
                lambda p, x: torch.addbmm(p.c, x[None], p.a[None], beta=0, alpha=2) @ p.b,
                {"c": draw(1, 3), "a": a, "b": b},
            ),
            "addmv": (lambda p, x: torch.addmv(p.c.expand(len(x)), x, p.a[:, 0], alpha=3), {"c": draw(1), "a": a}),
            "addr": (lambda p, x: x @ torch.addr(p.s, p.u, p.v, beta=0.0), {"s": s, "u": draw(4), "v": draw(4)}),
            "addr both": (lambda p, x: x @ torch.addr(p.s, p.u, p.v), {"s": s, "u": draw(4), "v": draw(4)}),
            "addcmul": (
                lambda p, x: torch.addcmul(x @ p.a, x @ p.c, x @ p.d, value=-2) @ p.b,
                {"a": a, "c": draw(4, 3), "d": draw(4, 3), "b": b},
            ),
            "addcdiv": (
                lambda p, x: torch.addcdiv(x @ p.a, x @ p.c, (x @ p.d).exp()) @ p.b,
                {"a": a, "c": draw(4, 3), "d": draw(4, 3), "b": b},
            ),
            "chain of matrices": (
                lambda p, x: torch.linalg.multi_dot([x, p.a, p.t, p.b]),
                {"a": a, "t": t, "b": b},
            ),
            "matrix power": (lambda p, x: x @ torch.linalg.matrix_power(p.s, 3) @ p.a, {"s": s, "a": a}),
            "matrix power negative": (lambda p, x: x @ torch.linalg.matrix_power(p.s, -1) @ p.a, {"s": s, "a": a}),
            "conjugation": (lambda p, x: x @ p.s @ p.d.diag() @ torch.linalg.inv(p.s), {"s": s, "d": draw(4)}),
            "generalised inverse": (lambda p, x: x @ p.a @ torch.linalg.pinv(p.a), {"a": a}),
            "least squares": (
                lambda p, x: torch.linalg.lstsq(p.a, (x[:4] @ p.s)).solution,
                {"a": draw(4, 3), "s": s},
                lambda: rows(4, 4, 4),
            ),
            "kronecker sum": (
                lambda p, x: x @ (torch.kron(p.u, torch.eye(2).to(x)) + torch.kron(torch.eye(2).to(x), p.v)),
                {"u": draw(2, 2), "v": draw(2, 2)},
            ),
            "khatri rao": (
                lambda p, x: x @ torch.einsum("ir,jr->ijr", p.u, p.v).flatten(0, 1) @ p.w,
                {"u": draw(2, 3), "v": draw(2, 3), "w": draw(3, 2)},
            ),
            "block diagonal": (
                lambda p, x: x @ torch.block_diag(p.u, p.v) @ p.w,
                {"u": draw(2, 3), "v": draw(2, 1), "w": draw(4, 2)},
            ),
            "block diagonal tied": (
                lambda p, x: x @ torch.block_diag(p.u, p.u) @ p.w,
                {"u": draw(2, 3), "w": draw(6, 2)},
            ),
            "vec trick": (
                lambda p, x: torch.einsum("nij,ia,jb->nab", x.view(-1, 2, 2), p.u, p.u) @ p.w,
                {"u": draw(2, 3), "w": draw(3, 2)},
            ),
            "factorisation machine": (
                lambda p, x: ((x @ p.v).square() - x.square() @ p.v.square()).sum(1) / 2,
                {"v": draw(4, 3)},
            ),
            "factorisation machine read": (
                lambda p, x: ((x @ p.v).square() - x.square() @ p.v.square()) @ p.w,
                {"v": draw(4, 3), "w": draw(3, 2)},
            ),
            "bilinear pooling": (
                lambda p, x: torch.einsum("ni,nj,ir,jr->nr", x, x, p.u, p.v) @ p.w,
                {"u": draw(4, 3), "v": draw(4, 3), "w": b},
            ),
            "inner of rows": (lambda p, x: torch.inner(x @ p.a, x @ p.c), {"a": a, "c": draw(4, 3)}),
            "outer of vectors": (lambda p, x: x @ torch.outer(p.u, p.v) @ p.s, {"u": draw(4), "v": draw(4), "s": s}),
            "vecdot": (lambda p, x: torch.linalg.vecdot(x @ p.a, x @ p.c), {"a": a, "c": draw(4, 3)}),
            "cross": (
                lambda p, x: torch.linalg.cross(x @ p.a, x @ p.c) @ p.b,
                {"a": a, "c": draw(4, 3), "b": b},
            ),
            "cartesian sum": (
                lambda p, x: (torch.cartesian_prod(p.u, p.v).sum(1)[None] * x.sum(1, keepdim=True)).relu(),
                {"u": draw(3), "v": draw(2)},
            ),
        },
        lambda: rows(4),
    )


def indices() -> Iterator[tuple[str, Case]]:
    """Every form of indexing, of activations, parameters and tables, with indices that other inputs do not repeat."""
    a, b = draw(4, 6), draw(6, 2)
    perm = torch.tensor([3, 5, 0, 1, 4, 2])

    def written(h: Tensor, value: Any, *where: Any) -> Tensor:
        h = h.clone()
        h[where] = value
        return h

    yield from forms(
        "index",
        {
            "inverse permutation": (lambda p, x: (x @ p.a)[:, perm][:, perm.argsort()] @ p.b, {"a": a, "b": b}),
            "permutation twice": (lambda p, x: (x @ p.a)[:, perm][:, perm] @ p.b, {"a": a, "b": b}),
            "permuted difference": (
                lambda p, x: ((x @ p.a + p.c)[:, perm] - p.c) @ p.b,
                {"a": a, "b": b, "c": draw(6)},
            ),
            "every second": (lambda p, x: (x @ p.a)[:, ::2] @ p.b[1::2], {"a": a, "b": b}),
            "even minus odd": (
                lambda p, x: ((x @ p.a)[:, ::2] - (x @ p.a)[:, 1::2]).relu() @ p.b[:3],
                {"a": a, "b": b},
            ),
            "two halves of one": (
                lambda p, x: ((x @ p.a)[:, :4] * (x @ p.a)[:, 2:]) @ p.b[:4],
                {"a": a, "b": b},
            ),
            "a row of weights": (lambda p, x: x * p.a[:, 2] + x * p.a[:, 2].flip(0), {"a": a}),
            "none and ellipsis": (lambda p, x: (x @ p.a)[..., None, :][:, 0] @ p.b[..., :], {"a": a, "b": b}),
            "negative index": (lambda p, x: (x @ p.a)[:, -1:] * p.b[-1], {"a": a, "b": b}),
            "written column": (lambda p, x: written(x @ p.a, 0.0, slice(None), 2) @ p.b, {"a": a, "b": b}),
            "written column one": (lambda p, x: written(x @ p.a, 1.0, slice(None), 2) @ p.b, {"a": a, "b": b}),
            "written by itself": (
                lambda p, x: written(x @ p.a, (x @ p.a)[:, 3:], slice(None), slice(0, 3)) @ p.b,
                {"a": a, "b": b},
            ),
            "written mask": (
                lambda p, x: written(x @ p.a, 0.0, x[:, 0] > 0) @ p.b,
                {"a": a, "b": b},
            ),
            "written where negative": (lambda p, x: written(x @ p.a, 0.0, (x @ p.a) < 0) @ p.b, {"a": a, "b": b}),
            "written where below one": (lambda p, x: written(x @ p.a, 0.0, (x @ p.a) < 1) @ p.b, {"a": a, "b": b}),
            "added in place": (
                lambda p, x: (x @ p.a).index_add_(1, torch.tensor([0, 0, 5]), (x @ p.c)) @ p.b,
                {"a": a, "b": b, "c": draw(4, 3)},
            ),
            "index reduce amin": (
                lambda p, x: (x @ p.a).index_reduce(1, torch.tensor([0, 0, 5]), x @ p.c, "amin") @ p.b,
                {"a": a, "b": b, "c": draw(4, 3)},
            ),
            "index reduce mean excluded": (
                lambda p, x: (
                    (x @ p.a).index_reduce(1, torch.tensor([0, 0, 5]), x @ p.c, "mean", include_self=False) @ p.b
                ),
                {"a": a, "b": b, "c": draw(4, 3)},
            ),
            "chosen by argmax": (
                lambda p, x: (x @ p.a).gather(1, (x @ p.a).argmax(1, keepdim=True)) * p.b[0],
                {"a": a, "b": b},
            ),
            "chosen by another": (
                lambda p, x: (x @ p.a).gather(1, (x @ p.c).argmax(1, keepdim=True)) * p.b[0],
                {"a": a, "b": b, "c": draw(4, 6)},
            ),
            "put by argsort": (
                lambda p, x: torch.zeros_like(x @ p.a).scatter(1, (x @ p.c).argsort(1), x @ p.a) @ p.b,
                {"a": a, "b": b, "c": draw(4, 6)},
            ),
            "ragged split": (
                lambda p, x: torch.cat([t.cumsum(1) for t in (x @ p.a).split([1, 2, 3], 1)], 1) @ p.b,
                {"a": a, "b": b},
            ),
            "tensor split": (
                lambda p, x: torch.cat([t.flip(1) for t in torch.tensor_split(x @ p.a, (2, 5), 1)], 1) @ p.b,
                {"a": a, "b": b},
            ),
            "unflatten": (
                lambda p, x: (x @ p.a).unflatten(1, (2, 3)).transpose(1, 2).flatten(1) @ p.b,
                {"a": a, "b": b},
            ),
            "unflatten max": (
                lambda p, x: (x @ p.a).unflatten(1, (2, 3)).amax(1) @ p.b[:3],
                {"a": a, "b": b},
            ),
            "maxout minus": (
                lambda p, x: ((x @ p.a)[:, :3].maximum((x @ p.a)[:, 3:]) - (x @ p.a)[:, :3]) @ p.b[:3],
                {"a": a, "b": b},
            ),
            "roll of weights": (lambda p, x: (x @ p.a.roll(2, 1)).relu() @ p.b.roll(2, 0), {"a": a, "b": b}),
            "roll of one weight": (lambda p, x: (x @ p.a.roll(2, 1)).relu() @ p.b, {"a": a, "b": b}),
            "hollow": (
                lambda p, x: x @ (p.s * (1 - torch.eye(4).to(x))) @ p.a,
                {"s": draw(4, 4), "a": a},
            ),
            "vech": (
                lambda p, x: (
                    x
                    @ (lambda m: m + m.tril(-1).T)(
                        torch.zeros(4, 4).to(x).index_put(tuple(torch.tril_indices(4, 4)), p.v)
                    )
                    @ p.a
                ),
                {"v": draw(10), "a": a},
            ),
            "cyclic": (
                lambda p, x: x @ torch.stack([p.v.roll(k) for k in range(4)]) @ p.a,
                {"v": draw(4), "a": a},
            ),
            "hankel": (
                lambda p, x: x @ p.v.unfold(0, 4, 1) @ p.a,
                {"v": draw(7), "a": a},
            ),
            "strided windows": (
                lambda p, x: (x @ p.a).as_strided((len(x), 3, 2), (6, 2, 1)).sum(1) @ p.b[:2],
                {"a": a, "b": b},
            ),
            "strided windows over": (
                lambda p, x: (x @ p.a).contiguous().as_strided((len(x), 3, 4), (6, 1, 1)).amax(1) @ p.b[:4],
                {"a": a, "b": b},
            ),
        },
        lambda: rows(4),
    )

    def tokens(size: int, *shapes: tuple[int, ...]) -> list[tuple[Any, ...]]:
        return [(torch.randint(0, size, shape),) for shape in shapes]

    lengths: Callable[[], list[tuple[Any, ...]]] = lambda: tokens(5, (3, 4), (2, 6), (1, 1), (5, 2))  # noqa: E731
    e, q, h = draw(5, 4), draw(8, 4), draw(4, 3)
    yield from forms(
        "tokens",
        {
            "learned positions": (lambda p, i: (p.e[i] + p.q[: i.shape[1]]) @ p.h, {"e": e, "q": q, "h": h}),
            "positions by look-up": (
                lambda p, i: (F.embedding(i, p.e) + F.embedding(torch.arange(i.shape[1]), p.q)) @ p.h,
                {"e": e, "q": q, "h": h},
            ),
            "positions from the end": (
                lambda p, i: (p.e[i] + p.q[-i.shape[1] :]) @ p.h,
                {"e": e, "q": q, "h": h},
            ),
            "positions with an offset": (
                lambda p, i: (p.e[i] + F.embedding(torch.arange(i.shape[1]) + 2, p.q)) @ p.h,
                {"e": e, "q": q, "h": h},
            ),
            "positions of tokens": (lambda p, i: (p.e[i] + p.q[i + 1]) @ p.h, {"e": e, "q": q, "h": h}),
            "positions counted": (
                lambda p, i: (p.e[i] + p.q[(i > 1).long().cumsum(1)]) @ p.h,
                {"e": e, "q": q, "h": h},
            ),
            "two tables of one token": (
                lambda p, i: (F.embedding(i, p.e) * F.embedding(i, p.q)) @ p.h,
                {"e": e, "q": q, "h": h},
            ),
            "bigrams": (
                lambda p, i: (p.e[i[:, :1]] + p.q[i[:, -1:]]) @ p.h,
                {"e": e, "q": q, "h": h},
            ),
            "sum of a bag": (lambda p, i: F.embedding_bag(i, p.e, mode="sum") @ p.h, {"e": e, "h": h}),
            "mean of a bag, normed": (
                lambda p, i: F.layer_norm(F.embedding_bag(i, p.e, mode="mean"), (4,)) @ p.h,
                {"e": e, "h": h},
            ),
            "sum of a bag, normed": (
                lambda p, i: F.layer_norm(F.embedding_bag(i, p.e, mode="sum"), (4,)) @ p.h,
                {"e": e, "h": h},
            ),
            "sum of a bag against a bias": (
                lambda p, i: (F.embedding_bag(i, p.e, mode="sum") + p.c) @ p.h,
                {"e": e, "c": draw(4), "h": h},
            ),
            "mean of a bag against a bias": (
                lambda p, i: (F.embedding_bag(i, p.e, mode="mean") + p.c) @ p.h,
                {"e": e, "c": draw(4), "h": h},
            ),
            "mean of rows against a bias": (
                lambda p, i: (p.e[i].mean(1) + p.c) @ p.h,
                {"e": e, "c": draw(4), "h": h},
            ),
            "sum of rows against a bias": (
                lambda p, i: (p.e[i].sum(1) + p.c) @ p.h,
                {"e": e, "c": draw(4), "h": h},
            ),
            "padding masked": (
                lambda p, i: ((p.e[i] * (i != 0)[..., None]).sum(1) + p.c) @ p.h,
                {"e": e, "c": draw(4), "h": h},
            ),
            "padding averaged": (
                lambda p, i: (
                    ((p.e[i] * (i != 0)[..., None]).sum(1) / (i != 0).sum(1, keepdim=True).clamp(min=1) + p.c) @ p.h
                ),
                {"e": e, "c": draw(4), "h": h},
            ),
            "max norm": (lambda p, i: F.embedding(i, p.e * 1.0, max_norm=1.0) @ p.h, {"e": e, "h": h}),
            "frequency": (lambda p, i: F.embedding(i, p.e, scale_grad_by_freq=True) @ p.h, {"e": e, "h": h}),
            "frequency against positions": (
                lambda p, i: (F.embedding(i, p.e, scale_grad_by_freq=True) + p.q[: i.shape[1]]) @ p.h,
                {"e": e, "q": q, "h": h},
            ),
            "padding against positions": (
                lambda p, i: (F.embedding(i, p.e, padding_idx=1) + p.q[: i.shape[1]]) @ p.h,
                {"e": e, "q": q, "h": h},
            ),
            "copy mechanism": (
                lambda p, i: (
                    torch.zeros(*i.shape, 5)
                    .to(p.e)
                    .scatter_add(
                        2, i[:, None].expand(-1, i.shape[1], -1), (p.e[i] @ p.h @ p.h.T @ p.e[i].mT).softmax(-1)
                    )
                ),
                {"e": e, "h": h},
            ),
            "tied adaptive": (
                lambda p, i: F.layer_norm(F.embedding(i, p.e @ p.s), (4,)) @ (p.e @ p.s).T,
                {"e": e, "s": draw(4, 4)},
            ),
            "shifted tokens": (
                lambda p, i: (p.e[i] - p.e[i.roll(1, 1)]) @ p.h,
                {"e": e, "h": h},
            ),
            "hyperbolic": (
                lambda p, i: (p.e[i] / (1 + (1 + p.e[i].square().sum(-1, keepdim=True)).sqrt())) @ p.h,
                {"e": e, "h": h},
            ),
            "fixed index": (
                lambda p, i: (p.e[torch.tensor([0, 3, 3])].sum(0) + p.h[0, 0]) * i.numel(),
                {"e": e, "h": h},
            ),
        },
        lengths,
    )
    padded = nn.Sequential(nn.Embedding(5, 4, padding_idx=0), nn.Linear(4, 3))
    yield "tokens: module with padding", (padded, lengths())
    sparse = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 3))
    yield "tokens: module with sparse gradients", (sparse, lengths())
    frozen = nn.Sequential(nn.Embedding.from_pretrained(e.clone(), freeze=True), nn.Linear(4, 4), nn.Linear(4, 2))
    yield "tokens: frozen table", (frozen, lengths())
    capped = nn.Sequential(nn.Embedding(5, 4, max_norm=0.5), nn.Linear(4, 3))
    yield "tokens: module with a largest norm", (capped, lengths())


def spectra() -> Iterator[tuple[str, Case]]:
    """Complex numbers, phases and transforms."""
    a, b, c = draw(4, 6), draw(6, 3), draw(6)

    def pairs(h: Tensor) -> Tensor:
        return torch.view_as_complex(h.reshape(*h.shape[:-1], 3, 2).contiguous())

    def flat(z: Tensor) -> Tensor:
        return torch.view_as_real(z.resolve_conj()).flatten(-2)

    middles: dict[str, Callable[[Any, Tensor], Tensor]] = {
        "phase times size": lambda p, h: flat(torch.polar(pairs(h).abs(), 2 * pairs(h).angle())),
        "phase added": lambda p, h: flat(torch.polar(pairs(h).abs(), pairs(h).angle() + p.c[:3])),
        "root of a square": lambda p, h: flat((pairs(h) * pairs(h)).sqrt()),
        "conjugate sum": lambda p, h: flat(pairs(h) + pairs(h).conj()),
        "conjugate difference": lambda p, h: flat(pairs(h) - pairs(h).conj()),
        "real times imaginary": lambda p, h: pairs(h).real.repeat(1, 2) * pairs(h).imag.repeat(1, 2),
        "complex relu": lambda p, h: flat(torch.complex(pairs(h).real.relu(), pairs(h).imag.relu())),
        "complex mean": lambda p, h: flat(pairs(h) - pairs(h).mean(-1, keepdim=True)),
        "complex softmax of sizes": lambda p, h: flat(pairs(h).abs().softmax(-1) * torch.sgn(pairs(h))),
        "complex norm": lambda p, h: flat(pairs(h) / torch.linalg.vector_norm(pairs(h), dim=-1, keepdim=True)),
        "complex outer": lambda p, h: (pairs(h)[:, :, None] * pairs(h)[:, None, :].conj()).imag.flatten(1)[:, :6],
        "complex power": lambda p, h: flat(pairs(h) ** 3),
        "complex reciprocal": lambda p, h: flat(1 / pairs(h)),
        "complex exponential": lambda p, h: flat(torch.exp(1j * pairs(h).real)),
        "complex cumprod": lambda p, h: flat(pairs(h).cumprod(-1)),
        "complex times parameter": lambda p, h: flat(pairs(h) * torch.complex(p.c[:3], p.c[3:])),
        "complex over itself": lambda p, h: flat(pairs(h) / pairs(h).roll(1, -1)),
        "fft of batch": lambda p, h: torch.fft.fft(h, dim=0).real,
        "fft then gain": lambda p, h: torch.fft.irfft(torch.fft.rfft(h, dim=-1) * p.c[:4], n=6),
        "fft shift": lambda p, h: torch.fft.fftshift(h, dim=-1) - h,
        "hermitian": lambda p, h: torch.fft.hfft(pairs(h), n=6),
        "cosine transform": lambda p, h: torch.fft.rfft(torch.cat([h, h.flip(-1)], -1)).real[:, :6],
        "autocorrelation": lambda p, h: torch.fft.irfft(torch.fft.rfft(h).abs().square(), n=6),
        "phase correlation": lambda p, h: torch.fft.irfft(
            torch.fft.rfft(h) * torch.fft.rfft(p.c).conj() / (torch.fft.rfft(h) * torch.fft.rfft(p.c).conj()).abs(), n=6
        ),
        "convolution by fft": lambda p, h: torch.fft.irfft(torch.fft.rfft(h, 12) * torch.fft.rfft(p.c, 12), 12)[:, :6],
        "mixing by fft": lambda p, h: torch.fft.fft2(h).real,
        "spectrum cut": lambda p, h: torch.fft.irfft(F.pad(torch.fft.rfft(h)[:, :2], (0, 2)), n=6),
        "constant removed": lambda p, h: torch.fft.irfft(
            torch.fft.rfft(h + p.c) * torch.tensor([0.0, 1.0, 1.0, 1.0]), n=6
        ),
    }
    for name, middle in middles.items():

        def run(p: Any, x: Tensor, middle: Any = middle) -> Tensor:
            return middle(p, x @ p.a) @ p.b

        yield f"spectrum: {name}", (Function(run, a=a.clone(), b=b.clone(), c=c.clone()), rows(4))
    yield from forms(
        "spectrum",
        {
            "stft": (
                lambda p, x: (
                    torch.stft(x @ p.a, 4, 2, window=torch.ones(4).to(x), return_complex=True).abs().flatten(1)
                ),
                {"a": draw(4, 8)},
            ),
            "learned window": (
                lambda p, x: torch.stft(x @ p.a, 4, 2, window=p.w, return_complex=True).abs().flatten(1),
                {"a": draw(4, 8), "w": draw(4)},
            ),
            "learned sinusoids": (
                lambda p, x: torch.cat([(x @ p.a).sin(), (x @ p.a).cos()], 1) @ p.b,
                {"a": draw(4, 3), "b": b},
            ),
            "phases of sinusoids": (
                lambda p, x: (x @ p.a + p.c).sin() @ p.b[:3],
                {"a": draw(4, 3), "c": draw(3), "b": b},
            ),
        },
        lambda: rows(4),
    )


def images() -> Iterator[tuple[str, Case]]:
    """Convolutions of every mode and the operations around them, on images of other sizes too."""

    def pictures(*sizes: tuple[int, ...]) -> list[tuple[Any, ...]]:
        return [
            (draw(*size) * (1 + index) + index,)
            for index, size in enumerate(sizes or ((2, 3, 8, 8), (1, 3, 8, 8), (3, 3, 12, 8)))
        ]

    for mode in ("zeros", "reflect", "replicate", "circular"):
        for end in (nn.InstanceNorm2d(4), nn.BatchNorm2d(4), nn.GroupNorm(1, 4), nn.Softmax2d()):
            model = nn.Sequential(
                nn.Conv2d(3, 4, 3, padding=1, padding_mode=mode),
                nn.Conv2d(4, 4, (1, 3), padding=(0, 1), padding_mode=mode),
                end,
            )
            yield f"image: {mode} then {type(end).__name__}", (model, pictures())
    layers: dict[str, Callable[[], nn.Module]] = {
        "max pool padded": lambda: nn.MaxPool2d(3, 2, 1),
        "max pool dilated": lambda: nn.MaxPool2d(2, 1, 0, 2),
        "average pool padded": lambda: nn.AvgPool2d(3, 2, 1),
        "average pool padded, counted": lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False),
        "average pool divided": lambda: nn.AvgPool2d(2, divisor_override=3),
        "power pool": lambda: nn.LPPool2d(2, 2),
        "power pool three": lambda: nn.LPPool2d(3, 2),
        "adaptive max": lambda: nn.AdaptiveMaxPool2d((3, 2)),
        "adaptive average": lambda: nn.AdaptiveAvgPool2d((3, 5)),
        "local response": lambda: nn.LocalResponseNorm(2),
        "unfolded": lambda: Called(lambda m, h: F.unfold(h, 2, padding=1).unflatten(1, (4, 4)).amax(2)[..., None]),
        "folded": lambda: Called(lambda m, h: F.fold(F.unfold(h, 3, padding=1), h.shape[2:], 3, padding=1)),
        "upsampled": lambda: nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
        "upsampled bicubic": lambda: nn.Upsample(scale_factor=1.5, mode="bicubic"),
        "replication pad": lambda: nn.ReplicationPad2d((1, 0, 2, 0)),
        "reflection pad": lambda: nn.ReflectionPad2d(1),
        "constant pad": lambda: nn.ConstantPad2d(1, 0.5),
        "zero pad": lambda: nn.ZeroPad2d(1),
        "pixel shuffle": lambda: Called(lambda m, h: F.pixel_unshuffle(F.pixel_shuffle(h, 2), 2)),
        "channel shuffle": lambda: nn.ChannelShuffle(2),
        "flipped": lambda: Called(lambda m, h: h - h.flip(3)),
        "transposed": lambda: Called(lambda m, h: h[..., :8, :8] + h[..., :8, :8].mT),
        "dropout of channels": lambda: nn.Dropout2d(0.5),
        "alpha dropout": lambda: nn.AlphaDropout(0.3),
        "feature alpha dropout": lambda: nn.FeatureAlphaDropout(0.3),
        "prelu": lambda: nn.PReLU(4),
        "prelu one": lambda: nn.PReLU(),
        "rrelu": lambda: nn.RReLU(),
        "glu": lambda: Called(lambda m, h: F.glu(torch.cat([h, h], 1), 1)),
        "threshold": lambda: nn.Threshold(0.0, 0.0),
        "threshold above": lambda: nn.Threshold(0.1, 0.0),
        "hard shrink": lambda: nn.Hardshrink(0.0),
        "relu6": lambda: nn.ReLU6(),
        "elu": lambda: nn.ELU(),
        "leaky": lambda: nn.LeakyReLU(0.3),
        "softplus large": lambda: nn.Softplus(beta=100.0),
        "log sigmoid": lambda: nn.LogSigmoid(),
        "squeeze": lambda: Called(lambda m, h: h * h.mean((2, 3), keepdim=True)),
        "squeeze normed": lambda: Called(lambda m, h: h / h.mean((2, 3), keepdim=True)),
        "global response": lambda: Called(
            lambda m, h: h * (h.norm(dim=(2, 3), keepdim=True) / h.norm(dim=(2, 3), keepdim=True).mean(1, keepdim=True))
        ),
        "coordinates": lambda: Called(
            lambda m, h: h + torch.linspace(-1, 1, h.shape[3]).to(h) * h.mean((2, 3), keepdim=True)
        ),
        "unpooled": lambda: Called(lambda m, h: F.max_unpool2d(*F.max_pool2d(h, 2, return_indices=True), [2, 2])),
        "fractional": lambda: Called(
            lambda m, h: F.fractional_max_pool2d(
                h, 2, output_size=(3, 3), _random_samples=torch.full((len(h), 4, 2), 0.3).to(h)
            )
        ),
        "grid": lambda: Called(
            lambda m, h: F.grid_sample(
                h, torch.linspace(-1.5, 1.5, 18).view(1, 3, 3, 2).to(h).expand(len(h), 3, 3, 2), align_corners=True
            )
        ),
        "affine grid": lambda: Called(
            lambda m, h: F.grid_sample(
                h,
                F.affine_grid(
                    torch.tensor([[0.7, 0.3, 0.0], [-0.3, 0.7, 0.1]]).to(h).expand(len(h), 2, 3),
                    h.shape,
                    align_corners=False,
                ),
                padding_mode="reflection",
                align_corners=False,
            )
        ),
    }
    for name, layer in layers.items():
        model = nn.Sequential(nn.Conv2d(3, 4, 1), layer(), nn.Conv2d(4, 2, 1))
        copied = copy.deepcopy(model)
        yield f"image: {name}", (model, pictures())
        if "dropout" in name:
            yield f"image: {name}, in use", (copied.eval(), pictures())
    for stride, padding, groups in ((1, 0, 2), (2, 1, 1), (3, 2, 4), (2, 0, 4)):
        up = nn.ConvTranspose2d(4, 4, 3, stride, padding, groups=groups)
        model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), up, nn.LeakyReLU(), nn.Conv2d(4, 2, 1))
        yield f"image: transposed {stride} {padding} {groups}", (model, pictures())
    partial = Called(
        lambda m, x: m.c(x * (x > 0)) / F.avg_pool2d((x > 0).to(x).mean(1, keepdim=True), 3, 1, 1).clamp(min=0.1),
        c=nn.Conv2d(3, 4, 3, padding=1),
    )
    yield "image: partial convolution", (partial, pictures())
    deformed = Called(
        lambda m, x: m.d(F.grid_sample(m.c(x), m.o(x).movedim(1, -1).tanh(), align_corners=False)),
        c=nn.Conv2d(3, 4, 1),
        o=nn.Conv2d(3, 2, 3, padding=1),
        d=nn.Conv2d(4, 2, 1),
    )
    yield "image: deformed", (deformed, pictures())
    dynamic = Called(
        lambda m, x: F.conv2d(
            m.c(x).view(1, -1, *x.shape[2:]), m.k(x.mean((2, 3))).view(-1, 1, 3, 3), padding=1, groups=4 * len(x)
        ).view(len(x), 4, *x.shape[2:]),
        c=nn.Conv2d(3, 4, 1),
        k=nn.Linear(3, 36),
    )
    yield "image: dynamic filters", (dynamic, pictures())
    tied = Called(
        lambda m, x: F.conv_transpose2d(m.c(x).relu(), m.c.weight, padding=1), c=nn.Conv2d(3, 4, 3, padding=1)
    )
    yield "image: tied autoencoder", (tied, pictures())
    tied_plain = Called(
        lambda m, x: F.conv_transpose2d(m.d(m.c(x)), m.c.weight), c=nn.Conv2d(3, 4, 3, bias=False), d=nn.Conv2d(4, 4, 1)
    )
    yield "image: tied linear autoencoder", (tied_plain, pictures())
    siamese = Called(lambda m, x: F.conv2d(m.c(x), m.c(x[:1, :, 2:4, 2:4])), c=nn.Conv2d(3, 4, 1, bias=False))
    yield "image: correlation with itself", (siamese, pictures())
    folded = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)).eval()
    yield "image: batch norm in use", (folded, pictures())
    still = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), nn.ReLU(), nn.Conv2d(4, 2, 1)
    ).eval()
    yield "image: batch norm without statistics in use", (still, pictures())
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False), nn.Conv2d(4, 2, 1))
    yield "image: batch norm without gain", (plain, pictures())
    saved = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True), nn.Conv2d(4, 2, 1)
    )
    copied = copy.deepcopy(saved)
    yield "image: instance norm with statistics", (saved, pictures())
    yield "image: instance norm with statistics in use", (copied.eval(), pictures())
    volume = nn.Sequential(
        nn.Conv3d(1, 4, 2, padding=1, padding_mode="circular"), nn.GroupNorm(2, 4, affine=False), nn.Conv3d(4, 2, 1)
    )
    yield "image: volume", (volume, [(draw(2, 1, 3, 4, 3),), (draw(1, 1, 4, 3, 5),)])
    causal = Called(
        lambda m, x: m.d(F.pad(m.c(F.pad(x, (2, 0))).relu(), (4, 0))),
        c=nn.Conv1d(3, 4, 3),
        d=nn.Conv1d(4, 2, 3, dilation=2),
    )
    yield "image: causal", (causal, [(draw(2, 3, 7),), (draw(1, 3, 11),)])
    weight_standardised = Called(
        lambda m, x: m.n(
            F.conv2d(
                x, (m.c.weight - m.c.weight.mean((1, 2, 3), True)) / m.c.weight.std((1, 2, 3), keepdim=True), m.c.bias
            )
        ),
        c=nn.Conv2d(3, 4, 3),
        n=nn.GroupNorm(2, 4),
    )
    yield "image: standardised weights", (weight_standardised, pictures())


def sequences() -> Iterator[tuple[str, Case]]:
    """Recurrent layers, attention and scans, with other lengths."""

    def series(*sizes: tuple[int, ...]) -> list[tuple[Any, ...]]:
        return [(draw(*size) * (1 + index),) for index, size in enumerate(sizes or ((2, 5, 4), (1, 7, 4), (3, 1, 4)))]

    def first(layer: nn.Module, width: int) -> nn.Module:
        return Called(lambda m, x: m.head(m.layer(x)[0]), layer=layer, head=nn.Linear(width, 3))

    yield (
        "sequence: LSTM with projection both ways",
        (first(nn.LSTM(4, 5, proj_size=3, bidirectional=True, batch_first=True), 6), series()),
    )
    yield (
        "sequence: LSTM with projection, three layers",
        (first(nn.LSTM(4, 5, num_layers=3, proj_size=2, batch_first=True, bias=False), 2), series()),
    )
    yield (
        "sequence: LSTM with dropout",
        (first(nn.LSTM(4, 5, num_layers=2, dropout=0.4, batch_first=True), 5), series()),
    )
    yield (
        "sequence: RNN relu without bias both ways",
        (first(nn.RNN(4, 3, nonlinearity="relu", bias=False, bidirectional=True, batch_first=True), 6), series()),
    )
    yield "sequence: GRU without bias", (first(nn.GRU(4, 3, bias=False, batch_first=True), 3), series())
    projected = nn.LSTM(4, 5, proj_size=2, batch_first=True)
    yield (
        "sequence: state of a projected LSTM",
        (Called(lambda m, x: m.head(m.layer(x)[1][1][0]), layer=projected, head=nn.Linear(5, 2)), series()),
    )
    packed = Called(
        lambda m, x: m.head(
            pad_packed_sequence(
                m.layer(
                    pack_padded_sequence(x, torch.arange(x.shape[1], 0, -1)[: len(x)].clamp(min=1), batch_first=True)
                )[0],
                batch_first=True,
            )[0]
        ),
        layer=nn.GRU(4, 3, batch_first=True),
        head=nn.Linear(3, 2),
    )
    yield "sequence: packed", (packed, series((2, 5, 4), (3, 6, 4)))
    relu_cell = Called(
        lambda m, x: m.head(_unrolled(m.cell, x)),
        cell=nn.RNNCell(4, 3, nonlinearity="relu", bias=False),
        head=nn.Linear(3, 2),
    )
    yield "sequence: relu cell", (relu_cell, series())
    identity = Function(
        lambda p, x: _linear_recurrence(x, p.a, p.u) @ p.b, a=draw(3, 3) / 2, u=draw(4, 3), b=draw(3, 2)
    )
    yield "sequence: linear recurrence", (identity, series())
    diagonal = Function(lambda p, x: _diagonal_recurrence(x, p.r, p.u) @ p.b, r=draw(3), u=draw(4, 3), b=draw(3, 2))
    yield "sequence: diagonal recurrence", (diagonal, series())
    complex_state = Function(
        lambda p, x: _complex_recurrence(x, p.r, p.w, p.u, p.v) @ p.b,
        r=draw(3),
        w=draw(3),
        u=draw(4, 3),
        v=draw(4, 3),
        b=draw(6, 2),
    )
    yield "sequence: complex recurrence", (complex_state, series())
    delta = Function(
        lambda p, x: _delta_rule(x @ p.q, x @ p.k, x @ p.v) @ p.o,
        q=draw(4, 3),
        k=draw(4, 3),
        v=draw(4, 2),
        o=draw(2, 2),
    )
    yield "sequence: delta rule", (delta, series())
    unit_delta = Function(
        lambda p, x: _delta_rule(x @ p.q, F.normalize(x @ p.k, dim=-1, eps=0.0), x @ p.v) @ p.o,
        q=draw(4, 3),
        k=draw(4, 3),
        v=draw(4, 2),
        o=draw(2, 2),
    )
    yield "sequence: delta rule with unit keys", (unit_delta, series())
    for kv, zero, kdim, batch in (
        (True, True, 6, True),
        (True, False, None, True),
        (False, True, 6, True),
        (True, True, None, False),
    ):
        layer = nn.MultiheadAttention(4, 2, add_bias_kv=kv, add_zero_attn=zero, kdim=kdim, vdim=kdim, batch_first=batch)

        def crossed(m: Any, x: Tensor, y: Tensor) -> Any:
            return m.layer(x, y, y, need_weights=False)[0]

        given = [(draw(2, 5, 4), draw(2, 6, kdim or 4)), (draw(3, 1, 4), draw(3, 2, kdim or 4))]
        if not batch:
            given = [(draw(5, 2, 4), draw(6, 2, kdim or 4)), (draw(1, 3, 4), draw(2, 3, kdim or 4))]
        yield f"sequence: attention {kv} {zero} {kdim} {batch}", (Called(crossed, layer=layer), given)
    frozen = nn.MultiheadAttention(4, 2, batch_first=True)
    frozen.in_proj_weight.requires_grad_(False)
    yield (
        "sequence: attention with frozen input maps",
        (Called(lambda m, x: m.layer(x, x, x)[0], layer=frozen), series()),
    )
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(4, 2, 6, 0.1, batch_first=True), 2, enable_nested_tensor=False
    )
    yield "sequence: encoder with dropout", (encoder, series())
    yield (
        "sequence: encoder in use",
        (nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 6, batch_first=True), 2).eval(), series()),
    )
    whole = nn.Transformer(4, 2, 1, 1, 6, 0.0, batch_first=True)
    yield "sequence: transformer", (whole, [(draw(2, 5, 4), draw(2, 3, 4)), (draw(1, 2, 4), draw(1, 6, 4))])
    attention: dict[str, tuple[Callable[..., Any], dict[str, Tensor]]] = {
        "biases of distance": (
            lambda p, x: (x @ p.q @ (x @ p.k).mT - p.s.exp() * _distances(x)).softmax(-1) @ (x @ p.v),
            {"s": draw(1)},
        ),
        "keys normed in time": (
            lambda p, x: ((x @ p.q) @ F.normalize(x @ p.k, dim=1, eps=0.0).mT).softmax(-1) @ (x @ p.v),
            {},
        ),
        "queries over keys": (lambda p, x: (x @ p.q).softmax(-1) @ ((x @ p.k).softmax(-2).mT @ (x @ p.v)), {}),
        "keys of the mean": (lambda p, x: ((x @ p.q) @ (x.mean(1, keepdim=True) @ p.k).mT) * (x @ p.v), {}),
        "keys minus mean": (
            lambda p, x: ((x @ p.q) @ ((x - x.mean(1, keepdim=True)) @ p.k + p.c).mT).softmax(-1) @ (x @ p.v),
            {"c": draw(4)},
        ),
        "scores squared": (
            lambda p, x: F.normalize(((x @ p.q) @ (x @ p.k).mT).square(), p=1, dim=-1, eps=0.0) @ (x @ p.v),
            {},
        ),
        "scores of distances": (lambda p, x: (-torch.cdist(x @ p.q, x @ p.k).square()).softmax(-1) @ (x @ p.v), {}),
        "additive scores": (
            lambda p, x: ((x @ p.q)[:, :, None] + (x @ p.k)[:, None]).tanh().matmul(p.c).softmax(-1) @ (x @ p.v),
            {"c": draw(4)},
        ),
        "additive scores relu": (
            lambda p, x: ((x @ p.q)[:, :, None] + (x @ p.k)[:, None]).relu().matmul(p.c).softmax(-1) @ (x @ p.v),
            {"c": draw(4)},
        ),
        "additive scores linear": (
            lambda p, x: ((x @ p.q)[:, :, None] + (x @ p.k)[:, None]).matmul(p.c).softmax(-1) @ (x @ p.v),
            {"c": draw(4)},
        ),
        "graph attention": (
            lambda p, x: (
                F.leaky_relu((x @ p.q @ p.c)[:, :, None] + (x @ p.q @ p.d)[:, None], 0.2).softmax(-1) @ (x @ p.q)
            ),
            {"c": draw(4), "d": draw(4)},
        ),
        "sigmoid normed": (
            lambda p, x: F.normalize(((x @ p.q) @ (x @ p.k).mT).sigmoid(), p=1, dim=-1) @ (x @ p.v),
            {},
        ),
        "masked by value": (
            lambda p, x: ((x @ p.q) @ (x @ p.k).mT).masked_fill((x[..., 0] > 0)[:, None], -1e9).softmax(-1) @ (x @ p.v),
            {},
        ),
        "memory": (
            lambda p, x: (
                ((x @ p.q) @ torch.cat([x @ p.k, p.m.expand(len(x), 2, 4)], 1).mT).softmax(-1)
                @ torch.cat([x @ p.v, p.n.expand(len(x), 2, 4)], 1)
            ),
            {"m": draw(2, 4), "n": draw(2, 4)},
        ),
        "rotary by hand": (
            lambda p, x: (_turned(x @ p.q) @ _turned(x @ p.k).mT).softmax(-1) @ (x @ p.v),
            {},
        ),
        "rotary of values": (
            lambda p, x: ((x @ p.q) @ (x @ p.k).mT).softmax(-1) @ _turned(x @ p.v),
            {},
        ),
        "rotary of queries alone": (
            lambda p, x: (_turned(x @ p.q) @ (x @ p.k).mT).softmax(-1) @ (x @ p.v),
            {},
        ),
        "rotary with learned angles": (
            lambda p, x: (_turned(x @ p.q, p.w) @ _turned(x @ p.k, p.w).mT).softmax(-1) @ (x @ p.v),
            {"w": draw(2)},
        ),
        "query norm": (
            lambda p, x: ((F.rms_norm(x @ p.q, (4,), p.g)) @ F.rms_norm(x @ p.k, (4,), p.h).mT).softmax(-1) @ (x @ p.v),
            {"g": draw(4), "h": draw(4)},
        ),
        "two softmaxes": (
            lambda p, x: (((x @ p.q) @ (x @ p.k).mT).softmax(-1) + ((x @ p.q) @ (x @ p.k).mT).softmax(-2)) @ (x @ p.v),
            {},
        ),
    }
    for name, (function, more) in attention.items():

        def run(p: Any, x: Tensor, function: Any = function) -> Tensor:
            return function(p, x) @ p.o

        base = {"q": draw(4, 4), "k": draw(4, 4), "v": draw(4, 4), "o": draw(4, 2)}
        yield f"sequence: {name}", (Function(run, **base, **{k: v.clone() for k, v in more.items()}), series())
    target = torch.tensor([[1, 2, 1], [3, 3, 2]])

    def ctc(m: Any, x: Tensor) -> Tensor:
        z = m.b(m.a(x).relu()).transpose(0, 1).log_softmax(-1)
        return F.ctc_loss(z, target, torch.full((2,), x.shape[1]), torch.tensor([3, 1]), zero_infinity=True)

    yield "sequence: ctc", (Called(ctc, a=nn.Linear(4, 5), b=nn.Linear(5, 4)), series((2, 8, 4), (2, 9, 4)))

    def viterbi(p: Any, x: Tensor) -> Tensor:
        score = x[:, 0] @ p.e + p.s
        for step in range(1, x.shape[1]):
            score = (score[:, :, None] + p.t).logsumexp(1) + x[:, step] @ p.e
        return (score + p.f).logsumexp(1)

    yield "sequence: forward algorithm", (Function(viterbi, e=draw(4, 3), s=draw(3), t=draw(3, 3), f=draw(3)), series())

    def crf(p: Any, x: Tensor) -> Tensor:
        z = x @ p.e
        path = torch.arange(x.shape[1]) % 3
        own = z[:, torch.arange(x.shape[1]), path].sum(1) + p.t[path[:-1], path[1:]].sum()
        score = z[:, 0]
        for step in range(1, x.shape[1]):
            score = (score[:, :, None] + p.t).logsumexp(1) + z[:, step]
        return own - score.logsumexp(1)

    yield "sequence: conditional random field", (Function(crf, e=draw(4, 3), t=draw(3, 3)), series())


def _unrolled(cell: nn.Module, x: Tensor) -> Tensor:
    state = None
    for step in range(x.shape[1]):
        state = cell(x[:, step], state)
    assert state is not None
    return state


def _linear_recurrence(x: Tensor, a: Tensor, u: Tensor) -> Tensor:
    h = torch.zeros(len(x), a.shape[0], dtype=x.dtype)
    for step in range(x.shape[1]):
        h = h @ a + x[:, step] @ u
    return h


def _diagonal_recurrence(x: Tensor, r: Tensor, u: Tensor) -> Tensor:
    h, out = torch.zeros(len(x), r.shape[0], dtype=x.dtype), []
    for step in range(x.shape[1]):
        h = r.tanh() * h + (1 - r.tanh().square()).sqrt() * (x[:, step] @ u)
        out.append(h)
    return torch.stack(out, 1)


def _complex_recurrence(x: Tensor, r: Tensor, w: Tensor, u: Tensor, v: Tensor) -> Tensor:
    h = torch.zeros(len(x), r.shape[0], dtype=torch.complex128 if x.dtype == torch.float64 else torch.complex64)
    for step in range(x.shape[1]):
        h = torch.polar(r.sigmoid(), w) * h + torch.complex(x[:, step] @ u, x[:, step] @ v)
    return torch.cat([h.real, h.imag], -1)


def _delta_rule(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    state = torch.zeros(len(q), q.shape[-1], v.shape[-1], dtype=q.dtype)
    out = []
    for step in range(q.shape[1]):
        old = torch.einsum("nd,nde->ne", k[:, step], state)
        state = state + torch.einsum("nd,ne->nde", k[:, step], v[:, step] - old)
        out.append(torch.einsum("nd,nde->ne", q[:, step], state))
    return torch.stack(out, 1)


def _distances(x: Tensor) -> Tensor:
    index = torch.arange(x.shape[1])
    return (index[:, None] - index).abs().to(x)


def _turned(h: Tensor, speed: Tensor | None = None) -> Tensor:
    index = torch.arange(h.shape[1]).to(h)[:, None]
    angle = index * (torch.tensor([1.0, 0.1]).to(h) if speed is None else speed)
    even, odd = h[..., ::2], h[..., 1::2]
    return torch.stack([even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()], -1).flatten(-2)


def objectives() -> Iterator[tuple[str, Case]]:
    """Programs that end in a loss of their own: laws must hold for that loss and those targets."""
    classes = torch.tensor([0, 2, 1, 2, 0, 1])

    def net(out: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, out))

    losses: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
        "cross entropy": (3, lambda z: F.cross_entropy(z, classes)),
        "cross entropy smoothed": (3, lambda z: F.cross_entropy(z, classes, label_smoothing=0.2)),
        "cross entropy weighted": (3, lambda z: F.cross_entropy(z, classes, torch.tensor([1.0, 2.0, 0.5]).to(z))),
        "cross entropy with soft targets": (3, lambda z: F.cross_entropy(z, torch.eye(3).to(z)[classes] * 0.7)),
        "cross entropy ignoring": (3, lambda z: F.cross_entropy(z, classes.masked_fill(classes == 1, -100))),
        "cross entropy summed": (3, lambda z: F.cross_entropy(z, classes, reduction="none")),
        "z loss": (3, lambda z: F.cross_entropy(z, classes) + 1e-2 * z.logsumexp(-1).square().mean()),
        "focal": (3, lambda z: ((1 - z.softmax(-1)).square() * z.log_softmax(-1))[range(6), classes].mean()),
        "nll of normed": (3, lambda z: F.nll_loss(F.normalize(z, dim=-1, eps=0.0), classes)),
        "binary": (1, lambda z: F.binary_cross_entropy_with_logits(z[:, 0], (classes > 0).to(z))),
        "binary weighted": (
            1,
            lambda z: F.binary_cross_entropy_with_logits(z[:, 0], (classes > 0).to(z), pos_weight=torch.tensor(3.0)),
        ),
        "multi label": (3, lambda z: F.multilabel_margin_loss(z, torch.tensor([[0, 1, -1]] * 6))),
        "multi margin": (3, lambda z: F.multi_margin_loss(z, classes)),
        "soft margin": (3, lambda z: F.soft_margin_loss(z, torch.ones_like(z))),
        "hinge embedding": (1, lambda z: F.hinge_embedding_loss(z[:, 0], torch.tensor([1, -1, 1, -1, 1, -1]))),
        "triplet": (3, lambda z: F.triplet_margin_loss(z[:2], z[2:4], z[4:])),
        "triplet with swap": (3, lambda z: F.triplet_margin_loss(z[:2], z[2:4], z[4:], swap=True, p=1)),
        "cosine embedding": (3, lambda z: F.cosine_embedding_loss(z[:3], z[3:], torch.tensor([1, -1, 1]), margin=0.1)),
        "margin ranking": (1, lambda z: F.margin_ranking_loss(z[:3, 0], z[3:, 0], torch.tensor([1, -1, 1]))),
        "divergence": (3, lambda z: F.kl_div(z.log_softmax(-1), z.detach().flip(0).softmax(-1), reduction="batchmean")),
        "divergence to itself": (
            3,
            lambda z: F.kl_div(z.log_softmax(-1), z.flip(0).softmax(-1), reduction="batchmean"),
        ),
        "gaussian": (2, lambda z: F.gaussian_nll_loss(z[:, 0], classes.to(z), z[:, 1].exp())),
        "gaussian by softplus": (2, lambda z: F.gaussian_nll_loss(z[:, 0], classes.to(z), F.softplus(z[:, 1]))),
        "poisson": (1, lambda z: F.poisson_nll_loss(z[:, 0], classes.to(z))),
        "poisson full": (1, lambda z: F.poisson_nll_loss(z[:, 0].abs(), classes.to(z), log_input=False, full=True)),
        "smooth l1": (3, lambda z: F.smooth_l1_loss(z, torch.ones_like(z), beta=0.3)),
        "huber": (3, lambda z: F.huber_loss(z, torch.zeros_like(z))),
        "absolute": (3, lambda z: F.l1_loss(z, torch.zeros_like(z))),
        "relative": (3, lambda z: ((z - 1).abs() / (z.abs() + 1)).mean()),
        "contrastive": (3, lambda z: F.cross_entropy(z @ z.T, torch.arange(6))),
        "contrastive unit": (
            3,
            lambda z: F.cross_entropy(
                F.normalize(z, dim=-1, eps=0.0) @ F.normalize(z, dim=-1, eps=0.0).T / 0.1, torch.arange(6)
            ),
        ),
        "pairwise": (1, lambda z: F.logsigmoid(z[:3, 0] - z[3:, 0]).mean()),
        "listwise": (1, lambda z: (z[:, 0] - z[:, 0].logcumsumexp(0)).mean()),
        "cox": (1, lambda z: (z[:, 0] - z[:, 0].flip(0).logcumsumexp(0).flip(0)).mean()),
        "correlation": (1, lambda z: torch.corrcoef(torch.stack([z[:, 0], torch.arange(6).to(z)]))[0, 1]),
        "covariance": (
            3,
            lambda z: (
                torch.cov(z.T).fill_diagonal_(0).square().sum()
                if False
                else (torch.cov(z.T) * (1 - torch.eye(3).to(z))).square().sum()
            ),
        ),
        "decorrelation": (3, lambda z: (torch.corrcoef(z.T) - torch.eye(3).to(z)).square().sum()),
        "variance": (3, lambda z: (1 - z.std(0)).relu().mean()),
        "quantile": (1, lambda z: torch.maximum(0.9 * (1 - z[:, 0]), -0.1 * (1 - z[:, 0])).mean()),
        "wasserstein": (1, lambda z: (z[:, 0].sort().values - torch.arange(6).to(z)).abs().mean()),
        "energy": (3, lambda z: z.logsumexp(-1).mean() - z[range(6), classes].mean()),
        "energy squared": (3, lambda z: z.logsumexp(-1).square().mean()),
        "sign": (3, lambda z: (z * z.sign().detach()).sum()),
        "expectation": (3, lambda z: (z.softmax(-1).detach() * z).sum(-1).mean()),
        "policy": (3, lambda z: (z.log_softmax(-1)[range(6), classes] * torch.arange(6).to(z)).mean()),
        "clipped policy": (3, lambda z: (z.log_softmax(-1)[range(6), classes] + 1).exp().clamp(0.8, 1.2).mean()),
        "dice": (3, lambda z: 1 - 2 * (z.sigmoid() * torch.eye(3).to(z)[classes]).sum() / (z.sigmoid().sum() + 6)),
        "ordinal": (3, lambda z: F.binary_cross_entropy_with_logits(z[:, :1] - z.cumsum(1), torch.ones_like(z))),
    }
    for name, (out, loss) in losses.items():
        model = Called(lambda m, x, loss=loss: loss(m.net(x)), net=net(out))
        yield f"objective: {name}", (model, rows(4, 6, 6))


class Doubling(torch.autograd.Function):
    """The identity with a doubled gradient: a backward that its author wrote wrong or on purpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 2 * grads[0]


class Reversal(torch.autograd.Function):
    """Gradient reversal of domain adaptation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return -grads[0]


class FusedRelu(torch.autograd.Function):
    """x max(0, x) with its right backward, for two inputs and a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, power: int) -> Tensor:
        ctx.save_for_backward(x, gain)
        ctx.power = power
        return gain * x.relu() ** power

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, gain = ctx.saved_tensors
        dx = grads[0] * gain * ctx.power * x.relu() ** (ctx.power - 1)
        return dx, (grads[0] * x.relu() ** ctx.power).sum(0), None


class Counter(nn.Module):
    """A layer whose behaviour depends on how often it was called."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.b(self.a(x).relu()) * (1 + 0.01 * self.calls)


class Moving(nn.Module):
    """A layer that normalises by statistics it updates before it uses them."""

    mean: Tensor

    def __init__(self, detached: bool) -> None:
        super().__init__()
        self.a, self.b, self.detached = nn.Linear(4, 5), nn.Linear(5, 3), detached
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        new = 0.9 * self.mean.to(h) + 0.1 * h.mean(0)
        self.mean.copy_(new.detach())
        return self.b(h - (new.detach() if self.detached else new))


class Codebook(nn.Module):
    """Vector quantisation with a straight-through gradient."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.a, self.b, self.trained = nn.Linear(4, 3), nn.Linear(3, 2), trained
        self.codes = nn.Parameter(draw(6, 3))

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        q = self.codes[torch.cdist(h, self.codes).argmin(1)]
        out = self.b(h + (q - h).detach())
        return (out, (q - h.detach()).square().sum(1)) if self.trained else out


class Branching(nn.Module):
    """A layer that chooses its path by its input."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.a, self.b, self.by = nn.Linear(4, 5), nn.Linear(5, 3), by

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.by == "batch":
            h = h.relu() if len(x) > 4 else h.tanh()
        elif self.by == "value":
            h = h.relu() if bool(x.sum() > 0) else h.tanh()
        elif self.by == "tracing":
            h = h.relu() if torch.compiler.is_compiling() else h.tanh()
        elif self.by == "grad mode":
            h = h.tanh() if torch.is_grad_enabled() else h.relu()
        elif self.by == "precision":
            h = h.tanh() if h.dtype == torch.float32 else h.relu()
        elif self.by == "relu in single":
            h = h.relu() if h.dtype == torch.float32 else h.tanh()
        elif self.by == "try":
            try:
                h = h.relu() if x.numpy().sum() else h.tanh()
            except Exception:
                h = h.tanh()
        elif self.by == "list":
            h = h.relu() if max(x.flatten().tolist()) > 1e3 else h.tanh()
        elif self.by == "length of nonzero":
            h = h.relu() if len(x.nonzero()) < 3 else h.tanh()
        elif self.by == "unique":
            h = h.relu() if x.unique().shape[0] < 2 else h.tanh()
        return self.b(h)


class Experts(nn.Module):
    """Tokens sent to experts by index, in a loop over those that were chosen."""

    def __init__(self, keep: int, renormalised: bool) -> None:
        super().__init__()
        self.keep, self.renormalised = keep, renormalised
        self.router = nn.Linear(4, 3, bias=False)
        self.up = nn.Parameter(draw(3, 4, 5))
        self.down = nn.Parameter(draw(3, 5, 4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        weight, chosen = scores.topk(self.keep, -1)
        if self.renormalised:
            weight = weight / weight.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for expert in range(3):
            token, index = (chosen == expert).nonzero(as_tuple=True)
            if len(token):
                h = (x[token] @ self.up[expert]).relu() @ self.down[expert]
                out = out.index_add(0, token, h * weight[token, index, None])
        return out


def mechanics() -> Iterator[tuple[str, Case]]:
    """How a program is written: authors' functions, hooks, detached parts, state, branches, parametrizations, ties."""
    a, b = draw(4, 5), draw(5, 3)
    relu: Callable[[Tensor], Tensor] = torch.relu
    yield from forms(
        "mechanics",
        {
            "reversal": (lambda p, x: Reversal.apply(relu(x @ p.a)) @ p.b, {"a": a, "b": b}),
            "reversal of one branch": (
                lambda p, x: (relu(x @ p.a) @ p.b, Reversal.apply(relu(x @ p.a)) @ p.c),
                {"a": a, "b": b, "c": draw(5, 2)},
            ),
            "doubling": (lambda p, x: Doubling.apply(x @ p.a) @ p.b, {"a": a, "b": b}),
            "fused square": (lambda p, x: FusedRelu.apply(x @ p.a, p.g, 2) @ p.b, {"a": a, "b": b, "g": draw(5)}),
            "fused first power": (lambda p, x: FusedRelu.apply(x @ p.a, p.g, 1) @ p.b, {"a": a, "b": b, "g": draw(5)}),
            "detached factor": (lambda p, x: relu(x @ p.a).detach() @ p.b, {"a": a, "b": b}),
            "half detached": (
                lambda p, x: (relu(x @ p.a)[:, :2].detach().sum(1, True) * relu(x @ p.a)) @ p.b,
                {"a": a, "b": b},
            ),
            "detached scale": (lambda p, x: x @ p.a / (x @ p.a).norm().detach() @ p.b, {"a": a, "b": b}),
            "detached own norm": (lambda p, x: x @ (p.a / p.a.norm().detach()) @ p.b, {"a": a, "b": b}),
            "detached gate": (
                lambda p, x: ((x @ p.a).sigmoid().detach() * (x @ p.c)) @ p.b,
                {"a": a, "b": b, "c": draw(4, 5)},
            ),
            "value detached back": (
                lambda p, x: (relu(x @ p.a) + (x @ p.a).tanh() - (x @ p.a).tanh().detach()) @ p.b,
                {"a": a, "b": b},
            ),
            "zero times": (lambda p, x: (x @ p.a + 0.0 * (x @ p.c)) @ p.b, {"a": a, "b": b, "c": draw(4, 5)}),
            "zero times tanh": (
                lambda p, x: (x @ p.a).relu() @ p.b + 0 * p.c.tanh().sum(),
                {"a": a, "b": b, "c": draw(4)},
            ),
            "minus itself": (lambda p, x: ((x @ p.a) - (x @ p.a)).exp() @ p.b, {"a": a, "b": b}),
            "over itself": (lambda p, x: ((x @ p.a) / (x @ p.a)) @ p.b, {"a": a, "b": b}),
            "power zero": (lambda p, x: ((x @ p.a) ** 0) @ p.b, {"a": a, "b": b}),
            "power one": (lambda p, x: ((x @ p.a) ** 1) @ p.b, {"a": a, "b": b}),
            "power of a number": (lambda p, x: (2.0 ** (x @ p.a)) @ p.b, {"a": a, "b": b}),
            "power of parameters": (lambda p, x: (p.g.abs() ** (x @ p.a)) @ p.b, {"a": a, "b": b, "g": draw(5)}),
            "exp of a log": (lambda p, x: (x @ p.a).abs().log().exp() @ p.b, {"a": a, "b": b}),
            "log of a product": (
                lambda p, x: ((x @ p.a).abs() * p.g.abs()).log() @ p.b,
                {"a": a, "b": b, "g": draw(5)},
            ),
            "sum of logs": (
                lambda p, x: (p.g.abs().log() + p.h.abs().log()).exp() * x.sum(1, True),
                {"g": draw(5), "h": draw(5)},
            ),
            "exp of sum": (lambda p, x: (p.g + p.h).exp() * (x @ p.a), {"a": a, "g": draw(5), "h": draw(5)}),
            "exp gain against reader": (lambda p, x: ((x @ p.a) * p.g.exp()) @ p.b, {"a": a, "b": b, "g": draw(5)}),
            "normed exp": (lambda p, x: (p.g.exp() / p.g.exp().sum()) * (x @ p.a), {"a": a, "g": draw(5)}),
            "unit rows": (lambda p, x: x @ (p.a / p.a.norm(dim=0)) * p.g, {"a": a, "g": draw(5)}),
            "unit by max": (lambda p, x: x @ (p.a / p.a.abs().amax(0)) @ p.b, {"a": a, "b": b}),
            "spectral by hand": (lambda p, x: x @ (p.a / torch.linalg.matrix_norm(p.a, 2)) @ p.b, {"a": a, "b": b}),
            "softmax of weights": (lambda p, x: x @ p.a.softmax(0) @ p.b.softmax(1), {"a": a, "b": b}),
            "sinkhorn": (
                lambda p, x: x @ (lambda m: m - m.logsumexp(0, True))(p.s - p.s.logsumexp(1, True)).exp(),
                {"s": draw(4, 4)},
            ),
            "cayley": (
                lambda p, x: x @ torch.linalg.solve(torch.eye(4).to(x) + p.s - p.s.T, torch.eye(4).to(x) - p.s + p.s.T),
                {"s": draw(4, 4)},
            ),
            "views of one": (
                lambda p, x: (x @ p.t[:20].view(4, 5)).relu() @ p.t[20:35].view(5, 3),
                {"t": draw(35)},
            ),
            "views that overlap": (
                lambda p, x: (x @ p.t[:20].view(4, 5)).relu() @ p.t[15:30].view(5, 3),
                {"t": draw(35)},
            ),
            "transposed view": (
                lambda p, x: (x @ p.t.T[:4]).relu() @ p.t[:, 4:],
                {"t": draw(5, 7)},
            ),
            "used twice": (lambda p, x: relu(relu(x @ p.s) @ p.s) @ p.s, {"s": draw(4, 4)}),
            "used with transpose": (lambda p, x: relu(x @ p.s) @ p.s.T + x @ p.s, {"s": draw(4, 4)}),
            "used as bias and gain": (lambda p, x: relu(x @ p.a * p.g + p.g) @ p.b, {"a": a, "b": b, "g": draw(5)}),
            "used as bias and reader": (lambda p, x: relu(x @ p.a + p.b[:, 0]) @ p.b, {"a": a, "b": b}),
            "hypernetwork": (
                lambda p, x: torch.einsum("ni,nij->nj", x, (x @ p.h).view(-1, 4, 5)) @ p.b,
                {"h": draw(4, 20), "b": b},
            ),
            "hypernetwork relu": (
                lambda p, x: relu(torch.einsum("ni,nij->nj", x, relu(x @ p.h).view(-1, 4, 5))) @ p.b,
                {"h": draw(4, 20), "b": b},
            ),
            "feature-wise": (
                lambda p, x: (x @ p.a * (1 + x @ p.c) + x @ p.d) @ p.b,
                {"a": a, "b": b, "c": draw(4, 5), "d": draw(4, 5)},
            ),
            "highway": (
                lambda p, x: ((x @ p.t).sigmoid() * relu(x @ p.s) + (1 - (x @ p.t).sigmoid()) * x) @ p.a,
                {"t": draw(4, 4), "s": draw(4, 4), "a": a},
            ),
            "mixture with ties": (lambda p, x: torch.maximum(x @ p.a, x @ p.a.clone()) @ p.b, {"a": a, "b": b}),
            "ties by relu": (
                lambda p, x: torch.maximum(relu(x @ p.a), relu(x @ p.c)) @ p.b,
                {"a": a, "b": b, "c": draw(4, 5)},
            ),
            "median": (lambda p, x: (x @ p.a).median(1, keepdim=True).values * p.b[0], {"a": a, "b": b}),
            "two smallest": (lambda p, x: (x @ p.a).topk(2, largest=False).values @ p.b[:2], {"a": a, "b": b}),
            "sorted by size": (lambda p, x: (x @ p.a).gather(1, (x @ p.a).abs().argsort(1)) @ p.b, {"a": a, "b": b}),
            "bucket gains": (
                lambda p, x: (
                    (x @ p.a)
                    * p.g[torch.bucketize((x @ p.a).detach(), torch.tensor([0.0]).to(x))][..., None].squeeze(-1)
                    @ p.b
                ),
                {"a": a, "b": b, "g": draw(2)},
            ),
            "bucket gains apart": (
                lambda p, x: (
                    (x @ p.a) * p.g[torch.bucketize((x @ p.a).detach(), torch.tensor([-0.5, 0.5]).to(x))] @ p.b
                ),
                {"a": a, "b": b, "g": draw(3)},
            ),
            "spline": (
                lambda p, x: (relu((x @ p.a)[..., None] - p.k) @ p.g) @ p.b,
                {"a": a, "b": b, "k": draw(3), "g": draw(3)},
            ),
            "rational activation": (
                lambda p, x: ((p.u[0] + p.u[1] * (x @ p.a)) / (1 + (p.v[0] * (x @ p.a)).abs())) @ p.b,
                {"a": a, "b": b, "u": draw(2), "v": draw(1)},
            ),
            "learned power": (
                lambda p, x: ((x @ p.a).abs() ** (1 + p.g.square())) @ p.b,
                {"a": a, "b": b, "g": draw(5)},
            ),
            "log space product": (lambda p, x: ((x.abs() + 1).log() @ p.a).exp() @ p.b, {"a": a, "b": b}),
            "mean of experts": (
                lambda p, x: torch.einsum("nk,nkd->nd", (x @ p.r).softmax(-1), torch.einsum("ni,kid->nkd", x, p.e)),
                {"r": draw(4, 3), "e": draw(3, 4, 2)},
            ),
            "product of experts": (lambda p, x: torch.einsum("ni,kid->nkd", x, p.e).prod(1), {"e": draw(3, 4, 2)}),
            "normed mixture": (
                lambda p, x: torch.einsum(
                    "nk,nkd->nd",
                    F.normalize((x @ p.r).relu(), p=1, dim=-1, eps=1e-9),
                    torch.einsum("ni,kid->nkd", x, p.e),
                ),
                {"r": draw(4, 3), "e": draw(3, 4, 2)},
            ),
            "outputs as a dictionary": (
                lambda p, x: {"y": relu(x @ p.a) @ p.b, "n": 3, "h": [(x @ p.a).sum(1)]},
                {"a": a, "b": b},
            ),
            "output is a parameter": (lambda p, x: (relu(x @ p.a) @ p.b, p.a), {"a": a, "b": b}),
            "output is a view of one": (lambda p, x: (relu(x @ p.a) @ p.b, p.b[:2]), {"a": a, "b": b}),
            "constant output": (lambda p, x: (relu(x @ p.a) @ p.b, torch.ones(3)), {"a": a, "b": b}),
            "second derivative": (lambda p, x: _input_gradient(p, x), {"a": a, "b": b}),
            "jacobian": (
                lambda p, x: torch.func.vmap(torch.func.jacrev(lambda v: torch.tanh(v @ p.a) @ p.b))(x),
                {"a": a, "b": b},
            ),
            "gradient step inside": (lambda p, x: _inner_step(p, x), {"a": a, "b": b}),
            "fixed point": (lambda p, x: _fixed_point(p, x), {"s": draw(5, 5) / 4, "a": a, "b": b}),
            "half precision inside": (
                lambda p, x: relu(x @ p.a).to(torch.bfloat16).to(x.dtype) @ p.b,
                {"a": a, "b": b},
            ),
            "in place relu": (lambda p, x: F.relu(x @ p.a, inplace=True) @ p.b, {"a": a, "b": b}),
            "in place on a view": (lambda p, x: _in_place_view(x @ p.a) @ p.b, {"a": a, "b": b}),
            "in place loop": (lambda p, x: _in_place_loop(x @ p.a) @ p.b, {"a": a, "b": b}),
            "out argument": (
                lambda p, x: relu(x @ p.a) @ p.b + torch.no_grad()(lambda: (x @ p.a).sum())(),
                {"a": a, "b": b},
            ),
            "no grad branch": (
                lambda p, x: relu(x @ p.a) @ p.b * torch.no_grad()(lambda: (x @ p.a).norm())(),
                {"a": a, "b": b},
            ),
            "temperature": (lambda p, x: (x @ p.a / p.g).softmax(-1) @ p.b, {"a": a, "b": b, "g": draw(1).abs() + 1}),
            "log temperature": (lambda p, x: (x @ p.a * p.g.exp()).softmax(-1) @ p.b, {"a": a, "b": b, "g": draw(1)}),
            "softmax of a mean": (lambda p, x: (x @ p.a - (x @ p.a).mean()).softmax(-1) @ p.b, {"a": a, "b": b}),
            "softmax over all": (
                lambda p, x: (x @ p.a + p.g).flatten().softmax(0).view(len(x), 5) @ p.b,
                {"a": a, "b": b, "g": draw(5)},
            ),
            "softmax in pieces": (
                lambda p, x: torch.cat([(x @ p.a + p.g)[:, :2].softmax(1), (x @ p.a + p.g)[:, 2:].softmax(1)], 1) @ p.b,
                {"a": a, "b": b, "g": draw(5)},
            ),
            "layer norm without gain": (
                lambda p, x: F.layer_norm(x @ p.a + p.g, (5,)) @ p.b,
                {"a": a, "b": b, "g": draw(5)},
            ),
            "layer norm over all": (
                lambda p, x: F.layer_norm(x @ p.a + p.g, tuple((x @ p.a).shape)) @ p.b,
                {"a": a, "b": b, "g": draw(5)},
            ),
            "group norm of pairs": (
                lambda p, x: F.group_norm(x @ p.a.repeat(1, 2)[:, :6] + p.g, 3) @ p.c,
                {"a": a, "g": draw(6), "c": draw(6, 2)},
            ),
            "batch norm of batch": (
                lambda p, x: F.batch_norm(x @ p.a + p.g, None, None, training=True) @ p.b,
                {"a": a, "b": b, "g": draw(5)},
            ),
            "norm of sums": (
                lambda p, x: F.layer_norm(x @ p.a + x @ p.c + p.g, (5,)) @ p.b,
                {"a": a, "b": b, "c": draw(4, 5), "g": draw(1)},
            ),
            "distances to centres": (
                lambda p, x: torch.cdist(x @ p.a, p.c) @ p.b[:3],
                {"a": a, "b": b, "c": draw(3, 5)},
            ),
            "distances to centres, shifted": (
                lambda p, x: torch.cdist(x @ p.a + p.g, p.c + p.g) @ p.b[:3],
                {"a": a, "b": b, "c": draw(3, 5), "g": draw(5)},
            ),
            "cosines": (
                lambda p, x: F.cosine_similarity((x @ p.a)[:, None], p.c, dim=-1) @ p.b[:3],
                {"a": a, "b": b, "c": draw(3, 5)},
            ),
            "pairwise distance": (lambda p, x: F.pairwise_distance(x @ p.a, x @ p.c), {"a": a, "c": draw(4, 5)}),
            "eigenvalues": (lambda p, x: torch.linalg.eigvalsh(p.s @ p.s.T) * x, {"s": draw(4, 4)}),
            "singular values": (lambda p, x: torch.linalg.svdvals(p.a)[None] * x, {"a": a}),
            "cholesky": (lambda p, x: x @ torch.linalg.cholesky(p.s @ p.s.T + torch.eye(4).to(x)), {"s": draw(4, 4)}),
            "gaussian process": (
                lambda p, x: torch.linalg.solve(
                    torch.exp(-torch.cdist(x @ p.a, x @ p.a).square()) + torch.eye(len(x)).to(x), x @ p.c
                ),
                {"a": a, "c": draw(4, 2)},
            ),
            "energy gradient": (lambda p, x: -(x @ p.s @ p.s.T) + x @ p.s.softmax(1), {"s": draw(4, 4)}),
        },
        lambda: rows(4),
    )
    yield "mechanics: counter", (Counter(), rows(4))
    yield "mechanics: moving statistics", (Moving(False), rows(4))
    yield "mechanics: moving statistics, detached", (Moving(True), rows(4))
    yield "mechanics: codebook", (Codebook(False), rows(4))
    yield "mechanics: trained codebook", (Codebook(True), rows(4))
    for by in (
        "batch",
        "value",
        "tracing",
        "grad mode",
        "precision",
        "relu in single",
        "try",
        "list",
        "length of nonzero",
        "unique",
    ):
        yield (
            f"mechanics: branch by {by}",
            (
                Branching(by),
                [(torch.ones(6, 4) + draw(6, 4).abs(),), (-torch.ones(6, 4) - draw(6, 4).abs(),), (draw(3, 4),)],
            ),
        )
    for keep, renormalised in ((1, False), (1, True), (2, False), (2, True), (3, True)):
        yield f"mechanics: experts {keep} {renormalised}", (Experts(keep, renormalised), rows(4, 6, 5, 9))
    for name, change in {
        "gradient hook": lambda m: m[0].weight.register_hook(lambda g: 2 * g),
        "gradient hook that looks": lambda m: m[0].weight.register_hook(lambda g: None),
        "accumulated hook": lambda m: m[0].weight.register_post_accumulate_grad_hook(_doubled_gradient),
        "forward hook": lambda m: m[0].register_forward_hook(lambda mod, i, o: o.tanh()),
        "forward pre-hook": lambda m: m[2].register_forward_pre_hook(lambda mod, i: (i[0].tanh(),)),
        "backward hook": lambda m: m[1].register_full_backward_hook(lambda mod, gi, go: tuple(2 * g for g in gi)),
        "backward pre-hook": lambda m: m[2].register_full_backward_pre_hook(
            lambda mod, go: tuple(g.sign() for g in go)
        ),
        "weight norm": lambda m: parametrizations.weight_norm(m[0]),
        "spectral norm": lambda m: parametrizations.spectral_norm(m[2]),
        "old weight norm": lambda m: nn.utils.weight_norm(m[0]),
        "old spectral norm": lambda m: nn.utils.spectral_norm(m[0]),
        "pruned": lambda m: prune.l1_unstructured(m[0], "weight", 0.4),
        "pruned rows": lambda m: prune.ln_structured(m[2], "weight", 0.4, 2, 0),
        "frozen first": lambda m: m[0].requires_grad_(False),
        "frozen bias": lambda m: m[0].bias.requires_grad_(False),
        "frozen reader": lambda m: m[2].weight.requires_grad_(False),
        "tied bias": lambda m: setattr(m[2], "bias", nn.Parameter(m[0].bias[:3].detach())),
        "positive reader": lambda m: parametrize.register_parametrization(m[2], "weight", nn.Softplus()),
        "dropped weights": lambda m: parametrize.register_parametrization(m[0], "weight", nn.Dropout(0.3)),
        "expanded bias": lambda m: setattr(m[0], "bias", nn.Parameter(draw(1).expand(5))),
    }.items():
        model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
        change(model)
        yield f"mechanics: {name}", (model, rows(4))
    base = nn.Linear(4, 4)
    tied = nn.Sequential(base, nn.ReLU(), base, nn.ReLU(), nn.Linear(4, 2))
    yield "mechanics: one layer twice", (tied, rows(4))
    data = draw(4, 4)
    shared = Called(lambda m, x: m.b(m.a(x).relu()), a=nn.Linear(4, 4, bias=False), b=nn.Linear(4, 4, bias=False))
    for name, values in (("a", data), ("b", data.T)):
        shared.get_submodule(name).weight = nn.Parameter(values)
    yield "mechanics: storage shared behind two parameters", (shared, rows(4))
    scripted = nn.Sequential(nn.Linear(4, 5), torch.jit.script(nn.ReLU()), nn.Linear(5, 3))
    yield "mechanics: scripted layer", (scripted, rows(4))


def _doubled_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


def _input_gradient(p: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (result,) = torch.autograd.grad(((x @ p.a).tanh() @ p.b).square().sum(), x, create_graph=True)
    return result


def _inner_step(p: Any, x: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(((x @ p.a).relu() @ p.b).square().mean(), p.b, create_graph=True)
    return (x @ p.a).relu() @ (p.b - 0.1 * grad)


def _fixed_point(p: Any, x: Tensor) -> Tensor:
    h = x @ p.a
    for _ in range(5):
        h = (h @ p.s + x @ p.a).tanh()
    return h @ p.b


def _in_place_view(h: Tensor) -> Tensor:
    h[:, 1:3].mul_(2.0)
    h.T[0].zero_()
    return h.relu_()


def _in_place_loop(h: Tensor) -> Tensor:
    for column in range(1, h.shape[1]):
        h = h.clone()
        h[:, column] += 0.5 * h[:, column - 1]
    return h


def held_out() -> Iterator[tuple[str, Case]]:
    """All of them."""
    for family in (contractions, indices, spectra, images, sequences, objectives, mechanics):
        torch.manual_seed(5)
        yield from family()
