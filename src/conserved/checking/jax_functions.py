"""A function of JAX arrays as a function of tensors, so that its backward is checked by the same tests.

The check needs values of the function and one vector–Jacobian product of it. `jax.vjp` gives both, and runs whatever
`custom_vjp` defines. Arrays are exchanged by DLPack, without a copy where the memory allows it.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.utils.dlpack
from torch import Tensor
from torch.autograd.function import once_differentiable

from conserved._torch_compat import tree_flatten, tree_leaves, tree_map, tree_unflatten


def is_jax_array(value: Any) -> bool:
    """Return whether a value is an array of JAX, without importing JAX."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.Array)


def takes_jax_arrays(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Return whether any argument of a call is, or holds, an array of JAX."""
    return any(is_jax_array(leaf) for leaf in tree_leaves((list(arguments), dict(keywords))))


def as_tensors(values: Any) -> Any:
    """Return a structure with every array of JAX in it as a tensor of the same type, in memory of its own."""
    return tree_map(lambda value: _tensor(value) if is_jax_array(value) else value, values)


def torch_form(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of tensors that computes what `fn` computes of JAX arrays.

    Its backward pass is `jax.vjp` of `fn`. Floating-point tensors are differentiated; others are held fixed.
    """

    @functools.wraps(fn)
    def called(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]

        def of_arrays(*arrays: Any) -> list[Any]:
            given = [_array(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            for index, array in zip(indices, arrays, strict=True):
                given[index] = array
            positional, named = tree_unflatten(given, structure)
            return _inexact(fn(*positional, **named))

        outputs = _JaxFunction.apply(of_arrays, *(leaves[index] for index in indices))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return called


class _JaxFunction(torch.autograd.Function):
    """Values by JAX, and gradients by `jax.vjp`."""

    @staticmethod
    def forward(ctx: Any, of_arrays: Callable[..., list[Any]], *tensors: Tensor) -> tuple[Tensor, ...]:
        import jax

        ctx.wide = any(tensor.dtype == torch.float64 for tensor in tensors)
        with _precision(ctx.wide):
            arrays = [_array(tensor.detach()) for tensor in tensors]
            if not any(ctx.needs_input_grad):
                # Most passes of a check are values alone, which need no trace of the function.
                return tuple(_tensor(output) for output in of_arrays(*arrays))
            outputs, ctx.vjp = jax.vjp(of_arrays, *arrays)
            ctx.kinds = [output.dtype for output in outputs]
            return tuple(_tensor(output) for output in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        with _precision(ctx.wide):
            cotangents = [_array(g).astype(kind) for g, kind in zip(gradients, ctx.kinds, strict=True)]
            return (None, *(_tensor(gradient) for gradient in ctx.vjp(cotangents)))


def _inexact(returned: Any) -> list[Any]:
    """Return the floating-point arrays of a result, in order."""
    import jax

    leaves = jax.tree.leaves(returned)
    return [leaf for leaf in leaves if jax.numpy.issubdtype(jax.numpy.result_type(leaf), jax.numpy.floating)]


def _array(tensor: Tensor) -> Any:
    import jax

    return jax.dlpack.from_dlpack(tensor.detach().contiguous())


def _tensor(array: Any) -> Tensor:
    # An array of JAX never changes, and a function under test may write into its inputs.
    return torch.utils.dlpack.from_dlpack(array).clone()


def _precision(wide: bool) -> AbstractContextManager[Any]:
    """Let JAX compute in float64 where inputs are; by default it rounds everything to float32."""
    if not wide:
        return nullcontext()
    jax = sys.modules["jax"]
    # Older releases have it among their experiments.
    home = jax if hasattr(jax, "enable_x64") else importlib.import_module("jax.experimental")
    return cast(AbstractContextManager[Any], home.enable_x64(True))
