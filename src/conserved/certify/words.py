"""Which fields and brackets to prove independent, chosen in floating point.

The choice needs no trust. It should be well conditioned, so that the proof is easy: rows are taken by largest
remainder, and a bracket is scaled by the terms it is the difference of, so that one that vanishes is never taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from conserved.certify.arithmetic import Array, Floats
from conserved.certify.differentiate import Sample, bracket, gradient
from conserved.certify.jets import Jet
from conserved.certify.program import Program

Rows = NDArray[np.float64]

_SMALLEST = 1e-9
"""Remainders below this are not taken for new directions."""

DEEPEST = 4
"""Brackets are nested at most this deep."""


@dataclass(slots=True, eq=False)
class Choice:
    """Rows chosen so far, by an orthonormal basis of their span."""

    size: int
    basis: Rows = field(init=False)

    def __post_init__(self) -> None:
        self.basis = np.empty((0, self.size))

    def pick(self, rows: Rows, most: int) -> list[int]:
        """Which rows to add, largest remainder first, until nothing or enough is left."""
        left = self._rest(rows)
        chosen: list[int] = []
        while len(chosen) < most and len(left):
            sizes = np.linalg.norm(left, axis=1)
            best = int(sizes.argmax())
            if sizes[best] < _SMALLEST:
                break
            fresh = left[best] / sizes[best]
            fresh = self._rest(fresh[None])[0]
            fresh /= np.linalg.norm(fresh)
            self.basis = np.vstack([self.basis, fresh])
            left = left - np.outer(left @ fresh, fresh)
            chosen.append(best)
        return chosen

    def _rest(self, rows: Rows) -> Rows:
        for _ in range(2):
            rows = rows - (rows @ self.basis.T) @ self.basis
        return rows


def choose(
    program: Program,
    theta: Sequence[float],
    inputs: Sequence[tuple[Array, ...]],
    target: int,
    seed: int,
    say: Callable[[str], None],
) -> tuple[list[tuple[int, list[int]]], list[list[int]]]:
    """Samples (which input, v) and at most `target` words (places of samples) whose brackets look independent."""
    rng = np.random.default_rng(seed)
    point = Jet({0: np.array(theta)})
    choice = Choice(program.size)
    samples: list[tuple[int, list[int]]] = []
    words: list[list[int]] = []

    def fresh_sample(turn: int) -> int:
        v = rng.integers(-3, 4, program.outputs)
        samples.append((turn % len(inputs), [int(value) for value in v]))
        return len(samples) - 1

    turns = itertools.count()
    for depth in range(DEEPEST + 1):
        before = len(words)
        while len(words) < target:
            count = min(target - len(words) + 8, max(16, program.size // (4 if depth == 0 else 8)))
            if depth == 0:
                candidates = [[fresh_sample(next(turns))] for _ in range(count)]
            else:
                candidates = [rng.choice(len(samples), depth + 1).tolist() for _ in range(count)]
            rows = np.stack([_row(program, point, [_sample(samples[s], inputs) for s in word]) for word in candidates])
            picked = choice.pick(rows, target - len(words))
            words += [candidates[i] for i in picked]
            say(f"brackets of depth {depth}: {len(words)} independent of {program.size}")
            if not picked:
                break
        if len(words) == target or (depth and len(words) == before):
            break
    return _used(samples, words)


def _sample(sample: tuple[int, Sequence[int]], inputs: Sequence[tuple[Array, ...]]) -> Sample:
    which, v = sample
    return Sample(inputs[which], np.array(v, dtype=np.float64))


def _row(program: Program, point: Jet, word: Sequence[Sample]) -> Rows:
    """A bracket over the size of its terms; zero where it is not finite."""
    numbers = Floats()
    with np.errstate(all="ignore"):
        *inner, last = word
        if not inner:
            row = gradient(program, numbers, point, last).value
            size = float(np.linalg.norm(row))
        else:
            a = bracket(program, numbers, point, inner).parts.get(0, np.zeros(program.size))
            both = gradient(program, numbers, Jet({0: point.value, 1: a}), last)
            back = bracket(program, numbers, Jet({0: point.value, 1: both.value}), inner)
            terms = [part.parts.get(1, np.zeros(program.size)) for part in (both, back)]
            row = terms[0] - terms[1]
            size = float(sum(np.linalg.norm(term) for term in terms))
    return row / size if np.isfinite(row).all() and 0 < size < np.inf else np.zeros(program.size)


def _used(
    samples: list[tuple[int, list[int]]], words: Iterable[list[int]]
) -> tuple[list[tuple[int, list[int]]], list[list[int]]]:
    """Samples that words use, renumbered."""
    words = list(words)
    needed = sorted({place for word in words for place in word})
    order = {old: new for new, old in enumerate(needed)}
    return [samples[old] for old in needed], [[order[place] for place in word] for word in words]
