"""How accurate the backward of attention is in half precision, what centering does to it, and what that is worth.

python benchmarks/attention_precision.py kernels    # error before and after, by kernel, variant and kind of input
python benchmarks/attention_precision.py cost       # seconds of forward and backward, with and without
python benchmarks/attention_precision.py moments    # training runs: errors, predictions, Adam's updates by step
python benchmarks/attention_precision.py losses     # loss and spectral norms of flash, centered and math over seeds

Every command takes --seconds, after which it stops, --small for a miniature on a processor, and --folder. Results are
written after each part: summaries as NAME.json, errors of single heads as NAME.heads.json.gz. Texts are the sources of
Python's own standard library, byte by byte.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attention_kernels import (
    BACKENDS,
    DEVICE,
    REFUSALS,
    Attend,
    Variant,
    backend,
    by_head,
    digits,
    exact_passes,
    head_inputs,
    passes,
    seen_by_attention,
    variants,
)
from attention_training import Attention, Shape, Training, attention_called, corpus
from conserved.attention import attention_rounding, centered, folded, fused_centering
from conserved.attention.gauge_constants import mean_tokens_of_rows
from conserved.attention.sampled_rows import SampledPositions
from measure import RESULTS, in_turns, save


class Clock:
    """The time that is left."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self.end - time.monotonic()


# Kernels


