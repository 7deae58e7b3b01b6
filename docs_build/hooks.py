"""What the site adds to docs/: generated pages, mathematics without scripts, links that work there and in the clone.

Loaded by mkdocs (`hooks:` in mkdocs.yml). Nothing here fetches anything: formulas become MathML while pages are built.
"""

from __future__ import annotations

import html
import importlib
import importlib.util
import inspect
import json
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import latex2mathml.converter
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs_build"))

import tables  # noqa: E402

PARTS = {
    "laws": "Laws",
    "symmetry": "Symmetries",
    "moment": "Evaluating moment maps",
    "verdict": "Verdicts",
    "inference": "Reading symmetries off a program",
    "inference.probing": "Probing a function",
    "discovery": "Discovering laws",
    "certificates": "Certificates",
    "checking": "Checking a function",
    "auditing": "Auditing gradients",
    "transform": "Moving along symmetries",
    "testing": "For test suites",
    "tracking": "Watching training",
    "store": "Where runs are kept",
    "integrations": "Training loops of others",
    "attention": "Attention",
    "claims": "Claims",
    "report": "The report",
    "blocks": "Blocks",
}
"""The pages of the reference: a part of the package each."""

DERIVED = (
    "symmetry.symmetry",
    "symmetry.kind",
    "symmetry.products",
    "moment.sources",
    "moment.row_identities",
    "laws.identities",
    "inference.types.tensor_type",
    "inference.types.mixable_atoms",
    "inference.symmetries.rotation",
    "inference.symmetries.shifts",
    "discovery.rank",
    "discovery.relations",
    "discovery.forms",
    "discovery.metric",
    "discovery.phase_space",
    "certificates.proof",
    "certificates.jets",
    "tracking.ledger",
    "tracking.step_expansion",
    "tracking.theory",
    "attention.energy",
    "attention.band",
    "attention.coherence",
    "attention.low_rank_heads",
    "attention.natural_attention",
)
"""Modules that open with the derivation of what they compute."""

UNLOADED = {
    "integrations": {
        "ConservationCallback": "conserved.integrations.trainer.ConservationCallback",
        "EqualizeCallback": "conserved.integrations.equalizing.EqualizeCallback",
        "LightningConservation": "conserved.integrations.lightning.LightningConservation",
    }
}
"""Names whose packages take long to import, and where they are defined."""

WIDE = ("claims.md", "claims/")
"""Pages of tables and lists that need the room of the table of contents; their first table or headings lead on."""

