"""Training runs on DeepSpeed's engine, on a processor and gloo: ZeRO stages 0 to 3."""

from __future__ import annotations

import os
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from stack_configurations import Training
from stack_hand_written import DEFECTS, register
from stack_models import DecoderConfig, make_decoder, make_tokens, token_loss
from stack_variants import zero_second_half

os.environ.setdefault("DS_ACCELERATOR", "cpu")


def build(rank: int, world: int, stage: int, bf16: bool = False, micro: int = 1, change: Any = None) -> Training:
    """Return a run of `deepspeed.initialize`, as its tutorial writes it."""
    deepspeed = import_module("deepspeed")
    # The engine would compile a collective for shared memory first, which gloo does not need.
    vars(import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    model = make_decoder()
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 4096},
        "bf16": {"enabled": bf16},
        "wall_clock_breakdown": False,
    }
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=inner, config=settings)
    config = DecoderConfig()

    def step(number: int) -> Tensor:
        for part in range(micro):
            tokens = make_tokens(config, step=10 * number + part, rank=rank)
            loss = token_loss(engine(tokens[:, :-1]), tokens)
            engine.backward(loss)
            if change is not None:
                change(engine, rank)
            engine.step()
        return loss

    return Training(engine, optimizer, step, micro)


def lose_range(engine: Any, rank: int) -> None:
    """Lose half of what rank 1 has of the reduced gradients."""
    if rank == 1:
        pieces = engine.optimizer.averaged_gradients[0]
        for piece in pieces[: len(pieces) // 2]:
            piece.zero_()


for _stage in (0, 1, 2, 3):
    _defects: dict[str, dict[str, Any]] = {}
    if _stage == 0:
        _defects = {"gradients of rank 1 lost": {"change": lambda engine, rank: zero_second_half(engine.module, rank)}}
    if _stage in (1, 2, 3):
        _defects = {"half of the gradients of rank 1 lost": {"change": lose_range}}
    register(f"DeepSpeed 0.19.8, ZeRO-{_stage}", partial(build, stage=_stage), _defects)
register("DeepSpeed 0.19.8, ZeRO-1, bf16", partial(build, stage=1, bf16=True), {})
register("DeepSpeed 0.19.8, ZeRO-2, accumulation", partial(build, stage=2, micro=2), {})

__all__ = ["DEFECTS"]
