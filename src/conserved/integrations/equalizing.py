"""Equalises what a transformers.Trainer trains, such as the factors of adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from conserved.optional import require
from conserved.transform.training import EqualizeEvery

if TYPE_CHECKING:
    from transformers import TrainerCallback
else:
    TrainerCallback = require("transformers", "EqualizeCallback").TrainerCallback


class EqualizeCallback(TrainerCallback):  # type: ignore[misc]
    """Equalises the model between steps: `Trainer(..., callbacks=[EqualizeCallback(every=100)])`.

    Args:
        every: number of steps from one equalisation to the next.
        **options: further arguments of `conserved.transform.EqualizeEvery`.
    """

    def __init__(self, every: int = 100, **options: Any) -> None:
        self.equalizer: EqualizeEvery | None = None
        self._options = {"every": every, **options}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the equaliser: the model and the optimizer are ready."""
        self.equalizer = EqualizeEvery(kwargs["model"], optimizer=_inner(kwargs["optimizer"]), **self._options)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Equalize if it is time: the optimizer has stepped."""
        if self.equalizer is not None:
            self.equalizer.step()


def _inner(optimizer: Any) -> Any:
    """Return the optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
