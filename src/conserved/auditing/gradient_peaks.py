r"""Find gradients that a bit flip has changed, also where no law spans the parameter.

A flip of an exponent bit in a gradient leaves one entry that is larger than all others. A flip inside the backward pass
changes one row of the gradient of the operation it hits, and, if it is large, everything before that operation. Each
step, three numbers of every gradient are read: its norm, and the largest entry and the largest row as shares of it. n
entries of about equal size have a largest one of √(2 ln n / n) of their norm, 0.4 % for a matrix of 1.6 million. A
gradient is suspected if a number exceeds that of every earlier step by a half (its norm: if it is four times as large).
That happens in clean runs too (a rare token, a spike of the loss), so it raises nothing by itself: the same pass is run
again, and decides. What the replay does not have, up to the one factor between the two passes, was not computed.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from conserved.auditing.diagnosis import place_of
from conserved.auditing.nearby_weights import rows_of
from conserved.auditing.reference_comparison import common_factor
from conserved.auditing.replay import Replay
from conserved.symmetry import Tensors
from conserved.verdict import Evidence, Status, Verdict

LOGGER = logging.getLogger("conserved.audit")

_STEPS = 64
"""Steps whose largest entries are remembered."""

_FEWEST = 3
"""Steps below which nothing sticks out yet."""

_LARGER = (1.5, 1.5, 4.0)
"""How many times the largest number so far makes a gradient suspected: entry, row, norm. The smaller it is, the more
passes are replayed; what is called corrupted does not depend on it. Norms change with the loss, so they get more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorruptedEntry:
    """The entry of a changed gradient that is furthest from what the same pass gives when it is run again."""

    parameter: str
    index: tuple[int, ...]
    value: float
    replayed: float
    share: float
    """Its magnitude as a share of the norm of the gradient."""
    where: str
    """Rank and device."""

    def __str__(self) -> str:
        at = ", ".join(map(str, self.index))
        return (
            f"the gradient of {self.parameter} is {self.value:.3g} at [{at}], and {self.replayed:.3g} when the same "
            f"pass is run again, on {self.where}"
        )


def corruption_verdict(entries: Sequence[CorruptedEntry]) -> Verdict:
    """Return the verdict on a pass with corrupted entries."""
    text = str(entries[0])
    message = f"{text[0].upper()}{text[1:]}. Not reproducible: a bit flip, a race or a bad device."
    evidence = Evidence(what="share of the gradient's norm in one corrupted entry", value=entries[0].share, limit=0.0)
    return Verdict(status=Status.REFUTED, message=message, evidence=(evidence,))


class PeakHistory:
    """The largest entry, the largest row and the norm of every gradient, over the last steps of a run."""

    def __init__(self) -> None:
        self._past: dict[str, deque[tuple[float, ...]]] = {}

    def suspects(self, gradients: Tensors) -> list[str]:
        """Return the gradients that stick out of earlier steps, and remember those that do not."""
        names = [name for name, gradient in gradients.items() if not hasattr(gradient, "full_tensor")]
        result = []
        for name, peaks in zip(names, _peaks([_dense(gradients[name]) for name in names]), strict=True):
            past = self._past.setdefault(name, deque(maxlen=_STEPS))
            # The largest share there can be is 1: a gradient of one entry sticks out by its norm alone.
            limits = [factor * max(numbers) for factor, numbers in zip(_LARGER, zip(*past, strict=True), strict=False)]
            if len(past) >= _FEWEST and any(peak > limit for peak, limit in zip(peaks, limits, strict=True)):
                result.append(name)
            else:
                past.append(peaks)
        return result

    def corrupted(self, parameters: Tensors, gradients: Tensors, replay: Replay | None) -> tuple[CorruptedEntry, ...]:
        """Return the furthest entries of gradients that stick out and that the pass does not give again.

        Args:
            parameters: the trained parameters, by name.
            gradients: their gradients.
            replay: the pass that all of these are gradients of; without one nothing is called corrupted.
        """
        names = self.suspects(gradients)
        if not names or replay is None:
            return ()
        # Parameters that do not stick out give the factor between the two passes: clipping, a loss scale.
        others = [name for name in parameters if name not in names and name in gradients]
        wanted = {name: parameters[name] for name in (*names, *sorted(others, key=lambda n: parameters[n].numel())[:8])}
        try:
            again = replay.gradients(wanted)
        except Exception as problem:
            # The one boundary to the user's program: it may refuse to run a second time.
            LOGGER.info("replay failed: %s", problem)
            return ()
        factor = common_factor(gradients, {name: again[name] for name in wanted if name not in names} or again)
        clipped = _repeated_peaks(gradients.values())
        comparisons = [_compare(name, gradients[name], again[name], factor, clipped) for name in names]
        for name, item in zip(names, comparisons, strict=True):
            if item is None:
                self._past[name].extend(_peaks([_dense(gradients[name])]))
        return tuple(item for item in comparisons if item is not None)


