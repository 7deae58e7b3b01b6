"""Is the kind of a defect named rightly? Planted defects of four kinds in two precisions, each diagnosed by replay.

    python benchmarks/diagnosed_defects.py --out benchmarks/results

A decoder of 8 million parameters with a vocabulary of 8,192. Kinds: the gradient in memory was written to (bit flips,
dropped tiles, scaled parts); an autograd function with a wrong backward; code of a compiler that is wrong; a gradient
hook of the program's own. A diagnosis is right if its origin is that of the defect.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import conserved
from conserved.auditing.diagnosis import Origin
from conserved.auditing.replay import ClosureReplay
from measure import commit, machine, save


class WrongProduct(torch.autograd.Function):
    """A gated product; the gradient of one factor is wrong in one of several ways."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, how: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.how = how
        return gate * up

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gate, up = ctx.saved_tensors
        wrong = grads[0] * gate
        if ctx.how == "halved":
            wrong = 0.5 * wrong
        elif ctx.how == "last tokens lost":
            wrong[:, -wrong.shape[1] // 4 :] = 0
        elif ctx.how == "sign":
            wrong = -wrong
        elif ctx.how == "channels swapped":
            wrong = wrong.flip(-1)
        elif ctx.how == "1.05":
            wrong = 1.05 * wrong
        return grads[0] * up, wrong, None


class Layer(nn.Module):
    """Attention and a gated network behind norms; its product may be someone else's."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)
        self.product: Callable[[Tensor, Tensor], Tensor] = torch.mul

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        q, k, v = (linear(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.second(x)
        return x + self.down(self.product(F.silu(self.gate(h)), self.up(h)))


class Decoder(nn.Module):
    """A decoder over a vocabulary of 8,192."""

    def __init__(self, width: int = 256, depth: int = 4) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8192, width), nn.Linear(width, 8192, bias=False)
        self.layers = nn.ModuleList(Layer(width, 4) for _ in range(depth))
        self.norm = nn.RMSNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Defect:
    """What is planted: before the pass, in the model; after it, in the gradients."""

    name: str
    origin: Origin
    before: Callable[[Decoder], None] = lambda model: None
    after: Callable[[Decoder], None] = lambda model: None


def _gradient(model: Decoder, name: str) -> Tensor:
    gradient = model.get_parameter(name).grad
    assert gradient is not None
    return gradient


def written() -> Iterator[Defect]:
    """Gradients that were written to after the backward pass, as by a flipped bit or a race."""
    parts = ("q", "k", "v", "o", "up", "down")
    for number, part in enumerate(parts):
        name = f"layers.{number % 4}.{part}.weight"

        def flip(model: Decoder, name: str = name) -> None:
            gradient = _gradient(model, name)
            gradient[3, 5] = 4 * gradient.float().norm()

        def drop(model: Decoder, name: str = name) -> None:
            _gradient(model, name)[:64, :64] = 0

        def scale(model: Decoder, name: str = name) -> None:
            _gradient(model, name)[:64] *= 1.3

        def stale(model: Decoder, name: str = name) -> None:
            gradient = _gradient(model, name)
            gradient.copy_(gradient.roll(1, 0))

        for label, after in (("flip", flip), ("tile lost", drop), ("rows × 1.3", scale), ("rows rolled", stale)):
            # These rows are all of a head of q, k or v: no hardware leaves one factor on a whole side of an identity.
            whole = after is scale and part in "qkv"
            yield Defect(f"{label} in {name}", Origin.LOOP if whole else Origin.TRANSIENT, after=after)


def kernels() -> Iterator[Defect]:
    """Autograd functions and compiled code with a wrong backward."""
    for layer in range(2):
        for how in ("halved", "last tokens lost", "sign", "channels swapped", "1.05"):

            def plug(model: Decoder, layer: int = layer, how: str = how) -> None:
                target = model.layers[layer]
                assert isinstance(target, Layer)
                target.product = lambda gate, up: WrongProduct.apply(gate, up, how)

            yield Defect(f"autograd function, {how}, layer {layer}", Origin.KERNEL, before=plug)
    for layer in range(2):
        for share in (0.5, 0.9):

            def compiled(model: Decoder, layer: int = layer, share: float = share) -> None:
                def backend(graph: Any, inputs: Any) -> Any:
                    return lambda *args: tuple(share * out + (1 - share) * out.detach() for out in graph(*args))

                target = model.layers[layer]
                assert isinstance(target, Layer)
                inner = torch.compile(lambda gate, up: 1.0 * up, backend=backend)
                target.product = lambda gate, up: gate * inner(gate, up)

            yield Defect(f"compiled code, gradient × {share}, layer {layer}", Origin.KERNEL, before=compiled)


def programs() -> Iterator[Defect]:
    """Gradient hooks of the program itself."""
    for part, factor in (("q", 0.5), ("v", 2.0), ("up", 1.1), ("down", -1.0), ("o", 0.0), ("k", 1.05)):

        def hook(model: Decoder, part: str = part, factor: float = factor) -> None:
            model.get_parameter(f"layers.1.{part}.weight").register_hook(lambda gradient: factor * gradient)

        yield Defect(f"hook on {part} × {factor}", Origin.PROGRAM, before=hook)


def diagnose(defect: Defect, precision: torch.dtype, laws: conserved.LawSet) -> tuple[str, str]:
    """The verdict and the origin that most failing laws have."""
    torch.manual_seed(0)
    model = Decoder().to(precision)
    tokens = torch.randint(8192, (2, 64), generator=torch.Generator().manual_seed(1))

    def closure() -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.roll(-1, 1).flatten())

    defect.before(model)
    closure().backward()
    defect.after(model)
    result = conserved.audit(model, laws, replay=ClosureReplay(model, closure), sized=False)
    torch._dynamo.reset()
    origins = Counter(result.diagnoses[row.name].origin for row in result.failures if row.name in result.diagnoses)
    return result.verdict.status.value, origins.most_common(1)[0][0].name if origins else ""


def main() -> None:
    """Diagnose every defect in both precisions; save after each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--precisions", default="float32,bfloat16")
    parser.add_argument("--name", default="diagnosed_defects")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    torch.manual_seed(0)
    tokens = torch.randint(8192, (2, 64))
    laws = conserved.recognize(Decoder(), tokens)
    rows: list[dict[str, str]] = []
    for precision in chosen.precisions.split(","):
        for defect in (*written(), *kernels(), *programs()):
            status, origin = diagnose(defect, getattr(torch, precision), laws)
            rows.append(
                {
                    "precision": precision,
                    "defect": defect.name,
                    "origin": defect.origin.name,
                    "status": status,
                    "named": origin,
                }
            )
            if origin != defect.origin.name:
                print(rows[-1])
            right = sum(row["origin"] == row["named"] for row in rows)
            refuted = sum(row["status"] == "refuted" for row in rows)
            if chosen.out:
                record = {"commit": commit(), "machine": machine(), "right": right, "refuted": refuted, "rows": rows}
                save(chosen.name, record, chosen.out)
    print(f"{len(rows)} defects: {refuted} refuted, {right} named rightly")


if __name__ == "__main__":
    main()
