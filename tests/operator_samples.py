"""Sample inputs of PyTorch's own catalogue of operators, as programs whose tensors are trained."""

from __future__ import annotations

import importlib.util
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from conserved import recognize
from conserved._torch_compat import TorchDispatchMode
from conserved.inference.validation.double_precision import in_double_precision
from conserved.symmetry import GeneralLinear, OneScale, Scaling, Translation

MOST_ENTRIES = 3000
"""Samples with more entries are left out: rules do not depend on sizes."""

COUNTED = 40
"""Programs with at most this many trained numbers have their scales counted."""

SKIPPED = (
    "empty",
    "rand",
    "normal",
    "bernoulli",
    "multinomial",
    "uniform",
    "exponential",
    "geometric",
    "cauchy",
    "log_normal",
)
"""Names that begin with these draw random numbers or make uninitialised ones: no function of their inputs."""


def operators(match: str = "") -> list[Any]:
    """Operators of the catalogue that can be differentiated, by name."""
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
        # The catalogue stands among torch's own tests, which inherit from a class of this package; samples do not.
        stand_in = types.ModuleType("expecttest")
        vars(stand_in)["TestCase"] = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    # Private to torch; tried on 2.13.
    from torch.testing._internal.common_methods_invocations import op_db

    chosen = [op for op in op_db if op.supports_autograd and match in op.full_name]
    chosen = [op for op in chosen if not op.name.split(".")[-1].startswith(SKIPPED)]
    return sorted(chosen, key=lambda op: str(op.full_name))


class Sample(nn.Module):
    """A call of an operator: trained tensors, or what maps and biases make, go in, and maps read the results."""

    def __init__(
        self, call: Callable[[list[Tensor]], Any], tensors: list[Tensor], frame: str, noncontiguous: bool
    ) -> None:
        super().__init__()
        self.call, self.frame, self.noncontiguous = call, frame, noncontiguous
        self.shapes = [tensor.shape for tensor in tensors]
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        if frame == "mapped":
            # One map to all entries: every mixture of them is allowed as far as this side is concerned.
            self.given = [random(3, 4) for _ in tensors]
            self.inside = nn.ParameterList(nn.Parameter(random(4, t.numel()) / 2) for t in tensors)
        else:
            self.inside = nn.ParameterList(nn.Parameter(tensor.clone()) for tensor in tensors)
        self.bias = nn.ParameterList(nn.Parameter(random(*t.shape[-1:]) / 4) for t in tensors if frame == "shifted")
        readers = [random(*result.shape) for result in self._results(self._operands(0))]
        if frame in ("shifted", "mapped"):
            self.readers = nn.ParameterList(nn.Parameter(random(r.numel(), 2)) for r in readers)
        else:
            self.readers = nn.ParameterList(map(nn.Parameter, readers))

    def _operands(self, sample: int) -> list[Tensor]:
        result = []
        for index, shape in enumerate(self.shapes):
            if self.frame == "mapped":
                value = (self.given[index][sample] @ self.inside[index]).reshape(shape)
            elif self.frame == "shifted":
                value = self.inside[index] + self.bias[index]
            else:
                value = self.inside[index]
            if self.noncontiguous and value.ndim:
                value = value.repeat_interleave(2, -1)[..., ::2]
            result.append(value)
        return result

    def _results(self, operands: list[Tensor]) -> list[Tensor]:
        leaves = tree_flatten(self.call(operands))[0]
        result = [
            leaf for leaf in leaves if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
        ]
        return [torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf for leaf in result]

    def forward(self, _: Tensor | None = None) -> Any:
        outputs = []
        for sample in range(3 if self.frame == "mapped" else 1):
            for result, reader in zip(self._results(self._operands(sample)), self.readers, strict=True):
                if self.frame == "shifted":
                    flat = result.reshape(-1)
                    outputs.append((flat - flat.mean()) @ reader)
                elif self.frame == "mapped":
                    outputs.append(result.reshape(-1) @ reader)
                else:
                    outputs.append(result * reader)
        return outputs


