"""Targets from PyTorch's own catalogue: every differentiable operator with its sample inputs and keywords."""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
import unittest
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from campaign.target import Target

MOST_ENTRIES = 2_000
"""Samples with more entries are left out: a check calls its function some hundred times."""

RANDOM = ("rand", "normal", "bernoulli", "multinomial", "uniform", "exponential", "geometric", "cauchy", "log_normal")
"""Operators whose names begin so are not functions of their inputs."""


class NoSampleError(LookupError):
    """The catalogue has no further sample of an operator."""


@functools.cache
def catalogue(match: str = "") -> dict[str, Any]:
    """Return the differentiable operators of PyTorch's catalogue by full name."""
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
        # The catalogue lies among torch's tests, which inherit from a class of this package; samples do not need it.
        stand_in = types.ModuleType("expecttest")
        vars(stand_in)["TestCase"] = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db

    chosen = {op.full_name: op for op in op_db if op.supports_autograd and match in op.full_name}
    return {
        name: op
        for name, op in sorted(chosen.items())
        if not op.name.split(".")[-1].startswith((*RANDOM, "empty", "new_empty")) and "dropout" not in op.name
    }


def sample_of(name: str, number: int, dtype: torch.dtype, device: str) -> tuple[Any, list[Tensor]]:
    """Return the operator as a function of its differentiable tensors, and those of the sample of this number.

    Samples are counted over different keywords, of moderate size, with a tensor to differentiate by.
    """
    op = catalogue()[name]
    seen: set[tuple[str, int]] = set()
    torch.manual_seed(0)
    for _, sample in zip(range(60), op.sample_inputs(device, dtype, requires_grad=True), strict=False):
        function, tensors = _as_function(op, sample)
        entries = sum(tensor.numel() for tensor in tensors)
        key = (str(sorted(sample.kwargs.items(), key=str)), len(sample.args))
        if key not in seen and tensors and 1 < entries <= MOST_ENTRIES and all(tensor.numel() for tensor in tensors):
            if len(seen) == number:
                return function, tensors
            seen.add(key)
    raise NoSampleError(f"{name} has {len(seen)} samples of moderate size.")


def _as_function(op: Any, sample: Any) -> tuple[Any, list[Tensor]]:
    leaves, spec = tree_flatten(((sample.input, *sample.args), sample.kwargs))
    floats = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    # The catalogue marks what an operator differentiates by: targets of losses and running means are not.
    indices = [i for i in floats if leaves[i].requires_grad]
    leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    # The catalogue's own wrapper: a factorisation of symmetric matrices is differentiated along symmetric ones.
    call = functools.partial(op.gradcheck_wrapper, op.op) if op.gradcheck_wrapper else op.op

    def function(*tensors: Tensor) -> Any:
        # Copies, because running means are written to.
        filled = [leaf.to(tensors[0].dtype, copy=True) if i in floats else leaf for i, leaf in enumerate(leaves)]
        for index, tensor in zip(indices, tensors, strict=True):
            filled[index] = tensor
        args, kwargs = torch.utils._pytree.tree_unflatten(filled, spec)
        result = call(*args, **kwargs)
        outputs = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return function, [leaves[index] for index in indices]


SOURCE = """\
from campaign.operators import sample_of

_made = {{}}

def make(dtype, device):
    _made["f"], tensors = sample_of({name!r}, {number}, dtype, device)
    return tensors

def f(*tensors):
    return _made["f"](*tensors)
"""


def targets(
    dtypes: tuple[torch.dtype, ...], modes: tuple[str, ...], device: str, samples: int, match: str = ""
) -> Iterator[Target]:
    """Yield every operator in every precision and mode, with its first samples."""
    for number in range(samples):
        for name, op in catalogue(match).items():
            for dtype in dtypes:
                if dtype not in (op.dtypesIfCUDA or op.dtypes if device == "cuda" else op.dtypes):
                    continue
                source = SOURCE.format(name=name, number=number)
                for mode in modes:
                    yield Target(name=f"{name} #{number}", group="torch", source=source, mode=mode, dtype=dtype)
