"""Send what a monitor sees to a place of your own: here a CSV file with one row for each law and step."""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path
from typing import IO

import torch

from conserved import Monitor, blocks
from conserved.store import Run, Sink, StepRecord


class Csv(Sink):
    """Appends to a file; `begin` writes the heading, `write` takes one step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: IO[str] | None = None

    def begin(self, run: Run) -> None:
        """A run starts; a run that goes on would cut off what it wrote after `run.step`."""
        self.file = self.path.open("w", encoding="utf-8", newline="")
        csv.writer(self.file).writerow(["run", "step", "law", "observed", "first order", "second order", "residual"])
        self.name = run.name

    def write(self, record: StepRecord) -> None:
        """One row for each law."""
        assert self.file is not None
        for entry in record.entries():
            parts = (entry.observed, entry.first_order, entry.second_order, entry.residual)
            csv.writer(self.file).writerow([self.name, entry.step, entry.law, *(f"{part:.3e}" for part in parts)])

    def close(self) -> None:
        """The run is over."""
        if self.file is not None:
            self.file.close()


def main() -> None:
    """Two steps of SGD, and the file."""
    torch.manual_seed(0)
    model = blocks.SwiGLU(dim=8, hidden=12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = Path(tempfile.mkdtemp()) / "laws.csv"
    with Monitor(model, optimizer, every=1, sinks=Csv(path), run="example") as monitor:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()
            monitor.step()
    print(path.read_text(encoding="utf-8").strip())


if __name__ == "__main__":
    main()
