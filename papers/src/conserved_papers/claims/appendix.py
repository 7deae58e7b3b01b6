"""The appendix: every claim in full, and what every line of a source says. Built with the site, not committed."""

from __future__ import annotations

from collections.abc import Iterator

from conserved_papers.claims.claim_record import Claim
from conserved_papers.claims.passages import DOCUMENTS, Sentence, sentences, shown
from conserved_papers.claims.registry import Record, claims, records
from conserved_papers.claims.typeset import typeset

NAMES = {
    "paper": "The paper",
    "summary": "The summary of the paper",
    "blog": "The blog post",
    "softmax": "The news on softmax attention",
    "note": "The note on natural attention",
}
"""Short names of the sources, for navigation."""


def appendix_pages() -> Iterator[tuple[str, str]]:
    """The pages of the appendix: their places below docs/ and their contents."""
    for document in DOCUMENTS:
        yield f"claims/appendix/{document}.md", claims_in_full(document)
        yield f"claims/appendix/{document}-lines.md", lines_page(document)


def claims_in_full(document: str) -> str:
    """Every claim about a source with formulas, evidence and witness, each folded."""
    lines = [
        f"# {NAMES[document]}: every claim in full",
        "",
        f"{DOCUMENTS[document].title}. `conserved claims CODE` computes one of these again.",
        "",
    ]
    lines += [full_section(claim, records()[claim.code]) for claim in claims(f"{document}.")]
    return "\n".join(lines).rstrip() + "\n"


def full_section(claim: Claim, record: Record) -> str:
    """Everything recorded about one claim, as a folded block."""
    where = claim.passage
    mark = f", fingerprint `{where.fingerprint}`" if where.fingerprint else ""
    whose = "Ours" if claim.whose == "ours" else "The source's"
    parts = [f'<a id="{claim.code}"></a>', typeset(claim.statement), f"*{whose}. {where}{mark}.*"]
    if claim.conditions:
        parts.append(f"Conditions stated there: {typeset('; '.join(claim.conditions))}.")
    if claim.hypotheses:
        parts.append(f"Given: {typeset(claim.hypotheses)}")
    parts += [f"$${formula}$$" for formula in claim.latex]
    if claim.own_latex:
        parts += ["In a formula of ours:", *(f"$${formula}$$" for formula in claim.own_latex)]
    scope = f" ({record.scope})" if record.scope else ""
    parts.append(f"**{record.standing.capitalize()}{typeset(scope)}.** {typeset(record.message)}")
    parts.append("\n".join(f"- {typeset(item)}" for item in record.evidence))
    if record.witness is not None:
        witness = record.witness
        parts.append(typeset(f"Witness: {witness['data']}. Claimed: {witness['claimed']}. Found: {witness['found']}."))
        if witness["numpy"]:
            parts.append(f"```python\n{witness['numpy']}\n```")
    parts += relations(claim)
    body = "\n\n".join(parts).replace("\n", "\n    ").replace("\n    \n", "\n\n")
    title = f"{claim.code} · {claim.title} · {record.standing}".replace('"', "'")
    return f'??? note "{title}"\n\n    {body}\n'


def relations(claim: Claim) -> list[str]:
    """Which claims it falls with, replaces or is replaced by, in sentences."""
    said = (
        (claim.under, "It falls with `{}` and is not counted again."),
        (claim.corrected_by, "Instead, `{}` holds."),
        (claim.corrects, "It replaces `{}`."),
    )
    found = [text.format(code) for code, text in said if code]
    below = [other.code for other in claims() if other.under == claim.code]
    if below:
        found.append(f"With it fall {', '.join(f'`{code}`' for code in below)}.")
    return found


def lines_page(document: str) -> str:
    """What every line of a source says, in our words, with the claims that judge it or the reason why none does."""
    about = DOCUMENTS[document]
    parts = [
        f"# {NAMES[document]}: line by line\n\n{about.title}, {about.lines} lines. Every line is in one of these rows, "
        "which a test checks. What is said there is in our words; then come the claims that judge it, or the reason "
        "why none does.\n\n| lines | says | judged by |\n|---|---|---|\n"
    ]
    parts += [_row(sentence) for sentence in sentences() if sentence.document == document]
    return "".join(parts)


def _row(sentence: Sentence) -> str:
    judged = ", ".join(map(appendix_link, sentence.codes)) if sentence.codes else f"*{sentence.reason}*"
    words = typeset(sentence.words).replace("|", "\\|")
    return f"| {shown(sentence.lines).split(' ', 1)[1]} | {words} | {judged} |\n"


def appendix_link(code: str) -> str:
    """A code that leads to its block in the appendix, from within the appendix."""
    return f"[`{code}`]({code.partition('.')[0]}.md#{code})"
