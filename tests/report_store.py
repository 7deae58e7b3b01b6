"""Run stores for the tests of reports: one of everything, with names nobody should give a layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from conserved import Monitor, MonitorConfig, audit, recognize
from conserved.attention import probe
from conserved.blocks import Attention
from conserved.store import Run
from conserved.store.step_record import FIELDS, LawName, StepRecord
from conserved.tracking import SQLite, store_document

IMAGE = "<img src=x onerror=hacked()>"
SCRIPT = "</script><script>hacked()</script><!--<script>\u2028"
LINK = "<a href='javascript:hacked()'>layer</a>"


class Hostile(nn.Module):
    """Attention in a module whose name is markup."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module(IMAGE, Attention(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The attention alone."""
        return self.get_submodule(IMAGE)(x)


def claim(code: str, **changes: Any) -> dict[str, Any]:
    """The record of an outcome, as the claims package writes it."""
    return {
        "code": code,
        "title": "Rows of attention",
        "statement": "Every diagonal entry of A Aᵀ is at least 1/L.",
        "latex": [r"(A A^{\top})_{ii} \ge \tfrac{1}{L}"],
        "hypotheses": "A is row-stochastic",
        "source": "note",
        "place": "Lemma 10",
        "status": "verified",
        "message": "Cauchy–Schwarz, and no counterexample among 1,000.",
        "proof": "",
        "evidence": [{"what": "least entry over 1/L", "value": 1.0, "limit": 1.0}],
        "witness": None,
        "corrected_by": "",
        "corrects": "",
        "recorded": "verified",
        "seconds": 0.01,
    } | changes


def refuted(code: str, **changes: Any) -> dict[str, Any]:
    """A claim that fails, with its witness."""
    witness = {
        "what": "uniform attention of length 2",
        "values": {"A": [[0.5, 0.5], [0.5, 0.5]]},
        "numpy": "import numpy as np\nA = np.full((2, 2), 0.5)\nprint(np.linalg.eigvalsh(A @ A.T))",
    }
    return claim(code, status="refuted", recorded="refuted", witness=witness) | changes


def figure(code: str, **changes: Any) -> dict[str, Any]:
    """A figure, as the lab writes it."""
    return {
        "code": code,
        "title": "Error against iteration",
        "caption": "Two step sizes.",
        "alt": "Two lines that rise in proportion to the iteration.",
        "data": [
            {"type": "scatter", "mode": "lines", "name": f"τ = {tau}", "x": [1, 2, 4], "y": [tau, 2 * tau, 4 * tau]}
            for tau in (0.1, 0.05)
        ],
        "layout": {"xaxis": {"type": "log"}, "yaxis": {"type": "log"}},
        "findings": [{"what": "exponent", "value": 1.0, "low": 0.9, "high": 1.1, "expected": 1.0, "holds": True}],
        "table": {"columns": ["τ", "error"], "rows": [[0.1, 0.4], [0.05, 0.2]]},
        "section": "papers",
    } | changes


def watch(path: Path, run: str, *, steps: int = 5, spoil: bool = False, wrong: bool = False) -> nn.Module:
    """A short run under a Monitor; `spoil` writes to an entry of a parameter, which raises alarms.

    `wrong` multiplies one gradient by two from the second step on.
    """
    torch.manual_seed(0)
    model = Hostile().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    config = {"data": "/srv/secret/place/text.txt", "note": SCRIPT}
    settings = MonitorConfig(notes=config, gauges={IMAGE: lambda: 1.0})
    with Monitor(model, optimizer, every=1, sinks=path, run=run, config=settings) as monitor:
        for step in range(steps):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            if wrong and step:
                gradient = next(model.parameters()).grad
                assert gradient is not None
                gradient *= 2
            optimizer.step()
            if spoil and step == 2:
                with torch.no_grad():
                    next(model.parameters()).view(-1)[0] += 1.0
            monitor.step()
    return model


CAUSES = ("decay", "momentum", "preconditioner")


def random_ledger(path: Path, rows: int, *, laws: int) -> None:
    """A store with so many rows of ledger, written as a monitor writes it, of random numbers."""
    names = [
        LawName(name=f"layers.{n // 10}.law[{n}]", block=f"layers.{n // 10}", family=f"kind {n % 8}", units=1)
        for n in range(laws)
    ]
    sink = SQLite(path)
    sink.begin(Run(name="run", laws=names, formulas=["h"] * laws))
    generator = torch.Generator().manual_seed(0)
    for step in range(1, rows // laws + 1):
        numbers = torch.randn(laws, len(FIELDS) + len(CAUSES), generator=generator, dtype=torch.float64)
        sink.write(StepRecord(step=step, laws=names, causes=CAUSES, numbers=numbers, readings={"loss": 1 / step}))
    sink.close()


def hostile_store(path: Path) -> Path:
    """One record of every kind; every name and text in it is an attempt to break the page."""
    model = watch(path, SCRIPT, spoil=True)
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    model.zero_grad()
    model(x).square().mean().backward()
    key = model.get_parameter(f"{IMAGE}.k.weight")
    assert key.grad is not None
    key.grad[:2] *= 0.5
    laws = recognize(model)
    store_document(path, "laws", LINK, laws.record() | {"independent": laws.independent()})
    store_document(path, "audit", IMAGE, audit(model).record())
    store_document(path, "attention", IMAGE, probe(model, x).record())
    texts = {
        "title": IMAGE,
        "statement": SCRIPT,
        "source": f'"{IMAGE}',
        "place": LINK,
        "message": IMAGE,
        "hypotheses": [SCRIPT, IMAGE],
        "latex": [rf"\mathtt{{{IMAGE}}}", r"\href{javascript:hacked()}{x}", IMAGE, r"\style{x:url(//a.b)}{x}"],
    }
    witness = {"what": IMAGE, "values": {IMAGE: SCRIPT}, "numpy": f"print('''{SCRIPT}''')"}
    store_document(path, "claim", "hostile", refuted("hostile", **texts, witness=witness))
    traces = [
        {"type": "bar", "name": IMAGE, "x": [IMAGE, LINK], "y": [1.0, 2.0], "text": [SCRIPT, LINK]},
        {
            "type": "scatter",
            "name": LINK,
            "x": [IMAGE, LINK],
            "y": [2.0, 1.0],
            "hovertemplate": f"{LINK}<extra></extra>",
        },
    ]
    layout = {
        "annotations": [{"text": LINK, "x": 0, "y": 1}],
        "xaxis": {"title": {"text": IMAGE}},
        "images": [{"source": "https://example.org/x.png"}],
    }
    table = {"columns": [IMAGE], "rows": [[SCRIPT]]}
    drawn = figure(IMAGE, title=IMAGE, caption=SCRIPT, alt=f'"{IMAGE}', data=traces, layout=layout, table=table)
    store_document(path, "figure", IMAGE, drawn | {"section": IMAGE})
    store_document(path, "demo", "summary", {"headline": [IMAGE, SCRIPT], "verdict": "verified"})
    return path
