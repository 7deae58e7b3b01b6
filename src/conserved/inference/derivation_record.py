"""A law's derivation as plain data: the program, the entries of parameters that the law moves, how tensors move.

What is written can be checked without the inference that found it, by `conserved.inference.checker`. The types of
tensors are those of the inference, in the one direction of the law's group that the checker draws as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from scipy import sparse
from scipy.sparse.linalg import lsqr

from conserved.inference.capture import CapturedProgram, Operation, ValueRef
from conserved.inference.checker import moved_parameters
from conserved.inference.motions import CLOSE, Motion
from conserved.inference.symmetries import Assembly
from conserved.inference.types import Type, spread
from conserved.inference.typing import Typing
from conserved.symmetry import Symmetry

LARGEST = 2_000_000
"""Entries of the largest parameter whose motion is written out."""


class Unwritten(Exception):
    """A law whose derivation is not written out, and why."""


def written(typing: Typing, assembly: Assembly, symmetry: Symmetry, program: Mapping[str, Any]) -> dict[str, Any]:
    """The derivation of a law of a program that was written by `written_program`.

    Raises:
        Unwritten: for models too large.
    """
    law = written_law(symmetry)
    return {"law": law, "program": program, "types": _types(typing, assembly, law, program)}


def written_law(symmetry: Symmetry) -> dict[str, Any]:
    """A law as plain data: for every leg the places of a parameter's entries, row by row, and the power it moves by."""
    legs = []
    for leg in symmetry.legs:
        view = leg.view
        size = int(np.prod(view.shape))
        if size > LARGEST:
            raise Unwritten("its parameters are too large to write out; follow a smaller model of the same kind")
        places = view.matrix(torch.arange(size).reshape(view.shape)).tolist()
        legs.append(
            {"parameter": view.parameter, "places": places, "degree": float(leg.degree), "offset": float(view.offset)}
        )
    return {"name": symmetry.name, "kind": symmetry.kind.code, "epsilon": float(symmetry.epsilon), "legs": legs}


def written_program(typing: Typing, classes: int | None) -> dict[str, Any]:
    """All operations of a program in order, with the shapes of what they compute and the constants they look up by."""
    program = typing.program
    if any(int(np.prod(program.values[v].shape)) > LARGEST for v in program.parameters.values()):
        raise Unwritten("its parameters are too large to write out; follow a smaller model of the same kind")
    steps, used = [], set(program.outputs) | set(program.parameters.values())
    for operation in program.operations:
        if operation.results and operation.results[0] in typing.deferred:
            continue
        step = _step(typing, operation)
        steps.append(step)
        used.update((*_values(step["arguments"]), *_values(step["named"]), *operation.results))
    return {
        "values": {str(value): _described(program, value) for value in sorted(used)},
        "parameters": {
            name: value for name, value in program.parameters.items() if program.values[value].parameter is not None
        },
        "steps": steps,
        "outputs": list(program.outputs),
        "classes": classes,
        "read": [value for value in program.read if program.values[value].dtype.is_floating_point],
        "hooked": list(program.hooked),
        "hooked_values": sorted(program.hooked_values),
        "shared": list(program.shared),
    }


def _described(program: CapturedProgram, value: int) -> dict[str, Any]:
    described = program.values[value]
    entry: dict[str, Any] = {"shape": list(described.shape)}
    constant = described.constant
    if described.dtype == torch.bool:
        entry["dtype"] = "bool"
    if not described.dtype.is_floating_point and not described.dtype.is_complex:
        entry["whole"] = True
    if constant is not None:
        if not constant.is_floating_point() and not constant.is_complex():
            entry["constant"] = constant.tolist()
        elif not bool(constant.any()):
            entry["zero"] = True
        if constant.numel() == 1 and not constant.is_complex():
            entry["number"] = float(constant)
    return entry


