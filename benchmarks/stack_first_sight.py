"""Parallel programs that no other table has, and defects that reports of 2025 and 2026 describe, on PyTorch's stacks.

python benchmarks/stack_table.py --stack stack_first_sight 'sight*' '*(sight*' --name stack_first_sight
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, SplitPoint, pipeline
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from stack_configurations import Training, adamw, shard, tensor_parallel
from stack_hand_written import DEFECTS, Collective, reduce_gradients, register, total
from stack_models import Decoder, DecoderConfig, make_decoder, make_tokens, token_loss
from stack_variants import tensor_parallel_without_head

CONFIG = DecoderConfig()


def loop(
    model: Any,
    rank: int,
    *,
    optimizer: Any = None,
    micro: int = 1,
    quiet: Callable[[Any, bool], Any] | None = None,
    after: Callable[[], None] | None = None,
    loss_of: Callable[[Tensor, Tensor], Tensor] = token_loss,
    called: Any = None,
) -> Training:
    """Return the usual loop; `called` is what runs, if it is not what the monitor is given."""
    chosen = adamw(model) if optimizer is None else optimizer

    def step(number: int) -> Tensor:
        chosen.zero_grad()
        for part in range(micro):
            tokens = make_tokens(CONFIG, step=micro * number + part, rank=rank, batch=3)
            with quiet(model, part == micro - 1) if quiet is not None else nullcontext():
                loss = loss_of((called or model)(tokens[:, :-1]), tokens) / micro
                loss.backward()
        if after is not None:
            after()
        chosen.step()
        return loss

    return Training(model, chosen, step, micro)


def scale(model: Any, word: str, factor: float, ranks: tuple[int, ...] | None = None) -> Callable[[], None]:
    """Return a change of gradients by name, on some processes."""

    def change() -> None:
        for name, p in model.named_parameters():
            if word in name and p.grad is not None and (ranks is None or dist.get_rank() in ranks):
                (p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad).mul_(factor)

    return change


def without_sync(model: Any, last: bool) -> Any:
    """Return DDP's context of a micro-batch."""
    return nullcontext() if last else model.no_sync()


# Data parallelism.


def compressed(rank: int, world: int) -> Training:
    """Gradients are compressed to float16 in DDP's hook; micro-batches without reduction."""
    model = DistributedDataParallel(make_decoder(), gradient_as_bucket_view=True)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return loop(model, rank, micro=2, quiet=without_sync)


register("sight: DDP, gradients compressed to fp16, no_sync, buckets as views", compressed, {})


def static(rank: int, world: int) -> Training:
    """A static graph, layers checkpointed in the reentrant way."""
    inner: Any = make_decoder()
    for layer in inner.layers.values():
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=True)
    model = DistributedDataParallel(inner, static_graph=True)
    return loop(model, rank)


register("sight: DDP, static graph, reentrant checkpoints", static, {})


class Dropping(Decoder):
    """A decoder that leaves out the middle layer in some steps, on all processes alike."""

    calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of every next token."""
        assert self.tok_embeddings is not None
        assert self.norm is not None
        assert self.output is not None
        h = self.tok_embeddings(tokens)
        self.calls += 1
        for name, layer in self.layers.items():
            if not (self.training and name == "1" and self.calls % 3 == 2):
                h = layer(h, self.angles[: tokens.shape[1]])
        return self.output(self.norm(h))


def dropping(rank: int, world: int) -> Training:
    """Unused parameters are looked for, because a layer is dropped every third step."""
    torch.manual_seed(0)
    inner = Dropping(DecoderConfig(layers=3))
    return loop(DistributedDataParallel(inner, find_unused_parameters=True), rank)


register("sight: DDP, a layer dropped in some steps", dropping, {})


class Float8Linear(torch.autograd.Function):
    """A product whose operands are rounded to float8 with one scale for each tensor, in both passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply rounded operands."""
        x, weight = rounded(x, torch.float8_e4m3fn), rounded(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Multiply the rounded gradient."""
        x, weight = ctx.saved_tensors
        gradient = rounded(gradients[0], torch.float8_e5m2)
        return gradient @ weight, gradient.flatten(0, -2).T @ x.flatten(0, -2)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor rounded to a float8 format after scaling."""
    factor = torch.finfo(dtype).max / x.detach().abs().amax().clamp_min(1e-12)
    return (x * factor).to(dtype).to(x.dtype) / factor


class Rounded(nn.Linear):
    """A linear layer in emulated float8."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        out: Tensor = Float8Linear.apply(x, self.weight)
        return out


