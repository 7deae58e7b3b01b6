"""Silent errors under TrainCheck 0.2.0, with a reference run of their twin: findings, noise, cost.

python benchmarks/traincheck_comparison.py --traincheck FOLDER/bin --out benchmarks/results

FOLDER is a virtual environment with `pip install traincheck==0.2.0`. On a machine without a GPU it needs PyTorch built
for the CPU, or `traincheck.utils.safe_getattr` changed to pass over RuntimeError. Every program is a plain script
without `conserved`. Invariants are inferred from one run of the twin. A run of the twin with another seed shows the
noise; every wrong run is checked against the same invariants. The same scripts run with a default monitor.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import commit, machine, save

STEPS = 8

TWIN = """
import copy, sys
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(SEED)
torch.set_num_threads(1)
body = [nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 12), nn.BatchNorm1d(12)]
model = nn.Sequential(*body, nn.Linear(12, 4))
# before the optimizer
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
# after the optimizer
for number in range(1, STEPS + 1):
    # before the step
    x, y = torch.randn(8, 6), torch.randint(4, (8,))
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    # with gradients
    optimizer.step()
    # after the step
    if number == 4:
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()
"""

ERRORS: dict[str, tuple[str, str]] = {
    "zero_grad() is not called (stackoverflow-60335387)": ("    optimizer.zero_grad()\n", ""),
    "frozen head in the optimizer, norms outside (pytorch-forum-84911)": (
        "optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)",
        "for name, p in model.named_parameters():\n    p.requires_grad = name.startswith('4.')\n"
        "optimizer = torch.optim.Adam(model[5].parameters(), lr=1e-2)",
    ),
    "the optimizer holds replaced parameters (accelerate-2665)": (
        "# after the optimizer",
        "for m in model.modules():\n    for n, p in list(m.named_parameters(recurse=False)):\n"
        "        setattr(m, n, nn.Parameter(p.detach().clone()))",
    ),
    "the optimizer holds a copy of the model (wrapper)": (
        "torch.optim.Adam(model.parameters()", "torch.optim.Adam(copy.deepcopy(model).parameters()",
    ),
    "a step does nothing after a step without gradients (pytorch-115607)": (
        "    optimizer.step()\n", "    number >= 3 or optimizer.step()\n",
    ),
    "updates of one tensor are lost (MPS addcdiv_)": (
        "    optimizer.step()\n", "    kept = model[3].weight.detach().clone()\n    optimizer.step()\n"
        "    model[3].weight.data.copy_(kept)\n",
    ),
    "dropout stays on in eval mode (transformers-33844)": (
        "        model.eval()\n", "        model.eval()\n        model[2].train()\n",
    ),
    "eval() and no train()": ("        model.train()\n", "        pass\n"),
    "a frozen stage is trained (mmpretrain-702)": (
        "# before the optimizer", "model[0].requires_grad = False",
    ),
    "weight decay a second time by hand": (
        "    # after the step", "    [p.data.mul_(0.999) for p in model.parameters()]",
    ),
    "the gradient of one tensor is halved": ("    # with gradients", "    model[3].weight.grad.mul_(0.5)"),
    "one gradient arrives as zeros from step 3 on": (
        "    # with gradients", "    number >= 3 and model[3].weight.grad.zero_()",
    ),
    "a bit of a weight flips after step 3": (
        "    # after the step", "    if number == 3: model[0].weight.data.view(torch.int32)[0, 0] ^= 1 << 18",
    ),
    "gradients are clipped after the step": (
        "    # after the step", "    nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
    ),
    "the state of the optimizer is cleared after step 3": (
        "    # before the step", "    if number == 4: optimizer.state.clear()",
    ),
    "a layer is initialised again after step 3": (
        "    # after the step", "    if number == 3: model[3].reset_parameters()",
    ),
}  # fmt: skip

MONITORED = (
    (
        "# after the optimizer",
        "from conserved import Monitor\nmonitor = Monitor(model, optimizer)\n# after the optimizer",
    ),
    ("    # after the step", "    monitor.step()\n    # after the step"),
)


def script(error: str | None, seed: int, *, monitored: bool = False) -> str:
    """Return a program, right or with one error."""
    text = TWIN
    if error is not None:
        old, new = ERRORS[error]
        assert old in text, error
        text = text.replace(
            old, new + ("" if new.endswith("\n") or not new else "\n" + old * old.strip().startswith("#"))
        )
    if monitored:
        for old, new in MONITORED:
            if old.strip() not in text:
                old, new = (
                    "    if number == 4:\n        model.eval()",
                    "    monitor.step()\n    if number == 4:\n        model.eval()",
                )
            text = text.replace(old, new, 1)
        text += "monitor.close()\nimport json\n"
        text += "print('ALARMS', json.dumps([[a.kind, a.step, a.message] for a in monitor.alarms]))\n"
    return text.replace("SEED", str(seed)).replace("STEPS", str(STEPS))


class TrainCheck:
    """The commands of one installation, run in one folder."""

    def __init__(self, binaries: Path, folder: Path) -> None:
        self.binaries, self.folder = binaries.resolve(), folder

    def run(self, command: str, *args: str) -> tuple[float, str]:
        began = time.perf_counter()
        paths = os.pathsep.join((str(self.binaries), os.environ["PATH"]))
        done = subprocess.run(
            [str(self.binaries / command), *args], cwd=self.folder, capture_output=True, text=True, timeout=900,
            env=os.environ | {"PATH": paths, "CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip
        return time.perf_counter() - began, done.stdout + done.stderr

    def collect(self, name: str, text: str) -> tuple[float, Path]:
        """Run a script under TrainCheck and return the seconds and the folder of its trace."""
        (self.folder / f"{name}.py").write_text(text)
        seconds, _ = self.run(
            "traincheck-collect", "-p", f"{name}.py", "--models-to-track", "model", "--output-dir", name
        )
        return seconds, self.folder / name

    def plain(self, name: str, text: str) -> float:
        """Run the same script by itself with the same interpreter."""
        (self.folder / f"{name}.py").write_text(text)
        return self.run("python", f"{name}.py")[0]

    def check(self, trace: Path) -> dict[str, Any]:
        """Check a trace against the invariants and count those that are violated."""
        seconds, text = self.run("traincheck-check", "-f", str(trace), "-i", "invariants.json")
        found = max(self.folder.glob(f"traincheck_checker_results*/{trace.name}/failed.log"), default=None)
        failed = re.findall(r'"text_description": "([^"]*)"', found.read_text()) if found is not None else []
        return {"seconds": seconds, "violated": failed, "output": text[-400:] if not failed else ""}


def main() -> None:
    """Run the table and save it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--traincheck", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        tool = TrainCheck(given.traincheck, Path(temporary))
        plain = tool.plain("plain", script(None, 0))
        traced, trace = tool.collect("reference", script(None, 0))
        inferring, text = tool.run("traincheck-infer", "-f", str(trace))
        invariants = (tool.folder / "invariants.json").read_text().splitlines()
        costs = {"plain": plain, "traced": traced, "inferring": inferring, "invariants": len(invariants)}
        print(costs, text[-200:] if not invariants else "", flush=True)
        noise = tool.check(tool.collect("other_seed", script(None, 1))[1])
        print("clean twin, another seed:", len(noise["violated"]), noise["output"][-200:], flush=True)
        rows = []
        for index, error in enumerate(name for name in ERRORS if given.only in name):
            seconds, trace = tool.collect(f"wrong{index}", script(error, 1))
            result = tool.check(trace)
            fresh = [one for one in result["violated"] if one not in noise["violated"]]
            own = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", script(error, 1, monitored=True)], capture_output=True, text=True
            )
            alarms = re.search(r"ALARMS (.*)", own.stdout)
            row = {
                "error": error,
                "traincheck": {
                    "violated": len(result["violated"]),
                    "beyond noise": fresh,
                    "seconds": seconds + result["seconds"],
                },
                "conserved": json.loads(alarms[1]) if alarms else own.stderr[-300:],
            }
            rows.append(row)
            print(error, len(result["violated"]), len(fresh), fresh[:2], "| ours:", row["conserved"], flush=True)
    record = {"costs": costs, "noise": noise["violated"], "rows": rows}
    if given.out is not None:
        print(save("traincheck_comparison", {"commit": commit(), "machine": machine()} | record, given.out))


if __name__ == "__main__":
    main()
