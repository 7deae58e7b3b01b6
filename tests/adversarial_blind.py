"""A second set of models that inference was not tuned on, written without reading its rules.

They aim at arguments that are easily overlooked: repeated operands, indices of every form, complex numbers of size one,
paddings, projections, choices that depend on data, and what changes between sizes, precisions and modes.
`blind()` names all of them, each with further inputs on which every law must hold as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from adversarial_held_out import Case, draw, forms, rows
from adversarial_layers import Called, Function


def einsums() -> Iterator[tuple[str, Case]]:
    """Contractions in which one operand, one letter or one factor occurs more than once."""
    u, v, w, s, g = draw(4, 3), draw(3, 4), draw(3, 2), draw(4, 4), draw(3, 3, 3)
    yield from forms(
        "einsum",
        {
            "bilinear, one factor both sides": (
                lambda p, x: torch.einsum("ni,ia,ab,jb,nj->n", x, p.u, p.m, p.u, x),
                {"u": u, "m": draw(3, 3)},
            ),
            "bilinear, symmetric middle": (
                lambda p, x: torch.einsum("ni,ia,ab,jb->nj", x, p.u, p.m + p.m.T, p.u),
                {"u": u, "m": draw(3, 3)},
            ),
            "bilinear, antisymmetric middle": (
                lambda p, x: torch.einsum("ni,ia,ab,jb->nj", x, p.u, p.m - p.m.T, p.u),
                {"u": u, "m": draw(3, 3)},
            ),
            "core thrice": (
                lambda p, x: torch.einsum("abc,ia,jb,kc,ni,nj->nk", p.g, p.u, p.u, p.u, x, x),
                {"g": g, "u": u},
            ),
            "core, first two": (
                lambda p, x: torch.einsum("abc,ia,jb,kc,ni,nj->nk", p.g, p.u, p.u, p.z, x, x),
                {"g": g, "u": u, "z": draw(4, 3)},
            ),
            "core, ends equal": (
                lambda p, x: torch.einsum("abc,ia,jb,kc,ni,nj->nk", p.g, p.u, p.z, p.u, x, x),
                {"g": g, "u": u, "z": draw(4, 3)},
            ),
            "core diagonal": (
                lambda p, x: torch.einsum("aab,ia,ni,jb->nj", p.g, p.u, x, p.z),
                {"g": g, "u": u, "z": draw(4, 3)},
            ),
            "core diagonal of last": (
                lambda p, x: torch.einsum("abb,ia,ni,jb->nj", p.g, p.u, x, p.z),
                {"g": g, "u": u, "z": draw(4, 3)},
            ),
            "diagonal of a square": (lambda p, x: torch.einsum("ni,ij,ji->ni", x, p.s, p.s), {"s": s}),
            "hadamard of itself": (lambda p, x: torch.einsum("ni,ij,ij->nj", x, p.s, p.s), {"s": s}),
            "hadamard with transpose": (lambda p, x: torch.einsum("ni,ij,ji->nj", x, p.s, p.s), {"s": s}),
            "hadamard of a product": (
                lambda p, x: torch.einsum("ni,ia,aj,ij->nj", x, p.u, p.v, p.s),
                {"u": u, "v": v, "s": s},
            ),
            "ring of three": (
                lambda p, x: torch.einsum("nq,aqb,brc,cta->nrt", x, p.a, p.b, p.c),
                {"a": draw(2, 4, 2), "b": draw(2, 2, 2), "c": draw(2, 3, 2)},
            ),
            "ring of one core": (
                lambda p, x: torch.einsum("nq,aqb,brc,cta->nrt", x, p.a, p.b, p.b),
                {"a": draw(2, 4, 2), "b": draw(2, 3, 2)},
            ),
            "ring of equal cores": (
                lambda p, x: torch.einsum("nq,nr,aqb,bra->n", x, x, p.a, p.a),
                {"a": draw(2, 4, 2)},
            ),
            "train with open ends": (
                lambda p, x: torch.einsum("nq,nr,aqb,brc,c->na", x, x, p.a, p.a, p.e),
                {"a": draw(2, 4, 2), "e": draw(2)},
            ),
            "outer then trace": (
                lambda p, x: torch.einsum("ni,ik,jk,jl,ll->nl", x, p.u, p.z, p.y, p.s),
                {"u": u, "z": draw(4, 3), "y": draw(4, 4), "s": s},
            ),
            "summed letter": (lambda p, x: torch.einsum("ni,ij,kl->nj", x, p.u, p.w), {"u": u, "w": w}),
            "summed letter of itself": (lambda p, x: torch.einsum("ni,ij,kl->nj", x, p.u, p.u), {"u": u}),
            "ellipsis first": (lambda p, x: torch.einsum("...i,ij->...j", x[:, None], p.u) @ p.w, {"u": u, "w": w}),
            "ellipsis on a weight": (
                lambda p, x: torch.einsum("ni,...ij->...nj", x, p.u3) @ p.w,
                {"u3": draw(2, 4, 3), "w": w},
            ),
            "implicit output order": (
                lambda p, x: torch.einsum("zi,ia", x, p.u) @ p.q,
                {"u": u, "q": draw(6, 2)},
                lambda: rows(4, 6, 6),
            ),
            "operand lists": (lambda p, x: torch.einsum(x, [0, 1], p.u, [1, 2], p.w, [2, 3], [0, 3]), {"u": u, "w": w}),
            "operand lists twice": (lambda p, x: torch.einsum(x, [0, 1], p.u, [1, 2], p.u, [3, 2], [0, 3]), {"u": u}),
            "gate by another read": (lambda p, x: torch.einsum("ni,ia,ib,bo->nao", x, p.u, p.u, p.w), {"u": u, "w": w}),
            "second moment": (lambda p, x: torch.einsum("ni,nj,ia,ja->na", x, x, p.u, p.u) @ p.w, {"u": u, "w": w}),
            "second moment mixed": (
                lambda p, x: torch.einsum("ni,nj,ia,jb->nab", x, x, p.u, p.u).flatten(1) @ p.q,
                {"u": u, "q": draw(9, 2)},
            ),
            "second moment other": (
                lambda p, x: torch.einsum("ni,nj,ia,jb->nab", x, x, p.u, p.z).flatten(1) @ p.q,
                {"u": u, "z": draw(4, 3), "q": draw(9, 2)},
            ),
            "batch of weights used twice": (
                lambda p, x: torch.einsum("ni,hia,hja->nhj", x, p.h, p.h),
                {"h": draw(2, 4, 3)},
            ),
            "heads crossed": (
                lambda p, x: torch.einsum("ni,hia,gja,hg->nj", x, p.h, p.k, p.m),
                {"h": draw(2, 4, 3), "k": draw(2, 4, 3), "m": draw(2, 2)},
            ),
            "heads crossed, tied": (
                lambda p, x: torch.einsum("ni,hia,gja,hg->nj", x, p.h, p.h, p.m),
                {"h": draw(2, 4, 3), "m": draw(2, 2)},
            ),
            "matrix square of a product": (lambda p, x: x @ (p.u @ p.v) @ (p.u @ p.v), {"u": u, "v": v}),
            "commutator": (lambda p, x: x @ (p.s @ p.t - p.t @ p.s), {"s": s, "t": draw(4, 4)}),
            "anticommutator, low rank": (
                lambda p, x: x @ ((p.u @ p.v) @ p.s + p.s @ (p.u @ p.v)),
                {"u": u, "v": v, "s": s},
            ),
            "gram both ways": (lambda p, x: x @ p.u @ p.u.T @ p.u @ p.w, {"u": u, "w": w}),
            "outer of a vector": (lambda p, x: x @ torch.outer(p.a, p.a) @ p.u, {"a": draw(4), "u": u}),
            "outer of two, tied to a gain": (
                lambda p, x: (x * p.a) @ torch.outer(p.b, p.a) @ p.u,
                {"a": draw(4), "b": draw(4), "u": u},
            ),
            "kron of itself": (lambda p, x: x @ torch.kron(p.m, p.m), {"m": draw(2, 2)}),
            "kron, one inverse": (
                lambda p, x: x @ torch.kron(p.m, torch.linalg.inv(p.m).contiguous()),
                {"m": draw(2, 2)},
            ),
            "inner of views": (
                lambda p, x: torch.einsum("ni,ij->nj", x, p.b.view(4, 3)) @ p.b.view(3, 4),
                {"b": draw(12)},
            ),
            "cross product": (
                lambda p, x: torch.linalg.cross(x @ p.u, x @ p.z) @ p.w,
                {"u": u, "z": draw(4, 3), "w": w},
            ),
            "vecdot": (
                lambda p, x: torch.linalg.vecdot(x @ p.u, x @ p.z)[:, None] * p.r,
                {"u": u, "z": draw(4, 3), "r": draw(2)},
            ),
            "cosine of two maps": (
                lambda p, x: F.cosine_similarity(x @ p.u, x @ p.z, dim=-1, eps=0.0),
                {"u": u, "z": draw(4, 3)},
            ),
            "pairwise distance": (
                lambda p, x: F.pairwise_distance(x @ p.u + p.a, x @ p.z + p.a),
                {"u": u, "z": draw(4, 3), "a": draw(3)},
            ),
            "cdist to centres": (lambda p, x: torch.cdist(x @ p.u, p.c), {"u": u, "c": draw(5, 3)}),
            "cdist of p 1": (
                lambda p, x: torch.cdist(x @ p.u + p.a, p.c + p.a, p=1.0),
                {"u": u, "c": draw(5, 3), "a": draw(3)},
            ),
            "distance to centres, scaled": (
                lambda p, x: torch.cdist(x @ p.u, p.c) * p.k,
                {"u": u, "c": draw(5, 3), "k": draw(1)},
            ),
            "bilinear layer": (
                lambda p, x: F.bilinear(x @ p.u, x @ p.u, p.g, p.a) @ p.w,
                {"u": u, "g": g, "a": draw(3), "w": w},
            ),
        },
        lambda: rows(4),
    )


def indexing() -> Iterator[tuple[str, Case]]:
    """Entries that are taken, put, repeated, reversed and dropped."""
    a, b, c = draw(4, 6), draw(6, 3), draw(6)
    i = torch.tensor([0, 2, 2, -1, 5, 0])
    j = torch.tensor([5, 4, 3, 2, 1, 0])
    mask = torch.tensor([True, False, True, True, False, True])

    def put(h: Tensor, index: Any, value: Any, accumulate: bool = False) -> Tensor:
        return h.clone().index_put(index, value, accumulate)

    yield from forms(
        "index",
        {
            "repeated columns": (lambda p, x: (x @ p.a)[:, i] @ p.b, {"a": a, "b": b}),
            "repeated columns of a weight": (lambda p, x: x @ p.a[:, i] @ p.b, {"a": a, "b": b}),
            "both sides": (lambda p, x: (x @ p.a)[:, i] @ p.b[i], {"a": a, "b": b}),
            "both sides, other orders": (lambda p, x: (x @ p.a)[:, i] @ p.b[j], {"a": a, "b": b}),
            "reversed": (lambda p, x: (x @ p.a).flip(-1) @ p.b, {"a": a, "b": b}),
            "reversed and not": (lambda p, x: (x @ p.a).flip(-1) @ p.b + x @ p.a @ p.b, {"a": a, "b": b}),
            "plus its reverse": (lambda p, x: ((x @ p.a) + (x @ p.a).flip(-1)).relu() @ p.b, {"a": a, "b": b}),
            "minus a permutation of a bias": (
                lambda p, x: (x @ p.a) @ p.b + (p.c - p.c[j]) @ p.b,
                {"a": a, "b": b, "c": c},
            ),
            "minus a permutation": (lambda p, x: (x @ p.a + p.c - p.c[j]) @ p.b, {"a": a, "b": b, "c": c}),
            "roll of bias": (lambda p, x: (x @ p.a + p.c - p.c.roll(2)).relu() @ p.b, {"a": a, "b": b, "c": c}),
            "roll by size": (lambda p, x: (x @ p.a + p.c - p.c.roll(6)).relu() @ p.b, {"a": a, "b": b, "c": c}),
            "roll over two axes": (lambda p, x: x @ p.a.roll((1, 2), (0, 1)).relu() @ p.b, {"a": a, "b": b}),
            "roll flat": (lambda p, x: x @ p.a.roll(5) @ p.b, {"a": a, "b": b}),
            "diff": (lambda p, x: (x @ p.a + p.c).diff(dim=1) @ p.b[1:], {"a": a, "b": b, "c": c}),
            "diff n 2": (lambda p, x: (x @ p.a + p.c).diff(n=2, dim=1) @ p.b[2:], {"a": a, "b": b, "c": c}),
            "diff with append": (
                lambda p, x: (x @ p.a + p.c).diff(dim=1, append=p.e.expand(len(x), 1)) @ p.b,
                {"a": a, "b": b, "c": c, "e": draw(1)},
            ),
            "diff with both": (
                lambda p, x: p.c.diff(prepend=p.c[-1:], append=p.c[:1]) @ p.q + x @ p.a @ p.b,
                {"a": a, "b": b, "c": c, "q": draw(7, 3)},
            ),
            "slices subtracted": (
                lambda p, x: (p.c[2:] - p.c[:-2]) @ p.q + x @ p.a @ p.b,
                {"a": a, "b": b, "c": c, "q": draw(4, 3)},
            ),
            "steps subtracted": (
                lambda p, x: (p.c[::2] - p.c[1::2]) @ p.q + x @ p.a @ p.b,
                {"a": a, "b": b, "c": c, "q": draw(3, 3)},
            ),
            "steps of activations": (
                lambda p, x: ((x @ p.a)[:, ::2] * (x @ p.a)[:, 1::2]) @ p.q,
                {"a": a, "q": draw(3, 3)},
            ),
            "overlapping slices": (lambda p, x: ((x @ p.a)[:, :4] * (x @ p.a)[:, 2:]) @ p.q, {"a": a, "q": draw(4, 3)}),
            "overlapping slices of a weight": (
                lambda p, x: (x @ p.a[:, :4]).relu() @ p.q + (x @ p.a[:, 2:]).relu() @ p.y,
                {"a": a, "q": draw(4, 3), "y": draw(4, 3)},
            ),
            "negative step by flip": (lambda p, x: ((x @ p.a) * (x @ p.a).flip(1)) @ p.b, {"a": a, "b": b}),
            "mask": (lambda p, x: (x @ p.a)[:, mask].relu() @ p.b[mask], {"a": a, "b": b}),
            "mask moved": (lambda p, x: (x @ p.a)[:, mask].relu() @ p.b[:4], {"a": a, "b": b}),
            "masked fill": (lambda p, x: (x @ p.a + p.c).masked_fill(mask, 0.0) @ p.b, {"a": a, "b": b, "c": c}),
            "masked fill one": (lambda p, x: (x @ p.a).masked_fill(mask, 1.0) @ p.b, {"a": a, "b": b}),
            "masked fill trained": (
                lambda p, x: (x @ p.a).masked_fill(mask, p.e) @ p.b,
                {"a": a, "b": b, "e": torch.tensor(0.7)},
            ),
            "masked scatter": (
                lambda p, x: torch.zeros(4, 6).to(x).masked_scatter(mask, p.a).relu().T @ x.T[:, :3],
                {"a": a},
                lambda: rows(4, 3, 3, 5),
            ),
            "masked select": (
                lambda p, x: torch.masked_select(x @ p.a, mask).reshape(-1, 4).relu() @ p.b[:4],
                {"a": a, "b": b},
            ),
            "where on a constant": (
                lambda p, x: torch.where(mask, x @ p.a, x @ p.z) @ p.b,
                {"a": a, "z": draw(4, 6), "b": b},
            ),
            "where on data": (
                lambda p, x: torch.where(x[:, :1] > 0, x @ p.a, x @ p.z) @ p.b,
                {"a": a, "z": draw(4, 6), "b": b},
            ),
            "where on itself": (
                lambda p, x: (lambda h: torch.where(h > 0, h, p.k * h) @ p.b)(x @ p.a),
                {"a": a, "b": b, "k": torch.tensor(0.3)},
            ),
            "where on a threshold": (
                lambda p, x: (lambda h: torch.where(h > 0.5, h, 0.0) @ p.b)(x @ p.a),
                {"a": a, "b": b},
            ),
            "where on a trained threshold": (
                lambda p, x: (lambda h: torch.where(h > p.k, h, 0.0) @ p.b)(x @ p.a),
                {"a": a, "b": b, "k": draw(6)},
            ),
            "put": (
                lambda p, x: (
                    put(
                        x @ p.a,
                        (slice(None), torch.tensor([1, 3]))[1:]
                        and (torch.arange(len(x))[:, None], torch.tensor([1, 3])),
                        x[:, :2],
                    )
                    @ p.b
                ),
                {"a": a, "b": b},
            ),
            "put accumulated": (
                lambda p, x: (
                    put(x @ p.a, (torch.arange(len(x))[:, None], torch.tensor([1, 1])), x[:, :2] @ p.y, True) @ p.b
                ),
                {"a": a, "b": b, "y": draw(2, 2)},
            ),
            "put of a weight": (
                lambda p, x: x @ put(p.a, (torch.tensor([0, 0]), torch.tensor([1, 2])), p.e, True) @ p.b,
                {"a": a, "b": b, "e": draw(2)},
            ),
            "index add": (
                lambda p, x: (x @ p.a).index_add(1, i % 6, x @ p.z, alpha=-0.5) @ p.b,
                {"a": a, "z": draw(4, 6), "b": b},
            ),
            "index add of itself": (lambda p, x: (x @ p.a).index_add(1, i % 6, x @ p.a) @ p.b, {"a": a, "b": b}),
            "index copy": (
                lambda p, x: (x @ p.a).index_copy(1, torch.tensor([4, 1]), x @ p.y).relu() @ p.b,
                {"a": a, "y": draw(4, 2), "b": b},
            ),
            "index fill": (
                lambda p, x: (x @ p.a + p.c).index_fill(1, torch.tensor([4, -1]), 2.0).relu() @ p.b,
                {"a": a, "c": c, "b": b},
            ),
            "take flat": (
                lambda p, x: (
                    x @ p.a.take(torch.tensor([[0, 5, 23], [1, 1, 2], [7, 8, 9], [23, 0, 4]])).relu() @ p.b[:3]
                ),
                {"a": a, "b": b},
            ),
            "take along": (
                lambda p, x: (lambda h: torch.take_along_dim(h, h.argsort(1), 1) @ p.b)(x @ p.a),
                {"a": a, "b": b},
            ),
            "take along by data": (
                lambda p, x: torch.take_along_dim(x @ p.a, x.argsort(1)[:, :3], 1) @ p.b[:3],
                {"a": a, "b": b},
            ),
            "gather by own maximum": (
                lambda p, x: (lambda h: h.gather(1, h.argmax(1, keepdim=True)) * p.e)(x @ p.a),
                {"a": a, "e": draw(3)},
            ),
            "gather weight rows by data": (lambda p, x: p.a[x.argmax(1)].relu() @ p.b, {"a": a, "b": b}),
            "rows by rank": (lambda p, x: (p.a[x.argsort(1)] * x[..., None]).sum(1).relu() @ p.b, {"a": a, "b": b}),
            "sorted": (lambda p, x: (x @ p.a).sort(1).values @ p.b, {"a": a, "b": b}),
            "sorted, biased": (
                lambda p, x: (x @ p.a + p.c).sort(1, descending=True).values.diff(dim=1) @ p.b[1:],
                {"a": a, "b": b, "c": c},
            ),
            "top two": (lambda p, x: (x @ p.a).topk(2, dim=1).values @ p.b[:2], {"a": a, "b": b}),
            "kth": (lambda p, x: (x @ p.a).kthvalue(2, dim=1).values[:, None] * p.e, {"a": a, "e": draw(3)}),
            "median": (lambda p, x: (x @ p.a + p.c).median(1).values[:, None] * p.e, {"a": a, "c": c, "e": draw(3)}),
            "quantile": (lambda p, x: (x @ p.a).quantile(0.3, dim=1)[:, None] * p.e, {"a": a, "e": draw(3)}),
            "mode of rounding": (
                lambda p, x: (x @ p.a).round(decimals=1).mode(1).values[:, None] * p.e,
                {"a": a, "e": draw(3)},
            ),
            "unique rows count": (lambda p, x: (x @ p.a).relu() @ p.b * len(torch.unique(x > 0)), {"a": a, "b": b}),
            "tril of a weight": (lambda p, x: x @ p.s.tril() @ p.a.relu() @ p.b, {"s": draw(4, 4), "a": a, "b": b}),
            "tril below": (lambda p, x: x @ p.s.tril(-1) @ p.a @ p.b, {"s": draw(4, 4), "a": a, "b": b}),
            "triu and transpose": (
                lambda p, x: x @ (p.s.triu() + p.s.triu(1).T) @ p.a @ p.b,
                {"s": draw(4, 4), "a": a, "b": b},
            ),
            "diagonal taken": (lambda p, x: (x * p.s.diagonal()) @ p.a @ p.b, {"s": draw(4, 4), "a": a, "b": b}),
            "diagonal off": (
                lambda p, x: (x[:, :3] * p.s.diagonal(-1)) @ p.a[:3] @ p.b,
                {"s": draw(4, 4), "a": a, "b": b},
            ),
            "diagonal put": (
                lambda p, x: x @ torch.diagonal_scatter(p.s, p.d) @ p.a @ p.b,
                {"s": draw(4, 4), "d": draw(4), "a": a, "b": b},
            ),
            "slice put": (
                lambda p, x: torch.slice_scatter(x @ p.a, x @ p.y, 1, 1, 6, 2).relu() @ p.b,
                {"a": a, "y": draw(4, 3), "b": b},
            ),
            "select put": (
                lambda p, x: torch.select_scatter(x @ p.a, x @ p.y, 1, -2).relu() @ p.b,
                {"a": a, "y": draw(4), "b": b},
            ),
            "unfold windows": (lambda p, x: (x @ p.a).unfold(1, 3, 2).relu().sum(-1) @ p.b[:2], {"a": a, "b": b}),
            "unfold of a weight": (lambda p, x: x @ p.c.unfold(0, 3, 1)[:, :].relu() @ p.b[:3], {"c": c, "b": b}),
            "toeplitz": (lambda p, x: x @ p.e.as_strided((4, 4), (1, 1)) @ p.a @ p.b, {"e": draw(7), "a": a, "b": b}),
            "circulant": (
                lambda p, x: x @ torch.stack([p.d.roll(k) for k in range(4)]) @ p.a @ p.b,
                {"d": draw(4), "a": a, "b": b},
            ),
            "repeat": (lambda p, x: (x @ p.a).repeat(1, 2).relu() @ p.q, {"a": a, "q": draw(12, 3)}),
            "repeat interleave": (
                lambda p, x: (x @ p.a).repeat_interleave(2, 1).relu() @ p.q,
                {"a": a, "q": draw(12, 3)},
            ),
            "repeat interleave by counts": (
                lambda p, x: (x @ p.a).repeat_interleave(torch.tensor([1, 0, 3, 1, 1, 0]), 1).relu() @ p.b,
                {"a": a, "b": b},
            ),
            "tile and fold back": (lambda p, x: ((x @ p.a).tile(1, 2).view(-1, 6, 2).sum(-1)) @ p.b, {"a": a, "b": b}),
            "cat with itself": (
                lambda p, x: torch.cat((x @ p.a, (x @ p.a).relu()), 1) @ p.q,
                {"a": a, "q": draw(12, 3)},
            ),
            "stack and choose": (
                lambda p, x: torch.stack((x @ p.a, x @ p.z)).amax(0) @ p.b,
                {"a": a, "z": draw(4, 6), "b": b},
            ),
            "bucketed bias": (
                lambda p, x: x @ p.a @ p.b + p.e[torch.bucketize(x[:, 0], torch.tensor([-1.0, 0.0, 1.0]).to(x))],
                {"a": a, "b": b, "e": draw(4, 3)},
            ),
            "embedding bag sum": (
                lambda p, x: F.embedding_bag((x.abs() * 3).long().clamp(max=3), p.a, mode="sum").relu() @ p.b,
                {"a": a, "b": b},
            ),
            "embedding bag max": (
                lambda p, x: F.embedding_bag((x.abs() * 3).long().clamp(max=3), p.a, mode="max") @ p.b,
                {"a": a, "b": b},
            ),
            "embedding bag mean, padded": (
                lambda p, x: F.embedding_bag((x.abs() * 3).long().clamp(max=3), p.a, mode="mean", padding_idx=0) @ p.b,
                {"a": a, "b": b},
            ),
            "embedding bag weighted": (
                lambda p, x: (
                    F.embedding_bag((x.abs() * 3).long().clamp(max=3), p.a, mode="sum", per_sample_weights=x) @ p.b
                ),
                {"a": a, "b": b},
            ),
            "embedding, max norm": (
                lambda p, x: (
                    F.embedding((x.abs() * 3).long().clamp(max=3), F.normalize(p.a, dim=1, eps=0.0)).sum(1) @ p.b
                ),
                {"a": a, "b": b},
            ),
            "ellipsis none": (lambda p, x: (x @ p.a)[..., None, :].expand(-1, 2, -1).sum(1) @ p.b, {"a": a, "b": b}),
            "permuted heads": (
                lambda p, x: (x @ p.a).view(-1, 2, 3).transpose(1, 2).flatten(1).relu() @ p.b,
                {"a": a, "b": b},
            ),
            "heads summed": (
                lambda p, x: (x @ p.a).view(-1, 2, 3).sum(1) @ p.b[:3] + (x @ p.a) @ p.b,
                {"a": a, "b": b},
            ),
            "pixel shuffle": (
                lambda p, x: F.pixel_shuffle((x @ p.y).view(-1, 8, 1, 1), 2).flatten(1).relu() @ p.q,
                {"y": draw(4, 8), "q": draw(8, 3)},
            ),
            "cartesian": (
                lambda p, x: x @ torch.cartesian_prod(p.d[:2], p.d[2:]) @ p.w2,
                {"d": draw(4), "w2": draw(2, 3)},
            ),
            "combinations": (lambda p, x: x @ torch.combinations(p.d, 2)[:4] @ p.w2, {"d": draw(4), "w2": draw(2, 3)}),
            "meshgrid": (
                lambda p, x: x @ (lambda g: g[0] * g[1])(torch.meshgrid(p.d, p.e, indexing="ij")),
                {"d": draw(4), "e": draw(3)},
            ),
            "vander": (lambda p, x: x @ torch.vander(p.d, 3) @ p.t, {"d": draw(4), "t": draw(3, 3)}),
            "one hot rows": (
                lambda p, x: F.one_hot((x.abs() * 2).long().clamp(max=3), 4).to(x).sum(1) @ p.a.relu() @ p.b,
                {"a": a, "b": b},
            ),
            "searchsorted": (
                lambda p, x: (
                    p.e[torch.searchsorted(torch.tensor([-1.0, 0.0, 1.0]).to(x), x[:, 0].contiguous())].relu() @ p.t
                ),
                {"e": draw(4, 3), "t": draw(3, 3)},
            ),
        },
        lambda: rows(4),
    )


def scatters() -> Iterator[tuple[str, Case]]:
    """Every mode of scattered and segmented reductions, with and without what was there."""
    index = torch.tensor([0, 1, 1, 2, 0, 2])
    for mode in ("sum", "prod", "mean", "amax", "amin"):
        for include in (True, False):
            for form in ("biased", "relu", "plain"):

                def aggregate(p: Any, x: Tensor, mode: str = mode, include: bool = include, form: str = form) -> Tensor:
                    h = x @ p.a + (p.c if form == "biased" else 0)
                    h = h.relu() if form == "relu" else h
                    zero = torch.zeros(len(x), 3).to(x) if form != "biased" else torch.ones(len(x), 3).to(x)
                    result = zero.scatter_reduce(1, index.expand(len(x), -1), h, mode, include_self=include)
                    return result @ p.b

                parameters = {"a": draw(4, 6), "b": draw(3, 2)} | ({"c": draw(1)} if form == "biased" else {})
                yield f"scatter: {mode} {form} {include}", (Function(aggregate, **parameters), rows(4))

        def rows_of(p: Any, x: Tensor, mode: str = mode) -> Tensor:
            h = (x @ p.a + p.c)[:6]
            result = (
                torch.zeros(3, 4).to(x).index_reduce(0, index, h, {"sum": "mean"}.get(mode, mode), include_self=False)
            )
            return result @ p.b

        yield f"scatter: index_reduce {mode}", (Function(rows_of, a=draw(4, 4), c=draw(4), b=draw(4, 2)), rows(4, 6, 6))
    for mode in ("sum", "mean", "max", "min", "prod"):

        def segments(p: Any, x: Tensor, mode: str = mode) -> Tensor:
            return torch.segment_reduce((x @ p.a)[:6], mode, lengths=torch.tensor([2, 1, 3]), unsafe=True) @ p.b

        yield f"scatter: segments {mode}", (Function(segments, a=draw(4, 4), b=draw(4, 2)), rows(4, 6, 6))
    yield from forms(
        "scatter",
        {
            "add into a bias": (
                lambda p, x: p.c.expand(len(x), 3).scatter_add(1, index.expand(len(x), -1), x @ p.a) @ p.b,
                {"c": draw(3), "a": draw(4, 6), "b": draw(3, 2)},
            ),
            "written twice": (
                lambda p, x: (
                    torch.zeros(len(x), 3).to(x).scatter(1, torch.tensor([[0, 1]]).expand(len(x), -1), x @ p.a).relu()
                    @ p.b
                ),
                {"a": draw(4, 2), "b": draw(3, 2)},
            ),
            "scatter multiply": (
                lambda p, x: (
                    (x @ p.z).scatter(1, torch.tensor([[0, 2]]).expand(len(x), -1), x @ p.a, reduce="multiply") @ p.b
                ),
                {"z": draw(4, 3), "a": draw(4, 2), "b": draw(3, 2)},
            ),
            "softmax over neighbours": (_neighbour_softmax, {"a": draw(4, 6), "b": draw(6, 2), "c": draw(1)}),
            "put of products": (
                lambda p, x: (
                    torch.zeros(len(x), 3)
                    .to(x)
                    .scatter_reduce(1, index.expand(len(x), -1), (x @ p.a).exp(), "prod", include_self=False)
                    .log()
                    @ p.b
                ),
                {"a": draw(4, 6) / 3, "b": draw(3, 2)},
            ),
        },
        lambda: rows(4),
    )


def _neighbour_softmax(p: Any, x: Tensor) -> Tensor:
    index = torch.tensor([0, 1, 1, 2, 0, 2]).expand(len(x), -1)
    score = x @ p.a + p.c
    top = torch.zeros(len(x), 3).to(x).scatter_reduce(1, index, score, "amax", include_self=False)
    e = (score - top.gather(1, index)).exp()
    total = torch.zeros(len(x), 3).to(x).scatter_add(1, index, e)
    return (e / total.gather(1, index)) @ p.b


def complexes() -> Iterator[tuple[str, Case]]:
    """Complex numbers, of size one among them, and transforms."""
    r, i = draw(4, 3), draw(4, 3)
    two = {"r": r, "i": i}

    def z(p: Any, x: Tensor) -> Tensor:
        return torch.complex(x @ p.r, x @ p.i)

    def both(value: Tensor) -> Tensor:
        return torch.view_as_real(value).flatten(1)

    q = draw(6, 2)
    cd = lambda *shape: torch.randn(*shape, 2)  # noqa: E731
    yield from forms(
        "complex",
        {
            "phase": (lambda p, x: both(z(p, x) / z(p, x).abs()) @ p.q, {**two, "q": q}),
            "sign": (lambda p, x: both(torch.sgn(z(p, x))) @ p.q, {**two, "q": q}),
            "angle": (lambda p, x: z(p, x).angle() @ p.w, {**two, "w": draw(3, 2)}),
            "angle difference": (
                lambda p, x: (z(p, x)[:, 1:] * z(p, x)[:, :-1].conj()).angle() @ p.w,
                {**two, "w": draw(2, 2)},
            ),
            "modulus": (lambda p, x: z(p, x).abs() @ p.w, {**two, "w": draw(3, 2)}),
            "modulus squared": (lambda p, x: (z(p, x) * z(p, x).conj()).real @ p.w, {**two, "w": draw(3, 2)}),
            "square": (lambda p, x: both(z(p, x).square()) @ p.q, {**two, "q": q}),
            "square over modulus": (lambda p, x: both(z(p, x).square() / z(p, x).abs()) @ p.q, {**two, "q": q}),
            "exponential": (lambda p, x: both((1j * (x @ p.r)).exp()) @ p.q, {"r": r, "q": q}),
            "polar": (lambda p, x: both(torch.polar(x @ p.r, x @ p.i)) @ p.q, {**two, "q": q}),
            "polar, biased angle": (
                lambda p, x: both(torch.polar((x @ p.r).abs(), x @ p.i + p.c)) @ p.q,
                {**two, "c": draw(3), "q": q},
            ),
            "polar read by modulus": (
                lambda p, x: (torch.polar((x @ p.r), x @ p.i + p.c)).abs() @ p.w,
                {**two, "c": draw(3), "w": draw(3, 2)},
            ),
            "conjugate product": (
                lambda p, x: both(z(p, x) * torch.view_as_complex(p.k).conj()) @ p.q,
                {**two, "k": cd(3), "q": q},
            ),
            "complex reader": (lambda p, x: both(z(p, x) @ torch.view_as_complex(p.k)), {**two, "k": cd(3, 2)}),
            "complex reader, real part": (
                lambda p, x: (z(p, x) @ torch.view_as_complex(p.k)).real,
                {**two, "k": cd(3, 2)},
            ),
            "complex reader, modulus": (
                lambda p, x: (z(p, x) @ torch.view_as_complex(p.k)).abs(),
                {**two, "k": cd(3, 2)},
            ),
            "complex reader of phase": (
                lambda p, x: both((z(p, x) / z(p, x).abs()) @ torch.view_as_complex(p.k)),
                {**two, "k": cd(3, 2)},
            ),
            "modrelu": (
                lambda p, x: both(torch.view_as_complex(_modrelu(z(p, x), p.c)) @ torch.view_as_complex(p.k)),
                {**two, "c": draw(3), "k": cd(3, 2)},
            ),
            "modrelu without bias": (
                lambda p, x: both(
                    torch.view_as_complex(_modrelu(z(p, x), torch.zeros(3).to(x))) @ torch.view_as_complex(p.k)
                ),
                {**two, "k": cd(3, 2)},
            ),
            "crelu": (
                lambda p, x: both(torch.complex(z(p, x).real.relu(), z(p, x).imag.relu()) @ torch.view_as_complex(p.k)),
                {**two, "k": cd(3, 2)},
            ),
            "cardioid": (
                lambda p, x: both((0.5 * (1 + z(p, x).angle().cos()) * z(p, x)) @ torch.view_as_complex(p.k)),
                {**two, "k": cd(3, 2)},
            ),
            "hermitian product": (
                lambda p, x: (z(p, x)[:, :, None] * z(p, x).conj()[:, None]).imag.flatten(1) @ p.y,
                {**two, "y": draw(9, 2)},
            ),
            "unit pair": (
                lambda p, x: F.normalize(torch.stack((x @ p.r, x @ p.i), -1), dim=-1, eps=0.0).flatten(1) @ p.q,
                {**two, "q": q},
            ),
            "rotate by learned unit": (
                lambda p, x: both(z(p, x) * (lambda k: k / k.abs())(torch.view_as_complex(p.k))) @ p.q,
                {**two, "k": cd(3), "q": q},
            ),
            "rotate by learned unit, read": (
                lambda p, x: both((z(p, x) * torch.sgn(torch.view_as_complex(p.k))) @ torch.view_as_complex(p.m)),
                {**two, "k": cd(3), "m": cd(3, 2)},
            ),
            "rotate by learned angle": (
                lambda p, x: both((z(p, x) * torch.polar(torch.ones(3).to(x), p.c)) @ torch.view_as_complex(p.m)),
                {**two, "c": draw(3), "m": cd(3, 2)},
            ),
            "powers of a pole": (
                lambda p, x: (
                    (
                        torch.view_as_complex(p.k)[:, None] ** torch.arange(4).to(x)
                        * torch.view_as_complex(p.m)[:, None]
                    ).real.sum(0)
                    * x
                ),
                {"k": cd(3) / 2, "m": cd(3)},
            ),
            "powers of a unit pole": (
                lambda p, x: (
                    (
                        torch.sgn(torch.view_as_complex(p.k))[:, None] ** torch.arange(4).to(x)
                        * torch.view_as_complex(p.m)[:, None]
                    ).real.sum(0)
                    * x
                ),
                {"k": cd(3), "m": cd(3)},
            ),
            "complex eigenvalues": (lambda p, x: torch.linalg.eigvals(p.s).real.sum() * x, {"s": draw(4, 4)}),
            "determinant of a complex": (
                lambda p, x: torch.linalg.det(torch.view_as_complex(p.s)).abs() * x,
                {"s": cd(3, 3)},
            ),
            "log modulus": (
                lambda p, x: (z(p, x) * torch.view_as_complex(p.k)).abs().log() @ p.w,
                {**two, "k": cd(3), "w": draw(3, 2)},
            ),
            "complex softmax of modulus": (lambda p, x: z(p, x).abs().softmax(-1) @ p.w, {**two, "w": draw(3, 2)}),
            "complex log": (
                lambda p, x: both((z(p, x) * torch.view_as_complex(p.k)).log()) @ p.q,
                {**two, "k": cd(3), "q": q},
            ),
            "quotient": (lambda p, x: both(z(p, x) / torch.view_as_complex(p.k)) @ p.q, {**two, "k": cd(3), "q": q}),
            "quotient of two maps": (
                lambda p, x: both(z(p, x) / torch.complex(x @ p.m, x @ p.n)) @ p.q,
                {**two, "m": draw(4, 3), "n": draw(4, 3), "q": q},
            ),
            "quaternion": (_quaternion, {"a": draw(4, 4), "h": draw(4), "b": draw(4, 2)}),
            "unit quaternion": (
                lambda p, x: _rotated(x[:, :3] @ p.a, F.normalize(p.h, dim=0, eps=0.0)) @ p.b,
                {"a": draw(3, 3), "h": draw(4), "b": draw(3, 2)},
            ),
            "quaternion, not unit": (
                lambda p, x: _rotated(x[:, :3] @ p.a, p.h) @ p.b,
                {"a": draw(3, 3), "h": draw(4), "b": draw(3, 2)},
            ),
            "spectrum": (lambda p, x: both(torch.fft.rfft(x @ p.a)) @ p.y, {"a": draw(4, 6), "y": draw(8, 2)}),
            "power spectrum": (
                lambda p, x: torch.fft.rfft(x @ p.a + p.c).abs().square() @ p.y,
                {"a": draw(4, 6), "c": draw(6), "y": draw(4, 2)},
            ),
            "spectrum of one level": (
                lambda p, x: torch.fft.rfft(x @ p.a + p.c)[:, 1:].abs() @ p.y,
                {"a": draw(4, 6), "c": draw(1), "y": draw(3, 2)},
            ),
            "phase of a spectrum": (
                lambda p, x: torch.fft.rfft(x @ p.a).angle()[:, 1:3] @ p.y,
                {"a": draw(4, 6), "y": draw(2, 2)},
            ),
            "filter in frequency": (
                lambda p, x: torch.fft.irfft(torch.fft.rfft(x @ p.a) * torch.view_as_complex(p.k), n=6) @ p.b,
                {"a": draw(4, 6), "k": cd(4), "b": draw(6, 2)},
            ),
            "real filter in frequency": (
                lambda p, x: torch.fft.irfft(torch.fft.rfft(x @ p.a) * p.k, n=6) @ p.b,
                {"a": draw(4, 6), "k": draw(4), "b": draw(6, 2)},
            ),
            "unit filter in frequency": (
                lambda p, x: (
                    torch.fft.irfft(torch.fft.rfft(x @ p.a) * torch.sgn(torch.view_as_complex(p.k)), n=6) @ p.b
                ),
                {"a": draw(4, 6), "k": cd(4), "b": draw(6, 2)},
            ),
            "odd length inverse": (
                lambda p, x: torch.fft.irfft(torch.fft.rfft(x @ p.a) * torch.view_as_complex(p.k), n=5) @ p.b,
                {"a": draw(4, 6), "k": cd(4), "b": draw(5, 2)},
            ),
            "hermitian transform": (
                lambda p, x: torch.fft.hfft(torch.complex(x @ p.r, x @ p.i), n=4) @ p.b,
                {**two, "b": draw(4, 2)},
            ),
            "two dimensions": (
                lambda p, x: (
                    torch.fft.ifft2(torch.fft.fft2((x @ p.a).view(-1, 2, 3)) * torch.view_as_complex(p.k)).real.flatten(
                        1
                    )
                    @ p.b
                ),
                {"a": draw(4, 6), "k": cd(2, 3), "b": draw(6, 2)},
            ),
            "mixed over tokens": (
                lambda p, x: torch.fft.fft(torch.fft.fft(x @ p.a, dim=-1), dim=0).real @ p.b,
                {"a": draw(4, 6), "b": draw(6, 2)},
            ),
            "orthonormal": (
                lambda p, x: torch.fft.fft(x @ p.a, norm="ortho").imag @ p.b,
                {"a": draw(4, 6), "b": draw(6, 2)},
            ),
            "shifted spectrum": (
                lambda p, x: torch.fft.fftshift(torch.fft.fft(x @ p.a + p.c)).abs() @ p.b,
                {"a": draw(4, 6), "c": draw(1), "b": draw(6, 2)},
            ),
            "short time": (
                lambda p, x: (
                    torch.stft(x @ p.a, 4, 2, window=torch.ones(4).to(x), return_complex=True).abs().flatten(1) @ p.b
                ),
                {"a": draw(4, 8), "b": draw(15, 2)},
            ),
            "learned window": (
                lambda p, x: torch.stft(x @ p.a, 4, 2, window=p.k, return_complex=True).abs().flatten(1) @ p.b,
                {"a": draw(4, 8), "k": draw(4), "b": draw(15, 2)},
            ),
            "analytic signal": (
                lambda p, x: (
                    torch.fft.ifft(torch.fft.fft(x @ p.a) * torch.tensor([1, 2, 2, 1, 0, 0]).to(x)).abs() @ p.b
                ),
                {"a": draw(4, 6), "b": draw(6, 2)},
            ),
            "convolution theorem": (
                lambda p, x: torch.fft.irfft(torch.fft.rfft(x @ p.a, n=8) * torch.fft.rfft(p.k, n=8), n=8) @ p.b,
                {"a": draw(4, 6), "k": draw(3), "b": draw(8, 2)},
            ),
            "correlation with itself": (
                lambda p, x: torch.fft.irfft(torch.fft.rfft(x @ p.a).abs().square(), n=6) @ p.b,
                {"a": draw(4, 6), "b": draw(6, 2)},
            ),
            "cross spectrum": (
                lambda p, x: (torch.fft.rfft(x @ p.a) * torch.fft.rfft(x @ p.z).conj()).angle()[:, 1:3] @ p.b,
                {"a": draw(4, 6), "z": draw(4, 6), "b": draw(2, 2)},
            ),
            "coherence": (_coherence, {"a": draw(4, 6), "z": draw(4, 6), "b": draw(4, 2)}),
        },
        lambda: rows(4),
    )


def _modrelu(z: Tensor, bias: Tensor) -> Tensor:
    size = z.abs()
    return torch.view_as_real(z * ((size + bias).relu() / size))


def _quaternion(p: Any, x: Tensor) -> Tensor:
    a, b, c, d = (x @ p.a).unbind(-1)
    e, f, g, h = p.h
    rotated = (
        a * e - b * f - c * g - d * h,
        a * f + b * e + c * h - d * g,
        a * g - b * h + c * e + d * f,
        a * h + b * g - c * f + d * e,
    )
    return torch.stack(rotated, -1) @ p.b


def _rotated(v: Tensor, q: Tensor) -> Tensor:
    axis = q[1:].expand_as(v)
    t = 2 * torch.linalg.cross(axis, v)
    return v + q[0] * t + torch.linalg.cross(axis, t)


def _coherence(p: Any, x: Tensor) -> Tensor:
    f, g = torch.fft.rfft(x @ p.a), torch.fft.rfft(x @ p.z)
    return ((f * g.conj()).mean(0).abs() / (f.abs().square().mean(0) * g.abs().square().mean(0)).sqrt()) @ p.b


def images(size: int = 6, channels: int = 2) -> list[tuple[Any, ...]]:
    """Small images, with other batches, sizes of entries and heights."""
    return [
        (draw(3, channels, size, size),),
        (5 * draw(1, channels, size, size) + 2,),
        (draw(2, channels, size + 2, size + 4),),
    ]


def signals(length: int = 9, channels: int = 2) -> list[tuple[Any, ...]]:
    """Sequences of channels with other batches and lengths."""
    return [(draw(3, channels, length),), (4 * draw(1, channels, length) - 2,), (draw(2, channels, length + 4),)]


def convolved() -> Iterator[tuple[str, Case]]:
    """Convolutions with paddings that see the edge, under norms, and what samples images."""
    for name, conv in {
        "same zeros": nn.Conv1d(4, 4, 4, padding="same"),
        "same reflect": nn.Conv1d(4, 4, 3, padding="same", padding_mode="reflect"),
        "valid dilated": nn.Conv1d(4, 4, 3, padding="valid", dilation=2),
        "circular depthwise": nn.Conv1d(4, 4, 3, padding=1, padding_mode="circular", groups=4),
        "zeros depthwise": nn.Conv1d(4, 4, 3, padding=1, groups=4),
        "replicate wide": nn.Conv1d(4, 4, 5, padding=2, padding_mode="replicate"),
        "transposed": nn.ConvTranspose1d(4, 4, 3),
        "transposed strided": nn.ConvTranspose1d(4, 4, 3, stride=2, padding=1, output_padding=1),
        "transposed stride is kernel": nn.ConvTranspose1d(4, 4, 2, stride=2),
        "transposed grouped": nn.ConvTranspose1d(4, 4, 2, stride=2, groups=2),
        "transposed dilated": nn.ConvTranspose1d(4, 4, 3, dilation=2, groups=4),
        "kernel one, padded": nn.Conv1d(4, 4, 1, padding=1),
        "kernel one, strided": nn.Conv1d(4, 4, 1, stride=2),
    }.items():
        for end_name, end in {
            "bare": nn.Identity(),
            "relu": nn.ReLU(),
            "instance": nn.InstanceNorm1d(4, eps=0.0),
            "batch": nn.BatchNorm1d(4),
            "batch evaluated": nn.BatchNorm1d(4).eval(),
            "group": nn.GroupNorm(2, 4),
        }.items():
            first = nn.Conv1d(2, 4, 1)
            model = nn.Sequential(first, _copied(conv), _copied(end), nn.Conv1d(4, 2, 1))
            yield f"convolved: {name}, {end_name}", (model, signals())
    a, b = draw(4, 2, 3, 3), draw(2, 4, 3, 3)
    yield from forms(
        "convolved",
        {
            "then transposed, one kernel": (lambda p, x: F.conv_transpose2d(F.conv2d(x, p.a).relu(), p.a), {"a": a}),
            "then transposed, two kernels": (
                lambda p, x: F.conv_transpose2d(F.conv2d(x, p.a).relu(), p.z),
                {"a": a, "z": draw(4, 2, 3, 3)},
            ),
            "then flipped": (lambda p, x: F.conv2d(F.conv2d(x, p.a), p.a.flip(2, 3).transpose(0, 1)), {"a": a}),
            "zero padded level": (
                lambda p, x: F.conv2d(F.pad(F.conv2d(x, p.a, p.c), (1, 1, 1, 1)), p.b),
                {"a": a, "c": draw(4), "b": b},
            ),
            "level padded by trained": (
                lambda p, x: F.conv2d(torch.cat((F.conv2d(x, p.a), p.c.expand(len(x), 4, 1, x.shape[3] - 2)), 2), p.b),
                {"a": a, "c": draw(1, 4, 1, 1), "b": b},
            ),
            "averaged, counted pads": (
                lambda p, x: F.conv2d(F.avg_pool2d(F.conv2d(x, p.a, p.c), 3, 2, 1), p.b[..., :1, :1]),
                {"a": a, "c": draw(4), "b": b},
            ),
            "averaged, uncounted pads": (
                lambda p, x: (
                    F.instance_norm(F.avg_pool2d(F.conv2d(x, p.a, p.c), 3, 2, 1, count_include_pad=False)) * p.e
                ),
                {"a": a, "c": draw(4), "e": draw(4, 1, 1)},
            ),
            "averaged, counted pads, normed": (
                lambda p, x: F.instance_norm(F.avg_pool2d(F.conv2d(x, p.a, p.c), 3, 2, 1)) * p.e,
                {"a": a, "c": draw(4), "e": draw(4, 1, 1)},
            ),
            "maximum, padded, level": (
                lambda p, x: F.instance_norm(F.max_pool2d(F.conv2d(x, p.a, p.c), 3, 2, 1)) * p.e,
                {"a": a, "c": draw(4), "e": draw(4, 1, 1)},
            ),
            "maximum, ceil": (
                lambda p, x: F.max_pool2d(F.conv2d(x, p.a, p.c), 2, 2, ceil_mode=True).relu() * p.e,
                {"a": a, "c": draw(4), "e": draw(4, 1, 1)},
            ),
            "unpooled": (
                lambda p, x: F.max_unpool2d(*F.max_pool2d(F.conv2d(x, p.a), 2, return_indices=True), [2, 2]) * p.e,
                {"a": a, "e": draw(4, 1, 1)},
            ),
            "unpooled level": (
                lambda p, x: (
                    F.instance_norm(
                        F.max_unpool2d(*F.max_pool2d(F.conv2d(x, p.a, p.c), 2, return_indices=True), [2, 2])
                    )
                    * p.e
                ),
                {"a": a, "c": draw(4), "e": draw(4, 1, 1)},
            ),
            "power pooled": (lambda p, x: F.lp_pool2d(F.conv2d(x, p.a), 2.0, 2) * p.e, {"a": a, "e": draw(4, 1, 1)}),
            "power pooled of three": (
                lambda p, x: F.lp_pool2d(F.conv2d(x, p.a).relu() + 0.1, 3.0, 2) * p.e,
                {"a": a, "e": draw(4, 1, 1)},
            ),
            "adaptive uneven": (
                lambda p, x: F.adaptive_avg_pool2d(F.conv2d(x, p.a, p.c), (3, 3)).flatten(1) @ p.y,
                {"a": a, "c": draw(4), "y": draw(36, 2)},
            ),
            "adaptive maximum": (
                lambda p, x: F.adaptive_max_pool2d(F.conv2d(x, p.a, p.c), 2).flatten(1) @ p.y,
                {"a": a, "c": draw(4), "y": draw(16, 2)},
            ),
            "folded": (
                lambda p, x: F.fold(F.unfold(F.conv2d(x, p.a, p.c), 2), (x.shape[2] - 2, x.shape[3] - 2), 2) * p.e,
                {"a": a, "c": draw(4), "e": draw(4, 1, 1)},
            ),
            "unfolded, padded": (
                lambda p, x: F.unfold(F.conv2d(x, p.a, p.c), 3, padding=1).transpose(1, 2) @ p.y,
                {"a": a, "c": draw(4), "y": draw(36, 2)},
            ),
            "nearest": (
                lambda p, x: F.instance_norm(F.interpolate(F.conv2d(x, p.a, p.c), scale_factor=2)) * p.e,
                {"a": a, "c": draw(4), "e": draw(4, 1, 1)},
            ),
            "bilinear, corners": (
                lambda p, x: (
                    F.instance_norm(
                        F.interpolate(F.conv2d(x, p.a, p.c), size=(7, 5), mode="bilinear", align_corners=True)
                    )
                    * p.e
                ),
                {"a": a, "c": draw(4), "e": draw(4, 1, 1)},
            ),
            "bicubic": (
                lambda p, x: F.interpolate(F.conv2d(x, p.a, p.c), scale_factor=1.5, mode="bicubic").relu() * p.e,
                {"a": a, "c": draw(4), "e": draw(4, 1, 1)},
            ),
            "bicubic then square": (
                lambda p, x: F.interpolate(F.conv2d(x, p.a), scale_factor=1.5, mode="bicubic").square() * p.e,
                {"a": a, "e": draw(4, 1, 1)},
            ),
            "antialiased": (
                lambda p, x: (
                    F.interpolate(F.conv2d(x, p.a, p.c), size=(3, 3), mode="bilinear", antialias=True).relu() * p.e
                ),
                {"a": a, "c": draw(4), "e": draw(4, 1, 1)},
            ),
            "reflect padded": (
                lambda p, x: (
                    F.instance_norm(F.conv2d(F.pad(F.conv2d(x, p.a, p.c), (2, 2, 2, 2), "reflect"), p.b)) * p.e
                ),
                {"a": a, "c": draw(4), "b": b, "e": draw(2, 1, 1)},
            ),
            "constant padded with one": (
                lambda p, x: F.conv2d(F.pad(F.conv2d(x, p.a), (1, 1), value=1.0), p.b),
                {"a": a, "b": b},
            ),
            "negative padding": (
                lambda p, x: F.conv2d(F.pad(F.conv2d(x, p.a), (-1, 1)), p.b[..., :2]),
                {"a": a, "b": b},
            ),
            "local response": (
                lambda p, x: F.local_response_norm(F.conv2d(x, p.a), 2, k=0.0) * p.e,
                {"a": a, "e": draw(4, 1, 1)},
            ),
            "local response with k": (
                lambda p, x: F.local_response_norm(F.conv2d(x, p.a), 2, k=1.0) * p.e,
                {"a": a, "e": draw(4, 1, 1)},
            ),
            "separable kernel": (
                lambda p, x: F.conv2d(x, torch.einsum("oi,h,w->oihw", p.m, p.h, p.v)).relu() * p.e,
                {"m": draw(4, 2), "h": draw(3), "v": draw(3), "e": draw(4, 1, 1)},
            ),
            "separable, one vector": (
                lambda p, x: F.conv2d(x, torch.einsum("oi,h,w->oihw", p.m, p.h, p.h)).relu() * p.e,
                {"m": draw(4, 2), "h": draw(3), "e": draw(4, 1, 1)},
            ),
            "kernel standardised": (
                lambda p, x: (
                    F.conv2d(x, (p.a - p.a.mean((1, 2, 3), keepdim=True)) / p.a.std((1, 2, 3), keepdim=True)).relu()
                    * p.e
                ),
                {"a": a, "e": draw(4, 1, 1)},
            ),
            "kernel from a mask": (
                lambda p, x: F.conv2d(x, p.a * torch.ones(3, 3).tril().to(x), p.c).relu() * p.e,
                {"a": a, "c": draw(4), "e": draw(4, 1, 1)},
            ),
            "dynamic kernel": (
                lambda p, x: torch.stack([F.conv2d(v[None], (p.a * v.mean()))[0] for v in x]).relu() * p.e,
                {"a": a, "e": draw(4, 1, 1)},
            ),
            "deformed": (_sampled("bilinear", "zeros", False), {"a": a, "o": draw(2, 4) / 3, "e": draw(4, 1, 1)}),
            "sampled, border": (
                _sampled("bilinear", "border", True),
                {"a": a, "o": draw(2, 4) / 3, "e": draw(4, 1, 1)},
            ),
            "sampled, reflected": (
                _sampled("bilinear", "reflection", True),
                {"a": a, "o": draw(2, 4) / 3, "e": draw(4, 1, 1)},
            ),
            "sampled, nearest": (
                _sampled("nearest", "zeros", False),
                {"a": a, "o": draw(2, 4) / 3, "e": draw(4, 1, 1)},
            ),
            "sampled, bicubic": (
                _sampled("bicubic", "border", False),
                {"a": a, "o": draw(2, 4) / 3, "e": draw(4, 1, 1)},
            ),
            "sampled with a level": (
                lambda p, x: (
                    F.instance_norm(
                        F.grid_sample(F.conv2d(x, p.a, p.c), _grid(p.t, x), padding_mode="border", align_corners=False)
                    )
                    * p.e
                ),
                {"a": a, "c": draw(4), "t": draw(2, 3) / 2, "e": draw(4, 1, 1)},
            ),
            "sampled with a level, zeros": (
                lambda p, x: (
                    F.instance_norm(F.grid_sample(F.conv2d(x, p.a, p.c), _grid(p.t, x), align_corners=False)) * p.e
                ),
                {"a": a, "c": draw(4), "t": draw(2, 3), "e": draw(4, 1, 1)},
            ),
            "volume": (
                lambda p, x: F.conv3d(x[:, None], p.k, padding=(1, 0, 0)).relu() * p.e,
                {"k": draw(2, 1, 3, 2, 2), "e": draw(2, 1, 1, 1)},
            ),
        },
        images,
    )


def _copied(module: nn.Module) -> nn.Module:
    import copy

    return copy.deepcopy(module)


def _grid(theta: Tensor, x: Tensor) -> Tensor:
    return F.affine_grid(theta.expand(len(x), 2, 3), [len(x), 1, 4, 4], align_corners=False)


def _sampled(mode: str, padding: str, corners: bool) -> Any:
    def function(p: Any, x: Tensor) -> Tensor:
        features = F.conv2d(x, p.a)
        offsets = torch.einsum("nchw,co->nohw", x, p.o)[:, :2, :3, :3].permute(0, 2, 3, 1)
        return (
            F.grid_sample(features, offsets.tanh() * 1.5, mode=mode, padding_mode=padding, align_corners=corners) * p.e
        )

    return function


def sequences() -> Iterator[tuple[str, Case]]:
    """Recurrent layers with projections and packed inputs, attention with further keys, alignments."""

    def tokens(width: int = 4) -> list[tuple[Any, ...]]:
        return [(draw(2, 5, width),), (3 * draw(1, 7, width) + 1,), (draw(4, 2, width),)]

    for name, layer in {
        "lstm projected": nn.LSTM(4, 6, proj_size=3, batch_first=True),
        "lstm projected, two layers": nn.LSTM(4, 5, num_layers=2, proj_size=2, batch_first=True),
        "lstm projected, both ways": nn.LSTM(4, 4, proj_size=2, bidirectional=True, batch_first=True),
        "lstm without bias": nn.LSTM(4, 3, bias=False, batch_first=True),
        "lstm, two layers, both ways": nn.LSTM(4, 3, num_layers=2, bidirectional=True, batch_first=True),
        "gru": nn.GRU(4, 3, batch_first=True),
        "gru both ways": nn.GRU(4, 3, bidirectional=True, batch_first=True),
        "rnn relu": nn.RNN(4, 3, nonlinearity="relu", batch_first=True),
        "rnn relu without bias": nn.RNN(4, 3, nonlinearity="relu", bias=False, batch_first=True),
        "rnn relu, two layers": nn.RNN(4, 3, num_layers=2, nonlinearity="relu", batch_first=True),
        "rnn tanh": nn.RNN(4, 3, batch_first=True),
    }.items():
        width = layer(draw(1, 2, 4))[0].shape[-1]
        yield (
            f"sequence: {name}",
            (Called(lambda m, x: m.read(m.layer(x)[0]), layer=layer, read=nn.Linear(width, 2)), tokens()),
        )
    for name, (layer, width) in {
        "states of lstm": (nn.LSTM(4, 6, proj_size=3, batch_first=True), 9),
        "states of relu": (nn.RNN(4, 4, nonlinearity="relu", batch_first=True), 4),
    }.items():

        def states(m: Any, x: Tensor) -> Tensor:
            last = m.layer(x)[1]
            return m.read(torch.cat(last, -1) if isinstance(last, tuple) else last)

        yield f"sequence: {name}", (Called(states, layer=layer, read=nn.Linear(width, 2)), tokens())

    def packed(m: Any, x: Tensor) -> Tensor:
        lengths = torch.tensor([5, 3, 2, 1])[: len(x)]
        result = m.layer(pack_padded_sequence(x, lengths.clamp(max=x.shape[1]), batch_first=True))[0]
        return m.read(pad_packed_sequence(result, batch_first=True)[0])

    yield (
        "sequence: packed rnn",
        (
            Called(packed, layer=nn.RNN(4, 3, nonlinearity="relu", batch_first=True), read=nn.Linear(3, 2)),
            [(draw(3, 5, 4),), (draw(2, 6, 4) * 3,)],
        ),
    )
    for name, cell in {
        "lstm": nn.LSTMCell(4, 3),
        "gru": nn.GRUCell(4, 3),
        "relu": nn.RNNCell(4, 3, nonlinearity="relu"),
    }.items():

        def unrolled(m: Any, x: Tensor) -> Tensor:
            state = None
            for t in range(x.shape[1]):
                state = m.cell(x[:, t], state)
            return m.read(state[0] if isinstance(state, tuple) else state)

        yield f"sequence: {name} cell", (Called(unrolled, cell=cell, read=nn.Linear(3, 2)), tokens())
    layouts: dict[str, dict[str, Any]] = {
        "plain": {},
        "bias kv": {"add_bias_kv": True},
        "zero attention": {"add_zero_attn": True},
        "bias kv and zero": {"add_bias_kv": True, "add_zero_attn": True},
        "no bias, bias kv": {"bias": False, "add_bias_kv": True},
        "other widths": {"kdim": 3, "vdim": 2},
        "other widths, bias kv": {"kdim": 3, "vdim": 2, "add_bias_kv": True},
    }
    for name, options in layouts.items():
        for mode in ("self", "weights", "causal", "padded"):
            attention = nn.MultiheadAttention(4, 2, batch_first=True, **options)

            def attend(m: Any, x: Tensor, mode: str = mode, options: Any = options) -> Any:
                k = x[..., : options.get("kdim", 4)]
                v = x[..., -options.get("vdim", 4) :]
                extra: dict[str, Any] = {"need_weights": mode == "weights", "average_attn_weights": False}
                if mode == "causal":
                    extra |= {"attn_mask": torch.ones(x.shape[1], x.shape[1]).triu(1).bool()}
                if mode == "padded":
                    extra |= {"key_padding_mask": torch.arange(x.shape[1]).expand(len(x), -1) > 1}
                y, weights = m.attention(x, k, v, **extra)
                return (m.read(y), weights) if mode == "weights" else m.read(y)

            yield (
                f"sequence: attention {name}, {mode}",
                (Called(attend, attention=attention, read=nn.Linear(4, 2)), tokens()),
            )
    for name, block in {
        "encoder": nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True),
        "encoder, norm first, gelu": nn.TransformerEncoderLayer(
            4, 2, 6, 0.0, "gelu", norm_first=True, batch_first=True
        ),
        "encoder without bias": nn.TransformerEncoderLayer(4, 2, 6, 0.0, bias=False, batch_first=True),
        "encoder evaluated": nn.TransformerEncoderLayer(4, 2, 6, 0.3, batch_first=True).eval(),
        "encoder with dropout": nn.TransformerEncoderLayer(4, 2, 6, 0.3, batch_first=True),
    }.items():
        yield f"sequence: {name}", (nn.Sequential(block, nn.Linear(4, 2)), tokens())
    decoder = nn.TransformerDecoderLayer(4, 2, 6, 0.0, batch_first=True)
    yield "sequence: decoder of itself", (Called(lambda m, x: m.d(x, x.flip(1)), d=decoder), tokens())

    def aligned(m: Any, x: Tensor, **options: Any) -> Tensor:
        scores = m.read(m.first(x).relu()).log_softmax(-1).transpose(0, 1)
        targets = torch.tensor([[1, 2], [2, 1], [1, 1], [2, 2]])[: len(x)]
        lengths = torch.full((len(x),), x.shape[1])
        return F.ctc_loss(
            scores,
            targets[:, : min(2, x.shape[1] // 2)],
            lengths,
            torch.full((len(x),), min(2, x.shape[1] // 2)),
            **options,
        )

    def other_blank(m: Any, x: Tensor) -> Tensor:
        return aligned(m, x, blank=3, reduction="none")

    def forgiving(m: Any, x: Tensor) -> Tensor:
        return aligned(m, x, zero_infinity=True, reduction="sum")

    def raw(m: Any, x: Tensor) -> Tensor:
        scores = m.read(m.first(x)).transpose(0, 1)
        return F.ctc_loss(
            scores, torch.ones(len(x), 1).long(), torch.full((len(x),), x.shape[1]), torch.ones(len(x)).long()
        )

    for name, loss in {
        "ctc": aligned,
        "ctc, other blank": other_blank,
        "ctc, forgiving": forgiving,
        "ctc of raw scores": raw,
    }.items():
        yield f"sequence: {name}", (Called(loss, first=nn.Linear(4, 3), read=nn.Linear(3, 4)), tokens())
    a, b = draw(4, 3), draw(3, 2)
    yield from forms(
        "sequence",
        {
            "cumulative sum": (lambda p, x: (x @ p.a + p.c).cumsum(1) @ p.b, {"a": a, "c": draw(3), "b": b}),
            "cumulative sum, centred": (
                lambda p, x: (lambda h: (h - h.mean(1, keepdim=True)) @ p.b)((x @ p.a + p.c).cumsum(1)),
                {"a": a, "c": draw(3), "b": b},
            ),
            "cumulative product": (lambda p, x: (x @ p.a).cumprod(1) @ p.b, {"a": a, "b": b}),
            "cumulative product of channels": (lambda p, x: (x @ p.a).cumprod(-1) @ p.b, {"a": a, "b": b}),
            "cumulative product of gains": (
                lambda p, x: (x @ p.a) * p.c.cumprod(0) @ p.b,
                {"a": a, "c": draw(3), "b": b},
            ),
            "cumulative product of gains, last": (
                lambda p, x: (x @ p.a) * p.c.cumprod(0)[-1] @ p.b,
                {"a": a, "c": draw(3), "b": b},
            ),
            "cumulative maximum": (lambda p, x: (x @ p.a + p.c).cummax(1).values @ p.b, {"a": a, "c": draw(3), "b": b}),
            "cumulative minimum of channels": (lambda p, x: (x @ p.a).cummin(-1).values @ p.b, {"a": a, "b": b}),
            "log cumulative": (lambda p, x: (x @ p.a + p.c).logcumsumexp(1) @ p.b, {"a": a, "c": draw(3), "b": b}),
            "log cumulative, differences": (
                lambda p, x: (x @ p.a + p.c).logcumsumexp(1).diff(dim=1) @ p.b,
                {"a": a, "c": draw(3), "b": b},
            ),
            "product of all": (lambda p, x: (x @ p.a).prod(-1, keepdim=True) * p.b[0], {"a": a, "b": b}),
            "product of positions": (lambda p, x: (x @ p.a).prod(1) @ p.b, {"a": a, "b": b}),
            "stick breaking": (
                lambda p, x: (
                    (lambda v: v * torch.cat((torch.ones_like(v[..., :1]), (1 - v[..., :-1]).cumprod(-1)), -1))(
                        (x @ p.a).sigmoid()
                    )
                    @ p.b
                ),
                {"a": a, "b": b},
            ),
            "decayed state": (_decayed, {"a": a, "l": draw(3), "b": b}),
            "decayed by unit interval": (
                lambda p, x: (
                    torch.stack(
                        [
                            (x @ p.a)[:, : t + 1].mul(p.l.sigmoid() ** torch.arange(t, -1, -1).to(x)[:, None]).sum(1)
                            for t in range(x.shape[1])
                        ],
                        1,
                    )
                    @ p.b
                ),
                {"a": a, "l": draw(3), "b": b},
            ),
            "linear attention": (
                lambda p, x: (lambda q, k, v: (q @ (k.transpose(1, 2) @ v)) @ p.b)(x @ p.a, x @ p.k, x @ p.v),
                {"a": a, "k": draw(4, 3), "v": draw(4, 3), "b": b},
            ),
            "linear attention, one map": (
                lambda p, x: (lambda q, v: (q @ (q.transpose(1, 2) @ v)) @ p.b)(x @ p.a, x @ p.v),
                {"a": a, "v": draw(4, 3), "b": b},
            ),
            "attention, keys are values": (
                lambda p, x: F.scaled_dot_product_attention(x @ p.a, x @ p.k, x @ p.k) @ p.b,
                {"a": a, "k": draw(4, 3), "b": b},
            ),
            "attention, keys biased": (
                lambda p, x: F.scaled_dot_product_attention(x @ p.a + p.c, x @ p.k + p.d, x @ p.v + p.e) @ p.b,
                {"a": a, "k": draw(4, 3), "v": draw(4, 3), "c": draw(3), "d": draw(3), "e": draw(3), "b": b},
            ),
            "attention, masked to nothing": (
                lambda p, x: (
                    F.scaled_dot_product_attention(
                        x @ p.a, x @ p.k + p.d, x @ p.v, attn_mask=torch.eye(x.shape[1]).bool()
                    )
                    @ p.b
                ),
                {"a": a, "k": draw(4, 3), "v": draw(4, 3), "d": draw(3), "b": b},
            ),
            "attention, learned bias": (
                lambda p, x: (
                    F.scaled_dot_product_attention(x @ p.a, x @ p.k, x @ p.v, attn_mask=p.m[: x.shape[1], : x.shape[1]])
                    @ p.b
                ),
                {"a": a, "k": draw(4, 3), "v": draw(4, 3), "m": draw(8, 8), "b": b},
            ),
            "attention, learned scale": (
                lambda p, x: F.scaled_dot_product_attention(x @ p.a * p.t, x @ p.k, x @ p.v) @ p.b,
                {"a": a, "k": draw(4, 3), "v": draw(4, 3), "t": draw(1), "b": b},
            ),
            "attention, query norm": (
                lambda p, x: (
                    F.scaled_dot_product_attention(
                        F.normalize(x @ p.a, dim=-1, eps=0.0) * p.t, F.normalize(x @ p.k, dim=-1, eps=0.0), x @ p.v
                    )
                    @ p.b
                ),
                {"a": a, "k": draw(4, 3), "v": draw(4, 3), "t": draw(1), "b": b},
            ),
            "attention with a sink": (
                lambda p, x: (
                    (
                        torch.cat(
                            ((x @ p.a) @ (x @ p.k).transpose(1, 2), p.s.expand(len(x), x.shape[1], 1)), -1
                        ).softmax(-1)[..., :-1]
                        @ (x @ p.v)
                    )
                    @ p.b
                ),
                {"a": a, "k": draw(4, 3), "v": draw(4, 3), "s": draw(1), "b": b},
            ),
            "sigmoid attention": (
                lambda p, x: ((x @ p.a) @ (x @ p.k).transpose(1, 2)).sigmoid() @ (x @ p.v) @ p.b,
                {"a": a, "k": draw(4, 3), "v": draw(4, 3), "b": b},
            ),
            "relu squared attention": (
                lambda p, x: ((x @ p.a) @ (x @ p.k).transpose(1, 2)).relu().square() @ (x @ p.v) @ p.b,
                {"a": a, "k": draw(4, 3), "v": draw(4, 3), "b": b},
            ),
            "softmax over queries": (
                lambda p, x: ((x @ p.a + p.c) @ (x @ p.k + p.d).transpose(1, 2)).softmax(1) @ (x @ p.v) @ p.b,
                {"a": a, "k": draw(4, 3), "v": draw(4, 3), "c": draw(3), "d": draw(3), "b": b},
            ),
            "two softmaxes subtracted": (
                lambda p, x: (
                    (
                        ((x @ p.a) @ (x @ p.k).transpose(1, 2)).softmax(-1)
                        - p.t * ((x @ p.k) @ (x @ p.a).transpose(1, 2)).softmax(-1)
                    )
                    @ (x @ p.v)
                    @ p.b
                ),
                {"a": a, "k": draw(4, 3), "v": draw(4, 3), "t": draw(1), "b": b},
            ),
            "relative positions by shift": (
                _relative,
                {"a": a, "k": draw(4, 3), "v": draw(4, 3), "r": draw(9, 3), "b": b},
            ),
            "rotary, learned frequencies": (
                _rotary(True),
                {"a": draw(4, 4), "k": draw(4, 4), "f": draw(2), "b": draw(4, 2)},
            ),
            "rotary": (_rotary(False), {"a": draw(4, 4), "k": draw(4, 4), "f": draw(2), "b": draw(4, 2)}),
            "first position alone": (
                lambda p, x: (x[:, 0] @ p.a).relu() @ p.b + (x[:, -1] @ p.k) @ p.b,
                {"a": a, "k": draw(4, 3), "b": b},
            ),
            "positions by length": (
                lambda p, x: (x @ p.a + p.e[: x.shape[1]]).relu() @ p.b,
                {"a": a, "e": draw(8, 3), "b": b},
            ),
            "positions from the end": (
                lambda p, x: (x @ p.a + p.e[-x.shape[1] :]).relu() @ p.b,
                {"a": a, "e": draw(8, 3), "b": b},
            ),
            "positions, all subtracted": (
                lambda p, x: F.layer_norm(x @ p.a + p.e[: x.shape[1]] - p.e[0], (3,)) @ p.b,
                {"a": a, "e": draw(8, 3), "b": b},
            ),
            "tokens mixed": (
                lambda p, x: F.adaptive_avg_pool1d(x.transpose(1, 2), 3) @ p.m.relu() @ p.n,
                {"m": draw(3, 3), "n": draw(3, 2)},
            ),
        },
        tokens,
    )


def _decayed(p: Any, x: Tensor) -> Tensor:
    h, out = torch.zeros(len(x), 3).to(x), []
    for t in range(x.shape[1]):
        h = h * p.l + x[:, t] @ p.a
        out.append(h @ p.b)
    return torch.stack(out, 1)


def _relative(p: Any, x: Tensor) -> Tensor:
    n = x.shape[1]
    q = x @ p.a
    index = torch.arange(n)[:, None] - torch.arange(n)[None]
    r = p.r[index.clamp(-4, 4) + 4]
    score = q @ (x @ p.k).transpose(1, 2) + torch.einsum("nid,ijd->nij", q, r)
    return score.softmax(-1) @ (x @ p.v) @ p.b


def _rotary(trained: bool) -> Any:
    def function(p: Any, x: Tensor) -> Tensor:
        f = p.f if trained else p.f.detach()
        angle = torch.arange(x.shape[1]).to(x)[:, None] * f

        def turned(h: Tensor) -> Tensor:
            u, v = h.chunk(2, -1)
            return torch.cat((u * angle.cos() - v * angle.sin(), u * angle.sin() + v * angle.cos()), -1)

        return (turned(x @ p.a) @ turned(x @ p.k).transpose(1, 2)).softmax(-1) @ x @ p.b

    return function


def parametrized() -> Iterator[tuple[str, Case]]:
    """Weights that are functions of what is trained."""

    class Symmetric(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w.triu() + w.triu(1).transpose(-1, -2)

    class Skew(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w.triu(1) - w.triu(1).transpose(-1, -2)

    class Exponential(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return torch.linalg.matrix_exp(w)

    class Unit(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w / w.norm(dim=1, keepdim=True)

    class Centred(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w - w.mean(1, keepdim=True)

    class Stochastic(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w.softmax(1)

    class Doubly(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            for _ in range(3):
                w = w.log_softmax(0).log_softmax(1)
            return w.exp()

    class Ternary(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            scale = w.abs().mean()
            return w + ((w / scale).round().clamp(-1, 1) * scale - w).detach()

    class Householder(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            q = torch.eye(len(w)).to(w)
            for row in w:
                q = q - 2 * torch.outer(q @ row, row) / row.dot(row)
            return q

    class Cayley(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            s, one = w - w.T, torch.eye(len(w)).to(w)
            return torch.linalg.solve(one + s, one - s)

    class Polar(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            u, _, v = torch.linalg.svd(w, full_matrices=False)
            return u @ v

    class Triangular(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return torch.linalg.qr(w)[0]

    class Clamped(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w.clamp(-0.5, 0.5)

    class Cube(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w**3

    class Squared(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w.square()

    class Magnitude(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w * w.abs()

    class Spectral(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w / torch.linalg.matrix_norm(w, 2)

    for kind in (
        Symmetric,
        Skew,
        Exponential,
        Unit,
        Centred,
        Stochastic,
        Doubly,
        Ternary,
        Householder,
        Cayley,
        Polar,
        Triangular,
        Clamped,
        Cube,
        Squared,
        Magnitude,
        Spectral,
    ):
        for index in (0, 2):
            model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
            parametrize.register_parametrization(model[index], "weight", kind())
            yield f"parametrized: {kind.__name__.lower()} {index}", (model, rows(4))
    whole: Any = None
    for name, wrap in {
        "orthogonal": lambda m: parametrizations.orthogonal(m),
        "orthogonal, cayley": lambda m: parametrizations.orthogonal(m, orthogonal_map="cayley"),
        "orthogonal, householder": lambda m: parametrizations.orthogonal(m, orthogonal_map="householder"),
        "orthogonal without base": lambda m: parametrizations.orthogonal(m, use_trivialization=False),
        "weight norm": lambda m: parametrizations.weight_norm(m),
        "weight norm of columns": lambda m: parametrizations.weight_norm(m, dim=1),
        "weight norm of all": lambda m: parametrizations.weight_norm(m, dim=whole),
        "spectral norm": lambda m: parametrizations.spectral_norm(m),
        "spectral norm, evaluated": lambda m: parametrizations.spectral_norm(m).eval(),
    }.items():
        for order in ("first", "second", "both"):
            model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
            for index in {"first": (0,), "second": (2,), "both": (0, 2)}[order]:
                wrap(model[index])
            yield f"parametrized: {name}, {order}", (model, rows(4))
    a, b = draw(4, 3), draw(3, 2)
    yield from forms(
        "parametrized",
        {
            "exponential gain": (lambda p, x: (x @ p.a) * p.s.exp() @ p.b, {"a": a, "s": draw(3), "b": b}),
            "exponential gain of a norm": (
                lambda p, x: F.layer_norm(x @ p.a, (3,)) * p.s.exp() @ p.b,
                {"a": a, "s": draw(3), "b": b},
            ),
            "one exponential": (lambda p, x: (x @ p.a) * p.s.exp() @ p.b, {"a": a, "s": draw(1), "b": b}),
            "power of two": (lambda p, x: (x @ p.a) * torch.exp2(p.s) @ p.b, {"a": a, "s": draw(3), "b": b}),
            "softplus gain": (lambda p, x: (x @ p.a) * F.softplus(p.s) @ p.b, {"a": a, "s": draw(3), "b": b}),
            "tanh gate": (
                lambda p, x: x @ p.a @ p.b + p.s.tanh() * (x @ p.z @ p.y),
                {"a": a, "b": b, "s": draw(1), "z": draw(4, 3), "y": draw(3, 2)},
            ),
            "one plus gain": (lambda p, x: (x @ p.a) * (1 + p.s) @ p.b, {"a": a, "s": draw(3), "b": b}),
            "one minus gain": (
                lambda p, x: (x @ p.a) * (1 - p.s) @ p.b + (x @ p.z) * p.s @ p.b,
                {"a": a, "s": draw(3), "b": b, "z": draw(4, 3)},
            ),
            "reciprocal gain": (lambda p, x: (x @ p.a) / p.s @ p.b, {"a": a, "s": draw(3), "b": b}),
            "root of a gain": (lambda p, x: (x @ p.a) * p.s.abs().sqrt() @ p.b, {"a": a, "s": draw(3), "b": b}),
            "gain of gain": (lambda p, x: (x @ p.a) * p.s * p.s @ p.b, {"a": a, "s": draw(3), "b": b}),
            "gain against its mean": (
                lambda p, x: (x @ p.a) * (p.s / p.s.mean()) @ p.b,
                {"a": a, "s": draw(3), "b": b},
            ),
            "gain against its largest": (
                lambda p, x: (x @ p.a) * (p.s / p.s.abs().max()) @ p.b,
                {"a": a, "s": draw(3), "b": b},
            ),
            "gain against a detached norm": (
                lambda p, x: (x @ p.a) * (p.s / p.s.norm().detach()) @ p.b,
                {"a": a, "s": draw(3), "b": b},
            ),
            "difference to a detached": (
                lambda p, x: (x @ (p.a - p.a.detach() + p.z)).relu() @ p.b,
                {"a": a, "z": draw(4, 3), "b": b},
            ),
            "scaled to start": (
                lambda p, x: (x @ (p.a * p.g / p.a.norm(dim=0))).relu() @ p.b,
                {"a": a, "g": draw(3), "b": b},
            ),
            "adapter with magnitude": (
                lambda p, x: x @ (lambda w: p.g * w / w.norm(dim=0))(torch.ones(4, 3).to(x) + p.u @ p.v) @ p.b,
                {"u": draw(4, 2), "v": draw(2, 3), "g": draw(3), "b": b},
            ),
            "adapter": (
                lambda p, x: (x @ (torch.ones(4, 3).to(x) + p.u @ p.v * 2)).relu() @ p.b,
                {"u": draw(4, 2), "v": draw(2, 3), "b": b},
            ),
            "adapter, merged twice": (
                lambda p, x: (x @ (p.a + p.u @ p.v)).relu() @ p.b + x @ p.u @ p.y,
                {"a": a, "u": draw(4, 2), "v": draw(2, 3), "b": b, "y": draw(2, 2)},
            ),
            "mixture of weights": (
                lambda p, x: (x @ torch.einsum("k,kij->ij", p.s.softmax(0), p.k)).relu() @ p.b,
                {"s": draw(2), "k": draw(2, 4, 3), "b": b},
            ),
            "mixture, plain": (
                lambda p, x: (x @ torch.einsum("k,kij->ij", p.s, p.k)).relu() @ p.b,
                {"s": draw(2), "k": draw(2, 4, 3), "b": b},
            ),
            "hypernetwork": (
                lambda p, x: (x @ (p.e @ p.h).view(4, 3)).relu() @ p.b,
                {"e": draw(2), "h": draw(2, 12), "b": b},
            ),
            "straight through sign": (
                lambda p, x: (x @ (p.a + (p.a.sign() - p.a).detach())).relu() @ p.b,
                {"a": a, "b": b},
            ),
            "sign with its scale": (lambda p, x: (x @ (p.a.sign() * p.a.abs().mean(0))).relu() @ p.b, {"a": a, "b": b}),
            "top half kept": (
                lambda p, x: (x @ (p.a * (p.a.abs() >= p.a.abs().median()))).relu() @ p.b,
                {"a": a, "b": b},
            ),
            "pruned by score": (lambda p, x: (x @ (p.a * (p.s > 0))).relu() @ p.b, {"a": a, "s": draw(4, 3), "b": b}),
            "cholesky": (
                lambda p, x: x @ torch.linalg.cholesky(p.a @ p.a.T + torch.eye(4).to(x)) @ p.y,
                {"a": a, "y": draw(4, 2)},
            ),
            "whitened": (
                lambda p, x: (
                    torch.linalg.solve_triangular(
                        torch.linalg.cholesky((x @ p.a).T.cov()[:3, :3] if False else (x @ p.a).T @ (x @ p.a)),
                        (x @ p.a).T,
                        upper=False,
                    ).T
                    @ p.b
                ),
                {"a": a, "b": b},
            ),
            "eigenvalues of a gram": (
                lambda p, x: torch.linalg.eigvalsh(p.a.T @ p.a) * (x @ p.z) @ p.b,
                {"a": a, "z": draw(4, 3), "b": b},
            ),
            "singular values": (
                lambda p, x: torch.linalg.svdvals(p.a) * (x @ p.z) @ p.b,
                {"a": a, "z": draw(4, 3), "b": b},
            ),
            "nuclear over frobenius": (
                lambda p, x: x @ p.a * (torch.linalg.matrix_norm(p.a, "nuc") / torch.linalg.matrix_norm(p.a)) @ p.b,
                {"a": a, "b": b},
            ),
            "projection": (
                lambda p, x: x @ p.a @ torch.linalg.solve(p.a.T @ p.a, p.a.T) @ p.y,
                {"a": a, "y": draw(4, 2)},
            ),
            "low rank inverse": (
                lambda p, x: x @ torch.linalg.inv(torch.eye(4).to(x) + p.a @ p.v) @ p.y,
                {"a": a, "v": draw(3, 4), "y": draw(4, 2)},
            ),
            "trace normalised": (
                lambda p, x: x @ (lambda k: k / k.trace())(p.a @ p.a.T) @ p.y,
                {"a": a, "y": draw(4, 2)},
            ),
            "log of gram": (
                lambda p, x: x @ torch.linalg.matrix_exp(p.s - p.s.T) @ p.a @ p.b,
                {"s": draw(4, 4), "a": a, "b": b},
            ),
        },
        lambda: rows(4),
    )


def modes() -> Iterator[tuple[str, Case]]:
    """What depends on data, precision, batch, mode and size."""
    a, b, c = draw(4, 3), draw(3, 2), draw(3)

    def count_branch(p: Any, x: Tensor) -> Tensor:
        return (x @ p.a).relu() @ p.b if len(x) > 4 else (x @ p.a).tanh() @ p.b

    def value_branch(p: Any, x: Tensor) -> Tensor:
        return (x @ p.a).relu() @ p.b if float(x.sum()) > 3 else (x @ p.a).sigmoid() @ p.b

    def weight_branch(p: Any, x: Tensor) -> Tensor:
        return (x @ p.a).relu() @ p.b if float(p.a.detach().norm()) < 100 else x @ p.a @ p.b

    def parity_branch(p: Any, x: Tensor) -> Tensor:
        return (x @ p.a + p.c) @ p.b if len(x) % 2 == 0 else (x @ p.a).square() @ p.b

    def loop(p: Any, x: Tensor) -> Tensor:
        h = x @ p.a
        for _ in range(len(x) % 3 + 1):
            h = h @ p.s
        return h @ p.b

    def shape_scale(p: Any, x: Tensor) -> Tensor:
        return (x @ p.a + len(x) * p.c).relu() @ p.b

    def raised(p: Any, x: Tensor) -> Tensor:
        try:
            return (x @ p.a).view(6, 3).relu() @ p.b
        except RuntimeError:
            return (x @ p.a).tanh() @ p.b

    yield from forms(
        "mode",
        {
            "branch on count": (count_branch, {"a": a, "b": b}),
            "branch on a value": (value_branch, {"a": a, "b": b}),
            "branch on a weight": (weight_branch, {"a": a, "b": b}),
            "branch on parity": (parity_branch, {"a": a, "b": b, "c": c}),
            "loop by count": (loop, {"a": a, "b": b, "s": draw(3, 3)}),
            "bias times count": (shape_scale, {"a": a, "b": b, "c": c}),
            "caught error": (raised, {"a": a, "b": b}),
            "cast to half and back": (lambda p, x: (x @ p.a).half().to(x) @ p.b, {"a": a, "b": b}),
            "cast to single": (lambda p, x: (x @ p.a).float().relu().to(x) @ p.b, {"a": a, "b": b}),
            "cast to bfloat16 and back": (lambda p, x: (x @ p.a).bfloat16().to(x) @ p.b, {"a": a, "b": b}),
            "cast to integers": (
                lambda p, x: (x @ p.a).long().to(x) @ p.b + x @ p.z,
                {"a": a, "b": b, "z": draw(4, 2)},
            ),
            "clamp wide": (lambda p, x: (x @ p.a).clamp(-50, 50) @ p.b, {"a": a, "b": b}),
            "clamp from below": (lambda p, x: (x @ p.a).clamp(min=0) @ p.b, {"a": a, "b": b}),
            "clamp by trained": (lambda p, x: (x @ p.a).clamp(-p.c.abs(), p.c.abs()) @ p.b, {"a": a, "b": b, "c": c}),
            "clamp far off": (lambda p, x: (x @ p.a + p.c).clamp(min=-1e4) @ p.b, {"a": a, "b": b, "c": c}),
            "relu6": (lambda p, x: F.relu6(x @ p.a) @ p.b, {"a": a, "b": b}),
            "hardtanh wide": (lambda p, x: F.hardtanh(x @ p.a, -20, 20) @ p.b, {"a": a, "b": b}),
            "threshold": (lambda p, x: F.threshold(x @ p.a, 0.0, 1.0) @ p.b, {"a": a, "b": b}),
            "threshold zero": (lambda p, x: F.threshold(x @ p.a, 0.0, 0.0) @ p.b, {"a": a, "b": b}),
            "softshrink": (lambda p, x: F.softshrink(x @ p.a, 0.01) @ p.b, {"a": a, "b": b}),
            "softplus sharp": (lambda p, x: F.softplus(x @ p.a, beta=100, threshold=0.1) @ p.b, {"a": a, "b": b}),
            "leaky as trained": (lambda p, x: F.prelu(x @ p.a, p.c) @ p.b, {"a": a, "b": b, "c": c.abs()}),
            "random leaky": (lambda p, x: F.rrelu(x @ p.a, training=False) @ p.b, {"a": a, "b": b}),
            "celu": (lambda p, x: F.celu(x @ p.a, alpha=0.01) @ p.b, {"a": a, "b": b}),
            "huge exponent": (lambda p, x: (x @ p.a).abs().pow(p.k) @ p.b, {"a": a, "b": b, "k": torch.tensor(1.3)}),
            "pow of three halves": (lambda p, x: (x @ p.a).abs().pow(1.5) @ p.b, {"a": a, "b": b}),
            "pow of zero": (lambda p, x: (x @ p.a).pow(0) @ p.b + x @ p.z, {"a": a, "b": b, "z": draw(4, 2)}),
            "float power": (lambda p, x: torch.float_power(x @ p.a, 3).to(x) @ p.b, {"a": a, "b": b}),
            "remainder": (lambda p, x: (x @ p.a + p.c).remainder(1.0) @ p.b, {"a": a, "b": b, "c": c}),
            "remainder by trained": (lambda p, x: (x @ p.a).remainder(p.c.abs()) @ p.b, {"a": a, "b": b, "c": c}),
            "floor divide": (
                lambda p, x: torch.div(x @ p.a, p.c, rounding_mode="floor") @ p.b,
                {"a": a, "b": b, "c": c},
            ),
            "ratio of two": (lambda p, x: (x @ p.a) / (x @ p.z) @ p.b, {"a": a, "z": draw(4, 3), "b": b}),
            "ratio plus small": (
                lambda p, x: (x @ p.a) / ((x @ p.z).square() + 1e-3) @ p.b,
                {"a": a, "z": draw(4, 3), "b": b},
            ),
            "atan2": (lambda p, x: torch.atan2(x @ p.a, x @ p.z) @ p.b, {"a": a, "z": draw(4, 3), "b": b}),
            "hypot": (lambda p, x: torch.hypot(x @ p.a, x @ p.z) @ p.b, {"a": a, "z": draw(4, 3), "b": b}),
            "hypot of one": (lambda p, x: torch.hypot(x @ p.a, torch.ones(3).to(x)) @ p.b, {"a": a, "b": b}),
            "copysign": (lambda p, x: torch.copysign(x @ p.a, x @ p.z) @ p.b, {"a": a, "z": draw(4, 3), "b": b}),
            "heaviside gate": (
                lambda p, x: (x @ p.a) * torch.heaviside(x @ p.z, torch.tensor(0.0).to(x)) @ p.b,
                {"a": a, "z": draw(4, 3), "b": b},
            ),
            "maximum of two maps": (
                lambda p, x: torch.maximum(x @ p.a, x @ p.z) @ p.b,
                {"a": a, "z": draw(4, 3), "b": b},
            ),
            "maximum with a number": (
                lambda p, x: torch.maximum(x @ p.a, torch.tensor(0.1).to(x)) @ p.b,
                {"a": a, "b": b},
            ),
            "fmin of biases": (
                lambda p, x: torch.fmin(x @ p.a + p.c, x @ p.z + p.c) @ p.b,
                {"a": a, "z": draw(4, 3), "c": c, "b": b},
            ),
            "lerp by trained": (
                lambda p, x: torch.lerp(x @ p.a, x @ p.z, p.c) @ p.b,
                {"a": a, "z": draw(4, 3), "c": c, "b": b},
            ),
            "lerp by map": (
                lambda p, x: torch.lerp(x @ p.a, x @ p.z, (x @ p.y).sigmoid()) @ p.b,
                {"a": a, "z": draw(4, 3), "y": draw(4, 3), "b": b},
            ),
            "logaddexp": (
                lambda p, x: torch.logaddexp(x @ p.a + p.c, x @ p.z + p.c) @ p.b,
                {"a": a, "z": draw(4, 3), "c": c, "b": b},
            ),
            "logaddexp to zero": (
                lambda p, x: torch.logaddexp(x @ p.a + p.c, torch.zeros(3).to(x)) @ p.b,
                {"a": a, "c": c, "b": b},
            ),
            "logsumexp less itself": (
                lambda p, x: (lambda h: h - h.logsumexp(1, keepdim=True))(x @ p.a + p.c) @ p.b,
                {"a": a, "c": c, "b": b},
            ),
            "logsumexp over rows": (
                lambda p, x: (lambda h: h - h.logsumexp(0, keepdim=True))(x @ p.a + p.c) @ p.b,
                {"a": a, "c": c, "b": b},
            ),
            "softmax with a temperature": (
                lambda p, x: ((x @ p.a + p.c) / p.k).softmax(1) @ p.b,
                {"a": a, "c": c, "k": torch.tensor(0.7), "b": b},
            ),
            "softmax over rows": (lambda p, x: (x @ p.a + p.c).softmax(0) @ p.b, {"a": a, "c": c, "b": b}),
            "softmin": (lambda p, x: F.softmin(x @ p.a + p.k, 1) @ p.b, {"a": a, "k": draw(1), "b": b}),
            "softmax of a slice": (
                lambda p, x: torch.cat(((x @ p.a + p.c)[:, :2].softmax(1), (x @ p.a + p.c)[:, 2:]), 1) @ p.b,
                {"a": a, "c": c, "b": b},
            ),
            "normalised to sum one": (
                lambda p, x: F.normalize((x @ p.a).relu() + 1e-3, p=1.0, dim=1) @ p.b,
                {"a": a, "b": b},
            ),
            "normalised by largest": (
                lambda p, x: F.normalize(x @ p.a, p=float("inf"), dim=1, eps=0.0) @ p.b,
                {"a": a, "b": b},
            ),
            "normalised by p 3": (lambda p, x: F.normalize(x @ p.a, p=3.0, dim=1, eps=0.0) @ p.b, {"a": a, "b": b}),
            "normalised over rows": (lambda p, x: F.normalize(x @ p.a, dim=0, eps=0.0) @ p.b, {"a": a, "b": b}),
            "normalised with a large floor": (
                lambda p, x: F.normalize(x @ p.a, dim=1, eps=1.0) @ p.b,
                {"a": a, "b": b},
            ),
            "norm of p 0": (
                lambda p, x: torch.linalg.vector_norm(x @ p.a, 0, dim=1, keepdim=True) * p.b[0] + x @ p.z,
                {"a": a, "b": b, "z": draw(4, 2)},
            ),
            "range": (
                lambda p, x: (
                    (lambda h: (h - h.amin(1, keepdim=True)) / (h.amax(1, keepdim=True) - h.amin(1, keepdim=True)))(
                        x @ p.a + p.k
                    )
                    @ p.b
                ),
                {"a": a, "k": draw(1), "b": b},
            ),
            "range by entry": (
                lambda p, x: (lambda h: (h - h.amin(0)) / (h.amax(0) - h.amin(0)))(x @ p.a + p.c) @ p.b,
                {"a": a, "c": c, "b": b},
            ),
            "standardised": (
                lambda p, x: (lambda h: (h - h.mean(0)) / h.std(0))(x @ p.a + p.c) @ p.b,
                {"a": a, "c": c, "b": b},
            ),
            "standardised with correction": (
                lambda p, x: (lambda h: (h - h.mean(0)) / (h.var(0, correction=0) + 1e-5).sqrt())(x @ p.a + p.c) @ p.b,
                {"a": a, "c": c, "b": b},
            ),
            "centred by median": (
                lambda p, x: (lambda h: h - h.median(1, keepdim=True).values)(x @ p.a + p.k).relu() @ p.b,
                {"a": a, "k": draw(1), "b": b},
            ),
            "centred by first": (
                lambda p, x: (lambda h: h - h[:, :1])(x @ p.a + p.k).relu() @ p.b,
                {"a": a, "k": draw(1), "b": b},
            ),
            "centred by first row": (
                lambda p, x: (lambda h: h - h[:1])(x @ p.a + p.c).relu() @ p.b,
                {"a": a, "c": c, "b": b},
            ),
            "layer norm over two": (
                lambda p, x: F.layer_norm((x @ p.m).view(-1, 2, 3), (2, 3), eps=0.0).flatten(1) @ p.y,
                {"m": draw(4, 6), "y": draw(6, 2)},
            ),
            "group norm of one": (
                lambda p, x: F.group_norm(x @ p.m, 3, eps=1e-3) @ p.y,
                {"m": draw(4, 6), "y": draw(6, 2)},
            ),
            "rms by formula": (
                lambda p, x: (lambda h: h * h.square().mean(-1, keepdim=True).rsqrt())(x @ p.a) * p.c @ p.b,
                {"a": a, "c": c, "b": b},
            ),
            "rms by formula, floored": (
                lambda p, x: (
                    (lambda h: h / h.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-2))(x @ p.a) * p.c @ p.b
                ),
                {"a": a, "c": c, "b": b},
            ),
            "nan to num": (lambda p, x: (x @ p.a).nan_to_num(0.0) @ p.b, {"a": a, "b": b}),
            "detached gate": (lambda p, x: (x @ p.a) * (x @ p.a).detach().sigmoid() @ p.b, {"a": a, "b": b}),
            "detached half": (
                lambda p, x: ((x @ p.a) + (x @ p.z).detach()).relu() @ p.b,
                {"a": a, "z": draw(4, 3), "b": b},
            ),
            "no gradient inside": (_quiet, {"a": a, "z": draw(4, 3), "b": b}),
            "gradient of itself": (_slope, {"a": a, "b": b}),
            "cross entropy inside": (lambda p, x: F.cross_entropy(x @ p.a + p.c, x[:, :3].argmax(1)), {"a": a, "c": c}),
            "cross entropy, smoothed": (
                lambda p, x: F.cross_entropy(x @ p.a + p.c, x[:, :3].argmax(1), label_smoothing=0.2),
                {"a": a, "c": c},
            ),
            "cross entropy, ignored": (
                lambda p, x: F.cross_entropy(x @ p.a + p.c, x[:, :3].argmax(1), ignore_index=0, reduction="sum"),
                {"a": a, "c": c},
            ),
            "cross entropy, weighted": (
                lambda p, x: F.cross_entropy(x @ p.a + p.c, x[:, :3].argmax(1), weight=torch.tensor([1.0, 2, 3]).to(x)),
                {"a": a, "c": c},
            ),
            "cross entropy of probabilities": (
                lambda p, x: F.cross_entropy(x @ p.a + p.c, x[:, :3].softmax(1)),
                {"a": a, "c": c},
            ),
            "cross entropy of unnormalised": (
                lambda p, x: F.cross_entropy(x @ p.a + p.c, x[:, :3].abs()),
                {"a": a, "c": c},
            ),
            "negative likelihood of scores": (
                lambda p, x: F.nll_loss(x @ p.a + p.c, x[:, :3].argmax(1)),
                {"a": a, "c": c},
            ),
            "divergence": (
                lambda p, x: F.kl_div((x @ p.a + p.c).log_softmax(1), x[:, :3].softmax(1), reduction="batchmean"),
                {"a": a, "c": c},
            ),
            "divergence of two": (
                lambda p, x: F.kl_div((x @ p.a + p.k).log_softmax(1), (x @ p.z + p.k).log_softmax(1), log_target=True),
                {"a": a, "z": draw(4, 3), "k": draw(1)},
            ),
            "margin": (lambda p, x: F.multi_margin_loss(x @ p.a + p.k, x[:, :3].argmax(1)), {"a": a, "k": draw(1)}),
            "soft margin": (lambda p, x: F.soft_margin_loss(x @ p.a + p.c, x[:, :3].sign()), {"a": a, "c": c}),
            "triplet": (
                lambda p, x: F.triplet_margin_loss(x @ p.a + p.c, x.flip(0) @ p.a + p.c, x.roll(1, 0) @ p.a + p.c),
                {"a": a, "c": c},
            ),
            "triplet, tiny margin": (
                lambda p, x: F.triplet_margin_loss(
                    x @ p.a + p.c, x.flip(0) @ p.z, x.roll(1, 0) @ p.z, margin=1e-3, eps=0.0
                ),
                {"a": a, "z": draw(4, 3), "c": c},
            ),
            "cosine embedding": (
                lambda p, x: F.cosine_embedding_loss(x @ p.a, x @ p.z, x[:, 0].sign()),
                {"a": a, "z": draw(4, 3)},
            ),
            "ranking": (
                lambda p, x: F.margin_ranking_loss(
                    (x @ p.a + p.c).flatten(), (x @ p.z + p.c).flatten(), torch.ones(1).to(x)
                ),
                {"a": a, "z": draw(4, 3), "c": c},
            ),
            "huber": (lambda p, x: F.huber_loss(x @ p.a + p.c, x[:, :3], delta=0.3), {"a": a, "c": c}),
            "poisson, log": (lambda p, x: F.poisson_nll_loss(x @ p.a, x[:, :3].abs(), log_input=True), {"a": a}),
            "gaussian": (
                lambda p, x: F.gaussian_nll_loss(x @ p.a, x[:, :3], (x @ p.z).square() + 1e-2),
                {"a": a, "z": draw(4, 3)},
            ),
            "contrastive": (
                lambda p, x: (lambda u, v: F.cross_entropy(u @ v.T * p.k.exp(), torch.arange(len(x))))(
                    F.normalize(x @ p.a, eps=0.0), F.normalize(x @ p.z, eps=0.0)
                ),
                {"a": a, "z": draw(4, 3), "k": torch.tensor(0.4)},
            ),
            "contrastive, one map": (
                lambda p, x: (lambda u: F.cross_entropy(u @ u.T * p.k, torch.arange(len(x)).roll(1)))(
                    F.normalize(x @ p.a, eps=0.0)
                ),
                {"a": a, "k": torch.tensor(1.4)},
            ),
            "router, best of three": (
                lambda p, x: (lambda g: torch.einsum("n,nij,ni->nj", g.max(1).values, p.k[g.argmax(1)], x))(
                    (x @ p.a).softmax(1)
                ),
                {"a": a, "k": draw(3, 4, 2)},
            ),
            "router, two renormalised": (_router, {"a": a, "k": draw(3, 4, 2)}),
            "router, biased choice": (
                lambda p, x: (
                    lambda g: torch.einsum("nk,kij,ni->nj", g * F.one_hot((g + p.c).argmax(1), 3).to(x), p.k, x)
                )((x @ p.a).sigmoid()),
                {"a": a, "c": c, "k": draw(3, 4, 2)},
            ),
            "straight through choice": (
                lambda p, x: (lambda g: (F.one_hot(g.argmax(1), 3).to(x) - g).detach() + g)((x @ p.a).softmax(1)) @ p.b,
                {"a": a, "b": b},
            ),
            "vector quantiser": (_quantiser, {"a": a, "k": draw(5, 3), "b": b}),
            "power iteration": (_power, {"s": draw(4, 4), "a": a, "b": b}),
            "sinkhorn": (
                lambda p, x: (lambda h: (h - h.logsumexp(0, keepdim=True)).softmax(1))(x @ p.a + p.c) @ p.b,
                {"a": a, "c": c, "b": b},
            ),
            "padded list": (
                lambda p, x: pad_sequence([v[:, None] * p.c for v in (x @ p.a)], batch_first=True).flatten(1) @ p.y,
                {"a": a, "c": draw(2), "y": draw(6, 2)},
            ),
            "dropout in training": (
                lambda p, x: F.dropout((x @ p.a).tanh() * p.c, 0.5, training=True) @ p.b,
                {"a": a, "c": c, "b": b},
            ),
            "dropout of everything": (
                lambda p, x: F.dropout(x @ p.a, 1.0, training=True) @ p.b + x @ p.z,
                {"a": a, "b": b, "z": draw(4, 2)},
            ),
            "alpha dropout": (lambda p, x: F.alpha_dropout(x @ p.a, 0.5, training=True) @ p.b, {"a": a, "b": b}),
            "noise, scaled": (
                lambda p, x: (x @ p.a + p.c * torch.randn_like(x[:, :3])) @ p.b,
                {"a": a, "c": c, "b": b},
            ),
            "sampled latent": (
                lambda p, x: (x @ p.a + (x @ p.z).exp() * torch.randn_like(x[:, :3])) @ p.b,
                {"a": a, "z": draw(4, 3) / 3, "b": b},
            ),
            "gumbel": (lambda p, x: F.gumbel_softmax(x @ p.a + p.k, tau=0.7) @ p.b, {"a": a, "k": draw(1), "b": b}),
        },
        lambda: rows(4),
    )
    for training in (True, False):
        for name, norm in {
            "batch": nn.BatchNorm1d(3),
            "batch, no statistics": nn.BatchNorm1d(3, track_running_stats=False),
            "batch, no affine": nn.BatchNorm1d(3, affine=False),
            "batch, momentum none": nn.BatchNorm1d(3, momentum=None),
            "layer": nn.LayerNorm(3, eps=1e-3),
            "layer, no bias": nn.LayerNorm(3, bias=False),
            "rms": nn.RMSNorm(3),
            "rms, large eps": nn.RMSNorm(3, eps=1.0),
            "alpha dropout": nn.AlphaDropout(0.3),
            "dropout": nn.Dropout(0.3),
            "random leaky": nn.RReLU(),
            "glu": nn.Sequential(nn.Linear(3, 6), nn.GLU()),
            "maxout": nn.Sequential(nn.Linear(3, 6), nn.Unflatten(1, (3, 2)), nn.AdaptiveMaxPool1d(1), nn.Flatten()),
        }.items():
            model = nn.Sequential(nn.Linear(4, 3), _copied(norm), nn.Linear(3, 2)).train(training)
            yield f"mode: {name}, {'training' if training else 'evaluated'}", (model, rows(4))


def _quiet(p: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = (x @ p.z).relu()
    return (x @ p.a) * gate @ p.b


def _slope(p: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    energy = F.softplus(x @ p.a) @ p.b.square()
    (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    return force


def _router(p: Any, x: Tensor) -> Tensor:
    weights, chosen = (x @ p.a).topk(2, dim=1)
    return torch.einsum("nk,nkij,ni->nj", weights.softmax(1), p.k[chosen], x)


def _quantiser(p: Any, x: Tensor) -> Tensor:
    h = x @ p.a
    nearest = p.k[torch.cdist(h, p.k).argmin(1)]
    return torch.cat(((h + (nearest - h).detach()) @ p.b, (h.detach() - nearest).square()), 1)


def _power(p: Any, x: Tensor) -> Tensor:
    v = torch.ones(4).to(x)
    for _ in range(3):
        v = F.normalize(p.s @ v, dim=0, eps=0.0)
    return x @ p.a @ p.b * (v @ p.s @ v)


def blind() -> Iterator[tuple[str, Case]]:
    """All of them."""
    for family in (einsums, indexing, scatters, complexes, convolved, sequences, parametrized, modes):
        torch.manual_seed(11)
        yield from family()
