"""Confirm a refutation without this library: a script that a maintainer can run, and its answer.

The script compares the gradient of the function in its mode and precision with central differences of the function,
eager and in double precision (in single precision where it takes no other), on the same inputs. Entries where the
differences to both sides disagree are left out: the function has a kink there. A defect is confirmed if the two differ
by more than rounding of the precision explains.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from campaign.target import PRELUDE, Target

LIMIT = {torch.float64: 1e-6, torch.float32: 1e-2, torch.bfloat16: 0.25, torch.float16: 0.1}
"""Relative errors above which a gradient is called wrong: some 2^16 roundings in single, 64 in half precision, so that
sums and cancellation of small programs stay below."""

KINDS = {
    "given": "x",
    "wide": "3 * x",
    "large": "8 * x",
    "tiny": "x / 256",
    "of all sizes": "x * torch.exp2(torch.randint(-10, 4, x.shape, generator=g).to(x))",
    "sparse": "x * (torch.rand(x.shape, generator=g) < 0.2).to(x)",
    "sorted": "x.sort(-1).values if x.ndim else x",
    "one-hot": "torch.where(x.abs() == x.abs().max(-1, keepdim=True).values, 8 * x, x / 128) if x.ndim else x",
    "constant": "x[..., :1].expand_as(x).contiguous() if x.ndim else x",
    "far from zero": "x + 8 * x.square().mean().sqrt()",
    "saturated": "24 * x",
}
"""Kinds of input that the check tries, as expressions a script can hold."""

_TORCH = """
def outputs_of(function, tensors):
    torch.manual_seed(0)
    result = function(*tensors)
    outputs = [result] if isinstance(result, torch.Tensor) else list(result)
    return [output for output in outputs if isinstance(output, torch.Tensor) and output.is_floating_point()]


def weights_of(outputs, inverse):
    g = torch.Generator().manual_seed(1)
    weights = [torch.randn(o.shape, generator=g, dtype=torch.float64).to(o.device) for o in outputs]
    return [w / o.detach().double().abs().clamp_min(1e-3) if inverse else w for w, o in zip(weights, outputs)]


def gradients(function, tensors, weights):
    tensors = [t.clone().requires_grad_() for t in tensors]
    pairs = [(o, w) for o, w in zip(outputs_of(function, tensors), weights) if o.requires_grad]
    total = sum((o.double() * w).sum() for o, w in pairs)
    result = torch.autograd.grad(total, tensors, allow_unused=True)
    return [torch.zeros_like(t, dtype=torch.float64) if g is None else g.double() for g, t in zip(result, tensors)]


def central_differences(function, tensors, weights):
    step = 1e-6 if tensors[0].dtype == torch.float64 else 1e-3

    def total(values):
        with torch.no_grad():
            return sum(float((o.double() * w).sum()) for o, w in zip(outputs_of(function, values), weights))

    result, middle = [], total(tensors)
    for place, tensor in enumerate(tensors):
        gradient = torch.full(tensor.shape, float("nan"), dtype=torch.float64, device=tensor.device)
        for entry in range(min(tensor.numel(), 400)):
            values = [t.clone().contiguous() for t in tensors]
            flat = values[place].view(-1)
            value, size = flat[entry].item(), step * max(1.0, abs(flat[entry].item()))
            flat[entry] = value + size
            high = total(values)
            flat[entry] = value - size
            low = total(values)
            sides = (high - middle) / size, (middle - low) / size
            if abs(sides[0] - sides[1]) <= 1e-3 * (abs(sides[0]) + abs(sides[1])) + 1e-3:
                gradient.view(-1)[entry] = (high - low) / (2 * size)
        result.append(gradient)
    return result


def of_kind(tensors):
    g = torch.Generator().manual_seed(2)
    return [({kind}).to(x.dtype) for x in (t.cpu() for t in tensors)]


tensors = [t.detach() for t in make({dtype}, {device!r})]
tensors = [x.to(t.device) for x, t in zip(of_kind(tensors), tensors)]
function = {mode}
worst = 0.0
for inverse in (False, True):
    try:
        exact = [t.double() for t in tensors]
        weights = weights_of(outputs_of(f, exact), inverse)
        expected = central_differences(f, exact, weights)
    except Exception:
        exact = [t.float() for t in tensors]
        weights = weights_of(outputs_of(f, exact), inverse)
        expected = central_differences(f, exact, weights)
    for a, b in zip(gradients(function, tensors, weights), expected):
        kept = ~b.isnan()
        error = float((a - b)[kept].norm() / b[kept].norm().clamp_min(1e-12))
        worst = max(worst, error) if error == error else float("inf")
