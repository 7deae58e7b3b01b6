"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jaxtyping
import pytest
import torch

torch.set_num_threads(1)
"""The tensors are tiny and the tests run on every core already."""


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


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
