"""Check one backward pass of a model."""

from __future__ import annotations

from typing import Annotated

import typer

from conserved.cli.app import (
    DOES_NOT_HOLD,
    INCONCLUSIVE,
    AsJson,
    Device,
    LossOption,
    Usage,
    among,
    app,
    print_json,
    say,
)
from conserved.cli.models import InputShape, Options, Target, inputs_of, load_model
from conserved.cli.storing import Store, store_record
from conserved.verdict import Status

HALVES = ("bfloat16", "float16")


@app.command()
def audit(
    target: Target,
    options: Options = None,
    inputs: InputShape = None,
    loss: LossOption = "any",
    autocast: Annotated[
        str | None,
        typer.Option(help=f"compute under autocast in {' or '.join(HALVES)}", autocompletion=among(HALVES)),
    ] = None,
    device: Device = None,
    seed: Annotated[int, typer.Option(help="seed of inputs and targets", min=0)] = 0,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Run one backward pass of a model on random data and check it: gradient identities and the softmax gauge."""
    from conserved.auditing.random_trial import AUTOCAST, trial

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
        say(found.summary())
    if not found.ok:
        parts = (found.audit.verdict, *(() if found.gauge is None else (found.gauge.verdict,)))
        refuted = any(part.status is Status.REFUTED for part in parts)
        raise typer.Exit(DOES_NOT_HOLD if refuted else INCONCLUSIVE)
