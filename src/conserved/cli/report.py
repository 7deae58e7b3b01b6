"""Write one offline HTML file from a run store, or list what a store holds."""

from __future__ import annotations

import time
import webbrowser
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from conserved.cli.app import AsJson, Usage, app, in_a_folder, print_json
from conserved.output.terminal import Console

StoreFile = Annotated[Path, typer.Argument(help="a run store, such as conserved-demo/store.db", metavar="STORE")]


@app.command()
def report(
    store: StoreFile,
    output: Annotated[Path, typer.Option("-o", "--output", help="the file to write")] = Path("report.html"),
    title: Annotated[str | None, typer.Option(help="the heading of the report")] = None,
    run: Annotated[
        list[str] | None, typer.Option(help="show this run and no other; name two to see them side by side")
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the report in a browser.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write everything in a run store as one HTML file that needs no network."""
    from conserved.report import NoSuchRun, NotAStore, Unwritable, write_report
    from conserved.tracking import BrokenStore

    in_a_folder(output)
    try:
        contents = write_report(store, output, title=title, runs=run or ())
    except (NotAStore, NoSuchRun, BrokenStore, Unwritable, FileNotFoundError) as problem:
        raise Usage(str(problem)) from problem
    opened = webbrowser.open(output.resolve().as_uri()) if show else False
    counts = contents.counts()
    left = [{"kind": item.kind, "name": item.name, "reason": item.reason} for item in contents.left_out]
    if as_json:
        print_json({"report": str(output), "bytes": output.stat().st_size, **counts, "left_out": left})
        return
    listing = ", ".join(f"{name}: {count:,}" for name, count in counts.items() if count) or "nothing yet"
    console = Console()
    console.print(f"{output} ({listing})", markup=False, highlight=False, soft_wrap=True)
    for item in left:
        text = f"not shown: {item['kind']} {item['name']} ({item['reason']})"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    if show and not opened:
        console.print("No browser could be started; open the file yourself.", markup=False, highlight=False)


@app.command()
def runs(store: StoreFile, as_json: AsJson = False) -> None:
    """List the runs and records that a run store holds."""
    from conserved.report import NotAStore
    from conserved.report.contents import listing
    from conserved.tracking import BrokenStore

    try:
        found = listing(store)
    except (NotAStore, BrokenStore, FileNotFoundError) as problem:
        raise Usage(str(problem)) from problem
    if as_json:
        print_json({"store": str(store), **found})
        return
    _show(store, found)


def _show(store: Path, found: dict[str, Any]) -> None:
    console = Console()
    if found["runs"]:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("run", "started", "last step", "laws", "alarms"):
            table.add_column(column, justify="left" if column in ("run", "started") else "right")
        for run in found["runs"]:
            started = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run["started"]))
            table.add_row(run["name"], started, *(f"{run[key]:,}" for key in ("steps", "laws", "alarms")))
        console.print(table)
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in found["records"].items())
    if kinds:
        console.print(f"records: {kinds}", markup=False, highlight=False, soft_wrap=True)
    if not found["runs"] and not kinds:
        console.print(f"Nothing has been recorded in {store} yet.", markup=False, highlight=False, soft_wrap=True)
    else:
        console.print(f"see them with: conserved report {store} --open", markup=False, highlight=False, soft_wrap=True)
