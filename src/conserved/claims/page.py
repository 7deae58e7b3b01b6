"""The documentation page of all claims, written from their outcomes: `python -m conserved.claims.page`."""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from conserved.claims.claim import Claim, Outcome
from conserved.claims.ledger import claims, outcomes
from conserved.verdict import Evidence

PAGE = Path("docs/claims.md")

HEAD = """\
# What the sources claim, and what holds

Five documents make the claims on this page. Each is stated in our words, with its hypotheses, and each is a function
that finds out whether it holds: `conserved claims` runs all of them, `conserved claims note.L10` one, with everything
it computed. The page is written by `python -m conserved.claims.page` from what came out.

- **proved**: by a certificate in ball arithmetic or an identity of polynomials that the check works out again, at the
  sizes it names. Statements about all sizes are the sources' own to prove.
- **verified**: measured in floating point, over the cases the check names.
- **refuted**: there is a witness; where another statement holds instead, it is a claim of its own.

"""


def page(found: Sequence[Outcome]) -> str:
    """The whole page."""
    parts = [HEAD, _overview(found)]
    for source, group in itertools.groupby(found, key=lambda outcome: outcome.claim.source):
        parts.append(f"## {source}\n\n")
        parts += [section(outcome) for outcome in group]
    return "".join(parts).rstrip() + "\n"


def section(outcome: Outcome) -> str:
    """What the page says of one claim: nothing that differs between machines, so no times and no rounding errors."""
    claim, verdict = outcome.claim, outcome.verdict
    lines = [heading(claim), f"{claim.statement} *({claim.place})*"]
    if claim.hypotheses:
        lines.append(f"Given: {claim.hypotheses}")
    lines += [f"$${formula}$$" for formula in claim.latex]
    lines.append(f"**{verdict.status.value.capitalize()}.** {verdict.message}")
    shown = "\n".join(f"- {_evidence(item)}" for item in verdict.evidence)
    if shown:
        lines.append(shown)
    if verdict.witness is not None:
        witness = verdict.witness
        values = "; ".join(f"{name} = {value}" for name, value in witness.data.items())
        lines.append(f"Witness: {values}. Claimed: {witness.claimed}. Found: {witness.found}.")
        if witness.numpy:
            lines.append(f"```python\n{witness.numpy}\n```")
    if claim.corrected_by:
        lines.append(f"What holds instead: `{claim.corrected_by}`.")
    if claim.corrects:
        lines.append(f"Replaces `{claim.corrects}`.")
    return "\n\n".join(lines) + "\n\n"


def heading(claim: Claim) -> str:
    """The line that a claim's section begins with."""
    return f"### {claim.code}: {claim.title}"


def _evidence(item: Evidence) -> str:
    text = item.what
    if item.value is not None and not isinstance(item.value, float):
        text += f": {item.value}"
    if item.samples is not None:
        text += f", {item.samples} cases"
    return text


def _overview(found: Sequence[Outcome]) -> str:
    counted = Counter(outcome.verdict.status.value for outcome in found)
    summary = ", ".join(f"{count} {status}" for status, count in sorted(counted.items()))
    rows = [
        f"| `{o.claim.code}` | {o.claim.title} | {o.verdict.status.value}"
        f"{f' → `{o.claim.corrected_by}`' if o.claim.corrected_by else ''} |"
        for o in found
    ]
    return (
        "\n".join([f"{len(found)} claims: {summary}.", "", "| claim | says | verdict |", "|---|---|---|", *rows])
        + "\n\n"
    )


def main() -> None:
    """Run every claim, write the page and record the statuses that `--strict` holds later runs against."""

    def tell(claim: Claim, place: int, count: int) -> None:
        sys.stderr.write(f"{place + 1}/{count} {claim.code}\n")

    found = list(outcomes(claims(), progress=tell))
    broken = [f"{outcome.claim.code}: {outcome.failure}" for outcome in found if outcome.failure]
    if broken:
        sys.exit("Nothing was written; these checks did not come to an end:\n" + "\n".join(broken))
    PAGE.write_text(page(found), encoding="utf-8")
    statuses = {outcome.claim.code: outcome.verdict.status.value for outcome in found}
    Path(str(files("conserved.claims").joinpath("recorded.json"))).write_text(
        json.dumps(statuses, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
