"""How moment maps are evaluated: sources, the plan for many symmetries, and backends for products of legs."""

from conserved.moment.forms import Sums
from conserved.moment.plan import HostCopy, Moments, Plan
from conserved.moment.row_identities import Norms
from conserved.moment.sources import Magnitudes, Paired, Reader, Source
from conserved.symmetry.pairs import Direction, LawPairs, Pair, Point

__all__ = [
    "Direction",
    "HostCopy",
    "LawPairs",
    "Magnitudes",
    "Moments",
    "Norms",
    "Pair",
    "Paired",
    "Plan",
    "Point",
    "Reader",
    "Source",
    "Sums",
]
