"""Optimizers as targets: relations that every optimizer obeys, whatever its rule.

Nobody's rule is written down here. An optimizer is run for a few steps twice, in two forms that must give the same
weights, in float64:

- `maximize`: ascent along −G is descent along G;
- `foreach`, `fused`, `capturable`: other code for the same rule;
- `strides`: weights that are stored transposed;
- `groups`: the same tensors in two groups with the same options, where the rule treats tensors one by one;
- `closure`: gradients computed inside of `step`;
- `resumed`: stopped after two steps, saved, and restored into a new optimizer;
- `untouched`: a tensor without a gradient stays as it is.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

STEPS = 4
LIMIT = 1e-9
"""Largest relative difference of weights: float64 after a few steps, with room for another order of sums."""

ROUNDING = 2.0**-52

SHAPES = ((4, 6), (6,), (3, 4))

PACKAGES = ("pytorch_optimizer", "torch_optimizer", "schedulefree", "lion_pytorch", "prodigyopt", "dadaptation")
"""Packages whose optimizers are asked where they are installed."""


@dataclass(frozen=True)
class OptimizerTarget:
    """An optimizer class with the options it cannot do without."""

    package: str
    name: str
    make: Callable[..., Optimizer]
    options: Mapping[str, Any]

    def accepts(self, option: str) -> bool:
        """Return whether the constructor names an option."""
        return option in inspect.signature(self.make).parameters


Form = Callable[[OptimizerTarget], list[Tensor]]


def train(
    target: OptimizerTarget,
    *,
    sign: float = 1.0,
    transposed: bool = False,
    split: bool = False,
    closure: bool = False,
    resume: bool = False,
    seed: int = 0,
    noise: float = 0.0,
    **options: Any,
) -> list[Tensor]:
    """Return the weights after a few steps along gradients that depend on the weights.

    Random numbers of the rule are drawn from `seed`; `noise` is a relative change of every gradient.
    """
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    goals = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    parameters = [nn.Parameter(w.t().contiguous().t() if transposed and w.ndim == 2 else w.clone()) for w in weights]

    def build() -> Optimizer:
        groups: Any = [{"params": parameters[:1]}, {"params": parameters[1:]}] if split else parameters
        return target.make(groups, **{**target.options, **options})

    optimizer = build()
    if hasattr(optimizer, "train"):
        optimizer.train()

    def fill() -> Tensor:
        loss = sum(((p - goal) ** 2 * (1 + goal**2)).sum() for p, goal in zip(parameters, goals, strict=True))
        for p, goal in zip(parameters, goals, strict=True):
            change = 1 + noise * torch.randn(goal.shape, generator=generator, dtype=torch.float64) if noise else 1.0
            p.grad = (sign * 2 * (p.detach() - goal) * (1 + goal**2) * change).clone()
        assert isinstance(loss, Tensor)
        return sign * loss.detach()

    for number in range(STEPS):
        # Rules that draw random numbers draw the same ones in both forms.
        torch.manual_seed(seed + number)
        if resume and number == STEPS // 2:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = build()
            optimizer.load_state_dict(state)
            if hasattr(optimizer, "train"):
                optimizer.train()
        if closure:
            optimizer.step(fill)  # type: ignore[arg-type]
        else:
            fill()
            optimizer.step()
    return [p.detach().clone() for p in parameters]


def leaves_untouched(target: OptimizerTarget) -> bool:
    """Return whether a tensor without a gradient stays as it is."""
    torch.manual_seed(0)
    moved, idle = (nn.Parameter(torch.randn(4, 6, dtype=torch.float64)) for _ in range(2))
    before = idle.detach().clone()
    optimizer = target.make([moved, idle], **target.options)
    for _ in range(2):
        moved.grad = moved.detach().clone()
        optimizer.step()
    return torch.equal(idle.detach(), before)


def forms(target: OptimizerTarget) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield the relations that an optimizer can be asked for: a name, and the two ways to run it."""
    if target.accepts("maximize"):
        yield "maximize", {}, {"maximize": True, "sign": -1.0}
    for option in ("foreach", "fused", "capturable"):
        if target.accepts(option):
            yield option, {option: False}, {option: True}
    yield "strides", {}, {"transposed": True}
    yield "groups", {}, {"split": True}
    yield "closure", {}, {"closure": True}
    yield "resumed", {}, {"resume": True}


def check_optimizer(target: OptimizerTarget) -> dict[str, Any]:
    """Return the largest relative difference of every relation, or why it could not be asked."""
    row: dict[str, Any] = {"package": target.package, "optimizer": target.name, "relations": {}, "refused": {}}
    try:
        start = train(target)
        row["moves"] = any(not torch.equal(a, b) for a, b in zip(start, _initial(), strict=True))
        row["repeats"] = _distance(start, train(target)) == 0
        row["random"] = _distance(start, train(target, seed=STEPS)) > LIMIT
        # As the basis of equal eigenvalues in SOAP: the last bit of a gradient decides.
        row["unstable"] = _distance(start, train(target, noise=ROUNDING)) > LIMIT
    except Exception as problem:
        return row | {"error": f"{type(problem).__name__}: {str(problem)[:160]}"}
    for name, one, other in forms(target):
        if name == "strides" and (row["random"] or row["unstable"]):
            # Random numbers are drawn in the order of memory, and sums are taken in another order.
            row["refused"][name] = "its random numbers, or rounding of gradients, change the weights"
            continue
        try:
            row["relations"][name] = _distance(train(target, **one), train(target, **other))
        except Exception as problem:
            row["refused"][name] = f"{type(problem).__name__}: {str(problem)[:160]}"
    try:
        row["relations"]["untouched"] = 0.0 if leaves_untouched(target) else 1.0
    except Exception as problem:
        row["refused"]["untouched"] = f"{type(problem).__name__}: {str(problem)[:160]}"
    row["fails"] = sorted(name for name, value in row["relations"].items() if not value <= LIMIT)
    return row


def _initial() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def _distance(first: list[Tensor], second: list[Tensor]) -> float:
    pairs = list(zip(first, second, strict=True))
    size = max(float(a.abs().max()) for a, _ in pairs)
    return max(float((a - b).abs().max()) for a, b in pairs) / size


def targets() -> Iterator[OptimizerTarget]:
    """Yield the optimizers of PyTorch and of the packages that are installed."""
    # LBFGS searches along a line, and Muon takes matrices alone.
    special = ("Optimizer", "LBFGS", "SparseAdam", "Muon")
    for name, kind in vars(torch.optim).items():
        if isinstance(kind, type) and issubclass(kind, Optimizer) and name not in special:
            yield OptimizerTarget("torch", name, kind, {"lr": 1e-2})
    for package in PACKAGES:
        try:
            module = __import__(package)
        except Exception:
            continue
        for name, kind in sorted(vars(module).items()):
            if isinstance(kind, type) and issubclass(kind, Optimizer) and kind.__module__.startswith(package):
                parameters = inspect.signature(kind).parameters
                options: dict[str, Any] = {"lr": 1e-2} if "lr" in parameters else {}
                if "num_iterations" in parameters:
                    options["num_iterations"] = 100
                yield OptimizerTarget(package, name, kind, options)
