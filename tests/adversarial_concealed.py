"""Models whose function depends on what no operation on tensors shows: the clock, files, counters, chance, the data.

Each computes one thing when its laws are read, and another in one of its other *worlds*: at another time, with other
contents of a file, after more calls, for other values of the inputs. A law that is listed as read off the program has
to hold in all of them; one that holds in this world only is assumed. Nothing is proved of any of them.
`concealed()` names all of them with their worlds. The rules of inference were not read for writing them.
"""

from __future__ import annotations

import array
import collections
import contextlib
import contextvars
import ctypes
import datetime
import enum
import functools
import gc
import getpass
import io
import itertools
import math
import operator
import os
import pathlib
import pickle
import queue
import random
import secrets
import shelve
import socket
import sqlite3
import tempfile
import threading
import time
import types
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

World = Callable[[Any], AbstractContextManager[Any]]
"""What holds while a model is called: a clock that is set, a state that was reached."""


@dataclass
class Concealed:
    """A model, the inputs its laws are read with, worlds in which it may compute something else, and other inputs."""

    model: nn.Module
    inputs: tuple[Any, ...]
    worlds: list[World] = field(default_factory=list)
    others: list[tuple[Any, ...]] = field(default_factory=list)


def _rows(x: Tensor) -> Any:
    array: Any = x.detach().numpy()
    return memoryview(array).tolist()


def _drawn(draw: Callable[[], Any], model: Any, x: Tensor) -> bool:
    return bool(draw())


class Branching(nn.Module):
    """relu between two maps, beside a second pair that reads the first pair's weights in another way."""

    n: Any

    def __init__(self, decide: Callable[[Any, Tensor], Any] | None = None, **attributes: Any) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(4, 5))
        self.b = nn.Parameter(torch.randn(5, 2))
        self.c = nn.Parameter(torch.randn(5))
        self.decide = decide
        for name, value in attributes.items():
            setattr(self, name, value)

    def usual(self, x: Tensor) -> Tensor:
        return (x @ self.a).relu() @ self.b

    def other(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.a + self.c) @ self.b

    def forward(self, x: Tensor) -> Tensor:
        assert self.decide is not None
        return self.other(x) if self.decide(self, x) else self.usual(x)


class Computing(Branching):
    """The same parameters under a formula of its own."""

    def __init__(self, formula: Callable[..., Any], **attributes: Any) -> None:
        super().__init__(None, **attributes)
        self.formula = formula

    def forward(self, *inputs: Any) -> Any:
        return self.formula(self, *inputs)


def _x() -> Tensor:
    return torch.randn(6, 4) * 0.5


_BIG = [(torch.randn(6, 4) + 8,), (torch.randn(6, 4) - 8,), (torch.randn(6, 4) * 30,)]
"""Inputs of other sizes and signs."""

FILE = pathlib.Path(tempfile.gettempdir()) / f"conserved_concealed_{os.getpid()}"
STEP = 0
SETTINGS: dict[str, Any] = {"other": False}
LOCAL = threading.local()
CONTEXT: contextvars.ContextVar[bool] = contextvars.ContextVar("other", default=False)
NAMESPACE = types.SimpleNamespace(step=0)


class Phase(enum.Enum):
    FIRST = 1
    LATER = 2


class Shared:
    calls = 0


@dataclass
class Progress:
    step: int = 0
    phase: Phase = Phase.FIRST
    seen: list[int] = field(default_factory=list)


@contextlib.contextmanager
def _after(model: Any, calls: int = 12) -> Iterator[None]:
    """Reach the state that a few calls leave behind."""
    x = torch.randn(6, 4, dtype=model.a.dtype)
    for _ in range(calls):
        model(x)
    yield


def _calls(number: int) -> World:
    return lambda model: _after(model, number)


def _later(name: str, value: Any) -> World:
    return lambda _: mock.patch(name, value)


@contextlib.contextmanager
def _environment(_: Any) -> Iterator[None]:
    with mock.patch.dict(os.environ, {"CONCEALED": "1"}):
        yield


@contextlib.contextmanager
def _file(_: Any) -> Iterator[None]:
    FILE.write_text("other")
    try:
        yield
    finally:
        FILE.unlink()


def _chance(name: str) -> list[World]:
    """Many worlds of a generator: some of them decide the other way."""
    return [lambda _: nullcontext()] * 24


