"""Do the replicas agree? Gradients before a step and parameters after it, over the processes that should share them."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from conserved.layout import layout_of
from conserved.layout.megatron import carries_attributes
from conserved.layout.replicas import projections
from conserved.rank_agreement import several_processes
from conserved.symmetry.view import local
from conserved.tolerances import RESIDUAL_TOLERANCE
from conserved.tracking.identities.finding import StepFinding, name_tensors
from conserved.tracking.identities.fingerprints import fingerprints, varies
from conserved.tracking.identities.rank_exchange import RankExchange
from conserved.tracking.identities.step_identity import (
    StepIdentity,
    TrainingStep,
    grouped_parameters,
    is_plain,
)

_EVERY_ON_DEVICE = 10
"""Steps from one comparison to the next on a GPU, where numbers have to come to the host."""

_ROUNDING = RESIDUAL_TOLERANCE[torch.bfloat16]
"""Relative difference of gradients that rounding explains in any precision a program may compute in."""

_BUFFER = 1 << 16
"""Entries of a buffer up to which it is compared."""

_PATIENCE = 3
"""Steps in which no gradient need agree before a loop is said to have forgotten to reduce: local SGD averages weights
after some steps instead. A loop with a longer period is accused once."""

_OVERDUE = 3
"""Periods of averaging after which a parameter that was not averaged is reported."""

_LAST = 2.0
"""Seconds to wait at the end for what other processes say of the last step."""


class EqualReplicas(StepIdentity):
    """Compares fingerprints of every tensor between processes, through the store that they met by.

    A model in `DistributedDataParallel` has to agree from its first step on. Plain tensors without a wrapper have to
    once they were equal at the start: then either all of their gradients are reduced, or the loop forgot to. If some
    tensors were equal at the start and others not, as in tensor or expert parallelism by hand, those that were equal
    are replicas and have to stay equal. A tensor of equal entries, as a gain of ones, says nothing about that. Loops
    that average weights every few steps (local SGD, DiLoCo, a communication hook that does so) have replicas that
    differ in between, and have to go on averaging.
    Parameters that are sharded or placed by a mesh are left to `check_replicas`.
    """

    name = "replicas"

    def __init__(self) -> None:
        self._exchange: RankExchange | None = None
        self._names: list[str] = []
        self._gradients: Tensor | None = None
        self._sums: Tensor | None = None
        """Norm of every gradient and two weighted sums, where some tensors only are replicas."""
        self._called = False
        """Whether the module that the monitor was given ran since the last step."""
        self._equal_start: bool | None = None
        self._common: dict[int, list[str]] = {}
        """By process, tensors that it shared with this one at the start, if it did not share all."""
        self._varied: list[str] = []
        """Tensors whose entries are not all equal, where some tensors only are replicas."""
        self._agreed: set[int] = set()
        """Processes with which all tensors agreed after some step."""
        self._different: dict[int, StepFinding] = {}
        """By process, the first step in which none of the gradients agreed."""
        self._alone: dict[int, int] = {}
        """By process, the number of such steps."""
        self._averages: dict[int, dict[str, list[int]]] = {}
        """By process that makes weights equal again after such steps, the steps in which a parameter became so."""
        self._was_apart: dict[int, set[str]] = {}
        """By process, the parameters that differed after its last step."""
        self._before: list[int] = []
        """Fingerprints of parameters before the step of this moment, where some process differs."""
        self._reported = False
        self._digest = 0
        self._received = False
        """Whether the model was ever called on tensors that need a gradient, as a stage of a pipeline is."""
        self._inputs: list[int] = []
        """Fingerprints of the inputs of this step's pass."""
        self._shared: dict[int, list[list[int]]] = {}
        """By process, inputs of steps in a row that were the same there and here."""
        self._buffers: dict[int, set[str]] = {}
        """By process, buffers that agreed in all steps so far."""
        self._buffer_names: list[str] = []
        self._mode: dict[str, str] = {}
        """Mode and autocast of the last pass with gradients."""
        self._reported_mode = False
        self._reported_inputs = self._noted_apart = False
        self._ignored: frozenset[str] = frozenset()
        """Tensors that the wrapper does not reduce."""
        self._holders: dict[str, set[int]] = {}
        """By tensor, the processes that hold replicas of it, where attributes of the stack say so."""

    def begin(self, step: TrainingStep) -> None:
        if not several_processes():
            return
        over = reducing_processes(step.called)
        if 0 < over < dist.get_world_size():
            # So does data parallelism beside other kinds.
            step.notes.append(
                f"DistributedDataParallel reduces gradients over {over} of {dist.get_world_size()} processes"
            )
        wrapper = _wrapper(step.called)
        norms = [name for name, norm in step.structure.batch_norms if norm.training and norm.track_running_stats]
        if wrapper is not None and norms and not wrapper.broadcast_buffers:
            step.notes.append(f"running statistics of {name_tensors(norms, 2)} are those of each process alone")
        named = [(name, p) for name, p in step.model.named_parameters() if _replicated(p)]
        if len(named) != sum(1 for _ in step.model.parameters()):
            # Sharded in part: what is left plain may be a part of something as well.
            return
        self._names = [name for name, _ in named]
        if carries_attributes(dict(named)):
            layout = layout_of(step.model)
            self._holders = {
                name: {rank for group in layout[name].replicated for rank in group.ranks} for name in self._names
            }
        wrapper = _wrapper(step.called)
        self._ignored = frozenset() if wrapper is None else frozenset(wrapper.parameters_to_ignore)
        self._exchange = RankExchange("replicas")
        self._digest = _digest([f"{name}{tuple(p.shape)}" for name, p in named])
        start = fingerprints([p for _, p in named]).tolist()
        varied = [varies(p) for _, p in named]
        self._exchange.show(0, {"parameters": start, "names": self._digest, "varied": varied})

    def before_forward(self, step: TrainingStep, module: nn.Module) -> None:
        self._called = True
        if self._exchange is not None and torch.is_grad_enabled():
            device = next((p.device.type for p in module.parameters()), "cpu")
            cast = torch.is_autocast_enabled(device)
            self._mode = {
                "mode": "train" if module.training else "eval",
                "autocast": str(torch.get_autocast_dtype(device)).removeprefix("torch.") if cast else "no",
            }

    def with_gradients(self, step: TrainingStep, optimizer: Optimizer) -> None:
        """Take fingerprints of the gradients that are about to be used."""
        self._received |= step.differentiable
        if self._exchange is not None and self._due(step) and not self._inputs:
            self._inputs = fingerprints([tensor for tensor in step.inputs if tensor.numel() > 1]).tolist()
        if self._exchange is None or not self._due(step):
            return
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        gradients = [
            p.grad if id(p) in own and p.grad is not None and is_plain(p.grad) else None
            for p in step.model.parameters()
        ]
        prints = fingerprints(gradients)
        self._gradients = prints if self._gradients is None else torch.where(prints != 0, prints, self._gradients)
        if self._exchange.behind(0):
            self._compare(step)
        if self._different and not self._before:
            self._before = fingerprints(list(step.model.parameters())).tolist()
        if self._common:
            sums = _projections(gradients)
            self._sums = sums if self._sums is None else torch.where(sums != 0, sums, self._sums)

    def after_step(self, step: TrainingStep) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        if self._due(step):
            wrapper = _wrapper(step.called)
            record: dict[str, Any] = {
                "parameters": fingerprints(list(step.model.parameters())).tolist(),
                "before": self._before,
                "gradients": None if self._gradients is None else self._gradients.tolist(),
                "sums": None if self._sums is None else self._sums.tolist(),
                "buffers": self._fingerprints_of_buffers(step),
                "inputs": self._inputs,
                "names": self._digest,
                "called": self._called,
                "received": self._received,
                "mode": self._mode,
                "sync": None if wrapper is None else bool(wrapper.require_backward_grad_sync),
            }
            exchange.show(step.number, record)
        self._gradients, self._sums, self._called, self._inputs, self._before = None, None, False, [], []
        self._compare(step)

    def close(self, step: TrainingStep) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        last = step.number - 1
        until = time.monotonic() + _LAST
        self._compare(step)
        while exchange.behind(last) and time.monotonic() < until and not self._reported:
            time.sleep(0.02)
            self._compare(step)
        if not self._reported:
            for finding in self._never_reduced(step, patience=0):
                step.report(finding)

    def restart(self) -> None:
        self._gradients = self._sums = None

    def _due(self, step: TrainingStep) -> bool:
        first = next(iter(step.model.parameters()), None)
        on_device = first is not None and first.device.type == "cuda"
        return not on_device or step.number % _EVERY_ON_DEVICE == 1

    def _compare(self, step: TrainingStep) -> None:
        assert self._exchange is not None
        for rank, number, theirs, own in self._exchange.arrivals():
            if theirs["names"] != own["names"] or rank not in self._replicas(step):
                # Another model on that process: stages of a pipeline, experts, replicas of another group.
                continue
            if number == 0:
                equal = theirs["parameters"] == own["parameters"]
                self._equal_start = equal if self._equal_start is None else self._equal_start and equal
                step.parted = not self._equal_start
                if not equal:
                    apart = {*_apart(theirs["parameters"], own["parameters"], self._names)} | self._held_apart(rank)
                    varied = [name for name, varies in zip(self._names, own["varied"], strict=True) if varies]
                    self._varied = varied
                    self._common[rank] = [name for name in varied if name not in apart]
                    step.alike = frozenset.intersection(*map(frozenset, self._common.values()))
                # What the wrapper ignores and processes hold apart is each one's own, as rows of a table dealt out.
                names = self._apart(rank, theirs["parameters"], own["parameters"])
                self._holders |= {name: {self._exchange.rank} for name in names if name in self._ignored}
                names = self._apart(rank, theirs["parameters"], own["parameters"])
                if names and _wrapper(step.called) is not None:
                    # The wrapper sends the first process's parameters to all when it is made.
                    self._reported = True
                    step.report(self._finding("parameters", names, rank, 1, own))
                continue
            self._look_at_inputs(step, rank, number, theirs, own)
            self._look_at_modes(step, rank, number, theirs, own)
            for finding in self._judge(step, rank, number, theirs, own):
                if not self._reported:
                    self._reported = True
                    step.report(finding)
        step.alone = bool(self._different or self._averages)

    def _judge(
        self, step: TrainingStep, rank: int, number: int, theirs: dict[str, Any], own: dict[str, Any]
    ) -> Iterator[StepFinding]:
        wrapped = _wrapper(step.called) is not None
        if not wrapped and (theirs["received"] or own["received"]):
            # Stages of a pipeline: other parameters, even if names, shapes and seeds are the same.
            return
        if not wrapped and rank in self._common:
            yield from self._judge_common(rank, number, theirs, own)
        if not wrapped and self._equal_start is not True:
            yield from self._different_starts(rank, number, theirs, own)
            return
        yield from self._look_at_buffers(step, rank, number, theirs, own)
        parameters = self._apart(rank, theirs["parameters"], own["parameters"])
        gradients = (
            self._apart(rank, theirs["gradients"], own["gradients"]) if theirs["gradients"] and own["gradients"] else []
        )
        if not gradients and not parameters:
            self._agreed.add(rank)
            return
        what, names = ("gradients", gradients) if gradients else ("parameters", parameters)
        finding = self._finding(what, names, rank, number, own)
        alone = bool(gradients) and len(gradients) == sum(map(bool, own["gradients"]))
        # A wrapper without a hook of the program's reduces gradients in every step.
        may_average = not wrapped or _has_hook(step.called)
        if may_average:
            self._note_averages(rank, number, parameters, theirs, own)
        if not wrapped and not parameters:
            # An optimizer that reduces gradients within its step leaves equal parameters.
            return
        if alone and rank in self._averages:
            yield from self._overdue(rank, number, own)
        elif alone and may_average and (wrapped or rank not in self._agreed):
            self._different.setdefault(rank, finding)
            self._alone[rank] = self._alone.get(rank, 0) + 1
            yield from self._never_reduced(step, _PATIENCE, hooked=wrapped)
        elif wrapped or rank in self._agreed or (gradients and _is_network(step, gradients, own, self._names)):
            yield finding
        elif gradients and not self._noted_apart:
            # Parts of a model that is split by hand are as different.
            self._noted_apart = True
            step.notes.append(f"gradients of {name_tensors(names)} differ between ranks, and those of others agree")

    def _apart(self, rank: int, theirs: list[int], own: list[int]) -> list[str]:
        """Return the tensors that differ and that both processes should hold alike, as far as the stack says so."""
        held_apart = self._held_apart(rank)
        return [name for name in _apart(theirs, own, self._names) if name not in held_apart]

    def _held_apart(self, rank: int) -> set[str]:
        """Return the tensors of which the stack says that another process holds other entries."""
        return {name for name, ranks in self._holders.items() if rank not in ranks}

    def _judge_common(
        self, rank: int, number: int, theirs: dict[str, Any], own: dict[str, Any]
    ) -> Iterator[StepFinding]:
        """Yield tensors that two processes shared at the start and whose gradients and values differ now.

        The program that computes their gradients may differ by process, so that rounding does; an optimizer may reduce
        gradients within its step, which leaves equal parameters.
        """
        moved = {*self._apart(rank, theirs["parameters"], own["parameters"])}.intersection(self._common[rank])
        if not moved or not theirs["sums"] or not own["sums"]:
            return
        differing = [
            name
            for name, own_sums, their_sums in zip(self._names, own["sums"], theirs["sums"], strict=True)
            if name in moved
            and own_sums[0]
            and their_sums[0]
            and math.dist(own_sums, their_sums) > _ROUNDING * max(own_sums[0], their_sums[0])
        ]
        if not differing:
            return
        # The bias of an expert or of a split layer may begin like that of another process, and is no replica.
        whole = [name for name in differing if self._is_whole(rank, name)]
        finding = self._finding("gradients", whole or differing, rank, number, own)
        yield finding if whole else replace(finding, certain=False)

    def _is_whole(self, rank: int, name: str) -> bool:
        """Return whether no other tensor of the same module differed from that of another process at the start."""
        module = name.rpartition(".")[0]
        siblings = {other for other in self._varied if other.rpartition(".")[0] == module}
        return siblings <= {*self._common[rank]}

    def _different_starts(
        self, rank: int, number: int, theirs: dict[str, Any], own: dict[str, Any]
    ) -> Iterator[StepFinding]:
        """Yield a finding if all gradients are equal to the bit and all parameters with one are not.

        Only a reduction makes gradients of different weights equal, and what is reduced is meant to be replicated.
        """
        gradients = [(a, b) for a, b in zip(theirs["gradients"] or (), own["gradients"] or (), strict=False) if a or b]
        apart = self._apart(rank, theirs["parameters"], own["parameters"])
        if len(gradients) > 1 and all(a == b for a, b in gradients) and 2 * len(apart) > len(self._names):
            assert self._exchange is not None
            ranks = tuple(sorted((self._exchange.rank, rank)))
            yield StepFinding(
                code="replicas",
                tensor=apart[0],
                others=tuple(apart[1:]),
                step=number,
                ranks=ranks,
                message=f"The parameter {name_tensors(apart)} differs between ranks {ranks[0]} and {ranks[1]}, and the "
                "gradients are reduced over them: replicas did not start from the same weights. Broadcast them first.",
            )

    def _fingerprints_of_buffers(self, step: TrainingStep) -> list[int]:
        named = [(n, b) for n, b in step.model.named_buffers() if is_plain(b) and 0 < b.numel() <= _BUFFER]
        self._buffer_names = [name for name, _ in named]
        return fingerprints([b for _, b in named]).tolist()

    def _look_at_buffers(
        self, step: TrainingStep, rank: int, number: int, theirs: dict[str, Any], own: dict[str, Any]
    ) -> Iterator[StepFinding]:
        """Yield buffers that agreed up to now and differ; running statistics differ from the first step on."""
        names = self._buffer_names
        if len(theirs["buffers"]) != len(names) or len(own["buffers"]) != len(names):
            return
        apart = set(_apart(theirs["buffers"], own["buffers"], names))
        agreed = self._buffers.get(rank)
        self._buffers[rank] = set(names) - apart if agreed is None else agreed - apart
        constant = sorted(name for name in apart if not name.endswith(("running_mean", "running_var")))
        if agreed is None and constant:
            step.notes.append(f"from the start buffers differ between ranks: {name_tensors(constant)}")
        changed = [name for name in names if agreed and name in agreed and name in apart]
        if changed:
            assert self._exchange is not None
            ranks = tuple(sorted((self._exchange.rank, rank)))
            yield StepFinding(
                code="replicas",
                tensor=changed[0],
                others=tuple(changed[1:]),
                step=number,
                ranks=ranks,
                message=f"The buffer {name_tensors(changed)} differs between ranks {ranks[0]} and "
                f"{ranks[1]} since step "
                f"{number} and agreed before: it was written to on one process only.",
            )

    def _look_at_modes(
        self, step: TrainingStep, rank: int, number: int, theirs: dict[str, Any], own: dict[str, Any]
    ) -> None:
        """Report data-parallel processes whose passes differ in mode or autocast."""
        replicas = _wrapper(step.called) is not None or (self._equal_start is True and not theirs["received"])
        apart = [key for key, value in own["mode"].items() if theirs["mode"].get(key, value) != value]
        if not replicas or not apart or self._reported_mode:
            return
        self._reported_mode = True
        assert self._exchange is not None
        key, ranks = apart[0], tuple(sorted((self._exchange.rank, rank)))
        values = {self._exchange.rank: own["mode"][key], rank: theirs["mode"][key]}
        step.report(
            StepFinding(
                code="replicas",
                step=number,
                ranks=ranks,
                message=f"Passes differ between ranks: {key} {values[ranks[0]]} on rank {ranks[0]}, {key} "
                f"{values[ranks[1]]} on rank {ranks[1]}. Gradients are averaged over both. Set mode and precision "
                "alike on all processes.",
            )
        )

    def _look_at_inputs(
        self, step: TrainingStep, rank: int, number: int, theirs: dict[str, Any], own: dict[str, Any]
    ) -> None:
        """Report data-parallel processes that run the same batches, two different ones in a row."""
        same = bool(own["inputs"]) and theirs["inputs"] == own["inputs"]
        row = self._shared[rank] = [*self._shared.get(rank, []), own["inputs"]][-2:] if same else []
        if _wrapper(step.called) is None or self._reported_inputs or len(row) < 2 or row[0] == row[1]:
            return
        self._reported_inputs = True
        assert self._exchange is not None
        ranks = tuple(sorted((self._exchange.rank, rank)))
        step.report(
            StepFinding(
                code="same data",
                certain=True,
                step=number - 1,
                ranks=ranks,
                message=f"Ranks {ranks[0]} and {ranks[1]} run the same batches: more processes bring no more data. Is "
                "DistributedSampler missing, or is every process seeded alike?",
            )
        )

    def _note_averages(
        self, rank: int, number: int, parameters: list[str], theirs: dict[str, Any], own: dict[str, Any]
    ) -> None:
        """Note parameters that differed after a step and agree again: the loop averages weights.

        It may do so before the step is over, or between two steps.
        """
        now = {*parameters}
        if theirs["before"] and own["before"]:
            now &= {*self._apart(rank, theirs["before"], own["before"])}
        again = self._was_apart.get(rank, set()) - now
        self._was_apart[rank] = {*parameters}
        if not again:
            return
        steps = self._averages.setdefault(rank, {})
        for name in again:
            steps.setdefault(name, []).append(number)
        self._different.pop(rank, None)

    def _overdue(self, rank: int, number: int, own: dict[str, Any]) -> Iterator[StepFinding]:
        """Yield parameters that were averaged no more, or never, while a loop averaged others again and again."""
        steps = self._averages[rank]
        periods = [later - former for several in steps.values() for former, later in itertools.pairwise(several)]
        if not periods:
            return
        due = _OVERDUE * max(periods)
        late = [name for name in self._was_apart[rank] if number - steps.get(name, [0])[-1] > due]
        if late:
            yield self._finding("averaged", sorted(late), rank, number, own)

    def _never_reduced(self, step: TrainingStep, patience: int, *, hooked: bool = False) -> Iterator[StepFinding]:
        """Yield the finding that no two processes agree any more: a loop without a wrapper does not reduce gradients.

        Parts of a model that are split by hand differ in some tensors and agree in others from the first step on, and
        groups that reduce among themselves agree within a group. A reduction that was forgotten leaves no gradient
        equal to that of any process. Under a wrapper, whose hook decides (`hooked`), one process is enough.
        """
        assert self._exchange is not None
        everybody = len(self._different) == self._exchange.compared and not self._agreed
        if step.averages:
            # Weights are pulled together without ever being equal, as by elastic averaging and gossip.
            return
        steps = [self._alone[rank] for rank in self._different]
        if steps and (max(steps) if hooked else everybody * min(steps)) > patience:
            yield self._different[min(self._different)]

    def _finding(self, what: str, names: list[str], rank: int, number: int, own: dict[str, Any]) -> StepFinding:
        assert self._exchange is not None
        ranks = tuple(sorted((self._exchange.rank, rank)))
        if what == "gradients":
            cause = (
                "no_sync() was on in the last backward pass."
                if own.get("sync") is False
                else "The module inside DistributedDataParallel was called, and not the wrapper."
                if own.get("sync") is True and not own["called"]
                else "They were not reduced over the processes: was a hook of the wrapper lost when the model "
                "was moved, an all-reduce left out, or were they changed on one process afterwards?"
            )
        elif what == "averaged":
            cause = "The loop averages weights over processes every few steps, and these no more."
        else:
            cause = (
                "They were initialised differently, or loaded on one process only."
                if number <= 1 and own.get("gradients") is None
                else "The gradients agree, so the update or a later write differs by process."
            )
        whose = "The gradient" if what == "gradients" else "The parameter"
        return StepFinding(
            code="replicas",
            tensor=names[0],
            others=tuple(names[1:]),
            step=number,
            ranks=ranks,
            message=f"{whose} {'of ' if what == 'gradients' else ''}{name_tensors(names)} differs between ranks "
            f"{ranks[0]} and {ranks[1]}. {cause}",
        )

    def _replicas(self, step: TrainingStep) -> Collection[int]:
        """Return the ranks that hold replicas: those of the wrapper's process group, or all."""
        assert self._exchange is not None
        wrapper = _wrapper(step.called)
        if wrapper is None:
            return range(self._exchange.world)
        return dist.get_process_group_ranks(wrapper.process_group) if dist.is_initialized() else ()


