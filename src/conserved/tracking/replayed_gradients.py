"""Gradients beside those of the same pass run again: whether they have anything in common, and putting these in."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from conserved.auditing.reference_comparison import common_factor
from conserved.auditing.replay import RecordedPass

LOGGER = logging.getLogger("conserved")

_COMPARED_DIRECTIONS = 16
"""Matrices whose gradients are compared with those of a replay: the smallest, which are cheapest."""

_UNRELATED = 0.1
"""Cosine below which a gradient has nothing of another: that of random directions in 600 dimensions is 2.5 σ below."""

_SEEN = 1e-6
"""Square of the share of a gradient that a changed entry has to have, to tell it from rounding."""

_ALL = 0.9
"""Share of the squared difference of two gradients that one entry has if it alone is different."""

_ROWS_OF_NOISE = 6
"""Rows and columns of the smallest matrix that is asked whether it is noise."""

_ONE_SIZE = 1.7
"""Ratio of mean squares of noise of one size in two tensors of fifty entries and more: 3 σ."""

_NOISE_VARIANCE = 8.0
"""Entries times the relative variance of mean squares of that many entries of noise, at most."""


def is_unrelated(model: nn.Module, replay: RecordedPass) -> bool:
    """Return whether most gradients have almost no component along those of the same pass run again.

    Noise, centring, compression and projection keep a part of the direction. Gradients of other weights, of another
    batch, or shifted in a buffer do not.
    """
    matrices = {n: p for n, p in model.named_parameters() if p.grad is not None and p.ndim > 1}
    some = dict(sorted(matrices.items(), key=lambda item: item[1].numel())[:_COMPARED_DIRECTIONS])
    try:
        again = replay.gradients(some)
    except Exception as problem:
        # The one boundary to the user's program: it may refuse to run once more, or run out of memory.
        LOGGER.info("gradients were not compared with those of a replay: %s", problem)
        return False
    pairs = [(p.grad.flatten().double(), again[n].flatten().double()) for n, p in some.items() if p.grad is not None]
    cosines = [float(torch.nn.functional.cosine_similarity(a, b, 0)) for a, b in pairs]
    few = len(cosines) > 1 and 2 * sum(abs(cosine) < _UNRELATED for cosine in cosines) > len(cosines)
    shapes = [p.grad.flatten(1).shape for p in some.values() if p.grad is not None]
    return few and not _is_white([(a - b).view(shape) for (a, b), shape in zip(pairs, shapes, strict=True)])


def differs_in_one_entry(model: nn.Module, replay: RecordedPass, names: Collection[str]) -> bool:
    """Return whether one entry has nearly all of the difference between a gradient and that of a replay.

    That is a bit flip: no program changes one entry of a gradient on purpose. Of a gradient that is one entry itself,
    any change is of that entry.
    """
    wanted = {n: p for n, p in model.named_parameters() if n in names and p.grad is not None}
    try:
        again = replay.gradients(wanted)
    except Exception as problem:
        # The one boundary to the user's program: it may refuse to run once more, or run out of memory.
        LOGGER.info("gradients were not compared with those of a replay: %s", problem)
        return False
    gradients = {n: p.grad for n, p in wanted.items() if p.grad is not None}
    factor = common_factor(gradients, again)
    for name, gradient in gradients.items():
        squares = (gradient - again[name] * factor).double().square()
        own = (again[name] * factor).double().square()
        concentrated = (squares.max() > _ALL * squares.sum()) & (own.max() <= _ALL * own.sum())
        if gradient.numel() > 1 and bool((squares.sum() > _SEEN * own.sum()) & concentrated):
            return True
    return False


def repair_gradients(model: nn.Module, replay: RecordedPass) -> None:
    """Overwrite the gradients that the pass did not give twice with those of the same pass, run again."""
    wanted = {name: p for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}
    again = replay.gradients(wanted)
    gradients = {name: p.grad for name, p in wanted.items() if p.grad is not None}
    factor = common_factor(gradients, again)
    with torch.no_grad():
        for name, gradient in gradients.items():
            gradient.copy_(again[name] * factor)


def _is_white(differences: Sequence[Tensor]) -> bool:
    """Return whether matrices are independent noise of one size, as a loop adds it to gradients.

    Gradients are not: their tensors, rows and columns have sizes of their own. Mean squares of n entries of normal
    noise have a relative variance of 2 / n, and of Laplace noise 5 / n.
    """
    squares = [d.square() for d in differences if min(d.shape) >= _ROWS_OF_NOISE]
    if len(squares) < 2:
        return False
    sizes = torch.stack([s.mean() for s in squares])
    even = float(sizes.max()) <= _ONE_SIZE * float(sizes.min())
    return even and all(
        float(s.mean(axis).var() / s.mean().square()) <= _NOISE_VARIANCE / s.shape[axis]
        for s in squares
        for axis in (0, 1)
    )
