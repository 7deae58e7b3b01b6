"""Training runs on Megatron Core: right ones, and real defects of it planted as their reports describe them.

    PYTHONPATH=FOLDER python benchmarks/stack_table.py --stack stack_megatron      # FOLDER has megatron-core, --no-deps

Megatron Core asks for CUDA in a few places. The modules that do get a stand-in for `torch` here that makes such tensors
on the processor; nothing of torch itself is replaced, except the current device and waiting for it.
"""

from __future__ import annotations

import contextlib
import importlib
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import conserved
from stack_configurations import Training, configuration

# Before Megatron is prepared: both import modules of torch that are compiled.
_ = conserved.Monitor, conserved.recognize

CORE = "megatron.core."
VOCABULARY, LENGTH, MICRO = 64, 16, 2
ON_DEVICE = (
    "utils",
    "optimizer.optimizer",
    "optimizer.clip_grads",
    "optimizer.grad_scaler",
    "optimizer.distrib_optimizer",
    "pipeline_parallel.schedules",
    "pipeline_parallel.p2p_communication",
    "transformer.moe.moe_utils",
    "transformer.moe.router",
    "transformer.moe.token_dispatcher",
    "transformer.moe.experts",
    "transformer.attention",
    "transformer.multi_latent_attention",
    "models.common.embeddings.rotary_pos_embedding",
    "models.common.embeddings.yarn_rotary_pos_embedding",
    "distributed.param_and_grad_buffer",
    "distributed.distributed_data_parallel",
)
"""Modules that make tensors on the device "cuda"; releases differ in which of them they have."""

DEFECTS: dict[str, str] = {}
"""By name of a configuration with a defect, that of its correct twin."""


