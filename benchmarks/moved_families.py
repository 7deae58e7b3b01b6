"""The function of many models before and after moves: every exact symmetry by a random element, and each objective.

What is probed and not read off the program, rotations of residual streams and exchanges of units, is moved too.

Models of the catalogue, in random order until the time is used up, in evaluation mode at scattered weights. In float64
and float32 the relative change of the outputs is recorded; in bfloat16 also how far the model is from its own float32
twin, which is what its rounding amounts to.

    python benchmarks/moved_families.py --minutes 10
"""

from __future__ import annotations

import argparse
import copy
import random
import time
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import float64
from catalogue import Entry, entries
from conserved.auditing.lookup_tables import lost, tables
from conserved.discovery.inputs import tensors_in
from conserved.transform import equalize, exchanges, move, symmetries_of
from law_checks import Subject, gradients
from measure import save

OBJECTIVES = ("balanced", "range", "activation", "incoherent")


def outputs(model: nn.Module, args: Any, kwargs: Any) -> Tensor:
    """All numbers that a model returns; the randomness inside it is the same in every call."""
    torch.manual_seed(0)
    with torch.no_grad(), float64.kept():
        result = [t.double().flatten() for t in tensors_in(model(*args, **kwargs)) if t.is_floating_point()]
    return torch.cat(result)


def change(before: Tensor, after: Tensor) -> float:
    """Relative distance."""
    return float((after - before).norm() / before.norm().clamp_min(1e-300))


def elements(laws: Any) -> dict[Any, Tensor]:
    """One random element for every exact symmetry."""
    generator = torch.Generator().manual_seed(1)
    return {s: s.element(spread=0.3, generator=generator) for s in laws if s.exact}


def measured(entry: Entry) -> dict[str, Any]:
    """One row."""
    case = entry.subject()
    case.model.eval()
    laws = symmetries_of(case.model, *case.args, **case.kwargs)
    row: dict[str, Any] = {"name": entry.name, "source": entry.source, "symmetries": sum(s.exact for s in laws)}
    steps = elements(laws)
    if not steps:
        return row
    before = outputs(case.model, case.args, case.kwargs)
    start = copy.deepcopy(case.model.state_dict())
    trained = {name for name, p in case.model.named_parameters() if p.requires_grad}
    looked_up = tables(case.model)
    # A frozen leg, and the padding row of a table, move with the others and have no gradient: the function is kept, no
    # identity says so.
    exact = laws.select(
        lambda s: s.exact and s.family != "unused" and trained.issuperset(s.parameters) and not lost(s, looked_up)
    )
    row["identity before"] = identity(exact, case)
    done = move(case.model, steps, values=False)
    row["float64"] = change(before, outputs(case.model, case.args, case.kwargs))
    row["identity after"] = identity(exact, case)
    row["moved by"] = max(change(start[n], case.model.state_dict()[n]) for n in done.parameters)
    move(case.model, done.inverse, values=False)
    row["undone"] = max(change(start[n], case.model.state_dict()[n]) for n in done.parameters)
    case.model.load_state_dict(start)
    for objective in OBJECTIVES:
        equalize(case.model, laws=laws, objective=objective, batches=[case.kwargs or case.args])
        row[objective] = change(before, outputs(case.model, case.args, case.kwargs))
        case.model.load_state_dict(start)
    equalize(case.model, *case.args, objective="incoherent", **case.kwargs)
    row["incoherent, stream too"] = change(before, outputs(case.model, case.args, case.kwargs))
    case.model.load_state_dict(start)
    alike = exchanges(case.model, *case.args, **case.kwargs)
    generator = torch.Generator().manual_seed(2)
    move(case.model, {s: s.element(generator=generator) for s in alike}, values=False)
    row["exchanged"] = change(before, outputs(case.model, case.args, case.kwargs))
    row["exchanges"] = len(alike)
    case.model.load_state_dict(start)
    for dtype in (torch.float32, torch.bfloat16):
        model = copy.deepcopy(case.model).to(dtype)
        args, kwargs = tree_map(
            lambda t, d=dtype: t.to(d) if isinstance(t, Tensor) and t.is_floating_point() else t,
            (case.args, case.kwargs),
        )
        try:
            first = outputs(model, args, kwargs)
            move(model, steps, values=False)
            row[str(dtype)[6:]] = change(first, outputs(model, args, kwargs))
            row[f"{str(dtype)[6:]} against float64"] = change(before, first)
        except RuntimeError as problem:
            row[str(dtype)[6:]] = str(problem).splitlines()[0][:100]
    return row


def identity(laws: Any, case: Subject) -> float:
    """The largest relative residual of a gradient identity at the model's weights, silent ones left out."""
    if not len(laws):
        return 0.0
    grads = gradients(case)
    theta = {name: p.detach() for name, p in case.model.named_parameters()}
    balance = laws.balance(grads, theta)
    pull = float(torch.stack([g.norm() for g in grads.values()]).norm())
    residuals = balance.residuals[balance.scales > 1e-10 * max(pull, 1e-300)]
    return float(residuals.max(initial=0.0))


def main() -> None:
    """Measure until the time is used up, print, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    listed = [entry for entry in entries() if options.only in entry.name]
    random.Random(0).shuffle(listed)
    rows, failed = [], {}
    start = time.monotonic()
    for entry in listed:
        if time.monotonic() - start > 60 * options.minutes:
            break
        try:
            rows.append(measured(entry))
            print({k: f"{v:.0e}" if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
        except Exception as problem:
            failed[entry.name] = (
                f"{type(problem).__name__}: {str(problem).splitlines()[0][:150] if str(problem) else ''}"
            )
            print(entry.name, failed[entry.name], flush=True)
    if not options.only:
        print(save("moved_families", {"rows": rows, "failed": failed, "listed": len(listed)}))


if __name__ == "__main__":
    main()
