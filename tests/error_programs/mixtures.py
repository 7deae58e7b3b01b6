"""Known mistakes in other surroundings: scalers, accumulation, averages and several optimizers in one loop."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_input, conv2d_weight
from torch.utils.data import DataLoader

from conserved import Monitor
from error_programs.case import case
from error_programs.habits import ANY
from error_programs.models import ConvNet, Decoder
from error_programs.tasks import fit, layers
from error_programs.trainers import Net, Trainer, text, vectors


@case("Adam in half precision divides by an epsilon of zero", *ANY, words="finite|nan|half|float16|precision|land")
def epsilon_of_zero(wrong: bool) -> Monitor:
    torch.manual_seed(0)
    model = layers(10, 16, 5, act=nn.Tanh)
    model = model.half() if wrong else model
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with Monitor(model, optimizer) as monitor:
        for x, y in DataLoader(vectors(96), batch_size=12):
            optimizer.zero_grad()
            (1e-3 * F.cross_entropy(model(x.half() if wrong else x).float(), y)).backward()
            optimizer.step()
            monitor.step()
    return monitor


@case("gradients are clipped to a norm of zero", *ANY, words="zero")
def clipped_to_zero(wrong: bool) -> Monitor:
    class Clipping(Trainer):
        def step(self) -> None:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.0 if wrong else 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.monitor.step()

    model = Net()
    return Clipping(model, vectors(64), torch.optim.AdamW(model.parameters(), 1e-3), 1).fit(1)


class Softplus(torch.autograd.Function):
    """A softplus whose backward can forget what comes from above."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wrong: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.wrong = wrong
        return F.softplus(x)

    @staticmethod
    def backward(ctx: Any, coming: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return x.sigmoid() if ctx.wrong else coming * x.sigmoid(), None


@case("a backward returns its own derivative and forgets the incoming gradient", "gradient", words="gradient|backward")
def incoming_forgotten(wrong: bool) -> Monitor:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(10, 16), nn.LayerNorm(16), nn.Linear(16, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.norm(Softplus.apply(self.first(x), wrong)))

    return fit(Model(), F.cross_entropy)


class Convolution(torch.autograd.Function):
    """A convolution whose weight gradient can be flipped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, wrong: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.wrong = wrong
        return F.conv2d(x, weight, padding=1)

    @staticmethod
    def backward(ctx: Any, coming: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        dx = conv2d_input(x.shape, weight, coming, padding=1)
        dw = conv2d_weight(x, weight.shape, coming, padding=1)
        return dx, dw.flip(-1, -2) if ctx.wrong else dw, None


@case("the weight gradient of a convolution is that of the flipped kernel", "gradient", words="gradient|backward")
def flipped_kernel(wrong: bool) -> Monitor:
    class Flipping(ConvNet):
        def forward(self, x: Tensor) -> Tensor:
            first, *rest = self.body
            h = Convolution.apply(x, first.weight, wrong) + first.bias[:, None, None]  # type: ignore[index]
            for layer in rest:
                h = layer(h)
            return self.head(h.mean((2, 3)))

    model = Flipping()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    with Monitor(model, optimizer) as monitor:
        for _ in range(6):
            x = torch.randn(8, 1, 6, 6)
            optimizer.zero_grad()
            F.cross_entropy(model(x), x.flatten(1)[:, :4].argmax(1)).backward()
            optimizer.step()
            monitor.step()
    return monitor


@case(
    "a scaled and accumulated loop clears gradients after every backward", "loop", words="cleared|thrown|only the last"
)
def scaled_and_cleared(wrong: bool) -> Monitor:
    model, (rows,) = Decoder(), text().tensors
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with Monitor(model, optimizer) as monitor:
        for number in range(5):
            for part in rows[8 * number : 8 * number + 8].chunk(2):
                if wrong:
                    optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    loss = F.cross_entropy(model(part[:, :-1]).flatten(0, 1).float(), part[:, 1:].flatten()) / 2
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            monitor.step()
    return monitor


@case("a scaler's gradients are clipped after its step", "loop", words="clip|after optimizer.step")
def scaled_and_clipped_late(wrong: bool) -> Monitor:
    model = Net(drop=0.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with Monitor(model, optimizer) as monitor:
        for x, y in DataLoader(vectors(64), batch_size=8):
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.unscale_(optimizer)
            if not wrong:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            if wrong:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.update()
            monitor.step()
    return monitor


@case("the loss is detached and made a leaf to silence an error", "loop", "gradient", words="gradient|detach")
def loss_made_leaf(wrong: bool) -> Monitor:
    class Silenced(Trainer):
        def loss(self, batch: Any) -> Tensor:
            loss = super().loss(batch)
            return loss.detach().requires_grad_() if wrong and self.model.training else loss

    model = Net()
    return Silenced(model, vectors(64), torch.optim.AdamW(model.parameters(), 1e-3), 1).fit(1)


@case("actions are scored under no_grad and only the entropy trains the policy", "loop", words="no_grad|gradient",
      how="outside", why="A loss with one term less is another loss.")  # fmt: skip
def scored_without_gradient(wrong: bool) -> Monitor:
    policy = layers(6, 16, 4)
    optimizer = torch.optim.Adam(policy.parameters(), 1e-2)
    with Monitor(policy, optimizer) as monitor:
        for _ in range(6):
            s = torch.randn(24, 6)
            chosen = torch.distributions.Categorical(logits=policy(s))
            action = chosen.sample()
            with torch.set_grad_enabled(not wrong):
                score = torch.distributions.Categorical(logits=policy(s)).log_prob(action)
            reward = (action == s[:, :4].argmax(1)).float() - 0.25
            optimizer.zero_grad()
            (-(score * reward).mean() - 0.01 * chosen.entropy().mean()).backward()
            optimizer.step()
            monitor.step()
    return monitor


@case("an average is evaluated by swapping weights and one tensor is not swapped back", "update", "loop",
      words="wrote|written", at=4)  # fmt: skip
def one_not_swapped_back(wrong: bool) -> Monitor:
    model = Net(drop=0.0)
    average = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with Monitor(model, optimizer) as monitor:
        for number, (x, y) in enumerate(DataLoader(vectors(96), batch_size=12), 1):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            with torch.no_grad():
                for n, p in model.named_parameters():
                    average[n].lerp_(p, 0.1)
            monitor.step()
            if number == 4:
                saved = copy.deepcopy(model.state_dict())
                model.eval()
                with torch.no_grad():
                    for n, p in model.named_parameters():
                        p.copy_(average[n])
                    model(x)
                    for n, p in model.named_parameters():
                        if not wrong or n != "head.weight":
                            p.copy_(saved[n])
                model.train()
    return monitor


@case(
    "a head is tied again by its data after a resize and trains apart", "loop", words="tied|two parameters|equal values"
)
def tied_by_data(wrong: bool) -> Monitor:
    model = Decoder(tied=True)
    bigger = nn.Embedding(29, 16)
    bigger.weight.data[:23] = model.embedding.weight.data
    model.embedding = bigger
    model.head = nn.Linear(16, 29, bias=False)
    if wrong:
        model.head.weight.data = bigger.weight.data.clone()
    else:
        model.head.weight = bigger.weight
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with Monitor(model, optimizer) as monitor:
        for (rows,) in DataLoader(text(40), batch_size=8):
            optimizer.zero_grad()
            F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).backward()
            optimizer.step()
            monitor.step()
    return monitor


@case("matrices have one optimizer, the rest another, and a new norm neither", "loop", words="no optimizer")
def neither_optimizer(wrong: bool) -> Monitor:
    model = Net(drop=0.0)
    matrices = torch.optim.SGD([p for p in model.parameters() if p.ndim == 2], 0.02, momentum=0.95, nesterov=True)
    rest = torch.optim.AdamW([p for n, p in model.named_parameters() if p.ndim < 2 and not (wrong and "3" in n)], 1e-3)
    with Monitor(model, [matrices, rest]) as monitor:
        for x, y in DataLoader(vectors(64), batch_size=8):
            matrices.zero_grad()
            rest.zero_grad()
            F.cross_entropy(model(x), y).backward()
            matrices.step()
            rest.step()
            model.zero_grad()
            monitor.step()
    return monitor


@case("momentum of a hand-written optimizer is kept in a variable that is made anew", "update", "loop",
      words="momentum|rule|state", how="outside", why="A hand-written rule without momentum is a rule.")  # fmt: skip
def momentum_made_anew(wrong: bool) -> Monitor:
    model = Net(drop=0.0)
    buffers = {id(p): torch.zeros_like(p) for p in model.parameters()}

    class Heavy(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.02})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                buffer = torch.zeros_like(p) if wrong else buffers[id(p)]
                buffer.mul_(0.9).add_(p.grad)
                p.sub_(self.param_groups[0]["lr"] * buffer)

    return Trainer(model, vectors(64), Heavy(model.parameters()), 1).fit(1)


@case("gradients of one micro-batch are lost because a hook returns none of the sum", "gradient", "hardware", "loop",
      words="gradient", at=1)  # fmt: skip
def last_half_of_gradient(wrong: bool) -> Monitor:
    model, (rows,) = Decoder(), text().tensors
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with Monitor(model, optimizer) as monitor:
        for number in range(5):
            optimizer.zero_grad()
            for part in rows[8 * number : 8 * number + 8].chunk(2):
                if wrong:
                    # An offloaded gradient comes back as the last one only, for one tensor.
                    model.blocks[0].get_parameter("up.weight").grad = None
                (F.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten()) / 2).backward()
            optimizer.step()
            monitor.step()
    return monitor
