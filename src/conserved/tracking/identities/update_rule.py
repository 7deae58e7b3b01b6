"""Is the update the rule's? The weights after a step, against the optimizer's formula for the weights before it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from conserved.symmetry.view import local, local_as
from conserved.tolerances import UPDATE_TOLERANCE
from conserved.tracking.identities.block_sums import BlockSums
from conserved.tracking.identities.entry_samples import EntrySample, join
from conserved.tracking.identities.finding import StepFinding, name_tensors
from conserved.tracking.identities.reference_steps import GroupEntries, ReferenceRule, rule_for, skips
from conserved.tracking.identities.step_identity import StepIdentity, TrainingStep, is_plain, is_shared

_SPACINGS = 8.0
"""How many spacings of its stored value a weight may be off besides."""

PRECISION = "precision"
"""The subject of remarks about the coarseness of weights."""

_STEADY = 0.9
"""Share of the largest rate so far from which on a rate is at its height: ends of schedules move little."""

_LANDED = 0.1
"""The share of weights that move in a step below which the coarseness of bfloat16 is remarked."""

_NOTHING = 1e-3
"""The share of weights that move in a step below which nothing lands.

A weight that moves once in a thousand steps is not trained by any run of usual length. Fine-tuning of bfloat16 weights
at common rates moves 1 to 10 % of them in a step, and works.
"""

_PART = 0.1
"""The part of an optimizer's weights that a group must hold for its standing still to be an alarm."""

_STANDING = 6
"""Steps in a row without an effect that are an alarm: the first five steps of RAdam are small by its rule."""


@dataclass(slots=True, eq=False)
class _Group:
    """Entries of one parameter group, read before its step."""

    index: int
    options: Mapping[str, Any]
    sample: EntrySample
    before: GroupEntries
    theta: Tensor


