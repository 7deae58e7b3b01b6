"""Claims of the paper: what discrete steps do to a law, how the deviation is measured, and schedules."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial

import torch

from conserved.inference import recognize
from conserved.laws import LawSet, Reference
from conserved.verdict import Evidence, Verdict, Witness
from conserved_papers.blocks import Attention, FeedForward, SwiGLU
from conserved_papers.claims import paper_blocks as block
from conserved_papers.claims.descents import drifts, exponent, monitored, scattered
from conserved_papers.claims.judging import by_steps, confirm, decide, refute
from conserved_papers.claims.matrix_words import matrices
from conserved_papers.claims.polynomials import Letters, identical
from conserved_papers.claims.registry import claim


@claim("paper.eq9")
def drift_bound(*, momentum: float = 0.0) -> Verdict:
    worst, tightest, count = 0.0, 0.0, 0
    for build in (lambda: Attention(4, 2), lambda: Attention(4, 1, rotary=True), lambda: SwiGLU(4, 5)):
        for step in (0.05, 0.01):
            for row in monitored(build, partial(torch.optim.SGD, lr=step, momentum=momentum)).bounds():
                worst = max(worst, row.observed / row.bound)
                tightest = max(tightest, row.observed / row.second_order)
                count += 1
    return decide(
        worst <= 1,
        "No law drifts further than the bound.",
        "Some law drifts further than the bound.",
        Evidence(what="largest drift over the bound", value=worst, limit=1.0, samples=count),
        beside=[Evidence(what="largest drift over C_h/2 Σ‖θ_{i+1} − θ_i‖²", value=tightest, limit=1.0, samples=count)],
    )


@claim("paper.eq9.exact")
def exact_drift(*, power: int = 2) -> Verdict:
    a, b, m = matrices("ABM")
    g, h = m @ b, m.T @ a
    good = True
    for step in (Fraction(1), Fraction(2), Fraction(5)):
        after_a, after_b = a - step * g, b - step * h
        change = (after_a.T @ after_a - after_b.T @ after_b) - (a.T @ a - b.T @ b)
        good &= change == step**power * (g.T @ g - h.T @ h)
    what = "both sides word by word at three τ, which is enough for powers up to two"
    return by_steps("The terms of first order cancel.", "The two sides differ.", (what, good))


@claim("paper.S6.decaying")
def decaying_steps(*, falls: Callable[[int], float] = lambda k: 1 / (k + 1)) -> Verdict:
    sizes, laws = (0.005, 0.01, 0.02), block.gram_differences

    def way(size: float) -> list[float]:
        return drifts(block.attention, (5, 4), laws, lambda k: size * falls(k), (80, 160), stochastic=True, path=True)

    ways = [way(size) for size in sizes]
    growth = max(late / early - 1 for early, late in ways)
    order = exponent(sizes, [late for _, late in ways])
    return decide(
        growth < 0.03 and abs(order - 2) < 0.3,
        "The law has nearly stopped moving after 80 steps, and the length of its path is quadratic in τ_0.",
        "The path length keeps growing, or is not quadratic in τ_0.",
        Evidence(
            what="share that steps 81 to 160 add to the path length", value=growth, limit=0.03, samples=len(sizes)
        ),
        Evidence(what="exponent in τ_0, to be within 0.3 of 2", value=order, samples=len(sizes)),
    )


@claim("paper.eq10.balanced")
def rescued_deviation(
    *, measure: Callable[[LawSet, Reference], float] = lambda laws, start: sum(laws.errors(start).values())
) -> Verdict:
    model = scattered(lambda: SwiGLU(3, 4))
    laws = recognize(model)
    start = laws.reference()
    before = block.neuron_differences(dict(model.named_parameters())).detach().clone()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    after = block.neuron_differences(dict(model.named_parameters())).detach()
    naive = float(((after - before).abs() / before.abs()).mean())
    gap = abs(measure(laws, start) - naive) / naive
    pair = FeedForward(3, 2, "linear").double()
    with torch.no_grad():
        pair.down.weight.copy_(pair.up.weight.mT)
    balanced = recognize(pair)
    origin = balanced.reference()
    with torch.no_grad():
        pair.up.weight.mul_(1.1)
    rescued = measure(balanced, origin)
    return decide(
        gap < 1e-12 and math.isfinite(rescued) and rescued > 0,
        "It agrees with (10) for an ordinary start and is a number for a balanced one.",
        "It differs from (10), or is no number for a balanced start.",
        Evidence(what="relative difference from (10), SwiGLU", value=gap, limit=1e-12),
        Evidence(what="deviation of a balanced linear pair after scaling one factor by 1.1", value=rescued),
    )


VANISHING = """\
import numpy as np
for k in (4, 40, 400):
    steps = 1 - np.arange(k) / k          # from 1 linearly down to zero
    print(k, "sum of squares", (steps ** 2).sum(), "k/3 =", k / 3)
    assert (steps ** 2).sum() > k / 3"""


@claim("paper.S6.schedule")
def vanishing_schedule(*, schedule: Callable[[int, int], Fraction] = lambda i, k: 1 - Fraction(i, k)) -> Verdict:
    sums = {k: sum((schedule(i, k) ** 2 for i in range(k)), Fraction(0)) for k in (4, 40, 400)}
    listed = ", ".join(f"{float(s):.3g}" for s in sums.values())
    if sums[400] > 5 * sums[40]:
        data = {"k": 4, "τ_i/τ": "1, 3/4, 1/2, 1/4"}
        return refute(
            "True only if Σ τ_i² stays finite. Decaying linearly to zero takes two thirds off the sum of squares and "
            "leaves it proportional to the length.",
            Evidence(what="Σ(τ_i/τ)² for k = 4, 40, 400", value=listed, proof=True),
            witness=Witness(data=data, claimed="bounded in k", found=f"Σ = {sums[4]} > 4/3", numpy=VANISHING),
        )
    return confirm("The sum does not grow with the run.", Evidence(what="Σ for k = 4, 40, 400", value=listed))


@claim("paper.S6.schedule.corrected")
def summable_schedule(
    *, total: Callable[[int], Fraction] = lambda k: Fraction((k + 1) * (2 * k + 1), 6 * k)
) -> Verdict:
    lengths = (1, 2, 3, 10, 100)
    n = Letters(k=()).scalar("k")
    return by_steps(
        "Both sums are as stated, exactly.",
        "The sums are others.",
        ("Σ(1 − i/k)² is the stated fraction for k = 1, 2, 3, 10, 100",
         all(total(k) == sum((Fraction(k - i, k) ** 2 for i in range(k)), Fraction(0)) for k in lengths)),
        ("and for all k: both sides of Σi² = k(k+1)(2k+1)/6 grow by (k+1)², as polynomials",
         identical((n + 1) * (n + 2) * (2 * n + 3) - n * (n + 1) * (2 * n + 1), 6 * (n + 1) ** 2)),
        ("Σ 1/(i+1)² ≤ 2 − 1/k, since 1/(k+1)² ≤ 1/k − 1/(k+1): (k+1)² − k(k+1) = k + 1 > 0",
         identical((n + 1) ** 2 - n * (n + 1), n + 1)),
    )  # fmt: skip
