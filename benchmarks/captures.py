"""Which programs each way of capturing reads: the recorder, the trace of certificates, and `torch.export`.

Typing, probing and the check in float64 read what the recorder records. Certificates read a trace by `make_fx` with
PyTorch's decompositions into core operators. `torch.export` with `run_decompositions` is what could replace both.

python benchmarks/captures.py            # every eighth model of the catalogue, and programs that are hard to capture
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from catalogue import Built, entries
from conserved.certificates.trace import core_aten_decompositions_used, trace_with_limits
from conserved.discovery.function import function_of
from conserved.discovery.inputs import to_device
from conserved.inference.program.capture import capture
from measure import save


class _Branch(nn.Module):
    """Decides by a number that it reads out of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h.relu() if x.sum().item() > 0 else h)


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(2 * x.detach().numpy())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class _Opaque(_Branch):
    """Calls an autograd function that computes in NumPy."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(_Double.apply(self.a(x)))


class _Chosen(_Branch):
    """Computes only the rows that its input chooses."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h[h.sum(-1) > 0] = 0.0
        return self.b(h)


class _Counting(_Branch):
    """Writes to a buffer in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.seen += h.detach().mean(0)
        return self.b(h - self.seen)


class _Deep(_Branch):
    """About ten thousand operations."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        for _ in range(3300):
            h = h + 0.001 * torch.sin(h)
        return self.b(h)


class _Dropped(_Branch):
    """Draws random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(nn.functional.dropout(self.a(x), 0.1))


HARD: dict[str, type[nn.Module]] = {
    "branch on .item()": _Branch,
    "autograd function in NumPy": _Opaque,
    "rows chosen by a mask": _Chosen,
    "a buffer is written": _Counting,
    "10,000 operations": _Deep,
    "dropout in training": _Dropped,
}


def _hard(kind: type[nn.Module]) -> Built:
    return kind(), (torch.randn(3, 6),), {}


def recorded(model: nn.Module, args: Any, kwargs: Any) -> Counter[str]:
    """Return how often each operation was recorded."""
    program = capture(lambda: model(*args, **kwargs), dict(model.named_parameters()), model)
    return Counter(operation.name for operation in program.operations)


def traced(model: nn.Module, args: Any, kwargs: Any) -> Counter[str]:
    """Return the elementary operations of the program that a certificate would hold."""
    inputs = kwargs if kwargs and not args else args
    function = function_of(model, inputs, loss="any", params=None, device="cpu")
    theta = function.generic_point(torch.Generator().manual_seed(0))
    x = to_device(function.sample(torch.Generator().manual_seed(0), 1), function.device)
    first = torch.utils._pytree.tree_map(lambda t: t[0] if isinstance(t, Tensor) else t, x)
    return Counter(node.op for node in trace_with_limits(function, theta, first)[0].nodes)


def exported(model: nn.Module, args: Any, kwargs: Any) -> Counter[str]:
    """Return the operations that `torch.export` leaves after decomposition."""
    program = torch.export.export(model, tuple(args), dict(kwargs), strict=False)
    program = program.run_decompositions(core_aten_decompositions_used())
    return Counter(str(node.target) for node in program.graph.nodes if node.op == "call_function")


WAYS: dict[str, Callable[..., Counter[str]]] = {"recorder": recorded, "certificate": traced, "export": exported}


def row(build: Callable[[], Built]) -> dict[str, Any]:
    """Return nodes, kinds of nodes and seconds of each way, or the reason why it has none."""
    result: dict[str, Any] = {}
    for name, way in WAYS.items():
        torch.manual_seed(0)
        model, args, kwargs = build()
        start = time.perf_counter()
        try:
            operations = way(model, args, kwargs)
        except Exception as problem:
            result[name] = {"refused": f"{type(problem).__name__}: {str(problem).strip().splitlines()[0][:160]}"}
            continue
        result[name] = {
            "nodes": operations.total(),
            "kinds": sorted(operations),
            "seconds": round(time.perf_counter() - start, 3),
        }
    return result


def _summary(rows: dict[str, Any]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for name in WAYS:
        read = {program: r[name] for program, r in rows.items() if "nodes" in r[name]}
        summary[name] = {
            "read": len(read),
            "of": len(rows),
            "kinds": len({kind for r in read.values() for kind in r["kinds"]}),
            "seconds": round(sum(r["seconds"] for r in read.values()), 1),
            "refused": {program: r[name]["refused"] for program, r in rows.items() if program not in read},
        }
    return summary


def main() -> None:
    """Capture every program in each way, and save what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=8, help="take every n-th model of the catalogue")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which no further model is begun")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows: dict[str, Any] = {name: row(partial(_hard, kind)) for name, kind in HARD.items()}
    start = time.perf_counter()
    for entry in entries()[:: options.every]:
        if time.perf_counter() - start > options.limit:
            break
        try:
            rows[entry.name] = row(entry.build)
        except ImportError:
            # The package that the model comes from is not installed.
            continue
        print(entry.name, {name: r.get("nodes", r.get("refused")) for name, r in rows[entry.name].items()}, flush=True)
    summary = _summary(rows)
    for name, counts in summary.items():
        print(name, counts)
    save("captures", {"summary": summary, "rows": rows})


if __name__ == "__main__":
    main()
