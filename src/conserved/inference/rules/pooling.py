"""Rules for pooling and resampling of images."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from conserved.inference.rules.step import Known, Step, base_name, fix_all, rule
from conserved.inference.rules.views import read_at
from conserved.inference.types.engine import ENTRIES
from conserved.inference.types.tensor_type import FIXED, Type


@rule(
    "max_pool2d_with_indices",
    "max_pool3d_with_indices",
    "avg_pool2d",
    "avg_pool3d",
    "_adaptive_avg_pool2d",
    "adaptive_max_pool2d",
    "_adaptive_avg_pool3d",
    "mkldnn_max_pool2d",
    "upsample_nearest2d",
    "upsample_nearest1d",
    "upsample_bilinear2d",
    "upsample_bicubic2d",
    "upsample_linear1d",
    "upsample_trilinear3d",
    "upsample_nearest3d",
    "avg_pool1d",
    "adaptive_avg_pool1d",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
    "_upsample_nearest_exact2d",
    "reflection_pad1d",
    "reflection_pad2d",
    "replication_pad1d",
    "replication_pad2d",
)
def _pool(s: Step) -> Any:
    """Type a pooling with positive weights or a maximum: nothing may depend on the position."""
    x = s.arg(0)
    shape = s.shape(x)
    spatial = next((n for n in (1, 2, 3) if f"{n}d" in s.operation.name), 2)
    dims = list(range(len(shape) - spatial, len(shape)))
    type_ = s.type(x)
    factors = s.engine.uniform(type_.factors, dims)
    for factor in type_.factors:
        if "max" in s.operation.name:
            s.engine.partition.shatter(factor.atoms)
    s.engine.steady(type_)
    return [Type(tuple(factors), zero=type_.zero)] + [FIXED] * (len(s.operation.results) - 1)


@rule("grid_sampler_2d", "grid_sampler_3d", "max_unpool2d", "max_unpool3d")
def _resample(s: Step) -> Known:
    """Type images that are read or written at given places: linear in the image, and nothing may depend on the place.

    Between the places and beyond the edge there may be zeros, so that a constant does not stay one.
    """
    x, places = s.type(s.arg(0)), s.type(s.arg(1))
    s.engine.zero(places)
    s.engine.steady(x)
    count = len(s.shape(s.arg(0)))
    spatial = 3 if "3d" in s.operation.name else 2
    return Type(tuple(s.engine.uniform(x.factors, list(range(count - spatial, count)))), zero=x.zero)


@rule("pixel_shuffle", "pixel_unshuffle", "channel_shuffle")
def _shuffle(s: Step) -> Known:
    x = s.arg(0)
    shape = s.shape(x)
    if prod(shape) > ENTRIES:
        return fix_all(s)
    function = getattr(torch, base_name(s.operation.name).removeprefix("aten::"))
    positions = function(torch.arange(prod(shape)).reshape(shape), *s.operation.args[1:]).numpy()
    return read_at(s, s.type(x), shape, positions)
