"""Training ten seeds of the CIFAR-sized vision transformer together against one after another, in steps per second.

Together, as the lab trains: stacked weights, one vmapped gradient, compiled on a GPU, one update. One after
another: plain modules with torch.optim.SGD.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from conserved_papers.lab.data import Examples
from conserved_papers.lab.recipes import build, cifar, small_images
from conserved_papers.lab.train import loss_of, stacked, stacked_gradients
from measure import RESULTS, save, side_by_side

TARGET = 5.0


def measured(
    batch: int, seeds: int, device: torch.device, dtype: torch.dtype, small: bool, rounds: int
) -> dict[str, Any]:
    """Seconds for one step of all seeds in both ways, on the same random images, and how far the weights end apart."""
    recipe = small_images() if small else cifar()
    size, channels = recipe.sizes["image"], recipe.sizes["channels"]
    generator = torch.Generator().manual_seed(0)
    images = Examples(
        name="noise",
        inputs=torch.randn(batch, channels, size, size, generator=generator),
        targets=torch.randint(10, (batch,), generator=generator),
    ).to(device, dtype)
    models = [build(recipe, seed).to(device, dtype) for seed in range(seeds)]
    theta = stacked(models, dtype, device)
    gradients_of = stacked_gradients(models[0], images.loss, dtype, own_batches=False, compiled=device.type == "cuda")
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in models]

    def together() -> None:
        gradients, _ = gradients_of(theta, images.inputs, images.targets)
        torch._foreach_add_(list(theta.values()), [gradients[name] for name in theta], alpha=-1e-3)

    def one_after_another() -> None:
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model(images.inputs), images.targets, images.loss).backward()
            optimizer.step()

    seconds = side_by_side({"together": together, "one after another": one_after_another}, rounds)
    apart = max(
        float((theta[name][index] - parameter.detach()).abs().max())
        for index, model in enumerate(models)
        for name, parameter in model.named_parameters()
    )
    return {
        "images_per_seed": batch,
        "seconds_together": seconds["together"],
        "seconds_one_after_another": seconds["one after another"],
        "ratio": seconds["one after another"] / seconds["together"],
        "images_per_second_together": seeds * batch / seconds["together"],
        "largest_difference": apart,
    }


def main() -> None:
    """Measure a range of batch sizes and save the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--batches", type=int, nargs="*", help="images per seed and step")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--precision", choices=("float32", "float64"), default="float32")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--output", default=str(RESULTS), help="a folder for the results")
    options = parser.parse_args()
    device = torch.device(options.device)
    batches = options.batches or ((1, 4, 16, 64, 256) if device.type == "cuda" else (1, 4))
    dtype = torch.float32 if options.precision == "float32" else torch.float64
    print(f"{'images/seed':>11} {'together':>12} {'one by one':>12} {'ratio':>7}")
    rows = []
    for batch in batches:
        row = measured(batch, options.seeds, device, dtype, options.small, options.rounds)
        rows.append(row)
        times = f"{row['seconds_together']:11.4f}s {row['seconds_one_after_another']:11.4f}s"
        print(f"{batch:11} {times} {row['ratio']:6.2f}×", flush=True)
    best = max(row["ratio"] for row in rows)
    print(f"best ratio {best:.1f}, target {TARGET:g}")
    beside = device.type == "cpu" and torch.cuda.is_available()
    name = f"vmapped_seeds{'_small' if options.small else ''}{'_on_cpu' if beside else ''}"
    record = {"seeds": options.seeds, "precision": options.precision, "target": TARGET, "best": best, "rows": rows}
    print(f"saved {save(name, record, folder=type(RESULTS)(options.output))}")


if __name__ == "__main__":
    main()
