"""The energy field of softmax attention at any length, what a live model shows of it, and natural attention."""

from conserved.attention.coherence import gaussian_coherence
from conserved.attention.departures import DepartureRule
from conserved.attention.energy import EnergyField, energy_field
from conserved.attention.figure import coherence_figure
from conserved.attention.low_rank_heads import LowRank, LowRankTable, low_rank, low_rank_table
from conserved.attention.moments import TokenMoments
from conserved.attention.monitor import AttentionMonitor, AttentionRecord
from conserved.attention.natural_attention import NaturalAttention, NaturalDescent, token_fisher, value_metric
from conserved.attention.probing import AttentionProbe, HeadRow, probe
from conserved.attention.queries_and_keys import Unheard
from conserved.attention.softmax import SoftmaxStatistics, softmax_statistics

__all__ = [
    "AttentionMonitor",
    "AttentionProbe",
    "AttentionRecord",
    "DepartureRule",
    "EnergyField",
    "HeadRow",
    "LowRank",
    "LowRankTable",
    "NaturalAttention",
    "NaturalDescent",
    "SoftmaxStatistics",
    "TokenMoments",
    "Unheard",
    "coherence_figure",
    "energy_field",
    "gaussian_coherence",
    "low_rank",
    "low_rank_table",
    "probe",
    "softmax_statistics",
    "token_fisher",
    "value_metric",
]
