"""What an audit covers of known models: entries that a law touches, entries tested, and directions of gradients seen.

Coverage once counted the entries that a leg touches. `parameters` counts those that a tested identity compares with
other parameters to better than 10 %; an identity of one leg counts for the directions it constrains. `directions` is
the rank of all tested identities over the number of entries.

python benchmarks/coverage_table.py
"""

from __future__ import annotations

import argparse
import json
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from catalogue import Entry, named
from conserved import audit, recognize
from law_checks import scatter, seen_by
from measure import save

MODELS = [
    "nanoGPT",
    "llama2.c",
    "minGPT",
    "ResNet, batch norm in training",
    "U-Net, group norm",
    "LSTM",
    "DiT, adaLN-zero",
    "experts, gathered weights",
    "encoder–decoder",
    "attention, latent (MLA)",
    "ConvNeXt",
    "OLMo 2, transformers",
]
"""Entries of the catalogue; the others here are small models in which coverage used to say most too much."""


class _Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 16, bias=False)
        self.experts = nn.Parameter(torch.randn(16, 64, 8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("ne,nd,edo->no", self.gate(x).softmax(-1), x, self.experts)


def _feedforward(act: type[nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), act(), nn.Linear(64, 32))


SMALL: dict[str, tuple[Any, tuple[int, ...], str]] = {
    "linear classifier, 10 classes": (lambda: nn.Linear(64, 10), (32, 64), "cross_entropy"),
    "linear classifier, 32,000 classes": (lambda: nn.Linear(64, 32_000), (32, 64), "cross_entropy"),
    "softmax router, 16 frozen experts": (_Router, (32, 64), "any"),
    "ReLU feedforward": (lambda: _feedforward(nn.ReLU), (32, 32), "any"),
    "GELU feedforward": (lambda: _feedforward(nn.GELU), (32, 32), "any"),
    "linear pair": (lambda: nn.Sequential(nn.Linear(32, 8, bias=False), nn.Linear(8, 32, bias=False)), (32, 32), "any"),
    "self-attention": (lambda: nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True), (4, 9, 32), "any"),
    "normed classifier": (
        lambda: nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)),
        (32, 32),
        "cross_entropy",
    ),
}


def _row(model: nn.Module, loss: str, outputs: Tensor, laws: Any) -> dict[str, Any]:
    v = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(1))
    if loss == "cross_entropy":
        targets = torch.randint(outputs.shape[-1], outputs.shape[:-1], generator=torch.Generator().manual_seed(2))
        F.cross_entropy(outputs.flatten(0, -2), targets.flatten()).backward()
    else:
        ((v * outputs).sum() + torch.sin(outputs).sum()).backward()
    result = audit(model, laws)
    covered = result.coverage
    return {
        "laws": len(laws),
        "entries": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "touched": covered.touched,
        "tested": covered.parameters,
        "directions": covered.directions,
        "verdict": result.verdict.status.value,
        "ok": result.ok,
        "reason": result.reason,
    }


def catalogued(entry: Entry) -> dict[str, Any]:
    """The coverage of a model of the catalogue, at scattered weights."""
    torch.manual_seed(0)
    model, args, kwargs = entry.build()
    laws = recognize(model, *args, loss=entry.loss, **kwargs)
    scatter(model)
    model.zero_grad(set_to_none=True)
    return _row(model, "any", seen_by(entry.loss, model(*args, **kwargs)), laws)


def small(name: str) -> dict[str, Any]:
    """The coverage of a small model."""
    torch.manual_seed(0)
    build, shape, loss = SMALL[name]
    model, x = build(), torch.randn(shape)
    laws = recognize(model, x, loss=loss)
    return _row(model, loss, model(x), laws)


def main() -> None:
    """Audit every model, print a table and save it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="models whose name holds this; nothing is saved then")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows: dict[str, Any] = {}
    table = Table(title="coverage of an audit: before (touched) and after (tested, directions)")
    for heading in ("model", "laws", "touched", "tested", "directions", "ok"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for name in (*MODELS, *SMALL):
        if options.only not in name:
            continue
        try:
            rows[name] = small(name) if name in SMALL else catalogued(named(name))
        except ImportError as missing:
            print(f"{name}: {missing}")
            continue
        row = rows[name]
        shares = (f"{row[key]:.2%}" for key in ("touched", "tested", "directions"))
        table.add_row(name, str(row["laws"]), *shares, "yes" if row["ok"] else "no")
        print(json.dumps({name: row}, ensure_ascii=False), flush=True)
    Console(width=110).print(table)
    if not options.only:
        print(f"saved {save('coverage_table', {'models': len(rows), 'rows': rows})}")


if __name__ == "__main__":
    main()
