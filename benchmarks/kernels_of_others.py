"""Kernels that others wrote, each as a function and inputs; packages are read from folders, nothing is imported before.

A case says what it needs (a package folder, a GPU), in which precisions and lengths it is meant to run, and, for a past
release, which published defect it has.
"""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Built = tuple[Callable[..., Any], list[Any], dict[str, Any]]
Build = Callable[[torch.dtype, int, str], Built]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ALL = (BF16, FP16, FP32)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel: where it comes from, how to call it, and the defect it is known to have."""

    name: str
    package: str
    folder: str
    build: Build
    dtypes: tuple[torch.dtype, ...] = ALL
    lengths: tuple[int, ...] = (128, 200)
    defect: str = ""
    seconds: float = 25.0


def normal(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    """Random numbers, the same for every run."""
    return torch.randn(*shape, device="cpu").to(device, dtype)


def qkv(
    dtype: torch.dtype,
    length: int,
    device: str,
    *,
    heads: int = 4,
    groups: int = 1,
    width: int = 64,
    first: bool = True,
) -> list[Tensor]:
    """Queries, keys and values; heads before positions if `first`, after them otherwise."""
    shapes = [heads, heads // groups, heads // groups]
    laid = [(2, count, length, width) if first else (2, length, count, width) for count in shapes]
    return [normal(*shape, dtype=dtype, device=device) for shape in laid]


def sdpa(backend: str, *, causal: bool, groups: int = 1) -> Build:
    """PyTorch's attention by one of its backends."""

    def build(dtype: torch.dtype, length: int, device: str) -> Built:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        chosen = getattr(SDPBackend, backend)

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(chosen):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=groups > 1)

        return attention, qkv(dtype, length, device, groups=groups), {}

    return build


