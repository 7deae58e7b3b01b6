"""The errata sheets: what stands in each source, what is false, what is repaired, from errata.yaml."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from conserved_papers.claims.appendix import NAMES
from conserved_papers.claims.claim_record import Standing
from conserved_papers.claims.passages import DOCUMENTS, format_lines
from conserved_papers.claims.registry import claims, records
from conserved_papers.claims.tally import tally_table
from conserved_papers.claims.texts import read_text
from conserved_papers.claims.typeset import typeset

LABELS = {
    "stands": "Stands",
    "measured": "Measured",
    "false": "False",
    "gap": "Gap, with its repair",
    "hidden": "Hidden assumption",
    "rate": "A bound, not a rate",
    "overclaim": "Claims more than it shows",
    "conjecture": "Conjectures",
    "slip": "Slips",
    "adds": "We add",
}
"""The labels of lines in errata.yaml, and how a sheet prints them."""

ALLOWED: dict[str, frozenset[Standing]] = {
    "stands": frozenset({Standing.PROVED, Standing.PROVED_HERE, Standing.ARGUED}),
    "measured": frozenset({Standing.MEASURED, Standing.PROXY}),
    "false": frozenset({Standing.FALSE}),
    "gap": frozenset({Standing.GAP}),
    "hidden": frozenset({Standing.OVERCLAIM}),
    "rate": frozenset({Standing.OVERCLAIM}),
    "overclaim": frozenset({Standing.OVERCLAIM}),
    "conjecture": frozenset({Standing.CONJECTURE}),
    "slip": frozenset({Standing.SLIP}),
}
"""The classes that claims named under a label may have; a test holds the sheets to it."""

HEAD = """\
# What the five documents claim, and what holds

| source | holds | does not hold |
|---|---|---|
{brief}

The sheets below have the details. Every link leads to a claim and its code. `conserved claims CODE` computes it again:
the verdict, the evidence, and a witness in NumPy if it is refuted. `make docs` builds the appendix, to which the
verdicts lead: all lines of the sources, and the steps of every argument. `conserved claims CODE` prints the steps of
one claim. Longer arguments are written out at the head of its module in `papers/src/conserved_papers/claims`.

"""

FOLDED_FROM = 3
"""So many slips are folded, one to a line: authors need them, other readers do not."""

CLASSES = """\
## How claims are counted

| class | means |
|---|---|
| proved, all sizes | A machine checks every step, or a symbolic identity carries it, for every size. |
| proved, one size | A certificate in ball arithmetic, or exact arithmetic, at the sizes that the verdict names. |
| argued | A proof for every size that is written out in full, with a step that no machine checks. |
| measured | Floating point, over the cases and against the limits in small print. |
| proxy | The statement is about models that are not at hand; a stand-in was measured. |
| gap, repaired | A step of a proof fails or is missing. The result stands, and the repair is given. |
| overclaim | True with a condition that the source states neither there nor in its definitions. |
| false | A witness refutes it, and something rests on it. |
| slip | A typo, a transposition or a wrong word. The repair is given, and nothing rests on it. |
| conjecture | The source calls it one. Its verdict is given and not counted as an error. |
| answered | A question that the source leaves open, with an answer and its strength. |

Errors that fall with another one are counted once.

"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrataLine:
    """One line of a sheet: its label, its text with links such as [words](note.L10), and the claims that it names."""

    label: str
    text: str
    codes: tuple[str, ...]


@cache
def sheets() -> dict[str, tuple[ErrataLine, ...]]:
    """Return the lines of every sheet, by source."""
    return {
        document: tuple(_line(document, label, text) for row in sheet["lines"] for label, text in row.items())
        for document, sheet in read_text("errata").items()
    }


def _line(document: str, label: str, text: str) -> ErrataLine:
    """Return a line with the claims that it links; a line of slips without links is about all slips of the source."""
    codes = [code for code in re.findall(r"\]\(([\w.]+)\)", text) if code.partition(".")[0] in DOCUMENTS]
    if label == "slip" and not codes:
        slips = (claim.code for claim in claims(f"{document}.") if records()[claim.code].standing is Standing.SLIP)
        codes = list(slips)
    return ErrataLine(label=label, text=text, codes=tuple(codes))


def first_screen() -> str:
    """Return the page of errata sheets, with the classes and the tally below."""
    brief = [
        f"| [{NAMES[document]}](#{document}) | {typeset(sheet['in_brief']['holds'])} | "
        f"{typeset(sheet['in_brief']['fails'])} |"
        for document, sheet in read_text("errata").items()
    ]
    parts = [HEAD.format(brief="\n".join(brief))]
    for document, lines in sheets().items():
        parts.append(f"## {NAMES[document]} {{#{document}}}\n\n{DOCUMENTS[document].title}. ")
        parts.append(f"[All of its claims](claims/{document}.md).\n\n")
        long = [line for line in lines if line.label == "slip" and len(line.codes) >= FOLDED_FROM]
        parts += [_item(line) for line in lines if line not in long]
        parts += [_folded_slips(line) for line in long]
        parts.append("\n")
    parts.append(CLASSES)
    for whose, title in (("source", "What the sources state"), ("ours", "What we state")):
        parts.append(f"{title}:\n\n{_table(*tally_table(whose))}\n\n")
    return "".join(parts).rstrip() + "\n"


def _item(line: ErrataLine) -> str:
    return f"- **{LABELS[line.label]}.** {_linked(typeset(line.text))}\n"


def _folded_slips(line: ErrataLine) -> str:
    """Return every slip on a line of its own: where it is, and its repair."""
    rows = []
    for code in line.codes:
        [slip] = claims(code)
        where = f"{typeset(slip.place)}, {format_lines(slip.passage.lines)}"
        rows.append(f"[{where}](claims/{slip.document}.md#{code}): {typeset(records()[code].message)}")
    rows += [_linked(typeset(line.text))] if line.text else []
    body = "\n    - ".join(rows)
    return f'\n??? note "{LABELS[line.label]} ({len(line.codes)})"\n\n    - {body}\n'


def _linked(text: str) -> str:
    """Let links to codes lead to their rows."""

    def link(result: re.Match[str]) -> str:
        source = result[1].partition(".")[0]
        return f"](claims/{source}.md#{result[1]})" if source in DOCUMENTS else result[0]

    return re.sub(r"\]\(([\w.]+)\)", link, text)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    rule = ("---", *["---:"] * (len(head) - 1))
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))
