r"""What ε leaves of laws that hold up to it, measured at the norms of a running model.

A law whose scale a norm forgets up to ε has the identity

    Σ legs ± ⟨θ, G⟩ = Σ_t c ε/(s_t + ε) ⟨y_t, ∂L/∂y_t⟩

over everything that is normalised: s_t its mean square, y_t the output (before a bias), c the power by which the law
scales what is normalised. With the right-hand side at hand the law is as exact as any other. It takes only the input of
a norm and the gradient of its output, which later operations made: a wrong input gradient of the norm still shows.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved.function_listeners import Listeners
from conserved.inference import being_followed
from conserved.inference.derivation import Derivation
from conserved.inference.laws_up_to_epsilon import Forgetting
from conserved.laws import LawSet
from conserved.symmetry import Symmetry, Tensors

Key = tuple[str, bool, int]
"""A normalisation: its module, whether it is one function, its number there."""


@dataclass(frozen=True, slots=True, eq=False)
class RightHandSide:
    """What the identity of a law equals, one number for each of its rows, and the square of what that is made of."""

    value: Tensor
    spread: float


class EpsilonTerms:
    """Measures the right-hand sides of the laws of a model that hold up to ε.

    `watching()` puts hooks on the norms; forward and backward passes of one optimizer step go inside. `of(law)` is the
    right-hand side afterwards, or None where it could not be measured: the law is then left as it was.
    """

    def __init__(self, model: nn.Module, laws: LawSet) -> None:
        self._model = model
        self._laws: dict[str, Sequence[Forgetting]] = {}
        counts: Mapping[tuple[str, bool], int] = {}
        modules = dict(model.named_modules())
        known = laws.derivation
        if isinstance(known, Derivation) and _plain(model):
            counts = known.normalisations()
            for symmetry in laws:
                if not symmetry.exact:
                    try:
                        self._laws[symmetry.name] = known.forgettings(symmetry)
                    except ValueError:
                        continue
        wanted = [one for found in self._laws.values() for one in found]
        self._dims: dict[Key, tuple[int, ...]] = {_key(one): one.dims for one in wanted}
        written = {one.module: one.epsilon for one in wanted if not one.function and one.call == 0}
        self._written = {
            name: found
            for name, epsilon in written.items()
            if name in modules and (found := _Written.of(modules[name], epsilon)) is not None
        }
        # Torch writes some of its norm functions out, so that they look like norms in the module that calls them.
        self._functions = {name: count for (name, function), count in counts.items() if function}
        self._inline = {
            name: count for (name, function), count in counts.items() if not function and name not in self._written
        }
        self._counts = {name: count for (name, _), count in counts.items()} | self._functions
        self._reference = _smallest(model)
        self._clear()

    def __len__(self) -> int:
        return len(self._laws)

    def _clear(self) -> None:
        self._entered: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()
        self._forwards: Counter[str] = Counter()
        """By module, calls that were made in forward passes, and not again in a backward pass."""
        self._sums: dict[Key, tuple[Tensor, Tensor]] = {}
        self._taken: dict[str, Tensor] = {}

    @contextmanager
    def watching(self) -> Iterator[EpsilonTerms]:
        """Hooks on all norms that matter, for one step."""
        with ExitStack() as undo:
            self.watch(undo)
            yield self

    def watch(self, undo: ExitStack) -> None:
        """The same, to be undone by the stack."""
        self._clear()
        if not self._laws:
            return
        running: list[str] = []
        for name, module in self._model.named_modules():
            if name and (name in self._functions or name in self._inline):
                undo.callback(module.register_forward_pre_hook(self._enter(name, running)).remove)
                undo.callback(module.register_forward_hook(_leave(running), always_call=True).remove)
            if name in self._written:
                undo.callback(module.register_forward_hook(self._through(name)).remove)
        for name, parameter in self._reference.items():
            undo.callback(parameter.register_post_accumulate_grad_hook(self._keep(name)).remove)
        undo.enter_context(_norms_heard(_NormEar(self, running)))

    def of(self, symmetry: Symmetry, slopes: Tensors) -> RightHandSide | None:
        """The right-hand side of a law, in units of the gradients as they are now; None if it is not known."""
        found = self._laws.get(symmetry.name)
        ratio = self._rescaled(slopes)
        if not found or not self._calls or ratio is None:
            return None
        total: Tensor | None = None
        spread = 0.0
        for one in found:
            key = _key(one)
            if not self._complete(one.module):
                return None
            if key not in self._sums:
                continue
            value, squares = (part.to(torch.float64) for part in self._sums[key])
            charges = torch.as_tensor(one.charges, dtype=torch.float64, device=value.device)
            # What a written norm adds its ε to is a mean square, whose charge is twice that of the entries.
            charges = charges * (ratio if one.function else ratio / 2)
            charges = charges.reshape(len(charges), -1)
            if charges.shape[1] not in (1, value.numel()):
                return None
            part = (charges * value.reshape(1, -1)).sum(1)
            total = part if total is None else total + part
            spread += float((charges.square() * squares.reshape(1, -1)).sum())
        zero = torch.zeros(found[0].charges.shape[0], dtype=torch.float64)
        return RightHandSide(zero if total is None else total, spread)

    def _rescaled(self, slopes: Tensors) -> float | None:
        """By how much all gradients were multiplied since the backward pass (clipping, a loss scale); None if unknown.

        None as well if they are not those of the passes that were watched.
        """
        ratios = []
        for name, then in self._taken.items():
            now = slopes.get(name)
            if now is None or now.shape != then.shape:
                return None
            a, b = now.detach().double().flatten(), then.double().flatten()
            size = float(b @ b)
            if size == 0:
                continue
            ratio = float(a @ b) / size
            if not float((a - ratio * b).norm()) <= 1e-2 * float(a.norm()):
                return None
            ratios.append(ratio)
        return float(np.median(ratios)) if ratios else None

    def _complete(self, module: str) -> bool:
        """Whether everything that a module normalised was seen: as many calls as its program has, every time it ran.

        A module that did not run, because its layer was dropped, had nothing to be seen.
        """
        if module in self._written:
            return True
        calls = self._calls[module]
        return calls % self._counts[module] == 0 and (calls > 0 or (not self._entered[module] and bool(module)))

    def _counts_now(self, module: str) -> bool:
        """Whether a norm that is called now takes part in the gradient, for the first time.

        Checkpointing calls it again in the backward pass; what was called without gradients before counts then.
        """
        if not torch.is_grad_enabled() or being_followed():
            return False
        backward = torch._C._current_graph_task_id() != -1
        self._forwards[module] += not backward
        return not backward or not self._forwards[module]

    def _keep(self, name: str) -> Callable[[Tensor], None]:
        # Weakly: Python does not see what such hooks of a parameter hold, so that the model would stay for ever.
        kept = weakref.ref(self)

        def hook(parameter: Tensor) -> None:
            terms = kept()
            if terms is not None and parameter.grad is not None and not parameter.grad.is_sparse:
                terms._taken[name] = parameter.grad.detach().clone()

        return hook

    def _number(self, module: str) -> Key:
        number = self._calls[module] % self._counts[module]
        self._calls[module] += 1
        return module, module in self._functions, number

    def _enter(self, name: str, running: list[str]) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:
            running.append(name)
            self._entered[name] += torch.is_grad_enabled() and not being_followed()

        return hook

    def function(self, module: str, x: Tensor, out: Tensor, norm: _Norm) -> None:
        """One of torch's norm functions was called."""
        if module in self._counts and module not in self._written and self._counts_now(module):
            key = self._number(module)
            if key in self._dims and out.requires_grad:
                values = x.detach()
                out.register_hook(lambda slope: self._add(key, values, slope, norm))

    def _through(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            if not self._counts_now(name):
                return
            key = self._number(name)
            if key in self._dims and isinstance(out, Tensor) and out.requires_grad and len(args) == 1:
                # A hook that held its own tensor would keep it and its graph for ever: Python cannot see that cycle.
                found, x, y = self._written[name], args[0].detach(), out.detach()
                out.register_hook(lambda slope: self._add_written(key, module, found, x, y, slope))

        return hook

    @torch.no_grad()
    def _add(self, key: Key, x: Tensor, slope: Tensor, norm: _Norm) -> None:
        kind = torch.promote_types(x.dtype, torch.float32)
        values, slopes = x.to(kind), slope.detach().to(kind)
        if norm.gain is not None:
            slopes = slopes * norm.gain.detach().to(kind)
        values, slopes = values.reshape(norm.apart), slopes.reshape(norm.apart)
        if norm.centred:
            values = values - values.mean(norm.dims, keepdim=True)
        self._sum(key, values * slopes, values.square().mean(norm.dims, keepdim=True), norm.epsilon, norm.dims)

    @torch.no_grad()
    def _add_written(self, key: Key, module: nn.Module, found: _Written, x: Tensor, out: Tensor, slope: Tensor) -> None:
        kind = torch.promote_types(x.dtype, torch.float32)
        values = x.to(kind)
        bias = module.forward(torch.zeros_like(x[(0,) * (x.ndim - 1)])[None]).to(kind)[0]
        square = (values - values.mean(-1, keepdim=True) if found.centred else values).square().mean(-1, keepdim=True)
        # The output is y itself: take its root out again, as `_sum` puts it in.
        root = (square + found.epsilon).sqrt()
        products = (out.to(kind) - bias) * slope.detach().to(kind) * root
        self._sum(key, products, square, found.epsilon, (x.ndim - 1,))

    def _sum(self, key: Key, products: Tensor, square: Tensor, epsilon: float, dims: tuple[int, ...]) -> None:
        """Add ε/(s + ε) ⟨y, ∂L/∂y⟩ over everything but the axes that charges differ along; y = products' x/√(s + ε)."""
        weight = epsilon / (square + epsilon).pow(1.5)
        kept = self._dims[key]
        if set(kept) & set(dims):
            return
        others = tuple(dim for dim in range(products.ndim) if dim not in kept)
        terms = products * weight
        value, squares = (part.sum(others) if others else part for part in (terms, terms.square()))
        old = self._sums.get(key)
        self._sums[key] = (value, squares) if old is None else (old[0] + value, old[1] + squares)


@dataclass(frozen=True, slots=True, eq=False)
class _Norm:
    """One call of a norm function: over which axes, of its input in which shape."""

    apart: tuple[int, ...]
    dims: tuple[int, ...]
    gain: Tensor | None
    epsilon: float
    centred: bool


@dataclass(frozen=True, slots=True)
class _Written:
    """A module that is a norm over the last axis, written out: what it divides by is √(s + ε)."""

    epsilon: float
    centred: bool

    @staticmethod
    def of(module: nn.Module, epsilon: float) -> _Written | None:
        """Found out by calling it with small numbers, at which ε shows; None if it computes something else."""
        sizes = {tuple(p.shape) for p in module.parameters(recurse=False)}
        if any(True for _ in module.children()) or any(True for _ in module.buffers()) or len(sizes) != 1:
            return None
        (shape,) = sizes
        like = next(module.parameters(recurse=False))
        if len(shape) != 1 or not like.is_floating_point() or like.is_meta:
            return None
        generator = torch.Generator().manual_seed(0)
        x = (torch.randn(4, shape[0], generator=generator) * epsilon**0.5).to(like)
        limit = 200 * torch.finfo(like.dtype).eps + 1e-6
        try:
            with torch.no_grad():
                zero, once, twice = (module.forward(one).double() for one in (torch.zeros_like(x), x, 2 * x))
        except Exception:
            # Whatever a stranger's module makes of such a call: it is not a norm of one input.
            return None
        for centred in (False, True):
            values = x.double() - x.double().mean(-1, keepdim=True) if centred else x.double()
            s = values.square().mean(-1, keepdim=True)
            expected = (once - zero) * 2 * ((s + epsilon) / (4 * s + epsilon)).sqrt()
            if float((twice - zero - expected).norm()) <= limit * float(expected.norm()):
                return _Written(epsilon, centred)
        return None


def _key(one: Forgetting) -> Key:
    return one.module, one.function, one.call


def _plain(model: nn.Module) -> bool:
    """Whether hooks see what the model computes: it is neither compiled nor sharded, nor data parallel."""
    if any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules()):
        return False
    if any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        return False
    return not (torch.distributed.is_available() and torch.distributed.is_initialized()) or (
        torch.distributed.get_world_size() == 1
    )


