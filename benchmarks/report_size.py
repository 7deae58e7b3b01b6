"""Time and peak memory of `conserved report` for stores of 10⁴, 10⁵ and 10⁶ rows of ledger.

python benchmarks/report_size.py            # two minutes on one core

Each report is made by a process of its own, as a user makes it. Beside it stands the one query that was quadratic in
the rows, in the order SQLite chose for it and in the order it has now.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conserved.store import RunStore
from conserved.store.run_digest import digest
from measure import save

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from report_store import CAUSES, random_ledger

LAWS = 100
ROWS = (10_000, 100_000, 1_000_000)
SLOW = 10_000
"""Rows up to which the query is also run in the former order."""


def reported(store: Path, page: Path) -> dict[str, float]:
    """Seconds and peak memory of the command."""
    start = time.perf_counter()
    command = [sys.executable, "-c", "from conserved.cli import main; main()", "report", str(store), "-o", str(page)]
    child = os.spawnv(os.P_NOWAIT, sys.executable, command)
    _, status, used = os.wait4(child, 0)
    assert status == 0, "the report failed"
    return {"seconds": time.perf_counter() - start, "peak_mb": used.ru_maxrss / 1024}


def queried(store: Path, join: str) -> float:
    """Seconds of the query for the causes of the rows that are shown, with one join or the other."""
    with RunStore(store) as opened:
        wanted = [[one.step, 0] for one in next(iter(digest(opened, "run").ledger.values()))]
        start = time.perf_counter()
        opened.select(
            f"select step, law, cause, amount from json_each(?) as wanted {join} cause on cause.run = ? and cause.step "
            "= json_extract(wanted.value, '$[0]') and cause.law = json_extract(wanted.value, '$[1]')",
            json.dumps(wanted),
            1,
        )
        return time.perf_counter() - start


def measured(folder: Path) -> Iterator[dict[str, Any]]:
    """One row for every size, an empty store first."""
    for rows in (0, *ROWS):
        store = folder / f"{rows}.db"
        random_ledger(store, rows, laws=LAWS)
        result: dict[str, Any] = {"rows": rows, "store_mb": store.stat().st_size / 1e6}
        result |= reported(store, folder / "page.html") | {"page_mb": (folder / "page.html").stat().st_size / 1e6}
        with RunStore(store) as opened:
            start = time.perf_counter()
            digest(opened, "run")
            result["digest_seconds"] = time.perf_counter() - start
        if 0 < rows <= SLOW:
            result["query_seconds"] = queried(store, "cross join")
            result["query_seconds_before"] = queried(store, "join")
        yield result
        store.unlink()


def main() -> None:
    """Measure, print and save."""
    version = sqlite3.sqlite_version
    result = []
    with tempfile.TemporaryDirectory() as folder:
        for row in measured(Path(folder)):
            print(row, flush=True)
            result.append(row)
    print(f"saved {save('report_size', {'sqlite': version, 'laws': LAWS, 'causes': len(CAUSES), 'reports': result})}")


if __name__ == "__main__":
    main()
