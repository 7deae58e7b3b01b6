"""Linear combinations of tensors that are written down, not carried out.

The update of an optimizer is mostly a linear combination of tensors that exist already (the gradient, a momentum
buffer, the parameter itself). The moment map is bilinear, so its values on such a combination follow from its values on
the tensors: nothing of a parameter's size has to be formed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

Scalar = int | float | Tensor
"""A coefficient: a number, or a tensor of one number that stays on its device."""


@dataclass(frozen=True, slots=True, eq=False)
class Combination:
    """Σ coefficient · tensor; tensors are distinguished by identity."""

    terms: Mapping[int, tuple[Scalar, Tensor]] = field(default_factory=dict)

    @staticmethod
    def of(tensor: Tensor) -> Combination:
        """Return a combination of one tensor, with the coefficient 1."""
        return Combination({id(tensor): (1.0, tensor)})

    def coefficient(self, tensor: Tensor) -> Scalar:
        """Return the coefficient of a tensor; 0 if it does not occur."""
        return self.terms[id(tensor)][0] if id(tensor) in self.terms else 0.0

    def tensors(self) -> list[Tensor]:
        """Return the tensors that occur."""
        return [tensor for _, tensor in self.terms.values()]

    def value(self) -> Tensor:
        """Return the combination carried out, in at least float32."""
        total: Tensor | None = None
        for coefficient, tensor in self.terms.values():
            term = tensor.to(torch.promote_types(tensor.dtype, torch.float32)) * coefficient
            total = term if total is None else total + term
        if total is None:
            raise ValueError("Expected at least one tensor to combine, got none. Pass a combination with terms.")
        return total

    def __add__(self, other: Combination) -> Combination:
        terms = dict(self.terms)
        for key, (coefficient, tensor) in other.terms.items():
            total = coefficient + terms[key][0] if key in terms else coefficient
            if isinstance(total, float | int) and total == 0:
                terms.pop(key, None)
            else:
                terms[key] = (total, tensor)
        return Combination(terms)

    def __mul__(self, factor: Scalar) -> Combination:
        if isinstance(factor, float | int) and factor == 0:
            return Combination()
        return Combination({key: (factor * coefficient, tensor) for key, (coefficient, tensor) in self.terms.items()})

    __rmul__ = __mul__

    def __truediv__(self, divisor: Scalar) -> Combination:
        return self * (1 / divisor)

    def __neg__(self) -> Combination:
        return self * -1.0

    def __sub__(self, other: Combination) -> Combination:
        return self + -other
