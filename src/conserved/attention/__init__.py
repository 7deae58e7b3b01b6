"""The energy field of softmax attention at any length, what a live model shows of it, and natural attention."""

from typing import TYPE_CHECKING

from conserved.on_demand import load_on_demand

if TYPE_CHECKING:
    from conserved.attention.centered_attention import CenteredAttention, centered
    from conserved.attention.coherence import gaussian_coherence
    from conserved.attention.departures import DepartureRule
    from conserved.attention.energy import EnergyField, energy_field
    from conserved.attention.figure import coherence_figure
    from conserved.attention.folded_attention import FoldedAttention, folded
    from conserved.attention.invariance import Invariance, NotInvariantError
    from conserved.attention.low_rank_heads import LowRank, LowRankTable, low_rank, low_rank_table
    from conserved.attention.moments import TokenMoments
    from conserved.attention.monitor import AttentionMonitor, AttentionRecord
    from conserved.attention.natural_attention import NaturalAttention, NaturalDescent, token_fisher, value_metric
    from conserved.attention.precision import AttentionPrecision, PrecisionRow
    from conserved.attention.precision_watch import watch_precision
    from conserved.attention.probing import AttentionProbe, HeadRow, probe
    from conserved.attention.queries_and_keys import NoAttentionError
    from conserved.attention.rounding import AttentionRounding, attention_rounding
    from conserved.attention.softmax import SoftmaxStatistics, softmax_statistics
    from conserved.attention.transformers_attention import register_with_transformers
else:
    __getattr__ = load_on_demand(
        __name__,
        {
            "centered_attention": "CenteredAttention centered",
            "coherence": "gaussian_coherence",
            "departures": "DepartureRule",
            "energy": "EnergyField energy_field",
            "figure": "coherence_figure",
            "folded_attention": "FoldedAttention folded",
            "invariance": "Invariance NotInvariantError",
            "low_rank_heads": "LowRank LowRankTable low_rank low_rank_table",
            "moments": "TokenMoments",
            "monitor": "AttentionMonitor AttentionRecord",
            "natural_attention": "NaturalAttention NaturalDescent token_fisher value_metric",
            "precision": "AttentionPrecision PrecisionRow",
            "precision_watch": "watch_precision",
            "probing": "AttentionProbe HeadRow probe",
            "queries_and_keys": "NoAttentionError",
            "rounding": "AttentionRounding attention_rounding",
            "softmax": "SoftmaxStatistics softmax_statistics",
            "transformers_attention": "register_with_transformers",
        },
    )

__all__ = [
    "AttentionMonitor",
    "AttentionPrecision",
    "AttentionProbe",
    "AttentionRecord",
    "AttentionRounding",
    "CenteredAttention",
    "DepartureRule",
    "EnergyField",
    "FoldedAttention",
    "HeadRow",
    "Invariance",
    "LowRank",
    "LowRankTable",
    "NaturalAttention",
    "NaturalDescent",
    "NoAttentionError",
    "NotInvariantError",
    "PrecisionRow",
    "SoftmaxStatistics",
    "TokenMoments",
    "attention_rounding",
    "centered",
    "coherence_figure",
    "energy_field",
    "folded",
    "gaussian_coherence",
    "low_rank",
    "low_rank_table",
    "probe",
    "register_with_transformers",
    "softmax_statistics",
    "token_fisher",
    "value_metric",
    "watch_precision",
]
