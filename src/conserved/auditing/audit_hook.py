"""`AuditHook`: audits in a training loop of one's own, under names a PyTorch user guesses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer

from conserved.auditing.audit_result import Audit
from conserved.auditing.repeated_audits import audit_every
from conserved.laws import LawSet


class AuditHook:
    """Audits gradients just before the optimizer uses them, in the first step and every `every`-th after it.

    Args:
        model: the model that is trained.
        optimizer: the optimizer whose steps are preceded by audits.
        every: how many steps from one audit to the next.
        on_failure: "raise" ends the run with GradientsDoNotConserve before anything moves; "log" writes to the logger
            conserved.audit.
        laws: what to test; by default inferred from the first inputs that come.
        loss: what the model is trained with, as for `recognize`.
        precision: the coarsest precision of the backward pass, where it is known.
        unused: parameters that rightly get no gradient.

    As a context manager it is removed at the end.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        every: int = 100,
        on_failure: Literal["raise", "log"] = "raise",
        *,
        laws: LawSet | None = None,
        loss: str = "any",
        precision: torch.dtype | None = None,
        unused: Sequence[str] = (),
    ) -> None:
        self._watch = audit_every(
            optimizer, model, every, on_failure, laws=laws, loss=loss, precision=precision, unused=unused
        )

    @property
    def last(self) -> Audit | None:
        """The latest audit; None before the first."""
        return self._watch.last

    @property
    def audits(self) -> int:
        """How many there were."""
        return self._watch.audits

    @property
    def laws(self) -> LawSet | None:
        """What is tested; None before it is inferred."""
        return self._watch.laws

    def remove(self) -> None:
        """Take all hooks away."""
        self._watch.remove()

    def __enter__(self) -> AuditHook:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()
