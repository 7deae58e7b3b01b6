"""The line that a monitor says at the start of a run, and the one at its end."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from conserved.tracking.monitor import Monitor

LOGGER = logging.getLogger("conserved")


def say(text: str) -> None:
    """Write a line to the log at level INFO, or to a terminal where nobody has set up logging."""
    configured = LOGGER.level != logging.NOTSET or LOGGER.hasHandlers()
    if configured or not sys.stderr.isatty():
        LOGGER.info("%s", text)
    else:
        sys.stderr.write(f"{text}\n")


def opening_line(monitor: Monitor, optimizers: list[Optimizer], precision: str) -> str:
    """Say what is watched: laws and coverage, trained tensors, precision, ties, decayed gains, how often."""
    laws, model = monitor.laws, monitor.model
    parts = [monitor.state]
    if len(laws):
        covered = {name for symmetry in laws for name in symmetry.parameters}
        sizes = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
        share = sum(size for name, size in sizes.items() if name in covered) / max(sum(sizes.values()), 1)
        parts[0] = f"watching {len(laws)} laws, {share:.0%} of parameters"
        if monitor.state != "watching":
            parts.append(monitor.state)
    parts += [_trained(model, optimizers), *([precision] if precision else []), *_tied(model)]
    parts += _decayed(model, optimizers)
    parts.append(f"account every {monitor.every} step{'s' if monitor.every > 1 else ''}")
    return f"conserved: {'; '.join(parts)}"


def closing_line(monitor: Monitor) -> str:
    """Say what came of the run: steps, audits, alarms, and parts that are off."""
    alarms, audits = len(monitor.alarms), len(monitor.audits)
    text = f"{monitor.count:,} steps, {audits} audits, {alarms or 'no'} alarm{'s' if alarms != 1 else ''}"
    return f"conserved: {text}" + ("" if monitor.state == "watching" else f"; {monitor.state}")


def _trained(model: nn.Module, optimizers: list[Optimizer]) -> str:
    held = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    every = list(model.parameters())
    trained = [p for p in every if p.requires_grad]
    names = " and ".join(dict.fromkeys(type(one).__name__ for one in optimizers))
    count = sum(id(p) in held for p in trained)
    holds = f"{names} holds {'all' if count == len(trained) else count}"
    return f"trains {len(trained)} of {len(every)} tensors, {holds}"


def _tied(model: nn.Module) -> list[str]:
    """Parameters that have several names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    several = [own for own in names.values() if len(own) > 1]
    return [f"tied: {several[0][-1]} = {several[0][0]}"] if several else []


def _decayed(model: nn.Module, optimizers: list[Optimizer]) -> list[str]:
    """Gains and biases that weight decay shrinks, which most recipes leave out."""
    vectors = {id(p) for p in model.parameters() if p.ndim < 2 and p.requires_grad}
    found = Counter(
        id(p) in vectors
        for one in optimizers
        for group in one.param_groups
        if group.get("weight_decay")
        for p in group["params"]
    )
    return [f"weight decay on {found[True]} norms and biases"] if found[True] else []
