"""Claims about the energy field of softmax attention, from a news summary of the paper on its invariants."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from conserved.attention import energy_field
from conserved.blocks import DecoderLM, TransformerBlock
from conserved.claims.judging import held, judged, refuted
from conserved.claims.ledger import claim
from conserved.claims.polynomials import Letters, Matrix, determinant, fractions, rank
from conserved.lab.data.embedded import VOCABULARY, sequences
from conserved.verdict import Evidence, Verdict, Witness

Logits = Callable[[Matrix, Matrix], Matrix]


def products(q: Matrix, k: Matrix) -> Matrix:
    """Q Kᵀ."""
    found: Matrix = q @ k.T
    return found


def centred(logits: Matrix) -> Matrix:
    """Each row minus its mean."""
    width = logits.shape[1]
    means = [sum(row) * Fraction(1, width) if isinstance(row[0], Fraction) else sum(row) / width for row in logits]
    found = np.empty(logits.shape, dtype=object)
    for i, j in np.ndindex(*logits.shape):
        found[i, j] = logits[i, j] - means[i]
    return found


@claim(
    "softmax.rows",
    "Rows of the energy field sum to zero",
    statement="Every row of the row-centred logits sums to zero, for all queries and keys, at every length.",
    place="Mechanism-level invariants, the first",
    latex=[r"E=\frac{1}{\sqrt{d_h}}Q(K-\mathbf{1}\bar k^{\top})^{\top},\quad E\mathbf{1}=0"],
)
def zero_rows(*, centre: Callable[[Matrix], Matrix] = centred) -> Verdict:
    letters = Letters(Q=(2, 2), K=(3, 2))
    field = centre(products(letters["Q"], letters["K"]))
    exact = all(sum(row) == 0 for row in field)
    worst, lengths = 0.0, (2, 17, 128, 1024)
    for length in lengths:
        q, k = (torch.randn(length, 16, dtype=torch.float64) for _ in range(2))
        found = energy_field(q, k)
        worst = max(worst, float(found.row_sums.abs().max() / found.energy.sqrt()))
    return judged(
        exact and worst < 1e-12,
        "The sums vanish as polynomials, and to rounding at lengths up to 1024.",
        "Rows do not sum to zero.",
        Evidence(what="row sums as polynomials, three keys of two numbers", proof=exact),
        Evidence(what="largest relative row sum", value=worst, limit=1e-12, samples=len(lengths)),
    )


def vanishing_minors(logits: Logits, length: int, width: int) -> bool:
    """Whether all minors of size width + 1 of the energy field vanish as polynomials."""
    letters = Letters(Q=(length, width), K=(length, width))
    field = centred(logits(letters["Q"], letters["K"]))
    places = list(itertools.combinations(range(length), width + 1))
    return all(determinant(field[np.ix_(r, c)]) == 0 for r, c in itertools.product(places, places))


@claim(
    "softmax.rank",
    "The rank is at most the head dimension",
    statement="The energy field has rank at most d_h, and at most L − 1, however long the context.",
    place="Mechanism-level invariants, the second",
    hypotheses="Every query sees every key; logits linear in queries and keys (no softcap).",
    latex=[r"\operatorname{rank}E\le\min(d_h,\,L-1)"],
)
def rank_bound(*, logits: Logits = products) -> Verdict:
    exact = vanishing_minors(logits, 3, 1) and vanishing_minors(logits, 4, 2)
    over, sizes = 0, [(256, 16), (64, 8), (9, 16), (1024, 32)]
    for length, width in sizes:
        q, k = (torch.randn(length, width, dtype=torch.float64) for _ in range(2))
        over += int(energy_field(q, k).rank) > min(width, length - 1)
    return judged(
        exact and over == 0,
        "All larger minors vanish as polynomials, and numerical ranks agree at lengths up to 1024.",
        "Some larger minor does not vanish.",
        Evidence(what="minors of size d + 1 as polynomials, d = 1 and 2", proof=exact),
        Evidence(what="fields with a larger rank", value=over, limit=0, samples=len(sizes)),
    )


CAUSAL = """\
import numpy as np
k = np.array([0.0, 1.0, 3.0])              # d = 1, all queries 1
E = np.zeros((3, 3))
for i in range(3):                         # row i sees keys 0, ..., i and is centred over them
    E[i, :i + 1] = k[:i + 1] - k[:i + 1].mean()
