"""Training runs on torchtitan 0.2, built as its trainer builds them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from stack_configurations import Training, configuration
from stack_models import make_pieces_of_whole

for _model in ("llama3", "deepseek_v3", "qwen3"):
    import_module(f"torchtitan.models.{_model}")
# Meshes are of the accelerator by default, and there is none.
import_module("torchtitan.distributed.parallel_dims").device_type = "cpu"  # type: ignore[attr-defined]

_histc = torch.histc


def _count(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:  # noqa: A002
    """Count integers, which `torch.histc` refuses on a CPU: routers count tokens by it."""
    return _histc(x.float(), bins, min, max).to(x.dtype)


setattr(torch, "histc", _count)  # noqa: B010

# The kernel that sorts tokens by experts needs a device; the same package has it in Python.
_moe_utils: Any = import_module("torchtitan.models.moe.utils")
_moe_utils.generate_permute_indices = partial(_moe_utils.generate_permute_indices, use_cpu=True)

VOCABULARY, LENGTH = 64, 16


def _attend_on_pieces(forward: Any, q: Any, k: Any, v: Any, **options: Any) -> Any:
    """Attend on the heads that a process has, which is what a rule of DTensor would do."""
    if not isinstance(q, DTensor):
        return forward(q, k, v, **options)
    placements, mesh = q.placements, q.device_mesh
    local = [x.redistribute(mesh, placements).to_local(grad_placements=placements) for x in (q, k, v)]
    return DTensor.from_local(forward(*local, **options), mesh, placements)


def _spec(name: str) -> tuple[Any, Any]:
    """Return the train spec and small model arguments."""
    spec = import_module("torchtitan.protocols.train_spec").get_train_spec(name)
    args = spec.model_args["debugmodel"]
    small = {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "max_seq_len": LENGTH}
    if name == "deepseek_v3":
        small |= {"inter_dim": 64, "moe_inter_dim": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 8}
        small |= {"qk_rope_head_dim": 4, "v_head_dim": 8}
    if name in ("qwen3", "llama4"):
        small |= {"head_dim": 8, "hidden_dim": 64, "enable_weight_tying": False}
    for field, value in small.items():
        if hasattr(args, field):
            setattr(args, field, value)
    return spec, args


class _Relabelled(torch.autograd.Function):
    """The identity; partial sums in the gradient are taken for the whole of it."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        """Return the input."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Call what each process has a replica, without a sum."""
        (gradient,) = gradients
        whole = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
        return DTensor.from_local(gradient.to_local(), gradient.device_mesh, whole, run_check=False)


def _forget_key_positions(model: Any) -> None:
    """Every process keeps the gradient that its own heads give the shared rotary key (torchtitan #1373)."""
    for layer in model.layers.values():
        layer.attention.wkv_a.register_forward_hook(lambda module, args, out: _Relabelled.apply(out))


def _sum_router_gradients(model: Any) -> None:
    """Say that gradients of router scores are partial sums over tensor parallelism, which 0.2.2 leaves out."""
    style: Any = import_module("torchtitan.distributed").NoParallel

    def prepare(layout: Any, use_local: bool, module: Any, outputs: Any, mesh: Any) -> Any:
        if outputs.placements != (layout,):
            outputs = outputs.redistribute(placements=(layout,), async_op=True)
        return outputs.to_local(grad_placements=(Partial(),)) if use_local else outputs

    style._prepare_output_fn = staticmethod(prepare)


def _forget_expert_sums(model: Any) -> None:
    """Inputs of experts that are cut come back from DTensors without the placement of their gradient (#1805)."""
    _sum_router_gradients(model)
    style: Any = import_module("torchtitan.distributed.expert_parallel").TensorParallel

    def prepare(self: Any, module: Any, inputs: Any, mesh: Any) -> Any:
        whole = DTensor.from_local(inputs[0], mesh, (Replicate(),), run_check=False)
        return (whole.to_local(), *inputs[1:])

    style._prepare_input_fn = prepare


def _change_one_replica(model: Any, rank: int) -> None:
    """Gradients are clipped by hand on one replica, after they were added up over all."""
    if rank < 2:
        for parameter in model.parameters():
            parameter.grad.to_local().mul_(0.5)


def _forget_divisor(model: Any) -> None:
    """Experts divide their gradients by the size of their own mesh, and not by that of all data."""
    experts = [
        m for n, m in model.named_modules() if n.endswith("experts") and hasattr(m, "set_gradient_divide_factor")
    ]
    assert experts
    for module in experts:
        module.set_gradient_divide_factor(2.0)


