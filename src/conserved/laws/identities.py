"""All gradient identities of one backward pass: what is left of each, and what that is held against.

Everything is queued on the device and read once. Parameters that are sharded over processes are gathered once each, in
the order in which the identities need them, and let go after their last use; the processes then agree on the largest
residual any of them found, because a gradient that should be the same everywhere may not be.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from operator import attrgetter
from typing import Any, Protocol, overload, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from conserved._torch_compat import foreach_norm
from conserved.laws.observed_precision import observed_precision
from conserved.laws.rescaled_identities import norms, reweigh
from conserved.moment import Direction, HostCopy, Norms, Plan, Point
from conserved.rank_agreement import confirm_together
from conserved.symmetry import Symmetry, Tensors, whole
from conserved.tolerances import RESIDUAL_TOLERANCE
from conserved.verdict import Evidence, Status

_FEW = 6.0
"""Errors of few entries do not average out: of n entries they may be this many times 1/√n larger."""

_FINEST_FIRST = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

_SAFE = {torch.float64: (1e-140, 1e140)}
_SAFE_SINGLE = (1e-15, 1e17)
"""Between these, squares of a sum and of the products that matter in it are normal numbers."""

_FAINT = 1e-10
"""A gradient of this norm, times parameters, may leave squares that single precision rounds to zero."""

_NOISE = {torch.float16: 1 / 16, torch.bfloat16: 1 / 16}
"""By precision, the largest share of the total rounding error that one gradient may account for; 1 if not listed."""

_GRAINS = (None, torch.float16, torch.bfloat16)
"""Finest first."""


_TENSORS, _ENTRIES = 24, 512
"""Gradients, and entries of each, that are looked at for the precision they were computed in."""


@overload
def rounding(precision: torch.dtype, entries: int) -> float: ...
@overload
def rounding(precision: torch.dtype, entries: NDArray[np.int64]) -> NDArray[np.float64]: ...
def rounding(precision: torch.dtype, entries: int | NDArray[np.int64]) -> float | NDArray[np.float64]:
    """Return the relative residual that rounding explains in an identity whose legs have so many entries."""
    least = max(entries, 1) if isinstance(entries, int) else np.maximum(entries, 1)
    return RESIDUAL_TOLERANCE[precision] * (1 + _FEW / least**0.5)


def coarsest(*precisions: torch.dtype) -> torch.dtype:
    """Return the least precise of some floating-point types; other types are ignored."""
    known = [precision for precision in precisions if precision in _FINEST_FIRST]
    return max(known, key=_FINEST_FIRST.index, default=torch.float64)


def status(residual: float, limit: float, *, tested: bool, nearly: bool) -> Status:
    """Return the evidence of one identity's residual; nothing if it was not tested.

    Of a law that holds `nearly`, up to a norm's ε, a residual over the limit refutes nothing: what is left of it is
    Σ_t ε/(s_t + ε) ⟨y_t, ∂L/∂y_t⟩, and parameters and gradients do not say how small the s_t were. Fresh models
    normalise inputs of mean square ε. It is not verified either.
    """
    if not tested:
        return Status.INCONCLUSIVE
    if residual <= limit:
        return Status.VERIFIED
    return Status.INCONCLUSIVE if nearly and residual == residual else Status.REFUTED


def residual_evidence(name: str, residual: float, limit: float) -> Evidence:
    """Return evidence that holds the residual of one identity against its rounding limit."""
    return Evidence(what=f"relative residual of {name}", value=residual, limit=limit)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Balance:
    """The results of one reading of parameters and gradients, on the host."""

    residuals: NDArray[np.float64]
    """‖μ(θ, G)‖ over its scale, in [0, 1], of every symmetry of the plan."""
    scales: NDArray[np.float64]
    """The size that each residual is relative to."""
    tested: NDArray[np.bool_]
    """Whether each identity is a test: a gradient reached one of its legs, and not all of its legs are zero."""
    names: tuple[str, ...]
    """The parameters that have a gradient, in the order of `norms`."""
    norms: NDArray[np.float64]
    """The norm of each of these gradients."""
    observed_precision: torch.dtype | None
    """The half precision that single-precision gradients show to have been computed in, if they do."""
    lengths: Mapping[str, float]
    """Norms of parameters when this was read off; empty if they are still what they were."""
    ranks: int = 1
    """Processes over which the parameters are sharded."""
    worst_ranks: NDArray[np.int64] | None = None
    """The process that each residual is of, where several have laws of their own by one name."""


@runtime_checkable
class ProcessAgreement(Protocol):
    """The processes that have to reach the same verdict."""

    @property
    def size(self) -> int: ...

    def gather(self, values: Tensor) -> Tensor:
        """Gather a tensor from all processes and stack the results along a new first axis."""
        ...


def balance_of(plan: Plan, theta: Tensors, gradients: Tensors, *, dtype: torch.dtype | None = None) -> Balance:
    """Return every identity of a plan at parameters θ with gradients, which may be of further parameters too."""
    return PendingBalance.start(plan, theta, gradients, dtype=dtype).balance(theta, gradients)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PendingBalance:
    """A reading of parameters and gradients that is queued on their device; nothing has waited for it."""

    plan: Plan
    numbers: HostCopy
    indices: NDArray[np.int64]
    """The symmetries, in the order of their numbers."""
    names: tuple[str, ...]
    """The parameters that have a gradient, in the order of their norms."""
    lengths: tuple[str, ...]
    """Parameters in the order of their own norms, where those are asked for."""
    samples: tuple[int, ...]
    """How many entries were taken of each gradient that is looked at for its precision."""
    least: Mapping[int, float]
    """The share of the norm of all gradients that linear laws are held against at least."""
    single: bool
    """Whether some gradient has less than double precision."""
    meshes: Sequence[Any]
    groups: Sequence[ProcessAgreement] = ()
    device: torch.device | None = None
    """Where processes exchange numbers."""
    made: frozenset[str] = frozenset()
    """Names of small legs, which stand for parameters of several processes: their norms are no gradients' norms."""

    @staticmethod
    def start(
        plan: Plan,
        theta: Tensors,
        gradients: Tensors,
        *,
        dtype: torch.dtype | None = None,
        lengths: bool = False,
        groups: Sequence[ProcessAgreement] = (),
        made: Collection[str] = (),
    ) -> PendingBalance:
        """Queue the reading of parameters θ and gradients: they may change or be freed afterwards.

        Args:
            plan: the symmetries.
            theta: parameters.
            gradients: gradients.
            dtype: the precision, as for `Plan.evaluate`.
            lengths: whether norms of the parameters of laws are needed too.
            groups: processes that have the same laws, and take the largest residual of any of them.
            made: names of tensors that are made of others, and are no gradients of their own.
        """
        with torch.no_grad():
            moments = plan.evaluate((Point(theta), Direction(gradients)), [(0, 1)], sizes=True, dtype=dtype)
            indices, tables = moments.sizes()
            anywhere = next((gradient.device for gradient in gradients.values()), torch.device("cpu"))
            device = tables[0].device if tables else anywhere
            names, norms = _norms_of_all(gradients, moments.norms, device, gradients)
            long, own = _norms_of_all(theta, moments.lengths, device, plan.needs) if lengths else ((), [])
            samples = _samples(gradients, device)
            parts = [*(table.flatten() for table in tables), *norms, *own]
            parts += [torch.cat(samples)] if samples else []
            queued = torch.cat([part.to(device, torch.float64, non_blocking=True) for part in parts])
            numbers = HostCopy.of(queued)
            # The device is at work from here on.
            return PendingBalance(
                plan=plan,
                numbers=numbers,
                indices=np.array(indices, dtype=np.int64),
                names=names,
                lengths=long,
                samples=tuple(part.numel() for part in samples),
                least={index: _least(parameter, gradients) for index, parameter in plan.linear.items()},
                single=any(gradient.dtype != torch.float64 for gradient in gradients.values()),
                meshes=_meshes(theta),
                groups=groups,
                device=device,
                made=frozenset(made),
            )

    def balance(self, theta: Tensors, gradients: Tensors | None) -> Balance:
        """Return every identity, once the numbers are there.

        An inert parameter, whose gradient should itself be zero, is held against the norm of all the gradients; and a
        linear law at least against as much of that norm as rounding could leave in it. Laws whose products over- or
        underflow are taken again from θ and the gradients; without gradients they count as not tested.
        """
        # From here on the device has nothing to do: no loops over identities or gradients.
        plan, names, count = self.plan, self.names, len(self.indices)
        numbers = self.numbers.read().numpy().copy()
        ends = np.cumsum((2 * count, len(names), len(self.lengths)))
        weights, lengths, long, entries = np.split(numbers, ends)
        sizes = np.empty((count, 2))
        sizes[self.indices] = weights.reshape(count, 2)
        values, scales = sizes.T
        if gradients is not None:
            lengths = _norms_again(names, lengths, gradients)
        odd = _odd(values, scales, single=self.single)
        norm_of = dict(zip(names, lengths.tolist(), strict=True)) if odd.any() else {}
        odd = _suspects(odd, plan.symmetries, values, scales, norm_of)
        if self.meshes:
            # All processes gather what any of them has to look at again.
            odd = np.array(_agree(odd.astype(float).tolist(), self.meshes)) > 0
        if self.made:
            real = np.array([name not in self.made for name in names], dtype=bool)
            names, lengths = tuple(name for name in names if name not in self.made), lengths[real]
        peak = float(lengths.max(initial=0.0))
        everything = peak * float(np.linalg.norm(lengths / peak)) if 0 < peak < np.inf else peak
        for index, share in self.least.items():
            scales[index] = max(scales[index], share * everything)
        tested = scales > 0
        with np.errstate(invalid="ignore"):
            residuals = np.divide(values, scales, out=values.copy(), where=tested)
        # Legs that all pull one way can exceed the scale; a residual that is not a number stays one.
        residuals[tested & (values > scales)] = 1.0
        for index in np.flatnonzero(odd).tolist():
            symmetry, floor = plan.symmetries[index], self.least.get(index, 0.0) * everything
            if gradients is not None:
                residuals[index], scales[index], tested[index] = reweigh(symmetry, theta, gradients, floor)
            else:
                infinite = not all(isfinite(norm_of.get(name, 0.0)) for name in symmetry.parameters)
                residuals[index], tested[index] = (nan if infinite else 0.0), infinite
        seen = observed_precision(np.split(entries, np.cumsum(self.samples)[:-1])) if self.samples else None
        if self.meshes:
            agreed = _agree([float(_GRAINS.index(seen)), *residuals.tolist()], self.meshes)
            seen, residuals = _GRAINS[round(agreed[0])], np.array(agreed[1:])
        worst_ranks = None
        for group in self.groups:
            coarse, residuals, tested, worst_ranks = _worst(
                group, _GRAINS.index(seen), residuals, tested, worst_ranks, self.device
            )
            seen = _GRAINS[coarse]
        return Balance(
            residuals=residuals,
            scales=scales,
            tested=tested,
            names=names,
            norms=lengths,
            observed_precision=seen,
            lengths=dict(zip(self.lengths, long.tolist(), strict=True)),
            ranks=max((*(mesh.size() for mesh in self.meshes), *(group.size for group in self.groups)), default=1),
            worst_ranks=worst_ranks,
        )


