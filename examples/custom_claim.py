"""Add a statement to the ledger of claims: one function that finds out whether it holds.

The statement: a product of three linear maps conserves A Aᵀ − Bᵀ B for each pair of neighbours. The check counts the
laws of a small one and compares their number with what the statement says; a wrong statement would come back REFUTED,
with a witness.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from conserved import Evidence, Verdict, Witness, discover
from conserved.claims import claim, run


@claim(
    "lectures.linear",
    title="Balanced factors",
    statement="Three linear maps in a row conserve A Aᵀ − Bᵀ B for both pairs of neighbours, and nothing else.",
    place="Lecture 3",
    source="Lecture notes on deep linear networks",
    latex=(r"W_1W_1^\top-W_2^\top W_2", r"W_2W_2^\top-W_3^\top W_3"),
)
def balanced_factors(widths: tuple[int, int, int, int] = (3, 2, 2, 3)) -> Verdict:
    """Count the laws of one such product, and hold the count against n(n + 1)/2 for each inner width n."""
    model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(widths)))
    found = discover(model, torch.zeros(6, widths[0]))
    stated = sum(n * (n + 1) // 2 for n in widths[1:-1])
    evidence = (
        Evidence(what=f"independent laws of widths {widths}", value=found.count, limit=stated),
        *found.verdict.evidence,
    )
    if not found.verdict.holds:
        return Verdict(status=Verdict.INCONCLUSIVE, message=found.verdict.message, evidence=evidence)
    if found.count != stated:
        witness = Witness(data={"widths": widths}, claimed=f"{stated} laws", found=f"{found.count} laws")
        message = "The number of laws is another."
        return Verdict(status=Verdict.REFUTED, message=message, evidence=evidence, witness=witness)
    return Verdict(status=Verdict.VERIFIED, message=f"{found.count} laws, as stated.", evidence=evidence)


def main() -> None:
    """Run it as the command would: `conserved claims lectures`."""
    (outcome,) = run("lectures")
    print(f"{outcome.claim.code}: {outcome.verdict}")


if __name__ == "__main__":
    main()
