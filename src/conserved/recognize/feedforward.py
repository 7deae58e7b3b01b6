"""Feed-forward networks: neurons that can be rescaled, and linear pairs."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from conserved.blocks.feedforward import FeedForward, SwiGLU
from conserved.kind import GeneralLinear, Scaling
from conserved.recognize.activation import degree, is_linear
from conserved.recognize.registry import Component, register
from conserved.recognize.site import Site
from conserved.symmetry import Leg, Symmetry
from conserved.view import View


def neurons(site: Site, up: list[View], down: list[View], activation: object, *, part: str = "") -> Iterator[Symmetry]:
    """A homogeneous activation lets a neuron be scaled in and out; the identity commutes with all of GL(h).

    relu(s·z)² = s² relu(z)², so with degree k the out-column is scaled by s^{−k}. GELU and SiLU are not homogeneous
    (paper, Theorem 4.1: no law at all).
    """
    power = degree(activation)
    if is_linear(activation):
        yield site.symmetry("linear_pair", GeneralLinear(), plus=up, minus=down, part=part)
    elif power is not None:
        yield _scaled(site, "neurons", up, down, power, part)


def gated_neurons(
    site: Site, gate: list[View], up: list[View], down: list[View], activation: object, *, part: str = ""
) -> Iterator[Symmetry]:
    """The output is linear in the up branch, so each neuron scales between it and down (paper, Theorem 4.2).

    With a homogeneous activation the gate can be scaled against down as well.
    """
    yield site.symmetry("gated_neurons", Scaling(), plus=down, minus=up, part=part)
    power = degree(activation)
    if power is not None:
        yield _scaled(site, "gates", gate, down, power, part)


def _scaled(site: Site, family: str, into: list[View], out: list[View], power: int, part: str) -> Symmetry:
    legs = tuple([Leg(view) for view in into] + [Leg(view, -power) for view in out])
    return Symmetry(block=site.path, family=family, part=part, kind=Scaling(), legs=legs)


def _feedforward(site: Site) -> Iterator[Symmetry]:
    module = site.module
    assert isinstance(module, FeedForward)
    activation = {"relu": nn.ReLU(), "linear": nn.Identity()}.get(module.activation)
    yield from neurons(site, site.linear("up").outputs(), site.linear("down").inputs(), activation)


def _swiglu(site: Site) -> Iterator[Symmetry]:
    gate, up, down = (site.linear(name) for name in ("gate", "up", "down"))
    yield from gated_neurons(site, gate.outputs(), up.outputs(), down.inputs(), None)


def _up(site: Site) -> list[View]:
    return site.linear("up").inputs()


def _gate_and_up(site: Site) -> list[View]:
    return [*site.linear("gate").inputs(), *site.linear("up").inputs()]


def _down(site: Site) -> list[View]:
    return site.linear("down").outputs()


register(Component(type=FeedForward, laws=_feedforward, reads=_up, writes=_down))
register(Component(type=SwiGLU, laws=_swiglu, reads=_gate_and_up, writes=_down))
