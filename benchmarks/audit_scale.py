"""Teeth and silence of audits at the size people train: clean passes, wrong factors, bit flips, cost.

    python benchmarks/audit_scale.py --sizes 125M,0.5B,1.4B,8B --seconds 480 --out benchmarks/results

Llama configurations of transformers with random weights, in float32, autocast, bfloat16 and autocast to float16 with a
scaled loss, in eight regimes. For every pass: is it refuted when it is clean, with and without a replay? Which wrong
factors on the gradient of a key head, a value head, `up`, one row of it, a gain, rows of the embedding and the head are
refuted? Then bits of single gradient entries are flipped. Results are written after every model, so that a limit on
time loses nothing.
"""

from __future__ import annotations

import argparse
import gc
import math
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import conserved
from measure import commit, machine, save

FACTORS = (1.02, 1.05, 1.1, 1.5, 2.0, 0.0, -1.0)

SIZES: dict[str, dict[str, Any]] = {
    "2M": {"vocab_size": 2048, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 3, "heads": (6, 3)},
    "40M": {
        "vocab_size": 32000,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "heads": (6, 3),
    },
    "125M": {
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "heads": (12, 6),
    },
    "0.5B": {
        "vocab_size": 32000,
        "hidden_size": 1280,
        "intermediate_size": 3584,
        "num_hidden_layers": 22,
        "heads": (20, 10),
    },
    "1.4B": {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 26,
        "heads": (32, 8),
    },
    "8B": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "heads": (32, 8),
    },
}
PRECISIONS = {
    "2M": ("float32", "autocast", "bf16", "fp16"),
    "40M": ("bf16",),
    "125M": ("float32", "autocast", "bf16", "fp16"),
    "0.5B": ("autocast", "bf16"),
    "1.4B": ("autocast", "bf16"),
    "8B": ("bf16",),
}
SCALE = 2.0**12
"""Of the loss in float16, as a scaler would have it."""


@dataclass(eq=False)
class Run:
    """One model in one precision: its passes and what audits said of them."""

    size: str
    precision: str
    device: str
    clean: Counter[str] = field(default_factory=Counter)
    open_reasons: Counter[str] = field(default_factory=Counter)
    planted: dict[str, dict[str, str]] = field(default_factory=dict)
    misses: list[dict[str, Any]] = field(default_factory=list)
    sensitivity: dict[str, dict[str, float]] = field(default_factory=dict)
    flips: dict[str, Counter[str]] = field(default_factory=dict)
    cost: dict[str, float] = field(default_factory=dict)

    def build(self) -> None:
        """Make the model and read its laws."""
        from transformers import LlamaConfig, LlamaForCausalLM

        options = dict(SIZES[self.size])
        heads, keys = options.pop("heads")
        config = LlamaConfig(
            **options, num_attention_heads=heads, num_key_value_heads=keys, max_position_embeddings=1024
        )
        kind = torch.bfloat16 if self.precision == "bf16" else torch.float32
        torch.manual_seed(0)
        torch.set_default_dtype(kind)
        with torch.device(self.device):
            self.model = LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
        began = time.perf_counter()
        self.laws = conserved.recognize(self.model, loss="cross_entropy")
        self.cost["recognize"] = time.perf_counter() - began
        self.cost["parameters"] = sum(p.numel() for p in self.model.parameters())

    def loss(self, tokens: Tensor) -> Tensor:
        """The loss of one forward pass."""
        kind = torch.float16 if self.precision == "fp16" else torch.bfloat16
        with torch.autocast(self.device, kind, enabled=self.precision in ("autocast", "fp16")):
            loss = self.model(input_ids=tokens, labels=tokens).loss
        return loss * SCALE if self.precision == "fp16" else loss

    def backward(self, tokens: Tensor) -> None:
        """A pass with fresh gradients."""
        self.model.zero_grad(set_to_none=True)
        self.loss(tokens).backward()
        if self.precision == "fp16":
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(SCALE)

    def audits(self, tokens: Tensor, *, replayed: bool = True, **options: Any) -> dict[str, conserved.Audit]:
        """One audit by weights and gradients alone, and one that may replay the pass."""
        options |= {"precision": {"autocast": torch.bfloat16, "fp16": torch.float16}.get(self.precision)}
        found = {"alone": conserved.audit(self.model, self.laws, **options)}
        if replayed:
            closure = partial(self.loss, tokens)
            found["replayed"] = conserved.audit(self.model, self.laws, closure=closure, **options)
        return found


