"""Errors of tasks: adversarial networks, reinforcement learning, distillation, metric learning, sequences, losses."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from conserved import Monitor
from error_programs.case import case
from error_programs.habits import ANY
from error_programs.trainers import Net, text, vectors


def layers(*sizes: int, act: type[nn.Module] = nn.Tanh) -> Any:
    """Return a network of linear layers."""
    parts: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        parts += [nn.Linear(a, b), act()]
    return nn.Sequential(*parts[:-1])


class Game(nn.Module):
    """A generator and a critic."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = layers(4, 16, 6), layers(6, 16, 16, 1, act=nn.LeakyReLU)

    def critic_loss(self, real: Tensor) -> Tensor:
        """Return the loss of the critic."""
        fake = self.generator(torch.randn(len(real), 4)).detach()
        return (F.softplus(-self.critic(real)) + F.softplus(self.critic(fake))).mean()

    def generator_loss(self, count: int) -> Tensor:
        """Return the loss of the generator."""
        return F.softplus(-self.critic(self.generator(torch.randn(count, 4)))).mean()


def play(wrong: str) -> Monitor:
    """Train a game in which one line is wrong."""
    game = Game()
    first = torch.optim.Adam(game.critic.parameters(), 2e-3, betas=(0.5, 0.999))
    second = torch.optim.Adam(game.generator.parameters(), 1e-3, betas=(0.5, 0.999))
    with Monitor(game, [first, second]) as monitor:
        for _ in range(7):
            real = torch.randn(12, 6) * 0.5 + 1
            if wrong != "stays frozen":
                game.critic.requires_grad_(True)
            if wrong == "cleared only by the generator":
                second.zero_grad()
            else:
                first.zero_grad()
            loss = game.critic_loss(real)
            if loss.requires_grad:
                loss.backward()
                first.step()
            game.critic.requires_grad_(False)
            if wrong != "cleared only by the generator":
                second.zero_grad()
            game.generator_loss(12).backward()
            if wrong == "steps the critic twice":
                first.step()
            elif wrong != "never steps":
                second.step()
            monitor.step()
    return monitor


@case(
    "the critic is frozen for the generator's pass and never thawed", "loop", "gradient", "update",
    words="frozen|requires_grad|no gradient|not step|stand", at=2, source="DCGAN loops with set_requires_grad",
)  # fmt: skip
def critic_stays_frozen(wrong: bool) -> Monitor:
    return play("stays frozen" if wrong else "")


@case(
    "the generator's pass is followed by a step of the critic", "loop", words="step|used already|zero|gradient",
    source="two optimizers with swapped names",
)  # fmt: skip
def wrong_optimizer_steps(wrong: bool) -> Monitor:
    return play("steps the critic twice" if wrong else "")


@case("the generator's optimizer is never stepped", "loop", "update", words="step", source="code-soup 69")
def generator_never_steps(wrong: bool) -> Monitor:
    return play("never steps" if wrong else "")


@case(
    "gradients of the critic are never cleared", "loop", words="zero_grad", at=2, source="Lightning 557",
)  # fmt: skip
def critic_not_cleared(wrong: bool) -> Monitor:
    return play("cleared only by the generator" if wrong else "")


