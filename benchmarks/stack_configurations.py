"""Training runs on PyTorch's own parallel stacks, each as its users write it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from stack_models import Block, Decoder, DecoderConfig, make_decoder, make_tokens, token_loss


@dataclass(slots=True)
class Training:
    """A run that is ready to train: what a monitor is given, and one step of the loop."""

    model: Any
    optimizer: Any
    step: Callable[[int], Tensor | None]
    """Forward, backward and the optimizer's step; returns the loss where this process has one."""
    micro_batches: int = 1


Build = Callable[[int, int], Training]
"""Builds a run, given rank and number of processes."""

CONFIGURATIONS: dict[str, tuple[int, Build]] = {}
"""By name, the number of processes and the run."""


def configuration(name: str, processes: int = 2) -> Callable[[Build], Build]:
    """Register a run under a name."""

    def register(build: Build) -> Build:
        CONFIGURATIONS[name] = (processes, build)
        return build

    return register


def adamw(model: Any) -> torch.optim.AdamW:
    """Return the optimizer of all runs."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def train(
    model: Any, optimizer: torch.optim.Optimizer, rank: int, *, autocast: bool = False, clip: bool = True
) -> Callable[[int], Tensor]:
    """Return the usual step of a language model."""
    config = DecoderConfig()

    def step(number: int) -> Tensor:
        tokens = make_tokens(config, step=number, rank=rank)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            logits = model(tokens[:, :-1])
        loss = token_loss(logits, tokens)
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return step


def shard(model: Any, mesh: Any, **options: Any) -> None:
    """Shard every layer and the rest, as FSDP2's tutorial does."""
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def tensor_parallel(model: Decoder, mesh: Any, *, sequence: bool = True) -> None:
    """Split heads, hidden units and the vocabulary over a mesh, as PyTorch's tutorial does."""
    plan: dict[str, Any] = {
        "tok_embeddings": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1) if sequence else Replicate()
        ),
        "output": ColwiseParallel(input_layouts=Shard(1) if sequence else Replicate(), output_layouts=Replicate()),
    }
    if sequence:
        plan["norm"] = SequenceParallel()
    parallelize_module(model, mesh, plan)
    for layer in model.layers.values():
        columns = {f"attention.w{n}": ColwiseParallel() for n in "qkv"}
        columns |= {"feed_forward.w1": ColwiseParallel(), "feed_forward.w3": ColwiseParallel()}
        out: dict[str, Any] = {"output_layouts": Shard(1)} if sequence else {}
        rows = {"attention.wo": RowwiseParallel(**out), "feed_forward.w2": RowwiseParallel(**out)}
        around: dict[str, Any] = {}
        if sequence:
            around = {
                "attention_norm": SequenceParallel(),
                "ffn_norm": SequenceParallel(),
                "attention": PrepareModuleInput(
                    input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
                ),
                "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            }
        parallelize_module(layer, mesh, columns | rows | around)


@configuration("DDP")
def _ddp(rank: int, world: int) -> Training:
    model = DistributedDataParallel(make_decoder())
    optimizer = adamw(model)
    return Training(model, optimizer, train(model, optimizer, rank))


@configuration("DDP, autocast bf16")
def _ddp_autocast(rank: int, world: int) -> Training:
    model = DistributedDataParallel(make_decoder())
    optimizer = adamw(model)
    return Training(model, optimizer, train(model, optimizer, rank, autocast=True))


@configuration("DDP, accumulation under no_sync")
def _ddp_accumulated(rank: int, world: int) -> Training:
    model = DistributedDataParallel(make_decoder())
    optimizer, config = adamw(model), DecoderConfig()

    def step(number: int) -> Tensor:
        optimizer.zero_grad()
        for micro in range(3):
            tokens = make_tokens(config, step=10 * number + micro, rank=rank)
            with model.no_sync() if micro < 2 else nullcontext():
                loss = token_loss(model(tokens[:, :-1]), tokens) / 3
                loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, step, 3)


