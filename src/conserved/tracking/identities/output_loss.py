"""Does the loss take what the model gives? Probabilities in place of logits, labels out of range, broadcast shapes."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from conserved.boundary import Boundary, Hook
from conserved.tracking.identities.finding import StepFinding
from conserved.tracking.identities.step_identity import StepIdentity, TrainingStep, on_host, tensors_in
from conserved.tracking.loss_graph import CrossedShapes, crossed_shapes, loss_under_way

_STEPS = 2
"""Steps in which outputs are looked at."""

_EQUAL = 2e-3
"""How far numbers that are the same weight may differ, relatively."""

_COARSELY = 2e-2
"""The same for gradients in bfloat16, whose entries are rounded by 0.4 %."""

_ROWS = 4096
"""Rows of outputs that are looked at."""

_ENTRIES = 1 << 20
"""Entries of outputs that are looked at, at most, but for eight rows."""

_DIFFERENT = 0.05
"""How far weights of rows have to differ, relatively, to be distinguished from equal ones."""

_LABELS = ((-1.0, 1.0), (1.0, 2.0), (0.0, 2.0))
"""Labels that a binary loss is given by mistake."""


_FEW_ROWS = 8
"""Rows from which on one class for all of them says something."""

_HIGH_SCALE = 256
"""A scaler's factor from which on a loss without it differs clearly from one that has it."""

_CLASSES, _COMMON = 8, 0.35
"""Classes from which on the share of one of them is remarked, and that share."""

_NOTHING = torch.zeros(0)


@dataclass(frozen=True, slots=True)
class _Pair:
    """First rows of an output of a pass, and the gradient they got."""

    kind: str
    """The function that made probabilities of them, or the rectifier."""
    length: int
    """The length of sequences; 0 if outputs are none."""
    number: int
    """Which pass of the step."""
    outputs: Tensor
    coarse: bool = False
    """Whether they are in half precision."""
    gradient: Tensor = _NOTHING
    accumulated: tuple[tuple[int, int], ...] = ()
    """Which gradients parameters had when this one arrived."""

    def same_as(self, other: _Pair) -> bool:
        """Return whether outputs and their gradients are equal, and the outputs are no constant."""
        equal = self.outputs.shape == other.outputs.shape and torch.equal(self.outputs, other.outputs)
        return equal and self.gradient.shape == other.gradient.shape and bool(self.gradient.any())


