r"""Is every entry of the update the rule's? Sums over blocks of 128 entries, with random signs.

A sample of entries (`update_rule`) sees what is wrong everywhere, and misses one wrong weight among 10⁸. Freivalds'
check does not: with fixed random signs w, and U the update that the optimizer's state gives after the step,

    Σ_j w_j θ'_j  =  c Σ_j w_j θ_j  −  Σ_j w_j U_j        for every block of 128 entries,

c = 1 − ηλ where weight decay is decoupled and 1 elsewhere. Only the sums of θ are kept over a step: 1/128 of the
weights. Before the next step they also say whether a weight changed in between.

**Limit.** Rounding makes an error of at most a_j = k u |θ_j| + r |U_j| in entry j: k values are stored on the way, r is
how far the arithmetic of an optimizer may be from its formula. Sums are rounded as well. Signs do not know the errors,
so that by Hoeffding's inequality |Σ w_j δ_j| exceeds t (Σ a_j²)^½ with a chance of at most 2 exp(−t²/2). The limit
below has t = 8: 3e-14 for one block, 1e-6 a year for a billion weights that are looked at every second.

Small tensors, gains and biases, are compared entry by entry: a block of gains near one would hide a wrong one behind
the rounding of 127 others. The limit of one entry is a_j itself, with u |θ_j| before and u |θ'_j| after the update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from conserved._torch_compat import version_of
from conserved.symmetry.view import local
from conserved.tolerances import UPDATE_TOLERANCE
from conserved.tracking.identities.entry_samples import all_sampled
from conserved.tracking.identities.finding import StepFinding
from conserved.tracking.identities.reference_steps import rule_for
from conserved.tracking.identities.step_identity import TrainingStep, is_plain, is_shared

BLOCK = 128
"""Entries of a block. Fewer take more memory; more hide a wrong entry among the rounding of others."""

_SMALL = 1 << 14
"""Entries up to which a tensor is compared entry by entry: all gains of a model are less than a thousandth of it."""

_DEVIATIONS = 8.0
"""t of Hoeffding's inequality above."""

_STORED = 2.0
"""Roundings of a weight in one step: after weight decay and after the update."""

_SUMMED = torch.finfo(torch.float32).eps / 2 * math.sqrt(BLOCK)
"""Rounding of the sum of a block, over the norm of its entries."""

_FEW = 16
"""Blocks up to which a wrong update is called local. More are seen by the sample of entries as well."""

DirectionOfStep = Callable[[Mapping[str, Any], Mapping[str, Any], Tensor | None], tuple[Tensor | None, Any]]
"""Given a group's options, a tensor's state after a step and its gradient: U without the rate, and its coefficient."""


def _adam_update(
    group: Mapping[str, Any], state: Mapping[str, Any], gradient: Tensor | None
) -> tuple[Tensor | None, Any]:
    """Return m / (√v + ε') and its coefficient, for Adam's state after a step."""
    if "exp_avg" not in state:
        return None, 0.0
    beta1, beta2 = group["betas"]
    count = _number(state["step"])
    root = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
    correction = (1 - beta2**count) ** 0.5
    # η/(1 − β₁ᵗ) · m / (√v/c + ε) = (c η/(1 − β₁ᵗ)) · m / (√v + cε): one number less to multiply a tensor with.
    bottom = _wide(local(root)).sqrt().add_(correction * group["eps"])
    return _wide(local(state["exp_avg"])) / bottom, correction * _number(group["lr"]) / (1 - beta1**count)


def _sgd_update(
    group: Mapping[str, Any], state: Mapping[str, Any], gradient: Tensor | None
) -> tuple[Tensor | None, Any]:
    """Return the direction of SGD without weight decay, and its coefficient."""
    rate = _number(group["lr"])
    if group["momentum"]:
        buffer = state.get("momentum_buffer")
        return (None, 0.0) if buffer is None else (_wide(local(buffer)), rate)
    return (None, 0.0) if gradient is None else (_wide(local(gradient)), -rate if group["maximize"] else rate)


