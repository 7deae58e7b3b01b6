"""Check one backward pass of a model."""

from __future__ import annotations

from typing import Annotated

import typer

from conserved.cli.app import DOES_NOT_HOLD, LOSSES, AsJson, Usage, app, print_json
from conserved.cli.models import InputShape, Options, Target, inputs_of, load_model
from conserved.cli.storing import Store, store_record
from conserved.terminal import Console


@app.command()
def audit(
    target: Target,
    options: Options = None,
    inputs: InputShape = None,
    loss: Annotated[str, typer.Option(help=f"what the model is trained with: {' or '.join(LOSSES)}")] = "any",
    autocast: Annotated[str | None, typer.Option(help="compute under autocast in bfloat16 or float16")] = None,
    device: Annotated[str | None, typer.Option(help="where to compute, such as cuda")] = None,
    seed: Annotated[int, typer.Option(help="seed of inputs and targets", min=0)] = 0,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Run one backward pass of a model on random data and check it: gradient identities and the softmax gauge."""
    from conserved.audit.trial import AUTOCAST, trial

    if loss not in LOSSES:
        raise Usage(f"Unknown loss {loss!r}; expected {' or '.join(LOSSES)}.")
    if autocast is not None and autocast not in AUTOCAST:
        raise Usage(f"Unknown precision {autocast!r}; expected {' or '.join(AUTOCAST)}.")
    model = load_model(target, options or [])
    try:
        found = trial(model, inputs_of(target, inputs), loss=loss, autocast=autocast, device=device, seed=seed)
    except (RuntimeError, TypeError, ValueError, IndexError) as problem:
        raise Usage(f"{target} cannot be run on {inputs}: {type(problem).__name__}: {problem}") from problem
    store_record(store, "audit", target, options or [], found.record())
    if as_json:
        print_json(found.record())
    else:
        Console().print(found.summary(), markup=False, highlight=False, soft_wrap=True)
    if not found.ok:
        raise typer.Exit(DOES_NOT_HOLD)
