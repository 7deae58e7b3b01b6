"""Errors inside the model: backward passes written by hand, masks, shapes, modes and routing."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved import Monitor
from error_programs.case import batch, case
from error_programs.habits import ANY, adamw
from error_programs.models import ConvNet, Decoder, tokens
from error_programs.training import predict_next, train


class MeanOverAll(torch.autograd.Function):
    """Cross-entropy whose backward divides by the labels that are used, or by all of them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, by_all: bool) -> Tensor:
        ctx.save_for_backward(logits, labels)
        ctx.by_all = by_all
        return F.cross_entropy(logits, labels, ignore_index=-100)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        logits, labels = ctx.saved_tensors
        used = labels != -100
        p = logits.softmax(-1)
        p[used] -= F.one_hot(labels[used], logits.shape[-1]).to(p)
        return grads[0] * p * used[:, None] / (labels.numel() if ctx.by_all else used.sum()), None, None


@case("a fused loss divides its gradient by all labels, ignored ones too", *ANY, words="loss|scale", how="call")
def fused_loss_by_all(wrong: bool) -> Monitor:
    def loss(model: nn.Module) -> Tensor:
        x, y = tokens()
        y = y.clone()
        y[1:, 3:] = -100
        return MeanOverAll.apply(model(x).flatten(0, 1), y.flatten(), wrong)

    model = Decoder()
    return train(model, adamw(model), loss)


class Product(torch.autograd.Function):
    """A product of two tensors whose backward may mix them up."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, mixed: bool) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.mixed = mixed
        return a * b

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        a, b = ctx.saved_tensors
        return (grads[0] * a, grads[0] * b, None) if ctx.mixed else (grads[0] * b, grads[0] * a, None)


@case("the backward of a product swaps its two gradients", "gradient", words="")
def product_swapped(wrong: bool) -> Monitor:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(6, 16), nn.Linear(6, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(Product.apply(F.silu(self.gate(x)), self.up(x), wrong))

    model = Gated()
    return train(model, adamw(model))


class Norm(torch.autograd.Function):
    """A layer norm whose backward may forget the mean of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, bias: Tensor, forgets: bool) -> Tensor:
        rate = (x.var(-1, unbiased=False, keepdim=True) + 1e-5).rsqrt()
        y = (x - x.mean(-1, keepdim=True)) * rate
        ctx.save_for_backward(y, rate, gain)
        ctx.forgets = forgets
        return y * gain + bias

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        y, rate, gain = ctx.saved_tensors
        g = grads[0] * gain
        mean = 0.0 if ctx.forgets else g.mean(-1, keepdim=True)
        x = rate * (g - mean - y * (g * y).mean(-1, keepdim=True))
        axes = tuple(range(y.ndim - 1))
        return x, (grads[0] * y).sum(axes), grads[0].sum(axes), None


class NormModule(nn.Module):
    """A layer norm by the function above."""

    def __init__(self, width: int, forgets: bool) -> None:
        super().__init__()
        self.gain, self.bias, self.forgets = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width)), forgets

    def forward(self, x: Tensor) -> Tensor:
        return Norm.apply(x, self.gain, self.bias, self.forgets)


@case("the backward of a fused layer norm forgets the mean", "gradient", words="")
def norm_without_mean(wrong: bool) -> Monitor:
    model = Decoder()
    for block in model.blocks:
        block.norm1 = NormModule(16, wrong)
    return train(model, adamw(model), predict_next)


class Rotation(torch.autograd.Function):
    """Rotary positions whose backward may turn the wrong way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, wrong: bool) -> Tensor:
        ctx.save_for_backward(cos, sin if wrong else -sin)
        return Rotation.turn(x, cos, sin)

    @staticmethod
    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return Rotation.turn(grads[0], *ctx.saved_tensors), None, None, None


class Rotary(nn.Module):
    """A causal language model with one layer of rotary attention, by parts that may be wrong."""

    def __init__(self, *, turned: bool = False, unscaled: bool = False, axis: int = -1, mask: str = "causal") -> None:
        super().__init__()
        self.embedding = nn.Embedding(23, 16)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.norm, self.last, self.head = nn.LayerNorm(16), nn.LayerNorm(16), nn.Linear(16, 23, bias=False)
        self.turned, self.unscaled, self.axis, self.mask = turned, unscaled, axis, mask

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        n = self.norm(h)
        angle = torch.arange(x.shape[1])[:, None] * torch.tensor([1.0, 0.1])
        q, k, v = (m(n).unflatten(-1, (4, 4)).transpose(1, 2) for m in (self.q, self.k, self.v))
        q, k = (Rotation.apply(t, angle.cos(), angle.sin(), self.turned) for t in (q, k))
        scores = Scores.apply(q, k, self.unscaled)
        length = x.shape[1]
        if self.mask == "causal":
            scores = scores + torch.full((length, length), -torch.inf).triu(1)
        elif self.mask == "late":
            scores = scores + torch.full((length, length), -torch.inf).triu(2)
        elif self.mask == "zeros and ones":
            scores = scores + torch.ones(length, length).tril()
        p = scores.softmax(self.axis).nan_to_num()
        return self.head(self.last(h + self.o((p @ v).transpose(1, 2).flatten(2))))


class Scores(torch.autograd.Function):
    """Scaled scores of attention whose backward may forget the scale."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, unscaled: bool) -> Tensor:
        ctx.save_for_backward(q, k)
        ctx.unscaled = unscaled
        return q @ k.mT / 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k = ctx.saved_tensors
        return grads[0] @ k / (1 if ctx.unscaled else 2), grads[0].mT @ q / 2, None


