"""Programs that were written before the monitor saw them: none ends, none is accused, every loss stays bit for bit."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import blind_programs
import blind_programs_2
import blind_programs_3
import blind_programs_4
import blind_programs_5
from conserved import Monitor

pytestmark = pytest.mark.usefixtures("as_users_run_it")

PROGRAMS = blind_programs.PROGRAMS | blind_programs_2.PROGRAMS | blind_programs_3.PROGRAMS | blind_programs_4.PROGRAMS

MENDED = {
    "moco with queue": 10, "teacher that follows in forward": 10, "dino with centering": 10,
    "pcgrad on shared trunk": 10, "layer outputs penalised by hooks": 8, "matrix factorisation with bpr": 8,
    "annealed gradient noise": 10, "stateful rnn language model with tied weights": 4,
    "inverse problem with learned coefficient": 4, "progressive growing with fade in": 20,
    "rotation pretext then finetuning with new head": 22,
    "elastic weight consolidation between tasks": 24,
    "tensor hooks that scale gradients of a layer": 4, "folds that reset parameters and optimizer state": 16,
    "embeddings frozen for special tokens by zeroing gradients": 4, "layer drop that scales with depth": 8,
    "decoupled rates by multiplying gradients of biases": 4, "sparse training that drops and grows": 14,
    "population that exploits and explores": 34, "ternary weights with latent clipping": 34,
    "extragradient for a game": 4, "adam with skipped outlier updates": 8, "dropped modalities": 6,
}  # fmt: skip
"""Programs that raised an alarm or were changed when they were first watched, and the steps in which they would."""

LAST = {"kronecker factors by hooks": 4, "control variates of clients": 6, "delayed gradients of a pipeline": 18}
"""Programs of the last batch that raised an alarm or were changed at first sight, and the steps in which they would."""


def cast_to_half() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def trained(name: str, cast: blind_programs.Cast, steps: int, *, watched: bool) -> tuple[list[Tensor], list[str]]:
    """Run a program; return its losses and, last, its weights, and the alarms of the monitor."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    training = (PROGRAMS | blind_programs_5.PROGRAMS)[name](cast)
    monitor = Monitor(training.model, training.optimizers) if watched else None
    losses = []
    for _ in range(steps):
        losses.append(training.step().clone())
        if monitor is not None:
            monitor.step(loss=losses[-1])
    if monitor is not None:
        monitor.close()
    alarms = [] if monitor is None else [str(alarm) for alarm in monitor.alarms]
    return [*losses, *(p.detach().clone() for p in training.model.parameters())], alarms


def check_left_alone(name: str, cast: blind_programs.Cast, steps: int) -> None:
    plain, _ = trained(name, cast, steps, watched=False)
    result, alarms = trained(name, cast, steps, watched=True)
    assert all(map(torch.equal, plain, result))
    assert alarms == []


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("cast", [nullcontext, cast_to_half])
@pytest.mark.parametrize("name", MENDED | LAST)
def test_a_program_that_was_accused_once_is_left_alone(name: str, cast: blind_programs.Cast) -> None:
    check_left_alone(name, cast, (MENDED | LAST)[name])


@pytest.mark.parametrize("name", random.Random(1).sample(sorted(set(PROGRAMS) - set(MENDED)), 10))
def test_other_programs_are_left_alone(name: str) -> None:
    check_left_alone(name, nullcontext, 10)
