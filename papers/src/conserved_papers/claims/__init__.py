"""Every statement of the sources as a claim that can be run, with a verdict, its evidence and a witness."""

from conserved.optional import require

require("flint", "A claim")

from conserved_papers.claims.claim_record import Claim, Outcome
from conserved_papers.claims.registry import NoSuchClaimError, claim, claims, outcomes, register, run

__all__ = ["Claim", "NoSuchClaimError", "Outcome", "claim", "claims", "outcomes", "register", "run"]
