"""The same work by two versions of the package, in turns: what the last changes cost or saved.

    git worktree add --detach ../before COMMIT
    python benchmarks/two_trees.py --before ../before/src --after src
    python benchmarks/two_trees.py --before ../before/src --after src --device cuda

Every piece of work is done in several pairs of fresh processes, one of each version: how memory happens to lie in a
process can cost more than a change does. In a pair both are warm and rounds alternate; a ratio is the median over all
rounds of after / before. "First" rows take a fresh process each time, "once" rows are done once. Only public names that
both versions have are used.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

SIZES: dict[str, dict[str, Any]] = {
    "cpu": {"vocab": 8192, "dim": 768, "depth": 12, "heads": 12, "hidden": 2048},
    "cuda": {"vocab": 65_536, "dim": 1024, "depth": 40, "heads": 16, "hidden": 3072, "kv_heads": 8},
}
ROUNDS, PAIRS = 4, 3
KEYS = {"cpu": 4096, "cuda": 2**20}


def model_of(device: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A decoder: 97 million parameters on a processor, 0.6 billion on a card."""
    from conserved import blocks

    torch.manual_seed(0)
    with torch.device(device):
        return blocks.DecoderLM(**SIZES[device]).to(dtype)


def backward(model: nn.Module, device: str) -> None:
    """One pass on a short text."""
    tokens = torch.randint(1000, (1, 17), device=device)
    F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()


def laws(device: str) -> Iterator[Callable[[], object]]:
    """All laws of the decoder."""
    from conserved import recognize

    yield recognize(model_of(device), loss="cross_entropy").values


def read(device: str) -> Iterator[Callable[[], object]]:
    """One sum over its weights."""
    model = model_of(device)
    yield lambda: [p.detach().sum() for p in model.parameters()]


def audited(dtype: torch.dtype) -> Callable[[str], Iterator[Callable[[], object]]]:
    """An audit with laws that are kept, its verdict read."""

    def work(device: str) -> Iterator[Callable[[], object]]:
        from conserved import audit, recognize

        model = model_of(device, dtype)
        known = recognize(model, loss="cross_entropy")
        backward(model, device)
        yield lambda: audit(model, known).ok

    return work


def watched(optimizer: str) -> Callable[[str], Iterator[Callable[[], object]]]:
    """`monitor.step()` alone, every number read, without its own audits."""

    def work(device: str) -> Iterator[Callable[[], object]]:
        from conserved import Monitor

        model = model_of(device)
        rate = {"SGD": 0.1, "AdamW": 1e-4}[optimizer]
        stepping = getattr(torch.optim, optimizer)(model.parameters(), lr=rate)
        try:
            monitor = Monitor(model, stepping, audit=None)
        except TypeError:  # before audits were made inside
            monitor = Monitor(model, stepping)

        def before() -> None:
            stepping.zero_grad()
            backward(model, device)
            stepping.step()

        def step() -> object:
            monitor.step()
            return monitor.ledger()

        step.before = before  # type: ignore[attr-defined]
        yield step

    return work


def field(causal: bool) -> Callable[[str], Iterator[Callable[[], object]]]:
    """The energy field of one head with all statistics."""

    def work(device: str) -> Iterator[Callable[[], object]]:
        from conserved.attention import energy_field

        torch.manual_seed(0)
        q, k = torch.randn(2, 1, KEYS[device], 64, device=device)

        def call() -> object:
            result = energy_field(q, k, causal=causal)
            names = ("singular_values", "participation", "coherence", "stable_rank", "effective_rank")
            return [getattr(result, name, None) for name in names]

        yield call

    return work


def discovered(build: Callable[[], nn.Module]) -> Callable[[str], Iterator[Callable[[], object]]]:
    """Discovery with formulas of an attention block with 64 parameters."""

    def work(device: str) -> Iterator[Callable[[], object]]:
        from conserved import discover

        torch.manual_seed(0)
        model = build()
        yield lambda: discover(model, torch.zeros(5, 4)).explained

    return work


def counted(width: int, *, forms: bool = True) -> Callable[[str], Iterator[Callable[[], object]]]:
    """The number of laws of attention with 4 · width² parameters, and formulas if they are asked for."""

    def work(device: str) -> Iterator[Callable[[], object]]:
        from conserved import blocks, discover

        torch.manual_seed(0)
        block = blocks.Attention(width, 4)
        yield lambda: discover(block, torch.zeros(8, width), device=device, forms=forms).count

    return work


def plain() -> nn.Module:
    """Attention as four maps."""
    from conserved import blocks

    return blocks.Attention(4, 2)


