"""Laws under the names that parameters have in another form of a model: wrapped, compiled, cut into stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor, nn

from conserved.laws.law_set import Dropped, LawSet
from conserved.symmetry import Symmetry

WRAPPERS = frozenset({"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Names that compiling, data parallelism and checkpointing put between a module and the one inside."""


def plain_name(name: str) -> str:
    """Return the name of a parameter without the names of wrappers in it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def unwrap(model: nn.Module, *, same_outputs: bool = False) -> tuple[nn.Module, str]:
    """Return the model inside compiling, data-parallel and averaging wrappers, and the prefix of its parameters' names.

    Args:
        model: the model or a wrapper.
        same_outputs: whether to stop at a wrapper whose outputs may differ from those of the module inside: one that
            has parameters of its own or neither compiles nor replicates.
    """
    prefix = ""
    while len(children := list(model.named_children())) == 1 and children[0][0] in ("_orig_mod", "module"):
        name, inner = children[0]
        only_calls = name == "_orig_mod" or type(model).__name__ in ("DistributedDataParallel", "DataParallel")
        if same_outputs and (not only_calls or list(model.parameters(recurse=False))):
            break
        model, prefix = inner, f"{prefix}{name}."
    return model, prefix


def rename(laws: LawSet, name_of: Callable[[str], str], *, block: str = "") -> LawSet:
    """Return the same laws of parameters with other names.

    Args:
        laws: the laws.
        name_of: the new name of a parameter.
        block: put before the names of the blocks, so that laws of several parts of a model have names of their own.
    """

    def renamed(symmetry: Symmetry) -> Symmetry:
        legs = tuple(
            replace(leg, view=replace(leg.view, parameter=name_of(leg.view.parameter))) for leg in symmetry.legs
        )
        return replace(symmetry, block=f"{block}{symmetry.block}".rstrip("."), legs=legs)

    return replace(
        laws,
        symmetries=tuple(map(renamed, laws)),
        parameters={name_of(name): tensor for name, tensor in laws.parameters.items()},
        unclaimed=tuple(map(name_of, laws.unclaimed)),
    )


def laws_for(laws: LawSet, parameters: Mapping[str, Tensor]) -> LawSet:
    """Return laws of a single-process twin under the names of a wrapped model, or of one stage of it.

    Args:
        laws: the laws of the twin, for instance from `LawSet.load`.
        parameters: the parameters of the model, by name.

    Returns:
        The laws all of whose parameters the model has in the same shape. The others are in `dropped`, with the reason:
        a stage of a pipeline holds some layers, and laws of the others are not its own.
    """
    known = {name for symmetry in laws for name in symmetry.parameters}
    matches = {name: _match(name, parameters) for name in known}
    transferred: list[Symmetry] = []
    left_out: list[Dropped] = []
    for symmetry in laws:
        reason = _obstacle(symmetry, matches, parameters)
        if reason:
            left_out.append(Dropped(symmetry.name, reason))
        else:
            transferred.append(symmetry)
    chosen = replace(laws, symmetries=tuple(transferred), parameters={}, dropped=(*laws.dropped, *left_out))
    mapped = rename(chosen, lambda name: matches.get(name) or name)
    return replace(mapped, parameters={name: parameters[name] for s in mapped for name in s.parameters})


def _match(name: str, parameters: Mapping[str, Tensor]) -> str | None:
    """Return the parameter that a name stands for.

    It has the same name, or the same without wrappers, or is the only one whose name ends so.
    """
    if name in parameters:
        return name
    plain = plain_name(name)
    alike = [name_here for name_here in parameters if plain_name(name_here) == plain]
    alike = alike or [name_here for name_here in parameters if plain_name(name_here).endswith(f".{plain}")]
    return alike[0] if len(alike) == 1 else None


def _obstacle(symmetry: Symmetry, matches: Mapping[str, str | None], parameters: Mapping[str, Tensor]) -> str:
    """Return why a law is not one of this model; empty if it is."""
    absent = [name for name in symmetry.parameters if matches[name] is None]
    if len(absent) == len(symmetry.parameters):
        return "its parameters are not in this model, as those of another stage"
    if absent:
        return f"it spans {absent[0]}, which is not in this model: a law across stages is not evaluated by one of them"
    for leg in symmetry.legs:
        parameter = parameters[matches[leg.view.parameter] or ""]
        if tuple(parameter.shape) != leg.view.shape:
            shape = tuple(parameter.shape)
            return f"{leg.view.parameter} has shape {shape} here and {leg.view.shape} where the laws were read"
    return ""
