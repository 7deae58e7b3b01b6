"""Identities of a step: reference rules against torch's optimizers, samples, and everyday loops that stay silent."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from conserved.alarm import Alarm
from conserved.boundary import Boundary
from conserved.tracking.identities import StepIdentities, StepIdentity, TrainingStep
from conserved.tracking.identities.entry_samples import EntrySample
from conserved.tracking.identities.equal_replicas import reducing_processes
from conserved.tracking.identities.fingerprints import fingerprints
from conserved.tracking.identities.gradient_sizes import GradientSizes
from conserved.tracking.identities.reference_steps import rule_for
from conserved.tracking.identities.update_rule import UpdateRule

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.1),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "SGD, Nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, maximize=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "AdamW, tensor rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5, weight_decay=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, lr_decay=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
}


def _model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def _backward(model: nn.Module) -> Tensor:
    loss = F.cross_entropy(model(torch.randn(6, 5)), torch.randint(3, (6,)))
    loss.backward()
    return loss


def _watch(
    model: nn.Module, optimizer: Optimizer, steps: int, between: Callable[[int], None] = lambda number: None
) -> list[Alarm]:
    """Train with the identities alone, without laws."""
    identities = StepIdentities(model, model, [optimizer], Boundary(strict=True))
    alarms: list[Alarm] = []
    for number in range(1, steps + 1):
        optimizer.zero_grad()
        _backward(model)
        identities.before_optimizer(optimizer, closure=False)
        optimizer.step()
        between(number)
        identities.after_optimizer(optimizer)
        identities.after_step()
        alarms += identities.take_alarms()
    identities.close()
    return alarms


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_rule_is_that_of_its_optimizer(name: str) -> None:
    model = _model()
    optimizer = OPTIMIZERS[name](model.parameters())
    assert rule_for(optimizer) is not None
    assert _watch(model, optimizer, 6) == []


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_that_is_one_percent_too_long_is_not_the_rules(name: str) -> None:
    model = _model()
    optimizer = OPTIMIZERS[name](model.parameters())
    weight = model[2].weight
    before = [weight.detach().clone()]

    def lengthen(number: int) -> None:
        with torch.no_grad():
            if number == 4:
                weight.add_(0.01 * (weight - before[-1]))
            before.append(weight.detach().clone())

    alarms = _watch(model, optimizer, 5, lengthen)
    assert [(alarm.code, alarm.kind, alarm.tensor, alarm.step) for alarm in alarms] == [
        ("not the rule's", "update", "2.weight", 4)
    ]


def test_all_entries_of_a_large_tensor_have_their_turn() -> None:
    tensor = torch.arange(1000.0)
    samples = [EntrySample.of([tensor], number, entries=100) for number in range(20)]
    assert {int(value) for sample in samples for value in sample.read()} == set(range(1000))
    assert all(len(sample.read()) == sample.sizes[0] < 110 for sample in samples)


def test_a_sample_of_a_transposed_tensor_has_the_entries_of_a_contiguous_one() -> None:
    tensor = torch.randn(30, 40)
    sample = EntrySample.of([tensor], 3, entries=200)
    assert torch.equal(sample.read([tensor.t().contiguous().t()]), sample.read())


def test_fingerprints_see_one_bit_and_a_swap() -> None:
    tensor = torch.randn(5000)
    flipped, swapped = tensor.clone(), tensor.clone()
    flipped.view(torch.int32)[4321] ^= 1
    swapped[[10, 11]] = swapped[[11, 10]]
    first, second, third, again = fingerprints([tensor, flipped, swapped, tensor.clone()]).tolist()
    assert first == again
    assert len({first, second, third}) == 3


def test_an_identity_that_fails_is_turned_off_and_nothing_else() -> None:
    class Failing(StepIdentity):
        name = "failing"

        def before_optimizer(self, step: TrainingStep, optimizer: Optimizer) -> None:
            raise RuntimeError("as planned")

    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    boundary = Boundary(logs=False)
    identities = StepIdentities(model, model, [optimizer], boundary, [Failing(), UpdateRule()])
    _backward(model)
    identities.before_optimizer(optimizer, closure=False)
    assert boundary.off("identity of failing") is not None
    assert boundary.off("identity of updates") is None


def test_nothing_is_left_on_the_model() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    StepIdentities(model, model, [optimizer], Boundary(strict=True)).close()
    assert not model._forward_pre_hooks
    assert not model._load_state_dict_post_hooks
    assert not any(module._forward_hooks for module in model.modules())
    assert not any(parameter._backward_hooks for parameter in model.parameters())


def _clamp(model: Any) -> None:
    for p in model.parameters():
        p.data.clamp_(-0.2, 0.2)


def _swap_and_back(model: Any) -> None:
    saved = [p.detach().clone() for p in model.parameters()]
    for p, value in zip(model.parameters(), saved, strict=True):
        p.data.zero_()
        p.data.copy_(value)


def _load(model: Any) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


@pytest.mark.parametrize("act", [_clamp, _swap_and_back, _load], ids=lambda act: act.__name__)
def test_writes_that_loops_make_on_purpose_raise_no_alarm(act: Callable[[Any], None]) -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    identities = StepIdentities(model, model, [optimizer], Boundary(strict=True))
    for _ in range(4):
        optimizer.zero_grad()
        _backward(model)
        identities.before_optimizer(optimizer, closure=False)
        optimizer.step()
        identities.after_optimizer(optimizer)
        identities.after_step()
        act(model)
    identities.close()
    assert identities.take_alarms() == ()


def test_gradients_cleared_through_data_are_not_stale() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    identities = StepIdentities(model, model, [optimizer], Boundary(strict=True))
    for _ in range(3):
        _backward(model)
        identities.before_optimizer(optimizer, closure=False)
        optimizer.step()
        identities.after_optimizer(optimizer)
        identities.after_step()
        for p in model.parameters():
            p.grad.data.zero_()
    assert identities.take_alarms() == ()
    identities.close()


class _Costly(StepIdentity):
    name, free = "costly", False

    def __init__(self) -> None:
        self.asked = 0

    def before_optimizer(self, step: TrainingStep, optimizer: Optimizer) -> None:
        if step.thorough:
            self.asked += 1
            began = time.thread_time()
            while time.thread_time() < began + 0.005:
                pass


def test_costly_identities_are_asked_as_often_as_their_allowance_pays_for() -> None:
    model, costly = _model(), _Costly()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    identities = StepIdentities(model, model, [optimizer], Boundary(strict=True), [costly], allowance=lambda: 0.001)
    for _ in range(200):
        identities.before_optimizer(optimizer, closure=False)
        identities.after_step()
    # A tenth of a second at the start, then a millisecond a step.
    assert 20 <= costly.asked <= (0.1 + 0.2) / 0.005 + 1


def test_a_gradient_that_is_rounding_in_most_steps_has_no_usual_size() -> None:
    """Layer drop lets a norm cancel the gradient of a bias in some steps and not in others."""
    sizes = GradientSizes()
    names = ["inert", "weight", "other", "head"]
    for number in range(1, 21):
        usual = torch.tensor([1e-7, 3.0, 10.0, 5.0]) * (1 + 0.1 * (number % 3))
        assert not list(sizes._judge(names, usual.double(), number))
    assert not list(sizes._judge(names, torch.tensor([0.4, 3.0, 10.0, 5.0]).double(), 21))
    assert [one.tensor for one in sizes._judge(names, torch.tensor([1e-7, 900.0, 10.0, 5.0]).double(), 22)] == [
        "weight"
    ]


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), None])
def test_running_statistics_that_a_bad_batch_spoils_are_named(bad: float | None) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    model.register_buffer("mask", torch.full((3,), float("-inf")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    identities = StepIdentities(model, model, [optimizer], Boundary(strict=True))
    alarms: list[Alarm] = []
    for number in range(4):
        optimizer.zero_grad()
        x = torch.randn(6, 5)
        if number == 1 and bad is not None:
            # A gradient scaler makes no step with the gradients of such a batch.
            x[0, 0] = bad
            model(x)
            x = torch.randn(6, 5)
        F.cross_entropy(model(x), torch.randint(3, (6,))).backward()
        identities.before_optimizer(optimizer, closure=False)
        optimizer.step()
        identities.after_optimizer(optimizer)
        identities.after_step()
        alarms += identities.take_alarms()
    identities.close()
    found = [(alarm.code, alarm.laws) for alarm in alarms if alarm.code == "statistics"]
    assert found == ([] if bad is None else [("statistics", ("1.running_mean", "1.running_var"))])


def test_the_processes_that_a_wrapper_reduces_over_are_counted(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        assert reducing_processes(DistributedDataParallel(nn.Linear(2, 2))) == 1
        assert reducing_processes(nn.Linear(2, 2)) == 0
    finally:
        dist.destroy_process_group()
