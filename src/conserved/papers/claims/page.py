"""The documentation page of all claims, written from their outcomes: `python -m conserved.papers.claims.page`."""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from conserved.papers.claims.claim_record import Claim, Outcome, Severity
from conserved.papers.claims.passages import DOCUMENTS, fingerprint, fingerprints, key, read, sentences, shown
from conserved.papers.claims.registry import SOURCES, claims, outcomes, recorded
from conserved.verdict import Evidence, Status

PAGE = Path("docs/claims.md")

HEAD = """\
# What the sources claim, and what holds

Five documents make the claims on this page. Each is our reading of a passage, in our words, with the formula as
printed and the conditions the source states; each is a function that finds out whether that reading holds:
`conserved claims` runs all of them, `conserved claims note.L10` one, with everything it computed. The page is written
by `python -m conserved.papers.claims.page` from what came out. A passage is named by its lines in the text file of its
source and by a fingerprint of them (the first 16 hexadecimal digits of their SHA-256), so that whoever has the source
can lay our reading beside it; `pytest --sources FOLDER` does.

- **proved**: exactly, for all sizes or at the sizes it names: by a certificate in ball arithmetic, an identity of
  polynomials or of matrix words, a computation with fractions, in steps that the check works out again.
- **verified**: measured in floating point, over the cases it names, against the limit it names.
- **refuted**: there is a witness. *False*: the statement fails and something rests on it. *Overclaim*: it is true with
  a condition the source leaves out. *Slip*: a typo, a transposition or a wrong word, with the repair. Claims that fall
  with another one are one error, listed under it and counted once.
- **answered**: a question of the source, with the answer and how well it is known.

Statements are the source's own, or *ours*: corrections, sharpenings, remarks and answers.

"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """How many claims of a source came out how; errors that are one are counted once."""

    source: str
    whose: str
    counts: Mapping[str, int]


COLUMNS = {
    "source": ("proved", "verified", "false", "overclaim", "slip", "inconclusive"),
    "ours": ("proved", "verified", "answered", "refuted", "inconclusive"),
}
"""What the tables of the sources' statements and of ours have columns for; the last two only if there is any."""


def tallies(
    whose: str, statuses: Mapping[str, str] | None = None, listed: Iterable[Claim] | None = None
) -> list[Tally]:
    """Count the claims by source, as recorded or as given; what falls with another claim is left out of the counts."""
    found = recorded() if statuses is None else statuses
    chosen = [claim for claim in (claims() if listed is None else listed) if claim.whose == whose]
    rows = []
    for document, title in SOURCES.items():
        own = [claim for claim in chosen if claim.document == document and claim.code in found]
        counted = Counter(_column(claim, found[claim.code]) for claim in own if not _dependent(claim, found))
        if own:
            rows.append(Tally(source=title, whose=whose, counts=counted))
    return rows


def _dependent(claim: Claim, statuses: Mapping[str, str]) -> bool:
    return bool(claim.under) and statuses.get(claim.code) == Status.REFUTED.value


def _column(claim: Claim, status: str) -> str:
    if status == Status.REFUTED.value and claim.whose == "source":
        return (claim.severity or Severity.FALSE).value
    return status


def tally_table(whose: str, statuses: Mapping[str, str] | None = None) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The head and the rows of a table, with a sum."""
    rows = tallies(whose, statuses)
    columns = [name for name in COLUMNS[whose] if any(row.counts.get(name) for row in rows)]
    body = [(row.source, *(str(row.counts.get(name, 0)) for name in columns)) for row in rows]
    total = ("together", *(str(sum(row.counts.get(name, 0) for row in rows)) for name in columns))
    return ("source", *columns), [*body, total]


def page(found: Sequence[Outcome]) -> str:
    """The whole page."""
    statuses = {outcome.claim.code: outcome.verdict.status.value for outcome in found}
    parts = [HEAD, _overview(found, statuses)]
    for source, group in itertools.groupby(found, key=lambda outcome: outcome.claim.source):
        parts.append(f"## {source}\n\n")
        parts += [section(outcome) for outcome in group]
    parts.append(statement_list())
    return "".join(parts).rstrip() + "\n"


def link(code: str) -> str:
    """A code that leads to its section."""
    return f"[`{code}`](#{code})"


def section(outcome: Outcome) -> str:
    """What the page says of one claim: no times."""
    claim, verdict = outcome.claim, outcome.verdict
    where = claim.passage
    mark = f", fingerprint `{where.fingerprint}`" if where.fingerprint else ""
    whose = "Ours" if claim.whose == "ours" else "The source's"
    lines = [f'<a id="{claim.code}"></a>', heading(claim), claim.statement, f"*{whose}. {where}{mark}.*"]
    if claim.conditions:
        lines.append(f"Conditions stated there: {'; '.join(claim.conditions)}.")
    if claim.hypotheses:
        lines.append(f"Given: {claim.hypotheses}")
    lines += [f"$${formula}$$" for formula in claim.latex]
    if claim.own_latex:
        lines += ["In a formula of ours:", *(f"$${formula}$$" for formula in claim.own_latex)]
    weight = f", {outcome.severity.value}" if outcome.severity else ""
    scope = f" ({verdict.scope})" if verdict.scope else ""
    lines.append(f"**{verdict.status.value.capitalize()}{weight}{scope}.** {verdict.message}")
    shown_ = "\n".join(f"- {evidence(item)}" for item in verdict.evidence)
    if shown_:
        lines.append(shown_)
    if verdict.witness is not None:
        witness = verdict.witness
        values = "; ".join(f"{name} = {value}" for name, value in witness.data.items())
        lines.append(f"Witness: {values}. Claimed: {witness.claimed}. Found: {witness.found}.")
        if witness.numpy:
            lines.append(f"```python\n{witness.numpy}\n```")
    lines += _links(claim)
    return "\n\n".join(lines) + "\n\n"


def _links(claim: Claim) -> list[str]:
    said = (
        (claim.under, "Falls with {}, and is not counted again."),
        (claim.corrected_by, "What holds instead: {}."),
        (claim.corrects, "Replaces {}."),
    )
    found = [text.format(link(code)) for code, text in said if code]
    below = [other.code for other in claims() if other.under == claim.code]
    if below:
        found.append(f"With it fall {', '.join(map(link, below))}.")
    return found


def heading(claim: Claim) -> str:
    """The line that a claim's section begins with."""
    return f"### {claim.code}: {claim.title}"