def outside() -> Iterator[tuple[str, Concealed]]:
    """Reads of the clock, of the environment, of files, and of the process."""
    far = 4e9
    readers: dict[str, tuple[Callable[[Any, Any], Any], list[World]]] = {
        "time": (lambda m, x: time.time() > 3e9, [_later("time.time", lambda: far)]),
        "time in nanoseconds": (lambda m, x: time.time_ns() > 3e18, [_later("time.time_ns", lambda: int(far * 1e9))]),
        "monotonic": (lambda m, x: time.monotonic() > 1e9, [_later("time.monotonic", lambda: far)]),
        "performance counter": (lambda m, x: time.perf_counter() > 1e9, [_later("time.perf_counter", lambda: far)]),
        "local time": (
            lambda m, x: time.localtime().tm_year > 2060,
            [_later("time.localtime", lambda: types.SimpleNamespace(tm_year=2090))],
        ),
        "text of the time": (lambda m, x: time.strftime("%Y") > "2060", [_later("time.strftime", lambda _: "2090")]),
        "date": (
            lambda m, x: datetime.datetime.now().year > 2060,
            [_later("datetime.datetime", mock.Mock(now=lambda: types.SimpleNamespace(year=2090)))],
        ),
        "today": (
            lambda m, x: datetime.date.today().year > 2060,
            [_later("datetime.date", mock.Mock(today=lambda: types.SimpleNamespace(year=2090)))],
        ),
        "random bytes of the system": (lambda m, x: os.urandom(1)[0] < 64, _chance("urandom")),
        "secrets": (lambda m, x: secrets.randbelow(4) == 0, _chance("secrets")),
        "a unique id": (lambda m, x: uuid.uuid4().int % 4 == 0, _chance("uuid")),
        "environment": (lambda m, x: "CONCEALED" in os.environ, [_environment]),
        "environment by get": (lambda m, x: os.environ.get("CONCEALED") == "1", [_environment]),
        "environment by getenv": (lambda m, x: bool(os.getenv("CONCEALED")), [_environment]),
        "a file that exists": (lambda m, x: FILE.exists(), [_file]),
        "a file by os.path": (lambda m, x: os.path.exists(FILE), [_file]),
        "contents of a file": (lambda m, x: _contents() == "other", [_file]),
        "names in a folder": (lambda m, x: FILE.name in os.listdir(FILE.parent), [_file]),
        "number of the process": (lambda m, x: os.getpid() < 0, [_later("os.getpid", lambda: -1)]),
        "name of the machine": (
            lambda m, x: socket.gethostname() == "other",
            [_later("socket.gethostname", lambda: "other")],
        ),
        "name of the user": (lambda m, x: getpass.getuser() == "other", [_later("getpass.getuser", lambda: "other")]),
        "number of threads": (
            lambda m, x: threading.active_count() > 900,
            [_later("threading.active_count", lambda: 999)],
        ),
        "collected objects": (lambda m, x: gc.get_count()[0] < 0, [_later("gc.get_count", lambda: (-1, 0, 0))]),
        "load": (lambda m, x: os.getloadavg()[0] > 1e6, [_later("os.getloadavg", lambda: (1e7, 0, 0))]),
        "processor time": (lambda m, x: time.process_time() > 1e9, [_later("time.process_time", lambda: far)]),
        "a row of a database": (lambda m, x: _database() > 2060, [_later(f"{__name__}._year", lambda: 2090)]),
        "working folder": (lambda m, x: os.getcwd() == "/other", [_later("os.getcwd", lambda: "/other")]),
        "state of torch's random numbers": (
            lambda m, x: int(torch.get_rng_state()[16]) % 2 == 0,
            [_seed(s) for s in range(8)],
        ),
        "seed of torch": (
            lambda m, x: torch.initial_seed() == 1234,
            [lambda _: _seeded(1234)],
        ),
    }
    for name, (decide, worlds) in readers.items():
        yield f"outside: {name}", Concealed(Branching(decide), (_x(),), worlds)


def _contents() -> str:
    try:
        with open(FILE) as stream:
            return stream.read()
    except FileNotFoundError:
        return ""


def _year() -> int:
    return 2026


def _database() -> int:
    with contextlib.closing(sqlite3.connect(":memory:")) as base:
        base.execute("create table t (year int)")
        base.execute("insert into t values (?)", (_year(),))
        return int(base.execute("select year from t").fetchone()[0])


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def _seed(seed: int) -> World:
    return lambda _: _seeded(seed)


def _global_counter(m: Any, x: Tensor) -> bool:
    global STEP
    STEP += 1
    return STEP > 40


def _default_list(m: Any, x: Tensor, calls: list[int] = []) -> bool:  # noqa: B006
    calls.append(1)
    return len(calls) > 40


def _closure_counter() -> Callable[[Any, Tensor], bool]:
    calls = 0

    def decide(m: Any, x: Tensor) -> bool:
        nonlocal calls
        calls += 1
        return calls > 40

    return decide


def _closure_list() -> Callable[[Any, Tensor], bool]:
    calls: list[int] = []

    def decide(m: Any, x: Tensor) -> bool:
        calls.append(len(calls))
        return len(calls) > 40

    return decide


def _function_attribute(m: Any, x: Tensor) -> bool:
    _function_attribute.calls = getattr(_function_attribute, "calls", 0) + 1  # type: ignore[attr-defined]
    return _function_attribute.calls > 40  # type: ignore[attr-defined]


def _generator() -> Iterator[bool]:
    yield from itertools.repeat(False, 40)
    yield from itertools.repeat(True)


def _set_later(m: Any, key: str, value: Any) -> Any:
    setattr(m, key, value)
    return value


@functools.cache
def _cached(key: int) -> list[int]:
    return []


def _cached_list(m: Any, x: Tensor) -> bool:
    _cached(0).append(1)
    return len(_cached(0)) > 40


def _of_class(m: Any, x: Tensor) -> bool:
    Shared.calls += 1
    return Shared.calls > 40


def _of_own_class(m: Any, x: Tensor) -> bool:
    type(m).calls = getattr(type(m), "calls", 0) + 1
    return bool(type(m).calls > 40)


