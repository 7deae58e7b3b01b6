"""Listens to optimizers: what each step was made with, at the time it was made."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import nan
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from conserved._torch_compat import version_of
from conserved.boundary import Boundary
from conserved.errors import ConservedError
from conserved.symmetry import Tensors
from conserved.tracking.combination import Combination, Scalar
from conserved.tracking.optimizer_rules import ParameterStep, Rule, Update, rule_of
from conserved.tracking.step_expansion import Expansion

ACCOUNT = "account"
"""The stage that accounts for every step."""


class PrecisionChangedError(ConservedError, RuntimeError):
    """Parameters were converted to another type, and their optimizer's state was not; the message says what to do."""


@dataclass(slots=True)
class GroupSums:
    """Sums over a run of the hyperparameters of one parameter group, as exact theory needs them."""

    time: Scalar = 0.0
    """Σ lr, the corresponding time of gradient flow."""
    squares: Scalar = 0.0
    """Σ lr²."""
    decayed: Scalar = 0.0
    """Σ lr·λ, not a number where λ is not known."""
    damped: Scalar = 1.0
    """Π momentum."""


@dataclass(slots=True)
class _Watched:
    """One optimizer, and the hyperparameters of its last step."""

    optimizer: Optimizer
    rule: Rule
    sums: list[GroupSums]
    steps: int = 0
    depth: int = 0
    """How many `step` methods are under way: one that calls its base class's announces itself twice."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    moved: set[str] = field(default_factory=set)
    counts: dict[str, float] = field(default_factory=dict)
    """The step counts of parameters whose optimizer keeps them on the device, followed on the host."""
    counted: int = 0
    """The identity of the state they were read from: loading a checkpoint replaces it."""
    versions: dict[str, int] = field(default_factory=dict)
    """How often gradients had been written to when a step that is accounted for had used them."""
    skipped: Tensor | None = None
    """1 if a fused optimizer found infinities in the gradients and skipped the step."""


class OptimizerWatch:
    """Records the hyperparameters of every step of some optimizers, and copies of parameters if a rule needs them."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        theta: Tensors,
        *,
        rule: Rule | None = None,
        before: Callable[[], None] = lambda: None,
        converted: Callable[[Sequence[str]], None] = lambda names: None,
        sampled: Callable[[], bool] = lambda: True,
        boundary: Boundary | None = None,
    ) -> None:
        self._theta = theta
        self._boundary = boundary or Boundary(strict=True)
        self._names = {id(parameter): name for name, parameter in theta.items()}
        self._before_step, self._converted, self._sampled = before, converted, sampled
        self._types = {name: parameter.dtype for name, parameter in theta.items()}
        self._copies: dict[str, Tensor] = {}
        self._patterns: dict[Hashable, tuple[Expansion, tuple[str, ...]]] = {}
        """By optimizer, group and step count, the last step of one parameter, and what its tensors are to it."""
        self._watched = [
            _Watched(optimizer, rule or rule_of(optimizer), [GroupSums() for _ in optimizer.param_groups])
            for optimizer in optimizers
        ]
        self._place: dict[str, tuple[_Watched, int]] = {}
        self._find_places()

    def before_step(self, optimizer: Optimizer) -> None:
        """Handle an optimizer that is about to step.

        The monitor's hook calls this: hooks cannot be added within a step.
        """
        for watched in self._watched:
            if watched.optimizer is optimizer:
                self._start(watched)

    def after_step(self, optimizer: Optimizer) -> None:
        """Handle an optimizer that has stepped."""
        for watched in self._watched:
            if watched.optimizer is optimizer:
                self._end(watched, optimizer)

    @property
    def rules(self) -> tuple[str, ...]:
        """The name of the rule that each optimizer follows."""
        return tuple(watched.rule.name for watched in self._watched)

    @property
    def owned(self) -> set[str]:
        """The parameters that some optimizer steps."""
        return set(self._place)

    @property
    def stepped(self) -> bool:
        """Whether any optimizer made a step since `clear`."""
        return any(watched.steps for watched in self._watched)

    def copied_bytes(self) -> int:
        """Return memory that rules ask for to hold parameters from before a step."""
        names = [name for name in self._theta if name in self._place and self._keeps(name)]
        return sum(self._theta[name].numel() * self._theta[name].element_size() for name in names)

    def sums_of(self, name: str) -> GroupSums:
        """Return the sums of the group a parameter is in."""
        watched, group = self._place[name]
        return watched.sums[group]

    def descends_plainly(self, name: str) -> bool:
        """Return whether a parameter follows plain gradient descent."""
        watched, options = self._owner(name)
        return watched.rule.plain(options)

    def buffer_of(self, name: str) -> Tensor | None:
        """Return the buffer of a parameter under heavy-ball momentum, None where there is none."""
        watched, options = self._owner(name)
        if watched.rule.momentum(options) is None:
            return None
        buffer = watched.optimizer.state[self._theta[name]].get(watched.rule.buffer)
        return buffer if isinstance(buffer, Tensor) else None

    def optimizer_sums(self) -> list[list[GroupSums]]:
        """Return all sums, by optimizer and group, to be saved."""
        return [watched.sums for watched in self._watched]

    def missed(self) -> str:
        """Return why the last step cannot be accounted for, such as cleared gradients; empty if it can."""
        for watched in self._watched:
            if watched.steps > 1:
                return (
                    f"{type(watched.optimizer).__name__} made {watched.steps} steps since the last Monitor.step(), and "
                    "such steps are not accounted for. Call it after every optimizer step"
                )
            written = sorted(name for name, version in watched.versions.items() if self._is_written(name, version))
            if written:
                return (
                    f"the gradient of {written[0]} was written to after its optimizer had stepped, so the step is not "
                    "accounted for. Call Monitor.step() right after optimizer.step()"
                )
            gone = sorted(name for name in watched.moved if self._theta[name].grad is None)
            if gone and watched.rule.reads_gradient:
                return (
                    f"{gone[0]} had a gradient when its optimizer stepped and has none now, so the step is not "
                    "accounted for. Call Monitor.step() right after optimizer.step(), before zero_grad()"
                )
        return ""

    def _is_written(self, name: str, version: int) -> bool:
        gradient = self._theta[name].grad
        return gradient is not None and version_of(gradient) != version

    def clear(self) -> None:
        """Forget the last step."""
        self._copies.clear()
        self._patterns.clear()
        for watched in self._watched:
            watched.steps, watched.depth, watched.skipped = 0, 0, None
            watched.moved, watched.versions = set(), {}

    def expand(self, names: Sequence[str], *, causes: bool = True) -> list[Expansion]:
        """Return the last steps of some parameters."""
        expansions: dict[str, Expansion] = {}
        groups: dict[Hashable, list[str]] = defaultdict(list)
        for name in names:
            watched, group = self._place[name]
            if watched.steps and name in watched.moved:
                groups[id(watched), group].append(name)
            else:
                expansions[name] = Expansion.of(self._theta[name], causes=causes)
        for own in groups.values():
            expansions.update(self._expansions(own, causes=causes))
        return [*map(expansions.__getitem__, names)]

    def unclipped(self, names: Sequence[str]) -> list[Expansion]:
        """Return parameters that have not moved, and their gradients as they are now."""
        return [self._unclipped(name) for name in names]

    def _unclipped(self, name: str) -> Expansion:
        parameter = self._theta[name]
        if parameter.grad is None:
            return Expansion.of(parameter)
        gradient = Combination.of(parameter.grad)
        uphill = bool(self._owner(name)[1].get("maximize", False))
        return Expansion.of(parameter, Update(gradient=-gradient if uphill else gradient, rate=0.0))

    def gradient_norm(self) -> Tensor:
        """Return the norm of all watched gradients together, without waiting for the device."""
        gradients = [self._theta[name].grad for watched in self._watched for name in sorted(watched.moved)]
        present = [gradient.detach() for gradient in gradients if gradient is not None]
        if not present:
            return torch.zeros(())
        # Tensors of two meshes, such as experts and the rest, have no norm together.
        meshes: dict[Hashable, list[Tensor]] = defaultdict(list)
        for item in present:
            meshes[getattr(item, "device_mesh", None)].append(item.coalesce().values() if item.is_sparse else item)
        norms = [torch.nn.utils.get_total_norm(values) for values in meshes.values()]
        whole_norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
        if len(whole_norms) == 1:
            return whole_norms[0]
        return torch.linalg.vector_norm(torch.stack([norm.to(whole_norms[0].device) for norm in whole_norms]))

    def _expansions(self, names: Sequence[str], *, causes: bool) -> Iterator[tuple[str, Expansion]]:
        """Yield the steps of parameters of one group that an optimizer moved."""
        watched, group = self._place[names[0]]
        every = [*self._steps(watched, group, names)]
        alike: dict[Hashable, list[int]] = defaultdict(list)
        make = watched.rule.make
        for index, step in enumerate(every):
            alone = step.count is None and make is not None
            alike[step.count, type(step.parameter), index if alone else None].append(index)
        for indices in alike.values():
            steps = every if len(alike) == 1 else [every[index] for index in indices]
            made = [None] * len(steps) if make is None else make(steps)
            expansion = self._alike(watched, group, steps, made, causes=causes)
            yield from zip(map(names.__getitem__, indices), expansion, strict=True)

    def _steps(self, watched: _Watched, group: int, names: Sequence[str]) -> Iterator[ParameterStep]:
        """Yield the steps of parameters of one group as their rule describes them."""
        parameters = [*map(self._theta.__getitem__, names)]
        states = [*map(watched.optimizer.state.__getitem__, parameters)]
        counts = self._counts(watched, names, [state.get("step") for state in states])
        for name, parameter, state, count in zip(names, parameters, states, counts, strict=True):
            gradient = parameter.grad
            yield ParameterStep(
                parameter=parameter,
                gradient=torch.zeros_like(parameter) if gradient is None else gradient,
                state=state,
                group=watched.groups[group],
                before=self._copies.get(name),
                count=count,
            )

    def _alike(
        self,
        watched: _Watched,
        group: int,
        steps: Sequence[ParameterStep],
        made: Sequence[Tensor | None],
        *,
        causes: bool,
    ) -> list[Expansion]:
        """Return steps of parameters of one group with one step count, and what the rule made for each."""
        if not watched.rule.uniform or watched.skipped is not None:
            each = zip(steps, made, strict=True)
            return [self._expansion(watched, replace(step, made=own), causes=causes)[0] for step, own in each]
        key = (id(watched), group, steps[0].count, causes)
        if key not in self._patterns:
            self._patterns[key] = self._expansion(watched, replace(steps[0], made=made[0]), causes=causes)
        expansion, roles = self._patterns[key]
        own_tensors = {"parameter": attrgetter("parameter"), "gradient": attrgetter("gradient")}
        states = [step.state for step in steps]
        columns = [
            made if role == "made" else [*map(own_tensors[role], steps)] if role in own_tensors
            else [*map(itemgetter(role), states)]
            for role in roles
        ]  # fmt: skip
        return expansion.of_others([*zip(*columns, strict=True)])

    def _expansion(self, watched: _Watched, step: ParameterStep, *, causes: bool) -> tuple[Expansion, tuple[str, ...]]:
        """Return the step of one parameter, and what its tensors are to it where the rule is that of all in a group."""
        parameter, update = step.parameter, watched.rule.update(step)
        if watched.skipped is not None:
            return Expansion.of(parameter, _unless(watched.skipped, update, parameter), causes=causes), ()
        tensors: dict[str, Any] = {"parameter": parameter, "gradient": step.gradient, **step.state}
        expansion = Expansion.of(parameter, update, causes=causes, held={*map(id, tensors.values())})
        role_of = {id(tensor): role for role, tensor in {**tensors, "made": step.made}.items()}
        return expansion, tuple(role_of[origin] for origin in expansion.origins) if watched.rule.uniform else ()

    def _counts(self, watched: _Watched, names: Sequence[str], stored: Sequence[Any]) -> list[float | None]:
        """Return the number of steps of each parameter, as far as it is known without waiting for a device."""
        readable = {*map(type, stored)} == {Tensor} and not any(map(remote, stored))
        if readable and all(count.numel() == 1 for count in stored):
            return [*map(float, stored)]
        return [self._count(watched, name) for name in names]

    def _count(self, watched: _Watched, name: str) -> float | None:
        """Return the number of steps, read from the device once.

        A scaler that skips steps leaves no way to follow it.
        """
        count = watched.optimizer.state[self._theta[name]].get("step")
        if isinstance(count, int | float):
            return count
        if not isinstance(count, Tensor) or count.numel() != 1:
            return None
        if not remote(count):
            return float(count)
        if watched.skipped is not None:
            return None
        if name not in watched.counts:
            watched.counts[name] = float(count)
        return watched.counts[name]

    def _keeps(self, name: str) -> bool:
        watched, options = self._owner(name)
        return watched.rule.keeps(options)

    def _owner(self, name: str) -> tuple[_Watched, dict[str, Any]]:
        """Return the optimizer that steps a parameter, and its options for it."""
        watched, group = self._place[name]
        return watched, watched.optimizer.param_groups[group]

    def _find_places(self) -> None:
        for watched in self._watched:
            for number, group in enumerate(watched.optimizer.param_groups):
                if number >= len(watched.sums):
                    watched.sums.append(GroupSums())
                for parameter in group["params"]:
                    name = self._names.get(id(parameter))
                    if name is not None:
                        self._place[name] = (watched, number)

    def _notice_conversion(self) -> None:
        """Detect parameters whose type has changed since the last step, before their optimizer fails on them."""
        changed = [name for name in self._place if self._theta[name].dtype != self._types[name]]
        for name in changed:
            watched = self._place[name][0]
            optimizer, state = watched.optimizer, watched.optimizer.state[self._theta[name]]
            averages = [state.get(average) for average in watched.rule.averages]
            now, before = (str(kind).removeprefix("torch.") for kind in (self._theta[name].dtype, self._types[name]))
            if any(isinstance(item, Tensor) and item.dtype != self._theta[name].dtype for item in averages):
                message = (
                    f"{name} was {before} and is {now} since the last step, while {type(optimizer).__name__} keeps its "
                    "averages as they were and cannot step. Convert the model before its optimizer is made, let "
                    "optimizer.load_state_dict(optimizer.state_dict()) convert the averages, or train under autocast."
                )
                if self._boundary.strict:
                    raise PrecisionChangedError(message)
                self._boundary.remark("precision", message)
                return
        if changed:
            self._types |= {name: self._theta[name].dtype for name in changed}
            self._converted(changed)

    def _start(self, watched: _Watched) -> None:
        """Prepare for a step."""
        if watched.depth and _running(watched.optimizer) <= 1:
            # The last step ended with an exception, so that its end was not seen.
            watched.depth = 0
        if watched.depth == 0:
            self._notice_conversion()
        watched.depth += 1
        if watched.depth > 1 or not self._sampled():
            return
        if not self.stepped:
            self._before_step()
        for name, (owner, _) in self._place.items():
            if owner is watched and self._keeps(name):
                self._copies[name] = self._theta[name].detach().clone()

    def _end(self, watched: _Watched, optimizer: Optimizer) -> None:
        """Record the hyperparameters and the state of a step that has ended."""
        watched.depth -= 1
        if watched.depth > 0:
            return
        if len(watched.sums) != len(optimizer.param_groups):
            self._find_places()
        watched.steps += 1
        watched.groups = [
            {key: _kept(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]
        watched.skipped = getattr(optimizer, "found_inf", None)
        watched.moved = {
            name
            for name, (owner, _) in self._place.items()
            if owner is watched and (self._theta[name].grad is not None or name in self._copies)
        }
        if watched.skipped is not None or watched.counted != id(optimizer.state):
            watched.counts, watched.counted = {}, id(optimizer.state)
        for name in watched.moved & watched.counts.keys():
            watched.counts[name] += 1
        gradients = {name: self._theta[name].grad for name in watched.moved} if self._sampled() else {}
        watched.versions = {name: version_of(g) for name, g in gradients.items() if g is not None}
        for sums, group in zip(watched.sums, watched.groups, strict=True):
            lr = group["lr"]
            sums.time = sums.time + lr
            sums.squares = sums.squares + lr * lr
            decay = watched.rule.decay(group)
            sums.decayed = nan if decay is None else sums.decayed + lr * decay
            momentum = watched.rule.momentum(group)
            sums.damped = 0.0 if momentum is None else sums.damped * momentum


def _running(optimizer: Optimizer) -> int:
    """Return how many `step` methods of an optimizer are on the stack, by frames of the wrapper that calls hooks."""
    count, frame = 0, sys._getframe()
    while (caller := frame.f_back) is not None:
        frame = caller
        if frame.f_code.co_name == "wrapper" and frame.f_globals.get("__name__") == "torch.optim.optimizer":
            count += optimizer in frame.f_locals.get("args", ())
    return count


def remote(tensor: Tensor) -> bool:
    """Return whether reading a number from the tensor would wait for a device."""
    return tensor.device.type != "cpu"


def _kept(value: Any) -> Any:
    """Return a hyperparameter as it is now: schedulers change tensors in place."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _unless(skipped: Tensor, update: Update, parameter: Tensor) -> Update:
    """Return the update, or nothing if the optimizer found infinities; decided on the device."""
    masked: dict[int, Tensor] = {id(parameter): torch.where(skipped > 0, 0.0, parameter.detach())}

    def mask(combination: Combination) -> Combination:
        total = Combination()
        for coefficient, tensor in combination.terms.values():
            if id(tensor) not in masked:
                masked[id(tensor)] = torch.where(skipped > 0, 0.0, tensor.detach())
            total = total + coefficient * Combination.of(masked[id(tensor)])
        return total

    return Update(
        parts={cause: mask(part) for cause, part in update.parts.items()},
        gradient=mask(update.gradient),
        rate=update.rate,
    )
