"""For the test suites of others: assert that the gradients of a model satisfy its identities."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from conserved.audit import Audit, audit
from conserved.backward import precision_of
from conserved.inference import FirstCall, laws_of_model
from conserved.laws import LawSet

__all__ = ["assert_gradients_conserve"]


def assert_gradients_conserve(
    model: nn.Module,
    loss_fn: Callable[[], Tensor] | None = None,
    *,
    laws: LawSet | None = None,
    loss: str = "any",
    precision: torch.dtype | None = None,
    unused: Sequence[str] = (),
) -> Audit:
    """Raise AssertionError, with what failed and what that suggests, unless every gradient identity holds.

    With `loss_fn`, gradients are cleared, `loss_fn()` is differentiated, the laws are inferred from the inputs it calls the
    model with, and audited in the precision its graph shows;
    without, the gradients at hand are audited. A model of which no law is known fails as well: nothing was tested.
    """
    __tracebackhide__ = True
    if loss_fn is not None:
        for parameter in model.parameters():
            parameter.grad = None
        first = FirstCall(model, loss=loss) if laws is None else None
        value = loss_fn()
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            raise ValueError("loss_fn must return a tensor of one number that depends on the parameters.")
        precision = precision or precision_of(value)
        value.backward()
        if first is not None:
            laws = first.laws()
            first.close()
    found = laws_of_model(model, loss=loss) if laws is None else laws
    result = audit(model, found, precision=precision, unused=unused)
    if not result.ok:
        raise AssertionError(result.summary())
    return result
