"""Default monitors on Megatron Core over two processes: right gradients are verified, planted defects are seen.

    python benchmarks/stack_megatron.py --package FOLDER      # of `pip install --no-deps --target FOLDER megatron-core`

Megatron Core asks for CUDA in a few places. The modules that do get a stand-in for `torch` here that makes such tensors
on the processor; nothing of torch itself is replaced, except the current device and waiting for it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

import conserved
from measure import RESULTS, save

WORLD, STEPS, VOCABULARY, LENGTH = 2, 2, 64, 16
ON_DEVICE = (
    "utils",
    "optimizer.optimizer",
    "optimizer.clip_grads",
    "optimizer.grad_scaler",
    "pipeline_parallel.schedules",
    "pipeline_parallel.p2p_communication",
)
TENSOR = {"tensor_model_parallel_size": 2}
CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "data parallel": ({}, {}),
    "TP": (TENSOR, {}),
    "TP+SP": (TENSOR, {"sequence_parallel": True}),
    "TP, query and key norms": (TENSOR, {"qk_layernorm": True}),
}
DEFECTS = {
    "TP+SP": "final norm not marked sequence_parallel (Megatron-LM #1446)",
    "TP": "input gradient of column-parallel layers not reduced",
    "TP, query and key norms": "query and key norms not reduced over TP (NeMo-RL #3716)",
    "data parallel": "gradients not reduced over data parallelism",
}


class OnProcessor(types.ModuleType):
    """`torch` with tensors of the device "cuda" made on the processor."""

    def __getattr__(self, name: str) -> Any:
        original = getattr(torch, name)
        if name not in ("tensor", "zeros", "empty", "ones", "full"):
            return original

        def make(*args: Any, **kwargs: Any) -> Any:
            if str(kwargs.get("device")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return original(*args, **kwargs)

        return make


def prepare(package: str) -> None:
    """Make Megatron Core importable and runnable on the processor."""
    sys.path.insert(0, package)
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None
    for name in ON_DEVICE:
        vars(importlib.import_module(f"megatron.core.{name}"))["torch"] = OnProcessor("torch")
    tracker: Any = importlib.import_module("megatron.core.tensor_parallel.random").CudaRNGStatesTracker
    tracker.fork = lambda self, name=None: contextlib.nullcontext()
    norm: Any = importlib.import_module("megatron.core.transformer.torch_norm").WrappedTorchNorm

    def make_norm(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
        made = torch.nn.RMSNorm(hidden_size, eps)
        vars(made.weight)["sequence_parallel"] = config.sequence_parallel
        return made

    norm.__new__ = staticmethod(make_norm)


def build(parallel: dict[str, int], options: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return configuration, model and optimizer of a small gated transformer."""
    core = "megatron.core."
    state = importlib.import_module(core + "parallel_state")
    state.destroy_model_parallel()
    state.initialize_model_parallel(**parallel)
    config = importlib.import_module(core + "transformer.transformer_config").TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=48,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        pipeline_dtype=torch.float32,
        **parallel,
        **options,
    )
    torch.manual_seed(0)
    spec = importlib.import_module(core + "models.gpt.gpt_layer_specs").get_gpt_layer_local_spec(
        qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    stage, stages = state.get_pipeline_model_parallel_rank(), state.get_pipeline_model_parallel_world_size()
    model = importlib.import_module(core + "models.gpt").GPTModel(
        config,
        spec,
        VOCABULARY,
        LENGTH,
        pre_process=stage == 0,
        post_process=stage == stages - 1,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    distributed = importlib.import_module(core + "distributed")
    wrapped = distributed.DistributedDataParallel(config, distributed.DistributedDataParallelConfig(), model)
    optimizers = importlib.import_module(core + "optimizer")
    settings = optimizers.OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=0.0)
    config.finalize_model_grads_func = distributed.finalize_model_grads
    return config, wrapped, optimizers.get_megatron_optimizer(settings, [wrapped])


def plant(name: str, config: Any, model: Any) -> None:
    """Plant the defect of a case."""
    if name == "TP+SP":
        model.module.decoder.final_layernorm.weight.sequence_parallel = False
    elif name == "TP":
        for module in model.modules():
            if hasattr(module, "allreduce_dgrad"):
                # Without the second, the layer falls back to a copy whose backward reduces.
                module.allreduce_dgrad, module.disable_grad_reduce = False, True
    elif name == "data parallel":
        model.finish_grad_sync = lambda **_: None
    else:
        config.qk_layernorm = False


def batches(seed: int, rank: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield tokens, positions, mask and labels."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    while True:
        tokens = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=generator)
        mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]
        yield tokens[:, :-1], torch.arange(LENGTH).expand(2, -1), mask, tokens[:, 1:]


