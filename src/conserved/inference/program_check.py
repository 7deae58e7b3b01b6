"""Checks inferred laws on the real program in float64.

Typing rules and the checker of derivations can share a mistake. This check shares nothing with them: the program itself
runs in float64 at random parameters and inputs, its outputs are weighted with random numbers, and one backward pass
gives the gradient G. A symmetry of the function has μ(θ, G) = 0, for every generator of its group: scales, mixtures,
rotations and shifts. One backward pass tests all laws at once, so the check costs a few passes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import isfinite
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from conserved.inference.capture import CapturedProgram
from conserved.inference.double_precision import in_double_precision, widened
from conserved.inference.objective import judged
from conserved.inference.random_points import Draw, draw_inputs, draw_parameters
from conserved.laws import LawSet, ProgramCheck
from conserved.laws.verification import precision_of
from conserved.symmetry import Symmetry

POINTS = 3
"""Random parameters and inputs at which identities are tested."""

EXACT = 1e-10
"""Largest relative residual of an identity in float64."""

COARSE = 1e-3
"""Largest relative residual where part of the program computes in lower precision, whatever is done."""

SILENT = 1e-13
"""Terms of an identity below this share of all gradients times the parameters are rounding."""

MOST_ENTRIES = 16_000_000
"""Models with more parameters are not run in float64."""

MOST_SECONDS = 20.0
"""Further points are left out once the check has taken this long."""

CHECKING: ContextVar[bool] = ContextVar("conserved_program_check", default=False)
"""Whether the forward pass that runs now is one of this check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRun:
    """How a program is run again: a function of its inputs, the inputs, and the tensors it reads."""

    call: Callable[[Any], Any]
    inputs: Any
    parameters: Mapping[str, Tensor]
    buffers: Sequence[Tensor] = ()
    refused: str = ""
    """Why the program may not be run with other parameters; empty if it may."""


def checked_on_program(laws: LawSet, program: CapturedProgram, run: ProgramRun, *, classes: int | None) -> LawSet:
    """Return the laws without those whose identity fails on the program; `.checked` says what was done.

    Args:
        laws: inferred laws.
        program: the program they were inferred from.
        run: the same program, to be run again.
        classes: the axis of the outputs along which a loss sees no common shift; None for any loss.
    """
    reason = _unaffordable(run)
    if not reason and not any(symmetry.exact for symmetry in laws):
        reason = "no exact law was inferred"
    if reason:
        return laws.with_check(ProgramCheck(points=0, reason=reason))
    residuals: list[dict[str, float]] = []
    limits: list[float] = []
    problem = ""
    start = perf_counter()
    for seed in range(POINTS):
        if residuals and perf_counter() - start > MOST_SECONDS:
            problem = f"more than {len(residuals)} points would take too long"
            break
        found = _residuals_at(laws, program, run, classes, seed)
        if isinstance(found, str):
            problem = found
            continue
        residuals.append(found[0])
        limits.append(found[1])
    if not residuals:
        return laws.with_check(ProgramCheck(points=0, reason=problem))
    refuted = _refuted(residuals, limits)
    if refuted and (program.hooked or program.hooked_values or any(op.custom for op in program.operations)):
        # A backward or a hook of the author's may be wrong, which is what laws are there to see: the function decides.
        refuted = {name: worst for name, worst in refuted.items() if _moves_outputs(laws[name], program, run, classes)}
    check = ProgramCheck(points=len(residuals), limit=max(limits), reason=problem, refuted=refuted)
    return laws.with_check(check)


def _refuted(residuals: Sequence[Mapping[str, float]], limits: Sequence[float]) -> dict[str, float]:
    """Laws that fail at some point, with their largest residual."""
    found: dict[str, float] = {}
    for at_point, limit in zip(residuals, limits, strict=True):
        for name, residual in at_point.items():
            if residual > limit:
                found[name] = max(found.get(name, 0.0), residual)
    return found


def _unaffordable(run: ProgramRun) -> str:
    """Why the program is not run in float64; empty if it is."""
    if run.refused:
        return run.refused
    tensors = list(run.parameters.values())
    if any(tensor.is_meta for tensor in tensors):
        return "the parameters have no values"
    if any(hasattr(tensor, "full_tensor") or type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors):
        return "the parameters are sharded, quantised or of another class"
    entries = sum(tensor.numel() for tensor in tensors)
    if entries > MOST_ENTRIES:
        return f"the model has {entries:,} parameters, more than {MOST_ENTRIES:,}"
    if any(tensor.device.type not in ("cpu", "cuda") for tensor in tensors):
        return "the device has no float64"
    return ""


def _residuals_at(
    laws: LawSet, program: CapturedProgram, run: ProgramRun, classes: int | None, seed: int
) -> tuple[dict[str, float], float] | str:
    """Residuals of all exact laws at one point and the limit they must stay below; a reason if there are none."""
    # A program that decided by its numbers is tested on the path it took.
    draws = [Draw.NEARBY] if program.branches else [Draw.ANYWHERE, Draw.SAME_SIGNS, Draw.NEARBY]
    problem = ""
    for draw in draws:
        for fresh_inputs in (False,) if program.branches else (seed > 0, False) if seed else (False,):
            try:
                found = _gradients(program, run, classes, seed, draw, fresh_inputs)
            except Exception as error:
                # User code may raise anything on values it was not written for.
                problem = f"the program does not run in float64 ({type(error).__name__}: {_first_line(error)})"
                continue
            if found is None:
                problem = "outputs or gradients in float64 are not finite, or depend on no parameter"
                continue
            theta, gradients, precision = found
            limit = EXACT if precision == torch.float64 else COARSE
            return _relative(laws, theta, gradients), limit
    return problem


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:120]