def stacked() -> nn.Module:
    """The same with heads stacked in one parameter."""
    from stacked_forms import Stacked

    return Stacked(4, 2)


WORK: dict[str, Callable[[str], Iterator[Callable[[], object]]]] = {
    "one sum over the weights": read,
    "all laws": laws,
    "audit, laws kept": audited(torch.float32),
    "audit, laws kept, bfloat16": audited(torch.bfloat16),
    "monitor.step, SGD": watched("SGD"),
    "monitor.step, AdamW": watched("AdamW"),
    "energy field": field(causal=False),
    "energy field, causal": field(causal=True),
    "first: discovery, D = 64": discovered(plain),
    "first: discovery, D = 64, stacked": discovered(stacked),
    "once: count, D = 1,024": counted(16),
    "once: count, D = 65,536, no formulas": counted(128, forms=False),
}

GPU_ONLY = ("audit, laws kept, bfloat16", "once: count, D = 65,536, no formulas")


def worker(device: str) -> None:
    """Answer a name of work on standard input with seconds, as often as it comes."""
    saved: dict[str, Callable[[], object]] = {}
    for line in sys.stdin:
        name = line.strip()
        if name not in saved:
            saved[name] = next(WORK[name](device))
            if not name.startswith(("first", "once")):
                once(saved[name], device)
        print(json.dumps(once(saved[name], device)), flush=True)


def once(call: Callable[[], object], device: str) -> float:
    """Seconds of one call."""
    getattr(call, "before", lambda: None)()
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


@contextmanager
def version(src: Path, device: str) -> Iterator[Callable[[str], float]]:
    """A process with one version of the package; call it with a name of work."""
    environment = os.environ | {"PYTHONPATH": f"{src.resolve()}:{Path(__file__).parent}", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, __file__, "--worker", "--device", device]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        asked, answers = process.stdin, process.stdout

        def ask(name: str) -> float:
            asked.write(name + "\n")
            asked.flush()
            answer = answers.readline()
            if not answer:
                raise RuntimeError(f"{name} fails with {src}")
            return float(json.loads(answer))

        yield ask
        asked.close()


def timed(name: str, trees: dict[str, Path], device: str, rounds: int, pairs: int) -> dict[str, list[float]]:
    """Seconds of one piece of work by every version, in turns."""
    if name.startswith("first"):
        rounds, pairs = 1, rounds * pairs
    result: dict[str, list[float]] = {which: [] for which in trees}
    if name.startswith("once"):
        # One after the other: memory that a process has taken on a device may not leave enough for another.
        for which, src in reversed(trees.items()):
            with version(src, device) as ask:
                result[which].append(ask(name))
            print(f"  {which}: {result[which][0]:.1f} s", flush=True)
        return result
    for _ in range(pairs):
        with ExitStack() as running:
            asks = {which: running.enter_context(version(src, device)) for which, src in trees.items()}
            for number in range(rounds):
                # Whichever comes first may find another device than the second.
                for which in sorted(asks, reverse=number % 2 == 0):
                    result[which].append(asks[which](name))
    return result


def row_of(name: str, result: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and the median ratio with its quartiles."""
    ratios = [after / before for before, after in zip(result["before"], result["after"], strict=True)]
    low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    return {
        "work": name,
        "before": median(result["before"]),
        "after": median(result["after"]),
        "ratio": median(ratios),
        "quartiles": [low, high],
        "rounds": len(ratios),
    }


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--after", type=Path, default=Path(__file__).parent.parent / "src")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="in a pair of processes")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="of processes")
    parser.add_argument("--only", nargs="*", default=list(WORK), help="names of work, or parts of them")
    parser.add_argument("--commit", default="656f59d", help="of the version before")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.device)
        return
    if options.before is None:
        parser.error("--before: the src folder of another version")
    from measure import RESULTS, save

    trees: dict[str, Path] = {"before": options.before, "after": options.after}
    names = [name for name in WORK if any(part in name for part in options.only)]
    rows = []
    for name in names:
        if options.device != "cuda" and name in GPU_ONLY:
            continue
        row = row_of(name, timed(name, trees, options.device, options.rounds, options.pairs))
        rows.append(row)
        print(
            f"{name:36} {1e3 * row['before']:10.1f} ms {1e3 * row['after']:10.1f} ms   × {row['ratio']:.2f} "
            f"[{row['quartiles'][0]:.2f}, {row['quartiles'][1]:.2f}]",
            flush=True,
        )
        # Saved after every row: a later one may not come to its end.
        saved = save("two_trees", {"before_commit": options.commit, "rows": rows}, options.output or RESULTS)
    print(saved)


if __name__ == "__main__":
    main()
