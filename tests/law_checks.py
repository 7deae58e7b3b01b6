"""What every list of laws is held against: one backward pass, finite moves, small steps, and the count of laws.

Nothing here knows how the laws were found. A model is taken to float64 at random parameters; its function is whatever
the loss can see of its outputs; and each check says which laws fail it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

import float64
from conserved import Discovery, LawSet, Symmetry, discover
from conserved.discovery.inputs import tensors_in
from tolerances import FUNCTION_UNCHANGED, IDENTITY

SILENT = 1e-13
"""Terms of an identity smaller than this against all gradients and the parameters are rounding."""

EPSILONS = ("eps", "variance_epsilon", "epsilon", "layer_norm_epsilon", "layer_norm_eps", "norm_eps", "rms_norm_eps")
"""What modules call the number they add before a root."""

_PLACES: dict[Callable[..., Any], int] = {
    F.layer_norm: 4,
    F.rms_norm: 3,
    F.group_norm: 4,
    F.batch_norm: 7,
    F.instance_norm: 7,
}
"""Where functions of torch take their ε."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model in float64 at random parameters, with the inputs it is called with and the loss it is trained with."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    loss: str = "regression"
    seed: int = 0
    """Of the randomness inside the model, which is the same in every call."""
    constant: tuple[int | str, ...] = ()
    """Arguments that do not vary from sample to sample when laws are counted: a graph, an edge list."""

    @property
    def theta(self) -> dict[str, Tensor]:
        """Values of the trained parameters, each under its first name."""
        return {name: p.detach().clone() for name, p in self.model.named_parameters() if p.requires_grad}

    def seen(self) -> Tensor:
        """What a loss can see of the outputs, as one vector: all numbers, or logits up to a shift."""
        devices: list[Any] = []
        with torch.random.fork_rng(devices=devices), float64.kept():
            torch.manual_seed(self.seed)
            output = self.model(*self.args, **self.kwargs)
        return seen_by(self.loss, output)

    @contextmanager
    def at(self, theta: Mapping[str, Tensor]) -> Iterator[None]:
        """Within it, the model's own parameters have other values, written in place."""
        own = dict(self.model.named_parameters(remove_duplicate=False))
        former = {name: own[name].detach().clone() for name in theta}
        try:
            for name, value in theta.items():
                own[name].data.copy_(value)
            yield
        finally:
            for name, value in former.items():
                own[name].data.copy_(value)


def seen_by(loss: str, output: Any) -> Tensor:
    """All floating-point outputs as one vector; log-probabilities for cross-entropy."""
    if loss == "cross_entropy":
        return logits_of(output).log_softmax(-1).flatten()
    return torch.cat([t.flatten() for t in tensors_in(output) if t.is_floating_point()])


def logits_of(output: Any) -> Tensor:
    """The scores over classes in an output."""
    result = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    result = result if isinstance(result, Tensor) else next(tensors_in(output))
    return result


def subject(
    build: Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]],
    *,
    loss: str = "regression",
    seed: int = 0,
    constant: tuple[int | str, ...] = (),
) -> Subject:
    """The model of a builder, ready for the checks; its mode (training or not) stays as the builder left it."""
    torch.manual_seed(seed)
    model, args, kwargs = build()
    model = model.double()
    scatter(model, seed)
    still_batch_statistics(model)
    args, kwargs = tree_map(_double, (args, kwargs))
    return Subject(model=model, args=args, kwargs=kwargs, loss=loss, seed=seed, constant=constant)


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def scatter(model: nn.Module, seed: int = 0) -> None:
    """Random parameters at which nothing vanishes or saturates; running statistics of batch norms as after training."""
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for p in model.parameters():
            if not p.is_floating_point():
                continue
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.copy_(noise / max(p[0].numel(), 1) ** 0.5 if p.ndim >= 2 else p.mean() + 0.5 * noise)
        for module in model.modules():
            # A padding row starts at zero and gets no gradient, so it is zero in every model that was trained.
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0.0
        for name, buffer in model.named_buffers():
            if buffer is not None and name.endswith("running_mean"):
                buffer.copy_(0.5 * torch.randn(buffer.shape, generator=generator, dtype=torch.float64))
            if buffer is not None and name.endswith("running_var"):
                buffer.copy_(torch.rand(buffer.shape, generator=generator, dtype=torch.float64) + 0.5)


