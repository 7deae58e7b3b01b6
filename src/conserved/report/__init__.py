"""From a run store to one HTML file that works offline: verdicts, plots, laws, claims, audits, attention."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from conserved.report.contents import Contents, NoSuchRun, NotAStore, read
from conserved.report.page import Unwritable, rendered, written
from conserved.store.store_file import undamaged

__all__ = ["Contents", "NoSuchRun", "NotAStore", "Unwritable", "write_report"]


def write_report(
    store: str | Path,
    output: str | Path = "report.html",
    *,
    title: str | None = None,
    command: str | None = None,
    runs: Sequence[str] = (),
) -> Contents:
    """Write the report of a store, in place of one that is there, and say what is in it.

    Args:
        store: a run store.
        output: the file to write; it needs no network and loads nothing.
        title: the heading.
        command: what the report says it was made with.
        runs: of the watched runs only these, beside each other where there are several.

    Returns:
        What the report shows, and what it leaves out.

    NotAStore or FileNotFoundError if there is no store, BrokenStore if it is too damaged to be shown in part, NoSuchRun
    if a run is not in it, Unwritable if the report cannot be put where it should go; an earlier report is then left as
    it was.
    """
    contents = read(store, runs)
    said = command or f"conserved report {Path(store).name} -o {Path(output).name}"
    with undamaged(Path(store)):
        page = rendered(contents, title=title or "What training conserved", command=said)
    written(page, output)
    return contents
