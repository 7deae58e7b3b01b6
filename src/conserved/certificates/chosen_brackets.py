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

from conserved.certificates.arithmetic import Array, Floats
from conserved.certificates.batches import FloatArrays, NotBatchedError, SampleBatch, chunk_size, stack
from conserved.certificates.differentiate import Sample, bracket, gradient
from conserved.certificates.jets import Jet
from conserved.certificates.program import Program

Vectors = NDArray[np.float64]

_SMALLEST = 1e-9
"""Remainders below this are not taken for new directions."""

DEEPEST = 4
"""Brackets are nested at most this deep."""


@dataclass(slots=True, eq=False)
class Choice:
    """Rows chosen so far, by an orthonormal basis of their span."""

    size: int
    rank: int = 0
    _room: Vectors = field(init=False)

    def __post_init__(self) -> None:
        self._room = np.empty((16, self.size))

    @property
    def basis(self) -> Vectors:
        """Orthonormal rows."""
        return self._room[: self.rank]

    def pick(self, rows: Vectors, most: int) -> list[int]:
        """Return which rows to add, largest remainder first, until nothing or enough is left."""
        remaining = self._rest(rows)
        chosen: list[int] = []
        while len(chosen) < most and len(remaining):
            sizes = np.linalg.norm(remaining, axis=1)
            best = int(sizes.argmax())
            if sizes[best] < _SMALLEST:
                break
            fresh = remaining[best] / sizes[best]
            fresh = self._rest(fresh[None])[0]
            fresh /= np.linalg.norm(fresh)
            self._append(fresh)
            remaining -= np.outer(remaining @ fresh, fresh)
            chosen.append(best)
        return chosen

    def _append(self, fresh: Vectors) -> None:
        if self.rank == len(self._room):
            self._room = np.concatenate([self._room, np.empty_like(self._room)])
        self._room[self.rank] = fresh
        self.rank += 1

    def _rest(self, rows: Vectors) -> Vectors:
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
    """Return samples (input, v) and at most `target` words (sample numbers) whose brackets look independent."""
    rng = np.random.default_rng(seed)
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
            # Several brackets to choose each from: their span is narrow, and what is left of the best is largest.
            wanted = target - len(words)
            most = max(16, program.size // 4) if depth == 0 else max(48, program.size // 2)
            count = min(wanted + 8 if depth == 0 else 3 * wanted + 8, most)
            if depth == 0:
                candidates = [[fresh_sample(next(turns))] for _ in range(count)]
            else:
                candidates = [rng.choice(len(samples), depth + 1).tolist() for _ in range(count)]
            spelled = [[(inputs[samples[s][0]], samples[s][1]) for s in word] for word in candidates]
            rows = bracket_rows(program, theta, spelled)
            picked = choice.pick(rows, target - len(words))
            words += [candidates[i] for i in picked]
            say(f"brackets of depth {depth}: {len(words)} independent of {program.size}")
            if not picked:
                break
        if len(words) == target or (depth and len(words) == before):
            break
    return _used(samples, words)


BracketWord = Sequence[tuple[tuple[Array, ...], Sequence[int]]]
"""Samples: the tensors of an input, and a direction of the output."""


def bracket_rows(program: Program, theta: Sequence[float], words: Sequence[BracketWord]) -> Vectors:
    """Return brackets of words of one length, each over the size of its terms; zero where it is not finite."""
    with np.errstate(all="ignore"):
        try:
            step = chunk_size(program, len(words[0]) - 1)
            terms = [_batch_terms(program, theta, words[i : i + step]) for i in range(0, len(words), step)]
        except NotBatchedError:
            terms = [_single_terms(program, theta, word) for word in words]
        first, second = (np.concatenate(part) for part in zip(*terms, strict=True))
        difference = first - second
        sizes = np.linalg.norm(first, axis=1) + np.linalg.norm(second, axis=1)
        good = np.isfinite(difference).all(axis=1) & (sizes > 0) & np.isfinite(sizes)
        return np.where(good[:, None], difference / np.where(good, sizes, 1)[:, None], 0.0)


def _batch_terms(program: Program, theta: Sequence[float], words: Sequence[BracketWord]) -> tuple[Vectors, Vectors]:
    """Return the two terms that brackets are differences of, for many words at once; the second is zero for fields."""
    batch = SampleBatch(program, FloatArrays())
    point = batch.point(theta)
    *inner, last = (stack([word[k] for word in words]) for k in range(len(words[0])))
    terms = batch.terms(point, inner, last) if inner else (batch.gradient(point, last), Jet({}))
    shape = len(words), program.size
    first, second = (np.broadcast_to(part.parts.get(0, np.zeros((1, program.size))), shape) for part in terms)
    return first, second


def _single_terms(program: Program, theta: Sequence[float], word: BracketWord) -> tuple[Vectors, Vectors]:
    """Return both terms of one word, by the rules that know every operator."""
    numbers, point = Floats(), Jet({0: np.array(theta)})
    *inner, last = (Sample(x, np.array(v, dtype=np.float64)) for x, v in word)
    none = np.zeros(program.size)
    if not inner:
        return gradient(program, numbers, point, last).value[None], none[None]
    a = bracket(program, numbers, point, inner).parts.get(0, none)
    both = gradient(program, numbers, Jet({0: point.value, 1: a}), last)
    back = bracket(program, numbers, Jet({0: point.value, 1: both.value}), inner)
    return both.parts.get(1, none)[None], back.parts.get(1, none)[None]


def _used(
    samples: list[tuple[int, list[int]]], words: Iterable[list[int]]
) -> tuple[list[tuple[int, list[int]]], list[list[int]]]:
    """Return samples that words use, renumbered."""
    words = list(words)
    needed = sorted({index for word in words for index in word})
    order = {old: new for new, old in enumerate(needed)}
    return [samples[old] for old in needed], [[order[index] for index in word] for word in words]
