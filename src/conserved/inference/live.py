"""The laws of a model that is being used: inferred once, from the first inputs that come, and kept as long as the
model stays the same.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress, repeat
from operator import attrgetter, call, is_not, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from conserved._torch_compat import children_of, dispatch_modes, in_function_transform, tree_leaves, tree_map_only
from conserved.boundary import LAWS, guarded
from conserved.inference.examples import ModelCall, NoExampleError
from conserved.inference.infer import recognize
from conserved.inference.processes.local_laws import laws_of_one_process
from conserved.inference.processes.shared_values import Holding
from conserved.inference.program.program_state import CHECKING, preserve_state
from conserved.inference.program.recorder import Recorder
from conserved.laws import LawSet
from conserved.laws.renaming import rename
from conserved.layout import has_flat_shards, named_parameters_of
from conserved.layout.flat_shards import forget_flat_shards


def being_followed() -> bool:
    """Return whether the current forward pass runs to infer laws and not to train."""
    return CHECKING.get() or any(isinstance(mode, Recorder) for mode in dispatch_modes())


class FirstCall:
    """Remembers the arguments of a model's next call, and infers the laws from them when asked.

    The hook goes on the module that is called, which may be a wrapper (compiled, data parallel) around the one whose
    laws are wanted. It is gone after one call, and the arguments are forgotten once the laws are known.
    """

    def __init__(self, called: nn.Module, model: nn.Module | None = None, *, loss: str = "any") -> None:
        """Add the hook to a module; `close` removes it.

        Args:
            called: the module that will be called.
            model: the module inside it whose laws are wanted, if that is another.
            loss: the loss for which laws are inferred, as for `recognize`.
        """
        wanted = called if model is None else model
        # Weak reference, to avoid a cycle through the model.
        self._model = weakref.ref(wanted)
        self.loss = loss
        self.call: ModelCall | None = None
        self.callbacks: list[Callable[[], None]] = []
        """Functions to call, without arguments, as soon as inputs have come."""
        self._hook = guarded(self, stage=LAWS)
        self._handle = called.register_forward_pre_hook(self._hook, with_kwargs=True, prepend=True)
        self._undo: list[Callable[[], None]] = []
        self._elsewhere = self._searched = False
        self._called = weakref.ref(called)
        cached_laws_of(wanted).waiting = self
        self.listen_to_compiled(called)

    @property
    def model(self) -> nn.Module:
        """The module whose laws are inferred."""
        result = self._model()
        if result is None:
            raise ReferenceError("The model whose first call was waited for is gone.")
        return result

    def laws(self) -> LawSet:
        """Return the laws, from the recorded inputs, or from inputs made up for the model if none were recorded."""
        return laws_of_model(self.model, loss=self.loss, call=self.call)

    def __enter__(self) -> FirstCall:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the hook and release the inputs."""
        self._stop()
        self.call = None
        self.callbacks.clear()
        model = self._model()
        if model is not None and cached_laws_of(model).waiting is self:
            cached_laws_of(model).waiting = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a call of the model; skip calls without gradients and those made to infer laws."""
        if not torch.is_grad_enabled() or being_followed() or in_function_transform():
            return
        self._stop()
        if any(isinstance(leaf, Iterator) for leaf in tree_leaves((args, kwargs))):
            raise TypeError(
                "Expected tensors as inputs, got an iterator, which reading the laws would use up. Pass "
                "laws=conserved.recognize(model, x)."
            )
        self.call = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        for function in list(self.callbacks):
            function()

    def _stop(self) -> None:
        """Remove all hooks from the modules."""
        self._handle.remove()
        while self._undo:
            self._undo.pop()()

    def look_for_compiled(self) -> None:
        """Listen to a compiled form of the module that was made after this: its calls do not run the hook.

        `model.compile()` keeps that form in the module, `torch.compile(model)` returns a module around it. The latter
        is looked for among all objects, once, as that takes a tenth of a second.
        """
        called = self._called()
        if called is None or self.call is not None or "torch._dynamo" not in sys.modules:
            return
        self.listen_to_compiled(called)
        if self._searched:
            return
        self._searched = True
        for wrapper in gc.get_objects():
            if type(wrapper).__name__ == "OptimizedModule" and children_of(wrapper).get("_orig_mod") is called:
                self._undo.append(wrapper.register_forward_pre_hook(self._hook, with_kwargs=True, prepend=True).remove)

    @property
    def listens_elsewhere(self) -> bool:
        """Whether it waits, or waited, for a call of a compiled form of the module."""
        return self._elsewhere

    def listen_to_compiled(self, called: nn.Module) -> None:
        """Record the next call of a module that was compiled in place and runs no hooks outside its compiled code."""
        compiled = called._compiled_call_impl
        if compiled is None or self._undo:
            return
        hook, undo = self._hook, partial(setattr, called, "_compiled_call_impl", compiled)

        def once(*args: Any, **kwargs: Any) -> Any:
            hook(called, args, kwargs)
            return compiled(*args, **kwargs)

        called._compiled_call_impl = once
        self._undo.append(undo)
        self._elsewhere = True


def in_parts(model: nn.Module) -> bool:
    """Return whether a model is a list of modules that are called by themselves, as the stages of a pipeline are."""
    return isinstance(model, nn.ModuleList | nn.ModuleDict)


class FirstCallsOfParts(FirstCall):
    """Remembers the first call of every part of a model, and infers the laws of all parts once each was called."""

    def __init__(self, called: nn.Module, model: nn.Module | None = None, *, loss: str = "any") -> None:
        """Add a hook to every part; `close` removes them.

        Args:
            called: a list or dictionary of modules.
            model: the same.
            loss: the loss for which laws are inferred, as for `recognize`.
        """
        super().__init__(called, model, loss=loss)
        trained = {
            name: part
            for name, part in called.named_children()
            if any(parameter.requires_grad for parameter in part.parameters())
        }
        self._parts = {name: FirstCall(part, loss=loss) for name, part in trained.items()}
        for part in self._parts.values():
            part.callbacks.append(self._note_call)

    def laws(self) -> LawSet:
        """Return the laws of all parts, each under the name of its part."""
        several = [rename(part.laws(), f"{name}.{{}}".format, block=f"{name}.") for name, part in self._parts.items()]
        return LawSet(
            symmetries=tuple(symmetry for laws in several for symmetry in laws),
            parameters=dict(self.model.named_parameters()),
            dropped=tuple(dropped for laws in several for dropped in laws.dropped),
            unknown={name: count for laws in several for name, count in laws.unknown.items()},
        )

    def close(self) -> None:
        """Remove the hooks and release the inputs."""
        super().close()
        for part in self._parts.values():
            part.close()

    def _note_call(self) -> None:
        if all(part.call is not None for part in self._parts.values()):
            for function in list(self.callbacks):
                function()


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, slots=True)
class _Known:
    state: Hashable
    laws: LawSet


class CachedLaws:
    """Laws and parts of a model, cached in the model itself, so that both live equally long."""

    def __init__(self, model: nn.Module) -> None:
        self.owner = weakref.ref(model)
        self.waiting: FirstCall | None = None
        """The object that records the inputs of the model's first call."""
        self.laws: dict[str, _Known] = {}
        """The laws, by the loss for which they were inferred."""
        self.walk: _Walk | None = None
        """The last traversal of the model's modules and parameters."""
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


