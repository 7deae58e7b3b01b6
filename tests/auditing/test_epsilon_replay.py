"""Laws up to a norm's ε in a pass that can be run again: what ε leaves is measured, and the law held to rounding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved import audit, recognize
from conserved.auditing.diagnosis import Origin
from conserved.verdict import Status


class Stream(nn.Module):
    """A residual stream whose embedding is so small that norms divide by their ε."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(16, eps=1e-5) for _ in range(3))
        self.ups, self.downs = (nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(2)) for _ in range(2))
        with torch.no_grad():
            for part in (self.embed, *self.downs):
                part.weight.mul_(size)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=False):
            x = x + down(F.gelu(up(norm(x))))
        return self.head(self.norms[2](x))


def passed(dtype: torch.dtype) -> tuple[Stream, Callable[[], Tensor]]:
    torch.manual_seed(0)
    model, x = Stream(3e-3).to(dtype), torch.randint(32, (4, 12))

    def loss() -> Tensor:
        return F.cross_entropy(model(x[:, :-1]).flatten(0, 1).float(), x[:, 1:].flatten())

    loss().backward()
    return model, loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_law_beyond_the_root_of_epsilon_is_decided_by_a_replay(dtype: torch.dtype) -> None:
    model, loss = passed(dtype)
    laws = recognize(model, torch.zeros(1, 12, dtype=torch.long))
    (name,) = (symmetry.name for symmetry in laws if not symmetry.exact and "stream" in symmetry.family)
    alone, replayed = audit(model, laws), audit(model, laws, closure=loss)
    assert alone.verdict.status is Status.INCONCLUSIVE
    assert name in {row.name for row in alone.left_open}
    assert replayed.verdict.status is Status.VERIFIED, replayed.verdict.message
    assert replayed.diagnoses[name].origin is Origin.ROUNDING
    # A factor on all gradients, as clipping leaves, does not matter.
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert audit(model, laws, closure=loss).verdict.status is Status.VERIFIED


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_gradient_of_the_embedding_is_refuted_where_epsilon_is_large(dtype: torch.dtype) -> None:
    model, loss = passed(dtype)
    laws = recognize(model, torch.zeros(1, 12, dtype=torch.long))
    assert model.embed.weight.grad is not None
    model.embed.weight.grad *= 1.5
    result = audit(model, laws, closure=loss)
    assert [row.family for row in result.failures] == ["stream_scale"]
    assert "not reproducible" in result.failures[0].suggests[0]


def test_a_wrong_input_gradient_of_a_norm_is_a_defect_of_the_program() -> None:
    model, loss = passed(torch.float32)
    laws = recognize(model, torch.zeros(1, 12, dtype=torch.long))
    model.norms[2].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 1.3,))  # type: ignore[index]
    model.zero_grad()
    loss().backward()
    result = audit(model, laws, closure=loss)
    assert {row.family for row in result.failures} >= {"stream_scale"}
    assert result.diagnoses[result.failures[0].name].origin is Origin.PROGRAM
