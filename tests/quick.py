"""`make quick`: the tests of what has changed, then a core of the others, for at most about a minute.

A test file is run if it has changed, or if it names a part of the package that has. No new test is begun once the time
is over; those are counted as skipped. `make test` runs everything.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SECONDS = 40
"""After which no test is begun; loading PyTorch and collecting come before that."""

CORE = ("symmetry", "view", "laws", "verdict", "inference_rules", "names", "report", "gauge", "html", "live")
"""Test files that touch every part and are quick to collect."""

TESTS = Path(__file__).parent


def changed() -> list[str]:
    """Files that differ from the main branch, or from the last commit where that is the branch, and new ones."""
    base = _git("merge-base", "HEAD", "origin/main") or _git("merge-base", "HEAD", "main") or ["HEAD"]
    return [*_git("diff", "--name-only", base[0]), *_git("ls-files", "--others", "--exclude-standard")]


def chosen(files: list[str]) -> list[Path]:
    """Test files for these changes, those that changed themselves first; the core where nothing is told."""
    own = [TESTS / Path(file).name for file in files if re.fullmatch(r"tests/test_\w+\.py", file)]
    parts = {part for file in files if (part := _part(file))}
    named = [
        path
        for path in sorted(TESTS.glob("test_*.py"))
        if any(re.search(rf"conserved\.{part}\b|import .*\b{part}\b", path.read_text("utf-8")) for part in parts)
    ]
    core = [TESTS / f"test_{name}.py" for name in CORE]
    return [path for path in dict.fromkeys([*own, *named, *core]) if path.exists()]


def _part(file: str) -> str:
    """The part of the package that a file of its source belongs to."""
    found = re.match(r"src/conserved/(\w+)", file)
    return found[1] if found and found[1] != "__init__" else ""


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], capture_output=True, text=True, cwd=TESTS)
    return done.stdout.split() if done.returncode == 0 else []


def main() -> None:
    """Run pytest on them."""
    paths = chosen(changed())
    command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "-m", "not slow", f"--quick={SECONDS}"]
    sys.exit(subprocess.run([*command, *map(str, paths)]).returncode)


if __name__ == "__main__":
    main()
