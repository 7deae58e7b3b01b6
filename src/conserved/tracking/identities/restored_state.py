"""Was everything restored? Weights and optimizer state at the first step after a resume, against the checkpoint's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from conserved.tracking.identities.finding import StepFinding, name_tensors
from conserved.tracking.identities.fingerprints import fingerprints
from conserved.tracking.identities.step_identity import (
    StepIdentity,
    TrainingStep,
    grouped_parameters,
    is_plain,
    on_host,
)


class RestoredState(StepIdentity):
    """Compares fingerprints that a checkpoint carries with what the first step after a resume starts from."""

    name = "resume"
    question = "Was everything restored?"

    def __init__(self) -> None:
        self._saved: Mapping[str, Any] | None = None

    @staticmethod
    def state(step: TrainingStep) -> dict[str, Any]:
        """Return fingerprints of weights, buffers, optimizer state and rates, as plain numbers."""
        return {
            "tensors": _tensors(step.model),
            "optimizers": [_optimizer(optimizer) for optimizer in step.optimizers],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Expect these fingerprints at the next step."""
        self._saved = state

    def before_optimizer(self, step: TrainingStep, optimizer: Optimizer) -> None:
        saved, self._saved = self._saved, None
        if saved is None:
            return
        now = self.state(step)
        # Passes between the resume and the step update running statistics.
        buffers = {name for name, _ in step.model.named_buffers()}
        wrong = [
            name
            for name, value in saved["tensors"].items()
            if name not in buffers and now["tensors"].get(name, value) != value
        ]
        if wrong:
            step.report(
                StepFinding(
                    code="not restored",
                    tensor=wrong[0],
                    others=tuple(wrong[1:]),
                    message=f"{name_tensors(wrong)} is not what the checkpoint was saved with: it was "
                    "not restored. Was a "
                    "key missing and strict=False?",
                )
            )
        for one, before, after in zip(step.optimizers, saved["optimizers"], now["optimizers"], strict=False):
            self._compare(step, type(one).__name__, before, after)

    def _compare(self, step: TrainingStep, name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        if before["count"] != after["count"] or before["tensors"] != after["tensors"]:
            step.report(
                StepFinding(
                    code="not restored",
                    message=f"The state of {name} is not what the checkpoint was saved with: its step count was "
                    f"{before['count']:g} and is {after['count']:g}. Load the optimizer's state_dict as well.",
                )
            )


def _tensors(model: nn.Module) -> dict[str, int]:
    named = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    plain = {name: t for name, t in named.items() if is_plain(t) and not hasattr(t, "device_mesh")}
    return dict(zip(plain, fingerprints(list(plain.values())).tolist(), strict=True))


def _optimizer(optimizer: Optimizer) -> dict[str, Any]:
    states = [optimizer.state[p] for p in grouped_parameters(optimizer) if p in optimizer.state]
    tensors = [
        value
        for state in states
        for key, value in sorted(state.items())
        if key != "step" and isinstance(value, Tensor) and is_plain(value) and not hasattr(value, "device_mesh")
    ]
    counts = [state.get("step") for state in states]
    readable = [float(one) for one in counts if one is not None and (not isinstance(one, Tensor) or on_host(one))]
    return {"count": max(readable, default=0.0), "tensors": fingerprints(tensors).tolist()}
