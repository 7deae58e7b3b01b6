"""The report: one file, nothing fetched, everything escaped, and a defined outcome for every store."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import sqlite3
import subprocess
import sys
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from conserved import audit, recognize
from conserved.alarm_groups import AlarmGroups
from conserved.blocks import Attention
from conserved.cli import main
from conserved.output.figure import line, panels
from conserved.report import NoSuchRunError, NotAStoreError, UnwritableError, write_report
from conserved.report.claimcards import tally
from conserved.report.contents import read
from conserved.report.drawing import draw
from conserved.report.mathematics import typeset
from conserved.report.numerals import numeral, without_folders
from conserved.report.page import Anchors
from conserved.report.scales import scale_of
from conserved.report.summary import findings, hero, result_title, verdict_line
from conserved.report.svg_elements import colour
from conserved.store.run_digest import digest, spread
from conserved.tracking import RunStore, store_document
from report_store import IMAGE, LINK, SCRIPT, claim, figure, hostile_store, random_ledger, refuted, watch


class Elements(HTMLParser):
    """Every element of a page with its attributes; the text outside scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside not in ("script", "style"):
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


def page_of(store: Path, tmp_path: Path, **options: Any) -> Elements:
    output = tmp_path / "page.html"
    write_report(store, output, **options)
    return Elements(output.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hostile_store(tmp_path_factory.mktemp("hostile") / "store.db")


class TestNothingComesFromElsewhere:
    """Whatever the store holds."""

    def test_no_element_is_made_of_text(self, hostile: Path, tmp_path: Path) -> None:
        page = page_of(hostile, tmp_path, title=IMAGE, command=SCRIPT)
        assert not page.all("img")
        assert not page.all("iframe")
        assert len(page.all("script")) == 2, "theme and page"
        assert all(not name.startswith("on") for _, attributes in page.found for name in attributes)
        for text in (IMAGE, SCRIPT, LINK):
            assert text in page.text

    def test_nothing_is_loaded(self, hostile: Path, tmp_path: Path) -> None:
        page = page_of(hostile, tmp_path)
        for tag, attributes in page.found:
            for name in ("src", "href", "action", "data", "poster", "srcset"):
                target = attributes.get(name)
                assert target is None or target.startswith("#") or target == "data:,", (tag, name, target)
        html = (tmp_path / "page.html").read_text(encoding="utf-8")
        style = re.search(r"<style>(.*?)</style>", html, re.DOTALL)
        assert style is not None
        assert "url(" not in style[1]
        assert "@import" not in style[1]
        policy = next(meta["content"] for meta in page.all("meta") if "http-equiv" in meta)
        assert policy is not None
        assert policy.startswith("default-src 'none'")
        assert "connect-src 'none'" in policy
        scripts = policy.split("script-src ")[1].split(";")[0]
        assert "unsafe" not in scripts

    def test_every_link_has_a_target_and_every_name_is_given_once(self, hostile: Path, tmp_path: Path) -> None:
        page = page_of(hostile, tmp_path)
        names = [attributes["id"] for _, attributes in page.found if "id" in attributes]
        assert len(names) == len(set(names))
        targets = [href for link in page.all("a") if (href := link.get("href"))]
        assert len(targets) > 10
        assert {target[1:] for target in targets} <= set(names)
        labels = [name for _, attributes in page.found if (name := attributes.get("aria-labelledby"))]
        assert set(labels) <= set(names)

    def test_folders_of_the_machine_are_not_told(self, hostile: Path, tmp_path: Path) -> None:
        page_of(hostile, tmp_path)
        html = (tmp_path / "page.html").read_text(encoding="utf-8")
        assert "/srv/secret" not in html
        assert str(hostile.parent) not in html
        assert str(tmp_path) not in html
        assert str(Path.home()) + "/" not in html
        assert "text.txt" in html

    def test_every_plot_has_words_and_numbers(self, hostile: Path, tmp_path: Path) -> None:
        page = page_of(hostile, tmp_path)
        plots = [a for _, a in page.found if "data-plot" in a and a["data-plot"] != "the-plot"]
        assert len(plots) >= 10
        assert all(plot["role"] == "img" and plot["aria-label"] for plot in plots)
        assert len([a for a in page.all("details") if a.get("class") == "numbers"]) == len(plots)


def marks(page: Elements, kind: str) -> list[dict[str, str | None]]:
    return [attributes for tag, attributes in page.found if tag == "path" and attributes.get("class") == kind]


def numbers_in(path: str) -> list[tuple[float, float]]:
    pairs = re.findall(r"[ML](-?[0-9.]+),(-?[0-9.]+)", path)
    return [(float(x), float(y)) for x, y in pairs]


class TestDrawing:
    """Plots are drawn where the numbers say, in SVG that holds nothing but ink."""

    def line(self, trace: dict[str, Any], layout: dict[str, Any] | None = None) -> list[tuple[float, float]]:
        page = Elements(str(draw([{"type": "scatter", **trace}], layout or {}, small=False)))
        path = marks(page, "line")[0]["d"]
        assert path is not None
        return numbers_in(path)

    def test_a_line_is_where_its_numbers_are(self) -> None:
        points = self.line({"mode": "lines", "x": [0, 1, 2, 4], "y": [0.0, 1.0, 2.0, 4.0]})
        across = [(b[0] - a[0]) for a, b in itertools.pairwise(points)]
        up = [(a[1] - b[1]) for a, b in itertools.pairwise(points)]
        assert across == pytest.approx([across[0], across[0], 2 * across[0]], abs=0.3)
        assert up == pytest.approx([up[0], up[0], 2 * up[0]], abs=0.3), "up is up"
        assert up[0] > 0

    def test_a_power_law_is_straight_on_logarithmic_axes(self) -> None:
        log = {"xaxis": {"type": "log"}, "yaxis": {"type": "log"}}
        points = self.line({"mode": "lines", "x": [1, 10, 100], "y": [1e-9, 1e-7, 1e-5]}, log)
        grads = [(a[1] - b[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(points)]
        assert grads[0] == pytest.approx(grads[1], rel=0.01)

    def test_what_has_no_place_leaves_a_gap(self) -> None:
        trace = {"type": "scatter", "mode": "lines", "x": [1, 2, 3, 4, 5], "y": [1.0, 2.0, None, math.nan, 3.0]}
        path = marks(Elements(str(draw([trace], {}, small=False))), "line")[0]["d"]
        assert path is not None
        assert path.count("M") == 2
        on_log = {**trace, "y": [1.0, -2.0, 0.0, 4.0, 8.0]}
        path = marks(Elements(str(draw([on_log], {"yaxis": {"type": "log"}}, small=False))), "line")[0]["d"]
        assert path is not None
        assert path.count("M") == 2

    def test_bars_are_as_long_as_their_numbers(self) -> None:
        trace = {"type": "bar", "x": ["a", "b", "c"], "y": [1.0, 2.0, 4.0]}
        result = [
            re.findall(r"V([0-9.]+)", str(bar["d"]))
            for bar in marks(Elements(str(draw([trace], {}, small=False))), "bar")
        ]
        heights = [float(base) - float(top) for top, base in result[:3]]
        assert heights == pytest.approx([heights[0], 2 * heights[0], 4 * heights[0]], rel=0.02)

    def test_bars_of_two_series_stand_beside_each_other_and_layers_do_not_thin_each_other(self) -> None:
        both = [{"type": "bar", "name": name, "x": ["a"], "y": [1.0]} for name in "pq"]
        apart = [{"type": "bar", "name": name, "x": [index], "y": [1.0]} for index, name in enumerate("pq")]
        widths = []
        for data in (both, apart):
            result = marks(Elements(str(draw(data, {}, small=True))), "bar")[:2]
            spans = [tuple(map(float, re.findall(r"[MH](-?[0-9.]+)", str(bar["d"]))[:2])) for bar in result]
            assert spans[0][1] <= spans[1][0] + 0.2
            widths.append(spans[0][1] - spans[0][0])
        assert widths[1] > 0

    def test_a_map_has_a_cell_for_every_number(self) -> None:
        trace = {"type": "heatmap", "z": [[0.0, 0.5], [1.0, None]], "x": [0, 1], "y": ["one", "two"]}
        page = Elements(str(draw([trace], {"yaxis": {"type": "category"}}, small=False)))
        assert len(marks(page, "cell")) == 2 * 3, "wide and narrow"
        assert "0.5" in page.text

    def test_long_lines_keep_their_extremes(self) -> None:
        count = 100_000
        values = [1.0 if index == 54_321 else 0.0 for index in range(count)]
        points = self.line({"mode": "lines", "x": list(range(count)), "y": values})
        assert len(points) < 4000
        assert min(y for _, y in points) < max(y for _, y in points) - 100

    def test_panels_stand_under_each_other_where_there_is_little_room(self) -> None:
        layout = panels(["left", "right"], x="x", y="y", log=(False, False))
        data = [line([0.0, 1.0], [0.0, 1.0], name="n", color="#000000", panel=panel) for panel in (1, 2)]
        wide, narrow = str(draw(data, layout, small=False)).split('<svg class="narrow"')
        starts = []
        for svg in (wide, narrow):
            frames = marks(Elements(svg if svg is wide else f"<svg {svg}"), "frame")
            starts.append([numbers_in(str(frame["d"]))[0] for frame in frames])
        (a, b), (c, d) = starts
        assert a[1] == b[1]
        assert b[0] > a[0] + 100
        assert c[0] == d[0]
        assert d[1] > c[1] + 100

    @pytest.mark.parametrize("text", [IMAGE, SCRIPT, LINK, '"><b onclick=x>', "a&lt;b"])
    def test_text_is_text(self, text: str) -> None:
        trace = {
            "type": "scatter",
            "mode": "markers",
            "name": text,
            "x": [text, "b"],
            "y": [1.0, 2.0],
            "text": [text] * 2,
        }
        layout = {"xaxis": {"title": {"text": text}}, "annotations": [{"text": text, "x": 0, "y": 1}]}
        page = Elements(str(draw([trace, trace | {"name": "other"}], layout, small=False)))
        assert {tag for tag, _ in page.found} <= {"svg", "g", "path", "text", "title"}
        assert all(not name.startswith("on") and name != "href" for _, attributes in page.found for name in attributes)
        if "onclick" not in text:
            assert text in page.text

    @pytest.mark.parametrize("value", ["red;background:url(//a.b)", "url(#x)", "expression(1)", 7, None, "var(--x);"])
    def test_what_is_no_colour_is_not_used(self, value: Any) -> None:
        assert colour(value, "black") == "black"
        assert colour("rgba(1,2,3,0.5)", "black") == "rgba(1,2,3,0.5)"

    @pytest.mark.parametrize(
        "data",
        [
            [],
            [{"type": "scatter"}],
            [{"type": "scatter", "x": [], "y": []}],
            [{"type": "scatter", "x": [1], "y": [10**400]}],
            [{"type": "scatter", "x": [1, 2], "y": [5.0, 5.0]}],
            [{"type": "scatter", "x": ["a"], "y": [None]}],
            [{"type": "bar", "x": [], "y": []}],
            [{"type": "heatmap", "z": []}],
            [{"type": "scatter", "x": "abc", "y": 7}],
            [{"type": "scatter", "x": [1e300, -1e300], "y": [1e-320, 1e300]}],
        ],
        ids=["nothing", "no data", "empty", "huge", "level", "unknown", "no bars", "no map", "nonsense", "extreme"],
    )
    @pytest.mark.parametrize("log", [False, True])
    def test_every_kind_of_data_has_a_drawing(self, data: list[dict[str, Any]], log: bool) -> None:
        kind = {"type": "log"} if log else {}
        result = str(draw(data, {"xaxis": kind, "yaxis": kind}, small=False))
        assert result.count("<svg") == 2
        assert "nan" not in result
        assert "inf" not in result

    @pytest.mark.parametrize(
        ("values", "layout", "said"),
        [
            ([0, 10], {}, ["0", "2", "4", "6", "8", "10"]),
            ([1e-6, 1.0], {"type": "log"}, ["10⁻⁶", "10⁻⁵", "10⁻⁴", "10⁻³", "10⁻²", "10⁻¹", "1"]),
            ([0.005, 0.02], {"type": "log"}, ["0.005", "0.01", "0.02"]),
            ([1, 2], {"tickvals": [1, 2], "ticktext": ["one", "two"]}, ["one", "two"]),
            (["b", "a"], {}, ["b", "a"]),
        ],
        ids=["round", "powers", "few powers", "own", "names"],
    )
    def test_ticks(self, values: list[Any], layout: dict[str, Any], said: list[str]) -> None:
        assert [text for _, text in scale_of(values, layout).ticks(layout)] == said


class TestMathematics:
    """LaTeX becomes MathML, or stays what it is."""

    def test_a_formula_is_typeset(self) -> None:
        result = str(typeset(r"\frac{a}{b} \le \mathtt{q\_proj}"))
        assert result.startswith('<math display="block"')
        assert "<mfrac><mrow><mi>a</mi></mrow><mrow><mi>b</mi></mrow></mfrac>" in result
        assert '<mtext class="name">q_proj</mtext>' in result

    @pytest.mark.parametrize(
        "latex",
        [r"\unknowncommand{x}", r"\href{javascript:hacked()}{x}", r"\style{color:red}{x}", "", "x" * 5000, r"\frac"],
        ids=["unknown", "link", "style", "nothing", "endless", "unfinished"],
    )
    def test_what_is_not_understood_or_not_allowed_is_shown_as_its_source(self, latex: str) -> None:
        result = Elements(str(typeset(latex)))
        assert [tag for tag, _ in result.found] == ["code"]
        assert result.text == latex

    def test_markup_in_a_formula_is_text(self) -> None:
        result = Elements(str(typeset(rf"\mathtt{{{IMAGE}}} + {IMAGE}")))
        assert "img" not in {tag for tag, _ in result.found}
        assert IMAGE in result.text


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "–"),
        (0.0, "0"),
        (1234567, "1,234,567"),
        (0.12345, "0.123"),
        (1.234e-17, "1.23×10⁻¹⁷"),
        (-2e-5, "−2.00×10⁻⁵"),
        (1e300, "1.00×10³⁰⁰"),
        (math.nan, "NaN"),
        (-math.inf, "−∞"),
        (12345.6, "12,346"),
        (True, "yes"),
    ],
)
def test_numerals(value: Any, said: str) -> None:
    assert numeral(value) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("/home/someone/runs/a.db", "a.db"),
        ("read /tmp/x/y.py now", "read y.py now"),
        (r"C:\Users\someone\a.db", "a.db"),
        ("https://example.org/a/b", "https://example.org/a/b"),
        ("layers/0/attention", "layers/0/attention"),
        ("QᵀQ/√d", "QᵀQ/√d"),
    ],
)
def test_absolute_paths_become_names(text: str, said: str) -> None:
    assert without_folders({"a": [text]}) == {"a": [said]}


