"""A captured program: its operations in the order they ran, the values they read and make, and what it ends with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from conserved._torch_compat import tree_flatten

AUTOGRAD = "autograd::"
"""Before the name of an autograd function that computes outside PyTorch, where it stands as one operation."""

CHECKPOINT = "torch.utils.checkpoint"
"""In place of a name: torch computes the forward pass again and differentiates it, so its backward is a derivative."""


@dataclass(frozen=True, slots=True)
class ValueRef:
    """A value of the program, by number."""

    value: int


@dataclass(slots=True)
class Value:
    """A tensor of the program: its shape, and its entries, on the host, if it is a small constant."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    constant: Tensor | None = None
    parameter: str | None = None


@dataclass(slots=True)
class Operation:
    """One step: what ran, on which values, with which results; where it stands in the user's program."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[int]
    module: str
    line: str
    stopped: bool = False
    """Whether no gradient is recorded through it."""
    custom: str = ""
    """The autograd function in whose forward it ran: its backward is whatever its author wrote."""

    _inputs: list[int] | None = None

    def inputs(self) -> list[int]:
        """Return the values it reads."""
        if self._inputs is None:
            leaves = tree_flatten((self.args, self.kwargs))[0]
            self._inputs = [leaf.value for leaf in leaves if isinstance(leaf, ValueRef)]
        return self._inputs


@dataclass(slots=True)
class CapturedProgram:
    """All operations of one forward pass, and the values it ends with."""

    operations: list[Operation] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    parameters: dict[str, int] = field(default_factory=dict)
    shared: list[str] = field(default_factory=list)
    """Parameters that share their storage with another one without being the same parameter."""
    hooked: list[str] = field(default_factory=list)
    """Parameters with hooks that may change their gradients."""
    hooked_values: set[int] = field(default_factory=set)
    """Values with such hooks."""
    hooked_nodes: bool = False
    """Whether a node of the graph of gradients has hooks of its own, which no value shows."""
    read: list[int] = field(default_factory=list)
    """Values that Python read a number from."""
    branches: list[str] = field(default_factory=list)
    """Lines that read a number out of something that is no constant, and may have gone another way for other inputs."""
    hidden: list[str] = field(default_factory=list)
    """State besides tensors that it reads or changes: another call may compute something else."""
    sized_by_data: bool = False
    """Whether shapes depend on values: other inputs may read other parts of a parameter."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    tables: dict[int, Tensor] = field(default_factory=dict)
    """Constant buffers that are too large to be copied, by value: while laws are inferred, not afterwards."""
    communicates: bool = False
    """Whether it exchanges tensors with other processes: what it computes is then a part of a whole program."""
    _makers: dict[int, Operation] = field(default_factory=dict)
    _read_values: set[int] | None = None

    def maker(self, value: int) -> Operation | None:
        """Return the operation that a value is a result of."""
        if not self._makers:
            self._makers.update({result: operation for operation in self.operations for result in operation.results})
        return self._makers.get(value)

    def restrict(self, live: Sequence[int]) -> None:
        """Name the operations that the outputs depend on; `is_read` looks at these only."""
        self._read_values = {number for index in live for number in self.operations[index].inputs()}
        self._read_values.update(self.outputs)

    @property
    def decisions(self) -> str:
        """Reasons why another call may take another path, in words; empty if none was seen."""
        lines = list(dict.fromkeys(self.branches))
        numbers = [f"numbers it reads, in {', '.join(lines[:2])}"] if lines else []
        return "; ".join([*self.hidden[:2], *numbers])

    def is_read(self, value: int) -> bool:
        """Return whether an operation that the outputs depend on reads a value, or it is an output."""
        if self._read_values is None:
            self.restrict(range(len(self.operations)))
        assert self._read_values is not None
        return value in self._read_values

    def padding_row(self, value: int, row: int) -> Tensor | None:
        """Return a row of a parameter that is a look-up table; None if it is not one, or has no values."""
        name = self.values[value].parameter
        table = self.tensors.get(name) if name is not None else None
        if table is None or table.is_meta or hasattr(table, "full_tensor"):
            return None
        return table.detach()[row]
