"""Do the vectors of spectral norms belong to their weights? Evaluations before the first iteration."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from conserved.tracking.identities.finding import StepFinding, name_tensors
from conserved.tracking.identities.step_identity import StepIdentity, TrainingStep, on_host

_PART = 0.5
"""The share of its spectral norm that a weight reaches along the stored vectors, below which they are not its own."""


class SpectralVectors(StepIdentity):
    """Tests uᵀWv = ‖Wᵀu‖ in passes in eval mode, which divide a weight by uᵀWv and iterate nothing.

    `torch.nn.utils.spectral_norm` starts from random vectors. A pass in eval mode before the first one in train mode
    divides by a number that has nothing to do with the norm of the weight.
    """

    name = "spectral norms"

    def __init__(self) -> None:
        self._modules: list[tuple[str, nn.Module]] | None = None

    def before_forward(self, step: TrainingStep, module: nn.Module) -> None:
        if self._modules is None:
            named = step.model.named_modules()
            self._modules = [(name, m) for name, m in named if all(hasattr(m, part) for part in _PARTS)]
        wrong = [name for name, m in self._modules if not m.training and _apart(m)]
        if wrong:
            self._modules = []
            step.report(
                StepFinding(
                    code="mode",
                    certain=True,
                    tensor=f"{wrong[0]}.weight_orig",
                    message=f"Spectral norms of {name_tensors(wrong)} were used in eval mode before they were "
                    f"initialised, in step {step.number}: their vectors do not belong to the weights, and outputs are "
                    "too large. Run a pass in train mode first, or use torch.nn.utils.parametrizations.spectral_norm.",
                )
            )


_PARTS = ("weight_orig", "weight_u", "weight_v")


def _apart(module: nn.Module) -> bool:
    """Return whether the stored vectors show little of the largest singular value of a weight."""
    weight, u, v = (getattr(module, part).detach() for part in _PARTS)
    if not on_host(weight) or weight.shape[0] != len(u):
        return False
    matrix: Tensor = weight.flatten(1)
    if matrix.shape[1] != len(v):
        return False
    image = torch.mv(matrix.t(), u)
    return float(torch.dot(image, v).abs()) < _PART * float(image.norm())
