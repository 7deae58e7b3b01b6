"""Centered attention in models of other libraries, by name or by a patch of two lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import conserved
from conserved.attention import NotInvariantError, centered, register_with_transformers

TINY = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def gradients(model: nn.Module, **inputs: Any) -> dict[str, Tensor]:
    """Logits and gradients of all parameters."""
    model.zero_grad()
    torch.manual_seed(1)
    logits = model(**inputs).logits
    logits.square().mean().backward()
    named = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return named | {"logits": logits.detach()}


def decoder(kind: str) -> Any:
    torch.manual_seed(0)
    configs: dict[str, Callable[[], Any]] = {
        "llama": lambda: transformers.LlamaConfig(**TINY, **HEADS, **SPECIAL),
        "qwen3": lambda: transformers.Qwen3Config(**TINY, **HEADS, **SPECIAL),
        "mistral": lambda: transformers.MistralConfig(**TINY, **HEADS, **SPECIAL, sliding_window=4),
        "gpt2": lambda: transformers.GPT2Config(
            vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=4, attn_pdrop=0.2, resid_pdrop=0, embd_pdrop=0
        ),
        "gemma2": lambda: transformers.Gemma2Config(**TINY, **HEADS, **SPECIAL),
        "gpt-oss": lambda: transformers.GptOssConfig(
            **TINY, **HEADS, **SPECIAL, num_local_experts=2, num_experts_per_tok=1
        ),
    }
    return transformers.AutoModelForCausalLM.from_config(configs[kind]()).double()


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gpt2"])
def test_a_model_of_transformers_computes_the_same_by_name(kind: str) -> None:
    name = register_with_transformers()
    model, tokens = decoder(kind), torch.randint(3, 32, (2, 12))
    padded = torch.ones_like(tokens)
    padded[0, :5] = 0
    for inputs in ({"input_ids": tokens}, {"input_ids": tokens, "attention_mask": padded}):
        model.set_attn_implementation("sdpa")
        expected = gradients(model, **inputs)
        model.set_attn_implementation(name)
        actual = gradients(model, **inputs)
        for parameter, value in expected.items():
            torch.testing.assert_close(actual[parameter], value, rtol=0, atol=1e-12)


def test_generation_is_that_of_the_base() -> None:
    model, tokens = decoder("llama"), torch.randint(3, 32, (1, 5))
    results = []
    for name in ("sdpa", register_with_transformers()):
        model.set_attn_implementation(name)
        results.append(model.generate(tokens, max_new_tokens=6, do_sample=False))
    assert torch.equal(*results)


def test_an_unknown_base_is_refused() -> None:
    with pytest.raises(ValueError, match="Expected base to be one of"):
        register_with_transformers(base="fastest")


@pytest.mark.parametrize(("kind", "reason"), [("gemma2", "scores are capped"), ("gpt-oss", "learned sink")])
def test_layers_that_see_a_shift_of_keys_are_refused(kind: str, reason: str) -> None:
    model = decoder(kind)
    model.config._attn_implementation = register_with_transformers()
    with pytest.raises(NotInvariantError, match=reason):
        model(input_ids=torch.randint(3, 32, (2, 12)))


def test_the_gauge_hears_a_centered_model_and_its_keys_balance() -> None:
    model = decoder("llama")
    model.set_attn_implementation(register_with_transformers())
    with conserved.gauge(model) as gauge:
        model(input_ids=torch.randint(3, 32, (2, 12))).logits.square().mean().backward()
    assert gauge.ok


def test_litgpt_takes_two_lines() -> None:
    litgpt = pytest.importorskip("litgpt.model", exc_type=ImportError)
    config = litgpt.Config.from_name("pythia-14m", n_layer=2, n_embd=32, n_head=4, padded_vocab_size=32)
    torch.manual_seed(0)
    model, tokens = litgpt.GPT(config).double(), torch.randint(32, (2, 12))
    model(tokens).square().mean().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    # the two lines
    for block in model.transformer.h:
        block.attn.scaled_dot_product_attention = centered(
            block.attn.scaled_dot_product_attention, causal=True, output_axis=-3
        )
    model(tokens).square().mean().backward()
    assert block.attn.scaled_dot_product_attention.probed
    for parameter, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, value, rtol=0, atol=1e-12)


def test_torchtitan_takes_one_line_per_attention() -> None:
    titan = pytest.importorskip("torchtitan.models.common.attention", exc_type=ImportError)
    inner = titan.ScaledDotProductAttention(titan.ScaledDotProductAttention.Config())
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 12, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    expected = inner(q, k + 3, v + 2, enable_gqa=True)
    inner.forward = centered(inner.forward, axis=-3, causal=True)
    torch.testing.assert_close(inner(q, k + 3, v + 2, enable_gqa=True), expected, rtol=0, atol=1e-12)
    assert inner.forward.probed
