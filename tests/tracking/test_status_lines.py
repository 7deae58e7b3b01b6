"""A monitor says what it is doing: one line at the start, one at the end."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F

from conserved import Monitor
from error_programs import losses, runs, structures
from error_programs.case import CASES, Case
from harmless_programs import Decoder

PROGRAMS = (losses, runs, structures)
"""Modules with errors that are a matter of intent."""


def test_a_run_has_one_line_at_the_start_and_one_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="conserved")
    torch.manual_seed(0)
    model = Decoder(tied=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Monitor(model, optimizer) as monitor:
        for _ in range(3):
            tokens = torch.randint(13, (4, 8))
            optimizer.zero_grad()
            F.cross_entropy(model(tokens), tokens.flatten()).backward()
            optimizer.step()
            monitor.step()
        laws = len(monitor.laws)
    lines = [record.message for record in caplog.records if "steps" in record.message or "trains" in record.message]
    assert len(lines) == 2
    assert lines[0].startswith(f"conserved: watching {laws} laws, ")
    assert "trains 28 of 28 tensors, AdamW holds all" in lines[0]
    assert "tied: head.weight = embedding.weight" in lines[0]
    assert "weight decay on 18 norms and biases" in lines[0]
    assert lines[0].endswith("account as often as 5 % or 2 ms a step allow")
    assert lines[1].startswith("conserved: 3 steps, 3 audits, no alarms; took ")


def test_a_model_without_laws_says_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="conserved")
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.GELU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer)
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    monitor.step()
    assert [
        message
        for message in caplog.messages
        if message.startswith("conserved: not watched: ") and "trains 2 of 2" in message
    ]


INTENDED = [one for one in CASES if one.line]


@pytest.mark.parametrize("wrong", [True, False])
@pytest.mark.parametrize("case", INTENDED, ids=lambda case: case.name)
def test_the_lines_show_what_may_be_meant_or_not(case: Case, wrong: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="conserved")
    torch.manual_seed(0)
    case.program(wrong)
    assert any(case.line in message for message in caplog.messages) == wrong
