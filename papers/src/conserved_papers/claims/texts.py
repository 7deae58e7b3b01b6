"""Read the texts of this package: what claims say, what the sources say line by line, and the errata sheets."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import yaml

# The loader in C reads the readings in 0.04 s, the one in Python in 0.4 s; not every build of PyYAML has the first.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@cache
def read_text(name: str) -> Any:
    """Return the contents of a YAML file of this package as plain data."""
    return yaml.load(files("conserved_papers.claims").joinpath(f"{name}.yaml").read_text("utf-8"), Loader=_LOADER)
