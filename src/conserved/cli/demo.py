"""Run small versions of everything, and leave a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from conserved.cli.app import DOES_NOT_HOLD, AsJson, Usage, app, print_json
from conserved.terminal import Console


@app.command()
def demo(
    folder: Annotated[Path, typer.Option("-o", "--folder", help="where the store and the report go")] = Path(
        "conserved-demo"
    ),
    seed: Annotated[int, typer.Option(help="seed of the weights and of the text")] = 0,
    steps: Annotated[int, typer.Option(min=2, help="steps at the largest step size")] = 60,
    as_json: AsJson = False,
) -> None:
    """Run small versions of everything on embedded data; leave a run store and a report."""
    from conserved.demo import Occupied, Settings, run
    from conserved.lab.demo import show
    from conserved.report import NotAStore, Unwritable
    from conserved.track import BrokenStore

    console = Console(stderr=as_json)
    try:
        found = run(folder, Settings(seed=seed, steps=steps), console=console)
    except (Occupied, NotAStore, BrokenStore, Unwritable) as problem:
        raise Usage(str(problem)) from problem
    except OSError as problem:
        raise Usage(f"The demonstration cannot write to {folder}: {problem.strerror or problem}.") from problem
    if as_json:
        print_json(found.record())
    else:
        show(found.order, console)
        console.rule("What was found")
        for number, line in enumerate(found.found, 1):
            console.print(f"{number}. {line}", markup=False, highlight=False)
        console.print(f"\nreport: {found.report}", style="bold", markup=False, highlight=False, soft_wrap=True)
        console.print(f"store:  {found.store}", markup=False, highlight=False, soft_wrap=True)
    if found.status in ("refuted", "inconclusive"):
        raise typer.Exit(DOES_NOT_HOLD)
