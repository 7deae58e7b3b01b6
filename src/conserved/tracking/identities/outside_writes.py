"""Does anything but the optimizer write to the weights? Weights between two steps, and frozen weights within one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from conserved.symmetry.view import local
from conserved.tracking.identities.entry_samples import EntrySample
from conserved.tracking.identities.finding import StepFinding, name_tensors
from conserved.tracking.identities.slow_weights import SlowWeights
from conserved.tracking.identities.step_identity import StepIdentity, TrainingStep, is_plain, is_shared, on_host

_SPACINGS = 16.0
"""Spacings of a tensor's largest weight that it may move without a step.

Sharpness-aware and schedule-free optimizers move weights away and back by sums, which leaves one or two.
"""

_COARSE = 1e-3
_COARSE_SPACINGS = 2.0
"""The same for weights whose spacing is above a thousandth of them, where sixteen would hide a change of a tenth."""

_CHECKSUMS = {"cpu": 1 << 18}
_MOST_CHECKSUMS = 1 << 21
"""Weights whose stored bits are added up in one step, in turns, by device: a processor adds 2¹⁸ in 0.1 ms."""


_BUFFER = 1 << 16
"""Entries of a buffer up to which its bits are added up."""

_FIRST = 3
"""Steps at the start, and after a write by the loop, in which weights are compared right after the step."""

_CONSTANT = 2
"""Steps for which a buffer has to be the same before a change is said."""


class OutsideWrites(StepIdentity):
    """Compares weights after a step with weights before the next one.

    A sample of entries says how they changed. A sum of the stored bits sees any single entry, for as many tensors a
    step as the budget allows.
    """

    name = "writes"
    question = "Does anything but the optimizer write to the weights?"
    free = False

    def __init__(self) -> None:
        self._sample: EntrySample | None = None
        self._after: Tensor | None = None
        self._trained: list[bool] = []
        self._names: list[str] = []
        self._kinds: list[torch.dtype] = []
        self._sums: list[tuple[str, Tensor, Tensor, int]] = []
        self._versions: list[int] = []
        self._turn = 0
        self._frozen: tuple[list[str], EntrySample, Tensor] | None = None
        self.notes: list[str] = []
        self._slow: SlowWeights | None = None
        self._buffers: dict[str, tuple[Tensor, Tensor, int]] = {}
        """Buffers, their checksums after the last step, and their versions."""
        self._constant: dict[str, int] = {}
        """Steps in a row for which a buffer has had the same bits."""
        self._counts: dict[str, int] = {}
        """By batch norm, how many batches it has seen."""

    def begin(self, step: TrainingStep) -> None:
        """Note the weights of the start, in the order in which they are remembered after a step."""
        held = step.held()
        tensors = [
            p for p in step.structure.parameters.values() if _comparable(p) and (id(p) in held or not p.requires_grad)
        ]
        if tensors and all(p.device == tensors[0].device for p in tensors):
            self._slow = SlowWeights(tensors)

    def restart(self) -> None:
        self._sample, self._after, self._sums, self._frozen = None, None, [], None

    def before_optimizer(self, step: TrainingStep, optimizer: Optimizer) -> None:
        self._compare(step)
        self._frozen = None
        if not step.structure.frozen:
            return
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        frozen = [(name, p) for name, p in step.structure.frozen if id(p) in held and _comparable(p)]
        if frozen:
            sample = EntrySample.of([p for _, p in frozen], step.number)
            self._frozen = ([name for name, _ in frozen], sample, sample.read())

    def after_optimizer(self, step: TrainingStep, optimizer: Optimizer) -> None:
        if self._frozen is not None:
            names, sample, before = self._frozen
            moved = sample.largest(sample.read() - before)
            step.read(moved, lambda arrived: _moved_frozen(arrived, names, type(optimizer).__name__))
        # Several optimizers may step one after the other: the last one counts.
        self.restart()
        if step.thorough:
            self._remember(step)
            self._remember_buffers(step)

    def with_gradients(self, step: TrainingStep, optimizer: Optimizer) -> None:
        """Look at buffers: those that never change, and the counts of running statistics."""
        for name, (buffer, old, version) in self._buffers.items():
            same = bool(_checksum(buffer) == old)
            silent = not same and buffer._version == version and self._constant.get(name, 0) >= _CONSTANT
            self._constant[name] = self._constant.get(name, 0) + 1 if same else 0
            if silent:
                step.report(
                    StepFinding(
                        code="bits changed",
                        tensor=name,
                        message=f"Stored bits of the buffer {name} changed before step {step.number}, and no operation "
                        "of torch wrote to it: a bit flip, or a write from elsewhere.",
                    )
                )
        self._buffers = {}
        counts = {
            name: int(m.num_batches_tracked)
            for name, m in step.structure.batch_norms
            if m.num_batches_tracked is not None and on_host(m.num_batches_tracked)
        }
        reset = [name for name, count in counts.items() if count < self._counts.get(name, 0)]
        self._counts = counts
        if reset:
            step.report(
                StepFinding(
                    code="statistics",
                    tensor=f"{reset[0]}.running_mean",
                    others=tuple(f"{name}.running_mean" for name in reset[1:]),
                    message=f"The running statistics of {name_tensors(reset)} were reset before step {step.number}: "
                    "evaluations use almost nothing of the run so far.",
                )
            )

    def _remember_buffers(self, step: TrainingStep) -> None:
        found = {
            name: b
            for name, b in step.model.named_buffers()
            if is_plain(b) and on_host(b) and 0 < b.numel() <= _BUFFER and not is_shared(b)
        }
        self._buffers = {name: (b, _checksum(b), b._version) for name, b in found.items()}

    def after_step(self, step: TrainingStep) -> None:
        """Look at once if something may have written to weights after the step.

        Versions say so, but for writes to `.data`, which loops that have such a habit make in every step.
        """
        habit = step.number <= _FIRST or step.rewritten >= step.number - _FIRST > 0
        if self._sample is not None and (habit or self._versions != [p._version for p in self._sample.tensors]):
            self._compare(step)
            if step.thorough:
                self._remember(step)

    def close(self, step: TrainingStep) -> None:
        self._compare(step)
        self.restart()

    def _remember(self, step: TrainingStep) -> None:
        # Trained tensors that no watched optimizer holds are moved by someone else, as copies of master weights are.
        held = step.held()
        pairs = [
            (name, p)
            for name, p in step.structure.parameters.items()
            if _comparable(p) and (id(p) in held or not p.requires_grad)
        ]
        if not pairs:
            return
        device = pairs[0][1].device
        pairs = [(name, p) for name, p in pairs if p.device == device]
        self._names, tensors = [name for name, _ in pairs], [p for _, p in pairs]
        self._trained, self._kinds = [p.requires_grad for p in tensors], [p.dtype for p in tensors]
        self._sample = EntrySample.of(tensors, step.number)
        self._after = self._sample.read()
        if self._slow is not None and self._slow.knows(tensors):
            self._slow.remember()
        else:
            self._slow = None
        self._versions = [p._version for p in tensors]
        left = _CHECKSUMS.get(device.type, _MOST_CHECKSUMS)
        for offset in range(len(pairs)):
            name, p = pairs[(self._turn + offset) % len(pairs)]
            if left < local(p).numel() and offset:
                break
            left -= local(p).numel()
            self._sums.append((name, p, _checksum(p), p._version))
        self._turn = (self._turn + len(self._sums)) % len(pairs)

    def _compare(self, step: TrainingStep) -> None:
        """Compare weights now with those after the last step."""
        sample, after, sums = self._sample, self._after, self._sums
        self.restart()
        if sample is None or after is None:
            return
        names, trained, kinds = self._names, self._trained, self._kinds
        if [p.dtype for p in sample.tensors] != kinds or any(
            not p.requires_grad and was for p, was in zip(sample.tensors, trained, strict=True)
        ):
            return
        if sum(local(p).numel() > 0 for p in sample.tensors) != len(sample.tensors):
            return
        now = sample.read()
        eps = torch.tensor([torch.finfo(kind).eps for kind in kinds], dtype=torch.float64, device=now.device)
        spacings = torch.where(eps > _COARSE, _COARSE_SPACINGS, _SPACINGS)
        allowed = spacings * eps * sample.largest(after)
        change = sample.largest(now - after)
        # In-place operations count up a tensor's version; what leaves it alone is not an operation of the loop.
        silent = [(name, p, old) for name, p, old, version in sums if p._version == version]
        flipped = torch.stack([_checksum(p) != old for _, p, old in silent]).to(now.device) if silent else now[:0] > 0
        checked = [name for name, _, _ in silent]
        numbers = torch.cat((change, allowed, flipped.double()))

        def decide(arrived: Tensor) -> Iterator[StepFinding]:
            count = len(names)
            rows = torch.stack((arrived[:count], arrived[count : 2 * count]), -1).tolist()
            written = [i for i, (value, limit) in enumerate(rows) if value > limit]
            bits = {name for name, other in zip(checked, arrived[2 * count :].tolist(), strict=True) if other}
            yield from self._judge(step, sample, after, now, written, bits, rows)

        step.read(numbers, decide)

    def _judge(
        self,
        step: TrainingStep,
        sample: EntrySample,
        after: Tensor,
        now: Tensor,
        written: Sequence[int],
        bits: set[str],
        rows: Sequence[Sequence[float]],
    ) -> Iterator[StepFinding]:
        names, trained = self._names, self._trained
        olds, news = sample.per_tensor(after), sample.per_tensor(now)
        free = [i for i in written if trained[i] and not _is_constraint(sample.tensors[i], olds[i], news[i])]
        frozen = [i for i in written if not trained[i]]
        if written and not free and any(trained[i] for i in written):
            self.notes.append(f"step {step.number}: weights are clamped or normalised after a step")
            step.rewritten = sample.number
        if len(free) == sum(trained) and self._slow is not None and self._slow.drawn_back():
            self.notes.append(f"step {step.number}: weights are drawn back to slow ones, as by Lookahead")
            step.rewritten = sample.number
            return
        if free:
            worst = max(free, key=lambda i: rows[i][0] / max(rows[i][1], 1e-300))
            listed = [names[i] for i in free if i != worst]
            where = name_tensors([names[worst], *listed])
            yield StepFinding(
                code="something else wrote",
                tensor=names[worst],
                others=tuple(listed),
                value=rows[worst][0],
                limit=rows[worst][1],
                message=f"Something else than the optimizer wrote to {where} between step "
                f"{sample.number} and the next: "
                f"{_describe(olds[worst], news[worst])}.",
            )
        elif frozen and 2 * len(frozen) <= sum(not t for t in trained):
            # An averaged teacher inside the model moves all of its weights.
            where = name_tensors([names[i] for i in frozen])
            yield StepFinding(
                code="frozen moved",
                tensor=names[frozen[0]],
                others=tuple(names[i] for i in frozen[1:]),
                message=f"{where} has requires_grad=False and changed after step {sample.number}: "
                "what is frozen moved.",
            )
        elif not written and len(bits) == 1 and trained[names.index(next(iter(bits)))]:
            (name,) = bits
            yield StepFinding(
                code="bits changed",
                tensor=name,
                message=f"Stored bits of {name} changed between step {sample.number} and the next, in entries that are "
                "few or small. No step was made in between: a bit flip, or a write from elsewhere.",
            )


def _comparable(parameter: Tensor) -> bool:
    return is_plain(parameter) and not is_shared(parameter) and local(parameter).numel() > 0


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _checksum(parameter: Tensor) -> Tensor:
    """Return the sum of the stored bits as integers: exact in any order, changed by any one entry."""
    values = local(parameter.detach())
    if not values.is_contiguous():
        values = values.contiguous()
    return values.view(_INTEGERS.get(values.element_size(), torch.int8)).sum()


def _moved_frozen(moved: Tensor, names: Sequence[str], optimizer: str) -> Iterator[StepFinding]:
    listed = [name for name, value in zip(names, moved.tolist(), strict=True) if value > 0]
    if listed:
        yield StepFinding(
            code="frozen moved",
            tensor=listed[0],
            others=tuple(listed[1:]),
            message=f"{name_tensors(listed)} is frozen (requires_grad=False) and {optimizer} moved it: it still has a "
            "gradient, momentum or weight decay. Set its .grad to None, or take it out of the optimizer.",
        )


def _is_constraint(tensor: Tensor, old: Tensor, new: Tensor) -> bool:
    """Return whether a write looks like a constraint that a loop puts on its weights: clamped, normed or centred."""
    changed = new != old
    values = new[changed].abs()
    if int(changed.sum()) > 1 and bool((values == new.abs().max()).all()):
        return True
    whole = local(tensor.detach()).double()
    if whole.ndim < 2:
        return False
    for dim in (0, 1):
        rows = whole.transpose(0, dim).flatten(1)
        norms = rows.norm(dim=1)
        if len(norms) > 1 and bool(((norms - norms.max()).abs() <= 1e-5 * norms.max()).float().mean() > 0.5):
            return True
        if len(norms) > 1 and bool((rows.sum(1).abs() <= 1e-5 * rows.abs().sum(1)).all()):
            return True
    return False


def _describe(old: Tensor, new: Tensor) -> str:
    """Return how a tensor's sampled entries changed."""
    changed = int((new != old).sum())
    if not bool(torch.isfinite(new).all()):
        return "there are values that are not finite"
    if changed == 1 and len(old) > 1:
        place = int((new != old).nonzero()[0])
        return f"one entry went from {float(old[place]):.4g} to {float(new[place]):.4g}"
    if not bool(new.any()):
        return "all of it is zero now"
    factor = float((old @ new) / (old @ old).clamp_min(1e-300))
    if bool((new - factor * old).norm() <= 1e-4 * (new - old).norm()):
        return f"all of it was multiplied by {factor:.6g}, as by a second weight decay"
    return f"{changed} of {len(old)} entries that were compared changed"
