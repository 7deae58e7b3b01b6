"""An environment that a user would have: this package from its wheel, and only what the wheel's metadata asks for.

Requirements are linked from the environment the tests run in, so that neither the network nor minutes are needed; what
is not among them cannot be imported, exactly as after `pip install conserved` in an empty environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent

PAPERS = ROOT / "papers"
"""The second distribution of this repository."""

PROJECTS = {"conserved": ROOT / "pyproject.toml", "conserved-papers": PAPERS / "pyproject.toml"}
"""The distributions that are built here, by their normalised names."""

DEMO_EXTRAS = ("cli", "report", "certify")
"""The extras that `make demo` installs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A folder with an interpreter of its own."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def run(
        self, *words: str | Path, at: Path, text: str | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """A command that finds this environment's programs first, and nothing of the tests'."""
        saved = {name: os.environ[name] for name in ("HOME", "TMPDIR", "LANG") if name in os.environ}
        path = f"{self.folder / 'bin'}{os.pathsep}{os.defpath}"
        environment = {**saved, "PATH": path, "COLUMNS": "80", "OMP_NUM_THREADS": "1", "TERM": "dumb", **variables}
        return subprocess.run(
            [str(word) for word in words], cwd=at, env=environment, input=text, capture_output=True, text=True
        )


def build(folder: Path, kind: str = "wheel", *, source: Path = ROOT) -> Path:
    """The wheel or sdist of this package, made by its own build back end."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (made,) = folder.iterdir()
    return made


def install(wheel: Path, folder: Path, *extras: str, papers: Path | None = None) -> Environment:
    """An empty environment with the wheel and its requirements, those of `extras` included, and nothing else.

    `papers` is the wheel of the second distribution, for what needs it.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    made = Environment(folder=folder)
    pip = [sys.executable, "-m", "pip", "--python", str(made.python), "install", "--quiet", "--no-deps", "--no-index"]
    wheels = [wheel] if papers is None else [wheel, papers]
    subprocess.run([*pip, *map(str, wheels)], check=True, capture_output=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in required(*extras, papers=papers is not None):
        _link(name, packages)
    return made


def required(*extras: str, papers: bool = False) -> frozenset[str]:
    """Every distribution this package needs, directly or not; with those of the papers if asked for."""
    result: set[tuple[str, str]] = set()
    waiting = [("conserved", extra) for extra in ("", *extras)]
    waiting += [("conserved-papers", "")] if papers else []
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) not in result:
            result.add((name, extra))
            waiting += _direct(name, extra)
    return frozenset(name for name, _ in result) - set(PROJECTS)


def _direct(name: str, extra: str) -> Iterator[tuple[str, str]]:
    for requirement in map(Requirement, _requirements(name)):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            for wanted in ("", *requirement.extras):
                yield canonicalize_name(requirement.name), wanted


def _requirements(name: str) -> list[str]:
    """What a distribution requires; of those built here as they are now, which need not be as they were installed."""
    if name in PROJECTS:
        project = tomllib.loads(PROJECTS[name].read_text(encoding="utf-8"))["project"]
        extras = project["optional-dependencies"].items()
        return [*project["dependencies"], *(_only_with(extra, line) for extra, lines in extras for line in lines)]
    try:
        return distribution(name).requires or []
    except PackageNotFoundError:
        return []


def _only_with(extra: str, line: str) -> str:
    requirement = Requirement(line)
    others = f"({requirement.marker}) and " if requirement.marker else ""
    requirement.marker = Marker(f'{others}extra == "{extra}"')
    return str(requirement)


def _link(name: str, packages: Path) -> None:
    try:
        result = distribution(name)
    except PackageNotFoundError:
        return
    tops = {file.parts[0] for file in result.files or () if file.parts[0] not in ("..", "__pycache__")}
    for top in tops:
        source, target = Path(str(result.locate_file(top))), packages / top
        if source.exists() and not target.exists():
            target.symlink_to(source)


def copy_of_repository(folder: Path) -> Path:
    """What a clone has: the files git knows, as they are now."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True
    )
    for name in listed.stdout.decode().splitlines():
        source = ROOT / name
        if source.is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / name)
    return folder
