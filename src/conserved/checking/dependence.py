"""Which parts of the outputs depend on which parts of the inputs, found by changing parts of the inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from conserved.checking.pass_under_test import Setting
from conserved.inference.probing.noise import wide
from conserved.inference.probing.numerical_function import Values


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependence:
    """Input entries from `cut` on along `axis` leave the outputs before a cut alone; `local` says that the reverse
    holds too, so that parts do not mix at all (batch, heads) rather than flow one way (causal)."""

    index: int
    axis: int
    cut: int
    local: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A way of cutting all outputs along one axis, and the inputs that are cut with them; `known` unless the function
    could not be run to find out about some input."""

    out_axes: tuple[int, ...]
    out_cuts: tuple[int, ...]
    size: int
    inputs: tuple[Dependence, ...]
    known: bool = True

    @property
    def local(self) -> bool:
        return all(part.local for part in self.inputs)


def part_of(tensor: Tensor, axis: int, start: int, stop: int) -> Tensor:
    """Return the entries from `start` to `stop` along an axis, with memory of their own."""
    return tensor.narrow(axis, start, stop - start).clone(memory_format=torch.contiguous_format)


def outputs_after_change(setting: Setting, index: int, axis: int, start: int, stop: int) -> Values | None:
    """Return the outputs after the entries of one input from `start` to `stop` have been replaced."""
    values = [value.detach().clone() for value in setting.function.values]
    part = values[index].narrow(axis, start, stop - start)
    # Smaller and of the same sign: logarithms of decays must stay negative, and probabilities below one. Neighbouring
    # entries change by different factors, because a norm does not see a common one.
    eighths = torch.arange(part.numel(), device=part.device).mul_(5).remainder_(4).add_(3).reshape(part.shape)
    part.copy_((wide(part) * eighths / 8).to(part.dtype))
    if not bool(part.any()):
        part.fill_(0.5)
    try:
        outputs = setting.function.outputs(values)
    except Exception:  # a kernel may refuse inputs in any way it likes
        return None
    if any(a.shape != b.shape for a, b in zip(outputs, setting.outs, strict=True)):
        return None
    return outputs if all(bool(torch.isfinite(out).all()) for out in outputs) else None


def is_untouched(setting: Setting, left: Tensor, right: Tensor) -> bool:
    """Return whether a part of an output is the same bit by bit, or, of a function that never repeats itself, nearly
    so.
    """
    return torch.equal(left, right) or (not setting.repeats and is_same(setting, left, right))


def is_same(setting: Setting, left: Tensor, right: Tensor, deviation: Tensor | None = None) -> bool:
    """Return whether an output, or a part of it, is the same up to a rounding or two."""
    gap = (wide(left) - wide(right)).abs()
    size = wide(right).abs()
    limit = 8 * setting.noise.unit * (size + size.square().mean().sqrt())
    if deviation is not None:
        limit = limit + 10 * deviation
    return bool((gap <= limit).all())


def cuts_of(setting: Setting, limit: int = 3) -> list[Cut]:
    """Return axes of the outputs along which the function takes parts apart, each with a few places to cut."""
    result: list[Cut] = []
    first = setting.outs[0]
    for axis in range(first.ndim):
        size = first.shape[axis]
        if size < 2 or any(out.ndim <= axis or out.shape[axis] != size for out in setting.outs[1:]):
            others = _other_axes(setting, axis)
            if size < 2 or others is None:
                continue
        out_axes = _other_axes(setting, axis)
        assert out_axes is not None
        for share in choose_cuts(setting, size)[:limit]:
            if setting.late:
                return result
            cut = _find_cut(setting, out_axes, size, share)
            if cut is None:
                break
            if cut not in result:
                result.append(cut)
    return result


def _other_axes(setting: Setting, axis: int) -> tuple[int, ...] | None:
    """Return the axis of every output that is cut with this axis of the first one: the same place, or the same size."""
    size = setting.outs[0].shape[axis]
    chosen = []
    for out in setting.outs:
        options = [axis, *range(out.ndim)]
        match = next((option for option in options if option < out.ndim and out.shape[option] == size), None)
        if match is None:
            return None
        chosen.append(match)
    return tuple(chosen)


def choose_cuts(setting: Setting, size: int) -> list[int]:
    """Return where to cut an axis: off the boundaries of tiles where it is long."""
    if size < 8:
        return [max(1, size // 2)]
    tile = max(power for power in (4, 8, 16, 32, 64, 128) if power < size)
    options = [size - 1, tile + 1, max(1, size // 2 - 1)]
    return [index for number, index in enumerate(options) if 0 < index < size and index not in options[:number]]


def _find_cut(setting: Setting, out_axes: tuple[int, ...], size: int, share: int) -> Cut | None:
    """Return the inputs that can be cut with the outputs near `share`, or None if there are none.

    Heads may be shared: an input of as many axes with fewer heads is cut between two groups, and so is all else.
    """
    shapes = [value.shape for value in setting.function.values]
    first = out_axes[0]
    rank = setting.outs[0].ndim
    fewer = [shape[first] for shape in shapes if len(shape) == rank and 1 < shape[first] < size]
    common = min((count for count in fewer if size % count == 0), default=size)
    out_cut = min(max(1, round(share * common / size)), common - 1) * (size // common)
    parts: list[Dependence] = []
    known = True
    for index, shape in enumerate(shapes):
        for axis in sorted(range(len(shape)), key=lambda axis: (axis != first, axis)):
            count = shape[axis]
            grouped = axis == first and len(shape) == rank and count in fewer and size % count == 0
            complete = count == size or grouped
            if count < 2 or not complete or out_cut * count % size:
                continue
            later = outputs_after_change(setting, index, axis, out_cut * count // size, count)
            known &= later is not None
            if later is None:
                continue
            chosen = _follows(setting, index, axis, out_cut * count // size, out_axes, out_cut, later)
            if chosen is not None:
                parts.append(chosen)
                break
    if not parts or not 0 < out_cut < size:
        return None
    return Cut(out_axes=out_axes, out_cuts=(out_cut,) * len(out_axes), size=size, inputs=tuple(parts), known=known)


def _follows(
    setting: Setting, index: int, axis: int, cut: int, out_axes: Sequence[int], out_cut: int, later: Values
) -> Dependence | None:
    for number, (out, before) in enumerate(zip(later, setting.outs, strict=True)):
        along = out_axes[number]
        if not is_untouched(setting, out.narrow(along, 0, out_cut), before.narrow(along, 0, out_cut)):
            return None
    if all(is_untouched(setting, out, before) for out, before in zip(later, setting.outs, strict=True)):
        return None
    earlier = outputs_after_change(setting, index, axis, 0, cut)
    local = earlier is not None and all(
        is_untouched(
            setting,
            out.narrow(out_axes[number], out_cut, out.shape[out_axes[number]] - out_cut),
            before.narrow(out_axes[number], out_cut, before.shape[out_axes[number]] - out_cut),
        )
        for number, (out, before) in enumerate(zip(earlier, setting.outs, strict=True))
    )
    return Dependence(index=index, axis=axis, cut=cut, local=local)
