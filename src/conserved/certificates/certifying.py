"""`certify`: from a PyTorch function to a certificate of how many laws it has."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from conserved._torch_compat import tree_flatten, tree_map
from conserved.certificates.arithmetic import Array, Floats
from conserved.certificates.certificate import Certificate, Progress, claim, examine, verdict_of
from conserved.certificates.chosen_brackets import choose
from conserved.certificates.contents import FORMAT, VERSION, CertificateContents, digest
from conserved.certificates.differentiate import Sample, gradient, run
from conserved.certificates.form import Form
from conserved.certificates.jets import Jet
from conserved.certificates.listing import list_forms
from conserved.certificates.program import Program
from conserved.certificates.proof import Input
from conserved.certificates.ranges import refuse_wraparound
from conserved.certificates.stopped_gradients import refuse_hooks, refuse_outside_reads, refuse_own_backwards
from conserved.certificates.trace import trace_with_limits
from conserved.discovery import find_laws
from conserved.discovery.function import ParameterFunction, function_of, without_fused_kernels
from conserved.discovery.inputs import Inputs, UnsuitableError, to_device
from conserved.discovery.listed import upright
from conserved.discovery.metric import Metric, in_metric
from conserved.inference import recognize
from conserved.laws import LawSet
from conserved.verdict import Verdict
from conserved.version import __version__

_GRID = 2.0**12
"""θ is rounded to multiples of its inverse, so that a certificate can be read."""

_COMPARED = 6
"""Inputs and points at which the program is compared with the function."""

LARGEST = 4096
"""Parameters beyond which certificates take too long to be worth starting."""


def certify(
    f: nn.Module | Callable[..., Any],
    inputs: Inputs,
    *,
    loss: str = "any",
    bits: int = 128,
    seed: int = 0,
    params: Mapping[str, Tensor] | None = None,
    laws: LawSet | None = None,
    progress: Progress | None = None,
    class_axis: int = -1,
    metric: Metric | None = None,
) -> Certificate:
    """Prove the largest possible number of conservation laws of a function, and that the laws found are laws.

    Args:
        f: a module, or a callable f(params, x) with `params=` its tensors; at most 4,096 parameters.
        inputs: draws one input from a generator, or is an example whose shapes and types are imitated.
        loss: the loss the laws must hold for: "any", or "cross_entropy" on the outputs.
        bits: precision of the balls, from 2 to 4096; more are taken where these do not decide.
        seed: the seed of all samples.
        params: the tensors of a callable.
        laws: the laws to list; by default those that inference reads off the function, and where these are not all, the
            laws that `find_laws` finds.
        progress: called with one line for every stage.
        class_axis: the axis of the outputs that cross-entropy runs over, for one input, without a batch.
        metric: the metric of parameters by name, as for `discover`. The certificate is then about the function of
            coordinates in which the flow is Euclidean.

    Returns:
        The certificate with its verdict; `.save(path)` writes it.

    Raises:
        NoRuleError: an operator of the function has no rule in ball arithmetic.
        UnsuitableError: the function is too large, cannot be traced, or defines its own gradient; or an argument is out
            of its range.
    """
    say = progress or (lambda message: None)
    if not isinstance(loss, str):
        raise UnsuitableError(
            'Expected loss="any" or "cross_entropy", got a function. Put the loss into the function: certify '
            'f(params, (x, y)) that returns the loss of one sample, with loss="any".'
        )
    # Files have had the first name of it from the beginning.
    loss = "regression" if loss == "any" else loss
    if not 2 <= bits <= 4096:
        raise UnsuitableError(f"Expected bits between 2 and 4096, got {bits}. Pass bits=128.")
    if metric is not None:
        f, params = in_metric(f, params, metric)
    function = function_of(f, inputs, loss=loss, params=params, device="cpu", class_axis=class_axis)
    if function.size > LARGEST:
        raise UnsuitableError(
            f"Expected at most {LARGEST:,} parameters, got {function.size:,}. Certify a narrower model of the "
            "same architecture, or freeze what is not of interest."
        )
    traced = _trace(function, f, seed, say)
    options: dict[str, Any] = {"loss": loss, "seed": seed, "params": params, "class_axis": class_axis}

    def search() -> LawSet:
        return find_laws(f, inputs, device="cpu", progress=say, **options)

    groups, words, samples, origin = _laws_and_words(function, traced, laws, search, seed, say)
    used = sorted({which for which, _ in samples})
    contents = CertificateContents(
        about={
            "function": type(f).__name__ if isinstance(f, nn.Module) else getattr(f, "__name__", "function"),
            "loss": function.classes or loss,
            "laws": origin,
            "conserved": __version__,
            "torch": str(torch.__version__),
        },
        parameters={name: tuple(tensor.shape) for name, tensor in function.start.items()},
        program=traced.program,
        theta=traced.theta,
        inputs=tuple(Input(traced.inputs[i]) for i in used),
        samples=tuple((used.index(which), tuple(v)) for which, v in samples),
        words=tuple(map(tuple, words)),
        laws=tuple(map(tuple, groups)),
        bits=bits,
        seed=seed,
    )
    return issue(contents, say)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traced:
    """A function as a program that was compared with it, at a point, with inputs to choose from."""

    program: Program
    theta: tuple[float, ...]
    inputs: list[tuple[Array, ...]]
    first: Any
    """The first input, as the function takes it."""


def _trace(function: ParameterFunction, f: Any, seed: int, say: Progress) -> _Traced:
    """Return the program of a function, unless its gradient is not that of what it computes."""
    generator = torch.Generator().manual_seed(seed)
    theta = (function.generic_point(generator) * _GRID).round() / _GRID
    first = to_device(_first_sample(function, generator), function.device)
    if isinstance(f, nn.Module):
        refuse_hooks(dict(f.named_parameters()))
    refuse_outside_reads(function, function.owned, theta, first)
    refuse_own_backwards(function, theta, first)
    program, limits = trace_with_limits(function, theta, first)
    say(f"traced to {len(program.nodes)} elementary operations")
    pool = [
        first,
        *(to_device(_first_sample(function, generator), function.device) for _ in range(_inputs(program) - 1)),
    ]
    inputs = [_arrays(x) for x in pool]
    refuse_wraparound(program, limits, inputs)
    _faithful(function, program, theta, pool[:_COMPARED], generator)
    return _Traced(program=program, theta=tuple(theta.tolist()), inputs=inputs, first=first)


def _laws_and_words(
    function: ParameterFunction,
    traced: _Traced,
    given: LawSet | None,
    search: Callable[[], LawSet],
    seed: int,
    say: Progress,
) -> tuple[list[list[Form]], list[list[int]], list[tuple[int, list[int]]], str]:
    """Return laws to list, words that exclude any others, their samples, and a sentence on where laws are
    from.
    """
    program, theta, inputs = traced.program, traced.theta, traced.inputs

    def kept(chosen: LawSet) -> tuple[list[list[Form]], int]:
        groups = list_forms(chosen, function, program, theta, [Input(x) for x in inputs], seed)
        return groups, program.size - sum(map(len, groups))

    laws, origin = (given, GIVEN) if given is not None else read_off(function, traced.first)
    say(f"{len(laws)} laws, {origin}")
    groups, target = kept(laws)
    samples, words = choose(program, theta, inputs, target, seed, say)
    if given is None and len(words) < target:
        # Fewer directions than the laws leave room for: some laws are missing, and are searched for.
        groups, target = kept(together(laws, search()))
        origin = origin + SEARCHED if len(laws) else "searched for in gradients"
        if len(words) > target:
            samples, words = choose(program, theta, inputs, target, seed, say)
    return groups, words, samples, origin


GIVEN = "given"
SEARCHED = "; others were searched for in gradients"


def read_off(function: ParameterFunction, x: Any) -> tuple[LawSet, str]:
    """Return the laws that inference derives from the function, and a sentence on their evidence.

    That saves the search for laws and nothing else: each of them stands in the certificate as a polynomial and is
    proved there without trust in the inference.
    """
    try:
        law_set = recognize(function.evaluate, dict(function.start), x)
    except Exception as problem:
        return LawSet(symmetries=()), f"not inferred ({type(problem).__name__})"
    exact = law_set.select(lambda symmetry: symmetry.exact)
    verified = sum(law_set.verdict(symmetry.name) == Verdict.VERIFIED for symmetry in exact)
    order = list(function.start)
    exact = LawSet(symmetries=tuple(upright(symmetry, order) for symmetry in exact))
    return exact, f"inferred from the program, {verified} of {len(exact)} verified on it in float64"


def together(inferred: LawSet, searched: LawSet) -> LawSet:
    """Merge two lists of laws; dependent ones are removed by their gradients."""
    names = {symmetry.name for symmetry in inferred}
    others = [
        replace(symmetry, block=f"{symmetry.block}.searched" if symmetry.block else "searched")
        if symmetry.name in names
        else symmetry
        for symmetry in searched
    ]
    return LawSet(symmetries=(*inferred, *others))


def issue(contents: CertificateContents, progress: Progress | None = None) -> Certificate:
    """Prove the claims and return the certificate with their results."""
    findings = examine(contents, progress)
    tiers = findings.tiers
    body = {"format": FORMAT, "version": VERSION, **contents.record(), "claim": claim(contents, tiers)}
    return Certificate(contents=contents, tiers=tiers, verdict=verdict_of(contents, findings), digest=digest(body))


def _first_sample(function: ParameterFunction, generator: torch.Generator) -> Any:
    return tree_map(lambda part: part[0] if isinstance(part, Tensor) else part, function.sample(generator, 1))


def _inputs(program: Program) -> int:
    """Return the number of inputs to draw: few if many v share them, many if each may lie in its own region."""
    if not program.analytic:
        return max(8, program.size)
    return max(6, math.ceil(2 * program.size / program.outputs))


def _arrays(x: Any) -> tuple[Array, ...]:
    return tuple(
        leaf.detach().to(torch.float64 if leaf.is_floating_point() else torch.int64).numpy()
        for leaf in tree_flatten(x)[0]
        if isinstance(leaf, Tensor)
    )


def _faithful(
    function: ParameterFunction, program: Program, theta: Tensor, pool: list[Any], generator: torch.Generator
) -> None:
    """Require that the program computes the function, and that its gradient is the one training follows.

    Every input is tried at a point of its own, so that a value taken out of θ while tracing shows.
    """
    numbers = Floats()
    for index, x in enumerate(pool):
        where = theta if not index else function.generic_point(generator)
        v = torch.randn(function.outputs, generator=generator, dtype=torch.float64)
        with without_fused_kernels():
            value = function(where, x).detach().numpy()
            expected = torch.func.grad(lambda t, x=x, v=v: (function(t, x) * v).sum())(where).numpy()
        point = Jet({0: where.numpy()})
        output = run(program, numbers, point, _arrays(x))[program.output]
        assert isinstance(output, Jet)
        if not _close(output.value, value, 1e-8):
            raise UnsuitableError(
                "Expected a traced program with the values of the function, got other values: control flow "
                "depends on values, values are taken out of tensors (item, numpy, nn.Parameter), or the function "
                "rounds on purpose. Write it with torch.where and tensors of fixed shape."
            )
        own = gradient(program, numbers, point, Sample(_arrays(x), v.numpy())).value
        if not _close(own, expected, 1e-7):
            raise UnsuitableError(
                "Expected backpropagation to give the gradient of the function, got another one: a custom "
                "autograd function or a hook replaces it. Remove it, since training follows no function that "
                "could be certified."
            )


def _close(own: Array, expected: Array, tolerance: float) -> bool:
    size = float(np.abs(expected).max(initial=0.0)) + 1
    return bool(np.allclose(own, expected, rtol=tolerance, atol=tolerance / 100 * size))
