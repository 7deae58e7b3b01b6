"""Inputs that random numbers of size one do not reach: large, tiny, sparse, sorted, one-hot, constant, far from zero.

Each kind of input is tried with several output gradients, along lines that move all inputs at once: the slope of the
function there must be that of the gradient. Output gradients that weigh each output by the inverse of its size make
small outputs (probabilities of 1e-6) count as much as large ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from conserved.auditing.functions.comparing import REFUSALS
from conserved.auditing.functions.form_agreement import agreement_tests
from conserved.auditing.functions.gradient_test import Method, Tested
from conserved.auditing.functions.line_slopes import Line, SlopeGap, line_through, matched_slopes, slope_gap
from conserved.auditing.functions.pass_under_test import Setting
from conserved.auditing.functions.reference_form import FunctionForm
from conserved.inference.probing.noise import by_row, measure_output_noise, rms, step_of, wide

_USEFUL = 0.5
"""A slope known to worse than this share of itself tests nothing."""

_FINE = 2.0**-20
"""A rounding below which four points can be near each other and random output gradients see enough."""

_SHORTER = 2.0**-7
"""How much nearer the points are where a function bends within a step: a norm of a constant row."""

_CONFIRMED = 0.125
"""How much shorter the line is along which a failure must show again."""

_SCALE = 1.375
"""The backward is linear in the output gradient, rounding is not: a pass from 11/8 of it samples the rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """A kind of input: its name, and the inputs in the precision of the given form."""

    name: str
    values: tuple[Tensor, ...]


def regimes(setting: Setting) -> Iterator[Regime]:
    """Every kind of input that differs from the one that was given."""
    values = setting.function.values
    generator = torch.Generator().manual_seed(setting.seed + 41)
    kinds = {
        "large": lambda x: 8 * x,
        "tiny": lambda x: 2.0**-8 * x,
        "of all sizes": lambda x: x * torch.exp2(torch.randint(-10, 4, x.shape, generator=generator).to(x)),
        "sparse": lambda x: _sparse(x, generator),
        "sorted": lambda x: x.sort(-1).values if x.ndim else x,
        "one-hot": _one_hot,
        "constant": lambda x: x.select(-1, 0).unsqueeze(-1).expand_as(x).contiguous() if x.ndim else x,
        "far from zero": lambda x: x + 8 * rms(x),
        "saturated": lambda x: 24 * x,
    }
    for name, change in kinds.items():
        changed = tuple(change(wide(value)).to(value.dtype) for value in values)
        if any(not torch.equal(new, value) for new, value in zip(changed, values, strict=True)):
            yield Regime(name=name, values=changed)


def _sparse(x: Tensor, generator: torch.Generator) -> Tensor:
    """One entry in eight, and the first of each row, so that no row is empty."""
    kept = torch.rand(x.shape, generator=generator).to(x.device) < 1 / 8
    if x.ndim:
        kept[..., 0] = True
    return x * kept


def _one_hot(x: Tensor) -> Tensor:
    """One entry of each row a thousand times the others."""
    if not x.ndim:
        return x
    first = x.abs().max(-1, keepdim=True).values
    return torch.where(x.abs() == first, 8 * x, 2.0**-7 * x)


def _output_gradients(outs: Sequence[Tensor], seed: int) -> Iterator[tuple[str, list[Tensor]]]:
    """Output gradients to try: random ones, and random ones over the size of each output.

    Their significands have four bits, so that 11/8 of them is exact in every precision.
    """
    generator = torch.Generator().manual_seed(seed + 43)
    plain, inverse = [], []
    for out in outs:
        signs = torch.randint(0, 2, out.shape, generator=generator).to(out.device).double() * 2 - 1
        size = torch.randint(8, 16, out.shape, generator=generator).to(out.device).double() / 8
        plain.append((signs * size).to(out.dtype))
        floor = max(rms(out), 1e-30) * 2.0**-20
        small = torch.exp2(-wide(out).abs().clamp_min(floor).log2().round())
        reach = torch.finfo(out.dtype).max ** 0.25
        inverse.append((signs * size * small.clamp(max=reach)).to(out.dtype))
    yield "", plain
    yield " and output gradients of inverse size", inverse


