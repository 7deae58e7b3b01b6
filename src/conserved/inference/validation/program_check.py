"""Checks inferred laws on the real program in float64.

A second table of rules can share the mistakes of the first. This check shares nothing with them: the program itself
runs in float64 at random parameters and inputs, its outputs are weighted with random numbers w, and one backward pass
gives the gradient G. For a generator ξ of a law's group, ⟨ξ·θ, G⟩ = ⟨w, JVP along ξ·θ⟩, which is zero for
almost no w unless the JVP is. μ(θ, G) = 0 says this for every generator at once: scales, mixtures, rotations and
shifts. One backward pass so tests all laws, and the check costs a few passes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from math import isfinite
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from conserved._torch_compat import tree_map
from conserved.inference.program.captured_program import CHECKPOINT, CapturedProgram
from conserved.inference.program.control_flow import control_flow_as_python
from conserved.inference.program.objective import loss_outputs
from conserved.inference.program.program_state import CHECKING
from conserved.inference.validation.double_precision import in_double_precision, widen
from conserved.inference.validation.epsilon_removal import WithoutEpsilon
from conserved.inference.validation.random_points import Draw, draw_inputs, draw_parameters, nudge_values
from conserved.inference.validation.resized_inputs import resize
from conserved.laws import LawSet, ProgramCheck
from conserved.laws.identities import Balance
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

MOST_SIZES = 12
"""Other sizes of the inputs that are tried; most are refused at once."""

POINTS_AT_OTHER_SIZES = 6
"""Most random points at each other size; all but the first are for laws whose terms vanished at those before."""

MOST_SECONDS_AGAIN = 1.0
"""Points are not repeated once the other sizes have taken this long."""

MOST_SECONDS_AT_OTHER_SIZES = 5.0
"""Further sizes are left out once they have taken this long."""

NUDGE = 1e-12
"""Relative move of parameters that changes all rounding in float64 and nothing else."""

NUDGES = (1, -1, 2, -2)
"""Multiples of the move: one sample of rounding may be small by chance."""

ROUNDING_FACTOR = 6.0
"""A residual below this many times its change under a nudge is rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRun:
    """A program that can be run again: a function of its inputs, the inputs, and the tensors it reads."""

    call: Callable[[Any], Any]
    inputs: Any
    parameters: Mapping[str, Tensor]
    buffers: Sequence[Tensor] = ()
    refused: str = ""
    """The reason why the program cannot run with other parameters; empty if it can."""


def check_on_program(laws: LawSet, program: CapturedProgram, run: ProgramRun, *, classes: int | None) -> LawSet:
    """Return the laws without those whose identity fails on the program; `.checked` says what was done.

    Laws up to ε are tested with ε at zero, where they are exact.

    Args:
        laws: inferred laws.
        program: the program they were inferred from.
        run: the same program, to be run again.
        classes: the axis of the outputs along which a loss sees no common shift; None for any loss.
    """
    reason = _unaffordable(program, run) or ("" if len(laws) else "no law was inferred")
    if reason:
        return laws.with_check(ProgramCheck(points=0, reason=reason))
    exact = laws.select(lambda law: law.exact)
    softened = laws.select(lambda law: not law.exact)
    first = _Test(program, run, classes).residuals(exact)
    second = _Test(program, run, classes, _epsilons(softened)).residuals(softened)
    reached = first if len(exact) else second
    if not reached.points:
        return laws.with_check(ProgramCheck(points=0, reason=reached.problem))
    refuted = {name: worst for name, worst in first.worst.items() if worst > first.limit}
    refuted = _Test(program, run, classes).without_rounding(exact, refuted, first.limit)
    # An ε that is not an argument of an operation stays: residuals of its size say nothing about the law.
    # In lower precision, rounding is divided by norms that no ε keeps away from zero.
    sizes = {law.name: max(COARSE, 10 * second.limit, 100 * law.epsilon) for law in softened}
    coarse = {name: worst for name, worst in second.worst.items() if worst > sizes[name]}
    refuted |= _Test(program, run, classes, _epsilons(softened)).without_rounding(softened, coarse, second.limit)
    if refuted and _has_backward_of_author(program):
        # A backward or a hook of the author's may be wrong, which is what laws are there to see: the function decides.
        moved = {name: _moves_outputs(laws[name], program, run, classes) for name in refuted}
        refuted = {name: worst for name, worst in refuted.items() if moved[name]}
    residuals = {**first.worst, **{name: worst for name, worst in second.worst.items() if worst <= second.limit}}
    standing = exact.select(lambda law: law.name not in refuted)
    check = ProgramCheck(
        points=reached.points,
        limit=reached.limit,
        reason=reached.problem,
        refuted=refuted,
        one_size=_Test(program, run, classes).failures_at_other_sizes(standing),
        residuals=residuals,
        decisions=program.decisions,
    )
    return laws.with_check(check)


