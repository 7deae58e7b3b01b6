"""Errors of gradient flow: accumulation, closures, detached parts, layers nobody registered, losses "
"of wrong outputs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved import Monitor
from error_programs.case import backward, batch, case, mlp
from error_programs.models import ConvNet, Decoder, tokens


@case("zero_grad() in every micro-batch of an accumulation", "loop", words="cleared|thrown away|only the last", at=1)
def cleared_in_accumulation(wrong: bool) -> Monitor:
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with Monitor(model, optimizer) as monitor:
        for number in range(24):
            x, y = tokens()
            if wrong:
                optimizer.zero_grad()
            (F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / 4).backward()
            if (number + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
                monitor.step()
    return monitor


@case("gradients are cleared in every fourth step only", "loop", words="zero_grad", at=2)
def cleared_rarely(wrong: bool) -> Monitor:
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    with Monitor(model, optimizer) as monitor:
        for number in range(9):
            if number % 4 == 0 or not wrong:
                optimizer.zero_grad(set_to_none=False)
            x, y = batch("images")
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            monitor.step()
    return monitor


@case("the closure of LBFGS does not clear gradients", "loop", words="zero_grad|closure", at=1)
def closure_without_zero_grad(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    with Monitor(model, optimizer) as monitor:
        for _ in range(4):
            x, y = batch()

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                if not wrong:
                    optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
            optimizer.zero_grad()
            monitor.step()
    return monitor


@case("the loss is detached from the model", "loop", words="gradient", at=1)
def detached_loss(wrong: bool) -> Monitor:
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with Monitor(model, optimizer) as monitor:
        for _ in range(5):
            x, y = tokens()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            if wrong:
                loss = loss.detach().requires_grad_()
            loss.backward()
            optimizer.step()
            monitor.step()
    return monitor


class Encoded(nn.Module):
    """A classifier on an encoder, with one way of passing features on."""

    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16))
        self.head = nn.Linear(16, 4)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between(self.encoder, x))


@case("features are detached before the head", "loop", "gradient", words="gradient", at=1)
def detached_features(wrong: bool) -> Monitor:
    model = Encoded(lambda encoder, x: encoder(x).detach() if wrong else encoder(x))
    return _plain(model, torch.optim.Adam(model.parameters(), lr=1e-2))


@case("features pass through numpy", "loop", "gradient", words="gradient", at=1)
def features_through_numpy(wrong: bool) -> Monitor:
    def between(encoder: nn.Module, x: Tensor) -> Tensor:
        y = encoder(x)
        return torch.from_numpy(y.detach().numpy().copy()) if wrong else y

    model = Encoded(between)
    return _plain(model, torch.optim.RMSprop(model.parameters(), lr=1e-3))


@case("an encoder runs under no_grad", "loop", "gradient", words="gradient", at=1)
def encoder_without_gradients(wrong: bool) -> Monitor:
    def between(encoder: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad() if wrong else nullcontext():
            return encoder(x)

    model = Encoded(between)
    return _plain(model, torch.optim.NAdam(model.parameters(), lr=1e-3))


def _plain(model: nn.Module, optimizer: Any, steps: int = 5, kind: str = "vectors") -> Monitor:
    with Monitor(model, optimizer) as monitor:
        for _ in range(steps):
            optimizer.zero_grad()
            backward(model, kind)
            optimizer.step()
            monitor.step()
    return monitor


class Listed(nn.Module):
    """Hidden layers in a list, which a module does not register, or in a ModuleList."""

    def __init__(self, *, registered: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        layers = [nn.Linear(12, 12) for _ in range(3)]
        self.layers = nn.ModuleList(layers) if registered else layers
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = F.gelu(layer(x))
        return self.head(x)


@case("layers are kept in a Python list", "loop", words="no optimizer steps|not registered", at=1)
def unregistered_layers(wrong: bool) -> Monitor:
    model = Listed(registered=not wrong)
    return _plain(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


@case("a parameter is made outside of the model", "loop", words="no optimizer steps|not registered", at=1)
def unregistered_parameter(wrong: bool) -> Monitor:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 12), nn.Linear(12, 4)
            scale = torch.ones(12)
            self.scale = nn.Parameter(scale) if not wrong else scale.requires_grad_()

        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.silu(self.a(x)) * self.scale)

    model = Scaled()
    return _plain(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


@case("probabilities are given to cross_entropy", "loop", words="softmax|probabilit", at=1)
def softmax_twice(wrong: bool) -> Monitor:
    model: nn.Module = ConvNet()
    if wrong:
        model = nn.Sequential(model, nn.Softmax(-1))
    return _plain(model, torch.optim.SGD(model.parameters(), lr=0.05), kind="images")


@case("probabilities are given to a loss with logits", "loop", words="sigmoid|probabilit", at=1)
def sigmoid_twice(wrong: bool) -> Monitor:
    model: Any = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1), *([nn.Sigmoid()] if wrong else []))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with Monitor(model, optimizer) as monitor:
        for _ in range(5):
            optimizer.zero_grad()
            x = torch.randn(16, 6)
            F.binary_cross_entropy_with_logits(model(x).squeeze(-1), (x.sum(1) > 0).float()).backward()
            optimizer.step()
            monitor.step()
    return monitor


@case("the critic keeps gradients of the generator's pass", "loop", words="zero_grad|another|left", at=2)
def gradients_of_the_other_pass(wrong: bool) -> Monitor:
    generator: Any = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 6))
    critic: Any = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 1))
    model = nn.ModuleDict({"generator": generator, "critic": critic})
    first = torch.optim.Adam(critic.parameters(), lr=1e-3)
    second = torch.optim.Adam(generator.parameters(), lr=1e-3)
    with Monitor(model, [first, second]) as monitor:
        for number in range(6):
            if not wrong or number == 0:
                first.zero_grad()
            real, fake = torch.randn(8, 6), generator(torch.randn(8, 4)).detach()
            (F.softplus(-critic(real)) + F.softplus(critic(fake))).mean().backward()
            first.step()
            if wrong:
                first.zero_grad()
            second.zero_grad()
            F.softplus(-critic(generator(torch.randn(8, 4)))).mean().backward()
            second.step()
            monitor.step()
    return monitor


@case("every gradient is zero because every label is ignored", "loop", "gradient", words="zero", at=1)
def nothing_to_learn(wrong: bool) -> Monitor:
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with Monitor(model, optimizer) as monitor:
        for _ in range(6):
            x, y = tokens()
            optimizer.zero_grad()
            labels = torch.full_like(y, -100) if wrong else y
            loss = F.cross_entropy(model(x).flatten(0, 1), labels.flatten(), reduction="sum")
            (loss / max(1, int((labels != -100).sum()))).backward()
            optimizer.step()
            monitor.step()
    return monitor


@case("both factors of an adapter start at zero", "loop", "gradient", words="zero", at=1)
def dead_adapter(wrong: bool) -> Monitor:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.head = nn.Linear(6, 16).requires_grad_(False), nn.Linear(16, 4)
            self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 16, bias=False)
            nn.init.zeros_(self.up.weight)
            if wrong:
                nn.init.zeros_(self.down.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.gelu(self.base(x) + self.up(self.down(x))))

    model = Adapted()
    return _plain(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2), 6)


@case("all hidden units start equal", "loop", "gradient", words="equal|copies|same", at=1)
def equal_units(wrong: bool) -> Monitor:
    model = mlp()
    if wrong:
        for layer in (model[0], model[3], model[5]):
            nn.init.constant_(layer.weight, 0.05)
            nn.init.zeros_(layer.bias)
    return _plain(model, torch.optim.SGD(model.parameters(), lr=0.05), 6)


class WrongGELU(torch.autograd.Function):
    """A GELU whose backward forgets the density term."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * 0.5 * (1 + torch.erf(x / 2**0.5))


@case("the backward of an activation forgets a term", "gradient", words="gradient", at=1)
def wrong_activation(wrong: bool) -> Monitor:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            act = WrongGELU.apply if wrong else F.gelu
            return self.c(act(self.b(act(self.a(x)))))

    model = Net()
    return _plain(model, torch.optim.AdamW(model.parameters(), lr=1e-2), 6)


@case("an activation is changed after the backward has saved it", "gradient", words="gradient", at=1)
def activation_overwritten(wrong: bool) -> Monitor:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.a(x))
            y = self.b(h)
            if wrong:
                h.data.mul_(0.5)
            return self.c(F.relu(y))

    model = Net()
    return _plain(model, torch.optim.SGD(model.parameters(), lr=0.05), 6)
