"""Sinks that other tools read: TensorBoard's own reader, wandb's offline files, trackio's store, the terminal."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from conserved import Monitor
from conserved.optional import MissingPackageError, require
from conserved.tracking import LiveTable, Sink, StepRecord, TensorBoard, Trackio, WeightsAndBiases
from training import decoder, exact_text_loss


def watched(*sinks: Sink, steps: int = 3, spoil: bool = False) -> Monitor:
    model = decoder().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with Monitor(model, optimizer, every=1, sinks=sinks, run="a run", where="layers.0.*") as monitor:
        for number in range(steps):
            optimizer.zero_grad()
            exact_text_loss(model, number).backward()
            gradient = model.get_parameter("layers.0.attention.q.weight").grad
            if spoil and number and gradient is not None:
                gradient.mul_(2)
            optimizer.step()
            monitor.step()
    return monitor


def scalars_in(folder: Path) -> Any:
    """TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder))
    reader.Reload()
    return reader


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    monitor = watched(TensorBoard(tmp_path, laws=True))
    reader = scalars_in(tmp_path)
    tags = reader.Tags()["scalars"]
    for record in monitor.records:
        for name, value in record.scalars(laws=True).items():
            assert f"conserved/{name}" in tags
            (event,) = [scalar for scalar in reader.Scalars(f"conserved/{name}") if scalar.step == record.step]
            assert event.value == pytest.approx(value, rel=1e-6)
    assert any(tag.startswith("conserved/residual/layers.0.attention.query_key") for tag in tags)
    assert "conserved/drift/layers.0.attention" in tags


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_can_share_the_writer_of_a_run(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    watched(TensorBoard(writer=writer))
    writer.add_scalar("loss", 1.0, 1)
    writer.close()
    assert {"loss", "conserved/largest/residual"} <= set(scalars_in(tmp_path).Tags()["scalars"])


@pytest.mark.usefixtures("as_users_run_it")
def test_tensorboard_wants_a_folder_or_a_writer() -> None:
    with pytest.raises(ValueError, match="either a folder"):
        TensorBoard()


OFFLINE = """
import sys; sys.path[:0] = {here!r}
import torch; torch.set_num_threads(1)
from test_dashboards import watched
from conserved.tracking import WeightsAndBiases, Trackio
watched({sink}, spoil=True)
"""


def run_outside(sink: str, **environment: str) -> None:
    """These tools start services of their own; a process of its own keeps them out of the tests."""
    script = OFFLINE.format(here=[str(Path(__file__).parents[1]), str(Path(__file__).parent)], sink=sink)
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_weights_and_biases_logs_offline_and_alarms_are_alerts_there(tmp_path: Path) -> None:
    run_outside(f"WeightsAndBiases('laws', dir={str(tmp_path)!r})", WANDB_SILENT="true", WANDB_DIR=str(tmp_path))
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    stored = file.read_bytes()
    assert b"conserved/drift/layers.0.attention" in stored
    assert b"conserved/largest/residual" in stored
    assert stored.count(b"conserved: gradient query_key") == 1
    assert b"Code between backward()" in stored


@pytest.mark.slow
def test_trackio_stores_every_step_and_alarms_as_alerts(tmp_path: Path) -> None:
    run_outside("Trackio('laws')", TRACKIO_DIR=str(tmp_path), HF_HUB_OFFLINE="1")
    import sqlite3

    (file,) = tmp_path.glob("**/laws*.db")
    with sqlite3.connect(file) as store:
        rows = store.execute("select step, metrics from metrics order by step").fetchall()
        alerts = store.execute("select title, text from alerts").fetchall()
    store.close()
    assert [step for step, _ in rows] == [1, 2, 3]
    assert all("conserved/drift/layers.0.attention" in str(metrics) for _, metrics in rows)
    assert [title for title, _ in alerts].count("conserved: gradient query_key") == 1
    assert all("layers.0.attention.query_key" in text for _, text in alerts)


def test_the_live_table_shows_blocks_and_alarms() -> None:
    screen = io.StringIO()
    table = LiveTable(Console(file=screen, force_terminal=True, width=140))
    watched(table, spoil=True)
    shown = screen.getvalue()
    assert "layers.0.attention" in shown
    assert "of rounding" in shown
    assert "The gradient identity of layers.0.attention.query_key" in shown


def test_without_a_terminal_there_are_plain_lines() -> None:
    screen = io.StringIO()
    watched(LiveTable(Console(file=screen, width=200), lines=2), steps=5)
    lines = screen.getvalue().splitlines()
    assert [line.split(":")[0] for line in lines] == ["step 1", "step 3", "step 5"]
    assert "\x1b" not in screen.getvalue()


def test_any_class_with_two_methods_is_a_sink() -> None:
    class Last(Sink):
        def begin(self, run: Any) -> None:
            self.name = run.name

        def write(self, record: StepRecord) -> None:
            self.record = record

    sink = Last()
    watched(sink)
    assert (sink.name, sink.record.step) == ("a run", 3)


@pytest.mark.usefixtures("as_users_run_it")
def test_a_record_without_laws_is_one_short_line() -> None:
    """As the monitor of attention writes them."""
    from conserved.attention.monitor import AttentionRecord

    screen = io.StringIO()
    table = LiveTable(Console(file=screen, width=200))
    table.write(AttentionRecord(step=3, readings={"coherence": 1.5}))
    assert screen.getvalue().strip() == "step 3: 0 alarms"


@pytest.mark.parametrize(
    ("package", "build", "extra"),
    [
        ("tensorboard", lambda: TensorBoard("somewhere"), "tensorboard"),
        ("wandb", WeightsAndBiases, "wandb"),
        ("trackio", Trackio, "trackio"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, package: str, build: Any, extra: str
) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("importlib.import_module", absent)
    with pytest.raises(MissingPackageError, match=rf"pip install 'conserved\[{extra}\]'"):
        build()


def test_the_gate_lets_installed_packages_through_and_says_why_others_fail(tmp_path: Path) -> None:
    assert require("json", "A test").loads("1") == 1
    (tmp_path / "broken_package.py").write_text("import surely_not_installed")
    sys.path.insert(0, str(tmp_path))
    try:
        with pytest.raises(MissingPackageError, match=r"A test needs broken_package.*surely_not_installed"):
            require("broken_package", "A test")
    finally:
        sys.path.remove(str(tmp_path))
