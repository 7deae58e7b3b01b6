"""Bit flips in gradients, inside backward passes and in updates of a training run, by size, and who sees them.

    python benchmarks/scale_flips.py --cells llama:125M:bf16,llama:1.4B:float32 --seconds 400 --out $OUT

A Llama is trained with AdamW. Every step is audited with a replay, and the identities of a step look at every update:
clean steps must raise nothing. Every few steps bits are flipped and put right again: one a layer in gradients of
weights and one a layer in updates, so that one audit judges all, and several inside the backward pass, one a pass.
Beside them, spikes of five deviations of the norm of any tensor and of all, over the clean steps before.
"""

from __future__ import annotations

import argparse
import copy
import gc
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import conserved
from conserved.auditing.gradient_peaks import PeakHistory
from conserved.auditing.reference_form import AS_RUN, PassForm
from conserved.auditing.replay import SCALE, ClosureReplay
from conserved.boundary import Boundary
from conserved.tracking.identities import StepIdentities
from conserved.tracking.identities.update_rule import UpdateRule
from measure import save
from scale_table import Cell

WRITES = ("not the rule's", "something else wrote", "bits changed", "did not land")
"""Codes of alarms that are about written weights."""

EDGES = (1e-4, 1e-3, 1e-2, 0.1, 1.0, 1e3, math.inf)

BATCH = 24
"""Flips of one step in gradients, and in updates, if there are as many layers."""

FIRST = 12
"""Clean steps before the first flip: spikes need a past."""


def bin_of(size: float) -> str:
    """Return the bin of a relative size."""
    return "not finite" if size != size else next(f"below {edge:g}" for edge in EDGES if not size > edge)


def flipped(value: Tensor, bit: int) -> Tensor:
    """Return a number with one of its bits turned around."""
    kind = torch.int32 if value.dtype == torch.float32 else torch.int16
    top = 31 if kind == torch.int32 else 15
    mask = torch.tensor([-(1 << top) if bit == top else 1 << bit], dtype=kind, device=value.device)
    return (value.detach().reshape(1).view(kind) ^ mask).view(value.dtype)[0]


def flip_entry(values: Tensor, rng: np.random.Generator) -> Callable[[], None]:
    """Flip a random bit of a random entry in place; the result puts it right again."""
    flat = values.view(-1)
    index = int(rng.integers(flat.numel()))
    saved = flat[index].clone()
    flat[index] = flipped(saved, int(rng.integers(8 * values.element_size())))

    def restore() -> None:
        flat[index] = saved

    return restore


class KeptReplay(ClosureReplay):
    """A replay that keeps the gradients of the pass as it was run: a flip does not change what they are.

    Passes at other weights, and in other forms, are run.
    """

    def __init__(self, model: nn.Module, closure: Callable[[], Tensor]) -> None:
        super().__init__(model, closure)
        self._kept: dict[float, dict[str, Tensor]] = {}
        self._weights = self._few_weights()

    def gradients(
        self, parameters: Mapping[str, Tensor], *, scale: float = 1.0, form: PassForm = AS_RUN
    ) -> dict[str, Tensor]:
        moved = not torch.equal(self._weights, self._few_weights())
        if moved or form != AS_RUN or scale not in (1.0, SCALE):
            return super().gradients(parameters, scale=scale, form=form)
        if scale not in self._kept:
            self._kept[scale] = super().gradients(dict(self.model.named_parameters()), scale=scale)
        return {name: self._kept[scale][name].clone() for name in parameters}

    def once_more(self) -> dict[str, Tensor]:
        """Return the gradients of all parameters that the same pass gives; they must not be written to."""
        self.gradients({})
        return self._kept[1.0]

    def _few_weights(self) -> Tensor:
        """Return weights that differ if those of any tensor were moved."""
        return torch.cat([p.detach().view(-1)[:16] for p in self.model.parameters()])