@dataclass(frozen=True, slots=True)
class Case:
    """One program made of a sample."""

    name: str
    program: Sample
    countable: bool

    def overloads(self) -> set[str]:
        """Return the ATen overloads that the sample runs, without those of its frame."""
        with torch.no_grad():
            operands = self.program._operands(0)
            with _Overloads() as seen:
                self.program._results(operands)
        return seen.names


class _Overloads(TorchDispatchMode):
    """The names of all ATen overloads that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def cases(operator: Any, *, samples: int = 8, part: tuple[int, int] = (0, 1)) -> Iterator[Case]:
    """Programs of the first and of further samples of an operator, spread over all of them.

    `part` is a number and how many parts there are: every so many-th of the samples is taken.
    """
    chosen = []
    for dtype, small in _samples(operator):
        step = max(1, len(small) // samples)
        chosen += [(dtype, index, sample) for index, sample in small[::step][:samples]]
    for number, (dtype, index, sample) in list(enumerate(chosen))[part[0] :: part[1]]:
        call, tensors = _call(operator, sample)
        if not tensors or any(tensor.is_complex() for tensor in tensors) != dtype.is_complex:
            continue
        for frame in ("direct", "mapped", "shifted"):
            title = f"{operator.full_name}[{index}] {str(dtype).removeprefix('torch.')} {frame}"
            try:
                program = _framed(call, tensors, frame, noncontiguous=number % 3 == 2)
            except Exception:
                # Not every sample runs: some are meant to fail, some results have no gradient.
                continue
            if program is not None:
                entries = sum(parameter.numel() for parameter in program.parameters())
                yield Case(title, program, frame == "direct" and 0 < entries <= COUNTED)


def number_of_samples(operator: Any) -> int:
    """Return how many samples an operator has that are small enough, in both precisions."""
    return sum(len(small) for _, small in _samples(operator))


def _samples(operator: Any) -> Iterator[tuple[torch.dtype, list[tuple[int, Any]]]]:
    """Return the small samples of each precision, with their numbers."""
    for dtype in (torch.float64, torch.complex128):
        if dtype in operator.supported_dtypes("cpu"):
            try:
                every = list(operator.sample_inputs("cpu", dtype, requires_grad=True))
            except Exception:
                # Some samples need packages or devices that are not there.
                continue
            yield dtype, [(index, sample) for index, sample in enumerate(every) if _small(sample)]


def _framed(call: Any, tensors: list[Tensor], frame: str, *, noncontiguous: bool) -> Sample | None:
    """A program of a sample; complex tensors are pairs of real ones."""
    if any(tensor.is_complex() for tensor in tensors):
        real = [torch.view_as_real(tensor).contiguous() for tensor in tensors]
        program = Sample(
            lambda given: call([torch.view_as_complex(t.contiguous()) for t in given]), real, frame, noncontiguous
        )
    else:
        program = Sample(call, tensors, frame, noncontiguous)
    outputs = program()
    if not outputs or not any(output.requires_grad for output in outputs):
        return None
    return program


def _small(sample: Any) -> bool:
    leaves = tree_flatten((sample.input, sample.args, sample.kwargs))[0]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    plain = all(tensor.layout == torch.strided for tensor in tensors)
    return plain and sum(tensor.numel() for tensor in tensors) <= MOST_ENTRIES


def _call(operator: Any, sample: Any) -> tuple[Callable[[list[Tensor]], Any], list[Tensor]]:
    """The operator as a function of its trained tensors, and their values."""
    leaves, tree = tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
    indices = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.numel()]
    tensors = [leaves[n].detach().clone() for n in indices]
    fixed = tree_map_only(Tensor, Tensor.detach, leaves)

    def call(given: list[Tensor]) -> Any:
        filled = list(fixed)
        for index, value in zip(indices, given, strict=True):
            filled[index] = value.resolve_conj() if value.is_conj() else value
        first, args, kwargs = torch.utils._pytree.tree_unflatten(filled, tree)
        result = operator.op(first, *args, **kwargs)
        return sample.output_process_fn_grad(result)

    return call, tensors


@cache
def _laws(case: Case) -> Any:
    return recognize(case.program, torch.ones(1))


def torus_laws(case: Case) -> int:
    """How many scales of single entries the inferred laws allow: the rank of the diagonals of their generators."""
    try:
        laws = _laws(case)
    except Exception:
        # The same as in the table: a program that cannot be followed has no laws.
        return 0
    sizes = {name: parameter.numel() for name, parameter in case.program.named_parameters()}
    starts = dict(zip(sizes, torch.tensor([0, *sizes.values()]).cumsum(0).tolist(), strict=False))
    rows = []
    for symmetry in laws:
        if not symmetry.exact or not isinstance(symmetry.kind, Scaling | OneScale | GeneralLinear | Translation):
            continue
        positions = {
            name: torch.arange(float(n)).reshape(p.shape) + starts[name]
            for (name, p), n in zip(case.program.named_parameters(), sizes.values(), strict=True)
        }
        views = [(leg.degree, leg.view.of_point(positions[leg.view.parameter])) for leg in symmetry.legs]
        if isinstance(symmetry.kind, Translation):
            if symmetry.inert:
                rows += [[(int(index), 1.0)] for _, view in views for index in view.flatten().tolist()]
            continue
        count = views[0][1].shape[0] if not isinstance(symmetry.kind, OneScale) else 1
        for row in range(count):
            entries = [
                (int(index), float(degree))
                for degree, view in views
                for index in (view.flatten() if isinstance(symmetry.kind, OneScale) else view[row]).tolist()
            ]
            rows.append(entries)
    matrix = torch.zeros(len(rows), sum(sizes.values()), dtype=torch.float64)
    for number, entries in enumerate(rows):
        for index, degree in entries:
            matrix[number, index] += degree
    return int(torch.linalg.matrix_rank(matrix)) if len(rows) else 0


def true_scales(case: Case) -> int:
    """How many scales of single entries leave the function alone, at random points; −1 if that is not clear."""
    parameters = list(case.program.parameters())
    entries = sum(parameter.numel() for parameter in parameters)
    start = [parameter.detach().clone() for parameter in parameters]
    generator = torch.Generator().manual_seed(7)
    rows = []
    try:
        with in_double_precision(parameters):
            for _ in range(entries + 8):
                for parameter, value in zip(parameters, start, strict=True):
                    noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
                    parameter.data = value * torch.exp(0.2 * noise) + 1e-3 * noise.abs()
                outputs = [one for one in tree_flatten(case.program())[0] if one.requires_grad]
                weights = [torch.randn(output.shape, generator=generator, dtype=torch.float64) for output in outputs]
                loss = sum((one * weight).sum() for one, weight in zip(outputs, weights, strict=True))
                assert isinstance(loss, Tensor)
                result = torch.autograd.grad(loss, parameters, allow_unused=True)
                row = [
                    torch.zeros_like(p) if g is None else p.detach() * g
                    for p, g in zip(parameters, result, strict=True)
                ]
                rows.append(torch.cat([part.flatten() for part in row]))
    except Exception:
        # Values off the sample may be outside the domain of the operator.
        return -1
    matrix = torch.stack(rows)
    if not bool(torch.isfinite(matrix).all()) or not bool(matrix.any()):
        return -1
    sizes = torch.linalg.svdvals(matrix / matrix.norm(dim=1, keepdim=True).clamp_min(1e-300))
    large = int((sizes > 1e-6 * sizes[0]).sum())
    clear = int((sizes > 1e-11 * sizes[0]).sum()) == large
    return entries - large if clear else -1
