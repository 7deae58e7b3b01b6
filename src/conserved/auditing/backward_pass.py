"""A backward pass that has run: its parameters and gradients, the laws that can be tested, and their residuals."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from conserved.auditing.epsilon_terms import RightHandSide
from conserved.auditing.lookup_tables import Loses, lost, tables
from conserved.auditing.noise import suspicious
from conserved.auditing.softmax_gauge import Gauge
from conserved.inference.cached_laws import cached_laws_of
from conserved.inference.derivation import Derivation
from conserved.inference.model_parts import ModelParts, parameters_of
from conserved.laws import Dropped, LawSet
from conserved.laws.identities import Balance, coarsest, rounding
from conserved.laws.shared_memory import overlapping
from conserved.layout import (
    Disagreement,
    GivenLayout,
    LawAssembly,
    ModelLayout,
    RankGroup,
    compare_replicas,
    gradient_of,
    layout_of,
    processes_of,
    reduced_gradients,
)
from conserved.layout.megatron import is_shared_with_stages
from conserved.moment import Direction, Point, to_host
from conserved.product_precision import SHORTENED, rounds_factors
from conserved.rank_agreement import active_agreement
from conserved.symmetry import Symmetry, Tensors
from conserved.tolerances import HALF

_THROUGH_CUDNN = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.RNNBase,
)
"""Modules whose products cuDNN makes, which has a switch of its own."""

PrecisionSource = Literal["given", "stored", "bits", "products"]
"""How the precision of a pass is known."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredTypes:
    """The types that parameters and their gradients are stored in."""

    names: Collection[str]
    points: tuple[torch.dtype, ...]
    gradients: tuple[torch.dtype, ...]

    @staticmethod
    def of(points: Tensors, gradients: Tensors) -> StoredTypes:
        """Return the types of parameters and gradients of the same names, in order; the gradients are not kept."""
        kind = attrgetter("dtype")
        return StoredTypes(points.keys(), (*map(kind, points.values()),), (*map(kind, gradients.values()),))


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardPass:
    """The parameters and gradients of a backward pass, and the laws that are tested on them."""

    model: nn.Module
    laws: LawSet
    points: Tensors
    gradients: Tensors | None
    """Gradients; None once they may be others than those of the pass."""
    absent: tuple[str, ...]
    """Trained parameters that have no gradient; those that laws need are taken to have a zero one."""
    dropped: tuple[Dropped, ...]
    """Laws of the architecture that this model does not keep, and why."""
    types: StoredTypes
    read: LawSet
    """The laws as they were read off the program of this process, before legs were added up over processes."""
    assembly: LawAssembly
    """How the laws are put together from pieces on several processes."""
    together: tuple[RankGroup, ...] = ()
    """Groups whose processes have the same laws and judge alike."""
    disagreements: tuple[Disagreement, ...] = ()
    """Tensors that processes should hold alike and do not, where processes audit together."""
    moved_bytes: int = 0
    """Bytes this process sent so that laws could be put together."""
    data_parallel: RankGroup | None = None
    """Processes over whose batches gradients were added up, if they audit together and nothing is in pieces."""

    @staticmethod
    def of(parts: ModelParts, laws: LawSet, layout: GivenLayout | None = None) -> BackwardPass:
        """Read the parameters, gradients and laws of a backward pass that a model with these parts has just run."""
        lawful, gone, trained = _lawful(parts, parameters_of(parts), laws)
        gradients: dict[str, Any] = dict(zip(trained, map(gradient_of, trained.values()), strict=True))
        wrapper = cached_laws_of(parts.model).wrapper
        scattered, moved = reduced_gradients(parts.model if wrapper is None else wrapper(), trained)
        gradients |= scattered
        absent: tuple[str, ...] = ()
        if not all(map(is_not, gradients.values(), repeat(None))):
            absent = tuple(name for name, gradient in gradients.items() if gradient is None)
            gradients = {name: gradient for name, gradient in gradients.items() if gradient is not None}
            if not gradients:
                raise ValueError(
                    f"Expected gradients of {len(trained)} trainable parameters, got none. Call backward() first."
                )
            gradients |= {name: torch.zeros_like(trained[name]) for name in lawful.plan.needs if name not in gradients}
        assembly, assembled_laws = _assembly(parts, lawful, layout)
        assembled = assembly.put_together(trained, gradients)
        table = layout_with(parts, layout)
        apart, compared = compare_replicas(table, trained, gradients) if table.joint else ([], 0)
        if assembled.left_open:
            assembled_laws = assembled_laws.select(lambda symmetry: symmetry.name not in assembled.left_open)
        open_laws = tuple(Dropped(name, reason) for name, reason in assembled.left_open.items())
        stored = {name: trained[name] for name in gradients} if absent else trained
        small = {name: source for name, source in assembly.origin.items() if name in assembled.points}
        return BackwardPass(
            model=parts.model,
            laws=assembled_laws,
            points=assembled.points,
            gradients=assembled.gradients,
            absent=absent,
            dropped=(*laws.dropped, *gone, *open_laws),
            types=StoredTypes.of(
                {**stored, **{name: trained[source] for name, source in small.items()}},
                {**gradients, **{name: gradients[source] for name, source in small.items()}},
            ),
            read=lawful,
            assembly=assembly,
            together=assembled.together,
            disagreements=tuple(apart),
            moved_bytes=moved + compared + assembled.moved + _gathered_bytes(lawful, trained),
            data_parallel=table.data_parallel,
        )


