"""The laws a certificate lists: symmetries as explicit polynomials, those kept whose gradients are independent."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from conserved.certificates.arithmetic import Array
from conserved.certificates.chosen_brackets import Choice
from conserved.certificates.form import Form
from conserved.certificates.program import Program
from conserved.certificates.proof import Input, encloses_zero, enclosure, random_fields
from conserved.discovery.function import ParameterFunction
from conserved.discovery.inputs import UnsuitableError
from conserved.laws import LawSet
from conserved.symmetry import Symmetry


def list_forms(
    laws: LawSet,
    function: ParameterFunction,
    program: Program,
    theta: tuple[float, ...],
    inputs: list[Input],
    seed: int,
) -> list[list[Form]]:
    """Return laws with independent gradients at θ, by symmetry, without those that a tight enclosure excludes."""
    exact = [symmetry for symmetry in laws if symmetry.exact]
    missing = {name for symmetry in exact for name in symmetry.parameters} - function.start.keys()
    if missing:
        raise UnsuitableError(
            f"Expected laws of the function's parameters, got laws of {sorted(missing)[:3]}. Pass laws that were "
            "recognized for this function."
        )
    groups = [_forms(symmetry, function) for symmetry in exact]
    members = [(g, k) for g, group in enumerate(groups) for k in range(len(group))]
    if not members:
        return []
    rows = np.array([_gradient(groups[g][k], theta) for g, k in members])
    sizes = np.linalg.norm(rows, axis=1, keepdims=True)
    chosen = Choice(program.size).pick(rows / np.where(sizes > 0, sizes, 1), len(members))
    sampled = random_fields(program, theta, inputs, seed)
    forms: dict[int, list[Form]] = {}
    for index in sorted(chosen):
        g, k = members[index]
        if encloses_zero(enclosure(groups[g][k], sampled)):
            forms.setdefault(g, []).append(groups[g][k])
    return [forms[g] for g in sorted(forms, key=lambda g: exact[g].formula)]


def _gradient(form: Form, theta: tuple[float, ...]) -> Array:
    result = np.zeros(len(theta))
    for i, j, a in form.quadratic:
        result[i] += a * theta[j]
    for i, b in form.linear:
        result[i] += b
    return result


def _forms(symmetry: Symmetry, function: ParameterFunction) -> list[Form]:
    """Return the conserved numbers of a symmetry.

    Gradients of laws are affine in θ, so their values at 0 and at the unit
    vectors are all there is to know of them."""
    names = set(symmetry.parameters)
    shapes = {name: tensor.shape for name, tensor in function.start.items()}
    spans, start = [], 0
    for name, shape in shapes.items():
        if name in names:
            spans.append(torch.arange(start, start + shape.numel()))
        start += shape.numel()
    inside = torch.cat(spans)

    def numbers(part: Tensor) -> Tensor:
        theta = torch.zeros(function.size, dtype=torch.float64).index_put((inside,), part)
        return symmetry.kind.coordinates(symmetry.law(function.split(theta)))

    gradient = torch.func.jacrev(numbers)
    zero = torch.zeros(len(inside), dtype=torch.float64)
    at_zero = gradient(zero)
    columns = torch.func.vmap(gradient, chunk_size=64)(torch.eye(len(inside), dtype=torch.float64)) - at_zero
    where, flat = inside.tolist(), columns.permute(1, 2, 0).numpy()
    result = []
    for k in range(len(at_zero)):
        rows, cols = np.nonzero(flat[k])
        quadratic = tuple((where[i], where[j], float(flat[k, i, j])) for i, j in zip(rows, cols, strict=True))
        linear = tuple((where[i], float(at_zero[k, i])) for i in torch.nonzero(at_zero[k]).flatten().tolist())
        result.append(Form(quadratic=quadratic, linear=linear))
    return result
