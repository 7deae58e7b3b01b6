r"""Claims of ours about the paper's theorems: C¹ laws, constancy on components, every size, and Theorem 4.6 in full.

*Orbits.* The equations of Theorems 4.2 and 4.3 say that the derivative of h vanishes along the boosts b_{ja}: (Q_j,
K_a) ↦ (K_a, Q_j) of the 2d × r matrix X = (Q; K). Boosts generate so(d, d), the algebra of the form η = diag(1, −1),
so h is constant on the orbits of its connected group, and XᵀηX = QᵀQ − KᵀK is the invariant.

*At most four values on a level set.* Let S be the column space of X and R = S ∩ S^⊥ its radical. The group has
elements that scale R by e^{−t}, a dual of R by e^{t}, and keep the rest of S; they move X to X_t, which tends to a
matrix X_∞ with the same Gram matrix G and with kernel ker G. By continuity h(X) = h(X_∞). Such X_∞ are the isometric
embeddings of R^r/ker G, and by Witt's theorem O(d, d) acts transitively on them; it has four components, so h has at
most four values where XᵀηX = G. A continuous function with finitely many values is constant on connected components.

*Rotary planes.* With J the fields generate su(d, d) on C^d ⊕ C^d. Its connected group is transitive on vectors of
equal nonzero norm, and isotropic vectors contract to zero, so h is a function of ‖Q^(j)‖² − ‖K^(j)‖².

*Theorem 4.6.* Fix x ≠ 0. Let P(m) say: wherever S, |S| = m, holds the m largest scores at x, the experts of S satisfy
their equations and ∇_{W_i}h is the same for all i in S. P(k) is Theorem 4.5 for the experts of S, near θ. If P(m)
holds and m ≥ 2, lower one row of S along x and raise another by as much until the score meets that of the next expert
l. Until then h is a function of Σ_S W_i and of the other parameters, so its gradient does not change meanwhile.
Beyond the wall P(m) holds for S with l in place of the lowered row. The gradient of h is continuous, so at the wall
it obeys both; the two sets share m − 1 ≥ 1 rows, so it is P(m + 1), and it was so at the start. P(n) is the theorem
where scores at x are distinct, hence everywhere by continuity.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np

from conserved.verdict import Evidence, Verdict, Witness
from conserved_papers.claims import paper_blocks as block
from conserved_papers.claims.certified import all_laws, certificate
from conserved_papers.claims.claim_record import Outcome
from conserved_papers.claims.judging import InWords, JudgedStep, by_steps, confirm, decide
from conserved_papers.claims.matrix_words import matrices
from conserved_papers.claims.paper_blocks import TWO_HEADS
from conserved_papers.claims.polynomials import Letters, Matrix, identical, rank
from conserved_papers.claims.registry import claim, claims, outcome

GeneratorsOfSize = Callable[[int], list[Matrix]]


def boosts(d: int) -> list[Matrix]:
    """Return the 2d × 2d matrices that exchange one of the first d rows with one of the last d."""
    result = []
    for first, second in itertools.product(range(d), range(d, 2 * d)):
        matrix = np.zeros((2 * d, 2 * d), dtype=int)
        matrix[first, second] = matrix[second, first] = 1
        result.append(matrix)
    return result


def complex_boosts(d: int) -> list[Matrix]:
    """Boosts of C^d ⊕ C^d with the factors 1 and −i: the fields of Theorem 4.4, as real matrices of four times d."""
    result = []
    for first, second in itertools.product(range(d), range(d, 2 * d)):
        for factor in (1, -1j):
            matrix = np.zeros((2 * d, 2 * d), dtype=complex)
            matrix[first, second], matrix[second, first] = factor, np.conj(factor)
            result.append(np.block([[matrix.real, -matrix.imag], [matrix.imag, matrix.real]]).astype(int))
    return result


def closure_dimension(generators: Sequence[Matrix]) -> int:
    """Return the dimension of the Lie algebra that matrices of whole numbers generate, exactly."""
    basis = [matrix.ravel() for matrix in generators]
    size = rank(np.array(basis, dtype=object))
    while True:
        square = [row.reshape(generators[0].shape) for row in basis]
        brackets = [a @ b - b @ a for a, b in itertools.product(square, generators)]
        basis = independent_rows([*basis, *(bracket.ravel() for bracket in brackets)])
        if len(basis) == size:
            return size
        size = len(basis)


def independent_rows(rows: Sequence[Matrix]) -> list[Matrix]:
    """Rows that span what all span."""
    basis: list[Matrix] = []
    for row in rows:
        if row.any() and rank(np.array([*basis, row], dtype=object)) > len(basis):
            basis.append(row)
    return basis


def equations_are_boosts() -> bool:
    """Entry (a, j) of K(∇_Q h)ᵀ + (∇_K h)Qᵀ is the derivative of h along the boost of rows j and a (d = r = 2)."""
    q, k, gq, gk = Letters(Q=(2, 2), K=(2, 2), G=(2, 2), H=(2, 2))
    left = k @ gq.T + gk @ q.T
    return all(identical(left[a, j], k[a] @ gq[j] + q[j] @ gk[a]) for a in range(2) for j in range(2))


def brackets_are_rotations() -> bool:
    """Check that [b_{ja}, b_{lc}] = δ_ac r_{jl} + δ_jl r_{ac}, for all indices of d = 3; a bracket has four."""
    d, unit = 3, np.eye(6, dtype=int)

    def boost(j: int, a: int) -> Matrix:
        return np.outer(unit[j], unit[d + a]) + np.outer(unit[d + a], unit[j])

    def turn(p: int, q: int) -> Matrix:
        return np.outer(unit[p], unit[q]) - np.outer(unit[q], unit[p])

    return all(
        (
            boost(j, a) @ boost(m, c) - boost(m, c) @ boost(j, a)
            == int(a == c) * turn(j, m) + int(j == m) * turn(d + a, d + c)
        ).all()
        for j, a, m, c in itertools.product(range(d), repeat=4)
    )


def boosts_scale_isotropic_vectors() -> bool:
    """Check that (c, s; s, c) with c² − s² = 1 maps (1, −1) to (c − s)(1, −1) and (1, 1) to (c + s)(1, 1)."""
    c, s = Letters(c=(), s=())
    boost = ((c, s), (s, c))

    def scaled(vector: tuple[int, int], factor: Any) -> bool:
        moved = [row[0] * vector[0] + row[1] * vector[1] for row in boost]
        return all(identical(value, factor * entry) for value, entry in zip(moved, vector, strict=True))

    return scaled((1, -1), c - s) and scaled((1, 1), c + s)


ORBITS = (
    InWords("h is C¹ and constant along the flow of each boost, so it is constant on orbits of the connected group"),
    InWords("boosts that scale the radical of the column space to zero leave a matrix with the same Gram matrix and "
            "the least rank, and h is continuous"),
    InWords("these are isometric embeddings of one space; O(d, d) is transitive on them (Witt), with four components"),
    InWords("so h has at most four values on a level set, and a continuous function with finitely many values is "
            "constant on components; for several heads or neurons the groups act one after the other"),
)  # fmt: skip


@claim("paper.global")
def constant_on_components(*, generators: GeneratorsOfSize = boosts) -> Verdict:
    dimensions = all(closure_dimension(generators(d)) == d * (2 * d - 1) for d in (1, 2, 3))
    return by_steps(
        "A C¹ solution is constant on the connected components of the level sets.",
        "The fields generate another algebra.",
        ("the equations of Theorems 4.2 and 4.3 are the derivatives of h along boosts, as polynomials",
         equations_are_boosts()),
        ("a bracket of two boosts is a rotation or zero, for all patterns of four indices", brackets_are_rotations()),
        ("boosts generate so(d, d), of dimension d(2d − 1), exactly for d = 1, 2, 3", dimensions),
        ("a boost multiplies isotropic vectors of its plane by c − s and c + s, as polynomials",
         boosts_scale_isotropic_vectors()),
        *ORBITS,
    )  # fmt: skip


@claim("paper.global.rotary")
def constant_on_planes(*, generators: GeneratorsOfSize = complex_boosts) -> Verdict:
    dimensions = all(closure_dimension(generators(d)) == 4 * d * d - 1 for d in (1, 2))
    return by_steps(
        "A C¹ solution depends on the queries and keys of a plane through ‖Q^(j)‖² − ‖K^(j)‖² alone.",
        "The fields generate another algebra.",
        ("with q, k ∈ C^d the two equations are boosts with the factors 1 and −i; they generate su(d, d), of dimension "
         "4d² − 1, exactly for d = 1, 2", dimensions),
        InWords("SU(d, d) is connected and transitive on vectors of equal nonzero norm: U(d, d) is (Witt), and a "
                "stabiliser has elements of every determinant"),
        InWords("isotropic vectors contract to zero, and h is continuous"),
    )  # fmt: skip


CROSS = """\
import numpy as np
start = np.array([1.0, 1.0])                          # on a^2 - b^2 = 0, d = 1
for t in np.linspace(-8, 8, 161):
    a, b = np.array([[np.cosh(t), np.sinh(t)], [np.sinh(t), np.cosh(t)]]) @ start
    assert a > 0 and b > 0                            # the orbit is one ray of four
