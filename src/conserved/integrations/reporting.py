"""Where a transformers.Trainer reports anyway: its TensorBoard folder, its Weights & Biases or trackio run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conserved.output.printable import printable
from conserved.store import Sink, TensorBoard, Trackio, WeightsAndBiases
from conserved.store.sampled_sink import SampledSink
from conserved.tracking import Monitor


def sinks_of(args: Any) -> list[Sink]:
    """Return sinks that write beside the Trainer's own loggers, as often as those.

    They have started before callbacks of users.

    Args:
        args: the Trainer's arguments, of which `report_to`, `output_dir` and `logging_steps` are read.
    """
    names = args.report_to if isinstance(args.report_to, list | tuple) else [args.report_to]
    every = int(args.logging_steps) if args.logging_steps and args.logging_steps >= 1 else 100
    return [SampledSink(sink, every) for sink in _sinks_in(set(names), Path(args.output_dir))]


def print_alarms(monitor: Monitor, on_this_rank: bool) -> None:
    """Print the alarms of a run at its end, where they are not scrolled away."""
    if on_this_rank and monitor.alarms:
        sys.stderr.write(printable(monitor.summary(), lines=True) + "\n")


def _sinks_in(names: set[str], output: Path) -> Iterator[Sink]:
    if "tensorboard" in names and (folder := _tensorboard_folder(output)) is not None:
        yield TensorBoard(folder)
    wandb: Any = sys.modules.get("wandb")
    if "wandb" in names and getattr(wandb, "run", None) is not None:
        yield WeightsAndBiases(run=wandb.run)
    context: Any = sys.modules.get("trackio.context_vars")
    running = context.current_run.get() if context is not None else None
    if "trackio" in names and running is not None:
        yield Trackio(run=running)


def _tensorboard_folder(output: Path) -> Path | None:
    """Return the folder that the Trainer's TensorBoard callback has just started to write to."""
    chosen = os.environ.get("TENSORBOARD_LOGGING_DIR")
    if chosen:
        return Path(chosen).expanduser()
    events = sorted(output.glob("runs/**/events.out.tfevents.*"), key=lambda path: path.stat().st_mtime)
    return events[-1].parent if events else None
