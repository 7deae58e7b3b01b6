"""The noise that rounding makes, predicted from the ranges of weights and the sizes of what they are multiplied with.

A step of size δ makes errors of mean square δ²/12, as if they were random. For a map y = W x with channels of mean
square M_j, all numbers below are relative to the signal Σ_ij W_ij² M_j, and common factors are left out:

| what is rounded | noise in y |
|---|---|
| W, one step for all of it | max |W|² · Σ_ij M_j |
| W, one step for each output | Σ_i max_j |W_ij|² · Σ_j M_j |
| x, one step for all of it | max |x|² · Σ_ij W_ij² |

Scaling channel j of x by 1/s_j and column j of W by s_j leaves the signal alone and moves the noise.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from conserved.symmetry import Leg
from conserved.transform.activations import ChannelSizes
from conserved.transform.moving import write


@dataclass(frozen=True, slots=True)
class Noise:
    """Noise over signal, for each way of rounding."""

    tensor: float = 0.0
    """Weights, one step for each tensor."""
    output: float = 0.0
    """Weights, one step for each output."""
    inputs: float = 0.0
    """The noise of the inputs, with one step for all of them."""

    def __add__(self, other: Noise) -> Noise:
        return Noise(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def improves(self, other: Noise, rounded: str) -> bool:
        """Return whether what is rounded is less noisy than in another.

        Where weights and inputs are both rounded, in as many bits, their noises add up. Otherwise nothing may get
        noisier: neither way of rounding weights, nor inputs unless it is known that they are not rounded.
        """
        if rounded == "both":
            return self.tensor + self.inputs < (other.tensor + other.inputs) * (1 - 1e-3)
        pairs = list(zip(astuple(self), astuple(other), strict=True))[: 2 if rounded == "weights" else 3]
        return all(a <= b * (1 + 1e-9) for a, b in pairs) and any(a < b * (1 - 1e-2) for a, b in pairs)


def reader_noise(name: str, weight: Float[Tensor, "..."], sizes: ChannelSizes) -> Noise:
    """Return the noise in what a weight makes of the channels it reads."""
    squares = sizes.squares[name].expand(weight.shape)
    signal = float((weight.square() * squares).sum())
    if not signal:
        return Noise()
    summed = tuple(d for d in range(weight.ndim) if d not in sizes.outputs[name])
    steps = weight.abs().amax(summed, keepdim=True).square()
    return Noise(
        tensor=float(steps.max() * squares.sum()) / signal,
        output=float((steps * squares.sum(summed, keepdim=True)).sum()) / signal,
        inputs=float(sizes.largest[name].max().square() * weight.square().sum()) / signal,
    )


def maker_noise(leg: Leg, weight: Float[Tensor, "..."], sizes: ChannelSizes, shares: Float[Tensor, " units"]) -> Noise:
    """Return the noise in the channels that a weight makes, each relative to its own signal.

    Channels of the leg count by their shares in what is made of them; other outputs of the weight, which a larger step
    would harm, count alike.
    """
    name = leg.view.parameter
    squares = sizes.squares[name].expand(weight.shape)
    summed = tuple(d for d in range(weight.ndim) if d not in sizes.outputs[name])
    counted = torch.ones_like(weight)
    share = (shares / shares.mean().clamp_min(1e-300)).to(weight.device)
    write(leg.view, counted, share[:, None].expand(leg.view.n, leg.view.m))
    counted = counted.mean(summed)
    signals = (weight.square() * squares).sum(summed)
    alive = signals > 0
    if not bool(alive.any()):
        return Noise()
    steps = weight.abs().amax(summed).square()
    inputs = squares.sum(summed)

    def total(step: Tensor) -> float:
        return float((counted * step * inputs)[alive].div(signals[alive]).sum() / alive.sum())

    return Noise(tensor=total(steps.max().expand_as(steps)), output=total(steps))
