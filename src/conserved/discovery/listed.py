"""Which formulas a discovery lists: those read off the program and, where these are not all, those searched for.

A formula read off the program is believed no more than one that was searched for: it is listed if its rate of change
along gradient fields cancels at both points of the count. Whether listed laws agree with brackets too is then asked of
each of their gradients, at both points.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from conserved.discovery.fields import gradient_rows, one_of
from conserved.discovery.function import ParameterFunction
from conserved.discovery.inputs import to_device
from conserved.discovery.rank import Closure
from conserved.discovery.relations import EXACT, NEARLY
from conserved.discovery.span import Span
from conserved.inference.infer import recognize
from conserved.symmetry import Leg, Symmetry

_SAMPLES = 32
"""Gradient fields at each point along which a formula read off the program must not change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedFormulas:
    """The formulas of a discovery."""

    laws: tuple[Symmetry, ...] = ()
    inferred: tuple[str, ...] = ()
    """Names of those that were read off the program."""
    explained: int = 0
    """Independent numbers among the exact laws."""
    approximate: int = 0
    """How many more there are with laws that hold up to something small."""
    overlap: float = 0.0
    """The largest part that the gradient of an exact law has along the directions counted, at either point."""


def list_laws(
    function: ParameterFunction,
    closures: Sequence[Closure],
    search: Callable[[], Iterable[Symmetry]],
    say: Callable[[str], None],
    *,
    infer: bool,
) -> ListedFormulas:
    """Return all formulas. `search` is asked for more only if those read off the program explain less than was
    counted.
    """
    points = [LawsAtPoint(function, closure) for closure in closures]
    inferred: list[Symmetry] = []
    if infer:
        say("reading laws off the program")
        inferred = _holding(read_off(function), points)
        say(f"{len(inferred)} laws read off hold {sum(symmetry.numbers for symmetry in inferred)} numbers")
    first = points[0]
    span = Span(function.size, function.device)
    span.add(first.directions([symmetry for symmetry in inferred if symmetry.exact]))
    laws = list(inferred)
    if span.rank < function.size - closures[0].rank:
        searched = list(search())
        added = _new(searched, inferred, span, first)
        # Laws of fewer parts than those read off (a scaling for each row of a head) are not listed beside the whole.
        if first.rank(searched) == span.rank:
            inferred, added = [], searched
        laws = [*inferred, *added]
    exact = [law for law in laws if law.exact]
    explained = span.rank
    span.add(first.directions([law for law in laws if not law.exact]))
    return ListedFormulas(
        laws=tuple(laws),
        inferred=tuple(symmetry.name for symmetry in inferred),
        explained=explained,
        approximate=span.rank - explained,
        overlap=max(point.overlap(exact) for point in points),
    )


def read_off(function: ParameterFunction) -> list[Symmetry]:
    """Return the laws that inference reads off the program; none where it cannot follow it."""
    sample = function.sample(torch.Generator().manual_seed(0), 1)
    x = to_device(one_of(sample, 0), function.device)
    try:
        law_set = recognize(function.evaluate, dict(function.start), x)
    except Exception:  # Whatever a program does that cannot be followed, its laws can still be searched for.
        return []
    order = list(function.start)
    laws = [upright(symmetry, order) for symmetry in law_set]
    return [replace(law, legs=tuple(sorted(law.legs, key=lambda leg: -leg.degree))) for law in laws]


def upright(symmetry: Symmetry, order: Sequence[str]) -> Symmetry:
    """Return the same law with a plus before the parameter that comes first."""
    first = min(symmetry.legs, key=lambda leg: order.index(leg.view.parameter))
    if first.degree > 0:
        return symmetry
    return replace(symmetry, legs=tuple(leg.turned() for leg in symmetry.legs))


def gradients_of(
    symmetry: Symmetry, function: ParameterFunction, theta: Float[Tensor, " D"]
) -> Float[Tensor, "numbers D"]:
    """Return the gradients of a law's numbers."""

    def numbers(point: Tensor) -> Tensor:
        return symmetry.kind.coordinates(symmetry.law(function.split(point))).flatten()

    # One copy of θ for each number: the gradient of the sum over number k of copy k has all gradients as its rows.
    with torch.enable_grad():
        points = theta.detach().repeat(symmetry.numbers, 1).requires_grad_()
        (rows,) = torch.autograd.grad(torch.func.vmap(numbers)(points).trace(), points)
    return rows


