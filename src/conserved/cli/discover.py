"""Count and find the laws of any model."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import conserved
from conserved.cli.app import AsJson, ClassAxis, Device, LossOption, app, ended, print_json, progress
from conserved.cli.models import InputShape, Options, Target, inputs_of, load_model
from conserved.output.terminal import Console


@app.command()
def discover(
    target: Target,
    options: Options = None,
    inputs: InputShape = None,
    loss: LossOption = "any",
    class_axis: ClassAxis = -1,
    depth: Annotated[int | None, typer.Option(min=0, help="how deep brackets are nested")] = None,
    seed: Annotated[int, typer.Option(help="seed of all samples")] = 0,
    device: Device = None,
    count_only: Annotated[bool, typer.Option("--count-only", help="Do not look for formulas.")] = False,
    latex: Annotated[bool, typer.Option("--latex", help="Print a LaTeX table.")] = False,
    as_json: AsJson = False,
) -> None:
    """Count the conservation laws of any model, and find them, knowing nothing of its architecture."""
    model = load_model(target, options or [])
    found = conserved.discover(
        model,
        inputs_of(target, inputs),
        loss=loss,
        class_axis=class_axis,
        depth=depth,
        seed=seed,
        device=device,
        forms=not count_only,
        progress=progress(),
    )
    if as_json:
        print_json(found.record())
    elif latex:
        sys.stdout.write(found.latex() + "\n")
    else:
        Console().print(found.summary(), markup=False, highlight=False)
    ended(found.verdict.status)
