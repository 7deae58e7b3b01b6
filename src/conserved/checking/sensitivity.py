"""The smallest error of a gradient that a check would have seen, as a size.

A test along a random direction u sees an error E of a gradient G if |⟨E, u⟩| exceeds its limit. For an error spread
over all entries that is about ‖E∘u‖, so the limit over ‖G∘u‖ is the relative error that is seen. One that sits in a
single row of n is seen from √n times that on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from conserved.checking.gradient_test import GradientTest, Method
from conserved.plain_data import record_of


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSensitivity:
    """Relative errors of one gradient below which nothing would have been seen.

    Attributes:
        share: of a wrong factor, or of an error spread over all entries, whichever is seen first.
        row: of an error in a single row, relative to that row.
        rows: the number of rows.
    """

    share: float
    row: float
    rows: int

    def words(self, name: str) -> str:
        """Say which errors of a gradient would not have been seen.

        Args:
            name: the name of the input.
        """
        if not math.isfinite(self.share):
            return f"the size of an error of d{name} that would have been seen is not known"
        row = f" (below {percent(self.row)} in one of {self.rows:,} rows)" if self.rows > 1 else ""
        return f"an error below {percent(self.share)} of d{name}{row} would not have been seen"

    def record(self) -> dict[str, Any]:
        """Return plain data; sizes that are not known are None."""
        finite = {name: value if math.isfinite(value) else None for name, value in record_of(self, "share row").items()}
        return finite | {"rows": self.rows}

    def __str__(self) -> str:
        return percent(self.share)


def sensitivity_of(name: str, tests: Sequence[GradientTest], rows: int) -> CheckSensitivity:
    """Combine the tests of one gradient.

    Args:
        name: the name of the input.
        tests: the tests its gradient took part in.
        rows: the number of its rows.
    """
    own_tests = [test for test in tests if test.gradients == (name,) and test.ok]
    # The form that was given is known as well as it agrees with the form that was tested.
    agreed = [test.smallest for test in own_tests if test.method is Method.RELATION and math.isfinite(test.smallest)]
    directional = [test for test in own_tests if test.method is Method.DERIVATIVE]
    factor = min((test.smallest for test in directional if test.sees_factor), default=math.inf)
    spread = min((test.smallest for test in directional if not test.sees_factor), default=math.inf)
    share = min(factor, spread) + (min(agreed) if agreed else 0.0)
    row = spread * math.sqrt(max(rows, 1)) + (max(agreed) if agreed else 0.0)
    return CheckSensitivity(share=share, row=max(row, share), rows=rows)


def shape_of(words: str) -> tuple[int, ...]:
    """Return the shape in the description of an input, such as `float32 4×8`."""
    shape = words.rpartition(" ")[2]
    return () if shape == "scalar" else tuple(int(size) for size in shape.split("×"))


def percent(share: float) -> str:
    """Return a share in per cent, or as a power of ten where it is small."""
    if not math.isfinite(share):
        return "unknown"
    if share >= 1:
        return f"{100 * share:,.0f} %"
    return f"{100 * share:.2g} %" if share >= 1e-4 else f"{share:.0e}"
