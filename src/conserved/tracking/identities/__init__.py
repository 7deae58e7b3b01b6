"""The identities of a step: these weights, this gradient, this update, these weights, the same on all replicas.

Each file asks one question about a step and needs no law of the model. `StepIdentities` asks all of them.
"""

from conserved.tracking.identities.finding import StepFinding
from conserved.tracking.identities.step_identities import StepIdentities
from conserved.tracking.identities.step_identity import StepIdentity, TrainingStep

__all__ = ["StepFinding", "StepIdentities", "StepIdentity", "TrainingStep"]
