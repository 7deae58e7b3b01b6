"""Prove a law count, or check such a proof."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import conserved
from conserved.cli.app import (
    DOES_NOT_HOLD,
    LAWS,
    AsJson,
    ClassAxis,
    LossOption,
    UsageError,
    command,
    exit_with,
    in_a_folder,
    print_json,
    progress,
    say,
)
from conserved.cli.inputs import InputsOption
from conserved.cli.models import Options, inputs_of, load_model, split_words
from conserved.output.terminal import Console


@command(LAWS)
def certify(
    target: Annotated[str | None, typer.Argument(help="as for discover", metavar="MODEL")] = None,
    options: Options = None,
    inputs: InputsOption = None,
    loss: LossOption = "any",
    class_axis: ClassAxis = -1,
    bits: Annotated[int, typer.Option(min=2, max=4096, help="precision to begin with")] = 128,
    seed: Annotated[int, typer.Option(help="seed of all samples", min=0)] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the certificate to this file.", callback=in_a_folder)
    ] = None,
    check: Annotated[Path | None, typer.Option("--check", help="check this certificate; no model is needed")] = None,
    as_json: AsJson = False,
) -> None:
    """Prove by ball arithmetic how many conservation laws a model has, or check such a proof."""
    from conserved.certificates import Certificate, MalformedError

    if (check is None) == (target is None):
        raise UsageError("Name a model to certify, or a file with --check FILE.")
    if check is not None:
        try:
            certificate = Certificate.load(check)
        except OSError as problem:
            raise UsageError(f"{check} cannot be read: {problem.strerror}.") from None
        try:
            certificate = certificate.checked(progress())
        except MalformedError as problem:
            raise UsageError(f"{check} cannot be used: {problem}") from None
    else:
        assert target is not None
        given, words = split_words(options, inputs)
        model, x = load_model(target, given), inputs_of(target, words)
        certificate = conserved.certify(
            model, x, loss=loss, class_axis=class_axis, bits=bits, seed=seed, progress=progress()
        )
        if output is not None:
            certificate.save(output)
    if as_json:
        print_json(certificate.outcome())
    else:
        Console().print(certificate.summary(), markup=False, highlight=False)
        if output is not None:
            say(f"Written to {output}; check it with: conserved certify --check {output}")
    exit_with(certificate.verdict.status)
    if not certificate.complete:
        raise typer.Exit(DOES_NOT_HOLD)
