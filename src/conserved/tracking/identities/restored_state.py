"""Was everything restored? Weights and optimizer state at the first step after a resume, against the checkpoint's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from conserved.tracking.identities.finding import StepFinding, name_tensors
from conserved.tracking.identities.fingerprints import fingerprints
from conserved.tracking.identities.run_objects import RunObjects, wrapped_ids
from conserved.tracking.identities.step_identity import (
    StepIdentity,
    TrainingStep,
    grouped_parameters,
    is_plain,
    on_host,
)

_OPTIONS = ("betas", "momentum", "dampening", "nesterov", "eps", "amsgrad", "maximize", "alpha", "rho")
"""Options of an optimizer that a run keeps; rates and decays have schedules."""


class RestoredState(StepIdentity):
    """Compares fingerprints that a checkpoint carries with what the first step after a resume starts from."""

    name = "resume"

    def __init__(self) -> None:
        self._saved: Mapping[str, Any] | None = None
        self._before_pass: Mapping[str, Any] | None = None
        """The part of a checkpoint that the first pass after a resume changes."""

    @staticmethod
    def state(step: TrainingStep) -> dict[str, Any]:
        """Return fingerprints of weights, buffers, optimizer state and rates, as plain numbers."""
        return {
            "tensors": _tensors(step.model),
            "optimizers": [_optimizer(optimizer, step.structure.names(())) for optimizer in step.optimizers],
            "schedules": _schedules(step),
            "companions": _companions(step.model),
            "rates": _rates(step),
            "random": _print_of(torch.get_rng_state()),
            "batches": list(step.seen_batches),
            "trained": _trained(step),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Expect these fingerprints at the next step."""
        self._saved = self._before_pass = state

    def before_forward(self, step: TrainingStep, module: nn.Module) -> None:
        saved = self._before_pass
        if saved is None or not torch.is_grad_enabled():
            return
        self._before_pass = None
        self._look_at_buffers(step, saved["tensors"])
        if saved.get("random") not in (None, _print_of(torch.get_rng_state())):
            step.notes.append("random numbers do not go on where the checkpoint was saved")
        first, last = (*saved.get("batches", ()), None, None)[:2]
        if first is not None and first != last and step.seen_batches[:1] == [first]:
            step.notes.append("the first batch after the resume is the first of the run that was saved")

    def _look_at_buffers(self, step: TrainingStep, saved: Mapping[str, int]) -> None:
        """Report buffers that are not those of the checkpoint, before a pass updates them."""
        buffers = {name for name, _ in step.model.named_buffers()} & set(saved)
        now = _tensors(step.model) if buffers else {}
        wrong = sorted(name for name in buffers if now.get(name, saved[name]) != saved[name])
        if wrong:
            step.report(
                StepFinding(
                    code="not restored",
                    tensor=wrong[0],
                    others=tuple(wrong[1:]),
                    message=f"{name_tensors(wrong)} {'is' if len(wrong) == 1 else 'are'} not what the checkpoint was "
                    "saved with: buffers were not restored. Save model.state_dict(), which has them, and not the "
                    "parameters alone.",
                )
            )

    def weights_loaded(self, step: TrainingStep, missing: Sequence[str], unexpected: Sequence[str]) -> None:
        """Report tensors that were not loaded because the checkpoint has them under another prefix."""
        known = {name.partition(".")[2]: name for name in unexpected}
        renamed = [name for name in missing if name in known or name.partition(".")[2] in unexpected]
        if renamed and 2 * len(renamed) > len(missing):
            there = known.get(renamed[0], renamed[0].partition(".")[2])
            step.report(
                StepFinding(
                    code="not restored",
                    tensor=renamed[0],
                    others=tuple(renamed[1:]),
                    message=f"{name_tensors(renamed)} was not loaded: the checkpoint calls it {there}. Strip or add "
                    "the prefix of its keys, and load with strict=True.",
                )
            )

    def weights_given(self, step: TrainingStep, state: Mapping[str, Any]) -> None:
        """Report a state dict in mid-run that holds the model's own tensors, so that loading it changes nothing."""
        own = {name: p for name, p in step.model.named_parameters() if is_plain(p) and p.device.type != "meta"}
        if step.number < 2 or not own or not all(_is_same_memory(state.get(name), p) for name, p in own.items()):
            return
        step.report(
            StepFinding(
                code="not restored",
                message="The state dict that was loaded holds the model's own tensors, so that loading it changes "
                "nothing: weights that were to be kept were trained on. Keep copy.deepcopy(model.state_dict()).",
            )
        )

    def before_optimizer(self, step: TrainingStep, optimizer: Optimizer) -> None:
        saved, self._saved = self._saved, None
        if saved is None:
            return
        now = self.state(step)
        changed = [(a, b) for a, b in zip(saved.get("rates", ()), now["rates"], strict=False) if a != b]
        if changed:
            step.notes.append(f"the rate is {changed[0][1]:g} and was {changed[0][0]:g} when the checkpoint was saved")
        self._look_at_frozen(step, saved.get("trained", ()))
        # Passes between the resume and the step update running statistics.
        buffers = {name for name, _ in step.model.named_buffers()}
        wrong = [
            name
            for name, value in saved["tensors"].items()
            if name not in buffers and now["tensors"].get(name, value) != value
        ]
        if wrong:
            step.report(
                StepFinding(
                    code="not restored",
                    tensor=wrong[0],
                    others=tuple(wrong[1:]),
                    message=f"{name_tensors(wrong)} is not what the checkpoint was saved with: it was "
                    "not restored. Was a "
                    "key missing and strict=False?",
                )
            )
        for stepped, before, after in zip(step.optimizers, saved["optimizers"], now["optimizers"], strict=False):
            self._compare(step, type(stepped).__name__, before, after)
        for before, after in zip(saved.get("schedules", ()), now["schedules"], strict=False):
            if before != after and before[0] == after[0]:
                step.report(
                    StepFinding(
                        code="not restored",
                        message=f"{after[0]} is at {after[1]:g} and was at {before[1]:g} when the "
                        "checkpoint was saved: "
                        "it was not restored. Load its state_dict as well.",
                    )
                )

        for kind, values in saved.get("companions", {}).items():
            present = now["companions"].get(kind, ())
            if values and present and not set(values) & set(present):
                what = "its scale" if kind == "GradScaler" else "its count of updates"
                step.report(
                    StepFinding(
                        code="not restored",
                        message=f"The {kind} of this run was not restored: {what} was {values[0]:g} when the "
                        f"checkpoint was saved and is {present[0]:g}. Load its state_dict as well.",
                    )
                )

    def _look_at_frozen(self, step: TrainingStep, trained: Sequence[str]) -> None:
        """Report parameters that the optimizer holds, that were trained before, and that are frozen now."""
        own, optimized = step.structure.parameters, step.optimized_ids()
        frozen = [n for n in trained if n in own and not own[n].requires_grad and id(own[n]) in optimized]
        if frozen:
            step.report(
                StepFinding(
                    code="not restored",
                    tensor=frozen[0],
                    others=tuple(frozen[1:]),
                    message=f"{name_tensors(frozen)} {'was' if len(frozen) == 1 else 'were'} trained when the "
                    "checkpoint was saved, and the optimizer holds them, but requires_grad is False now: thaw them "
                    "again after a resume.",
                )
            )

    def _compare(self, step: TrainingStep, name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        options = [(a, b) for a, b in zip(before.get("options", ()), after["options"], strict=False) if a != b]
        if options and before["count"] == after["count"]:
            was, is_now = options[0]
            key = next(key for key in {**was, **is_now} if was.get(key) != is_now.get(key))
            step.report(
                StepFinding(
                    code="not restored",
                    certain=False,
                    message=f"The option {key} of {name} is {is_now.get(key)} and was {was.get(key)} when the "
                    "checkpoint was saved. Load the optimizer's state_dict last.",
                )
            )
        if before["count"] == after["count"] and before["tensors"] == after["tensors"]:
            return
        own = before["tensors"]
        wrong = [key for key in own if key in after["tensors"] and own[key] != after["tensors"][key]]
        prints = [sorted(map(tuple, state["tensors"].values())) for state in (before, after)]
        cause = (
            f"{name_tensors(wrong)} has that of another tensor. Were parameters given to it in another order?"
            if wrong and prints[0] == prints[1]
            else f"its step count was {before['count']:g} and is {after['count']:g}. Load the "
            "optimizer's state_dict as "
            "well."
            if before["count"] != after["count"]
            else f"that of {name_tensors(wrong)} has other numbers. Was it rounded, or written to, on its way?"
        )
        step.report(
            StepFinding(
                code="not restored",
                tensor=wrong[0] if wrong and prints[0] == prints[1] else "",
                message=f"The state of {name} is not what the checkpoint was saved with: {cause}",
            )
        )


def _is_same_memory(value: Any, parameter: Tensor) -> bool:
    return (
        isinstance(value, Tensor)
        and is_plain(value)
        and value.shape == parameter.shape
        and value.data_ptr() == parameter.data_ptr() != 0
    )


def _trained(step: TrainingStep) -> list[str]:
    """Return the names of parameters that need a gradient and that an optimizer holds."""
    optimized = step.optimized_ids()
    return [name for name, p in step.structure.parameters.items() if p.requires_grad and id(p) in optimized]


def _rates(step: TrainingStep) -> list[float]:
    """Return the rates of all groups that the host can read."""
    rates = [group.get("lr", 0.0) for optimizer in step.optimizers for group in optimizer.param_groups]
    return [float(rate) for rate in rates if not isinstance(rate, Tensor) or on_host(rate)]


def _print_of(values: Tensor) -> int:
    """Return the fingerprint of one tensor of any type."""
    return int(fingerprints([values.double()])[0])


def _tensors(model: nn.Module) -> dict[str, int]:
    named = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    plain = {name: t for name, t in named.items() if is_plain(t) and not hasattr(t, "device_mesh")}
    return dict(zip(plain, fingerprints(list(plain.values())).tolist(), strict=True))


def _optimizer(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return the largest step count, and fingerprints of the state of every tensor by its name."""
    counts, prints = [], {}
    for index, p in enumerate(grouped_parameters(optimizer)):
        state = optimizer.state.get(p, {})
        tensors = [
            value
            for key, value in sorted(state.items())
            if key != "step" and isinstance(value, Tensor) and is_plain(value) and not hasattr(value, "device_mesh")
        ]
        prints[names.get(id(p), str(index))] = fingerprints(tensors).tolist()
        counts.append(state.get("step"))
    readable = [
        float(option) for option in counts if option is not None and (not isinstance(option, Tensor) or on_host(option))
    ]
    options = [{key: group[key] for key in _OPTIONS if key in group} for group in optimizer.param_groups]
    plain = [{key: repr(value) for key, value in option.items() if not isinstance(value, Tensor)} for option in options]
    return {"count": max(readable, default=0.0), "tensors": prints, "options": plain}


def _schedules(step: TrainingStep) -> list[tuple[str, float]]:
    """Return how far schedulers of these optimizers and gradient scalers are."""
    own = {id(optimizer) for optimizer in step.optimizers}
    objects = RunObjects.search()
    schedulers = [scheduler for scheduler in (ref() for ref in objects.schedulers) if scheduler is not None]
    return [
        (type(scheduler).__name__, float(scheduler.last_epoch))
        for scheduler in schedulers
        if isinstance(scheduler.last_epoch, int)
        and not own.isdisjoint(wrapped_ids(getattr(scheduler, "optimizer", None)))
    ]


def _companions(model: nn.Module) -> dict[str, list[float]]:
    """Return the scales of gradient scalers and how often averages of the model were updated."""
    objects = RunObjects.search()
    shapes = [p.shape for p in model.parameters()]
    scalers = [
        companion
        for companion in (ref() for ref in objects.scalers)
        if companion is not None and companion.is_enabled()
    ]
    averages = [companion for companion in (ref() for ref in objects.averages) if companion is not None]
    own = [companion for companion in averages if [p.shape for p in companion.module.parameters()] == shapes]
    # Reading a scale that is on a device would wait for it.
    readable = [companion for companion in scalers if companion._scale is None or on_host(companion._scale)]
    return {
        "GradScaler": [float(companion.get_scale()) for companion in readable],
        "AveragedModel": [float(companion.n_averaged) for companion in own if on_host(companion.n_averaged)],
    }
