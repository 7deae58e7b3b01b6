"""The demonstration's model, loaded from a file in its folder as any user's would be, and how it is trained."""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from conserved.auditing import Audit, audit
from conserved.inference import recognize
from conserved.laws import LawSet

MODEL_FILE, KERNEL_FILE = "gpt.py", "fused_norm.py"
BATCH, LENGTH = 12, 64
"""768 rows reach every norm: one block of 512, and 256 that fill no block."""
RATE, DECAY = 3e-3, 0.1

Tell = Callable[[str], None]
"""Says in a few words how far something is."""


def copy_files(folder: Path) -> tuple[Path, Path]:
    """Return the model's and the kernel's source, put into the folder of the demonstration for everyone to read and
    change.
    """
    folder.mkdir(parents=True, exist_ok=True)
    source = Path(__file__).parent
    copies = tuple(Path(shutil.copyfile(source / name, folder / name)) for name in (MODEL_FILE, KERNEL_FILE))
    return copies[0], copies[1]


def load(path: Path) -> ModuleType:
    """Return a Python file as a module."""
    spec = importlib.util.spec_from_file_location(f"conserved_demo_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _text(count: int, length: int, seed: int) -> Tensor:
    """Return sequences from random places of the first megabyte of the standard library's source, a token a byte."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    source = b"".join(file.read_bytes() for file in sorted(folder.glob("*.py")))[: 1 << 20]
    tokens = torch.frombuffer(bytearray(source), dtype=torch.uint8).long()
    starts = torch.randint(len(tokens) - length + 1, (count,), generator=torch.Generator().manual_seed(seed))
    return tokens[starts[:, None] + torch.arange(length)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DemoTask:
    """A model, an objective to train it with, and batches of text: the standard library's source, as bytes."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    inputs: Tensor
    targets: Tensor

    @staticmethod
    def of(folder: Path, seed: int, *, fused: bool) -> DemoTask:
        """Return the model with the weights of a seed, with PyTorch's layer norm or with the fused one that has the
        defect.
        """
        source, kernel = copy_files(folder)
        options: dict[str, Any] = {"norm": load(kernel).FusedLayerNorm} if fused else {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = load(source).build(**options)
        text = _text(64 * BATCH, LENGTH + 1, seed)
        optimizer = model.optimizer(lr=RATE, weight_decay=DECAY)
        return DemoTask(model=model, optimizer=optimizer, inputs=text[:, :-1], targets=text[:, 1:])

    @property
    def size(self) -> int:
        """The number of parameters of the model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def objective(self, step: int) -> Tensor:
        """Return the loss of the batch of a step; the same step has the same batch in every run."""
        chosen = torch.randint(len(self.inputs), (BATCH,), generator=torch.Generator().manual_seed(step))
        loss: Tensor = self.model(self.inputs[chosen], self.targets[chosen])[1]
        return loss

    def laws(self) -> LawSet:
        """Read off one evaluation of the objective."""
        return recognize(lambda: self.objective(0), self.model)


@dataclass(slots=True, kw_only=True, eq=False)
class TrainingCurve:
    """The record of a training run: losses, and for every step the identity that is furthest beyond rounding."""

    losses: list[float] = field(default_factory=list)
    excess: list[float] = field(default_factory=list)
    first: Audit | None = None
    failed: int = 0
    """Steps in which an identity failed."""


def train(
    task: DemoTask, laws: LawSet, steps: int, tell: Tell, after: Callable[[], None] = lambda: None
) -> TrainingCurve:
    """Train, audit every backward pass before the optimizer uses it, and call `after` when it has moved."""
    course = TrainingCurve()
    exact = laws.select(lambda symmetry: symmetry.exact)
    for step in range(steps):
        task.optimizer.zero_grad()
        loss = task.objective(step)
        loss.backward()
        result = audit(task.model, exact)
        course.first = course.first or result
        course.failed += bool(result.failures)
        course.losses.append(float(loss.detach()))
        course.excess.append(max((row.residual / row.tolerance for row in result.rows if row.checked), default=0.0))
        task.optimizer.step()
        after()
        if step % 10 == 0:
            tell(f"step {step} of {steps}, loss {course.losses[-1]:.2f}")
    return course
