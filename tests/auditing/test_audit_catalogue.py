"""Every planted defect is seen by exactly the checks that the catalogue says, in float32 and in bfloat16."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from broken_backwards import CATALOGUE, Broken, ids, run

PRECISIONS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@PRECISIONS
@pytest.mark.parametrize("case", CATALOGUE, ids=ids)
def test_a_defect_is_seen_by_the_checks_that_can_see_it_and_by_no_other(case: Broken, dtype: torch.dtype) -> None:
    assert run(case, dtype).seen == case.expected(dtype)


@PRECISIONS
@pytest.mark.parametrize("options", [{}, {"qk_norm": True}, {"experts": 3}], ids=["plain", "norms", "experts"])
def test_without_a_defect_nothing_is_seen(options: dict[str, Any], dtype: torch.dtype) -> None:
    outcome = run(None, dtype, options)
    assert outcome.seen == frozenset()
    assert outcome.audit.ok


def test_there_are_at_least_twenty_reported_defects_and_none_that_nothing_sees() -> None:
    assert all(case.seen for case in CATALOGUE)
    assert len({case.name for case in CATALOGUE if case.source.startswith("https://")}) >= 20
    assert len({case.name for case in CATALOGUE}) == len(CATALOGUE)
    assert all(case.why for case in CATALOGUE if not case.seen or case.in_half is not None)