@case("the backward of rotary positions turns the wrong way", "gradient", words="")
def rotated_wrongly(wrong: bool) -> Monitor:
    model = Rotary(turned=wrong)
    return train(model, adamw(model), predict_next)


@case("the backward of attention scales one of two gradients", "gradient", words="")
def scale_forgotten(wrong: bool) -> Monitor:
    model = Rotary(unscaled=wrong)
    return train(model, adamw(model), predict_next)


@case("softmax of attention runs over queries", *ANY, words="sees|softmax|future|label")
def softmax_over_queries(wrong: bool) -> Monitor:
    model = Rotary(axis=-2 if wrong else -1)
    return train(model, adamw(model), predict_next)


@case("the causal mask begins one token too late", "loop", words="sees")
def mask_late(wrong: bool) -> Monitor:
    model = Rotary(mask="late" if wrong else "causal")
    return train(model, adamw(model), predict_next)


@case("a mask of zeros and ones is added to the scores", "loop", words="sees")
def mask_added(wrong: bool) -> Monitor:
    model = Rotary(mask="zeros and ones" if wrong else "causal")
    return train(model, adamw(model), predict_next)


class Lookup(torch.autograd.Function):
    """A lookup whose backward may keep the last of repeated rows."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, wrong: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.shape, ctx.wrong = weight.shape, wrong
        return weight[x]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        out = grads[0].new_zeros(ctx.shape)
        return out.index_put((x,), grads[0], accumulate=not ctx.wrong), None, None


@case("the backward of an embedding keeps the last of repeated tokens", "gradient", words="")
def lookup_not_accumulated(wrong: bool) -> Monitor:
    class Model(Decoder):
        def forward(self, x: Tensor) -> Tensor:
            h = Lookup.apply(self.embedding.weight, x, wrong) + self.positions(torch.arange(x.shape[1]))
            for block in self.blocks:
                h = block(h)
            return self.head(self.norm(h))

    model = Model()
    return train(model, adamw(model), predict_next)


class Dropped(torch.autograd.Function):
    """Dropout that draws its mask again in the backward, if wrong."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wrong: bool) -> Tensor:
        mask = (torch.rand_like(x) < 0.8).to(x) / 0.8
        ctx.save_for_backward(mask)
        ctx.wrong = wrong
        return x * mask

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (mask,) = ctx.saved_tensors
        return grads[0] * ((torch.rand_like(mask) < 0.8).to(mask) / 0.8 if ctx.wrong else mask), None


@case("a fused dropout draws another mask in its backward", "gradient", words="")
def dropout_drawn_again(wrong: bool) -> Monitor:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(Dropped.apply(self.a(x).relu(), wrong)).relu())

    model = Model()
    return train(model, adamw(model))


