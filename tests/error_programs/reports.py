"""Errors taken from reports and fixes of training code, one program each."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from conserved import Monitor
from error_programs.case import batch, case, mlp
from error_programs.models import Decoder, tokens
from error_programs.training import classify, predict_next, train


def adamw(model: nn.Module, lr: float = 3e-3, **options: Any) -> torch.optim.AdamW:
    """Return AdamW over all parameters."""
    return torch.optim.AdamW(model.parameters(), lr=lr, **options)


def _average(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


def _resume(restore: Callable[..., Any], *, scaled: bool = False) -> Monitor:
    """Train with an average and, if wanted, a scaler; save, build again, restore, go on."""

    def build() -> tuple[Any, Any, Any, Any]:
        model = Decoder()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=scaled)
        return model, adamw(model), _average(model), scaler

    def run(parts: Any, monitor: Monitor) -> None:
        model, optimizer, average, scaler = parts
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale(predict_next(model)).backward()
            scaler.step(optimizer)
            scaler.update()
            average.update_parameters(model)
            monitor.step()

    parts = build()
    with Monitor(parts[0], parts[1]) as first:
        run(parts, first)
        saved = copy.deepcopy([one.state_dict() for one in parts] + [first.state_dict()])
    parts = build()
    parts = restore(*parts, saved) or parts
    with Monitor(parts[0], parts[1]) as monitor:
        monitor.load_state_dict(saved[4])
        run(parts, monitor)
    return monitor


@case("a resume loads the average as the weights", "loop", words="not what the checkpoint|restored", at=5,
      source="schnetpack 785")  # fmt: skip
def average_as_weights(wrong: bool) -> Monitor:
    def restore(model: Any, optimizer: Any, average: Any, scaler: Any, saved: Any) -> None:
        average.load_state_dict(saved[2])
        model.load_state_dict(average.module.state_dict() if wrong else saved[0])
        optimizer.load_state_dict(saved[1])

    return _resume(restore)


@case("a resume builds the average anew", "loop", words="[Aa]verage", at=5, source="ace 819")
def average_built_anew(wrong: bool) -> Monitor:
    def restore(model: Any, optimizer: Any, average: Any, scaler: Any, saved: Any) -> Any:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        average.load_state_dict(saved[2])
        if wrong:
            average = _average(model)
        return model, optimizer, average, scaler

    return _resume(restore)


@case("a resume forgets the gradient scaler", "loop", "precision", words="[Ss]cale", at=5, source="the_well 77")
def scaler_forgotten(wrong: bool) -> Monitor:
    def restore(model: Any, optimizer: Any, average: Any, scaler: Any, saved: Any) -> None:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        average.load_state_dict(saved[2])
        if not wrong:
            scaler.load_state_dict(saved[3])

    return _resume(restore, scaled=True)


def _wrapped(rank: int, model: Any) -> Any:
    torch.manual_seed(0)
    wrapped = DistributedDataParallel(model)
    torch.manual_seed(1 + rank)
    return wrapped


@case("the first micro-batch is synchronised and not the last", "replica", words="gradient", at=1, processes=2,
      source="FunASR 3472")  # fmt: skip
def synchronised_first(wrong: bool, rank: int) -> Monitor:
    torch.manual_seed(0)
    model = _wrapped(rank, mlp())
    optimizer = adamw(model)
    with Monitor(model, optimizer) as monitor:
        for number in range(12):
            quiet = number % 2 != 0 if wrong else number % 2 == 0
            with model.no_sync() if quiet else nullcontext():
                (classify(model) / 2).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
                monitor.step()
    return monitor


@case("synchronisation is switched on after the forward pass", "replica", words="gradient", at=1, processes=2,
      source="build-nanogpt 30")  # fmt: skip
def synchronised_late(wrong: bool, rank: int) -> Monitor:
    torch.manual_seed(0)
    model = _wrapped(rank, mlp())
    optimizer = adamw(model)
    with Monitor(model, optimizer) as monitor:
        for number in range(12):
            last = number % 2 == 1
            if not wrong:
                model.require_backward_grad_sync = last
            else:
                model.require_backward_grad_sync = False
            loss = classify(model) / 2
            model.require_backward_grad_sync = last
            loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
                monitor.step()
    return monitor


@case("norms of a bfloat16 model stay at exactly one", "precision", "update", words="swallow|bfloat16|round", at=1,
      source="speculators 765")  # fmt: skip
def norms_stay_at_one(wrong: bool) -> Monitor:
    model = Decoder(width=32)
    if wrong:
        model = model.bfloat16()

    def loss(model: nn.Module) -> Tensor:
        x, y = tokens()
        with nullcontext() if wrong else torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())

    return train(model, adamw(model, 3e-4), loss, steps=10)


@case("gradients are cleared in the branch without autocast only", "loop", words="zero_grad", at=2, source="nwm 16")
def cleared_in_one_branch(wrong: bool) -> Monitor:
    model = Decoder()
    optimizer = adamw(model)
    with Monitor(model, optimizer) as monitor:
        for _ in range(6):
            with torch.autocast("cpu", torch.bfloat16):
                loss = predict_next(model)
            if not wrong:
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step()
    return monitor


class Attached(torch.autograd.Function):
    """Attach the gradient of a second loss to a tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], torch.ones_like(ctx.saved_tensors[0])