def _thread(m: Any, x: Tensor) -> bool:
    LOCAL.calls = getattr(LOCAL, "calls", 0) + 1
    return bool(LOCAL.calls > 40)


_SEEN: list[int] = []
COUNTED: contextvars.ContextVar[int] = contextvars.ContextVar("counted", default=0)


def _context(m: Any, x: Tensor) -> bool:
    COUNTED.set(COUNTED.get() + 1)
    return COUNTED.get() > 40


def _weak(m: Any, x: Tensor) -> bool:
    m.references = [reference for reference in m.references if reference() is not None]
    m.references.append(weakref.ref(m))
    return len(m.references) > 40


class OwnCount(Branching):
    """Counts its calls in an attribute of its class."""

    calls = 0


def counted() -> Iterator[tuple[str, Concealed]]:
    """State of Python's that calls change: it decides after forty calls."""
    pre: list[int] = []

    def hooked(module: nn.Module, args: Any) -> None:
        pre.append(1)

    kinds: dict[str, tuple[Callable[[Any, Any], Any], dict[str, Any]]] = {
        "global": (_global_counter, {}),
        "default argument": (_default_list, {}),
        "closure": (_closure_counter(), {}),
        "list in a closure": (_closure_list(), {}),
        "attribute of a function": (_function_attribute, {}),
        "attribute": (lambda m, x: _set_later(m, "n", m.n + 1) > 40, {"n": 0}),
        "list": (lambda m, x: m.n.append(1) or len(m.n) > 40, {"n": []}),
        "dictionary": (lambda m, x: m.n.update({len(m.n): 1}) or len(m.n) > 40, {"n": {}}),
        "count in a dictionary": (lambda m, x: operator.setitem(m.n, 0, m.n[0] + 1) or m.n[0] > 40, {"n": {0: 0}}),
        "set": (lambda m, x: m.n.add(len(m.n)) or len(m.n) > 40, {"n": set()}),
        "deque": (lambda m, x: m.n.append(1) or len(m.n) > 40, {"n": collections.deque()}),
        "counter": (lambda m, x: m.n.update(["call"]) or m.n["call"] > 40, {"n": collections.Counter()}),
        "object": (lambda m, x: _set_later(m.n, "step", m.n.step + 1) > 40, {"n": Progress()}),
        "list of an object": (lambda m, x: m.n.seen.append(1) or len(m.n.seen) > 40, {"n": Progress()}),
        "object in a dictionary": (
            lambda m, x: _set_later(m.n["p"], "step", m.n["p"].step + 1) > 40,
            {"n": {"p": Progress()}},
        ),
        "enumeration": (
            lambda m, x: (
                (m.n.seen.append(1), len(m.n.seen) > 40 and _set_later(m.n, "phase", Phase.LATER))
                and m.n.phase is Phase.LATER
            ),
            {"n": Progress()},
        ),
        "text": (lambda m, x: len(_set_later(m, "n", m.n + "x")) > 40, {"n": ""}),
        "bytes": (lambda m, x: m.n.extend(b"x") or len(m.n) > 40, {"n": bytearray()}),
        "tuple": (lambda m, x: len(_set_later(m, "n", (*m.n, 1))) > 40, {"n": ()}),
        "iterator of counts": (lambda m, x: next(m.n) > 40, {"n": itertools.count()}),
        "iterator of a list": (lambda m, x: next(m.n) > 40, {"n": iter(list(range(10_000)))}),
        "iterator of a range": (lambda m, x: next(m.n) > 40, {"n": iter(range(10_000))}),
        "cycle": (lambda m, x: next(m.n), {"n": itertools.cycle([False] * 11 + [True])}),
        "generator": (lambda m, x: next(m.n), {"n": _generator()}),
        "iterator of pairs": (lambda m, x: next(m.n)[0] > 40, {"n": enumerate(itertools.repeat(0))}),
        "array": (lambda m, x: m.n.append(1) or len(m.n) > 40, {"n": array.array("i")}),
        "array of NumPy": (lambda m, x: np.add(m.n, 1, out=m.n)[0] > 40, {"n": np.zeros(1)}),
        "number of ctypes": (lambda m, x: _set_later(m.n, "value", m.n.value + 1) > 40, {"n": ctypes.c_int(0)}),
        "queue": (lambda m, x: m.n.put(1) or m.n.qsize() > 40, {"n": queue.Queue()}),
        "text stream": (lambda m, x: m.n.write("x") and m.n.tell() > 40, {"n": io.StringIO()}),
        "generator of Python's random numbers": (lambda m, x: m.n.random() < 0.2, {"n": random.Random(3)}),
        "generator of NumPy's random numbers": (lambda m, x: m.n.random() < 0.2, {"n": np.random.default_rng(3)}),
        "generator of NumPy's of old": (lambda m, x: m.n.rand() < 0.2, {"n": np.random.RandomState(3)}),
        "cached list": (_cached_list, {}),
        "class": (_of_class, {}),
        "own class": (_of_own_class, {}),
        "thread": (_thread, {}),
        "context": (_context, {}),
        "namespace": (lambda m, x: _set_later(NAMESPACE, "step", NAMESPACE.step + 1) > 40, {}),
        "module of Python": (lambda m, x: _set_later(math, "calls", getattr(math, "calls", 0) + 1) > 40, {}),
        "references": (_weak, {"references": []}),
        "bound method": (
            lambda m, x: m.n.append(1) or m.count() > 40,
            {"n": _SEEN, "count": _SEEN.__len__},
        ),
        "partial": (functools.partial(lambda n, m, x: n.append(1) or len(n) > 40, []), {}),
        "tensor": (lambda m, x: bool(m.n.add_(1) > 40), {"n": torch.zeros(())}),
        "tensor in a list": (lambda m, x: bool(m.n[0].add_(1) > 40), {"n": [torch.zeros(())]}),
        "tensor compared by its hash": (lambda m, x: m.n.add_(1).sum().item() > 40, {"n": torch.zeros(2)}),
        "file": (lambda m, x: _counted_file() > 40, {}),
        "shelf": (lambda m, x: _counted_shelf() > 40, {}),
        "environment": (lambda m, x: _counted_environment() > 40, {}),
    }
    for name, (decide, kept_) in kinds.items():
        model = (OwnCount if name == "own class" else Branching)(decide, **kept_)
        yield f"counted: {name}", Concealed(model, (_x(),), [lambda m: _after(m, 60)])

    hook_model = Branching(lambda m, x: len(pre) > 40)
    hook_model.register_forward_pre_hook(hooked)
    yield "counted: hook", Concealed(hook_model, (_x(),), [lambda m: _after(m, 60)])

    class Swapping(Branching):
        def forward(self, x: Tensor) -> Tensor:
            self.n.append(1)
            if len(self.n) > 40:
                self.forward = self.other  # type: ignore[method-assign]
            return self.usual(x)

    yield "counted: forward replaced", Concealed(Swapping(None, n=[]), (_x(),), [lambda m: _after(m, 60)])

    class Submodules(Branching):
        def __init__(self) -> None:
            super().__init__(None)
            self.act: nn.Module = nn.ReLU()
            self.n = 0

        def forward(self, x: Tensor) -> Tensor:
            self.n += 1
            if self.n > 40:
                self.act = nn.Tanh()
            return self.act(x @ self.a) @ self.b

    yield "counted: module replaced", Concealed(Submodules(), (_x(),), [lambda m: _after(m, 60)])

    class Frozen(Branching):
        def __init__(self) -> None:
            super().__init__(None)
            self.n = 0

        def forward(self, x: Tensor) -> Tensor:
            self.n += 1
            a = self.a.detach() if self.n > 40 else self.a
            return (x @ a).relu() @ self.b

    yield "counted: frozen later", Concealed(Frozen(), (_x(),), [lambda m: _after(m, 60)])

    class Warm(Branching):
        def __init__(self) -> None:
            super().__init__(None)
            self.n = 0

        def forward(self, x: Tensor) -> Tensor:
            self.n += 1
            return (x @ self.a + max(0, self.n - 40) * self.c).relu() @ self.b

    yield "counted: warmed up", Concealed(Warm(), (_x(),), [lambda m: _after(m, 60)])

    class Toggled(Branching):
        def __init__(self) -> None:
            super().__init__(None)
            self.n = False

        def forward(self, x: Tensor) -> Tensor:
            self.n = not self.n
            return self.usual(x) if self.n else self.other(x)

    yield "counted: toggled", Concealed(Toggled(), (_x(),), [lambda m: _after(m, 1), lambda m: _after(m, 2)])

    class Alternating(Branching):
        def __init__(self) -> None:
            super().__init__(None)
            self.turn = collections.deque([0, 1, 2])

        def forward(self, x: Tensor) -> Tensor:
            self.turn.rotate(1)
            h = x @ self.a
            return (h.relu() if self.turn[0] else h.tanh()) @ self.b

    yield "counted: rotated", Concealed(Alternating(), (_x(),), [_calls(k) for k in (1, 2, 3)])


