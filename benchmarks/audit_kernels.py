"""Residuals of real attention kernels in half precision, and of a Triton kernel with defects planted in its backward.

python benchmarks/audit_kernels.py --device cuda          # flash, memory-efficient, cuDNN and math, up to 8,192 tokens
python benchmarks/audit_kernels.py --device cpu --quick   # what a CPU has
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from conserved import LawSet, audit, gauge, recognize
from conserved.blocks import Attention
from conserved_papers.blocks.attention import rotate
from measure import save

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
TOKENS = 16_384
"""Tokens per run, so that every length has equally many."""

Kernel = Callable[[Tensor, Tensor, Tensor, float], Tensor]


class WithKernel(Attention):
    """The same parameters as the block, and the same function of them, computed by a given kernel."""

    def __init__(self, kernel: Kernel, *, watched: bool, **options: Any) -> None:
        super().__init__(**options)
        self.kernel = kernel
        self.watched = watched

    def forward(self, x: Tensor) -> Tensor:
        q = self._split(self.q(x), None)
        k = self._split(self.k(x), None)
        v = self._split(self.v(x), None)
        assert self.rotary is not None
        q, k = rotate(q, self.rotary), rotate(k, self.rotary)
        if self.watched:
            k = self.keys(k)
        repeat = self.heads // self.kv_heads
        k, v = k.repeat_interleave(repeat, -3), v.repeat_interleave(repeat, -3)
        return self.o(self.kernel(q, k, v, self.scale).transpose(-2, -3).flatten(-2))


def product(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """torch's own attention, by whichever backend is allowed."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


def triton_kernel(defect: str) -> Kernel:
    """The Triton kernels, with a defect."""
    from triton_attention import CausalAttention

    return lambda q, k, v, scale: CausalAttention.apply(q, k, v, scale, defect)


def measure(
    kernel: Kernel, dtype: torch.dtype, length: int, device: str, tokens: int, *, watched: bool
) -> dict[str, Any]:
    """One backward pass of one layer: the residual of each identity, and of the gauge."""
    torch.manual_seed(0)
    options = {"dim": 1024, "heads": 16, "head_dim": 64, "kv_heads": 8, "rotary": "half", "causal": True}
    layer = WithKernel(kernel, watched=watched, **options).to(device, dtype)
    x = torch.randn(max(1, tokens // length), length, 1024, device=device, dtype=dtype)
    target = torch.randn_like(x)
    laws = laws_of(layer, options)
    # What a gradient scaler does in float16: without it most gradients of keys lie below the smallest number there is.
    scale = 2.0**24 if dtype == torch.float16 else 2.0**10
    with gauge(layer) as g:
        (layer(x) * target).mean(dtype=torch.float32).mul(scale).backward()
    result = audit(layer, laws)
    worst = {
        family: max(row.residual for row in result.rows if row.family == family)
        for family in ("query_key", "value_output")
    }
    return {
        **worst,
        "gauge": g.worst,
        "tolerance": result.rows[0].tolerance,
        "identities hold": result.ok,
        "gauge holds": g.ok,
    }


def laws_of(layer: WithKernel, options: dict[str, Any]) -> LawSet:
    """The laws of the block whose function the layer computes, on the layer's parameters."""
    with torch.device("meta"):
        known = recognize(Attention(**options))
    return LawSet(symmetries=known.symmetries, parameters=dict(layer.named_parameters()))


def main() -> None:
    """Measure all kernels, print the table and save it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="short sequences only")
    chosen = parser.parse_args()
    lengths = (256,) if chosen.quick else (1024, 2048, 4096, 8192)
    tokens = 512 if chosen.quick else TOKENS
    rows: list[dict[str, Any]] = []

    def add(name: str, defect: str, kernel: Kernel, dtype: torch.dtype, length: int, *, watched: bool) -> None:
        row: dict[str, Any] = {"kernel": name, "defect": defect, "dtype": str(dtype)[6:], "length": length}
        try:
            row |= measure(kernel, dtype, length, chosen.device, tokens, watched=watched)
        except RuntimeError as problem:
            row["unavailable"] = str(problem).splitlines()[0][:160]
        rows.append(row)
        if chosen.device == "cuda":
            torch.cuda.empty_cache()

    for dtype in (torch.bfloat16, torch.float16):
        for length in lengths:
            for name, backend in BACKENDS.items():
                with sdpa_kernel(backend):
                    add(name, "", product, dtype, length, watched=False)
            if chosen.device == "cuda":
                from triton_attention import DEFECTS

                for defect in DEFECTS:
                    add(
                        "Triton", "" if defect == "none" else defect, triton_kernel(defect), dtype, length, watched=True
                    )
    table = Table(title="relative residuals after one backward pass; rotary, 16 query heads on 8 key heads of 64")
    for heading in ("kernel", "defect", "dtype", "length", "query/key", "value/output", "gauge", "limit", "seen by"):
        table.add_column(heading)
    for row in rows:
        head = (row["kernel"], row["defect"], row["dtype"], f"{row['length']:,}")
        if "unavailable" in row:
            table.add_row(*head, *("–",) * 4, row["unavailable"][:40])
            continue
        seen = [way for way, holds in (("identity", "identities hold"), ("gauge", "gauge holds")) if not row[holds]]
        figures = (f"{row[key]:.1e}" for key in ("query_key", "value_output", "gauge", "tolerance"))
        table.add_row(*head, *figures, " and ".join(seen) or "–")
    Console(width=150).print(table)
    print(f"saved {save('audit_kernels', {'rows': rows})}")


if __name__ == "__main__":
    main()
