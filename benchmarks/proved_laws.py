"""Certificates of adversarial models: does every law that they call proved hold on the real program?

Each small model gets a certificate. Its laws are polynomials h(θ); ⟨∇h(θ), ∇L(θ)⟩ is taken from backward passes of the
model itself in float64, at parameters of several sizes and on all of its inputs of the given shape.

    python benchmarks/proved_laws.py [--part 0/8] [--minutes 7] [--out folder]
"""

from __future__ import annotations

import argparse
import signal
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

import adversarial_blind
import adversarial_held_out
import adversarial_structures
from conserved import Certificate, certify
from conserved.certificates.form import Form
from conserved.verdict import Status
from measure import RESULTS, save

MOST_PARAMETERS = 50
"""Larger models would take minutes each."""

MOST_SECONDS = 15
"""Seconds after which the certificate of one model is given up."""

SIZES = (0.0, 0.3, 1.0, 3.0)
"""Standard deviations of the parameters at which laws are tested; 0 for the model's own parameters."""

LIMIT = 1e-6
FLOOR = 1e-9
"""Gradients below this share of all are rounding."""

Case = tuple[nn.Module, list[tuple[Any, ...]]]


def models() -> Iterator[tuple[str, Case]]:
    """Models of the adversarial sets that come with further inputs."""
    yield from adversarial_structures.structures()
    yield from adversarial_blind.blind()
    yield from adversarial_held_out.held_out()


def residuals(certificate: Certificate, model: nn.Module, inputs: list[tuple[Any, ...]]) -> dict[int, float]:
    """Return the largest relative residual of every group of laws, by its number."""
    own = dict(model.double().named_parameters())
    worst: dict[int, float] = {}
    for index, size in enumerate(SIZES):
        generator = torch.Generator().manual_seed(index)
        with torch.no_grad():
            for parameter in own.values() if size else ():
                parameter.copy_(size * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        for args in inputs:
            shapes = [(given.shape, first.shape) for given, first in zip(args, inputs[0], strict=True)]
            if any(given != first for given, first in shapes):
                continue
            grads = _slopes(model, own, args, generator)
            if grads is None:
                continue
            theta = torch.cat([own[name].detach().reshape(-1) for name in certificate.contents.parameters])
            grad = torch.cat([grads[name].reshape(-1) for name in certificate.contents.parameters])
            for number, group in enumerate(certificate.contents.laws):
                largest = max(_residual(form, theta, grad) for form in group)
                worst[number] = max(worst.get(number, 0.0), largest)
    return worst


def _slopes(
    model: nn.Module, own: dict[str, nn.Parameter], args: tuple[Any, ...], generator: torch.Generator
) -> dict[str, Tensor] | None:
    """Return gradients of a random loss; None where the model does not run or they are not finite."""
    model.zero_grad(set_to_none=True)
    wide = tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, args)
    try:
        outputs = [t for t in tree_leaves(model(*wide)) if isinstance(t, Tensor) and t.is_floating_point()]
    except Exception:
        # Parameters of another size may be outside of a model's domain.
        return None
    terms = [(t * torch.randn(t.shape, generator=generator).to(t)).sum() + torch.sin(2 * t + 1).sum() for t in outputs]
    loss = torch.stack([term.double() for term in terms]).sum()
    if not loss.requires_grad:
        return None
    loss.backward()
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for name, p in own.items()}
    return grads if all(bool(torch.isfinite(grad).all()) for grad in grads.values()) else None


def _residual(form: Form, theta: Tensor, grad: Tensor) -> float:
    direction = torch.zeros_like(theta)
    for i, j, coefficient in form.quadratic:
        direction[i] += coefficient * theta[j]
    for i, coefficient in form.linear:
        direction[i] += coefficient
    size = float((direction.abs() * grad.abs()).sum())
    floor = FLOOR * max(1.0, float(grad.norm())) * max(1.0, float(direction.norm()))
    return abs(float(direction @ grad)) / max(size, floor)


def _give_up(*_: Any) -> None:
    raise TimeoutError


def certified(name: str, model: nn.Module, inputs: list[tuple[Any, ...]]) -> dict[str, Any]:
    """Return what a certificate says of one model, and which of its laws fail."""
    signal.alarm(MOST_SECONDS)
    try:
        certificate = certify(model, *inputs[0])
    except Exception as problem:
        # The record says why there is no certificate: no rule, a gradient of the author's, no time.
        return {"name": name, "refused": type(problem).__name__, "why": str(problem)[:120]}
    finally:
        signal.alarm(0)
    counts = Counter(tier.value for tier, group in zip(certificate.tiers, certificate.contents.laws, strict=True))
    row: dict[str, Any] = {"name": name, "at most": certificate.at_most, "found": certificate.found, **counts}
    row["proved laws"] = sum(
        len(group)
        for tier, group in zip(certificate.tiers, certificate.contents.laws, strict=True)
        if tier is Status.PROVED
    )
    worst = residuals(certificate, model, inputs)
    failing = {number: r for number, r in worst.items() if r > LIMIT}
    if failing:
        row["false"] = {f"{certificate.tiers[n].value}: {certificate.formulas[n]}": r for n, r in failing.items()}
    return row


def main() -> None:
    """Certify every small model, print what fails and save the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", default="0/1", help="K/N: every N-th model from the K-th")
    parser.add_argument("--only", default="", help="models whose name holds this; nothing is saved then")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further model after that")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _give_up)
    first, parts = map(int, options.part.split("/"))
    end = time.time() + 60 * options.minutes
    rows: list[dict[str, Any]] = []
    for number, (name, (model, inputs)) in enumerate(models()):
        size = sum(parameter.numel() for parameter in model.parameters())
        small = 0 < size <= MOST_PARAMETERS and len(inputs[0]) == 1
        if number % parts != first or options.only not in name or not small or time.time() > end:
            continue
        torch.manual_seed(0)
        rows.append(certified(name, model, inputs))
        if "false" in rows[-1]:
            print(rows[-1], flush=True)
    totals = Counter(models=len(rows))
    for row in rows:
        totals["certified"] += "found" in row
        totals["proved laws"] += row.get("proved laws", 0)
        totals["models with a false law"] += "false" in row
        totals[f"refused: {row.get('refused', '')}"] += "refused" in row
    record = {"totals": {key: value for key, value in totals.items() if value or "false" in key}, "rows": rows}
    print(record["totals"])
    if not options.only:
        save("proved_laws" + (f"_part{first}" if parts > 1 else ""), record, options.out)


if __name__ == "__main__":
    main()
