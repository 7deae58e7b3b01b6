"""The same function in its most precise form: in a finer precision, and as written instead of compiled.

A backward that is tested in float64 is tested to twelve digits, and the form that was given is then held against it:
a second implementation that nobody had to write. It is a reference only if it computes the same outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from conserved.checking.inner_precision import inner_precision
from conserved.checking.pass_under_test import Setting
from conserved.inference.probing.noise import by_row, measure_noise, rms, wide
from conserved.inference.probing.numerical_function import NumericalFunction
from conserved.tolerances import NOISE, ROUNDING, UNIT

_FINER = {
    torch.bfloat16: (torch.float64, torch.float32),
    torch.float16: (torch.float64, torch.float32),
    torch.float32: (torch.float64,),
    torch.float64: (),
}
_QUIETER = 0.5
"""The share of the given form's noise that the reference form's may be: otherwise it is no more precise."""

_CALM = 2.0**-10
"""The share of the given form's gradient noise below which another form computes in a finer precision throughout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionForm:
    """A form of the function: the function itself, its name in words, and the precisions of its outputs."""

    function: NumericalFunction
    words: str
    out_types: tuple[torch.dtype, ...] = ()

    def at(self, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return inputs of the given form as inputs of this one."""
        return tuple(value.to(like.dtype) for value, like in zip(values, self.function.values, strict=True))

    def gradients(self, values: Sequence[Tensor], gradients: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Return gradients of this form at inputs and output gradients of the given one."""
        typed = [wide(gradient).to(kind) for gradient, kind in zip(gradients, self.out_types, strict=True)]
        return self.function.gradients(self.at(values), typed)[1]


def forms_of(function: NumericalFunction) -> Iterator[FunctionForm]:
    """Yield every form that may be more precise, the most precise first."""
    plain = function.uncompiled
    written = ", not compiled" if function.eager is not None else ""
    for precision in (*_FINER[function.precision], *((function.precision,) if written else ())):
        values = tuple(value.to(precision) for value in plain.values)
        yield FunctionForm(function=replace(plain, values=values), words=f"{str(precision)[6:]}{written}")


def reference_setting(setting: Setting) -> tuple[Setting, FunctionForm] | None:
    """Return one pass of the most precise form that computes what the function computes; None if there is none."""
    for form in forms_of(setting.function):
        function = form.function
        try:
            outs = function.outputs(function.values)
            # A form that casts inside to less than its own precision is a staircase, and no reference.
            if not outputs_agree(setting, outs) or UNIT[inner_precision(function)] > UNIT[function.precision]:
                continue
            gradients = tuple(
                wide(gradient).to(out.dtype) for gradient, out in zip(setting.gradients, outs, strict=True)
            )
            outs, grads = function.gradients(function.values, gradients)
            noise = measure_noise(function, gradients)
        except Exception:  # a kernel may refuse a precision in any way it likes
            continue
        if [grad is None for grad in grads] != [grad is None for grad in setting.grads]:
            continue
        if not all(grad is None or bool(torch.isfinite(grad).all()) for grad in grads):
            continue
        same = function.precision == setting.function.precision
        quieter = sum(map(rms, noise.outs)) <= _QUIETER * sum(map(rms, setting.noise.outs))
        # The noise of a few outputs is assumed, not measured; gradients then say how fine the arithmetic is.
        calm = all(
            fine <= _CALM * max(coarse, setting.noise.unit)
            for fine, coarse in zip(noise.relative, setting.noise.relative, strict=True)
        )
        if not (same or quieter or calm):
            continue
        repeats = all(torch.equal(a, b) for a, b in zip(function.outputs(function.values), outs, strict=True))
        result = replace(
            setting,
            function=function,
            gradients=gradients,
            outs=outs,
            grads=grads,
            noise=noise,
            repeats=repeats,
            coarsest=setting.noise.unit,
            compiler="",
        )
        return result, replace(form, out_types=tuple(out.dtype for out in outs))
    return None


def outputs_agree(setting: Setting, outs: Sequence[Tensor]) -> bool:
    """Return whether the outputs of another form are those of the given one, up to rounding."""
    for out, before, deviation in zip(outs, setting.outs, setting.noise.outs, strict=True):
        if out.shape != before.shape or not bool(torch.isfinite(out).all()):
            return False
        size = by_row(wide(before).square()).sqrt()
        limit = NOISE * deviation + ROUNDING * setting.noise.unit * (size + wide(before).abs())
        if not bool(((wide(out) - wide(before)).abs() <= limit).all()):
            return False
    return True
