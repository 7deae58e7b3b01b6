"""The exact spectrum of the energy field against forming it, and its time and memory as the length grows.

With `--profile` also where the time of one call at the longest length goes, and on a GPU from how many heads on the
device factors small matrices faster than the host does.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from conserved.attention import energy_field, small_matrices, softmax_statistics
from measure import save, side_by_side

WIDTH = 64
FORMED = 4096
LENGTHS = {"cpu": [4096, 16384, 65536, 131072], "cuda": [1 << bits for bits in range(12, 21)]}
ROUNDS = {"cpu": 3, "cuda": 9}


def formed(q: Tensor, k: Tensor) -> Tensor:
    """The matrix itself, its rows centred, and the singular values of all of it."""
    logits = q @ k.T * WIDTH**-0.5
    return torch.linalg.svdvals(logits - logits.mean(-1, keepdim=True))


def read(q: Tensor, k: Tensor) -> Tensor:
    """The least that touching queries and keys can cost: each is read once."""
    return q.sum() + k.sum()


def drawn(length: int, device: str, dtype: torch.dtype, heads: int = 1) -> tuple[Tensor, Tensor]:
    """Random queries and keys."""
    q, k = torch.randn(2, heads, length, WIDTH, device=device, dtype=dtype)
    return q, k


def against_forming(device: str) -> dict[str, Any]:
    """One head at L = 4,096, both ways in turns."""
    q, k = drawn(FORMED, device, torch.float32)
    seconds = side_by_side({"field": partial(energy_field, q, k)}, 9)
    # The slow way is taken once: it needs minutes on a busy processor, and warming up would change nothing.
    start, started_at = time.perf_counter(), time.process_time()
    expected = formed(q[0], k[0]).double().cpu()
    seconds["formed"] = time.perf_counter() - start
    # Seconds of the processor, all threads together, do not depend on who else is using it.
    busy = {"formed": time.process_time() - started_at}
    started_at = time.process_time()
    for _ in range(9):
        energy_field(q, k)
    busy["field"] = (time.process_time() - started_at) / 9
    result = energy_field(q, k).singular_values[0].cpu()
    error = float((result - expected[: len(result)]).abs().max() / expected[0])
    return {
        "seconds": seconds,
        "ratio": seconds["formed"] / seconds["field"],
        "processor_seconds": busy,
        "processor_ratio": busy["formed"] / busy["field"],
        "relative_error": error,
    }


def grown(length: int, device: str, dtype: torch.dtype, *, causal: bool) -> dict[str, Any]:
    """Time against a plain read, and memory beyond queries and keys, at one length."""
    q, k = drawn(length, device, dtype)
    work: dict[str, Callable[[], object]] = {
        "field": partial(energy_field, q, k, causal=causal),
        "read": partial(read, q, k),
    }
    seconds = side_by_side(work, ROUNDS[device])
    return {
        "length": length,
        "causal": causal,
        "seconds": seconds,
        "over_read": seconds["field"] / seconds["read"],
        "extra_bytes": extra_memory(length, device, dtype, causal=causal),
        "input_bytes": 2 * q.numel() * q.element_size(),
    }


def extra_memory(length: int, device: str, dtype: torch.dtype, *, causal: bool) -> int:
    """The peak beyond queries and keys; on the processor in a process of its own, whose peak can be read."""
    if device == "cuda":
        q, k = drawn(length, device, dtype)
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        energy_field(q, k, causal=causal)
        return torch.cuda.max_memory_allocated() - before
    command = [sys.executable, __file__, "--peak", str(length), "--dtype", str(dtype).removeprefix("torch.")]
    done = subprocess.run(command + ["--causal"] * causal, capture_output=True, text=True, check=True)
    return int(done.stdout)


def peak(length: int, dtype: torch.dtype, *, causal: bool) -> int:
    """How far the memory of this process rises above what it holds, at most, by one field (Linux)."""
    energy_field(*drawn(512, "cpu", dtype), causal=causal)
    q, k = drawn(length, "cpu", dtype)
    # The peak so far includes that of the process this one was started from; writing 5 forgets it.
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    energy_field(q, k, causal=causal)
    return resident("VmHWM") - before


def resident(name: str) -> int:
    """Bytes of memory this process holds, or has held at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(name)))


def linear(rows: list[dict[str, Any]], key: str) -> float:
    """The exponent p of cost ∝ L^p between the two longest lengths."""
    first, last = rows[-2], rows[-1]
    value = [row["seconds"]["field"] if key == "seconds" else row[key] for row in (first, last)]
    growth = torch.tensor(value[1] / max(value[0], 1e-12)).log2()
    return float(growth / torch.tensor(last["length"] / first["length"]).log2())


