"""Which continuous symmetries a function has, found by moving its inputs: forward passes only, nothing known about it.

A candidate is a group acting on axes of one input, or of two inputs against each other; the outputs either stay or move
along. Moves are finite and multiply by powers of two, which is exact in floating point, so a scaling is decided almost
bit by bit in any precision. What differs after a move is compared with the noise of the function itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from conserved.inference.probing.axis_moves import describe
from conserved.inference.probing.axis_scan import scalings, translations
from conserved.inference.probing.matrix_groups import mixing_symmetries
from conserved.inference.probing.noise import measure_output_noise, step_of
from conserved.inference.probing.numerical_function import (
    NumericalFunction,
    UncheckableError,
    Values,
    device_of,
    function_of,
    repeatable,
)
from conserved.inference.probing.scanner import Scanner
from conserved.output import html
from conserved.symmetry import Symmetry
from conserved.tolerances import UNIT

__all__ = ["Probe", "probe", "probe_function"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The continuous symmetries of a function, as seen on its forward pass.

    Attributes:
        function: name of the function.
        inputs: names and shapes of its floating-point inputs.
        outputs: names and shapes of its differentiable outputs.
        symmetries: the symmetries found, the most informative first for each set of tensors; their legs are views of
            inputs and outputs.
        errors: for each of them, the largest relative change by row of an output that moves along it left.
        passes: forward passes that were needed.
        complete: whether every candidate was tried in the time allowed.
    """

    function: str
    inputs: dict[str, tuple[int, ...]]
    outputs: dict[str, tuple[int, ...]]
    symmetries: tuple[Symmetry, ...]
    errors: Mapping[Symmetry, float]
    passes: int
    complete: bool

    def of(self, *names: str) -> tuple[Symmetry, ...]:
        """Return the symmetries that move all of some tensors.

        Args:
            *names: names of inputs or outputs.

        Returns:
            The symmetries in which every one of these tensors takes part.
        """
        return tuple(symmetry for symmetry in self.symmetries if set(names) <= {*symmetry.parameters})

    def __repr__(self) -> str:
        return f"<Probe of {self.function}: {len(self.symmetries)} symmetries, {self.passes} forward passes>"

    def _repr_html_(self) -> str:
        return html.panel(html.preformat(str(self)))

    def __str__(self) -> str:
        lines = [f"{self.function}: {len(self.symmetries)} continuous symmetries, {self.passes} forward passes"]
        return "\n".join([*lines, *(f"  {self.describe(symmetry)}" for symmetry in self.symmetries)])

    def describe(self, symmetry: Symmetry) -> str:
        """Return one of the symmetries as text, such as "translation of v[0, 1, 3] moves out[0, 1, 3]"."""
        return describe(symmetry, self.outputs)


def probe(
    fn: Callable[..., Any],
    *tensors: Any,
    names: tuple[str, ...] | None = None,
    seed: int = 0,
    seconds: float = 60.0,
    **keywords: Any,
) -> Probe:
    """Find the continuous symmetries of a callable by moving the inputs it is given.

    Args:
        fn: any callable on tensors, or a module, whose parameters count as inputs.
        *tensors: example inputs in the precision and on the device the function is meant for.
        names: names of the floating-point inputs, where the signature has none.
        seed: the seed of the moves, and of random numbers the function draws.
        seconds: time after which no further candidate is tried.
        **keywords: keyword arguments of `fn`.

    Returns:
        A `Probe`: which axes of which inputs and outputs move together, and by which group.

    Raises:
        UncheckableError: the function cannot be run on these inputs, or returns infinities or NaN.
    """
    with repeatable(device_of(tensors, keywords)):
        return probe_function(function_of(fn, tensors, keywords, names=names, seed=seed), seconds=seconds)


def probe_function(function: NumericalFunction, *, unit: float | None = None, seconds: float = 60.0) -> Probe:
    """Find the symmetries of a prepared function; `unit` is its relative rounding, if known."""
    outs = function.outputs(function.values)
    if not all(bool(torch.isfinite(out).all()) for out in outs):
        raise UncheckableError(
            f"Expected finite outputs of {function.title}, got infinities or NaN. Pass inputs at which it is defined."
        )
    scanner = scanner_of(function, outs, unit=unit, seconds=seconds)
    symmetries = scalings(scanner)
    symmetries += translations(scanner)
    symmetries = mixing_symmetries(scanner, symmetries)
    return Probe(
        function=function.title,
        inputs={name: tuple(value.shape) for name, value in zip(function.names, function.values, strict=True)},
        outputs={name: tuple(out.shape) for name, out in zip(function.out_names, outs, strict=True)},
        symmetries=tuple(symmetries),
        errors=scanner.errors,
        passes=scanner.passes,
        complete=time.monotonic() < scanner.deadline,
    )


def scanner_of(function: NumericalFunction, outs: Values, *, unit: float | None, seconds: float) -> Scanner:
    """Return a scanner of the function at its inputs, with the noise of its outputs."""
    return Scanner(
        function=function,
        outs=outs,
        noise=measure_output_noise(function, function.values, step_of(function)),
        unit=max([UNIT[function.precision], *(UNIT[out.dtype] for out in outs)]) if unit is None else unit,
        deadline=time.monotonic() + seconds,
    )
