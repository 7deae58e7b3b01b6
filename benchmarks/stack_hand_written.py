"""Parallelism written by hand in the ways people write it, each correct run beside runs with one line left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from stack_configurations import Training, configuration

WIDTH, HEADS, HIDDEN, VOCABULARY, LENGTH, BATCH = 32, 4, 64, 48, 16, 4
DEFECTS: dict[str, str] = {}
"""By name of a configuration with a defect, that of its correct twin."""


class Collective(torch.autograd.Function):
    """An operation in the forward pass and another in the backward pass; None is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Any, backward: Any) -> Tensor:
        """Apply the first operation."""
        ctx.backward_operation = backward
        return x.view_as(x) if forward is None else forward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Apply the second operation to the gradient."""
        operation = ctx.backward_operation
        return gradients[0] if operation is None else operation(gradients[0]), None, None


def total(x: Tensor) -> Tensor:
    """Return the sum over processes."""
    x = x.clone()
    dist.all_reduce(x)
    return x


def gather(x: Tensor, axis: int = 1) -> Tensor:
    """Return the tensors of all processes one after the other."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, axis)


def own_part(x: Tensor, axis: int = 1) -> Tensor:
    """Return the slice of this process."""
    return x.chunk(dist.get_world_size(), axis)[dist.get_rank()].contiguous()


def scatter_total(x: Tensor, axis: int = 1) -> Tensor:
    """Return this process's slice of the sum."""
    return own_part(total(x), axis)


def unchanged(x: Tensor) -> Tensor:
    """Return the tensor."""
    return x


class Attention(nn.Module):
    """Causal attention over the heads that a process has."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(WIDTH, 3 * heads * WIDTH // HEADS)
        self.proj = nn.Linear(heads * WIDTH // HEADS, WIDTH, bias=False)

    def forward(self, x: Tensor, keys: Callable[[Tensor], Tensor] | None = None, offset: int = 0) -> Tensor:
        """Attend; `keys` may bring keys and values of other processes, and `offset` is the first position."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        if keys is not None:
            k, v = keys(k), keys(v)
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        mask = torch.arange(k.shape[2])[None] <= torch.arange(q.shape[2])[:, None] + offset
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two layers around GELU, or a gated unit."""

    def __init__(self, hidden: int, gated: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.gate = nn.Linear(WIDTH, hidden, bias=False) if gated else None
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return down(act(…))."""
        up = self.up(x)
        return self.down(F.gelu(up) if self.gate is None else F.silu(self.gate(x)) * up)


class Block(nn.Module):
    """A pre-norm layer; `enter` and `leave` move tensors between processes around both parts."""

    def __init__(self, share: int, gated: bool) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = Attention(HEADS // share), MLP(HIDDEN // share, gated)
        self.enter: Callable[[Tensor], Tensor] = unchanged
        self.leave: Callable[[Tensor], Tensor] = unchanged
        self.attend: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        """Add attention and feed-forward."""
        x = x + self.leave(self.attn(self.enter(self.ln1(x)), **self.attend))
        return x + self.leave(self.mlp(self.enter(self.ln2(x))))


class GPT(nn.Module):
    """A small GPT with learned positions."""

    def __init__(self, share: int = 1, layers: int = 2, gated: bool = False) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(share, gated) for _ in range(layers))
        self.ln_f, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.scatter: Callable[[Tensor], Tensor] = unchanged
        self.collect: Callable[[Tensor], Tensor] = unchanged

    def forward(self, tokens: Tensor, first: int = 0) -> Tensor:
        """Return logits."""
        x = self.wte(tokens) + self.wpe(torch.arange(first, first + tokens.shape[1]))
        x = self.scatter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.collect(self.ln_f(x)))


def tokens_of(step: int, rank: int = 0) -> Tensor:
    """Return the tokens of one step and process."""
    generator = torch.Generator().manual_seed(7919 * step + rank)
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def loop(model: nn.Module, optimizer: Any, batch: Callable[[int], Tensor], after: Callable[[], None]) -> Training:
    """Return a plain loop; `after` runs between backward and the step."""

    def step(number: int) -> Tensor:
        tokens = batch(number)
        optimizer.zero_grad()
        loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        after()
        optimizer.step()
        return loss

    return Training(model, optimizer, step)


def nothing() -> None:
    """Do nothing."""


def reduce_gradients(parameters: Sequence[Tensor]) -> None:
    """Average gradients over processes, as loops without a wrapper do."""
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())


def register(name: str, build: Callable[..., Training], defects: dict[str, dict[str, Any]], processes: int = 2) -> None:
    """Register a correct run and its defects, given as options of the builder."""
    configuration(name, processes)(build)
    for words, options in defects.items():
        DEFECTS[f"defect: {words} ({name})"] = name
        configuration(f"defect: {words} ({name})", processes)(partial(build, **options))