def _counted_file() -> int:
    path = FILE.with_suffix(".count")
    number = int(path.read_text()) + 1 if path.exists() else 1
    path.write_text(str(number))
    return number


def _counted_shelf() -> int:
    with shelve.open(str(FILE.with_suffix(".shelf"))) as folder:
        folder["n"] = folder.get("n", 0) + 1
        return int(folder["n"])


def _counted_environment() -> int:
    os.environ["CONCEALED_COUNT"] = str(int(os.environ.get("CONCEALED_COUNT", "0")) + 1)
    return int(os.environ["CONCEALED_COUNT"])


def chances() -> Iterator[tuple[str, Concealed]]:
    """Random tensors of every operator that draws them, read by Python or by the program."""
    half = {
        "bernoulli of a constant": lambda: torch.bernoulli(torch.tensor(0.5)),
        "bernoulli in place": lambda: torch.zeros(()).bernoulli_(0.5),
        "uniform in place": lambda: torch.zeros(()).uniform_() > 0.5,
        "normal in place": lambda: torch.zeros(()).normal_() > 0,
        "exponential in place": lambda: torch.zeros(()).exponential_() > 0.7,
        "geometric in place": lambda: torch.zeros(()).geometric_(0.5) > 1,
        "integers in place": lambda: torch.zeros((), dtype=torch.long).random_(2),
        "cauchy in place": lambda: torch.zeros(()).cauchy_() > 0,
        "log-normal in place": lambda: torch.zeros(()).log_normal_() > 1,
        "multinomial": lambda: torch.multinomial(torch.ones(2), 1)[0],
        "poisson": lambda: torch.poisson(torch.tensor(0.7)) > 0,
        "normal of constants": lambda: torch.normal(torch.zeros(()), torch.ones(())) > 0,
        "normal like": lambda: torch.randn_like(torch.zeros(())) > 0,
        "integers": lambda: torch.randint(2, ()),
        "permutation": lambda: torch.randperm(2)[0],
        "dropout of ones": lambda: F.dropout(torch.ones(()), 0.5) > 0,
        "feature dropout of ones": lambda: F.feature_alpha_dropout(torch.ones(1, 1), 0.5, True)[0, 0] > 0.9,
        "randomised leaky relu": lambda: F.rrelu(torch.tensor(-1.0), 0.0, 1.0, True) < -0.5,
        "binomial": lambda: torch.binomial(torch.ones(()), torch.tensor(0.5)),
        "gumbel": lambda: F.gumbel_softmax(torch.zeros(2), hard=True)[0],
        "own generator": lambda: torch.rand((), generator=GENERATOR) > 0.5,
        "dirichlet": lambda: torch._sample_dirichlet(torch.ones(2))[0] > 0.5,
        "gamma": lambda: torch._standard_gamma(torch.ones(())) > 0.7,
    }
    seeds: list[World] = [_seed(s) for s in range(12)]
    for name, draw in half.items():
        model = Branching(functools.partial(_drawn, draw))
        yield f"chance: {name} decides", Concealed(model, (_x(),), seeds)

    masks: dict[str, Callable[[], Tensor]] = {
        "bernoulli": lambda: torch.bernoulli(torch.full((5,), 0.5)),
        "bernoulli in place": lambda: torch.zeros(5).bernoulli_(0.5),
        "dropout of ones": lambda: F.dropout(torch.ones(5), 0.5),
        "integers": lambda: torch.randint(2, (5,)).float(),
        "integers in place": lambda: torch.zeros(5).random_(2),
        "poisson": lambda: torch.poisson(torch.full((5,), 0.5)),
        "multinomial": lambda: F.one_hot(torch.multinomial(torch.ones(5), 1), 5)[0].float(),
        "permutation": lambda: F.one_hot(torch.randperm(5)[0], 5).float(),
        "gumbel": lambda: F.gumbel_softmax(torch.zeros(5), hard=True),
        "geometric": lambda: (torch.zeros(5).geometric_(0.5) > 1).float(),
        "binomial": lambda: torch.binomial(torch.ones(5), torch.full((5,), 0.5)),
    }
    for name, draw in masks.items():
        yield (
            f"chance: {name} masks a bias",
            Concealed(Computing(lambda m, x, draw=draw: (x @ m.a + m.c * draw().to(x)).relu() @ m.b), (_x(),), seeds),
        )
        yield (
            f"chance: {name} masks before a tanh",
            Concealed(Computing(lambda m, x, draw=draw: torch.tanh((x @ m.a) * draw().to(x)) @ m.b), (_x(),), seeds),
        )
    yield (
        "chance: row of a table",
        Concealed(
            Computing(lambda m, x: (x @ m.a[torch.randint(4, (4,))]).tanh() @ m.b + m.c[torch.randint(5, ())]),
            (_x(),),
            seeds,
        ),
    )
    yield (
        "chance: multinomial row",
        Concealed(
            Computing(lambda m, x: (x @ m.a).tanh() @ m.b + m.c[torch.multinomial(torch.ones(5), 2)]), (_x(),), seeds
        ),
    )
    yield (
        "chance: slice of drawn length",
        Concealed(
            Computing(lambda m, x: (x @ m.a).tanh() @ m.b + m.c[: torch.zeros(()).random_(1, 5).int()].sum()),
            (_x(),),
            seeds,
        ),
    )


