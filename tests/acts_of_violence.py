"""Acts of ordinary violence: what programs do to a model, an optimizer or a monitor in the middle of a run.

Every act is done in a run with a monitor and in one without. Both must end, with the same losses.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import pickle
import random
import signal
import sqlite3
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel

from conserved import Monitor, MonitorConfig


@dataclass
class Scene:
    """A run that something is done to."""

    model: Any
    optimizer: Any
    folder: Path
    monitor: Monitor | None = None
    number: int = 0
    kept: dict[str, Any] = field(default_factory=dict)
    loss_of: Callable[[Any, Tensor], Tensor] = lambda model, x: F.cross_entropy(model(x), x.flatten())
    options: dict[str, Any] = field(default_factory=dict)
    step_loss: Callable[[Tensor], Any] = lambda loss: loss


Act = Callable[[Scene], Any]

BEFORE: dict[str, Act] = {}
"""Acts on a scene before its monitor is made."""

FIRST: dict[str, Act] = {}
"""Acts after the monitor is made and before the first step."""

AFTER: dict[str, Act] = {}
"""Acts after every step."""


def _before(act: Act) -> Act:
    BEFORE[act.__name__.strip("_").replace("_", " ")] = act
    return act


def _first(act: Act) -> Act:
    FIRST[act.__name__.strip("_").replace("_", " ")] = act
    return act


def _after(act: Act) -> Act:
    AFTER[act.__name__.strip("_").replace("_", " ")] = act
    return act


class Net(nn.Module):
    """Attention, norms and a feed-forward part on tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v))
        return self.head(x + self.down(F.relu(self.up(x)))).flatten(0, 1)


# Compilation


@_before
def _compiled_before(s: Scene) -> None:
    s.model = torch.compile(s.model, backend="eager")


@_before
def _compiled_whole_graph_before(s: Scene) -> None:
    s.model = torch.compile(s.model, backend="eager", fullgraph=True)


@_before
def _compiled_in_place_before(s: Scene) -> None:
    s.model.compile(backend="eager")


@_first
def _compiled_after(s: Scene) -> None:
    s.model = torch.compile(s.model, backend="eager")


@_first
def _compiled_whole_graph_after(s: Scene) -> None:
    s.model = torch.compile(s.model, backend="eager", fullgraph=True)


@_first
def _compiled_in_place_after(s: Scene) -> None:
    s.model.compile(backend="eager", fullgraph=True)


@_before
def _compiled_part_before(s: Scene) -> None:
    s.model.up = torch.compile(s.model.up, backend="eager", fullgraph=True)


@_first
def _compiled_part_after(s: Scene) -> None:
    s.model.up.compile(backend="eager")


@_first
def _compiled_optimizer_step(s: Scene) -> None:
    s.optimizer.step = torch.compile(s.optimizer.step, backend="eager")


@_before
def _compiled_by_aot_autograd(s: Scene) -> None:
    s.model = torch.compile(s.model, backend="aot_eager")


# Copies and files


@_after
def _deep_copy(s: Scene) -> None:
    copy.deepcopy(s.model)(torch.zeros(1, 3, dtype=torch.long))


@_after
def _averaged_model(s: Scene) -> None:
    s.kept.setdefault("average", AveragedModel(s.model)).update_parameters(s.model)


@_after
def _save_whole_model(s: Scene) -> None:
    file = io.BytesIO()
    torch.save(s.model, file)
    file.seek(0)
    torch.load(file, weights_only=False)(torch.zeros(1, 3, dtype=torch.long))


@_after
def _pickle(s: Scene) -> None:
    pickle.loads(pickle.dumps(s.model))


@_after
def _save_state_at_every_step(s: Scene) -> None:
    torch.save({"model": s.model.state_dict(), "optimizer": s.optimizer.state_dict()}, s.folder / "state.pt")
    state = torch.load(s.folder / "state.pt", weights_only=True)
    s.model.load_state_dict(state["model"])
    s.optimizer.load_state_dict(state["optimizer"])


@_after
def _assign_state(s: Scene) -> None:
    if s.number == 2:
        s.model.load_state_dict(copy.deepcopy(s.model.state_dict()), assign=True)


@_after
def _copied_optimizer(s: Scene) -> None:
    copy.deepcopy(s.optimizer)


