"""The demonstration: find the laws of a small decoder, train it on real text, see what is conserved and what is not."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from conserved.blocks import DecoderLM
from conserved.impostors import impostors
from conserved.lab.data import VOCABULARY, sequences
from conserved.lab.order import Descent, descend, slopes
from conserved.laws import LawSet
from conserved.recognize import recognize
from conserved.table import renderable
from conserved.verdict import Evidence, Verdict

_ROUNDING = 1e-12
"""Relative drift below which a float64 run shows nothing but rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """What the demonstration found."""

    laws: LawSet
    independent: int
    runs: tuple[Descent, ...]
    orders: dict[str, float]
    verdict: Verdict

    def record(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "laws": len(self.laws),
            "numbers": self.laws.numbers,
            "independent": self.independent,
            "runs": [asdict(run) for run in self.runs],
            "orders": self.orders,
            "verdict": self.verdict.status.value,
            "message": self.verdict.message,
        }


def next_byte_loss(model: nn.Module, text: Tensor) -> Tensor:
    """Cross-entropy of each byte given the bytes before it."""
    logits = model(text[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def demonstrate(*, seed: int = 0, steps: int = 150, console: Console | None = None) -> Demonstration:
    """Train a decoder with grouped rotary attention and gated experts at three step sizes and the same flow time."""
    torch.manual_seed(seed)
    model = DecoderLM(
        VOCABULARY, 32, 2, 4, 48, max_length=64, kv_heads=2, experts=4, top_k=2, positions="rotary-half", norm="rms"
    ).double()
    text = sequences(8, 48, seed=seed)
    laws = recognize(model, loss="cross_entropy")
    independent = laws.independent()

    def watched(copied: nn.Module) -> LawSet:
        found = recognize(copied, loss="cross_entropy").select(lambda s: s.exact)
        return LawSet(symmetries=(*found, *impostors(found)), parameters=found.parameters)

    runs: list[Descent] = []
    coarse = 0.02
    with Progress(console=console, disable=console is None or not console.is_terminal, transient=True) as bar:
        for divisor in (1, 2, 4):
            task = bar.add_task(f"gradient descent with step {coarse / divisor:g}", total=steps * divisor)
            if console is not None and not console.is_terminal:
                console.print(f"gradient descent with step {coarse / divisor:g}: {steps * divisor} steps")
            runs.append(
                descend(
                    model,
                    lambda net: next_byte_loss(net, text),
                    watched,
                    step=coarse / divisor,
                    time=coarse * steps,
                    progress=lambda done, task=task: bar.advance(task, done),  # type: ignore[misc]
                )
            )
    orders = slopes(runs)
    return Demonstration(
        laws=laws, independent=independent, runs=tuple(runs), orders=orders, verdict=_judge(runs, orders)
    )


def _judge(runs: list[Descent], orders: dict[str, float]) -> Verdict:
    """Every law must drift to first order in the step or not at all, every impostor to order zero."""
    evidence = []
    wrong = []
    for family, order in orders.items():
        drift = runs[-1].drift[family]
        still = drift < _ROUNDING
        expected = 0.0 if family.startswith("not_") else 1.0
        good = not family.startswith("not_") if still else abs(order - expected) < 0.3
        wrong += [] if good else [family]
        evidence.append(
            Evidence(what=f"{family}: order of the drift in the step", value=0.0 if still else order, limit=expected)
        )
    if wrong:
        message = f"{', '.join(wrong)} did not drift as expected."
        return Verdict(status=Verdict.REFUTED, message=message, evidence=tuple(evidence))
    message = "Laws drift to first order in the step size or not at all; the impostors drift however small the step."
    return Verdict(status=Verdict.VERIFIED, message=message, evidence=tuple(evidence))


def show(found: Demonstration, console: Console) -> None:
    """Print the laws, the drift table and what it means."""
    console.rule("The laws of a decoder, read off its modules")
    dropped = [(item.name, item.reason) for item in found.laws.dropped]
    console.print(renderable(found.laws.symmetries, found.laws.unclaimed, dropped, found.independent))
    console.rule("Their drift over the same flow time, with smaller and smaller steps")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("quantity")
    for run in found.runs:
        table.add_column(f"step {run.step:g}", justify="right")
    table.add_column("order", justify="right")
    table.add_column("so it is")
    for family, order in sorted(found.orders.items(), key=lambda item: item[0].startswith("not_")):
        drifts = [run.drift[family] for run in found.runs]
        still = drifts[-1] < _ROUNDING
        meaning = "an exact law" if still else "a law" if order > 0.5 else "not a law"
        style = "red" if meaning == "not a law" else "green"
        name = family.removeprefix("not_") + (" (spoiled)" if family.startswith("not_") else "")
        cells = [f"{drift:.1e}" for drift in drifts]
        table.add_row(name, *cells, "–" if still else f"{order:.2f}", Text(meaning, style=style))
    console.print(table)
    first, last = found.runs[0], found.runs[-1]
    console.print(f"\nloss {first.loss_before:.3f} → {last.loss_after:.3f} over {first.steps} to {last.steps} steps")
    console.print(Text(f"{found.verdict.status.value.upper()}: {found.verdict.message}", style="bold"))
