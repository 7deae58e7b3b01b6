"""The decoder and the vision transformer of the paper's experiments, computed for speed with a plain model's weights.

What a model's own modules do one by one is done at once here: queries, keys and values in one product, all experts in
one pair of products, attention in one kernel. Products go through `papers.lab.pieces`. The numbers are those of the
model's own forward pass up to rounding, which a test holds against each other.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved.papers.blocks import Attention, DecoderLM, MixtureOfExperts, SwiGLU, VisionTransformer
from conserved.papers.blocks.attention import rotate
from conserved.papers.blocks.transformer import TransformerBlock
from conserved.papers.lab.data.examples import LossName
from conserved.papers.lab.pieces import MatrixProducts, gated, linear


class Unsupported(ValueError):
    """A model that is not made of the parts this file knows."""


def summed_loss(model: nn.Module, inputs: Tensor, targets: Tensor, loss: LossName, products: MatrixProducts) -> Tensor:
    """The sum, not the mean, of the cross-entropies of all targets."""
    if loss != "cross_entropy":
        raise Unsupported(f"Only cross-entropy is computed the fast way; this loss is {loss}.")
    logits = outputs(model, inputs, products)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")


def outputs(model: nn.Module, inputs: Tensor, products: MatrixProducts) -> Tensor:
    """What the model computes."""
    if isinstance(model, DecoderLM):
        x = model.positions(F.embedding(inputs, model.embedding.weight))
    elif isinstance(model, VisionTransformer):
        x = linear(model.patches(inputs), model.embedding.weight, model.embedding.bias, products)
        x = model.positions(x)
    else:
        raise Unsupported(f"A decoder or a vision transformer was expected; got a {type(model).__name__}.")
    for layer in cast(list[TransformerBlock], model.layers):
        x = x + _attention(layer.attention, layer.norm1(x), products)
        x = x + _feedforward(layer.feedforward, layer.norm2(x), products)
    x = model.norm(x)
    if isinstance(model, VisionTransformer):
        # One row per image: too few numbers for pieces to pay.
        return F.linear(x.mean(1), model.head.weight, model.head.bias)
    return linear(x, model.head.weight, None, products)


def _attention(block: Attention, x: Tensor, products: MatrixProducts) -> Tensor:
    if block.q_norm is not None or block.kv_heads != block.heads:
        raise Unsupported("Query/key norms and shared key heads are not computed the fast way.")
    parts = (block.q, block.k, block.v)
    bias = None if block.q.bias is None else torch.cat([part.bias for part in parts])
    joint = linear(x, torch.cat([part.weight for part in parts]), bias, products)
    q, k, v = joint.unflatten(-1, (3, block.heads, block.head_dim)).permute(-3, *range(x.ndim - 2), -2, -4, -1)
    if block.rotary is not None:
        q, k = rotate(q, block.rotary), rotate(k, block.rotary)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=block.causal, scale=block.scale)
    return linear(mixed.transpose(-2, -3).flatten(-2), block.o.weight, block.o.bias, products)


def _feedforward(block: nn.Module, x: Tensor, products: MatrixProducts) -> Tensor:
    share: Tensor | None
    if isinstance(block, MixtureOfExperts):
        experts, share = [cast(SwiGLU, expert) for expert in block.experts], block.weights(x)
    elif isinstance(block, SwiGLU):
        experts, share = [block], None
    else:
        raise Unsupported(f"Gated networks and mixtures of them are computed the fast way; got {type(block).__name__}.")
    both = torch.cat([e.gate.weight for e in experts] + [e.up.weight for e in experts])
    down = torch.cat([expert.down.weight for expert in experts], 1)
    bias = None
    if experts[0].gate.bias is not None:
        bias = torch.cat((*(e.gate.bias for e in experts), *(e.up.bias for e in experts)))
    found = gated(x, both, bias, down, share, products)
    if experts[0].down.bias is None:
        return found
    return found + experts[0].down.bias


def operations(model: nn.Module, tokens: int) -> int:
    """Floating-point operations of a gradient for each token: six per weight it meets, and twelve per logit and width.

    A product of n × k and k × m counts 2nkm, and the way back costs twice the way there. Logits of attention are
    counted as if none were masked.
    """
    weights = sum(
        module.weight.numel()
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not (isinstance(model, VisionTransformer) and name == "head")
    )
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    return 6 * weights + sum(12 * tokens * block.heads * block.head_dim for block in attentions)
