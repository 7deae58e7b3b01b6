"""From the account of a step to what is kept of it: residuals, what rounding explains, equation (10), running sums."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from conserved.laws import Change, Reference
from conserved.symmetry import Symmetry, Tensors
from conserved.tolerances import RESIDUAL_TOLERANCE
from conserved.tracking.ledger import LawStack, StepAccount, rounding


@dataclass(slots=True, kw_only=True)
class RunningTotals:
    """The state that a stack keeps between steps."""

    reference: Float[Tensor, "laws numbers"]
    """The laws when watching began."""
    previous: Float[Tensor, "laws numbers"]
    """The laws after the last step that was looked at."""
    accounted: Float[Tensor, "laws numbers"]
    """The sum of all accounts."""
    sizes: Float[Tensor, "laws rows"]
    """The size of the terms after the last step."""
    rounded: Float[Tensor, " laws"]
    """The sum of squares of what rounding explains in each step."""
    moved: Float[Tensor, " laws"]
    """Σ ‖U‖²."""
    steepest: Float[Tensor, " laws"]
    """The largest ‖U‖²/lr²: the C_L of equation (9)."""

    def tensors(self) -> dict[str, Tensor]:
        """Return all of it, by name."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scales:
    """Constants of a run: denominators, rounding errors, and which laws the gradient may move."""

    denominators: Float[Tensor, "laws units"]
    multiplicities: Float[Tensor, " numbers"]
    rounding: Float[Tensor, "laws 1"]
    tolerance: Float[Tensor, " laws"]
    floor: Float[Tensor, " laws"]
    """The least steepness of a linear law, as a share of the norm of all gradients."""
    loose: Mapping[str, Float[Tensor, "laws 1"]]
    """By cause, the laws for which the gradient itself is one: those that hold up to ε, and impostors."""

    @staticmethod
    def of(
        stack: LawStack,
        symmetries: Sequence[Symmetry],
        theta: Tensors,
        reference: Reference,
        *,
        impostors: Collection[str],
        dtype: torch.dtype | None,
        precision: torch.dtype | None,
        like: Tensor,
    ) -> Scales:
        chosen = [symmetries[index] for index in stack.indices]
        limits, floors = [], []
        for symmetry in chosen:
            stored = [theta[name].dtype for name in symmetry.parameters]
            used = [precision or dtype_ for dtype_ in stored]
            limits.append(max(RESIDUAL_TOLERANCE[dtype_] for dtype_ in used))
            share = max(torch.finfo(dtype_).eps / RESIDUAL_TOLERANCE[dtype_] for dtype_ in used)
            floors.append((1.0 if symmetry.inert else share) if symmetry.kind.linear else 0.0)
        loose = {
            "epsilon": [not symmetry.exact for symmetry in chosen],
            "gradient": [symmetry.name in impostors for symmetry in chosen],
        }
        return Scales(
            denominators=torch.stack([_denominators(stack, reference, dtype_.name) for dtype_ in chosen]).to(like),
            multiplicities=stack.kind.products.multiplicities(stack.n, chosen[0].m).to(like),
            rounding=like.new_tensor(rounding(stack, symmetries, theta, dtype))[:, None],
            tolerance=like.new_tensor(limits),
            floor=like.new_tensor(floors),
            loose={cause: like.new_tensor(which)[:, None] for cause, which in loose.items() if any(which)},
        )

    def no_finer_than(self, other: Scales) -> Scales:
        """Return the same scales with whichever rounding is coarser.

        Laws are computed in the precision watching began in.
        """
        return replace(
            self,
            rounding=torch.maximum(self.rounding, other.rounding),
            tolerance=torch.maximum(self.tolerance, other.tolerance),
            floor=torch.maximum(self.floor, other.floor),
        )

    def measured_against(self, stack: LawStack, symmetries: Sequence[Symmetry], reference: Reference) -> Scales:
        """Return the same scales with the denominators of another reference."""
        rows = [_denominators(stack, reference, symmetries[index].name) for index in stack.indices]
        return replace(self, denominators=torch.stack(rows).to(self.denominators))


def _denominators(stack: LawStack, reference: Reference, name: str) -> Tensor:
    size, terms = (
        torch.linalg.vector_norm(stack.kind.units(part[name]), dim=-1) for part in (reference.values, reference.scales)
    )
    return Change(distance=size, size=size, terms=terms).unit()


