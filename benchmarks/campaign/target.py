"""A function with inputs that the campaign checks, and the source that rebuilds both without this library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Target:
    """A differentiable function in one mode, precision and shape.

    `source` defines `f` and `make(dtype, device)`, which returns its inputs. It is all that a confirming script needs,
    and it is what `build` runs, so that the script and the check concern the same function.
    """

    name: str
    group: str
    """The package or the family that it belongs to."""
    source: str
    mode: str = "eager"
    dtype: torch.dtype = torch.float32
    known: str = ""
    """The issue that reports the defect this target has, where there is one."""

    def build(self, device: str) -> tuple[Callable[..., Any], list[Any]]:
        """Return the function in its mode, and its inputs."""
        namespace = evaluate(self.source)
        dtype: Any = str(self.dtype)[6:] if self.mode == "jax" else self.dtype
        return in_mode(namespace["f"], self.mode), namespace["make"](dtype, device)

    def record(self) -> dict[str, Any]:
        """Return plain data that identifies the target."""
        return {"name": self.name, "group": self.group, "mode": self.mode, "dtype": str(self.dtype)[6:]}


PRELUDE = "import torch\nimport torch.nn.functional as F\n"
"""The imports that every source starts from."""


def evaluate(source: str) -> dict[str, Any]:
    """Run a target's source and return the names it defines."""
    namespace: dict[str, Any] = {}
    exec(compile(PRELUDE + source, "<target>", "exec"), namespace)
    return namespace


def in_mode(function: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """Return the function as it is run: eager, checkpointed, under a transform, or compiled by a backend."""
    if mode in ("eager", "jax"):
        return function
    if mode == "checkpointed":
        from torch.utils.checkpoint import checkpoint

        return lambda *tensors: checkpoint(function, *tensors, use_reentrant=False)
    if mode == "vmap":
        return _mapped(function)
    # One graph for each shape: dynamic shapes are another program, and the check varies shapes.
    return torch.compile(function, backend=mode, dynamic=False)


def _mapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function under `torch.func.vmap`, over a batch of its inputs and their negatives halved."""

    def batched(*tensors: torch.Tensor) -> Any:
        return torch.func.vmap(function)(*(torch.stack([tensor, -0.5 * tensor]) for tensor in tensors))

    return batched
