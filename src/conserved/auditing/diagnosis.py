"""Where a broken identity comes from, decided by running the pass again: rounding, hardware, a kernel, or the program.

Four questions, each a replay of the audited pass (`Replay`):

    the same again      does the pass leave this residual a second time? If not, the first was corrupted.
    scaled              how large is rounding here? `noise` says how it is sampled.
    at nearby weights   is it drawn again if weights move by their spacing? Then it is rounding inside of kernels.
    in reference form   does the identity hold without compiler, fused attention and hand-written backward passes, or in
                        higher precision? Then one of those is at fault.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from conserved.auditing.nearby_weights import nearby_weights
from conserved.auditing.noise import (
    NoiseSample,
    coherent,
    difference_sizes,
    noise_multiples,
    sample_noise,
    suspicious,
    unmistakable,
)
from conserved.auditing.reference_form import PLAIN, PassForm, wide_forms
from conserved.auditing.replay import SCALE, SCALES, Replay, ReplayError
from conserved.laws.identities import balance_of, coarsest
from conserved.moment import Direction, Plan, Point, to_host
from conserved.symmetry import Symmetry, Tensors
from conserved.tolerances import HALF, SIGMAS

LOGGER = logging.getLogger("conserved.audit")


class Origin(Enum):
    """The origin of a residual above the floor."""

    ROUNDING = "rounding"
    TRANSIENT = "not reproducible"
    LOOP = "the loop"
    KERNEL = "this run's kernels"
    PRECISION = "precision"
    PROGRAM = "the program"
    DESIGN = "design"
    UNKNOWN = "not replayed"


MEANING = {
    Origin.ROUNDING: "rounding of this pass explains it",
    Origin.TRANSIENT: "not reproducible: the same pass run again satisfies the identity. A bit flip, a race or a bad "
    "device, or code that changed gradients after backward(). Seen on {where}",
    Origin.LOOP: "the same pass run again satisfies the identity, and {evidence}. Code between backward() and "
    "optimizer.step() changes gradients, or the loss depends on parameters directly",
    Origin.KERNEL: "reproducible, in this run's own kernels only: {kernel}",
    Origin.PRECISION: "reproducible in {precision} only: in higher precision the identity holds. What the forward pass "
    "rounds, or a kernel's {precision} path, explains it",
    Origin.PROGRAM: "reproducible in reference form too: the gradient is not that of this program. A gradient hook, or "
    "an operation whose backward is not the derivative of its forward",
    Origin.DESIGN: "{trusted} returns its input, rounds or compares it, and has a backward of its own: by design in "
    "gradient reversal, straight-through estimators and spikes, an error elsewhere",
    Origin.UNKNOWN: "the pass could not be run again: {reason}",
}
"""Words for each origin."""

_NOT_SAMPLED = "its rounding could not be sampled at nearby weights"

_NOT_WIDENED = "sharded parameters are gathered in their own precision only"

_WHOLE_LEG = "the residual is one factor on a whole side of it, which no bit flip leaves"
_EVERY_AUDIT = "that in one audit after the other"
"""Evidence that gradients were changed after the backward pass, on purpose or not."""

KERNELS = {
    "eager": "compiled code (without torch.compile it holds)",
    "attention": "the attention backend (with the math backend it holds)",
    "functions": "the backward of an autograd function (with its forward differentiated it holds)",
}
"""Words for the switch of a `PassForm` that mends an identity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The origin of one residual, the measured noise it was compared with, and an explanation."""

    origin: Origin
    limit: float
    """The relative residual that measured rounding explains."""
    message: str

    @property
    def wrong(self) -> bool:
        """Whether the gradient is wrong, as opposed to rounded."""
        return self.origin in (Origin.TRANSIENT, Origin.LOOP, Origin.KERNEL, Origin.PROGRAM)

    def repeated(self) -> Diagnosis:
        """Return the diagnosis of a residual that is not reproducible again and again."""
        return replace(self, origin=Origin.LOOP, message=MEANING[Origin.LOOP].format(evidence=_EVERY_AUDIT))


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspectIdentities:
    """Identities whose residuals exceed the floor: symmetries, residuals, floors, and the pass they were read off."""

    symmetries: Sequence[Symmetry]
    residuals: NDArray[np.float64]
    floors: NDArray[np.float64]
    theta: Tensors
    factors: NDArray[np.bool_]
    """Which residuals are wrong factors, however small: rounding does not look like that."""
    precision: torch.dtype
    """The coarsest precision of the pass."""
    passes: int = 1
    """Backward passes accumulated in the gradients; only the last is replayed."""


def diagnose(suspects: SuspectIdentities, replay: Replay) -> list[Diagnosis]:
    """Decide each suspected identity by replaying the pass; one diagnosis for each, in order.

    The plan has one row per suspect, so that two to eleven passes decide all of them together.
    """
    count = len(suspects.symmetries)
    plan = Plan.of(suspects.symmetries, kernels=False)
    theta = {name: suspects.theta[name].detach() for name in plan.needs}
    wanted = {name: suspects.theta[name] for name in plan.needs}
    try:
        first = replay.gradients(wanted)
        sample = sample_noise(plan, theta, first, (replay.gradients(wanted, scale=SCALE),))
        limits = _limits(suspects, plan, sample)
        if np.any(~(suspects.residuals <= limits) & (plan.entries < _FEW)):
            # One number may be small by chance: a ratio to it says nothing.
            sample = sample_noise(plan, theta, first, (replay.gradients(wanted, scale=c) for c in SCALES))
            limits = _limits(suspects, plan, sample)
        lost = _underflow(replay, plan, theta, wanted, first, suspects)
    except Exception as problem:
        # The one boundary to the user's program: it may refuse to run a second time, or run out of memory.
        reason = str(problem) if isinstance(problem, ReplayError) else f"{type(problem).__name__}: {problem}"
        LOGGER.info("replay failed: %s", reason)
        text = MEANING[Origin.UNKNOWN].format(reason=reason.splitlines()[0][:200] if reason else "unknown")
        return [Diagnosis(origin=Origin.UNKNOWN, limit=math.nan, message=text)] * count
    limits = np.maximum(limits, lost)
    origins = [Origin.ROUNDING] * count
    wrong = np.flatnonzero(~(suspects.residuals <= limits) | (suspects.factors & (lost < suspects.residuals)))
    again = sample.residuals <= np.maximum(
        suspects.floors, noise_multiples(plan.entries, sample.samples) * sample.sigmas
    )
    again &= ~coherent(plan.symmetries, theta, first, sample.residuals, suspects.floors)
    # Hardware corrupts entries, rows or tiles; one factor on a whole leg is something that a program did, and what it
    # did to a parameter is seen by every identity of that parameter.
    changed = {
        name for index in wrong.tolist() if suspects.factors[index] for name in suspects.symmetries[index].parameters
    }
    for index in wrong.tolist():
        scaled = not changed.isdisjoint(suspects.symmetries[index].parameters)
        gone = Origin.LOOP if scaled else Origin.TRANSIENT
        origins[index] = gone if again[index] else Origin.PROGRAM
    kernel, trusted = "", set[str]()
    rest = [index for index in wrong.tolist() if not again[index]]
    holds = _holding(replay, plan, wanted, suspects.floors)
    if rest:
        rest = _drawn_anew(replay, plan, wanted, first, suspects, rest, limits, origins)
    if rest:
        rest, kernel = _mended_by_kernels(holds, rest, limits, origins, trusted)
    reason = _NOT_SAMPLED
    if rest and replay.widens:
        _mended_by_precision(holds, plan, wanted, rest, suspects, sample.residuals, origins)
    elif rest:
        # What the forward pass rounds is never gross.
        reason = _NOT_WIDENED
        for index in rest:
            if suspects.residuals[index] <= unmistakable(suspects.precision, suspects.symmetries[index]):
                origins[index] = Origin.UNKNOWN
    words = {"kernel": kernel, "precision": _name(suspects.precision), "reason": reason, "evidence": _WHOLE_LEG}
    words["trusted"] = " and ".join(sorted(trusted))
    words["where"] = place_of(next(iter(wanted.values())))
    return [
        Diagnosis(origin=origin, limit=float(limit), message=MEANING[origin].format(**words))
        for origin, limit in zip(origins, limits, strict=True)
    ]


_FEW = 16
"""Entries of an identity below which one sample of its noise does not bound another: see `noise_multiples`."""


def _limits(suspects: SuspectIdentities, plan: Plan, sample: NoiseSample) -> NDArray[np.float64]:
    """Return the relative residuals that measured rounding explains."""
    # Errors of accumulated passes are independent and add in squares.
    multiples = noise_multiples(plan.entries, sample.samples) * math.sqrt(suspects.passes)
    return np.maximum(suspects.floors, multiples * sample.sigmas)


_LIFT = 64.0
"""Factor on the output gradient that lifts small numbers out of the range in which float16 loses digits."""


def _underflow(
    replay: Replay, plan: Plan, theta: Tensors, wanted: Tensors, first: Tensors, suspects: SuspectIdentities
) -> NDArray[np.float64]:
    """Return the relative residuals that underflow in float16 leaves; zeros in other precisions.

    A power of two commutes with rounding, so that a pass whose output gradient is multiplied by one gives the same
    gradients bit for bit, wrong ones too. Numbers below 6e-5 are the exception: they lose digits, or vanish, and the
    larger pass keeps more of them. Its difference is what underflow took, but for the small part that it still takes.
    """
    if suspects.precision != torch.float16:
        return np.zeros(len(plan.symmetries))
    sizes = difference_sizes(plan, theta, first, replay.gradients(wanted, scale=_LIFT))
    scales = balance_of(plan, theta, first).scales
    # The lifted pass may overflow, which says nothing about underflow.
    sizes = np.where(np.isfinite(sizes), sizes, 0.0)
    return 2 * sizes / np.where(scales > 0, scales, np.inf)


_SAMPLES = 8
"""Passes at nearby weights that are made at most; most rounding is explained by the first.

