"""Are the labels the tokens to come, and are they hidden? Shifted labels, missing causal masks, mixed sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from conserved.auditing.replay import RandomState, alone, state_kept
from conserved.boundary import Boundary, Hook
from conserved.tracking.identities.finding import StepFinding
from conserved.tracking.identities.step_identity import StepIdentity, TrainingStep, tensors_in

_SEQUENCES = 2
"""Sequences of a batch that are looked at and run again."""

_LEAST = 8
"""Labels that have to agree with tokens before anything follows from it."""

_VISIBLE = 1e-4
"""The change of logits, relative to the largest, from which on they depend on a token."""


@dataclass(frozen=True, slots=True, eq=False)
class _Labels:
    """Labels of the first sequences, read off the gradient of the logits."""

    labels: Tensor
    used: Tensor
    """Positions that the loss looks at."""


class TokenLabels(StepIdentity):
    """Reads labels off the gradient of logits, compares them with the tokens, and tests what logits depend on.

    The gradient of cross-entropy is negative at the label alone. If labels are the tokens one position on, logits must
    not depend on the next token: two sequences are run again with one token changed. That happens once in a run.
    """

    name = "labels"

    def __init__(self) -> None:
        self._done = False
        self._labels: list[_Labels] = []
        self._handles: list[Any] = []

    def after_forward(self, step: TrainingStep, module: nn.Module, outputs: Any) -> None:
        if self._done or not torch.is_grad_enabled():
            return
        shapes = {tuple(x.shape) for x in _token_inputs(step)}
        for output in list(tensors_in(outputs))[:4]:
            for batch, length in shapes:
                if (
                    output.requires_grad
                    and output.ndim in (2, 3)
                    and tuple(output.shape[:-1])
                    in (
                        (batch, length),
                        (batch * length,),
                    )
                ):
                    keep = partial(self._keep, length)
                    self._handles.append(output.register_hook(Hook(Boundary(logs=False), "labels", keep)))
                    break

    def _keep(self, length: int, gradient: Tensor) -> None:
        rows = gradient.detach().reshape(-1, gradient.shape[-1])[: _SEQUENCES * length]
        lowest, labels = rows.min(-1)
        self._labels.append(_Labels(labels.view(-1, length).cpu(), (lowest < 0).view(-1, length).cpu()))

    def with_gradients(self, step: TrainingStep, optimizer: Optimizer) -> None:
        self.close(step)
        pairs, self._labels = self._labels, []
        if self._done or not pairs:
            return
        self._done = True
        tokens = _token_inputs(step)
        shifts = [(x, labels, shift) for labels in pairs for x in tokens for shift in _shifts(x, labels)]
        # Heads that predict several tokens ahead stand beside one that predicts the next.
        if any(shift == 1 for _, _, shift in shifts):
            shifts = [row for row in shifts if row[2] == 1]
        if not shifts and any(_is_transposed(x, labels) for labels in pairs for x in tokens):
            step.report(
                StepFinding(
                    code="labels",
                    certain=True,
                    message="Labels are in another order than logits: flattened, they are the next tokens with time "
                    "before batch, and logits are not. Transpose one of them before flattening.",
                )
            )
        for x, labels, shift in shifts[:1]:
            changed, placed = _dependence(step, x)
            if changed is not None:
                findings = list(_judge(changed, labels.used, shift))
                if placed and not findings:
                    findings.append(
                        StepFinding(
                            code="labels",
                            message="Logits of a sequence depend on its place in the batch: two sequences that change "
                            "places do not change their logits with them. Are positions added along the batch?",
                        )
                    )
                for finding in findings:
                    step.report(finding)
                if shift == 0 and not bool(changed[:, :-1].any()):
                    step.notes.append("labels are the inputs themselves, not the next tokens")

    def close(self, step: TrainingStep) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _token_inputs(step: TrainingStep) -> list[Tensor]:
    """Return inputs that may be tokens: whole numbers, a row for each sequence."""
    whole = (torch.int64, torch.int32)
    return [x for x in step.inputs if x.dtype in whole and x.ndim == 2 and x.shape[1] >= 4]


def _shifts(x: Tensor, read: _Labels) -> Iterator[int]:
    """Yield by how many positions labels are ahead of tokens."""
    tokens = x[:_SEQUENCES].cpu()
    if tokens.shape != read.labels.shape:
        return
    length = tokens.shape[1]
    for shift in (1, 0, 2, -1):
        # Of labels that are behind, the first has no token.
        ahead, behind = max(shift, 0), max(-shift, 0)
        used = read.used[:, behind : length - ahead]
        labels, goals = read.labels[:, behind : length - ahead][used], tokens[:, ahead : length - behind][used]
        if len(labels) >= _LEAST and len(goals.unique()) > 2 and torch.equal(labels, goals):
            yield shift
            return


def _is_transposed(x: Tensor, read: _Labels) -> bool:
    """Return whether labels are the next tokens if they are read with time before batch."""
    batch, length = x.shape
    labels, used = read.labels.flatten(), read.used.flatten()
    index = torch.arange(len(labels))
    known = used & (index // batch + 1 < length)
    if batch < 2 or int(known.sum()) < _LEAST:
        return False
    goals = x.cpu()[index[known] % batch, index[known] // batch + 1]
    return len(goals.unique()) > 2 and torch.equal(labels[known], goals)


def _dependence(step: TrainingStep, x: Tensor) -> tuple[Tensor | None, bool]:
    """Return which logits of two sequences change with the last token of the first, None if that cannot be asked.

    The second value is whether two sequences that change places do not change their logits with them.
    """
    args, kwargs = step.arguments
    plain = (Tensor, int, float, bool, str, type(None))
    # Caches that a pass fills, compiled parts and sharded parameters are not run once more.
    if not alone() or not all(isinstance(value, plain) for value in (*args, *kwargs.values())):
        return None, False
    if any(hasattr(m, "_orig_mod") for m in step.model.modules()) or any(
        hasattr(p, "full_tensor") for p in step.model.parameters()
    ):
        return None, False
    batch = x.shape[0]
    other = x[:_SEQUENCES].clone()
    different = other[other != other[0, -1]]
    if not len(different):
        return None, False
    other[0, -1] = different[0]

    def part(value: Any) -> Any:
        return value[:_SEQUENCES] if isinstance(value, Tensor) and value.ndim and value.shape[0] == batch else value

    def logits(change: Callable[[Any], Any]) -> Tensor | None:
        outputs = step.model(*map(change, args), **{key: change(value) for key, value in kwargs.items()})
        candidates = [o for o in tensors_in(outputs) if o.ndim > 1 and o.numel() % other.numel() == 0]
        return candidates[0].reshape(*other.shape, -1).double() if candidates else None

    def swapped(value: Any) -> Any:
        rows = part(value)
        return rows.flip(0) if isinstance(value, Tensor) and value.ndim and value.shape[0] == batch else rows

    drawn = RandomState.now()
    with _paused(step), state_kept(step.model), torch.no_grad():
        before = logits(part)
        random = not drawn.same_as(RandomState.now())
        drawn.restore()
        after = logits(lambda value: other if value is x else part(value))
        if before is None or after is None:
            return None, False
        limit = _VISIBLE * before.abs().max()
        drawn.restore()
        again = logits(part)
        if again is None or bool((again - before).abs().max() > limit):
            # A model that keeps a state from pass to pass is another one each time.
            return None, False
        exchanged = logits(swapped) if batch >= _SEQUENCES and not random else None
        # Experts of limited capacity drop some tokens by their place; positions along the batch change all.
        placed = exchanged is not None and bool(((exchanged.flip(0) - before).abs().amax(-1) > limit).all())
    return ((before - after).abs().amax(-1) > limit).cpu(), placed


@contextmanager
def _paused(step: TrainingStep) -> Iterator[None]:
    step.paused = True
    try:
        yield
    finally:
        step.paused = False


def _judge(changed: Tensor, used: Tensor, shift: int) -> Iterator[StepFinding]:
    """Yield what is wrong, given which logits change with the last token of the first sequence."""
    early = changed[0, :-1] & used[0, :-1]
    if shift == 1 and bool(early.any()):
        yield StepFinding(
            code="labels",
            certain=True,
            message="The model sees the tokens it has to predict: labels are the next tokens, and logits of earlier "
            f"positions ({int(early.sum())} of {len(early)}) change with the last one. Is the causal mask missing, "
            "inverted or transposed?",
        )
    elif shift == -1:
        yield StepFinding(
            code="labels",
            certain=True,
            message="Labels are the tokens before, not the next ones: every position is asked for the token that it "
            "was just given. Were inputs and labels shifted the wrong way?",
        )
    elif len(changed) > 1 and bool(changed[1, -1]) and not bool(changed[:, :-1].any()):
        yield StepFinding(
            code="labels",
            message="Sequences of a batch see each other: a token of one changes the logits of another at the same "
            "position. Does a layer expect (time, batch, …)? Set batch_first=True.",
        )
    elif shift == 2 and not bool(changed[:, :-1].any()) and bool(changed[0, -1]):
        yield StepFinding(
            code="labels",
            certain=True,
            message="The labels are shifted twice: every position is asked for the token after the next. Does the "
            "model or the loss shift labels that were shifted already?",
        )
