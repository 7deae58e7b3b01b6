"""Gradient descent on several seeds at once: stacked weights, vmapped gradients, laws recorded at log-spaced steps."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap

from conserved.errors import ConservedError
from conserved_papers.lab.checkpoint import restore, save
from conserved_papers.lab.data import Examples
from conserved_papers.lab.data.examples import LossName
from conserved_papers.lab.memory import micro_batch
from conserved_papers.lab.recipes import Recipe, build
from conserved_papers.lab.trajectory import Trajectory
from conserved_papers.lab.watched import Recording, Stacked, watch_recipe

StackedGradients = Callable[[Stacked, Tensor, Tensor], tuple[dict[str, Tensor], Tensor]]
"""Gradients and losses of stacked parameters on inputs and targets."""

StepProgress = Callable[[int, int], None]
"""Told the steps done and planned."""

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}

_PER_OCTAVE = 3
"""Recorded steps for every doubling."""

_CHECKPOINT_SECONDS = 30.0


class DivergedError(ConservedError, ArithmeticError):
    """A loss became infinite or not a number; there is nothing to conserve any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Where a run stops or saves: seconds of training, bytes for activations, a file to resume from.

    `steps` ends one piece of a long run (`conserved_papers.lab.long`) after so many of them.
    """

    seconds: float = math.inf
    steps: int | None = None
    memory: int | None = None
    checkpoint: Path | None = None
    every: float = _CHECKPOINT_SECONDS


def marks(steps: int) -> list[int]:
    """Return the steps to record: 0, and about three for each doubling, the powers of two among them."""
    octaves = range(int(math.log2(max(1, steps)) * _PER_OCTAVE) + 1)
    rounded = {round(2 ** (index / _PER_OCTAVE)) for index in octaves}
    return sorted({0, steps, *(mark for mark in rounded if mark <= steps)})


def train(
    recipe: Recipe,
    examples: Examples,
    *,
    rate: float,
    seeds: Sequence[int] | None = None,
    device: str = "cpu",
    limits: Limits | None = None,
    progress: StepProgress | None = None,
) -> list[Trajectory]:
    """Train a recipe from every seed at one step size, all together, and give back one trajectory each."""
    limits = limits or Limits()
    chosen = list(recipe.seeds if seeds is None else seeds)
    if not chosen or len(set(chosen)) != len(chosen):
        raise ValueError(f"Seeds must be given and differ from each other; got {chosen}.")
    run = _Run(recipe, examples, rate, chosen, torch.device(device), limits)
    last_saved = time.perf_counter()
    began = last_saved - run.spent
    recorded = set(marks(recipe.steps))
    try:
        while True:
            run.spent = time.perf_counter() - began
            final = run.done == recipe.steps or (run.done > 0 and run.spent > limits.seconds)
            run.advance(record=final or run.done in recorded, final=final)
            if progress is not None:
                progress(run.done, recipe.steps)
            if final:
                break
            if limits.checkpoint is not None and time.perf_counter() - last_saved > limits.every:
                save(run.state(), limits.checkpoint)
                last_saved = time.perf_counter()
    except KeyboardInterrupt:
        if limits.checkpoint is not None:
            save(run.state(), limits.checkpoint)
        raise
    run.spent = time.perf_counter() - began
    result = run.trajectories()
    if limits.checkpoint is not None:
        limits.checkpoint.unlink(missing_ok=True)
    return result


def stacked(models: Sequence[nn.Module], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Return the parameters of models of one architecture, with a first axis over models."""
    parameters, buffers = stack_module_state(list(models))
    if buffers:
        raise ValueError(f"Models with buffers cannot be trained together; this one has {next(iter(buffers))}.")
    return {name: tensor.detach().to(device, dtype).clone() for name, tensor in parameters.items()}


def loss_of(output: Tensor, targets: Tensor, loss: LossName) -> Tensor:
    """Return the mean loss over a batch, over tokens too where every token has a target."""
    if loss == "square":
        return 0.5 * (output - targets).square().mean()
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


def stacked_gradients(
    model: nn.Module, loss: LossName, precision: torch.dtype, *, own_batches: bool, compiled: bool = False
) -> StackedGradients:
    """Return the function from stacked parameters and a batch to gradients and losses, computed in a precision.

    Every model sees the same batch, or its own. The gradient of a conversion is the conversion back, so gradients
    arrive in the precision of the weights. Compiled, small models are one launch a step on a GPU.
    """
    empty = copy.deepcopy(model).to("meta")

    def value(theta: Stacked, inputs: Tensor, targets: Tensor) -> Tensor:
        converted = {name: tensor.to(precision) for name, tensor in theta.items()}
        return loss_of(functional_call(empty, converted, (inputs,)), targets, loss)

    batches = 0 if own_batches else None
    gradients: StackedGradients = vmap(grad_and_value(value), in_dims=(0, batches, batches))
    return torch.compile(gradients) if compiled else gradients