_PLACE = "_kept_by_conserved"


def cached_laws_of(model: nn.Module) -> CachedLaws:
    """Return the cached laws of a model. A copy that shares attributes of another model has its own cache."""
    state = model.__dict__.get(_PLACE)
    if not isinstance(state, CachedLaws) or state.owner() is not model:
        state = model.__dict__[_PLACE] = CachedLaws(model)
    return state


def forget_model(model: nn.Module) -> None:
    """Remove the cached laws of a model."""
    model.__dict__.pop(_PLACE, None)
    forget_flat_shards(model)


def known_laws(model: nn.Module, *, loss: str = "any") -> LawSet | None:
    """Return the laws of a model as it is now, if they were inferred before; nothing is inferred.

    Args:
        model: any module.
        loss: the loss they were inferred for, as for `recognize`.

    Returns:
        The laws, or None if they were not inferred or the model has changed since.
    """
    laws = cached_laws_of(model).laws.get("any" if loss == "regression" else loss)
    return laws.laws if laws is not None and laws.state == parts_of(model).state else None


def laws_of_model(
    model: nn.Module, *, loss: str = "any", call: ModelCall | None = None, parts: ModelParts | None = None
) -> LawSet:
    """Return the laws of a model, inferred once and kept with it.

    They are inferred again when parameters were added, removed, replaced, tied, frozen or unfrozen, when a part changed
    between training and evaluation, and when a module got another `forward`.

    Args:
        model: any module.
        loss: as for `recognize`.
        call: positional and keyword arguments to follow the model with. By default the inputs that a `FirstCall` on the
            model has seen; otherwise inputs are made up where the model says how it is called.
        parts: the result of `parts_of(model)`, where that is known.

    Returns:
        The laws, the same object as long as the model stays the same.

    Raises:
        NoExampleError: there are no inputs, and the model does not say how it is called.
    """
    word = "any" if loss == "regression" else loss
    state = (parts or parts_of(model)).state
    stored = cached_laws_of(model).laws
    if word in stored and stored[word].state == state:
        return stored[word].laws
    waiting = cached_laws_of(model).waiting
    call = waiting.call if call is None and waiting is not None else call
    args, kwargs = call or ((), {})
    try:
        # The model may be called within hooks on what autograd saves, such as those of checkpointing, which count.
        with saved_tensors_hooks(Tensor.detach, _same), _as_written(), preserve_state(model):
            laws, cached_laws_of(model).holdings = laws_of_one_process(
                recognize(model, *args, loss=loss, **kwargs), model
            )
    except NoExampleError as problem:
        raise NoExampleError(
            f"Expected laws or a first call, got neither for {type(model).__name__}. Pass "
            "laws=conserved.recognize(model, x) with an example input x."
        ) from problem
    stored[word] = _Known(state, laws)
    return laws


