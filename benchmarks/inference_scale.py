"""Time and memory from nothing to laws: decoders of 7 and 70 billion parameters, and how both grow with depth.

Every model is built on the meta device and followed in a process of its own; the conserved numbers are held against the
closed form of the architecture.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

from measure import save

SIZES = {
    "7 billion, 32 layers": {"dim": 4096, "depth": 32, "heads": 32, "kv_heads": 32, "hidden": 11008},
    "70 billion, 80 layers": {"dim": 8192, "depth": 80, "heads": 64, "kv_heads": 8, "hidden": 28672},
    **{
        f"width 1,024, {depth} layers": {"dim": 1024, "depth": depth, "heads": 16, "kv_heads": 16, "hidden": 2816}
        for depth in (8, 16, 32, 64, 128)
    },
}


def closed_form(*, dim: int, depth: int, heads: int, kv_heads: int, hidden: int) -> int:
    """Conserved numbers of a rotary decoder with RMS norms, SwiGLU and an untied head under cross-entropy."""
    width = dim // heads
    layer = 2 * dim + hidden + kv_heads * (width // 2 + width * (width + 1) // 2)
    return depth * layer + 2 * dim + 1


def measured(name: str) -> dict[str, Any]:
    """One model, in this process."""
    import torch

    import conserved

    size = SIZES[name]
    start = time.perf_counter()
    with torch.device("meta"):
        model = conserved.blocks.DecoderLM(32000, max_length=64, **size)  # type: ignore[arg-type]
    built, spent = time.perf_counter(), time.process_time()
    tokens = torch.empty((2, 8), dtype=torch.int64, device="meta")
    laws = conserved.recognize(model, tokens, loss="cross_entropy")
    done = time.perf_counter()
    return {
        "name": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "laws": len(laws),
        "numbers": laws.numbers,
        "closed_form": closed_form(**size),
        "build_seconds": built - start,
        "seconds": done - built,
        "processor_seconds": time.process_time() - spent,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def main() -> None:
    """Every model in a process of its own, then the table."""
    if len(sys.argv) > 1:
        print(json.dumps(measured(sys.argv[1])))
        return
    result = []
    for name in SIZES:
        run = subprocess.run(
            [sys.executable, "-W", "ignore", __file__, name], capture_output=True, text=True, check=False
        )
        if run.returncode:
            print(name, run.stderr.strip().splitlines()[-1:])
            continue
        row = json.loads(run.stdout.strip().splitlines()[-1])
        result.append(row)
        assert row["numbers"] == row["closed_form"], row
        spent = f"{row['seconds']:7.1f} s {row['processor_seconds']:7.1f} s of a processor"
        print(f"{name:26s} {spent} {row['peak_gib']:6.2f} GiB {row['numbers']:,} numbers", flush=True)
    cores = len(os.sched_getaffinity(0))
    print("saved", save("inference_scale", {"cores": cores, "models": result}))


if __name__ == "__main__":
    main()