def _build(
    rank: int,
    world: int,
    name: str,
    *,
    before: Callable[[Any], None] | None = None,
    plant: Callable[[Any], None] | None = None,
    late: Callable[[Any, int], None] | None = None,
    compiled: bool = False,
    checkpointing: str = "none",
    bf16: bool = False,
    pp: int = 1,
    **degrees: int,
) -> Training:
    spec, args = _spec(name)
    config = import_module("torchtitan.config").JobConfig()
    config.training.seq_len = LENGTH
    config.training.local_batch_size = 2
    config.training.mixed_precision_param = "bfloat16" if bf16 else "float32"
    config.compile.enable, config.compile.backend = compiled, "aot_eager"
    config.activation_checkpoint.mode = checkpointing
    config.parallelism.context_parallel_degree = degrees.get("cp", 1)
    config.parallelism.expert_parallel_degree = degrees.get("ep", 1)
    config.parallelism.pipeline_parallel_degree = pp
    config.parallelism.disable_loss_parallel = True
    args.update_from_config(config)
    degrees = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "ep": 1, "etp": 1, **degrees}
    dims = import_module("torchtitan.distributed").ParallelDims(**degrees, pp=pp, world_size=world)
    dims.build_mesh()
    torch.manual_seed(0)
    with torch.device("meta"):
        model = spec.model_cls(args)
    if before is not None:
        before(model)
    model = spec.parallelize_fn(model, dims, config)
    if plant is not None:
        plant(model)
    for module in model.modules():
        # Gloo has no reduction that scales; sums are divided afterwards.
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    make_pieces_of_whole(model)
    model.train()
    for module in model.modules():
        # DTensor has no rule for the flash attention of a processor.
        if hasattr(module, "sdpa_backends"):
            module.forward = partial(_attend_on_pieces, module.forward)
    optimizers = spec.build_optimizers_fn([model], config.optimizer, dims)
    data_rank = rank // (degrees["tp"] * degrees["cp"])

    def step(number: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * number + data_rank)
        tokens = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=generator)
        optimizers.zero_grad()
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        more: dict[str, Any] = {}
        if degrees["cp"] > 1:
            prepare = import_module("torchtitan.distributed.context_parallel").prepare_context_parallel_input
            inputs, labels, more = prepare(inputs, labels, more, dims.get_mesh("cp"), torch.device("cpu"))
        logits = model(inputs, **more)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        if late is not None:
            late(model, rank)
        optimizers.step()
        return loss

    return Training(model, optimizers, step)


DEFECTS: dict[str, str] = {}
"""By name of a configuration with a defect, that of its correct twin."""


def _register(title: str, processes: int, defects: dict[str, dict[str, Any]] | None = None, **options: Any) -> None:
    """Register a right run and its defects, given as further options."""
    whole = f"torchtitan 0.2.2, {title}"
    configuration(whole, processes)(partial(_build, **options))
    for words, more in (defects or {}).items():
        DEFECTS[f"defect: {words} ({whole})"] = whole
        configuration(f"defect: {words} ({whole})", processes)(partial(_build, **(options | more)))


_TENSOR_DEFECTS: dict[str, dict[str, dict[str, Any]]] = {
    "deepseek_v3": {
        "gradient of the shared rotary key not summed, #1373": {"plant": _forget_key_positions},
        "gradient of inputs of experts not summed, #1805": {"before": _forget_expert_sums},
        "gradient of the router not summed, as released": {"before": None},
    }
}
_RELEASED: dict[str, dict[str, Any]] = {"gradient of the router not summed, as released": {"before": None}}
_MENDED: dict[str, dict[str, Any]] = {"deepseek_v3": {"before": _sum_router_gradients}}
for _name in ("llama3", "deepseek_v3", "qwen3"):
    _register(f"{_name}, FSDP", 2, name=_name, dp_shard=2)
    _register(f"{_name}, TP", 2, _TENSOR_DEFECTS.get(_name), name=_name, tp=2, **_MENDED.get(_name, {}))
    _register(f"{_name}, FSDP x TP", 4, name=_name, dp_shard=2, tp=2, **_MENDED.get(_name, {}))
    _register(
        f"{_name}, HSDP",
        4,
        {"gradients clipped on one replica": {"late": _change_one_replica}},
        name=_name,
        dp_shard=2,
        dp_replicate=2,
    )
    _register(f"{_name}, DDP", 2, name=_name, dp_replicate=2)
_register("llama3, FSDP, compile", 2, name="llama3", dp_shard=2, compiled=True)
_register("llama3, FSDP, full checkpointing", 2, name="llama3", dp_shard=2, checkpointing="full")
_register("llama3, FSDP, selective checkpointing", 2, name="llama3", dp_shard=2, checkpointing="selective")
_register("llama3, FSDP, bf16", 2, name="llama3", dp_shard=2, bf16=True)
_register("deepseek_v3, EP", 2, name="deepseek_v3", dp_shard=2, ep=2)
_register(
    "deepseek_v3, EP x FSDP",
    4,
    {"gradients of experts divided by the size of their own mesh": {"plant": _forget_divisor}},
    name="deepseek_v3",
    dp_shard=4,
    ep=2,
)
_register(
    "deepseek_v3, EP x TP",
    4,
    _RELEASED,
    name="deepseek_v3",
    dp_shard=2,
    tp=2,
    ep=2,
    etp=1,
    **_MENDED["deepseek_v3"],
)
