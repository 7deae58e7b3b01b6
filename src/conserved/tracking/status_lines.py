"""The line that a monitor says at the start of a run, and the one at its end."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from conserved.inference.reading_progress import PROGRESS
from conserved.output.lines import counted
from conserved.tracking.identities.finding import name_tensors

if TYPE_CHECKING:
    from conserved.tracking.monitor import Monitor

LOGGER = logging.getLogger("conserved")


_PATIENCE = 1.0
"""Seconds after which long work is announced."""

_AGAIN = 5.0
"""Seconds from one line about its progress to the next."""

_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def say(text: str) -> None:
    """Write a line to the log at level INFO, or to stderr where nobody has set up logging."""
    if LOGGER.level != logging.NOTSET or LOGGER.hasHandlers():
        LOGGER.info("%s", text)
    else:
        sys.stderr.write(f"{text}\n")


@contextmanager
def announced(work: str) -> Iterator[None]:
    """Log the progress of a long block every few seconds.

    Args:
        work: what is done, such as "reading the laws".
    """
    ended, began = threading.Event(), time.perf_counter()

    def tell() -> None:
        patience = _PATIENCE
        while not ended.wait(patience):
            patience = _AGAIN
            say(f"conserved: {work}, {time.perf_counter() - began:.0f} s so far: {PROGRESS}")

    threading.Thread(target=tell, name="conserved progress", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def opening_line(monitor: Monitor, optimizers: list[Optimizer], autocast: Iterable[torch.dtype]) -> str:
    """Return the first line of a run: laws and coverage, trained tensors, precision, ties, decayed gains, cadence."""
    model = monitor.model
    parts = [*_watched(monitor), _trained(model, optimizers), *_precision(model, autocast), *_tied(model)]
    parts += [*_decayed(model, optimizers), *_unusual(model, optimizers), *monitor.take_notes(), monitor.cadence]
    return f"conserved: {'; '.join(parts)}"


def _watched(monitor: Monitor) -> list[str]:
    """Return the laws, the share of parameters they hold, and the error that a typical one would show."""
    laws = monitor.laws
    if not len(laws):
        return [monitor.state]
    covered = {name for symmetry in laws for name in symmetry.parameters}
    sizes = {name: p.numel() for name, p in monitor.model.named_parameters() if p.requires_grad}
    share = sum(size for name, size in sizes.items() if name in covered) / max(sum(sizes.values()), 1)
    text = f"watching {counted(len(laws), 'law')}, {100 * share:.0f} % of parameters"
    sensitivity = next((entry.sensitivity for entry in monitor.audits if entry.sensitivity is not None), None)
    if sensitivity is not None and sensitivity <= 1:
        text += f", errors above {_percent(sensitivity)} visible"
    elif sensitivity is not None:
        text += ", which see little: a gradient that is lost would not show in a typical one"
    return [text] if monitor.state == "watching" else [text, monitor.state]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.1g} %"


def _precision(model: nn.Module, autocast: Iterable[torch.dtype]) -> list[str]:
    """Return the precisions other than float32 that the run computes in, and whose choice they are."""
    cast = [f"{_SHORT.get(dtype, _name(dtype))} by autocast" for dtype in sorted(autocast, key=str)]
    stored = {p.dtype for p in model.parameters() if p.dtype.is_floating_point} - {torch.float32}
    coarse = [name for name, b in model.named_buffers() if b.dtype in _SHORT and not stored.issuperset({b.dtype})]
    cast += [f"buffers in {_SHORT[model.get_buffer(coarse[0]).dtype]}: {name_tensors(coarse, 2)}"] if coarse else []
    return cast + [f"{_SHORT.get(dtype, _name(dtype))} parameters" for dtype in sorted(stored, key=str)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def closing_line(monitor: Monitor) -> str:
    """Return the last line of a run: steps, audits, cost, alarms, and the parts that are off."""
    alarms, audits = len(monitor.alarms), len(monitor.audits)
    text = (
        f"{counted(monitor.count, 'step')}, {counted(audits, 'audit')}, "
        f"{alarms or 'no'} alarm{'s' if alarms != 1 else ''}; took {1e3 * monitor.cost:.2g} ms a step"
    )
    parts = [text, *monitor.take_notes(), *([] if monitor.state == "watching" else [monitor.state])]
    return f"conserved: {'; '.join(parts)}"


def _unusual(model: nn.Module, optimizers: list[Optimizer]) -> list[str]:
    """Return settings that may be intended or not: maximized losses, frozen tensors in an optimizer, frozen norms."""
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    frozen = [names[id(p)] for group in groups for p in group["params"] if not p.requires_grad and id(p) in names]
    norms = [
        name
        for name, m in model.named_modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm)
        and m.training
        and m.track_running_stats
        and m.weight is not None
        and not m.weight.requires_grad
    ]
    parts = ["the loss is maximized"] if any(group.get("maximize") for group in groups) else []
    parts += [f"frozen and in an optimizer: {name_tensors(frozen, 2)}"] if frozen else []
    return parts + ([f"statistics of frozen norms move: {name_tensors(norms, 2)}"] if norms else [])


def _trained(model: nn.Module, optimizers: list[Optimizer]) -> str:
    optimized = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    every = list(model.parameters())
    trained = [p for p in every if p.requires_grad]
    names = " and ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
    count = sum(id(p) in optimized for p in trained)
    holds = f"{names} holds {'all' if count == len(trained) else count}"
    return f"trains {len(trained)} of {len(every)} tensors, {holds}"


def _tied(model: nn.Module) -> list[str]:
    """Return the parameters that have several names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    several = [own for own in names.values() if len(own) > 1]
    return [f"tied: {several[0][-1]} = {several[0][0]}"] if several else []


def _decayed(model: nn.Module, optimizers: list[Optimizer]) -> list[str]:
    """Return the gains and biases that weight decay shrinks, which most recipes leave out."""
    vectors = {id(p) for p in model.parameters() if p.ndim < 2 and p.requires_grad}
    counts = Counter(
        id(p) in vectors
        for optimizer in optimizers
        for group in optimizer.param_groups
        if group.get("weight_decay")
        for p in group["params"]
    )
    return [f"weight decay on {counts[True]} norms and biases"] if counts[True] else []
