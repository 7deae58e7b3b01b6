"""The update each optimizer made to a parameter in its last step, read from its state and split by cause.

A rule takes a `ParameterStep` and gives an `Update`: θ' = θ − U with U = rate · gradient + Σ parts. Parts are the
stages an optimizer goes through, each the difference it makes to the one before, so that they add up to U exactly:

    gradient        g as it was when the optimizer saw it; to first order it moves no law
    decay           λθ, added to the gradient (coupled) or beside it (decoupled)
    momentum        the average of past gradients minus the present one
    preconditioner  the rescaled average minus the average

θ before the step is not kept: it is θ' + U, which for every rule but the generic one is a combination of tensors that
exist anyway. A rule that cannot do without asks for a copy with `keeps`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Adamax, AdamW, Optimizer, RMSprop

from conserved._torch_compat import adjusted_muon_rate, orthogonalized
from conserved.moment import root_quotients
from conserved.tracking.combination import Combination, Scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterStep:
    """One parameter after a step, the argument of every rule: its values now, its gradient, the optimizer's state of
    it.
    """

    parameter: Tensor
    gradient: Tensor
    state: Mapping[str, Any]
    group: Mapping[str, Any]
    before: Tensor | None = None
    count: float | None = None
    """How many steps the optimizer has made with it, where that is known without asking the device."""
    made: Tensor | None = None
    """The direction that the rule's `make` computed for it."""

    @property
    def descent_gradient(self) -> Combination:
        """The gradient the optimizer descends along; upwards if it maximises."""
        gradient = Combination.of(self.gradient)
        return -gradient if self.group.get("maximize", False) else gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """U = rate · gradient + Σ parts, by cause."""

    parts: Mapping[str, Combination] = field(default_factory=dict)
    gradient: Combination = field(default_factory=Combination)
    rate: Scalar = 0.0

    def total(self) -> Combination:
        """Return the whole update U."""
        return sum(self.parts.values(), self.rate * self.gradient)


def _weight_decay(group: Mapping[str, Any]) -> Scalar | None:
    """Return λ of a parameter group, as most optimizers call it."""
    result: Scalar | None = group.get("weight_decay")
    return result


def _never(group: Mapping[str, Any]) -> bool:
    return False


def _without_momentum(group: Mapping[str, Any]) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule that reads an optimizer's last step, and the groups for which it needs a copy of θ from before."""

    name: str
    update: Callable[[ParameterStep], Update]
    keeps: Callable[[Mapping[str, Any]], bool] = lambda group: False
    uniform: bool = False
    """Whether every parameter of a group is stepped with the same coefficients as long as step counts are equal."""
    make: Callable[[Sequence[ParameterStep]], Sequence[Tensor]] | None = None
    """A direction that the optimizer does not keep, for parameters of one group with one step count together."""
    decay: Callable[[Mapping[str, Any]], Scalar | None] = _weight_decay
    """λ of a parameter group, by which weights decay as e^{−λ Σ lr}; None where it is not known."""
    plain: Callable[[Mapping[str, Any]], bool] = _never
    """Whether a parameter group is stepped by gradient descent and nothing else: θ' = θ − lr·g."""
    momentum: Callable[[Mapping[str, Any]], Scalar | None] = _without_momentum
    """m of a parameter group under heavy-ball momentum, b ← m·b + c·(g + λθ) and θ' = θ − lr·b; None without."""
    buffer: str = "momentum_buffer"
    """Where the optimizer's state has b."""
    averages: tuple[str, ...] = ("exp_avg",)
    """Where the state has tensors that are interpolated with the gradient, which torch refuses between two types."""
    reads_gradient: bool = True
    """Whether the gradient has to be there when the rule is asked."""


_RULES: dict[type[Optimizer], Rule] = {}