def flex(*, causal: bool) -> Build:
    """FlexAttention, compiled, with a causal mask as a score modification."""

    def build(dtype: torch.dtype, length: int, device: str) -> Built:
        from torch.nn.attention.flex_attention import flex_attention

        compiled = torch.compile(flex_attention, dynamic=False) if device != "cpu" else flex_attention

        def later(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return torch.where(i >= j, score, -float("inf"))

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return compiled(q, k, v, score_mod=later if causal else None)

        return attention, qkv(dtype, length, device), {}

    return build


def native(kind: str) -> Build:
    """PyTorch's own norms and losses."""

    def build(dtype: torch.dtype, length: int, device: str) -> Built:
        x = normal(4, length, 256, dtype=dtype, device=device)
        gain, bias = (normal(256, dtype=dtype, device=device) for _ in range(2))
        if kind == "rms_norm":
            return lambda x, weight: F.rms_norm(x, (256,), weight), [x, gain], {}
        if kind == "layer_norm":
            return lambda x, weight, bias: F.layer_norm(x, (256,), weight, bias), [x, gain, bias], {}
        logits = normal(length, 1000, dtype=dtype, device=device)
        target = torch.arange(length, device=device) % 1000
        return lambda logits: F.cross_entropy(logits, target), [logits], {}

    return build


def liger(kind: str) -> Build:
    """Kernels of Liger-Kernel."""

    def build(dtype: torch.dtype, length: int, device: str) -> Built:
        def draw(*shape: int) -> Tensor:
            return normal(*shape, dtype=dtype, device=device)

        x, gain, bias = draw(4, length, 256), draw(256), draw(256)
        target = torch.arange(length, device=device) % 999
        logits = draw(length, 1000)
        hidden, weight = draw(length, 128), draw(1000, 128) / 8
        if kind == "rms_norm":
            from liger_kernel.ops.rms_norm import LigerRMSNormFunction

            return lambda x, weight: LigerRMSNormFunction.apply(x, weight, 1e-6), [x, gain], {}
        if kind == "layer_norm":
            from liger_kernel.ops.layer_norm import LigerLayerNormFunction

            return lambda x, weight, bias: LigerLayerNormFunction.apply(x, weight, bias, 1e-6), [x, gain, bias], {}
        if kind == "group_norm":
            from liger_kernel.ops.group_norm import LigerGroupNormFunction

            y = draw(4, 32, length)
            return (
                lambda x, weight, bias: LigerGroupNormFunction.apply(x, weight, bias, 32, 8, 1e-6),
                [y, draw(32), draw(32)],
                {},
            )
        if kind == "swiglu":
            from liger_kernel.ops.swiglu import LigerSiLUMulFunction

            return lambda gate, up: LigerSiLUMulFunction.apply(gate, up), [x, draw(4, length, 256)], {}
        if kind == "geglu":
            from liger_kernel.ops.geglu import LigerGELUMulFunction

            return lambda gate, up: LigerGELUMulFunction.apply(gate, up), [x, draw(4, length, 256)], {}
        if kind == "relu_squared":
            from liger_kernel.ops.relu_squared import LigerReLUSquaredFunction

            return lambda x: LigerReLUSquaredFunction.apply(x), [x], {}
        if kind == "fused_add_rms_norm":
            from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

            def add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
                return LigerFusedAddRMSNormFunction.apply(x, residual, weight, 1e-6, 0.0, "llama", False)

            return add_norm, [x, draw(4, length, 256), gain], {}
        if kind == "dyt":
            from liger_kernel.ops.dyt import LigerDyTFunction

            return (
                lambda x, alpha, gamma, beta: LigerDyTFunction.apply(x, alpha, gamma, beta),
                [x, draw(1).abs() + 0.5, gain, bias],
                {},
            )
        if kind == "softmax":
            from liger_kernel.ops.softmax import LigerSoftmaxFunction

            return lambda x: LigerSoftmaxFunction.apply(x), [x], {}
        if kind == "sparsemax":
            from liger_kernel.ops.sparsemax import LigerSparsemaxFunction

            return lambda x: LigerSparsemaxFunction.apply(x, -1), [x], {}
        if kind == "rope":
            from liger_kernel.ops.rope import LigerRopeFunction

            angle = torch.arange(length)[:, None] * torch.exp2(-torch.arange(32.0) / 4)[None, :]
            angle = torch.cat((angle, angle), -1)[None]
            cos, sin = angle.cos().to(device, dtype), angle.sin().to(device, dtype)
            q, k = qkv(dtype, length, device, groups=2)[:2]
            return lambda q, k: LigerRopeFunction.apply(q, k, cos, sin), [q, k], {}
        if kind in ("cross_entropy", "cross_entropy none"):
            from liger_kernel.transformers.cross_entropy import LigerCrossEntropyLoss

            loss = LigerCrossEntropyLoss(reduction="none" if kind.endswith("none") else "mean")
            return lambda logits: loss(logits, target), [logits], {}
        if kind in ("fused_linear_cross_entropy", "fused_linear_cross_entropy none"):
            from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

            fused = LigerFusedLinearCrossEntropyLoss(reduction="none" if kind.endswith("none") else "mean")
            return lambda weight, hidden: fused(weight, hidden, target), [weight, hidden], {}
        if kind == "jsd":
            from liger_kernel.ops.jsd import LigerJSDFunction

            teacher = logits.float().roll(1, 0).log_softmax(-1).to(dtype)
            return (
                lambda student: LigerJSDFunction.apply(student, teacher, None, 0.5, -100),
                [logits.float().log_softmax(-1).to(dtype)],
                {},
            )
        if kind == "kl_div":
            from liger_kernel.ops.kl_div import LigerKLDivLossFunction

            teacher = logits.float().roll(1, 0).softmax(-1).to(dtype)
            return (
                lambda student: LigerKLDivLossFunction.apply(student, teacher, "batchmean", False, 1e-10),
                [logits.float().log_softmax(-1).to(dtype)],
                {},
            )
        if kind == "neighborhood_attention":
            from liger_kernel.ops.fused_neighborhood_attention import LigerFusedNeighborhoodAttentionFunction

            return (
                lambda q, k, v: LigerFusedNeighborhoodAttentionFunction.apply(q, k, v, 7, 1, None),
                qkv(dtype, length, device),
                {},
            )
        raise KeyError(kind)

    return build


def fla(kind: str) -> Build:
    """Kernels of flash-linear-attention."""

    def build(dtype: torch.dtype, length: int, device: str) -> Built:
        q, k, v = qkv(dtype, length, device, heads=2, first=False)
        decay = F.logsigmoid(torch.randn(2, length, 2)).to(device, dtype)
        slow = F.logsigmoid(torch.randn(2, length, 2, 64) + 2).to(device, dtype)
        beta = torch.rand(2, length, 2).to(device, dtype)
        unit = F.normalize(k.float(), dim=-1).to(dtype)

        def first(result: Any) -> Any:
            return result[0] if isinstance(result, tuple) else result

        if kind == "chunk_gla":
            from fla.ops.gla import chunk_gla

            return lambda q, k, v, g: first(chunk_gla(q, k, v, g)), [q, k, v, slow], {}
        if kind == "fused_recurrent_gla":
            from fla.ops.gla import fused_recurrent_gla

            return lambda q, k, v, g: first(fused_recurrent_gla(q, k, v, gk=g)), [q, k, v, slow], {}
        if kind == "chunk_simple_gla":
            from fla.ops.simple_gla import chunk_simple_gla

            return lambda q, k, v, g: first(chunk_simple_gla(q, k, v, g)), [q, k, v, decay], {}
        if kind == "chunk_retention":
            from fla.ops.retention import chunk_retention

            return lambda q, k, v: first(chunk_retention(q, k, v)), [q, k, v], {}
        if kind == "chunk_linear_attn":
            from fla.ops.linear_attn import chunk_linear_attn

            return lambda q, k, v: first(chunk_linear_attn(q, k, v, normalize=False)), [q, k, v], {}
        if kind == "chunk_delta_rule":
            from fla.ops.delta_rule import chunk_delta_rule

            return lambda q, k, v, beta: first(chunk_delta_rule(q, k, v, beta)), [q, unit, v, beta], {}
        if kind == "chunk_gated_delta_rule":
            from fla.ops.gated_delta_rule import chunk_gated_delta_rule

            return (
                lambda q, k, v, g, beta: first(chunk_gated_delta_rule(q, k, v, g, beta)),
                [q, unit, v, decay, beta],
                {},
            )
        if kind == "parallel_attn":
            from fla.ops.attn import parallel_attn

            one = qkv(dtype, length, device, heads=4, groups=2, first=False)
            return lambda q, k, v: first(parallel_attn(q, k, v)), list(one), {}
        if kind == "parallel_forgetting_attn":
            from fla.ops.forgetting_attn import parallel_forgetting_attn

            return lambda q, k, v, g: first(parallel_forgetting_attn(q, k, v, g)), [q, k, v, decay], {}
        if kind == "chunk_hgrn":
            from fla.ops.hgrn import chunk_hgrn

            x = normal(2, length, 128, dtype=dtype, device=device)
            gate = F.logsigmoid(torch.randn(2, length, 128)).to(device, dtype)
            return lambda x, g: first(chunk_hgrn(x, g)), [x, gate], {}
        x = normal(2, length, 128, dtype=dtype, device=device)
        weight, bias = normal(128, dtype=dtype, device=device), normal(128, dtype=dtype, device=device)
        if kind == "layer_norm":
            from fla.modules.layernorm import layer_norm

            return lambda x, weight, bias: layer_norm(x, weight, bias), [x, weight, bias], {}
        if kind == "rms_norm_gated":
            from fla.modules.fused_norm_gate import rms_norm_gated

            gate = normal(2, length, 128, dtype=dtype, device=device)
            return lambda x, g, weight: rms_norm_gated(x, g, weight, None), [x, gate, weight], {}
        if kind == "l2norm":
            from fla.modules.l2norm import l2norm

            return lambda x: l2norm(x), [x], {}
        if kind == "swiglu":
            from fla.modules.activations import swiglu

            return lambda x, y: swiglu(x, y), [x, normal(2, length, 128, dtype=dtype, device=device)], {}
        if kind == "rotary":
            from fla.modules.rotary import rotary_embedding

            angle = torch.arange(length)[:, None] * torch.exp2(-torch.arange(32.0) / 4)[None, :]
            cos, sin = angle.cos().to(device, dtype), angle.sin().to(device, dtype)
            return lambda x: rotary_embedding(x, cos, sin), [q], {}
        if kind == "cross_entropy":
            from fla.modules.fused_cross_entropy import cross_entropy_loss

            target = torch.arange(length, device=device) % 999
            return (
                lambda logits: first(cross_entropy_loss(logits, target)).sum(),
                [normal(length, 1000, dtype=dtype, device=device)],
                {},
            )
        if kind == "token_shift":
            from fla.modules.token_shift import token_shift

            return lambda x: first(token_shift(x)), [x], {}
        if kind.startswith("causal_conv1d"):
            return _conv(kind, dtype, length, device)
        raise KeyError(kind)

    return build


def _lenient_autotuning() -> None:
    """Let releases made for an older Triton be imported: they name autotuning keys that are no arguments."""
    import triton

    strict = triton.autotune
    if getattr(strict, "lenient", False):
        return

    def autotune(configs: Any, key: Sequence[str], **options: Any) -> Any:
        def decorate(fn: Any) -> Any:
            known = getattr(fn, "arg_names", key)
            return strict(configs, [name for name in key if name in known], **options)(fn)

        return decorate

    autotune.lenient = True  # type: ignore[attr-defined]
    triton.autotune = autotune


def _conv(kind: str, dtype: torch.dtype, length: int, device: str) -> Built:
    _lenient_autotuning()
    try:
        from fla.modules.convolution import causal_conv1d
    except ImportError:
        from fla.modules.conv import causal_conv1d
    short = 2 if kind.endswith("short chunk") else length
    x = normal(2, short, 64, dtype=dtype, device=device)
    weight = normal(64, 4, dtype=dtype, device=device)
    state = normal(2, 64, 4, dtype=dtype, device=device)
    if kind == "causal_conv1d":
        return lambda x, weight: causal_conv1d(x, weight)[0], [x, weight], {}

    def with_state(x: Tensor, weight: Tensor, state: Tensor) -> Any:
        return causal_conv1d(x, weight, initial_state=state, output_final_state=True)

    return with_state, [x, weight, state], {}


def cut_cross_entropy(dtype: torch.dtype, length: int, device: str) -> Built:
    """Apple's cut cross-entropy, without the filter that leaves out small gradients on purpose."""
    from cut_cross_entropy import linear_cross_entropy

    target = torch.arange(length, device=device) % 999
    hidden = normal(length, 128, dtype=dtype, device=device)
    weight = normal(1024, 128, dtype=dtype, device=device) / 8
    return (
        lambda e, c: linear_cross_entropy(e, c, target, filter_eps=None, impl="cce"),
        [hidden, weight],
        {},
    )


def adasplash(kind: str) -> Build:
    """Adaptive sparse attention and entmax in Triton."""

    def build(dtype: torch.dtype, length: int, device: str) -> Built:
        import adasplash as package

        if kind == "entmax":
            x = normal(64, length, dtype=dtype, device=device)
            return lambda x: package.triton_entmax_v1(x, alpha=1.5, n_iter=30), [x], {}
        return (
            lambda q, k, v: package.adasplash_no_block_mask(q, k, v, alpha=1.5, is_causal=kind == "causal", niter=30),
            qkv(dtype, length, device),
            {},
        )

    return build


def lightning(dtype: torch.dtype, length: int, device: str) -> Built:
    """Lightning attention 2 with decay."""
    from lightning_attn.ops import lightning_attn_func

    decay = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device, dtype=torch.float32)
    options = {"slopes": decay}
    return (
        lambda q, k, v: lightning_attn_func(q, k, v, options["slopes"]),
        qkv(dtype, length, device),
        {},
    )


