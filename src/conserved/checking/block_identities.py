"""The identities of one block of the output at a time: a sum over a long axis hides one row of it.

One row left out of n changes a sum by 1/√n of its size, and in half precision that is soon rounding. Where the output
gradient is zero outside a block of b rows, the gradient is a sum over these alone, and the same row is 1/√b of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from conserved.checking.gradient_test import GradientTest
from conserved.checking.identity_tests import is_tested_together, judge_together, statement, terms_of, tested_symmetries
from conserved.checking.pass_under_test import Setting
from conserved.checking.scaled_pass import sampled_pass
from conserved.symmetry import Symmetry
from conserved.tolerances import COARSE_UNIT

_BLOCKS = 16
"""Blocks of an axis: each makes a row that is left out four times as visible, for two backward passes."""

_LONG = 64
"""The shortest axis that is taken apart, so that a block has four rows."""


def block_identity_tests(setting: Setting, symmetries: Sequence[Symmetry]) -> Iterator[GradientTest]:
    """Test every identity of many coordinates on blocks of each long axis of the output, in half precision."""
    chosen = [symmetry for symmetry in tested_symmetries(setting, symmetries) if is_tested_together(symmetry)]
    if setting.noise.unit <= COARSE_UNIT or not chosen:
        return
    first = setting.outs[0]
    for axis, size in enumerate(first.shape):
        same = all(out.ndim > axis and out.shape[axis] == size for out in setting.outs)
        if size >= _LONG and same:
            yield from _test_along(setting, chosen, axis, size)


def _test_along(setting: Setting, symmetries: Sequence[Symmetry], axis: int, size: int) -> Iterator[GradientTest]:
    """Yield, for each symmetry, the test of the block that is furthest off."""
    width = -(-size // _BLOCKS)
    worst: dict[int, GradientTest] = {}
    for start in range(0, size, width):
        if setting.late:
            return
        stop = min(start + width, size)
        part = _mask_outputs(setting, axis, start, stop)
        for number, symmetry in enumerate(symmetries):
            test = judge_together(part, symmetry, terms_of(part, symmetry))
            if test is not None and (number not in worst or test.worst > worst[number].worst):
                identity = statement(symmetry, setting.function.out_names)
                description = f"{identity}, from {width} of axis {axis} of the output at a time"
                source = f"from {start}–{stop - 1} of axis {axis} of the output"
                worst[number] = replace(test, what=description, where="" if test.ok else source)
    yield from worst.values()


def _mask_outputs(setting: Setting, axis: int, start: int, stop: int) -> Setting:
    """Return the pass whose output gradient is zero outside a block, with the rounding of that pass."""
    gradients = []
    for gradient in setting.gradients:
        masked = torch.zeros_like(gradient)
        masked.narrow(axis, start, stop - start).copy_(gradient.narrow(axis, start, stop - start))
        gradients.append(masked)
    made = sampled_pass(setting.function, setting.function.values, gradients)
    noise = replace(setting.noise, grads=made.deviations)
    return replace(setting, gradients=tuple(gradients), grads=made.grads, noise=noise)