def _has_backward_of_author(program: CapturedProgram) -> bool:
    hooked = program.hooked or program.hooked_values or program.hooked_nodes
    return bool(hooked or any(operation.custom for operation in program.operations))


def _epsilons(laws: LawSet) -> frozenset[float]:
    return frozenset(float(law.epsilon) for law in laws)


@dataclass(slots=True)
class _Residuals:
    """The largest relative residual of every law over some points, and the limit that was possible there."""

    points: int = 0
    limit: float = EXACT
    worst: dict[str, float] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True, slots=True)
class _Test:
    """A program to be run at random points, with the ε of its normalisations at zero if any are given."""

    program: CapturedProgram
    run: ProgramRun
    classes: int | None
    epsilons: frozenset[float] = frozenset()

    def residuals(self, laws: LawSet) -> _Residuals:
        """Run the program at several points and return the largest residual of every law."""
        result = _Residuals()
        start = perf_counter()
        for seed in range(POINTS if len(laws) else 0):
            if result.points and perf_counter() - start > MOST_SECONDS:
                result.problem = f"more than {result.points} points would take too long"
                break
            at_point = self.residuals_at(laws, seed)
            if isinstance(at_point, str):
                result.problem = at_point
                continue
            result.points += 1
            result.limit = max(result.limit, at_point[1])
            for name, residual in at_point[0].items():
                result.worst[name] = max(residual, result.worst.get(name, 0.0))
        return result

    def without_rounding(self, laws: LawSet, refuted: dict[str, float], limit: float) -> dict[str, float]:
        """Return the refuted laws whose residual is larger than rounding explains at some point.

        A norm over two numbers passes on no gradient once ε is zero, and what is left is rounding of any relative
        size. Rounding changes with every move of the parameters, however small; a violation does not.
        """
        suspects = laws.select(lambda law: law.name in refuted)
        standing: dict[str, float] = {}
        for seed in range(POINTS if len(suspects) else 0):
            start, moved = self.point(seed), [self.point(seed, nudge=NUDGE * factor) for factor in NUDGES]
            if isinstance(start, str):
                continue
            noise = dict.fromkeys(refuted, 0.0)
            for there in moved:
                if not isinstance(there, str):
                    change = {name: there.gradients[name] - gradient for name, gradient in start.gradients.items()}
                    sizes = _sizes(suspects, _Gradients(start.theta, change, start.precision))
                    noise = {name: max(noise[name], size) for name, size in sizes.items()}
            size = _sizes(suspects, start)
            for name, residual in _relative(suspects, start).items():
                if residual > limit and not size[name] <= ROUNDING_FACTOR * noise[name]:
                    standing[name] = refuted[name]
        return standing

    def residuals_at(self, laws: LawSet, seed: int) -> tuple[dict[str, float], float] | str:
        """Return the residuals at one point and the limit they must stay below; a reason if there are none."""
        gradients = self.point(seed)
        if isinstance(gradients, str):
            return gradients
        return _relative(laws, gradients), EXACT if gradients.precision == torch.float64 else COARSE

    def point(self, seed: int, nudge: float = 0.0) -> _Gradients | str:
        """Return parameters and gradients at a random point at which the program runs; a reason if there is none."""
        # A program that decided by its numbers is tested on the path it took.
        draws = [Draw.NEARBY] if self.program.branches else [Draw.ANYWHERE, Draw.SAME_SIGNS, Draw.NEARBY]
        fresh = [True, False] if seed and not self.program.branches else [False]
        problem = ""
        for draw, fresh_inputs in itertools.product(draws, fresh):
            try:
                gradients = self.gradients(seed, draw, fresh_inputs, nudge=nudge)
            except Exception as error:
                # User code may raise anything on values it was not written for.
                problem = f"the program does not run in float64 ({type(error).__name__}: {_first_line(error)})"
                continue
            if gradients is None:
                problem = "outputs or gradients in float64 are not finite, or depend on no parameter"
                continue
            return gradients
        return problem

    def failures_at_other_sizes(self, laws: LawSet) -> dict[str, str]:
        """Return the laws whose identity fails on inputs of another size, each with that size in words.

        A batch of one sample, or a length at which rows of a table are not read, has laws that no other size has.
        """
        result: dict[str, str] = {}
        # A program that decides by its numbers may take another path there. A backward or a hook of the author's may
        # be wrong, which is what laws are there to see.
        if not len(laws) or self.program.branches or _has_backward_of_author(self.program):
            return result
        if _may_read_outside(self.program, self.run):
            return result
        start = perf_counter()
        for words, inputs in itertools.islice(resize(self.run.inputs), MOST_SIZES):
            if perf_counter() - start > MOST_SECONDS_AT_OTHER_SIZES:
                break
            untested = laws
            for seed in range(POINTS, POINTS + POINTS_AT_OTHER_SIZES):
                gradients = self._at_other_size(inputs, seed)
                if gradients is None:
                    break
                limit = EXACT if gradients.precision == torch.float64 else COARSE
                residuals = _relative(untested, gradients)
                result = {name: words for name, residual in residuals.items() if residual > limit} | result
                # All terms of a law vanish where a unit is off for every sample: that point says nothing about it.
                silent = frozenset(name for name, residual in residuals.items() if residual == 0 and name not in result)
                untested = replace(untested, symmetries=tuple(law for law in untested if law.name in silent))
                if not len(untested) or perf_counter() - start > MOST_SECONDS_AGAIN:
                    break
        return result

    def _at_other_size(self, inputs: Any, seed: int) -> _Gradients | None:
        """Return parameters and gradients with inputs of another size; None if the program does not take them."""
        for draw, fresh_inputs in itertools.product((Draw.ANYWHERE, Draw.SAME_SIGNS), (True, False)):
            try:
                gradients = self.gradients(seed, draw, fresh_inputs, inputs)
            except Exception:
                # The program does not take this size, or user code raises whatever it likes.
                return None
            if gradients is not None:
                return gradients
        return None

    def gradients(
        self, seed: int, draw: Draw, fresh_inputs: bool, given: Any = None, nudge: float = 0.0
    ) -> _Gradients | None:
        """Return parameters and gradients of randomly weighted outputs; None where they are not finite.

        `nudge` is a relative size by which all parameters are moved in random directions.
        """
        run, generator = self.run, torch.Generator().manual_seed(seed)
        values = draw_parameters(self.program, run.parameters, draw, generator)
        if nudge:
            apart = torch.Generator().manual_seed(seed + POINTS)
            values = {name: nudge_values(value, nudge, apart) for name, value in values.items()}
        given = run.inputs if given is None else given
        inputs = draw_inputs(given, generator) if fresh_inputs else given
        trained = {name: tensor for name, tensor in run.parameters.items() if tensor.requires_grad}
        tensors = [*run.parameters.values(), *run.buffers]
        removal = WithoutEpsilon(self.epsilons) if self.epsilons else nullcontext()
        with _as_own_pass(seed), in_double_precision(tensors), removal:
            for name, value in values.items():
                run.parameters[name].data = value
            outputs = [output for output in loss_outputs(run.call(widen_tree(inputs))) if output.requires_grad]
            if not outputs or not all(bool(torch.isfinite(output.detach()).all()) for output in outputs):
                return None
            weights = [_weights(output, self.classes, generator) for output in outputs]
            loss = torch.stack(
                [(output * weight).sum().real for output, weight in zip(outputs, weights, strict=True)]
            ).sum()
            precision = precision_of(loss)
            # Hooks of the user's run in a whole backward pass: then it is not made, and the call below raises.
            reentrant = any(operation.custom == CHECKPOINT for operation in self.program.operations)
            reentrant = reentrant and not self.program.hooked
            result = _differentiate(loss, list(trained.values()), reentrant=reentrant)
            theta = {name: tensor.detach().clone() for name, tensor in run.parameters.items()}
        gradients = {
            name: torch.zeros_like(theta[name]) if gradient is None else gradient.detach().to_dense()
            for name, gradient in zip(trained, result, strict=True)
        }
        if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients.values()):
            return None
        return _Gradients(theta, gradients, precision)


