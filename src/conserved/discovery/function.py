"""Any differentiable PyTorch function as a map from a flat parameter vector and one input to a flat output."""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from conserved._torch_compat import parameters_of, tree_map
from conserved.discovery.inputs import (
    Inputs,
    UnsuitableError,
    arguments,
    flat_output,
    imitating,
    in_double,
    logits_of,
    tensors_in,
    to_device,
)
from conserved.inference.program.control_flow import control_flow_as_python, run_again_if_compiler_loads
from conserved.inference.program.hidden_inputs import HiddenInputs, tensors_held
from conserved.laws.shared_memory import memory_of, overlapping

Loss = str | Callable[[Tensor, Tensor], Tensor]
"""Where output gradients live: "any" (or "regression"), "cross_entropy" (sum zero), or those of a loss(z, y)."""


@dataclass(frozen=True, slots=True)
class ParameterFunction:
    """f(θ, x) with θ one float64 vector: names and shapes of its parts, and the function itself."""

    evaluate: Callable[[dict[str, Tensor], Any], Tensor]
    start: dict[str, Tensor]
    sample: Callable[[torch.Generator, int], Any]
    """Draws several inputs, stacked."""
    loss: Loss
    outputs: int
    """How many numbers f returns."""
    classes: str = ""
    """Over which axis of which outputs cross-entropy was taken, where that is not plain."""
    imitated: bool = False
    """Whether inputs are made after an example, so that they can be drawn on any device."""
    owned: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    """The tensors that are parameters where the function comes from, and those of the copy it is computed with."""

    @property
    def size(self) -> int:
        """D, the number of parameters."""
        return sum(tensor.numel() for tensor in self.start.values())

    @property
    def device(self) -> torch.device:
        return next(iter(self.start.values())).device

    def split(self, theta: Float[Tensor, " D"]) -> dict[str, Tensor]:
        """Return the named parameters in a flat vector."""
        pieces = theta.split([tensor.numel() for tensor in self.start.values()])
        return {n: piece.reshape(t.shape) for (n, t), piece in zip(self.start.items(), pieces, strict=True)}

    def __call__(self, theta: Float[Tensor, " D"], x: Any) -> Float[Tensor, " out"]:
        return self.evaluate(self.split(theta), x)

    def generic_point(self, generator: torch.Generator) -> Float[Tensor, " D"]:
        """Return random parameters of a size at which activations neither vanish nor saturate.

        Matrices get entries of variance 1/fan-in; vectors, which are gains and biases, scatter around their mean.
        """
        parts = []
        for tensor in self.start.values():
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.device)
            if tensor.ndim >= 2:
                fan_in = math.prod(tensor.shape[1:])
                parts.append((noise / max(1, fan_in) ** 0.5).flatten())
            elif tensor.numel():
                parts.append((tensor.mean() + 0.5 * noise).flatten())
        return torch.cat(parts)

    def draw_many(self, theta: Float[Tensor, " D"], count: int, generator: torch.Generator) -> Any:
        """Return random inputs, and random output directions v in the span of the loss's gradients, stacked.

        A GPU draws its own numbers, seeded by the generator: millions of them are slow to draw and to bring there.
        """
        near = generator
        loss = self.loss
        if self.device.type == "cuda" and self.imitated and not callable(loss):
            seed = int(torch.randint(2**62, (), generator=generator))
            near = torch.Generator(self.device).manual_seed(seed)
        x = to_device(self.sample(near, count), self.device)
        noise = torch.randn(count, self.outputs, generator=near, dtype=torch.float64, device=near.device)
        if not callable(loss):
            return x, noise.to(self.device)
        each = [tree_map(lambda part, i=i: part[i] if isinstance(part, Tensor) else part, x) for i in range(count)]
        with torch.no_grad(), without_fused_kernels():
            z = torch.stack([self(theta, sample) for sample in each]).cpu()
        gradients = [_gradient_of(partial(_total, loss, y), sample) for sample, y in zip(z, noise, strict=True)]
        return x, torch.stack(gradients).to(self.device)


def _total(loss: Callable[[Tensor, Tensor], Tensor], target: Tensor, output: Tensor) -> Tensor:
    return loss(output, target).sum()


_NO_HOOKS = (
    "it uses saved tensor hooks, as checkpointing does; they run once, and derivatives of derivatives are needed."
)


def _gradient_of(f: Callable[[Tensor], Tensor], point: Tensor) -> Tensor:
    """Return the gradient of a number at a point."""
    with torch.enable_grad(), torch.autograd.graph.disable_saved_tensors_hooks(_NO_HOOKS):
        point = point.detach().requires_grad_()
        value = f(point)
        gradient = torch.autograd.grad(value, point, allow_unused=True)[0] if value.requires_grad else None
    return torch.zeros_like(point) if gradient is None else gradient


