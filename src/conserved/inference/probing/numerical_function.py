"""A callable on tensors as a numerical function: its inputs by name, its outputs as a tuple, its gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from conserved._torch_compat import children_of
from conserved.errors import InvalidInputError
from conserved.tolerances import UNIT

Values = tuple[Tensor, ...]


class UncheckableError(InvalidInputError, ValueError):
    """Raised if a function cannot be checked; the message says what was expected and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericalFunction:
    """A callable with every argument fixed but its floating-point tensors.

    Every call starts from the same seed and from tensors it may overwrite, so that calls can be compared. `copying`
    says that the callable writes into its inputs, `notes` what else was noticed about it.
    """

    title: str
    call: Callable[[Sequence[Tensor]], Any]
    names: tuple[str, ...]
    values: Values
    out_names: tuple[str, ...]
    differentiable: tuple[int, ...]
    seed: int
    copying: bool = False
    notes: tuple[str, ...] = ()
    eager: Callable[[Sequence[Tensor]], Any] | None = None
    """The call as it was written, where `call` is compiled."""

    @property
    def precision(self) -> torch.dtype:
        """The coarsest precision among inputs and outputs."""
        return max((value.dtype for value in self.values), key=lambda dtype: UNIT[dtype])

    @property
    def uncompiled(self) -> NumericalFunction:
        """The function as it was written, where it is compiled."""
        return self if self.eager is None else replace(self, call=self.eager, eager=None)

    def outputs(self, values: Sequence[Tensor]) -> Values:
        """Return the differentiable outputs at `values`."""
        # A compiled function is compiled again for calls without gradients: one graph for each shape is enough.
        graph = self.eager is not None
        with torch.set_grad_enabled(graph):
            result = self._ran([copy_tensor(value).requires_grad_() if graph else value.detach() for value in values])
        return tuple(result[index].detach() for index in self.differentiable)

    def gradients(
        self, values: Sequence[Tensor], gradients: Sequence[Tensor | None], wanted: Sequence[int] | None = None
    ) -> tuple[Values, tuple[Tensor | None, ...]]:
        """Return outputs, and the gradient of each input from one backward pass.

        A gradient is None where none arrives. An output gradient is None where its output is not used.
        """
        asked = range(len(values)) if wanted is None else wanted
        with torch.enable_grad():
            # A backward may write into what it saved, and that may be the input itself.
            every = self.eager is not None
            leaves = [copy_tensor(value).requires_grad_(every or index in asked) for index, value in enumerate(values)]
            outputs = self._ran([leaf.clone() for leaf in leaves] if self.copying else leaves)
            outs = [outputs[index] for index in self.differentiable]
            pairs = zip(outs, gradients, strict=True)
            live = [(out, gradient) for out, gradient in pairs if out.requires_grad and gradient is not None]
            if not live:
                return tuple(out.detach() for out in outs), (None,) * len(values)
            retained = tuple(out.detach().clone() for out in outs)
            computed = torch.autograd.grad(
                [out for out, _ in live],
                [leaves[index] for index in asked],
                [gradient.clone() if gradient.is_contiguous() else gradient for _, gradient in live],
                allow_unused=True,
            )
        grads: list[Tensor | None] = [None] * len(values)
        for index, grad in zip(asked, computed, strict=True):
            grads[index] = None if grad is None else grad.detach()
        return retained, tuple(grads)

    def _ran(self, values: Sequence[Tensor]) -> list[Tensor]:
        reseed(self.seed)
        if self.copying and not torch.is_grad_enabled():
            values = [value.clone() for value in values]
        return tensors_in(self.call(values))


def copy_tensor(value: Tensor) -> Tensor:
    """Return the same numbers with the same strides in memory of their own."""
    copy = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
    return copy.copy_(value.detach())


