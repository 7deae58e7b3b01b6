"""An alarm: what every monitor tells people and sinks when something should be looked at."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

STEP_KINDS = {
    "stale gradient": "loop",
    "cleared gradient": "loop",
    "used twice": "loop",
    "changed gradient": "loop",
    "rescaled gradient": "loop",
    "shared gradient": "loop",
    "clipped while scaled": "loop",
    "scaled gradient": "loop",
    "not held": "loop",
    "untied": "loop",
    "mode": "loop",
    "autocast": "precision",
    "switch": "precision",
    "converted": "precision",
    "swallowed": "precision",
    "did not land": "update",
    "not the rule's": "update",
    "something else wrote": "update",
    "frozen moved": "update",
    "bits changed": "hardware",
    "no step": "loop",
    "state lost": "loop",
    "state written": "loop",
    "twice": "loop",
    "not restored": "loop",
    "rate": "loop",
    "average": "loop",
    "no gradient": "loop",
    "thrown away": "loop",
    "no effect": "loop",
    "probabilities": "loop",
    "labels": "loop",
    "broadcast": "loop",
    "input written": "loop",
    "not registered": "loop",
    "stuck": "loop",
    "same data": "loop",
    "statistics": "loop",
    "underflow": "precision",
    "norm": "gradient",
    "zero gradient": "gradient",
}
"""By the code of a finding about a step that needs no law, the arrow of the step that it is about."""

MEANT = frozenset(STEP_KINDS) - {
    "stale gradient",
    "cleared gradient",
    "shared gradient",
    "clipped while scaled",
    "scaled gradient",
    "did not land",
    "not the rule's",
    "bits changed",
    "not restored",
}
"""Codes of findings that a correct program may give on purpose: a constraint, a restart, a frozen part, a penalty.

They are statements and raise no alarm, unless the finding itself says that it can come from an error alone.
"""

STEP_CODES = frozenset(STEP_KINDS) - {"norm"}
"""Codes of findings that explain what an account of laws leaves over in the same step."""

KINDS = {
    **STEP_KINDS,
    "residual": "update",
    "leak": "update",
    "hardware": "hardware",
    "precision": "precision",
    "replicas": "replica",
    "order": "loop",
    "stale": "loop",
    "replaced": "loop",
}
"""By the code of an alarm, the arrow of a step that it is about; all others are about the gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A finding that a person should look at: the law, the step, the value and the limit it exceeds.

    One defect is one alarm: alarms of one code and one family of laws are merged, with the first step, the largest
    value, every law, and how often it was raised.
    """

    step: int
    """The first step in which it was raised."""
    code: str
    law: str
    """The law, or the series of readings, that it is about; the worst of several."""
    value: float
    limit: float
    message: str
    family: str = ""
    """The family of its laws."""
    laws: tuple[str, ...] = ()
    """All laws it was raised for, in the order they came up; empty for one."""
    count: int = 1
    """How many laws in how many steps raised it, added up."""
    last: int = 0
    """The last step in which it was raised; 0 if that is the first."""
    tensor: str = ""
    """The tensor it is about, where it is about one."""
    rank: int | None = None
    """The process it is about; None outside a distributed run."""
    headline: str = ""
    """The event and its tensors, where the first sentence of the message does not name them."""
    certain: bool = True
    """Whether it can come from an error alone. What a program may mean is a statement, and no alarm."""

    @property
    def kind(self) -> str:
        """The arrow of a step that is wrong: "gradient", "update", "replica", "precision", "hardware" or "loop"."""
        return KINDS.get(self.code, "gradient")

    @property
    def excess(self) -> float:
        """The value over its limit."""
        return self.value / self.limit if self.limit and self.value == self.value else float("inf")

    @property
    def text(self) -> str:
        """The message, and which other laws it holds for."""
        others = tuple(name for name in self.laws if name != self.law)
        if not others or (self.tensor and others[0] in self.message):
            # Messages about a step name a few tensors themselves.
            return self.message
        if self.tensor:
            return f"{self.message} The same in {_join_names(others)}."
        laws = "law" if len(others) == 1 else "laws"
        return f"{self.message} The same in {len(others)} other {laws}: {_join_names(others)}."

    def lines(self) -> tuple[str, ...]:
        """Return what a terminal shows: what happened, the kind of alarm with its step and process, and evidence."""
        first, _, rest = _SENTENCES.sub("\n", self.message, count=1).partition("\n")
        # The headline names the tensors.
        evidence = _BETWEEN.sub("", self.message) if self.headline else rest
        laws = "" if self.tensor or not self.law else f", {self.law}"
        laws += f" and {len(self.laws) - 1} more" if laws and len(self.laws) > 1 else ""
        rank = "" if self.rank is None else f", rank {self.rank}"
        shown = (_shorten(self.headline or first, _WIDTH), f"{self.kind}, step {self.step}{rank}{laws}")
        return (*shown, _shorten(evidence, _WIDTH)) if evidence else shown

    def __str__(self) -> str:
        last = max(self.last, self.step)
        when = f"step {self.step}" if last == self.step else f"steps {self.step} to {last}"
        return f"{when}: {self.text}"

    def merged(self, other: Alarm) -> Alarm:
        """Return two alarms of one kind as one.

        Args:
            other: a later alarm of the same code and family.

        Returns:
            An alarm with the steps, laws and counts of both and the message of the worse.
        """
        worse = other if other.excess > self.excess else self
        laws = dict.fromkeys((*(self.laws or (self.law,)), *(other.laws or (other.law,))))
        return replace(
            worse,
            step=min(self.step, other.step),
            last=max(self.last, self.step, other.last, other.step),
            laws=tuple(laws),
            count=self.count + other.count,
            certain=self.certain or other.certain,
        )


def group_alarms(alarms: Iterable[Alarm]) -> tuple[Alarm, ...]:
    """Return alarms of one code and one family as one, in the order they were first raised."""
    groups: dict[tuple[str, str], Alarm] = {}
    for alarm in alarms:
        key = (alarm.code, alarm.family or alarm.law)
        groups[key] = groups[key].merged(alarm) if key in groups else alarm
    return tuple(groups.values())


_WIDTH = 240
"""Characters of a line on a terminal; the report has the whole text."""

_SENTENCES = re.compile(r"(?<=[.?!]) (?=[A-Z])")
"""The gap between two sentences; names of tensors have dots, and no space behind them."""


_BETWEEN = re.compile(r" It stands between .*?\.(?= [A-Z]|$)")


def _shorten(text: str, width: int) -> str:
    """Return as many sentences of a text as fit into a line, or the beginning of the first."""
    shown = ""
    for sentence in _SENTENCES.split(text):
        if len(shown) + len(sentence) >= width:
            break
        shown = f"{shown} {sentence}".strip()
    return shown or f"{text[: width - 2].rstrip()} …"


def _join_names(names: tuple[str, ...]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