class ActorCritic(nn.Module):
    """A policy and a value function over observations."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.value = layers(6, 16, 4), layers(6, 16, 1)


@case(
    "the loss of the actor leaves its gradient in the critic, which is stepped afterwards", *ANY,
    words="two|pass|critic|another|left", source="REDQ 3, RLlib 65125",
)  # fmt: skip
def actor_reaches_critic(wrong: bool) -> Monitor:
    model = nn.ModuleDict({"actor": layers(6, 16, 2), "critic": layers(8, 16, 16, 1, act=nn.ReLU)})
    first = torch.optim.Adam(model["actor"].parameters(), 1e-3)
    second = torch.optim.Adam(model["critic"].parameters(), 1e-3)
    with Monitor(model, [first, second]) as monitor:
        for _ in range(6):
            s, a = torch.randn(16, 6), torch.randn(16, 2)
            target = (s[:, :1] * a[:, :1]).detach()
            first.zero_grad()
            second.zero_grad()
            F.mse_loss(model["critic"](torch.cat([s, a], 1)), target).backward()
            if not wrong:
                second.step()
                model["critic"].requires_grad_(False)
            (-model["critic"](torch.cat([s, model["actor"](s)], 1))).mean().backward()
            first.step()
            if wrong:
                second.step()
            model["critic"].requires_grad_(True)
            monitor.step()
    return monitor


@case(
    "the advantage is not detached and the policy's loss trains the value", *ANY, words="value|detach|advantage",
    source="encode-attend-navigate 3", how="outside",
    why="One loss with a gradient into both networks is a right program of another method.",
)  # fmt: skip
def advantage_not_detached(wrong: bool) -> Monitor:
    model = ActorCritic()
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-3)
    with Monitor(model, optimizer) as monitor:
        for _ in range(6):
            s = torch.randn(24, 6)
            policy = torch.distributions.Categorical(logits=model.actor(s))
            action = policy.sample()
            reward = (action == s[:, :4].argmax(1)).float()
            advantage = reward - model.value(s).squeeze(1)
            weight = advantage if wrong else advantage.detach()
            loss = -(policy.log_prob(action) * weight).mean() + 0.5 * advantage.square().mean()
            optimizer.zero_grad()
            (loss - 0.01 * policy.entropy().mean()).backward()
            optimizer.step()
            monitor.step()
    return monitor


def q_learning(wrong: str) -> Monitor:
    """Train a network of action values with a target network."""
    online = layers(6, 24, 4, act=nn.ReLU)
    target = online if wrong == "alias" else copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.Adam(online.parameters(), 1e-3)
    with Monitor(online, optimizer) as monitor:
        for number in range(8):
            s, a, r = torch.randn(16, 6), torch.randint(4, (16, 1)), torch.randn(16)
            with torch.no_grad():
                best = target(torch.randn(16, 6)).max(1)
                goal = r + 0.9 * (best.indices.float() if wrong == "indices" else best.values)
            optimizer.zero_grad()
            F.smooth_l1_loss(online(s).gather(1, a).squeeze(1), goal).backward()
            optimizer.step()
            if number % 3 == 2:
                target.load_state_dict(online.state_dict())
            monitor.step()
    return monitor


@case(
    "the target network is the network itself", *ANY, words="itself|same|own|target", source="easy-rl 117", at=3,
)  # fmt: skip
def target_is_itself(wrong: bool) -> Monitor:
    return q_learning("alias" if wrong else "")


@case(
    "the goal of action values is the index of the best action", *ANY, words="target|index", how="outside",
    source="max(1)[1]", why="Targets are data.",
)  # fmt: skip
def goal_is_index(wrong: bool) -> Monitor:
    return q_learning("indices" if wrong else "")


@case(
    "the reference model of a preference loss is the policy itself", *ANY, words="itself|same|own|reference",
    source="DPO scripts with ref_model = model",
)  # fmt: skip
def reference_is_policy(wrong: bool) -> Monitor:
    from error_programs.models import Decoder

    policy = Decoder()
    reference = policy if wrong else copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-3)

    def score(model: nn.Module, rows: Tensor) -> Tensor:
        logp = model(rows[:, :-1]).log_softmax(-1)
        return logp.gather(-1, rows[:, 1:, None]).squeeze(-1).sum(-1)

    (rows,) = text().tensors
    with Monitor(policy, optimizer) as monitor:
        for _ in range(6):
            good, bad = rows[torch.randperm(48)[:6]], torch.randint(23, (6, 9))
            with torch.no_grad():
                base = score(reference, good) - score(reference, bad)
            margin = score(policy, good) - score(policy, bad) - base
            optimizer.zero_grad()
            F.softplus(-0.1 * margin).mean().backward()
            optimizer.step()
            monitor.step()
    return monitor


def distil(wrong: str) -> Monitor:
    """Train a student on labels and on a teacher's outputs."""

    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3))
            self.head = nn.Linear(32, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))

    class Distiller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = Net(drop=0.0), Teacher().requires_grad_(False)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                goal = self.teacher(x)
            return self.student(x), goal

    model, temperature = Distiller(), 3.0
    optimizer = torch.optim.AdamW(model.student.parameters(), 2e-3)
    model.train()
    if wrong != "train mode":
        model.teacher.eval()
    with Monitor(model, optimizer) as monitor:
        for x, y in DataLoader(vectors(96), batch_size=12, shuffle=True):
            logits, goal = model(x)
            if wrong == "own logits":
                goal = logits.detach()
            soft = F.kl_div(
                F.log_softmax(logits / temperature, 1), F.softmax(goal / temperature, 1), reduction="batchmean"
            )
            optimizer.zero_grad()
            (F.cross_entropy(logits, y) + temperature**2 * soft).backward()
            optimizer.step()
            monitor.step()
    return monitor