class OutputLoss(StepIdentity):
    """Reads off the gradient of the outputs which loss was taken of them.

    Cross-entropy of logits z has the gradient w (softmax(z) − y), with one weight w and y = 0 but for one class; its
    binary form w (sigmoid(z) − y) with y in {0, 1}; a squared error 2 w (z − y). Of outputs that are probabilities, of
    labels −1 and 1, and of targets that were broadcast, the same losses have gradients that no right program gives.
    """

    name = "outputs"

    def __init__(self) -> None:
        self._pairs: list[_Pair] = []
        self._passes = 0
        self._repeated = 0
        """Steps in a row of which two passes were the same."""
        self._last_buffer: tuple[weakref.ref[Tensor], int] | None = None
        """The memory that the inputs of the last step were in, and how often it had been written to."""
        self._nodes: list[Any] = []
        """Ends of the graphs of this step's passes."""
        self._crossed: CrossedShapes | None = None
        """A shape in the graph of the loss that was broadcast to a square."""
        self._maximised = self._same_class = 0
        """Steps in a row in which cross-entropy was maximised, and in which all labels were one class."""
        self._targets: list[float] = []
        """By step, the one target that the gradient of all outputs points to."""
        self._steps = 0
        self._handles: list[Any] = []

    def after_forward(self, step: TrainingStep, module: nn.Module, outputs: Any) -> None:
        if self._steps >= _STEPS or not torch.is_grad_enabled():
            return
        for output in list(tensors_in(outputs))[:4]:
            if hasattr(output, "device_mesh"):
                # Reading an output that lies in pieces communicates, which other processes may not do together.
                continue
            if output.is_floating_point() and output.requires_grad and output.ndim and output.numel() > 1:
                length = output.shape[-2] if output.ndim == 3 else 0
                values = _first_rows(output.detach()).clone().double()
                coarse = torch.finfo(output.dtype).eps > _EQUAL / 4
                seen = _Pair(_probabilities(output), length, self._passes, values, coarse)
                self._nodes.append(output.grad_fn)
                watched = partial(self._keep, step, seen)
                self._handles.append(output.register_hook(Hook(Boundary(logs=False), "outputs", watched)))
        self._passes += 1

    def _keep(self, step: TrainingStep, outputs: _Pair, gradient: Tensor) -> None:
        values = _first_rows(gradient.detach()).double()
        if self._crossed is None:
            loss = loss_under_way(self._nodes)
            self._crossed = crossed_shapes(loss, self._nodes) if loss is not None else None
        self._pairs.append(replace(outputs, gradient=values, accumulated=_accumulated(step)))

    def with_gradients(self, step: TrainingStep, optimizer: Optimizer) -> None:
        self._steps += 1
        self.close(step)
        pairs, self._pairs, self._passes = self._pairs, [], 0
        crossed, self._crossed, self._nodes = self._crossed, None, []
        if self._steps <= _STEPS:
            rows = itertools.chain(
                self._repeats(step, pairs),
                self._findings(step, pairs),
                self._weights_of(step, pairs),
                self._one_class(step, pairs),
                _crossing(crossed),
            )
            finding = next(rows, None)
            if finding is not None:
                self._steps = _STEPS
                step.report(finding)

    def _repeats(self, step: TrainingStep, pairs: list[_Pair]) -> Iterator[StepFinding]:
        """Yield a finding if one pass is differentiated twice, or two passes of a step are the same pass."""
        now = _accumulated(step)
        refilled = self._writes(step) >= step.passes
        for a, b in itertools.combinations(pairs, 2):
            if not (a.same_as(b) and torch.equal(a.gradient, b.gradient)):
                continue
            # Gradients that `torch.autograd.grad` returns are not added to those of parameters.
            if a.number == b.number and a.accumulated != b.accumulated != now:
                yield StepFinding(
                    code="twice",
                    certain=True,
                    message="backward() ran twice over one forward pass, with the same gradient of the outputs: every "
                    "gradient is twice that of the loss. Was retain_graph=True set to silence an error?",
                )
                return
            if a.number != b.number and step.called_from_one_line and not step.closure and refilled:
                self._repeated += 1
                break
        else:
            self._repeated = 0
        if self._repeated == _STEPS:
            yield StepFinding(
                code="twice",
                step=step.number - 1,
                message=f"Passes of one step got the same batch and gave the same outputs, in steps {step.number - 1} "
                f"and {step.number}: the gradient is that of fewer examples than it seems. Are micro-batches views of "
                "one buffer that is filled again?",
            )

    def _writes(self, step: TrainingStep) -> int:
        """Return how often the memory of the last pass's inputs was written to since the step before.

        A program that runs one batch several times writes it once. A buffer is written to for each micro-batch.
        """
        strided = (x for x in step.inputs if x.layout == torch.strided and not x.is_inference())
        first = next(strided, None)
        if first is None:
            return 0
        buffer = first if first._base is None else first._base
        last, self._last_buffer = self._last_buffer, (weakref.ref(buffer), buffer._version)
        return buffer._version - (last[1] if last is not None and last[0]() is buffer else 0)

    def _findings(self, step: TrainingStep, pairs: list[_Pair]) -> Iterator[StepFinding]:
        for pair in pairs:
            if pair.coarse:
                continue
            kind, outputs, gradient = pair.kind, pair.outputs, pair.gradient
            self._note_labels(step, outputs, gradient)
            if kind in ("softmax", "sigmoid") and (_softmax_twice if kind == "softmax" else _sigmoid_twice)(
                outputs, gradient
            ):
                loss = "cross_entropy" if kind == "softmax" else "binary_cross_entropy_with_logits"
                yield StepFinding(
                    code="probabilities",
                    certain=True,
                    message=f"The model gives probabilities, and the loss applies {kind} to them "
                    "again: its gradient at "
                    f"the outputs is that of {kind} of a {kind}. Give {loss} the numbers from before the {kind}.",
                )
            if _likelihood_of_unnormalised(outputs, gradient):
                yield StepFinding(
                    code="probabilities",
                    certain=True,
                    message="nll_loss is given outputs that are not logarithms of probabilities: its gradient raises "
                    "the output of the label and lowers no other. Apply log_softmax, or use cross_entropy.",
                )
            if _likelihood_of_softmax(outputs, gradient):
                yield StepFinding(
                    code="probabilities",
                    message="The loss is minus the probability of the label, not minus its logarithm: rows that the "
                    "model gets wrong hardly count. Apply log_softmax instead of softmax, or use cross_entropy.",
                )
            if _softmax_over_batch(outputs, gradient):
                yield StepFinding(
                    code="probabilities",
                    message="The loss applies softmax over the batch, not over the classes: outputs of one example "
                    "compete with those of others. Pass dim=-1 to softmax or log_softmax.",
                )
            if kind == "relu" and _is_cross_entropy(outputs, gradient):
                yield StepFinding(
                    code="probabilities",
                    message="The model ends in a rectifier, and the loss applies softmax to its outputs: no logit can "
                    "be negative, and those at zero get no gradient. Leave the last activation out.",
                )
            if pair.length and any(_softmax_over_batch(*each) for each in _sequences(pair)):
                yield StepFinding(
                    code="probabilities",
                    message="The loss applies softmax over the positions of a sequence, not over the classes: "
                    "cross_entropy takes the classes from dimension 1. Transpose outputs, or flatten them.",
                )
            labels = _binary_labels(outputs, gradient)
            if labels is not None:
                yield StepFinding(
                    code="labels",
                    certain=True,
                    message=f"A binary loss is given the labels {labels[0]:g} and {labels[1]:g}: it has no minimum "
                    "there, and outputs grow without end. Labels have to be 0 and 1.",
                )
        # A pair of networks runs twice in a step and has one target for each pass.
        fine = [pair for pair in pairs if not pair.coarse] if step.passes == 1 else []
        targets = [_common_target(pair.outputs, pair.gradient) for pair in fine]
        self._targets += [target for target in targets[:1] if target is not None]
        if len(self._targets) == _STEPS:
            first, second = self._targets
            if abs(first - second) > 1e-3 * (abs(first) + abs(second)):
                yield StepFinding(
                    code="broadcast",
                    certain=True,
                    step=step.number - 1,
                    message="The squared error draws every output to one and the same number, the mean of the targets "
                    f"({first:.4g}, then {second:.4g}): shapes (n, 1) and (n) are broadcast to (n, n). Give the loss "
                    "outputs and targets of one shape.",
                )

    def _weights_of(self, step: TrainingStep, pairs: list[_Pair]) -> Iterator[StepFinding]:
        """Yield a finding if cross-entropy has a weight that is negative, or without the factor of a scaler."""
        weights = [_weight_of_cross_entropy(pair) for pair in pairs]
        known = [weight for weight in weights if weight is not None]
        self._maximised = self._maximised + 1 if known and max(known) < 0 else 0
        if self._maximised == _STEPS:
            yield StepFinding(
                code="labels",
                step=step.number - 1,
                message="Cross-entropy is maximised: its gradient lowers the output of every label and raises all "
                "others. Is a minus sign missing in front of the logarithms of probabilities?",
            )
        scaler = None if step.objects is None else step.objects.scaler
        scale = float(scaler.get_scale()) if scaler is not None and on_host(scaler._scale) else 1.0
        # A mean over all rows of a pass has weight one, or that of the pass among several.
        plain = [w for w in known if any(abs(w * count - 1) < _COARSELY for count in {1, step.passes, len(known)})]
        divided = scaler is not None and any(
            state.get("found_inf_per_device") for state in scaler._per_optimizer_states.values()
        )
        if scale >= _HIGH_SCALE and divided and known and len(plain) == len(known):
            yield StepFinding(
                code="scaled gradient",
                value=scale,
                message=f"The loss was not scaled, and its gradients are divided by the scaler's factor {scale:g}. "
                "Call scaler.scale(loss).backward().",
            )

    def _one_class(self, step: TrainingStep, pairs: list[_Pair]) -> Iterator[StepFinding]:
        """Yield a finding if the labels of a batch are one class, or one and then another, in two batches in a row.

        Eight or more labels of several classes that were drawn at random are in order once in hundreds of batches.
        """
        labels = [_labels_of(pair.outputs, pair.gradient) for pair in pairs]
        ordered = all(own and sorted(own) == own and len(set(own)) <= 2 for own in labels)
        self._same_class = self._same_class + 1 if labels and ordered else 0
        if self._same_class == _STEPS:
            yield StepFinding(
                code="labels",
                step=step.number - 1,
                message="The labels of a batch are one class, or one class and then the next (class "
                f"{labels[0][0]} in step {step.number}): are data sorted by class and not shuffled?",
            )

    def _note_labels(self, step: TrainingStep, outputs: Tensor, gradient: Tensor) -> None:
        """Remark that one class has a large part of the labels, as where padding is a label."""
        _, g = _rows_with_gradient(outputs, gradient)
        if step.number > 1 or len(g) < 2 * _CLASSES or g.shape[-1] < _CLASSES or bool(((g < 0).sum(-1) != 1).any()):
            return
        labels, counts = g.argmin(-1).unique(return_counts=True)
        share = float(counts.max()) / len(g)
        if share > _COMMON:
            step.notes.append(f"{share:.0%} of the labels of a batch are class {int(labels[counts.argmax()])}")

    def close(self, step: TrainingStep) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _crossing(shapes: CrossedShapes | None) -> Iterator[StepFinding]:
    if shapes is not None:
        size = shapes.square[0]
        yield StepFinding(
            code="broadcast",
            certain=shapes.difference,
            message=f"The loss broadcasts shapes ({size}, 1) and ({size},) to {shapes.square}: a tensor of shape "
            f"{shapes.own} meets every entry of another one, and not its own. Give the loss tensors of one shape.",
        )


