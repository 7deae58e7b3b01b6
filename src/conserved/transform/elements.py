"""Validation of group elements before weights are moved by them.

| kind | element | a leg of degree +1 becomes | of degree −1 |
|---|---|---|---|
| general linear | n × n matrix g | g·A | g^{-T}·A |
| orthogonal | n × n matrix with g gᵀ = 1 | g·A | g·A |
| complex scaling | n/2 complex numbers | c·A, pair by pair | A·c/|c|² |
| positive scaling | n positive numbers | s_i·A_i | A_i/s_i |
| one scale | a positive number | s·A | A/s |
| translation | m numbers | A + c | A − c |
| exchange | an order of the n rows | A[order] | A[order] |
"""

from __future__ import annotations

import torch
from torch import Tensor

from conserved.symmetry import Symmetry, UnmovableError


def element_shape(symmetry: Symmetry) -> tuple[int, ...]:
    """Return the shape of a symmetry's elements."""
    return tuple(symmetry.kind.identity(symmetry.n, symmetry.m).shape)


def validate_element(symmetry: Symmetry, element: Tensor) -> Tensor:
    """Return an element in the precision it acts in.

    Args:
        symmetry: the symmetry it is meant for.
        element: numbers in the shape of the table above.

    Returns:
        The element in float64, complex128 for complex scalings, or int64 for exchanges.

    Raises:
        UnmovableError: it is not an element of this symmetry; the message says why.
    """
    kind, n, m = symmetry.kind, symmetry.n, symmetry.m
    identity = kind.identity(n, m)
    try:
        element = torch.as_tensor(element).detach()
    except (TypeError, ValueError, RuntimeError) as problem:
        raise UnmovableError(
            f"Expected the element for {symmetry.name} to be a tensor of numbers, got another object ({problem}). "
            "Pass a tensor."
        ) from problem
    if element.shape != identity.shape:
        raise UnmovableError(
            f"Expected an element of shape {tuple(identity.shape)} for {symmetry.name} ({kind.group(n, m)}), got "
            f"{tuple(element.shape)}. Pass one of that shape."
        )
    if element.is_complex() and not identity.is_complex():
        raise UnmovableError(
            f"Expected a real element for {symmetry.name} ({kind.group(n, m)}), got complex numbers. Pass real ones."
        )
    element = element.to(torch.complex128 if identity.is_complex() else torch.float64)
    if not bool(torch.isfinite(torch.view_as_real(element) if element.is_complex() else element).all()):
        raise UnmovableError(
            f"Expected a finite element for {symmetry.name}, got NaN or infinity. Pass finite numbers."
        )
    if reason := kind.element_problem(element, symmetry.name):
        raise UnmovableError(reason)
    return element.to(identity.dtype)
