"""A seeded sample of what is measured on accelerators: wrong factors, clean passes and bit flips of a decoder."""

from __future__ import annotations

import argparse
from typing import Any

from scale_flips import Run
from scale_table import FACTORS, PARTS, Cell, clean, table


def small_cell(precision: str) -> Cell:
    cell = Cell("hand", "2M", precision, 500, "cpu")
    cell.build()
    return cell


def keep_nothing(record: dict[str, Any]) -> None:
    """Stand in for saving."""


def test_wrong_factors_are_refuted_from_five_per_cent_on_but_in_parts_of_a_leg() -> None:
    options = argparse.Namespace(regimes="fresh", cell_seconds=1e9)
    result = table(small_cell("bf16"), options, keep_nothing)
    assert result["clean"]["fresh"]["replayed"] == result["clean"]["fresh"]["compared"] == "verified"
    for target, text in result["planted"]["fresh"].items():
        if target in PARTS:
            assert text["compared"].startswith("RR"), target
        else:
            assert text["alone"][1:] == "R" * (len(FACTORS) - 1), target
            assert text["replayed"][0] == "R", target


def test_clean_passes_in_eight_regimes_are_verified() -> None:
    options = argparse.Namespace(passes=8, cell_seconds=1e9, compare_every=20)
    result = clean(small_cell("bf16"), options, keep_nothing)
    assert sum(result["replayed"].values()) == 8
    assert all(key.endswith("verified") for key in result["replayed"]), result["reasons"]


def test_flips_above_ten_per_cent_are_seen_and_clean_steps_are_silent() -> None:
    run = Run(small_cell("float32"), seed=1, length=16, inside=2)
    for number in range(18):
        run.step(flips=number > 4)
    assert run.alarms == []
    bins = [(name, counts) for index in run.counts.values() for name, counts in index.items()]
    large = [counts for name, counts in bins if name in ("below 1", "below 1000", "below inf", "not finite")]
    assert sum(counts["all"] for counts in large) >= 10
    assert sum(counts["seen"] for counts in large) == sum(counts["all"] for counts in large)