class LawsAtPoint:
    """One of the points of a count: the gradients of laws there, each computed once."""

    def __init__(self, function: ParameterFunction, closure: Closure) -> None:
        self.function = function
        self.closure = closure
        self._known: dict[tuple[str, tuple[Leg, ...]], Tensor] = {}

    def gradients(self, symmetry: Symmetry) -> Float[Tensor, "numbers D"]:
        """Return the gradients of the numbers of a law."""
        key = (symmetry.kind.code, symmetry.legs)
        if key not in self._known:
            self._known[key] = gradients_of(symmetry, self.function, self.closure.theta)
        return self._known[key]

    def directions(
        self, symmetries: Sequence[Symmetry], scale: Float[Tensor, " D"] | None = None
    ) -> Float[Tensor, "numbers D"]:
        """Return gradients of laws, divided by a scale for each entry, as unit vectors.

        Those that vanish here (all legs are zero) are left out and not scaled up to a direction.
        """
        if not symmetries:
            return self.closure.theta.new_zeros(0, self.function.size)
        rows = torch.cat([self.gradients(symmetry) for symmetry in symmetries])
        rows = rows if scale is None else rows / scale
        lengths = torch.linalg.vector_norm(rows, dim=1)
        alive = lengths > 1e-14 * lengths.max()
        return rows[alive] / lengths[alive, None]

    def rank(self, symmetries: Sequence[Symmetry]) -> int:
        """Return independent numbers among those of exact laws."""
        span = Span(self.function.size, self.function.device)
        span.add(self.directions([symmetry for symmetry in symmetries if symmetry.exact]))
        return span.rank

    def overlap(self, exact: Sequence[Symmetry]) -> float:
        """Return the largest part that gradients of exact laws have along the directions counted.

        It is of the size of rounding if both are right.

        The laws come from gradients alone, or from the program, the span from brackets: a wrong derivative or an error
        of the basis shows.
        """
        # Entries of fields were multiplied by the scale before they were added to the span.
        rows = self.directions(exact, self.closure.sizes.scale)
        return float(self.closure.span.split(rows)[0].max()) if len(rows) else 0.0

    def fields(self) -> Float[Tensor, "samples D"]:
        """Return a few gradient fields."""
        theta = self.closure.theta
        samples = self.function.draw_many(theta, _SAMPLES, torch.Generator().manual_seed(1))
        return gradient_rows(self.function, theta, samples, _SAMPLES)


def _holding(symmetries: Sequence[Symmetry], points: Sequence[LawsAtPoint]) -> list[Symmetry]:
    """Return symmetries whose laws do not change along gradient fields at any of the points."""
    holding = list(symmetries)
    for point in points if holding else ():
        fields = point.fields()
        violations = [_violation(point.gradients(symmetry), fields) for symmetry in holding]
        holding = [
            symmetry if symmetry.exact else replace(symmetry, epsilon=max(symmetry.epsilon, violation))
            for symmetry, violation in zip(holding, violations, strict=True)
            if violation < (EXACT if symmetry.exact else 10 * NEARLY)
        ]
    return holding


def _violation(rows: Float[Tensor, "numbers D"], fields: Float[Tensor, "samples D"]) -> float:
    """Return the largest rate of change along fields, relative to its terms.

    Where terms are tiny on one sample (a saturated softmax) they are themselves rounding of larger numbers.
    """
    sizes = rows.abs() @ fields.abs().mT
    sizes = sizes + 1e-6 * sizes.amax(1, keepdim=True)
    rates = (rows @ fields.mT).abs()
    return float((rates / torch.where(sizes > 0, sizes, 1)).max()) if rates.numel() else 0.0


def _new(searched: list[Symmetry], inferred: Sequence[Symmetry], span: Span, point: LawsAtPoint) -> list[Symmetry]:
    """Return those of the laws searched for that say more than those read off the program.

    The exact ones join the span.
    """
    names = {symmetry.name for symmetry in inferred}
    nearly = any(not symmetry.exact for symmetry in inferred)
    result = []
    for candidate in searched:
        if span.add(point.directions([candidate])) if candidate.exact else not nearly:
            block = f"{candidate.block}.searched" if candidate.block else "searched"
            result.append(replace(candidate, block=block) if candidate.name in names else candidate)
    return result