def layout_with(parts: ModelParts, given: GivenLayout | None = None) -> ModelLayout:
    """Return where the pieces of a model's parameters are; read once, as long as the model stays the same."""
    state = cached_laws_of(parts.model)
    known: tuple[Hashable, Any, ModelLayout, Any] | None = state.layout
    if known is not None and known[0] == (parts.state, tuple(state.holdings)) and (given is None or given is known[1]):
        return known[2]
    layout = layout_of(parts.model, given, state.holdings)
    state.layout = ((parts.state, tuple(state.holdings)), given, layout, None)
    return layout


def _assembly(parts: ModelParts, laws: LawSet, given: GivenLayout | None) -> tuple[LawAssembly, LawSet]:
    """Return how laws are put together over processes, and the laws as they are evaluated then."""
    layout = layout_with(parts, given)
    state, by_hand, _, known = cached_laws_of(parts.model).layout
    if known is not None and known[0] is laws:
        return known[1], known[2]
    assembly = LawAssembly.of(layout, laws.symmetries)
    evaluated = replace(laws, symmetries=assembly.symmetries) if assembly.sums else laws
    cached_laws_of(parts.model).layout = (state, by_hand, layout, (laws, assembly, evaluated))
    return assembly, evaluated


def _gathered_bytes(laws: LawSet, trained: Mapping[str, Tensor]) -> int:
    """Return the bytes a process sends where DTensors are gathered: its own part, to every other process."""
    tensors: list[Any] = [trained[name] for name in laws.plan.needs if hasattr(trained[name], "full_tensor")]
    # Parameters, and gradients of their size.
    parts = ((tensor.to_local(), processes_of(tensor)) for tensor in tensors)
    return sum(2 * (size - 1) * local.numel() * local.element_size() for local, size in parts)


_Lawful = tuple[LawSet, tuple[Dropped, ...], Mapping[str, Tensor]]
"""Laws that a model keeps, those that it does not, and its parameters that are trained."""


