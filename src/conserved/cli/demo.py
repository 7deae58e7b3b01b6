"""Tell what the library does in one story, and leave a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from conserved.cli.app import START, AsJson, UsageError, command, exit_interrupted, exit_with, print_json, say
from conserved.output.terminal import Console


@command(START)
def demo(
    folder: Annotated[Path, typer.Option("-o", "--output", help="folder for the store and the report")] = Path(
        "conserved-demo"
    ),
    seed: Annotated[int, typer.Option(help="seed of the weights and of the text")] = 0,
    steps: Annotated[int, typer.Option(min=2, help="steps of training")] = 60,
    as_json: AsJson = False,
) -> None:
    """Train a GPT in one file: list its laws, catch a wrong kernel, explain AdamW, check a theorem, write a report."""
    console = Console(stderr=as_json)
    console.print("loading PyTorch", style="dim")
    from conserved.demo import OccupiedError, Settings, run
    from conserved.report import NotAStoreError, UnwritableError
    from conserved.tracking import BrokenStoreError

    try:
        result = run(folder, Settings(seed=seed, steps=steps), console=console)
    except (OccupiedError, NotAStoreError, BrokenStoreError, UnwritableError) as problem:
        raise UsageError(str(problem)) from problem
    except OSError as problem:
        raise UsageError(f"The demonstration cannot write to {folder}: {problem.strerror or problem}.") from problem
    except KeyboardInterrupt:
        raise exit_interrupted(
            f"What was finished is in {folder / 'store.db'}; run the same command to go on."
        ) from None
    if as_json:
        print_json(result.record())
    else:
        console.rule(f"{result.seconds:.0f} s")
        lines = (
            f"report: {result.report}",
            "",
            "What else there is:",
            f"  conserved laws {folder / 'gpt.py'}:build --inputs tokens:256:2,64    the laws, in formulas",
            "  conserved claims paper.T4.7                                  the theorem, with its witness",
            "  conserved claims                                             all that was found in the papers",
            "  conserved reproduce                                          the papers' figures",
        )
        for line in lines:
            say(line, console)
    exit_with(result.status)
