"""From a run store to one HTML file that works offline: verdicts, plots, laws, claims, audits, attention."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from conserved.optional import require

for _package in ("jinja2", "markupsafe", "latex2mathml"):
    require(_package, "A report")

from conserved.report.contents import Contents, NoSuchRunError, NotAStoreError, read
from conserved.report.page import UnwritableError, render, write_page
from conserved.report.summary import result_title
from conserved.store.store_file import report_damage

__all__ = ["Contents", "NoSuchRunError", "NotAStoreError", "UnwritableError", "live_report", "write_report"]


def write_report(
    store: str | Path,
    output: str | Path = "report.html",
    *,
    title: str | None = None,
    command: str | None = None,
    runs: Sequence[str] = (),
) -> Contents:
    """Write the report of a store, in place of one that is there.

    Args:
        store: a run store.
        output: the file to write; it needs no network and loads nothing.
        title: the heading; by default what the runs show.
        command: the command line that the report names as its origin.
        runs: names of the watched runs to show, beside each other where there are several; by default all.

    Returns:
        The contents of the report, and the parts it leaves out.

    Raises:
        NotAStoreError: the file is no run store.
        FileNotFoundError: there is no such file.
        BrokenStoreError: the store is too damaged to be shown in part.
        NoSuchRunError: a run is not in the store.
        UnwritableError: the report cannot be written there; an earlier report is left as it was.
    """
    contents = read(store, runs)
    shown_command = command or f"conserved report {Path(store).name} -o {Path(output).name}"
    with report_damage(Path(store)):
        page = render(contents, title=title or result_title(contents), command=shown_command)
    write_page(page, output)
    return contents


def live_report(store: str | Path, every: float) -> str:
    """Return the report of a store that is still written to, as a page that loads itself again.

    Args:
        store: a run store.
        every: seconds after which a browser asks again.

    Returns:
        The page.

    Raises:
        NotAStoreError: the file is no run store.
        FileNotFoundError: there is no such file.
    """
    contents = read(store, ())
    with report_damage(Path(store)):
        return render(
            contents, title=result_title(contents), command=f"conserved watch {Path(store).name}", refresh=every
        )