One number a of rounding survives a sample a' if |a' − a|/√2 ≤ |a|/6. For normal numbers of any deviation this has a
chance of 0.114 at most, and of 3e-8 eight times in a row.
"""


def _drawn_anew(
    replay: Replay,
    plan: Plan,
    wanted: Tensors,
    first: Tensors,
    suspects: SuspectIdentities,
    rest: list[int],
    limits: NDArray[np.float64],
    origins: list[Origin],
) -> list[int]:
    """Find residuals that change when weights move by their spacing; return the others.

    Fused attention takes its softmax correction from an output that the forward pass rounded: an error that repeats and
    is linear in the output gradient, so that scaling does not sample it, and that may lie along one leg, because it is
    one number for every query. A defect is a smooth function of the weights and stays (`nearby_weights`).
    """
    try:
        first_moments = _moments(plan, wanted, first)
        scales = balance_of(plan, {n: p.detach() for n, p in wanted.items()}, first).scales
        repeated = _moments(plan, wanted, replay.gradients(wanted))
    except Exception as problem:
        # The one boundary to the user's program, which may run out of memory at any time.
        return _leave_undecided(rest, origins, problem)
    for index in rest:
        if SIGMAS * _along(suspects, index, first_moments[index], repeated[index]) >= float(
            np.linalg.norm(first_moments[index])
        ):
            # The same pass gives another residual every time: a race, whatever weights do.
            origins[index] = Origin.TRANSIENT
    noise = dict.fromkeys(rest, 0.0)
    for seed in range(_SAMPLES):
        left = [index for index in rest if origins[index] is Origin.PROGRAM]
        if not left:
            break
        try:
            with torch.no_grad(), nearby_weights(suspects.theta, suspects.precision, seed):
                there = _moments(plan, wanted, replay.gradients(wanted, scale=SCALE))
        except Exception as problem:
            # The same boundary.
            return _leave_undecided(left, origins, problem)
        for index in left:
            noise[index] = max(noise[index], _along(suspects, index, first_moments[index], there[index]))
            if SIGMAS * noise[index] >= float(np.linalg.norm(first_moments[index])) and scales[index] > 0:
                origins[index] = Origin.ROUNDING
                limits[index] = max(limits[index], SIGMAS * noise[index] / scales[index], suspects.residuals[index])
    return [index for index in rest if origins[index] is Origin.PROGRAM]


def _leave_undecided(indices: Sequence[int], origins: list[Origin], problem: Exception) -> list[int]:
    """Mark residuals whose rounding could not be sampled as not replayed; no other replay can blame the program."""
    LOGGER.info("rounding was not sampled at nearby weights: %s", problem)
    for index in indices:
        if origins[index] is Origin.PROGRAM:
            origins[index] = Origin.UNKNOWN
    return []


def _along(suspects: SuspectIdentities, index: int, moments: NDArray[np.float64], others: NDArray[np.float64]) -> float:
    """Return the noise of one moment from two samples. A wrong factor is one direction: only noise along it counts."""
    size = float(np.linalg.norm(moments))
    if suspects.factors[index] and size:
        return abs(float(moments @ (others - moments))) / size / math.sqrt(2)
    return float(np.linalg.norm(others - moments)) / math.sqrt(2)


def _moments(plan: Plan, parameters: Tensors, gradients: Tensors) -> list[NDArray[np.float64]]:
    """Return μ(θ, G) of every identity with the parameters as they are now."""
    points = {name: parameter.detach() for name, parameter in parameters.items()}
    with torch.no_grad():
        moments = plan.evaluate((Point(points), Direction({n: gradients[n] for n in plan.needs})), [(0, 1)]).values()
    return [mu.flatten() for mu in to_host(moments)]


Holds = Callable[[PassForm, NDArray[np.float64]], NDArray[np.bool_]]

_SHRINKS = 8.0
"""Factor by which a residual of rounding shrinks in higher precision, at least: units differ by 2¹³ and more, and a
defect does not shrink at all."""


def _holding(replay: Replay, plan: Plan, wanted: Tensors, floors: NDArray[np.float64]) -> Holds:
    """Whether identities hold in other forms, against limits; none does in a form that the program does not run in."""
    theta = {name: parameter.detach() for name, parameter in wanted.items()}

    def holds(form: PassForm, limits: NDArray[np.float64]) -> NDArray[np.bool_]:
        try:
            gradients = replay.gradients(wanted, form=form)
        except Exception as problem:
            # Kernels may not support a precision, or the plain form may not fit into memory.
            LOGGER.info("replay as %s failed: %s", form, problem)
            return np.zeros(len(plan.symmetries), dtype=bool)
        with torch.no_grad():
            residuals = balance_of(plan, theta, gradients).residuals
        return (residuals <= limits) & ~coherent(plan.symmetries, theta, gradients, residuals, floors)

    return holds


def _mended_by_kernels(
    holds: Holds, rest: list[int], limits: NDArray[np.float64], origins: list[Origin], trusted: set[str]
) -> tuple[list[int], str]:
    """Run the pass with reference kernels; return what stays broken, and which switch mended the others.

    Functions whose backward is by design not the derivative of their forward are not at fault; `trusted` gets their
    names.
    """
    plain = holds(PLAIN, limits)
    mended = [index for index in rest if plain[index]]
    if not mended:
        return rest, ""
    still_holds = holds(replace(PLAIN, trusted=trusted), limits)
    if trusted:
        for index in mended:
            origins[index] = origins[index] if still_holds[index] else Origin.DESIGN
        rest = [index for index in rest if origins[index] is not Origin.DESIGN]
        mended = [index for index in mended if still_holds[index]]
        if not mended:
            return rest, ""
    for index in mended:
        origins[index] = Origin.KERNEL
    switches: Mapping[str, PassForm] = {
        "eager": PassForm(eager=True),
        "attention": PassForm(attention=True),
        "functions": PassForm(functions=True),
    }
    blamed = []
    for name, form in switches.items():
        alone = holds(form, limits)
        if all(alone[index] for index in mended):
            blamed.append(KERNELS[name])
    return [index for index in rest if index not in mended], " or ".join(blamed) or "several of them together"


def _mended_by_precision(
    holds: Holds,
    plan: Plan,
    wanted: Tensors,
    rest: list[int],
    suspects: SuspectIdentities,
    residuals: NDArray[np.float64],
    origins: list[Origin],
) -> None:
    """Run the pass in higher precision; what it mends is rounding that the scaled pass did not sample."""
    stored = coarsest(*(p.dtype for p in wanted.values()))
    for form in wide_forms(suspects.precision):
        # Gradients are stored in the precision of their parameters, whatever they were computed in.
        precise = stored if stored in HALF else torch.float32
        limits = np.maximum(suspicious(precise, plan.entries), residuals / _SHRINKS)
        precisely = holds(form, limits)
        for index in rest:
            if precisely[index]:
                origins[index] = Origin.PRECISION
        rest = [index for index in rest if not precisely[index]]
        if not rest:
            return


def place_of(tensor: Tensor) -> str:
    """Return the rank of this process and the device of a tensor, in words."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return f"rank {rank}, {tensor.device}"


def _name(precision: torch.dtype) -> str:
    return str(precision).removeprefix("torch.")
