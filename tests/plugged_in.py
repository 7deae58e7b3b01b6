"""Wrong backward passes, planted through the places users plug their own code into.

A registered attention implementation, a patched norm, an autograd function in the network, a router, a loop over
experts, a fused projection, a collective that is missing. Each case builds a small model with the user's code in
place, right or wrong, and says why nothing can see the defect where that is so.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """One defect: where it is plugged in, what it does, and why nobody can see it, if nobody can."""

    place: str
    defect: str
    build: Callable[[str], nn.Module]
    unseen: str = ""

    @property
    def name(self) -> str:
        return f"{self.place}: {self.defect}"


def loss_of(model: nn.Module, seed: int = 0, loss: str = "any") -> Tensor:
    """A loss of the logits that is not invariant under anything."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 47, (2, 12), generator=generator)
    logits = model(tokens).logits
    target = torch.randn(logits.shape, generator=generator)
    return (logits.float() - target).square().mean()


# Attention.


class Attend(torch.autograd.Function):
    """Causal grouped attention with its backward written out, right or wrong."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, wrong: str) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        keys, values = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = (q @ keys.transpose(-1, -2)) * scale
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        result = weights @ values
        ctx.save_for_backward(q, k, v, weights, result)
        ctx.scale, ctx.wrong, ctx.groups = scale, wrong, groups
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (out,) = grads
        q, k, v, p, result = ctx.saved_tensors
        wrong, groups = ctx.wrong, ctx.groups
        keys, values = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        if wrong == "layout of dO misread":
            out = out.transpose(-1, -2).reshape(out.shape)
        if wrong == "mask ignored":
            p = ((q @ keys.transpose(-1, -2)) * ctx.scale).softmax(-1)
        weights = p
        if wrong == "dV with untransposed weights":
            weights = p.transpose(-1, -2)
        dv = weights.transpose(-1, -2) @ out
        dp = out @ values.transpose(-1, -2)
        if wrong == "mask ignored in dQ and dK":
            p = ((q @ keys.transpose(-1, -2)) * ctx.scale).softmax(-1)
        # As kernels do: Σ_j p_ij dp_ij is the product of a row of the output with its gradient.
        correction = (out * result).sum(-1, keepdim=True)
        if wrong == "no softmax correction":
            correction = torch.zeros_like(correction)
        if wrong == "correction of the next row":
            correction = correction.roll(1, -2)
        ds = p * (dp - correction) * ctx.scale
        if wrong == "no scale in dQ and dK":
            ds = ds / ctx.scale
        dq, dk = ds @ keys, ds.transpose(-1, -2) @ q
        if wrong == "stale keys in dQ":
            dq = ds @ keys.roll(1, -2)
        if wrong == "heads of dQ swapped":
            dq = dq[:, torch.arange(dq.shape[1]).roll(1)]
        if wrong == "last queries skipped in dK and dV":
            ds, weights, out = ds[:, :, :-4], weights[:, :, :-4], out[:, :, :-4]
            dk, dv = ds.transpose(-1, -2) @ q[:, :, :-4], weights.transpose(-1, -2) @ out
        dk, dv = (one.unflatten(1, (-1, groups)) for one in (dk, dv))
        if wrong == "group not summed in dK":
            dk, dv = dk[:, :, 0], dv.sum(2)
        elif wrong == "group averaged":
            dk, dv = dk.mean(2), dv.mean(2)
        else:
            dk, dv = dk.sum(2), dv.sum(2)
        dk = dk * {"dK without the scale": 1 / ctx.scale, "dK times 1.1": 1.1, "dK negative": -1.0}.get(wrong, 1.0)
        if wrong == "one head's dK times 1.1":
            dk = torch.cat([dk[:, :1] * 1.1, dk[:, 1:]], 1)
        if wrong == "dV zero":
            dv = torch.zeros_like(dv)
        if wrong == "all times 1.1":
            dq, dk, dv = (1.1 * one for one in (dq, dk, dv))
        return dq, dk, dv, None, None


def registered_attention(wrong: str) -> nn.Module:
    """A Llama that uses an attention function the user registered with transformers."""
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

    def mine(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        return Attend.apply(q, k, v, scaling, module.wrong).transpose(1, 2).contiguous(), None

    AttentionInterface.register("mine", mine)
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_key_value_heads=2, attn_implementation="mine")
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        layer.self_attn.wrong = wrong
    return model


# Norms.


class Normalise(torch.autograd.Function):
    """An RMS or layer norm with its backward written out, right or wrong."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, bias: Tensor | None, eps: float, centres: bool, wrong: str
    ) -> Tensor:
        values = x - x.mean(-1, keepdim=True) if centres else x
        root = (values.square().mean(-1, keepdim=True) + eps).rsqrt()
        y = values * root
        ctx.save_for_backward(y, root, gain)
        ctx.centres, ctx.wrong, ctx.biased = centres, wrong, bias is not None
        return y * gain + bias if bias is not None else y * gain

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (out,) = grads
        y, root, gain = ctx.saved_tensors
        wrong = ctx.wrong
        dy = out * gain
        dx = dy if wrong == "dx without its projection" else dy - y * (dy * y).mean(-1, keepdim=True)
        if ctx.centres and wrong != "dx not centred":
            dx = dx - dx.mean(-1, keepdim=True)
        dx = dx * root * {"dx times 1.1": 1.1}.get(wrong, 1.0)
        if wrong == "projection over the batch":
            dx = (dy - y * (dy * y).mean()) * root
        every = tuple(range(out.ndim - 1))
        dgain = (out * y).sum(every)
        dgain = dgain * {"gain's gradient halved": 0.5, "gain's gradient lost": 0.0}.get(wrong, 1.0)
        if wrong == "gain's gradient averaged":
            dgain = (out * y).mean(every)
        if wrong == "gain's gradient of half the positions":
            dgain = (out * y)[:, : out.shape[1] // 2].sum(every)
        dbias = out.sum(every) * (0.5 if wrong == "bias's gradient halved" else 1.0) if ctx.biased else None
        return dx, dgain, dbias, None, None, None


def patched_norm(wrong: str) -> nn.Module:
    """A Llama whose norms were replaced by a fused one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2))
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":

            def forward(self: Any, x: Tensor) -> Tensor:
                return Normalise.apply(x, self.weight, None, self.variance_epsilon, False, wrong)

            module.forward = types.MethodType(forward, module)
    return model


def gpt2(**options: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 48, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    plain = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, **plain, **options))


def patched_layer_norm(wrong: str) -> nn.Module:
    """A GPT-2 whose layer norms were replaced by a fused one."""
    model = gpt2()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):

            def forward(self: Any, x: Tensor) -> Tensor:
                return Normalise.apply(x, self.weight, self.bias, self.eps, True, wrong)

            module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]
    return model


# Feed-forward networks.


class Gated(torch.autograd.Function):
    """silu(gate) · up with its backward written out, right or wrong."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, wrong: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.wrong = wrong
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (out,) = grads
        gate, up = ctx.saved_tensors
        s = gate.sigmoid()
        grad = s if ctx.wrong == "the gate's derivative" else s * (1 + gate * (1 - s))
        dgate, dup = out * up * grad, out * gate * s
        if ctx.wrong == "the two gradients swapped":
            dgate, dup = dup, dgate
        if ctx.wrong == "dup times 2":
            dup = 2 * dup
        if ctx.wrong == "last tokens dropped":
            keep = torch.arange(out.shape[-2]) < out.shape[-2] - 3
            dgate, dup = dgate * keep[:, None], dup * keep[:, None]
        if ctx.wrong == "dup in half the channels":
            dup = torch.cat([dup[..., : dup.shape[-1] // 2], torch.zeros_like(dup[..., dup.shape[-1] // 2 :])], -1)
        return dgate, dup, None


def gated_function(wrong: str) -> nn.Module:
    """A Llama whose gated network calls an autograd function."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2))
    for layer in model.model.layers:

        def forward(self: Any, x: Tensor) -> Any:
            return self.down_proj(Gated.apply(self.gate_proj(x), self.up_proj(x), wrong))

        layer.mlp.forward = types.MethodType(forward, layer.mlp)
    return model


class Activate(torch.autograd.Function):
    """ReLU or GELU with its backward written out, right or wrong."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str, wrong: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kind, ctx.wrong = kind, wrong
        return F.relu(x) if kind == "relu" else F.gelu(x, approximate="tanh")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            out = F.relu(y) if ctx.kind == "relu" else F.gelu(y, approximate="tanh")
        (grad,) = torch.autograd.grad(out, y, grads[0])
        if ctx.wrong == "derivative of ReLU leaks":
            grad = grad + 0.1 * grads[0] * (x < 0)
        if ctx.wrong == "derivative of GELU":
            grad = grads[0] * x.sigmoid()
        return grad, None, None


class Network(nn.Module):
    """An activation that a user wrote."""

    def __init__(self, kind: str, wrong: str) -> None:
        super().__init__()
        self.kind, self.wrong = kind, wrong

    def forward(self, x: Tensor) -> Any:
        return Activate.apply(x, self.kind, self.wrong)


def relu_function(wrong: str) -> nn.Module:
    model = gpt2(activation_function="relu")
    for block in model.transformer.h:  # type: ignore[union-attr]
        block.mlp.act = Network("relu", wrong)
    return model


def gelu_function(wrong: str) -> nn.Module:
    model = gpt2()
    for block in model.transformer.h:  # type: ignore[union-attr]
        block.mlp.act = Network("gelu", wrong)
    return model


# Routers and experts.


class Route(torch.autograd.Function):
    """Softmax over experts with its backward written out, right or wrong."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, wrong: str) -> Tensor:
        p = logits.softmax(-1)
        ctx.save_for_backward(p)
        ctx.wrong = wrong
        return p

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (p,) = ctx.saved_tensors
        (out,) = grads
        if ctx.wrong == "no softmax correction":
            return p * out, None
        if ctx.wrong == "gradients of the wrong experts":
            out = out.roll(1, -1)
        result = p * (out - (p * out).sum(-1, keepdim=True))
        return result * (1.1 if ctx.wrong == "dlogits times 1.1" else 1.0), None


class Mixture(nn.Module):
    """Four gated experts, the two best of every token, looped over as users write it."""

    def __init__(self, wrong: str, place: str) -> None:
        super().__init__()
        self.router = nn.Linear(32, 4, bias=False)
        self.gate = nn.ModuleList(nn.Linear(32, 24, bias=False) for _ in range(4))
        self.up = nn.ModuleList(nn.Linear(32, 24, bias=False) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(24, 32, bias=False) for _ in range(4))
        self.wrong, self.place = wrong, place

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights = Route.apply(self.router(flat), self.wrong if self.place == "router" else "")
        top, chosen = weights.topk(2, -1)
        if self.place == "experts":
            # Without the correction of the softmax renormalised weights are right as well: they do not need it.
            top = top / top.sum(-1, keepdim=True)
        if self.place == "experts" and self.wrong == "routing weights detached":
            top = top.detach()
        result = torch.zeros_like(flat)
        for number in range(4):
            token, slot = torch.where(chosen == number)
            mine = flat[token]
            if self.place == "experts":
                mine = Passed.apply(mine, self.wrong, number)
            out = self.down[number](F.silu(self.gate[number](mine)) * self.up[number](mine))
            if self.place == "experts":
                out = Left.apply(out, self.wrong, number)
            result = result.index_add(0, token, out * top[token, slot, None])
        return result.reshape(x.shape)


class Passed(torch.autograd.Function):
    """Tokens handed to an expert; its backward gathers their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wrong: str, number: int) -> Tensor:
        ctx.wrong, ctx.number = wrong, number
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (out,) = grads
        if ctx.wrong == "dx of an expert halved" and ctx.number == 1:
            out = out * 0.5
        if ctx.wrong == "dx of the last expert lost" and ctx.number == 3:
            out = torch.zeros_like(out)
        if ctx.wrong == "tokens in another order":
            out = out.roll(1, 0)
        return out, None, None


class Left(torch.autograd.Function):
    """What leaves an expert; its backward hands the gradient to the expert."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wrong: str, number: int) -> Tensor:
        ctx.wrong, ctx.number = wrong, number
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (out,) = grads
        if ctx.wrong == "gradient of an expert's output doubled" and ctx.number == 2:
            out = 2 * out
        return out, None, None


def mixture(place: str) -> Callable[[str], nn.Module]:
    def build(wrong: str) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2))
        for layer in model.model.layers:
            layer.mlp = Mixture(wrong, place)
        return model

    return build


# Projections.


class Project(torch.autograd.Function):
    """A linear map stored (in, out), with its backward written out, right or wrong."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, wrong: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.wrong = wrong
        return x @ weight + bias

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (out,) = grads
        x, weight = ctx.saved_tensors
        wrong, width = ctx.wrong, weight.shape[1] // 3
        flat, grad = x.reshape(-1, x.shape[-1]), out.reshape(-1, out.shape[-1])
        dx, dw, db = out @ weight.T, flat.T @ grad, grad.sum(0)
        q, k, v = dw.split(width, 1)
        if wrong == "keys' part times 1.1":
            dw = torch.cat([q, 1.1 * k, v], 1)
        if wrong == "queries' and keys' parts swapped":
            dw = torch.cat([k, q, v], 1)
        if wrong == "one head of keys lost":
            dw = torch.cat([q, torch.cat([torch.zeros_like(k[:, :8]), k[:, 8:]], 1), v], 1)
        if wrong == "dx without values":
            dx = out[..., : 2 * width] @ weight[:, : 2 * width].T
        if wrong == "bias's gradient lost":
            db = torch.zeros_like(db)
        if wrong == "bias's gradient averaged":
            db = db / len(grad)
        if wrong == "dx of half the outputs (no all-reduce)":
            half = weight.shape[1] // 2
            dx = out[..., :half] @ weight[:, :half].T
        if wrong == "dW of half the batch (no all-reduce)":
            dw = flat[: len(flat) // 2].T @ grad[: len(grad) // 2]
        return dx, dw, db, None


def fused_projection(wrong: str) -> nn.Module:
    """A GPT-2 whose fused query, key and value projection is the user's."""
    model = gpt2()
    for block in model.transformer.h:  # type: ignore[union-attr]

        def forward(self: Any, x: Tensor) -> Any:
            return Project.apply(x, self.weight, self.bias, wrong)

        block.attn.c_attn.forward = types.MethodType(forward, block.attn.c_attn)
    return model


class Parallel(torch.autograd.Function):
    """What tensor parallelism puts before a column-parallel map: nothing forwards, a sum over ranks backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wrong: str) -> Tensor:
        ctx.wrong = wrong
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (out,) = grads
        return out * {"averaged instead of summed": 0.5, "summed twice": 2.0, "lost": 0.0}.get(ctx.wrong, 1.0), None


class Ranks(nn.Module):
    """A gated network cut over two ranks, both in this process."""

    def __init__(self, wrong: str) -> None:
        super().__init__()
        self.gate = nn.ModuleList(nn.Linear(32, 20, bias=False) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(32, 20, bias=False) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(20, 32, bias=False) for _ in range(2))
        self.wrong = wrong

    def forward(self, x: Tensor) -> Any:
        parts = []
        for rank in range(2):
            mine = Parallel.apply(x, self.wrong)
            if self.wrong == "one rank's input gradient lost" and rank == 1:
                mine = Parallel.apply(x, "lost")
            parts.append(self.down[rank](F.silu(self.gate[rank](mine)) * self.up[rank](mine)))
        return parts[0] + parts[1]


def tensor_parallel(wrong: str) -> nn.Module:
    """A Llama whose networks run column-parallel over two ranks, simulated in one process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2))
    for layer in model.model.layers:
        layer.mlp = Ranks(wrong)
    return model


def unsynchronised(wrong: str) -> nn.Module:
    """A Llama under a data-parallel wrapper of the user's that reduces gradients after the backward pass."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2))
    model.reduce = wrong
    return model


def reduced(model: nn.Module, seed: int) -> None:
    """What a data-parallel wrapper does to gradients after the backward pass: the mean over two ranks, or not."""
    wrong = getattr(model, "reduce", None)
    if wrong is None:
        return
    mine = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    loss_of(model, seed + 1).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None
        skipped = {
            "values not reduced": "v_proj" in name,
            "norms not reduced": "norm" in name,
            "embedding not reduced": "embed_tokens" in name,
        }.get(wrong, False)
        scale = 1.0 if wrong == "summed, not averaged" else 0.5
        if wrong == "up projections summed, not averaged" and "up_proj" in name:
            scale = 1.0
        p.grad.copy_(mine[name] if skipped else scale * (mine[name] + p.grad))


_SAME_M = "dQ = M K and dK = Mᵀ Q share the same wrong M, and each of its rows still sums to zero"
_FACTOR = "a factor on everything that flows back from one point on is a factor on the loss of everything before it"

CASES: tuple[Planted, ...] = (
    *(
        Planted(place="registered attention", defect=defect, build=registered_attention)
        for defect in (
            "dK times 1.1",
            "one head's dK times 1.1",
            "dK negative",
            "dK without the scale",
            "stale keys in dQ",
            "no softmax correction",
            "correction of the next row",
            "mask ignored",
            "mask ignored in dQ and dK",
            "heads of dQ swapped",
            "group not summed in dK",
            "group averaged",
            "dV with untransposed weights",
            "dV zero",
            "layout of dO misread",
            "last queries skipped in dK and dV",
            "all times 1.1",
        )
    ),
    Planted(place="registered attention", defect="no scale in dQ and dK", build=registered_attention, unseen=_SAME_M),
    *(
        Planted(place="patched RMS norm", defect=defect, build=patched_norm)
        for defect in (
            "dx without its projection",
            "dx times 1.1",
            "gain's gradient halved",
            "gain's gradient lost",
            "gain's gradient averaged",
            "gain's gradient of half the positions",
        )
    ),
    Planted(
        place="patched RMS norm",
        defect="projection over the batch",
        build=patched_norm,
        unseen="what it leaves in each token cancels in their sum, and no law is about single tokens",
    ),
    *(
        Planted(place="patched layer norm", defect=defect, build=patched_layer_norm)
        for defect in (
            "dx not centred",
            "dx without its projection",
            "gain's gradient halved",
            "bias's gradient halved",
        )
    ),
    *(
        Planted(place="gated function", defect=defect, build=gated_function)
        for defect in (
            "the two gradients swapped",
            "dup times 2",
            "last tokens dropped",
            "dup in half the channels",
        )
    ),
    Planted(
        place="gated function",
        defect="the gate's derivative",
        build=gated_function,
        unseen="no law spans the derivative of a nonlinearity",
    ),
    Planted(place="activation", defect="derivative of ReLU leaks", build=relu_function),
    Planted(
        place="activation",
        defect="derivative of GELU",
        build=gelu_function,
        unseen="no law spans the derivative of a nonlinearity",
    ),
    Planted(place="router", defect="no softmax correction", build=mixture("router")),
    Planted(
        place="router",
        defect="gradients of the wrong experts",
        build=mixture("router"),
        unseen="what flows back through the router is wrong and still sums to zero over experts",
    ),
    Planted(place="router", defect="dlogits times 1.1", build=mixture("router"), unseen=_FACTOR),
    *(
        Planted(place="expert loop", defect=defect, build=mixture("experts"))
        for defect in (
            "dx of an expert halved",
            "dx of the last expert lost",
            "tokens in another order",
            "gradient of an expert's output doubled",
        )
    ),
    Planted(place="expert loop", defect="routing weights detached", build=mixture("experts")),
    *(
        Planted(place="fused projection", defect=defect, build=fused_projection)
        for defect in (
            "keys' part times 1.1",
            "queries' and keys' parts swapped",
            "one head of keys lost",
            "dx without values",
            "bias's gradient lost",
            "bias's gradient averaged",
            "dx of half the outputs (no all-reduce)",
            "dW of half the batch (no all-reduce)",
        )
    ),
    *(
        Planted(place="tensor parallel", defect=defect, build=tensor_parallel)
        for defect in ("averaged instead of summed", "summed twice", "one rank's input gradient lost")
    ),
    *(
        Planted(place="data parallel", defect=defect, build=unsynchronised)
        for defect in (
            "values not reduced",
            "norms not reduced",
            "up projections summed, not averaged",
        )
    ),
    Planted(
        place="data parallel",
        defect="embedding not reduced",
        build=unsynchronised,
        unseen="only a law up to ε spans it, and what ε leaves of it was not measured on the other rank: left open",
    ),
    Planted(
        place="data parallel",
        defect="summed, not averaged",
        build=unsynchronised,
        unseen="identities are linear: a factor on all gradients passes",
    ),
)
