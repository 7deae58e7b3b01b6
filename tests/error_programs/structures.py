"""Errors of a model's structure: adapters, experts, ties, targets, parameters that are replaced or cut off."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from conserved import Monitor
from error_programs.case import TinyLM, batch, case, mlp
from error_programs.models import ConvNet, Decoder
from error_programs.training import classify, predict_next, train


def adamw(parameters: Any, lr: float = 3e-3) -> torch.optim.AdamW:
    """Return AdamW over parameters."""
    return torch.optim.AdamW(parameters, lr=lr)


class Adapter(nn.Module):
    """A frozen linear layer with a low-rank adapter that can be merged."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))
        self.merged = False

    def merge(self) -> None:
        with torch.no_grad():
            self.base.weight += self.up @ self.down
        self.merged = True

    def unmerge(self) -> None:
        with torch.no_grad():
            self.base.weight -= self.up @ self.down
        self.merged = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return y if self.merged else y + x @ self.down.t() @ self.up.t()


def _adapted() -> Any:
    model = mlp()
    model[0], model[3] = Adapter(model[0]), Adapter(model[3])
    return model


@case("an adapter is merged for an evaluation and its flag is reset without unmerging", "update", "loop",
      words="wrote|frozen", at=4)  # fmt: skip
def merged_and_not_unmerged(wrong: bool) -> Monitor:
    model = _adapted()

    def evaluate(number: int) -> None:
        if number == 4:
            model.eval()
            for layer in (model[0], model[3]):
                layer.merge()
            with torch.no_grad():
                model(batch()[0])
            for layer in (model[0], model[3]):
                if wrong:
                    layer.merged = False
                else:
                    layer.unmerge()
            model.train()

    return train(model, adamw([p for p in model.parameters() if p.requires_grad]), before=evaluate)


@case("an adapter stays merged after an evaluation and gets no gradients", "loop", "gradient", words="gradient", at=4)
def stays_merged(wrong: bool) -> Monitor:
    model = _adapted()

    def evaluate(number: int) -> None:
        if number == 4:
            model[0].merge()
            with torch.no_grad():
                model(batch()[0])
            if not wrong:
                model[0].unmerge()

    return train(model, adamw([p for p in model.parameters() if p.requires_grad]), before=evaluate)


@case("reentrant checkpointing of frozen inputs leaves adapters without gradients", "loop", "gradient",
      words="gradient", at=1)  # fmt: skip
def checkpointed_adapters(wrong: bool) -> Monitor:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = _adapted()[:5], nn.Linear(12, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.body, x, use_reentrant=wrong))

    model = Checkpointed()
    return train(model, adamw([p for p in model.parameters() if p.requires_grad]))


@case("a top-1 router uses indices only and gets no gradient", "loop", "gradient", words="gradient", at=1, how="intent",
      why="Small parts without a gradient are common, as unused heads; the start-up line names them.",
      line="no gradient for router.weight")  # fmt: skip
def router_without_gradient(wrong: bool) -> Monitor:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(6, 3)
            self.experts = nn.ModuleList(nn.Linear(6, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            p = self.router(x).softmax(-1)
            best = p.argmax(-1)
            y = torch.stack([e(x) for e in self.experts], 1)
            y = y.gather(1, best[:, None, None].expand(-1, 1, 4))[:, 0]
            return y if wrong else y * p.gather(1, best[:, None])

    model = Experts()
    return train(model, adamw(model.parameters()))


@case("the balance loss of a router is added by its value", "loop", words="loss|detach|value", at=1)
def balance_by_value(wrong: bool) -> Monitor:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(6, 3)
            self.experts = nn.ModuleList(nn.Linear(6, 4) for _ in range(3))
            self.balance = torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            p = self.router(x).softmax(-1)
            self.balance = 3 * p.mean(0).pow(2).sum()
            top, index = p.topk(2)
            y = torch.stack([e(x) for e in self.experts], 1)
            y = y.gather(1, index[..., None].expand(-1, -1, 4))
            return (y * (top / top.sum(-1, keepdim=True))[..., None]).sum(1)

    def loss(model: Any) -> Tensor:
        x, y = batch()
        main = F.cross_entropy(model(x), y)
        return main + 0.1 * (model.balance.item() if wrong else model.balance)

    model = Experts()
    return train(model, adamw(model.parameters()), loss)


@case("a task's loss reads the other task's head", "loop", "gradient", words="gradient", at=1)
def wrong_head(wrong: bool) -> Monitor:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 4), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.body(x).relu()
            return self.a(h), self.b(h)

    def loss(model: Any) -> Tensor:
        x, y = batch()
        a, b = model(x)
        return F.cross_entropy(a, y) + F.cross_entropy(a if wrong else b, y.flip(0))

    model = Two()
    return train(model, adamw(model.parameters()), loss)


@case("a parameter is converted at once and becomes a plain tensor", "loop", words="parameter|tensor|optimizer", at=1)
def parameter_made_plain(wrong: bool) -> Monitor:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()
            if wrong:
                self.bias = nn.Parameter(torch.randn(4).double()).float()
            else:
                self.bias = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) + self.bias

    model = Scaled()
    return train(model, adamw(model.parameters()))