@case(
    "a teacher is left in train mode", "loop", words="teacher|frozen|statistics|mode",
    source="knowledge-distillation 2",
)  # fmt: skip
def teacher_in_train_mode(wrong: bool) -> Monitor:
    return distil("train mode" if wrong else "")


@case(
    "a student is distilled from its own logits", *ANY, words="zero|own|itself",
    source="labml annotated implementations 66",
)  # fmt: skip
def distilled_from_itself(wrong: bool) -> Monitor:
    return distil("own logits" if wrong else "")


class Angular(nn.Module):
    """A loss with weights of its own: cosines to class centres with a margin."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(5, 5))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        cosines = F.normalize(z) @ F.normalize(self.centres).T
        return F.cross_entropy(8 * (cosines - 0.1 * F.one_hot(y, 5)), y)


def metric_learning(wrong: str) -> Monitor:
    """Train a network with a loss that has weights."""
    model, criterion = Net(drop=0.0), Angular()
    parameters = [*model.parameters(), *([] if wrong == "left out" else criterion.parameters())]
    optimizer = torch.optim.SGD(parameters, 0.05, momentum=0.9)
    with Monitor(model, optimizer) as monitor:
        for x, y in DataLoader(vectors(96), batch_size=12, shuffle=True):
            (model if wrong == "not cleared" else optimizer).zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            monitor.step()
    return monitor


@case(
    "the weights of a loss are in no optimizer", "loop", words="no optimizer|outside", source="ArcFace ports",
)  # fmt: skip
def loss_weights_left_out(wrong: bool) -> Monitor:
    return metric_learning("left out" if wrong else "")


@case(
    "model.zero_grad() leaves the gradients of a loss's weights", "loop", words="zero_grad", at=2,
    source="ArcFace ports",
)  # fmt: skip
def loss_weights_not_cleared(wrong: bool) -> Monitor:
    return metric_learning("not cleared" if wrong else "")


class Towers(nn.Module):
    """Two encoders and a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = layers(10, 16, 8, act=nn.GELU), layers(6, 16, 8, act=nn.GELU)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, a: Tensor, b: Tensor, *, fixed: bool = False, dim: int = 1) -> Tensor:
        scale = torch.tensor(float(self.logit_scale)) if fixed else self.logit_scale
        return scale.exp() * F.normalize(self.left(a), dim=dim) @ F.normalize(self.right(b), dim=dim).T


def contrast(wrong: str) -> Monitor:
    """Train two encoders on pairs."""
    model = Towers()
    parts = [{"params": model.left.parameters(), "lr": 2e-3}, {"params": model.right.parameters()}]
    if wrong != "left out":
        parts.append({"params": [model.logit_scale], "lr": 1e-2})
    optimizer = torch.optim.AdamW(parts, 1e-3)
    mix = torch.randn(10, 6)
    with Monitor(model, optimizer) as monitor:
        for _ in range(7):
            a = torch.randn(12, 10)
            b = a @ mix / 3 + 0.1 * torch.randn(12, 6)
            logits = model(a, b, fixed=wrong == "number", dim=0 if wrong == "batch" else 1)
            y = torch.arange(12)
            optimizer.zero_grad()
            ((F.cross_entropy(logits, y) + F.cross_entropy(logits.T, y)) / 2).backward()
            optimizer.step()
            monitor.step()
    return monitor


@case("a learned temperature is in no group of the optimizer", "loop", words="no optimizer", source="CLIP ports")
def temperature_left_out(wrong: bool) -> Monitor:
    return contrast("left out" if wrong else "")


@case(
    "a learned temperature is read as a number and gets no gradient", "loop", "gradient", words="gradient",
    source="float(self.logit_scale)",
)  # fmt: skip
def temperature_as_number(wrong: bool) -> Monitor:
    return contrast("number" if wrong else "")


