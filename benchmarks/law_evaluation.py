"""Every law of a 12-layer, width-768 decoder against a plain read of its weights and a loop over symmetries."""

from __future__ import annotations

from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from conserved import LawSet, blocks, recognize
from measure import save, side_by_side

MODELS = {
    "rotary, RMS norm, SwiGLU": {},
    "rotary, grouped": {"kv_heads": 4, "positions": "rotary-half"},
    "no positions, RMS norm, SwiGLU": {"positions": "none"},
    "layer norm, biases, GELU": {"positions": "learned", "norm": "layer", "bias": True, "feedforward": "gelu"},
}
ROUNDS = 25


def read(theta: dict[str, Tensor]) -> list[Tensor]:
    """The least that touching every weight can cost."""
    return [tensor.sum() for tensor in theta.values()]


def loop(laws: LawSet, theta: dict[str, Tensor]) -> list[Tensor]:
    """One symmetry at a time."""
    return [symmetry.law(theta) for symmetry in laws]


def main() -> None:
    """Time the three ways in turns and print their ratios."""
    torch.manual_seed(0)
    table = Table(title="every law of a decoder, 12 layers × 768, vocabulary 8,192")
    for heading in ("model", "parameters", "laws", "numbers", "read (ms)", "laws / read", "loop / read"):
        table.add_column(heading, justify="right" if heading != "model" else "left")
    record = {}
    for name, options in MODELS.items():
        model = blocks.DecoderLM(8192, 768, 12, 12, 2048, **options)  # type: ignore[arg-type]
        laws = recognize(model, loss="cross_entropy")
        theta = {key: parameter.detach() for key, parameter in model.named_parameters()}
        seconds = side_by_side(
            {
                "read": partial(read, theta),
                "laws": laws.values,
                "loop": partial(loop, laws, theta),
            },
            ROUNDS,
        )
        count = sum(tensor.numel() for tensor in theta.values())
        ratios = {way: seconds[way] / seconds["read"] for way in ("laws", "loop")}
        cells = (f"{count:,}", f"{len(laws):,}", f"{laws.numbers:,}", f"{1e3 * seconds['read']:.1f}")
        table.add_row(name, *cells, *(f"{ratio:.1f}" for ratio in ratios.values()))
        record[name] = {
            "parameters": count,
            "laws": len(laws),
            "numbers": laws.numbers,
            "seconds": seconds,
            "ratios": ratios,
        }
    Console(width=110).print(table)
    print(f"saved {save('law_evaluation', {'models': record})}")


if __name__ == "__main__":
    main()
