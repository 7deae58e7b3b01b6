"""Confirm a refutation without this library: a script that a maintainer can run, and its answer.

The script compares the gradient of the function in its mode and precision with the gradient of the same function, eager
and in double precision, on the same inputs. Where the mode is eager, central differences in double precision are the
reference. A defect is confirmed if the two differ by more than rounding of the precision explains.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from campaign.target import PRELUDE, Target

LIMIT = {torch.float64: 1e-6, torch.float32: 1e-2, torch.bfloat16: 0.25, torch.float16: 0.1}
"""Relative errors above which a gradient is called wrong: some 2^16 roundings in single, 64 in half precision, so that
sums and cancellation of small programs stay below."""

_BODY = """
def gradients(function, tensors, weights):
    tensors = [t.clone().requires_grad_() for t in tensors]
    result = function(*tensors)
    outputs = [result] if isinstance(result, torch.Tensor) else list(result)
    outputs = [o for o in outputs if o.requires_grad]
    total = sum((o.double() * w).sum() for o, w in zip(outputs, weights(outputs)))
    found = torch.autograd.grad(total, tensors, allow_unused=True)
    return [torch.zeros_like(t, dtype=torch.float64) if g is None else g.double() for g, t in zip(found, tensors)]


def weights(outputs):
    g = torch.Generator().manual_seed(1)
    return [torch.randn(o.shape, generator=g, dtype=torch.float64).to(o.device) for o in outputs]


def central_differences(function, tensors, weights, step=1e-6):
    def total(values):
        result = function(*values)
        outputs = [result] if isinstance(result, torch.Tensor) else list(result)
        outputs = [o for o in outputs if o.is_floating_point()]
        return sum((o.double() * w).sum() for o, w in zip(outputs, weights(outputs)))

    found = []
    for place, tensor in enumerate(tensors):
        gradient = torch.zeros_like(tensor)
        for entry in range(min(tensor.numel(), 400)):
            values = [t.clone() for t in tensors]
            flat = values[place].view(-1)
            value = flat[entry].item()
            flat[entry] = value + step
            high = total(values)
            flat[entry] = value - step
            gradient.view(-1)[entry] = (high - total(values)) / (2 * step)
        found.append(gradient)
    return found


tensors = make({dtype}, {device!r})
exact = [t.double() for t in tensors]
function = {mode}
got = gradients(function, tensors, weights)
expected = {reference}
error = max(float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in zip(got, expected))
print("relative error of the gradient:", error)
"""


def script(target: Target, device: str) -> str:
    """Return a script that needs nothing but the package at fault."""
    eager = target.mode == "eager"
    mode = "f" if eager else f"torch.compile(f, backend={target.mode!r}, dynamic=False)"
    # An operator whose samples depend on the precision is rebuilt in double precision from the same inputs.
    reference = "central_differences(f, exact, weights)" if eager else "gradients(f, exact, weights)"
    body = _BODY.format(dtype=str(target.dtype), device=device, mode=mode, reference=reference)
    return PRELUDE + target.source + body


def confirm(target: Target, device: str, seconds: float = 120.0) -> dict[str, Any]:
    """Run the script in a process of its own and return what it printed, and whether it confirms a defect."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "script.py"
        path.write_text(script(target, device))
        try:
            done = subprocess.run(
                [sys.executable, str(path)],
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
            )
        except subprocess.TimeoutExpired:
            return {"confirmed": None, "why": "the script took too long"}
    line = next((line for line in done.stdout.splitlines() if line.startswith("relative error")), "")
    if not line:
        return {"confirmed": None, "why": done.stderr.strip().splitlines()[-1:] or "nothing was printed"}
    error = json.loads(line.split(": ")[1].replace("nan", "NaN").replace("inf", "Infinity"))
    roundings = error / torch.finfo(target.dtype).eps
    return {"confirmed": not error <= LIMIT[target.dtype], "error": error, "roundings": roundings}
