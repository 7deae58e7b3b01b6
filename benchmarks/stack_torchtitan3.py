"""Training runs on torchtitan 0.3, built as its trainer builds them."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from stack_configurations import Training, configuration
from stack_models import make_pieces_of_whole

for _model in ("llama3", "deepseek_v3", "qwen3"):
    import_module(f"torchtitan.models.{_model}")
# Meshes are of the accelerator by default, and there is none.
for _name in ("torchtitan.distributed.parallel_dims", "torchtitan.tools.utils"):
    import_module(_name).device_type = "cpu"  # type: ignore[attr-defined]

VOCABULARY, LENGTH, LAYERS = 2048, 16, 2

_histc = torch.histc


def _count(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:  # noqa: A002
    """Count integers, which `torch.histc` refuses on a CPU: routers count tokens by it."""
    return _histc(x.float(), bins, min, max).to(x.dtype)


setattr(torch, "histc", _count)  # noqa: B010


def _build(
    rank: int,
    world: int,
    name: str,
    *,
    backend: str = "partial_dtensor",
    compiled: bool = False,
    checkpointing: str = "",
    bf16: bool = False,
    **degrees: int,
) -> Training:
    settings = import_module("torchtitan.config")
    spec = import_module(f"torchtitan.models.{name}").model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:LAYERS]
    for layer in spec.model.layers:
        # FlexAttention has no backward pass on a processor.
        attention = import_module("torchtitan.models.common.attention").ScaledDotProductAttention
        layer.attention.inner_attention = attention.Config()
    degrees = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "ep": 1, "pp": 1, **degrees}
    parallelism = settings.ParallelismConfig(
        data_parallel_replicate_degree=degrees["dp_replicate"],
        data_parallel_shard_degree=degrees["dp_shard"],
        tensor_parallel_degree=degrees["tp"],
        context_parallel_degree=degrees["cp"],
        expert_parallel_degree=degrees["ep"],
        spmd_backend=backend,
    )
    training = settings.TrainingConfig(
        local_batch_size=2,
        seq_len=LENGTH,
        disable_cuda_graphs=True,
        mixed_precision_param="bfloat16" if bf16 else "float32",
    )
    compile_config = settings.CompileConfig(enable=compiled, backend="aot_eager", components=["model"])
    dims = import_module("torchtitan.distributed").ParallelDims(**degrees, world_size=world, spmd_backend=backend)
    dims.build_mesh()
    distributed = import_module("torchtitan.distributed.utils")
    distributed.set_spmd_backend(backend)
    debug = SimpleNamespace(moe_force_load_balance=False, spmd_typechecking=False)
    spec.model.update_from_config(
        config=SimpleNamespace(
            parallelism=parallelism, training=training, compile=compile_config, debug=debug, loss=None
        )
    )
    torch.manual_seed(0)
    with torch.device("meta"):
        model = spec.model.build()
    checkpoints = import_module("torchtitan.distributed.activation_checkpoint")
    kinds = {"full": "FullAC", "selective": "SelectiveAC"}
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=parallelism,
        compile_config=compile_config,
        ac_config=getattr(checkpoints, kinds[checkpointing]).Config() if checkpointing else None,
        dump_folder="",
    )
    for module in model.modules():
        # Gloo has no reduction that scales; sums are divided afterwards.
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    make_pieces_of_whole(model)
    model.train()
    optimizers = import_module("torchtitan.components.optimizer").default_adamw(lr=8e-4).build(model_parts=[model])
    if spec.post_optimizer_build_fn is not None:
        spec.post_optimizer_build_fn(optimizers, [model], dims)
    data_rank = rank // (degrees["tp"] * degrees["cp"])
    context = distributed.get_spmd_context(parallel_dims=dims, spmd_typechecking=False)

    def step(number: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * number + data_rank)
        tokens = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=generator)
        optimizers.zero_grad()
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        more: dict[str, Any] = {"positions": torch.arange(LENGTH).expand(2, -1)}
        if degrees["cp"] > 1:
            prepare = import_module("torchtitan.distributed.context_parallel").prepare_context_parallel_input
            inputs, labels, more = prepare(
                inputs, labels, more, dims.get_mesh("cp"), torch.device("cpu"), "headtail", None
            )
        if backend == "full_dtensor":
            full = import_module("torchtitan.distributed.full_dtensor")
            inputs, labels, more = full.parallelize_inputs(dims, inputs, labels, more)
        elif backend == "spmd_types":
            annotate = import_module("torchtitan.trainer").annotate_input_spmd_types
            inputs, labels, more = annotate(dims, inputs, labels, more)
        with context():
            logits: Any = model(inputs, **more)
            if hasattr(logits, "full_tensor"):
                logits = logits.full_tensor()
            if hasattr(labels, "full_tensor"):
                labels = labels.full_tensor()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
            loss.backward()
        optimizers.step()
        return loss

    return Training(model, optimizers, step)


def _register(title: str, processes: int, **options: Any) -> None:
    configuration(f"torchtitan 0.3.0, {title}", processes)(partial(_build, **options))


for _name in ("llama3", "deepseek_v3", "qwen3"):
    _register(f"{_name}, FSDP", 2, name=_name, dp_shard=2)
    _register(f"{_name}, TP", 2, name=_name, tp=2)
    _register(f"{_name}, FSDP x TP", 4, name=_name, dp_shard=2, tp=2)
    _register(f"{_name}, HSDP", 4, name=_name, dp_shard=2, dp_replicate=2)
_register("llama3, FSDP, spmd_types", 2, name="llama3", dp_shard=2, backend="spmd_types")
_register("llama3, TP, spmd_types", 2, name="llama3", tp=2, backend="spmd_types")
_register("llama3, FSDP, full_dtensor", 2, name="llama3", dp_shard=2, backend="full_dtensor")
_register("llama3, TP, full_dtensor", 2, name="llama3", tp=2, backend="full_dtensor")
_register("llama3, CP", 2, name="llama3", cp=2)
_register("llama3, FSDP, compile", 2, name="llama3", dp_shard=2, compiled=True)
_register("llama3, FSDP, full checkpointing", 2, name="llama3", dp_shard=2, checkpointing="full")
_register("llama3, FSDP, selective checkpointing", 2, name="llama3", dp_shard=2, checkpointing="selective")
_register("llama3, FSDP, bf16", 2, name="llama3", dp_shard=2, bf16=True)
_register("deepseek_v3, EP", 2, name="deepseek_v3", dp_shard=2, ep=2)
_register("deepseek_v3, EP x FSDP", 4, name="deepseek_v3", dp_shard=4, ep=2)
