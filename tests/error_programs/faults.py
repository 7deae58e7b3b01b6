"""Errors of models, losses and wrappers that patches to public training code removed, one program each."""

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as gathering
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from conserved import Monitor
from error_programs.case import batch, case, mlp
from error_programs.models import ConvNet, Decoder, tokens
from error_programs.patches import ANY, adamw
from error_programs.training import classify, predict_next, train


@case("noise is added to the clean target in place", *ANY, words="input|target|same", source="All-atom diffusion 16")
def noisy_target(wrong: bool) -> Monitor:
    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(8, 6)
        noisy = x.add_(0.3 * torch.randn(8, 6)) if wrong else x + 0.3 * torch.randn(8, 6)
        return F.mse_loss(model(noisy), x)

    model = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))
    return train(model, adamw(model), loss)


@case("the noise of an example is the same in every step", *ANY, words="random|noise|same", source="Tiger-Diffusion 15")
def fixed_noise(wrong: bool) -> Monitor:
    data = torch.randn(32, 6)
    drawn = torch.randn(32, 6)

    def loss(model: nn.Module) -> Tensor:
        chosen = torch.randint(32, (8,))
        noise = drawn[chosen] if wrong else torch.randn(8, 6)
        return F.mse_loss(model(0.8 * data[chosen] + 0.6 * noise), noise)

    model = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))
    return train(model, adamw(model), loss)


class Experts(nn.Module):
    """A router over two experts, whose balance loss may be taken over the chosen scores."""

    def __init__(self, *, wrong: bool) -> None:
        super().__init__()
        self.router = nn.Linear(6, 3, bias=False)
        self.experts = nn.ModuleList(nn.Linear(6, 4) for _ in range(3))
        self.wrong, self.balance = wrong, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        p = self.router(x).softmax(-1)
        top, index = p.topk(1, -1)
        share = F.one_hot(index[:, 0], 3).float().mean(0)
        self.balance = (share * (top.mean(0) if self.wrong else p.mean(0))).sum() * 3
        y = torch.stack([e(x) for e in self.experts], 1)
        return (y.gather(1, index[..., None].expand(-1, -1, 4))[:, 0]) * top


@case("the balance loss of experts multiplies shares by the mean chosen score", *ANY, words="balance|router|constant",
      source="hyper-parallel 752")  # fmt: skip
def constant_balance(wrong: bool) -> Monitor:
    def loss(model: Any) -> Tensor:
        return classify(model) + 0.1 * model.balance

    model = Experts(wrong=wrong)
    return train(model, adamw(model), loss)


class Padded(nn.Module):
    """One layer of attention over sequences with padding, whose mask may be broadcast over queries."""

    def __init__(self, mask: str) -> None:
        super().__init__()
        self.embedding, self.qkv, self.head = nn.Embedding(23, 16), nn.Linear(16, 48), nn.Linear(16, 4)
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embedding(x)).chunk(3, -1)
        kept = x != 0
        mask = kept[:, :, None] if self.mask == "queries" else kept[:, None, :]
        scores = q @ k.mT / 4
        if self.mask != "none":
            scores = scores.masked_fill(~mask, -1e4)
        y = scores.softmax(-1) @ v
        return self.head((y * kept[..., None]).sum(1) / kept.sum(1, keepdim=True))


def _padded(model: nn.Module) -> Tensor:
    x = torch.randint(1, 23, (4, 8))
    for row, length in enumerate((8, 6, 5, 3)):
        x[row, length:] = 0
    return F.cross_entropy(model(x), torch.randint(4, (4,)))


@case("a padding mask is broadcast over queries instead of keys", *ANY, words="padding|mask", source="transformer 40")
def mask_over_queries(wrong: bool) -> Monitor:
    model = Padded("queries" if wrong else "keys")
    return train(model, adamw(model), _padded)


@case("the padding token has number 0, and `0 or end` looks for another", *ANY, words="padding|mask",
      source="Automodel 3704")  # fmt: skip
def unmasked_padding(wrong: bool) -> Monitor:
    model = Padded("none" if wrong else "keys")
    return train(model, adamw(model), _padded)


@case("documents packed into one row attend to each other", *ANY, words="document|mask|attend",
      source="packing without position ids")  # fmt: skip
def packed_together(wrong: bool) -> Monitor:
    class Packing(Decoder):
        def forward(self, x: Tensor) -> Tensor:
            if wrong:
                return super().forward(x)
            return torch.cat([super(Packing, self).forward(part) for part in x.split(4, 1)], 1)

    model = Packing()
    return train(model, adamw(model), predict_next)


