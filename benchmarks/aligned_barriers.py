"""The loss on the line between two networks trained apart: as they are, after weight matching, after aligning.

Weight matching (Ainsworth, Hayase and Srinivasa 2023) is written out below for layers in a row; `align` finds the units
itself, and moves along scalings as well. Networks are trained on Fashion-MNIST from different seeds.

    python benchmarks/aligned_barriers.py --fashion FOLDER
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from conserved.lab.data.sources import open_images
from conserved.transform import align, equalize, exchanges, symmetries_of
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


def main() -> None:
    """Train pairs, align, print, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fashion", required=True)
    parser.add_argument("--steps", type=int, default=1500)
    options = parser.parse_args()
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
            found = align(a, full, laws=laws, exchanges=units)
            row["align"] = barrier(a, full, held, y_held)
            row |= {"distance before": found.before, "distance after": found.after}
            even = [copy.deepcopy(one) for one in (a, b)]
            for one in even:
                equalize(one, laws=laws)
            align(even[0], even[1], laws=laws, exchanges=units, continuous=False)
            row["balanced, then units"] = barrier(even[0], even[1], held, y_held)
            rows.append(row)
            print(row, flush=True)
    print(save("aligned_barriers", {"rows": rows, "steps": options.steps}))


if __name__ == "__main__":
    main()
