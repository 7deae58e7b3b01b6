"""Mixtures of experts: what the router conserves. The experts speak for themselves."""

from __future__ import annotations

from collections.abc import Iterator

from conserved.blocks.experts import MixtureOfExperts
from conserved.kind import Translation
from conserved.recognize.registry import Component, reads, register, writes
from conserved.recognize.site import Site
from conserved.symmetry import Symmetry
from conserved.view import View


def router_laws(router: Site, outputs: list[View], *, active: int | None, softmax: bool) -> Iterator[Symmetry]:
    """Softmax does not see a shift common to all logits; one active expert has weight 1 whatever the router says.

    A normalised sigmoid is not shift-invariant: with more than one active expert it has no law here, against the
    paper's Theorem 4.7. `active` is None where the scores of the active experts are not renormalised.
    """
    for view in outputs:
        name = view.parameter.rpartition(".")[2]
        if active == 1:
            frozen = router.view(name, grid=(1, view.n * view.m))
            yield router.symmetry("frozen", Translation(), plus=[frozen], minus=[], part=name)
        elif softmax:
            yield router.symmetry("shift", Translation(), plus=[view], minus=[], part=name)


def _router(site: Site) -> Iterator[Symmetry]:
    module = site.module
    assert isinstance(module, MixtureOfExperts)
    router = site.linear("router")
    yield from router_laws(router.site, router.outputs(), active=module.active, softmax=module.gate == "softmax")


def _reads(site: Site) -> Iterator[View]:
    yield from site.linear("router").inputs()
    for expert in site.children("experts"):
        yield from reads(expert)


def _writes(site: Site) -> Iterator[View]:
    for expert in site.children("experts"):
        yield from writes(expert)


register(Component(type=MixtureOfExperts, laws=_router, reads=_reads, writes=_writes))
