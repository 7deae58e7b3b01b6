"""Trains a small model with every optimizer and prints, as JSON, how well each ledger adds up.

Run as a program: the type checks that the tests put on every call would take most of the time.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from conserved import Monitor
from training import OPTIMIZERS, OptimizerCase, decoder, exact_text_loss, image_loss, train, vision

MODELS = {"decoder": (decoder, exact_text_loss), "vision": (vision, image_loss)}


def run(kind: str, case: OptimizerCase, steps: int) -> dict[str, Any]:
    """Everything relative to the size of the terms a law is made of."""
    torch.manual_seed(0)
    build, loss = MODELS[kind]
    model = build().double()
    optimizers = case.build(model)
    monitor = Monitor(model, optimizers, loss="cross_entropy")
    train(model, optimizers, loss, steps, after=lambda _: monitor.step())
    scales = {name: float(scale.abs().max()) for name, scale in monitor.reference.scales.items()}
    entries = monitor.ledger()
    last = [entry for entry in entries if entry.step == steps]
    return {
        "steps": steps,
        "entries": len(entries),
        "laws": len(monitor.laws),
        "residual": max(abs(entry.residual) / scales[entry.law] for entry in entries),
        "excess": max(entry.excess for entry in entries),
        "total": max(abs(entry.drift - entry.predicted) / scales[entry.law] for entry in last),
        "drift": max(abs(entry.drift) / scales[entry.law] for entry in last),
        "causes": sorted({cause for entry in entries for cause, amount in entry.causes.items() if amount}),
        "alarms": [alarm.message for alarm in monitor.alarms[:3]],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    steps = int(sys.argv[2])
    found = {case.name: run(sys.argv[1], case, steps // 5 if case.variant else steps) for case in OPTIMIZERS}
    json.dump(found, sys.stdout)
