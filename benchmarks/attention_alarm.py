"""How well the attention alarm tells healthy training from broken: false alarms, detection delay, and a figure.

A small decoder learns the text of the standard library. The rule's thresholds come from some healthy runs; it is judged
on others, and on runs that are broken at a known step: the learning rate becomes a hundred times too large, the first
key of every head grows into a sink, or the queries' weights grow by a tenth a step until attention collapses.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from conserved.attention import AttentionMonitor, DepartureRule, coherence_figure
from conserved.blocks import Attention, DecoderLM
from conserved_papers.lab.data.embedded import standard_library
from measure import RESULTS, save

STEPS, BREAK, EVERY = 160, 90, 4
LENGTH, BATCH, RATE = 64, 4, 1e-3
CALIBRATION, HELD_OUT, BROKEN = 6, 8, 5

Fault = Callable[[int, DecoderLM, torch.optim.Optimizer, ExitStack], None]


def too_large_rate(step: int, model: DecoderLM, optimizer: torch.optim.Optimizer, stack: ExitStack) -> None:
    """A hundred times the learning rate from the break on."""
    if step == BREAK:
        optimizer.param_groups[0]["lr"] *= 100


def sink_key(step: int, model: DecoderLM, optimizer: torch.optim.Optimizer, stack: ExitStack) -> None:
    """The first key of every head grows to eight times its size within twenty steps."""
    if step != BREAK:
        return
    passed = [0]

    def grow(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        passed[0] += 1
        factor = min(8.0, 1 + 7 * passed[0] / (20 * len(model.layers)))
        scale = torch.ones(output.shape[-2], 1)
        scale[0] = factor
        return output * scale

    for module in model.modules():
        if isinstance(module, Attention):
            stack.callback(module.k.register_forward_hook(grow).remove)


def collapse(step: int, model: DecoderLM, optimizer: torch.optim.Optimizer, stack: ExitStack) -> None:
    """The weights of all queries grow by a tenth at every step from the break on."""
    if step >= BREAK:
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, Attention):
                    module.q.weight.mul_(1.1)


FAULTS: dict[str, Fault] = {"too large a rate": too_large_rate, "a sink key": sink_key, "entropy collapse": collapse}


def trained(seed: int, fault: Fault | None = None, rule: DepartureRule | None = None) -> tuple[AttentionMonitor, float]:
    """One run, healthy unless a fault is given, with its last loss."""
    torch.manual_seed(seed)
    corpus = standard_library()
    model = DecoderLM(corpus.vocabulary, 48, 2, 3, 64, max_length=LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    drawn = corpus.examples(STEPS * BATCH, length=LENGTH, seed=seed)
    text = torch.cat((drawn.inputs, drawn.targets[:, -1:]), 1).unflatten(0, (STEPS, BATCH))
    monitor = AttentionMonitor(model, every=EVERY, sequences=2, rule=rule)
    loss = torch.zeros(())
    with ExitStack() as stack:
        for step, batch in enumerate(text, start=1):
            if fault is not None:
                fault(step, model, optimizer, stack)
            with monitor.listen():
                logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step()
    return monitor, loss.item()


def main() -> None:
    """Calibrate, judge, print the table, save it and the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--figure", type=Path, default=RESULTS / "attention_coherence.svg")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=100)
    healthy = [trained(seed)[0] for seed in track(range(CALIBRATION), "calibrating", console=console)]
    rule = DepartureRule.calibrated([monitor.series() for monitor in healthy])
    held_out = [trained(1000 + s, None, rule) for s in track(range(HELD_OUT), "healthy runs", console=console)]
    alarmed = [monitor for monitor, _ in held_out if monitor.alarms]
    samples = sum(len(monitor.records) for monitor, _ in held_out)
    record: dict[str, Any] = {
        "steps": STEPS,
        "broken_at": BREAK,
        "sampled_every": EVERY,
        "heads": 6,
        "thresholds_as_factors": {kind: float(torch.tensor(v).exp()) for kind, v in rule.thresholds.items()},
        "calibration_runs": CALIBRATION,
        "healthy": {
            "runs": HELD_OUT,
            "runs_with_a_false_alarm": len(alarmed),
            "false_alarms": sum(len(monitor.alarms) for monitor, _ in held_out),
            "samples": samples,
            "final_losses": [loss for _, loss in held_out],
        },
        "broken": {},
    }
    table = Table(title="what the alarm says")
    for heading in ("run", "runs", "alarmed", "median delay (steps)", "longest", "first seen in", "false before"):
        table.add_column(heading, justify="left" if heading in ("run", "first seen in") else "right")
    table.add_row("healthy", str(HELD_OUT), str(len(alarmed)), "", "", "", "")
    for name, fault in FAULTS.items():
        delays, kinds, early, losses = [], [], 0, []
        for seed in track(range(BROKEN), name, console=console):
            monitor, loss = trained(2000 + seed, fault, rule)
            losses.append(loss)
            early += any(alarm.step < BREAK for alarm in monitor.alarms)
            later = [alarm for alarm in monitor.alarms if alarm.step >= BREAK]
            if later:
                delays.append(later[0].step - BREAK)
                kinds.append(later[0].code.rpartition(".")[2])
        record["broken"][name] = {
            "runs": BROKEN,
            "detected": len(delays),
            "delays": delays,
            "first_seen_in": kinds,
            "runs_alarmed_before": early,
            "final_losses": losses,
        }
        cells = (f"{median(delays):.0f}", str(max(delays))) if delays else ("–", "–")
        shown = ", ".join(sorted(set(kinds)))
        table.add_row(name, str(BROKEN), str(len(delays)), *cells, shown, str(early))
    console.print(table)
    sink = trained(2000, sink_key)[0]
    coherence_figure({"healthy": held_out[0][0], "a sink key from step 90": sink}, chosen.figure)
    print(f"saved {save('attention_alarm', record)} and {chosen.figure}")


if __name__ == "__main__":
    main()
