"""More acts of ordinary violence, in the manner of `acts_of_violence`, which runs them."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import os
import resource
import signal
import sys
import threading
import time
import tracemalloc
import warnings
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from acts_of_violence import AFTER, BEFORE, FIRST, Act, Scene, _after, _before, _first

KNOWN = {*BEFORE, *FIRST, *AFTER}


def _around_step(s: Scene, make: Any) -> None:
    """Let every call of `monitor.step` run inside a context."""
    if s.monitor is not None:
        step = s.monitor.step

        def inside(**given: Any) -> None:
            with make():
                step(**given)

        s.monitor.step = inside  # type: ignore[method-assign]


# Exceptions and signals


class Interrupted(BaseException):
    """What a signal raises in the middle of anything."""


@_before
def _exit_in_a_hook(s: Scene) -> None:
    def leave(module: nn.Module, args: Any) -> None:
        s.kept["calls"] = s.kept.get("calls", 0) + (s.number == 2 and torch.is_grad_enabled())
        if s.kept["calls"] == 1:
            raise SystemExit(3)

    s.model.up.register_forward_pre_hook(leave)

    def loss(model: Any, x: Tensor) -> Tensor:
        with contextlib.suppress(SystemExit):
            return F.cross_entropy(model(x), x.flatten())
        return F.cross_entropy(model(x), x.flatten())

    s.loss_of = loss


@_before
def _interrupt_in_the_backward_pass(s: Scene) -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        out = model(x)
        if s.number == 2:

            def interrupt(g: Tensor) -> None:
                raise KeyboardInterrupt

            with contextlib.suppress(KeyboardInterrupt):
                broken = out * 1
                broken.register_hook(interrupt)
                broken.sum().backward()
        return F.cross_entropy(out, x.flatten())

    s.loss_of = loss


@_before
def _end_of_iteration_in_forward(s: Scene) -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        if s.number == 1:
            with contextlib.suppress(RuntimeError, StopIteration, TypeError):
                model(iter([x]))
        return F.cross_entropy(model(x), x.flatten())

    s.loss_of = loss


@_after
def _alarm_signal_inside_a_step(s: Scene) -> None:
    if s.monitor is None:
        return

    def interrupt(*_: Any) -> None:
        raise TimeoutError("an alarm of the program")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 1e-4)
    with contextlib.suppress(TimeoutError):
        _ = s.monitor.state
        time.sleep(0.01)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@_first
def _generator_thrown_into(s: Scene) -> None:
    def batches() -> Any:
        try:
            while True:
                yield torch.randint(11, (3, 5))
        finally:
            s.kept["ended"] = True

    made = batches()
    next(made)
    torch.manual_seed(1)
    made.close()


@_first
def _out_of_memory_in_a_step(s: Scene) -> None:
    stack = torch.stack

    @contextlib.contextmanager
    def scarce() -> Any:
        def fail(*_: Any, **__: Any) -> Any:
            raise torch.OutOfMemoryError("no memory left")

        torch.stack = fail
        try:
            yield
        finally:
            torch.stack = stack

    _around_step(s, scarce)


@_first
def _recursion_nearly_used_up(s: Scene) -> None:
    @contextlib.contextmanager
    def shallow() -> Any:
        limit, depth, frame = sys.getrecursionlimit(), 0, sys._getframe()
        while frame is not None:
            depth, frame = depth + 1, frame.f_back  # type: ignore[assignment]
        sys.setrecursionlimit(depth + 12)
        try:
            yield
        finally:
            sys.setrecursionlimit(limit)

    _around_step(s, shallow)


# The process


class _Closed:
    def write(self, text: str) -> int:
        raise ValueError("I/O operation on closed file")

    flush = close = isatty = fileno = write


@_first
def _output_closed(s: Scene) -> None:
    @contextlib.contextmanager
    def closed() -> Any:
        outs = sys.stdout, sys.stderr
        sys.stdout = sys.stderr = _Closed()
        try:
            yield
        finally:
            sys.stdout, sys.stderr = outs

    _around_step(s, closed)


@_first
def _handlers_of_logs_that_fail(s: Scene) -> None:
    class Failing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("the log is gone")

    s.kept["handler"] = Failing()
    logging.getLogger("conserved").addHandler(s.kept["handler"])


@_after
def _no_handlers_of_logs(s: Scene) -> None:
    logging.getLogger("conserved").handlers.clear()


@_first
def _warnings_are_errors_in_steps(s: Scene) -> None:
    @contextlib.contextmanager
    def strict() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield

    _around_step(s, strict)


@_first
def _numbers_of_numpy_raise(s: Scene) -> None:
    _around_step(s, lambda: np.errstate(all="raise"))


@_first
def _profiled(s: Scene) -> None:
    @contextlib.contextmanager
    def traced() -> Any:
        sys.setprofile(lambda *_: None)
        try:
            yield
        finally:
            sys.setprofile(None)

    _around_step(s, traced)


@_first
def _memory_traced(s: Scene) -> None:
    @contextlib.contextmanager
    def traced() -> Any:
        tracemalloc.start()
        try:
            yield
        finally:
            tracemalloc.stop()

    _around_step(s, traced)


@_first
def _environment_emptied(s: Scene) -> None:
    @contextlib.contextmanager
    def empty() -> Any:
        kept = dict(os.environ)
        os.environ.clear()
        try:
            yield
        finally:
            os.environ.update(kept)

    _around_step(s, empty)


@_after
def _no_files_left(s: Scene) -> None:
    limits = s.kept.setdefault("limits", resource.getrlimit(resource.RLIMIT_NOFILE))
    resource.setrlimit(resource.RLIMIT_NOFILE, (3 if 1 <= s.number < 4 else limits[0], limits[1]))


@_after
def _clock_of_processors_jumps(s: Scene) -> None:
    if s.number == 1:
        s.kept["thread"] = time.thread_time
        time.thread_time = lambda: 1e6 * (-1) ** s.number
    if s.number == 4:
        time.thread_time = s.kept["thread"]


@_after
def _collector_off_and_on(s: Scene) -> None:
    (gc.disable if s.number % 2 == 0 else gc.enable)()
    gc.collect()


@_after
def _threads_changed(s: Scene) -> None:
    torch.set_num_threads(1 + s.number % 2)
    torch.set_num_threads(1)


@_first
def _stepped_from_another_thread(s: Scene) -> None:
    if s.monitor is not None:
        step = s.monitor.step

        def elsewhere(**given: Any) -> None:
            thread = threading.Thread(target=step, kwargs=given)
            thread.start()
            thread.join()

        s.monitor.step = elsewhere  # type: ignore[method-assign]


@_before
def _optimizer_steps_in_another_thread(s: Scene) -> None:
    step = s.optimizer.step

    def elsewhere() -> None:
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()

    s.optimizer.step = elsewhere


# Modes of torch


@_first
def _steps_without_gradients(s: Scene) -> None:
    _around_step(s, torch.no_grad)


@_first
def _steps_in_inference_mode(s: Scene) -> None:
    _around_step(s, torch.inference_mode)


@_first
def _steps_on_the_meta_device(s: Scene) -> None:
    _around_step(s, lambda: torch.device("meta"))


@_first
def _steps_under_autocast(s: Scene) -> None:
    _around_step(s, lambda: torch.autocast("cpu", dtype=torch.bfloat16))


@_before
def _under_a_mode_of_functions(s: Scene) -> None:
    class Counting(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    def loss(model: Any, x: Tensor) -> Tensor:
        with Counting():
            return F.cross_entropy(model(x), x.flatten())

    s.loss_of = loss


@_before
def _under_a_mode_of_operators(s: Scene) -> None:
    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    def loss(model: Any, x: Tensor) -> Tensor:
        with Counting():
            return F.cross_entropy(model(x), x.flatten())

    s.loss_of = loss


@_before
def _saved_tensors_packed(s: Scene) -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
            return F.cross_entropy(model(x), x.flatten())

    s.loss_of = loss


@_before
def _saved_tensors_on_the_host(s: Scene) -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return F.cross_entropy(model(x), x.flatten())

    s.loss_of = loss


@_before
def _profiled_by_torch(s: Scene) -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        with torch.profiler.profile():
            return F.cross_entropy(model(x), x.flatten())

    s.loss_of = loss


# Strange models


class _Odd(type(nn.Linear(1, 1))):  # type: ignore[misc]
    """A layer whose comparisons, length and truth raise."""

    def __eq__(self, other: object) -> bool:
        raise TypeError("no comparison")

    __hash__ = nn.Module.__hash__

    def __len__(self) -> int:
        raise TypeError("no length")

    def __bool__(self) -> bool:
        raise TypeError("no truth")


@_before
def _modules_without_truth(s: Scene) -> None:
    odd = _Odd(8, 16)
    odd.load_state_dict(s.model.up.state_dict())
    s.model.up = odd
    s.optimizer = torch.optim.SGD(s.model.parameters(), lr=0.05, momentum=0.9)


@_before
def _attributes_that_raise(s: Scene) -> None:
    class Raising(type(s.model)):  # type: ignore[misc]
        @property
        def config(self) -> Any:
            raise RuntimeError("not configured")

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_orig"):
                raise ZeroDivisionError(name)
            return super().__getattr__(name)

    s.model.__class__ = Raising


@_before
def _parameters_of_a_class_of_its_own(s: Scene) -> None:
    class Named(nn.Parameter):
        pass

    s.model.up.weight = Named(s.model.up.weight.detach())
    s.optimizer = torch.optim.SGD(s.model.parameters(), lr=0.05, momentum=0.9)


@_before
def _empty_and_single_parameters(s: Scene) -> None:
    s.model.empty, s.model.one = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.ones(()))
    s.optimizer = torch.optim.SGD(s.model.parameters(), lr=0.05, momentum=0.9)
    s.loss_of = lambda model, x: F.cross_entropy(model(x) * model.one, x.flatten()) + model.empty.sum()


@_before
def _parameters_that_are_views_of_one_buffer(s: Scene) -> None:
    flat = torch.cat([p.detach().flatten() for p in s.model.parameters()])
    start = 0
    for p in s.model.parameters():
        p.data = flat[start : start + p.numel()].view_as(p)
        start += p.numel()


@_before
def _transposed_weights(s: Scene) -> None:
    s.model.up.weight = nn.Parameter(s.model.up.weight.detach().t().contiguous().t())
    s.optimizer = torch.optim.SGD(s.model.parameters(), lr=0.05, momentum=0.9)


@_before
def _buffers_of_nothing_and_of_words(s: Scene) -> None:
    s.model.register_buffer("nothing", None)
    s.model.register_buffer("whole", torch.arange(5))
    s.model.register_buffer("truth", torch.tensor([True]))
    s.model.words, s.model.itself = "words", [s.model.up]


# What loops do


@_after
def _state_of_the_optimizer_loaded_at_every_step(s: Scene) -> None:
    s.optimizer.load_state_dict(copy.deepcopy(s.optimizer.state_dict()))


@_after
def _weights_loaded_at_every_step(s: Scene) -> None:
    s.model.load_state_dict({name: value.clone() for name, value in s.model.state_dict().items()})


@_after
def _copy_trained_beside(s: Scene) -> None:
    if s.number == 2:
        with torch.random.fork_rng():
            twin = copy.deepcopy(s.model)
            other = torch.optim.SGD(twin.parameters(), lr=0.1)
            F.cross_entropy(twin(torch.zeros(3, 5, dtype=torch.long)), torch.zeros(15, dtype=torch.long)).backward()
            other.step()


@_after
def _monitor_copied(s: Scene) -> None:
    if s.monitor is not None and s.number == 2:
        with contextlib.suppress(Exception):
            copy.deepcopy(s.monitor)


@_after
def _layer_quantised_beside(s: Scene) -> None:
    if s.number == 3:
        weight = s.model.up.weight.detach()
        s.model.register_buffer("codes", torch.quantize_per_tensor(weight, 0.01, 0, torch.qint8))
    if s.number == 4:
        del s.model.codes


@_after
def _parameter_of_another_layer_assigned(s: Scene) -> None:
    if s.number == 2:
        new = nn.Parameter(s.model.up.weight.detach().clone())
        group = s.optimizer.param_groups[0]
        group["params"] = [new if p is s.model.up.weight else p for p in group["params"]]
        s.model.up.weight = new


@_after
def _gradients_replaced_by_copies(s: Scene) -> None:
    for p in s.model.parameters():
        p.grad = None if p.grad is None else p.grad.clone()


@_after
def _hooks_that_step_in_passes(s: Scene) -> None:
    if s.number == 1:
        s.model.norm.register_forward_hook(lambda module, args, out: out.clone())
        s.model.up.register_full_backward_hook(lambda module, given, coming: None)


@_before
def _optimizer_that_returns_and_counts(s: Scene) -> None:
    class Counting(torch.optim.SGD):
        calls = 0

        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            self.calls += 1
            return {"calls": self.calls}

    s.optimizer = Counting(s.model.parameters(), lr=0.05, momentum=0.9)


NEW: dict[str, Act] = {name: act for name, act in {**BEFORE, **FIRST, **AFTER}.items() if name not in KNOWN}
"""The acts of this file."""
