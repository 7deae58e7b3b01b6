"""The application that commands register with, and what they share: exit codes, bad usage, JSON and progress."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from conserved.output.printable import printable
from conserved.output.terminal import Console
from conserved.verdict import Status
from conserved.version import __version__


class _Commands(TyperGroup):
    """The commands; one that is stopped from the keyboard says that nothing of it is left, unless it says more."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise interrupted("Nothing was written.") from None


app = typer.Typer(
    cls=_Commands,
    name="conserved",
    help="Find, prove, watch and use the quantities that neural-network training conserves.",
    epilog="Begin with: conserved demo. Exit codes: 0 holds (or is answered), 1 does not, 2 bad usage, 3 inconclusive.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

LOSSES = ("any", "regression", "cross_entropy")
"""Those of `conserved.recognize`, said here so that `--help` need not load it; a test holds the two equal."""

Loss = Annotated[
    str,
    typer.Option(
        help=f"what the model is trained with: {' or '.join(LOSSES)}",
        autocompletion=lambda incomplete: [name for name in LOSSES if name.startswith(incomplete)],
    ),
]

Device = Annotated[
    str | None,
    typer.Option(
        help="where to compute, such as cuda",
        autocompletion=lambda incomplete: [name for name in DEVICES if name.startswith(incomplete)],
    ),
]

DEVICES = ("cpu", "cuda", "cuda:0", "mps")

DOES_NOT_HOLD = 1
BAD_USAGE = 2
INCONCLUSIVE = 3
INTERNAL = 70
INTERRUPTED = 130
"""Exit codes; what holds, or is answered, is 0. The last is a command stopped from the keyboard, as shells have it."""


class Usage(Exception):
    """The command was called with something it cannot use; the message says what to do."""


def known_loss(loss: str) -> None:
    """Refuse a loss that has no name here."""
    if loss not in LOSSES:
        raise Usage(f"Unknown loss {loss!r}; expected {' or '.join(LOSSES)}.")


def ended(status: Status) -> None:
    """Leave with the exit code of a status: 1 for what does not hold, 3 for what is inconclusive."""
    if status is Status.REFUTED:
        raise typer.Exit(DOES_NOT_HOLD)
    if status is Status.INCONCLUSIVE:
        raise typer.Exit(INCONCLUSIVE)


def interrupted(kept: str) -> typer.Exit:
    """Say what is left of a command that was stopped from the keyboard; to be raised."""
    Console(stderr=True).print(f"Stopped. {kept}", markup=False, highlight=False, soft_wrap=True)
    return typer.Exit(INTERRUPTED)


def in_a_folder(path: Path) -> None:
    """Refuse to write into a folder that is not there: it is more often a slip of the finger than a wish."""
    if not path.parent.is_dir():
        raise Usage(f"There is no folder {path.parent} to write {path.name} into; make it first, or name another.")


def on_device(name: str | None) -> None:
    """Refuse a device that cannot be used here, in one line."""
    if name is None:
        return
    import torch

    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as problem:
        first = str(problem).partition("\n")[0]
        raise Usage(f"The device {name!r} cannot be used here: {first}") from None


def print_json(record: dict[str, Any]) -> None:
    """One JSON object on standard output."""
    sys.stdout.write(printable(json.dumps(record, indent=2, ensure_ascii=False), lines=True) + "\n")


def progress() -> Callable[[str], None]:
    """Lines on standard error, so that what is printed stays the result."""
    errors = Console(stderr=True)
    return lambda message: errors.print(message, style="dim", highlight=False)


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