def emulated(rank: int, world: int, sharded: bool = False) -> Training:
    """Layers in emulated float8."""
    model: Any = make_decoder()
    for layer in model.layers.values():
        for part in (layer.attention, layer.feed_forward):
            for name, linear in list(part.named_children()):
                made = Rounded(linear.in_features, linear.out_features, bias=False)
                made.weight = linear.weight
                setattr(part, name, made)
    if sharded:
        shard(model, init_device_mesh("cpu", (world,)))
    else:
        model = DistributedDataParallel(model)
    return loop(model, rank)


register("sight: DDP, emulated float8", emulated, {})
register("sight: FSDP2, emulated float8", partial(emulated, sharded=True), {})


def sharded_table(rank: int, world: int, sums: bool = True, scaled: bool = True) -> Training:
    """DDP around everything but a table whose rows lie on two processes; rows are fetched by sums."""
    inner: Any = make_decoder()
    rows = CONFIG.vocabulary // world
    piece = inner.tok_embeddings.weight.detach()[rank * rows : (rank + 1) * rows].clone()
    inner.tok_embeddings = TableOfRows(piece, rank, world, sums=sums, scaled=scaled)
    ignore: Any = DistributedDataParallel
    ignore._set_params_and_buffers_to_ignore_for_model(inner, ["tok_embeddings.weight"])
    model = DistributedDataParallel(inner)
    return loop(model, rank)


