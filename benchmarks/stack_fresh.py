"""Combinations that no other table has: other models, uneven shards, three processes, stages with a shared table.

python benchmarks/stack_table.py --stack stack_fresh 'fresh*' '*(fresh*'
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.nn.functional import all_gather
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from stack_configurations import Training, adamw, shard, tensor_parallel
from stack_hand_written import DEFECTS, register
from stack_models import Decoder, DecoderConfig, make_decoder, make_tokens, token_loss

ODD = DecoderConfig(vocabulary=67, width=36, heads=6, key_heads=3, hidden=51, layers=3, length=14)
"""Sizes that two, three and four processes do not divide evenly."""

Loss = Callable[[Any, int, int], Tensor]
"""The loss of a model at a step and data rank."""


def train(
    model: Any,
    loss: Loss,
    rank: int,
    *,
    micro: int = 1,
    quiet: Callable[[Any, bool], Any] | None = None,
    change: Callable[[Any, int], None] | None = None,
    clip: float = 0.0,
    optimizer: Any = None,
) -> Training:
    """Return the usual loop; `quiet` returns the context of a micro-batch, given whether it is the last."""
    chosen = adamw(model) if optimizer is None else optimizer

    def step(number: int) -> Tensor:
        chosen.zero_grad()
        for part in range(micro):
            with quiet(model, part == micro - 1) if quiet is not None else nullcontext():
                value = loss(model, micro * number + part, rank) / micro
                value.backward()
        if change is not None:
            change(model, dist.get_rank())
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        chosen.step()
        return value

    return Training(model, chosen, step, micro)


def next_tokens(config: DecoderConfig) -> Loss:
    """Return the loss of a decoder."""

    def loss(model: Any, number: int, rank: int) -> Tensor:
        tokens = make_tokens(config, step=number, rank=rank, batch=3)
        return token_loss(model(tokens[:, :-1]), tokens)

    return loss


def without_sync(model: Any, last: bool) -> Any:
    """Return DDP's context of a micro-batch."""
    return nullcontext() if last else model.no_sync()


def last_sync(model: Any, last: bool) -> Any:
    """Tell FSDP2 to reduce in the last micro-batch only."""
    model.set_requires_gradient_sync(last)
    return nullcontext()


def local(tensor: Any) -> Tensor:
    """Return this process's piece."""
    piece: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return piece


def changes(word: str, factor: float, ranks: tuple[int, ...] | None = None) -> Callable[[Any, int], None]:
    """Scale gradients of a name, on some processes."""

    def change(model: Any, rank: int) -> None:
        chosen = [p for name, p in model.named_parameters() if word in name and p.grad is not None]
        assert chosen, word
        for p in chosen:
            if ranks is None or rank in ranks:
                local(p.grad).mul_(factor)

    return change


# Layers that are checkpointed and compiled, uneven sizes, accumulation.


def prepared(how: str) -> Decoder:
    """Return a decoder of odd sizes whose layers are checkpointed, compiled or both."""
    model = make_decoder(ODD)
    for name, layer in list(model.layers.items()):
        if "checkpointed" in how:
            model.layers[name] = checkpoint_wrapper(layer)
        if "compiled" in how:
            model.layers[name].compile(backend="aot_eager")
    return model


def replicas(rank: int, world: int, how: str = "", micro: int = 1, change: Any = None, **options: Any) -> Training:
    """DDP of a decoder of odd sizes."""
    model = DistributedDataParallel(prepared(how), **options)
    return train(model, next_tokens(ODD), rank, micro=micro, quiet=without_sync, change=change, clip=1.0)


def shards(
    rank: int, world: int, how: str = "", micro: int = 1, change: Any = None, mesh: tuple[int, ...] = (), **options: Any
) -> Training:
    """FSDP2 of a decoder of odd sizes."""
    model = prepared(how)
    names = ("replicate", "shard")[-len(mesh or (1,)) :]
    shard(model, init_device_mesh("cpu", mesh or (world,), mesh_dim_names=names), **options)
    return train(model, next_tokens(ODD), rank, micro=micro, quiet=last_sync, change=change)


