"""A function with inputs that the campaign checks, and the source that rebuilds both without this library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Target:
    """A differentiable function in one mode, precision and shape.

    `source` defines `f` and `make(dtype, device)`, which returns its tensors. It is all that a confirming script needs,
    and it is what `build` runs, so that the script and the check speak of the same function.
    """

    name: str
    group: str
    """The package or the family that it belongs to."""
    source: str
    mode: str = "eager"
    dtype: torch.dtype = torch.float32
    known: str = ""
    """The issue that reports the defect this target has, where there is one."""

    def build(self, device: str) -> tuple[Callable[..., Any], list[Tensor]]:
        """Return the function in its mode, and its inputs."""
        space = evaluate(self.source)
        tensors = space["make"](self.dtype, device)
        return in_mode(space["f"], self.mode), tensors

    def record(self) -> dict[str, Any]:
        """Return plain data that identifies the target."""
        return {"name": self.name, "group": self.group, "mode": self.mode, "dtype": str(self.dtype)[6:]}


PRELUDE = "import torch\nimport torch.nn.functional as F\n"
"""The imports that every source starts from."""


def evaluate(source: str) -> dict[str, Any]:
    """Run a target's source and return the names it defines."""
    space: dict[str, Any] = {}
    exec(compile(PRELUDE + source, "<target>", "exec"), space)
    return space


def in_mode(function: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """Return the function as it is run: eager, compiled by a backend, checkpointed."""
    if mode == "eager":
        return function
    if mode == "checkpointed":
        from torch.utils.checkpoint import checkpoint

        return lambda *tensors: checkpoint(function, *tensors, use_reentrant=False)
    # One graph for each shape: dynamic shapes are another program, and the check varies shapes.
    return torch.compile(function, backend=mode, dynamic=False)