def _smallest(model: nn.Module) -> dict[str, Tensor]:
    """A few small trained parameters, by whose gradients it is seen what happened to all of them after the pass."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad and p.numel() > 1]
    return dict(sorted(trained, key=lambda pair: pair[1].numel())[:4])


def _leave(running: list[str]) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if running:
            running.pop()

    return hook


@dataclass(frozen=True, eq=False)
class _NormEar:
    """Whose norms are listened to, and which of its modules are running."""

    terms: EpsilonTerms
    running: list[str]


_EARS = Listeners[_NormEar]()


@contextmanager
def _norms_heard(ear: _NormEar) -> Iterator[None]:
    """Within it, torch's norm functions report what they were called with."""
    _EARS.begin(ear)
    try:
        for name, through in _THROUGH.items():
            _EARS.replace(F, name, through)
        yield
    finally:
        _EARS.end(ear)


def _tell(x: Tensor, out: Tensor, norm: _Norm) -> Tensor:
    for ear in _EARS.now():
        ear.terms.function(ear.running[-1] if ear.running else "", x, out, norm)
    return out


def _last(x: Tensor, shape: Any, weight: Any, eps: float, *, centred: bool) -> _Norm:
    """A norm over the last axes."""
    return _Norm(tuple(x.shape), tuple(range(x.ndim - len(shape), x.ndim)), weight, eps, centred)