def _as_written() -> AbstractContextManager[Any]:
    """Run compiled parts of a model eagerly, so that their operations can be traced."""
    # Asking for a stance imports the compiler, which takes seconds; without it nothing is compiled.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@dataclass(frozen=True, slots=True, eq=False)
class ModelParts:
    """A model's parameters as they are now."""

    model: nn.Module
    parameters: tuple[nn.Parameter, ...]
    """Wherever a module has one: those that are shared, several times."""
    state: Hashable
    """The state that the laws of the model depend on besides its code, and the names of its parameters."""
    named: dict[str, nn.Parameter]
    """Every parameter by its first name, filled in when names are asked for and kept while the model stays the same."""


@dataclass(frozen=True, slots=True, eq=False)
class _Walk:
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
    named: dict[str, nn.Parameter]

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
    parts = None if stored.walk is None else stored.walk.again(model)
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
    walk = stored.walk = _Walk((*map(weakref.ref, every),), parents, owners, parameters, state, {})
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


def parameters_of(parts: ModelParts) -> Mapping[str, nn.Parameter]:
    """Return every parameter once, by its first name; the same mapping as long as the model stays the same."""
    if not parts.named:
        named = named_parameters_of(parts.model)
        if not has_flat_shards(parts.model) and not {*map(id, parts.parameters)} >= {*map(id, named.values())}:
            # A wrapper that makes them when they are asked for.
            return named
        parts.named.update(named)
    return parts.named