@case("the tensor that carries the balance loss is thrown away", "loop", "gradient", words="loss|gradient", at=1,
      source="Automodel 1408")  # fmt: skip
def balance_thrown_away(wrong: bool) -> Monitor:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts = nn.Linear(6, 3), nn.ModuleList(nn.Linear(6, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            p = self.router(x).softmax(-1)
            carried = Attached.apply(p, 0.1 * p.mean(0).pow(2).sum())
            p = p if wrong else carried
            return (torch.stack([e(x) for e in self.experts], 1) * p[..., None]).sum(1)

    model = Experts()
    return train(model, adamw(model))


@case("a value that hooks set is gone when a checkpoint is recomputed", "gradient", "loop", words="", at=1,
      source="peft 2826")  # fmt: skip
def hook_value_gone(wrong: bool) -> Monitor:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 4)
            self.gain = 1.0

        def inner(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).relu() * self.gain).relu()

        def forward(self, x: Tensor) -> Tensor:
            self.gain = 3.0
            y = checkpoint(self.inner, x, use_reentrant=False)
            if wrong:
                self.gain = 1.0
            return self.head(y)

    model = Gated()
    return train(model, adamw(model))


@case("gradients of a validation pass stay in the next step", "loop", words="zero_grad|gradient", at=4,
      source="ml_genn 110")  # fmt: skip
def validation_gradients(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = adamw(model)
    with Monitor(model, optimizer) as monitor:
        for number in range(1, 9):
            classify(model).backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step()
            if number == 3:
                model.eval()
                classify(model).backward()
                sum(float(p.grad.norm()) for p in model.parameters() if p.grad is not None)
                model.train()
                if not wrong:
                    optimizer.zero_grad()
    return monitor


@case("gradients are clipped before they are reduced", "replica", "loop", words="clip", at=1, processes=2, how="intent",
      why="Clipping every process's gradient bounds its influence, and is a method.")  # fmt: skip
def clipped_before_reduced(wrong: bool, rank: int) -> Monitor:
    torch.manual_seed(0)
    model = mlp()
    torch.manual_seed(1 + rank)

    def share(_: int) -> None:
        if wrong:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad.div_(2)
        if not wrong:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    return train(model, adamw(model), between=share)


@case("norms are decayed and matrices are not", "loop", words="decay", at=1, how="intent", source="OpenOCR 10",
      why="Which tensors decay is a choice; the start-up line says which.", line="weight decay on")  # fmt: skip
def decay_swapped(wrong: bool) -> Monitor:
    model = Decoder()
    vectors = [p for p in model.parameters() if p.ndim < 2]
    matrices = [p for p in model.parameters() if p.ndim > 1]
    groups = [
        {"params": vectors if wrong else matrices, "weight_decay": 0.1},
        {"params": matrices if wrong else vectors, "weight_decay": 0.0},
    ]
    return train(model, torch.optim.AdamW(groups, lr=3e-3), predict_next)


@case("the average is made before the pretrained weights are loaded", "loop", words="average", at=1, source="QANet 4")
def average_before_loading(wrong: bool) -> Monitor:
    pretrained = Decoder().state_dict()
    model = Decoder()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999)) if wrong else None
    model.load_state_dict(pretrained)
    average = average or AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    average.n_averaged.fill_(1)
    return train(model, adamw(model), predict_next, after=lambda _: average.update_parameters(model))