def regimes(run: Run, long: bool) -> Iterator[tuple[str, Tensor]]:
    """Fresh, few tokens, trained, overfitted, after a spike of the learning rate, saturated."""
    vocabulary = SIZES[run.size]["vocab_size"]
    generator = torch.Generator().manual_seed(0)
    batch = (4, 512) if run.device == "cuda" else (2, 48)
    tokens = torch.randint(vocabulary, batch, generator=generator).to(run.device)
    yield "fresh", tokens
    yield "two tokens", tokens[:, :2]
    yield "one sample", tokens[:1]
    if long:
        optimizer = torch.optim.AdamW(run.model.parameters(), lr=3e-4)
        few = torch.randint(min(vocabulary, 200), batch, generator=generator).to(run.device)
        _train(run, optimizer, few, 20)
        yield "20 steps", few
        _train(run, optimizer, tokens[:2, :32], 60)
        yield "overfitted", tokens[:2, :32]
        for group in optimizer.param_groups:
            group["lr"] = 1e-2
        _train(run, optimizer, few, 2)
        yield "after a spike", few
        del optimizer
    run.model.zero_grad(set_to_none=True)
    for name, factor in (("queries and keys × 8", 8), ("queries and keys × 40", 5)):
        with torch.no_grad():
            for parameter_name, parameter in run.model.named_parameters():
                if "q_proj" in parameter_name or "k_proj" in parameter_name:
                    parameter.mul_(factor)
        yield name, tokens


def _train(run: Run, optimizer: torch.optim.Optimizer, tokens: Tensor, steps: int) -> None:
    for _ in range(steps):
        run.backward(tokens)
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        optimizer.step()


def targets(run: Run) -> dict[str, tuple[str, slice]]:
    """Rows of parameters whose gradient is multiplied."""
    config = run.model.config
    width = config.hidden_size // config.num_attention_heads
    layer = f"model.layers.{config.num_hidden_layers // 2}."
    return {
        "key head": (layer + "self_attn.k_proj.weight", slice(0, width)),
        "value head": (layer + "self_attn.v_proj.weight", slice(0, width)),
        "up": (layer + "mlp.up_proj.weight", slice(None)),
        "one row of up": (layer + "mlp.up_proj.weight", slice(3, 4)),
        "gain": (layer + "input_layernorm.weight", slice(None)),
        "embedding rows": ("model.embed_tokens.weight", slice(0, 200)),
        "head": ("lm_head.weight", slice(None)),
    }


_LETTER = {"refuted": "R", "inconclusive": "?", "verified": "."}


def examine(run: Run, regime: str, tokens: Tensor, *, factors: bool) -> None:
    """Audit one clean pass, then the same pass with every wrong factor."""
    run.backward(tokens)
    both = run.audits(tokens)
    found_alone = both["alone"]
    for how, found in both.items():
        run.clean[f"{how}: {found.verdict.status.value}"] += 1
        if not found.conclusive:
            names = ", ".join(sorted({row.family for row in (*found.failures, *found.left_open)}))
            run.open_reasons[
                f"{how}, {regime}: {found.verdict.status.value} ({names}): {found.verdict.message[:90]}"
            ] += 1
    if found_alone.sensitivity is not None:
        run.sensitivity[regime] = dict(found_alone.sensitivity.families)
    if not factors:
        return
    for target, (name, rows) in targets(run).items():
        gradient = run.model.get_parameter(name).grad
        assert gradient is not None
        kept = gradient[rows].clone()
        said: dict[str, str] = {}
        for factor in FACTORS:
            gradient[rows] = kept * factor
            # A pass of a large model takes a second: of its factors only the smallest and the crudest are replayed.
            replayed = run.cost["parameters"] < 1e9 or factor in (1.02, -1.0)
            wrong = run.audits(tokens, replayed=replayed, sized=False)
            for how in ("alone", "replayed"):
                letter = _LETTER[wrong[how].verdict.status.value] if how in wrong else "-"
                said[how] = said.get(how, "") + letter
            gradient[rows] = kept
        run.planted.setdefault(target, {})[regime] = f"{said['alone']} {said['replayed']}"
        legs = {} if found_alone.sensitivity is None else found_alone.sensitivity.legs
        stated = min((size for (_, parameter), size in legs.items() if parameter == name), default=math.inf)
        unseen = [f for f, letter in zip(FACTORS, said["replayed"], strict=True) if letter not in "R-"]
        # What is stated is an error of a whole leg: a head is one, a row of `up` or of the embedding is not.
        whole = target not in ("one row of up", "embedding rows")
        if unseen:
            explained = not whole or all(abs(factor - 1) <= 1.05 * stated for factor in unseen)
            run.misses.append({"target": target, "regime": regime, "stated": stated, "explained": explained})


def flip(value: Tensor, bit: int) -> Tensor:
    """One number with one bit turned around."""
    kinds = {torch.float32: ("<f", "<I"), torch.bfloat16: ("<H", "<H"), torch.float16: ("<H", "<H")}
    if value.dtype == torch.float32:
        number = struct.unpack("<I", struct.pack("<f", float(value)))[0] ^ (1 << bit)
        return torch.tensor(struct.unpack("<f", struct.pack("<I", number))[0])
    assert value.dtype in kinds
    return (value.detach().cpu().reshape(1).view(torch.int16) ^ _bit(bit)).view(value.dtype)[0]


