"""List the laws of a model, read off what it computes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from conserved.cli.app import LAWS, AsJson, LossOption, Output, UsageError, command, deliver
from conserved.cli.inputs import InputsOption
from conserved.cli.models import Options, Target, call_of, load_model, runs_on, split_words
from conserved.cli.storing import Store, store_record
from conserved.output.terminal import Console


@command(LAWS)
def laws(
    target: Target,
    options: Options = None,
    inputs: InputsOption = None,
    loss: LossOption = "any",
    latex: Annotated[bool, typer.Option("--latex", help="Print each law as a line of LaTeX.")] = False,
    store: Store = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """List the conservation laws of a model: what is conserved, where, and how many numbers."""
    from conserved.inference import NoExampleError, recognize
    from conserved.laws.law_table import table_lines
    from conserved.plain_data import record_of

    given, words = split_words(options, inputs)
    model = load_model(target, given, weights=False)
    args, kwargs = call_of(model, target, words) if words else ((), {})
    try:
        with runs_on(target, words):
            law_set = recognize(model, *args, loss=loss, **kwargs)
    except NoExampleError as problem:
        raise UsageError(
            f"How {target} is called cannot be guessed: say --inputs 5,4 or --inputs tokens:VOCAB:SHAPE."
        ) from problem
    independent: int | None = None
    reason = ""
    try:
        independent = law_set.independent()
    except ValueError as problem:
        reason = str(problem)
    store_record(store, "laws", target, given, law_set.record() | {"independent": independent})
    record = law_set.record() | {
        "numbers": law_set.numbers,
        "independent": independent,
        "independent_unknown": reason,
        "laws": [
            record_of(law, "name formula latex numbers exact identities epsilon")
            | {"group": law.kind.group(law.n, law.m)}
            for law in law_set.laws
        ],
    }
    if deliver(record, as_json=as_json, output=output):
        return
    if latex:
        sys.stdout.writelines(f"{law.latex}\n" for law in law_set.laws)
    else:
        console = Console()
        dropped = [(item.name, item.reason) for item in law_set.dropped]
        console.print_lines(table_lines(law_set.symmetries, law_set.unclaimed, dropped, independent, console.width))
        if reason:
            console.print(f"\nIndependence was not counted. {reason}", markup=False, highlight=False)