def data_parallel(
    rank: int, world: int, skips: Sequence[str] = (), flat: bool = False, seed: int = 0, sums: bool = False
) -> Training:
    """Gradients are averaged by hand after backward, one by one or in one flat tensor."""
    torch.manual_seed(seed * rank)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def after() -> None:
        chosen = [p for name, p in model.named_parameters() if not any(s in name for s in skips)]
        if not flat:
            return reduce_gradients(chosen)
        joined = torch.cat([p.grad.flatten() for p in chosen if p.grad is not None])
        dist.all_reduce(joined)
        for p, part in zip(chosen, (joined / world).split([p.numel() for p in chosen]), strict=True):
            p.grad = part.view_as(p).clone()

    return loop(model, optimizer, lambda n: tokens_of(n, rank), after)


register(
    "data parallel by hand",
    data_parallel,
    {
        "gradients are not reduced": {"skips": ("",)},
        "gradients of one layer are not reduced": {"skips": ("blocks.1.mlp",)},
        "other initial weights": {"seed": 1},
    },
)
register("data parallel by hand, flat bucket", partial(data_parallel, flat=True), {}, 4)


def cut(model: GPT, whole: GPT, rank: int, world: int) -> None:
    """Give a model of pieces its slices of a whole one: heads of the fused projection, hidden units."""
    with torch.no_grad():
        for (name, piece), (_, full) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
            if piece.shape == full.shape:
                piece.copy_(full)
            elif "qkv" in name:
                heads = full.unflatten(0, (3, HEADS, -1)).chunk(world, 1)[rank]
                piece.copy_(heads.flatten(0, 2))
            else:
                axis = 1 if name.endswith(("proj.weight", "down.weight")) else 0
                piece.copy_(full.chunk(world, axis)[rank])