@case("the forward pass makes a parameter anew in every call", "loop", words="optimizer|parameter|replaced", at=2)
def parameter_made_anew(wrong: bool) -> Monitor:
    class Renewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.gain = mlp(), nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            if wrong:
                self.gain = nn.Parameter(self.gain.data.clamp(0, 2))
                return self.net(x) * self.gain
            return self.net(x) * self.gain.clamp(0, 2)

    model = Renewed()
    return train(model, adamw(model.parameters()))


@case("Embedding.from_pretrained freezes vectors that should be trained", "loop", words="frozen|requires_grad|no grad",
      at=1, how="intent", why="Frozen tensors in an optimizer are common; the start-up line names them.",
      line="frozen and in an optimizer: embedding.weight")  # fmt: skip
def pretrained_embedding_frozen(wrong: bool) -> Monitor:
    model = Decoder()
    vectors = torch.randn(23, 16)
    model.embedding = nn.Embedding.from_pretrained(vectors) if wrong else nn.Embedding.from_pretrained(vectors, False)
    return train(model, adamw(model.parameters()), predict_next)


@case("a tied head is untied by loading with assignment", "loop", words="tied|optimizer", at=3)
def untied_by_assignment(wrong: bool) -> Monitor:
    model = Decoder(tied=True)

    def load(number: int) -> None:
        if number == 3:
            state = {k: v.clone() for k, v in model.state_dict().items()}
            model.load_state_dict(state, assign=wrong)
            if wrong:
                optimizer.param_groups[0]["params"] = list(model.parameters())

    optimizer = adamw(model.parameters())
    return train(model, optimizer, predict_next, before=load)


@case("the target network is trained because its pass is not detached", "loop", words="target|optimizer|gradient", at=1)
def target_gets_gradients(wrong: bool) -> Monitor:
    class Values(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
            self.target = copy.deepcopy(self.online)

        def forward(self, x: Tensor) -> Tensor:
            return self.online(x)

    def loss(model: Any) -> Tensor:
        x, x2 = torch.randn(8, 6), torch.randn(8, 6)
        with torch.set_grad_enabled(wrong):
            goal = 0.9 * model.target(x2).max(1).values
        return F.mse_loss(model(x).max(1).values, goal)

    model = Values()
    return train(model, adamw(model.online.parameters()), loss)


@case("only the first row of a position table is used", "loop", words="row|position", at=1)
def positions_all_zero(wrong: bool) -> Monitor:
    class Positions(TinyLM):
        def __init__(self) -> None:
            super().__init__(tied=False)
            self.positions = nn.Embedding(5, 8)

        def forward(self, x: Tensor) -> Tensor:
            index = torch.zeros_like(x) if wrong else torch.arange(x.shape[1]).expand_as(x)
            h = self.embedding(x) + self.positions(index)
            return self.head(self.norm(h + F.gelu(self.mix(h)))).flatten(0, 1)

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(torch.randint(11, (3, 5))), torch.randint(11, (15,)))

    model = Positions()
    return train(model, adamw(model.parameters()), loss)


@case("batch norms of a frozen backbone go on averaging", "loop", words="frozen|running|buffer|eval", at=1,
      how="intent", why="Adapting statistics to new data is a method; the start-up line names the norms.",
      line="statistics of frozen norms move")  # fmt: skip
