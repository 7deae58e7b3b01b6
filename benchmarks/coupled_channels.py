"""Torch-Pruning's groups of coupled channels against the spaces that laws live on, model by model.

Its dependency graph says which channels of which layers have to be pruned together; a law says which entries of which
parameters move together. A group whose layers are the legs of our symmetries is the same space read in another way.
Where a group has no law, or laws of a part of it, every layer that is left over has the operation named that ties its
channels together or ends their scaling: Torch-Pruning follows channels through norms and activations, where laws end.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from catalogue import Entry, entries
from conserved import LawSet, recognize
from conserved.inference.derivation import Derivation
from conserved.inference.rules import base_name
from conserved.inference.types.tensor_type import Type
from measure import RESULTS, commit, machine

SUMS = ("add", "sub", "index_add", "index_put", "scatter_add", "where", "addmm")
"""Operations whose operands must move alike."""

Slot = tuple[str, int]
"""A parameter and one of its axes."""


@dataclass(frozen=True, slots=True)
class Group:
    """Channels that Torch-Pruning prunes together: slots, and the indices along each."""

    slots: frozenset[Slot]
    channels: int


def groups_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Group]:
    """All groups of the dependency graph, each with the parameters and axes it touches."""
    import torch_pruning

    graph = torch_pruning.DependencyGraph()
    inputs = kwargs or args
    graph.build_dependency(model, example_inputs=inputs, verbose=False)
    names = {id(p): name for name, p in model.named_parameters()}
    result = []
    for group in graph.get_all_groups(root_module_types=[nn.modules.conv._ConvNd, nn.Linear, nn.Embedding]):
        slots: set[Slot] = set()
        for dependency, _ in group:
            module, out = dependency.target.module, "out" in dependency.handler.__name__
            slots |= _slots(module, out, names)
        if slots:
            result.append(Group(frozenset(slots), len(group[0][1])))
    return result


def _slots(module: Any, out: bool, names: dict[int, str]) -> set[Slot]:
    if isinstance(module, nn.Parameter):
        return {(names[id(module)], module.ndim - 1)} if id(module) in names else set()
    result: set[Slot] = set()
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    transposed = isinstance(module, nn.modules.conv._ConvTransposeNd)
    if isinstance(weight, nn.Parameter) and id(weight) in names:
        axis = 0 if weight.ndim == 1 else int(not out)
        if isinstance(module, nn.Embedding):
            axis = 1
        elif transposed:
            axis = 1 - axis
        result.add((names[id(weight)], axis))
    if isinstance(bias, nn.Parameter) and id(bias) in names and (out or getattr(weight, "ndim", 2) == 1):
        result.add((names[id(bias)], 0))
    return result


def spaces_of(laws: LawSet) -> dict[str, frozenset[Slot]]:
    """The slots of every symmetry that acts on an axis: its legs as parameters and axes."""
    result = {}
    for symmetry in laws:
        if symmetry.kind.linear or symmetry.kind.code == "one_scale":
            continue
        slots = frozenset((leg.view.parameter, axis) for leg in symmetry.legs for axis in faced(leg.view))
        result[symmetry.name] = slots
    return result


def faced(view: Any) -> set[int]:
    """Axes of the parameter itself that a view's rows run along."""
    owner: dict[int, int] = {}
    axis, left = 0, 1
    for index, size in enumerate(view.grid):
        while axis < len(view.shape) - 1 and left == view.shape[axis] and size > 1:
            axis, left = axis + 1, 1
        owner[index] = axis
        left *= size
    if view.kind if hasattr(view, "kind") else False:
        return set(owner.values())
    return {owner[index] for index in view.axes}