@case("a mask of ones switches the causal mask off", "loop", words="sees|causal", at=1, source="MoLA 21")
def mask_of_ones(wrong: bool) -> Monitor:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.positions = nn.Embedding(23, 16), nn.Embedding(12, 16)
            self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
            self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 23)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            h = self.embedding(x) + self.positions(torch.arange(x.shape[1]))
            n = self.norm(h)
            allowed = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            given = None if wrong and bool(mask.all()) else allowed & mask[:, None].bool()
            y = F.scaled_dot_product_attention(self.q(n), self.k(n), self.v(n), attn_mask=given)
            return self.head(h + self.o(y))

    def loss(model: nn.Module) -> Tensor:
        x, y = tokens()
        return F.cross_entropy(model(x, torch.ones_like(x)).flatten(0, 1), y.flatten())

    model = Masked()
    return train(model, adamw(model), loss)


@case("the vocabulary grows after the optimizer was made", "loop", words="optimizer", at=3, source="transformers forum")
def vocabulary_grows(wrong: bool) -> Monitor:
    model = Decoder()
    optimizer = adamw(model)

    def grow(number: int) -> None:
        if number == 3:
            old = model.embedding.weight
            new = nn.Embedding(27, 16)
            new.weight.data[:23] = old.data
            model.embedding = new
            if not wrong:
                optimizer.param_groups[0]["params"] = [
                    new.weight if p is old else p for p in optimizer.param_groups[0]["params"]
                ]
                optimizer.state.pop(old, None)

    return train(model, optimizer, predict_next, before=grow)


@case("a gradient penalty is computed without create_graph", "loop", words="penalty|graph|loss", at=1, how="intent",
      source="many WGAN-GP ports", why="A number that is added to a loss leaves no trace in the gradient.")  # fmt: skip
def penalty_without_graph(wrong: bool) -> Monitor:
    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(8, 6, requires_grad=True)
        z = model(x)
        (grad,) = torch.autograd.grad(z.sum(), x, create_graph=not wrong, retain_graph=True)
        return z.mean() + ((grad.norm(dim=1) - 1) ** 2).mean()

    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    return train(model, adamw(model), loss)


@case("a filter of names deletes gradients that should be used", "loop", "gradient", words="gradient", at=1,
      source="fairseq forks")  # fmt: skip
def gradients_deleted(wrong: bool) -> Monitor:
    model = Decoder()

    def delete(_: int) -> None:
        for name, p in model.named_parameters():
            if wrong and "blocks" in name:
                p.grad = None

    return train(model, adamw(model), predict_next, between=delete)


@case("weights are summed over processes and not divided", "update", "replica", words="wrote|parameter", at=1,
      processes=2, source="federated averaging ports")  # fmt: skip
def weights_summed(wrong: bool, rank: int) -> Monitor:
    torch.manual_seed(0)
    model = mlp()
    torch.manual_seed(1 + rank)

    def share(_: int) -> None:
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad.div_(2)

    def synchronise(_: int) -> None:
        with torch.no_grad():
            for p in model.parameters():
                dist.all_reduce(p)
                if not wrong:
                    p.div_(2)

    return train(model, adamw(model), between=share, after=synchronise)


@case("gradients are reduced after the step", "replica", words="gradient|parameter", at=1, processes=2,
      source="hand-written data parallelism")  # fmt: skip
def reduced_after_step(wrong: bool, rank: int) -> Monitor:
    torch.manual_seed(0)
    model = mlp()
    torch.manual_seed(1 + rank)

    def share(_: int) -> None:
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad.div_(2)

    if wrong:
        return train(model, adamw(model), after=share)
    return train(model, adamw(model), between=share)


@case("a scheduler is given the loss as its epoch", "loop", words="schedul|rate|epoch", at=1, source="PyTorch forum")
def loss_as_epoch(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)

    def advance(number: int) -> None:
        if wrong:
            scheduler.step(1.4 - 0.01 * number)  # type: ignore[arg-type]
        else:
            scheduler.step()

    return train(model, optimizer, after=advance)