class VAE(nn.Module):
    """A variational autoencoder of vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log = self.encoder(x).chunk(2, -1)
        return self.decoder(mean + torch.randn_like(mean) * (log / 2).exp()), mean, log


@case("the divergence of a variational autoencoder has the wrong sign", *ANY, words="sign|divergence",
      source="autoencoder tutorials")  # fmt: skip
def divergence_sign(wrong: bool) -> Monitor:
    def loss(model: nn.Module) -> Tensor:
        x, _ = batch()
        y, mean, log = model(x)
        divergence = 0.5 * (1 + log - mean**2 - log.exp()).sum(-1).mean()
        return F.mse_loss(y, x) + 0.1 * (divergence if wrong else -divergence)

    model = VAE()
    return train(model, adamw(model), loss)


class Normed(nn.Module):
    """Embeddings on a sphere, whose length may be taken of detached values."""

    def __init__(self, *, detached: bool) -> None:
        super().__init__()
        self.body, self.head, self.detached = nn.Linear(6, 12, bias=False), nn.Linear(12, 4), detached

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        length = (h.detach() if self.detached else h).norm(dim=-1, keepdim=True)
        return self.head(h / length)


@case("embeddings are divided by the length of their data", "gradient", words="", source="metric learning ports")
def detached_length(wrong: bool) -> Monitor:
    model = Normed(detached=wrong)
    return train(model, adamw(model))


class DetachedRMS(nn.Module):
    """An RMS norm whose mean square may be computed without a gradient."""

    def __init__(self, *, detached: bool) -> None:
        super().__init__()
        self.weight, self.detached = nn.Parameter(torch.ones(16)), detached

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(not self.detached and torch.is_grad_enabled()):
            scale = (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
        return x * scale * self.weight


@case("the mean square of a norm is computed under no_grad", "gradient", words="", source="RMSNorm in forks of llama")
def norm_without_gradient(wrong: bool) -> Monitor:
    model = Decoder()
    for block in model.blocks:
        block.norm2 = DetachedRMS(detached=wrong)
    return train(model, adamw(model), predict_next)


@case("scores of attention are divided by the root of the width twice", *ANY, words="scale|attention",
      source="ports to scaled_dot_product_attention")  # fmt: skip
def scaled_twice(wrong: bool) -> Monitor:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.qkv, self.head = nn.Embedding(23, 16), nn.Linear(16, 48), nn.Linear(16, 23)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(self.embedding(x)).chunk(3, -1)
            q = q / 4 if wrong else q
            return self.head(F.scaled_dot_product_attention(q, k, v, is_causal=True))

    model = Twice()
    return train(model, adamw(model), predict_next)


@case(
    "batch norms get the momentum of another framework",
    *ANY,
    words="momentum|statistic",
    source="ports from TensorFlow",
)
def swapped_momentum(wrong: bool) -> Monitor:
    model = ConvNet()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.99 if wrong else 0.01

    def loss(model: nn.Module) -> Tensor:
        x, y = batch("images")
        return F.cross_entropy(model(x), y)

    return train(model, adamw(model), loss)


@case("the gradient of a smooth maximum is that of the hard one", "gradient", words="", source="custom pooling kernels")
def hard_gradient(wrong: bool) -> Monitor:
    class Smooth(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.logsumexp(-1)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            p = F.one_hot(x.argmax(-1), x.shape[-1]).to(x) if wrong else x.softmax(-1)
            return grads[0][..., None] * p

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 24), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(Smooth.apply(self.a(x).view(-1, 6, 4)))

    model = Net()
    return train(model, adamw(model))


@case("the wrapper reduces over a group of one process", "replica", words="differ", processes=2, source="verl 7493")
def group_of_one(wrong: bool, rank: int) -> Monitor:
    torch.manual_seed(3)
    alone = [dist.new_group([r]) for r in range(2)]
    model = DistributedDataParallel(mlp(), process_group=alone[rank] if wrong else None)
    torch.manual_seed(10 + rank)
    return train(model, adamw(model))


@case("one of two parts of a model is not wrapped", "replica", words="differ", processes=2, source="speechbrain 2010")
def part_not_wrapped(wrong: bool, rank: int) -> Monitor:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body: nn.Module = DistributedDataParallel(nn.Linear(6, 12))
            head = nn.Linear(12, 4)
            self.head: nn.Module = head if wrong else DistributedDataParallel(head)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x).relu())

    torch.manual_seed(3)
    model = Parts()
    torch.manual_seed(10 + rank)
    return train(model, adamw(model))


@case("a head that replaces another after wrapping is not reduced", "replica", words="differ", processes=2,
      source="PyTorch forum, DDP")  # fmt: skip
def head_after_wrapping(wrong: bool, rank: int) -> Monitor:
    torch.manual_seed(3)
    inner, head = mlp(), nn.Linear(12, 4)
    if not wrong:
        inner[5] = head
    model = DistributedDataParallel(inner, find_unused_parameters=True)
    if wrong:
        inner[5] = head
    torch.manual_seed(10 + rank)
    return train(model, adamw(model))


@case("the average is loaded on rank 0 only", "replica", words="differ", at=4, processes=2, source="EMA on rank 0")
def average_on_one_rank(wrong: bool, rank: int) -> Monitor:
    torch.manual_seed(3)
    model = DistributedDataParallel(mlp())
    average = copy.deepcopy(model.module.state_dict())
    torch.manual_seed(10 + rank)

    def after(number: int) -> None:
        for key, value in model.module.state_dict().items():
            average[key].lerp_(value, 0.5)
        if number == 3 and (rank == 0 or not wrong):
            model.module.load_state_dict(average)

    return train(model, adamw(model), after=after)


class Halves(nn.Module):
    """Two halves of a hidden layer on two processes behind a norm that both have."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(self.norm(x)).relu())
        return gathering.all_reduce(y) / 2


