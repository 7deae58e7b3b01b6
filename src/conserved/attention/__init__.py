"""The energy field of softmax attention at any length, what a live model shows of it, and natural attention."""

from conserved.attention.capture import Unheard
from conserved.attention.coherence import gaussian_coherence
from conserved.attention.energy import EnergyField, energy_field
from conserved.attention.low_rank import LowRank, LowRankTable, low_rank, low_rank_table
from conserved.attention.moments import Moments
from conserved.attention.probe import HeadRow, Probe, probe
from conserved.attention.softmax import SoftmaxStatistics, softmax_statistics

__all__ = [
    "EnergyField",
    "HeadRow",
    "LowRank",
    "LowRankTable",
    "Moments",
    "Probe",
    "SoftmaxStatistics",
    "Unheard",
    "energy_field",
    "gaussian_coherence",
    "low_rank",
    "low_rank_table",
    "probe",
    "softmax_statistics",
]
