"""The option --store: what a command found is kept in a run store as well, for a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from conserved.cli.app import UsageError, in_a_folder

Store = Annotated[
    Path | None, typer.Option("--store", help="keep the result in this run store as well", callback=in_a_folder)
]


def store_record(store: Path | None, kind: str, target: str, options: Sequence[str], record: Mapping[str, Any]) -> None:
    """Put a record into a store, under what was asked for; an earlier one of that name is replaced."""
    if store is None:
        return
    from conserved.tracking import store_document

    try:
        store_document(store, kind, name_of(target, options), record)
    except OSError as problem:
        raise UsageError(f"The result cannot be written as a run store: {problem}") from problem


def name_of(target: str, options: Sequence[str]) -> str:
    """Return what was asked for, without the folders it came from."""
    path, colon, name = target.rpartition(":")
    short = f"{Path(path).name}{colon}{name}" if colon else Path(target).name
    return " ".join([short, *options])
