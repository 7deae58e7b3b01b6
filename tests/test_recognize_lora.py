"""LoRA of PEFT on top of models that are recognised: what the adapters conserve, and what is left of the base."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch import nn

from conserved import LawSet, Verdict, discover, recognize
from hf_zoo import Computing, generic, named
from test_recognize_blocks import gradients
from test_unusual_models import reasons

HOLDS = 1e-11
FAMILY = named("Llama")


def adapted(family: str = "Llama", **options: Any) -> nn.Module:
    """A tiny model with adapters on queries and values, everything at random values."""
    settings = {"r": 2, "target_modules": ["q_proj", "v_proj"]} | options
    model = peft.get_peft_model(named(family).build(), peft.LoraConfig(**settings))
    return generic(model.double())


def checked(model: nn.Module) -> LawSet:
    """The laws of a model, after making sure that each of them holds."""
    laws = recognize(model, loss="cross_entropy")
    FAMILY.objective(model).backward()
    wrong = {name: r for name, r in laws.residuals(gradients(model)).items() if not r <= HOLDS}
    assert wrong == {}
    return laws


def families(laws: LawSet) -> dict[str, int]:
    found: dict[str, int] = {}
    for symmetry in laws:
        found[symmetry.family] = found.get(symmetry.family, 0) + symmetry.numbers
    return found


def test_with_a_frozen_base_only_the_factors_are_left() -> None:
    model = adapted()
    laws = checked(model)
    assert families(laws) == {"low_rank": 6}
    attention = "base_model.model.model.layers.0.self_attn"
    factors = {name: p.detach() for name, p in model.named_parameters() if "lora" in name}
    into, out = (factors[f"{attention}.q_proj.lora_{x}.default.weight"] for x in "AB")
    assert torch.allclose(laws.values()[f"{attention}.q_proj.low_rank[default]"], into @ into.T - out.T @ out)
    assert "is frozen" in reasons(laws)[f"{attention}.query_key[0]"]
    assert laws.unclaimed == ()


def test_the_lie_closure_has_no_other_laws() -> None:
    found = discover(Computing(adapted()), FAMILY.sample, loss=FAMILY.loss, forms=False)
    assert found.verdict == Verdict.VERIFIED
    assert found.count == 6


def test_with_a_trained_base_its_laws_hold_with_the_factors_as_further_legs() -> None:
    model = adapted()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    laws = checked(model)
    assert families(laws) == families(FAMILY.laws(FAMILY.build())) | {"low_rank": 6}
    legs = [leg.view.parameter for leg in laws["base_model.model.model.layers.0.self_attn.query_key[0]"].legs]
    assert sum("q_proj.lora_B" in name for name in legs) == 2
    assert not any("lora_A" in name for name in legs)
    readers = laws["base_model.model.model.layers.0.input_layernorm.gain"].legs
    assert sum("lora_A" in leg.view.parameter for leg in readers) == 2


def test_adapters_on_transposed_maps() -> None:
    model = peft.get_peft_model(
        named("GPT-2").build(), peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    )
    model = generic(model.double())
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    assert families(checked(model))["query_key"] == 6


def test_adapters_on_embeddings() -> None:
    laws = checked(adapted(target_modules=["embed_tokens", "q_proj"]))
    assert families(laws) == {"low_rank": 6}
    assert "base_model.model.model.embed_tokens.low_rank[default]" in {symmetry.name for symmetry in laws}


def test_the_factors_of_dora_keep_their_law_and_its_magnitudes_are_unclaimed() -> None:
    model = adapted(use_dora=True)
    laws = checked(model)
    assert families(laws) == {"low_rank": 6}
    trained = [name for name in laws.unclaimed if model.get_parameter(name).requires_grad]
    assert len(trained) == 2
    assert all("lora_magnitude_vector" in name for name in trained)


def test_a_trained_base_under_dora_is_not_taken_for_a_linear_map() -> None:
    model = adapted(use_dora=True)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    laws = recognize(model)
    assert "not linear in its weights" in reasons(laws)["base_model.model.model.layers.0.self_attn"]
    FAMILY.objective(model).backward()
    assert all(r <= HOLDS for r in laws.residuals(gradients(model)).values())


@pytest.mark.parametrize("state", ["merged", "disabled"])
def test_adapters_that_take_no_part_have_no_law(state: str) -> None:
    model = adapted()
    if state == "merged":
        model.merge_adapter()  # type: ignore[operator]
    else:
        model.base_model.disable_adapter_layers()  # type: ignore[operator, union-attr]
    laws = recognize(model)
    assert len(laws) == 0
    assert any("merged or disabled" in dropped.reason for dropped in laws.dropped)


def test_only_the_active_adapter_speaks() -> None:
    model = adapted()
    model.add_adapter("second", peft.LoraConfig(r=1, target_modules=["q_proj"]))  # type: ignore[operator]
    model = generic(model.double())
    assert {symmetry.part for symmetry in checked(model)} == {"default"}
    model.set_adapter("second")  # type: ignore[operator]
    assert {symmetry.part for symmetry in checked(model)} == {"second"}


def test_a_factor_that_starts_at_zero_is_verified() -> None:
    """PEFT starts with B = 0: the model is its base, and the identities hold all the same."""
    model = peft.get_peft_model(FAMILY.build(dtype=torch.float32), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    verdict = recognize(model).verify(lambda: FAMILY.objective(model))
    assert verdict.holds, verdict
