r"""Teeth and silence of audits at the size people train, on models of three makers.

    python benchmarks/scale_table.py table --cells llama:125M:bf16,litgpt:125M:autocast --seconds 200 --out $OUT
    python benchmarks/scale_table.py clean --cells llama:2M:bf16:256000 --passes 300 --seconds 100 --out $OUT

`table`: wrong factors on parts of a gradient, audited by weights and gradients alone, with a replay, and beside the
reference XX

On an accelerator, what the tables of `docs/audit.md` still lack is measured by these commands, about ten minutes each.
litgpt is imported from PYTHONPATH if it is not installed. Small models of other families run on a processor:

    python benchmarks/scale_table.py table --name _makers --regimes fresh --cell-seconds 40 --seconds 190 --cells \
      qwen3:2M:bf16:2000,gemma2:2M:bf16:2000,opt:2M:autocast:2000,mixtral:2M:bf16:2000,gpt2:2M:fp16:2000 --out $OUT

    python benchmarks/scale_table.py clean --name _small --passes 640 --compare-every 20 --cell-seconds 45 --cells \
      llama:2M:bf16:256000,mixtral:2M:bf16,gpt2:40M:autocast,litgpt:40M:bf16,hand:40M:autocast,hand:2M:fp16,\
      llama:40M:float32,llama:2M:bf16:128000:tied,llama:40M:autocast:151936,mixtral:40M:autocast --out $OUT
    python benchmarks/scale_table.py clean --name _large --passes 160 --cell-seconds 55 --cells \
      llama:125M:bf16,llama:125M:autocast,mixtral:125M:bf16,litgpt:125M:fp16,llama:0.5B:bf16,llama:1.4B:autocast \
      --out $OUT
    python benchmarks/scale_table.py table --name _all --cells llama:2M:bf16,llama:2M:fp16,llama:125M:float32,\
      hand:125M:bf16,mixtral:125M:autocast,litgpt:125M:bf16,llama:0.5B:autocast,llama:1.4B:bf16,llama:8B:bf16 --out $OUT
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import conserved
from measure import save
from scale_models import MAKERS, Rows

FACTORS = (1.02, 1.05, 1.1, 1.5, 2.0, 0.0, -1.0)
LETTERS = {"refuted": "R", "inconclusive": "?", "verified": "."}
SCALE = 2.0**12
"""Of the loss in float16, as a scaler would have it; gradients are audited before they are unscaled."""

PARTS = ("one row of up", "embedding rows", "router, one expert", "positions")
"""Targets that are a part of a leg of their identity."""

LAW_OF = {"key head": "query_key", "value head": "value_output"}
"""By target, the law whose sensitivity is stated, where a tensor holds several targets."""

Store = Callable[[dict[str, Any]], None]
"""Saves what a cell has found so far."""

LOSSES = ("plain", "label smoothing", "z-loss", "ignored labels", "chunked", "checkpointed", "sum")


@dataclass(eq=False)
class Cell:
    """One model in one precision."""

    maker: str
    size: str
    precision: str
    vocabulary: int
    device: str
    seed: int = 1
    tied: bool = False
    laws: dict[str, Any] = field(default_factory=dict)

    def construct(self) -> None:
        """Build the model with random weights."""
        torch.manual_seed(self.seed)
        torch.set_default_dtype(torch.bfloat16 if self.precision == "bf16" else torch.float32)
        more = {"tie_word_embeddings": True} if self.tied else {}
        try:
            with torch.device(self.device):
                self.model: nn.Module = MAKERS[self.maker].build(self.size, self.vocabulary, **more)
        finally:
            torch.set_default_dtype(torch.float32)
        self.parameters = sum(p.numel() for p in self.model.parameters())

    def build(self) -> None:
        """Build the model and read its laws."""
        self.construct()
        tokens = torch.zeros(1, 16, dtype=torch.long, device=self.device)
        for loss in ("cross_entropy", "any"):
            self.laws[loss] = conserved.recognize(self.model, tokens, loss=loss)

    @property
    def kind(self) -> torch.dtype | None:
        return {"autocast": torch.bfloat16, "fp16": torch.float16}.get(self.precision)

    def loss(self, tokens: Tensor, how: str = "plain") -> Tensor:
        with torch.autocast(self.device, self.kind or torch.bfloat16, enabled=self.kind is not None):
            logits = MAKERS[self.maker].logits(self.model, tokens)[:, :-1].flatten(0, 1)
            labels = tokens[:, 1:].flatten()
        result = _loss(logits, labels, how)
        return result * SCALE if self.precision == "fp16" else result

    def backward(self, tokens: Tensor, how: str = "plain") -> None:
        self.model.zero_grad(set_to_none=True)
        self.loss(tokens, how).backward()

    def audit(self, tokens: Tensor | None, how: str = "plain", **options: Any) -> conserved.Audit:
        closure = None if tokens is None else partial(self.loss, tokens, how)
        laws = options.pop("laws", self.laws["any" if how == "z-loss" else "cross_entropy"])
        return conserved.audit(self.model, laws, closure=closure, precision=self.kind, **options)

    def tokens(self, generator: torch.Generator, batch: int, length: int, most: int | None = None) -> Tensor:
        return torch.randint(most or self.vocabulary, (batch, length), generator=generator).to(self.device)


def _loss(logits: Tensor, labels: Tensor, how: str) -> Tensor:
    """A loss as training loops have it."""
    if how == "chunked":
        parts = zip(logits.chunk(4), labels.chunk(4), strict=True)
        return torch.stack([F.cross_entropy(a.float(), b, reduction="sum") for a, b in parts]).sum() / len(labels)
    if how == "checkpointed":
        value: Tensor = checkpoint(_plain, logits, labels, use_reentrant=False)
        return value
    if how == "ignored labels":
        labels = torch.where(torch.arange(len(labels), device=labels.device) % 3 == 0, -100, labels)
    if how == "sum":
        return F.cross_entropy(logits.float(), labels, reduction="sum")
    smoothing = 0.1 if how == "label smoothing" else 0.0
    result = F.cross_entropy(logits.float(), labels, label_smoothing=smoothing)
    return result + 1e-3 * logits.float().logsumexp(-1).square().mean() if how == "z-loss" else result


def _plain(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels)


def regimes(cell: Cell, generator: torch.Generator, *, trained: bool) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Fresh, few tokens, trained, overfitted, after a spike of the learning rate, saturated; each draws its batches."""
    long = 512 if cell.device == "cuda" else 48
    draw = partial(cell.tokens, generator)
    yield "fresh", partial(draw, 2, long)
    yield "two tokens", partial(draw, 2, 2)
    yield "three tokens, one sample", partial(draw, 1, 3)
    if trained:
        optimizer = torch.optim.AdamW(cell.model.parameters(), lr=3e-4)
        few = min(cell.vocabulary, 200)
        _train(cell, optimizer, partial(draw, 2, long, few), 20)
        yield "20 steps", partial(draw, 2, long, few)
        batch = draw(2, 32)
        _train(cell, optimizer, lambda: batch, 60)
        yield "overfitted", lambda: batch[:, : int(torch.randint(8, 33, (), generator=generator))]
        for group in optimizer.param_groups:
            group["lr"] = 1e-2
        _train(cell, optimizer, partial(draw, 2, long, few), 2)
        yield "after a spike", partial(draw, 2, long, few)
        del optimizer
    cell.model.zero_grad(set_to_none=True)
    for name, factor in (("queries and keys × 8", 8), ("queries and keys × 40", 5)):
        with torch.no_grad():
            for key, parameter in cell.model.named_parameters():
                if any(part in key for part in ("q_proj", "k_proj", ".q.weight", ".k.weight", ".qkv.")):
                    parameter.mul_(factor)
        yield name, partial(draw, 2, long)


