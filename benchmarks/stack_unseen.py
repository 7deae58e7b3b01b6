"""Parallel programs written to surprise the monitor, right ones and ones with a defect of their own kind.

python benchmarks/stack_table.py --stack stack_unseen 'unseen*' '*(unseen*'
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from stack_configurations import Training, adamw, shard
from stack_hand_written import DEFECTS, reduce_gradients, register
from stack_models import Decoder, DecoderConfig, make_decoder, make_tokens, token_loss

WIDTH, HEADS, HIDDEN, WORDS, LENGTH = 24, 4, 40, 40, 12


def batch_of(number: int, rank: int = 0, size: int = 3) -> Tensor:
    """Return tokens, one more than the length."""
    generator = torch.Generator().manual_seed(104729 * number + 31 * rank + 5)
    return torch.randint(0, WORDS, (size, LENGTH + 1), generator=generator)


def numbers_of(number: int, rank: int = 0, size: int = 6, width: int = WIDTH) -> Tensor:
    """Return floats."""
    generator = torch.Generator().manual_seed(15485863 * number + 17 * rank + 3)
    return torch.randn(size, width, generator=generator)


def everyone() -> dist.ProcessGroup:
    """Return the group of all processes."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def steps(model: Any, optimizer: Any, loss_of: Callable[[int], Tensor], after: Callable[[], None] | None = None) -> Any:
    """Return a plain training step."""

    def step(number: int) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(number)
        loss.backward()
        if after is not None:
            after()
        optimizer.step()
        return loss

    return step


# Tensor parallelism with collectives that run beside the weight's gradient.


class ColumnLinear(torch.autograd.Function):
    """x @ w.T whose backward pass sums the input's gradient while it computes the weight's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, lost: bool) -> Tensor:
        """Multiply."""
        ctx.save_for_backward(x, weight)
        ctx.lost = lost
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """Reduce and multiply at the same time."""
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        summed = gradient @ weight
        work = dist.all_reduce(summed.clone() if ctx.lost else summed, async_op=True)
        of_weight = gradient.flatten(0, -2).T @ x.flatten(0, -2)
        work.wait()
        return summed, of_weight, None


class SumForward(torch.autograd.Function):
    """The sum over processes, whose gradient is handed on as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Sum with a functional collective."""
        return functional.all_reduce(x, "sum", everyone()).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Return the gradient."""
        return gradients[0]