def function_of(
    f: nn.Module | Callable[..., Any],
    inputs: Inputs,
    *,
    loss: Loss,
    params: Mapping[str, Tensor] | None,
    device: torch.device | str | None,
    class_axis: int = -1,
) -> ParameterFunction:
    """Validate the arguments and return the function as a `ParameterFunction`."""
    if not callable(loss) and loss not in ("any", "regression", "cross_entropy"):
        raise UnsuitableError(
            f'Expected loss to be "any", "cross_entropy" or a function of (output, target), got {loss!r}. Pass '
            "one of them."
        )
    loss = "regression" if loss == "any" else loss
    sample = imitating(inputs)
    if isinstance(f, nn.Module):
        if params is not None:
            raise UnsuitableError(
                "Expected params= only with a callable f(params, x), got it with a module. Leave it out."
            )
        call, start, owned, studied = _module(f, device)
    else:
        if not params:
            raise UnsuitableError(
                "Expected params= for a callable f(params, x), got none. Pass the tensors to study it at."
            )
        _refuse_complex(params)
        owned, studied = dict(params), None
        given = {name: tensor.detach().to(device, torch.float64) for name, tensor in params.items()}
        # A parameter without entries has no laws, and is passed on as it is.
        empty = {name: tensor for name, tensor in given.items() if not tensor.numel()}
        start = {name: tensor for name, tensor in given.items() if tensor.numel()}

        def call(values: dict[str, Tensor], x: Any) -> Any:
            return f(values | empty, x)

    if not start:
        raise UnsuitableError(
            "Expected at least one trainable parameter, got none. Every function of frozen parameters is "
            "conserved: call requires_grad_() on those to train."
        )
    axis = class_axis if loss == "cross_entropy" else None
    shapes: list[tuple[int, ...]] = []

    def evaluate(values: dict[str, Tensor], x: Any) -> Tensor:
        output = call(values, x)
        if axis is not None and not shapes:
            shapes.append(tuple(logits_of(output).shape))
        return flat_output(output, class_axis=axis)

    imitated = not callable(inputs) or isinstance(inputs, Tensor)
    function = ParameterFunction(evaluate, start, sample, loss, 0, imitated=imitated, owned=owned)
    outputs = _check(function, f, studied)
    classes = ""
    if shapes and len(shapes[0]) > 1:
        classes = f"cross-entropy over axis {class_axis} of outputs of shape {shapes[0]}"
    return dataclasses.replace(function, outputs=outputs, classes=classes)


def _refuse_complex(parameters: Mapping[str, Tensor]) -> None:
    for name, tensor in parameters.items():
        if tensor.is_complex():
            raise UnsuitableError(
                f"Expected real parameters, got {name}, which is complex. Keep torch.view_as_real of it as the "
                "parameter, and use torch.view_as_complex inside."
            )


def _module(
    module: nn.Module, device: torch.device | str | None
) -> tuple[Callable[..., Any], dict[str, Tensor], dict[str, Tensor], nn.Module]:
    """Return a module as a function of its trainable parameters, each under its first name, wherever it is used.

    The last result is the copy of the module that the function calls.
    """
    if any(parameter.is_meta for parameter in module.parameters()):
        raise UnsuitableError(
            "Expected parameters with values, got a model on the meta device. Give it memory first, for instance "
            'with to_empty(device="cpu").'
        )
    _refuse_complex({name: p for name, p in module.named_parameters() if p.requires_grad})
    _refuse_partly_shared(module)
    memory = {name: memory_of(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)}
    try:
        model = copy.deepcopy(module).to(device=device)._apply(in_double)
    except (TypeError, NotImplementedError) as problem:
        raise UnsuitableError(
            f"Expected a module that can be copied, got one that cannot ({problem}). Take generators, locks and "
            "the like out of it."
        ) from problem
    canonical: dict[Hashable, str] = {}
    paths: dict[str, str] = {}
    seen: set[tuple[int, str]] = set()
    for path, part in model.named_modules():
        for attribute, parameter in parameters_of(part).items():
            if parameter is None or not parameter.requires_grad or not parameter.numel():
                continue
            if (id(part), attribute) not in seen:
                seen.add((id(part), attribute))
                path_here = f"{path}.{attribute}" if path else attribute
                paths[path_here] = canonical.setdefault(memory[path_here], path_here)
    owned = dict(model.named_parameters(remove_duplicate=False))
    start = {name: owned[name].detach().clone() for name in canonical.values()}

    def call(values: dict[str, Tensor], x: Any) -> Any:
        given = {path_here: values[name] for path_here, name in paths.items()}
        args, kwargs = arguments(x)
        return torch.func.functional_call(model, given, args, kwargs, tie_weights=False)

    trained = {name: owned[name] for name in paths}
    before = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    owned = trained | {f"{name} (of the model)": parameter for name, parameter in before.items()}
    return call, start, owned, model


