"""The sources' components as small plain modules, mathematically as written."""

from conserved.papers.blocks.attention import Attention, ReluAttention
from conserved.papers.blocks.experts import MixtureOfExperts
from conserved.papers.blocks.feedforward import FeedForward, SwiGLU
from conserved.papers.blocks.transformer import (
    DecoderLM,
    LearnedPositions,
    SinusoidalPositions,
    TransformerBlock,
    VisionTransformer,
)

__all__ = [
    "Attention",
    "DecoderLM",
    "FeedForward",
    "LearnedPositions",
    "MixtureOfExperts",
    "ReluAttention",
    "SinusoidalPositions",
    "SwiGLU",
    "TransformerBlock",
    "VisionTransformer",
]
