"""Modules are found under short and former paths: the same modules, and never in the place of a function."""

from __future__ import annotations

import importlib
import json
import pickle
import pkgutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import conserved
from conserved.former_paths import MOVED, STANDING, present


@pytest.mark.parametrize("former", MOVED)
def test_a_former_path_leads_to_the_module_and_warns(former: str) -> None:
    with warnings.catch_warnings(action="ignore"):
        importlib.import_module(former.rpartition(".")[0])
    sys.modules.pop(former, None)
    with pytest.warns(DeprecationWarning, match=f"{former} goes with the next release: import from {MOVED[former]}"):
        found = importlib.import_module(former)
    assert found is importlib.import_module(MOVED[former])
    assert found.__spec__ is not None
    assert found.__spec__.name == found.__name__ == MOVED[former]


NAMES: dict[str, str] = json.loads(Path(__file__).with_name("first_version_names.json").read_text(encoding="utf-8"))
"""What packages of the first release listed as theirs."""

RECOGNISERS = {"attention", "embeddings", "experts", "feedforward", "hf", "lora", "norms", "timm", "torch_nn"}
"""Modules that are gone with all that was in them, and `transformer`: laws are read off any program."""


@pytest.mark.parametrize("package", [name for name in NAMES if not name.startswith("conserved.recognize.")])
def test_every_public_name_of_the_first_release_is_where_it_was(package: str) -> None:
    gone = RECOGNISERS | {"transformer"} if package == "conserved.recognize" else set()
    with warnings.catch_warnings(action="ignore"):
        for name in NAMES[package].split():
            if name not in gone:
                exec(f"from {package} import {name}", {})
    assert callable(conserved.recognize), "and stays a function"


@pytest.mark.parametrize("short", STANDING)
def test_a_short_path_is_the_package_itself_and_everything_in_it(short: str) -> None:
    package = importlib.import_module(short)
    assert package is importlib.import_module(STANDING[short])
    for one in pkgutil.iter_modules(package.__path__):
        # Whatever they are run as, warnings are errors here: none is given.
        assert importlib.import_module(f"{short}.{one.name}").__name__ == f"{STANDING[short]}.{one.name}"
        assert sys.modules[f"{short}.{one.name}"] is sys.modules[f"{STANDING[short]}.{one.name}"]


def test_what_is_in_a_package_that_moved_has_moved_with_it() -> None:
    assert present("conserved.track.ledger") == "conserved.tracking.ledger"
    assert present("conserved.track.sinks.sqlite") == "conserved.store.run_store"
    assert present("conserved.lab.data.embedded") == "conserved.papers.lab.data.embedded"
    assert present("conserved.tracking") is None
    assert present("conservedly.track") is None


def test_no_former_path_takes_the_place_of_a_name() -> None:
    """In a process that imports all of them."""
    code = (
        "import importlib, json, sys, warnings; warnings.simplefilter('ignore')\n"
        "from conserved.former_paths import MOVED\n"
        "names = json.loads(sys.argv[1])\n"
        "def found(package, name):\n"
        "    space = {}\n"
        "    exec(f'from {package} import {name}', space)\n"
        "    return space[name]\n"
        "every = [(p, n) for p, ns in names.items() if not p.startswith('conserved.recognize') for n in ns.split()]\n"
        "before = {one: found(*one) for one in every}\n"
        "for path in MOVED: importlib.import_module(path)\n"
        "changed = [one for one in every if found(*one) is not before[one]]\n"
        "assert not changed, changed\n"
    )
    done = subprocess.run([sys.executable, "-c", code, json.dumps(NAMES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_names_are_imported_from_former_packages_and_functions_stay_functions() -> None:
    code = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "from conserved.audit import Gauge; from conserved import check\n"
        "from conserved.track.sinks import Sink; from conserved.track import Monitor, sinks\n"
        "from conserved.certify.certificate import Certificate; from conserved.discover import Discovery\n"
        "from conserved.impostors import impostors\n"
        "import conserved, conserved.store, conserved.track.sinks.sqlite\n"
        "assert Gauge is conserved.Gauge and Monitor is conserved.Monitor and Sink is conserved.store.Sink\n"
        "assert sinks is conserved.store and conserved.track is conserved.tracking\n"
        "assert check is conserved.check and Discovery is conserved.Discovery\n"
        "import conserved.attention.probe, conserved.attention.low_rank\n"
        "assert callable(conserved.attention.probe) and callable(conserved.attention.low_rank)\n"
        "for name in ('audit', 'discover', 'certify', 'impostors', 'check', 'probe', 'gauge'):\n"
        "    assert not hasattr(getattr(conserved, name), '__path__') and callable(getattr(conserved, name)), name\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_what_is_pickled_under_a_short_path_is_the_same_thing() -> None:
    written = b"cconserved.lab.task\nTask\n."
    assert pickle.loads(written) is importlib.import_module("conserved.papers.lab.task").Task
    assert b"conserved.papers.lab.task" in pickle.dumps(pickle.loads(written))


def test_a_module_runs_under_its_short_path() -> None:
    """One that says what it is given wrong, without running anything."""
    command = [sys.executable, "-W", "error::DeprecationWarning", "-m", "conserved.claims.page", "no such folder"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("FileNotFoundError"), done.stderr
    assert "take_fingerprints(Path(sys.argv[1]))" in done.stderr


def test_what_is_not_there_is_not_found_under_any_path() -> None:
    for path in ("conserved.lab.nothing", "conserved.nothing"):
        with pytest.raises(ModuleNotFoundError, match="nothing"):
            importlib.import_module(path)


def test_no_module_has_the_name_of_a_public_function_beside_it() -> None:
    for one in pkgutil.walk_packages(conserved.__path__, "conserved."):
        if one.ispkg and not one.name.startswith(("conserved.cli", "conserved.demo")):
            package = importlib.import_module(one.name)
            inside = {module.name for module in pkgutil.iter_modules(package.__path__)}
            assert not inside & set(getattr(package, "__all__", ())), one.name
    assert not {module.name for module in pkgutil.iter_modules(conserved.__path__)} & set(conserved._HOMES)
