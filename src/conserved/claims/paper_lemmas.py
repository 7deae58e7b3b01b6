"""Claims of the paper: the lemmas of its appendices, and the sets on which its proofs work, for all sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import flint

from conserved.certify.arithmetic import precision
from conserved.claims.judging import argued, judged
from conserved.claims.ledger import claim
from conserved.claims.polynomials import Letters, Matrix, arranged, determinant, identical
from conserved.verdict import Evidence, Verdict, Witness

Nodes = Callable[[Sequence[Any]], Sequence[Any]]


def product_of(polynomial: Any, letters: Sequence[Any]) -> bool:
    """Whether a polynomial is a constant times powers of letters, so that it vanishes only where one of them does."""
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
    """Whether that determinant vanishes for equal or zero γ only, for up to three neurons."""
    good = True
    for count in range(1, most + 1):
        letters = list(Letters(g=(count,))["g"])
        gaps = [letters[i] - letters[j] for i in range(count) for j in range(i + 1, count)]
        good &= product_of(determinant(vandermonde(nodes(letters))), [*gaps, *letters])
    return good


def shifts_annihilate() -> bool:
    """(E − γ)(u + mw)γ^m = wγ·γ^m, (E − γ)wγ·γ^m = 0, and (E − δ)² multiplies γ^m by (γ − δ)², over the factor γ^m."""
    letters = Letters(u=(), w=(), g=(), d=(), m=())
    u, w, g, d, m = (letters.scalar(name) for name in "uwgdm")
    once = (u + (m + 1) * w) * g - g * (u + m * w)
    other = g * g - 2 * d * g + d * d
    return identical(once, w * g) and identical(w * g * g - g * (w * g), 0 * g) and identical(other, (g - d) ** 2)


SHIFT = (
    "if a_m = Σ(u_i + m w_i)γ_i^m vanishes for all m, apply the shift E: Π_{j≠i}(E − γ_j)²(E − γ_i) leaves "
    "w_i γ_i Π(γ_i − γ_j)² γ_i^m = 0, so w_i = 0, then u_i = 0 (each rule as a polynomial)"
)


@claim(
    "paper.LA.1",
    "GELU and its derivative are independent",
    statement="If α_1², …, α_h² are nonzero and distinct, the functions GELU(α_i t) and t GELU′(α_i t) are linearly "
    "independent.",
    place="Lemma A.1 and equations (20) to (28)",
    lines="504-548",
    conditions=["α_i² nonzero and pairwise distinct"],
    hypotheses="Sums are printed up to d_1 where h is meant (23), and γ_n is used before it is set (22): nothing rests "
    "on it.",
    latex=[
        r"\operatorname{GELU}(z)=\frac{z}{2}+\frac{1}{\sqrt{2\pi}}\sum_{n\ge 0}\frac{(-1)^n}{2^n\,n!\,(2n+1)}z^{2n+2}"
    ],
)
def gelu_independence(
    *,
    nodes: Nodes = lambda letters: letters,
    coefficient: Callable[[int], Fraction] = lambda n: Fraction((-1) ** n, 2**n * math.factorial(n) * (2 * n + 1)),
) -> Verdict:
    exact = [Fraction((-1) ** n, 2**n * math.factorial(n)) / (2 * n + 1) for n in range(20)]
    return argued(
        "Every even coefficient differs from zero, and the sequences they multiply are independent.",
        "The functions are dependent, or the series is another.",
        ("(20) is z times the integral of the series of e^{−z²/2}, term by term, and no term is zero (20 terms as "
         "fractions)", all(coefficient(n) == value != 0 for n, value in enumerate(exact))),
        (SHIFT, shifts_annihilate()),
        ("the determinant of the first 2h rows vanishes for equal or zero γ only, h = 1, 2, 3", separates(nodes)),
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
    """(2^{2n} − 1) B_{2n} / (2n)!, equation (37)."""
    bernoulli = flint.fmpq.bernoulli(2 * n)
    return (4**n - 1) * Fraction(int(bernoulli.p), int(bernoulli.q)) / math.factorial(2 * n)


@claim(
    "paper.LA.2",
    "SiLU and its derivative are independent",
    statement="Under the same condition the functions SiLU(α_i t) and t SiLU′(α_i t) are linearly independent.",
    place="Lemma A.2 and equation (37)",
    lines="588-602",
    conditions=["α_i² nonzero and pairwise distinct", "|z| < π for the series"],
    hypotheses="That no Bernoulli number B_2n vanishes is classical (its sign alternates) and is checked up to B_40.",
    latex=[r"\operatorname{SiLU}(z)=\frac{z}{2}+\sum_{n\ge 1}\frac{(2^{2n}-1)B_{2n}}{(2n)!}z^{2n}"],
)
def silu_independence(*, coefficient: Callable[[int], Fraction] = bernoulli_coefficient) -> Verdict:
    exact = silu_series(41)
    same = exact[1] == Fraction(1, 2) and all(coefficient(n) == exact[2 * n] != 0 for n in range(1, 21))
    return argued(
        "The series is the one printed, its even coefficients differ from zero, and the rest is Lemma A.1.",
        "The functions are dependent, or the series is another.",
        ("(37) against z/(1 + e^{−z}) divided out, coefficients 2 to 40 as fractions, none zero", same),
        (SHIFT, shifts_annihilate()),
    )


def double_pole(numerators: Sequence[tuple[Any, Any]], point: Any, scale: Any) -> Any:
    """Two fractions (c_0 + c_1 t)/(scale·(t − point))², in simple and double pole: the determinant of the change.

    c_0 + c_1 t = c_1 (t − point) + (c_0 + c_1 point); `point` is given as a pair (p, q) for p/q.
    """
    top, bottom = point
    rows = [(c1 * bottom, c0 * bottom + c1 * top) for c0, c1 in numerators]
    return rows[0][0] * rows[1][1] - rows[0][1] * rows[1][0] * scale


POLES = "fractions with distinct poles are independent: multiply by (t − p_i)² and let t → p_i, then again"


@claim(
    "paper.LB.1",
    "The fractions of attention are independent",
    statement="For distinct nonzero α_i the functions tα_i/(1 + tα_i)², 1/(1 + tα_i) and 1 are linearly independent.",
    place="Lemma B.1",
    lines="786-794",
    conditions=["α_i pairwise distinct and nonzero"],
    latex=[r"t\mapsto\frac{t\alpha_i}{(1+t\alpha_i)^2},\quad\frac{1}{1+t\alpha_i},\quad 1"],
)
def attention_fractions(*, second: Callable[[Any], tuple[Any, Any]] = lambda a: (a * 0 + 1, a)) -> Verdict:
    a = Letters(a=()).scalar("a")
    one = a * 0 + 1
    found = double_pole([(0 * a, a), second(a)], (-one, a), one)
    return argued(
        "Each pole carries two independent fractions, and the constant is left at infinity.",
        "The functions are dependent.",
        (f"{POLES}: at t = −1/α the two of one i have the determinant ±α^k ≠ 0", product_of(found, [a])),
        ("at t → ∞ the fractions vanish (degree 1 over degree 2) and the constant does not", second(a)[1] != 0),
    )


@claim(
    "paper.LB.2",
    "The fractions of rotary attention are independent",
    statement="For positive α_i, β_i with distinct sums the functions α_iβ_i/(α_i + β_i + t)² and "
    "β_i(t + α_i)/(α_i + β_i + t)² are linearly independent.",
    place="Lemma B.2",
    lines="976-984",
    conditions=["α_i, β_i positive", "α_i + β_i pairwise distinct"],
    latex=[
        r"t\mapsto\frac{\alpha_i\beta_i}{(\alpha_i+\beta_i+t)^2},\quad\frac{\beta_i(t+\alpha_i)}{(\alpha_i+\beta_i+t)^2}"
    ],
)
def rotary_fractions(*, second: Callable[[Any, Any], tuple[Any, Any]] = lambda a, b: (a * b, b)) -> Verdict:
    letters = Letters(a=(), b=())
    a, b = letters.scalar("a"), letters.scalar("b")
    one = a * 0 + 1
    found = double_pole([(a * b, 0 * a), second(a, b)], (-(a + b), one), one)
    what = f"{POLES}: at t = −(α + β) the two of one i have the determinant −αβ² ≠ 0"
    return argued(
        "Each pole carries two independent fractions.",
        "The functions are dependent.",
        (what, product_of(found, [a, b])),
    )


@claim(
    "paper.LB.3",
    "Rotations span the complex scalings",
    statement="The rotations R_1, R_2, … of rotary positions span all matrices that are a_jI + b_jJ on every plane.",
    place="Lemma B.3",
    lines="1008-1030",
    conditions=["the frequencies φ_i = 10000^{−(i−1)/m}"],
    hypotheses="R_1, …, R_2m are enough.",
    latex=[r"\operatorname{span}\{R_L\}=\{\operatorname{diag}(a_1I+b_1J,\dots,a_mI+b_mJ)\}"],
)
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
    return argued(
        "The first 2m rotations are a Vandermonde matrix of 2m distinct numbers, up to an invertible factor.",
        "Two of the numbers coincide.",
        ("cos Lφ, sin Lφ are an invertible combination of λ^L and λ^{−L}, λ = e^{iφ}, and the determinant of the powers "
         f"is a product of differences; directly, in balls, m = 1 to 4: at least {smallest:.2g}", smallest > 0),
        ("λ_1^{±1}, …, λ_m^{±1} are distinct: the φ_j are, and lie in (0, 1], below π (exponents for m up to 64)", distinct),
    )  # fmt: skip


@claim(
    "paper.LC.1",
    "Almost every slope avoids a countable set",
    statement="For a countable set S of complex numbers, 1 + e^{az} has no zero in S for all but countably many real a; "
    "the poles of SiLU(az) are i(2k + 1)π/a, all simple.",
    place="Section C.1 and Lemma C.1",
    lines="1050-1074",
    latex=[r"f_a(z)=1+e^{az}=0\iff az=i(2k+1)\pi"],
)
def cocountable(*, multiple: Callable[[int], int] = lambda k: 2 * k + 1) -> Verdict:
    letters = Letters(c=())
    c = letters.scalar("c")
    # With c = cos(θ/2): 1 + cos θ = 2c² and sin²θ = 4c²(1 − c²).
    modulus = identical((2 * c**2) ** 2 + 4 * c**2 * (1 - c**2), 4 * c**2)
    zeros = [flint.acb(0, multiple(k) * flint.arb.pi()) for k in range(-6, 7)]
    vanish = all(bool((1 + z.exp()).contains(0)) and not bool(z.exp().contains(0)) for z in zeros)
    return argued(
        "For each z the exceptions are none or the odd multiples of π/Im z; a countable union of those is countable.",
        "There are other zeros, or fewer.",
        ("|e^{az}| = e^{a Re z} is 1 only if a Re z = 0, and |1 + e^{iθ}|² = 4cos²(θ/2), as a polynomial in cos(θ/2), "
         "which vanishes at odd multiples of π alone", modulus),
        ("there e^{az} = −1, whose derivative in z does not vanish: the zeros are simple (balls, 13 of them)", vanish),
    )  # fmt: skip


def share_a_pole(first: Fraction, second: Fraction) -> bool:
    """Whether odd/first = odd/second for some odd numbers: in lowest terms first/second has no factor two."""
    ratio = first / second
    return ratio.numerator % 2 == 1 and ratio.denominator % 2 == 1


COMMON = """\
import numpy as np
z = 1j * np.pi                                  # B = 1 and B' = 3: squares 1 and 9 differ
print("denominators there:", 1 + np.exp(-z), 1 + np.exp(-3 * z))
assert abs(1 + np.exp(-z)) < 1e-12 and abs(1 + np.exp(-3 * z)) < 1e-12"""


@claim(
    "paper.eq155",
    "Different squares, different poles",
    statement="SiLU(Bz) and SiLU(B′z) have no common pole exactly if B² ≠ B′²; the set S_2 of such parameters is open.",
    place="Equation (155) and the sentence after it",
    lines="1142, 1153-1158",
    conditions=["B nonzero (S_1)"],
    latex=[r"\mathbf{S}_2=\{\theta:(B^{(i)}_{kj})^2\ \text{are pairwise distinct for all}\ i,k\}"],
    severity="false",
    corrected_by="paper.eq155.corrected",
)
def distinct_poles(*, share: Callable[[Fraction, Fraction], bool] = share_a_pole) -> Verdict:
    pairs = [(Fraction(a), Fraction(b)) for a in range(1, 8) for b in range(a + 1, 8)]
    bad = [(a, b) for a, b in pairs if share(a, b)]
    return judged(
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


@claim(
    "paper.eq155.corrected",
    "When SiLU(Bz) and SiLU(B′z) share a pole",
    statement="They do exactly if B/B′ is a quotient of odd whole numbers. S_2 is not open, but for each B′ all but "
    "countably many B are in it, so S_1 ∩ S_2 ∩ S_3 ∩ S_4 is still dense and the proof of Theorem 4.5 stands.",
    place="repairs Equation (155)",
    lines="1153-1162",
    whose="ours",
    latex=[r"\frac{(2k+1)\pi}{B}=\frac{(2k'+1)\pi}{B'}\iff\frac{B}{B'}=\frac{2k+1}{2k'+1}"],
    corrects="paper.eq155",
)
def shared_poles(*, near: Callable[[int], Fraction] = lambda n: Fraction(4 * n + 1, 2 * n + 1)) -> Verdict:
    agree = all(
        share_a_pole(Fraction(a), Fraction(b))
        is any((2 * k + 1) * b == (2 * m + 1) * a for k in range(40) for m in range(40))
        for a in range(1, 20) for b in range(1, 20)
    )  # fmt: skip
    close = all(share_a_pole(near(n), Fraction(1)) and abs(near(n) - 2) < Fraction(1, n) for n in (1, 10, 100, 1000))
    return argued(
        "Exceptions are countable for each slope, which is all that density needs.",
        "The set is open after all.",
        ("poles i(2k + 1)π/B and i(2k′ + 1)π/B′ are compared directly for slopes up to 19", agree),
        ("S_2 is not open: B/B′ = 2 is in it, and (4n + 1)/(2n + 1) → 2 is not", close),
        ("S_1 and S_4 are open and dense; given all other parameters, S_2, S_3 and S_5 forbid countably many B "
         "(Lemma C.1), so a point of their intersection lies in every open set", cocountable().holds),
    )  # fmt: skip


Generic = Callable[..., bool]
"""Whether the polynomials of an argument are what it needs; the keyword is its subject."""


def _squares_differ(*, difference: Callable[[Any, Any], Any] = lambda b, c: b**2 - c**2) -> bool:
    b = Letters(B=(2, 2))["B"]
    return difference(b[0, 0], b[1, 0]) != 0


def _heads_differ(*, tied: bool = False) -> bool:
    letters = Letters(Q=(2, 1), K=(2, 1), R=(2, 1), L=(2, 1))
    q, k, r, m = (letters[name] for name in "QKRL")
    return ((q @ k.T) - (q @ k.T if tied else r @ m.T))[0, 1] != 0


def _form_shows(form: Callable[[Any, Any, Any], Any], shown: Callable[[Matrix], Matrix], other: str) -> bool:
    """Whether the second derivatives of a form in x and the other letter are the entries of the matrix shown."""
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
    letters = Letters(A=(3,), C=(2,), G=(3,), H=(2,))
    a, c, g, h = (letters[name] for name in "ACGH")
    matrix = g[:, None] @ c[None, :] + a[:, None] @ h[None, :]
    return all(identical(matrix[k, j], g[k] * c[j] + sign * a[k] * h[j]) for k in range(3) for j in range(2))


ZERO_SET = "the zero set of a polynomial that is not zero has no interior, so its complement is dense and open"

GENERIC: tuple[tuple[str, str, str, str, str, str, Generic], ...] = (
    ("paper.eq29", "Generic weights of a network", "Equations (29), (31), (46), (48)", "550-562, 649-665",
     "The squares B_ij² are nonzero and distinct, and all A_i, C_ij nonzero, on a dense set of parameters.",
     f"B_1j² − B_2j² and the entries are polynomials other than zero; {ZERO_SET}", _squares_differ),
    ("paper.eq79", "Generic heads differ", "Equation (79)", "794-796, 806",
     "The products Q_iK_iᵀ of different heads are different on a dense set of parameters.",
     f"an entry of Q_iK_iᵀ − Q_jK_jᵀ is a polynomial other than zero; {ZERO_SET}", _heads_differ),
    ("paper.eq81", "Generic inputs tell heads apart", "Equations (80) and (81)", "798-806",
     "If the Q_iK_iᵀ differ, the scores xQ_iK_iᵀ(y − x)ᵀ differ on a dense set of inputs.",
     f"∂²/∂x_a∂y_b of xM(y − x)ᵀ is M_ab, so it is not the zero polynomial if M is not zero; {ZERO_SET}",
     _inputs_tell),
    ("paper.eq84", "Generic values see every direction", "Equations (82) to (85)", "808-821",
     "All entries of V_iO_iᵀ are nonzero on a dense set, and there z(V_iO_iᵀ)_:,κ ≠ 0 for a dense set of z; so (82) "
     "gives (85) for all z.", f"an entry is a polynomial other than zero and the slope in z is that column; {ZERO_SET}",
     _values_see),
    ("paper.eq101", "Quadratic forms tell heads apart", "Equation (101) and the sentence after it", "902-906",
     "xQ_iK_iᵀxᵀ determines Q_iK_iᵀ + K_iQ_iᵀ, and these differ between heads on a dense set.",
     f"∂²/∂x_a∂x_b of xMxᵀ is M_ab + M_ba; {ZERO_SET}", _squares_tell),
    ("paper.eq122", "Generic inputs tell rotary heads apart", "Equations (121) and (122)", "984-992",
     "If the symmetric parts differ, e^{xQ_iK_iᵀxᵀ} + e^{xQ_iRK_iᵀyᵀ} differ between heads on a dense set of inputs.",
     "at y = 0 the difference of two heads is e^a − e^b, which vanishes only where the quadratic forms a and b agree; an "
     "analytic function that is not zero vanishes on no open set", _squares_tell),
    ("paper.eq160", "Generic slopes avoid the zeros of 𝔡", "Equations (150) to (160)", "1160-1162, 1184-1187, 1197-1205",
     "S_3 and S_5, which forbid a pole of SiLU(Bz) at the poles of the gates or at the zeros of 𝔡, hold on a dense set.",
     "𝔡 does not depend on B, since ∇_B h = 0; poles and zeros of a meromorphic function are countable, so for fixed "
     "W, A, C all but countably many B do it (Lemma C.1)", _zeros_are_countable),
    ("paper.eq164", "Boxes on which the routing is fixed", "Equations (164) to (166)", "1219-1233",
     "On the box |v_i| < 1/3 around e_T the k largest entries are those of T.",
     "entries in T exceed 1 − 1/3 = 2/3, the others stay below 1/3", _box_fixes),
    ("paper.identity", "What vanishes on a small set vanishes", "The identity theorem, where it is used",
     "348, 780, 970, 1253-1257",
     "A rational function that is zero at all positive integers is zero; so is an analytic function that is zero on an "
     "open set.", "a polynomial of degree below m with m zeros is zero (the matrix of powers of 1, …, 6 is invertible); the "
     "other is the identity theorem, and the gates have no pole at real inputs since their denominators are positive",
     _powers_independent),
    ("paper.scalar", "Scalar outputs suffice", "Appendix A, and its vector extension", "462, 667-671, 1090",
     "The constraints for several outputs are those of the single outputs together, so each proof may take one output.",
     "equation (2) is one condition for each output κ, which sees row κ of A alone; the matrix equation of Theorem 4.2 "
     "is the list of theirs, entry by entry", _outputs_together),
)  # fmt: skip
"""Code, title, place, lines, reading, argument, what the machine checks of it."""


def _generic(argument: str, holds: Generic) -> Callable[..., Verdict]:
    return lambda **subject: argued("It does.", "The argument fails.", (argument, holds(**subject)))


for _code, _title, _place, _lines, _statement, _argument, _holds in GENERIC:
    claim(_code, _title, statement=_statement, place=_place, lines=_lines)(_generic(_argument, _holds))
