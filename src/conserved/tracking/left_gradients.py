"""Gradients as the backward pass leaves them, to tell whether the loop changes them before the optimizer steps."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from conserved._torch_compat import version_of
from conserved.boundary import Hook, guarded
from conserved.inference.live import being_followed


class LeftGradients:
    """The gradients of a model's parameters as the backward pass under way leaves them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._left: dict[str, _LeftGradient] = {}
        self._followed: set[str] = set()
        """Parameters that got a hook for the pass under way."""

    def follow(self, undo: ExitStack) -> None:
        """Put hooks on parameters that remember their gradients; `undo` takes them away."""
        self._left.clear()
        self._followed.clear()
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and parameter.is_leaf:
                # Python does not see what hooks of a parameter hold: one that holds the model is never freed.
                self._followed.add(name)
                keep = guarded(partial(_keep, self._left, name))
                undo.callback(parameter.register_post_accumulate_grad_hook(keep).remove)

    def are_left(self, names: Collection[str]) -> bool:
        """Return whether nothing has written to the gradients of some parameters since the pass."""
        gradients = {name: p.grad for name, p in self._model.named_parameters() if p.grad is not None}
        return bool(names) and all(
            name in self._left and name in gradients and self._left[name].is_left(gradients[name]) for name in names
        )

    def changed(self, names: Collection[str], *, replayed: bool) -> list[str]:
        """Return those of some parameters whose gradients the program changes: in hooks, or after the pass.

        With `replayed`, the pass was recorded after `follow`, so that its backward pass was followed.

        Operations on a gradient count up its version. A write through `.data` does not, and changes its sum.
        """
        changed = self.hooked(names)
        for name, parameter in self._model.named_parameters():
            left = self._left.get(name)
            if name not in names or name in changed or parameter.grad is None:
                continue
            # No backward pass accumulated what the loop assigned, as with torch.autograd.grad.
            assigned = replayed and left is None and name in self._followed
            if assigned or (left is not None and not left.is_left(parameter.grad)):
                changed.append(name)
        return changed

    def hooked(self, names: Collection[str]) -> list[str]:
        """Return those of some parameters on which the program has hooks that see their gradients in every pass."""
        return [
            name
            for name, parameter in self._model.named_parameters()
            if name in names
            and parameter.grad is not None
            and not all(isinstance(hook, Hook) for hook in (parameter._backward_hooks or {}).values())
        ]


@dataclass(frozen=True, slots=True)
class _LeftGradient:
    """A gradient as a backward pass left it: which tensor, how often written to, and its sum, not waited for."""

    tensor: int
    version: int
    total: Tensor
    """Writes through `.data` count no version."""

    @staticmethod
    def of(gradient: Tensor) -> _LeftGradient:
        """Describe a gradient as it is now."""
        values = gradient.detach()._values() if gradient.is_sparse else gradient.detach()
        return _LeftGradient(id(gradient), version_of(gradient), values.sum())

    def is_left(self, gradient: Tensor) -> bool:
        """Return whether nothing has written to a gradient since."""
        now = _LeftGradient.of(gradient)
        same = (now.tensor, now.version) == (self.tensor, self.version)
        return same and bool(torch.equal(now.total, self.total))


def _keep(left: dict[str, _LeftGradient], name: str, parameter: Tensor) -> None:
    if parameter.grad is not None and not being_followed():
        left[name] = _LeftGradient.of(parameter.grad)
