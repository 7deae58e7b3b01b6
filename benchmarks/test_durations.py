"""Which tests and files take most processor time: reads what `pytest --junitxml=FILE` wrote, saved for CONTRIBUTING.

pytest -n 2 --dist worksteal --junitxml=tests.xml && python benchmarks/test_durations.py tests.xml 2
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from measure import save

SHOWN = 15


def durations(path: Path) -> dict[str, Any]:
    """The slowest tests of a run, their number, and the time of all; setup that is shared counts for the first user.

    Seconds are those of the processor, which a busy machine changes little; `elapsed` is that of the whole run, which a
    busy machine does change."""
    root = ElementTree.parse(path).getroot()
    cases = [_case(case) for case in root.iter("testcase")]
    files: dict[str, float] = {}
    for name, seconds in cases:
        file = name.partition("::")[0]
        files[file] = files.get(file, 0.0) + seconds
    cases.sort(key=lambda case: -case[1])
    longest = sorted(files.items(), key=lambda file: -file[1])
    suite = next(root.iter("testsuite"))
    return {
        "tests": len(cases),
        "seconds": sum(seconds for _, seconds in cases),
        "elapsed": float(suite.get("time", 0)),
        "slowest": [{"test": name, "seconds": seconds} for name, seconds in cases[:SHOWN]],
        "files": [{"file": name, "seconds": seconds} for name, seconds in longest[:SHOWN]],
    }


def _case(case: ElementTree.Element) -> tuple[str, float]:
    """A test, with its file and class, and the processor time it took."""
    given = {one.get("name"): one.get("value") for one in case.iter("property")}
    names = case.get("classname", "").split(".")
    file = next((index for index, name in enumerate(names) if name.startswith("test_")), 0)
    index = "::".join(names[file:])
    seconds = given.get("processor_seconds") or case.get("time") or 0.0
    return f"{index}::{case.get('name', '')}", float(seconds)


def main() -> None:
    """Save, and say what was saved."""
    if len(sys.argv) != 3:
        sys.exit("Usage: python benchmarks/test_durations.py FILE WORKERS")
    record = durations(Path(sys.argv[1]))
    for row in record["slowest"]:
        print(f"{row['seconds']:7.1f} s  {row['test']}")
    print(f"saved {save('test_durations', record | {'workers': int(sys.argv[2])})}")


if __name__ == "__main__":
    main()
