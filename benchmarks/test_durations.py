"""Which tests take longest: reads what `pytest --junitxml=FILE` wrote, and saves it for CONTRIBUTING.

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
    """The slowest tests of a run, their number, and the time of all; setup that is shared counts for the first user."""
    root = ElementTree.parse(path).getroot()
    cases = [
        (f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name', '')}", float(case.get("time", 0)))
        for case in root.iter("testcase")
    ]
    cases.sort(key=lambda case: -case[1])
    suite = next(root.iter("testsuite"))
    return {
        "tests": len(cases),
        "seconds": sum(seconds for _, seconds in cases),
        "elapsed": float(suite.get("time", 0)),
        "slowest": [{"test": name, "seconds": seconds} for name, seconds in cases[:SHOWN]],
    }


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