class AsyncMLP(nn.Module):
    """RMS norm, two column-parallel matrices and a row-parallel one."""

    def __init__(self, lost: bool) -> None:
        super().__init__()
        world, rank = dist.get_world_size(), dist.get_rank()
        self.lost = lost
        self.norm = nn.RMSNorm(WIDTH)
        part = lambda out, inside, axis: nn.Parameter(  # noqa: E731
            (torch.randn(out, inside) * inside**-0.5).chunk(world, axis)[rank].clone()
        )
        self.gate, self.up = part(HIDDEN, WIDTH, 0), part(HIDDEN, WIDTH, 0)
        self.down = part(WIDTH, HIDDEN, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Add the gated unit."""
        h = self.norm(x)
        h = F.silu(ColumnLinear.apply(h, self.gate, self.lost)) * ColumnLinear.apply(h, self.up, self.lost)
        return x + SumForward.apply(h @ self.down.T)


def asynchronous(rank: int, world: int, lost: bool = False) -> Training:
    """Tensor parallelism with asynchronous all-reduces, as Megatron's linear layers have."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), AsyncMLP(lost), AsyncMLP(lost), nn.Linear(WIDTH, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = lambda n: F.cross_entropy(model(numbers_of(n)), torch.arange(6) % 5)  # noqa: E731
    return Training(model, optimizer, steps(model, optimizer, loss))


register("unseen: TP, asynchronous all-reduce", asynchronous, {"the reduced gradient is a copy's": {"lost": True}})


# Sequence-parallel norms whose gradients hooks sum.


class Reshape(torch.autograd.Function):
    """Gather tokens with reduce_scatter behind, or the other way round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gathers: bool) -> Tensor:
        """Move tokens."""
        ctx.gathers = gathers
        return Reshape.gathered(x) if gathers else Reshape.scattered(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Move the other way."""
        (gradient,) = gradients
        return (Reshape.scattered(gradient) if ctx.gathers else Reshape.gathered(gradient)), None

    @staticmethod
    def gathered(x: Tensor) -> Tensor:
        """Return tokens of all."""
        return functional.wait_tensor(functional.all_gather_tensor(x.contiguous(), 0, everyone())).clone()

    @staticmethod
    def scattered(x: Tensor) -> Tensor:
        """Return this process's part of the sum."""
        whole = x.clone()
        dist.all_reduce(whole)
        return whole.chunk(dist.get_world_size(), 0)[dist.get_rank()].contiguous()


class SequenceBlock(nn.Module):
    """Tokens are cut outside of the matrices, hidden units inside."""

    def __init__(self) -> None:
        super().__init__()
        world, rank = dist.get_world_size(), dist.get_rank()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Parameter((torch.randn(HIDDEN, WIDTH) * WIDTH**-0.5).chunk(world)[rank].clone())
        self.down = nn.Parameter((torch.randn(WIDTH, HIDDEN) * HIDDEN**-0.5).chunk(world, 1)[rank].clone())
        self.bias = nn.Parameter(torch.randn(WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Add the feed-forward layer."""
        h = F.relu(Reshape.apply(self.norm(x), True) @ self.up.T)
        return x + Reshape.apply(h @ self.down.T, False) + self.bias


def hooked_norms(rank: int, world: int, forgets: str = "") -> Training:
    """Hooks sum the gradients of what every process applies to its own tokens."""
    torch.manual_seed(2)
    model = nn.Sequential(SequenceBlock(), SequenceBlock(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 7))

    def total(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient

    for name, p in model.named_parameters():
        if not name.endswith(("up", "down")) and not (forgets and name.endswith(forgets)):
            p.register_hook(total)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss(n: int) -> Tensor:
        x, target = numbers_of(n, size=12), torch.arange(12) % 7
        logits = model(x.chunk(world)[rank])
        return F.cross_entropy(logits, target.chunk(world)[rank], reduction="sum") / 12

    return Training(model, optimizer, steps(model, optimizer, loss))


register(
    "unseen: sequence parallel, hooks on norms",
    hooked_norms,
    {
        "biases after the scatter are not summed": {"forgets": ".bias"},
        "the head is not summed": {"forgets": "3.weight"},
    },
)


# Context parallelism by a ring.


class Ring(torch.autograd.Function):
    """Hand a tensor to the next process; its gradient comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, back: bool) -> Tensor:
        """Send on."""
        ctx.back = back
        return Ring.shift(x, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Send back."""
        return (Ring.shift(gradients[0], -1) if ctx.back else gradients[0]), None

    @staticmethod
    def shift(x: Tensor, by: int) -> Tensor:
        """Exchange with neighbours."""
        rank, world = dist.get_rank(), dist.get_world_size()
        out = torch.empty_like(x)
        work = [
            dist.P2POp(dist.isend, x.contiguous(), (rank + by) % world),
            dist.P2POp(dist.irecv, out, (rank - by) % world),
        ]
        for one in dist.batch_isend_irecv(work):
            one.wait()
        return out


class RingAttention(nn.Module):
    """Causal attention, keys and values going round, with a softmax that is kept up to date."""

    def __init__(self, back: bool) -> None:
        super().__init__()
        self.back = back
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        rank, world = dist.get_rank(), dist.get_world_size()
        length = x.shape[1]
        q, k, v = (m(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        rows = torch.arange(length) + rank * length
        numerator: Any = 0.0
        weights = []
        values = []
        for hop in range(world):
            source = (rank - hop) % world
            columns = torch.arange(length) + source * length
            scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
            weights.append(scores.masked_fill(columns[None] > rows[:, None], -1e30))
            values.append(v)
            if hop + 1 < world:
                k, v = Ring.apply(torch.stack((k, v)), self.back).unbind(0)
        top = torch.stack([w.amax(-1, keepdim=True) for w in weights]).amax(0)
        denominator: Any = 0.0
        for w, value in zip(weights, values, strict=True):
            e = (w - top).exp()
            numerator = numerator + e @ value
            denominator = denominator + e.sum(-1, keepdim=True)
        return x + self.o((numerator / denominator).transpose(1, 2).flatten(2))


class RingModel(nn.Module):
    """Embeddings, two layers of ring attention, a head."""

    def __init__(self, back: bool = True) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(RingAttention(back) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, first: int) -> Tensor:
        """Return logits."""
        x = self.table(tokens) + self.positions(torch.arange(first, first + tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def ring(rank: int, world: int, back: bool = True, divides: bool = True) -> Training:
    """Ring attention; gradients are summed by hand."""
    torch.manual_seed(3)
    model = RingModel(back)
    optimizer = adamw(model)
    length = LENGTH // world
    part = slice(rank * length, (rank + 1) * length)

    def loss(n: int) -> Tensor:
        tokens = batch_of(n)
        logits = model(tokens[:, :-1][:, part], rank * length)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:][:, part].flatten())

    return Training(model, optimizer, steps(model, optimizer, loss, lambda: reduce_gradients([*model.parameters()])))


register("unseen: CP, ring attention", ring, {"gradients of keys stay where they are": {"back": False}})
register("unseen: CP, ring attention of 4", ring, {}, 4)


# Experts with uneven parts.


class Exchange(torch.autograd.Function):
    """all_to_all of uneven parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], back: bool) -> Tensor:
        """Exchange rows."""
        ctx.sizes, ctx.back = (sent, received), back
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """Exchange gradients of rows."""
        sent, received = ctx.sizes
        out = gradients[0].new_zeros(sum(sent), *gradients[0].shape[1:])
        if ctx.back:
            dist.all_to_all_single(out, gradients[0].contiguous(), sent, received)
        return out, None, None, None


class Experts(nn.Module):
    """Top-1 routing over one expert for each process, without capacity."""

    def __init__(self, back: bool = True, scaled: bool = True) -> None:
        super().__init__()
        self.back, self.scaled = back, scaled
        self.router = nn.Linear(WIDTH, dist.get_world_size(), bias=False)
        with torch.random.fork_rng():
            torch.manual_seed(50 + dist.get_rank())
            self.first, self.second = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Send tokens to their experts and back."""
        weights = self.router(x).softmax(-1)
        chosen = weights.argmax(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=weights.shape[-1])
        others = torch.empty_like(counts)
        dist.all_to_all_single(others, counts)
        sent, received = counts.tolist(), others.tolist()
        inside = Exchange.apply(x[order], sent, received, self.back)
        out = Exchange.apply(self.second(F.relu(self.first(inside))), received, sent, True)
        out = torch.zeros_like(x).index_copy(0, order, out)
        return x + out * weights.gather(-1, chosen[:, None])


def uneven_experts(rank: int, world: int, back: bool = True, router: bool = True) -> Training:
    """Expert parallelism with all_to_all of uneven parts."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH), Experts(back), Experts(back), nn.Linear(WIDTH, 5))
    optimizer = adamw(model)
    loss = lambda n: F.cross_entropy(model(numbers_of(n, rank, 16)), torch.arange(16) % 5)  # noqa: E731

    def after() -> None:
        for name, p in model.named_parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            if ".first" not in name and ".second" not in name and (router or "router" not in name):
                dist.all_reduce(p.grad)
            p.grad.div_(world)

    return Training(model, optimizer, steps(model, optimizer, loss, after))


register(
    "unseen: EP, uneven all-to-all",
    uneven_experts,
    {"gradients are not sent back": {"back": False}, "routers are not reduced": {"router": False}},
)


# A vocabulary in parts.


class Copy(torch.autograd.Function):
    """The identity, whose gradient is summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the input."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Sum."""
        out = gradients[0].clone()
        dist.all_reduce(out)
        return out


class SplitCrossEntropy(torch.autograd.Function):
    """Cross entropy of logits of which every process has some classes."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, masked: bool) -> Tensor:
        """Return losses."""
        top = logits.amax(-1)
        dist.all_reduce(top, dist.ReduceOp.MAX)
        e = (logits - top[:, None]).exp()
        total = e.sum(-1)
        dist.all_reduce(total)
        outside = (targets < first) | (targets >= first + logits.shape[-1])
        inside = (targets - first).masked_fill(outside, 0)
        hit = (logits.gather(-1, inside[:, None])[:, 0] - top).masked_fill(outside, 0.0)
        dist.all_reduce(hit)
        ctx.save_for_backward(e / total[:, None], outside if masked else torch.zeros_like(outside), inside)
        return total.log() - hit

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """Return softmax minus one at the target."""
        p, outside, inside = ctx.saved_tensors
        out = p.clone()
        out[torch.arange(len(out)), inside] -= (~outside).to(out)
        return out * gradients[0][:, None], None, None, None


class SplitVocabulary(nn.Module):
    """Embedding and head cut over the vocabulary, layers between replicated."""

    def __init__(self, world: int, rank: int, sums: bool, masked: bool, clean: bool) -> None:
        super().__init__()
        self.size, self.sums, self.masked, self.clean = WORDS // world, sums, masked, clean
        self.first = rank * self.size
        whole = torch.randn(WORDS, WIDTH)
        self.table = nn.Parameter(whole.chunk(world)[rank].clone())
        self.body = nn.Sequential(nn.Linear(WIDTH, HIDDEN, bias=False), nn.ReLU(), nn.Linear(HIDDEN, WIDTH, bias=False))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Parameter((torch.randn(WORDS, WIDTH) * 0.2).chunk(world)[rank].clone())

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss."""
        outside = (tokens < self.first) | (tokens >= self.first + self.size)
        x = F.embedding((tokens - self.first).masked_fill(outside, 0), self.table)
        x = x * (~outside).unsqueeze(-1) if self.clean else x + 0 * x
        x = SumForward.apply(x)
        x = self.norm(x + self.body(x)).flatten(0, 1)
        logits = (Copy.apply(x) if self.sums else x) @ self.head.T
        return SplitCrossEntropy.apply(logits, targets.flatten(), self.first, self.masked).mean()


def vocabulary(rank: int, world: int, sums: bool = True, masked: bool = True) -> Training:
    """Vocabulary-parallel embedding, head and cross entropy."""
    torch.manual_seed(5)
    model = SplitVocabulary(world, rank, sums, masked, True)
    optimizer = adamw(model)

    def loss(n: int) -> Tensor:
        tokens = batch_of(n)
        return model(tokens[:, :-1], tokens[:, 1:])

    return Training(model, optimizer, steps(model, optimizer, loss))


register(
    "unseen: vocabulary in parts",
    vocabulary,
    {"the head's input gradient is not summed": {"sums": False}, "targets of others are subtracted": {"masked": False}},
)


# A pipeline by hand in 1F1B with a shared table and one norm for clipping.


class PipeStage(nn.Module):
    """First or last half, both with the table."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.table = nn.Parameter(torch.randn(WORDS, WIDTH, generator=torch.Generator().manual_seed(9)) * 0.5)
        self.inner = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Run this half."""
        x = F.embedding(x, self.table) if self.rank == 0 else x
        x = x + self.inner(x)
        return x if self.rank == 0 else x @ self.table.T


def shared_pipe(rank: int, world: int, sums: bool = True, order: bool = True, clips: str = "all") -> Training:
    """Four micro-batches, one forward and one backward in turn."""
    torch.manual_seed(6 + rank)
    model, micro = PipeStage(rank), 4
    optimizer = adamw(model)

    def forward(tokens: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        if rank == 0:
            out = model(tokens[:, :-1])
            dist.send(out.detach().contiguous(), 1)
            return tokens, out, None
        x = torch.empty(len(tokens), LENGTH, WIDTH)
        dist.recv(x, 0)
        x.requires_grad_()
        out = model(x)
        return x, out, F.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten()) / micro

    def step(number: int) -> Tensor | None:
        optimizer.zero_grad()
        parts = batch_of(number, size=2 * micro).chunk(micro)
        waiting: list[Any] = []
        losses = []

        def backward(which: int = 0) -> None:
            x, out, loss = waiting.pop(which)
            if loss is None:
                gradient = torch.empty_like(out)
                dist.recv(gradient, 1)
                out.backward(gradient)
            else:
                loss.backward()
                losses.append(loss.detach())
                dist.send(x.grad.contiguous(), 0)

        warm = 2 if rank == 0 else 1
        for index, part in enumerate(parts):
            waiting.append(forward(part))
            if index + 1 >= warm:
                backward(0 if order or rank == 1 else -1)
        while waiting:
            backward()
        if sums:
            dist.all_reduce(model.table.grad)
        squares = torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None])
        squares[0] /= world if sums else 1
        norm = squares.sum()
        if clips == "all":
            dist.all_reduce(norm)
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_((0.5 / (norm.sqrt() + 1e-6)).clamp(max=1.0))
        optimizer.step()
        return torch.stack(losses).sum() if losses else None

    return Training(model, optimizer, step, micro)


