"""LoRA of PEFT on top of models that are recognised: what the adapters conserve, and what is left of the base."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch import nn

from conserved import LawSet, Verdict, discover
from hf_zoo import Computing, generic, named
from test_recognize_blocks import gradients

HOLDS = 1e-11
FAMILY = named("Llama")


def adapted(family: str = "Llama", **options: Any) -> nn.Module:
    """A tiny model with adapters on queries and values, everything at random values."""
    settings = {"r": 2, "target_modules": ["q_proj", "v_proj"]} | options
    model = peft.get_peft_model(named(family).build(), peft.LoraConfig(**settings))
    return generic(model.double())


def checked(model: nn.Module) -> LawSet:
    """The laws of a model, after making sure that each of them holds."""
    laws = FAMILY.laws(model)
    FAMILY.objective(model).backward()
    wrong = {name: r for name, r in laws.residuals(gradients(model)).items() if not r <= HOLDS}
    assert wrong == {}
    return laws


def families(laws: LawSet) -> dict[str, int]:
    result: dict[str, int] = {}
    for symmetry in laws:
        result[symmetry.family] = result.get(symmetry.family, 0) + symmetry.numbers
    return result


def test_with_a_frozen_base_only_the_factors_are_left() -> None:
    model = adapted()
    laws = checked(model)
    assert laws.numbers == 6
    attention = "base_model.model.model.layers.0.self_attn"
    factors = {name: p.detach() for name, p in model.named_parameters() if "lora" in name}
    into, out = (factors[f"{attention}.q_proj.lora_{x}.default.weight"] for x in "AB")
    (value,) = (value for name, value in laws.values().items() if name.startswith(f"{attention}.q_proj."))
    assert torch.allclose(value, into @ into.T - out.T @ out)


def test_the_lie_closure_has_no_other_laws() -> None:
    discovery = discover(Computing(adapted()), FAMILY.sample, loss=FAMILY.loss, forms=False)
    assert discovery.verdict == Verdict.VERIFIED
    assert discovery.count == 6


def test_with_a_trained_base_its_laws_hold_with_the_factors_as_further_legs() -> None:
    model = adapted()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    laws = checked(model)
    base = FAMILY.laws(FAMILY.build())
    assert laws.numbers == base.numbers + 6
    (scores,) = (law for law in laws if any("k_proj" in name for name in law.parameters) and len(law.legs) < 5)
    legs = [leg.view.parameter for leg in scores.legs]
    assert any("q_proj.lora_B" in name for name in legs)
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
    base = named("GPT-2").laws(named("GPT-2").build())
    # Those of the base, with the factors as further legs, and three of the factors.
    assert checked(model).independent() == base.independent() + 3


def test_adapters_on_embeddings() -> None:
    laws = checked(adapted(target_modules=["embed_tokens", "q_proj"]))
    assert laws.numbers == 6
    assert any(symmetry.block.startswith("base_model.model.model.embed_tokens") for symmetry in laws)


def test_what_is_claimed_of_dora_holds() -> None:
    """Its weights are divided by their length, which is not followed by gradients: whatever is listed holds."""
    model = adapted(use_dora=True)
    assert checked(model).numbers >= 6
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    model.zero_grad()
    checked(model)


@pytest.mark.parametrize("state", ["merged", "disabled"])
def test_adapters_that_take_no_part_have_no_law(state: str) -> None:
    model = adapted()
    if state == "merged":
        model.merge_adapter()  # type: ignore[operator]
    else:
        model.base_model.disable_adapter_layers()  # type: ignore[operator, union-attr]
    laws = FAMILY.laws(model)
    assert all(symmetry.inert for symmetry in laws)
    assert {symmetry.family for symmetry in laws} <= {"unused"}


def test_only_the_active_adapter_speaks() -> None:
    model = adapted()
    model.add_adapter("second", peft.LoraConfig(r=1, target_modules=["q_proj"]))  # type: ignore[operator]
    model = generic(model.double())
    for active in ("default", "second"):
        model.set_adapter(active)  # type: ignore[operator]
        moved = {name.split(".")[-2] for law in checked(model) if not law.inert for name in law.parameters}
        assert moved == {active}


def test_a_factor_that_starts_at_zero_is_verified() -> None:
    """PEFT starts with B = 0: the model is its base, and the identities hold all the same."""
    model = peft.get_peft_model(FAMILY.build(dtype=torch.float32), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    verdict = FAMILY.laws(model).verify(lambda: FAMILY.objective(model))
    assert verdict.holds, verdict
