"""The sources' components as small plain modules, mathematically as written."""

from conserved_papers.blocks.attention import Attention, ReluAttention
from conserved_papers.blocks.experts import MixtureOfExperts
from conserved_papers.blocks.feedforward import FeedForward, SwiGLU
from conserved_papers.blocks.transformer import (
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
