"""Inputs that random numbers of size one do not reach: large, tiny, sparse, sorted, one-hot, constant, equal.

Each kind of input is tried with several output gradients, along lines that move all inputs at once: the gradient of the
function there must be that of the gradient. Output gradients that weight each output by the inverse of its size make
small outputs (probabilities of 1e-6) count as much as large ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from conserved.checking.comparing import REFUSALS
from conserved.checking.form_agreement import agreement_tests
from conserved.checking.gradient_test import GradientTest, Method
from conserved.checking.line_derivatives import DerivativeGap, Line, derivative_gap, line_through, matched_derivatives
from conserved.checking.pass_under_test import Setting
from conserved.checking.random_rounding import rounding_spread
from conserved.checking.reference_form import FunctionForm, outputs_agree
from conserved.checking.scaled_pass import sampled_pass
from conserved.inference.probing.noise import by_row, measure_output_noise, rms, step_of, wide
from conserved.tolerances import USEFUL_SHARE, USEFUL_SHARE_OF_SUMS

_FINE = 2.0**-20
"""A rounding below which four points can be near each other and random output gradients see enough."""

_LENGTHS = 1.0, 2.0**-7
"""Distances of the points: nearer ones where a function bends within a step, as a norm of a constant row does."""

_COARSE_LENGTHS = 1.0, 2.0**-2, 2.0**-4
"""The same in half precision, where the last is about one spacing of the inputs."""

_SMALL = ("tiny", "of all sizes", "rows of all sizes")
"""Kinds of input with numbers near the smallest ones of float16."""

_SURE = 0.01
"""The relative error of a derivative by which a function has one: a logarithm at zero changes by more."""

_ADDED = 0.25
"""The share of a discrepancy by which derivatives along parts of a direction may miss their sum."""

_KINK = 0.01
"""The share of a discrepancy from which on an error of one part's derivative counts as a kink."""

_CONFIRMED = 0.125
"""How much shorter the line is along which a failure must show again."""

_LARGER = 1 + 2.0**-5
"""The factor of inputs at which a failure must show again: two to four spacings of bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """A kind of input: its name, and the inputs in the precision of the given form."""

    name: str
    values: tuple[Tensor, ...]


def regimes(setting: Setting) -> Iterator[Regime]:
    """Yield every kind of input that differs from the one that was given."""
    values = setting.function.values
    generator = torch.Generator().manual_seed(setting.seed + 41)
    kinds = {
        "wide": lambda x: 3 * x,
        "large": lambda x: 8 * x,
        "tiny": lambda x: 2.0**-8 * x,
        "of all sizes": lambda x: x * torch.exp2(torch.randint(-10, 4, x.shape, generator=generator).to(x)),
        "rows of all sizes": lambda x: _make_rows_of_all_sizes(x, generator),
        "sparse": lambda x: _make_sparse(x, generator),
        "one zero in each row": _make_one_zero,
        "sorted": lambda x: x.sort(-1).values if x.ndim else x,
        "one-hot": _make_one_hot,
        "constant": lambda x: x.select(-1, 0).unsqueeze(-1).expand_as(x).contiguous() if x.ndim else x,
        "far from zero": lambda x: x + 8 * rms(x),
        "saturated": lambda x: 24 * x,
    }
    for name, change in kinds.items():
        changed = tuple(change(wide(value)).to(value.dtype) for value in values)
        if any(not torch.equal(new, value) for new, value in zip(changed, values, strict=True)):
            yield Regime(name=name, values=changed)
    alike = tuple(next(first for first in values if _interchangeable(first, value)) for value in values)
    if any(new is not value for new, value in zip(alike, values, strict=True)):
        yield Regime(name="equal", values=alike)


def _interchangeable(first: Tensor, value: Tensor) -> bool:
    return first.shape == value.shape and first.dtype == value.dtype


def _make_rows_of_all_sizes(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return rows between 2⁻⁸ and 2³ times as large."""
    if not x.ndim:
        return x
    return x * torch.exp2(torch.randint(-8, 4, (*x.shape[:-1], 1), generator=generator).to(x))