def flag_gems(kind: str) -> Build:
    """Kernels of FlagGems."""

    def build(dtype: torch.dtype, length: int, device: str) -> Built:
        import flag_gems as package

        x, y = (normal(4, length, 128, dtype=dtype, device=device) for _ in range(2))
        if kind == "silu_and_mul":
            return lambda x, y: package.silu_and_mul(x, y), [x, y], {}
        if kind == "gelu_and_mul":
            return lambda x, y: package.gelu_and_mul(x, y), [x, y], {}
        v, g = normal(64, 128, dtype=dtype, device=device), normal(64, 1, dtype=dtype, device=device)
        return lambda v, g: package.weight_norm(v, g, 0), [v, g], {}

    return build


def unsloth(kind: str, version: str) -> Build:
    """Kernels of unsloth, loaded file by file: its package wants a GPU, bitsandbytes and a patched transformers."""

    def build(dtype: torch.dtype, length: int, device: str) -> Built:
        folder = next(Path(entry) for entry in sys.path if (Path(entry) / "unsloth" / "kernels").is_dir())
        module = load_beside(folder / "unsloth" / "kernels" / f"{kind}.py", _unsloth_support())
        x = normal(4, length, 256, dtype=dtype, device=device)
        gain = normal(256, dtype=dtype, device=device)
        if kind == "rms_layernorm":
            return (
                lambda x, weight: module.Fast_RMS_Layernorm.apply(x, weight, 1e-6, False),
                [x, gain],
                {},
            )
        bias = normal(256, dtype=dtype, device=device)
        return lambda x, weight, bias: module.Fast_Layernorm.apply(x, weight, bias, 1e-6), [x, gain, bias], {}

    return build


