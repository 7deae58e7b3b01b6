"""Laws through functions that are not known: what they might be, typed as that, and tested by moving parameters.

An operation without a rule fixes everything it touches. By the shapes of its inputs and outputs it may be attention, a
gated product, a norm, a linear map or an activation. The program is followed again with such a function in its place;
laws that this adds are candidates, and those along which the real program's outputs do not move are kept as probed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from conserved.inference.program.captured_program import CapturedProgram, Operation
from conserved.inference.rules import RULES, base_name

StandIn = Callable[..., Any]

Guess = Callable[[list[Tensor]], Tensor]


def unknown_operations(program: CapturedProgram, live: Sequence[int]) -> dict[str, Operation]:
    """Return operations without a rule, the first of each name."""
    result: dict[str, Operation] = {}
    for number in live:
        operation = program.operations[number]
        name = operation.name.rsplit(".", 1)[0]
        if name not in RULES and base_name(operation.name) not in RULES:
            result.setdefault(name, operation)
    return result


def guesses(program: CapturedProgram, operation: Operation) -> Iterator[StandIn]:
    """Yield functions that an operation may be, to go by shapes."""
    values = program.values
    shapes = [values[n].shape for n in operation.inputs() if values[n].dtype.is_floating_point]
    outs = [values[n].shape for n in operation.results if values[n].dtype.is_floating_point]
    if not shapes or not outs:
        return
    for guess in _guess(shapes, outs[0]):
        yield _StandIn(guess, outs)


class _StandIn:
    """A function of the tensors among its arguments, with further outputs of which nothing is known."""

    def __init__(self, guess: Guess, outs: list[tuple[int, ...]]) -> None:
        self._guess, self._outs = guess, outs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        tensors = [value for value in given if isinstance(value, Tensor) and value.is_floating_point()]
        first = self._guess(tensors)
        rest = [tensors[0].detach().new_zeros(shape) for shape in self._outs[1:]]
        return first if not rest else (first, *rest)


def _guess(shapes: list[tuple[int, ...]], out: tuple[int, ...]) -> Iterator[Guess]:
    if len(shapes) >= 3 and len(out) >= 3 and all(len(shape) == len(out) for shape in shapes[:3]):
        yield from _attentions(shapes[0], shapes[1], shapes[2], out)
    if len(shapes) >= 2 and shapes[0] == shapes[1] == out:
        yield lambda t: F.silu(t[0]) * t[1]
        yield lambda t: t[0] * F.silu(t[1])
    if shapes[0] == out and len(shapes) >= 2 and all(shape == out[-1:] for shape in shapes[1:]):
        if len(shapes) == 2:
            yield lambda t: F.rms_norm(t[0], t[0].shape[-1:], t[1], 1e-6)
        elif len(shapes) == 3:
            yield lambda t: F.layer_norm(t[0], t[0].shape[-1:], t[1], t[2], 1e-6)
    if len(shapes) >= 2 and len(shapes[1]) == 2 and out and shapes[0] and out[:-1] == shapes[0][:-1]:
        if shapes[1] == (out[-1], shapes[0][-1]):
            yield lambda t: _linear(t[0], t[1].t(), t[2] if len(t) > 2 and t[2].ndim == 1 else None)
        if shapes[1] == (shapes[0][-1], out[-1]):
            yield lambda t: _linear(t[0], t[1])
    if len(shapes) == 1 and shapes[0] == out:
        yield lambda t: F.relu(t[0])
        yield lambda t: F.rms_norm(t[0], t[0].shape[-1:], None, 1e-6)
        yield lambda t: t[0].softmax(-1)


def _attentions(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], out: tuple[int, ...]) -> Iterator[Guess]:
    """Yield softmax attention with heads before positions, or after them; heads may be shared."""
    if q[-1] != k[-1] or out[-1] != v[-1] or out[:-1] != q[:-1]:
        return
    if q[:-3] == k[:-3] == v[:-3] and k[-3:-1] == v[-3:-1] and q[-3] % k[-3] == 0:
        yield lambda t: _attend(t[0], t[1], t[2])
    if k[-3:-1] == v[-3:-1] and len(q) > 2 and q[-2] % k[-2] == 0:
        yield lambda t: _attend(*(tensor.transpose(-2, -3) for tensor in t[:3])).transpose(-2, -3)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    groups = q.shape[-3] // k.shape[-3]
    if groups > 1:
        k, v = (_repeat(tensor, groups) for tensor in (k, v))
    return _product(torch.softmax(_product(q, k.transpose(-1, -2)), -1), v)


def _repeat(heads: Tensor, groups: int) -> Tensor:
    """Return every head several times."""
    *batch, count, length, width = heads.shape
    return heads.unsqueeze(-3).expand(*batch, count, groups, length, width).reshape(*batch, -1, length, width)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return matrix products as one operation that has a rule: below autograd, `matmul` is not one."""
    product = torch.bmm(a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:]))
    return product.reshape(*a.shape[:-1], b.shape[-1])


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = torch.mm(x.reshape(-1, x.shape[-1]), weight).reshape(*x.shape[:-1], weight.shape[-1])
    return product if bias is None else product + bias