def _train(cell: Cell, optimizer: torch.optim.Optimizer, draw: Callable[[], Tensor], steps: int) -> None:
    for _ in range(steps):
        cell.backward(draw())
        nn.utils.clip_grad_norm_(cell.model.parameters(), 1.0)
        optimizer.step()


def table(cell: Cell, options: argparse.Namespace, store: Store) -> dict[str, Any]:
    """Wrong factors on parts of the gradient of one pass, fresh and after 20 steps."""
    generator = torch.Generator().manual_seed(cell.seed)
    result: dict[str, Any] = {"planted": {}, "sensitivity": {}, "clean": {}}
    began = time.perf_counter()
    for regime in options.regimes.split(","):
        if regime == "20 steps":
            if cell.parameters > 3e9 or time.perf_counter() - began > options.cell_seconds:
                break
            optimizer = torch.optim.AdamW(cell.model.parameters(), lr=3e-4)
            _train(cell, optimizer, partial(cell.tokens, generator, 2, 512 if cell.device == "cuda" else 32, 200), 20)
            del optimizer
        # On a CPU a few tokens have to do, and are drawn from the rows of embeddings that are made wrong.
        drawn = (2, 512) if cell.device == "cuda" else (2, 32, 200)
        tokens = cell.tokens(generator, *drawn)
        cell.backward(tokens)
        alone, replayed = cell.audit(None), cell.audit(tokens)
        compared = cell.audit(tokens, reference=True, sized=False) if cell.parameters < 3e9 else None
        words = {"alone": alone, "replayed": replayed} | ({} if compared is None else {"compared": compared})
        result["clean"][regime] = {name: one.verdict.status.value for name, one in words.items()}
        result["clean"][regime]["messages"] = [
            one.verdict.message[:300] for one in words.values() if not one.conclusive
        ]
        if compared is not None and compared.comparison is not None:
            seen = compared.comparison
            result["clean"][regime] |= {
                "obstacle": seen.obstacle,
                "rows compared": seen.coverage,
                "largest difference over 6 σ": max((d.excess for d in seen.differences), default=0.0),
                "noise": seen.noise,
                "scale": str(compared.scale),
            }
        assert alone.sensitivity is not None
        result["sensitivity"][regime] = dict(alone.sensitivity.families)
        result["planted"][regime] = {}
        for target, (name, rows) in MAKERS[cell.maker].targets(cell.model, cell.size).items():
            if time.perf_counter() - began > options.cell_seconds:
                print(f"not planted for lack of time: {target}, {regime}", flush=True)
                continue
            family = LAW_OF.get(target, "")
            legs = [s for (law, parameter), s in alone.sensitivity.legs.items() if parameter == name and family in law]
            # Norms on queries and keys leave no law that a head of keys is a leg of.
            text = _planted(cell, tokens, name, rows, part=target in PARTS or not legs)
            result["planted"][regime][target] = text | {"stated": min(legs, default=None)}
            print(regime, target, result["planted"][regime][target], f"{time.perf_counter() - began:.0f} s", flush=True)
            store(result)
    return result


