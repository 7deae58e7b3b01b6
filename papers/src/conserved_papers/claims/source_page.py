"""The page of one source: its proofs step by step, and every claim with its reading and its verdict."""

from __future__ import annotations

import re
from collections.abc import Sequence

from conserved_papers.claims.appendix import NAMES
from conserved_papers.claims.claim_record import Claim, Standing
from conserved_papers.claims.passages import DOCUMENTS, format_lines
from conserved_papers.claims.registry import Record, claims, records
from conserved_papers.claims.tally import dependent
from conserved_papers.claims.typeset import typeset

PROOFS = "The proofs, step by step"

SECTIONS: dict[str, tuple[tuple[str, str], ...]] = {
    "paper": (
        (PROOFS, r"paper\.T4\.\d\.proof$"),
        ("Theorems 4.1 to 4.7", r"paper\.(T4\.\d(\.(gelu|silu|all|complete|change|corrected|sparse|k))?$|PE)"),
        ("The framework", r"paper\.(eq2|loss|toy|R\d|scalar|C1)"),
        ("Discrete time, figures and experiments", r"paper\.(S6|eq9|eq10\.|Fig|E1|E2|D\.)"),
        ("What the paper leaves open", r"paper\.(S5\.singular|open)"),
        ("Equations, lemmas and sets of the proofs", r"paper\."),
    ),
}
"""Headings of the page of a source and the codes below each; a claim stands below the first that fits."""

FOLDED = {
    "The framework",
    "Discrete time, figures and experiments",
    "Equations, lemmas and sets of the proofs",
    "Slips",
}
"""Sections that are folded, so that a page stays short on a small screen. A link to a row opens its section."""


def source_page(document: str) -> str:
    """Return the page of one source, from the recorded outcomes."""
    about = DOCUMENTS[document]
    own = claims(f"{document}.")
    parts = [
        f"# {NAMES[document]}\n\n{about.title}. Lines are those of its text file (`{about.file}`). Readings are in our "
        f"words. Every verdict leads to its evidence, its argument and its witness; `conserved claims CODE` computes "
        f"them again. [The errata sheet](../claims.md#{document}).\n"
    ]
    for heading, chosen in _sections(document, own).items():
        body = _steps(document, chosen) if heading == PROOFS else _table(document, chosen)
        if heading in FOLDED:
            body = body.replace("\n", "\n    ").rstrip()
            parts.append(f'??? note "{heading} ({len(chosen)})"\n\n    {body}\n')
        else:
            parts.append(f"## {heading}\n\n{body}")
    return "\n".join(parts).rstrip() + "\n"


def _sections(document: str, own: Sequence[Claim]) -> dict[str, list[Claim]]:
    rules = SECTIONS.get(document, (("What the source states, and what we add", ""),))
    result: dict[str, list[Claim]] = {heading: [] for heading in (*dict(rules), "Slips")}
    for claim in own:
        slip = records()[claim.code].standing is Standing.SLIP
        heading = "Slips" if slip else next(name for name, pattern in rules if re.match(pattern, claim.code))
        result[heading].append(claim)
    return {heading: chosen for heading, chosen in result.items() if chosen}


def _table(document: str, chosen: Sequence[Claim]) -> str:
    rows = ["| claim | says | verdict |", "|---|---|---|"]
    for claim in chosen:
        record = records()[claim.code]
        whose = " (ours)" if claim.whose == "ours" else ""
        message = f"{typeset(record.message)}{_measured(record)}"
        if dependent(claim, records()):
            message += f" Counted with {claim.under}."
        if claim.corrected_by:
            message += f" Instead: {claim.corrected_by}."
        standing = f"[{record.standing.capitalize()}](appendix/{document}.md#{claim.code})"
        verdict = f"**{standing}{typeset(_scope(record))}.** {linked(message, document)}"
        says = f"{typeset(claim.statement)} *({format_lines(claim.passage.lines)})*"
        cells = (f'<a id="{claim.code}"></a>`{claim.code}`{whose}', says, verdict)
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(rows) + "\n"


def _scope(record: Record) -> str:
    """Return the size of a proof at one size; laws that hold by rules without a size say so in the appendix."""
    if record.standing is not Standing.PROVED_HERE:
        return ""
    parts = [part.rpartition("no others ")[2] for part in record.scope.split("; ")]
    return f" ({'; '.join(dict.fromkeys(parts))})"


def _measured(record: Record) -> str:
    """Return the figures of a measurement in small print; of more than two, those with a limit."""
    if record.standing not in (Standing.MEASURED, Standing.PROXY):
        return ""
    limited = [text for text in record.evidence if "(limit" in text]
    shown = limited if limited and len(record.evidence) > 2 else record.evidence
    return f" <small>{'. '.join(typeset(text[0].upper() + text[1:]) for text in shown)}.</small>"


def linked(text: str, document: str) -> str:
    """Turn the codes of claims in a text of a source's page into links to their rows."""

    def link(code: re.Match[str]) -> str:
        source = code[0].partition(".")[0]
        return f"[`{code[0]}`]({'' if source == document else f'{source}.md'}#{code[0]})"

    codes = sorted((re.escape(code) for code in records()), key=len, reverse=True)
    return re.sub(rf"(?<![\w.`])(?:{'|'.join(codes)})(?![\w`]|\.\w)", link, text)


def _steps(document: str, chosen: Sequence[Claim]) -> str:
    parts = []
    for claim in chosen:
        record = records()[claim.code]
        title, where = claim.title.removesuffix(" is right"), format_lines(claim.passage.lines)
        head = f'<a id="{claim.code}"></a>**{title}** (`{claim.code}`, {where}): **{record.standing}.** '
        steps = "\n".join(f"- {typeset(item)}" for item in record.evidence)
        parts.append(f"{head}{linked(f'{typeset(record.message)}{chr(10) * 2}{steps}', document)}")
    return "\n\n".join(parts) + "\n"
