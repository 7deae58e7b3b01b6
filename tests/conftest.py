"""Fixtures for all tests."""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

# Kernels are run by Triton's interpreter, where there is no GPU to compile them for; Triton asks when it is imported.
os.environ.setdefault("TRITON_INTERPRET", "1")

from typing import TYPE_CHECKING

import jaxtyping
import pytest
import torch
from hypothesis import HealthCheck, settings

import typed_calls
import zero_tangents
from made_once import made_once
from two_processes import play
from wheel_environment import DEMO_EXTRAS, PAPERS, ROOT, Environment, build, copy_of_repository, install

if TYPE_CHECKING:
    from conserved.demo import Demo

# Before anything of the package is imported.
typed_calls.install()
zero_tangents.install()

# How long an example takes says something about the machine.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# Processes that tests start import the packages of this tree, as the tests do.
_TREE = (str(ROOT / "src"), str(PAPERS / "src"), os.environ.get("PYTHONPATH", ""))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _TREE))

torch.set_num_threads(1)
"""The tensors are tiny and the tests run on every core already."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--quick SECONDS`: skip what is not begun by then.

    `--whole`: all cases of the tables of which otherwise a sample is tested.

    `--sources FOLDER`: where the five documents are, to check the fingerprints of all passages against them."""
    parser.addoption("--quick", type=float, default=None, help="begin no test after so many seconds")
    parser.addoption("--whole", action="store_true", help="all cases of the tables that are sampled, and long runs")
    parser.addoption("--sources", default=None, help="folder with the text files of the five source documents")


_BEGAN = time.monotonic()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Out of time, if it was limited; and types are checked anew."""
    typed_calls.begin_test()
    seconds = item.config.getoption("--quick")
    if seconds is not None and time.monotonic() - _BEGAN > seconds:
        pytest.skip(f"not begun within {seconds:g} s")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is only for the whole; begin with files that have slow tests, so that none is left for the end."""
    if not config.getoption("--whole"):
        left_out = [item for item in items if item.get_closest_marker("whole")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("whole")]
    if config.getoption("--quick") is None:
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)


def pytest_configure() -> None:
    """What is imported stays: no garbage is looked for until all tests are collected."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What was imported is not looked through for garbage, which is looked for less often."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 20)


def pytest_unconfigure() -> None:
    """What was imported is taken down in order when the process ends; extensions complain otherwise."""
    gc.unfreeze()


def processor_seconds() -> float:
    """Of this process and of those it has started that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Note when the test began."""
    item.stash[_PROCESSOR] = processor_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, object, object]:
    """Note what the test has cost, which unlike its duration says something on a busy machine."""
    if call.when == "teardown":
        item.user_properties.append(("processor_seconds", round(processor_seconds() - item.stash[_PROCESSOR], 3)))
    return (yield)


_PROCESSOR: pytest.StashKey[float] = pytest.StashKey()


@contextmanager
def unchecked() -> Iterator[None]:
    """Without the type checks that only the tests have."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def as_users_run_it() -> Iterator[None]:
    """Without the type checks that only the tests have, so that the library's own refusals are seen."""
    with unchecked():
        yield


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """A fresh run of the demonstration, with fewer steps of training than a person would ask for."""
    from conserved.demo import Settings, run

    few = Settings(steps=24, claims=("paper.T4.7",))
    with unchecked():
        return made_once("demo", tmp_path_factory, lambda folder: run(folder / "new" / "folder", few))


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that a clone of the repository as it is now makes."""

    def make(folder: Path) -> Path:
        (folder / "clone").mkdir()
        return build(folder / "wheel", source=copy_of_repository(folder / "clone"))

    return made_once("wheel", tmp_path_factory, make)


@pytest.fixture(scope="session")
def papers_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the second distribution."""

    def make(folder: Path) -> Path:
        (folder / "clone").mkdir()
        return build(folder / "wheel", source=copy_of_repository(folder / "clone") / PAPERS.name)

    return made_once("papers wheel", tmp_path_factory, make)


@pytest.fixture(scope="session")
def core(wheel: Path, papers_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment as `make demo` makes it: both wheels, the command, proofs and reports."""

    def make(folder: Path) -> Environment:
        return install(wheel, folder / "core", *DEMO_EXTRAS, papers=papers_wheel)

    return made_once("core", tmp_path_factory, make)


@pytest.fixture(scope="session")
def plain(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with that wheel and its requirements, and no extras."""
    return made_once("plain", tmp_path_factory, lambda folder: install(wheel, folder / "plain"))


@pytest.fixture(scope="session")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two processes have left what they found in the scenes of all tests over processes."""
    return made_once("two processes", tmp_path_factory, play)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def nobody_else_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no other test of this process held a monitor, which listens to functions of PyTorch."""
    from conserved.attention import attention_calls
    from conserved.auditing import norm_calls
    from conserved.function_listeners import Listeners

    gc.collect()
    for module in (attention_calls, norm_calls):
        for one in module._LISTENERS._replaced:
            monkeypatch.setattr(one.holder, one.attribute, one.original)
        monkeypatch.setattr(module, "_LISTENERS", Listeners())


@pytest.fixture(autouse=True)
def _every_step_is_cheap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times say something about the machine: monitors look at every step, unless a test is about their budget."""
    from conserved.tracking.time_budget import TimeBudget

    if request.node.get_closest_marker("budget") is None:
        monkeypatch.setattr(TimeBudget, "due", lambda budget, step: True)
