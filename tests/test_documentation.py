"""The documentation says what is true: snippets run, tables are those of the results, links lead somewhere."""

from __future__ import annotations

import ast
import importlib.util
import io
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from contextlib import chdir, redirect_stdout
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from typer.testing import CliRunner

import conserved
from conserved.cli.app import app
from made_once import made_once
from shown import same
from wheel_environment import ROOT

sys.path.insert(0, str(ROOT / "docs_build"))

import figures
import hooks
import tables

DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))

BEFORE = {
    "audit.md": """
import torch, conserved
from conserved import blocks
build = lambda: blocks.Attention(dim=8, heads=2)
model, x = build(), torch.randn(5, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = model(x).square().mean()
loss_fn = lambda: model(x).square().mean()
""",
    "how-to/audit-my-kernel.md": f"import sys; sys.path.insert(0, {str(ROOT / 'examples')!r})",
    "tracking.md": """
import torch, transformers, lightning, conserved
from conserved import blocks
model = blocks.Attention(dim=8, heads=2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = [torch.randn(5, 8) for _ in range(100)]
loss = lambda model, batch: model(batch).square().mean()
class SignDescent(torch.optim.SGD): pass
""",
    "report.md": """
import conserved
conserved.tracking.store_document("store.db", "audit", "nothing yet", {})
""",
}
"""What a page's fragments are about: a model, its optimizer, its data, a store."""

UNRUN = {
    "attention.md": ("healthy = [...]",),
    "tracking.md": ("transformers.Trainer(...",),
}
"""Snippets that show where a call goes and are run, whole, elsewhere: the alarm's benchmark, the Trainer's how-to."""

COMMANDS_ELSEWHERE = ("path/to/", "my_model.py", " store.db", "--ray", "--full", "reproduce figure3", "reproduce  ")
"""Commands about a reader's own files and stores, and sweeps, which the laboratory's and the report's own tests run."""


def blocks_of(text: str, language: str) -> list[tuple[str, str]]:
    """Fenced blocks of a language, each with the output that is shown right after it."""
    pattern = rf"^```{language}\n(.*?)^```(?:\n+^```text\n(.*?)^```)?"
    return [(code, shown or "") for code, shown in re.findall(pattern, text, re.DOTALL | re.MULTILINE)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of((DOCS / page).read_text("utf-8"), "python")])
