"""Two checkers of certificates that share no code: they agree on everything, and neither can be made to fall over."""

from __future__ import annotations

import ast
import copy
import json
import random
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import conserved
import conserved_verify as second
from conserved import Certificate
from conserved.certificates import MalformedError
from conserved.certificates.contents import digest
from conserved.certificates.program import UNARY
from conserved.discovery import UnsuitableError
from random_functions import compared, random_function
from random_programs import compare, random_case
from test_cli import run

pytestmark = pytest.mark.usefixtures("as_users_run_it")

CORPUS = Path(__file__).parents[1] / "data" / "certificates"
EXPECTED: dict[str, str] = json.loads((CORPUS / "index.json").read_text())
GOOD = [name for name, verdict in EXPECTED.items() if verdict == "proved"]


def first_says(path: Path) -> tuple[Any, ...]:
    try:
        result = Certificate.load(path).checked()
    except MalformedError:
        return ("malformed",)
    return result.verdict.status.value, result.at_most, result.found, result.complete


def second_says(path: Path) -> tuple[Any, ...]:
    try:
        result = second.verify(second.parsed(path.read_bytes()))
    except second.RefusedError:
        return ("malformed",)
    return result.status, result.at_most, result.found, result.complete


class TestCorpus:
    @pytest.mark.parametrize("name", EXPECTED)
    def test_both_say_what_is_expected(self, name: str) -> None:
        path = CORPUS / f"{name}.json"
        assert first_says(path)[0] == EXPECTED[name]
        assert first_says(path) == second_says(path)

    def test_every_file_is_in_the_index(self) -> None:
        assert {path.stem for path in CORPUS.glob("*.json")} == {*EXPECTED, "index"}
        assert len(EXPECTED) >= 40
        assert set(EXPECTED.values()) == {"proved", "verified", "inconclusive", "refuted", "malformed"}

    @pytest.mark.parametrize("name", [name for name, verdict in EXPECTED.items() if verdict == "malformed"])
    def test_the_command_refuses_in_one_line_that_names_the_file(
        self, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = CORPUS / f"{name}.json"
        assert run(monkeypatch, "certify", "--check", str(path)) == 2
        text = [line for line in capsys.readouterr().err.splitlines() if line.startswith("conserved:")]
        assert len(text) == 1
        assert str(path) in text[0]
        assert second.main([str(path)]) == 2
        assert capsys.readouterr().err.count("\n") == 1

    def test_names_cannot_reach_the_terminal_as_anything_but_text(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = str(CORPUS / "good_terminal_name.json")
        for more in ([], ["--json"]):
            assert run(monkeypatch, "certify", "--check", path, *more) == 0
            text = capsys.readouterr().out
            assert not {"\x1b", "\x9b", "\u202e"} & set(text)
            assert "x1b[2J" in text

    def test_formulas_in_a_file_are_not_believed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A version-1 file may say anything about its laws; what is shown is what was proved."""
        record = json.loads((CORPUS / "good_version_1.json").read_text())
        for group in record["laws"]:
            for law in group:
                law |= {"name": "everything", "formula": "every weight is conserved"}
        result = Certificate.of(record | {"digest": digest(record)}).checked()
        assert result.verdict == conserved.Verdict.PROVED
        assert "every" not in result.summary()
        assert "‖up.weight[i,:]‖² − ‖down.weight[:,i]‖²" in result.summary()

    def test_another_version_is_refused_with_both_versions_named(self) -> None:
        with pytest.raises(MalformedError, match=r"certificate of version 1 or 2, got 3"):
            Certificate.load(CORPUS / "bad_version.json")


class TestMutations:
    """A good certificate with one leaf, one list or one operator changed, and a digest that fits again."""

    @pytest.mark.parametrize("name", ["good_linear_pair", "good_relu_ffn", "good_stopped", "good_tokens"])
    def test_both_agree_on_what_a_change_makes_of_it(self, name: str, tmp_path: Path) -> None:
        record = json.loads((CORPUS / f"{name}.json").read_text())
        rng = random.Random(name)
        outcomes: Counter[str] = Counter()
        for turn in range(40):
            other = mutated(record, rng)
            path = tmp_path / f"{turn}.json"
            path.write_text(json.dumps(other | {"digest": digest(other)}))
            says = first_says(path)
            assert says == second_says(path), path
            outcomes[says[0]] += 1
        assert len(outcomes) > 1


def mutated(record: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A copy with one thing changed."""
    other = copy.deepcopy(record)
    index: Any = other[rng.choice(("program", "program", "theta", "inputs", "samples", "words", "laws", "parameters"))]
    while isinstance(index, dict | list) and index:
        keys: list[Any] = list(index) if isinstance(index, dict) else list(range(len(index)))
        key = rng.choice(keys)
        value = index[key]
        if isinstance(value, dict | list) and value and rng.random() < 0.95:
            index = value
            continue
        if isinstance(value, int) and not isinstance(value, bool):
            index[key] = value + rng.choice((-1, 1, 2, 10**6))
        elif isinstance(value, str) and value.startswith(("0x", "-0x")):
            index[key] = rng.choice(["0x0p+0", (-float.fromhex(value)).hex(), "inf", (float.fromhex(value) + 1).hex()])
        elif isinstance(value, str):
            index[key] = rng.choice((*UNARY, "add", "stop", "take", "nothing"))
        elif isinstance(index, list):
            index[key] = None
        else:
            del index[key]
        break
    return other


class TestIndependence:
    def test_it_imports_nothing_but_python_and_flint(self) -> None:
        tree = ast.parse(Path(second.__file__).read_text())
        imported = {
            name.split(".")[0]
            for node in ast.walk(tree)
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        }
        assert imported - set(sys.stdlib_module_names) == {"flint"}

    def test_it_runs_as_a_module_of_its_own(self, tmp_path: Path) -> None:
        script = tmp_path / "conserved_verify.py"
        script.write_text(Path(second.__file__).read_text())
        command = [sys.executable, "-P", str(script), str(CORPUS / "good_swiglu.json")]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0
        assert "PROVED: at most 4 independent laws of 36 parameters; all of them listed" in result.stdout


class TestDifferential:
    """A seeded sample of what benchmarks/differential.py compares."""

    def test_values_and_gradients_of_random_programs(self) -> None:
        used: Counter[str] = Counter()
        for seed in range(60):
            case = random_case(seed)
            used.update(node.op for node in case.program.nodes)
            result = compare(case)
            assert not result.disagreements, (seed, result.disagreements)
        assert len(used) == 26

    def test_brackets_of_random_programs(self) -> None:
        for seed in range(15):
            result = compare(random_case(seed), brackets=1)
            assert not result.disagreements, (seed, result.disagreements)

    def test_random_functions_against_their_programs(self) -> None:
        compared_at_all = 0
        for seed in range(15):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    result = compared(random_function(seed))
                except UnsuitableError:
                    continue
            assert not result.disagreements, (seed, result.disagreements)
            compared_at_all += not result.open
        assert compared_at_all >= 10

    def test_the_comparison_sees_a_wrong_transpose(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An adjoint that overwrites where it should add, as negative indices once made it do."""

        def overwritten(ring: Any, part: list[Any], indices: Any, size: int) -> list[Any]:
            result = [ring.number(0)] * size
            for index, entry in zip(indices, part, strict=True):
                result[index] = entry
            return result

        monkeypatch.setattr(second, "collected", overwritten)
        assert any(compare(random_case(seed)).disagreements for seed in range(20))
