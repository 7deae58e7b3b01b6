r"""Laws in another metric: coordinates in which a preconditioned or mirrored gradient flow is Euclidean.

A flow θ̇ = −P(θ)∇L with a diagonal P > 0 is Euclidean in coordinates u with dθ_i/du_i = √P_i, because then

    u̇_i = θ̇_i/√P_i = −√P_i ∂L/∂θ_i = −∂L/∂u_i.

So its laws are those of u ↦ f(θ(u)). A fixed preconditioner p has θ = √p·u. A mirror map Σ φ(θ_i) has P = 1/φ″(θ), and
the negative entropy θ log θ has P = θ and θ = u²/4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from conserved.discovery.inputs import UnsuitableError, arguments

Coordinate = float | Tensor | Callable[[Tensor], Tensor]
"""The metric of one parameter: a positive preconditioner, a number or a tensor that fits; or the map u ↦ θ(u)."""

Metric = Mapping[str, Coordinate]
"""By name of a parameter. Parameters that are not named keep the Euclidean metric."""


def entropy(u: Tensor) -> Tensor:
    """Return θ = u²/4: the flow of the mirror map θ log θ, on positive θ, is Euclidean in u."""
    return u.square() / 4


def in_metric(
    f: nn.Module | Callable[..., Any], params: Mapping[str, Tensor] | None, metric: Metric
) -> tuple[Callable[..., Any], dict[str, Tensor]]:
    """Return f as a function of coordinates in which the metric is Euclidean, and those coordinates.

    Args:
        f: a module, or a callable f(params, x).
        params: the tensors of a callable.
        metric: the metric of each parameter that has one.

    Returns:
        A callable of (coordinates, x), and the coordinates by the names of the parameters.

    Raises:
        UnsuitableError: the metric names a parameter that does not exist, or is not positive.
    """
    start = _parameters(f, params)
    unknown = sorted(set(metric) - set(start))
    if unknown:
        raise UnsuitableError(
            f"Expected `metric` to name trainable parameters ({', '.join(start)}), got {', '.join(unknown)}. "
            "Correct the names."
        )
    maps = {name: _coordinates(name, start[name], given) for name, given in metric.items()}

    def call(values: Mapping[str, Tensor], x: Any) -> Any:
        theta = {name: maps[name](value) if name in maps else value for name, value in values.items()}
        if not isinstance(f, nn.Module):
            return f(theta, x)
        args, kwargs = arguments(x)
        return torch.func.functional_call(f, theta, args, kwargs)

    return call, start


def _parameters(f: nn.Module | Callable[..., Any], params: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    if isinstance(f, nn.Module):
        return {name: p.detach().double() for name, p in f.double().named_parameters() if p.requires_grad}
    return {name: tensor.detach().double() for name, tensor in (params or {}).items()}


def _coordinates(name: str, tensor: Tensor, given: Coordinate) -> Callable[[Tensor], Tensor]:
    if callable(given) and not isinstance(given, Tensor):
        return given
    root = torch.as_tensor(given, dtype=torch.float64).detach()
    if not bool((root > 0).all()) or not bool(torch.isfinite(root).all()):
        raise UnsuitableError(
            f"Expected a positive and finite preconditioner, got another one for {name}. Pass positive numbers."
        )
    try:
        root = root.sqrt().expand(tensor.shape)
    except RuntimeError as problem:
        raise UnsuitableError(
            f"Expected a preconditioner of {name} that expands to {tuple(tensor.shape)}, got shape "
            f"{tuple(root.shape)}. Pass one factor for each entry, row or tensor."
        ) from problem
    return lambda u: root * u
