"""Run what the sources claim, and show the verdicts."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.syntax import Syntax
from rich.table import Column, Table
from rich.text import Text

from conserved.cli.app import (
    DOES_NOT_HOLD,
    INTERRUPTED,
    PAPERS,
    AsJson,
    Output,
    command,
    count_progress,
    deliver,
    exit_with,
    in_a_folder,
    papers_installed,
    print_json,
    say,
)
from conserved.optional import require
from conserved.output.terminal import Console
from conserved.plain_data import record_of
from conserved.verdict import Status

STYLES = {
    Status.PROVED: "bold green",
    Status.VERIFIED: "green",
    Status.REFUTED: "bold red",
    Status.INCONCLUSIVE: "yellow",
    Status.ANSWERED: "bold magenta",
}


def _codes(incomplete: str) -> list[str]:
    """Complete codes of claims from the recorded verdicts: the claims themselves take a second to load."""
    if not papers_installed():
        return []
    from importlib.resources import files

    known = json.loads(files("conserved_papers").joinpath("claims", "recorded.json").read_text(encoding="utf-8"))
    return sorted(code for code in known if code.startswith(incomplete))


@command(PAPERS)
def claims(
    pattern: Annotated[
        str | None,
        typer.Argument(
            help="a code (note.L10), the beginning of codes (paper.T4), or *.corrected", autocompletion=_codes
        ),
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="List the claims without running them.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if a verdict is not the recorded one.")] = False,
    store: Annotated[
        Path | None, typer.Option(help="keep the outcomes in this run store", callback=in_a_folder)
    ] = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Run the claims of the papers, the blog post and the notes, and say which hold.

    The exit code of one claim is its verdict; a list of several exits with 0 unless a check fails.
    """
    require("conserved_papers", "The command `claims`")
    from conserved_papers.claims.registry import claims, outcomes

    chosen = claims(pattern)
    if listing:
        _list(chosen, as_json)
        return
    result: list[Any] = []
    interrupted = False
    with count_progress("claims", len(chosen)) as (errors, moved):

        def tell(claim: Any, index: int, count: int) -> None:
            moved(completed=index, description=claim.code)
            if not errors.is_terminal:
                say(f"{index + 1}/{count} {claim.code} {claim.title}", errors)

        try:
            for outcome in outcomes(chosen, progress=tell):
                result.append(outcome)
                if store is not None:
                    from conserved.store.sqlite_sink import store_document

                    store_document(store, "claim", outcome.claim.code, outcome.record())
        except KeyboardInterrupt:
            interrupted = True
    changed = [outcome for outcome in result if outcome.changed]
    broken = [outcome for outcome in result if outcome.failure]
    record = {
        "claims": [outcome.record() for outcome in result],
        "counts": _counts(result),
        "severities": _severities(result),
        "left": len(chosen) - len(result),
        "changed": [outcome.claim.code for outcome in changed],
        "failed": [outcome.claim.code for outcome in broken],
    }
    if not deliver(record, as_json=as_json, output=output):
        console = Console()
        if len(chosen) == 1 and result:
            # Lines are printed whole, for the terminal to wrap: a witness that is cut cannot be pasted.
            console.print(_detail(result[0]), soft_wrap=True)
        elif result:
            console.print(_table(result))
        if interrupted:
            line = f"Interrupted: {len(chosen) - len(result)} of {len(chosen)} claims were not run."
            line += f" The others are in {store}." if store is not None and result else ""
            say(line, style="yellow")
        for outcome in broken:
            console.print(Text(f"{outcome.claim.code} did not come to an end: {outcome.failure}", style="red"))
        for outcome in changed if strict else ():
            was = outcome.recorded or "not recorded"
            say(f"{outcome.claim.code} is {outcome.verdict.status.value}; it was {was}", style="red")
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if broken or (strict and changed):
        raise typer.Exit(DOES_NOT_HOLD)
    if len(chosen) == 1 and not strict:
        exit_with(result[0].verdict.status)


def _counts(outcomes: list[Any]) -> dict[str, int]:
    counted = Counter(outcome.verdict.status.value for outcome in outcomes)
    return {status.value: counted[status.value] for status in Status}


def _severities(outcomes: list[Any]) -> dict[str, int]:
    """Return refutations of the sources' statements by weight; what falls with another claim is counted with it."""
    counted = Counter(
        o.severity.value for o in outcomes if o.severity and o.claim.whose == "source" and not o.claim.under
    )
    return dict(sorted(counted.items()))