class OnProcessor(types.ModuleType):
    """`torch` with tensors of the device "cuda" made on the processor."""

    def __getattr__(self, name: str) -> Any:
        original = getattr(torch, name)
        if name not in ("tensor", "zeros", "empty", "ones", "full", "arange", "zeros_like", "empty_like"):
            return original

        def make(*args: Any, **kwargs: Any) -> Any:
            if str(kwargs.get("device")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return original(*args, **kwargs)

        return make


class NoStream:
    """A stream of a device that is not there."""

    def wait_stream(self, other: Any) -> None:
        """Wait for nothing."""

    def record_event(self, event: Any = None) -> NoStream:
        """Return an event that has happened."""
        return self

    def synchronize(self) -> None:
        """Wait for nothing."""

    def wait_event(self, event: Any) -> None:
        """Wait for nothing."""


def _accept_processor(owner: type) -> None:
    """Let methods of optimizers, which name types of CUDA tensors, accept those of the processor."""
    for method in list(vars(owner).values()):
        function = getattr(method, "__func__", method)
        if isinstance(function, types.FunctionType):
            function.__code__ = _without_cuda(function.__code__)


def _without_cuda(value: Any) -> Any:
    """Return a constant of a program with "torch.cuda." replaced by "torch."."""
    if isinstance(value, str):
        return value.replace("torch.cuda.", "torch.") if value.endswith("Tensor") else value
    if isinstance(value, tuple):
        return tuple(map(_without_cuda, value))
    if isinstance(value, types.CodeType):
        return value.replace(co_consts=tuple(map(_without_cuda, value.co_consts)))
    return value


def _move_to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return a tensor, or an array of its values."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def prepare() -> None:
    """Make Megatron Core runnable on the processor."""
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None
    for name in ON_DEVICE:
        with contextlib.suppress(ImportError):
            vars(importlib.import_module(CORE + name))["torch"] = OnProcessor("torch")
    cuda: Any = torch.cuda
    cuda.Stream = cuda.current_stream = lambda *_, **__: NoStream()
    cuda.stream = lambda *_: contextlib.nullcontext()
    random: Any = importlib.import_module(CORE + "tensor_parallel.random")
    for name in ("_get_cuda_rng_state", "get_cuda_rng_state"):
        setattr(random, name, lambda *_, **__: torch.get_rng_state())
    random._set_cuda_rng_state = lambda state, *_, **__: None
    for name in ("optimizer.distrib_optimizer", "optimizer.optimizer"):
        for owner in vars(importlib.import_module(CORE + name)).values():
            if isinstance(owner, type) and owner.__module__ == CORE + name:
                _accept_processor(owner)
    clipping = CORE + "optimizer.clip_grads"
    for value in vars(importlib.import_module(clipping)).values():
        if isinstance(value, types.FunctionType) and value.__module__ == clipping:
            value.__code__ = _without_cuda(value.__code__)
    with contextlib.suppress(ImportError):
        # Routers ask whether Transformer Engine has it, in a module that does not define it without.
        vars(importlib.import_module(CORE + "transformer.moe.moe_utils")).setdefault("te_general_gemm", None)
    with contextlib.suppress(ImportError):
        # Sizes of parts come to the host as arrays if they are on a device, and stay tensors otherwise.
        dispatcher: Any = importlib.import_module(CORE + "transformer.moe.token_dispatcher")
        dispatcher.maybe_move_tensor_to_cpu = _move_to_host
    tracker: Any = importlib.import_module("megatron.core.tensor_parallel.random").CudaRNGStatesTracker
    tracker.fork = lambda self, name=None: contextlib.nullcontext()
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    norm: Any = importlib.import_module("megatron.core.transformer.torch_norm").WrappedTorchNorm

    def make_norm(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
        made: torch.nn.Module = torch.nn.RMSNorm(hidden_size, eps)
        if config.normalization == "LayerNorm":
            made = torch.nn.LayerNorm(hidden_size, eps)
        for parameter in made.parameters():
            vars(parameter)["sequence_parallel"] = config.sequence_parallel
        return made

    norm.__new__ = staticmethod(make_norm)


VERSION: str = importlib.import_module(CORE + "package_info").__version__
prepare()


def make_config(parallel: dict[str, int], options: dict[str, Any]) -> Any:
    """Return the configuration of a small transformer."""
    settings: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 48,
        "use_cpu_initialization": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "pipeline_dtype": torch.float32,
    }
    return importlib.import_module(CORE + "transformer.transformer_config").TransformerConfig(
        **(settings | parallel | options)
    )


def make_chunk(config: Any, chunk: int | None, *, shared: bool) -> Any:
    """Return the model of this process, or one of its virtual stages."""
    state = importlib.import_module(CORE + "parallel_state")
    specs = importlib.import_module(CORE + "models.gpt.gpt_layer_specs")
    experts = getattr(config, "num_moe_experts", None)
    spec = specs.get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=False, qk_layernorm=config.qk_layernorm)
    more: dict[str, Any] = {}
    if chunk is not None:
        state.set_virtual_pipeline_model_parallel_rank(chunk)
        more = {"vp_stage": chunk} if "0.12" not in VERSION else {}
    stage, stages = state.get_pipeline_model_parallel_rank(), state.get_pipeline_model_parallel_world_size()
    virtual = state.get_virtual_pipeline_model_parallel_world_size() or 1
    first = stage == 0 and (chunk or 0) == 0
    last = stage == stages - 1 and (chunk is None or chunk == virtual - 1)
    return importlib.import_module(CORE + "models.gpt").GPTModel(
        config,
        spec,
        VOCABULARY,
        LENGTH,
        pre_process=first,
        post_process=last,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=shared,
        **more,
    )


