"""Every result has a short repr, a readable print, and a compact, escaped view in notebooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import conserved
from conserved import attention, transform
from conserved.attention import low_rank_table, softmax_statistics
from conserved.output.lines import TextLine, columns, join_lines
from made_once import made_once
from test_html import Reader


class WrongSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return F.silu(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return 2 * gradients[0] * torch.sigmoid(ctx.saved_tensors[0])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def results() -> dict[str, tuple[str, str, str]]:
    """By name: repr, print and HTML of one result of every public function."""
    model, other, x = network(), network(), torch.randn(5, 3)
    language_model = conserved.blocks.DecoderLM(vocab=50, dim=16, depth=2, heads=4, hidden=24)
    ids, q = torch.randint(50, (2, 20)), torch.randn(2, 20, 8)
    laws = conserved.recognize(model, x)
    model(x).square().sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with conserved.check_update(model) as update:
        optimizer.step()
    shown = {
        "check": conserved.check(F.silu, torch.randn(4, 8)),
        "wrong check": conserved.check(WrongSilu.apply, torch.randn(4, 8)),
        "laws": laws,
        "verdict": laws.verify(lambda: model(x).square().sum()),
        "reference": laws.reference(),
        "audit": conserved.audit(model, laws),
        "discover": conserved.discover(model, x),
        "certify": conserved.certify(model, x),
        "probe": conserved.probe(F.softmax, torch.randn(3, 4), dim=-1),
        "attention": attention.probe(language_model, ids),
        "low rank": low_rank_table(language_model, ids),
        "energy field": attention.energy_field(q, q),
        "softmax": softmax_statistics(q, q),
        "fingerprint": transform.fingerprint(language_model, ids),
        "align": transform.align(model, other, x),
        "move": transform.move(model, {}, laws=laws),
        "equalize": transform.equalize(model, x),
        "update": update,
        "fit": transform.fit_to_scheme(model, x, scheme="int4-channel"),
        "replicas": conserved.check_replicas(model),
        "monitor": conserved.Monitor(model, optimizer, laws),
    }
    return {name: (repr(thing), str(thing), _html(thing)) for name, thing in shown.items()}


def _html(thing: Any) -> str:
    view = getattr(thing, "_repr_html_", None)
    return view() if view is not None else ""


NAMES = (
    *("check", "wrong check", "laws", "verdict", "reference", "audit", "discover", "certify", "probe", "attention"),
    *("low rank", "energy field", "softmax", "fingerprint", "align", "move", "equalize", "update", "replicas"),
    *("monitor", "fit"),
)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str, str]]:
    return made_once("shown results", tmp_path_factory, lambda folder: results())


@pytest.mark.parametrize("name", NAMES)
def test_a_result_is_short_in_a_list_readable_in_print_and_compact_in_a_notebook(
    texts: dict[str, tuple[str, str, str]], name: str
) -> None:
    short, printed, page = texts[name]
    assert short.startswith("<")
    assert "\n" not in short
    assert len(short) <= 120
    assert len(printed) <= 2500
    assert max(map(len, printed.splitlines())) <= 400
    assert "tensor(" not in printed
    assert len(page) <= 6000
    if page:
        Reader(page)
    assert bool(page) or name == "reference"


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("check", "VERIFIED"),
        ("wrong check", "REFUTED"),
        ("laws", "‖0.weight[i,:]‖²"),
        ("discover", "‖0.weight[i,:]‖²"),
        ("certify", "PROVED"),
        ("attention", "H/log n"),
        ("attention", "layers.1.attention, causal"),
        ("attention", "VERIFIED: Rows sum to zero and ranks obey their bound in all 8 heads.\n  largest row sum"),
        ("fingerprint", "fingerprint "),
        ("softmax", "entropy"),
        ("equalize", "objective"),
    ],
)
def test_print_shows_what_was_asked_for(texts: dict[str, tuple[str, str, str]], name: str, part: str) -> None:
    assert part in texts[name][1]


def test_a_notebook_shows_why_a_check_failed(texts: dict[str, tuple[str, str, str]]) -> None:
    page = Reader(texts["wrong check"][2])
    assert "REFUTED" in page.text
    assert "fails:" in page.text
    assert [row[0] for row in page.rows] == ["gradient", "dx"]


def test_a_notebook_has_a_row_for_every_head(texts: dict[str, tuple[str, str, str]]) -> None:
    page = Reader(texts["attention"][2])
    assert [row[:2] for row in page.rows[1:]] == [[f"layers.{i}.attention", str(h)] for i in range(2) for h in range(4)]


def test_fingerprints_of_one_orbit_print_the_same() -> None:
    model, x = network().double(), torch.randn(5, 3, dtype=torch.float64)
    before = str(transform.fingerprint(model, x))
    transform.equalize(model, x)
    assert str(transform.fingerprint(model, x)) == before


def test_lines_are_wrapped_at_the_width_with_their_indent() -> None:
    text = join_lines([TextLine("one two three four", 4), TextLine("a\x1b[2J")], width=12)
    assert text.splitlines() == ["    one two", "    three", "    four", "a\\x1b[2J"]


def test_columns_are_aligned_and_numbers_right() -> None:
    table = join_lines(columns(("name", "n"), [("a", "10"), ("bcdef", "2")], right=(1,)))
    assert table.splitlines() == ["name    n", "a      10", "bcdef   2"]


def test_an_entry_of_the_ledger_adds_up_in_words() -> None:
    model, x = network(), torch.randn(5, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    monitor = conserved.Monitor(model, optimizer, every=1)
    model(x).square().sum().backward()
    optimizer.step()
    monitor.step()
    (entry,) = monitor.ledger(step=1)
    assert repr(entry) == f"<Entry of neurons, step 1: {entry.observed:.2g}>"
    assert str(entry).startswith(f"neurons, step 1: changed by {entry.observed:+.2g} = ")
    assert "preconditioner" in str(entry)
    assert len(str(entry)) < 250


def test_the_sensitivity_of_an_audit_is_one_short_line() -> None:
    model, x = network(), torch.randn(5, 3)
    model(x).square().sum().backward()
    sensitivity = conserved.audit(model, conserved.recognize(model, x)).sensitivity
    assert repr(sensitivity).startswith("<Sensitivity: typically 0")
    assert len(repr(sensitivity)) < 80
