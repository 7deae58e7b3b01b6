"""Select the laws that a monitor watches, and bind them to parameters and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from conserved._torch_compat import has_step_hooks
from conserved.errors import ConservedError
from conserved.laws import Dropped, LawSet
from conserved.laws.renaming import laws_for
from conserved.layout import named_parameters_of
from conserved.output.lines import counted
from conserved.symmetry import Symmetry

Where = str | Iterable[str] | Callable[[Symmetry], bool]
"""Which laws to watch: patterns of their names, such as "layers.0.*", or a function that says yes or no."""


class NoLawError(ConservedError, ValueError):
    """There is not a law to watch, and the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Selection:
    """The laws that are watched, with the model's own parameters; impostors among them by name; what was left out."""

    laws: LawSet
    impostors: frozenset[str]
    left_out: tuple[Dropped, ...]

    @staticmethod
    def of(
        model: nn.Module, optimizers: Sequence[Optimizer], laws: LawSet, where: Where | None, *, with_impostors: bool
    ) -> Selection:
        """Return laws that `where` selects and all of whose parameters some optimizer steps."""
        optimized = {
            id(parameter)
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        theta = _bind(model, laws, optimized)
        outside = {name for name, parameter in theta.items() if id(parameter) not in optimized}
        wanted = laws.select(selector(where))
        stepped = wanted.select(lambda symmetry: not outside & set(symmetry.parameters))
        left_out = laws.dropped + tuple(
            Dropped(symmetry.name, f"no optimizer holds {', '.join(sorted(outside & set(symmetry.parameters)))}")
            for symmetry in wanted
            if outside & set(symmetry.parameters)
        )
        if not len(stepped):
            raise NoLawError(_why_none(model, laws, wanted, optimized))
        false = stepped.baselines().symmetries if with_impostors else ()
        return Selection(
            laws=LawSet(symmetries=(*stepped, *false), parameters=theta, dropped=left_out),
            impostors=frozenset(symmetry.name for symmetry in false),
            left_out=left_out,
        )


def _bind(model: nn.Module, laws: LawSet, optimized: set[int]) -> dict[str, Tensor]:
    """Return the tensors of the laws: their own if an optimizer steps them, else the model's of the same name.

    Sharding a model replaces its parameters, and laws that were read off before hold the old ones.
    """
    own = named_parameters_of(model)
    theta: dict[str, Tensor] = {}
    for symmetry in laws:
        for name in symmetry.parameters:
            parameter = laws.parameters.get(name)
            if parameter is None or id(parameter) not in optimized:
                parameter = own.get(name, parameter)
            if parameter is None:
                raise ValueError(
                    f"Expected laws of this model, got {symmetry.name} with the parameter {name}, which it does "
                    "not have. Pass laws=conserved.recognize(model, x)."
                )
            theta[name] = parameter
    return theta


def named_as_in(model: nn.Module, laws: LawSet | str | Path) -> LawSet:
    """Return given laws, or those of a file, under the names of a model; those of a twin may have others."""
    read = laws if isinstance(laws, LawSet) else LawSet.load(laws)
    parameters = dict(model.named_parameters())
    known = parameters.keys() | read.parameters.keys()
    if read.parameters and all(name in known for symmetry in read for name in symmetry.parameters):
        return read
    return laws_for(read, parameters)


def check_filter(where: Where | None, laws: LawSet) -> None:
    """Raise ValueError if `where` selects none of the laws that were given."""
    if where is not None and len(laws) and not len(laws.select(selector(where))):
        known = counted(len(laws), "law")
        raise ValueError(f"Expected `where` to select a law, got {where!r}. Choose among: {known}.")


def optimizers_of(given: Any) -> list[Optimizer]:
    """Return the torch optimizers that an argument stands for, without the wrappers of other libraries.

    Args:
        given: an optimizer; one inside a wrapper (`.optimizer`, as of accelerate and Lightning); one made of several
            (`.chained_optimizers` of Megatron Core, `.optimizers` of torchtitan); or a sequence of such.

    Returns:
        The optimizers, each once.

    Raises:
        TypeError: something is no optimizer.
    """
    for name in ("chained_optimizers", "optimizers"):
        several = getattr(given, name, None)
        if isinstance(several, list | tuple) and several:
            return optimizers_of(several)
    if hasattr(given, "optimizer") and not isinstance(given, list | tuple):
        return optimizers_of(given.optimizer)
    if isinstance(given, Optimizer):
        inner = getattr(given, "optim", None)
        # A wrapper that is no optimizer of its own has no hooks, as PostLocalSGDOptimizer of PyTorch.
        return optimizers_of(inner) if isinstance(inner, Optimizer) and not has_step_hooks(given) else [given]
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise TypeError(
            f"Expected a torch.optim.Optimizer or several, got {type(given).__name__}. Pass the optimizer that "
            "trains the model."
        )
    by_id = {id(optimizer): optimizer for part in given for optimizer in optimizers_of(part)}
    if not by_id:
        raise TypeError(
            "Expected a torch.optim.Optimizer or several, got none. Pass the optimizer that trains the model."
        )
    return list(by_id.values())


def _why_none(model: nn.Module, laws: LawSet, wanted: LawSet, optimized: set[int]) -> str:
    """Say why no law is left to watch: the first of the reasons that rules all others out."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        return "the model has no parameters that are trained"
    if not any(id(parameter) in optimized for parameter in model.parameters()):
        return (
            "the optimizer holds none of this model's parameters. Was it built before the model was replaced, or does "
            "it keep copies of its own?"
        )
    if len(wanted):
        return f"the optimizer holds only a part of the parameters of every law ({len(wanted)} were found)"
    if len(laws):
        return f"none of {len(laws)} laws was selected"
    if laws.unknown:
        most = max(laws.unknown, key=lambda name: laws.unknown[name])
        return (
            f"no law was found, and operations without a rule may hide some ({most} and {len(laws.unknown) - 1} more)"
        )
    if laws.dropped:
        return f"no law was found: {laws.dropped[0].name} is lost because {laws.dropped[0].reason}"
    return "the operations of this model leave its parameters no symmetry"


def selector(where: Where | None) -> Callable[[Symmetry], bool]:
    """Return whether a law is to be watched, as a function of its symmetry."""
    if where is None:
        return lambda symmetry: True
    if callable(where):
        return where
    patterns = [where] if isinstance(where, str) else list(where)
    return lambda symmetry: any(
        fnmatchcase(symmetry.name, pattern) or fnmatchcase(symmetry.block, pattern) for pattern in patterns
    )