def _unsloth_support() -> dict[str, Any]:
    import triton

    def settings(n: int) -> tuple[int, int]:
        size = triton.next_power_of_2(n)
        return size, 4 if size < 2048 else 8

    _stand_in("transformers.models.llama.modeling_llama", LlamaRMSNorm=torch.nn.Module)
    _stand_in("unsloth_zoo.patching_utils", patch_layernorm=None)
    return {"calculate_settings": settings, "torch_gpu_device": torch.cuda.device}


def _stand_in(name: str, **contents: Any) -> None:
    """A module that a file imports and its kernels do not use, unless it is installed."""
    import importlib

    try:
        importlib.import_module(name)
        return
    except Exception:  # a package may fail to import in any way it likes
        parts = name.split(".")
    for count in range(1, len(parts) + 1):
        module = types.ModuleType(".".join(parts[:count]))
        module.__path__ = []
        sys.modules[module.__name__] = module
    for key, value in contents.items():
        setattr(sys.modules[name], key, value)


def load_beside(path: Path, support: dict[str, Any]) -> types.ModuleType:
    """A file of a package as a module of its own, its relative imports taken from `support`."""
    package = types.ModuleType(f"alone_{path.parent.name}")
    package.__path__ = []
    sys.modules[package.__name__] = package
    near = types.ModuleType(f"{package.__name__}.utils")
    for name, value in support.items():
        setattr(near, name, value)
    sys.modules[near.__name__] = near
    import importlib.util

    spec = importlib.util.spec_from_file_location(f"{package.__name__}.{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def functions_of(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """Single functions out of a file whose package cannot be imported here."""
    tree = ast.parse(path.read_text("utf-8"))
    chosen = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    body = ast.Module(body=[*ast.parse("from __future__ import annotations").body, *chosen], type_ignores=[])
    result: dict[str, Any] = {"torch": torch}
    exec(compile(body, str(path), "exec"), result)
    return result


def diffusers(dtype: torch.dtype, length: int, device: str) -> Built:
    """The flash attention that diffusers' context parallelism calls, forward and backward as it registers them."""
    folder = next(Path(entry) for entry in sys.path if (Path(entry) / "diffusers").is_dir())
    names = ("_native_flash_attention_forward_op", "_native_flash_attention_backward_op")
    result = functions_of(folder / "diffusers" / "models" / "attention_dispatch.py", names)

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = result[names[0]](ctx, q, k, v)
            return out[0] if isinstance(out, tuple) else out

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return result[names[1]](ctx, grads[0])

    # As many heads as positions: exchanging the two axes does not show in the shapes.
    tensors = [normal(2, 16, 16, 64, dtype=dtype, device=device) for _ in range(3)]
    return Attention.apply, tensors, {"names": ("q", "k", "v")}


def cherimoya(dtype: torch.dtype, length: int, device: str) -> Built:
    """A fused dilated convolution and norm."""
    folder = next(Path(entry) for entry in sys.path if (Path(entry) / "cherimoya").is_dir())
    module = load_beside(folder / "cherimoya" / "cheri.py", {})
    x = normal(2, length, 32, dtype=dtype, device=device)
    weight = normal(32, 3, dtype=dtype, device=device)
    return lambda x, w: module.FusedDilatedConvNormFunc.apply(x, w, 4), [x, weight], {}


def entmax(kind: str) -> Build:
    """entmax's own autograd functions, in plain PyTorch."""

    def build(dtype: torch.dtype, length: int, device: str) -> Built:
        import entmax as package

        x = normal(2, 3, 40, dtype=dtype, device=device)
        return lambda x: getattr(package, kind)(x, -1), [x], {}

    return build


HALF = (BF16, FP16)
LIGER, FLA = ("liger-kernel 0.8.5", "liger085"), ("flash-linear-attention 0.6.0", "fla060")


def _of(package: tuple[str, str], kinds: Sequence[str], maker: Callable[[str], Build], **options: Any) -> list[Case]:
    return [Case(name=kind, package=package[0], folder=package[1], build=maker(kind), **options) for kind in kinds]


CASES: list[Case] = [
    *(
        Case(
            name=f"SDPA {backend.partition('_')[0].lower()}{' causal' * causal}{' grouped' * (groups > 1)}",
            package=f"torch {torch.__version__.partition('+')[0]}",
            folder="",
            build=sdpa(backend, causal=causal, groups=groups),
            dtypes=HALF if backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION") else ALL,
        )
        for backend in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
        for causal, groups in ((False, 1), (True, 1), (True, 2))
        if not (groups > 1 and backend == "EFFICIENT_ATTENTION")
    ),
    *(
        Case(
            name=f"FlexAttention{' causal' if causal else ''}",
            package=f"torch {torch.__version__.partition('+')[0]}",
            folder="",
            build=flex(causal=causal),
            dtypes=(BF16, FP32) if causal else (FP16,),
            lengths=(128,),
            seconds=60.0,
        )
        for causal in (True, False)
    ),
    *_of((f"torch {torch.__version__.partition('+')[0]}", ""), ("rms_norm", "layer_norm", "cross_entropy"), native),
    *_of(
        LIGER,
        (
            "rms_norm",
            "layer_norm",
            "group_norm",
            "swiglu",
            "geglu",
            "relu_squared",
            "rope",
            "cross_entropy",
            "cross_entropy none",
            "fused_linear_cross_entropy none",
            "softmax",
            "fused_add_rms_norm",
            "dyt",
            "sparsemax",
            "jsd",
            "kl_div",
            "neighborhood_attention",
        ),
        liger,
    ),
    *_of(
        FLA,
        (
            "chunk_linear_attn",
            "chunk_retention",
            "chunk_gla",
            "chunk_delta_rule",
            "parallel_forgetting_attn",
        ),
        fla,
        dtypes=(BF16,),
        lengths=(128,),
    ),
    *_of(
        FLA,
        (
            "parallel_attn",
            "fused_recurrent_gla",
            "chunk_hgrn",
            "layer_norm",
            "rms_norm_gated",
            "l2norm",
            "swiglu",
            "rotary",
            "cross_entropy",
            "token_shift",
            "causal_conv1d",
        ),
        fla,
        dtypes=(BF16, FP32),
        lengths=(128,),
    ),
    Case(
        name="linear_cross_entropy",
        package="cut-cross-entropy 25.1.1",
        folder="cce",
        build=cut_cross_entropy,
        dtypes=HALF,
    ),
    *_of(("adasplash 0.2.2", "adasplash"), ("entmax", "full", "causal"), adasplash),
    Case(name="lightning_attn_func", package="lightning-attn 0.0.5", folder="lightning", build=lightning),
    *_of(("flag-gems 5.0.2", "flaggems"), ("silu_and_mul", "gelu_and_mul", "weight_norm"), flag_gems),
    *_of(("entmax 1.3", "entmax13"), ("sparsemax", "entmax15"), entmax, lengths=(40,)),
]

PAST: list[Case] = [
    Case(
        name="fused_linear_cross_entropy",
        package="liger-kernel 0.8.5",
        folder="liger085",
        build=liger("fused_linear_cross_entropy"),
        dtypes=(FP32, BF16),
        lengths=(128,),
        defect="found by this check: the head's weight gets no gradient where the hidden states require none",
    ),
    Case(
        name="cross_entropy none",
        package="liger-kernel 0.5.8",
        folder="liger058",
        build=liger("cross_entropy none"),
        dtypes=(FP32, BF16),
        lengths=(128,),
        defect="Liger-Kernel #678: with reduction none the output gradient is applied as if it were one number",
    ),
    Case(
        name="fused_linear_cross_entropy none",
        package="liger-kernel 0.6.4",
        folder="liger064",
        build=liger("fused_linear_cross_entropy none"),
        dtypes=(FP32, BF16),
        lengths=(128,),
        defect="Liger-Kernel #968: the same in the fused head",
    ),
    Case(
        name="causal_conv1d",
        package="flash-linear-attention 0.4.2",
        folder="fla042",
        build=fla("causal_conv1d"),
        dtypes=(FP32, BF16),
        lengths=(128,),
        defect="flash-linear-attention #871: an output gradient that is not contiguous is read with the wrong strides",
    ),
    Case(
        name="causal_conv1d short chunk",
        package="flash-linear-attention 0.5.1",
        folder="fla051",
        build=fla("causal_conv1d short chunk"),
        dtypes=(FP32, BF16),
        lengths=(2,),
        defect="flash-linear-attention #1140: the final state's gradient goes to the wrong positions in chunks shorter "
        "than the filter",
    ),
    Case(
        name="causal_conv1d with state",
        package="flash-linear-attention 0.4.1",
        folder="fla041",
        build=fla("causal_conv1d with state"),
        dtypes=(FP32, BF16),
        lengths=(64,),
        defect="flash-linear-attention #714: the gradient with an initial state given",
    ),
    Case(
        name="causal_conv1d with state",
        package="flash-linear-attention 0.6.0",
        folder="fla060",
        build=fla("causal_conv1d with state"),
        dtypes=(FP32, BF16),
        lengths=(128,),
        defect="found by this check: of the final state's gradient the first entry is lost on its way to x",
    ),
    Case(
        name="layernorm",
        package="unsloth 2026.3.8",
        folder="unsloth",
        build=unsloth("layernorm", "2026.3.8"),
        dtypes=(FP32, BF16),
        lengths=(64,),
        defect="found by this check: gain and bias get no gradient, and an expanded output gradient is misread",
    ),
    Case(
        name="rms_layernorm",
        package="unsloth 2026.3.8",
        folder="unsloth",
        build=unsloth("rms_layernorm", "2026.3.8"),
        dtypes=(FP32, BF16),
        lengths=(64,),
        defect="unsloth #4533: the gain gets no gradient",
    ),
    Case(
        name="native flash attention of context parallelism",
        package="diffusers 0.38.0",
        folder="diffusers",
        build=diffusers,
        dtypes=HALF,
        lengths=(16,),
        defect="diffusers #14338: keys and values are transposed twice in the backward",
    ),
    Case(
        name="fused dilated convolution and norm",
        package="cherimoya 0.1.0",
        folder="cherimoya",
        build=cherimoya,
        dtypes=(FP32,),
        lengths=(256,),
        defect="cherimoya #25: contributions to dx are lost where programs write to the same entries",
    ),
    Case(
        name="sparsemax",
        package="entmax 1.0",
        folder="entmax10",
        build=entmax("sparsemax"),
        dtypes=(FP32,),
        lengths=(40,),
        defect="entmax #13: the gradient of sparsemax is wrong for tensors of three axes",
    ),
]

PACKAGES = {
    "liger085": "liger-kernel==0.8.5",
    "liger058": "liger-kernel==0.5.8",
    "liger064": "liger-kernel==0.6.4",
    "fla060": "fla-core==0.6.0 einops==0.8.2",
    "fla051": "fla-core==0.5.1 einops==0.8.2",
    "fla042": "fla-core==0.4.2 einops==0.8.2",
    "fla041": "fla-core==0.4.1 einops==0.8.2",
    "cce": "cut-cross-entropy==25.1.1",
    "adasplash": "adasplash==0.2.2",
    "lightning": "lightning-attn==0.0.5 einops==0.8.2",
    "flaggems": "flag-gems==5.0.2 sqlalchemy pyyaml packaging",
    "unsloth": "unsloth==2026.3.8",
    "diffusers": "diffusers==0.38.0",
    "cherimoya": "cherimoya==0.1.0",
    "entmax13": "entmax==1.3",
    "entmax10": "entmax==1.0",
}
"""What to install into which folder, without dependencies: pip install --no-deps --no-compile --target FOLDER …"""
