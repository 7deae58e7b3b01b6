"""Errors that leave every identity of a step intact, and that a check sees when it is called."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import conserved
from error_programs.details import Mean
from error_programs.kernels import MeanOverAll
from error_programs.models import Decoder, tokens


class Pooled(nn.Module):
    """Averages tokens by a function of its own."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.embedding, self.a, self.b = nn.Embedding(23, 16), nn.Linear(16, 16), nn.Linear(16, 23)
        self.wrong = wrong

    def forward(self, x: Tensor) -> Tensor:
        return self.b(Mean.apply(self.a(self.embedding(x)).relu(), self.wrong))


def fused_loss(wrong: bool) -> tuple[nn.Module, Callable[[], Tensor]]:
    model = Decoder()
    x, y = tokens()
    y = y.clone()
    y[1:, 3:] = -100
    return model, lambda: MeanOverAll.apply(model(x).flatten(0, 1), y.flatten(), wrong)


def mean_of_tokens(wrong: bool) -> tuple[nn.Module, Callable[[], Tensor]]:
    model = Pooled(wrong)
    x, y = tokens()
    return model, lambda: F.cross_entropy(model(x), y[:, 0])


@pytest.mark.parametrize("program", [fused_loss, mean_of_tokens])
def test_a_gradient_of_wrong_size_is_seen_by_check_scale(
    program: Callable[[bool], tuple[nn.Module, Callable[[], Tensor]]],
) -> None:
    for wrong in (True, False):
        torch.manual_seed(0)
        model, loss = program(wrong)
        loss().backward()
        assert conserved.check_scale(model, loss).ok is not wrong
