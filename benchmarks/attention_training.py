"""Byte-level decoders of several kinds and their training on the sources of Python's own standard library."""

from __future__ import annotations

import math
import sysconfig
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention_kernels import BACKENDS, DEVICE, Attend, backend, causal_kernel, digits
from conserved.attention import centered, folded


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
    decay: float = 0.1
    clip: float = 1.0
    rank: int | None = None


class Attention(nn.Module):
    """Attention with learned positions, rotary positions, query and key norms, or grouped heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.head, self.kind = shape.width // shape.head, shape.head, shape.kind
        self.key_heads = shape.key_heads or (self.heads // 2 if shape.kind == "grouped" else self.heads)
        biases = shape.kind == "learned"
        self.narrow = nn.Linear(shape.width, shape.rank, bias=False) if shape.rank else nn.Identity()
        self.q = nn.Linear(shape.rank or shape.width, shape.width, bias=biases)
        self.k = nn.Linear(shape.rank or shape.width, self.key_heads * shape.head, bias=biases)
        self.v = nn.Linear(shape.width, self.key_heads * shape.head, bias=biases)
        self.o = nn.Linear(shape.width, shape.width, bias=biases)
        self.attend: Attend = causal_kernel("flash")
        self.kept: list[Tensor] | None = None
        angle = torch.arange(shape.length)[:, None] * 10000.0 ** (-torch.arange(0, shape.head, 2) / shape.head)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def _rotated(self, x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, -1)
        cos, sin = self.get_buffer("cos"), self.get_buffer("sin")
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        narrow = self.narrow(x)
        parts = (self.q(narrow), self.k(narrow), self.v(x))
        q, k, v = (part.unflatten(-1, (-1, self.head)).transpose(1, 2) for part in parts)
        if self.kind == "normed":
            q, k = (F.rms_norm(tensor, (self.head,)) for tensor in (q, k))
        if self.kind != "learned":
            q, k = self._rotated(q), self._rotated(k)
        if torch.is_autocast_enabled(x.device.type):
            q, k, v = (tensor.to(torch.get_autocast_dtype(x.device.type)) for tensor in (q, k, v))
        return self.o(kept_attention(self, q, k, v).transpose(1, 2).flatten(2))


def kept_attention(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Call the attention of a layer; if it keeps tensors, keep queries, keys, values and the output gradient."""
    y: Tensor = layer.attend(q, k, v)
    if layer.kept is not None:
        layer.kept[:] = [q.detach(), k.detach(), v.detach()]
        y.register_hook(layer.kept.append)
    return y


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

    def attentions(self) -> list[Any]:
        return [block.attention for block in self.blocks]


class TransformersDecoder(nn.Module):
    """A Llama of transformers with grouped heads, whose attention is chosen and kept as in `Attention`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.modeling_utils import AttentionInterface

        AttentionInterface.register("kept", _transformers_attention)
        heads = shape.width // shape.head
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=shape.width,
            intermediate_size=4 * shape.width,
            num_hidden_layers=shape.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            max_position_embeddings=shape.length,
            use_cache=False,
            attn_implementation="kept",
        )
        self.model = LlamaForCausalLM(config)
        for layer in self.attentions():
            layer.q, layer.k = layer.q_proj, layer.k_proj
            layer.attend, layer.kept = causal_kernel("flash"), None

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens, use_cache=False).logits
        return logits

    def attentions(self) -> list[Any]:
        return [block.self_attn for block in self.model.model.layers]


def _transformers_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    if mask is not None:
        raise ValueError("Expected no mask: the benchmark's sequences are causal and not padded.")
    half = torch.get_autocast_dtype(query.device.type)
    q, k, v = (tensor.to(half) for tensor in (query, key, value))
    return kept_attention(module, q, k, v).transpose(1, 2).contiguous(), None


def corpus() -> Tensor:
    """The sources of the standard library as bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    text += b"".join(path.read_bytes() for path in sorted(folder.glob("*/*.py")) if "site-packages" not in str(path))
    return torch.frombuffer(bytearray(text[:30_000_000]), dtype=torch.uint8).to(DEVICE)


