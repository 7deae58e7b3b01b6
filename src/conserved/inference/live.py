"""The laws of a model that is being used: inferred once, from the first inputs that come, and kept as long as the
model stays the same.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from conserved._torch_compat import dispatch_modes
from conserved.inference.cached_laws import InferredLaws, cached_laws_of
from conserved.inference.examples import ModelCall, NoExampleError
from conserved.inference.infer import recognize
from conserved.inference.model_parts import ModelParts, parts_of
from conserved.inference.processes.local_laws import laws_of_one_process
from conserved.inference.program.program_state import CHECKING, preserve_state
from conserved.inference.program.recorder import Recorder
from conserved.laws import LawSet


def being_followed() -> bool:
    """Return whether the current forward pass runs to infer laws and not to train."""
    return CHECKING.get() or any(isinstance(mode, Recorder) for mode in dispatch_modes())


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
    stored[word] = InferredLaws(state, laws)
    return laws


def _as_written() -> AbstractContextManager[Any]:
    """Run compiled parts of a model eagerly, so that their operations can be traced."""
    # Asking for a stance imports the compiler, which takes seconds; without it nothing is compiled.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _same(tensor: Tensor) -> Tensor:
    return tensor
