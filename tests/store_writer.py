"""A training run that writes to a run store until it is killed, and goes on from its checkpoint when started again.

Arguments: store, run name, checkpoint, number of steps. Prints the number of every step that was handed to the store.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from conserved import Monitor
from training import decoder, exact_text_loss


def main(store: str, run: str, checkpoint: str, steps: int) -> None:
    """Train, saving a checkpoint every few steps."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = decoder().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    saved = Path(checkpoint)
    state = torch.load(saved, weights_only=True) if saved.exists() else None
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    monitor = Monitor(model, optimizer, every=1, sinks=store, run=run, where="layers.0.*")
    if state is not None:
        monitor.load_state_dict(state["monitor"])
    print("ready", flush=True)  # noqa: T201
    while monitor.count < steps:
        optimizer.zero_grad()
        exact_text_loss(model, monitor.count).backward()
        optimizer.step()
        monitor.step()
        monitor.flush()
        print(monitor.count, flush=True)  # noqa: T201
        if monitor.count % 3 == 0:
            fresh = saved.with_suffix(".new")
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "monitor": monitor.state_dict()},
                fresh,
            )
            os.replace(fresh, saved)
    monitor.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
