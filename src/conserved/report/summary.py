"""The headline verdicts, each computed from the records in the store."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace

from conserved.output.lines import counted
from conserved.report.contents import Contents
from conserved.report.numerals import numeral
from conserved.report.plot import Plot
from conserved.verdict import Status

MOST_FINDINGS = 4
"""Sentences of the first screen; a reader who wants more scrolls."""
MOST_TILES = 5
"""The most tiles that have room in one row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """One tile of the summary: a figure, what it counts, what it means, and where the details are."""

    label: str
    figure: str
    sentence: str
    status: Status | None
    anchor: str = ""
    label_of_status: str = ""
    """How the status is put, where its own name would mislead."""


def headlines(contents: Contents) -> tuple[Headline, ...]:
    """Return one for every kind of record that is there."""
    made = {
        "figures": _figures, "runs": _runs, "claims": _claims, "audits": _audits, "attention": _attention, "laws": _laws
    }  # fmt: skip
    return tuple(replace(make(contents), anchor=name) for name, make in made.items() if getattr(contents, name))


def verdict_line(contents: Contents) -> tuple[Status, str]:
    """Return the report in one line.

    List the failures if there are any; otherwise what was verified, and for how much of the model.
    """
    decided = [item for item in headlines(contents) if item.status is not None]
    status = overall(*(item.status for item in decided if item.status is not None))
    wrong = [item for item in decided if item.status is Status.REFUTED]
    if wrong:
        return status, _sentence([f"{item.label.lower()}: {item.figure} {item.sentence}" for item in wrong])
    parts = [
        part for part in (_audit_sentence(contents), _account_sentence(contents), _figure_sentence(contents)) if part
    ]
    if not parts:
        parts = [f"{item.label.lower()}: {item.figure} {item.sentence}" for item in headlines(contents)]
    return status, _sentence(parts)


def _sentence(parts: list[str]) -> str:
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}."


def _audit_sentence(contents: Contents) -> str:
    clean = [audit for audit in contents.audits if audit.status is Status.VERIFIED]
    caught = [audit for audit in contents.audits if audit.expected == Status.REFUTED and audit.as_expected]
    spans = [audit.coverage for audit in clean if audit.coverage is not None]
    spans = spans or [section.coverage for section in contents.laws if section.coverage is not None]
    text = ""
    if clean:
        text = f"all {sum(audit.identities for audit in clean):,} gradient identities hold"
        text += f" over {min(spans):.1%} of the parameters" if spans else ""
    if caught:
        planted = f"the planted {'defect is' if len(caught) == 1 else 'defects are'} caught"
        text = f"{text}, {planted}" if text else planted
    return text


def _account_sentence(contents: Contents) -> str:
    steps = sum(run.steps for run in contents.runs)
    return f"the account of all {steps:,} optimizer steps closes" if steps else ""


def _figure_sentence(contents: Contents) -> str:
    count = sum(item.holds is not None for plot in contents.figures for item in plot.findings)
    return f"all {count} measured statements hold" if count else ""