@dataclass(eq=False)
class Norms:
    """Norms over clean steps, and whether others are spikes of five deviations."""

    past: list[NDArray[np.float64]] = field(default_factory=list)

    def spikes(self, now: NDArray[np.float64]) -> tuple[NDArray[np.bool_], bool]:
        """Return for every tensor whether its norm is a spike, and whether that of all is."""
        table = np.log(np.maximum(np.stack([_with_total(row) for row in self.past[-100:]]), 1e-30))
        far = np.log(np.maximum(_with_total(now), 1e-30)) > table.mean(0) + 5 * np.maximum(table.std(0), 1e-6)
        far |= ~np.isfinite(_with_total(now))
        return far[:-1], bool(far[-1])


def _with_total(norms: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.append(norms, np.linalg.norm(norms))


def norms_of(tensors: Sequence[Tensor]) -> NDArray[np.float64]:
    """Return the norm of every tensor."""
    return np.asarray(torch.stack(torch._foreach_norm(list(tensors), 2, torch.float32)).double().cpu().numpy())


@dataclass(eq=False)
class Run:
    """A training run with flips."""

    cell: Cell
    seed: int
    length: int
    inside: int
    """Flips inside of the backward pass in a step with flips."""

    def __post_init__(self) -> None:
        self.model = self.cell.model
        self.rng = np.random.default_rng(self.seed)
        self.generator = torch.Generator().manual_seed(self.seed)
        self.named = dict(self.model.named_parameters())
        rate = 3e-4 if self.cell.parameters < 1e9 else 1e-4
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate)
        self.identities = StepIdentities(self.model, self.model, [self.optimizer], Boundary(strict=True))
        self.identities._within_budget = lambda: True  # type: ignore[method-assign]
        self.peaks, self.gradient_norms, self.update_norms = PeakHistory(), Norms(), Norms()
        self.corrupted: nn.Module | None = None
        """The module whose output's gradient is flipped in the next backward pass."""
        self.modules = [m for m in self.model.modules() if isinstance(m, nn.Linear | nn.Embedding)]
        for module in self.modules:
            module.register_forward_hook(self._watch_output)
        self.counts: dict[str, dict[str, Counter[str]]] = {"gradients": {}, "inside": {}, "updates": {}}
        self.clean, self.alarms, self.other_codes = 0, list[str](), Counter[str]()

    def _watch_output(self, module: nn.Module, args: Any, output: Tensor) -> None:
        def corrupt(gradient: Tensor) -> Tensor | None:
            if self.corrupted is not module:
                return None
            wrong = gradient.clone()
            flip_entry(wrong, self.rng)
            return wrong

        if output.requires_grad:
            output.register_hook(corrupt)

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.named.items() if p.grad is not None}

    def audit(self, replay: ClosureReplay, peaks: PeakHistory) -> conserved.Audit:
        laws = self.cell.laws["cross_entropy"]
        return conserved.audit(self.model, laws, replay=replay, precision=self.cell.kind, sized=False, peaks=peaks)

    def step(self, *, flips: bool) -> None:
        """Make one step of the run, with flips before, inside and after."""
        tokens = self.cell.tokens(self.generator, 2, self.length, min(self.cell.vocabulary, 2000))
        self.model.zero_grad(set_to_none=True)
        loss = self.cell.loss(tokens)
        loss.backward(retain_graph=flips)
        result = self.audit(ClosureReplay(self.model, partial(self.cell.loss, tokens)), self.peaks)
        if result.failures or result.corrupted:
            self.alarms.append(f"audit, step {self.identities.step.number}: {result.verdict.message}"[:300])
        norms = norms_of(list(self.gradients().values()))
        if flips:
            replay = KeptReplay(self.model, partial(self.cell.loss, tokens))
            self.flip_inside(loss, replay)
            self.model.zero_grad(set_to_none=True)
            loss.backward()
            self.flip_gradients(replay)
            del replay
        self.gradient_norms.past.append(norms)
        del loss
        self.update(flips=flips)
        self.clean += 1

    def flip_inside(self, loss: Tensor, replay: KeptReplay) -> None:
        """Flip a bit of the gradient of one operation's output; the backward pass does the rest."""
        clean = replay.once_more()
        sizes = np.maximum(norms_of(list(clean.values())), 1e-30)
        for _ in range(self.inside):
            self.corrupted = self.modules[int(self.rng.integers(len(self.modules)))]
            self.model.zero_grad(set_to_none=True)
            loss.backward(retain_graph=True)
            self.corrupted = None
            gradients = self.gradients()
            moved = torch.stack([torch.dist(gradients[name], clean[name]).float() for name in clean]).cpu().numpy()
            size = float((moved / sizes).max())
            result = self.audit(replay, copy.deepcopy(self.peaks))
            tensors, everything = self.gradient_norms.spikes(norms_of(list(gradients.values())))
            infinite = any(item.trouble == "not finite" for item in result.findings)
            seen = bool(result.failures or result.corrupted or infinite)
            self._count("inside", size, seen, bool(tensors.any()), everything)

    def flip_gradients(self, replay: KeptReplay) -> None:
        """Flip bits of gradients in different layers, and audit all at once; not finite ones each by itself."""
        gradients = self.gradients()
        names = list(gradients)
        before = norms_of(list(gradients.values()))
        sizes = dict(zip(names, before.tolist(), strict=True))
        together: list[tuple[str, float, Callable[[], None]]] = []
        for name in self._drawn(names):
            restore = flip_entry(gradients[name], self.rng)
            now = float(gradients[name].float().norm())
            if not math.isfinite(now):
                result = self.audit(replay, copy.deepcopy(self.peaks))
                seen = bool(result.failures or result.corrupted or result.findings)
                self._count("gradients", math.nan, seen, True, True)
                restore()
                continue
            wrong = gradients[name].clone()
            restore()
            together.append((name, float(torch.dist(wrong, gradients[name])) / max(sizes[name], 1e-30), restore))
            gradients[name].copy_(wrong)
        result = self.audit(replay, copy.deepcopy(self.peaks))
        after = norms_of(list(gradients.values()))
        tensors, _ = self.gradient_norms.spikes(after)
        flipped_names = {name for name, _, _ in together}
        rows = [flipped_names.intersection(row.parameters) for row in result.failures]
        # An identity of two flipped tensors names neither of them.
        named = {next(iter(row)) for row in rows if len(row) == 1} | {entry.parameter for entry in result.corrupted}
        for name, size, restore in together:
            alone = before.copy()
            alone[names.index(name)] = after[names.index(name)]
            everything = self.gradient_norms.spikes(alone)[1]
            self._count("gradients", size, name in named, bool(tensors[names.index(name)]), everything)
            restore()

    def update(self, *, flips: bool) -> None:
        """Step the optimizer, with flipped weights in between if asked for."""
        self.identities.before_optimizer(self.optimizer, closure=False)
        self.optimizer.step()
        together: list[tuple[str, float, bool, bool, Callable[[], None]]] = []
        if flips:
            norms = self._updates()
            for name in self._drawn(list(self.named)) if len(self.update_norms.past) > 3 else ():
                weights, index = self.named[name].detach(), list(self.named).index(name)
                before = weights.clone()
                restore = flip_entry(weights, self.rng)
                change = float(torch.dist(weights.double(), before.double()))
                now = norms.copy()
                # The flipped entry adds to the update, in a direction of its own.
                now[index] = math.hypot(norms[index], change) if math.isfinite(change) else math.inf
                tensors, everything = self.update_norms.spikes(now)
                together.append((name, change / norms[index], bool(tensors[index]), everything, restore))
            self.update_norms.past.append(norms)
        self.identities.after_optimizer(self.optimizer)
        self.identities.after_step()
        if self.cell.device == "cuda":
            torch.cuda.synchronize()
            self.identities.step.receive(wait=True)
        alarms = self.identities.take_alarms()
        written = [alarm for alarm in alarms if alarm.code in WRITES]
        self.other_codes.update(alarm.code for alarm in alarms if alarm.code not in WRITES)
        if not flips:
            self.alarms += [str(alarm)[:300] for alarm in written]
        named = {name for alarm in written for name in (alarm.tensor, *alarm.laws)}
        for name, size, tensor, everything, restore in together:
            self._count("updates", size, name in named, tensor, everything)
            restore()
        if together:
            self.identities.restart()

    def _updates(self) -> NDArray[np.float64]:
        """Return the norm of every tensor's update, without weight decay."""
        group = self.optimizer.param_groups[0]
        beta1, beta2 = group["betas"]
        norms = []
        for p in self.named.values():
            state = self.optimizer.state[p]
            count = float(state["step"])
            root = state["exp_avg_sq"].float().sqrt().div_(math.sqrt(1 - beta2**count)).add_(group["eps"])
            norms.append(state["exp_avg"].float().div(root).norm() * (group["lr"] / (1 - beta1**count)))
        return np.asarray(torch.stack(norms).double().cpu().numpy())

    def _drawn(self, names: Sequence[str]) -> list[str]:
        """Draw tensors from different layers, so that no identity but those of the stream has two; large ones more."""
        weights = np.array([self.named[name].numel() for name in names], dtype=np.float64) ** 0.5
        order = self.rng.choice(len(names), size=len(names), replace=False, p=weights / weights.sum())
        chosen: dict[str, str] = {}
        for index in order.tolist():
            layer = re.search(r"\.(\d+)\.", names[index])
            chosen.setdefault(layer[1] if layer else "ends", names[index])
        return list(chosen.values())[:BATCH]

    def _count(self, where: str, size: float, seen: bool, tensor: bool, everything: bool) -> None:
        bins = self.counts[where].setdefault(bin_of(size), Counter())
        bins.update({"all": 1, "seen": seen, "5 σ of a tensor's norm": tensor, "5 σ of the global norm": everything})

    def record(self) -> dict[str, Any]:
        """Return what was seen so far."""
        record = {"clean steps": self.clean, "alarms in clean steps": len(self.alarms), "alarms": self.alarms[:10]}
        sums = next(one for one in self.identities.identities if isinstance(one, UpdateRule))
        off = self.identities._boundary.off("identity of " + sums.name)
        return record | {"other codes": dict(self.other_codes), "block sums off": bool(off), "flips": self.counts}


