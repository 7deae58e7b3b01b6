"""Claims of the paper: the proof of each main theorem is right, with its steps and their verdicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from conserved.verdict import Evidence, Verdict
from conserved_papers.claims.claim_record import Severity
from conserved_papers.claims.judging import ARGUED, confirm, refute
from conserved_papers.claims.paper_global import outcome_of
from conserved_papers.claims.passages import format_lines, spans
from conserved_papers.claims.registry import claim


@dataclass(frozen=True, slots=True)
class ProofStep:
    """A step of a proof: its lines, what it says, and the claims that judge it."""

    lines: str
    says: str
    codes: tuple[str, ...]


DENSE = "the constraints extend from a dense set, since h is C¹"

PROOFS: dict[str, tuple[ProofStep, ...]] = {
    "paper.T4.1.proof": (
        ProofStep("482-502", "gradients, and the criterion along t e_j", ("paper.eq14",)),
        ProofStep("504-548", "Lemma A.1, by power series", ("paper.LA.1",)),
        ProofStep("588-602", "Lemma A.2, by Bernoulli numbers", ("paper.LA.2",)),
        ProofStep("550-562", f"generic weights; {DENSE}", ("paper.eq29",)),
        ProofStep("462", "one output is enough", ("paper.scalar",)),
        ProofStep("562, 604", "so h is constant, at every size", ("paper.T4.1.all",)),
    ),
    "paper.T4.2.proof": (
        ProofStep("622-647", "gradients, and the criterion along t e_j", ("paper.eq40",)),
        ProofStep("653-657", "Lemma A.2 separates the terms", ("paper.LA.2",)),
        ProofStep("649-665", f"generic weights; {DENSE}", ("paper.eq29", "paper.eq48")),
        ProofStep("667-669", "the equations for several outputs", ("paper.scalar", "paper.T4.2.pde")),
        ProofStep("671, 184", "solving them gives constancy on components", ("paper.components", "paper.global")),
    ),
    "paper.T4.3.proof": (
        ProofStep("699-730", "gradients of attention", ("paper.eq58",)),
        ProofStep("732-760", "tokens (x, y, …, y)", ("paper.eq63", "paper.eq64", "paper.eq70")),
        ProofStep("772-782", "a rational function of the length vanishes", ("paper.identity", "paper.eq77")),
        ProofStep("786-794", "Lemma B.1", ("paper.LB.1",)),
        ProofStep("795-806", f"generic heads and inputs; {DENSE}", ("paper.eq79", "paper.eq81")),
        ProofStep("808-825", "generic values give both equations", ("paper.eq84", "paper.T4.3.pde")),
        ProofStep("827, 212", "solving them gives constancy on components", ("paper.components", "paper.global")),
    ),
    "paper.T4.4.proof": (
        ProofStep("853-883", "tokens (x, 0, …)", ("paper.eq90", "paper.eq94", "paper.B2.steps")),
        ProofStep("896-908", "a rational function of the length; quadratic forms",
                  ("paper.LB.1", "paper.eq101", "paper.eq101.size")),
        ProofStep("914-959", "tokens (x, 0, …, y, 0, …)", ("paper.eq105", "paper.eq113")),
        ProofStep("961-984", "Lemma B.2", ("paper.eq116", "paper.eq118", "paper.LB.2")),
        ProofStep("986-994", f"generic inputs; {DENSE}", ("paper.eq122",)),
        ProofStep("1008-1030", "Lemma B.3", ("paper.LB.3", "paper.eq130")),
        ProofStep("1032-1042", "the equations plane by plane", ("paper.eq132", "paper.T4.4.pde")),
        ProofStep("1044, 252", "solving them gives constancy on components",
                  ("paper.components", "paper.global.rotary")),
    ),
    "paper.T4.5.proof": (
        ProofStep("1096-1125", "gradients of the mixture along t e_j", ("paper.eq142", "paper.eq146")),
        ProofStep("1139-1149", "double poles force ∇_B h = 0", ("paper.eq153", "paper.LC.1")),
        ProofStep("1153-1162", "S_2 is the set of distinct squares, and open",
                  ("paper.eq155", "paper.eq155.corrected")),
        ProofStep("1184-1195", "𝔡 vanishes, and t = 0", ("paper.eq160",)),
        ProofStep("1197-1207", "density of the intersection", ("paper.C2.zeros", "paper.T4.5.pde")),
        ProofStep("1209, 290", "solving the equations", ("paper.components", "paper.global")),
    ),
    "paper.T4.6.proof": (
        ProofStep("1219-1225", "on a box the routing is fixed", ("paper.eq164", "paper.C3.bilinear")),
        ProofStep("1235-1239",
                  "the parameters that reach a given set are dense; assumes d > n, which the theorem does not state",
                  ("paper.S5.assumptions", "paper.C3.independence")),
        ProofStep("1241-1257", "the criterion extends to all inputs and parameters", ("paper.identity",)),
        ProofStep("1259-1263", "varying the set joins the gradients", ("paper.eq171", "paper.T4.6.pde")),
        ProofStep("310", "without d > n, another argument", ("paper.T4.6.all",)),
    ),
    "paper.T4.7.proof": (
        ProofStep("1269-1272", "the relation for a sigmoid gate", ("paper.eq173",)),
        ProofStep("1274", "the rest is as for the softmax gate",
                  ("paper.T4.7", "paper.T4.7.pde", "paper.eq173.zeros")),
        ProofStep("1274", "what follows instead",
                  ("paper.T4.7.all", "paper.T4.7.pde.corrected", "paper.T4.7.corrected")),
    ),
}  # fmt: skip
"""The steps of each proof, in their order."""


def proof_is_right(steps: Sequence[ProofStep]) -> Callable[..., Verdict]:
    """Return a check that judges a proof by its steps; slips are told and do not break it."""

    def check(*, chosen: Sequence[ProofStep] = tuple(steps)) -> Verdict:
        evidence, broken, slips = [], [], 0
        for step in chosen:
            results = [outcome_of(code) for code in step.codes]
            text = "; ".join(f"{result.standing} ({result.claim.code})" for result in results)
            bad = [r for r in results if not r.verdict.holds and r.severity is not Severity.SLIP]
            slips += sum(result.severity is Severity.SLIP for result in results)
            broken += [result.claim for result in bad]
            evidence.append(Evidence(what=f"{format_lines(spans(step.lines))}: {step.says}", value=text))
        after = f" Slips in its steps, which are repaired: {slips}." if slips else ""
        if not broken:
            return confirm(f"Every step holds.{after}", *evidence, scope=f"{ARGUED}, all sizes")
        names = ", ".join(claim.code for claim in broken)
        return refute(f"{_WEIGHTS[broken[0].severity or Severity.FALSE]}: {names}.{after}", *evidence)

    return check


_WEIGHTS = {
    Severity.GAP: "A step is missing or fails, and its repair gives the theorem for every size",
    Severity.OVERCLAIM: "A step assumes what the theorem does not state, and another argument does without it",
    Severity.FALSE: "A step is false, and so is the theorem",
}
"""Consequences for the proof if a step fails."""

for _code, _steps in PROOFS.items():
    claim(_code)(proof_is_right(_steps))