def _step(typing: Typing, operation: Operation) -> dict[str, Any]:
    arguments: list[Any] = [_plain(one) for one in operation.args]
    name = operation.name
    deferred = [value for value in operation.inputs() if value in typing.deferred]
    if deferred:
        left, right = typing.deferred[deferred[0]]
        overload = operation.name.partition(".")[2]
        name = f"conserved::summed_product.{overload}"
        arguments = [_plain(left), _plain(right), *arguments[1:]]
    found: dict[str, Any] = {
        "operation": name,
        "arguments": arguments,
        "named": {key: _plain(one) for key, one in operation.kwargs.items()},
        "results": list(operation.results),
        "module": operation.module,
        "line": operation.line,
    }
    if operation.stopped:
        found["stopped"] = True
    if operation.name.startswith("aten::embedding.") and len(operation.args) > 2 and int(operation.args[2]) >= 0:
        table = operation.args[0]
        row = typing.program.padding_row(table.value, int(operation.args[2])) if isinstance(table, ValueRef) else None
        found["padding_zero"] = row is not None and not bool(row.any())
    return found


def _types(
    typing: Typing, assembly: Assembly, law: Mapping[str, Any], program: Mapping[str, Any]
) -> dict[str, list[dict[str, Any]]]:
    """How tensors are scaled, as the inference has it; nothing for translations, and where entries are looked up."""
    if law["kind"] == "translation":
        return {}
    moved = moved_parameters(law, program)
    charges = _charges(typing, assembly, moved)
    if charges is None:
        return {}
    found: dict[str, list[dict[str, Any]]] = {}
    for value, known in typing.known.items():
        if not isinstance(known, Type) or known.zero or any(one.virtual for one in known.factors):
            continue
        arrays = [(list(one.dims), np.round(float(one.weight) * charges[one.atoms], 3)) for one in known.factors]
        total = [
            {"axes": axes, "array": array.tolist()} for axes, array in arrays if np.abs(array).max(initial=0) > CLOSE
        ]
        if total:
            found[str(value)] = total
    return found


def _charges(typing: Typing, assembly: Assembly, moved: Mapping[str, Motion]) -> np.ndarray | None:
    """The charge of every atom: the solution of the equations that moves the parameters as the law does."""
    solution = assembly.charges
    rows, targets = [], []
    for name, regions in typing.engine.regions.items():
        for region in regions:
            if not region.type.factors:
                continue
            sizes = tuple(chosen.size for chosen in region.sets)
            total: Any = 0
            for one in region.type.factors:
                index = np.broadcast_to(spread(one, range(len(sizes)), sizes), sizes).reshape(-1)
                total = total + solution.rows(index) * float(one.weight)
            rows.append(total)
            known = moved.get(name)
            targets.append(
                np.zeros(int(np.prod(sizes)))
                if known is None
                else known.charge.reshape(known.shape)[np.ix_(*region.sets)].reshape(-1)
            )
    if not rows:
        return None
    matrix, target = sparse.vstack(rows).tocsr(), np.concatenate(targets)
    coordinates = np.zeros(matrix.shape[1])
    for _ in range(3):  # each round removes the rounding of the last
        coordinates += lsqr(matrix, target - matrix @ coordinates, atol=1e-15, btol=1e-15, iter_lim=20_000)[0]
    if float(np.abs(matrix @ coordinates - target).max(initial=0.0)) > CLOSE / 4:
        return None
    return np.asarray(solution.expand @ coordinates)


def _values(argument: Any) -> list[int]:
    if isinstance(argument, Mapping):
        return [argument["value"]] if "value" in argument else [v for one in argument.values() for v in _values(one)]
    return [v for one in argument for v in _values(one)] if isinstance(argument, list) else []


def _plain(argument: Any) -> Any:
    """An argument as plain data: tensors by number."""
    if isinstance(argument, ValueRef):
        return {"value": argument.value}
    if isinstance(argument, list | tuple):
        return [_plain(one) for one in argument]
    if isinstance(argument, Mapping):
        return {str(key): _plain(one) for key, one in argument.items()}
    return argument if isinstance(argument, int | float | str | bool) or argument is None else str(argument)