def _by_channel(x: Tensor, apart: Sequence[int], dims: Sequence[int], weight: Any, eps: float) -> _Norm:
    gain = None if weight is None else weight.reshape(1, -1, *(1,) * (x.ndim - 2))
    return _Norm(tuple(apart), tuple(dims), gain, eps, True)


def _through_layer_norm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def layer_norm(
        input: Tensor,  # noqa: A002
        normalized_shape: Any,
        weight: Any = None,
        bias: Any = None,
        eps: float = 1e-5,
    ) -> Tensor:
        out = original(input, normalized_shape, weight, bias, eps)
        return _tell(input, out, _last(input, normalized_shape, weight, eps, centred=True))

    return layer_norm


def _through_rms_norm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def rms_norm(
        input: Tensor,  # noqa: A002
        normalized_shape: Any,
        weight: Any = None,
        eps: float | None = None,
    ) -> Tensor:
        out = original(input, normalized_shape, weight, eps)
        used = torch.finfo(input.dtype).eps if eps is None else eps
        return _tell(input, out, _last(input, normalized_shape, weight, used, centred=False))

    return rms_norm


def _through_group_norm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def group_norm(
        input: Tensor,  # noqa: A002
        num_groups: int,
        weight: Any = None,
        bias: Any = None,
        eps: float = 1e-5,
    ) -> Tensor:
        out = original(input, num_groups, weight, bias, eps)
        apart = (input.shape[0], num_groups, input.shape[1] // num_groups, *input.shape[2:])
        return _tell(input, out, _by_channel(input, apart, range(2, len(apart)), weight, eps))

    return group_norm


def _through_batch_norm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def batch_norm(
        input: Tensor,  # noqa: A002
        running_mean: Any,
        running_var: Any,
        weight: Any = None,
        bias: Any = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        out = original(input, running_mean, running_var, weight, bias, training, momentum, eps)
        dims = [dim for dim in range(input.ndim) if dim != 1]
        return _tell(input, out, _by_channel(input, input.shape, dims, weight, eps))

    return batch_norm


_THROUGH: dict[str, Callable[[Any], Any]] = {
    "layer_norm": _through_layer_norm,
    "rms_norm": _through_rms_norm,
    "group_norm": _through_group_norm,
    "batch_norm": _through_batch_norm,
}
