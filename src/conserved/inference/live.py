"""The laws of a model that is being used: inferred once, from the first inputs that come, and kept as long as the
model stays the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes
from torch.utils._pytree import tree_map_only

from conserved.inference.capture import Recorder
from conserved.inference.examples import Call, NoExample
from conserved.inference.infer import recognize
from conserved.laws import LawSet


def being_followed() -> bool:
    """Whether the forward pass that runs now is one that laws are read off, and not one of training."""
    return any(isinstance(mode, Recorder) for mode in dispatch_modes())


class FirstCall:
    """Remembers the arguments of a model's next call, and infers the laws from them when asked.

    The hook goes on the module that is called, which may be a wrapper (compiled, data parallel) around the one whose
    laws are wanted. It is gone after one call, and what it remembered is forgotten once the laws are known.
    """

    def __init__(self, called: nn.Module, model: nn.Module | None = None, *, loss: str = "any") -> None:
        """`called` is the module that will be called, `model` the one inside it whose laws are wanted, if another."""
        self.model = called if model is None else model
        self.loss = loss
        self.call: Call | None = None
        self.came: list[Callable[[], None]] = []
        """Functions to call, without arguments, as soon as inputs have come."""
        self._handle = called.register_forward_pre_hook(self, with_kwargs=True, prepend=True)
        _WAITING[self.model] = self

    def laws(self) -> LawSet:
        """The laws, from the inputs that came; from made-up ones if none came yet and the model tells them."""
        return laws_of_model(self.model, loss=self.loss, call=self.call)

    def __enter__(self) -> FirstCall:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the hook away and forget the inputs."""
        self._handle.remove()
        self.call = None
        self.came.clear()
        if _WAITING.get(self.model) is self:
            del _WAITING[self.model]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The hook; calls without gradients, or made to infer laws, are not those of training."""
        run_as_written()
        if not torch.is_grad_enabled() or being_followed():
            return
        self._handle.remove()
        self.call = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        for function in list(self.came):
            function()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies of the model, and files it is saved in, get a hook that does nothing."""
        return _idle, ()


def run_as_written() -> None:
    """At the beginning of a hook: torch.compile leaves it out of what it compiles.

    Its decorator `torch.compiler.disable` does the same and imports the compiler, which takes seconds.
    """
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break()


def _idle() -> Callable[..., None]:
    return _nothing


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _nothing(*_: Any) -> None:
    """A hook that does nothing."""


@dataclass(frozen=True, slots=True)
class _Known:
    state: Hashable
    laws: LawSet


_WAITING: weakref.WeakKeyDictionary[nn.Module, FirstCall] = weakref.WeakKeyDictionary()
_KNOWN: weakref.WeakKeyDictionary[nn.Module, dict[str, _Known]] = weakref.WeakKeyDictionary()


def known_laws(model: nn.Module, *, loss: str = "any") -> LawSet | None:
    """The laws of a model as it is now, if they were inferred before."""
    kept = _KNOWN.get(model, {}).get("any" if loss == "regression" else loss)
    return kept.laws if kept is not None and kept.state == _state(parts_of(model)) else None


def laws_of_model(
    model: nn.Module, *, loss: str = "any", call: Call | None = None, parts: Parts | None = None
) -> LawSet:
    """The laws of a model, inferred once and kept with it.

    They are inferred again when parameters were added, removed, replaced, tied, frozen or unfrozen, when a part
    changed between training and evaluation, and when a module got another `forward`.

    Args:
        model: any module.
        loss: as for `recognize`.
        call: arguments to follow it with. Without them, those that a `FirstCall` on the model has seen; otherwise
            inputs are made up where the model says how it is called.
        parts: what `parts_of` lists of the model, where that is known.

    """
    word = "any" if loss == "regression" else loss
    state = _state(parts or parts_of(model))
    kept = _KNOWN.setdefault(model, {})
    if word in kept and kept[word].state == state:
        return kept[word].laws
    waiting = _WAITING.get(model)
    call = waiting.call if call is None and waiting is not None else call
    args, kwargs = call or ((), {})
    try:
        # The model may be called within hooks on what autograd saves, such as those of checkpointing, which count.
        with saved_tensors_hooks(Tensor.detach, _same):
            found = recognize(model, *args, loss=loss, **kwargs)
    except NoExample as problem:
        raise NoExample(
            f"The laws of this {type(model).__name__} cannot be inferred without knowing how it is called; "
            "pass laws=conserved.recognize(model, x) with an example input x."
        ) from problem
    kept[word] = _Known(state, found)
    return found


def _state(parts: Parts) -> Hashable:
    """What the laws of a model depend on besides its code. Kept laws hold the parameters, so that no identity is used
    twice.
    """
    parameters, modules = parts
    return (
        tuple((name, id(parameter), parameter.requires_grad) for name, parameter in parameters),
        tuple((type(module), module.training, id(vars(module).get("forward"))) for module in modules),
    )


Parts = tuple[list[tuple[str, nn.Parameter]], list[nn.Module]]


def parts_of(model: nn.Module) -> Parts:
    """Parameters under every name and modules, each module once: what torch lists in several slow passes, in one."""
    parameters: list[tuple[str, nn.Parameter]] = []
    modules: list[nn.Module] = []
    seen: set[int] = set()
    waiting: list[tuple[str, nn.Module]] = [("", model)]
    while waiting:
        prefix, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        modules.append(module)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                parameters.append((prefix + name, parameter))
        children = module._modules
        if children:
            # The last one to wait is the next.
            below = [(f"{prefix}{name}.", child) for name, child in children.items() if child is not None]
            waiting += reversed(below)
    if type(model).named_parameters is not nn.Module.named_parameters:
        # A wrapper that has other names for them.
        parameters = list(model.named_parameters(remove_duplicate=False))
    return parameters, modules


def parameters_of(model: nn.Module, parts: Parts | None = None) -> dict[str, nn.Parameter]:
    """Every parameter once, by its first name."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in (parts or parts_of(model))[0]:
        found.setdefault(id(parameter), (name, parameter))
    return dict(found.values())
