"""A further batch of errors: the same arrows of a step in other models, losses and loops."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from conserved import Monitor
from error_programs.case import case
from error_programs.forum import ANY, Digits, Mlp, images, loss_of, pictures_loss, rows, text_loss
from error_programs.forum_pairs import pair, reduce, run, start
from error_programs.models import Recurrent, tokens
from error_programs.training import train


def near(outputs: Tensor, goal: Tensor, kind: Any) -> Tensor:
    return kind(outputs, goal)


class Regressor(nn.Module):
    """A regression of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@case(
    "an absolute error broadcasts (n, 1) against (n)", *ANY, words="broadcast|shape", source="l1_loss warnings ignored"
)
def absolute_broadcast(wrong: bool) -> Monitor:
    def loss(model: nn.Module) -> Tensor:
        x, _ = rows(16)
        z, goal = model(x), x.sum(1)
        return (z - goal).abs().mean() if wrong else (z[:, 0] - goal).abs().mean()

    model = Regressor()
    return train(model, torch.optim.Adam(model.parameters(), 1e-3), loss)


@case(
    "a Huber loss broadcasts (n) against (n, 1)", *ANY, words="broadcast|shape", source="smooth_l1_loss in Q-learning"
)
def huber_broadcast(wrong: bool) -> Monitor:
    def loss(model: nn.Module) -> Tensor:
        x, _ = rows(16)
        z, goal = model(x)[:, 0], x.sum(1, keepdim=True)
        d = z - goal if wrong else z - goal[:, 0]
        return torch.where(d.abs() < 1, d * d / 2, d.abs() - 0.5).mean()

    model = Regressor()
    return train(model, torch.optim.Adam(model.parameters(), 1e-3), loss)


@case(
    "layers are frozen after zero_grad(set_to_none=False) and weight decay moves them",
    *ANY,
    words="frozen|moved",
    source="requires_grad_(False) in mid-run with AdamW",
    at=4,
)
def frozen_decays(wrong: bool) -> Monitor:
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    with Monitor(model, optimizer) as monitor:
        for number in range(1, 9):
            if number == 4:
                model.body.requires_grad_(False)
            optimizer.zero_grad(set_to_none=not wrong)
            loss_of(model).backward()
            optimizer.step()
            monitor.step()
    return monitor


@case(
    "model.train() in the loop puts frozen batch norms back into train mode",
    *ANY,
    words="statistic|norm|mode",
    at=4,
    source="fine-tuning with a backbone in eval mode",
)
def frozen_norms_trained(wrong: bool) -> Monitor:
    model = Digits()
    for m in (model.conv1, model.bn1, model.conv2, model.bn2):
        m.requires_grad_(False)

    def mode(number: int) -> None:
        model.train()
        if number < 4 or not wrong:
            model.bn1.eval()
            model.bn2.eval()

    return train(model, torch.optim.AdamW(model.fc.parameters(), 1e-3), pictures_loss, steps=8, before=mode)


@case(
    "attention drops entries in eval mode",
    *ANY,
    words="drop|random",
    at=4,
    source="dropout_p in scaled_dot_product_attention",
)
def attention_drops(wrong: bool) -> Monitor:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.qkv, self.head = nn.Embedding(23, 16), nn.Linear(16, 48), nn.Linear(16, 23)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(self.embedding(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            p = 0.2 if wrong or self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
            return self.head(y.transpose(1, 2).flatten(2))

    model = Net()

    def evaluate(number: int) -> None:
        if number == 3:
            model.eval()
            with torch.no_grad():
                model(tokens()[0])
            model.train()

    return train(model, torch.optim.AdamW(model.parameters(), 1e-3), text_loss, after=evaluate)


@case(
    "a helper of the model is decorated with no_grad",
    *ANY,
    words="no_grad|gradient",
    source="@torch.no_grad() left on encode()",
)
def decorated(wrong: bool) -> Monitor:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = nn.Sequential(nn.Linear(10, 16), nn.ReLU()), nn.Linear(16, 5)

        def encode(self, x: Tensor) -> Tensor:
            with torch.set_grad_enabled(not wrong):
                return self.encoder(x)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.encode(x))

    model = Net()
    return train(model, torch.optim.AdamW(model.parameters(), 1e-3), loss_of)


@case(
    "weights leave the flat buffer that the optimizer steps",
    *ANY,
    words="land|wrote|step|moved|held|change",
    at=4,
    source="flattened parameters and p.data = p.data.clone()",
)
def left_flat_buffer(wrong: bool) -> Monitor:
    model = Mlp()
    shapes = [p.shape for p in model.parameters()]
    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in model.parameters()]))
    parts = flat.data.split([s.numel() for s in shapes])
    for p, part, shape in zip(model.parameters(), parts, shapes, strict=True):
        p.data = part.view(shape)
    optimizer = torch.optim.SGD([flat], 0.05)
    with Monitor(model, optimizer) as monitor:
        for number in range(1, 9):
            model.zero_grad()
            loss_of(model).backward()
            flat.grad = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            optimizer.step()
            if wrong and number == 3:
                for p in model.parameters():
                    p.data = p.data.clone()
            monitor.step()
    return monitor