@case(
    "features are normalised over the batch", *ANY, words="batch|example", source="F.normalize(dim=0)",
)  # fmt: skip
def normalised_over_batch(wrong: bool) -> Monitor:
    return contrast("batch" if wrong else "")


@case(
    "the key encoder of a momentum contrast gets gradients and is stepped", *ANY,
    words="average|gradient|wrote|writ|steps", source="MoCo ports without no_grad",
)  # fmt: skip
def keys_are_trained(wrong: bool) -> Monitor:
    class Momentum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = layers(10, 16, 8, act=nn.ReLU)
            self.key = copy.deepcopy(self.query)
            if not wrong:
                self.key.requires_grad_(False)

    model, queue = Momentum(), F.normalize(torch.randn(32, 8))
    optimizer = torch.optim.SGD(model.parameters() if wrong else model.query.parameters(), 0.05, momentum=0.9)
    with Monitor(model, optimizer) as monitor:
        for _ in range(7):
            x = torch.randn(12, 10)
            with torch.no_grad():
                for k, q in zip(model.key.parameters(), model.query.parameters(), strict=True):
                    k.lerp_(q, 0.05)
            q = F.normalize(model.query(x + 0.1 * torch.randn_like(x)))
            k = F.normalize(model.key(x + 0.1 * torch.randn_like(x)))
            logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.T], 1) / 0.2
            optimizer.zero_grad()
            F.cross_entropy(logits, torch.zeros(12, dtype=torch.long)).backward()
            optimizer.step()
            queue = torch.cat([k.detach(), queue])[:32]
            monitor.step()
    return monitor


class Attention(nn.Module):
    """Causal attention written by hand, with the ways to spoil its mask."""

    def __init__(self, width: int, wrong: str) -> None:
        super().__init__()
        self.qkv, self.out, self.wrong = nn.Linear(width, 3 * width), nn.Linear(width, width), wrong

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        if self.wrong == "not in place":
            scores.masked_fill(mask, float("-inf"))
        elif self.wrong != "after softmax":
            scores = scores.masked_fill(mask, float("-inf"))
        weights = scores.softmax(-1)
        if self.wrong == "after softmax":
            weights = weights.masked_fill(mask, 0.0)
        return self.out(weights @ v)


class Language(nn.Module):
    """A language model with attention of its own and sinusoids for positions."""

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.wrong = wrong
        self.embedding, self.norm, self.head = nn.Embedding(23, 16), nn.LayerNorm(16), nn.Linear(16, 23)
        self.attention, self.forward_part = Attention(16, wrong), layers(16, 32, 16, act=nn.GELU)
        angles = torch.arange(64)[:, None] / 10 ** (torch.arange(8) / 4)
        self.register_buffer("table", torch.cat([angles.sin(), angles.cos()], 1))
        self.table: Tensor

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        h = h + (self.table[: h.shape[0], None] if self.wrong == "over batch" else self.table[: h.shape[1]])
        h = h + self.attention(h)
        return self.head(self.norm(h + self.forward_part(h)))


def language(wrong: str) -> Monitor:
    """Train a language model."""
    model = Language(wrong)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    with Monitor(model, optimizer) as monitor:
        for (rows,) in DataLoader(text(64), batch_size=8, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).backward()
            optimizer.step()
            monitor.step()
    return monitor


@case(
    "a mask is filled out of place and the result is thrown away", "loop", words="tokens it has to predict|next token",
    source="Qwen 933",
)  # fmt: skip
def masked_out_of_place(wrong: bool) -> Monitor:
    return language("not in place" if wrong else "")


@case(
    "the causal mask is applied after the softmax", "loop", words="tokens it has to predict|last one|next token",
    source="timm 2236",
)  # fmt: skip
def masked_after_softmax(wrong: bool) -> Monitor:
    return language("after softmax" if wrong else "")


@case(
    "positions are added along the batch", *ANY, words="batch|example|position",
    source="the tutorial's PositionalEncoding with batch_first=True",
)  # fmt: skip
def positions_over_batch(wrong: bool) -> Monitor:
    return language("over batch" if wrong else "")


