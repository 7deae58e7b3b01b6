"""Is the optimizer's state what its last step left? Moments that are lost, cleared or corrupted between two steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from conserved.symmetry.view import local
from conserved.tracking.identities.entry_samples import EntrySample
from conserved.tracking.identities.finding import StepFinding, name_tensors
from conserved.tracking.identities.step_identity import (
    StepIdentity,
    TrainingStep,
    grouped_parameters,
    is_plain,
)

_ENTRIES = 1 << 12
"""Entries of the whole state that are read in one step."""


_CONVERTED = 2.0**-6
"""How far entries may be from those before, relative to the largest, where a state was converted to bfloat16."""


@dataclass(slots=True, eq=False)
class _State:
    """Entries of an optimizer's state after a step."""

    labels: list[tuple[str, str]]
    """Name of the parameter and key of each tensor."""
    sample: EntrySample
    after: Tensor
    tensors: list[int]
    """The identities of everything in the state."""


class KeptState(StepIdentity):
    """Compares a sample of the optimizer's state after a step with that before the next."""

    name = "optimizer state"
    free = False

    def __init__(self) -> None:
        self._states: dict[int, _State] = {}
        self._owners: dict[int, set[int]] = {}
        """By optimizer, the parameters that have state."""
        self._written: dict[int, set[str]] = {}
        """By optimizer, the tensors whose state was written to before the last step."""

    def restart(self) -> None:
        self._states.clear()
        self._written.clear()

    def before_optimizer(self, step: TrainingStep, optimizer: Optimizer) -> None:
        self._look_at_lost(step, optimizer)
        state = self._states.pop(id(optimizer), None)
        if state is None or step.slowed == step.number - 1:
            return
        if state.tensors != _state_ids(optimizer):
            self._look_at_replaced(step, optimizer, state)
            return
        now = state.sample.read()
        changed = ((state.after != now) & ~(state.after.isnan() & now.isnan())).double()
        counts = state.sample.sums(changed)
        sizes = (state.sample.largest(sample.nan_to_num(1.0)) for sample in (state.after, now))
        numbers = torch.stack((counts, *sizes), -1)
        step.read(numbers, lambda arrived: self._judge(arrived, state.labels, optimizer, step.number))

    def after_optimizer(self, step: TrainingStep, optimizer: Optimizer) -> None:
        if not step.thorough:
            return
        self._owners[id(optimizer)] = {id(p) for p in grouped_parameters(optimizer) if optimizer.state.get(p)}
        rows = list(_tensors(optimizer, step.names()))
        if rows:
            sample = EntrySample.of([t for _, _, t in rows], step.number, _ENTRIES)
            labels = [(name, key) for name, key, _ in rows]
            self._states[id(optimizer)] = _State(labels, sample, sample.read(), _state_ids(optimizer))

    def _judge(
        self, numbers: Tensor, labels: Sequence[tuple[str, str]], optimizer: Optimizer, number: int
    ) -> Iterator[StepFinding]:
        name = type(optimizer).__name__
        findings = list(_judge(numbers, labels, name))
        yield from findings
        before = self._written.get(id(optimizer), set())
        now = {tensor for (count, *_), (tensor, _) in zip(numbers.tolist(), labels, strict=True) if count}
        self._written[id(optimizer)] = now
        # What a program does to its state, as projecting or rounding it, it does to most tensors; what is reset is
        # reset once.
        twice = sorted(before & now)
        if twice and not findings and 4 * len(now) <= len({tensor for tensor, _ in labels}):
            self._written[id(optimizer)] = set()
            yield StepFinding(
                code="state written",
                tensor=twice[0],
                others=tuple(twice[1:]),
                step=number - 1,
                message=f"The state of {name} for {name_tensors(twice)} was written to between steps, twice in a row, "
                "and that of other tensors was not: a step begins from other moments than the last one left. Was an "
                "older copy of them put back?",
            )

    def _look_at_replaced(self, step: TrainingStep, optimizer: Optimizer, state: _State) -> None:
        """Report a state that other tensors with other numbers were put in the place of.

        What was moved or converted has the same numbers, up to the rounding of half precision.
        """
        rows = list(_tensors(optimizer, step.names()))
        if [(name, key) for name, key, _ in rows] != state.labels:
            return
        tensors = [tensor for *_, tensor in rows]
        if [tensor.shape for tensor in tensors] != [tensor.shape for tensor in state.sample.tensors]:
            return
        now = state.sample.read(tensors).to(state.after.device)
        apart = (now - state.after).abs() > _CONVERTED * state.sample.spread(state.sample.largest(state.after))
        numbers = state.sample.largest(apart.double())
        name, number = type(optimizer).__name__, step.number

        def decide(arrived: Tensor) -> Iterator[StepFinding]:
            other = [label for (label, _), flag in zip(state.labels, arrived.tolist(), strict=True) if flag]
            if 2 * len(other) > len(state.labels):
                yield StepFinding(
                    code="state written",
                    tensor=other[0],
                    others=tuple(dict.fromkeys(other[1:])),
                    message=f"The state of {name} was replaced before step {number}, and no state dict was loaded: the "
                    f"{state.labels[0][1]} of {name_tensors(list(dict.fromkeys(other)))} is another one than the last "
                    "step left.",
                )

        step.read(numbers, decide)

    def _look_at_lost(self, step: TrainingStep, optimizer: Optimizer) -> None:
        """Report parameters whose state is gone while that of others is there."""
        before = self._owners.pop(id(optimizer), set())
        own = [p for p in grouped_parameters(optimizer) if id(p) in before]
        lost = [p for p in own if not optimizer.state.get(p)]
        if lost and len(lost) < len(own):
            names = step.names()
            listed = [names[id(p)] for p in lost]
            step.report(
                StepFinding(
                    code="state lost",
                    tensor=listed[0],
                    others=tuple(listed[1:]),
                    message=f"The state of {type(optimizer).__name__} for {name_tensors(listed)} was lost before step "
                    f"{step.number}, while that of other tensors is kept.",
                )
            )