@case(
    "sharpness-aware minimisation does not clear gradients between its passes",
    *ANY,
    words="zero_grad|gradient|clear",
    source="SAM ports",
)
def sharpness_not_cleared(wrong: bool) -> Monitor:
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with Monitor(model, optimizer) as monitor:
        for _ in range(6):
            optimizer.zero_grad()
            x, y = rows()
            F.cross_entropy(model(x), y).backward()
            kept = [p.detach().clone() for p in model.parameters()]
            with torch.no_grad():
                for p in model.parameters():
                    assert p.grad is not None
                    p.add_(p.grad, alpha=0.05)
            if not wrong:
                optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                for p, old in zip(model.parameters(), kept, strict=True):
                    p.copy_(old)
            optimizer.step()
            monitor.step()
    return monitor


@case(
    "the loop goes on with a model that was loaded anew and the optimizer has the old one",
    *ANY,
    words="gradient|ran|model|optimizer|step",
    at=4,
    source="model = torch.load() in mid-run",
)
def model_reloaded(wrong: bool) -> Monitor:
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    used = model
    with Monitor(model, optimizer) as monitor:
        for number in range(1, 9):
            if wrong and number == 4:
                used = copy.deepcopy(model)
            optimizer.zero_grad()
            loss_of(used).backward()
            optimizer.step()
            monitor.step()
    return monitor


@case("the rate is set to zero for a test and not set back", *ANY, words="rate", at=4, source="lr = 0 dry runs")
def rate_left_zero(wrong: bool) -> Monitor:
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def before(number: int) -> None:
        if wrong and number == 4:
            for group in optimizer.param_groups:
                group["lr"] = 0.0

    return train(model, optimizer, loss_of, steps=8, before=before)


@case(
    "hard samples of a Gumbel softmax have no straight-through gradient",
    *ANY,
    words="gradient|detach|cut",
    source="one_hot(argmax) in discrete autoencoders",
)
def hard_samples(wrong: bool) -> Monitor:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.table, self.head = (
                nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 6)),
                nn.Linear(6, 16),
                nn.Linear(16, 5),
            )

        def forward(self, x: Tensor) -> Tensor:
            p = self.encode(x).softmax(-1)
            hard = F.one_hot(p.argmax(-1), 6).float()
            return self.head(self.table(hard if wrong else hard + p - p.detach()))

    model = Net()
    return train(model, torch.optim.AdamW(model.parameters(), 1e-3), loss_of)


@case(
    "gain and matrix of a branch both start at zero",
    *ANY,
    words="zero|never",
    source="zero-initialised residual branches",
)
def both_zero(wrong: bool) -> Monitor:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.branch, self.head = nn.Linear(10, 16), nn.Linear(16, 16, bias=False), nn.Linear(16, 5)
            self.gate = nn.Parameter(torch.zeros(16))
            if wrong:
                nn.init.zeros_(self.branch.weight)

        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.first(x))
            return self.head(h + self.gate * self.branch(h))

    model = Net()
    return train(model, torch.optim.AdamW(model.parameters(), 1e-3), loss_of)