def _repeated_peaks(gradients: Iterable[Tensor]) -> set[float]:
    """Return the largest magnitudes that occur in several entries: the value that gradients were clipped at.

    Clipping by value leaves no common factor between a gradient and the pass, and no flipped bit makes two entries
    equal.
    """
    counts: Counter[float] = Counter()
    for gradient in gradients:
        sizes = _dense(gradient).detach().abs()
        if sizes.numel():
            largest = sizes.max()
            counts[float(largest)] += int((sizes == largest).sum())
    return {size for size, count in counts.items() if count > 1}


def _compare(
    name: str, gradient: Tensor, again: Tensor, factor: float, clipped: Collection[float]
) -> CorruptedEntry | None:
    """Return the entry that is furthest off, if less than half of the largest entry, row, or of all is reproducible."""
    kind = torch.promote_types(gradient.dtype, torch.float32)
    gradient, again = (g.to_dense() if g.is_sparse else g for g in (gradient.detach(), again))
    values, replayed = rows_of(gradient).to(kind), rows_of(again).to(kind) * factor
    away = values - replayed
    largest = divmod(int(values.abs().argmax()), values.shape[1])
    row = int(torch.linalg.vector_norm(values, dim=1).argmax())
    parts = [(away, values), (away[row], values[row]), (away[largest], values[largest])]
    if abs(float(values[largest])) in clipped or all(
        _size(difference) <= 0.5 * _size(part) for difference, part in parts
    ):
        return None
    position = int(away.abs().nan_to_num(nan=math.inf).argmax())
    norm = _size(values)
    value = float(values.reshape(-1)[position])
    return CorruptedEntry(
        parameter=name,
        index=tuple(int(i) for i in torch.unravel_index(torch.tensor(position), gradient.shape)),
        value=value,
        replayed=float(replayed.reshape(-1)[position]),
        share=abs(value) / norm if norm and math.isfinite(norm) else 1.0,
        where=place_of(gradient),
    )


def _size(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


def _peaks(gradients: Sequence[Tensor]) -> list[tuple[float, ...]]:
    """Return of each gradient its largest magnitude and its largest row over its norm, and its norm."""
    tables: dict[torch.device, list[Tensor]] = {}
    order: dict[torch.device, list[int]] = {}
    for number, gradient in enumerate(gradients):
        if gradient.numel():
            precise = torch.promote_types(gradient.dtype, torch.float32)
            rows = torch.linalg.vector_norm(rows_of(gradient), dim=1, dtype=precise)
            entry = torch.linalg.vector_norm(gradient, math.inf, dtype=precise)
            numbers = torch.stack((entry, rows.max(), torch.linalg.vector_norm(rows)))
            tables.setdefault(gradient.device, []).append(numbers)
            order.setdefault(gradient.device, []).append(number)
    peaks: list[tuple[float, ...]] = [(0.0, 0.0, 0.0)] * len(gradients)
    for device, table in tables.items():
        for number, (entry, row, norm) in zip(order[device], torch.stack(table).double().tolist(), strict=True):
            # The squares of an entry above 1e19 overflow, and it is all there is of the norm.
            shares = (entry / norm, row / norm) if 0 < norm < math.inf else (float(norm > 0), float(norm > 0))
            peaks[number] = *shares, norm
    return peaks


def _dense(gradient: Tensor) -> Tensor:
    # Entries of a sparse gradient may be listed twice, so its values have another norm than their sum.
    return gradient.coalesce().values() if gradient.is_sparse else gradient