@dataclass(frozen=True, slots=True)
class _Gradients:
    """Parameters, gradients there, and the coarsest precision of the backward pass."""

    theta: dict[str, Tensor]
    gradients: dict[str, Tensor]
    precision: torch.dtype


def _differentiate(loss: Tensor, parameters: Sequence[Tensor], *, reentrant: bool) -> Sequence[Tensor | None]:
    """Return gradients without accumulating them; reentrant checkpoints need a whole backward pass for that."""
    if not reentrant:
        return torch.autograd.grad(loss, parameters, allow_unused=True)
    former = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        loss.backward()
        return [parameter.grad for parameter in parameters]
    finally:
        for parameter, gradient in zip(parameters, former, strict=True):
            parameter.grad = gradient


UNCHECKED = ("aten::segment_reduce", "aten::_segment_reduce")
"""Operations that trust the lengths they are given: with inputs of another size they read memory of others."""

INDEXED = tuple(
    f"aten::{name}"
    for name in (
        *("embedding", "_embedding_bag", "index", "gather", "scatter", "take", "_unsafe_index", "_index_put"),
        *("nll_loss", "slice_scatter", "select_scatter", "max_unpool"),
    )
)
"""Beginnings of the names of operations whose indices may lie outside of a tensor. On CUDA that ends the process."""


