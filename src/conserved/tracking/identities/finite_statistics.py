"""Are running statistics finite? A single bad batch spoils them for good, and only evaluation reads them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.nn.utils import get_total_norm

from conserved.tracking.identities.finding import StepFinding, name_tensors
from conserved.tracking.identities.step_identity import StepIdentity, TrainingStep, is_plain

_STATISTICS = ("running_mean", "running_var")


class FiniteStatistics(StepIdentity):
    """Looks at the largest entry of all running statistics after a step.

    A gradient scaler skips the step of a batch with infinities or NaN, so that no gradient tells of it later. An
    average that has taken in such a number never loses it.
    """

    name = "finite statistics"
    free = False

    def __init__(self) -> None:
        self._reported = False

    def after_step(self, step: TrainingStep) -> None:
        statistics = [] if self._reported else list(_statistics_of(step).values())
        if statistics:
            largest = get_total_norm(statistics, float("inf"))
            step.read(largest.reshape(1), lambda arrived: self._judge(step, arrived))

    def _judge(self, step: TrainingStep, largest: Tensor) -> Iterator[StepFinding]:
        if bool(largest.isfinite().all()) or self._reported:
            return
        names = [name for name, buffer in _statistics_of(step).items() if not bool(buffer.isfinite().all())]
        if names:
            self._reported = True
            yield StepFinding(
                code="statistics",
                tensor=names[0],
                others=tuple(names[1:]),
                message=f"{name_tensors(names)} {'is' if len(names) == 1 else 'are'} not finite: a batch with "
                "infinities or NaN passed through, and every evaluation gives NaN from now on. Call "
                "reset_running_stats(), and leave such batches out before the forward pass.",
            )


def _statistics_of(step: TrainingStep) -> dict[str, Tensor]:
    """Return the running statistics of a model's norms by name."""
    return {
        name: buffer.detach()
        for name, buffer in step.model.named_buffers()
        if name.endswith(_STATISTICS) and is_plain(buffer) and buffer.numel() and not buffer.is_meta
    }
