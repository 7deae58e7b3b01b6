r"""Compare the gradients of a pass with those of its reference form: every parameter, row by row.

Identities see what stands between two legs. They do not see the derivative of a gate, dQ and dK that share a wrong
factor, or a factor between the outputs and all weights. A replay in reference form sees these: it is a second
implementation of the same program (`reference_form`). Three replays of one pass give three sets of gradients,

    A   as it was run
    W   in reference form: eager, math attention, functions inlined, in higher precision
    S   the same as W, with every result that the run stored in its own precision rounded to it at random

and S − W is one sample of what rounding the forward and the backward pass does. A right program has A − W of the size
of S − W, for every parameter and for every row of it; a defect does not care about precision. Two numbers of a row are
compared: ‖A_r − W_r‖, and the component of A_r − W_r along W_r, which is what a wrong factor leaves and has 1/√m of the
rounding of m entries. The limit of row r, with n_r the same number of S − W and w_r = ‖W_r‖, is

    6 √( n_r² + mean n² + w_r² Σ n² / Σ w² )

because one sample of one number may be small by chance: the other terms are what an average row has, in absolute terms
and relative to its size. Rows are what operations write (an output of a linear map, a row of an embedding), so that one
of ten thousand is seen as well as all. A parameter of which 6 σ exceed the gradient itself is not compared: rounding is
amplified there, and one sample does not bound another.

Kernels may round more than their results: the backward of flash attention takes its softmax correction from a rounded
output, and 38 of 2,816 clean passes on an H200 differed beyond 6 σ in some row. Differences beyond the limit are
therefore held against the rounding of the run's own kernels too, which passes at nearby weights sample
(`nearby_weights`). n_r² then has the largest of these samples added. Up to eight are drawn: a defect stays beyond its
limit however often rounding is sampled. Differences that this explains are listed as `imprecise`.

Gradients in `.grad`, G, are compared with the pass only where the caller says that they are its gradients: loops clip
and add to them. There c A, with one factor c for clipping and loss scales, is compared with G in the same way, and the
noise is that of two passes as they were run, which is zero where kernels are deterministic.

In single precision sums of K products round K times in their own precision, which rounding each result once does not
sample: K random terms have partial sums of size √j, and errors u√j of those add up to u K/√2, √(K/2) of the rounding of
the result. Half-precision products are accumulated in float32.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from conserved.auditing.call_log import CallLog
from conserved.auditing.diagnosis import KERNELS
from conserved.auditing.nearby_weights import difference, rows_of, sample_own_rounding
from conserved.auditing.reference_form import PassForm
from conserved.auditing.replay import Replay, ReplayError
from conserved.plain_data import record_of
from conserved.symmetry import Tensors
from conserved.tolerances import ROOT_MEAN_SQUARE, SIGMAS
from conserved.verdict import Evidence, Status, Verdict

LOGGER = logging.getLogger("conserved.audit")

SEEN = 0.1
"""An error of this share of a row must be visible for its entries to count as compared."""


_FEWEST = 16
"""Rows below which the mean of their sampled rounding is a matter of chance: it varies by √(2/n)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientDifference:
    """The relative difference of the gradient of one parameter from its reference, in the row where it is largest."""

    parameter: str
    difference: float
    limit: float
    row: int | None = None
    """The furthest row; None if the parameter as a whole is further off than any of its rows."""
    visible: float = 0.0
    """The share of rows of which a wrong factor of 1.1 would have been seen."""
    smallest: float = math.inf
    """The smallest wrong factor of a typical row that would have been seen, less one."""
    entries: int

    @property
    def excess(self) -> float:
        """The difference in units of its limit."""
        return self.difference / self.limit if self.limit > 0 else math.inf if self.difference > 0 else 0.0

    def __str__(self) -> str:
        where = self.parameter if self.row is None else f"row {self.row} of {self.parameter}"
        return f"{where} is off by {self.difference:.2g} of it, rounding explains {self.limit:.1g}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReferenceComparison:
    """The gradients of one pass beside those of its reference form, by parameter."""

    differences: tuple[GradientDifference, ...] = ()
    """One for every trained parameter, furthest first."""
    imprecise: tuple[GradientDifference, ...] = ()
    """Differences beyond what rounding every result explains, which the rounding inside of the run's kernels does."""
    foreign: tuple[GradientDifference, ...] = ()
    """Gradients in `.grad` that are not those of the pass, furthest first."""
    form: str = ""
    """The reference in words."""
    cause: str = ""
    """The part of the run's form that the differences come from; empty if there are none."""
    noise: float = 0.0
    """‖S − W‖ / ‖W‖ over all parameters: the share of the gradient that is rounding."""
    away: float = 0.0
    """‖A − W‖ / ‖W‖ over all parameters."""
    trusted: tuple[str, ...] = ()
    """Autograd functions whose own backward was used, because it is by design not the derivative of their forward."""
    obstacle: str = ""
    """Why nothing was compared; empty if it was."""

    @property
    def failures(self) -> tuple[GradientDifference, ...]:
        """Gradients that differ by more than rounding, furthest first."""
        return tuple(item for item in self.differences if item.excess > 1)

    @property
    def coverage(self) -> float:
        """The share of trained entries of whose row an error of 10 % would have been seen."""
        total = sum(item.entries for item in self.differences)
        return sum(item.visible * item.entries for item in self.differences) / total if total else 0.0

    @property
    def ok(self) -> bool:
        """Whether no gradient differs from its reference."""
        return not self.failures and not self.foreign

    @property
    def verdict(self) -> Verdict:
        """The comparison in one sentence."""
        if self.obstacle:
            return Verdict(status=Status.INCONCLUSIVE, message=f"Not compared with reference form: {self.obstacle}.")
        worst = self.failures or self.foreign
        if not self.differences or (not worst and self.coverage == 0):
            message = "Rounding is as large as the gradients: nothing of them can be compared with reference form."
            return Verdict(status=Status.INCONCLUSIVE, message=message)
        evidence = tuple(
            Evidence(what=f"difference of {item.parameter} from its reference", value=item.difference, limit=item.limit)
            for item in (worst or self.differences)[:8]
        )
        if not worst:
            message = f"{self.coverage:.0%} of trained entries agree with {self.form}, row by row, to rounding"
            if self.trusted:
                message += f", with the backward of {' and '.join(self.trusted)} as it is"
            if self.imprecise:
                message += f", but for the precision of kernels in {len(self.imprecise)} parameters"
            message += "."
            return Verdict(status=Status.VERIFIED, message=message, evidence=evidence[:1])
        count = f"The gradients of {len(worst)} of {len(self.differences)} parameters"
        if self.failures:
            message = f"{count} differ from those in {self.form} by more than rounding: {worst[0]}. "
            message += f"The difference comes from {self.cause}."
        else:
            message = f"{count} are not those of the same pass run again: {worst[0]}. A bit flip, a race or a bad "
            message += "device, or code that changed gradients after backward()."
        return Verdict(status=Status.REFUTED, message=message, evidence=evidence)

    def record(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        fields = record_of(self, "form obstacle coverage")
        fields["trusted"] = [*self.trusted]
        return fields | {"failures": [str(item) for item in self.failures[:20]]}

    def __str__(self) -> str:
        return self.verdict.message


def compare_with_reference(
    replay: Replay,
    parameters: Tensors,
    precision: torch.dtype,
    *,
    gradients: Tensors | None = None,
    factors: torch.dtype | None = None,
) -> ReferenceComparison:
    """Replay a pass in reference form and compare the gradients of all parameters.

    Args:
        replay: the pass.
        parameters: the trained parameters, by name.
        precision: the coarsest precision of the pass.
        gradients: gradients that are said to be those of this pass, up to one factor on all of them.
        factors: the precision that kernels may round factors of products to, where it is coarser than `precision`.
            Weights are moved by its spacing then, which samples that rounding.

    Returns:
        The comparison. It says in `obstacle` if the pass could not be replayed.
    """
    wide = torch.float64 if precision in (torch.float32, torch.float64) else torch.float32
    narrow = torch.float32 if precision == torch.float64 else precision
    log, trusted = CallLog(), set[str]()
    form = PassForm(eager=True, attention=True, functions=True, wide=wide, log=log, trusted=trusted)
    obstacle = _lack_of_memory(parameters)
    if obstacle:
        return ReferenceComparison(obstacle=obstacle)
    try:
        own = replay.gradients(parameters, form=PassForm(log=log))
        if log.opaque:
            return ReferenceComparison(obstacle=log.opaque)
        right = replay.gradients(parameters, form=form)
        rounded = replay.gradients(parameters, form=replace(form, rounded=narrow))
        with torch.no_grad():
            floor = _floor(right, narrow, log.longest)
            noises = {name: [difference(rounded[name], right[name])] for name in right}
            noise = _norm({name: items[0] for name, items in noises.items()}) / (floor.everything or 1.0)
            away = _norm({name: difference(own[name], right[name]) for name in own}) / (floor.everything or 1.0)
            by_parameter = {item.parameter: item for item in _differences(own, right, noises, floor)}
        del rounded
        selects = bool(log.pinned)
        foreign: list[GradientDifference] = []
        if gradients is not None:
            rounding = {name: items[0] for name, items in noises.items()}
            foreign = foreign_gradients(replay, parameters, gradients, own, narrow, selects, rounding)
        beyond = [item for item in by_parameter.values() if item.excess > 1]
        form = replace(form, trusted=set())
        for seed in range(_SAMPLES):
            wanted = {name: parameters[name] for name, item in by_parameter.items() if item.excess > 1}
            if not wanted:
                break
            some = {name: own[name] for name in wanted}
            sample = sample_own_rounding(replay, parameters, factors or narrow, form, some, right, seed=seed)
            for name, item in sample.items():
                noises[name].append(item)
            by_parameter |= {item.parameter: item for item in _differences(some, right, noises, floor)}
        wanted = {name: parameters[name] for name, item in by_parameter.items() if item.excess > 1}
        cause = _cause(replay, wanted, by_parameter, partial(_differences, right=right, noises=noises, floor=floor))
    except Exception as problem:
        # The one boundary to the user's program: kernels may not support a precision, or memory may not suffice.
        reason = str(problem) if isinstance(problem, ReplayError) else f"{type(problem).__name__}: {problem}"
        LOGGER.info("comparison with reference form failed: %s", reason)
        return ReferenceComparison(obstacle=(reason.splitlines() or ["unknown"])[0][:200].rstrip("."))
    return ReferenceComparison(
        differences=tuple(sorted(by_parameter.values(), key=lambda item: -item.excess)),
        imprecise=tuple(item for item in beyond if item.parameter not in wanted),
        foreign=tuple(foreign),
        form=f"{str(wide).removeprefix('torch.')} and reference kernels",
        cause=cause,
        noise=noise,
        away=away,
        trusted=tuple(sorted(trusted)),
    )


_SAMPLES = 8
"""Passes at nearby weights that are made at most; most rounding is explained by the first.

The component of a row along its gradient is one number. If it is rounding, a sample leaves it beyond its limit with a
chance of 0.114 at most (`diagnosis` has the reason), and all of 10⁵ rows must be explained: 10⁵ · 0.114⁸ = 0.003.
"""


def _differences(
    own: Tensors, right: Tensors, noises: Mapping[str, Sequence[Tensor]], floor: _Floor
) -> list[GradientDifference]:
    return [_difference(name, _Rows.of(own[name], right[name], noises[name]), floor, own[name].numel()) for name in own]


def _cause(
    replay: Replay,
    parameters: Tensors,
    failing: Mapping[str, GradientDifference],
    compare: Callable[[Tensors], list[GradientDifference]],
) -> str:
    """Name the switches of the reference form that remove differences; empty if there are none."""
    if not parameters:
        return ""
    causes = []
    for name, words in KERNELS.items():
        form = PassForm(eager=name == "eager", attention=name == "attention", functions=name == "functions")
        differences = compare(replay.gradients(parameters, form=form))
        # What is left may be the precision of other kernels: a defect that goes away takes most of it along.
        if any(
            difference.excess <= max(1.0, failing[difference.parameter].excess / _SHRINKS) for difference in differences
        ):
            causes.append(words)
    return " or ".join(causes) or "several kernels together, or the precision of one"


_SHRINKS = 4.0
"""Factor by which a difference shrinks at least when what caused it is taken away."""


def _lack_of_memory(parameters: Tensors) -> str:
    """Say that a device has not enough free memory for three sets of wider gradients; empty if it has.

    Activations of a wider pass come on top. Their size is known only when the pass is run; if they do not fit, it
    fails, and that is the obstacle then.
    """
    for device in {p.device for p in parameters.values() if p.device.type == "cuda"}:
        allocated = torch.cuda.memory_allocated(device)
        needed = sum(12 * p.numel() for p in parameters.values() if p.device == device)
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - allocated
        if needed > free:
            return f"it needs about {needed / 2**30:.0f} GiB on {device}, and {free / 2**30:.0f} are free"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rows:
    """Numbers of the rows of one gradient: differences from the reference, sampled rounding, sizes."""

    away: NDArray[np.float64]
    along: NDArray[np.float64]
    """The component of the difference along the reference."""
    noise: NDArray[np.float64]
    noise_along: NDArray[np.float64]
    sizes: NDArray[np.float64]

    @staticmethod
    def of(own: Tensor, right: Tensor, noises: Sequence[Tensor], factor: float = 1.0) -> _Rows:
        """Read rows of a gradient, of its reference times a factor, and of samples of its rounding.

        The first sample is of stored results, the others of the run's own kernels: the largest of those is added.
        """
        kind = torch.promote_types(right.dtype, torch.float32)
        right = rows_of(right).to(kind) * factor
        sizes = torch.linalg.vector_norm(right, dim=1)
        unit = torch.where(sizes > 0, sizes, 1.0)

        def read(item: Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
            norms, along = torch.linalg.vector_norm(item, dim=1), ((item * right).sum(1) / unit).abs()
            return norms.double().cpu().numpy(), along.double().cpu().numpy()

        away, along = read(rows_of(own).to(kind) - right)
        first, *others = (read(rows_of(item).to(kind) * factor) for item in noises)
        noise, noise_along = first
        if others:
            noise = np.hypot(noise, np.max([item[0] for item in others], axis=0))
            noise_along = np.hypot(noise_along, np.max([item[1] for item in others], axis=0))
        lengths = sizes.double().cpu().numpy()
        return _Rows(away=away, along=along, noise=noise, noise_along=noise_along, sizes=lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Floor:
    """Rounding added to what was sampled: storing a gradient once, and sums in single precision."""

    stored: float
    sums: float
    everything: float
    """The norm of all gradients, for parameters whose gradient is zero by cancellation."""
    factor: float = 0.0
    """The relative rounding of a factor on all gradients, which does not average out along a row."""

    def limits(self, noise: NDArray[np.float64], sizes: NDArray[np.float64], entries: float) -> NDArray[np.float64]:
        """Return what rounding explains of every row; `entries` are those that a rounding error averages over."""
        reached = max(int((sizes > 0).sum()), 1)
        total, sampled = float((sizes**2).sum()), float((noise**2).sum())
        share = sampled / total if total > 0 else 0.0
        squares = noise**2 + sampled / reached + sizes**2 * (share + self.stored**2 / entries + self.factor**2)
        if total == 0 and sampled == 0:
            squares = squares + (self.stored * self.everything) ** 2
        return SIGMAS * self.sums * np.sqrt(squares)


def _difference(name: str, rows: _Rows, floor: _Floor, entries: int) -> GradientDifference:
    """Hold the rows of one parameter, and all of them together, against sampled rounding."""
    width = max(entries / len(rows.sizes), 1.0)
    size, total = rows.sizes, float(np.linalg.norm(rows.sizes))
    tensor_norms = np.array([[np.linalg.norm(rows.away)], [np.linalg.norm(rows.noise)], [total]])
    cases = {
        "row": (rows.away, floor.limits(rows.noise, size, 1.0)),
        "row along": (rows.along, floor.limits(rows.noise_along, size, width)),
        "whole": (tensor_norms[0], floor.limits(tensor_norms[1], tensor_norms[2], 1.0)),
    }
    if 0 < total <= cases["whole"][1][0]:
        # Rounding is as large as the gradient: it was amplified, and a sample of it is not a bound.
        return GradientDifference(parameter=name, difference=0.0, limit=1.0, entries=entries)
    if len(size) < _FEWEST:
        del cases["row along"]
    best: tuple[float, str, int] = (-1.0, "whole", 0)
    for kind, (away, limits) in cases.items():
        with np.errstate(divide="ignore", invalid="ignore"):
            excess = np.where(limits > 0, away / limits, np.where(away > 0, np.inf, 0.0))
        row = int(np.argmax(np.nan_to_num(excess, nan=np.inf)))
        value = float(np.nan_to_num(excess[row], nan=np.inf))
        if value > best[0]:
            best = value, kind, row
    _, kind, row = best
    away, limits = cases[kind]
    scale = (total if kind == "whole" else float(size[row])) or total / math.sqrt(len(size)) or floor.everything or 1.0
    along = cases.get("row along", cases["row"])[1]
    reached = size > 0
    return GradientDifference(
        parameter=name,
        row=None if kind == "whole" or len(size) == 1 else row,
        difference=float(away[row]) / scale,
        limit=float(limits[row]) / scale,
        visible=float((along[reached] <= SEEN * size[reached]).mean()) if reached.any() else 0.0,
        smallest=float(np.median(along[reached] / size[reached])) if reached.any() else math.inf,
        entries=entries,
    )


def _floor(right: Tensors, narrow: torch.dtype, longest: int) -> _Floor:
    return _Floor(
        stored=ROOT_MEAN_SQUARE * torch.finfo(narrow).eps / 2,
        sums=math.sqrt(1 + longest / 2) if narrow == torch.float32 else 1.0,
        everything=_norm(right),
    )


def _norm(tensors: Tensors) -> float:
    """Return the norm of all entries of some tensors."""
    return math.sqrt(sum(_norm_of(tensor) ** 2 for tensor in tensors.values()))


def _norm_of(tensor: Tensor) -> float:
    """Return the norm of a tensor, computed in single precision at least."""
    return float(torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32)))


_REPEATS = 3
"""Passes that are run again where the first repetition gives other gradients."""


@torch.no_grad()
def foreign_gradients(
    replay: Replay,
    parameters: Tensors,
    gradients: Tensors,
    own: Tensors,
    narrow: torch.dtype,
    selects: bool = False,
    rounding: Tensors | None = None,
) -> list[GradientDifference]:
    """Return the gradients that are not those of a pass run again, up to one factor on everything; furthest first.

    Kernels that add in another order every time give other gradients when they are run again. If such a program also
    selects (experts, say), rounding decides between equals, and two passes need not be near each other: nothing is
    compared then. Some kernels do so once in many passes, so that a few repetitions agree. Such a pass changes rows by
    little wherever its gradient goes on to, and what rounding every result again explains of them is not foreign. A
    defect changes its own rows, and others not at all.

    Args:
        replay: the pass.
        parameters: the parameters to look at.
        gradients: their gradients.
        own: the gradients of the pass, run again as it was.
        narrow: the precision that gradients are rounded to.
        selects: whether the program draws or selects something on the way.
        rounding: by parameter, a sample of what rounding all results of the pass does to its gradient.
    """
    names = [name for name in own if name in gradients]
    factor = common_factor(gradients, own)
    wanted = {name: parameters[name] for name in names}
    noises = {name: [noise] for name, noise in _changes(own, replay.gradients(wanted)).items()}
    if any(bool(noise.any()) for (noise,) in noises.values()):
        if selects:
            return []
        for _ in range(_REPEATS - 1):
            for name, noise in _changes(own, replay.gradients(wanted)).items():
                noises[name].append(noise)
    stored = ROOT_MEAN_SQUARE * torch.finfo(narrow).eps / 2
    # Factors are computed in float32, from sums of squares that are rounded as well.
    coarse = 4 * torch.finfo(torch.float32).eps
    floor = _Floor(stored=stored, sums=1.0, everything=_norm(own) * abs(factor), factor=coarse)

    def beyond(names: Sequence[str]) -> list[GradientDifference]:
        items = [
            _difference(name, _Rows.of(gradients[name], own[name], noises[name], factor), floor, own[name].numel())
            for name in names
        ]
        return sorted((item for item in items if item.excess > 1), key=lambda item: -item.excess)

    items = beyond(names)
    if items and rounding is not None and _is_spread(gradients, own, factor, floor):
        for item in items:
            # Two passes that round differently differ by two roundings.
            noises[item.parameter].append(math.sqrt(2) * rounding[item.parameter])
        items = beyond([item.parameter for item in items])
    return items


def _is_spread(gradients: Tensors, own: Tensors, factor: float, floor: _Floor) -> bool:
    """Return whether most rows that two passes give differently differ by no more than storing them may change.

    Gradients that were clipped or scaled are all rounded once more, so that they show nothing.
    """
    if abs(factor - 1) > max(floor.stored, floor.factor):
        return False
    changed = small = 0
    for name in own:
        if name in gradients:
            rows = _Rows.of(gradients[name], own[name], [difference(own[name], own[name])], factor)
            differing = rows.away > floor.factor * rows.sizes
            changed += int(differing.sum())
            small += int((differing & (rows.away <= SIGMAS * floor.stored * rows.sizes)).sum())
    return 2 * small > changed


def _changes(first: Tensors, second: Tensors) -> dict[str, Tensor]:
    return {name: difference(gradient, first[name]) for name, gradient in second.items()}


def common_factor(gradients: Tensors, others: Tensors) -> float:
    """Return the factor between two sets of gradients that most of them agree on; 1 if none has an entry."""
    factors = []
    for name, other in others.items():
        norm = _norm_of(other) ** 2
        if norm > 0 and name in gradients:
            factors.append(float((gradients[name].float() * other.float()).sum(dtype=torch.float64)) / norm)
    return float(np.median(factors)) if factors else 1.0