def forward(data: Iterator[tuple[torch.Tensor, ...]], model: Any) -> tuple[Any, Any]:
    """Return the output of one micro-batch, and what makes a loss of it."""
    tokens, positions, mask, labels = next(data)
    return model(tokens, positions, mask, labels=labels), lambda out: (
        out.float().mean(),
        {"loss": out.detach().mean()},
    )


def run(name: str, planted: bool, watched: bool = True) -> dict[str, Any]:
    """Train a few steps and say what the monitor of this process saw."""
    config, model, optimizer = build(*CASES[name])
    if planted:
        plant(name, config, model)
    monitor = conserved.Monitor(model, optimizer) if watched else None
    state = importlib.import_module("megatron.core.parallel_state")
    schedule = importlib.import_module("megatron.core.pipeline_parallel").get_forward_backward_func()
    seconds = []
    for step in range(STEPS):
        began = time.perf_counter()
        model.zero_grad_buffer()
        optimizer.zero_grad()
        schedule(
            forward_step_func=forward,
            data_iterator=batches(step, state.get_data_parallel_rank()),
            model=[model],
            num_microbatches=2,
            seq_length=LENGTH,
            micro_batch_size=2,
            forward_only=False,
        )
        optimizer.step()
        if monitor is not None:
            monitor.step()
        seconds.append(time.perf_counter() - began)
    if monitor is None:
        return {"step_seconds": seconds[-1]}
    audit = monitor.last_audit
    record = {
        "rank": dist.get_rank(),
        "laws_tested": 0 if audit is None else audit.tested,
        "coverage": None if audit is None else audit.coverage.parameters,
        "verdict": None if audit is None else audit.verdict.status.value,
        "bytes_sent": None if audit is None else audit.moved_bytes,
        "step_seconds": seconds[-1],
        "state": monitor.state,
        "alarms": [{"step": a.step, "code": a.code, "law": a.law, "message": a.message} for a in monitor.alarms],
    }
    monitor.close()
    return record


def work(rank: int, meeting: str, package: str, folder: str) -> None:
    """Run all cases on one of the processes."""
    torch.set_num_threads(1)
    # Before Megatron is prepared: both import modules of torch that are compiled.
    _ = conserved.Monitor, conserved.recognize
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=100)
    )
    prepare(package)
    results: list[dict[str, Any]] = []
    for name in CASES:
        plain = run(name, planted=False, watched=False)["step_seconds"]
        results.append({"case": name, "defect": None, "plain_step_seconds": plain} | run(name, planted=False))
        if name in DEFECTS:
            results.append({"case": name, "defect": DEFECTS[name]} | run(name, planted=True))
        Path(folder, f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def main() -> None:
    """Run, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", required=True)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, args=(f"{folder}/meeting", options.package, folder), nprocs=WORLD)
        rows = [row for rank in range(WORLD) for row in json.loads(Path(folder, f"{rank}.json").read_text())]
    sys.path.insert(0, options.package)
    version = importlib.import_module("megatron.core.package_info").__version__
    for row in rows:
        seen = "; ".join(f"step {a['step']} {a['code']} {a['law']}" for a in row["alarms"]) or "silent"
        print(f"rank {row['rank']}  {row['case']:26} {row['defect'] or 'right':55} {row['verdict']}  {seen}")
    print(save("stack_megatron", {"megatron_core": version, "processes": WORLD, "runs": rows}, options.out))


if __name__ == "__main__":
    main()