def _state_ids(optimizer: Optimizer) -> list[int]:
    """Return the identities of all values in the state of an optimizer's parameters."""
    states = [optimizer.state.get(p) for p in grouped_parameters(optimizer)]
    return [id(value) for state in states if state for value in state.values() if isinstance(value, Tensor)]


def _tensors(optimizer: Optimizer, names: dict[int, str]) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the moments of an optimizer's parameters: tensors of the parameter's shape, of one device."""
    device = None
    for p in grouped_parameters(optimizer):
        for key, value in optimizer.state.get(p, {}).items():
            if isinstance(value, Tensor) and value.shape == p.shape and is_plain(value) and local(value).numel() > 1:
                device = device or value.device
                if value.device == device:
                    yield names.get(id(p), ""), key, value


def _judge(numbers: Tensor, labels: Sequence[tuple[str, str]], optimizer: str) -> Iterator[StepFinding]:
    """Yield what was lost or changed by itself."""
    rows = [(int(n), bool(a), bool(b), *label) for (n, a, b), label in zip(numbers.tolist(), labels, strict=True)]
    cleared = [row for row in rows if row[1] and not row[2]]
    changed = [row for row in rows if row[0]]
    if cleared:
        listed = [name for *_, name, _ in cleared]
        yield StepFinding(
            code="state lost",
            tensor=listed[0],
            others=tuple(dict.fromkeys(listed[1:])),
            message=f"The state of {optimizer} was cleared between two steps: {cleared[0][4]} of "
            f"{name_tensors(list(dict.fromkeys(listed)))} is zero.",
        )
    elif len(changed) == 1 and changed[0][0] == 1:
        *_, name, key = changed[0]
        yield StepFinding(
            code="bits changed",
            tensor=name,
            message=f"One entry of {key} of {name}, the state of {optimizer}, changed between two "
            "steps: a bit flip, or a "
            "write from elsewhere.",
        )