register(
    "unseen: PP, 1F1B with a shared table",
    shared_pipe,
    {
        "the table's gradients are not summed": {"sums": False},
        "gradients of another micro-batch": {"order": False},
        "each stage clips by its own norm": {"clips": "own"},
    },
)


# FSDP2.


def sharded(
    rank: int, world: int, how: str = "", clips: str = "", mesh: tuple[int, ...] = (), tied: bool = False
) -> Training:
    """fully_shard with bf16, several micro-batches, clipping."""
    model: Any = make_decoder()
    if tied:
        model.output.weight = model.tok_embeddings.weight
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sizes = mesh or (world,)
    grid = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[2 - len(sizes) :])
    options: dict[str, Any] = {"mp_policy": policy} if how == "bf16" else {}
    if tied:
        fully_shard(model, mesh=grid, **options)
    else:
        shard(model, grid, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 3))

    def step(number: int) -> Tensor:
        optimizer.zero_grad()
        for part in range(2):
            last = part == 1
            if how == "kept":
                model.set_reshard_after_backward(last)
            model.set_is_last_backward(last)
            model.set_requires_gradient_sync(last)
            tokens = make_tokens(DecoderConfig(), step=10 * number + part, rank=rank)
            loss = token_loss(model(tokens[:, :-1].contiguous()), tokens) / 2
            loss.backward()
        if clips == "own":
            # Every process clips its pieces by their own norm.
            pieces = [p.grad.to_local() for p in model.parameters()]
            norm = torch.stack([p.norm() for p in pieces]).norm()
            for p in pieces:
                p.mul_((0.1 / norm).clamp(max=1.0))
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
        return loss

    return Training(model, optimizer, step, 2)


