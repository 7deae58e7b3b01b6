"""Claims of the note on natural attention: entropy, and what the output tells of the input."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import flint
import numpy as np

from conserved.verdict import Evidence, Verdict, Witness
from conserved_papers.claims.balls import ball, balls, number
from conserved_papers.claims.judging import InWords, answer, by_steps, confirm, decide, refute
from conserved_papers.claims.polynomials import Letters, Matrix, format_matrix, fractions, identical, squares
from conserved_papers.claims.registry import claim

LENGTHS = (2, 4, 8)


def stochastic_matrices() -> Iterator[Matrix]:
    """Uniform, one-hot and mixed rows, of two and of three tokens."""
    for length in (2, 3):
        yield fractions(np.full((length, length), Fraction(1, length), dtype=object))
        yield fractions(np.eye(length, dtype=int))
        first = np.zeros((length, length), dtype=int)
        first[:, 0] = 1
        yield fractions(first)
        yield (fractions(np.eye(length, dtype=int)) + fractions(first)) / 2


def entropy(row: Sequence[Fraction] | Matrix) -> Any:
    """Return −Σ a log a of fractions, as a ball."""
    return sum((-p * p.log() for p in balls([e for e in row if e > 0])), flint.arb(0))


def information(outputs: Sequence[Hashable]) -> Any:
    """Return I(X; Y) = Σ p(x, y) log(p(x, y)/(p(x) p(y))) for equally likely inputs and their outputs, as a ball."""
    count, share = Counter(outputs), Fraction(1, len(outputs))
    return sum((ball(share) * -ball(Fraction(count[y], len(outputs))).log() for y in outputs), flint.arb(0))


CONSTANT = """\
import numpy as np
L, M = {length}, {inputs}                                  # M equally likely inputs (m, ..., m) of L tokens
rng = np.random.default_rng(0)
def output(m):                                 # rows of the weights sum to one, so A X = X for every A
    A = rng.random((L, L)); A /= A.sum(1, keepdims=True)
    return tuple(np.round(A @ np.full(L, float(m)), 9))
