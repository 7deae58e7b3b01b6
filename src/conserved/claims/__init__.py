"""Every statement of the sources as a claim that can be run, with a verdict, its evidence and a witness."""

from conserved.claims.claim import Claim, Outcome
from conserved.claims.ledger import NoSuchClaim, claim, claims, outcomes, register, run

__all__ = ["Claim", "NoSuchClaim", "Outcome", "claim", "claims", "outcomes", "register", "run"]