def kernels(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Errors before and after by kernel, variant, kind of input and precision."""
    clock = Clock(options.seconds)
    length, rows = (64, []) if options.small else (512, [])
    names = [*BACKENDS, "flex", "varlen", "fla", "rounded accumulators", "written out"]
    names += ["flex compiled", "written out, compiled"]
    if DEVICE.type == "cpu":
        names = ["flash", "math", "written out", "rounded accumulators", "written out, compiled"]
    for kernel in options.only or names:
        if clock.left < 10:
            break
        for variant, made in variants(kernel, length):
            for dtype in (torch.bfloat16, torch.float16):
                head = {"kernel": kernel, "variant": variant, "dtype": str(dtype)[6:]}
                for kind in ("common", "random", "large scores", "sink"):
                    try:
                        rows.append(head | {"inputs": kind} | _before_and_after(made, kind, dtype))
                    except REFUSALS as problem:
                        rows.append(head | {"problem": str(problem).strip().splitlines()[0][:300]})
                        break
                yield {"kernels": rows}


def _before_and_after(variant: Variant, kind: str, dtype: torch.dtype) -> dict[str, Any]:
    sizes = {"queries": variant.queries, "keys": variant.keys, "groups": variant.groups}
    tensors = [tensor.to(dtype) for tensor in head_inputs(kind, heads=6, width=64, **sizes)]
    exact = exact_passes(tensors, variant.mask)
    table: dict[str, Any] = {}
    for when, attend in (("before", variant.attend), ("after", variant.mended)):
        q, k, v, gradient = tensors
        errors = [by_head(a, b) for a, b in zip(passes(attend, q, k, v, gradient), exact, strict=True)]
        named = zip(("O", "dQ", "dK", "dV"), errors, strict=True)
        table[when] = {name: [digits(error.median()), digits(error.max())] for name, error in named}
    return table


# Cost


def cost(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Median seconds of forward and backward in turns: by the clock of the host, and of a CUDA graph of several calls.

    Tensors lie as projections leave them, (batch, length, heads, width) with heads and length exchanged, so that no
    kernel has to copy the gradient of the output first.
    """
    clock, small = Clock(options.seconds), options.small
    rows: list[dict[str, Any]] = []
    shapes = [(1, 2, 64, 16)] if small else [(8, 12, 1024, 64), (2, 32, 8192, 128)]
    for shape in shapes:
        batch, heads, length, width = shape
        made = [torch.randn(batch, length, heads, width, device=DEVICE, dtype=torch.bfloat16) for _ in range(4)]
        *leaves, gradient = (tensor.transpose(1, 2).requires_grad_() for tensor in made)
        for kernel in ("flash", "cudnn") if DEVICE.type == "cuda" else ("flash",):
            attend: dict[str, Any] = {"plain": F.scaled_dot_product_attention, "rows": centered()}
            attend["values only"] = centered(keys=False)
            if length < 4096 and kernel == "flash":
                attend["rows, operations of PyTorch"] = _without_kernels(centered())
            work = {name: _passes_of(function, leaves, gradient.detach()) for name, function in attend.items()}
            for timed, calls in (("attention", work), ("layer", _layer_passes(shape))):
                row: dict[str, Any] = {"of": timed, "shape": shape, "kernel": kernel}
                try:
                    row |= _timed(calls, kernel, rounds=3 if small else 20 if length < 4096 else 5)
                except REFUSALS as problem:
                    row["problem"] = str(problem)[:300]
                rows.append(row)
                yield {"cost": rows}
            if clock.left < 10:
                return
    if not options.calls:
        yield {"cost": rows, "steps": _step_seconds(small)}


def _layer_passes(shape: tuple[int, ...]) -> dict[str, Callable[[], Any]]:
    """Return forward and backward of a layer with its projections, which take part in folding, by attention."""
    batch, heads, length, width = shape
    x, gradient = (torch.randn(batch, length, heads * width, device=DEVICE).bfloat16() for _ in range(2))
    x.requires_grad_()
    work: dict[str, Callable[[], Any]] = {}
    for name, every in (("plain", 0), ("rows", 0), ("folded", 2**40), ("folded, chosen in every call", 1)):
        layer = Attention(Shape(width=heads * width, head=width, length=length)).to(DEVICE, torch.bfloat16)
        attend: Any = centered() if name == "rows" else F.scaled_dot_product_attention
        attend = folded(key=layer.k, value=layer.v, every=every) if every else attend
        layer.attend = partial(attend, is_causal=True)
        leaves = [x, *layer.parameters()]
        work[name] = partial(_layer_pass, layer, x, leaves, gradient)
    return work


def _layer_pass(layer: Attention, x: Tensor, leaves: list[Tensor], gradient: Tensor) -> Any:
    return torch.autograd.grad(layer(x), leaves, gradient)


def _timed(work: dict[str, Callable[[], Any]], kernel: str, *, rounds: int) -> dict[str, Any]:
    """Return seconds of pieces of work by the clock of the host and in graphs, and the time of their GPU kernels.

    Other programs may use the GPU at the same time. A kernel of some microseconds is rarely interrupted, so that the
    sum over kernels of their median times is the steadiest of the three; it lacks the gaps between launches.
    """
    with backend(kernel):
        row: dict[str, Any] = {"host": _median(in_turns(work, rounds))}
        if DEVICE.type == "cuda":
            row["kernels"] = {name: _kernel_times(call, rounds) for name, call in work.items()}
            calls = max(1, rounds // 2 - 2)
            pool = torch.cuda.graph_pool_handle()  # they never run at the same time
            graphs = {name: _graph_of(calls, call, pool) for name, call in work.items()}
            taken = in_turns(graphs, rounds)
            row["graph"] = {name: seconds / calls for name, seconds in _median(taken).items()}
            row["graph, least"] = {name: min(seconds) / calls for name, seconds in taken.items()}
            row["sum of kernels"] = {name: 1e-6 * sum(times.values()) for name, times in row["kernels"].items()}
    return row


def _step_seconds(small: bool) -> dict[str, Any]:
    """Return seconds of whole training steps of a model with and without centering, by length, recorded as graphs."""
    text, table = corpus(), {}
    shapes = [Shape(layers=2, width=32, head=16, length=32, batch=2)] if small else [Shape(width=768, batch=16)]
    shapes += [] if small else [Shape(width=768, length=2048, batch=4)]
    for shape in shapes:
        runs = {name: Training(shape, text, seed=0, attention=name) for name in ("flash", "centered")}
        seconds = _median(in_turns({name: run.step for name, run in runs.items()}, 3 if small else 40))
        table[f"{shape.batch} × {shape.length}"] = seconds
    return table


def _passes_of(attend: Any, leaves: list[Tensor], gradient: Tensor) -> Callable[[], Any]:
    q, k, v = leaves
    return lambda: torch.autograd.grad(attend(q, k, v, is_causal=True), leaves, gradient)


def _without_kernels(attend: Any) -> Attend:
    """Return the function computed by PyTorch's operations alone."""

    def call(*args: Any, **options: Any) -> Any:
        fused_centering.ENABLED = False
        try:
            return attend(*args, **options)
        finally:
            fused_centering.ENABLED = True

    return call


def _kernel_times(call: Callable[[], Any], calls: int) -> dict[str, float]:
    """Return microseconds of every kernel of a call: the median over calls, times its launches in a call."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.device_type.name == "CUDA":
            times.setdefault(event.name[:80], []).append(event.time_range.elapsed_us())
    return {name: digits(sorted(taken)[len(taken) // 2] * len(taken) / calls) for name, taken in times.items()}


def _median(seconds: dict[str, list[float]]) -> dict[str, float]:
    return {name: sorted(taken)[len(taken) // 2] for name, taken in seconds.items()}


def _graph_of(calls: int, call: Callable[[], Any], pool: Any) -> Callable[[], Any]:
    """Record several calls, so that the host does not count."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        for _ in range(calls):
            call()
    replay: Callable[[], Any] = graph.replay
    return replay


# Moments


AGES = (1, 16)
"""How many steps old the constants are that folded attention would use."""

Held = list[tuple[Tensor, Tensor]]
"""Constants of keys and values by layer."""


def look(run: Training, kernels: tuple[str, ...], held: dict[int, Held] | None = None) -> dict[str, Any]:
    """Errors of dQ and dK by layer and head on the run's own tensors, true and predicted, and Adam's updates.

    `held` has constants by the step in which they were chosen, for the error of folded attention.
    """
    sample = run.starts[-1][:2]
    tensors = _tensors(run, sample)
    table: dict[str, Any] = {name: _errors_of(attention_called(name), name, tensors) for name in (*kernels, "centered")}
    for age in AGES:
        if constants := (held or {}).get(run.done - age):
            table[f"folded, {age}"] = _errors_of(_held_constants(constants), "folded", tensors)
    _wait()
    return {"errors": table, "updates": updates(run, sample), "norms": run.norms()}


def hold(run: Training) -> Held:
    """Return the means over rows of k̄_i and O_i that folded attention chooses; rotated keys have none."""
    constants = []
    for q, k, v, _ in _tensors(run, run.starts[run.done]):
        sample = SampledPositions.of(q.shape[2], 32, q.shape[1] // k.shape[1]).slice
        rows, widths, _ = mean_tokens_of_rows(q, k, v, {"is_causal": True}, sample)
        c, e = rows.float().mean((0, 2), keepdim=True).to(v.dtype).split(widths, -1)
        constants.append((c if run.shape.kind == "learned" else torch.zeros_like(c), e))
    return constants


def _held_constants(constants: Held) -> Attend:
    """Return flash attention with constants of each layer, called layer by layer."""
    layers = iter(constants)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        c, e = next(layers)
        output: Tensor = attention_called("flash")(q, k - c, v - e)
        return output + e.repeat_interleave(q.shape[1] // v.shape[1], 1)

    return attend


def _tensors(run: Training, sample: Tensor) -> list[list[Tensor]]:
    """Return queries, keys, values and the output gradient of every layer in a pass."""
    _wait()
    layers = run.model.attentions()
    for layer in layers:
        layer.kept = []
    run.optimizer.zero_grad(set_to_none=False)
    run.gradients(sample)
    tensors = [list(layer.kept) for layer in layers]
    for layer in layers:
        layer.kept = None
    return tensors


def _wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def _errors_of(attend: Attend, name: str, layers: list[list[Tensor]]) -> dict[str, Any]:
    """Return the errors of one kernel by layer and head; "dQ seen" is that of dQ as attention sees it."""
    table: dict[str, Any] = {leg: [] for leg in LEGS}
    for q, k, v, gradient in layers:
        length = q.shape[2]
        mask = torch.ones(length, length, dtype=torch.bool, device=DEVICE).tril()
        exact = exact_passes([q, k, v, gradient], mask)
        try:
            results = passes(attend, q, k, v, gradient)
        except REFUSALS as problem:
            table["problem"] = str(problem).strip().splitlines()[0][:300]
            break
        table["dQ"].append(_list(by_head(results[1], exact[1])))
        table["dK"].append(_list(by_head(results[2], exact[2])))
        error, size = (seen_by_attention(change, q, k) for change in (results[1].double() - exact[1], exact[1]))
        table["dQ seen"].append(_list((error / size).sqrt()))
        if name not in ("centered", "folded"):
            delta: Any = "scores" if name == "math" else "output"
            rounding = attention_rounding(q, k, v, results[0], gradient, causal=True, delta=delta)
            table["dQ predicted"].append(_list(rounding.query))
            table["dK predicted"].append(_list(rounding.key))
    return table


LEGS = ("dQ", "dK", "dQ seen", "dQ predicted", "dK predicted")
GPU_KERNELS = ("flash", "cudnn", "efficient", "math", "flex compiled", "fla")
CPU_KERNELS = ("flash", "math")


def _list(values: Tensor) -> list[float]:
    return [digits(value) for value in values.tolist()]


def updates(run: Training, sample: Tensor) -> dict[str, list[float]]:
    """Cosine between the updates that Adam makes of W_Q with this attention and with the math backend, by layer.

    Adam's averages are those of the run; only the gradient of the step differs. "gradient" is the same without Adam.
    """
    layers = run.model.attentions()
    gradients = {}
    for name in ("flash", "centered", "math"):
        run.attend_by(name)
        run.optimizer.zero_grad(set_to_none=False)
        run.gradients(sample)
        gradients[name] = [layer.q.weight.grad.detach().clone() for layer in layers]
    run.attend_by(run.attention)
    table: dict[str, list[float]] = {}
    for name in ("flash", "centered"):
        table[f"{name}, gradient"], table[f"{name}, Adam"] = [], []
        for layer, actual, exact in zip(layers, gradients[name], gradients["math"], strict=True):
            state = run.optimizer.state.get(layer.q.weight, {})
            steps = [_adam(gradient, state, run.done) for gradient in (actual, exact)]
            table[f"{name}, gradient"].append(_cosine(actual, exact))
            table[f"{name}, Adam"].append(_cosine(*steps))
    _wait()
    return table


def _adam(gradient: Tensor, state: dict[str, Any], done: int) -> Tensor:
    zero = torch.zeros_like(gradient)
    first = 0.9 * state.get("exp_avg", zero) + 0.1 * gradient
    second = 0.95 * state.get("exp_avg_sq", zero) + 0.05 * gradient.square()
    return first / (1 - 0.9 ** (done + 1)) / ((second / (1 - 0.95 ** (done + 1))).sqrt() + 1e-8)


def _cosine(a: Tensor, b: Tensor) -> float:
    return digits(F.cosine_similarity(a.double().flatten(), b.double().flatten(), 0))


MOMENTS = (0, 5, 10, 25, 50, 100, 200, 400, 800, 1400)
KINDS = ("learned", "rotary", "normed", "grouped", "transformers")


def moments(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Runs of several kinds of model, looked at in the same steps: ordinary ones, then ones without warm-up.

    An ordinary run is repeated with centered attention, for its losses and spectral norms.
    """
    text, records = corpus(), []
    clock = Clock(options.seconds)
    shape = Shape()
    if options.small:
        shape = Shape(layers=3, width=64, head=16, length=64, batch=4, steps=101)
    harsh = replace(shape, warm_up=0, rate=3e-3)
    for kind in options.only or KINDS:
        plans = [(harsh, "flash")] if options.harsh else [(shape, "flash"), (harsh, "flash"), (shape, "centered")]
        for plan, attention in plans[:2] if kind == "transformers" else plans:
            here = replace(plan, kind=kind)
            run = Training(here, text, seed=0, attention=attention, eager=options.eager)
            record: dict[str, Any] = {"kind": kind, "attention": attention, "warm up": bool(here.warm_up)}
            record |= {"parameters": sum(p.numel() for p in run.model.parameters()), "shape": _plain(here)}
            record |= {"moments": [], "norms": []}
            records.append(record)
            for _ in _observed(run, record, clock):
                yield {"moments": records}
            del run
            if DEVICE.type == "cuda":
                torch.cuda.empty_cache()
            if clock.left < 3:
                return


def _observed(run: Training, record: dict[str, Any], clock: Clock) -> Iterator[None]:
    """Train, look at the moments and at the end; the centered run is not looked at."""
    start, held = time.monotonic(), {}
    for step in range(run.shape.steps + 1):
        if run.attention == "flash" and step < run.shape.steps and {step + age for age in AGES} & set(MOMENTS):
            held[step] = hold(run)
        if step in MOMENTS or step == run.shape.steps:
            record["norms"].append({"step": step} | run.norms())
            if run.attention == "flash":
                kernels = GPU_KERNELS if DEVICE.type == "cuda" and run.shape.warm_up else CPU_KERNELS
                record["moments"].append({"step": step} | look(run, kernels, held))
            yield
        if step < run.shape.steps:
            run.step()
        if step % 20 == 0:
            _wait()
        if clock.left < 3:
            record["stopped"] = step
            break
    _wait()
    record |= {"losses": run.curve(), "seconds": digits(time.monotonic() - start)}
    yield


def _plain(shape: Shape) -> dict[str, Any]:
    return {name: str(value) if name == "dtype" else value for name, value in vars(shape).items()}


# Losses


def settings(base: Shape) -> dict[str, tuple[Shape, tuple[str, ...]]]:
    """Harsh ways to train, by name, and the attentions to compare in each."""
    three = ("flash", "centered", "math")
    rounded = ("rounded accumulators", "rounded accumulators, centered", "math")
    harsh = replace(base, rate=3e-3, warm_up=0)
    large = harsh if base.width < 384 else Shape(warm_up=0, steps=base.steps)
    return {
        "rate 3e-3": (harsh, three),
        "rate 1e-2": (replace(base, rate=1e-2, warm_up=0), three),
        "rate 1e-2, no weight decay, no clipping": (replace(harsh, rate=1e-2, decay=0.0, clip=0.0), three),
        "sums in half precision, rate 1e-2, no weight decay": (replace(harsh, rate=1e-2, decay=0.0), rounded),
        "queries and keys of rank 16, rate 3e-3, no weight decay": (replace(harsh, rank=16, decay=0.0), three),
        "fp16, rate 3e-3": (replace(harsh, dtype=torch.float16, loss_scale=1024.0), three),
        "length 2048, rate 3e-3": (replace(harsh, length=base.length * 4, batch=max(1, base.batch // 4)), three),
        "one key head, rate 3e-3": (replace(harsh, kind="grouped", key_heads=1), three),
        "rate 6e-4, warm-up": (base, three),
        "116 million, rate 3e-3": (replace(large, rate=3e-3), three),
        "116 million, rate 1e-2, no weight decay, no clipping": (replace(large, rate=1e-2, decay=0.0, clip=0.0), three),
    }


def losses(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Losses of the same run with three attentions and three seeds, in harsh settings; without warm-up but for one.

    The nine runs of a setting are trained at the same time, or two or three of them if the model is large.
    """
    text = corpus()
    clock = Clock(options.seconds)
    base = Shape(layers=12, width=384, head=64, length=512, batch=4, steps=options.steps or 1000)
    if options.small:
        base = Shape(layers=3, width=32, head=16, length=32, batch=2, steps=12)
    every = settings(base)
    rows: list[dict[str, Any]] = []
    for setting in options.only or every:
        shape, attentions = every[setting]
        first, *others = ([(seed, name) for seed in options.seed or range(3)] for name in attentions)
        groups = [[pair for pairs in (first, *others) for pair in pairs]]
        if shape.width > 384:  # the first two attentions of each seed, then the third of all seeds
            groups = [*map(list, zip(first, others[0], strict=True)), *others[1:]]
        for group in groups:
            runs = [Training(shape, text, seed=seed, attention=name) for seed, name in group]
            for records in _side_by_side(runs, setting, clock):
                yield {"losses": rows + records}
            rows += records
            del runs
            if DEVICE.type == "cuda":
                torch.cuda.empty_cache()
            if clock.left < 20:
                return


def _side_by_side(runs: list[Training], setting: str, clock: Clock) -> Iterator[list[dict[str, Any]]]:
    """Train runs in turns; yield their records every hundred steps and at the end."""
    start, shape = time.monotonic(), runs[0].shape
    records: list[dict[str, Any]] = [
        {"setting": setting, "seed": run.seed, "attention": run.attention, "shape": _plain(shape), "norms": []}
        | {"looks": []}
        for run in runs
    ]
    for step in range(shape.steps + 1):
        if step in LOOKS and runs[0].seed == 0 and runs[0].attention == "flash":
            records[0]["looks"].append({"step": step} | look(runs[0], ("flash", "math")))
        ends = step == shape.steps or (step % 20 == 0 and clock.left < 12)
        if step in (25, 50, 100, 300) or ends:
            for run, record in zip(runs, records, strict=True):
                record["norms"].append({"step": step} | run.norms())
        if (step and step % 100 == 0) or ends:
            _wait()
            for run, record in zip(runs, records, strict=True):
                record |= _outcome(run) | {"seconds of all": digits(time.monotonic() - start)}
            yield records
        if ends:
            return
        for run in runs:
            run.step()
        if step % 20 == 0:
            _wait()  # the host must not run ahead of the clock


LOOKS = (5, 10, 15, 25, 50, 100, 300, 900)


def _outcome(run: Training) -> dict[str, Any]:
    """Return the losses of a run: its curve, the mean of the last tenth, and the largest after the first tenth."""
    done = run.losses[: run.done]
    if not run.done:
        return {"steps": 0}
    tenth = max(1, run.done // 10)
    return {
        "steps": run.done,
        "losses": run.curve(),
        "last": float(f"{float(done[-tenth:].mean()):.6g}"),
        "largest later": digits(done[tenth:].max()) if run.done > tenth else math.nan,
    }


# Summaries


def condensed(record: dict[str, Any]) -> dict[str, Any]:
    """Replace errors by head with medians and maxima by layer, shares and the quality of predictions."""
    record = dict(record)
    for name, looks in (("moments", "moments"), ("losses", "looks")):
        if name in record:
            every = [look for run in record[name] for look in run[looks]]
            record["predictions"] = predictions(every)
            record[name] = [run | {looks: [_condensed_look(look) for look in run[looks]]} for run in record[name]]
    return record


def _condensed_look(look: dict[str, Any]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for kernel, legs in look["errors"].items():
        for leg in ("dQ", "dK", "dQ seen"):
            layers = [torch.tensor(layer, dtype=torch.float64) for layer in legs.get(leg, [])]
            if not layers:
                continue
            table.setdefault(kernel, {})[leg] = {
                "median": [digits(layer.nanmedian()) for layer in layers],
                "max": [digits(layer.nan_to_num(nan=math.inf).max()) for layer in layers],
                "mostly rounding": digits(torch.stack(layers).gt(0.5).double().mean()),
            }
    errors = look["errors"]
    worse = {leg: _worse(errors["flash"][leg], errors["centered"][leg]) for leg in ("dQ", "dK")}
    problems = {kernel: legs["problem"] for kernel, legs in errors.items() if "problem" in legs}
    entry = {name: look[name] for name in ("step", "updates", "norms")}
    return entry | {"errors": table, "worse": worse, "problems": problems}


def _worse(before: Any, after: Any) -> list[int]:
    """Count heads that are less accurate by more than 30 % and by more than the unit roundoff, and all heads."""
    old, new = torch.tensor(before, dtype=torch.float64), torch.tensor(after, dtype=torch.float64)
    return [int((new > 1.3 * old.clamp_min(2.0**-8)).sum()), new.numel()]


def predictions(looks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return rank correlation and calibration of predicted against true errors, by kernel, over all heads."""
    table: dict[str, Any] = {}
    for kernel in GPU_KERNELS:
        for leg in ("dQ", "dK"):
            pairs = [
                (_flat(look["errors"][kernel][leg]), _flat(look["errors"][kernel][f"{leg} predicted"]))
                for look in looks
                if kernel in look["errors"]
            ]
            if not sum(len(true) for true, _ in pairs):
                continue
            true, predicted = (torch.cat(part) for part in zip(*pairs, strict=True))
            usable = true.isfinite() & predicted.isfinite() & (true > 0)
            true, ratio = true[usable], predicted[usable] / true[usable]
            large = true > 0.05
            table[f"{kernel} {leg}"] = {
                "heads": len(true),
                "rank correlation": digits(_rank_correlation(true, predicted[usable])),
                "ratio": _quantiles(ratio),
                "heads above 0.05": int(large.sum()),
                "ratio above 0.05": _quantiles(ratio[large]),
                "largest": digits(true.max()),
            }
    return table


def _flat(rows: list[list[float]]) -> Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64)


def _rank_correlation(a: Tensor, b: Tensor) -> Tensor:
    ranks = torch.stack([part.argsort().argsort().double() for part in (a, b)])
    return torch.corrcoef(ranks)[0, 1]


def _quantiles(values: Tensor) -> list[float]:
    shares = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)
    return [digits(value) for value in values.quantile(shares)] if len(values) else []


def merge(folders: list[Path], name: str) -> dict[str, Any]:
    """Return the records by head of several folders as one."""
    files = sorted(path for folder in folders for path in folder.rglob(f"attention_{name}_*.heads.json.gz"))
    records = [json.loads(gzip.decompress(path.read_bytes())) for path in files]
    if not records:
        raise SystemExit(f"Expected files of attention_{name} below {folders}, got none. Pass other folders.")
    return {name: [_with_known_legs(run) for record in records for run in record[name]]}


def _with_known_legs(run: dict[str, Any]) -> dict[str, Any]:
    """Leave out errors that an older version measured and this one does not explain."""
    for look in (*run.get("moments", ()), *run.get("looks", ())):
        known = (*LEGS, "problem")
        look["errors"] = {
            kernel: {leg: errors for leg, errors in table.items() if leg in known}
            for kernel, table in look["errors"].items()
        }
    return run


COMMANDS: dict[str, Callable[[argparse.Namespace], Iterator[dict[str, Any]]]] = {
    "kernels": kernels,
    "cost": cost,
    "moments": moments,
    "losses": losses,
}


def main() -> None:
    """Run one command and write its results after each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--eager", action="store_true", help="do not record steps as CUDA graphs")
    parser.add_argument("--harsh", action="store_true", help="of the moments, only runs without warm-up")
    parser.add_argument("--calls", action="store_true", help="of the cost, only that of calls and layers")
    parser.add_argument("--plain", action="store_true", help="do not use our Triton kernels")
    parser.add_argument("--only", action="append", help="a kernel, kind of model or setting; may be repeated")
    parser.add_argument("--steps", type=int, help="steps of the runs whose losses are compared")
    parser.add_argument("--seed", type=int, action="append", help="a seed of the runs whose losses are compared")
    parser.add_argument("--merge", type=Path, action="append", help="read folders with results instead of running")
    parser.add_argument("--tree", help="with --merge: the commit whose files were measured, where git did not know")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    options = parser.parse_args()
    start = time.monotonic()
    if options.plain:
        fused_centering.ENABLED = False
    if options.merge:
        record = merge(options.merge, options.command)
        pattern = f"attention_{options.command}_*.json"
        files = [json.loads(path.read_text()) for folder in options.merge for path in folder.rglob(pattern)]
        indices = {name: files[0][name] for name in ("date", "commit", "device", "threads", "torch")}
        tree = {"tree": options.tree} if options.tree else {}
        _write(options, record, indices | tree | {"merged": len(files)})
        return
    for record in COMMANDS[options.command](options):
        taken = {"seconds": round(time.monotonic() - start, 1), "small": options.small}
        path = _write(options, record, taken)
    print(path, json.dumps(taken))


def _write(options: argparse.Namespace, record: dict[str, Any], more: dict[str, Any]) -> Path:
    path = save(f"attention_{options.command}", condensed(record) | more, options.folder)
    if options.merge:  # the name says where results were measured, not where they were merged
        path = path.rename(path.with_name(next(options.merge[0].rglob(f"attention_{options.command}_*.json")).name))
    if options.command in ("moments", "losses"):
        text = json.dumps(record, separators=(",", ":")).encode()
        path.with_suffix(".heads.json.gz").write_bytes(gzip.compress(text, mtime=0))
    return path


if __name__ == "__main__":
    main()
