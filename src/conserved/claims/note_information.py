"""Claims of the note on natural attention: entropy, and what the output tells of the input."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import flint
import numpy as np

from conserved.claims.balls import ball, balls, number, scalar_attention, softmax_rows, surely_differs
from conserved.claims.judging import held, judged, refuted
from conserved.claims.ledger import claim
from conserved.claims.polynomials import Matrix, fractions, squares, written
from conserved.verdict import Evidence, Verdict, Witness


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """Equally likely inputs of one attention layer: how many, of what length, and what they tell."""

    length: int
    inputs: int
    information: Any
    """I(X; A(X)) = log M for M inputs whose outputs are proved to be different, as a ball."""
    frobenius: Any
    """The mean of ‖A‖_F² over the inputs, as a ball."""


def channels() -> Iterator[Channel]:
    """M = 2, 4 inputs X = (m, 0, …, 0) with d = 1 and unit weights; the layer is deterministic."""
    for length, inputs in itertools.product((1, 2), (2, 4)):
        tokens = [[m] + [0] * (length - 1) for m in range(inputs)]
        outputs = [scalar_attention(x) for x in tokens]
        assert all(surely_differs(a, b) for a, b in itertools.combinations(outputs, 2))
        sizes = [squares(softmax_rows(balls(x)[:, None] @ balls(x)[None, :])) for x in tokens]
        yield Channel(
            length=length, inputs=inputs, information=flint.arb(inputs).log(), frobenius=sum(sizes) / len(sizes)
        )


def information_bound(bound: Callable[[Channel], Any], statement: str, code: str) -> Verdict:
    """Hold the information of small channels against a bound."""
    count = 0
    for channel in channels():
        limit = bound(channel)
        count += 1
        if channel.information > limit:
            return refuted(
                f"{channel.inputs} equally likely inputs whose outputs all differ carry log {channel.inputs} nats.",
                Evidence(what="I(X; A(X))", value=number(channel.information), limit=number(limit)),
                witness=Witness(
                    data={
                        "L": channel.length,
                        "d": 1,
                        "X": f"uniform on {set(range(channel.inputs))}",
                        "W": 1,
                        "λ": 1,
                    },
                    claimed=f"I ≤ {statement} = {number(limit):.4g}",
                    found=f"I = log {channel.inputs} = {number(channel.information):.4g}",
                    numpy=code,
                ),
            )
    return held(
        "No channel exceeds it.", Evidence(what=f"I(X; A(X)) against {statement}", value="below", samples=count)
    )


INFORMATION = """\
import numpy as np
L, inputs = 1, [0.0, 1.0]                       # equally likely; softmax over one token is 1
outputs = [(np.ones((1, 1)) @ [[x]]).item() for x in inputs]
values, counts = np.unique(outputs, return_counts=True)
p = counts / counts.sum()
information = -(p * np.log(p)).sum()            # H(A(X)), and A(X) is a function of X
print("I =", information, "log L =", np.log(L))
assert information > np.log(L)"""


@claim(
    "note.T7",
    "Attention passes at most log L",
    statement="I(X; A(X)) ≤ log L for sequences of length L.",
    place="Theorem 7",
    latex=[r"I(X;A(X))\le\log L"],
    corrected_by="note.T7.corrected",
)
def basic_information_bound(
    *, bound: Callable[[Channel], Any] = lambda channel: flint.arb(channel.length).log()
) -> Verdict:
    return information_bound(bound, "log L", INFORMATION)


@claim(
    "note.T7.corrected",
    "Attention passes at most what its input holds",
    statement="I(X; A(X)) ≤ H(X), with equality whenever different inputs have different outputs.",
    place="replaces Theorems 7 and 14",
    hypotheses="X takes finitely many values; A is deterministic.",
    latex=[r"I(X;A(X))=H(A(X))\le H(X)"],
    corrects="note.T7",
)
def information_of_the_input(
    *, bound: Callable[[Channel], Any] = lambda channel: flint.arb(channel.inputs).log()
) -> Verdict:
    return information_bound(bound, "H(X)", "")


STRONGER = """\
import numpy as np
L, lam, inputs = 1, 1.0, [0.0, 1.0]             # one token, so A = (1) and |A|^2 = 1
p = np.array([0.5, 0.5])                        # both outputs, 0 and 1, equally likely
information = -(p * np.log(p)).sum()
bound = np.ones((1, 1)).sum() ** 2 / (2 * lam) + {more}
print("I =", information, "bound", bound)
assert information > bound"""


@claim(
    "note.C8",
    "The stronger information bound",
    statement="With regularisation λ the information I(X; A(X)) is at most E‖A‖_F²/(2λ).",
    place="Conjecture 8",
    hypotheses="λ = 1. With one token the weights are A = (1) whatever is trained, so optimisation changes nothing.",
    latex=[r"I(X;A(X))\le\frac{1}{2\lambda}\mathbb{E}\|A\|_F^2"],
    corrected_by="note.T7.corrected",
)
def conjectured_information_bound(
    *, bound: Callable[[Channel], Any] = lambda channel: channel.frobenius / 2
) -> Verdict:
    return information_bound(bound, "E‖A‖_F²/2", STRONGER.format(more="0"))


@claim(
    "note.T14",
    "The strong information bound",
    statement="With regularisation λ the information I(X; A(X)) is at most E‖A‖_F²/(2λ) + log L.",
    place="Theorem 14",
    hypotheses="λ = 1, as for note.C8.",
    latex=[r"I(X;A(X))\le\frac{1}{2\lambda}\mathbb{E}\|A\|_F^2+\log L"],
    corrected_by="note.T7.corrected",
)
def strong_information_bound(
    *, bound: Callable[[Channel], Any] = lambda channel: channel.frobenius / 2 + flint.arb(channel.length).log()
) -> Verdict:
    return information_bound(bound, "E‖A‖_F²/2 + log L", STRONGER.format(more="np.log(L)"))


def stochastic_matrices() -> Iterator[Matrix]:
    """Uniform, one-hot and mixed rows, of two and of three tokens."""
    for length in (2, 3):
        yield fractions(np.full((length, length), Fraction(1, length), dtype=object))
        yield fractions(np.eye(length, dtype=int))
        first = np.zeros((length, length), dtype=int)
        first[:, 0] = 1
        yield fractions(first)
        yield (fractions(np.eye(length, dtype=int)) + fractions(first)) / 2


def entropy(row: Matrix) -> Any:
    """−Σ a log a of one row of fractions, as a ball."""
    return sum((-p * p.log() for p in balls([e for e in row if e > 0])), flint.arb(0))


ENTROPY = """\
import numpy as np
L = 2
A = np.full((L, L), 1 / L)                      # uniform attention
H = -(A * np.log(A)).sum()                      # L log L
bound = 0.5 * (A ** 2).sum() + np.log(L)
print("H(A) =", H, "bound", bound)
assert H > bound"""


@claim(
    "note.L13",
    "The entropy bound",
    statement="The entropy −Σ A_ij log A_ij of an attention matrix is at most ½‖A‖_F² + log L.",
    place="Lemma 13",
    hypotheses="The proof's last line has log L² instead; L = 3 refutes that as well.",
    latex=[r"H(A)\le\tfrac{1}{2}\|A\|_F^2+\log L"],
    corrected_by="note.L13.corrected",
)
def entropy_bound(
    *, bound: Callable[[Matrix], Any] = lambda a: ball(squares(a) / 2) + flint.arb(len(a)).log()
) -> Verdict:
    count = 0
    for matrix in stochastic_matrices():
        total, limit = sum(entropy(row) for row in matrix), bound(matrix)
        count += 1
        if total > limit:
            return refuted(
                "The entropies of L rows add up; the bound has room for one.",
                Evidence(what="H(A) of uniform attention", value=number(total), limit=number(limit)),
                witness=Witness(
                    data={"A": written(matrix)},
                    claimed=f"H(A) ≤ {number(limit):.4g}",
                    found=f"{number(total):.4g} = L log L",
                    numpy=ENTROPY,
                ),
            )
    return held("No matrix exceeds it.", Evidence(what="H(A) against the bound", value="below", samples=count))


@claim(
    "note.L13.corrected",
    "The entropy of a row",
    statement="The entropy of each row a of an attention matrix lies between −log‖a‖² and log L.",
    place="replaces Lemma 13",
    hypotheses="Jensen's inequality, twice: −log is convex, so −Σ a log a ≥ −log Σ a², and Σ a log(1/a) ≤ log Σ 1.",
    latex=[r"-\log\|a\|_2^2\le-\sum_j a_j\log a_j\le\log L"],
    corrects="note.L13",
)
def row_entropy(*, least: Callable[[Matrix], Any] = lambda row: -ball((row * row).sum()).log()) -> Verdict:
    rng = np.random.default_rng(0)
    rows = [row for matrix in stochastic_matrices() for row in matrix]
    for length in (2, 3, 5, 9):
        drawn = rng.integers(0, 20, (25, length)) + np.eye(length, dtype=int)[rng.integers(0, length, 25)]
        rows += [fractions([Fraction(int(e), int(n.sum())) for e in n]) for n in drawn]
    below = sum(entropy(row) < least(row) for row in rows)
    over = sum(entropy(row) > flint.arb(len(row)).log() for row in rows)
    return judged(
        below == 0 and over == 0,
        "Every row lies between the two.",
        "Some row lies outside.",
        Evidence(what="rows below −log‖a‖²", value=below, limit=0, samples=len(rows)),
        Evidence(what="rows above log L", value=over, limit=0, samples=len(rows)),
    )


DIRECTION = """\
import numpy as np
uniform, identity = np.full((2, 2), 0.5), np.eye(2)
def H(A):
    return -sum(a * np.log(a) for a in A.ravel() if a > 0)
