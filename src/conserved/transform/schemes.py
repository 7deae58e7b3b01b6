"""Ways in which quantisers round weights, and the point of an orbit that each of them rounds best.

Which objective helps depends on how weights are rounded: equal ranges of channels help one step for each tensor and may
hurt one step for each row. So objectives are tried without writing anything. Each group of tensors that move together
keeps the best of them, or stays; the model keeps that, or a rotation, or stays. Nothing is made worse by the measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from conserved._torch_compat import tree_leaves
from conserved.laws import LawSet
from conserved.output.result import PrintableResult
from conserved.symmetry import Symmetry
from conserved.transform.activations import Call, ModelInput, as_call, channel_sizes
from conserved.transform.coupling import rotatable
from conserved.transform.equalizing import equalize
from conserved.transform.finding import as_a_function, example_call, symmetries_of
from conserved.transform.gauge_fixing import FixedGauge
from conserved.transform.incoherent import IncoherentObjective
from conserved.transform.moving import MovedWeights, Weights, move, sharing_tensors
from conserved.transform.objectives import Objective
from conserved.transform.smoothing import Activation

Motion = list[tuple[Symmetry, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How weights are rounded, and what they are multiplied with."""

    bits: int
    block: int | None
    """Entries of a row that share a step: 0 for all of the row, None for all of the tensor."""
    values: tuple[float, ...] = ()
    """The sizes that codes stand for, if they are not evenly spaced."""
    scale: str = "real"
    """"real", "power of two" (MXFP4) or "fp8" (NVFP4)."""
    activations: int = 0
    """Bits of what the weights are multiplied with, one step for each token; 0 if it is not rounded."""


OUTPUTS = "relative change of outputs"

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

SCHEMES = {
    "int8-tensor": Scheme(bits=8, block=None),
    "int8-channel": Scheme(bits=8, block=0),
    "int4-tensor": Scheme(bits=4, block=None),
    "int4-channel": Scheme(bits=4, block=0),
    "w4a16": Scheme(bits=4, block=128),
    "w8a8": Scheme(bits=8, block=0, activations=8),
    "mxfp4": Scheme(bits=4, block=32, values=E2M1, scale="power of two"),
    "nvfp4": Scheme(bits=4, block=16, values=E2M1, scale="fp8"),
}


def round_weight(weight: Float[Tensor, "rows columns"], scheme: Scheme) -> Float[Tensor, "rows columns"]:
    """Round a matrix to nearest, symmetrically, with the steps of a scheme; rows are outputs."""
    rows, columns = weight.shape
    block = columns if not scheme.block else scheme.block
    short = -columns % block
    parts = nn.functional.pad(weight, (0, short)).reshape(rows, -1, block)
    size = parts.abs().amax() if scheme.block is None else parts.abs().amax(-1, keepdim=True)
    top = scheme.values[-1] if scheme.values else 2 ** (scheme.bits - 1) - 1
    step = (size / top).clamp_min(torch.finfo(weight.dtype).tiny * 1e8)
    if scheme.scale == "power of two":
        step = torch.exp2(torch.floor(size.clamp_min(1e-30).log2()) - 2)
    elif scheme.scale == "fp8":
        tensor_scale = (size.amax() / top / 448).clamp_min(1e-30)
        step = (step / tensor_scale).clamp(2**-9, 448).to(torch.float8_e4m3fn).to(weight.dtype) * tensor_scale
    codes = parts / step
    if scheme.values:
        levels = torch.tensor(scheme.values, dtype=weight.dtype)
        middles = (levels[1:] + levels[:-1]) / 2
        codes = levels[torch.bucketize(codes.abs().contiguous(), middles)] * codes.sign()
    else:
        codes = codes.round().clamp(-top - 1, top)
    return (codes * step).reshape(rows, -1)[:, :columns]


def round_tokens(x: Tensor, bits: int) -> Tensor:
    """Round activations to nearest with one step for each token."""
    top = 2 ** (bits - 1) - 1
    step = (x.abs().amax(-1, keepdim=True) / top).clamp_min(1e-12)
    return (x / step).round() * step


@dataclass(frozen=True, slots=True)
class RoundedLayer:
    """A map whose weight is rounded."""

    module: str
    parameter: str
    transposed: bool
    """Whether the weight is stored as (in, out)."""

    def rounded(self, weight: Tensor, scheme: Scheme) -> Tensor:
        """Return the weight as a quantiser would store it."""
        matrix = weight.mT if self.transposed else weight
        result = round_weight(matrix.flatten(0, -2), scheme).reshape(matrix.shape)
        return result.mT if self.transposed else result


