"""Check the backward of a function."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from conserved.cli.app import (
    BACKWARD,
    DOES_NOT_HOLD,
    INCONCLUSIVE,
    AsJson,
    Device,
    Output,
    UsageError,
    command,
    deliver,
    progress,
    say,
)
from conserved.cli.inputs import InputsOption, InputSpec, parse_inputs
from conserved.cli.models import load_named, options_of, split_words


@command(BACKWARD)
def check(
    target: Annotated[
        str, typer.Argument(help="path/to/file.py:function or package.module:function", metavar="FUNCTION")
    ],
    options: Annotated[
        list[str] | None, typer.Argument(help="keyword arguments of the function, as name=value", metavar="NAME=VALUE")
    ] = None,
    inputs: InputsOption = None,
    causal: Annotated[
        bool, typer.Option("--causal", help="call the function with causal=True or is_causal=True")
    ] = False,
    device: Device = None,
    seconds: Annotated[float, typer.Option(help="time after which no further test starts", min=1.0)] = 120.0,
    seed: Annotated[int, typer.Option(help="seed of inputs", min=0)] = 0,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="hold the function under torch.compile against itself too")
    ] = False,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Check a function's backward, with no reference and no model."""
    import torch

    from conserved.checking import UncheckableError
    from conserved.checking import check as run

    given_words, words = split_words(options, inputs)
    given = options_of(given_words)
    specs = parse_inputs(words, "the function")
    function = load_named(target, "function")
    if not callable(function):
        raise UsageError(f"Expected a function, got {target} of type {type(function).__name__}. Name a callable.")
    if causal:
        given[_causal_name(function, target)] = True
    generator = torch.Generator().manual_seed(seed)
    if specs[0].sampler:
        raise UsageError(
            f"Expected shapes of the arguments, got the function {specs[0].sampler!r}. Pass --inputs 5,4, for example."
        )
    called = _names(specs, function)
    try:
        values = [spec.draw(generator).to(device) for spec in specs]
    except (RuntimeError, MemoryError) as problem:
        raise UsageError(f"Inputs of these sizes cannot be made: {str(problem).splitlines()[0]}.") from problem
    progress()(f"checking {target} on {', '.join(called)}, at most {seconds:.0f} s")
    names = [name for name, value in zip(called, values, strict=True) if value.is_floating_point()]
    try:
        result = run(function, *values, names=names, seed=seed, seconds=seconds, compiled=compiled, arguments=given)
    except UncheckableError as problem:
        raise UsageError(str(problem)) from problem
    except Exception as problem:
        raise UsageError(f"{target} cannot be run on these inputs: {type(problem).__name__}: {problem}") from problem
    if not deliver(result.record(), as_json=as_json, output=output):
        say(str(result))
    if result.failures:
        raise typer.Exit(DOES_NOT_HOLD)
    if not result.conclusive:
        raise typer.Exit(INCONCLUSIVE)


def _causal_name(function: Any, target: str) -> str:
    """Return the one of the usual names that the function has for it."""
    try:
        known = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return "is_causal"
    for name in ("causal", "is_causal"):
        if name in known:
            return name
    raise UsageError(
        f"Expected a function with the option causal or is_causal, got {target} without. Leave --causal out, or "
        "name the option as name=value."
    )


def _names(specs: Sequence[InputSpec], function: Any) -> list[str]:
    """Return names of the inputs: those given, otherwise those of the function's arguments, otherwise x0, x1, …"""
    if specs[0].name:
        return [spec.name for spec in specs]
    try:
        known = [
            name for name, argument in inspect.signature(function).parameters.items() if argument.kind in _BY_PLACE
        ]
    except (TypeError, ValueError):
        known = []
    return known[: len(specs)] if len(known) >= len(specs) else [f"x{index}" for index in range(len(specs))]


_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
