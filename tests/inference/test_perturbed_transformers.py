"""A changed architecture has other laws, and nothing has to be said about it: they are read off the program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conserved import LawSet, Verdict
from hf_zoo import HALF_TURNED, Family, generic, named
from test_recognize_blocks import gradients

HOLDS = 1e-11


def checked(family: Family, model: nn.Module) -> LawSet:
    """The laws of a model, after making sure that each of them holds."""
    laws = family.laws(model)
    model.zero_grad()
    family.objective(model).backward()
    wrong = {name: r for name, r in laws.residuals(gradients(model)).items() if not r <= HOLDS}
    assert wrong == {}
    return laws


def numbers(laws: LawSet, family: str) -> int:
    return sum(symmetry.numbers for symmetry in laws if symmetry.family == family)


def no_rotary() -> dict[str, Any]:
    return {"rope_parameters": HALF_TURNED["rope_parameters"] | {"partial_rotary_factor": 0.0}}


CHANGES: list[tuple[str, str, dict[str, Any], dict[str, int]]] = [
    # name, family, change of the config, numbers that some laws then hold
    ("rotary in part", "GPT-NeoX", {}, {"query_key": 4, "inert_bias": 2}),
    ("rotary off", "GPT-NeoX", no_rotary(), {"query_key": 10, "inert_bias": 4}),
    (
        "rotary on",
        "GPT-NeoX",
        {"rope_parameters": HALF_TURNED["rope_parameters"] | {"partial_rotary_factor": 1.0}},
        {"inert_bias": 0, "value_output": 10},
    ),
    ("no biases", "GPT-NeoX", {"attention_bias": False}, {"inert_bias": 0, "bias_shift": 0, "value_output": 10}),
    ("branches side by side", "GPT-NeoX", {}, {"bias_shift": 4, "bias_centre": 0}),
    ("branches in a row", "GPT-NeoX", {"use_parallel_residual": False}, {"bias_shift": 0}),
    ("fraction that Llama does not read", "Llama", HALF_TURNED, {"query_key": 1}),
    ("experts one by one", "Mixtral", {"experts_implementation": "eager"}, {"gated_neurons": 6, "shift": 4}),
    ("four heads on two", "Llama", {"num_attention_heads": 4, "num_key_value_heads": 2}, {"query_key": 2}),
    ("one key head", "Llama", {}, {"query_key": 1, "value_output": 3}),
    ("two key heads", "Llama", {"num_key_value_heads": 2}, {"query_key": 2, "value_output": 6}),
    ("SiLU", "Llama", {}, {"gated_neurons": 3, "gates": 0}),
    ("ReLU", "Llama", {"hidden_act": "relu"}, {"gated_neurons": 3, "gates": 3}),
    ("squared ReLU", "Llama", {"hidden_act": "relu2"}, {"gated_neurons": 3, "gates": 3}),
    ("smooth network", "OPT", {"activation_function": "gelu"}, {"neurons": 0}),
    ("ReLU network", "OPT", {}, {"neurons": 3}),
    ("linear network", "GPT-2", {"activation_function": "linear"}, {"linear_pair": 6, "neurons": 0}),
    ("untied", "Llama", {}, {"gain": 12, "class_shift": 4, "stream_scale": 1}),
    ("tied", "Llama", {"tie_word_embeddings": True}, {"gain": 8, "class_shift": 0, "stream_scale": 1}),
    ("no cap on logits", "Gemma 2", {"final_logit_softcapping": None}, {"class_shift": 4}),
    ("renormalised scores", "Qwen 3 mixture", {"num_experts_per_tok": 1}, {"frozen": 12, "shift": 0}),
    ("scores as they are", "Qwen 3 mixture", {"num_experts_per_tok": 1, "norm_topk_prob": False}, {"shift": 4}),
    ("auxiliary loss", "Mixtral, one active expert", {"output_router_logits": True}, {"frozen": 0, "shift": 4}),
]


@pytest.mark.parametrize(("family", "change", "expected"), [c[1:] for c in CHANGES], ids=[c[0] for c in CHANGES])
def test_a_changed_config_changes_the_laws(family: str, change: dict[str, Any], expected: dict[str, int]) -> None:
    one = named(family)
    laws = checked(one, one.build(**change))
    assert {law: numbers(laws, law) for law in expected} == expected


def test_a_frozen_matrix_takes_its_laws_with_it() -> None:
    family = named("Llama")
    model = family.build()
    whole = checked(family, model)
    model.get_parameter("model.layers.0.self_attn.k_proj.weight").requires_grad_(False)
    laws = checked(family, model)
    lost = {symmetry.name for symmetry in whole} - {symmetry.name for symmetry in laws}
    assert lost == {"model.layers.0.self_attn.query_key[0]", "model.layers.0.input_layernorm.gain"}


def test_tied_tables_keep_the_scale_that_passes_into_the_final_norm() -> None:
    """The stream's scale against the gain of the norm in front of the head, which is the embedding again."""
    family = named("Llama, tied")
    model = family.build()
    value = next(v for n, v in checked(family, model).values().items() if n.endswith("stream_scale"))
    p = {name: parameter.detach() for name, parameter in model.named_parameters()}
    writers = [n for n in p if n.endswith(("embed_tokens.weight", "o_proj.weight", "down_proj.weight"))]
    expected = sum(p[n].square().sum() for n in writers) - p["model.norm.weight"].square().sum()
    assert torch.allclose(value, torch.as_tensor(expected))