def attention_called(name: str) -> Attend:
    """Return causal attention by name: a kernel's, or "centered" for flash with centered keys and values."""
    kernel, _, manner = name.partition(", ")
    if name == "centered":
        kernel, manner = "flash", "centered"
    if manner != "centered":
        return causal_kernel(kernel)
    if kernel not in BACKENDS:
        # Sums in half precision may differ by more than the probe allows, so it is left out.
        function = causal_kernel(kernel)
        mended = centered(function, causal=True)
        return lambda q, k, v: mended.apply(function, q, k, v, {}, plain=True)
    attend = centered()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with backend(kernel):
            output: Tensor = attend(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
            return output

    return call


def _folded(layer: Any) -> Attend:
    """Return flash attention that the layer's projections center, with constants of the step before."""
    attend = folded(key=layer.k if layer.kind == "learned" else None, value=layer.v, every=1)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with backend("flash"):
            output: Tensor = attend(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
            return output

    return call


class Training:
    """A run: on a GPU its step is one CUDA graph, so that small models are not bound by the host.

    Every run has a stream of its own: graphs of several runs can then be replayed at the same time, because libraries
    keep their workspaces by stream.
    """

    def __init__(self, shape: Shape, text: Tensor, *, seed: int, attention: str, eager: bool = False) -> None:
        torch.manual_seed(seed)
        self.shape, self.text, self.attention, self.seed = shape, text, attention, seed
        decoder = TransformersDecoder if shape.kind == "transformers" else Decoder
        self.model: Any = decoder(shape).to(DEVICE)
        self.attend_by(attention)
        self.rate = torch.tensor(0.0, device=DEVICE)
        on_gpu = DEVICE.type == "cuda"
        options: dict[str, Any] = {"capturable": True, "fused": True} if on_gpu else {}
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.rate, betas=(0.9, 0.95), weight_decay=shape.decay, **options
        )
        self.starts = torch.randint(
            len(text) - shape.length - 1, (shape.steps, shape.batch), generator=torch.Generator().manual_seed(seed)
        ).to(DEVICE)
        self.start = self.starts[0].clone()
        self.losses = torch.full((shape.steps,), math.nan, device=DEVICE)
        self.loss = torch.zeros((), device=DEVICE)
        self.done = 0
        self.stream = torch.cuda.Stream() if on_gpu else None
        eager = eager or shape.kind == "transformers"  # its masks are made on the host
        self.graph: Any = self._captured() if on_gpu and not eager else None
        if on_gpu:
            torch.cuda.synchronize()

    def attend_by(self, attention: str) -> None:
        """Let all layers use the attention of a name."""
        for layer in self.model.attentions():
            layer.attend = _folded(layer) if attention == "folded" else attention_called(attention)

    def gradients(self, start: Tensor) -> Tensor:
        """Compute a loss and the gradients of all parameters."""
        indices = start[:, None] + torch.arange(self.shape.length + 1, device=DEVICE)
        tokens = self.text[indices].long()
        with torch.autocast(DEVICE.type, self.shape.dtype):
            logits = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        (loss * self.shape.loss_scale).backward()
        if self.shape.loss_scale != 1:
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            torch._foreach_div_(grads, self.shape.loss_scale)
        return loss.detach()

    def _update(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.loss.copy_(self.gradients(self.start))
        if self.shape.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.shape.clip, foreach=True)
        self.optimizer.step()

    def _captured(self) -> Any:
        weights = [p.detach().clone() for p in self.model.parameters()]
        self.stream.wait_stream(torch.cuda.current_stream())  # type: ignore[union-attr]
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                self._update()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            self._update()
        torch.cuda.synchronize()
        with torch.no_grad():
            for p, old in zip(self.model.parameters(), weights, strict=True):
                p.copy_(old)
            for state in self.optimizer.state.values():
                for tensor in state.values():
                    tensor.zero_()
        torch.cuda.synchronize()
        return graph

    def step(self) -> None:
        """Take a step on the run's own stream, if there are streams."""
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            self._step()

    def _step(self) -> None:
        shape = self.shape
        warm = min(1.0, (self.done + 1) / shape.warm_up) if shape.warm_up else 1.0
        cool = 0.1 + 0.45 * (1 + math.cos(math.pi * self.done / shape.steps))
        self.rate.fill_(shape.rate * warm * cool)
        self.start.copy_(self.starts[self.done])
        if self.graph is None:
            self._update()
        else:
            self.graph.replay()
        self.losses[self.done] = self.loss
        self.done += 1

    def norms(self) -> dict[str, list[float]]:
        """Spectral norms of the weights of queries and keys by layer."""
        if self.stream is not None:
            torch.cuda.synchronize()
        table = {}
        for name in ("q", "k"):
            weights = torch.stack([getattr(layer, name).weight.detach().float() for layer in self.model.attentions()])
            # Eigenvalues of the Gram matrices: singular values of as many matrices take seconds on a GPU.
            finite = bool(weights.isfinite().all())
            squares = torch.linalg.eigvalsh(weights.mT @ weights)[:, -1] if finite else weights.sum((1, 2))
            table[name] = [digits(square) for square in squares.sqrt()]
        return table

    def curve(self) -> list[float]:
        """Mean losses of up to 50 equal parts of the run."""
        done = self.losses[: self.done]
        return [
            digits(part.mean()) if len(part) else math.nan for part in done.tensor_split(min(50, max(1, self.done)))
        ]