_UPDATES: dict[type[Optimizer], DirectionOfStep] = {Adam: _adam_update, AdamW: _adam_update, SGD: _sgd_update}


def _decay(optimizer: Optimizer, group: Mapping[str, Any]) -> Any:
    """Return the factor of the weights that a step leaves before its update."""
    if isinstance(optimizer, SGD):
        # With momentum the decay is in the buffer.
        return 1.0 if group["momentum"] else 1 - _number(group["lr"]) * group["weight_decay"]
    decoupled = isinstance(optimizer, AdamW) or group.get("decoupled_weight_decay", False)
    return 1 - _number(group["lr"]) * group["weight_decay"] if decoupled else 1.0


@dataclass(slots=True, eq=False)
class _Sums:
    """Block sums of one tensor, and its version when they were read."""

    tensor: Tensor
    values: Tensor
    version: int


class BlockSums:
    """Holds every block of every tensor against the rule of torch's SGD, Adam or AdamW: a reading of `UpdateRule`."""

    def __init__(self) -> None:
        self._before: dict[int, list[_Sums]] = {}
        self._after: dict[int, _Sums] = {}
        self._signs: dict[torch.device, Tensor] = {}
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def restart(self) -> None:
        """Forget what was read of weights."""
        self._before.clear()
        self._after.clear()

    def device_seconds(self) -> float:
        """Return the seconds that devices spent on sums since the last call, as far as they have finished."""
        finished = [pair for pair in self._events if pair[1].query()]
        self._events = [pair for pair in self._events if pair not in finished]
        return sum(begin.elapsed_time(end) for begin, end in finished) / 1e3

    def before_optimizer(self, step: TrainingStep, optimizer: Optimizer, *, asked: bool) -> None:
        """Read the sums of the weights before a step, if it is asked about."""
        self._before.pop(id(optimizer), None)
        after, self._after = self._after, {}
        if not asked or step.closure or _update_of(optimizer) is None:
            return
        tensors = [p for group in optimizer.param_groups for p in group["params"] if _comparable(p, group)]
        if not tensors or all_sampled(tensors):
            # Every entry of a small model is compared by itself.
            return
        with torch.no_grad(), self._timed(tensors[0]):
            now = [_Sums(p, self._read(p), version_of(p)) for p in tensors]
            self._before[id(optimizer)] = now
            self._compare_between(step, now, after)

    def after_optimizer(self, step: TrainingStep, optimizer: Optimizer) -> None:
        """Compare the sums after a step with the rule's."""
        before = self._before.pop(id(optimizer), None)
        update = _update_of(optimizer)
        if before is None or update is None:
            return
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        names, sizes, rows = [], [], []
        known = step.names()
        with torch.no_grad(), self._timed(before[0].tensor):
            for sums in before:
                p = sums.tensor
                group = groups.get(id(p))
                if group is None or p.device != before[0].tensor.device:
                    continue
                direction, coefficient = update(group, optimizer.state.get(p, {}), p.grad)
                after = self._read(p)
                self._after[id(p)] = _Sums(p, after, version_of(p))
                if direction is None or direction.shape != local(p).shape:
                    continue
                rows.append(self._excess(optimizer, group, sums, after, direction, coefficient))
                names.append(known[id(p)])
                sizes.append(_block_of(p))
            if not rows:
                return
            numbers = torch.stack(rows)
        rule = type(optimizer).__name__
        step.read(numbers, lambda arrived: _judge(arrived, names, sizes, rule))

    def _excess(
        self, optimizer: Optimizer, group: Mapping[str, Any], sums: _Sums, after: Tensor, direction: Tensor, rate: Any
    ) -> Tensor:
        """Return the largest ratio of residual to limit, the index of its block, and the number of blocks above 1."""
        p = sums.tensor
        unit = torch.finfo(p.dtype).eps / 2
        relative = UPDATE_TOLERANCE[p.dtype]
        decay = _decay(optimizer, group)
        moved, added = self._sum(direction) * rate, 0.0
        if isinstance(optimizer, SGD) and group["momentum"] and group["nesterov"] and p.grad is not None:
            # g + λθ + μ b': the gradient with its decay, and a part of the buffer.
            gradient = self._sum(_wide(local(p.grad))) * (-1 if group["maximize"] else 1)
            lr = _number(group["lr"])
            added = lr * (gradient + group["weight_decay"] * sums.values)
            moved = moved * group["momentum"] + added
        residual = (after - (decay * sums.values - moved)).abs()
        if _block_of(p) == 1:
            # Three operations in float32 lead to the residual.
            own = unit + 1.5 * torch.finfo(torch.float32).eps
            update = (rate * direction.reshape(-1)).abs() + abs(added)
            limit = own * (sums.values.abs() + after.abs()) + relative * update
        else:
            # A sum of n numbers in float32 rounds n partial sums, each about as large as their norm: u √n of it.
            stored = math.hypot(_STORED * unit, _SUMMED) * self._norm(_wide(local(p)))
            limit = _DEVIATIONS * (stored.square() + (relative * rate * self._norm(direction)).square()).sqrt()
        # A weight beyond 10¹⁹ has no square in float32: then nothing is allowed to its block.
        limit = torch.where(limit.isfinite(), limit, 0.0)
        # A block of zeros has no limit but this.
        limit = limit + 1e-30
        excess = torch.where(sums.values.isfinite(), (residual / limit).nan_to_num(math.inf, math.inf), 0.0)
        worst, block = excess.max(0)
        return torch.stack((worst.double(), block.double(), (excess > 1).sum().double()))

    def _compare_between(self, step: TrainingStep, now: Sequence[_Sums], after: Mapping[int, _Sums]) -> None:
        """Compare sums before a step with those after the last one, of tensors that no operation wrote to."""
        pairs = [(sums, after[id(sums.tensor)]) for sums in now if id(sums.tensor) in after]
        pairs = [(a, b) for a, b in pairs if a.version == b.version and a.values.shape == b.values.shape]
        if not pairs:
            return
        known = step.names()
        names = [known[id(a.tensor)] for a, _ in pairs]
        # The same sums of the same numbers: kernels may add in another order, and that is all.
        eps = 4 * torch.finfo(torch.float32).eps
        sizes = [_block_of(a.tensor) for a, _ in pairs]
        rows = []
        for a, b in pairs:
            scale = torch.linalg.vector_norm(b.values) / math.sqrt(b.values.numel())
            changed = ~((a.values - b.values).abs() <= eps * math.sqrt(BLOCK) * (b.values.abs() + scale))
            rows.append(torch.stack((changed.sum(), changed.int().argmax())).double().to(pairs[0][0].values.device))
        number = step.number

        def decide(arrived: Tensor) -> Iterator[StepFinding]:
            counts = arrived[:, 0]
            if float(counts.sum()) == 1:
                # A loop that clamps, averages or resets writes to more than one block.
                index = int(counts.argmax())
                yield _changed_between(names[index], int(arrived[index, 1]), sizes[index], number)

        step.read(torch.stack(rows), decide)

    def _timed(self, tensor: Tensor) -> _Timer:
        return _Timer(self._events, tensor.device)

    def _read(self, p: Tensor) -> Tensor:
        return self._sum(_wide(local(p.detach())))

    def _sum(self, values: Tensor) -> Tensor:
        if _block_of(values) == 1:
            return values.reshape(-1).clone()
        return _by_block(values, lambda block: block @ self._signs_on(values.device)[: block.shape[1]])

    def _norm(self, values: Tensor) -> Tensor:
        return _by_block(values, lambda block: torch.linalg.vector_norm(block, dim=1))

    def _signs_on(self, device: torch.device) -> Tensor:
        if device not in self._signs:
            generator = torch.Generator().manual_seed(0)
            signs = torch.randint(2, (BLOCK,), generator=generator).mul_(2).sub_(1)
            self._signs[device] = signs.to(device=device, dtype=torch.float32)
        return self._signs[device]