def test_gains_that_act_as_one_plus_gamma_are_conserved_as_such() -> None:
    family = named("Gemma 3")
    model = family.build()
    laws = checked(family, model)
    p = {name: parameter.detach() for name, parameter in model.named_parameters()}
    gain = 1 + p["model.norm.weight"]
    expected = gain.square() - p["lm_head.weight"].square().sum(0)
    assert torch.allclose(laws.values()["model.norm.gain"], expected)
    attention = "model.layers.0.self_attn"
    planes = [(1 + p[f"{attention}.{n}_norm.weight"]).square().sum() for n in "qk"]
    assert torch.allclose(laws.values()[f"{attention}.query_key_gain"].abs(), (planes[0] - planes[1]).abs()[None])
    assert "(1 + " in laws["model.norm.gain"].formula


def test_fused_and_transposed_projections_are_cut_where_the_heads_are() -> None:
    """GPT-2's law of one head, sliced by hand from a matrix stored (in, out)."""
    family = named("GPT-2")
    model = family.build()
    values = checked(family, model).values()
    p = {name: parameter.detach() for name, parameter in model.named_parameters()}
    weight, bias = p["transformer.h.0.attn.c_attn.weight"], p["transformer.h.0.attn.c_attn.bias"]
    for head in (0, 1):
        q, k, v = (
            torch.cat((weight[:, start : start + 2].T, bias[start : start + 2, None]), 1)
            for start in (2 * head, 4 + 2 * head, 8 + 2 * head)
        )
        out = p["transformer.h.0.attn.c_proj.weight"][2 * head : 2 * head + 2]
        assert torch.allclose(values[f"transformer.h.0.attn.query_key[{head}]"], q @ q.T - k @ k.T)
        assert torch.allclose(values[f"transformer.h.0.attn.value_output[{head}]"], v @ v.T - out @ out.T)


DROPOUT = [
    ("GPT-2", {"resid_pdrop": 0.1}, "centre"),
    ("GPT-NeoX", {"hidden_dropout": 0.1}, "bias_shift"),
    ("BERT", {"hidden_dropout_prob": 0.1}, "centre"),
    ("ViT", {"hidden_dropout_prob": 0.1}, "centre"),
]


@pytest.mark.parametrize(("family", "change", "law"), DROPOUT, ids=[case[0] for case in DROPOUT])
def test_dropout_takes_the_laws_it_breaks_and_no_others(family: str, change: dict[str, Any], law: str) -> None:
    """Whatever is claimed holds for the masks of one pass, which are the same in the pass and its backward."""
    one = named(family)
    whole = numbers(one.laws(one.build().train()), law)
    model = one.build(**change).train()
    laws = checked(one, model)
    assert numbers(laws, law) < whole
    assert numbers(laws, "query_key") > 0


def own_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any) -> Any:
    return (query + key).transpose(1, 2), None


