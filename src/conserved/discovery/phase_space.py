r"""Laws of heavy-ball momentum: functions of time, parameters and velocities that no data set changes.

The state is s = (θ, v, t), and for every data set

    ṡ = D(s) + Σ_i c_i X_i(s),        D = (v, −γv, 1),        X_i = (0, ∇⟨f(x_i; θ), w_i⟩, 0).

A law is constant along D and along all X_i, hence along their brackets. Two brackets with D are needed to reach a new
direction of θ: [[D, X], Y] has the velocity part −(DX·Y + DY·X), the symmetric product. A level that brings nothing new
near a generic state ends the count, because the span is then closed under brackets with every field.

Which laws remain is known from Noether's theorem. A generator that is an isometry (antisymmetric, a rotation) leaves
e^{γt}⟨v, Mθ⟩, the part of μ(θ, v) that changes its sign with its arguments. A translation leaves e^{γt}Σv and
Σv + γΣθ. Scalings, which are not isometries, leave nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from conserved._torch_compat import tree_map
from conserved.discovery.function import ParameterFunction, without_fused_kernels
from conserved.discovery.rank import Progress
from conserved.discovery.span import Span
from conserved.laws import LawSet

State = Float[Tensor, " S"]
FRICTION = 0.5
"""γ; another value is another unit of time, with gradients in another unit."""

DEEPEST = 6
"""Levels of brackets after which a count that still grows is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSpace:
    """The closure at one state, and the known laws tried against it."""

    size: int
    ranks: tuple[int, ...]
    gap: float
    converged: bool
    momenta: int
    """Independent known laws: angular momenta, and two for every translation."""
    overlap: float
    """The largest part of a known law's gradient in the span; zero for a law."""

    @property
    def rank(self) -> int:
        """Independent directions."""
        return self.ranks[-1]


def phase_space(
    function: ParameterFunction, laws: LawSet | None, generator: torch.Generator, progress: Progress
) -> PhaseSpace:
    """Close the fields of heavy-ball momentum under brackets at a random state.

    Args:
        function: the function whose parameters move.
        laws: its laws under gradient flow, whose symmetries leave momenta; None tries none.
        generator: of all random numbers.
        progress: called with one line for every level.

    Returns:
        The ranks by depth, and how the known laws fit.
    """
    theta = function.generic_point(generator)
    velocity = torch.randn(theta.shape, generator=generator, dtype=torch.float64).to(theta.device)
    state = torch.cat((theta, velocity, theta.new_tensor([0.3])))
    span = Span(len(state), theta.device)
    span.add(_unit(_drift(state)[None]))
    ranks: list[int] = []
    for level in range(DEEPEST):
        for pattern in _patterns(level):
            _exhaust(function, span, state, pattern, generator)
        ranks.append(span.rank)
        progress(f"brackets of depth {level}: rank {span.rank} of {len(state)}")
        if span.rank == len(state) or (level and ranks[-1] == ranks[-2]):
            break
    converged = span.rank == len(state) or (len(ranks) > 1 and ranks[-1] == ranks[-2])
    known = momentum_rows(function, laws, state)
    inside = float((known @ span.basis.mT).norm(dim=1).max()) if len(known) else 0.0
    independent = int(torch.linalg.matrix_rank(known)) if len(known) else 0
    return PhaseSpace(
        size=len(state), ranks=tuple(ranks), gap=span.gap, converged=converged, momenta=independent, overlap=inside
    )


def _drift(state: State) -> State:
    size = (len(state) - 1) // 2
    velocity = state[size : 2 * size]
    return torch.cat((velocity, -FRICTION * velocity, torch.ones_like(state[:1])))


def _control(function: ParameterFunction) -> Callable[..., State]:
    """Return the field of one sample, which moves velocities by the gradient."""

    def field(state: State, sample: Any) -> State:
        x, w = sample
        size = (len(state) - 1) // 2
        gradient = torch.func.grad(lambda theta: function(theta, x) @ w)(state[:size])
        return torch.cat((torch.zeros_like(gradient), gradient, torch.zeros_like(state[:1])))

    return field


def _bracket(first: Callable[[State], State], second: Callable[[State], State]) -> Callable[[State], State]:
    """Return [A, B] = DB·A − DA·B."""

    def field(state: State) -> State:
        forward: Tensor = torch.func.jvp(second, (state,), (first(state),))[1]
        backward: Tensor = torch.func.jvp(first, (state,), (second(state),))[1]
        return forward - backward

    return field


def _patterns(level: int) -> list[tuple[bool, ...]]:
    """Return letters of left-nested brackets, True for a gradient and False for the drift.

    Gradients depend on θ and move v, so two of them commute, and exchanging the first two letters changes a sign: every
    bracket that does not vanish begins with a gradient and the drift.
    """
    if level == 0:
        return [(True,)]
    return [(True, False, *rest) for rest in itertools.product((True, False), repeat=level - 1)]


def _exhaust(
    function: ParameterFunction, span: Span, state: State, pattern: tuple[bool, ...], generator: torch.Generator
) -> None:
    """Add left-nested brackets of one pattern until none is new."""
    letters = sum(pattern)
    control = _control(function)

    def row(samples: Any) -> State:
        given = iter(samples)
        fields = [partial(control, sample=next(given)) if letter else _drift for letter in pattern]
        nested: Callable[[State], State] = fields[0]
        for field in fields[1:]:
            nested = _bracket(nested, field)
        return nested(state)

    size = len(state)
    theta = state[: (size - 1) // 2]
    while span.rank < size:
        count = min(64, size - span.rank + 8)
        samples = tuple(function.draw_many(theta, count, generator) for _ in range(letters))
        axes = tree_map(lambda part: 0 if isinstance(part, Tensor) else None, samples)
        with without_fused_kernels():
            rows = torch.func.vmap(row, in_dims=(axes,))(samples)
        if span.add(_unit(rows.detach())) == 0:
            return


def _unit(rows: Float[Tensor, "count S"]) -> Float[Tensor, "count S"]:
    """Return rows of length one; those that vanish against the largest stay zero, for rounding has no direction."""
    sizes = torch.linalg.vector_norm(rows, dim=1)
    return rows / torch.where(sizes > 1e-10 * sizes.max(), sizes, torch.inf)[:, None]


def momentum_rows(function: ParameterFunction, laws: LawSet | None, state: State) -> Float[Tensor, "laws S"]:
    """Return the gradients of the momenta that the symmetries of gradient flow leave, as rows of length one."""

    def momenta(where: State) -> Tensor:
        size = (len(where) - 1) // 2
        theta, velocity = function.split(where[:size]), function.split(where[size : 2 * size])
        growth = torch.exp(FRICTION * where[-1])
        parts = [where[:0]]
        for symmetry in laws or ():
            momenta_here = symmetry.identity(theta, velocity).flatten()
            if symmetry.kind.linear:
                there = symmetry.identity(velocity, theta).flatten()
                parts += [growth * momenta_here, momenta_here + FRICTION * there]
            else:
                parts.append(growth * (momenta_here - symmetry.identity(velocity, theta).flatten()))
        return torch.cat(parts)

    rows = torch.func.jacrev(momenta)(state).reshape(-1, len(state))
    sizes = torch.linalg.vector_norm(rows, dim=1)
    return rows[sizes > 1e-12] / sizes[sizes > 1e-12][:, None]
