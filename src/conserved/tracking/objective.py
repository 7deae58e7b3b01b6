"""Whether a loss sees more of a model than its outputs: then the laws of the outputs are not those of training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from conserved._torch_compat import tree_leaves
from conserved.inference import being_followed
from conserved.tracking.loss_graph import reaches_beside

OBJECTIVE = (
    "the loss sees weights or features beside the outputs of the model, so that its laws are not those of training"
)
"""The reason given for a weight penalty or a distillation of features in the loss."""

_PASSES_KEPT = 64
"""Outputs of passes of one step that are kept until its loss is known."""


class LossObjective:
    """Looks once at the graph of the loss, between the loss and the outputs of the model."""

    def __init__(self) -> None:
        self._outputs: list[Any] = []
        """Ends of the graphs of this step's passes."""
        self._seen = False

    def note_outputs(self, module: nn.Module, args: Any, output: Any) -> None:
        """Keep the ends of the graph of a pass, until the loss of the step is known; a forward hook."""
        if torch.is_grad_enabled() and not being_followed():
            leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
            self._outputs = [*self._outputs, *(leaf.grad_fn for leaf in leaves)][-_PASSES_KEPT:]

    def sees_more(self, loss: Any, model: nn.Module) -> bool:
        """Return whether the loss reaches parameters on another way than through the outputs of the model.

        Args:
            loss: the loss of the step; looked at once in a run.
            model: the model.

        Returns:
            True if a parameter is reached beside the outputs; False afterwards and where the graph is not known.
        """
        if self._seen or not self._is_known(loss):
            return False
        self._seen = True
        return reaches_beside(loss, self._outputs, model.parameters())

    def is_of_outputs(self, loss: Any, model: nn.Module) -> bool:
        """Return whether the graph of the loss is known and reaches parameters through the outputs alone."""
        return self._is_known(loss) and not reaches_beside(loss, self._outputs, model.parameters())

    def _is_known(self, loss: Any) -> bool:
        return bool(self._outputs) and isinstance(loss, Tensor) and loss.grad_fn is not None

    def end_step(self) -> None:
        """Let go of the graphs of a step."""
        self._outputs = []
