"""More models that try to get a wrong law out of inference: every option of operators whose operands are trained.

`adversarial_models` puts one operator between two maps. Here the operands themselves are parameters or computed from
them: learned grids, kernels, indices of tables, states, filters, gains inside `vmap`, checkpoints and hooks.
`programs()` names all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from adversarial_layers import Called, Function

Built = tuple[nn.Module, tuple[Any, ...]]
Form = tuple[Callable[..., Any], dict[str, Tensor], tuple[Any, ...]]


def draw(*shape: int) -> Tensor:
    """A random tensor."""
    return torch.randn(shape)


def _forms(title: str, forms: dict[str, Form]) -> Iterator[tuple[str, Built]]:
    for name, (function, parameters, args) in forms.items():
        yield f"{title} {name}", (Function(function, **parameters), args)


EINSUMS: dict[str, tuple[str, list[tuple[int, ...]]]] = {
    "chain": ("ni,ij,jk,kl->nl", [(6, 4), (4, 3), (3, 5), (5, 2)]),
    "chain swapped": ("ni,ji,kj->nk", [(6, 4), (3, 4), (2, 3)]),
    "implicit": ("ni,ij,jk", [(6, 4), (4, 3), (3, 2)]),
    "implicit order": ("bz,za,ac", [(6, 4), (4, 3), (3, 2)]),
    "ellipsis": ("...i,ij,jk->...k", [(2, 3, 4), (4, 3), (3, 2)]),
    "ellipsis both": ("...i,...ij->...j", [(3, 4), (3, 4, 2)]),
    "ellipsis first": ("i...,ij,jk->k...", [(4, 5), (4, 3), (3, 2)]),
    "diagonal in": ("nii,ij->nj", [(6, 4, 4), (4, 3)]),
    "diagonal weight": ("ni,iji,jk->nk", [(6, 4), (4, 3, 4), (3, 2)]),
    "diagonal both": ("ni,iij,jjk->nk", [(6, 4), (4, 4, 3), (3, 3, 2)]),
    "trace weight": ("ni,jj,ik->nk", [(6, 4), (3, 3), (4, 2)]),
    "sum operand": ("ni,ij,k->nj", [(6, 4), (4, 3), (5,)]),
    "sum inside": ("nij,jk->nk", [(6, 3, 4), (4, 2)]),
    "sum weight axis": ("ni,ijm,jk->nk", [(6, 4), (4, 3, 2), (3, 2)]),
    "batch weight": ("ni,nij,njk->nk", [(6, 4), (6, 4, 3), (6, 3, 2)]),
    "batch shared": ("bni,bij,jk->bnk", [(2, 3, 4), (2, 4, 3), (3, 2)]),
    "outer": ("ni,j,k,ij->nk", [(6, 4), (3,), (2,), (4, 3)]),
    "outer kept": ("ni,j,jk->nik", [(6, 4), (3,), (3, 2)]),
    "four way": ("na,nb,abc,cd->nd", [(6, 3), (6, 3), (3, 3, 4), (4, 2)]),
    "core": ("na,ai,ijk,kl->njl", [(6, 4), (4, 3), (3, 2, 3), (3, 2)]),
    "ring": ("ni,aib,bc,cda->nd", [(6, 4), (2, 4, 3), (3, 2), (2, 3, 2)]),
    "star": ("na,ar,br,cr->nbc", [(6, 4), (4, 3), (2, 3), (2, 3)]),
    "star weight": ("na,ar,r,br->nb", [(6, 4), (4, 3), (3,), (2, 3)]),
    "hadamard": ("ni,ij,ij,jk->nk", [(6, 4), (4, 3), (4, 3), (3, 2)]),
    "hadamard swapped": ("ni,ij,ji,jk->nk", [(6, 4), (4, 3), (3, 4), (3, 2)]),
    "size one": ("ni,ij,jk->nk", [(6, 4), (4, 1), (1, 2)]),
    "vector": ("ni,i->n", [(6, 4), (4,)]),
    "scalar": ("ni,ij,->nj", [(6, 4), (4, 3), ()]),
    "permuted out": ("ni,ij,jkl->lkn", [(6, 4), (4, 3), (3, 2, 2)]),
    "heads": ("nhi,hij,hjk->nk", [(5, 2, 4), (2, 4, 3), (2, 3, 2)]),
    "heads apart": ("ni,hij,hjk->nhk", [(5, 4), (2, 4, 3), (2, 3, 2)]),
    "heads averaged": ("ni,hij,jk->nk", [(5, 4), (2, 4, 3), (3, 2)]),
    "scores": ("ni,ia,mb,ba->nm", [(5, 4), (4, 3), (5, 4), (4, 3)]),
    "moebius": ("ni,ij,jk,kj->nk", [(6, 4), (4, 3), (3, 2), (2, 3)]),
}


def einsums() -> Iterator[tuple[str, Built]]:
    """Contractions of every form: the first operand is given, the others are trained; then two operands are one."""
    for name, (form, shapes) in EINSUMS.items():
        weights = {f"w{n}": draw(*shape) for n, shape in enumerate(shapes[1:])}
        count = len(weights)
        x = draw(*shapes[0])

        def plain(p: Any, x: Tensor, form: str = form, count: int = count) -> Tensor:
            return torch.einsum(form, x, *(getattr(p, f"w{n}") for n in range(count)))

        yield f"einsum {name}", (Function(plain, **weights), (x,))

        def cut(p: Any, x: Tensor, form: str = form, count: int = count) -> Tensor:
            return torch.einsum(form, x, *(getattr(p, f"w{n}").relu() + getattr(p, f"w{n}") for n in range(count)))

        yield f"einsum bent {name}", (Function(cut, **{k: w.clone() for k, w in weights.items()}), (x,))
    tied: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], int]] = {
        "symmetric form": ("ni,ij,nj->n", (6, 4), (4, 4), 1),
        "square": ("ni,ij,kj->nk", (6, 4), (4, 3), 2),
        "square other side": ("ni,ji,jk->nk", (6, 4), (3, 4), 2),
        "cube": ("ni,ij,kj,kl->nl", (6, 4), (4, 3), 3),
        "fourth": ("ni,ij,kj,kl,ml->nm", (6, 4), (4, 3), 4),
        "power": ("ni,ij,jk->nk", (6, 4), (4, 4), 2),
        "power crossed": ("ni,ij,kj->nk", (6, 4), (4, 4), 2),
        "third order": ("na,abc,dbc->nd", (6, 3), (3, 2, 2), 2),
        "third order crossed": ("na,abc,dcb->nd", (6, 3), (3, 2, 2), 2),
        "third order thrice": ("na,abc,cbd,dea->ne", (6, 3), (3, 3, 3), 3),
        "diagonal": ("ni,ii,ij->nj", (6, 4), (4, 4), 2),
        "hadamard": ("ni,ij,ij->nj", (6, 4), (4, 3), 2),
        "hadamard crossed": ("ni,ij,ji->nj", (6, 4), (4, 4), 2),
        "trace": ("ni,jk,kj->ni", (6, 4), (3, 3), 2),
        "norm": ("ni,jk,jk->ni", (6, 4), (3, 2), 2),
        "gram entries": ("ni,ja,jb->nab", (6, 4), (3, 2), 2),
    }
    for name, (form, given, shape, times) in tied.items():

        def repeated(p: Any, x: Tensor, form: str = form, times: int = times) -> Tensor:
            operands = [x, *[p.w] * times, *([x] if form.count("n") > 2 else [])]
            return torch.einsum(form, *operands)

        yield f"einsum tied {name}", (Function(repeated, w=draw(*shape)), (draw(*given),))


def indexing() -> Iterator[tuple[str, Built]]:
    """Parameters that are looked up, written, gathered and scattered in every way."""
    x, i, j = (
        draw(6, 4),
        torch.tensor([0, 2, 2, 1, 3, 0]),
        torch.tensor([[0, 1], [3, 3], [2, 0], [1, 1], [0, 2], [3, 1]]),
    )
    half = torch.tensor([True, False, True, True])
    w, v, b = draw(4, 4), draw(4, 3), draw(4)
    yield from _forms(
        "index",
        {
            "rows": (lambda p, x: x @ p.w[[0, 2, 2, 1]] @ p.v, {"w": w, "v": v}, (x,)),
            "columns": (lambda p, x: x @ p.w[:, [3, 0, 0, 1]] @ p.v, {"w": w, "v": v}, (x,)),
            "both": (lambda p, x: x @ p.w[[0, 1, 3, 2]][:, [1, 0, 2, 3]] @ p.v, {"w": w, "v": v}, (x,)),
            "pairs": (lambda p, x: x * p.w[[0, 1, 2, 3], [1, 1, 0, 3]] @ p.v, {"w": w, "v": v}, (x,)),
            "mesh": (lambda p, x: x[:, :2] @ p.w[[[0], [2]], [1, 3]] @ p.v[:2], {"w": w, "v": v}, (x,)),
            "mask": (lambda p, x: x[:, :3] @ p.w[half] @ p.v, {"w": w, "v": v}, (x,)),
            "mask columns": (lambda p, x: x @ p.w[:, half] @ p.v[:3], {"w": w, "v": v}, (x,)),
            "mask entries": (lambda p, x: x[:, :1] * p.w[p.w.detach() > -99].sum(), {"w": w}, (x,)),
            "negative": (lambda p, x: x @ p.w[:, -3:] @ p.v[-3:], {"w": w, "v": v}, (x,)),
            "negative crossed": (lambda p, x: x @ p.w[:, -3:] @ p.v[:3], {"w": w, "v": v}, (x,)),
            "steps": (lambda p, x: x @ p.w[:, ::3] @ p.v[::3], {"w": w, "v": v}, (x,)),
            "none": (lambda p, x: (x[:, None] * p.w[None, :, 1]).sum(1) @ p.v, {"w": w, "v": v}, (x,)),
            "table by sample": (lambda p, i, x: (x * p.w[i]) @ p.v, {"w": w, "v": v}, (i, x)),
            "table twice": (lambda p, i, x: (p.w[i] - p.w[i.flip(0)]) @ p.v, {"w": w, "v": v}, (i, x)),
            "table and rows": (lambda p, i, x: (p.w[i] + p.b) @ p.v, {"w": w, "b": b, "v": v}, (i, x)),
            "table normed": (lambda p, i, x: F.layer_norm(p.w[i] + p.u[i], (4,)), {"w": w, "u": draw(4, 4)}, (i, x)),
            "table of pairs": (lambda p, j: p.w[j].prod(1) @ p.v, {"w": w, "v": v}, (j,)),
            "table of pairs summed": (lambda p, j: p.w[j].sum(1).relu() @ p.v, {"w": w, "v": v}, (j,)),
            "table entries": (lambda p, j: p.w[j[:, 0], j[:, 1]], {"w": w}, (j,)),
            "table entries against": (lambda p, j: p.b[j[:, 0]] - p.c[j[:, 1]], {"b": b, "c": draw(4)}, (j,)),
            "table entries times": (lambda p, j: p.b[j[:, 0]] * p.c[j[:, 1]], {"b": b, "c": draw(4)}, (j,)),
            "table entries over": (lambda p, j: p.b[j[:, 0]] / p.b[j[:, 1]], {"b": b}, (j,)),
            "gather weights": (lambda p, j, x: p.w.gather(1, j[:4]) @ p.v[:2], {"w": w, "v": v}, (j, x)),
            "gather activations": (lambda p, j, x: (x @ p.w).gather(1, j) @ p.v[:2], {"w": w, "v": v}, (j, x)),
            "take along": (lambda p, j, x: torch.take_along_dim(x @ p.w, j, 1) @ p.v[:2], {"w": w, "v": v}, (j, x)),
            "take": (lambda p, x: torch.take(p.w, torch.tensor([0, 5, 10, 15])) * x, {"w": w}, (x,)),
            "select": (lambda p, x: p.w.index_select(0, torch.tensor([1, 1, 3, 0])) @ p.v, {"w": w, "v": v}, (x,)),
            "diagonal": (lambda p, x: x @ torch.diag(p.b) @ p.v, {"b": b, "v": v}, (x,)),
            "diagonal of weight": (lambda p, x: x * torch.diag(p.w) @ p.v, {"w": w, "v": v}, (x,)),
            "off diagonal": (lambda p, x: x @ (p.w - torch.diag(torch.diag(p.w))) @ p.v, {"w": w, "v": v}, (x,)),
            "diagonal written": (lambda p, x: x @ p.w.diagonal_scatter(p.b) @ p.v, {"w": w, "b": b, "v": v}, (x,)),
            "row written": (lambda p, x: x @ p.w.select_scatter(p.b, 0, 2) @ p.v, {"w": w, "b": b, "v": v}, (x,)),
            "column written": (lambda p, x: x @ p.w.select_scatter(p.b, 1, 2) @ p.v, {"w": w, "b": b, "v": v}, (x,)),
            "block written": (lambda p, x: x @ p.w.slice_scatter(p.u, 1, 1, 3), {"w": w, "u": draw(4, 2)}, (x,)),
            "masked weight": (lambda p, x: x @ p.w.masked_fill(torch.eye(4) > 0, 0.0) @ p.v, {"w": w, "v": v}, (x,)),
            "masked weight one": (
                lambda p, x: x @ p.w.masked_fill(torch.eye(4) > 0, 1.0) @ p.v,
                {"w": w, "v": v},
                (x,),
            ),
            "where weight": (lambda p, x: x @ torch.where(torch.eye(4) > 0, p.w, p.u), {"w": w, "u": draw(4, 4)}, (x,)),
            "where sign": (
                lambda p, x: x @ torch.where(p.w > 0, p.w, p.u) @ p.v,
                {"w": w, "u": draw(4, 4), "v": v},
                (x,),
            ),
            "triangle": (lambda p, x: x @ p.w.tril() @ p.u.triu() @ p.v, {"w": w, "u": draw(4, 4), "v": v}, (x,)),
            "triangle strict": (lambda p, x: x @ (p.w.tril(-1) + torch.eye(4)) @ p.v, {"w": w, "v": v}, (x,)),
            "triangle and transpose": (lambda p, x: x @ (p.w.tril() + p.w.tril(-1).T) @ p.v, {"w": w, "v": v}, (x,)),
            "triangle indices": (
                lambda p, x: x @ torch.zeros(4, 4, dtype=x.dtype).index_put(tuple(torch.tril_indices(4, 4)), p.t) @ p.v,
                {"t": draw(10), "v": v},
                (x,),
            ),
            "upper indices": (
                lambda p, x: torch.einsum("ni,nj->nij", x, x)[:, *torch.triu_indices(4, 4)] @ p.t,
                {"t": draw(10, 2)},
                (x,),
            ),
            "flat": (lambda p, x: x @ p.t[:12].view(4, 3) @ p.t[12:].view(3, 2), {"t": draw(18)}, (x,)),
            "flat overlapping": (lambda p, x: x @ p.t[:12].view(4, 3) @ p.t[10:16].view(3, 2), {"t": draw(18)}, (x,)),
            "unbound": (lambda p, x: x @ p.g.unbind(0)[0] @ p.g.unbind(0)[1], {"g": draw(2, 4, 4)}, (x,)),
            "unbound same": (lambda p, x: x @ p.g[0] @ p.g[1] + x @ p.g[1] @ p.g[0], {"g": draw(2, 4, 4)}, (x,)),
            "chunks": (lambda p, x: x @ p.w.chunk(2, 1)[0] @ p.w.chunk(2, 0)[1], {"w": w}, (x,)),
            "cat": (
                lambda p, x: torch.cat([x @ p.w, x], 1) @ torch.cat([p.u, p.v]),
                {"w": w, "u": draw(4, 3), "v": v},
                (x,),
            ),
            "cat weight": (
                lambda p, x: x @ torch.cat([p.u, p.v], 1) @ p.o,
                {"u": draw(4, 2), "v": v, "o": draw(5, 2)},
                (x,),
            ),
            "stack weight": (
                lambda p, x: x @ torch.stack([p.b, p.c], 1) @ p.o,
                {"b": b, "c": draw(4), "o": draw(2, 2)},
                (x,),
            ),
            "put": (
                lambda p, x: torch.zeros(6, 4, dtype=x.dtype).index_put((i,), x @ p.w) @ p.v,
                {"w": w, "v": v},
                (x,),
            ),
            "put added": (
                lambda p, x: torch.zeros(6, 4, dtype=x.dtype).index_put((i,), x @ p.w, accumulate=True).relu() @ p.v,
                {"w": w, "v": v},
                (x,),
            ),
            "put onto": (
                lambda p, x: p.u.index_put((i,), x @ p.w, accumulate=True) @ p.v,
                {"u": draw(4, 4), "w": w, "v": v},
                (x,),
            ),
            "put over": (
                lambda p, x: p.u.index_put((i[:3],), (x @ p.w)[:3]) @ p.v,
                {"u": draw(4, 4), "w": w, "v": v},
                (x,),
            ),
            "put entries": (
                lambda p, x: p.u.index_put((torch.tensor([0, 1]), torch.tensor([2, 2])), p.c, accumulate=True) @ p.v,
                {"u": draw(4, 4), "c": draw(2), "v": v},
                (x,),
            ),
            **{
                f"scatter {reduce} {own}": (
                    lambda p, x, r=reduce, o=own: (
                        p.u.scatter_reduce(0, i[:, None].expand(6, 4), x @ p.w, r, include_self=o) @ p.v
                    ),
                    {"u": draw(4, 4), "w": draw(4, 4), "v": draw(4, 3)},
                    (x,),
                )
                for reduce in ("sum", "mean", "amax", "amin", "prod")
                for own in (True, False)
            },
            "scatter value": (lambda p, x: (x @ p.w).scatter(1, j, 0.0) @ p.v, {"w": w, "v": v}, (x,)),
            "scatter value one": (lambda p, x: (x @ p.w).scatter(1, j, 1.0) @ p.v, {"w": w, "v": v}, (x,)),
            "index add scaled": (
                lambda p, x: p.u.index_add(0, i, x @ p.w, alpha=-0.5) @ p.v,
                {"u": draw(4, 4), "w": w, "v": v},
                (x,),
            ),
            "index copy": (
                lambda p, x: p.u.index_copy(0, torch.tensor([3, 1]), p.t) @ p.v,
                {"u": w, "t": draw(2, 4), "v": v},
                (x,),
            ),
            "index fill": (lambda p, x: x @ p.w.index_fill(1, torch.tensor([1]), 0.0) @ p.v, {"w": w, "v": v}, (x,)),
            "masked scatter": (
                lambda p, x: (x @ p.w).masked_scatter(torch.eye(6, 4) > 0, p.b) @ p.v,
                {"w": w, "b": b, "v": v},
                (x,),
            ),
            "segment sum": (
                lambda p, x: torch.segment_reduce(x @ p.w, "sum", lengths=torch.tensor([2, 3, 1])) @ p.v,
                {"w": w, "v": v},
                (x,),
            ),
            "segment min": (
                lambda p, x: torch.segment_reduce(x @ p.w, "min", lengths=torch.tensor([2, 4])) @ p.v,
                {"w": w, "v": v},
                (x,),
            ),
            "segment prod": (
                lambda p, x: torch.segment_reduce(x @ p.w, "prod", lengths=torch.tensor([2, 4])) @ p.v,
                {"w": w, "v": v},
                (x,),
            ),
            "segment start": (
                lambda p, x: torch.segment_reduce(x @ p.w, "max", lengths=torch.tensor([2, 4]), initial=0.0) @ p.v,
                {"w": w, "v": v},
                (x,),
            ),
        },
    )


def tables() -> Iterator[tuple[str, Built]]:
    """Look-up tables: functional forms, offsets, learned weights of samples, tied heads, transposes."""
    i = torch.tensor([[0, 2, 1, 1], [5, 2, 3, 0], [4, 4, 5, 1]])
    flat, offsets = torch.tensor([0, 2, 5, 1, 4, 4, 3]), torch.tensor([0, 3, 3, 5])
    e, h = draw(6, 4), draw(4, 3)
    forms: dict[str, Form] = {
        "padded": (lambda p, i: F.embedding(i, p.e, padding_idx=2) @ p.h, {"e": e, "h": h}, (i,)),
        "padded normed": (
            lambda p, i: F.layer_norm(F.embedding(i, p.e, padding_idx=2), (4,)) @ p.h,
            {"e": e, "h": h},
            (i,),
        ),
        "one hot": (lambda p, i: F.one_hot(i, 6).to(p.e) @ p.e @ p.h, {"e": e, "h": h}, (i,)),
        "one hot transposed": (lambda p, i: F.linear(F.one_hot(i, 6).to(p.e), p.e.T) @ p.h, {"e": e, "h": h}, (i,)),
        "tied": (lambda p, i: (F.embedding(i, p.e) @ p.w).relu() @ p.e.T, {"e": e, "w": draw(4, 4)}, (i,)),
        "tied normed": (
            lambda p, i: F.rms_norm(F.embedding(i, p.e) + p.q[i], (4,), eps=0.0) @ p.e.T,
            {"e": e, "q": draw(6, 4)},
            (i,),
        ),
        "tied with scale": (
            lambda p, i: F.layer_norm(F.embedding(i, p.e), (4,), p.g, eps=0.0) @ p.e.T * p.s,
            {"e": e, "g": draw(4), "s": torch.tensor(0.3)},
            (i,),
        ),
        "positions": (
            lambda p, i: F.layer_norm(p.e[i] + p.q[: i.shape[1]], (4,)) @ p.h,
            {"e": e, "q": draw(7, 4), "h": h},
            (i,),
        ),
        "positions scaled": (
            lambda p, i: F.layer_norm(2.0 * p.e[i] + p.q[: i.shape[1]] / 3, (4,)) @ p.h,
            {"e": e, "q": draw(7, 4), "h": h},
            (i,),
        ),
        "positions flipped": (
            lambda p, i: F.layer_norm(p.e[i] + p.q[: i.shape[1]].flip(0), (4,)) @ p.h,
            {"e": e, "q": draw(7, 4), "h": h},
            (i,),
        ),
        "positions twice": (
            lambda p, i: (p.e[i] + p.q[:4] + p.r[1:5]) @ p.h,
            {"e": e, "q": draw(4, 4), "r": draw(6, 4), "h": h},
            (i,),
        ),
        "positions minus": (
            lambda p, i: (p.e[i] - p.q[:4] + p.b) @ p.h,
            {"e": e, "q": draw(4, 4), "b": draw(4), "h": h},
            (i,),
        ),
        "relative": (
            lambda p, i: p.e[i] @ p.e[i].mT + p.t[(torch.arange(4)[:, None] - torch.arange(4)) + 3],
            {"e": e, "t": draw(7)},
            (i,),
        ),
        "relative softmax": (
            lambda p, i: (p.e[i] @ p.w @ p.e[i].mT + p.t[(torch.arange(4)[:, None] - torch.arange(4)) + 3]).softmax(-1),
            {"e": e, "w": draw(4, 4), "t": draw(7)},
            (i,),
        ),
        "segments": (
            lambda p, i: F.layer_norm(p.e[i] + p.q[:4] + p.s[i % 2], (4,)) @ p.h,
            {"e": e, "q": draw(4, 4), "s": draw(2, 4), "h": h},
            (i,),
        ),
        "mean of rows": (lambda p, i: p.e[i].mean(1) @ p.h, {"e": e, "h": h}, (i,)),
        "max of rows": (lambda p, i: p.e[i].amax(1) @ p.h, {"e": e, "h": h}, (i,)),
        "softmax rows": (lambda p, i: p.e.softmax(0)[i] @ p.h, {"e": e, "h": h}, (i,)),
        "normalised rows": (lambda p, i: F.normalize(p.e, dim=1, eps=0.0)[i] @ p.h, {"e": e, "h": h}, (i,)),
        "normalised columns": (lambda p, i: F.normalize(p.e, dim=0, eps=0.0)[i] @ p.h, {"e": e, "h": h}, (i,)),
        "centred rows": (lambda p, i: (p.e - p.e.mean(0))[i] @ p.h, {"e": e, "h": h}, (i,)),
        "centred columns": (lambda p, i: (p.e - p.e.mean(1, keepdim=True))[i] @ p.h, {"e": e, "h": h}, (i,)),
        "distance": (lambda p, i: (p.e[i[:, 0]] - p.e[i[:, 1]]).square().sum(-1), {"e": e}, (i,)),
        "translation": (
            lambda p, i: (p.e[i[:, 0]] + p.r[i[:, 1] % 3] - p.e[i[:, 2]]).norm(dim=-1),
            {"e": e, "r": draw(3, 4)},
            (i,),
        ),
        "distmult": (
            lambda p, i: (p.e[i[:, 0]] * p.r[i[:, 1] % 3] * p.e[i[:, 2]]).sum(-1),
            {"e": e, "r": draw(3, 4)},
            (i,),
        ),
        "complex": (
            lambda p, i: (
                (
                    torch.view_as_complex(p.e.view(6, 2, 2))[i[:, 0]]
                    * torch.view_as_complex(p.e.view(6, 2, 2))[i[:, 2]].conj()
                ).real
            ),
            {"e": e},
            (i,),
        ),
        "rotate": (
            lambda p, i: (
                torch.view_as_complex(p.e.view(6, 2, 2))[i[:, 0]]
                * torch.polar(torch.ones(3, 2, dtype=p.r.dtype), p.r)[i[:, 1] % 3]
                - torch.view_as_complex(p.e.view(6, 2, 2))[i[:, 2]]
            ).abs(),
            {"e": e, "r": draw(3, 2)},
            (i,),
        ),
        "factorised": (
            lambda p, i: (p.a[i[:, 0]] * p.c[i[:, 1]]).sum(-1) + p.b[i[:, 0]] + p.d[i[:, 1]],
            {"a": e, "c": draw(6, 4), "b": draw(6), "d": draw(6)},
            (i,),
        ),
        "low rank table": (lambda p, i: p.a[i] @ p.c @ p.h, {"a": draw(6, 2), "c": draw(2, 4), "h": h}, (i,)),
        "hashed": (lambda p, i: (p.a[i % 3] * p.c[i // 3]) @ p.h, {"a": draw(3, 4), "c": draw(2, 4), "h": h}, (i,)),
        "hashed sum": (lambda p, i: (p.a[i % 3] + p.c[i // 3]) @ p.h, {"a": draw(3, 4), "c": draw(2, 4), "h": h}, (i,)),
    }
    for mode in ("sum", "mean", "max"):
        forms[f"bag {mode}"] = (
            lambda p, f, m=mode: F.embedding_bag(f, p.e, offsets, mode=m) @ p.h,
            {"e": e.clone(), "h": h.clone()},
            (flat,),
        )
        forms[f"bag {mode} last"] = (
            lambda p, f, m=mode: (
                F.embedding_bag(f, p.e, torch.tensor([0, 3, 7]), mode=m, include_last_offset=True) @ p.h
            ),
            {"e": e.clone(), "h": h.clone()},
            (flat,),
        )
        forms[f"bag {mode} normed"] = (
            lambda p, f, m=mode: F.layer_norm(F.embedding_bag(f, p.e, offsets, mode=m), (4,)) @ p.h,
            {"e": e.clone(), "h": h.clone()},
            (flat,),
        )
        forms[f"bag {mode} padded"] = (
            lambda p, f, m=mode: F.embedding_bag(f, p.e, offsets, mode=m, padding_idx=4) @ p.h,
            {"e": e.clone(), "h": h.clone()},
            (flat,),
        )
    forms["bag learned"] = (
        lambda p, f: F.embedding_bag(f, p.e, offsets, mode="sum", per_sample_weights=p.s) @ p.h,
        {"e": e, "s": draw(7), "h": h},
        (flat,),
    )
    forms["bag softmax"] = (
        lambda p, f: F.embedding_bag(f, p.e, offsets, mode="sum", per_sample_weights=p.s.softmax(0)) @ p.h,
        {"e": e, "s": draw(7), "h": h},
        (flat,),
    )
    yield from _forms("table", {k: (f, {n: t.clone() for n, t in q.items()}, a) for k, (f, q, a) in forms.items()})


def kernels() -> Iterator[tuple[str, Built]]:
    """Convolutions as functions, with computed kernels, unfolding, shuffling, sampling by learned grids."""
    s, im = draw(2, 3, 9), draw(2, 3, 5, 5)
    for (pad, mode), stride, norm in itertools.product(
        (((2, 0), "constant"), ((1, 1), "reflect"), ((2, 2), "circular"), ((0, 2), "replicate")), (1, 3), (False, True)
    ):

        def run(p: Any, s: Tensor, pad: Any = pad, mode: str = mode, stride: int = stride, norm: bool = norm) -> Tensor:
            h = F.conv1d(F.pad(F.conv1d(s, p.a, p.b), pad, mode=mode), p.c, p.d, stride)
            return F.conv1d(F.instance_norm(h) if norm else h.relu(), p.e)

        name = f"conv1d {mode} {pad} {stride} {norm}"
        parts = {"a": draw(4, 3, 2), "b": draw(4), "c": draw(4, 4, 3), "d": draw(4), "e": draw(2, 4, 1)}
        yield name, (Function(run, **parts), (s,))
    for padding, dilation, groups, bias in itertools.product(("same", "valid"), (1, 2), (1, 2, 4), (True, False)):
        model = nn.Sequential(
            nn.Conv2d(3, 4, 1, bias=bias),
            nn.Conv2d(4, 4, (3, 1), padding=padding, dilation=dilation, groups=groups, bias=bias),
            nn.GroupNorm(2, 4, affine=bias),
            nn.Conv2d(4, 2, 1, bias=bias),
        )
        yield f"conv2d {padding} {dilation} {groups} {bias}", (model, (im,))
    for stride, edge, out, groups, dilation in itertools.product((1, 2), (0, 1), (0, 1), (1, 2), (1, 2)):
        if out >= max(stride, dilation):
            continue
        layer = nn.ConvTranspose2d(4, 4, 2, stride, edge, out, groups, True, dilation)
        yield (
            f"transposed2d {stride} {edge} {out} {groups} {dilation}",
            (nn.Sequential(nn.Conv2d(3, 4, 1), layer, nn.ReLU(), nn.Conv2d(4, 2, 1)), (im,)),
        )
    a, b, c = draw(4, 3, 3, 3), draw(4), draw(2, 4, 1, 1)
    yield from _forms(
        "kernel",
        {
            "standardised": (
                lambda p, x: F.conv2d(F.conv2d(x, p.a - p.a.mean((1, 2, 3), keepdim=True)).relu(), p.c),
                {"a": a, "c": c},
                (im,),
            ),
            "normalised": (
                lambda p, x: F.conv2d(
                    F.conv2d(x, F.normalize(p.a.flatten(1), dim=1, eps=0.0).view_as(p.a)).relu(), p.c
                ),
                {"a": a, "c": c},
                (im,),
            ),
            "flipped": (lambda p, x: F.conv2d(x, p.a) + F.conv2d(x, p.a.flip(2)), {"a": a}, (im,)),
            "flipped minus": (lambda p, x: F.conv2d(x, p.a) - F.conv2d(x, p.a.flip(3)), {"a": a}, (im,)),
            "rotated": (
                lambda p, x: torch.stack([F.conv2d(x, torch.rot90(p.a, k, (2, 3))) for k in range(4)]).amax(0),
                {"a": a},
                (im,),
            ),
            "rotated mean": (
                lambda p, x: F.conv2d(
                    torch.stack([F.conv2d(x, torch.rot90(p.a, k, (2, 3))) for k in range(4)]).sum(0), p.c
                ),
                {"a": a, "c": c},
                (im,),
            ),
            "separable": (
                lambda p, x: F.conv2d(F.conv2d(x, p.r.repeat(3, 1, 1, 1), groups=3), p.c[:, :3]),
                {"r": draw(1, 1, 3, 1), "c": c},
                (im,),
            ),
            "outer kernel": (
                lambda p, x: F.conv2d(x, torch.einsum("oi,h,w->oihw", p.m, p.u, p.v)),
                {"m": draw(4, 3), "u": draw(3), "v": draw(3)},
                (im,),
            ),
            "generated": (
                lambda p, x: F.conv2d(x, (p.z @ p.g).view(4, 3, 3, 3)),
                {"z": draw(2), "g": draw(2, 108)},
                (im,),
            ),
            "by sample": (
                lambda p, x: F.conv2d(x.reshape(1, 6, 5, 5), (x.mean((2, 3)) @ p.g).view(4, 3, 3, 3), groups=2),
                {"g": draw(3, 54)},
                (im,),
            ),
            "mixture": (
                lambda p, x: F.conv2d(x, torch.einsum("k,koihw->oihw", p.r.softmax(0), p.k)),
                {"r": draw(2), "k": draw(2, 4, 3, 3, 3)},
                (im,),
            ),
            "modulated": (
                lambda p, x: (
                    F.conv2d(x, p.a * p.s.view(1, 3, 1, 1))
                    / (p.a * p.s.view(1, 3, 1, 1)).square().sum((1, 2, 3)).sqrt().view(4, 1, 1)
                ),
                {"a": a, "s": draw(3)},
                (im,),
            ),
            "padded by one": (
                lambda p, x: F.conv2d(F.pad(F.conv2d(x, p.a, p.b), (1, 1, 1, 1), value=1.0), p.d),
                {"a": a, "b": b, "d": draw(2, 4, 3, 3)},
                (im,),
            ),
            "padded by parameter": (
                lambda p, x: torch.cat([p.t.expand(2, 3, 5, 1), x], 3).flatten(1) @ p.d,
                {"t": draw(1, 3, 5, 1), "d": draw(90, 2)},
                (im,),
            ),
            "unfold product": (
                lambda p, x: torch.einsum("nkl,ok->nol", F.unfold(x, 3), p.a.flatten(1)),
                {"a": a},
                (im,),
            ),
            "unfold pair": (
                lambda p, x: torch.einsum("nkl,ok,po->npl", F.unfold(x, 2, dilation=2, stride=2), p.a, p.c),
                {"a": draw(4, 12), "c": draw(2, 4)},
                (im,),
            ),
            "fold": (
                lambda p, x: F.fold(torch.einsum("nil,ki->nkl", x.flatten(2), p.a), (6, 6), 2) @ p.c,
                {"a": draw(8, 3), "c": draw(6, 2)},
                (im,),
            ),
            "fold overlapping": (
                lambda p, x: (
                    F.fold(torch.einsum("nil,ki->nkl", x.flatten(2)[:, :, :16], p.a), (5, 5), 2, stride=1).relu() @ p.c
                ),
                {"a": draw(8, 3), "c": draw(5, 2)},
                (im,),
            ),
            "shuffle up": (
                lambda p, x: F.conv2d(F.pixel_shuffle(F.conv2d(x, p.a, p.b), 2), p.c),
                {"a": draw(8, 3, 1, 1), "b": draw(8), "c": draw(3, 2, 1, 1)},
                (im,),
            ),
            "shuffle up relu": (
                lambda p, x: F.conv2d(F.pixel_shuffle(F.conv2d(x, p.a, p.b), 2).relu(), p.c, padding=1),
                {"a": draw(8, 3, 1, 1), "b": draw(8), "c": draw(3, 2, 3, 3)},
                (im,),
            ),
            "shuffle down": (
                lambda p, x: F.conv2d(F.pixel_unshuffle(F.conv2d(x, p.a, p.b)[:, :, :4, :4], 2), p.c),
                {"a": draw(2, 3, 1, 1), "b": draw(2), "c": draw(3, 8, 1, 1)},
                (im,),
            ),
            "shuffle channels": (
                lambda p, x: F.conv2d(F.channel_shuffle(F.conv2d(x, p.a), 2), p.c, groups=2),
                {"a": draw(4, 3, 1, 1), "c": draw(4, 2, 1, 1)},
                (im,),
            ),
            "blur pool": (
                lambda p, x: F.conv2d(F.avg_pool2d(F.conv2d(x, p.a, p.b), 2, ceil_mode=True), p.c),
                {"a": a, "b": b, "c": c},
                (im,),
            ),
            "max then average": (
                lambda p, x: F.conv2d(F.avg_pool2d(F.max_pool2d(F.conv2d(x, p.a, p.b, padding=1), 2), 2), p.c),
                {"a": a, "b": b, "c": c},
                (im,),
            ),
            "learned grid": (
                lambda p, x: F.grid_sample(F.conv2d(x, p.a, p.b), p.g.tanh(), align_corners=False),
                {"a": draw(4, 3, 1, 1), "b": b, "g": draw(2, 4, 4, 2)},
                (im,),
            ),
            "affine grid": (
                lambda p, x: F.grid_sample(
                    F.conv2d(x, p.a),
                    F.affine_grid(p.t.expand(2, 2, 3), [2, 4, 4, 4], align_corners=False),
                    align_corners=False,
                ),
                {"a": draw(4, 3, 1, 1), "t": draw(1, 2, 3)},
                (im,),
            ),
            "flow": (
                lambda p, x: F.grid_sample(
                    x, F.conv2d(x, p.a, padding=1).movedim(1, -1).tanh(), padding_mode="border", align_corners=True
                ),
                {"a": draw(2, 3, 3, 3)},
                (im,),
            ),
            **{
                f"sampled {mode} {padding} {corners}": (
                    lambda p, x, m=mode, q=padding, k=corners: F.conv2d(
                        F.grid_sample(
                            F.conv2d(x, p.a, p.b),
                            torch.linspace(-1.3, 1.3, 32, dtype=x.dtype).view(1, 4, 4, 2).expand(2, 4, 4, 2),
                            mode=m,
                            padding_mode=q,
                            align_corners=k,
                        ),
                        p.c,
                    ),
                    {"a": draw(4, 3, 1, 1), "b": draw(4), "c": draw(2, 4, 1, 1)},
                    (im,),
                )
                for mode, padding, corners in itertools.product(
                    ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection"), (True, False)
                )
            },
            **{
                f"resized {mode}": (
                    lambda p, x, m=mode: F.conv2d(F.interpolate(F.conv2d(x, p.a, p.b), size=(7, 4), mode=m), p.c),
                    {"a": draw(4, 3, 1, 1), "b": draw(4), "c": draw(2, 4, 1, 1)},
                    (im,),
                )
                for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area")
            },
        },
    )


def sequences() -> Iterator[tuple[str, Built]]:
    """Scans, states, cumulative sums and products, recurrent layers with projections and directions, CTC."""
    x = draw(5, 3, 4)
    for layers, both, proj, first, norm in itertools.product(
        (1, 2), (True, False), (0, 2), (True, False), (True, False)
    ):
        layer = nn.LSTM(4, 5, num_layers=layers, bidirectional=both, proj_size=proj, batch_first=first, bias=norm)
        width = (proj or 5) * (2 if both else 1)
        head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2)) if norm else nn.Linear(width, 2, bias=False)
        yield (
            f"lstm {layers} {both} {proj} {first} {norm}",
            (Called(lambda m, x: m.head(m.layer(x)[0]), layer=layer, head=head), (x,)),
        )
    for kind, state in itertools.product(("rnn", "gru", "lstm"), (True, False)):
        started = {"rnn": nn.RNN(4, 3, nonlinearity="relu"), "gru": nn.GRU(4, 3), "lstm": nn.LSTM(4, 3)}[kind]

        def run(m: Any, x: Tensor, kind: str = kind, state: bool = state) -> Any:
            first = m.start(x[0])[None]
            out, last = m.layer(x, (first, first) if kind == "lstm" else first)
            return (last[0] if kind == "lstm" else last) if state else m.head(out)

        yield f"started {kind} {state}", (Called(run, layer=started, start=nn.Linear(4, 3), head=nn.Linear(3, 2)), (x,))
    a, b, r = draw(4, 3), draw(3, 2), draw(3)

    def scan(step: Callable[..., Any], begin: Callable[[Tensor], Any] = lambda x: 0) -> Callable[..., Any]:
        def run(p: Any, x: Tensor) -> Tensor:
            h = begin(x)
            out = []
            for one in x:
                h = step(p, h, one)
                out.append(h)
            return torch.stack(out) @ p.b

        return run

    steps: dict[str, Callable[..., Any]] = {
        "sum": lambda p, h, x: h + x @ p.a,
        "decay": lambda p, h, x: p.r.sigmoid() * h + x @ p.a,
        "decay exp": lambda p, h, x: (-p.r.exp()).exp() * h + p.r.exp() * (x @ p.a),
        "plain factor": lambda p, h, x: p.r * h + x @ p.a,
        "mixed": lambda p, h, x: p.r.sigmoid() * h + (1 - p.r.sigmoid()) * (x @ p.a),
        "relu": lambda p, h, x: (0.5 * h + x @ p.a).relu(),
        "largest": lambda p, h, x: torch.maximum(torch.as_tensor(h, dtype=x.dtype), x @ p.a),
        "gated": lambda p, h, x: (x @ p.g).sigmoid() * h + x @ p.a,
        "rotated": lambda p, h, x: (h.roll(1, 1) if isinstance(h, Tensor) else h) + x @ p.a,
        "product": lambda p, h, x: (1 + h) * (x @ p.a),
        "minus": lambda p, h, x: x @ p.a - h,
        "divided": lambda p, h, x: (h + x @ p.a) / 2,
        "in place": lambda p, h, x: (x @ p.a).add_(h),
        "negative zero": lambda p, h, x: -h + x @ p.a,
    }
    for name, step in steps.items():
        parts = {"a": a.clone(), "b": b.clone()} | (
            {"r": r.clone()} if "p.r" in name or name in ("decay", "decay exp", "plain factor", "mixed") else {}
        )
        parts |= {"g": draw(4, 3)} if name == "gated" else {}
        yield f"scan {name}", (Function(scan(step), **parts), (x,))
        yield (
            f"scan zeros {name}",
            (
                Function(
                    scan(step, lambda x: torch.zeros(x.shape[1], 3, dtype=x.dtype)),
                    **{k: t.clone() for k, t in parts.items()},
                ),
                (x,),
            ),
        )
    yield from _forms(
        "cumulative",
        {
            "sum": (lambda p, x: (x @ p.a).cumsum(0) @ p.b, {"a": a, "b": b}, (x,)),
            "sum channels": (lambda p, x: (x @ p.a).cumsum(-1) @ p.b, {"a": a, "b": b}, (x,)),
            "sum bias": (
                lambda p, x: F.layer_norm((x @ p.a + p.r).cumsum(0), (3,)) @ p.b,
                {"a": a, "r": r, "b": b},
                (x,),
            ),
            "sum minus last": (lambda p, x: ((x @ p.a).cumsum(0) - (x @ p.a).sum(0)) @ p.b, {"a": a, "b": b}, (x,)),
            "product": (lambda p, x: (x @ p.a).cumprod(0) @ p.b, {"a": a, "b": b}, (x,)),
            "product weight": (lambda p, x: x @ (p.a.cumprod(0)) @ p.b, {"a": a, "b": b}, (x,)),
            "product gate": (
                lambda p, x: ((x @ p.g).sigmoid().cumprod(0) * (x @ p.a)) @ p.b,
                {"g": draw(4, 3), "a": a, "b": b},
                (x,),
            ),
            "product ratio": (lambda p, x: (x @ p.a).cumprod(0) / (x @ p.a).prod(0), {"a": a}, (x,)),
            "logsumexp": (lambda p, x: (x @ p.a).logcumsumexp(0) @ p.b, {"a": a, "b": b}, (x,)),
            "logsumexp minus": (lambda p, x: (x @ p.a - (x @ p.a).logcumsumexp(0)) @ p.b, {"a": a, "b": b}, (x,)),
            "largest": (lambda p, x: (x @ p.a).cummax(0).values @ p.b, {"a": a, "b": b}, (x,)),
            "diff": (lambda p, x: (x @ p.a + p.r).diff(dim=0) @ p.b, {"a": a, "r": r, "b": b}, (x,)),
            "diff prepend": (
                lambda p, x: (x @ p.a + p.r).diff(dim=0, prepend=p.r.expand(1, 3, 3)) @ p.b,
                {"a": a, "r": r, "b": b},
                (x,),
            ),
            "diff channels": (lambda p, x: (x @ p.a + p.r).diff(dim=-1) @ p.b[:2], {"a": a, "r": r, "b": b}, (x,)),
            "roll minus": (
                lambda p, x: ((x @ p.a + p.r) - (x @ p.a + p.r).roll(1, 0)) @ p.b,
                {"a": a, "r": r, "b": b},
                (x,),
            ),
            "flip plus": (lambda p, x: ((x @ p.a) + (x @ p.a).flip(-1)) @ p.b, {"a": a, "b": b}, (x,)),
            "roll product": (lambda p, x: ((x @ p.a) * (x @ p.a).roll(1, -1)) @ p.b, {"a": a, "b": b}, (x,)),
            "ema": (
                lambda p, x: (
                    torch.einsum(
                        "ts,snd->tnd",
                        (p.r[0].sigmoid() ** (torch.arange(5)[:, None] - torch.arange(5)).clamp(0)).tril(),
                        x @ p.a,
                    )
                    @ p.b
                ),
                {"r": r, "a": a, "b": b},
                (x,),
            ),
            "ssm": (
                lambda p, x: torch.einsum(
                    "tndk,kj->tnj", (x @ p.a).unsqueeze(-1).mul((-p.l.exp()).exp()).cumsum(0) * p.c, p.o
                ),
                {"a": a, "l": draw(3, 2), "c": draw(3, 2), "o": draw(2, 2)},
                (x,),
            ),
            "associative": (
                lambda p, x: ((x @ p.g).cumsum(0).exp() * ((x @ p.a) * (-(x @ p.g).cumsum(0)).exp()).cumsum(0)) @ p.b,
                {"g": draw(4, 3), "a": a, "b": b},
                (x,),
            ),
        },
    )
    for reduction, blank in itertools.product(("mean", "sum", "none"), (0, 2)):

        def ctc(m: Any, x: Tensor, reduction: str = reduction, blank: int = blank) -> Tensor:
            z = m.b(m.a(x).relu()).log_softmax(-1)
            target = torch.tensor([[1, 1], [1, 3], [3, 1]])
            return F.ctc_loss(z, target, torch.full((3,), 5), torch.full((3,), 2), blank=blank, reduction=reduction)

        yield f"ctc {reduction} {blank}", (Called(ctc, a=nn.Linear(4, 5), b=nn.Linear(5, 4)), (x,))


def attentions() -> Iterator[tuple[str, Built]]:
    """Attention with learned keys, masks, gates, norms, rotations and shared maps."""
    x, y = draw(3, 5, 4), draw(3, 6, 4)
    for kv, zero, mask, bias in itertools.product(
        (True, False), (True, False), ("none", "causal", "padding", "float"), (True, False)
    ):
        layer = nn.MultiheadAttention(4, 2, add_bias_kv=kv, add_zero_attn=zero, batch_first=True, bias=bias)

        def run(m: Any, x: Tensor, y: Tensor, mask: str = mask) -> Tensor:
            options: dict[str, Any] = {}
            if mask == "causal":
                options["attn_mask"] = torch.ones(5, 6).triu(2).bool()
            elif mask == "padding":
                options["key_padding_mask"] = torch.tensor([[False] * 5 + [True]] * 3)
            elif mask == "float":
                options["attn_mask"] = torch.linspace(-1, 1, 30, dtype=x.dtype).view(5, 6)
            out, weights = m.layer(x, y, y, average_attn_weights=False, **options)
            return m.head(out) + weights.sum()

        yield f"multihead {kv} {zero} {mask} {bias}", (Called(run, layer=layer, head=nn.Linear(4, 2)), (x, y))
    q, k, v, o = draw(4, 4), draw(4, 4), draw(4, 4), draw(4, 2)
    base = {"q": q, "k": k, "v": v, "o": o}

    def attend(
        scores: Callable[[Any, Tensor], Tensor], weight: Callable[[Tensor], Tensor] = lambda s: s.softmax(-1)
    ) -> Callable[..., Tensor]:
        return lambda p, x: weight(scores(p, x)) @ (x @ p.v) @ p.o

    qk: Callable[[Any, Tensor], Tensor] = lambda p, x: (x @ p.q) @ (x @ p.k).mT  # noqa: E731
    unit: Callable[[Tensor], Tensor] = lambda t: F.normalize(t, dim=-1, eps=0.0)  # noqa: E731
    forms: dict[str, tuple[Callable[..., Tensor], dict[str, Tensor]]] = {
        "temperature": (attend(lambda p, x: qk(p, x) * p.t), {"t": torch.tensor(0.7)}),
        "log temperature": (attend(lambda p, x: qk(p, x) * p.t.exp()), {"t": torch.tensor(0.7)}),
        "cosine": (attend(lambda p, x: unit(x @ p.q) @ unit(x @ p.k).mT * p.t), {"t": torch.tensor(0.7)}),
        "key bias": (attend(lambda p, x: (x @ p.q) @ (x @ p.k + p.c).mT), {"c": draw(4)}),
        "both biases": (attend(lambda p, x: (x @ p.q + p.c) @ (x @ p.k + p.d).mT), {"c": draw(4), "d": draw(4)}),
        "key bias linear": (attend(lambda p, x: (x @ p.q) @ (x @ p.k + p.c).mT, lambda s: s / 4), {"c": draw(4)}),
        "score bias": (attend(lambda p, x: qk(p, x) + p.m), {"m": draw(5, 5)}),
        "score row bias": (attend(lambda p, x: qk(p, x) + p.m[:, None]), {"m": draw(5)}),
        "score column bias": (attend(lambda p, x: qk(p, x) + p.m), {"m": draw(5)}),
        "relu": (attend(qk, lambda s: s.relu()), {}),
        "relu normed": (attend(qk, lambda s: s.relu() / s.relu().sum(-1, keepdim=True)), {}),
        "squared": (attend(qk, lambda s: s.square()), {}),
        "sigmoid": (attend(qk, lambda s: s.sigmoid()), {}),
        "soft capped": (attend(qk, lambda s: (s / 3).tanh().mul(3).softmax(-1)), {}),
        "top": (attend(qk, lambda s: s.masked_fill(s < s.topk(2, -1).values[..., -1:], float("-inf")).softmax(-1)), {}),
        "hard": (attend(qk, lambda s: (s == s.amax(-1, keepdim=True)).to(s)), {}),
        "columns": (attend(qk, lambda s: s.softmax(-2)), {}),
        "both axes": (attend(qk, lambda s: s.softmax(-1) * s.softmax(-2)), {}),
        "minus": (attend(qk, lambda s: s.softmax(-1) - s.flip(-1).softmax(-1)), {}),
        "plus one": (attend(qk, lambda s: s.exp() / (1 + s.exp().sum(-1, keepdim=True))), {}),
        "sink": (
            attend(lambda p, x: torch.cat([qk(p, x), p.s.expand(3, 5, 1)], -1), lambda s: s.softmax(-1)[..., :-1]),
            {"s": draw(1)},
        ),
        "one map": (lambda p, x: ((x @ p.q) @ (x @ p.q).mT).softmax(-1) @ (x @ p.v) @ p.o, {}),
        "key is value": (lambda p, x: ((x @ p.q) @ (x @ p.k).mT).softmax(-1) @ (x @ p.k) @ p.o, {}),
        "talking": (
            lambda p, x: (
                torch.einsum(
                    "hg,ngab->nhab",
                    p.h,
                    torch.einsum("nahd,nbhd->nhab", (x @ p.q).view(3, 5, 2, 2), (x @ p.k).view(3, 5, 2, 2)),
                )
                .softmax(-1)
                .flatten(1)
                @ p.w
            ),
            {"h": draw(2, 2), "w": draw(50, 2)},
        ),
        "linear": (lambda p, x: (x @ p.q) @ ((x @ p.k).mT @ (x @ p.v)) @ p.o, {}),
        "linear normed": (lambda p, x: (x @ p.q).softmax(-1) @ ((x @ p.k).softmax(1).mT @ (x @ p.v)) @ p.o, {}),
        "gated values": (
            lambda p, x: (qk(p, x).softmax(-1) @ (x @ p.v) * (x @ p.g).sigmoid()) @ p.o,
            {"g": draw(4, 4)},
        ),
        "differential": (
            lambda p, x: (qk(p, x).softmax(-1) - p.l * ((x @ p.g) @ (x @ p.k).mT).softmax(-1)) @ (x @ p.v) @ p.o,
            {"g": draw(4, 4), "l": torch.tensor(0.4)},
        ),
        "rotary": (
            lambda p, x: (
                (
                    torch.view_as_real(
                        torch.view_as_complex((x @ p.q).view(3, 5, 2, 2))
                        * ROTARY.to(torch.complex128 if x.dtype == torch.float64 else torch.complex64)
                    ).flatten(2)
                    @ (x @ p.k).mT
                ).softmax(-1)
                @ (x @ p.v)
                @ p.o
            ),
            {},
        ),
        "normed heads": (
            lambda p, x: (
                (F.rms_norm((x @ p.q).view(3, 5, 2, 2), (2,), p.g, 1e-6).flatten(2) @ (x @ p.k).mT).softmax(-1)
                @ (x @ p.v)
                @ p.o
            ),
            {"g": draw(2)},
        ),
    }
    for name, (function, more) in forms.items():
        yield f"attend {name}", (Function(function, **{n: t.clone() for n, t in (base | more).items()}), (x,))


ROTARY = torch.polar(torch.ones(5, 2), torch.arange(10.0).view(5, 2))


class Doubled(torch.autograd.Function):
    """Twice its input, with the right backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 2 * grads[0]