def register_rule(
    optimizer: type[Optimizer],
    update: Callable[[ParameterStep], Update],
    *,
    keeps: Callable[[Mapping[str, Any]], bool] | bool = False,
    uniform: bool = False,
    make: Callable[[Sequence[ParameterStep]], Sequence[Tensor]] | None = None,
    decay: Callable[[Mapping[str, Any]], Scalar | None] = _weight_decay,
    plain: Callable[[Mapping[str, Any]], bool] = _never,
    momentum: Callable[[Mapping[str, Any]], Scalar | None] = _without_momentum,
    buffer: str = "momentum_buffer",
    averages: Sequence[str] = ("exp_avg",),
) -> Rule:
    """Make an optimizer known. Subclasses that do not change `step` follow the same rule.

    Args:
        optimizer: the class of the optimizer.
        update: the rule: the step of one parameter, split by cause, from tensors that exist after it.
        keeps: whether a copy of the parameters from before the step is needed (`ParameterStep.before`); a function says
            it for each parameter group.
        uniform: whether the update of one parameter of a group may be taken for all with its step count, with tensors
            of their own: it must combine the parameter, its gradient, tensors of its state and the tensor of `make`
            with numbers that depend on the group and the count only.
        make: computes a direction that the optimizer does not keep, for many parameters in a few operations; each
            parameter finds its own in `ParameterStep.made`.
        decay: the weight decay λ of a parameter group that does not call it `weight_decay`; None where it is not known,
            and `Monitor.decay()` leaves such laws out.
        plain: whether a parameter group is stepped by gradient descent and nothing else, θ' = θ − lr·g, for which
            `Monitor.bounds()` is a theorem.
        momentum: m of a parameter group under heavy-ball momentum, b ← m·b + c·(g + λθ) and θ' = θ − lr·b, for which
            `Monitor.angular_momenta()` is exact; None for groups that are stepped in another way.
        buffer: where the optimizer's state has the momentum buffer b of a parameter.
        averages: where the state has tensors that the optimizer interpolates with the gradient. They cannot step once
            the model was converted to another type, and the monitor says so before they try.

    Returns:
        The rule, which is registered already and replaces an earlier one.
    """
    condition = keeps if callable(keeps) else lambda group: keeps
    name = optimizer.__name__
    _RULES[optimizer] = Rule(
        name=name,
        update=update,
        keeps=condition,
        uniform=uniform,
        make=make,
        decay=decay,
        plain=plain,
        momentum=momentum,
        buffer=buffer,
        averages=tuple(averages),
    )
    return _RULES[optimizer]


def rule_of(optimizer: Optimizer) -> Rule:
    """Return the rule by which an optimizer's steps are read.

    Args:
        optimizer: any optimizer.

    Returns:
        The rule registered for its class, or `GENERIC` where the class is unknown or overrides `step`.
    """
    cls = type(optimizer)
    for base in cls.__mro__:
        if base in _RULES:
            same = inspect.getattr_static(cls, "step") is inspect.getattr_static(base, "step")
            return _RULES[base] if same else GENERIC
    return GENERIC


def _generic(step: ParameterStep) -> Update:
    """Return U = θ − θ', whatever made it; its causes are not distinguished."""
    assert step.before is not None
    work = torch.promote_types(step.parameter.dtype, torch.float32)
    moved = step.before.to(work) - step.parameter.detach().to(work)
    return Update(parts={"update": Combination.of(moved)})


GENERIC = Rule(name="generic", update=_generic, keeps=lambda group: True, reads_gradient=False)


def _sgd(step: ParameterStep) -> Update:
    """Return U = lr·d; d is g + λθ, or the buffer b ← m·b + (1 − dampening)(g + λθ), or for Nesterov g + λθ + m·b."""
    lr, decay, momentum = (step.group[key] for key in ("lr", "weight_decay", "momentum"))
    theta, gradient = Combination.of(step.parameter), step.descent_gradient
    if momentum == 0:
        before = (theta + lr * gradient) / (1 - lr * decay)
        return Update(gradient=gradient, rate=lr, parts=_present(decay=lr * decay * before))
    buffer = Combination.of(step.state["momentum_buffer"])
    if step.group["nesterov"]:
        before = (theta + lr * gradient + lr * momentum * buffer) / (1 - lr * decay)
        return Update(
            gradient=gradient, rate=lr, parts=_present(decay=lr * decay * before) | {"momentum": lr * momentum * buffer}
        )
    loss = lr * decay * (theta + lr * buffer)
    return Update(
        gradient=gradient, rate=lr, parts=_present(decay=loss) | {"momentum": lr * (buffer - gradient) - loss}
    )


def _sgd_is_plain(group: Mapping[str, Any]) -> bool:
    return not group["momentum"] and not group["weight_decay"]


def _sgd_momentum(group: Mapping[str, Any]) -> Scalar | None:
    result: Scalar | None = group["momentum"] if group["momentum"] and not group["nesterov"] else None
    return result


def _adam_directions(steps: Sequence[ParameterStep]) -> list[Tensor]:
    """Return m/(√v + ε'): m̂/(√v̂ + ε) but for the factor that `_corrections` gives, with the averages as they are
    stored.
    """
    group = steps[0].group
    _, root = _corrections(steps[0])
    key = "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"
    averages, squares = zip(*((step.state["exp_avg"], step.state[key]) for step in steps), strict=True)
    return root_quotients(averages, squares, group["eps"] * root)


def _corrections(step: ParameterStep) -> tuple[Scalar, Scalar]:
    """Return what Adam's averages, which start at zero, are too small by: m̂ = m/c₁ and √v̂ = √v/c₂."""
    count = _number(step.state["step"]) if step.count is None else step.count
    beta1, beta2 = step.group["betas"]
    return 1 - beta1**count, (1 - beta2**count) ** 0.5


