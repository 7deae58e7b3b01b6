"""The application that commands register with, and what they share: exit codes, bad usage, JSON and progress."""

from __future__ import annotations

import difflib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from typer.core import TyperCommand, TyperGroup

from conserved.errors import InvalidInputError
from conserved.output.printable import printable
from conserved.output.terminal import Console
from conserved.verdict import Status
from conserved.version import __version__

ORDER = (
    *("demo", "check", "audit", "laws", "discover", "certify"),
    *("mappings", "equalize", "fingerprint", "align", "canonical", "move", "attention"),
    *("runs", "watch", "report", "claims", "reproduce"),
)
"""Commands in the order of `--help`, which groups them by need."""

START = "Start here"
BACKWARD = "Is a backward pass right?"
LAWS = "What does training conserve?"
WEIGHTS = "Other weights, the same function"
INSIDE = "What does attention see?"
RUNS = "Recorded runs"
PAPERS = "The papers behind it"


def _without_types(parameters: list[Any]) -> list[Any]:
    """Return parameters whose switches show no type: there is nothing to fill in."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False) and parameter.metavar is None:
            parameter.metavar = ""
    return parameters


class _Command(TyperCommand):
    """A command whose help shows no type for switches."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, as help shows them."""
        return _without_types(super().get_params(ctx))


class _Commands(TyperGroup):
    """The commands; one that is stopped from the keyboard says that nothing of it is left, unless it says more."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the commands in the order of `ORDER`."""
        names = super().list_commands(ctx)
        return sorted(names, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, as help shows them."""
        return _without_types(super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise exit_interrupted("Nothing was written.") from None


app = typer.Typer(
    cls=_Commands,
    name="conserved",
    help="Find, prove, watch and use the quantities that neural-network training conserves.",
    epilog="Begin with: conserved demo. Exit codes: 0 holds (or is answered), 1 does not, 2 bad usage, 3 inconclusive.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

T = TypeVar("T", bound=Callable[..., Any])


def command(panel: str) -> Callable[[T], T]:
    """Register a function as a command, under a heading of `--help`."""
    return app.command(cls=_Command, rich_help_panel=panel)


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

LOSSES = ("any", "regression", "cross_entropy")
"""The losses of `conserved.recognize`, repeated here so that `--help` need not load it; a test holds the two equal."""

DEVICES = ("cpu", "cuda", "cuda:0", "mps")


class UsageError(InvalidInputError):
    """The command was called with something it cannot use; the message says what to do."""


def among(words: Iterable[str]) -> Callable[[str], list[str]]:
    """Return completion for the shell, from known words."""
    return lambda incomplete: [word for word in words if word.startswith(incomplete)]


def papers_installed() -> bool:
    """Return whether the package with the claims and experiments of the papers is installed."""
    return importlib.util.find_spec("conserved_papers") is not None


def known_loss(loss: str) -> str:
    """Refuse a loss that has no name here."""
    if loss not in LOSSES:
        raise UsageError(f"Expected the loss {' or '.join(LOSSES)}, got {loss!r}.{did_you_mean(loss, LOSSES)}")
    return loss


def in_a_folder(path: Path | None) -> Path | None:
    """Refuse a path that no file can have: a folder, or one in a folder that is not there.

    A missing folder is not made, because it is more often a slip of the finger than a wish.
    """
    if path is not None and path.is_dir():
        raise UsageError(f"Expected a file to write, got the folder {path}. Name a file in it.")
    if path is not None and not path.parent.is_dir():
        raise UsageError(
            f"Expected an existing folder for {path.name}, got {path.parent}. Make it first, or name another."
        )
    return path


Output = Annotated[
    Path | None,
    typer.Option("-o", "--output", help="Write the result to this file too, as JSON.", callback=in_a_folder),
]


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Return " Did you mean …?" for the known words that are close to one that is not known, or nothing."""
    close = difflib.get_close_matches(word, list(words))
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""


def on_device(name: str | None) -> str | None:
    """Refuse a device that cannot be used here, in one line."""
    if name is not None:
        import torch

        try:
            torch.empty(1, device=name)
        except (RuntimeError, AssertionError, NotImplementedError) as problem:
            first = str(problem).partition("\n")[0]
            raise UsageError(f"The device {name!r} cannot be used here: {first}") from None
    return name


_LOSS = f"what the model is trained with: {' or '.join(LOSSES)}"
LossOption = Annotated[str, typer.Option(help=_LOSS, autocompletion=among(LOSSES), callback=known_loss)]

_DEVICE = "where to compute, such as cuda"
Device = Annotated[str | None, typer.Option(help=_DEVICE, autocompletion=among(DEVICES), callback=on_device)]

ClassAxis = Annotated[int, typer.Option(help="axis of the outputs that cross_entropy runs over")]

DOES_NOT_HOLD = 1
BAD_USAGE = 2
INCONCLUSIVE = 3
INTERNAL = 70
INTERRUPTED = 130
"""Exit codes; what holds, or is answered, is 0. The last is a command stopped from the keyboard, as shells have it."""


def exit_with(status: Status) -> None:
    """Leave with the exit code of a status: 1 for what does not hold, 3 for what is inconclusive."""
    if status is Status.REFUTED:
        raise typer.Exit(DOES_NOT_HOLD)
    if status is Status.INCONCLUSIVE:
        raise typer.Exit(INCONCLUSIVE)


def exit_interrupted(completed: str) -> typer.Exit:
    """Say what is left of a command that was stopped from the keyboard; to be raised."""
    say(f"Stopped. {completed}", Console(stderr=True))
    return typer.Exit(INTERRUPTED)


def say(text: str, console: Console | None = None, style: str = "") -> None:
    """Print text unchanged, in lines that the terminal wraps."""
    (console or Console()).print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def print_json(record: dict[str, Any]) -> None:
    """Print one JSON object on standard output."""
    sys.stdout.write(_as_json(record))


def deliver(record: dict[str, Any], *, as_json: bool, output: Path | None) -> bool:
    """Write a result to its file, print it as JSON if that was asked for, and return whether it was printed."""
    if output is not None:
        try:
            output.write_text(_as_json(record), encoding="utf-8")
        except OSError as problem:
            raise UsageError(f"{output} cannot be written: {problem.strerror or problem}.") from problem
    if as_json:
        print_json(record)
    return as_json


def _as_json(record: dict[str, Any]) -> str:
    return printable(json.dumps(record, indent=2, ensure_ascii=False), lines=True) + "\n"


def progress() -> Callable[[str], None]:
    """Return lines on standard error, so that what is printed stays the result."""
    errors = Console(stderr=True)
    return lambda message: errors.print(message, style="dim", highlight=False)


@contextmanager
def count_progress(label: str, total: int) -> Iterator[tuple[Console, Callable[..., None]]]:
    """Show a progress bar on standard error if it is a terminal; yield the console and a function that advances it."""
    errors = Console(stderr=True)
    times = (TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *times)
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        yield errors, partial(bar.update, bar.add_task(label, total=total))


def _version(asked: bool | None) -> None:
    if asked:
        sys.stdout.write(f"conserved {__version__}\n")
        raise typer.Exit()


@app.callback()
def _main(
    version: Annotated[
        bool | None, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = None,
) -> None:
    pass