def tensors_in(returned: Any) -> list[Tensor]:
    """Return the floating-point tensors in what a function returned, in the order they appear."""
    if isinstance(returned, Tensor):
        return [returned] if returned.is_floating_point() else []
    if isinstance(returned, Mapping):
        return [tensor for part in returned.values() for tensor in tensors_in(part)]
    if isinstance(returned, tuple | list):
        return [tensor for part in returned for tensor in tensors_in(part)]
    return []


def device_of(tensors: Sequence[Any], keywords: Mapping[str, Any]) -> torch.device:
    """Return where a function will run: the device of its first tensor."""
    given = [value for value in (*tensors, *keywords.values()) if isinstance(value, Tensor)]
    return given[0].device if given else torch.device("cpu")


@contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Preserve the user's random number state."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield


def reseed(seed: int) -> None:
    """Seed the random numbers of every device.

    Where there is none but the processor, `torch.manual_seed` writes the whole call stack down each time, for the day
    an accelerator is started; that took longer than the small functions that are run here thousands of times."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def function_of(
    fn: Callable[..., Any],
    tensors: Sequence[Any],
    keywords: Mapping[str, Any],
    *,
    names: Sequence[str] | None = None,
    seed: int = 0,
) -> NumericalFunction:
    """Return the function to be checked; raises UncheckableError with one sentence where it cannot be.

    Args:
        fn: any callable; of a module, the parameters become inputs too.
        tensors: its positional arguments; floating-point tensors are inputs, the rest is held fixed.
        keywords: its keyword arguments, treated in the same way.
        names: names of the floating-point inputs, instead of those in the signature.
        seed: of the random numbers the function itself may draw.
    """
    if not callable(fn):
        raise UncheckableError(
            f"Expected a function, got {type(fn).__name__}, which cannot be called. Pass a callable on tensors."
        )
    own = _autograd_function(fn)
    title = getattr(own or fn, "__name__", None) or type(fn).__name__
    slots = _slots(fn, tensors, keywords)
    inputs = [(name, value) for name, value in slots if _is_input(value)]
    _refuse_unusable(title, [value for _, value in slots], inputs)
    chosen = tuple(name for name, _ in inputs)
    if names is not None:
        if len(names) != len(inputs):
            raise UncheckableError(
                f"Expected a name for each of {len(inputs)} floating-point inputs, got {len(names)} "
                f"({', '.join(chosen)}). Pass as many names as inputs."
            )
        chosen = tuple(names)

    def called_as(target: Callable[..., Any]) -> Callable[[Sequence[Tensor]], Any]:
        # The signature is read once: reading it took longer than the small functions that are run thousands of times.
        positional = [name for name, _ in _slots(target, tensors, {})][: len(tensors)]

        def call(values: Sequence[Tensor]) -> Any:
            given = dict(zip((name for name, _ in inputs), values, strict=True))
            return _call(target, positional, tensors, keywords, given)

        return call

    values = tuple(value.detach() for _, value in inputs)
    plain = _as_written(fn)
    eager = None if plain is None else called_as(plain)
    refused = _refused(called_as(fn), values, seed)
    remaining = [index for index in range(len(values)) if index not in refused]
    if not refused or not remaining:
        return replace(_observe_outputs(title, called_as(fn), chosen, values, seed), eager=eager)
    rest, names_left = tuple(values[index] for index in remaining), tuple(chosen[index] for index in remaining)
    observed = _observe_outputs(title, _with_held(called_as(fn), values, refused), names_left, rest, seed)
    note = f"held fixed: {', '.join(chosen[index] for index in refused)} ({title} refuses to differentiate by it)."
    eager = None if eager is None else _with_held(eager, values, refused)
    return replace(observed, eager=eager, notes=(*observed.notes, note))


def hold(function: NumericalFunction, indices: Sequence[int], reason: str) -> NumericalFunction:
    """Return a function of the other inputs alone; the same function if none or all are to be held."""
    remaining = [index for index in range(len(function.values)) if index not in indices]
    if not indices or not remaining:
        return function
    eager = None if function.eager is None else _with_held(function.eager, function.values, indices)
    note = f"held fixed: {', '.join(function.names[index] for index in indices)} ({reason})."
    return replace(
        function,
        call=_with_held(function.call, function.values, indices),
        eager=eager,
        names=tuple(function.names[index] for index in remaining),
        values=tuple(function.values[index] for index in remaining),
        notes=(*function.notes, note),
    )


def _with_held(
    call: Callable[[Sequence[Tensor]], Any], values: Values, indices: Sequence[int]
) -> Callable[[Sequence[Tensor]], Any]:
    """Return the call without some of its inputs, which keep their values and follow the others' precision."""
    own = next(value.dtype for index, value in enumerate(values) if index not in indices)

    def shorter(rest: Sequence[Tensor]) -> Any:
        given = iter(rest)
        return call(
            [
                (value.to(rest[0].dtype, copy=True) if value.dtype == own else value.clone())
                if index in indices
                else next(given)
                for index, value in enumerate(values)
            ]
        )

    return shorter