def _odd(values: NDArray[np.float64], scales: NDArray[np.float64], *, single: bool) -> NDArray[np.bool_]:
    """Return the laws whose squares over- or underflow; `single` means less than double precision."""
    least, most = _SAFE_SINGLE if single else _SAFE[torch.float64]
    return ~(np.isfinite(values) & (scales >= least) & (scales <= most))


def _suspects(
    odd: NDArray[np.bool_],
    symmetries: Sequence[Symmetry],
    values: NDArray[np.float64],
    scales: NDArray[np.float64],
    norms: dict[str, float],
) -> NDArray[np.bool_]:
    """Return the indices of the odd laws whose value or scale may be wrong.

    `norms` are of the gradients.

    A scale of zero is right where no gradient reaches a law. It is doubted where the gradient of one of its parameters
    is zero and that of another is not (a factor that starts at zero, as LoRA's B does), and where gradients are faint.
    """
    odd = odd.copy()
    for index in np.flatnonzero(odd).tolist():
        if scales[index] != 0 or not np.isfinite(values[index]):
            continue
        sizes = [norms.get(name, 0.0) for name in symmetries[index].parameters]
        odd[index] = max(sizes) > 0 and (min(sizes) == 0 or not max(sizes) > _FAINT)
    return odd


def _norms_again(names: Sequence[str], lengths: NDArray[np.float64], gradients: Tensors) -> NDArray[np.float64]:
    """Return the norms. Those that are zero or infinite because squares under- or overflow are computed again."""
    odd = np.flatnonzero(~np.isfinite(lengths) | (lengths == 0))
    if not len(odd):
        return lengths
    result = lengths.copy()
    result[odd] = norms([gradients[names[index]] for index in odd.tolist()])
    return result


