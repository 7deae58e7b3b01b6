"""The appendix: every claim in full, and what every line of a source says. Built with the site, not committed."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator

from conserved_papers.claims.claim_record import Claim
from conserved_papers.claims.passages import DOCUMENTS, Sentence, format_lines, sentences
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

ARGUMENTS = {
    "paper_global": "Constancy on components, and Theorem 4.6 for all sizes",
    "paper_sigmoid": "Sigmoid gates for all sizes",
    "paper_stack": "Stacked attention at every depth and size",
    "paper_depth": "Pre-norm networks of any depth and size",
}
"""Modules that open with an argument, and what it shows."""

LINE_PARTS = {"paper": (("lines", 1, 453), ("proofs-lines", 454, 1334))}
"""Pages that the lines of a long source are divided into: the end of their names, the first and the last line."""


def appendix_pages() -> Iterator[tuple[str, str]]:
    """Return the pages of the appendix: their places below docs/ and their contents."""
    yield "claims/appendix/arguments.md", arguments()
    for document in DOCUMENTS:
        yield f"claims/appendix/{document}.md", claims_in_full(document)
        for name, first, last in line_parts(document):
            yield f"claims/appendix/{document}-{name}.md", lines_page(document, first, last)


def arguments() -> str:
    """Return the arguments that no machine checks, from the modules whose claims rest on them."""
    parts = [
        "# Arguments in full\n\nClaims of the class *argued* rest on these, beside the steps that a machine checks. "
        "Each stands at the top of the file of its claims."
    ]
    for module, heading in ARGUMENTS.items():
        text = inspect.getdoc(importlib.import_module(f"conserved_papers.claims.{module}")) or ""
        # The first paragraph says what the file is for. The others open with their subject, as emphasis.
        paragraphs = [re.sub(r"\\\*([^*\\]+)\\\*", r"*\1*", typeset(part)) for part in text.split("\n\n")[1:]]
        parts.append(f"## {heading}\n\n" + "\n\n".join(paragraphs))
    return "\n\n".join(parts) + "\n"


def line_parts(document: str) -> tuple[tuple[str, int, int], ...]:
    """Return the pages on which the lines of a source are listed: the end of each name, its first and last line."""
    return LINE_PARTS.get(document, (("lines", 1, DOCUMENTS[document].lines),))


def claims_in_full(document: str) -> str:
    """Return every claim about a source with formulas, evidence and witness, each folded."""
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
    """Return sentences on the claims that a claim falls with, replaces or is replaced by."""
    output = (
        (claim.under, "It falls with `{}` and is not counted again."),
        (claim.corrected_by, "Instead, `{}` holds."),
        (claim.corrects, "It replaces `{}`."),
    )
    result = [text.format(code) for code, text in output if code]
    below = [other.code for other in claims() if other.under == claim.code]
    if below:
        result.append(f"With it fall {', '.join(f'`{code}`' for code in below)}.")
    return result


def lines_page(document: str, first: int, last: int) -> str:
    """Return a page that says in our words what lines of a source say, with the claims that judge them or the reason
    why none does.
    """
    about = DOCUMENTS[document]
    parts = [
        f"# {NAMES[document]}: lines {first} to {last}\n\n{about.title}, {about.lines} lines. Every line is in one "
        "row, which a test checks. The second column is in our words. The third has the claims that judge it, or the "
        "reason why none does.\n\n| lines | says | judged by |\n|---|---|---|\n"
    ]
    chosen = (row for row in sentences() if row.document == document and first <= row.lines[0][0] <= last)
    return "".join(parts + [_row(row) for row in chosen])


def _row(sentence: Sentence) -> str:
    decided = ", ".join(map(appendix_link, sentence.codes)) if sentence.codes else f"*{sentence.reason}*"
    words = typeset(sentence.words).replace("|", "\\|")
    return f"| {format_lines(sentence.lines).split(' ', 1)[1]} | {words} | {decided} |\n"


def appendix_link(code: str) -> str:
    """Return a code as a link to its block in the appendix, from within the appendix."""
    return f"[`{code}`]({code.partition('.')[0]}.md#{code})"