def regime_tests(
    setting: Setting, given: Setting, form: FunctionForm | None
) -> tuple[list[Tested], list[Tested], list[str]]:
    """Test slopes at every kind of input; then the given form against the reference form there, where there is one.

    Args:
        setting: the form whose slopes are tested.
        given: the form that was given.
        form: the reference form, where `setting` is a pass of it.

    Returns:
        The tests of slopes, those of the given form, and a note on the kinds of input that could not be tested.
    """
    tests: list[Tested] = []
    agreed: list[Tested] = []
    skipped: list[str] = []
    for regime in regimes(given):
        if setting.late:
            skipped.append(regime.name)
            continue
        try:
            made = list(_at(setting, given, form, regime))
        except REFUSALS:  # a kernel may refuse inputs in any way it likes
            made = []
        if not made:
            skipped.append(regime.name)
        tests += [test for test in made if test.method is Method.SLOPE]
        agreed += [test for test in made if test.method is not Method.SLOPE]
    tests += _inverse_at_given(setting)
    note = f"inputs of these kinds could not be tested (refused, not finite, or too noisy): {', '.join(skipped)}."
    return tests, agreed, [note] if skipped else []


def _inverse_at_given(setting: Setting) -> list[Tested]:
    """The inputs that were given, with output gradients of inverse size."""
    try:
        noise = setting.noise.outs
        choices = list(_output_gradients(setting.outs, setting.seed))[1:]
        return list(_slopes(setting, setting.function.values, setting.outs, noise, choices, "the given"))
    except REFUSALS:
        return []


def _at(setting: Setting, given: Setting, form: FunctionForm | None, regime: Regime) -> Iterator[Tested]:
    function = setting.function
    values = tuple(value.to(like.dtype) for value, like in zip(regime.values, function.values, strict=True))
    outs = function.outputs(values)
    if not all(bool(torch.isfinite(out).all()) for out in outs):
        return
    noise = measure_output_noise(function, values, step_of(function))
    choices = list(_output_gradients(outs, setting.seed))
    yield from _slopes(setting, values, outs, noise, choices, regime.name)
    if form is not None:
        slopes = [v.to(out.dtype) for v, out in zip(choices[0][1], given.outs, strict=True)]
        own = given.function.outputs(regime.values)
        # Products of tiny numbers leave the range of float16.
        tiny = given.function.precision == torch.float16 and regime.name in ("tiny", "of all sizes")
        if not tiny and all(bool(torch.isfinite(out).all()) for out in own):
            yield from agreement_tests(given, form, regime.values, slopes, at=f" at {regime.name} inputs")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """A backward pass: its output gradients in words and numbers, gradients, their deviations, a known bias."""

    words: str
    slopes: Sequence[Tensor]
    grads: tuple[Tensor | None, ...]
    deviations: Sequence[Tensor | None]
    bias: float = 0.0

    @property
    def finite(self) -> bool:
        return all(grad is None or bool(torch.isfinite(grad).all()) for grad in self.grads)


def _slopes(
    setting: Setting,
    values: Sequence[Tensor],
    outs: Sequence[Tensor],
    noise: Sequence[Tensor],
    choices: Sequence[tuple[str, list[Tensor]]],
    name: str,
) -> Iterator[Tested]:
    """Compare slopes along two lines that move every input, and along lines of single inputs where these fail."""
    passes = [_passed(setting, values, slopes, words) for words, slopes in choices]
    for number in range(2):
        for shorter in (1.0, _SHORTER if setting.noise.unit < _FINE else 0.25):
            moved = [
                shorter * _direction(value, setting.seed + 97 * number + place) for place, value in enumerate(values)
            ]
            line = line_through(setting.function, values, moved, noise, outs)
            if line is None:
                continue
            every = [*passes, *_matched(setting, values, outs, line)]
            useful = 0
            for each in every:
                if not each.finite:
                    continue
                gap = _gap(setting, line, each)
                if gap.scale == 0 or not gap.converged or gap.limit > _USEFUL * gap.scale:
                    continue
                useful += 1
                what = f"slope along a random direction at {name} inputs{each.words}"
                if gap.worst <= 1:
                    yield _tested(tuple(setting.function.names), what, gap)
                    continue
                if not _persists(setting, values, outs, noise, each, shorter, number):
                    continue
                blamed = list(_blamed(setting, values, outs, noise, moved, each, what))
                yield from blamed or [_tested(tuple(setting.function.names), what, gap)]
            if useful == len(every):
                break


