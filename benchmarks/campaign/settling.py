"""Say of every stored refutation whether it is a defect: one script for each cause, which uses none of this library.

`settlements.toml` has the entries. Running them says whether every script still shows what its verdict claims, and
counting says how many refutations of which result file each of them settles.
"""

from __future__ import annotations

import contextlib
import io
import json
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERDICTS = ("new", "known", "convention", "withdrawn")

PAST = ("campaign_planted",)
"""Result files whose refutations are as they should be."""


@dataclass(frozen=True, kw_only=True)
class Settlement:
    """A cause of refutations, what it is called, and the script that shows it."""

    cause: str
    targets: tuple[str, ...]
    verdict: str
    script: str
    report: str = ""
    """The issue that reports a known defect."""
    test: str = ""
    """The test that a mended check passes; how a false alarm stands, where it does."""
    modes: tuple[str, ...] = ()

    def settles(self, row: dict[str, Any]) -> bool:
        """Return whether a stored refutation is of this cause."""
        name = row["name"].partition(" #")[0]
        return name in self.targets and (not self.modes or row["mode"] in self.modes)


def settlements() -> list[Settlement]:
    """Return all entries."""
    entries = tomllib.loads(Path(__file__).with_name("settlements.toml").read_text())["settlement"]
    return [
        Settlement(**entry | {"targets": tuple(entry["targets"]), "modes": tuple(entry.get("modes", ()))})
        for entry in entries
    ]


def refutations(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every stored refutation of a campaign with the name of its file; an optimizer's differences count too."""
    for path in sorted(folder.glob("campaign_*.json")):
        if path.name.startswith(PAST):
            continue
        for row in json.loads(path.read_text()).get("rows", ()):
            if row.get("status") == "refuted":
                yield path.name, row
            elif row.get("fails"):
                yield path.name, {"name": row["optimizer"], "mode": "optimizer", "dtype": "float64"}


def unsettled(folder: Path) -> list[str]:
    """Return what no entry settles, or more than one."""
    entries = settlements()
    counted = ((file, row, sum(entry.settles(row) for entry in entries)) for file, row in refutations(folder))
    return [f"{file}: {row['name']} {row['mode']} {row['dtype']}" for file, row, count in counted if count != 1]


def run_script(entry: Settlement) -> tuple[bool | None, str]:
    """Return whether a script shows what its verdict says, and what it prints; None if it could not be run."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(entry.script, f"<{entry.cause}>", "exec"), {"__name__": "__main__"})
    except AssertionError:
        return False, printed.getvalue()
    except Exception as problem:
        return None, f"{printed.getvalue()}{type(problem).__name__}: {problem}"[-400:]
    return (True, printed.getvalue()) if entry.script else (None, "no script")


def settle(folder: Path, chosen: Sequence[str] = (), before: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Run scripts whose cause contains one of the words chosen (all if none is), and count what they settle.

    Scripts that are not chosen keep what they said `before`.
    """
    known = {row["cause"]: row for row in before}
    rows, files = [], Counter[tuple[str, str]]()
    stored = list(refutations(folder))
    for entry in settlements():
        count = Counter(file for file, row in stored if entry.settles(row))
        files.update({(file, entry.verdict): number for file, number in count.items()})
        if chosen and not any(word in entry.cause for word in chosen):
            if entry.cause in known:
                rows.append(known[entry.cause] | {"refutations": sum(count.values())})
            continue
        shown, printed = run_script(entry)
        print(
            "shown" if shown else "NOT SHOWN" if shown is False else "not run", entry.verdict, entry.cause, flush=True
        )
        fields = {"cause": entry.cause, "verdict": entry.verdict, "report": entry.report, "test": entry.test}
        rows.append({**fields, "refutations": sum(count.values()), "shown": shown, "printed": printed[-1500:]})
    names = sorted({file for file, _ in files})
    table = {file: {verdict: files[file, verdict] for verdict in VERDICTS} for file in names}
    totals = {verdict: sum(files[file, verdict] for file in names) for verdict in VERDICTS}
    return {"totals": totals, "files": table, "unsettled": unsettled(folder), "rows": rows}