def build(
    rank: int,
    world: int,
    parallel: dict[str, int],
    options: dict[str, Any] | None = None,
    *,
    shared: bool = False,
    distributed_optimizer: bool = False,
    half: bool = False,
    clip: float = 0.0,
    settings: dict[str, Any] | None = None,
    plant: Callable[[Any, list[Any]], None] | None = None,
    prepare_chunks: Callable[[list[Any]], None] | None = None,
) -> Training:
    """Return a run as Megatron's own training loop makes it; `prepare_chunks` changes models before their wrapper."""
    state = importlib.import_module(CORE + "parallel_state")
    state.destroy_model_parallel()
    state.initialize_model_parallel(**parallel)
    precision: dict[str, Any] = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
    config = make_config(parallel, (options or {}) | (precision if half else {}))
    torch.manual_seed(0)
    virtual = parallel.get("virtual_pipeline_model_parallel_size")
    numbers: list[int | None] = [None] if virtual is None else list(range(virtual))
    chunks = [make_chunk(config, number, shared=shared) for number in numbers]
    if prepare_chunks is not None:
        prepare_chunks(chunks)
    distributed = importlib.import_module(CORE + "distributed")
    if half:
        # As `get_model` of its training loop does.
        wrapper = importlib.import_module(CORE + "transformer.module").Float16Module
        chunks = [wrapper(config, chunk) for chunk in chunks]
    reduction = distributed.DistributedDataParallelConfig(
        use_distributed_optimizer=distributed_optimizer, **({"grad_reduce_in_fp32": half} | (settings or {}))
    )
    models = [
        distributed.DistributedDataParallel(config, reduction, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
    optimizers = importlib.import_module(CORE + "optimizer")
    adam = optimizers.OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        clip_grad=clip,
        use_distributed_optimizer=distributed_optimizer,
        bf16=half,
        params_dtype=torch.bfloat16 if half else torch.float32,
    )
    optimizer = optimizers.get_megatron_optimizer(adam, models)
    config.finalize_model_grads_func = distributed.finalize_model_grads
    if plant is not None:
        plant(config, models)
    schedule = importlib.import_module(CORE + "pipeline_parallel").get_forward_backward_func()

    def step(number: int) -> None:
        for model in models:
            model.zero_grad_buffer()
        optimizer.zero_grad()
        data = [batches(number, state.get_data_parallel_rank()) for _ in models]
        schedule(
            forward_step_func=forward,
            data_iterator=data if virtual else data[0],
            model=models if virtual else models[:1],
            num_microbatches=MICRO,
            seq_length=LENGTH,
            micro_batch_size=2,
            forward_only=False,
        )
        optimizer.step()

    return Training(models[0] if len(models) == 1 else torch.nn.ModuleList(models), optimizer, step, MICRO)


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


def _unmarked(word: str) -> Callable[[Any, list[Any]], None]:
    """Parameters of a name lose the mark that lets their gradients be summed over tensor parallelism."""

    def plant(config: Any, models: list[Any]) -> None:
        for model in models:
            for name, parameter in model.named_parameters():
                if word in name:
                    parameter.sequence_parallel = False

    return plant


def _keep_input_gradients(config: Any, models: list[Any]) -> None:
    """Column-parallel layers do not sum the gradient of their input."""
    for model in models:
        for module in model.modules():
            if hasattr(module, "allreduce_dgrad"):
                # Without the second, the layer falls back to a copy whose backward reduces.
                module.allreduce_dgrad, module.disable_grad_reduce = False, True


def _skip_data_parallel(config: Any, models: list[Any]) -> None:
    for model in models:
        model.finish_grad_sync = lambda *_, **__: None


def _forget_norms(config: Any, models: list[Any]) -> None:
    config.qk_layernorm = False


def _replace_finalizer(name: str) -> Callable[[Any, list[Any]], None]:
    """One of the reductions at the end of a backward pass is left out."""

    def plant(config: Any, models: list[Any]) -> None:
        module: Any = importlib.import_module(CORE + "distributed.finalize_model_grads")
        assert hasattr(module, name), name
        setattr(module, name, lambda *_, **__: None)

    return plant


def _reduce_before_embeddings(config: Any, models: list[Any]) -> None:
    """Embedding gradients are summed over the pipeline after they were scattered over data parallelism (#844)."""
    module: Any = importlib.import_module(CORE + "distributed.finalize_model_grads")
    finalize, summed = module.finalize_model_grads, module._allreduce_word_embedding_grads

    def late(*args: Any, **kwargs: Any) -> None:
        module._allreduce_word_embedding_grads = lambda *_, **__: None
        finalize(*args, **kwargs)
        module._allreduce_word_embedding_grads = summed

    config.finalize_model_grads_func = late


def _mark_experts(config: Any, models: list[Any]) -> None:
    """Experts are taken for replicated parameters, before their gradients are reduced."""
    for model in models:
        for group in getattr(model, "expert_parallel_bucket_groups", ()):
            group.gradient_scaling_factor = 1.0
            for bucket in group.buckets:
                bucket.gradient_scaling_factor = 1.0


def _lose_hook(config: Any, models: list[Any]) -> None:
    """One gradient is written again after it was reduced, from this process alone."""
    finalize = config.finalize_model_grads_func

    def late(*args: Any, **kwargs: Any) -> None:
        finalize(*args, **kwargs)
        parameter = next(p for n, p in models[0].named_parameters() if "norm" in n)
        parameter.main_grad.mul_(1 + torch.distributed.get_rank())

    config.finalize_model_grads_func = late


def _keep_gradients_below(word: str) -> Callable[[Any, list[Any]], None]:
    """Column-parallel layers of a name do not sum the gradient of their input (SkyRL #1886 for the output layer)."""

    def plant(config: Any, models: list[Any]) -> None:
        layers = [m for model in models for name, m in model.named_modules() if word in name]
        chosen = [layer for layer in layers if hasattr(layer, "allreduce_dgrad")]
        assert chosen, word
        for layer in chosen:
            layer.allreduce_dgrad, layer.disable_grad_reduce = False, True

    return plant


def _after_gradients(change: Callable[[str, torch.Tensor], None]) -> Callable[[Any, list[Any]], None]:
    """Gradients are changed after they were finalized: by name, in place."""

    def plant(config: Any, models: list[Any]) -> None:
        finalize = config.finalize_model_grads_func

        def late(*args: Any, **kwargs: Any) -> None:
            finalize(*args, **kwargs)
            for model in models:
                for name, parameter in model.named_parameters():
                    change(name, parameter.main_grad)

        config.finalize_model_grads_func = late

    return plant


def _average_norms(name: str, gradient: torch.Tensor) -> None:
    """Sums of norm gradients are divided by the size of the group (gpt-neox #1259)."""
    if "norm" in name:
        gradient.div_(2)


def _reduce_norms_again(name: str, gradient: torch.Tensor) -> None:
    """Norm gradients are added up once more, though every process has their sum."""
    if "layernorm" in name:
        torch.distributed.all_reduce(gradient)


def _halve_values(name: str, gradient: torch.Tensor) -> None:
    """One fused projection is divided by the number of processes, as if its gradient had been a sum of all."""
    if name.endswith("layers.1.self_attention.linear_qkv.weight"):
        gradient.div_(2)


def _swap_processes(name: str, gradient: torch.Tensor) -> None:
    """The gradient of a piece is that of the other process's piece: ranks of a group in the wrong order."""
    if name.endswith("layers.0.mlp.linear_fc2.weight"):
        parts = [torch.empty_like(gradient) for _ in range(2)]
        torch.distributed.all_gather(parts, gradient.contiguous())
        gradient.copy_(parts[1 - torch.distributed.get_rank()])


def _keep_stale_parameters(config: Any, models: list[Any]) -> None:
    """Parameters that other processes updated are not gathered after a step (TTrace: parameters fail to update)."""
    for model in models:
        model.start_param_sync = lambda *_, **__: None


def _leave_old_gradients(config: Any, models: list[Any]) -> None:
    """Gradient buffers are not cleared between steps."""
    for model in models:
        model.zero_grad_buffer = lambda *_, **__: None


def _recompute_other_input(config: Any, models: list[Any]) -> None:
    """Recomputation starts from another input than the forward pass did (TTrace: wrong input of recomputation)."""
    random: Any = importlib.import_module(CORE + "tensor_parallel.random")
    original = random.CheckpointFunction.backward

    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        class Changed:
            saved_tensors = tuple(
                x.flip(0) if x is not None and x.is_floating_point() and x.ndim == 3 else x for x in ctx.saved_tensors
            )

            def __getattr__(self, name: str) -> Any:
                return getattr(ctx, name)

        return original(Changed(), *gradients)

    random.CheckpointFunction.backward = staticmethod(backward)


def _mark_as_experts(chunks: list[Any]) -> None:
    """Let experts be reduced over the processes that hold replicas of them, as the mend of #5916 does."""
    for chunk in chunks:
        for module in chunk.modules():
            if getattr(module, "is_expert", False):
                for parameter in module.parameters(recurse=False):
                    parameter.allreduce = False


Defect = Callable[[Any, list[Any]], None] | dict[str, Any]
"""A change of the models, or other options of the run."""


def register(name: str, processes: int, defects: dict[str, Defect], **options: Any) -> None:
    """Register a right run and its defects."""
    title = f"Megatron Core {VERSION}, {name}"
    configuration(title, processes)(partial(build, **options))
    for words, plant in defects.items():
        DEFECTS[f"defect: {words} ({title})"] = title
        changed = plant if isinstance(plant, dict) else {"plant": plant}
        configuration(f"defect: {words} ({title})", processes)(partial(build, **(options | changed)))


_TENSOR = {"tensor_model_parallel_size": 2}
_RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_PIPELINE = {"pipeline_model_parallel_size": 2}
_MOE = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall"}
_MOE |= {"moe_router_load_balancing_type": "none", "moe_ffn_hidden_size": 48}
register(
    "DP",
    2,
    {
        "gradients not reduced over data parallelism": _skip_data_parallel,
        "a gradient changed afterwards": _lose_hook,
        "gradient buffers not cleared": _leave_old_gradients,
    },
    parallel={},
)
register(
    "DP, distributed optimizer",
    2,
    {"gradients not reduced": _skip_data_parallel, "parameters not gathered after a step": _keep_stale_parameters},
    parallel={},
    distributed_optimizer=True,
)
register(
    "TP",
    2,
    {
        "input gradients of columns not reduced": _keep_input_gradients,
        "input gradients of the output layer not reduced, SkyRL #1886": _keep_gradients_below("output_layer"),
        "input gradients of one projection not reduced": _keep_gradients_below("layers.1.self_attention.linear_qkv"),
        "norm gradients summed twice": _after_gradients(_reduce_norms_again),
        "one projection divided by the group's size": _after_gradients(_halve_values),
        "pieces of a gradient swapped between ranks": _after_gradients(_swap_processes),
    },
    parallel=_TENSOR,
)
register(
    "TP, one query group",
    2,
    {},
    parallel=_TENSOR,
    options={"num_query_groups": 1},
)
register(
    "TP, learnable softmax offset",
    2,
    {},
    parallel=_TENSOR,
    options={"softmax_type": "learnable"},
)
register(
    "TP, LayerNorm, biases",
    2,
    {},
    parallel=_TENSOR,
    options={"normalization": "LayerNorm", "add_bias_linear": True, "gated_linear_unit": False},
)
register(
    "TP+SP",
    2,
    {
        "final norm not marked sequence_parallel, #1446": _unmarked("final_layernorm"),
        "norms before feed-forward not marked": _unmarked("pre_mlp_layernorm"),
        "norm gradients averaged, not summed, gpt-neox #1259": _after_gradients(_average_norms),
        "norm gradients not reduced, TransformerEngine #435": _replace_finalizer(
            "_allreduce_non_tensor_model_parallel_grads"
        ),
    },
    parallel=_TENSOR,
    options={"sequence_parallel": True},
)
register(
    "TP+SP, biases",
    2,
    {"biases of row-parallel layers not marked": _unmarked("linear_fc2.bias")},
    parallel=_TENSOR,
    options={"sequence_parallel": True, "add_bias_linear": True},
)
register(
    "TP, query and key norms",
    2,
    {"query and key norms not reduced, NeMo-RL #3716": _forget_norms},
    parallel=_TENSOR,
    options={"qk_layernorm": True},
)
register("TP, shared embedding", 2, {}, parallel=_TENSOR, shared=True)
register(
    "TP, recomputation",
    2,
    {"recomputation from another input": _recompute_other_input},
    parallel=_TENSOR,
    options={"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
)
register("PP", 2, {}, parallel=_PIPELINE)
register(
    "PP, shared embedding",
    2,
    {"embedding gradients not summed over the pipeline": _replace_finalizer("_allreduce_word_embedding_grads")},
    parallel=_PIPELINE,
    shared=True,
)
register(
    "PP, virtual stages",
    2,
    {},
    parallel=_PIPELINE | {"virtual_pipeline_model_parallel_size": 2},
    options={"num_layers": 4},
)
register(
    "PP, virtual stages, shared embedding",
    2,
    {"embedding gradients not summed over the pipeline": _replace_finalizer("_allreduce_word_embedding_grads")},
    parallel=_PIPELINE | {"virtual_pipeline_model_parallel_size": 2},
    options={"num_layers": 4},
    shared=True,
)
register("TP x PP", 4, {}, parallel=_TENSOR | _PIPELINE)
register(
    "MoE, TP+SP, experts not cut",
    2,
    {"experts not reduced over their replicas, as released, #5916": {"prepare_chunks": None}},
    parallel=_TENSOR | {"expert_tensor_parallel_size": 1},
    options=_MOE | {"sequence_parallel": True},
    prepare_chunks=_mark_as_experts,
)
register(
    "MoE, shared expert with a gate, TP+SP",
    2,
    {"gate of the shared expert not marked, Pai-Megatron-Patch #397": _unmarked("gate_weight")},
    parallel=_TENSOR,
    options=_MOE
    | {
        "sequence_parallel": True,
        "moe_shared_expert_intermediate_size": 32,
        "moe_shared_expert_gate": True,
        "moe_expert_capacity_factor": 2.0,
        "moe_pad_expert_input_to_capacity": True,
    },
)
register("TP x DP", 4, {"gradients not reduced": _skip_data_parallel}, parallel=_TENSOR)
register(
    "TP+SP x DP, distributed optimizer",
    4,
    {},
    parallel=_TENSOR,
    options={"sequence_parallel": True},
    distributed_optimizer=True,
)
register(
    "PP x DP, shared embedding, distributed optimizer",
    4,
    {"embedding gradients summed after they were scattered, #844": _reduce_before_embeddings},
    parallel=_PIPELINE,
    shared=True,
    distributed_optimizer=True,
)
register("MoE", 2, {}, parallel={}, options=_MOE)
register(
    "EP",
    2,
    {"gradients of experts not divided": _mark_experts},
    parallel={"expert_model_parallel_size": 2},
    options=_MOE,
)
register(
    "EP x TP+SP",
    4,
    {"router not marked sequence_parallel": _unmarked("router")},
    parallel=_TENSOR | {"expert_model_parallel_size": 2},
    # Gloo gathers equal parts only, so that every expert is padded to its capacity.
    options=_MOE
    | {"sequence_parallel": True, "moe_expert_capacity_factor": 2.0, "moe_pad_expert_input_to_capacity": True},
)
register("DP, bf16", 2, {}, parallel={}, half=True, clip=1.0)
register("DP, bf16, distributed optimizer", 2, {}, parallel={}, half=True, distributed_optimizer=True, clip=1.0)
register("TP+SP, bf16", 2, {}, parallel=_TENSOR, options={"sequence_parallel": True}, half=True, clip=1.0)
register(
    "DP, distributed optimizer, overlapped reductions",
    2,
    {},
    parallel={},
    distributed_optimizer=True,
    clip=1.0,
    settings={"overlap_grad_reduce": True, "bucket_size": 4096},
)
register(
    "TP+SP, query and key norms", 2, {}, parallel=_TENSOR, options={"sequence_parallel": True, "qk_layernorm": True}
)
register(
    "EP, distributed optimizer",
    2,
    {},
    parallel={"expert_model_parallel_size": 2},
    options=_MOE,
    distributed_optimizer=True,
)
register("PP x DP", 4, {"gradients not reduced": _skip_data_parallel}, parallel=_PIPELINE)
