"""A hook that audits a training run every so many steps, just before the optimizer moves anything."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from conserved.auditing.audit_result import Audit
from conserved.auditing.model_audit import audit
from conserved.inference import FirstCall
from conserved.laws import LawSet
from conserved.laws.identities import coarsest

log = logging.getLogger("conserved.audit")


class GradientsDoNotConserve(RuntimeError):
    """A gradient identity does not hold; `.audit` has the rows."""

    def __init__(self, found: Audit) -> None:
        super().__init__(found.summary())
        self.audit = found


class RunningAudits:
    """A running audit: `.last` is the latest, `.audits` their number, `.laws` what they test; `.remove()` ends it."""

    def __init__(self, remove: list[Callable[[], None]]) -> None:
        self.last: Audit | None = None
        self.laws: LawSet | None = None
        self.audits = 0
        self._remove = remove

    def remove(self) -> None:
        """Take all hooks away."""
        while self._remove:
            self._remove.pop()()


def audit_every(
    optimizer: Optimizer,
    model: nn.Module,
    every: int = 100,
    on_failure: Literal["raise", "log"] = "raise",
    *,
    laws: LawSet | None = None,
    loss: str = "any",
    precision: torch.dtype | None = None,
    unused: Sequence[str] = (),
) -> RunningAudits:
    """Audit the first step and every `every`-th after it; raise or log what does not hold.

    Without `laws`, they are inferred before the first step that is audited, from the first inputs that come.

    What is neither shown right nor wrong (no law, missing gradients) is logged. Autocast regions around the model's
    forward pass are noticed, so clipping does not hide in what precision gradients were computed.
    """
    if every < 1:
        raise ValueError(f"every must be at least 1; got {every}.")
    if on_failure not in ("raise", "log"):
        raise ValueError(f'on_failure is "raise" or "log"; got {on_failure!r}.')
    first = FirstCall(model, loss=loss) if laws is None else None
    seen: set[torch.dtype] = set()
    steps = [0]
    undo: list[Callable[[], None]] = []
    watch = RunningAudits(undo)
    watch.laws = laws

    def note(module: nn.Module, args: Any) -> None:
        for device in {p.device.type for p in model.parameters()}:
            if torch.is_autocast_enabled(device):
                seen.add(torch.get_autocast_dtype(device))

    def check(which: Optimizer, args: Any, kwargs: Any) -> None:
        number, used = steps[0], coarsest(*seen) if seen else None
        steps[0] += 1
        seen.clear()
        if number % every:
            return
        if watch.laws is None and first is not None:
            watch.laws = first.laws()
            first.close()
        found = audit(model, watch.laws, precision=precision or used, unused=unused)
        watch.last = found
        watch.audits += 1
        if found.failures or any(item.trouble == "not finite" for item in found.findings):
            if on_failure == "raise":
                raise GradientsDoNotConserve(found)
            log.error("step %d: %s", number, found.summary())
        elif not found.ok:
            log.warning("step %d: %s", number, found.summary())
        else:
            log.debug("step %d: %s", number, found.verdict.message)

    # The outermost module may be called outside autocast and enter it within, as accelerate does.
    leaves = [module for module in model.modules() if not any(True for _ in module.children())]
    undo += [leaf.register_forward_pre_hook(note).remove for leaf in leaves]
    undo.append(optimizer.register_step_pre_hook(check).remove)
    if first is not None:
        undo.append(first.close)
    return watch
