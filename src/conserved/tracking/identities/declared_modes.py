"""Are mode and precision what they were? Train and eval, autocast, and torch's switches for reduced precision."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from conserved._torch_compat import BatchNormBase, in_backward
from conserved.boundary import Boundary, Hook, program_caches_casts
from conserved.inference import being_followed
from conserved.product_precision import read_switch
from conserved.tracking.identities.finding import StepFinding, name_tensors
from conserved.tracking.identities.model_structure import ModelStructure
from conserved.tracking.identities.step_identity import StepIdentity, TrainingStep, on_host

_CAST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Modules whose products autocast computes in half precision."""

_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


_SAID = "reported"

_PROBED = 8
"""Steps in which the cache of autocast is probed."""

_SEEDED, _SEEDED_STEPS = 3, 8
"""Steps in a row that begin with the same random numbers, after which it is reported; and steps that are tested."""


class _DropoutSeen(TorchFunctionMode):
    """Notes functions that drop entries while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        name = getattr(func, "__name__", "")
        if "dropout" in name:
            rate = given.get("p", args[1] if len(args) > 1 else 0.5)
            on = given.get("training", args[2] if len(args) > 2 else True)
            self.seen = name if on and rate else self.seen
        elif name == "scaled_dot_product_attention":
            self.seen = name if given.get("dropout_p", args[4] if len(args) > 4 else 0.0) else self.seen
        elif name == "bernoulli_":
            # A mask drawn with one rate for all entries, as stochastic depth draws its own.
            rate = given.get("p", args[1] if len(args) > 1 else 0.5)
            self.seen = name if isinstance(rate, float) and 0 < rate < 1 else self.seen
        return func(*args, **given)


class DeclaredModes(StepIdentity):
    """Notes mode and precision of every pass, and switches of torch at every step, and reports what changes."""

    name = "modes"

    def __init__(self) -> None:
        self._training: bool | None = None
        """The mode of the last step's passes."""
        self._autocast: torch.dtype | None = None
        self._seen_autocast: set[torch.dtype | None] = set()
        self._modes: set[bool] = set()
        self._steps = 0
        self._ungraded = 0
        """Passes without gradients in train mode since the last step."""
        self._quiet = True
        """Whether no step so far had such passes."""
        self._switches: dict[str, Any] = {}
        self._types: dict[str, torch.dtype] = {}
        self._handles: list[Any] = []
        self._without_effect = ""
        self._random: Tensor | None = None
        """The state of the random numbers before an evaluation."""
        self._drops: _DropoutSeen | None = None
        self._suspicious, self._dropped = False, ""
        self._evaluated = False
        """Whether the model ran in eval mode and without gradients before."""
        self._first_numbers: Tensor | None = None
        """The state of the random numbers before the first pass of the last step."""
        self._seeded, self._drawn = 0, False
        """Steps in a row that began so, and whether the last one drew random numbers."""
        self._just_evaluated = False
        """Whether the model ran in eval mode and without gradients since the last step."""
        self._recomputed = False
        """Whether batch norms were seen to run inside a backward pass."""
        self._probe: Tensor | None = None
        """A tensor that was cast in the autocast region of the last pass."""
        self._stepped_inside = self._stale_cache = False
        """Whether an optimizer stepped since, and whether the cache was seen to be stale."""
        self._half_switched = False
        """Whether an evaluation ran with all layers in train mode and the model itself not."""

    def begin(self, step: TrainingStep) -> None:
        hook = Hook(Boundary(logs=False), "modes", partial(self._look_at_output, step))
        for module in [m for m in step.model.modules() if type(m) in _CAST][:2]:
            self._handles.append(module.register_forward_hook(hook))
        again = Hook(Boundary(logs=False), "modes", partial(self._look_at_recomputed, step))
        for module in [m for m in step.model.modules() if isinstance(m, BatchNormBase)][:1]:
            self._handles.append(module.register_forward_hook(again))

    def close(self, step: TrainingStep) -> None:
        if self._suspicious:
            # No other evaluation came to say what drew them.
            step.notes.append("an evaluation drew random numbers")
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _look_at_output(self, step: TrainingStep, module: nn.Module, args: Any, output: Any) -> None:
        """Notice a product in float32 inside an autocast region."""
        weight: Any = module.weight
        device = weight.device.type
        # Replays in reference form compute in single precision.
        if (
            step.paused
            or being_followed()
            or not torch.is_autocast_enabled(device)
            or weight.dtype != torch.float32
            or not args
        ):
            return
        wanted = torch.get_autocast_dtype(device)
        if isinstance(output, torch.Tensor) and output.dtype == torch.float32 != wanted:
            self._without_effect = f"{type(module).__name__} gives float32 where autocast to {_name(wanted)} is on"

    def _look_at_recomputed(self, step: TrainingStep, module: nn.Module, args: Any, output: Any) -> None:
        """Report running statistics that take in a batch while a backward pass computes activations again."""
        if self._recomputed or step.paused or being_followed() or not in_backward():
            return
        if module.training and module.track_running_stats and module.momentum:
            self._recomputed = True
            step.report(
                StepFinding(
                    code="statistics",
                    message="Batch norms run again inside the backward pass, in a part that is checkpointed: their "
                    "running statistics take in every batch twice, and momentum is another one than it says.",
                )
            )

    def _look_at_cache(self, step: TrainingStep, device: str) -> None:
        """Report weights in the cache of autocast that are those of before a step.

        The cache is emptied when the outermost region is left. A probe is cast in a region, changed, and cast again.
        """
        enabled = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        if not enabled or not program_caches_casts() or self._stale_cache:
            self._probe = None
            return
        probe, stepped = self._probe, self._stepped_inside
        self._stepped_inside = False
        if probe is not None and stepped:
            with torch.no_grad():
                probe.add_(1.0)
            if float(_product(probe)) != float(probe.detach()):
                self._stale_cache = True
                step.report(
                    StepFinding(
                        code="autocast",
                        certain=True,
                        message="Passes use weights of before the last step: the autocast region is not left between "
                        "steps, and its cache still has them. Enter torch.autocast anew in every step, around forward "
                        "pass and loss only.",
                    )
                )
        # A new tensor in every step: what is cast once in a region is not cast again.
        self._probe = torch.ones(1, 1, device=device, requires_grad=True)
        _product(self._probe)

    def before_forward(self, step: TrainingStep, module: nn.Module) -> None:
        training = _effective_mode(step.structure, declared=module.training)
        if not torch.is_grad_enabled():
            self._ungraded += training
            self._just_evaluated |= not training
            self._half_switched |= training and not module.training
            self._begin_evaluation(step, module)
            return
        if not self._modes and step.number <= _SEEDED_STEPS:
            self._look_at_seed(step)
        self._modes.add(training)
        device = next((p.device.type for p in module.parameters()), "cpu")
        if step.number <= _PROBED and not torch.is_inference_mode_enabled():
            self._look_at_cache(step, device)
        enabled = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        self._seen_autocast.add(torch.get_autocast_dtype(device) if enabled else None)

    def _look_at_seed(self, step: TrainingStep) -> None:
        """Remark that steps draw random numbers and all begin with the same ones."""
        state, before = torch.get_rng_state(), self._first_numbers
        self._first_numbers = state
        again = before is not None and torch.equal(state, before) and self._drawn
        self._drawn, self._seeded = False, self._seeded + 1 if again else 0
        if self._seeded == _SEEDED - 1:
            step.notes.append("steps begin with the same random numbers: is a seed set in every step?")

    def after_forward(self, step: TrainingStep, module: nn.Module, outputs: Any) -> None:
        """Notice dropout in the first evaluation; in a later one that it draws random numbers, and then what draws."""
        if self._drops is not None:
            drops, self._drops = self._drops, None
            drops.__exit__(None, None, None)
            self._dropped = self._dropped or drops.seen
        if self._random is not None:
            self._suspicious = not torch.equal(self._random, torch.get_rng_state())
            self._random = None

    def _begin_evaluation(self, step: TrainingStep, module: nn.Module) -> None:
        left = sum(m.training for m in step.structure.moded) if not module.training else 0
        remark = f"an evaluation ran with {left} dropout or norm layers in train mode"
        if left and remark not in step.notes:
            # As dropout at test time does on purpose.
            step.notes.append(remark)
        if self._dropped or self._drops is not None or any(m.training for m in step.structure.modules):
            return
        first, self._evaluated = not self._evaluated, True
        # A mode is part of what compiled code depends on: it is compiled again if there is a reason only.
        compiled = any(_is_compiled(m) for m in (module, *step.structure.modules))
        if (self._suspicious or (first and not compiled)) and not hasattr(module, "_orig_mod"):
            self._suspicious = False
            self._drops = _DropoutSeen()
            self._drops.__enter__()
        elif on_host(next(step.model.parameters(), torch.empty(0))):
            self._random = torch.get_rng_state()

    def before_optimizer(self, step: TrainingStep, optimizer: Optimizer) -> None:
        if self._dropped and self._dropped != _SAID:
            text, self._dropped = self._dropped, _SAID
            step.report(
                StepFinding(
                    code="mode",
                    message=f"The model was evaluated in eval mode before step {step.number}, and "
                    f"{text} dropped entries: "
                    "its outputs are random. Pass training=self.training, or dropout_p=0 in eval mode.",
                )
            )
        self._look_at_switches(step)
        if step.thorough:
            # Types stay as they are: a later step finds the same.
            self._look_at_types(step)
        if self._without_effect:
            text, self._without_effect = self._without_effect, ""
            step.report(
                StepFinding(
                    code="autocast",
                    message=f"Autocast has no effect: {text}. Is the product computed by code that "
                    "autocast does not know?",
                )
            )

    def after_optimizer(self, step: TrainingStep, optimizer: Optimizer) -> None:
        self._stepped_inside = True

    def after_step(self, step: TrainingStep) -> None:
        modes, self._modes = self._modes, set()
        if self._first_numbers is not None and not self._drawn and step.number <= _SEEDED_STEPS:
            self._drawn = not torch.equal(torch.get_rng_state(), self._first_numbers)
        precisions, self._seen_autocast = self._seen_autocast, set()
        ungraded, self._ungraded = self._ungraded, 0
        evaluated, self._just_evaluated = self._just_evaluated, False
        sensitive = _mode_matters(step.structure)
        if modes == {False} and sensitive and self._training in (None, True):
            before = "" if self._training is None else ", after steps in train mode"
            step.report(
                StepFinding(
                    code="mode",
                    # Who freezes norms and dropout on purpose does so without an evaluation before.
                    certain=evaluated and self._training is True,
                    message=f"The model was trained in eval mode in step {step.number}{before}: "
                    f"{sensitive} is off. Call "
                    "model.train() after evaluating.",
                )
            )
        if self._steps == 1:
            self._look_at_still_statistics(step)
        if ungraded and sensitive and self._quiet and self._steps:
            step.report(
                StepFinding(
                    code="mode",
                    message="The model ran without gradients in train mode before step "
                    f"{step.number}: {sensitive} acts "
                    "in that evaluation, and running statistics take it in. "
                    + (
                        "model.training = False does not reach its layers: call model.eval()."
                        if self._half_switched
                        else "Call model.eval() before and train() after."
                    ),
                )
            )
        self._quiet = self._quiet and not ungraded
        if modes:
            self._training = True in modes
            self._steps += 1
        if len(precisions) == 1:
            (now,) = precisions
            if self._steps > 1 and now is not self._autocast:
                step.report(
                    StepFinding(
                        code="autocast",
                        message=f"The precision of passes changed in step {step.number}: "
                        f"{_region(self._autocast)} before, "
                        f"{_region(now)} now. Was an autocast region not left, or left too early?",
                    )
                )
            self._autocast = now

    def _look_at_still_statistics(self, step: TrainingStep) -> None:
        """Report batch norms that have run in two steps and whose running statistics are those of a new module.

        With a momentum of zero they stay so. Who freezes statistics that were trained sets it as well.
        """
        norms = {name: m for name, m in step.model.named_modules() if isinstance(m, _NORMS) and m.momentum == 0}
        still = [
            name
            for name, m in norms.items()
            if m.training and m.running_mean is not None and m.running_var is not None and on_host(m.running_mean)
            if not m.running_mean.any() and bool((m.running_var == 1).all())
        ]
        if still:
            step.report(
                StepFinding(
                    code="mode",
                    tensor=f"{still[0]}.running_mean",
                    message=f"Running statistics of {name_tensors(still)} never move, as momentum is 0: in eval mode "
                    "nothing is normalised. In PyTorch momentum is the weight of the new batch; the default is 0.1.",
                )
            )

    def _look_at_types(self, step: TrainingStep) -> None:
        """Report weights that have fewer bits than in the step before."""
        now = {
            name: p.dtype for name, p in step.structure.parameters.items() if p.requires_grad and p.is_floating_point()
        }
        before, self._types = self._types, now
        coarser = [n for n, kind in now.items() if n in before and torch.finfo(kind).eps > torch.finfo(before[n]).eps]
        if coarser:
            first = coarser[0]
            step.report(
                StepFinding(
                    code="converted",
                    tensor=first,
                    others=tuple(coarser[1:]),
                    message=f"{first} was {_name(before[first])} and is {_name(now[first])} from step "
                    f"{step.number} on: "
                    "weights were converted in mid-run, and small updates are lost to rounding.",
                )
            )

    def _look_at_switches(self, step: TrainingStep) -> None:
        now = _switches()
        changed = [key for key, value in now.items() if self._switches and self._switches.get(key) != value]
        if changed:
            key = changed[0]
            step.report(
                StepFinding(
                    code="switch",
                    message=f"{key} went from {self._switches[key]} to {now[key]} before step "
                    f"{step.number}: products have "
                    "another precision from here on.",
                )
            )
        self._switches = now


