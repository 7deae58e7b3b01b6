"""The audit itself: every gradient identity of a model after a backward pass, held against that pass's rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from conserved.auditing.audit_result import Audit, Judgement
from conserved.auditing.backward_pass import BackwardPass, precision_of, residuals_of
from conserved.auditing.judgement import judged
from conserved.auditing.softmax_gauge import Gauge
from conserved.inference import laws_of_model
from conserved.laws import LawSet
from conserved.laws.identities import TOLERANCE, Weighing


def audit(
    model: nn.Module,
    laws: LawSet | None = None,
    *,
    loss: str = "any",
    precision: torch.dtype | None = None,
    accumulated: int = 1,
    unused: Sequence[str] = (),
    gauge: Gauge | None = None,
    wait: bool = True,
) -> Audit:
    """Hold every gradient identity against rounding. Call it after `loss.backward()`, before `optimizer.step()`.

    Args:
        model: the model, with gradients on its parameters.
        laws: what to hold them against. Without it, the laws of the model are inferred for `loss` and kept with it; a
            model that does not say how it is called needs `laws=conserved.recognize(model, x)`.
        loss: as for `conserved.recognize`.
        precision: the coarsest that the forward or backward pass was computed in, for instance torch.bfloat16 under
            autocast; without it, it is taken from the stored types and read off the gradients' bits.
        accumulated: backward passes that were added up in the gradients; it matters if those are stored in half
            precision.
        unused: patterns of names of parameters that may have no gradient.
        gauge: what `conserved.gauge(model)` saw of the same passes. The verdict is then on both, and laws up to a
            norm's ε are held to rounding.
        wait: False returns as soon as everything is queued on the device, and the audit is judged when it is first
            read, `.ready` or not. Gradients may be clipped, used and freed in the meantime. As they are not looked at
            again, a failure comes without the factor that would mend it, and identities whose products over- or
            underflow count as not tested. With a gauge, or parameters sharded over processes that have to agree, the
            audit is judged at once all the same.

    Returns:
        An `Audit`: `.ok`, `.conclusive`, `.coverage`, `.failures`, `.summary()`.

    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"audit takes a torch.nn.Module; got {type(model).__name__}.")
    if precision is not None and precision not in TOLERANCE:
        raise ValueError(f"precision is a floating-point type such as torch.bfloat16; got {precision}.")
    if accumulated < 1:
        raise ValueError(f"At least one backward pass was accumulated; got {accumulated}.")
    found = laws_of_model(model, loss=loss) if laws is None else laws
    with torch.no_grad():
        backward = BackwardPass.of(model, found)
        assert backward.slopes is not None
        weighing = Weighing.begun(backward.laws.plan, backward.points, backward.slopes)
        wait = wait or gauge is not None or bool(weighing.meshes)
        judge = partial(_judged, backward if wait else replace(backward, slopes=None), weighing)
        result = Audit(
            partial(judge, precision=precision, accumulated=accumulated, unused=tuple(unused), gauge=gauge),
            lambda: weighing.numbers.arrived,
        )
        if wait:
            _ = result.judgement
        return result


@torch.no_grad()
def _judged(
    backward: BackwardPass,
    weighing: Weighing,
    *,
    precision: torch.dtype | None,
    accumulated: int,
    unused: tuple[str, ...],
    gauge: Gauge | None,
) -> Judgement:
    """The judgement of a pass, once its numbers are there."""
    balance = weighing.balance(backward.points, backward.slopes)
    used, known = precision_of(precision, backward, balance)
    left = residuals_of(backward, balance, used, accumulated, gauge, given=known == "given")
    return judged(backward, left, used, known, unused, gauge)
