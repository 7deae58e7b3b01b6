"""Laws whose legs all lie on one process, which accounts for them, and laws that several processes test together."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import nn
from torch.optim import Optimizer

from conserved.auditing.backward_pass import layout_with
from conserved.inference.cached_laws import cached_laws_of
from conserved.inference.model_parts import parts_of
from conserved.laws import Dropped, LawSet
from conserved.layout import GivenLayout, LawAssembly, has_flat_shards
from conserved.layout.deepspeed import is_linked
from conserved.layout.megatron import is_shared_with_stages
from conserved.rank_agreement import RankAgreement

SPREAD = "its legs lie on several processes: audits test it, and it is not accounted for"
"""Reason for a law that is not watched step by step."""

NOT_SHARED = "other processes with the same parameters did not read it: what their batches show differs"
"""Reason for a law that is left out where processes add up residuals."""


COPIED = "the optimizer steps copies of the parameters: audits test the gradients, and steps are not accounted for"
"""Reason for laws that are not watched step by step."""


def steps_copies(model: nn.Module, optimizers: Iterable[Optimizer]) -> bool:
    """Return whether optimizers step copies of all parameters, which a stack keeps in higher precision or in ranges."""
    held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    parameters = [p for p in model.parameters() if p.requires_grad]
    return any(hasattr(p, "main_grad") for p in parameters) and held.isdisjoint(map(id, parameters))


def laws_of_process(model: nn.Module, laws: LawSet, layout: GivenLayout | None = None) -> LawSet:
    """Leave out laws that hold for sums over processes only, because a single process does not conserve its part."""
    summed = LawAssembly.of(layout_with(parts_of(model), layout), laws.symmetries).names
    shared = {name for name, p in model.named_parameters() if is_shared_with_stages(p)} | cached_laws_of(model).shared
    summed |= {symmetry.name for symmetry in laws if shared.intersection(symmetry.parameters)}
    if has_flat_shards(model) or is_linked(model.parameters()):
        # The optimizer steps joined ranges of all parameters, and not the tensors that laws speak of.
        summed |= {symmetry.name for symmetry in laws}
    if not summed:
        return laws
    rest = laws.select(lambda symmetry: symmetry.name not in summed)
    return replace(rest, dropped=(*rest.dropped, *(Dropped(name, SPREAD) for name in sorted(summed))))


def shared_laws(laws: LawSet, agreement: RankAgreement) -> LawSet:
    """Return the laws that all processes with parameters of these names have read; all of them call it.

    What a program does may depend on its batch, as routing does, and a law that one process left out must not be added
    up by the others. Stages of a pipeline have other parameters, and laws of their own.
    """
    parameters = _digest(sorted(laws.parameters))
    marks = agreement.combine("marks of laws", f"{parameters} {_digest(laws.names)}", _are_alike)
    if marks == "alike":
        return laws
    record = json.dumps([parameters, list(laws.names)])
    common: dict[str, list[str]] = json.loads(agreement.combine("names of laws", record, _common_names))
    lost = [Dropped(name, NOT_SHARED) for name in laws.names if name not in common[parameters]]
    # In one order: residuals are added up by their place.
    symmetries = tuple(laws[name] for name in common[parameters])
    return replace(laws, symmetries=symmetries, dropped=(*laws.dropped, *lost))


def _digest(names: Sequence[str]) -> str:
    return f"{zlib.crc32('|'.join(names).encode()):x}"


def _are_alike(marks: Sequence[str]) -> str:
    """Return "alike" if processes with the same parameters have the same laws."""
    distinct = {*marks}
    return "alike" if len({mark.split()[0] for mark in distinct}) == len(distinct) else "different"


def _common_names(records: Sequence[str]) -> str:
    """Return by parameters the names of the laws that all processes with these have."""
    common: dict[str, list[str]] = {}
    for parameters, names in map(json.loads, records):
        own = {*names}
        common[parameters] = [name for name in common.get(parameters, names) if name in own]
    return json.dumps(common)
