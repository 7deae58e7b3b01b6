"""Targets from PyTorch's own catalogue: every differentiable operator with its sample inputs and keywords."""

from __future__ import annotations

import importlib.util
import sys
import types
import unittest
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from campaign.target import Target, evaluate

MOST_ENTRIES = 2_000
"""Samples with more entries are left out: a check calls its function some hundred times."""

RANDOM = ("rand", "normal", "bernoulli", "multinomial", "uniform", "exponential", "geometric", "cauchy", "log_normal")
"""Operators whose names begin so are not functions of their inputs."""


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
    """Return the operator as a function of its floating-point tensors, and those of one sample."""
    op = catalogue()[name]
    torch.manual_seed(number)
    for place, sample in enumerate(op.sample_inputs(device, dtype, requires_grad=False)):
        if place == number:
            return _as_function(op, sample)
    raise IndexError(f"{name} has no sample {number}.")


def _as_function(op: Any, sample: Any) -> tuple[Any, list[Tensor]]:
    leaves, spec = tree_flatten(((sample.input, *sample.args), sample.kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]

    def function(*tensors: Tensor) -> Any:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        args, kwargs = torch.utils._pytree.tree_unflatten(filled, spec)
        result = op(*args, **kwargs)
        floats = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        return floats[0] if len(floats) == 1 else tuple(floats)

    return function, [leaves[place].detach() for place in places]


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
    """Yield every operator in every precision and mode, with samples spread over its list."""
    for name, op in catalogue(match).items():
        for dtype in dtypes:
            if dtype not in (op.dtypesIfCUDA or op.dtypes if device == "cuda" else op.dtypes):
                continue
            for number in _spread(op, dtype, samples):
                source = SOURCE.format(name=name, number=number)
                for mode in modes:
                    yield Target(name=f"{name} #{number}", group="torch", source=source, mode=mode, dtype=dtype)


def _spread(op: Any, dtype: torch.dtype, count: int) -> list[int]:
    """Return numbers of samples with different keywords, of moderate size, that have a tensor to differentiate."""
    seen: dict[Any, int] = {}
    try:
        torch.manual_seed(0)
        for number, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=False)):
            if number > 60:
                break
            _, tensors = _as_function(op, sample)
            entries = sum(tensor.numel() for tensor in tensors)
            if tensors and 1 < entries <= MOST_ENTRIES and all(tensor.numel() for tensor in tensors):
                seen.setdefault((str(sorted(sample.kwargs)), len(sample.args)), number)
    except Exception:  # an operator whose samples cannot be made here has none
        return []
    return list(seen.values())[:count]


def runs(target: Target, device: str) -> bool:
    """Return whether the target runs forward and backward at all on this machine."""
    space = evaluate(target.source)
    tensors = [tensor.requires_grad_() for tensor in space["make"](target.dtype, device)]
    result = space["f"](*tensors)
    outputs = [result] if isinstance(result, Tensor) else list(result)
    return any(output.requires_grad for output in outputs)
