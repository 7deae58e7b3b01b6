"""How many laws the documented functions and models have: counted, recognised and proved, each by its own means.

python benchmarks/law_tables.py            # a few minutes on one core; the tables of the documentation are made of it
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import conserved
from conserved.blocks import Attention, FeedForward, SwiGLU, TransformerBlock
from measure import save

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "certificates"))

import hf_zoo
import test_certify_transformers
import zoo


def pre_norm(dim: int, heads: int, hidden: int) -> nn.Module:
    """Layer norms with gains and biases, attention with biases, GELU, residuals."""
    return TransformerBlock(Attention(dim, heads, bias=True), FeedForward(dim, hidden, bias=True))


def rotary() -> nn.Module:
    """RMS norms with their usual ε, rotary positions, query/key norm, SwiGLU, residuals."""
    return TransformerBlock(Attention(4, 2, rotary=True, qk_norm=True), SwiGLU(4, 3), "rms")


STACKED: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "pre-norm block, usual ε": (lambda: pre_norm(4, 2, 3), 4),
    "RMS block, rotary, query/key norm, SwiGLU, usual ε": (rotary, 4),
    "two pre-norm blocks of width 3": (lambda: nn.Sequential(pre_norm(3, 1, 2), pre_norm(3, 1, 2)), 3),
    "two RMS blocks, usual ε": (lambda: nn.Sequential(rotary(), rotary()), 4),
    "pre-norm block of width 8": (lambda: pre_norm(8, 2, 12), 8),
}
"""Blocks as a model has them, whose laws up to ε are not part of the count."""

PROVED = (
    "Llama, tied",
    "Qwen 3",
    "Gemma 2",
    "Phi-3",
    "Mixtral, one active expert",
    "BERT classifier",
    "OPT, norm last",
)

FULL_SIZE = ("LlamaConfig", "DeepseekV3Config")


def blocks() -> Iterator[dict[str, Any]]:
    """The blocks of this package: floating point and ball arithmetic side by side."""
    for case in zoo.CASES:
        model = case.model()
        result = conserved.discover(model, case.sample, loss=case.loss, infer=False)
        proved = conserved.certify(case.model(), case.sample, loss=case.loss)
        yield {**counted(result), **certified(proved), "name": case.name, "recognised": case.laws(model).independent()}
    for name, (build, dim) in STACKED.items():
        torch.manual_seed(0)
        model = build().double()
        result = conserved.discover(model, torch.zeros(4, dim), infer=False)
        proved = conserved.certify(model, torch.zeros(4, dim))
        exact = conserved.recognize(model).independent(exact=True)
        yield {**counted(result), **certified(proved), "name": name, "recognised": exact}


def counted(result: conserved.Discovery) -> dict[str, Any]:
    """What floating point says."""
    return {
        "parameters": result.parameters,
        "ranks": list(result.ranks),
        "count": result.count,
        "found": result.explained,
        "gap": result.gap,
        "verdict": result.verdict.status.value,
    }


def certified(proved: conserved.Certificate) -> dict[str, Any]:
    """What a certificate says."""
    return {"at_most": proved.at_most, "proved": proved.found, "certificate": proved.verdict.status.value}


def families() -> Iterator[dict[str, Any]]:
    """Tiny models of transformers: what is recognised against the rank of the Lie closure."""
    for family in hf_zoo.COUNTED:
        model = family.build()
        sized = hf_zoo.Computing(model)
        result = conserved.discover(sized, family.sample, loss=family.loss, forms=False, seed=family.seed or 0)
        recognised = family.laws(model).independent()
        yield {**counted(result), "name": family.name, "recognised": recognised}
    for name in PROVED:
        family = hf_zoo.named(name)
        size = sum(parameter.numel() for parameter in family.build().parameters())
        proof = test_certify_transformers.certified(family)
        yield {
            **certified(proof),
            "name": name,
            "parameters": size,
            "recognised": family.laws(family.build()).independent(),
        }


def full_size() -> Iterator[dict[str, Any]]:
    """The laws of whole models, listed from a config alone."""
    import transformers

    for config in FULL_SIZE:
        library: Any = transformers
        name = config.removesuffix("Config")
        with torch.device("meta"):
            model = getattr(library, f"{name}ForCausalLM")(getattr(library, config)())
        start = time.perf_counter()
        laws = conserved.recognize(model, loss="cross_entropy")
        seconds = time.perf_counter() - start
        size = sum(parameter.numel() for parameter in model.parameters())
        yield {"name": name, "parameters": size, "laws": len(laws), "numbers": laws.numbers, "seconds": seconds}


def main() -> None:
    """Everything, line by line."""
    warnings.simplefilter("ignore")
    record: dict[str, list[dict[str, Any]]] = {}
    for part in (full_size, blocks, families):
        record[part.__name__] = []
        for row in part():
            print(row, flush=True)
            record[part.__name__].append(row)
    print(f"saved {save('law_tables', record)}")


if __name__ == "__main__":
    main()
