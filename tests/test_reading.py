"""The files that the guide names for a change are all that its example uses."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from pathlib import Path

import pytest

import conserved

ROOT = Path(__file__).parent.parent
SOURCE = Path(conserved.__file__).parent
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXAMPLES = {
    "a kind of group": "custom_kind",
    "an optimizer rule": "custom_optimizer",
    "a sink": "custom_sink",
    "a typing rule": "custom_operator",
}


def files_named_for(what: str) -> list[str]:
    """The files that the guide names for a change."""
    (row,) = (line for line in GUIDE.splitlines() if line.startswith(f"| {what} |"))
    return re.findall(r"`([\w/]+\.py)`", row.split("|")[2])


def defined_in(module: str, name: str) -> Path:
    """The file of the assignment, function or class that a name is imported from."""
    holder = importlib.import_module(module)
    result = getattr(holder, name)
    home = sys.modules.get(getattr(result, "__module__", module), holder)
    if name not in vars(home):
        home = holder
    assert home.__file__ is not None
    tree = ast.parse(Path(home.__file__).read_text(encoding="utf-8"))
    assigned = (target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets)
    names = {getattr(node, "name", "") for node in tree.body} | {getattr(target, "id", "") for target in assigned}
    assert name in names or result.__name__ in names, f"{name} is not defined in {home.__name__}"
    return Path(home.__file__)


@pytest.mark.parametrize("what", EXAMPLES)
def test_an_example_uses_only_files_that_the_guide_names(what: str) -> None:
    files = files_named_for(what)
    assert files
    assert all((SOURCE / file).is_file() for file in files)
    tree = ast.parse((ROOT / "examples" / f"{EXAMPLES[what]}.py").read_text(encoding="utf-8"))
    used = [
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("conserved")
        for alias in node.names
        if alias.name not in conserved.__all__
    ]
    assert used
    homes = {name: defined_in(module, name).relative_to(SOURCE).as_posix() for module, name in used}
    assert {name: home for name, home in homes.items() if home not in files} == {}
