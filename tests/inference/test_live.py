"""Laws of models in use: inferred from the first inputs that come, once, and again when the model has changed."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import conserved
from conserved.inference import FirstCall, laws_of_model, live
from conserved.testing import assert_gradients_conserve


class Pair(nn.Module):
    """Takes two inputs, one of them by name, so that nothing about its call can be guessed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        return self.down((self.up(x) * scale[:, None]).relu())


def call() -> tuple[Tensor, Tensor]:
    return torch.randn(5, 3), torch.rand(5)


def loss_of(model: nn.Module) -> Tensor:
    x, scale = call()
    return model(x, scale=scale).sin().sum()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often laws were inferred."""
    result: list[int] = []
    plain = conserved.recognize

    def counting(*args: object, **kwargs: object) -> conserved.LawSet:
        result.append(1)
        return plain(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(live, "recognize", counting)
    return result


class TestFirstCall:
    def test_laws_follow_from_the_inputs_that_came(self) -> None:
        model = Pair()
        first = FirstCall(model)
        loss_of(model)
        assert [law.name for law in first.laws()] == ["neurons"]

    def test_calls_without_gradients_are_not_those_of_training(self) -> None:
        model = Pair()
        first = FirstCall(model)
        with torch.no_grad():
            loss_of(model)
        assert first.call is None

    def test_one_call_is_remembered_without_its_graph(self) -> None:
        model = Pair()
        first = FirstCall(model)
        x = torch.randn(5, 3, requires_grad=True)
        model(2 * x, scale=torch.rand(5))
        model(torch.randn(7, 3), scale=torch.rand(7))
        assert first.call is not None
        (seen,), named = first.call
        assert (seen.shape, seen.requires_grad, set(named)) == ((5, 3), False, {"scale"})
        first.close()
        assert first.call is None

    def test_a_call_that_is_made_to_infer_laws_is_not_taken_for_one_of_training(self) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        first = FirstCall(model)
        conserved.recognize(model, torch.randn(7, 3))
        assert first.call is None
        model(torch.randn(5, 3))
        assert first.call is not None

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "file"])
    def test_copies_of_a_waiting_model_wait_for_nothing(self, copied: Callable[[nn.Module], nn.Module]) -> None:
        model = Pair()
        first = FirstCall(model)
        loss_of(copied(model))
        assert first.call is None


class TestAudit:
    def test_a_model_whose_inputs_cannot_be_guessed_asks_for_laws(self) -> None:
        model = Pair()
        loss_of(model).backward()
        with pytest.raises(ValueError, match=r"Pass laws=conserved\.recognize\(model, x\)"):
            conserved.audit(model)
        x, scale = call()
        assert conserved.audit(model, conserved.recognize(model, x, scale=scale)).ok

    def test_the_hook_infers_from_the_first_batch_and_sees_a_wrong_gradient(self) -> None:
        model = Pair()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        watch = conserved.AuditHook(model, optimizer, every=1)
        loss_of(model).backward()
        optimizer.step()
        assert watch.last is not None
        assert watch.last.ok
        loss_of(model).backward()
        gradient = model.up.weight.grad
        assert gradient is not None
        gradient *= 1.5
        with pytest.raises(conserved.GradientsDoNotConserveError):
            optimizer.step()
        watch.remove()

    def test_a_test_suite_need_not_say_how_the_model_is_called(self) -> None:
        model = Pair()
        assert assert_gradients_conserve(model, lambda: loss_of(model)).ok

    def test_audits_in_a_loop_infer_once(self, counted: list[int]) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        model(torch.randn(5, 3)).sum().backward()
        for _ in range(3):
            conserved.audit(model)
        assert counted == [1]


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "frozen": lambda model: model[0].weight.requires_grad_(False),
    "added": lambda model: model.append(nn.Linear(3, 2)),
    "removed": lambda model: model.pop(4),
    "replaced": lambda model: setattr(model[0], "weight", nn.Parameter(torch.randn(3, 3))),
    "tied": lambda model: setattr(model[2], "weight", model[0].weight),
    "mode": lambda model: model.eval(),
    "forward": lambda model: setattr(model[1], "forward", torch.tanh),
    "another forward": lambda model: setattr(model[3], "forward", torch.sigmoid),
    "its class's forward": lambda model: delattr(model[3], "forward"),
    "a module in a module without any": lambda model: model[0].add_module("inside", nn.Linear(2, 2)),
    "a parameter in a module without any": lambda model: setattr(model[1], "slope", nn.Parameter(torch.ones(3))),
    "a module without parameters": lambda model: setattr(model, "1", nn.Tanh()),
    "another class": lambda model: setattr(model[1], "__class__", nn.Sigmoid),
    "a bias": lambda model: setattr(model[4], "bias", nn.Parameter(torch.zeros(3))),
    "no bias": lambda model: setattr(model[2], "bias", None),
    "other parameters at once": lambda model: model[0].__dict__.update(_parameters=dict(nn.Linear(3, 3)._parameters)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_read_again(change: str, counted: list[int]) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3, bias=False))
    model[3].forward = torch.tanh
    laws_of_model(model)
    CHANGES[change](model)
    laws_of_model(model)
    laws_of_model(model)
    assert counted == [1, 1]


def test_kept_laws_go_with_their_model() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    laws_of_model(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("audited", [True, False], ids=["audited", "new"])
def test_a_file_of_an_audited_model_loads_wherever_one_of_a_new_model_does(audited: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    if audited:
        model(torch.randn(5, 3)).sum().backward()
        assert conserved.audit(model).tested
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.ReLU]):
        loaded = torch.load(file, weights_only=True)
    loaded(torch.randn(5, 3)).sum().backward()
    assert conserved.audit(loaded).tested
    assert len(laws_of_model(copy.deepcopy(loaded))) == len(laws_of_model(model))


class TestMonitor:
    def trained(self, model: nn.Module, steps: int = 3) -> conserved.Monitor:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = conserved.Monitor(model, optimizer)
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
            monitor.step()
        return monitor

    def test_it_needs_no_word_about_the_architecture(self) -> None:
        monitor = self.trained(Pair())
        assert [law.name for law in monitor.laws] == ["neurons"]
        assert len(monitor.ledger()) == 3
        assert not monitor.alarms

    def test_asked_before_any_call_it_says_what_is_missing(self) -> None:
        model = Pair()
        monitor = conserved.Monitor(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(ValueError, match="Expected laws or a first call"):
            monitor.errors()

    def test_the_reference_is_taken_before_the_first_step(self) -> None:
        model = Pair()
        before = model.up.weight.detach().clone()
        law = before.square().sum(1) + model.up.bias.detach() ** 2 - model.down.weight.detach().square().sum(0)
        monitor = self.trained(model)
        assert torch.allclose(monitor.reference.values["neurons"], law)

    def test_a_run_that_was_saved_goes_on_with_its_reference(self) -> None:
        model = Pair()
        saved = self.trained(model).state_dict()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = conserved.Monitor(model, optimizer)
        monitor.load_state_dict(saved)
        loss_of(model)
        assert monitor.count == 3
        assert torch.equal(monitor.reference.values["neurons"], saved["reference"]["values"]["neurons"])

    def test_closing_an_unused_monitor_leaves_nothing_behind(self) -> None:
        model = Pair()
        with conserved.Monitor(model, torch.optim.SGD(model.parameters(), lr=0.1)):
            pass
        assert not model._forward_pre_hooks
