"""Rows of attention for a few queries of every head, as the mask of the call lets them see keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor

_SCALES = ("scale", "scaling", "softmax_scale", "sm_scale")
_MASKS = ("attn_mask", "attention_mask", "mask")
_KEY_BOUNDS = ("cu_seqlens", "cu_seqlens_k", "cu_seq_lens_k", "cu_seq_k")
_QUERY_BOUNDS = ("cu_seqlens", "cu_seqlens_q", "cu_seq_lens_q", "cu_seq_q")
"""Bounds of packed documents as fla, flash-attn, transformers and PyTorch call them."""


@dataclass(frozen=True, slots=True)
class SampledPositions:
    """Queries at equal distances: the middle of each of `number` equal parts of the sequence."""

    first: int
    step: int
    number: int

    @classmethod
    def of(cls, queries: int, count: int, groups: int) -> SampledPositions:
        """Return positions of about `count` rows, which the `groups` query heads of a key head share."""
        number = max(1, min(queries, count // groups))
        step = queries // number
        return cls(step // 2, step, number)

    @property
    def slice(self) -> slice:
        """The positions as a slice of the axis of tokens."""
        return slice(self.first, self.first + self.step * self.number, self.step)


def _option(options: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """Return the first option of these names that is given; None if none is."""
    return next((options[name] for name in names if options.get(name) is not None), None)


def group_size(query: Tensor, key: Tensor) -> int:
    """Return how many query heads share a key head."""
    return max(1, query.shape[-3] // key.shape[-3]) if query.ndim > 2 and key.ndim > 2 else 1


def score_scale(query: Tensor, options: Mapping[str, Any]) -> float | Tensor:
    """Return the factor of the scores: an option, or one over the root of the width."""
    scale = _option(options, _SCALES)
    return query.shape[-1] ** -0.5 if scale is None else cast("float | Tensor", scale)


def packed_documents(query: Tensor, key: Tensor, options: Mapping[str, Any]) -> Tensor | None:
    """Return the bounds of documents packed into one sequence, if queries and keys have the same; else None.

    Args:
        query: (heads, length, width), or the same with a batch of one.
        key: as `query`.
        options: the further arguments of the call by name.

    Returns:
        Zero and the end of every document, as flash-attn takes them.
    """
    bounds, of_queries = _option(options, _KEY_BOUNDS), _option(options, _QUERY_BOUNDS)
    if not isinstance(bounds, Tensor) or bounds.ndim != 1 or query.shape[-2] != key.shape[-2]:
        return None
    # Two tensors may hold the same bounds; whether they do is known only to the device.
    if of_queries is not bounds or len(bounds) < 2 or any(size != 1 for size in key.shape[:-3]):
        return None
    return bounds


def document_of_tokens(bounds: Tensor, length: int) -> Tensor:
    """Return the number of the document of every token."""
    tokens = torch.arange(length, device=bounds.device)
    return torch.searchsorted(bounds[1:-1].to(tokens.dtype), tokens, right=True)


def rows_of_documents(bounds: Tensor, number: int, length: int) -> Tensor:
    """Return the positions of `number` queries of every document, the middles of as many equal parts of it."""
    starts, sizes = bounds[:-1, None].long(), bounds.long().diff()[:, None]
    parts = torch.arange(number, device=bounds.device)
    return (starts + sizes * (2 * parts + 1) // (2 * number)).clamp_max(length - 1).flatten()


def sampled_rows(
    query: Tensor, key: Tensor, options: Mapping[str, Any], sample: slice | Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return softmax rows of some queries for every key head, and which of them see a key.

    Masks are read where the options name them as PyTorch, transformers or flash-attn do, and ignored otherwise.

    Args:
        query: (…, heads, queries, width).
        key: (…, key heads, keys, width); query heads of a group follow each other.
        options: the further arguments of the call by name.
        sample: the positions of the queries, the same for all query heads of a group.

    Returns:
        Rows (…, key heads, rows, keys) in the precision of `key`, or in float32 on a processor, whose products of
        half precision are slow; and (…, key heads, rows, 1) of 1 and 0, or None if every row sees a key.
    """
    groups = group_size(query, key)
    dtype = torch.float32 if key.device.type == "cpu" and key.dtype != torch.float64 else key.dtype
    scores = sampled_queries(query, key, options, sample).to(dtype) @ key.to(dtype).mT
    visible, empty = _visible(sample, query, key, options, groups)
    if visible is not None and visible.dtype == torch.bool:
        scores = scores.masked_fill(~visible, -torch.inf)
    elif visible is not None:
        scores = scores + visible.to(dtype)
    if not empty:
        return scores.softmax(-1), None
    sees = scores.amax(-1, keepdim=True) > -torch.inf
    return torch.where(sees, scores, 0.0).softmax(-1), sees.to(dtype)


def sampled_queries(query: Tensor, key: Tensor, options: Mapping[str, Any], sample: slice | Tensor) -> Tensor:
    """Return some queries times the scale of the scores, (…, key heads, rows, width)."""
    rows = query[..., sample, :]
    if query.ndim > 2:
        rows = rows.unflatten(-3, (-1, group_size(query, key))).flatten(-3, -2)
    # The scale goes into the few queries, so that it does not cost a pass over the scores.
    return rows * score_scale(query, options)


