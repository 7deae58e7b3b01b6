"""The sweep that tests interrupt: thirty runs of the ReLU attention layer, in the process that is killed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

from conserved.lab.places import Here
from conserved.lab.recipes import named
from conserved.lab.sweep import Training, sweep

RESULTS = 30


def tasks() -> list[Training]:
    """Ten step sizes, three seeds each."""
    recipe = replace(
        named("relu-attention"), steps=32, examples=64, rates=tuple(1e-7 * (k + 1) for k in range(10)), seeds=(0, 1, 2)
    )
    return [Training(recipe=recipe, rate=rate, seeds=recipe.seeds) for rate in recipe.rates]


def main() -> None:
    """Sweep into the store named on the command line."""
    torch.set_num_threads(1)
    sweep(tasks(), Path(sys.argv[1]), Here())


if __name__ == "__main__":
    main()
