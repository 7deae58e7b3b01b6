"""Is the gradient of one tensor out of line? Its norm against its own history and against the other tensors."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterator
from statistics import median

import torch
from torch import Tensor
from torch.optim import Optimizer

from conserved._torch_compat import foreach_norm
from conserved.symmetry.view import local
from conserved.tracking.identities.finding import StepFinding, name_tensors
from conserved.tracking.identities.step_identity import StepIdentity, TrainingStep, is_plain

_HISTORY = 32
"""Steps that a norm is compared with."""

_LEAST = 12
"""Steps before anything is reported."""

_SIGMAS = 6.0
_FACTOR = math.log(100.0)
"""A norm is out of line at 6 σ of its own logarithms, and at least a factor of 100: batches differ by factors of 10."""

_EPSILON = torch.finfo(torch.float32).eps
"""Rounding of the precision that gradients are computed in, at best."""

_NORMAL = 1.4826
"""σ of normal numbers over their median absolute deviation."""

_ZEROS = 3
"""Steps in a row that a gradient is zero before it is reported: a batch may leave a part of a model out."""

_DIGITS = re.compile(r"\d+")

_SHARE = 0.25
"""Share of an optimizer's entries without any gradient since the start that is more than a part not used yet."""


class GradientSizes(StepIdentity):
    """Follows the norm of every gradient, on a logarithmic scale, less what all tensors have in common in a step."""

    name = "norms"
    free = False

    def __init__(self) -> None:
        self._history: dict[str, deque[float]] = {}
        self._zeros: dict[str, int] = {}
        self._longest: dict[str, int] = {}
        """By tensor, the longest run of zeros that ended: parts that batches leave out now and then have one."""
        self._moving = 0
        """Steps so far at a rate above zero; what starts behind a zero has a gradient from the second of them on."""
        self._nothing = 0
        """Steps in a row in which every gradient was exactly zero."""

    def restart(self) -> None:
        self._history.clear()
        self._zeros.clear()
        self._longest.clear()
        self._moving = 0

    def with_gradients(self, step: TrainingStep, optimizer: Optimizer) -> None:
        if not step.thorough:
            return
        optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
        rows = [
            (name, p.grad)
            for name, p in step.structure.parameters.items()
            if id(p) in optimized and p.grad is not None and is_plain(p.grad)
        ]
        if rows:
            names = [name for name, _ in rows]
            norms = foreach_norm([local(gradient) for _, gradient in rows])
            numbers = torch.stack([norm.double().to(norms[0].device) for norm in norms])
            sizes = {name: gradient.numel() for name, gradient in rows}
            self._moving += any(bool(group.get("lr", 1.0)) for group in optimizer.param_groups)
            moving = self._moving
            number, notes = step.number, step.notes
            step.read(numbers, lambda arrived: self._judge(names, arrived, number, sizes, moving, notes))

    def _judge(
        self,
        names: list[str],
        numbers: Tensor,
        number: int,
        sizes: dict[str, int] | None = None,
        moving: int = 0,
        notes: list[str] | None = None,
    ) -> Iterator[StepFinding]:
        norms = dict(zip(names, numbers.tolist(), strict=True))
        logs = {name: math.log(norm) for name, norm in norms.items() if norm > 0 and math.isfinite(norm)}
        centres = {name: median(past) for name, past in self._history.items() if len(past) >= _LEAST and name in logs}
        common = median([logs[name] - centre for name, centre in centres.items()]) if len(centres) > 2 else 0.0
        # A gradient that cancels is rounding of the others in most steps, and has no usual size.
        rounding = math.log(_EPSILON * math.hypot(*(norm for norm in norms.values() if math.isfinite(norm))) or 1e-300)
        out = []
        for name, centre in centres.items():
            past = self._history[name]
            if centre + common < rounding or logs[name] - max(past) < _FACTOR:
                continue
            deviation = logs[name] - centre - common
            sigma = _NORMAL * median([abs(value - centre) for value in past])
            if deviation > max(_SIGMAS * sigma, _FACTOR):
                out.append((deviation, name))
        yield from self._dead(norms, number, sizes or {})
        yield from self._never_alive(norms, number, sizes or {}, moving, [] if notes is None else notes)
        for name, value in logs.items():
            self._history.setdefault(name, deque(maxlen=_HISTORY)).append(value)
        if out and 2 * len(out) <= len(logs):
            out.sort(reverse=True)
            deviation, worst = out[0]
            yield StepFinding(
                code="norm",
                tensor=worst,
                others=tuple(name for _, name in out[1:]),
                value=math.exp(deviation),
                limit=math.exp(_FACTOR),
                message=f"The gradient of {worst} is {math.exp(deviation):.3g} times as large in step "
                f"{number} as in the "
                "steps before, and those of other tensors are not: a corrupted value, or one example out of range.",
            )

    def _dead(self, norms: dict[str, float], number: int, sizes: dict[str, int]) -> Iterator[StepFinding]:
        """Yield tensors whose gradient became zero and stays zero while others have one.

        A small part has to have had one for longer than a large one whose tensors all had one in every step.
        """
        self._nothing = 0 if any(norms.values()) else self._nothing + 1
        if self._nothing:
            # A margin that all examples keep leaves zeros for a while; a run that never had a gradient has no margin.
            if self._nothing == (_ZEROS if self._history else 2):
                yield StepFinding(
                    code="zero gradient",
                    tensor=next(iter(norms)),
                    step=number - self._nothing + 1,
                    message="Every gradient has been exactly zero since step "
                    f"{number - self._nothing + 1}: the loss does "
                    "not depend on the weights. Are all labels ignored, or is the loss detached or multiplied by zero?",
                )
            return
        dead = []
        for name, norm in norms.items():
            before = self._zeros.get(name, 0)
            if norm and name in self._history:
                self._longest[name] = max(self._longest.get(name, 0), before)
            self._zeros[name] = before + 1 if norm == 0 else 0
            wait = _ZEROS * (1 + 2 * self._longest.get(name, 0))
            if self._zeros[name] == wait and len(self._history.get(name, ())) >= _LEAST:
                dead.append(name)
        together = [
            name
            for name, zeros in self._zeros.items()
            if zeros == _ZEROS and len(self._history.get(name, ())) >= _ZEROS and not self._longest.get(name)
        ]
        if sizes and sum(sizes.get(name, 0) for name in together) >= _SHARE * sum(sizes.values()):
            dead = list(dict.fromkeys([*dead, *together]))
        if dead:
            yield StepFinding(
                code="zero gradient",
                tensor=dead[0],
                others=tuple(dead[1:]),
                step=number - self._zeros[dead[0]] + 1,
                message=f"The gradient of {name_tensors(dead)} has been exactly zero since step "
                f"{number - self._zeros[dead[0]] + 1}. It "
                "had one before: was a branch detached, a unit switched off for good, or a reduction lost?",
            )

    def _never_alive(
        self, norms: dict[str, float], number: int, sizes: dict[str, int], moving: int, notes: list[str]
    ) -> Iterator[StepFinding]:
        """Yield a large part of the model whose gradient was exactly zero in every one of the first steps.

        A small part is only noted.
        """
        if moving != _ZEROS or not any(norms.values()):
            return
        # Of experts that take turns, some have a gradient.
        alive = {(_DIGITS.sub("#", name), sizes[name]) for name, norm in norms.items() if norm}
        never = [
            name
            for name, norm in norms.items()
            if norm == 0 and self._zeros.get(name, 0) >= _ZEROS and (_DIGITS.sub("#", name), sizes[name]) not in alive
        ]
        always = [name for name, norm in norms.items() if norm == 0 and self._zeros.get(name, 0) >= _ZEROS]
        if sum(sizes[name] for name in never) < _SHARE * sum(sizes.values()):
            if always:
                notes.append(f"the gradient of {name_tensors(always)} was exactly zero in the first {_ZEROS} steps")
        else:
            yield StepFinding(
                code="zero gradient",
                tensor=never[0],
                others=tuple(never[1:]),
                step=number - _ZEROS + 1,
                message=f"The gradient of {name_tensors(never)} has been exactly zero in every step, and others are "
                "not: what they compute does not reach the loss. Are all units dead, does a mask leave out all that it "
                "should keep, or is there a round(), sign() or argmax() behind them?",
            )