def test_the_snippets_of_a_page_run_and_print_what_is_shown(page: str, tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    with chdir(tmp_path), warnings.catch_warnings():
        exec(BEFORE.get(page, ""), names)
        for code, shown in blocks_of((DOCS / page).read_text("utf-8"), "python"):
            if any(mark in code for mark in UNRUN.get(page, ())):
                continue
            printed = io.StringIO()
            with redirect_stdout(printed):
                exec(code, names)
            assert not shown or same(shown, printed.getvalue()), f"{code}\n{printed.getvalue()}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of((DOCS / page).read_text("utf-8"), "console")])
def test_the_commands_of_a_page_run_and_print_what_is_shown(
    page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with chdir(tmp_path):
        for block, _ in blocks_of((DOCS / page).read_text("utf-8"), "console"):
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                line, _, shown = part.partition("\n")
                if any(index in line for index in COMMANDS_ELSEWHERE):
                    continue
                printed = ran(shlex.split(line, comments=True), capsys)
                assert not shown.strip() or same(shown, printed), f"{line}\n{printed}"


def ran(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command prints, in this process."""
    if words[0] == "python":
        capsys.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(ROOT / "examples")
            runpy.run_path(str(ROOT / words[1]), run_name="__main__")
        return capsys.readouterr().out
    assert words[0] == "conserved", words
    result = CliRunner().invoke(app, words[1:], env={"COLUMNS": "120", "TERM": "dumb"})
    assert result.exit_code == 0, result.output
    return result.stdout


def entry(sentence: str, words: int) -> str:
    inside = f"<div class='doc doc-children'><p>{'word ' * words}</p></div>"
    contents = f'<div class="doc doc-contents "><p>{sentence}</p>{inside}</div>'
    return f'<div class="doc doc-object"><h3 id="x">x</h3>{contents}</div>'


def test_long_entries_of_the_reference_are_folded_behind_their_first_sentence() -> None:
    content = hooks.fold_entries(f"<p>before</p>{entry('Return it. And more.', 400)}{entry('Short.', 3)}<p>after</p>")
    assert re.findall(r"</h3><details><summary>(.*?)</summary>", content) == ["Return it."]
    assert content.count("<div") == content.count("</div>") == 6
    assert content.endswith("</div><p>after</p>")
    assert content.index("</div></details></div>") < content.index("Short.")


def test_tables_of_many_cells_or_words_are_folded_and_others_are_not() -> None:
    def folded(rows: int, cell: str) -> bool:
        body = f"<tr><td>{cell}</td><td>{cell}</td></tr>" * rows
        table = f"<table><thead><tr><th>a</th><th>b</th></tr></thead><tbody>{body}</tbody></table>"
        return hooks.on_page_content(table, None, None, None).startswith("<details>")  # type: ignore[arg-type]

    assert not folded(11, "a few words")
    assert folded(30, "1")
    assert folded(11, "many " * 20)


def test_tables_are_those_of_the_stored_results() -> None:
    late = [path.name for path in tables.pages() if tables.filled(path.read_text("utf-8")) != path.read_text("utf-8")]
    assert not late, "run make docs"


@pytest.mark.filterwarnings("ignore")
def test_figures_are_those_of_the_stored_results(tmp_path: Path) -> None:
    for drawn in figures.drawn(tmp_path, "order_test", "long_runs", "moment_map"):
        assert drawn.read_text("utf-8") == (DOCS / "assets" / drawn.name).read_text("utf-8"), "run make docs"


MEASURED = re.compile(
    r"\d(?:[\d,.]*\d)?\s?(?:ms|s|MB|GB|kB|times|%)(?![\w-])|\d+\.\d+ ?(?:billion|million)|\d\.\d+e[-−]\d"
)

DEFINED = {
    "audit.md": {"10 %"},
    "tracking.md": {"1 %", "5 %", "2 ms"},
    "attention.md": {"99 %", "10 %", "95 %"},
    "lab.md": {"95 %"},
    "long-runs.md": {"1.28 million"},
}
"""Figures that say what something is, and not how it came out."""


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith("claims")])
def test_no_measured_figure_stands_in_prose(page: str) -> None:
    """Outside of code and of tables that are made from results. The pages of claims are written by the claims."""
    text = tables.REGION.sub("", (DOCS / page).read_text("utf-8"))
    text = re.sub(r"^```.*?^```|^ {4}.*?$|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)
    found = {" ".join(item.split()) for item in MEASURED.findall(text)}
    assert found <= DEFINED.get(page, set())


class Page(HTMLParser):
    """The anchors of a page, where its links lead, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        given = dict(attrs)
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag in ("script", "img", "iframe", "source") and given.get("src"):
            self.loads.append(given["src"])
        if tag == "link" and given.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """The whole site, every page read."""
    folder = made_once("site", tmp_path_factory, built_site)
    return {path: Page(path.read_text("utf-8")) for path in folder.rglob("*.html")}


def built_site(folder: Path) -> Path:
    """Built strictly."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=_environment())
    assert built.returncode == 0, built.stdout + built.stderr
    assert "WARNING" not in built.stderr
    return folder


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "NO_MKDOCS_2_WARNING": "1", "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_no_link_inside_the_site_is_dead(site: dict[Path, Page]) -> None:
    dead = []
    for path, page in site.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or path.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (parts.fragment and unquote(parts.fragment) not in site[target].anchors):
                dead.append(f"{path.name}: {link}")
    assert not dead


@pytest.mark.slow
def test_nothing_is_loaded_from_elsewhere(site: dict[Path, Page]) -> None:
    foreign = {load for page in site.values() for load in page.loads if urlsplit(load).scheme or load.startswith("//")}
    assert foreign == set()
    for path, page in site.items():
        for load in page.loads:
            if path.name != "404.html":
                assert (path.parent / unquote(urlsplit(load).path)).resolve().exists(), load


@pytest.mark.slow
def test_search_needs_no_server(site: dict[Path, Page]) -> None:
    folder = min(site, key=lambda path: len(path.parts)).parent
    index = (folder / "search" / "search_index.js").read_text("utf-8")
    assert index.startswith("var __index = ")
    assert "moment map" in index


@pytest.mark.slow
def test_formulas_are_mathml_and_no_script_is_needed(site: dict[Path, Page]) -> None:
    (concept,) = (path for path in site if path.name == "moment-map.html")
    text = concept.read_text("utf-8")
    assert text.count("<math ") > 20
    assert "arithmatex" not in text


@pytest.mark.slow
def test_every_public_name_is_documented(site: dict[Path, Page]) -> None:
    anchors = {anchor for path, page in site.items() if path.parent.name == "api" for anchor in page.anchors}
    missing = [path for part in hooks.parts() for path in hooks.names_of(part).values() if path not in anchors]
    assert not missing


def said_in_source(path: str) -> bool:
    """Whether a class or function has a docstring where it is defined; its module is not run for it."""
    module, _, name = path.rpartition(".")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    found = [
        node
        for node in ast.parse(Path(spec.origin).read_text("utf-8")).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name
    ]
    # The last one: those before it are overloads.
    return not found or bool(ast.get_docstring(found[-1]))


def test_every_public_name_says_what_it_is() -> None:
    paths = [path for part in hooks.parts() for path in hooks.names_of(part).values()]
    silent = [path for path in paths if not said_in_source(path)]
    assert not silent
    assert set(hooks.UNLOADED["integrations"]) == set(conserved.integrations.__all__)
    known = {name for part in hooks.parts() for name in (*hooks.names_of(part), part)}
    assert set(conserved.__all__) - {"__version__"} <= known


@pytest.mark.parametrize(
    ("shown", "found", "expected"),
    [
        ("7 laws", "7 laws", True),
        ("7 laws", "8 laws", False),
        ("residual 0.57", "residual 0.58", True),
        ("residual 0.57", "residual 0.67", False),
        ("gap 3e-16", "gap 8e-16", True),
        ("gap 3e-16", "gap 8e-03", False),
        ("first\n…\nlast", "first\nsecond\nthird\nlast", True),
        ("first\n…\nlast", "first\nsecond\nthird\nother", False),
        ("one line", "one line\nanother", False),
    ],
)
def test_what_is_shown_is_held_against_what_comes_out(shown: str, found: str, expected: bool) -> None:
    assert same(shown, found) is expected
