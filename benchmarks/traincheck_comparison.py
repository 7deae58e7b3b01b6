"""Silent errors under TrainCheck 0.2.0, with a reference run of their twin: findings, noise, cost.

    python benchmarks/traincheck_comparison.py --traincheck FOLDER/bin --folder TRACES --out benchmarks/results

FOLDER is a virtual environment with `pip install traincheck==0.2.0`. On a machine without a GPU it needs PyTorch built
for the CPU, or `traincheck.utils.safe_getattr` changed to pass over RuntimeError. Every program is a plain script
without `conserved`, named after TrainCheck's issue: the right one has all that the errors need, an error is one edit.
Invariants are inferred from one run of the twin. A run of the twin with another seed shows the noise; every wrong run
is checked against the same invariants, with that other seed. The same scripts run with a default monitor. The second
set runs as two processes by torchrun. Traces, invariants and rows stay in TRACES, and rows that are there are not run
again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import commit, machine, save

STEPS = 8

TWIN = """
import copy
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(SEED)
torch.set_num_threads(1)

def processor(x):
    return x

def initialise(module):
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.3)

def generate(x, max_new_tokens=4):
    rows = [x]
    for _ in range(max_new_tokens):
        rows.append(model(rows[-1]).repeat(1, 2)[:, :6])
    return torch.stack(rows)

class Augmented(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.randn(6, generator=torch.Generator().manual_seed(1000 * number + index))

body = [nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 12), nn.BatchNorm1d(12)]
head = nn.utils.spectral_norm(nn.Linear(12, 4))
model = nn.Sequential(*body, head)
model.apply(initialise)
saved = copy.deepcopy(model.state_dict())
# before the optimizer
model.load_state_dict(saved, strict=False)
number = 0
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
# after the optimizer
for number in range(1, STEPS + 1):
    # before the step
    x, y = torch.stack([Augmented()[i] for i in range(8)]), torch.randint(4, (8,))
    x = processor(x)
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        z = model(x)
    loss = F.cross_entropy(z.float(), y[: len(z)])
    loss.backward()
    # with gradients
    optimizer.step()
    # after the step
    if number == 4:
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()
model.eval()
with torch.no_grad():
    generate(x, max_new_tokens=3)
