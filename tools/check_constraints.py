"""Check that constraints.txt resolves from the public package index, for every extra and every supported Python.

A local index, a find-links folder or an installed CPU build can hide a conflict between two pins. This script
therefore runs pip in new environments, without configuration and without installed packages, and resolves only:

    python tools/check_constraints.py                  check
    python tools/check_constraints.py --update         pin the newest versions anew, then check

All extras are resolved together. What resolves together also resolves for each extra alone, because fewer
requirements leave every solution valid.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"

PROJECTS = (ROOT / "pyproject.toml", ROOT / "papers" / "pyproject.toml")
"""The distributions of this repository; one set of pins serves both."""

PYTHONS = ("3.11", "3.12", "3.13")
"""The supported versions, oldest first. Pins come from the oldest, whose packages also support the newer ones."""

UNPINNED = re.compile(r"(nvidia|cuda)-.*|setuptools|timm|torchvision|conserved")
"""Packages without a pin: torch pins the CUDA libraries and chooses torchvision; they differ between its builds."""

HEADER = """\
# Versions that `make demo` and `make test` install. Written by `python tools/check_constraints.py --update`, which
# resolves all extras from the public package index on the oldest supported Python; do not edit single pins by hand
# without running `python tools/check_constraints.py`, which resolves them on every supported Python.
# Not pinned: what torch requires exactly (CUDA libraries) or what must match its build (torchvision).
# triton is pinned to the version that this torch requires on Linux.
"""


@dataclass(frozen=True)
class Resolution:
    """The packages pip would install for one Python, or the reason why it cannot."""

    python: str
    interpreter: str
    versions: Mapping[str, str]
    error: str = ""


def normalized(name: str) -> str:
    """Return the name of a package as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(project: Mapping[str, object], name: str = "conserved") -> list[str]:
    """Return every requirement of a project and of all its extras, without references to this package."""
    dependencies = project["dependencies"]
    extras = project["optional-dependencies"]
    assert isinstance(dependencies, list)
    assert isinstance(extras, dict)
    lines = [*dependencies, *(line for extra in extras.values() for line in extra)]
    return [line for line in dict.fromkeys(lines) if not re.match(rf"{name}\s*\[", line)]