def still_batch_statistics(model: nn.Module) -> None:
    """Training-mode batch norms go on normalising by their batch, but keep no running account of it."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            module.running_mean = module.running_var = module.num_batches_tracked = None


class _WrittenOut(TorchFunctionMode):
    """Norms of torch with another ε, and operators without forward derivatives as the formulas they stand for."""

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _PLACES:
            return func(*args[: _PLACES[func]], **kwargs | {"eps": self.epsilon})
        if func is F.glu:
            return _glu(*args, **kwargs)
        if func is torch._weight_norm:
            return _weight_norm(*args, **kwargs)
        return func(*args, **kwargs)


def _glu(x: Tensor, dim: int = -1) -> Tensor:
    a, b = x.chunk(2, dim)
    return a * torch.sigmoid(b)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return g * v / v.square().sum([axis for axis in range(v.ndim) if axis != dim % v.ndim], keepdim=True).sqrt()


NEARLY_ZERO = 1e-200
"""An ε that no float64 sum can see; torch refuses a batch norm of exactly zero in training."""


@contextmanager
def without_epsilon(model: nn.Module) -> Iterator[None]:
    """Within it, norms add nothing before their root, be they modules with an ε of their own or functions of torch.

    The model itself is changed and changed back: a copy would not do, because closures in a model (minGPT has one)
    go on calling the modules of the original.
    """
    former: list[tuple[nn.Module, str, float]] = []
    for module in model.modules():
        for name in EPSILONS:
            value = getattr(module, name, None)
            if isinstance(value, float):
                former.append((module, name, value))
                setattr(module, name, NEARLY_ZERO)
    try:
        with _WrittenOut(NEARLY_ZERO):
            yield
    finally:
        for module, name, value in former:
            setattr(module, name, value)


def random_objective(z: Tensor, seed: int = 3) -> Tensor:
    """A loss that no law may depend on: a random linear form, a square and a sine of all the loss can see."""
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(z.shape, generator=generator, dtype=torch.float64)
    target = torch.randn(z.shape, generator=generator, dtype=torch.float64)
    return (v * z).sum() + (z - target).square().mean() + torch.sin(2 * z).sum()


def gradients(subject: Subject, *, seed: int = 3) -> dict[str, Tensor]:
    """The gradient of a random loss at the parameters of a subject, zeros where none arrives."""
    subject.model.zero_grad(set_to_none=True)
    random_objective(subject.seen(), seed).backward()
    result = {n: torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for n, p in _trained(subject).items()}
    subject.model.zero_grad(set_to_none=True)
    return result


def _trained(subject: Subject) -> dict[str, Tensor]:
    return {name: p for name, p in subject.model.named_parameters() if p.requires_grad}


def resampled(subject: Subject, seed: int) -> Subject:
    """The same model on other random inputs of the same shapes and ranges."""
    generator = torch.Generator().manual_seed(seed)

    def other(name: int | str, value: Any) -> Any:
        return imitate(value, generator) if isinstance(value, Tensor) and name not in subject.constant else value

    args = tuple(other(index, value) for index, value in enumerate(subject.args))
    return replace(subject, args=args, kwargs={name: other(name, value) for name, value in subject.kwargs.items()})


def residuals(laws: LawSet, subject: Subject, *, exact: bool = True, inputs: int = 3) -> dict[str, float]:
    """Relative size of every identity on backward passes in float64, the largest over several inputs and losses.

    Those of exact laws, or of laws up to ε with ε at zero. Inputs on which the loss or its gradient is no number say
    nothing; if there are no others, every residual is NaN.
    """
    chosen = laws.select(lambda symmetry: symmetry.exact == exact)
    result: dict[str, float] = {}
    for seed in range(inputs if len(chosen) else 0):
        case = subject if seed == 0 else resampled(subject, seed)
        with nullcontext() if exact else without_epsilon(subject.model):
            grads = gradients(case, seed=3 + seed)
        if not finite(grads):
            result = {symmetry.name: result.get(symmetry.name, float("nan")) for symmetry in chosen}
            continue
        theta = _every(subject)
        weighted = chosen.balance(grads, theta)
        # The objective's slope along what it sees is about one: where parameters do not reach it, all is rounding.
        pull = max(float(torch.stack([g.norm() for g in grads.values()]).norm()), 1.0)
        for symmetry, r, scale in zip(chosen, weighted.residuals, weighted.scales, strict=True):
            size = float(torch.stack([theta[name].norm() for name in symmetry.parameters]).norm())
            # Gradients that are zero but for rounding have nothing to be relative to.
            silent = scale <= SILENT * pull * max(size, 1.0)
            result[symmetry.name] = max(0.0 if silent else float(r), result.get(symmetry.name, 0.0), key=_known)
    return result


def _known(residual: float) -> float:
    """NaN below every number, so that a residual that could be taken stands."""
    return -1.0 if residual != residual else residual


def finite(tensors: Mapping[str, Tensor]) -> bool:
    """Whether every entry is a number."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())


