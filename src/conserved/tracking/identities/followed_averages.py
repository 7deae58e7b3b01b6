"""Do averages follow the model? Copies of it that are written to in every step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from conserved._torch_compat import BatchNormBase
from conserved.symmetry.view import local
from conserved.tracking.identities.finding import StepFinding
from conserved.tracking.identities.run_objects import RunObjects
from conserved.tracking.identities.step_identity import StepIdentity, TrainingStep, is_plain, on_host

_COARSE = 1e-3
_MOVED = 0.25
"""The share of entries of a coarse average that move in a step, below which it swallows its updates."""

_FOLLOWED = 1e-6
"""The share of its way to the model that an average goes in a step, below which it does not follow the model."""

_FOLLOWING = 3
"""Steps in which a copy has to be averaged before being equal to the model says that it was overwritten."""

_APART = 1e-3
"""How far, relative to the weights, a model has to be from its average before that is asked."""


_NEVER = 5
"""Steps after which a run says at its end that an averaged model was never updated."""

_BEGINNING, _LEAST_ENTRIES, _UNRELATED = 4, 64, 0.5
"""Steps in which a copy may be seen to begin apart; entries of a matrix that is asked; the cosine it has to stay below.

Two draws of 64 entries have a cosine above 0.5 once in 30,000.
"""


class FollowedAverages(StepIdentity):
    """Compares averages of the model, of which nobody tells a monitor, with the model that they should follow."""

    name = "averages"

    def __init__(self) -> None:
        self._stepped = False
        """Whether an optimizer made a step since the last one."""
        self._averaged: dict[int, tuple[int, float]] = {}
        self._copied: dict[int, tuple[int, Tensor, Tensor]] = {}
        """By copy of the model, how often it was written to, and entries of it and of the model."""
        self._standing: dict[int, int] = {}
        self._following: dict[int, int] = {}
        """By copy, steps in a row in which it moved and was not equal to the model."""
        self._overwritten: set[int] = set()
        self._apart: set[int] = set()
        """Copies that began at other weights than the model."""
        self._stale: set[int] = set()
        """Copies whose running statistics were reported."""

    def after_optimizer(self, step: TrainingStep, optimizer: Optimizer) -> None:
        self._stepped = True

    def after_step(self, step: TrainingStep) -> None:
        if step.objects is not None and step.thorough:
            self._look_at_averages(step, step.objects)
            self._look_at_copies(step, step.objects)
        self._stepped = False

    def close(self, step: TrainingStep) -> None:
        """Note averaged models that were there from the start and were never updated."""
        alive = [] if step.objects is None else [reference() for reference in step.objects.averages]
        if step.number > _NEVER and any(int(getattr(average, "n_averaged", 1)) == 0 for average in alive):
            step.notes.append(f"AveragedModel was never updated in {step.number - 1} steps")

    def _look_at_copies(self, step: TrainingStep, objects: RunObjects) -> None:
        """Report a copy of the model that is written to in every step and does not come nearer to the model."""
        for index, reference in enumerate(objects.copies):
            copy = reference()
            if copy is None or any(p.grad is not None for p in copy.parameters()):
                # What has gradients is trained, and not an average.
                continue
            pairs = [
                (a, b)
                for a, b in zip(copy.parameters(), step.model.parameters(), strict=False)
                if is_plain(a) and is_plain(b) and a.shape == b.shape and on_host(a) and a is not b
            ]
            version = sum(a._version for a, _ in pairs)
            entries = torch.cat([*(_entries(a) for a, _ in pairs), torch.zeros(0)])
            own = torch.cat([*(_entries(b) for _, b in pairs), torch.zeros(0)])
            before = self._copied.get(index)
            self._copied[index] = (version, entries, own)
            if before is None and any(_one_memory(a, b) for a, b in pairs):
                step.report(
                    StepFinding(
                        code="average",
                        message="A copy of the model shares its memory with the model and is always equal to it: "
                        "was it loaded with assign=True, or made without copy.deepcopy()?",
                    )
                )
            if before is None or version == before[0] or len(entries) != len(before[1]) or not self._stepped:
                continue
            self._look_at_beginning(step, index, before, pairs)
            self._look_at_statistics(step, index, copy)
            self._look_at_overwritten(step, index, before, entries, own)
            way, gone = own - before[1], entries - before[1]
            moving = way != 0
            coarse = any(torch.finfo(a.dtype).eps > _COARSE for a, _ in pairs)
            swallowed = coarse and float((gone[moving] != 0).double().mean()) < _MOVED
            far = float(way.norm()) > _APART * float(own.norm())
            stands = far and float(gone @ way) < _FOLLOWED * float(way @ way)
            count = self._standing[index] = self._standing.get(index, 0) + 1 if swallowed or stands else 0
            if count == 2:
                cause = (
                    f"its {str(pairs[0][0].dtype).removeprefix('torch.')} is too coarse for such small changes"
                    if swallowed and not stands
                    else "is its decay 1, or is it averaged with itself?"
                )
                step.report(
                    StepFinding(
                        code="average",
                        # Decays rise to one at the end of some schedules.
                        certain=step.number <= _BEGINNING and float(gone.norm()) <= _FOLLOWED * float(entries.norm()),
                        step=step.number - 1,
                        message="A copy of the model is written to in every step, as an average is, "
                        "and does not follow "
                        f"the model: {cause}",
                    )
                )

    def _look_at_beginning(
        self, step: TrainingStep, index: int, before: tuple[int, Tensor, Tensor], pairs: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        """Report a copy that is averaged with the model and did not begin as the model did.

        Matrices of two initialisations have nothing of each other; gains and biases may all be equal.
        """
        if step.number > _BEGINNING or index in self._apart:
            return
        matrices = [(_entries(a), _entries(b)) for a, b in pairs if a.ndim > 1 and a.numel() >= _LEAST_ENTRIES]
        cosines = [float(torch.cosine_similarity(a, b, 0)) for a, b in matrices if a.any() and b.any()]
        if cosines and max(cosines) < _UNRELATED:
            self._apart.add(index)
            step.report(
                StepFinding(
                    code="average",
                    step=step.number - 1,
                    message="A copy of the model is averaged with it in every step and began at other weights: it was "
                    "initialised by itself. Load the state dict of the model into it before training.",
                )
            )

    def _look_at_overwritten(
        self, step: TrainingStep, index: int, before: tuple[int, Tensor, Tensor], entries: Tensor, own: Tensor
    ) -> None:
        """Remark that an average has followed the model at a distance and is a copy of it all at once.

        A copy that is made equal every few steps, as a target network is, never was anything else.
        """
        _, former, model_then = before
        if not torch.equal(entries, own) and not torch.equal(entries, model_then):
            follows = bool((entries != former).double().mean() > _MOVED)
            self._following[index] = self._following.get(index, 0) + 1 if follows else 0
        elif self._following.get(index, 0) >= _FOLLOWING and index not in self._overwritten:
            self._overwritten.add(index)
            step.notes.append(f"an average of the model was set to the model itself before step {step.number}")

    def _look_at_statistics(self, step: TrainingStep, index: int, average: nn.Module) -> None:
        """Report an average in eval mode whose batch norms have the statistics of before training."""
        pairs = zip(average.modules(), step.model.modules(), strict=False)
        norms = [(a, b) for a, b in pairs if isinstance(a, BatchNormBase) and isinstance(b, BatchNormBase)]
        counts = [(a.num_batches_tracked, b.num_batches_tracked) for a, b in norms]
        known = [(a, b) for a, b in counts if a is not None and b is not None and on_host(a) and on_host(b)]
        if average.training or not known or index in self._stale:
            return
        if all(int(a) == 0 < int(b) for a, b in known):
            self._stale.add(index)
            step.report(
                StepFinding(
                    code="average",
                    message="A copy of the model is written to in every step, as an average is, and is in eval mode "
                    "with running statistics of before training in its batch norms. Copy the buffers as well, or "
                    "call update_bn before evaluating.",
                )
            )

    def _look_at_averages(self, step: TrainingStep, objects: RunObjects) -> None:
        """Report an averaged model that is updated and does not move though this model does."""
        for index, reference in enumerate(objects.averages):
            average = reference()
            if average is None or not hasattr(average, "n_averaged"):
                continue
            pairs = list(zip(average.module.parameters(), step.model.parameters(), strict=False))
            if not pairs or any(a.shape != b.shape for a, b in pairs) or not on_host(pairs[0][0]):
                continue
            count = int(average.n_averaged)
            total = float(sum(a.detach().double().abs().sum() for a, _ in pairs))
            before = self._averaged.get(index)
            self._averaged[index] = (count, total)
            if before is not None and count > before[0] >= 1 and total == before[1] and self._stepped:
                apart = any(not torch.equal(a, b) for a, b in pairs)
                if apart:
                    step.report(
                        StepFinding(
                            code="average",
                            certain=True,
                            message=f"The averaged model was updated in step {step.number} and did "
                            "not move, though the "
                            "model did. Is its decay 1, or is it averaged with itself?",
                        )
                    )


def _one_memory(a: Tensor, b: Tensor) -> bool:
    return a is not b and a.numel() > 1 and a.data_ptr() == b.data_ptr() != 0


def _entries(tensor: Tensor) -> Tensor:
    values = local(tensor.detach()).reshape(-1)
    return values[:: max(1, values.numel() // 256)].double()