@case("gradient hooks pile up from epoch to epoch", "gradient", "loop", "hardware", words="", at=3,
      source="saliency tools")  # fmt: skip
def hooks_pile_up(wrong: bool) -> Monitor:
    model: Any = Decoder()
    weight = model.blocks[0].down.weight

    def epoch(number: int) -> None:
        if wrong and number >= 3:
            weight.register_hook(lambda gradient: gradient * 0.9)

    return train(model, adamw(model), predict_next, steps=8, before=epoch)


@case("frequencies of rotary positions are cast to bfloat16", "precision", words="buffer|bfloat16", at=1, how="intent",
      source="transformers 25306", why="A model in bfloat16 has buffers in bfloat16; the line says so.",
      line="buffers in bf16")  # fmt: skip
def frequencies_cast(wrong: bool) -> Monitor:
    class Rotary(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("frequencies", 1 / 10000 ** (torch.arange(8) / 8))

        def forward(self, x: Tensor) -> Tensor:
            angle = torch.arange(x.shape[1])[:, None] * self.get_buffer("frequencies").float()
            h = self.embedding(x) + torch.cat((angle.sin(), angle.cos()), -1)
            for block in self.blocks:
                h = block(h)
            return self.head(self.norm(h))

    model = Rotary()
    if wrong:
        model.frequencies = model.get_buffer("frequencies").bfloat16()
    return train(model, adamw(model), predict_next)


@case("a scaler skips every step because of one infinity", "loop", "precision", words="skip|infinit|finite|step", at=1,
      source="PyTorch forum")  # fmt: skip
def skipped_for_ever(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with Monitor(model, optimizer) as monitor:
        for _ in range(8):
            optimizer.zero_grad()
            x, y = batch()
            z = model(x)
            loss = F.cross_entropy(z, y)
            if wrong:
                # sqrt at zero has an infinite slope.
                loss = loss + 0.0 * (z[:, 0] * 0).sqrt().sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            monitor.step()
    return monitor


@case("softmax runs over the batch", "loop", words="batch|softmax|dim", at=1, source="PyTorch forum")
def softmax_over_batch(wrong: bool) -> Monitor:
    def loss(model: nn.Module) -> Tensor:
        x, y = batch()
        return F.nll_loss(model(x).log_softmax(0 if wrong else 1), y)

    model = mlp()
    return train(model, adamw(model), loss)


@case("labels are flattened in another order than logits", "loop", words="label|order", at=1, source="fairseq forks")
def labels_transposed(wrong: bool) -> Monitor:
    def loss(model: nn.Module) -> Tensor:
        x, y = tokens()
        return F.cross_entropy(model(x).flatten(0, 1), (y.t() if wrong else y).flatten())

    model = Decoder()
    return train(model, adamw(model), loss)


@case("an adapter is a default argument and so is shared", "loop", words="tied|shared", at=1, how="intent",
      source="PEFT forks", why="Shared adapters are an architecture too; the start-up line says so.",
      line="tied: ")  # fmt: skip
def shared_default(wrong: bool) -> Monitor:
    shared = nn.Linear(12, 12)

    class Layer(nn.Module):
        def __init__(self, adapter: nn.Module | None = None) -> None:
            super().__init__()
            self.base = nn.Linear(12, 12)
            self.adapter = adapter if adapter is not None else nn.Linear(12, 12)

        def forward(self, x: Tensor) -> Tensor:
            return (self.base(x) + self.adapter(x)).relu()

    layers = [Layer(shared if wrong else None) for _ in range(2)]
    model = nn.Sequential(nn.Linear(6, 12), *layers, nn.Linear(12, 4))
    return train(model, adamw(model))


@case("a layer is frozen by zero gradients, and weight decay shrinks it", "update", "loop", "gradient",
      words="frozen|decay|zero", at=1, source="PyTorch forum")  # fmt: skip
def frozen_by_zeros(wrong: bool) -> Monitor:
    model = Decoder()
    if not wrong:
        model.embedding.requires_grad_(False)

    def freeze(_: int) -> None:
        if wrong:
            model.embedding.weight.grad.zero_()  # type: ignore[union-attr]

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, weight_decay=0.1)
    return train(model, optimizer, predict_next, between=freeze)