class TableOfRows(nn.Module):
    """Rows of an embedding that this process holds; tokens of all processes are looked up by each."""

    def __init__(self, rows: Tensor, rank: int, world: int, *, sums: bool, scaled: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(rows)
        self.rank, self.world, self.sums, self.scaled = rank, world, sums, scaled

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the rows of this process's tokens."""
        every = [torch.empty_like(tokens) for _ in range(self.world)]
        dist.all_gather(every, tokens.contiguous())
        local = torch.stack(every) - self.rank * len(self.weight)
        held = (local >= 0) & (local < len(self.weight))
        found = F.embedding(local.clamp(0, len(self.weight) - 1), self.weight) * held[..., None]
        share = self.world if self.scaled else 1
        back = (lambda g: total(g) / share) if self.sums else None
        summed: Tensor = Collective.apply(found, total, None)
        mine = summed[self.rank]
        # Each process uses its own tokens; the gradients of all of them meet in the rows.
        out: Tensor = Collective.apply(SelectOwn.apply(mine, summed, self.rank, back), None, None)
        return out


class SelectOwn(torch.autograd.Function):
    """The part of this process, whose gradient is joined with those of all."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, every: Tensor, rank: int, back: Any) -> Tensor:
        """Return the part."""
        ctx.shape, ctx.rank, ctx.back = every.shape, rank, back
        return mine.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, None, None]:
        """Return the gradient of all parts."""
        joined = gradients[0].new_zeros(ctx.shape)
        joined[ctx.rank] = gradients[0]
        return None, joined if ctx.back is None else ctx.back(joined), None, None


register(
    "sight: DDP, a table of rows on each process",
    sharded_table,
    {"gradients of rows not divided by the processes": {"scaled": False}},
)


# FSDP2.


def sums_of_gradients(rank: int, world: int, change: Any = None) -> Training:
    """Gradients are summed over processes, and the loss is divided by the tokens of all of them."""
    model: Any = make_decoder()
    shard(model, init_device_mesh("cpu", (world,)))
    model.set_gradient_divide_factor(1.0)
    for layer in model.layers.values():
        layer.set_gradient_divide_factor(1.0)
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)
    after = None if change is None else scale(model, *change)
    return loop(model, rank, loss_of=lambda out, tokens: token_loss(out, tokens) / world, after=after)


register(
    "sight: FSDP2, sums of gradients",
    sums_of_gradients,
    {
        "one layer divided by the processes again": {"change": ("layers.1.attention.wv", 0.5)},
        "rank 1 loses its shard of the head": {"change": ("output", 0.0, (1,))},
    },
)


def kept_between_passes(rank: int, world: int) -> Training:
    """Weights stay whole between micro-batches, and gradients are reduced in the last."""
    model: Any = make_decoder()
    shard(model, init_device_mesh("cpu", (world,)))

    def quiet(model: Any, last: bool) -> Any:
        model.set_is_last_backward(last)
        model.set_reshard_after_backward(last)
        model.set_requires_gradient_sync(last)
        return nullcontext()

    return loop(model, rank, micro=3, quiet=quiet)


register("sight: FSDP2, whole between micro-batches", kept_between_passes, {})


def resharded(rank: int, world: int) -> Training:
    """After the forward pass weights stay sharded over pairs of four processes."""
    model = make_decoder()
    shard(model, init_device_mesh("cpu", (world,)), reshard_after_forward=2)
    return loop(model, rank)


register("sight: FSDP2 of 4, sharded over pairs after forward", resharded, {}, 4)


class Expert(nn.Module):
    """Two experts of which a process has one; tokens are dealt out and brought back."""

    def __init__(self, width: int, rank: int, world: int) -> None:
        super().__init__()
        torch.manual_seed(17)
        self.router = nn.Linear(width, world, bias=False)
        torch.manual_seed(100 + rank)
        self.up = nn.Parameter(0.2 * torch.randn(2 * width, width))
        self.down = nn.Parameter(0.2 * torch.randn(width, 2 * width))
        self.world = world

    def forward(self, x: Tensor) -> Tensor:
        """Send every token to its expert and weigh what comes back."""
        flat = x.flatten(0, 1)
        weight, chosen = self.router(flat).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=self.world)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        sent, got = counts.tolist(), theirs.tolist()
        received = differentiable.all_to_all_single(
            flat.new_empty(sum(got), flat.shape[1]), flat[order].contiguous(), got, sent
        )
        done = F.gelu(received @ self.up.T) @ self.down.T
        back = differentiable.all_to_all_single(torch.empty_like(flat), done.contiguous(), sent, got)
        out = torch.empty_like(flat).index_copy(0, order, back)
        return (weight[:, None] * out).view_as(x)


def experts_beside_shards(rank: int, world: int, divides: bool = True, router: bool = True) -> Training:
    """FSDP2 around everything but experts, of which a process has its own, as plain parameters."""
    model: Any = make_decoder()
    for layer in model.layers.values():
        layer.feed_forward = Expert(CONFIG.width, rank, world)
    own = {p for name, p in model.named_parameters() if name.endswith((".up", ".down"))}
    if not router:
        own |= {p for name, p in model.named_parameters() if "router" in name}
    for layer in model.layers.values():
        fully_shard(layer, mesh=init_device_mesh("cpu", (world,)), ignored_params=own)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)), ignored_params=own)

    def after() -> None:
        for name, p in model.named_parameters():
            if name.endswith((".up", ".down")) and divides and p.grad is not None:
                p.grad.div_(world)

    return loop(model, rank, after=after)


register(
    "sight: FSDP2 beside experts on all_to_all",
    experts_beside_shards,
    {
        "experts not divided by their processes, pytorch #160285": {"divides": False},
        "routers kept out of the reduction": {"router": False},
    },
)


def one_of_two(rank: int, world: int) -> Training:
    """Muon for matrices and AdamW for the rest, under FSDP2."""
    model = make_decoder()
    shard(model, init_device_mesh("cpu", (world,)))
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    optimizers = [torch.optim.SGD(matrices, lr=1e-2, momentum=0.9, nesterov=True), torch.optim.AdamW(rest, lr=1e-3)]

    def step(number: int) -> Tensor:
        tokens = make_tokens(CONFIG, step=number, rank=rank)
        loss = token_loss(model(tokens[:, :-1]), tokens)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return Training(model, optimizers, step)


register("sight: FSDP2, SGD for matrices, AdamW for the rest", one_of_two, {})


# FSDP1 as verl #7493 has it: one process to a shard.


def hybrid(rank: int, world: int, whole: bool = True) -> Training:
    """FSDP1 over replicas; with a shard of one process, PyTorch reduces nothing (verl #7493)."""
    mesh = init_device_mesh("cpu", (1, world) if whole else (world, 1), mesh_dim_names=("replicate", "shard"))
    model = FullyShardedDataParallel(
        make_decoder(),
        device_mesh=mesh if not whole else mesh["shard"],
        sharding_strategy=ShardingStrategy.FULL_SHARD if whole else ShardingStrategy.HYBRID_SHARD,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    return loop(model, rank)


register("sight: FSDP1 on a mesh", hybrid, {"shards of one process are not reduced, verl #7493": {"whole": False}})


# Tensor parallelism.


class Toy(nn.Module):
    """The model of PyTorch's tutorial of tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.net1, self.relu, self.net2 = nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Run both layers."""
        return self.net2(self.relu(self.net1(x)))


def tutorial(rank: int, world: int, sequence: bool = False) -> Training:
    """The tutorial's loop: the sum of the outputs is the loss."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world,))
    plan = {"net1": ColwiseParallel(), "net2": RowwiseParallel()}
    if sequence:
        plan = {"net1": ColwiseParallel(input_layouts=Shard(0)), "net2": RowwiseParallel(output_layouts=Shard(0))}
    model = parallelize_module(Toy(), mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, foreach=True)

    def step(number: int) -> Tensor:
        torch.manual_seed(number + (rank if sequence else 0))
        optimizer.zero_grad()
        out = model(torch.rand(20, 10))
        out.sum().backward()
        optimizer.step()
        return out

    return Training(model, optimizer, step)


register("sight: TP, PyTorch's tutorial", tutorial, {})
register("sight: TP+SP, PyTorch's tutorial", partial(tutorial, sequence=True), {})


def replicated_pieces(rank: int, world: int, change: Any = None) -> Training:
    """Tensor parallelism with DistributedDataParallel around it, on 2 x 2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model: Any = make_decoder()
    tensor_parallel(model, mesh["tensor"], sequence=False)
    model = DistributedDataParallel(model, device_mesh=mesh["data"])
    after = None if change is None else scale(model, *change)
    return loop(model, rank // 2, after=after)


register(
    "sight: DDP x TP",
    replicated_pieces,
    {"a piece of one replica is scaled": {"change": ("layers.0.feed_forward.w2", 1.5, (3,))}},
    4,
)


def entropy_on_pieces(rank: int, world: int, inside: bool = False) -> Training:
    """Logits cut over classes; a second term uses their log-softmax (pytorch #190746 if inside the context)."""
    model: Any = make_decoder()
    mesh = init_device_mesh("cpu", (world,))
    tensor_parallel_without_head(model, mesh)
    layout = Shard(-1) if inside else Replicate()
    parallelize_module(model.output, mesh, ColwiseParallel(output_layouts=layout, use_local_output=not inside))
    optimizer = adamw(model)

    def step(number: int) -> Tensor:
        tokens = make_tokens(CONFIG, step=number)
        optimizer.zero_grad()
        with loss_parallel() if inside else nullcontext():
            logits = model(tokens[:, :-1]).flatten(0, 1)
            loss = F.cross_entropy(logits, tokens[:, 1:].flatten())
            # The entropy of the predictions, as in reinforcement learning.
            logs = F.log_softmax(logits, -1)
            loss = loss + 0.1 * (logs.exp() * logs).sum(-1).mean()
            loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, step)


register(
    "sight: TP, an entropy bonus",
    entropy_on_pieces,
    {"log-softmax of pieces inside loss_parallel, pytorch #190746": {"inside": True}},
)


class OneKeyHead(nn.Module):
    """Attention whose queries are dealt out and whose one key head every process has."""

    def __init__(self, inner: Any, rank: int, world: int, options: dict[str, Any]) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = inner.wq, inner.wk, inner.wv, inner.wo
        self.width, self.options = inner.head_width, options
        for name, axis in (("wq", 0), ("wo", 1)):
            linear = getattr(self, name)
            linear.weight = nn.Parameter(linear.weight.detach().chunk(world, axis)[rank].clone())

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Attend with the queries of this process."""
        back = total if self.options["reduces"] else None
        x = Collective.apply(x, None, back)
        q = self.wq(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
        k, v = (w(x).unflatten(-1, (1, self.width)).transpose(1, 2) for w in (self.wk, self.wv))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out = self.wo(out.transpose(1, 2).flatten(2))
        if self.options["twice"]:
            summed: Tensor = differentiable.all_reduce(out)
            return summed
        summed = Collective.apply(out, total, None)
        return summed


def one_key_head(
    rank: int, world: int, keys: bool = True, reduces: bool = True, twice: bool = False, averages: bool = False
) -> Training:
    """Queries by hand over processes, one replicated key head whose gradient is summed after the backward pass."""
    model: Any = make_decoder(DecoderConfig(key_heads=1))
    for layer in model.layers.values():
        layer.attention = OneKeyHead(layer.attention, rank, world, {"reduces": reduces, "twice": twice})

    def after() -> None:
        for name, p in model.named_parameters():
            if keys and ("wk" in name or "wv" in name) and p.grad is not None:
                dist.all_reduce(p.grad)
                if averages:
                    p.grad.div_(world)

    return loop(model, 0, after=after)


register(
    "sight: TP by hand, one key head on every process",
    one_key_head,
    {
        "gradients of the key head not summed": {"keys": False},
        "gradients of the key head averaged, not summed": {"averages": True},
        "a sum of torch.distributed.nn, whose backward sums again": {"twice": True},
    },
)


class LateProduct(torch.autograd.Function):
    """x @ w.T whose weight gradient is computed after the backward pass, as zero-bubble schedules do."""

    waiting: ClassVar[list[Callable[[], None]]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply."""
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the input; that of the weight waits."""
        x, weight = ctx.saved_tensors
        gradient = gradients[0]

        def compute() -> None:
            product = gradient.flatten(0, -2).T @ x.flatten(0, -2)
            weight.grad = product if weight.grad is None else weight.grad + product

        LateProduct.waiting.append(compute)
        return gradient @ weight, None


class LateLinear(nn.Linear):
    """A linear layer with a late weight gradient."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        out: Tensor = LateProduct.apply(x, self.weight)
        return out


def late(rank: int, world: int, loses: int = -1) -> Training:
    """Data parallelism by hand with weight gradients that are computed after the backward pass."""
    model: Any = make_decoder()
    for layer in model.layers.values():
        for name, linear in list(layer.feed_forward.named_children()):
            made = LateLinear(linear.in_features, linear.out_features, bias=False)
            made.weight = linear.weight
            setattr(layer.feed_forward, name, made)

    def after() -> None:
        for index, compute in enumerate(LateProduct.waiting):
            if index != loses:
                compute()
        LateProduct.waiting.clear()
        reduce_gradients([*model.parameters()])

    return loop(model, rank, after=after, micro=2)


register(
    "sight: data parallel by hand, late weight gradients",
    late,
    {"one late gradient of the first micro-batch is lost": {"loses": 1}},
)


# Pipelines.


def traced(rank: int, world: int, change: Any = None) -> Training:
    """A decoder cut by PyTorch's tracer at a layer."""
    model = make_decoder()
    tokens = make_tokens(CONFIG, step=0, batch=2)
    pieces = pipeline(model, mb_args=(tokens[:, :-1].contiguous(),), split_spec={"layers.1": SplitPoint.BEGINNING})
    stage_module = pieces.get_stage_module(rank)
    stage = PipelineStage(stage_module, rank, world, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=token_loss)
    optimizer = adamw(stage_module)

    def step(number: int) -> Tensor | None:
        tokens = make_tokens(CONFIG, step=number, batch=8)
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(tokens[:, :-1].contiguous())
        else:
            schedule.step(target=tokens, losses=losses)
        if change is not None:
            scale(stage_module, *change)()
        optimizer.step()
        return torch.stack(losses).mean() if losses else None

    return Training(stage_module, optimizer, step, 4)


register(
    "sight: PP, cut by the tracer", traced, {"values of the last stage scaled": {"change": ("1.attention.wv", 1.3)}}
)

__all__ = ["DEFECTS"]
