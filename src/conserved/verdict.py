"""Verdicts: the status of a statement, how well it is known, and the evidence for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from html import escape
from typing import Any, ClassVar

from conserved.output.printable import printable


class Status(StrEnum):
    """The certainty of a statement."""

    PROVED = "proved"
    VERIFIED = "verified"
    REFUTED = "refuted"
    INCONCLUSIVE = "inconclusive"
    ANSWERED = "answered"
    """The status of a question whose answer the evidence supports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One computed figure: its name, its value, the limit it is held against, and the number of cases.

    `proof` marks an argument that leaves no room for rounding (a ball-arithmetic enclosure, an exact computation).
    """

    what: str
    value: float | int | str | None = None
    limit: float | int | str | None = None
    samples: int | None = None
    proof: bool = False

    def __str__(self) -> str:
        text = self.what
        if self.value is not None:
            text += f": {self.value:.3g}" if isinstance(self.value, float) else f": {self.value}"
        if self.limit is not None:
            text += f" (limit {self.limit:.3g})" if isinstance(self.limit, float) else f" (limit {self.limit})"
        if self.samples is not None:
            text += f", {self.samples} cases"
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """A small example that anyone can recompute by hand: its data, the stated result and the actual result.

    `numpy` is the same in a few lines of Python, which fail if the statement held after all.
    """

    data: Mapping[str, Any]
    claimed: str
    found: str
    numpy: str = ""

    def __str__(self) -> str:
        values = ", ".join(f"{key} = {value}" for key, value in self.data.items())
        return f"{values}: claimed {self.claimed}, found {self.found}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Verdict:
    """A status with its evidence, a sentence that explains it, and a witness if it is a refutation.

    A verdict equals its status, `verdict == Verdict.REFUTED`, and so every verdict of that status; compare `record()`
    to tell them apart. `PROVED` is refused without a proof among the evidence.
    `scope` says for which sizes it is proved ("all sizes", "at d = 3 and 4 neurons"). `parts` are the verdicts on the
    single statements that one on many is made of, by name.
    """

    PROVED: ClassVar = Status.PROVED
    VERIFIED: ClassVar = Status.VERIFIED
    REFUTED: ClassVar = Status.REFUTED
    INCONCLUSIVE: ClassVar = Status.INCONCLUSIVE
    ANSWERED: ClassVar = Status.ANSWERED

    status: Status
    message: str
    evidence: tuple[Evidence, ...] = ()
    witness: Witness | None = field(default=None)
    parts: Mapping[str, Verdict] = field(default_factory=dict)
    scope: str = ""

    def __post_init__(self) -> None:
        if not self.evidence and self.status is not Status.INCONCLUSIVE:
            raise ValueError(
                f"Expected evidence for a verdict of {self.status.value}, got none. Pass what was measured."
            )
        if self.status is Status.PROVED and not any(item.proof for item in self.evidence):
            raise ValueError("Expected evidence that is a proof for PROVED, got floating-point evidence. Use VERIFIED.")

    @property
    def holds(self) -> bool:
        """Whether the statement stands: proved or verified."""
        return self.status in (Status.PROVED, Status.VERIFIED)

    @property
    def heading(self) -> str:
        """The status in capitals, with the scope."""
        return f"{self.status.value.upper()} ({self.scope})" if self.scope else self.status.value.upper()

    def record(self) -> dict[str, Any]:
        """Return whether it holds, its status and its message, as plain data for JSON."""
        return {"ok": self.holds, "status": self.status.value, "message": self.message}

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Status):
            return self.status is other
        if isinstance(other, Verdict):
            return self.status is other.status
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self.status)

    def __bool__(self) -> bool:
        raise TypeError(
            "Expected a comparison, got a bare bool: a verdict has five outcomes. Ask for .holds, or compare "
            "with Verdict.REFUTED and so on."
        )

    def __repr__(self) -> str:
        parts = f", {len(self.parts)} parts" if self.parts else ""
        return f"<Verdict: {self.status.value}, {printable(self.message)}{parts}>"

    def _repr_html_(self) -> str:
        return f'<pre style="background:none">{escape(str(self))}</pre>'

    def __str__(self) -> str:
        lines = [f"{self.heading}: {self.message}", *(f"  {item}" for item in self.evidence)]
        lines = lines if self.witness is None else [*lines, f"  witness: {self.witness}"]
        return "\n".join(printable(line, lines=True) for line in lines)