@_after
def _shared_memory(s: Scene) -> None:
    s.model.share_memory()


# The model changes


@_after
def _prune(s: Scene) -> None:
    if s.number == 2:
        prune.l1_unstructured(s.model.up, "weight", 0.3)


@_after
def _prune_and_remove(s: Scene) -> None:
    if s.number == 2:
        prune.random_unstructured(s.model.up, "weight", 0.0)
    if s.number == 4:
        prune.remove(s.model.up, "weight")


@_after
def _reshape_in_place(s: Scene) -> None:
    if s.number == 2:
        s.model.up, s.model.down = nn.Linear(8, 12), nn.Linear(12, 8)
        for p in (*s.model.up.parameters(), *s.model.down.parameters()):
            p.data = torch.full_like(p, 0.1)
        s.optimizer.add_param_group({"params": [*s.model.up.parameters(), *s.model.down.parameters()]})


@_after
def _module_swapped(s: Scene) -> None:
    if s.number == 2:
        torch.manual_seed(9)
        s.model.up = nn.Linear(8, 16)
        s.optimizer.add_param_group({"params": list(s.model.up.parameters())})
        torch.manual_seed(10)


@_after
def _module_added(s: Scene) -> None:
    if s.number == 2:
        s.model.extra = nn.Linear(2, 2)


@_after
def _forward_replaced(s: Scene) -> None:
    if s.number == 2:
        former = s.model.forward
        s.model.forward = lambda x: former(x)


@_after
def _weight_norm(s: Scene) -> None:
    if s.number == 2:
        parametrizations.weight_norm(s.model.up)
        s.optimizer.add_param_group({"params": list(s.model.up.parametrizations.parameters())})


@_before
def _spectral_norm(s: Scene) -> None:
    parametrizations.spectral_norm(s.model.up)
    s.optimizer = torch.optim.SGD(s.model.parameters(), lr=0.05)


@_after
def _frozen_all(s: Scene) -> None:
    if s.number == 2:
        for p in s.model.embedding.parameters():
            p.requires_grad_(False)


@_after
def _toggled_gradients(s: Scene) -> None:
    s.model.up.requires_grad_(s.number % 2 == 0)


@_after
def _moved_to_double(s: Scene) -> None:
    if s.number == 2:
        s.model.double()
        s.optimizer.state.clear()


@_after
def _moved_to_half_and_back(s: Scene) -> None:
    s.model.bfloat16().float()


@_after
def _tied(s: Scene) -> None:
    if s.number == 2:
        s.model.head.weight = s.model.embedding.weight


@_after
def _evaluation_mode(s: Scene) -> None:
    s.model.train(s.number % 2 == 0)


@_after
def _parameters_written_to(s: Scene) -> None:
    with torch.no_grad():
        s.model.head.weight.clamp_(-0.2, 0.2)


@_after
def _data_written_to(s: Scene) -> None:
    s.model.head.weight.data *= 0.99


@_after
def _not_finite(s: Scene) -> None:
    if s.number == 3:
        s.model.head.weight.data[0, 0] = torch.nan


@_after
def _hooks_cleared(s: Scene) -> None:
    for module in s.model.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()


@_after
def _optimizer_hooks_cleared(s: Scene) -> None:
    s.optimizer._optimizer_step_pre_hooks.clear()
    s.optimizer._optimizer_step_post_hooks.clear()


@_after
def _attributes_deleted(s: Scene) -> None:
    for name in [name for name in vars(s.model) if name.startswith("_kept")]:
        delattr(s.model, name)


# The optimizer changes


@_after
def _group_added(s: Scene) -> None:
    if s.number == 2:
        s.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "lr": 0.1})


@_after
def _group_removed(s: Scene) -> None:
    if s.number == 2:
        s.optimizer.param_groups[0]["params"] = s.optimizer.param_groups[0]["params"][:-2]


@_after
def _rate_is_a_tensor(s: Scene) -> None:
    s.optimizer.param_groups[0]["lr"] = torch.tensor(0.01)


@_after
def _rate_is_gone_to_zero(s: Scene) -> None:
    s.optimizer.param_groups[0]["lr"] = 0.0


@_after
def _state_cleared(s: Scene) -> None:
    s.optimizer.state.clear()


@_after
def _optimizer_replaced(s: Scene) -> None:
    if s.number == 2:
        s.optimizer = torch.optim.Adam(s.model.parameters(), lr=1e-3)


