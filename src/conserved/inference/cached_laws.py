"""Laws that were inferred for a model, stored on the model itself as long as it stays the same."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from conserved.inference.examples import ModelCall
from conserved.inference.processes.shared_values import Holding
from conserved.laws import LawSet
from conserved.layout.flat_shards import forget_flat_shards


@dataclass(frozen=True, slots=True)
class InferredLaws:
    """Laws with the state of the model that they were inferred for."""

    state: Hashable
    laws: LawSet


class PendingCall(Protocol):
    """An object that records the inputs of a model's first call."""

    @property
    def call(self) -> ModelCall | None:
        """The inputs, once they have come."""
        ...


class CachedLaws:
    """Laws and parts of a model, cached in the model itself, so that both live equally long."""

    def __init__(self, model: nn.Module) -> None:
        self.owner = weakref.ref(model)
        self.waiting: PendingCall | None = None
        """The object that records the inputs of the model's first call."""
        self.laws: dict[str, InferredLaws] = {}
        """The laws, by the loss for which they were inferred."""
        self.walk: Any = None
        """The last traversal of the model's modules and parameters, as `model_parts` keeps it."""
        self.audited: Any = None
        """The laws it was last audited with, as `auditing` keeps them."""
        self.layout: Any = None
        """Where the pieces of its parameters are, and how its laws are put together from them."""
        self.holdings: Mapping[str, Holding] = {}
        """How processes hold its parameters, where only their values say so."""
        self.shared: frozenset[str] = frozenset()
        """Parameters that another model on another process holds as well, as stages of a pipeline share a table."""
        self.wrapper: weakref.ref[nn.Module] | None = None
        """The module around it that is called in training."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Forget everything in copies and pickles of the model; `torch.load` trusts stored attributes."""
        return OrderedDict, ()


_ATTRIBUTE = "_kept_by_conserved"


def cached_laws_of(model: nn.Module) -> CachedLaws:
    """Return the cached laws of a model. A copy that shares attributes of another model has its own cache."""
    state = model.__dict__.get(_ATTRIBUTE)
    if not isinstance(state, CachedLaws) or state.owner() is not model:
        state = model.__dict__[_ATTRIBUTE] = CachedLaws(model)
    return state


def forget_model(model: nn.Module) -> None:
    """Remove the cached laws of a model."""
    model.__dict__.pop(_ATTRIBUTE, None)
    forget_flat_shards(model)
