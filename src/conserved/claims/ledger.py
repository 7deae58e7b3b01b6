"""The ledger of claims: where they are registered, how they are looked up, and how they are run."""

from __future__ import annotations

import fnmatch
import importlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.metadata import entry_points
from importlib.resources import files
from typing import Literal

import torch

from conserved.claims.claim import Check, Claim, Outcome, Severity
from conserved.claims.passages import DOCUMENTS, spans
from conserved.verdict import Verdict

SOURCES = {name: document.title for name, document in DOCUMENTS.items()}
"""The titles of the documents whose claims come with this package, in the order they are shown."""

_MODULES = (
    "paper_framework",
    "paper_laws",
    "paper_lemmas",
    "paper_gradients",
    "paper_discrete",
    "paper_experiments",
    "summary",
    "blog",
    "softmax_invariants",
    "note",
    "note_gradients",
    "note_information",
)

ENTRY_POINT = "conserved.claims"
"""Packages that name a module in this group have it imported, to register their claims."""

Progress = Callable[[Claim, int, int], None]
"""Told before each check: the claim, its place and how many there are."""

_registered: dict[str, Claim] = {}


class NoSuchClaim(ValueError):
    """A pattern matches no claim; the message says what there is."""


def register(claim: Claim) -> Claim:
    """Add a claim to the ledger. A code can be used once."""
    if claim.code in _registered:
        raise ValueError(f"There is a claim {claim.code} already: {_registered[claim.code].title}.")
    _registered[claim.code] = claim
    return claim


def claim(
    code: str,
    title: str,
    *,
    statement: str,
    place: str,
    lines: str = "",
    whose: Literal["source", "ours"] = "source",
    conditions: Sequence[str] = (),
    hypotheses: str = "",
    latex: Sequence[str] = (),
    severity: str = "",
    under: str = "",
    corrected_by: str = "",
    corrects: str = "",
    source: str = "",
    slow: bool = False,
) -> Callable[[Check], Check]:
    """Register the function below as the check of a claim; the function itself is left as it is. See `Claim`."""

    def registering(check: Check) -> Check:
        document = code.partition(".")[0]
        register(
            Claim(
                code=code,
                title=title,
                statement=statement,
                source=source or SOURCES.get(document, document),
                place=place,
                check=check,
                lines=lines,
                whose=whose,
                conditions=tuple(conditions),
                hypotheses=hypotheses,
                latex=tuple(latex),
                severity=Severity(severity) if severity else None,
                under=under,
                corrected_by=corrected_by,
                corrects=corrects,
                slow=slow,
            )
        )
        return check

    return registering


def claims(pattern: str | None = None) -> list[Claim]:
    """The claims that a pattern names, source by source.

    A pattern is a code (note.L10), the beginning of codes (note, paper.T4), or has wildcards (*.corrected). Case does
    not matter. A code that is given in full names that claim alone.
    """
    _load()
    everything = sorted(_registered.values(), key=_order)
    if pattern is None:
        return everything
    wanted = pattern.lower()
    exact = [claim for claim in everything if claim.code.lower() == wanted]
    found = exact or [
        claim
        for claim in everything
        if claim.code.lower().startswith(wanted) or fnmatch.fnmatchcase(claim.code.lower(), wanted)
    ]
    if not found:
        there = ", ".join(claim.code for claim in everything)
        raise NoSuchClaim(f"No claim matches {pattern!r}. There are: {there}.")
    return found


def _order(claim: Claim) -> tuple[int, int, str]:
    """By source and by the line where it says so; claims of other packages come last."""
    sources = list(SOURCES)
    known = claim.document in sources
    first = spans(claim.lines)[0][0] if claim.lines else 10**6
    return (sources.index(claim.document), first, claim.code) if known else (len(sources), 0, "")


def run(pattern: str | None = None, *, progress: Progress | None = None) -> list[Outcome]:
    """Check the claims that a pattern names (all by default); see `claims` for patterns.

    >>> [outcome] = run("note.L10")
    >>> outcome.verdict.status
    <Status.REFUTED: 'refuted'>
    """
    return list(outcomes(claims(pattern), progress=progress))


def outcomes(chosen: Sequence[Claim], *, progress: Progress | None = None) -> Iterator[Outcome]:
    """Check claims one after the other. A check that fails is reported as such and does not stop the rest."""
    for place, one in enumerate(chosen):
        if progress is not None:
            progress(one, place, len(chosen))
        yield outcome(one)


def outcome(claim: Claim) -> Outcome:
    """Check one claim, with random numbers that do not depend on what ran before."""
    failure = ""
    start = time.perf_counter()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            verdict = claim.check()
        except Exception as problem:
            failure = f"{type(problem).__name__}: {problem}"
            verdict = Verdict(status=Verdict.INCONCLUSIVE, message=f"The check did not come to an end. {failure}")
    seconds = time.perf_counter() - start
    was = recorded().get(claim.code, "")
    return Outcome(claim=claim, verdict=verdict, seconds=seconds, recorded=was, failure=failure)


@cache
def recorded() -> dict[str, str]:
    """The statuses of the last recorded run; only `changed` asks for them, never a check."""
    text = files("conserved.claims").joinpath("recorded.json").read_text(encoding="utf-8")
    found: dict[str, str] = json.loads(text)
    return found


@cache
def _load() -> None:
    for name in _MODULES:
        importlib.import_module(f"conserved.claims.{name}")
    for plugin in entry_points(group=ENTRY_POINT):
        plugin.load()
