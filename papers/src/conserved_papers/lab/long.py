"""One long run of gradient descent in stored pieces, with the exact account of every step.

Weights are kept in float64, and gradients are computed by the model's own forward pass in float64 or float32, compiled
on a GPU. A run goes on where its checkpoint ends, in another process or on another machine of the same kind, with the
same numbers: the batch of a step is a function of seed and step, micro-batches have a fixed size, and PyTorch is asked
for deterministic algorithms.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from conserved.plain_data import record_of
from conserved_papers.blocks import Attention, VisionTransformer
from conserved_papers.lab.checkpoint import restore, save
from conserved_papers.lab.data import Examples
from conserved_papers.lab.recipes import Recipe, build
from conserved_papers.lab.step_account import PARTS, RunLedger
from conserved_papers.lab.sweep import Say
from conserved_papers.lab.train import DivergedError, Limits, batch_indices, loss_of, marks
from conserved_papers.lab.trajectory import Quantity, Trajectory
from conserved_papers.lab.watched import Recording, watch

Seen = Callable[[int, nn.Module], None]

_EVEN = 16
"""Steps that are recorded beside those spaced by logarithms, at even distances, to see the late run well."""

_REPORT_SECONDS = 20.0
"""Seconds between lines of progress."""

DTYPES = {"double": torch.float64, "single": torch.float32}
"""The precisions that gradients can be computed in. Stored runs also have "half" and "pieces", by earlier kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """How gradients are computed: in which precision, and how many examples at a time (fixed, for the same numbers)."""

    products: str
    micro: int

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the forward and the backward pass."""
        if self.products not in DTYPES:
            raise ValueError(f"Expected products to be one of {', '.join(DTYPES)}, got {self.products!r}.")
        return DTYPES[self.products]


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRun:
    """The state of a run so far: its trajectory, how it was computed, and the pieces it was made in."""

    trajectory: Trajectory
    arithmetic: Arithmetic
    operations: float
    """Floating-point operations of one step."""
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
        """Return the inverse of `record`."""
        return LongRun(
            trajectory=Trajectory.of(record["trajectory"]),
            arithmetic=Arithmetic(products=record["products"], micro=record["micro"]),
            operations=record["operations"],
            pieces=tuple(record["pieces"]),
        )


def recorded_steps(steps: int) -> list[int]:
    """Return the steps that are recorded: log-spaced ones, and sixteen at even distances."""
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


@contextmanager
def _deterministic() -> Iterator[None]:
    """Ask PyTorch for kernels that give the same numbers every time."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    former = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(former)