register("unseen: FSDP2, bf16, accumulation, clipping, schedule", partial(sharded, how="bf16"), {})
register(
    "unseen: FSDP2, kept between micro-batches",
    partial(sharded, how="kept"),
    {"every process clips by its own norm": {"clips": "own"}},
)
register("unseen: HSDP, accumulation", partial(sharded, mesh=(2, 2)), {}, 4)


def averaged_sharded(rank: int, world: int) -> Training:
    """FSDP2 with a moving average of the pieces, evaluated between steps."""
    model, shadow = make_decoder(), make_decoder()
    for one in (model, shadow):
        shard(one, init_device_mesh("cpu", (world,)))
    shadow.requires_grad_(False)
    optimizer = adamw(model)

    def step(number: int) -> Tensor:
        tokens = make_tokens(DecoderConfig(), step=number, rank=rank)
        optimizer.zero_grad()
        loss = token_loss(model(tokens[:, :-1].contiguous()), tokens)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(shadow.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
            if number % 2:
                shadow(tokens[:, :-1].contiguous())
                model.eval()
                model(tokens[:, :-1].contiguous())
                model.train()
        return loss

    return Training(model, optimizer, step)


register("unseen: FSDP2 with a moving average and evaluation", averaged_sharded, {})


# DDP and its options.


class Joint(nn.Module):
    """A decoder with a second head that some steps leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = make_decoder()
        self.second = nn.Linear(64, 3)

    def forward(self, tokens: Tensor, *, second: bool) -> Tensor:
        """Return the loss."""
        logits = self.decoder(tokens[:, :-1])
        loss = token_loss(logits, tokens)
        if second:
            loss = loss + F.cross_entropy(self.second(logits[:, -1]), tokens[:, 0] % 3)
        return loss


def sometimes(rank: int, world: int, apart: bool = False) -> Training:
    """A head is used in every second step, by all processes or by one."""
    torch.manual_seed(7)
    model = DistributedDataParallel(Joint(), find_unused_parameters=True, gradient_as_bucket_view=True)
    optimizer = adamw(model)
    loss = lambda n: model(  # noqa: E731
        make_tokens(DecoderConfig(), step=n, rank=rank), second=(n + rank * apart) % 2 == 0
    )
    return Training(model, optimizer, steps(model, optimizer, loss))


register("unseen: DDP, a head used in some steps", sometimes, {})
register("unseen: DDP, a head used by one process at a time", partial(sometimes, apart=True), {})


def viewed(rank: int, world: int, late: bool = False) -> Training:
    """Gradients are views of buckets that are zeroed, with reentrant checkpointing and a static graph."""
    inner = make_decoder()
    for layer in inner.layers.values():
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=True)
    model: Any = DistributedDataParallel(inner, gradient_as_bucket_view=True, static_graph=True)
    if late:
        # A layer that is made after the wrapper is not reduced.
        torch.manual_seed(70)
        inner.register_module("extra", nn.Linear(64, 64))
        inner.register_forward_hook(lambda module, args, out: out + module.extra(out))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(number: int) -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        tokens = make_tokens(DecoderConfig(), step=number, rank=rank)
        loss = token_loss(model(tokens[:, :-1]), tokens)
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, step)


register(
    "unseen: DDP, views, static graph, reentrant checkpointing",
    viewed,
    {"a layer is added after wrapping": {"late": True}},
)


def hook_of_half(rank: int, world: int) -> Training:
    """fp16 compression around a hook that sums, without annotations."""
    model = DistributedDataParallel(make_decoder())
    model.register_comm_hook(None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))
    optimizer = adamw(model)
    loss = lambda n: (lambda t: token_loss(model(t[:, :-1]), t))(  # noqa: E731
        make_tokens(DecoderConfig(), step=n, rank=rank)
    )
    return Training(model, optimizer, steps(model, optimizer, loss))


register("unseen: DDP, hook in float16", hook_of_half, {})


def uneven_accumulation(rank: int, world: int, left_on: int = 99) -> Training:
    """Losses are sums over tokens divided by the tokens of all processes; micro-batches differ in number."""
    model = DistributedDataParallel(make_decoder())
    optimizer = adamw(model)

    def step(number: int) -> Tensor:
        optimizer.zero_grad()
        micro = 2 + number % 2
        batches = [make_tokens(DecoderConfig(), step=10 * number + m, rank=rank, batch=1 + rank) for m in range(micro)]
        count = torch.tensor(float(sum(b[:, 1:].numel() for b in batches)))
        dist.all_reduce(count)
        for index, tokens in enumerate(batches):
            with model.no_sync() if index < micro - 1 or number >= left_on else nullcontext():
                logits = model(tokens[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum") * world / count
                loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return Training(model, optimizer, step, 2)


register(
    "unseen: DDP, token-weighted losses, uneven accumulation",
    uneven_accumulation,
    {"no_sync is left on from the third step": {"left_on": 2}},
)


def views_of_zero(rank: int, world: int, uneven_rate: bool = False) -> Training:
    """ZeroRedundancyOptimizer with views of buckets and SGD."""
    model = DistributedDataParallel(make_decoder())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, parameters_as_bucket_view=True, lr=0.02, momentum=0.9, nesterov=True
    )
    loss = lambda n: (lambda t: token_loss(model(t[:, :-1]), t))(  # noqa: E731
        make_tokens(DecoderConfig(), step=n, rank=rank)
    )
    return Training(model, optimizer, steps(model, optimizer, loss))


register("unseen: DDP, ZeroRedundancyOptimizer with views", views_of_zero, {})


def skipping(rank: int, world: int, agrees: bool = True) -> Training:
    """A step is left out where gradients are not finite, by all processes or by one."""
    model = DistributedDataParallel(make_decoder())
    optimizer = adamw(model)

    def step(number: int) -> Tensor:
        optimizer.zero_grad()
        tokens = make_tokens(DecoderConfig(), step=number, rank=rank)
        loss = token_loss(model(tokens[:, :-1]), tokens)
        loss.backward()
        bad = torch.tensor(float(number == 2 and rank == 1))
        if agrees:
            dist.all_reduce(bad)
        if not bad:
            optimizer.step()
        return loss

    return Training(model, optimizer, step)


register("unseen: DDP, a step is skipped", skipping, {"one process skips a step alone": {"agrees": False}})


def rates(rank: int, world: int, apart: bool = False) -> Training:
    """A schedule that looks at the loss, averaged or each process's own."""
    model = DistributedDataParallel(make_decoder())
    optimizer = adamw(model)

    def step(number: int) -> Tensor:
        optimizer.zero_grad()
        tokens = make_tokens(DecoderConfig(), step=number, rank=rank)
        loss = token_loss(model(tokens[:, :-1]), tokens)
        loss.backward()
        seen = loss.detach().clone()
        if not apart:
            dist.all_reduce(seen)
            seen /= world
        optimizer.param_groups[0]["lr"] = 1e-3 * float(seen) / 4
        optimizer.step()
        return loss

    return Training(model, optimizer, step)


register("unseen: DDP, rate from the loss", rates, {"each process uses its own loss": {"apart": True}})


# Uneven numbers of batches.


def uneven_batches(rank: int, world: int) -> Training:
    """Inside one `Join`, rank 1 runs out of data after four steps; the loop goes on with empty steps."""
    model = DistributedDataParallel(make_decoder())
    optimizer = adamw(model)

    def step(number: int) -> Tensor | None:
        loss = None
        with Join([model]):
            if rank == 0 or number < 4:
                tokens = make_tokens(DecoderConfig(), step=number, rank=rank, batch=2 + rank)
                optimizer.zero_grad()
                loss = token_loss(model(tokens[:, :-1]), tokens)
                loss.backward()
                optimizer.step()
        return loss

    return Training(model, optimizer, step)


register("unseen: DDP inside join, one process without data", uneven_batches, {})


# Batch norm.


class SharedNorm(nn.Module):
    """Batch norm with statistics of all processes."""

    def __init__(self, channels: int, differentiates: bool = True) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(channels) + 0.5), nn.Parameter(torch.zeros(channels))
        self.differentiates = differentiates
        self.register_buffer("running", torch.zeros(channels))

    running: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Normalise."""
        both = torch.stack((x.mean((0, 2, 3)), x.square().mean((0, 2, 3))))
        if self.differentiates:
            both = differentiable.all_reduce(both) / dist.get_world_size()
        else:
            dist.all_reduce(both)
            both = both / dist.get_world_size()
        mean, square = both
        self.running.lerp_(mean.detach(), 0.1)
        shape = (1, -1, 1, 1)
        x = (x - mean.view(shape)) * (square - mean.square() + 1e-5).rsqrt().view(shape)
        return x * self.weight.view(shape) + self.bias.view(shape)


def convolutions(rank: int, world: int, how: str = "shared", differentiates: bool = True) -> Training:
    """A small network of convolutions under DDP."""
    torch.manual_seed(8)
    norm = (lambda c: SharedNorm(c, differentiates)) if how == "shared" else nn.BatchNorm2d
    inner = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        norm(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, bias=False),
        norm(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)

    def loss(n: int) -> Tensor:
        x = numbers_of(n, rank, 6, 3 * 8 * 8).view(6, 3, 8, 8)
        return F.cross_entropy(model(x), torch.arange(6) % 4)

    return Training(model, optimizer, steps(model, optimizer, loss))


register(
    "unseen: DDP, batch norm over processes",
    convolutions,
    {"statistics are reduced without their gradients": {"differentiates": False}},
)
register("unseen: DDP, batch norm of each process", partial(convolutions, how="own"), {})


# DTensors by hand.


class TensorModel(nn.Module):
    """Parameters that are DTensors, operations that are torch's."""

    def __init__(self, mesh: Any, hint: bool) -> None:
        super().__init__()
        self.mesh, self.hint = mesh, hint

        def make(*shape: int, to: Any) -> Any:
            return nn.Parameter(distribute_tensor(torch.randn(*shape) * 0.2, mesh, [to]))

        self.first = make(HIDDEN, WIDTH, to=Shard(0))
        self.second = make(WIDTH, HIDDEN, to=Shard(1))
        self.gain = nn.Parameter(distribute_tensor(torch.rand(WIDTH) + 0.5, mesh, [Replicate()]))
        self.head = make(6, WIDTH, to=Replicate())

    def forward(self, x: Tensor) -> Tensor:
        """Multiply DTensors, and go to plain tensors and back in between."""
        whole = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        h: Any = F.rms_norm(whole, (WIDTH,)) * self.gain
        # A kernel that knows no DTensors sees the pieces.
        hidden: Any = (h @ self.first.T).to_local()
        hidden = DTensor.from_local(F.gelu(hidden), self.mesh, [Shard(-1)], run_check=False)
        if self.hint:
            out = (hidden @ self.second.T).redistribute(self.mesh, [Replicate()]).to_local()
            return out @ self.head.to_local(grad_placements=[Replicate()]).T
        # Tokens are cut before the head, whose local gradient is only a part.
        out = (hidden @ self.second.T).redistribute(self.mesh, [Shard(0)]).to_local()
        part = out @ self.head.to_local().T
        return functional.all_gather_tensor_autograd(part, 0, self.mesh.get_group())