def _wrapper(called: nn.Module) -> DistributedDataParallel | None:
    while True:
        if isinstance(called, DistributedDataParallel):
            return called
        inner = called._modules.get("_orig_mod")
        if inner is None:
            return None
        called = inner


def _has_hook(called: nn.Module) -> bool:
    """Return whether a data-parallel wrapper has a communication hook, which may leave reductions to others."""
    wrapper = _wrapper(called)
    return wrapper is not None and bool(getattr(wrapper, "_comm_hooks", ()))


def reducing_processes(model: nn.Module) -> int:
    """Return over how many processes the wrappers in a model reduce gradients, the fewest of them; 0 without any."""
    wrappers = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    return min((wrapper.process_group.size() for wrapper in wrappers), default=0)


def _replicated(parameter: Tensor) -> bool:
    return is_plain(parameter) and not hasattr(parameter, "device_mesh")


def _is_network(step: TrainingStep, names: list[str], own: dict[str, Any], every: list[str]) -> bool:
    """Return whether names are those of one optimizer of several, and of whole parts of the model.

    So are the networks of a game. Matrices that are split by hand stand in parts that have whole tensors as well.
    """
    if len(step.optimizers) < 2:
        return False
    known = step.names()
    graded = {name for name, has_gradient in zip(every, own["gradients"], strict=True) if has_gradient}
    parts = {name.partition(".")[0] for name in names}
    return {name for name in graded if name.partition(".")[0] in parts} == set(names) and any(
        {known.get(id(p), "") for p in grouped_parameters(optimizer)} & graded == set(names)
        for optimizer in step.optimizers
    )


def _apart(theirs: list[int], own: list[int], names: list[str]) -> list[str]:
    """Return the tensors whose fingerprints differ."""
    if len(theirs) != len(own):
        return list(names)
    return [name for name, a, b in zip(names, theirs, own, strict=True) if a != b]


def _projections(tensors: Sequence[Tensor | None]) -> Tensor:
    """Return the norm of every tensor and two weighted sums of its entries; zeros for tensors that are not there."""
    rows = [
        torch.zeros(3, dtype=torch.float64) if tensor is None or not is_plain(tensor) else projections(local(tensor))
        for tensor in tensors
    ]
    return torch.stack([row.cpu() for row in rows])


def _digest(names: list[str]) -> int:
    return sum(ord(letter) * (index + 1) for name in names for index, letter in enumerate(name))