register(
    "fresh: DDP of 3, layers checkpointed and compiled, no_sync",
    partial(replicas, how="checkpointed, compiled", micro=3),
    {
        "gradient of one key projection scaled on rank 2": {"change": changes("layers.1.attention.wk", 1.5, (2,))},
        "averaged over 4, not 3": {"change": changes("layers.2.feed_forward.w1", 0.75)},
    },
    3,
)
register(
    "fresh: DDP, buckets as views, odd sizes, no_sync", partial(replicas, gradient_as_bucket_view=True, micro=2), {}
)
register(
    "fresh: FSDP2 of 3, uneven shards",
    shards,
    {
        "the shorter shard of a gate is lost": {"change": changes("layers.0.feed_forward.w3", 0.0, (2,))},
        "a gain is averaged once more": {"change": changes("layers.1.ffn_norm", 1 / 3)},
    },
    3,
)
register(
    "fresh: FSDP2 of 3, layers checkpointed and compiled, accumulation",
    partial(shards, how="checkpointed, compiled", micro=2),
    {},
    3,
)
register("fresh: HSDP 2 x 2, odd sizes, accumulation", partial(shards, mesh=(2, 2), micro=2), {}, 4)
register(
    "fresh: FSDP2, shards of columns",
    partial(shards, shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 and p.shape[1] % 2 == 0 else Shard(0)),
    {"a shard of columns is doubled": {"change": changes("layers.1.attention.wo", 2.0, (1,))}},
)
register("fresh: FSDP2, offloaded", partial(shards, offload_policy=CPUOffloadPolicy(pin_memory=False)), {})
register(
    "fresh: FSDP2 of 3, bf16, outputs in float32",
    partial(
        shards,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
        ),
    ),
    {},
    3,
)


# One optimizer for every parameter.


def many_optimizers(rank: int, world: int) -> Training:
    """Every parameter has an optimizer of its own, under FSDP2."""
    model = make_decoder(ODD)
    shard(model, init_device_mesh("cpu", (world,)))
    optimizers = {p: torch.optim.AdamW([p], lr=1e-3) for p in model.parameters()}

    def step(number: int) -> Tensor:
        value = next_tokens(ODD)(model, number, rank)
        value.backward()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        return value

    return Training(model, [*optimizers.values()], step)


register("fresh: FSDP2, one optimizer per parameter", many_optimizers, {})


# Tensor parallelism of three.


def three_parts(rank: int, world: int, change: Any = None) -> Training:
    """Hidden units and heads over three processes."""
    model = make_decoder(ODD)
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.layers.values():
        plan = {f"feed_forward.w{n}": ColwiseParallel() for n in (1, 3)}
        plan |= {f"attention.w{n}": ColwiseParallel() for n in "qkv"}
        parallelize_module(
            layer, mesh, {**plan, "feed_forward.w2": RowwiseParallel(), "attention.wo": RowwiseParallel()}
        )
    return train(model, next_tokens(ODD), 0, change=change)


register(
    "fresh: TP of 3",
    three_parts,
    {"one process's hidden units are halved": {"change": changes("layers.0.feed_forward.w2", 0.5, (2,))}},
    3,
)