class _Long:
    """Weights, gradient, ledger and records in the middle of a run."""

    def __init__(
        self, recipe: Recipe, examples: Examples, rate: float, seed: int, arithmetic: Arithmetic, device: torch.device
    ) -> None:
        self.recipe, self.initial, self.seed, self.arithmetic, self.device = recipe, rate, seed, arithmetic, device
        self.examples = examples.to(device, arithmetic.dtype)
        model = build(recipe, seed)
        watched = watch(model, examples.loss, examples.inputs[:2])
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        batch = len(examples) if recipe.batch is None else recipe.batch
        tokens = _tokens(recipe, examples)
        self.operations = float(operations(model, tokens)) * tokens * batch
        self.weights = {name: p.detach().to(device, torch.float64) for name, p in model.named_parameters()}
        self.gradients = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self.model = model.to(device, arithmetic.dtype)
        # One program for the forward pass: on a GPU most of the time of a small model is spent launching kernels.
        self.forward = torch.compile(self.model) if device.type == "cuda" else self.model
        stacked = {name: tensor.unsqueeze(0) for name, tensor in self.weights.items()}
        self.recording = Recording(watched=watched, reference=watched.reference(stacked))
        laws = watched.laws.select(lambda symmetry: watched.roles[symmetry.family] == "law")
        self.ledger = RunLedger(laws, self.weights, self.gradients)
        self.accounts: list[dict[str, dict[str, float]]] = []
        self.seen: Seen = lambda _, __: None
        self.done, self.spent, self.time, self.squares = 0, 0.0, 0.0, 0.0
        self.pieces: list[dict[str, Any]] = []

    @property
    def title(self) -> str:
        return f"{self.recipe.name} τ = {self.initial:g} seed {self.seed}"

    def piece(self, limits: Limits, say: Say) -> LongRun:
        """Go on until the end or until the seconds are over, and save."""
        began, first, before = time.perf_counter(), self.done, self.spent
        reported = saved_at = began
        chosen = set(recorded_steps(self.recipe.steps))
        steps = self.recipe.steps
        while True:
            self.spent = before + time.perf_counter() - began
            loss = self.gradient()
            if self.done == steps or self.done in chosen:
                self.note(loss)
            if self.done == steps:
                break
            self.step()
            now = time.perf_counter()
            if now - reported > _REPORT_SECONDS or self.done == steps:
                say(self.progress((now - began) / (self.done - first)))
                reported = now
            if self.done < steps and (now - began > limits.seconds or self.done - first == limits.steps):
                break
            if limits.checkpoint is not None and now - saved_at > limits.every:
                self.save(limits.checkpoint)
                saved_at = time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.spent = before + time.perf_counter() - began
        self.pieces.append(
            {
                "from": first,
                "to": self.done,
                "seconds": round(self.spent - before, 3),
                "device": _device_name(self.device),
                "torch": str(torch.__version__),
                "compiled": self.device.type == "cuda",
                "weights_sha256": self.digest(),
            }
        )
        if limits.checkpoint is not None:
            self.save(limits.checkpoint)
        return self.result()

    def progress(self, each: float) -> str:
        """Return a line on the steps done and the time left, at so many seconds a step."""
        steps = self.recipe.steps
        return (
            f"{self.title}: step {self.done:,} of {steps:,}, {each:.3f} s each, "
            f"{each * (steps - self.done):,.0f} s left, {self.operations / each / 1e12:.0f} Tflop/s"
        )

    def digest(self) -> str:
        """Return the SHA-256 of all weights."""
        result = hashlib.sha256()
        for weight in self.weights.values():
            result.update(weight.cpu().numpy().tobytes())
        return result.hexdigest()

    def gradient(self) -> Tensor:
        """Put the gradient of the mean loss over the step's examples into `gradients`; return the mean loss."""
        for total in self.gradients.values():
            total.zero_()
        losses = torch.zeros((), dtype=torch.float64, device=self.device)
        count = len(self.examples) if self.recipe.batch is None else self.recipe.batch
        parameters = list(self.model.parameters())
        for inputs, targets in self.batches():
            loss = loss_of(self.forward(inputs), targets, self.examples.loss)
            share = len(inputs) / count
            for total, part in zip(self.gradients.values(), torch.autograd.grad(loss, parameters), strict=True):
                total.add_(part, alpha=share)
            losses += share * loss.detach()
        return losses

    def refresh(self) -> None:
        """Copy the weights that are kept into the model, in its precision."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.weights[name])

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the step's examples, some at a time."""
        inputs, targets, micro = self.examples.inputs, self.examples.targets, self.arithmetic.micro
        if self.recipe.batch is None:
            yield from zip(inputs.split(micro), targets.split(micro), strict=True)
            return
        drawn = batch_indices(self.seed, self.done, self.recipe.batch, len(inputs)).to(self.device)
        for part in drawn.split(micro):
            yield inputs[part], targets[part]

    def note(self, loss: Tensor) -> None:
        """Measure all laws now; stop if the run has left what can be computed."""
        if not bool(torch.isfinite(loss)) or not all(bool(torch.isfinite(g).all()) for g in self.gradients.values()):
            raise DivergedError(
                f"{self.title}: the loss or its gradient is no longer finite at step {self.done}. Take a smaller step "
                "size."
            )
        weights, gradients = ({n: t.unsqueeze(0) for n, t in part.items()} for part in (self.weights, self.gradients))
        self.recording.note(weights, gradients, loss[None], self.done, self.time, self.squares)
        self.accounts.append(self.ledger.measured())
        self.seen(self.done, self.model)

    def step(self) -> None:
        """Take the step θ ← θ − τG, and record its account."""
        rate = self.recipe.schedule.rate(self.initial, self.done, self.recipe.steps)
        self.ledger.add(rate)
        for name, weight in self.weights.items():
            weight.add_(self.gradients[name], alpha=-rate)
        self.refresh()
        self.done += 1
        self.time += rate
        self.squares += rate * rate

    def state(self) -> dict[str, object]:
        """Return what a resumed run needs, as tensors and plain data."""
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
            "theta": self.weights,
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
        save(state, path)

    def load(self, path: Path) -> None:
        """Go on from a state saved by a run of the same recipe, step size, seed, data and arithmetic."""
        state = restore(path, like=self.state(), keys=("recipe", "rate", "seed", "arithmetic", "examples"))
        self.done, self.spent = state["done"], state["spent"]
        self.time, self.squares = state["sums"]
        for name, weight in self.weights.items():
            weight.copy_(state["theta"][name])
        self.refresh()
        self.ledger.load(state["ledger"])
        self.accounts, self.pieces = state["accounts"], state["pieces"]
        recording = self.recording
        recording.at, recording.time, recording.squares, recording.losses = state["records"]
        recording.measured = state["measured"]
        recording.steepest = {name: tensor.to(self.device) for name, tensor in state["steepest"].items()}

    def result(self) -> LongRun:
        """Return the run so far."""
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
        result = [account[quantity.family] for account in self.accounts]
        return replace(quantity, ledger={part: tuple(each[part] for each in result) for part in PARTS})


def operations(model: nn.Module, tokens: int) -> int:
    """Return Floating-point operations of a gradient for each token: six per weight it meets, and twelve per logit and
    width.

    A product of n × k and k × m counts 2nkm, and the way back costs twice the way there. Logits of attention are
    counted as if none were masked.
    """
    weights = sum(
        module.weight.numel()
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not (isinstance(model, VisionTransformer) and name == "head")
    )
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    return 6 * weights + sum(12 * tokens * block.heads * block.head_dim for block in attentions)


def _tokens(recipe: Recipe, examples: Examples) -> int:
    if examples.inputs.is_floating_point():
        return int((recipe.sizes["image"] // recipe.sizes["patch"]) ** 2)
    return examples.inputs.shape[1]


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
