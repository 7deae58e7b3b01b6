"""From words on the command line to a model and its inputs."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conserved.cli.app import UsageError, did_you_mean
from conserved.cli.inputs import is_input, parse_inputs, sampler_of
from conserved.errors import ConservedError
from conserved.optional import EXTRAS, require

if TYPE_CHECKING:
    from torch import nn

_WHY = "A model of that package"


def installed_target(target: str) -> str:
    """Refuse a model of an optional package that is not there, before a command loads what takes seconds."""
    package = target.rpartition(":")[0].partition(".")[0]
    if package in EXTRAS and package not in sys.modules and importlib.util.find_spec(package) is None:
        require(package, _WHY)
    return target


Target = Annotated[
    str,
    typer.Argument(
        callback=installed_target,
        help="path/to/file.py:factory or package.module:factory; transformers:SomeConfig or path/to/config.json",
        metavar="MODEL",
    ),
]
Options = Annotated[
    list[str] | None,
    typer.Argument(help="arguments of the factory or entries of the config, as name=value", metavar="NAME=VALUE"),
]


def split_words(options: Sequence[str] | None, inputs: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Return options name=value and inputs: words that follow --inputs arrive among the options."""
    words = list(options or [])
    return [word for word in words if not is_input(word)], [*(inputs or []), *filter(is_input, words)]


def load_model(target: str, options: list[str], *, weights: bool = True) -> nn.Module:
    """Return the model that `path/to/file.py:factory` or `package.module:factory` names, built with `name=value`
    options.

    A config of transformers is a factory too, and so is a config.json; without `weights` they take no memory.
    """
    import torch
    from torch import nn

    from conserved.integrations import configured_models

    given = options_of(options)
    if configured_models.is_config_file(target):
        return configured_models.from_file(target, given, empty=not weights)
    factory = load_named(target, "model", ", or a config.json")
    if isinstance(factory, nn.Module):
        if options:
            raise UsageError(f"{target} is a model already; options such as {options[0]!r} are for factories.")
        return factory
    if not callable(factory):
        raise UsageError(
            f"Expected a model or a function that returns one, got {target} of type {type(factory).__name__}. Name "
            "another object."
        )
    # The same command says the same: a factory that draws random weights draws the same ones every time.
    torch.manual_seed(0)
    try:
        if getattr(factory, "__module__", "").startswith("transformers."):
            model = configured_models.from_class(factory, given, empty=not weights) or factory(**given)
        else:
            model = factory(**given)
    except configured_models.BadConfigError:
        raise
    except (Exception, SystemExit) as problem:
        hint = argument_hint(factory, given) if isinstance(problem, TypeError) else ""
        raise UsageError(f"{target} failed: {type(problem).__name__}: {problem}{hint}") from problem
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"Expected {target} to return a torch.nn.Module, got {type(model).__name__}. Return the model."
        )
    return model


def argument_hint(factory: Callable[..., Any], given: Mapping[str, Any]) -> str:
    """Return a hint at the arguments that a factory lacks or that are misspelt; empty if there is none."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return ""
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    missing = [f"{one.name}=VALUE" for one in named if one.default is one.empty and one.name not in given]
    if missing:
        return f". Add {' '.join(missing)} after the model."
    unknown = [name for name in given if name not in {one.name for one in named}]
    return f".{did_you_mean(unknown[0], [one.name for one in named])}" if unknown else ""


def load_named(target: str, label: str, otherwise: str = "") -> Any:
    """Return the object that `path/to/file.py:name` or `package.module:name` names; errors call it `label`."""
    path, separator, name = target.rpartition(":")
    if not separator or not path or not name:
        raise UsageError(
            f"{target!r} does not name a {label}. Write path/to/file.py:name or package.module:name{otherwise}."
        )
    module = _module(path)
    if not hasattr(module, name):
        # Of a module that loads its parts when they are asked for, `dir` knows more names than `vars`.
        public = [key for key in dir(module) if not key.startswith("_")]
        raise UsageError(f"{path} has no {name!r}.{did_you_mean(name, public) or _join_names(public)}")
    return getattr(module, name)


def _join_names(names: Sequence[str], most: int = 12) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f" It has: {', '.join(names[:most]) or 'nothing public'}{more}."


def options_of(words: list[str]) -> dict[str, Any]:
    """Return words of the form name=value as arguments."""
    return dict(map(_option, words))


def _module(name: str) -> ModuleType:
    """Return a Python file or a module by its name; its neighbours can be imported, as they can when it is run."""
    path = Path(name)
    is_file = name.endswith(".py")
    if is_file and not path.is_file():
        raise UsageError(f"There is no file {path}.")
    folder = str(path.resolve().parent if is_file else Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    if not is_file and name.partition(".")[0] in EXTRAS:
        return require(name, _WHY)
    try:
        return _run(path) if is_file else importlib.import_module(name)
    except (Exception, SystemExit) as problem:
        could = "run" if is_file else "imported"
        raise UsageError(f"{name} could not be {could}: {type(problem).__name__}: {problem}") from problem


def _run(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _option(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator or not name.isidentifier():
        raise UsageError(f"Expected an option as name=value, got {text!r}. Write heads=4, for example.")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def inputs_of(target: str, words: Sequence[str] | None) -> Any:
    """Return the inputs --inputs describes.

    A single tensor of numbers is an example to imitate; anything else becomes a function that draws inputs.
    """
    import torch

    specs = parse_inputs(words, "the model")
    if specs[0].sampler:
        path = target.rpartition(":")[0]
        function = getattr(_module(path), specs[0].sampler, None)
        if not callable(function):
            raise UsageError(f"{path} has no function {specs[0].sampler!r} to draw inputs with.")
        return function
    plain = len(specs) == 1 and not specs[0].name and specs[0].bound is None
    return torch.zeros(specs[0].shape) if plain else sampler_of(specs)


@contextmanager
def runs_on(target: str, words: Sequence[str]) -> Iterator[None]:
    """Say that a model cannot be run on these inputs, where it raises."""
    try:
        yield
    except ConservedError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as problem:
        called = " ".join(words) or "the inputs it was given"
        hint = " Write tokens:BOUND:SHAPE for integers below a bound." if "Long" in str(problem) else ""
        raise UsageError(f"{target} cannot be run on {called}: {type(problem).__name__}: {problem}.{hint}") from problem


def call_of(
    model: nn.Module, target: str, words: Sequence[str], seed: int = 0
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments to call a model with, drawn as --inputs says, in the model's own precision and place."""
    import torch
    from torch import Tensor

    from conserved._torch_compat import tree_map_only

    drawn, generator = inputs_of(target, words), torch.Generator().manual_seed(seed)
    x = drawn(generator) if callable(drawn) else torch.randn(drawn.shape, generator=generator)
    like = next((parameter for parameter in model.parameters() if parameter.is_floating_point()), None)
    if like is not None:
        x = tree_map_only(Tensor, lambda t: t.to(like.device, like.dtype if t.is_floating_point() else t.dtype), x)
    return ((), x) if isinstance(x, dict) else (tuple(x) if isinstance(x, tuple | list) else (x,), {})
