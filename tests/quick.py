"""`make quick`: the tests of what has changed, then a core of the others, for at most about a minute.

A test file is run if it has changed, or if it names a part of the package, or a module of the tests, that has. Pages
have tests of their own. No new test is begun once the time is over; those are counted as skipped. `make test` runs
everything.
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
    own = [TESTS.parent / file for file in files if re.fullmatch(r"tests/(\w+/)?test_\w+\.py", file)]
    parts = {part for file in files if (part := _part(file))}
    patterns = (rf"conserved(?:_papers)?\.{part}\b|import .*\b{part}\b|^from {part} import" for part in parts)
    naming = re.compile("|".join(patterns), re.MULTILINE)
    named = [path for path in sorted(TESTS.rglob("test_*.py")) if parts and naming.search(path.read_text("utf-8"))]
    pages = [TESTS / "test_documentation.py"] if any(file.endswith(".md") for file in files) else []
    core = [path for name in CORE for path in TESTS.rglob(f"test_{name}.py")]
    return [path for path in dict.fromkeys([*own, *named, *pages, *core]) if path.exists()]


def _part(file: str) -> str:
    """The part of the package, or the module of the tests, that a file belongs to."""
    match = re.match(r"(?:papers/src/conserved_papers|src/conserved|src|tests)/(\w+)", file)
    none = ("__init__", "test_", "conftest", "data", "models")
    return match[1] if match and "/test_" not in file and not match[1].startswith(none) else ""


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
