"""Write one offline HTML file from a run store, or list what a store holds."""

from __future__ import annotations

import time
import webbrowser
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from conserved.cli.app import RUNS, AsJson, Output, UsageError, command, deliver, in_a_folder, print_json, say
from conserved.output.terminal import Console

_EMPTY = (
    "Nothing has been recorded in {store} yet. "
    "Give a monitor sinks='{store}', or a command --store {store}, and run it."
)


def refuse_if_empty(store: Path, stored: Mapping[str, Any]) -> None:
    """Raise UsageError if a listing has neither runs nor records."""
    if not stored["runs"] and not any(stored["records"].values()):
        raise UsageError(_EMPTY.format(store=store))


StoreFile = Annotated[Path, typer.Argument(help="a run store, such as conserved-demo/store.db", metavar="STORE")]


@command(RUNS)
def report(
    store: StoreFile,
    output: Annotated[Path, typer.Option("-o", "--output", help="the file to write", callback=in_a_folder)] = Path(
        "report.html"
    ),
    title: Annotated[str | None, typer.Option(help="the heading of the report")] = None,
    run: Annotated[
        list[str] | None, typer.Option(help="show this run and no other; name two to see them side by side")
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the report in a browser.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write everything in a run store as one HTML file that needs no network."""
    from conserved.plain_data import plain
    from conserved.report import write_report
    from conserved.report.contents import listing

    refuse_if_empty(store, listing(store))
    contents = write_report(store, output, title=title, runs=run or ())
    opened = webbrowser.open(output.resolve().as_uri()) if show else False
    counts = contents.counts()
    if as_json:
        print_json(
            {"report": str(output), "bytes": output.stat().st_size, **counts, "left_out": plain(contents.left_out)}
        )
        return
    listed = ", ".join(f"{name}: {count:,}" for name, count in counts.items() if count) or "nothing yet"
    say(f"{output} ({listed})")
    for item in contents.left_out:
        say(f"not shown: {item.kind} {item.name} ({item.reason})")
    if show and not opened:
        say("No browser could be started; open the file yourself.")


@command(RUNS)
def runs(store: StoreFile, output: Output = None, as_json: AsJson = False) -> None:
    """List the runs and records that a run store holds."""
    from conserved.report.contents import listing

    stored_runs = listing(store)
    refuse_if_empty(store, stored_runs)
    if deliver({"store": str(store), **stored_runs}, as_json=as_json, output=output):
        return
    if stored_runs["runs"]:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("run", "started", "last step", "laws", "alarms"):
            table.add_column(column, justify="left" if column in ("run", "started") else "right")
        for run in stored_runs["runs"]:
            started = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run["started"]))
            table.add_row(run["name"], started, *(f"{run[key]:,}" for key in ("steps", "laws", "alarms")))
        Console().print(table)
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in stored_runs["records"].items())
    if kinds:
        say(f"records: {kinds}")
    say(f"see them with: conserved report {store} --open")