@case(
    "the decoder of a translation is given the tokens that it has to predict", "loop", words="labels|predict|token",
    source="teacher forcing without a shift",
)  # fmt: skip
def decoder_not_shifted(wrong: bool) -> Monitor:
    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(23, 16), nn.Linear(16, 23)
            self.core = nn.Transformer(16, 2, 1, 1, 32, 0.0, batch_first=True)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
            return self.head(self.core(self.embedding(source), self.embedding(target), tgt_mask=mask))

    model = Translator()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with Monitor(model, optimizer) as monitor:
        for (rows,) in DataLoader(text(64), batch_size=8, shuffle=True):
            target = rows.flip(1)
            given, wanted = (target, target) if wrong else (target[:, :-1], target[:, 1:])
            optimizer.zero_grad()
            F.cross_entropy(model(rows, given).transpose(1, 2), wanted).backward()
            optimizer.step()
            monitor.step()
    return monitor


def evaluated(model: nn.Module, steps: int = 8) -> Monitor:
    """Train a classifier with an evaluation in the middle."""
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    with Monitor(model, optimizer) as monitor:
        for number, (x, y) in enumerate(DataLoader(vectors(12 * steps), batch_size=12), 1):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            monitor.step()
            if number == 3:
                model.eval()
                with torch.no_grad():
                    model(x)
                model.train()
    return monitor


@case(
    "running statistics of a batch norm have momentum zero and never move", "loop", words="statistic|running|momentum",
    source="momentum=0.0 for 'no momentum'",
)  # fmt: skip
def statistics_never_move(wrong: bool) -> Monitor:
    norm = nn.BatchNorm1d(16, momentum=0.0 if wrong else 0.1)
    return evaluated(nn.Sequential(nn.Linear(10, 16), norm, nn.ReLU(), nn.Linear(16, 5)))


@case(
    "dropout is made inside of forward and never hears of eval()", "loop", words="eval", at=4,
    source="nn.Dropout(p)(x) in forward",
)  # fmt: skip
def dropout_made_in_forward(wrong: bool) -> Monitor:
    class Fresh(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = F.gelu(self.encoder(x))
            return self.head(nn.Dropout(0.2)(h) if wrong else self.drop(h))

    return evaluated(Fresh())


@case(
    "stochastic depth skips a block in evaluations too", "loop", words="eval", at=4,
    source="drop_path without self.training",
)  # fmt: skip
def depth_in_eval(wrong: bool) -> Monitor:
    class Deep(Net):
        def __init__(self) -> None:
            super().__init__(drop=0.0)
            self.block = layers(16, 24, 16, act=nn.GELU)

        def forward(self, x: Tensor) -> Tensor:
            h = self.encoder(x)
            y = self.block(h)
            if wrong or self.training:
                y = y * torch.empty(len(x), 1).bernoulli_(0.8) / 0.8
            return self.head(h + y)

    return evaluated(Deep())


def fit(model: nn.Module, loss: Any, steps: int = 8) -> Monitor:
    """Train on vectors with a loss of outputs and labels."""
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    with Monitor(model, optimizer) as monitor:
        for x, y in DataLoader(vectors(12 * steps), batch_size=12):
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
            monitor.step()
    return monitor


@case("ctc_loss is given logits", "loop", words="log", source="ctc_loss without log_softmax")
def ctc_of_logits(wrong: bool) -> Monitor:
    model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 60))

    def loss(z: Tensor, y: Tensor) -> Tensor:
        z = z.view(len(z), 10, 6).transpose(0, 1)
        lengths = torch.full((len(y),), 10), torch.full((len(y),), 1)
        return F.ctc_loss(z if wrong else z.log_softmax(-1), y[:, None] + 1, *lengths)

    return fit(model, loss)


@case(
    "gaussian_nll_loss is given the logarithm of the variance", "loop", "gradient", words="varian|zero",
    source="PyTorch forum",
)  # fmt: skip
def variance_of_logarithm(wrong: bool) -> Monitor:
    def clamped(z: Tensor, y: Tensor) -> Tensor:
        mean, log = z[:, 0], z[:, 1]
        variance = log.clamp(min=1e-6) if wrong else log.exp()
        return F.gaussian_nll_loss(mean, y.float() / 5, variance, eps=1e-2)

    return fit(Net(), clamped)