for A in (uniform, identity):
    print("|A|^2 =", (A ** 2).sum(), "H =", H(A))
assert (identity ** 2).sum() > (uniform ** 2).sum() and H(identity) < H(uniform)"""


@claim(
    "note.R9",
    "Entropy can be bounded by the Frobenius norm",
    statement="An upper bound of information that grows with ‖A‖_F² can come from a connection of ‖A‖_F² with entropy: "
    "a larger norm allows more entropy.",
    place="Remark 9",
    hypotheses="The remark asks for such a connection. There is one, note.L13.corrected, and it runs the other way.",
    latex=[r"\|A\|_F^2\le\|B\|_F^2\ \Rightarrow\ H(A)\le H(B)"],
    corrected_by="note.L13.corrected",
)
def norm_orders_entropy(*, measure: Callable[[Matrix], Fraction] = lambda a: squares(a)) -> Verdict:
    for length in (2, 3):
        uniform = fractions(np.full((length, length), Fraction(1, length), dtype=object))
        identity = fractions(np.eye(length, dtype=int))
        spread, sharp = (sum(entropy(row) for row in a) for a in (uniform, identity))
        if measure(identity) > measure(uniform) and sharp < spread:
            return refuted(
                "The norm is largest for one-hot rows, which have no entropy, and smallest for uniform ones.",
                Evidence(
                    what="‖A‖_F² of uniform and of one-hot rows", value=f"{squares(uniform)} and {squares(identity)}"
                ),
                Evidence(what="their entropies", value=f"{number(spread):.4g} and {number(sharp):.4g}"),
                witness=Witness(
                    data={"A": "uniform, L = 2", "B": "identity, L = 2"},
                    claimed="‖A‖² ≤ ‖B‖² and so H(A) ≤ H(B)",
                    found=f"1 ≤ 2 and H = {number(spread):.4g} > 0",
                    numpy=DIRECTION,
                ),
            )
    return held("The measure grows with the entropy.", Evidence(what="pairs of matrices", value="ordered", samples=2))