def _lawful(parts: ModelParts, theta: Mapping[str, Tensor], laws: LawSet) -> _Lawful:
    """Return the laws that a model keeps as it is now, and why it does not keep the others; found out once.

    A law that a frozen leg takes away is not listed; one that was frozen since is not held against anything. Nor is one
    with a parameter that shares its memory with another since: a step of that one moves it too; nor one of an embedding
    whose padding row is no longer zero.
    """
    # A wrapper may make other parameters than its modules have.
    own = parts.state if theta is parts.named else ((*theta,), (*map(id, theta.values()),), parts.state)
    retained = cached_laws_of(parts.model)
    state = own, _addresses(theta.values()), retained.shared
    known: tuple[Hashable, LawSet, _Lawful] | None = retained.audited
    if known is not None and known[1] is laws and known[0] == state:
        return known[2]
    missing = [name for name in laws.plan.needs if name not in theta]
    if missing:
        raise ValueError(
            f"Expected `laws` of this model, got laws with the parameter {missing[0]!r}, which it does not have. "
            "Pass laws=conserved.recognize(model, x)."
        )
    every = all(map(attrgetter("requires_grad"), theta.values()))
    trained = theta if every else {name: p for name, p in theta.items() if p.requires_grad}
    away = [name for name, p in trained.items() if p.is_meta]
    if away:
        raise ValueError(f"Expected parameters with values, got {away[0]} on the meta device. Load the weights first.")
    beside, looked_up = overlapping(theta), tables(parts.model)
    shared = retained.shared | {name for name, p in trained.items() if is_shared_with_stages(p)}
    gone = tuple(Dropped(s.name, reason) for s in laws if (reason := _lost(s, trained, beside, looked_up, shared)))
    names = {item.name for item in gone}
    lawful = laws.select(lambda s: s.name not in names) if gone else laws
    parts_of_laws = lawful, gone, trained
    retained.audited = (state, laws, parts_of_laws)
    return parts_of_laws


def _addresses(tensors: Collection[Tensor]) -> tuple[int, ...]:
    try:
        return (*map(Tensor.data_ptr, tensors),)
    except RuntimeError:
        # A wrapper around other tensors has no memory of its own.
        return tuple(_addresses([tensor])[0] if len(tensors) > 1 else 0 for tensor in tensors)


def _lost(
    symmetry: Symmetry,
    trained: Mapping[str, Tensor],
    beside: Mapping[str, str],
    looked_up: dict[str, Loses],
    shared: Collection[str],
) -> str:
    """Return why a law is one no longer; empty if it still is."""
    for name in symmetry.parameters:
        if name not in trained:
            return f"{name} is frozen, so the other legs are not balanced against it"
        if name in shared:
            return f"{name} is shared with another stage of the pipeline, whose gradient is added to its own"
        if name in beside:
            return f"{name} shares memory with {beside[name]}, so that steps of one move the other"
    return lost(symmetry, looked_up)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Residuals:
    """Residuals and what rounding explains of them, after laws up to ε were made exact where that is possible."""

    balance: Balance
    residuals: NDArray[np.float64]
    limits: NDArray[np.float64]
    floors: NDArray[np.float64]
    """The residual that rounding of stored gradients leaves; larger ones are diagnosed."""
    nearly: NDArray[np.bool_]
    """Laws that still hold only up to ε."""


def residuals_of(
    backward: BackwardPass,
    balance: Balance,
    used: torch.dtype,
    accumulated: int,
    gauge: Gauge | None,
    *,
    given: bool,
    replayed: bool = False,
) -> Residuals:
    """Return the residual of every identity; those up to ε are made exact where the pass was watched.

    Where the pass can be replayed, limits are those above which it is: rounding is measured then, not assumed.
    """
    plan = backward.laws.plan
    floors = _limits(backward, used, accumulated, given=given, limit=suspicious)
    rounding_alone = _limits(backward, used, accumulated, given=given, limit=rounding)
    if replayed:
        # What ε leaves is read off activations in the precision of the pass, and is not replayed.
        rounding_alone = np.where(plan.epsilons > 0, rounding_alone, floors)
    residuals, limits = balance.residuals.copy(), rounding_alone + plan.epsilons**0.5
    nearly = plan.epsilons > 0
    gradients = backward.gradients
    sides = _epsilon_sides(backward, gauge) if nearly.any() else {}
    if sides and gradients is not None:
        some, indices = plan.up_to_epsilon
        # In the precision that the identities of all other laws are computed in.
        with torch.no_grad():
            moments = some.evaluate((Point(backward.points), Direction(gradients)), [(0, 1)]).values()
        for index, mu in zip(indices, to_host(moments), strict=True):
            side = sides.get(plan.symmetries[index].name)
            if side is None or not balance.tested[index]:
                continue
            size = math.hypot(balance.scales[index], float(np.linalg.norm(side.value)), side.spread**0.5)
            residuals[index] = float(np.linalg.norm(mu.flatten() - side.value)) / size if size else 0.0
            limits[index], nearly[index] = rounding_alone[index], False
    return Residuals(balance=balance, residuals=residuals, limits=limits, floors=floors, nearly=nearly)


