"""The first call of a model after it was wrapped or watched: its arguments, from which laws are inferred."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from conserved._torch_compat import children_of, in_function_transform, tree_leaves, tree_map_only
from conserved.boundary import LAWS, guarded
from conserved.inference.cached_laws import cached_laws_of
from conserved.inference.examples import ModelCall
from conserved.inference.live import being_followed, laws_of_model
from conserved.laws import LawSet
from conserved.laws.renaming import rename


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
