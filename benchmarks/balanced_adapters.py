"""Does it help to keep the factors of adapters balanced while they train? Ten seeds of a real task.

A vision transformer is trained on five classes of Fashion-MNIST and then frozen; adapters of rank four and a new head
learn the other five, with the factors left alone, balanced every ten steps with the optimizer going along, and
balanced without them. What is compared is the loss on held-out images after a fixed number of steps, seed by seed.

    python benchmarks/balanced_adapters.py --fashion FOLDER
"""

from __future__ import annotations

import argparse
import copy
import warnings
from statistics import mean, stdev
from typing import Any

import peft
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from conserved.inference import recognize
from conserved.symmetry import Symmetry
from conserved.transform import EqualizeEvery
from conserved_papers.lab.data.sources import open_images
from measure import save

LAWS: list[Symmetry] = []
"""The general linear groups of the adapters, which are the same for every seed."""


def base(x: Tensor, y: Tensor, steps: int) -> Any:
    """A transformer trained on the first five classes."""
    config = transformers.ViTConfig(
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        image_size=28,
        patch_size=7,
        num_channels=1,
        num_labels=5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(steps):
        chosen = torch.randint(0, len(x), (64,))
        optimizer.zero_grad()
        F.cross_entropy(model(pixel_values=x[chosen]).logits, y[chosen]).backward()
        optimizer.step()
    return model


def tuned(start: Any, data: tuple[Tensor, ...], seed: int, optimizer: str, every: int, along: bool, steps: int) -> Any:
    """Held-out loss and accuracy after tuning adapters, and how unbalanced their factors are at the end."""
    x, y, held, labels = data
    torch.manual_seed(seed)
    linear = [n for n, m in start.named_modules() if isinstance(m, torch.nn.Linear) and n != "classifier"]
    model: Any = peft.get_peft_model(
        copy.deepcopy(start), peft.LoraConfig(r=4, lora_alpha=8, target_modules=linear, modules_to_save=["classifier"])
    )
    for p in model.get_submodule("base_model.model.classifier.modules_to_save.default").parameters():
        torch.nn.init.normal_(p, 0, 0.02)
    trained = [p for p in model.parameters() if p.requires_grad]
    rule: Any = {
        "AdamW": lambda: torch.optim.AdamW(trained, 5e-3),
        "SGD": lambda: torch.optim.SGD(trained, 0.02, momentum=0.9),
        "SGD, rate 0.1": lambda: torch.optim.SGD(trained, 0.1, momentum=0.9),
    }[optimizer]()
    if not LAWS:
        LAWS.extend(s for s in recognize(model, pixel_values=x[:2]) if all("lora_" in name for name in s.parameters))
    equalizer = EqualizeEvery(model, optimizer=rule if along else None, every=every, laws=LAWS) if every else None
    for _ in range(steps):
        chosen = torch.randint(0, len(x), (32,))
        rule.zero_grad()
        F.cross_entropy(model(pixel_values=x[chosen]).logits, y[chosen]).backward()
        rule.step()
        if equalizer is not None:
            equalizer.step()
    own = dict(model.named_parameters())
    uneven = [
        float((a @ a.T - b.T @ b).norm() / (a.norm() ** 2 + b.norm() ** 2))
        for n, a in own.items()
        if "lora_A" in n and (b := own[n.replace("lora_A", "lora_B")]) is not None
    ]
    model.eval()
    with torch.no_grad():
        logits = model(pixel_values=held).logits
    return {
        "loss": float(F.cross_entropy(logits, labels)),
        "accuracy": float((logits.argmax(-1) == labels).float().mean()),
        "imbalance": mean(uneven),
        "pairs": len(LAWS),
    }


def main() -> None:
    """Ten seeds of each way, print, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fashion", required=True)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--optimizers", default="AdamW;SGD;SGD, rate 0.1")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity(transformers.utils.logging.CRITICAL)
    images = open_images(options.fashion, size=28, limit=70_000)
    x, y = images.pixels.float(), images.labels.long()
    x = (x - x.mean()) / x.std()
    old, new = y < 5, y >= 5
    start = base(x[old], y[old], 400)
    data = (x[new][2000:], y[new][2000:] - 5, x[new][:2000], y[new][:2000] - 5)
    ways = {"left alone": (0, True), "balanced every 10": (10, True), "balanced, averages left": (10, False)}
    rows: dict[str, Any] = {}
    for optimizer in options.optimizers.split(";"):
        result = {way: [] for way in ways}  # type: dict[str, list[Any]]
        for seed in range(options.seeds):
            for way, (every, along) in ways.items():
                result[way].append(tuned(start, data, seed, optimizer, every, along, options.steps))
            print(optimizer, seed, {way: round(runs[-1]["loss"], 4) for way, runs in result.items()}, flush=True)
        rows[optimizer] = {}
        for way, runs in result.items():
            gains = [a["loss"] - b["loss"] for a, b in zip(result["left alone"], runs, strict=True)]
            rows[optimizer][way] = {
                "loss": mean(r["loss"] for r in runs),
                "accuracy": mean(r["accuracy"] for r in runs),
                "imbalance": mean(r["imbalance"] for r in runs),
                "gain": mean(gains),
                "gain's standard error": stdev(gains) / len(gains) ** 0.5,
                "better in": sum(g > 0 for g in gains),
                "losses": [round(r["loss"], 4) for r in runs],
            }
            print(optimizer, way, {k: v for k, v in rows[optimizer][way].items() if k != "losses"}, flush=True)
        save("balanced_adapters", {"rows": rows, "steps": options.steps, "seeds": options.seeds})
    print(save("balanced_adapters", {"rows": rows, "steps": options.steps, "seeds": options.seeds}))


if __name__ == "__main__":
    main()
