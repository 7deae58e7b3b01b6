"""Errors that differ from rank to rank: modes, precision, hooks of communication, state of the optimizer."""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from conserved import Monitor
from error_programs.case import case, mlp
from error_programs.models import Decoder
from error_programs.training import classify, predict_next, train


def _wrapped(rank: int, model: Any = None) -> Any:
    torch.manual_seed(0)
    wrapped = DistributedDataParallel(model if model is not None else mlp())
    torch.manual_seed(1 + rank)
    return wrapped


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Return AdamW over all parameters."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@case("one rank trains in eval mode", "replica", "loop", words="mode|eval", at=1, processes=2)
def eval_on_one_rank(wrong: bool, rank: int) -> Monitor:
    model = _wrapped(rank, mlp(drop=0.2))
    if wrong and rank == 1:
        model.eval()
    return train(model, adamw(model))


@case("one rank runs in autocast and the other does not", "replica", "precision", words="autocast|precision", at=1,
      processes=2)  # fmt: skip
def autocast_on_one_rank(wrong: bool, rank: int) -> Monitor:
    model = _wrapped(rank)

    def loss(model: nn.Module) -> Any:
        off = wrong and rank == 1
        with nullcontext() if off else torch.autocast("cpu", torch.bfloat16):
            return classify(model)

    return train(model, adamw(model), loss)


@case("a communication hook returns the local gradient", "replica", words="gradient", at=1, processes=2)
def hook_without_reduction(wrong: bool, rank: int) -> Monitor:
    model = _wrapped(rank)
    if wrong:

        def keep(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            future: Any = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        model.register_comm_hook(None, keep)
    return train(model, adamw(model))


@case("gradients are reduced to rank 0 only", "replica", words="gradient", at=1, processes=2)
def reduced_to_one_rank(wrong: bool, rank: int) -> Monitor:
    torch.manual_seed(0)
    model = Decoder()
    torch.manual_seed(1 + rank)

    def share(_: int) -> None:
        for p in model.parameters():
            if wrong:
                assert p.grad is not None
                dist.reduce(p.grad, 0)
            else:
                dist.all_reduce(p.grad)
            p.grad.div_(2)  # type: ignore[union-attr]

    return train(model, adamw(model), predict_next, between=share)


@case("moments are restored on rank 0 only", "replica", words="state|moment|parameter|optimizer", at=4, processes=2)
def moments_on_one_rank(wrong: bool, rank: int) -> Monitor:
    model = _wrapped(rank)
    optimizer = adamw(model)

    def lose(number: int) -> None:
        if number == 4 and wrong and rank == 1:
            for state in optimizer.state.values():
                state["exp_avg"].zero_()

    return train(model, optimizer, before=lose)


@case("the weight decay differs between ranks", "replica", words="parameter|decay|option", at=1, processes=2)
def decay_differs(wrong: bool, rank: int) -> Monitor:
    model = _wrapped(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1 if wrong and rank else 0.01)
    return train(model, optimizer)


@case("gradients are summed in another order of tensors on one rank", "replica", words="gradient|differ", at=1,
      processes=2)  # fmt: skip
def order_differs(wrong: bool, rank: int) -> Monitor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 4))
    torch.manual_seed(1 + rank)

    def share(_: int) -> None:
        own = [p for p in model.parameters() if p.grad is not None]
        if wrong and rank == 1:
            own[0], own[2] = own[2], own[0]
        for p in own:
            dist.all_reduce(p.grad)
            p.grad.div_(2)  # type: ignore[union-attr]

    return train(model, adamw(model), between=share)


@case("all ranks have one seed, and so the same batches", "replica", "loop", words="same (batch|data)",
      at=1, processes=2)  # fmt: skip
def seeds_equal(wrong: bool, rank: int) -> Monitor:
    torch.manual_seed(0)
    model = Decoder(drop=0.1)
    torch.manual_seed(7 if wrong else 7 + rank)

    def share(_: int) -> None:
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad.div_(2)  # type: ignore[union-attr]

    return train(model, adamw(model), predict_next, between=share)


@case("a parameter is frozen on one rank after wrapping", "replica", "loop", words="frozen|gradient|parameter", at=3,
      processes=2)  # fmt: skip
def frozen_on_one_rank(wrong: bool, rank: int) -> Monitor:
    torch.manual_seed(0)
    model = mlp()
    torch.manual_seed(1 + rank)

    def freeze(number: int) -> None:
        if number == 3 and wrong and rank == 1:
            model[0].weight.requires_grad_(False)

    def share(_: int) -> None:
        for p in model.parameters():
            grad = p.grad if p.grad is not None else torch.zeros_like(p)
            dist.all_reduce(grad)
            if p.grad is not None:
                p.grad.div_(2)

    return train(model, adamw(model), before=freeze, between=share)