def undefined(subject: Subject, *, inputs: int = 3) -> bool:
    """Whether the loss or its gradient is no number on any of the inputs that identities are taken on."""
    cases = (subject if seed == 0 else resampled(subject, seed) for seed in range(inputs))
    return not any(finite(gradients(case, seed=3 + seed)) for seed, case in enumerate(cases))


def _every(subject: Subject) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in subject.model.named_parameters(remove_duplicate=False)}


def residual_by_action(symmetry: Symmetry, subject: Subject, grads: Mapping[str, Tensor], step: float = 1e-5) -> float:
    """The identity from its definition alone: the slope of the loss along the orbit, by central differences.

    Slow, and good to about 1e-10; it shares no code with the moment map.
    """
    theta = _every(subject)
    along = []
    for sign in (1, -1):
        generator = torch.Generator().manual_seed(11)
        along.append(symmetry.act(theta, symmetry.element(spread=sign * step, generator=generator)))
    total, size = 0.0, 0.0
    for name in symmetry.parameters:
        tangent = (along[0][name] - along[1][name]) / (2 * step)
        total += float((grads[name] * tangent).sum())
        size += float(grads[name].norm() * tangent.norm())
    # A parameter whose own gradient is zero has nothing to be relative to but the other gradients.
    floor = 1e-6 * float(torch.stack([g.norm() for g in grads.values()]).norm())
    return abs(total) / max(size, floor, 1e-300)


def moved(laws: LawSet, subject: Subject, *, spread: float = 0.3, seed: int = 5) -> dict[str, float]:
    """Relative change of what the loss sees under one finite element of each exact symmetry's group.

    A symmetry that holds only near the parameters (a frozen router, while the same expert stays on top) is moved by a
    thousandth instead if it fails at full length, and must then leave the function alone.
    """
    # Gradients are recorded, because a program may compute something else where they are not.
    before = subject.seen().detach()
    size = max(float(before.norm()), 1e-12)
    result = {}
    for symmetry in laws:
        # What a padding row holds is looked up, but never trained: a fact about gradients, not about the function.
        if not symmetry.exact or symmetry.family == "inert_padding":
            continue
        for reach in (spread, 1e-3):
            generator = torch.Generator().manual_seed(seed)
            theta = symmetry.act(_every(subject), symmetry.element(spread=reach, generator=generator))
            with subject.at({name: theta[name] for name in symmetry.parameters}):
                after = subject.seen().detach()
            result[symmetry.name] = float((after - before).norm()) / size
            if result[symmetry.name] <= FUNCTION_UNCHANGED:
                break
    return result


