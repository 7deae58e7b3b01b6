"""Runs all parts of the demonstration into one folder, with progress, and can be run again after an interruption."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from conserved.demo import parts
from conserved.demo.found import found_lines
from conserved.lab.demo import Demonstration
from conserved.lab.figures import CODES
from conserved.lab.threads import threads
from conserved.report import write_report
from conserved.report.contents import check, read
from conserved.report.summary import headlines, overall
from conserved.track import RunStore, store_document
from conserved.verdict import Status
from conserved.version import __version__


class Occupied(ValueError):
    """The folder holds something that the demonstration must not replace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How much the demonstration does: steps at the largest step size and under AdamW, which figures and claims."""

    seed: int = 0
    steps: int = 60
    watched: int = 200
    figures: tuple[str, ...] = CODES
    seeds: int = 5
    workers: int = min(2, os.cpu_count() or 1)
    claims: str | None = None
    claim_seconds: float = 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """What the demonstration left behind and found."""

    store: Path
    report: Path
    found: tuple[str, ...]
    status: Status
    order: Demonstration

    def record(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return self.order.record() | {
            "verdict": self.status.value,
            "store": str(self.store),
            "report": str(self.report),
            "found": list(self.found),
        }


def run(folder: str | Path, settings: Settings | None = None, *, console: Console | None = None) -> Demo:
    """Fill `folder/store.db` and write `folder/report.html`.

    A store of an interrupted run with the same settings is filled up; that of a finished one, or of other settings or
    another version, is begun anew. Anything else of that name is left alone and refused.
    """
    chosen = settings or Settings()
    place = Path(folder)
    store = place / "store.db"
    _prepare(store, chosen)
    with _progress(console, 6) as begin, threads(1):
        begin("laws of a decoder, and gradient descent at three step sizes")
        order = parts.compare_steps(store, chosen.seed, chosen.steps)
        tell = begin("the papers' experiments in small")
        parts.reproduce_figures(store, chosen.figures, chosen.seeds, chosen.workers, tell)
        tell = begin("AdamW under a monitor, and attention")
        parts.watch_training(store, chosen.seed, chosen.watched, tell)
        begin("a right backward pass and a planted defect")
        parts.audit_gradients(store, chosen.seed)
        tell = begin("claims of the sources")
        parts.judge_claims(store, chosen.claims, chosen.claim_seconds, tell)
        begin("report")
        return _finished(store, place / "report.html", order)


def _finished(store: Path, report: Path, order: Demonstration) -> Demo:
    with RunStore(store) as opened, opened.snapshot():
        lines = found_lines(opened)
    status = overall(*(item.status for item in headlines(read(store)) if item.status is not None))
    store_document(store, "demo", "summary", {"headline": lines, "verdict": status.value})
    write_report(store, report, title="What a small transformer conserves", command="conserved demo")
    return Demo(store=store, report=report, found=tuple(lines), status=status, order=order)


def _prepare(store: Path, settings: Settings) -> None:
    """Begin anew unless an interrupted run of these settings can go on."""
    # How many processes share the work makes no difference to what comes out.
    asked = {key: value for key, value in asdict(settings).items() if key != "workers"} | {"version": __version__}
    if store.exists():
        check(store)
        with RunStore(store) as opened, opened.snapshot():
            kept = opened.documents("demo")
            empty = not opened.select("select 1 from sqlite_master")
        if not kept and not empty:
            raise Occupied(f"{store} is a run store of something else, which is not overwritten. Name another folder.")
        if "summary" in kept or kept.get("settings") != json.loads(json.dumps(asked)):
            for suffix in ("", "-wal", "-shm"):
                store.with_name(store.name + suffix).unlink(missing_ok=True)
    store_document(store, "demo", "settings", asked)


_SILENCE = 10.0
"""Seconds after which a part says how far it is, where there is no bar."""

Begin = Callable[[str], parts.Tell]
"""Begins a part; what it returns says how far it is."""


@contextmanager
def _progress(console: Console | None, total: int) -> Iterator[Begin]:
    """A bar on a terminal, a line for each part elsewhere, nothing without a console."""
    if console is None or not console.is_terminal:
        count, said = 0, 0.0

        def say(line: str) -> None:
            nonlocal said
            said = time.monotonic()
            if console is not None:
                console.print(line, markup=False, highlight=False, soft_wrap=True)

        def begin(what: str) -> parts.Tell:
            nonlocal count
            count += 1
            say(f"{count}/{total} {what}")
            return lambda detail: say(f"    {detail}") if time.monotonic() - said > _SILENCE else None

        yield begin
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        done = -1

        def begin_bar(what: str) -> parts.Tell:
            nonlocal done
            done += 1
            bar.update(task, completed=done, description=what)
            return lambda detail: bar.update(task, description=f"{what}: {detail}")

        yield begin_bar
