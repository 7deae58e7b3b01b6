"""Numbers that tell tensors apart, exactly: the same for equal bits on any process and device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from conserved.symmetry.view import local
from conserved.tracking.identities.step_identity import is_plain

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_PRIME = 1_000_003


def fingerprints(tensors: Sequence[Tensor | None]) -> Tensor:
    """Return a number for each tensor that any single entry changes; exact, so equal tensors give equal numbers.

    Stored bits are added up as integers, once plainly and once with weights that repeat every 1,021 entries, so that
    entries that change places are seen as well. Integer sums wrap around and do not depend on their order.
    """
    prints = []
    for tensor in tensors:
        if tensor is None or not is_plain(tensor) or not local(tensor).numel():
            prints.append(torch.zeros((), dtype=torch.int64))
            continue
        values = local(tensor.detach()).contiguous().flatten()
        bits = values.view(_INTEGERS.get(values.element_size(), torch.int8)).long()
        weights = torch.arange(1, 1022, device=bits.device, dtype=torch.int64)
        padded = torch.nn.functional.pad(bits, (0, -len(bits) % 1021)).view(-1, 1021)
        number = bits.sum() * _PRIME + (padded.sum(0) * weights).sum()
        # Zero is kept for tensors of zeros and for those that are not there.
        prints.append(torch.where(values.any(), number | 1, 0).cpu())
    return torch.stack(prints) if prints else torch.zeros(0, dtype=torch.int64)


def varies(tensor: Tensor) -> bool:
    """Return whether a tensor has entries of different values."""
    flat = local(tensor.detach()).flatten()
    return bool((flat != flat[:1]).any())