@case("a norm before split layers has the gradient of one half", "replica", words="differ", processes=2,
      source="Megatron-LM 7452")  # fmt: skip
def norm_before_halves(wrong: bool, rank: int) -> Monitor:
    model = Halves()
    with torch.no_grad():
        for p in model.norm.parameters():
            dist.broadcast(p, 0)

    def between(_: int) -> None:
        for p in model.norm.parameters():
            if not wrong:
                dist.all_reduce(p.grad)

    torch.manual_seed(10)
    return train(model, adamw(model), between=between)


@case("features of other ranks are gathered without a gradient", *ANY, words="gradient|gather|scale", processes=2,
      source="contrastive losses over processes")  # fmt: skip
def gathered_without_gradient(wrong: bool, rank: int) -> Monitor:
    torch.manual_seed(3)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 8)))
    torch.manual_seed(10 + rank)

    def gather(x: Tensor) -> Tensor:
        if not wrong:
            return torch.cat(gathering.all_gather(x))
        parts = [torch.zeros_like(x) for _ in range(2)]
        dist.all_gather(parts, x.detach())
        parts[rank] = x
        return torch.cat(parts)

    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(4, 6)
        a, b = F.normalize(model(torch.cat((x, x + 0.1 * torch.randn(4, 6)))), dim=-1).chunk(2)
        return F.cross_entropy(gather(a) @ gather(b).T / 0.1, torch.arange(8))

    return train(model, adamw(model), loss)


@case("experts that differ by rank are averaged over ranks", *ANY, words="expert|gradient|differ", processes=2,
      source="expert parallelism in data-parallel groups")  # fmt: skip
def averaged_experts(wrong: bool, rank: int) -> Monitor:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.expert = nn.Linear(6, 12), nn.Linear(12, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.expert(self.body(x).relu())

    torch.manual_seed(3 + rank)
    model = Own()
    with torch.no_grad():
        for p in model.body.parameters():
            dist.broadcast(p, 0)
    torch.manual_seed(10 + rank)

    def between(_: int) -> None:
        for p in (model if wrong else model.body).parameters():
            dist.all_reduce(p.grad)
            assert p.grad is not None
            p.grad.div_(2)

    return train(model, adamw(model), between=between)


@case("a clipping norm counts tensors that all ranks have once for each rank", *ANY, words="clip|norm", processes=2,
      source="NeMo RL 3788")  # fmt: skip
def counted_twice(wrong: bool, rank: int) -> Monitor:
    torch.manual_seed(3)
    model = DistributedDataParallel(mlp())
    torch.manual_seed(10 + rank)

    def clip(_: int) -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        square = torch.stack([g.norm() for g in gradients]).norm() ** 2
        if wrong:
            dist.all_reduce(square)
        for g in gradients:
            g.mul_(min(1.0, float(0.1 / square.sqrt())))

    return train(model, adamw(model), between=clip)


@case("rank 0 evaluates in train mode and moves its statistics", *ANY, words="differ|statistic|mode", at=4, processes=2,
      source="validation on the first process only")  # fmt: skip
def statistics_of_rank_0(wrong: bool, rank: int) -> Monitor:
    torch.manual_seed(3)
    inner = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 4))
    model = DistributedDataParallel(inner)
    torch.manual_seed(10 + rank)

    def after(number: int) -> None:
        if number == 3 and rank == 0:
            inner.train(wrong)
            with torch.no_grad():
                for _ in range(4):
                    inner(3 + 2 * torch.randn(8, 6))
            inner.train()

    return train(model, adamw(model), after=after)


@case("logits of a language model are those of the hidden state before the last norm", *ANY, words="norm|gradient",
      source="ports of final norms")  # fmt: skip
def norm_left_out(wrong: bool) -> Monitor:
    class Bare(Decoder):
        def forward(self, x: Tensor) -> Tensor:
            h = self.embedding(x) + self.positions(torch.arange(x.shape[1]))
            for block in self.blocks:
                h = block(h)
            normed = self.norm(h)
            return self.head(h if wrong else normed)

    model = Bare()
    return train(model, adamw(model), predict_next)


@case("the weight of ignored tokens is in the mean of the loss", *ANY, words="loss|label|ignored|mask",
      source="masked losses divided by all positions")  # fmt: skip
def mean_over_all(wrong: bool) -> Monitor:
    def loss(model: nn.Module) -> Tensor:
        x, y = tokens()
        kept = torch.rand(y.shape) < 0.4
        each = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none")
        masked = each * kept.flatten()
        return masked.mean() if wrong else masked.sum() / kept.sum().clamp(min=1)

    model = Decoder()
    return train(model, adamw(model), loss)
