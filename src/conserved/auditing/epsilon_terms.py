r"""The remainder that ε leaves in laws that hold up to it, measured at the norms of a running model.

A law whose scale a norm forgets up to ε has the identity

    Σ legs ± ⟨θ, G⟩ = Σ_t c ε/(s_t + ε) ⟨y_t, ∂L/∂y_t⟩

over everything that is normalised: s_t its mean square, y_t the output (before a bias), c the power by which the law
scales what is normalised. With the right-hand side at hand the law is as exact as any other. It takes only the input of
a norm and the gradient of its output, which later operations made: a wrong input gradient of the norm still shows.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from conserved._torch_compat import in_backward
from conserved.auditing.norm_calls import NormCall, listen_to_norms, over_last
from conserved.auditing.reference_form import AS_RUN, PassForm
from conserved.auditing.replay import Replay
from conserved.boundary import guarded
from conserved.inference import being_followed
from conserved.inference.derivation import Derivation
from conserved.inference.laws_up_to_epsilon import ForgottenScale
from conserved.laws import LawSet
from conserved.layout import RankGroup, is_sharded
from conserved.moment import RowNorm, to_host
from conserved.symmetry import Tensors

Key = tuple[str, bool, int]
"""A normalisation: its module, whether it is one function, its number there."""


@dataclass(frozen=True, slots=True, eq=False)
class RightHandSide:
    """The value of a law's identity, one number for each of its rows, and the squares of its terms."""

    value: NDArray[np.float64]
    spread: float


