"""How coarse the arithmetic was that made some single-precision gradients, read off their significands.

Under autocast a weight's gradient is computed in half precision and stored in single. Such entries end in zero bits:
16 of 23 for bfloat16, 13 for float16, and still many after a few have been added up. Clipping multiplies all entries by
one number, which fills the bits but maps equal significands to equal significands: entries of bfloat16 origin have at
most 128 of them. In single precision both are rare: one entry in 64 ends in six zeros, and n entries of different value
have about n²/2²⁴ significands in common.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

_FEWEST = 24
"""Nonzero entries below which nothing is concluded."""

_FRACTION_BITS = 23


def grain(samples: Iterable[Float[Tensor, "_"]]) -> torch.dtype | None:
    """The half precision that at least half of some float32 gradients, of which these are entries, come from.

    One coarse gradient among fine ones is no sign of autocast but a defect, and must not loosen what it is held to.
    """
    found = [_grain(values) for sample in samples if np.count_nonzero(values := sample.numpy()) >= _FEWEST]
    coarse = [precision for precision in found if precision is not None]
    if not coarse or 2 * len(coarse) < len(found):
        return None
    return torch.bfloat16 if torch.bfloat16 in coarse else torch.float16


def _grain(sample: NDArray[np.floating]) -> torch.dtype | None:
    """bfloat16 or float16 if these entries of float32 gradients were computed in it; None if in float32 or unknown."""
    entries = np.unique(np.abs(sample[np.isfinite(sample) & (sample != 0)]).astype(np.float32))
    count = entries.size
    if count < _FEWEST:
        return None
    significands = entries.view(np.int32) & ((1 << _FRACTION_BITS) - 1)

    def ending_in(zeros: int) -> float:
        return 1 - np.count_nonzero(significands & ((1 << zeros) - 1)) / count

    if ending_in(16) > 0.5:
        return torch.bfloat16
    # Sums of a few bfloat16 numbers often end in as many zeros, but not nearly all of them do.
    if ending_in(13) > 0.98:
        return torch.float16
    if ending_in(6) > 0.25:
        return torch.bfloat16
    # In single precision expect n²/2²⁴ repetitions; ten times that and three more do not happen by chance. Which half
    # precision it was cannot be told, because sums in single precision are mixed in: the coarser one is assumed.
    repeated = count - np.unique(significands).size
    return torch.bfloat16 if repeated > 3 + 10 * count**2 / 2 ** (_FRACTION_BITS + 1) else None