def tensors(rank: int, world: int, hint: bool = True) -> Training:
    """DTensors without parallelize_module."""
    torch.manual_seed(9)
    model = TensorModel(init_device_mesh("cpu", (world,)), hint)
    optimizer = adamw(model)
    loss = lambda n: F.cross_entropy(model(numbers_of(n)), torch.arange(6))  # noqa: E731
    return Training(model, optimizer, steps(model, optimizer, loss))


register("unseen: DTensors by hand", tensors, {"the head's gradient is local": {"hint": False}})


# Pairs of images and texts, whose features are gathered.


class Pair(nn.Module):
    """Two towers and a temperature."""

    def __init__(self) -> None:
        super().__init__()
        tower = lambda: nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, 8, bias=False))  # noqa: E731
        self.image, self.text = tower(), tower()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return features."""
        return F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1), self.scale.exp()


def contrastive(rank: int, world: int, how: str = "differentiable", compiled: bool = False) -> Training:
    """CLIP's loss under DDP, over the features of all processes."""
    torch.manual_seed(10)
    model: Any = DistributedDataParallel(Pair())
    if compiled:
        model = torch.compile(model, backend="aot_eager")
    optimizer = adamw(model)

    def gathered(x: Tensor) -> Tensor:
        if how == "differentiable":
            return torch.cat(differentiable.all_gather(x))
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x.detach())
        if how == "own":
            parts[rank] = x
        return torch.cat(parts)

    def loss(n: int) -> Tensor:
        image, text, scale = model(numbers_of(n, rank), numbers_of(n + 500, rank))
        target = torch.arange(6) + 6 * rank
        return (
            F.cross_entropy(scale * image @ gathered(text).T, target)
            + F.cross_entropy(scale * text @ gathered(image).T, target)
        ) / 2

    return Training(model, optimizer, steps(model, optimizer, loss))


