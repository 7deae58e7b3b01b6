"""Which check sees which broken backward pass, with what residual; `make docs` puts it into docs/audit.md."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from measure import save

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from broken_backwards import CATALOGUE, Outcome, run  # noqa: E402


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


def main() -> None:
    """Run the catalogue in both precisions."""
    torch.set_num_threads(1)
    precisions = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    rows = [
        row(case.name, case.source, case.why, {name: run(case, dtype) for name, dtype in precisions.items()})
        for case in CATALOGUE
    ]
    for item in rows:
        print(item["defect"], item["float32"]["seen"], item["bfloat16"]["seen"])
    print(f"saved {save('audit_catalogue', {'rows': rows})}")


if __name__ == "__main__":
    main()
