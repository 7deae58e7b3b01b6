"""Targets described in a line: an expression and the inputs it is a function of."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from campaign.target import Target


@dataclass(frozen=True)
class Description:
    """A function of a package.

    `call` is an expression in the names of `inputs`, such as "x: normal(4, 8); y: uniform(4)". An expression that
    starts with "module:" makes a module instead, which is called on the inputs and whose parameters are inputs too.
    """

    package: str
    call: str
    inputs: str
    setup: str = ""
    gpu: bool = False
    """Whether the function needs a GPU, as a Triton kernel does."""

    @property
    def name(self) -> str:
        """Return the expression, short enough for a table."""
        return self.call.removeprefix("module:").strip()[:90]


_TORCH = """\
{setup}
{function}

def make(dtype, device):
    g = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=g).to(device, dtype)
    uniform = lambda *shape: torch.rand(*shape, generator=g).mul(0.9).add(0.05).to(device, dtype)
    return [{made}]{parameters}
"""

_FUNCTION = """\
def f({names}):
    return {call}
"""

_MODULE = """\
torch.manual_seed(0)
module = {call}
names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]

def f(*tensors):
    count = len(tensors) - len(names)
    # Buffers follow the inputs; parameters are replaced by the tensors given.
    return torch.func.functional_call(module.to(tensors[0]), dict(zip(names, tensors[count:])), tensors[:count])
"""

_JAX = """\
import jax
import jax.numpy as jnp
{setup}
def f({names}):
    return {call}

def make(dtype, device):
    keys = iter(jax.random.split(jax.random.key(0), 16))
    normal = lambda *shape: jax.random.normal(next(keys), shape, jnp.float32).astype(dtype)
    uniform = lambda *shape: jax.random.uniform(next(keys), shape, jnp.float32, 0.05, 0.95).astype(dtype)
    return [{made}]
"""


def _inputs(description: Description) -> tuple[str, str]:
    """Return the names of the inputs, and the expressions that make them, each joined by commas."""
    parts = [part.partition(":") for part in description.inputs.split(";")]
    return ", ".join(name.strip() for name, _, _ in parts), ", ".join(value.strip() for _, _, value in parts)


def torch_target(description: Description, mode: str, dtype: torch.dtype) -> Target:
    """Return the target of a function or module of PyTorch."""
    names, made = _inputs(description)
    is_module = description.call.startswith("module:")
    call = description.call.removeprefix("module:").strip()
    function = _MODULE.format(call=call) if is_module else _FUNCTION.format(names=names, call=call)
    weights = (
        " + [parameter.detach().to(device, dtype) for parameter in module.parameters() if parameter.requires_grad]"
    )
    source = _TORCH.format(
        setup=description.setup, function=function, made=made, parameters=weights if is_module else ""
    )
    return Target(name=description.name, group=description.package, source=source, mode=mode, dtype=dtype)


def jax_target(description: Description, dtype: torch.dtype) -> Target:
    """Return the target of a function of JAX arrays."""
    names, made = _inputs(description)
    source = _JAX.format(setup=description.setup, names=names, call=description.call, made=made)
    return Target(name=description.name, group=description.package, source=source, mode="jax", dtype=dtype)
