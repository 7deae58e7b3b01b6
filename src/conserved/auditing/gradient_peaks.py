r"""Find single entries of gradients that a bit flip has put there, also where no law spans the parameter.

A flip of an exponent bit leaves one entry that is larger than all others. Each step, the largest entry of every
gradient is read, as a share of that gradient's norm: n entries of about equal size have a largest one of √(2 ln n / n)
of their norm, 0.4 % for a matrix of 1.6 million. An entry is suspected if its share exceeds that of every earlier step
by a half. That happens in clean runs too (a rare token, a spike of the loss), so it raises nothing by itself: the same
pass is run again, and decides. An entry that the replay does not have, up to the one factor between the two passes, was
not computed.
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
from conserved.auditing.reference_comparison import common_factor
from conserved.auditing.replay import Replay
from conserved.symmetry import Tensors
from conserved.verdict import Evidence, Status, Verdict

LOGGER = logging.getLogger("conserved.audit")

_STEPS = 64
"""Steps whose largest entries are remembered."""

_FEWEST = 3
"""Steps below which nothing sticks out yet."""

_LARGER = 1.5
"""How many times the largest share so far makes an entry suspected. The smaller it is, the more passes are replayed;
what is called corrupted does not depend on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorruptedEntry:
    """An entry of a gradient in `.grad`, and what the same pass gives there when it is run again."""

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


def corruption_verdict(found: Sequence[CorruptedEntry]) -> Verdict:
    """Return the verdict on a pass with corrupted entries."""
    text = str(found[0])
    message = f"{text[0].upper()}{text[1:]}. Not reproducible: a bit flip, a race or a bad device."
    evidence = Evidence(what="share of the gradient's norm in one corrupted entry", value=found[0].share, limit=0.0)
    return Verdict(status=Status.REFUTED, message=message, evidence=(evidence,))


class PeakHistory:
    """The largest entry of every gradient, as a share of its norm, over the last steps of a run."""

    def __init__(self) -> None:
        self._shares: dict[str, deque[float]] = {}

    def suspects(self, gradients: Tensors) -> list[str]:
        """Return the gradients whose largest entry sticks out of earlier steps, and remember those that do not."""
        names = [name for name, gradient in gradients.items() if not hasattr(gradient, "full_tensor")]
        plain = [_dense(gradients[name]) for name in names]
        result = []
        for name, share in zip(names, _peak_shares(plain), strict=True):
            earlier = self._shares.setdefault(name, deque(maxlen=_STEPS))
            # The largest share there can be is 1: a gradient of one entry never sticks out.
            if len(earlier) >= _FEWEST and share > _LARGER * max(earlier):
                result.append(name)
            else:
                earlier.append(share)
        return result

    def corrupted(self, parameters: Tensors, gradients: Tensors, replay: Replay | None) -> tuple[CorruptedEntry, ...]:
        """Return the entries that stick out and that the pass does not give again.

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
        found = [_compare(name, gradients[name], again[name], factor, clipped) for name in names]
        for name, item in zip(names, found, strict=True):
            if item is None:
                (share,) = _peak_shares([_dense(gradients[name])])
                self._shares[name].append(share)
        return tuple(item for item in found if item is not None)


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
    """The largest entry, if less than half of it is reproducible."""
    flat = gradient.detach().reshape(-1)
    place = int(flat.abs().argmax())
    value, replayed = float(flat[place]), float(again.reshape(-1)[place]) * factor
    if abs(value - replayed) <= 0.5 * abs(value) or abs(value) in clipped:
        return None
    norm = float(torch.linalg.vector_norm(flat, dtype=torch.float64))
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), gradient.shape))
    share = abs(value) / norm if norm and math.isfinite(norm) else 1.0
    return CorruptedEntry(
        parameter=name, index=index, value=value, replayed=replayed, share=share, where=place_of(gradient)
    )


def _peak_shares(gradients: Sequence[Tensor]) -> list[float]:
    """Return the largest magnitude of each, over its norm."""
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for number, gradient in enumerate(gradients):
        if gradient.numel():
            groups.setdefault((gradient.dtype, gradient.device), []).append(number)
    shares = [0.0] * len(gradients)
    for (kind, _), numbers in groups.items():
        some = [gradients[number] for number in numbers]
        precise = torch.promote_types(kind, torch.float32)
        peaks = torch.stack(torch._foreach_norm(some, math.inf, precise))
        norms = torch.stack(torch._foreach_norm(some, 2, precise))
        ratios = torch.where(norms > 0, peaks / norms, 0.0)
        # The squares of an entry above 1e19 overflow, and it is all there is of the norm.
        ratios = torch.where(norms.isinf() & peaks.isfinite(), 1.0, ratios)
        for number, ratio in zip(numbers, ratios.double().cpu().tolist(), strict=True):
            shares[number] = ratio if math.isfinite(ratio) else 1.0
    return shares


def _dense(gradient: Tensor) -> Tensor:
    # Entries of a sparse gradient may be listed twice, so its values have another norm than their sum.
    return gradient.coalesce().values() if gradient.is_sparse else gradient
