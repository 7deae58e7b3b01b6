"""Check one backward pass of a model."""

from __future__ import annotations

from typing import Annotated

import typer

from conserved.cli.app import (
    DOES_NOT_HOLD,
    INCONCLUSIVE,
    AsJson,
    Device,
    Loss,
    Usage,
    app,
    known_loss,
    on_device,
    print_json,
)
from conserved.cli.models import InputShape, Options, Target, inputs_of, load_model
from conserved.cli.storing import Store, can_store, store_record
from conserved.output.terminal import Console
from conserved.verdict import Status


@app.command()
def audit(
    target: Target,
    options: Options = None,
    inputs: InputShape = None,
    loss: Loss = "any",
    autocast: Annotated[
        str | None,
        typer.Option(
            help="compute under autocast in bfloat16 or float16",
            autocompletion=lambda incomplete: [n for n in ("bfloat16", "float16") if n.startswith(incomplete)],
        ),
    ] = None,
    device: Device = None,
    seed: Annotated[int, typer.Option(help="seed of inputs and targets", min=0)] = 0,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Run one backward pass of a model on random data and check it: gradient identities and the softmax gauge."""
    can_store(store)
    from conserved.auditing.random_trial import AUTOCAST, trial

    on_device(device)
    known_loss(loss)
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
        parts = (found.audit.verdict, *(() if found.gauge is None else (found.gauge.verdict,)))
        refuted = any(part.status is Status.REFUTED for part in parts)
        raise typer.Exit(DOES_NOT_HOLD if refuted else INCONCLUSIVE)
