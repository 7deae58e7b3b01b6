"""Verdicts that must not depend on the size of the loss, of ε or of a factor that starts at zero."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved import Status, audit, gauge, recognize
from conserved.blocks import DecoderLM

peft = pytest.importorskip("peft", reason="the extra hf is not installed")
transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")

TOKENS = torch.randint(1, 64, (2, 17), generator=torch.Generator().manual_seed(0))


def decoder(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return DecoderLM(vocab=64, dim=32, depth=2, heads=4, hidden=48, kv_heads=2).to(dtype)


def loss_of(model: nn.Module, factor: float = 1.0) -> Tensor:
    return factor * F.cross_entropy(model(TOKENS[:, :-1]).flatten(0, 1), TOKENS[:, 1:].flatten())


def statuses(model: nn.Module, loss: Callable[[], Tensor]) -> tuple[Status, Status]:
    """What an audit and a verification say of the same backward pass."""
    model.zero_grad()
    loss().backward()
    laws = recognize(model, loss="cross_entropy")
    return audit(model, laws).verdict.status, laws.verify(loss).status


@pytest.mark.parametrize(
    ("factor", "dtype"),
    [
        *((factor, torch.float32) for factor in (1e-30, 1e-24, 1e-12, 1e12, 1e20, 1e30)),
        (1e20, torch.bfloat16),
        *((factor, torch.float64) for factor in (1e-200, 1e200)),
    ],
    ids=str,
)
def test_the_size_of_the_loss_does_not_matter(factor: float, dtype: torch.dtype) -> None:
    model = decoder(dtype)
    assert statuses(model, lambda: loss_of(model, factor)) == (Status.VERIFIED, Status.VERIFIED)
    result = audit(model, loss="cross_entropy")
    assert not result.findings
    assert all(row.checked for row in result.rows)
    with gauge(model) as keys:
        loss_of(model, factor).backward()
    assert keys.ok


@pytest.mark.parametrize("factor", [1e-30, 1e-24, 1e20, 1e30], ids=str)
def test_a_wrong_gradient_is_seen_whatever_the_size_of_the_loss(factor: float) -> None:
    model = decoder()
    loss_of(model, factor).backward()
    model.get_parameter("layers.0.attention.v.weight").grad.mul_(1.1)  # type: ignore[union-attr]
    result = audit(model, loss="cross_entropy")
    assert {row.family for row in result.failures} >= {"value_output"}
    usual = decoder()
    loss_of(usual).backward()
    usual.get_parameter("layers.0.attention.v.weight").grad.mul_(1.1)  # type: ignore[union-attr]
    expected = {row.name: row.residual for row in audit(usual, loss="cross_entropy").failures}
    assert {row.name: row.residual for row in result.failures} == pytest.approx(expected, rel=1e-3)


def test_a_gradient_that_is_truly_infinite_or_zero_is_still_said_to_be() -> None:
    model = decoder()
    loss_of(model, 1e20).backward()
    weight = model.get_parameter("layers.0.attention.v.weight")
    assert weight.grad is not None
    weight.grad[0, 0] = float("inf")
    result = audit(model)
    assert [(item.parameter, item.trouble) for item in result.findings] == [(
        "layers.0.attention.v.weight", "not finite",
    )]  # fmt: skip
    weight.grad.zero_()
    assert [item.trouble for item in audit(model).findings] == ["zero"]


def test_a_scaled_loss_that_overflows_float16_refutes_no_identity() -> None:
    model = decoder()
    with torch.autocast("cpu", torch.float16):
        logits = model(TOKENS[:, :-1])
    (2.0**24 * F.cross_entropy(logits.flatten(0, 1).float(), TOKENS[:, 1:].flatten())).backward()
    result = audit(model, loss="cross_entropy", precision=torch.float16)
    assert any(item.trouble == "not finite" for item in result.findings)
    assert result.verdict.status is Status.INCONCLUSIVE
    assert "a scaler skips the step" in result.verdict.message
    assert result.failures == ()
    assert not result.ok
    # In float32 nothing skips the step.
    assert audit(model, loss="cross_entropy", precision=torch.float32).verdict.status is Status.REFUTED


def low_rank(*, rank: int = 4) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, pad_token_id=0
    )
    lora = peft.LoraConfig(r=rank, target_modules=["q_proj", "v_proj"])
    result: nn.Module = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)
    return result


def test_fresh_low_rank_factors_are_tested_though_one_of_them_is_zero() -> None:
    model = low_rank()
    assert statuses(model, lambda: model(input_ids=TOKENS, labels=TOKENS).loss) == (Status.VERIFIED, Status.VERIFIED)
    result = audit(model)
    assert all(row.checked for row in result.rows)
    for name, parameter in model.named_parameters():
        if "q_proj.lora_A" in name and parameter.grad is not None:
            parameter.grad.add_(1e-6 * torch.randn_like(parameter))
    assert [row.residual for row in audit(model).failures] == [pytest.approx(1.0, abs=0.5)]


def test_an_identity_between_parameters_that_are_all_zero_says_nothing() -> None:
    model = low_rank()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                parameter.zero_()
    open_ = (Status.INCONCLUSIVE, Status.INCONCLUSIVE)
    assert statuses(model, lambda: model(input_ids=TOKENS, labels=TOKENS).loss) == open_


@pytest.mark.parametrize("family", ["Gemma2", "Gemma3Text"])
def test_a_fresh_gemma_with_right_gradients_is_not_refuted(family: str) -> None:
    """Its output norms read a mean square of ε: how much of the law ε leaves, weights and gradients do not say."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config)
    result = statuses(model, lambda: model(input_ids=TOKENS, labels=TOKENS).loss)
    assert result == (Status.INCONCLUSIVE, Status.INCONCLUSIVE)
    audited = audit(model, loss="cross_entropy")
    assert max(row.residual for row in audited.left_open) > 0.1
    assert {row.family for row in audited.left_open} <= {"forgotten_scale", "query_scale", "key_scale", "stream_scale"}
