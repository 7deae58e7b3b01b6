"""The pass that every test of a backward uses: its outputs and gradients, their noise, and the time left."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from torch import Tensor

from conserved.checking.random_rounding import RoundingSpread, rounding_spread
from conserved.inference.probing.noise import FunctionNoise
from conserved.inference.probing.numerical_function import NumericalFunction, Values


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One forward and backward pass of a function, with the noise of both.

    `repeats` says that two forward passes agree bit by bit; `responsive`, by input, that outputs show it when that
    input is changed at random, so that outputs which stay the same say something.
    """

    function: NumericalFunction
    gradients: Values
    outs: Values
    grads: tuple[Tensor | None, ...]
    noise: FunctionNoise
    deadline: float
    seed: int
    repeats: bool = True
    responsive: tuple[bool, ...] = ()
    coarsest: float = 0.0
    """The rounding of the form that was given, where this is another, more precise form of it."""
    compiler: str = ""
    """The backend of torch.compile under which gradients are compared too; none if empty."""

    _rounding: list[RoundingSpread] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def rounding(self) -> RoundingSpread:
        """The variation of outputs and gradients when intermediate results are rounded again, measured on first use."""
        if not self._rounding:
            function = self.function
            self._rounding.append(rounding_spread(function, function.values, self.gradients, self.noise.unit))
        return self._rounding[0]

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of inputs by name."""
        return {name: tuple(value.shape) for name, value in zip(self.function.names, self.function.values, strict=True)}