def readable_mask(query: Tensor, key: Tensor, options: Mapping[str, Any]) -> Tensor | None:
    """Return the mask among the options if it is a tensor over queries and keys, else None."""
    mask = next((options[name] for name in _MASKS if isinstance(options.get(name), Tensor)), None)
    if mask is None or mask.ndim < 2 or mask.shape[-1] != key.shape[-2] or mask.shape[-2] not in (1, query.shape[-2]):
        return None
    return mask


def causal_bias_as_flag(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options with a flag instead of a mask of type CausalBias, whose entries are not initialised."""
    for name in _MASKS:
        kind: Any = type(options.get(name))
        # By name: to import the class takes longer than all of this package.
        if (kind.__module__, kind.__name__) == ("torch.nn.attention.bias", "CausalBias"):
            lower_right = cast("Any", options[name]).variant.name == "LOWER_RIGHT"
            return {**options, name: None, "causal" if lower_right else "is_causal": True}
    return options


def hides_nothing_but_later_keys(query: Tensor, key: Tensor, options: Mapping[str, Any]) -> bool:
    """Return whether the options name no mask, window or packing, and a causal flag for equal lengths at most."""
    causal = bool(options.get("is_causal") or options.get("causal"))
    return (
        all(options.get(name) is None for name in (*_MASKS, *_KEY_BOUNDS, "block_mask"))
        and _window(options) == (-1, -1)
        and (not causal or query.shape[-2] == key.shape[-2])
    )


def _visible(
    sample: slice | Tensor, query: Tensor, key: Tensor, options: Mapping[str, Any], groups: int
) -> tuple[Tensor | None, bool]:
    """Return True where a row sees a key, or what is added to its scores; and whether a row may see no key at all."""
    queries, keys = query.shape[-2], key.shape[-2]
    if isinstance(sample, slice):
        index = torch.arange(sample.start, sample.stop, sample.step, device=query.device)
    else:
        index = sample
    number = len(index)
    given = readable_mask(query, key, options)
    if given is not None:
        rows = given if given.shape[-2] == 1 else given[..., sample, :]
        return _over_groups(rows, groups, number), True
    block = options.get("block_mask")
    if block is not None and hasattr(block, "mask_mod"):
        return _over_groups(_block_rows(block.mask_mod, index, query, keys), groups, number), True
    band = _band_rows(index, queries, keys, options)
    if band is None:
        return None, False
    # With as many keys as queries every query sees its own.
    return _over_groups(band, groups, number), queries != keys


def _over_groups(visible: Tensor, groups: int, number: int) -> Tensor:
    """Repeat or regroup rows so that those of the query heads of a group follow each other."""
    if groups == 1 or (visible.shape[-2] == 1 and (visible.ndim < 3 or visible.shape[-3] == 1)):
        return visible
    visible = visible.expand(*visible.shape[:-2], number, visible.shape[-1])
    if visible.ndim < 3 or visible.shape[-3] == 1:
        return visible.repeat(*[1] * (visible.ndim - 2), groups, 1)
    return visible.unflatten(-3, (-1, groups)).flatten(-3, -2)


def _block_rows(mask_mod: Any, index: Tensor, query: Tensor, keys: int) -> Tensor:
    """Evaluate the mask function of FlexAttention at the sampled rows, as FlexAttention does: with vmap."""
    every = torch.vmap(mask_mod, in_dims=(None, None, None, 0))
    for dims in ((None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        every = torch.vmap(every, in_dims=dims)
    batch, heads = (torch.arange(query.shape[axis], device=query.device) for axis in (0, 1))
    visible: Tensor = every(batch, heads, index, torch.arange(keys, device=query.device))
    return visible


def _band_rows(index: Tensor, queries: int, keys: int, options: Mapping[str, Any]) -> Tensor | None:
    """Return who sees whom under causal flags, sliding windows and packed sequences; None if all see all."""
    causal = bool(options.get("is_causal") or options.get("causal"))
    lower_right = bool(options.get("causal"))  # flash-attn aligns the last query with the last key
    back, ahead = _window(options)
    bounds = _option(options, _KEY_BOUNDS)
    if not causal and back < 0 and ahead < 0 and bounds is None:
        return None
    columns = torch.arange(keys, device=index.device)
    distance = index[:, None] + (keys - queries if lower_right and bounds is None else 0) - columns
    conditions = []
    if isinstance(bounds, Tensor) and queries == keys:
        documents = document_of_tokens(bounds, keys)
        conditions.append(documents[index][:, None] == documents)
    if causal:
        conditions.append(distance >= 0)
    if back >= 0:
        conditions.append(distance <= back)
    if ahead >= 0:
        conditions.append(distance >= -ahead)
    return reduce(torch.logical_and, conditions) if conditions else None


def _window(options: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many keys before and after its own a query sees; -1 for all."""
    size = options.get("window_size")
    if isinstance(size, tuple | list) and len(size) == 2:
        return int(size[0]), int(size[1])
    width = size if isinstance(size, int) else options.get("sliding_window")
    return (int(width) - 1, -1) if isinstance(width, int) and width > 0 else (-1, -1)
