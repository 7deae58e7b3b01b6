"""Does the model leave its inputs alone? Inputs written to in place by a pass, and given to the model again."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from conserved._torch_compat import version_of
from conserved.tracking.identities.finding import StepFinding
from conserved.tracking.identities.step_identity import StepIdentity, TrainingStep, on_host

_STEPS = 8
"""Steps with a pass that writes to its inputs after which it is no longer asked whether they come again."""


_ALIKE = 4
"""Steps that are compared for having the same batch."""

_LARGE = 50.0
"""An input above which is remarked: pixels and counts are usually scaled first."""

_ORDER = 1024
"""Steps whose batches are compared for coming in the same order again."""


class KeptInputs(StepIdentity):
    """Compares the versions of inputs before and after a pass, and looks for the same memory in later passes.

    A model may use a fresh batch as memory. It may not if the batch is a part of the data set: then every epoch trains
    on data that were changed once more.
    """

    name = "inputs"

    def __init__(self) -> None:
        self._before: list[tuple[Tensor, int]] = []
        self._written: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        """By tensor, or the tensor it is a part of, that a pass wrote to: it, and its version then."""
        self._steps = 0
        self._batches: list[Tensor] = []
        """Entries of the inputs of the first steps."""
        self._order: list[int] = []
        """Fingerprints of the last batch of every step, until they repeat."""

    def before_forward(self, step: TrainingStep, module: nn.Module) -> None:
        if self._steps >= _STEPS or not torch.is_grad_enabled():
            return
        self._before = [(x, version_of(x)) for x in step.inputs if not x.requires_grad]
        for x, version in self._before:
            source = _source(x)
            known = self._written.get(id(source))
            # What is copied into the same memory before every pass has another version.
            if known is not None and known[0]() is source and known[1] == version:
                self._steps = _STEPS
                step.report(
                    StepFinding(
                        code="input written",
                        certain=True,
                        step=step.number - 1,
                        message="The model writes to its input in place, and gets the same memory again in step "
                        f"{step.number}: the data set is changed by every pass. Copy the input first, or use "
                        "operations without a trailing underscore.",
                    )
                )
                return

    def after_step(self, step: TrainingStep) -> None:
        """Remark on a run whose first steps all have the same batch, or have large inputs."""
        if step.number == 1:
            sampled = [batch for batch in step.batches if batch.is_floating_point() and on_host(batch)]
            largest = max((float(batch.abs().max()) for batch in sampled), default=0.0)
            if largest > _LARGE:
                step.notes.append(f"inputs are as large as {largest:.3g}")
        if step.number <= _ALIKE and len(step.batches) == 1:
            self._batches.append(step.batches[0])
        if step.number == _ALIKE and len(self._batches) == _ALIKE:
            first, *others = self._batches
            if all(first.shape == other.shape and torch.equal(first, other) for other in others):
                step.notes.append(f"the first {_ALIKE} steps have the same batch")
        if step.number >= _ALIKE:
            self._batches = []
        self._look_at_order(step)

    def _look_at_order(self, step: TrainingStep) -> None:
        """Remark on a run whose second epoch has the batches of the first in the same order."""
        if len(self._order) >= _ORDER or not step.batches:
            return
        self._order += step.seen_batches[-1:]
        period, odd = divmod(len(self._order), 2)
        if not odd and len(set(self._order[:period])) > 1 and self._order[:period] == self._order[period:]:
            step.notes.append(f"batches come again in the same order every {period} steps")
            self._order = [0] * _ORDER

    def after_forward(self, step: TrainingStep, module: nn.Module, outputs: Any) -> None:
        before, self._before = self._before, []
        written = [x for x, version in before if version_of(x) != version]
        for x in written:
            source = _source(x)
            self._written[id(source)] = (weakref.ref(source), x._version)
        self._steps += bool(written)


def _source(x: Tensor) -> Tensor:
    """Return the tensor that another is a view of, or itself."""
    return x if x._base is None else x._base