@configuration("DDP of a compiled model")
def _ddp_compiled(rank: int, world: int) -> Training:
    model = DistributedDataParallel(torch.compile(make_decoder(), backend="aot_eager"))
    optimizer = adamw(model)
    return Training(model, optimizer, train(model, optimizer, rank))


@configuration("compiled DDP")
def _compiled_ddp(rank: int, world: int) -> Training:
    inner = DistributedDataParallel(make_decoder())
    model = torch.compile(inner, backend="aot_eager")
    optimizer = adamw(model)
    return Training(model, optimizer, train(model, optimizer, rank))


@configuration("DDP, layers compiled in place")
def _ddp_layers_compiled(rank: int, world: int) -> Training:
    inner = make_decoder()
    for layer in inner.layers.values():
        layer.compile(backend="aot_eager")
    model = DistributedDataParallel(inner)
    optimizer = adamw(model)
    return Training(model, optimizer, train(model, optimizer, rank))


@configuration("composable replicate")
def _replicate(rank: int, world: int) -> Training:
    model = make_decoder()
    try:
        replicate(model, device_mesh=init_device_mesh("cpu", (world,)))
    except TypeError:
        replicate(model)
    optimizer = adamw(model)
    return Training(model, optimizer, train(model, optimizer, rank))


def _checkpoint_layers(model: Any, how: str) -> None:
    for name, layer in list(model.layers.items()):
        if how == "wrapper":
            model.layers[name] = checkpoint_wrapper(layer, CheckpointImpl.NO_REENTRANT)
        elif how == "wrapper, reentrant":
            model.layers[name] = checkpoint_wrapper(layer, CheckpointImpl.REENTRANT)
        else:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=how == "reentrant")


for _how in ("wrapper", "wrapper, reentrant", "non-reentrant", "reentrant"):

    @configuration(f"DDP, checkpointing: {_how}")
    def _ddp_checkpointed(rank: int, world: int, how: str = _how) -> Training:
        inner = make_decoder()
        _checkpoint_layers(inner, how)
        model = DistributedDataParallel(inner)
        optimizer = adamw(model)
        return Training(model, optimizer, train(model, optimizer, rank))


