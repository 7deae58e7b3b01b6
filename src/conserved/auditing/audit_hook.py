"""`AuditHook`: audits in a training loop of one's own, just before the optimizer moves anything."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from conserved.auditing.audit_result import Audit
from conserved.auditing.model_audit import audit
from conserved.errors import ConservedError
from conserved.inference import FirstCall
from conserved.laws import LawSet
from conserved.laws.identities import coarsest

log = logging.getLogger("conserved.audit")


class GradientsDoNotConserveError(ConservedError, RuntimeError):
    """A gradient identity does not hold; `.audit` has the rows."""

    def __init__(self, audit: Audit) -> None:
        super().__init__(audit.summary())
        self.audit = audit


class AuditHook:
    """Audits gradients just before the optimizer uses them, in the first step and every `every`-th after it.

    An audit that shows gradients neither right nor wrong (no law, missing gradients) is logged. Autocast regions around
    the model's forward pass are noticed, so the precision is known even where clipping hides it in the gradients.

    Args:
        model: the model that is trained.
        optimizer: the optimizer whose steps are preceded by audits.
        every: number of steps from one audit to the next.
        on_failure: "raise" raises GradientsDoNotConserveError before any parameter moves; "log" writes to the logger
            conserved.audit.
        laws: the laws to test; by default they are inferred from the first inputs that come.
        loss: the loss the model is trained with, as for `recognize`.
        precision: the coarsest precision of the backward pass, where it is known.
        unused: patterns of names of parameters that may have no gradient.

    Raises:
        ValueError: `every` is less than one, or `on_failure` is neither word.

    As a context manager it removes its hooks at the end.
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
        if every < 1:
            raise ValueError(f"Expected every of at least 1, got {every}. Pass a number of steps.")
        if on_failure not in ("raise", "log"):
            raise ValueError(f'Expected on_failure to be "raise" or "log", got {on_failure!r}. Pass one of them.')
        self.last: Audit | None = None
        """The latest audit; None before the first."""
        self.audits = 0
        """The number of audits made so far."""
        self.laws = laws
        """The laws that are tested; None before they are inferred."""
        self._model, self._every, self._on_failure = model, every, on_failure
        self._precision, self._unused = precision, unused
        self._first = FirstCall(model, loss=loss) if laws is None else None
        self._steps = 0
        self._seen: set[torch.dtype] = set()
        # The outermost module may be called outside autocast and enter it within, as accelerate does.
        leaves = [module for module in model.modules() if not any(True for _ in module.children())]
        self._undo: list[Callable[[], None]] = [leaf.register_forward_pre_hook(self._note).remove for leaf in leaves]
        self._undo.append(optimizer.register_step_pre_hook(self._check).remove)
        if self._first is not None:
            self._undo.append(self._first.close)

    def remove(self) -> None:
        """Remove all hooks from the model and the optimizer."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> AuditHook:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _note(self, module: nn.Module, args: Any) -> None:
        """Record the precision of an autocast region that a part of the model is called in."""
        for device in {p.device.type for p in self._model.parameters()}:
            if torch.is_autocast_enabled(device):
                self._seen.add(torch.get_autocast_dtype(device))

    def _check(self, which: Optimizer, args: Any, kwargs: Any) -> None:
        number, used = self._steps, coarsest(*self._seen) if self._seen else None
        self._steps += 1
        self._seen.clear()
        if number % self._every:
            return
        if self.laws is None and self._first is not None:
            self.laws = self._first.laws()
            self._first.close()
        result = audit(self._model, self.laws, precision=self._precision or used, unused=self._unused)
        self.last = result
        self.audits += 1
        if result.failures or any(item.trouble == "not finite" for item in result.findings):
            if self._on_failure == "raise":
                raise GradientsDoNotConserveError(result)
            log.error("step %d: %s", number, result.summary())
        elif not result.ok:
            log.warning("step %d: %s", number, result.summary())
        else:
            log.debug("step %d: %s", number, result.verdict.message)
