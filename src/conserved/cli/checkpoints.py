"""Questions about checkpoints in folders: which layers scale against which, and are two of them one model?"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conserved.cli.app import DOES_NOT_HOLD, WEIGHTS, AsJson, Output, UsageError, command, deliver, did_you_mean, say
from conserved.cli.app import progress as reporter
from conserved.cli.models import load_model

if TYPE_CHECKING:
    from torch import nn

Folder = Annotated[Path, typer.Argument(help="folder with config.json and safetensors files", metavar="FOLDER")]
Model = Annotated[
    str | None,
    typer.Option("--model", help="path/to/file.py:factory, where config.json does not say what the model is"),
]
NewFolder = Annotated[Path | None, typer.Option("-o", "--output", help="folder to write the moved checkpoint to")]

SEVERAL = 6.0
"""How many samples of rounding two checkpoints of one model may differ by, as each move rounds them again."""


def check_folder(folder: Path) -> Path:
    """Refuse a folder that holds no checkpoint."""
    if not folder.is_dir():
        raise UsageError(f"Expected a folder, got {folder}, which does not exist. Check the path.")
    if not any(folder.glob("*.safetensors")):
        raise UsageError(
            f"Expected a folder with config.json and safetensors files, got {folder} without weights. Name "
            "another folder."
        )
    return folder


def model_of_folder(folder: Path, model: str | None) -> nn.Module:
    """Return the model that a folder describes, without its weights."""
    return load_model(model or str(check_folder(folder)), [], weights=False)


@command(WEIGHTS)
def mappings(
    folder: Folder,
    form: Annotated[str, typer.Option("--format", help="plain, llmcompressor or autoround")] = "plain",
    model: Model = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """List which layers scale against which, for any architecture; weights are not read."""
    from conserved.transform import FORMATS
    from conserved.transform import mappings as found_mappings
    from conserved.transform.mapping import in_format, missing_form

    if form not in FORMATS:
        raise UsageError(f"Expected a format among {', '.join(FORMATS)}, got {form!r}.{did_you_mean(form, FORMATS)}")
    described = load_model(model or str(check_folder(folder)), [], weights=False)
    layer_mappings: list[Any] = found_mappings(described)
    incomplete = [] if form == "plain" else [mapping for mapping in layer_mappings if missing_form(mapping)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        listed = in_format(described, layer_mappings, form) if form != "plain" else []
    record = {
        "format": form,
        "mappings": listed
        or [
            {
                "smooth": mapping.smooth,
                "balance": mapping.balance,
                "channels": mapping.channels,
                "reason": mapping.reason,
            }
            for mapping in layer_mappings
        ],
        "left out": [
            {"smooth": mapping.smooth, "balance": mapping.balance, "reason": missing_form(mapping)}
            for mapping in incomplete
        ],
    }
    if deliver(record, as_json=as_json, output=output):
        return
    if form == "plain":
        for mapping in layer_mappings:
            layers = f"{', '.join(mapping.smooth)} → {', '.join(mapping.balance)}"
            say(f"{layers}  ({mapping.channels} channels)\n    {mapping.reason}")
    for entry in listed:
        say(f"{entry['smooth_layer']} → {', '.join(entry['balance_layers'])}")
    reasons: dict[str, list[Any]] = {}
    for mapping in incomplete:
        reasons.setdefault(missing_form(mapping), []).append(mapping)
    for why, members in reasons.items():
        pair = f"{', '.join(members[0].smooth)} → {', '.join(members[0].balance)}"
        say(f"left out: {pair}{f' and {len(members) - 1} more' if len(members) > 1 else ''}: {why}")
    say(f"{len(layer_mappings)} mappings, {len(incomplete)} left out.")


@command(WEIGHTS)
def fingerprint(
    folder: Folder,
    other: Annotated[Path | None, typer.Argument(help="a second folder to compare with", metavar="OTHER")] = None,
    model: Model = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Print a digest that no change of gauge alters; with a second folder, say whether the two agree."""
    from conserved.transform import Checkpoint, coupled_spaces, symmetries_of
    from conserved.transform import fingerprint as taken

    folders = [check_folder(print_) for print_ in (folder, other) if print_ is not None]
    described = model_of_folder(folder, model)
    laws, spaces = symmetries_of(described), coupled_spaces(described)
    fingerprints, rounding = [], 0.0
    for path in folders:
        reporter()(f"reading {path}, a group of tensors at a time")
        weights = Checkpoint(path, None, laws.parameters)
        fingerprints.append(taken(weights, laws=laws, exchanges=spaces))
        if other is not None:
            reporter()("once more, with other rounding")
            rounded = taken(weights, laws=laws, exchanges=spaces, rounding_seed=0)
            rounding = max(rounding, fingerprints[-1].difference(rounded))
    difference = fingerprints[0].difference(fingerprints[-1])
    same = difference <= SEVERAL * rounding
    explained = f"they differ by {difference:.1e}, and rounding explains {SEVERAL * rounding:.1e}"
    record: dict[str, Any] = {str(path): print_.digest for path, print_ in zip(folders, fingerprints, strict=True)}
    if other is not None:
        record |= {"difference": difference, "rounding": SEVERAL * rounding, "agree": same}
    if not deliver(record, as_json=as_json, output=output):
        for path, print_ in zip(folders, fingerprints, strict=True):
            say(f"{print_.digest}  {path}")
        if other is not None and same:
            say(f"The same model in another gauge, as far as these numbers see: {explained}.")
        elif other is not None:
            say(f"Different models: {explained}.")
    if other is not None and not same:
        raise typer.Exit(DOES_NOT_HOLD)


