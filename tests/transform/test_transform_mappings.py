"""Mappings for quantisers: every reader of a channel is named, in the form each tool takes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from conserved.transform import LayerMapping, mappings
from test_transform_checkpoint import IDS, experts

pytestmark = pytest.mark.filterwarnings("ignore")

SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 4,
}


def plain(model: nn.Module) -> dict[str, set[str]]:
    result = mappings(model)
    assert all(isinstance(one, LayerMapping) and one.reason for one in result)
    return {one.smooth[0]: set(one.balance) for one in result if isinstance(one, LayerMapping)}


def test_a_llama_has_the_four_mappings_of_the_registries_and_its_head() -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    result, layer = plain(model), "model.layers.1."
    assert result[f"{layer}input_layernorm"] == {f"{layer}self_attn.{p}_proj" for p in "qkv"}
    assert result[f"{layer}self_attn.v_proj"] == {f"{layer}self_attn.o_proj"}
    assert result[f"{layer}post_attention_layernorm"] == {f"{layer}mlp.{p}_proj" for p in ("gate", "up")}
    assert result[f"{layer}mlp.up_proj"] == {f"{layer}mlp.down_proj"}
    assert result["model.norm"] == {"lm_head"}


def test_double_norms_are_read_right() -> None:
    """SmoothQuant's default mapping divides Gemma-2's post_attention_layernorm, which the MLP does not read."""
    model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SMALL))
    result = plain(model)
    assert "model.layers.0.post_attention_layernorm" not in result
    assert result["model.layers.0.pre_feedforward_layernorm"] == {
        f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up")
    }


@pytest.mark.parametrize("form", ["llmcompressor", "autoround"])
def test_layers_that_are_alike_are_one_pattern(form: str) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    names = [name for name, _ in model.named_modules()]
    result: Any = mappings(model, format=form)
    assert len(result) == 5
    for one in result:
        patterns = [one["smooth_layer"], *one["balance_layers"]]
        assert all(pattern.startswith("re:") == (form == "llmcompressor") for pattern in patterns)
        for pattern in patterns:
            matched = [name for name in names if re.match(pattern.removeprefix("re:"), name)]
            assert len(matched) in (1, 2)


def test_shared_value_heads_are_listed_and_left_out_of_forms_that_cannot_say_them() -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL | {"num_key_value_heads": 2}))
    assert "model.layers.0.self_attn.v_proj" in plain(model)
    result: Any = mappings(model, format="llmcompressor")
    assert not any("v_proj" in one["smooth_layer"] for one in result)


class Odd(nn.Module):
    """A model in no registry: two branches read one norm, one of them through a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(8), nn.Linear(8, 6), nn.Linear(8, 6)
        self.out = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.out(self.a(y) * torch.sigmoid(self.b(y)))


@pytest.mark.parametrize("how", ["eager", "batched_mm", "grouped_mm"])
def test_experts_read_what_their_router_reads_however_they_are_computed(how: str) -> None:
    model = experts("Qwen3Moe", how)
    listed = {
        mapping.smooth: set(mapping.balance) for mapping in mappings(model, IDS) if isinstance(mapping, LayerMapping)
    }
    layer = "model.layers.0"
    assert listed[f"{layer}.post_attention_layernorm",] == {f"{layer}.mlp.gate", f"{layer}.mlp.experts"}


def test_a_pattern_finds_the_layers_it_is_for_and_no_others() -> None:
    """Numbers inside a block are not layers: 0 reads a norm, 2 reads what 0 makes."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(8)
            self.ff = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.ff(self.norm(x))

    model = nn.Sequential(Block(), Block())
    names = [name for name, _ in model.named_modules()]
    wanted = {
        mapping.smooth[0]: set(mapping.balance)
        for mapping in mappings(model, torch.randn(3, 8))
        if not isinstance(mapping, dict)
    }
    result: dict[str, set[str]] = {}
    for one in mappings(model, torch.randn(3, 8), format="llmcompressor"):
        assert isinstance(one, dict)
        for smooth in (name for name in names if re.match(one["smooth_layer"][3:], name)):
            parent = smooth.split(".")[0]
            near = [name for name in names if name.startswith(parent)]
            result[smooth] = {n for pattern in one["balance_layers"] for n in near if re.match(pattern[3:], n)}
    assert result == wanted


def test_a_model_that_is_in_no_registry() -> None:
    result = mappings(Odd(), torch.randn(2, 8))
    listed = {one.smooth: one.balance for one in result if isinstance(one, LayerMapping)}
    assert listed == {("norm",): ("a", "b"), ("a",): ("out",)}


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(ValueError, match="plain, llmcompressor, autoround"):
        mappings(Odd(), torch.randn(2, 8), format="awq")
