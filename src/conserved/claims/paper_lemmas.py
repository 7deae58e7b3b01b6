"""Claims of the paper: the lemmas of its appendices, as exact determinants, series and isolated zeros."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import flint

from conserved.certify.arithmetic import precision
from conserved.claims.judging import judged
from conserved.claims.ledger import claim
from conserved.claims.polynomials import Letters, Matrix, arranged, determinant
from conserved.verdict import Evidence, Verdict

Nodes = Callable[[Sequence[Any]], Sequence[Any]]


def as_given(letters: Sequence[Any]) -> Sequence[Any]:
    """Independent letters: pairwise distinct."""
    return letters


def product(factors: Sequence[Any]) -> Any:
    """The product of polynomials."""
    found = factors[0] * 0 + 1
    for factor in factors:
        found = found * factor
    return found


def differences(nodes: Sequence[Any], power: int) -> Any:
    """Π_{i<j} (n_i − n_j)^power."""
    pairs = [(nodes[i] - nodes[j]) ** power for i in range(len(nodes)) for j in range(i + 1, len(nodes))]
    return product([nodes[0] * 0 + 1, *pairs])


def vandermonde(nodes: Sequence[Any]) -> Matrix:
    """Rows m = 1, …, 2h of γ_i^m and m γ_i^m: the coefficients of Σ (u_i + m w_i) γ_i^m, equation (25)."""
    rows = range(1, 2 * len(nodes) + 1)
    return arranged([[g**m for g in nodes] + [m * g**m for g in nodes] for m in rows])


def separates(nodes: Nodes, most: int = 3) -> bool:
    """Whether that determinant is Π (γ_i − γ_j)⁴ times powers of the γ_i, for up to three neurons."""
    good = True
    for count in range(1, most + 1):
        letters = list(Letters(g=(count,))["g"])
        good &= _only_for_equal(vandermonde(nodes(letters)), differences(letters, 4), letters)
    return good


def gelu_series(terms: int) -> list[Fraction]:
    """√(2π) times the even coefficients of GELU: z times the integral of e^{−z²/2}, term by term."""
    return [Fraction((-1) ** n, 2**n * math.factorial(n)) / (2 * n + 1) for n in range(terms)]


@claim(
    "paper.LA.1",
    "GELU and its derivative are independent",
    statement="If α_1², …, α_h² are nonzero and distinct, the functions GELU(α_i t) and t GELU′(α_i t) are linearly "
    "independent.",
    place="Lemma A.1 and equation (20)",
    hypotheses="The determinant is worked out for h = 1, 2, 3.",
    latex=[
        r"\operatorname{GELU}(z)=\frac{z}{2}+\frac{1}{\sqrt{2\pi}}\sum_{n\ge 0}\frac{(-1)^n}{2^n\,n!\,(2n+1)}z^{2n+2}",
        r"\det=c\prod_i\gamma_i^3\prod_{i<j}(\gamma_i-\gamma_j)^4,\quad\gamma_i=\alpha_i^2",
    ],
)
def gelu_independence(
    *,
    nodes: Nodes = as_given,
    coefficient: Callable[[int], Fraction] = lambda n: Fraction((-1) ** n, 2**n * math.factorial(n) * (2 * n + 1)),
) -> Verdict:
    series = all(coefficient(n) == exact != 0 for n, exact in enumerate(gelu_series(20)))
    independent = separates(nodes)
    return judged(
        series and independent,
        "All even coefficients differ from zero, and the determinant of the first 2h of them vanishes for equal "
        "squares only.",
        "The functions are dependent, or the series is another.",
        Evidence(what="equation (20), coefficients 1 to 20 as fractions", value=str(series), proof=series),
        Evidence(what="determinant as a polynomial, h = 1, 2, 3", value=str(independent), proof=independent),
    )


def silu_series(terms: int) -> list[Fraction]:
    """Coefficients of z/(1 + e^{−z}), by division of power series."""
    divisor = [Fraction((-1) ** n, math.factorial(n)) + (n == 0) for n in range(terms)]
    quotient: list[Fraction] = []
    for n in range(terms):
        rest = Fraction(int(n == 0)) - sum((quotient[k] * divisor[n - k] for k in range(n)), Fraction(0))
        quotient.append(rest / divisor[0])
    return [Fraction(0), *quotient][:terms]


def bernoulli_coefficient(n: int) -> Fraction:
    """(2^{2n} − 1) B_{2n} / (2n)!, equation (37)."""
    bernoulli = flint.fmpq.bernoulli(2 * n)
    return (4**n - 1) * Fraction(int(bernoulli.p), int(bernoulli.q)) / math.factorial(2 * n)


@claim(
    "paper.LA.2",
    "SiLU and its derivative are independent",
    statement="Under the same condition the functions SiLU(α_i t) and t SiLU′(α_i t) are linearly independent.",
    place="Lemma A.2 and equation (37)",
    hypotheses="The determinant is worked out for h = 1, 2, 3.",
    latex=[r"\operatorname{SiLU}(z)=\frac{z}{2}+\sum_{n\ge 1}\frac{(2^{2n}-1)B_{2n}}{(2n)!}z^{2n}"],
)
def silu_independence(
    *, nodes: Nodes = as_given, coefficient: Callable[[int], Fraction] = bernoulli_coefficient
) -> Verdict:
    exact = silu_series(41)
    series = exact[1] == Fraction(1, 2) and all(coefficient(n) == exact[2 * n] != 0 for n in range(1, 21))
    independent = separates(nodes)
    return judged(
        series and independent,
        "The series is the one printed, its even coefficients differ from zero, and the determinant is that of Lemma "
        "A.1.",
        "The functions are dependent, or the series is another.",
        Evidence(what="equation (37), coefficients 2 to 40 as fractions", value=str(series), proof=series),
        Evidence(what="determinant as a polynomial, h = 1, 2, 3", value=str(independent), proof=independent),
    )


Polynomial = list[Any]
"""Coefficients in t, lowest first."""


def multiplied(factors: Sequence[Polynomial]) -> Polynomial:
    """The product of polynomials in t."""
    found: Polynomial = factors[0]
    for factor in factors[1:]:
        longer: Polynomial = [found[0] * 0] * (len(found) + len(factor) - 1)
        for i, a in enumerate(found):
            for j, b in enumerate(factor):
                longer[i + j] = longer[i + j] + a * b
        found = longer
    return found


def numerators(parts: Sequence[Sequence[Polynomial]], denominators: Sequence[Polynomial]) -> Matrix:
    """Fractions part/denominator_i² over the common denominator Π denominator_i², as rows of coefficients."""
    rows = []
    for i, group in enumerate(parts):
        others = [d for j, d in enumerate(denominators) if j != i for _ in range(2)]
        rows += [multiplied([part, *others]) for part in group]
    width = max(map(len, rows))
    zero = rows[0][0] * 0
    return arranged([row + [zero] * (width - len(row)) for row in rows])


def product_of_letters(polynomial: Any, letters: Sequence[Any]) -> bool:
    """Whether a polynomial is a constant times powers of letters, so that it vanishes only where one of them does."""
    if polynomial == 0:
        return False
    for letter in letters:
        while divmod(polynomial, letter)[1] == 0:
            polynomial = divmod(polynomial, letter)[0]
    return bool(polynomial.total_degree() == 0)


def _only_for_equal(matrix: Matrix, gaps: Any, letters: Sequence[Any]) -> bool:
    """Whether det is `gaps` times powers of the letters."""
    found = determinant(matrix)
    quotient, rest = divmod(found, gaps)
    return bool(rest == 0) and product_of_letters(quotient, letters)


@claim(
    "paper.LB.1",
    "The fractions of attention are independent",
    statement="For distinct nonzero α_i the functions tα_i/(1 + tα_i)², 1/(1 + tα_i) and 1 are linearly independent.",
    place="Lemma B.1",
    hypotheses="The determinant is worked out for n = 1, 2.",
    latex=[r"\frac{t\alpha_i}{(1+t\alpha_i)^2},\quad\frac{1}{1+t\alpha_i},\quad 1"],
)
def attention_fractions(*, nodes: Nodes = as_given) -> Verdict:
    good = True
    for count in (1, 2):
        letters = list(Letters(a=(count,))["a"])
        alpha = list(nodes(letters))
        zero, one = alpha[0] * 0, alpha[0] * 0 + 1
        denominators: list[Polynomial] = [[one, a] for a in alpha]
        parts: list[list[Polynomial]] = [[[zero, a], [one, a]] for a in alpha]
        rows = numerators(parts, denominators)
        common = multiplied([d for d in denominators for _ in range(2)])
        width = len(common)
        padded = [[*row, *[zero] * (width - len(row))] for row in rows.tolist()]
        matrix = arranged([*padded, common])
        good &= _only_for_equal(matrix, differences(letters, 4), letters)
    evidence = Evidence(what="determinant of the numerators as a polynomial in α, n = 1, 2", proof=good)
    return judged(good, "It vanishes for equal or zero α only.", "The functions are dependent.", evidence)


@claim(
    "paper.LB.2",
    "The fractions of rotary attention are independent",
    statement="For positive α_i, β_i with distinct sums the functions α_iβ_i/(α_i + β_i + t)² and β_i(t + α_i)/(α_i "
    "+ β_i + t)² "
    "are linearly independent.",
    place="Lemma B.2",
    hypotheses="The determinant is worked out for n = 1, 2.",
    latex=[r"\frac{\alpha_i\beta_i}{(\alpha_i+\beta_i+t)^2},\quad\frac{\beta_i(t+\alpha_i)}{(\alpha_i+\beta_i+t)^2}"],
)
def rotary_fractions(*, second: Callable[[Any, Any], Polynomial] = lambda a, b: [a * b, b]) -> Verdict:
    good = True
    for count in (1, 2):
        letters = Letters(a=(count,), b=(count,))
        pairs = list(zip(letters["a"], letters["b"], strict=True))
        one = pairs[0][0] * 0 + 1
        matrix = numerators([[[a * b], second(a, b)] for a, b in pairs], [[a + b, one] for a, b in pairs])
        if matrix.shape[0] != matrix.shape[1]:
            good = False
            break
        sums = [a + b for a, b in pairs]
        good &= _only_for_equal(matrix, differences(sums, 4), [*letters["a"], *letters["b"]])
    evidence = Evidence(what="determinant of the numerators as a polynomial in α, β, n = 1, 2", proof=good)
    return judged(good, "It vanishes for equal sums or a zero only.", "The functions are dependent.", evidence)


def paper_frequencies(planes: int) -> list[Any]:
    """φ_i = 10000^{−(i−1)/m}, as balls."""
    return [flint.arb(10000) ** (-flint.arb(i) / planes) for i in range(planes)]


@claim(
    "paper.LB.3",
    "Rotations span the complex scalings",
    statement="The rotations R_1, R_2, … of rotary positions span all matrices that are a_jI + b_jJ on every plane.",
    place="Lemma B.3",
    hypotheses="The paper's frequencies, one to four planes; R_1, …, R_{2m} are enough.",
    latex=[r"\operatorname{span}\{R_L\}=\{\operatorname{diag}(a_1I+b_1J,\dots,a_mI+b_mJ)\}"],
)
def rotations_span(*, frequencies: Callable[[int], list[Any]] = paper_frequencies) -> Verdict:
    smallest, good = math.inf, True
    for planes in (1, 2, 3, 4):
        with precision(256):
            angles = frequencies(planes)
            rows = [
                [entry for angle in angles for entry in ((step * angle).cos(), (step * angle).sin())]
                for step in range(1, 2 * planes + 1)
            ]
            found = flint.arb_mat(rows).det()
        good &= not bool(found.contains(0))
        smallest = min(smallest, float(abs(found).abs_lower()))
    return judged(
        good,
        "The determinant of the first 2m rotations differs from zero.",
        "The determinant may be zero.",
        Evidence(
            what="smallest determinant of the first 2m rotations, in balls", value=smallest, limit=0.0, proof=good
        ),
    )


def odd_multiples(y: Fraction, most: int) -> list[Any]:
    """a = (2k + 1)π/y within ±most, as balls."""
    largest = int(most * abs(y) / 3) + 2
    found = [
        (2 * k + 1) * flint.arb.pi() / flint.arb(flint.fmpq(y.numerator, y.denominator))
        for k in range(-largest, largest)
    ]
    return [a for a in found if abs(a) < most]


@claim(
    "paper.LC.1",
    "Almost every slope avoids a countable set",
    statement="For a countable set S of complex numbers, 1 + e^{az} has no zero in S for all but countably many real "
    "a: for each "
    "z the exceptions are none, or the odd multiples of π/Im z if z is imaginary.",
    place="Lemma C.1 and Section C.1",
    hypotheses="Zeros in a are isolated in balls for |a| ≤ 12, at imaginary and at other z. At the exceptions the "
    "pole of SiLU(az) "
    "is simple, since the derivative of 1 + e^{−az} does not vanish there.",
    latex=[r"1+e^{az}=0\iff az=i(2k+1)\pi"],
)
def cocountable(*, exceptions: Callable[[Fraction, int], list[Any]] = odd_multiples) -> Verdict:
    most, cells = 12, 1500
    points = [
        (Fraction(0), Fraction(1)),
        (Fraction(0), Fraction(-3, 2)),
        (Fraction(1, 2), Fraction(2)),
        (Fraction(1), Fraction(0)),
    ]
    missed, wrong = 0, 0
    for x, y in points:
        z = flint.acb(flint.fmpq(x.numerator, x.denominator), flint.fmpq(y.numerator, y.denominator))
        predicted = exceptions(y, most) if x == 0 else []
        for a in predicted:
            there = 1 + (flint.acb(a) * z).exp()
            slope = z * (flint.acb(a) * z).exp()
            wrong += not bool(there.contains(0)) or bool(slope.contains(0))
        width = flint.fmpq(most, cells)
        for cell in range(-cells, cells):
            a = flint.arb((2 * cell + 1) * width / 2, width / 2)
            zero_free = not bool((1 + (flint.acb(a) * z).exp()).contains(0))
            near = any(bool(abs(a - b) < 2 * flint.arb(width)) or bool(a.overlaps(b)) for b in predicted)
            missed += not zero_free and not near
    return judged(
        missed == 0 and wrong == 0,
        "Zeros lie where the lemma puts them, and nowhere else.",
        "There are other zeros, or fewer.",
        Evidence(
            what="intervals of a with a zero that is not predicted",
            value=missed,
            limit=0,
            samples=len(points) * 2 * cells,
        ),
        Evidence(what="predicted zeros that are none, or not simple", value=wrong, limit=0),
    )
