"""The account of every step adds up: observed change = first order by cause + second order, to rounding."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from training import OPTIMIZERS

STEPS = 500
ADDS_UP = 1e-12
"""|observed − accounted| over the size of a law's terms, in float64."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["decoder", "vision"])
def test_the_ledger_adds_up_over_500_steps_of_every_optimizer(kind: str) -> None:
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, str(here / "ledger_run.py"), kind, str(STEPS)], capture_output=True, text=True, check=True
    )
    runs = json.loads(done.stdout)
    assert list(runs) == [case.name for case in OPTIMIZERS]
    for case in OPTIMIZERS:
        found = runs[case.name]
        assert found["entries"] == STEPS * found["laws"], case.name
        assert found["residual"] <= ADDS_UP, (case.name, found["residual"])
        assert found["total"] <= ADDS_UP, (case.name, found["total"])
        assert found["excess"] <= 1, (case.name, found["excess"])
        assert set(found["causes"]) == case.causes, case.name
        assert not found["alarms"], (case.name, found["alarms"])
        assert found["drift"] > 1e-5, f"{case.name}: a run in which nothing drifts shows nothing"
