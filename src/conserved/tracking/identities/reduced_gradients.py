"""Is the gradient that is used the sum over processes? A few entries before the reduction, against those used.

A distributed optimizer leaves every process with a shard of the reduced gradients, so that there are no replicas to
compare; nor are there where parameters are dealt out to the optimizers of several processes, which send them after the
step. Without the reduction each process uses what it computed from its own batch, and identities within a shard still
hold. What has to hold is that the entries used are those of the sum of all processes, up to one factor.

Replicas may also agree on a gradient that is not that sum: of one process alone, the largest entries of all, or divided
too often. In the first steps of a run the gradient used, u, is fitted by those computed, u = Σ c_r g_r. One c_r for
all is a mean. Where the fit leaves something, a loop compresses gradients or adds to them, and nothing follows.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from conserved.boundary import guarded
from conserved.layout import layout_of
from conserved.layout.gradients import gradient_of, owned_ranges, scatters_gradients
from conserved.layout.megatron import carries_attributes
from conserved.rank_agreement import several_processes
from conserved.tracking.identities.finding import StepFinding
from conserved.tracking.identities.rank_exchange import MOST, RankExchange
from conserved.tracking.identities.step_identity import StepIdentity, TrainingStep, is_plain

_PARAMETERS = 4
"""Parameters that are looked at: the smallest with enough entries."""

_ENTRIES = 32
"""Entries of each."""

_LEAST = 8
"""Entries that have to be there for a direction to say anything."""

_ALIKE = 1e-3
"""Relative distance of two directions that counts as none, above rounding in half precision of few entries."""

_FIRST = 4
"""Steps in which gradients that all replicas agree on are compared with those they computed."""

_MOST_FITTED = 4
"""Processes that a gradient is fitted by: every one needs a few entries."""

_DIFFERENT = 0.03
"""Relative distance of what processes computed from which on their mean is another gradient than that of one."""

_EVEN = 0.05
"""How far weights of processes may be apart, relative to the largest, to be those of a mean."""

_KEPT = 16
"""Steps for which numbers of other processes are awaited."""


class ReducedGradients(StepIdentity):
    """Compares entries of gradients before and after they are scattered over data-parallel processes."""

    name = "reductions"

    def __init__(self) -> None:
        self._exchange: RankExchange | None = None
        self._ranks: tuple[int, ...] = ()
        self._parameters: dict[str, Tensor] = {}
        self._handles: list[Any] = []
        self._computed: dict[str, Tensor] = {}
        """By parameter, the entries that backward passes of this step have computed here."""
        self._used: dict[int, dict[str, tuple[Tensor, Tensor]]] = {}
        """By step, the entries about to be used and which of them this process holds reduced."""
        self._shown: dict[int, dict[int, Mapping[str, list[float]]]] = {}
        """By step and process, the entries computed there."""
        self._reported = False
        self._agree = False
        """Whether parameters are replicas, whose gradients should be a mean over processes."""
        self._agreed: dict[int, dict[int, Mapping[str, list[float]]]] = {}
        """By step and process, the entries about to be used there."""
        self._divided: set[int] = set()
        """Steps in which all gradients were the mean, divided by the number of processes once more."""
        self._held: dict[int, list[str]] | None = None
        """By process, the parameters that its optimizers hold, where they may be dealt out; None in other runs."""

    def begin(self, step: TrainingStep) -> None:
        if not several_processes():
            return
        # Exchanges are numbered, so that every process makes one.
        exchange, layout = RankExchange("reductions"), layout_of(step.model)
        group = layout.data_parallel
        if group is not None and scatters_gradients(step.called):
            self._ranks = group.ranks
        elif self._may_be_dealt_out(step) and not layout.joint:
            self._ranks = tuple(range(exchange.world))
            optimized = step.optimized_ids()
            names = [name for name, p in step.model.named_parameters() if id(p) in optimized]
            self._held = {exchange.rank: names}
            exchange.show(0, {"held": names})
        elif self._are_replicas(step):
            self._ranks, self._agree = self._ranks_of(step, exchange), True
        else:
            return
        self._exchange = exchange
        trained = [(n, p) for n, p in step.model.named_parameters() if p.requires_grad and p.numel() >= _ENTRIES]
        self._parameters = dict(sorted(trained, key=lambda pair: pair[1].numel())[:_PARAMETERS])
        for name, parameter in self._parameters.items():
            hook = guarded(_note_with(weakref.ref(self), name))
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def _are_replicas(self, step: TrainingStep) -> bool:
        """Return whether all parameters are plain tensors, of which other processes may have replicas."""
        parameters = dict(step.model.named_parameters())
        plain = all(is_plain(p) and not hasattr(p, "device_mesh") for p in parameters.values())
        return plain and not carries_attributes(parameters) and dist.get_world_size() <= _MOST_FITTED

    def _ranks_of(self, step: TrainingStep, exchange: RankExchange) -> tuple[int, ...]:
        """Return the processes that reduce gradients together: those of the wrapper, or all."""
        if isinstance(step.called, DistributedDataParallel):
            return tuple(dist.get_process_group_ranks(step.called.process_group))
        return tuple(range(exchange.world))

    def _may_be_dealt_out(self, step: TrainingStep) -> bool:
        """Return whether the optimizers of this process hold some of the trained parameters and not all."""
        optimized = step.optimized_ids()
        trained = [id(p) in optimized for p in step.model.parameters() if p.requires_grad]
        return any(trained) and not all(trained) and dist.get_world_size() <= MOST

    @property
    def _dealt_out(self) -> bool:
        """Whether every parameter is held by the optimizer of one process; True where gradients are scattered."""
        if self._held is None:
            return True
        names = [name for named in self._held.values() for name in named]
        return {*self._held} == {*self._ranks} and len(names) == len({*names})

    def note(self, name: str, gradient: Tensor) -> None:
        """Add entries of a gradient that a backward pass has computed."""
        entries = _sample(gradient.detach()).double()
        # What is scattered is cleared after every pass; plain gradients are sums of all passes so far.
        former = self._computed.get(name) if self._held is None and not self._agree else None
        self._computed[name] = entries if former is None else former + entries

    def with_gradients(self, step: TrainingStep, optimizer: Optimizer) -> None:
        """Take the entries that are about to be used, and show those that were computed."""
        if self._exchange is None or step.number in self._used or not self._computed:
            return
        if self._agree and step.number > _FIRST:
            self.close(step)
            return
        used: dict[str, tuple[Tensor, Tensor]] = {}
        ranges = owned_ranges(step.called, [*self._parameters.values()])
        for (name, parameter), (start, end) in zip(self._parameters.items(), ranges, strict=True):
            gradient = gradient_of(parameter)
            stepped = self._held is None or name in self._held[self._exchange.rank]
            if gradient is not None and name in self._computed and stepped:
                indices = _sample(torch.arange(parameter.numel(), device=gradient.device))
                used[name] = (_sample(gradient.detach()).double().cpu(), ((indices >= start) & (indices < end)).cpu())
        self._used[step.number] = used
        computed = {name: entries.tolist() for name, entries in self._computed.items()}
        numbers = {name: entries.tolist() for name, (entries, _) in used.items()} if self._agree else {}
        self._exchange.show(step.number, {"computed": computed, "used": numbers})
        self._agreed.setdefault(step.number, {})[self._exchange.rank] = numbers
        self._shown.setdefault(step.number, {})[self._exchange.rank] = computed
        self._computed = {}

    def after_step(self, step: TrainingStep) -> None:
        if self._exchange is None:
            return
        for rank, number, others_own, _ in self._exchange.arrivals():
            if number == 0 and self._held is not None:
                self._held[rank] = others_own["held"]
                continue
            self._shown.setdefault(number, {})[rank] = others_own["computed"]
            self._agreed.setdefault(number, {})[rank] = others_own["used"]
        for number in sorted(self._used):
            complete = {*self._ranks} <= {*self._shown.get(number, {})}
            if complete and self._agree:
                del self._used[number]
                self._judge_replicas(step, number, self._agreed.pop(number), self._shown.pop(number))
            elif complete and self._dealt_out:
                self._judge(step, number, self._used.pop(number), self._shown.pop(number))
            elif number < step.number - _KEPT:
                del self._used[number]
                self._shown.pop(number, None)

    def close(self, step: TrainingStep) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def restart(self) -> None:
        self._computed = {}

    def _judge(
        self,
        step: TrainingStep,
        number: int,
        used: Mapping[str, tuple[Tensor, Tensor]],
        shown: Mapping[int, Mapping[str, list[float]]],
    ) -> None:
        assert self._exchange is not None
        rank = self._exchange.rank
        for name, (entries, owned) in used.items():
            if any(name not in shown[other] for other in self._ranks):
                continue
            parts = [torch.tensor(shown[other][name], dtype=torch.float64) for other in self._ranks]
            total, own = torch.stack(parts).sum(0)[owned], parts[self._ranks.index(rank)][owned]
            entries = entries[owned]
            if len(entries) < _LEAST or self._reported:
                continue
            if _distance(entries, own) <= _ALIKE < _distance(entries, total):
                self._reported = True
                step.report(
                    StepFinding(
                        code="replicas",
                        tensor=name,
                        step=number,
                        ranks=(rank,),
                        value=_distance(entries, total),
                        limit=_ALIKE,
                        message=f"The gradient of {name} that the optimizer uses on rank {rank} is the one that this "
                        "process computed from its own batch, and not the sum over its data-parallel group "
                        f"{self._ranks}: the reduction before the step is missing.",
                    )
                )

    def _judge_replicas(
        self,
        step: TrainingStep,
        number: int,
        used: Mapping[int, Mapping[str, list[float]]],
        computed: Mapping[int, Mapping[str, list[float]]],
    ) -> None:
        """Report gradients that replicas agree on and that are not the mean of those they computed."""
        factors: list[float] = []
        for name in self._parameters:
            if any(name not in used[rank] or name not in computed[rank] for rank in self._ranks):
                continue
            uses, parts = (
                torch.tensor([numbers[rank][name] for rank in self._ranks], dtype=torch.float64)
                for numbers in (used, computed)
            )
            finding = self._compare_with_mean(name, number, uses, parts, factors)
            if finding is not None and not self._reported:
                self._reported = True
                step.report(finding)
        count = len(self._ranks)
        if factors and all(abs(factor * count - 1) <= _ALIKE for factor in factors):
            self._divided.add(number)
        if {number - 1, number} <= self._divided and not self._reported:
            self._reported = True
            step.report(
                StepFinding(
                    code="replicas",
                    certain=False,
                    step=number - 1,
                    message=f"Gradients are the mean over the {count} processes divided by {count} once more, in every "
                    "step: is there a division beside that of DistributedDataParallel, or one in the loss as well?",
                )
            )

    def _compare_with_mean(
        self, name: str, number: int, uses: Tensor, parts: Tensor, factors: list[float]
    ) -> StepFinding | None:
        """Return what is wrong with one gradient, or add its factor over the mean to `factors`."""
        entries, size = uses[0], float(uses[0].norm())
        agree = float((uses - entries).norm()) <= _ALIKE * size
        differ = float((parts - parts[0]).norm()) > _DIFFERENT * float(parts[0].norm())
        if not agree or not differ or not size or len(entries) < _LEAST * len(parts):
            return None
        mean = parts.mean(0)
        if _distance(entries, mean) <= _ALIKE:
            factors.append(float(entries @ mean) / float(mean @ mean))
            return None
        what, certain = "", True
        for rank, part in zip(self._ranks, parts, strict=True):
            if _distance(entries, part) <= _ALIKE:
                what = f"that of rank {rank} alone. Was it broadcast, or reduced to one process, and not averaged?"
        if _distance(entries, parts.amax(0)) <= _ALIKE or _distance(entries, parts.amin(0)) <= _ALIKE:
            what = "made of the largest entries of all processes, or the smallest. Is another ReduceOp meant?"
        if not what:
            weights = torch.linalg.lstsq(parts.t(), entries).solution
            fits = float((weights @ parts - entries).norm()) <= _ALIKE * size
            if not fits or float(weights.max() - weights.min()) <= _EVEN * float(weights.abs().max()):
                return None
            shares = ", ".join(f"{weight:.3g}" for weight in weights.tolist())
            what = f"a sum with the weights {shares}. Were they clipped or scaled by process before the reduction?"
            certain = False
        return StepFinding(
            code="replicas",
            tensor=name,
            step=number,
            certain=certain,
            ranks=self._ranks[:2],
            value=_distance(entries, mean),
            limit=_ALIKE,
            message=f"The gradient of {name} is the same on all processes and not their mean: it is {what}",
        )


def _note_with(identity: weakref.ref[ReducedGradients], name: str) -> Any:
    # Weak reference: hooks of a parameter would keep the identity and its model alive.
    def hook(parameter: Tensor) -> None:
        alive = identity()
        if alive is not None and parameter.grad is not None and not parameter.grad.is_sparse:
            alive.note(name, parameter.grad)

    return hook


def _sample(tensor: Tensor) -> Tensor:
    """Return evenly spread entries of a tensor."""
    flat = tensor.flatten()
    return flat[:: max(1, flat.numel() // _ENTRIES)][:_ENTRIES]


def _distance(entries: Tensor, direction: Tensor) -> float:
    """Return how far entries are from a multiple of a direction, relative to their size."""
    size, length = float(entries.norm()), float(direction.norm())
    if not size or not length:
        return 0.0 if size == length else 1.0
    unit = direction / length
    return float((entries - (entries @ unit) * unit).norm()) / size
