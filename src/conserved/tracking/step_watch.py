"""A record of the current step of a training loop: passes, gradients, autocast, the order of calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from conserved._torch_compat import version_of
from conserved.boundary import Boundary, Hook
from conserved.inference import being_followed
from conserved.layout.deepspeed import is_partitioned
from conserved.rank_agreement import several_processes

PRECISION = "precision of passes"
"""The stage that notices autocast."""

PASSES = "passes"
"""The stage that tells backward passes of a step apart."""

_SAMPLED = 8
"""Parameters whose version is read; what moves weights back and forth moves all of them."""

_FOLLOWED = 4
"""Parameters whose gradients are followed, from the first to the last."""

GradientMark = tuple[int, int, int]
"""Identity of the current gradients: the first one, its version, and the number of forward passes so far."""


class StepWatch:
    """Counts passes and notices autocast, discarded gradients and moved weights, from hooks that need no laws.

    Args:
        model: the model inside its wrappers.
        called: the module that the training loop calls.
        optimizers: the optimizers of the model.
        boundary: the boundary of the monitor.
        on_pass: called at every forward pass that records a graph.
        on_discarded: called when gradients of an earlier backward pass of this step were discarded.
    """

    def __init__(
        self,
        model: nn.Module,
        called: nn.Module,
        optimizers: Sequence[Optimizer],
        boundary: Boundary,
        *,
        on_pass: Callable[[], None],
        on_discarded: Callable[[], None],
    ) -> None:
        self.autocast: set[torch.dtype] = set()
        """The precisions of autocast regions that passes of the model ran in."""
        self.stepped = False
        """Whether an optimizer has made a step that the monitor has not accounted for."""
        self.ever_stepped = False
        """Whether an optimizer has made any step yet; a loop may update weights by itself."""
        self.substituted = False
        """Whether a pass of this step ran with tensors that stand for parameters, as in meta-learning."""
        self.foreign = False
        """Whether the gradients were taken at other weights than those the optimizer starts from."""
        self._model, self._called, self._optimizers = model, called, optimizers
        self._boundary, self._on_pass, self._on_discarded = boundary, on_pass, on_discarded
        self._passes = 0
        self._pass_versions: tuple[int, ...] | None = None
        """Versions of some parameters at the last forward pass."""
        self._step_versions: tuple[int, ...] | None = None
        """Versions of the same parameters at the end of the last step."""
        self._followed: set[int] = set()
        """Parameters with a hook that notices accumulation."""
        self._accumulated: dict[int, tuple[int, int]] = {}
        """By parameter, the gradient tensor that the last backward pass of this step wrote, and its version."""
        self._early: GradientMark | None = None
        """The gradients at a `Monitor.step()` that no step of an optimizer came before."""

    def hooks(self) -> Iterator[Any]:
        """Put the hooks on the model and yield their handles."""
        hook = self._boundary.hook
        yield self._called.register_forward_pre_hook(hook(PASSES, self._count_pass))
        # The outermost module may be called outside autocast and enter it within, as accelerate does; compiled parts
        # run no hooks, so it is asked as well.
        for module in (self._called, *islice(_leaves(self._model, self._called), 2)):
            yield module.register_forward_pre_hook(hook(PRECISION, self._note_autocast))
        trained = [p for p in self._model.parameters() if p.requires_grad and p.is_leaf]
        # Weak reference: Python does not see what the hooks of a parameter hold, so a cycle would never be freed.
        reference = weakref.ref(self)
        for parameter in dict.fromkeys((*trained[:: -(-len(trained) // (_FOLLOWED - 1)) or 1], *trained[-1:])):
            self._followed.add(id(parameter))
            noticed = Hook(Boundary(logs=False), PASSES, partial(_notice_accumulation, reference))
            yield parameter.register_post_accumulate_grad_hook(noticed)

    def end_step(self) -> None:
        """Forget the step, because `Monitor.step()` has accounted for it."""
        self._step_versions = self.versions()
        self.stepped = self.foreign = self.substituted = False
        self._pass_versions = None
        self._accumulated.clear()

    def note_optimizer_step(self) -> None:
        """Handle an optimizer that has stepped."""
        self.stepped = self.ever_stepped = True

    def remember_weights(self) -> None:
        """Record the versions of all weights after a step, so that a change without a step is noticed."""
        self._step_versions = self.versions()

    def moved_without_step(self) -> bool:
        """Return whether parameters changed since the last step though no optimizer stepped, as in compiled steps."""
        return not self.stepped and self._step_versions not in (None, self.versions())

    def notice_foreign_gradients(self) -> bool:
        """Return whether gradients were taken at other weights than those the optimizer starts from.

        Sharpness-aware optimizers take them at perturbed weights and move back. No identity holds between such weights
        and such gradients, and a step from them cannot be split by cause. A second step with old gradients is another
        matter: there the weights were written by an optimizer that is watched.
        """
        if self.substituted:
            self.foreign = True
            self._boundary.remark("gradients", "a pass ran with other tensors in place of the parameters")
            return True
        if self.stepped or self._pass_versions is None or self._pass_versions == self.versions():
            return False
        if is_partitioned(self._model.parameters()):
            # ZeRO-3 writes parameters whenever it fetches them and lets go of them.
            return False
        self.foreign = True
        self._boundary.remark("gradients", "they were taken at other weights than those of the step, as by SAM")
        return True

    def gradients_written(self) -> bool:
        """Return whether most gradients are not as the last backward pass left them: changed, replaced, or not its."""
        if any(getattr(p, "main_grad", None) is not None for p in self._model.parameters()):
            # A wrapper keeps gradients in buffers of its own: that they are written there says nothing.
            return False
        if not self._accumulated or self.gradients_assigned():
            return True
        with_gradient = [p for p in self._held() if p.grad is not None]
        # Every gradient was added to as often as those that are followed.
        versions = {version for _, version in self._accumulated.values()}
        matrices = [p.grad for p in with_gradient if p.grad is not None and p.ndim > 1]
        return 2 * sum(version_of(gradient) not in versions for gradient in matrices) > len(matrices)

    def gradients_assigned(self) -> bool:
        """Return whether half of the gradients are other tensors than the last backward pass wrote: `p.grad = ...`."""
        with_gradient = [p for p in self._held() if p.grad is not None and id(p) in self._accumulated]
        if not self._accumulated and not several_processes():
            # No backward pass accumulated into them: the loop assigns what torch.autograd.grad gives.
            return any(p.grad is not None and id(p) in self._followed for p in self._held())
        assigned = sum(id(p.grad) != self._accumulated[id(p)][0] for p in with_gradient)
        return assigned > 1 and 2 * assigned >= len(with_gradient)

    def note_step_call(self) -> None:
        """Handle a call of `Monitor.step()`; remember the gradients if no optimizer has stepped."""
        self._early = None if self.stepped else self.gradient_mark()

    def called_too_early(self) -> bool:
        """Return whether an optimizer now uses gradients that `Monitor.step()` has seen before any step; asked once."""
        early, self._early = self._early, None
        return early is not None and early == self.gradient_mark()

    def gradient_mark(self) -> GradientMark | None:
        """Return the identity of the current gradients, used to notice `step()` before `optimizer.step()`; None if
        there are none.
        """
        first = next((p.grad for p in self._held() if p.grad is not None), None)
        return None if first is None else (id(first), version_of(first), self._passes)

    def versions(self) -> tuple[int, ...]:
        """Return how often each of the first parameters was written to.

        The parameters are the optimizer's, because sharding replaces those of the model.
        """
        return tuple(version_of(p) for p in islice(self._held(), _SAMPLED))

    def _held(self) -> Iterator[Tensor]:
        return (p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"])

    def _count_pass(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and not being_followed():
            first = next(module.parameters(), None)
            # Parameters that shards are gathered into are no leaves either.
            self.substituted |= first is not None and not first.is_leaf and not several_processes()
            self._passes += 1
            self._pass_versions = self.versions()
            self._on_pass()

    def _note_autocast(self, module: nn.Module, args: Any) -> None:
        device = next((p.device.type for p in module.parameters()), "cpu")
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            self.autocast.add(torch.get_autocast_dtype(device))

    def notice_accumulation(self, parameter: Tensor) -> None:
        """Detect gradients that were discarded since the last backward pass of this step.

        A pass for an adversarial input, a penalty or the other network of a pair leaves gradients that are cleared
        before the pass of the step. A gradient that is added to stays one tensor and is written to once.
        """
        gradient = parameter.grad
        if gradient is None or being_followed() or getattr(parameter, "main_grad", None) is not None:
            # Megatron's wrapper adds every gradient to a buffer and takes it away: nothing is discarded.
            return
        key, now = id(parameter), (id(gradient), version_of(gradient))
        before, self._accumulated[key] = self._accumulated.get(key), now
        if before is not None and before not in (now, (now[0], now[1] - 1)):
            self._on_discarded()


def _notice_accumulation(watch: weakref.ref[StepWatch], parameter: Tensor) -> None:
    alive = watch()
    if alive is not None:
        alive._boundary.attempt(PASSES, alive.notice_accumulation, parameter)


def _leaves(model: nn.Module, called: nn.Module) -> Iterator[nn.Module]:
    """Yield modules that hold parameters and no other modules."""
    for module in model.modules():
        inner = any(True for _ in module.children())
        if module is not called and not inner and any(True for _ in module.parameters(recurse=False)):
            yield module
