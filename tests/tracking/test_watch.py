"""Audits inside a run: nothing wrong stays green, nothing right is accused, and a defect is told once, in words."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved import GradientsDoNotConserveError, Monitor, audit, blocks, gauge, recognize
from conserved.alarm import Alarm, group_alarms
from conserved.store.sqlite_sink import is_detailed
from conserved.tracking import RunStore, SQLite
from plugged_in import CASES, Planted, loss_of

pytestmark = pytest.mark.filterwarnings("ignore")


def decoder() -> nn.Module:
    torch.manual_seed(0)
    return blocks.DecoderLM(64, 32, 2, 4, 48, kv_heads=2, max_length=16)


def objective(model: nn.Module, number: int) -> Tensor:
    tokens = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(number))
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, -1).flatten())


def run(
    steps: int = 8, *, factor: float = 1.0, wrong_from: int = 5, monitor: dict[str, Any] | None = None
) -> tuple[nn.Module, Monitor]:
    """A run in which one head's key gradient is wrong from some step on."""
    model = decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    watched = Monitor(model, optimizer, **{"audit": 1, **(monitor or {})})
    for number in range(1, steps + 1):
        optimizer.zero_grad()
        objective(model, number).backward()
        if number >= wrong_from:
            gradient = model.get_parameter("layers.0.attention.k.weight").grad
            assert gradient is not None
            gradient[:8] *= factor
        optimizer.step()
        watched.step()
    watched.flush()
    return model, watched


@pytest.mark.parametrize("factor", [1.1, -1.0, 0.0])
def test_a_wrong_key_gradient_is_one_alarm_at_its_first_step_with_rows_and_factor(factor: float) -> None:
    _, monitor = run(factor=factor)
    (alarm,) = monitor.alarms
    assert (alarm.code, alarm.step, alarm.last) == ("gradient", 5, 8)
    assert alarm.law == "layers.0.attention.query_key[0]"
    assert "layers.0.attention.k.weight[0:8] (keys, group 0)" in alarm.message
    expected = f"times {1 / factor:.4g}" if factor else "contributes nothing at all"
    assert expected in alarm.message
    assert [entry.refuted > 0 for entry in monitor.audits] == [False] * 4 + [True] * 4


def test_a_clean_run_is_quiet_and_conclusive_and_its_residuals_are_a_series() -> None:
    _, monitor = run()
    assert not monitor.alarms
    assert all(entry.conclusive and entry.gauge is not None for entry in monitor.audits)
    assert [record.readings["audit/refuted"] for record in monitor.records] == [0.0] * 8
    assert monitor.last_audit is not None
    assert monitor.last_audit.badge.startswith("verified, 100 % of parameters (")


def with_torch_norms() -> nn.Module:
    torch.manual_seed(0)
    norms = nn.LayerNorm(16), nn.RMSNorm(16, eps=1e-6)
    return nn.Sequential(nn.Embedding(64, 16), norms[0], nn.Linear(16, 16), norms[1], nn.Linear(16, 64))


@pytest.mark.parametrize("build", [decoder, with_torch_norms])
def test_nothing_that_a_pass_computed_outlives_its_step(build: Callable[[], nn.Module]) -> None:
    model, outputs = build(), list[weakref.ref[Tensor]]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer, audit=1)
    for module in model.modules():
        module.register_forward_hook(lambda _module, _args, output: outputs.append(weakref.ref(output)))
    for number in range(3):
        optimizer.zero_grad()
        for part in range(2):
            objective(model, 2 * number + part).backward()
        optimizer.step()
        monitor.step()
    gc.collect()
    assert all(entry.conclusive for entry in monitor.audits)
    assert len(outputs) > 30
    assert sum(one() is not None for one in outputs) == 0


NORMS = ("layer_norm", "rms_norm", "group_norm", "batch_norm", "scaled_dot_product_attention")


@pytest.mark.usefixtures("nobody_else_listens")
@pytest.mark.parametrize("build", [decoder, with_torch_norms])
def test_a_monitor_that_is_dropped_goes_with_its_model_and_leaves_pytorch_as_it_was(
    build: Callable[[], nn.Module],
) -> None:
    before = [getattr(F, name) for name in NORMS]
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = Monitor(model, optimizer, audit=1)
    for number in range(2):
        optimizer.zero_grad()
        objective(model, number).backward()
        optimizer.step()
        monitor.step()
    assert [getattr(F, name) for name in NORMS] != before, "it listens for the next step"
    gone = weakref.ref(model)
    del model, optimizer, monitor
    gc.collect()
    assert gone() is None
    assert [getattr(F, name) for name in NORMS] == before


