"""A finding: one identity of a step that does not hold, in the user's words."""

from __future__ import annotations

from dataclasses import dataclass

from conserved.alarm import MEANT, Alarm


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFinding:
    """One identity of a step that does not hold."""

    code: str
    """The problem in a word or two; `conserved.alarm.KINDS` says which arrow of a step it is about."""
    message: str
    """One sentence that says what happened, then what to do."""
    tensor: str = ""
    """The tensor it is about, the worst of several; empty if it is about the loop."""
    others: tuple[str, ...] = ()
    """Further tensors of which the same holds."""
    value: float = 1.0
    limit: float = 0.0
    step: int | None = None
    """The step it is about, if that is not the one under way."""
    ranks: tuple[int, ...] = ()
    """The processes it is about; empty if it is about this one."""
    certain: bool | None = None
    """Whether it can come from an error alone; None leaves that to its code."""

    def alarm(self, rank: int | None) -> Alarm:
        """Return the finding as an alarm."""
        return Alarm(
            step=self.step or 0,
            code=self.code,
            law=self.tensor,
            value=self.value,
            limit=self.limit,
            message=self.message,
            family=self.code,
            laws=(self.tensor, *self.others) if self.tensor else (),
            count=1 + len(self.others),
            tensor=self.tensor,
            rank=self.ranks[0] if self.ranks else rank,
            certain=self.code not in MEANT if self.certain is None else self.certain,
        )


def name_tensors(names: list[str], most: int = 3) -> str:
    """Return a few names and how many more there are."""
    shown = ", ".join(names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
