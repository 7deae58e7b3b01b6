"""A monitor never ends or changes the run it watches, whatever fails inside it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import acts_of_violence
import acts_of_violence_2
import conserved
from conserved import Monitor, MonitorConfig
from conserved.boundary import Boundary
from conserved.store.background_sink import BackgroundSink
from conserved.store.sink import Run, Sink
from conserved.store.step_record import StepRecord
from conserved.tracking.identities.step_identities import standard_identities
from conserved.tracking.watched_laws import optimizers_of
from told import told

pytestmark = pytest.mark.usefixtures("as_users_run_it")

Act = Callable[[nn.Module, torch.optim.Optimizer, "Monitor | None", int], Any]
"""Something a program does after a step, with a monitor or without."""


class Attending(nn.Module):
    """A network with everything a monitor listens to: attention, norms, dropout and batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.norm, self.batch = nn.LayerNorm(8), nn.BatchNorm1d(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = (f(self.norm(x)).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, dropout_p=0.1).transpose(1, 2).flatten(2))
        x = x + self.down(F.dropout(F.relu(self.up(x)), 0.1))
        return self.head(self.batch(x.flatten(0, 1)))


def attending() -> nn.Module:
    torch.manual_seed(0)
    return Attending()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def run(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    monitor: Monitor | None,
    *,
    steps: int = 6,
    act: Act | None = None,
    loss_of: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: F.cross_entropy(model(x), x.flatten()),
) -> list[Tensor]:
    """Train, and return every loss and at the end every parameter and buffer."""
    torch.manual_seed(1)
    result = []
    for number in range(steps):
        tokens = torch.randint(11, (3, 5))
        loss = loss_of(model, tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if monitor is not None:
            monitor.step(loss=loss)
        if act is not None:
            act(model, optimizer, monitor, number)
        result.append(loss.detach().clone())
    return [*result, *(value.detach().clone() for value in model.state_dict().values())]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(map(partial(torch.equal), first, second))


@pytest.fixture(scope="module")
def unwatched() -> list[Tensor]:
    model = attending()
    return run(model, adam(model), None)


class Broken(Exception):
    """What is thrown into every stage."""


def _break(*_: Any, **__: Any) -> Any:
    raise Broken("thrown in by a test")


QUIET = ("passes", "loss", "status lines", "closing", "gradients", "labels")
"""Stages that are turned on again, or that belong to a boundary of their own."""

STAGES = {
    "reading laws": "conserved.inference.live.recognize",
    "the walk over the model": "conserved.tracking.trained_parameters.parts_of",
    "the account is made": "conserved.tracking.monitor.LawAccount",
    "the reference": "conserved.tracking.law_account.LawAccount.take_reference",
    "before an optimizer": "conserved.tracking.optimizer_watch.OptimizerWatch._start",
    "after an optimizer": "conserved.tracking.optimizer_watch.OptimizerWatch._end",
    "the expansion of a step": "conserved.tracking.optimizer_watch.OptimizerWatch.expand",
    "the ledger": "conserved.tracking.ledger.Ledger.account",
    "the account": "conserved.tracking.law_account.LawAccount.settle",
    "autocast": "conserved.tracking.step_watch.StepWatch._note_autocast",
    "passes": "conserved.tracking.step_watch.StepWatch._count_pass",
    "the end of a step": "conserved.tracking.step_watch.StepWatch.end_step",
    "the loss": "conserved.tracking.objective.LossObjective.sees_more",
    "the order": "conserved.tracking.monitor.Monitor._notice_order",
    "new parameters": "conserved.tracking.monitor.signature",
    "times": "conserved.tracking.time_budget.TimeBudget.note",
    "audits are made": "conserved.tracking.monitor.Audits",
    "audits": "conserved.tracking.run_audits.audit",
    "the cadence": "conserved.tracking.run_audits.Audits.due",
    "listening": "conserved.tracking.run_audits.Audits.arm",
    "keys": "conserved.auditing.softmax_gauge.Gauge.see",
    "key gradients": "conserved.auditing.softmax_gauge.Gauge._sum_up",
    "norms": "conserved.auditing.epsilon_terms.EpsilonTerms.function",
    "alarms of an audit": "conserved.tracking.monitor.alarms_of",
    "records": "conserved.tracking.device_transfer.Transfer.receive",
    "numbers on their way": "conserved.tracking.device_transfer.Transfer.send",
    "an alarm is explained": "conserved.tracking.raised_alarms.RaisedAlarms.explained",
    "alarm rules": "conserved.store.step_record.StepRecord.entries",
    "the store begins": "conserved.store.sqlite_sink.SQLite.begin",
    "the store writes": "conserved.store.sqlite_sink.SQLite.write",
    "the store closes": "conserved.store.sqlite_sink.SQLite.close",
    "a monitor steps": "conserved.tracking.monitor.Monitor._step",
}
"""Functions inside a monitor that are made to raise, by what they do."""


def left_on(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """What is left of a monitor on a model, an optimizer or torch."""
    kinds = [name for name in vars(nn.Module()) if name.endswith("_hooks")]
    hooks = [(type(m).__name__, kind) for m in model.modules() for kind in kinds if getattr(m, kind, None)]
    result = [f"{kind} of {name}" for name, kind in hooks]
    result += [kind for kind in vars(optimizer) if kind.endswith("_hooks") and getattr(optimizer, kind)]
    result += [name for m in model.modules() for name in vars(m) if "conserved" in name]
    result += [f"F.{name}" for name, f in vars(F).items() if "conserved" in str(getattr(f, "__closure__", ""))]
    grad_hooks = [name for name, p in model.named_parameters() if p._post_accumulate_grad_hooks]
    return result + grad_hooks


@pytest.mark.parametrize("stage", STAGES)
def test_an_exception_in_any_stage_leaves_the_run_as_it_was(
    stage: str, unwatched: list[Tensor], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(STAGES[stage], _break)
    model = attending()
    optimizer = adam(model)
    monitor = Monitor(model, optimizer, loss="cross_entropy", sinks=tmp_path / "runs.db")
    assert same(run(model, optimizer, monitor), unwatched)
    monitor.close()
    if stage != "an alarm is explained":
        assert "Broken: thrown in by a test" in monitor.state, monitor.state
    else:
        assert monitor.state == "watching"
    assert not left_on(model, optimizer)


def _called(function: Any) -> str:
    inner = getattr(function, "func", function)
    return getattr(inner, "__qualname__", type(inner).__name__)


def _watched(tmp_path: Path) -> tuple[list[Tensor], Monitor, list[str]]:
    model = attending()
    optimizer = adam(model)
    monitor = Monitor(model, optimizer, loss="cross_entropy", sinks=tmp_path / "runs.db")
    result = run(model, optimizer, monitor, steps=4)
    monitor.state_dict()
    monitor.close()
    return result, monitor, left_on(model, optimizer)


def test_an_exception_in_any_function_that_is_called_leaves_the_run_as_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Whatever a monitor does goes through its boundary, so functions are found there; `--whole` breaks them all."""
    attempt, called = Boundary.attempt, dict[tuple[str, str], None]()
    broken: tuple[str, str] | None = None

    def watched(self: Boundary, stage: str, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        key = (stage, _called(function))
        called[key] = None
        return attempt(self, stage, _break if key == broken else function, *args, **kwargs)

    monkeypatch.setattr(Boundary, "attempt", watched)
    plain, _, _ = _watched(tmp_path)
    stages = [identity.name for identity in standard_identities()]
    assert {f"identity of {name}" for name in stages} <= {stage for stage, _ in called}
    keys = sorted(called)
    for broken in keys if request.config.getoption("--whole") else random.Random(0).sample(keys, 4):
        result, monitor, left = _watched(tmp_path)
        assert same(result, plain), broken
        assert "Broken: thrown in by a test" in monitor.state or broken[0] in QUIET, broken
        assert not left or broken[0] == "closing", broken


def test_with_strict_the_exception_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(STAGES["the account"], _break)
    model = attending()
    optimizer = adam(model)
    with pytest.raises(Broken):
        run(model, optimizer, Monitor(model, optimizer, config=MonitorConfig(strict=True)))


def test_a_stage_that_is_off_says_since_when_and_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = attending()
    optimizer = adam(model)
    monitor = Monitor(model, optimizer)

    def act(*_: Any) -> None:
        if monitor.count == 3:
            monkeypatch.setattr(STAGES["the account"], _break)

    run(model, optimizer, monitor, act=act)
    assert monitor.state == "account off since step 4: Broken: thrown in by a test"
    assert len([record for record in caplog.records if "Broken" in record.message]) == 1
    assert monitor.audits[-1].step == 6, "audits go on without the account"


def test_the_state_is_kept_in_the_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(STAGES["audits"], _break)
    model = attending()
    optimizer = adam(model)
    with Monitor(model, optimizer, sinks=tmp_path / "runs.db", run="one") as monitor:
        run(model, optimizer, monitor)
    with conserved.tracking.RunStore(tmp_path / "runs.db") as store:
        assert store.state("one").startswith("audits off since step")
        assert store.steps("one") == [1, 2, 3, 4, 5, 6]


def test_a_watched_run_is_the_unwatched_one_and_nothing_is_left_behind(unwatched: list[Tensor]) -> None:
    model = attending()
    optimizer = adam(model)
    with Monitor(model, optimizer, loss="cross_entropy") as monitor:
        assert same(run(model, optimizer, monitor), unwatched)
        assert monitor.state == "watching"
        assert not monitor.alarms
    assert not left_on(model, optimizer)


def test_an_exception_of_the_program_itself_is_its_own_and_the_next_step_is_watched() -> None:
    model = attending()
    optimizer = adam(model)
    monitor = Monitor(model, optimizer)
    run(model, optimizer, monitor, steps=2)
    with pytest.raises(IndexError):
        model(torch.full((1, 3), 99))

    def failing() -> float:
        raise ArithmeticError("of the program")

    with pytest.raises(ArithmeticError):
        optimizer.step(failing)
    run(model, optimizer, monitor, steps=3)
    assert monitor.state == "watching"
    assert [entry.step for entry in monitor.ledger(law=monitor.laws.names[0])] == [1, 2, 3, 4, 5]
    assert not monitor.alarms


class TestWithoutLaws:
    MODELS: ClassVar[dict[str, tuple[Callable[[], nn.Module], str]]] = {
        "gelu": (lambda: nn.Sequential(nn.Linear(5, 4), nn.GELU(), nn.Linear(4, 1)), ""),
        "regression": (lambda: nn.Linear(5, 1), ""),
        "no parameters": (lambda: nn.Sequential(nn.Flatten()), "no parameters that are trained"),
    }

    @pytest.mark.parametrize("kind", MODELS)
    def test_a_model_without_laws_is_not_an_error(self, kind: str) -> None:
        build, reason = self.MODELS[kind]
        torch.manual_seed(0)
        model = build()
        parameters = list(model.parameters()) or [nn.Parameter(torch.zeros(1))]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        monitor = Monitor(model, optimizer)
        for _ in range(3):
            out = model(torch.randn(6, 5))
            loss = (out.square().mean() + parameters[0].sum() * 0).requires_grad_()
            loss.backward()
            optimizer.step()
            monitor.step(loss=loss)
            optimizer.zero_grad()
        assert monitor.state.startswith("not watched: ") or monitor.state == "watching"
        assert reason in monitor.state
        assert [record.step for record in monitor.records] == [1, 2, 3]
        assert str(monitor)
        assert monitor.ledger() == [] or len(monitor.laws)
        monitor.close()

    def test_gradients_that_are_not_finite_are_seen_without_a_law(self) -> None:
        model = nn.Sequential(nn.Linear(5, 4), nn.GELU(), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = Monitor(model, optimizer)
        (model(torch.randn(6, 5)).sum() * torch.inf).backward()
        optimizer.step()
        monitor.step()
        assert [alarm.code for alarm in monitor.alarms] == ["not finite"]

    def test_the_true_reason_is_given(self) -> None:
        model = attending()
        monitor = Monitor(model, torch.optim.SGD(attending().parameters(), lr=0.1))
        model(torch.randint(11, (2, 3)))
        assert "the optimizer holds none of this model's parameters" in monitor.state

    def test_user_errors_are_still_raised(self) -> None:
        model = attending()
        arguments: Any
        for arguments in ((3, adam(model)), (model, 3), (model, [])):
            with pytest.raises(TypeError):
                Monitor(*arguments)
        for every in (0, -1, "often", 1.5):
            with pytest.raises(ValueError, match="every"):
                Monitor(model, adam(model), every=every)  # type: ignore[arg-type]


SAMPLE = [
    "compiled whole graph after", "compiled in place after", "compiled part before", "compiled optimizer step",
    "deep copy", "averaged model", "save whole model", "assign state", "prune", "jagged inputs", "complex parameters",
    "torch cond", "vector loss", "generator input", "drawing from python and numpy", "counting model",
    "submodules called alone", "called under vmap", "store that is no database", "store locked by another",
    "optimizer hooks cleared", "failing step", "toggled gradients", "closed in mid run", "dropped",
    "attributes that raise", "empty and single parameters",
    *random.Random(2).sample(sorted(acts_of_violence_2.NEW), 4),
]  # fmt: skip
"""Acts that have ended or changed a run before; benchmarks/harmless_violence.py does all."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("act", SAMPLE)
def test_acts_of_violence_leave_the_losses_as_they_were(act: str, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("plain", "watched")]
    for folder in folders:
        folder.mkdir()
    plain, _ = acts_of_violence.run(act, folders[0], watched=False)
    result, monitor = acts_of_violence.run(act, folders[1], watched=True)
    assert acts_of_violence.same(plain, result)
    assert monitor is not None
    assert {alarm.code for alarm in told(monitor)} <= {"not held"}
    assert act != "assign state" or told(monitor), "an optimizer that trains nothing of the model is an alarm"


def test_a_store_that_does_not_keep_up_drops_records_and_training_does_not_wait(tmp_path: Path) -> None:
    ready = threading.Event()

    class Slow(Sink):
        def begin(self, run: Run) -> None:
            ready.wait(60)

        def write(self, record: StepRecord) -> None:
            return

    sink = BackgroundSink(Slow(), waiting=4)
    sink.begin(Run(name="one"))
    for number in range(20):
        sink.write(StepRecord(step=number))
    assert sink.dropped >= 15
    assert not sink.drain(0.01)
    ready.set()
    assert sink.drain(10)


def test_optimizers_of_other_libraries_are_found_in_their_wrappers() -> None:
    inner = [torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1) for _ in range(2)]

    class Wrapper:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

    class Chained:
        chained_optimizers: ClassVar[list[Any]] = [Wrapper(inner[0]), Wrapper(inner[1])]

    assert optimizers_of(Chained()) == inner
    assert optimizers_of(Wrapper(Wrapper(inner[0]))) == inner[:1]
    assert optimizers_of((*inner, inner[0])) == inner
