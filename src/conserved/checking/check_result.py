"""The result of a check: every test by gradient, failures with location and meaning, untested parts, a verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from conserved.checking.gradient_test import GradientTest, Method
from conserved.checking.rounding_errors import NOTABLE, RoundingError
from conserved.checking.sensitivity import CheckSensitivity, percent, sensitivity_of, shape_of
from conserved.inference.probing.symmetry_search import Probe
from conserved.output import html
from conserved.output.lines import counted
from conserved.plain_data import record_of
from conserved.symmetry import Symmetry
from conserved.verdict import Evidence, Verdict

_SHOWN = 3


def _elsewhere(test: GradientTest) -> bool:
    """Return whether a test was made at inputs of another kind than the given ones."""
    return " inputs" in test.what.partition(" at ")[2] and " at the given inputs" not in test.what


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of checking one function's backward on one set of inputs.

    Attributes:
        function: name of the function.
        inputs: the floating-point inputs, each with precision and shape.
        device: where it ran.
        probed: the continuous symmetries found on the forward pass.
        tests: every test that was made.
        untested: by gradient, the tests that could not be made and why.
        notes: further observations, such as inputs that are overwritten.
        noise: by gradient, its own relative noise.
        reference: the more precise form that was tested, in words; empty if the function has none.
        errors: by gradient, its relative error against that form: how much of it is rounding.
        seconds: the time the check took.
    """

    function: str
    inputs: Mapping[str, str]
    device: str
    precision: str
    probed: Probe
    tests: tuple[GradientTest, ...]
    untested: Mapping[str, tuple[str, ...]]
    notes: tuple[str, ...]
    noise: Mapping[str, float]
    seconds: float
    reference: str = ""
    errors: Mapping[str, RoundingError] = field(default_factory=dict)

    @property
    def symmetries(self) -> tuple[Symmetry, ...]:
        """The continuous symmetries found on the forward pass; their legs are views of inputs and outputs."""
        return self.probed.symmetries

    @property
    def sensitivity(self) -> dict[str, CheckSensitivity]:
        """By gradient, the smallest error that would have been seen."""
        return {name: sensitivity_of(name, tests, self.rows[name]) for name, tests in self.tested.items()}

    @property
    def rows(self) -> dict[str, int]:
        """By gradient, the number of its rows: of indices along all axes but the last."""
        sizes = {name: shape_of(words) for name, words in self.inputs.items()}
        return {name: math.prod(shape[:-1]) for name, shape in sizes.items()}

    @property
    def tested(self) -> dict[str, tuple[GradientTest, ...]]:
        """The tests each gradient took part in."""
        return {name: tuple(test for test in self.tests if name in test.gradients) for name in self.inputs}

    @property
    def failures(self) -> tuple[GradientTest, ...]:
        """The tests that failed: identities, relations, derivatives; those at the given inputs, the clearest first."""
        order = list(Method)
        broken = [test for test in self.tests if not test.ok]
        return tuple(
            sorted(
                broken,
                key=lambda test: (order.index(test.method), _elsewhere(test), not test.meaning, -min(test.worst, 1e30)),
            )
        )

    @property
    def ok(self) -> bool:
        """Whether no test failed and every gradient took part in at least one test."""
        return not self.failures and all(self.tested.values())

    @property
    def conclusive(self) -> bool:
        """Whether a wrong gradient has been found, or a wrong factor would have been found in every gradient."""
        return bool(self.failures) or not self.blind

    @property
    def blind(self) -> tuple[str, ...]:
        """Gradients in which a wrong constant factor would not have been seen."""
        return tuple(
            name for name, tests in self.tested.items() if not any(test.sees_factor and test.ok for test in tests)
        )

    @property
    def suspects(self) -> tuple[str, ...]:
        """The gradients that failures point at: each that fails a test alone, or else all of a failed test."""
        own = {test.gradients[0] for test in self.failures if len(test.gradients) == 1}
        every = {name for test in self.failures for name in test.gradients}
        return tuple(name for name in self.inputs if name in (own or every))

    @property
    def verdict(self) -> Verdict:
        """REFUTED if a test failed, VERIFIED if every gradient was tested including its factor, else INCONCLUSIVE."""
        evidence = tuple(
            Evidence(what=f"{_gradients(test)}: {test.what}", value=test.residual, limit=test.limit)
            for test in (self.failures or self._closest())[:8]
        )
        if self.failures:
            which = ", ".join(f"d{name}" for name in self.suspects)
            message = f"The backward of {self.function} is wrong: {which} fail" + (
                "s." if len(self.suspects) == 1 else "."
            )
            return Verdict(status=Verdict.REFUTED, message=message, evidence=evidence)
        if not self.tests:
            message = f"Nothing about the backward of {self.function} could be tested."
            return Verdict(status=Verdict.INCONCLUSIVE, message=message)
        summary = f"{self._size} hold to the noise of {self.precision}"
        if self.blind or not self.ok:
            which = ", ".join(f"d{name}" for name in self.blind)
            message = f"{summary}; a wrong factor in {which} would not have been seen."
            return Verdict(status=Verdict.INCONCLUSIVE, message=message, evidence=evidence)
        return Verdict(status=Verdict.VERIFIED, message=f"{summary}; {self.unseen}.", evidence=evidence)

    @property
    def _size(self) -> str:
        return f"{counted(len(self.tests), 'test')} on {counted(len(self.inputs), 'gradient')}"

    @property
    def unseen(self) -> str:
        """A phrase for the largest error that would not have been detected, over all gradients."""
        known = {name: size for name, size in self.sensitivity.items() if self.tested[name]}
        if not known:
            return "nothing would have been seen"
        name = max(known, key=lambda each: known[each].share)
        return known[name].words(name)

    @property
    def precision_notes(self) -> tuple[str, ...]:
        """Sentences on gradients that are mostly rounding in this form."""
        return tuple(
            f"precision: d{name} in {self.precision} differs from {error.reference} by {error}: the backward is right, "
            "and this much of its result is rounding"
            for name, error in self.errors.items()
            if error.error > NOTABLE and name not in self.suspects
        )

    def _closest(self) -> tuple[GradientTest, ...]:
        return tuple(sorted(self.tests, key=lambda test: -test.worst)[:1])

    def record(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        fields = record_of(self, "function inputs device precision ok conclusive verdict badge failures tests")
        fields["symmetries"] = [self.probed.describe(symmetry) for symmetry in self.symmetries]
        return fields | record_of(self, "untested notes noise seconds reference errors precision_notes sensitivity")

    def __str__(self) -> str:
        verdict = self.verdict
        lines = [f"{verdict.status.value.upper()}: {verdict.message}"]
        shown = ", ".join(f"{name} {kind}" for name, kind in self.inputs.items())
        known = counted(len(self.symmetries), "symmetry", "symmetries")
        lines.append(f"  {shown} on {self.device}; {known} of the forward")
        for name in self.suspects or ():
            lines += self._describe_failures(name)
        lines.append("  gradient   identities        relations         derivatives          own noise  unseen below")
        for name, tests in self.tested.items():
            cells = [_cell([test for test in tests if test.method is method]) for method in list(Method)[1:]]
            lines.append(
                f"  d{name:<9} "
                + " ".join(f"{cell:<17}" for cell in cells)
                + f" {self.noise.get(name, 0.0):<9.0e}  {self.sensitivity[name]}"
            )
        for name, reasons in self.untested.items():
            lines += [f"  untested, d{name}: {reason}" for reason in reasons[:_SHOWN]]
        lines += [f"  {note}" for note in self.precision_notes]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def summary(self) -> str:
        """Return the verdict, failures and the tests of every gradient as text."""
        return str(self)

    def __repr__(self) -> str:
        worst = max((test.worst for test in self.tests), default=0.0)
        return f"<Check of {self.function}: {self.badge}, {self._size}, worst {worst:.2g} of its limit>"

    @property
    def badge(self) -> str:
        """The verdict in a few words, with the size of errors from which on they would have been seen."""
        status = self.verdict.status.value
        sizes = [size.share for name, size in self.sensitivity.items() if self.tested[name]]
        if self.failures or not sizes or not math.isfinite(max(sizes)):
            return status
        return f"{status}, errors above {percent(max(sizes))}"

    def _repr_html_(self) -> str:
        """Return the verdict, what fails and why, and the tests of every gradient, for notebooks."""
        methods = list(Method)[1:]
        rows = [
            [
                f"d{name}",
                *(_cell([t for t in tests if t.method is m]) for m in methods),
                f"{self.noise.get(name, 0):.0e}",
                str(self.sensitivity[name]),
            ]
            for name, tests in self.tested.items()
        ]
        table = html.table(("gradient", "identities", "relations", "derivatives", "own noise", "unseen below"), rows)
        failed = [html.preformat("\n".join(self._describe_failures(name))) for name in self.suspects]
        notes = [html.paragraph(note, quiet=True) for note in (*self.precision_notes, *self.notes)]
        return html.panel(html.badge(self.verdict), *failed, table, *notes)

    def _describe_failures(self, name: str) -> list[str]:
        every = [test for test in self.failures if name in test.gradients]
        own_tests = list({test.what: test for test in reversed(every)}.values())[::-1]
        located = next((test.where for test in own_tests if "each tile" in test.what), "")
        lines = [f"  d{name}:" + (f" wrong at {located}" if located else "")]
        for test in own_tests[:_SHOWN]:
            lines.append(f"    fails: {test.what}")
            lines.append(
                f"      off by {test.residual:.2g}, rounding explains {test.limit:.1g}; {test.where or 'everywhere'}"
            )
            if test.meaning:
                lines.append(f"      {test.meaning}")
        if len(own_tests) > _SHOWN:
            lines.append(f"    and {len(own_tests) - _SHOWN} more")
        return lines


def _gradients(test: GradientTest) -> str:
    return " and ".join(f"d{name}" for name in test.gradients)


def _cell(tests: list[GradientTest]) -> str:
    """Return how many tests hold, and the largest residual."""
    if not tests:
        return "–"
    good = sum(test.ok for test in tests)
    return f"{good}/{len(tests)} to {max(test.residual for test in tests):.0e}"
