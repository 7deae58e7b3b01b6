"""For the test suites of others: assert that gradients of a model or of a function are right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from conserved.auditing import Audit, Gauge, audit
from conserved.auditing.random_trial import audited_pass
from conserved.checking import Check, UncheckableError, check
from conserved.inference import laws_of_model
from conserved.laws import LawSet

if TYPE_CHECKING:
    import pytest

__all__ = ["Setup", "assert_backward", "assert_gradients_conserve", "over_dtypes_and_lengths", "setups"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One precision, length and device in which a kernel is tested; `tensor` draws inputs for it."""

    dtype: torch.dtype
    length: int
    device: str = "cpu"

    def tensor(self, *shape: int) -> Tensor:
        """Return normally distributed random numbers in the precision and on the device of the setup.

        Args:
            *shape: the sizes of the axes.

        Returns:
            A new tensor.
        """
        return torch.randn(*shape).to(self.device, self.dtype)

    def __str__(self) -> str:
        return f"{str(self.dtype)[6:]}-{self.length}-{self.device}"


def setups(
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    lengths: Sequence[int] = (1, 63, 64, 65, 128, 200),
    device: str | None = None,
) -> Iterator[Setup]:
    """Yield every precision with every length.

    Args:
        dtypes: the precisions the kernel is meant for.
        lengths: lengths to test; the default is 1 and lengths around tiles of 64 and 128.
        device: the device of the inputs; by default a GPU if there is one, otherwise the processor.

    Yields:
        One `Setup` for each pair.
    """
    target = device or ("cuda" if torch.cuda.is_available() else "cpu")
    for dtype in dtypes:
        for length in lengths:
            yield Setup(dtype=dtype, length=length, device=target)


def over_dtypes_and_lengths(
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    lengths: Sequence[int] = (1, 63, 64, 65, 128, 200),
    device: str | None = None,
) -> pytest.MarkDecorator:
    """Return a pytest parametrisation that gives a test a `setup` for every precision and length.

    Args:
        dtypes: the precisions the kernel is meant for.
        lengths: lengths to test; the default is 1 and lengths around tiles of 64 and 128.
        device: the device of the inputs; by default a GPU if there is one, otherwise the processor.

    Returns:
        The decorator of the test.
    """
    import pytest

    chosen = list(setups(dtypes, lengths, device))
    return pytest.mark.parametrize("setup", chosen, ids=map(str, chosen))


def assert_backward(
    fn: Callable[..., Any], *tensors: Any, inconclusive: bool = False, seconds: float = 120.0, **options: Any
) -> Check:
    """Assert that the backward of a function is right, by `conserved.check`.

    Args:
        fn: any callable on tensors.
        *tensors: its arguments, as for `conserved.check`.
        inconclusive: accept a check in which a wrong factor of some gradient would not have been seen.
        seconds: time after which no further test is started.
        **options: further options of `conserved.check` and keyword arguments of `fn`.

    Returns:
        The check, if it holds.

    Raises:
        AssertionError: a test failed, or (unless `inconclusive`) a wrong factor could have been missed; the message
            says which test, where, and the usual cause.
        UncheckableError: the function has no gradient to check, or cannot be run twice with the same result.
    """
    __tracebackhide__ = True
    try:
        result = check(fn, *tensors, seconds=seconds, **options)
    except UncheckableError as problem:
        raise problem.with_traceback(None) from None  # pytest shows the test, not this package.
    if not result.ok or not (result.conclusive or inconclusive):
        raise AssertionError(str(result))
    return result


def assert_gradients_conserve(
    model: nn.Module,
    loss_fn: Callable[[], Tensor] | None = None,
    *,
    laws: LawSet | None = None,
    loss: str = "any",
    precision: torch.dtype | None = None,
    unused: Sequence[str] = (),
) -> Audit:
    """Assert that every gradient identity of a model holds, by `conserved.audit`.

    Args:
        model: the model; without `loss_fn` its parameters have gradients already.
        loss_fn: computes the loss, without arguments. Gradients are cleared, the loss is differentiated and audited in
            the precision its graph shows, and laws are inferred from the inputs it calls the model with. By default the
            gradients at hand are audited.
        laws: the laws to test; by default they are inferred.
        loss: the loss for which laws are inferred, as for `conserved.recognize`.
        precision: the coarsest precision of the pass, where it is known.
        unused: patterns of names of parameters that may have no gradient.

    Returns:
        The audit, if it is ok and conclusive.

    Raises:
        AssertionError: an identity does not hold, or not everything could be tested; a model of which no law is known
            fails as well, because nothing was tested.
    """
    __tracebackhide__ = True
    if loss_fn is not None:
        result = audited_pass(model, loss_fn, Gauge(), laws, loss=loss, precision=precision, unused=unused)
    else:
        law_set = laws_of_model(model, loss=loss) if laws is None else laws
        result = audit(model, law_set, precision=precision, unused=unused, gauge=Gauge())
    if not (result.ok and result.conclusive):
        raise AssertionError(result.summary())
    return result
