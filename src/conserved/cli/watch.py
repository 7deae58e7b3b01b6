"""Serve the report of a store that runs are still writing to, or show it in the terminal. Nothing is written."""

from __future__ import annotations

import time
import webbrowser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any

import typer

from conserved.cli.app import RUNS, UsageError, command, in_a_folder, say
from conserved.cli.report import refuse_if_empty
from conserved.output.terminal import Console

HOST = "127.0.0.1"
"""Only this machine is answered: a report may hold paths and settings of a run."""

StoreFile = Annotated[Path, typer.Argument(help="the run store that a monitor writes to", metavar="STORE")]


@command(RUNS)
def watch(
    store: StoreFile,
    port: Annotated[int, typer.Option(help="port on localhost; 0 for any that is free", min=0, max=65535)] = 8765,
    every: Annotated[float, typer.Option(help="seconds between two looks at the store", min=0.5)] = 5.0,
    terminal: Annotated[bool, typer.Option("--terminal", help="Show a table here; no browser is needed.")] = False,
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Write the page as it is to this file, and stop.", callback=in_a_folder),
    ] = None,
) -> None:
    """Follow a running job: its report on localhost, refreshing, or a table in the terminal; read-only."""
    from conserved.report.contents import check, listing

    check(store)
    if output is not None:
        refuse_if_empty(store, listing(store))
        output.write_text(live_page(store, every), encoding="utf-8", errors="replace")
        return
    if terminal:
        _in_terminal(store, every)
        return
    try:
        server = report_server(store, port, every)
    except OSError as problem:
        raise UsageError(
            f"Port {port} cannot be used: {problem.strerror or problem}. Name another with --port."
        ) from None
    address = f"http://{HOST}:{server.server_address[1]}/"
    say(f"{store} is at {address}; the page looks again every {every:g} s. Stop with Ctrl-C.")
    if show and not webbrowser.open(address):
        say("No browser could be started; open the address yourself.")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        say("Stopped. The run goes on, and the store is as it was.")
    finally:
        server.server_close()


def report_server(store: Path, port: int, every: float) -> ThreadingHTTPServer:
    """Return a server of one page, made again when the store has changed."""
    made: dict[str, Any] = {}

    class Handler(BaseHTTPRequestHandler):
        """Answer GET / with the report; there is nothing else, and nothing can be sent."""

        def do_GET(self) -> None:
            """Send the page, or what keeps it from being made."""
            if self.path.partition("?")[0] != "/":
                self.send_error(404)
                return
            changed = _modified_times(store)
            if made.get("at") != changed:
                made["page"], made["at"] = live_page(store, every), changed
            body = made["page"].encode("utf-8", "replace")
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Keep the terminal free of requests."""

    return ThreadingHTTPServer((HOST, port), Handler)


def _modified_times(store: Path) -> tuple[float, ...]:
    """Return when the store, or the log that SQLite keeps beside it, was last written to."""
    files = (store, store.with_name(store.name + "-wal"))
    return tuple(file.stat().st_mtime if file.exists() else 0.0 for file in files)


def live_page(store: Path, every: float) -> str:
    """Return the report as it is now, as a page that loads itself again."""
    from conserved.report import live_report

    try:
        return live_report(store, every)
    except Exception as problem:
        # A page that failed once must not end the server: the store may be in the middle of being made.
        from html import escape

        refresh = f'<meta http-equiv="refresh" content="{every:g}">'
        reason = escape(str(problem) or type(problem).__name__)
        return (
            f"<!doctype html><html lang='en'><head>{refresh}<title>conserved</title></head><body><p>{reason}</p></body>"
        )


def _in_terminal(store: Path, every: float) -> None:
    from rich.live import Live

    console = Console()
    with Live(table_of(store), console=console, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(every)
                live.update(table_of(store), refresh=True)
        except KeyboardInterrupt:
            say("Stopped. The run goes on, and the store is as it was.")


def table_of(store: Path) -> Any:
    """Return the runs of a store, their last steps and their alarms, as a table for the terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from conserved.report.contents import listing
    from conserved.store import RunStore

    stored_runs = listing(store)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("run", "last step", "laws", "loss", "alarms"):
        table.add_column(column, justify="left" if column == "run" else "right")
    notes: list[Text] = []
    with RunStore(store) as opened:
        for run in stored_runs["runs"]:
            readings = opened.readings(run["name"])
            losses = [values["loss"] for _, values in sorted(readings.items()) if "loss" in values]
            style = "red" if run["alarms"] else "green"
            cells = (f"{run['steps']:,}", f"{run['laws']:,}", f"{losses[-1]:.4g}" if losses else "–")
            table.add_row(Text(run["name"]), *cells, Text(str(run["alarms"]), style=style))
            notes += [Text(f"{run['name']}: {alarm}", style="red") for alarm in opened.defects(run["name"])]
    if not stored_runs["runs"]:
        return Text(f"Nothing has been recorded in {store} yet.")
    return Group(table, *notes)
