"""Claims of the paper: the lemmas of its appendices, and the sets on which its proofs work, for all sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import flint

from conserved.certificates.arithmetic import precision
from conserved.verdict import Evidence, Verdict, Witness
from conserved_papers.claims.judging import InWords, by_steps, decide
from conserved_papers.claims.polynomials import Letters, Matrix, arranged, determinant, identical
from conserved_papers.claims.registry import claim

Nodes = Callable[[Sequence[Any]], Sequence[Any]]


def product_of(polynomial: Any, letters: Sequence[Any]) -> bool:
    """Return whether a polynomial is a constant times powers of letters, so that it vanishes only where one of them
    does.
    """
    if polynomial == 0:
        return False
    for letter in letters:
        while divmod(polynomial, letter)[1] == 0:
            polynomial = divmod(polynomial, letter)[0]
    return bool(polynomial.total_degree() == 0)


def vandermonde(nodes: Sequence[Any]) -> Matrix:
    """Rows m = 1, …, 2h of γ_i^m and m γ_i^m: the coefficients of Σ (u_i + m w_i) γ_i^m, equation (25)."""
    rows = range(1, 2 * len(nodes) + 1)
    return arranged([[g**m for g in nodes] + [m * g**m for g in nodes] for m in rows])


def separates(nodes: Nodes, most: int = 3) -> bool:
    """Return whether that determinant vanishes for equal or zero γ only, for up to three neurons."""
    good = True
    for count in range(1, most + 1):
        letters = list(Letters(g=(count,))["g"])
        gaps = [letters[i] - letters[j] for i in range(count) for j in range(i + 1, count)]
        good &= product_of(determinant(vandermonde(nodes(letters))), [*gaps, *letters])
    return good


def shifts_annihilate() -> bool:
    """Check that (E − γ)(u + mw)γ^m = wγ·γ^m, (E − γ)wγ·γ^m = 0, and (E − δ)² multiplies γ^m by (γ − δ)², over the
    factor γ^m.
    """
    u, w, g, d, m = Letters(u=(), w=(), g=(), d=(), m=())
    once = (u + (m + 1) * w) * g - g * (u + m * w)
    other = g * g - 2 * d * g + d * d
    return identical(once, w * g) and identical(w * g * g - g * (w * g), 0 * g) and identical(other, (g - d) ** 2)


SHIFT = (
    "if a_m = Σ(u_i + m w_i)γ_i^m vanishes for all m, apply the shift E: Π_{j≠i}(E − γ_j)²(E − γ_i) leaves "
    "w_i γ_i Π(γ_i − γ_j)² γ_i^m = 0, so w_i = 0, then u_i = 0 (each rule as a polynomial)"
)


@claim("paper.LA.1")
def gelu_independence(
    *,
    nodes: Nodes = lambda letters: letters,
    coefficient: Callable[[int], Fraction] = lambda n: Fraction((-1) ** n, 2**n * math.factorial(n) * (2 * n + 1)),
) -> Verdict:
    exact = [Fraction((-1) ** n, 2**n * math.factorial(n)) / (2 * n + 1) for n in range(20)]
    return by_steps(
        "Every even coefficient differs from zero, and the sequences they multiply are independent.",
        "The functions are dependent, or the series is another.",
        ("(20) is z times the integral of the series of e^{−z²/2}, term by term, and no term is zero (20 terms as "
         "fractions)", all(coefficient(n) == value != 0 for n, value in enumerate(exact))),
        (SHIFT, shifts_annihilate()),
        ("the determinant of the first 2h rows vanishes for equal or zero γ only, h = 1, 2, 3", separates(nodes)),
        InWords("the series of e^{−z²/2} converges everywhere and may be integrated term by term, for every n"),
    )  # fmt: skip


def silu_series(terms: int) -> list[Fraction]:
    """Coefficients of z/(1 + e^{−z}), by division of power series."""
    divisor = [Fraction((-1) ** n, math.factorial(n)) + (n == 0) for n in range(terms)]
    quotient: list[Fraction] = []
    for n in range(terms):
        rest = Fraction(int(n == 0)) - sum((quotient[k] * divisor[n - k] for k in range(n)), Fraction(0))
        quotient.append(rest / divisor[0])
    return [Fraction(0), *quotient][:terms]


def bernoulli_coefficient(n: int) -> Fraction:
    """Return (2^{2n} − 1) B_{2n} / (2n)!, equation (37)."""
    bernoulli = flint.fmpq.bernoulli(2 * n)
    return (4**n - 1) * Fraction(int(bernoulli.p), int(bernoulli.q)) / math.factorial(2 * n)


@claim("paper.LA.2")
def silu_independence(*, coefficient: Callable[[int], Fraction] = bernoulli_coefficient) -> Verdict:
    exact = silu_series(41)
    same = exact[1] == Fraction(1, 2) and all(coefficient(n) == exact[2 * n] != 0 for n in range(1, 21))
    return by_steps(
        "The series is the one printed, its even coefficients differ from zero, and the rest is Lemma A.1.",
        "The functions are dependent, or the series is another.",
        ("(37) against z/(1 + e^{−z}) divided out, coefficients 2 to 40 as fractions, none zero", same),
        (SHIFT, shifts_annihilate()),
        InWords("beyond 40: z/2 · tanh(z/2) generates (37), and |B_2n| = 2(2n)! ζ(2n)/(2π)^{2n} > 0 (Euler)"),
    )


def double_pole(numerators: Sequence[tuple[Any, Any]], point: Any, scale: Any) -> Any:
    """Two fractions (c_0 + c_1 t)/(scale·(t − point))², in simple and double pole: the determinant of the change.

    c_0 + c_1 t = c_1 (t − point) + (c_0 + c_1 point); `point` is given as a pair (p, q) for p/q.
    """
    top, bottom = point
    rows = [(c1 * bottom, c0 * bottom + c1 * top) for c0, c1 in numerators]
    return rows[0][0] * rows[1][1] - rows[0][1] * rows[1][0] * scale


POLES = "fractions with distinct poles are independent: multiply by (t − p_i)² and let t → p_i, then again"


@claim("paper.LB.1")
def attention_fractions(*, second: Callable[[Any], tuple[Any, Any]] = lambda a: (a * 0 + 1, a)) -> Verdict:
    a = Letters(a=()).scalar("a")
    one = a * 0 + 1
    result = double_pole([(0 * a, a), second(a)], (-one, a), one)
    return by_steps(
        "Each pole carries two independent fractions, and the constant is left at infinity.",
        "The functions are dependent.",
        (f"{POLES}: at t = −1/α the two of one i have the determinant ±α^k ≠ 0", product_of(result, [a])),
        ("at t → ∞ the fractions vanish (degree 1 over degree 2) and the constant does not", second(a)[1] != 0),
    )


@claim("paper.LB.2")
def rotary_fractions(*, second: Callable[[Any, Any], tuple[Any, Any]] = lambda a, b: (a * b, b)) -> Verdict:
    a, b = Letters(a=(), b=())
    one = a * 0 + 1
    result = double_pole([(a * b, 0 * a), second(a, b)], (-(a + b), one), one)
    what = f"{POLES}: at t = −(α + β) the two of one i have the determinant −αβ² ≠ 0"
    return by_steps(
        "Each pole carries two independent fractions.",
        "The functions are dependent.",
        (what, product_of(result, [a, b])),
    )


@claim("paper.LB.3")
def rotations_span(*, exponent: Callable[[int, int], Fraction] = lambda i, m: Fraction(-i, m)) -> Verdict:
    distinct = all(
        len({exponent(i, m) for i in range(m)}) == m and all(-1 < exponent(i, m) <= 0 for i in range(m))
        for m in range(1, 65)
    )
    smallest = math.inf
    for planes in (1, 2, 3, 4):
        with precision(256):
            powers = [exponent(i, planes) for i in range(planes)]
            angles = [flint.arb(10000) ** flint.arb(flint.fmpq(p.numerator, p.denominator)) for p in powers]
            steps = range(1, 2 * planes + 1)
            rows = [[entry for a in angles for entry in ((n * a).cos(), (n * a).sin())] for n in steps]
            smallest = min(smallest, float(abs(flint.arb_mat(rows).det()).abs_lower()))
    return by_steps(
        "The first 2m rotations are a Vandermonde matrix of 2m distinct numbers, up to an invertible factor.",
        "Two of the numbers coincide.",
        ("cos Lφ, sin Lφ are an invertible combination of λ^L and λ^{−L}, λ = e^{iφ}, and the determinant of powers "
         f"is a product of differences; directly, in balls, m = 1 to 4: at least {smallest:.2g}", smallest > 0),
        ("λ_1^{±1}, …, λ_m^{±1} are distinct: the φ_j are, and lie in (0, 1], below π (m up to 64)", distinct),
        InWords("for every m: 10000^{−x} falls strictly, so the φ_j are distinct and in (0, 1], and the determinant of "
                "powers of distinct numbers is not zero (Vandermonde)"),
    )  # fmt: skip


@claim("paper.LC.1")
def cocountable(*, multiple: Callable[[int], int] = lambda k: 2 * k + 1) -> Verdict:
    (c,) = Letters(c=())
    # With c = cos(θ/2): 1 + cos θ = 2c² and sin²θ = 4c²(1 − c²).
    modulus = identical((2 * c**2) ** 2 + 4 * c**2 * (1 - c**2), 4 * c**2)
    zeros = [flint.acb(0, multiple(k) * flint.arb.pi()) for k in range(-6, 7)]
    vanish = all(bool((1 + z.exp()).contains(0)) and not bool(z.exp().contains(0)) for z in zeros)
    return by_steps(
        "For each z the exceptions are none or the odd multiples of π/Im z; a countable union of those is countable.",
        "There are other zeros, or fewer.",
        ("|e^{az}| = e^{a Re z} is 1 only if a Re z = 0, and |1 + e^{iθ}|² = 4cos²(θ/2), as a polynomial in cos(θ/2), "
         "which vanishes at odd multiples of π alone", modulus),
        ("there e^{az} = −1, whose derivative in z does not vanish: the zeros are simple (balls, 13 of them)", vanish),
        InWords("for each z ≠ 0 the bad a form a countable set, and a countable union of countable sets is countable"),
    )  # fmt: skip


def share_a_pole(first: Fraction, second: Fraction) -> bool:
    """Return whether odd/first = odd/second for some odd numbers: in lowest terms first/second has no factor two."""
    ratio = first / second
    return ratio.numerator % 2 == 1 and ratio.denominator % 2 == 1


COMMON = """\
import numpy as np
z = 1j * np.pi                                  # B = 1 and B' = 3: squares 1 and 9 differ
print("denominators there:", 1 + np.exp(-z), 1 + np.exp(-3 * z))
assert abs(1 + np.exp(-z)) < 1e-12 and abs(1 + np.exp(-3 * z)) < 1e-12"""


@claim("paper.eq155")
def distinct_poles(*, share: Callable[[Fraction, Fraction], bool] = share_a_pole) -> Verdict:
    pairs = [(Fraction(a), Fraction(b)) for a in range(1, 8) for b in range(a + 1, 8)]
    bad = [(a, b) for a, b in pairs if share(a, b)]
    return decide(
        not bad,
        "No two of them share a pole.",
        "Slopes whose ratio is a quotient of odd numbers share poles. The density that the proof needs can be had from "
        "Lemma C.1 instead.",
        Evidence(
            what="pairs B < B′ below 8 with a common pole, exactly", value=f"{len(bad)} of {len(pairs)}", proof=True
        ),
        witness=Witness(
            data={"B": 1, "B′": 3}, claimed="no common pole", found="z = iπ is a pole of both", numpy=COMMON
        ),
        scope="at whole slopes",
    )


@claim("paper.eq155.corrected")
def shared_poles(*, near: Callable[[int], Fraction] = lambda n: Fraction(4 * n + 1, 2 * n + 1)) -> Verdict:
    agree = all(
        share_a_pole(Fraction(a), Fraction(b))
        is any((2 * k + 1) * b == (2 * m + 1) * a for k in range(40) for m in range(40))
        for a in range(1, 20) for b in range(1, 20)
    )  # fmt: skip
    close = all(share_a_pole(near(n), Fraction(1)) and abs(near(n) - 2) < Fraction(1, n) for n in (1, 10, 100, 1000))
    return by_steps(
        "Exceptions are countable for each slope, which is all that density needs.",
        "The set is open after all.",
        ("poles i(2k + 1)π/B and i(2k′ + 1)π/B′ are compared directly for slopes up to 19", agree),
        ("S_2 is not open: B/B′ = 2 is in it, and (4n + 1)/(2n + 1) → 2 is not", close),
        ("given all other parameters, S_2, S_3 and S_5 forbid countably many B (Lemma C.1)", cocountable().holds),
        InWords("S_1 and S_4 are open and dense, and an interval is not countable, so every open set has a point of "
                "the intersection of all five: density, which is all that the proof uses"),
    )  # fmt: skip


Generic = Callable[..., bool]
"""Whether the polynomials of an argument are what it needs; the keyword is its subject."""


def _squares_differ(*, difference: Callable[[Any, Any], Any] = lambda b, c: b**2 - c**2) -> bool:
    b = Letters(B=(2, 2))["B"]
    return difference(b[0, 0], b[1, 0]) != 0


def _heads_differ(*, tied: bool = False) -> bool:
    q, k, r, m = Letters(Q=(2, 1), K=(2, 1), R=(2, 1), L=(2, 1))
    return ((q @ k.T) - (q @ k.T if tied else r @ m.T))[0, 1] != 0


def _form_shows(form: Callable[[Any, Any, Any], Any], shown: Callable[[Matrix], Matrix], other: str) -> bool:
    """Return whether the second derivatives of a form in x and the other letter are the entries of the matrix shown."""
    letters = Letters(x=(2,), y=(2,), M=(2, 2))
    value, wanted = form(letters["x"], letters["y"], letters["M"]), shown(letters["M"])
    rows = [letters.gradient(part, other) for part in letters.gradient(value, "x")]
    return all(identical(rows[a][b], wanted[a, b]) for a in range(2) for b in range(2))


def _inputs_tell(*, form: Callable[[Any, Any, Any], Any] = lambda x, y, m: x @ m @ (y - x)) -> bool:
    return _form_shows(form, lambda m: m, "y")


def _squares_tell(*, shown: Callable[[Matrix], Matrix] = lambda m: m + m.T) -> bool:
    return _form_shows(lambda x, y, m: x @ m @ x, shown, "x")


def _values_see(*, outputs: int = 1) -> bool:
    letters = Letters(V=(2, 1), O=(2, 1), z=(2,))
    z, product = letters["z"], letters["V"] @ (outputs * letters["O"]).T
    return product[0, 1] != 0 and identical(letters.gradient(z @ product[:, 1], "z"), product[:, 1])


def _zeros_are_countable(*, multiple: Callable[[int], int] = lambda k: 2 * k + 1) -> bool:
    return cocountable(multiple=multiple).holds


def _box_fixes(*, width: Fraction = Fraction(1, 3)) -> bool:
    return 1 - width > width


def _powers_independent(*, zeros: Sequence[int] = (1, 2, 3, 4, 5, 6)) -> bool:
    return determinant(arranged([[Fraction(n) ** k for k in range(len(zeros))] for n in zeros])) != 0


def _outputs_together(*, sign: int = 1) -> bool:
    a, c, g, h = Letters(A=(3,), C=(2,), G=(3,), H=(2,))
    matrix = g[:, None] @ c[None, :] + a[:, None] @ h[None, :]
    return all(identical(matrix[k, j], g[k] * c[j] + sign * a[k] * h[j]) for k in range(3) for j in range(2))


ZERO_SET = "the zero set of a polynomial that is not zero has no interior, so its complement is dense and open"

GENERIC: dict[str, tuple[str, Generic]] = {
    "paper.eq29": (f"B_1j² − B_2j² and the entries are polynomials other than zero; {ZERO_SET}", _squares_differ),
    "paper.eq79": (f"an entry of Q_iK_iᵀ − Q_jK_jᵀ is a polynomial other than zero; {ZERO_SET}", _heads_differ),
    "paper.eq81": (
        f"∂²/∂x_a∂y_b of xM(y − x)ᵀ is M_ab, so it is not the zero polynomial if M is not zero; {ZERO_SET}",
        _inputs_tell,
    ),
    "paper.eq84": (
        f"an entry is a polynomial other than zero and the slope in z is that column; {ZERO_SET}",
        _values_see,
    ),
    "paper.eq101": (f"∂²/∂x_a∂x_b of xMxᵀ is M_ab + M_ba; {ZERO_SET}", _squares_tell),
    "paper.eq122": ("the forms of two heads at y = 0 differ: ∂²/∂x_a∂x_b of xMxᵀ is M_ab + M_ba", _squares_tell),
    "paper.eq160": ("for fixed W, A, C all but countably many B do it (Lemma C.1)", _zeros_are_countable),
    "paper.eq164": ("entries in T exceed 1 − 1/3 = 2/3, the others stay below 1/3", _box_fixes),
    "paper.identity": (
        "a polynomial of degree below m with m zeros is zero (the matrix of powers of 1, …, 6 is invertible)",
        _powers_independent,
    ),
    "paper.scalar": (
        "equation (2) is one condition for each output κ, which sees row κ of A alone; the matrix equation of "
        "Theorem 4.2 is the list of theirs, entry by entry",
        _outputs_together,
    ),
}
"""The step that a machine checks for each set or statement, and its check."""

IN_WORDS = {
    "paper.eq122": "there the difference of two sums is e^a − e^b, which vanishes only where the forms a and b agree; "
    "an analytic function that is not zero vanishes on no open set",
    "paper.eq160": "𝔡 does not depend on B, since ∇_B h = 0, and zeros of a meromorphic function are countable",
    "paper.identity": "for meromorphic functions of one variable it is the identity theorem; gates have no pole at "
    "real inputs, because their denominators are positive there",
}
"""Steps of the same arguments that no machine checks."""

GENERIC_MESSAGES = {
    "paper.eq29": "Almost every B has nonzero entries with distinct squares.",
    "paper.eq79": "The products QKᵀ of different heads differ for almost all weights.",
    "paper.eq81": "For almost all inputs the scores of different heads differ.",
    "paper.eq84": "For almost all weights the values see every direction.",
    "paper.eq101": "Almost all inputs tell different quadratic forms apart.",
    "paper.eq122": "Almost all inputs tell rotary heads apart.",
    "paper.eq160": "Almost all B avoid the zeros of 𝔡.",
    "paper.eq164": "On the box the k largest entries are those of T.",
    "paper.identity": "What vanishes on the set vanishes identically.",
    "paper.scalar": "The conditions of the outputs, taken together, are the matrix equation.",
}


def _generic(code: str, argument: str, holds: Generic) -> Callable[..., Verdict]:
    words = [InWords(IN_WORDS[code])] if code in IN_WORDS else []
    return lambda **subject: by_steps(
        GENERIC_MESSAGES[code], "The argument fails.", (argument, holds(**subject)), *words
    )


for _code, (_argument, _holds) in GENERIC.items():
    claim(_code)(_generic(_code, _argument, _holds))