"""

ERRORS: dict[str, tuple[str, str]] = {
    "stackoverflow-60335387: zero_grad() is not called": ("    optimizer.zero_grad()\n", ""),
    "pytorch-forum-84911: frozen head in the optimizer, norms outside": (
        "optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)",
        "for name, p in model.named_parameters():\n    p.requires_grad = name.startswith('4.')\n"
        "optimizer = torch.optim.Adam(model[5].parameters(), lr=1e-2)",
    ),
    "accelerate-2665: the optimizer holds replaced parameters": (
        "# after the optimizer",
        "for m in model.modules():\n    for n, p in list(m.named_parameters(recurse=False)):\n"
        "        setattr(m, n, nn.Parameter(p.detach().clone()))",
    ),
    "transformers-29903: a layer is missing in the checkpoint": (
        "# before the optimizer",
        "saved = {k: v for k, v in saved.items() if not k.startswith('3.')}\nmodel.apply(initialise)",
    ),
    "transformers-33844: dropout stays on in eval mode": (
        "        model.eval()\n", "        model.eval()\n        model[2].train()\n",
    ),
    "pytorch-51800: spectral norm is evaluated before it is initialised": (
        "# after the optimizer",
        "model.eval()\nwith torch.no_grad():\n    model(torch.randn(8, 6))\nmodel.train()",
    ),
    "pytorch-115607: a step does nothing after a step without gradients": (
        "    optimizer.step()\n", "    number >= 3 or optimizer.step()\n",
    ),
    "lightning-thunder-725: autocast has no effect": (
        "        z = model(x)\n",
        "        with torch.autocast('cpu', enabled=False):\n            z = model(x)\n",
    ),
    "stackoverflow-67180955: all workers draw the same augmentation": (
        "manual_seed(1000 * number + index)", "manual_seed(1000 * number + index % 4)",
    ),
    "transformers-17877: weights are initialised several times": (
        "model.apply(initialise)\n", "for _ in range(3):\n    model.apply(initialise)\n",
    ),
    "transformers-23723: max_new_tokens is not kept": (
        "    rows = [x]\n", "    rows, max_new_tokens = [x], 4\n",
    ),
    "transformers-34204: a processor returns one row of a batch": ("    return x\n", "    return x[:2]\n"),
    "mmpretrain-702: a frozen stage is trained": ("# before the optimizer", "model[0].requires_grad = False"),
    "MPS, later: updates of one tensor are lost": (
        "    optimizer.step()\n", "    kept = model[3].weight.detach().clone()\n    optimizer.step()\n"
        "    model[3].weight.data.copy_(kept)\n",
    ),
    "wrapper, later: the optimizer holds a copy of the model": (
        "torch.optim.Adam(model.parameters()", "torch.optim.Adam(copy.deepcopy(model).parameters()",
    ),
}  # fmt: skip

TWO = """
import copy, os
import torch, torch.nn as nn, torch.nn.functional as F
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(SEED)
inner = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 4))
model = DistributedDataParallel(inner)
# before the optimizer
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
# after the optimizer
torch.manual_seed(SEED + 10 + rank)
for number in range(1, STEPS + 1):
    # before the step
    x, y = torch.randn(8, 6), torch.randint(4, (8,))
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    # with gradients
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    # after the step
dist.destroy_process_group()
"""

ERRORS_OF_TWO: dict[str, tuple[str, str]] = {
    "pytorch-84803: a reduced gradient arrives as zeros on one rank": (
        "    # with gradients", "    if rank == 1: inner[2].weight.grad.zero_()",
    ),
    "baichuan2-86: parameters arrive as zeros on one rank": (
        "# before the optimizer", "if rank == 1:\n    inner[2].weight.data.zero_()",
    ),
    "pytorch-96600: some entries are lost in transfer": (
        "    # with gradients", "    if rank == 1: inner[2].weight.grad[:, :3] = 0",
    ),
    "deepspeed-1801: gradients are clipped on one rank only": (
        "    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
        "    nn.utils.clip_grad_norm_(model.parameters(), 1.0 if rank == 0 else 1e9)\n",
    ),
    "pytorch-104336: hooks of the wrapper are lost when the model is moved": (
        "# before the optimizer", "copied = copy.deepcopy(inner)\nmodel.module = inner = copied",
    ),
    "x-jxmnop-ddp: the module inside the wrapper is called": (
        "F.cross_entropy(model(x), y)", "F.cross_entropy(model.module(x), y)",
    ),
}  # fmt: skip

MONITORED = (
    (
        "# after the optimizer",
        "from conserved import Monitor\nmonitor = Monitor(model, optimizer)\n# after the optimizer",
    ),
    ("    # after the step", "    monitor.step()\n    # after the step"),
)


def script(twin: str, edit: tuple[str, str] | None, seed: int, *, monitored: bool = False) -> str:
    """Return a program, right or with one error."""
    text = twin
    if edit is not None:
        old, new = edit
        assert old in text, old
        if old.strip().startswith("#"):
            new += "\n" + old
        text = text.replace(old, new, 1)
    if monitored:
        for old, new in MONITORED:
            text = text.replace(old, new, 1)
        end = "monitor.close()\nimport json\n"
        end += "alarms = [[a.kind, a.step, a.message] for a in monitor.alarms]\n"
        end += "print('ALARMS', json.dumps(alarms) if not torch.distributed.is_initialized() "
        end += "or torch.distributed.get_rank() == 0 else '', flush=True)\n"
        last = "dist.destroy_process_group()\n"
        text = text.replace(last, end + last) if last in text else text + end
    return text.replace("SEED", str(seed)).replace("STEPS", str(STEPS))


class TrainCheck:
    """The commands of one installation, run in one folder."""

    def __init__(self, binaries: Path, folder: Path, *, processes: int) -> None:
        self.binaries, self.folder, self.processes = binaries.resolve(), folder.resolve(), processes

    def run(self, command: list[str]) -> tuple[float, str]:
        """Run a command and return its seconds of processor time and what it printed."""
        began = os.times()
        paths = os.pathsep.join((str(self.binaries), os.environ["PATH"]))
        done = subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, timeout=1200,
            env=os.environ | {"PATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": ""},
        )  # fmt: skip
        ended = os.times()
        # Of processes that were waited for: other work on the machine does not count.
        seconds = ended.children_user + ended.children_system - began.children_user - began.children_system
        return seconds, done.stdout + done.stderr

    def collect(self, name: str, text: str) -> tuple[float, Path, str]:
        """Run a script under TrainCheck and return the seconds, the folder of its trace, and what was printed."""
        (self.folder / f"{name}.py").write_text(text)
        command = [str(self.binaries / "traincheck-collect"), "-p", f"{name}.py", "--models-to-track", "model"]
        if self.processes > 1:
            launch = f"torchrun --nproc_per_node={self.processes} --master_port=0 --standalone {name}.py\n"
            (self.folder / f"{name}.sh").write_text(launch)
            command += ["-s", f"{name}.sh"]
        seconds, printed = self.run([*command, "--output-dir", name])
        return seconds, self.folder / name, printed

    def plain(self, name: str, text: str) -> float:
        """Run the same script by itself with the same interpreter."""
        (self.folder / f"{name}.py").write_text(text)
        start = ["torchrun", f"--nproc_per_node={self.processes}", "--standalone"] if self.processes > 1 else ["python"]
        return self.run([str(self.binaries / start[0]), *start[1:], f"{name}.py"])[0]

    def infer(self, trace: Path) -> tuple[float, int]:
        """Infer invariants; return the seconds and how many there are."""
        seconds, printed = self.run([str(self.binaries / "traincheck-infer"), "-f", str(trace)])
        path = self.folder / "invariants.json"
        if not path.exists():
            raise RuntimeError(f"Expected invariants, got: {printed[-1000:]}")
        return seconds, len(path.read_text().splitlines())

    def check(self, trace: Path) -> dict[str, Any]:
        """Check a trace against the invariants and list those that are violated."""
        seconds, text = self.run(
            [str(self.binaries / "traincheck-check"), "-f", str(trace), "-i", "invariants.json"]
        )  # fmt: skip
        result = max(self.folder.glob(f"traincheck_checker_results*/{trace.name}/failed.log"), default=None)
        failed = re.findall(r'"text_description": "([^"]*)"', result.read_text()) if result is not None else []
        return {"seconds": seconds, "violated": failed, "output": text[-400:] if not failed else ""}


def monitored(text: str, processes: int) -> Any:
    """Run a script with a default monitor and return its alarms."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "monitored.py"
        path.write_text(text)
        launch = ["-m", "torch.distributed.run", f"--nproc_per_node={processes}", "--standalone"]
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *(launch if processes > 1 else []), str(path)],
            capture_output=True, text=True, timeout=900,
        )  # fmt: skip
    alarms = re.search(r"ALARMS (\[.*)", done.stdout)
    return json.loads(alarms[1]) if alarms else done.stderr[-400:]


