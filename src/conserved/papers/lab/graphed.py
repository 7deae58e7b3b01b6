"""Gradients recorded once as a CUDA graph and replayed, where launching them takes longer than computing them.

A step of small models on few examples is thousands of short kernels, and the host cannot launch them as fast as a GPU
finishes them. A graph holds all launches of a function for inputs of one shape; replaying it is a single launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Slopes = Callable[[Mapping[str, Tensor], Tensor, Tensor], tuple[dict[str, Tensor], Tensor]]
"""Gradients and losses of stacked parameters on inputs and targets."""

_FEW = 4096
"""Examples times models beyond which a step takes longer to compute than to launch."""

_WARM_UP = 3


@dataclass(frozen=True, slots=True, eq=False)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    targets: Tensor
    found: tuple[dict[str, Tensor], Tensor]


def graphed(slopes: Slopes, *, own_batches: bool) -> Slopes:
    """The same function, replayed from a graph on a GPU; what it returns holds until it is called again.

    Parameters may change in place between calls. With other parameters, or inputs of another shape, it records anew.
    """
    known: dict[tuple[object, ...], _Recorded] = {}

    def replayed(theta: Mapping[str, Tensor], inputs: Tensor, targets: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        models = len(next(iter(theta.values())))
        examples = inputs.shape[0] * (inputs.shape[1] if own_batches else models)
        if inputs.device.type != "cuda" or examples > _FEW:
            return slopes(theta, inputs, targets)
        key = (inputs.shape, targets.shape, *(tensor.data_ptr() for tensor in theta.values()))
        if key not in known:
            known[key] = _recorded(slopes, theta, inputs, targets)
        recorded = known[key]
        recorded.inputs.copy_(inputs)
        recorded.targets.copy_(targets)
        recorded.graph.replay()
        return recorded.found

    return replayed


def _recorded(slopes: Slopes, theta: Mapping[str, Tensor], inputs: Tensor, targets: Tensor) -> _Recorded:
    inputs, targets = inputs.clone(), targets.clone()
    beside = torch.cuda.Stream(inputs.device)
    beside.wait_stream(torch.cuda.current_stream(inputs.device))
    # Libraries choose algorithms and take workspaces the first few times, which cannot be recorded.
    with torch.cuda.stream(beside):
        for _ in range(_WARM_UP):
            slopes(theta, inputs, targets)
    torch.cuda.current_stream(inputs.device).wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = slopes(theta, inputs, targets)
    return _Recorded(graph, inputs, targets, found)