def main() -> None:
    """Run every cell until its time is over; save after every part."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", required=True, help="maker:size:precision[:vocabulary], separated by commas")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--flips", type=int, default=1000, help="flips in each place; runs end when all are made")
    parser.add_argument("--every", type=int, default=8, help="steps from one with flips to the next")
    parser.add_argument("--inside", type=int, default=10)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=400.0, help="limit for each cell")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--name", default="")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    done: list[dict[str, Any]] = []

    def store(record: dict[str, Any]) -> None:
        if chosen.out:
            arguments = {key: str(value) for key, value in vars(chosen).items()}
            save(f"scale_flips{chosen.name}", {"arguments": arguments, "cells": [*done, record]}, chosen.out)

    for text in chosen.cells.split(","):
        maker, size, precision, *rest = text.split(":")
        began = time.perf_counter()
        record: dict[str, Any] = {"cell": text, "seed": chosen.seed}
        run: Run | None = None
        cell: Cell | None = None
        try:
            cell = Cell(maker, size, precision, int(rest[0]) if rest else 32000, device, chosen.seed)
            cell.build()
            run = Run(cell, chosen.seed, chosen.length, chosen.inside)
            for number in range(chosen.steps):
                run.step(flips=number >= FIRST and number % chosen.every == 0)
                took = time.perf_counter() - began
                if number % 50 == 0:
                    record |= run.record() | {"parameters": cell.parameters, "took": took}
                    store(record)
                    print(text, number, f"{took:.0f} s", flush=True)
                if took > chosen.seconds:
                    break
        except Exception as problem:
            record["error"] = f"{type(problem).__name__}: {problem}"[:400]
        if run is not None:
            record |= run.record()
            run.identities.close()
        record["took"] = time.perf_counter() - began
        print(record, flush=True)
        store(record)
        done.append(record)
        run = cell = None
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
