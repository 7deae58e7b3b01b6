"""Models of several makers at the sizes people train: transformers, litgpt and one file written by hand."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Rows = slice | tuple[slice, ...]
"""Which entries of a tensor are made wrong, as an index."""

WIDTHS: dict[str, tuple[int, int, int, int, int]] = {
    "2M": (192, 512, 3, 6, 3),
    "40M": (384, 1024, 8, 6, 3),
    "125M": (768, 2048, 12, 12, 6),
    "0.5B": (1280, 3584, 22, 20, 10),
    "1.4B": (2048, 5632, 26, 32, 8),
    "8B": (4096, 14336, 32, 32, 8),
}
"""Hidden size, neurons, layers, query heads and key heads."""


class RMSNorm(nn.Module):
    """RMS norm computed in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
        return self.gain * y.to(x.dtype)


class HandWritten(nn.Module):
    """A decoder as people write it in one file: grouped heads, rotary positions, a gated network."""

    def __init__(self, vocabulary: int, width: int, neurons: int, layers: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList()
        for _ in range(layers):
            self.layers.append(
                nn.ModuleDict(
                    {
                        "before": RMSNorm(width),
                        "q": nn.Linear(width, width, bias=False),
                        "k": nn.Linear(width, groups * self.size, bias=False),
                        "v": nn.Linear(width, groups * self.size, bias=False),
                        "o": nn.Linear(width, width, bias=False),
                        "between": RMSNorm(width),
                        "gate": nn.Linear(width, neurons, bias=False),
                        "up": nn.Linear(width, neurons, bias=False),
                        "down": nn.Linear(neurons, width, bias=False),
                    }
                )
            )
        self.last = RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def _turn(self, x: Tensor) -> Tensor:
        half = self.size // 2
        rates = 1e4 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
        angles = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)[:, None] * rates
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        batch, length, width = x.shape
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleDict)
            y = layer["before"](x)
            q, k, v = (layer[name](y).view(batch, length, -1, self.size).transpose(1, 2) for name in ("q", "k", "v"))
            q, k = self._turn(q), self._turn(k)
            k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + layer["o"](y.transpose(1, 2).reshape(batch, length, width))
            y = layer["between"](x)
            x = x + layer["down"](F.silu(layer["gate"](y)) * layer["up"](y))
        return self.head(self.last(x))


@dataclass(frozen=True, kw_only=True)
class Maker:
    """How a model is built, how its logits are read, and which rows of its gradients are made wrong."""

    build: Any
    logits: Any
    targets: Any


def _llama(size: str, vocabulary: int, **more: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    width, neurons, layers, heads, groups = WIDTHS[size]
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=neurons,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=1024,
        **more,
    )
    return LlamaForCausalLM(config)


def _mixtral(size: str, vocabulary: int) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    width, neurons, layers, heads, groups = WIDTHS[size]
    config = MixtralConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=neurons // 2,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=1024,
    )
    return MixtralForCausalLM(config)


def _gpt2(size: str, vocabulary: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    width, _, layers, heads, _ = WIDTHS[size]
    config = GPT2Config(
        vocab_size=vocabulary,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        n_positions=1024,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def _library(name: str, **more: Any) -> Any:
    """Return a function that builds a decoder of transformers whose config has the names of Llama's."""

    def build(size: str, vocabulary: int, **options: Any) -> nn.Module:
        import transformers

        width, neurons, layers, heads, groups = WIDTHS[size]
        config = getattr(transformers, name.replace("ForCausalLM", "TextConfig"), None)
        config = config or getattr(transformers, name.replace("ForCausalLM", "Config"))
        settings = {
            "vocab_size": vocabulary,
            "hidden_size": width,
            "intermediate_size": neurons,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "head_dim": width // heads,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": False,
        }
        model: nn.Module = getattr(transformers, name)(config(**settings | more | options))
        return model

    return build


def _opt(size: str, vocabulary: int) -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    width, neurons, layers, heads, _ = WIDTHS[size]
    config = OPTConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        word_embed_proj_dim=width,
        ffn_dim=neurons,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=1024,
        dropout=0.0,
        attention_dropout=0.0,
    )
    return OPTForCausalLM(config)


def _bert(size: str, vocabulary: int) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    width, neurons, layers, heads, _ = WIDTHS[size]
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=neurons,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=1024,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config)


def _litgpt(size: str, vocabulary: int) -> nn.Module:
    config_class = importlib.import_module("litgpt.config").Config
    model_class = importlib.import_module("litgpt.model").GPT
    width, neurons, layers, heads, groups = WIDTHS[size]
    config = config_class(
        name="llama",
        block_size=1024,
        vocab_size=vocabulary,
        padded_vocab_size=vocabulary,
        n_layer=layers,
        n_head=heads,
        n_query_groups=groups,
        n_embd=width,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        intermediate_size=neurons,
    )
    model: nn.Module = model_class(config)
    return model


def _hand(size: str, vocabulary: int) -> nn.Module:
    return HandWritten(vocabulary, *WIDTHS[size])