def _list(chosen: list[Any], as_json: bool) -> None:
    if as_json:
        columns = "code title statement conditions hypotheses source whose place lines severity under"
        print_json({"claims": [record_of(claim, f"{columns} corrected_by corrects slow") for claim in chosen]})
        return
    console = Console()
    for source, group in itertools.groupby(chosen, key=lambda claim: claim.source):
        table = Table(box=None, pad_edge=False, show_header=False, title=source, title_justify="left")
        for claim in group:
            table.add_row(claim.code, Text(claim.title))
        console.print(table)


def _table(outcomes: list[Any]) -> RenderableType:
    parts: list[RenderableType] = []
    for source, group in itertools.groupby(outcomes, key=lambda outcome: outcome.claim.source):
        columns = (Column(no_wrap=True), Column(no_wrap=True), Column())
        table = Table(*columns, box=None, pad_edge=False, show_header=False, title=source, title_justify="left")
        for outcome in group:
            status = outcome.verdict.status
            title = Text(outcome.claim.title)
            if outcome.claim.whose == "ours":
                title.append(" (ours)", style="dim")
            if outcome.severity:
                title.append(f" · {outcome.severity.value}", style="red")
            if outcome.claim.under and status is Status.REFUTED:
                title.append(f", with {outcome.claim.under}", style="dim")
            if outcome.claim.corrected_by and status is Status.REFUTED:
                title.append(f" → {outcome.claim.corrected_by}", style="dim")
            table.add_row(outcome.claim.code, Text(status.value, style=STYLES[status]), title)
        parts += [table, Text()]
    summary = ", ".join(f"{count} {status}" for status, count in _counts(outcomes).items() if count)
    weights = ", ".join(f"{count} {name}" for name, count in _severities(outcomes).items())
    summary += f"; errors of the sources, each counted once: {weights}" if weights else ""
    seconds = sum(outcome.seconds for outcome in outcomes)
    parts.append(Text(f"{len(outcomes)} claims in {seconds:.0f} s: {summary}", style="bold"))
    return Group(*parts)


def _detail(outcome: Any) -> RenderableType:
    """Return everything about one claim."""
    claim, verdict = outcome.claim, outcome.verdict
    parts: list[RenderableType] = [
        Text(f"{claim.code}  {claim.title}", style="bold"),
        Text(f"{claim.source}, {claim.passage}", style="dim"),
    ]
    if claim.passage.fingerprint:
        parts.append(Text(f"fingerprint of those lines: {claim.passage.fingerprint}", style="dim"))
    parts.append(Text("Ours:" if claim.whose == "ours" else "The source states, in our words:", style="dim"))
    parts.append(Text(f"\n{claim.statement}"))
    if claim.conditions:
        parts.append(Text(f"Conditions stated there: {'; '.join(claim.conditions)}"))
    if claim.hypotheses:
        parts.append(Text(f"Given: {claim.hypotheses}"))
    parts += [Text(f"  {line}", style="dim") for line in claim.latex]
    parts += [Text(f"  {line}  (a formula of ours)", style="dim") for line in claim.own_latex]
    weight = f", {outcome.severity.value}" if outcome.severity else ""
    parts.append(Text.assemble("\n", (f"{verdict.heading}{weight}", STYLES[verdict.status]), f": {verdict.message}"))
    parts += [Text(f"  {'proof: ' if item.proof else ''}{item}") for item in verdict.evidence]
    if verdict.witness is not None:
        witness = verdict.witness
        parts.append(Text("\nWitness", style="bold"))
        parts += [Text(f"  {name} = {value}") for name, value in witness.data.items()]
        parts.append(Text(f"  claimed: {witness.claimed}\n  found:   {witness.found}"))
        if witness.numpy:
            code = Syntax(witness.numpy, "python", background_color="default").highlight(witness.numpy)
            parts += [Text("\nIn NumPy", style="bold"), code]
    if claim.under:
        parts.append(Text(f"\nFalls with {claim.under}, and is not counted again"))
    if claim.corrected_by:
        parts.append(Text(f"\nWhat holds instead: {claim.corrected_by}"))
    if claim.corrects:
        parts.append(Text(f"\nReplaces {claim.corrects}"))
    return Group(*parts)