def _may_read_outside(program: CapturedProgram, run: ProgramRun) -> bool:
    """Return whether inputs of another size could make the program read or write outside of its tensors."""
    names = [operation.name for operation in program.operations]
    if any(name.startswith(UNCHECKED) or not name.startswith(("aten::", "prims::", "conserved::")) for name in names):
        # Nobody knows what a kernel of the user's relies on.
        return True
    return _on_cuda(run) and any(name.startswith(INDEXED) for name in names)


def _on_cuda(run: ProgramRun) -> bool:
    return any(tensor.is_cuda for tensor in run.parameters.values())


def _computes_indices(program: CapturedProgram) -> bool:
    """Return whether indices are made of floating-point numbers, which are others at other parameters."""
    if not any(operation.name.startswith(INDEXED) for operation in program.operations):
        return False
    for operation in program.operations:
        made_whole = any(_is_whole(program.values[number].dtype) for number in operation.results)
        of_floats = any(program.values[number].dtype.is_floating_point for number in operation.inputs())
        if made_whole and of_floats and operation.name.startswith(("aten::_to_copy", "aten::to.", "aten::copy")):
            return True
    return False


def _is_whole(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool


def _unaffordable(program: CapturedProgram, run: ProgramRun) -> str:
    """Return why the program is not run in float64; empty if it is."""
    if run.refused:
        return run.refused
    if _on_cuda(run) and _computes_indices(program):
        return "indices are computed from numbers that the check would change, which may end a process on CUDA"
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


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:120]


STEP = 1e-3
"""How far parameters are moved along a law whose identity fails through a backward of the author's."""


def _moves_outputs(symmetry: Symmetry, program: CapturedProgram, run: ProgramRun, classes: int | None) -> bool:
    """Return whether outputs change when parameters move along a symmetry; True if that cannot be found out."""
    generator = torch.Generator().manual_seed(0)
    start = draw_parameters(program, run.parameters, Draw.NEARBY, generator)
    half = Symmetry(
        block=symmetry.block,
        family=symmetry.family,
        part=symmetry.part,
        kind=symmetry.kind,
        legs=tuple(leg for leg in symmetry.legs if leg.view.parameter == symmetry.parameters[0]),
    )
    epsilons = frozenset() if symmetry.exact else frozenset((float(symmetry.epsilon),))
    try:
        element = symmetry.element(spread=STEP, generator=generator)
        before = _outputs(run, start, classes, epsilons)
        distance = _distance(before, _outputs(run, symmetry.act(start, element), classes, epsilons))
        part = _distance(before, _outputs(run, half.act(start, element), classes, epsilons))
    except Exception:
        # User code may raise anything on values it was not written for.
        return True
    # Coarse computing inside the function leaves rounding; half of the motion says what a change would be.
    return not distance <= max(1e-9, COARSE * part)


