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
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from conserved.attention import attention_rounding, centered
from conserved.attention.invariance import NotInvariantError
from measure import RESULTS, in_turns, save

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
EAGER = False
"""Whether steps are run without CUDA graphs."""

REFUSALS = (RuntimeError, NotImplementedError, ImportError, TypeError, NotInvariantError)
"""What kernels raise for arguments that they do not support."""

Attend = Callable[..., Tensor]


class Clock:
    """The time that is left."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self.end - time.monotonic()


def backend(name: str) -> Any:
    """Choose a kernel of PyTorch's function; another name leaves the choice to PyTorch."""
    return sdpa_kernel(BACKENDS[name]) if name in BACKENDS else nullcontext()


# Kernels


def head_inputs(kind: str, *, queries: int, keys: int, heads: int, groups: int, width: int) -> list[Tensor]:
    """Queries, keys, values and an output gradient of one kind of head, in float32."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k, v = normal(2, heads * groups, queries, width), normal(2, heads, keys, width), normal(2, heads, keys, width)
    if kind == "common":  # deep layers early in training
        k, v = 0.3 * k + 2 * normal(2, heads, 1, width), 0.03 * v + normal(2, heads, 1, width)
    if kind == "large scores":
        q, k = 4 * q, 4 * k
    if kind == "sink":  # all queries attend to the first key, whose value is near zero
        direction = normal(2, heads, 1, width)
        q = 0.3 * q + direction.repeat_interleave(groups, 1)
        k, v = 0.3 * k + 0.3 * normal(2, heads, 1, width), 0.1 * v + normal(2, heads, 1, width)
        k[..., 0, :], v[..., 0, :] = 1.5 * direction[..., 0, :], 0.01 * normal(2, heads, width)
    return [tensor.to(DEVICE) for tensor in (q, k, v, normal(2, heads * groups, queries, width))]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A way to call attention: the function, how it is centered, and a mask that says the same in float64."""

    attend: Attend
    mended: Attend
    mask: Tensor | None
    queries: int
    keys: int
    groups: int = 1