print("a^2 = b^2 is a connected cross; characteristics from (1, 1) reach no other ray of it, nor (0, 0)")
assert (-1.0) ** 2 - (-1.0) ** 2 == 1.0 - 1.0         # though (-1, -1) is on it too"""

CROSS_POINTS = ((0, 0), (1, 1), (1, -1), (-1, 1), (-1, -1))
"""The centre of a² = b² and a point of each ray."""


@claim("paper.components")
def components_shown(*, points: Sequence[tuple[int, int]] = CROSS_POINTS) -> Verdict:
    """On a² = b², d = 1, characteristics multiply (a, b) by e^{±t}: the signs of a and b tell the orbits apart."""
    orbits = len({tuple(np.sign(point)) for point in points})
    return decide(
        orbits == 1,
        "Solving the equations along their characteristics gives constancy on components.",
        "The proofs say that solving the equations leads to the invariants. Characteristics give constancy on orbits, "
        "and a component can have several: the argument that joins them is missing. It exists for every size.",
        Evidence(what="orbits in the connected level set a² − b² = 0, d = 1", value=orbits, limit=1, proof=True),
        witness=Witness(
            data={"level set": "a² = b²", "d": 1},
            claimed="one characteristic reaches every point of a component",
            found="the origin and four rays are separate orbits",
            numpy=CROSS,
        ),
        scope="at d = 1",
    )


