"""The rules of torch's elementwise optimizers, written once more, for a sample of entries in float64.

A rule takes entries of the weights, the gradient and the optimizer's state from before a step and returns the weights
after it. The formulas are those of the algorithm boxes in torch's documentation of each class. They are a second
implementation: a fused kernel, a compiled step or a subclass is held against them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop


def skips(optimizer: Optimizer) -> bool:
    """Return whether a gradient scaler makes a fused optimizer skip this step."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(torch.as_tensor(found_inf).sum() > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEntries:
    """Entries of one parameter group before a step."""

    theta: Tensor
    gradient: Tensor
    group: Mapping[str, Any]
    state: Mapping[str, Tensor]
    """By key of the optimizer's state; zero where a tensor has no state yet."""
    count: Tensor
    """The number of the step about to be made, for each entry."""
    fresh: Tensor
    """Whether an entry's tensor has no state yet."""

    @property
    def ascent(self) -> Tensor:
        """The gradient that is descended along; upwards if the group maximises."""
        return -self.gradient if self.group.get("maximize") else self.gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRule:
    """The update rule of an optimizer, and the tensors of its state that it reads."""

    step: Callable[[GroupEntries], Tensor]
    keys: Callable[[Mapping[str, Any]], tuple[str, ...]]
    shared: tuple[str, ...] = ()
    """Keys of the state that hold one number for a whole tensor."""


def rule_for(optimizer: Optimizer) -> tuple[ReferenceRule, bool] | None:
    """Return the rule of an optimizer's class, and whether it steps by it for sure.

    A subclass that overrides `step` may follow the rule of its base class or not. None if no base class has a rule.
    """
    cls = type(optimizer)
    for base in cls.__mro__:
        if base in _RULES:
            # torch wraps `step` when an optimizer is made, each class once.
            own, known = (inspect.unwrap(inspect.getattr_static(each, "step")) for each in (cls, base))
            return _RULES[base], own is known
    return None


def _decayed(e: GroupEntries) -> tuple[Tensor, Tensor]:
    """Return weights and gradient with weight decay in the one or the other."""
    lr, decay = e.group["lr"], e.group.get("weight_decay", 0.0)
    if e.group.get("decoupled_weight_decay", False):
        return e.theta * (1 - lr * decay), e.ascent
    return e.theta, e.ascent + decay * e.theta


def _sgd(e: GroupEntries) -> Tensor:
    lr, momentum = e.group["lr"], e.group["momentum"]
    gradient = e.ascent + e.group["weight_decay"] * e.theta
    if not momentum:
        return e.theta - lr * gradient
    buffer = momentum * e.state["momentum_buffer"] + (1 - e.group["dampening"]) * gradient
    buffer = torch.where(e.fresh, gradient, buffer)
    return e.theta - lr * (gradient + momentum * buffer if e.group["nesterov"] else buffer)


def _adam(e: GroupEntries, *, decoupled: bool = False) -> Tensor:
    lr, decay, (beta1, beta2) = e.group["lr"], e.group["weight_decay"], e.group["betas"]
    theta, gradient = _decayed(e)
    if decoupled:
        theta, gradient = e.theta * (1 - lr * decay), e.ascent
    mean = beta1 * e.state["exp_avg"] + (1 - beta1) * gradient
    square = beta2 * e.state["exp_avg_sq"] + (1 - beta2) * gradient.square()
    if e.group["amsgrad"]:
        square = torch.maximum(e.state["max_exp_avg_sq"], square)
    root = square.sqrt() / (1 - beta2**e.count).sqrt()
    return theta - lr * mean / (1 - beta1**e.count) / (root + e.group["eps"])


def _adamw(e: GroupEntries) -> Tensor:
    return _adam(e, decoupled=True)


def _rmsprop(e: GroupEntries) -> Tensor:
    lr, alpha = e.group["lr"], e.group["alpha"]
    gradient = e.ascent + e.group["weight_decay"] * e.theta
    square = alpha * e.state["square_avg"] + (1 - alpha) * gradient.square()
    if e.group["centered"]:
        mean = e.state["grad_avg"] + (1 - alpha) * (gradient - e.state["grad_avg"])
        root = (square - mean.square()).clamp_min(0).sqrt()
    else:
        root = square.sqrt()
    direction = gradient / (root + e.group["eps"])
    if e.group["momentum"] > 0:
        direction = e.group["momentum"] * e.state["momentum_buffer"] + direction
    return e.theta - lr * direction


def _adagrad(e: GroupEntries) -> Tensor:
    gradient = e.ascent + e.group["weight_decay"] * e.theta
    total = e.state["sum"] + gradient.square()
    rate = e.group["lr"] / (1 + (e.count - 1) * e.group["lr_decay"])
    return e.theta - rate * gradient / (total.sqrt() + e.group["eps"])


