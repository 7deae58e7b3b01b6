"""Fixtures for all tests."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

# Kernels are run by Triton's interpreter, where there is no GPU to compile them for; Triton asks when it is imported.
os.environ.setdefault("TRITON_INTERPRET", "1")

import jaxtyping
import pytest
import torch

from conserved.demo import Demo, Settings
from conserved.demo import run as run_demo

torch.set_num_threads(1)
"""The tensors are tiny and the tests run on every core already."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--quick SECONDS`: skip what is not begun by then.

    `--sources FOLDER`: where the five documents are, to check the fingerprints of all passages against them."""
    parser.addoption("--quick", type=float, default=None, help="begin no test after so many seconds")
    parser.addoption("--sources", default=None, help="folder with the text files of the five source documents")


_BEGAN = time.monotonic()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Out of time, if it was limited."""
    seconds = item.config.getoption("--quick")
    if seconds is not None and time.monotonic() - _BEGAN > seconds:
        pytest.skip(f"not begun within {seconds:g} s")


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
    few = Settings(steps=24, claims=("paper.T4.7",))
    with unchecked():
        return run_demo(tmp_path_factory.mktemp("demo") / "new" / "folder", few)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
