"""Feed-forward networks: neurons that can be rescaled, and linear pairs."""

from __future__ import annotations

from collections.abc import Iterator

from conserved.blocks.feedforward import FeedForward, SwiGLU
from conserved.kind import GeneralLinear, Scaling
from conserved.recognize.registry import Component, register
from conserved.recognize.site import Site
from conserved.symmetry import Symmetry
from conserved.view import View


def _feedforward(site: Site) -> Iterator[Symmetry]:
    """ReLU is positively homogeneous, so a neuron can be scaled in and out; the identity commutes with all of GL(h).

    GELU and SiLU are neither (paper, Theorem 4.1: no law at all).
    """
    module = site.module
    assert isinstance(module, FeedForward)
    up, down = site.linear("up"), site.linear("down")
    if module.activation == "relu":
        yield site.symmetry("neurons", Scaling(), plus=up.outputs(), minus=down.inputs())
    if module.activation == "linear":
        yield site.symmetry("linear_pair", GeneralLinear(), plus=up.outputs(), minus=down.inputs())


def _swiglu(site: Site) -> Iterator[Symmetry]:
    """The output is linear in the up branch, so each neuron scales between it and down (paper, Theorem 4.2)."""
    yield site.symmetry(
        "gated_neurons", Scaling(), plus=site.linear("down").inputs(), minus=site.linear("up").outputs()
    )


def _up(site: Site) -> list[View]:
    return site.linear("up").inputs()


def _gate_and_up(site: Site) -> list[View]:
    return [*site.linear("gate").inputs(), *site.linear("up").inputs()]


def _down(site: Site) -> list[View]:
    return site.linear("down").outputs()


register(Component(type=FeedForward, laws=_feedforward, reads=_up, writes=_down))
register(Component(type=SwiGLU, laws=_swiglu, reads=_gate_and_up, writes=_down))
