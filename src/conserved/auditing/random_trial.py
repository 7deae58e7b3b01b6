"""One backward pass of a model on random data, audited: what the command `conserved audit` runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved.auditing.attention_keys import keys_seen
from conserved.auditing.audit_result import Audit
from conserved.auditing.model_audit import audit
from conserved.auditing.softmax_gauge import Gauge, watch_norms
from conserved.inference import laws_of_model
from conserved.laws import LawSet
from conserved.laws.verification import precision_of
from conserved.plain_data import record_of

AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trial:
    """The identities of one pass, and the gauge of its attention where there is one that can be watched."""

    audit: Audit
    gauge: Gauge | None

    @property
    def ok(self) -> bool:
        """Whether everything that was checked holds."""
        return self.audit.ok and (self.gauge is None or self.gauge.ok)

    def summary(self) -> str:
        """Return both summaries."""
        lines = [] if self.gauge is None else [f"softmax gauge: {self.gauge.summary()}"]
        return "\n".join([self.audit.summary(), *lines])

    def record(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return self.audit.record() | record_of(self, "ok gauge")


def trial(
    model: nn.Module,
    inputs: Tensor | Callable[[torch.Generator], Any],
    *,
    loss: str = "any",
    autocast: str | None = None,
    device: str | None = None,
    seed: int = 0,
) -> Trial:
    """Draw inputs and targets, differentiate once, audit."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.device(device) if device else next((p.device for p in model.parameters()), torch.device("cpu"))
    model = model.to(target)
    kind = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    drawn = torch.randn(inputs.shape, generator=generator) if isinstance(inputs, Tensor) else inputs(generator)
    gauge, state = Gauge(), generator.get_state()

    def objective() -> Tensor:
        # The pass may be run again, against the same targets.
        generator.set_state(state)
        with torch.autocast(target.type, dtype=AUTOCAST.get(autocast or "", torch.bfloat16), enabled=bool(autocast)):
            return _loss(_called(model, _moved(drawn, target, kind)), loss, generator)

    with keys_seen(model, gauge.see):
        # In half precision small identities are decided by a replay alone.
        audit = audited_pass(model, objective, gauge, loss=loss, repeatable=bool(autocast))
    return Trial(audit=audit, gauge=gauge if gauge.seen or gauge.excluded else None)


def audited_pass(
    model: nn.Module,
    objective: Callable[[], Tensor],
    gauge: Gauge,
    laws: LawSet | None = None,
    *,
    loss: str = "any",
    precision: torch.dtype | None = None,
    unused: Sequence[str] = (),
    repeatable: bool = False,
) -> Audit:
    """Differentiate `objective()` once, from no gradients, and audit the pass in the precision its graph shows.

    If it is `repeatable`, it is run again for identities that are above the floor.
    """
    model.zero_grad(set_to_none=True)
    with ExitStack() as undo:
        watch_norms(model, laws, gauge, undo, loss=loss)
        value = objective()
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            raise ValueError(
                "Expected loss_fn to return a scalar tensor with a graph, got another result. Return the loss of "
                "the model, and do not detach it."
            )
        precision = precision or precision_of(value)
        value.backward()
        laws = laws_of_model(model, loss=loss) if laws is None else laws
    closure = objective if repeatable else None
    return audit(model, laws, closure=closure, precision=precision, unused=unused, gauge=gauge)


def _moved(x: Any, target: torch.device, kind: torch.dtype) -> Any:
    if isinstance(x, Tensor):
        return x.to(target, kind if x.is_floating_point() else x.dtype)
    if isinstance(x, dict):
        return {name: _moved(value, target, kind) for name, value in x.items()}
    return tuple(_moved(value, target, kind) for value in x) if isinstance(x, tuple | list) else x


def _called(model: nn.Module, x: Any) -> Tensor:
    """Return the output tensor, or the logits or first entry of a structured output."""
    result = model(**x) if isinstance(x, dict) else model(*x) if isinstance(x, tuple) else model(x)
    output = getattr(result, "logits", None)
    output = output if output is not None else result
    output = output if isinstance(output, Tensor) else output[0]
    if not isinstance(output, Tensor) or not output.requires_grad:
        raise ValueError(
            "Expected the model to return a tensor that depends on its parameters, got none. Return outputs or logits."
        )
    return output


def _loss(z: Tensor, loss: str, generator: torch.Generator) -> Tensor:
    z = z.float() if z.dtype in AUTOCAST.values() else z
    if loss == "cross_entropy":
        flat = z.flatten(0, -2) if z.ndim > 1 else z[None]
        return F.cross_entropy(flat, torch.randint(flat.shape[-1], (len(flat),), generator=generator).to(z.device))
    target = torch.randn(z.shape, generator=generator).to(z)
    return ((z - target) ** 2).mean() + z.sin().mean()
