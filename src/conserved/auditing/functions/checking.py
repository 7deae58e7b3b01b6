"""Check a function's backward: no reference, no model, in its own precision and on its own device."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conserved.auditing.functions.check_result import Check
from conserved.auditing.functions.dependence import changed
from conserved.auditing.functions.gradient_test import Method, Tested
from conserved.auditing.functions.identity_tests import identity_tests
from conserved.auditing.functions.pass_under_test import Setting
from conserved.auditing.functions.relations import relation_tests
from conserved.auditing.functions.slope_tests import slope_tests
from conserved.inference.probing.axis_moves import Group
from conserved.inference.probing.noise import measure_noise, rms, wide
from conserved.inference.probing.numerical_function import (
    UNIT,
    NumericalFunction,
    Uncheckable,
    device_of,
    function_of,
    repeatable,
)
from conserved.inference.probing.symmetry_search import probe_function, scanner_of

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
    arguments: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> Check:
    """Is the backward of this function right?

    Symmetries of the forward are found by moving the inputs; each implies an identity that one backward pass is held
    to. Then come relations every right backward obeys, and slopes along chosen directions. Nothing is compared with
    another implementation, and no double precision is needed.

    Args:
        fn: any callable on tensors; of a module, the parameters are inputs too.
        *tensors: its arguments in the precision and on the device it is meant for; integers are held fixed.
        names: names of the floating-point inputs, where the signature has none.
        seed: the seed of all random numbers, including those the function draws: it is set before every call.
        seconds: time after which no further test is begun.
        compiled: whether the function under torch.compile is held against itself too; a backend's name, or True for
            "inductor". Compiling takes seconds to minutes.
        arguments: keyword arguments of `fn` whose names this function has too.
        **keywords: keyword arguments of `fn`.

    Returns:
        Every test by gradient, failures with their place and meaning, gradients that could not be tested, and a
        verdict.

    Raises:
        Uncheckable: the function has no gradient to check, or cannot be run twice with the same result.
    """
    start = time.monotonic()
    with repeatable(device_of(tensors, keywords)):
        function = function_of(fn, tensors, {**keywords, **(arguments or {})}, names=names, seed=seed)
        compiler = "inductor" if compiled is True else compiled or ""
        return _checked(_generic(_repeats(function)), seed, start, start + seconds, compiler)


def _repeats(function: NumericalFunction) -> NumericalFunction:
    """The function, if two calls with one seed agree; otherwise a sentence."""
    first, second = (function.outputs(function.values) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        if one.shape != other.shape:
            raise Uncheckable(
                f"{function.title} returns {tuple(one.shape)} and then {tuple(other.shape)} on the same inputs."
            )
        size = rms(one) or 1.0
        if rms(wide(one) - wide(other)) > max(_RANDOM[0], _RANDOM[1] * UNIT[one.dtype]) * size:
            raise Uncheckable(
                f"{function.title} is random: two calls on the same inputs from the same seed differ by "
                f"{rms(wide(one) - wide(other)) / size:.0%}. Fix its random numbers, or pass them in."
            )
    return function


def _generic(function: NumericalFunction) -> NumericalFunction:
    """The function at inputs none of which is constant: a backward that forgets a gain of one would pass otherwise."""
    values = list(function.values)
    drawn = []
    generator = torch.Generator().manual_seed(function.seed + 3)
    for place, value in enumerate(values):
        if value.numel() > 1 and bool((value == value.flatten()[0]).all()):
            noise = torch.rand(value.shape, generator=generator).to(value.device).double() + 0.5
            level = float(value.flatten()[0])
            values[place] = (noise * level if level else 0.5 * (noise - 1)).to(value.dtype)
            drawn.append(function.names[place])
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


def _slopes(function: NumericalFunction, seed: int) -> tuple[Tensor, ...]:
    """Random output gradients, in half precision of a size that keeps the gradients away from the smallest numbers."""
    generator = torch.Generator().manual_seed(seed + 11)
    outs = function.outputs(function.values)
    found = []
    for out in outs:
        drawn = torch.randn(out.shape, generator=generator)
        if out.numel() == 1:
            drawn = drawn.abs() + 0.5
        found.append(drawn.to(out.device, out.dtype))
    if function.precision is torch.float16 or any(out.dtype is torch.float16 for out in outs):
        _, grads = function.gradients(function.values, found)
        sizes = [rms(grad) for grad in grads if grad is not None]
        small = min((size for size in sizes if size > 0), default=1.0)
        power = min(max(0, round(-torch.tensor(small).log2().item())), 8)
        found = [slope * 2.0**power for slope in found]
    return tuple(found)


def _checked(function: NumericalFunction, seed: int, start: float, deadline: float, compiler: str) -> Check:
    slopes = _slopes(function, seed)
    outs, grads = function.gradients(function.values, slopes)
    noise = measure_noise(function, slopes)
    scanner = scanner_of(function, outs, unit=noise.unit, seconds=max(1.0, deadline - time.monotonic()))
    setting = Setting(
        function=function,
        slopes=slopes,
        outs=outs,
        grads=grads,
        noise=noise,
        deadline=deadline,
        seed=seed,
        repeats=all(torch.equal(a, b) for a, b in zip(function.outputs(function.values), outs, strict=True)),
        telling=tuple(scanner.tells(name, Group.SCALING) for name in function.names),
        compiler=compiler,
    )
    tests, untested = _presence(setting)
    left = max(1.0, 0.4 * (deadline - time.monotonic()))
    probed = probe_function(function, unit=noise.unit, seconds=left)
    tests += identity_tests(setting, probed.symmetries)
    if not probed.complete:
        untested.setdefault("*", []).append("the search for symmetries was cut short: the time allowed was used up")
    related, skipped = relation_tests(setting)
    sloped, noisy = slope_tests(setting)
    tests += related + sloped
    notes = [*function.notes, *_overwrites(setting), *skipped, *noisy, *untested.pop("*", [])]
    for name in function.names:
        if not any(name in test.gradients and test.sees_factor for test in tests):
            untested.setdefault(name, []).append(
                "a wrong constant factor: no output moves with it and its slope is too noisy"
            )
    return Check(
        function=function.title,
        inputs={
            name: f"{str(value.dtype)[6:]} {'×'.join(map(str, value.shape)) or 'scalar'}"
            for name, value in zip(function.names, function.values, strict=True)
        },
        device=str(function.values[0].device),
        precision=str(function.precision)[6:],
        symmetries=probed.symmetries,
        tests=tuple(tests),
        untested={name: tuple(reasons) for name, reasons in untested.items()},
        notes=tuple(dict.fromkeys(notes)),
        noise=dict(zip(function.names, noise.relative, strict=True)),
        seconds=time.monotonic() - start,
    )


def _presence(setting: Setting) -> tuple[list[Tested], dict[str, list[str]]]:
    """A gradient that arrives is finite; one that does not arrive is not needed."""
    tests: list[Tested] = []
    untested: dict[str, list[str]] = {}
    for place, name in enumerate(setting.function.names):
        grad = setting.grads[place]
        value = setting.function.values[place]
        if grad is None:
            moved = None
            if value.ndim:
                moved = changed(setting, place, 0, 0, value.shape[0])
            needed = moved is not None and any(not torch.equal(a, b) for a, b in zip(moved, setting.outs, strict=True))
            what = "the gradient arrives where the output depends on the input"
            if needed:
                meaning = f"{name} changes the output, and its backward returns None: detached, or left out"
                tests.append(
                    Tested(
                        gradients=(name,),
                        method=Method.PRESENCE,
                        what=what,
                        residual=1.0,
                        limit=0.0,
                        worst=float("inf"),
                        where="everywhere",
                        meaning=meaning,
                    )
                )
            else:
                untested[name] = ["no gradient arrives, and the output does not depend on it"]
                tests.append(
                    Tested(
                        gradients=(name,),
                        method=Method.PRESENCE,
                        what=what,
                        residual=0.0,
                        limit=0.0,
                        worst=0.0,
                        sees_factor=True,
                    )
                )
            continue
        finite = bool(torch.isfinite(grad).all())
        share = float((~torch.isfinite(grad)).double().mean())
        tests.append(
            Tested(
                gradients=(name,),
                method=Method.PRESENCE,
                what="the gradient is finite and of its input's precision and shape",
                residual=share,
                limit=0.0,
                worst=0.0 if finite else float("inf"),
                where="" if finite else _place_of(grad),
                meaning="" if finite else "a division by zero, an overflow, or memory that was never written",
            )
        )
    return tests, untested


def _place_of(grad: Tensor) -> str:
    from conserved.auditing.functions.locating import where

    return where(~torch.isfinite(grad))


def _overwrites(setting: Setting) -> list[str]:
    """A note if the backward writes into the output gradient it is given, which others may still need."""
    function = setting.function
    kept = [slope.clone() for slope in setting.slopes]
    with torch.enable_grad():
        leaves = [value.detach().clone().requires_grad_() for value in function.values]
        outs = function._ran([leaf.clone() for leaf in leaves] if function.copying else leaves)
        live = [(outs[place], slope) for place, slope in zip(function.differentiable, kept, strict=True)]
        torch.autograd.grad([out for out, _ in live], leaves, [slope for _, slope in live], allow_unused=True)
    written = [
        name
        for name, leaf, value in zip(function.names, leaves, function.values, strict=True)
        if not function.copying and not torch.equal(leaf.detach(), value)
    ]
    notes = [
        f"the backward of {function.title} writes into its input {name}; whoever else needs {name} afterwards finds "
        "something else there."
        for name in written
    ]
    if all(torch.equal(slope, before) for slope, before in zip(kept, setting.slopes, strict=True)):
        return notes
    return [
        *notes,
        f"the backward of {function.title} overwrites the output gradient it is given; where that is needed "
        "elsewhere too (a residual connection), the other gradient will be wrong.",
    ]