def _accumulated(step: TrainingStep) -> tuple[tuple[int, int], ...]:
    """Return which gradients the first parameters have, and how often each was written to."""
    gradients = (p.grad for p in itertools.islice(step.structure.parameters.values(), 4))
    return tuple((id(g), g._version) if g is not None else (0, 0) for g in gradients)


def _sequences(pair: _Pair) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield outputs and gradient of single sequences, as positions × classes."""
    whole = len(pair.outputs) // pair.length * pair.length
    if whole and pair.outputs.ndim == 2 and pair.outputs.shape == pair.gradient.shape:
        parts = (values[:whole].unflatten(0, (-1, pair.length)) for values in (pair.outputs, pair.gradient))
        yield from zip(*parts, strict=True)


def _is_cross_entropy(outputs: Tensor, gradient: Tensor) -> bool:
    """Return whether rows of a gradient add up to zero and are negative at one class; few outputs are positive."""
    z, g = _rows_with_gradient(outputs, gradient)
    if len(g) < 4 or z.shape[-1] < 3:
        return False
    sums = g.sum(-1).abs() <= _EQUAL * g.abs().amax(-1)
    return bool(sums.all()) and bool(((g < 0).sum(-1) == 1).all()) and bool((z == 0).double().mean() > 0.1)


def _labels_of(outputs: Tensor, gradient: Tensor) -> list[int]:
    """Return the classes that the rows of a gradient raise alone; none of few rows or classes, or of other losses."""
    _, g = _rows_with_gradient(outputs, gradient)
    if len(g) < _FEW_ROWS or g.shape[-1] < 3 or bool(((g < 0).sum(-1) != 1).any()):
        return []
    labels: list[int] = g.argmin(-1).tolist()
    return labels


def _weight_of_cross_entropy(pair: _Pair) -> float | None:
    """Return the sum of w over rows whose gradient is w (softmax(z) − y), y one class; None if some are not."""
    z, g = _rows_with_gradient(pair.outputs, pair.gradient)
    equal = _COARSELY if pair.coarse else _EQUAL
    if len(g) < 4 or z.shape[-1] < 3 or len(g) >= _ROWS:
        return None
    p = z.softmax(-1)
    # The label is where the gradient has the other sign.
    target = (g / p).abs().argmax(-1, keepdim=True)
    others = (g / p).scatter(-1, target, torch.nan)
    high, low = others.nan_to_num(-torch.inf).amax(-1), others.nan_to_num(torch.inf).amin(-1)
    if bool((high - low > equal * torch.maximum(high.abs(), low.abs())).any()):
        return None
    weights = (high + low) / 2
    at_label = g.gather(-1, target)[:, 0] - weights * (p.gather(-1, target)[:, 0] - 1)
    if bool((at_label.abs() > equal * weights.abs()).any()):
        return None
    even = bool((weights > 0).all()) or bool((weights < 0).all())
    return float(weights.sum()) if even else None


def _first_rows(values: Tensor) -> Tensor:
    """Return the first rows of a tensor, few enough that a vocabulary of any size costs little."""
    rows = max(8, min(_ROWS, _ENTRIES // values.shape[-1])) if values.ndim > 1 else _ROWS
    while values.ndim > 2:
        values = values[: max(1, -(-rows // values.shape[1]))].flatten(0, 1)
    return values[:rows]


def _probabilities(outputs: Tensor) -> str:
    """Return which function made probabilities of these outputs; empty if they are none."""
    if type(outputs.grad_fn).__name__.startswith("ReluBackward"):
        return "relu"
    with torch.no_grad():
        low, high = torch.aminmax(outputs)
        if float(low) < 0 or float(high) > 1 or float(low) == float(high):
            return ""
        if outputs.ndim > 1 and outputs.shape[-1] > 1:
            sums = outputs.sum(-1)
            if bool(((sums - 1).abs() < 1e-4).all()):
                return "softmax"
    return "sigmoid" if "Sigmoid" in type(outputs.grad_fn).__name__ else ""


def _softmax_twice(outputs: Tensor, gradient: Tensor) -> bool:
    """Return whether every row of a gradient is w (softmax(p) − y) with y one class."""
    p, g = outputs.flatten(0, -2), gradient.flatten(0, -2)
    rows = g.abs().amax(-1) > 0
    if p.shape != g.shape or not bool(rows.any()):
        return False
    weights = g[rows] / p[rows].softmax(-1)
    target = weights.argmin(-1, keepdim=True)
    others = weights.scatter(-1, target, torch.nan)
    negative = bool((weights.gather(-1, target) < 0).all()) and bool((others.nan_to_num(1.0) > 0).all())
    # With two classes there is one other, and rows are compared.
    spread = others if others.shape[-1] > 2 else others.nansum(-1)[None]
    high, low = spread.nan_to_num(-torch.inf).amax(-1), spread.nan_to_num(torch.inf).amin(-1)
    several = others.shape[-1] > 2 or others.shape[0] > 3
    return negative and several and bool((high - low <= _EQUAL * high).all())


def _sigmoid_twice(outputs: Tensor, gradient: Tensor) -> bool:
    """Return whether every entry of a gradient is w (sigmoid(p) − y) with y zero or one."""
    p, g = outputs.flatten(), gradient.flatten()
    used = g != 0
    p, g = p[used].sigmoid(), g[used]
    if len(g) < 4 or bool((g > 0).all()) or bool((g < 0).all()):
        return False
    weights = torch.where(g > 0, g / p, -g / (1 - p))
    return bool(weights.amax() - weights.amin() <= _EQUAL * weights.amax())


def _rows_with_gradient(outputs: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and gradient as rows of classes, without rows that the loss ignores."""
    if outputs.ndim < 2 or outputs.shape != gradient.shape or outputs.shape[-1] < 2:
        return outputs.new_zeros(0, 2), gradient.new_zeros(0, 2)
    p, g = outputs.flatten(0, -2), gradient.flatten(0, -2)
    used = g.abs().amax(-1) > 0
    return p[used], g[used]


