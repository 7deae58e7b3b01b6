"""Parameters, and rows of tables, that get no gradient whatever the loss: each of their numbers is conserved."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from conserved.inference.program.captured_program import CapturedProgram, ValueRef
from conserved.inference.rules import base_name
from conserved.inference.typing import Typing
from conserved.symmetry import Leg, Symmetry, Translation, View


def inert(typing: Typing) -> list[Symmetry]:
    """Return laws of what no gradient reaches.

    Unused parameters, routers without a say, rows that are never looked up.
    """
    program = typing.program
    result = []
    varies = _reads_vary(program)
    used = {value for operation in program.operations for value in operation.inputs()}
    for name, value in program.parameters.items():
        if (
            program.values[value].parameter is None
            or name in typing.reached
            or not np.prod(program.values[value].shape)
        ):
            continue
        shape = program.values[value].shape
        family = "frozen" if value in used else "unused"
        if family == "unused" and varies:
            continue
        result.append(_still(name, family, View.of(name, shape, grid=(1, *shape), axes=0)))
    for name, rows in _unread_rows(typing).items():
        shape = program.values[program.parameters[name]].shape
        result.append(_still(name, "unused", View.of(name, shape, grid=(1, *shape), axes=0, pick={1: rows})))
    for name, axis, run in () if varies else _unused_slices(typing):
        shape = program.values[program.parameters[name]].shape
        result.append(
            _still(
                name,
                "unused",
                View.of(name, shape, grid=(1, *shape), axes=0, pick={1 + axis: run}),
                f"{run[0]}:{run[1]}",
            )
        )
    for name, row in _padding(typing).items():
        shape = program.values[program.parameters[name]].shape
        result.append(
            _still(name, "inert_padding", View.of(name, shape, grid=(1, *shape), axes=0, pick={1: (row, row + 1)}))
        )
    return result


_SHAPED_BY_VALUES = ("aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim")
"""Operations whose results have as many entries as their inputs' values say."""


def _reads_vary(program: CapturedProgram) -> bool:
    """Return whether numbers decide what a program reads: experts that no token chose may be chosen by the next."""
    if program.decisions or any(program.values[value].constant is None for value in program.read):
        return True
    return any(
        base_name(operation.name) in _SHAPED_BY_VALUES
        and any(program.values[value].constant is None for value in operation.results)
        for operation in program.operations
    )


def read_in_part(typing: Typing) -> frozenset[str]:
    """Return the parameters of which a program reads some entries only, as a process does that takes its slice of a
    table.
    """
    program, names = typing.program, set()
    for name, regions in typing.engine.regions.items():
        shape = program.values[program.parameters[name]].shape
        for dim, size in enumerate(shape):
            used = np.zeros(size, dtype=bool)
            for region in regions:
                used[region.sets[dim]] = True
            if not used.all():
                names.add(name)
    return frozenset(names)


def _unused_slices(typing: Typing) -> Iterator[tuple[str, int, tuple[int, int]]]:
    """Yield slices of parameters of which only other slices are used."""
    program = typing.program
    for name, regions in typing.engine.regions.items():
        shape = program.values[program.parameters[name]].shape
        cut = {dim for region in regions for dim, size in enumerate(shape) if region.sets[dim].size != size}
        if len(cut) != 1:
            continue
        (dim,) = cut
        used = np.zeros(shape[dim], dtype=bool)
        for region in regions:
            used[region.sets[dim]] = True
        edges = np.flatnonzero(np.diff(np.concatenate([[True], used, [True]]).astype(np.int8)))
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            yield name, dim, (int(start), int(stop))


def _still(name: str, family: str, view: View, part: str = "") -> Symmetry:
    module, _, leaf = name.rpartition(".")
    if part:
        return Symmetry(block=module, family=family, part=f"{leaf}.{part}", kind=Translation(), legs=(Leg(view),))
    return Symmetry(
        block=module,
        family=family,
        part=leaf if leaf not in ("weight", "") or family == "frozen" else "",
        kind=Translation(),
        legs=(Leg(view),),
    )


def _tables(typing: Typing) -> dict[str, list[tuple[int, int]]]:
    """Return parameters that are only looked up: for each look-up the index and the padding row."""
    program = typing.program
    tables: dict[str, list[tuple[int, int]]] = {}
    other: set[str] = set()
    for number in typing.live:
        operation = program.operations[number]
        for index, value in enumerate(operation.inputs()):
            name = program.values[value].parameter
            if name is None:
                continue
            if (
                base_name(operation.name) == "aten::embedding"
                and index == 0
                and isinstance(operation.args[1], ValueRef)
            ):
                padding = operation.args[2] if len(operation.args) > 2 else operation.kwargs.get("padding_idx", -1)
                tables.setdefault(name, []).append((operation.args[1].value, -1 if padding is None else int(padding)))
            else:
                other.add(name)
    return {name: uses for name, uses in tables.items() if name not in other}


def _unread_rows(typing: Typing) -> dict[str, tuple[int, int]]:
    """Return rows before the first that a fixed index reads, as in tables of positions that begin with an offset."""
    program = typing.program
    result = {}
    for name, uses in _tables(typing).items():
        first = []
        for index, _ in uses:
            constant = program.values[index].constant
            maker = program.maker(index)
            if constant is None or maker is None or not constant.numel():
                break
            first.append(int(constant.min()))
        else:
            if first and min(first) > 0:
                result[name] = (0, min(first))
    return result


def _padding(typing: Typing) -> dict[str, int]:
    """Return rows that look-ups leave out of the gradient."""
    return {
        name: uses[0][1]
        for name, uses in _tables(typing).items()
        if uses[0][1] >= 0 and all(padding == uses[0][1] for _, padding in uses)
    }
