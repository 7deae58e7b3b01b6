"""Side-by-side timing and a saved table: what every benchmark shares."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def side_by_side(work: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each piece of work, in turns."""
    return {name: median(taken) for name, taken in in_turns(work, rounds).items()}


def in_turns(work: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each piece of work in every round but a first one; in turns, so a noisy moment hits all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for number in range(rounds + 1):
        for name, call in work.items():
            start = _now()
            call()
            if number > 0:
                seconds[name].append(_now() - start)
    return seconds


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def machine() -> dict[str, Any]:
    """Where and with what a benchmark ran."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {"device": device, "threads": torch.get_num_threads(), "torch": torch.__version__}


def commit() -> str:
    """The measured commit, marked if the tree differs from it. `COMMIT` overrides it where the history is missing."""
    git = ["git", "-C", str(Path(__file__).parent)]
    described = subprocess.run([*git, "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return os.environ.get("COMMIT") or described.stdout.strip() or "unknown"


def save_path(name: str, folder: Path = RESULTS) -> Path:
    """Return NAME_DEVICE_DATE.json in a folder."""
    hardware = "h200" if "H200" in machine()["device"] else "cuda" if torch.cuda.is_available() else "cpu"
    return folder / f"{name}_{hardware}_{datetime.now(UTC).date().isoformat()}.json"


def save(name: str, record: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Write a record as NAME_DEVICE_DATE.json into a folder."""
    today = datetime.now(UTC).date().isoformat()
    folder.mkdir(parents=True, exist_ok=True)
    path = save_path(name, folder)
    path.write_text(json.dumps({"date": today, "commit": commit(), **machine(), **record}, indent=1) + "\n")
    return path