def pins(text: str) -> dict[str, str]:
    """Return the versions that the text of a constraints file pins, by normalized name."""
    matches = re.findall(r"^([A-Za-z0-9][\w.-]*)==([^\s;#]+)", text, flags=re.MULTILINE)
    return {normalized(name): version for name, version in matches}


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without pip's configuration, but for the certificates of the network."""
    kept = {key: value for key, value in environment.items() if not key.startswith("PIP_") or key == "PIP_CERT"}
    return kept | {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def interpreter(version: str) -> str | None:
    """Return an interpreter of this version that runs, from PATH or from pyenv, or None."""
    folders = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    for candidate in (shutil.which(f"python{version}"), *map(str, folders)):
        if candidate and subprocess.run([candidate, "-c", "import venv"], capture_output=True).returncode == 0:
            return candidate
    return None


def resolve(version: str, lines: Sequence[str], constraints: Path | None, folder: Path) -> Resolution:
    """Resolve requirements for one version of Python in a new environment."""
    base = interpreter(version)
    environment = folder / f"venv-{version}"
    if not environment.exists():
        _run([base or sys.executable, "-m", "venv", str(environment)])
        pip = ["--upgrade", f"pip=={pins(CONSTRAINTS.read_text('utf-8'))['pip']}"]
        _run([*_pip(environment), "install", "--quiet", *pip])
    listed = folder / "requirements.txt"
    listed.write_text("\n".join(lines) + "\n", encoding="utf-8")
    report = folder / f"report-{version}.json"
    report.unlink(missing_ok=True)
    command = [*_pip(environment), "install", "--dry-run", "--ignore-installed", "--progress-bar=off"]
    command += ["--report", str(report), "--only-binary=:all:", "-r", str(listed)]
    command += ["-c", str(constraints)] if constraints else []
    # Without that interpreter, pip can choose its wheels, but evaluates markers for the running one.
    command += [] if base else ["--python-version", version, "--target", str(folder / "target")]
    run = subprocess.run(command, env=clean_environment(os.environ), capture_output=True, text=True, cwd=folder)
    name = base or f"wheels for {version} chosen by {sys.executable}"
    if run.returncode:
        # Pip explains a conflict on its standard output, before the error.
        _, _, conflict = run.stdout.partition("The conflict is caused by:")
        return Resolution(version, name, {}, (conflict or run.stderr).strip("\n"))
    installed = [item["metadata"] for item in json.loads(report.read_text("utf-8"))["install"]]
    return Resolution(version, name, {normalized(item["name"]): item["version"] for item in installed})


def problems(resolution: Resolution, pinned: Mapping[str, str]) -> list[str]:
    """Return what is wrong with constraints for one Python: conflicts, missing pins and pins that differ."""
    if resolution.error:
        return [resolution.error]
    unpinned = [name for name in resolution.versions if name not in pinned and not UNPINNED.fullmatch(name)]
    differing = [
        f"{name} is pinned to {pinned[name]}, and {version} would be installed"
        for name, version in resolution.versions.items()
        if name in pinned and pinned[name] != version
    ]
    return [*(f"{name} has no pin" for name in sorted(unpinned)), *differing]


def stale(resolutions: Iterable[Resolution], pinned: Mapping[str, str]) -> list[str]:
    """Return the pins that nothing requires on any Python."""
    needed = {name for resolution in resolutions for name in resolution.versions}
    return sorted(set(pinned) - needed - {"pip"})


def updated(versions: Mapping[str, str], pip: str) -> str:
    """Return the text of a constraints file with these versions."""
    lines = {name: version for name, version in versions.items() if not UNPINNED.fullmatch(name)} | {"pip": pip}
    return HEADER + "".join(f"{name}=={lines[name]}\n" for name in sorted(lines))


def main() -> int:
    """Check, or write and check, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write the newest versions that resolve first")
    parser.add_argument("--python", action="append", choices=PYTHONS, help="only this version (repeatable)")
    arguments = parser.parse_args()
    lines = [line for file in PROJECTS for line in requirements(tomllib.loads(file.read_text("utf-8"))["project"])]
    with tempfile.TemporaryDirectory(prefix="constraints-") as name:
        folder = Path(name)
        if arguments.update:
            newest = resolve(PYTHONS[0], lines, None, folder)
            if newest.error:
                print(newest.error, file=sys.stderr)
                return 1
            CONSTRAINTS.write_text(
                updated(newest.versions, pins(CONSTRAINTS.read_text("utf-8"))["pip"]), encoding="utf-8"
            )
        return _report(
            [resolve(version, lines, CONSTRAINTS, folder) for version in arguments.python or PYTHONS],
            pins(CONSTRAINTS.read_text("utf-8")),
        )


def _report(resolutions: Sequence[Resolution], pinned: Mapping[str, str]) -> int:
    failed = False
    for resolution in resolutions:
        failures = problems(resolution, pinned)
        failed |= bool(failures)
        state = "does not resolve" if resolution.error else f"{len(resolution.versions)} packages"
        print(f"Python {resolution.python} ({resolution.interpreter}): {state}")
        for line in "\n".join(failures).splitlines():
            print(f"  {line}")
    unused = [] if any(resolution.error for resolution in resolutions) else stale(resolutions, pinned)
    if unused:
        print("Pinned and not required:", ", ".join(unused))
    return int(failed or bool(unused))


def _pip(environment: Path) -> list[str]:
    return [str(environment / "bin" / "python"), "-m", "pip"]


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, env=clean_environment(os.environ), check=True)


if __name__ == "__main__":
    sys.exit(main())