def _least(parameter: str | None, gradients: Tensors) -> float:
    """Return the share of the norm of all gradients that a linear law of a parameter is held against at least."""
    if parameter is None:
        return 1.0
    stored = gradients[parameter].dtype
    return _NOISE.get(stored, 1.0) * torch.finfo(stored).eps / RESIDUAL_TOLERANCE[stored]


def _norms_of_all(
    tensors: Tensors, known: Norms | None, device: torch.device, wanted: Collection[str]
) -> tuple[tuple[str, ...], list[Float[Tensor, " some"]]]:
    """Return norms of the named tensors: the names in the order of the norms, and the norms in several tensors.

    Norms that are known already are of tensors among these.
    """
    if known is not None and len(known.names) == len(wanted):
        return known.names, [known.values]
    read = () if known is None else known.names
    rest = {*wanted}.difference(read)
    names, values = _norms({name: tensors[name] for name in wanted if name in rest}, device)
    return (*read, *names), [*([] if known is None else [known.values]), values]


def _norms(gradients: Tensors, device: torch.device) -> tuple[tuple[str, ...], Float[Tensor, " gradients"]]:
    """Return names and norms of all gradients; both are in the same order.

    Norms of plain tensors are computed in few operations, and none of them in half precision.
    """
    alike: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    for name, gradient in gradients.items():
        if not hasattr(gradient, "full_tensor"):
            alike.setdefault((gradient.dtype, gradient.device), []).append(name)
    order: list[str] = []
    parts: list[Tensor] = []
    for (kind, _), names in alike.items():
        # What torch.nn.utils.clip_grad_norm_ uses; the public form gives the total only.
        precise = torch.promote_types(kind, torch.float32)
        order += names
        parts.append(torch.stack(foreach_norm([_dense(gradients[name]) for name in names], 2, precise)))
    # In one order on every process: sharded norms are added up over them.
    for name in [name for name, gradient in gradients.items() if hasattr(gradient, "full_tensor")]:
        order.append(name)
        parts.append(whole(torch.linalg.vector_norm(gradients[name])).reshape(1))
    if not parts:
        return (), torch.zeros(0, device=device, dtype=torch.float64)
    return (*order,), torch.cat([part.to(device, torch.float64, non_blocking=True) for part in parts])


