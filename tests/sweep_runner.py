"""The sweep that tests interrupt: thirty runs of the ReLU attention layer, in processes that are killed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import ClassVar

import torch

from conserved_papers.lab.places import Here, Place, Result
from conserved_papers.lab.recipes import named
from conserved_papers.lab.sweep import KIND, Training, sweep
from conserved_papers.lab.task import Documents, Task

RESULTS = 30


class NeverDone(Place):
    """Does a few tasks, then waits to be killed, however late that comes."""

    tasks = 3

    def run(self, tasks: Sequence[Task], *, folder: Path) -> Iterator[tuple[Task, Result]]:
        yield from Here().run(tasks[: self.tasks], folder=folder)
        for _ in count():
            time.sleep(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dies(Task):
    """A task whose process ends without a word, as when memory runs out."""

    kind: ClassVar[str] = KIND

    @property
    def name(self) -> str:
        return "dies"

    @property
    def results(self) -> tuple[str, ...]:
        return ("dies/0",)

    def perform(self, checkpoint: Path | None = None) -> Documents:
        os._exit(3)


def tasks() -> list[Training]:
    """Ten step sizes, three seeds each."""
    recipe = replace(
        named("relu-attention"), steps=12, examples=64, rates=tuple(1e-7 * (k + 1) for k in range(10)), seeds=(0, 1, 2)
    )
    return [Training(recipe=recipe, rate=rate, seeds=recipe.seeds) for rate in recipe.rates]


def main() -> None:
    """For every line of the input, begin to sweep into the store named on the command line, in a process of its own.

    Says which process that is, and when it has ended. What they import is imported once.
    """
    torch.set_num_threads(1)
    # One task done here imports all that the forked processes would each import.
    tasks()[0].perform()
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                sweep(tasks(), Path(sys.argv[1]), NeverDone())
            finally:
                os._exit(3)
        print(child, flush=True)  # noqa: T201
        os.waitpid(child, 0)
        print("ended", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
