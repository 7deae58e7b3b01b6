"""Re-run the experiments of the sources and make their figures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from conserved.cli.app import (
    DOES_NOT_HOLD,
    PAPERS,
    AsJson,
    Output,
    UsageError,
    command,
    count_progress,
    deliver,
    exit_interrupted,
    in_a_folder,
    on_device,
    papers_installed,
    say,
)
from conserved.optional import require
from conserved.output.terminal import Console

if TYPE_CHECKING:
    from conserved_papers.lab.places import Place
    from conserved_papers.lab.reproduction import ExperimentSize, Reproduction
    from conserved_papers.lab.sweep import Say


def _codes(incomplete: str) -> list[str]:
    """Complete names of figures."""
    if not papers_installed():
        return []
    from conserved_papers.lab import CODES

    return [code for code in CODES if code.startswith(incomplete)]


@command(PAPERS)
def reproduce(
    figures: Annotated[
        list[str] | None,
        typer.Argument(
            help="figure1 … figure5, ledger, …; all if none is named", metavar="FIGURE", autocompletion=_codes
        ),
    ] = None,
    full: Annotated[bool, typer.Option("--full/--small", help="the paper's sizes, or versions for two cores")] = False,
    data: Annotated[
        list[str] | None,
        typer.Option(help="a folder or file of a data set, or datasets:NAME; give one for images and one for text"),
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="seeds per experiment, instead of the recipe's")] = None,
    seconds: Annotated[float | None, typer.Option(min=1.0, help="stop each training run after so many seconds")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …", callback=on_device)] = "cpu",
    workers: Annotated[int | None, typer.Option(min=1, help="processes of this machine, by Ray")] = None,
    ray: Annotated[str | None, typer.Option(help="address of a Ray cluster, or local for two workers here")] = None,
    store: Annotated[Path, typer.Option(help="where results are kept, and looked for", callback=in_a_folder)] = Path(
        "store.db"
    ),
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Run the papers' experiments and make their figures, with fitted exponents. Stored results are not run again."""
    require("conserved_papers", "The command `reproduce`")
    from conserved.tracking import BrokenStoreError
    from conserved_papers.lab import CODES
    from conserved_papers.lab.reproduction import plan, reproduce

    try:
        scale: ExperimentSize = "full" if full else "small"
        tasks = plan(figures or CODES, scale=scale, seeds=seeds, data=data or (), device=device, seconds=seconds)
        with _progress(len(tasks)) as tell:
            result = reproduce(tasks, store, _place(workers, ray), codes=figures or CODES, say=tell)
    except BrokenStoreError as problem:
        raise UsageError(f"{problem} Name another with --store.") from None
    except KeyboardInterrupt:
        done = f"What was finished is in {store}" if store.exists() else "No result was finished"
        raise exit_interrupted(f"{done}; run the same command again to go on from there.") from None
    if not deliver({"store": str(store), **result.record()}, as_json=as_json, output=output):
        _show(result, store)
    if not result.holds:
        raise typer.Exit(DOES_NOT_HOLD)


def _place(workers: int | None, ray: str | None) -> Place:
    from conserved_papers.lab.places import LOCAL, Here, Ray

    if ray is not None:
        return Ray(ray)
    return Ray(LOCAL, workers=workers) if workers and workers > 1 else Here()


@contextmanager
def _progress(total: int) -> Iterator[Say]:
    """Show progress on standard error: a bar on a terminal, plain lines elsewhere."""
    with count_progress("experiments", total) as (errors, moved):

        def tell(message: str) -> None:
            say(message, errors, "dim" if errors.is_terminal else "")
            if message.startswith("["):
                moved(advance=1)

        yield tell


def _show(reproduction: Reproduction, store: Path) -> None:
    console = Console()
    for figure in reproduction.figures:
        table = Table(title=f"{figure.code}: {figure.title}", box=None, pad_edge=False, title_justify="left")
        for column in ("finding", "value", "95 % interval", "expected", ""):
            table.add_column(column, justify="right" if column in ("value", "95 % interval") else "left")
        for f in figure.findings:
            between = "" if f.low is None or f.high is None else f"{f.low:.3g} … {f.high:.3g}"
            table.add_row(f.what, f"{f.value:.3g}", between, f.expected, "holds" if f.holds else "does not hold")
        console.print(table, highlight=False)
        console.print()
    for failure in reproduction.sweep.failures:
        console.print(f"failed: {failure.task}: {failure.reason}", style="red", markup=False, highlight=False)
    results = reproduction.sweep.stored + reproduction.sweep.present
    say(
        f"{results} results and {len(reproduction.figures)} figures are in {store}; "
        f"see them with: conserved report {store}"
    )