def _dense(gradient: Tensor) -> Tensor:
    # Entries of a sparse gradient may be listed twice, so its values have another norm than their sum.
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _samples(gradients: Tensors, device: torch.device) -> list[Tensor]:
    """Return entries of the largest single-precision gradients, spread over each."""
    every = [*gradients.values()]
    kinds = {*map(attrgetter("dtype"), every)}
    if torch.float32 not in kinds:
        return []
    if len(kinds) > 1:
        every = [gradient for gradient in every if gradient.dtype == torch.float32]
    sizes = np.fromiter(map(Tensor.numel, every), np.int64, len(every))
    taken: list[Tensor] = []
    for index in np.argsort(-sizes, kind="stable")[:_TENSORS].tolist():
        gradient = every[index]
        local: Any = gradient.to_local() if hasattr(gradient, "to_local") else _dense(gradient)
        count = local.numel()
        row = local if local.is_contiguous() else local.reshape(-1)
        some = row.as_strided((min(_ENTRIES, count),), (max(1, count // _ENTRIES),))
        taken.append(some if some.device == device else some.to(device, non_blocking=True))
    return taken


def _meshes(tensors: Tensors) -> list[Any]:
    """Return the meshes of processes over which parameters are sharded, each once."""
    meshes: dict[Any, Any] = {}
    if {*map(type, tensors.values())} <= {Tensor, nn.Parameter}:
        return []
    for tensor in tensors.values():
        mesh: Any = getattr(tensor, "device_mesh", None)
        if mesh is not None:
            meshes.setdefault(id(mesh), mesh)
    return list(meshes.values())


def _agree(numbers: list[float], meshes: Sequence[Any]) -> list[float]:
    """Return the largest of each number over all processes that hold a part of the parameters, so that all judge
    alike.
    """
    import torch.distributed as dist

    confirm_together("residuals")
    for mesh in meshes:
        # A process with a value that is not a number must win over those without: infinity is the largest.
        values = torch.tensor(numbers, dtype=torch.float64, device=mesh.device_type).nan_to_num(nan=float("inf"))
        for group in mesh.get_all_groups():
            dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
        numbers = values.tolist()
    return [float("nan") if value == float("inf") else value for value in numbers]


def _worst(
    group: ProcessAgreement,
    precision: int,
    residuals: NDArray[np.float64],
    tested: NDArray[np.bool_],
    ranks: NDArray[np.int64] | None,
    device: torch.device | None,
) -> tuple[int, NDArray[np.float64], NDArray[np.bool_], NDArray[np.int64]]:
    """Return the coarsest precision, the largest residual of each law over a group, and the rank it is of."""
    import torch.distributed as dist

    own = np.full(len(residuals), dist.get_rank()) if ranks is None else ranks
    # A process with a value that is not a number must win over those without: infinity is the largest.
    reported = np.where(tested, np.nan_to_num(residuals, nan=np.inf), -1.0)
    numbers = np.concatenate(([float(precision)], reported, own.astype(float)))
    every = group.gather(torch.tensor(numbers, dtype=torch.float64, device=device)).cpu().numpy()
    maxima, holders = np.split(every[:, 1:], 2, axis=1)
    first = maxima.argmax(0)
    largest = maxima.max(0)
    indices = np.arange(len(residuals))
    chosen = np.where(np.isinf(largest), np.nan, np.where(largest < 0, residuals, largest))
    return int(every[:, 0].max()), chosen, largest >= 0, holders[first, indices].astype(np.int64)
