"""Modules, parameters and names of a model, looked up once for as long as the model stays the same.

Walking a model of a hundred modules takes half a millisecond, and a dozen identities want something of it in every
step. What changes without a change of structure, such as attributes, gradients and buffers' values, is not kept here.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from conserved._torch_compat import BatchNormBase, DropoutBase, InstanceNormBase
from conserved.inference.model_parts import ModelParts, parameters_of, parts_of
from conserved.layout import has_flat_shards


class ModelStructure:
    """The modules and parameters of a model at the time they were looked up."""

    def __init__(self, parts: ModelParts) -> None:
        self.parts, self._model = parts, parts.model
        self._names: tuple[tuple[int, ...], dict[int, str]] | None = None

    @staticmethod
    def of(model: nn.Module, known: ModelStructure | None = None) -> ModelStructure:
        """Return the structure of a model; the one that is known if nothing has changed since."""
        parts = parts_of(model)
        same = known is not None and known.parts.state == parts.state and not known._volatile
        return known if known is not None and same else ModelStructure(parts)

    @cached_property
    def _volatile(self) -> bool:
        """Whether a wrapper makes parameters again whenever they are asked for."""
        return not {*map(id, self.parts.parameters)} >= {*map(id, self.parameters.values())}

    @cached_property
    def modules(self) -> tuple[nn.Module, ...]:
        """Every module once."""
        return tuple(self._model.modules())

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter once, by its first name."""
        if has_flat_shards(self._model):
            # What FSDP1 leaves on the modules is what optimizers step.
            return dict(self._model.named_parameters())
        named: dict[str, Any] = dict(parameters_of(self.parts))
        return named

    @cached_property
    def trained(self) -> frozenset[int]:
        """The identities of parameters that require a gradient."""
        return frozenset(id(p) for p in self.parameters.values() if p.requires_grad)

    @cached_property
    def frozen(self) -> tuple[tuple[str, nn.Parameter], ...]:
        """Parameters that require none."""
        return tuple((name, p) for name, p in self.parameters.items() if not p.requires_grad)

    @cached_property
    def batch_norms(self) -> tuple[tuple[str, BatchNormBase], ...]:
        """Batch norms with their names."""
        return tuple((name, m) for name, m in self._model.named_modules() if isinstance(m, BatchNormBase))

    @cached_property
    def moded(self) -> tuple[DropoutBase | BatchNormBase | InstanceNormBase, ...]:
        """Layers that may act differently in train and eval mode."""
        return tuple(m for m in self.modules if isinstance(m, DropoutBase | BatchNormBase | InstanceNormBase))

    def names(self, optimizers: Iterable[Optimizer]) -> dict[int, str]:
        """Return the names of parameters, and of other tensors that optimizers hold, by identity."""
        grouped = [[p for group in optimizer.param_groups for p in group["params"]] for optimizer in optimizers]
        key = tuple(id(p) for group in grouped for p in group)
        if self._names is None or self._names[0] != key:
            self._names = (key, named_tensors(self.parameters, optimizers))
        return self._names[1]


def named_tensors(parameters: dict[str, nn.Parameter], optimizers: Iterable[Optimizer]) -> dict[int, str]:
    """Return the names of parameters, and of other tensors that optimizers hold, by identity."""
    names = {id(p): name for name, p in parameters.items()}
    for number, optimizer in enumerate(optimizers):
        optimized: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        for index, p in enumerate(optimized):
            names.setdefault(id(p), f"tensor {index} of {type(optimizer).__name__}" + (f" {number}" if number else ""))
    return names