@_after
def _two_steps(s: Scene) -> None:
    s.optimizer.step()


@_after
def _gradients_cleared_before(s: Scene) -> None:
    s.optimizer.zero_grad()


@_after
def _step_without_gradients(s: Scene) -> None:
    s.optimizer.zero_grad()
    s.optimizer.step()


@_after
def _failing_step(s: Scene) -> None:
    def closure() -> float:
        raise ArithmeticError

    with contextlib.suppress(ArithmeticError):
        s.optimizer.step(closure)


@_after
def _failing_forward(s: Scene) -> None:
    with contextlib.suppress(IndexError):
        s.model(torch.full((1, 2), 99))


@_after
def _failing_backward(s: Scene) -> None:
    out = s.model(torch.zeros(1, 2, dtype=torch.long)).sum()
    out.backward(retain_graph=False)
    with contextlib.suppress(RuntimeError):
        out.backward()
    s.model.zero_grad()


# Losses and inputs


@_before
def _vector_loss(s: Scene) -> None:
    s.step_loss = lambda loss: loss.detach().expand(7)


@_before
def _loss_of_words(s: Scene) -> None:
    s.step_loss = lambda loss: "not a number"


@_before
def _loss_of_nothing(s: Scene) -> None:
    s.step_loss = lambda loss: torch.zeros(0)


@_before
def _loss_of_a_dictionary(s: Scene) -> None:
    s.step_loss = lambda loss: {"loss": loss}


@_before
def _submodules_called_alone(s: Scene) -> None:
    s.loss_of = lambda model, x: model.head(model.embedding(x)).square().mean()


@_before
def _forward_called_by_name(s: Scene) -> None:
    s.loss_of = lambda model, x: F.cross_entropy(model.forward(x), x.flatten())


@_before
def _called_under_vmap(s: Scene) -> None:
    s.loss_of = lambda model, x: torch.func.vmap(lambda one: model(one[None]), randomness="same")(x).square().mean()


@_before
def _functional_call(s: Scene) -> None:
    s.loss_of = lambda model, x: torch.func.functional_call(model, dict(model.named_parameters()), (x,)).square().mean()


@_before
def _jagged_inputs(s: Scene) -> None:
    class Jagged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

        def forward(self, x: Tensor) -> Tensor:
            rows = torch.nested.nested_tensor([x[0], x[1, :2]], layout=torch.jagged)
            return self.head(F.relu(self.embedding(rows))).values()

    s.model = Jagged()
    s.optimizer = torch.optim.SGD(s.model.parameters(), lr=0.05)
    s.loss_of = lambda model, x: model(x).square().mean()


@_before
def _complex_parameters(s: Scene) -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.randn(5, 5, dtype=torch.complex64))
            self.second = nn.Parameter(torch.randn(5, 5, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return (x.to(torch.complex64) @ self.first @ self.second).abs()

    s.model = Complex()
    s.optimizer = torch.optim.Adam(s.model.parameters(), lr=0.01)
    s.loss_of = lambda model, x: model(x).square().mean()


@_before
def _conditional(s: Scene) -> None:
    class Conditional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            y = x.float()
            chosen = self.a(y) if float(y.sum()) > 60 else self.b(y)
            return torch.relu(chosen)

    s.model = Conditional()
    s.optimizer = torch.optim.SGD(s.model.parameters(), lr=0.001)
    s.loss_of = lambda model, x: model(x).square().mean()


@_before
def _torch_cond(s: Scene) -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            y = x.float()
            return torch.cond(y.sum() > 60, lambda one: self.a(one), lambda one: self.b(one), (y,))

    s.model = Branching()
    s.optimizer = torch.optim.SGD(s.model.parameters(), lr=0.001)
    s.loss_of = lambda model, x: model(x).square().mean()


@_before
def _sparse_gradients(s: Scene) -> None:
    s.model.embedding = nn.Embedding(11, 8, sparse=True)
    s.optimizer = torch.optim.SGD(s.model.parameters(), lr=0.05)


@_before
def _dictionary_output(s: Scene) -> None:
    inner = s.model

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor, *, flag: bool = False, **more: Any) -> dict[str, Any]:
            return {"logits": self.inner(x), "flag": flag, "text": "words"}

    s.model = Wrapped()
    s.loss_of = lambda model, x: F.cross_entropy(model(x, flag=True, other=[1])["logits"], x.flatten())


@_before
def _generator_input(s: Scene) -> None:
    inner = s.model

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, batches: Iterator[Tensor]) -> Tensor:
            return self.inner(next(batches))

    s.model = Wrapped()
    s.loss_of = lambda model, x: model(iter([x, x, x, x])).square().mean()


