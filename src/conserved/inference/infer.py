"""The laws of a program, read off what it computes: capture, typing, solving, naming."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from conserved._torch_compat import tree_flatten, tree_map_only
from conserved.inference.derivation import Derivation
from conserved.inference.examples import NoExampleError, example_inputs
from conserved.inference.further_laws.dependent_inputs import dependent_inputs
from conserved.inference.further_laws.parameters_without_gradient import inert, read_in_part
from conserved.inference.further_laws.probed import with_probed
from conserved.inference.further_laws.unread_rows import over_unread_rows
from conserved.inference.processes.gathered_rows import GATHERED, assumed_atoms, laws_of_gathered_rows, occur
from conserved.inference.processes.single_process import runs_on_several, single_process_copy
from conserved.inference.program.capture import capture
from conserved.inference.program.captured_program import CapturedProgram
from conserved.inference.program.gradient_accumulators import held_elsewhere
from conserved.inference.program.materialised_models import draw_values, is_sharded, materialize
from conserved.inference.program.program_state import preserve_state
from conserved.inference.reading_progress import PROGRESS
from conserved.inference.rules import RULES, TypingRule
from conserved.inference.symmetries.assembly import Assembly
from conserved.inference.symmetries.naming import name_symmetries
from conserved.inference.typing import Typing, type_program
from conserved.inference.validation.program_check import ProgramRun, check_on_program
from conserved.laws import Dropped, LawSet
from conserved.laws.renaming import wrapped_module
from conserved.laws.shared_memory import shared_among
from conserved.layout import named_parameters_of
from conserved.layout.deepspeed import is_partitioned
from conserved.symmetry import Symmetry

Inputs = tuple[Any, Any]
"""Positional and keyword arguments of a call."""

LOSSES = ("any", "regression", "cross_entropy")

KEPT_BYTES = 64_000_000
"""Inputs up to this size are kept with the laws, to try them again with moved parameters."""

_READ_IN_PART = "this process reads only a part of it, and others may read the rest"

_HELD = "a graph, a hook or a wrapper holds on to gradients of the parameters, so they are not moved"

COMMUNICATES = "the program exchanges tensors with other processes"
"""Reasons why a program is not run again."""

LARGE = 100_000_000
"""Models with more parameters than this are followed on the meta device, where nothing is computed."""


def recognize(model: Any, *args: Any, loss: str = "any", **kwargs: Any) -> LawSet:
    """Return the conservation laws of a model, or of any program, inferred from the operations it runs.

    One forward pass is followed, and every symmetry of the parameters that the operations allow becomes a law. Nothing
    is known about architectures. Shapes and types of the inputs count; their values do not, except where a program
    branches on them.

    Args:
        model: a `torch.nn.Module`; or a function without arguments that computes the whole objective, followed by the
            module whose parameters are trained; or a function of a dictionary of parameters and inputs.
        *args: example inputs, as the model is called. Without any, inputs are made up where the model says how.
        loss: "any" lists laws that hold for every loss on the outputs; "cross_entropy" also those of a classifier's
            head, with the classes on the outputs' last axis.
        **kwargs: more example inputs, by name.

    Returns:
        A `LawSet`. `.dropped` names symmetries that are not laws and the operation that breaks each, `.unknown` the
        operations without a rule; `.explain(name)` gives the derivation of a law.

    Raises:
        ValueError: `loss` is another word.
        TypeError: `model` is neither a module nor a function as above.
        NoExampleError: there are no example inputs, and the model does not say how it is called.
    """
    if loss not in LOSSES:
        raise ValueError(f"Expected loss to be one of {', '.join(LOSSES)}, got {loss!r}. Pass one of them.")
    with preserve_state(model) if isinstance(model, nn.Module) else nullcontext():
        laws, program, run = _infer(model, args, kwargs, loss)
        PROGRESS.enter(f"checking {len(laws)} laws on the program")
        laws = check_on_program(laws, program, run, classes=_classes(loss))
    if isinstance(laws.derivation, Derivation):
        laws.derivation.program_check = laws.checked
    return laws


def recognize_unchecked(rules: Mapping[str, TypingRule], model: Any, *args: Any, **kwargs: Any) -> LawSet:
    """Infer symmetries by other typing rules, without testing them on the program: candidates, and not laws.

    Args:
        rules: the rule of every operator, by name.
        model: the model, as for `recognize`.
        *args: example inputs.
        **kwargs: more example inputs, by name.

    Returns:
        The symmetries that the rules allow.
    """
    return _infer(model, args, kwargs, "any", rules)[0]


def _classes(loss: str) -> int | None:
    return -1 if loss == "cross_entropy" else None


def _infer(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], loss: str, rules: Mapping[str, TypingRule] = RULES
) -> tuple[LawSet, CapturedProgram, ProgramRun]:
    PROGRESS.enter("following the program")
    program, parameters, run = _follow(model, args, kwargs)
    classes = _classes(loss)
    laws = laws_of(program, parameters, classes=classes, rules=rules)
    assert isinstance(laws.derivation, Derivation)
    if program.communicates:
        # Run again by one process alone, it would wait for the others.
        return laws, program, replace(run, refused=COMMUNICATES)
    if isinstance(model, nn.Module) and (args or kwargs) and _small(args, kwargs):
        laws.derivation.call = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
    local = not any(parameter.is_meta or is_sharded(parameter) for parameter in parameters.values())
    if laws.unknown and isinstance(model, nn.Module) and (args or kwargs) and local:
        inner, prefix = unwrap(model)
        if runs_on_several(inner):
            # Hooks of data parallelism set themselves up in the first call, and must not do so here.
            if prefix:
                return laws, program, run
            model = inner = single_process_copy(inner)

        def follow(stand_ins: Mapping[str, Callable[..., Any]]) -> tuple[CapturedProgram, LawSet]:
            inner_parameters = {prefix + name: parameter for name, parameter in inner.named_parameters()}
            again = capture(lambda: inner(*args, **kwargs), inner_parameters, inner, stand_ins)
            return again, laws_of(again, parameters, classes=classes, rules=rules)

        laws = with_probed(laws, program, laws.derivation.typing.live, follow, model, args, kwargs)
    return laws, program, run


def _small(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether inputs are small enough to be stored with the laws."""
    tensors = [leaf for leaf in tree_flatten((args, dict(kwargs)))[0] if isinstance(leaf, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) <= KEPT_BYTES


def laws_of(
    program: CapturedProgram,
    parameters: Mapping[str, Tensor],
    *,
    classes: int | None = None,
    rules: Mapping[str, TypingRule] = RULES,
) -> LawSet:
    """Return the laws of a captured program."""
    typing = type_program(program, classes, rules=rules)
    PROGRESS.enter("solving for symmetries")
    assembly = Assembly(typing)
    symmetries = over_unread_rows(name_symmetries(assembly, assembly.find()), typing)
    program.tables.clear()
    partial = read_in_part(typing) if program.communicates else frozenset()
    gathered: frozenset[str] = frozenset()
    if program.communicates:
        gathered = laws_of_gathered_rows(typing, symmetries)
        symmetries = [item for item in symmetries if partial.isdisjoint(item.parameters) and item.name not in gathered]
    else:
        symmetries += inert(typing)
        symmetries += dependent_inputs(typing, symmetries)
    assumed = assumed_atoms(typing)
    symmetries = [replace(item, source=derivation_source(typing, item, assumed)) for item in symmetries]
    unique = {symmetry.name: symmetry for symmetry in symmetries}
    assert len(unique) == len(symmetries), "two laws got one name"
    derivation = Derivation(typing, assembly, unique.values(), classes=classes)
    return LawSet(
        symmetries=tuple(unique.values()),
        parameters=dict(parameters),
        unclaimed=(),
        dropped=(
            *(Dropped(name, _READ_IN_PART) for name in sorted(partial)),
            *(Dropped(name, GATHERED) for name in sorted(gathered)),
            *(Dropped(name, why) for name, why in derivation.dropped(unique.values()) if name not in partial),
        ),
        unknown=dict(typing.unknown),
        derivation=derivation,
    )


def derivation_source(typing: Typing, symmetry: Symmetry, assumed: np.ndarray) -> str:
    """Return where a symmetry comes from: "typed", or "assumed".

    Assumed are laws through an autograd function, whose backward is its author's; through a hook on a gradient, which
    may log it or change it; and all laws of a program that decides by numbers it reads out of its inputs, or by what no
    tensor shows: they hold on the path that was taken.

    Args:
        typing: the types of the program.
        symmetry: the symmetry.
        assumed: the result of `assumed_atoms`, which is the same for all symmetries.
    """
    hooked = typing.assumed_parameters.union(typing.program.hooked)
    if typing.program.decisions or typing.program.hooked_nodes or not hooked.isdisjoint(symmetry.parameters):
        return "assumed"
    if typing.program.sized_by_data and _is_partial(symmetry, typing.program):
        # Other inputs may read more or fewer rows.
        return "assumed"
    if not typing.assumed:
        return "typed"
    if symmetry.kind.linear:
        # Where shifts go is not kept, only where they end: it may be in such a function.
        return "assumed"
    atoms = [
        f.atoms.reshape(-1)
        for name in symmetry.parameters
        for r in typing.engine.regions.get(name, [])
        for f in r.type.factors
    ]
    return "assumed" if any(occur(own[own > 0], assumed) for own in atoms) else "typed"


def _is_partial(symmetry: Symmetry, program: CapturedProgram) -> bool:
    """Return whether a law covers a part of a parameter only."""
    for name in symmetry.parameters:
        covered = sum(leg.view.n * leg.view.m for leg in symmetry.legs if leg.view.parameter == name)
        if covered < math.prod(program.values[program.parameters[name]].shape):
            return True
    return False


def _follow(
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
    if is_partitioned(parameters.values()):
        raise NotImplementedError(
            "ZeRO-3 of DeepSpeed cuts parameters where modules cannot run without all processes. Dump weights and "
            "gradients and run `conserved audit --gradients`"
        )
    inner, prefix = unwrap(model)
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


def unwrap(model: nn.Module) -> tuple[nn.Module, str]:
    """Return the module that computes, inside compile and data-parallel wrappers, and the prefix of its parameters'
    names.
    """
    prefix = ""
    while (wrapped := wrapped_module(model)) is not None:
        name, inner = wrapped
        only_calls = name == "_orig_mod" or type(model).__name__ in ("DistributedDataParallel", "DataParallel")
        if not only_calls or list(model.parameters(recurse=False)):
            break
        model, prefix = inner, f"{prefix}{name}."
    return model, prefix


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


def closure(loss_fn: Callable[[], Tensor], model: nn.Module) -> LawSet:
    """Return the laws of a whole objective."""
    return recognize(loss_fn, model)
