"""Sample the rounding of a run's own kernels: their distance from the reference form, at nearby weights.

Let e(θ) = A(θ) − W(θ) be the gradients of a pass as it is run minus those in reference form. Rounding every result of
the reference form at random samples what storing results does, and not what happens inside of fused kernels: the
backward of flash attention takes its softmax correction from an output that was rounded in the forward pass. That error
is the same in every pass, and linear in the output gradient, so that scaling does not show it either.

Moving every weight by about one unit of its rounding draws all of these errors again, while the e of a defect is a
smooth function of θ and stays: e(θ') − e(θ) is a sample of two roundings. The gradient itself changes by much more than
its rounding; that cancels, because the reference is computed at θ' as well. What is left of a defect is its own change.
A wrong factor f on a row, e = fW, changes by f(W' − W): this is subtracted, with f fitted to e. Of rounding, which lies
along W by chance, the same takes away its size times the relative change of W, which is nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from conserved.auditing.call_log import CallLog
from conserved.auditing.reference_form import PassForm
from conserved.auditing.replay import SCALE, Replay
from conserved.symmetry import Tensors
from conserved.symmetry.view import local


@contextmanager
def nearby_weights(parameters: Tensors, precision: torch.dtype, seed: int) -> Iterator[None]:
    """Move every weight by at most its spacing in some precision, at random; put all bits back at the end.

    Weights are written through `.data`, so that graphs which are still alive stay valid.
    """
    spacing = torch.finfo(precision).eps
    originals: list[tuple[Tensor, Tensor]] = []
    try:
        for parameter in parameters.values():
            weights = local(parameter.data)
            originals.append((weights, weights.clone()))
            # The same seed on every process: replicated parameters stay equal.
            generator = torch.Generator(weights.device).manual_seed(seed)
            kind = torch.promote_types(weights.dtype, torch.float32)
            moves = torch.rand(weights.shape, dtype=kind, device=weights.device, generator=generator)
            weights.copy_(weights.to(kind) * (1 + spacing * (2 * moves - 1)))
        yield
    finally:
        # In reverse order: two names may share memory.
        for weights, values in reversed(originals):
            weights.copy_(values)


def sample_own_rounding(
    replay: Replay,
    parameters: Tensors,
    precision: torch.dtype,
    form: PassForm,
    own: Tensors,
    right: Tensors,
    *,
    seed: int,
) -> dict[str, Tensor]:
    """Return one sample of the rounding of some gradients as they are run, from a pass at nearby weights.

    Args:
        replay: the pass.
        parameters: the parameters that are moved.
        precision: the precision of the pass, whose spacing weights are moved by.
        form: the reference form.
        own: gradients as they are run, of those parameters that a sample is wanted of.
        right: gradients in reference form, of the same parameters at least.
        seed: seed of the move.
    """
    wanted = {name: parameters[name] for name in own}
    with torch.no_grad(), nearby_weights(parameters, precision, seed):
        # Other experts may be selected at other weights: the reference takes over those of this pass.
        log = CallLog()
        own_there = replay.gradients(wanted, scale=SCALE, form=PassForm(log=log))
        right_there = replay.gradients(wanted, form=replace(form, log=log))
    with torch.no_grad():
        return {
            name: _new_rounding(own[name], right[name], own_there[name], right_there[name]).reshape(own[name].shape)
            for name in wanted
        }


def _new_rounding(own: Tensor, right: Tensor, own_there: Tensor, right_there: Tensor) -> Tensor:
    """Return the change of A − W to other weights, less that of a wrong factor on every row, over √2."""
    change_here, change_there = difference(own, right), difference(own_there, right_there)
    reference = rows_of(right).to(change_here.dtype)
    squares = reference.square().sum(1, keepdim=True)
    factors = (rows_of(change_here) * reference).sum(1, keepdim=True) / torch.where(squares > 0, squares, 1.0)
    change = rows_of(difference(right_there, right))
    return (rows_of(change_there - change_here) - factors * change) / math.sqrt(2)


def difference(a: Tensor, b: Tensor) -> Tensor:
    """Return a − b in single precision at least: differences of half-precision numbers round again."""
    kind = torch.promote_types(a.dtype, torch.float32)
    return a.to(kind) - b.to(kind)


def rows_of(tensor: Tensor) -> Tensor:
    """Return a gradient as a matrix whose rows are what one operation writes: outputs, tokens, neurons of an expert."""
    if tensor.ndim < 2:
        return tensor.reshape(-1, 1)
    return tensor.flatten(0, 1) if tensor.ndim == 3 else tensor.flatten(1)
