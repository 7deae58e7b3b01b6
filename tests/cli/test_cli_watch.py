"""The live view: a page on localhost that follows the store and changes nothing, and a table for terminals."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from conserved import Monitor
from conserved.cli.app import UsageError
from conserved.cli.watch import HOST, report_server, table_of, watch
from conserved.report.contents import listing


def train(store: Path, steps: int, *, wrong: int = -1) -> Monitor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    monitor = Monitor(model, optimizer, every=1, audit=1, sinks=str(store))
    x = torch.randn(8, 4)
    for step in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if 0 <= wrong <= step:
            gradient = model.get_parameter("2.weight").grad
            assert gradient is not None
            gradient.mul_(2)
        optimizer.step()
        monitor.step()
    monitor.close()
    return monitor


def test_the_page_follows_the_store_and_only_answers_for_it(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    train(store, 3)
    server = report_server(store, 0, 2.0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://{HOST}:{server.server_address[1]}"
    try:
        first = urllib.request.urlopen(address + "/").read().decode()
        assert 'http-equiv="refresh" content="2"' in first
        train(store, 4, wrong=2)
        second = urllib.request.urlopen(address + "/").read().decode()
        assert "gradients are wrong" in second
        assert "gradients are wrong" not in first
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(address + "/other")
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(address + "/", data=b"x")
    finally:
        server.shutdown()
        server.server_close()


def test_monitor_report_and_list_count_the_same_alarms(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    monitor = train(store, 12, wrong=5)
    (run,) = listing(store)["runs"]
    assert run["alarms"] == len(monitor.alarms) == 1
    console = Console(width=120, record=True, file=StringIO())
    console.print(table_of(store))
    text = console.export_text()
    assert run["name"] in text
    assert "does not hold" in text


def test_a_page_of_an_empty_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.db").touch()
    with pytest.raises(UsageError, match="Nothing has been recorded"):
        watch(tmp_path / "empty.db", output=tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
