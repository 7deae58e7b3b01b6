"""The interface of an identity of a step, and the record of a step that it receives."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from conserved.moment import HostCopy
from conserved.rank_agreement import several_processes
from conserved.tracking.identities.finding import StepFinding
from conserved.tracking.identities.model_structure import ModelStructure
from conserved.tracking.identities.run_objects import RunObjects

_OPTIMIZER_FILE = Optimizer.profile_hook_step.__code__.co_filename
"""The file that defines the wrapper of `step`."""

Decide = Callable[[Tensor], Iterable[StepFinding]]
"""Given numbers that have arrived on the host, yields findings about them."""


_BATCHES = 8
"""Passes of a step whose inputs are distinguished."""

_BATCH_ENTRIES = 64


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class TrainingStep:
    """The step under way: whose it is, and where findings about it go."""

    model: nn.Module
    """The model without wrappers."""
    called: nn.Module
    """The module that the loop calls, with its wrappers."""
    optimizers: list[Optimizer]
    number: int = 1
    """The number of the step under way, from 1."""
    closure: bool = False
    """Whether the optimizer computes its gradients inside its step."""
    thorough: bool = True
    """Whether checks that cost time are made in this step."""
    paused: bool = False
    """Whether passes under way are the monitor's own."""
    passes: int = 0
    """Forward passes with gradients since the last step."""
    inputs: tuple[Tensor, ...] = ()
    """The tensors that the last forward pass with gradients got, until the step ends."""
    arguments: tuple[tuple[Any, ...], Mapping[str, Any]] = ((), {})
    """The arguments of that pass, until the step ends."""
    batches: list[Tensor] = field(default_factory=list)
    """Some entries of the first input of every such pass of this step, of the first few."""
    seen_batches: list[int] = field(default_factory=list)
    """Fingerprints of the first batch of the run, and of the last so far."""
    call_sites: list[int] = field(default_factory=list)
    """Where in the program those passes were called, as hashes of the stack."""
    shapes: set[torch.Size] = field(default_factory=set)
    """The shapes of the first input of every such pass of this step."""
    old_gradients: bool = False
    """Whether tensors of other optimizers have gradients in which used ones still are, as in loops that take turns."""
    slowed: int = -1
    """The last step after which the loop went back to slow weights, as Lookahead does."""
    restarted: int = -1
    """The last step that began with new weights, parameters or rates and a new state of the optimizer."""
    rewritten: bool | None = None
    """Whether the program writes to weights besides its optimizers, as it means to; None if nothing was written."""
    objects: RunObjects | None = None
    """Scalers, schedulers and averages of the process, once they were searched for."""
    parted: bool | None = None
    """Whether processes hold some parameters apart, as experts and layers split by hand; None while it is not known."""
    alike: frozenset[str] = frozenset()
    """Parameters that all processes held alike at the start, where some were apart."""
    alone: bool = False
    """Whether no gradient of this process agrees with that of another one, as in loops that average weights instead."""
    averages: bool = False
    """Whether the loop wrote to most weights by itself while that was so, as it does where it averages them."""
    differentiable: bool = False
    """Whether inputs of a pass of this step require a gradient, as those of adversarial training do."""
    findings: list[StepFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Settings that may be intended or not, for the line at the start or the end of a run."""
    remarks: list[tuple[str, str]] = field(default_factory=list)
    """Remarks for the status line that are not alarms: a subject, and a sentence about it."""
    _structure: ModelStructure | None = None
    _awaited: list[tuple[int, HostCopy, Decide]] = field(default_factory=list)

    @property
    def rank(self) -> int | None:
        """The number of this process; None outside a distributed run."""
        return dist.get_rank() if several_processes() else None

    def report(self, finding: StepFinding) -> None:
        """Keep a finding; it is about the step under way, unless it says another."""
        dated = finding if finding.step is not None else replace(finding, step=self.number)
        key = (dated.code, dated.tensor, dated.step)
        # Two identities may see the same fault of one tensor, one by its entries and one by its sums.
        if not dated.tensor or all((other.code, other.tensor, other.step) != key for other in self.findings):
            self.findings.append(dated)

    def remark(self, subject: str, text: str) -> None:
        """Keep a remark for the status of the monitor; a subject is remarked upon once in a run."""
        self.remarks.append((subject, text))

    def read(self, numbers: Tensor, decide: Decide) -> None:
        """Hand numbers to `decide` once they are on the host; nothing waits for a GPU."""
        self._awaited.append((self.number, HostCopy.of(numbers), decide))
        if numbers.device.type != "cuda":
            self.receive()

    def receive(self, *, wait: bool = False) -> None:
        """Decide about numbers that have arrived; with `wait`, about all of them."""
        while self._awaited and (wait or self._awaited[0][1].arrived):
            number, copy, decide = self._awaited.pop(0)
            for finding in decide(copy.read()):
                self.report(finding if finding.step is not None else replace(finding, step=number))

    def note_inputs(self, inputs: tuple[Tensor, ...]) -> None:
        """Note what a forward pass with gradients got."""
        self.passes += 1
        self.inputs = inputs
        self.differentiable |= any(tensor.requires_grad for tensor in inputs)
        first = next((tensor for tensor in inputs if tensor.numel() > 1 and tensor.layout == torch.strided), None)
        if first is not None:
            self.shapes.add(first.shape)
        if first is not None and len(self.batches) < _BATCHES:
            self.call_sites.append(_call_site())
            values = first.detach().reshape(-1)
            self.batches.append(values[:: max(1, values.numel() // _BATCH_ENTRIES)].clone())
            if on_host(values):
                self.seen_batches[1:] = [hash(tuple(self.batches[-1].tolist()))]

    @property
    def repeats_batches(self) -> bool:
        """Whether two passes of this step got the same input, or it is not known what they got."""
        pairs = itertools.combinations(self.batches, 2)
        return len(self.batches) < min(self.passes, _BATCHES) or any(torch.equal(a, b) for a, b in pairs)

    @property
    def structure(self) -> ModelStructure:
        """Modules, parameters and names of the model, as they were at the beginning of this moment of the step."""
        return self._structure or self.look_at_structure()

    def look_at_structure(self) -> ModelStructure:
        """Notice whether the model has changed: called at the moments at which a loop may have changed it."""
        self._structure = ModelStructure.of(self.model, self._structure)
        return self._structure

    def names(self) -> dict[int, str]:
        """Return the names of the model's parameters by identity, and of what optimizers hold besides."""
        return self.structure.names(self.optimizers)

    @property
    def called_from_one_line(self) -> bool:
        """Whether all passes of this step were called by the same line of the program, as in a loop."""
        return len(set(self.call_sites)) == 1

    def holds_nothing_of_model(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer has no tensor that the model has and that is trained."""
        return self.structure.trained.isdisjoint(map(id, grouped_parameters(optimizer)))

    def optimized_ids(self) -> set[int]:
        """Return the ids of all tensors that the watched optimizers step."""
        return {id(p) for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]}


class StepIdentity:
    """One question about every step.

    A subclass overrides the moments it needs. What it finds goes to `TrainingStep.report`. An exception turns this
    identity off and nothing else.
    """

    name: ClassVar[str]
    """A few words for the start-up line and the report."""
    free: ClassVar[bool] = True
    """Whether it costs next to nothing; the others are skipped in steps that are over the budget."""
    spoils: ClassVar[bool] = False
    """Whether gradient identities say nothing in a step in which this one does not hold."""

    def begin(self, step: TrainingStep) -> None:
        """Prepare for a run; the monitor calls this once, when watching begins."""

    def before_laws(self, step: TrainingStep) -> None:
        """Look at the run after the laws of the model were read, before they are watched."""

    def before_forward(self, step: TrainingStep, module: nn.Module) -> None:
        """Look at the inputs before the model runs, with gradients or without."""

    def after_forward(self, step: TrainingStep, module: nn.Module, outputs: Any) -> None:
        """Look at the outputs after the model ran, with gradients or without."""

    def before_optimizer(self, step: TrainingStep, optimizer: Optimizer) -> None:
        """Look at the run before an optimizer steps."""

    def with_gradients(self, step: TrainingStep, optimizer: Optimizer) -> None:
        """Look at the gradients that the optimizer is about to use.

        That is right after `before_optimizer`, or inside the step of an optimizer whose closure computes them if the
        loop says so; never for closures that are called several times.
        """

    def after_optimizer(self, step: TrainingStep, optimizer: Optimizer) -> None:
        """Look at the run after an optimizer has stepped."""

    def after_step(self, step: TrainingStep) -> None:
        """Look at the run in `Monitor.step`, after all optimizers have stepped."""

    def close(self, step: TrainingStep) -> None:
        """Remove everything from the model and the optimizers; the monitor calls this once, when watching ends."""

    def weights_given(self, step: TrainingStep, state: Mapping[str, Any]) -> None:
        """Look at the state dict that is about to be loaded into the model."""

    def weights_loaded(self, step: TrainingStep, missing: Sequence[str], unexpected: Sequence[str]) -> None:
        """Look at a state dict that was loaded, and at the keys that did not fit."""

    def device_seconds(self) -> float:
        """Return the seconds that a device worked for this identity since the last call, if that is worth counting."""
        return 0.0

    def restart(self) -> None:
        """Forget what was remembered of the weights, because others were loaded."""


def _call_site() -> int:
    """Return a number that tells lines of the program apart from which the model is called."""
    frame, lines = sys._getframe(1), []
    while frame is not None:
        lines.append((id(frame.f_code), frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return hash(tuple(lines))


def grouped_parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return the tensors of all groups of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def is_outermost_step(optimizer: Optimizer) -> bool:
    """Return whether one `step` method of the optimizer is under way, and not one that another one of it calls.

    PyTorch wraps the `step` of every class, so that one that calls its base class's runs hooks twice. A counter of
    hooks would be off for ever after a step that raises, as no hook runs then.
    """
    frame, calls = sys._getframe(), 0
    while frame is not None and calls < 2:
        if frame.f_code.co_filename == _OPTIMIZER_FILE and frame.f_code.co_name == "wrapper":
            args = frame.f_locals.get("args", ())
            calls += bool(args) and args[0] is optimizer
        frame = frame.f_back  # type: ignore[assignment]
    return calls < 2


def on_host(tensor: Tensor) -> bool:
    """Return whether reading a tensor does not wait for a device."""
    return tensor.device.type != "cuda"


def is_plain(tensor: Tensor) -> bool:
    """Return whether entries of a tensor can be sampled: real, dense, and held by this process alone."""
    return tensor.layout == torch.strided and not tensor.is_complex() and tensor.is_floating_point()


def is_shared(tensor: Tensor) -> bool:
    """Return whether other processes may write to a tensor; `Tensor.is_shared` takes ten times as long."""
    return tensor.device.type == "cpu" and tensor.untyped_storage().is_shared()


def tensors_in(values: Any, depth: int = 3) -> Iterator[Tensor]:
    """Yield the tensors in arguments or outputs: in tuples, lists and mappings up to some depth."""
    if isinstance(values, Tensor):
        yield values
    elif depth and isinstance(values, Mapping):
        for value in values.values():
            yield from tensors_in(value, depth - 1)
    elif depth and isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value, depth - 1)
