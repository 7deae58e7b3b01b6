"""Operators that are followed as the operations they stand for, because those have rules and run on any device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

Once = Callable[[Tensor, Callable[[], Tensor]], Tensor]
"""Makes something of a tensor, once for every value it has: equal indices are then one value of the program."""


def _grouped_mm(
    once: Once,
    rows: Tensor,
    maps: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return rows sorted by group, each times its group's matrix; group g ends before row offs[g]."""
    if offs is None:
        return torch.bmm(rows, maps)
    indices = partial(torch.arange, rows.shape[0], device=rows.device, dtype=offs.dtype)
    group = once(offs, lambda: torch.searchsorted(offs, indices(), right=True).clamp(max=maps.shape[0] - 1))
    product = torch.bmm(rows.unsqueeze(1), maps[group]).squeeze(1)
    product = product if bias is None else product + bias[group]
    return product if out_dtype is None else product.to(out_dtype)


def _takes_rows_and_maps(rows: Tensor, maps: Tensor, *rest: Any, **named: Any) -> bool:
    return (rows.ndim, maps.ndim) in ((2, 3), (3, 3))


DECOMPOSED: dict[str, tuple[Callable[..., bool], Callable[..., Tensor]]] = {
    "aten::_grouped_mm": (_takes_rows_and_maps, _grouped_mm),
}
"""By operator: for which arguments, and what it is made of."""
