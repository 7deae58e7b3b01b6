"""Fixtures for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import jaxtyping
import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")
"""Kernels are run by Triton's interpreter: they are tested where there is no GPU to compile them for."""

torch.set_num_threads(1)
"""The tensors are tiny and the tests run on every core already."""


@pytest.fixture
def as_users_run_it() -> Iterator[None]:
    """Without the type checks that only the tests have, so that the library's own refusals are seen."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
