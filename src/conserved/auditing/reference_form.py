r"""Run a pass in another form than the run's own: eager, plain attention, functions inlined, higher precision.

A replay in reference form is a second implementation that nobody has to write. Each switch removes one suspect:

    eager         torch.compile is ignored: the compiler's code is replaced by the program as it was written
    attention     scaled_dot_product_attention runs its math backend: fused kernels are replaced by matrix products
    functions     forward passes of autograd functions are differentiated: hand-written backward passes are not used
    wide          narrower tensors are widened before every operation: rounding is smaller by orders of magnitude

Everything is undone at the end of the context. Autocast regions that the program enters itself have no effect while
`wide` is set, because it disables autocast around every single operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

_WIDER = {
    torch.float64: (torch.float32, torch.float16, torch.bfloat16),
    torch.float32: (torch.float16, torch.bfloat16),
}
"""By the precision of a reference, the narrower types that it replaces."""

_CASTS = {Tensor.half, Tensor.bfloat16, Tensor.float}
"""Methods that name a type without taking it as an argument."""


@dataclass(frozen=True, slots=True)
class PassForm:
    """How a pass is run again; the default is the run's own form."""

    eager: bool = False
    attention: bool = False
    functions: bool = False
    wide: torch.dtype | None = None

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Run everything inside in this form."""
        with ExitStack() as undo:
            if self.eager:
                undo.enter_context(torch.compiler.set_stance("force_eager"))
            if self.attention:
                undo.enter_context(sdpa_kernel(SDPBackend.MATH))
            if self.functions:
                undo.enter_context(_inlined_functions())
            if self.wide is not None:
                undo.enter_context(_Widened(self.wide))
            yield


AS_RUN = PassForm()
PLAIN = PassForm(eager=True, attention=True, functions=True)
"""Reference kernels in the run's own precision."""


def wide_forms(precision: torch.dtype) -> tuple[PassForm, ...]:
    """Return the reference forms for passes in some precision: reference kernels in every higher one, nearest first.

    Programs in half precision often compute their loss in float32, whose rounding of p ≈ 1 float64 alone removes.
    """
    single = precision in (torch.float32, torch.float64)
    wides = (torch.float64,) if single else (torch.float32, torch.float64)
    return tuple(PassForm(eager=True, attention=True, functions=True, wide=wide) for wide in wides)


class _Widened(TorchFunctionMode):
    """Widen floating-point tensors, and requests for narrow types, before every operation.

    Gradients flow back through the conversions, so that a parameter in bfloat16 gets a gradient that was rounded once.
    """

    def __init__(self, wide: torch.dtype) -> None:
        super().__init__()
        self._wide, self._narrow = wide, _WIDER[wide]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == "__get__":
            return func(*args, **(kwargs or {}))
        args, kwargs = tree_map(self._widen, (args, kwargs or {}))
        with ExitStack() as undo:
            for device in {leaf.device.type for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}:
                if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
                    undo.enter_context(torch.autocast(device, enabled=False))
            if func in _CASTS:
                return args[0].to(self._wide) if args[0].is_floating_point() else func(*args, **kwargs)
            return func(*args, **kwargs)

    def _widen(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(self._wide) if value.dtype in self._narrow else value
        return self._wide if isinstance(value, torch.dtype) and value in self._narrow else value


class _Context:
    """Stand in for the context of an autograd function whose forward pass is differentiated instead."""

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        self.needs_input_grad = tuple(isinstance(value, Tensor) and value.requires_grad for value in inputs)
        self.saved_tensors: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors

    save_for_forward = save_for_backward

    def mark_dirty(self, *tensors: Tensor) -> None:
        """Accept and ignore."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Accept and ignore."""

    def set_materialize_grads(self, value: bool) -> None:
        """Accept and ignore."""


@contextmanager
def _inlined_functions() -> Iterator[None]:
    """Differentiate the forward pass of autograd functions instead of calling their backward pass.

    A function whose forward pass autograd does not see (a Triton kernel, a pass under no_grad) is applied as it is. No
    mode of torch intercepts `Function.apply`, and models keep it as a bound method. It calls `apply` of the class below
    it, which has none of its own: one is put there for the duration of the context.
    """
    below: Any = Function.__mro__[1]

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        original = super(below, cls).apply
        inputs = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor) and value.requires_grad]
        if not inputs or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return original(*args, **kwargs)
        versions = [value._version for value in tree_leaves(args) if isinstance(value, Tensor)]
        try:
            split = cls.setup_context is not Function.setup_context
            out = cls.forward(*args, **kwargs) if split else cls.forward(_Context(args), *args, **kwargs)
        except Exception:
            # User functions may need more of their context than a stand-in has.
            return original(*args, **kwargs)
        same = versions == [value._version for value in tree_leaves(args) if isinstance(value, Tensor)]
        results = [value for value in tree_leaves(out) if isinstance(value, Tensor) and value.is_floating_point()]
        if same and any(value.grad_fn is not None for value in results):
            return out
        return original(*args, **kwargs)

    if "apply" in vars(below):
        # A version of torch that is built otherwise; its functions stay as they are.
        yield
        return
    below.apply = classmethod(apply)
    try:
        yield
    finally:
        del below.apply