def _adam(step: ParameterStep, *, decoupled: bool = False) -> Update:
    """Return U = lr·m̂/(√v̂ + ε), with λθ added to the gradient (Adam) or to the update (AdamW)."""
    group, state = step.group, step.state
    lr, decay = group["lr"], group["weight_decay"]
    decoupled = decoupled or bool(group.get("decoupled_weight_decay", False))
    theta, gradient = Combination.of(step.parameter), step.descent_gradient
    small, root = _corrections(step)
    mean = Combination.of(state["exp_avg"]) / small
    assert step.made is not None
    # m̂/(√v̂ + ε) = (c₂/c₁) m/(√v + c₂ε)
    moved = (lr * root / small) * Combination.of(step.made)
    before = (theta + moved) / (1 - lr * decay) if decoupled else theta + moved
    loss = lr * decay * before
    mixed = lr * (mean - gradient) if decoupled else lr * (mean - gradient) - loss
    return Update(
        gradient=gradient,
        rate=lr,
        parts=_present(decay=loss) | {"momentum": mixed, "preconditioner": moved - lr * mean},
    )


def _rmsprop(step: ParameterStep) -> Update:
    """Return U = lr·(g + λθ)/(√v + ε), or lr times a buffer of such directions."""
    group, state = step.group, step.state
    lr, decay = group["lr"], group["weight_decay"]
    square = _wide(state["square_avg"])
    if group["centered"]:
        square = square - _wide(state["grad_avg"]).square()
    divisor = square.sqrt().add_(group["eps"])
    gradient, buffer = step.descent_gradient, None
    if group["momentum"] > 0:
        buffer = Combination.of(state["momentum_buffer"])
        before = Combination.of(step.parameter) + lr * buffer
    else:
        # Without a buffer θ is found by dividing by 1 − lr·λ/(√v + ε), which can be anything; hence the copy.
        before = Combination.of(step.parameter if step.before is None else step.before)
    scaled = Combination.of((gradient + decay * before).value() / divisor)
    parts = {} if buffer is None else {"momentum": lr * (buffer - scaled)}
    loss = lr * decay * before
    return Update(
        gradient=gradient,
        rate=lr,
        parts=_present(decay=loss) | {"preconditioner": lr * (scaled - gradient) - loss} | parts,
    )


def _adamax(step: ParameterStep) -> Update:
    """Return U = lr·m̂/u, with λθ added to the gradient; u is the largest decayed gradient so far, with ε in it."""
    group, state = step.group, step.state
    lr, decay = group["lr"], group["weight_decay"]
    gradient = step.descent_gradient
    count = _number(state["step"]) if step.count is None else step.count
    small = 1 - group["betas"][0] ** count
    mean = Combination.of(state["exp_avg"]) / small
    moved = (lr / small) * Combination.of(_wide(state["exp_avg"]) / _wide(state["exp_inf"]))
    loss = lr * decay * (Combination.of(step.parameter) + moved)
    return Update(
        gradient=gradient,
        rate=lr,
        parts=_present(decay=loss) | {"momentum": lr * (mean - gradient) - loss, "preconditioner": moved - lr * mean},
    )


def _muon(step: ParameterStep) -> Update:
    """Return U = lr_adjusted · orthogonalised average + lr·λ·θ; the orthogonalisation is repeated, bit for bit."""
    group = step.group
    lr, decay, momentum = group["lr"], group["weight_decay"], group["momentum"]
    buffer = step.state["momentum_buffer"]
    average = Combination.of(buffer)
    if group["nesterov"]:
        average = (1 - momentum) * step.descent_gradient + momentum * average
        mixed = step.gradient.lerp(buffer, momentum)
    else:
        mixed = buffer
    turned = Combination.of(orthogonalized(mixed, group["ns_coefficients"], group["ns_steps"], group["eps"]))
    rate = adjusted_muon_rate(lr, group["adjust_lr_fn"], step.parameter.shape)
    before = (Combination.of(step.parameter) + rate * turned) / (1 - lr * decay)
    return Update(
        gradient=step.descent_gradient,
        rate=rate,
        parts=_present(decay=lr * decay * before)
        | {"momentum": rate * (average - step.descent_gradient), "preconditioner": rate * (turned - average)},
    )


def _present(**parts: Combination) -> dict[str, Combination]:
    """Drop the parts that have no terms."""
    return {cause: part for cause, part in parts.items() if part.terms}


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in _WIDE else tensor.to(torch.promote_types(tensor.dtype, torch.float32))


_WIDE = (torch.float32, torch.float64)


def _number(step: Tensor | float) -> Scalar:
    """Return an optimizer's step count; as it is where reading it would wait for the device."""
    if isinstance(step, Tensor):
        return step.to(torch.float64) if step.device.type != "cpu" else float(step)
    return float(step)


register_rule(SGD, _sgd, uniform=True, plain=_sgd_is_plain, momentum=_sgd_momentum)
register_rule(Adam, _adam, uniform=True, make=_adam_directions)
register_rule(AdamW, partial(_adam, decoupled=True), uniform=True, make=_adam_directions)
register_rule(RMSprop, _rmsprop, keeps=lambda group: bool(group["weight_decay"] != 0 and group["momentum"] == 0))
register_rule(Adamax, _adamax)
if hasattr(torch.optim, "Muon"):  # torch 2.9
    register_rule(torch.optim.Muon, _muon, averages=["momentum_buffer"])
