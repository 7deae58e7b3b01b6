"""Errors between two processes that reduce gradients by hand or by a wrapper."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from conserved import Monitor
from error_programs.case import case, mlp
from error_programs.habits import ANY, adamw
from error_programs.training import classify, train


def model_of(rank: int) -> Any:
    """Return the same model on every rank, and seed what follows by rank."""
    torch.manual_seed(0)
    model = mlp()
    torch.manual_seed(1 + rank)
    return model


def reduce_all(model: nn.Module) -> None:
    """Average the gradients of a model over the processes."""
    for p in model.parameters():
        dist.all_reduce(p.grad)
        assert p.grad is not None
        p.grad.div_(2)


@case("only rank 0 steps its scheduler", *ANY, words="rate|schedul|differ|rank", at=2, processes=2)
def schedule_on_one_rank(wrong: bool, rank: int) -> Monitor:
    model = model_of(rank)
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def after(_: int) -> None:
        if rank == 0 or not wrong:
            scheduler.step()

    return train(model, optimizer, between=lambda _: reduce_all(model), after=after)


@case("rank 0 steps and one tensor is missing in its broadcast", *ANY, words="differ|rank", processes=2)
def broadcast_misses_one(wrong: bool, rank: int) -> Monitor:
    model = model_of(rank)
    optimizer = adamw(model)

    def send(_: int) -> None:
        for name, p in model.named_parameters():
            if not wrong or name != "3.weight":
                dist.broadcast(p.data, 0)

    def share(_: int) -> None:
        for name, p in model.named_parameters():
            if not wrong or name != "3.weight":
                dist.all_reduce(p.grad)
                p.grad.div_(2)

    return train(model, optimizer, between=share, after=send)


@case("gradients leave the flat buffer that is reduced", *ANY, words="gradient", at=2, processes=2)
def flat_buffer_left(wrong: bool, rank: int) -> Monitor:
    model = model_of(rank)
    optimizer = adamw(model)
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    parts = flat.split([p.numel() for p in model.parameters()])
    with Monitor(model, optimizer) as monitor:
        for number in range(6):
            if number == 0 or not wrong:
                flat.zero_()
                for p, part in zip(model.parameters(), parts, strict=True):
                    p.grad = part.view_as(p)
            else:
                # Sets them to None, and the backward pass makes new ones.
                optimizer.zero_grad()
            classify(model).backward()
            dist.all_reduce(flat)
            flat.div_(2)
            optimizer.step()
            monitor.step()
    return monitor


@case("the reduced copy of a gradient is not copied back", *ANY, words="gradient", processes=2)
def copy_not_returned(wrong: bool, rank: int) -> Monitor:
    model = model_of(rank)

    def share(_: int) -> None:
        for p in model.parameters():
            assert p.grad is not None
            small = p.grad.bfloat16()
            dist.all_reduce(small)
            if not wrong:
                p.grad.copy_(small.float() / 2)

    return train(model, adamw(model), between=share)


@case("weights are broadcast in every step and gradients are not reduced", *ANY, words="gradient|differ", processes=2)
def broadcast_hides(wrong: bool, rank: int) -> Monitor:
    model = model_of(rank)

    def share(_: int) -> None:
        if not wrong:
            reduce_all(model)

    def send(_: int) -> None:
        for p in model.parameters():
            dist.broadcast(p.data, 0)

    return train(model, adamw(model), between=share, after=send)


@case("one rank resumes from an older checkpoint", *ANY, words="differ|rank|not what", at=3, processes=2)
def older_on_one_rank(wrong: bool, rank: int) -> Monitor:
    model = model_of(rank)
    old = {key: value.clone() for key, value in model.state_dict().items()}

    def before(number: int) -> None:
        if number == 3 and wrong and rank == 1:
            model.load_state_dict(old)

    return train(model, adamw(model), before=before, between=lambda _: reduce_all(model))


@case("gradients are divided by the number of processes twice", *ANY, words="scale|divid|twice", processes=2)
def divided_twice(wrong: bool, rank: int) -> Monitor:
    model: Any = DistributedDataParallel(model_of(0))
    torch.manual_seed(1 + rank)

    def share(_: int) -> None:
        if wrong:
            for p in model.parameters():
                p.grad.div_(2)

    return train(model, adamw(model), between=share)


@case("the largest and not the mean of gradients is taken", *ANY, words="reduc|mean|gradient", processes=2)
def largest_taken(wrong: bool, rank: int) -> Monitor:
    model = model_of(rank)

    def share(_: int) -> None:
        for p in model.parameters():
            dist.all_reduce(p.grad, dist.ReduceOp.MAX if wrong else dist.ReduceOp.SUM)
            assert p.grad is not None
            if not wrong:
                p.grad.div_(2)

    return train(model, adamw(model), between=share)


@case("ranks leave out the reduction of a layer that they froze", *ANY, words="gradient|differ", at=3, processes=2)
def layer_left_out(wrong: bool, rank: int) -> Monitor:
    model = model_of(rank)

    def share(number: int) -> None:
        for name, p in model.named_parameters():
            if wrong and number >= 3 and name.startswith("5"):
                continue
            dist.all_reduce(p.grad)
            p.grad.div_(2)

    return train(model, adamw(model), between=share)
