"""Does the optimizer hold the model? Every trained tensor in a parameter group once, and ties that stay ties."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from conserved._torch_compat import buffers_of, children_of, parameters_of
from conserved.symmetry.view import local
from conserved.tracking.identities.finding import StepFinding, name_tensors
from conserved.tracking.identities.run_objects import RunObjects
from conserved.tracking.identities.step_identity import (
    StepIdentity,
    TrainingStep,
    grouped_parameters,
    is_plain,
    on_host,
)

_ENTRIES = 256
"""Entries that say whether a tensor was written to."""

_MOVED, _STOOD = 2, 2
"""Steps in which weights that are copied from elsewhere moved, and steps in a row without, after which it is stated."""


class HeldParameters(StepIdentity):
    """Compares, by identity, the model's trained tensors with those in the optimizers' groups.

    Asked in the first step and whenever either changes. A tensor counts as trained by nobody if it has a gradient, no
    optimizer of the process holds it, and a step leaves it as it was.
    """

    name = "parameter groups"

    def __init__(self) -> None:
        self._signature: tuple[int, ...] | None = None
        self._open: list[tuple[str, Tensor, Tensor]] = []
        """Tensors with a gradient that no watched optimizer holds, with some of their entries."""
        self._ties: list[tuple[str, ...]] = []
        self._unused: list[str] = []
        self._unregistered: set[str] = set()
        self._kept: list[tuple[str, weakref.ref[Tensor]]] = []
        """Trained tensors in attributes when watching began; activations that a stage receives come later."""
        self._idle = 0
        """Tensors that optimizers hold, that the model does not have, and that have no gradient."""
        self._copied: dict[str, tuple[int, int]] = {}
        """By tensor that no optimizer holds: steps in which it moved, and steps in a row in which it did not."""
        self._looked = 0
        """The step in which groups were looked at for the first time, as they are now."""
        self._idle_shapes: set[tuple[int, ...]] = set()

    def begin(self, step: TrainingStep) -> None:
        self._ties = _tied_names(step.model)
        self._kept = [(name, weakref.ref(p)) for name, p in unregistered_tensors(step.model)]

    def before_optimizer(self, step: TrainingStep, optimizer: Optimizer) -> None:
        self._look_at_ties(step)

    def with_gradients(self, step: TrainingStep, optimizer: Optimizer) -> None:
        # Groups stay as they are: a later step finds the same.
        if step.thorough:
            self._look_at_groups(step)

    def after_optimizer(self, step: TrainingStep, optimizer: Optimizer) -> None:
        if step.closure and step.thorough:
            self._look_at_groups(step)

    def after_step(self, step: TrainingStep) -> None:
        """Report tensors that are still as they were before the step."""
        if not self._open:
            return
        rows, self._open = [row for row in self._open if on_host(row[1])], []
        candidates = [row for row in rows if torch.equal(_some(row[1]), row[2])]
        self._look_at_copied(step, rows, candidates)
        if not candidates or self._looked != step.number:
            return
        elsewhere = _held_anywhere(step)
        lost = [name for name, p, _ in candidates if id(p) not in elsewhere]
        if not lost:
            return
        groups = " and ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in step.optimizers))
        message = f"{name_tensors(lost)} {'has' if len(lost) == 1 else 'have'} a gradient and no optimizer steps "
        message += "it. " if len(lost) == 1 else "them. "
        if all(name in self._unregistered for name in lost):
            message += "model.parameters() does not list what is kept in a list, an attribute or a buffer. Use "
            message += "nn.ModuleList or nn.Parameter, then make the optimizer."
        elif self._idle:
            message += (
                f"{groups} holds {self._idle} tensors that the model does not have: it was made before parameters were "
                "replaced (moved, wrapped, loaded or given a new head). Make it again."
            )
        elif self._unused:
            message += f"{groups} holds only tensors that get no gradient, such as {name_tensors(self._unused, 2)}."
        else:
            message += f"Add {'it' if len(lost) == 1 else 'them'} to a group of {groups}, or set requires_grad=False."
        # Nobody means a step that moves nothing, or one of tensors in whose place others of their shapes are trained.
        shapes = {tuple(p.shape) for _, p, _ in candidates}
        certain = bool(self._unused) or (bool(self._idle) and shapes <= self._idle_shapes)
        others = tuple(lost[1:])
        step.report(StepFinding(code="not held", certain=certain, tensor=lost[0], others=others, message=message))

    def _look_at_copied(
        self,
        step: TrainingStep,
        rows: list[tuple[str, Tensor, Tensor]],
        still: list[tuple[str, Tensor, Tensor]],
    ) -> None:
        """Report weights that someone copied from what the optimizer steps, in every step, and does no more."""
        for name, *_ in rows:
            moved, stood = self._copied.get(name, (0, 0))
            stands = any(name == other for other, *_ in still)
            self._copied[name] = (moved, stood + 1) if stands else (moved + 1, 0)
        lost = [name for name, *_ in still if self._copied[name][0] >= _MOVED and self._copied[name][1] == _STOOD]
        if lost and len(lost) == len(rows):
            step.report(
                StepFinding(
                    code="did not land",
                    # Another optimizer may have stepped them, and rest.
                    certain=False,
                    tensor=lost[0],
                    others=tuple(lost[1:]),
                    step=step.number - _STOOD + 1,
                    message=f"Updates no longer reach {name_tensors(lost)}: the optimizer steps other tensors, from "
                    f"which they were copied up to step {step.number - _STOOD}. Do they share no memory now, or is "
                    "the copy left out?",
                )
            )

    def _look_at_groups(self, step: TrainingStep) -> None:
        own: dict[int, tuple[str, Tensor]] = {id(p): (name, p) for name, p in step.structure.parameters.items()}
        registered = set(own)
        copies = [(name, reference()) for name, reference in self._kept]
        own |= {id(p): (name, p) for name, p in copies if p is not None and id(p) not in own}
        groups = [p for optimizer in step.optimizers for p in grouped_parameters(optimizer)]
        signature = (*(key for key, (_, p) in own.items() if p.requires_grad), -1, *map(id, groups))
        if signature != self._signature:
            self._looked = step.number
        elif self._looked == step.number or not self._copied:
            # Another optimizer of the same step, or nothing to follow.
            return
        else:
            # Weights that were copied from elsewhere in the first step are followed.
            copied = [(name, p) for name, p in own.values() if self._copied.get(name, (0, 0))[0] and p.grad is not None]
            self._open = [(name, p, _some(p).clone()) for name, p in copied if on_host(p)]
            return
        self._copied.clear()
        first, self._signature = self._signature is None, signature
        optimized = {id(p) for p in groups}
        self._unregistered = {name for key, (name, _) in own.items() if key not in registered}
        idle = [p for p in groups if id(p) not in own and p.grad is None]
        self._idle, self._idle_shapes = len(idle), {tuple(p.shape) for p in idle}
        if self._idle and self._idle < len(groups):
            kinds = " and ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in step.optimizers))
            step.notes.append(f"{kinds} holds {self._idle} tensors that the model does not have")
        self._unused = (
            [own[id(p)][0] for p in groups if id(p) in own] if not any(p.grad is not None for p in groups) else []
        )
        self._open = [
            (name, p, _some(p).clone())
            for key, (name, p) in own.items()
            if key not in optimized
            and p.is_leaf
            and p.grad is not None
            and is_plain(p)
            and is_plain(p.grad)
            and _is_nonzero(p.grad)
        ]
        if first:
            self._look_at_copies(step)
            self._look_at_memory(step)

    def _look_at_memory(self, step: TrainingStep) -> None:
        """Report two trained parameters that are one piece of memory, such as a weight and its transpose."""
        parts: dict[tuple[int, int, int], str] = {}
        for name, p in step.structure.parameters.items():
            if not p.requires_grad or not is_plain(p) or hasattr(p, "device_mesh") or p.is_meta or p.numel() < 2:
                continue
            known = parts.setdefault((p.untyped_storage().data_ptr(), int(p.storage_offset()), p.numel()), name)
            if known != name:
                step.report(
                    StepFinding(
                        code="untied",
                        certain=True,
                        tensor=name,
                        others=(known,),
                        message=f"{name} and {known} are two parameters in one memory, which two updates write to. "
                        "Keep one of them, and use it in both places.",
                    )
                )
                return

    def _look_at_ties(self, step: TrainingStep) -> None:
        for names in self._ties:
            values = [_parameter(step.model, name) for name in names]
            if any(value is None for value in values) or all(value is values[0] for value in values):
                continue
            self._ties = [other for other in self._ties if other != names]
            step.report(
                StepFinding(
                    code="untied",
                    certain=True,
                    tensor=names[1],
                    others=(names[0],),
                    message=f"{names[1]} and {names[0]} were one tensor and are two now: the tie was "
                    "lost when the model "
                    "was moved, copied or loaded. Tie them again, then make the optimizer.",
                )
            )
            break

    def _look_at_copies(self, step: TrainingStep) -> None:
        """Report an embedding and a head that have the same values and are not one tensor."""
        embeddings = _weights(step.model, nn.Embedding)
        heads = _weights(step.model, nn.Linear)
        for (table, a), (head, b) in ((x, y) for x in embeddings for y in heads):
            if a is b or a.shape != b.shape or not (a.requires_grad and b.requires_grad):
                continue
            if not (on_host(a) and is_plain(a) and is_plain(b)) or not torch.equal(_some(a), _some(b)):
                continue
            if not local(a).numel():
                # Another process has all of it.
                continue
            shared = local(a).data_ptr() == local(b).data_ptr()
            step.report(
                StepFinding(
                    code="untied",
                    tensor=head,
                    others=(table,),
                    message=f"{head} and {table} have equal values and are two parameters"
                    + (" in one memory, which two updates write to" if shared else ", which train apart from now on")
                    + f". To tie them, assign the parameter itself: {head.rpartition('.')[0]}.weight = "
                    f"{table.rpartition('.')[0]}.weight.",
                )
            )
            return


def _tied_names(model: nn.Module) -> list[tuple[str, ...]]:
    """Return the names of every parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    return [tuple(own) for own in names.values() if len(own) > 1]