def rounded_layers(model: nn.Module, ignore: Sequence[str] = ("lm_head",)) -> list[RoundedLayer]:
    """Return the maps of a model that quantisers round: all with a matrix but tables, and those in `ignore`."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    layers = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter) or weight.ndim < 2 or id(weight) in tables:
            continue
        if name in ignore or name.rpartition(".")[2] in ignore or isinstance(module, nn.modules.conv._ConvNd):
            continue
        stored = getattr(module, "nf", None) == weight.shape[-1]
        layers.append(RoundedLayer(name, f"{name}.weight", transposed=stored))
    return layers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SchemeFit(PrintableResult):
    """The result of `fit_to_scheme`: the move, what each layer gained, and what else was tried."""

    scheme: str
    chosen: str
    """The objective, "best of each group", or "left alone"."""
    measure: str
    tried: dict[str, float]
    """By objective, the measure over all layers, "left alone" among them."""
    layers: dict[str, tuple[float, float]]
    """For every rounded layer, the relative error of its weight, output by output, before and after."""
    elements: Motion
    skipped: dict[str, str] = field(default_factory=dict)
    moved: MovedWeights | None = None

    def __repr__(self) -> str:
        before, after = self.tried["left alone"], self.tried[self.chosen]
        return f"<Fitted to {self.scheme}: {self.chosen}, {before:.3g} → {after:.3g}>"

    def summary(self) -> str:
        """Return what was chosen, and what each layer gained, as text."""
        listed = ", ".join(f"{name} {value:.3g}" for name, value in self.tried.items())
        lines = [f"{self.scheme}: {self.chosen} ({self.measure}: {listed})"]
        if self.measure != OUTPUTS:
            lines.append("  measured on weights alone; batches of inputs would measure the change of outputs")
        if self.chosen == "left alone":
            lines.append("No objective makes rounding better here, so nothing is moved.")
        else:
            lines += [f"  {name} {a:.3g} → {b:.3g}" for name, (a, b) in self.layers.items() if abs(a - b) > 0.01 * a]
        return "\n".join(lines)


def fit_to_scheme(
    target: nn.Module | Weights,
    *args: Any,
    scheme: str,
    model: nn.Module | None = None,
    laws: LawSet | None = None,
    batches: Iterable[ModelInput] | None = None,
    ignore: Sequence[str] = ("lm_head",),
    seed: int = 0,
    apply: bool = True,
    report: Callable[[str], None] = lambda _: None,
    **kwargs: Any,
) -> SchemeFit:
    """Move a model to the point of its orbit that a quantisation scheme rounds best, or leave it alone.

    Args:
        target: a module, moved in place, or a `Checkpoint`, which needs `model` and `laws`.
        *args: example inputs, as the model is called. Only with them, streams can be rotated.
        scheme: one of `SCHEMES`.
        model: for a `Checkpoint`, the model it is of, which may be on the meta device.
        laws: the symmetries, as `symmetries_of` gives them, if they are known.
        batches: inputs to run the model on. With them the measure is the relative change of its outputs; without, the
            relative error of the rounded weights.
        ignore: names of modules that are not rounded.
        seed: the seed of random rotations.
        apply: whether to move the target; otherwise nothing is written.
        report: a function that is called with each objective before it is tried.
        **kwargs: more example inputs, by name.

    Returns:
        A `SchemeFit`: the objective that was chosen, the measure of all that were tried, and the error of every layer.

    Raises:
        ValueError: the scheme is unknown, or laws are missing.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"Expected scheme to be one of {', '.join(SCHEMES)}, got {scheme!r}. Pass one of them.")
    module = target if isinstance(target, nn.Module) else model
    if module is None or (laws is None and not isinstance(target, nn.Module)):
        raise ValueError(
            "Expected model= and laws= for a checkpoint, got none. Pass those that symmetries_of(model) returns."
        )
    known = symmetries_of(module, *args, **kwargs) if laws is None else laws
    source = target if isinstance(target, Weights) else Weights(target)
    calls = [as_call(batch) for batch in batches or ()] if isinstance(target, nn.Module) else []
    layers = rounded_layers(module, ignore)
    judge = _Judge(SCHEMES[scheme], layers, source, module, calls)
    skipped: dict[str, str] = {}
    moves: dict[str, Motion] = {"left alone": []}
    objectives: dict[str, Any] = {"balanced": "balanced", "range": "range"}
    if calls:
        with as_a_function(module):
            sizes = channel_sizes(module, calls)
        rounded = "both" if SCHEMES[scheme].activations else "weights"
        objectives["activation"] = Activation(sizes, rounded=rounded)
    for name, objective in objectives.items():
        report(f"trying {name}")
        moves[name] = _elements(source, known.symmetries, objective, skipped)
    moves["best of each group"] = _best_of_groups(moves, judge)
    symmetries = list(known.symmetries)
    folds: dict[Symmetry, Tensor] = {}
    if isinstance(target, nn.Module) and (args or kwargs or calls):
        call = example_call(target, args, kwargs) if args or kwargs else calls[0]
        streams, folds = rotatable(target, call, known)
        symmetries += streams
    report("trying incoherent")
    moves["incoherent"] = _elements(source, symmetries, IncoherentObjective(seed, folds), skipped)
    report("measuring")
    tried = {name: judge.total(elements) for name, elements in moves.items()}
    chosen = min(tried, key=lambda name: tried[name] * (1 if name == "left alone" else 1 + 1e-3))
    before, after = judge.errors([]), judge.errors(moves[chosen])
    done = move(target, dict(moves[chosen]), values=False) if apply and moves[chosen] else None
    return SchemeFit(
        scheme=scheme,
        chosen=chosen,
        measure=OUTPUTS if calls else "mean relative error of weights",
        tried=tried,
        layers={name: (before[name], after[name]) for name in before},
        elements=moves[chosen],
        skipped=skipped,
        moved=done,
    )


