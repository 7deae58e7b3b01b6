"""The energy field of softmax attention at any length, what a live model shows of it, and natural attention."""

from conserved.attention.coherence import gaussian_coherence
from conserved.attention.energy import EnergyField, energy_field
from conserved.attention.moments import Moments
from conserved.attention.softmax import SoftmaxStatistics, softmax_statistics

__all__ = [
    "EnergyField",
    "Moments",
    "SoftmaxStatistics",
    "energy_field",
    "gaussian_coherence",
    "softmax_statistics",
]