@_before
def _counting_model(s: Scene) -> None:
    inner = s.model

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = inner, 0
            self.seen: list[int] = []

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen.append(self.calls)
            return self.inner(x) * (1 + 0.1 * self.calls + 0.01 * len(self.seen))

    s.model = Counting()


@_before
def _drawing_from_python_and_numpy(s: Scene) -> None:
    inner = s.model

    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * (1 + random.random())

    s.model = Drawing()


@_before
def _many_modules(s: Scene) -> None:
    s.model.many = nn.ModuleList(nn.Identity() for _ in range(10_000))


@_before
def _two_models_of_one_optimizer(s: Scene) -> None:
    s.kept["other"] = nn.Linear(3, 3)
    s.optimizer.add_param_group({"params": list(s.kept["other"].parameters())})


@_before
def _data_parallel(s: Scene) -> None:
    s.model = nn.DataParallel(s.model)


@_before
def _recursion(s: Scene) -> None:
    inner = s.model

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor, depth: int = 0) -> Tensor:
            return self(x, depth + 1) if depth < 20 else self.inner(x)

    s.model = Deep()


@_before
def _inference_mode_between(s: Scene) -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        with torch.inference_mode():
            model(x)
        return F.cross_entropy(model(x), x.flatten())

    s.loss_of = loss


@_before
def _anomaly_mode(s: Scene) -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.autograd.set_detect_anomaly(True):
                return F.cross_entropy(model(x), x.flatten())

    s.loss_of = loss


@_before
def _deterministic_mode(s: Scene) -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        torch.use_deterministic_algorithms(True)
        try:
            return F.cross_entropy(model(x), x.flatten())
        finally:
            torch.use_deterministic_algorithms(False)

    s.loss_of = loss


# The monitor is mistreated


@_after
def _closed_in_mid_run(s: Scene) -> None:
    if s.monitor is not None and s.number == 2:
        s.monitor.close()


@_after
def _closed_at_every_step(s: Scene) -> None:
    if s.monitor is not None:
        s.monitor.close()


@_after
def _stepped_twice(s: Scene) -> None:
    if s.monitor is not None:
        s.monitor.step()


@_after
def _asked_everything(s: Scene) -> None:
    if s.monitor is not None:
        str(s.monitor), repr(s.monitor), s.monitor.state, s.monitor.laws, s.monitor.ledger(), s.monitor.errors()
        s.monitor.memory(), s.monitor.bounds(), s.monitor.decay(), s.monitor.angular_momenta(), s.monitor._repr_html_()


@_after
def _a_second_monitor(s: Scene) -> None:
    if s.monitor is not None and s.number == 1:
        s.kept["second"] = Monitor(s.model, s.optimizer)


@_after
def _dropped(s: Scene) -> None:
    if s.number == 2:
        s.monitor = None
        gc.collect()


@_after
def _clipping_told_of_at_a_strange_time(s: Scene) -> None:
    if s.monitor is not None:
        s.monitor.before_clipping()


@_after
def _state_saved(s: Scene) -> None:
    if s.monitor is not None:
        s.monitor.state_dict()


@_before
def _readings_that_fail(s: Scene) -> None:
    def fail() -> float:
        raise ArithmeticError

    s.options["config"] = MonitorConfig(gauges={"bad": fail, "words": lambda: "x"})  # type: ignore[dict-item, return-value]


@_before
def _alarm_rules_that_fail(s: Scene) -> None:
    def rule(record: Any) -> Iterator[Any]:
        raise ArithmeticError
        yield

    s.options["config"] = MonitorConfig(alarms=(rule,))


# Stores


@_before
def _store_in_a_file(s: Scene) -> None:
    (s.folder / "file").write_text("x")
    s.options["sinks"] = s.folder / "file" / "runs.db"


