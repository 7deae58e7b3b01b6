"""Watches the laws of a model in a Lightning run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from conserved.laws import LawSet
from conserved.optional import require
from conserved.track import Monitor, Sink

if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:
    Callback = require("lightning.pytorch", "LightningConservation").Callback


class LightningConservation(Callback):
    """`lightning.Trainer(callbacks=[LightningConservation()])`, with automatic optimization.

    Records go to `conserved.db` in the default root folder unless `sinks` says otherwise, and equation (10) by block to
    the Trainer's own loggers. References are part of Lightning's checkpoints. Clipping is told apart from a wrong
    gradient. Other options are those of `conserved.Monitor`.
    """

    def __init__(
        self,
        laws: LawSet | None = None,
        *,
        sinks: Iterable[Sink | str | Path] | Sink | str | Path | None = None,
        log: bool = True,
        **options: Any,
    ) -> None:
        self.monitor: Monitor | None = None
        self._laws, self._sinks, self._log, self._options = laws, sinks, log, options
        self._restored: dict[str, Any] | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The model and the optimizers are ready, and restored if training resumes."""
        mixed = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(str(trainer.precision))
        self.monitor = Monitor(
            pl_module,
            trainer.optimizers,
            self._laws,
            sinks=Path(trainer.default_root_dir) / "conserved.db" if self._sinks is None else self._sinks,
            **({"precision": mixed} | self._options),
        )
        if self._restored is not None:
            self.monitor.load_state_dict(self._restored)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Gradients are complete and not yet clipped."""
        if self.monitor is not None and trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
            self.monitor.before_clipping()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Gradients are cleared at the beginning of the next batch only."""
        if self.monitor is None or not self.monitor.pending:
            return
        self.monitor.step()
        if self._log and self.monitor.records:
            scalars = self.monitor.records[-1].scalars()
            for logger in trainer.loggers:
                logger.log_metrics({f"conserved/{name}": value for name, value in scalars.items()}, self.monitor.count)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Everything is written; the monitor stays to be asked."""
        if self.monitor is not None:
            self.monitor.close()

    def state_dict(self) -> dict[str, Any]:
        """For Lightning's checkpoints."""
        return {} if self.monitor is None else self.monitor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From Lightning's checkpoints, before training starts."""
        self._restored = state_dict or None