def _likelihood_of_unnormalised(outputs: Tensor, gradient: Tensor) -> bool:
    """Return whether a gradient is −w at one class of every row, and the rows are not logarithms of probabilities."""
    p, g = _rows_with_gradient(outputs, gradient)
    if len(g) < 4 or p.shape[-1] < 3 or not bool(((g != 0).sum(-1) == 1).all()):
        return False
    weights = -g.amin(-1)
    equal = bool(weights.amin() > 0) and bool(weights.amax() - weights.amin() <= _EQUAL * weights.amax())
    return equal and bool((p.logsumexp(-1).abs() > 1e-2).all())


def _likelihood_of_softmax(outputs: Tensor, gradient: Tensor) -> bool:
    """Return whether every row of a gradient is w p_y (p − y) with p the softmax of the row and y one class."""
    z, g = _rows_with_gradient(outputs, gradient)
    if len(g) < 4 or z.shape[-1] < 3:
        return False
    p = z.softmax(-1)
    target = g.argmin(-1, keepdim=True)
    others = (g / p).scatter(-1, target, torch.nan)
    high, low = others.nan_to_num(-torch.inf).amax(-1), others.nan_to_num(torch.inf).amin(-1)
    if bool((low <= 0).any()) or bool((high - low > _EQUAL * high).any()):
        return False
    weights = (high + low) / 2
    scaled = weights / p.gather(-1, target)[:, 0]
    spread, different = (float((w.amax() - w.amin()) / w.amax()) for w in (scaled, weights))
    return spread <= _EQUAL and different > _DIFFERENT