class Clipped(torch.autograd.Function):
    """The identity with a clipped gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].clamp(-0.1, 0.1)


class Cube(torch.autograd.Function):
    """The third power, through what it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 3 * ctx.saved_tensors[0] ** 2 * grads[0]


def functions() -> Iterator[tuple[str, Built]]:
    """Complex numbers, spectra, order, distances, norms, transforms of functions, hooks and functions of authors."""
    x, a, b, c, s = draw(6, 4), draw(4, 4), draw(4, 3), draw(4), draw(4, 4)
    view: Callable[[Tensor], Tensor] = lambda t: torch.view_as_complex(t.reshape(*t.shape[:-1], -1, 2).contiguous())  # noqa: E731
    real: Callable[[Tensor], Tensor] = lambda z: torch.view_as_real(z.resolve_conj()).flatten(-2)  # noqa: E731
    middles: dict[str, Callable[[Any, Tensor], Tensor]] = {
        "complex phase gain": lambda p, h: real(view(h) * torch.polar(torch.ones_like(p.c[:2]), p.c[:2])),
        "complex gain": lambda p, h: real(view(h) * view(p.c)),
        "complex gain conj": lambda p, h: real(view(h).conj() * view(p.c)),
        "complex over": lambda p, h: real(view(h) / view(p.c)),
        "complex size": lambda p, h: (view(h) * view(p.c)).abs().repeat(1, 2),
        "complex bias": lambda p, h: real(view(h) + view(p.c)),
        "mod relu": lambda p, h: real((view(h).abs() + p.c[:2]).relu() * view(h) / view(h).abs()),
        "cardioid": lambda p, h: real(0.5 * (1 + view(h).angle().cos()) * view(h)),
        "real part": lambda p, h: view(h).real.repeat(1, 2) * p.c,
        "swap parts": lambda p, h: real(1j * view(h)),
        "swap minus": lambda p, h: h - real(1j * view(h)),
        "matrix of complex": lambda p, h: real(view(h) @ torch.complex(p.s[:2, :2], p.s[2:, 2:])),
        "holomorphic square": lambda p, h: real(view(h).square()),
        "inner": lambda p, h: (view(h)[:, :, None] * view(h)[:, None].conj()).real.flatten(1),
        "fft gain": lambda p, h: torch.fft.ifft(torch.fft.fft(h) * p.c).real,
        "fft pair": lambda p, h: torch.fft.irfft(torch.fft.rfft(h) * torch.fft.rfft(p.c), n=4),
        "fft twice": lambda p, h: torch.fft.fft(torch.fft.fft(h)).real,
        "fft size": lambda p, h: torch.fft.fft(h).abs() * p.c,
        "fft log": lambda p, h: torch.fft.fft(h).abs().log(),
        "fft zero": lambda p, h: torch.fft.rfft(h)[:, 1:].abs().repeat(1, 2),
        "fft ortho": lambda p, h: real(torch.fft.rfft(h, norm="ortho")[:, :2]) * p.c,
        "fft padded": lambda p, h: torch.fft.rfft(h, n=6).real,
        "fft phase": lambda p, h: torch.fft.ifft(torch.exp(1j * torch.fft.fft(h).angle())).real,
        "sorted gain": lambda p, h: h.sort(-1).values * p.c,
        "sorted minus": lambda p, h: h.sort(-1).values - h.sort(-1, descending=True).values,
        "argsorted": lambda p, h: h.gather(-1, h.argsort(-1)) - h,
        "top gain": lambda p, h: torch.cat([h.topk(2, -1).values, h.topk(2, -1, largest=False).values], -1),
        "top mask": lambda p, h: h * (h >= h.topk(2, -1).values[:, -1:]),
        "chosen": lambda p, h: p.s[h.argmax(-1)] * h,
        "chosen sum": lambda p, h: p.s[h.argmax(-1)] + h,
        "kth": lambda p, h: h - h.kthvalue(2, -1, keepdim=True).values,
        "median gap": lambda p, h: (h - h.median(-1, keepdim=True).values).abs(),
        "quantile": lambda p, h: h / h.abs().quantile(0.5, -1, keepdim=True),
        "logsumexp": lambda p, h: h - h.logsumexp(-1, keepdim=True),
        "logsumexp gain": lambda p, h: h * 0 + h.logsumexp(-1, keepdim=True) * p.c,
        "logsumexp samples": lambda p, h: h - h.logsumexp(0),
        "logaddexp": lambda p, h: torch.logaddexp(h, h.flip(-1)),
        "logaddexp bias": lambda p, h: torch.logaddexp(h, p.c.expand_as(h)) - p.c,
        "distance": lambda p, h: torch.cdist(h, p.s),
        "distance shifted": lambda p, h: torch.cdist(h + p.c, p.s),
        "distance one": lambda p, h: torch.cdist(h, p.s, p=1.0),
        "distance inf": lambda p, h: torch.cdist(h, p.s, p=float("inf")),
        "distance ratio": lambda p, h: torch.cdist(h, p.s) / p.s.norm(),
        "cosine": lambda p, h: F.cosine_similarity(h[:, None], p.s[None], dim=-1, eps=0.0),
        "cosine gain": lambda p, h: F.cosine_similarity(h * p.c, h, dim=-1)[:, None].expand(-1, 4),
        "normalise one": lambda p, h: F.normalize(h, p=1, dim=-1, eps=0.0) * p.c,
        "normalise inf": lambda p, h: F.normalize(h, p=float("inf"), dim=-1) * p.c,
        "normalise samples": lambda p, h: F.normalize(h, dim=0, eps=0.0) * p.c,
        "normalise shifted": lambda p, h: F.normalize(h - h.mean(-1, keepdim=True), dim=-1, eps=0.0) * p.c,
        "softmax gain": lambda p, h: (h * p.c).softmax(-1),
        "softmax bias": lambda p, h: (h + p.c).softmax(-1),
        "softmax samples": lambda p, h: (h + p.c).softmax(0),
        "softmax times": lambda p, h: h.softmax(-1) * h,
        "power gain": lambda p, h: (h.abs() ** 1.5) * p.c,
        "power learned": lambda p, h: h.abs() ** p.c.sigmoid(),
        "exp gain": lambda p, h: h * p.c.exp(),
        "exp both": lambda p, h: h * p.c.exp() + p.c,
        "softplus gain": lambda p, h: h * F.softplus(p.c),
        "one plus": lambda p, h: h * (1 + p.c),
        "one minus": lambda p, h: h * (1 - p.c) + h,
        "two gains": lambda p, h: h * p.c * p.s[0],
        "gain twice": lambda p, h: h * p.c * p.c,
        "gain and over": lambda p, h: h * p.c / p.s[0],
        "gain flipped": lambda p, h: h * p.c * p.c.flip(0),
        "gain of sum": lambda p, h: h * p.c.sum(),
        "gain of norm": lambda p, h: h * p.c.norm(),
        "gain of max": lambda p, h: h * p.c.abs().amax(),
        "gain normed": lambda p, h: h * p.c / p.c.norm(),
        "gain softmax": lambda p, h: h * p.c.softmax(0),
        "gain of sign": lambda p, h: h * p.c.sign(),
        "gain of det": lambda p, h: h * torch.linalg.det(p.s),
        "gain of trace": lambda p, h: h * torch.trace(p.s @ p.s),
        "solve": lambda p, h: torch.linalg.solve(p.s, h.T).T,
        "solve triangle": lambda p, h: torch.linalg.solve_triangular(p.s.tril(), h.T, upper=False).T,
        "inverse pair": lambda p, h: h @ p.s @ torch.linalg.inv(p.s),
        "exponential map": lambda p, h: h @ torch.matrix_exp(p.s - p.s.T),
        "exponential of": lambda p, h: h @ torch.matrix_exp(0.1 * p.s),
        "gram": lambda p, h: h @ (p.s @ p.s.T),
        "gram root": lambda p, h: h @ torch.linalg.cholesky(p.s @ p.s.T),
        "orthogonal factor": lambda p, h: h @ torch.linalg.qr(p.s)[0],
        "triangle factor": lambda p, h: h @ torch.linalg.qr(p.s)[1],
        "singular values": lambda p, h: h * torch.linalg.svdvals(p.s),
        "projector": lambda p, h: h @ p.s[:, :2] @ torch.linalg.pinv(p.s[:, :2]),
        "reflector": lambda p, h: h - 2 * (h @ p.c)[:, None] * p.c / p.c.square().sum(),
        "low rank add": lambda p, h: h + (h @ p.s[:, :1]) @ p.s[:, 1:2].T,
        "low rank same": lambda p, h: h + (h @ p.s[:, :1]) @ p.s[:, :1].T,
        "bilinear": lambda p, h: F.bilinear(h, h, p.s.view(4, 2, 2).repeat(1, 2, 2)),
        "outer then sum": lambda p, h: (h[:, :, None] * p.s).sum(1),
        "outer then max": lambda p, h: (h[:, :, None] * p.s).amax(1),
        "tropical": lambda p, h: (h[:, :, None] + p.s).amax(1),
        "tropical min": lambda p, h: (h[:, :, None] + p.s).amin(1) - h.amin(1, keepdim=True),
        "log matrix": lambda p, h: (h[:, :, None] + p.s).logsumexp(1),
        "kernel": lambda p, h: (-(h[:, None] - p.s).square().sum(-1) * p.c.exp()).exp(),
        "rational": lambda p, h: (h * p.c) / (1 + h.abs()),
        "rational free": lambda p, h: (h * p.c) / (h.abs() + p.s[0].abs()),
        "vmap": lambda p, h: torch.vmap(lambda row: row * p.c + row.sum())(h),
        "vmap weights": lambda p, h: torch.vmap(lambda w: h @ w, out_dims=1)(p.s),
        "vmap relu": lambda p, h: torch.vmap(torch.relu)(h) * p.c,
        "vmap matrix": lambda p, h: (
            torch.vmap(lambda r, w: (r @ w)[None], (None, 0))(h, p.s[:, :, None]).flatten(1)[:, :4].new_zeros(6, 4) + h
        ),
        "jvp": lambda p, h: torch.func.jvp(lambda t: (t * p.c).relu(), (h,), (h,))[1],
        "jvp tanh": lambda p, h: torch.func.jvp(lambda t: (t * p.c).tanh(), (h,), (torch.ones_like(h),))[1],
        "checkpoint": lambda p, h: checkpoint(lambda t: t.relu() * p.c, h, use_reentrant=False),
        "checkpoint old": lambda p, h: checkpoint(lambda t: t.relu() * p.c, h, use_reentrant=True),
        "author double": lambda p, h: Doubled.apply(h) * p.c,
        "author clipped": lambda p, h: Clipped.apply(h) * p.c,
        "author cube": lambda p, h: Cube.apply(h) * p.c,
        "author cube mixed": lambda p, h: Cube.apply(h) + h,
        "detached gain": lambda p, h: h * p.c.detach() + p.c,
        "detached half": lambda p, h: h * (p.c + p.c.detach()),
        "detached norm": lambda p, h: h / h.norm(dim=-1, keepdim=True).detach() * p.c,
        "no grad": lambda p, h: h * _still(p.c),
        "hooked": lambda p, h: _hooked(h) * p.c,
        "in place": lambda p, h: h.clone().mul_(p.c).add_(1.0),
        "in place slice": lambda p, h: _half(h.clone(), p.c),
        "aliased": lambda p, h: _aliased(h, p.c),
        "rounded": lambda p, h: (h * p.c).round() + h,
        "straight": lambda p, h: h + ((h * p.c).round() - h).detach(),
        "noise": lambda p, h: h + p.c.exp() * torch.linspace(-1, 1, 24, dtype=h.dtype).view(6, 4),
        "drop": lambda p, h: F.dropout(h, 0.5, True) * p.c,
        "buffer": lambda p, h: h * torch.arange(1.0, 5.0, dtype=h.dtype) + p.c,
        "renorm": lambda p, h: h @ p.s.renorm(2, 0, 1.0),
        "clamp": lambda p, h: h.clamp(-p.c.abs(), p.c.abs()),
        "clamp zero": lambda p, h: h.clamp(max=0.0) * p.c + h.clamp(min=0.0),
        "shrink": lambda p, h: h.sign() * (h.abs() - p.c.abs()).relu(),
        "where learned": lambda p, h: torch.where(h > p.c, h, torch.zeros_like(h)),
        "where gain": lambda p, h: torch.where(h > 0, h, p.c * h),
        "lerp learned": lambda p, h: torch.lerp(h, h.flip(-1), p.c.sigmoid()),
        "polynomial": lambda p, h: p.c * h + p.s[0] * h.square(),
        "horner": lambda p, h: h * (p.c + h * (p.s[0] + h * p.s[1])),
        "mish": lambda p, h: F.mish(h) * p.c,
        "tanh shrink": lambda p, h: F.tanhshrink(h) * p.c,
        "relu bias": lambda p, h: (h + p.c).relu(),
        "relu bias minus": lambda p, h: (h + p.c).relu() - (h - p.c).relu(),
        "abs bias": lambda p, h: (h + p.c).abs() - p.c,
        "batch centred": lambda p, h: (h + p.c) - (h + p.c).mean(0),
        "batch scaled": lambda p, h: h / h.std(0) * p.c,
        "layer norm eps": lambda p, h: F.layer_norm(h, (4,), p.c, p.s[0], 0.1),
        "group norm": lambda p, h: F.group_norm(h + p.c, 2, p.c),
        "rms norm large": lambda p, h: F.rms_norm(h, (4,), p.c, 0.5),
        "weight norm": lambda p, h: h @ torch._weight_norm(p.s, p.c.view(4, 1), 0),
        "standardised": lambda p, h: h @ ((p.s - p.s.mean(0)) / p.s.var(0, unbiased=False).add(1e-12).sqrt()),
    }
    for name, middle in middles.items():

        def run(p: Any, x: Tensor, middle: Any = middle) -> Tensor:
            y = middle(p, x @ p.a)
            return y @ p.b[: y.shape[-1]] if y.shape[-1] <= 4 else y @ p.b.repeat(4, 1)[: y.shape[-1]]

        parts = {"a": a.clone(), "b": b.clone(), "c": c.clone(), "s": s.clone()}
        yield f"middle {name}", (Function(run, **parts), (x,))


