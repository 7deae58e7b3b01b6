"""Put a figure of your own into the report: plain data in the run store, drawn offline beside the others.

The figure asks whether a wider SwiGLU network has proportionally more laws. It does: one per hidden neuron.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from conserved import recognize
from conserved.blocks import SwiGLU
from conserved.output.figure import PALETTE, Figure, Finding, line, panels
from conserved.report import write_report
from conserved.tracking import store_document


def laws_by_width(widths: tuple[int, ...] = (4, 8, 16, 32)) -> Figure:
    """One curve, one finding with what theory expects of it."""
    counts = [recognize(SwiGLU(dim=4, hidden=width)).independent() for width in widths]
    slope = (counts[-1] - counts[0]) / (widths[-1] - widths[0])
    return Figure(
        code="laws_by_width",
        title="Laws of a gated network by its width",
        caption="One conserved number for each hidden neuron.",
        alt="A straight line: the number of laws equals the number of hidden neurons.",
        data=(line(widths, counts, name="laws", color=PALETTE[0], marks=True),),
        layout=panels(["SwiGLU"], x="hidden neurons", y="independent laws", log=(False, False)),
        findings=(Finding(what="laws per hidden neuron", value=slope, expected="1", holds=slope == 1),),
        section="beyond",
    )


def main() -> None:
    """Store it, and write a report that shows it."""
    folder = Path(tempfile.mkdtemp())
    figure = laws_by_width()
    store_document(folder / "store.db", "figure", figure.code, figure.record())
    write_report(folder / "store.db", folder / "report.html")
    page = (folder / "report.html").read_text(encoding="utf-8")
    print(f"{figure.findings[0].what}: {figure.findings[0].value:g}, expected {figure.findings[0].expected}")
    print(f"in the report: {figure.title in page}")


if __name__ == "__main__":
    main()
