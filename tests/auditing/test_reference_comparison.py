"""Gradients beside those of the pass in reference form: rounding agrees, defects that no identity sees do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved import Monitor, MonitorConfig, audit, blocks
from conserved.auditing.gradient_peaks import PeakHistory
from conserved.auditing.reference_comparison import ReferenceComparison, compare_with_reference
from conserved.auditing.reference_form import round_at_random
from conserved.auditing.replay import ClosureReplay

HALF = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("narrow", HALF)
def test_rounding_at_random_has_the_number_itself_as_its_mean(narrow: torch.dtype) -> None:
    x = torch.tensor([1.001, -3.3, 1e-6, 0.0, 2.0]).repeat(40_000, 1)
    generator = torch.Generator().manual_seed(0)
    rounded = round_at_random(x, narrow, generator)
    assert torch.equal(rounded, rounded.to(narrow).float())
    spacing = torch.finfo(narrow).eps * x[0].abs().clamp_min(torch.finfo(narrow).smallest_normal)
    # The mean of 40,000 roundings has a deviation of at most spacing/2/√40,000.
    assert ((rounded.mean(0) - x[0]).abs() <= 5 * spacing / 2 / 200).all()
    assert torch.equal(rounded[:, 3:], x[:, 3:])


class WrongSiLU(torch.autograd.Function):
    """SiLU with the derivative of the sigmoid left out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        return gradients[0] * x.sigmoid()


class Reversed(torch.autograd.Function):
    """Gradient reversal."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return -gradients[0]


class StraightThrough(torch.autograd.Function):
    """Rounding whose gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