class EpsilonTerms:
    """Measures the right-hand sides of the laws of a model that hold up to ε.

    `watching()` puts hooks on the norms; forward and backward passes of one optimizer step go inside. `sides` are the
    right-hand sides afterwards, of those laws of which they could be measured: the others are left as they were.
    """

    def __init__(self, model: nn.Module, laws: LawSet, group: RankGroup | None = None) -> None:
        """Read which norms matter.

        Args:
            model: the model.
            laws: its laws.
            group: processes of data parallelism that ask for `sides_of_group` together.
        """
        self._model = model
        self._laws: dict[str, Sequence[ForgottenScale]] = {}
        counts: Mapping[tuple[str, bool], int] = {}
        modules = dict(model.named_modules())
        known = laws.derivation
        if isinstance(known, Derivation) and _plain(model, group):
            counts = known.normalisations()
            for symmetry in laws:
                if not symmetry.exact:
                    try:
                        self._laws[symmetry.name] = known.forgettings(symmetry)
                    except ValueError:
                        continue
        wanted = [term for terms in self._laws.values() for term in terms]
        self._dims: dict[Key, tuple[int, ...]] = {_key(term): term.dims for term in wanted}
        written = {term.module: term.epsilon for term in wanted if not term.function and term.call == 0}
        self._written = {
            name: terms
            for name, epsilon in written.items()
            if name in modules and (terms := _Written.of(modules[name], epsilon)) is not None
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
        self._sums: dict[Key, Tensor] = {}
        """What ε leaves at each norm, and the squares of what that is made of."""
        self._unknown: set[Key] = set()
        """Norms of which it is not known: over axes that laws tell apart, or called with more than an input."""
        self._taken: dict[str, Tensor] = {}
        self._fired: Counter[Key] = Counter()
        """By norm, backward passes that reached its output."""
        self._accumulated: Counter[str] = Counter()
        """By parameter, backward passes whose gradient was added to it."""

    @contextmanager
    def watching(self) -> Iterator[EpsilonTerms]:
        """Hook all norms that matter, for one step."""
        with ExitStack() as undo:
            self.watch(undo)
            yield self

    def watch(self, undo: ExitStack) -> None:
        """Hook all norms that matter; the stack removes the hooks."""
        self._clear()
        if not self._laws:
            return
        running: list[str] = []
        for name, module in self._model.named_modules():
            if name and (name in self._functions or name in self._inline):
                undo.callback(module.register_forward_pre_hook(guarded(self._enter(name, running))).remove)
                undo.callback(module.register_forward_hook(guarded(_leave(running)), always_call=True).remove)
            if name in self._written:
                undo.callback(module.register_forward_hook(guarded(self._through(name)), with_kwargs=True).remove)
        for name, parameter in self._reference.items():
            undo.callback(parameter.register_post_accumulate_grad_hook(guarded(self._keep(name))).remove)
        undo.enter_context(listen_to_norms(_Listener(guarded(self.function), running)))

    def sides(self, gradients: Tensors) -> dict[str, RightHandSide]:
        """Return the right-hand sides that are known, by law, in units of the gradients as they are now."""
        ratio = self._rescaled(gradients) if self._calls else None
        if ratio is None:
            return {}
        # A pass of torch.autograd.grad, for an input or a penalty, reaches norms and adds to no gradient.
        return self._known_sides(ratio, passes=max(self._accumulated.values(), default=0))

    def sides_of_group(self, gradients: Tensors, group: RankGroup) -> dict[str, RightHandSide]:
        """Return the right-hand sides of gradients that were added up over data parallelism.

        Each process sees its own tokens. Right-hand sides add up as gradients do, and a few small gradients, added up
        as well, say by which number the stack has divided them. Every process of the group has to call it.
        """
        passes = max(self._accumulated.values(), default=0)
        own = self._known_sides(1.0, passes=passes) if self._calls else {}
        taken = {name: self._taken.get(name, torch.zeros_like(p)) for name, p in self._reference.items()}
        parts = [part.double().flatten().cpu() for part in taken.values()]
        rows = {name: len(some[0].charges) for name, some in self._laws.items() if some}
        for name, count in rows.items():
            side = own.get(name)
            numbers = np.zeros(count) if side is None else side.value
            known = [float(side is not None), 0.0 if side is None else side.spread]
            parts.append(torch.from_numpy(np.concatenate((known, numbers))))
        message = torch.cat(parts).to(next(iter(gradients.values())).device)
        group.sum(message)
        sizes = [part.numel() for part in taken.values()]
        *sums, rest = message.cpu().split([*sizes, message.numel() - sum(sizes)])
        self._taken = {name: part.view_as(p) for (name, p), part in zip(taken.items(), sums, strict=True)}
        ratio = self._rescaled({name: gradients[name].cpu() for name in self._taken if name in gradients})
        if ratio is None:
            return {}
        result, start = {}, 0
        for name, count in rows.items():
            known, spread, *values = rest[start : start + count + 2].tolist()
            start += count + 2
            if known == group.size:
                result[name] = RightHandSide(ratio * np.array(values), ratio**2 * spread)
        return result

    def replayed(
        self, replay: Replay, parameters: Tensors, *, scale: float = 1.0, form: PassForm = AS_RUN
    ) -> tuple[dict[str, Tensor], dict[str, RightHandSide]]:
        """Run a pass again; return the gradients of some parameters, and the right-hand sides that are known."""
        with self.watching():
            gradients = replay.gradients(parameters, scale=scale, form=form)
        return gradients, self._known_sides(1 / scale, passes=1) if self._calls else {}

    def _known_sides(self, ratio: float, *, passes: int) -> dict[str, RightHandSide]:
        self._unknown |= {key for key, fired in self._fired.items() if fired != passes}
        sums = dict(zip(self._sums, to_host([*self._sums.values()]), strict=True))
        sides = {name: self._side(some, sums, ratio) for name, some in self._laws.items()}
        return {name: side for name, side in sides.items() if side is not None}

    def _side(
        self, forgotten: Sequence[ForgottenScale], sums: Mapping[Key, NDArray[np.float64]], ratio: float
    ) -> RightHandSide | None:
        """Return the right-hand side of a law whose scale these norms forget; None if not all of them were seen."""
        if not forgotten or not all(
            self._complete(term.module) and _key(term) not in self._unknown for term in forgotten
        ):
            return None
        total, spread = np.zeros(forgotten[0].charges.shape[0]), 0.0
        for term in forgotten:
            if _key(term) not in sums:
                continue
            value, squares = sums[_key(term)]
            # What a written norm adds its ε to is a mean square, whose charge is twice that of the entries.
            charges = np.asarray(term.charges, dtype=np.float64).reshape(len(total), -1) * ratio
            charges = charges if term.function else charges / 2
            if charges.shape[1] not in (1, value.size):
                return None
            total += (charges * value.reshape(1, -1)).sum(1)
            spread += float((charges**2 * squares.reshape(1, -1)).sum())
        return RightHandSide(total, spread)

    def _rescaled(self, gradients: Tensors) -> float | None:
        """Return by how much all gradients were multiplied since the backward pass (clipping, a loss scale).

        The result is None if that is unknown.

        None as well if they are not those of the passes that were watched.
        """
        products = []
        for name, then in self._taken.items():
            now = gradients.get(name)
            if now is None or now.shape != then.shape:
                return None
            a, b = now.detach().double().flatten(), then.double().flatten()
            products.append(torch.stack((b @ b, a @ b, a @ a)))
        ratios = []
        for before, both, after in to_host(products):
            if before == 0:
                continue
            ratio = both / before
            # ‖a − ratio b‖² = ‖a‖² − ratio ⟨a, b⟩
            if not max(after - ratio * both, 0.0) <= 1e-4 * after:
                return None
            ratios.append(ratio)
        return float(np.median(ratios)) if ratios else None

    def _complete(self, module: str) -> bool:
        """Return whether everything that a module normalised was seen.

        A module is complete if it was called as often as in its program, every time the program ran.

        A module that did not run, because its layer was dropped, had nothing to be seen.
        """
        if module in self._written:
            return True
        calls = self._calls[module]
        return calls % self._counts[module] == 0 and (calls > 0 or (not self._entered[module] and bool(module)))

    def _counts_now(self, module: str) -> bool:
        """Return whether a norm that is called now takes part in the gradient, for the first time.

        Checkpointing calls it again in the backward pass; what was called without gradients before counts then.
        """
        if not torch.is_grad_enabled() or being_followed():
            return False
        backward = in_backward()
        self._forwards[module] += not backward
        return not backward or not self._forwards[module]

    def _keep(self, name: str) -> Callable[[Tensor], None]:
        # Weakly: Python does not see what such hooks of a parameter hold, so that the model would stay for ever.
        reference = weakref.ref(self)

        def hook(parameter: Tensor) -> None:
            terms = reference()
            if terms is not None and parameter.grad is not None and not parameter.grad.is_sparse:
                gradient = parameter.grad.detach().clone()
                # A wrapper with buffers of its own takes every gradient away before the next is made.
                moved = getattr(parameter, "main_grad", None) is not None and name in terms._taken
                terms._taken[name] = terms._taken[name].add_(gradient) if moved else gradient
                terms._accumulated[name] += 1

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

    def function(self, module: str, x: Tensor, out: Tensor, norm: NormCall) -> None:
        """Handle a call of one of torch's norm functions."""
        if module in self._counts and module not in self._written and self._counts_now(module):
            self._follow(self._number(module), x, out, norm)

    def _through(self, name: str) -> Callable[[nn.Module, Any, dict[str, Any], Any], None]:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], out: Any) -> None:
            if not self._counts_now(name):
                return
            key = self._number(name)
            norm, given = self._written[name], [*args, *kwargs.values()]
            call = norm.call(module, given[0]) if len(given) == 1 and isinstance(out, Tensor) else None
            if call is None:
                self._unknown.add(key)
            else:
                self._follow(key, given[0], out, call)

        return hook

    def _follow(self, key: Key, x: Tensor, out: Tensor, norm: NormCall) -> None:
        if key in self._dims and out.requires_grad:
            # A hook that held its own tensor would keep it and its graph for ever: Python cannot see that cycle.
            values = x.detach()
            out.register_hook(guarded(lambda gradient: self._add(key, values, gradient, norm)))

    @torch.no_grad()
    def _add(self, key: Key, x: Tensor, gradient: Tensor, norm: NormCall) -> None:
        self._fired[key] += 1
        remainder = norm.remainder(x, gradient.detach(), self._dims[key])
        if remainder is None:
            self._unknown.add(key)
            return
        old = self._sums.get(key)
        self._sums[key] = remainder if old is None else old.add_(remainder)


