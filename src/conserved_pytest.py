"""The pytest plugin of conserved: `@pytest.mark.conserved`, or `pytest --conserved`, audits every backward pass.

It imports nothing of the package, and not PyTorch, before a test asks for it: every run of pytest loads it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conserved.integrations.backward_audits import BackwardAudits


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--conserved`: audit the backward passes of all tests, not only of those with the marker."""
    group = parser.getgroup("conserved", "gradient identities")
    group.addoption("--conserved", action="store_true", help="audit every backward pass of every test")


def pytest_configure(config: pytest.Config) -> None:
    """Describe the marker."""
    text = 'conserved(loss="any"): audit every backward pass of the test against the gradient identities of its models'
    config.addinivalue_line("markers", text)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Audit what the test does, if it is asked for."""
    marker = item.get_closest_marker("conserved")
    if marker is None and not item.config.getoption("--conserved"):
        return (yield)
    from conserved.integrations.backward_audits import BackwardAudits

    options = {} if marker is None else dict(marker.kwargs)
    with BackwardAudits(**options):
        return (yield)


@pytest.fixture
def conserved_audits(request: pytest.FixtureRequest) -> Iterator[BackwardAudits]:
    """The audits of a test that has no marker: every backward pass of the test, in `.audits`."""
    from conserved.integrations.backward_audits import BackwardAudits

    with BackwardAudits() as audits:
        yield audits