def evidence(item: Evidence) -> str:
    """One piece of evidence, with two digits and the limit."""
    return str(replace(item, value=_rounded(item.value), limit=_rounded(item.limit)))


def _rounded(value: float | int | str | None) -> int | str | None:
    return f"{value:.2g}" if isinstance(value, float) else value


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def _overview(found: Sequence[Outcome], statuses: Mapping[str, str]) -> str:
    dependent = sum(_dependent(outcome.claim, statuses) for outcome in found)
    rows = []
    for outcome in found:
        claim, verdict = outcome.claim, outcome.verdict
        text = verdict.status.value + (f", {outcome.severity.value}" if outcome.severity else "")
        text += f", with {link(claim.under)}" if _dependent(claim, statuses) else ""
        text += f" → {link(claim.corrected_by)}" if claim.corrected_by else ""
        rows.append((link(claim.code), claim.title, "ours" if claim.whose == "ours" else "the source", text))
    return (
        f"{len(found)} claims. What the sources state ({dependent} that fall with another one are not counted):\n\n"
        f"{_table(*tally_table('source', statuses))}\n\nWhat we state:\n\n{_table(*tally_table('ours', statuses))}\n\n"
        f"| claim | says | whose | verdict |\n|---|---|---|---|\n"
        + "\n".join(f"| {' | '.join(row)} |" for row in rows)
        + "\n\n"
    )


def statement_list() -> str:
    """Everything the sources say, by line and in our words, with what judges it or why nothing does."""
    parts = [
        "## Everything the sources say, by line\n\nEvery line of every source is in one of these rows, which a test "
        "checks. What is said there is in our words; then the claims that judge it, or the reason why none does.\n"
    ]
    for document, group in itertools.groupby(sentences(), key=lambda sentence: sentence.document):
        about = DOCUMENTS[document]
        parts.append(f"\n### {about.title}, {about.lines} lines\n\n| lines | says | judged by |\n|---|---|---|\n")
        for one in group:
            judged = ", ".join(map(link, one.codes)) if one.codes else f"*{one.reason}*"
            words = one.words.replace("|", "\\|")
            parts.append(f"| {shown(one.lines).split(' ', 1)[1]} | {words} | {judged} |\n")
    return "".join(parts)


def take_fingerprints(folder: Path) -> None:
    """Write the fingerprints of all passages, from the sources in a folder."""
    texts = {document: read(folder, document) for document in DOCUMENTS}
    wanted = sorted({(one.document, one.passage.lines) for one in claims() if one.passage.lines})
    found = {key(document, lines): fingerprint(texts[document], lines) for document, lines in wanted}
    _packaged("fingerprints.json").write_text(json.dumps(found, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
    fingerprints.cache_clear()


def _packaged(name: str) -> Path:
    return Path(str(files("conserved.papers.claims").joinpath(name)))


def main() -> None:
    """Run every claim, write the page and record the statuses that `--strict` holds later runs against.

    With a folder of the sources as argument, take the fingerprints of all passages first.
    """
    if len(sys.argv) > 1:
        take_fingerprints(Path(sys.argv[1]))

    def tell(claim: Claim, place: int, count: int) -> None:
        sys.stderr.write(f"{place + 1}/{count} {claim.code}\n")

    found = list(outcomes(claims(), progress=tell))
    broken = [f"{outcome.claim.code}: {outcome.failure}" for outcome in found if outcome.failure]
    if broken:
        sys.exit("Nothing was written; these checks did not come to an end:\n" + "\n".join(broken))
    PAGE.write_text(page(found), encoding="utf-8")
    statuses = {outcome.claim.code: outcome.verdict.status.value for outcome in found}
    _packaged("recorded.json").write_text(json.dumps(statuses, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