def tensor_parallel(
    rank: int,
    world: int,
    reduces: bool = True,
    gated: bool = False,
    sequence: bool = False,
    norms: bool = True,
    averages: bool = False,
) -> Training:
    """Megatron's f and g, or its sequence-parallel pair, around layers that hold some heads and hidden units."""
    torch.manual_seed(0)
    whole = GPT(gated=gated)
    model = GPT(world, gated=gated)
    cut(model, whole, rank, world)
    back = total if reduces else None
    if averages:
        back = lambda x: total(x) / world  # noqa: E731
    for block in model.blocks:
        if sequence:
            block.enter = lambda x: Collective.apply(x, gather, scatter_total if reduces else own_part)  # type: ignore[assignment]
            block.leave = lambda x: Collective.apply(x, scatter_total, gather)  # type: ignore[assignment]
        else:
            block.enter = lambda x: Collective.apply(x, None, back)  # type: ignore[assignment]
            block.leave = lambda x: Collective.apply(x, total, None)  # type: ignore[assignment]
    if sequence:
        model.scatter = lambda x: Collective.apply(x, own_part, gather)
        model.collect = lambda x: Collective.apply(x, gather, own_part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def after() -> None:
        for name, p in model.named_parameters():
            if sequence and norms and "ln" in name and p.grad is not None:
                dist.all_reduce(p.grad)

    return loop(model, optimizer, lambda n: tokens_of(n), after)


register(
    "TP by hand, GELU",
    tensor_parallel,
    {"input gradients are not reduced": {"reduces": False}, "input gradients are averaged": {"averages": True}},
)
register(
    "TP by hand, gated", partial(tensor_parallel, gated=True), {"no reduction of input gradients": {"reduces": False}}
)
register("TP by hand, gated, of 4", partial(tensor_parallel, gated=True), {}, 4)
register(
    "sequence parallel by hand",
    partial(tensor_parallel, sequence=True),
    {
        "norm gradients are not summed": {"norms": False},
        "input gradients are sliced, not summed": {"reduces": False},
    },
)


def context_parallel(rank: int, world: int, reduces: bool = True, keys: bool = True) -> Training:
    """Every process has some of the tokens; keys and values are gathered."""
    torch.manual_seed(0)
    model = GPT(gated=True)
    length = LENGTH // world
    back = scatter_total if keys else own_part
    for block in model.blocks:
        block.attend = {"keys": lambda x: Collective.apply(x, gather, back), "offset": rank * length}  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(number: int) -> Tensor:
        tokens = tokens_of(number)
        optimizer.zero_grad()
        part = slice(rank * length, (rank + 1) * length)
        loss = loss_of(model(tokens[:, :-1][:, part], rank * length), tokens[:, 1:][:, part])
        loss.backward()
        if reduces:
            reduce_gradients([*model.parameters()])
        optimizer.step()
        return loss

    return Training(model, optimizer, step)


register(
    "context parallel by hand",
    context_parallel,
    {"gradients are not reduced": {"reduces": False}, "gradients of keys are not summed": {"keys": False}},
)


def zero_one(rank: int, world: int, sends: bool = True, reduces: bool = True) -> Training:
    """Every process has the optimizer state of some parameters, and sends them after its step."""
    torch.manual_seed(0)
    model = GPT()
    every = [*model.parameters()]
    owner = {id(p): number % world for number, p in enumerate(every)}
    optimizer = torch.optim.AdamW([p for p in every if owner[id(p)] == rank], lr=1e-3)

    def step(number: int) -> Tensor:
        tokens = tokens_of(number, rank)
        for p in every:
            p.grad = None
        loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        if reduces:
            reduce_gradients(every)
        optimizer.step()
        if sends:
            for p in every:
                dist.broadcast(p.data, owner[id(p)])
        return loss

    return Training(model, optimizer, step)


register(
    "ZeRO-1 by hand",
    zero_one,
    {"parameters are not sent": {"sends": False}, "gradients are not reduced": {"reduces": False}},
)


class Stage(nn.Module):
    """Some layers of a GPT."""

    def __init__(self, rank: int, world: int, alike: bool) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH) if rank == 0 and not alike else None
        self.blocks = nn.ModuleList(Block(1, True) for _ in range(1))
        self.head = nn.Linear(WIDTH, VOCABULARY) if rank == world - 1 and not alike else None

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers."""
        x = x if self.wte is None else self.wte(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


def pipeline(
    rank: int, world: int, alike: bool = False, micro: int = 4, lost: int = -1, scale: bool = True
) -> Training:
    """Stages that send activations forward and gradients back, several micro-batches one after the other."""
    torch.manual_seed(0)
    model = Stage(rank, world, alike)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(number: int) -> Tensor | None:
        tokens = tokens_of(number)
        floats = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        saved: list[tuple[Tensor, Tensor]] = []
        loss = None
        for piece in range(micro):
            if rank == 0:
                x = floats[piece : piece + 1] if alike else tokens[piece : piece + 1, :-1]
            else:
                x = torch.empty(1, LENGTH, WIDTH)
                dist.recv(x, rank - 1)
                x.requires_grad_()
            out = model(x)
            if rank < world - 1:
                dist.send(out.detach(), rank + 1)
            saved.append((x, out))
        for piece, (x, out) in enumerate(saved):
            if rank == world - 1:
                target = tokens[piece : piece + 1, 1:]
                loss = out.square().mean() if alike else loss_of(out, target)
                (loss / micro if scale else loss).backward()
            else:
                gradient = torch.empty_like(out)
                dist.recv(gradient, rank + 1)
                if piece != lost:
                    out.backward(gradient)
            if rank > 0:
                assert x.grad is not None
                dist.send(x.grad, rank - 1)
        optimizer.step()
        return loss

    return Training(model, optimizer, step, micro)


register("pipeline by hand", pipeline, {})
register("pipeline by hand, of 4", pipeline, {}, 4)
register("pipeline by hand, equal stages of one seed", partial(pipeline, alike=True), {})


class ExpertLayer(nn.Module):
    """Top-1 routed experts, one on each process, reached by all_to_all."""

    def __init__(self, reduces: bool) -> None:
        super().__init__()
        world = dist.get_world_size()
        self.router = nn.Linear(WIDTH, world, bias=False)
        torch.manual_seed(100 + dist.get_rank())
        self.expert = MLP(HIDDEN, True)
        self.exchange_back = reduces

    def forward(self, x: Tensor) -> Tensor:
        """Send every token to its expert and back; every expert gets the same number of tokens."""
        world = dist.get_world_size()
        flat = x.flatten(0, -2)
        weights = self.router(flat).softmax(-1)
        # Tokens are dealt out evenly, in turn, so that sizes are known.
        sent = flat.view(-1, world, WIDTH).transpose(0, 1).reshape(-1, WIDTH)
        back = exchange if self.exchange_back else None
        out = Collective.apply(self.expert(Collective.apply(sent, exchange, back)), exchange, exchange)
        out = out.view(world, -1, WIDTH).transpose(0, 1).reshape(-1, WIDTH)
        chosen = weights.view(-1, world, world).diagonal(dim1=1, dim2=2).reshape(-1, 1)
        return (out * chosen).view_as(x)


def exchange(x: Tensor) -> Tensor:
    """Return all_to_all of equal parts."""
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x.contiguous())
    return out


def expert_parallel(
    rank: int, world: int, reduces: bool = True, router: bool = True, experts: bool = False
) -> Training:
    """Experts by hand: what is replicated is averaged, experts get gradients of all tokens by themselves."""
    torch.manual_seed(0)
    model = GPT(gated=True)
    for block in model.blocks:
        block.mlp = ExpertLayer(reduces)
        torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def after() -> None:
        for name, p in model.named_parameters():
            if p.grad is None or ("router" in name and not router):
                continue
            if "expert" not in name or experts:
                dist.all_reduce(p.grad)
            p.grad.div_(world)

    return loop(model, optimizer, lambda n: tokens_of(n, rank), after)


register(
    "EP by hand",
    expert_parallel,
    {
        "router gradients are not reduced": {"router": False},
        "gradients are not sent back": {"reduces": False},
        "gradients of experts are added up": {"experts": True},
    },
)


def local_sgd(rank: int, world: int) -> Training:
    """Parameters are averaged every second step; gradients never are."""
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inner = loop(model, optimizer, lambda n: tokens_of(n, rank), nothing)

    def step(number: int) -> Tensor | None:
        loss = inner.step(number)
        if number % 2:
            with torch.no_grad():
                for p in model.parameters():
                    dist.all_reduce(p)
                    p.div_(world)
        return loss

    return Training(model, optimizer, step)


register("local SGD", local_sgd, {})