def start_account(account: StepAccount) -> RunningTotals:
    """Start the sums of a run here."""
    return RunningTotals(
        reference=account.law.clone(),
        previous=account.law.clone(),
        accounted=torch.zeros_like(account.law),
        sizes=account.sizes.clone(),
        rounded=torch.zeros_like(account.moved),
        moved=torch.zeros_like(account.moved),
        steepest=torch.zeros_like(account.moved),
    )


def close_step(
    stack: LawStack,
    scales: Scales,
    running: RunningTotals,
    account: StepAccount,
    *,
    unclipped: Tensor | None,
    gradient_norm: Tensor | None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return one step: the numbers of every law, by field and by cause; `running` moves on."""
    first = _first_order(scales, account, unclipped)
    observed = account.law - running.previous
    explained = sum(first.values(), account.second)
    residual = observed - explained
    rate = _by_law(account)
    steepness = account.steepness
    if gradient_norm is not None:
        steepness = torch.maximum(steepness, scales.floor * gradient_norm)
    sizes = torch.maximum(account.sizes, running.sizes)
    bound = scales.rounding * stack.kind.products.reach(sizes) + (rate * scales.tolerance * steepness)[:, None]
    magnitude = residual.abs()
    ratios = _ratio(magnitude, bound)
    excess = ratios.amax(-1)
    broken = excess > 1
    # What has raised an alarm of its own is not a leak as well; twice, so that it alone stays well below one.
    widened = torch.where(broken, 2 * magnitude.amax(-1), 0.0)
    _move_on(running, account, explained, torch.maximum(bound.amax(-1), widened), rate)
    drift = account.law - running.reference
    gone = drift - running.accounted
    # The entry that is shown: where most happened, unless one breaks its limit.
    most = (observed.abs() + magnitude).argmax(-1, keepdim=True)
    where = torch.where(broken[:, None], ratios.nan_to_num(nan=float("inf")).argmax(-1, keepdim=True), most)
    farthest = drift.abs().argmax(-1, keepdim=True)
    there = torch.stack((observed, account.second, residual, bound, *first.values()))
    seen, second, rest, limit, *causes = there.gather(-1, where.expand(len(there), -1, -1))[..., 0]
    fields = {
        "observed": seen,
        "second_order": second,
        "residual": rest,
        "bound": limit,
        "excess": excess,
        "leak": _ratio(gone.abs().amax(-1), running.rounded.sqrt()),
        "error": equation_10(stack, scales, drift),
        "drift": drift.gather(-1, farthest)[:, 0],
        "predicted": running.accounted.gather(-1, farthest)[:, 0],
        "moved": account.moved,
        "rate": rate,
    }
    return fields, dict(zip(first, causes, strict=True))


def _by_law(account: StepAccount) -> Float[Tensor, " laws"]:
    """Return the learning rate of a step as a vector with one entry for each law."""
    if isinstance(account.rate, Tensor):
        return (torch.ones_like(account.law[:, :1]) * account.rate)[:, 0]
    return account.law.new_full((len(account.law),), account.rate)


def _first_order(scales: Scales, account: StepAccount, unclipped: Tensor | None) -> dict[str, Tensor]:
    """Return what every cause did; the gradient is one where it may move a law, and so is clipping."""
    first, gradient_term = dict(account.first), account.gradient_term
    if unclipped is not None:
        first["clipping"] = account.rate * (gradient_term - unclipped)
        gradient_term = unclipped
    gradient = account.rate * gradient_term
    return first | {cause: which * gradient for cause, which in scales.loose.items()}


def _move_on(running: RunningTotals, account: StepAccount, explained: Tensor, rounded: Tensor, rate: Tensor) -> None:
    """Add the step to the sums of a run."""
    running.accounted += explained
    # Copies: what an account holds are views of everything it was computed from.
    running.previous, running.sizes = account.law.clone(), account.sizes.clone()
    running.rounded += rounded.square()
    running.moved += account.moved
    steep = torch.where(rate > 0, account.moved / rate.square(), 0.0)
    running.steepest = torch.maximum(running.steepest, steep)


def _ratio(value: Tensor, limit: Tensor) -> Tensor:
    """Return value / limit, and 0 where the value is 0, whatever the limit."""
    return (value / limit).masked_fill_(value == 0, 0.0)


def equation_10(stack: LawStack, scales: Scales, drift: Float[Tensor, "laws numbers"]) -> Float[Tensor, " laws"]:
    """Return ‖h_i(θ) − h_i(θ_0)‖ / ‖h_i(θ_0)‖, averaged over the laws h_i of each row."""
    if stack.kind.together:
        change = (scales.multiplicities * drift.square()).sum(-1, keepdim=True).sqrt()
    else:
        change = drift.abs()
    return (change / scales.denominators).mean(-1)
