"""How a call of a module, a closure or a function of parameters is followed, with values or on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from conserved._torch_compat import tree_map_only
from conserved.inference.examples import NoExampleError, example_inputs
from conserved.inference.processes.single_process import runs_on_several, single_process_copy
from conserved.inference.program.capture import capture
from conserved.inference.program.captured_program import CapturedProgram
from conserved.inference.program.gradient_accumulators import held_elsewhere
from conserved.inference.program.materialised_models import draw_values, is_sharded, materialize
from conserved.inference.validation.program_check import ProgramRun
from conserved.laws.renaming import unwrap
from conserved.laws.shared_memory import shared_among
from conserved.layout import named_parameters_of

Inputs = tuple[Any, Any]
"""Positional and keyword arguments of a call."""


_HELD = "a graph, a hook or a wrapper holds on to gradients of the parameters, so they are not moved"


LARGE = 100_000_000
"""Models with more parameters than this are followed on the meta device, where nothing is computed."""


def follow_call(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[CapturedProgram, Mapping[str, Tensor], ProgramRun]:
    """Return the program of a call, the parameters that are trained, and how it is run again."""
    if isinstance(model, nn.Module):
        return _module(model, args, kwargs)
    if not callable(model):
        raise TypeError(
            f"Expected a module or a function, got {type(model).__name__}. Pass the model, or a closure and the model."
        )
    if args and isinstance(args[0], nn.Module):
        module, parameters = args[0], _parameters(args[0])
        program = capture(lambda: model(*args[1:], **kwargs), parameters, module)
        run = ProgramRun(
            call=lambda inputs: model(*inputs[0], **inputs[1]),
            inputs=(args[1:], kwargs),
            parameters=parameters,
            buffers=tuple(module.buffers()),
            refused=_HELD if held_elsewhere(parameters.values()) else "",
        )
        return program, parameters, run
    if args and isinstance(args[0], Mapping):
        tensors = {str(name): value for name, value in args[0].items()}
        trained = {
            name: value.detach().requires_grad_() if value.is_floating_point() or value.is_complex() else value
            for name, value in tensors.items()
        }
        run = ProgramRun(
            call=lambda inputs: model(trained, *inputs[0], **inputs[1]), inputs=(args[1:], kwargs), parameters=trained
        )
        return capture(lambda: model(trained, *args[1:], **kwargs), trained), tensors, run
    raise TypeError(
        "Expected recognize(closure, model) or recognize(f, parameters, *inputs), got a function with other "
        "arguments. Pass the parameters as a dictionary of tensors."
    )


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return named_parameters_of(model)


def _module(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[CapturedProgram, Mapping[str, Tensor], ProgramRun]:
    parameters = _parameters(model)
    inner, prefix = unwrap(model, same_outputs=True)
    if runs_on_several(inner) or any(map(is_sharded, parameters.values())):
        # Also where a loop distributes parameters by itself: what is followed is given tensors of its own.
        inner = single_process_copy(inner)
    try:
        program, inputs = _call(inner, prefix, parameters, args, kwargs)
        return program, parameters, _run_again(inner, prefix, inputs)
    except Exception:
        # Without values a program that decides by them cannot be followed: a loop over the experts that were chosen.
        blank = any(parameter.is_meta or is_sharded(parameter) for parameter in parameters.values())
        if not blank or sum(parameter.numel() for parameter in parameters.values()) > LARGE:
            raise
        twin = materialize(inner)
        if twin is None:
            raise
        given = {prefix + name: parameter for name, parameter in twin.named_parameters()}
        args, kwargs = tree_map_only(Tensor, _plain, (args, kwargs))
        program, inputs = _call(twin, prefix, given, args, kwargs)
        return program, parameters, _run_again(twin, prefix, inputs)


def _plain(tensor: Tensor) -> Tensor:
    """Return an input as a single process receives it; a sharded tensor is made up as a whole tensor."""
    return draw_values(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") if is_sharded(tensor) else tensor)


def _run_again(model: nn.Module, prefix: str, inputs: Inputs) -> ProgramRun:
    """Return a call of a module, to be made again: on a copy where a graph or a wrapper depends on its parameters."""
    refused = ""
    if held_elsewhere(model.parameters()):
        try:
            model = copy.deepcopy(model)
        except Exception:
            # User modules may refuse to be copied in any way they like.
            refused = _HELD
    return ProgramRun(
        call=lambda given: model(*given[0], **given[1]),
        inputs=inputs,
        parameters={prefix + name: parameter for name, parameter in model.named_parameters()},
        buffers=tuple(model.buffers()),
        refused=refused,
    )


def _call(
    model: nn.Module, prefix: str, parameters: Mapping[str, Tensor], args: Any, kwargs: Any
) -> tuple[CapturedProgram, Inputs]:
    if not args and not kwargs:
        return _with_examples(model, prefix, parameters)
    return _run(model, prefix, parameters, args, kwargs), (args, kwargs)


def _with_examples(model: nn.Module, prefix: str, parameters: Mapping[str, Tensor]) -> tuple[CapturedProgram, Inputs]:
    problem: Exception | None = None
    for args, kwargs in example_inputs(model):
        try:
            return _run(model, prefix, parameters, args, kwargs), (args, kwargs)
        except (
            RuntimeError,
            ValueError,
            TypeError,
            IndexError,
            AssertionError,
            NotImplementedError,
            KeyError,
            AttributeError,
        ) as error:
            problem = problem or error
    reason = (
        f" ({type(problem).__name__}: {str(problem).splitlines()[0]})" if problem is not None and str(problem) else ""
    )
    raise NoExampleError(
        f"Expected example inputs, got none, and how {type(model).__name__} is called cannot be guessed{reason}. "
        "Call recognize(model, x)."
    )


def _run(model: nn.Module, prefix: str, parameters: Mapping[str, Tensor], args: Any, kwargs: Any) -> CapturedProgram:
    """Follow one call: on the meta device if the weights are there, sharded or large, or memory is short."""
    total = sum(parameter.numel() for parameter in parameters.values())
    sharded = any(map(is_sharded, parameters.values()))
    on_meta = any(parameter.is_meta for parameter in parameters.values())
    if on_meta or sharded or total > LARGE:
        try:
            return _on_meta(model, prefix, parameters, args, kwargs)
        except Exception:
            if on_meta or sharded:
                raise
    own_parameters = {name: parameters[prefix + name] for name, _ in model.named_parameters()}
    try:
        return capture(lambda: model(*args, **kwargs), {prefix + name: p for name, p in own_parameters.items()}, model)
    except torch.OutOfMemoryError:  # attention is followed with all its scores, which a fused kernel never keeps
        return _on_meta(model, prefix, parameters, args, kwargs)


def _on_meta(
    model: nn.Module, prefix: str, parameters: Mapping[str, Tensor], args: Any, kwargs: Any
) -> CapturedProgram:
    """Follow a call without values: parameters and inputs have shapes only; buffers keep the values they have."""

    def blank(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    named_parameters = {
        name: blank(parameter).requires_grad_(parameter.requires_grad) for name, parameter in model.named_parameters()
    }
    tied = {id(parameter): named_parameters[name] for name, parameter in model.named_parameters()}
    everything = {name: tied[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    buffers = {name: (blank(buffer), buffer) for name, buffer in model.named_buffers()}
    stand_ins = {name: stand_in for name, (stand_in, _) in buffers.items()}
    args, kwargs = tree_map_only(Tensor, lambda t: t if t.is_meta else blank(t), (args, kwargs))
    replaced: list[Tensor] = []

    def note_replaced(*_: Any) -> None:
        here = dict(model.named_buffers())
        replaced.extend(stand_in for name, stand_in in stand_ins.items() if here.get(name) is not stand_in)

    hook = model.register_forward_hook(note_replaced, always_call=True)
    try:
        with torch.device("meta"):
            program = capture(
                lambda: functional_call(model, {**everything, **stand_ins}, args, kwargs, tie_weights=False),
                {prefix + name: value for name, value in named_parameters.items()},
                model,
                buffers=list(buffers.values()),
                replaced=replaced,
            )
    finally:
        hook.remove()
    program.tensors, program.shared = parameters, shared_among(parameters)
    return program
