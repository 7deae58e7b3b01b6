"""Names for symmetries: the module they live in, what they are, and which one of several.

Names follow from structure alone: from the roles of a symmetry's legs (a map's outputs or inputs, a gain, a bias, a
table), from what its charges went through and from the operation that does not see its shift. Only `WORDS` looks at
how people call things, to tell a query's scale from a key's.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from conserved.inference.rules import base_name
from conserved.inference.symmetries.assembly import Assembly
from conserved.inference.symmetries.exponentials import LOG_SCALE
from conserved.inference.symmetries.unnamed_symmetry import LegPart, UnnamedSymmetry
from conserved.symmetry import Symmetry

WORDS = {
    "query_scale": ("q", "q_proj", "wq", "query", "to_q", "q_b_proj", "queries", "c_q"),
    "key_scale": ("k", "k_proj", "wk", "key", "to_k", "keys", "c_k"),
}
"""Usual names of the maps that make queries or keys."""


@dataclass(slots=True)
class _Marks:
    homogeneous: np.ndarray
    gated: np.ndarray
    scores: np.ndarray
    """Atoms along which all entries of one tensor meet all of another."""


def name_symmetries(assembly: Assembly, symmetries: Sequence[UnnamedSymmetry]) -> list[Symmetry]:
    """Return symmetries with unique names, in the order of the program."""
    passed = assembly.engine.passed
    count = assembly.engine.charges.count
    marks = _Marks(
        _mark(passed.get("homogeneous", []), count),
        _mark(_gates(assembly), count),
        _alike(assembly, _mark(passed.get("scores", []), count)),
    )
    described = [(*_describe(assembly, unnamed_symmetry, marks), unnamed_symmetry) for unnamed_symmetry in symmetries]
    described.sort(key=lambda item: _place(assembly, item[-1]))
    counts = Counter((block, family, part) for block, family, part, _ in described)
    several = Counter((block, family) for block, family, _, _ in described)
    described = [
        (block, family, "" if family == "positions" and several[block, family] == 1 else part, element)
        for block, family, part, element in described
    ]
    numbers: dict[tuple[str, str, str], int] = defaultdict(int)
    result = []
    for block, family, part, element in described:
        key = (block, family, part)
        if (not part and (several[block, family] > 1 or family in _NUMBERED)) or counts[key] > 1:
            number = numbers[key]
            numbers[key] += 1
            part = f"{part}.{number}" if part else str(number)
        symmetry = Symmetry(
            block=block, family=family, part=part, kind=element.kind, legs=element.legs, epsilon=element.epsilon
        )
        assembly.parts[symmetry.name] = element.parts
        result.append(symmetry)
    return result


_NUMBERED = ("query_key", "inner_product", "value_output", "query_scale", "key_scale", "query_key_rotary")


def _gates(assembly: Assembly) -> list[np.ndarray]:
    """Return charges that meet a gate: a factor that depends on parameters, as the mask of a dropout does not."""
    program, typing = assembly.typing.program, assembly.typing
    trained = {value for value in program.parameters.values() if program.values[value].parameter is not None}
    for number in typing.live:
        operation = program.operations[number]
        shape_only = operation.name.partition(".")[0].endswith("_like") or "::new_" in operation.name
        if not shape_only and not trained.isdisjoint(operation.inputs()):
            trained.update(operation.results)
    return [atoms for origin, atoms in assembly.engine.gates if trained.issuperset(program.operations[origin].inputs())]


def _place(assembly: Assembly, unnamed_symmetry: UnnamedSymmetry) -> tuple[int, int, int]:
    first = min(unnamed_symmetry.parts, key=lambda part: part.region.origin)
    index = int(first.indices.reshape(-1)[0]) if first.indices.size else 0
    return first.region.origin, first.factor, index


def _mark(arrays: Sequence[np.ndarray], count: int) -> np.ndarray:
    """Return for every atom whether it is in one of the arrays."""
    result = np.zeros(count, dtype=bool)
    for array in arrays:
        result[array.reshape(-1)] = True
    return result


def _alike(assembly: Assembly, marked: np.ndarray) -> np.ndarray:
    """Return for every atom whether one that was matched with it is marked."""
    classes = assembly.classes[: marked.size]
    some = np.zeros(int(classes.max(initial=0)) + 1, dtype=bool)
    some[classes[marked]] = True
    result: np.ndarray = some[classes]
    return result


def _pair(unnamed_symmetry: UnnamedSymmetry, marks: _Marks) -> str:
    """Return two maps whose outputs are contracted: scores of all positions, or a product at each of them."""
    atoms = [_atoms(part) for part in unnamed_symmetry.parts]
    return "query_key" if any(marks.scores[a].any() for a in atoms) else "inner_product"


def _describe(assembly: Assembly, unnamed_symmetry: UnnamedSymmetry, marks: _Marks) -> tuple[str, str, str]:
    """Return block, family and part of a symmetry."""
    if unnamed_symmetry.family == LOG_SCALE:
        return _common([_module(leg.view.parameter) for leg in unnamed_symmetry.legs]), LOG_SCALE, ""
    if unnamed_symmetry.family:
        module, _, leaf = unnamed_symmetry.legs[0].view.parameter.rpartition(".")
        return module, unnamed_symmetry.family, leaf
    if unnamed_symmetry.kind.linear:
        return _shift(assembly, unnamed_symmetry)
    makes = [
        part for part in unnamed_symmetry.parts if part.region.role in ("map", "bias", "table") and part.factor == 0
    ]
    reads = [part for part in unnamed_symmetry.parts if part.region.role == "map" and part.factor > 0]
    gains = [part for part in unnamed_symmetry.parts if part.region.role == "gain"]
    modules = [_module(leg.view.parameter) for leg in unnamed_symmetry.legs]
    if unnamed_symmetry.kind.shared == "nothing":
        return _scale(unnamed_symmetry, makes, modules)
    if gains:
        if not reads and len({part.degree > 0 for part in gains}) == 2:
            return _common(modules), "query_key_gain", ""
        return _module(gains[0].region.name), "gain", ""
    leaves = {leg.view.parameter.rpartition(".")[2] for leg in unnamed_symmetry.legs}
    if len({*modules}) == 1 and leaves <= {"weight", "bias"} and not unnamed_symmetry.kind.positive:
        # A fused map is part of what computes attention; an attention with parameters of its own is that itself.
        modules = [modules[0].rpartition(".")[0]]
    if not unnamed_symmetry.kind.positive:
        if not reads:
            return _common(modules), _pair(unnamed_symmetry, marks), ""
        heads = any(part.indices.size < _size(part) for part in unnamed_symmetry.parts)
        return (
            _common(modules),
            "value_output" if heads or _through_batch(assembly, unnamed_symmetry) else "linear_pair",
            "",
        )
    atoms = [_atoms(part) for part in makes]
    homogeneous = any(marks.homogeneous[a].any() for a in atoms)
    gated = any(marks.gated[a].any() for a in atoms)
    if not reads and len({leg.degree > 0 for leg in unnamed_symmetry.legs}) == 1:
        return _common(modules), "forgotten_scales", ""
    if not reads:
        return _common(modules), _pair(unnamed_symmetry, marks), ""
    if not homogeneous and not gated and any(part.indices.size < _size(part) for part in unnamed_symmetry.parts):
        return _common(modules), "value_output", ""
    flat = all(sum(axis.size > 1 for axis in part.region.sets) <= 2 for part in unnamed_symmetry.parts)
    plain = "neurons" if homogeneous or flat else "channels"
    family = ("gates" if gated else "neurons") if homogeneous else "gated_neurons" if gated else plain
    if family == "gated_neurons":
        unnamed_symmetry.legs = tuple(
            sorted((leg.turned() for leg in unnamed_symmetry.legs), key=lambda leg: leg.degree < 0)
        )
    return _common(modules), family, ""


def _through_batch(assembly: Assembly, unnamed_symmetry: UnnamedSymmetry) -> bool:
    """Return whether the space went through a product with a batch axis, as the values of attention do."""
    part = unnamed_symmetry.parts[0]
    atoms = _atoms(part)
    return bool((assembly.engine.partition.spaces[atoms] != assembly.engine.partition.labels[atoms]).any())


def _scale(unnamed_symmetry: UnnamedSymmetry, makes: Sequence[LegPart], modules: Sequence[str]) -> tuple[str, str, str]:
    if any(part.region.role == "table" for part in unnamed_symmetry.parts):
        return _common(modules), "stream_scale", ""
    both = len({leg.degree > 0 for leg in unnamed_symmetry.legs}) == 2
    if both and all(part.region.role == "gain" for part in unnamed_symmetry.parts):
        return _common(modules), "query_key_gain", ""
    undivided = [part for part in unnamed_symmetry.parts if part.factor < 0]
    if (
        both
        and len(makes) + len(undivided) == len(unnamed_symmetry.parts)
        and len({part.region.name for part in unnamed_symmetry.parts}) == len(unnamed_symmetry.parts) == 2
    ):
        return _common(modules), "query_key", ""
    if len({_module(part.region.name) for part in unnamed_symmetry.parts}) == 1:
        module = modules[0]
        leaf = module.rpartition(".")[2]
        for family, words in WORDS.items():
            if leaf in words and not both:
                return module.rpartition(".")[0], family, ""
        return (module, "scale", "") if both else (module, "forgotten_scale", "")
    return _common(modules), "sum_scale" if both else "stream_scale", ""


def _shift(assembly: Assembly, unnamed_symmetry: UnnamedSymmetry) -> tuple[str, str, str]:
    names = [leg.view.parameter for leg in unnamed_symmetry.legs]
    modules = list(map(_module, names))
    if len(unnamed_symmetry.legs) > 1:
        if any(part.region.role == "table" for part in unnamed_symmetry.parts) or any(
            leg.view.n > 1 and leg.view.m > 1 for leg in unnamed_symmetry.legs
        ):
            return modules[0], "positions", modules[1].rpartition(".")[2] or names[1].rpartition(".")[2]
        wide = [sum(axis.size > 1 for axis in part.region.sets) for part in unnamed_symmetry.parts]
        if len(unnamed_symmetry.parts) == 2 and min(wide) == 1 < max(wide):
            return _common(modules), "positions", _leaf(names[wide.index(1)])
        if len({leg.degree > 0 for leg in unnamed_symmetry.legs}) == 1 and "softmax" in _forgiving(
            assembly, unnamed_symmetry.parts[0]
        ):
            return _common(modules), "inert_bias", ""
        return _common(modules), "bias_centre" if unnamed_symmetry.legs[0].view.m == 1 else "bias_shift", ""
    module, leaf = modules[0], names[0].rpartition(".")[2]
    operation = _forgiving(assembly, unnamed_symmetry.parts[0])
    if operation == "output":
        return module, "class_shift", leaf
    if "softmax" in operation:
        return (module, "shift", leaf) if unnamed_symmetry.legs[0].view.n > 1 else (module, "inert_bias", "")
    return (module, "centre", leaf) if unnamed_symmetry.legs[0].view.n > 1 else (module, "inert_bias", "")


def _forgiving(assembly: Assembly, part: LegPart) -> str:
    """Return the operation that does not see a shift."""
    shift = part.region.type.shifts[part.factor]
    atoms = shift.atoms.reshape(-1)[part.indices.reshape(-1)]
    program = assembly.typing.program
    for ending in assembly.engine.forgotten:
        if atoms.size and (ending.atoms == atoms[0]).any():
            if ending.origin >= len(program.operations):
                return "output"
            return base_name(program.operations[ending.origin].name)
    return ""


def _atoms(part: LegPart) -> np.ndarray:
    if part.factor < 0:
        return np.zeros(0, dtype=np.int64)
    return part.region.type.factors[part.factor].atoms.reshape(-1)[part.indices.reshape(-1)]


def _size(part: LegPart) -> int:
    return part.region.type.factors[part.factor].atoms.size if part.factor >= 0 else 0


def _leaf(parameter: str) -> str:
    """Return the last part of a parameter's name that tells something."""
    module, _, leaf = parameter.rpartition(".")
    return module.rpartition(".")[2] if leaf in ("weight", "bias") and module else leaf


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _common(modules: Sequence[str]) -> str:
    """Return the innermost module that holds all of these."""
    parts = [module.split(".") if module else [] for module in modules]
    shared: list[str] = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return ".".join(shared)
