"""Write what the claims came to: the record, the errata sheets and the pages of the sources.

`python -m conserved_papers.claims.page` runs every claim. With a pattern after `--only` it runs those and keeps the
record of the others. With a folder of the sources it takes the fingerprints of all passages first.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

from conserved_papers.claims.claim_record import Claim
from conserved_papers.claims.errata import first_screen
from conserved_papers.claims.passages import DOCUMENTS, fingerprint, fingerprints, key, read
from conserved_papers.claims.recording import record_of_outcomes
from conserved_papers.claims.registry import claims, outcomes, recorded, records
from conserved_papers.claims.source_page import source_page

FIRST_SCREEN = Path("docs/claims.md")


def pages() -> dict[Path, str]:
    """Return the committed pages, from the record: the errata sheets, and one page for each source."""
    folder = FIRST_SCREEN.with_suffix("")
    return {FIRST_SCREEN: first_screen()} | {folder / f"{name}.md": source_page(name) for name in DOCUMENTS}


def write_pages() -> None:
    """Write the committed pages."""
    for path, text in pages().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


def take_fingerprints(folder: Path) -> None:
    """Write the fingerprints of all passages, from the sources in a folder."""
    texts = {document: read(folder, document) for document in DOCUMENTS}
    wanted = sorted({(claim.document, claim.passage.lines) for claim in claims() if claim.passage.lines})
    prints = {key(document, lines): fingerprint(texts[document], lines) for document, lines in wanted}
    _write("fingerprints.json", prints)
    fingerprints.cache_clear()


def _write(name: str, content: Any) -> None:
    path = Path(str(files("conserved_papers.claims").joinpath(name)))
    path.write_text(json.dumps(content, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")


def _recorded_before() -> dict[str, Any]:
    """Return the record as it is, for the claims that are not run again."""
    text = files("conserved_papers.claims").joinpath("recorded.json").read_text(encoding="utf-8")
    result: dict[str, Any] = json.loads(text)
    return result


def main() -> None:
    """Run claims, record their outcomes and write the pages."""
    parser = argparse.ArgumentParser(description="Run the claims and write their record and their pages.")
    parser.add_argument("folder", nargs="?", type=Path, help="a folder with the sources, to take fingerprints from")
    parser.add_argument("--only", action="append", help="run these claims alone; may be given several times")
    parser.add_argument("--pages", action="store_true", help="run nothing; write the pages from the record as it is")
    given = parser.parse_args()
    if given.folder is not None:
        take_fingerprints(given.folder)
    if given.pages:
        write_pages()
        return

    def tell(claim: Claim, index: int, count: int) -> None:
        sys.stderr.write(f"{index + 1}/{count} {claim.code}\n")

    chosen = [claim for pattern in given.only for claim in claims(pattern)] if given.only else claims()
    finished = list(outcomes(chosen, progress=tell))
    broken = [f"{outcome.claim.code}: {outcome.failure}" for outcome in finished if outcome.failure]
    if broken:
        sys.exit("Nothing was written; these checks did not come to an end:\n" + "\n".join(broken))
    fresh = (_recorded_before() if given.only else {}) | record_of_outcomes(finished)
    _write("recorded.json", {claim.code: fresh[claim.code] for claim in claims() if claim.code in fresh})
    records.cache_clear()
    recorded.cache_clear()
    write_pages()


if __name__ == "__main__":
    main()
