"""The parts of a model that is in use: its modules, parameters and state, read again quickly where nothing changed."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress, repeat
from operator import attrgetter, call, is_not, itemgetter

import torch
from torch import Tensor, nn

from conserved.inference.cached_laws import cached_laws_of
from conserved.layout import has_flat_shards, named_parameters_of


@dataclass(frozen=True, slots=True, eq=False)
class ModelParts:
    """A model's parameters as they are now."""

    model: nn.Module
    parameters: tuple[nn.Parameter, ...]
    """Wherever a module has one: those that are shared, several times."""
    state: Hashable
    """The state that the laws of the model depend on besides its code, and the names of its parameters."""
    named: dict[str, Tensor]
    """Every parameter by its first name, filled in when names are asked for and kept while the model stays the same."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelWalk:
    """The modules of a model, to be visited again without looking for them: those that hold parts are distinguished."""

    modules: tuple[weakref.ref[nn.Module], ...]
    """Weakly: a module that was taken out of the model is not kept by it."""
    parents: tuple[int, ...]
    """Places of the modules that have modules inside."""
    owners: tuple[int, ...]
    """Places of the modules that have parameters of their own."""
    parameters: tuple[nn.Parameter, ...]
    """While they are held no other gets the identity of one of them."""
    state: Hashable
    named: dict[str, Tensor]

    def again(self, model: nn.Module) -> ModelParts | None:
        """Return the parts of the model if it is still made of the same; None otherwise."""
        modules = [*map(call, self.modules)]
        try:
            state = _state(modules, self.parents, self.owners)[1]
        except AttributeError:
            # A module that is gone has no parts.
            return None
        return ModelParts(model, self.parameters, self.state, self.named) if state == self.state else None


def parts_of(model: nn.Module) -> ModelParts:
    """Return the parts of a model. Every step asks, so an unchanged model is recognised without a loop."""
    if isinstance(model, torch.jit.ScriptModule):
        # A scripted module keeps what it is made of outside of Python.
        return _scripted_parts(model)
    stored = cached_laws_of(model)
    former: ModelWalk | None = stored.walk
    parts = None if former is None else former.again(model)
    if parts is not None:
        return parts
    modules = {id(model): model}
    level = [model]
    while level:
        below = chain.from_iterable(map(dict.values, map(attrgetter("_modules"), level)))
        inside = {id(module): module for module in below if module is not None}
        level = [module for key, module in inside.items() if key not in modules]
        modules |= inside
    every = [*modules.values()]
    parents, owners = (
        tuple(index for index, module in enumerate(every) if getattr(module, part))
        for part in ("_modules", "_parameters")
    )
    parameters, state = _state(every, parents, owners)
    walk = stored.walk = ModelWalk((*map(weakref.ref, every),), parents, owners, parameters, state, {})
    return ModelParts(model, parameters, state, walk.named)


def _scripted_parts(model: nn.Module) -> ModelParts:
    parameters = tuple(model.parameters())
    state = (*map(id, parameters), *(p.requires_grad for p in parameters), model.training)
    return ModelParts(model, parameters, state, dict(model.named_parameters()))


def _state(
    modules: Sequence[nn.Module | None], parents: Sequence[int], owners: Sequence[int]
) -> tuple[tuple[nn.Parameter, ...], Hashable]:
    """Return all parameters of modules, and what changes if the model does.

    The others have no modules, or no parameters.
    """
    attributes = [*map(attrgetter("__dict__"), modules)]
    inside, own = ([*map(itemgetter(part), attributes)] for part in ("_modules", "_parameters"))
    holding, owning = [*map(inside.__getitem__, parents)], [*map(own.__getitem__, owners)]
    placed = [*chain.from_iterable(map(dict.values, owning))]
    parameters = (*compress(placed, map(is_not, placed, repeat(None))),)
    # Few models have a module with a `forward` that is not its class's.
    replaced = any(map(dict.__contains__, attributes, repeat("forward")))
    state = (
        # How many each has tells apart what one module has last from what the next one has first.
        (*map(len, inside),),
        (*map(len, own),),
        (*chain.from_iterable(holding),),
        (*map(id, chain.from_iterable(map(dict.values, holding))),),
        (*map(type, modules),),
        (*map(attrgetter("training"), modules),),
        (*map(id, map(dict.get, attributes, repeat("forward"))),) if replaced else (),
        (*chain.from_iterable(owning),),
        (*map(id, placed),),
        (*map(attrgetter("requires_grad"), parameters),),
    )
    return parameters, state


def parameters_of(parts: ModelParts) -> Mapping[str, Tensor]:
    """Return every parameter once, by its first name; the same mapping as long as the model stays the same."""
    if not parts.named:
        named = named_parameters_of(parts.model)
        if not has_flat_shards(parts.model) and not {*map(id, parts.parameters)} >= {*map(id, named.values())}:
            # A wrapper that makes them when they are asked for.
            return named
        parts.named.update(named)
    return parts.named