COPIED = {"contributing.md": "CONTRIBUTING.md", "security.md": "SECURITY.md", "changelog.md": "CHANGELOG.md"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the reference into the navigation."""
    pages = [{"Public names": "api/index.md"}, *({title: f"api/{part}.md"} for part, title in parts().items())]
    config.nav = [{"Reference": pages} if item == {"Reference": "api/"} else item for item in config.nav or []]
    config.nav = [{"Results": _with_appendix(item["Results"])} if "Results" in item else item for item in config.nav]
    return config


def _with_appendix(results: list[Any]) -> list[Any]:
    """The pages of results, with the pages of the appendix in the place that mkdocs.yml leaves for them."""
    from conserved_papers.claims.appendix import NAMES, line_parts

    found = [{"Arguments in full": "claims/appendix/arguments.md"}]
    for document, name in NAMES.items():
        found.append({name: f"claims/appendix/{document}.md"})
        for part, first, last in line_parts(document):
            found.append({f"{name}, lines {first} to {last}": f"claims/appendix/{document}-{part}.md"})
    return [{"Appendix": found} if item == {"Appendix": "claims/appendix/"} else item for item in results]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is made of code, notebooks, results and the files beside docs/."""
    for place, content in generated():
        files.append(File.generated(config, place, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as they are written for the repository, so that they work on the site as well; room for wide pages."""
    if page.file.src_uri.startswith(WIDE):
        page.meta["hide"] = ["toc"]
    return site_links(markdown, page.file.src_uri)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Formulas as MathML; long tables and entries of the reference, which are looked up and not read, folded."""
    content = re.sub(r"<table>.*?</table>", _folded, content, flags=re.DOTALL)
    content = fold_entries(content)
    return re.sub(r'<(div|span) class="arithmatex">\\([\[(])(.*?)\\[\])]</\1>', _mathml, content, flags=re.DOTALL)


LONG_TABLE = 48
"""Cells from which on a table is folded."""
WORDY_TABLE = 1300
"""Characters of text from which on a table is folded."""


def _folded(found: re.Match[str]) -> str:
    rows, cells = found[0].count("<tr>") - 1, len(re.findall(r"<td\b", found[0]))
    if cells < LONG_TABLE and len(re.sub(r"<[^>]*>|\s+", " ", found[0])) < WORDY_TABLE:
        return found[0]
    return f"<details><summary>Table of {rows} rows</summary>{found[0]}</details>"


LONG_ENTRY = 1500
"""Characters of HTML from which on an entry of the reference is folded behind its first sentence."""


def fold_entries(content: str) -> str:
    """Fold what the reference says of each name, but for its heading, so that links to names lead somewhere."""
    entries: list[tuple[int, int]] = []
    depth, opened = 0, None
    for tag in re.finditer(r"<div\b[^>]*>|</div>", content):
        if tag[0] == "</div>":
            depth -= 1
            if opened is not None and depth == opened[1]:
                entries.append((opened[0], tag.end()))
                opened = None
            continue
        if opened is None and "doc-contents" in tag[0]:
            opened = (tag.start(), depth)
        depth += 1
    for first, last in reversed(entries):
        entry = content[first:last]
        if len(entry) < LONG_ENTRY:
            continue
        paragraph = re.search(r"<p>(.*?)</p>", entry, flags=re.DOTALL)
        sentence = re.split(r"(?<=[.:])\s", paragraph[1], maxsplit=1)[0] if paragraph else "More"
        folded = f"<details><summary>{sentence}</summary>{entry}</details>"
        content = content[:first] + folded + content[last:]
    return content


def _mathml(found: re.Match[str]) -> str:
    display = "block" if found[2] == "[" else "inline"
    return latex2mathml.converter.convert(html.unescape(found[3]).strip(), display=display)


def site_links(markdown: str, place: str) -> str:
    """Rewrite links to files that are pages under another name."""
    up = "../" * place.count("/")
    rules = [
        (
            r"\]\((?:\.\./)*(CONTRIBUTING|SECURITY|CHANGELOG)\.md(#[\w-]+)?\)",
            lambda m: f"]({up}{m[1].lower()}.md{m[2] or ''})",
        ),
        (r"\]\((?:\.\./)*examples/(\w+)\.py\)", lambda m: f"]({up}examples.md#{m[1]})"),
        (r"\]\((?:\.\./)*examples/tour\.ipynb\)", lambda m: f"]({up}tour.md)"),
        (r"\]\((?:\.\./)*examples/?\)", lambda m: f"]({up}examples.md)"),
        (r"\]\((?:\.\./)*benchmarks/results/?\)", lambda m: f"]({up}benchmarks.md)"),
    ]
    if place in COPIED:
        rules += [(r"\]\(docs/", lambda m: "]("), (r"\"docs/assets/", lambda m: '"assets/')]
    for pattern, replacement in rules:
        markdown = re.sub(pattern, replacement, markdown)
    return markdown


def generated() -> Iterator[tuple[str, str]]:
    """Every page that is not a file in docs/."""
    for place, source in COPIED.items():
        yield place, (ROOT / source).read_text(encoding="utf-8")
    yield "examples.md", examples()
    yield "tour.md", notebook(ROOT / "examples" / "tour.ipynb")
    yield "benchmarks.md", tables.page()
    yield "derivations.md", derivations()
    yield "api/index.md", public_names()
    from conserved_papers.claims.appendix import appendix_pages

    yield from appendix_pages()
    for part, title in parts().items():
        yield f"api/{part}.md", reference(part, title)


def examples() -> str:
    """Every script, with its first sentence as the heading's text."""
    lines = [
        "# Examples",
        "",
        "Each of these runs in the test-suite in less than a minute, offline. They are in the folder `examples`.",
    ]
    for path in sorted((ROOT / "examples").glob("*.py")):
        source = path.read_text(encoding="utf-8")
        said = inspect.cleandoc(re.match(r'"""(.*?)"""', source, re.DOTALL)[1])  # type: ignore[index]
        first, _, rest = said.partition("\n")
        lines += ["", f"## {path.stem} {{#{path.stem}}}", "", first, rest, ""]
        code = [f'```python title="examples/{path.name}"', *source.rstrip().splitlines(), "```"]
        lines += ['??? example "The script"', *(f"    {line}".rstrip() for line in code)]
    return "\n".join(lines) + "\n"


def notebook(path: Path) -> str:
    """A notebook as it was executed: text, code and displays."""
    lines: list[str] = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            lines += [source, ""]
            continue
        lines += ["```python", source, "```", ""]
        for output in cell["outputs"]:
            shown = "".join(output.get("data", {}).get("text/html", ""))
            if shown:
                lines += [f'<div class="display">{shown}</div>', ""]
    lines.append("The notebook itself is `examples/tour.ipynb`.")
    return "\n".join(lines) + "\n"


def derivations() -> str:
    """The docstrings of the modules that derive what they compute."""
    lines = [
        "# Derivations",
        "",
        "Each of these stands at the top of the file whose code it justifies, and is shown here from there.",
    ]
    for name in DERIVED:
        path = f"src/conserved/{name.replace('.', '/')}.py"
        lines += ["", f"## {name} {{#{name.replace('.', '-')}}}", "", f"`{path}`", "", f"::: conserved.{name}"]
        lines += [
            "    options:",
            "      members: false",
            "      show_root_heading: false",
            "      show_root_toc_entry: false",
        ]
    return "\n".join(lines) + "\n"


def parts() -> dict[str, str]:
    """The parts that this version of the package has."""
    return {part: title for part, title in PARTS.items() if importlib.util.find_spec(f"conserved.{part}") is not None}


def names_of(part: str) -> dict[str, str]:
    """The public names of a part, and where each is defined."""
    if part in UNLOADED:
        return UNLOADED[part]
    module = importlib.import_module(f"conserved.{part}")
    package = importlib.import_module("conserved")
    listed = list(getattr(module, "__all__", []))
    listed += [name for name in package.__all__ if package._HOMES.get(name) == part and name not in listed]
    if not listed:
        return _defined_in(module)
    found = {}
    for name in listed:
        value = getattr(module, name)
        if not isinstance(value, ModuleType) and not name.startswith("_"):
            found[name] = home(f"conserved.{part}", name, value)
    return found


def _defined_in(module: ModuleType) -> dict[str, str]:
    """Of a part that lists no names: the public classes and functions of its modules, or its own."""
    inside = getattr(module, "__path__", None)
    below = [f"{module.__name__}.{one.name}" for one in pkgutil.iter_modules(inside)] if inside else []
    paths = [
        f"{name}.{value.__qualname__}"
        for name in below or [module.__name__]
        for value in vars(importlib.import_module(name)).values()
        if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == name
    ]
    return {path: path for path in paths if not path.rpartition(".")[2].startswith("_")}


def home(module: str, name: str, value: Any) -> str:
    """The dotted path of a definition; of a constant, where it can be had from."""
    if inspect.isclass(value) or inspect.isfunction(value):
        return f"{value.__module__}.{value.__qualname__}"
    return f"{module}.{name}"


def everything() -> dict[str, str]:
    """Where each definition is documented: the first part that lists it."""
    places: dict[str, str] = {}
    for part in parts():
        for path in names_of(part).values():
            places.setdefault(path, part)
    return places


def reference(part: str, title: str) -> str:
    """One page: a heading, what the module says of itself, and its names."""
    said = inspect.getdoc(importlib.import_module(f"conserved.{part}")) or ""
    lines = [f"# {title}", "", said, ""]
    places = everything()
    elsewhere = []
    for name, path in names_of(part).items():
        if places[path] == part:
            lines += [f"::: {path}", ""]
        else:
            elsewhere.append(f"[`{name}`][{path}]")
    if elsewhere:
        lines += ["Also here: " + ", ".join(elsewhere) + ".", ""]
    return "\n".join(lines)


def public_names() -> str:
    """The names of the package itself, with a sentence each."""
    package = importlib.import_module("conserved")
    lines = ["# Public names", "", "`import conserved` gives these; each is loaded when it is first used.", ""]
    lines += ["| name | |", "|---|---|"]
    for name in package.__all__:
        value = getattr(package, name)
        if name == "__version__":
            continue
        first = re.split(r"(?<=[.:])\s", inspect.cleandoc(inspect.getdoc(value) or "").replace("\n", " "))[0]
        first = first.replace("|", "\\|")
        if isinstance(value, ModuleType):
            lines.append(f"| [`conserved.{name}`]({name}.md) | {first} |")
        else:
            path = home(f"conserved.{package._HOMES[name]}", name, value)
            lines.append(f"| [`{name}`][{path}] | {first} |")
    return "\n".join(lines) + "\n"