register("unseen: DDP, contrastive loss over all", contrastive, {})
register("unseen: DDP, contrastive loss, own features with gradients", partial(contrastive, how="own"), {})
register("unseen: compiled DDP, contrastive loss", partial(contrastive, compiled=True), {})


# Two models, two optimizers.


def adversaries(rank: int, world: int) -> Training:
    """A generator and a discriminator, both under DDP; the generator is watched."""
    torch.manual_seed(11)
    make = lambda inside, out: DistributedDataParallel(  # noqa: E731
        nn.Sequential(nn.Linear(inside, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, out)), broadcast_buffers=False
    )
    generator, critic = make(8, WIDTH), make(WIDTH, 1)
    first, second = (torch.optim.Adam(m.parameters(), lr=2e-4, betas=(0.5, 0.99)) for m in (generator, critic))

    def step(number: int) -> Tensor:
        noise, real = numbers_of(number, rank, 6, 8), numbers_of(number + 100, rank)
        second.zero_grad()
        both = torch.cat((critic(real), critic(generator(noise).detach())))
        F.binary_cross_entropy_with_logits(both, torch.cat((torch.ones(6, 1), torch.zeros(6, 1)))).backward()
        second.step()
        first.zero_grad()
        loss = F.binary_cross_entropy_with_logits(critic(generator(noise)), torch.ones(6, 1))
        loss.backward()
        first.step()
        return loss

    return Training(generator, first, step)


