"""The result of an audit: a row for each identity, findings about single gradients, one verdict, and its summary."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch

from conserved.auditing.diagnosis import Diagnosis, Origin
from conserved.auditing.gradient_peaks import CorruptedEntry
from conserved.auditing.loss_scale import LossScale
from conserved.auditing.reference_comparison import ReferenceComparison
from conserved.auditing.sensitivity import STATED, Sensitivity, in_percent
from conserved.auditing.softmax_gauge import Gauge
from conserved.auditing.tested_parameters import AuditCoverage, percent
from conserved.laws import Dropped
from conserved.laws.identities import residual_evidence
from conserved.layout import Disagreement
from conserved.output import html
from conserved.output.lines import counted
from conserved.plain_data import record_of
from conserved.verdict import Evidence, Status, Verdict

BLIND = (
    "Identities do not see: a wrong factor on all gradients (loss scale, accumulation); what no law spans "
    "(unclaimed parameters, GELU and SiLU networks); an error shared by queries and keys, such as a mask or "
    "softmax term wrong in both (conserved.gauge sees those). audit(model, closure=…, reference=True) sees all of "
    "them; ranks that disagree are seen by conserved.check_replicas."
)
"""Printed with every clean result."""

LEAST = 0.5
"""Share of the trained entries that must be tested for an audit to be `ok`."""

_SOURCES = {
    "given": "as given",
    "stored": "as stored",
    "bits": "as the bits of the gradients show",
    "products": "as products in single precision may round their factors here, to TF32 for example",
}
"""Words for how the precision of a pass is known."""

_SHOWN = 12
"""Failures that a summary lists."""

Trouble = Literal["missing", "not finite", "zero"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One gradient identity: its residual, the limit that rounding explains, and likely causes of a failure."""

    name: str
    family: str
    parameters: tuple[str, ...]
    part: str
    residual: float
    tolerance: float
    status: Status
    checked: bool = True
    """Whether a gradient reached the identity. Without one it tests nothing."""
    source: str = "typed"
    """How the law was obtained: "typed", "probed" or "assumed"; see `conserved.Symmetry`."""
    where: tuple[str, ...] = ()
    """The rows of every parameter that take part, in words."""
    suggests: tuple[str, ...] = ()

    @property
    def evidence(self) -> Evidence:
        """The residual against its tolerance."""
        return residual_evidence(self.name, self.residual, self.tolerance)

    @property
    def ok(self) -> bool:
        """Whether the identity stands, or could not be put to the test because no gradient reached it."""
        return not self.failed

    @property
    def failed(self) -> bool:
        """Whether the residual is more than rounding and a norm's ε explain."""
        return self.status is Status.REFUTED

    @property
    def excess(self) -> float:
        """The residual in units of its limit; infinite if it is not a number."""
        return self.residual / self.tolerance if self.residual == self.residual else float("inf")

    def record(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        names = "name family parameters part residual tolerance ok status source where suggests"
        return record_of(self, names)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientFinding:
    """A gradient of one parameter that is missing, not finite or zero."""

    parameter: str
    trouble: Trouble

    @property
    def matters(self) -> bool:
        """Whether it keeps the pass from being called right; a gradient of zeros alone does not."""
        return self.trouble != "zero"

    def __str__(self) -> str:
        return {
            "missing": f"{self.parameter} is trainable and has no gradient",
            "not finite": f"the gradient of {self.parameter} is not finite",
            "zero": f"the gradient of {self.parameter} is zero",
        }[self.trouble]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judgement:
    """The results of judging one backward pass; `Audit` documents the fields."""

    verdict: Verdict
    failures: tuple[Row, ...]
    left_open: tuple[Row, ...]
    worst: float
    others: Callable[[], Iterable[Row]]
    """A function that makes the rows that did not fail. It runs on request, since few audits are read in full."""
    tested: int
    by_family: Callable[[], Mapping[str, float]]
    covers: Callable[[], AuditCoverage]
    """A function that computes the coverage on request."""
    findings: tuple[GradientFinding, ...]
    unclaimed: tuple[str, ...]
    dropped: tuple[Dropped, ...]
    unknown: Mapping[str, int]
    gauge: Gauge | None
    precision: torch.dtype
    known: Literal["given", "stored", "bits", "products"]
    ranks: int
    moved: float | None
    moved_bytes: int = 0
    disagreements: tuple[Disagreement, ...] = ()
    changed: bool = False
    """Whether gradients are not those of the outputs alone: clipped by value, or with a penalty on the weights."""
    clipped: float | None = None
    """The value that gradients were clipped at, if they look as if they were."""
    sensitivity: Sensitivity | None = None
    diagnoses: Mapping[str, Diagnosis] = field(default_factory=dict)
    comparison: ReferenceComparison | None = None
    scale: LossScale | None = None
    corrupted: tuple[CorruptedEntry, ...] = ()


def _there() -> bool:
    return True


class Audit:
    """The result of one audit: the gradient identities of a backward pass, worst first.

    `ok`: nothing is refuted, no gradient is missing, and at least half of the trained entries were tested, so that an
    error of 10 % would have been seen. `conclusive`: everything that could be tested was, to rounding. Only both
    together are green; `coverage` says for how much of the model, and `sensitivity` for which errors. `precision` is
    the coarsest that the pass was computed in, and `known` how that is known: given, stored (the type of the gradients
    themselves), read off the gradients' bits, or products, where PyTorch may round factors of float32 products (TF32).

    An audit from `audit(model, wait=False)` is judged when it is first read; `ready` says whether reading would wait.
    """

    def __init__(self, judge: Callable[[], Judgement], arrived: Callable[[], bool] = _there) -> None:
        """Create an audit whose numbers may still be on their way from the device; `conserved.audit` makes them.

        Args:
            judge: waits for the numbers and judges them; called once, when the audit is first read.
            arrived: whether the numbers are there, so that `judge` would not wait.
        """
        self._judge: Callable[[], Judgement] | None = judge
        self._arrived = arrived

    @cached_property
    def judgement(self) -> Judgement:
        """All results. The first access waits for the device and judges the pass."""
        assert self._judge is not None
        result = self._judge()
        # What these hold on to (numbers, parameters) is let go.
        self._judge, self._arrived = None, _there
        return result

    def settle(self) -> None:
        """Compute all results now, and release the laws and parameters they are computed from."""
        judgement, families, covered = self.judgement, self.by_family(), self.coverage
        others = self.rows[len(judgement.failures) :]
        known = replace(judgement, others=lambda: others, by_family=lambda: families, covers=lambda: covered)
        vars(self)["judgement"] = known

    @property
    def ready(self) -> bool:
        """Whether the results can be read without waiting for the device."""
        return self._judge is None or self._arrived()

    @property
    def verdict(self) -> Verdict:
        """The verdict on the whole pass."""
        return self.judgement.verdict

    @property
    def failures(self) -> tuple[Row, ...]:
        """The identities that do not hold, worst first."""
        return self.judgement.failures

    @property
    def left_open(self) -> tuple[Row, ...]:
        """Identities above their limit that do not mean a wrong gradient; `Row.suggests` says why for each."""
        return self.judgement.left_open

    @property
    def worst(self) -> float:
        """The largest relative residual; 0 if there is none."""
        return self.judgement.worst

    @property
    def tested(self) -> int:
        """The number of identities that a gradient reached."""
        return self.judgement.tested

    def by_family(self) -> Mapping[str, float]:
        """Return the largest residual in units of its rounding limit, by family of law."""
        return self.judgement.by_family()

    @property
    def findings(self) -> tuple[GradientFinding, ...]:
        """Single gradients that are missing, not finite or zero."""
        return self.judgement.findings

    @property
    def unclaimed(self) -> tuple[str, ...]:
        """Parameters that take part in no law."""
        return self.judgement.unclaimed

    @property
    def dropped(self) -> tuple[Dropped, ...]:
        """Laws of the architecture that this model does not keep, and why; they are not tested."""
        return self.judgement.dropped

    @property
    def unknown(self) -> Mapping[str, int]:
        """Operations without a typing rule that the model runs: laws through them are not known."""
        return self.judgement.unknown

    @property
    def sensitivity(self) -> Sensitivity | None:
        """The smallest error of a leg that would have been refuted, by law; None if gradients were not finite."""
        return self.judgement.sensitivity

    @property
    def diagnoses(self) -> Mapping[str, Diagnosis]:
        """By law above the floor, where its residual comes from; empty if the pass was not run again."""
        return self.judgement.diagnoses

    @property
    def comparison(self) -> ReferenceComparison | None:
        """The gradients beside those of the pass in reference form, if `audit` was asked for it."""
        return self.judgement.comparison

    @property
    def scale(self) -> LossScale | None:
        """The gradients beside the derivative of the loss along them, if `audit` had the loss and was asked for it."""
        return self.judgement.scale

    @property
    def corrupted(self) -> tuple[CorruptedEntry, ...]:
        """Entries of gradients that are outliers and that a replay of the pass does not reproduce."""
        return self.judgement.corrupted

    @property
    def gauge(self) -> Gauge | None:
        """The sums of key gradients, if the pass was watched by `conserved.gauge`."""
        return self.judgement.gauge

    @property
    def precision(self) -> torch.dtype:
        """The coarsest precision that the pass was computed in."""
        return self.judgement.precision

    @property
    def known(self) -> Literal["given", "stored", "bits", "products"]:
        """The source of the precision: the caller, the gradients' stored type, their bits, or products such as TF32."""
        return self.judgement.known

    @property
    def ranks(self) -> int:
        """Processes over which the parameters are sharded."""
        return self.judgement.ranks

    @property
    def disagreements(self) -> tuple[Disagreement, ...]:
        """Tensors that should be equal on all processes and are not; gradients come first."""
        return self.judgement.disagreements

    @property
    def moved_bytes(self) -> int:
        """Bytes this process sent to others so that identities of cut parameters could be put together."""
        return self.judgement.moved_bytes

    @property
    def moved(self) -> float | None:
        """The step size that explains all failures: the parameters moved by it after the gradient was taken."""
        return self.judgement.moved

    @property
    def changed(self) -> bool:
        """Whether gradients are not those of the outputs alone: clipped by value, or with a penalty on the weights."""
        return self.judgement.changed

    @property
    def clipped(self) -> float | None:
        """The value that gradients were clipped at, if they look as if they were."""
        return self.judgement.clipped

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """One row per identity: failures, identities that hold, identities that no gradient reached; worst first."""
        others = self.judgement.others()
        return (*self.failures, *sorted(others, key=lambda row: (not row.checked, -row.excess)))

    @cached_property
    def coverage(self) -> AuditCoverage:
        """The share of trained parameters and of modules that tested identities span, and the parts left out."""
        return self.judgement.covers()

    @property
    def ok(self) -> bool:
        """Whether nothing is refuted, no gradient is missing, and at least `LEAST` of the model was tested.

        An identity that a function breaks by its own backward pass was tested and does not hold: whether that is meant,
        its author knows.
        """
        if self.verdict == Status.REFUTED or any(item.matters for item in self.findings) or self._by_design:
            return False
        return self.coverage.parameters >= LEAST

    @property
    def reason(self) -> str:
        """Why the audit is not `ok`, in one sentence; empty if it is."""
        missing = [item.parameter for item in self.findings if item.matters]
        if self.verdict == Status.REFUTED:
            return self.verdict.message
        if missing:
            return f"The gradient of {_listed(tuple(missing))} is missing or not finite."
        if self._by_design:
            return (
                f"Not tested: {counted(len(self._by_design), 'identity', 'identities')}. {self._by_design[0].message}."
            )
        if self.coverage.parameters >= LEAST:
            return ""
        tested = percent(self.coverage.parameters)
        return f"{tested} of the trained entries were tested to {percent(STATED)} or better; ok needs {percent(LEAST)}."

    @property
    def _by_design(self) -> list[Diagnosis]:
        """The diagnoses of identities that the own backward pass of a function breaks."""
        return [diagnosis for diagnosis in self.diagnoses.values() if diagnosis.origin is Origin.DESIGN]

    @property
    def conclusive(self) -> bool:
        """Whether every identity that can be tested was tested and holds to rounding."""
        return self.verdict.holds

    @property
    def badge(self) -> str:
        """The verdict, the share it covers and to what size, in a few words.

        For instance "verified, 94 % of parameters (3 % of directions), errors above 2 %".
        """
        if not self.conclusive:
            return self.verdict.status.value
        text = f"{self.verdict.status.value}, {self.coverage.percent} of parameters"
        text += f" ({percent(self.coverage.directions)} of directions)"
        seen = self.sensitivity
        return (
            text
            if seen is None or not math.isfinite(seen.typical)
            else f"{text}, errors above {in_percent(seen.typical)}"
        )

    def __getitem__(self, name: str) -> Row:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(
            f"Expected the name of an identity, got {name!r}, which is none of the {len(self.rows)} audited. Read "
            "the names from `rows`."
        )

    def record(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        fields = self.verdict.record() | record_of(
            self,
            "ok reason conclusive badge coverage sensitivity comparison scale unknown worst ranks moved_bytes moved "
            "rows",
        )
        fields |= {"precision": _named(self.precision), "precision_known": self.known, "not_seen": BLIND}
        return fields | record_of(self, "findings unclaimed dropped")

    def summary(self) -> str:
        """Return the verdict, failures with likely causes, findings, and the errors that no audit sees."""
        checked = sum(row.checked for row in self.rows)
        known = _SOURCES[self.known]
        where = f" over {self.ranks} processes ({_bytes(self.moved_bytes)} sent by each)" if self.ranks > 1 else ""
        lines = [f"{self.verdict.status.value.upper()}: {self.verdict.message}"]
        lines.append(
            f"{checked:,} of {len(self.rows):,} identities tested{where} in {_named(self.precision)} ({known}); "
            f"largest residual {self.worst:.2g}"
        )
        for row in self.failures[:_SHOWN]:
            lines.append(f"  {row.name}: residual {row.residual:.2g}, rounding explains {row.tolerance:.1g}")
            lines.append(f"    between {_listed(row.where or row.parameters)}")
            lines += [f"    {text}" for text in row.suggests]
        lines += _more(self.failures)
        for row in self.left_open[:_SHOWN]:
            why = "; ε may explain it" if "up to" in self.verdict.message else ""
            lines.append(f"  {row.name}: residual {row.residual:.2g}, over {row.tolerance:.1g}{why}")
        lines += _more(self.left_open, " that ε may explain")
        lines += [*(f"  {item}" for item in self.findings[:_SHOWN]), *_more(self.findings)]
        if self.dropped:
            first = f"{self.dropped[0].name}: {self.dropped[0].reason}"
            lost = counted(len(self.dropped), "law")
            lines.append(f"Not tested, because this model does not keep them: {lost} ({first}).")
        if self.unclaimed:
            lines.append(f"Nothing is claimed about {counted(len(self.unclaimed), 'parameter')}.")
        lines += self.coverage.lines()
        if self.sensitivity is not None and (self.sensitivity.laws or self.sensitivity.sums):
            text = str(self.sensitivity)
            lines.append(f"{text[0].upper()}{text[1:]}.")
        lines += [str(item) for item in (self.comparison, self.scale) if item is not None]
        if self.verdict != Status.REFUTED and self.reason:
            lines.append(f"Not ok: {self.reason}")
        if self.ok:
            lines.append(BLIND)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return the verdict and the identities, worst first, for notebooks."""
        worst = self.failures[:_SHOWN] or self.rows[:5]
        heads = ("identity", "residual", "rounding explains", *(["where to look"] if self.failures else []))
        listed = [
            (
                row.name,
                f"{row.residual:.2g}",
                f"{row.tolerance:.1g}",
                *(["; ".join(row.suggests)] if row.failed else []),
            )
            for row in worst
        ]
        parts = [html.badge(self.verdict, self.badge), html.paragraph(" ".join(self.coverage.lines()))]
        parts += [*(html.paragraph(str(item)) for item in self.findings[:_SHOWN])]
        if listed:
            parts.append(html.table(heads, listed, numbers=(1, 2), wraps=3))
        if len(self.rows) > len(worst):
            rest = len(self.rows) - len(worst)
            parts.append(html.paragraph(f"… and {rest:,} more identities, none further off", quiet=True))
        return html.panel(*parts, html.paragraph(BLIND, quiet=True) if self.ok else "")

    def __repr__(self) -> str:
        text = f"{self.badge}, {len(self.rows)} identities, worst {self.worst:.2g}"
        return f"<Audit: {text}>" if self.ok or self.failures else f"<Audit: {text}; not ok: {self.reason}>"

    def __str__(self) -> str:
        return self.summary()


def _named(precision: torch.dtype) -> str:
    return str(precision).removeprefix("torch.")


def _bytes(count: int) -> str:
    """Format a number of bytes in the largest unit that fits."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"


def _listed(names: tuple[str, ...]) -> str:
    return " and ".join(names) if len(names) <= 3 else f"{names[0]}, {names[1]} and {len(names) - 2} more"


def _more(items: Sequence[object], noun: str = "") -> list[str]:
    """Return a line with the number of items that a summary omits; empty if it omits none."""
    return [f"  … and {len(items) - _SHOWN:,} more{noun}"] if len(items) > _SHOWN else []
