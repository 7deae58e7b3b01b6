"""The loss on the line between two networks trained apart: as they are, after weight matching, after aligning.

Weight matching (Ainsworth, Hayase and Srinivasa 2023) is written out below for layers in a row; `align` finds the units
itself, and moves along scalings as well. Networks are trained on Fashion-MNIST from different seeds; decoders on text,
where weight matching is `align` with exchanges alone: hidden units, heads, and the channels of the residual stream.

    python benchmarks/aligned_barriers.py --fashion FOLDER
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from conserved.transform import align, equalize, exchanges, symmetries_of
from conserved_papers.lab.data.sources import open_images, open_text
from measure import save


def network(width: int, act: type[nn.Module]) -> Any:
    """Three layers."""
    return nn.Sequential(nn.Linear(784, width), act(), nn.Linear(width, width), act(), nn.Linear(width, 10))


def trained(width: int, act: type[nn.Module], x: Tensor, y: Tensor, seed: int, steps: int) -> Any:
    """A network from a seed, which also orders the data."""
    torch.manual_seed(seed)
    model = network(width, act)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(steps):
        chosen = torch.randint(0, len(x), (128,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
    return model


def matched(a: Any, b: Any) -> Any:
    """Weight matching by coordinate descent, as the paper gives it."""
    b = copy.deepcopy(b)
    layers_a = [m for m in a if isinstance(m, nn.Linear)]
    layers_b = [m for m in b if isinstance(m, nn.Linear)]
    with torch.no_grad():
        for _ in range(50):
            moved = False
            for k in range(len(layers_a) - 1):
                score = layers_a[k].weight @ layers_b[k].weight.T + torch.outer(layers_a[k].bias, layers_b[k].bias)
                score += layers_a[k + 1].weight.T @ layers_b[k + 1].weight
                order = linear_sum_assignment(-score.numpy())[1]
                moved |= bool((order != range(len(order))).any())
                layers_b[k].weight.copy_(layers_b[k].weight[order])
                layers_b[k].bias.copy_(layers_b[k].bias[order])
                layers_b[k + 1].weight.copy_(layers_b[k + 1].weight[:, order])
            if not moved:
                break
    return b


def barrier(a: Any, b: Any, x: Tensor, y: Tensor) -> float:
    """How far the loss on the line rises above the straight line between its ends, at the most."""
    losses = []
    for t in torch.linspace(0, 1, 11).tolist():
        middle = copy.deepcopy(a)
        with torch.no_grad():
            for p, q, r in zip(middle.parameters(), a.parameters(), b.parameters(), strict=True):
                p.copy_((1 - t) * q + t * r)
            losses.append((t, float(F.cross_entropy(middle(x), y))))
    first, last = losses[0][1], losses[-1][1]
    return max(loss - (1 - t) * first - t * last for t, loss in losses)


def decoder(tokens: Tensor, seed: int, steps: int) -> Any:
    """A small Llama trained on bytes of the standard library."""
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model: Any = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(steps):
        batch = torch.stack([tokens[s : s + 49] for s in torch.randint(0, len(tokens) - 49, (16,))])
        optimizer.zero_grad()
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


class Logits(nn.Module):
    """A decoder as a function of tokens: one row of logits for each."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.model(input_ids=ids, use_cache=False).logits.flatten(0, 1)
        return result


def decoders(steps: int, pairs: int) -> list[dict[str, Any]]:
    """Pairs of decoders: barriers, distances, and what remains."""
    text = open_text("standard-library", vocabulary=256)
    tokens, held = text.tokens.long()[:-50_000], text.tokens.long()[-50_000:]
    batch = torch.stack([held[s : s + 49] for s in range(0, 48 * 49, 49)])
    x, y = batch[:, :-1], batch[:, 1:].flatten()
    rows = []
    for pair in range(pairs):
        a, b = (Logits(decoder(tokens, 2 * pair + k, steps)) for k in (0, 1))
        laws = symmetries_of(a, x[:2])
        units = exchanges(a, x[:2], laws=laws)
        row: dict[str, Any] = {"activation": "Llama on text", "pair": pair, "as trained": barrier(a, b, x, y)}
        row["losses"] = [F.cross_entropy(one(x), y).item() for one in (a, b)]
        row["units"] = [f"{one.name}: {one.n}" for one in units]
        only = copy.deepcopy(b)
        result = align(a, only, laws=laws, exchanges=units, continuous=False)
        row["weight matching"] = row["align, units only"] = barrier(a, only, x, y)
        row["distance after units"] = result.after
        full = copy.deepcopy(b)
        result = align(a, full, laws=laws, exchanges=units)
        row["align"] = barrier(a, full, x, y)
        row |= {"distance before": result.before, "distance after": result.after}
        row["what remains"] = {name: round(size, 3) for name, size in result.remains.items()}
        row["function moved by"] = ((full(x) - b(x)).norm() / b(x).norm()).item()
        even = [copy.deepcopy(one) for one in (a, b)]
        for one in even:
            equalize(one, laws=laws)
        align(even[0], even[1], laws=laws, exchanges=units)
        row["balanced, then align"] = barrier(even[0], even[1], x, y)
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    """Train pairs, align, print, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fashion", required=True)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--pairs", type=int, default=3, help="of decoders")
    parser.add_argument("--keep", type=Path, help="take the rows of networks on images from a saved file")
    options = parser.parse_args()
    if options.keep:
        former = json.loads(options.keep.read_text())
        rows = [row for row in former["rows"] if "text" not in row["activation"]]
        rows += decoders(options.steps // 3, options.pairs)
        print(save("aligned_barriers", {"rows": rows, "steps": former["steps"], "images at": former["commit"]}))
        return
    images = open_images(options.fashion, size=28, limit=70_000)
    x = images.pixels.float().flatten(1) / 255 - 0.5
    y = images.labels.long()
    held, x, y_held, y = x[:5000], x[5000:], y[:5000], y[5000:]
    rows = []
    for name, act, width in (("ReLU", nn.ReLU, 256), ("GELU", nn.GELU, 256)):
        for pair in range(3):
            a, b = (trained(width, act, x, y, 2 * pair + k, options.steps) for k in (0, 1))
            laws = symmetries_of(a, held[:4])
            units = exchanges(a, held[:4], laws=laws)
            row: dict[str, Any] = {"activation": name, "pair": pair, "as trained": barrier(a, b, held, y_held)}
            row["weight matching"] = barrier(a, matched(a, b), held, y_held)
            only = copy.deepcopy(b)
            align(a, only, laws=laws, exchanges=units, continuous=False)
            row["align, units only"] = barrier(a, only, held, y_held)
            full = copy.deepcopy(b)
            result = align(a, full, laws=laws, exchanges=units)
            row["align"] = barrier(a, full, held, y_held)
            row |= {"distance before": result.before, "distance after": result.after}
            even = [copy.deepcopy(one) for one in (a, b)]
            for one in even:
                equalize(one, laws=laws)
            align(even[0], even[1], laws=laws, exchanges=units, continuous=False)
            row["balanced, then units"] = barrier(even[0], even[1], held, y_held)
            rows.append(row)
            print(row, flush=True)
    rows += decoders(options.steps // 3, options.pairs)
    print(save("aligned_barriers", {"rows": rows, "steps": options.steps}))


if __name__ == "__main__":
    main()
