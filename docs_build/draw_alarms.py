"""Draws what a terminal shows of alarms, one of each kind and some more: docs/assets/alarm_*.svg.

python docs_build/draw_alarms.py [NAME …]

Each picture is the output of a program of tests/error_programs, run with a default monitor.
"""

from __future__ import annotations

import io
import logging
import re
import sys
import tempfile
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.text import Text
from torch.multiprocessing.spawn import start_processes

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "assets"
WIDTH = 100
sys.path.insert(0, str(ROOT / "tests"))

from error_programs import forum, habits, loops, replicas, restarts, surroundings, updates  # noqa: E402
from error_programs.case import Program  # noqa: E402

PICTURES: dict[str, Program] = {
    "loop": loops.no_zero_grad,
    "update": updates.non_contiguous,
    "precision": forum.loop_inside_autocast,
    "hardware": updates.flipped_low_bit,
    "gradient": updates.wrong_backward,
    "replica": replicas.no_sync,
    "outputs": surroundings.absolute_broadcast,
    "schedule": habits.cosine_wraps,
    "state": habits.stale_moments,
    "resume": restarts.buffers_missing,
}
"""By kind of alarm, or subject of the loop, a program that raises one."""


SUBJECTS = {"outputs": "outputs", "schedule": "a schedule", "state": "the optimizer's state", "resume": "a resume"}
"""Pictures that are not of a kind, and what they are about."""


_KIND = re.compile(r" {4}(loop|update|gradient|replica|precision|hardware), step \d+")


def output_of(program: Program, *rank: int) -> str:
    """Return what a program writes to the terminal with a default monitor."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    logger = logging.getLogger("conserved")
    # A terminal shows lines of level INFO too, where nobody has set up logging.
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    torch.manual_seed(0)
    try:
        with redirect_stderr(written), redirect_stdout(written), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program(True, *rank)
    finally:
        logger.removeHandler(handler)
    return written.getvalue()


def _together(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    text = output_of(PICTURES["replica"], rank)
    dist.barrier()
    Path(folder, str(rank)).write_text(text)
    dist.destroy_process_group()


def draw(kind: str, text: str) -> Path:
    """Write a picture of a terminal with this text; the alarm stands out."""
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    # How long laws take to read depends on the machine.
    lines = [line for line in text.splitlines() if " s so far" not in line]
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        # The second line of an alarm says its kind and step.
        stated = "no alarm, as a program may mean it" in line
        style = "bold yellow" if _KIND.match(after) else "yellow" if stated or _KIND.match(line) else "dim"
        console.print(Text(line, style=style))
    path = TARGET / f"alarm_{kind}.svg"
    what = "an alarm" if any(map(_KIND.match, lines)) else "a statement"
    drawn = console.export_svg(
        title=f"{what} about {SUBJECTS[kind]}" if kind in SUBJECTS else f"{what} of kind {kind}",
        unique_id=f"alarm-{kind}",
    )
    # Readers of the page ask no other server for a font; clipping would cut underscores off the last line.
    path.write_text(re.sub(r"@font-face \{.*?\}\s*| clip-path=\"[^\"]*\"", "", drawn, flags=re.S))
    return path


def main() -> None:
    """Draw all pictures."""
    torch.set_num_threads(1)
    chosen = sys.argv[1:] or list(PICTURES)
    for kind, program in ((kind, PICTURES[kind]) for kind in chosen):
        if kind == "replica":
            with tempfile.TemporaryDirectory() as folder:
                start_processes(_together, args=(folder,), nprocs=2, start_method="spawn")
                text = Path(folder, "0").read_text()
        else:
            text = output_of(program)
        print(draw(kind, text))


if __name__ == "__main__":
    main()