def frozen_statistics_move(wrong: bool) -> Monitor:
    model = ConvNet()
    model.body.requires_grad_(False)

    def mode(_: int) -> None:
        model.train()
        if not wrong:
            model.body.eval()

    def loss(model: nn.Module) -> Tensor:
        x, y = batch("images")
        return F.cross_entropy(model(x), y)

    return train(model, adamw(model.head.parameters()), loss, before=mode)


@case("a recurrent state is detached at every position", "loop", words="detach|cut", at=1)
def detached_at_every_position(wrong: bool) -> Monitor:
    class Cells(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.cell, self.head = nn.Embedding(23, 12), nn.GRUCell(12, 16), nn.Linear(16, 23)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.zeros(x.shape[0], 16)
            out = []
            for position in range(x.shape[1]):
                h = self.cell(self.embedding(x[:, position]), h.detach() if wrong else h)
                out.append(self.head(h))
            return torch.stack(out, 1)

    model = Cells()
    return train(model, adamw(model.parameters()), predict_next)


@case("one layer object stands for all layers of a stack", "loop", words="shared|same module|tied", at=1, how="intent",
      why="Layers that share weights are an architecture too; the start-up line says so.", line="tied: ")  # fmt: skip
def one_layer_for_all(wrong: bool) -> Monitor:
    layer = nn.Linear(6, 6)
    layers = [layer] * 3 if wrong else [nn.Linear(6, 6) for _ in range(3)]
    model = nn.Sequential(*(nn.Sequential(one, nn.ReLU()) for one in layers), nn.Linear(6, 4))
    return train(model, adamw(model.parameters()))


@case("a batch-first sequence goes through a layer that is not", "loop", words="batch", at=1)
def not_batch_first(wrong: bool) -> Monitor:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(23, 16)
            self.cell, self.head = nn.GRU(16, 16, batch_first=not wrong), nn.Linear(16, 23)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.cell(self.embedding(x))[0])

    model = Mixed()
    return train(model, adamw(model.parameters()), predict_next)


@case("a discriminator's loss is computed on detached output in the generator's step", "loop", "gradient",
      words="gradient", at=1)  # fmt: skip
def generator_detached(wrong: bool) -> Monitor:
    critic = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)).requires_grad_(True)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)

    def loss(model: nn.Module) -> Tensor:
        fake = model(torch.randn(8, 6))
        critic_optimizer.zero_grad()
        (critic(fake.detach()).mean() - critic(torch.randn(8, 6)).mean()).backward()
        critic_optimizer.step()
        return -critic(fake.detach() if wrong else fake).mean()

    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 6))
    return train(model, adamw(model.parameters()), loss)


@case("gradients are taken of a functional copy of the parameters", "loop", "gradient", words="gradient|step", at=1)
def functional_copy(wrong: bool) -> Monitor:
    model = mlp()
    frozen = {k: v.detach().clone().requires_grad_() for k, v in model.named_parameters()}

    def loss(model: nn.Module) -> Tensor:
        x, y = batch()
        parameters = frozen if wrong else dict(model.named_parameters())
        return F.cross_entropy(torch.func.functional_call(model, parameters, (x,)), y)

    return train(model, adamw(model.parameters()), loss)


@case("parametrizations are removed after the optimizer was made", "loop", words="optimizer", at=3)
def parametrization_removed(wrong: bool) -> Monitor:
    model = mlp()
    nn.utils.parametrizations.weight_norm(model[0])

    def remove(number: int) -> None:
        if number == 3 and wrong:
            nn.utils.parametrize.remove_parametrizations(model[0], "weight")

    return train(model, adamw(model.parameters()), classify, before=remove)


@case("spectral norm is evaluated before it is initialised", "loop", words="[Ss]pectral", at=1,
      source="TrainCheck: pytorch-51800")  # fmt: skip
def spectral_norm_evaluated_first(wrong: bool) -> Monitor:
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 32)), nn.ReLU(), nn.utils.spectral_norm(nn.Linear(32, 4)))

    def evaluate(number: int) -> None:
        if number == (1 if wrong else 3):
            model.eval()
            with torch.no_grad():
                model(batch()[0])
            model.train()

    return train(model, adamw(model.parameters()), before=evaluate)
