"""Relations between a function and parts of it: parts run alone, parts in another order, sums in another order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from conserved.checking.comparing import REFUSALS, Gradients, backward_pass, compare, short
from conserved.checking.dependence import Cut, is_same, part_of
from conserved.checking.gradient_test import GradientTest
from conserved.checking.pass_under_test import Setting
from conserved.inference.probing.noise import rms, wide

_FEW = 16

_NEARBY = 2.0**-3
"""The share of its size by which an entry moves to see whether a relation holds at other inputs too."""


def test_parts_alone(setting: Setting, cuts: Sequence[Cut]) -> Iterator[GradientTest | str]:
    """Test parts that the forward keeps apart: no gradient flows between them, and each alone has the same gradient."""
    refused: set[int] = set()
    for cut in cuts:
        if setting.late:
            return
        gradients = []
        for gradient, axis, index in zip(setting.gradients, cut.out_axes, cut.out_cuts, strict=True):
            masked = gradient.clone()
            masked.narrow(axis, index, gradient.shape[axis] - index).zero_()
            gradients.append(masked)
        grads = backward_pass(setting, gradients=gradients)
        name = "part" if cut.local else "prefix"
        label = f"the first {cut.out_cuts[0]} of {cut.size} along axis {cut.out_axes[0]} of the output"
        for part in cut.inputs:
            grad = grads[part.index]
            if grad is None:
                continue
            beyond: list[Tensor | None] = [None] * len(grads)
            beyond[part.index] = grad.clone()
            beyond[part.index].narrow(part.axis, 0, part.cut).zero_()  # type: ignore[union-attr]
            nothing: list[Tensor | None] = [None if item is None else torch.zeros_like(item) for item in beyond]
            yield from compare(
                setting,
                f"{label}: no gradient where they do not depend on the input",
                beyond,
                nothing,
                indices=[part.index],
                exactly=True,
                meaning="gradient flows where the forward does not: a mask that differs between forward and backward",
            )
        for result in _run_alone(
            setting, cut, gradients, grads, f"{label}: run alone, the {name} has the same gradient"
        ):
            if isinstance(result, str):
                if cut.out_axes[0] in refused:
                    continue
                refused.add(cut.out_axes[0])
            yield result


def _run_alone(
    setting: Setting, cut: Cut, gradients: Sequence[Tensor], grads: Gradients, what: str
) -> Iterator[GradientTest | str]:
    function = setting.function
    values = list(function.values)
    if not cut.known:
        return
    untested = f"parts of the output along axis {cut.out_axes[0]} were not run alone"
    for part in cut.inputs:
        values[part.index] = part_of(values[part.index], part.axis, 0, part.cut)
    pieces = [
        part_of(gradient, axis, 0, index)
        for gradient, axis, index in zip(gradients, cut.out_axes, cut.out_cuts, strict=True)
    ]
    try:
        outs = function.outputs(values)
    except REFUSALS as problem:
        yield f"{untested}: the function refuses them ({short(problem)})"
        return
    for number, (out, whole) in enumerate(zip(outs, setting.outs, strict=True)):
        expected = whole.narrow(cut.out_axes[number], 0, cut.out_cuts[number])
        if out.shape != expected.shape:
            return
        deviation = setting.noise.outs[number]
        if deviation.shape[cut.out_axes[number]] > 1:
            deviation = deviation.narrow(cut.out_axes[number], 0, cut.out_cuts[number])
        if not is_same(setting, out, expected, deviation):
            return
    try:
        alone = function.gradients(values, pieces)[1]
    except REFUSALS as problem:
        yield f"{untested}: the backward raises ({short(problem)})"
        return
    expected_grads = list(grads)
    noise = list(setting.noise.grads)
    for part in cut.inputs:
        whole_grad = grads[part.index]
        if whole_grad is None:
            continue
        expected_grads[part.index] = whole_grad.narrow(part.axis, 0, part.cut)
        spread = noise[part.index]
        if spread is not None and spread.shape[part.axis] > 1:
            noise[part.index] = spread.narrow(part.axis, 0, part.cut)
    yield from compare(
        setting,
        what,
        alone,
        expected_grads,
        noise=noise,
        other_kernel=True,
        meaning="the gradient depends on what lies outside the part: the last tile, a stale block, or a wrong boundary",
    )


def test_reordered_parts(setting: Setting, cuts: Sequence[Cut]) -> Iterator[GradientTest | str]:
    """Test that gradients follow when parts that do not mix are put in another order."""
    done: set[tuple[int, ...]] = set()
    for cut in cuts:
        whole = all(setting.function.values[part.index].shape[part.axis] == cut.size for part in cut.inputs)
        if not cut.local or cut.out_axes in done or not whole or setting.late:
            continue
        done.add(cut.out_axes)
        axes = {part.index: part.axis for part in cut.inputs}
        yield from _test_order(
            setting,
            axes,
            dict(enumerate(cut.out_axes)),
            cut.size,
            f"reordering axis {cut.out_axes[0]} of the output reorders the gradient",
        )


def test_reordered_sums(setting: Setting) -> Iterator[GradientTest | str]:
    """Test that gradients follow when entries that are summed over are put in another order.

    The order is changed in one input, or in two together.
    """
    values = setting.function.values
    if sum(out.numel() for out in setting.outs) < _FEW:
        return  # A few numbers stay the same to their own rounding under changes that are no symmetry.
    indices = range(len(values))
    sets = [(index,) for index in indices] + [(a, b) for a in indices for b in indices if a < b]
    for group in sets:
        for axis in range(min(values[index].ndim for index in group)):
            sizes = {values[index].shape[axis] for index in group}
            if len(sizes) != 1 or sizes == {1} or setting.late or not all(setting.responsive[index] for index in group):
                continue
            size = sizes.pop()
            names = " and ".join(setting.function.names[index] for index in group)
            what = f"reordering axis {axis} of {names} together leaves the output, and reorders their gradient"
            yield from _test_order(setting, dict.fromkeys(group, axis), {}, size, what)


def _displace(value: Tensor, seed: int) -> Tensor:
    """Return nearby inputs: every entry is moved, and zeros are too."""
    x = wide(value)
    generator = torch.Generator(x.device).manual_seed(seed)
    share = torch.rand(x.shape, generator=generator, device=x.device, dtype=torch.float64) - 0.5
    return (x + _NEARBY * share * (x.abs() + rms(x))).to(value.dtype)


def _reorders(
    setting: Setting, axes: dict[int, int], out_axes: dict[int, int], order: Tensor, values: Sequence[Tensor]
) -> bool:
    """Return whether outputs are reordered, or stay, when inputs are reordered along their axes."""
    moved = [value.index_select(axes[index], order) if index in axes else value for index, value in enumerate(values)]
    try:
        outs, befores = setting.function.outputs(moved), setting.function.outputs(values)
    except REFUSALS:
        return False
    for number, (out, before) in enumerate(zip(outs, befores, strict=True)):
        expected = before.index_select(out_axes[number], order) if number in out_axes else before
        spread = setting.noise.outs[number]
        if number in out_axes and spread.shape[out_axes[number]] > 1:
            spread = spread.index_select(out_axes[number], order)
        if out.shape != expected.shape or not is_same(setting, out, expected, spread):
            return False
    return True


def _test_order(
    setting: Setting, axes: dict[int, int], out_axes: dict[int, int], size: int, what: str
) -> Iterator[GradientTest | str]:
    generator = torch.Generator().manual_seed(setting.seed + size)
    order = torch.randperm(size, generator=generator)
    if bool((order == torch.arange(size)).all()):
        order = order.flip(0)
    order = order.to(setting.outs[0].device)
    values = [
        value.index_select(axes[index], order) if index in axes else value
        for index, value in enumerate(setting.function.values)
    ]
    for index in axes:
        before = setting.function.values[index]
        if rms(wide(values[index]) - wide(before)) < 0.5 * rms(before):
            return  # nearly equal entries have changed places: that proves nothing
    if not _reorders(setting, axes, out_axes, order, setting.function.values):
        return
    # At weights that nobody has trained a map may be the identity, which reorders with anything; near them it is not.
    near = [_displace(value, setting.seed + size + index) for index, value in enumerate(setting.function.values)]
    if not _reorders(setting, axes, out_axes, order, near):
        return
    tests = list(_compare_reordered(setting, axes, out_axes, order, what, setting.function.values, setting.grads))
    if not all(test.ok for test in tests):
        # Equal entries of half precision may be taken in any order; at inputs without ties the order is given.
        there = backward_pass(setting, values=near)
        tests = list(_compare_reordered(setting, axes, out_axes, order, what, near, there))
    yield from tests


def _compare_reordered(
    setting: Setting,
    axes: dict[int, int],
    out_axes: dict[int, int],
    order: Tensor,
    what: str,
    values: Sequence[Tensor],
    grads: Gradients,
) -> Iterator[GradientTest]:
    """Compare the gradients at inputs with those at reordered ones."""
    moved = [value.index_select(axes[index], order) if index in axes else value for index, value in enumerate(values)]
    gradients = [
        gradient.index_select(out_axes[number], order) if number in out_axes else gradient
        for number, gradient in enumerate(setting.gradients)
    ]
    actual = backward_pass(setting, values=moved, gradients=gradients)
    back = torch.argsort(order)
    straight = [
        grad.index_select(axes[index], back) if grad is not None and index in axes else grad
        for index, grad in enumerate(actual)
    ]
    yield from compare(
        setting,
        what,
        straight,
        grads,
        meaning="the gradient depends on the position: a wrong boundary, a tile left out, or entries from elsewhere",
    )
