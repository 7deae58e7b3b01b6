"""The command `conserved`: parse, call, print."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import nn

import conserved
from conserved import configured
from conserved.attention.capture import Unheard
from conserved.certify import Malformed
from conserved.discover import Unsuitable
from conserved.optional import Missing
from conserved.recognize.registry import LOSSES, recognize
from conserved.table import renderable

app = typer.Typer(
    name="conserved",
    help="Find, prove, watch and use the quantities that neural-network training conserves.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Target = Annotated[
    str,
    typer.Argument(
        help="path/to/file.py:factory or package.module:factory; transformers:SomeConfig or path/to/config.json",
        metavar="MODEL",
    ),
]
Options = Annotated[
    list[str] | None,
    typer.Argument(help="arguments of the factory or entries of the config, as name=value", metavar="[NAME=VALUE]…"),
]

InputShape = Annotated[
    str | None,
    typer.Option(help="shape of one input, such as 5,4; or tokens:VOCAB:SHAPE; or NAME of a sampler in the same file"),
]

BAD_USAGE = 2
DOES_NOT_HOLD = 1
INTERNAL = 70


class Usage(Exception):
    """The command was called with something it cannot use; the message says what to do."""


def load_model(target: str, options: list[str], *, weights: bool = True) -> nn.Module:
    """The model that `path/to/file.py:factory` or `package.module:factory` names, built with `name=value` options.

    A config of transformers is a factory too, and so is a config.json; without `weights` they take no memory.
    """
    given = dict(map(_option, options))
    if configured.is_config_file(target):
        return configured.from_file(target, given, empty=not weights)
    place, separator, name = target.rpartition(":")
    if not separator or not place or not name:
        raise Usage(
            f"{target!r} does not name a model. Write path/to/file.py:factory, package.module:factory or a config.json."
        )
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
        if getattr(factory, "__module__", "").startswith("transformers."):
            model = configured.from_class(factory, given, empty=not weights) or factory(**given)
        else:
            model = factory(**given)
    except configured.BadConfig:
        raise
    except (Exception, SystemExit) as problem:
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
    _importable(path.resolve().parent)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as problem:
        raise Usage(f"{path} could not be run: {type(problem).__name__}: {problem}") from problem
    return module


def _importable(folder: Path) -> None:
    """Let a model's file import its neighbours, as it can when it is run."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _load_module(name: str) -> ModuleType:
    _importable(Path.cwd())
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as problem:
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
    target: Target,
    options: Options = None,
    loss: Annotated[str, typer.Option(help=f"what the model is trained with: {' or '.join(LOSSES)}")] = "regression",
    latex: Annotated[bool, typer.Option("--latex", help="Print each law as a line of LaTeX.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the conservation laws of a model: what is conserved, where, and how many numbers."""
    if loss not in LOSSES:
        raise Usage(f"Unknown loss {loss!r}; expected {' or '.join(LOSSES)}.")
    found = recognize(load_model(target, options or [], weights=False), loss=loss)
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
                "laws": [law.record() for law in found.laws],
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
def discover(
    target: Target,
    options: Options = None,
    inputs: InputShape = None,
    loss: Annotated[str, typer.Option(help="regression or cross_entropy")] = "regression",
    depth: Annotated[int | None, typer.Option(min=0, help="how deep brackets are nested")] = None,
    seed: Annotated[int, typer.Option(help="seed of all samples")] = 0,
    device: Annotated[str | None, typer.Option(help="where to compute, such as cuda")] = None,
    count_only: Annotated[bool, typer.Option("--count-only", help="Do not look for formulas.")] = False,
    latex: Annotated[bool, typer.Option("--latex", help="Print a LaTeX table.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Count the conservation laws of any model, and find them, knowing nothing of its architecture."""
    model = load_model(target, options or [])
    found = conserved.discover(
        model,
        _inputs(target, inputs),
        loss=loss,
        depth=depth,
        seed=seed,
        device=device,
        forms=not count_only,
        progress=_progress(),
    )
    if as_json:
        _print_json(found.record())
    elif latex:
        sys.stdout.write(found.latex() + "\n")
    else:
        Console().print(found.summary(), markup=False, highlight=False)
    if not found.verdict.holds:
        raise typer.Exit(DOES_NOT_HOLD)


@app.command()
def certify(
    target: Annotated[str | None, typer.Argument(help="as for discover", metavar="[MODEL]")] = None,
    options: Options = None,
    inputs: InputShape = None,
    loss: Annotated[str, typer.Option(help="regression or cross_entropy")] = "regression",
    bits: Annotated[int, typer.Option(min=2, max=4096, help="precision to begin with")] = 128,
    seed: Annotated[int, typer.Option(help="seed of all samples", min=0)] = 0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="write the certificate to this file")] = None,
    check: Annotated[Path | None, typer.Option("--check", help="check this certificate; no model is needed")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Prove by ball arithmetic how many conservation laws a model has, or check such a proof."""
    from conserved.certify import Certificate

    if (check is None) == (target is None):
        raise Usage("Name a model to certify, or a file with --check FILE.")
    say = _progress()
    if check is not None:
        try:
            certificate = Certificate.load(check)
        except OSError as problem:
            raise Usage(f"{check} cannot be read: {problem.strerror}.") from None
        certificate = certificate.checked(say)
    else:
        assert target is not None
        model = load_model(target, options or [])
        certificate = conserved.certify(model, _inputs(target, inputs), loss=loss, bits=bits, seed=seed, progress=say)
        if output is not None:
            certificate.save(output)
    if as_json:
        _print_json(certificate.outcome())
    else:
        Console().print(certificate.summary(), markup=False, highlight=False)
        if output is not None:
            message = f"Written to {output}; check it with: conserved certify --check {output}"
            Console().print(message, markup=False, highlight=False, soft_wrap=True)
    if not certificate.complete:
        raise typer.Exit(DOES_NOT_HOLD)


@app.command()
def audit(
    target: Target,
    options: Options = None,
    inputs: InputShape = None,
    loss: Annotated[str, typer.Option(help=f"what the model is trained with: {' or '.join(LOSSES)}")] = "regression",
    autocast: Annotated[str | None, typer.Option(help="compute under autocast in bfloat16 or float16")] = None,
    device: Annotated[str | None, typer.Option(help="where to compute, such as cuda")] = None,
    seed: Annotated[int, typer.Option(help="seed of inputs and targets", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run one backward pass of a model on random data and check it: gradient identities and the softmax gauge."""
    from conserved.audit.trial import AUTOCAST, trial

    if loss not in LOSSES:
        raise Usage(f"Unknown loss {loss!r}; expected {' or '.join(LOSSES)}.")
    if autocast is not None and autocast not in AUTOCAST:
        raise Usage(f"Unknown precision {autocast!r}; expected {' or '.join(AUTOCAST)}.")
    model = load_model(target, options or [])
    try:
        found = trial(model, _inputs(target, inputs), loss=loss, autocast=autocast, device=device, seed=seed)
    except (RuntimeError, TypeError, ValueError, IndexError) as problem:
        raise Usage(f"{target} cannot be run on {inputs}: {type(problem).__name__}: {problem}") from problem
    if as_json:
        _print_json(found.record())
    else:
        Console().print(found.summary(), markup=False, highlight=False, soft_wrap=True)
    if not found.ok:
        raise typer.Exit(DOES_NOT_HOLD)


def _progress() -> Callable[[str], None]:
    """Lines on standard error, so that what is printed stays the result."""
    errors = Console(stderr=True)
    return lambda message: errors.print(message, style="dim", highlight=False)


def _inputs(target: str, text: str | None) -> Any:
    """What --inputs says: a shape of numbers, a shape of token ids, or a function beside the model."""
    if text is None:
        raise Usage("Say what the model takes: --inputs 5,4 for numbers of that shape, or --inputs tokens:VOCAB:SHAPE.")
    kind, _, rest = text.partition(":")
    if kind == "tokens":
        vocab, _, shape = rest.partition(":")
        if not vocab.isdigit():
            raise Usage(f"--inputs {text} is not of the form tokens:VOCAB:SHAPE, such as tokens:50:2,8.")
        size = _shape(shape)
        return lambda generator: torch.randint(int(vocab), size, generator=generator)
    if text.isidentifier():
        place = target.rpartition(":")[0]
        module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
        if not callable(getattr(module, text, None)):
            raise Usage(f"{place} has no function {text!r} to draw inputs with.")
        return getattr(module, text)
    return torch.zeros(_shape(text))


def _shape(text: str) -> tuple[int, ...]:
    if not text or not all(size.isdigit() and int(size) > 0 for size in text.split(",")):
        raise Usage(f"{text!r} is not a shape; write sizes with commas, such as 5,4.")
    return tuple(map(int, text.split(",")))


@app.command()
def attention(
    target: Target,
    options: Options = None,
    inputs: InputShape = None,
    text: Annotated[list[str] | None, typer.Option(help="a text for the tokenizer beside a model's weights")] = None,
    baselines: Annotated[bool, typer.Option(help="hold the keys against Gaussian and shuffled ones")] = True,
    low_rank: Annotated[bool, typer.Option("--low-rank", help="Show what the leading directions hold.")] = False,
    seed: Annotated[int, typer.Option(help="seed of inputs and baselines", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Describe the attention of a model on an input: the energy field of every head, key coherence, entropy."""
    from conserved.attention import low_rank_table, probe

    if text and not configured.has_weights(target):
        raise Usage(f"--text is for a folder with config.json, weights and a tokenizer; {target} is not one.")
    if configured.has_weights(target):
        model, given = configured.pretrained(target, text or [])
    else:
        model, given = load_model(target, options or []).eval(), None
    positional: tuple[Any, ...] = ()
    named: dict[str, Any] = dict(given or {})
    if given is None:
        drawn = _inputs(target, inputs)
        generator = torch.Generator().manual_seed(seed)
        x = drawn(generator) if callable(drawn) else torch.randn(drawn.shape, generator=generator)
        positional = (x,)
    say = _progress()
    found = probe(model, *positional, baselines=baselines, seed=seed, progress=say, **named)
    table = low_rank_table(model, *positional, **named) if low_rank else None
    if as_json:
        _print_json(found.record() | ({} if table is None else {"low_rank": table.record()}))
    else:
        Console().print(found.renderable())
        if table is not None:
            Console().print(table.renderable())
    if not found.verdict.holds:
        raise typer.Exit(DOES_NOT_HOLD)


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
    except (Usage, Unheard, Unsuitable, Malformed, Missing, configured.BadConfig) as problem:
        Console(stderr=True).print(f"conserved: {problem}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(BAD_USAGE)
    except Exception:
        # Neither "holds" nor "does not hold" nor the user's mistake: the exit code must not say any of them.
        Console(stderr=True).print_exception()
        sys.exit(INTERNAL)
