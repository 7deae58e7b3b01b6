"""Moving along symmetries: other weights, the same function."""

from conserved.symmetry import UnmovableError
from conserved.transform.activations import Call, activation_sizes
from conserved.transform.aligning import Alignment, align
from conserved.transform.canonical_form import Fingerprint, canonical, fingerprint
from conserved.transform.checkpoint import Checkpoint
from conserved.transform.coupling import coupled_spaces, exchanges
from conserved.transform.equalizing import OBJECTIVES, Equalization, equalize
from conserved.transform.finding import symmetries_of
from conserved.transform.lawless_kinds import Exchange, Orthogonal
from conserved.transform.mapping import FORMATS, LayerMapping, mappings
from conserved.transform.moving import MovedWeights, move
from conserved.transform.schemes import SCHEMES, SchemeFit, fit_to_scheme
from conserved.transform.training import EqualizeEvery

__all__ = [
    "FORMATS",
    "OBJECTIVES",
    "SCHEMES",
    "Alignment",
    "Call",
    "Checkpoint",
    "Equalization",
    "EqualizeEvery",
    "Exchange",
    "Fingerprint",
    "LayerMapping",
    "MovedWeights",
    "Orthogonal",
    "SchemeFit",
    "UnmovableError",
    "activation_sizes",
    "align",
    "canonical",
    "coupled_spaces",
    "equalize",
    "exchanges",
    "fingerprint",
    "fit_to_scheme",
    "mappings",
    "move",
    "symmetries_of",
]
