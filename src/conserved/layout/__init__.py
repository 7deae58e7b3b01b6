"""Where the pieces of parameters are, and how identities are put together from them."""

from conserved.layout.given import GivenLayout
from conserved.layout.gradients import gradient_of, reduced_gradients, scatters_gradients
from conserved.layout.groups import RankGroup
from conserved.layout.law_pieces import Assembled, LawAssembly
from conserved.layout.reading import layout_of, replica_groups
from conserved.layout.replicas import Disagreement, compare_replicas
from conserved.layout.table import ModelLayout, ParameterLayout, PieceCut

__all__ = [
    "Assembled",
    "Disagreement",
    "GivenLayout",
    "LawAssembly",
    "ModelLayout",
    "ParameterLayout",
    "PieceCut",
    "RankGroup",
    "compare_replicas",
    "gradient_of",
    "layout_of",
    "reduced_gradients",
    "replica_groups",
    "scatters_gradients",
]