def _binary_labels(outputs: Tensor, gradient: Tensor) -> tuple[float, float] | None:
    """Return the two labels of a binary loss of logits if they are not zero and one."""
    z, g = outputs.flatten(), gradient.flatten()
    if z.shape != g.shape or len(z) < 6 or not bool((g != 0).all()):
        return None
    p = z.sigmoid()
    for labels in ((0.0, 1.0), *_LABELS):
        for first in labels:
            weight = g[0] / (p[0] - first)
            read = p - g / weight
            nearest = [(read - label).abs() <= _EQUAL * (1 + abs(label)) for label in labels]
            if (
                float(weight) > 0
                and bool((nearest[0] | nearest[1]).all())
                and all(bool(matches.any()) for matches in nearest)
            ):
                return None if labels == (0.0, 1.0) else (labels[0], labels[1])
    return None


def _common_target(outputs: Tensor, gradient: Tensor) -> float | None:
    """Return b if the gradient is a (z − b) with one a > 0 and one b for all outputs; b is not their own mean."""
    z, g = outputs.flatten(), gradient.flatten()
    if z.shape != g.shape or len(z) < 4 or outputs.shape[0] != outputs.numel():
        return None
    dz, dg = z - z.mean(), g - g.mean()
    variance = float(dz @ dz)
    if variance <= 1e-6 * float(z @ z) or float(dg.norm()) <= 1e-3 * float(g.norm()):
        return None
    slope = float(dz @ dg) / variance
    if slope <= 0 or float((dg - slope * dz).norm()) > 1e-4 * float(dg.norm()):
        return None
    if abs(float(g.mean())) <= 1e-3 * float(dg.norm()):
        return None
    return float(z.mean()) - float(g.mean()) / slope


def _softmax_over_batch(outputs: Tensor, gradient: Tensor) -> bool:
    """Return whether a gradient is w (n_j p − y) with p the softmax of each column j, and n_j labels in it.

    Scores of pairs against each other are square, and have such a loss on purpose.
    """
    if outputs.ndim != 2 or outputs.shape != gradient.shape or outputs.shape[0] == outputs.shape[1]:
        return False
    rows, columns = outputs.shape
    if rows < 4 or columns < 3 or not bool(gradient.any()):
        return False
    p = outputs.softmax(0)
    used = gradient.abs().amax(0) > 0
    counts = (gradient / p).amax(0) * used
    if not bool((counts[used] > 0).all()):
        # Every column with a label pushes its other entries down; minus the logarithm of the label's does not.
        return False
    left = counts * p - gradient
    weight = left.amax()
    chosen = left > weight / 2
    near = (left - weight * chosen).abs() <= _EQUAL * weight
    uneven = gradient.sum(1).abs().max() > _DIFFERENT * weight
    return bool(near.all()) and bool((chosen.sum(1) == 1).all()) and bool(uneven)