def test_names_become_identifiers_that_never_collide() -> None:
    anchor = Anchors()
    assert anchor("a b") == anchor("a b") == "a-b"
    assert anchor("a-b") == "a-b-2"
    assert anchor("A.B") == "a-b-3"
    assert re.fullmatch(r"[a-z0-9-]+", anchor(IMAGE))
    assert anchor("…") == "item"


class TestStores:
    """Every kind of store has a defined outcome."""

    def test_a_store_without_anything(self, tmp_path: Path) -> None:
        store = tmp_path / "empty.db"
        store.touch()
        page = page_of(store, tmp_path)
        assert "Nothing has been recorded in empty.db yet" in page.text
        assert not [1 for _, attributes in page.found if "data-plot" in attributes]

    def test_statements_of_the_sources_and_ours_are_counted_apart(self, tmp_path: Path) -> None:
        store = tmp_path / "store.db"
        records = (
            claim(
                "note.L10c", corrects="note.L10", whose="ours", status="proved", recorded="proved", scope="all sizes"
            ),
            refuted("note.L10", corrected_by="note.L10c", severity="false", whose="source"),
            refuted("note.L10b", severity="false", under="note.L10", whose="source", witness=None),
            refuted("note.L9", severity="slip", whose="source"),
            claim("note.Q", whose="ours", status="answered", recorded="answered"),
        )
        for record in records:
            store_document(store, "claim", record["code"], record)
        table = tally(read(store).claims)
        assert table is not None
        assert table.columns == ("source", "whose statement", "proved", "answered", "false", "slip")
        assert table.rows == (("note", "the source", "0", "0", "1", "1"), ("note", "ours", "1", "1", "0", "0"))
        write_report(store, tmp_path / "report.html")
        text = (tmp_path / "report.html").read_text(encoding="utf-8")
        assert "whose statement" in text
        assert "Falls with" in text

    def test_only_claims(self, tmp_path: Path) -> None:
        store = tmp_path / "store.db"
        store_document(store, "claim", "note.L10c", claim("note.L10c", corrects="note.L10"))
        store_document(store, "claim", "note.L10", refuted("note.L10", corrected_by="note.L10c"))
        store_document(store, "claim", "note.X", claim("note.X", status="inconclusive"))
        page = page_of(store, tmp_path)
        assert "1 verified, 1 refuted, 1 inconclusive" in page.text
        assert "1 not as recorded" in page.text
        assert "each as recorded" not in page.text
        assert "recorded as verified" in page.text
        assert "np.linalg.eigvalsh(A @ A.T)" in page.text
        assert len(page.all("math")) == 3
        assert {"href": "#claim-note-l10"} in page.all("a")
        assert "Watched training" not in page.text

    def test_only_a_watched_run(self, tmp_path: Path) -> None:
        watch(tmp_path / "store.db", "short")
        page = page_of(tmp_path / "store.db", tmp_path)
        assert "The account closes: in all 5 steps" in page.text
        assert "first order: momentum" in page.text
        assert "Alarms" not in page.text
        assert "The account of all 5 optimizer steps closes" in page.text

    def test_a_spoiled_run_is_refuted_with_its_alarms(self, tmp_path: Path) -> None:
        watch(tmp_path / "store.db", "spoiled", spoil=True)
        page = page_of(tmp_path / "store.db", tmp_path)
        assert "the account does not close" in page.text
        first = page.text.index("Something else than the optimizer wrote")
        assert page.text.index("Alarms") < first < page.text.index("Residuals of audits and of the account")

    def test_wrong_gradients_are_not_called_an_open_account(self, tmp_path: Path) -> None:
        store = tmp_path / "store.db"
        watch(store, "wrong", wrong=True)
        line = verdict_line(read(store))[1]
        assert "gradients are wrong from step 2 on" in line
        assert "the account does not close" not in line
        with RunStore(store) as held:
            recorded = {(alarm.step, alarm.code) for alarm in held.alarms("wrong")}
        assert (2, "gradient") in recorded
        ((step, _, message),) = read(store).runs[0].first_alarms
        assert step == 2
        assert "Code between backward() and optimizer.step() changes gradients" in message
        assert "What to look at" in page_of(store, tmp_path).text

    def test_what_went_wrong_is_the_title_and_the_first_finding(self, tmp_path: Path) -> None:
        store = tmp_path / "store.db"
        watch(store, "good")
        assert result_title(read(store)) == "What training conserved"
        watch(store, "wrong", wrong=True)
        assert result_title(read(store)) == "wrong: gradients are wrong from step 2 on"
        assert [message.partition(":")[0] for message in findings(read(store))] == ["wrong", "good"]

    def test_a_refuted_audit_or_an_unexpected_claim_is_the_title(self, tmp_path: Path) -> None:
        store = tmp_path / "store.db"
        store_document(store, "claim", "a", claim("a", status="refuted", recorded="verified"))
        assert result_title(read(store)) == "1 claim not as recorded"
        model = Attention(8, 2)
        model(torch.randn(3, 5, 8)).square().mean().backward()
        gradient = model.q.weight.grad
        assert gradient is not None
        gradient.mul_(2)
        store_document(store, "audit", "attention", audit(model).record())
        assert result_title(read(store)) == "attention: 1 audit found wrong gradients"

    def test_refuted_claims_as_recorded_have_neither_tick_nor_cross(self, tmp_path: Path) -> None:
        store = tmp_path / "store.db"
        store_document(store, "claim", "note.L10", refuted("note.L10"))
        page = page_of(store, tmp_path)
        assert "1 refuted; each as recorded" in page.text
        tiles = [attributes["class"] for attributes in page.all("li") if "tile" in (attributes.get("class") or "")]
        assert tiles == ["tile plain"]

    def test_two_runs_are_shown_side_by_side(self, tmp_path: Path) -> None:
        store = tmp_path / "store.db"
        for name, steps in (("one", 3), ("two", 5), ("three", 2)):
            watch(store, name, steps=steps)
        contents = write_report(store, tmp_path / "page.html", runs=["one", "two"])
        assert contents.compared is not None
        assert [row[:2] for row in contents.compared.table.rows] == [("one", "3"), ("two", "5")]
        assert {trace["name"] for plot in contents.compared.plots for trace in plot.data} == {"one", "two"}
        assert len(contents.compared.plots) % 2 == 0 or len(contents.compared.table.columns) == 6
        with RunStore(store) as opened:
            last = opened.errors("two", by="family")[5]
        heads = contents.compared.table.columns[5:]
        for head, cell in zip(heads, contents.compared.table.rows[1][5:], strict=True):
            assert cell == numeral(last[head.removeprefix("drift of ")])
        with pytest.raises(NoSuchRunError, match=r"has no run 'four'. It has: one, two, three"):
            write_report(store, tmp_path / "page.html", runs=["four"])

    def test_the_first_screen_has_a_verdict_with_coverage_and_the_plot_that_matters(self, tmp_path: Path) -> None:
        store = tmp_path / "store.db"
        model = watch(store, "good")
        laws = recognize(model, torch.randn(2, 6, 8, dtype=torch.float64))
        model.zero_grad()
        model(torch.randn(2, 6, 8, dtype=torch.float64)).square().mean().backward()
        result = audit(model, laws)
        store_document(store, "audit", "a", result.record() | {"coverage": 0.5})
        status, text = verdict_line(read(store))
        assert status == "verified"
        assert text.startswith(f"All {len(result.rows)} gradient identities hold over 50.0% of the parameters; ")
        shown = hero(read(store))
        assert shown is not None
        assert shown.title == "What the first-order change is due to"
        watch(store, "bad", spoil=True)
        shown = hero(read(store))
        assert shown is not None
        assert shown.title == "Residuals of audits and of the account"
        assert verdict_line(read(store))[0] == "refuted"

    def test_a_damaged_record_is_named_and_does_not_sink_the_rest(self, tmp_path: Path) -> None:
        store = tmp_path / "store.db"
        store_document(store, "claim", "good", claim("good"))
        store_document(store, "claim", "no status", {"code": "x"})
        store_document(store, "audit", "no rows", {"status": "verified"})
        store_document(store, "laws", "of another format", {"format": "conserved/laws/0"})
        store_document(store, "figure", "map", figure("map", data=[{"type": "scattermapbox", "lat": [0]}]))
        store_document(store, "figure", "ragged", figure("ragged", table={"columns": ["a"], "rows": [[1, 2]]}))
        store_document(store, "attention", "strange verdict", {"verdict": "maybe", "heads": []})
        contents = write_report(store, tmp_path / "page.html")
        assert len(contents.claims) == 1
        assert [(item.kind, item.name) for item in contents.left_out] == [
            ("laws", "of another format"),
            ("figure", "map"),
            ("figure", "ragged"),
            ("claim", "no status"),
            ("audit", "no rows"),
            ("attention", "strange verdict"),
        ]
        assert "In the store and not shown" in (tmp_path / "page.html").read_text(encoding="utf-8")

    @pytest.mark.parametrize("kind", ["nan", "inf"])
    def test_values_that_are_not_finite_are_shown_as_such(self, kind: str, tmp_path: Path) -> None:
        value = float(kind)
        store = tmp_path / "store.db"
        findings = [{"what": "a", "value": value, "low": value, "high": value, "expected": 1.0, "holds": False}]
        lines = [{"type": "scatter", "x": [1, 2, 3], "y": [1.0, value, 2.0]}]
        store_document(store, "figure", "f", figure("f", findings=findings, data=lines))
        row = {"name": "n", "family": "f", "parameters": ["p"], "part": "", "tolerance": 1e-7, "suggests": []}
        rows = [row | {"residual": value, "ok": False, "status": "refuted"}]
        store_document(store, "audit", "a", {"ok": False, "status": "refuted", "message": "m", "rows": rows})
        page = page_of(store, tmp_path)
        assert ("NaN" if kind == "nan" else "∞") in page.text
        assert "0 of 1" in page.text

    def test_a_diverged_run_is_refuted(self, tmp_path: Path) -> None:
        watch(tmp_path / "store.db", "run")
        with sqlite3.connect(tmp_path / "store.db") as db:
            db.execute("update entry set observed = null, residual = null, drift = null where step = 5")
            db.execute("update entry set error = 9e999 where step = 4")
        db.close()
        page = page_of(tmp_path / "store.db", tmp_path)
        assert "not finite: the run has diverged" in page.text

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"this is a text file, and not a short one either " * 20, "is not a run store"),
            (None, "is a folder"),
        ],
        ids=["text", "folder"],
    )
    def test_what_is_not_a_store_is_refused(self, content: bytes | None, message: str, tmp_path: Path) -> None:
        path = tmp_path / "x"
        if content is None:
            path.mkdir()
        else:
            path.write_bytes(content)
        with pytest.raises(NotAStoreError, match=message):
            write_report(path, tmp_path / "page.html")
        assert not (tmp_path / "page.html").exists()
        assert content is None or path.read_bytes() == content

    def test_a_database_of_something_else_is_refused_and_left_as_it_was(self, tmp_path: Path) -> None:
        path = tmp_path / "other.db"
        db = sqlite3.connect(path)
        db.execute("create table recipes (name text)")
        db.commit()
        db.close()
        before = path.read_bytes()
        with pytest.raises(NotAStoreError, match="not a run store: it has the tables recipes"):
            write_report(path, tmp_path / "page.html")
        assert path.read_bytes() == before
        with pytest.raises(FileNotFoundError, match="no run store"):
            write_report(tmp_path / "none.db", tmp_path / "page.html")

    def test_a_store_that_another_process_is_writing_to(self, tmp_path: Path) -> None:
        """A report does not wait for the writer, shows what was whole when it was made, and the rest next time."""
        store = tmp_path / "store.db"
        watch(store, "live", steps=2)
        script = (
            "import sqlite3, sys; db = sqlite3.connect(sys.argv[1], isolation_level=None);"
            "db.execute('begin immediate');"
            "db.execute('insert into step select run, 3, written, skipped from step where step = 2');"
            "db.execute('update entry set step = 3 where step = 2');"
            "print('half way', flush=True); sys.stdin.readline(); db.execute('commit')"
        )
        arguments = [sys.executable, "-c", script, str(store)]
        with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            assert writer.stdin is not None
            assert writer.stdout.readline() == "half way\n"
            during = write_report(store, tmp_path / "page.html").runs[0]
            writer.stdin.write("go on\n")
            writer.stdin.flush()
        assert writer.returncode == 0
        after = write_report(store, tmp_path / "page.html").runs[0]
        assert (during.steps, after.steps) == (2, 3)

    def test_everything_in_a_snapshot_belongs_to_one_moment(self, tmp_path: Path) -> None:
        store = tmp_path / "store.db"
        store_document(store, "claim", "first", claim("first"))
        with RunStore(store) as opened:
            with opened.snapshot():
                assert len(opened.documents("claim")) == 1
                store_document(store, "claim", "second", claim("second"))
                assert len(opened.documents("claim")) == 1
            assert len(opened.documents("claim")) == 2


