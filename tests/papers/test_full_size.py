"""What claims are told of the runs at the paper's size is what the stored runs say."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from conserved_papers.claims import claims, full_size
from conserved_papers.lab.long import LongRun

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def record() -> Path:
    """The newest stored record."""
    return max(RESULTS.glob("long_runs_h200_*-??.json"))


def test_the_summary_in_the_package_is_that_of_the_stored_runs() -> None:
    packed = record().with_suffix(".trajectories.json.gz").read_bytes()
    runs = [LongRun.of(run) for run in json.loads(gzip.decompress(packed))]
    result = full_size.summary_of(runs, json.loads(record().read_text())["fields"])
    assert set(result) == set(full_size.stored()) == {"cifar", "imagenet", "penn", "wikitext"}
    for recipe, run in result.items():
        stored = full_size.stored()[recipe]
        assert {key: run[key] for key in ("steps", "planned")} == {key: stored[key] for key in ("steps", "planned")}
        assert run.get("fields", {}) == pytest.approx(stored.get("fields", {}), rel=1e-5)
        for family, law in run["laws"].items():
            for key, value in law.items():
                was = stored["laws"][family][key]
                assert value == was or value == pytest.approx(was, rel=1e-5), (recipe, family, key)


def test_a_law_beyond_the_bound_at_full_size_refutes_its_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    check = next(claim.check for claim in claims() if claim.code == "paper.Fig3b")
    spoiled = json.loads(json.dumps(full_size.stored()))
    spoiled["cifar"]["laws"]["gated_neurons"]["share"] = 1.5
    monkeypatch.setattr(full_size, "stored", lambda: spoiled)
    result = check()
    assert result.status.value == "refuted"
    assert any(item.value == 1.5 for item in result.evidence)


def test_a_rate_that_full_size_runs_do_not_show_refutes_its_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    check = next(claim.check for claim in claims() if claim.code == "paper.Fig3c.rate")
    assert check().holds
    spoiled = json.loads(json.dumps(full_size.stored()))
    spoiled["penn"]["laws"]["query_key"]["in_squares"] = [1.0, 1.2, 1.41]
    monkeypatch.setattr(full_size, "stored", lambda: spoiled)
    assert check().status.value == "refuted"


def test_the_trained_encoder_is_that_of_the_stored_measurement() -> None:
    stored = json.loads(max(RESULTS.glob("delocalisation_minilm_cpu_*.json")).read_text())
    for name, value in full_size.trained_encoder().items():
        if name != "model":
            assert value == (pytest.approx(stored[name], abs=1e-4) if isinstance(value, dict) else stored[name])