def tile_columns(count: int) -> int:
    """Return how many tiles stand in a row of a wide page, so that no tile stands alone below the others."""
    return count if count <= MOST_TILES else -(-count // 2)


def findings(contents: Contents) -> tuple[str, ...]:
    """Return the sentences of a demonstration, or at most four of what every kind of record says, runs with alarms
    first.
    """
    if contents.found:
        return contents.found
    messages = [f"{run.name}: {run.message}" for run in sorted(contents.runs, key=lambda run: not run.trouble)]
    messages += [f"{audit.name}: {audit.message}" for audit in contents.audits]
    messages += [f"{section.name}: {section.sentence}." for section in contents.laws]
    messages += [f"{probe.name}: {probe.message}" for probe in contents.attention]
    return tuple(messages[:MOST_FINDINGS])


def hero(contents: Contents) -> Plot | None:
    """Return the one plot for the first screen.

    The residuals of a run with alarms; a figure about audits, as the demonstration has; what moved the laws of the
    latest run; an audit's residuals; the first figure.
    """
    alarmed = [run.residuals for run in contents.runs if run.alarm_count and run.residuals]
    audit_plots = [plot for plot in contents.figures if plot.section == "audit"]
    causes = [run.causes for run in reversed(contents.runs) if run.causes]
    failed = [audit.plot for audit in contents.audits if audit.plot and not audit.as_expected]
    audits = [audit.plot for audit in contents.audits if audit.plot]
    heads = [plot for probe in contents.attention for plot in probe.plots]
    numbers = [section.plot for section in contents.laws if section.plot]
    ranked = [*failed, *alarmed, *audit_plots, *causes, *audits, *contents.figures, *heads, *numbers]
    if not ranked:
        return None
    layout = {key: value for key, value in ranked[0].layout.items() if key != "height"}
    return replace(ranked[0], anchor="the plot", small=True, layout=layout)


def result_title(contents: Contents) -> str:
    """Return the heading of a report: the trouble of its runs and audits, or that nothing went wrong."""
    troubled = [run for run in contents.runs if run.trouble]
    if len(troubled) == 1:
        return f"{troubled[0].name}: {troubled[0].trouble}"
    if troubled:
        return f"{len(troubled)} of {len(contents.runs)} runs have alarms"
    refuted = [audit for audit in contents.audits if audit.status is Status.REFUTED and not audit.as_expected]
    if refuted:
        return f"{refuted[0].name}: {counted(len(refuted), 'audit')} found wrong gradients"
    unexpected = sum(not card.as_recorded for card in contents.claims)
    if unexpected:
        return f"{counted(unexpected, 'claim')} not as recorded"
    return "What training conserved"


def alarms_first(contents: Contents) -> tuple[tuple[str, int, str, str], ...]:
    """Return each kind of alarm for the top of the report: run, step, what is wrong, and where to look."""
    return tuple(
        (run.name, step, *_split_heading(message)) for run in contents.runs for step, _, message in run.first_alarms
    )


def _split_heading(message: str) -> tuple[str, str]:
    """Return the first sentence of a message, and the others."""
    first, *others = re.split(r"(?<=[.!?]) (?=[A-Z])", message, maxsplit=1)
    return first, "".join(others)


def overall(*statuses: Status) -> Status:
    """Return one status for several: refuted if any is, inconclusive if any is not known or there is none."""
    if Status.REFUTED in statuses:
        return Status.REFUTED
    if not statuses or Status.INCONCLUSIVE in statuses:
        return Status.INCONCLUSIVE
    return Status.PROVED if all(status is Status.PROVED for status in statuses) else Status.VERIFIED


def _figures(contents: Contents) -> Headline:
    verdicts = [item.holds for plot in contents.figures for item in plot.findings if item.holds is not None]
    holding = sum(verdicts)
    failed = [item.what for plot in contents.figures for item in plot.findings if item.holds is False]
    sentence = f"measured statements hold, in {counted(len(contents.figures), 'figure')}"
    if contents.trajectories:
        sentence += f" from {contents.trajectories:,} training runs"
    status = None if not verdicts else Status.VERIFIED if holding == len(verdicts) else Status.REFUTED
    return Headline(
        label="Figures",
        figure=f"{holding} of {len(verdicts)}",
        sentence=sentence + (f"; not so: {failed[0]}" if failed else ""),
        status=status,
    )


def _runs(contents: Contents) -> Headline:
    troubles = [run.trouble for run in contents.runs if run.trouble]
    steps = sum(run.steps for run in contents.runs)
    status = overall(*(run.status for run in contents.runs))
    meaning = {
        Status.VERIFIED: "the account of every step closes to rounding",
        Status.REFUTED: "".join(troubles[:1]) + (f"; {len(troubles)} runs have alarms" if len(troubles) > 1 else ""),
    }.get(status, "not every run has a step yet")
    return Headline(
        label="Watched training",
        figure=f"{numeral(steps)} steps",
        sentence=f"in {counted(len(contents.runs), 'run')}: {meaning}",
        status=status,
    )


def _claims(contents: Contents) -> Headline:
    count = Counter(card.status for card in contents.claims)
    listing = ", ".join(f"{count[status]} {status.value}" for status in Status if count[status])
    listing += "; each as recorded" if all(card.as_recorded for card in contents.claims) else ""
    unexpected = sum(not card.as_recorded for card in contents.claims)
    return Headline(
        label="Claims",
        figure=f"{len(contents.claims)} judged",
        sentence=listing,
        # That claims of others are false is a finding of ours: neither a tick nor a cross says that.
        status=Status.REFUTED if unexpected else None,
        label_of_status=f"{unexpected} not as recorded",
    )


def _audits(contents: Contents) -> Headline:
    total = sum(audit.identities for audit in contents.audits)
    planted = [audit for audit in contents.audits if audit.expected == Status.REFUTED]
    unexpected = [audit.name for audit in contents.audits if not audit.as_expected]
    clean = sum(audit.status is Status.VERIFIED for audit in contents.audits)
    sentence = f"{total:,} identities"
    if planted:
        caught = sum(audit.as_expected for audit in planted)
        sentence += f"; {caught} of {counted(len(planted), 'planted defect')} found"
    if unexpected:
        sentence += f"; look at {unexpected[0]}"
    unknown = any(audit.status is Status.INCONCLUSIVE for audit in contents.audits)
    return Headline(
        label="Gradient audits",
        figure=f"{clean} of {len(contents.audits) - len(planted)} clean",
        sentence=sentence,
        status=Status.VERIFIED if not unexpected else Status.INCONCLUSIVE if unknown else Status.REFUTED,
    )


def _attention(contents: Contents) -> Headline:
    heads = sum(probe.heads for probe in contents.attention)
    return Headline(
        label="Attention",
        figure=f"{counted(heads, 'head')}",
        sentence="zero row sums and rank bounds of their energy fields",
        status=overall(*(probe.status for probe in contents.attention)),
    )


def _laws(contents: Contents) -> Headline:
    numbers = sum(section.numbers for section in contents.laws)
    laws = sum(section.laws for section in contents.laws)
    models = len(contents.laws)
    return Headline(
        label="Laws",
        figure=f"{numbers:,} numbers",
        sentence=f"conserved by {counted(laws, 'law')} of {counted(models, 'model')}",
        status=None,
    )
