"""Which laws of which model a monitor watches, and the parameters and optimizers they are bound to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from conserved.laws import Dropped, LawSet
from conserved.symmetry import Symmetry

Where = str | Iterable[str] | Callable[[Symmetry], bool]
"""Which laws to watch: patterns of their names, such as "layers.0.*", or a function that says yes or no."""


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
        """Laws that `where` selects and all of whose parameters some optimizer steps."""
        held = {id(parameter) for one in optimizers for group in one.param_groups for parameter in group["params"]}
        theta = _bound(model, laws, held)
        outside = {name for name, parameter in theta.items() if id(parameter) not in held}
        wanted = laws.select(_selector(where))
        stepped = wanted.select(lambda symmetry: not outside & set(symmetry.parameters))
        left_out = laws.dropped + tuple(
            Dropped(symmetry.name, f"no optimizer holds {', '.join(sorted(outside & set(symmetry.parameters)))}")
            for symmetry in wanted
            if outside & set(symmetry.parameters)
        )
        if not len(stepped):
            one = f" {left_out[0].name} was left out: {left_out[0].reason}." if left_out else ""
            raise ValueError(f"There is no law to watch: {len(laws)} were found, {len(wanted)} selected.{one}")
        false = stepped.baselines().symmetries if with_impostors else ()
        return Selection(
            laws=LawSet(symmetries=(*stepped, *false), parameters=theta, dropped=left_out),
            impostors=frozenset(symmetry.name for symmetry in false),
            left_out=left_out,
        )


def _bound(model: nn.Module, laws: LawSet, held: set[int]) -> dict[str, Tensor]:
    """The tensors the laws speak of: their own if an optimizer steps them, else the model's of the same name.

    Sharding a model replaces its parameters, and laws that were read off before hold the old ones.
    """
    own = dict(model.named_parameters())
    theta: dict[str, Tensor] = {}
    for symmetry in laws:
        for name in symmetry.parameters:
            found = laws.parameters.get(name)
            if found is None or id(found) not in held:
                found = own.get(name, found)
            if found is None:
                raise ValueError(f"{symmetry.name} speaks of {name}, which the model does not have.")
            theta[name] = found
    return theta


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside wrappers that keep its parameters: data parallel, compiled, averaged."""
    while True:
        inner = model._modules.get("_orig_mod") or model._modules.get("module")
        if inner is None or len(model._modules) != 1:
            return model
        model = inner


def inner_optimizer(optimizer: Any) -> Optimizer:
    """The torch optimizer inside a wrapper such as Accelerate's or Lightning's."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"Monitor takes a torch.optim.Optimizer or several; got {type(optimizer).__name__}.")
    return optimizer


def _selector(where: Where | None) -> Callable[[Symmetry], bool]:
    if where is None:
        return lambda symmetry: True
    if callable(where):
        return where
    patterns = [where] if isinstance(where, str) else list(where)
    return lambda symmetry: any(
        fnmatchcase(symmetry.name, pattern) or fnmatchcase(symmetry.block, pattern) for pattern in patterns
    )
