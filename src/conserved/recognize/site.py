"""A module at its place in a model, and the views of its parameters that recognisers are written with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy

from conserved.kind import Kind
from conserved.symmetry import Leg, Symmetry
from conserved.view import Pick, View


class Unreadable(Exception):
    """A module or parameter is not what a recogniser may speak about; the message says why."""


@dataclass(frozen=True, slots=True)
class Site:
    """A module and its dotted path. `loss` is what the model is trained with, as in `conserved.discover`."""

    module: nn.Module
    path: str
    loss: str

    def child(self, name: str) -> Site:
        """A submodule by name; dotted names go further down."""
        module = self.module
        for step in name.split("."):
            child = module._modules.get(step)
            if child is None:
                raise Unreadable(f"{self.join(name)} is not a submodule here")
            module = child
        return Site(module, self.join(name), self.loss)

    def children(self, name: str) -> Iterator[Site]:
        """The entries of a ModuleList."""
        holder = self.child(name)
        for step in holder.module._modules:
            yield holder.child(step)

    def join(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def has(self, name: str) -> bool:
        """Whether the module has this parameter; a bias set to None is not one.

        Something else under that name (a pruned or parametrised weight, a buffer) would be left out of the laws.
        """
        if self.module._parameters.get(name) is not None:
            return True
        if getattr(self.module, name, None) is not None:
            raise Unreadable(f"{self.join(name)} is not a plain parameter (pruned, parametrised or a buffer)")
        return False

    @property
    def is_whole_model(self) -> bool:
        """Whether this is the model itself, perhaps inside a wrapper that passes outputs on."""
        return all(step in ("", "module", "_orig_mod") for step in self.path.split("."))

    def view(
        self,
        name: str,
        *,
        grid: tuple[int, ...] | None = None,
        axes: tuple[int, ...] | int = 0,
        pick: dict[int, Pick] | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> View:
        """A view of a parameter of this module. `shape` is what the recogniser expects it to be stored as."""
        parameter = self.module._parameters.get(name)
        if parameter is None:
            raise Unreadable(f"{self.join(name)} is not a plain parameter (parametrised, quantised or replaced)")
        if is_lazy(parameter):
            raise Unreadable(f"{self.join(name)} has no shape yet; call the model once so that lazy layers are made")
        found = tuple(parameter.shape)
        if shape is not None and found != shape:
            raise Unreadable(f"{self.join(name)} is stored with shape {found}, not {shape} (quantised or packed)")
        return View.of(self.join(name), found, grid=grid, axes=axes, pick=pick)

    def linear(self, name: str) -> Linear:
        """A submodule that must be an ordinary affine map."""
        site = self.child(name)
        if not (isinstance(site.module, nn.Linear) and type(site.module).forward is nn.Linear.forward):
            raise Unreadable(f"{site.path} is a {type(site.module).__name__}, not a plain Linear")
        return Linear(site, (site.module.out_features, site.module.in_features))

    def symmetry(
        self, family: str, kind: Kind, plus: list[View], minus: list[View], *, part: str = "", epsilon: float = 0.0
    ) -> Symmetry:
        """A symmetry of this module with legs of degrees +1 and −1."""
        legs = tuple([Leg(view) for view in plus] + [Leg(view, -1) for view in minus])
        return Symmetry(block=self.path, family=family, part=part, kind=kind, legs=legs, epsilon=epsilon)


@dataclass(frozen=True, slots=True)
class Linear:
    """The weight (out, in) of an affine map and its bias, seen from the output side or from the input side."""

    site: Site
    shape: tuple[int, int]

    def outputs(
        self, split: tuple[int, ...] = (), axes: tuple[int, ...] | int = 0, pick: dict[int, Pick] | None = None
    ) -> list[View]:
        """The weight by its output features, and the bias along with it; `split` unflattens the output axis."""
        rows = split or self.shape[:1]
        views = [self.site.view("weight", grid=(*rows, self.shape[1]), axes=axes, pick=pick, shape=self.shape)]
        if self.site.has("bias"):
            views.append(self.site.view("bias", grid=rows, axes=axes, pick=pick))
        return views

    def inputs(self, split: tuple[int, ...] = (), axis: int = 0, pick: dict[int, Pick] | None = None) -> list[View]:
        """The weight by its input features; `split` unflattens the input axis and `axis`, `pick` count along it."""
        columns = split or self.shape[1:]
        shifted = {1 + place: chosen for place, chosen in (pick or {}).items()}
        grid = (self.shape[0], *columns)
        return [self.site.view("weight", grid=grid, axes=1 + axis, pick=shifted, shape=self.shape)]
