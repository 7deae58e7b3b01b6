"""Scale moved between activations and weights, channel by channel: SmoothQuant's rule on every space that allows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from conserved.symmetry import Leg, NoBestPointError, Symmetry, Tensors
from conserved.transform.activations import ChannelSizes, check_statistic
from conserved.transform.moving import act_on, write
from conserved.transform.objectives import Objective, is_matrix, ranges
from conserved.transform.rounding import Noise, maker_noise, reader_noise

SPACES = ("predicted", "gains", "all")

ROUNDED = ("any", "weights", "both")

STEPS = (1.0, 0.5, 0.25)
"""How far a space between two weights is tried to be moved, as powers of the scales that α asks for."""


@dataclass
class Activation(Objective):
    """With a_j the size of channel j and w_j the range of the weights that read it, s_j = a_j^α / w_j^{1−α}.

    Channels are divided by s and the weights that read them multiplied (SmoothQuant, equation 4). Where a gain makes
    the channels this costs nothing. Where another weight makes them its own ranges change too: such a space is moved as
    far as α asks, half or a quarter as far, or not at all: the furthest at which rounding is predicted to get less
    noisy.
    """

    sizes: ChannelSizes
    alpha: int | float = 0.5
    statistic: str = "max"
    spaces: str = "predicted"
    """"predicted" as above; "gains" for these alone, as SmoothQuant; "all" to ask for no prediction, as AWQ."""
    rounded: str = "any"
    """The rounding that is predicted: "weights", "both" weights and their inputs, or "any" if that is not known."""
    sweeps: int = 1
    _known: dict[Symmetry, list[Leg]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_smoothing(self.alpha, self.statistic, self.spaces, self.rounded)

    def rank(self, symmetry: Symmetry) -> int:
        """Order gains first, so that the weights behind them are read as they will be."""
        return int(any(is_matrix(leg) for leg in makers(symmetry, self._reading(symmetry))))

    def applies(self, symmetry: Symmetry) -> bool:
        return _has_channels(symmetry, self._reading(symmetry)) and not (self.spaces == "gains" and self.rank(symmetry))

    def element(self, symmetry: Symmetry, work: Tensors) -> Tensor | None:
        reading = self._reading(symmetry)
        s = self._asked(symmetry, reading, work)
        matrices = [leg for leg in makers(symmetry, reading) if is_matrix(leg)]
        if not matrices or self.spaces == "all":
            return symmetry.kind.scaling_element(s)
        now = self._noise(symmetry, reading, matrices, work, self.sizes)
        for step in STEPS:
            element = symmetry.kind.scaling_element(s**step)
            trial = {name: work[name].clone() for name in symmetry.parameters}
            act_on(symmetry, element, trial)
            if self._noise(symmetry, reading, matrices, trial, self._moved(symmetry, element)).improves(
                now, self.rounded
            ):
                return element
        raise NoBestPointError("rounding is predicted to get noisier however far it is moved")

    def applied(self, symmetry: Symmetry, element: Tensor) -> None:
        self.sizes = self._moved(symmetry, element)

    def value(self, symmetry: Symmetry, work: Tensors) -> float:
        """Return noise over signal with weights and inputs in eight bits and one step per tensor, at the noisiest
        reader.
        """
        names = dict.fromkeys(leg.view.parameter for leg in self._reading(symmetry))
        noises = [reader_noise(name, work[name], self.sizes) for name in names]
        return max(((noise.tensor + noise.inputs) / (12 * 127**2) for noise in noises), default=0.0)

    def _reading(self, symmetry: Symmetry) -> list[Leg]:
        if symmetry not in self._known:
            self._known[symmetry] = readers(symmetry, self.sizes.largest)
        return self._known[symmetry]

    def _asked(self, symmetry: Symmetry, reading: Sequence[Leg], work: Tensors) -> Float[Tensor, " units"]:
        """Return the scales of legs of degree one that SmoothQuant asks for."""
        table = self.sizes.largest if self.statistic == "max" else self.sizes.mean
        size = torch.stack([_rows(leg, table).amax(1) for leg in reading]).amax(0)
        weight = ranges(symmetry, work, reading_side(symmetry, reading))
        alive = (size > 0) & (weight > 0)
        s = torch.where(alive, size.clamp_min(1e-30) ** self.alpha / weight.clamp_min(1e-30) ** (1 - self.alpha), 1.0)
        return s.clamp_min(1e-5) ** (1 / reading[0].degree)

    def _noise(
        self, symmetry: Symmetry, reading: Sequence[Leg], making: Sequence[Leg], work: Tensors, sizes: ChannelSizes
    ) -> Noise:
        """Return what rounding would do to the readers of a space and, through it, to its makers."""
        total = Noise()
        for name in dict.fromkeys(leg.view.parameter for leg in reading):
            total += reader_noise(name, work[name], sizes)
        # Each channel's part in what its readers make of it, which no scale changes.
        shares = torch.zeros(symmetry.n, dtype=torch.float64)
        for leg in reading:
            weight = leg.view.matrix(work[leg.view.parameter]).square()
            shares = shares + (weight * _rows(leg, sizes.squares)).sum(1).cpu()
        for leg in making:
            if leg.view.parameter in sizes.squares:
                total += maker_noise(leg, work[leg.view.parameter], sizes, shares)
        return total

    def _moved(self, symmetry: Symmetry, element: Tensor) -> ChannelSizes:
        """Return the sizes of channels after an element has been applied."""
        sizes: dict[str, dict[str, Tensor]] = {key: dict(getattr(self.sizes, key)) for key in _MOVING}
        s = symmetry.kind.act(element, element.new_ones(symmetry.n, 1, dtype=torch.float64), 1)[:, 0]
        for leg in self._reading(symmetry):
            name = leg.view.parameter
            for key, power in _MOVING.items():
                expanded = sizes[key][name].expand(leg.view.shape).clone()
                factor = s.to(expanded)[:, None] ** (-power * leg.degree)
                write(replace(leg.view, offset=0.0), expanded, leg.view.matrix(expanded) * factor)
                extents = [slice(None) if extent > 1 else slice(0, 1) for extent in sizes[key][name].shape]
                sizes[key][name] = expanded[tuple(extents)]
        return ChannelSizes(outputs=self.sizes.outputs, **sizes)


_MOVING: dict[str, int] = {"largest": 1, "mean": 1, "squares": 2}
"""Statistics that scale with their channels, and by which power."""


def check_smoothing(alpha: int | float, statistic: str, spaces: str, rounded: str) -> None:
    """Refuse what `Activation` does not know, before a model is run for it."""
    check_statistic(statistic)
    if spaces not in SPACES:
        raise ValueError(f"Expected spaces to be one of {', '.join(SPACES)}, got {spaces!r}. Pass one of them.")
    if rounded not in ROUNDED:
        raise ValueError(f"Expected rounded to be one of {', '.join(ROUNDED)}, got {rounded!r}. Pass one of them.")
    if not 0 <= alpha <= 1:
        raise ValueError(
            f"Expected alpha between 0 (weights alone) and 1 (activations alone), got {alpha}. Pass alpha=0.5, "
            "for example."
        )


def _has_channels(symmetry: Symmetry, reading: Sequence[Leg]) -> bool:
    """Return whether scaling a space scales channels that are read in one direction only."""
    return symmetry.kind.scales_rows and len({leg.degree for leg in reading}) == 1


def readers(symmetry: Symmetry, sizes: Mapping[str, Tensor]) -> list[Leg]:
    """Return legs along which a parameter was seen to be contracted with activations."""
    return [leg for leg in symmetry.legs if leg.view.parameter in sizes and _along(leg, sizes[leg.view.parameter])]


def reading_side(symmetry: Symmetry, seen: Sequence[Leg]) -> list[Leg]:
    """Return all legs that read a space, given some that were seen to: weights that move as these do.

    A weight that is copied before it is used, as experts are that tokens gather, is not seen to be read.
    """
    signs = {leg.degree > 0 for leg in seen}
    return [leg for leg in symmetry.legs if leg in seen or (signs == {leg.degree > 0} and is_matrix(leg))]


def makers(symmetry: Symmetry, seen: Sequence[Leg]) -> list[Leg]:
    """Return the other legs."""
    reading = reading_side(symmetry, seen)
    return [leg for leg in symmetry.legs if leg not in reading]


def _rows(leg: Leg, sizes: Mapping[str, Tensor]) -> Float[Tensor, "n m"]:
    """Return the sizes of the activations that a leg meets, in its own places."""
    return leg.view.matrix(sizes[leg.view.parameter].expand(leg.view.shape)).to(torch.float64)


def _along(leg: Leg, statistic: Tensor) -> bool:
    """Return whether the rows of a leg are the channels that a statistic distinguishes."""
    numbers = torch.arange(statistic.numel()).reshape(statistic.shape)
    seen = leg.view.matrix(numbers.expand(leg.view.shape))
    rows = seen.amin(1)
    return bool((rows == seen.amax(1)).all()) and rows.unique().numel() == rows.numel() == leg.view.n
