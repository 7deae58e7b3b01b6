"""The result of running a program in float64 at random parameters: which inferred laws hold there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCheck:
    """At how many random points the identities of laws were tested on the program in float64."""

    points: int
    limit: float = 0.0
    """The largest relative residual that an identity was allowed."""
    reason: str = ""
    """Why there are no points, or fewer than usual."""
    refuted: Mapping[str, float] = field(default_factory=dict)
    """Laws that were inferred and failed, with their largest residual. Each is a defect of the inference."""
    one_size: Mapping[str, str] = field(default_factory=dict)
    """Laws that hold at the given sizes of the inputs only, with a size at which they fail. They are not listed."""
    decisions: str = ""
    """Reasons why another call of the program may take another path, in words."""
    residuals: Mapping[str, float] = field(default_factory=dict)
    """The largest relative residual of every law that was tested; of laws up to ε, with ε at zero."""

    def __bool__(self) -> bool:
        return self.points > 0

    def __str__(self) -> str:
        if not self.points:
            return f"not checked on the program in float64: {self.reason}"
        where = f"{self.points} random point{'s' if self.points > 1 else ''}"
        text = f"checked on the program in float64 at {where}, to {self.limit:g}"
        if self.refuted:
            text += f"; {len(self.refuted)} inferred laws failed and were left out"
        if self.one_size:
            text += f"; {len(self.one_size)} hold at one size of the inputs only and were left out"
        return f"{text} ({self.reason})" if self.reason else text

    @property
    def left_out(self) -> tuple[str, ...]:
        """The laws that are not listed because of this check."""
        return (*self.refuted, *self.one_size)

    def words(self, name: str) -> str:
        """Return why a law was left out."""
        if name in self.one_size:
            return f"it holds at the given sizes of the inputs only, and fails with {self.one_size[name]}"
        if self.decisions:
            return (
                f"it holds on one way of the program, and is off by {self.refuted[name]:.1e} on another; the way may "
                f"depend on {self.decisions}"
            )
        return (
            f"inferred, and left out: on the program in float64 its identity is off by {self.refuted[name]:.1e}. "
            "This is a defect of conserved's inference; please report it"
        )
