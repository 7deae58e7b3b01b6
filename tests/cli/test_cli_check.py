"""The command conserved check: exit codes, JSON, mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from test_cli import run

pytestmark = pytest.mark.usefixtures("as_users_run_it")

KERNELS = """
import torch
import torch.nn.functional as F

def attention(q, k, v, causal=False):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 4

    @staticmethod
    def backward(ctx, slope):
        return slope * 2

def halved(x):
    return Halved.apply(x)

def table(index, weight):
    return weight[index]

def blank(x):
    return x.detach()

number = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "some_kernels.py"
    path.write_text(KERNELS)
    return path


def test_a_right_kernel_exits_with_zero(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = "bf16:1,2,12,8"
    words = ("--inputs", f"q:{shape}", f"k:{shape}", f"v:{shape}", "--causal")
    assert run(monkeypatch, "check", f"{file}:attention", *words) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("VERIFIED")
    assert "dq" in shown


def test_a_wrong_kernel_exits_with_one_and_says_which_gradient(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "check", f"{file}:halved", "--inputs", "x:fp32:4,6", "--json") == 1
    record = json.loads(capsys.readouterr().out)
    assert record["ok"] is False
    assert record["verdict"]["status"] == "refuted"
    assert "dx is 2 times too small" in record["failures"][0]["meaning"]


def test_integers_are_drawn_below_their_bound(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--inputs", "index:int:7:3,4", "--inputs", "weight:fp32:7,5")
    assert run(monkeypatch, "check", f"{file}:table", *words) == 0
    assert "dweight" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("target", "words", "said"),
    [
        ("attention", (), "Say what the function takes"),
        ("attention", ("--inputs", "q:bf17:2,3"), "Expected an input as [NAME:][PRECISION:]SHAPE"),
        ("attention", ("--inputs", "q:bf16:2,x"), "Expected a shape as sizes with commas"),
        ("attention", ("--inputs", "q:int:2,3"), "int:BOUND:SHAPE"),
        ("halved", ("--inputs", "x:fp32:3", "--causal"), "Expected a function with the option causal or is_causal"),
        ("attention", ("--inputs", "q:fp32:2,3"), "cannot be run on these inputs"),
        ("blank", ("--inputs", "x:fp32:3"), "with a grad_fn, got none"),
        ("number", ("--inputs", "x:fp32:3"), "Expected a function, got"),
        ("missing", ("--inputs", "x:fp32:3"), "has no 'missing'"),
    ],
)
def test_a_mistake_ends_with_one_sentence(
    target: str,
    words: tuple[str, ...],
    said: str,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, "check", f"{file}:{target}", *words) == 2
    assert said in " ".join(capsys.readouterr().err.split())
