"""How moment maps are evaluated: sources, the plan for many symmetries, and backends for products of legs.

What else reads much memory once, and has kernels of its own for it, is here too: remainders of norms, directions of
optimizers.
"""

from conserved.moment.forms import Sums, full_precision, working_dtype
from conserved.moment.host_copies import HostCopy, send_to_device, to_host
from conserved.moment.normalised_rows import RowNorm
from conserved.moment.plan import Moments, Plan
from conserved.moment.portions import Part, reads_together
from conserved.moment.quotients import root_quotients
from conserved.moment.row_identities import Norms
from conserved.moment.sources import Magnitudes, PairedTensors, Reader, Source
from conserved.moment.torch_backend import row_dots
from conserved.symmetry.pairs import Direction, LawPairs, Pair, Point

__all__ = [
    "Direction",
    "HostCopy",
    "LawPairs",
    "Magnitudes",
    "Moments",
    "Norms",
    "Pair",
    "PairedTensors",
    "Part",
    "Plan",
    "Point",
    "Reader",
    "RowNorm",
    "Source",
    "Sums",
    "full_precision",
    "reads_together",
    "root_quotients",
    "row_dots",
    "send_to_device",
    "to_host",
    "working_dtype",
]