@pytest.mark.usefixtures("nobody_else_listens")
def test_two_monitors_that_stop_in_any_order_both_hear_norms() -> None:
    before = [getattr(F, name) for name in NORMS]
    models = [with_torch_norms() for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    monitors = [Monitor(*pair, audit=1) for pair in zip(models, optimizers, strict=True)]
    for number in range(4):
        for model, optimizer, monitor in zip(models, optimizers, monitors, strict=True):
            if number > 1 and monitor is monitors[0]:
                monitor.close()
                continue
            optimizer.zero_grad()
            objective(model, number).backward()
            optimizer.step()
            monitor.step()
    assert [len(monitor.audits) for monitor in monitors] == [2, 4]
    assert all(entry.conclusive for monitor in monitors for entry in monitor.audits)
    monitors[1].close()
    assert [getattr(F, name) for name in NORMS] == before


@pytest.mark.usefixtures("nobody_else_listens")
def test_norms_are_told_once_where_others_put_an_old_listener_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = with_torch_norms()
    model[1].eps = 0.5  # what it leaves of a law is large, and twice that would be a wrong gradient
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def watched() -> Monitor:
        monitor = Monitor(model, optimizer, audit=1)
        for number in range(2):
            optimizer.zero_grad()
            objective(model, number).backward()
            optimizer.step()
            monitor.step()
        return monitor

    before = F.layer_norm
    with watched():
        old = F.layer_norm
    assert old is not before
    monkeypatch.setattr(F, "layer_norm", lambda *args, **options: old(*args, **options))
    with watched() as monitor:
        pass
    assert all(entry.conclusive for entry in monitor.audits)


def test_stopping_leaves_the_parameters_as_they_were() -> None:
    model = decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer, stop=True)
    objective(model, 0).backward()
    key = model.get_parameter("layers.1.attention.k.weight")
    assert key.grad is not None
    key.grad *= 2
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with pytest.raises(GradientsDoNotConserveError, match="query_key"):
        optimizer.step()
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    assert monitor.alarms


@pytest.mark.budget
def test_audits_keep_to_their_budget_and_come_at_least_every_so_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conserved.tracking.time_budget.MOST", 6)
    _, monitor = run(steps=17, monitor={"audit": "auto", "budget": 1e-6})
    assert [entry.step for entry in monitor.audits] == [1, 2, 4, 8, 14, 16]
    _, often = run(steps=6, monitor={"audit": "auto", "budget": 1.0})
    assert len(often.audits) == 6


def test_the_first_step_after_a_resume_is_audited() -> None:
    model, monitor = run(steps=3, monitor={"audit": 50})
    resumed = Monitor(model, torch.optim.AdamW(model.parameters(), lr=3e-4), audit=50)
    resumed.load_state_dict(monitor.state_dict())
    optimizer = resumed._optimizers[0]
    objective(model, 9).backward()
    optimizer.step()
    resumed.step()
    assert [(entry.step, entry.why) for entry in resumed.audits] == [(4, "the first after a resume")]


def test_new_parameter_groups_are_audited() -> None:
    model = decoder()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters[:-2], lr=0.01)
    monitor = Monitor(model, optimizer, audit=50)
    for number in range(3):
        optimizer.zero_grad()
        objective(model, number).backward()
        if number == 1:
            optimizer.add_param_group({"params": parameters[-2:]})
        optimizer.step()
        monitor.step()
    assert [entry.step for entry in monitor.audits] == [1, 2]


def test_a_monitor_that_steps_before_its_optimizer_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = Monitor(model, optimizer)
    with caplog.at_level(logging.WARNING, logger="conserved"):
        for number in range(2):
            optimizer.zero_grad()
            objective(model, number).backward()
            monitor.step()
            optimizer.step()
            if number == 0:
                monitor._account.watch.clear()
    assert "Monitor.step() was called before optimizer.step()" in caplog.text
    assert [alarm.code for alarm in monitor.alarms if alarm.code == "order"] == ["order"]


def test_alarms_of_one_family_are_one_with_the_first_step_the_worst_law_and_a_count() -> None:
    alarms = [
        Alarm(step=s, code="gradient", law=f"q[{h}]", value=v, limit=1.0, message=f"{v}", family="q")
        for s, h, v in ((3, 0, 2.0), (3, 1, 5.0), (4, 0, 3.0))
    ]
    (one,) = group_alarms(alarms)
    assert (one.step, one.last, one.law, one.count, one.laws) == (3, 4, "q[1]", 3, ("q[0]", "q[1]"))
    assert "The same in 1 other law: q[0]." in str(one)


SAMPLE = [
    case
    for case in CASES
    if case.defect
    in (
        "one head's dK times 1.1",
        "no softmax correction",
        "dx without its projection",
        "dx times 1.1",
        "dup times 2",
        "the gate's derivative",
        "dx of an expert halved",
        "keys' part times 1.1",
        "averaged instead of summed",
    )
]


@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: case.name)
def test_what_users_plug_in_is_seen_where_it_can_be_and_its_right_form_is_not_accused(case: Planted) -> None:
    for wrong in ("", case.defect):
        model = case.build(wrong)
        with gauge(model) as watched:
            loss_of(model).backward()
        result = audit(model, gauge=watched)
        assert result.ok is (not wrong or bool(case.unseen)), result.summary()


