"""Claims about the energy field of softmax attention, from a news summary of the paper on its invariants."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import flint
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from conserved.attention import energy_field
from conserved.verdict import Evidence, Verdict, Witness
from conserved_papers.blocks import DecoderLM, TransformerBlock
from conserved_papers.claims import full_size
from conserved_papers.claims.judging import InWords, by_steps, confirm, decide, refute
from conserved_papers.claims.matrix_words import Words, matrices
from conserved_papers.claims.polynomials import Matrix, fractions, rank
from conserved_papers.claims.registry import claim
from conserved_papers.lab.data.embedded import VOCABULARY, sequences

CENTRING: dict[tuple[str, ...], tuple[str, ...]] = {("C'",): ("C",), ("C", "C"): ("C",)}
"""C = 1 − 11ᵀ/L is symmetric and its own square; C1 = 0."""


def field_in_words(centre: bool = True) -> Words:
    """Return E = QKᵀC (the factor 1/√d left out), whose rows are those of QKᵀ minus their means."""
    q, k, c = matrices(["Q", "K", "C"])
    result = q @ k.T @ c if centre else q @ k.T
    return result.replace(CENTRING)


def kills_ones(field: Words) -> bool:
    """Return whether every word ends in C, so that E1 = 0."""
    return all(word[-1] == "C" for word in field.terms)


def centring_matrix(size: int) -> Matrix:
    return fractions(np.eye(size, dtype=int)) - fractions(np.full((size, size), Fraction(1, size), dtype=object))


@claim("softmax.rows")
def zero_rows(*, centre: bool = True) -> Verdict:
    worst, lengths = 0.0, (2, 17, 128, 1024)
    for length in lengths:
        q, k = (torch.randn(length, 16, dtype=torch.float64) for _ in range(2))
        result = energy_field(q, k)
        worst = max(worst, float(result.row_sums.abs().max() / result.energy.sqrt()))
    return by_steps(
        "Centring takes the mean out of every row.",
        "Rows do not sum to zero.",
        ("E = QKᵀC ends in C = 1 − 11ᵀ/L, word by word", kills_ones(field_in_words(centre))),
        (
            "C1 = 1 − 1·L/L = 0 (as fractions for L = 1 to 9)",
            all(not centring_matrix(n).sum(1).any() for n in range(1, 10)),
        ),
        beside=[Evidence(what="largest relative row sum, lengths 2 to 1024", value=worst, limit=1e-12, samples=4)],
    )


@claim("softmax.rank")
def rank_bound(*, logits: Callable[[Matrix, Matrix], Matrix] = lambda q, k: q @ k.T) -> Verdict:
    rng = np.random.default_rng(0)
    sizes = [(3, 1), (4, 2), (6, 2), (3, 5)]
    over = 0
    for length, width in sizes:
        q, k = (fractions(rng.integers(-5, 6, (length, width))) for _ in range(2))
        over += rank(logits(q, k) @ centring_matrix(length)) > min(width, length - 1)
    queries, keys, centring = matrices(["Q", "K", "C"])
    factors = (queries @ (centring @ keys).T).replace(CENTRING) == field_in_words()
    return by_steps(
        "The field is a product through d_h numbers, and it vanishes on 1.",
        "Some field has a larger rank.",
        ("E = Q(CK)ᵀ is a product of an L × d_h and a d_h × L matrix, word by word, so rank E ≤ d_h", factors),
        ("E1 = 0, so the rank is at most L − 1", kills_ones(field_in_words())),
        ("exact ranks of fields of whole numbers obey both, four sizes", over == 0),
    )


@claim("softmax.compression")
def compression(*, size_kept: int | None = None) -> Verdict:
    worst, share = 0.0, 0.0
    for length, width in ((256, 16), (1024, 32)):
        q, k = (torch.randn(length, width, dtype=torch.float64) for _ in range(2))
        z = q @ k.mT / width**0.5
        field = z - z.mean(-1, keepdim=True)
        left, values, right = torch.linalg.svd(q @ (k - k.mean(0)).mT / width**0.5, full_matrices=False)
        size = width if size_kept is None else size_kept
        rebuilt = left[:, :size] * values[:size] @ right[:size]
        worst = max(worst, float((rebuilt - field).norm() / field.norm()))
        share = max(share, 2 * length * width / length**2)
    return decide(
        worst < 1e-12,
        "d_h singular directions rebuild the field.",
        "Something is lost.",
        Evidence(what="relative error of the rebuilt field", value=worst, limit=1e-12, samples=2),
        Evidence(what="largest share of the numbers that is kept", value=share, limit=1.0, samples=2),
    )


def causal_field(q: Matrix, k: Matrix) -> Matrix:
    """Row i centred over keys 0, …, i, zero beyond."""
    field = fractions(np.zeros((len(q), len(k)), dtype=int))
    for i in range(len(q)):
        row = k[: i + 1] @ q[i]
        field[i, : i + 1] = row - sum(row) / (i + 1)
    return field


@claim("softmax.causal")
def causal(*, allowed: Callable[[int], int] = lambda width: width + 1) -> Verdict:
    rng = np.random.default_rng(0)
    zero, blocks, whole = True, True, False
    for width, _ in itertools.product((1, 2), range(4)):
        q, k = (fractions(rng.integers(-4, 5, (10, width))) for _ in range(2))
        field = causal_field(q, k)
        zero &= all(sum(row) == 0 for row in field)
        blocks &= all(rank(field[cut:, :cut]) <= allowed(width) for cut in range(1, 10))
        whole |= rank(field) > width
    return by_steps(
        "Rows of different length have different means, which take one more number per row.",
        "Some block has a larger rank.",
        InWords("row i is s·q_i·k_j − a_i on visible keys, which is a product of vectors of d_h + 1 numbers"),
        ("blocks of eight integer fields obey it, exactly", blocks),
        ("rows sum to zero", zero),
        ("the whole field exceeds d_h in some of them", whole),
    )  # fmt: skip


@claim("softmax.shift")
def nothing_lost(*, centre: Callable[[Tensor], Tensor] = lambda z: z - z.mean(-1, keepdim=True)) -> Verdict:
    worst, cases = 0.0, list(itertools.product((2, 9, 64), (0.1, 1.0, 10.0)))
    for length, size in cases:
        z = size * torch.randn(length, length, dtype=torch.float64)
        field = centre(z)
        logs = z.log_softmax(-1)
        gaps = (z.softmax(-1) - field.softmax(-1), (logs - logs.mean(-1, keepdim=True) - field) / size)
        worst = max(worst, *(float(gap.abs().max()) for gap in gaps))
    return decide(
        worst < 1e-12,
        "Softmax of the field is softmax of the logits, and the weights give the field back.",
        "The field is not what softmax sees.",
        Evidence(what="largest difference", value=worst, limit=1e-12, samples=len(cases)),
    )


@claim("softmax.spectrum")
def spectral_signature(*, factor: float = 1.0) -> Verdict:
    worst, over, sizes = 0.0, 0.0, [(64, 8), (200, 4), (6, 16)]
    for length, width in sizes:
        q, k = (torch.randn(length, width, dtype=torch.float64) for _ in range(2))
        z = q @ k.mT / width**0.5
        dense = torch.linalg.svdvals(z - z.mean(-1, keepdim=True))
        result = energy_field(q, k)
        count = min(width, length - 1)
        values = factor * result.singular_values[:count]
        worst = max(worst, float((dense[:count] - values).abs().max() / dense[0]))
        worst = max(worst, float(dense[count:].max() / dense[0]) if count < length else 0.0)
        over = max(over, float(result.effective_rank) / count, float(result.stable_rank) / count)
    return decide(
        worst < 1e-12 and over <= 1,
        "The spectrum is that of the small product, and the ranks obey the bound.",
        "The spectra differ.",
        Evidence(what="largest relative difference from a dense decomposition", value=worst, limit=1e-12, samples=3),
        Evidence(what="largest effective or stable rank over the bound", value=over, limit=1.0, samples=3),
    )


def localised_keys(length: int) -> Matrix:
    """Return all keys 0 but one."""
    keys = np.zeros(length, dtype=int)
    keys[-1] = length
    return fractions(keys)


@claim("softmax.delocalised.free")
def localisable(*, keys: Callable[[int], Matrix] = localised_keys) -> Verdict:
    shares = {}
    for length in (4, 16, 64):
        chosen = keys(length)
        energy = (chosen - sum(chosen) / length) ** 2
        share = energy / sum(energy)
        shares[length] = 1 / (length * sum(share**2))
    listed = ", ".join(f"{float(value):.2g}" for value in shares.values())
    return by_steps(
        "The participation of such a field falls as 1/L.",
        "The field stays spread out.",
        (f"participation at L = 4, 16, 64, exactly: {listed}, below 2/L at 64", shares[64] < Fraction(1, 32)),
        scope="by an example at every such length",
    )


def participations(model: DecoderLM, tokens: Tensor, spike: float) -> Tensor:
    """Return how evenly every head of a decoder spreads its field over the keys, the first key made longer."""
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


@claim("softmax.delocalised")
def delocalised(*, spike: float = 1.0, encoder: Mapping[str, Any] | None = None) -> Verdict:
    text = sequences(2, 65, seed=0)
    model = DecoderLM(VOCABULARY, 32, 2, 4, 48, max_length=64).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result = [participations(model, text[:, :-1], spike)]
    for _ in range(40):
        optimizer.zero_grad()
        F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()
        optimizer.step()
    result.append(participations(model, text[:, :-1], spike))
    values = torch.cat(result)
    encoder = encoder or full_size.trained_encoder()
    heads, spread = encoder["heads"], encoder["participation"]
    return decide(
        float(values.min()) > 0.15 and spread["least"] > 0.15,
        "Fields of the stand-ins are spread out. The keys of the trained encoder are not incoherent, if Gaussian keys "
        f"are the measure: in {encoder['more_coherent_than_gaussian']} of {heads} heads they are more coherent.",
        "Some head puts its variance on few keys.",
        Evidence(what="least participation in a small decoder, above 0.15", value=float(values.min()), limit=0.15,
                 samples=len(values)),
        Evidence(what=f"least participation in {encoder['model']}, above 0.15", value=spread["least"], limit=0.15,
                 samples=heads),
        Evidence(what="heads of it that spread less than Gaussian keys would",
                 value=f"{encoder['less_spread_than_gaussian']} of {heads}"),
        Evidence(what="median coherence of its keys, and of Gaussian keys",
                 value=f"{encoder['coherence']['median']:.2g}, {encoder['gaussian_coherence']['median']:.2g}"),
        beside=[
            Evidence(what="mean participation in the small decoder", value=float(values.mean()), samples=len(values)),
            *full_size.spread(),
        ],
    )  # fmt: skip


@claim("softmax.lengths")
def several_lengths(*, spike: float = 1.0) -> Verdict:
    least, cases = 1.0, 0
    for length in (16, 64, 128):
        model = DecoderLM(VOCABULARY, 32, 2, 4, 48, max_length=length).double()
        inputs = (
            sequences(2, length, seed=1),
            torch.randint(VOCABULARY, (2, length)),
            torch.arange(5).repeat(length)[:length].expand(2, -1),
        )
        for tokens in inputs:
            least = min(least, float(participations(model, tokens, spike).min()))
            cases += 1
    return decide(
        least > 0.1,
        "Every head spreads its variance, at every length and on every kind of input.",
        "Some head puts its variance on few keys.",
        Evidence(what="least participation of a head, above 0.1", value=least, limit=0.1, samples=cases),
    )


@claim("softmax.incoherence")
def incoherence(*, factor: float = 1.0) -> Verdict:
    least, cases = float("inf"), list(itertools.product((20, 128), (2, 8), (1.0, 3.0, 30.0)))
    for length, width, spike in cases:
        q, k = (torch.randn(length, width, dtype=torch.float64) for _ in range(2))
        k[0] *= spike
        result = energy_field(q, k)
        bound = factor * result.stable_rank / (result.coherence * result.key_rank)
        least = min(least, float(result.participation / bound))
    return decide(
        least >= 1,
        "The bound holds for even and for spiked keys.",
        "The bound fails.",
        Evidence(what="least participation over the bound, at least 1", value=least, limit=1.0, samples=len(cases)),
    )


@claim("softmax.monitor")
def monitor(*, growth: float = 8.0) -> Verdict:
    even, spiked = [], []
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        q, k = (torch.randn(1024, 64, generator=generator, dtype=torch.float64) for _ in range(2))
        even.append(float(energy_field(q, k).coherence))
        k[0] *= growth
        spiked.append(float(energy_field(q, k).coherence))
    jump = min(spiked) / max(even)
    return decide(
        jump > 4,
        "One long key multiplies the coherence, far beyond how it varies between samples.",
        "One long key does not stand out.",
        Evidence(what="least coherence with one long key over the largest without, above 4", value=jump, limit=4.0),
        beside=[Evidence(what="largest coherence of Gaussian keys", value=max(even), samples=5)],
    )


SOFTCAP = """\
import numpy as np
z = np.outer([1.0, 2.0, 3.0], [2.0, 3.0, 4.0])     # d = 1
capped = 5 * np.tanh(z / 5)
E = capped - capped.mean(1, keepdims=True)
print("singular values", np.linalg.svd(E)[1])
assert np.linalg.matrix_rank(E) == 2"""


def softcap(z: flint.arb) -> flint.arb:
    """Return 5 tanh(z/5)."""
    return 5 * (z / 5).tanh()


@claim("softmax.softcap")
def universal(*, cap: Callable[[flint.arb], flint.arb] = softcap) -> Verdict:
    """A 2 × 2 minor of the centred field of three keys that excludes zero proves rank two."""
    rows = [[cap(flint.arb(q * k)) for k in (2, 3, 4)] for q in (1, 2, 3)]
    field = [[value - sum(row, flint.arb(0)) / 3 for value in row] for row in rows]
    minor = field[0][0] * field[2][1] - field[0][1] * field[2][0]
    if minor.contains(0):
        return confirm("The bound holds.", Evidence(what="minor of the field", value="contains zero"))
    data = {"d_h": 1, "queries": "(1, 2, 3)", "keys": "(2, 3, 4)", "cap": "5 tanh(z/5)"}
    return refute(
        "A cap is not linear in queries and keys. With logits that are, the bound holds.",
        Evidence(what="a 2 × 2 minor with d_h = 1, in balls", value=float(minor.mid()), limit=0.0, proof=True),
        witness=Witness(data=data, claimed="rank ≤ 1", found="rank 2", numpy=SOFTCAP),
    )