def _product(probe: Tensor) -> Tensor:
    """Return a probe times one, by an operation that autocast computes in half precision and for which it caches."""
    torch.set_autocast_cache_enabled(True)
    try:
        return torch.nn.functional.linear(torch.ones_like(probe), probe).detach()
    finally:
        torch.set_autocast_cache_enabled(False)


def _switches() -> dict[str, Any]:
    matmul = torch.backends.cuda.matmul
    return {
        "torch.get_float32_matmul_precision()": read_switch(torch.get_float32_matmul_precision),
        "torch.backends.cudnn.allow_tf32": read_switch(lambda: torch.backends.cudnn.allow_tf32),
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": (
            matmul.allow_bf16_reduced_precision_reduction
        ),
        "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": (
            matmul.allow_fp16_reduced_precision_reduction
        ),
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.is_deterministic()": torch.are_deterministic_algorithms_enabled(),
    }


def _effective_mode(structure: ModelStructure, *, declared: bool) -> bool:
    """Return whether a model acts as in training.

    All layers whose mode matters may be in another mode than the model itself. Some of them may be so on purpose:
    layers of a frozen part, norms that a loop switches one by one, and dropout that is left on to sample.
    """
    children = structure.modules[1:]
    if not declared and children and all(m.training for m in children):
        return True
    layers = [m for m in structure.moded if _is_sensitive(m)]
    if not declared or not layers or any(m.training for m in layers):
        return declared
    deliberate = _deliberately_switched(structure)
    return all(id(m) in deliberate for m in layers)


def _deliberately_switched(structure: ModelStructure) -> set[int]:
    """Return layers in eval mode that belong to a frozen part, or whose own parent and siblings train."""
    switched: set[int] = set()
    for parent in structure.modules:
        parameters = list(parent.parameters())
        if not parent.training and parameters and not any(p.requires_grad for p in parameters):
            switched.update(id(m) for m in parent.modules())
        elif parent.training:
            switched.update(id(m) for m in parent.children() if isinstance(m, _NORMS) and not m.training)
    return switched


def _is_sensitive(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    return isinstance(module, _NORMS) and bool(module.track_running_stats)


def _mode_matters(structure: ModelStructure) -> str:
    """Return what depends on the mode of a model; empty if nothing does."""
    parts = []
    modules = structure.moded
    if any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in modules):
        parts.append("dropout")
    if any(isinstance(m, _NORMS) and m.track_running_stats for m in modules):
        parts.append("batch normalisation by the batch")
    return " and ".join(parts)


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _name(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


def _region(kind: torch.dtype | None) -> str:
    return "no autocast" if kind is None else f"autocast to {_name(kind)}"