def _refused(call: Callable[[Sequence[Tensor]], Any], values: Values, seed: int) -> list[int]:
    """Return the inputs that a function takes, but not where they require a gradient: targets, running means."""

    def runs(wanted: Sequence[int]) -> bool:
        given = [value.clone().requires_grad_(index in wanted) for index, value in enumerate(values)]
        # An input that is written to must not be a leaf.
        given = [value.clone() if value.requires_grad else value for value in given]
        try:
            _trial(call, given, seed)
        except RuntimeError:
            return False
        return True

    every = range(len(values))
    if runs(every) or not runs(()):
        return []
    return [index for index in every if not runs((index,))]


def _as_written(fn: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the function inside `torch.compile`; None if it is not compiled."""
    if isinstance(fn, nn.Module):
        inner = children_of(fn).get("_orig_mod")
        return _Prefixed(inner) if inner is not None else None
    written = getattr(fn, "_torchdynamo_orig_callable", None)
    return written if callable(written) else None


class _Prefixed(nn.Module):
    """A module under the names that its parameters have inside a compiled module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._orig_mod = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._orig_mod(*args, **kwargs)


def _slots(fn: Callable[..., Any], tensors: Sequence[Any], keywords: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return every argument with its name: positional, keyword, and the parameters of a module."""
    own = _autograd_function(fn)
    target = fn.forward if isinstance(fn, nn.Module) else own.forward if own else fn
    try:
        parameters = list(inspect.signature(target).parameters.values())
        if own and own.setup_context is torch.autograd.Function.setup_context:
            # The context is handed over by autograd.
            parameters = parameters[1:]
    except (TypeError, ValueError):
        parameters = []
    plain = [item.name for item in parameters if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)]
    slots = [(plain[index] if index < len(plain) else f"x{index}", value) for index, value in enumerate(tensors)]
    slots += list(keywords.items())
    if isinstance(fn, nn.Module):
        slots += [(name, value) for name, value in fn.named_parameters() if value.requires_grad]
    return slots


def _autograd_function(fn: Callable[..., Any]) -> type[torch.autograd.Function] | None:
    """Return the autograd function whose `apply` this is, whose `forward` has the names of its inputs."""
    owner = getattr(fn, "__self__", None)
    is_apply = isinstance(owner, type) and issubclass(owner, torch.autograd.Function) and fn.__name__ == "apply"
    return owner if is_apply else None


def _call(
    fn: Callable[..., Any],
    positional: Sequence[str],
    tensors: Sequence[Any],
    keywords: Mapping[str, Any],
    given: Mapping[str, Tensor],
) -> Any:
    """Call the function with `given` in place of the inputs of these names; `positional` names the first arguments."""
    args = [given[name] if _is_input(value) else value for name, value in zip(positional, tensors, strict=True)]
    rest = {name: given[name] if _is_input(value) else value for name, value in keywords.items()}
    if isinstance(fn, nn.Module):
        weights = {name: given[name] for name, value in fn.named_parameters() if value.requires_grad}
        return torch.func.functional_call(fn, weights, tuple(args), rest)
    return fn(*args, **rest)


def _is_input(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 0


def _refuse_unusable(title: str, given: Sequence[Any], inputs: Sequence[tuple[str, Tensor]]) -> None:
    if not inputs:
        kinds = sorted({str(value.dtype)[6:] for value in given if isinstance(value, Tensor)})
        received = f"only tensors of {', '.join(kinds)}" if kinds else "no tensor"
        raise UncheckableError(
            f"Expected at least one non-empty floating-point tensor, got {received} for {title}. Pass the inputs "
            "that are differentiated."
        )
    for name, value in inputs:
        if value.dtype not in UNIT:
            raise UncheckableError(
                f"Expected inputs in {_known()}, got {name} in {str(value.dtype)[6:]}. Convert it first."
            )
        if not torch.isfinite(value).all():
            raise UncheckableError(f"Expected finite inputs, got infinities or NaN in {name}. Pass finite ones.")
    if any(isinstance(value, Tensor) and value.is_complex() for value in given):
        raise UncheckableError(
            f"Expected real tensors, got complex ones for {title}. Split them into real and imaginary parts."
        )
    devices = {str(value.device) for _, value in inputs}
    if len(devices) > 1:
        raise UncheckableError(f"Expected inputs on one device, got {' and '.join(sorted(devices))}. Move them to one.")


def _known() -> str:
    return ", ".join(str(dtype)[6:] for dtype in UNIT)


def _observe_outputs(
    title: str, call: Callable[[Sequence[Tensor]], Any], names: tuple[str, ...], values: Values, seed: int
) -> NumericalFunction:
    """Return the function after one trial call: which outputs are differentiable, whether inputs are overwritten."""
    notes: list[str] = []
    copying = False
    copies = [value.detach().clone() for value in values]
    try:
        outs = _trial(call, [copy.requires_grad_() for copy in copies], seed)
    except RuntimeError as problem:
        if "in-place" not in str(problem) and "inplace" not in str(problem):
            raise
        copying = True
        copies = [value.detach().clone() for value in values]
        outs = _trial(call, [copy.requires_grad_().clone() for copy in copies], seed)
    written = [
        name for name, copy, value in zip(names, copies, values, strict=True) if not torch.equal(copy.detach(), value)
    ]
    if copying or written:
        copying = True
        which = ", ".join(written) or "an input"
        notes.append(f"{title} writes into {which} while it runs; every call was given a copy.")
    if not outs:
        raise UncheckableError(
            f"Expected {title} to return a floating-point tensor, got none. Return the outputs whose gradient is "
            "checked."
        )
    differentiable = tuple(index for index, out in enumerate(outs) if out.requires_grad and out.numel() > 0)
    if not differentiable:
        raise UncheckableError(
            f"Expected an output of {title} with a grad_fn, got none: it runs under no_grad, detaches, or leaves "
            "the graph. Enable gradients in it."
        )
    for index in differentiable:
        if not torch.isfinite(outs[index]).all():
            raise UncheckableError(
                f"Expected finite outputs of {title}, got infinities or NaN. Pass inputs at which it is defined."
            )
        if outs[index].dtype not in UNIT:
            raise UncheckableError(
                f"Expected outputs in {_known()}, got {str(outs[index].dtype)[6:]} from {title}. Convert them in "
                "the function."
            )
    out_names = ("out",) if len(differentiable) == 1 else tuple(f"out{index}" for index in differentiable)
    if len(differentiable) < len(outs):
        constant_outputs = len(outs) - len(differentiable)
        notes.append(f"{constant_outputs} of {len(outs)} outputs have no gradient and were left out.")
    return NumericalFunction(
        title=title,
        call=call,
        names=names,
        values=values,
        out_names=out_names,
        differentiable=differentiable,
        seed=seed,
        copying=copying,
        notes=tuple(notes),
    )


def _trial(call: Callable[[Sequence[Tensor]], Any], values: Sequence[Tensor], seed: int) -> list[Tensor]:
    reseed(seed)
    with torch.enable_grad():
        return tensors_in(call(values))
