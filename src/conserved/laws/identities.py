"""All gradient identities of one backward pass: what is left of each, and what that is held against.

Everything is queued on the device and read once. Parameters that are sharded over processes are gathered once each, in
the order in which the identities need them, and let go after their last use; the processes then agree on the largest
residual any of them found, because a gradient that should be the same everywhere may not be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from conserved.laws.gradient_grain import grain
from conserved.laws.identity_verdicts import TOLERANCE
from conserved.laws.rescaled_identities import norms, reweighed, suspects
from conserved.moment import Direction, Plan, Point
from conserved.moment.host_copy import HostCopy
from conserved.symmetry import Symmetry, Tensors, whole

_NOISE = {torch.float16: 1 / 16, torch.bfloat16: 1 / 16}
"""By precision, the largest share of the total rounding error that one gradient may account for; 1 if not listed."""

_GRAINS = (None, torch.float16, torch.bfloat16)
"""Finest first."""

_TENSORS, _ENTRIES = 24, 512
"""Gradients, and entries of each, that are looked at for the precision they were computed in."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Balance:
    """What one reading of parameters and gradients gives, on the host."""

    residuals: NDArray[np.float64]
    """‖μ(θ, G)‖ over its scale, in [0, 1], of every symmetry of the plan."""
    scales: NDArray[np.float64]
    """What each residual is relative to."""
    tested: NDArray[np.bool_]
    """Whether each identity says something: a gradient reached one of its legs, and not all of its legs are zero."""
    names: tuple[str, ...]
    """The parameters that have a gradient, in some order."""
    norms: NDArray[np.float64]
    """The norm of each of these gradients."""
    grain: torch.dtype | None
    """The half precision that single-precision gradients show to have been computed in, if they do."""
    ranks: int = 1
    """Processes over which the parameters are sharded."""


