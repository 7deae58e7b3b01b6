"""Certificate files: self-contained, checked without the model, and of no use once tampered with."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import conserved
from conserved import Certificate, Verdict
from conserved.blocks import FeedForward, MixtureOfExperts
from conserved.certificates import MalformedError
from conserved.certificates.contents import digest
from test_cli import run


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    torch.manual_seed(0)
    return conserved.certify(FeedForward(2, 1, "linear").double(), torch.zeros(2)).record()


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every number and string of a file is."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path


def changed(record: dict[str, Any], path: tuple[Any, ...]) -> dict[str, Any]:
    """A copy with one leaf replaced by another value of the same type."""
    other = copy.deepcopy(record)
    index: Any = other
    for key in path[:-1]:
        index = index[key]
    value = index[path[-1]]
    if isinstance(value, bool):
        index[path[-1]] = not value
    elif isinstance(value, int):
        index[path[-1]] = value + 1
    elif value.startswith(("0x", "-0x")):
        index[path[-1]] = (float.fromhex(value) + 0.5).hex()
    else:
        index[path[-1]] = value[:-1] + chr(ord(value[-1]) + 1)
    return other


def fails(record: dict[str, Any]) -> bool:
    try:
        return not Certificate.of(record).check().holds
    except MalformedError:
        return True


def test_a_file_is_read_back_and_checked_without_the_model(record: dict[str, Any], tmp_path: Path) -> None:
    made = Certificate.of(record)
    made.save(tmp_path / "pair.json")
    loaded = Certificate.load(tmp_path / "pair.json")
    assert loaded.verdict == Verdict.INCONCLUSIVE
    assert loaded.check() == Verdict.PROVED
    assert loaded.checked().complete
    assert loaded.record() == record


def test_changing_anything_in_a_file_makes_the_check_fail(record: dict[str, Any]) -> None:
    paths = list(leaves(record))
    assert len(paths) > 100
    survivors = [path for path in paths if not fails(changed(record, path))]
    assert survivors == []


def test_leaving_anything_out_makes_the_check_fail(record: dict[str, Any]) -> None:
    for key in record:
        rest = {name: value for name, value in record.items() if name != key}
        assert fails(rest), key


class TestForgery:
    """With a digest that fits: now the mathematics has to say no."""

    def forged(self, record: dict[str, Any]) -> dict[str, Any]:
        return record | {"digest": digest(record)}

    def test_a_higher_rank(self, record: dict[str, Any]) -> None:
        other = copy.deepcopy(record)
        other["words"].append([0, 1])
        claim = other["claim"]
        claim |= {"rank": claim["rank"] + 1, "at_most": claim["at_most"] - 1}
        claim["complete"] = claim["found"] == claim["at_most"]
        result = Certificate.of(self.forged(other))
        assert result.check() == Verdict.INCONCLUSIVE

    def test_a_claim_that_does_not_follow(self, record: dict[str, Any]) -> None:
        other = copy.deepcopy(record)
        other["claim"]["at_most"] -= 1
        assert Certificate.of(self.forged(other)).check() == Verdict.REFUTED

    def test_a_law_that_is_none(self, record: dict[str, Any]) -> None:
        other = copy.deepcopy(record)
        for term in other["laws"][0][0]["quadratic"][:1]:
            assert term[0] == term[1]
            term[2] = (-float.fromhex(term[2])).hex()
        assert not Certificate.of(self.forged(other)).check().holds

    def test_another_function(self, record: dict[str, Any]) -> None:
        """A tanh put where the linear pair had nothing: the law is gone, and the check sees it."""
        torch.manual_seed(0)
        pair = FeedForward(2, 1, "linear").double()
        bent = conserved.certify(nn.Sequential(pair.up, nn.Tanh(), pair.down), torch.zeros(2)).record()
        other = copy.deepcopy(record) | {"program": bent["program"]}
        assert not Certificate.of(self.forged(other)).check().holds

    def test_a_tier_that_is_too_high_or_too_low(self, record: dict[str, Any]) -> None:
        other = copy.deepcopy(record)
        other["claim"]["tiers"][0] = "verified"
        assert Certificate.of(self.forged(other)).check() == Verdict.INCONCLUSIVE


class TestMalformed:
    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"format": "zip"}, "Expected a certificate in format"),
            ({"version": 99}, "got 99"),
            ({"extra": 1}, "mean nothing: extra"),
            ({"theta": ["nan"] * 4}, "not finite"),
            ({"theta": []}, "list of 4"),
            (
                {"program": {"nodes": [{"op": "system", "inputs": [], "shape": [1]}], "output": 0, "size": 1}},
                "not an op",
            ),
            ({"words": [[999]]}, "999"),
            ({"bits": True}, "bits"),
            ({"claim": {}}, "tier"),
        ],
        ids=["format", "version", "unknown field", "NaN", "length", "operator", "word", "bits", "claim"],
    )
    def test_it_says_where(self, record: dict[str, Any], change: dict[str, Any], says: str) -> None:
        with pytest.raises(MalformedError, match=says):
            Certificate.of(record | change)

    def test_a_huge_tensor_is_refused_before_it_is_made(self, record: dict[str, Any]) -> None:
        nodes = [{"op": "input", "inputs": [], "shape": [2**20, 2**20], "which": 0}]
        with pytest.raises(MalformedError, match="entries"):
            Certificate.of(record | {"program": {"nodes": nodes, "output": 0, "size": 1}})


class TestCommand:
    MODEL = "from conserved.blocks import FeedForward\ndef pair():\n    return FeedForward(2, 1, 'linear').double()\n"

    @pytest.fixture
    def model(self, tmp_path: Path) -> str:
        (tmp_path / "pair.py").write_text(self.MODEL)
        return f"{tmp_path / 'pair.py'}:pair"

    def test_it_certifies_writes_and_checks(
        self, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "pair.json"
        assert run(monkeypatch, "certify", model, "--inputs", "2", "-o", str(file)) == 0
        assert "PROVED: Exactly 1 independent law of 4 parameters, all listed." in capsys.readouterr().out
        assert run(monkeypatch, "certify", "--check", str(file), "--json") == 0
        text = json.loads(capsys.readouterr().out)
        assert (text["at_most"], text["found"], text["verdict"], text["complete"]) == (1, 1, "proved", True)
        assert [law["evidence"] for law in text["laws"]] == ["proved"]

    def test_a_tampered_file_ends_with_one(
        self,
        record: dict[str, Any],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        file = tmp_path / "bad.json"
        file.write_text(json.dumps(changed(record, ("theta", 0))))
        assert run(monkeypatch, "certify", "--check", str(file)) == 1
        assert "changed after it was made" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            ([], "Name a model"),
            (["a.py:b", "--check", "c.json"], "Name a model"),
            (["--check", "nowhere.json"], "cannot be read"),
        ],
        ids=["nothing", "both", "no file"],
    )
    def test_bad_usage_ends_with_two(
        self, arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(monkeypatch, "certify", *arguments) == 2
        assert says in capsys.readouterr().err

    def test_a_file_that_is_no_certificate_ends_with_two(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "text.json").write_text("hello")
        assert run(monkeypatch, "certify", "--check", str(tmp_path / "text.json")) == 2
        assert "not JSON" in capsys.readouterr().err

    def test_an_incomplete_certificate_ends_with_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        text = "from torch import nn\ndef gain():\n    return nn.Sequential(nn.Linear(2, 2), nn.Softplus()).double()\n"
        (tmp_path / "m.py").write_text(text)
        assert run(monkeypatch, "certify", f"{tmp_path / 'm.py'}:gain", "--inputs", "2", "--bits", "64") in (0, 1)
        assert "PROVED" in capsys.readouterr().out


def test_a_certificate_of_a_mixture_names_its_evidence() -> None:
    certificate = conserved.certify(MixtureOfExperts(3, 2, 3, "sigmoid").double(), torch.zeros(4, 3))
    shown = certificate.summary()
    assert "PROVED: Exactly 6 independent laws of 63 parameters, all listed." in shown
    assert "laws proved by a symbolic argument: 6" in shown