@_before
def _store_that_is_no_database(s: Scene) -> None:
    (s.folder / "runs.db").write_text("not a database" * 100)
    s.options["sinks"] = s.folder / "runs.db"


@_before
def _store_that_is_read_only(s: Scene) -> None:
    path = s.folder / "runs.jsonl"
    path.mkdir()
    s.options["sinks"] = path


@_before
def _store_locked_by_another(s: Scene) -> None:
    path = s.folder / "runs.db"
    s.kept["lock"] = db = sqlite3.connect(path, isolation_level=None)
    db.execute("create table x (y)")
    db.execute("begin exclusive")
    s.options["sinks"] = path


@_before
def _store_on_a_full_device(s: Scene) -> None:
    s.options["sinks"] = s.folder / "runs.jsonl"
    (s.folder / "runs.jsonl").symlink_to("/dev/full")


@_after
def _store_deleted(s: Scene) -> None:
    for path in s.folder.glob("deleted.*"):
        path.unlink()


@_before
def _store_to_be_deleted(s: Scene) -> None:
    s.options["sinks"] = s.folder / "deleted.db"


# The process


@_after
def _garbage_collected(s: Scene) -> None:
    gc.collect()


@_after
def _signals(s: Scene) -> None:
    former = signal.signal(signal.SIGUSR1, lambda *_: None)
    os.kill(os.getpid(), signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, former)


@_after
def _forked(s: Scene) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


@_after
def _clock_jumps(s: Scene) -> None:
    if "clock" not in s.kept:
        s.kept["clock"] = former = time.perf_counter
        time.perf_counter = lambda: former() + random.Random(s.number).uniform(-1e6, 1e6)
    if s.number == 5:
        time.perf_counter = s.kept["clock"]


@_after
def _threads(s: Scene) -> None:
    def call() -> None:
        with torch.no_grad():
            s.model(torch.zeros(1, 3, dtype=torch.long))

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@_after
def _directory_removed(s: Scene) -> None:
    if s.number == 2:
        with tempfile.TemporaryDirectory() as gone:
            here = Path.cwd()
            os.chdir(gone)
        os.chdir(here)


@_after
def _random_state_changed(s: Scene) -> None:
    torch.manual_seed(s.number)


@_after
def _default_type_changed(s: Scene) -> None:
    if s.number == 2:
        torch.set_default_dtype(torch.float64)
    if s.number == 4:
        torch.set_default_dtype(torch.float32)


@_after
def _gradients_disabled_between(s: Scene) -> None:
    with torch.no_grad():
        s.model(torch.zeros(2, 3, dtype=torch.long))


@_before
def _warnings_are_errors(s: Scene) -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return F.cross_entropy(model(x), x.flatten())

    s.loss_of = loss


ACTS = {**BEFORE, **FIRST, **AFTER}


def run(name: str, folder: Path, *, watched: bool, steps: int = 6) -> tuple[list[Tensor], Monitor | None]:
    """Train with an act of violence; return every loss, and the monitor."""
    if "compiled" in name:
        torch._dynamo.reset()
    torch.manual_seed(0)
    random.seed(0)
    model = Net()
    s = Scene(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), folder)
    if name in BEFORE:
        BEFORE[name](s)
    if watched:
        s.monitor = Monitor(s.model, s.optimizer, **s.options)
    monitor = s.monitor
    if name in FIRST:
        FIRST[name](s)
    torch.manual_seed(1)
    losses = []
    try:
        for s.number in range(steps):
            loss = s.loss_of(s.model, torch.randint(11, (3, 5)))
            s.optimizer.zero_grad()
            loss.backward()
            s.optimizer.step()
            if s.monitor is not None:
                s.monitor.step(loss=s.step_loss(loss))
            if name in AFTER:
                AFTER[name](s)
            losses.append(loss.detach().clone())
    finally:
        if "clock" in s.kept:
            time.perf_counter = s.kept["clock"]
        if "lock" in s.kept:
            s.kept["lock"].close()
        torch.set_default_dtype(torch.float32)
    if s.monitor is not None:
        s.monitor.close()
    return losses, monitor


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    """Whether losses are equal to the bit; what is not a number equals itself."""
    pairs: Iterator[tuple[Tensor, Tensor]] = zip(first, second, strict=True)
    return all(torch.equal(a, b) or bool(a.isnan() and b.isnan()) for a, b in pairs)
