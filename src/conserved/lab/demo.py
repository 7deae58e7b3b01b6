"""The demonstration: find the laws of a small decoder, train it on real text, see what is conserved and what is not."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from conserved.inference import recognize
from conserved.lab.fits import exponent
from conserved.lab.recipes import Recipe, build, examples_of, small_text
from conserved.lab.threads import threads
from conserved.lab.train import train
from conserved.laws import LawSet
from conserved.table import renderable
from conserved.verdict import Evidence, Verdict

_ROUNDING = 1e-12
"""Relative drift below which a float64 run shows nothing but rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Descent:
    """One run of gradient descent: step size, losses before and after, and relative drift by family."""

    step: float
    steps: int
    loss_before: float
    loss_after: float
    drift: dict[str, float]


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


def decoder(seed: int, steps: int) -> Recipe:
    """Grouped rotary attention and gated experts, on the text of the standard library."""
    return replace(
        small_text(top_k=2),
        name="demonstration",
        sizes={
            "vocab": 256,
            "dim": 32,
            "depth": 2,
            "heads": 4,
            "hidden": 48,
            "kv_heads": 2,
            "experts": 4,
            "top_k": 2,
            "max_length": 48,
            "positions": "rotary-half",
        },
        length=47,
        steps=steps,
        seeds=(seed,),
    )


def demonstrate(*, seed: int = 0, steps: int = 150, console: Console | None = None) -> Demonstration:
    """Train a decoder at three step sizes for the same flow time."""
    recipe = decoder(seed, steps)
    examples = examples_of(recipe)
    laws = recognize(build(recipe, seed).double(), examples.inputs[:2], loss="cross_entropy")
    runs: list[Descent] = []
    coarse = 0.02
    quiet = console is None or not console.is_terminal
    with threads(1), Progress(console=console, disable=quiet, transient=True) as bar:
        for divisor in (1, 2, 4):
            planned, rate = steps * divisor, coarse / divisor
            task = bar.add_task(f"gradient descent with step {rate:g}", total=planned)
            if console is not None and not console.is_terminal:
                console.print(f"gradient descent with step {rate:g}: {planned} steps")
            (found,) = train(
                replace(recipe, steps=planned),
                examples,
                rate=rate,
                progress=lambda done, _, task=task: bar.update(task, completed=done),  # type: ignore[misc]
            )
            runs.append(
                Descent(
                    step=rate,
                    steps=found.steps,
                    loss_before=found.loss[0],
                    loss_after=found.loss[-1],
                    drift={q.family: q.drift[-1] for q in found.quantities if q.role != "claim"},
                )
            )
    sizes = [run.step for run in runs]
    orders = {family: exponent(sizes, [run.drift[family] for run in runs]) for family in runs[0].drift}
    return Demonstration(
        laws=laws, independent=laws.independent(), runs=tuple(runs), orders=orders, verdict=_judge(runs, orders)
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
