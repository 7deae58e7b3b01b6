"""Where the pieces of parameters are, and how identities are put together from them."""

from conserved.layout.flat_shards import (
    FlatShard,
    flat_shards,
    has_flat_shards,
    is_sharded,
    named_parameters_of,
    processes_of,
)
from conserved.layout.given import GivenLayout
from conserved.layout.gradients import gradient_of, reduced_gradients, scatters_gradients
from conserved.layout.groups import RankGroup
from conserved.layout.law_pieces import AssembledTensors, LawAssembly
from conserved.layout.reading import layout_of, replica_groups
from conserved.layout.replicas import Disagreement, compare_replicas
from conserved.layout.table import ModelLayout, ParameterLayout, PieceCut

__all__ = [
    "AssembledTensors",
    "Disagreement",
    "FlatShard",
    "GivenLayout",
    "LawAssembly",
    "ModelLayout",
    "ParameterLayout",
    "PieceCut",
    "RankGroup",
    "compare_replicas",
    "flat_shards",
    "gradient_of",
    "has_flat_shards",
    "is_sharded",
    "layout_of",
    "named_parameters_of",
    "processes_of",
    "reduced_gradients",
    "replica_groups",
    "scatters_gradients",
]
