"""Move a checkpoint along its symmetries, or to the best point of its orbit, file by file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conserved.cli.app import WEIGHTS, AsJson, UsageError, command, did_you_mean, print_json, progress, say
from conserved.cli.models import load_model

if TYPE_CHECKING:
    from torch import Tensor

    from conserved.laws import LawSet
    from conserved.symmetry import Symmetry
    from conserved.transform import Checkpoint, MovedWeights

Folder = Annotated[Path, typer.Argument(help="folder with config.json and safetensors files", metavar="FOLDER")]
Out = Annotated[Path | None, typer.Option("-o", "--output", help="folder to write the moved checkpoint to")]
Dry = Annotated[bool, typer.Option("--dry-run", help="Say what would change, and write nothing.")]
Model = Annotated[
    str | None,
    typer.Option("--model", help="path/to/file.py:factory, where config.json does not say what the model is"),
]


@command(WEIGHTS)
def equalize(
    folder: Folder,
    out: Out = None,
    objective: Annotated[
        str, typer.Option(help="balanced, range, incoherent, or activation with --texts")
    ] = "balanced",
    texts: Annotated[
        Path | None, typer.Option(help="lines of text to measure activations on; the whole model is loaded")
    ] = None,
    alpha: Annotated[float, typer.Option(help="share of the activations' spread that weights take over")] = 0.5,
    approximate: Annotated[bool, typer.Option("--approximate", help="Use symmetries up to a norm's ε too.")] = False,
    seed: Annotated[int, typer.Option(help="seed of random rotations")] = 0,
    rounded: Annotated[
        str, typer.Option(help="what will be rounded, for activation: weights, both (what they read too), or any")
    ] = "any",
    scheme: Annotated[
        str | None,
        typer.Option(help="choose the objective that rounds best, or none: int4-channel, w4a16, w8a8, nvfp4, …"),
    ] = None,
    load: Annotated[
        bool, typer.Option("--load", help="Load the whole model, where files have other tensors than it has.")
    ] = False,
    model: Model = None,
    dry_run: Dry = False,
    as_json: AsJson = False,
) -> None:
    """Move a checkpoint to the best point of its orbit: other weights, the same function."""
    from conserved.transform import OBJECTIVES, Checkpoint
    from conserved.transform import equalize as equalized

    if objective not in OBJECTIVES:
        meant = did_you_mean(objective, OBJECTIVES)
        raise UsageError(f"Expected an objective among {', '.join(OBJECTIVES)}, got {objective!r}.{meant}")
    if scheme is not None:
        _fit_and_report(folder, out, scheme, texts, model, dry=dry_run, as_json=as_json)
        return
    if (objective == "activation") != (texts is not None):
        raise UsageError("--objective activation and --texts FILE belong together: activations are measured on text.")
    laws = _laws(folder, out, model, dry=dry_run)
    weights = Checkpoint(folder, None if dry_run else out, laws.parameters)
    progress()(f"{len(laws.symmetries)} symmetries; equalising {len(weights)} tensors of {folder}")
    options: dict[str, Any] = {"objective": objective, "approximate": approximate, "seed": seed}
    if texts is not None or load:
        result = _in_memory(folder, laws, weights, texts, options | {"alpha": alpha, "rounded": rounded})
    else:
        result = equalized(weights, laws=laws, **options)
    record = {
        "objective": objective,
        "largest objective before": max(result.before.values(), default=0.0),
        "largest objective after": max(result.after.values(), default=0.0),
        "left alone": dict(result.skipped),
    }
    _report(result.moved, weights, record, dry=dry_run, as_json=as_json)


def _fit_and_report(
    folder: Path, out: Path | None, scheme: str, texts: Path | None, model: str | None, *, dry: bool, as_json: bool
) -> None:
    """Say what a scheme gains in every layer, and write it if that was asked for."""
    from conserved.transform import SCHEMES, Checkpoint, fit_to_scheme
    from conserved.transform import move as moved

    if scheme not in SCHEMES:
        raise UsageError(
            f"Expected a scheme among {', '.join(SCHEMES)}, got {scheme!r}.{did_you_mean(scheme, SCHEMES)}"
        )
    laws = _laws(folder, out, model, dry=dry)
    if texts is None:
        described = load_model(model or str(folder), [], weights=False)
        source = Checkpoint(folder, None, laws.parameters)
        fitted = fit_to_scheme(source, model=described, laws=laws, scheme=scheme, apply=False, report=progress())
    else:
        from conserved.integrations.configured_models import load_pretrained, tokenize

        batches = tokenize(str(folder), _lines(texts))
        loaded, _ = load_pretrained(str(folder), ())
        fitted = fit_to_scheme(loaded, laws=laws, batches=batches, scheme=scheme, apply=False, report=progress())
    unchanged = fitted.chosen == "left alone"
    if not as_json:
        say(fitted.summary())
    written = out is not None and not dry and not unchanged
    if written:
        moved(Checkpoint(folder, out, laws.parameters), dict(fitted.elements), laws=laws, values=False)
    if as_json:
        layers = {name: list(pair) for name, pair in fitted.layers.items()}
        names = {"scheme": scheme, "chosen": fitted.chosen, "measure": fitted.measure, "tried": fitted.tried}
        print_json({**names, "layers": layers, "left alone": fitted.skipped, "written": str(out) if written else None})
    else:
        say(f"Written to {out}." if written else "Nothing was written.")


@command(WEIGHTS)
def move(
    folder: Folder,
    by: Annotated[
        list[str] | None, typer.Option("--by", help="NAME=NUMBER: a symmetry (* for any text) and a scale")
    ] = None,
    elements: Annotated[Path | None, typer.Option(help="safetensors file with a group element for each name")] = None,
    random: Annotated[int | None, typer.Option(help="seed: move every exact symmetry by a random element")] = None,
    out: Out = None,
    model: Model = None,
    dry_run: Dry = False,
    as_json: AsJson = False,
) -> None:
    """Move a checkpoint along its symmetries by given group elements: other weights, the same function."""
    import torch

    from conserved.transform import Checkpoint
    from conserved.transform import move as moved

    if not by and elements is None and random is None:
        raise UsageError("Say how to move: --by 'NAME=2.0', --elements FILE or --random SEED.")
    laws = _laws(folder, out, model, dry=dry_run)
    chosen: dict[str, Tensor] = {}
    if random is not None:
        generator = torch.Generator().manual_seed(random)
        chosen |= {s.name: s.element(generator=generator) for s in laws.symmetries if s.exact}
    for text in by or ():
        chosen |= _parse_scales(text, laws.symmetries)
    if elements is not None:
        chosen |= _elements(elements)
    weights = Checkpoint(folder, None if dry_run else out, laws.parameters)
    _report(moved(weights, chosen, laws=laws), weights, {}, dry=dry_run, as_json=as_json)


def _laws(folder: Path, out: Path | None, model: str | None, *, dry: bool) -> LawSet:
    """Return the symmetries of the model a folder describes, read without its weights."""
    from conserved.transform import symmetries_of

    if out is None and not dry:
        raise UsageError("Name the folder to write to with -o, or ask for a --dry-run.")
    if not folder.is_dir():
        raise UsageError(f"Expected a folder, got {folder}, which does not exist. Check the path.")
    if not any(folder.glob("*.safetensors")):
        raise UsageError(
            f"Expected a folder with config.json and safetensors files, got {folder} without weights. Name "
            "another folder."
        )
    return symmetries_of(load_model(model or str(folder), [], weights=False))


def _in_memory(folder: Path, laws: LawSet, weights: Checkpoint, texts: Path | None, options: dict[str, Any]) -> Any:
    """Load the whole model, move it, and write the tensors that moved; or all of them, if files have other tensors."""
    from conserved.integrations.configured_models import load_pretrained, tokenize
    from conserved.transform import UnmovableError
    from conserved.transform import equalize as equalized

    batches = tokenize(str(folder), _lines(texts)) if texts is not None else None
    model, _ = load_pretrained(str(folder), ())
    equalized_model = equalized(model, laws=laws, batches=batches, **options)
    moved = list(dict.fromkeys(equalized_model.moved.parameters))
    try:
        for name in moved:
            weights.movable(name, next(s for s in laws.symmetries if name in s.parameters))
    except UnmovableError:
        weights.written += moved
        with weights.complete():
            if weights.staging is not None:
                for file in weights.staging.glob("*.safetensors*"):
                    file.unlink()
                library: Any = model
                library.save_pretrained(weights.staging)
        return equalized_model
    own = dict(model.named_parameters())
    with weights.complete():
        weights.write({name: own[name].detach() for name in moved})
    return equalized_model


def _lines(texts: Path) -> list[str]:
    try:
        lines = [line for line in texts.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageError(f"{texts} cannot be read as text: {problem}") from problem
    if not lines:
        raise UsageError(f"Expected lines of text in {texts}, got none. Name another file.")
    return lines


def _parse_scales(text: str, symmetries: Sequence[Symmetry]) -> dict[str, Tensor]:
    """Return NAME=NUMBER as elements: a scale, or for a translation the number that is added."""
    import torch

    from conserved.transform.elements import element_shape

    name, separator, number = text.rpartition("=")
    try:
        value = float(number)
    except ValueError:
        raise UsageError(f"Expected an element as NAME=NUMBER, got {text!r}. Write neurons=2.0, for example.") from None
    pattern = re.compile(".*".join(map(re.escape, name.split("*"))))
    matches = [s for s in symmetries if pattern.fullmatch(s.name)]
    if not separator or not matches:
        names = [s.name for s in symmetries]
        known = ", ".join(names[:3])
        raise UsageError(f"No symmetry is called {name!r}; there are {known}, ….{did_you_mean(name, names)}")
    result = {}
    for s in matches:
        if s.kind.linear:
            result[s.name] = torch.full(element_shape(s), value, dtype=torch.float64)
        else:
            units = element_shape(s)[0] if element_shape(s) else 1
            result[s.name] = s.kind.scaling_element(torch.full((units,), value, dtype=torch.float64))
    return result


def _elements(path: Path) -> dict[str, Tensor]:
    from conserved.optional import require

    if not path.is_file():
        raise UsageError(f"There is no file {path}.")
    library: Any = require("safetensors.torch", "Reading group elements from a file")
    try:
        return dict(library.load_file(str(path)))
    except Exception as problem:
        raise UsageError(f"{path} cannot be read: {problem}") from problem


def _report(moved: MovedWeights, weights: Checkpoint, record: dict[str, Any], *, dry: bool, as_json: bool) -> None:
    """Print what was done, or what would be done."""
    changed = sorted(set(weights.written))
    if as_json:
        print_json(
            {
                "symmetries": list(moved.moved),
                "tensors": changed,
                "written": None if dry else str(weights.into),
                "notes": list(moved.notes),
                **record,
            }
        )
        return
    say(f"{len(moved.moved)} symmetries {'would move' if dry else 'moved'} {len(changed)} of {len(weights)} tensors")
    for name in changed[:10]:
        say(f"  {name}")
    if len(changed) > 10:
        say(f"  … and {len(changed) - 10} more")
    for key, value in record.items():
        if isinstance(value, float):
            say(f"{key}: {value:.3g}")
        elif isinstance(value, dict):
            reasons: dict[str, list[str]] = {}
            for name, why in value.items():
                reasons.setdefault(why, []).append(name)
            for why, names in reasons.items():
                say(f"left alone: {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {why}")
    for note in moved.notes:
        say(note)
    say("Nothing was written." if dry else f"Written to {weights.into}.")
