"""Laws that one process can account for: those of which all legs lie on it."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from conserved.auditing.backward_pass import layout_with
from conserved.inference.live import kept_with, parts_of
from conserved.laws import Dropped, LawSet
from conserved.layout import GivenLayout, LawAssembly, has_flat_shards
from conserved.layout.deepspeed import is_linked
from conserved.layout.megatron import is_shared_with_stages

SPREAD = "its legs lie on several processes: audits test it, and it is not accounted for"
"""Reason for a law that is not watched step by step."""


def laws_of_process(model: nn.Module, laws: LawSet, layout: GivenLayout | None = None) -> LawSet:
    """Leave out laws that hold for sums over processes only, because a single process does not conserve its part."""
    summed = LawAssembly.of(layout_with(parts_of(model), layout), laws.symmetries).names
    shared = {name for name, p in model.named_parameters() if is_shared_with_stages(p)} | kept_with(model).shared
    summed |= {symmetry.name for symmetry in laws if shared.intersection(symmetry.parameters)}
    if has_flat_shards(model) or is_linked(model.parameters()):
        # The optimizer steps joined ranges of all parameters, and not the tensors that laws speak of.
        summed |= {symmetry.name for symmetry in laws}
    if not summed:
        return laws
    rest = laws.select(lambda symmetry: symmetry.name not in summed)
    return replace(rest, dropped=(*rest.dropped, *(Dropped(name, SPREAD) for name in sorted(summed))))