def compare(
    tool: TrainCheck,
    twin: str,
    errors: dict[str, tuple[str, str]],
    only: str,
    rows: dict[str, Any],
    keep: Callable[[str, Any], None],
) -> None:
    """Run a twin twice and all of its errors, and keep what each tool says; `rows` are there already."""
    if "costs" not in rows:
        plain = tool.plain("plain", script(twin, None, 0))
        traced, trace, printed = tool.collect("reference", script(twin, None, 0))
        inferring, count = tool.infer(trace)
        keep("costs", {"plain": plain, "traced": traced, "inferring": inferring, "invariants": count})
    if "twin" not in rows:
        seconds, trace, printed = tool.collect("other_seed", script(twin, None, 1))
        noise = tool.check(trace)
        own = monitored(script(twin, None, 1, monitored=True), tool.processes)
        keep("twin", {"traincheck": noise["violated"], "seconds": noise["seconds"], "conserved": own})
    for index, (error, edit) in enumerate(errors.items()):
        if only not in error or error in rows:
            continue
        seconds, trace, printed = tool.collect(f"wrong{index}", script(twin, edit, 1))
        result = tool.check(trace)
        fresh = [one for one in result["violated"] if one not in rows["twin"]["traincheck"]]
        row = {
            "violated": len(result["violated"]),
            "beyond noise": fresh[:12],
            "count beyond noise": len(fresh),
            "seconds": seconds + result["seconds"],
            "output": result["output"] or (printed[-300:] if not trace.exists() else ""),
        }
        keep(error, {"traincheck": row, "conserved": monitored(script(twin, edit, 1, monitored=True), tool.processes)})


def main() -> None:
    """Run the table and save it as it grows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--traincheck", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="where traces, invariants and rows stay")
    parser.add_argument("--only", default="", help="a part of the names of errors")
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--name", default="traincheck_comparison")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    record: dict[str, Any] = {"commit": commit(), "machine": machine(), "sets": {}}
    for processes in given.processes:
        name = f"{processes} process{'es' if processes > 1 else ''}"
        folder = given.folder / name.replace(" ", "_")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "rows.json"
        rows = record["sets"][name] = json.loads(path.read_text()) if path.exists() else {}

        def keep(name: str, row: Any, rows: dict[str, Any] = rows, path: Path = path) -> None:
            rows[name] = row
            print(name, json.dumps(row)[:700], flush=True)
            path.write_text(json.dumps(rows))

        tool = TrainCheck(given.traincheck, folder, processes=processes)
        twin, errors = (TWIN, ERRORS) if processes == 1 else (TWO, ERRORS_OF_TWO)
        compare(tool, twin, errors, given.only, rows, keep)
    if given.out is not None:
        print(save(given.name, record, given.out))


if __name__ == "__main__":
    main()