information = np.log(len({{output(m) for m in range(M)}}))
print("I =", information, "bound", {bound})
assert information > {bound} + 1e-9"""


def information_bound(
    bound: Callable[[int], Any], statement: str, code: str, lengths: Sequence[int] = LENGTHS
) -> Verdict:
    """Hold a bound, at its largest over all attention matrices, against inputs of equal tokens that A cannot change."""
    shown, witness = [], None
    for length in lengths:
        limit = bound(length)
        inputs = int(math.exp(min(number(limit), 7.0)))
        while inputs < 1100 and not flint.arb(inputs).log() > limit:
            inputs += 1
        uniform = fractions(np.full((length, length), Fraction(1, length), dtype=object))
        result = information([tuple((uniform @ fractions([m] * length)).tolist()) for m in range(inputs)])
        if result > limit:
            shown.append(f"L = {length}: log {inputs} = {number(result):.4g} > {number(limit):.4g}")
            numpy = CONSTANT.format(length=length, inputs=inputs, bound=code.replace("L", str(length)))
            data = {"L": length, "d": 1, "X": f"(m, …, m), m uniform below {inputs}", "W_V": 1, "λ": 1, "A": "any"}
            says = (f"I ≤ {statement} = {number(limit):.4g}", f"I = log {inputs} = {number(result):.4g}")
            witness = witness or Witness(data=data, claimed=says[0], found=says[1], numpy=numpy)
    if witness is None:
        return confirm("No channel exceeds it.", Evidence(what=f"I against {statement}", value="below", samples=3))
    return refute(
        "Inputs of equal tokens pass every attention matrix unchanged, since its rows sum to one, and any number of "
        "them can be told apart: training the weights changes nothing.",
        Evidence(what="I(X; A(X)) and the largest the bound can be", value="; ".join(shown), proof=True),
        witness=witness,
    )


@claim("note.T7")
def basic_information_bound(*, bound: Callable[[int], Any] = lambda length: flint.arb(length).log()) -> Verdict:
    return information_bound(bound, "log L", "np.log(L)")


OUTPUT = """\
import numpy as np
X, W_V = np.array([[2.0, 0.0], [2.0, 0.0]]), np.eye(2)
A = np.full((2, 2), 0.5)       # any stochastic weights
print("A(X) =", A @ X @ W_V, "row sums", (A @ X @ W_V).sum(1))
assert not np.allclose((A @ X @ W_V).sum(1), 1)"""


@claim("note.D1.output")
def stochastic_output(*, values: Callable[[Matrix], Matrix] = lambda x: x) -> Verdict:
    x = fractions([[2, 0], [2, 0]])
    sums = (fractions(np.full((2, 2), Fraction(1, 2), dtype=object)) @ values(x)).sum(axis=1)
    data = {"L": 2, "d": 2, "X": "((2, 0), (2, 0))", "W_V": "1", "A": "uniform"}
    return decide(
        all(total == 1 for total in sums),
        "Rows of the output sum to one.",
        "The weights are stochastic; the output, which multiplies them by X W_V, is not.",
        Evidence(what="row sums of the output", value=format_matrix(sums), limit="(1, 1)", proof=True),
        witness=Witness(data=data, claimed="row sums (1, 1)", found=format_matrix(sums), numpy=OUTPUT),
        scope="at L = d = 2",
    )


def channels() -> Iterator[tuple[str, list[Hashable]]]:
    """Equally likely inputs through layers whose outputs are exact: the mean of the tokens, their first, nothing."""
    for length, letters in ((2, 2), (3, 2), (2, 3)):
        inputs = list(itertools.product(range(letters), repeat=length))
        yield "means of all tokens", [Fraction(sum(x), length) for x in inputs]
        yield "the tokens themselves", list(inputs)
        yield "the first token", [x[0] for x in inputs]
        yield "no values", [0 for _ in inputs]


@claim("note.T7.corrected")
def information_of_the_input(*, bound: Callable[[int], Any] = lambda inputs: flint.arb(inputs).log()) -> Verdict:
    """For each x, p(y) ≥ p(x) where y = A(x): so −p(x) log p(y) ≤ −p(x) log p(x), with equality if x alone gives y."""
    below, equal, same, count = True, True, True, 0
    for _, outputs in channels():
        result, shares = information(outputs), [Fraction(n, len(outputs)) for n in Counter(outputs).values()]
        same &= bool((result - entropy(shares)).contains(0))
        limit, injective = bound(len(outputs)), len(set(outputs)) == len(outputs)
        below &= bool((limit - result).contains(0)) if injective else bool(result < limit)
        equal &= bool((limit - result).contains(0)) is injective
        count += 1
    return by_steps(
        "The output is a function of the input: nothing is added, and nothing lost if no two outputs coincide.",
        "The information exceeds the bound, or meets it elsewhere.",
        InWords("the output is a function of the input, so H(A(X)|X) = 0 and p(A(x)) ≥ p(x): I = H(A(X)) ≤ H(X)"),
        (f"I = H(A(X)), both computed in balls, {count} layers", same),
        ("H(A(X)) ≤ H(X) in all of them", below),
        ("equality exactly where no two inputs share an output", equal),
    )


@claim("note.C8")
def conjectured_information_bound(*, bound: Callable[[int], Any] = lambda length: flint.arb(length) / 2) -> Verdict:
    return information_bound(bound, "E‖A‖_F²/2", "L / 2")


@claim("note.T14")
def strong_information_bound(
    *, bound: Callable[[int], Any] = lambda length: flint.arb(length) / 2 + flint.arb(length).log()
) -> Verdict:
    return information_bound(bound, "E‖A‖_F²/2 + log L", "L / 2 + np.log(L)")


NEGATIVE = """\
lam, norm, rest = 1.0, 1.0, -5.0              # the rest of the loss is a log-likelihood of a density, which may be < 0
loss = rest + lam * norm
print("|A|^2 =", norm, "claimed at most", loss / lam)
assert norm > loss / lam"""


@claim("note.T14.penalty")
def penalty_bounds(*, rest: Fraction = Fraction(-5)) -> Verdict:
    rate, norm = Fraction(1), Fraction(1)
    limit = (rest + rate * norm) / rate
    return decide(
        norm <= limit,
        "The penalised norm is at most the loss over λ.",
        "It needs the rest of the loss to be at least zero, which the note does not say.",
        Evidence(what="‖A‖² against (rest + λ‖A‖²)/λ", value=str(norm), limit=str(limit), proof=True),
        witness=Witness(data={"λ": 1, "‖A‖²": 1, "rest": rest}, claimed=f"1 ≤ {limit}", found="1", numpy=NEGATIVE),
        scope="for one loss",
    )


@claim("note.T14.penalty.corrected")
def nonnegative_penalty(*, sign: int = 1) -> Verdict:
    rate, norm, rest = Letters(l=(), n=(), r=())
    gap = (rate * norm + rest) - sign * rate * norm
    return by_steps(
        "E[L] − λE‖A‖² is the rest of the loss, which is at least zero.",
        "It does not follow.",
        ("L − λ‖A‖² is the rest of the loss, as polynomials; it is not negative, and λ > 0", identical(gap, rest)),
    )


LAMBDA = """\
lam, norm = 2.0, 1.0                          # |A|^2 = 1: uniform attention
print("the lemma gives", norm / 2, "the theorem has", norm / (2 * lam))
assert norm / 2 > norm / (2 * lam)"""


@claim("note.T14.lambda")
def lambda_step(*, rates: Sequence[Fraction] = (Fraction(1, 2), Fraction(1), Fraction(2))) -> Verdict:
    bad = [rate for rate in rates if Fraction(1, 2) > 1 / (2 * rate)]
    witness = Witness(data={"λ": 2, "‖A‖_F²": 1}, claimed="1/2 ≤ 1/4", found="1/2 > 1/4", numpy=LAMBDA)
    evidence = Evidence(what="λ at which the step fails", value=", ".join(map(str, bad)) or "none", proof=True)
    return decide(
        not bad,
        "It follows.",
        "The step from 1/2 to 1/(2λ) fails for λ > 1.",
        evidence,
        witness=witness,
        scope="at those λ",
    )


ENTROPY = """\
import numpy as np
L = {length}
A = np.full((L, L), 1 / L)                      # uniform attention
H = -(A * np.log(A)).sum()                      # L log L
bound = 0.5 * (A ** 2).sum() + {times} * np.log(L)
print("H(A) =", H, "bound", bound)
assert H > bound"""


def entropy_against(bound: Callable[[Matrix], Any], length: int, times: int) -> Verdict:
    """Hold a bound against the entropy of small attention matrices."""
    count = 0
    for matrix in stochastic_matrices():
        total, limit = sum(entropy(row) for row in matrix), bound(matrix)
        count += 1
        if total > limit:
            says = (f"H(A) ≤ {number(limit):.4g}", f"{number(total):.4g} = L log L")
            numpy = ENTROPY.format(length=length, times=times)
            return refute(
                "The entropies of L rows add up to L log L at most; the bound has no room for them.",
                Evidence(
                    what=f"H(A), uniform rows, L = {len(matrix)}", value=number(total), limit=number(limit), proof=True
                ),
                witness=Witness(data={"A": format_matrix(matrix)}, claimed=says[0], found=says[1], numpy=numpy),
            )
    return confirm("No matrix exceeds it.", Evidence(what="H(A) against the bound", value="below", samples=count))


@claim("note.L13")
def entropy_bound(
    *, bound: Callable[[Matrix], Any] = lambda a: ball(squares(a) / 2) + flint.arb(len(a)).log()
) -> Verdict:
    return entropy_against(bound, 2, 1)


@claim("note.L13.logs")
def entropy_bound_of_the_proof(*, logs: int = 2) -> Verdict:
    return entropy_against(lambda a: ball(squares(a) / 2) + logs * flint.arb(len(a)).log(), 3, logs)


@claim("note.L13.corrected")
def row_entropy(*, least: Callable[[Matrix], Any] = lambda row: -ball((row * row).sum()).log()) -> Verdict:
    rng = np.random.default_rng(0)
    rows = [row for matrix in stochastic_matrices() for row in matrix]
    for length in (2, 3, 5, 9):
        drawn = rng.integers(0, 20, (25, length)) + np.eye(length, dtype=int)[rng.integers(0, length, 25)]
        rows += [fractions([Fraction(int(e), int(n.sum())) for e in n]) for n in drawn]
    below = sum(entropy(row) < least(row) for row in rows)
    over = sum(entropy(row) > flint.arb(len(row)).log() for row in rows)
    tangent = all(bool(ball(t).log() < ball(t) - 1) for t in (Fraction(n, 7) for n in (*range(1, 7), *range(8, 90))))
    means = all(sum(row * (row / (row * row).sum() - 1)) == 0 for row in rows)
    return by_steps(
        "Both bounds follow from log t ≤ t − 1.",
        "Some row lies outside.",
        InWords("log t ≤ t − 1 with equality at t = 1 only: the tangent of a concave function"),
        ("that inequality in balls at 88 points", tangent),
        (f"with t = a_j/‖a‖²: Σ a log(a/‖a‖²) ≤ Σ a(a/‖a‖² − 1) = 0, the sum exact for {len(rows)} rows", means),
        ("so no row has an entropy below −log‖a‖²", below == 0),
        ("with t = 1/(L a_j): Σ a log(1/(L a)) ≤ 1 − Σa = 0, so none has one above log L", over == 0),
    )


@claim("note.R9")
def norm_orders_entropy(*, measure: Callable[[Matrix], Fraction] = squares) -> Verdict:
    opposite = True
    for length in LENGTHS:
        uniform = fractions(np.full((length, length), Fraction(1, length), dtype=object))
        identity = fractions(np.eye(length, dtype=int))
        spread, sharp = (sum(entropy(row) for row in a) for a in (uniform, identity))
        opposite &= bool(measure(identity) > measure(uniform) and sharp < spread)
    result = by_steps(
        "note.L13.corrected is the connection.",
        "The measure grows with the entropy.",
        ("one-hot rows have the largest norm and no entropy, uniform rows the smallest norm and L log L", opposite),
        scope="at L = 2, 4, 8",
    )
    return answer("It runs the other way: the larger the norm, the less entropy a row can have.", result)
