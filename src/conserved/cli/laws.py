"""List the laws of a model, read off what it computes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from conserved.cli.app import AsJson, LossOption, Usage, app, print_json
from conserved.cli.models import InputShape, Options, Target, call_of, load_model
from conserved.cli.storing import Store, store_record
from conserved.output.terminal import Console


@app.command()
def laws(
    target: Target,
    options: Options = None,
    inputs: InputShape = None,
    loss: LossOption = "any",
    latex: Annotated[bool, typer.Option("--latex", help="Print each law as a line of LaTeX.")] = False,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """List the conservation laws of a model: what is conserved, where, and how many numbers."""
    from conserved.inference import NoExample, recognize
    from conserved.laws.law_table import listed
    from conserved.plain_data import record_of

    model = load_model(target, options or [], weights=False)
    args, kwargs = call_of(model, target, inputs) if inputs is not None else ((), {})
    try:
        found = recognize(model, *args, loss=loss, **kwargs)
    except NoExample as problem:
        raise Usage(
            f"How {target} is called cannot be guessed: say --inputs 5,4 or --inputs tokens:VOCAB:SHAPE."
        ) from problem
    except (RuntimeError, TypeError, ValueError, IndexError) as problem:
        raise Usage(f"{target} cannot be run on {inputs}: {type(problem).__name__}: {problem}") from problem
    independent: int | None = None
    reason = ""
    try:
        independent = found.independent()
    except ValueError as problem:
        reason = str(problem)
    store_record(store, "laws", target, options or [], found.record() | {"independent": independent})
    if as_json:
        print_json(
            found.record()
            | {
                "numbers": found.numbers,
                "independent": independent,
                "independent_unknown": reason,
                "laws": [
                    record_of(law, "name formula latex numbers exact identities epsilon")
                    | {"group": law.kind.group(law.n, law.m)}
                    for law in found.laws
                ],
            }
        )
    elif latex:
        sys.stdout.writelines(f"{law.latex}\n" for law in found.laws)
    else:
        console = Console()
        dropped = [(item.name, item.reason) for item in found.dropped]
        console.print_lines(listed(found.symmetries, found.unclaimed, dropped, independent, console.width))
        if reason:
            console.print(f"\nIndependence was not counted. {reason}", markup=False, highlight=False)