def _persists(
    setting: Setting,
    values: Sequence[Tensor],
    outs: Sequence[Tensor],
    noise: Sequence[Tensor],
    each: _Pass,
    shorter: float,
    number: int,
) -> bool:
    """Whether a slope that fails also fails along another line, and in fine precision over a shorter distance.

    Errors of several kinks between the points can cancel in both differences that show them; along another line they
    do not, and a wrong gradient is wrong there too.
    """
    length = shorter * (_CONFIRMED if setting.noise.unit < _FINE else 1.0)
    seed = setting.seed + 1009 + 97 * number
    moved = [length * _direction(value, seed + place) for place, value in enumerate(values)]
    line = line_through(setting.function, values, moved, noise, outs)
    if line is None:
        return False
    gap = _gap(setting, line, each)
    return gap.converged and gap.worst > 1


def _gap(setting: Setting, line: Line, each: _Pass) -> SlopeGap:
    gap = slope_gap(line, each.slopes, each.grads, each.deviations, setting.noise.unit)
    return replace(gap, limit=gap.limit + each.bias, error=gap.error + each.bias)


def _matched(setting: Setting, values: Sequence[Tensor], outs: Sequence[Tensor], line: Line) -> Iterator[_Pass]:
    """Passes from the output gradients that fit a line, where random ones are too coarse."""
    if setting.noise.unit < _FINE:
        return
    for relative in (False, True):
        slopes, bias = matched_slopes(line, outs, relative=relative)
        words = " and output gradients along its change" + (", relative to the outputs" if relative else "")
        made = _passed(setting, values, slopes, words)
        yield replace(made, bias=bias)


def _passed(setting: Setting, values: Sequence[Tensor], slopes: Sequence[Tensor], words: str) -> _Pass:
    grads, deviations = _gradients(setting, values, slopes)
    return _Pass(words=words, slopes=slopes, grads=grads, deviations=deviations)


def _blamed(
    setting: Setting,
    values: Sequence[Tensor],
    outs: Sequence[Tensor],
    noise: Sequence[Tensor],
    moved: Sequence[Tensor],
    each: _Pass,
    what: str,
) -> Iterator[Tested]:
    """The inputs whose own slope fails."""
    for place, input_name in enumerate(setting.function.names):
        alone = [along if other == place else None for other, along in enumerate(moved)]
        line = line_through(setting.function, values, alone, noise, outs)
        if line is None or each.grads[place] is None:
            continue
        gap = _gap(setting, line, each)
        if gap.worst > 1:
            yield _tested((input_name,), what, gap)


def _tested(names: tuple[str, ...], what: str, gap: SlopeGap) -> Tested:
    test = Tested(
        gradients=names,
        method=Method.SLOPE,
        what=what,
        residual=abs(gap.measured - gap.expected) / gap.scale,
        limit=gap.limit / gap.scale,
        worst=gap.worst,
    )
    if test.ok:
        return test
    kind = what.partition(" at ")[2]
    return replace(test, where="somewhere", meaning=f"the gradient is wrong for {kind}: a tail, a clamp or a branch")


def _direction(value: Tensor, seed: int) -> Tensor:
    """Random signs, each of the size of its entry or of a part of its row's."""
    x = wide(value)
    generator = torch.Generator(x.device).manual_seed(seed + 211)
    signs = torch.randint(2, x.shape, generator=generator, device=x.device).double() * 2 - 1
    size = by_row(x.square()).sqrt().expand_as(x)
    return signs * x.abs().clamp_min(2.0**-4 * size).clamp_min(2.0**-8 * (rms(x) or 1.0))


def _gradients(
    setting: Setting, values: Sequence[Tensor], slopes: Sequence[Tensor]
) -> tuple[tuple[Tensor | None, ...], list[Tensor | None]]:
    """Gradients, and the standard deviation of their rounding by row, from a second pass that is scaled."""
    grads = setting.function.gradients(values, slopes)[1]
    again = setting.function.gradients(values, [slope * _SCALE for slope in slopes])[1]
    deviations: list[Tensor | None] = []
    for grad, other in zip(grads, again, strict=True):
        if grad is None or other is None:
            deviations.append(None)
            continue
        sample = by_row((wide(other) / _SCALE - wide(grad)).square() / 2)
        deviations.append((sample + sample.median()).sqrt())
    return grads, deviations
