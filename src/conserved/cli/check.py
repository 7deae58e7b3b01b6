"""Check the backward of a function."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from conserved.cli.app import DOES_NOT_HOLD, INCONCLUSIVE, AsJson, Device, Usage, app, print_json, progress, say
from conserved.cli.models import load_named, options_of, shape_of

_DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16", "half"), "float16"),
    **dict.fromkeys(("fp32", "float32", "float"), "float32"),
    **dict.fromkeys(("fp64", "float64", "double"), "float64"),
}


@app.command()
def check(
    target: Annotated[
        str, typer.Argument(help="path/to/file.py:function or package.module:function", metavar="FUNCTION")
    ],
    options: Annotated[
        list[str] | None, typer.Argument(help="keyword arguments of the function, as name=value", metavar="NAME=VALUE")
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            help="one for each argument: NAME:PRECISION:SHAPE such as q:bf16:2,8,512,64, or NAME:int:BOUND:SHAPE; "
            "words after the first may follow without the option"
        ),
    ] = None,
    causal: Annotated[
        bool, typer.Option("--causal", help="call the function with causal=True or is_causal=True")
    ] = False,
    device: Device = None,
    seconds: Annotated[float, typer.Option(help="time after which no further test is begun", min=1.0)] = 120.0,
    seed: Annotated[int, typer.Option(help="seed of inputs", min=0)] = 0,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="hold the function under torch.compile against itself too")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Is a function's backward right? No reference and no model: symmetries of its forward, relations, slopes."""
    import torch

    from conserved.auditing import Uncheckable
    from conserved.auditing import check as run

    words = list(options or [])
    shapes = [*(inputs or []), *(word for word in words if _is_input(word))]
    given = options_of([word for word in words if not _is_input(word)])
    if not shapes:
        raise Usage("Say what the function takes: --inputs q:bf16:2,8,512,64 k:bf16:2,8,512,64 and so on.")
    function = load_named(target, "function")
    if not callable(function):
        raise Usage(f"{target} is a {type(function).__name__}, not a function.")
    if causal:
        given[_causal_name(function, target)] = True
    generator = torch.Generator().manual_seed(seed)
    drawn = [_drawn(text, generator, device) for text in shapes]
    progress()(f"checking {target} on {', '.join(name for name, _ in drawn)}, at most {seconds:.0f} s")
    names = [name for name, value in drawn if value.is_floating_point()]
    try:
        values = [value for _, value in drawn]
        found = run(function, *values, names=names, seed=seed, seconds=seconds, compiled=compiled, arguments=given)
    except Uncheckable as problem:
        raise Usage(str(problem)) from problem
    except Exception as problem:
        raise Usage(f"{target} cannot be run on these inputs: {type(problem).__name__}: {problem}") from problem
    if as_json:
        print_json(found.record())
    else:
        say(str(found))
    if found.failures:
        raise typer.Exit(DOES_NOT_HOLD)
    if not found.conclusive:
        raise typer.Exit(INCONCLUSIVE)


def _is_input(word: str) -> bool:
    return "=" not in word and word.count(":") >= 2


def _causal_name(function: Any, target: str) -> str:
    """Whichever of the usual names the function has for it."""
    import inspect

    try:
        known = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return "is_causal"
    for name in ("causal", "is_causal"):
        if name in known:
            return name
    raise Usage(f"{target} takes neither causal nor is_causal; leave --causal out, or name the option as name=value.")


def _drawn(text: str, generator: Any, device: str | None) -> tuple[str, Any]:
    """A random tensor from NAME:PRECISION:SHAPE, or random integers from NAME:int:BOUND:SHAPE."""
    import torch

    name, kind, *rest = text.split(":")
    if not name.isidentifier():
        raise Usage(f"{text!r} does not begin with a name; write NAME:PRECISION:SHAPE, such as q:bf16:2,8,512,64.")
    if kind == "int":
        if len(rest) != 2 or not rest[0].isdigit() or int(rest[0]) < 1:
            raise Usage(f"{text!r} is not of the form NAME:int:BOUND:SHAPE, such as labels:int:1000:64.")
    elif kind not in _DTYPES or len(rest) != 1:
        raise Usage(f"{text!r} has no precision; write NAME:PRECISION:SHAPE with bf16, fp16, fp32 or fp64.")
    size = shape_of(rest[-1]) if rest[-1] else ()
    if kind == "int":
        return name, torch.randint(int(rest[0]), size, generator=generator).to(device)
    return name, torch.randn(size, generator=generator).to(device, getattr(torch, _DTYPES[kind]))