@configuration("FSDP1")
def _fsdp1(rank: int, world: int) -> Training:
    model = FullyShardedDataParallel(
        make_decoder(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu")
    )
    optimizer = adamw(model)
    return Training(model, optimizer, train(model, optimizer, rank, clip=False))


@configuration("FSDP1, use_orig_params")
def _fsdp1_orig(rank: int, world: int) -> Training:
    model = FullyShardedDataParallel(
        make_decoder(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    optimizer = adamw(model)
    return Training(model, optimizer, train(model, optimizer, rank, clip=False))


@configuration("FSDP2")
def _fsdp2(rank: int, world: int) -> Training:
    model = make_decoder()
    shard(model, init_device_mesh("cpu", (world,)))
    optimizer = adamw(model)
    return Training(model, optimizer, train(model, optimizer, rank))


@configuration("FSDP2, bf16 mixed precision")
def _fsdp2_bf16(rank: int, world: int) -> Training:
    model = make_decoder()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard(model, init_device_mesh("cpu", (world,)), mp_policy=policy)
    optimizer = adamw(model)
    return Training(model, optimizer, train(model, optimizer, rank))


@configuration("FSDP2, layers compiled, checkpointed")
def _fsdp2_compiled(rank: int, world: int) -> Training:
    model = make_decoder()
    _checkpoint_layers(model, "wrapper")
    for layer in model.layers.values():
        layer.compile(backend="aot_eager")
    shard(model, init_device_mesh("cpu", (world,)))
    optimizer = adamw(model)
    return Training(model, optimizer, train(model, optimizer, rank))


@configuration("HSDP 2 x 2", 4)
def _hsdp(rank: int, world: int) -> Training:
    model = make_decoder()
    shard(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    optimizer = adamw(model)
    return Training(model, optimizer, train(model, optimizer, rank))


@configuration("TP")
def _tp(rank: int, world: int) -> Training:
    model = make_decoder()
    tensor_parallel(model, init_device_mesh("cpu", (world,)), sequence=False)
    optimizer = adamw(model)
    return Training(model, optimizer, train(model, optimizer, 0, clip=False))


@configuration("TP, sequence parallel")
def _tp_sp(rank: int, world: int) -> Training:
    model = make_decoder()
    tensor_parallel(model, init_device_mesh("cpu", (world,)))
    optimizer = adamw(model)
    return Training(model, optimizer, train(model, optimizer, 0, clip=False))


@configuration("TP, sequence parallel, layers compiled")
def _tp_sp_compiled(rank: int, world: int) -> Training:
    model = make_decoder()
    tensor_parallel(model, init_device_mesh("cpu", (world,)))
    for layer in model.layers.values():
        layer.compile(backend="aot_eager")
    optimizer = adamw(model)
    return Training(model, optimizer, train(model, optimizer, 0, clip=False))


@configuration("FSDP2 x TP", 4)
def _fsdp2_tp(rank: int, world: int) -> Training:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = make_decoder()
    tensor_parallel(model, mesh["tensor"])
    shard(model, mesh["data"])
    optimizer = adamw(model)
    return Training(model, optimizer, train(model, optimizer, rank // 2, clip=False))


def _stage(model: Decoder, names: Iterable[str], *, first: bool, last: bool) -> Decoder:
    """Keep some layers of a decoder, in place."""
    keep = set(names)
    for name in list(model.layers):
        if name not in keep:
            del model.layers[name]
    if not first:
        model.tok_embeddings = None
    if not last:
        model.norm = model.output = None
    return model


def _pipeline(rank: int, world: int, schedule: type, *, micro: int = 4, virtual: int = 1) -> Training:
    config = DecoderConfig(layers=2 * virtual)
    stages, parts = [], []
    for number in range(rank, world * virtual, world):
        part = _stage(make_decoder(config), [str(number)], first=number == 0, last=number == world * virtual - 1)
        parts.append(part)
        stages.append(PipelineStage(part, number, world * virtual, torch.device("cpu")))
    loss_of = lambda logits, tokens: token_loss(logits, tokens)  # noqa: E731
    runs = schedule(stages if virtual > 1 else stages[0], micro, loss_fn=loss_of)
    model = parts[0] if len(parts) == 1 else nn.ModuleList(parts)
    optimizer = adamw(model)

    def step(number: int) -> Tensor | None:
        tokens = make_tokens(config, step=number, batch=2 * micro)
        optimizer.zero_grad()
        losses: list[Tensor] = []
        given = (tokens[:, :-1].contiguous(),) if rank == 0 else ()
        if rank == world - 1:
            runs.step(*given, target=tokens, losses=losses)
        else:
            runs.step(*given)
        optimizer.step()
        return torch.stack(losses).mean() if losses else None

    return Training(model, optimizer, step, micro)


@configuration("PP, GPipe")
def _gpipe(rank: int, world: int) -> Training:
    return _pipeline(rank, world, ScheduleGPipe)


@configuration("PP, 1F1B")
def _one_forward(rank: int, world: int) -> Training:
    return _pipeline(rank, world, Schedule1F1B)


@configuration("PP, interleaved 1F1B")
def _interleaved(rank: int, world: int) -> Training:
    return _pipeline(rank, world, ScheduleInterleaved1F1B, virtual=2)


@configuration("one process", 1)
def _alone(rank: int, world: int) -> Training:
    model = make_decoder()
    optimizer = adamw(model)
    return Training(model, optimizer, train(model, optimizer, 0, clip=False))
