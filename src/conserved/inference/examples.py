"""Inputs to follow a model with, where it says itself how it is called."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from conserved._torch_compat import tree_map_only
from conserved.errors import InvalidInputError

ModelCall = tuple[tuple[Any, ...], dict[str, Any]]

LENGTH = 8
"""Tokens of a made-up sequence, where nothing depends on the length."""


class NoExampleError(InvalidInputError, ValueError):
    """Raised if example inputs are needed and cannot be made up for a model."""


def example_inputs(model: nn.Module) -> Iterator[ModelCall]:
    """Yield calls to try, the most telling first.

    Sources are Lightning's `example_input_array`, then configurations of transformers, then the first layer that fixes
    a shape.
    """
    given = getattr(model, "example_input_array", None)
    if given is not None:
        moved = tree_map_only(Tensor, lambda tensor: tensor.to(_device(model)), given)
        yield ((), moved) if isinstance(moved, dict) else (moved if isinstance(moved, tuple) else (moved,), {})
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "to_dict"):
        yield from _transformers(model, config)
    yield from _first_layer(model)


def _device(model: nn.Module) -> torch.device:
    first = next(iter(model.parameters()), None)
    return first.device if first is not None else torch.device("cpu")


def _dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def tokens(model: nn.Module, vocabulary: int, *shape: int) -> Tensor:
    """Return token numbers, none of them 0 (often padding) if there are others."""
    low = 1 if vocabulary > 1 else 0
    device = _device(model)
    if device.type == "meta":
        return torch.empty(shape, dtype=torch.int64, device=device)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(low, max(low + 1, vocabulary), shape, generator=generator).to(device)


def numbers(model: nn.Module, *shape: int) -> Tensor:
    """Return random inputs in the model's precision."""
    device, dtype = _device(model), _dtype(model)
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)


def _transformers(model: nn.Module, config: Any) -> Iterator[ModelCall]:
    name = getattr(model, "main_input_name", "input_ids")
    text = getattr(config, "text_config", config)
    vocabulary = getattr(text, "vocab_size", None)
    if name == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", 224)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        yield (), {name: numbers(model, 2, getattr(vision, "num_channels", 3), height, width)}
    if isinstance(vocabulary, int) and name == "input_ids":
        longest = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None) or LENGTH
        length = min(LENGTH, longest) if isinstance(longest, int) else LENGTH
        ids = tokens(model, vocabulary, 2, length)
        if getattr(config, "is_encoder_decoder", False):
            yield (), {name: ids, "decoder_input_ids": tokens(model, vocabulary, 2, length)}
        options = {"use_cache": False} if hasattr(config, "use_cache") else {}
        yield (), {name: ids, **options}
        yield (), {name: ids}
    try:
        dummy = getattr(model, "dummy_inputs", None)
    except Exception:
        dummy = None
    if isinstance(dummy, dict) and dummy:
        device = _device(model)
        yield (), {key: value.to(device) if isinstance(value, Tensor) else value for key, value in dummy.items()}


def _first_layer(model: nn.Module) -> Iterator[ModelCall]:
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            yield (tokens(model, module.num_embeddings, 2, LENGTH),), {}
            yield (tokens(model, module.num_embeddings, 2),), {}
            return
        if isinstance(module, nn.Conv2d):
            for size in (32, 28, 64, 224):
                yield (numbers(model, 2, module.in_channels, size, size),), {}
            return
        if isinstance(module, nn.Conv1d):
            yield (numbers(model, 2, module.in_channels, 32),), {}
            return
        if isinstance(module, nn.Conv3d):
            yield (numbers(model, 2, module.in_channels, 8, 16, 16),), {}
            return
        if isinstance(module, nn.LSTM | nn.GRU | nn.RNN):
            yield (numbers(model, 2, 5, module.input_size),), {}
            return
        if isinstance(module, nn.MultiheadAttention):
            x = numbers(model, 2, 5, module.embed_dim)
            yield (x,), {}
            yield (x, x, x), {}
            return
        if isinstance(module, nn.Linear):
            yield (numbers(model, 2, 5, module.in_features),), {}
            yield (numbers(model, 2, module.in_features),), {}
            return
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            for size in dict.fromkeys((parameter.shape[-1], parameter.shape[-2], parameter.shape[0])):
                yield (numbers(model, 2, 5, size),), {}
                yield (numbers(model, 5, size),), {}
                yield (numbers(model, 2, size),), {}
            return