def lookalikes() -> dict[str, Callable[[], nn.Module]]:
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm

    class Averaging(LlamaRMSNorm):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor) -> Tensor:
            return super().forward(hidden_states) + hidden_states.mean(-1, keepdim=True)

    class Doubled(LlamaMLP):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.up_proj(x).sum()

    class Shortcut(LlamaDecoderLayer):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, **more: Any) -> Tensor:
            return super().forward(hidden_states, **more) + 0.1 * hidden_states.tanh()

    class Sinking(LlamaAttention):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, **more: Any) -> Any:
            result, weights = super().forward(hidden_states, **more)
            return result + self.k_proj(hidden_states).sum(-1, keepdim=True), weights

    class Scaled(GPT2Block):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, *rest: Any, **more: Any) -> Tensor:
            return super().forward(hidden_states, *rest, **more) * hidden_states.sigmoid()

    def swapped(family: str, path: str, cls: type[nn.Module]) -> Callable[[], nn.Module]:
        def build() -> nn.Module:
            model = named(family).build()
            model.get_submodule(path).__class__ = cls
            return model

        return build

    layer = "model.layers.0"
    return {
        "norm": swapped("Llama", f"{layer}.input_layernorm", Averaging),
        "final norm": swapped("Llama", "model.norm", Averaging),
        "network": swapped("Llama", f"{layer}.mlp", Doubled),
        "layer": swapped("Llama", layer, Shortcut),
        "attention": swapped("Llama", f"{layer}.self_attn", Sinking),
        "transposed layer": swapped("GPT-2", "transformer.h.0", Scaled),
    }


@pytest.mark.parametrize("name", ["norm", "final norm", "network", "layer", "attention", "transposed layer"])
def test_nothing_false_is_claimed_about_lookalikes(name: str) -> None:
    family = named("GPT-2" if name == "transposed layer" else "Llama")
    model = lookalikes()[name]()
    plain = family.laws(family.build())
    assert checked(family, model).numbers < plain.numbers


class Seeing(nn.Module):
    """A model that puts a trained picture in front of its tokens, as those of text and images do."""

    def __init__(self, family: Family) -> None:
        super().__init__()
        self.language = family.build()
        self.picture = nn.Parameter(torch.randn(1, 2, 4, dtype=torch.float64))

    def forward(self, x: Any) -> Any:
        tokens = self.language.get_input_embeddings()(x)  # type: ignore[operator]
        return self.language(inputs_embeds=torch.cat((self.picture.expand(len(x), -1, -1), tokens), 1))


@pytest.mark.parametrize(
    ("family", "law"),
    [
        ("Llama", "stream_scale"),
        ("GPT-2", "positions"),
    ],
)
def test_a_model_that_is_fed_vectors_has_the_laws_that_the_vectors_leave(family: str, law: str) -> None:
    options: dict[str, Any] = {"max_position_embeddings": 6} if family != "GPT-2" else {"n_positions": 6}
    one = named(family)
    changed = replace(one, options={k: v for k, v in one.options.items() if k != "type_vocab_size"} | options)
    model = Seeing(changed)
    laws = checked(changed, model)
    touched = {name for symmetry in laws if symmetry.family == law for name in symmetry.parameters}
    # The picture takes part in a scale of the stream; the positions it stands at no longer stand against tokens alone.
    assert "picture" in touched or law != "stream_scale"


def test_an_attention_function_of_the_users_own_is_not_taken_for_softmax() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register("mine", own_attention)
    family = named("Llama")
    model = family.build()
    model.config._attn_implementation = "mine"  # type: ignore[union-attr]
    laws = checked(family, model)
    assert numbers(laws, "value_output") == 0


def test_a_model_that_changed_since_does_not_pass_verify() -> None:
    """If the model does something else with the weights than when its laws were read, one backward pass shows it."""
    family = named("Llama")
    model = family.build(dtype=torch.float32)
    laws = family.laws(model)
    model.get_submodule("model.layers.0.self_attn.k_proj").register_forward_hook(lambda m, i, o: o + o.square())
    verdict = laws.verify(lambda: family.objective(model))
    broken = [name for name, part in verdict.parts.items() if not part.holds]
    assert broken == ["model.layers.0.self_attn.query_key[0]"]
    assert len(verdict.parts) == len(laws)
    assert not any(symmetry.name == broken[0] for symmetry in family.laws(model))


def test_laws_up_to_epsilon_are_not_refuted_by_epsilon() -> None:
    """Weights so small that the ε of a norm is seen: nothing is wrong with the match, and nothing is sure."""
    family = named("Qwen 3")
    model = generic(family.build(dtype=torch.float32), size=0.1, epsilon=1e-6)
    verdict = family.laws(model).verify(lambda: family.objective(model))
    assert verdict == Verdict.INCONCLUSIVE
    unsure = {name for name, part in verdict.parts.items() if not part.holds}
    assert unsure
    assert all(family.laws(model)[name].epsilon == 1e-6 for name in unsure)
    smaller = generic(family.build(dtype=torch.float32), size=0.1, epsilon=1e-12)
    assert family.laws(smaller).verify(lambda: family.objective(smaller)).holds