class _Timer:
    """Times work on a device by events, without waiting for it; autocast is off meanwhile."""

    def __init__(self, events: list[tuple[torch.cuda.Event, torch.cuda.Event]], device: torch.device) -> None:
        self._events, self._device = events, device
        self._begin: torch.cuda.Event | None = None
        self._plain = torch.autocast(device.type, enabled=False)

    def __enter__(self) -> None:
        self._plain.__enter__()
        if self._device.type == "cuda":
            self._begin = torch.cuda.Event(enable_timing=True)
            self._begin.record(torch.cuda.current_stream(self._device))

    def __exit__(self, *error: Any) -> None:
        if self._begin is not None:
            end = torch.cuda.Event(enable_timing=True)
            end.record(torch.cuda.current_stream(self._device))
            self._events.append((self._begin, end))
        self._plain.__exit__(*error)


def _block_of(values: Tensor) -> int:
    """Return how many entries of a tensor are added up."""
    return 1 if local(values).numel() <= _SMALL else BLOCK


def _by_block(values: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Reduce blocks of a tensor's entries, in order; the last may be shorter."""
    flat = values.reshape(-1)
    whole = flat.numel() // BLOCK * BLOCK
    parts = [reduce(flat[:whole].view(-1, BLOCK))] if whole else []
    if whole < flat.numel():
        parts.append(reduce(flat[whole:].view(1, -1)))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _update_of(optimizer: Optimizer) -> DirectionOfStep | None:
    """Return how an optimizer's update follows from its state; None if it may step by another rule."""
    rule = rule_for(optimizer)
    return _UPDATES.get(type(optimizer)) if rule is not None and rule[1] else None


def _comparable(p: Tensor, group: Mapping[str, Any]) -> bool:
    """Return whether a tensor steps by the formulas above in this step."""
    if p.grad is None or not is_plain(p) or not is_plain(p.grad) or is_shared(p) or p.dtype not in UPDATE_TOLERANCE:
        return False
    return local(p).numel() > 0 and not group.get("differentiable", False)


def _wide(values: Tensor) -> Tensor:
    """Return values in float32, in which sums are taken."""
    return values.detach().float()


def _number(value: Any) -> Any:
    """Return an option as a number: a tensor on a device stays there, because reading it would wait."""
    if not isinstance(value, Tensor):
        return value
    return float(value) if value.device.type == "cpu" else value.detach().double()


def _judge(numbers: Tensor, names: Sequence[str], sizes: Sequence[int], rule: str) -> Iterator[StepFinding]:
    """Yield what is wrong with a few blocks of updates; what is wrong everywhere is left to sampled entries."""
    rows = [(row, name, size) for row, name, size in zip(numbers.tolist(), names, sizes, strict=True) if row[2] > 0]
    few = sorted(((-row[0], name, size, row) for row, name, size in rows if row[2] <= _FEW), key=lambda item: item[:2])
    if not few or len(rows) > len(few):
        return
    excess, worst, size, (_, block, count) = few[0]
    where = f"{int(count)} block{'s' if count > 1 else ''} of {size} entries, around entry {int(block) * size}"
    if size == 1:
        where = f"{int(count)} entr{'ies' if count > 1 else 'y'}, entry {int(block)}"
    yield StepFinding(
        code="not the rule's",
        tensor=worst,
        others=tuple(name for _, name, _, _ in few[1:]),
        value=-excess,
        limit=1.0,
        message=f"The update of {worst} was not that of {rule}'s rule in {where} of the flattened tensor, and was in "
        "all others: a bit flip or a race during the step, or a write from elsewhere.",
    )


def _changed_between(name: str, block: int, size: int, number: int) -> StepFinding:
    entries = f"Entry {block}" if size == 1 else f"One of the entries {block * size} to {block * size + size - 1}"
    return StepFinding(
        code="bits changed",
        tensor=name,
        message=f"{entries} of {name} (flattened) changed between step {number - 1} and step {number}, and no "
        "operation of torch wrote to it: a bit flip, or a write from elsewhere.",
    )
