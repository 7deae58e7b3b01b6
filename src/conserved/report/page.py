"""One HTML file from the contents of a store: everything inside, nothing fetched, everything from elsewhere escaped."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from conserved.errors import InvalidInputError
from conserved.report.claimcards import tally
from conserved.report.contents import Contents
from conserved.report.numerals import numeral
from conserved.report.plot import Plot
from conserved.report.summary import alarms_first, findings, headlines, hero, tile_columns, verdict_line
from conserved.report.table import ReportTable

SECTIONS = {
    "papers": "The papers' figures, measured again",
    "beyond": "Beyond the papers",
    "attention": "Figures of attention",
    "audit": "Figures of audits",
    "": "Other figures",
}
"""Where figures go, in this order."""


class UnwritableError(InvalidInputError, OSError):
    """The report cannot be written where it was asked for."""


class Anchors:
    """Names as identifiers of the page: letters, digits and dashes, each one once."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def __call__(self, name: str) -> str:
        """Return the identifier of a name, the same every time."""
        if name not in self._known:
            stem = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60] or "item"
            taken = set(self._known.values())
            number = next(n for n in range(1, len(taken) + 2) if (stem if n == 1 else f"{stem}-{n}") not in taken)
            self._known[name] = stem if number == 1 else f"{stem}-{number}"
        return self._known[name]


def render(contents: Contents, *, title: str, command: str, refresh: float = 0.0) -> str:
    """Return the page as text; with `refresh`, a browser loads it again after as many seconds."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("conserved.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    anchor = Anchors()
    for name in re.findall(r' id="([a-z-]+)"', _source("page.html.j2")):
        anchor(name)
    environment.filters["numeral"] = numeral
    environment.filters["anchor"] = anchor
    environment.filters["breakable"] = breakable
    environment.globals["in_numbers"] = in_numbers
    environment.tests["phone_table"] = lambda table: len(table.columns) > 2
    scripts = {"theme": _source("theme.js"), "page": _source("page.js")}
    figures: dict[str, list[Plot]] = {heading: [] for heading in SECTIONS.values()}
    for plot in contents.figures:
        figures[SECTIONS.get(plot.section, SECTIONS[""])].append(plot)
    shown = headlines(contents)
    return environment.get_template("page.html.j2").render(
        contents=contents,
        title=title,
        command=command,
        refresh=refresh,
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        headlines=shown,
        tile_columns=tile_columns(len(shown)),
        verdict_line=verdict_line(contents),
        findings=findings(contents),
        hero=hero(contents),
        alarms=alarms_first(contents),
        figures={heading: plots for heading, plots in figures.items() if plots},
        codes={card.code for card in contents.claims},
        claims_tally=tally(contents.claims),
        style=Markup(_source("style.css")),
        scripts={name: Markup(text) for name, text in scripts.items()},
        hashes=" ".join(f"'sha256-{_hash(text)}'" for text in scripts.values()),
    )


def breakable(cell: object) -> Markup:
    """Return a cell whose long dotted names may break after a dot and nowhere else."""
    text = str(escape(cell))
    return Markup(re.sub(r"[\w.\[\]]{20,}", lambda name: re.sub(r"([._])(?=[a-z])", r"\1<wbr>", name[0]), text))


def in_numbers(plot: Plot) -> ReportTable:
    """Return a plot as a table: its own, or a row for every line with where it starts, ends and lies between."""
    if plot.table is not None:
        return plot.table
    rows = []
    for number, trace in enumerate(plot.data, 1):
        values = list(_flat(trace.get("z", trace.get("x" if trace.get("orientation") == "h" else "y"))))
        row = [str(trace.get("name") or f"series {number}"), len(values)]
        rows.append([*row, *((values[0], values[-1], min(values), max(values)) if values else (None,) * 4)])
    return ReportTable.of(("series", "points", "first", "last", "least", "largest"), rows, 60)


def _flat(values: Any) -> Iterator[float]:
    if isinstance(values, list | tuple):
        for value in values:
            yield from _flat(value)
    elif isinstance(values, int | float) and not isinstance(values, bool) and abs(values) <= sys.float_info.max:
        yield float(values)


def write_page(text: str, output: str | Path) -> Path:
    """Put the page in its place, whole or not at all; what was there before stays until then."""
    path = Path(output)
    if path.is_dir():
        raise UnwritableError(f"{path} is a folder; name a file in it, such as {path / 'report.html'}.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        try:
            # JSON can say half of a character, which no file can hold.
            with os.fdopen(handle, "w", encoding="utf-8", errors="replace", newline="\n") as file:
                file.write(text)
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(temporary, 0o666 & ~mask)
            os.replace(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except OSError as problem:
        raise UnwritableError(f"{path} cannot be written: {problem.strerror or problem}.") from problem
    return path


def _source(name: str) -> str:
    return (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8").strip()


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
