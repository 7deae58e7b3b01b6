"""Run the small experiment that shows what the library is for."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from conserved.cli.app import DOES_NOT_HOLD, AsJson, app, print_json


@app.command()
def demo(
    seed: Annotated[int, typer.Option(help="seed of the weights and of the text")] = 0,
    steps: Annotated[int, typer.Option(min=2, help="steps at the largest step size")] = 150,
    as_json: AsJson = False,
) -> None:
    """Train a small decoder on the standard library's text and watch what it conserves."""
    from conserved.lab.demo import demonstrate, show

    console = Console(stderr=as_json)
    found = demonstrate(seed=seed, steps=steps, console=console)
    if as_json:
        print_json(found.record())
    else:
        show(found, console)
    if not found.verdict.holds:
        raise typer.Exit(DOES_NOT_HOLD)