@command(WEIGHTS)
def align(
    reference: Annotated[Path, typer.Argument(help="folder of the checkpoint to come near to", metavar="REFERENCE")],
    folder: Folder,
    out: NewFolder = None,
    as_json: AsJson = False,
) -> None:
    """Move one checkpoint as near to another as its symmetries allow, before merging or comparing; loads both."""
    from conserved.transform import align as aligned

    goal, own = _load(reference), _load(folder)
    _free(out)
    reporter()("finding symmetries, units and rotations, then going round them")
    alignment = aligned(goal, own)
    worst = dict(sorted(alignment.remains.items(), key=lambda item: -item[1])[:10])
    record = {
        "before": alignment.before,
        "after": alignment.after,
        "rounds": alignment.rounds,
        "remains": worst,
        "left alone": alignment.skipped,
        "written": None if out is None else str(out),
    }
    _save(own, folder, out)
    if not deliver(record, as_json=as_json, output=None):
        say(f"distance {alignment.before:.4g} → {alignment.after:.4g} in {alignment.rounds} rounds")
        for name, size in worst.items():
            say(f"  {size:8.2g}  {name}")
        for name, why in alignment.skipped.items():
            say(f"left alone: {name}: {why}")
        say("Nothing was written; name a folder with -o." if out is None else f"Written to {out}.")


@command(WEIGHTS)
def canonical(folder: Folder, out: NewFolder = None, as_json: AsJson = False) -> None:
    """Write the checkpoint at the one point that stands for all gauges: equal models become equal files. Loads it."""
    import torch

    from conserved.transform import canonical as represented

    own = _load(folder)
    _free(out)
    reporter()("finding symmetries, units and rotations")
    state = represented(own)
    parameters = dict(own.named_parameters())
    moved = {
        name: float((state[name].double() - p.detach().double()).norm() / p.detach().double().norm().clamp_min(1e-30))
        for name, p in parameters.items()
    }
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state[name])
    _save(own, folder, out)
    record = {"moved": {n: v for n, v in moved.items() if v > 1e-6}, "written": None if out is None else str(out)}
    if not deliver(record, as_json=as_json, output=None):
        changed = sum(value > 1e-6 for value in moved.values())
        say(f"{changed} of {len(moved)} tensors {'would move' if out is None else 'moved'}; the function is the same.")
        say("Nothing was written; name a folder with -o." if out is None else f"Written to {out}.")


def _load(folder: Path) -> nn.Module:
    from conserved.integrations.configured_models import load_pretrained

    model, _ = load_pretrained(str(check_folder(folder)), ())
    return model.eval()


def _free(out: Path | None) -> None:
    """Refuse a folder that has something in it before any work is done."""
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"Expected an empty folder to write to, got {out}. Name another.")


def _save(model: nn.Module, folder: Path, out: Path | None) -> None:
    """Write a model where it was asked for, with the other files of the folder it came from."""
    import shutil

    if out is None:
        return
    library: Any = model
    library.save_pretrained(out)
    for file in folder.iterdir():
        if (
            file.is_file()
            and not (out / file.name).exists()
            and not file.name.endswith((".safetensors", ".index.json"))
        ):
            shutil.copyfile(file, out / file.name)