print(E, "rank", np.linalg.matrix_rank(E))
assert np.linalg.matrix_rank(E) == 2"""


def causal_field(keys: Matrix) -> Matrix:
    """Row i centred over keys 0, …, i, zero beyond; one-dimensional queries 1."""
    size = len(keys)
    field = fractions(np.zeros((size, size), dtype=int))
    for i in range(size):
        seen = keys[: i + 1]
        field[i, : i + 1] = seen - sum(seen) / len(seen)
    return field


@claim(
    "softmax.causal",
    "The rank bound under a causal mask",
    statement="The rank bound holds for autoregressive models as well, where a row is centred over the keys it sees.",
    place="Deep dive, every autoregressive language model tested",
    hypotheses="The field softmax sees: each row centred over its visible keys, hidden ones left out. (Centred over "
    "all keys, before any mask, "
    "the bound is that of softmax.rank.)",
    corrected_by="softmax.causal.corrected",
)
def causal_rank(*, field: Callable[[Matrix], Matrix] = causal_field) -> Verdict:
    for keys in ((0, 1, 3), (0, 1, 3, 7)):
        found = rank(field(fractions(keys)))
        if found > 1:
            return refuted(
                "Rows of different length have different means, which no single key vector makes.",
                Evidence(what="exact rank with d_h = 1", value=found, limit=1, proof=True),
                witness=Witness(
                    data={"d_h": 1, "L": 3, "queries": "(1, 1, 1)", "keys": "(0, 1, 3)"},
                    claimed="rank ≤ 1",
                    found="rows (0, 0, 0), (−1/2, 1/2, 0), (−4/3, −1/3, 5/3): rank 2",
                    numpy=CAUSAL,
                ),
            )
    return held("The rank stays at one.", Evidence(what="sequences of keys", value="rank 1", samples=2))


@claim(
    "softmax.causal.corrected",
    "Blocks below the diagonal",
    statement="Under a causal mask rows still sum to zero, and every block strictly below the diagonal has rank at "
    "most d_h + 1.",
    place="replaces the bound for causal attention",
    latex=[r"E_{ij}=(s\,q_i,-a_i)\cdot(k_j,1)\quad\text{for visible }j"],
    corrects="softmax.causal",
)
def causal_blocks(*, allowed: Callable[[int], int] = lambda width: width + 1) -> Verdict:
    rng = np.random.default_rng(0)
    largest: dict[int, int] = {}
    zero = True
    for width, _ in itertools.product((1, 2), range(4)):
        q, k = (fractions(rng.integers(-4, 5, (10, width))) for _ in range(2))
        field = fractions(np.zeros((10, 10), dtype=int))
        for i in range(10):
            row = k[: i + 1] @ q[i]
            field[i, : i + 1] = row - sum(row) / (i + 1)
        zero &= all(sum(row) == 0 for row in field)
        largest[width] = max(largest.get(width, 0), rank(field[5:, :5]))
    good = zero and all(found <= allowed(width) for width, found in largest.items())
    return judged(
        good,
        "Every block obeys the bound and rows sum to zero, exactly.",
        "Some block has a larger rank.",
        Evidence(what="largest exact rank of a block with d_h = 1 and 2", value=str(list(largest.values())), samples=8),
    )


@claim(
    "softmax.shift",
    "The field is all that softmax sees",
    statement="softmax of the logits and of the energy field are the same, and the field can be read off the weights: "
    "E = log A minus its row means.",
    place="Deep dive, the definition of the energy field",
    latex=[r"\operatorname{softmax}(Z)=\operatorname{softmax}(E)"],
)
def nothing_lost(*, centre: Callable[[Tensor], Tensor] = lambda z: z - z.mean(-1, keepdim=True)) -> Verdict:
    worst, cases = 0.0, list(itertools.product((2, 9, 64), (0.1, 1.0, 10.0)))
    for length, size in cases:
        z = size * torch.randn(length, length, dtype=torch.float64)
        field = centre(z)
        logs = z.log_softmax(-1)
        gaps = (z.softmax(-1) - field.softmax(-1), (logs - logs.mean(-1, keepdim=True) - field) / size)
        worst = max(worst, *(float(gap.abs().max()) for gap in gaps))
    return judged(
        worst < 1e-12,
        "Both hold to 12 digits.",
        "The field is not what softmax sees.",
        Evidence(what="largest difference", value=worst, limit=1e-12, samples=len(cases)),
    )


@claim(
    "softmax.spectrum",
    "The spectral signature",
    statement="At most min(d_h, L − 1) singular values of the field differ from zero; they are those of the d_h × "
    "d_h product of two "
    "triangular factors, so stable and effective rank are at most d_h at any length.",
    place="Deep dive, a specific spectral signature",
    latex=[r"\sigma(E)=\sigma(R_QR_{K_c}^{\top})/\sqrt{d_h}"],
)
def spectral_signature(*, factor: float = 1.0) -> Verdict:
    worst, over, sizes = 0.0, 0.0, [(64, 8), (200, 4), (6, 16)]
    for length, width in sizes:
        q, k = (torch.randn(length, width, dtype=torch.float64) for _ in range(2))
        z = q @ k.mT / width**0.5
        dense = torch.linalg.svdvals(z - z.mean(-1, keepdim=True))
        found = energy_field(q, k)
        kept = min(width, length - 1)
        values = factor * found.singular_values[:kept]
        worst = max(worst, float((dense[:kept] - values).abs().max() / dense[0]))
        worst = max(worst, float(dense[kept:].max() / dense[0]) if kept < length else 0.0)
        over = max(over, float(found.effective_rank) / kept, float(found.stable_rank) / kept)
    return judged(
        worst < 1e-12 and over <= 1,
        "The spectrum is that of the small product, to 12 digits, and the ranks obey the bound.",
        "The spectra differ.",
        Evidence(what="largest relative difference from a dense decomposition", value=worst, limit=1e-12, samples=3),
        Evidence(what="largest effective or stable rank over the bound", value=over, limit=1.0, samples=3),
    )


def localised_keys(length: int) -> Matrix:
    """All keys 0 but one."""
    keys = np.zeros(length, dtype=int)
    keys[-1] = length
    return fractions(keys)


@claim(
    "softmax.delocalised.free",
    "Delocalisation is not forced",
    statement="That the field's variance spreads over all keys is not a consequence of the algebra: some keys put "
    "nearly all of it on "
    "one position.",
    place="Model-level invariants, not mathematically required",
    hypotheses="One-dimensional keys (0, …, 0, L), any queries: a share of (L − 1)/L on the last key.",
    latex=[r"\mathrm{PR}=\frac{1}{L\sum_jp_j^2}"],
)
def localisable(*, keys: Callable[[int], Matrix] = localised_keys) -> Verdict:
    shares = {}
    for length in (4, 16, 64):
        chosen = keys(length)
        energy = (chosen - sum(chosen) / length) ** 2
        share = energy / sum(energy)
        shares[length] = 1 / (length * sum(share**2))
    good = shares[64] < Fraction(1, 32)
    return judged(
        good,
        "The participation of such a field falls as 1/L.",
        "The field stays spread out.",
        Evidence(
            what="participation at L = 4, 16, 64", value=", ".join(str(value) for value in shares.values()), proof=good
        ),
    )


@claim(
    "softmax.delocalised",
    "Trained fields are spread over the keys",
    statement="In language models the energy field spreads its variance over all key positions and is not "
    "concentrated on a few.",
    place="Model-level invariants",
    hypotheses="Empirical, and no pretrained model is at hand: a decoder of two layers and four heads on text, fresh "
    "and after 40 "
    "steps, without mask; participation is 1 for an even spread and 1/64 for one key.",
)
def delocalised(*, spike: float = 1.0) -> Verdict:
    text = sequences(2, 65, seed=0)
    model = DecoderLM(VOCABULARY, 32, 2, 4, 48, max_length=64).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = [_participations(model, text[:, :-1], spike)]
    for _ in range(40):
        optimizer.zero_grad()
        F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()
        optimizer.step()
    found.append(_participations(model, text[:, :-1], spike))
    values = torch.cat(found)
    least = float(values.min())
    return judged(
        least > 0.15,
        "Every head spreads its variance over a good part of the keys, before and after training.",
        "Some head puts its variance on few keys.",
        Evidence(what="least participation of a head", value=least, limit=0.15, samples=len(values)),
        Evidence(what="mean participation", value=float(values.mean()), samples=len(values)),
    )


def _participations(model: DecoderLM, tokens: Tensor, spike: float) -> Tensor:
    parts = []
    with torch.no_grad():
        x = model.positions(model.embedding(tokens))
        for layer in model.layers:
            assert isinstance(layer, TransformerBlock)
            q, k = layer.attention.queries_and_keys(layer.norm1(x))
            k[..., 0, :] *= spike
            parts.append(energy_field(q, k).participation.flatten())
            x = layer(x)
    return torch.cat(parts)


@claim(
    "softmax.incoherence",
    "Incoherent keys spread the field",
    statement="Delocalisation comes from key incoherence: the participation of the keys is at least the stable rank "
    "over coherence "
    "times key rank.",
    place="Model-level invariants, traced to key incoherence",
    hypotheses="Coherence is (L/r) times the largest leverage of the centred keys. The definitions are this "
    "project's; the full text of "
    "the paper was not at hand.",
    latex=[r"\mathrm{PR}\ge\frac{\operatorname{srank}(E)}{\mu\,r},\quad\mu=\frac{L}{r}\max_j\ell_j"],
)
def incoherence(*, factor: float = 1.0) -> Verdict:
    least, cases = float("inf"), list(itertools.product((20, 128), (2, 8), (1.0, 3.0, 30.0)))
    for length, width, spike in cases:
        q, k = (torch.randn(length, width, dtype=torch.float64) for _ in range(2))
        k[0] *= spike
        found = energy_field(q, k)
        bound = factor * found.stable_rank / (found.coherence * found.key_rank)
        least = min(least, float(found.participation / bound))
    return judged(
        least >= 1,
        "The bound holds for even and for spiked keys.",
        "The bound fails.",
        Evidence(what="least participation over the bound", value=least, limit=1.0, samples=len(cases)),
    )


@claim(
    "softmax.monitor",
    "A loss of incoherence can be seen",
    statement="The coherence of a head's keys tells when a few of them take over: it jumps when one key grows, and "
    "hardly moves "
    "otherwise.",
    place="Practical implications, the training monitor",
    hypotheses="1024 Gaussian keys of 64 numbers; one of them made 8 times as long.",
)
def monitor(*, growth: float = 8.0) -> Verdict:
    even, spiked = [], []
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        q, k = (torch.randn(1024, 64, generator=generator, dtype=torch.float64) for _ in range(2))
        even.append(float(energy_field(q, k).coherence))
        k[0] *= growth
        spiked.append(float(energy_field(q, k).coherence))
    jump = min(spiked) / max(even)
    return judged(
        jump > 4,
        "One long key multiplies the coherence, far beyond how it varies between samples.",
        "One long key does not stand out.",
        Evidence(what="largest coherence of Gaussian keys", value=max(even), samples=5),
        Evidence(what="least coherence with one long key", value=min(spiked), samples=5),
        Evidence(what="ratio of the two", value=jump, limit=4.0),
    )


SOFTCAP = """\
import numpy as np
z = np.outer([1.0, 2.0, 3.0], [2.0, 3.0, 4.0])     # d = 1
for name, capped in (("z^2 + z", z ** 2 + z), ("tanh", 5 * np.tanh(z / 5))):
    E = capped - capped.mean(1, keepdims=True)
    print(name, "singular values", np.linalg.svd(E)[1])
    assert np.linalg.matrix_rank(E) == 2"""


@claim(
    "softmax.softcap",
    "Every softmax attention obeys the rank bound",
    statement="The rank bound holds universally, for all softmax attention mechanisms in use.",
    place="Deep dive, properties that hold across all mechanisms",
    hypotheses="Some models cap their logits, c·tanh(z/c), before softmax. Here the cap is replaced by z² for an "
    "example in integers; the "
    "point is that it is not linear.",
    corrected_by="softmax.rank",
)
def universal(*, cap: Callable[[Fraction], Fraction] = lambda z: z * z) -> Verdict:
    q, k = (fractions([[1], [2], [3]]) for _ in range(2))
    logits = products(q, k + 1)
    capped = np.array([[cap(z) + z for z in row] for row in logits], dtype=object)
    found = rank(centred(capped))
    evidence = Evidence(what="exact rank with d_h = 1", value=found, limit=1, proof=found <= 1)
    witness = Witness(
        data={"d_h": 1, "queries": "(1, 2, 3)", "keys": "(2, 3, 4)", "cap": "z² + z"},
        claimed="rank ≤ 1",
        found=f"rank {found}",
        numpy=SOFTCAP,
    )
    return judged(
        found <= 1,
        "The bound holds.",
        "A cap on the logits is not linear in queries and keys, and no bound survives it.",
        evidence,
        witness=None if found <= 1 else witness,
    )