def profiled(length: int, device: str, dtype: torch.dtype, *, causal: bool) -> dict[str, Any]:
    """One call: how long the host is busy with it, how long it takes in all, its launches and its longest kernels."""
    q, k = drawn(length, device, dtype)
    call = partial(energy_field, q, k, causal=causal)
    call()
    settle(device)
    start = time.perf_counter()
    call()
    host = time.perf_counter() - start
    settle(device)
    whole = time.perf_counter() - start
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        call()
        settle(device)
    events = [event for event in profile.key_averages() if event.device_type.name == device.upper()]
    busy = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    taken = {event.key: getattr(event, busy) for event in events}
    counts = {event.key: event.count for event in events}
    longest = sorted(taken, key=lambda name: -taken[name])[:10]
    return {
        "length": length,
        "host_seconds": host,
        "seconds": whole,
        "kernel_seconds": 1e-6 * sum(taken.values()),
        "launches": sum(counts.values()),
        "longest": [{"name": name, "seconds": 1e-6 * taken[name], "count": counts[name]} for name in longest],
    }


def settle(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def print_profile(console: Console, name: str, result: dict[str, Any]) -> None:
    """The ten longest kernels, and the whole in a line."""
    table = Table(title=f"{name}, {result['length']:,} keys")
    for heading in ("ms", "count", "kernel"):
        table.add_column(heading, justify="left" if heading == "kernel" else "right", no_wrap=True)
    for row in result["longest"]:
        table.add_row(f"{1e3 * row['seconds']:.3f}", str(row["count"]), row["name"][:90])
    console.print(table)
    console.print(
        f"{1e3 * result['seconds']:.2f} ms, of which the host was busy for {1e3 * result['host_seconds']:.2f}; kernels "
        f"{1e3 * result['kernel_seconds']:.2f} ms in {result['launches']} launches"
    )


def factored(device: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Many short heads, their small matrices factored on the host and on the device."""
    rows = []
    usual = small_matrices.HOST_HEADS
    for heads in (1, 4, 16, 64):
        q, k = drawn(1024, device, dtype, heads)

        def placed_at(most: int, q: Tensor = q, k: Tensor = k) -> None:
            small_matrices.HOST_HEADS = most
            energy_field(q, k)

        work = {"host": partial(placed_at, heads), "device": partial(placed_at, 0)}
        rows.append({"heads": heads, "seconds": side_by_side(work, 5)})
    small_matrices.HOST_HEADS = usual
    return rows


def main() -> None:
    """Measure, print ratios, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float64"))
    parser.add_argument("--peak", type=int)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--profile", action="store_true")
    chosen = parser.parse_args()
    dtype = getattr(torch, chosen.dtype)
    torch.manual_seed(0)
    if chosen.peak:
        print(peak(chosen.peak, dtype, causal=chosen.causal))
        return
    console = Console(width=110)
    once = against_forming(chosen.device)
    console.print(
        f"exact spectrum at L = {FORMED:,}, d = {WIDTH}: {once['ratio']:,.0f} times faster than forming the matrix and "
        f"an SVD ({1e3 * once['seconds']['field']:.2f} ms against {once['seconds']['formed']:.2f} s), "
        f"{once['processor_ratio']:,.0f} times by processor time; relative difference {once['relative_error']:.1e}"
    )
    table = Table(title=f"one head, d = {WIDTH}, {chosen.dtype}")
    for heading in ("field", "length", "ms", "times a plain read", "extra memory / input"):
        table.add_column(heading, justify="right")
    record: dict[str, Any] = {"width": WIDTH, "dtype": chosen.dtype, "against_forming": once}
    for name, causal in (("whole", False), ("causal", True)):
        rows = [grown(length, chosen.device, dtype, causal=causal) for length in LENGTHS[chosen.device]]
        for row in rows:
            cells = (f"{row['length']:,}", f"{1e3 * row['seconds']['field']:.1f}", f"{row['over_read']:.1f}")
            table.add_row(name, *cells, f"{row['extra_bytes'] / row['input_bytes']:.1f}")
        record[name] = {"rows": rows, "time_exponent": linear(rows, "seconds")}
        record[name]["memory_exponent"] = linear(rows, "extra_bytes")
    console.print(table)
    for name in ("whole", "causal"):
        exponents = (record[name]["time_exponent"], record[name]["memory_exponent"])
        console.print(f"{name}: time ∝ L^{exponents[0]:.2f}, memory ∝ L^{exponents[1]:.2f}")
    if chosen.profile:
        for name, causal in (("whole", False), ("causal", True)):
            result = profiled(LENGTHS[chosen.device][-1], chosen.device, dtype, causal=causal)
            record[name]["profile"] = result
            print_profile(console, name, result)
        if chosen.device == "cuda":
            record["factored"] = factored(chosen.device, dtype)
            for row in record["factored"]:
                times = ", ".join(f"{1e3 * taken:.2f} ms on the {where}" for where, taken in row["seconds"].items())
                console.print(f"{row['heads']} heads of 1,024 keys, small matrices factored: {times}")
    q, k = drawn(4096, chosen.device, dtype)
    quadratic = side_by_side({"entropy": partial(softmax_statistics, q, k, causal=True)}, 2)
    record["entropy_seconds_at_4096"] = quadratic["entropy"]
    print(f"saved {save('energy_field', record)}")


if __name__ == "__main__":
    main()