GENERATOR = torch.Generator().manual_seed(5)


def _raises(action: Callable[[], Any]) -> bool:
    try:
        action()
    except Exception:
        return True
    return False


def _halved(h: Tensor) -> Tensor:
    while h.norm() > 20:
        h = h / 2
    return h


def _matched(value: Any) -> bool:
    match value:
        case 0:
            return False
        case _:
            return True


def data() -> Iterator[tuple[str, Concealed]]:
    """Values of inputs that decide in ways of their own: which operations run, on which entries, how often."""
    readers: dict[str, Callable[[Any, Any], Any]] = {
        "comparison": lambda m, x: x.max() > 5,
        "negated": lambda m, x: not (x.max() <= 5),
        "and": lambda m, x: x.max() > 5 and x.min() > 0,
        "any of a list": lambda m, x: any(v > 5 for v in x.flatten()),
        "Python's maximum": lambda m, x: max(x.flatten()) > 5,
        "sorted by Python": lambda m, x: sorted(x[0])[-1] > 5,
        "integer": lambda m, x: int(x.abs().max()) > 5,
        "index": lambda m, x: operator.index(x.abs().max().long()) > 5,
        "rounded": lambda m, x: round(x.abs().max().item()) > 5,
        "floor": lambda m, x: math.floor(x.abs().max()) > 5,
        "in a list": lambda m, x: x.abs().max().long() in [6, 7, 8, 9, 10, 11, 40, 50, 60, 70, 80],
        "text": lambda m, x: f"{x.abs().max().item():.0f}" not in ("0", "1", "2", "3"),
        "key": lambda m, x: {0: False, 1: False, 2: False, 3: False}.get(int(x.abs().max()), True),
        "match": lambda m, x: _matched(int(x.abs().max()) // 5),
        "numpy": lambda m, x: np.abs(x.detach().numpy()).max() > 5,
        "asarray": lambda m, x: np.asarray(x.detach()).max() > 5,
        "array": lambda m, x: np.array(x.detach()).max() > 5,
        "dlpack": lambda m, x: np.from_dlpack(x.detach()).max() > 5,
        "to_dlpack": lambda m, x: torch.utils.dlpack.from_dlpack(x.detach().__dlpack__()).max() > 5,
        "list": lambda m, x: max(x.flatten().tolist()) > 5,
        "storage": lambda m, x: max(bytes(x.untyped_storage().tolist())) > 254 and x.storage()[0] > 5,
        "storage as a list": lambda m, x: max(x.storage().tolist()) > 5,
        "address": lambda m, x: ctypes.c_float.from_address(x.data_ptr()).value > 5,
        "pickle": lambda m, x: pickle.loads(pickle.dumps(x.detach())).max() > 5,
        "saved": lambda m, x: _saved(x.detach()).max() > 5,
        "memory view": lambda m, x: max(_rows(x)[0]) > 5,
        "copied": lambda m, x: __import__("copy").deepcopy(x.detach()).max() > 5,
        "equal": lambda m, x: torch.equal(x > 5, x.abs() > 5) and bool((x > 5).any()),
        "allclose": lambda m, x: not torch.allclose(x, x.clamp(max=5)),
        "is_nonzero": lambda m, x: torch.is_nonzero((x > 5).sum()),
        "number of nonzero": lambda m, x: len((x > 5).nonzero()) > 0,
        "where": lambda m, x: torch.where(x > 5)[0].numel() > 0,
        "argwhere": lambda m, x: torch.argwhere(x > 5).shape[0] > 0,
        "masked length": lambda m, x: x[x > 5].numel() > 0,
        "masked select": lambda m, x: torch.masked_select(x, x > 5).shape[0] > 0,
        "unique": lambda m, x: torch.unique((x / 5).long()).numel() > 1 or bool((x > 5).any()),
        "unique in a row": lambda m, x: torch.unique_consecutive((x.flatten() / 5).long()).numel() > 1,
        "bin counts": lambda m, x: len(torch.bincount(x.abs().long().flatten())) > 5,
        "one hot": lambda m, x: F.one_hot(x.abs().long()).shape[-1] > 5,
        "repeated": lambda m, x: x.repeat_interleave((x[:, 0] > 5).long(), 0).shape[0] > 0,
        "count": lambda m, x: x.gt(5).count_nonzero() > 0,
        "sparse": lambda m, x: x.relu().gt(5).to_sparse()._nnz() > 0,
        "sparse values": lambda m, x: len((x * (x > 5)).to_sparse().values()) > 0,
        "sparse rows": lambda m, x: len((x * (x > 5)).to_sparse_csr().values()) > 0,
        "error of a factorisation": lambda m, x: _raises(lambda: torch.linalg.cholesky(torch.eye(2) * (5 - x.max()))),
        "error of an index": lambda m, x: _raises(lambda: torch.zeros(5)[x.abs().max().long()]),
        "error of an inverse": lambda m, x: _raises(lambda: torch.linalg.inv(torch.diag((x[:, 0] < 5).float()))),
        "error of one hot": lambda m, x: _raises(lambda: F.one_hot(x.abs().long(), 5)),
        "error of a shape": lambda m, x: _raises(lambda: x[x > 5].view(0)),
        "error of a distribution": lambda m, x: _raises(
            lambda: torch.distributions.Bernoulli(probs=x.detach().abs().max() / 5)
        ),
        "error of an assertion": lambda m, x: _raises(lambda: torch._assert_async((x < 5).all())),
        "error of sampling": lambda m, x: _raises(lambda: torch.multinomial((5 - x[0]).detach(), 1)),
        "info of a factorisation": lambda m, x: torch.linalg.cholesky_ex(torch.eye(2) * (5 - x.max()))[1] > 0,
        "validated": lambda m, x: _raises(lambda: F.nll_loss(torch.zeros(6, 5), x.abs().long()[:, 0])),
        "embedding out of range": lambda m, x: _raises(lambda: F.embedding(x.abs().long(), torch.zeros(5, 1))),
        "gather out of range": lambda m, x: _raises(lambda: torch.zeros(6, 5).gather(1, x.abs().long())),
        "finite": lambda m, x: not torch.isfinite(torch.exp(x * 20)).all(),
        "a gradient": lambda m, x: torch.func.grad(lambda v: (v - 5).relu().sum())(x.detach()).any(),
        "a loop": lambda m, x: len(list(itertools.takewhile(lambda v: v < 5, x.abs().flatten()))) < 24,
        "split": lambda m, x: (
            len(torch.zeros(6).split([6 - int((x[:, 0] > 5).sum()), int((x[:, 0] > 5).sum())])[1]) > 0
        ),
        "arange": lambda m, x: torch.arange(x.abs().max()).numel() > 5,
        "range": lambda m, x: len(range(x.abs().max().long())) > 5,
        "size of zeros": lambda m, x: torch.zeros(x.abs().max().long()).numel() > 5,
        "linspace": lambda m, x: torch.linspace(0, 1, x.abs().max().long() + 1).numel() > 5,
        "item of an element": lambda m, x: x.view(-1)[3].item() > 5,
        "complex": lambda m, x: complex(x.max()).real > 5,
        "format": lambda m, x: f"{x.max():.0f}" not in "-0-1-2-3-4",
        "of an enumeration": lambda m, x: Phase(1 + int(x.max() > 5)) is Phase.LATER,
        "hash of a number": lambda m, x: hash(x.max().item()) > 5 and x.max().item() > 5,
        "vmap": lambda m, x: bool(torch.vmap(lambda r: r.max())(x).gt(5).any()),
        "max of Python's of tensors": lambda m, x: max(x[0].max(), x[1].max(), key=float) > 5,
        "bisect": lambda m, x: __import__("bisect").bisect([1.0, 5.0], x.max()) > 1,
        "heap": lambda m, x: __import__("heapq").nlargest(1, x.flatten())[0] > 5,
        "statistics": lambda m, x: __import__("statistics").mean(x.flatten().tolist()) > 5,
        "struct": lambda m, x: __import__("struct").pack("f", x.max())[3] > 0x40,
        "json": lambda m, x: len(__import__("json").dumps(x.abs().long().max().item())) > 1,
    }
    for name, decide in readers.items():
        yield f"data: {name}", Concealed(Branching(decide), (_x(),), [], _BIG)

    formulas: dict[str, Callable[..., Any]] = {
        "halved until small": lambda m, x: torch.tanh(_halved(x @ m.a)) @ m.b,
        "as often as": lambda m, x: (
            functools.reduce(lambda h, _: torch.tanh(h + m.c), range(int(x.abs().max()) // 5), x @ m.a) @ m.b
        ),
        "exponent": lambda m, x: ((x @ m.a).relu() + 0.1) ** (1 + int(x.abs().max()) // 5) @ m.b,
        "slice": lambda m, x: x @ m.a @ m.b + m.c[: int(x.abs().max().clamp(max=25)) // 5].sum(),
        "offset by a row": lambda m, x: (x @ m.a).relu() @ m.b + m.c[x.abs().max().long().clamp(max=4)],
        "chosen column": lambda m, x: (x @ m.a)[:, x[0].argmax()].tanh(),
        "order": lambda m, x: (x @ m.a)[x[:, 0].argsort()].tanh() @ m.b,
        "mask": lambda m, x: ((x @ m.a) * (x[:, :1] < 5)).relu() @ m.b + m.c[:2] * (x[:, :1] > 5),
        "where": lambda m, x: torch.where(x[:, :1] > 5, torch.tanh(x @ m.a + m.c), (x @ m.a).relu()) @ m.b,
        "rows kept": lambda m, x: (
            ((x[x[:, 0] < 5] @ m.a).relu() @ m.b).sum(0) + (torch.tanh(x[x[:, 0] >= 5] @ m.a + m.c) @ m.b).sum(0)
        ),
        "clamped index": lambda m, x: (x @ m.a).relu() @ m.b + m.c[(x[:, 0].long() // 5).clamp(0, 4), None],
        "times count": lambda m, x: (x @ m.a + m.c * (x > 5).sum()).relu() @ m.b,
        "bucket": lambda m, x: (x @ m.a).relu() @ m.b + m.c[torch.bucketize(x[:, :1], torch.tensor([5.0, 6, 7, 8]))],
        "search": lambda m, x: (
            (x @ m.a).relu() @ m.b + m.c[torch.searchsorted(torch.tensor([5.0, 6, 7, 8]), x[:, :1].contiguous())]
        ),
        "by another input": lambda m, x, y: (x @ m.a).relu() @ m.b if y.sum() < 3 else m.other(x),
        "by a flag": lambda m, x, y: m.usual(x) if not y[0] else m.other(x),
    }
    flags = {
        "by another input": [torch.zeros(3), torch.ones(3) * 4],
        "by a flag": [torch.tensor([False]), torch.tensor([True])],
    }
    for name, formula in formulas.items():
        given = flags.get(name)
        first = (_x(),) if given is None else (_x(), given[0])
        others: list[Any] = _BIG if given is None else [(_x(), given[1])]
        yield f"data: {name}", Concealed(Computing(formula), first, [], others)


def _saved(x: Tensor) -> Tensor:
    stream = io.BytesIO()
    torch.save(x, stream)
    stream.seek(0)
    return torch.load(stream)


def weights() -> Iterator[tuple[str, Concealed]]:
    """Parameters that are reached, changed or frozen in ways that gradients do not follow."""

    def aliased(**attributes: Any) -> Any:
        return attributes

    def made(formula: Callable[..., Any], prepare: Callable[[Any], Any] = lambda m: None) -> Concealed:
        model = Computing(formula)
        prepare(model)
        return Concealed(model, (_x(),), [])

    alias: Callable[[Any], None] = lambda m: setattr(m, "kept", [m.a.detach()])  # noqa: E731
    yield "weights: alias detached before", made(lambda m, x: (x @ m.a).relu() @ m.b * m.kept[0].norm(), alias)
    yield (
        "weights: alias of the data",
        made(lambda m, x: (x @ m.a).relu() @ m.b * m.kept.norm(), lambda m: setattr(m, "kept", m.a.data)),
    )
    yield (
        "weights: alias of a part",
        made(lambda m, x: (x @ m.a + m.kept[0].to(x)).relu() @ m.b, lambda m: setattr(m, "kept", (m.a.detach()[0],))),
    )
    yield (
        "weights: buffer that is an alias",
        made(
            lambda m, x: (x @ m.a).relu() @ m.b * m.view_of_a.norm(),
            lambda m: m.register_buffer("view_of_a", m.a.detach()),
        ),
    )
    yield (
        "weights: alias in the reader",
        made(lambda m, x: (x @ m.a).relu() @ m.kept[0], lambda m: setattr(m, "kept", [m.b.detach()])),
    )
    yield (
        "weights: alias of another shape",
        made(
            lambda m, x: (x @ m.a).relu() @ m.b + (x @ m.kept[0]).tanh() @ m.b,
            lambda m: setattr(m, "kept", [m.a.detach().view(-1).view(4, 5)]),
        ),
    )
    yield (
        "weights: array of NumPy that is an alias",
        made(
            lambda m, x: (x @ m.a).relu() @ m.b * float(np.abs(m.kept).sum()),
            lambda m: setattr(m, "kept", m.a.detach().numpy()),
        ),
    )
    yield (
        "weights: tensor from that array",
        made(
            lambda m, x: (x @ m.a).relu() @ m.b * torch.from_numpy(m.kept).norm(),
            lambda m: setattr(m, "kept", m.a.detach().numpy()),
        ),
    )

    def no_grad_copy(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = m.a.norm()
        return (x @ (m.a / scale)).relu() @ m.b

    def set_inside(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            m.a.copy_(m.a / m.a.norm())
        return (x @ m.a).relu() @ m.b

    def data_inside(m: Any, x: Tensor) -> Tensor:
        m.a.data = m.a.data / m.a.data.norm()
        return (x @ m.a).relu() @ m.b

    def initialised(m: Any, x: Tensor) -> Tensor:
        if not getattr(m, "ready", False):
            m.ready = True
            with torch.no_grad():
                m.c.copy_(-(x @ m.a).mean(0))
        return (x @ m.a + m.c).relu() @ m.b

    def toggled(m: Any, x: Tensor) -> Tensor:
        m.a.requires_grad_(bool(x.mean() < 5))
        return (x @ m.a).relu() @ m.b

    def new_parameter(m: Any, x: Tensor) -> Tensor:
        m.a = nn.Parameter(m.a.detach() * 1.0)
        return (x @ m.a).relu() @ m.b

    def with_set(m: Any, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(bool(x.mean() < 5)):
            h = (x @ m.a).relu()
        return h @ m.b

    def inferred(m: Any, x: Tensor) -> Tensor:
        with torch.inference_mode():
            scale = m.a.norm().clone()
        return (x @ m.a).relu() @ m.b * scale.clone()

    def jitter(m: Any, x: Tensor) -> Tensor:
        return (x @ (m.a + 0.1 * torch.randn_like(m.a) * m.a.detach().std())).relu() @ m.b

    def gradient_norm(m: Any, x: Tensor) -> Tensor:
        h = (x @ m.a).relu() @ m.b
        (g,) = torch.autograd.grad(h.square().sum(), m.a, create_graph=True)
        return g.square().sum()

    def gradient_cut(m: Any, x: Tensor) -> Tensor:
        h = (x @ m.a).relu() @ m.b
        (g,) = torch.autograd.grad(h.square().sum(), m.a, retain_graph=True)
        return h * g.norm()

    def gradient_product(m: Any, x: Tensor) -> Tensor:
        h = (x @ m.a).relu() @ m.b
        (g,) = torch.autograd.grad(h.square().sum(), m.a, create_graph=True)
        return x @ (m.a - 0.1 * g) @ m.b

    def jvp_detached(m: Any, x: Tensor) -> Tensor:
        return torch.func.jvp(lambda w: (x @ w).relu() @ m.b, (m.a,), (m.a.detach(),))[1]

    def vjp_own(m: Any, x: Tensor) -> Tensor:
        pulled: Any = torch.func.vjp(lambda w: (x @ w).relu() @ m.b, m.a)
        result: Tensor = pulled[1](torch.ones_like(pulled[0]))[0]
        return result

    for name, formula in {
        "copied without gradients": no_grad_copy,
        "written inside": set_inside,
        "data replaced inside": data_inside,
        "initialised by the first data": initialised,
        "frozen by the data": toggled,
        "made anew": new_parameter,
        "gradients switched by the data": with_set,
        "inference mode inside": inferred,
        "noise of its own size": jitter,
        "norm of a gradient": gradient_norm,
        "norm of a gradient, cut": gradient_cut,
        "step by a gradient": gradient_product,
        "tangent of itself, detached": jvp_detached,
        "own pullback": vjp_own,
    }.items():
        case = made(formula)
        case.others = _BIG[:1] if "data" in name and "first" not in name and "replaced" not in name else []
        yield f"weights: {name}", case


def concealed() -> Iterator[tuple[str, Concealed]]:
    """All of them."""
    for family in (outside, counted, chances, data, weights):
        torch.manual_seed(41)
        yield from family()
