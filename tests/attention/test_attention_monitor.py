"""The attention monitor: its series, its alarm rule, and what reaches the sinks."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from conserved import blocks
from conserved.attention import (
    AttentionMonitor,
    AttentionRecord,
    DepartureRule,
    coherence_figure,
    energy_field,
    probe,
    softmax_statistics,
)
from conserved.attention.departures import DepartureWatch, departures
from conserved.store import RunStore, Sink, SQLite

RULE = DepartureRule(thresholds={"coherence": 0.5, "largest_logit": 0.5, "evenness": 0.5}, memory=3, patience=2)


class Kept(Sink):
    """A sink that keeps what it is given, in the form of those of the law monitor."""

    def __init__(self) -> None:
        self.runs: list[Any] = []
        self.records: list[AttentionRecord] = []
        self.closed = False

    def begin(self, run: Any) -> None:
        self.runs.append(run)

    def write(self, record: AttentionRecord) -> None:
        self.records.append(record)

    def close(self) -> None:
        self.closed = True


def decoder() -> nn.Module:
    return blocks.DecoderLM(20, 8, 2, 2, 12, kv_heads=1)


def run(monitor: AttentionMonitor, model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        with monitor.listen():
            model(torch.randint(20, (3, 12)))
        monitor.step()


class TestMonitor:
    def test_series_are_those_of_the_field(self) -> None:
        module = blocks.Attention(8, 2, causal=True)
        monitor = AttentionMonitor(module, every=1, sequences=1)
        x = torch.randn(1, 12, 8)
        with monitor.listen():
            module(x)
        record = monitor.step()
        assert record is not None
        q, k = module.queries_and_keys(x)
        softmax = softmax_statistics(q[0], k[0], causal=True)
        for head in range(2):
            assert record.readings[f"[{head}].coherence"] == pytest.approx(
                float(energy_field(q[0], k[0]).coherence[head])
            )
            assert record.readings[f"[{head}].largest_logit"] == pytest.approx(float(softmax.largest_logit[head]))
            assert record.readings[f"[{head}].evenness"] == pytest.approx(float(softmax.evenness[head]))

    def test_only_every_nth_step_is_heard(self) -> None:
        model = decoder()
        monitor = AttentionMonitor(model, every=3)
        hooked = []
        for _ in range(7):
            with monitor.listen():
                hooked.append(any(module._forward_pre_hooks for module in model.modules()))
                model(torch.randint(20, (1, 12)))
            monitor.step()
        assert [record.step for record in monitor.records] == [3, 6]
        assert hooked == [False, False, True, False, False, True, False]

    def test_training_is_not_changed(self) -> None:
        ends = []
        for listened in (False, True):
            torch.manual_seed(0)
            model = decoder()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            monitor = AttentionMonitor(model, every=1 if listened else 1000)
            for seed in range(3):
                x = torch.randint(20, (2, 12), generator=torch.Generator().manual_seed(seed))
                with monitor.listen():
                    loss = model(x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                monitor.step()
            ends.append([parameter.detach().clone() for parameter in model.parameters()])
        for one, other in zip(*ends, strict=True):
            assert torch.equal(one, other)

    def test_sinks_get_a_run_and_records(self) -> None:
        sink, model = Kept(), decoder()
        with AttentionMonitor(model, every=2, sinks=[sink], run="mine", config={"lr": 0.1}) as monitor:
            run(monitor, model, 6)
        (header,) = sink.runs
        assert (header.name, header.step, header.laws, header.config["lr"]) == ("mine", 1, (), 0.1)
        assert [record.step for record in sink.records] == [2, 4, 6]
        assert sink.closed
        record = sink.records[0]
        assert set(record.scalars()) == {f"reading/{name}" for name in record.readings} | {"alarms"}
        assert record.entries() == []
        assert json.loads(json.dumps(record.record()))["step"] == 2
        assert len(record.readings) == 2 * 2 * 3
        name, gauge = next(iter(monitor.gauges().items()))
        assert gauge() == sink.records[-1].readings[name]

    def test_a_run_store_takes_readings_that_come_without_laws(self, tmp_path: Path) -> None:
        model = decoder()
        sink = SQLite(tmp_path / "runs.db", detail=1)
        with AttentionMonitor(model, every=2, sinks=[sink], run="mine") as monitor:
            run(monitor, model, 7)
        with RunStore(tmp_path / "runs.db") as store:
            assert store.steps("mine") == [2, 4, 6]
            assert store.readings("mine")[6] == dict(monitor.records[-1].readings)
            assert store.entries("mine") == []

    def test_a_sink_key_raises_an_alarm(self, caplog: pytest.LogCaptureFixture) -> None:
        model = blocks.Attention(16, 2)
        monitor = AttentionMonitor(model, every=1, rule=RULE)
        for step in range(12):
            x = torch.randn(1, 80, 16)
            if step >= 8:
                x[:, 0] *= 15
            with monitor.listen(), caplog.at_level(logging.WARNING, "conserved"):
                model(x)
            monitor.step()
        codes = {alarm.code for alarm in monitor.alarms}
        assert "attention.coherence" in codes
        assert min(alarm.step for alarm in monitor.alarms) == 10, "two samples after the break, by patience"

    def test_numbers_that_are_not_finite_are_an_alarm_and_no_crash(self) -> None:
        model = blocks.Attention(8, 1)
        monitor = AttentionMonitor(model, every=1, rule=RULE)
        for step in range(8):
            x = torch.randn(1, 20, 8)
            if step >= 5:
                x[0, 0, 0] = torch.nan
            with monitor.listen():
                model(x)
            monitor.step()
        assert {alarm.law.rpartition(".")[2] for alarm in monitor.alarms} == {"coherence", "largest_logit", "evenness"}

    def test_bad_options_are_refused(self) -> None:
        with pytest.raises(ValueError, match="at least 1"):
            AttentionMonitor(decoder(), every=0)

    def test_the_figure_is_written(self, tmp_path: Path) -> None:
        model = decoder()
        monitor = AttentionMonitor(model, every=1)
        run(monitor, model, 4)
        path = coherence_figure({"one": monitor, "two": monitor}, tmp_path / "coherence.svg")
        text = path.read_text()
        assert text.count("<svg") == 1
        assert "key coherence" in text or "axes_2" in text

    def test_readings_agree_with_the_probe(self) -> None:
        model, x = decoder().eval(), torch.randint(20, (1, 12))
        monitor = AttentionMonitor(model, every=1)
        with monitor.listen():
            model(x)
        record = monitor.step()
        assert record is not None
        for row in probe(model, x, baselines=False).rows:
            name = f"{row.layer}[{row.head}]"
            assert record.readings[f"{name}.coherence"] == pytest.approx(row.coherence, rel=1e-5)
            assert record.readings[f"{name}.evenness"] == pytest.approx(row.evenness, rel=1e-5)


class TestRule:
    def test_a_departure_is_measured_from_the_recent_median(self) -> None:
        result = departures("coherence", [2.0, 2.0, 2.0, 4.0, 8.0], memory=3, patience=2)
        assert [math.isnan(value) for value in result] == [True] * 4 + [False]
        assert result[-1] == pytest.approx(math.log(2)), "the smaller of the last two departures"

    def test_one_odd_sample_is_quiet(self) -> None:
        series = [2.0] * 5 + [50.0] + [2.0] * 5
        assert max(value for value in departures("coherence", series, memory=3, patience=2) if value == value) == 0

    def test_evenness_is_harmful_when_it_falls(self) -> None:
        assert departures("evenness", [0.8, 0.8, 0.8, 0.2, 0.2], memory=3, patience=2)[-1] == pytest.approx(math.log(4))
        assert departures("evenness", [0.2, 0.2, 0.2, 0.8, 0.8], memory=3, patience=2)[-1] < 0

    def test_calibration_takes_the_worst_healthy_departure_and_a_margin(self) -> None:
        healthy = {"a[0].coherence": [2.0, 2.0, 2.0, 3.0, 3.0], "a[0].evenness": [0.5] * 5, "a[0].other": [1.0] * 5}
        rule = DepartureRule.calibrated([healthy], margin=2.0, memory=3, patience=2)
        assert rule.thresholds["coherence"] == pytest.approx(2 * math.log(1.5))
        assert rule.thresholds["evenness"] == 0
        assert not DepartureWatch(rule).look(0, {name: values[0] for name, values in healthy.items()})
        with pytest.raises(ValueError, match="longer than"):
            DepartureRule.calibrated([{"a[0].coherence": [1.0, 2.0]}])

    def test_a_series_alarms_once_until_it_is_back(self) -> None:
        watch = DepartureWatch(RULE)
        values = [2.0] * 3 + [20.0] * 2 + [20.0] * 6 + [200.0] * 2
        steps = [step for step, value in enumerate(values) if watch.look(step, {"x.coherence": value})]
        assert steps == [4, 12]