def _named(model: nn.Module, *parts: str) -> str:
    """The parameter in the middle layer whose name has all of these parts."""
    names = [name for name, _ in model.named_parameters() if all(part in name for part in parts)]
    return names[len(names) // 2]


def _rows(model: nn.Module, size: str) -> dict[str, tuple[str, Rows]]:
    width, _, _, heads, _ = WIDTHS[size]
    head = width // heads
    result: dict[str, tuple[str, Rows]] = {
        "key head": (_named(model, "k_proj.weight"), slice(0, head)),
        "value head": (_named(model, "v_proj.weight"), slice(0, head)),
        "gain": (_named(model, "input_layernorm.weight"), slice(None)),
        "embedding rows": (_named(model, "embed_tokens.weight"), slice(0, 200)),
    }
    if any("lm_head" in name for name, _ in model.named_parameters()):
        result["head"] = (_named(model, "lm_head.weight"), slice(None))
    return result


def _llama_targets(model: nn.Module, size: str) -> dict[str, tuple[str, Rows]]:
    up = _named(model, "up_proj.weight")
    return _rows(model, size) | {"up": (up, slice(None)), "one row of up": (up, slice(3, 4))}


def _mixtral_targets(model: nn.Module, size: str) -> dict[str, tuple[str, Rows]]:
    router = next(
        name
        for name, p in reversed([*model.named_parameters()])
        if p.ndim == 2 and p.shape[0] == 4 and "layers" in name
    )
    experts = {name: p for name, p in model.named_parameters() if name.endswith("experts.gate_up_proj")}
    result: dict[str, tuple[str, Rows]] = {**_rows(model, size)}
    if experts:
        name, weights = [*experts.items()][len(experts) // 2]
        result["up"] = (name, (slice(1, 2), slice(weights.shape[1] // 2, None)))
    # A factor on all of a router's gradient keeps its sum zero: one expert's row is what its law sees.
    return result | {"router, one expert": (router, slice(1, 2))}


def _gpt2_targets(model: nn.Module, size: str) -> dict[str, tuple[str, Rows]]:
    width, _, _, heads, _ = WIDTHS[size]
    qkv, head = _named(model, "attn.c_attn.weight"), width // heads
    return {
        "key head": (qkv, (slice(None), slice(width, width + head))),
        "value head": (qkv, (slice(None), slice(2 * width, 2 * width + head))),
        "gain": (_named(model, "ln_1.weight"), slice(None)),
        "output projection": (_named(model, "attn.c_proj.weight"), slice(None)),
        "embedding rows": (_named(model, "wte.weight"), slice(0, 200)),
    }


def _opt_targets(model: nn.Module, size: str) -> dict[str, tuple[str, Rows]]:
    width, _, _, heads, _ = WIDTHS[size]
    up = _named(model, ".fc1.weight")
    return {
        "key head": (_named(model, ".k_proj.weight"), slice(0, width // heads)),
        "value head": (_named(model, ".v_proj.weight"), slice(0, width // heads)),
        "up": (up, slice(None)),
        "one row of up": (up, slice(3, 4)),
        "gain": (_named(model, "self_attn_layer_norm.weight"), slice(None)),
        "embedding rows": (_named(model, "embed_tokens.weight"), slice(0, 200)),
    }


def _bert_targets(model: nn.Module, size: str) -> dict[str, tuple[str, Rows]]:
    width, _, _, heads, _ = WIDTHS[size]
    return {
        "key head": (_named(model, ".key.weight"), slice(0, width // heads)),
        "value head": (_named(model, ".value.weight"), slice(0, width // heads)),
        "gain": (_named(model, "attention.output.LayerNorm.weight"), slice(None)),
        "embedding rows": (_named(model, "word_embeddings.weight"), slice(0, 200)),
    }


def _litgpt_targets(model: nn.Module, size: str) -> dict[str, tuple[str, Rows]]:
    width, _, _, heads, groups = WIDTHS[size]
    head = width // heads
    qkv, up = _named(model, ".qkv.weight"), _named(model, "mlp.fc_2.weight")
    return {
        "key head": (qkv, slice(width, width + head)),
        "value head": (qkv, slice(width + groups * head, width + (groups + 1) * head)),
        "up": (up, slice(None)),
        "one row of up": (up, slice(3, 4)),
        "gain": (_named(model, "norm_1.weight"), slice(None)),
        "embedding rows": (_named(model, "wte.weight"), slice(0, 200)),
        "head": (_named(model, "lm_head.weight"), slice(None)),
    }


def _hand_targets(model: nn.Module, size: str) -> dict[str, tuple[str, Rows]]:
    width, _, _, heads, _ = WIDTHS[size]
    head = width // heads
    up = _named(model, ".up.weight")
    return {
        "key head": (_named(model, ".k.weight"), slice(0, head)),
        "value head": (_named(model, ".v.weight"), slice(0, head)),
        "up": (up, slice(None)),
        "one row of up": (up, slice(3, 4)),
        "gain": (_named(model, "before.gain"), slice(None)),
        "embedding rows": ("embed.weight", slice(0, 200)),
        "head": ("head.weight", slice(None)),
    }


def _library_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=tokens).logits
    return logits


def _plain_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    logits: Tensor = model(tokens)
    return logits


MAKERS = {
    "llama": Maker(build=_llama, logits=_library_logits, targets=_llama_targets),
    "mixtral": Maker(build=_mixtral, logits=_library_logits, targets=_mixtral_targets),
    "gpt2": Maker(build=_gpt2, logits=_library_logits, targets=_gpt2_targets),
    "qwen3": Maker(build=_library("Qwen3ForCausalLM"), logits=_library_logits, targets=_llama_targets),
    "gemma2": Maker(build=_library("Gemma2ForCausalLM"), logits=_library_logits, targets=_llama_targets),
    "gemma3": Maker(build=_library("Gemma3ForCausalLM"), logits=_library_logits, targets=_llama_targets),
    "qwen3-moe": Maker(
        build=_library("Qwen3MoeForCausalLM", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=256),
        logits=_library_logits,
        targets=_mixtral_targets,
    ),
    "opt": Maker(build=_opt, logits=_library_logits, targets=_opt_targets),
    "bert": Maker(build=_bert, logits=_library_logits, targets=_bert_targets),
    "litgpt": Maker(build=_litgpt, logits=_plain_logits, targets=_litgpt_targets),
    "hand": Maker(build=_hand, logits=_plain_logits, targets=_hand_targets),
}
