"""Which check sees which broken backward pass, with what residual: the table of docs/audit.md.

python benchmarks/audit_catalogue.py            # prints, saves, and writes the table into docs/audit.md
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch

from measure import save

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from broken_backwards import CATALOGUE, Outcome, run  # noqa: E402

PAGE = ROOT / "docs" / "audit.md"
WORDS = {"identity": "identity", "scale": "scale", "gauge": "gauge", "missing": "no gradient"}


def row(name: str, source: str, why: str, outcomes: dict[str, Outcome]) -> dict[str, Any]:
    """One defect: who sees it in each precision, the residual, and the laws that break."""
    return {
        "defect": name,
        "source": source,
        "why": why,
        **{
            precision: {
                "seen": sorted(outcome.seen),
                "residual": outcome.residual(),
                "broken": [row.name for row in outcome.audit.failures],
            }
            for precision, outcome in outcomes.items()
        },
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| defect | seen by | float32 | bfloat16 | broken first | why not by others |",
        "|---|---|---|---|---|---|",
    ]
    for item in rows:
        single, half = item["float32"], item["bfloat16"]
        seen = ", ".join(WORDS[one] for one in single["seen"]) or "**nobody**"
        figures = [f"{one['residual']:.2g}" if one["residual"] else "–" for one in (single, half)]
        first = f"`{single['broken'][0]}`" if single["broken"] else "–"
        label = re.sub(r"https://github.com/([^/]+/[^/]+)/(?:issues|pull)/(\d+)", r"\1#\2", item["source"])
        name = f"{item['defect']} ([{label}]({item['source']}))" if label else item["defect"]
        cells = (name, seen, *figures, first, item["why"])
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run the catalogue in both precisions."""
    torch.set_num_threads(1)
    precisions = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    rows = [
        row(case.name, case.source, case.why, {name: run(case, dtype) for name, dtype in precisions.items()})
        for case in CATALOGUE
    ]
    text = table(rows)
    print(text)
    if PAGE.exists():
        page = PAGE.read_text()
        begin, end = "<!-- catalogue -->\n", "\n<!-- end -->"
        head, rest = page.split(begin)
        PAGE.write_text(head + begin + text + end + rest.split(end)[1])
    print(f"saved {save('audit_catalogue', {'rows': rows})}")


if __name__ == "__main__":
    main()