def _gradients(
    program: CapturedProgram, run: ProgramRun, classes: int | None, seed: int, draw: Draw, fresh_inputs: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor], torch.dtype] | None:
    """Parameters, gradients of randomly weighted outputs, and the coarsest precision of the backward pass."""
    generator = torch.Generator().manual_seed(seed)
    values = draw_parameters(program, run.parameters, draw, generator)
    inputs = draw_inputs(run.inputs, generator) if fresh_inputs else run.inputs
    trained = {name: tensor for name, tensor in run.parameters.items() if tensor.requires_grad}
    tensors = [*run.parameters.values(), *run.buffers]
    with _unnoticed(seed), in_double_precision(tensors):
        for name, value in values.items():
            run.parameters[name].data = value
        outputs = [output for output in judged(run.call(widened_tree(inputs))) if output.requires_grad]
        if not outputs or not all(bool(torch.isfinite(output.detach()).all()) for output in outputs):
            return None
        weights = [_weights(output, classes, generator) for output in outputs]
        loss = torch.stack(
            [(output * weight).sum().real for output, weight in zip(outputs, weights, strict=True)]
        ).sum()
        precision = precision_of(loss)
        found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        theta = {name: tensor.detach().clone() for name, tensor in run.parameters.items()}
    gradients = {
        name: torch.zeros_like(theta[name]) if gradient is None else gradient.detach().to_dense()
        for name, gradient in zip(trained, found, strict=True)
    }
    if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients.values()):
        return None
    return theta, gradients, precision


STEP = 1e-3
"""How far parameters are moved along a law whose identity fails through a backward of the author's."""


def _moves_outputs(symmetry: Symmetry, program: CapturedProgram, run: ProgramRun, classes: int | None) -> bool:
    """Whether outputs change when parameters move along a symmetry; True if that cannot be found out."""
    generator = torch.Generator().manual_seed(0)
    start = draw_parameters(program, run.parameters, Draw.NEARBY, generator)
    half = Symmetry(
        block=symmetry.block,
        family=symmetry.family,
        part=symmetry.part,
        kind=symmetry.kind,
        legs=tuple(leg for leg in symmetry.legs if leg.view.parameter == symmetry.parameters[0]),
    )
    try:
        element = symmetry.element(spread=STEP, generator=generator)
        before = _outputs(run, start, classes)
        whole = _distance(before, _outputs(run, symmetry.act(start, element), classes))
        part = _distance(before, _outputs(run, half.act(start, element), classes))
    except Exception:
        # User code may raise anything on values it was not written for.
        return True
    # Coarse computing inside the function leaves rounding; half of the motion says what a change would be.
    return not whole <= max(1e-9, COARSE * part)


def _outputs(run: ProgramRun, values: Mapping[str, Tensor], classes: int | None) -> Tensor:
    """All outputs at given parameters as one vector, up to what a loss does not see."""
    with _unnoticed(0), in_double_precision([*run.parameters.values(), *run.buffers]):
        for name, value in values.items():
            run.parameters[name].data = value
        found = [output.detach() for output in judged(run.call(widened_tree(run.inputs)))]
    if classes is not None:
        found = [output - output.mean(classes, keepdim=True) if output.ndim else output for output in found]
    return torch.cat([torch.view_as_real(o).flatten() if o.is_complex() else o.flatten() for o in found])


def _distance(before: Tensor, after: Tensor) -> float:
    return float((after - before).norm() / before.norm().clamp_min(1e-300))


def widened_tree(inputs: Any) -> Any:
    """Inputs with all floating-point tensors in float64, and none that records gradients."""
    return torch.utils._pytree.tree_map(widened, inputs)


def _weights(output: Tensor, classes: int | None, generator: torch.Generator) -> Tensor:
    """Random weights of an output; they sum to zero along the axis of a cross-entropy's classes."""
    weights = torch.randn(output.shape, generator=generator, dtype=output.dtype).to(output.device)
    if classes is not None and output.ndim:
        weights = weights - weights.mean(classes, keepdim=True)
    return weights


def _relative(laws: LawSet, theta: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> dict[str, float]:
    """The relative residual of the identity of every exact law; zero where all of its terms are rounding."""
    chosen = laws.select(lambda law: law.exact and all(theta[name].numel() for name in law.parameters))
    gradients = {name: gradient for name, gradient in gradients.items() if gradient.numel()}
    given = {name: gradients.get(name, torch.zeros_like(theta[name])) for name in chosen.plan.needs}
    balance = chosen.balance({**gradients, **given}, theta)
    total = float(np.linalg.norm([float(gradient.norm()) for gradient in gradients.values()]))
    # Outputs are weighted with numbers of about one: where no parameter reaches them, all gradients are rounding.
    total = max(total, 1.0)
    found = {}
    for symmetry, residual, scale in zip(chosen, balance.residuals, balance.scales, strict=True):
        size = float(np.linalg.norm([float(theta[name].norm()) for name in symmetry.parameters]))
        silent = scale <= SILENT * total * max(size, 1.0)
        found[symmetry.name] = 0.0 if silent or not isfinite(residual) else float(residual)
    return found


@contextmanager
def _unnoticed(seed: int) -> Iterator[None]:
    """Mark the pass as one of ours, with random numbers of its own; nothing is compiled for it."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    token = CHECKING.set(True)
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=devices))
            torch.manual_seed(seed)
            if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield
    finally:
        CHECKING.reset(token)
