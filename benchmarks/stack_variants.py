"""More ways in which people parallelise: options of PyTorch's wrappers, optimizers that average, stages, adapters."""

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
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from stack_configurations import Training, _stage, adamw, shard, tensor_parallel, train
from stack_hand_written import DEFECTS, GPT, loop, loss_of, nothing, reduce_gradients, register, tokens_of
from stack_models import Block, Decoder, DecoderConfig, make_decoder, make_tokens, token_loss


class LowRank(nn.Module):
    """A frozen linear map with an adapter of low rank beside it."""

    def __init__(self, inner: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(inner.in_features, rank, bias=False)
        self.up = nn.Linear(rank, inner.out_features, bias=False)
        nn.init.normal_(self.up.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the map and what the adapter adds."""
        return self.inner(x) + self.up(self.down(x))


def adapted() -> Decoder:
    """Return a decoder of which only adapters on queries, values and the feed-forward layers are trained."""
    model = make_decoder().requires_grad_(False)
    torch.manual_seed(1)
    for layer in model.layers.values():
        for owner, name in ((layer.attention, "wq"), (layer.attention, "wv"), (layer.feed_forward, "w1")):
            setattr(owner, name, LowRank(getattr(owner, name)))
    return model


def tied() -> Decoder:
    """Return a decoder whose head is its embedding."""
    model = make_decoder()
    assert model.output is not None
    assert model.tok_embeddings is not None
    model.output.weight = model.tok_embeddings.weight
    return model


def half_frozen() -> Decoder:
    """Return a decoder whose embedding and first layer are not trained."""
    model = make_decoder()
    assert model.tok_embeddings is not None
    model.tok_embeddings.requires_grad_(False)
    model.layers["0"].requires_grad_(False)
    return model


def finish(model: Any, rank: int, change: Callable[[Any, int], None] | None, **options: Any) -> Training:
    """Return a run with AdamW; `change` is done to gradients before the step."""
    optimizer = adamw(model)
    if change is None:
        return Training(model, optimizer, train(model, optimizer, rank, clip=False, **options))
    config = DecoderConfig()

    def step(number: int) -> Tensor:
        tokens = make_tokens(config, step=number, rank=rank)
        optimizer.zero_grad()
        loss = token_loss(model(tokens[:, :-1]), tokens)
        loss.backward()
        change(model, rank)
        optimizer.step()
        return loss

    return Training(model, optimizer, step)


def local(gradient: Tensor) -> Tensor:
    """Return what this process holds of a gradient."""
    held: Tensor = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return held


def zero_values_of_rank_one(model: Any, rank: int) -> None:
    """Lose the gradient of one projection on one process."""
    for name, p in model.named_parameters():
        if rank == 1 and "layers.1" in name and "wv" in name and p.grad is not None:
            local(p.grad).zero_()


def scale_gate(model: Any, rank: int) -> None:
    """Add up the gradient of one projection that was averaged already."""
    for name, p in model.named_parameters():
        if "layers.0" in name and "w3" in name and p.grad is not None:
            local(p.grad).mul_(dist.get_world_size())


def zero_second_half(model: Any, rank: int) -> None:
    """Lose what one process holds of the gradient of every second layer."""
    for name, p in model.named_parameters():
        if rank == 1 and "layers.1" in name and p.grad is not None:
            local(p.grad).zero_()


# Options of DistributedDataParallel.


def without_annotations(hook: Any) -> Any:
    """Return a communication hook whose annotations, which are strings here, PyTorch does not look at."""
    hook.__annotations__.clear()
    return hook


def wrapped(
    rank: int,
    world: int,
    make: Callable[[], Decoder] = make_decoder,
    hook: str = "",
    change: Any = None,
    bf16: bool = False,
    **options: Any,
) -> Training:
    """DDP with options and communication hooks."""
    model = DistributedDataParallel(make().to(torch.bfloat16) if bf16 else make(), **options)
    if hook == "bf16":
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    if hook == "powerSGD":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    if hook == "halves":
        # A hook that reduces over pairs of neighbours only.
        pairs = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]

        def reduce_pairs(_: Any, bucket: Any) -> Any:
            work = dist.all_reduce(bucket.buffer(), group=pairs[rank // 2], async_op=True)
            return work.get_future().then(lambda done: done.value()[0] / 2)

        model.register_comm_hook(None, without_annotations(reduce_pairs))
    if hook == "one bucket":

        def reduce_first(_: Any, bucket: Any) -> Any:
            tensor = bucket.buffer()
            if bucket.index() > 0:
                future: torch.futures.Future[Tensor] = torch.futures.Future()
                future.set_result(tensor)
                return future
            return dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0] / world)

        model.register_comm_hook(None, without_annotations(reduce_first))
    if hook == "twice":

        def average_twice(_: Any, bucket: Any) -> Any:
            divisor = world * world if bucket.index() > 0 else world
            work = dist.all_reduce(bucket.buffer(), async_op=True)
            return work.get_future().then(lambda done: done.value()[0] / divisor)

        model.register_comm_hook(None, without_annotations(average_twice))
    return finish(model, rank, change)


register("DDP, static graph", partial(wrapped, static_graph=True), {})
register(
    "DDP, unused parameters looked for", partial(wrapped, find_unused_parameters=True, gradient_as_bucket_view=True), {}
)
register("DDP, gradients compressed to bf16", partial(wrapped, hook="bf16"), {})
register("DDP, PowerSGD", partial(wrapped, hook="powerSGD"), {})
register("DDP, bf16 parameters", partial(wrapped, bf16=True), {})
register(
    "DDP, adapters",
    partial(wrapped, make=adapted),
    {"gradient of one projection lost on rank 1": {"change": zero_values_of_rank_one}},
)
register("DDP, tied head", partial(wrapped, make=tied), {})
register("DDP, frozen layers", partial(wrapped, make=half_frozen), {})
register(
    "DDP, small buckets",
    partial(wrapped, bucket_cap_mb=0.01),
    {
        "only the first bucket is reduced": {"hook": "one bucket"},
        "other buckets are averaged twice": {"hook": "twice"},
        "gradient of one projection lost on rank 1": {"change": zero_values_of_rank_one},
        "gradient of one projection added up after averaging": {"change": scale_gate},
    },
)
register("DDP of 4", wrapped, {"reduced over pairs only": {"hook": "halves"}}, 4)


def joined(rank: int, world: int) -> Training:
    """Processes have batches of other sizes, and run inside `join`."""
    from torch.distributed.algorithms.join import Join

    model = DistributedDataParallel(make_decoder())
    optimizer, config = adamw(model), DecoderConfig()

    def step(number: int) -> Tensor:
        with Join([model]):
            tokens = make_tokens(config, step=number, rank=rank, batch=2 + rank)
            optimizer.zero_grad()
            loss = token_loss(model(tokens[:, :-1]), tokens)
            loss.backward()
            optimizer.step()
        return loss

    return Training(model, optimizer, step)


register("DDP inside join", joined, {})


def redundant(rank: int, world: int, forget: bool = False) -> Training:
    """ZeroRedundancyOptimizer, which steps a part of the parameters on each process and sends them."""
    model = DistributedDataParallel(make_decoder())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    if forget:
        vars(optimizer)["_sync_params"] = nothing
    return Training(model, optimizer, train(model, optimizer, rank))


register("DDP, ZeroRedundancyOptimizer", redundant, {"parameters are not sent": {"forget": True}})


def accelerated(rank: int, world: int, micro: int = 1, inner: bool = False) -> Training:
    """Accelerate, as docs/how-to/watch-a-parallel-run.md has it: a step is one micro-batch."""
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    accelerator = import_module("accelerate").Accelerator(cpu=True, gradient_accumulation_steps=micro)
    plain = make_decoder()
    model, optimizer = accelerator.prepare(plain, adamw(plain))
    config = DecoderConfig()

    def step(number: int) -> Tensor:
        with accelerator.accumulate(model):
            # Gradients of the last step are cleared here, and not before a monitor has seen the step.
            if number % micro == 0:
                model.zero_grad()
            tokens = make_tokens(config, step=number, rank=rank)
            loss = token_loss((plain if inner else model)(tokens[:, :-1]), tokens)
            accelerator.backward(loss)
            optimizer.step()
        return loss

    return Training(model, optimizer, step)


register("accelerate", accelerated, {"the model inside the wrapper is called": {"inner": True}})
register("accelerate, accumulation", partial(accelerated, micro=2), {})


# Replicas that differ between synchronisations.


def local_steps(rank: int, world: int, period: int = 4, how: str = "average", lost: bool = False) -> Training:
    """Every process steps alone for some steps; then parameters are averaged, or pulled, or gossiped."""
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inner = loop(model, optimizer, lambda n: tokens_of(n, rank), nothing)
    anchor = [p.detach().clone() for p in model.parameters()]
    for one in anchor:
        one.requires_grad_()
    outer = torch.optim.SGD(anchor, lr=0.7, momentum=0.9, nesterov=True)

    def step(number: int) -> Tensor | None:
        loss = inner.step(number)
        if (number + 1) % period:
            return loss
        with torch.no_grad():
            for p, start in zip(model.parameters(), anchor, strict=True):
                if how == "gossip":
                    parts = [torch.empty_like(p) for _ in range(world)]
                    dist.all_gather(parts, p.detach())
                    p.copy_((p + parts[(rank + 1) % world]) / 2)
                    continue
                mean = p.detach().clone()
                dist.all_reduce(mean)
                mean /= world
                if how == "elastic":
                    p.add_(mean - p, alpha=0.5)
                elif how == "diloco":
                    start.grad = start.detach() - mean
                else:
                    p.copy_(mean)
            if how == "diloco":
                with torch.enable_grad():
                    outer.step()
                for p, start in zip(model.parameters(), anchor, strict=True):
                    p.copy_(start)
        return loss

    return Training(model, optimizer, step)


register("local SGD, every 4 steps", local_steps, {})
register("DiLoCo", partial(local_steps, how="diloco", period=3), {})
register("elastic averaging", partial(local_steps, how="elastic", period=2), {})
register("gossip", partial(local_steps, how="gossip", period=1), {}, 4)


def post_local(rank: int, world: int) -> Training:
    """DDP reduces gradients for two steps, then parameters are averaged every second step."""
    model = DistributedDataParallel(make_decoder())
    group = dist.new_subgroups(1)[0]
    model.register_comm_hook(PostLocalSGDState(None, group, 2), post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(adamw(model), PeriodicModelAverager(period=2, warmup_steps=2))
    return Training(model, optimizer, train(model, optimizer, rank, clip=False))


register("DDP, post-local SGD", post_local, {})


# FSDP1.


def flat(
    rank: int,
    world: int,
    make: Callable[[], Decoder] = make_decoder,
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
    original: bool = True,
    bf16: bool = False,
    micro: int = 1,
    whole: bool = False,
    change: Any = None,
) -> Training:
    """FullyShardedDataParallel with its options."""
    mesh = init_device_mesh("cpu", (2, 2)) if world == 4 else None
    half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
    model = FullyShardedDataParallel(
        make(),
        auto_wrap_policy=None if whole else ModuleWrapPolicy({Block}),
        use_orig_params=original,
        sharding_strategy=strategy,
        mixed_precision=half if bf16 else None,
        device_mesh=mesh,
        device_id=torch.device("cpu"),
    )
    if micro == 1:
        return finish(model, rank, change)
    optimizer, config = adamw(model), DecoderConfig()

    def step(number: int) -> Tensor:
        optimizer.zero_grad()
        for part in range(micro):
            tokens = make_tokens(config, step=10 * number + part, rank=rank)
            with model.no_sync() if part < micro - 1 else nullcontext():
                loss = token_loss(model(tokens[:, :-1]), tokens) / micro
                loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, step, micro)


_FLAT_DEFECTS = {
    "gradients of rank 1 lost": {"change": zero_second_half},
    "gradient of one projection added up after averaging": {"change": scale_gate},
}
register("FSDP1, original parameters", flat, _FLAT_DEFECTS)
register("FSDP1, one unit", partial(flat, original=False, whole=True), {})
register("FSDP1, gradients and optimizer only", partial(flat, strategy=ShardingStrategy.SHARD_GRAD_OP), {})
register("FSDP1, not sharded", partial(flat, strategy=ShardingStrategy.NO_SHARD), {})
register("FSDP1, hybrid", partial(flat, strategy=ShardingStrategy.HYBRID_SHARD), {}, 4)
register("FSDP1, bf16", partial(flat, bf16=True), {})
register("FSDP1, no_sync", partial(flat, micro=3), {})
register("FSDP1, adapters", partial(flat, make=adapted), {})
register("FSDP1, tied head", partial(flat, make=tied, whole=True), {})
register("FSDP1, frozen layers", partial(flat, make=half_frozen), {})


# FSDP2.


def sharded(
    rank: int,
    world: int,
    make: Callable[[], Decoder] = make_decoder,
    meta: bool = False,
    micro: int = 1,
    change: Any = None,
    whole: bool = False,
    **options: Any,
) -> Training:
    """fully_shard with its options."""
    if meta:
        with torch.device("meta"):
            model: Any = Decoder(DecoderConfig())
    else:
        model = make()
    mesh = init_device_mesh("cpu", (world,))
    if whole:
        fully_shard(model, mesh=mesh, **options)
    else:
        shard(model, mesh, **options)
    if meta:
        model.to_empty(device="cpu")
        torch.manual_seed(rank)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.to_local().normal_(1.0 if "norm" in name else 0.0, 0.2)
            model.angles.copy_(make_decoder().angles)
    if micro == 1:
        return finish(model, rank, change)
    optimizer, config = adamw(model), DecoderConfig()

    def step(number: int) -> Tensor:
        optimizer.zero_grad()
        for part in range(micro):
            model.set_requires_gradient_sync(part == micro - 1)
            tokens = make_tokens(config, step=10 * number + part, rank=rank)
            loss = token_loss(model(tokens[:, :-1]), tokens) / micro
            loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, step, micro)


_HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
register("FSDP2, from the meta device", partial(sharded, meta=True), {})
register("FSDP2, kept whole after forward", partial(sharded, reshard_after_forward=False), {})
register("FSDP2, bf16 also in reductions", partial(sharded, mp_policy=_HALF), {})
register("FSDP2, reductions in the last micro-batch", partial(sharded, micro=3), {})
register(
    "FSDP2, adapters",
    partial(sharded, make=adapted),
    {"gradient of one projection lost on rank 1": {"change": zero_values_of_rank_one}},
)
register("FSDP2, tied head", partial(sharded, make=tied, whole=True), {})
register("FSDP2, frozen layers", partial(sharded, make=half_frozen), {})


# Tensor parallelism.


def split_loss(rank: int, world: int) -> Training:
    """Logits stay cut over classes, and the loss is computed on the pieces."""
    model: Any = make_decoder()
    mesh = init_device_mesh("cpu", (world,))
    tensor_parallel_without_head(model, mesh)
    parallelize_module(model.output, mesh, ColwiseParallel(output_layouts=Shard(-1), use_local_output=False))
    optimizer, config = adamw(model), DecoderConfig()

    def step(number: int) -> Tensor:
        tokens = make_tokens(config, step=number)
        optimizer.zero_grad()
        with loss_parallel():
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, step)


def tensor_parallel_without_head(model: Any, mesh: Any) -> None:
    """Split everything but the head."""
    head, model.output = model.output, nn.Linear(1, 1)
    tensor_parallel(model, mesh, sequence=False)
    model.output = head


register("TP, loss on pieces", split_loss, {})


# Pipelines.


def piped(rank: int, world: int, schedule: Any, virtual: int = 2, vee: bool = False) -> Training:
    """Several stages on each process, in the schedules that PyTorch has."""
    micro, count = 4, world * virtual
    config = DecoderConfig(layers=count)
    numbers = [rank, count - 1 - rank] if vee else list(range(rank, count, world))
    parts = [_stage(make_decoder(config), [str(n)], first=n == 0, last=n == count - 1) for n in numbers]
    stages = [PipelineStage(part, n, count, torch.device("cpu")) for part, n in zip(parts, numbers, strict=True)]
    run = schedule(stages, micro, loss_fn=lambda logits, tokens: token_loss(logits, tokens))
    model = nn.ModuleList(parts)
    optimizer = adamw(model)

    def step(number: int) -> Tensor | None:
        tokens = make_tokens(config, step=number, batch=2 * micro)
        optimizer.zero_grad()
        losses: list[Tensor] = []
        given = (tokens[:, :-1].contiguous(),) if 0 in numbers else ()
        if count - 1 in numbers:
            run.step(*given, target=tokens, losses=losses)
        else:
            run.step(*given)
        optimizer.step()
        return torch.stack(losses).mean() if losses else None

    return Training(model, optimizer, step, micro)


register("PP, looped breadth first", partial(piped, schedule=ScheduleLoopedBFS), {})
register("PP, interleaved zero bubble", partial(piped, schedule=ScheduleInterleavedZeroBubble), {})
register("PP, zero bubble in a V", partial(piped, schedule=ScheduleZBVZeroBubble, vee=True), {})


def piped_replicas(rank: int, world: int, sharded: bool = False, reduces: bool = True) -> Training:
    """Two stages, each replicated or sharded over two processes."""
    micro, config = 4, DecoderConfig()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stage"))
    stage_rank, group = mesh.get_local_rank("stage"), mesh.get_group("data")
    model = _stage(make_decoder(), [str(stage_rank)], first=stage_rank == 0, last=stage_rank == 1)
    if sharded:
        fully_shard(model, mesh=mesh["data"])
    stage = PipelineStage(model, stage_rank, 2, torch.device("cpu"), group=mesh.get_group("stage"))
    run = Schedule1F1B(stage, micro, loss_fn=lambda logits, tokens: token_loss(logits, tokens))
    optimizer = adamw(model)

    def step(number: int) -> Tensor | None:
        tokens = make_tokens(config, step=number, rank=mesh.get_local_rank("data"), batch=2 * micro)
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if stage_rank == 0:
            run.step(tokens[:, :-1].contiguous())
        else:
            run.step(target=tokens, losses=losses)
        if reduces and not sharded:
            for p in model.parameters():
                if p.grad is not None:
                    dist.all_reduce(p.grad, group=group)
                    p.grad.div_(2)
        optimizer.step()
        return torch.stack(losses).mean() if losses else None

    return Training(model, optimizer, step, micro)


register("PP x DP by hand", piped_replicas, {"gradients of stages are not reduced": {"reduces": False}}, 4)
register("PP x FSDP2", partial(piped_replicas, sharded=True), {}, 4)


class EndStage(nn.Module):
    """The first or the last stage of a pipeline whose table is the head."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 32)
        self.block = Block(DecoderConfig())
        self.norm = None if first else nn.LayerNorm(32)
        self.register_buffer("angles", make_decoder().angles, persistent=False)

    angles: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Look up and run, or run and compare with the table."""
        if self.norm is None:
            return self.block(self.table(x), self.angles)
        return self.norm(self.block(x, self.angles)) @ self.table.weight.T


def tied_stages(rank: int, world: int, sums: bool = True) -> Training:
    """The first and the last stage hold the same table, whose gradient is added up over both."""
    torch.manual_seed(0)
    model = EndStage(first=rank == 0)
    with torch.no_grad():
        model.table.weight.copy_(torch.randn(64, 32, generator=torch.Generator().manual_seed(5)) * 0.3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(number: int) -> Tensor | None:
        tokens = make_tokens(DecoderConfig(), step=number)
        optimizer.zero_grad()
        loss = None
        if rank == 0:
            out = model(tokens[:, :-1])
            dist.send(out.detach(), 1)
            gradient = torch.empty_like(out)
            dist.recv(gradient, 1)
            out.backward(gradient)
        else:
            x = torch.empty(2, 16, 32)
            dist.recv(x, 0)
            x.requires_grad_()
            loss = token_loss(model(x), tokens)
            loss.backward()
            assert x.grad is not None
            dist.send(x.grad, 0)
        if sums:
            dist.all_reduce(model.table.weight.grad)
        optimizer.step()
        return loss

    return Training(model, optimizer, step)


register("PP by hand, tied head", tied_stages, {"gradients of the table are not summed": {"sums": False}})


# Sharded optimizers and parameters by hand.


def scattered(rank: int, world: int, factor: float = 1.0, stale: bool = False, lost: bool = False) -> Training:
    """ZeRO-2 by hand: a flat gradient is reduced and scattered, each process steps its part of a flat copy."""
    torch.manual_seed(0)
    model = GPT()
    every = [*model.parameters()]
    total = sum(p.numel() for p in every)
    length = -(-total // world)
    whole = torch.cat([*(p.detach().flatten() for p in every), torch.zeros(length * world - total)])
    own = whole.chunk(world)[rank].clone().requires_grad_()
    optimizer = torch.optim.AdamW([own], lr=1e-3)

    def step(number: int) -> Tensor:
        tokens = tokens_of(number, rank)
        for p in every:
            p.grad = None
        loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        joined = torch.cat(
            [*(p.grad.flatten() for p in every if p.grad is not None), torch.zeros(length * world - total)]
        )
        dist.all_reduce(joined)
        own.grad = joined.chunk(world)[rank] / world * factor
        optimizer.step()
        parts = [torch.empty_like(own) for _ in range(world)]
        dist.all_gather(parts, own.detach())
        if stale and number > 0:
            parts[0] = parts[0] * 0 + whole[:length]
        new = torch.cat(parts)
        with torch.no_grad():
            for p, part in zip(every, new[:total].split([p.numel() for p in every]), strict=True):
                p.copy_(part.view_as(p))
        return loss

    return Training(model, optimizer, step)


register("ZeRO-2 by hand", scattered, {"the part of rank 0 is stale": {"stale": True}})


def overlapped(rank: int, world: int, skipped: str = "", wrong: bool = False) -> Training:
    """Hooks reduce every gradient as it comes, asynchronously, and the loop waits before the step."""
    torch.manual_seed(0)
    model = GPT(gated=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    waiting: list[tuple[Any, Tensor]] = []

    def reduce(p: Tensor) -> None:
        assert p.grad is not None
        waiting.append((dist.all_reduce(p.grad, async_op=True), p.grad))

    for name, p in model.named_parameters():
        if not skipped or skipped not in name:
            p.register_post_accumulate_grad_hook(reduce)

    def finish_reductions() -> None:
        for work, gradient in waiting:
            work.wait()
            gradient.div_(world * world if wrong and gradient.ndim == 2 else world)
        waiting.clear()

    return loop(model, optimizer, lambda n: tokens_of(n, rank), finish_reductions)


register(
    "data parallel by hooks",
    overlapped,
    {"one head is not reduced": {"skipped": "attn.proj"}, "matrices are averaged twice": {"wrong": True}},
)


def ulysses(rank: int, world: int, returns: bool = True) -> Training:
    """Tokens are spread over processes, and heads while they attend: all-to-all before and after."""
    from stack_hand_written import HEADS, LENGTH, WIDTH, Collective

    torch.manual_seed(0)
    model = GPT(gated=True)
    length = LENGTH // world

    def to_heads(x: Tensor) -> Tensor:
        """(batch, tokens of this process, heads, width) to (batch, all tokens, heads of this process, width)."""
        sent = torch.stack([part.contiguous() for part in x.chunk(world, 2)])
        out = torch.empty_like(sent)
        dist.all_to_all_single(out, sent)
        return torch.cat(out.unbind(0), 1)

    def to_tokens(x: Tensor) -> Tensor:
        sent = torch.stack([part.contiguous() for part in x.chunk(world, 1)])
        out = torch.empty_like(sent)
        dist.all_to_all_single(out, sent)
        return torch.cat(out.unbind(0), 2)

    def attend(module: Any, x: Tensor, **_: Any) -> Tensor:
        q, k, v = module.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        q, k, v = (Collective.apply(one, to_heads, to_tokens).transpose(1, 2) for one in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        back = to_heads if returns else (lambda g: torch.cat([g.chunk(world, 2)[rank]] * world, 1))
        return module.proj(Collective.apply(out, to_tokens, back).flatten(2))

    for block in model.blocks:
        vars(block.attn)["forward"] = partial(attend, block.attn)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(number: int) -> Tensor:
        tokens = tokens_of(number)
        optimizer.zero_grad()
        part = slice(rank * length, (rank + 1) * length)
        loss = loss_of(model(tokens[:, :-1][:, part], rank * length), tokens[:, 1:][:, part])
        loss.backward()
        reduce_gradients([*model.parameters()])
        optimizer.step()
        return loss

    assert WIDTH % HEADS == 0
    return Training(model, optimizer, step)


register("Ulysses by hand", ulysses, {"gradients are not sent back to their heads": {"returns": False}})

__all__ = ["DEFECTS"]