def _epsilon_sides(backward: BackwardPass, gauge: Gauge | None) -> dict[str, RightHandSide]:
    """Return what ε leaves of laws up to it, measured in this pass; data-parallel processes do so together."""
    terms, gradients, group = None if gauge is None else gauge.terms, backward.gradients, backward.data_parallel
    if group is None:
        return {} if terms is None or gradients is None else terms.sides(gradients)
    agreement = active_agreement()
    if agreement is None or gradients is None:
        return {}
    # A process whose hooks saw nothing must not let the others wait.
    ready = agreement.reduce("terms of ε", int(terms is not None and len(terms) > 0), min)
    return terms.sides_of_group(gradients, group) if ready and terms is not None else {}


def precision_of(
    given: torch.dtype | None, backward: BackwardPass, balance: Balance
) -> tuple[torch.dtype, PrecisionSource]:
    """Return the coarsest precision of the pass, and the source of it."""
    if given is not None:
        return given, "given"
    stored = coarsest(*{*backward.types.gradients})
    seen = None if stored in HALF else balance.observed_precision
    if seen is None and stored == torch.float32 and _rounds_factors(backward):
        return SHORTENED, "products"
    return (stored, "stored") if seen is None else (seen, "bits")


def _rounds_factors(backward: BackwardPass) -> bool:
    """Return whether products of the pass may have rounded their factors, as tensor cores do."""
    devices = {point.device.type for point in backward.points.values()}
    known = backward.laws.derivation
    convolutions = any(isinstance(module, _THROUGH_CUDNN) for module in backward.model.modules())
    if isinstance(known, Derivation):
        names = (operation.name for operation in known.typing.program.operations)
        convolutions = convolutions or any("convolution" in name for name in names)
    return any(rounds_factors(device, convolutions=convolutions) for device in devices)


def _reductions() -> float:
    """Return how many roundings a sum over all processes adds to a gradient in half precision.

    The sum of k of n gradients is k/n of the whole and is rounded once: Σ (k/n)² ≈ n/3, and one more for the division.
    """
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    processes = torch.distributed.get_world_size() if several else 1
    return processes / 3 + 1 if processes > 1 else 0.0


def _limits(
    backward: BackwardPass,
    used: torch.dtype,
    accumulated: int,
    *,
    given: bool,
    limit: Callable[[torch.dtype, NDArray[np.int64]], NDArray[np.float64]],
) -> NDArray[np.float64]:
    """Return the residual that rounding explains, for every symmetry.

    Its tensors may be stored more coarsely than others.
    """
    # Libraries run norms, softmax and routers in float32 inside a float64 model, and gradients do not show it.
    least = used if given else coarsest(used, torch.float32)
    plan = backward.laws.plan

    def limits(kind: torch.dtype) -> NDArray[np.float64]:
        # Each pass that is added to a half-precision gradient rounds it once more.
        more = math.sqrt(accumulated + _reductions()) if kind in HALF else 1.0
        return more * limit(coarsest(least, kind), plan.entries)

    pairs = [*zip(backward.types.points, backward.types.gradients, strict=True)]
    by_kind = {kind: limits(kind) for kind in {coarsest(*pair) for pair in {*pairs}}}
    if len(by_kind) == 1:
        return next(iter(by_kind.values()))
    stored = {name: coarsest(*pair) for name, pair in zip(backward.types.names, pairs, strict=True)}
    kinds = (coarsest(*(stored[name] for name in symmetry.parameters)) for symmetry in plan.symmetries)
    return np.array([by_kind[kind][index] for index, kind in enumerate(kinds)])
