"""Processes that test laws together test those that all of them have read."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

from conserved import recognize
from conserved.laws import LawSet
from conserved.rank_agreement import RankAgreement
from conserved.tracking.process_laws import NOT_SHARED, shared_laws


class Answers(RankAgreement):
    """An agreement in which another process has said something else."""

    def __init__(self, other: Sequence[str]) -> None:
        self.other = list(other)
        self.asked = 0

    def combine(self, topic: str, text: str, by: Callable[[Sequence[str]], str]) -> str:
        self.asked += 1
        return by([text, self.other.pop(0)])


def spoken(laws: LawSet) -> list[str]:
    """What a process with these laws says in both rounds."""
    output: list[str] = []

    class Listening(Answers):
        def combine(self, topic: str, text: str, by: Callable[[Sequence[str]], str]) -> str:
            output.append(text)
            first = len(output) == 1
            return "different" if first else by([text])

    shared_laws(laws, Listening([]))
    return output


@pytest.fixture
def laws() -> LawSet:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4), nn.RMSNorm(4), nn.Linear(4, 3, bias=False))
    return recognize(model, torch.randn(2, 4))


def test_a_law_that_another_process_did_not_read_is_left_out(laws: LawSet) -> None:
    fewer = replace(laws, symmetries=laws.symmetries[1:])
    agreement = Answers(spoken(fewer))
    rest = shared_laws(laws, agreement)
    assert rest.names == fewer.names
    assert [(item.name, item.reason) for item in rest.dropped if item.reason == NOT_SHARED] == [
        (laws.names[0], NOT_SHARED)
    ]


def test_laws_that_all_have_stay_and_one_message_says_so(laws: LawSet) -> None:
    agreement = Answers(spoken(laws))
    assert shared_laws(laws, agreement) is laws
    assert agreement.asked == 1


def test_laws_of_another_stage_are_not_compared(laws: LawSet) -> None:
    text = spoken(replace(laws, symmetries=()))
    parameters, names = json.loads(text[1])
    agreement = Answers([text[0].replace(parameters, "stage"), json.dumps(["stage", names])])
    assert shared_laws(laws, agreement).names == laws.names