def unregistered_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield trained tensors of modules that `parameters()` does not list: in lists, buffers, or not parameters."""
    for path, module in model.named_modules():
        for key, value in (*vars(module).items(), *buffers_of(module).items()):
            if key.startswith("_"):
                continue
            values = (
                value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
            )
            several = not isinstance(value, Tensor | nn.Module)
            for index, each in enumerate(values):
                name = ".".join(part for part in (path, f"{key}[{index}]" if several else key) if part)
                # By type: `isinstance` asks proxies, which may raise.
                if issubclass(type(each), Tensor) and each.requires_grad:
                    yield name, each
                elif issubclass(type(each), nn.Module):
                    yield from ((f"{name}.{own}", p) for own, p in each.named_parameters() if p.requires_grad)


def _parameter(model: nn.Module, name: str) -> Tensor | None:
    path, _, last = name.rpartition(".")
    for part in path.split(".") if path else ():
        child = children_of(model).get(part)
        if child is None:
            return None
        model = child
    return parameters_of(model).get(last)


def _weights(model: nn.Module, kind: type[nn.Module]) -> list[tuple[str, Tensor]]:
    named = (
        (f"{name}.weight" if name else "weight", parameters_of(module).get("weight"))
        for name, module in model.named_modules()
        if isinstance(module, kind)
    )
    return [(name, weight) for name, weight in named if weight is not None]


def _some(tensor: Tensor) -> Tensor:
    values = local(tensor.detach())
    flat = values.view(-1) if values.is_contiguous() else values.reshape(-1)
    return flat[:: max(1, flat.numel() // _ENTRIES)]


def _is_nonzero(gradient: Tensor) -> bool:
    return not on_host(gradient) or bool(local(gradient).any())


def _held_anywhere(step: TrainingStep) -> set[int]:
    """Return the tensors of all optimizers of the process, also of those the monitor was not given.

    Only asked if a tensor seems to be trained by nobody, because it looks at every object.
    """
    return {id(p) for optimizer in RunObjects.optimizers() for p in grouped_parameters(optimizer)}
