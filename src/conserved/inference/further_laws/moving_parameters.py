"""Whether a symmetry is one of a program, by moving its parameters a finite way along it and comparing outputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from conserved._torch_compat import tree_flatten
from conserved.inference.program.program_state import preserve_state
from conserved.symmetry import Leg, Symmetry, whole

RunProgram = Callable[[Mapping[str, Tensor], int], list[Tensor]]
"""The outputs of a program for given parameters and a seed of its randomness."""

_SAME = 1e-3
"""Outputs that move by less than this share of what half the motion moves them by have not moved."""


@dataclass(frozen=True, slots=True)
class MoveOutcome:
    """The relative change of outputs when parameters move along a symmetry, and that of half the motion."""

    change: float
    half: float
    rounding: float
    """The relative change that the precision of the outputs explains."""

    @property
    def holds(self) -> bool | None:
        """Whether it is a symmetry; None if half the motion changes nothing either, which proves nothing."""
        if not self.half > 20 * self.rounding:
            return None
        return self.change <= max(_SAME * self.half, self.rounding)


def runs(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], start: Callable[[], None] | None = None
) -> RunProgram:
    """Return a model's forward pass on given inputs, as a function of its parameters: nothing is left changed.

    Args:
        model: the model.
        args: its arguments.
        kwargs: its keyword arguments.
        start: sets the random generators for a pass; by default they are seeded.

    Returns:
        The function of parameters and a seed.
    """
    buffers = dict(model.named_buffers())

    def run(parameters: Mapping[str, Tensor], seed: int) -> list[Tensor]:
        state = {**{name: value.clone() for name, value in buffers.items()}, **parameters}
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
        with torch.no_grad(), torch.random.fork_rng(devices=devices), preserve_state(model):
            if start is None:
                torch.manual_seed(seed)
            else:
                start()
            out = functional_call(model, state, tuple(args), dict(kwargs))
        leaves = tree_flatten(dict(out) if hasattr(out, "keys") else out)[0]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]

    return run


def move_parameters(
    run: RunProgram, parameters: Mapping[str, Tensor], symmetries: Sequence[Symmetry], *, seed: int = 0
) -> MoveOutcome:
    """Move parameters along symmetries, one after the other, and compare outputs with those before."""
    generator = torch.Generator().manual_seed(seed)
    start = {name: whole(value.detach()) for name, value in parameters.items()}
    there, half = dict(start), dict(start)
    for symmetry in symmetries:
        element = symmetry.element(spread=0.5, generator=generator)
        there = symmetry.act(there, element)
        half = _one_parameter(symmetry, symmetry.legs[0].view.parameter).act(half, element)
    before = run(start, seed)
    precision = max((torch.finfo(tensor.dtype).eps for tensor in before), default=1e-7)
    return MoveOutcome(_change(before, run(there, seed)), _change(before, run(half, seed)), 64 * precision)


def is_seen(
    run: RunProgram,
    parameters: Mapping[str, Tensor],
    symmetry: Symmetry,
    *,
    seed: int = 0,
    names: Collection[str] | None = None,
) -> bool:
    """Return whether every parameter of a symmetry (every one of `names`), moved alone, changes the outputs.

    A program that holds a parameter elsewhere than in its module (in a closure, say) does not see the one that takes
    its place: moving others along with it then proves nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    start = {name: whole(value.detach()) for name, value in parameters.items()}
    element, before = symmetry.element(spread=0.5, generator=generator), run(start, seed)
    looked_at = (name for name in symmetry.parameters if names is None or name in names)
    moved = (_one_parameter(symmetry, name).act(dict(start), element) for name in looked_at)
    return all(_change(before, run(there, seed)) > 0 for there in moved)


def _one_parameter(symmetry: Symmetry, name: str) -> Symmetry:
    """Return the same motion of one parameter alone, which is no symmetry unless nothing depends on it."""
    legs: tuple[Leg, ...] = tuple(leg for leg in symmetry.legs if leg.view.parameter == name)
    return Symmetry(block=symmetry.block, family=symmetry.family, part=symmetry.part, kind=symmetry.kind, legs=legs)


def _change(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    squares = sizes = 0.0
    for a, b in zip(before, after, strict=False):
        if a.shape == b.shape:
            squares += float((a.double() - b.double()).square().sum())
            sizes += float(a.double().square().sum())
    return (squares / sizes) ** 0.5 if sizes else 0.0