def _adadelta(e: GroupEntries) -> Tensor:
    rho, eps = e.group["rho"], e.group["eps"]
    gradient = e.ascent + e.group["weight_decay"] * e.theta
    square = rho * e.state["square_avg"] + (1 - rho) * gradient.square()
    return e.theta - e.group["lr"] * gradient * ((e.state["acc_delta"] + eps) / (square + eps)).sqrt()


def _adamax(e: GroupEntries) -> Tensor:
    beta1, beta2 = e.group["betas"]
    gradient = e.ascent + e.group["weight_decay"] * e.theta
    mean = beta1 * e.state["exp_avg"] + (1 - beta1) * gradient
    largest = torch.maximum(beta2 * e.state["exp_inf"], gradient.abs() + e.group["eps"])
    return e.theta - e.group["lr"] / (1 - beta1**e.count) * mean / largest


def _nadam(e: GroupEntries) -> Tensor:
    beta1, beta2 = e.group["betas"]
    theta, gradient = _decayed(e)
    decay = e.group["momentum_decay"]
    now = beta1 * (1 - 0.5 * 0.96 ** (e.count * decay))
    coming = beta1 * (1 - 0.5 * 0.96 ** ((e.count + 1) * decay))
    product = torch.where(e.fresh, 1.0, e.state["mu_product"]) * now
    mean = beta1 * e.state["exp_avg"] + (1 - beta1) * gradient
    square = beta2 * e.state["exp_avg_sq"] + (1 - beta2) * gradient.square()
    root = (square / (1 - beta2**e.count)).sqrt() + e.group["eps"]
    lr = e.group["lr"]
    theta = theta - lr * (1 - now) / (1 - product) * gradient / root
    return theta - lr * coming / (1 - product * coming) * mean / root


def _radam(e: GroupEntries) -> Tensor:
    beta1, beta2 = e.group["betas"]
    theta, gradient = _decayed(e)
    mean = beta1 * e.state["exp_avg"] + (1 - beta1) * gradient
    square = beta2 * e.state["exp_avg_sq"] + (1 - beta2) * gradient.square()
    correction = 1 - beta2**e.count
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * e.count * beta2**e.count / correction
    rectified = ((length - 4) * (length - 2) * longest).clamp_min(0)
    rectifier = (rectified / ((longest - 4) * (longest - 2) * length)).sqrt()
    adaptive = correction.sqrt() / (square.sqrt() + e.group["eps"])
    return theta - e.group["lr"] * mean / (1 - beta1**e.count) * torch.where(length > 5, rectifier * adaptive, 1.0)


def _asgd(e: GroupEntries) -> Tensor:
    gradient = e.ascent + e.group["weight_decay"] * e.theta
    eta = torch.where(e.fresh, float(e.group["lr"]), e.state["eta"])
    return e.theta * (1 - e.group["lambd"] * eta) - eta * gradient


def _adam_keys(group: Mapping[str, Any]) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))


def _rmsprop_keys(group: Mapping[str, Any]) -> tuple[str, ...]:
    momentum = ("momentum_buffer",) if group["momentum"] > 0 else ()
    return ("square_avg", *(("grad_avg",) if group["centered"] else ()), *momentum)


_RULES: dict[type[Optimizer], ReferenceRule] = {
    SGD: ReferenceRule(step=_sgd, keys=lambda group: ("momentum_buffer",) if group["momentum"] else ()),
    Adam: ReferenceRule(step=_adam, keys=_adam_keys),
    AdamW: ReferenceRule(step=_adamw, keys=_adam_keys),
    RMSprop: ReferenceRule(step=_rmsprop, keys=_rmsprop_keys),
    Adagrad: ReferenceRule(step=_adagrad, keys=lambda group: ("sum",)),
    Adadelta: ReferenceRule(step=_adadelta, keys=lambda group: ("square_avg", "acc_delta")),
    Adamax: ReferenceRule(step=_adamax, keys=lambda group: ("exp_avg", "exp_inf")),
    NAdam: ReferenceRule(
        step=_nadam, keys=lambda group: ("exp_avg", "exp_avg_sq", "mu_product"), shared=("mu_product",)
    ),
    RAdam: ReferenceRule(step=_radam, keys=lambda group: ("exp_avg", "exp_avg_sq")),
    ASGD: ReferenceRule(step=_asgd, keys=lambda group: ("eta",), shared=("eta",)),
}
"""Rprop is missing: its step sizes change by the sign of the last gradient, which it clears in place."""
