"""Relations that a right backward obeys whatever the function; which of them apply is found out on the forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from conserved.auditing.dependence import Cut, cuts_of, part_of, same
from conserved.auditing.locating import pattern_meaning, where
from conserved.auditing.noise import by_row, wide
from conserved.auditing.setting import Setting
from conserved.auditing.tested import Gap, Method, Tested, gap_between

Gradients = Sequence[Tensor | None]

_REFUSALS = (Exception,)
_FEW = 16
_COARSE = 64.0
"""How many times the relative noise of the outputs, times its own sensitivity, the noise of a gradient may be."""


def relation_tests(setting: Setting) -> tuple[list[Tested], list[str]]:
    """Every relation that the forward allows, tested; and what was not tested, with the reason."""
    found: list[Tested] = []
    skipped: list[str] = []
    cuts: list[Cut] = []
    families: list[Callable[[Setting], Iterator[Tested | str]]] = [
        _repeated,
        _coarse,
        _linear,
        _transposed_slopes,
        _expanded_slopes,
        _each_alone,
        _strided_inputs,
        _accumulated,
        lambda chosen: _parts(chosen, cuts),
        lambda chosen: _permuted(chosen, cuts),
        _keys_permuted,
    ]
    for family in families:
        if setting.late:
            skipped.append("relations were cut short: the time allowed was used up")
            break
        if not cuts and family is families[8]:
            cuts += cuts_of(setting)
        try:
            for result in family(setting):
                if isinstance(result, str):
                    skipped.append(result)
                else:
                    found.append(result)
        except _REFUSALS as problem:
            what = (family.__doc__ or "a relation").strip().rstrip(".")
            skipped.append(f"not tested, the backward raises ({_short(problem)}): {what}")
    return found, list(dict.fromkeys(skipped))


def compare(
    setting: Setting,
    what: str,
    got: Gradients,
    expected: Gradients,
    *,
    places: Sequence[int] | None = None,
    noise: Sequence[Tensor | None] | None = None,
    exactly: bool = False,
    factor: bool = False,
    meaning: str = "",
) -> Iterator[Tested]:
    """A test for each input: whether two gradients agree up to their noise."""
    function = setting.function
    for place in range(len(function.names)) if places is None else places:
        right, found = expected[place], got[place]
        if right is None and found is None:
            continue
        name = function.names[place]
        if right is None or found is None:
            missing = torch.zeros_like(function.values[place]) if right is None else right
            found, right = (missing * 0 if found is None else found), missing
        deviation = (setting.noise.grads if noise is None else noise)[place]
        size = by_row(wide(setting.grads[place]).square()).sqrt().mean() if setting.grads[place] is not None else 0.0  # type: ignore[arg-type]
        floor = 8 * setting.noise.unit * setting.noise.response[place] * float(size)
        spread = (
            torch.zeros((), device=found.device, dtype=torch.float64) if deviation is None or exactly else deviation
        )
        gap = gap_between(found, right, spread, setting.noise.unit, floor)
        yield _judged(setting, name, what, gap, factor=factor, meaning=meaning)


def _judged(setting: Setting, name: str, what: str, gap: Gap, *, factor: bool, meaning: str) -> Tested:
    test = Tested(
        gradients=(name,),
        method=Method.RELATION,
        what=what,
        residual=gap.residual,
        limit=gap.allowed,
        worst=gap.worst,
        sees_factor=factor,
    )
    if test.ok:
        return test
    bad = gap.ratio > 1
    told = pattern_meaning(name, bad, gap.got, gap.expected, setting.shapes)
    return replace(test, where=where(bad), meaning="; ".join(part for part in (told, meaning) if part))


def _backward(
    setting: Setting,
    values: Sequence[Tensor] | None = None,
    slopes: Sequence[Tensor] | None = None,
    wanted: Sequence[int] | None = None,
) -> Gradients:
    chosen = setting.function.values if values is None else values
    return setting.function.gradients(chosen, setting.slopes if slopes is None else slopes, wanted)[1]


def _repeated(setting: Setting) -> Iterator[Tested | str]:
    """The same pass again gives the same gradients."""
    for _ in range(2):
        yield from compare(
            setting,
            "the same pass again gives the same gradient",
            _backward(setting),
            setting.grads,
            meaning="the gradient changes from run to run: a race, memory never written, or randomness",
        )


def _coarse(setting: Setting) -> Iterator[Tested | str]:
    """The gradients are not noisier than the outputs let expect."""
    for place, name in enumerate(setting.function.names):
        if setting.grads[place] is None:
            continue
        noise = setting.noise.relative[place]
        limit = _COARSE * setting.noise.unit * setting.noise.response[place]
        worst = noise / limit
        yield Tested(
            gradients=(name,),
            method=Method.RELATION,
            what="the gradient is as finely computed as the output",
            residual=noise,
            limit=limit,
            worst=worst,
            where="" if worst <= 1 else "everywhere",
            meaning=""
            if worst <= 1
            else f"d{name} carries a relative noise of {noise:.0e}, the outputs {setting.noise.unit:.0e}: rounded or "
            "accumulated in a coarser precision, or varying from run to run",
        )


def _linear(setting: Setting) -> Iterator[Tested | str]:
    """Linear in the output gradient: zero for zero, four times for four times, sums for sums."""
    zero = _backward(setting, slopes=[torch.zeros_like(slope) for slope in setting.slopes])
    nothing = [None if grad is None else torch.zeros_like(grad) for grad in setting.grads]
    yield from compare(setting, "a zero output gradient gives a zero gradient", zero, nothing, exactly=True)
    quarter = _backward(setting, slopes=[slope / 4 for slope in setting.slopes])
    expected = [None if grad is None else grad / 4 for grad in setting.grads]
    yield from compare(
        setting,
        "a quarter of the output gradient gives a quarter of the gradient",
        quarter,
        expected,
        meaning="the backward is not linear in the output gradient: it is ignored, applied twice, or a state is kept",
    )
    generator = torch.Generator(setting.slopes[0].device).manual_seed(setting.seed + 5)
    halves = []
    for slope in setting.slopes:
        mask = torch.randint(2, slope.shape, generator=generator, device=slope.device).to(slope.dtype)
        halves.append((slope * mask, slope * (1 - mask)))
    one = _backward(setting, slopes=[pair[0] for pair in halves])
    other = _backward(setting, slopes=[pair[1] for pair in halves])
    total = [None if a is None or b is None else wide(a) + wide(b) for a, b in zip(one, other, strict=True)]
    yield from compare(
        setting,
        "the gradients of two parts of the output gradient add up",
        total,
        setting.grads,
        noise=[None if deviation is None else 2 * deviation for deviation in setting.noise.grads],
        meaning="the backward is not linear in the output gradient",
    )
    if len(setting.slopes) > 1:
        kept = []
        for number in range(len(setting.slopes)):
            only = [slope if place == number else torch.zeros_like(slope) for place, slope in enumerate(setting.slopes)]
            kept.append(_backward(setting, slopes=only))
        sums = [
            None if any(part is None for part in parts) else sum(wide(part) for part in parts)
            for parts in zip(*kept, strict=True)
        ]
        yield from compare(setting, "the gradients of the single outputs add up", sums, setting.grads)  # type: ignore[arg-type]


def _transposed_slopes(setting: Setting) -> Iterator[Tested | str]:
    """An output gradient of other strides is the same output gradient."""
    if any(slope.ndim >= 2 for slope in setting.slopes):
        turned = [
            slope.transpose(-1, -2).contiguous().transpose(-1, -2) if slope.ndim >= 2 else slope
            for slope in setting.slopes
        ]
        yield from compare(
            setting,
            "a transposed output gradient gives the same gradient",
            _backward(setting, slopes=turned),
            setting.grads,
            meaning="the strides of the output gradient are not read",
        )


def _expanded_slopes(setting: Setting) -> Iterator[Tested | str]:
    """The output gradient of a sum, one number for all entries, is an output gradient."""
    if any(slope.ndim for slope in setting.slopes):
        ones = [torch.ones((), device=slope.device, dtype=slope.dtype).expand(slope.shape) for slope in setting.slopes]
        expanded = _backward(setting, slopes=ones)
        plain = _backward(setting, slopes=[one.contiguous() for one in ones])
        yield from compare(
            setting,
            "the output gradient of a sum (stride 0) gives the same gradient as a full one",
            expanded,
            plain,
            meaning="the strides of the output gradient are not read: out.sum().backward() is wrong",
        )


def _each_alone(setting: Setting) -> Iterator[Tested | str]:
    """A gradient does not depend on which others are asked for."""
    if len(setting.function.names) < 2:
        return
    for place in range(len(setting.function.names)):
        if setting.grads[place] is None or setting.late:
            continue
        try:
            alone = _backward(setting, wanted=[place])
        except _REFUSALS as problem:
            name = setting.function.names[place]
            yield f"d{name} alone was not tested: the backward raises ({_short(problem)})"
            continue
        yield from compare(
            setting,
            "asked for alone, the gradient is the same",
            alone,
            setting.grads,
            places=[place],
            meaning="the backward depends on which inputs require a gradient",
        )


def _strided_inputs(setting: Setting) -> Iterator[Tested | str]:
    """Inputs of other strides are the same inputs."""
    function = setting.function
    if function.copying or all(value.ndim < 2 for value in function.values):
        return
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "transposed": lambda value: value.transpose(-1, -2).contiguous().transpose(-1, -2),
        "sliced": lambda value: (
            torch.cat((value, value), 0)[: value.shape[0]]
            if value.ndim < 2
            else torch.cat((value, torch.zeros_like(value)), 1).narrow(1, 0, value.shape[1])
        ),
    }
    for way, laid in ways.items():
        values = [laid(value) if value.ndim >= 2 else value for value in function.values]
        if all(value.stride() == before.stride() for value, before in zip(values, function.values, strict=True)):
            continue
        try:
            outs = function.outputs(values)
        except _REFUSALS as problem:
            yield f"{way} inputs were not tested: the function refuses them ({_short(problem)})"
            continue
        if not _same_outputs(setting, outs):
            yield f"{way} inputs were not tested: the forward itself gives another result for them"
            continue
        try:
            grads = _backward(setting, values=values)
        except _REFUSALS as problem:
            yield f"{way} inputs: the forward accepts them, the backward raises ({_short(problem)})"
            continue
        yield from compare(
            setting,
            f"{way} (not contiguous) inputs give the same gradient",
            grads,
            setting.grads,
            meaning="strides of the inputs are not read, or those of one tensor are used for another",
        )


def _accumulated(setting: Setting) -> Iterator[Tested | str]:
    """Two backward passes into `.grad` add up, and nobody writes into what was there."""
    function = setting.function
    if function.copying:
        return
    leaves = [value.detach().clone().requires_grad_() for value in function.values]
    before = [leaf.detach().clone() for leaf in leaves]
    for leaf, start in zip(leaves, before, strict=True):
        leaf.grad = start.clone()
    with torch.enable_grad():
        outs = function._ran(leaves)
        chosen = [outs[place] for place in function.differentiable]
        torch.autograd.backward(chosen, [slope.clone() for slope in setting.slopes])
    got: list[Tensor | None] = []
    expected: list[Tensor | None] = []
    for place, leaf in enumerate(leaves):
        grad = setting.grads[place]
        assert leaf.grad is not None
        got.append(None if grad is None else wide(leaf.grad) - wide(before[place]))
        expected.append(grad)
    extra: list[Tensor | None] = []
    for place, deviation in enumerate(setting.noise.grads):
        size = wide(before[place]).abs() + (0 if setting.grads[place] is None else wide(setting.grads[place]).abs())  # type: ignore[arg-type]
        extra.append(None if deviation is None else deviation + 4 * setting.noise.unit * size)
    yield from compare(
        setting,
        "the gradient is added to one that is there already",
        got,
        expected,
        noise=extra,
        meaning="the backward writes into a gradient that it does not own",
    )


def _parts(setting: Setting, cuts: Sequence[Cut]) -> Iterator[Tested | str]:
    """Parts that the forward keeps apart: no gradient flows between them, and one run alone has the same gradient."""
    for cut in cuts:
        if setting.late:
            return
        slopes = []
        for slope, axis, place in zip(setting.slopes, cut.out_axes, cut.out_cuts, strict=True):
            masked = slope.clone()
            masked.narrow(axis, place, slope.shape[axis] - place).zero_()
            slopes.append(masked)
        grads = _backward(setting, slopes=slopes)
        name = "part" if cut.local else "prefix"
        label = f"the first {cut.out_cuts[0]} of {cut.size} along axis {cut.out_axes[0]} of the output"
        for part in cut.inputs:
            grad = grads[part.place]
            if grad is None:
                continue
            beyond: list[Tensor | None] = [None] * len(grads)
            beyond[part.place] = grad.clone()
            beyond[part.place].narrow(part.axis, 0, part.cut).zero_()  # type: ignore[union-attr]
            nothing: list[Tensor | None] = [None if item is None else torch.zeros_like(item) for item in beyond]
            yield from compare(
                setting,
                f"{label}: no gradient where they do not depend on the input",
                beyond,
                nothing,
                places=[part.place],
                exactly=True,
                meaning="gradient flows where the forward does not: a mask that differs between forward and backward",
            )
        yield from _run_alone(setting, cut, slopes, grads, f"{label}: run alone, the {name} has the same gradient")


def _run_alone(
    setting: Setting, cut: Cut, slopes: Sequence[Tensor], grads: Gradients, what: str
) -> Iterator[Tested | str]:
    function = setting.function
    values = list(function.values)
    for part in cut.inputs:
        values[part.place] = part_of(values[part.place], part.axis, 0, part.cut)
    pieces = [
        part_of(slope, axis, 0, place) for slope, axis, place in zip(slopes, cut.out_axes, cut.out_cuts, strict=True)
    ]
    try:
        outs = function.outputs(values)
    except _REFUSALS as problem:
        yield f"{what} was not tested: the function refuses the part ({_short(problem)})"
        return
    for number, (out, whole) in enumerate(zip(outs, setting.outs, strict=True)):
        expected = whole.narrow(cut.out_axes[number], 0, cut.out_cuts[number])
        if out.shape != expected.shape:
            return
        deviation = setting.noise.outs[number]
        if deviation.shape[cut.out_axes[number]] > 1:
            deviation = deviation.narrow(cut.out_axes[number], 0, cut.out_cuts[number])
        if not same(setting, out, expected, deviation):
            return
    try:
        alone = function.gradients(values, pieces)[1]
    except _REFUSALS as problem:
        yield f"{what} was not tested: the backward raises ({_short(problem)})"
        return
    expected_grads = list(grads)
    noise = list(setting.noise.grads)
    for part in cut.inputs:
        whole_grad = grads[part.place]
        if whole_grad is None:
            continue
        expected_grads[part.place] = whole_grad.narrow(part.axis, 0, part.cut)
        spread = noise[part.place]
        if spread is not None and spread.shape[part.axis] > 1:
            noise[part.place] = spread.narrow(part.axis, 0, part.cut)
    yield from compare(
        setting,
        what,
        alone,
        expected_grads,
        noise=noise,
        meaning="the gradient depends on what lies outside the part: the last tile, a stale block, or a wrong boundary",
    )


def _permuted(setting: Setting, cuts: Sequence[Cut]) -> Iterator[Tested | str]:
    """Parts that do not mix may be put in another order."""
    done: set[tuple[int, ...]] = set()
    for cut in cuts:
        whole = all(setting.function.values[part.place].shape[part.axis] == cut.size for part in cut.inputs)
        if not cut.local or cut.out_axes in done or not whole or setting.late:
            continue
        done.add(cut.out_axes)
        axes = {part.place: part.axis for part in cut.inputs}
        yield from _reordered(
            setting,
            axes,
            dict(enumerate(cut.out_axes)),
            cut.size,
            f"reordering axis {cut.out_axes[0]} of the output reorders the gradient",
        )


def _keys_permuted(setting: Setting) -> Iterator[Tested | str]:
    """Entries that are summed over may be put in another order: of one input, or of two together."""
    values = setting.function.values
    if sum(out.numel() for out in setting.outs) < _FEW:
        return  # A few numbers stay the same to their own rounding under changes that are no symmetry.
    places = range(len(values))
    sets = [(place,) for place in places] + [(a, b) for a in places for b in places if a < b]
    for group in sets:
        for axis in range(min(values[place].ndim for place in group)):
            sizes = {values[place].shape[axis] for place in group}
            if len(sizes) != 1 or sizes == {1} or setting.late or not all(setting.telling[place] for place in group):
                continue
            size = sizes.pop()
            names = " and ".join(setting.function.names[place] for place in group)
            what = f"reordering axis {axis} of {names} together leaves the output, and reorders their gradient"
            yield from _reordered(setting, dict.fromkeys(group, axis), {}, size, what)


def _reordered(
    setting: Setting, axes: dict[int, int], out_axes: dict[int, int], size: int, what: str
) -> Iterator[Tested | str]:
    generator = torch.Generator().manual_seed(setting.seed + size)
    order = torch.randperm(size, generator=generator)
    if bool((order == torch.arange(size)).all()):
        order = order.flip(0)
    order = order.to(setting.outs[0].device)
    values = [
        value.index_select(axes[place], order) if place in axes else value
        for place, value in enumerate(setting.function.values)
    ]
    try:
        outs = setting.function.outputs(values)
    except _REFUSALS:
        return
    for number, (out, before) in enumerate(zip(outs, setting.outs, strict=True)):
        moved = before.index_select(out_axes[number], order) if number in out_axes else before
        spread = setting.noise.outs[number]
        if number in out_axes and spread.shape[out_axes[number]] > 1:
            spread = spread.index_select(out_axes[number], order)
        if not same(setting, out, moved, spread):
            return
    slopes = [
        slope.index_select(out_axes[number], order) if number in out_axes else slope
        for number, slope in enumerate(setting.slopes)
    ]
    got = _backward(setting, values=values, slopes=slopes)
    back = torch.argsort(order)
    straight = [
        grad.index_select(axes[place], back) if grad is not None and place in axes else grad
        for place, grad in enumerate(got)
    ]
    yield from compare(
        setting,
        what,
        straight,
        setting.grads,
        meaning="the gradient depends on the position: a wrong boundary, a tile left out, or entries from elsewhere",
    )


def _same_outputs(setting: Setting, outs: Sequence[Tensor]) -> bool:
    return all(
        same(setting, out, before, setting.noise.outs[number])
        for number, (out, before) in enumerate(zip(outs, setting.outs, strict=True))
    )


def _short(problem: Exception) -> str:
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0][:100] if lines else ''}"
