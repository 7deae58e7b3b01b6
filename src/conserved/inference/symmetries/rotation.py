"""Whether pairs of charges that are tied belong to one complex number: rotary positions, complex products.

Operations that tie the charges of two entries (x cos − y sin beside y cos + x sin) may leave their rotation free as
well, J = (0 −1; 1 0) on each pair. That is decided on the operations between the maps that make the entries and the
contraction that ends them: they are run once on random numbers in double precision, with the rotation as tangent,
and what they end in must not move. These operations are polynomial in what they are given, so a motion that vanishes
at random numbers vanishes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from conserved._torch_compat import tree_map_only
from conserved.inference.program.captured_program import CapturedProgram, Operation, ValueRef
from conserved.inference.rules.views import positions_in
from conserved.inference.types.tensor_type import Atoms, Type
from conserved.inference.typing import Typing

STILL = 1e-9
"""Largest tangent, relative to what moved, of something that does not move."""


_PRODUCTS = ("aten::bmm.default", "aten::baddbmm.default")
"""Operations whose last two arguments are multiplied."""


def _with_tangents(args: Sequence[Any]) -> list[Any]:
    """Return arguments with a tangent of zeros for each tensor that has none, if another one moves.

    Tangents that are absent become tensors without memory, whose products are decided in Python: the first of them
    imports the whole compiler, which takes seconds.
    """
    duals = [isinstance(arg, Tensor) and forward_ad.unpack_dual(arg).tangent is not None for arg in args]
    if not any(duals):
        return [*args]
    return [
        forward_ad.make_dual(arg, torch.zeros_like(arg))
        if isinstance(arg, Tensor) and not dual and (arg.is_floating_point() or arg.is_complex())
        else arg
        for arg, dual in zip(args, duals, strict=True)
    ]


def _moves(result: Tensor) -> bool:
    """Return whether a value has a tangent that is more than rounding."""
    primal, tangent = forward_ad.unpack_dual(result)
    if tangent is None or not tangent.numel():
        return False
    size = primal.abs()
    # Masks add −∞ or the like: their size says nothing about what moves.
    usual = torch.where(size < 1e6, size, 0.0).max()
    return float(tangent.abs().max()) > STILL * (1 + float(usual))


class Rotations:
    """Decides about rotations, each layout of operations once."""

    def __init__(self, typing: Typing) -> None:
        self.typing = typing
        self._uses: dict[int, list[int]] = {}
        for number in typing.live:
            for value in typing.program.operations[number].inputs():
                self._uses.setdefault(value, []).append(number)
        self._decided: dict[str, bool] = {}
        self._outsides: dict[str, int] = {}
        self._digests: dict[int, str] = {}
        values, low, high = [], [], []
        for value, known in typing.known.items():
            if isinstance(known, Type):
                for factor in known.factors:
                    if not factor.atoms.size:
                        continue
                    values.append(value)
                    low.append(int(factor.atoms.min()))
                    high.append(int(factor.atoms.max()))
        self._values, self._low, self._high = (np.array(x, dtype=np.int64) for x in (values, low, high))
        self._makers = {
            result: number for number in typing.live for result in typing.program.operations[number].results
        }

    def hold(self, pairs: Atoms) -> bool:
        """Return whether turning the first atom of every pair into the second leaves the program's function alone.

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
        key = self._layout(sources, slice_)
        if key not in self._decided:
            try:
                self._decided[key] = self._still(sources, slice_)
            except (RuntimeError, NotImplementedError, TypeError, AttributeError, AssertionError, IndexError):
                self._decided[key] = False
        return self._decided[key]

    def _layout(self, sources: Sequence[int], slice_: Sequence[int]) -> str:
        """Return everything that a decision depends on, the same for layers that are alike.

        Values are numbered by order of appearance.
        """
        program = self.typing.program
        labels = {value: f"·{index}" for index, value in enumerate(sources)}

        def label(ref: ValueRef) -> str:
            if ref.value not in labels:
                labels[ref.value] = outside(ref.value)
            return labels[ref.value]

        def outside(value: int) -> str:
            described, maker = program.values[value], self._recompute(value)
            if self._constant(value) is not None:
                text = self._digest(value)
            elif maker is not None:
                text = f"{written(maker)}[{maker.results.index(value)}]"
            else:
                text = f"{len(labels)}{described.dtype}{tuple(described.shape)}"
            return f"^{self._outsides.setdefault(text, len(self._outsides))}"

        def written(operation: Operation) -> str:
            return f"{operation.name}{tree_map_only(ValueRef, label, (operation.args, operation.kwargs))}"

        lines = [
            f"{program.values[value].shape}{[(dims, sign.tobytes(), where.tobytes()) for dims, sign, where in turns]}"
            for value, turns in ((value, self._turns(value)) for value in sources)
        ]
        for number in slice_:
            operation = program.operations[number]
            line = written(operation)
            for value in operation.results:
                labels.setdefault(value, f"·{len(labels)}")
                line += f" {labels[value]}{'*' if self._carries(value) else ''}"
            lines.append(line)
        return "\n".join(lines)

    def _constant(self, value: int) -> Tensor | None:
        """Return the entries of a value that is the same in every call, on the host."""
        program = self.typing.program
        table = program.tables.get(value)
        return program.values[value].constant if table is None else table.detach().cpu()

    def _digest(self, value: int) -> str:
        """Return a digest of a constant's type, shape and bytes."""
        if value not in self._digests:
            constant = self._constant(value)
            assert constant is not None
            content = constant.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            digest = hashlib.blake2b(content, digest_size=16).hexdigest()
            self._digests[value] = f"{constant.dtype}{tuple(constant.shape)}{digest}"
        return self._digests[value]

    def _carrying(self, pairs: Atoms) -> set[int]:
        """Return the values whose type has one of these atoms."""
        low, high = int(pairs.min()), int(pairs.max())
        near = self._values[(self._high >= low) & (self._low <= high)]
        result = set()
        for value in near:
            known = self.typing.known[int(value)]
            assert isinstance(known, Type)
            if any((self._sign[factor.atoms] != 0).any() for factor in known.factors):
                result.add(int(value))
        return result

    def _carries(self, value: int) -> bool:
        return value in self._carriers

    def _sources(self) -> list[int]:
        """Return values that carry the atoms and are made from nothing that does."""
        program = self.typing.program
        parameters = {program.parameters[name] for name in self.typing.engine.regions}
        result = []
        for value in sorted(self._carriers):
            number = self._makers.get(value)
            if number is None:
                continue
            operation = program.operations[number]
            before = [v for v in operation.inputs() if v not in parameters and v in self._carriers]
            if not before and not self._is_view(operation):
                result.append(value)
        return result

    def _is_view(self, operation: Operation) -> bool:
        """Return whether an operation only re-arranges a parameter."""
        return (
            all(not isinstance(self.typing.known.get(v), Type) for v in operation.inputs())
            and len(operation.inputs()) == 1
        )

    def _slice(self, sources: Sequence[int]) -> list[int]:
        """Return the operations that what carries the atoms goes through."""
        carrying, operations = set(sources), set()
        program = self.typing.program
        frontier = list(sources)
        while frontier:
            value = frontier.pop()
            for number in self._uses.get(value, []):
                if number in operations:
                    continue
                operations.add(number)
                for result in program.operations[number].results:
                    if self._carries(result) and result not in carrying:
                        carrying.add(result)
                        frontier.append(result)
        return sorted(operations)

    def _still(self, sources: Sequence[int], slice_: Sequence[int]) -> bool:
        """Return whether what the operations end in does not move."""
        program = self.typing.program
        generator = torch.Generator().manual_seed(0)
        values: dict[int, Tensor] = {}
        last = self._last_uses(slice_)
        with forward_ad.dual_level():
            for value in sources:
                x = torch.randn(program.values[value].shape, generator=generator, dtype=torch.float64)
                values[value] = forward_ad.make_dual(x, self._rotate(value, x))
            for number in slice_:
                operation = program.operations[number]
                if self._is_end(operation):
                    if _moves(self._sketch(operation, values, generator)):
                        return False
                else:
                    results = self._run(operation, values, generator, program)
                    for value, result in zip(operation.results, results, strict=False):
                        if value not in values:
                            values[value] = result
                            number_like = result.is_floating_point() or result.is_complex()
                            if not self._carries(value) and number_like and _moves(result):
                                return False
                for value in [value for value in values if self._carries(value) and last.get(value, -1) <= number]:
                    del values[value]
        return True

    def _is_end(self, operation: Operation) -> bool:
        """Return whether an operation is a product of two matrices that leaves nothing of the atoms."""
        if operation.name not in _PRODUCTS:
            return False
        added = [entry.value for entry in operation.args[:-2] if isinstance(entry, ValueRef)]
        return not any(map(self._carries, (*added, *operation.results)))

    def _last_uses(self, slice_: Sequence[int]) -> dict[int, int]:
        """Return for every value the last of these operations that reads it, or computes something from it again."""
        last: dict[int, int] = {}
        for number in slice_:
            frontier = list(self.typing.program.operations[number].inputs())
            while frontier:
                value = frontier.pop()
                if last.get(value) != number:
                    last[value] = number
                    maker = self._recompute(value)
                    frontier += maker.inputs() if maker is not None else []
        return last

    def _sketch(self, operation: Operation, values: dict[int, Tensor], generator: torch.Generator) -> Tensor:
        """Return uᵀABv for random u and v instead of AB: as still as the product is, and of its factors' size."""
        left, right = (self._given(entry, values, generator) for entry in operation.args[-2:])
        u = torch.randn(left.shape[:-1], generator=generator, dtype=torch.float64)
        v = torch.randn((*right.shape[:-2], right.shape[-1]), generator=generator, dtype=torch.float64)
        return ((u.unsqueeze(-2) @ left) @ (right @ v.unsqueeze(-1))).flatten()

    def _turns(self, value: int) -> list[tuple[tuple[int, ...], np.ndarray, np.ndarray]]:
        """Return, for the dimensions of each factor, the sign with which an entry turns and the index it comes from."""
        known = self.typing.known[value]
        assert isinstance(known, Type)
        result = []
        for factor in known.factors:
            flat = factor.atoms.reshape(-1)
            sign = self._sign[flat]
            if not sign.any() or not factor.dims:
                continue
            order = np.argsort(flat, kind="stable")
            partner = np.where(sign != 0, self._partner[flat], flat[0])
            source = order[np.minimum(np.searchsorted(flat[order], partner), flat.size - 1)]
            result.append((tuple(factor.dims), sign, source))
        return result

    def _rotate(self, value: int, x: Tensor) -> Tensor:
        """Return J·x: every entry at an atom becomes plus or minus the entry at its partner."""
        tangent = torch.zeros_like(x)
        for dims, sign, source in self._turns(value):
            moved = x.movedim(dims, tuple(range(len(dims))))
            rows = moved.reshape(sign.size, -1)
            turned = rows[torch.from_numpy(source)] * torch.from_numpy(sign)[:, None]
            tangent = tangent + turned.reshape(moved.shape).movedim(tuple(range(len(dims))), dims)
        return tangent

    def _given(self, ref: ValueRef, values: dict[int, Tensor], generator: torch.Generator) -> Tensor:
        if ref.value not in values:
            values[ref.value] = self._draw_value(ref.value, values, generator, self.typing.program)
        return values[ref.value]

    def _run(
        self, operation: Operation, values: dict[int, Tensor], generator: torch.Generator, program: CapturedProgram
    ) -> list[Tensor]:
        def given(ref: ValueRef) -> Tensor:
            return self._given(ref, values, generator)

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
        result = getattr(getattr(torch.ops.aten, name), overload)(*_with_tangents(args), **kwargs)
        return [result] if isinstance(result, Tensor) else [tensor for tensor in result if isinstance(tensor, Tensor)]

    def _recompute(self, value: int) -> Operation | None:
        """Return what computes a value from outside again, if it is made of constants and inputs."""
        if isinstance(self.typing.known.get(value), Type) or self.typing.program.values[value].parameter is not None:
            return None
        return self.typing.program.maker(value)

    def _draw_value(
        self, value: int, values: dict[int, Tensor], generator: torch.Generator, program: CapturedProgram
    ) -> Tensor:
        """Return a value from outside: a constant as it is, what constants determine, or random numbers."""
        described = program.values[value]
        constant = self._constant(value)
        if constant is not None:
            return constant.double() if constant.is_floating_point() else constant
        maker = self._recompute(value)
        if maker is not None:
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
            positions = positions_in(operation.args[1], operation.args[2])
            assert positions is not None
            return [base.reshape(-1)[torch.from_numpy(positions)]]
        positions = positions_in(operation.args[1], operation.args[3])
        assert positions is not None
        flat = base.reshape(-1).clone()
        written = given(operation.args[2]).reshape(-1)
        return [flat.index_copy(0, torch.from_numpy(positions.reshape(-1)), written).reshape(base.shape)]
