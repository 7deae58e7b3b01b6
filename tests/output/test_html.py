"""Results in a notebook: well-formed, escaped, small, and the same figures as elsewhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from torch import Tensor

from conserved import Leg, Symmetry, View, audit, blocks, discover, recognize
from conserved.attention import energy_field
from conserved.laws import LawSet
from conserved.output import html
from conserved.symmetry import GeneralLinear
from conserved.verdict import Status

NASTY = "<script>&w"


class Reader(HTMLParser):
    """Cells by row; fails if a tag is closed that was not opened last."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.feed(text)
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert tag in {"div", "p", "pre", "span", "table", "tr", "th", "td", "svg", "rect"}, tag
        if tag == "rect":
            return
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        assert tag == "rect"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def audited(spoil: float = 0.0) -> Any:
    torch.manual_seed(0)
    model = blocks.Attention(dim=4, heads=2)
    model(torch.randn(5, 4)).square().sum().backward()
    gradient = model.q.weight.grad
    assert gradient is not None
    gradient += spoil * torch.randn_like(gradient)
    return audit(model)


def test_laws_show_their_table_and_what_nothing_is_said_about() -> None:
    laws = recognize(blocks.Attention(dim=4, heads=2))
    laws = LawSet(symmetries=laws.symmetries, parameters=laws.parameters, unclaimed=("stranger",))
    shown = Reader(laws._repr_html_())
    assert shown.rows[0] == ["where", "law", "conserved", "group", "×", "numbers"]
    assert [row[-1] for row in shown.rows[1:]] == ["6", "6"]
    assert "4 laws hold 12 conserved numbers" in shown.text
    assert "Nothing is claimed about 1 parameter." in shown.text


def test_names_are_escaped() -> None:
    legs = (Leg(View.of(NASTY, (2, 3))), Leg(View.of("k", (2, 3)), -1))
    laws = LawSet(symmetries=(Symmetry(block="<i>", family=NASTY, kind=GeneralLinear(), legs=legs),))
    text = laws._repr_html_()
    assert "<script>" not in text
    assert "<i>" not in text
    assert NASTY in Reader(text).text


def test_an_audit_shows_the_verdict_and_the_worst_identity_first() -> None:
    clean, broken = audited(), audited(spoil=0.3)
    assert Reader(clean._repr_html_()).text.startswith("VERIFIED")
    assert "Identities do not see" in Reader(clean._repr_html_()).text
    shown = Reader(broken._repr_html_())
    assert shown.text.startswith("REFUTED")
    assert shown.rows[1][:2] == [broken.failures[0].name, f"{broken.worst:.2g}"]
    assert "look between queries and keys" in shown.rows[1][3]
    assert f"… and {len(broken.rows) - len(broken.failures)} more identities" in shown.text


def test_a_discovery_shows_its_ranks_and_laws() -> None:
    discovery = discover(blocks.SwiGLU(3, 4), torch.zeros(5, 3))
    shown = Reader(discovery._repr_html_())
    assert "VERIFIED 4 independent laws of 36 parameters, all found." in shown.text
    assert "rank by depth of brackets: 32, 32" in shown.text
    assert shown.rows[-1][-1] == "4"


@pytest.mark.parametrize("heads", [(), (3,), (2, 4)], ids=str)
def test_a_field_shows_a_row_for_every_head(heads: tuple[int, ...]) -> None:
    q, k = torch.randn(2, *heads, 12, 4, dtype=torch.float64)
    field = energy_field(q, k)
    shown = Reader(field._repr_html_())
    count = max(1, torch.Size(heads).numel())
    assert len(shown.rows) == count + 1
    assert shown.rows[-1][5] == f"{float(field.participation.flatten()[-1]):.3g}"
    assert field._repr_html_().count("<rect") == 4 * count


def test_what_has_no_value_is_a_dash() -> None:
    still: Tensor = torch.ones(6, 4)
    (row,) = Reader(energy_field(still, still)._repr_html_()).rows[1:]
    assert row[5] == "–"
    assert "nan" not in " ".join(row)


def test_a_thousand_heads_stay_small() -> None:
    text = energy_field(torch.randn(1000, 6, 2), torch.randn(1000, 6, 2))._repr_html_()
    assert "… and 980 more" in text
    assert len(text) < 60_000


def test_the_spectrum_is_logarithmic() -> None:
    heights = [float(h) for h in re.findall(r'height="([\d.]+)"/>', html.spectrum([1.0, 1e-6, 1e-12, 0.0], height=24))]
    assert heights == [24.0, 12.0, 0.0, 0.0]


def luminance(colour: str) -> float:
    channels = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("status", Status)
def test_a_verdict_can_be_read_on_any_background(status: Status) -> None:
    """White on the verdict's own colour has the contrast that WCAG asks of text; the page's colours do not matter."""
    assert 1.05 / (luminance(html._COLOURS[status]) + 0.05) >= 4.5
