"""The sources' components as small plain modules, mathematically as written."""

from conserved.blocks.attention import Attention, ReluAttention
from conserved.blocks.experts import MixtureOfExperts
from conserved.blocks.feedforward import FeedForward, SwiGLU
from conserved.blocks.transformer import (
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
