"""`discover`: how many laws a function has, what they are, and whether those are all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from conserved.discovery.function import Loss, ParameterFunction, function_of
from conserved.discovery.inputs import Inputs, UnsuitableError
from conserved.discovery.listed import ListedFormulas, list_laws
from conserved.discovery.metric import Metric, in_metric
from conserved.discovery.phase_space import phase_space
from conserved.discovery.rank import LEAST_GAP, Closure, Progress, announcement, closure, refuse_too_large
from conserved.discovery.search import search
from conserved.inference import recognize
from conserved.laws import LawSet
from conserved.output import html
from conserved.output.lines import counted
from conserved.plain_data import record_of
from conserved.verdict import Evidence, Verdict

Dynamics = Literal["gradient", "heavy_ball"]
"""The dynamics that move the parameters."""

_TRUSTED = 1e-4
"""Relative distance from finite differences above which derivatives are rejected."""

_ORTHOGONAL = 1e-8
"""Share of a law's gradient in the span of gradient fields above which the law contradicts the count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """The laws of a function, and how well they are known.

    `count` is the number of independent laws; `laws` are the laws found as formulas, at random parameters.
    `unexplained` is the number of laws that exist and have no formula. `approximate` laws hold up to something small
    and are not part of the count. `inferred` names the laws that were read off the program; all other formulas were
    searched for in gradients. Both kinds were tried on gradients at two points, and against the brackets there.
    """

    parameters: int
    rank: int
    ranks: tuple[int, ...]
    depth: int
    gap: float
    laws: LawSet
    explained: int
    approximate: int
    verdict: Verdict
    inferred: tuple[str, ...] = ()

    @property
    def origin(self) -> str:
        """Where the formulas came from, in words; empty if there is none."""
        searched = len(self.laws) - len(self.inferred)
        if not self.inferred or not searched:
            return "" if not len(self.laws) else "searched for in gradients" if searched else "read off the program"
        return f"{len(self.inferred)} read off the program, {searched} searched for in gradients"

    @property
    def count(self) -> int:
        """Independent laws: D − rank."""
        return self.parameters - self.rank

    @property
    def unexplained(self) -> int:
        """The number of laws that exist and have no formula here."""
        return self.count - self.explained

    @property
    def complete(self) -> bool:
        """Whether the laws found are all there are."""
        return self.verdict.holds and self.explained == self.count

    def __repr__(self) -> str:
        share = "all found" if self.complete else f"{self.explained} found"
        size = f"{counted(self.count, 'law')} of {counted(self.parameters, 'parameter')}"
        return f"<Discovery: {size}, {share}; {self.verdict.status.value}>"

    def __str__(self) -> str:
        return self.summary()

    def summary(self) -> str:
        """Return the laws as a table, and the verdict on their number."""
        if not len(self.laws):
            return str(self.verdict)
        return "\n".join([self.laws.summary(), f"Formulas: {self.origin}.", "", str(self.verdict)])

    def _repr_html_(self) -> str:
        """Return the verdict, the ranks it rests on and the laws, for notebooks."""
        ranks = ", ".join(map(str, self.ranks))
        known = f"rank by depth of brackets: {ranks}; kept over dropped singular values: {self.gap:.1g}"
        parts = [html.badge(self.verdict), html.paragraph(known, quiet=True)]
        return html.panel(*parts, self.laws._repr_html_() if len(self.laws) else "")

    def latex(self) -> str:
        """Return the laws as a LaTeX table."""
        rows = [rf"  ${symmetry.latex}$ & {symmetry.numbers} \\" for symmetry in self.laws if symmetry.exact]
        head = [r"\begin{tabular}{lr}", r"  conserved quantity & numbers \\ \hline"]
        foot = [rf"  independent laws (of {self.parameters} parameters) & {self.count} \\", r"\end{tabular}"]
        return "\n".join([*head, *rows, r"  \hline", *foot])

    def record(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        fields = record_of(
            self, "parameters rank ranks count depth gap explained unexplained approximate complete origin"
        )
        fields |= {"verdict": self.verdict.status.value, "message": self.verdict.message}
        return fields | {"laws": [law.record() for law in self.laws.laws]}


@overload
def discover(
    f: nn.Module | Callable[..., Any],
    inputs: Inputs,
    *,
    loss: Loss = ...,
    depth: int | None = ...,
    seed: int = ...,
    device: torch.device | str | None = ...,
    params: Mapping[str, Tensor] | None = ...,
    count: Literal[True] = ...,
    forms: bool = ...,
    infer: bool = ...,
    progress: Progress | None = ...,
    class_axis: int = ...,
    metric: Metric | None = ...,
    dynamics: Dynamics = ...,
) -> Discovery: ...


@overload
def discover(
    f: nn.Module | Callable[..., Any],
    inputs: Inputs,
    *,
    loss: Loss = ...,
    seed: int = ...,
    device: torch.device | str | None = ...,
    params: Mapping[str, Tensor] | None = ...,
    count: Literal[False],
    progress: Progress | None = ...,
    class_axis: int = ...,
    metric: Metric | None = ...,
) -> LawSet: ...


def discover(
    f: nn.Module | Callable[..., Any],
    inputs: Inputs,
    *,
    loss: Loss = "any",
    depth: int | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    params: Mapping[str, Tensor] | None = None,
    count: bool = True,
    forms: bool = True,
    infer: bool = True,
    progress: Progress | None = None,
    class_axis: int = -1,
    metric: Metric | None = None,
    dynamics: Dynamics = "gradient",
) -> Discovery | LawSet:
    """Count the conservation laws of any differentiable function, and find them.

    Args:
        f: a module, or a callable f(params, x) with `params=` its tensors.
        inputs: draws one input from a generator, or is an example whose shapes and types are imitated; for several
            arguments a tuple of examples.
        loss: the space of output gradients: "any", "cross_entropy", or a function of (output, target).
        depth: the largest depth of nested brackets; by default until a further level brings nothing new.
        seed: the seed of all samples.
        device: the device to compute on.
        params: the tensors of a callable.
        count: False looks for formulas only, which needs a few gradients instead of a square matrix of the size of the
            parameters, so that layers of real width can be studied too.
        forms: False only counts.
        infer: where formulas come from first. True reads them off the program, tries them on gradients, and searches
            only for laws that are missing; False searches for all of them in gradients, knowing nothing of the program.
        progress: called with one line for every stage.
        class_axis: the axis of the outputs that cross-entropy runs over, for one input, without a batch: the last for
            (tokens, classes), 0 for (classes, positions).
        metric: the metric of parameters by name, for a flow −P∇L: a positive preconditioner, or the map u ↦ θ(u) to
            coordinates in which the flow is Euclidean. Laws are then functions of these coordinates.
        dynamics: "gradient" for gradient flow; "heavy_ball" for momentum with friction, whose laws are functions of
            time, parameters and velocities. These are counted, and known momenta are tried; formulas are not searched.

    Returns:
        A `Discovery`: the count, the laws and the verdict on both; with `count=False` the laws alone.

    Raises:
        UnsuitableError: the function cannot be differentiated as needed or is too large; the message says why.
    """
    if dynamics not in ("gradient", "heavy_ball"):
        raise UnsuitableError(f'Expected dynamics="gradient" or "heavy_ball", got {dynamics!r}. Pass one of them.')
    module = f if isinstance(f, nn.Module) and metric is None else None
    if metric is not None:
        f, params = in_metric(f, params, metric)
    if not count:
        return find_laws(
            f, inputs, loss=loss, seed=seed, device=device, params=params, progress=progress, class_axis=class_axis
        )
    say = progress or (lambda message: None)
    function = function_of(f, inputs, loss=loss, params=params, device=device, class_axis=class_axis)
    refuse_too_large(function.size, function.device)
    if progress is not None and (announced := announcement(function.size, function.device)):
        say(announced)
    generator = torch.Generator().manual_seed(seed)
    if dynamics == "heavy_ball":
        laws = recognize(module) if module is not None and infer and not callable(loss) else None
        return _heavy_ball(function, laws, generator, say)
    first = closure(function, depth=depth, generator=generator, progress=say, point="first point: ")
    reached = len(first.ranks) - 1
    second = closure(function, depth=reached, generator=generator, progress=say, point="second point: ")
    listed_laws = ListedFormulas()
    if forms and first.rank < function.size:
        listed_laws = list_laws(function, (first, second), lambda: search(function, generator, say), say, infer=infer)
    return Discovery(
        parameters=function.size,
        rank=first.rank,
        ranks=first.ranks,
        depth=first.depth,
        gap=min(first.gap, second.gap),
        laws=LawSet(symmetries=listed_laws.laws, parameters=function.split(first.theta)),
        explained=listed_laws.explained,
        approximate=listed_laws.approximate,
        verdict=_verdict(function, first, second, listed_laws.explained, listed_laws.overlap, searched=forms),
        inferred=listed_laws.inferred,
    )


def _heavy_ball(
    function: ParameterFunction, laws: LawSet | None, generator: torch.Generator, say: Progress
) -> Discovery:
    """Count the laws of momentum at two states."""
    exact = None if laws is None else laws.select(lambda symmetry: symmetry.exact)
    first, second = (phase_space(function, exact, generator, say) for _ in range(2))
    count = first.size - first.rank
    evidence = (
        Evidence(what="rank by depth of brackets, first state", value=", ".join(map(str, first.ranks))),
        Evidence(what="rank by depth of brackets, second state", value=", ".join(map(str, second.ranks))),
        Evidence(what="kept over dropped singular values", value=min(first.gap, second.gap), limit=LEAST_GAP),
        Evidence(what="part of known momenta in the span", value=max(first.overlap, second.overlap), limit=_ORTHOGONAL),
    )
    sound = (
        first.rank == second.rank and min(first.gap, second.gap) >= LEAST_GAP and first.converged and second.converged
    )
    fits = max(first.overlap, second.overlap) <= _ORTHOGONAL and first.momenta <= count
    message = f"{count} independent laws of time, {function.size} parameters and their velocities"
    message += f", {first.momenta} of them momenta." if first.momenta else "."
    if not (sound and fits):
        message = "The two states, the gap or the known momenta do not agree; try another seed or a smaller instance."
    return Discovery(
        parameters=first.size,
        rank=first.rank,
        ranks=first.ranks,
        depth=len(first.ranks) - 1,
        gap=min(first.gap, second.gap),
        laws=LawSet(symmetries=(), parameters=dict(function.start)),
        explained=first.momenta,
        approximate=0,
        verdict=Verdict(
            status=Verdict.VERIFIED if sound and fits else Verdict.INCONCLUSIVE, message=message, evidence=evidence
        ),
    )


def find_laws(
    f: nn.Module | Callable[..., Any],
    inputs: Inputs,
    *,
    loss: Loss = "any",
    seed: int = 0,
    device: torch.device | str | None = None,
    params: Mapping[str, Tensor] | None = None,
    progress: Progress | None = None,
    class_axis: int = -1,
) -> LawSet:
    """Return the laws of a function as formulas, without counting how many there are: `discover(…, count=False)`.

    The count needs memory for a square matrix of the size of the parameters; the formulas need a few gradients, so they
    are found for layers of real width too.

    Args:
        f: a module, or a callable f(params, x) with `params=` its tensors.
        inputs: draws one input from a generator, or is an example whose shapes and types are imitated; for several
            arguments a tuple of examples.
        loss: the space of output gradients: "any", "cross_entropy", or a function of (output, target).
        seed: the seed of all samples.
        device: the device to compute on.
        params: the tensors of a callable.
        progress: called with one line for every stage.
        class_axis: the axis of the outputs that cross-entropy runs over, for one input, without a batch.

    Returns:
        The laws that were found in gradients.

    Raises:
        UnsuitableError: the function cannot be differentiated as needed; the message says why.
    """
    function = function_of(f, inputs, loss=loss, params=params, device=device, class_axis=class_axis)
    generator = torch.Generator().manual_seed(seed)
    symmetries = search(function, generator, progress or (lambda message: None))
    return LawSet(symmetries=symmetries, parameters=function.split(function.generic_point(generator)))


def _verdict(
    function: ParameterFunction, first: Closure, second: Closure, explained: int, overlap: float, *, searched: bool
) -> Verdict:
    count = function.size - first.rank
    error = max(first.derivative_error, second.derivative_error)
    evidence: tuple[Evidence, ...] = (
        Evidence(what="rank by depth of brackets, first point", value=", ".join(map(str, first.ranks))),
        Evidence(what="rank by depth of brackets, second point", value=", ".join(map(str, second.ranks))),
        Evidence(what="kept over dropped singular values", value=min(first.gap, second.gap), limit=LEAST_GAP),
        Evidence(what="derivatives against finite differences", value=error, limit=_TRUSTED),
    )
    noise = max(first.sizes.noise, second.sizes.noise)
    smallest = min(first.smallest_kept, second.smallest_kept)
    problem = ""
    if overlap > _ORTHOGONAL:
        part = Evidence(what="part of found laws' gradients in the span", value=overlap, limit=_ORTHOGONAL)
        evidence = (*evidence, part)
    if first.rank != second.rank:
        problem = "The rank differs between two random points; try another seed, or inputs that are more varied."
    elif min(first.gap, second.gap) < LEAST_GAP:
        problem = "No clear gap separates directions from rounding; try a smaller or better conditioned instance."
    elif smallest < LEAST_GAP * noise:
        problem = (
            f"The program rounds to about {noise:.0e}, as with a cast to a coarser type inside it, and directions as "
            f"small as {smallest:.0e} were counted: they may be rounding. Compute in float64 throughout."
        )
    elif count and (small := max(first.sizes.small, second.sizes.small)):
        problem = (
            f"The gradients of {small} parameters are a million times smaller than those of others, or smaller still: "
            "their brackets are lost in rounding. Bring parameters and outputs to comparable sizes."
        )
    elif not first.converged:
        problem = "The rank was still growing at the deepest brackets; pass a larger depth."
    elif error > _TRUSTED:
        problem = "Higher derivatives disagree with finite differences: some operator's derivative formula is wrong."
    elif overlap > _ORTHOGONAL:
        problem = (
            "A law that holds for every gradient does not hold for the directions counted: rounding, or a wrong higher "
            "derivative, has added directions. Try a smaller or better conditioned instance."
        )
    elif explained > count:
        problem = "More laws were found than the rank allows; one of the two is wrong. Please report this function."
    if problem:
        return Verdict(status=Verdict.INCONCLUSIVE, message=problem, evidence=evidence)
    message = f"{counted(count, 'independent law')} of {function.size} parameters"
    message += f" ({function.classes})" if function.classes else ""
    if searched and count:
        message += ", all found." if explained == count else f"; {count - explained} have no form that was looked for."
    return Verdict(status=Verdict.VERIFIED, message=message, evidence=evidence)
