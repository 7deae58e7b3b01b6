"""A stranger follows the README: every command and snippet, in an environment made from the wheel of a fresh clone."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from made_once import made_once
from shown import same
from wheel_environment import ROOT, Environment, copy_of_repository, install

README = (ROOT / "README.md").read_text(encoding="utf-8")

SNIPPETS = re.findall(r"^```python\n(.*?)^```\n+^```text\n(.*?)^```", README, re.DOTALL | re.MULTILINE)

COMMANDS = [
    (line.strip(), shown)
    for block in re.findall(r"^```console\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    for line, _, shown in (part.partition("\n") for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:])
]

EXTRA = re.compile(r"needs \.\[(\w+)\]")

RUN_COMMANDS = """
import shlex, sys
from conserved.cli import main
for line in sys.stdin.read().split("\\f"):
    sys.argv = shlex.split(line, comments=True)
    try:
        main()
    except SystemExit as stop:
        print(f"\\f{stop.code or 0}\\f", end="", flush=True)
"""
"""Each as the program `conserved` runs it, in one process: importing PyTorch would take most of the time of each."""

RUN_ALL = """
import sys
for number, code in enumerate(sys.stdin.read().split("\\f")):
    exec(compile(code, f"README snippet {number}", "exec"), {"__name__": "__main__"})
    print("\\f", end="")
"""

ENDS = {"conserved claims paper.T4.7": 1}
"""Commands that show something that does not hold, and say so by their exit code."""

pytestmark = pytest.mark.slow


def test_every_snippet_is_followed_by_what_it_prints() -> None:
    assert len(SNIPPETS) == README.count("```python\n") >= 3


def test_the_snippets_print_what_is_shown(core: Environment, tmp_path: Path) -> None:
    ran = core.run(core.python, "-c", RUN_ALL, at=tmp_path, text="\f".join(code for code, _ in SNIPPETS))
    assert ran.returncode == 0, ran.stderr
    for (_, shown), printed in zip(SNIPPETS, ran.stdout.split("\f"), strict=False):
        assert same(shown, printed), printed
    assert (tmp_path / "runs.db").exists()


@pytest.fixture(scope="module")
def printed(core: Environment, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """By command that needs no extra, how it ended and what it printed."""
    plain = [line for line, _ in COMMANDS if not EXTRA.search(line)]

    def run_all(folder: Path) -> dict[str, tuple[int, str]]:
        ran = core.run(core.python, "-c", RUN_COMMANDS, at=folder, text="\f".join(plain))
        parts = ran.stdout.split("\f")
        assert len(parts) == 2 * len(plain) + 1, ran.stderr
        return {line: (int(parts[2 * i + 1]), parts[2 * i]) for i, line in enumerate(plain)}

    return made_once("README commands", tmp_path_factory, run_all)


@pytest.mark.parametrize(("line", "shown"), COMMANDS, ids=[line.partition("#")[0].strip() for line, _ in COMMANDS])
def test_a_command_prints_what_is_shown(
    printed: dict[str, tuple[int, str]], wheel: Path, tmp_path: Path, line: str, shown: str
) -> None:
    """A line that says it needs an extra is run with that extra; without it the command says so."""
    if extra := EXTRA.search(line):
        ran = install(wheel, tmp_path / "environment", "cli", extra[1]).run(
            *shlex.split(line, comments=True), at=tmp_path
        )
        code, out = ran.returncode, ran.stdout
    else:
        code, out = printed[line]
    assert code == ENDS.get(line.partition("#")[0].strip(), 0), out
    assert not shown.strip() or same(shown, out), out
    assert shown or out.startswith("{")


def test_what_make_is_asked_for_is_there(tmp_path: Path) -> None:
    """What the targets do is what everything else tests; here, that a fresh clone has them and begins with set-up."""
    clone = copy_of_repository(tmp_path)
    asked = set(re.findall(r"\bmake (\w+)", README)) & {"demo", "test", "docs", "bench", "check"}
    assert {"demo", "test"} <= asked
    make = shutil.which("make")
    assert make is not None
    for target in asked:
        planned = subprocess.run([make, "-n", target], cwd=clone, capture_output=True, text=True)
        assert planned.returncode == 0, planned.stderr
        assert "-m venv .venv" in planned.stdout
        assert "pip install" in planned.stdout


@pytest.mark.parametrize("words", [("--help",), ("--version",), ("demo", "--help"), ("report", "--help")], ids=" ".join)
def test_what_is_said_in_passing_works_too(core: Environment, tmp_path: Path, words: tuple[str, ...]) -> None:
    assert core.run("conserved", *words, at=tmp_path).returncode == 0


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_links_to_files_lead_somewhere(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#\s]+)(?:#[\w-]+)?\)|(?:src|srcset)=\"([^\"]+)\"", text):
        target = link[0] or link[1]
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_anchors_in_the_readme_are_headings_there() -> None:
    for page, anchor in re.findall(r"\]\((docs/[\w/-]+\.md)#([\w-]+)\)", README):
        headings = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
        assert anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}, anchor


FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def _built_description() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("links", ["", "https://example.org/conserved/blob/main/"])
def test_no_link_or_picture_is_dead_on_a_package_index(links: str) -> None:
    text = _built_description().on_an_index(README, links)
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)|(?:src|srcset)=\"([^\"]+)\"", FENCED.sub("", text))
    assert all((link or picture).startswith("https://") for link, picture in targets)
    assert bool(targets) == bool(links)
    assert FENCED.findall(text) == FENCED.findall(README), "code stays as it is"
    assert "found-in-the-wild.md" in text or not links


def test_the_wheel_describes_itself_with_that_text(core: Environment, tmp_path: Path) -> None:
    code = "import importlib.metadata as m; print(m.metadata('conserved').json['description'])"
    shown = core.run(core.python, "-c", code, at=tmp_path)
    assert "(docs/" not in shown.stdout
    assert "# conserved" in shown.stdout
