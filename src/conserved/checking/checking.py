"""Check a function's backward: no reference, no model, in its own precision and on its own device."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from conserved.checking.block_identities import block_identity_tests
from conserved.checking.check_result import Check
from conserved.checking.directional_tests import directional_tests
from conserved.checking.form_agreement import agreement_tests, lost_to_rounding
from conserved.checking.gradient_test import GradientTest, Method
from conserved.checking.held_inputs import hold_discrete_inputs
from conserved.checking.identity_tests import identity_tests
from conserved.checking.inner_precision import in_inner_precision
from conserved.checking.input_regimes import regime_tests
from conserved.checking.jax_functions import as_tensors, takes_jax_arrays, torch_form
from conserved.checking.line_derivatives import has_derivative, moves_in_steps
from conserved.checking.pass_under_test import Setting
from conserved.checking.presence_tests import presence_tests
from conserved.checking.reference_form import FunctionForm, reference_setting
from conserved.checking.relations import relation_tests
from conserved.checking.rounding_errors import rounding_errors
from conserved.checking.singular_inputs import move_singular_entries
from conserved.inference.probing.noise import measure_noise, rms, wide
from conserved.inference.probing.numerical_function import (
    NumericalFunction,
    UncheckableError,
    device_of,
    function_of,
    repeatable,
)
from conserved.inference.probing.symmetry_search import Probe, probe_function, scanner_of
from conserved.tolerances import AS_INTENDED, NOISE, ROUNDING, UNIT

__all__ = ["check"]

_RANDOM = 1e-3, 64.0
"""A function counts as random if two equal calls differ by more than this share, and than so many roundings."""


def check(
    fn: Callable[..., Any],
    *tensors: Any,
    names: Sequence[str] | None = None,
    seed: int = 0,
    seconds: float = 120.0,
    compiled: bool | str = False,
    grad: Tensor | Sequence[Tensor] | None = None,
    arguments: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> Check:
    """Check whether the backward pass of a function is right, without a reference.

    Symmetries of the forward are found by moving the inputs; each implies an identity that one backward pass is held
    to. Then come relations every right backward obeys, and gradients along chosen directions. Nothing is compared with
    another implementation, and no double precision is needed.

    Args:
        fn: any callable on tensors; of a module, the parameters are inputs too.
        *tensors: its arguments in the precision and on the device it is meant for; integers are held fixed. Arrays of
            JAX make `fn` a function of JAX, whose `jax.vjp` is checked.
        names: names of the floating-point inputs, where the signature has none.
        seed: the seed of all random numbers, including those the function draws: it is set before every call.
        seconds: time after which no further test is started.
        compiled: whether the function under torch.compile is held against itself too; a backend's name, or True for
            "inductor". Compiling takes seconds to minutes.
        grad: the output gradient to start from, of the run whose kernel is looked at, one for each differentiable
            output; by default random. `Check.errors` then has the rounding of the kernel on the run's own tensors.
        arguments: keyword arguments of `fn` whose names this function has too.
        **keywords: keyword arguments of `fn`.

    Returns:
        Every test by gradient, failures with their place and meaning, gradients that could not be tested, and a
        verdict.

    Raises:
        UncheckableError: the function has no gradient to check, or cannot be run twice with the same result.
    """
    start = time.monotonic()
    if takes_jax_arrays(tensors, keywords):
        fn, tensors, keywords, grad = torch_form(fn), as_tensors(tensors), as_tensors(keywords), as_tensors(grad)
    with repeatable(device_of(tensors, keywords)):
        function = function_of(fn, tensors, {**keywords, **(arguments or {})}, names=names, seed=seed)
        compiler = "inductor" if compiled is True else compiled or ""
        chosen = None if grad is None else [grad] if isinstance(grad, Tensor) else list(grad)
        function = move_singular_entries(hold_discrete_inputs(_require_determinism(function)))
        function = _vary_constant_inputs(in_inner_precision(function)) if chosen is None else function
        return _run_check(function, seed, start, start + seconds, compiler, chosen)


def _require_determinism(function: NumericalFunction) -> NumericalFunction:
    """Return the function if two calls with one seed agree; raise UncheckableError otherwise."""
    first, second = (function.outputs(function.values) for _ in range(2))
    for first_value, other in zip(first, second, strict=True):
        if first_value.shape != other.shape:
            raise UncheckableError(
                f"Expected {function.title} to return one shape for the same inputs, got "
                f"{tuple(first_value.shape)} and then {tuple(other.shape)}. Make it deterministic."
            )
        size = rms(first_value) or 1.0
        if rms(wide(first_value) - wide(other)) > max(_RANDOM[0], _RANDOM[1] * UNIT[first_value.dtype]) * size:
            raise UncheckableError(
                f"Expected {function.title} to be deterministic, got results that differ by "
                f"{rms(wide(first_value) - wide(other)) / size:.0%} between two calls from the same seed. Fix its "
                "random numbers, or pass them in."
            )
    return function


def _vary_constant_inputs(function: NumericalFunction) -> NumericalFunction:
    """Return the function at inputs none of which is constant.

    A backward that forgets a gain of one would pass otherwise.
    """
    values = list(function.values)
    drawn = []
    generator = torch.Generator().manual_seed(function.seed + 3)
    for index, value in enumerate(values):
        if value.numel() > 1 and bool((value == value.flatten()[0]).all()):
            noise = torch.rand(value.shape, generator=generator).to(value.device).double() + 0.5
            level = float(value.flatten()[0])
            values[index] = (noise * level if level else 0.5 * (noise - 1)).to(value.dtype)
            drawn.append(function.names[index])
    if not drawn:
        return function
    try:
        outs = function.outputs(values)
    except Exception:  # a kernel may refuse inputs in any way it likes
        return function
    if not all(bool(torch.isfinite(out).all()) for out in outs):
        return function
    note = f"{', '.join(drawn)} had all entries equal, which hides defects: entries were drawn around that value."
    return replace(function, values=tuple(values), notes=(*function.notes, note))


def _gradients_of(function: NumericalFunction, seed: int) -> tuple[Tensor, ...]:
    """Return random output gradients, in half precision of a size that keeps the gradients away from the smallest
    numbers.
    """
    generator = torch.Generator().manual_seed(seed + 11)
    outs = function.outputs(function.values)
    gradients = []
    for out in outs:
        drawn = torch.randn(out.shape, generator=generator)
        if out.numel() == 1:
            drawn = drawn.abs() + 0.5
        gradients.append(drawn.to(out.device, out.dtype))
    if function.precision is torch.float16 or any(out.dtype is torch.float16 for out in outs):
        _, grads = function.gradients(function.values, gradients)
        sizes = [rms(grad) for grad in grads if grad is not None]
        small = min((size for size in sizes if size > 0), default=1.0)
        power = min(max(0, round(-torch.tensor(small).log2().item())), 8)
        gradients = [gradient * 2.0**power for gradient in gradients]
    return tuple(gradients)


def _repetition_tests(given: Setting) -> list[GradientTest]:
    """Test whether the same pass gives the same gradients again, but for the order in which sums are taken.

    Noise that is measured at nearby points has what a race does in it, and would excuse it.
    """
    again = given.function.gradients(given.function.values, given.gradients)[1]
    limit = max(_RANDOM[0], _RANDOM[1] * given.noise.unit)
    tests = []
    for name, first, second in zip(given.function.names, given.grads, again, strict=True):
        if first is None or second is None or not rms(first):
            continue
        residual = rms(wide(first) - wide(second)) / rms(first)
        test = GradientTest(
            gradients=(name,),
            method=Method.RELATION,
            what="the same pass gives the same gradient again",
            residual=residual,
            limit=limit,
            worst=residual / limit,
            meaning=""
            if residual <= limit
            else "the gradient changes from run to run: a race, memory never written, or random numbers",
        )
        tests.append(test)
    return tests


def _setting(function: NumericalFunction, gradients: tuple[Tensor, ...], seed: int, deadline: float) -> Setting:
    """Return one pass of the function with its noise."""
    outs, grads = function.gradients(function.values, gradients)
    noise = measure_noise(function, gradients)
    return Setting(
        function=function,
        gradients=gradients,
        outs=outs,
        grads=grads,
        noise=noise,
        deadline=deadline,
        seed=seed,
        repeats=all(torch.equal(a, b) for a, b in zip(function.outputs(function.values), outs, strict=True)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Suite:
    """The tests of one form of the function; `agreed` are those of the given form against it."""

    probed: Probe
    tests: tuple[GradientTest, ...] = ()
    agreed: tuple[GradientTest, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fails(self) -> bool:
        return any(not test.ok for test in self.tests)


def _suite(setting: Setting, given: Setting, form: FunctionForm | None) -> _Suite:
    """Return identities, relations and gradients of one form, and gradients at inputs of other kinds."""
    function = setting.function
    scanner = scanner_of(function, setting.outs, unit=setting.noise.unit, seconds=_seconds_left(setting))
    setting = replace(setting, responsive=tuple(scanner.responds_to(name) for name in function.names))
    probed = probe_function(function, unit=setting.noise.unit, seconds=0.4 * _seconds_left(setting))
    identities = identity_tests(setting, probed)
    identities += block_identity_tests(setting, probed.symmetries)
    related, skipped = relation_tests(setting)
    directional, noisy = directional_tests(setting)
    tailed, agreed, missed = regime_tests(setting, given, form)
    tests, lost = _without_lost_digits(setting, [*identities, *related, *directional, *tailed])
    short = [] if probed.complete else ["the search for symmetries was cut short: the time allowed was used up"]
    return _Suite(
        probed=probed,
        tests=tuple(tests),
        agreed=tuple(agreed),
        notes=(*skipped, *noisy, *missed, *short, *lost),
    )


def _without_lost_digits(setting: Setting, tests: Sequence[GradientTest]) -> tuple[list[GradientTest], list[str]]:
    """Leave out failures that are no larger than what rounding of intermediate results makes of an ill-conditioned
    gradient, as of a difference of terms that cancel.
    """
    function = setting.function
    failed = {name for test in tests if not test.ok and test.method is not Method.PRESENCE for name in test.gradients}
    if not failed:
        return list(tests), []
    spread = setting.rounding
    lost = {
        name: NOISE * rms(deviation.expand_as(grad)) / (rms(grad) or 1.0)
        for name, grad, deviation in zip(function.names, setting.grads, spread.grads, strict=True)
        if grad is not None
    }
    retained = [
        test
        for test in tests
        if test.ok
        or test.method is Method.PRESENCE
        or not test.residual <= max(lost.get(name, 0.0) for name in test.gradients)
    ]
    notes = [
        f"the gradient of {name} loses digits to rounding of intermediate results, which explains what failed there."
        for name in function.names
        if name in failed and len(retained) < len(tests) and lost.get(name)
    ]
    return retained, notes


def _seconds_left(setting: Setting) -> float:
    return max(1.0, setting.deadline - time.monotonic())


def _by_reference(given: Setting, reference: Setting, form: FunctionForm) -> _Suite:
    """Test the reference form, and hold the given form against it; where both fail, test the given form itself."""
    precise = _suite(reference, given, form)
    precise = replace(precise, tests=tuple(_to_rounding(test, given.noise.unit) for test in precise.tests))
    agreed = (*agreement_tests(given, form, given.function.values, given.gradients), *precise.agreed)
    related, skipped = relation_tests(given, layout=True)
    apart = any(not test.ok for test in agreed)
    if precise.fails and apart:
        # The reference form is wrong itself and says nothing about the given one.
        own = _suite(given, given, None)
        note = (
            f"the backward of this function is wrong in {form.words} too."
            if own.fails
            else (
                f"the backward of this function is wrong in {form.words}, where it was not asked for; everything said "
                "here is about the precision that was given."
            )
        )
        return replace(own, notes=(*own.notes, note))
    return _Suite(
        probed=precise.probed,
        tests=(*precise.tests, *agreed, *related),
        notes=(*precise.notes, *skipped),
    )


def _to_rounding(test: GradientTest, unit: float) -> GradientTest:
    """Return a failed test of the reference form, held to the rounding of the given one if it is no further off than
    that.

    A backward that rounds to bfloat16 on purpose does so in float64 too; in bfloat16 it is as precise as it can be.
    """
    allowed = AS_INTENDED * unit
    # The largest of many entries may be further off than their root mean square.
    entry = test.entry / (ROUNDING * unit) if test.method is Method.RELATION else 0.0
    if test.ok or test.method is Method.PRESENCE or not (test.residual <= allowed and entry <= 1):
        return test
    worst = max(test.residual / allowed, entry)
    return replace(test, limit=allowed, worst=worst, smallest=max(test.smallest, allowed), where="", meaning="")


def _run_check(
    function: NumericalFunction, seed: int, start: float, deadline: float, compiler: str, grad: Sequence[Tensor] | None
) -> Check:
    gradients = _gradients_of(function, seed) if grad is None else _as_given(function, grad)
    given = replace(_setting(function, gradients, seed, deadline), compiler=compiler)
    tests, untested = presence_tests(given)
    tests = [*tests, *_repetition_tests(given)]
    reference = reference_setting(given)
    suite = _suite(given, given, None) if reference is None else _by_reference(given, *reference)
    tests, vanishing = _without_vanishing(given, [*tests, *suite.tests])
    notes = [*function.notes, *_overwrites(given), *suite.notes, *vanishing]
    for name in function.names:
        if not any(name in test.gradients and test.sees_factor for test in tests):
            untested.setdefault(name, []).append(
                "a wrong constant factor: no output moves with it and its derivative is too noisy"
            )
    return Check(
        function=function.title,
        inputs={
            name: f"{str(value.dtype)[6:]} {'×'.join(map(str, value.shape)) or 'scalar'}"
            for name, value in zip(function.names, function.values, strict=True)
        },
        device=str(function.values[0].device),
        precision=str(function.precision)[6:],
        reference="" if reference is None else reference[1].words,
        probed=suite.probed,
        tests=tuple(tests),
        untested={name: tuple(reasons) for name, reasons in untested.items()},
        notes=tuple(dict.fromkeys(notes)),
        noise=dict(zip(function.names, given.noise.relative, strict=True)),
        errors={} if reference is None else rounding_errors(given, *reference),
        seconds=time.monotonic() - start,
    )


def _without_vanishing(given: Setting, tests: Sequence[GradientTest]) -> tuple[list[GradientTest], list[str]]:
    """Leave out failures of gradients that are rounding of larger terms, where the outputs do not move either.

    The scores of a saturated softmax get such a gradient: p − p² is a difference of two numbers of size one. A gradient
    of zero is right where outputs move in steps, although a scaling seems to scale them.
    """
    failed = {name for test in tests if not test.ok and test.method is not Method.PRESENCE for name in test.gradients}
    vanishing, stepped = [], []
    for index, name in enumerate(given.function.names):
        grad = given.grads[index]
        if name not in failed or grad is None or not bool(torch.isfinite(grad).all()):
            continue
        if not bool(grad.any()) and moves_in_steps(given.function, index, given.seed):
            stepped.append(name)
            continue
        lost = lost_to_rounding(given, index, given.function.values, given.gradients)
        if rms(grad) <= lost and not any(has_derivative(given.function, index, given.seed) or (True,)):
            vanishing.append(name)
    retained = [test for test in tests if test.ok or not set(test.gradients) <= {*vanishing, *stepped}]
    notes = [
        f"the gradient of {name} is rounding: outputs do not move with it. Give inputs at which they do."
        for name in vanishing
    ]
    notes += [f"outputs follow {name} in steps alone, so that its gradient of zero is right." for name in stepped]
    return retained, notes


def _as_given(function: NumericalFunction, grad: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the output gradients that the caller gave."""
    outs = function.outputs(function.values)
    if len(grad) != len(outs):
        raise UncheckableError(f"Expected {len(outs)} output gradients, got {len(grad)}. Pass one for each output.")
    for name, gradient, out in zip(function.out_names, grad, outs, strict=True):
        if not isinstance(gradient, Tensor) or gradient.shape != out.shape:
            shape = tuple(gradient.shape) if isinstance(gradient, Tensor) else type(gradient).__name__
            raise UncheckableError(
                f"Expected the gradient of {name} to have shape {tuple(out.shape)}, got {shape}. Pass a gradient "
                "of the output's shape."
            )
        if not bool(torch.isfinite(gradient).all()):
            raise UncheckableError(
                f"Expected the gradient of {name} to be finite, got infinities or NaN. Pass a finite one."
            )
    return tuple(gradient.detach().to(out.device, out.dtype) for gradient, out in zip(grad, outs, strict=True))


def _overwrites(setting: Setting) -> list[str]:
    """Return a note if the backward writes into the output gradient it is given, which others may still need."""
    function = setting.function
    copies = [gradient.clone() for gradient in setting.gradients]
    with torch.enable_grad():
        leaves = [value.detach().clone().requires_grad_() for value in function.values]
        outs = function._ran([leaf.clone() for leaf in leaves] if function.copying else leaves)
        live = [(outs[index], gradient) for index, gradient in zip(function.differentiable, copies, strict=True)]
        torch.autograd.grad([out for out, _ in live], leaves, [gradient for _, gradient in live], allow_unused=True)
    written = [
        name
        for name, leaf, value in zip(function.names, leaves, function.values, strict=True)
        if not function.copying and not torch.equal(leaf.detach(), value)
    ]
    notes = [
        f"the backward of {function.title} writes into its input {name}; code that reads {name} afterwards reads "
        "changed values."
        for name in written
    ]
    if all(torch.equal(gradient, before) for gradient, before in zip(copies, setting.gradients, strict=True)):
        return notes
    return [
        *notes,
        f"the backward of {function.title} overwrites the output gradient it is given; where that is needed "
        "elsewhere too (a residual connection), the other gradient will be wrong.",
    ]