@dataclass(frozen=True, eq=False)
class _Listener:
    """The owner of the norms that are listened to, with its modules that are running."""

    follow: Callable[[str, Tensor, Tensor, NormCall], None]
    running: list[str]

    def note_call(self, x: Tensor, out: Tensor, norm: NormCall) -> None:
        """Handle a norm called by the module that is running."""
        self.follow(self.running[-1] if self.running else "", x, out, norm)


@dataclass(frozen=True, slots=True)
class _Written:
    """A module that is a norm over the last axis, written out: a gain times x/√(s + ε), and perhaps a bias."""

    row: RowNorm
    parameter: str | None
    """The parameter that it multiplies by, if it does so; else its gain is asked of it at every call."""
    offset: float = 0.0
    """The constant that is added to the parameter."""

    @staticmethod
    def of(module: nn.Module, epsilon: float) -> _Written | None:
        """Find the gain by calling a twin of the module with other parameters, in float64. Return None if it computes
        something else.
        """
        parameters = dict(module.named_parameters(recurse=False))
        sizes = {tuple(p.shape) for p in parameters.values()}
        if any(True for _ in module.children()) or any(True for _ in module.buffers()) or len(sizes) != 1:
            return None
        (shape,) = sizes
        first = next(iter(parameters.values()))
        if len(shape) != 1 or not first.is_floating_point() or first.is_meta:
            return None
        generator = torch.Generator().manual_seed(0)
        others = {
            name: torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.device)
            for name, p in parameters.items()
        }
        # A single gain says nothing of the width; ε shows in small numbers, the rest in others.
        width = shape[0] if shape[0] > 1 else _SOME
        x = torch.randn(8, width, generator=generator, dtype=torch.float64).to(first.device)
        x[:4] *= epsilon**0.5
        for centred in (False, True):
            row = RowNorm(epsilon=epsilon, centred=centred)
            try:
                twin = copy.copy(module)
                twin.__dict__["_parameters"] = others
                gain = _gain_of(twin.forward, row, x)
                with torch.no_grad():
                    y = (twin.forward(x) - twin.forward(torch.zeros_like(x))).double()
            except Exception:
                # User modules may raise anything here; the call is then not treated as a norm of one input.
                return None
            values = x - x.mean(-1, keepdim=True) if centred else x
            expected = gain * values / (values.square().mean(-1, keepdim=True) + epsilon).sqrt()
            if y.shape == x.shape and _close(y, expected):
                named = [
                    (name, offset) for name, p in others.items() for offset in (0.0, 1.0) if _close(gain, p + offset)
                ]
                return _Written(row, *(named[0] if named else (None,)))
        return None

    def call(self, module: nn.Module, x: Any) -> NormCall | None:
        """Return a call of the module with what it multiplies by as it is now; None if that cannot be found out."""
        try:
            gain = self.gain(module, x)
            return over_last(x, 1, gain, self.row.epsilon, centred=self.row.centred)
        except Exception:
            # Its parameters, or what it is called with, may be anything: the pass goes on.
            return None

    def gain(self, module: nn.Module, like: Tensor) -> Tensor:
        """Return what the module multiplies rows by, as it is now."""
        if self.parameter is None:
            return _gain_of(module.forward, self.row, like)
        result: Tensor = getattr(module, self.parameter).detach()
        return result + self.offset if self.offset else result


