"""Teach conserved an optimizer: Lion, whose step is the sign of an interpolated average, and which decays its weights.

Without a rule the monitor still gives the exact account, from a copy of the weights, but all of it is one cause. With
the function below every part of the step has its name, and no copy is needed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from conserved import Monitor, blocks
from conserved.tracking import Combination, ParameterStep, Update, register_rule


class Lion(torch.optim.Optimizer):
    """θ ← θ − lr (sign(β₁ m + (1 − β₁) g) + λ θ), then m ← β₂ m + (1 − β₂) g (Chen and others, 2023)."""

    def __init__(self, params: list[Tensor], lr: float = 1e-3, decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "beta1": 0.9, "beta2": 0.99, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                average = state.setdefault("average", torch.zeros_like(parameter))
                state["direction"] = torch.lerp(parameter.grad, average, group["beta1"]).sign()
                parameter.sub_(group["lr"] * (state["direction"] + group["decay"] * parameter))
                average.lerp_(parameter.grad, 1 - group["beta2"])


def lion(step: ParameterStep) -> Update:
    """U = lr · sign + lr λ θ, in terms of tensors that are there after the step.

    θ' = (1 − lr λ) θ − lr · sign, so that θ = (θ' + lr · sign) / (1 − lr λ).
    """
    lr, decay = step.group["lr"], step.group["decay"]
    sign, after = Combination.of(step.state["direction"]), Combination.of(step.parameter)
    before = (1 / (1 - lr * decay)) * (after + lr * sign)
    return Update(
        gradient=step.descent_gradient,
        rate=lr,
        parts={"sign": lr * (sign - step.descent_gradient), "decay": (lr * decay) * before},
    )


register_rule(Lion, lion, decay=lambda group: group["decay"])


def main() -> None:
    """Thirty steps, what each part did to the laws, and what is left: rounding."""
    torch.manual_seed(0)
    model = blocks.Attention(dim=16, heads=2).double()
    optimizer = Lion(list(model.parameters()))
    monitor = Monitor(model, optimizer, every=1)
    x, target = torch.randn(2, 32, 16, dtype=torch.float64)
    for _ in range(30):
        optimizer.zero_grad()
        (model(x) - target).square().mean().backward()
        optimizer.step()
        monitor.step()
    entries = monitor.ledger()
    total = sum(abs(entry.observed) for entry in entries)
    for cause in ("sign", "decay"):
        print(f"{cause}: {sum(abs(entry.causes[cause]) for entry in entries) / total:.0%} of what happened to the laws")
    print(f"copies kept: {monitor.memory()['copies']} bytes")
    print(f"unaccounted for: {max(abs(entry.residual) for entry in entries) < 1e-12 and 'rounding'}")


if __name__ == "__main__":
    main()
