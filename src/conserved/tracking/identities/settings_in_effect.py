"""Do settings have an effect? Attributes that were set where PyTorch does not look for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from conserved.tracking.identities.finding import StepFinding, name_tensors
from conserved.tracking.identities.step_identity import StepIdentity, TrainingStep

_SWITCH = "requires_grad"

_SIMILAR = 0.9
"""Likeness of an attribute's name to `requires_grad` from which on it is a slip."""

_OTHER_NAMES = {"learning_rate": "lr", "weight_decay_rate": "weight_decay", "epsilon": "eps"}
"""Names that other libraries use for options of PyTorch's optimizers."""

_SLOW, _FAST = 0.99, 0.97
"""Rates of two averages of Adam from which on they look exchanged: the first is slow, and the second is not."""


class SettingsInEffect(StepIdentity):
    """Looks for switches that were set on the wrong object: a module, a misspelt attribute, the optimizer itself."""

    name = "settings"

    def __init__(self) -> None:
        self._signature: tuple[int, ...] = ()
        self._options: dict[int, int] = {}
        """By optimizer, how many options its groups have."""
        self._attributes: dict[int, dict[str, Any]] = {}
        """By optimizer, its attributes and defaults that have the name of an option of its groups."""

    def before_optimizer(self, step: TrainingStep, optimizer: Optimizer) -> None:
        self._look_at_switches(step)
        self._look_at_options(step, optimizer)
        now = _options_outside(optimizer)
        before = self._attributes.get(id(optimizer))
        self._attributes[id(optimizer)] = now
        for key, value in now.items() if before is not None else ():
            option = key.rpartition(".")[2]
            used = [group[option] for group in optimizer.param_groups]
            if before is not None and before.get(key) != value and all(each != value for each in used):
                name = type(optimizer).__name__
                step.report(
                    StepFinding(
                        code="no effect",
                        certain=True,
                        message=f"{name}.{key} was set to {value} before step {step.number}, which has no effect: "
                        f"{name} reads its groups, where {option} is {used[0]}. Set it in every group of "
                        "optimizer.param_groups.",
                    )
                )
                return

    def _look_at_options(self, step: TrainingStep, optimizer: Optimizer) -> None:
        """Report options that the optimizer does not know, and betas of Adam that are exchanged."""
        count = sum(map(len, optimizer.param_groups))
        if self._options.get(id(optimizer)) == count or not type(optimizer).__module__.startswith("torch.optim"):
            # A class of the program's may read options of its own.
            return
        self._options[id(optimizer)] = count
        name = type(optimizer).__name__
        for key, option in (pair for group in optimizer.param_groups for pair in _unknown_options(group, optimizer)):
            step.report(
                StepFinding(
                    code="no effect",
                    certain=True,
                    message=f"A parameter group of {name} sets {key!r}, which has no effect: {name} calls it {option}, "
                    f"and uses its default {optimizer.defaults[option]}.",
                )
            )
            return
        betas = [group["betas"] for group in optimizer.param_groups if len(group.get("betas", ())) == 2]
        plain = [pair for pair in betas if all(isinstance(b, float) for b in pair)]
        if any(a >= _SLOW and b <= _FAST for a, b in plain):
            step.report(
                StepFinding(
                    code="no effect",
                    message=f"The betas of {name} are {tuple(plain[0])}: the gradient is averaged longer than its "
                    "square. Were they exchanged? Usual are (0.9, 0.999).",
                )
            )

    def _look_at_switches(self, step: TrainingStep) -> None:
        """Look again whenever an attribute was added to a module or a parameter."""
        structure = step.structure
        counts = (map(len, map(vars, part)) for part in (structure.modules, structure.parameters.values()))
        signature = (*chain.from_iterable(counts),)
        if signature == self._signature:
            return
        self._signature = signature
        idle = list(_idle_modules(step.model))
        if idle:
            step.report(
                StepFinding(
                    code="no effect",
                    certain=True,
                    tensor=idle[0][1],
                    message=f"{name_tensors([f'{name}.requires_grad' for name, _ in idle])} = False was set on a "
                    f"module, which has no effect: {idle[0][1]} is trained. Call requires_grad_(False).",
                )
            )
            return
        for name, parameter in step.model.named_parameters():
            slip = next((key for key in vars(parameter) if _is_slip(key)), None)
            if slip is not None and bool(vars(parameter)[slip]) != parameter.requires_grad:
                step.report(
                    StepFinding(
                        code="no effect",
                        certain=True,
                        tensor=name,
                        message=f"{name}.{slip} = {vars(parameter)[slip]} has no effect, because the attribute is "
                        f"called requires_grad: {name} is {'trained' if parameter.requires_grad else 'frozen'}.",
                    )
                )
                return


def _unknown_options(group: Mapping[str, Any], optimizer: Optimizer) -> Iterator[tuple[str, str]]:
    """Yield options of a group under another name than the optimizer's own, which is left at its default."""
    for key, value in group.items():
        option = _OTHER_NAMES.get(key, "")
        known = option in optimizer.defaults and key not in optimizer.defaults and _is_plain(value)
        if known and group[option] == optimizer.defaults[option] != value:
            yield key, option


def _idle_modules(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield modules with a `requires_grad` of their own that is off, and a parameter of theirs that is trained."""
    for name, module in model.named_modules():
        if vars(module).get(_SWITCH) is False:
            trained = next((own for own, p in module.named_parameters() if p.requires_grad), None)
            if trained is not None:
                yield name or "model", f"{name}.{trained}" if name else trained


def _is_slip(key: str) -> bool:
    return key != _SWITCH and SequenceMatcher(None, key.lower(), _SWITCH).ratio() >= _SIMILAR


def _options_outside(optimizer: Optimizer) -> dict[str, Any]:
    """Return attributes and defaults of an optimizer that have the name of an option of its groups."""
    options: set[str] = set.intersection(*(set(group) for group in optimizer.param_groups)) - {"params"}
    settings = {key: value for key, value in vars(optimizer).items() if key in options and _is_plain(value)}
    defaults: Mapping[str, Any] = getattr(optimizer, "defaults", {})
    settings |= {f"defaults.{key}": value for key, value in defaults.items() if key in options and _is_plain(value)}
    return settings


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | tuple) and not isinstance(value, Tensor)
