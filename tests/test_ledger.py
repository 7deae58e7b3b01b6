"""The account of every step adds up: observed change = first order by cause + second order, to rounding."""

from __future__ import annotations

import pytest
import torch

from conserved import Monitor
from training import OPTIMIZERS, OptimizerCase, decoder, exact_text_loss, ids, image_loss, train, vision

STEPS = 500
MODELS = {"decoder": (decoder, exact_text_loss), "vision transformer": (vision, image_loss)}


def scale_of(monitor: Monitor) -> dict[str, float]:
    """The size of the terms each law is made of."""
    return {name: float(scale.abs().max()) for name, scale in monitor.reference.scales.items()}


@pytest.mark.slow
@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("case", OPTIMIZERS, ids=ids)
def test_the_ledger_adds_up_over_500_steps_in_float64(case: OptimizerCase, kind: str) -> None:
    build, loss = MODELS[kind]
    model = build().double()
    optimizers = case.build(model)
    monitor = Monitor(model, optimizers, loss="cross_entropy")
    train(model, optimizers, loss, STEPS, after=lambda _: monitor.step())
    scales = scale_of(monitor)
    entries = monitor.ledger()
    assert len(entries) == STEPS * len(monitor.laws)
    worst = max(abs(entry.residual) / scales[entry.law] for entry in entries)
    assert worst <= 1e-12, worst
    total = max(abs(entry.drift - entry.predicted) / scales[entry.law] for entry in monitor.ledger(step=STEPS))
    assert total <= 1e-12, total
    assert {cause for entry in entries for cause, amount in entry.causes.items() if amount} == case.causes
    assert not monitor.alarms
    moved = max(abs(entry.drift) / scales[entry.law] for entry in monitor.ledger(step=STEPS))
    assert moved > 1e-6, "a run in which nothing drifts shows nothing"