class Net(nn.Module):
    """A gated network behind an embedding, with a function of one's choice, dropout, and a router that selects."""

    def __init__(self, act: Callable[[Tensor], Tensor] = F.silu, drop: float = 0.0, routed: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.gate, self.up, self.down = (nn.Linear(32, 32, bias=False) for _ in range(3))
        self.router = nn.Linear(32, 4) if routed else None
        self.act, self.drop = act, drop

    def forward(self, x: Tensor) -> Tensor:
        # No law spans an embedding behind tanh.
        x = F.dropout(self.embed(x).tanh(), self.drop, self.training)
        h = self.act(self.gate(x)) * self.up(x)
        if self.router is not None:
            weights, index = torch.topk(self.router(x).softmax(-1), 2)
            h = h * torch.zeros_like(h[..., :4]).scatter(-1, index, weights).repeat_interleave(8, -1)
        return self.head(x + self.down(h))


def compared(model: nn.Module, dtype: torch.dtype) -> ReferenceComparison:
    model = model.to(dtype)
    tokens = torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(0))

    def closure() -> Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())

    return compare_with_reference(ClosureReplay(model, closure), dict(model.named_parameters()), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize(
    "options",
    [{}, {"drop": 0.3}, {"routed": True}, {"act": Reversed.apply}, {"act": StraightThrough.apply}],
    ids=["plain", "dropout", "routed", "reversed", "straight-through"],
)
def test_a_right_program_agrees_with_its_reference_form(options: dict[str, Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    result = compared(Net(**options), dtype)
    assert result.obstacle == ""
    assert result.ok, result.verdict.message
    assert result.coverage > 0.5
    # A wrong program would be further off by orders of magnitude: the limit is not ten times what is there.
    assert max(item.excess for item in result.differences) > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_the_derivative_of_a_gate_is_seen_and_its_function_blamed(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    result = compared(Net(WrongSiLU.apply), dtype)
    assert "gate.weight" in {item.parameter for item in result.failures}
    assert "up.weight" not in {item.parameter for item in result.failures}
    assert "autograd function" in result.cause


def test_functions_whose_backward_is_another_by_design_are_named() -> None:
    assert compared(Net(Reversed.apply), torch.float32).trusted == ("Reversed",)
    result = compared(Net(StraightThrough.apply), torch.float32)
    assert result.trusted == ("StraightThrough",)
    assert "with the backward of StraightThrough as it is" in result.verdict.message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["up.weight", "embed.weight"])
def test_one_row_of_a_gradient_that_is_not_that_of_the_pass_is_seen(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Net().to(dtype)
    tokens = torch.randint(64, (8, 17))

    def closure() -> Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())

    closure().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    replay, names = ClosureReplay(model, closure), dict(model.named_parameters())
    gradients = {key: p.grad for key, p in names.items() if p.grad is not None}
    assert compare_with_reference(replay, names, dtype, gradients=gradients).ok
    gradients[name][3] *= 1.02
    result = compare_with_reference(replay, names, dtype, gradients=gradients)
    assert [(item.parameter, item.row) for item in result.foreign] == [(name, 3)]


def test_a_factor_on_all_gradients_is_seen_by_the_loss() -> None:
    torch.manual_seed(0)
    model, x = blocks.DecoderLM(64, 32, 1, 4, 48, max_length=16), torch.randint(64, (2, 16))

    def closure() -> Tensor:
        return F.cross_entropy(model(x).flatten(0, 1), x.flatten())

    closure().backward()
    assert audit(model, closure=closure, reference=True).ok
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad *= 2
    result = audit(model, closure=closure, reference=True)
    assert result.scale is not None
    assert result.scale.factor == pytest.approx(2, abs=1e-3)
    assert "times the derivative of the loss" in result.verdict.message


def train(*, flip: int = 0, repair: bool = False) -> tuple[Monitor, dict[str, Tensor], nn.Module]:
    """Train for eight steps; at one of them an entry of the embedding's gradient, which no law spans, is corrupted."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer, audit=1, config=MonitorConfig(repair=repair, strict=True))
    for step in range(1, 9):
        tokens = torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(step))
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        assert model.embed.weight.grad is not None
        if step == flip:
            model.embed.weight.grad[5, 7] = 3 * model.embed.weight.grad.norm()
        optimizer.step()
        monitor.step(loss=loss)
        optimizer.zero_grad()
    monitor.close()
    return monitor, dict(model.state_dict()), model


def test_a_corrupted_entry_is_looked_up_in_the_replay_and_the_step_redone() -> None:
    clean, right, _ = train()
    assert clean.alarms == []
    monitor, wrong, _ = train(flip=6)
    assert [(alarm.kind, alarm.step, alarm.law) for alarm in monitor.alarms] == [("hardware", 6, "embed.weight")]
    assert "rank 0, cpu" in monitor.alarms[0].message
    assert not torch.allclose(wrong["embed.weight"], right["embed.weight"], atol=1e-4)
    repaired, mended, _ = train(flip=6, repair=True)
    assert [alarm.kind for alarm in repaired.alarms] == ["hardware"]
    assert all(torch.allclose(mended[name], right[name], atol=1e-6) for name in right)


@pytest.mark.parametrize("value", [30.0, 1e30])
def test_an_entry_that_the_replay_does_not_have_is_corrupted_however_large(value: float) -> None:
    history, scale = PeakHistory(), torch.rand(16, 16, generator=torch.Generator().manual_seed(0))
    weight, other = nn.Parameter(torch.ones(16, 16)), nn.Parameter(torch.ones(3))
    replay = ClosureReplay(nn.ParameterList([weight, other]), lambda: (weight * scale).sum() + other.sum())
    parameters = {"w": weight, "o": other}
    for _ in range(4):
        assert history.corrupted(parameters, {"w": scale.clone(), "o": torch.ones(3)}, replay) == ()
    wrong = scale.clone()
    wrong[1, 2] = value
    (result,) = history.corrupted(parameters, {"w": wrong, "o": torch.ones(3)}, replay)
    assert (result.parameter, result.index) == ("w", (1, 2))
    assert result.replayed == pytest.approx(float(scale[1, 2]), rel=1e-5)


def test_an_entry_that_sticks_out_in_the_replay_too_is_not_corrupted() -> None:
    history = PeakHistory()
    weight = nn.Parameter(torch.ones(4, 4))
    scale = torch.ones(4, 4)
    replay = ClosureReplay(nn.ParameterList([weight]), lambda: (weight * scale).sum())
    for _ in range(4):
        assert history.corrupted({"w": weight}, {"w": scale.clone()}, replay) == ()
    scale[1, 2] = 100.0
    assert history.corrupted({"w": weight}, {"w": scale.clone()}, replay) == ()


def test_entries_that_were_clipped_by_value_are_not_corrupted() -> None:
    history, scale = PeakHistory(), torch.rand(16, 16, generator=torch.Generator().manual_seed(0))
    weight, other = nn.Parameter(torch.ones(16, 16)), nn.Parameter(torch.ones(3))
    replay = ClosureReplay(nn.ParameterList([weight, other]), lambda: (weight * scale).sum() + 50 * other.sum())
    parameters = {"w": weight, "o": other}
    for _ in range(4):
        assert history.corrupted(parameters, {"w": scale.clone(), "o": 50 * torch.ones(3)}, replay) == ()
    # The other gradient is clipped to a fiftieth, which is no factor of this one.
    scale[1, 2] = 10.0
    clipped = {"w": scale.clamp(max=5.0), "o": torch.full((3,), 5.0)}
    assert history.corrupted(parameters, clipped, replay) == ()
