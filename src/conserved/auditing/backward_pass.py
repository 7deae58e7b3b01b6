"""What a backward pass left behind, and which laws of the model it can be held against."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from conserved.auditing.lookup_tables import Loses, lost, tables
from conserved.laws import Dropped, LawSet
from conserved.laws.shared_memory import overlapping, parameters_of
from conserved.symmetry import Symmetry, Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardPass:
    """What a backward pass left behind, and the laws it is held against."""

    model: nn.Module
    laws: LawSet
    points: Tensors
    slopes: Tensors | None
    """Gradients; None once they may be others than those of the pass."""
    absent: tuple[str, ...]
    """Trained parameters that have no gradient; those that laws need are taken to have a zero one."""
    dropped: tuple[Dropped, ...]
    """Laws of the architecture that this model does not keep, and why."""
    types: Mapping[str, tuple[torch.dtype, torch.dtype]]
    """The types of parameters and of their gradients, by name."""

    @staticmethod
    def of(model: nn.Module, laws: LawSet) -> BackwardPass:
        theta = parameters_of(model)
        trained = {name: p for name, p in theta.items() if p.requires_grad}
        slopes: dict[str, Tensor] = {name: p.grad for name, p in trained.items() if p.grad is not None}
        lawful, gone = _lawful(model, theta, laws)
        if trained and not slopes:
            raise ValueError(f"None of the {len(trained)} trainable parameters has a gradient. Call backward() first.")
        absent = tuple(name for name in trained if name not in slopes)
        slopes |= {name: torch.zeros_like(trained[name]) for name in lawful.plan.needs if name not in slopes}
        return BackwardPass(
            model=model,
            laws=lawful,
            points=trained,
            slopes=slopes,
            absent=absent,
            dropped=(*laws.dropped, *gone),
            types={name: (trained[name].dtype, slope.dtype) for name, slope in slopes.items()},
        )


_LAWFUL: weakref.WeakKeyDictionary[nn.Module, tuple[Hashable, LawSet, LawSet, tuple[Dropped, ...]]] = (
    weakref.WeakKeyDictionary()
)
"""For every model the laws it was last audited with, and those of them that it keeps."""


def _lawful(model: nn.Module, theta: Mapping[str, Tensor], laws: LawSet) -> tuple[LawSet, tuple[Dropped, ...]]:
    """The laws that this model keeps as it is now, and why it does not keep the others; found out once.

    A law that a frozen leg takes away is not listed; one that was frozen since is not held against anything. Nor is one
    with a parameter that shares its memory with another since: a step of that one moves it too; nor one of an embedding
    whose padding row is no longer zero.
    """
    state = tuple((name, id(p), p.requires_grad, _address(p)) for name, p in theta.items())
    known = _LAWFUL.get(model)
    if known is not None and known[0] == state and known[1] is laws:
        return known[2], known[3]
    strangers = [name for name in laws.plan.needs if name not in theta]
    if strangers:
        raise ValueError(
            f"The laws speak of {strangers[0]}, which the model does not have. "
            "Pass laws=conserved.recognize(model, x) of this model."
        )
    trained = {name: p for name, p in theta.items() if p.requires_grad}
    away = [name for name, p in trained.items() if p.is_meta]
    if away:
        raise ValueError(f"{away[0]} is on the meta device and has no gradient to audit. Load the weights first.")
    beside, looked_up = overlapping(theta), tables(model)
    gone = tuple(Dropped(s.name, reason) for s in laws if (reason := _lost(s, trained, beside, looked_up)))
    names = {item.name for item in gone}
    lawful = laws.select(lambda s: s.name not in names) if gone else laws
    _LAWFUL[model] = (state, laws, lawful, gone)
    return lawful, gone


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:
        # A wrapper around other tensors has no memory of its own.
        return 0


def _lost(
    symmetry: Symmetry, trained: Mapping[str, Tensor], beside: Mapping[str, str], looked_up: dict[str, Loses]
) -> str:
    """Why a law is one no longer; empty if it still is."""
    for name in symmetry.parameters:
        if name not in trained:
            return f"{name} is frozen, so the other legs are not balanced against it"
        if name in beside:
            return f"{name} shares memory with {beside[name]}, so that steps of one move the other"
    return lost(symmetry, looked_up)
