"""Watches the laws of a model in a Lightning run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from conserved.inference import recognize
from conserved.integrations.reporting import print_alarms
from conserved.laws import LawSet
from conserved.optional import require
from conserved.tracking import Monitor, MonitorConfig, Sink

if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:
    Callback = require("lightning.pytorch", "LightningConservation").Callback


def _never_called(module: Any) -> bool:
    """Return whether a Lightning module has no forward pass of its own."""
    base = require("lightning.pytorch", "LightningConservation").LightningModule
    return bool(type(module).forward is base.forward)


@contextmanager
def _silent(module: Any) -> Iterator[None]:
    """Silence the logging of a Lightning module while laws are read off its training step."""
    former = {name: vars(module).get(name) for name in ("log", "log_dict")}
    for name in former:
        object.__setattr__(module, name, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                object.__delattr__(module, name)
            else:
                object.__setattr__(module, name, value)


class LightningConservation(Callback):
    """`lightning.Trainer(callbacks=[LightningConservation()])`, with automatic optimization.

    Gradients are audited before the optimizers use them, and clipping by value is distinguished from a wrong gradient.
    References are part of Lightning's checkpoints.

    Args:
        laws: the laws to watch; by default they are inferred at the first forward pass, or from the training step of a
            module that has no forward pass of its own.
        sinks: where records go: sinks, or paths of stores; by default `conserved.db` in the default root folder.
        log: whether the scalars of every record also go to the Trainer's own loggers.
        **options: further arguments of `conserved.Monitor`.
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
        """Start watching. Lightning calls this once the model and the optimizers are ready or restored."""
        mixed = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(str(trainer.precision))
        config = (self._options.get("config") or MonitorConfig()).under(mixed)
        self.monitor = Monitor(
            pl_module,
            trainer.optimizers,
            self._laws,
            sinks=Path(trainer.default_root_dir) / "conserved.db" if self._sinks is None else self._sinks,
            **self._options | {"config": config},
        )
        if self._restored is not None:
            self.monitor.load_state_dict(self._restored)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Infer the laws of a module that has no forward pass of its own from its training step on the first batch."""
        if self.monitor is None or not self.monitor.waiting or not _never_called(pl_module):
            return
        with _silent(pl_module):
            laws = recognize(lambda: pl_module.training_step(batch, batch_idx), pl_module)
        self.monitor.watch(laws)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Audit the gradients, which a closure has just computed, and note them before they are clipped by value."""
        if self.monitor is not None:
            self.monitor.look_at_gradients()
        if self.monitor is not None and trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
            self.monitor.before_clipping()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Account for the step: gradients are cleared at the beginning of the next batch only."""
        if self.monitor is None or not self.monitor.pending:
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self.monitor.step(loss=loss if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None)
        if self._log and self.monitor.records:
            scalars = self.monitor.records[-1].scalars()
            for logger in trainer.loggers:
                logger.log_metrics({f"conserved/{name}": value for name, value in scalars.items()}, self.monitor.count)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write everything, and print the summary if there were alarms; `monitor` stays open to questions."""
        if self.monitor is not None:
            self.monitor.close()
            print_alarms(self.monitor, trainer.is_global_zero)

    def state_dict(self) -> dict[str, Any]:
        """Return the monitor's state, for Lightning's checkpoints."""
        return {} if self.monitor is None else self.monitor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state from a checkpoint of Lightning until training starts.

        Args:
            state_dict: the result of `state_dict` of the earlier run.
        """
        self._restored = state_dict or None