def _moves(name: str, symmetry: conserved.Symmetry) -> bool:
    return name in symmetry.parameters


def _bit(bit: int) -> int:
    return -(1 << 15) if bit == 15 else 1 << bit


BINS = (1e-4, 1e-3, 1e-2, 0.1, 1.0, 1e3, math.inf)


def flips(run: Run, tokens: Tensor, count: int) -> None:
    """Flip bits of single entries of weight gradients; is the flip seen, by its size in norms of the gradient?"""
    run.backward(tokens)
    rng = np.random.default_rng(0)
    named = [(name, p) for name, p in run.model.named_parameters() if p.grad is not None]
    weights = np.array([p.numel() for _, p in named], dtype=np.float64) ** 0.5
    for _ in range(count):
        name, parameter = named[rng.choice(len(named), p=weights / weights.sum())]
        gradient = parameter.grad
        assert gradient is not None
        flat, norm = gradient.view(-1), float(gradient.float().norm())
        place = int(rng.integers(flat.numel()))
        kept = flat[place].clone()
        wrong = flip(kept, int(rng.integers(32 if kept.dtype == torch.float32 else 16)))
        size = abs(float(wrong) - float(kept)) / norm if norm else math.inf
        flat[place] = wrong.to(flat)
        touched = run.laws.select(partial(_moves, name))
        seen = "no law"
        if len(touched):
            kind = {"autocast": torch.bfloat16, "fp16": torch.float16}.get(run.precision)
            closure = partial(run.loss, tokens)
            found = conserved.audit(run.model, touched, closure=closure, sized=False, precision=kind)
            seen = "seen" if found.verdict.status.value == "refuted" else "unseen"
        flat[place] = kept
        label = next(f"below {edge:g}" for edge in BINS if not size > edge) if size == size else "not finite"
        run.flips.setdefault(label, Counter())[seen] += 1


def measure_cost(run: Run, tokens: Tensor) -> None:
    """Seconds of the first audit, of later ones, of one with sensitivity, and of the pass itself."""

    def timed(work: Callable[[], object], times: int) -> float:
        taken = []
        for _ in range(times):
            if run.device == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            work()
            if run.device == "cuda":
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - began)
        return float(np.median(taken))

    run.backward(tokens)
    options: dict[str, Any] = {"sized": False}
    run.cost["first audit"] = timed(lambda: conserved.audit(run.model, run.laws, **options), 1)
    run.cost["audit"] = timed(lambda: conserved.audit(run.model, run.laws, **options), 5)
    run.cost["first audit with sensitivity"] = timed(lambda: conserved.audit(run.model, run.laws), 1)
    run.cost["audit with sensitivity"] = timed(lambda: conserved.audit(run.model, run.laws), 3)
    run.cost["forward and backward"] = timed(lambda: run.backward(tokens), 3)
    run.cost["tokens"] = tokens.numel()


def main() -> None:
    """Run every model in every precision until the time is over."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", default="2M")
    parser.add_argument("--precisions", default="")
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--flips", type=int, default=0)
    parser.add_argument("--factors", default="fresh,20 steps,queries and keys × 8", help="regimes with wrong factors")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    began, done = time.perf_counter(), []
    for size in chosen.sizes.split(","):
        for precision in chosen.precisions.split(",") if chosen.precisions else PRECISIONS[size]:
            if time.perf_counter() - began > chosen.seconds:
                print(f"not run for lack of time: {size} {precision}")
                continue
            run = Run(size, precision, device)
            try:
                run.build()
                for number, (regime, tokens) in enumerate(regimes(run, size != "8B")):
                    if number == 0:
                        measure_cost(run, tokens)
                    examine(run, regime, tokens, factors=regime in chosen.factors.split(","))
                    if number == 0 and chosen.flips:
                        flips(run, tokens, chosen.flips)
            except Exception as problem:
                print(f"{size} {precision}: {type(problem).__name__}: {str(problem)[:300]}")
            names = "size precision clean open_reasons planted misses sensitivity flips cost"
            done.append({name: getattr(run, name) for name in names.split()})
            print(f"{size} {precision}: {dict(run.clean)}, {time.perf_counter() - began:.0f} s", flush=True)
            for target, said in run.planted.items():
                print(f"  {target:16s} {said}")
            print(f"  open: {dict(run.open_reasons)}\n  misses: {run.misses}\n  flips: {run.flips}\n  cost: {run.cost}")
            if chosen.out:
                save(
                    "audit_scale",
                    {"commit": commit(), "machine": machine(), "factors": FACTORS, "runs": done},
                    chosen.out,
                )
            run.__dict__.pop("model", None)
            run.__dict__.pop("laws", None)
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
