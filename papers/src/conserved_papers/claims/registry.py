"""The registry of claims: where they are registered, how they are looked up, and how they are run."""

from __future__ import annotations

import difflib
import fnmatch
import importlib
import json
import pkgutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from importlib.resources import files
from typing import Any

import torch

import conserved_papers.claims
from conserved.errors import InvalidInputError
from conserved.output.result_list import ResultList
from conserved.verdict import Verdict
from conserved_papers.claims.claim_record import Claim, ClaimCheck, Outcome, Severity, Standing
from conserved_papers.claims.passages import DOCUMENTS, spans
from conserved_papers.claims.texts import read_text

SOURCES = {name: document.title for name, document in DOCUMENTS.items()}
"""The titles of the documents whose claims come with this package, in the order they are shown."""

ENTRY_POINT = "conserved.claims"
"""Packages that name a module in this group have it imported, to register their claims."""

ClaimProgress = Callable[[Claim, int, int], None]
"""Told before each check: the claim, its place and how many there are."""

_registered: dict[str, Claim] = {}


class NoSuchClaimError(InvalidInputError, ValueError):
    """A pattern matches no claim; the message says what there is."""


def register(claim: Claim) -> Claim:
    """Add a claim to the ledger.

    Args:
        claim: a claim whose code is not used yet.

    Returns:
        The claim.

    Raises:
        ValueError: there is a claim of this code already.
    """
    if claim.code in _registered:
        raise ValueError(f"There is a claim {claim.code} already: {_registered[claim.code].title}.")
    _registered[claim.code] = claim
    return claim


def claim(code: str, title: str = "", **fields: Any) -> Callable[[ClaimCheck], ClaimCheck]:
    """Register the function below as the check of a claim; the function itself is left as it is.

    Args:
        code: the stable code: the source, then the place, such as note.L10.
        title: a few words for lists; claims of this package leave it out and have theirs in readings.yaml.
        **fields: further fields of `Claim`; `statement` and `place` are needed with a title.

    Returns:
        The decorator.

    Raises:
        ValueError: there is a claim of this code already.
    """

    def registering(check: ClaimCheck) -> ClaimCheck:
        given = dict(fields, title=title) if title else dict(readings()[code])
        given |= {name: tuple(given.get(name, ())) for name in ("latex", "own_latex", "conditions")}
        given["lines"] = str(given.get("lines", ""))
        given["severity"] = Severity(given["severity"]) if given.get("severity") else None
        document = code.partition(".")[0]
        given["source"] = given.get("source") or SOURCES.get(document, document)
        register(Claim(code=code, check=check, **given))
        return check

    return registering


def readings() -> dict[str, dict[str, Any]]:
    """Return what the claims of this package say, by code: the fields of `Claim` in readings.yaml."""
    result: dict[str, dict[str, Any]] = read_text("readings")
    return result


def claims(pattern: str | None = None) -> list[Claim]:
    """Return the claims that a pattern names, source by source.

    Args:
        pattern: a code (note.L10), the beginning of codes (note, paper.T4), or a pattern with wildcards (*.corrected).
            Case does not matter. A code that is given in full names that claim alone. By default all claims.

    Returns:
        The claims, by source and line.

    Raises:
        NoSuchClaimError: nothing matches.
    """
    _load()
    everything = sorted(_registered.values(), key=_order)
    if pattern is None:
        return everything
    wanted = pattern.lower()
    exact = [claim for claim in everything if claim.code.lower() == wanted]
    result = exact or [
        claim
        for claim in everything
        if claim.code.lower().startswith(wanted) or fnmatch.fnmatchcase(claim.code.lower(), wanted)
    ]
    if not result:
        codes = {claim.code.lower(): claim.code for claim in everything}
        near = [codes[code] for code in difflib.get_close_matches(wanted, codes)]
        meant = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        sources = ", ".join(dict.fromkeys(claim.code.partition(".")[0] for claim in everything))
        raise NoSuchClaimError(f"No claim matches {pattern!r}.{meant} Codes begin with {sources}.")
    return result


def _order(claim: Claim) -> tuple[int, int, str]:
    """Return the sort key of a claim: its source and line. Claims of other packages come last."""
    sources = list(SOURCES)
    known = claim.document in sources
    first = spans(claim.lines)[0][0] if claim.lines else 10**6
    return (sources.index(claim.document), first, claim.code) if known else (len(sources), 0, "")


def run(pattern: str | None = None, *, progress: ClaimProgress | None = None) -> list[Outcome]:
    """Check claims, one after the other.

    >>> [outcome] = run("note.L10")
    >>> outcome.verdict.status
    <Status.REFUTED: 'refuted'>

    Args:
        pattern: which claims, as for `claims`; by default all.
        progress: called before each check with the claim, its place and how many there are.

    Returns:
        One outcome per claim. A check that fails is reported as such and does not stop the rest.

    Raises:
        NoSuchClaimError: nothing matches the pattern.
    """
    return ResultList(outcomes(claims(pattern), progress=progress), "outcome", _OUTCOME, _outcome_row)


_OUTCOME = ("claim", "statement", "verdict", "because")


def _outcome_row(outcome: Outcome) -> tuple[str, ...]:
    verdict = outcome.verdict
    return outcome.claim.code, outcome.claim.title, verdict.status.value, outcome.failure or verdict.message


def outcomes(chosen: Sequence[Claim], *, progress: ClaimProgress | None = None) -> Iterator[Outcome]:
    """Check claims, each when the one before has been taken.

    Args:
        chosen: the claims.
        progress: called before each check with the claim, its place and how many there are.

    Yields:
        One outcome per claim. A check that fails is reported as such and does not stop the rest.
    """
    for index, one in enumerate(chosen):
        if progress is not None:
            progress(one, index, len(chosen))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """An outcome as the last recorded run left it, without times: what pages are made of."""

    status: str
    standing: Standing
    scope: str
    message: str
    evidence: tuple[str, ...]
    witness: Mapping[str, str] | None = None


@cache
def records() -> dict[str, Record]:
    """Return the outcomes of the last recorded run, by code."""
    content = files("conserved_papers.claims").joinpath("recorded.json").read_text(encoding="utf-8")
    return {
        code: Record(**{**given, "standing": Standing(given["standing"]), "evidence": tuple(given["evidence"])})
        for code, given in json.loads(content).items()
    }


@cache
def recorded() -> dict[str, str]:
    """Return the statuses of the last recorded run; only `changed` asks for them, never a check."""
    return {code: record.status for code, record in records().items()}


@cache
def _load() -> None:
    """Import what registers claims: modules here that are named after a source, and those of other packages."""
    for module in pkgutil.iter_modules(conserved_papers.claims.__path__, "conserved_papers.claims."):
        if module.name.split(".")[-1].partition("_")[0] in SOURCES:
            importlib.import_module(module.name)
    for plugin in entry_points(group=ENTRY_POINT):
        plugin.load()
