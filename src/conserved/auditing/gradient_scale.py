"""Is the gradient as large as the loss says? The directional derivative of the loss against ⟨G, d⟩.

Gradient identities are linear in G and pass whatever factor it has. Two forward passes see it: along a direction d,
(L(θ + hd) − L(θ − hd)) / 2h = ⟨∇L, d⟩ up to h². If G = c ∇L, the ratio ⟨G, d⟩ / derivative is c.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conserved._torch_compat import preserve_version_counter
from conserved.output.result import PrintableResult
from conserved.plain_data import record_of
from conserved.symmetry.view import local
from conserved.verdict import Evidence, Status, Verdict

_CURVED = 0.3
"""Change of the ratio between two sizes of steps above which the loss is too curved to tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRow:
    """Two derivatives of the loss along one direction: from the gradient, and from finite differences."""

    direction: str
    claimed: float
    """⟨G, d⟩."""
    measured: float
    """The derivative of the loss along d, by finite differences."""
    uncertainty: float
    """The error of the ratio that curvature of the loss and rounding explain."""

    @property
    def ratio(self) -> float:
        """The factor by which the gradient is too large; 1 for a right gradient."""
        return self.claimed / self.measured if self.measured else float("inf")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GradientScale(PrintableResult):
    """The scale of the gradients in `.grad`, along the gradient itself and with every tensor weighted alike."""

    rows: tuple[ScaleRow, ...]
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the gradient has the scale of the loss along every direction."""
        return self.verdict.holds

    @property
    def ratio(self) -> float:
        """The length of the gradient over the right one, along its own direction."""
        return self.rows[0].ratio if self.rows else float("nan")

    @property
    def verdict(self) -> Verdict:
        """One verdict on both directions."""
        evidence = tuple(
            Evidence(what=f"scale along {row.direction}, less one", value=abs(row.ratio - 1), limit=self._limit(row))
            for row in self.rows
        )
        unsure = [row for row in self.rows if row.uncertainty > _CURVED]
        wrong = [row for row in self.rows if row not in unsure and abs(row.ratio - 1) > self._limit(row)]
        if wrong:
            message = (
                f"The gradient is {wrong[0].ratio:.4g} times that of the loss along {wrong[0].direction}. Is a loss "
                "summed over accumulated batches or processes, scaled and not unscaled, or a derivative wrong?"
            )
            return Verdict(status=Status.REFUTED, message=message, evidence=evidence)
        if unsure or not self.rows:
            message = "The loss is too curved or too coarse to tell the scale of its gradient."
            return Verdict(status=Status.INCONCLUSIVE, message=message, evidence=evidence)
        return Verdict(status=Status.VERIFIED, message="The gradient has the scale of the loss.", evidence=evidence)

    def _limit(self, row: ScaleRow) -> float:
        return max(self.tolerance, 3 * row.uncertainty)

    def summary(self) -> str:
        """Return the verdict with its evidence."""
        return str(self.verdict)

    def __repr__(self) -> str:
        return f"<GradientScale: {self.verdict.status.value}, {self.ratio:.4g} times the loss's gradient>"

    def record(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return self.verdict.record() | {
            "rows": [record_of(row, "direction claimed measured ratio") for row in self.rows]
        }


def check_scale(model: nn.Module, loss_fn: Callable[[], Tensor | float], *, tolerance: float = 0.01) -> GradientScale:
    """Hold the gradients in `.grad` against the loss: are they its gradients, or a multiple of them?

        loss_fn = lambda: criterion(model(x), y)     # the loss as it is reported, over the whole batch
        assert conserved.check_scale(model, loss_fn).ok

    Call it between `backward()` and `step()`. `loss_fn` is called eight times without gradients, with weights moved
    along the gradient and along a direction in which every tensor weighs alike. Both are put back afterwards.

    Args:
        model: the model, with the gradients that an optimizer is about to use.
        loss_fn: computes the loss that these gradients should be of: the mean over all batches that were accumulated.
            In a distributed run its mean over all processes is taken.
        tolerance: how far the scale may be from one.

    Returns:
        The ratio along both directions, with one verdict: VERIFIED, REFUTED, or INCONCLUSIVE where the loss is too
        curved.

    Raises:
        ValueError: no parameter has a gradient.
    """
    pairs = [(p, p.grad.detach()) for p in model.parameters() if p.grad is not None and p.requires_grad]
    if not pairs:
        raise ValueError("Expected gradients in `.grad`, got none. Call backward() first.")
    norms = [float(local(g).double().norm()) for _, g in pairs]
    sizes = [max(float(local(p.detach()).double().norm()), 1e-3 * local(p).numel() ** 0.5) for p, _ in pairs]
    alike = [size / norm if norm else 0.0 for norm, size in zip(norms, sizes, strict=True)]
    total = sum(size**2 for size in sizes) ** 0.5 / max(sum(norm**2 for norm in norms) ** 0.5, 1e-300)
    rows = []
    # Weights are what they were afterwards: a monitor, or autograd, has nothing to notice.
    with preserve_version_counter(tuple(p for p, _ in pairs)):
        for name, weights in (("the gradient", [total] * len(pairs)), ("all tensors alike", alike)):
            claimed = sum(weight * norm**2 for weight, norm in zip(weights, norms, strict=True))
            rows.append(_measure(pairs, weights, loss_fn, name, claimed))
    return GradientScale(rows=tuple(rows), tolerance=tolerance)


def _measure(
    pairs: Sequence[tuple[Tensor, Tensor]],
    weights: list[float],
    loss_fn: Callable[[], Tensor | float],
    name: str,
    claimed: float,
) -> ScaleRow:
    """Return the derivative along weights · G, with steps of two sizes."""
    eps = max(torch.finfo(p.dtype).eps for p, _ in pairs)
    # Central differences: the error is h² of curvature plus eps/h of rounding, least at the cube root of eps.
    step = eps ** (1 / 3) / 4
    originals = [p.detach().clone() for p, _ in pairs]
    values = []
    try:
        for size in (step, 2 * step):
            pair = []
            for sign in (1.0, -1.0):
                _move(pairs, originals, weights, sign * size)
                pair.append(_loss(loss_fn))
            values.append((pair[0] - pair[1]) / (2 * size))
            rounding = eps * abs(pair[0]) / size
    finally:
        _move(pairs, originals, weights, 0.0)
    measured = (4 * values[0] - values[1]) / 3
    spread = abs(values[0] - values[1]) / 3 + rounding
    return ScaleRow(direction=name, claimed=claimed, measured=measured, uncertainty=spread / max(abs(measured), 1e-300))


@torch.no_grad()
def _move(pairs: Sequence[tuple[Tensor, Tensor]], originals: list[Tensor], weights: list[float], size: float) -> None:
    for (p, g), value, weight in zip(pairs, originals, weights, strict=True):
        p.copy_(value if not size else value + size * weight * g)


@torch.no_grad()
def _loss(loss_fn: Callable[[], Tensor | float]) -> float:
    """Return the loss, the mean of it over processes, with random numbers as they were."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        loss = loss_fn()
    value = torch.as_tensor(loss).detach().double()
    if dist.is_available() and dist.is_initialized():
        value = value / dist.get_world_size()
        dist.all_reduce(value)
    return float(value)
