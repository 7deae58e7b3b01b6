"""Count and find the laws of any model."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import conserved
from conserved.cli.app import LAWS, AsJson, ClassAxis, Device, LossOption, Output, command, deliver, exit_with, progress
from conserved.cli.inputs import InputsOption
from conserved.cli.models import Options, Target, inputs_of, load_model, split_words
from conserved.output.terminal import Console


@command(LAWS)
def discover(
    target: Target,
    options: Options = None,
    inputs: InputsOption = None,
    loss: LossOption = "any",
    class_axis: ClassAxis = -1,
    depth: Annotated[int | None, typer.Option(min=0, help="how deep brackets are nested")] = None,
    seed: Annotated[int, typer.Option(help="seed of all samples")] = 0,
    device: Device = None,
    count_only: Annotated[bool, typer.Option("--count-only", help="Do not look for formulas.")] = False,
    latex: Annotated[bool, typer.Option("--latex", help="Print a LaTeX table.")] = False,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Count the conservation laws of any model, and find them, knowing nothing of its architecture."""
    given, words = split_words(options, inputs)
    model = load_model(target, given)
    discovery = conserved.discover(
        model,
        inputs_of(target, words),
        loss=loss,
        class_axis=class_axis,
        depth=depth,
        seed=seed,
        device=device,
        forms=not count_only,
        progress=progress(),
    )
    if deliver(discovery.record(), as_json=as_json, output=output):
        pass
    elif latex:
        sys.stdout.write(discovery.latex() + "\n")
    else:
        Console().print(discovery.summary(), markup=False, highlight=False)
    exit_with(discovery.verdict.status)