print("relative error of the gradient:", worst)
"""

_JAX = """
jax.config.update("jax_enable_x64", True)


def outputs_of(arrays):
    return [o for o in jax.tree.leaves(f(*arrays)) if jnp.issubdtype(o.dtype, jnp.floating)]


arrays = make({dtype}, "cpu")
keys = jax.random.split(jax.random.key(1), 16)
exact = [a.astype("float64") for a in arrays]
weights = [jax.random.normal(key, o.shape, "float64") for key, o in zip(keys, outputs_of(exact))]
outputs, pull = jax.vjp(lambda *arrays: outputs_of(arrays), *arrays)
got = pull([w.astype(o.dtype) for w, o in zip(weights, outputs)])


def total(values):
    return sum(float(jnp.vdot(w, o)) for w, o in zip(weights, outputs_of(values)))


worst, middle = 0.0, total(exact)
for place, array in enumerate(exact):
    wrong = size = 0.0
    for entry in range(min(array.size, 400)):
        ends = []
        for step in (1e-6, -1e-6):
            values = list(exact)
            values[place] = array.reshape(-1).at[entry].add(step).reshape(array.shape)
            ends.append((total(values) - middle) / step)
        if abs(ends[0] - ends[1]) <= 1e-3 * (abs(ends[0]) + abs(ends[1])) + 1e-3:
            expected = sum(ends) / 2
            wrong += (float(got[place].reshape(-1)[entry]) - expected) ** 2
            size += expected**2
    worst = max(worst, (wrong / max(size, 1e-24)) ** 0.5)
print("relative error of the gradient:", worst)
"""


def script(target: Target, device: str, kind: str = "given") -> str:
    """Return a script that needs nothing but the package at fault."""
    if target.mode == "jax":
        return PRELUDE + target.source + _JAX.format(dtype=repr(str(target.dtype)[6:]))
    compiled = target.mode not in ("eager", "checkpointed", "vmap")
    mode = f"torch.compile(f, backend={target.mode!r}, dynamic=False)" if compiled else "f"
    body = _TORCH.format(dtype=str(target.dtype), device=device, mode=mode, kind=KINDS[kind])
    return PRELUDE + target.source + body


def kinds_in(tests: Sequence[str]) -> list[str]:
    """Return the kinds of input that the names of failed tests mention, and the given inputs."""
    return ["given", *(kind for kind in KINDS if any(f"at {kind} inputs" in test for test in tests))]


def confirm(target: Target, device: str, kind: str = "given", *, alone: bool = False) -> dict[str, Any]:
    """Run the script, in a process of its own if `alone`, and return its answer and whether it confirms a defect."""
    text = script(target, device, kind)
    try:
        printed = _run_alone(text) if alone else _run_here(text)
    except Exception as problem:
        return {"confirmed": None, "kind": kind, "why": f"{type(problem).__name__}: {str(problem)[:200]}"}
    line = next((line for line in printed.splitlines() if line.startswith("relative error")), "")
    if not line:
        return {"confirmed": None, "kind": kind, "why": printed[-200:] or "nothing was printed"}
    error = json.loads(line.split(": ")[1].replace("nan", "NaN").replace("inf", "Infinity"))
    roundings = error / torch.finfo(target.dtype).eps
    return {"confirmed": not error <= LIMIT[target.dtype], "kind": kind, "error": error, "roundings": roundings}


def _run_here(text: str) -> str:
    """Run a script in this process: importing the packages again would take longer than the check."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(text, "<script>", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


def _run_alone(text: str, seconds: float = 120.0) -> str:
    """Run a script in a process of its own, where nothing of this library is imported."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "script.py"
        path.write_text(text)
        paths = os.pathsep.join((str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")))
        done = subprocess.run(
            [sys.executable, str(path)],
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            env={**os.environ, "PYTHONPATH": paths},
        )
    return done.stdout or done.stderr[-300:]