def two_kinds(rank: int, world: int, change: Any = None) -> Training:
    """Attention is tensor parallel with sequences cut between, FSDP2 and checkpointing around, on 2 x 2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    config = DecoderConfig(layers=2)
    model = make_decoder(config)
    tensor_parallel(model, mesh["tensor"])
    for name, layer in list(model.layers.items()):
        model.layers[name] = checkpoint_wrapper(layer)
        model.layers[name].compile(backend="aot_eager")
    shard(model, mesh["data"])
    return train(model, next_tokens(config), rank // 2, micro=2, quiet=last_sync, change=change)


register(
    "fresh: FSDP2 x TP+SP, layers checkpointed and compiled, accumulation",
    two_kinds,
    {"norms averaged over tensor parallelism": {"change": changes("attention_norm", 0.5)}},
    4,
)


# Weights that are gathered by properties, as in torchtitan's SimpleFSDP.


def gathered(name: str, half: bool) -> property:
    """Return a property that gathers a sharded weight; its gradient is averaged and scattered."""

    def weight(self: nn.Module) -> Tensor:
        dtypes: dict[str, Any] = {"forward_dtype": torch.bfloat16, "backward_dtype": torch.float32} if half else {}
        sharded: Any = self._parameters[name]
        whole: Tensor = sharded.redistribute(placements=[Replicate()], **dtypes).to_local(
            grad_placements=[Partial("avg")]
        )
        return whole

    return property(weight)


def simple(rank: int, world: int, change: Any = None, half: bool = False) -> Training:
    """Every weight is a DTensor behind a property of its name."""
    model = make_decoder(DecoderConfig())
    mesh = init_device_mesh("cpu", (world,))
    for module in list(model.modules()):
        own = dict(module.named_parameters(recurse=False))
        for name, p in own.items():
            setattr(module, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))
        if own:
            members = {name: gathered(name, half) for name in own}
            module.__class__ = type(f"Gathered{type(module).__name__}", (type(module),), members)
    return train(model, next_tokens(DecoderConfig()), rank, change=change)


register(
    "fresh: weights gathered by properties",
    simple,
    {"a shard of a value projection is lost": {"change": changes("layers.0.attention.wv", 0.0, (1,))}},
)


# Other models.


class Encoder(nn.Module):
    """BERT as `nn.TransformerEncoder` has it, with segments and a tied masked-word head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.segments = nn.Embedding(53, 30), nn.Embedding(2, 30)
        layer = nn.TransformerEncoderLayer(30, 5, 44, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.transform, self.norm = nn.Linear(30, 30), nn.LayerNorm(30)
        self.head = nn.Linear(30, 53)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of words."""
        segment = (torch.arange(tokens.shape[1]) > 5).long()
        x = self.encoder(self.words(tokens) + self.segments(segment))
        return self.head(self.norm(F.gelu(self.transform(x))))


class Vision(nn.Module):
    """A vision transformer with a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 30, 4, 4)
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 30)), nn.Parameter(torch.randn(1, 17, 30) * 0.1)
        layer = nn.TransformerEncoderLayer(30, 3, 45, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.ModuleDict({str(n): nn.modules.transformer._get_clones(layer, 1)[0] for n in range(2)})
        self.head = nn.Linear(30, 7)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of classes."""
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat((self.token.expand(len(h), -1, -1), h), 1) + self.positions
        for layer in self.layers.values():
            h = layer(h)
        return self.head(h[:, 0])


class Residual(nn.Module):
    """Convolutions with group norms."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(channels, channels, 3, padding=1), nn.Conv2d(channels, channels, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(3, channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Add the branch."""
        return x + self.two(F.silu(self.norms[1](self.one(F.silu(self.norms[0](x))))))


class Denoiser(nn.Module):
    """A small U-net."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.layers = nn.Conv2d(3, 15, 3, padding=1), nn.ModuleDict({"0": Residual(15), "1": Residual(15)})
        self.down, self.up = nn.Conv2d(15, 15, 2, 2), nn.ConvTranspose2d(15, 15, 2, 2)
        self.leave = nn.Conv2d(30, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the noise."""
        h = self.layers["0"](self.enter(x))
        low = self.up(self.layers["1"](self.down(h)))
        return self.leave(torch.cat((h, low), 1))


class Translator(nn.Module):
    """An encoder and a decoder with one table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(41, 28)
        self.core = nn.Transformer(28, 4, 2, 2, 52, 0.0, batch_first=True, norm_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return logits of target words."""
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        h = self.core(self.table(source), self.table(target), tgt_mask=mask, tgt_is_causal=True)
        return h @ self.table.weight.T


def seeded(number: int, rank: int) -> torch.Generator:
    """Return the generator of a step's data."""
    return torch.Generator().manual_seed(9973 * number + 13 * rank + 1)


def masked_words(model: Any, number: int, rank: int) -> Tensor:
    """Return the loss of some words."""
    tokens = torch.randint(0, 53, (3, 12), generator=seeded(number, rank))
    hidden = tokens.clone()
    hidden[:, ::4] = 1
    return F.cross_entropy(model(hidden)[:, ::4].flatten(0, 1), tokens[:, ::4].flatten())


def classes(model: Any, number: int, rank: int) -> Tensor:
    """Return the loss of images' classes."""
    images = torch.randn(5, 3, 16, 16, generator=seeded(number, rank))
    return F.cross_entropy(model(images), torch.arange(5), label_smoothing=0.1)


def noises(model: Any, number: int, rank: int) -> Tensor:
    """Return the squared error of noise."""
    images, noise = torch.randn(2, 3, 3, 8, 8, generator=seeded(number, rank))
    return F.mse_loss(model(images + noise), noise)


def translations(model: Any, number: int, rank: int) -> Tensor:
    """Return the loss of target words."""
    tokens = torch.randint(0, 41, (2, 3, 11), generator=seeded(number, rank))
    return F.cross_entropy(model(tokens[0], tokens[1, :, :-1]).flatten(0, 1), tokens[1, :, 1:].flatten())


MODELS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "encoder, tied": (Encoder, masked_words),
    "vision transformer": (Vision, classes),
    "U-net": (Denoiser, noises),
    "translator, tied": (Translator, translations),
}


