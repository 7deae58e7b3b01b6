"""Figure 1 of the paper: the level sets of a² − b², their two branches, and gradient descent along them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from conserved.output.figure import PALETTE, Figure, Finding, in_words, line, panels
from conserved_papers.lab.fits import exponent, fitted_finding, interval

_LEVELS = (0.5, 1.5, 2.5)
_REACH = 2.0


def figure1(result: Mapping[str, dict[str, Any]]) -> Figure | None:
    """Level sets, and the paths of the weights of f(x) = a b x for every step size."""
    if not result:
        return None
    documents = sorted(result.values(), key=lambda document: -document["rate"])
    data = [trace for level in _LEVELS for trace in _branches(level)]
    for color, document in zip(PALETTE, documents, strict=False):
        for number, path in enumerate(document["paths"]):
            a, b = zip(*path["points"], strict=True)
            name = f"τ = {document['rate']:g}"
            data.append(line(a, b, name=name, color=color, width=2, legend=number == 0, marks=len(a) < 20))
    rates = [document["rate"] for document in documents]
    changes = [[abs(path["law"][-1] - path["law"][0]) for path in document["paths"]] for document in documents]
    fitted = interval([exponent(rates, list(column)) for column in zip(*changes, strict=True)])
    crossed = sum(any(value * path["law"][0] < 0 for value in path["law"]) for path in documents[-1]["paths"])
    findings = (
        fitted_finding("a² − b²: exponent of the drift in τ at fixed flow time", fitted, 1, 0.15),
        Finding(
            what=f"paths of {len(documents[-1]['paths'])} that left their branch at the smallest step",
            value=float(crossed),
            expected="0",
            holds=crossed == 0,
        ),
    )
    layout = panels(["a² − b² = c"], x="a", y="b", log=(False, False))
    layout["xaxis"] |= {"range": [-_REACH, _REACH]}
    layout["yaxis"] |= {"range": [-_REACH, _REACH], "scaleanchor": "x"}
    layout["height"] = 620
    return Figure(
        code="figure1",
        title="The level sets of a conservation law have several branches",
        caption=(
            "Grey: a² − b² = ±0.5, ±1.5, ±2.5, two branches each. Coloured: gradient descent on ½(ab − 1)² from six "
            "starts to the same flow time. The smaller the step, the closer a path keeps to its own branch."
        ),
        alt=in_words(findings),
        data=tuple(data),
        layout=layout,
        findings=findings,
    )


def _branches(level: float) -> list[dict[str, Any]]:
    across = [_REACH * (number / 40 - 1) for number in range(81)]
    outward = [math.sqrt(level + value * value) for value in across]
    inward = [-value for value in outward]
    pairs = ((outward, across), (inward, across), (across, outward), (across, inward))
    return [
        line(a, b, name="level set", color="#888888", width=1, opacity=0.7, legend=level == _LEVELS[0] and number == 0)
        for number, (a, b) in enumerate(pairs)
    ]