def _make_sparse(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return one entry in eight, and the first of each row, so that no row is empty; zeros elsewhere."""
    mask = torch.rand(x.shape, generator=generator).to(x.device) < 1 / 8
    if x.ndim:
        mask[..., 0] = True
    # A product would leave negative zeros, whose sign flips along a line.
    return torch.where(mask, x, 0.0)


def _make_one_zero(x: Tensor) -> Tensor:
    """Return rows in which the entry nearest to zero is zero, so that products of a row are."""
    if not x.ndim:
        return x
    return torch.where(x.abs() == x.abs().min(-1, keepdim=True).values, 0.0, x)


def _make_one_hot(x: Tensor) -> Tensor:
    """Return inputs one entry of each row of which is a thousand times the others."""
    if not x.ndim:
        return x
    first = x.abs().max(-1, keepdim=True).values
    return torch.where(x.abs() == first, 8 * x, 2.0**-7 * x)


def _output_gradients(outs: Sequence[Tensor], seed: int, unit: float) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield output gradients to try: random ones, and random ones over the size of each output.

    Their significands have four bits, so that 11/8 of them is exact in every precision. An output far below the others
    may be a difference of numbers of their size (a loss where p is near one); in fine precision it counts as large as a
    thousand of their roundings.
    """
    smallest = max(2.0**-20, 2.0**10 * unit) if unit < _FINE else 2.0**-20
    generator = torch.Generator().manual_seed(seed + 43)
    plain, inverse = [], []
    for out in outs:
        signs = torch.randint(0, 2, out.shape, generator=generator).to(out.device).double() * 2 - 1
        size = torch.randint(8, 16, out.shape, generator=generator).to(out.device).double() / 8
        plain.append((signs * size).to(out.dtype))
        floor = max(rms(out), 1e-30) * smallest
        small = torch.exp2(-wide(out).abs().clamp_min(floor).log2().round())
        reach = torch.finfo(out.dtype).max ** 0.25
        inverse.append((signs * size * small.clamp(max=reach)).to(out.dtype))
    yield "", plain
    yield " and output gradients of inverse size", inverse


def regime_tests(
    setting: Setting, given: Setting, form: FunctionForm | None
) -> tuple[list[GradientTest], list[GradientTest], list[str]]:
    """Test gradients at every kind of input; then the given form against the reference form there, where there is one.

    Args:
        setting: the form whose gradients are tested.
        given: the form that was given.
        form: the reference form, where `setting` is a pass of it.

    Returns:
        The tests of gradients, those of the given form, and a note on the kinds of input that could not be tested.
    """
    tests: list[GradientTest] = []
    agreed: list[GradientTest] = []
    skipped: list[str] = []
    for regime in regimes(given):
        if setting.late:
            skipped.append(regime.name)
            continue
        try:
            made = list(_test_regime(setting, given, form, regime))
        except REFUSALS:  # a kernel may refuse inputs in any way it likes
            made = []
        if not made:
            skipped.append(regime.name)
        tests += [test for test in made if test.method is Method.DERIVATIVE]
        agreed += [test for test in made if test.method is not Method.DERIVATIVE]
    tests += _inverse_at_given(setting)
    note = f"inputs of these kinds could not be tested (refused, not finite, or too noisy): {', '.join(skipped)}."
    return tests, agreed, [note] if skipped else []


def _inverse_at_given(setting: Setting) -> list[GradientTest]:
    """Return the inputs that were given, with output gradients of inverse size."""
    try:
        noise = setting.noise.outs
        choices = list(_output_gradients(setting.outs, setting.seed, setting.noise.unit))[1:]
        return list(_gradients_of(setting, setting.function.values, setting.outs, noise, choices, "the given"))
    except REFUSALS:
        return []


def _test_regime(setting: Setting, given: Setting, form: FunctionForm | None, regime: Regime) -> Iterator[GradientTest]:
    function = setting.function
    values = tuple(value.to(like.dtype) for value, like in zip(regime.values, function.values, strict=True))
    outs = function.outputs(values)
    # Products of tiny numbers leave the range of float16.
    if function.precision == torch.float16 and regime.name in _SMALL:
        return
    if not all(bool(torch.isfinite(out).all()) for out in outs):
        return
    # A function of float64 that computes in float32 does not see steps of float64.
    step = max(step_of(function), 32 * setting.noise.unit if setting.noise.unit < _FINE else 0.0)
    noise = measure_output_noise(function, values, step, entrywise=setting.noise.unit >= _FINE)
    choices = list(_output_gradients(outs, setting.seed, setting.noise.unit))
    yield from _gradients_of(setting, values, outs, noise, choices, regime.name)
    if form is not None:
        gradients = [v.to(out.dtype) for v, out in zip(choices[0][1], given.outs, strict=True)]
        own = given.function.outputs(regime.values)
        tiny = given.function.precision == torch.float16 and regime.name in _SMALL
        finite = all(bool(torch.isfinite(out).all()) for out in own)
        if not tiny and finite and _same_outputs(given, regime.values, own, outs):
            yield from agreement_tests(given, form, regime.values, gradients, at=f" at {regime.name} inputs")


def _same_outputs(given: Setting, values: Sequence[Tensor], own: Sequence[Tensor], outs: Sequence[Tensor]) -> bool:
    """Return whether both forms compute the same outputs at inputs of another kind, up to rounding.

    Where they do not they are two functions there, with two gradients: the default ε of a norm depends on the
    precision, and a comparison with a threshold may be decided otherwise.
    """
    noise = measure_output_noise(given.function, values, step_of(given.function))
    there = replace(given, outs=tuple(own), noise=replace(given.noise, outs=noise))
    return outputs_agree(there, outs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """A backward pass: its output gradients in words and numbers, gradients, their deviations, a known bias."""

    words: str
    gradients: Sequence[Tensor]
    grads: tuple[Tensor | None, ...]
    deviations: Sequence[Tensor | None]
    bias: float = 0.0
    matched: bool = False
    """Whether the output gradients were chosen for one line, and with `relative`, for relative changes of outputs."""
    relative: bool = False

    @property
    def useful(self) -> float:
        return USEFUL_SHARE_OF_SUMS if self.matched else USEFUL_SHARE

    @property
    def finite(self) -> bool:
        return all(grad is None or bool(torch.isfinite(grad).all()) for grad in self.grads)


def _gradients_of(
    setting: Setting,
    values: Sequence[Tensor],
    outs: Sequence[Tensor],
    noise: Sequence[Tensor],
    choices: Sequence[tuple[str, list[Tensor]]],
    name: str,
) -> Iterator[GradientTest]:
    """Compare gradients along two lines that move every input, and along lines of single inputs where these fail."""
    passes = [_run_pass(setting, values, gradients, words) for words, gradients in choices]
    yield from _not_finite(setting, values, outs, noise, passes[0], name)
    if setting.noise.unit >= _FINE and _bends_within_a_spacing(setting, values, passes[0]):
        return
    for number in range(2):
        for shorter in _LENGTHS if setting.noise.unit < _FINE else _COARSE_LENGTHS:
            moved = [
                shorter * _random_direction(value, setting.seed + 97 * number + index)
                for index, value in enumerate(values)
            ]
            line = line_through(setting.function, values, moved, noise, outs)
            if line is None:
                continue
            every = [*passes, *_match_output_gradients(setting, values, outs, line)]
            useful = 0
            for each in every:
                if not each.finite:
                    continue
                gap = _gap_of_pass(setting, line, each)
                if not _is_useful(gap, each):
                    continue
                useful += 1
                what = f"derivative along a random direction at {name} inputs{each.words}"
                if gap.worst <= 1:
                    yield _make_test(tuple(setting.function.names), what, gap)
                    continue
                if not _persists(setting, values, noise, each, shorter, number):
                    continue
                if _rounding_explains(setting, values, outs, noise, moved, each):
                    continue
                blamed = list(_blamed(setting, values, outs, noise, moved, each, what))
                yield from blamed or [_make_test(tuple(setting.function.names), what, gap)]
            if useful == len(every):
                break


def _not_finite(
    setting: Setting,
    values: Sequence[Tensor],
    outs: Sequence[Tensor],
    noise: Sequence[Tensor],
    first: _Pass,
    name: str,
) -> Iterator[GradientTest]:
    """Yield a failure for entries of a gradient that are not finite where the function has a derivative.

    It has one if both sides agree. A root at zero has none: outputs are not finite on one side, or their differences
    do not converge.
    """
    for index, grad in enumerate(first.grads):
        if grad is None or bool(torch.isfinite(grad).all()):
            continue
        moved: list[Tensor | None] = [None] * len(values)
        moved[index] = torch.where(torch.isfinite(grad), 0.0, _random_direction(values[index], setting.seed + index))
        line = line_through(setting.function, values, moved, noise, outs)
        if line is None:
            continue
        zeros = [None if each is None else torch.zeros_like(each) for each in first.grads]
        gap = derivative_gap(line, first.gradients, zeros, zeros, setting.noise.unit)
        if gap.converged and gap.error <= _SURE * abs(gap.measured):
            yield GradientTest(
                gradients=(setting.function.names[index],),
                method=Method.DERIVATIVE,
                what=f"a finite gradient where the function has a derivative, at {name} inputs",
                residual=float("inf"),
                limit=_SURE,
                worst=float("inf"),
                where=f"{int((~torch.isfinite(grad)).sum()):,} of {grad.numel():,} entries",
                meaning="the gradient is not finite where the function has a derivative: a division by an input or by "
                "an output that is zero",
            )


def _bends_within_a_spacing(setting: Setting, values: Sequence[Tensor], first: _Pass) -> bool:
    """Return whether gradients change by half when inputs move by one spacing of their precision.

    No two points are near enough then to measure a derivative: a norm of a constant row divides by √ε.
    """
    moved = [
        (x + torch.sign(_random_direction(value, setting.seed + index)) * torch.finfo(value.dtype).eps * x.abs()).to(
            value.dtype
        )
        for index, value in enumerate(values)
        for x in (wide(value),)
    ]
    grads = setting.function.gradients(moved, first.gradients)[1]
    return any(
        before is not None and after is not None and rms(wide(after) - wide(before)) > 0.5 * rms(before)
        for before, after in zip(first.grads, grads, strict=True)
    )


def _persists(
    setting: Setting,
    values: Sequence[Tensor],
    noise: Sequence[Tensor],
    each: _Pass,
    shorter: float,
    number: int,
) -> bool:
    """Whether a gradient that fails also fails along another line, and in fine precision over a shorter distance.

    Errors of several kinks between the points can cancel in both differences that show them; along another line they
    do not, and a wrong gradient is wrong there too. The line goes through slightly larger inputs of the same kind,
    where everything is rounded again: a difference of numbers near one, such as 1 − p, is off by the same amount in
    every pass at one point.
    """
    values = [(wide(value) * _LARGER).to(value.dtype) for value in values]
    outs = setting.function.outputs(values)
    length = shorter * (_CONFIRMED if setting.noise.unit < _FINE else 1.0)
    seed = setting.seed + 1009 + 97 * number
    moved = [length * _random_direction(value, seed + index) for index, value in enumerate(values)]
    if setting.noise.unit >= _FINE:
        # Entries stay on their side of zero, where a root or an absolute value has its kink.
        moved = [
            torch.where(wide(value) != 0, torch.sign(along) * torch.minimum(along.abs(), wide(value).abs()), along)
            for value, along in zip(values, moved, strict=True)
        ]
    line = line_through(setting.function, values, moved, noise, outs)
    if line is None:
        return False
    if each.matched:
        # Along another line another output gradient shows the change best.
        each = _make_matched_pass(setting, values, outs, line, relative=each.relative)
    else:
        each = _run_pass(setting, values, each.gradients, each.words)
    gap = _gap_of_pass(setting, line, each)
    wrong = each.finite and _is_useful(gap, each) and gap.worst > 1
    return wrong and _derivatives_add_up(setting, values, noise, moved, each, gap)


def _rounding_explains(
    setting: Setting,
    values: Sequence[Tensor],
    outs: Sequence[Tensor],
    noise: Sequence[Tensor],
    moved: Sequence[Tensor],
    each: _Pass,
) -> bool:
    """Return whether a derivative no longer fails when rounding of every intermediate result counts as noise.

    A function that casts inside is a staircase: outputs that stay on one step show no noise.
    """
    function = setting.function
    spread = rounding_spread(function, values, each.gradients, setting.noise.unit)
    larger = [torch.maximum(before, more) for before, more in zip(noise, spread.outs, strict=True)]
    line = line_through(function, values, moved, larger, outs)
    if line is None:
        return True
    deviations = [
        deviation if before is None else torch.maximum(before, deviation)
        for before, deviation in zip(each.deviations, spread.grads, strict=True)
    ]
    gap = _gap_of_pass(setting, line, replace(each, deviations=deviations))
    return not _is_useful(gap, each) or gap.worst <= 1


def _derivatives_add_up(
    setting: Setting,
    values: Sequence[Tensor],
    noise: Sequence[Tensor],
    moved: Sequence[Tensor],
    each: _Pass,
    gap: DerivativeGap,
) -> bool:
    """Return whether derivatives along two parts of a direction add up to the one along it, as far as they are known.

    The median of equal numbers has a derivative along every line, the same to both sides, and is not differentiable
    there: derivatives do not add up, and no gradient is right.
    """
    discrepancy = abs(gap.measured - gap.expected)
    masks = []
    for index, along in enumerate(moved):
        generator = torch.Generator(along.device).manual_seed(setting.seed + 401 + index)
        drawn = torch.randint(2, along.shape, generator=generator, device=along.device).to(along)
        # Two scalars must not fall into the same part.
        masks.append(drawn if along.numel() > 1 else torch.full_like(along, index % 2))
    total = 0.0
    for first in (True, False):
        parts = [(m if first else 1 - m) * along for m, along in zip(masks, moved, strict=True)]
        line = line_through(setting.function, values, parts, noise)
        if line is None:
            return True
        part = _gap_of_pass(setting, line, each)
        # A kink along a part shows as an error of its derivative that the whole line does not have.
        if not part.converged or part.error > 4 * gap.error + _KINK * discrepancy:
            return False
        total += part.measured
    return abs(total - gap.measured) <= _ADDED * discrepancy


def _is_useful(gap: DerivativeGap, each: _Pass) -> bool:
    """Return whether the limit of a derivative is small enough for a test; a limit of NaN never is."""
    return gap.scale > 0 and gap.converged and gap.limit <= each.useful * gap.scale


def _gap_of_pass(setting: Setting, line: Line, each: _Pass) -> DerivativeGap:
    gap = derivative_gap(line, each.gradients, each.grads, each.deviations, setting.noise.unit)
    return replace(gap, limit=gap.limit + each.bias, error=gap.error + each.bias)


def _match_output_gradients(
    setting: Setting, values: Sequence[Tensor], outs: Sequence[Tensor], line: Line
) -> Iterator[_Pass]:
    """Yield passes from the output gradients that fit a line, where random ones are too coarse."""
    if setting.noise.unit < _FINE:
        return
    for relative in (False, True):
        yield _make_matched_pass(setting, values, outs, line, relative=relative)


def _make_matched_pass(
    setting: Setting, values: Sequence[Tensor], outs: Sequence[Tensor], line: Line, *, relative: bool
) -> _Pass:
    gradients, bias = matched_derivatives(line, outs, relative=relative)
    words = " and output gradients along its change" + (", relative to the outputs" if relative else "")
    return replace(_run_pass(setting, values, gradients, words), bias=bias, matched=True, relative=relative)


def _run_pass(setting: Setting, values: Sequence[Tensor], gradients: Sequence[Tensor], words: str) -> _Pass:
    made = sampled_pass(setting.function, values, gradients)
    return _Pass(words=words, gradients=gradients, grads=made.grads, deviations=made.deviations)


def _blamed(
    setting: Setting,
    values: Sequence[Tensor],
    outs: Sequence[Tensor],
    noise: Sequence[Tensor],
    moved: Sequence[Tensor],
    each: _Pass,
    what: str,
) -> Iterator[GradientTest]:
    """Yield the inputs whose own gradient fails."""
    for index, input_name in enumerate(setting.function.names):
        alone = [along if other == index else None for other, along in enumerate(moved)]
        line = line_through(setting.function, values, alone, noise, outs)
        if line is None or each.grads[index] is None:
            continue
        gap = _gap_of_pass(setting, line, each)
        if _is_useful(gap, each) and gap.worst > 1:
            yield _make_test((input_name,), what, gap)


def _make_test(names: tuple[str, ...], what: str, gap: DerivativeGap) -> GradientTest:
    test = GradientTest(
        gradients=names,
        method=Method.DERIVATIVE,
        what=what,
        residual=abs(gap.measured - gap.expected) / gap.scale,
        limit=gap.limit / gap.scale,
        worst=gap.worst,
    )
    if test.ok:
        return test
    kind = what.partition(" at ")[2]
    return replace(test, where="somewhere", meaning=f"the gradient is wrong for {kind}: a tail, a clamp or a branch")


def _random_direction(value: Tensor, seed: int) -> Tensor:
    """Return random signs, each times the size of its entry or a part of the size of its row."""
    x = wide(value)
    generator = torch.Generator(x.device).manual_seed(seed + 211)
    signs = torch.randint(2, x.shape, generator=generator, device=x.device).double() * 2 - 1
    size = by_row(x.square()).sqrt().expand_as(x)
    return signs * x.abs().clamp_min(2.0**-4 * size).clamp_min(2.0**-8 * (rms(x) or 1.0))
