"""Wrong backward passes planted in models no line of this library knows: which of them an audit sees.

Two kinds, in the models' own single precision. After a right backward pass, half of the rows of one parameter's
gradient are made a tenth too long, for every parameter in turn. And a function with a wrong derivative is put behind
one module after the other: it passes its input on and makes half of the gradient's channels a tenth too long.

A `Monitor` that was told nothing but the model and its optimizer then watches plain training: it infers the laws at
the first forward pass, is quiet while the backward pass is right, and has the same functions put behind one module in
one step each.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from catalogue import Entry, named
from conserved import LawSet, Monitor, audit, recognize
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
    "litgpt llama 3",
    "x-transformers, rotary, GLU, RMS",
    "monai ViT",
    "OLMo 2, transformers",
]

FACTOR = 1.1


class _Stretched(torch.autograd.Function):
    """Passes its input on; its backward makes the first half of the channels too long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        wrong = g.clone()
        axis = 1 if g.ndim == 4 else -1
        wrong.narrow(axis, 0, max(1, g.shape[axis] // 2)).mul_(FACTOR)
        return wrong


@contextmanager
def stretched(module: nn.Module) -> Iterator[None]:
    """Within it, gradients that come back into a module are wrong."""

    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        return _Stretched.apply(output) if isinstance(output, Tensor) and output.is_floating_point() else output

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def backward(entry: Entry, model: nn.Module, args: Any, kwargs: Any) -> None:
    """One backward pass of a random loss."""
    model.zero_grad(set_to_none=True)
    z = seen_by(entry.loss, model(*args, **kwargs))
    v = torch.randn(z.shape, generator=torch.Generator().manual_seed(1))
    ((v * z).sum() + torch.sin(z).sum()).backward()


def audited(entry: Entry) -> dict[str, Any]:
    """How many of the plants in one model are seen, and whether the right backward pass is clean."""
    torch.manual_seed(0)
    model, args, kwargs = entry.build()
    laws: LawSet = recognize(model, *args, loss=entry.loss, **kwargs)
    scatter(model)
    backward(entry, model, args, kwargs)
    clean = not audit(model, laws).failures
    rows: dict[str, bool] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None or not bool(parameter.grad.any()):
            continue
        saved = parameter.grad.clone()
        parameter.grad[: max(1, len(saved) // 2)] *= FACTOR
        rows[name] = bool(audit(model, laws).failures)
        parameter.grad.copy_(saved)
    inside: dict[str, bool] = {}
    for name, module in model.named_modules():
        if name and not list(module.children()) and list(module.parameters()):
            with stretched(module):
                backward(entry, model, args, kwargs)
            inside[name] = bool(audit(model, laws).failures)
    return {
        "clean": clean,
        "laws": len(laws),
        "gradients": len(rows),
        "gradients_seen": sum(rows.values()),
        "gradients_unseen": [name for name, seen in rows.items() if not seen],
        "modules": len(inside),
        "modules_seen": sum(inside.values()),
        "modules_unseen": [name for name, seen in inside.items() if not seen],
    }


QUIET_STEPS = 3


def monitored(entry: Entry) -> dict[str, Any]:
    """How many of the wrong functions in one model alarm a monitor, and whether it is quiet before."""
    torch.manual_seed(0)
    model, args, kwargs = entry.build()
    scatter(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = Monitor(model, optimizer, loss=entry.loss)

    def step() -> int:
        before = len(monitor.alarms)
        backward(entry, model, args, kwargs)
        optimizer.step()
        monitor.step()
        monitor.flush()
        return len(monitor.alarms) - before

    quiet = not sum(step() for _ in range(QUIET_STEPS))
    inside: dict[str, bool] = {}
    for name, module in model.named_modules():
        if name and not list(module.children()) and list(module.parameters()):
            # One law is told of once: a new monitor for every plant.
            monitor = Monitor(model, optimizer, monitor.laws)
            with stretched(module):
                inside[name] = bool(step())
    return {"quiet": quiet, "modules": len(inside), "seen": sum(inside.values())}


def main() -> None:
    """Audit every model, print a table and save it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows: dict[str, Any] = {}
    table = Table(title="planted wrong backward passes seen by an audit with inferred laws")
    for heading in ("model", "laws", "clean", "gradients", "functions", "quiet", "monitored"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for name in MODELS:
        if options.only not in name:
            continue
        try:
            rows[name] = audited(named(name))
            rows[name]["monitor"] = monitored(named(name))
        except ImportError as missing:
            print(f"{name}: {missing}")
            continue
        r = rows[name]
        table.add_row(
            name,
            str(r["laws"]),
            "yes" if r["clean"] else "NO",
            f"{r['gradients_seen']} of {r['gradients']}",
            f"{r['modules_seen']} of {r['modules']}",
            "yes" if r["monitor"]["quiet"] else "NO",
            f"{r['monitor']['seen']} of {r['monitor']['modules']}",
        )
        print(json.dumps({name: r}, ensure_ascii=False), flush=True)
    Console(width=110).print(table)
    if not options.only:
        print(f"saved {save('planted_backwards', {'factor': FACTOR, 'rows': rows})}")


if __name__ == "__main__":
    main()