register("unseen: DDP, generator and discriminator", adversaries, {})


# Two kinds at once, by subgroups.


class Rows(torch.autograd.Function):
    """The sum over a group in one direction of the pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, forward: bool) -> Tensor:
        """Sum or not."""
        ctx.group, ctx.backward_sums = group, not forward
        x = x.clone()
        if forward:
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Sum or not."""
        x = gradients[0].clone()
        if ctx.backward_sums:
            dist.all_reduce(x, group=ctx.group)
        return x, None, None


class GroupMLP(nn.Module):
    """Hidden units of a group's part."""

    def __init__(self, group: Any, seed: int) -> None:
        super().__init__()
        index, size = dist.get_rank(group), dist.get_world_size(group)
        generator = torch.Generator().manual_seed(seed)
        self.group = group
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Parameter((torch.randn(HIDDEN, WIDTH, generator=generator) * 0.2).chunk(size)[index].clone())
        self.down = nn.Parameter((torch.randn(WIDTH, HIDDEN, generator=generator) * 0.2).chunk(size, 1)[index].clone())

    def forward(self, x: Tensor) -> Tensor:
        """Add the layer."""
        h = F.relu(Rows.apply(self.norm(x), self.group, False) @ self.up.T)
        return x + Rows.apply(h @ self.down.T, self.group, True)