@claim("paper.C1")
def continuous_laws(*, sign: int = 1) -> Verdict:
    x, y, p, q = matrices(["X", "Y", "P", "Q"])
    # To first order in t: Dφ_{−t} = 1 − tP and Y(φ_t θ) = Y + tQX, with P = DX and Q = DY.
    first_order = q @ x - sign * p @ y
    return by_steps(
        "A C¹ law is constant along brackets too, so certificates bound the number of C¹ laws.",
        "The expansion is another one.",
        InWords("h∘φ_t = h for the flow φ_t of a field X of the model, so dh annihilates (φ_{−t})_*Y at θ for all t, "
                "as it annihilates Y; these are vectors at one point and dh(θ) is one covector"),
        ("d/dt at 0 of (1 − tDX)(Y + tDY·X) is DY·X − DX·Y = [X, Y], word by word", first_order == q @ x - p @ y),
        InWords("so dh annihilates [X, Y], with one derivative of h; and so on for deeper brackets, which are fields "
                "that dh annihilates everywhere"),
    )  # fmt: skip


@claim("paper.T4.3.length")
def one_length(*, tokens: int = 2) -> Verdict:
    result = all_laws(block.attention, (tokens, 4), block.gram_differences, size=f"{TWO_HEADS}, {tokens} tokens")
    rotary = certificate(block.rotary_attention, (tokens, 4)).at_most
    if result.holds and rotary == 12:
        what = f"laws of rotary attention at most, {tokens} tokens"
        return confirm(
            "Sequences of two tokens leave the same laws; the paper's proofs use all lengths.",
            *result.evidence,
            Evidence(what=what, value=rotary, limit=12, proof=True),
            scope=f"at {TWO_HEADS}, {tokens} tokens",
        )
    return result