@case(
    "weights are swapped for their average between forward and backward",
    *ANY,
    words="gradient|wrote|weights|identity",
    source="evaluation with averaged weights at the wrong place",
)
def swapped_too_early(wrong: bool) -> Monitor:
    model = Mlp()
    average = [torch.randn_like(p) * 0.1 + p.detach() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with Monitor(model, optimizer) as monitor:
        for _ in range(6):
            optimizer.zero_grad()
            loss = loss_of(model)
            kept = [p.data.clone() for p in model.parameters()]
            if wrong:
                for p, a in zip(model.parameters(), average, strict=True):
                    p.data.copy_(a)
            loss.backward()
            for p, old in zip(model.parameters(), kept, strict=True):
                p.data.copy_(old)
            optimizer.step()
            monitor.step()
    return monitor


@case(
    "the second loss is differentiated after the step and cleared",
    *ANY,
    words="cleared|after|thrown|gradient",
    source="two losses, misplaced indentation",
)
def second_after_step(wrong: bool) -> Monitor:
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with Monitor(model, optimizer) as monitor:
        for _ in range(6):
            optimizer.zero_grad()
            loss_of(model).backward()
            if not wrong:
                (0.5 * model(rows()[0]).square().mean()).backward()
            optimizer.step()
            if wrong:
                (0.5 * model(rows()[0]).square().mean()).backward()
            monitor.step()
    return monitor


@case("a recurrent language model never clears its gradients", *ANY, words="zero_grad", at=2, source="RNN tutorials")
def recurrent_not_cleared(wrong: bool) -> Monitor:
    model = Recurrent()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Monitor(model, optimizer) as monitor:
        for _ in range(6):
            if not wrong:
                optimizer.zero_grad()
            text_loss(model).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            monitor.step()
    return monitor


@case(
    "a convolutional network stays in eval mode after its first validation",
    *ANY,
    words="eval mode",
    at=4,
    source="missing model.train()",
)
def conv_in_eval(wrong: bool) -> Monitor:
    model = Digits()

    def after(number: int) -> None:
        if number == 3:
            model.eval()
            with torch.no_grad():
                model(images()[0])
            if not wrong:
                model.train()

    return train(model, torch.optim.SGD(model.parameters(), 0.05), pictures_loss, steps=8, after=after)


@case(
    "the decoder of an autoencoder is in no group",
    *ANY,
    words="no optimizer|holds",
    source="Adam(encoder.parameters())",
)
def decoder_not_held(wrong: bool) -> Monitor:
    model = nn.ModuleDict({"encoder": Mlp(10, 16, 4), "decoder": Mlp(4, 16, 10)})

    class Auto(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: Tensor) -> Tensor:
            return model["decoder"](model["encoder"](x))

    auto = Auto()
    optimizer = torch.optim.Adam((model["encoder"] if wrong else auto).parameters(), 1e-3)
    return train(auto, optimizer, lambda m: F.mse_loss(m(x := rows()[0]), x))


@case(
    "both optimizers of a game hold the generator",
    *ANY,
    words="two|both|no optimizer|holds|twice",
    source="copy and paste in GANs",
)
def both_hold_generator(wrong: bool) -> Monitor:
    game = nn.ModuleDict({"g": Mlp(6, 16, 10), "d": Mlp(10, 16, 1)})
    og = torch.optim.Adam(game["g"].parameters(), 1e-3)
    od = torch.optim.Adam(game["g" if wrong else "d"].parameters(), 1e-3)
    with Monitor(game, [og, od]) as monitor:
        for _ in range(6):
            game.zero_grad()
            fake = game["g"](torch.randn(12, 6)).detach()
            (F.softplus(game["d"](fake)) + F.softplus(-game["d"](rows()[0]))).mean().backward()
            od.step()
            game.zero_grad()
            F.softplus(-game["d"](game["g"](torch.randn(12, 6)))).mean().backward()
            og.step()
            monitor.step()
    return monitor


@case(
    "the second branch of a pair of equal encoders is a copy that nobody trains",
    *ANY,
    words="no optimizer|gradient|copy|holds|outside",
    source="siamese networks by deepcopy",
)
def copied_branch(wrong: bool) -> Monitor:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = Mlp(10, 16, 8)
            self.right = copy.deepcopy(self.left) if wrong else self.left

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return F.cosine_similarity(self.left(a), self.right(b))

    model = Pair()

    def loss(model: nn.Module) -> Tensor:
        x, _ = rows()
        return 1 - model(x, x + 0.1 * torch.randn_like(x)).mean()

    return train(model, torch.optim.Adam(model.left.parameters(), 1e-3), loss)


@case(
    "weights are averaged at the end only and the averaged model was never updated",
    *ANY,
    words="average",
    source="AveragedModel without update_parameters()",
)
def never_averaged(wrong: bool) -> Monitor:
    model = Mlp()
    average = AveragedModel(model)

    def after(_: int) -> None:
        if not wrong:
            average.update_parameters(model)

    monitor = train(model, torch.optim.AdamW(model.parameters(), 1e-3), loss_of, after=after)
    average.eval()
    return monitor


@case(
    "an accumulating loop scales its loss in the log and not for the backward",
    *ANY,
    words="scale|factor",
    how="call",
    source="loss /= n after backward()",
)
def scaled_in_the_log(wrong: bool) -> Monitor:
    def loss(model: nn.Module) -> Tensor:
        return sum((loss_of(model) for _ in range(4)), torch.zeros(())) / (1 if wrong else 4)

    model = Mlp()
    return train(model, torch.optim.SGD(model.parameters(), 0.05), loss)


@case(
    "gradients are stored in bfloat16 between backward and step",
    *ANY,
    words="bfloat16|round|precision|gradient",
    source="gradient offloading in half precision",
)
def rounded_gradients(wrong: bool) -> Monitor:
    model = Mlp()

    def between(_: int) -> None:
        for p in model.parameters():
            if wrong and p.grad is not None:
                p.grad = p.grad.bfloat16().float()

    return train(model, torch.optim.SGD(model.parameters(), 0.05), loss_of, between=between)


@case(
    "one head of two gets the other's gradient by a wrong index",
    *ANY,
    words="gradient",
    at=1,
    source="multi-head losses in a loop with a late-binding closure",
)
def late_binding(wrong: bool) -> Monitor:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.heads = Mlp(10, 16, 16), nn.ModuleList(nn.Linear(16, 5) for _ in range(3))

        def forward(self, x: Tensor) -> list[Tensor]:
            h = F.relu(self.body(x))
            calls = [lambda i=i: self.heads[2 if wrong else i](h) for i in range(3)]
            return [call() for call in calls]

    model = Heads()

    def loss(model: nn.Module) -> Tensor:
        x, y = rows()
        return sum((F.cross_entropy(z, y) for z in model(x)), torch.zeros(()))

    return train(model, torch.optim.AdamW(model.parameters(), 1e-3), loss)


@case(
    "a custom SGD divides its momentum by one minus the decay",
    *ANY,
    words="rule|update|momentum",
    source="hand-written optimizers",
)
def own_momentum(wrong: bool) -> Monitor:
    class Own(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    b = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                    b.mul_(0.9).add_(p.grad)
                    p.sub_(group["lr"] * b * (10 if wrong and p.ndim == 1 else 1))

    model = Mlp()
    return train(model, Own(model.parameters(), 0.01, momentum=0.9), loss_of)


@pair(
    "gradients are cleared on process 0 only",
    "zero_grad|gradient|differ",
    at=2,
    source="if rank == 0 around zero_grad()",
)
def cleared_on_one(wrong: bool, rank: int) -> Monitor:
    model = start(rank)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with Monitor(model, optimizer) as monitor:
        for _ in range(5):
            if rank == 0 or not wrong:
                optimizer.zero_grad()
            loss_of(model).backward()
            reduce(model)
            optimizer.step()
            monitor.step()
    return monitor


@pair("owners send their weights before the step", "parameter|differ|weights|land|lag", source="hand-written ZeRO")
def sent_before_step(wrong: bool, rank: int) -> Monitor:
    model = start(rank)
    own = [p for i, p in enumerate(model.parameters()) if i % 2 == rank]
    optimizer = torch.optim.AdamW(own, 1e-2)

    def send() -> None:
        for i, p in enumerate(model.parameters()):
            dist.broadcast(p.data, i % 2)

    with Monitor(model, optimizer) as monitor:
        for _ in range(5):
            model.zero_grad()
            loss_of(model).backward()
            reduce(model)
            if wrong:
                send()
            optimizer.step()
            if not wrong:
                send()
            monitor.step()
    return monitor


@pair(
    "a router is excluded from the reduction together with its experts",
    "differ|reduc|gradient",
    source="filters by name in MoE",
)
def router_excluded(wrong: bool, rank: int) -> Monitor:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Linear(10, 16), nn.Linear(16, 5)
            self.moe = nn.ModuleDict({"router": nn.Linear(16, 2), "expert": nn.Linear(16, 16)})

        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.stem(x))
            return self.head(h + self.moe["router"](h).softmax(-1)[:, :1] * F.relu(self.moe["expert"](h)))

    model = start(rank, Mixture)

    def between(_: int) -> None:
        for name, p in model.named_parameters():
            if p.grad is not None and not (name.startswith("moe") and (wrong or "expert" in name)):
                dist.all_reduce(p.grad)
                p.grad /= 2

    torch.manual_seed(40 + rank)
    nn.init.normal_(model.moe["expert"].weight, std=0.2)
    return run(model, torch.optim.SGD(model.parameters(), 0.05), between=between)


@pair(
    "one process reads the data of the last epoch again and the other goes on",
    "x",
    how="outside",
    why="Labels and inputs are data: every weight, gradient and update is that of these data.",
    source="samplers",
)
def other_data(wrong: bool, rank: int) -> Monitor:
    model = DistributedDataParallel(start(rank))
    torch.manual_seed(100 + (rank if not wrong else rank * 2))
    return run(model, torch.optim.SGD(model.parameters(), 0.05))


@pair(
    "clipping uses the norm of the local gradient before the reduction",
    "clip|differ|reduc|gradient|sum",
    source="clip_grad_norm_ before all_reduce",
)
def clipped_before(wrong: bool, rank: int) -> Monitor:
    model = start(rank)

    def between(_: int) -> None:
        if wrong:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        reduce(model)
        if not wrong:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    return run(model, torch.optim.SGD(model.parameters(), 0.5), between=between)


@pair(
    "the average of one process is loaded into its model for an evaluation and stays there",
    "parameter|differ|wrote|weights",
    at=4,
    source="EMA on rank 0",
)
def average_stays(wrong: bool, rank: int) -> Monitor:
    model = DistributedDataParallel(start(rank))
    average = [p.detach().clone() for p in model.parameters()]

    def after(number: int) -> None:
        with torch.no_grad():
            for a, p in zip(average, model.parameters(), strict=True):
                a.lerp_(p, 0.1)
            if wrong and number == 3 and rank == 0:
                for a, p in zip(average, model.parameters(), strict=True):
                    p.copy_(a)

    return run(model, torch.optim.SGD(model.parameters(), 0.1), after=after, steps=6)


@pair(
    "parameters that one process did not use are stepped there with old momentum",
    "gradient|differ|replica|parameter",
    at=2,
    source="conditional branches without a wrapper",
)
def branch_not_reduced(wrong: bool, rank: int) -> Monitor:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.a, self.b, self.head = (
                nn.Linear(10, 16),
                nn.Linear(16, 16),
                nn.Linear(16, 16),
                nn.Linear(16, 5),
            )

        def forward(self, x: Tensor, which: int) -> Tensor:
            h = F.relu(self.stem(x))
            return self.head((self.a, self.b)[which](h))

    model = start(rank, Branches)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    with Monitor(model, optimizer) as monitor:
        for number in range(6):
            optimizer.zero_grad()
            x, y = rows()
            F.cross_entropy(model(x, (number + rank) % 2), y).backward()
            for p in model.parameters():
                if not wrong and p.grad is None:
                    p.grad = torch.zeros_like(p)
            for name, p in model.named_parameters():
                if p.grad is not None and not (wrong and name[0] in "ab"):
                    dist.all_reduce(p.grad)
                    p.grad /= 2
            optimizer.step()
            monitor.step()
    return monitor