def grid(rank: int, world: int, reduces: str = "data") -> Training:
    """Tensor parallelism inside pairs, data parallelism across."""
    tensor = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    data = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    torch.manual_seed(12)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), GroupMLP(tensor, 1), GroupMLP(tensor, 2), nn.Linear(WIDTH, 5))
    optimizer = adamw(model)
    loss = lambda n: F.cross_entropy(model(numbers_of(n, rank // 2)), torch.arange(6) % 5)  # noqa: E731

    def after() -> None:
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad, group=data if reduces == "data" else tensor)
                p.grad.div_(2)

    return Training(model, optimizer, steps(model, optimizer, loss, after))


register("unseen: TP x DP by groups", grid, {"gradients are reduced over the wrong groups": {"reduces": "tensor"}}, 4)


# Others.


def recurrent(rank: int, world: int, fresh: bool = True) -> Training:
    """An LSTM under DDP, whose state is carried over steps and detached."""
    torch.manual_seed(13)
    inner = nn.ModuleDict({"rnn": nn.LSTM(WIDTH, 16, batch_first=True), "head": nn.Linear(16, WIDTH)})

    class Run(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor, state: Any) -> Any:
            out, state = self.inner["rnn"](x, state)
            return self.inner["head"](out), state

    model = DistributedDataParallel(Run())
    optimizer = adamw(model)
    state: Any = None

    def loss(n: int) -> Tensor:
        nonlocal state
        x = numbers_of(n, rank, 4, 5 * WIDTH).view(4, 5, WIDTH)
        out, state = model(x, state)
        state = tuple(s.detach() for s in state)
        return (out[:, :-1] - x[:, 1:]).square().mean()

    return Training(model, optimizer, steps(model, optimizer, loss))


register("unseen: DDP, LSTM with carried state", recurrent, {})


def taught(rank: int, world: int, reloads: bool = False) -> Training:
    """A student under DDP learns a frozen teacher's distribution; one process may load a checkpoint late."""
    teacher = make_decoder(seed=5).requires_grad_(False).eval()
    model = DistributedDataParallel(make_decoder())
    optimizer = adamw(model)
    saved = {k: v.clone() for k, v in make_decoder(seed=6).state_dict().items()}

    def step(number: int) -> Tensor:
        if number == 3 and reloads and rank == 0:
            model.module.load_state_dict(saved, strict=False)
        optimizer.zero_grad()
        tokens = make_tokens(DecoderConfig(), step=number, rank=rank)
        out = model(tokens[:, :-1]).log_softmax(-1)
        with torch.no_grad():
            aim = teacher(tokens[:, :-1]).softmax(-1)
        loss = F.kl_div(out, aim, reduction="batchmean") + 0.1 * token_loss(out, tokens)
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, step)


register("unseen: DDP, distillation", taught, {"one process loads a checkpoint": {"reloads": True}})


def fused_steps(rank: int, world: int) -> Training:
    """Each parameter's own optimizer steps in a hook, as soon as DDP has reduced its gradient."""
    inner = make_decoder()
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=True, amsgrad=True)
    loss = lambda n: (lambda t: token_loss(model(t[:, :-1]), t) / 1.0)(  # noqa: E731
        make_tokens(DecoderConfig(), step=n, rank=rank)
    )
    averaged = torch.optim.swa_utils.AveragedModel(inner, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    inside = steps(model, optimizer, loss)

    def step(number: int) -> Tensor:
        out: Tensor = inside(number)
        averaged.update_parameters(inner)
        return out

    return Training(model, optimizer, step)


register("unseen: DDP, Adam and an averaged model", fused_steps, {})


def staged_decoder(rank: int, world: int) -> Training:
    """FSDP2 over a whole compiled model, tied."""
    model: Any = make_decoder()
    model.output.weight = model.tok_embeddings.weight
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = adamw(model)

    def loss(n: int) -> Tensor:
        tokens = make_tokens(DecoderConfig(), step=n, rank=rank)
        return token_loss(compiled(tokens[:, :-1].contiguous()), tokens)

    return Training(compiled, optimizer, steps(model, optimizer, loss))


register("unseen: FSDP2, compiled whole, tied", staged_decoder, {})

__all__ = ["DEFECTS", "Decoder", "Partial"]
