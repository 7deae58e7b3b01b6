"""Did the update land? What of an optimizer's step is lost because parameters are stored in few bits.

A bfloat16 weight moves in steps of 1/128 to 1/256 of itself. An update smaller than half of that changes nothing, step
after step, and no loss or gradient shows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from conserved.output.result import PrintableResult
from conserved.plain_data import record_of
from conserved.symmetry.view import local
from conserved.verdict import Evidence, Status, Verdict

LEAST = 0.5
"""The share of entries with a gradient that should have moved for an update to count as landed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LandedEntries:
    """One parameter: how many entries had a gradient, and how many of those changed in the step."""

    name: str
    driven: int
    moved: int

    @property
    def share(self) -> float:
        """The share of driven entries that moved; 1 if no entry had a gradient."""
        return self.moved / self.driven if self.driven else 1.0

    def record(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return record_of(self, "name driven moved share")


@dataclass(kw_only=True, eq=False, repr=False)
class Landing(PrintableResult):
    """The parameters that changed inside the `with` block; read it afterwards."""

    least: float = LEAST
    rows: tuple[LandedEntries, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether in every parameter enough of the driven entries moved."""
        return self.verdict.holds

    @property
    def worst(self) -> float:
        """The smallest share that moved."""
        return self.rows[0].share if self.rows else 1.0

    @property
    def verdict(self) -> Verdict:
        """One verdict on all parameters."""
        driven = [row for row in self.rows if row.driven]
        if not driven:
            return Verdict(status=Status.INCONCLUSIVE, message="No parameter had a gradient when the step was taken.")
        lost = [row for row in driven if row.share < self.least]
        evidence = tuple(
            Evidence(what=f"share of {row.name} that moved", value=row.share, limit=self.least, samples=row.driven)
            for row in (lost or driven[:1])
        )
        if lost:
            message = (
                f"The update did not land in {len(lost)} of {len(driven)} parameters: it is smaller than the spacing "
                "of their stored values. Keep master weights in float32, round stochastically, or raise the step size."
            )
            return Verdict(status=Status.REFUTED, message=message, evidence=evidence)
        message = f"The update landed in all {len(driven)} parameters that had a gradient."
        return Verdict(status=Status.VERIFIED, message=message, evidence=evidence)

    def summary(self) -> str:
        """Return the verdict with its evidence."""
        return str(self.verdict)

    def record(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return self.verdict.record() | record_of(self, "worst rows")

    def __repr__(self) -> str:
        return f"<Landing: {self.verdict.status.value}, {len(self.rows)} parameters, least share {self.worst:.2g}>"


@contextmanager
def check_update(model: nn.Module, *, least: float = LEAST) -> Iterator[Landing]:
    """Watch one optimizer step: did the parameters that have a gradient change?

        with conserved.check_update(model) as update:
            optimizer.step()
        assert update.ok

    A copy of the trainable parameters is held inside. Of a sharded parameter this process sees its own part.

    Args:
        model: the model, with gradients on its parameters when the block is entered.
        least: the smallest share of a parameter's entries with a nonzero gradient that must change for the update to
            count as landed.

    Yields:
        A `Landing`, filled in at the end of the block: `.ok`, `.rows`, `.verdict`.

    Raises:
        TypeError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"Expected a torch.nn.Module, got {type(model).__name__}. Pass the model whose step is watched."
        )
    landing = Landing(least=least)
    # Which entries have a gradient is noted before the step, which may clear it.
    watched = {
        name: (p, local(p.detach()).clone(), local(p.grad.detach()) != 0)
        for name, p in model.named_parameters()
        if p.requires_grad and p.grad is not None
    }
    yield landing
    counts = [
        torch.stack((driven.sum(), (driven & (local(p.detach()) != before)).sum()))
        for p, before, driven in watched.values()
    ]
    numbers = [count.tolist() for count in counts]
    rows = [
        LandedEntries(name=n, driven=driven, moved=moved) for n, (driven, moved) in zip(watched, numbers, strict=True)
    ]
    landing.rows = tuple(sorted(rows, key=lambda row: row.share))
