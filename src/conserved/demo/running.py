"""Tells the demonstration's story chapter by chapter: what comes next and how long, then what was found."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from conserved.demo import chapters
from conserved.demo.chapters import Settings
from conserved.demo.findings import finding_lines
from conserved.demo.training import Tell, copy_files
from conserved.errors import InvalidInputError
from conserved.plain_data import record_of
from conserved.report import write_report
from conserved.report.contents import check, read
from conserved.report.summary import headlines, overall
from conserved.tracking import RunStore, store_document
from conserved.verdict import Status
from conserved.version import __version__


class OccupiedError(InvalidInputError, ValueError):
    """The folder holds something that the demonstration must not replace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """The files and findings of the demonstration."""

    store: Path
    report: Path
    found: tuple[str, ...]
    status: Status
    seconds: float

    def record(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        fields = {"verdict": self.status.value, "store": str(self.store), "report": str(self.report)}
        return fields | record_of(self, "found seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """A description, the duration on two idle cores, and the function that runs it."""

    title: str
    seconds: int
    run: Callable[[Path, Settings, Tell], None]


def _paper_chapters() -> tuple[Chapter, ...]:
    """Return the chapters on the paper; none without the package that holds its claims and experiments."""
    if importlib.util.find_spec("conserved_papers") is None:
        return ()
    from conserved.demo import paper_chapters as papers

    return (
        Chapter(title="running a theorem of the paper", seconds=4, run=papers.judge_theorem),
        Chapter(title="repeating the paper's experiment at three step sizes", seconds=12, run=papers.repeat_experiment),
    )


CHAPTERS = (
    Chapter(title="reading the laws off a GPT in one file", seconds=2, run=chapters.read_laws),
    Chapter(title="training it twice, with a right and with a wrong norm kernel", seconds=12, run=chapters.train_twice),
    *_paper_chapters(),
)
"""The story; a chapter ends with one or two more sentences of `finding_lines`."""


def run(folder: str | Path, settings: Settings | None = None, *, console: Console | None = None) -> Demo:
    """Fill `folder/store.db` and write `folder/report.html`, beside the model and the kernel that it is about.

    A store of an interrupted run with the same settings is filled up; that of a finished one, or of other settings or
    another version, is started again. Anything else of that name is left alone and refused.
    """
    began = time.monotonic()
    chosen = settings or Settings()
    target = Path(folder)
    store = target / "store.db"
    done = _prepare(store, chosen)
    source, kernel = copy_files(target)
    messages: list[str] = []
    with _one_thread():
        remaining = sum(chapter.seconds for chapter in CHAPTERS)
        _say(
            console,
            f"The model is {source}, the kernel {kernel}. All in all about {remaining + 3} s on two quiet cores.",
        )
        for number, chapter in enumerate(CHAPTERS, 1):
            label = f"{number}/{len(CHAPTERS)} {chapter.title} (about {chapter.seconds} s)"
            with _working(console, label) as tell:
                if f"chapter {number}" in done:
                    tell("found in the store")
                else:
                    chapter.run(store, chosen, tell)
                    store_document(store, "demo", f"chapter {number}", {"title": chapter.title})
            with RunStore(store) as opened, opened.snapshot():
                lines = finding_lines(opened)
            for line in (line for line in lines if line not in messages):
                _say(console, f"  ▸ {line}", style="bold")
            messages = lines
        with _working(console, "writing the report (about 1 s)"):
            return _finish(store, target / "report.html", messages, time.monotonic() - began)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one core for tensors inside: they are small here, and several threads are slower."""
    former = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(former)


def _finish(store: Path, report: Path, lines: list[str], seconds: float) -> Demo:
    status = overall(*(item.status for item in headlines(read(store)) if item.status is not None))
    store_document(store, "demo", "summary", {"headline": lines, "verdict": status.value})
    write_report(store, report, title="Two minutes with conserved", command="conserved demo")
    return Demo(store=store, report=report, found=tuple(lines), status=status, seconds=seconds)


def _prepare(store: Path, settings: Settings) -> set[str]:
    """Begin again unless an interrupted run of these settings can go on; what is there of it already."""
    # How many processes share the work makes no difference to what comes out.
    asked = {key: value for key, value in asdict(settings).items() if key != "workers"} | {"version": __version__}
    stored: Mapping[str, Any] = {}
    if store.exists():
        check(store)
        with RunStore(store) as opened, opened.snapshot():
            stored = opened.documents("demo")
            empty = not opened.select("select 1 from sqlite_master")
        if not stored and not empty:
            raise OccupiedError(
                f"{store} is a run store of something else, which is not overwritten. Name another folder."
            )
        if "summary" in stored or stored.get("settings") != json.loads(json.dumps(asked)):
            for suffix in ("", "-wal", "-shm"):
                store.with_name(store.name + suffix).unlink(missing_ok=True)
            stored = {}
    store_document(store, "demo", "settings", asked)
    return set(stored)


def _say(console: Console | None, text: str, style: str = "") -> None:
    if console is not None:
        console.print(Text(text, style=style), soft_wrap=not console.is_terminal)


@contextmanager
def _working(console: Console | None, label: str) -> Iterator[Tell]:
    """Show what is being done and how far it is; without a terminal, only what is being done."""
    if console is None or not console.is_terminal:
        _say(console, label, style="dim")
        yield lambda _: None
        return
    with console.status(label) as status:
        yield lambda detail: status.update(f"{label}: {detail}")
