"""The monitor: its numbers against naive ones, what it watches, and how it is used wrongly."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conserved import Monitor, MonitorConfig, Symmetry, blocks, recognize
from conserved.moment import Direction, Point
from conserved.store.step_record import By
from conserved.tracking import (
    GENERIC,
    Entry,
    ParameterStep,
    Update,
    optimizer_rules,
    register_rule,
    rule_of,
)
from conserved.tracking.combination import Combination
from conserved.tracking.optimizer_rules import Rule
from told import told
from training import (
    OPTIMIZERS,
    OptimizerCase,
    decoder,
    exact_text_loss,
    ids,
    image_loss,
    muon_and_adamw,
    stepping,
    text_loss,
    train,
    vision,
)

BY: tuple[By, ...] = ("block", "layer", "family", "law")


def heavy_ball(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **({"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01} | options))


def first_order(symmetry: Symmetry, theta: dict[str, Tensor], part: dict[str, Tensor]) -> Tensor:
    """−μ(θ, P) − μ(P, θ), term by term as the definition has it."""
    forward, mirror = symmetry.moment_map(theta, part), symmetry.moment_map(Direction(part), Point(theta))
    return symmetry.kind.conserved(-forward - mirror)


def test_every_part_of_the_account_is_what_the_moment_map_of_kept_tensors_says() -> None:
    model = decoder(positions="none").double()
    optimizer = heavy_ball(model)
    monitor = Monitor(model, optimizer, loss="cross_entropy")
    train(model, optimizer, exact_text_loss, 3, after=lambda _: monitor.step())
    names = dict(model.named_parameters())
    before = {name: p.detach().clone() for name, p in names.items()}
    buffers = {name: optimizer.state[p]["momentum_buffer"].clone() for name, p in names.items()}
    train(model, optimizer, exact_text_loss, 1, after=lambda _: monitor.step())
    decay = {name: 0.05 * 0.01 * value for name, value in before.items()}
    momentum = {name: 0.05 * 0.9 * value for name, value in buffers.items()}
    updates = {name: before[name] - p.detach() for name, p in names.items()}
    for symmetry in monitor.laws:
        (entry,) = monitor.ledger(law=symmetry.name, step=4)
        observed = symmetry.law({n: p.detach() for n, p in names.items()}) - symmetry.law(before)
        at = observed.abs().flatten().argmax()
        scale = float(monitor.reference.scales[symmetry.name].abs().max())
        second = symmetry.kind.conserved(symmetry.moment_map(Direction(updates), Direction(updates)))
        for result, expected in (
            (entry.observed, observed),
            (entry.second_order, second),
            (entry.causes["decay"], first_order(symmetry, before, decay)),
            (entry.causes["momentum"], first_order(symmetry, before, momentum)),
        ):
            assert result == pytest.approx(float(expected.flatten()[at]), abs=1e-13 * scale), symmetry.name
        assert entry.observed == pytest.approx(
            entry.first_order + entry.second_order + entry.residual, rel=1e-12, abs=1e-16 * scale
        )


@pytest.mark.parametrize("case", OPTIMIZERS, ids=ids)
def test_the_generic_rule_finds_the_same_totals(case: OptimizerCase) -> None:
    accounts = []
    for rule in (None, GENERIC):
        torch.manual_seed(0)
        model = decoder().double()
        optimizers = case.build(model)
        monitor = Monitor(model, optimizers, config=MonitorConfig(rule=rule))
        train(model, optimizers, exact_text_loss, 4, after=stepping(monitor))
        accounts.append(monitor.ledger())
    for known, generic in zip(*accounts, strict=True):
        assert known.second_order == pytest.approx(generic.second_order, rel=1e-6, abs=1e-15)
        assert known.first_order == pytest.approx(generic.first_order, rel=1e-6, abs=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", OPTIMIZERS, ids=ids)
def test_rounding_explains_the_residual_in_low_precision(
    case: OptimizerCase, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    steps = 25 if request.config.getoption("--whole") else 10
    model = decoder().to(dtype)
    optimizers = case.build(model)
    monitor = Monitor(model, optimizers, loss="cross_entropy")
    train(model, optimizers, text_loss, steps, after=lambda _: monitor.step())
    assert max(entry.excess for entry in monitor.ledger()) <= 1
    assert monitor.alarms == []


def test_errors_of_every_step_are_those_of_the_law_set() -> None:
    model = vision().double()
    optimizer = heavy_ball(model)
    monitor = Monitor(model, optimizer)
    for by in BY:
        train(model, optimizer, image_loss, 2, after=lambda _: monitor.step())
        monitor.flush()
        expected = monitor.errors(by=by)
        assert monitor.records[-1].errors(by) == pytest.approx(expected, rel=1e-9)
        assert max(expected.values()) > 0


def test_errors_by_layer_average_over_the_blocks_of_a_layer() -> None:
    model = blocks.DecoderLM(11, 8, 2, 2, 6, max_length=6).double()
    optimizer = heavy_ball(model)
    monitor = Monitor(model, optimizer)
    train(model, optimizer, exact_text_loss, 2, after=stepping(monitor))
    errors = monitor.errors(by="layer")
    assert set(errors) == {"layers.0", "layers.1", "norm", ""}
    first = [law for law in monitor.laws if law.block.startswith("layers.0")]
    by_law = monitor.errors(by="law")
    units = {law.name: 1 if law.kind.together else law.numbers for law in first}
    expected = sum(by_law[name] * count for name, count in units.items()) / sum(units.values())
    assert errors["layers.0"] == pytest.approx(expected)


def test_a_copy_of_the_model_is_measured_against_the_same_reference() -> None:
    model = decoder().double()
    optimizer = heavy_ball(model)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    monitor = Monitor(model, optimizer)

    def after(_: int) -> None:
        monitor.step()
        average.update_parameters(model)

    train(model, optimizer, exact_text_loss, 5, after=after)
    ours, theirs = monitor.errors(), monitor.errors(average)
    assert ours.keys() == theirs.keys()
    assert all(0 < theirs[block] != ours[block] for block in ours)
    same = monitor.errors({name: p.detach() for name, p in model.named_parameters()})
    assert same == ours
    assert not monitor.alarms


def test_impostors_are_watched_on_request_and_drift_to_first_order() -> None:
    model = decoder(positions="none").double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = Monitor(model, optimizer, config=MonitorConfig(baselines=True))
    train(model, optimizer, exact_text_loss, 3, after=lambda _: monitor.step())
    false = {symmetry.name for symmetry in recognize(model).baselines()}
    assert false
    for entry in monitor.ledger():
        assert abs(entry.residual) < 1e-13
        if entry.law in false:
            assert abs(entry.causes["gradient"]) > 10 * abs(entry.second_order)
        else:
            assert entry.first_order == 0
    assert not monitor.alarms


def test_laws_up_to_epsilon_put_their_epsilon_in_the_first_order() -> None:
    model = blocks.DecoderLM(11, 8, 1, 2, 6, max_length=6).double()
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            module.eps = 1e-2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    monitor = Monitor(model, optimizer)
    train(model, optimizer, exact_text_loss, 2, after=lambda _: monitor.step())
    nearly = [entry for entry in monitor.ledger() if not monitor.laws[entry.law].exact]
    assert nearly
    assert all(abs(entry.causes["epsilon"]) > 1e-8 and abs(entry.residual) < 1e-13 for entry in nearly)
    assert not monitor.alarms


def test_sampling_looks_at_every_nth_step_and_finds_the_same() -> None:
    rows = []
    for every in (1, 3):
        torch.manual_seed(0)
        model = decoder().double()
        optimizer = heavy_ball(model)
        monitor = Monitor(model, optimizer, every=every)
        train(model, optimizer, exact_text_loss, 9, after=stepping(monitor))
        rows.append({(entry.step, entry.law): entry for entry in monitor.ledger()})
    every_step, sampled = rows
    assert {step for step, _ in sampled} == {3, 6, 9}
    for key, entry in sampled.items():
        other = every_step[key]
        assert entry.observed == pytest.approx(other.observed, abs=1e-13)
        assert entry.first_order == pytest.approx(other.first_order, abs=1e-13)
        assert entry.error == pytest.approx(other.error, rel=1e-9)
        assert entry.excess <= 1


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("layers.1.*", {"layers.1.attention", "layers.1.feedforward", "layers.1.norm1", "layers.1.norm2"}),
        (["*query_key*", "*gated*"], {f"layers.{i}.{part}" for i in (0, 1) for part in ("attention", "feedforward")}),
        (lambda symmetry: symmetry.family == "value_output", {"layers.0.attention", "layers.1.attention"}),
    ],
    ids=["pattern", "patterns", "function"],
)
def test_filters_choose_layers(where: Any, expected: set[str]) -> None:
    model = blocks.DecoderLM(11, 8, 2, 2, 6, max_length=6)
    monitor = Monitor(model, torch.optim.SGD(model.parameters(), lr=0.1), where=where)
    assert {symmetry.block for symmetry in monitor.laws} == expected


def test_a_filter_that_leaves_nothing_is_refused() -> None:
    model = decoder()
    with pytest.raises(ValueError, match="to select a law"):
        Monitor(model, torch.optim.SGD(model.parameters(), lr=0.1), recognize(model), where="nowhere.*")


def test_laws_of_parameters_that_no_optimizer_steps_are_left_out_and_named() -> None:
    model = decoder()
    stepped = [p for name, p in model.named_parameters() if not name.endswith("attention.k.weight")]
    monitor = Monitor(model, torch.optim.SGD(stepped, lr=0.1))
    assert not [symmetry for symmetry in monitor.laws if symmetry.family == "query_key"]
    (reason,) = [item.reason for item in monitor.left_out if item.name == "layers.0.attention.query_key[0]"]
    assert reason == "no optimizer holds layers.0.attention.k.weight"


def test_clearing_gradients_too_early_is_explained() -> None:
    model = decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer)
    train(model, optimizer, text_loss, 1)
    optimizer.zero_grad()
    monitor.step()
    assert re.search("loop since step 1: .* before zero_grad", monitor.state)


def test_steps_that_were_not_accounted_for_are_explained() -> None:
    model = decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer)
    train(model, optimizer, text_loss, 2)
    monitor.step()
    assert re.search("loop since step 1: SGD made 2 steps", monitor.state)


def test_a_step_that_was_skipped_moves_nothing() -> None:
    model = decoder().double()
    optimizer = heavy_ball(model)
    monitor = Monitor(model, optimizer)
    train(model, optimizer, exact_text_loss, 2, after=lambda _: monitor.step())
    monitor.step()
    train(model, optimizer, exact_text_loss, 1, after=lambda _: monitor.step())
    monitor.flush()
    assert [record.skipped for record in monitor.records] == [False, False, True, False]
    assert all(entry.observed == entry.first_order == 0 for entry in monitor.ledger(step=3))
    assert not monitor.alarms


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, "at least 1"),
        ({"sinks": ["run.txt"]}, "Expected a path that ends in"),
        ({"optimizer": 3}, "Optimizer"),
    ],
    ids=["every", "sink", "optimizer"],
)
def test_bad_arguments_are_explained(arguments: dict[str, Any], message: str) -> None:
    model = decoder()
    chosen = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)} | arguments
    chosen["optimizer"] = [chosen["optimizer"]] if chosen["optimizer"] == 3 else chosen["optimizer"]
    with pytest.raises((ValueError, TypeError), match=message):
        Monitor(model, **chosen)


def test_a_run_goes_on_from_a_checkpoint_as_if_nothing_had_happened(tmp_path: Path) -> None:
    def fresh() -> tuple[nn.Module, torch.optim.Optimizer, Monitor]:
        torch.manual_seed(0)
        model = decoder().double()
        optimizer = heavy_ball(model)
        return model, optimizer, Monitor(model, optimizer)

    model, optimizer, monitor = fresh()
    train(model, optimizer, exact_text_loss, 6, after=lambda _: monitor.step())
    other, its_optimizer, its_monitor = fresh()
    train(other, its_optimizer, exact_text_loss, 3, after=lambda _: its_monitor.step())
    saved = {"model": other.state_dict(), "optimizer": its_optimizer.state_dict(), "monitor": its_monitor.state_dict()}
    torch.save(saved, tmp_path / "checkpoint.pt")
    torch.manual_seed(7)
    resumed = decoder().double()
    new_optimizer = heavy_ball(resumed)
    loaded = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    resumed.load_state_dict(loaded["model"])
    new_optimizer.load_state_dict(loaded["optimizer"])
    new_monitor = Monitor(resumed, new_optimizer)
    new_monitor.load_state_dict(loaded["monitor"])

    def loss(net: nn.Module, number: int) -> Tensor:
        return exact_text_loss(net, number + 3)

    train(resumed, new_optimizer, loss, 3, after=lambda _: new_monitor.step())
    assert new_monitor.ledger() == [entry for entry in monitor.ledger() if entry.step > 3]
    assert new_monitor.errors() == monitor.errors()
    assert new_monitor.bounds() == monitor.bounds()
    assert new_monitor.decay() == monitor.decay()


def test_weights_lost_in_a_checkpoint_show_in_the_first_step_after_it() -> None:
    model = decoder().double()
    optimizer = heavy_ball(model)
    monitor = Monitor(model, optimizer)
    train(model, optimizer, exact_text_loss, 2, after=lambda _: monitor.step())
    state = monitor.state_dict()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    resumed = Monitor(model, optimizer)
    resumed.load_state_dict(state)
    train(model, optimizer, exact_text_loss, 2, after=lambda _: resumed.step())
    assert [(alarm.step, alarm.code) for alarm in resumed.alarms] == [(3, "not restored")]


@pytest.mark.usefixtures("as_users_run_it")
def test_the_state_of_other_laws_is_refused() -> None:
    model = decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = Monitor(model, optimizer, where="layers.0.attention").state_dict()
    with pytest.raises(ValueError, match="which differ in"):
        Monitor(model, optimizer, recognize(model)).load_state_dict(state)
    with pytest.raises(ValueError, match="Expected a monitor's state"):
        Monitor(model, optimizer).load_state_dict({"format": "other"})


def test_one_function_makes_a_new_optimizer_known() -> None:
    class SignDescent(torch.optim.Optimizer):
        """θ ← θ − lr · sign(g)."""

        def __init__(self, parameters: Any, lr: float) -> None:
            super().__init__(parameters, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(group["lr"] * parameter.grad.sign())

    def update(step: ParameterStep) -> Update:
        lr, sign = step.group["lr"], Combination.of(step.gradient.sign())
        return Update(gradient=step.descent_gradient, rate=lr, parts={"sign": lr * (sign - step.descent_gradient)})

    register_rule(SignDescent, update)
    model = decoder().double()
    optimizer = SignDescent(model.parameters(), 0.001)
    monitor = Monitor(model, optimizer)
    train(model, optimizer, exact_text_loss, 5, after=lambda _: monitor.step())
    entries = monitor.ledger()
    assert {cause for entry in entries for cause in entry.causes} == {"sign"}
    assert max(abs(entry.residual) for entry in entries) < 1e-13
    assert monitor.memory()["copies"] == 0


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW])
def test_parameters_that_began_later_have_their_own_step_count(optimizer: type[torch.optim.Optimizer]) -> None:
    def ledger(*, uniform: bool) -> list[Entry]:
        torch.manual_seed(0)
        model = decoder().double()
        stepper = optimizer(model.parameters(), lr=1e-3, weight_decay=0.1)  # type: ignore[call-arg]
        rule = replace(rule_of(stepper), uniform=uniform)
        where = ["*query_key*", "*value_output*", "*gated*"]
        monitor = Monitor(model, stepper, config=MonitorConfig(rule=rule), where=where, audit=None)
        late = list(model.layers[0].feedforward.parameters())  # type: ignore[index, union-attr]

        for step in range(6):
            stepper.zero_grad()
            exact_text_loss(model, step).backward()
            for parameter in late if step < 3 else ():
                parameter.grad = None
            stepper.step()
            monitor.step()
        assert {float(stepper.state[parameter]["step"]) for parameter in model.parameters()} == {3.0, 6.0}
        assert {alarm.code for alarm in told(monitor)} == {"no gradient"}
        return monitor.ledger()

    one_by_one = ledger(uniform=False)
    assert max(abs(entry.residual) for entry in one_by_one) < 1e-13
    assert {"momentum", "preconditioner"} <= {cause for entry in one_by_one for cause in entry.causes}
    for entry, expected in zip(ledger(uniform=True), one_by_one, strict=True):
        assert entry.causes == pytest.approx(expected.causes, rel=1e-9, abs=1e-18)


def test_a_subclass_with_its_own_step_is_not_taken_for_its_base() -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step()
            return super().step()

    class Renamed(torch.optim.SGD):
        pass

    model = decoder()
    assert Monitor(model, Renamed(model.parameters(), lr=0.1))._account.watch.rules == ("SGD",)
    assert Monitor(model, Twice(model.parameters(), lr=0.1))._account.watch.rules == ("generic",)


def test_sgd_holds_less_than_a_hundredth_of_the_parameters() -> None:
    model = blocks.DecoderLM(8192, 1024, 1, 16, 3072, kv_heads=8, max_length=8)
    for momentum in (0.0, 0.9):
        monitor = Monitor(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, weight_decay=0.1))
        memory = monitor.memory()
        assert memory["copies"] == 0
        assert memory["laws"] < 0.01 * memory["parameters"]
    generic = Monitor(model, torch.optim.SGD(model.parameters(), lr=0.1), config=MonitorConfig(rule=GENERIC)).memory()
    assert generic["copies"] == generic["parameters"]


def test_without_causes_the_update_is_one() -> None:
    model = decoder().double()
    optimizers = muon_and_adamw(model)
    monitor = Monitor(model, optimizers, config=MonitorConfig(causes=False))
    train(model, optimizers, exact_text_loss, 3, after=lambda _: monitor.step())
    entries = monitor.ledger()
    assert {cause for entry in entries for cause in entry.causes} <= {"update", "rates"}
    assert max(abs(entry.residual) for entry in entries) < 1e-12


def test_values_that_are_not_finite_raise_an_alarm_and_stay_in_the_record() -> None:
    model = decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer, every=1)

    def spoil_second(number: int) -> None:
        if number == 1:
            fill_with_nan(model)
        monitor.step()

    train(model, optimizer, text_loss, 2, after=spoil_second)
    monitor.flush()
    assert {alarm.step for alarm in told(monitor)} == {2}
    assert any(math.isnan(entry.observed) for entry in monitor.ledger(step=2))


def test_values_that_are_not_finite_between_steps_are_noted_and_raise_an_alarm_in_the_next() -> None:
    model = decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer, every=1)
    train(model, optimizer, text_loss, 1, after=stepping(monitor))
    fill_with_nan(model)
    monitor.step()
    # Without a step of the optimizer there is nothing to account for; a compiled one looks the same.
    assert [(note.stage, note.step) for note in monitor.conditions] == [("loop", 2)]
    train(model, optimizer, text_loss, 1, after=stepping(monitor))
    monitor.flush()
    assert (3, "not finite") in {(alarm.step, alarm.code) for alarm in monitor.alarms}
    assert any(math.isnan(entry.observed) for entry in monitor.ledger(step=3))


def fill_with_nan(model: nn.Module) -> None:
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)


def test_a_rule_can_be_given_for_an_optimizer_in_disguise() -> None:
    known = Rule(name="still", update=lambda step: Update())
    model = decoder().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer, config=MonitorConfig(rule=known))
    train(model, optimizer, exact_text_loss, 1, after=lambda _: monitor.step())
    assert {alarm.code for alarm in told(monitor)} == {"residual"}


def test_watching_leaves_training_as_it_was() -> None:
    torch.manual_seed(0)
    watched = decoder().double()
    alone = copy.deepcopy(watched)
    optimizer, other = heavy_ball(watched), heavy_ball(alone)
    monitor = Monitor(watched, optimizer)
    train(watched, optimizer, exact_text_loss, 4, after=lambda _: monitor.step())
    train(alone, other, exact_text_loss, 4)
    assert all(torch.equal(a, b) for a, b in zip(watched.parameters(), alone.parameters(), strict=True))
    monitor.close()
    train(watched, optimizer, exact_text_loss, 2)


class TestConversionsInMidRun:
    """`model.bfloat16()` between two steps."""

    @staticmethod
    def watched(build: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> tuple[nn.Module, Any, Monitor]:
        torch.manual_seed(0)
        model = decoder()
        optimizer = build(list(model.parameters()))
        return model, optimizer, Monitor(model, optimizer)

    @staticmethod
    def steps(model: nn.Module, optimizer: Any, monitor: Monitor, count: int) -> None:
        for number in range(count):
            optimizer.zero_grad()
            text_loss(model, number).backward()
            optimizer.step()
            monitor.step()
        monitor.flush()

    @pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64], ids=str)
    def test_averages_of_another_type_are_named_before_torch_trips_over_them(self, kind: torch.dtype) -> None:
        model, optimizer, monitor = self.watched(lambda p: torch.optim.AdamW(p, lr=1e-3))
        self.steps(model, optimizer, monitor, 2)
        model.to(kind)
        with pytest.raises(RuntimeError):
            self.steps(model, optimizer, monitor, 1)
        assert re.search(r"was float32 and is .* AdamW keeps its averages.*load_state_dict", monitor.state)
        optimizer.load_state_dict(optimizer.state_dict())
        self.steps(model, optimizer, monitor, 3)
        assert [alarm.code for alarm in told(monitor)] == (["converted"] if kind == torch.bfloat16 else [])

    @pytest.mark.parametrize("told", [True, False], ids=["told", "not told"])
    def test_a_rule_says_which_tensors_are_averages(self, told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        class Averaging(torch.optim.Optimizer):
            """m ← m + (g − m)/10 and θ ← θ − lr · m."""

            def __init__(self, parameters: Any) -> None:
                super().__init__(parameters, {"lr": 0.01})

            @torch.no_grad()
            def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
                for group in self.param_groups:
                    for parameter in group["params"]:
                        mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                        parameter.sub_(group["lr"] * mean.lerp_(parameter.grad, 0.1))

        def update(step: ParameterStep) -> Update:
            lr, mean = step.group["lr"], Combination.of(step.state["mean"])
            return Update(
                gradient=step.descent_gradient, rate=lr, parts={"momentum": lr * (mean - step.descent_gradient)}
            )

        monkeypatch.setattr(optimizer_rules, "_RULES", dict(optimizer_rules._RULES))
        options: dict[str, Any] = {"averages": ["mean"]} if told else {}
        register_rule(Averaging, update, **options)
        model, optimizer, monitor = self.watched(Averaging)
        self.steps(model, optimizer, monitor, 2)
        model.double()
        with pytest.raises(RuntimeError, match="dtype"):
            self.steps(model, optimizer, monitor, 1)
        assert ("averages" in monitor.state) == told

    @pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64], ids=str)
    @pytest.mark.parametrize("momentum", [0.0, 0.9])
    def test_the_account_goes_on_from_converted_values(
        self, kind: torch.dtype, momentum: float, caplog: pytest.LogCaptureFixture
    ) -> None:
        model, optimizer, monitor = self.watched(lambda p: torch.optim.SGD(p, lr=1e-2, momentum=momentum))
        self.steps(model, optimizer, monitor, 2)
        model.to(kind)
        self.steps(model, optimizer, monitor, 4)
        assert [alarm.code for alarm in told(monitor)] == (["converted"] if kind == torch.bfloat16 else [])
        assert len([record for record in caplog.records if "became" in record.message]) == 1
        with torch.no_grad():
            model.get_parameter("layers.0.attention.q.weight").mul_(1.1)
        self.steps(model, optimizer, monitor, 2)
        assert "something else wrote" in {alarm.code for alarm in told(monitor)}, "as before the conversion"


def test_what_is_rarely_asked_for_is_a_configuration_and_unknown_arguments_are_refused() -> None:
    model = decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = MonitorConfig(keep=2, notes={"lr": 0.1})
    with pytest.raises(AttributeError):
        config.keep = 3  # type: ignore[misc]
    assert Monitor(model, optimizer, config=config).records.maxlen == 2
    with pytest.raises(TypeError, match="unexpected keyword argument 'kep'"):
        Monitor(model, optimizer, kep=3)  # type: ignore[call-arg]
