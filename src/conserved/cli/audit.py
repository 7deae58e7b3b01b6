"""Check one backward pass of a model."""

from __future__ import annotations

from pathlib import Path
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
    UsageError,
    among,
    command,
    deliver,
    say,
)
from conserved.cli.inputs import InputsOption
from conserved.cli.models import Options, inputs_of, installed_target, load_model, runs_on, split_words
from conserved.cli.storing import Store, store_record
from conserved.verdict import Status

HALVES = ("bfloat16", "float16")

OptionalTarget = Annotated[
    str | None,
    typer.Argument(
        help="path/to/file.py:factory or package.module:factory; transformers:SomeConfig or path/to/config.json",
        metavar="MODEL",
    ),
]


def _audit_files(
    folder: Path | None,
    laws: Path | None,
    autocast: str | None,
    target: str | None,
    *,
    store: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Check weights and gradients in files against the laws in a file."""
    from conserved.auditing import audit_dump
    from conserved.auditing.random_trial import AUTOCAST

    if folder is None or laws is None or target is not None:
        raise UsageError("Expected --gradients DIR and --laws FILE together, and no model.")
    if autocast is not None and autocast not in AUTOCAST:
        raise UsageError(f"Expected the precision {' or '.join(AUTOCAST)}, got {autocast!r}. Pass one of them.")
    try:
        result = audit_dump(folder, laws, precision=None if autocast is None else AUTOCAST[autocast])
    except (OSError, ValueError) as problem:
        raise UsageError(str(problem)) from problem
    store_record(store, "audit", str(folder), (), result.record())
    if not deliver(result.record(), as_json=as_json, output=output):
        say(result.summary())
    if not result.ok:
        raise typer.Exit(DOES_NOT_HOLD if result.verdict.status is Status.REFUTED else INCONCLUSIVE)


@command(BACKWARD)
def audit(
    target: OptionalTarget = None,
    options: Options = None,
    inputs: InputsOption = None,
    loss: LossOption = "any",
    autocast: Annotated[
        str | None,
        typer.Option(help=f"compute under autocast in {' or '.join(HALVES)}", autocompletion=among(HALVES)),
    ] = None,
    device: Device = None,
    seed: Annotated[int, typer.Option(help="seed of inputs and targets", min=0)] = 0,
    gradients: Annotated[
        Path | None,
        typer.Option(help="folder of dumped weights and gradients to check instead of running a model", metavar="DIR"),
    ] = None,
    laws: Annotated[
        Path | None, typer.Option(help="file of laws that LawSet.save wrote, with --gradients", metavar="FILE")
    ] = None,
    store: Store = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Run one backward pass of a model on random data, or take dumped gradients, and check it."""
    if gradients is not None or laws is not None:
        _audit_files(gradients, laws, autocast, target, store=store, output=output, as_json=as_json)
        return
    if target is None:
        raise UsageError("Expected a model, or --gradients DIR --laws FILE.")
    installed_target(target)
    from conserved.auditing.random_trial import AUTOCAST, trial

    if autocast is not None and autocast not in AUTOCAST:
        raise UsageError(f"Expected the precision {' or '.join(AUTOCAST)}, got {autocast!r}. Pass one of them.")
    given, words = split_words(options, inputs)
    model = load_model(target, given)
    drawn = inputs_of(target, words)
    with runs_on(target, words):
        result = trial(model, drawn, loss=loss, autocast=autocast, device=device, seed=seed)
    store_record(store, "audit", target, given, result.record())
    if not deliver(result.record(), as_json=as_json, output=output):
        say(result.summary())
    if not result.ok:
        parts = (result.audit.verdict, *(() if result.gauge is None else (result.gauge.verdict,)))
        refuted = any(part.status is Status.REFUTED for part in parts)
        raise typer.Exit(DOES_NOT_HOLD if refuted else INCONCLUSIVE)
