"""What the host does for an audit and for a watched step of AdamW, and which kernels a GPU runs for it.

python benchmarks/host_cost.py                     # tiny widths, kernels left out: all the time is the host's
python benchmarks/host_cost.py --against OTHER     # the same in turns with another checkout's src folder
python benchmarks/host_cost.py --device cuda       # 0.6 billion parameters: kernels, launches, host and device time

Without a GPU the model has as many parameters and heads as the large one and nothing to compute. Kernels are replaced
by a fill, so launching them is not counted; PyTorch's own small operations are.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from conserved import Monitor, MonitorConfig, audit, blocks
from conserved.attention import energy_field
from measure import save

TINY: dict[str, Any] = {"vocab": 64, "dim": 32, "depth": 40, "heads": 16, "hidden": 48, "kv_heads": 8, "length": 16}
LARGE = TINY | {"vocab": 65_536, "dim": 1_024, "hidden": 3_072, "length": 1_024}
ROUNDS = 12


class Dispatched(TorchDispatchMode):
    """Counts operations that are not mere views."""

    VIEWS = ("view", "detach", "squeeze", "expand", "transpose", "select", "slice", "alias", "unbind", "split",
             "as_strided", "permute", "diagonal", "empty", "_local_scalar_dense", "promote_types", "lift")  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not any(view in str(func) for view in self.VIEWS)
        return func(*args, **(kwargs or {}))


class Watched:
    """A decoder, its optimizer, and a monitor without audits of its own."""

    def __init__(self, shape: dict[str, Any], device: str, portions: bool, *, plain: bool = False) -> None:
        import conserved.tracking.ledger

        if portions:
            # As many portions as a large model is read in.
            conserved.tracking.ledger._TEMPORARY = 1
        torch.manual_seed(0)
        options = {key: shape[key] for key in ("vocab", "dim", "depth", "heads", "hidden", "kv_heads")}
        self.model: nn.Module = blocks.DecoderLM(**options, max_length=shape["length"], positions="rotary-half").to(
            device
        )
        stepper = torch.optim.SGD if plain else torch.optim.AdamW
        self.optimizer = stepper(self.model.parameters(), lr=1e-5)
        self.tokens = torch.randint(shape["vocab"], (2, shape["length"] + 1), device=device)
        config = MonitorConfig(precision=torch.bfloat16, keep=10, alarms=())
        self.monitor = Monitor(self.model, self.optimizer, loss="cross_entropy", audit=None, config=config)

    def backward(self) -> None:
        """A pass whose gradients an audit or an optimizer can use."""
        self.optimizer.zero_grad()
        logits: Tensor = self.model(self.tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1).float(), self.tokens[:, 1:].flatten()).backward()

    def step(self) -> None:
        """A step that the monitor has not seen."""
        self.backward()
        self.optimizer.step()


class Filled:
    """Stands in for a kernel: its results are filled in, so that sums vanish beside their sizes and identities hold."""

    def __init__(self, launched: list[int], results: slice) -> None:
        self.launched, self.results = launched, results

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self

    def __call__(self, *args: Any, **options: Any) -> None:
        self.launched.append(1)
        for index, one in enumerate(args[self.results]):
            if isinstance(one, Tensor):
                one.fill_(1e-2 if index else 1e-12)


def leave_kernels_out(launched: list[int]) -> None:
    """Replace every launch of a kernel by filling in its results."""
    from conserved.moment import kernels, triton_backend

    triton_backend.available = lambda device: True  # type: ignore[assignment]
    kernels.row_sums = kernels.outer_products = Filled(launched, slice(1, 3))
    kernels.placed_sums = Filled(launched, slice(4, 8))


def host() -> dict[str, float]:
    """Milliseconds of processor time, launches of kernels, and other operations."""
    torch.set_num_threads(1)
    launched: list[int] = []
    leave_kernels_out(launched)
    run, other = (Watched(TINY, "cpu", portions=True, plain=plain) for plain in (False, True))
    work: dict[str, tuple[Callable[[], None], Callable[[], object]]] = {
        "monitor.step, AdamW": (run.step, run.monitor.step),
        "monitor.step, SGD": (other.step, other.monitor.step),
        "audit, read at once": (run.backward, lambda: audit(run.model, loss="cross_entropy").tested),
        "audit, read later": (run.backward, lambda: audit(run.model, loss="cross_entropy", wait=False)),
    }
    result: dict[str, float] = {}
    for name, (prepare, call) in work.items():
        taken = []
        for number in range(ROUNDS + 2):
            prepare()
            launched.clear()
            began = time.process_time()
            call()
            taken += [time.process_time() - began] if number > 1 else []
        kernels = len(launched)
        prepare()
        with Dispatched() as counted:
            call()
        result |= {
            f"{name}: ms": 1e3 * median(taken),
            f"{name}: kernels": kernels,
            f"{name}: operations": counted.count,
        }
    return result


def in_turns(other: Path, version: str, rounds: int) -> None:
    """This checkout and another one in turns, each time in a process of its own."""
    folders = {"there": other, "here": Path(__file__).parent.parent / "src"}
    result: dict[str, list[dict[str, float]]] = {name: [] for name in folders}
    for _ in range(rounds):
        for name, folder in folders.items():
            command = [sys.executable, __file__, "--json"]
            done = subprocess.run(
                command, env=os.environ | {"PYTHONPATH": str(folder)}, capture_output=True, text=True, check=True
            )
            result[name].append(json.loads(done.stdout.splitlines()[-1]))
    medians = {name: {key: median(one[key] for one in runs) for key in runs[0]} for name, runs in result.items()}
    ratios = {key: medians["there"][key] / here for key, here in medians["here"].items()}
    for key, ratio in ratios.items():
        print(f"{key:32} {medians['there'][key]:8.1f} -> {medians['here'][key]:8.1f}   ({ratio:.2f} times less)")
    print(save("host_cost", {"against": version, **medians, "ratios": ratios, "runs": result}))


def device() -> None:
    """What a watched step, an audit and an energy field are made of on a GPU: kernels, and functions of the host."""
    run = Watched(LARGE, "cuda", portions=False)
    q, k = torch.randn(2, 1, 2**20, 64, device="cuda")
    work: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "monitor.step, AdamW": (run.step, run.monitor.step),
        "audit, read later": (run.backward, lambda: audit(run.model, loss="cross_entropy", wait=False)),
        "audit, read at once": (run.backward, lambda: audit(run.model, loss="cross_entropy").ok),
        "energy field, 2^20 keys": (lambda: None, lambda: energy_field(q, k).participation),
        "energy field, 2^20 keys, causal": (lambda: None, lambda: energy_field(q, k, causal=True).participation),
    }
    record = {}
    for name, (prepare, call) in work.items():
        result = record[name] = {**timed(prepare, call), **kernels_of(prepare, call)}
        result["host"] = functions_of(prepare, call)
        print(
            f"{name}: queued in {1e3 * result['queued_seconds']:.2f} ms, done after {1e3 * result['done_seconds']:.2f} "
            f"ms, of which the device works {1e3 * result['device_seconds']:.2f} ms in {result['launches']} launches; "
            f"returned after {1e3 * result['running_seconds']:.2f} ms where nothing waited before it",
            flush=True,
        )
        for part in ("kernels", "host"):
            for key, (taken, count) in result[part].items():
                print(f"  {1e3 * taken:8.3f} ms {count:6}  {part:8} {key}", flush=True)
    print(save("host_cost", record))


def timed(prepare: Callable[[], object], call: Callable[[], object]) -> dict[str, float]:
    """Median seconds until a call returned, and until the device was done.

    A host that waited for the device finds its caches cold, so the call is also timed as in a loop: right after what
    comes before it, which is still running on the device.
    """
    taken: dict[str, list[float]] = {"queued": [], "done": [], "running": []}
    for number in range(7):
        prepare()
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        returned = time.perf_counter()
        torch.cuda.synchronize()
        done = time.perf_counter()
        prepare()
        again = time.perf_counter()
        call()
        running = time.perf_counter() - again
        torch.cuda.synchronize()
        if number > 1:
            seconds = (returned - began, done - began, running)
            for one, value in zip(taken.values(), seconds, strict=True):
                one.append(value)
    return {f"{name}_seconds": median(values) for name, values in taken.items()}


def kernels_of(prepare: Callable[[], object], call: Callable[[], object]) -> dict[str, Any]:
    """Seconds the device works and launches, in all and for the longest kernels."""
    prepare()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    result: dict[str, list[float]] = {}
    for one in profiled.key_averages():
        # Without the types a template is made for.
        taken = result.setdefault(re.sub(r"^void |[<(].*", "", one.key)[:60], [0.0, 0])
        taken[0] += one.device_time_total / 1e6
        taken[1] += one.count
    longest = sorted(result.items(), key=lambda entry: -entry[1][0])
    return {
        "device_seconds": sum(taken for taken, _ in result.values()),
        "launches": sum(count for _, count in result.values()),
        "kernels": dict(longest[:8]),
    }


def functions_of(prepare: Callable[[], object], call: Callable[[], object]) -> dict[str, list[float]]:
    """Seconds of the host inside its longest functions themselves, and calls; a profiled host is about half as fast."""
    prepare()
    torch.cuda.synchronize()
    profiled = cProfile.Profile()
    profiled.runcall(call)
    torch.cuda.synchronize()
    longest = sorted(profiled.getstats(), key=lambda one: -one.inlinetime)[:10]
    return {_named(one.code): [one.inlinetime, one.callcount] for one in longest}


def _named(code: Any) -> str:
    """A function of Python by file and name, one of C by what Python calls it."""
    return code if isinstance(code, str) else f"{Path(code.co_filename).name}: {code.co_name}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--against", type=Path, help="the src folder of another checkout")
    parser.add_argument("--version", default="", help="what that checkout is, for the record")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each checkout")
    parser.add_argument("--json", action="store_true", help="one line for programs")
    chosen = parser.parse_args()
    logging.getLogger("conserved").setLevel(logging.ERROR)
    if chosen.device == "cuda":
        device()
    elif chosen.against is not None:
        in_turns(chosen.against, chosen.version, chosen.rounds)
    elif chosen.json:
        print(json.dumps(host()))
    else:
        for key, value in host().items():
            print(f"{key:32} {value:8.1f}")


if __name__ == "__main__":
    main()