class _Run:
    """Weights, gradients and records of all seeds in the middle of training."""

    def __init__(
        self, recipe: Recipe, examples: Examples, rate: float, seeds: list[int], device: torch.device, limits: Limits
    ) -> None:
        """Start a run, or continue the one that a checkpoint was made of."""
        self.recipe, self.rate, self.seeds = recipe, rate, seeds
        models, precision = [build(recipe, seed) for seed in seeds], DTYPES[recipe.precision]
        self.micro = micro_batch(models[0], examples, precision, len(seeds), device, limits.memory)
        self.theta = stacked(models, DTYPES[recipe.weights], device)
        self.examples = examples.to(device, precision)
        watched = watch_recipe(recipe, seeds[0], models[0], examples)
        self.recording = Recording(watched=watched, reference=watched.reference(self.theta))
        self.done = 0
        self.spent = self.time = self.squares = 0.0
        own = recipe.batch is not None
        self.gradients = stacked_gradients(
            models[0], examples.loss, precision, own_batches=own, compiled=device.type == "cuda"
        )
        if limits.checkpoint is not None and limits.checkpoint.exists():
            self.load(limits.checkpoint)

    def advance(self, *, record: bool, final: bool) -> None:
        """Take the gradient, record if asked, and make the step unless it is the end."""
        gradients, losses = self.gradient()
        if not bool(torch.isfinite(losses).all()):
            bad = self.seeds[int((~torch.isfinite(losses)).nonzero()[0])]
            raise DivergedError(
                f"{self.recipe.name} at step size {self.rate:g}: the loss of seed {bad} is no longer finite at step "
                f"{self.done}. Take a smaller step size."
            )
        if record:
            self.recording.note(self.theta, gradients, losses, self.done, self.time, self.squares)
        if final:
            return
        rate = self.recipe.schedule.rate(self.rate, self.done, self.recipe.steps)
        torch._foreach_add_(list(self.theta.values()), [gradients[name] for name in self.theta], alpha=-rate)
        self.done += 1
        self.time += rate
        self.squares += rate * rate

    def gradient(self) -> tuple[dict[str, Tensor], Tensor]:
        """Return the gradient of the mean loss over the step's examples, in smaller pieces if they turn out not to fit
        the device.
        """
        while True:
            try:
                return self.accumulated()
            except torch.OutOfMemoryError:
                if self.micro == 1:
                    raise
            self.micro //= 2
            torch.cuda.empty_cache()

    def accumulated(self) -> tuple[dict[str, Tensor], Tensor]:
        """Return the gradient and the losses, accumulated over micro-batches of the present size."""
        total: dict[str, Tensor] = {}
        losses = torch.zeros(len(self.seeds), dtype=torch.float64, device=self.examples.inputs.device)
        for share, inputs, targets in self.batches():
            result, value = self.gradients(self.theta, inputs, targets)
            losses += share * value.detach().double()
            for name, grad in result.items():
                total[name] = share * grad if name not in total else total[name].add_(grad, alpha=share)
        return total, losses

    def batches(self) -> Iterator[tuple[float, Tensor, Tensor]]:
        """Yield the step's examples in micro-batches, with the share each has in the mean."""
        inputs, targets, batch = self.examples.inputs, self.examples.targets, self.recipe.batch
        if batch is None:
            for x, y in zip(inputs.split(self.micro), targets.split(self.micro), strict=True):
                yield len(x) / len(inputs), x, y
            return
        drawn = torch.stack([batch_indices(seed, self.done, batch, len(inputs)) for seed in self.seeds])
        for chosen in drawn.to(inputs.device).split(self.micro, 1):
            yield chosen.shape[1] / batch, inputs[chosen], targets[chosen]

    def state(self) -> dict[str, object]:
        """Return what a resumed run needs, as tensors and plain data."""
        recording = self.recording
        return {
            "recipe": repr(self.recipe),
            "rate": self.rate,
            "seeds": self.seeds,
            "examples": [self.examples.name, len(self.examples)],
            "done": self.done,
            "spent": self.spent,
            "sums": [self.time, self.squares],
            "theta": self.theta,
            "reference": [dict(recording.reference.values), dict(recording.reference.scales)],
            "records": [recording.at, recording.time, recording.squares, recording.losses],
            "measured": recording.measured,
            "steepest": recording.steepest,
        }

    def load(self, path: Path) -> None:
        """Go on from a state that was saved by a run of the same recipe, step size, seeds and data."""
        state = restore(path, like=self.state(), keys=("recipe", "rate", "seeds", "examples"))
        device = self.examples.inputs.device
        self.done, self.spent = state["done"], state["spent"]
        self.time, self.squares = state["sums"]
        self.theta = {name: tensor.to(device) for name, tensor in state["theta"].items()}
        recording = self.recording
        values, scales = ({name: t.to(device) for name, t in part.items()} for part in state["reference"])
        recording.reference = type(recording.reference)(values, scales)
        recording.at, recording.time, recording.squares, recording.losses = state["records"]
        recording.measured = state["measured"]
        recording.steepest = {name: tensor.to(device) for name, tensor in state["steepest"].items()}

    def trajectories(self) -> list[Trajectory]:
        """Return the trajectory of every seed."""
        recipe, recording = self.recipe, self.recording
        batch = len(self.examples) if recipe.batch is None else recipe.batch
        seen = batch * (self.done + 1) * len(self.seeds)
        device = self.examples.inputs.device
        quantities = recording.quantities(self.theta)
        return [
            Trajectory(
                recipe=recipe.name,
                title=recipe.title,
                scale=recipe.scale,
                step=self.rate,
                schedule=recipe.schedule.kind,
                seed=seed,
                precision=recipe.precision,
                weights=recipe.weights,
                data=self.examples.name,
                batch=recipe.batch,
                examples=len(self.examples),
                steps=self.done,
                planned=recipe.steps,
                parameters=sum(tensor[0].numel() for tensor in self.theta.values()),
                device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
                seconds=self.spent,
                examples_per_second=seen / self.spent if self.spent else math.nan,
                at=tuple(recording.at),
                time=tuple(recording.time),
                squares=tuple(recording.squares),
                loss=tuple(losses[index] for losses in recording.losses),
                quantities=quantities[index],
            )
            for index, seed in enumerate(self.seeds)
        ]


def batch_indices(seed: int, step: int, batch: int, count: int) -> Tensor:
    """Return which examples a seed sees in a step: drawn with repetition, a function of seed and step alone."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    return torch.randint(count, (batch,), generator=generator)