def _elements(source: Weights, symmetries: Sequence[Symmetry], objective: str | Objective, skipped: Any) -> Motion:
    """Return the elements an objective chooses, in order; nothing is written."""
    equalized = equalize(FixedGauge(source), laws=list(symmetries), objective=objective)
    skipped |= equalized.skipped
    return [(s, s.kind.inverse(element)) for s, element in reversed(list(equalized.moved.inverse.items()))]


def _best_of_groups(moves: dict[str, Motion], judge: _Judge) -> Motion:
    """Return for each group of tensors that move together, the steps of the objective that rounds it best."""
    every = [step for steps in moves.values() for step in steps]
    groups = [{name for s, _ in group for name in s.parameters} for group in sharing_tensors(every)]
    chosen: Motion = []
    for names in groups:
        options: list[Motion] = [
            [step for step in steps if names.issuperset(step[0].parameters)] for steps in moves.values()
        ]
        costs = [sum(error**2 for error in judge.errors(steps, names).values()) for steps in options]
        chosen += options[costs.index(min(costs))]
    return chosen


@dataclass(frozen=True, slots=True)
class _Judge:
    """How well moved weights are rounded."""

    scheme: Scheme
    layers: Sequence[RoundedLayer]
    source: Weights
    model: nn.Module
    calls: Sequence[Call]

    def _moved(self, elements: Motion) -> FixedGauge:
        moved = FixedGauge(self.source)
        for symmetry, element in elements:
            moved.move(symmetry, element)
        return moved

    def errors(self, elements: Motion, names: Iterable[str] | None = None) -> dict[str, float]:
        """Return the relative error of every rounded weight: root mean square over its outputs."""
        moved, result = self._moved(elements), {}
        for layer in self.layers:
            if names is None or layer.parameter in names:
                weight = moved.read(layer.parameter).float()
                axis = -2 if layer.transposed else -1
                error = (layer.rounded(weight, self.scheme) - weight).norm(dim=axis)
                # Output by output: a large row must not hide that all others were rounded to nothing.
                shares = error / weight.norm(dim=axis).clamp_min(1e-30)
                result[layer.module] = float(shares.square().mean().sqrt())
        return result

    def total(self, elements: Motion) -> float:
        """Return the measure: relative change of outputs on batches or, without any, the error of weights."""
        if not self.calls:
            errors = self.errors(elements)
            return (sum(value**2 for value in errors.values()) / max(len(errors), 1)) ** 0.5
        moved = self._moved(elements)
        own = dict(self.model.named_parameters())
        state = {name: moved.read(name).to(p.dtype) for name, p in own.items() if p.is_floating_point()}
        state |= {layer.parameter: layer.rounded(state[layer.parameter], self.scheme) for layer in self.layers}
        handles = [self._rounding(layer) for layer in self.layers] if self.scheme.activations else []
        with as_a_function(self.model), torch.no_grad():
            plain = [self._outputs({}, call) for call in self.calls]
            hooks = [self.model.get_submodule(name).register_forward_pre_hook(hook) for name, hook in handles]
            try:
                rounded = [self._outputs(state, call) for call in self.calls]
            finally:
                for hook in hooks:
                    hook.remove()
        changes = [float((a - b).norm() / b.norm()) for a, b in zip(rounded, plain, strict=True)]
        return sum(changes) / len(changes)

    def _outputs(self, state: dict[str, Tensor], call: Call) -> Tensor:
        outputs = functional_call(self.model, state, call.args, dict(call.kwargs), tie_weights=True)
        numbers = [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.is_floating_point()]
        return torch.cat([t.double().flatten() for t in numbers])

    def _rounding(self, layer: RoundedLayer) -> tuple[str, Any]:
        bits = self.scheme.activations
        return layer.module, lambda _, inputs: (round_tokens(inputs[0], bits), *inputs[1:])
