"""The table of components that recognisers speak for, and the walk that applies it to a model.

A recogniser is one `Component`: the module class, the symmetries inside it, and the parameters through which it reads
its input and writes its output. The last two let a norm find its readers and a residual stream its writers without
either knowing what the other is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from torch import nn

from conserved.laws import Dropped, LawSet
from conserved.recognize.sharing import settle
from conserved.recognize.site import Norm, Site, Unreadable, own_forward, passes_on, qualified_name
from conserved.symmetry import Symmetry
from conserved.view import View

ENTRY_POINT = "conserved.recognizers"
"""Packages list a module here; importing it registers its components."""

LOSSES = ("regression", "cross_entropy")


def _no_laws(site: Site) -> Iterable[Symmetry | Dropped]:
    return ()


def _unknown(site: Site) -> Iterable[View]:
    raise Unreadable(f"{site.path or 'the model'} ({type(site.module).__name__}) does not say how it reads and writes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """What is known about one class of modules.

    `laws` yields the symmetries whose legs lie inside. `reads` are the views of every parameter that is multiplied
    with the module's input, and of nothing else that sees the input, faced by input feature; `writes` those that make
    its output, faced by output feature. A `part` (a Linear, a norm) has no say of its own: what holds for it depends
    on the component it stands in. A `norm` reads a normalisation over the last axis.

    `type` is the class or, so that its package need not be imported, its qualified name.
    """

    type: type[nn.Module] | str
    laws: Callable[[Site], Iterable[Symmetry | Dropped]] = _no_laws
    reads: Callable[[Site], Iterable[View]] = _unknown
    writes: Callable[[Site], Iterable[View]] = _unknown
    part: bool = False
    norm: Callable[[Site], Norm] | None = None

    @property
    def name(self) -> str:
        """The qualified name of its class."""
        return self.type if isinstance(self.type, str) else qualified_name(self.type)


_COMPONENTS: dict[type[nn.Module] | str, Component] = {}
_PLUGINS_LOADED: list[str] = []

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)

_TRANSPARENT = (nn.ModuleDict, nn.ParameterDict, nn.ParameterList)
"""Containers that compute nothing: what is in them belongs to the module that holds them."""


def register(component: Component) -> Component:
    """Make a component known. A second registration of the same class replaces the first."""
    _COMPONENTS[component.type] = component
    return component


def components() -> tuple[Component, ...]:
    """Everything that is known, in order of registration."""
    return tuple(_COMPONENTS.values())


def component_of(module: nn.Module) -> Component | None:
    """The component for a module: its class, or a base class none of whose methods it changes."""
    cls = type(module)
    for base in cls.__mro__:
        component = _COMPONENTS.get(base) or _COMPONENTS.get(qualified_name(base))
        if component is not None:
            return component if _behaves_like(cls, base) and not own_forward(module) else None
    return None


def _behaves_like(cls: type, base: type) -> bool:
    """Whether `cls` computes what `base` computes: no method of `base` but the constructor is overridden."""
    return all(
        inspect.getattr_static(cls, name) is value
        for name, value in vars(base).items()
        if callable(value) and name not in ("__init__", "extra_repr", "__repr__")
    )


def require(site: Site, *types: type[nn.Module] | str) -> Site:
    """The same site, if the module there computes what one of these classes computes."""
    component = component_of(site.module)
    names = [one if isinstance(one, str) else qualified_name(one) for one in types]
    if component is None or component.name not in names:
        expected = " or ".join(name.rpartition(".")[2] for name in names)
        raise Unreadable(
            f"{site.path or 'the model'} ({type(site.module).__name__}) is not known to compute what {expected} does"
        )
    return site


def stranger_above(site: Site) -> str:
    """Why a module may be given other inputs than its recogniser thinks of; empty if everything around it is known.

    A model of tokens inside one that also sees images, or that learns a prompt, gets vectors that no table holds.
    """
    for module in site.above():
        known = component_of(module) is not None or passes_on(module) or isinstance(module, _CONTAINERS)
        if not known:
            return f"it is inside a {type(module).__name__}, which may give it vectors that are not in its tables"
    return ""


def reads(site: Site) -> list[View]:
    """The views through which the module at `site` reads its input."""
    component = component_of(site.module)
    return list((component.reads if component else _unknown)(site))


def writes(site: Site) -> list[View]:
    """The views through which the module at `site` writes its output."""
    component = component_of(site.module)
    return list((component.writes if component else _unknown)(site))


def recognize(model: Any, *args: Any, loss: str = "regression", **kwargs: Any) -> LawSet:
    """The conservation laws of a model, or of any program.

    With example inputs one forward pass is followed and the laws are read off its operations, whatever the model is:
    see `conserved.inference.recognize`. Without, they are those of the components that recognisers know.

    Args:
        model: a `torch.nn.Module`; or, with what it is called with, a function that computes the whole objective
            followed by its module, or a function of a dictionary of parameters.
        *args: example inputs, as the model is called. Shapes and types count, values do not.
        loss: "regression" (or "any") lists laws that hold for every loss, "cross_entropy" also those of a classifier's
            head.
        **kwargs: more example inputs, by name.

    Returns:
        The laws. `.dropped` says what is no law and why; `.unclaimed` lists parameters that no recogniser speaks for,
        `.unknown` operations without a rule.
    """
    if args or kwargs:
        from conserved.inference import recognize as infer

        return infer(model, *args, loss=loss, **kwargs)
    if not isinstance(model, nn.Module):
        raise TypeError(f"recognize takes a torch.nn.Module; got {type(model).__name__}.")
    if loss not in (*LOSSES, "any"):
        raise ValueError(f"Unknown loss {loss!r}; expected one of {', '.join(LOSSES)}.")
    _load_plugins()
    found: list[Symmetry] = []
    dropped: list[Dropped] = []
    claimed: set[str] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        component = component_of(module)
        if component is None or component.part:
            continue
        site = Site(module, path, loss, model)
        try:
            items = list(component.laws(site))
        except (Unreadable, ValueError) as problem:
            dropped.append(Dropped(path or type(module).__name__, str(problem)))
            continue
        except AttributeError as problem:
            # Another version of its package: the class has the name that is known, and not the parts.
            reason = f"its {type(module).__name__} is not laid out as its recogniser expects ({problem})"
            dropped.append(Dropped(path or type(module).__name__, reason))
            continue
        found += [item for item in items if isinstance(item, Symmetry)]
        dropped += [item for item in items if isinstance(item, Dropped)]
        claimed.update(_own_parameters(site))
    kept, lost = settle(model, list({(symmetry.kind, symmetry.legs): symmetry for symmetry in found}.values()))
    names = {id(parameter): name for name, parameter in reversed(list(model.named_parameters(remove_duplicate=False)))}
    spoken_for = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name in claimed}
    return LawSet(
        symmetries=tuple(kept),
        parameters=dict(model.named_parameters()),
        unclaimed=tuple(name for key, name in reversed(names.items()) if key not in spoken_for),
        dropped=tuple(dropped + lost),
    )


def _own_parameters(site: Site) -> set[str]:
    """Parameters a component speaks for: its own and those of the plain parts directly inside it."""
    own = {site.join(name) for name, value in site.module._parameters.items() if value is not None}
    for name, child in site.module._modules.items():
        if child is None:
            continue
        component = component_of(child)
        if isinstance(child, _TRANSPARENT) or (component is not None and component.part):
            own |= _own_parameters(Site(child, site.join(name), site.loss, site.model))
    return own


def _load_plugins() -> None:
    """Import what other packages announce, once."""
    if _PLUGINS_LOADED:
        return
    _PLUGINS_LOADED.append(ENTRY_POINT)
    for plugin in entry_points(group=ENTRY_POINT):
        plugin.load()