def _outputs(run: ProgramRun, values: Mapping[str, Tensor], classes: int | None, epsilons: frozenset[float]) -> Tensor:
    """Return all outputs at given parameters as one vector, up to what a loss does not see."""
    removal = WithoutEpsilon(epsilons) if epsilons else nullcontext()
    with _as_own_pass(0), in_double_precision([*run.parameters.values(), *run.buffers]), removal:
        for name, value in values.items():
            run.parameters[name].data = value
        outputs = [output.detach() for output in loss_outputs(run.call(widen_tree(run.inputs)))]
    if classes is not None:
        outputs = [output - output.mean(classes, keepdim=True) if output.ndim else output for output in outputs]
    return torch.cat([torch.view_as_real(o).flatten() if o.is_complex() else o.flatten() for o in outputs])


def _distance(before: Tensor, after: Tensor) -> float:
    return float((after - before).norm() / before.norm().clamp_min(1e-300))


def widen_tree(inputs: Any) -> Any:
    """Return inputs with all floating-point tensors in float64, and none that records gradients."""
    return tree_map(widen, inputs)


def _weights(output: Tensor, classes: int | None, generator: torch.Generator) -> Tensor:
    """Return random weights of an output; they sum to zero along the axis of a cross-entropy's classes."""
    weights = torch.randn(output.shape, generator=generator, dtype=output.dtype).to(output.device)
    if classes is not None and output.ndim:
        weights = weights - weights.mean(classes, keepdim=True)
    return weights


def _balance(laws: LawSet, point: _Gradients) -> tuple[LawSet, dict[str, Tensor], Balance]:
    """Return the laws that move a parameter with a gradient, those gradients, and the sides of all identities."""
    theta = point.theta
    chosen = laws.select(lambda law: all(theta[name].numel() for name in law.parameters))
    gradients = {name: gradient for name, gradient in point.gradients.items() if gradient.numel()}
    given = {name: gradients.get(name, torch.zeros_like(theta[name])) for name in chosen.plan.needs}
    return chosen, gradients, chosen.balance({**gradients, **given}, theta)


def _sizes(laws: LawSet, point: _Gradients) -> dict[str, float]:
    """Return the absolute norm of every identity's residual."""
    chosen, _, balance = _balance(laws, point)
    terms = zip(chosen, balance.residuals, balance.scales, strict=True)
    return {symmetry.name: float(residual) * float(scale) for symmetry, residual, scale in terms}


def _relative(laws: LawSet, point: _Gradients) -> dict[str, float]:
    """Return the relative residual of every identity; zero where all of its terms are rounding."""
    theta = point.theta
    chosen, gradients, balance = _balance(laws, point)
    total = float(np.linalg.norm([float(gradient.norm()) for gradient in gradients.values()]))
    # Outputs are weighted with numbers of about one: where no parameter reaches them, all gradients are rounding.
    total = max(total, 1.0)
    residuals = {}
    for symmetry, residual, scale in zip(chosen, balance.residuals, balance.scales, strict=True):
        size = float(np.linalg.norm([float(theta[name].norm()) for name in symmetry.parameters]))
        silent = scale <= SILENT * total * max(size, 1.0)
        residuals[symmetry.name] = 0.0 if silent or not isfinite(residual) else float(residual)
    return residuals


@contextmanager
def _as_own_pass(seed: int) -> Iterator[None]:
    """Mark the pass as one of ours, with random numbers of its own; nothing is compiled for it."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    token = CHECKING.set(True)
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=devices))
            torch.manual_seed(seed)
            stack.enter_context(control_flow_as_python())
            yield
    finally:
        CHECKING.reset(token)
