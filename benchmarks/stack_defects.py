"""Defects of parallel training loops, each beside the correct run that `stack_configurations` has of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from stack_configurations import CONFIGURATIONS, Training, adamw, configuration, shard, tensor_parallel, train
from stack_models import DecoderConfig, make_decoder, make_tokens, token_loss

CORRECT = set(CONFIGURATIONS)
"""Runs that were registered before: the correct ones."""


@configuration("defect: no_sync left on (DDP)")
def _no_sync(rank: int, world: int) -> Training:
    model = DistributedDataParallel(make_decoder())
    optimizer = adamw(model)
    inner = train(model, optimizer, rank)

    def step(number: int) -> Tensor:
        with model.no_sync():
            return inner(number)

    return Training(model, optimizer, step)


@configuration("defect: the module inside DDP is called, so that no hook reduces")
def _inner_called(rank: int, world: int) -> Training:
    model = DistributedDataParallel(make_decoder())
    optimizer = adamw(model)
    return Training(model.module, optimizer, train(model.module, optimizer, rank))


@configuration("defect: processes start from other weights (no broadcast)")
def _other_weights(rank: int, world: int) -> Training:
    model = DistributedDataParallel(make_decoder())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * rank)
    optimizer = adamw(model)
    return Training(model, optimizer, train(model, optimizer, rank))


def _changed(parallel: Any, change: Any) -> Any:
    """A run whose gradients are changed between backward and the step."""

    def build(rank: int, world: int) -> Training:
        model = make_decoder()
        parallel(model, world)
        optimizer, config = adamw(model), DecoderConfig()

        def step(number: int) -> Tensor:
            tokens = make_tokens(config, step=number)
            optimizer.zero_grad()
            loss = token_loss(model(tokens[:, :-1]), tokens)
            loss.backward()
            change(model, rank)
            optimizer.step()
            return loss

        return Training(model, optimizer, step)

    return build


def _fsdp(model: Any, world: int) -> None:
    shard(model, init_device_mesh("cpu", (world,)))


def _tp(model: Any, world: int) -> None:
    tensor_parallel(model, init_device_mesh("cpu", (world,)))


def _local(parameter: Any) -> Tensor:
    gradient = parameter.grad
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _half_of_norms(model: Any, rank: int) -> None:
    """Sequence-parallel norms keep the gradient of a process's own tokens: on average a half of the sum of two."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            _local(parameter).mul_(0.5)


def _lost_key_shard(model: Any, rank: int) -> None:
    if rank == 1:
        _local(model.layers["1"].attention.wk.weight).zero_()


def _query_scaled(model: Any, rank: int) -> None:
    _local(model.layers["0"].attention.wq.weight).mul_(2)


def _own_norm_gradients(model: Any, rank: int) -> None:
    """A replicated gain is not reduced: every process keeps a gradient of its own."""
    _local(model.layers["0"].ffn_norm.weight).mul_(1 + 0.3 * rank)


configuration("defect: sequence-parallel norm gradients not summed (TP)")(_changed(_tp, _half_of_norms))
configuration("defect: one shard of a key gradient is lost (FSDP2)")(_changed(_fsdp, _lost_key_shard))
configuration("defect: one shard of a key gradient is lost (TP)")(_changed(_tp, _lost_key_shard))
configuration("defect: query gradients scaled by the size of the group (TP)")(_changed(_tp, _query_scaled))
configuration("defect: query gradients scaled by the size of the group (FSDP2)")(_changed(_fsdp, _query_scaled))
configuration("defect: a replicated gain is not reduced (TP)")(_changed(_tp, _own_norm_gradients))