def overlapping_equalities(active: int, experts: int) -> bool:
    """Check that equal slopes on T and on T with one element exchanged are equal slopes on the union, for all such
    pairs.
    """
    for chosen in itertools.combinations(range(experts), active):
        for lost, new in itertools.product(chosen, set(range(experts)) - set(chosen)):
            other = [i for i in chosen if i != lost] + [new]
            rows = [_difference(pair, experts) for group in (chosen, other) for pair in itertools.pairwise(group)]
            if (rank(np.array(rows, dtype=object)) if rows else 0) != active:
                return False
    return True


def _difference(pair: tuple[int, int], size: int) -> list[int]:
    return [int(i == pair[0]) - int(i == pair[1]) for i in range(size)]


def first_wall_is_the_next_expert(active: int) -> bool:
    """Lower one row of the top set and raise another by as much: the set stays on top until the next expert is met."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        scores = [Fraction(int(value)) for value in rng.permutation(20)[:6]]
        order = sorted(range(6), key=lambda i: -scores[i])
        top, following = order[:active], order[active]
        if active < 2:
            return False
        lowered, raised = top[0], top[-1]
        gap = scores[lowered] - scores[following]
        for share in (Fraction(1, 3), Fraction(99, 100)):
            moved = dict(enumerate(scores))
            moved[lowered] -= share * gap
            moved[raised] += share * gap
            if set(sorted(moved, key=lambda i: -moved[i])[:active]) != set(top):
                return False
    return True


def sums_keep_slopes() -> bool:
    """Check that a function of w_1 + w_2 and w_3 has equal slopes in w_1 and w_2, and the same after (w_1 − c, w_2 +
    c).
    """
    letters = Letters(w=(3,), c=(), p=(5,))
    w, c, p = letters
    total = w[0] + w[1]
    h = p[0] * total**2 + p[1] * total * w[2] + p[2] * w[2] ** 2 + p[3] * total + p[4] * w[2]
    grads = letters.gradient(h, "w")
    shifted = [grad.compose(w[0] - c, w[1] + c, w[2], c, *p) for grad in grads]
    return identical(grads[0], grads[1]) and all(a == b for a, b in zip(grads, shifted, strict=True))


@claim("paper.T4.6.all")
def sparse_theorem(*, active: int = 2) -> Verdict:
    most = 6
    return by_steps(
        "For all d, n and k ≥ 2, every C¹ law of the sparse mixture satisfies the equations of the dense one.",
        "With one active expert neighbouring sets share no row, and nothing joins their slopes.",
        InWords("fix x ≠ 0; where T holds the k largest scores at x, the mixture near (x, θ) is the dense mixture of "
                "T, analytic in x, so Theorem 4.5 for T holds near θ (paper.T4.5.all)"),
        ("where it holds h is a function of Σ_T W_i and the rest; its slopes do not change along moves that keep the "
         "sum, as polynomials", sums_keep_slopes()),
        ("lower a row of T along x and raise another: T stays on top until the next expert is met (50 exact examples)",
         first_wall_is_the_next_expert(active)),
        InWords("beyond that wall the other set's equations hold, and ∇h is continuous, so at the wall both do"),
        (f"equal slopes on both sets are equal slopes on their union, since they share k − 1 ≥ 1 rows (all pairs, n up "
         f"to {most})", all(overlapping_equalities(active, n) for n in range(active + 1, most + 1))),
        InWords("carried back along the move, the equations hold for k + 1 experts; induct up to n, where every W is a "
                "limit of such points"),
        scope="all sizes",
    )  # fmt: skip


@cache
def outcome_of(code: str) -> Outcome:
    """Return the outcome of another claim, computed once."""
    return outcome(claims(code)[0])


def cite(codes: Sequence[str]) -> list[JudgedStep]:
    """Other claims as steps; one that is measured supports an argument and is not a step of it."""
    outcome: list[JudgedStep] = []
    for code in codes:
        result = outcome_of(code)
        text = f"{result.claim.title} ({code}): {result.standing}"
        proved = result.verdict == Verdict.PROVED
        outcome.append((text, True) if proved else InWords(text) if result.verdict.holds else (text, False))
    return outcome


CHAIN = "the gradients are those printed, by the chain rule; automatic differentiation agrees"

ALL_SIZES_ARGUMENTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "paper.T4.1.all": (
        ("paper.eq14", "paper.LA.1", "paper.LA.2", "paper.eq29", "paper.scalar"),
        (CHAIN, "on the dense sets of (29) and (31) the lemmas make ∇h zero; ∇h is continuous and Θ connected"),
    ),
    "paper.T4.2.all": (
        ("paper.eq40", "paper.LA.2", "paper.eq29", "paper.scalar", "paper.T4.2", "paper.global"),
        (CHAIN, "on the dense sets of (46) and (48) Lemma A.2 gives the equations, and by continuity everywhere"),
    ),
    "paper.T4.3.all": (
        ("paper.eq58", "paper.eq64", "paper.identity", "paper.LB.1", "paper.eq79", "paper.eq81", "paper.eq84",
         "paper.T4.3", "paper.global"),
        (CHAIN, "for tokens (x, y, …, y) the criterion is a rational function of the length whose coefficients vanish "
                "by Lemma B.1 on dense sets of x, y and θ, and by continuity everywhere"),
    ),
    "paper.T4.4.all": (
        ("paper.eq105", "paper.identity", "paper.LB.1", "paper.LB.2", "paper.eq101", "paper.eq122", "paper.eq84",
         "paper.LB.3", "paper.T4.4", "paper.global", "paper.global.rotary"),
        (CHAIN, "tokens (x, 0, …) give the equation of values and outputs, tokens (x, 0, …, y, 0, …) one equation for "
                "each rotation, with signs and senses as repaired (paper.eq116, paper.eq118); Lemma B.3 gives two"),
    ),
    "paper.T4.5.all": (
        ("paper.eq142", "paper.LC.1", "paper.eq155.corrected", "paper.eq160", "paper.identity", "paper.T4.5",
         "paper.global"),
        (CHAIN, "double poles give ∇_B h = 0 and simple poles 𝔡 = 0 on the dense set; at t = 0 and after division by t "
                "these are the equations; fibres of ΣW_i are connected"),
    ),
}  # fmt: skip
"""For each theorem the claims that its proof for every size is made of, and what joins them."""


def for_every_size(codes: tuple[str, ...], words: tuple[str, ...]) -> Callable[..., Verdict]:
    """Return a check that puts the parts of a theorem together."""

    def check(*, parts: Sequence[str] = codes) -> Verdict:
        return by_steps(
            "The parts hold for every size, and so does the theorem, for C¹ laws.",
            "A part fails.",
            *cite(parts),
            *(InWords(text) for text in words),
        )

    return check


for _code, (_codes, _words) in ALL_SIZES_ARGUMENTS.items():
    claim(_code)(for_every_size(_codes, _words))
