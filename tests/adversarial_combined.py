"""A fourth set of models, written without reading the rules: operators and layers in company they rarely keep.

Contractions with repeated operands, indexing in every form, complex numbers, convolutions of every mode, recurrent
layers, attention with learned keys, transforms of functions, parametrizations, segments, sorting, casts and views.
`combined()` names all of them, each with further inputs on which every law must hold as well.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from adversarial_held_out import Case, draw, forms, rows
from adversarial_layers import Called
from adversarial_structures import images, sequences_of


def contractions() -> Iterator[tuple[str, Case]]:
    a, b, c, s = draw(4, 6), draw(6, 3), draw(6), draw(6, 6)
    e = torch.einsum
    yield from forms(
        "contraction",
        {
            "cube of one map": (
                lambda p, x: e("ni,ia,ib,ic,abc->n", x, p.a, p.a, p.a, p.g),
                {"a": a, "g": draw(6, 6, 6)},
            ),
            "two of one, one of another": (
                lambda p, x: e("ni,ia,nj,jb,nk,kc,abc->n", x, p.a, x, p.a, x, p.d, p.g),
                {"a": a, "d": draw(4, 2), "g": draw(6, 6, 2)},
            ),
            "diagonal core of two": (
                lambda p, x: e("ni,ik,nj,jk,k,ko->no", x, p.a, x, p.a, p.c, p.b),
                {"a": a, "b": b, "c": c},
            ),
            "batch of its own": (
                lambda p, x: e("ni,nij->nj", x, (x @ p.a)[:, :, None] * p.b),
                {"a": draw(4, 4), "b": draw(1, 4, 3)},
            ),
            "trace with the input": (
                lambda p, x: e("ni,ij,jk,ki->n", x, p.a, p.b, p.d),
                {"a": a, "b": b, "d": draw(3, 4)},
            ),
            "row of a square": (lambda p, x: e("ni,ij,kj,ko->no", x, p.a, p.s, p.b), {"a": a, "s": s, "b": b}),
            "square both ways": (lambda p, x: x @ p.a @ (p.s @ p.s.T) @ p.b, {"a": a, "s": s, "b": b}),
            "square, once transposed": (lambda p, x: x @ p.a @ p.s.T @ p.s @ p.s @ p.b, {"a": a, "s": s, "b": b}),
            "sum over an unread letter": (lambda p, x: e("ni,ij,jk->n", x, p.a, p.b), {"a": a, "b": b}),
            "sum of a letter of its own": (
                lambda p, x: e("ni,ijz->nj", x, p.w).relu() @ p.b,
                {"w": draw(4, 6, 2), "b": b},
            ),
            "repeated letter inside": (lambda p, x: e("ni,ijj->nj", x, p.w).relu() @ p.b, {"w": draw(4, 6, 6), "b": b}),
            "repeated letter thrice": (
                lambda p, x: e("ni,jjj,jo->nio", x, p.w, p.b).sum(1),
                {"w": draw(6, 6, 6), "b": b},
            ),
            "outer with itself, half read": (
                lambda p, x: e("na,nb->nab", x @ p.a, x @ p.a)[:, :3, 3:].flatten(1) @ p.d,
                {"a": a, "d": draw(9, 2)},
            ),
            "upper half of an outer": (
                lambda p, x: e("na,nb->nab", x @ p.a, x @ p.a).triu().flatten(1) @ p.d,
                {"a": a, "d": draw(36, 2)},
            ),
            "antisymmetric part": (
                lambda p, x: (lambda m: m - m.mT)(e("na,nb->nab", x @ p.a, x @ p.d)).flatten(1).square() @ p.r,
                {"a": a, "d": a * 2, "r": draw(36, 2)},
            ),
            "gram then relu": (lambda p, x: (p.a.T @ p.a).relu() @ p.b + x.sum(), {"a": a, "b": b}),
            "gram of products": (
                lambda p, x: x @ (p.a * p.d) @ (p.a * p.d).T @ p.w,
                {"a": a, "d": draw(4, 6), "w": draw(4, 2)},
            ),
            "kron with identity": (
                lambda p, x: x @ torch.kron(torch.eye(2).to(x), p.k) @ p.a,
                {"k": draw(2, 2), "a": a},
            ),
            "kron of one and its transpose": (
                lambda p, x: x @ torch.kron(p.k, p.k.T.contiguous()) @ p.a,
                {"k": draw(2, 2), "a": a},
            ),
            "tensordot crossed": (
                lambda p, x: torch.tensordot(x, p.w, ([1], [1])).flatten(1) @ p.d,
                {"w": draw(3, 4, 2), "d": draw(6, 2)},
            ),
            "bmm with itself": (
                lambda p, x: torch.bmm((x @ p.a)[:, :, None], (x @ p.a)[:, None]).sum(1) @ p.b,
                {"a": a, "b": b},
            ),
            "addbmm": (
                lambda p, x: torch.addbmm(p.m, (x @ p.a)[:, :, None], (x @ p.d)[:, None], beta=2, alpha=-1),
                {"a": a, "d": draw(4, 3), "m": draw(6, 3)},
            ),
            "baddbmm beta zero": (
                lambda p, x: torch.baddbmm(p.m, (x @ p.a)[:, :, None], (x @ p.d)[:, None], beta=0),
                {"a": a, "d": draw(4, 3), "m": draw(1, 6, 3)},
            ),
            "addmm alpha": (
                lambda p, x: torch.addmm(p.c, x, p.a, beta=-1, alpha=0.5).relu() @ p.b,
                {"a": a, "b": b, "c": c},
            ),
            "addr of gains": (lambda p, x: x @ torch.addr(p.a, p.u, p.c), {"a": a, "u": draw(4), "c": c}),
            "matrix power of a product": (
                lambda p, x: x @ torch.linalg.matrix_power(p.a @ p.d, 3),
                {"a": a, "d": draw(6, 4)},
            ),
            "multi dot with a square": (
                lambda p, x: torch.linalg.multi_dot([x, p.a, p.s, p.s, p.b]),
                {"a": a, "s": s, "b": b},
            ),
            "inner and outer": (lambda p, x: torch.inner(x @ p.a, p.s).relu() @ p.b, {"a": a, "s": s, "b": b}),
        },
        lambda: rows(4),
    )


def _put(base: Tensor, index: Any, value: Any) -> Tensor:
    base = base.clone()
    base[index] = value
    return base


def indexing() -> Iterator[tuple[str, Case]]:
    a, b, c = draw(4, 6), draw(6, 3), draw(6)
    i, j = torch.tensor([5, 0, 0, 3]), torch.tensor([1, 1, 4, 2])
    mask = torch.tensor([True, False, True, True, False, True])
    yield from forms(
        "indexed",
        {
            "two lists apart by a slice": (
                lambda p, x: p.w[i[:, None], :, j].sum(1).relu() @ p.d + x.sum(),
                {"w": draw(6, 3, 6), "d": draw(3, 2)},
            ),
            "list and mask": (lambda p, x: (x @ p.a)[:, mask].relu() @ p.b[mask], {"a": a, "b": b}),
            "mask against its complement": (
                lambda p, x: (x @ p.a)[:, mask].relu() @ p.b[~mask][[0, 1, 0, 1]],
                {"a": a, "b": b},
            ),
            "boolean of two axes": (
                lambda p, x: (x @ (p.a * (torch.ones(4, 6).tril() > 0).to(x))).relu() @ p.b,
                {"a": a, "b": b},
            ),
            "negative lists": (lambda p, x: (x @ p.a)[:, [-1, -1, 2]].relu() @ p.b[[-1, -1, 2]], {"a": a, "b": b}),
            "read in pieces, once crossed": (
                lambda p, x: (
                    torch.cat(((x @ p.a[:, :2]).relu(), (x @ p.a[:, 2:]).relu()), 1) @ torch.cat((p.b[2:], p.b[:2]))
                ),
                {"a": a, "b": b},
            ),
            "slice with a step of two": (
                lambda p, x: (x @ p.a[:, 1::2]).relu() @ p.b[::2] + x @ p.a[:, ::2] @ p.b[1::2],
                {"a": a, "b": b},
            ),
            "ellipsis and new axes": (
                lambda p, x: (x @ p.a)[..., None, None, :].relu().squeeze(1)[:, 0] @ p.b,
                {"a": a, "b": b},
            ),
            "put a row twice": (
                lambda p, x: _put(x @ p.a, (slice(None), [1, 1]), (x @ p.d)),
                {"a": a, "d": draw(4, 2)},
            ),
            "put onto itself": (
                lambda p, x: _put(x @ p.a, (slice(None), slice(0, 3)), (x @ p.a)[:, 3:]).relu() @ p.b,
                {"a": a, "b": b},
            ),
            "put a sum of the rest": (
                lambda p, x: _put(x @ p.a, (slice(None), 0), (x @ p.a)[:, 1:].sum(1)).relu() @ p.b,
                {"a": a, "b": b},
            ),
            "put by data": (lambda p, x: _put(x @ p.a, x[:, :1].expand(-1, 6) > 0, 0.0) @ p.b, {"a": a, "b": b}),
            "put ones by data": (lambda p, x: _put(x @ p.a, x[:, :1].expand(-1, 6) > 0, 1.0) @ p.b, {"a": a, "b": b}),
            "index put added": (
                lambda p, x: (
                    (x @ p.a).index_put((torch.arange(len(x))[:, None], i[None, :2]), x @ p.d, accumulate=True) @ p.b
                ),
                {"a": a, "b": b, "d": draw(4, 2)},
            ),
            "take along of a table": (
                lambda p, x: torch.take_along_dim(p.t, (x[:, :1] > 0).long().expand(-1, 3), 0).relu() @ p.d,
                {"t": draw(2, 3), "d": draw(3, 2)},
            ),
            "gather from sorted": (
                lambda p, x: (x @ p.a).sort(1).values.gather(1, torch.zeros(len(x), 2, dtype=torch.long)) @ p.d,
                {"a": a, "d": draw(2, 2)},
            ),
            "top three weighed by place": (lambda p, x: (x @ p.a).topk(3).values * p.g, {"a": a, "g": draw(3)}),
            "top by size, then signed": (
                lambda p, x: (lambda h: h.gather(1, h.abs().topk(2).indices))(x @ p.a) @ p.d,
                {"a": a, "d": draw(2, 2)},
            ),
            "kth and the rest": (
                lambda p, x: ((x @ p.a) / (x @ p.a).abs().kthvalue(3, keepdim=True).values) @ p.b,
                {"a": a, "b": b},
            ),
            "argmax row, scaled": (
                lambda p, x: p.b[(x @ p.a).argmax(1)] * (x @ p.a).amax(1, keepdim=True),
                {"a": a, "b": b},
            ),
            "sorted with indices": (
                lambda p, x: (lambda v, k: v @ p.b + p.c[k].sum(1, keepdim=True))(*(x @ p.a).sort(1)),
                {"a": a, "b": b, "c": c},
            ),
            "ranked gains": (lambda p, x: (x @ p.a) * p.c[(x @ p.a).argsort(1)], {"a": a, "c": c}),
            "unfold with overlap": (lambda p, x: (x @ p.a).unfold(1, 3, 2).amax(2) @ p.d, {"a": a, "d": draw(2, 2)}),
            "as strided diagonal": (
                lambda p, x: (
                    (x @ p.s.as_strided((4,), (5,))[:, None] if False else x * p.s.as_strided((4,), (5,))) @ p.a
                ),
                {"s": draw(4, 4), "a": a},
            ),
            "diagonal of an outer": (
                lambda p, x: torch.diagonal((x @ p.a)[:, :, None] * (x @ p.d)[:, None], dim1=1, dim2=2) @ p.b,
                {"a": a, "d": draw(4, 6), "b": b},
            ),
            "movedim of heads": (
                lambda p, x: (x @ p.a).view(-1, 2, 3).movedim(1, 2).softmax(1).flatten(1) @ p.b,
                {"a": a, "b": b},
            ),
            "swapaxes of a weight": (
                lambda p, x: (x @ p.w.swapaxes(0, 2).reshape(4, 6)).relu() @ p.b,
                {"w": draw(2, 3, 4), "b": b},
            ),
            "rot90 of a weight": (lambda p, x: (x @ torch.rot90(p.s, 1)).relu() @ p.s @ p.a, {"s": draw(4, 4), "a": a}),
            "roll both axes of a weight": (lambda p, x: (x @ p.s.roll((1, 2), (0, 1))).relu() @ p.s, {"s": draw(4, 4)}),
            "narrow and select": (
                lambda p, x: ((x @ p.a).narrow(1, 2, 3) * (x @ p.a).select(1, 0)[:, None]).relu() @ p.b[:3],
                {"a": a, "b": b},
            ),
            "scatter own order": (
                lambda p, x: torch.zeros_like(x @ p.a).scatter_(1, (x @ p.d).argsort(1), (x @ p.a).relu()) @ p.b,
                {"a": a, "d": a * 3, "b": b},
            ),
            "scatter mean of neighbours": (
                lambda p, x: (
                    (x @ p.a).scatter_reduce(1, i[None, :].expand(len(x), -1), x @ p.d, "mean", include_self=True) @ p.b
                ),
                {"a": a, "d": draw(4, 4), "b": b},
            ),
            "segments by lengths": (
                lambda p, x: (
                    torch.segment_reduce((x @ p.a).T.contiguous(), "mean", lengths=torch.tensor([2, 1, 3])).T.relu()
                    @ p.d
                ),
                {"a": a, "d": draw(3, 2)},
            ),
            "segments, largest": (
                lambda p, x: (
                    torch.segment_reduce(
                        (x @ p.a).T.contiguous(), "max", lengths=torch.tensor([2, 1, 3]), initial=0.0
                    ).T
                    @ p.d
                ),
                {"a": a, "d": draw(3, 2)},
            ),
        },
        lambda: rows(4),
    )


def complexes() -> Iterator[tuple[str, Case]]:
    a, d, b, c = draw(4, 6), draw(4, 6), draw(6, 3), draw(6)

    def z(p: Any, x: Tensor) -> Tensor:
        return torch.complex(x @ p.a, x @ p.d)

    yield from forms(
        "complex",
        {
            "product with its conjugate roll": (
                lambda p, x: (z(p, x) * z(p, x).conj().roll(1, 1)).real @ p.b,
                {"a": a, "d": d, "b": b},
            ),
            "product with itself": (lambda p, x: (z(p, x) ** 2).real @ p.b, {"a": a, "d": d, "b": b}),
            "bispectrum": (
                lambda p, x: (
                    (z(p, x)[:, :2] * z(p, x)[:, 2:4] * (z(p, x)[:, :2] * z(p, x)[:, 4:]).conj()).real @ p.b[:2]
                ),
                {"a": a, "d": d, "b": b},
            ),
            "unit, then a gain": (
                lambda p, x: torch.view_as_real(torch.sgn(z(p, x)) * p.c).flatten(1) @ p.r,
                {"a": a, "d": d, "c": c, "r": draw(12, 2)},
            ),
            "angles differ by a bias": (
                lambda p, x: torch.cos(z(p, x).angle() - p.c) @ p.b,
                {"a": a, "d": d, "b": b, "c": c},
            ),
            "polar of two maps": (
                lambda p, x: torch.polar((x @ p.a).abs(), x @ p.d).real @ p.b,
                {"a": a, "d": d, "b": b},
            ),
            "exponential of imaginary": (
                lambda p, x: (torch.exp(1j * (x @ p.a + p.c)) * torch.exp(-1j * p.c)).real @ p.b,
                {"a": a, "b": b, "c": c},
            ),
            "modulus of a sum": (lambda p, x: (z(p, x) + p.c).abs() @ p.b, {"a": a, "d": d, "b": b, "c": c}),
            "inner product of two": (
                lambda p, x: torch.vdot(torch.complex(p.c, p.e), torch.complex(p.f, p.g)).abs() * x.sum(),
                {"c": c, "e": draw(6), "f": draw(6), "g": draw(6)},
            ),
            "hermitian form": (
                lambda p, x: (z(p, x).conj() @ torch.complex(p.s, p.t) * z(p, x)).sum(1).real,
                {"a": a, "d": d, "s": draw(6, 6), "t": draw(6, 6)},
            ),
            "softmax of squares": (lambda p, x: z(p, x).abs().square().softmax(1) @ p.b, {"a": a, "d": d, "b": b}),
            "normalised by its norm": (
                lambda p, x: (z(p, x) / torch.linalg.vector_norm(z(p, x), dim=1, keepdim=True)).imag @ p.b,
                {"a": a, "d": d, "b": b},
            ),
            "fourier of a product": (
                lambda p, x: torch.fft.fft(x @ p.a).mul(torch.fft.fft(p.c)).abs() @ p.b,
                {"a": a, "b": b, "c": c},
            ),
            "phase retrieval": (lambda p, x: torch.fft.rfft(x @ p.a).abs().log() @ p.r, {"a": a, "r": draw(4, 2)}),
            "cross correlation": (
                lambda p, x: torch.fft.irfft(torch.fft.rfft(x @ p.a) * torch.fft.rfft(x @ p.d).conj(), n=6) @ p.b,
                {"a": a, "d": d, "b": b},
            ),
            "two-dimensional, real": (
                lambda p, x: torch.fft.rfft2((x @ p.a).view(-1, 2, 3)).abs().flatten(1) @ p.r,
                {"a": a, "r": draw(4, 2)},
            ),
            "hartley": (
                lambda p, x: (lambda f: f.real - f.imag)(torch.fft.fft(x @ p.a)).relu() @ p.b,
                {"a": a, "b": b},
            ),
            "parameter of complex numbers": (
                lambda p, x: (x.to(p.w.dtype) @ p.w).abs() @ p.b,
                {"w": torch.complex(draw(4, 6), draw(4, 6)), "b": b},
            ),
            "two complex maps": (
                lambda p, x: (x.to(p.w.dtype) @ p.w @ p.v).abs(),
                {"w": torch.complex(draw(4, 6), draw(4, 6)), "v": torch.complex(draw(6, 3), draw(6, 3))},
            ),
            "complex map and its adjoint": (
                lambda p, x: (x.to(p.w.dtype) @ p.w @ p.w.mH).real @ p.a,
                {"w": torch.complex(draw(4, 6), draw(4, 6)), "a": a},
            ),
            "complex map and its transpose": (
                lambda p, x: (x.to(p.w.dtype) @ p.w @ p.w.mT).real @ p.a,
                {"w": torch.complex(draw(4, 6), draw(4, 6)), "a": a},
            ),
            "phases relu": (
                lambda p, x: torch.view_as_real(x.to(p.w.dtype) @ p.w).relu().flatten(1) @ p.r,
                {"w": torch.complex(draw(4, 6), draw(4, 6)), "r": draw(12, 2)},
            ),
        },
        lambda: rows(4),
    )


def layers() -> Iterator[tuple[str, Case]]:
    for mode in ("zeros", "reflect", "replicate", "circular"):
        for dilation, groups in ((1, 1), (2, 2)):
            middle = nn.Conv2d(4, 4, 3, padding=1, padding_mode=mode, dilation=dilation, groups=groups)
            yield (
                f"layer: {mode} {dilation} {groups}, then its mean",
                (
                    Called(
                        lambda m, x: m.z((lambda h: h - h.mean((2, 3), keepdim=True))(m.y(m.x(x)))),
                        x=nn.Conv2d(2, 4, 1),
                        y=middle,
                        z=nn.Conv2d(4, 2, 1),
                    ),
                    images(2),
                ),
            )
    for stride, dilation, groups in ((1, 1, 1), (2, 1, 2), (2, 2, 1), (3, 1, 4)):
        layer = nn.ConvTranspose2d(4, 4, 3, stride, padding=1, dilation=dilation, groups=groups)
        yield (
            f"layer: transposed {stride} {dilation} {groups}, batch norm",
            (
                nn.Sequential(nn.Conv2d(2, 4, 1), layer, nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)),
                images(2),
            ),
        )
    yield (
        "layer: transposed back by the same kernel",
        (
            Called(
                lambda m, x: F.conv_transpose2d(m.c(x).relu(), m.c.weight, padding=1), c=nn.Conv2d(2, 5, 3, padding=1)
            ),
            images(2),
        ),
    )
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        options: dict[str, Any] = {"num_layers": 2, "bidirectional": True, "batch_first": True}
        yield (
            f"layer: {kind.__name__}, last state read",
            (
                Called(lambda m, x: m.r(m.c(x)[0][:, -1]), c=kind(4, 3, **options), r=nn.Linear(6, 2)),
                sequences_of(4),
            ),
        )
    yield (
        "layer: LSTM projected both ways",
        (
            Called(
                lambda m, x: m.r(m.c(x)[0]),
                c=nn.LSTM(4, 5, proj_size=3, bidirectional=True, batch_first=True),
                r=nn.Linear(6, 2),
            ),
            sequences_of(4),
        ),
    )
    yield (
        "layer: GRU cell unrolled, weight tied to a reader",
        (
            Called(
                lambda m, x: (
                    functools.reduce(lambda h, t: m.c(t, h), x.unbind(1), x.new_zeros(len(x), 5)) @ m.c.weight_hh[:5]
                ),
                c=nn.GRUCell(4, 5),
            ),
            sequences_of(4),
        ),
    )
    for kv, zero, before in ((True, False, False), (True, True, True), (False, True, False)):
        attend = nn.MultiheadAttention(4, 2, add_bias_kv=kv, add_zero_attn=zero, batch_first=True)
        yield (
            f"layer: attention {kv} {zero} {before}",
            (
                Called(
                    lambda m, x, before=before: m.r((lambda h: m.a(h, h, h)[0])(m.n(x) if before else x) + x),
                    a=attend,
                    n=nn.LayerNorm(4),
                    r=nn.Linear(4, 2),
                ),
                sequences_of(4),
            ),
        )
    yield (
        "layer: attention of other widths",
        (
            Called(
                lambda m, x: m.a(x, m.k(x), m.v(x))[0],
                a=nn.MultiheadAttention(4, 2, kdim=3, vdim=5, add_bias_kv=True, batch_first=True),
                k=nn.Linear(4, 3),
                v=nn.Linear(4, 5),
            ),
            sequences_of(4),
        ),
    )
    yield (
        "layer: attention read by its weights",
        (
            Called(
                lambda m, x: m.a(x, x, x, average_attn_weights=False)[1],
                a=nn.MultiheadAttention(4, 2, batch_first=True),
            ),
            sequences_of(4),
        ),
    )
    for name, wrap in {
        "weight norm of a reader": lambda: nn.Sequential(
            nn.Linear(4, 6), nn.ReLU(), parametrizations.weight_norm(nn.Linear(6, 3), dim=1)
        ),
        "weight norm of all": lambda: nn.Sequential(
            parametrizations.weight_norm(nn.Linear(4, 6), dim=None),  # type: ignore[arg-type]
            nn.ReLU(),
            nn.Linear(6, 3),
        ),
        "spectral, then batch norm": lambda: nn.Sequential(
            parametrizations.spectral_norm(nn.Linear(4, 6)), nn.BatchNorm1d(6), nn.Linear(6, 3)
        ).eval(),
        "orthogonal wide": lambda: nn.Sequential(
            parametrizations.orthogonal(nn.Linear(4, 6)), nn.ReLU(), nn.Linear(6, 3)
        ),
        "orthogonal, Cayley, before": lambda: nn.Sequential(
            nn.Linear(4, 5), parametrizations.orthogonal(nn.Linear(5, 5), orthogonal_map="cayley"), nn.Linear(5, 2)
        ),
    }.items():
        torch.manual_seed(4)
        yield f"layer: {name}", (wrap(), rows(4))
    yield (
        "layer: one linear at three places",
        (
            Called(lambda m, x: m.l(m.l(m.l(x).relu()) + x), l=nn.Linear(4, 4)),
            rows(4),
        ),
    )
    yield (
        "layer: bias of one is the gain of another",
        (
            Called(lambda m, x: m.b((m.a(x)).relu() * m.a.bias), a=nn.Linear(4, 6), b=nn.Linear(6, 2)),
            rows(4),
        ),
    )
    yield (
        "layer: embedding summed with its sort",
        (
            Called(
                lambda m, t: m.r((lambda h: h + h.sort(-1).values)(m.e(t))), e=nn.Embedding(7, 5), r=nn.Linear(5, 2)
            ),
            [(torch.randint(7, (3, 4)),), (torch.randint(7, (2, 6)),)],
        ),
    )
    yield (
        "layer: channels dropped by instance norm",
        (
            nn.Sequential(
                nn.Conv2d(2, 4, 3, padding=1), nn.InstanceNorm2d(4, affine=True), nn.PReLU(4), nn.Conv2d(4, 2, 1)
            ),
            images(2),
        ),
    )
    yield (
        "layer: pixel unshuffle and back",
        (
            nn.Sequential(nn.Conv2d(2, 4, 1), nn.PixelUnshuffle(2), nn.ReLU(), nn.PixelShuffle(2), nn.Conv2d(4, 2, 1)),
            images(2),
        ),
    )
    yield (
        "layer: sampled at own grid",
        (
            Called(
                lambda m, x: m.r(
                    F.grid_sample(m.c(x), m.g(x).tanh().permute(0, 2, 3, 1), padding_mode="border", align_corners=True)
                ),
                c=nn.Conv2d(2, 4, 1),
                g=nn.Conv2d(2, 2, 1),
                r=nn.Conv2d(4, 2, 1),
            ),
            images(2),
        ),
    )
    yield (
        "layer: bilinear of one twice",
        (Called(lambda m, x: m.b((h := m.a(x)), h.relu()), a=nn.Linear(4, 5), b=nn.Bilinear(5, 5, 2)), rows(4)),
    )
    yield (
        "layer: ctc",
        (
            Called(
                lambda m, x: F.ctc_loss(
                    m.r(m.a(x).relu()).log_softmax(-1).transpose(0, 1),
                    torch.tensor([[1, 2], [2, 1], [1, 1]])[: len(x)],
                    torch.full((len(x),), x.shape[1]),
                    torch.full((len(x),), 2),
                    reduction="none",
                ),
                a=nn.Linear(4, 6),
                r=nn.Linear(6, 3),
            ),
            sequences_of(4, (3, 6), (2, 8)),
        ),
    )


def functions() -> Iterator[tuple[str, Case]]:
    a, b, c = draw(4, 6), draw(6, 3), draw(6)

    def scan(p: Any, x: Tensor, step: Any) -> Tensor:
        h, saved = torch.zeros(len(x), 6).to(x), []
        for column in x.unbind(1):
            h = step(p, h, column)
            saved.append(h)
        return torch.stack(saved, 1)

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, s: Tensor) -> Tensor:
            ctx.save_for_backward(x, s)
            return x * s

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
            x, s = ctx.saved_tensors
            return g * s, (g * x).sum(0)

    def inner(p: Any, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda r: torch.func.grad(lambda q: (q @ p.a).relu().square().sum())(r))(x) @ p.w

    yield from forms(
        "function",
        {
            "cumulative product of gains": (lambda p, x: (x @ p.a) * p.c.cumprod(0), {"a": a, "c": c}),
            "cumulative product, then reader": (lambda p, x: ((x @ p.a).cumprod(1)) @ p.b, {"a": a, "b": b}),
            "cumulative largest, difference": (
                lambda p, x: ((x @ p.a).cummax(1).values - (x @ p.a)) @ p.b,
                {"a": a, "b": b},
            ),
            "log of cumulative sums": (
                lambda p, x: (x @ p.a).exp().cumsum(1).log().diff(dim=1) @ p.b[:5],
                {"a": a, "b": b},
            ),
            "list as state": (
                lambda p, x: scan(p, x, lambda p, h, t: (h + t[:, None] * p.c).relu()).sum(1) @ p.b,
                {"b": b, "c": c},
            ),
            "list as state, decayed": (
                lambda p, x: scan(p, x, lambda p, h, t: h * p.d + t[:, None] * p.c).flatten(1) @ p.r,
                {"c": c, "d": draw(6), "r": draw(24, 2)},
            ),
            "list as state, gated": (
                lambda p, x: (
                    scan(p, x, lambda p, h, t: torch.lerp(h, t[:, None] * p.c, p.d.sigmoid())).flatten(1) @ p.r
                ),
                {"c": c, "d": draw(6), "r": draw(24, 2)},
            ),
            "by hand, right": (lambda p, x: Scaled.apply(x @ p.a, p.c).relu() @ p.b, {"a": a, "b": b, "c": c}),
            "gradient of a square inside": (inner, {"a": a, "w": draw(4, 2)}),
            "vmap over heads": (
                lambda p, x: torch.func.vmap(lambda w, r: (x @ w).relu() @ r)(p.h, p.r).mean(0),
                {"h": draw(3, 4, 2), "r": draw(3, 2, 2)},
            ),
            "vmap, one reader": (
                lambda p, x: torch.func.vmap(lambda w: (x @ w).relu() @ p.r)(p.h).mean(0),
                {"h": draw(3, 4, 2), "r": draw(2, 2)},
            ),
            "vmap with rows chosen": (
                lambda p, x: torch.func.vmap(lambda r, k: r @ p.h[k])(x, (x[:, 0] > 0).long()),
                {"h": draw(2, 4, 3)},
            ),
            "tangent along a parameter": (
                lambda p, x: torch.func.jvp(lambda w: (x @ w).relu() @ p.b, (p.a,), (p.d,))[1],
                {"a": a, "d": draw(4, 6), "b": b},
            ),
            "linearised": (
                lambda p, x: torch.func.linearize(lambda y: (y @ p.a).tanh() @ p.b, x)[1](x),
                {"a": a, "b": b},
            ),
            "functional call, halves": (
                lambda p, x: F.linear(F.linear(x, p.a.T / p.a.norm()).relu(), p.b.T * p.a.norm()),
                {"a": a, "b": b},
            ),
            "double and back": (lambda p, x: ((x @ p.a).double() @ p.b.double()).to(x.dtype), {"a": a, "b": b}),
            "integer shift of a bias": (
                lambda p, x: (x @ p.a + p.c.round().detach()).relu() @ p.b,
                {"a": a, "b": b, "c": c},
            ),
            "view as other shape": (lambda p, x: (x @ p.a).view(-1, 3, 2).amax(2) @ p.d, {"a": a, "d": draw(3, 2)}),
            "in place on a view of a view": (lambda p, x: _grown(x @ p.a) @ p.b, {"a": a, "b": b}),
            "in place on a transposed view": (
                lambda p, x: _scaled_transposed(x @ p.a, p.c) @ p.b,
                {"a": a, "b": b, "c": c},
            ),
            "detached mean back": (
                lambda p, x: (
                    (
                        (x @ p.a) - (x @ p.a).mean(1, keepdim=True).detach() + (x @ p.a).mean(1, keepdim=True).detach()
                    ).relu()
                    @ p.b
                ),
                {"a": a, "b": b},
            ),
            "detached size, then its own": (
                lambda p, x: (
                    ((x @ p.a) / (x @ p.a).norm(dim=1, keepdim=True).detach() * (x @ p.a).norm(dim=1, keepdim=True))
                    @ p.b
                ),
                {"a": a, "b": b},
            ),
            "largest of shifted twins": (
                lambda p, x: torch.maximum(x @ p.a + p.c, x @ p.d + p.c) @ p.b,
                {"a": a, "d": draw(4, 6), "b": b, "c": c},
            ),
            "softmax of twins": (
                lambda p, x: torch.stack((x @ p.a + p.c, x @ p.d + p.c)).softmax(0)[0] @ p.b,
                {"a": a, "d": draw(4, 6), "b": b, "c": c},
            ),
            "softmax of shifted rows": (
                lambda p, x: ((x @ p.a).softmax(1) * (x @ p.d + p.c).softmax(1)) @ p.b,
                {"a": a, "d": draw(4, 6), "b": b, "c": c},
            ),
            "variance of twins": (
                lambda p, x: torch.stack((x @ p.a + p.c, x @ p.d + p.c)).var(0) @ p.b,
                {"a": a, "d": draw(4, 6), "b": b, "c": c},
            ),
            "cosine of rows and gains": (
                lambda p, x: F.cosine_similarity(x @ p.a, p.c[None])[:, None] * p.b[0],
                {"a": a, "b": b, "c": c},
            ),
            "normalised twice": (lambda p, x: F.normalize(F.normalize(x @ p.a) * p.c) @ p.b, {"a": a, "b": b, "c": c}),
            "layer norm of a product": (
                lambda p, x: F.layer_norm((x @ p.a) * p.c, (6,), eps=0.0) @ p.b,
                {"a": a, "b": b, "c": c},
            ),
            "group norm of pairs, biased": (
                lambda p, x: F.group_norm(x @ p.a + p.c, 3, eps=0.0) @ p.b,
                {"a": a, "b": b, "c": c},
            ),
            "rms of halves": (
                lambda p, x: (
                    torch.cat([h / h.square().mean(1, keepdim=True).sqrt() for h in (x @ p.a).chunk(2, 1)], 1) @ p.b
                ),
                {"a": a, "b": b},
            ),
            "triplet margin": (
                lambda p, x: F.triplet_margin_loss(
                    x @ p.a + p.c, x.roll(1, 0) @ p.a + p.c, x.flip(0) @ p.d + p.c, reduction="none"
                ),
                {"a": a, "d": draw(4, 6), "c": c},
            ),
            "loss without axes": (lambda p, x: ((x @ p.a).relu() @ p.b).square().mean().sqrt(), {"a": a, "b": b}),
            "loss of one number each": (lambda p, x: ((x @ p.a).relu() @ p.b).logsumexp(1), {"a": a, "b": b}),
            "several losses": (
                lambda p, x: {"a": [(x @ p.a).relu() @ p.b], "b": (p.a.norm() * p.b.norm(),)},
                {"a": a, "b": b},
            ),
        },
        lambda: rows(4),
    )


def _grown(h: Tensor) -> Tensor:
    h = h.clone()
    h.view(-1, 2, 3)[:, 0].view(-1, 3)[:, 1:].mul_(2).add_(h[:, 3:5])
    return h.relu()


def _scaled_transposed(h: Tensor, gain: Tensor) -> Tensor:
    h = h.clone()
    h.T[1:4].mul_(gain[1:4, None]).clamp_(min=0)
    return h


def combined() -> Iterator[tuple[str, Case]]:
    """All of them."""
    for family in (contractions, indexing, complexes, layers, functions):
        torch.manual_seed(59)
        yield from family()
