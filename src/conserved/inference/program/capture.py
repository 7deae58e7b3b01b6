"""Capture: one forward pass is run under a recorder, which makes a program of it.

Nothing is compiled: control flow runs as Python, so whatever PyTorch can run can be captured, on real tensors or on the
meta device.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from conserved._torch_compat import AutogradFunctionBase, without_mkldnn
from conserved.inference.program.captured_program import AUTOGRAD, CapturedProgram
from conserved.inference.program.control_flow import (
    control_flow_as_python,
    run_again_if_compiler_loads,
    without_compiler,
)
from conserved.inference.program.gradient_accumulators import has_node_hooks
from conserved.inference.program.hidden_inputs import HiddenInputs
from conserved.inference.program.objective import loss_outputs
from conserved.inference.program.program_state import CHECKING
from conserved.inference.program.recorder import Recorder
from conserved.inference.program.undisturbed import restored, undisturbed
from conserved.inference.program.value_reads import ReadsAndHooks


def capture(
    run: Callable[[], Any],
    parameters: Mapping[str, Tensor],
    model: nn.Module | None = None,
    stand_ins: Mapping[str, Callable[..., Any]] | None = None,
    *,
    buffers: Sequence[tuple[Tensor, Tensor]] | None = None,
    replaced: Sequence[Tensor] = (),
) -> CapturedProgram:
    """Return the operations of `run()`; what it returns, in any nesting, are the outputs of the program.

    Args:
        run: the program.
        parameters: the parameters by name.
        model: the module whose buffers are constants and whose submodules give operations their names.
        stand_ins: functions to run and follow in place of the operations of these names.
        buffers: the tensors that stand for the model's buffers in this run, each with the buffer itself.
        replaced: those of them in whose place `run()` put others; filled while it runs.
    """
    if buffers is None:
        buffers = [(buffer, buffer) for buffer in model.buffers()] if model is not None else []
    once = partial(_capture, run, parameters, model, stand_ins, buffers, replaced)
    return run_again_if_compiler_loads(once)


def _capture(
    run: Callable[[], Any],
    parameters: Mapping[str, Tensor],
    model: nn.Module | None,
    stand_ins: Mapping[str, Callable[..., Any]] | None,
    buffers: Sequence[tuple[Tensor, Tensor]],
    replaced: Sequence[Tensor],
) -> CapturedProgram:
    recorder = Recorder(parameters, buffers, stand_ins)
    hidden = HiddenInputs(run, model)
    with (
        undisturbed(model) as changed,
        torch.enable_grad(),
        sdpa_kernel(SDPBackend.MATH),
        without_mkldnn(),
        _watched(recorder, model),
        restored(recorder.rewritten),
        recorder,
        ReadsAndHooks(recorder),
        without_compiler(),
        hidden,
    ):
        result = run()
    recorder.confirm_messages()
    recorder.forget_state([*changed, *replaced])
    outputs = loss_outputs(result)
    if hidden.names and not recorder.program.communicates:
        # A first call imports modules and fills caches; in another process' company none may be made for that.
        recorder.program.hidden = _hidden_inputs(run, model)
    recorder.program.outputs = [recorder.value_of(leaf) for leaf in outputs]
    recorder.program.hooked_nodes = has_node_hooks(outputs)
    return recorder.program


def _hidden_inputs(run: Callable[[], Any], model: nn.Module | None) -> list[str]:
    """Return what a further call of a program reads or changes beside its tensors; caches are filled by then."""
    hidden = HiddenInputs(run, model)
    token = CHECKING.set(True)
    try:
        with (
            undisturbed(model),
            torch.enable_grad(),
            sdpa_kernel(SDPBackend.MATH),
            without_mkldnn(),
            control_flow_as_python(),
            hidden,
        ):
            run()
    finally:
        CHECKING.reset(token)
    return hidden.names


@contextlib.contextmanager
def _watched(recorder: Recorder, model: nn.Module | None) -> Iterator[None]:
    """Record names of modules while they run, and the autograd functions that run inside them."""
    paths = {id(module): path for path, module in model.named_modules()} if model is not None else {}

    def enter(module: nn.Module, *_: Any) -> None:
        recorder.modules.append(paths.get(id(module), recorder.modules[-1] if recorder.modules else ""))

    def leave(module: nn.Module, *_: Any) -> None:
        if recorder.modules:
            recorder.modules.pop()

    hooks = [
        torch.nn.modules.module.register_module_forward_pre_hook(enter),
        torch.nn.modules.module.register_module_forward_hook(leave, always_call=True),
    ]
    # Beneath the public `apply`, which programs may have bound long ago: op = MyFunction.apply.
    # No mode of PyTorch sees an autograd function being applied, so its base class is changed for this while.
    base: Any = AutogradFunctionBase
    former = inspect.getattr_static(base, "apply")
    nested = "apply" in vars(base)

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if (other := recorder.stand_ins.get(f"{AUTOGRAD}{cls.__name__}")) is not None:
            return other(*args, **kwargs)
        before = len(recorder.program.operations)
        recorder.custom.append(recorder.function_name(cls))
        try:
            out = former.__get__(None, cls)(*args, **kwargs)
        finally:
            recorder.custom.pop()
        recorder.note_foreign_results(cls.__name__, (args, kwargs), out, before)
        return out

    base.apply = classmethod(apply)
    try:
        yield
    finally:
        if nested:
            base.apply = former
        else:
            del base.apply
        for hook in hooks:
            hook.remove()