def ended_by(laws: LawSet, slot: Slot) -> str:
    """The operation that ties the channels of a parameter along an axis together, or ends their scaling."""
    derivation = laws.derivation
    assert isinstance(derivation, Derivation)
    name, axis = slot
    program, engine = derivation.typing.program, derivation.typing.engine
    fields = [f for region in engine.regions.get(name, []) for f in region.type.factors if axis in f.dims]
    atoms = np.unique(np.concatenate([f.atoms.reshape(-1) for f in fields])) if fields else np.zeros(0, dtype=np.int64)
    if not atoms.size or not atoms.any():
        return "its channels are entries of the output or the input" if fields else "all its channels move alike"
    # An atom that equals another one ends where that does.
    roots = engine.charges.sets.find(atoms)[0]
    for ending in engine.endings:
        if ending.shift:
            continue
        theirs = ending.atoms.reshape(-1)
        equal = engine.charges.sets.find(np.unique(theirs))[0]
        if np.isin(theirs, atoms).any() or np.isin(equal, roots[roots > 0]).any():
            if not 0 <= ending.origin < len(program.operations):
                return "the output"
            return base_name(program.operations[ending.origin].name).removeprefix("aten::").lstrip("_")
    for symmetry in laws:
        if not symmetry.kind.linear and name in symmetry.parameters:
            return "a space of ours that the group does not hold whole, or one scale for each channel"
    # A charge is zero without an end of its own if a sum ties it to one that has.
    if not roots.any():
        for number in derivation.typing.live:
            operation = program.operations[number]
            kind = base_name(operation.name).removeprefix("aten::")
            known = [derivation.typing.known.get(value) for value in operation.inputs()]
            moved = [f.atoms for one in known if isinstance(one, Type) for f in one.factors]
            if kind in SUMS and any(np.isin(part, atoms).any() for part in moved):
                return f"{kind}, to channels that do not move"
    return ""


def compared(entry: Entry) -> dict[str, Any]:
    """How each of its groups stands to ours, and what is ours alone."""
    model, args, kwargs = entry.build()
    try:
        groups = groups_of(model, args, kwargs)
    except Exception as problem:
        return {"unread": f"{type(problem).__name__}: {problem}"[:160]}
    model, args, kwargs = entry.build()
    laws = recognize(model, *args, loss=entry.loss, **kwargs)
    spaces = spaces_of(laws)
    rows = []
    met: set[str] = set()
    for group in groups:
        inside = {name for name, slots in spaces.items() if slots <= group.slots}
        touching = {name for name, slots in spaces.items() if slots & group.slots}
        covered = frozenset().union(*(spaces[name] for name in inside)) if inside else frozenset()
        met |= inside
        if inside and covered == group.slots:
            how = "same" if len(inside) == 1 or all(spaces[n] == group.slots for n in inside) else "refined"
        elif touching:
            how = "in part"
        else:
            how = "no law"
        left = {slot: ended_by(laws, slot) for slot in group.slots - covered}
        rows.append(
            {
                "slots": sorted(f"{name}:{axis}" for name, axis in group.slots),
                "channels": group.channels,
                "how": how,
                "symmetries": sorted(touching)[:6],
                "left": dict(Counter(left.values())),
                "unexplained": sorted(f"{name}:{axis}" for (name, axis), reason in left.items() if not reason),
            }
        )
    alone = sorted(name for name in spaces if name not in met)
    return {
        "groups": rows,
        "how": dict(Counter(r["how"] for r in rows)),
        "ours_alone": alone[:20],
        "ours_alone_count": len(alone),
    }


def main() -> None:
    """Compare on every model that both can read, print a table and save it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--file", type=Path, default=RESULTS / "coupled_channels_cpu_2026-11-16.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows: dict[str, Any] = {}
    for entry in entries():
        if options.only not in entry.name and options.only not in entry.source:
            continue
        torch.manual_seed(0)
        try:
            rows[entry.name] = {"source": entry.source, **compared(entry)}
        except ImportError:
            continue
        except Exception as problem:
            rows[entry.name] = {"source": entry.source, "error": f"{type(problem).__name__}: {problem}"[:200]}
        r = rows[entry.name]
        print(f"{entry.name}: {r.get('unread') or r.get('error') or (r['how'], r['ours_alone_count'])}", flush=True)
        totals: Counter[str] = Counter()
        for one in rows.values():
            totals.update(one.get("how", {}))
        groups = [group for r in rows.values() for group in r.get("groups", [])]
        summary = {
            "models": sum("how" in r for r in rows.values()),
            "groups_with_a_layer_unexplained": sum(bool(group["unexplained"]) for group in groups),
            "unread": sum("unread" in r for r in rows.values()),
        }
        record = {"commit": commit(), **machine(), "summary": summary | {"groups": dict(totals)}, "rows": rows}
        options.file.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
