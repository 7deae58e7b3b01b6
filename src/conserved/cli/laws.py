"""List the laws that recognisers read off a model."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from conserved.cli.app import LOSSES, AsJson, Usage, app, print_json
from conserved.cli.models import Options, Target, load_model
from conserved.cli.storing import Store, store_record
from conserved.terminal import Console


@app.command()
def laws(
    target: Target,
    options: Options = None,
    loss: Annotated[str, typer.Option(help=f"what the model is trained with: {' or '.join(LOSSES)}")] = "regression",
    latex: Annotated[bool, typer.Option("--latex", help="Print each law as a line of LaTeX.")] = False,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """List the conservation laws of a model: what is conserved, where, and how many numbers."""
    from conserved.recognize import recognize
    from conserved.table import renderable

    if loss not in LOSSES:
        raise Usage(f"Unknown loss {loss!r}; expected {' or '.join(LOSSES)}.")
    found = recognize(load_model(target, options or [], weights=False), loss=loss)
    independent: int | None = None
    reason = ""
    try:
        independent = found.independent()
    except ValueError as problem:
        reason = str(problem)
    store_record(store, "laws", target, options or [], found.to_dict() | {"independent": independent})
    if as_json:
        print_json(
            found.to_dict()
            | {
                "numbers": found.numbers,
                "independent": independent,
                "independent_unknown": reason,
                "laws": [law.record() for law in found.laws],
            }
        )
    elif latex:
        sys.stdout.writelines(f"{law.latex}\n" for law in found.laws)
    else:
        console = Console()
        dropped = [(item.name, item.reason) for item in found.dropped]
        console.print(renderable(found.symmetries, found.unclaimed, dropped, independent))
        if reason:
            console.print(f"\nIndependence was not counted. {reason}", markup=False, highlight=False)
