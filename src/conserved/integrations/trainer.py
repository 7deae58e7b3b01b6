"""Watches the laws of a model in a transformers.Trainer run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from conserved.integrations.reporting import print_alarms, sinks_of
from conserved.laws import LawSet
from conserved.optional import require
from conserved.store import open_sink
from conserved.tracking import Monitor, MonitorConfig, Sink

if TYPE_CHECKING:
    from transformers import TrainerCallback
else:
    TrainerCallback = require("transformers", "ConservationCallback").TrainerCallback

STATE = "conservation.pt"
"""Beside the Trainer's own files in every checkpoint."""


class ConservationCallback(TrainerCallback):  # type: ignore[misc]
    """`Trainer(..., callbacks=[ConservationCallback()])`.

    Gradients are audited before the optimizer uses them, and laws are watched after its step. References are saved in
    every checkpoint and read again when training resumes from one. The precision of autocast is read from the training
    arguments.

    Args:
        laws: the laws to watch; by default they are inferred at the first forward pass.
        sinks: where records go: sinks, or paths of stores; by default `conserved.db` in the output folder.
        report: whether records also go where the Trainer itself reports (`report_to`: TensorBoard, Weights & Biases,
            trackio), alarms as alerts.
        **options: further arguments of `conserved.Monitor`, such as `stop=True`, which ends the run before a wrong
            step.
    """

    def __init__(
        self,
        laws: LawSet | None = None,
        *,
        sinks: Iterable[Sink | str | Path] | Sink | str | Path | None = None,
        report: bool = True,
        **options: Any,
    ) -> None:
        self.monitor: Monitor | None = None
        self._laws, self._sinks, self._report, self._options = laws, sinks, report, options

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to watch: the model and the optimizer are ready, and restored if training resumes."""
        precision = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
        folder = Path(args.output_dir)
        config = (self._options.get("config") or MonitorConfig()).under(precision)
        options: dict[str, Any] = {"run": args.run_name or folder.name} | self._options | {"config": config}
        own = [folder / "conserved.db"] if self._sinks is None else open_sink(self._sinks)
        reported = sinks_of(args) if self._report and state.is_world_process_zero else []
        self.monitor = Monitor(kwargs["model"], kwargs["optimizer"], self._laws, sinks=[*own, *reported], **options)
        saved = folder / f"checkpoint-{state.global_step}" / STATE
        if state.global_step and saved.exists():
            self.monitor.load_state_dict(torch.load(saved, weights_only=True))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Account for the step: the optimizer has stepped and gradients are still there."""
        if self.monitor is not None:
            self.monitor.step()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the loss that the Trainer logs beside the account."""
        loss = (kwargs.get("logs") or {}).get("loss")
        if self.monitor is not None and isinstance(loss, int | float):
            self.monitor.note(loss=float(loss))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the monitor's state in the checkpoint that has been written."""
        if self.monitor is not None and state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            if folder.is_dir():
                torch.save(self.monitor.state_dict(), folder / STATE)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write everything, and print the summary if there were alarms; `monitor` stays open to questions."""
        if self.monitor is not None:
            self.monitor.close()
            print_alarms(self.monitor, state.is_world_process_zero)
