"""Check one backward pass of a model."""

from __future__ import annotations

from typing import Annotated

import typer

from conserved.cli.app import (
    BACKWARD,
    DOES_NOT_HOLD,
    INCONCLUSIVE,
    AsJson,
    Device,
    LossOption,
    Output,
    Usage,
    among,
    command,
    deliver,
    say,
)
from conserved.cli.inputs import InputsOption
from conserved.cli.models import Options, Target, inputs_of, load_model, split_words
from conserved.cli.storing import Store, store_record
from conserved.verdict import Status

HALVES = ("bfloat16", "float16")


@command(BACKWARD)
def audit(
    target: Target,
    options: Options = None,
    inputs: InputsOption = None,
    loss: LossOption = "any",
    autocast: Annotated[
        str | None,
        typer.Option(help=f"compute under autocast in {' or '.join(HALVES)}", autocompletion=among(HALVES)),
    ] = None,
    device: Device = None,
    seed: Annotated[int, typer.Option(help="seed of inputs and targets", min=0)] = 0,
    store: Store = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Run one backward pass of a model on random data and check it: gradient identities and the softmax gauge."""
    from conserved.auditing.random_trial import AUTOCAST, trial

    if autocast is not None and autocast not in AUTOCAST:
        raise Usage(f"Unknown precision {autocast!r}; expected {' or '.join(AUTOCAST)}.")
    given, words = split_words(options, inputs)
    model = load_model(target, given)
    drawn = inputs_of(target, words)
    try:
        found = trial(model, drawn, loss=loss, autocast=autocast, device=device, seed=seed)
    except (RuntimeError, TypeError, ValueError, IndexError) as problem:
        raise Usage(f"{target} cannot be run on {' '.join(words)}: {type(problem).__name__}: {problem}") from problem
    store_record(store, "audit", target, given, found.record())
    if not deliver(found.record(), as_json=as_json, output=output):
        say(found.summary())
    if not found.ok:
        parts = (found.audit.verdict, *(() if found.gauge is None else (found.gauge.verdict,)))
        refuted = any(part.status is Status.REFUTED for part in parts)
        raise typer.Exit(DOES_NOT_HOLD if refuted else INCONCLUSIVE)