@case(
    "the labels of a cosine loss are 0 and 1 where it wants -1 and 1", "loop", "gradient", words="label|-1|zero",
    source="CosineEmbeddingLoss",
)  # fmt: skip
def cosine_labels(wrong: bool) -> Monitor:
    model = layers(10, 16, 8, act=nn.ReLU)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with Monitor(model, optimizer) as monitor:
        for x, y in DataLoader(vectors(96), batch_size=12):
            same = (y == y.roll(1)).long()
            optimizer.zero_grad()
            F.cosine_embedding_loss(model(x), model(x.roll(1, 0)), same if wrong else 2 * same - 1).backward()
            optimizer.step()
            monitor.step()
    return monitor


@case(
    "a real class is the one that the loss ignores", "loop", words="ignore|class|label",
    source="ignore_index=0 with classes from zero",
)  # fmt: skip
def real_class_ignored(wrong: bool) -> Monitor:
    return fit(Net(), lambda z, y: F.cross_entropy(z, y, ignore_index=0 if wrong else -100))


class ChunkedLoss(torch.autograd.Function):
    """Cross-entropy of a linear head in chunks, which makes gradients in its forward."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, y: Tensor, wrong: bool) -> Tensor:
        total, dh, dw = h.new_zeros(()), torch.empty_like(h), torch.zeros_like(weight)
        for part in torch.arange(len(h)).chunk(3):
            z = h[part] @ weight.T
            total += F.cross_entropy(z, y[part], reduction="sum")
            dz = (z.softmax(-1) - F.one_hot(y[part], weight.shape[0])) / len(h)
            dh[part] = dz @ weight
            dw = dz.T @ h[part] if wrong else dw + dz.T @ h[part]
        ctx.save_for_backward(dh, dw)
        return total / len(h)

    @staticmethod
    def backward(ctx: Any, coming: Tensor) -> tuple[Tensor | None, ...]:
        dh, dw = ctx.saved_tensors
        return coming * dh, coming * dw, None, None


@case(
    "chunks of a fused loss overwrite the gradient of the head", "gradient", words="gradient|backward|head",
    source="fused linear cross-entropies",
)  # fmt: skip
def chunks_overwrite(wrong: bool) -> Monitor:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.body = nn.Embedding(23, 16), layers(16, 32, 16, act=nn.ReLU)
            self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 23, bias=False)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.embedding(x)
            h = self.norm(h + self.body(h)).flatten(0, 1)
            return ChunkedLoss.apply(h, self.head.weight, y.flatten(), wrong)

    model = Fused()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with Monitor(model, optimizer) as monitor:
        for (rows,) in DataLoader(text(48), batch_size=8):
            optimizer.zero_grad()
            model(rows[:, :-1], rows[:, 1:]).backward()
            optimizer.step()
            monitor.step()
    return monitor


class Product(torch.autograd.Function):
    """A linear layer whose backward can forget to transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, wrong: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.wrong = wrong
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, coming: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return coming @ (weight.T if ctx.wrong else weight), coming.T @ x, None


@case(
    "the backward of a square linear layer multiplies by the transposed weight", "gradient", words="gradient|backward",
    source="hand-written linear layers",
)  # fmt: skip
def transposed_backward(wrong: bool) -> Monitor:
    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(10, 16), nn.Linear(16, 5)
            self.weight = nn.Parameter(torch.randn(16, 16) / 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x).relu()
            return self.last(Product.apply(h, self.weight, wrong).relu())

    return fit(Square(), F.cross_entropy)


@case(
    "an inner loop adapts the model itself and not a copy", *ANY, words="wrote|writ|not the optimizer|another", at=3,
    source="MAML ports",
)  # fmt: skip
def inner_loop_stays(wrong: bool) -> Monitor:
    model = layers(10, 16, 5, act=nn.ReLU)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with Monitor(model, optimizer) as monitor:
        for number in range(6):
            x, y = vectors(24).tensors
            fast = model if wrong and number >= 2 else copy.deepcopy(model)
            for _ in range(2):
                inner = torch.autograd.grad(F.cross_entropy(fast(x[:12]), y[:12]), list(fast.parameters()))
                with torch.no_grad():
                    for p, g in zip(fast.parameters(), inner, strict=True):
                        p.sub_(0.1 * g)
            outer = torch.autograd.grad(F.cross_entropy(fast(x[12:]), y[12:]), list(fast.parameters()))
            optimizer.zero_grad()
            for p, g in zip(model.parameters(), outer, strict=True):
                p.grad = g.clone()
            optimizer.step()
            monitor.step()
    return monitor