def _planted(cell: Cell, tokens: Tensor, name: str, rows: Rows, *, part: bool) -> dict[str, str]:
    """Return what is said of each factor by an audit alone, with a replay, and beside the reference form.

    Replays take several passes. Of factors that an audit alone refutes, the ends have to do; of parts of a leg, three
    factors with a replay and two beside the reference form.
    """
    gradient = cell.model.get_parameter(name).grad
    assert gradient is not None
    saved = gradient[rows].clone()
    text = {"alone": "", "replayed": "", "compared": ""}
    for factor in FACTORS:
        gradient[rows] = saved * factor
        text["alone"] += LETTERS[cell.audit(None, sized=False).verdict.status.value]
        asked = factor in ((1.02, 1.05, -1.0) if part else (1.02, -1.0)) or (not part and text["alone"][-1] != "R")
        asked = asked and (cell.parameters < 3e9 or factor in (1.02, -1.0))
        text["replayed"] += LETTERS[cell.audit(tokens, sized=False).verdict.status.value] if asked else "-"
        if part and cell.parameters < 3e9:
            compare = factor in (1.02, 1.05)
            again = cell.audit(tokens, sized=False, reference=True) if compare else None
            text["compared"] += "-" if again is None else LETTERS[again.verdict.status.value]
    gradient[rows] = saved
    return text


