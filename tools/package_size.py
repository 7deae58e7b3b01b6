"""Print lines and files by folder, import closures of common calls, import time, and the size of the wheel.

python tools/package_size.py [--wheel]

A closure is the number of modules of this package that are loaded once a call has returned, in a new process.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "papers/src", "tests", "benchmarks", "docs_build", "tools", "examples")

MODEL = """
import torch, conserved
from torch import nn
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
x = torch.randn(5, 4)
"""

CALLS = {
    "import": "import conserved",
    "recognize": MODEL + "conserved.recognize(model, x)",
    "audit": MODEL + "laws = conserved.recognize(model, x); model(x).square().sum().backward()\n"
    "conserved.audit(model, laws)",
    "check": "import torch, conserved\nconserved.check(torch.tanh, torch.randn(3, 4))",
    "Monitor.step": MODEL + "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
    "monitor = conserved.Monitor(model, optimizer)\n"
    "model(x).square().sum().backward(); optimizer.step(); monitor.step()",
}
LOADED = "\nimport sys\nprint('loaded', sum(name.split('.')[0].startswith('conserved') for name in sys.modules))"


def lines_by_folder() -> dict[str, tuple[int, int]]:
    """Return files and lines of Python for every folder, and for every package of the library."""
    places = {folder: ROOT / folder for folder in FOLDERS}
    places |= {
        f"src/conserved/{path.name}": path for path in sorted((ROOT / "src/conserved").iterdir()) if path.is_dir()
    }
    counted = {}
    for name, place in places.items():
        files = [path for path in place.rglob("*.py") if "__pycache__" not in path.parts]
        if files:
            counted[name] = (len(files), sum(path.read_text().count("\n") for path in files))
    return counted


def closures() -> dict[str, int]:
    """Return how many modules of this package each call loads."""
    result = {}
    for name, call in CALLS.items():
        printed = subprocess.run(
            [sys.executable, "-c", call + LOADED], capture_output=True, text=True, check=True
        ).stdout
        result[name] = int(printed.rpartition("loaded ")[2])
    return result


def import_seconds(rounds: int = 5) -> float:
    """Return the median seconds that importing the package adds to importing PyTorch."""
    program = "import torch, time\nbegan = time.perf_counter()\nimport conserved\nprint(time.perf_counter() - began)"
    runs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        for _ in range(rounds)
    ]
    return statistics.median(float(run.stdout) for run in runs)


def wheel_bytes() -> int:
    """Return the size of the wheel of the library."""
    with tempfile.TemporaryDirectory() as folder:
        build = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            folder,
            str(ROOT),
        ]
        subprocess.run(build, check=True)
        return next(Path(folder).glob("*.whl")).stat().st_size


def main() -> None:
    """Print everything, line by line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", action="store_true", help="build the wheel and print its size")
    chosen = parser.parse_args()
    print(f"{time.strftime('%Y-%m-%d')}, files and lines of Python")
    for name, (files, lines) in lines_by_folder().items():
        print(f"  {name:30} {files:4d} {lines:7,d}")
    for name, modules in closures().items():
        print(f"{name} loads {modules} modules")
    print(f"importing takes {import_seconds():.4f} s more than importing PyTorch")
    if chosen.wheel:
        print(f"the wheel has {wheel_bytes():,d} bytes")


if __name__ == "__main__":
    main()