def other_model(rank: int, world: int, name: str, stack: str, change: Any = None) -> Training:
    """Another model under DDP or FSDP2."""
    torch.manual_seed(0)
    make, loss = MODELS[name]
    model: Any = make()
    if stack == "DDP":
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (world,))
        units = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, Residual)
        for layer in [m for m in model.modules() if isinstance(m, units)]:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return train(model, loss, rank, change=change)


_LOST: dict[str, tuple[str, dict[str, Any]]] = {
    "encoder, tied": ("a shard of the transform is lost", {"change": changes("transform.weight", 0.0, (1,))}),
    "vision transformer": ("one feed-forward layer is doubled", {"change": changes("layers.1.linear1", 2.0)}),
    "U-net": ("a convolution's shard is lost", {"change": changes("layers.0.one", 0.0, (1,))}),
    "translator, tied": (
        "a matrix of cross attention is halved",
        {"change": changes("layers.0.multihead_attn.out", 0.5)},
    ),
}
for _name in MODELS:
    _words, _options = _LOST[_name]
    register(f"fresh: {_name}, DDP of 3", partial(other_model, name=_name, stack="DDP"), {}, 3)
    register(f"fresh: {_name}, FSDP2", partial(other_model, name=_name, stack="FSDP2"), {_words: _options})


# Models of transformers.


