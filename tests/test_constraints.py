"""The script that checks constraints for a release reads the project as pip would, and sees what is wrong."""

from __future__ import annotations

import tomllib

import pytest

from check_constraints import (
    CONSTRAINTS,
    HEADER,
    ROOT,
    Resolution,
    clean_environment,
    pins,
    problems,
    requirements,
    stale,
    updated,
)

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def test_constraints_open_with_how_they_are_made() -> None:
    assert CONSTRAINTS.read_text("utf-8").startswith(HEADER)


def test_every_pin_is_exact_and_no_build_of_torch_is_named() -> None:
    lines = [line for line in CONSTRAINTS.read_text("utf-8").splitlines() if line and not line.startswith("#")]
    assert len(pins("\n".join(lines))) == len(lines)
    assert not [line for line in lines if "+" in line or "@" in line or "://" in line]


def test_requirements_are_those_of_all_extras_without_the_project_itself() -> None:
    lines = requirements(PROJECT)
    assert {"torch>=2.6", "ruff>=0.11", "lightning>=2.5"} <= set(lines)
    assert not [line for line in lines if line.startswith("conserved")]


def test_configuration_of_pip_does_not_reach_the_check() -> None:
    environment = clean_environment({"PIP_FIND_LINKS": "x", "PIP_INDEX_URL": "y", "PIP_CERT": "z", "HOME": "h"})
    assert environment["PIP_CERT"] == "z"
    assert environment["PIP_CONFIG_FILE"] == "/dev/null"
    assert not {"PIP_FIND_LINKS", "PIP_INDEX_URL"} & set(environment)


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"torch": "2.13.0", "nvidia-nccl-cu13": "2.29.7"}, []),
        ({"torch": "2.13.0", "surprise": "1"}, ["surprise has no pin"]),
        ({"torch": "2.12.0"}, ["torch is pinned to 2.13.0, and 2.12.0 would be installed"]),
    ],
)
def test_a_resolution_is_held_against_the_pins(versions: dict[str, str], expected: list[str]) -> None:
    assert problems(Resolution("3.12", "python", versions), {"torch": "2.13.0"}) == expected


def test_a_conflict_and_a_stale_pin_are_problems() -> None:
    assert problems(Resolution("3.12", "python", {}, "ResolutionImpossible"), {}) == ["ResolutionImpossible"]
    assert stale([Resolution("3.12", "python", {"torch": "1"})], {"torch": "1", "old": "2", "pip": "3"}) == ["old"]


def test_what_is_written_is_read_back() -> None:
    text = updated({"torch": "2.13.0", "nvidia-nccl-cu13": "2.29.7", "typing-extensions": "4.16.0"}, "26.3")
    assert pins(text) == {"pip": "26.3", "torch": "2.13.0", "typing-extensions": "4.16.0"}
