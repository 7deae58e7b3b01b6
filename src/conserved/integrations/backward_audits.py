"""Audits every backward pass of whatever models are called; what the pytest plugin puts around a test."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from conserved.auditing import Audit, audit
from conserved.inference import FirstCall
from conserved.laws import LawSet


class BackwardAudits:
    """A context in which every backward pass is audited; one that breaks a gradient identity raises AssertionError.

    Laws are inferred from the first call of every outermost module. Each pass is audited by the gradients it adds, so
    that accumulating them, and steps of an optimizer between, do no harm. Parameters without a gradient are no failure:
    tests differentiate parts of models.

    Args:
        loss: the loss that models are trained with, as for `conserved.recognize`.
    """

    def __init__(self, loss: str = "any") -> None:
        self.loss = loss
        self.audits: list[Audit] = []
        """All audits, in order."""
        self.skipped: dict[str, str] = {}
        """Models that could not be audited, by the name of their class, and why."""
        self._calls: weakref.WeakKeyDictionary[nn.Module, FirstCall] = weakref.WeakKeyDictionary()
        self._laws: weakref.WeakKeyDictionary[nn.Module, LawSet | None] = weakref.WeakKeyDictionary()
        self._called: set[nn.Module] = set()
        """Models that were called since their last backward pass: the test itself need not hold them until the next."""
        self._depth = 0
        self._hooks: list[RemovableHandle] = []
        self._backward = torch.autograd.backward

    def __enter__(self) -> BackwardAudits:
        backward = torch.autograd.backward

        def enter(module: nn.Module, *_: Any) -> None:
            if self._depth == 0 and torch.is_grad_enabled():
                self._see(module)
            self._depth += 1

        def leave(*_: Any) -> None:
            self._depth -= 1

        def audited(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            with self._gradients_of_this_pass():
                backward(*args, **kwargs)

        self._hooks = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        ]
        # No hook or mode of PyTorch tells that a backward pass begins or ends, so the function itself is replaced.
        self._backward = backward
        torch.autograd.backward = audited
        return self

    def __exit__(self, *_: object) -> None:
        torch.autograd.backward = self._backward
        for hook in self._hooks:
            hook.remove()
        for first in self._calls.values():
            first.close()
        self._called.clear()

    def _see(self, module: nn.Module) -> None:
        """Record how a model is called, the first time."""
        trained = any(p.requires_grad and p.is_floating_point() for p in module.parameters())
        if not trained:
            return
        self._called.add(module)
        if module not in self._calls:
            self._calls[module] = FirstCall(module, loss=self.loss)

    @contextmanager
    def _gradients_of_this_pass(self) -> Iterator[None]:
        """Run a backward pass with empty gradients, audit what it leaves, then add what was there before."""
        __tracebackhide__ = True
        models = list(self._calls)
        before: dict[Tensor, Tensor] = {}
        for model in models:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    before[parameter], parameter.grad = parameter.grad, None
        try:
            yield
            for model in models:
                self._audit(model)
        finally:
            for p, gradient in before.items():
                # In place, as autograd itself accumulates: other references to the tensor see the sum.
                if p.grad is not None:
                    gradient += p.grad
                p.grad = gradient

    def _audit(self, model: nn.Module) -> None:
        __tracebackhide__ = True
        if all(parameter.grad is None for parameter in model.parameters()):
            return
        if model not in self._laws:
            try:
                self._laws[model] = self._calls[model].laws()
            except (RuntimeError, TypeError, ValueError, NotImplementedError, LookupError) as problem:
                self._laws[model] = None
                self.skipped[type(model).__name__] = str(problem).partition("\n")[0]
        # Only now: laws are inferred by calling the model.
        self._called.discard(model)
        laws = self._laws[model]
        if laws is None or not len(laws):
            return
        result = audit(model, laws)
        # A test may make models by the hundred; their audits stay, and they do not.
        result.settle()
        self.audits.append(result)
        if result.failures or any(item.trouble == "not finite" for item in result.findings):
            raise AssertionError(f"A backward pass of {type(model).__name__} is wrong.\n{result.summary()}")
