"""A module at its place in a model, and the views of its parameters that recognisers are written with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy

from conserved.kind import Kind
from conserved.symmetry import Leg, Symmetry
from conserved.view import Pick, View


class Unreadable(Exception):
    """A module or parameter is not what a recogniser may speak about; the message says why."""


def qualified_name(cls: type) -> str:
    """Where a class is defined, such as torch.nn.modules.linear.Linear: a key that needs no import of its package."""
    return f"{cls.__module__}.{cls.__qualname__}"


_WRAPPERS = (
    "torch._dynamo.eval_frame.OptimizedModule",
    "torch.nn.parallel.distributed.DistributedDataParallel",
    "torch.nn.parallel.data_parallel.DataParallel",
    "peft.tuners.lora.model.LoraModel",
)


def passes_on(module: nn.Module) -> bool:
    """Whether a wrapper hands its inputs and outputs on as they are.

    PEFT wraps a model twice; its outer wrapper does so around the inner one of LoRA, and not with trained prompts.
    """
    name = qualified_name(type(module))
    if name.startswith("peft.peft_model."):
        inner = module._modules.get("base_model")
        return inner is not None and passes_on(inner)
    return name in _WRAPPERS


def own_forward(module: nn.Module) -> bool:
    """Whether this one module computes something else than its class does.

    The wrapper that `accelerate` puts around a forward pass to fetch offloaded weights computes the same.
    """
    if "forward" not in vars(module):
        return False
    hook, wrapped = getattr(module, "_hf_hook", None), getattr(module, "_old_forward", None)
    moves_weights_only = all(
        qualified_name(type(one)) in ("accelerate.hooks.AlignDevicesHook", "accelerate.hooks.CpuOffload")
        for one in getattr(hook, "hooks", (hook,))
    )
    return not (moves_weights_only and getattr(wrapped, "__func__", None) is type(module).forward)


@dataclass(frozen=True, slots=True)
class Site:
    """A module and its dotted path in `model`. `loss` is what that is trained with, as in `conserved.discover`."""

    module: nn.Module
    path: str
    loss: str
    model: nn.Module | None = None

    def child(self, name: str) -> Site:
        """A submodule by name; dotted names go further down."""
        module = self.module
        for step in name.split("."):
            child = module._modules.get(step)
            if child is None:
                raise Unreadable(f"{self.join(name)} is not a submodule here")
            module = child
        return Site(module, self.join(name), self.loss, self.model)

    def optional(self, name: str) -> Site | None:
        """A submodule that may be absent or None."""
        return self.child(name) if self.module._modules.get(name) is not None else None

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

    def above(self) -> Iterator[nn.Module]:
        """The modules this one is inside of, from the whole model down."""
        module = self.model
        for step in self.path.split(".") if self.path else ():
            if module is None:
                return
            yield module
            module = module._modules.get(step)

    @property
    def is_whole_model(self) -> bool:
        """Whether this is the model itself, perhaps inside wrappers that pass outputs on (torch.compile, DDP, LoRA)."""
        return all(passes_on(module) for module in self.above())

    def view(
        self,
        name: str,
        *,
        grid: tuple[int, ...] | None = None,
        axes: tuple[int, ...] | int = 0,
        pick: dict[int, Pick] | None = None,
        rows: tuple[int, ...] | None = None,
        shape: tuple[int, ...] | None = None,
        offset: float = 0.0,
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
        return View.of(self.join(name), found, grid=grid, axes=axes, pick=pick, rows=rows, offset=offset)

    def linear(self, name: str) -> Linear:
        """A submodule that must be an affine map: a plain Linear, or one of the kinds in `AFFINE`."""
        return affine(self.child(name))

    def symmetry(
        self, family: str, kind: Kind, plus: list[View], minus: list[View], *, part: str = "", epsilon: float = 0.0
    ) -> Symmetry:
        """A symmetry of this module with legs of degrees +1 and −1."""
        legs = tuple([Leg(view) for view in plus] + [Leg(view, -1) for view in minus])
        return Symmetry(block=self.path, family=family, part=part, kind=kind, legs=legs, epsilon=epsilon)


@dataclass(frozen=True, slots=True)
class Linear:
    """An affine map, seen from the output side or from the input side.

    The weight is stored (out, in), or (in, out) if `transposed`. Low-rank `updates` are pairs of maps whose product is
    added to it: they see its input through the first and make its output through the second.
    """

    site: Site
    shape: tuple[int, int]
    weight: str = "weight"
    bias: str = "bias"
    transposed: bool = False
    updates: tuple[tuple[Linear, Linear], ...] = ()

    def outputs(
        self,
        split: tuple[int, ...] = (),
        axes: tuple[int, ...] | int = 0,
        pick: dict[int, Pick] | None = None,
        rows: tuple[int, ...] | None = None,
    ) -> list[View]:
        """The weight by its output features, and the bias along with it; `split` unflattens the output axis."""
        features = split or self.shape[:1]
        views = [self._face(features, axes, pick, rows, outputs=True)]
        if self.site.has(self.bias):
            views.append(self.site.view(self.bias, grid=features, axes=axes, pick=pick, rows=rows))
        return views + [view for _, out in self.updates for view in out.outputs(split, axes, pick, rows)]

    def inputs(
        self,
        split: tuple[int, ...] = (),
        axis: tuple[int, ...] | int = 0,
        pick: dict[int, Pick] | None = None,
        rows: tuple[int, ...] | None = None,
    ) -> list[View]:
        """The weight by its input features; `split` unflattens the input axis and `axis`, `pick` count along it."""
        views = [self._face(split or self.shape[1:], axis, pick, rows, outputs=False)]
        return views + [view for into, _ in self.updates for view in into.inputs(split, axis, pick, rows)]

    def _face(
        self,
        features: tuple[int, ...],
        axes: tuple[int, ...] | int,
        pick: dict[int, Pick] | None,
        rows: tuple[int, ...] | None,
        *,
        outputs: bool,
    ) -> View:
        """The weight with one side unflattened to `features`; `axes` and `pick` count along that side."""
        first = outputs is not self.transposed
        other = self.shape[1] if outputs else self.shape[0]
        start = 0 if first else 1
        return self.site.view(
            self.weight,
            grid=(*features, other) if first else (other, *features),
            axes=tuple(start + axis for axis in ((axes,) if isinstance(axes, int) else axes)),
            pick={start + place: chosen for place, chosen in (pick or {}).items()},
            rows=rows,
            shape=self.shape[::-1] if self.transposed else self.shape,
        )


AFFINE: dict[str, Callable[[Site], Linear]] = {}
"""Classes that compute an affine map in another way than torch.nn.Linear, and how to read them."""


def affine(site: Site) -> Linear:
    """The module at `site` as an affine map."""
    module = site.module
    if not own_forward(module):
        read = AFFINE.get(qualified_name(type(module)))
        if read is not None:
            return read(site)
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
            return Linear(site, (module.out_features, module.in_features))
    raise Unreadable(f"{site.path} is a {type(module).__name__}, not a plain Linear")


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """A normalisation over the last axis: whether it removes the mean too, its ε, and what is added to its gain."""

    site: Site
    centres: bool
    epsilon: float
    offset: float = 0.0

    def gain(self) -> list[View]:
        """What multiplies the normalised features."""
        return [self.site.view("weight", axes=0, offset=self.offset)] if self.site.has("weight") else []

    def bias(self) -> list[View]:
        """What is added after that."""
        return [self.site.view("bias", axes=0)] if self.site.has("bias") else []