_SOME = 5
"""Entries of a row where any number will do."""


def _close(actual: Tensor, expected: Tensor) -> bool:
    """Return whether tensors agree up to the rounding of a module that computes in single precision."""
    return bool(((actual - expected).abs() <= 1e-4 * expected.abs() + 1e-7).all())


@torch.no_grad()
def _gain_of(forward: Callable[[Tensor], Tensor], norm: RowNorm, like: Tensor) -> Tensor:
    """Return what a norm that is written out multiplies its rows by: its answer to ones, half of them negative."""
    width, kind = like.shape[-1], torch.promote_types(like.dtype, torch.float32)
    x = like.new_ones(1, width)
    x[:, : width // 2] = -1
    values = x.to(kind) - x.to(kind).mean() if norm.centred else x.to(kind)
    root = (values.square().mean() + norm.epsilon).sqrt()
    answer = (forward(x) - forward(torch.zeros_like(x))).to(kind)
    # Of a single number there is nothing left once its mean is taken away.
    return torch.where(values == 0, 0.0, answer * root / values)[0]


def _key(term: ForgottenScale) -> Key:
    return term.module, term.function, term.call


def _plain(model: nn.Module, group: RankGroup | None) -> bool:
    """Return whether hooks see what the model computes.

    It is not compiled, and one process or a group sees everything.
    """
    if any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules()):
        return False
    if is_sharded(model):
        return False
    if group is not None and group.size == torch.distributed.get_world_size():
        return True
    return not (torch.distributed.is_available() and torch.distributed.is_initialized()) or (
        torch.distributed.get_world_size() == 1
    )


def _smallest(model: nn.Module) -> dict[str, Tensor]:
    """Return a few small trained parameters, by whose gradients it is seen what happened to all of them after the
    pass.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad and p.numel() > 1]
    return dict(sorted(trained, key=lambda pair: pair[1].numel())[:4])


def _leave(running: list[str]) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if running:
            running.pop()

    return hook