def _refuse_partly_shared(module: nn.Module) -> None:
    """Refuse parameters that overlap others or are read in other ways too: not only their gradient moves them."""
    tensors = tensors_held(module)
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    for name, other in overlapping(tensors).items():
        both_trained = {name, other} <= trained and memory_of(tensors[name]) == memory_of(tensors[other])
        if name in trained and not both_trained:
            raise UnsuitableError(
                f"Expected parameters with memory of their own, got {name}, which shares memory with {other} and "
                "is not the same parameter. Training moves one with the gradient of the other: let both modules "
                "use one Parameter."
            )


class _WrittenOut(TorchFunctionMode):
    """Replaces fused operators whose derivatives cannot be trusted by their formulas.

    PyTorch's native layer_norm has a wrong third derivative, and brackets of brackets need the third and more.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.layer_norm or func is torch.layer_norm:
            return _layer_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = False,
) -> Tensor:
    axes = tuple(range(-len(normalized_shape), 0))
    centred = x - x.mean(axes, keepdim=True)
    y = centred / torch.sqrt((centred * centred).mean(axes, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


@contextmanager
def without_fused_kernels() -> Iterator[None]:
    """Run with operators that can be differentiated as often as needed, forwards and backwards."""
    with control_flow_as_python(), sdpa_kernel(SDPBackend.MATH), _WrittenOut(), warnings.catch_warnings():
        # Inputs need no gradient here; what hooks do to those of parameters is found out elsewhere.
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        yield


def _squares(function: ParameterFunction, x: Any, theta: Tensor) -> Tensor:
    return function(theta, x).square().sum()


_TRIES = 8
"""Inputs after which a zero gradient is believed; one input may leave every ReLU of a layer dead."""


def _check(function: ParameterFunction, f: Any, studied: nn.Module | None) -> int:
    """Validate the function early, with readable errors, and return the size of an output.

    `studied` is the copy of a module that the function calls.
    """
    generator = torch.Generator().manual_seed(0)
    theta = function.generic_point(generator)
    many = to_device(function.sample(generator, _TRIES), function.device)
    x, *others = (tree_map(lambda p, i=i: p[i] if isinstance(p, Tensor) else p, many) for i in range(_TRIES))
    varied = [tensor for tensor in tensors_in(many) if tensor.numel()]
    if varied and all(bool((tensor == tensor[:1]).all()) for tensor in varied):
        raise UnsuitableError(
            "Expected inputs that differ, got the same one in every draw. Every input drawn is the same, so laws "
            "of that one input would be counted: draw different ones from the generator, or pass an example to "
            "be imitated; one with token ids must show their range."
        )

    def twice() -> tuple[Tensor, Tensor]:
        with without_fused_kernels(), torch.no_grad():
            return function(theta, x), function(theta, x)

    with without_fused_kernels():
        try:
            first, second = run_again_if_compiler_loads(twice)
        except UnsuitableError:
            raise
        except Exception as problem:
            raise UnsuitableError(
                "Expected a function that runs on random inputs, got an error: it failed on a random input with "
                f"{type(problem).__name__}: {problem} Pass an example input to be imitated."
            ) from problem
        if not bool(torch.isfinite(first).all()):
            raise UnsuitableError(
                "Expected finite outputs at random parameters and inputs, got NaN or infinity. Pass an example "
                "input for which the function is defined."
            )
        if not torch.equal(first, second):
            raise UnsuitableError(
                "Expected one output for one input, got two that differ. Switch off dropout and batch statistics "
                "with model.eval()."
            )
        with torch.no_grad(), HiddenInputs(partial(f, theta, x), studied) as hidden:
            function(theta, x)
        if hidden.names:
            raise UnsuitableError(
                "Expected a function of its tensors alone, got one that reads or changes something else "
                f"({'; '.join(hidden.names[:3])}). Take that out of the function: another call may compute "
                "something else."
            )
        _refuse_batch_statistics(f)
        try:
            gradient = _gradient_of(partial(_squares, function, x), theta)
            for other in others if not bool(gradient.any()) else ():
                gradient = gradient + _gradient_of(partial(_squares, function, other), theta)
        except Exception as problem:
            raise UnsuitableError(
                "Expected a differentiable function, got one that is not differentiable: "
                f"{type(problem).__name__}: {problem} Write it with differentiable operators."
            ) from problem
    if not bool(torch.isfinite(gradient).all()):
        raise UnsuitableError(
            "Expected a finite gradient at random parameters and inputs, got NaN or infinity. Pass an example "
            "input for which the function is defined."
        )
    if not bool(gradient.any()):
        raise UnsuitableError(
            "Expected an output that depends on the parameters, got a gradient of zero. Check that the output is "
            "not detached."
        )
    return first.numel()


def _refuse_batch_statistics(f: Any) -> None:
    if isinstance(f, nn.Module):
        for name, module in f.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and (
                module.training or not module.track_running_stats
            ):
                raise UnsuitableError(
                    f"Expected outputs that depend on one input each, got {name or 'the module'}, which "
                    "normalises by the statistics of its batch. Call model.eval() to study it with running "
                    "statistics."
                )
