"""How moment maps are evaluated: sources, the plan for many symmetries, and backends for products of legs."""

from conserved.moment.forms import Pair, Sums, Wanted, full_precision, working_dtype
from conserved.moment.launches import sent
from conserved.moment.plan import HostCopy, Moments, Plan
from conserved.moment.portions import Part, reads_together
from conserved.moment.row_identities import Norms
from conserved.moment.sources import Direction, Paired, Point, Reader, Source
from conserved.moment.torch_backend import of_legs, row_dots

__all__ = [
    "Direction",
    "HostCopy",
    "Moments",
    "Norms",
    "Pair",
    "Paired",
    "Part",
    "Plan",
    "Point",
    "Reader",
    "Source",
    "Sums",
    "Wanted",
    "full_precision",
    "of_legs",
    "reads_together",
    "row_dots",
    "sent",
    "working_dtype",
]
