"""One long run of gradient descent in stored pieces, with the exact account of every step.

Weights are kept in float64, gradients computed as `products` says (`papers.lab.pieces`). A run goes on where its
checkpoint ends, in another process or on another machine of the same kind, with the same numbers: the batch of a step
is a function of seed and step, micro-batches have a fixed size, sums over tokens a fixed order, and kernels that add in
any order they like are not used.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from conserved.papers.lab.checkpoint import restored, saved
from conserved.papers.lab.data import Examples
from conserved.papers.lab.fast import operations, summed_loss
from conserved.papers.lab.half import KERNELS, HalfModel, two_pieces
from conserved.papers.lab.pieces import MatrixProducts
from conserved.papers.lab.recipes import Recipe, build
from conserved.papers.lab.step_account import PARTS, RunLedger
from conserved.papers.lab.sweep import Say
from conserved.papers.lab.train import Diverged, Limits, batch_indices, marks
from conserved.papers.lab.trajectory import Quantity, Trajectory
from conserved.papers.lab.watched import Recording, watch
from conserved.plain_data import record_of

Seen = Callable[[int, nn.Module], None]

deterministic: Any = torch.utils.deterministic

_ALIGNED = 64
"""Parameters begin at multiples of so many entries of one long vector."""

_EVEN = 16
"""Steps that are recorded beside those spaced by logarithms, at even distances, to see the late run well."""

_TELL = 20.0
"""Seconds between lines of progress."""

_WARM_UP = 3

_COARSE = 0.01
"""How far, relatively, a gradient in half precision may be from the one in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """How gradients are computed: which products, and how many examples at a time (fixed, to get the same numbers)."""

    products: MatrixProducts
    micro: int

    @property
    def dtype(self) -> torch.dtype:
        """Of everything but products."""
        return torch.float64 if self.products == "double" else torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRun:
    """What came of a run so far: its trajectory, how it was computed, and the pieces it was made in."""

    trajectory: Trajectory
    arithmetic: Arithmetic
    operations: float
    """Of one step."""
    pieces: tuple[Mapping[str, Any], ...]

    @property
    def finished(self) -> bool:
        """Whether all planned steps were made."""
        return self.trajectory.steps == self.trajectory.planned

    @property
    def rate(self) -> float:
        """Operations per second of training, laws and ledger included."""
        return self.operations * (self.trajectory.steps + 1) / self.trajectory.seconds

    def record(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return record_of(self, "trajectory operations pieces") | record_of(self.arithmetic, "products micro")

    @staticmethod
    def of(record: Mapping[str, Any]) -> LongRun:
        """The inverse of `record`."""
        return LongRun(
            trajectory=Trajectory.of(record["trajectory"]),
            arithmetic=Arithmetic(products=record["products"], micro=record["micro"]),
            operations=record["operations"],
            pieces=tuple(record["pieces"]),
        )


def recorded_steps(steps: int) -> list[int]:
    """Log-spaced ones, and sixteen at even distances."""
    return sorted({*marks(steps), *(round(steps * part / _EVEN) for part in range(_EVEN + 1))})


def train_on(
    recipe: Recipe,
    examples: Examples,
    *,
    rate: float,
    seed: int,
    arithmetic: Arithmetic,
    device: str = "cpu",
    limits: Limits | None = None,
    say: Say = lambda _: None,
    seen: Seen = lambda _, __: None,
) -> LongRun:
    """Train until the end or until a piece's seconds are over; the same call goes on from the checkpoint.

    Args:
        recipe: What is trained; its batch, steps and schedule are kept.
        examples: The data, on any device.
        rate: The initial step size.
        seed: Of weights and batches.
        arithmetic: How gradients are computed. A checkpoint made with another one is refused.
        device: Where to train.
        limits: Seconds of this piece (not of the whole run), and where and how often the state is saved.
        say: Told the steps done and the time left, now and then.
        seen: Given the step and the model, in the precision of its gradients, whenever laws are recorded.

    Returns:
        The run so far.
    """
    limits = limits or Limits()
    with _deterministic():
        run = _Long(recipe, examples, rate, seed, arithmetic, torch.device(device))
        run.seen = seen
        if limits.checkpoint is not None and limits.checkpoint.exists():
            run.load(limits.checkpoint)
            say(f"{run.title}: goes on from step {run.done:,} of {recipe.steps:,}")
        return run.piece(limits, say)


class _deterministic:  # noqa: N801  (used like a function)
    """Only kernels that give the same numbers every time, and float32 products that are ones."""

    def __enter__(self) -> None:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        self.former = torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory
        torch.use_deterministic_algorithms(True)
        # Every entry of every buffer here is written before it is read; filling them first would double the traffic.
        deterministic.fill_uninitialized_memory = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.enable_cudnn_sdp(False)

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(self.former[0])
        deterministic.fill_uninitialized_memory = self.former[1]


class _Long:
    """Weights, gradient, ledger and records in the middle of a run; parameters are stretches of one vector."""

    def __init__(
        self, recipe: Recipe, examples: Examples, rate: float, seed: int, arithmetic: Arithmetic, device: torch.device
    ) -> None:
        self.recipe, self.initial, self.seed, self.arithmetic, self.device = recipe, rate, seed, arithmetic, device
        self.examples = examples.to(device, arithmetic.dtype)
        model = build(recipe, seed)
        watched = watch(model, examples.loss, examples.inputs[:2])
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        tokens = 1 if examples.inputs.is_floating_point() else examples.inputs.shape[1]
        if examples.inputs.is_floating_point():
            tokens = (recipe.sizes["image"] // recipe.sizes["patch"]) ** 2
        batch = len(examples) if recipe.batch is None else recipe.batch
        self.operations = float(operations(model, tokens)) * tokens * batch
        self.model = model.to(device, arithmetic.dtype)
        places = _places(self.model)
        length = max(stop for _, stop, _ in places.values())
        self.theta, self.slope = (torch.zeros(length, dtype=torch.float64, device=device) for _ in range(2))
        self.working = torch.zeros(length, dtype=arithmetic.dtype, device=device)
        self.weights, self.slopes, working = (
            {name: whole[begin : begin + math.prod(shape)].view(shape) for name, (begin, _, shape) in places.items()}
            for whole in (self.theta, self.slope, self.working)
        )
        for name, parameter in self.model.named_parameters():
            self.weights[name].copy_(parameter.detach())
            parameter.data = working[name]
        self.places = places
        self.half: HalfModel | None = None
        if arithmetic.products == "half":
            self.half = HalfModel(self.model, compiled=device.type == "cuda")
        self.shift = torch.ones((), dtype=arithmetic.dtype, device=device)
        self.pieces_of_weights = [self.theta.half(), self.theta.half()]
        self.high, self.low = (
            {name: whole[begin : begin + math.prod(shape)].view(shape) for name, (begin, _, shape) in places.items()}
            for whole in self.pieces_of_weights
        )
        self.refresh()
        stacked = {name: tensor.unsqueeze(0) for name, tensor in self.weights.items()}
        self.recording = Recording(watched=watched, reference=watched.reference(stacked))
        laws = watched.laws.select(lambda symmetry: watched.roles[symmetry.family] == "law")
        self.ledger = RunLedger(laws, self.weights, self.slopes)
        self.accounts: list[dict[str, dict[str, float]]] = []
        self.seen: Seen = lambda _, __: None
        self.done, self.spent, self.time, self.squares = 0, 0.0, 0.0, 0.0
        self.pieces: list[dict[str, Any]] = []
        self.coarseness: float | None = None
        self.graphs: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor, Tensor]] = {}

    @property
    def title(self) -> str:
        return f"{self.recipe.name} τ = {self.initial:g} seed {self.seed}"

    def piece(self, limits: Limits, say: Say) -> LongRun:
        """Go on until the end or until the seconds are over, and save."""
        begun, first = time.perf_counter(), self.done
        before = self.spent
        told = kept = begun
        chosen = set(recorded_steps(self.recipe.steps))
        steps = self.recipe.steps
        while True:
            now = time.perf_counter()
            self.spent = before + now - begun
            last = self.done == steps
            loss = self.gradient()
            if last or self.done in chosen:
                self.note(loss)
            if last:
                break
            self.step()
            now = time.perf_counter()
            if now - told > _TELL or self.done == steps:
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
                    now = time.perf_counter()
                each = (now - begun) / (self.done - first)
                say(
                    f"{self.title}: step {self.done:,} of {steps:,}, {each:.3f} s each, "
                    f"{each * (steps - self.done):,.0f} s left, {self.operations / each / 1e12:.0f} Tflop/s"
                )
                told = now
            if self.done < steps and (now - begun > limits.seconds or self.done - first == limits.steps):
                break
            if limits.checkpoint is not None and now - kept > limits.every:
                self.save(limits.checkpoint)
                kept = time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.spent = before + time.perf_counter() - begun
        self.pieces.append(
            {
                "from": first,
                "to": self.done,
                "seconds": round(self.spent - before, 3),
                "device": _device_name(self.device),
                "torch": str(torch.__version__),
                "compiled": self.half is not None and self.half.compiled,
                "off_float32": self.coarseness,
                "weights_sha256": hashlib.sha256(self.theta.cpu().numpy().tobytes()).hexdigest(),
            }
        )
        if limits.checkpoint is not None:
            self.save(limits.checkpoint)
        return self.result()

    def gradient(self) -> Tensor:
        """Of the mean loss over the step's examples into `slope`; the mean loss."""
        self.slope.zero_()
        self.shift.fill_(self.drawn_shift())
        count = 0
        losses = torch.zeros((), dtype=torch.float64, device=self.device)
        for inputs, targets in self.batches():
            slopes, loss = self.of_batch(inputs, targets)
            self.slope += slopes
            losses += loss
            count += targets.numel()
        self.slope /= count
        return losses / count

    def of_batch(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient, as one vector, and value of the summed loss; on a GPU replayed from a graph."""
        if self.device.type != "cuda":
            return self.computed(inputs, targets)
        key = tuple(inputs.shape)
        if key not in self.graphs:
            held = inputs.clone(), targets.clone()
            beside = torch.cuda.Stream()
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                self.warm_up(*held)
            torch.cuda.current_stream().wait_stream(beside)
            torch.cuda.empty_cache()
            if self.half is not None and not self.graphs:
                self.compare(*held)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                slopes, loss = self.computed(*held)
            self.graphs[key] = graph, *held, slopes, loss
        graph, held_inputs, held_targets, slopes, loss = self.graphs[key]
        held_inputs.copy_(inputs)
        held_targets.copy_(targets)
        graph.replay()
        return slopes, loss

    def warm_up(self, inputs: Tensor, targets: Tensor) -> None:
        """Let kernels be compiled and chosen; what the compiler cannot do is done without it."""
        for _ in range(_WARM_UP):
            try:
                self.computed(inputs, targets)
            except torch.OutOfMemoryError:
                raise
            except Exception as problem:
                if self.half is None or not self.half.compiled:
                    raise
                warnings.warn(f"Not compiled: {type(problem).__name__}: {problem}", stacklevel=2)
                self.half = HalfModel(self.model, compiled=False)

    def compare(self, inputs: Tensor, targets: Tensor) -> None:
        """Hold half precision against float32 once, before hours depend on it."""
        loss = summed_loss(self.model, inputs, targets, self.examples.loss, "pieces")
        found = torch.autograd.grad(loss, list(self.model.parameters()))
        exact = torch.cat([slope.flatten() for slope in found])
        del loss, found
        for kernels in (True, False):
            KERNELS.use = kernels
            whole = self.computed(inputs, targets)[0]
            slopes = [whole[begin : begin + math.prod(shape)] for begin, _, shape in self.places.values()]
            error = float(torch.linalg.vector_norm(torch.cat(slopes) - exact) / torch.linalg.vector_norm(exact))
            if error < _COARSE:
                self.coarseness = error
                return
            warnings.warn(f"Half precision is {error:.1e} off float32, kernels {kernels}.", stacklevel=2)
        raise Diverged(f"{self.title}: gradients in half precision differ from those in float32.")

    def computed(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The same, computed."""
        if self.half is None:
            loss = summed_loss(self.model, inputs, targets, self.examples.loss, self.arithmetic.products)
        else:
            loss = self.half.summed_loss(inputs, targets, self.shift, self.high, self.low)
        found = torch.autograd.grad(loss, list(self.model.parameters()))
        whole = torch.zeros_like(self.working)
        for slope, (begin, _, shape) in zip(found, self.places.values(), strict=True):
            whole[begin : begin + math.prod(shape)].copy_(slope.reshape(-1))
        if self.half is None:
            return whole, loss.detach()
        factor = self.half.factor * self.shift
        return whole / factor, loss.detach() / factor

    def drawn_shift(self) -> float:
        """Of this step, between 1 and 2: see `conserved.papers.lab.half`."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.done + 500_000_000)
        return 2.0 ** float(torch.rand((), generator=generator))

    def refresh(self) -> None:
        """The weights that gradients are computed with, from those that are kept."""
        self.working.copy_(self.theta)
        if self.half is not None:
            for held, piece in zip(self.pieces_of_weights, two_pieces(self.theta), strict=True):
                held.copy_(piece)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The step's examples, some at a time."""
        inputs, targets, micro = self.examples.inputs, self.examples.targets, self.arithmetic.micro
        if self.recipe.batch is None:
            yield from zip(inputs.split(micro), targets.split(micro), strict=True)
            return
        drawn = batch_indices(self.seed, self.done, self.recipe.batch, len(inputs)).to(self.device)
        for part in drawn.split(micro):
            yield inputs[part], targets[part]

    def note(self, loss: Tensor) -> None:
        """Measure all laws now; stop if the run has left what can be computed."""
        if not bool(torch.isfinite(loss)) or not bool(torch.isfinite(self.slope).all()):
            raise Diverged(
                f"{self.title}: the loss or its gradient is no longer finite at step {self.done}. Take a smaller step "
                "size, or products that have a wider range than pieces in half precision."
            )
        weights, slopes = ({n: t.unsqueeze(0) for n, t in part.items()} for part in (self.weights, self.slopes))
        self.recording.note(weights, slopes, loss[None], self.done, self.time, self.squares)
        self.accounts.append(self.ledger.measured())
        self.seen(self.done, self.model)

    def step(self) -> None:
        """θ ← θ − τG, with its account."""
        rate = self.recipe.schedule.rate(self.initial, self.done, self.recipe.steps)
        self.ledger.add(rate)
        self.theta.add_(self.slope, alpha=-rate)
        self.refresh()
        self.done += 1
        self.time += rate
        self.squares += rate * rate

    def state(self) -> dict[str, object]:
        """What a resumed run needs, as tensors and plain data."""
        recording = self.recording
        return {
            "recipe": repr(replace(self.recipe, seeds=())),
            "rate": self.initial,
            "seed": self.seed,
            "arithmetic": [self.arithmetic.products, self.arithmetic.micro],
            "examples": [self.examples.name, len(self.examples)],
            "done": self.done,
            "spent": self.spent,
            "sums": [self.time, self.squares],
            "theta": self.theta,
            "ledger": self.ledger.state(),
            "accounts": self.accounts,
            "pieces": self.pieces,
            "records": [recording.at, recording.time, recording.squares, recording.losses],
            "measured": recording.measured,
            "steepest": recording.steepest,
            "reference": [dict(recording.reference.values), dict(recording.reference.scales)],
        }

    def save(self, path: Path) -> None:
        """Write the state to a file, whole or not at all."""
        state = self.state()
        # The reference follows from the seed; of millions of numbers it would be the largest part of the file.
        del state["reference"]
        saved(state, path)

    def load(self, path: Path) -> None:
        """Go on from a state saved by a run of the same recipe, step size, seed, data and arithmetic."""
        state = restored(path, like=self.state(), keys=("recipe", "rate", "seed", "arithmetic", "examples"))
        self.done, self.spent = state["done"], state["spent"]
        self.time, self.squares = state["sums"]
        self.theta.copy_(state["theta"])
        self.refresh()
        self.ledger.load(state["ledger"])
        self.accounts, self.pieces = state["accounts"], state["pieces"]
        recording = self.recording
        recording.at, recording.time, recording.squares, recording.losses = state["records"]
        recording.measured = state["measured"]
        recording.steepest = {name: tensor.to(self.device) for name, tensor in state["steepest"].items()}

    def result(self) -> LongRun:
        """The run so far."""
        recipe, recording = self.recipe, self.recording
        batch = len(self.examples) if recipe.batch is None else recipe.batch
        weights = {name: tensor.unsqueeze(0) for name, tensor in self.weights.items()}
        trajectory = Trajectory(
            recipe=recipe.name,
            title=recipe.title,
            scale=recipe.scale,
            step=self.initial,
            schedule=recipe.schedule.kind,
            seed=self.seed,
            precision=self.arithmetic.products,
            weights="float64",
            data=self.examples.name,
            batch=recipe.batch,
            examples=len(self.examples),
            steps=self.done,
            planned=recipe.steps,
            parameters=self.parameters,
            device=_device_name(self.device),
            seconds=self.spent,
            examples_per_second=batch * (self.done + 1) / self.spent,
            at=tuple(recording.at),
            time=tuple(recording.time),
            squares=tuple(recording.squares),
            loss=tuple(losses[0] for losses in recording.losses),
            quantities=tuple(self._with_ledger(quantity) for quantity in recording.quantities(weights)[0]),
        )
        return LongRun(
            trajectory=trajectory,
            arithmetic=self.arithmetic,
            operations=self.operations,
            pieces=tuple(self.pieces),
        )

    def _with_ledger(self, quantity: Quantity) -> Quantity:
        if quantity.role != "law":
            return quantity
        found = [account[quantity.family] for account in self.accounts]
        return replace(quantity, ledger={part: tuple(each[part] for each in found) for part in PARTS})


def _places(model: nn.Module) -> dict[str, tuple[int, int, torch.Size]]:
    """Where each parameter begins and ends in one vector, and its shape."""
    found: dict[str, tuple[int, int, torch.Size]] = {}
    begin = 0
    for name, parameter in model.named_parameters():
        stop = begin + -(-parameter.numel() // _ALIGNED) * _ALIGNED
        found[name] = begin, stop, parameter.shape
        begin = stop
    return found


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
