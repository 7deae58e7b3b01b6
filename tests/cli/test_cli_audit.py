"""The command conserved audit: exit codes, JSON, mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from test_cli import run

MODEL = """
import torch
from conserved.blocks import Attention, DecoderLM, SwiGLU

def small():
    torch.manual_seed(0)
    return Attention(8, 2)

class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, slope):
        return slope / 2

class HalvedKeys(torch.nn.Module):
    def forward(self, k):
        return Halved.apply(k)

def broken():
    model = small()
    model.keys = HalvedKeys()
    return model

def draw(generator):
    return torch.randn(6, 8, generator=generator)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "audited_models.py"
    path.write_text(MODEL)
    return path


@pytest.mark.parametrize("inputs", ["6,8", "draw"])
def test_a_right_model_exits_with_zero(
    inputs: str, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "audit", f"{file}:small", "--inputs", inputs) == 0
    shown = capsys.readouterr().out
    assert "VERIFIED: All 4 gradient identities hold" in shown
    assert "softmax gauge: VERIFIED" in shown
    assert "Identities do not see" in shown


def test_a_broken_model_exits_with_one_and_says_where(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "audit", f"{file}:broken", "--inputs", "6,8", "--json") == 1
    record = json.loads(capsys.readouterr().out)
    assert record["ok"] is False
    assert {row["family"] for row in record["rows"] if not row["ok"]} == {"query_key"}
    assert any("times 2" in one for one in record["rows"][0]["suggests"])
    assert record["gauge"]["ok"] is True


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_tokens_cross_entropy_and_autocast(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("vocab=16", "dim=8", "depth=1", "heads=2", "hidden=12")
    more = ("--inputs", "tokens:16:2,6", "--loss", "cross_entropy", "--autocast", "bfloat16", "--json")
    assert run(monkeypatch, "audit", "conserved.blocks:DecoderLM", *sizes, *more) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["precision"] == "bfloat16"
    assert "head.class_shift[weight]" in {row["name"] for row in record["rows"]}


def test_a_model_without_laws_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    target = ("torch.nn:Linear", "in_features=3", "out_features=2")
    assert run(monkeypatch, "audit", *target, "--inputs", "4,3") == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("FILE:small", "Say what the model takes"),
        ("FILE:small --inputs 6,5", "cannot be run on 6,5"),
        ("FILE:small --inputs 6,8 --loss hinge", "got 'hinge'"),
        ("FILE:small --inputs 6,8 --autocast int8", "got 'int8'"),
    ],
    ids=["inputs", "shape", "loss", "autocast"],
)
def test_mistakes(
    words: str, message: str, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "audit", *words.replace("FILE", str(file)).split()) == 2
    assert message in capsys.readouterr().err
