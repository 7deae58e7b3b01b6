"""Equalising while a model trains: factors that drift apart in scale are brought together every so many steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from conserved.laws import LawSet
from conserved.symmetry import Degree, Kind, Symmetry
from conserved.transform.equalizing import Equalization, equalize
from conserved.transform.moving import write
from conserved.transform.objectives import Objective

FIRST = ("exp_avg", "momentum_buffer")
"""Averages of gradients in the states of torch's optimizers."""

SECOND = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")
"""Averages of squared gradients."""


class EqualizeEvery:
    """Equalises a model at the start and every n steps; call `.step()` after the optimizer's.

    Only trained parameters are moved, so that of a model with adapters the adapters are: their factors A and B are the
    legs of a general linear group. The optimizer's averages go along: gradients move by g^{-T} where weights move by g,
    and averages of squares by the squares of the entries of that matrix, which is exact for scalings.

    Args:
        model: the model that is trained.
        *args: example inputs, as it is called; they may be left out where the model says how, or with `laws`.
        optimizer: the optimizer whose averages are moved along; by default none.
        every: steps between two moves; 0 for the start alone.
        objective: the objective of `equalize`.
        laws: the symmetries to move along, if they are known.
        **kwargs: more example inputs, by name.

    Raises:
        ValueError: `every` is negative.
    """

    def __init__(
        self,
        model: nn.Module,
        *args: Any,
        optimizer: torch.optim.Optimizer | None = None,
        every: int = 100,
        objective: str | Objective = "balanced",
        laws: LawSet | Iterable[Symmetry] | None = None,
        **kwargs: Any,
    ) -> None:
        if every < 0:
            raise ValueError(
                f"Expected every of at least 0, got {every}. Pass a number of steps, or 0 for the start alone."
            )
        if laws is None:
            from conserved.inference import recognize

            laws = recognize(model, *args, **kwargs)
        self.model, self.optimizer, self.every, self.objective = model, optimizer, every, objective
        listed = laws.symmetries if isinstance(laws, LawSet) else laws
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        self.symmetries = [s for s in listed if s.exact and not s.logarithmic and trained.issuperset(s.parameters)]
        self.steps = 0
        self.last: Equalization | None = None
        self.move()

    def step(self) -> None:
        """Count a step of the optimizer, and move when it is time."""
        self.steps += 1
        if self.every and self.steps % self.every == 0:
            self.move()

    def move(self) -> Equalization:
        """Equalize now, and return the result."""
        self.last = equalize(self.model, laws=self.symmetries, objective=self.objective)
        if self.optimizer is not None:
            undone = list(self.last.moved.inverse.items())
            for symmetry, element in reversed(undone):
                carry(symmetry, symmetry.kind.inverse(element), self.optimizer, dict(self.model.named_parameters()))
        return self.last


def carry(
    symmetry: Symmetry, element: Tensor, optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter]
) -> None:
    """Move an optimizer's averages of gradients along with the weights that one element moved."""
    if symmetry.kind.linear:
        # Shifts: gradients do not see where the origin is.
        return
    for leg in symmetry.legs:
        parameter = parameters[leg.view.parameter]
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if key not in (*FIRST, *SECOND) or not isinstance(value, Tensor) or value.shape != parameter.shape:
                continue
            matrix = leg.view.matrix(value).double()
            if key in FIRST:
                moved = symmetry.kind.act(element.to(matrix.device), matrix, -leg.degree)
            else:
                moved = _squares(symmetry.kind, element, leg.view.n, -leg.degree).to(matrix.device) @ matrix
            wide = value.detach().double().contiguous()
            write_direction(leg.view, wide, moved)
            value.copy_(wide)


def _squares(kind: Kind, element: Tensor, n: int, degree: Degree) -> Float[Tensor, "n n"]:
    """Return the squared entries of the matrix that a leg of n rows is moved by."""
    return kind.act(element, torch.eye(n, dtype=torch.float64), degree).square()


def write_direction(view: Any, tensor: Tensor, matrix: Tensor) -> None:
    """Make a view of a direction see a matrix; offsets belong to points alone."""
    write(view, tensor, matrix + view.offset if view.offset else matrix)