def drifts(laws: LawSet, subject: Subject, rate: float = 1e-8) -> dict[str, float]:
    """Change of every exact law over one real SGD step, per unit of rate and of its terms: of the order of the rate.

    The rate is that for gradients up to 1; larger ones are divided by their size, so that second order stays small.
    The step is made in place, so that storage shared behind the parameters' backs is shared here as well, and undone.
    """
    chosen = laws.select(lambda symmetry: symmetry.exact)
    if not len(chosen):
        return {}
    start = chosen.reference(_every(subject))
    grads = gradients(subject)
    pull = max(float(g.abs().max()) for g in grads.values())
    rate /= max(pull, 1.0)
    former = {name: p.detach().clone() for name, p in _trained(subject).items()}
    with torch.no_grad():
        for name, parameter in _trained(subject).items():
            parameter.data.sub_(rate * grads[name])
        end = {name: value.clone() for name, value in chosen.values(_every(subject)).items()}
        for name, parameter in _trained(subject).items():
            parameter.data.copy_(former[name])
    result = {}
    for name, value in end.items():
        scale = float(start.scales[name].norm()) ** 0.5 + 1e-12
        result[name] = float((value - start.values[name]).norm()) / (rate * scale * max(pull, 1e-12))
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What the checks found, by the name of the law."""

    exact: dict[str, float]
    approximate: dict[str, float]
    moves: dict[str, float]
    epsilons: dict[str, float] = field(default_factory=dict)
    """The ε of approximate laws: one that stands as a number in a formula cannot be put to zero from outside."""

    @property
    def wrong(self) -> dict[str, str]:
        """Laws that fail, and how."""
        limit = 10 * IDENTITY[torch.float64]
        result = {name: f"identity {r:.1e}" for name, r in self.exact.items() if not r <= limit}
        for name, r in self.approximate.items():
            if not r <= max(1e-8, min(1e-2, 1e3 * self.epsilons.get(name, 0.0))):
                result[name] = f"identity {r:.1e} with ε at 0"
        for name, r in self.moves.items():
            if not r <= 10 * FUNCTION_UNCHANGED:
                before = f"{result[name]}, " if name in result else ""
                result[name] = f"{before}a finite move changes the output by {r:.1e}"
        return result

    @property
    def worst(self) -> float:
        """The largest residual of an exact identity; 0 if there is none."""
        return max(self.exact.values(), default=0.0)


def check(laws: LawSet, subject: Subject, *, moves: bool = True) -> Checked:
    """Identities of exact laws, of approximate ones with ε at zero, and finite moves."""
    return Checked(
        exact=residuals(laws, subject),
        approximate=residuals(laws, subject, exact=False),
        moves=moved(laws, subject) if moves else {},
        epsilons={symmetry.name: symmetry.epsilon for symmetry in laws if not symmetry.exact},
    )


def count(subject: Subject, *, seed: int = 0, forms: bool = False, depth: int | None = None) -> Discovery:
    """The number of laws by the Lie closure, with norms of ε = 0: what a complete list, ε-laws included, must reach."""
    example = {str(i): a for i, a in enumerate(subject.args)} | dict(subject.kwargs)
    constant = {str(name) for name in subject.constant}

    def sample(generator: torch.Generator) -> dict[str, Tensor]:
        varied = {n: a for n, a in example.items() if isinstance(a, Tensor) and n not in constant}
        return {name: imitate(value, generator) for name, value in varied.items()}

    def function(theta: dict[str, Tensor], x: dict[str, Tensor]) -> Any:
        values = example | x
        args = tuple(values[str(i)] for i in range(len(subject.args)))
        kwargs = {name: values[name] for name in subject.kwargs}
        with without_epsilon(subject.model), float64.kept():
            output = functional_call(subject.model, theta, args, kwargs)
        return logits_of(output) if subject.loss == "cross_entropy" else output

    options: dict[str, Any] = {"loss": subject.loss, "forms": forms, "seed": seed, "depth": depth}
    # Laws that are told by inference are compared with what gradients alone say.
    return discover(function, sample, params=subject.theta, infer=False, **options)


def imitate(example: Tensor, generator: torch.Generator) -> Tensor:
    """A random tensor like the example: sizes that scatter, integers of the same range, masks."""
    if example.is_floating_point():
        size = float(torch.randn((), generator=generator).exp())
        return size * torch.randn(example.shape, generator=generator, dtype=torch.float64)
    if example.dtype == torch.bool:
        return torch.rand(example.shape, generator=generator) < 0.5
    low, high = int(example.min()), int(example.max())
    return torch.randint(low, high + 1, example.shape, generator=generator, dtype=example.dtype)
