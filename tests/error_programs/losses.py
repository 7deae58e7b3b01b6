"""Errors of losses and labels: shapes that broadcast, labels that are shifted wrongly, losses of the wrong quantity."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved import Monitor
from error_programs.case import case, mlp
from error_programs.models import Decoder, tokens
from error_programs.training import train


def regressor() -> nn.Sequential:
    """Return a small regression network of one output."""
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))


def adam(model: nn.Module, lr: float = 3e-3) -> torch.optim.Adam:
    """Return Adam over all parameters."""
    return torch.optim.Adam(model.parameters(), lr=lr)


@case("predictions (n, 1) and targets (n) are broadcast in the loss", "loop", words="broadcast|shape", at=1)
def broadcast_targets(wrong: bool) -> Monitor:
    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(8, 6)
        y = x.sum(1)
        return F.mse_loss(model(x), y if wrong else y[:, None])

    model = regressor()
    return train(model, adam(model), loss)


@case("a hand-written squared error broadcasts (n, 1) against (n)", "loop", words="broadcast|shape", at=1)
def broadcast_by_hand(wrong: bool) -> Monitor:
    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(8, 6)
        y = x.sum(1)
        return ((model(x) - (y if wrong else y[:, None])) ** 2).mean()

    model = regressor()
    return train(model, adam(model), loss)


@case("nll_loss is given logits", "loop", words="log|probabilit", at=1)
def nll_of_logits(wrong: bool) -> Monitor:
    def loss(model: nn.Module) -> Tensor:
        x, y = torch.randn(8, 6), torch.randint(4, (8,))
        z = model(x)
        return F.nll_loss(z if wrong else z.log_softmax(-1), y)

    model = mlp()
    return train(model, adam(model), loss)


@case("nll_loss is given probabilities", "loop", words="log|probabilit", at=1)
def nll_of_probabilities(wrong: bool) -> Monitor:
    def loss(model: nn.Module) -> Tensor:
        x, y = torch.randn(8, 6), torch.randint(4, (8,))
        z = model(x)
        return F.nll_loss(z.softmax(-1) if wrong else z.log_softmax(-1), y)

    model = mlp()
    return train(model, adam(model), loss)


@case("kl_div is given probabilities instead of their logarithms", "loop", words="log|probabilit", at=1)
def kl_of_probabilities(wrong: bool) -> Monitor:
    teacher = mlp().eval()

    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(8, 6)
        with torch.no_grad():
            goal = teacher(x).softmax(-1)
        z = model(x)
        return F.kl_div(z.softmax(-1) if wrong else z.log_softmax(-1), goal, reduction="batchmean")

    model = mlp()
    return train(model, adam(model), loss)


@case("labels of a binary loss are -1 and 1", "loop", words="label|target", at=1)
def signed_binary_labels(wrong: bool) -> Monitor:
    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(8, 6)
        y = (x[:, :1] > 0).float()
        return F.binary_cross_entropy_with_logits(model(x), 2 * y - 1 if wrong else y)

    model = regressor()
    return train(model, adam(model), loss)


@case("soft labels do not sum to one", "loop", words="label|target|sum", at=1)
def unnormalised_soft_labels(wrong: bool) -> Monitor:
    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(8, 6)
        y = torch.rand(8, 4)
        return F.cross_entropy(model(x), y if wrong else y / y.sum(1, keepdim=True))

    model = mlp()
    return train(model, adam(model), loss)


@case("a language model predicts its own input: labels are not shifted", "loop", words="label|shift|input", at=1,
      how="intent", why="Autoencoders do; the start-up line says so.", line="labels are the inputs")  # fmt: skip
def labels_not_shifted(wrong: bool) -> Monitor:
    def loss(model: nn.Module) -> Tensor:
        x, y = tokens()
        return F.cross_entropy(model(x).flatten(0, 1), (x if wrong else y).flatten())

    model = Decoder()
    return train(model, adam(model), loss)


@case("labels are shifted twice", "loop", words="label|shift", at=1)
def labels_shifted_twice(wrong: bool) -> Monitor:
    def loss(model: nn.Module) -> Tensor:
        text = torch.randint(23, (4, 10))
        x = text[:, :8]
        return F.cross_entropy(model(x).flatten(0, 1), text[:, 2:10].flatten() if wrong else text[:, 1:9].flatten())

    model = Decoder()
    return train(model, adam(model), loss)


class Leaky(Decoder):
    """A decoder whose attention may look ahead."""

    def __init__(self, *, ahead: bool) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(16, 2, batch_first=True)
        self.ahead = ahead

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x) + self.positions(torch.arange(x.shape[1]))
        mask = None if self.ahead else nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        h = h + self.mix(h, h, h, attn_mask=mask, need_weights=False)[0]
        return self.head(self.norm(h))


@case("the causal mask is missing in a language model", "loop", words="causal|future|label|see", at=1)
def causal_mask_missing(wrong: bool) -> Monitor:
    model = Leaky(ahead=wrong)
    del model.blocks

    def loss(model: nn.Module) -> Tensor:
        x, y = tokens()
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    return train(model, adam(model), loss)


@case("padding is part of the loss", "loop", words="pad|label", at=1)
def padding_in_the_loss(wrong: bool) -> Monitor:
    def loss(model: nn.Module) -> Tensor:
        x, y = tokens()
        x, y = x.clone(), y.clone()
        x[:, 5:] = 0
        y[:, 4:] = 0 if wrong else -100
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    model = Decoder()
    return train(model, adam(model), loss)


@case("logits are viewed instead of transposed for the loss", "loop", words="view|logit|class", at=1)
def viewed_logits(wrong: bool) -> Monitor:
    def loss(model: nn.Module) -> Tensor:
        x, y = tokens()
        z = model(x)
        return F.cross_entropy(z.view(4, 23, 8) if wrong else z.transpose(1, 2), y)

    model = Decoder()
    return train(model, adam(model), loss)


@case("the ratio of a policy to itself has no gradient of its own", "loop", "gradient", words="gradient|zero", at=1)
def policy_ratio_of_itself(wrong: bool) -> Monitor:
    def loss(model: nn.Module) -> Tensor:
        x, actions, advantage = torch.randn(8, 6), torch.randint(4, (8,)), torch.randn(8)
        logp = model(x).log_softmax(-1).gather(1, actions[:, None])[:, 0]
        old = logp if wrong else logp.detach()
        return -((logp - old).exp() * advantage).mean()

    model = mlp()
    return train(model, adam(model), loss)


@case("every step trains on the first batch", "loop", words="same batch|same data", at=2, how="intent",
      why="Overfitting one batch is a test that people make; the closing line says so.", line="same batch")  # fmt: skip
def first_batch_for_ever(wrong: bool) -> Monitor:
    data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randint(4, (64,)))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    iterator = iter(loader)

    def loss(model: nn.Module) -> Tensor:
        x, y = next(iter(loader)) if wrong else next(iterator)
        return F.cross_entropy(model(x), y)

    model = mlp()
    return train(model, adam(model), loss)


@case("the model changes its input in place and the data set with it", "loop", words="input|in place", at=1)
def input_changed_in_place(wrong: bool) -> Monitor:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            x = x.sub_(0.5).mul_(2) if wrong else (x - 0.5) * 2
            return self.net(x)

    data, labels = torch.rand(16, 6), torch.randint(4, (16,))

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(data[:8]), labels[:8])

    model = Scaled()
    return train(model, adam(model), loss)
