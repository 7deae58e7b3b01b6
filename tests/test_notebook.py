"""The notebook runs from top to bottom, shows what is stored in it, and its displays are those of the library."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parent.parent / "examples" / "tour.ipynb"


@pytest.fixture(scope="module")
def run() -> tuple[Any, Any]:
    """The notebook as it is stored, and as it comes out now."""
    import nbformat
    from nbclient import NotebookClient

    stored = nbformat.read(NOTEBOOK, as_version=4)
    again = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(again, timeout=600, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    return stored, again


def outputs(notebook: Any) -> list[dict[str, str]]:
    return [dict(output["data"]) for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]


def words(text: str) -> list[str]:
    """What a reader sees, but for what is rounding and differs by machine: numbers with an exponent, and which of a
    clean audit's identities are the furthest off. Pictures are left out."""
    if "identities hold" in text:
        text = re.sub(r"<table.*?</table>", " ", text, flags=re.DOTALL)
    text = re.sub(r"<svg.*?</svg>", " ", text, flags=re.DOTALL)
    text = re.sub(r"<[^>]*>", " ", text)
    return re.sub(r"\d(?:\.\d+)?e[-+]\d+", "#", text).split()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_cell_runs_and_shows_what_is_stored(run: tuple[Any, Any]) -> None:
    stored, again = run
    shown = outputs(again)
    assert [words(one["text/html"]) for one in shown] == [words(output["text/html"]) for output in outputs(stored)]
    plain = [one["text/plain"].partition(":")[0] for one in shown]
    assert plain == ["<LawSet", "<Audit", "<Audit", "<Discovery", "<EnergyField"]
    assert "VERIFIED" in shown[1]["text/html"]
    assert "REFUTED" in shown[2]["text/html"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_nothing_was_printed_or_warned(run: tuple[Any, Any]) -> None:
    streams = [output for cell in run[1].cells for output in cell.get("outputs", []) if "data" not in output]
    assert streams == []