def _still(c: Tensor) -> Tensor:
    with torch.no_grad():
        return c * 1.0


def _hooked(h: Tensor) -> Tensor:
    h = h * 1.0
    if h.requires_grad:
        h.register_hook(lambda g: g * 1.0)
    return h


def _half(h: Tensor, c: Tensor) -> Tensor:
    h[:, :2] *= c[:2]
    h[:, 2:] += c[2:]
    return h


def _aliased(h: Tensor, c: Tensor) -> Tensor:
    view = h.clone().view(3, 8)
    view[:, ::2].mul_(2.0)
    return view.view(6, 4) * c


def parametrised() -> Iterator[tuple[str, Built]]:
    """Parametrizations of torch, alone, chained, of biases and of shared weights."""
    x = draw(6, 4)

    def net(bias: bool = True) -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 4, bias), nn.ReLU(), nn.Linear(4, 4, bias), nn.Linear(4, 2, bias))

    def wrap(layer: nn.Module, name: str, function: Callable[[Tensor], Tensor]) -> None:
        parametrize.register_parametrization(layer, name, Called(lambda m, w, f=function: f(w)), unsafe=True)

    for layer, dim in itertools.product((0, 2, 3), (0, 1, -1)):
        model = net()
        parametrizations.weight_norm(model[layer], dim=dim)
        yield f"weight norm {layer} {dim}", (model, (x,))
    for layer, mode, steps in itertools.product((0, 3), (True, False), (1, 3)):
        model = net().train(mode)
        parametrizations.spectral_norm(model[layer], n_power_iterations=steps)
        yield f"spectral norm {layer} {mode} {steps}", (model, (x,))
    for layer, kind in itertools.product((0, 2, 3), ("matrix_exp", "cayley", "householder")):
        model = net()
        parametrizations.orthogonal(model[layer], orthogonal_map=kind)
        yield f"orthogonal {layer} {kind}", (model, (x,))
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "rolled": lambda w: w.roll(1, 0),
        "minus rolled": lambda w: w - w.roll(1, -1),
        "flipped": lambda w: w.flip(0),
        "tanh": lambda w: w.tanh(),
        "scaled": lambda w: 0.5 * w,
        "negated": lambda w: -w,
        "sorted": lambda w: w.sort(0).values,
        "centred": lambda w: w - w.mean(),
        "centred first": lambda w: w - w[:1],
        "unit": lambda w: w / w.norm(),
        "unit entries": lambda w: w / w.abs(),
        "cumulative": lambda w: w.cumsum(0),
        "quantised": lambda w: w + (w.round() - w).detach(),
        "dropped": lambda w: F.dropout(w, 0.5, True),
        "clamped": lambda w: w.clamp(-0.2, 0.2),
        "absolute": lambda w: w.abs(),
        "squared": lambda w: w.square(),
        "exp": lambda w: w.exp(),
    }
    for (name, function), target in itertools.product(functions.items(), ("weight", "bias")):
        model = net()
        wrap(model[2], target, function)
        yield f"parametrised {target} {name}", (model, (x,))
    chained = net()
    wrap(chained[0], "weight", lambda w: w - w.mean(0))
    wrap(chained[0], "weight", lambda w: w / w.norm(dim=1, keepdim=True))
    yield "parametrised chained", (chained, (x,))
    ties: dict[str, Callable[[Any, Tensor], Tensor]] = {
        "twice": lambda m, x: m.a(m.a(x)),
        "twice relu": lambda m, x: m.a(m.a(x).relu()),
        "transposed": lambda m, x: F.linear(m.a(x).relu(), m.a.weight.T),
        "transposed plain": lambda m, x: F.linear(m.a(x), m.a.weight.T) @ m.b.weight.T,
        "transposed middle": lambda m, x: F.linear(m.b(m.a(x)), m.a.weight.T),
        "sum": lambda m, x: F.linear(x, m.a.weight + m.b.weight).relu(),
        "product": lambda m, x: F.linear(x, m.a.weight @ m.b.weight),
        "hadamard": lambda m, x: F.linear(x, m.a.weight * m.b.weight),
        "bias shared": lambda m, x: F.linear(F.linear(x, m.a.weight, m.a.bias).relu(), m.b.weight, m.a.bias),
        "bias as gain": lambda m, x: m.a(x) * m.a.bias,
        "weight as gain": lambda m, x: m.a(x) * m.a.weight[0],
        "residual": lambda m, x: x + m.b(m.a(x).relu()),
        "residual normed": lambda m, x: F.layer_norm(x + m.b(m.a(x)), (4,)),
        "frozen": lambda m, x: F.linear(m.a(x), m.b.weight.detach()),
        "frozen half": lambda m, x: F.linear(m.a(x), m.b.weight.detach()) + m.b(x),
    }
    for name, tied in ties.items():
        yield f"tied {name}", (Called(tied, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), (x,))


def programs() -> Iterator[tuple[str, Built]]:
    """All of them."""
    for family in (einsums, indexing, tables, kernels, sequences, attentions, functions, parametrised):
        torch.manual_seed(11)
        yield from family()
