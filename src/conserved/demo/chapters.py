"""The chapters of the demonstration; each puts its records into the store and returns the finding it ends with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from conserved.demo.training import KERNEL_FILE, MODEL_FILE, DemoTask, Tell, TrainingCurve, train
from conserved.output.figure import PALETTE, Figure, Finding, in_words, line, panels, positive
from conserved.tracking import Monitor, MonitorConfig, store_document

MODEL = MODEL_FILE
WATCHED = "AdamW"
CLEAN = "PyTorch's layer norm"
PLANTED = f"layer norm of {KERNEL_FILE}"
DEFECT = "defect"
THEOREM = "paper.T4.7"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The extent of the demonstration: training steps, and the claims and experiments if the papers are installed."""

    seed: int = 0
    steps: int = 60
    claims: tuple[str, ...] = (THEOREM, "paper.T4.5")
    recipes: tuple[str, ...] = ("bytes", "bytes-sigmoid")
    seeds: int = 1
    workers: int = 1


def read_laws(store: Path, settings: Settings, _: Tell) -> None:
    """Recognize the laws of a model that the package knows nothing about."""
    task = DemoTask.of(store.parent, settings.seed, fused=False)
    laws = task.laws()
    shares = {"coverage": laws.coverage, "directions": laws.coverage.directions}
    record = laws.record() | {"parameters": task.size} | shares
    store_document(store, "laws", MODEL, record)


def train_twice(store: Path, settings: Settings, tell: Tell) -> None:
    """Train with a right and a wrong norm kernel; audit every backward and account for every step of AdamW."""
    right = DemoTask.of(store.parent, settings.seed, fused=False)
    laws = right.laws()
    notes = {"betas": "0.9, 0.95", "seed": settings.seed, "text": "the standard library, as bytes"}
    with Monitor(
        right.model, right.optimizer, laws, sinks=store, run=WATCHED, every=1, config=MonitorConfig(notes=notes)
    ) as monitor:
        clean = train(right, laws, settings.steps, lambda message: tell(f"right, {message}"), after=monitor.step)
    assert clean.first is not None
    store_document(store, "audit", CLEAN, clean.first.record())
    wrong = DemoTask.of(store.parent, settings.seed, fused=True)
    laws = wrong.laws()
    broken = train(wrong, laws, settings.steps, lambda message: tell(f"wrong, {message}"))
    assert broken.first is not None
    planted = f"the norm's gain gets no gradient from the last, incomplete block of rows ({KERNEL_FILE})"
    record = broken.first.record() | {"expected": "refuted", "planted": planted}
    store_document(store, "audit", PLANTED, record)
    losses = {"clean": clean.losses[-1], "planted": broken.losses[-1], "steps": settings.steps}
    store_document(store, "demo", "losses", losses)
    store_document(store, "figure", DEFECT, defect_figure(clean, broken).record())


def defect_figure(clean: TrainingCurve, planted: TrainingCurve) -> Figure:
    """Return losses on the left, on the right how far the worst gradient identity is beyond what rounding explains."""
    data = []
    for name, color, course in ((CLEAN, PALETTE[0], clean), (PLANTED, PALETTE[1], planted)):
        at = [float(step) for step in range(1, len(course.losses) + 1)]
        data.append(line(at, course.losses, name=name, color=color))
        data.append(line(at, positive(course.excess), name=name, color=color, panel=2, legend=False))
    steps = len(clean.losses)
    limit = line(
        [1.0, float(steps)], [1.0, 1.0], name="what rounding explains", color="#888888", panel=2, dash="dot", width=1.5
    )
    layout = panels(["loss", "worst gradient identity"], x="step", y="", log=(False, False))
    layout["yaxis2"] |= {"type": "log"}
    layout["yaxis2"]["title"] = {"text": "× what rounding explains"}
    layout["height"] = 380
    ends = (clean.losses[-1], planted.losses[-1])
    findings = (
        Finding(
            what="loss with the defect over loss without it, at the end",
            value=ends[1] / ends[0],
            expected="about 1: it trains",
            holds=abs(ends[1] / ends[0] - 1) < 0.1,
        ),
        Finding(
            what="first backward pass with the defect: worst identity over what rounding explains",
            value=planted.excess[0],
            expected="above 1: caught",
            holds=planted.excess[0] > 1,
        ),
        Finding(
            what="without it: the worst of all steps",
            value=max(clean.excess),
            expected="at most 1",
            holds=max(clean.excess) <= 1,
        ),
    )
    return Figure(
        code=DEFECT,
        title="A wrong backward that trains, and what gives it away",
        caption="Left: the loss of the same model, data and seed with a right and with a wrong norm kernel. Right: the "
        "gradient identity that is furthest off in every backward pass, in units of what rounding explains.",
        alt=in_words(findings),
        data=(*data, limit),
        layout=layout,
        findings=findings,
        section="audit",
    )