def clean(cell: Cell, options: argparse.Namespace, store: Store) -> dict[str, Any]:
    """Right passes; what was said of them, by regime, and the families that were left open."""
    generator = torch.Generator().manual_seed(cell.seed)
    text: Counter[str] = Counter()
    alone: Counter[str] = Counter()
    compared: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    each = max(options.passes // 8, 1)
    largest, imprecise, began = 0.0, 0, time.perf_counter()
    result: dict[str, Any] = {}
    for regime, draw in regimes(cell, generator, trained=cell.parameters < 3e9):
        for number in range(each):
            if time.perf_counter() - began > options.cell_seconds:
                break
            how = LOSSES[number % len(LOSSES)]
            if how == "sum" and cell.precision == "fp16":
                # A scaled sum over tokens overflows float16; a scaler would skip such a step.
                how = "plain"
            tokens = draw()
            cell.backward(tokens, how)
            first = cell.audit(None, how, sized=False)
            alone[f"{regime}: {first.verdict.status.value}"] += 1
            with_reference = number % options.compare_every == 0 and cell.parameters < 1e9
            one = cell.audit(tokens, how, sized=False, reference=with_reference)
            text[f"{regime}: {one.verdict.status.value}"] += 1
            if with_reference and one.comparison is not None:
                status = "not compared" if one.comparison.obstacle else one.comparison.verdict.status.value
                held = "not asked" if one.scale is None else one.scale.verdict.status.value
                compared[f"{regime}: {status}, loss {held}"] += 1
                imprecise += len(one.comparison.imprecise)
                largest = max([largest, *(d.excess for d in one.comparison.differences)])
            if not one.conclusive:
                names = ",".join(sorted({row.family for row in (*one.failures, *one.left_open)}))
                reasons[f"{regime}, {how}: {one.verdict.status.value} ({names}) {one.verdict.message[:330]}"] += 1
            if first.failures:
                names = ",".join(sorted({row.family for row in first.failures}))
                words = f"{first.failures[0].residual:.3g} {first.verdict.message[:200]}"
                reasons[f"ALONE {regime}, {how}: refuted ({names}) {words}"] += 1
        result = {
            "replayed": text,
            "alone": alone,
            "compared": compared,
            "largest difference over 6 σ": largest,
            "gradients explained by nearby weights": imprecise,
            "reasons": reasons,
        }
        store(result)
    return result


def main() -> None:
    """Run every cell until the time is over."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["table", "clean"])
    parser.add_argument("--cells", required=True, help="maker:size:precision[:vocabulary[:tied]], separated by commas")
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--cell-seconds", type=float, default=60.0)
    parser.add_argument("--passes", type=int, default=160)
    parser.add_argument("--compare-every", type=int, default=20, help="passes from one comparison to the next")
    parser.add_argument("--regimes", default="fresh,20 steps", help="of tables")
    parser.add_argument("--free", type=float, default=0.0, help="GB of the device that each cell waits for")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--name", default="")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    began, done = time.perf_counter(), list[dict[str, Any]]()
    arguments = {key: str(value) for key, value in vars(chosen).items()}

    def store(record: dict[str, Any]) -> None:
        if chosen.out:
            name = f"scale_{chosen.what}{chosen.name}"
            cells = {"factors": FACTORS, "arguments": arguments, "cells": [*done, record]}
            save(name, cells, chosen.out)

    for text in chosen.cells.split(","):
        maker, size, precision, *rest = text.split(":")
        vocabulary = int(rest[0]) if rest else 128256 if size == "8B" else 32000
        while device == "cuda" and torch.cuda.mem_get_info()[0] < chosen.free * 1e9:
            if time.perf_counter() - began > chosen.seconds:
                break
            time.sleep(1)
        if time.perf_counter() - began > chosen.seconds:
            print(f"not run for lack of time: {text}")
            continue
        cell = Cell(maker, size, precision, vocabulary, device, chosen.seed, "tied" in rest)
        record: dict[str, Any] = {"cell": text}
        start = time.perf_counter()
        try:
            cell.build()
            record |= {"parameters": cell.parameters, "families": dict(_families(cell.laws["cross_entropy"]))}
            saved = partial(_store_with, store, record)
            record |= {"table": table, "clean": clean}[chosen.what](cell, chosen, saved)
        except Exception as problem:
            record["error"] = f"{type(problem).__name__}: {problem}"[:400]
        record["took"] = time.perf_counter() - start
        print(record, flush=True)
        store(record)
        done.append(record)
        del cell
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def _store_with(store: Store, record: dict[str, Any], result: dict[str, Any]) -> None:
    store(record | result | {"unfinished": True})


def _families(laws: Any) -> Counter[str]:
    return Counter(symmetry.family for symmetry in laws)


if __name__ == "__main__":
    main()