class TestLargeStores:
    """Aggregation keeps the file small and agrees with a plain look at every row."""

    def test_a_digest_is_what_a_loop_over_the_ledger_finds(self, tmp_path: Path) -> None:
        watch(tmp_path / "store.db", "run", steps=30, spoil=True)
        with RunStore(tmp_path / "store.db") as store:
            result = digest(store, "run", steps=7)
            entries = store.entries("run")
            families = dict(store.select("select name, family from law"))
            errors = store.errors("run", by="family")
            alarms = store.alarms("run")
        assert list(result.shown) == spread(range(1, 31), 7)
        assert (result.shown[0], result.shown[-1], result.steps) == (1, 30, 30)
        for family, steps in result.ledger.items():
            for step in steps:
                members = [e for e in entries if e.step == step.step and families[e.law] == family]
                largest = max(members, key=lambda entry: abs(entry.observed))
                assert step.law == largest.law
                assert step.causes == largest.causes
                assert step.numbers["observed"] == largest.observed
                parts = step.numbers["first_order"] + step.numbers["second_order"] + step.numbers["residual"]
                assert parts == pytest.approx(step.numbers["observed"], rel=1e-12, abs=1e-18)
            assert result.errors[family] == pytest.approx([errors[step][family] for step in result.shown])
        for cause, values in result.totals.items():
            for index, value in zip(result.shown, values, strict=True):
                at = [abs(e.causes[cause]) for e in entries if e.step == index]
                assert value == pytest.approx(sum(at))
        worst = max(entries, key=lambda entry: entry.excess)
        assert result.worst == (worst.excess, worst.law, worst.step)
        assert list(result.alarms) == AlarmGroups(alarms).all
        last = [entry for entry in entries if entry.step == 30]
        for drift in result.drifts:
            furthest = max((e for e in last if families[e.law] == drift.family), key=lambda entry: abs(entry.drift))
            assert (drift.law, drift.drift, drift.predicted) == (furthest.law, furthest.drift, furthest.predicted)

    def test_the_work_of_a_digest_grows_in_proportion_to_the_ledger(self, tmp_path: Path) -> None:
        """Counted in instructions of SQLite's machine, all steps shown: four times the rows, four times the work."""
        work: list[int] = []
        for steps in (40, 160):
            path = tmp_path / f"{steps}.db"
            random_ledger(path, rows=20 * steps, laws=20)
            with RunStore(path) as store:
                store._db.set_progress_handler(partial(work.append, steps), 100)
                digest(store, "run", steps=1000)
        few, many = (work.count(steps) for steps in (40, 160))
        assert few > 20
        assert many < 6 * few

    def test_thousands_of_laws_and_steps_stay_a_readable_file(self, tmp_path: Path) -> None:
        store = tmp_path / "store.db"
        watch(store, "run", steps=1)
        laws, steps = 5000, 40
        with sqlite3.connect(store) as db:
            number = db.execute("select id from run").fetchone()[0]
            db.executemany(
                "insert or replace into law values (?, ?, ?, ?, ?, ?, ?)",
                [(number, n, f"layers.{n}.law", f"layers.{n}", f"kind {n % 20}", 1, "h") for n in range(laws)],
            )
            width = len(db.execute("select * from entry limit 1").fetchone())
            db.executemany(
                f"insert or replace into entry values ({', '.join('?' * width)})",
                [(number, s, n, *([1e-9 * n] * (width - 3))) for s in range(1, steps + 1) for n in range(laws)],
            )
            db.executemany(
                "insert or replace into step values (?, ?, 0, 0)", [(number, step) for step in range(1, steps + 1)]
            )
            db.executemany(
                "insert or replace into alarm values (?, ?, 'residual', ?, 2, 1, 'x', '', '[]', 1, 1, 0)",
                [(number, 1, f"law {n}") for n in range(laws)],
            )
        db.close()
        rows = [
            {
                "name": f"n{n}",
                "family": f"f{n % 9}",
                "parameters": ["p"],
                "residual": 1.0,
                "tolerance": 1e-7,
                "ok": False,
            }
            for n in range(laws)
        ]
        store_document(store, "audit", "a", {"ok": False, "status": "refuted", "message": "m", "rows": rows})
        contents = write_report(store, tmp_path / "page.html")
        assert contents.runs[0].laws == laws
        assert contents.runs[0].alarm_count == laws
        text = (tmp_path / "page.html").read_text(encoding="utf-8")
        assert "4,800 more rows are in the store" in text
        assert "4,900 more rows are in the store" in text
        assert len(text) < 3_000_000

    def test_of_many_runs_the_latest_have_a_section(self, tmp_path: Path) -> None:
        store = tmp_path / "store.db"
        for number in range(14):
            watch(store, f"run {number}", steps=1)
        contents = write_report(store, tmp_path / "page.html")
        assert [run.name for run in contents.runs] == [f"run {number}" for number in range(2, 14)]
        assert [item.name for item in contents.left_out] == ["run 0", "run 1"]


