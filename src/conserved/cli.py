"""The command `conserved`: parse, call, print."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.console import Console
from torch import nn

import conserved
from conserved.recognize.registry import LOSSES, recognize
from conserved.table import renderable

app = typer.Typer(
    name="conserved",
    help="Find, prove, watch and use the quantities that neural-network training conserves.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

BAD_USAGE = 2
DOES_NOT_HOLD = 1


class Usage(Exception):
    """The command was called with something it cannot use; the message says what to do."""


def load_model(target: str, options: list[str]) -> nn.Module:
    """The model that `path/to/file.py:factory` or `package.module:factory` names, built with `name=value` options."""
    place, separator, name = target.rpartition(":")
    if not separator or not place or not name:
        raise Usage(f"{target!r} does not name a model. Write path/to/file.py:factory or package.module:factory.")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    if not hasattr(module, name):
        public = [key for key in vars(module) if not key.startswith("_")]
        raise Usage(f"{place} has no {name!r}. It has: {', '.join(public) or 'nothing public'}.")
    factory = getattr(module, name)
    if isinstance(factory, nn.Module):
        if options:
            raise Usage(f"{target} is a model already; options such as {options[0]!r} are for factories.")
        return factory
    if not callable(factory):
        raise Usage(f"{target} is a {type(factory).__name__}, neither a model nor a function that returns one.")
    try:
        model = factory(**dict(map(_option, options)))
    except Exception as problem:
        raise Usage(f"{target} failed: {type(problem).__name__}: {problem}") from problem
    if not isinstance(model, nn.Module):
        raise Usage(f"{target} returned a {type(model).__name__}, not a torch.nn.Module.")
    return model


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise Usage(f"There is no file {path}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    try:
        spec.loader.exec_module(module)
    except Exception as problem:
        raise Usage(f"{path} could not be run: {type(problem).__name__}: {problem}") from problem
    return module


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as problem:
        raise Usage(f"{name} could not be imported: {type(problem).__name__}: {problem}") from problem


def _option(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator or not name.isidentifier():
        raise Usage(f"{text!r} is not an option of the form name=value.")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _print_json(record: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def _version(asked: bool | None) -> None:
    if asked:
        sys.stdout.write(f"conserved {conserved.__version__}\n")
        raise typer.Exit()


@app.callback()
def _main(
    version: Annotated[
        bool | None, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = None,
) -> None:
    pass


@app.command()
def laws(
    target: Annotated[str, typer.Argument(help="path/to/file.py:factory or package.module:factory", metavar="MODEL")],
    options: Annotated[
        list[str] | None, typer.Argument(help="arguments of the factory, as name=value", metavar="[NAME=VALUE]…")
    ] = None,
    loss: Annotated[str, typer.Option(help=f"what the model is trained with: {' or '.join(LOSSES)}")] = "regression",
    latex: Annotated[bool, typer.Option("--latex", help="Print each law as a line of LaTeX.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the conservation laws of a model: what is conserved, where, and how many numbers."""
    if loss not in LOSSES:
        raise Usage(f"Unknown loss {loss!r}; expected {' or '.join(LOSSES)}.")
    found = recognize(load_model(target, options or []), loss=loss)
    independent: int | None = None
    reason = ""
    try:
        independent = found.independent()
    except ValueError as problem:
        reason = str(problem)
    if as_json:
        _print_json(
            found.to_dict()
            | {
                "numbers": found.numbers,
                "independent": independent,
                "independent_unknown": reason,
                "laws": [
                    {
                        "name": law.name,
                        "group": law.symmetry.kind.group(law.symmetry.n, law.symmetry.m),
                        "formula": law.formula,
                        "latex": law.latex,
                        "numbers": law.numbers,
                        "identities": law.symmetry.identities,
                        "exact": law.exact,
                    }
                    for law in found.laws
                ],
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


@app.command()
def demo(
    seed: Annotated[int, typer.Option(help="seed of the weights and of the text")] = 0,
    steps: Annotated[int, typer.Option(min=2, help="steps at the largest step size")] = 150,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train a small decoder on the standard library's text and watch what it conserves."""
    from conserved.lab.demo import demonstrate, show

    console = Console(stderr=as_json)
    found = demonstrate(seed=seed, steps=steps, console=console)
    if as_json:
        _print_json(found.record())
    else:
        show(found, console)
    if not found.verdict.holds:
        raise typer.Exit(DOES_NOT_HOLD)


def main() -> None:
    """Run the command; what a user did wrong ends with one sentence and exit code 2."""
    try:
        app()
    except Usage as problem:
        Console(stderr=True).print(f"conserved: {problem}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(BAD_USAGE)
