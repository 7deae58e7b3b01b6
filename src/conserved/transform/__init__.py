"""Moving along symmetries: other weights, the same function."""

from conserved.transform.activations import activation_sizes
from conserved.transform.elements import Exchange, Orthogonal, Unmovable
from conserved.transform.equalizing import OBJECTIVES, Equalized, equalize
from conserved.transform.finding import symmetries_of
from conserved.transform.mapping import FORMATS, Mapping, mappings
from conserved.transform.moving import Moved, move

__all__ = [
    "FORMATS",
    "OBJECTIVES",
    "Equalized",
    "Exchange",
    "Mapping",
    "Moved",
    "Orthogonal",
    "Unmovable",
    "activation_sizes",
    "equalize",
    "mappings",
    "move",
    "symmetries_of",
]
