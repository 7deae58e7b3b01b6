r"""The softmax gauge identity: for every head and sequence, the gradients of all keys add up to zero.

Adding one vector c to all keys of a head adds q_i·c to all scores of row i, and softmax does not see that. So

    Σ_j ∂L/∂k_j = 0        for the keys as the scores use them: after norms, after rotary positions.

It is the moment map of a translation whose one leg is the key activation, so it is computed as every other identity is.
It holds with any mask, additive bias, window, dropout and grouping, and fails by design with learned sink logits or
capped scores; such layers are left out. Nothing of size length × length is formed.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from conserved.attention.precision import AttentionPrecision
from conserved.auditing.attention_keys import keys_seen
from conserved.auditing.epsilon_terms import EpsilonTerms
from conserved.boundary import guarded
from conserved.inference import FirstCall, being_followed, known_laws
from conserved.laws import LawSet
from conserved.laws.identities import coarsest, rounding
from conserved.moment import Direction, Plan, Point, to_host
from conserved.output.result import PrintableResult
from conserved.plain_data import record_of
from conserved.product_precision import SHORTENED, rounds_factors
from conserved.symmetry import Translation
from conserved.tolerances import HALF, RESIDUAL_TOLERANCE
from conserved.verdict import Evidence, Status, Verdict

LOGGER = logging.getLogger("conserved.audit")

_COARSE = 8.0
"""In half precision softmax's own differences are rounded, which leaves more of a sum than rounding of its terms; a
missing correction leaves most of it."""

_CANCELLED = 20.0
"""In single precision: dS = P ∘ (dP − D) is a difference, and where it is small against dP the error of dP is large
against it. Defects leave hundredths and more."""

_LOOK = (
    "dK is not what this softmax makes of dO: the correction term of the softmax derivative is missing or belongs to "
    "another block, the mask differs between forward and backward, or keys are stale"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GaugeRow:
    """One head of one attention call: the worst of its sequences."""

    name: str
    head: int
    call: int
    sequence: int
    residual: float
    tolerance: float
    length: int = 1
    """Keys of a sequence."""
    scale: float = 1.0
    """The size that the residual is relative to."""

    @property
    def size(self) -> float:
        """The norm of the sum of key gradients."""
        return self.residual * self.scale

    @property
    def ok(self) -> bool:
        """Whether the sum of key gradients is no more than rounding leaves."""
        return self.residual <= self.tolerance

    def record(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return record_of(self, "name head call sequence residual tolerance ok")


@dataclass(kw_only=True, eq=False, repr=False)
class Gauge(PrintableResult):
    """The key gradients that `conserved.gauge` saw, and their sums by head; read it after leaving the `with` block."""

    precision: torch.dtype | None = None
    terms: EpsilonTerms | None = None
    """The remainder that ε leaves in laws that hold up to it, for `conserved.audit(model, gauge=…)`."""
    excluded: dict[str, str] = field(default_factory=dict)
    """Attention layers for which the identity does not hold by design, and why."""
    attention_precision: AttentionPrecision = field(default_factory=AttentionPrecision)
    """How much of dQ and dK of every head is rounding, predicted for calls in half precision inside `gauge`."""
    seen: int = 0
    """Attention calls whose keys were seen in the forward pass."""
    rounded: tuple[GaugeRow, ...] = ()
    """Heads whose sums are rounding of their kernel; see `kernel_precision`."""
    _sums: list[tuple[str, int, torch.dtype, int, Tensor]] = field(default_factory=list)
    _lengths: list[int] = field(default_factory=list)
    """The number of keys of every call in `_sums`."""
    _plans: dict[tuple[int, ...], Plan] = field(default_factory=dict)
    """For each shape of key gradients, the function that sums them."""

    def see(self, name: str, keys: Tensor, visible: str) -> Tensor:
        """Watch the gradient that these keys get from their attention call, and from no other use of the same tensor.

        Args:
            name: the name of the attention layer.
            keys: the keys as the scores use them, (…, heads, length, width).
            visible: why a shift of all keys would be visible in the outputs of this layer, so that the identity does
                not hold by design; empty if it should hold.

        Returns:
            The keys to compute scores with: a view of `keys` of their own if they are watched.
        """
        if being_followed():
            return keys
        if visible:
            self.excluded[name] = visible
            return keys
        if not keys.requires_grad:
            return keys
        own = keys.view_as(keys)
        call, precision = self.seen, coarsest(keys.dtype, self._computing(keys))
        self.seen += 1
        own.register_hook(guarded(lambda gradient: self._sum_up(name, call, precision, gradient)))
        return own

    @staticmethod
    def _computing(keys: Tensor) -> torch.dtype:
        device = keys.device.type
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
        return SHORTENED if keys.dtype == torch.float32 and rounds_factors(device) else keys.dtype

    def _sum_up(self, name: str, call: int, precision: torch.dtype, gradient: Tensor) -> None:
        self.__dict__.pop("rows", None)
        rows = gradient.detach()
        if rows.shape[-2] == 1 or not rows.numel():
            # Of one key the gradient is zero but for rounding, and there is nothing for it to cancel against.
            return
        with torch.no_grad():
            if rows.dtype == torch.float64:
                # Only the quotient matters, and squares of huge or tiny gradients are infinite or zero.
                peak = rows.abs().amax((-2, -1), keepdim=True)
                rows = rows / torch.where(peak > 0, peak, 1)
            plan = self._plans.get(rows.shape)
            if plan is None:
                plan = self._plans[rows.shape] = Plan.of_matrices(Translation(), (1,), [rows.shape])
            keys = dict.fromkeys(plan.needs, rows)
            # Squares of gradients in less than float64 are finite and not zero in it.
            moments = plan.evaluate((Point(keys), Direction(keys)), [(0, 1)], sizes=True, dtype=torch.float64)
            _, (sizes,) = moments.sizes()
            if rows.dtype == torch.float64:
                sizes = sizes * peak.reshape(-1, 1)
        # Everything before the heads is a sequence.
        heads = rows.shape[-3] if rows.ndim > 2 else 1
        self._lengths.append(rows.shape[-2])
        self._sums.append((name, call, precision, rows.shape[-2] * rows.shape[-1], sizes.reshape(-1, heads, 2)))

    @cached_property
    def rows(self) -> tuple[GaugeRow, ...]:
        """One row for each attention call and head, worst first."""
        if not self._sums:
            return ()
        table = to_host([sizes for *_, sizes in self._sums])
        alike: dict[Any, list[int]] = defaultdict(list)
        for index, (_, _, precision, entries, sizes) in enumerate(self._sums):
            alike[precision, entries, sizes.shape].append(index)
        # Where softmax is saturated, key gradients are differences of equal numbers, and what is left is rounding of
        # those: it is held against the largest key gradients of the pass as well.
        finite = [sizes[..., 1][np.isfinite(sizes[..., 1])] for sizes in table]
        largest = max((float(sizes.max()) for sizes in finite if sizes.size), default=0.0)
        result = []
        for (precision, entries, _), indices in alike.items():
            used = self.precision or coarsest(precision, torch.float32)
            share = torch.finfo(used).eps / RESIDUAL_TOLERANCE[used] * (1 / 64 if used in HALF else 1.0)
            limit = float(rounding(used, entries)) * (_COARSE if used in HALF else _CANCELLED)
            value, scale = np.moveaxis(np.stack([table[index] for index in indices]), -1, 0)
            scale = np.hypot(scale, (scale != 0) * share * largest)
            with np.errstate(invalid="ignore"):
                residuals = np.where(scale == 0, 0.0, value / np.where(scale == 0, 1.0, scale))
            worst = np.nan_to_num(residuals, nan=np.inf).argmax(1)
            largest_of = np.take_along_axis(residuals, worst[:, None], 1)[:, 0]
            scales = np.take_along_axis(scale, worst[:, None], 1)[:, 0]
            for index, *heads in zip(indices, worst.tolist(), largest_of.tolist(), scales.tolist(), strict=True):
                name, call, *_ = self._sums[index]
                common: dict[str, Any] = {"name": name, "call": call, "tolerance": limit}
                common["length"] = self._lengths[index]
                result += [
                    GaugeRow(head=head, sequence=sequence, residual=residual, scale=size, **common)
                    for head, (sequence, residual, size) in enumerate(zip(*heads, strict=True))
                ]
        return tuple(sorted(result, key=lambda row: -row.residual if row.residual == row.residual else -float("inf")))

    def explain(self, rows: Sequence[GaugeRow]) -> None:
        """Accept the sums of some heads as rounding of their kernel: each is its own limit from now on."""
        known = {*map(id, rows)}
        self.rounded = tuple(rows)
        accepted = (replace(row, tolerance=row.residual) if id(row) in known else row for row in self.rows)
        self.__dict__["rows"] = tuple(accepted)

    @property
    def ok(self) -> bool:
        """Whether key gradients were seen and every head's add up to zero."""
        return self.verdict.holds

    @property
    def worst(self) -> float:
        """The largest relative residual; 0 if none was seen."""
        return self.rows[0].residual if self.rows else 0.0

    @property
    def verdict(self) -> Verdict:
        """One verdict on all heads."""
        broken = [row for row in self.rows if not row.ok]
        if not self.rows:
            excluded = f" {len(self.excluded)} attention layers were left out." if self.excluded else ""
            message = f"No gradient of a key was seen.{excluded}"
            return Verdict(status=Status.INCONCLUSIVE, message=message)
        evidence = tuple(
            Evidence(what=f"Σ of key gradients of {row.name}[{row.head}]", value=row.residual, limit=row.tolerance)
            for row in (broken or self.rows[:1])
        )
        if broken:
            message = f"The key gradients of {len(broken)} of {len(self.rows)} heads do not add up to zero: {_LOOK}."
            return Verdict(status=Status.REFUTED, message=message, evidence=evidence)
        message = f"The key gradients of all {len(self.rows)} heads add up to zero."
        return Verdict(status=Status.VERIFIED, message=message, evidence=evidence)

    def summary(self) -> str:
        """Return the verdict with its evidence, what is mostly rounding, and the layers left out."""
        excluded = [f"  left out: {name}, because {why}" for name, why in self.excluded.items()]
        precision = [f"  precision: {alarm.message}" for alarm in self.attention_precision.alarms]
        return "\n".join([str(self.verdict), *precision, *excluded])

    def record(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return self.verdict.record() | record_of(self, "worst rows excluded")

    def __repr__(self) -> str:
        return f"<Gauge: {self.verdict.status.value}, {len(self.rows)} heads, worst {self.worst:.2g}>"


def watch_norms(model: nn.Module, laws: LawSet | None, gauge_: Gauge, undo: ExitStack, *, loss: str = "any") -> None:
    """Measure what ε leaves of laws up to it, as soon as they are known: now, or at the first forward pass."""
    laws = known_laws(model, loss=loss) if laws is None else laws
    if laws is not None:
        gauge_.terms = EpsilonTerms(model, laws)
        gauge_.terms.watch(undo)
        return
    first = FirstCall(model, loss=loss)
    undo.callback(first.close)

    def install() -> None:
        try:
            inferred = first.laws()
        except Exception as problem:
            # Whatever the program is: its attention can be watched without knowing its laws.
            LOGGER.info("laws up to ε are not watched: %s", problem)
            return
        gauge_.terms = EpsilonTerms(model, inferred)
        gauge_.terms.watch(undo)

    first.callbacks.append(install)


@contextmanager
def gauge(
    model: nn.Module, laws: LawSet | None = None, *, precision: torch.dtype | None = None, loss: str = "any"
) -> Iterator[Gauge]:
    """Watch the gradients of all keys of a model, and its norms; the forward and the backward pass both go inside.

        with conserved.gauge(model) as g:
            model(x).square().mean().backward()
        assert g.ok
        assert conserved.audit(model, gauge=g).conclusive

    At the norms it measures the remainder that ε leaves in laws that hold up to it, so that the audit holds them to
    rounding as well; for that the laws are inferred at the first forward pass, unless they are given or known.

    Works with attention of transformers in any implementation, with torch's scaled_dot_product_attention and with
    conserved.blocks, checkpointed or not. A compiled model must be watched uncompiled.

    Args:
        model: the model whose attention calls are watched.
        laws: the laws of the model, for the ones that hold up to a norm's ε; by default they are inferred.
        precision: the coarsest precision of the pass; by default that of the keys, or of autocast around them.
        loss: the loss for which laws are inferred, as for `conserved.recognize`.

    Yields:
        A `Gauge`: `.ok`, `.rows`, `.verdict`, `.excluded`.

    Raises:
        TypeError: `model` is not a module.
        ValueError: no attention call was seen in the block.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"Expected a torch.nn.Module, got {type(model).__name__}. Pass the model whose attention is watched."
        )
    gauge_ = Gauge(precision=precision)
    with ExitStack() as undo:
        undo.enter_context(keys_seen(model, gauge_.see, gauge_.attention_precision))
        watch_norms(model, laws, gauge_, undo, loss=loss)
        yield gauge_
    if not gauge_.seen and not gauge_.excluded:
        raise ValueError(
            "Expected attention in the forward pass, got none that can be watched. Run the forward pass inside "
            "the with block, with gradients and uncompiled, through transformers' interface, "
            "scaled_dot_product_attention or conserved.blocks."
        )
