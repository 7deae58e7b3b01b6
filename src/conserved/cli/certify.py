"""Prove a law count, or check such a proof."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import conserved
from conserved.cli.app import (
    DOES_NOT_HOLD,
    AsJson,
    Loss,
    Usage,
    app,
    ended,
    in_a_folder,
    known_loss,
    print_json,
    progress,
)
from conserved.cli.models import InputShape, Options, inputs_of, load_model
from conserved.output.terminal import Console


@app.command()
def certify(
    target: Annotated[str | None, typer.Argument(help="as for discover", metavar="MODEL")] = None,
    options: Options = None,
    inputs: InputShape = None,
    loss: Loss = "any",
    class_axis: Annotated[int, typer.Option(help="axis of the outputs that cross_entropy runs over")] = -1,
    bits: Annotated[int, typer.Option(min=2, max=4096, help="precision to begin with")] = 128,
    seed: Annotated[int, typer.Option(help="seed of all samples", min=0)] = 0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="write the certificate to this file")] = None,
    check: Annotated[Path | None, typer.Option("--check", help="check this certificate; no model is needed")] = None,
    as_json: AsJson = False,
) -> None:
    """Prove by ball arithmetic how many conservation laws a model has, or check such a proof."""
    from conserved.certificates import Certificate, Malformed

    if (check is None) == (target is None):
        raise Usage("Name a model to certify, or a file with --check FILE.")
    known_loss(loss)
    if output is not None:
        in_a_folder(output)
    say = progress()
    if check is not None:
        try:
            certificate = Certificate.load(check)
        except OSError as problem:
            raise Usage(f"{check} cannot be read: {problem.strerror}.") from None
        try:
            certificate = certificate.checked(say)
        except Malformed as problem:
            raise Usage(f"{check} cannot be used: {problem}") from None
    else:
        assert target is not None
        model = load_model(target, options or [])
        certificate = conserved.certify(
            model, inputs_of(target, inputs), loss=loss, class_axis=class_axis, bits=bits, seed=seed, progress=say
        )
        if output is not None:
            certificate.save(output)
    if as_json:
        print_json(certificate.outcome())
    else:
        Console().print(certificate.summary(), markup=False, highlight=False)
        if output is not None:
            message = f"Written to {output}; check it with: conserved certify --check {output}"
            Console().print(message, markup=False, highlight=False, soft_wrap=True)
    ended(certificate.verdict.status)
    if not certificate.complete:
        raise typer.Exit(DOES_NOT_HOLD)