class Elsewhere(torch.autograd.Function):
    """A gated product computed by NumPy, with a backward that may be wrong."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.factor = factor
        x, y = gate.detach().numpy(), up.detach().numpy()
        return torch.from_numpy(x / (1 + np.exp(-x)) * y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        s = gate.sigmoid()
        return grads[0] * up * s * (1 + gate * (1 - s)), ctx.factor * grads[0] * gate * s, None


class Gated(nn.Module):
    def __init__(self, factor: float, alike: bool = True) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(6, 8), nn.Linear(6, 8, bias=False), nn.Linear(8, 6)
        self.factor, self.alike = factor, alike

    def forward(self, x: Tensor) -> Any:
        made = Elsewhere.apply(self.gate(x), self.up(x), self.factor)
        return self.down(made if self.alike else made.tanh())


def test_a_law_through_code_outside_pytorch_is_probed_and_tested() -> None:
    x = torch.randn(5, 6)
    for factor in (1.0, 1.1):
        torch.manual_seed(0)
        model = Gated(factor)
        laws = recognize(model, x)
        (law,) = [symmetry for symmetry in laws if symmetry.source == "probed"]
        assert set(law.parameters) == {"up.weight", "down.weight"}
        assert not laws.unknown
        model(x).sin().sum().backward()
        result = audit(model, laws)
        assert result.ok is (factor == 1.0)
        if not result.ok:
            (row,) = result.failures
            assert "either the backward is wrong or this function is not what its place suggests" in row.suggests[0]
            assert "it is the backward" in row.suggests[0]


def test_what_cannot_be_probed_is_never_green() -> None:
    torch.manual_seed(0)
    model = Gated(1.0, alike=False)
    x = torch.randn(5, 6)
    laws = recognize(model, x)
    assert not [symmetry for symmetry in laws if symmetry.source == "probed"]
    model(x).sin().sum().backward()
    result = audit(model, laws)
    assert not result.conclusive
    assert "autograd::Elsewhere" in result.unknown


class Wayward(nn.Module):
    """Leaves its second layer out by chance, as stochastic depth does."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.skip = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        return self.three(x if float(torch.rand(())) < (1.0 if self.skip else 0.5) else self.two(x).relu())


def test_laws_of_a_way_that_the_model_did_not_take_are_left_open() -> None:
    torch.manual_seed(0)
    model, x = Wayward(), torch.randn(5, 4)
    laws = recognize(model, x)
    assert {symmetry.source for symmetry in laws} == {"assumed"}
    model.skip = False
    torch.manual_seed(3)
    while model.two.weight.grad is None:
        model.zero_grad()
        model(x).sin().sum().backward()
    result = audit(model, laws)
    assert not result.failures
    assert not result.conclusive


def test_clipping_by_value_is_recognised_and_not_called_wrong() -> None:
    model = decoder()
    objective(model, 0).backward()
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    result = audit(model)
    assert not result.failures
    assert "clipped by value" in result.verdict.message


def test_a_store_keeps_details_at_a_decreasing_rate_and_totals_of_every_step(tmp_path: Path) -> None:
    detailed = [step for step in range(1, 4001) if is_detailed(step, 250)]
    assert detailed[:500] == list(range(1, 501))
    assert len(detailed) == 500 + 250 + 250 + 250
    run(steps=12, monitor={"sinks": SQLite(tmp_path / "runs.db", detail=2), "run": "one"})
    with RunStore(tmp_path / "runs.db") as store:
        assert store.steps("one") == list(range(1, 13))
        assert {entry.step for entry in store.entries("one")} == {1, 2, 3, 4, 6, 8, 12}
        assert set(store.totals("one")) == {5, 7, 9, 10, 11}
        assert "total/cause/preconditioner" in store.totals("one")[7]


def test_how_large_a_store_will_be_is_told_at_the_start_and_a_large_one_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conserved.store.sqlite_sink._LARGE", 3e8)
    with caplog.at_level(logging.INFO, "conserved"):
        run(steps=2, monitor={"sinks": SQLite(tmp_path / "small.db")})
        run(steps=2, monitor={"sinks": SQLite(tmp_path / "large.db", detail=None)})
    small, large = (record for record in caplog.records if "MB for 100,000 steps" in record.getMessage())
    assert (small.levelno, large.levelno) == (logging.INFO, logging.WARNING)


@pytest.mark.parametrize("ending", ["html", "png"])
def test_a_run_is_drawn_with_its_alarms(tmp_path: Path, ending: str) -> None:
    _, monitor = run(factor=2.0)
    path = monitor.plot(tmp_path / f"run.{ending}")
    assert path.stat().st_size > 10_000
    if ending == "html":
        assert "gradient: layers.0.attention.query_key[0]" in path.read_text(encoding="utf-8")
    assert "1 alarm in 8 steps" in str(monitor)
    assert "1 alarm" in repr(monitor)
    with pytest.raises(ValueError, match="html"):
        monitor.plot(tmp_path / "run.doc")


@pytest.mark.parametrize("options", [{"budget": 2.0}, {"budget": 0.0}, {"budget": float("nan")}, {"audit": 0}])
def test_a_cadence_or_budget_that_is_none_is_refused_when_the_monitor_is_made(options: dict[str, Any]) -> None:
    model = decoder()
    with pytest.raises(ValueError, match=r"between 0 and 1|at least 1"):
        Monitor(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