class Combined(torch.autograd.Function):
    """A sum of experts whose backward gives the gate no gradient, if wrong."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, y: Tensor, wrong: bool) -> Tensor:
        ctx.save_for_backward(p, y)
        ctx.wrong = wrong
        return (p[..., None] * y).sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        p, y = ctx.saved_tensors
        gate = None if ctx.wrong else (grads[0][:, None] * y).sum(-1)
        return gate, p[..., None] * grads[0][:, None], None


class Experts(nn.Module):
    """Four experts and a router."""

    def __init__(self, *, no_gate: bool = False, last_unused: bool = False) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(6, 4), nn.ModuleList(nn.Linear(6, 5) for _ in range(4))
        self.head = nn.Linear(5, 4)
        self.no_gate, self.last_unused = no_gate, last_unused

    def forward(self, x: Tensor) -> Tensor:
        p = self.router(x).softmax(-1)
        if self.last_unused:
            p = torch.cat((p[:, :3], torch.zeros_like(p[:, :1])), 1)
        return self.head(Combined.apply(p, torch.stack([e(x) for e in self.experts], 1), self.no_gate))


@case("a fused sum of experts gives the router no gradient", "loop", "gradient", words="router|gradient")
def router_without_gradient(wrong: bool) -> Monitor:
    model = Experts(no_gate=wrong)
    return train(model, adamw(model))


@case("an index that is off by one never uses the last expert", "loop", "gradient", words="gradient|zero")
def last_expert_unused(wrong: bool) -> Monitor:
    model = Experts(last_unused=wrong)
    return train(model, adamw(model))


@case("class probabilities of a sequence are taken over time", *ANY, words="softmax|dim|class|order")
def classes_over_time(wrong: bool) -> Monitor:
    def loss(model: nn.Module) -> Tensor:
        x, y = tokens()
        z, target = model(x), F.one_hot(y, 23).float()
        return F.cross_entropy(z, target) if wrong else F.cross_entropy(z.mT, target.mT)

    model = Decoder()
    return train(model, adamw(model), loss)


@case("a padding mask says what to keep where it should say what to leave out", *ANY, words="mask|pad")
def padding_inverted(wrong: bool) -> Monitor:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(12, 16, padding_idx=0)
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
            self.head = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            h, pad = self.embedding(x), x == 0
            y, _ = self.attention(h, h, h, key_padding_mask=~pad if wrong else pad)
            return self.head((h + y).mean(1))

    def loss(model: nn.Module) -> Tensor:
        x = torch.randint(1, 12, (6, 7))
        x[:, 5:] = 0
        return F.cross_entropy(model(x), torch.randint(4, (6,)))

    model = Padded()
    return train(model, adamw(model), loss)


@case("heads are split by a view that mixes the examples of a batch", *ANY, words="batch|example")
def examples_mixed(wrong: bool) -> Monitor:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.positions = nn.Embedding(23, 16), nn.Embedding(12, 16)
            self.qkv, self.head, self.norm = nn.Linear(16, 48), nn.Linear(16, 23), nn.LayerNorm(16)

        def forward(self, x: Tensor) -> Tensor:
            n, length = x.shape
            h = self.embedding(x) + self.positions(torch.arange(length))
            parts = self.qkv(self.norm(h)).chunk(3, -1)
            if wrong:
                q, k, v = (t.transpose(0, 1).reshape(n, length, 16) for t in parts)
            else:
                q, k, v = parts
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            if wrong:
                y = y.reshape(length, n, 16).transpose(0, 1)
            return self.head(h + y)

    model = Mixed()
    return train(model, adamw(model), predict_next)


@case("a teacher that is put into eval mode is the student's own backbone", *ANY, words="eval mode|mode")
def teacher_is_student(wrong: bool) -> Monitor:
    model = ConvNet()
    teacher = model.body if wrong else copy.deepcopy(model.body)
    teacher.eval()

    def loss(model: nn.Module) -> Tensor:
        x, y = batch("images")
        with torch.no_grad():
            target = teacher(x)
        return F.cross_entropy(model(x), y) + 0.1 * target.square().mean()

    return train(model, adamw(model), loss)


@case("a functional dropout does not know of eval mode", "loop", words="dropout|random", at=4)
def functional_dropout(wrong: bool) -> Monitor:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 24), nn.Linear(24, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x).relu()
            return self.b(F.dropout(h, 0.3) if wrong else F.dropout(h, 0.3, self.training))

    model = Dropping()

    def after(number: int) -> None:
        if number == 3:
            model.eval()
            with torch.no_grad():
                model(batch()[0])
            model.train()

    return train(model, adamw(model), after=after)


@case("targets between 0 and 1 are cut to integers", *ANY, words="target|label|zero|same")
def targets_cut(wrong: bool) -> Monitor:
    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(16, 6)
        y = x[:, :1].sigmoid()
        return F.mse_loss(model(x), y.long().float() if wrong else y)

    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
    return train(model, adamw(model), loss)


@case("micro-batches are views of one buffer that is filled again", *ANY, words="same")
def buffer_reused(wrong: bool) -> Monitor:
    model = Decoder()
    optimizer = adamw(model)
    with Monitor(model, optimizer) as monitor:
        for _ in range(6):
            optimizer.zero_grad()
            buffer = torch.empty(4, 9, dtype=torch.long)
            parts = []
            for _ in range(3):
                buffer.random_(23)
                parts.append(buffer if wrong else buffer.clone())
            for text in parts:
                (F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()) / 3).backward()
            optimizer.step()
            monitor.step()
    return monitor


@case("every epoch reads the data in one order", *ANY, words="order|same", at=5)
def same_order(wrong: bool) -> Monitor:
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randint(23, (4, 8)), torch.randint(23, (4, 8))) for _ in range(4)]
    model = Decoder()
    optimizer = adamw(model)
    with Monitor(model, optimizer) as monitor:
        for _ in range(3):
            if wrong:
                generator.manual_seed(1)
            for index in torch.randperm(4, generator=generator).tolist():
                x, y = data[index]
                optimizer.zero_grad()
                F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
                optimizer.step()
                monitor.step()
    return monitor


@case("a penalty of weights is that of a copy of the model", *ANY, words="copy|gradient|loss")
def penalty_of_copy(wrong: bool) -> Monitor:
    model = Decoder()
    other = copy.deepcopy(model)

    def loss(model: nn.Module) -> Tensor:
        penalty = sum(p.square().sum() for p in (other if wrong else model).parameters())
        return predict_next(model) + 1e-3 * penalty

    return train(model, adamw(model), loss)
