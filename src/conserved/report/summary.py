"""The headline verdicts, each computed from the records in the store."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from conserved.report.contents import Contents
from conserved.report.numerals import numeral
from conserved.verdict import Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """One tile of the summary: a figure, what it counts, what it means, and where the details are."""

    label: str
    figure: str
    sentence: str
    status: Status | None
    anchor: str
    said: str = ""
    """How the status is put, where its own name would mislead."""


def headlines(contents: Contents) -> tuple[Headline, ...]:
    """One for every kind of record that is there."""
    made = (_figures, _runs, _claims, _audits, _attention, _laws)
    return tuple(found for make in made if (found := make(contents)) is not None)


def overall(*statuses: Status) -> Status:
    """One status for several: refuted if any is, inconclusive if any is not known or there is none."""
    if Status.REFUTED in statuses:
        return Status.REFUTED
    if not statuses or Status.INCONCLUSIVE in statuses:
        return Status.INCONCLUSIVE
    return Status.PROVED if all(status is Status.PROVED for status in statuses) else Status.VERIFIED


def _figures(contents: Contents) -> Headline | None:
    if not contents.figures:
        return None
    judged = [item.holds for plot in contents.figures for item in plot.findings if item.holds is not None]
    held = sum(judged)
    failed = [item.what for plot in contents.figures for item in plot.findings if item.holds is False]
    sentence = f"measured statements hold, in {len(contents.figures)} {_plural('figure', len(contents.figures))}"
    if contents.trajectories:
        sentence += f" from {contents.trajectories:,} training runs"
    status = None if not judged else Status.VERIFIED if held == len(judged) else Status.REFUTED
    return Headline(
        label="Figures",
        figure=f"{held} of {len(judged)}",
        sentence=sentence + (f"; not so: {failed[0]}" if failed else ""),
        status=status,
        anchor="figures",
    )


def _runs(contents: Contents) -> Headline | None:
    if not contents.runs:
        return None
    alarms = sum(run.alarm_count for run in contents.runs)
    steps = sum(run.steps for run in contents.runs)
    status = overall(*(run.status for run in contents.runs))
    meaning = {
        Status.VERIFIED: "the account of every step closes to rounding",
        Status.REFUTED: f"the account does not close; {alarms:,} alarms",
    }.get(status, "not every run has a step yet")
    return Headline(
        label="Watched training",
        figure=f"{numeral(steps)} steps",
        sentence=f"in {len(contents.runs)} {_plural('run', len(contents.runs))}: {meaning}",
        status=status,
        anchor="runs",
    )


def _claims(contents: Contents) -> Headline | None:
    if not contents.claims:
        return None
    count = Counter(card.status for card in contents.claims)
    listing = ", ".join(f"{count[status]} {status.value}" for status in Status if count[status])
    strange = sum(not card.as_recorded for card in contents.claims)
    return Headline(
        label="Claims",
        figure=f"{len(contents.claims)} judged",
        sentence=listing,
        status=Status.REFUTED if strange else Status.VERIFIED,
        anchor="claims",
        said=f"{strange} not as recorded" if strange else "all as recorded",
    )


def _audits(contents: Contents) -> Headline | None:
    if not contents.audits:
        return None
    total = sum(audit.identities for audit in contents.audits)
    planted = [audit for audit in contents.audits if audit.expected == Status.REFUTED]
    strange = [audit.name for audit in contents.audits if not audit.as_expected]
    clean = sum(audit.status is Status.VERIFIED for audit in contents.audits)
    sentence = f"{total:,} identities"
    if planted:
        caught = sum(audit.as_expected for audit in planted)
        sentence += f"; {caught} of {len(planted)} planted {_plural('defect', len(planted))} found"
    if strange:
        sentence += f"; look at {strange[0]}"
    unknown = any(audit.status is Status.INCONCLUSIVE for audit in contents.audits)
    return Headline(
        label="Gradient audits",
        figure=f"{clean} of {len(contents.audits) - len(planted)} clean",
        sentence=sentence,
        status=Status.VERIFIED if not strange else Status.INCONCLUSIVE if unknown else Status.REFUTED,
        anchor="audits",
    )


def _attention(contents: Contents) -> Headline | None:
    if not contents.attention:
        return None
    heads = sum(probe.heads for probe in contents.attention)
    return Headline(
        label="Attention",
        figure=f"{heads:,} {_plural('head', heads)}",
        sentence="zero row sums and rank bounds of their energy fields",
        status=overall(*(probe.status for probe in contents.attention)),
        anchor="attention",
    )


def _laws(contents: Contents) -> Headline | None:
    if not contents.laws:
        return None
    numbers = sum(section.numbers for section in contents.laws)
    laws = sum(section.laws for section in contents.laws)
    models = len(contents.laws)
    return Headline(
        label="Laws",
        figure=f"{numbers:,} numbers",
        sentence=f"conserved by {laws:,} {_plural('law', laws)} of {models} {_plural('model', models)}",
        status=None,
        anchor="laws",
    )


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"
