"""How moment maps are evaluated: sources, the plan for many symmetries, and backends for products of legs."""

from conserved.moment.forms import Pair, Sums, Wanted
from conserved.moment.plan import HostCopy, Moments, Plan
from conserved.moment.row_identities import Norms
from conserved.moment.sources import Direction, Paired, Point, Reader, Source
from conserved.moment.torch_backend import of_legs

__all__ = [
    "Direction",
    "HostCopy",
    "Moments",
    "Norms",
    "Pair",
    "Paired",
    "Plan",
    "Point",
    "Reader",
    "Source",
    "Sums",
    "Wanted",
    "of_legs",
]
