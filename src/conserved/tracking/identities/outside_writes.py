"""Does anything but the optimizer write to the weights? Weights between two steps, and frozen weights within one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from conserved._torch_compat import version_of
from conserved.symmetry.view import local
from conserved.tracking.identities.entry_samples import EntrySample
from conserved.tracking.identities.finding import StepFinding, name_tensors
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

_SAMPLED = 32
"""Entries of a weight that say whether all moved towards slow weights."""

_MARKED = 2
"""Tensors of every group whose versions are read in every step."""

_SLOW = 0.95
"""The largest share of the way from slow weights that is left after going back to them."""

_FIRST = 8
"""Steps in which weights are compared again when the step ends, whatever their versions say: `.data` has none."""

_CONSTANT = 2
"""Steps for which a buffer has to be the same before a change is reported."""


@dataclass(slots=True, eq=False)
class _Change:
    """The change of the sampled weights between two steps."""

    sample: EntrySample
    old: tuple[Tensor, ...]
    new: tuple[Tensor, ...]
    written: list[int]
    """Places of trained tensors that changed and were not clamped or normed."""

    def is_entry(self, index: int) -> bool:
        """Return whether one entry alone changed, and was not clamped."""
        changed = self.new[index] != self.old[index]
        if int(changed.sum()) != 1 or len(changed) == 1:
            return False
        old, new = (float(values[changed].abs()) for values in (self.old[index], self.new[index]))
        return not (new < old and new == float(self.new[index].abs().max()))

    def factor(self, index: int) -> float | None:
        """Return the number that a whole tensor was multiplied by; None if it was not."""
        old, new = self.old[index], self.new[index]
        factor = float((old @ new) / (old @ old).clamp_min(1e-300))
        return factor if factor and bool((new - factor * old).norm() <= 1e-4 * (new - old).norm()) else None


class OutsideWrites(StepIdentity):
    """Compares weights after a step with weights before the next one.

    A sample of entries says how they changed. A sum of the stored bits sees any single entry, for as many tensors a
    step as the budget allows.

    Many programs write to their weights by themselves, step after step: they clamp, mask, project, add noise, decay.
    So a write is held for one look. What comes again in the next one is a habit of the program and is remarked; what
    does not is reported. Not held is what no program means: one entry alone, values that are not finite, and a factor
    on weights that an optimizer decays already or inside a forward pass. Slow weights that a loop goes back to, as
    Lookahead's, are recognised by their formula: all weights move by one factor towards where they once were. Weights
    that processes average now and then are recognised by the gradients between, which agree with those of no process.
    """

    name = "writes"
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
        self._buffers: dict[str, tuple[Tensor, Tensor, int]] = {}
        """Buffers, their checksums after the last step, and their versions."""
        self._constant: dict[str, int] = {}
        """Steps in a row for which a buffer has had the same bits."""
        self._counts: dict[str, int] = {}
        """By batch norm, how many batches it has seen."""
        self._held: StepFinding | None = None
        """A write that may be a habit of the program."""
        self._held_most = False
        """Whether that write changed most of the trained tensors, as averaging over processes does."""
        self._averaged: set[str] = set()
        """Frozen weights that were seen to move together, as those of an averaged teacher."""
        self._habit = False
        """Whether the program writes to its weights by itself."""
        self._silent = False
        """Whether bits of weights were seen to change without an operation of torch."""
        self._slow: tuple[Sequence[Tensor], list[Tensor]] | None = None
        """Weights, and entries of them when watching began or when they were last moved towards these."""
        self._fast: Tensor | None = None
        """The same entries after the last step."""
        self._forward: list[int] | None = None
        """Versions of weights when a forward pass began."""
        self._in_forward = False
        self._constrained = False
        """Whether the program clamps, norms or averages its weights after steps."""
        self._marked: list[Tensor] = []
        self._marks: list[int] = []
        """Some weights of every group, and their versions after the last step."""
        self._unstepped: dict[int, Tensor] = {}
        """By trained tensor, entries before the step; all of them where the last update was written over."""
        self._undone: set[int] = set()
        """Tensors that were written back after their last update to what they were before it."""
        self._reported_undone = False
        self._unseen = False
        """Whether something wrote to them in a step that was not looked at."""

    def restart(self) -> None:
        self._sample, self._after, self._sums, self._frozen = None, None, [], None
        self._marked, self._marks = [], []

    def begin(self, step: TrainingStep) -> None:
        weights = [p for p in step.structure.parameters.values() if p.requires_grad and _comparable(p) and on_host(p)]
        # Weights on a device are not read here: that would wait for it.
        self._slow = (weights, [_some(p).clone() for p in weights]) if weights else None

    def before_forward(self, step: TrainingStep, module: nn.Module) -> None:
        self._forward = None if self._sample is None else [version_of(p) for p in self._sample.tensors]

    def after_forward(self, step: TrainingStep, module: nn.Module, outputs: Any) -> None:
        if self._sample is not None and self._forward is not None:
            self._in_forward |= self._forward != [version_of(p) for p in self._sample.tensors]

    def before_optimizer(self, step: TrainingStep, optimizer: Optimizer) -> None:
        if self._sample is None and self._marks != [version_of(p) for p in self._marked]:
            # Written to in a step that was not looked at: slow weights are not where they were.
            self._unseen, self._slow = True, None
        self._compare(step)
        if step.thorough and not self._reported_undone:
            stepped = [p for group in optimizer.param_groups for p in group["params"]]
            self._unstepped |= {id(p): self._entries(p).clone() for p in stepped if _comparable(p) and on_host(p)}
        self._frozen = None
        if not step.structure.frozen:
            return
        optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
        frozen = [(name, p) for name, p in step.structure.frozen if id(p) in optimized and _comparable(p)]
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
        self._marked = [p for group in optimizer.param_groups for p in group["params"][:_MARKED]]
        self._marks = [version_of(p) for p in self._marked]
        if step.thorough:
            self._remember(step)
            self._remember_buffers(step)

    def with_gradients(self, step: TrainingStep, optimizer: Optimizer) -> None:
        """Look at buffers: those that never change, and the counts of running statistics."""
        batches = _batch_counts(step) if self._buffers else {}
        for name, (buffer, old, version) in self._buffers.items():
            same = bool(_checksum(buffer) == old)
            writes = version_of(buffer) + batches.get(name, 0)
            silent = not same and writes == version and self._constant.get(name, 0) >= _CONSTANT
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

    def _entries(self, parameter: Tensor) -> Tensor:
        return local(parameter.detach()).reshape(-1) if id(parameter) in self._undone else _some(parameter)

    def _look_at_undone(self, tensors: dict[str, Tensor], trained: int, number: int) -> Iterator[StepFinding]:
        """Yield tensors that are written back after two updates in a row, while others keep theirs.

        Who rejects a step restores all tensors, and who trains a part of one restores the rest of it.
        """
        undone = {}
        for name, p in tensors.items():
            before, now = self._unstepped.get(id(p)), self._entries(p)
            if before is not None and before.shape == now.shape and torch.equal(before, now):
                undone[id(p)] = name
        again = [name for key, name in undone.items() if key in self._undone]
        self._undone = set(undone)
        if again and len(undone) < trained and not self._reported_undone:
            self._reported_undone, self._unstepped = True, {}
            yield StepFinding(
                code="did not land",
                certain=False,
                tensor=again[0],
                others=tuple(again[1:]),
                step=number,
                message=f"The update of {name_tensors(again)} does not last: after every step of the optimizer "
                f"{'it is' if len(again) == 1 else 'they are'} written back to what was there before. Set "
                "requires_grad=False if that is meant.",
            )

    def _remark(self, step: TrainingStep, subject: str) -> None:
        step.remark("weights", f"they are {subject} besides the optimizer's steps, which are not accounted for then")

    def _moves_to_slow_weights(self) -> bool:
        """Return whether all weights have moved by one factor towards where they once were, and begin there again."""
        if self._slow is None:
            return False
        weights, before = self._slow
        now, old = torch.cat([_some(p) for p in weights]).double(), torch.cat(before).double()
        if self._fast is None or len(self._fast) != len(now) or len(now) != len(old):
            return False
        way = self._fast - old
        factor = float((way @ (now - old)) / (way @ way).clamp_min(1e-300))
        off, moved = float((now - old - factor * way).norm()), float((now - self._fast).norm())
        rounding = max(torch.finfo(p.dtype).eps for p in weights) * float(now.norm())
        if off <= min(max(1e-3 * moved, rounding), 0.5 * moved) and 0 <= factor <= _SLOW:
            self._slow = (weights, [_some(p).clone() for p in weights])
            return True
        return False

    def _cannot_be_meant(self, step: TrainingStep, change: _Change, *, inside: bool) -> bool:
        """Return whether a write is stated at once: few programs make it on purpose, and not as a habit."""
        if self._comes_from_no_program(change) or _rounding(change) is not None:
            return True
        factors = [change.factor(i) for i in change.written]
        if any(factor is None for factor in factors):
            return False
        if any(factor is not None and factor > 1 for factor in factors):
            return True
        decays = {
            id(p): group.get("weight_decay", 0)
            for optimizer in step.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }
        return inside or any(decays.get(id(change.sample.tensors[i])) for i in change.written)

    def _comes_from_no_program(self, change: _Change) -> bool:
        """Return whether one entry alone was written to, or values that are not finite were written."""
        if len(change.written) == 1 and change.is_entry(change.written[0]):
            return True
        return any(not bool(torch.isfinite(change.new[i]).all()) for i in change.written)

    def _describe(self, change: _Change, rows: Sequence[Sequence[float]]) -> StepFinding:
        coarse = _rounding(change)
        worst = max(change.written, key=lambda i: rows[i][0] / max(rows[i][1], 1e-300))
        listed = [self._names[i] for i in change.written if i != worst]
        number = change.sample.number
        return StepFinding(
            code="something else wrote",
            tensor=self._names[worst],
            others=tuple(listed),
            value=rows[worst][0],
            limit=rows[worst][1],
            step=number,
            certain=self._comes_from_no_program(change),
            message=f"Something else than the optimizer wrote to {name_tensors([self._names[worst], *listed])} between "
            f"step {number} and the next: "
            + (
                f"{_describe(change.old[worst], change.new[worst])}."
                if coarse is None
                else f"all of it was rounded to {str(coarse).removeprefix('torch.')}, and updates below its "
                "spacing are lost."
            ),
        )

    def _remember_buffers(self, step: TrainingStep) -> None:
        buffers = {
            name: b
            for name, b in step.model.named_buffers()
            if is_plain(b) and on_host(b) and 0 < b.numel() <= _BUFFER and not is_shared(b)
        }
        counts = _batch_counts(step)
        self._buffers = {name: (b, _checksum(b), version_of(b) + counts.get(name, 0)) for name, b in buffers.items()}

    def after_step(self, step: TrainingStep) -> None:
        """Look at once in the first steps, and if the versions of weights say that something wrote to them."""
        moved = self._marks != [version_of(p) for p in self._marked]
        if self._habit or self._constrained:
            step.rewritten = True
        if self._habit and moved:
            step.slowed = step.number
        if self._sample is None or self._habit:
            return
        if step.number <= _FIRST or self._versions != [version_of(p) for p in self._sample.tensors]:
            self._compare(step, ends=False)
            if step.thorough:
                self._remember(step)

    def close(self, step: TrainingStep) -> None:
        self._compare(step)
        self.restart()
        if self._held is not None and not self._is_averaging(step):
            step.report(self._held)

    def _is_averaging(self, step: TrainingStep) -> bool:
        """Return whether the write that is held was one of weights that processes average between steps alone."""
        if not (step.alone and self._held_most):
            return False
        self._remark(step, "averaged over processes")
        return True

    def _remember(self, step: TrainingStep) -> None:
        # Trained tensors that no watched optimizer holds are moved by someone else, as copies of master weights are.
        optimized = step.optimized_ids()
        pairs = [
            (name, p)
            for name, p in step.structure.parameters.items()
            if _comparable(p) and (id(p) in optimized or not p.requires_grad)
        ]
        if not pairs:
            return
        device = pairs[0][1].device
        pairs = [(name, p) for name, p in pairs if p.device == device]
        self._names, tensors = [name for name, _ in pairs], [p for _, p in pairs]
        self._trained, self._kinds = [p.requires_grad for p in tensors], [p.dtype for p in tensors]
        self._sample = EntrySample.of(tensors, step.number)
        self._after = self._sample.read()
        self._fast = None if self._slow is None else torch.cat([_some(p) for p in self._slow[0]]).double()
        self._versions = [version_of(p) for p in tensors]
        allowance = _CHECKSUMS.get(device.type, _MOST_CHECKSUMS)
        for offset in range(len(pairs)):
            name, p = pairs[(self._turn + offset) % len(pairs)]
            if allowance < local(p).numel() and offset:
                break
            allowance -= local(p).numel()
            self._sums.append((name, p, _checksum(p), version_of(p)))
        self._turn = (self._turn + len(self._sums)) % len(pairs)

    def _compare(self, step: TrainingStep, *, ends: bool = True) -> None:
        """Compare weights now with those after the last step; `ends`: the next step is about to begin."""
        sample, after, sums = self._sample, self._after, self._sums
        inside, self._in_forward, self._forward = self._in_forward, False, None
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
        silent = [(name, p, old) for name, p, old, version in sums if version_of(p) == version]
        flipped = torch.stack([_checksum(p) != old for _, p, old in silent]).to(now.device) if silent else now[:0] > 0
        checked = [name for name, _, _ in silent]
        numbers = torch.cat((change, allowed, flipped.double()))

        def decide(arrived: Tensor) -> Iterator[StepFinding]:
            count = len(names)
            rows = torch.stack((arrived[:count], arrived[count : 2 * count]), -1).tolist()
            written = [i for i, (value, limit) in enumerate(rows) if value > limit]
            bits = {name for name, other in zip(checked, arrived[2 * count :].tolist(), strict=True) if other}
            yield from self._judge(step, sample, after, now, written, bits, rows, inside=inside, ends=ends)

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
        *,
        inside: bool,
        ends: bool,
    ) -> Iterator[StepFinding]:
        names, trained = self._names, self._trained
        olds, news = sample.per_tensor(after), sample.per_tensor(now)
        free = [i for i in written if trained[i] and not _is_constraint(sample.tensors[i], olds[i], news[i])]
        if free:
            # A tensor that has another name by now, or none, was written to by what renamed it, such as pruning.
            present = {name: id(p) for name, p in step.model.named_parameters()}
            free = [i for i in free if present.get(names[i]) == id(sample.tensors[i])]
            tensors = {names[i]: sample.tensors[i] for i in free}
            yield from self._look_at_undone(tensors, sum(trained), sample.number)
        frozen = [i for i in written if not trained[i]]
        own = any(trained[i] for i in written)
        # In coarse precision much of what a program writes is within the spacing.
        coarse = any(torch.finfo(kind).eps > _COARSE for kind in self._kinds)
        touched = own or (coarse and any(value > 0 and was for (value, _), was in zip(rows, trained, strict=True)))
        if touched:
            step.rewritten = bool(step.rewritten)
        if own and not free:
            self._constrained = True
            self._remark(step, "clamped or normalised")
        slow = self._moves_to_slow_weights() if own else False
        if slow:
            step.slowed, self._unseen, self._constrained = sample.number, True, True
            self._remark(step, "moved towards slow weights")
        step.averages |= step.alone and 2 * len(free) > sum(trained)
        findings, self._held = self._held, None
        if findings is not None and step.restarted == (findings.step or 0) + 1:
            # Weights drawn again, with a new state of the optimizer.
            findings = None
        before = findings is not None and sample.number > (findings.step or 0)
        if touched and (before or self._unseen):
            self._habit = True
            self._remark(step, "written to by the program itself")
        elif findings is not None and ends and sample.number > (findings.step or 0):
            # A whole interval has gone by in which nothing was written.
            if not self._is_averaging(step):
                yield findings
        elif findings is not None:
            self._held = findings
        if free and not slow and not self._habit:
            change = _Change(sample, olds, news, free)
            finding = self._describe(change, rows)
            meant = not self._cannot_be_meant(step, change, inside=inside)
            if meant:
                self._held, self._held_most = finding, 2 * len(free) > sum(trained)
            else:
                yield finding
        elif frozen and 2 * len(frozen) > sum(not t for t in trained):
            # An averaged teacher inside the model moves all of its weights; late in a run some by less than is seen.
            self._averaged |= {names[i] for i in frozen}
        elif frozen and not (own and self._habit) and not self._averaged.issuperset(names[i] for i in frozen):
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
                # A program that writes through `.data` does so more than once.
                certain=not self._silent,
                message=f"Stored bits of {name} changed between step {sample.number} and the next, in entries that are "
                "few or small. No step was made in between: a bit flip, or a write from elsewhere.",
            )
        self._silent = self._silent or bool(bits)


def _rounding(change: _Change) -> torch.dtype | None:
    """Return the type that all written weights were rounded to; None if they were not."""
    for kind in (torch.bfloat16, torch.float16):
        finer = all(torch.finfo(change.sample.tensors[i].dtype).eps < torch.finfo(kind).eps for i in change.written)
        if finer and all(torch.equal(change.old[i].to(kind).double(), change.new[i]) for i in change.written):
            return kind
    return None


def _batch_counts(step: TrainingStep) -> dict[str, int]:
    """Return by running statistic how often its norm counted a batch: kernels write statistics without a version."""
    counted = [(name, m.num_batches_tracked) for name, m in step.structure.batch_norms]
    return {
        f"{name}.{statistic}": version_of(count)
        for name, count in counted
        if count is not None
        for statistic in ("running_mean", "running_var")
    }


def _comparable(parameter: Tensor) -> bool:
    return is_plain(parameter) and not is_shared(parameter) and local(parameter).numel() > 0


def _some(parameter: Tensor) -> Tensor:
    """Return some entries of a tensor, the same ones at any time."""
    values = local(parameter.detach()).reshape(-1)
    return values[:: max(1, values.numel() // _SAMPLED)][:_SAMPLED]


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
    complete = local(tensor.detach()).double()
    near = max(1e-5, torch.finfo(tensor.dtype).eps)
    if complete.ndim < 2:
        return False
    for dim in (0, 1):
        rows = complete.transpose(0, dim).flatten(1)
        norms = rows.norm(dim=1)
        if len(norms) > 1 and bool(((norms - norms.max()).abs() <= near * norms.max()).float().mean() > 0.5):
            return True
        if len(norms) > 1 and bool((rows.sum(1).abs() <= near * rows.abs().sum(1)).all()):
            return True
    return False


def _describe(old: Tensor, new: Tensor) -> str:
    """Return how a tensor's sampled entries changed."""
    changed = int((new != old).sum())
    if not bool(torch.isfinite(new).all()):
        return "there are values that are not finite"
    if changed == 1 and len(old) > 1:
        position = int((new != old).nonzero()[0])
        return f"one entry went from {float(old[position]):.4g} to {float(new[position]):.4g}"
    if not bool(new.any()):
        return "all of it is zero now"
    factor = float((old @ new) / (old @ old).clamp_min(1e-300))
    if bool((new - factor * old).norm() <= 1e-4 * (new - old).norm()):
        return f"all of it was multiplied by {factor:.6g}, as by a second weight decay"
    return f"{changed} of {len(old)} entries that were compared changed"