def balance_of(plan: Plan, theta: Tensors, slopes: Tensors, *, dtype: torch.dtype | None = None) -> Balance:
    """Every identity of a plan at parameters θ with gradients, which may be of further parameters too."""
    return Weighing.begun(plan, theta, slopes, dtype=dtype).balance(theta, slopes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weighing:
    """A reading of parameters and gradients that is queued on their device; nothing has waited for it."""

    plan: Plan
    numbers: HostCopy
    places: Sequence[int]
    """The symmetries, in the order of their numbers."""
    names: tuple[str, ...]
    """The parameters that have a gradient, in the order of their norms."""
    samples: tuple[int, ...]
    """How many entries were taken of each gradient that is looked at for its precision."""
    least: Mapping[int, float]
    """The share of the norm of all gradients that linear laws are held against at least."""
    single: bool
    """Whether some gradient has less than double precision."""
    meshes: Sequence[Any]

    @staticmethod
    def begun(plan: Plan, theta: Tensors, slopes: Tensors, *, dtype: torch.dtype | None = None) -> Weighing:
        """Queue everything that is read of parameters θ and gradients: they may change or be freed afterwards."""
        with torch.no_grad():
            moments = plan.evaluate((Point(theta), Direction(slopes)), [(0, 1)], sizes=True, dtype=dtype)
            places, tables = moments.sizes()
            read = () if moments.norms is None else moments.norms.names
            known = frozenset(read)
            rest = {name: slope for name, slope in slopes.items() if name not in known} if read else slopes
            anywhere = next((slope.device for slope in slopes.values()), torch.device("cpu"))
            device = tables[0].device if tables else anywhere
            samples = _samples(slopes, device)
            parts = [*(table.flatten() for table in tables), *([] if moments.norms is None else [moments.norms.values])]
            parts += [_norms(rest, device), *([torch.cat(samples)] if samples else [])]
            queued = torch.cat([part.to(device, torch.float64, non_blocking=True) for part in parts])
            return Weighing(
                plan=plan,
                numbers=HostCopy.of(queued),
                places=places,
                names=(*read, *rest),
                samples=tuple(part.numel() for part in samples),
                least={place: _least(plan.symmetries[place], slopes) for place in plan.linear},
                single=any(slope.dtype != torch.float64 for slope in slopes.values()),
                meshes=_meshes(theta),
            )

    def balance(self, theta: Tensors, slopes: Tensors | None) -> Balance:
        """Every identity, once the numbers are there.

        An inert parameter, whose gradient should itself be zero, is held against the norm of all the gradients; and a
        linear law at least against as much of that norm as rounding could leave in it. Laws whose products over- or
        underflow are taken again from θ and the gradients; without gradients they count as not tested.
        """
        # From here on the device has nothing to do: no loops over identities or gradients.
        plan, names, count = self.plan, self.names, len(self.places)
        numbers = self.numbers.read().numpy().copy()
        weights, lengths, entries = np.split(numbers, (2 * count, 2 * count + len(names)))
        sizes = np.empty((count, 2))
        sizes[np.array(self.places, dtype=np.int64)] = weights.reshape(count, 2)
        values, scales = sizes.T
        if slopes is not None:
            lengths = _norms_again(names, lengths, slopes)
        norm_of = dict(zip(names, lengths.tolist(), strict=True))
        odd = suspects(plan.symmetries, values, scales, norm_of, single=self.single)
        if self.meshes:
            # All processes gather what any of them has to look at again.
            odd = np.array(_agreed(odd.astype(float).tolist(), self.meshes)) > 0
        peak = float(lengths.max(initial=0.0))
        everything = peak * float(np.linalg.norm(lengths / peak)) if 0 < peak < np.inf else peak
        for place, share in self.least.items():
            scales[place] = max(scales[place], share * everything)
        tested = scales > 0
        with np.errstate(invalid="ignore"):
            residuals = np.divide(values, scales, out=values.copy(), where=tested)
        # Legs that all pull one way can exceed the scale; a residual that is not a number stays one.
        residuals[tested & (values > scales)] = 1.0
        for place in np.flatnonzero(odd).tolist():
            symmetry, floor = plan.symmetries[place], self.least.get(place, 0.0) * everything
            if slopes is not None:
                residuals[place], scales[place], tested[place] = reweighed(symmetry, theta, slopes, floor)
            else:
                infinite = not all(isfinite(norm_of.get(name, 0.0)) for name in symmetry.parameters)
                residuals[place], tested[place] = (nan if infinite else 0.0), infinite
        seen = grain(np.split(entries, np.cumsum(self.samples)[:-1])) if self.samples else None
        if self.meshes:
            agreed = _agreed([float(_GRAINS.index(seen)), *residuals.tolist()], self.meshes)
            seen, residuals = _GRAINS[round(agreed[0])], np.array(agreed[1:])
        return Balance(
            residuals=residuals,
            scales=scales,
            tested=tested,
            names=names,
            norms=lengths,
            grain=seen,
            ranks=max((mesh.size() for mesh in self.meshes), default=1),
        )


def _norms_again(names: Sequence[str], lengths: NDArray[np.float64], slopes: Tensors) -> NDArray[np.float64]:
    """The norms, with those computed anew that are zero or infinite because squares are."""
    odd = np.flatnonzero(~np.isfinite(lengths) | (lengths == 0))
    if not len(odd):
        return lengths
    found = lengths.copy()
    found[odd] = norms([slopes[names[place]] for place in odd.tolist()])
    return found


def _least(symmetry: Symmetry, slopes: Tensors) -> float:
    """The share of the norm of all gradients that a linear law is held against at least."""
    if symmetry.inert:
        return 1.0
    stored = slopes[symmetry.parameters[0]].dtype
    return _NOISE.get(stored, 1.0) * torch.finfo(stored).eps / TOLERANCE[stored]


def _norms(slopes: Tensors, device: torch.device) -> Float[Tensor, " gradients"]:
    """The norm of every gradient; those of plain ones in few operations, and none in half precision."""
    alike: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    for name, slope in slopes.items():
        if not hasattr(slope, "full_tensor"):
            alike.setdefault((slope.dtype, slope.device), []).append(name)
    order: list[str] = []
    parts: list[Tensor] = []
    for (kind, _), names in alike.items():
        # What torch.nn.utils.clip_grad_norm_ uses; the public form gives the total only.
        precise = torch.promote_types(kind, torch.float32)
        order += names
        parts.append(torch.stack(torch._foreach_norm([_dense(slopes[name]) for name in names], 2, precise)))
    # In one order on every process: sharded norms are added up over them.
    for name in [name for name, slope in slopes.items() if hasattr(slope, "full_tensor")]:
        order.append(name)
        parts.append(whole(torch.linalg.vector_norm(slopes[name])).reshape(1))
    if not parts:
        return torch.zeros(0, device=device, dtype=torch.float64)
    found = torch.cat([part.to(device, torch.float64, non_blocking=True) for part in parts])
    if order == list(slopes):
        return found
    places = {name: place for place, name in enumerate(order)}
    return found[torch.tensor([places[name] for name in slopes]).to(device, non_blocking=True)]


def _dense(slope: Tensor) -> Tensor:
    # Entries of a sparse gradient may be listed twice, so its values have another norm than their sum.
    return slope.coalesce().values() if slope.is_sparse else slope


def _samples(slopes: Tensors, device: torch.device) -> list[Tensor]:
    """Entries of the largest single-precision gradients, spread over each."""
    single = [name for name, slope in slopes.items() if slope.dtype == torch.float32]
    taken: list[Tensor] = []
    for name in sorted(single, key=lambda name: -slopes[name].numel())[:_TENSORS]:
        slope = slopes[name]
        local: Any = slope.to_local() if hasattr(slope, "to_local") else _dense(slope)
        step = max(1, local.numel() // _ENTRIES)
        some = local.detach().reshape(-1).as_strided((min(_ENTRIES, local.numel()),), (step,))
        taken.append(some.to(device, non_blocking=True))
    return taken


def _meshes(tensors: Tensors) -> list[Any]:
    """The meshes of processes over which parameters are sharded, each once."""
    found: dict[Any, Any] = {}
    for tensor in tensors.values():
        mesh: Any = getattr(tensor, "device_mesh", None)
        if mesh is not None:
            found.setdefault(id(mesh), mesh)
    return list(found.values())


def _agreed(numbers: list[float], meshes: Sequence[Any]) -> list[float]:
    """The largest of each number over all processes that hold a part of the parameters, so that all judge alike."""
    import torch.distributed as dist

    for mesh in meshes:
        # A process that found something that is not a number must be heard over those that did not.
        values = torch.tensor(numbers, dtype=torch.float64, device=mesh.device_type).nan_to_num(nan=float("inf"))
        for group in mesh.get_all_groups():
            dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
        numbers = values.tolist()
    return [float("nan") if value == float("inf") else value for value in numbers]
