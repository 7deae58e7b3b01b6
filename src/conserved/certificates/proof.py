r"""The two proofs of a certificate: that vectors are independent, and that a law is orthogonal to every field.

**Independence.** Let the rows of M be enclosed by balls, and let P be any matrix of exact numbers. If ‖I − M P‖ < 1 in
the row-sum norm then M P is invertible, so M has full row rank. P is a floating-point pseudo-inverse of the midpoints;
nothing is trusted about how it was found.

**Laws.** A symbolic argument (`symbols`) proves that the output does not move along ∇h, for all values of the real
inputs and all θ between the same decisions. Where that argument finds no proof, ⟨∇h, X⟩ is enclosed at random points
instead: evidence, not proof.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import flint
import numpy as np

from conserved.certificates import intervals
from conserved.certificates.arithmetic import Array, Balls, UndecidedError, precision
from conserved.certificates.batches import IntervalArrays, NotBatchedError, SampleBatch, Samples, chunk_size
from conserved.certificates.cost import matrix_fits
from conserved.certificates.differentiate import Sample, bracket, gradient, run
from conserved.certificates.form import Form
from conserved.certificates.intervals import Interval
from conserved.certificates.jets import Jet
from conserved.certificates.program import UNARY, Node, Program
from conserved.certificates.symbols import Budget, Symbols, TooLargeError

MOST_BITS = 4096
"""Precision is doubled up to this many bits before a question is left open."""

_TERMS = 20_000_000
"""Products of terms one symbolic argument may take."""

_POINTS = 16
"""Random points at which a law without a symbolic proof is enclosed."""

ENCLOSURE_BITS = 512

LARGE = 400
"""Parameters from which on a rank is first tried in float64 intervals."""

FLOAT_BITS = 53
"""Precision of float64 intervals."""

_ENCLOSED = 2.0**-100
"""How close to zero, relative to its factors, an enclosure must pin a law."""


@dataclass(frozen=True, slots=True, eq=False)
class Input:
    """One input: for each tensor exact numbers, whole if discrete."""

    tensors: tuple[Array, ...]

    def in_balls(self, program: Program) -> tuple[Array, ...]:
        """Return real tensors as balls; discrete ones as they are."""
        return tuple(
            t if node.discrete else Balls().array(t.ravel().tolist(), t.shape)
            for t, node in zip(self.tensors, program.input_nodes, strict=True)
        )


def field_rows(
    program: Program, theta: Sequence[float], words: Sequence[Sequence[tuple[Input, Sequence[int]]]], numbers: Balls
) -> Array:
    """Return brackets of gradient fields, one row for each word, as balls."""
    point = Jet({0: numbers.array(theta, (len(theta),))})
    rows = []
    for word in words:
        samples = [Sample(x.in_balls(program), numbers.array(v, (len(v),))) for x, v in word]
        parts = bracket(program, numbers, point, samples).parts
        rows.append(parts[0] if 0 in parts else numbers.zeros((program.size,)))
    return np.stack(rows)


def independence_bound(rows: Array) -> float:
    """Return an upper bound of ‖I − M P‖ for rows of balls; below 1 it proves them independent.

    The bound is infinite if P cannot serve as a right inverse.
    """
    count, size = rows.shape
    if count > size:
        return float("inf")
    entries = rows.ravel().tolist()
    if not all(entry.is_finite() for entry in entries):
        return float("inf")
    # Rows scaled by powers of two, which is exact, so that the pseudo-inverse is as good as it can be.
    middle = np.array([float(entry.mid()) for entry in entries]).reshape(count, size)
    with np.errstate(divide="ignore"):
        powers = -np.log2(np.abs(middle).max(axis=1)).round()
    if not np.isfinite(powers).all() or not np.isfinite(middle).all():
        return float("inf")
    try:
        inverse = np.linalg.pinv(middle * 2.0 ** powers[:, None], rcond=1e-16)
    except np.linalg.LinAlgError:
        return float("inf")
    matrix = flint.arb_mat(count, size, [e * s for e, s in zip(entries, np.repeat(2.0**powers, size), strict=True)])
    product = matrix * flint.arb_mat(size, count, inverse.ravel().tolist())
    bound = flint.arb(0)
    for i, row in enumerate(product.tolist()):
        total = flint.arb(0)
        for j, entry in enumerate(row):
            total += abs(entry - 1 if i == j else entry)
        bound = bound.max(total)
    upper = float(bound.abs_upper())
    return upper if upper == upper else float("inf")


@dataclass(frozen=True, slots=True)
class Independence:
    """The result of proving a rank: the bound, and the number of bits used."""

    proved: bool
    bound: float
    bits: int
    reason: str = ""


def field_intervals(
    program: Program, theta: Sequence[float], words: Sequence[Sequence[tuple[Input, Sequence[int]]]], bits: int
) -> Interval:
    """Return brackets in float64 intervals, many at once.

    Values are computed in balls, once for each input, and rounded outwards; so errors grow in derivatives only.
    """
    batch = SampleBatch(program, IntervalArrays())
    point = batch.point(theta)
    middle, radius = (np.zeros((len(words), program.size)) for _ in range(2))
    values: dict[int, dict[int, Interval]] = {}

    def letters(samples: Sequence[tuple[Input, Sequence[int]]]) -> Samples:
        for x, _ in samples:
            if id(x) not in values:
                values[id(x)] = values_in_intervals(program, theta, x, bits)
        # One input for all is one run for all.
        inputs = [samples[0][0]] if len({id(x) for x, _ in samples}) == 1 else [x for x, _ in samples]
        known = {index: _join([values[id(x)][index] for x in inputs]) for index in values[id(inputs[0])]}
        tensors = tuple(np.stack(each) for each in zip(*(x.tensors for x in inputs), strict=True))
        return Samples(tensors, np.array([v for _, v in samples], dtype=np.float64), known)

    for indices in _batches(program, words):
        with np.errstate(all="ignore"):
            word = [letters([words[p][k] for p in indices]) for k in range(len(words[indices[0]]))]
            part = batch.bracket(point, word).parts.get(0)
        if part is not None:
            middle[indices], radius[indices] = part.middle, part.radius
    return Interval(middle, radius)


def _join(parts: Sequence[Interval]) -> Interval:
    return Interval(np.concatenate([p.middle for p in parts]), np.concatenate([p.radius for p in parts]))


def _batches(program: Program, words: Sequence[Sequence[tuple[Input, Sequence[int]]]]) -> Iterator[list[int]]:
    """Yield words of one length, single samples of one input, few enough to be computed together."""
    groups: dict[tuple[int, int], list[int]] = {}
    for index, word in enumerate(words):
        groups.setdefault((len(word), id(word[0][0]) if len(word) == 1 else 0), []).append(index)
    for (length, _), indices in groups.items():
        step = chunk_size(program, length)
        yield from (indices[start : start + step] for start in range(0, len(indices), step))


_ARITHMETIC = (*UNARY, "add", "subtract", "multiply", "matmul", "sum")
"""Operators that round; the others move entries, which intervals do as well."""


def values_in_intervals(program: Program, theta: Sequence[float], x: Input, bits: int) -> dict[int, Interval]:
    """Return the value of every real node that is computed and not moved, from balls, with a leading axis of one."""
    with precision(bits):
        numbers = Balls()
        values = run(program, numbers, Jet({0: numbers.array(theta, (len(theta),))}), x.in_balls(program))
        return {
            index: intervals.round_outward(value.value).move(lambda part: part[None])
            for index, (node, value) in enumerate(zip(program.nodes, values, strict=True))
            if isinstance(value, Jet) and node.op in _ARITHMETIC
        }


def _bound_in_intervals(
    program: Program, theta: Sequence[float], words: Sequence[Sequence[tuple[Input, Sequence[int]]]], bits: int
) -> float:
    """Return ‖I − M P‖ with rows in float64 intervals; infinite where these cannot tell.

    Brackets are differences of large terms, of which 53 bits may leave too little. The norm is the largest row sum, so
    the rows that are too wide are seen, and only those are computed again in balls.
    """
    try:
        result = field_intervals(program, theta, words, bits)
        with np.errstate(all="ignore"):
            bounds = intervals.independence_bounds(result)
        wide = np.flatnonzero(~(bounds < _NARROW))
        if len(wide) and np.isfinite(result.middle).all():
            with precision(bits):
                for index in wide.tolist():
                    row = intervals.round_outward(field_rows(program, theta, [words[index]], Balls())[0])
                    result.middle[index], result.radius[index] = row.middle, row.radius
            with np.errstate(all="ignore"):
                bounds = intervals.independence_bounds(result)
        return float(bounds.max(initial=0.0))
    except (UndecidedError, NotBatchedError, OverflowError):
        return float("inf")


_NARROW = 0.5
"""Row sums below this are left as they are."""


def prove_rank(
    program: Program,
    theta: Sequence[float],
    words: Sequence[Sequence[tuple[Input, Sequence[int]]]],
    bits: int,
    most_bits: int = MOST_BITS,
) -> Independence:
    """Prove the brackets of the words independent at θ, with as many bits as it takes.

    Large programs are tried in float64 intervals first, where whole arrays are computed at once.
    """
    if not words:
        return Independence(True, 0.0, bits)
    if program.size >= LARGE:
        quick = _bound_in_intervals(program, theta, words, bits)
        if quick < 1:
            return Independence(True, quick, FLOAT_BITS)
    bound, reason = float("inf"), ""
    if not matrix_fits(len(words), program.size):
        return Independence(False, bound, bits, "The rows in balls would take more memory than proofs may.")
    while True:
        with precision(bits):
            try:
                bound, reason = independence_bound(field_rows(program, theta, words, Balls())), ""
            except UndecidedError as problem:
                reason = str(problem)
        if bound < 1:
            return Independence(True, bound, bits)
        if 2 * bits > most_bits:
            return Independence(False, bound, bits, reason or "The rows could not be shown to be independent.")
        bits *= 2


def prove_independent_laws(forms: Sequence[Form], theta: Sequence[float], bits: int) -> Independence:
    """Prove the gradients of laws independent at θ; they are exact there."""
    point = [Fraction(value) for value in theta]
    if not matrix_fits(len(forms), len(point)):
        return Independence(False, float("inf"), bits, "The laws in balls would take more memory than proofs may.")
    with precision(bits):
        numbers = Balls()
        rows = np.stack([numbers.array(form.gradient(point), (len(point),)) for form in forms])
        bound = independence_bound(rows)
    return Independence(bound < 1, bound, bits)


def decisions_at(program: Program, theta: Sequence[float], x: Input, bits: int) -> dict[Node, Array]:
    """Return the certified result of every comparison of reals at (θ, x)."""
    compared = [
        index
        for index, node in enumerate(program.nodes)
        if node.op in ("greater", "order") and not program.nodes[node.inputs[0]].discrete
    ]
    if not compared:
        return {}
    while True:
        with precision(bits):
            numbers = Balls()
            try:
                values = run(program, numbers, Jet({0: numbers.array(theta, (len(theta),))}), x.in_balls(program))
                return {program.nodes[index]: values[index] for index in compared}
            except UndecidedError:
                if 2 * bits > MOST_BITS:
                    raise
        bits *= 2


def proved_by_argument(
    program: Program, forms: Sequence[Form], x: Input, decided: dict[Node, Array], terms: int = _TERMS
) -> bool:
    """Return whether symbols show that no combination of the laws moves the output, on the piece of f around this
    input.

    Only the discrete tensors of x and the decisions matter; real inputs and parameters are letters.
    """
    budget = Budget(terms)
    numbers = Symbols(decided, budget)
    theta = numbers.fresh_array((program.size,))
    zero = numbers.array([0], ())[()]
    moves = np.full(program.size, zero, dtype=object)
    try:
        for form in forms:
            weight = numbers.fresh()
            for i, j, a in form.quadratic:
                moves[i] = moves[i] + numbers.array([a], ())[()] * weight * theta[j]
            for i, b in form.linear:
                moves[i] = moves[i] + numbers.array([b], ())[()] * weight
        inputs = [
            t if node.discrete else numbers.fresh_array(t.shape)
            for t, node in zip(x.tensors, program.input_nodes, strict=True)
        ]
        values = run(program, numbers, Jet({0: theta, 1: moves}), inputs, stopped=True)
    except TooLargeError:
        return False
    output = values[program.output]
    assert isinstance(output, Jet)
    return 1 not in output.parts


@dataclass(frozen=True, slots=True, eq=False)
class RandomFields:
    """Gradient fields at random points, in balls; `undecided` if some comparison stayed open."""

    points: tuple[tuple[Fraction, ...], ...]
    fields: tuple[Array, ...]
    undecided: bool = False


def random_fields(program: Program, theta: Sequence[float], inputs: Sequence[Input], seed: int) -> RandomFields:
    """Return fields at random points near θ and near the inputs: a law of another region is not a law here."""
    rng = random.Random(seed)
    points, fields = [], []
    if not inputs:
        return RandomFields((), (), undecided=True)
    with precision(ENCLOSURE_BITS):
        numbers = Balls()
        for index in range(_POINTS):
            steps = [Fraction(rng.randint(-(2**12), 2**12), 2**16) for _ in theta]
            point = tuple(Fraction(value) * (1 + step) + step for value, step in zip(theta, steps, strict=True))
            x = tuple(
                t
                if node.discrete
                else numbers.array([e + rng.randint(-512, 512) / 2**14 for e in t.ravel().tolist()], t.shape)
                for t, node in zip(inputs[index % len(inputs)].tensors, program.input_nodes, strict=True)
            )
            v = numbers.array([rng.randint(-3, 3) for _ in range(program.outputs)], (program.outputs,))
            here = Jet({0: numbers.array(point, (program.size,))})
            try:
                fields.append(gradient(program, numbers, here, Sample(x, v)).value)
            except UndecidedError:
                return RandomFields((), (), undecided=True)
            points.append(point)
    return RandomFields(tuple(points), tuple(fields))


def enclosure(form: Form, sampled: RandomFields) -> float:
    """Return the largest |⟨∇h, X⟩| / (‖∇h‖₁ ‖X‖_∞) that the balls at random points allow; near zero for a law.

    Infinite where they are too wide to say anything, and where one of them does not contain zero: however small
    ⟨∇h, X⟩ is against the largest entry of X, h is then not a law.
    """
    if sampled.undecided:
        return float("inf")
    worst = 0.0
    for moved, size in _products_at_points(form, sampled):
        if not moved.contains(0):
            return float("inf")
        total = float(moved.abs_upper())
        ratio = total / size if size > 0 else total
        worst = ratio if ratio > worst or ratio != ratio else worst
    return worst if worst == worst else float("inf")


def departure(form: Form, sampled: RandomFields) -> float:
    """Return the largest |⟨∇h, X⟩| / (‖∇h‖₁ ‖X‖_∞) that the balls at random points prove; above zero h is not a law."""
    return max(
        (float(moved.abs_lower()) / size for moved, size in _products_at_points(form, sampled) if size > 0), default=0.0
    )


def _products_at_points(form: Form, sampled: RandomFields) -> list[tuple[flint.arb, float]]:
    """Return at every random point ⟨∇h, X⟩, and the largest ‖∇h‖₁ ‖X‖_∞ can be."""
    points = []
    with precision(ENCLOSURE_BITS):
        for point, field in zip(sampled.points, sampled.fields, strict=True):
            gradient = Balls().array(form.gradient(point), (len(point),))
            size = float(np.abs(gradient).sum().abs_upper()) * max(float(abs(entry).abs_upper()) for entry in field)
            points.append(((gradient * field).sum(), size))
    return points


def encloses_zero(value: float) -> bool:
    """Return whether an enclosure is as tight around zero as a law needs."""
    return value <= _ENCLOSED