def variants(kernel: str, length: int) -> Iterator[tuple[str, Variant]]:
    """Ways to call a kernel that it supports."""
    triangle = torch.ones(length, length, dtype=torch.bool, device=DEVICE).tril()
    window = triangle & ~torch.ones_like(triangle).tril(-length // 4)
    if kernel in BACKENDS:
        causal: dict[str, Any] = {"is_causal": True}
        yield "causal", _product(kernel, causal, triangle, length, length)
        yield "full", _product(kernel, {}, None, length, length)
        yield "cross", _product(kernel, {}, None, length // 2, length)
        yield "grouped", _product(kernel, causal | {"enable_gqa": True}, triangle, length, length, groups=4)
        yield "window mask", _product(kernel, {"attn_mask": window}, window, length, length)
    elif kernel.startswith("flex"):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        function: Any = torch.compile(flex_attention) if kernel == "flex compiled" else flex_attention
        for name, mask in (("causal", triangle), ("window", window)):
            block = create_block_mask(_rule(length, name), None, None, length, length, device=DEVICE.type)
            attend = centered(function)
            yield (
                name,
                Variant(
                    attend=lambda q, k, v, b=block: function(q, k, v, block_mask=b),
                    mended=lambda q, k, v, b=block, a=attend: a(q, k, v, block_mask=b),
                    mask=mask,
                    queries=length,
                    keys=length,
                ),
            )
    elif kernel == "varlen":
        yield "packed", _varlen(length)
    else:
        written: Any = torch.compile(_written_out) if kernel == "written out, compiled" else _written_out
        mended = centered(written)
        yield (
            "causal",
            Variant(
                attend=lambda q, k, v: written(q, k, v, triangle),
                mended=lambda q, k, v: mended(q, k, v, triangle),
                mask=triangle,
                queries=length,
                keys=length,
            ),
        )


def _rule(length: int, name: str) -> Any:
    width = length // 4 if name == "window" else length
    return lambda b, h, q, k: (q >= k) & (q - k < width)


def _product(kernel: str, options: dict[str, Any], mask: Tensor | None, *sizes: int, groups: int = 1) -> Variant:
    mended = centered()

    def plain_call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with backend(kernel):
            return F.scaled_dot_product_attention(q, k, v, **options)

    def mended_call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        with backend(kernel):
            return mended(q, k, v, **options)

    queries, keys = sizes
    return Variant(attend=plain_call, mended=mended_call, mask=mask, queries=queries, keys=keys, groups=groups)


def _varlen(length: int) -> Variant:
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    named = inspect.signature(varlen_attn).parameters
    cut = torch.tensor([0, length // 3, length, 2 * length], dtype=torch.int32, device=DEVICE)

    def packed(q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Tensor, causal: bool) -> Tensor:
        options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in named else {"is_causal": causal}
        output: Any = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, length, length, **options)
        return output

    def call(function: Attend) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (q, k, v)]
            output = function(*flat, cu_seqlens=cut, causal=True)
            return output.unflatten(0, (2, -1)).transpose(1, 2)

        return attend

    mended = centered(packed, axis=-3)
    position = torch.arange(length, device=DEVICE)
    first = (position[:, None] >= position) & ((position < length // 3)[:, None] == (position < length // 3))
    mask = torch.stack((first, position[:, None] >= position))[:, None]
    return Variant(attend=call(packed), mended=call(mended), mask=mask, queries=length, keys=length)


def _written_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


def passes(attend: Attend, q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> list[Tensor]:
    """Output, dQ, dK and dV."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (q, k, v)]
    output = attend(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient.to(output.dtype))]


def exact_passes(tensors: list[Tensor], mask: Tensor | None) -> list[Tensor]:
    """The same in float64, by the math backend."""
    groups = tensors[0].shape[1] // tensors[1].shape[1]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=groups > 1)

    q, k, v, gradient = (tensor.double() for tensor in tensors)
    return passes(attend, q, k, v, gradient)


def by_head(actual: Tensor, exact: Tensor) -> Tensor:
    """Relative error of every head, over the batch."""
    error = (actual.double() - exact).square().sum((0, 2, 3)) / exact.square().sum((0, 2, 3))
    return error.sqrt()


def kernels(clock: Clock, small: bool) -> Iterator[dict[str, Any]]:
    """Errors before and after by kernel, variant, kind of input and precision."""
    length, rows = (64, []) if small else (512, [])
    names = [*BACKENDS, "flex", "flex compiled", "varlen", "written out", "written out, compiled"]
    if DEVICE.type == "cpu":
        names = ["flash", "math", "written out", "written out, compiled"]
    for kernel in names:
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
        table[when] = {name: [_digits(error.median()), _digits(error.max())] for name, error in named}
    return table


def _digits(value: Any) -> float:
    return float(f"{float(value):.3g}")


# Cost


def cost(clock: Clock, small: bool) -> Iterator[dict[str, Any]]:
    """Median seconds of forward and backward in turns: by the clock of the host, and of a CUDA graph of ten."""
    rows: list[dict[str, Any]] = []
    shapes = [(1, 2, 64, 16)] if small else [(8, 12, 1024, 64), (2, 32, 8192, 128)]
    for shape in shapes:
        leaves = [torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        gradient = torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)
        names: tuple[Any, ...] = ("rows", "mean", "running")
        attend: dict[str, Any] = {"flash": F.scaled_dot_product_attention}
        attend |= {name: centered(constants=name) for name in names}
        attend |= {f"{name}, compiled": _compiled(centered(constants=name)) for name in names[:2]}
        attend["values only"] = centered(keys=False)
        work = {name: _passes_of(function, leaves, gradient) for name, function in attend.items()}
        with backend("flash"):
            row: dict[str, Any] = {"shape": shape, "host": _median(in_turns(work, 3 if small else 20))}
            if DEVICE.type == "cuda":
                graphs = {name: _graph_of_ten(call) for name, call in work.items()}
                row["graph"] = {name: taken / 10 for name, taken in _median(in_turns(graphs, 20)).items()}
        timed = row.get("graph", row["host"])
        row["more than flash"] = {name: _digits(taken / timed["flash"] - 1) for name, taken in timed.items()}
        rows.append(row)
        yield {"cost": rows}
        if clock.left < 20:
            return


def _passes_of(attend: Any, leaves: list[Tensor], gradient: Tensor) -> Callable[[], Any]:
    q, k, v = leaves
    return lambda: torch.autograd.grad(attend(q, k, v, is_causal=True), leaves, gradient)


def _median(seconds: dict[str, list[float]]) -> dict[str, float]:
    return {name: sorted(taken)[len(taken) // 2] for name, taken in seconds.items()}


def _graph_of_ten(call: Callable[[], Any]) -> Callable[[], Any]:
    """Record ten calls, so that the host does not count."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            call()
    replay: Callable[[], Any] = graph.replay
    return replay


def _compiled(attend: Any) -> Any:
    return torch.compile(lambda q, k, v, is_causal: attend(q, k, v, is_causal=is_causal))


# A model


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A byte-level decoder and how it is trained."""

    kind: str = "learned"
    layers: int = 12
    width: int = 896
    head: int = 64
    length: int = 512
    batch: int = 8
    rate: float = 6e-4
    warm_up: int = 100
    steps: int = 2000
    dtype: torch.dtype = torch.bfloat16
    key_heads: int | None = None
    loss_scale: float = 1.0
    start: str = "gpt2"


class Attention(nn.Module):
    """Attention with learned positions, rotary positions, query and key norms, or grouped heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.head, self.kind = shape.width // shape.head, shape.head, shape.kind
        self.key_heads = shape.key_heads or (self.heads // 2 if shape.kind == "grouped" else self.heads)
        biases = shape.kind == "learned"
        self.q = nn.Linear(shape.width, shape.width, bias=biases)
        self.k = nn.Linear(shape.width, self.key_heads * shape.head, bias=biases)
        self.v = nn.Linear(shape.width, self.key_heads * shape.head, bias=biases)
        self.o = nn.Linear(shape.width, shape.width, bias=biases)
        self.attend: Attend = F.scaled_dot_product_attention
        self.kept: list[Tensor] | None = None
        angle = torch.arange(shape.length)[:, None] * 10000.0 ** (-torch.arange(0, shape.head, 2) / shape.head)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def _rotated(self, x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, -1)
        cos, sin = self.get_buffer("cos"), self.get_buffer("sin")
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.kind == "normed":
            q, k = (F.rms_norm(tensor, (self.head,)) for tensor in (q, k))
        if self.kind != "learned":
            q, k = self._rotated(q), self._rotated(k)
        q, k, v = (tensor.to(torch.get_autocast_dtype(x.device.type)) for tensor in (q, k, v))
        y = self.attend(q, k, v, is_causal=True, enable_gqa=self.heads != self.key_heads)
        if self.kept is not None:
            self.kept[:] = [q.detach(), k.detach(), v.detach()]
            y.register_hook(self.kept.append)
        return self.o(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = Attention(shape)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Decoder(nn.Module):
    """Weights begin as in GPT-2 (deviation 0.02, less by the root of the depth where branches end) or as in PyTorch."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, shape.width)
        self.positions = nn.Embedding(shape.length, shape.width) if shape.kind == "learned" else None
        self.blocks = nn.ModuleList([Block(shape) for _ in range(shape.layers)])
        self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, 256, bias=False)
        for name, p in self.named_parameters() if shape.start == "gpt2" else ():
            if p.ndim > 1:
                ends = name.endswith(("o.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * shape.layers) if ends else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def attentions(self) -> list[Attention]:
        return [block.attention for block in self.blocks]  # type: ignore[misc]


def corpus() -> Tensor:
    """The sources of the standard library as bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    text += b"".join(path.read_bytes() for path in sorted(folder.glob("*/*.py")) if "site-packages" not in str(path))
    return torch.frombuffer(bytearray(text[:30_000_000]), dtype=torch.uint8).to(DEVICE)


class Training:
    """A run: on a GPU its step is one CUDA graph, so that small models are not bound by the host."""

    def __init__(self, shape: Shape, text: Tensor, *, seed: int, attention: str) -> None:
        torch.manual_seed(seed)
        self.shape, self.text, self.attention = shape, text, attention
        self.model = Decoder(shape).to(DEVICE)
        self.kernel = "math" if attention == "math" else "flash"
        for layer in self.model.attentions():
            layer.attend = centered() if attention == "centered" else F.scaled_dot_product_attention
        self.rate = torch.tensor(0.0, device=DEVICE)
        on_gpu = DEVICE.type == "cuda"
        options: dict[str, Any] = {"capturable": True, "fused": True} if on_gpu else {}
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.rate, betas=(0.9, 0.95), weight_decay=0.1, **options
        )
        self.starts = torch.randint(
            len(text) - shape.length - 1, (shape.steps, shape.batch), generator=torch.Generator().manual_seed(seed)
        ).to(DEVICE)
        self.start = self.starts[0].clone()
        self.losses = torch.full((shape.steps,), math.nan, device=DEVICE)
        self.loss = torch.zeros((), device=DEVICE)
        self.done = 0
        self.graph: Any = self._captured() if on_gpu and not EAGER else None

    def gradients(self, start: Tensor) -> Tensor:
        """Compute a loss and the gradients of all parameters."""
        places = start[:, None] + torch.arange(self.shape.length + 1, device=DEVICE)
        tokens = self.text[places].long()
        with torch.autocast(DEVICE.type, self.shape.dtype), backend(self.kernel):
            logits = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        (loss * self.shape.loss_scale).backward()
        if self.shape.loss_scale != 1:
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            torch._foreach_div_(grads, self.shape.loss_scale)
        return loss.detach()

    def _one(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.loss.copy_(self.gradients(self.start))
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()

    def _captured(self) -> Any:
        weights = [p.detach().clone() for p in self.model.parameters()]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._one()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._one()
        with torch.no_grad():
            for p, old in zip(self.model.parameters(), weights, strict=True):
                p.copy_(old)
            for state in self.optimizer.state.values():
                for tensor in state.values():
                    tensor.zero_()
        return graph

    def step(self) -> None:
        shape = self.shape
        warm = min(1.0, (self.done + 1) / shape.warm_up) if shape.warm_up else 1.0
        cool = 0.1 + 0.45 * (1 + math.cos(math.pi * self.done / shape.steps))
        self.rate.fill_(shape.rate * warm * cool)
        self.start.copy_(self.starts[self.done])
        if self.graph is None:
            self._one()
        else:
            self.graph.replay()
        self.losses[self.done] = self.loss
        self.done += 1

    def norms(self) -> dict[str, list[float]]:
        """Spectral norms of the weights of queries and keys by layer."""
        table = {}
        for name in ("q", "k"):
            weights = [getattr(layer, name).weight.detach().float() for layer in self.model.attentions()]
            table[name] = [_digits(torch.linalg.matrix_norm(weight, 2)) for weight in weights]
        return table

    def curve(self) -> list[float]:
        """Mean losses of up to 50 equal parts of the run."""
        done = self.losses[: self.done]
        return [
            _digits(part.mean()) if len(part) else math.nan for part in done.tensor_split(min(50, max(1, self.done)))
        ]


# Moments


def look(run: Training) -> dict[str, Any]:
    """Errors of dQ and dK by layer and head on the run's own tensors, true and predicted, and Adam's updates."""
    layers = run.model.attentions()
    for layer in layers:
        layer.kept = []
    run.optimizer.zero_grad(set_to_none=False)
    probe = run.starts[-1][:2]
    run.gradients(probe)
    names = [name for name in BACKENDS if DEVICE.type == "cuda" or name in ("flash", "math")]
    table: dict[str, Any] = {name: {"dQ": [], "dK": [], "dQ predicted": [], "dK predicted": []} for name in names}
    table["centered"] = {"dQ": [], "dK": []}
    for layer in layers:
        kept, layer.kept = layer.kept or [], None
        q, k, v, gradient = kept
        length = q.shape[2]
        mask = torch.ones(length, length, dtype=torch.bool, device=DEVICE).tril()
        exact = exact_passes([q, k, v, gradient], mask)
        for name in table:
            variant = _product("flash" if name == "centered" else name, _options(q, k), mask, length, length)
            try:
                results = passes(variant.mended if name == "centered" else variant.attend, q, k, v, gradient)
            except RuntimeError as problem:
                table[name]["problem"] = str(problem).splitlines()[0]
                continue
            table[name]["dQ"].append(_list(by_head(results[1], exact[1])))
            table[name]["dK"].append(_list(by_head(results[2], exact[2])))
            if name != "centered":
                delta: Any = "scores" if name == "math" else "output"
                rounding = attention_rounding(q, k, v, results[0], gradient, causal=True, delta=delta)
                table[name]["dQ predicted"].append(_list(rounding.query))
                table[name]["dK predicted"].append(_list(rounding.key))
    return {"errors": table, "updates": updates(run, probe), "norms": run.norms()}


def _options(q: Tensor, k: Tensor) -> dict[str, Any]:
    return {"is_causal": True, "enable_gqa": q.shape[1] != k.shape[1]}


def _list(values: Tensor) -> list[float]:
    return [_digits(value) for value in values.tolist()]


def updates(run: Training, probe: Tensor) -> dict[str, list[float]]:
    """Cosine between the updates that Adam makes of W_Q with this attention and with the math backend, by layer.

    Adam's averages are those of the run; only the gradient of the step differs. "gradient" is the same without Adam.
    """
    layers = run.model.attentions()
    kept = [layer.attend for layer in layers]
    gradients = {}
    for name in ("flash", "centered", "math"):
        for layer in layers:
            layer.attend = centered() if name == "centered" else F.scaled_dot_product_attention
        run.kernel = "math" if name == "math" else "flash"
        run.optimizer.zero_grad(set_to_none=False)
        run.gradients(probe)
        gradients[name] = [layer.q.weight.grad.detach().clone() for layer in layers]  # type: ignore[union-attr]
    for layer, attend in zip(layers, kept, strict=True):
        layer.attend = attend
    run.kernel = "math" if run.attention == "math" else "flash"
    table: dict[str, list[float]] = {}
    for name in ("flash", "centered"):
        table[f"{name}, gradient"], table[f"{name}, Adam"] = [], []
        for layer, actual, exact in zip(layers, gradients[name], gradients["math"], strict=True):
            state = run.optimizer.state.get(layer.q.weight, {})
            steps = [_adam(gradient, state, run.done) for gradient in (actual, exact)]
            table[f"{name}, gradient"].append(_cosine(actual, exact))
            table[f"{name}, Adam"].append(_cosine(*steps))
    return table


def _adam(gradient: Tensor, state: dict[str, Any], done: int) -> Tensor:
    zero = torch.zeros_like(gradient)
    first = 0.9 * state.get("exp_avg", zero) + 0.1 * gradient
    second = 0.95 * state.get("exp_avg_sq", zero) + 0.05 * gradient.square()
    return first / (1 - 0.9 ** (done + 1)) / ((second / (1 - 0.95 ** (done + 1))).sqrt() + 1e-8)


def _cosine(a: Tensor, b: Tensor) -> float:
    return _digits(F.cosine_similarity(a.double().flatten(), b.double().flatten(), 0))


MOMENTS = (0, 5, 10, 15, 25, 50, 100, 200, 400, 800, 1400, 1999)


def moments(clock: Clock, small: bool) -> Iterator[dict[str, Any]]:
    """Runs of several kinds of model, looked at in the same steps."""
    text, runs = corpus(), []
    shape = Shape()
    if small:
        shape = Shape(layers=4, width=64, head=16, length=64, batch=4, steps=101, rate=3e-3, warm_up=0)
    kinds = (
        ("learned", "rotary", "normed", "grouped") if not small else ("learned", "rotary", "normed", "grouped", "deep")
    )
    for number, kind in enumerate(kinds):
        here = replace(shape, kind="learned", layers=8) if kind == "deep" else replace(shape, kind=kind)
        end = time.monotonic() + clock.left / (len(kinds) - number)
        run = Training(here, text, seed=0, attention="flash")
        record: dict[str, Any] = {"kind": kind, "parameters": sum(p.numel() for p in run.model.parameters())}
        record |= {"shape": _plain(here), "moments": []}
        runs.append(record)
        for step in range(here.steps):
            if step in MOMENTS or step == here.steps - 1:
                record["moments"].append({"step": step} | look(run))
                yield {"moments": runs}
            if time.monotonic() > end or clock.left < 3:
                record["stopped"] = step
                break
            run.step()
        record["losses"] = run.curve()
        yield {"moments": runs}
        del run
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()


def _plain(shape: Shape) -> dict[str, Any]:
    return {name: str(value) if name == "dtype" else value for name, value in vars(shape).items()}


# Losses


def losses(clock: Clock, small: bool) -> Iterator[dict[str, Any]]:
    """Losses of the same run with three attentions and three seeds, in ever harsher settings."""
    text, rows = corpus(), []
    base = Shape(layers=12, width=384, head=64, length=512, batch=8, steps=1000)
    if small:
        base = Shape(layers=3, width=32, head=16, length=32, batch=2, steps=12)
    settings = {
        "rate 3e-3, no warm-up": replace(base, rate=3e-3, warm_up=0),
        "rate 1e-2, no warm-up": replace(base, rate=1e-2, warm_up=0),
        "one key head, rate 3e-3, no warm-up": replace(base, kind="grouped", key_heads=1, rate=3e-3, warm_up=0),
        "fp16, rate 3e-3, no warm-up": replace(base, dtype=torch.float16, rate=3e-3, warm_up=0, loss_scale=1024.0),
        "rate 6e-4, warm-up": base,
        "length 2048, rate 3e-3, no warm-up": replace(base, length=base.length * 4, batch=2, rate=3e-3, warm_up=0),
    }
    slowest = 0.0
    for setting, shape in settings.items():
        for seed in range(3):
            for attention in ("flash", "centered", "math"):
                if clock.left < slowest + 3:
                    return
                start = time.monotonic()
                run = Training(shape, text, seed=seed, attention=attention)
                row: dict[str, Any] = {
                    "setting": setting,
                    "seed": seed,
                    "attention": attention,
                    "norms": [],
                    "looks": [],
                }
                looking = 0.0
                for step in range(shape.steps):
                    if seed == 0 and step in (5, 10, 15, 25, 50, 100, 300) and attention == "flash":
                        before = time.monotonic()
                        row["looks"].append({"step": step} | look(run))
                        looking += time.monotonic() - before
                    run.step()
                    if step in (24, 99, shape.steps - 1):
                        row["norms"].append({"step": step + 1} | run.norms())
                row["losses"] = run.curve()
                row["last"] = _digits6(run.losses[-shape.steps // 10 :].mean())
                row |= {"seconds": _digits(time.monotonic() - start - looking), "shape": _plain(shape)}
                rows.append(row)
                slowest = max(slowest, time.monotonic() - start)
                yield {"losses": rows}
                del run


def _digits6(value: Any) -> float:
    return float(f"{float(value):.6g}")


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
    errors = {kernel: table for kernel, table in look["errors"].items() if table["dQ"]}
    table: dict[str, Any] = {}
    for kernel, legs in errors.items():
        for leg in ("dQ", "dK"):
            layers = [torch.tensor(layer, dtype=torch.float64) for layer in legs[leg]]
            table.setdefault(kernel, {})[leg] = {
                "median": [_digits(layer.nanmedian()) for layer in layers],
                "max": [_digits(layer.nan_to_num(nan=math.inf).max()) for layer in layers],
                "mostly rounding": _digits(torch.stack(layers).gt(0.5).double().mean()),
            }
    worse = {leg: _worse(look["errors"]["flash"][leg], look["errors"]["centered"][leg]) for leg in ("dQ", "dK")}
    return {"step": look["step"], "errors": table, "worse": worse, "updates": look["updates"], "norms": look["norms"]}


def _worse(before: Any, after: Any) -> list[int]:
    """Count heads that are less accurate by more than 30 % and by more than the unit roundoff, and all heads."""
    old, new = torch.tensor(before, dtype=torch.float64), torch.tensor(after, dtype=torch.float64)
    return [int((new > 1.3 * old.clamp_min(2.0**-8)).sum()), new.numel()]


def predictions(looks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return rank correlation and calibration of predicted against true errors, by kernel, over all heads."""
    table: dict[str, Any] = {}
    for kernel in BACKENDS:
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
                "rank correlation": _digits(_rank_correlation(true, predicted[usable])),
                "ratio": _quantiles(ratio),
                "heads above 0.05": int(large.sum()),
                "ratio above 0.05": _quantiles(ratio[large]),
                "largest": _digits(true.max()),
            }
    return table


def _flat(rows: list[list[float]]) -> Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64)


def _rank_correlation(a: Tensor, b: Tensor) -> Tensor:
    ranks = torch.stack([part.argsort().argsort().double() for part in (a, b)])
    return torch.corrcoef(ranks)[0, 1]


def _quantiles(values: Tensor) -> list[float]:
    shares = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)
    return [_digits(value) for value in values.quantile(shares)] if len(values) else []


COMMANDS: dict[str, Callable[[Clock, bool], Iterator[dict[str, Any]]]] = {
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
    parser.add_argument("--folder", type=Path, default=RESULTS)
    options = parser.parse_args()
    global EAGER
    EAGER = options.eager
    start = time.monotonic()
    for record in COMMANDS[options.command](Clock(options.seconds), options.small):
        taken = {"seconds": round(time.monotonic() - start, 1), "small": options.small}
        path = save(f"attention_{options.command}", condensed(record) | taken, options.folder)
        if options.command in ("moments", "losses"):
            text = json.dumps(record, separators=(",", ":")).encode()
            path.with_suffix(".heads.json.gz").write_bytes(gzip.compress(text, mtime=0))
    print(path, json.dumps(taken))


if __name__ == "__main__":
    main()
