"""Relations that a right backward obeys whatever the function; which of them apply is found out on the forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from conserved.checking.comparing import REFUSALS, backward_pass, compare, short
from conserved.checking.dependence import Cut, cuts_of, is_same
from conserved.checking.gradient_test import GradientTest, Method
from conserved.checking.line_derivatives import has_derivative
from conserved.checking.part_relations import test_parts_alone, test_reordered_parts, test_reordered_sums
from conserved.checking.pass_under_test import Setting
from conserved.inference.probing.noise import measure_noise, rms, wide
from conserved.inference.probing.numerical_function import copy_tensor, reseed
from conserved.tolerances import AS_INTENDED

_COARSE = 64.0
"""How many times the relative noise of the outputs, times its own sensitivity, the noise of a gradient may be."""

_LARGEST_RESPONSE = 1e4
"""The relative change of a gradient per relative change of its inputs that a form for reference may have."""

_UNTIED = 2.0**-10
"""The share of itself by which an entry moves so that it is equal to no other."""

_POWERS = {torch.float16: (4, -4), torch.bfloat16: (12, -12), torch.float32: (12, -12), torch.float64: (12, -12)}
"""Powers of two by which output gradients are multiplied, which is exact: loss scaling, and losses that are tiny."""

_MOST_OUTPUTS = 8
"""Outputs that are used alone, one after the other; a function that returns a list may have hundreds."""

TestedRelation = Callable[[Setting], Iterator[GradientTest | str]]


def relation_tests(setting: Setting, *, layout: bool = False) -> tuple[list[GradientTest], list[str]]:
    """Return every relation that the forward allows, tested; and what was not tested, with the reason.

    Args:
        setting: the pass under test.
        layout: test only what depends on how tensors lie in memory, on the order of passes and on the compiler. That is
            all that is left to test where a more precise form of the function was tested.
    """
    tests: list[GradientTest] = []
    skipped: list[str] = []
    cuts: list[Cut] = []
    in_memory: list[TestedRelation] = [
        _test_repetition,
        _test_linearity,
        _test_later_draws,
        _test_call_in_between,
        _test_transposed_output_gradients,
        _test_expanded_output_gradients,
        _test_special_output_gradients,
        _test_unused_outputs,
    ]
    uncompiled: list[TestedRelation] = [_test_each_gradient_alone, _test_strided_inputs]
    by_parts: list[TestedRelation] = [
        lambda chosen: test_parts_alone(chosen, cuts),
        lambda chosen: test_reordered_parts(chosen, cuts),
    ]
    # A compiled function would be compiled again for every other shape and stride.
    families = (
        in_memory + ([] if setting.function.eager is not None else uncompiled) + [_test_accumulation, _test_compiled]
    )
    if not layout:
        families += [_test_noise, _test_each_output, *by_parts, test_reordered_sums]
    for family in families:
        if setting.late:
            skipped.append("relations were cut short: the time allowed was used up")
            break
        if not cuts and family is by_parts[0]:
            cuts += cuts_of(setting)
        try:
            for result in family(setting):
                if isinstance(result, str):
                    skipped.append(result)
                else:
                    tests.append(result)
        except REFUSALS as problem:
            description = (family.__doc__ or "a relation").strip().rstrip(".")
            skipped.append(f"not tested, the backward raises ({short(problem)}): {description}")
    return tests, list(dict.fromkeys(skipped))


def _test_repetition(setting: Setting) -> Iterator[GradientTest | str]:
    """Test that the same pass gives the same gradients again."""
    for _ in range(2):
        yield from compare(
            setting,
            "the same pass again gives the same gradient",
            backward_pass(setting),
            setting.grads,
            meaning="the gradient changes from run to run: a race, memory never written, or randomness",
        )


def _test_noise(setting: Setting) -> Iterator[GradientTest | str]:
    """Test that gradients are no noisier than the noise of the outputs explains."""
    for index, name in enumerate(setting.function.names):
        if setting.grads[index] is None:
            continue
        noise = setting.noise.relative[index]
        # In a form more precise than the given one, rounding of the given precision is as intended.
        # There the points are so near that a gradient that jumps seems to answer to them without bound.
        response = min(setting.noise.response[index], _LARGEST_RESPONSE if setting.coarsest else float("inf"))
        limit = max(_COARSE * setting.noise.unit * response, AS_INTENDED * setting.coarsest)
        # A kink of the function between the points looks like noise; on other, shorter lines it is not met again.
        # Inputs of half precision have ties, which every line through them breaks: they are broken before.
        untied = replace(setting.function, values=tuple(_break_ties(value) for value in setting.function.values))
        for seed, function in ((29, setting.function), (31, setting.function), (37, untied)):
            if noise > limit:
                again = measure_noise(function, setting.gradients, seed=seed, shorter=16.0)
                noise = min(noise, again.relative[index])
        if noise > limit:
            spread = setting.rounding.grads[index]
            explained = rms(spread.expand_as(setting.function.values[index])) / (rms(setting.grads[index]) or 1.0)  # type: ignore[arg-type]
            if explained > noise / AS_INTENDED:
                yield f"d{name} is rounding of larger terms: how finely it is computed was not tested"
                continue
        worst = noise / limit
        yield GradientTest(
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


def _break_ties(value: Tensor) -> Tensor:
    """Return the input with every entry moved by another small share of itself, where its precision shows that."""
    generator = torch.Generator(value.device).manual_seed(value.numel())
    share = torch.rand(value.shape, generator=generator, device=value.device, dtype=torch.float64) - 0.5
    return (wide(value) * (1 + _UNTIED * share)).to(value.dtype)


def _test_linearity(setting: Setting) -> Iterator[GradientTest | str]:
    """Test that gradients are linear in the output gradient: at zero, at four times it, and at a sum of two."""
    zero = backward_pass(setting, gradients=[torch.zeros_like(gradient) for gradient in setting.gradients])
    nothing = [None if grad is None else torch.zeros_like(grad) for grad in setting.grads]
    yield from compare(setting, "a zero output gradient gives a zero gradient", zero, nothing, exactly=True)
    quarter = backward_pass(setting, gradients=[gradient / 4 for gradient in setting.gradients])
    expected = [None if grad is None else grad / 4 for grad in setting.grads]
    yield from compare(
        setting,
        "a quarter of the output gradient gives a quarter of the gradient",
        quarter,
        expected,
        meaning="the backward is not linear in the output gradient: it is ignored, applied twice, or a state is kept",
    )
    for power in _POWERS[setting.function.precision]:
        scaled = backward_pass(setting, gradients=[gradient * 2.0**power for gradient in setting.gradients])
        if all(grad is None or bool(torch.isfinite(grad).all()) for grad in scaled):
            yield from compare(
                setting,
                f"2^{power} times the output gradient gives 2^{power} times the gradient",
                [None if grad is None else wide(grad) * 2.0**-power for grad in scaled],
                setting.grads,
                meaning="the backward is not linear in the output gradient: it is clipped, or rounded to zero",
            )
    generator = torch.Generator(setting.gradients[0].device).manual_seed(setting.seed + 5)
    halves = []
    for gradient in setting.gradients:
        mask = torch.randint(2, gradient.shape, generator=generator, device=gradient.device).to(gradient.dtype)
        halves.append((gradient * mask, gradient * (1 - mask)))
    first = backward_pass(setting, gradients=[pair[0] for pair in halves])
    other = backward_pass(setting, gradients=[pair[1] for pair in halves])
    total = [None if a is None or b is None else wide(a) + wide(b) for a, b in zip(first, other, strict=True)]
    yield from compare(
        setting,
        "the gradients of two parts of the output gradient add up",
        total,
        setting.grads,
        noise=[None if deviation is None else 2 * deviation for deviation in setting.noise.grads],
        meaning="the backward is not linear in the output gradient",
    )


def _test_each_output(setting: Setting) -> Iterator[GradientTest | str]:
    """Test that the gradients of the outputs, taken one by one, add up to the gradients of all."""
    if len(setting.gradients) < 2:
        return
    function = setting.function
    parts = []
    for number, output in enumerate(function.out_names):
        only = [
            gradient if index == number else torch.zeros_like(gradient)
            for index, gradient in enumerate(setting.gradients)
        ]
        parts.append(backward_pass(setting, gradients=only))
        for index, name in enumerate(function.names):
            grad = parts[-1][index]
            if setting.grads[index] is None:
                continue
            if grad is None or not bool(grad.any()):
                yield _test_ignored_output(setting, number, index, name, output)
    sums = [
        None if any(part is None for part in every) else sum(wide(part) for part in every)
        for every in zip(*parts, strict=True)
    ]
    yield from compare(setting, "the gradients of the single outputs add up", sums, setting.grads)  # type: ignore[arg-type]


def _test_unused_outputs(setting: Setting) -> Iterator[GradientTest | str]:
    """Test that an output gradient of None, which autograd passes for an unused output, acts as zeros."""
    names = setting.function.out_names
    if len(names) < 2:
        return
    for number in range(min(len(names), _MOST_OUTPUTS)):
        alone = [gradient if index == number else None for index, gradient in enumerate(setting.gradients)]
        zeros = [
            gradient if chosen is not None else torch.zeros_like(gradient)
            for gradient, chosen in zip(setting.gradients, alone, strict=True)
        ]
        yield from compare(
            setting,
            f"a loss of {names[number]} alone gives the gradient of one that counts the other outputs zero times",
            backward_pass(setting, gradients=alone),
            backward_pass(setting, gradients=zeros),
            meaning=f"the gradient of {names[number]} is lost or changed where no other output is used",
        )


def _test_ignored_output(setting: Setting, number: int, index: int, name: str, output: str) -> GradientTest:
    """Return whether an output that gives an input no gradient has a derivative by it."""
    moves = has_derivative(setting.function, index, setting.seed)
    needed = moves is not None and moves[number]
    return GradientTest(
        gradients=(name,),
        method=Method.PRESENCE,
        what=f"the gradient of {output} reaches {name} where {output} depends on it",
        residual=float(needed),
        limit=0.0,
        worst=float("inf") if needed else 0.0,
        where="everywhere" if needed else "",
        meaning=f"the backward ignores the gradient of {output}" if needed else "",
    )


def _test_later_draws(setting: Setting) -> Iterator[GradientTest | str]:
    """Test that random numbers drawn between forward and backward do not change the gradients."""
    function = setting.function
    leaves = [copy_tensor(value).requires_grad_() for value in function.values]
    with torch.enable_grad():
        outs = function._ran([leaf.clone() for leaf in leaves] if function.copying else leaves)
        reseed(function.seed + 1)
        live = [
            (outs[index], gradient) for index, gradient in zip(function.differentiable, setting.gradients, strict=True)
        ]
        grads = torch.autograd.grad(
            [out for out, _ in live], leaves, [gradient.clone() for _, gradient in live], allow_unused=True
        )
    yield from compare(
        setting,
        "random numbers drawn after the forward do not change the gradient",
        grads,
        setting.grads,
        meaning="the backward draws random numbers of its own: the mask of a dropout must be the forward's, kept or "
        "drawn again from the same state",
    )


def _test_call_in_between(setting: Setting) -> Iterator[GradientTest | str]:
    """Test that another call between forward and backward does not change the gradient."""
    function = setting.function
    leaves = [copy_tensor(value).requires_grad_() for value in function.values]
    with torch.enable_grad():
        outs = function._ran([leaf.clone() for leaf in leaves] if function.copying else leaves)
        function.outputs([value / 2 for value in function.values])
        grads = torch.autograd.grad(
            [outs[index] for index in function.differentiable],
            leaves,
            [gradient.clone() for gradient in setting.gradients],
            allow_unused=True,
        )
    yield from compare(
        setting,
        "a call with other inputs between forward and backward does not change the gradient",
        grads,
        setting.grads,
        meaning="the backward reads what the last forward left behind: inputs must be saved with each call, not in the "
        "function",
    )


_SPARSE = 16
"""One in so many entries of a sparse output gradient is not zero."""


def _test_special_output_gradients(setting: Setting) -> Iterator[GradientTest | str]:
    """Test that output gradients that are constant or mostly zero add up with others."""
    generator = torch.Generator(setting.gradients[0].device).manual_seed(setting.seed + 6)
    constant, sparse = [], []
    for gradient in setting.gradients:
        # Small whole numbers and their sums are exact in every precision.
        whole = torch.randint(2, 5, gradient.shape, generator=generator, device=gradient.device).to(gradient.dtype)
        constant.append((torch.ones_like(gradient), whole))
        mask = torch.randint(_SPARSE, gradient.shape, generator=generator, device=gradient.device) == 0
        sparse.append((torch.where(mask, gradient, 0), torch.where(mask, 0, gradient)))
    for words, pairs in (("of ones", constant), ("of mostly zeros", sparse)):
        parts = [backward_pass(setting, gradients=[pair[which] for pair in pairs]) for which in (0, 1)]
        together = backward_pass(setting, gradients=[a + b for a, b in pairs])
        # The whole numbers are up to five times as large as the output gradients whose noise is known.
        factor = 10 if pairs is constant else 2
        yield from compare(
            setting,
            f"the gradients of an output gradient {words} and of another one add up",
            [None if a is None or b is None else wide(a) + wide(b) for a, b in zip(*parts, strict=True)],
            together,
            noise=[None if deviation is None else factor * deviation for deviation in setting.noise.grads],
            meaning=f"the backward is not linear in the output gradient: one {words} is taken for another",
        )


def _test_transposed_output_gradients(setting: Setting) -> Iterator[GradientTest | str]:
    """Test that gradients do not depend on the strides of the output gradient."""
    if any(gradient.ndim >= 2 for gradient in setting.gradients):
        turned = [
            gradient.transpose(-1, -2).contiguous().transpose(-1, -2) if gradient.ndim >= 2 else gradient
            for gradient in setting.gradients
        ]
        yield from compare(
            setting,
            "a transposed output gradient gives the same gradient",
            backward_pass(setting, gradients=turned),
            setting.grads,
            other_kernel=True,
            meaning="the strides of the output gradient are not read",
        )


def _test_expanded_output_gradients(setting: Setting) -> Iterator[GradientTest | str]:
    """Test an expanded output gradient, as the sum of an output passes it: one number for all entries."""
    if any(gradient.ndim for gradient in setting.gradients):
        ones = [
            torch.ones((), device=gradient.device, dtype=gradient.dtype).expand(gradient.shape)
            for gradient in setting.gradients
        ]
        expanded = backward_pass(setting, gradients=ones)
        plain = backward_pass(setting, gradients=[item.contiguous() for item in ones])
        yield from compare(
            setting,
            "the output gradient of a sum (stride 0) gives the same gradient as a full one",
            expanded,
            plain,
            meaning="the strides of the output gradient are not read: out.sum().backward() is wrong",
        )


def _test_each_gradient_alone(setting: Setting) -> Iterator[GradientTest | str]:
    """Test that a gradient does not depend on the other gradients that are computed with it."""
    if len(setting.function.names) < 2:
        return
    for index in range(len(setting.function.names)):
        if setting.grads[index] is None or setting.late:
            continue
        try:
            alone = backward_pass(setting, wanted=[index])
        except REFUSALS as problem:
            name = setting.function.names[index]
            yield f"d{name} alone was not tested: the backward raises ({short(problem)})"
            continue
        yield from compare(
            setting,
            "asked for alone, the gradient is the same",
            alone,
            setting.grads,
            indices=[index],
            meaning="the backward depends on which inputs require a gradient",
        )


def _test_strided_inputs(setting: Setting) -> Iterator[GradientTest | str]:
    """Test that gradients do not depend on the strides of the inputs."""
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
        except REFUSALS as problem:
            yield f"{way} inputs were not tested: the function refuses them ({short(problem)})"
            continue
        if not _same_outputs(setting, outs):
            yield f"{way} inputs were not tested: the forward itself gives another result for them"
            continue
        try:
            grads = backward_pass(setting, values=values)
        except REFUSALS as problem:
            yield f"{way} inputs: the forward accepts them, the backward raises ({short(problem)})"
            continue
        yield from compare(
            setting,
            f"{way} (not contiguous) inputs give the same gradient",
            grads,
            setting.grads,
            other_kernel=True,
            meaning="strides of the inputs are not read, or those of one tensor are used for another",
        )


def _test_accumulation(setting: Setting) -> Iterator[GradientTest | str]:
    """Test that two backward passes add up in `.grad`, and that the first tensor there is not written to."""
    function = setting.function
    if function.copying:
        return
    leaves = [value.detach().clone().requires_grad_() for value in function.values]
    before = [leaf.detach().clone() for leaf in leaves]
    for leaf, start in zip(leaves, before, strict=True):
        leaf.grad = start.clone()
    with torch.enable_grad():
        outs = function._ran(leaves)
        chosen = [outs[index] for index in function.differentiable]
        torch.autograd.backward(chosen, [gradient.clone() for gradient in setting.gradients])
    accumulated: list[Tensor | None] = []
    expected: list[Tensor | None] = []
    for index, leaf in enumerate(leaves):
        grad = setting.grads[index]
        assert leaf.grad is not None
        accumulated.append(None if grad is None else wide(leaf.grad) - wide(before[index]))
        expected.append(grad)
    extra: list[Tensor | None] = []
    for index, deviation in enumerate(setting.noise.grads):
        size = wide(before[index]).abs() + (0 if setting.grads[index] is None else wide(setting.grads[index]).abs())  # type: ignore[arg-type]
        extra.append(None if deviation is None else deviation + 4 * setting.noise.unit * size)
    yield from compare(
        setting,
        "the gradient is added to one that is there already",
        accumulated,
        expected,
        noise=extra,
        meaning="the backward writes into a gradient that it does not own",
    )


def _test_compiled(setting: Setting) -> Iterator[GradientTest | str]:
    """Test that gradients under torch.compile are the same."""
    if not setting.compiler:
        return
    try:
        function = replace(setting.function, call=torch.compile(setting.function.call, backend=setting.compiler))
        outs, grads = function.gradients(function.values, setting.gradients)
    except REFUSALS as problem:
        yield f"the compiled function was not tested: it raises ({short(problem)})"
        return
    if not _same_outputs(setting, outs):
        yield "the compiled function was not tested: its forward gives another result"
        return
    # Operations that are fused round elsewhere: two noises, not one.
    noise = [None if deviation is None else 2 * deviation for deviation in setting.noise.grads]
    yield from compare(
        setting,
        "under torch.compile the gradient is the same",
        grads,
        setting.grads,
        noise=noise,
        other_kernel=True,
        meaning="the compiled backward is another one: a missing meta or autograd registration, a graph break with "
        "side effects, or a defect of the compiler",
    )


def _same_outputs(setting: Setting, outs: Sequence[Tensor]) -> bool:
    return all(
        is_same(setting, out, before, setting.noise.outs[number])
        for number, (out, before) in enumerate(zip(outs, setting.outs, strict=True))
    )
