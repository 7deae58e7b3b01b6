"""The laws of a program, read off what it computes: capture, typing, solving, naming."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor, nn

from conserved._torch_compat import tree_flatten, tree_map_only
from conserved.inference.derivation import Derivation
from conserved.inference.followed_calls import follow_call
from conserved.inference.further_laws.dependent_inputs import dependent_inputs
from conserved.inference.further_laws.parameters_without_gradient import inert, read_in_part
from conserved.inference.further_laws.probed import with_probed
from conserved.inference.further_laws.unread_rows import over_unread_rows
from conserved.inference.processes.gathered_rows import GATHERED, assumed_atoms, laws_of_gathered_rows, occur
from conserved.inference.processes.single_process import runs_on_several, single_process_copy
from conserved.inference.program.capture import capture
from conserved.inference.program.captured_program import CapturedProgram
from conserved.inference.program.materialised_models import is_sharded
from conserved.inference.program.program_state import preserve_state
from conserved.inference.reading_progress import PROGRESS
from conserved.inference.rules import RULES, TypingRule
from conserved.inference.symmetries.assembly import Assembly
from conserved.inference.symmetries.naming import name_symmetries
from conserved.inference.typing import Typing, type_program
from conserved.inference.validation.program_check import ProgramRun, check_on_program
from conserved.laws import Dropped, LawSet
from conserved.laws.renaming import unwrap
from conserved.symmetry import Symmetry

LOSSES = ("any", "regression", "cross_entropy")

KEPT_BYTES = 64_000_000
"""Inputs up to this size are kept with the laws, to try them again with moved parameters."""

_READ_IN_PART = "this process reads only a part of it, and others may read the rest"


COMMUNICATES = "the program exchanges tensors with other processes"
"""The reason why a program that exchanges tensors is not run again."""


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
    program, parameters, run = follow_call(model, args, kwargs)
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
        inner, prefix = unwrap(model, same_outputs=True)
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
