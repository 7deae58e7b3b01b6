"""Whether pairs of charges that are tied belong to one complex number: rotary positions, complex products.

Operations that tie the charges of two entries (x cos − y sin beside y cos + x sin) may leave their rotation free as
well, J = (0 −1; 1 0) on each pair. That is decided on the operations between the maps that make the entries and the
contraction that ends them: they are run once on random numbers in double precision, with the rotation as tangent,
and what they end in must not move. These operations are polynomial in what they are given, so a motion that vanishes
at random numbers vanishes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

from conserved.inference.capture import CapturedProgram, Operation, ValueRef
from conserved.inference.rules.places import _positions
from conserved.inference.types import Atoms, Type
from conserved.inference.typing import Typing

STILL = 1e-9
"""Largest tangent, relative to what moved, of something that does not move."""


class Rotations:
    """Decides about rotations, each layout of operations once."""

    def __init__(self, typing: Typing) -> None:
        self.typing = typing
        self._uses: dict[int, list[int]] = {}
        for number in typing.live:
            for value in typing.program.operations[number].inputs():
                self._uses.setdefault(value, []).append(number)
        self._decided: dict[Any, bool] = {}
        values, low, high = [], [], []
        for value, known in typing.known.items():
            if isinstance(known, Type):
                for one in known.factors:
                    if not one.atoms.size:
                        continue
                    values.append(value)
                    low.append(int(one.atoms.min()))
                    high.append(int(one.atoms.max()))
        self._values, self._low, self._high = (np.array(x, dtype=np.int64) for x in (values, low, high))
        self._makers = {
            result: number for number in typing.live for result in typing.program.operations[number].results
        }

    def hold(self, pairs: Atoms) -> bool:
        """Whether turning the first atom of every pair into the second leaves the program's function alone.

        Args:
            pairs: atoms, two in each row.
        """
        self._partner = np.zeros(self.typing.engine.charges.count, dtype=np.int64)
        self._sign = np.zeros(self._partner.size)
        self._partner[pairs[:, 0]], self._partner[pairs[:, 1]] = pairs[:, 1], pairs[:, 0]
        self._sign[pairs[:, 0]], self._sign[pairs[:, 1]] = -1, 1
        self._carriers = self._carrying(pairs)
        sources = self._sources()
        if not sources:
            return False
        slice_ = self._slice(sources)
        program = self.typing.program
        low = int(pairs.min())
        key = (
            tuple(
                (
                    program.operations[n].name,
                    tuple(program.values[v].shape for v in program.operations[n].inputs()),
                    str(tree_map_only(ValueRef, lambda _: "·", program.operations[n].args)),
                )
                for n in slice_
            ),
            (pairs - low).tobytes(),
        )
        if key not in self._decided:
            try:
                self._decided[key] = self._still(sources, slice_)
            except (RuntimeError, NotImplementedError, TypeError, AttributeError, AssertionError, IndexError):
                self._decided[key] = False
        return self._decided[key]

    def _carrying(self, pairs: Atoms) -> set[int]:
        """The values whose type has one of these atoms."""
        low, high = int(pairs.min()), int(pairs.max())
        near = self._values[(self._high >= low) & (self._low <= high)]
        found = set()
        for value in near:
            known = self.typing.known[int(value)]
            assert isinstance(known, Type)
            if any((self._sign[one.atoms] != 0).any() for one in known.factors):
                found.add(int(value))
        return found

    def _carries(self, value: int) -> bool:
        return value in self._carriers

    def _sources(self) -> list[int]:
        """Values that carry the atoms and are made from nothing that does."""
        program = self.typing.program
        parameters = {program.parameters[name] for name in self.typing.engine.regions}
        found = []
        for value in sorted(self._carriers):
            number = self._makers.get(value)
            if number is None:
                continue
            operation = program.operations[number]
            before = [v for v in operation.inputs() if v not in parameters and v in self._carriers]
            if not before and not self._is_view(operation):
                found.append(value)
        return found

    def _is_view(self, operation: Operation) -> bool:
        """Whether an operation only re-arranges a parameter."""
        return (
            all(not isinstance(self.typing.known.get(v), Type) for v in operation.inputs())
            and len(operation.inputs()) == 1
        )

    def _slice(self, sources: Sequence[int]) -> list[int]:
        """The operations that what carries the atoms goes through."""
        carrying, found = set(sources), set()
        program = self.typing.program
        frontier = list(sources)
        while frontier:
            value = frontier.pop()
            for number in self._uses.get(value, []):
                if number in found:
                    continue
                found.add(number)
                for result in program.operations[number].results:
                    if self._carries(result) and result not in carrying:
                        carrying.add(result)
                        frontier.append(result)
        return sorted(found)

    def _still(self, sources: Sequence[int], slice_: Sequence[int]) -> bool:
        """Whether what the operations end in does not move."""
        program = self.typing.program
        generator = torch.Generator().manual_seed(0)
        values: dict[int, Tensor] = {}
        with forward_ad.dual_level():
            for value in sources:
                x = torch.randn(program.values[value].shape, generator=generator, dtype=torch.float64)
                values[value] = forward_ad.make_dual(x, self._rotated(value, x))
            for number in slice_:
                operation = program.operations[number]
                results = self._run(operation, values, generator, program)
                for value, result in zip(operation.results, results, strict=False):
                    if value in values:
                        continue
                    values[value] = result
                    if not self._carries(value) and result.is_floating_point():
                        primal, tangent = forward_ad.unpack_dual(result)
                        # Masks add −∞ or the like: their size says nothing about what moves.
                        usual = primal.abs()[primal.abs() < 1e6]
                        size = 1 + float(usual.max()) if usual.numel() else 1.0
                        if tangent is not None and float(tangent.abs().max()) > STILL * size:
                            return False
        return True

    def _rotated(self, value: int, x: Tensor) -> Tensor:
        """J·x: every entry at an atom becomes plus or minus the entry at its partner."""
        known = self.typing.known[value]
        assert isinstance(known, Type)
        tangent = torch.zeros_like(x)
        for one in known.factors:
            flat = one.atoms.reshape(-1)
            sign = self._sign[flat]
            if not sign.any() or not one.dims:
                continue
            order = np.argsort(flat, kind="stable")
            partner = np.where(sign != 0, self._partner[flat], flat[0])
            source = order[np.minimum(np.searchsorted(flat[order], partner), flat.size - 1)]
            moved = x.movedim(one.dims, tuple(range(len(one.dims))))
            rows = moved.reshape(flat.size, -1)
            turned = rows[torch.from_numpy(source)] * torch.from_numpy(sign)[:, None]
            tangent = tangent + turned.reshape(moved.shape).movedim(tuple(range(len(one.dims))), one.dims)
        return tangent

    def _run(
        self, operation: Operation, values: dict[int, Tensor], generator: torch.Generator, program: CapturedProgram
    ) -> list[Tensor]:
        def given(ref: ValueRef) -> Tensor:
            if ref.value not in values:
                values[ref.value] = self._invented(ref.value, values, generator, program)
            return values[ref.value]

        if operation.name.startswith("conserved::"):
            return self._storage(operation, given)
        args, kwargs = tree_map_only(ValueRef, given, (operation.args, operation.kwargs))
        kwargs = {
            name: entry
            for name, entry in kwargs.items()
            if name not in ("device", "layout", "pin_memory", "memory_format")
        }
        if kwargs.get("dtype") is not None and kwargs["dtype"].is_floating_point:
            kwargs["dtype"] = torch.float64
        stem, overload = operation.name.rsplit(".", 1)
        name = stem.removeprefix("aten::")
        if name.endswith("_") and not name.endswith("__"):
            args = (args[0].clone(), *args[1:])
        if name in ("view", "_unsafe_view"):
            return [args[0].reshape(args[1])]
        result = getattr(getattr(torch.ops.aten, name), overload)(*args, **kwargs)
        return [result] if isinstance(result, Tensor) else [one for one in result if isinstance(one, Tensor)]

    def _invented(
        self, value: int, values: dict[int, Tensor], generator: torch.Generator, program: CapturedProgram
    ) -> Tensor:
        """A value from outside: a constant as it is, something computed from constants again, else random numbers."""
        described = program.values[value]
        if described.constant is not None:
            constant = described.constant
            return constant.double() if constant.is_floating_point() else constant
        maker = program.maker(value)
        if maker is not None and not isinstance(self.typing.known.get(value), Type) and described.parameter is None:
            results = self._run(maker, values, generator, program)
            return results[maker.results.index(value)]
        if described.dtype.is_floating_point:
            return torch.randn(described.shape, generator=generator, dtype=torch.float64)
        if described.dtype == torch.bool:
            return torch.rand(described.shape, generator=generator) < 0.5
        if described.dtype.is_complex:
            return torch.randn(described.shape, generator=generator, dtype=torch.complex128)
        count = max(1, int(np.prod(described.shape)))
        return torch.arange(count).reshape(described.shape)

    def _storage(self, operation: Operation, given: Any) -> list[Tensor]:
        base = given(operation.args[0])
        if operation.name == "conserved::read":
            positions = _positions(operation.args[1], operation.args[2])
            assert positions is not None
            return [base.reshape(-1)[torch.from_numpy(positions)]]
        positions = _positions(operation.args[1], operation.args[3])
        assert positions is not None
        flat = base.reshape(-1).clone()
        written = given(operation.args[2]).reshape(-1)
        return [flat.index_copy(0, torch.from_numpy(positions.reshape(-1)), written).reshape(base.shape)]