class TestWriting:
    """The file is put in its place whole or not at all."""

    def test_folders_are_made_and_an_earlier_report_is_replaced(self, hostile: Path, tmp_path: Path) -> None:
        output = tmp_path / "new" / "folder" / "page.html"
        write_report(hostile, output)
        output.write_text("an earlier report")
        write_report(hostile, output)
        assert output.read_text(encoding="utf-8").startswith("<!doctype html>")
        assert os.listdir(output.parent) == ["page.html"]

    def test_what_cannot_be_written_says_so_and_leaves_what_was_there(
        self, hostile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(UnwritableError, match="is a folder"):
            write_report(hostile, tmp_path)
        (tmp_path / "file").write_text("x")
        with pytest.raises(UnwritableError, match="cannot be written"):
            write_report(hostile, tmp_path / "file" / "page.html")
        output = tmp_path / "page.html"
        output.write_text("an earlier report")

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", full)
        with pytest.raises(UnwritableError, match="No space left on device"):
            write_report(hostile, output)
        assert output.read_text() == "an earlier report"
        assert sorted(os.listdir(tmp_path)) == ["file", "page.html"]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["conserved", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


class TestCommand:
    """`conserved report`, and --store of the commands that fill a store."""

    MODEL = ("conserved.blocks:DecoderLM", "vocab=20", "dim=8", "depth=1", "heads=2", "hidden=8")

    def test_commands_fill_a_store_and_the_report_says_what_is_in_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        store, output = str(tmp_path / "store.db"), str(tmp_path / "page.html")
        inputs = ("--inputs", "tokens:20:2,12", "--store", store)
        assert run(monkeypatch, "laws", *self.MODEL, "--store", store) == 0
        assert run(monkeypatch, "audit", *self.MODEL, *inputs) == 0
        assert run(monkeypatch, "attention", *self.MODEL, *inputs) == 0
        capsys.readouterr()
        assert run(monkeypatch, "report", store, "-o", output) == 0
        assert capsys.readouterr().out == f"{output} (laws: 1, audits: 1, attention: 1)\n"
        assert run(monkeypatch, "report", store, "-o", output, "--title", "Mine", "--json") == 0
        record = json.loads(capsys.readouterr().out)
        assert (record["laws"], record["audits"], record["attention"], record["claims"]) == (1, 1, 1, 0)
        assert record["bytes"] == Path(output).stat().st_size
        page = Elements(Path(output).read_text(encoding="utf-8"))
        assert "Mine" in page.text
        assert "conserved.blocks:DecoderLM vocab=20" in page.text
        assert "conserved report store.db -o page.html" in page.text

    def test_a_report_of_one_run_is_small(self, tmp_path: Path) -> None:
        random_ledger(tmp_path / "store.db", rows=40_000, laws=200)
        write_report(tmp_path / "store.db", tmp_path / "page.html")
        assert (tmp_path / "page.html").stat().st_size < 1_500_000

    def test_runs_lists_what_a_store_holds(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        store = tmp_path / "store.db"
        watch(store, "one", steps=3)
        watch(store, "two", spoil=True)
        store_document(store, "claim", "c", claim("c"))
        assert run(monkeypatch, "runs", str(store), "--json") == 0
        record = json.loads(capsys.readouterr().out)
        assert [(one["name"], one["steps"], one["alarms"] > 0) for one in record["runs"]] == [
            ("one", 3, False),
            ("two", 5, True),
        ]
        assert record["records"] == {"claim": 1}
        assert run(monkeypatch, "runs", str(store)) == 0
        assert "conserved report" in capsys.readouterr().out
        (tmp_path / "empty.db").touch()
        assert run(monkeypatch, "runs", str(tmp_path / "empty.db")) == 2
        assert "Nothing has been recorded" in capsys.readouterr().err
        assert run(monkeypatch, "runs", str(tmp_path / "none.db")) == 2

    def test_a_report_can_be_opened_and_a_missing_folder_is_not_made(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        store_document(tmp_path / "store.db", "claim", "c", claim("c"))
        opened: list[str] = []

        def no_browser(url: str) -> bool:
            opened.append(url)
            return False

        monkeypatch.setattr("webbrowser.open", no_browser)
        page = tmp_path / "page.html"
        assert run(monkeypatch, "report", str(tmp_path / "store.db"), "-o", str(page), "--open") == 0
        assert opened == [page.as_uri()]
        assert "open the file yourself" in capsys.readouterr().out
        assert run(monkeypatch, "report", str(tmp_path / "store.db"), "-o", str(tmp_path / "no" / "page.html")) == 2
        assert "Expected an existing folder" in capsys.readouterr().err
        assert not (tmp_path / "no").exists()

    @pytest.mark.parametrize(
        ("store", "output", "message"),
        [
            ("none.db", "page.html", "There is no run store at none.db"),
            ("text.txt", "page.html", "is not a run store"),
            ("empty.db", "page.html", "Nothing has been recorded in empty.db yet"),
            (".", "page.html", "is a folder"),
            ("empty.db", ".", "got the folder"),
        ],
        ids=["missing", "not a store", "an empty store", "a folder as store", "a folder as output"],
    )
    def test_mistakes_end_with_one_sentence_and_code_2(
        self,
        store: str,
        output: str,
        message: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path("empty.db").touch()
        Path("text.txt").write_text("words " * 100)
        assert run(monkeypatch, "report", store, "-o", output) == 2
        error = capsys.readouterr().err
        assert message in error
        assert "Traceback" not in error
        assert not Path("page.html").exists()

    def test_a_store_that_cannot_be_written_is_bad_usage(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "text.db").write_text("words " * 100)
        assert run(monkeypatch, "laws", *self.MODEL, "--store", str(tmp_path / "text.db")) == 2
        assert "cannot be written as a run store" in capsys.readouterr().err


def test_the_library_is_imported_without_what_a_report_needs() -> None:
    packages = ("jinja2", "latex2mathml")
    script = f"import sys, conserved, conserved.cli; print([name for name in {packages} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