class UpdateRule(StepIdentity):
    """Holds every tensor's update against the rule of its optimizer, in two readings.

    A sample of entries that moves through every tensor is held against the rule as it is written down a second time in
    `reference_steps`: it sees what is wrong in many entries, and a wrong state. Sums over blocks (`block_sums`) see one
    wrong entry among any number. Optimizers without a rule are only asked whether weights with a gradient moved at all.
    """

    name = "updates"
    free = False

    def __init__(self) -> None:
        self.blocks = BlockSums()
        self._groups: dict[int, list[_Group]] = {}
        self._unmoved: dict[int, tuple[EntrySample, Tensor, list[float]]] = {}
        self._uphill: dict[int, int] = {}
        """By optimizer without a rule, the steps in a row in which every tensor moved along its gradient."""
        self._suspects: dict[str, int] = {}
        """By tensor of an optimizer without a rule, the steps in a row in which it did not move."""
        self._rates: dict[tuple[int, int], tuple[float, float]] = {}
        """By optimizer and group, the last rate and the largest."""
        self._standing: dict[tuple[int, int], tuple[int, int]] = {}
        """By optimizer and group, how many steps in a row nothing landed, and the first of them."""
        self._noted_decay = False
        """Whether weight decay that rounds away was noted."""
        self._followed: set[str] = set()
        """Tensors of optimizers with a `step` of their own whose updates were those of the base class's rule."""
        self.without_rule: set[str] = set()
        """Classes of optimizers whose rule is not known."""

    def before_optimizer(self, step: TrainingStep, optimizer: Optimizer) -> None:
        self._groups.pop(id(optimizer), None)
        self._unmoved.pop(id(optimizer), None)
        asked = step.thorough and not skips(optimizer)
        self.blocks.before_optimizer(step, optimizer, asked=asked)
        if not asked:
            return
        rule = rule_for(optimizer)
        if rule is None or not rule[1]:
            self.without_rule.add(type(optimizer).__name__)
            self._remember_unruled(step, optimizer)
        if rule is None:
            return
        groups = (
            _read_group(optimizer, index, rule[0], step.number, closure=step.closure)
            for index in range(len(optimizer.param_groups))
        )
        self._groups[id(optimizer)] = [group for group in groups if group is not None]

    def after_optimizer(self, step: TrainingStep, optimizer: Optimizer) -> None:
        # The block of a single wrong entry says more than that an entry is wrong, and one of both is reported.
        self.blocks.after_optimizer(step, optimizer)
        for group in self._groups.pop(id(optimizer), []):
            self._compare(step, optimizer, group, step.names())
        if id(optimizer) in self._unmoved:
            self._look_at_unruled(step, optimizer, step.names())

    def device_seconds(self) -> float:
        """Return the seconds that devices spent on sums over blocks since the last call."""
        return self.blocks.device_seconds()

    def restart(self) -> None:
        self._groups.clear()
        self._unmoved.clear()
        self.blocks.restart()

    def close(self, step: TrainingStep) -> None:
        self.restart()

    def _compare(self, step: TrainingStep, optimizer: Optimizer, group: _Group, names: Mapping[int, str]) -> None:
        gradients = [_own_gradient(p) for p in group.sample.tensors]
        rule = rule_for(optimizer)
        if rule is None or any(g is None for g in gradients):
            # A closure did not reach some of them: their state was not used.
            group = _only_with_gradient(group)
            gradients = [_own_gradient(p) for p in group.sample.tensors]
        if rule is None or not gradients:
            return
        with torch.no_grad():
            gradient = group.sample.read([g for g in gradients if g is not None])
            expected = rule[0].step(_with_gradient(group.before, gradient))
            numbers = _evidence(group.sample, group.theta, group.sample.read(), expected)
        own_names = [names[id(p)] for p in group.sample.tensors]
        kinds = [p.dtype for p in group.sample.tensors]
        cause = f"{type(optimizer).__name__}'s rule"
        coarse = self._is_steady(id(optimizer), group) and torch.bfloat16 in kinds
        certain, key, number = rule[1], (id(optimizer), group.index), step.number
        part = _share_of_weights(optimizer, group.index)
        if coarse and not self._noted_decay:
            self._look_at_decay(step, optimizer, group)

        def decide(arrived: Tensor) -> Iterator[StepFinding]:
            if certain or self._seems_to_follow(own_names, arrived):
                findings = list(_judge(arrived, own_names, cause))
                # An optimizer of the program's own may step by another rule, or not at all.
                yield from (finding if certain else replace(finding, certain=False) for finding in findings)
                if coarse and not any(finding.code == "did not land" for finding in findings):
                    yield from self._look_at_coarse(step, number, key, _coarse_rows(arrived, own_names, kinds), part)

        step.read(numbers, decide)

    def _look_at_decay(self, step: TrainingStep, optimizer: Optimizer, group: _Group) -> None:
        """Note a decay by a factor so near to one that every product with a bfloat16 weight rounds to the weight."""
        decay, rate = group.options.get("weight_decay", 0.0), float(_rate(group.options))
        decoupled = group.options.get("decoupled_weight_decay", False) and not group.options.get("fused")
        note = f"weight decay {decay:g} of {type(optimizer).__name__} changes no bfloat16 weight: times the rate, it is"
        note += " below their spacing"
        if decoupled and 0 < rate * decay < torch.finfo(torch.bfloat16).eps / 4:
            self._noted_decay = True
            step.notes.append(note)

    def _look_at_coarse(
        self,
        step: TrainingStep,
        number: int,
        group: tuple[int, int],
        rows: Sequence[tuple[list[float], str]],
        part: float,
    ) -> Iterator[StepFinding]:
        """Remark that most updates are below the spacing of the weights.

        Yield a finding if nothing lands at all. Gains near one stand still in most runs with bfloat16 weights, and
        loops put them into a group without weight decay: a group with a small part of the weights is remarked only.
        """
        asked = sum(row[6] for row, _ in rows)
        share = sum(row[5] for row, _ in rows) / asked if asked else 1.0
        if share < _LANDED:
            step.remark(
                PRECISION,
                f"{1 - share:.1%} of the bfloat16 weights with an update did not change in step {number}, because it "
                "is below their spacing; master weights in float32 or stochastic rounding would keep it",
            )
        # Biases that began at zero are small for long, so that all of their updates land.
        standing = [(row, name) for row, name in rows if 2 * row[5] < row[6]]
        moved, rest = sum(row[5] for row, _ in standing), sum(row[6] for row, _ in standing)
        count, first = self._standing.get(group, (0, number))
        nothing = 2 * rest > asked and moved < _NOTHING * rest
        count, first = (count + 1, first) if nothing else (0, number + 1)
        self._standing[group] = (count, first)
        if count == _STANDING and part >= _PART:
            yield _swallowed(standing, moved / rest, first, number)

    def _seems_to_follow(self, names: Sequence[str], numbers: Tensor) -> bool:
        """Return whether a subclass with a `step` of its own follows its base class's rule but for a few tensors.

        What holds for most tensors of a group in this step, and held for the others before, is the rule. Updates that
        are lost need no earlier step: no rule leaves a tensor with a gradient where it is and moves the rest.
        """
        rows = dict(zip(names, numbers.tolist(), strict=True))
        wrong = [name for name, row in rows.items() if row[0] > 1]
        lost = [name for name in wrong if rows[name][1] == 0 and rows[name][2] > 0]
        followed = set(names) - set(wrong)
        before, self._followed = self._followed, self._followed | followed
        few = 2 * len(wrong) < len(rows)
        return few and (len(lost) == len(wrong) or set(wrong) <= before)

    def _is_steady(self, optimizer: int, group: _Group) -> bool:
        """Return whether a group's rate is at its height, neither warming up nor running out."""
        rate = float(_rate(group.options))
        last, most = self._rates.get((optimizer, group.index), (math.inf, 0.0))
        self._rates[optimizer, group.index] = (rate, max(most, rate))
        return _STEADY * most <= rate <= last < math.inf

    def _remember_unruled(self, step: TrainingStep, optimizer: Optimizer) -> None:
        pairs = [
            (p, float(_rate(group)))
            for group in optimizer.param_groups
            for p in group["params"]
            if is_plain(p) and p.dtype in (torch.float32, torch.float64) and local(p).numel() and p.grad is not None
        ]
        if pairs:
            sample = EntrySample.of([p for p, _ in pairs], step.number)
            self._unmoved[id(optimizer)] = (sample, sample.read(), [rate for _, rate in pairs])

    def _look_at_unruled(self, step: TrainingStep, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        """Ask of an optimizer whose rule is not known only whether weights moved, and only twice in a row."""
        sample, before, rates = self._unmoved.pop(id(optimizer))
        if any(_own_gradient(p) is None for p in sample.tensors):
            return
        made = sample.read() - before
        moved = sample.largest(made)
        gradient_here = sample.read([g for p in sample.tensors if (g := _own_gradient(p)) is not None])
        gradient = sample.largest(gradient_here)
        spacing = sample.largest(before) * torch.finfo(torch.float32).eps
        rate = torch.tensor(rates, dtype=torch.float64, device=moved.device)
        # Steps are about the rate, or the rate times the gradient; far above the spacing, either would show.
        visible = (rate * gradient.clamp_max(1.0) > 1e3 * spacing) & (gradient > 0) & gradient.isfinite()
        own_names = [names[id(p)] for p in sample.tensors]

        def decide(arrived: Tensor) -> Iterator[StepFinding]:
            lost = []
            for name, unmoved in zip(own_names, arrived.tolist(), strict=True):
                self._suspects[name] = self._suspects.get(name, 0) + 1 if unmoved else 0
                if self._suspects[name] == 2:
                    lost.append(name)
            if lost:
                yield replace(_lost(lost, len(own_names), type(optimizer).__name__), certain=False)

        step.read((moved == 0) & visible, decide)
        if not step.closure and not any(group.get("maximize") for group in optimizer.param_groups):
            uphill = sample.sums(made * gradient_here) > 0
            step.read(uphill.double(), lambda arrived: self._look_uphill(arrived, own_names, optimizer, step.number))

    def _look_uphill(
        self, numbers: Tensor, names: Sequence[str], optimizer: Optimizer, number: int
    ) -> Iterator[StepFinding]:
        """Yield a finding if every tensor moves along its gradient twice in a row: no rule that descends does."""
        key = id(optimizer)
        self._uphill[key] = self._uphill.get(key, 0) + 1 if bool(numbers.all()) else 0
        if self._uphill[key] == 2:
            yield StepFinding(
                code="not the rule's",
                certain=False,
                tensor=names[0],
                others=tuple(names[1:]),
                step=number - 1,
                message=f"{type(optimizer).__name__} moves every tensor along its gradient, uphill: "
                "the loss grows. Is a "
                "sign missing, or is maximize=True meant?",
            )


def _rate(group: Mapping[str, Any]) -> Any:
    return group.get("lr", 0.0)


def _read_group(optimizer: Optimizer, index: int, rule: ReferenceRule, number: int, *, closure: bool) -> _Group | None:
    """Read what the rule needs of one group; None if nothing in it can be compared."""
    options = dict(optimizer.param_groups[index])
    tensors = [
        p
        for p in options["params"]
        if is_plain(p)
        and p.dtype in UPDATE_TOLERANCE
        and not is_shared(p)
        and local(p).numel()
        and (closure or (p.grad is not None and is_plain(p.grad)))
    ]
    if not tensors:
        return None
    device = tensors[0].device
    tensors = [p for p in tensors if p.device == device]
    sample = EntrySample.of(tensors, number)
    states = [optimizer.state.get(p, {}) for p in tensors]
    options = {key: _number(value) for key, value in options.items() if key != "params"}
    first = sample.read()
    fresh = torch.tensor([not _has_state(state, rule, options) for state in states], device=device)
    read = {key: _state_entries(sample, states, key, shared=key in rule.shared) for key in rule.keys(options)}
    counts = _shared_numbers([state.get("step", 0.0) for state in states], device)
    before = GroupEntries(
        theta=first,
        gradient=first,
        group=options,
        state=read,
        count=sample.spread(counts + 1),
        fresh=sample.spread(fresh),
    )
    return _Group(index, options, sample, before, first)


def _share_of_weights(optimizer: Optimizer, index: int) -> float:
    """Return the part of an optimizer's weights that one of its groups holds."""
    sizes = [sum(p.numel() for p in group["params"]) for group in optimizer.param_groups]
    return sizes[index] / max(sum(sizes), 1)


def _has_state(state: Mapping[str, Any], rule: ReferenceRule, options: Mapping[str, Any]) -> bool:
    keys = rule.keys(options)
    return all(state.get(key) is not None for key in keys) if keys else True


def _state_entries(sample: EntrySample, states: Sequence[Mapping[str, Any]], key: str, *, shared: bool) -> Tensor:
    """Return entries of one part of the state; zeros where it is not there yet."""
    device = sample.tensors[0].device
    if shared:
        return sample.spread(_shared_numbers([state.get(key, 0.0) for state in states], device))
    if all(isinstance(state.get(key), Tensor) for state in states):
        return sample.read([state[key] for state in states])
    parts = []
    for index, state in enumerate(states):
        own = sample.part([index])
        value = state.get(key)
        absent = torch.zeros(sample.sizes[index], dtype=torch.float64, device=device)
        parts.append(own.read([value]) if isinstance(value, Tensor) else absent)
    return join(parts)


def _shared_numbers(values: Sequence[Any], device: torch.device) -> Tensor:
    """Return one number of each tensor's state as a vector."""
    if all(isinstance(value, Tensor) and value.dtype == torch.float32 and value.ndim == 0 for value in values):
        return torch.stack(list(values)).to(device=device, dtype=torch.float64)
    return torch.stack([torch.as_tensor(value, dtype=torch.float64).to(device) for value in values])


def _number(value: Any) -> Any:
    """Return an option as a float64 number or tensor for a formula."""
    return value.detach().double() if isinstance(value, Tensor) else value


def _with_gradient(entries: GroupEntries, gradient: Tensor) -> GroupEntries:
    return GroupEntries(
        theta=entries.theta,
        gradient=gradient,
        group=entries.group,
        state=entries.state,
        count=entries.count,
        fresh=entries.fresh,
    )


def _own_gradient(parameter: Tensor) -> Tensor | None:
    """Return the gradient of what this process holds of a parameter; None if there is none that can be sampled."""
    gradient = parameter.grad
    return None if gradient is None or not is_plain(gradient) else local_as(gradient.detach(), parameter)


def _only_with_gradient(group: _Group) -> _Group:
    """Return the part of a group whose tensors have a gradient after the step."""
    indices = [i for i, p in enumerate(group.sample.tensors) if _own_gradient(p) is not None]
    complete = group.sample

    def narrow(entries: Tensor) -> Tensor:
        parts = complete.per_tensor(entries)
        return torch.cat([parts[i] for i in indices]) if indices else entries[:0]

    sample = complete.part(indices)
    old = group.before
    before = GroupEntries(
        theta=narrow(old.theta),
        gradient=narrow(old.theta),
        group=old.group,
        state={key: narrow(value) for key, value in old.state.items()},
        count=narrow(old.count),
        fresh=narrow(old.fresh),
    )
    return _Group(group.index, group.options, sample, before, before.theta)


def _evidence(sample: EntrySample, before: Tensor, after: Tensor, expected: Tensor) -> Tensor:
    """Return a row of numbers for each tensor.

    How far its update is from the rule's, over what is allowed; entries that had to move and did; that had to move; the
    length of the update along the expected one; the largest expected; entries other than 0 with any update that moved;
    with any. Any update moves a weight that is 0, however small it is.
    """
    eps = torch.tensor([torch.finfo(p.dtype).eps for p in sample.tensors], dtype=torch.float64, device=before.device)
    relative = torch.tensor(
        [UPDATE_TOLERANCE[p.dtype] for p in sample.tensors], dtype=torch.float64, device=before.device
    )
    wanted, made = expected - before, after - before
    largest = sample.largest(wanted)
    spacing = sample.spread(eps) * torch.maximum(before.abs(), expected.abs())
    tolerance = _SPACINGS * spacing + sample.spread(relative * largest)
    excess = ((after - expected).abs() / tolerance.clamp_min(1e-300)).nan_to_num(0.0, 0.0, 0.0)
    # Entries whose expected update rounds to another stored value for sure.
    driven = (wanted.abs() > spacing).double()
    moved, asked = (made != 0).double(), ((wanted != 0) & (before != 0)).double()
    totals = sample.sums(torch.stack((moved * driven, driven, made * wanted, wanted.square(), moved * asked, asked)))
    ratio = totals[2] / totals[3].clamp_min(1e-300)
    return torch.stack((sample.largest(excess), totals[0], totals[1], ratio, largest, *totals[4:]), -1)


def _judge(numbers: Tensor, names: Sequence[str], rule: str) -> Iterator[StepFinding]:
    """Yield what is wrong with the updates of one group."""
    rows = [(row, name) for row, name in zip(numbers.tolist(), names, strict=True) if _usable(row)]
    wrong = [(row, name) for row, name in rows if row[0] > 1]
    lost = [name for row, name in wrong if row[1] == 0 and row[2] > 0]
    if lost:
        yield _lost(lost, len(rows), rule)
    other = sorted((-row[0], name, row[3]) for row, name in wrong if row[1] > 0)
    if other:
        excess, worst, ratio = other[0]
        others = tuple(name for _, name, _ in other[1:])
        yield StepFinding(
            code="not the rule's",
            tensor=worst,
            others=others,
            value=-excess,
            limit=1.0,
            message=f"The update of {worst} was not that of {rule}: {_in_words(ratio)}. "
            f"{len(other)} of {len(rows)} tensors are affected.",
        )


def _usable(row: Sequence[float]) -> bool:
    """Return whether the evidence about a tensor is finite and an update is expected."""
    return all(map(math.isfinite, row)) and row[4] > 0


def _coarse_rows(numbers: Tensor, names: Sequence[str], kinds: Sequence[torch.dtype]) -> list[tuple[list[float], str]]:
    """Return the evidence about weights in bfloat16."""
    rows = zip(numbers.tolist(), names, kinds, strict=True)
    return [(row, name) for row, name, kind in rows if kind == torch.bfloat16 and _usable(row)]


def _swallowed(rows: Sequence[tuple[list[float], str]], share: float, first: int, last: int) -> StepFinding:
    return StepFinding(
        code="swallowed",
        tensor=rows[0][1],
        others=tuple(name for _, name in rows[1:]),
        value=share,
        limit=_NOTHING,
        step=first,
        message=f"Updates did not land: in {_STANDING} steps, {first} to {last}, next to no weight with an update "
        "changed, because it is below the spacing of bfloat16. Keep master weights in float32, or round "
        "stochastically.",
    )


def _in_words(ratio: float) -> str:
    if abs(ratio - 1) < 5e-3:
        return "single entries differ, or something was added to it"
    if abs(ratio) < 5e-3:
        return "it has next to nothing of the update that the gradient, the state and the rate give"
    return f"along the expected update it is {ratio:.3g} times as long"


def _lost(lost: Sequence[str], count: int, rule: str) -> StepFinding:
    everywhere = len(lost) == count
    where = "any tensor" if everywhere else name_tensors(list(lost))
    return StepFinding(
        code="did not land",
        tensor=lost[0],
        others=tuple(lost[1:]),
        message=f"The update did not land in {where}: there is a gradient, {rule} gives an update, and after "
        "optimizer.step() no weight has changed. Does the step write to a copy, or was it skipped?",
    )
