"""Write one offline HTML file from a run store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from conserved.cli.app import AsJson, Usage, app, print_json
from conserved.terminal import Console


@app.command()
def report(
    store: Annotated[Path, typer.Argument(help="a run store, such as conserved-demo/store.db", metavar="STORE")],
    output: Annotated[Path, typer.Option("-o", "--output", help="the file to write")] = Path("report.html"),
    title: Annotated[str | None, typer.Option(help="the heading of the report")] = None,
    as_json: AsJson = False,
) -> None:
    """Write everything in a run store as one HTML file that needs no network."""
    from conserved.report import NotAStore, Unwritable, write_report
    from conserved.track import BrokenStore

    try:
        contents = write_report(store, output, title=title)
    except (NotAStore, BrokenStore, Unwritable, FileNotFoundError) as problem:
        raise Usage(str(problem)) from problem
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
