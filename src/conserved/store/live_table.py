"""A live table in the terminal: equation (10) by block, and the law that stands out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from conserved.alarm import Alarm, group_alarms
from conserved.optional import require
from conserved.output.lines import counted
from conserved.store.sink import Run, Sink
from conserved.store.step_record import StepRecord

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.live import Live


class LiveTable(Sink):
    """Redraws a table in place while a run goes on.

    Args:
        console: the rich console to draw on; by default that of the terminal.
        lines: where output is not a terminal, number of records from one plain line to the next.
    """

    def __init__(self, console: Console | None = None, *, lines: int = 100) -> None:
        require("rich", "LiveTable")
        from conserved.output import terminal

        self._console = console or terminal.Console()
        self._lines = lines
        self._seen = 0
        self._alarms: tuple[Alarm, ...] = ()
        self._live: Live | None = None

    def begin(self, run: Run) -> None:
        self._name = run.name
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live(console=self._console, refresh_per_second=4)
            self._live.start()

    def write(self, record: StepRecord) -> None:
        self._seen += 1
        self._alarms = group_alarms((*self._alarms, *record.alarms))
        if self._live is not None:
            self._live.update(self.table(record))
        elif (self._seen - 1) % self._lines == 0 or record.alarms:
            self._console.print(_line(record), markup=False, highlight=False, soft_wrap=True)

    def table(self, record: StepRecord) -> Group:
        """Return the table shown for one record.

        Args:
            record: the record of a step.

        Returns:
            All alarms so far, then a row for every block.
        """
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(title=f"{self._name}, step {record.step}", box=None, pad_edge=False, header_style="bold")
        table.add_column("block")
        for heading in ("drift", "observed", "first order", "second order", "residual", "of rounding"):
            table.add_column(heading, justify="right")
        by_block: dict[str, list[int]] = {}
        for number, law in enumerate(record.laws):
            by_block.setdefault(law.block, []).append(number)
        entries, errors = record.entries(), record.errors()
        for block, numbers in by_block.items():
            most = max((entries[number] for number in numbers), key=lambda entry: entry.excess)
            cells = [f"{errors[block]:.2e}"]
            cells += [f"{value:.1e}" for value in (most.observed, most.first_order, most.second_order, most.residual)]
            cells.append(f"{most.excess:.2g}")
            table.add_row(block or "(model)", *cells, style="red" if not most.excess <= 1 else "")
        return Group(*(Text(str(alarm), style="bold red") for alarm in self._alarms), table)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


def _line(record: StepRecord) -> str:
    """Return one record on one line; a monitor of attention has readings and no laws."""
    worst = max(record.entries(), key=lambda entry: entry.excess, default=None)
    text = counted(len(record.alarms), "alarm")
    if worst is not None:
        errors = record.errors("law")
        mean = sum(errors.values()) / len(errors)
        law = f"{worst.law} ({worst.excess:.2g} of rounding)"
        text = f"drift {mean:.2e}, largest residual {abs(worst.residual):.1e} in {law}, {text}"
    alarms = "".join(f"\n  {alarm}" for alarm in record.alarms)
    return f"step {record.step}: {text}{alarms}"
