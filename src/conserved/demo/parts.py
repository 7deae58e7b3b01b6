"""The parts of the demonstration; each puts its records into the store and returns nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from conserved.attention import probe
from conserved.audit import audit
from conserved.claims.ledger import claims, outcomes, recorded
from conserved.demo.decoder import decoder, next_byte_loss, plant_defect, text
from conserved.inference import recognize
from conserved.lab.demo import Demonstration, demonstrate
from conserved.lab.places import Here, Processes
from conserved.lab.reproduction import plan, reproduce
from conserved.report.plot import Axis
from conserved.track import Monitor, store_document
from conserved.verdict import Status

Tell = Callable[[str], None]
"""Says in a few words what is being done."""

MODEL = "decoder with grouped rotary attention and experts"
WATCHED = "AdamW"
CLEAN = "decoder, backward pass of PyTorch"
PLANTED = "decoder, planted defect"


def compare_steps(store: Path, seed: int, steps: int) -> Demonstration:
    """The laws of a decoder, and gradient descent to the same flow time with smaller and smaller steps."""
    found = demonstrate(seed=seed, steps=steps)
    size = sum(parameter.numel() for parameter in found.laws.parameters.values())
    store_document(store, "laws", MODEL, found.laws.to_dict() | {"independent": found.independent, "parameters": size})
    store_document(store, "figure", "order", order_figure(found))
    return found


def order_figure(found: Demonstration) -> dict[str, object]:
    """The drifts of all quantities against the step size, with their orders as findings."""
    steps = [run.step for run in found.runs]
    families = sorted(found.orders, key=lambda family: (family.startswith("not_"), family))
    traces = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": _quantity(family),
            "x": steps,
            "y": [run.drift[family] for run in found.runs],
            "line": {"dash": "dot" if family.startswith("not_") else "solid"},
            "marker": {"symbol": "x" if family.startswith("not_") else "circle"},
        }
        for family in families
        if found.runs[-1].drift[family] > 0
    ]
    ticks = {"tickvals": steps, "ticktext": [f"{step:g}" for step in steps]}
    findings = []
    for family, evidence in zip(found.orders, found.verdict.evidence, strict=True):
        still = evidence.value == 0.0
        order = found.orders[family]
        expected = 0.0 if family.startswith("not_") else 1.0
        findings.append(
            {
                "what": f"{_quantity(family)}: {'drift at the smallest step' if still else 'order in the step'}",
                "value": found.runs[-1].drift[family] if still else order,
                "low": None,
                "high": None,
                "expected": "rounding" if still else f"{expected:g}",
                "holds": still or abs(order - expected) < 0.3,
            }
        )
    return {
        "code": "order",
        "title": "The order test: what halving the step does to a drift",
        "caption": "Gradient descent over the same flow time. A law drifts in proportion to the step, a linear law not "
        "at all; the same quantity with one sign spoiled drifts however small the step.",
        "alt": f"Drift of {len(families)} quantities at steps {', '.join(f'{step:g}' for step in steps)}: laws fall "
        "with the step, spoiled quantities stay.",
        "data": traces,
        "layout": {
            "xaxis": Axis("step size τ", log=True, options=ticks).layout(),
            "yaxis": Axis("relative drift", log=True).layout(),
            "height": 460,
        },
        "findings": findings,
        "table": None,
        "section": "beyond",
    }


def _quantity(family: str) -> str:
    return f"{family.removeprefix('not_')} (spoiled)" if family.startswith("not_") else family


def reproduce_figures(store: Path, figures: Sequence[str], seeds: int, workers: int, tell: Tell) -> None:
    """The papers' experiments in small, several seeds trained together; what is stored already is not run again."""
    place = Processes(workers) if workers > 1 else Here()
    found = reproduce(plan(figures, seeds=seeds), store, place, say=tell)
    if found.sweep.failures:
        listing = "; ".join(f"{failure.task}: {failure.reason}" for failure in found.sweep.failures)
        raise RuntimeError(f"Experiments of the demonstration failed: {listing}")


def watch_training(store: Path, seed: int, steps: int, tell: Tell) -> None:
    """AdamW under a Monitor: the exact account of what it does to every law; then the attention it has learned."""
    model, examples = decoder(seed), text(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    laws = recognize(model, examples.inputs[:2], loss="cross_entropy")
    config = {"rate": 1e-3, "weight decay": 0.1, "seed": seed, "steps": steps, "text": "the standard library, as bytes"}
    with Monitor(model, optimizer, laws, sinks=store, run=WATCHED, config=config) as monitor:
        for step in range(steps):
            optimizer.zero_grad()
            next_byte_loss(model, examples).backward()
            optimizer.step()
            monitor.step()
            if step % 10 == 0:
                tell(f"step {step} of {steps}")
    store_document(
        store, "attention", f"decoder after {steps} steps of AdamW", probe(model, examples.inputs[:4]).record()
    )


def audit_gradients(store: Path, seed: int) -> None:
    """A backward pass as PyTorch makes it, and one with a defect planted in a norm."""
    for name, planted in ((CLEAN, False), (PLANTED, True)):
        model = decoder(seed)
        # The laws of the model as it should be: a planted defect is not part of what the audit is told.
        laws = recognize(model, text(seed).inputs[:2], loss="cross_entropy")
        defect = plant_defect(model) if planted else ""
        next_byte_loss(model, text(seed)).backward()
        found = audit(model, laws, precision=torch.float64).record()
        expected = "refuted" if planted else "verified"
        store_document(store, "audit", name, found | {"expected": expected, "planted": defect})


def judge_claims(store: Path, pattern: str | None, seconds: float, tell: Tell) -> None:
    """As many claims as fit into some seconds, those first that take moments: refutations by a witness."""
    chosen = [claim for claim in claims(pattern) if not claim.slow]
    order = [Status.REFUTED, Status.ANSWERED, Status.INCONCLUSIVE, Status.VERIFIED, Status.PROVED]
    was = recorded()
    chosen.sort(key=lambda claim: order.index(Status(was.get(claim.code, Status.PROVED))))
    start = time.monotonic()
    count = 0
    for found in outcomes(chosen, progress=lambda claim, place, total: tell(f"{claim.code}, {place + 1} of {total}")):
        store_document(store, "claim", found.claim.code, found.record())
        count += 1
        if time.monotonic() - start > seconds:
            break
    store_document(store, "demo", "claims", {"run": count, "known": len(claims(pattern))})