def pretrained(rank: int, world: int, kind: str, stack: str, change: Any = None, half: bool = False) -> Training:
    """A small model of `transformers` that computes its own loss."""
    package = import_module("transformers")
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    if kind == "GPT2":
        config = package.GPT2Config(
            vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
    else:
        more: dict[str, Any] = {"intermediate_size": 48, "num_key_value_heads": 2}
        if kind == "Mixtral":
            more |= {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
        if kind == "Qwen3":
            more |= {"head_dim": 8, "tie_word_embeddings": True}
        config = getattr(package, f"{kind}Config")(**sizes, **more)
    torch.manual_seed(0)
    model: Any = package.AutoModelForCausalLM.from_config(config)
    model.gradient_checkpointing_enable()
    model.train()
    if stack == "DDP":
        model = DistributedDataParallel(model, find_unused_parameters=kind == "Mixtral")
    else:
        mesh = init_device_mesh("cpu", (world,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options: dict[str, Any] = {"mp_policy": policy} if half else {}
        for layer in model.transformer.h if kind == "GPT2" else model.model.layers:
            fully_shard(layer, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)

    def loss(model: Any, number: int, rank: int) -> Tensor:
        tokens = torch.randint(0, 61, (3, 12), generator=seeded(number, rank))
        value: Tensor = model(input_ids=tokens, labels=tokens).loss
        return value

    return train(model, loss, rank, change=change, clip=1.0)


register("fresh: transformers GPT2, DDP of 3", partial(pretrained, kind="GPT2", stack="DDP"), {}, 3)
register(
    "fresh: transformers Llama, FSDP2",
    partial(pretrained, kind="Llama", stack="FSDP2"),
    {"a shard of queries is lost": {"change": changes("layers.1.self_attn.q_proj", 0.0, (0,))}},
)
register("fresh: transformers Llama, FSDP2, bf16", partial(pretrained, kind="Llama", stack="FSDP2", half=True), {})
register("fresh: transformers Qwen3, tied, FSDP2 of 3", partial(pretrained, kind="Qwen3", stack="FSDP2"), {}, 3)
register("fresh: transformers Mixtral, DDP", partial(pretrained, kind="Mixtral", stack="DDP"), {})
register("fresh: transformers Mixtral, FSDP2", partial(pretrained, kind="Mixtral", stack="FSDP2"), {})


# Stages with a shared table, by PyTorch's schedules.


class Ends(nn.Module):
    """A stage of a decoder; the first and the last have the table."""

    def __init__(self, number: int, count: int) -> None:
        super().__init__()
        config = DecoderConfig()
        whole = make_decoder(config, seed=number)
        self.blocks = nn.ModuleList(whole.layers.values())
        self.table = make_decoder(config, seed=99).tok_embeddings if number in (0, count - 1) else None
        self.norm = nn.LayerNorm(config.width) if number == count - 1 else None
        self.first = number == 0
        self.register_buffer("angles", whole.angles, persistent=False)

    angles: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Look up, run, compare with the table."""
        if self.first:
            assert self.table is not None
            x = self.table(x)
        for block in self.blocks:
            x = block(x, self.angles)
        if self.norm is None:
            return x
        assert self.table is not None
        return self.norm(x) @ self.table.weight.T


def shared_ends(
    rank: int, world: int, schedule: Any = Schedule1F1B, sums: bool = True, change: Any = None, twice: bool = False
) -> Training:
    """Three or four stages; the gradient of the table is summed over the first and the last."""
    config, micro = DecoderConfig(), 4
    model = Ends(rank, world)
    stage = PipelineStage(model, rank, world, torch.device("cpu"))
    run = schedule(stage, micro, loss_fn=token_loss)
    ends = dist.new_group([0, world - 1])
    optimizer = adamw(model)

    def step(number: int) -> Tensor | None:
        tokens = make_tokens(config, step=number, batch=2 * micro)
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if rank == 0:
            run.step(tokens[:, :-1].contiguous())
        elif rank == world - 1:
            run.step(target=tokens, losses=losses)
        else:
            run.step()
        if sums and model.table is not None:
            dist.all_reduce(model.table.weight.grad, group=ends)
        if change is not None:
            change(model, rank)
        optimizer.step()
        return torch.stack(losses).mean() if losses else None

    return Training(model, optimizer, step, micro)


register(
    "fresh: PP of 3, 1F1B, shared table",
    shared_ends,
    {
        "gradients of the table are not summed": {"sums": False},
        "the middle stage scales its values": {
            "change": lambda model, rank: changes("blocks.0.attention.wv", 1.3)(model, rank) if rank == 1 else None
        },
    },
    3,
)
register("fresh: PP of 4, GPipe, shared table", partial(shared_ends, schedule=ScheduleGPipe), {}, 4)


# Experts over processes, on DTensors of experts, with a balanced loss.


class Experts(nn.Module):
    """Four gated experts in stacked matrices of which a process has some; tokens are all gathered."""

    def __init__(self, rank: int, world: int, summed: bool) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.router = nn.Linear(32, 4, bias=False)
        w1, w3 = torch.randn(2, 4, 40, 32) * 0.2
        w2 = torch.randn(4, 32, 40) * 0.2
        self.own = range(rank * 4 // world, (rank + 1) * 4 // world)
        own = slice(self.own.start, self.own.stop)
        self.w1, self.w2, self.w3 = (nn.Parameter(w[own].clone()) for w in (w1, w2, w3))
        self.summed = summed

    def forward(self, x: Tensor) -> Tensor:
        """Gather the tokens of all processes, run the own experts on them, return own tokens' sum."""
        flat = x.flatten(0, 1)
        scores = self.router(flat).softmax(-1)
        top, chosen = scores.topk(2, -1)
        weights = torch.zeros_like(scores).scatter(1, chosen, top / top.sum(-1, keepdim=True))
        everyone = dist.group.WORLD
        tokens = torch.cat(all_gather(flat, everyone))
        every = torch.cat(all_gather(weights, everyone))
        out = torch.zeros_like(tokens)
        for n, expert in enumerate(self.own):
            gated = F.silu(tokens @ self.w1[n].T) * (tokens @ self.w3[n].T)
            out = out + (gated @ self.w2[n].T) * every[:, expert, None]
        out = Summed.apply(out) if self.summed else out
        rank, count = dist.get_rank(), len(flat)
        return out[rank * count : (rank + 1) * count].view_as(x)


class Summed(torch.autograd.Function):
    """The sum over processes in both passes: every process uses another part of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Sum."""
        out = x.clone()
        dist.all_reduce(out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Sum."""
        out = gradients[0].clone()
        dist.all_reduce(out)
        return out


def experts(rank: int, world: int, divides: bool = True, routed: bool = True) -> Training:
    """A decoder with experts over processes; what is replicated is averaged, experts are divided."""
    model: Any = make_decoder()
    for layer in model.layers.values():
        layer.feed_forward = Experts(rank, world, summed=True)
    optimizer = adamw(model)

    def step(number: int) -> Tensor:
        optimizer.zero_grad()
        value = next_tokens(DecoderConfig())(model, number, rank)
        value.backward()
        for name, p in model.named_parameters():
            own = any(f"feed_forward.w{n}" in name for n in (1, 2, 3))
            if not own and ("router" not in name or routed):
                dist.all_reduce(p.grad)
            if not own or divides:
                p.grad.div_(world)
        optimizer.step()
        return value

    return Training(model, optimizer, step)


register(
    "fresh: EP, tokens gathered, top 2",
    experts,
    {"experts are not divided": {"divides": False}, "routers are not reduced": {"routed": False}},
)
register("fresh: EP of 4, tokens gathered, top 2", experts, {}, 4)


# Loops of other packages.


def fabric(rank: int, world: int, micro: int = 2) -> Training:
    """Lightning Fabric with DDP, accumulation under its own context."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29511")
    package = import_module("lightning.fabric")
    loop = package.Fabric(accelerator="cpu", devices=1, strategy=partial_strategy(world))
    plain = make_decoder(ODD)
    model, optimizer = loop.setup(plain, adamw(plain))

    def step(number: int) -> Tensor:
        optimizer.zero_grad()
        for part in range(micro):
            with loop.no_backward_sync(model, enabled=part < micro - 1):
                value = next_tokens(ODD)(model, micro * number + part, rank) / micro
                loop.backward(value)
        loop.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        return value

    return Training(model, optimizer, step, micro)


def partial_strategy(world: int) -> Any:
    """Return DDP's strategy in processes that were started by somebody else."""
    return import_module("lightning.fabric.strategies").DDPStrategy(
        parallel_devices=[torch.device("cpu")] * world,
        cluster_environment=import_module("lightning.fabric.plugins.environments").TorchElasticEnvironment(),
        process_group_backend="gloo",
    )


register("fresh: Lightning Fabric, DDP, accumulation", fabric, {})

__all__ = ["DEFECTS", "Decoder"]
