r"""Run a pass in another form than the run's own: eager, plain attention, functions inlined, higher precision.

A replay in reference form is a second implementation that nobody has to write. Each switch removes one suspect:

    eager         torch.compile is ignored: the compiler's code is replaced by the program as it was written
    attention     scaled_dot_product_attention runs its math backend: fused kernels are replaced by matrix products
    functions     forward passes of autograd functions are differentiated: hand-written backward passes are not used
    wide          narrower tensors are widened before every operation: rounding is smaller by orders of magnitude
    log           calls are written down, or, with `wide`, what the pass of the log drew and selected is taken over
    rounded       with `wide`: results, and their gradients, are rounded to the run's precision at random

Everything is undone at the end of the context. Autocast regions that the program enters itself have no effect while
`wide` is set, because it disables autocast around every single operation.

**Rounding at random.** x is rounded down or up with the probability that makes its mean x (stochastic rounding). The
errors of two passes are then independent, and those of one pass have a mean square of ulp²/6, twice that of rounding to
nearest. The gradients of a pass in reference form whose every result was rounded at random, minus those of the same
pass without, are one sample of what rounding the forward and the backward pass does to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from conserved._torch_compat import tree_leaves, tree_map, version_of
from conserved.auditing.call_log import CallLog, CallRecording, is_attribute, repeat_pinned

_WIDER = {
    torch.float64: (torch.float32, torch.float16, torch.bfloat16),
    torch.float32: (torch.float16, torch.bfloat16),
}
"""By the precision of a reference, the narrower types that it replaces."""

_CASTS = {Tensor.half, Tensor.bfloat16, Tensor.float}
"""Methods that name a type without taking it as an argument."""


@dataclass(frozen=True, slots=True)
class PassForm:
    """The form in which a pass is run again; the default is that of the run."""

    eager: bool = False
    attention: bool = False
    functions: bool = False
    wide: torch.dtype | None = None
    log: CallLog | None = None
    rounded: torch.dtype | None = None
    trusted: set[str] | None = None
    """Collects the names of autograd functions that were not inlined because their backward is by design another."""
    shifted: Mapping[int, Tensor] | None = None
    """With `wide`: by the identity of a parameter, the tensor that takes its place."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Run everything inside in this form."""
        with ExitStack() as undo:
            if self.eager:
                undo.enter_context(torch.compiler.set_stance("force_eager"))
            if self.attention:
                undo.enter_context(sdpa_kernel(SDPBackend.MATH))
            if self.functions:
                undo.enter_context(_inlined_functions(self.trusted))
            if self.wide is not None:
                undo.enter_context(_Widened(self))
            elif self.log is not None:
                undo.enter_context(CallRecording(self.log))
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

    def __init__(self, form: PassForm) -> None:
        super().__init__()
        assert form.wide is not None
        self._wide, self._narrow = form.wide, _WIDER[form.wide]
        self._log, self._rounded, self._shifted = form.log, form.rounded, form.shifted or {}
        self._position = 0
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_attribute(func):
            return func(self._shifted.get(id(args[0]), args[0]), *args[1:], **(kwargs or {}))
        args, kwargs = tree_map(self._widen, (args, kwargs or {}))
        position, self._position = self._position, self._position + 1
        known = self._log is not None and self._log.follows(position, func)
        rounds = self._rounded is not None and (not known or self._stored_narrow(position))
        if rounds:
            args, kwargs = tree_map(self._round, (args, kwargs))
        with ExitStack() as undo:
            for device in {leaf.device.type for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}:
                if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
                    undo.enter_context(torch.autocast(device, enabled=False))
            if func in _CASTS:
                return args[0].to(self._wide) if args[0].is_floating_point() else func(*args, **kwargs)
            if known and self._log is not None and position in self._log.pinned:
                return repeat_pinned(self._log.pinned[position], func, args, kwargs, self._wide)
            out = func(*args, **kwargs)
        return self._round_new(out, (args, kwargs)) if rounds else out

    def _stored_narrow(self, position: int) -> bool:
        # All results of a pass in single precision are rounded to it, whatever they are.
        return self._log is None or self._rounded is torch.float32 or self._log.half[position]

    def _widen(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) in self._shifted:
                return self._shifted[id(value)]
            return value.to(self._wide) if value.dtype in self._narrow else value
        return self._wide if isinstance(value, torch.dtype) and value in self._narrow else value

    def _round_new(self, out: Any, inputs: Any) -> Any:
        """Round what a call computed; views of its arguments, and what it wrote in place, stay as they are."""
        memory = {_memory(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)}
        return tree_map(lambda leaf: self._round(leaf) if _memory(leaf) not in memory else leaf, out)

    def _round(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype != self._wide or value.is_sparse:
            return value
        if value.is_leaf and not value.requires_grad and value.ndim == 0:
            return value
        if value.device not in self._generators:
            self._generators[value.device] = torch.Generator(value.device).manual_seed(_SEED)
        assert self._rounded is not None
        return _RoundAtRandom.apply(value, self._rounded, self._generators[value.device])


_SEED = 5
"""Of the generators that rounding at random draws from; those of the program are not touched."""

_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def _memory(value: Any) -> int:
    return value.untyped_storage().data_ptr() if isinstance(value, Tensor) and value.layout == torch.strided else 0


def round_at_random(x: Tensor, narrow: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return `x`, in its own type, rounded to a narrower one: up or down, at random, with mean `x`.

    Adding a random number to the bits that are dropped carries into those that stay with the right probability.
    """
    dropped = round(math.log2(torch.finfo(narrow).eps / torch.finfo(x.dtype).eps))
    kind = _INTEGERS[x.dtype]
    noise = torch.randint(1 << dropped, x.shape, dtype=kind, device=x.device, generator=generator)
    rounded = ((x.contiguous().view(kind) + noise) & -(1 << dropped)).view(x.dtype)
    if narrow == torch.float16:
        # Below its smallest normal number float16 has one spacing for all.
        spacing = torch.finfo(narrow).smallest_normal * torch.finfo(narrow).eps
        share = noise.to(x.dtype) / (1 << dropped)
        rounded = torch.where(
            x.abs() < torch.finfo(narrow).smallest_normal, (x / spacing + share).floor() * spacing, rounded
        )
    return torch.where(x.isfinite(), rounded, x)


class _RoundAtRandom(Function):
    """Round a tensor at random, and its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, narrow: torch.dtype, generator: torch.Generator) -> Tensor:
        ctx.narrow, ctx.generator = narrow, generator
        return round_at_random(x, narrow, generator)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return round_at_random(gradients[0], ctx.narrow, ctx.generator), None, None


class _Context:
    """Stand in for the context of an autograd function whose forward pass is differentiated instead."""

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        self.needs_input_grad = tuple(isinstance(value, Tensor) and value.requires_grad for value in inputs)
        self.saved_tensors: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors

    save_for_forward = save_for_backward

    def mark_dirty(self, *tensors: Tensor) -> None:
        """Ignore the call."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Ignore the call."""

    def set_materialize_grads(self, value: bool) -> None:
        """Ignore the call."""


class _Steps(TorchFunctionMode):
    """Notice functions whose derivative is zero almost everywhere."""

    _FLAT = frozenset(
        {"round", "floor", "ceil", "trunc", "fix", "sign", "sgn", "heaviside", "round_", "floor_", "sign_"}
    )

    _COMPARISONS = frozenset({"gt", "ge", "lt", "le", "eq", "ne", "argmax", "argmin"})

    def __init__(self) -> None:
        super().__init__()
        self.discrete = self.compares = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        self.discrete |= name in self._FLAT
        self.compares |= name.strip("_") in self._COMPARISONS and torch.is_grad_enabled()
        return func(*args, **(kwargs or {}))


def _returns_input(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    pairs = ((out, value) for out in results for value in inputs if out.shape == value.shape)
    return any(bool(torch.equal(out.to(value.dtype), value)) for out, value in pairs)


_STACKS = ("torch.distributed", "deepspeed")
"""Packages whose functions return their input and have a backward pass that communicates or marks a place."""


@contextmanager
def _inlined_functions(trusted: set[str] | None = None) -> Iterator[None]:
    """Differentiate the forward pass of autograd functions instead of calling their backward pass.

    A function whose forward pass autograd does not see (a Triton kernel, a pass under no_grad) is applied as it is. No
    mode of torch intercepts `Function.apply`, and models keep it as a bound method. It calls `apply` of the class below
    it, which has none of its own: one is put there for the duration of the context. With `trusted`, functions whose
    backward is by design not the derivative of their forward keep it, and are listed: those that return their input
    (gradient reversal, gradient scaling), those that round it (straight-through estimators) and those that compare it
    (surrogate gradients of spikes).
    """
    below: Any = Function.__mro__[1]

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        original = super(below, cls).apply
        inputs = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor) and value.requires_grad]
        apart = cls is _RoundAtRandom or cls.__module__.startswith(_STACKS)
        if apart or not inputs or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return original(*args, **kwargs)
        steps = _Steps()
        versions = [version_of(value) for value in tree_leaves(args) if isinstance(value, Tensor)]
        try:
            split = cls.setup_context is not Function.setup_context
            with steps:
                out = cls.forward(*args, **kwargs) if split else cls.forward(_Context(args), *args, **kwargs)
        except Exception:
            # User functions may need more of their context than a stand-in has.
            return original(*args, **kwargs)
        same = versions == [version_of(value) for value in tree_leaves(args) if isinstance(value, Tensor)]
        results = [value for value in tree_leaves(out) if isinstance(value, Tensor) and value.is_floating_point()]
        # A spike is a comparison and nothing else: no way leads from the result to the input.
        spikes = steps.compares and bool(results) and all(value.grad_fn is None for value in results)
        if trusted is not None and (steps.discrete or spikes or _returns_input(results, inputs)):
            trusted.add(cls.__name__)
            return original(*args, **kwargs)
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
