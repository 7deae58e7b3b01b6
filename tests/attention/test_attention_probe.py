"""The probe hears the queries and keys that each family's attention really uses, and leaves the model as it was."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from conserved import blocks
from conserved.attention import NoAttentionError, energy_field, low_rank, low_rank_table, probe
from conserved.attention.low_rank_heads import directions_needed, truncation_errors
from conserved.attention.probing import gaussian_keys, shape_of, shuffled_keys
from conserved.attention.queries_and_keys import Capture, listening
from conserved.auditing.attention_keys import keys_seen
from hf_zoo import FAMILIES, Family, ids, named
from test_transformers_in_use import SENTENCES, minilm  # noqa: F401
from timm_like import VisionTransformer
from tolerances import AGREE
from torch_zoo import Attending, Crossing


def inputs(family: Family) -> dict[str, Any]:
    x = family.sample(torch.Generator().manual_seed(0))
    if isinstance(x, dict):
        return x
    return {"pixel_values": x.float()} if x.is_floating_point() else {"input_ids": x}


def heard(model: nn.Module, *args: Any, **kwargs: Any) -> list[Capture]:
    result: list[Capture] = []
    with torch.no_grad(), listening(model, result.append):
        model(*args, **kwargs)
    return result


def weights_entropy(weights: Tensor) -> Tensor:
    return torch.special.entr(weights.double()).sum(-1).mean(-1)


class TestTransformers:
    @pytest.mark.parametrize("family", FAMILIES, ids=ids)
    def test_entropy_is_that_of_the_models_own_weights(self, family: Family) -> None:
        """Any mistake in queries, keys, mask, scale, rotary positions or softcap would show."""
        model = family.build(dtype=torch.float32)
        given = inputs(family)
        with torch.no_grad():
            attentions = model(**given, output_attentions=True).attentions
        result = probe(model, **given, baselines=False)
        assert result.verdict.holds, result.verdict
        assert not result.skipped
        expected = torch.cat([weights_entropy(weights).mean(0) for weights in attentions])
        assert len(result.rows) == len(expected)
        for row, entropy in zip(result.rows, expected.tolist(), strict=True):
            assert row.entropy == pytest.approx(entropy, abs=2e-5)

    @pytest.mark.parametrize("name", ["Llama", "Qwen 3", "GPT-2", "BERT", "ViT", "Mixtral", "DeepSeek-V3"])
    def test_the_fused_backend_stays_and_shows_the_same(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        family = named(name)
        model = family.build(dtype=torch.float32)
        given = inputs(family)
        eager = probe(model, **given, baselines=False)
        model.set_attn_implementation("sdpa")  # type: ignore[operator]
        calls: list[int] = []
        original = F.scaled_dot_product_attention

        def counted(*args: Any, **kwargs: Any) -> Tensor:
            calls.append(1)
            return original(*args, **kwargs)

        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
        fused = probe(model, **given, baselines=False)
        assert calls, "the fused kernel must run"
        assert getattr(model.config, "_attn_implementation", None) == "sdpa"
        for one, other in zip(fused.rows, eager.rows, strict=True):
            assert one.entropy == pytest.approx(other.entropy, abs=1e-5)
            assert one.participation == pytest.approx(other.participation, rel=1e-4, nan_ok=True)

    def test_padding_on_either_side_is_left_out(self) -> None:
        model = named("Llama").build(dtype=torch.float32, max_position_embeddings=32)
        model.set_attn_implementation("sdpa")  # type: ignore[operator]
        tokens = torch.randint(1, 5, (1, 9))
        alone = probe(model, input_ids=tokens, baselines=False).rows
        for side in ("left", "right"):
            pads = (3, 0) if side == "left" else (0, 3)
            mask = F.pad(torch.ones_like(tokens), pads)
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            padded = probe(
                model,
                input_ids=F.pad(tokens, pads),
                attention_mask=mask,
                position_ids=positions,
                baselines=False,
            ).rows
            for one, other in zip(padded, alone, strict=True):
                assert one.length == other.length == 9
                assert one.attention == "causal"
                assert one.coherence == pytest.approx(other.coherence, rel=1e-3)
                assert one.entropy == pytest.approx(other.entropy, abs=1e-4)

    def test_sliding_windows_are_recognised(self) -> None:
        model = named("Mistral").build(dtype=torch.float32, sliding_window=4, max_position_embeddings=32)
        result = probe(model, input_ids=torch.randint(5, (1, 12)), baselines=False)
        assert {row.attention for row in result.rows} == {"causal window 4"}

    def test_softcap_changes_the_largest_logit(self) -> None:
        model = named("Gemma 2").build(dtype=torch.float32, attn_logit_softcapping=0.01)
        result = probe(model, **inputs(named("Gemma 2")), baselines=False)
        assert max(row.largest_logit for row in result.rows) <= 0.01

    def test_everything_is_restored_also_after_a_failure(self) -> None:
        interface = transformers.modeling_utils.AttentionInterface
        before = interface.get_interface
        model = named("Llama").build(dtype=torch.float32)

        class Broken(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, **given: Tensor) -> Tensor:
                self.model(**given)
                raise RuntimeError("broken on purpose")

        with pytest.raises(RuntimeError, match="on purpose"):
            probe(Broken(), **inputs(named("Llama")))
        assert interface.get_interface is before
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        x = torch.randn(1, 1, 3, 2)
        F.scaled_dot_product_attention(x, x, x)

    def test_the_models_output_does_not_change(self) -> None:
        model = named("Llama").build(dtype=torch.float32)
        given = inputs(named("Llama"))
        seen: list[Tensor] = []
        with torch.no_grad():
            expected = model(**given).logits
            model.register_forward_hook(lambda module, args, output: seen.append(output.logits))
            probe(model, **given)
        assert torch.equal(seen[0], expected)


class TestOthers:
    @pytest.mark.parametrize("options", [{}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
    def test_multihead_attention(self, options: dict[str, bool]) -> None:
        model = Attending(**options).eval()
        x = torch.randn(7, 4)
        _, weights = model.attention(x, x, x, need_weights=True, average_attn_weights=False)
        result = probe(model, x)
        assert [row.entropy for row in result.rows] == pytest.approx(weights_entropy(weights).tolist(), abs=1e-5)

    def test_multihead_attention_with_masks(self) -> None:
        module = nn.MultiheadAttention(4, 2, batch_first=True).eval()
        x = torch.randn(2, 6, 4)
        future = torch.ones(6, 6, dtype=torch.bool).triu(1)
        _, weights = module(x, x, x, attn_mask=future, need_weights=True, average_attn_weights=False)
        result = probe(module, x, x, x, attn_mask=future)
        assert {row.attention for row in result.rows} == {"causal"}
        entropy = weights_entropy(weights).mean(0)
        assert [row.entropy for row in result.rows] == pytest.approx(entropy.tolist(), abs=1e-5)
        ends = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
        result = probe(module, x, x, x, key_padding_mask=ends)
        assert {row.length for row in result.rows} == {5.0}

    def test_a_product_is_heard_while_an_audit_listens_to_another_model(self) -> None:
        class Attends(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return F.scaled_dot_product_attention(x, x, x)

        x = torch.randn(1, 2, 5, 3)
        alone = probe(Attends(), x)
        with keys_seen(nn.Linear(2, 2), lambda where, keys, visible: keys):
            beside = probe(Attends(), x)
        assert [row.entropy for row in beside.rows] == [row.entropy for row in alone.rows]

    def test_attention_across_and_in_encoder_layers(self) -> None:
        assert len(probe(Crossing().eval(), torch.randn(7, 4)).rows) == 2
        layer = nn.TransformerEncoderLayer(4, 2, 3, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        result = probe(encoder, torch.randn(2, 5, 4))
        assert [row.layer for row in result.rows] == [f"layers.{i}.self_attn" for i in (0, 0, 1, 1)]

    def test_timm_is_heard_at_the_fused_product(self) -> None:
        model = VisionTransformer(image=8, depth=2, qk_norm=True).eval()
        result = probe(model, torch.randn(3, 1, 8, 8))
        assert [row.layer for row in result.rows] == [f"blocks.{i}.attn" for i in (0, 0, 1, 1)]
        capture = heard(model, torch.randn(3, 1, 8, 8))[1]
        assert capture.scale == pytest.approx(2**-0.5), "heads of width two"
        assert torch.allclose(capture.q.square().mean(-1), torch.ones(()), atol=1e-3), "after the query norm"

    @pytest.mark.parametrize("rotary", [False, True, "half"], ids=str)
    def test_blocks(self, rotary: Any) -> None:
        module = blocks.Attention(8, 4, kv_heads=2, rotary=rotary, causal=True, qk_norm=True)
        x = torch.randn(3, 6, 8)
        (capture,) = heard(module, x)
        q, k = module.queries_and_keys(x)
        logits = capture.scale * capture.q @ capture.k.repeat_interleave(2, 1).mT
        v = module.v(x).unflatten(-1, (2, 2)).transpose(-2, -3).repeat_interleave(2, 1)
        hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
        out = module.o((logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(-2))
        torch.testing.assert_close(out, module(x))
        assert torch.equal(capture.q, q)
        assert torch.equal(capture.k, k)

    def test_a_model_without_attention_says_what_can_be_heard(self) -> None:
        with pytest.raises(NoAttentionError, match="scaled_dot_product_attention"):
            probe(nn.Linear(2, 2), torch.randn(3, 2))

    def test_a_bias_that_is_no_mask_is_named(self) -> None:
        class Biased(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return F.scaled_dot_product_attention(x, x, x, attn_mask=torch.randn(5, 5))

        result = probe(Biased(), torch.randn(1, 2, 5, 3))
        assert result.verdict.status.value == "inconclusive"
        assert "bias" in result.skipped[0][1]

    def test_masks_are_told_apart(self) -> None:
        ones = torch.ones(6, 6, dtype=torch.bool)
        assert shape_of(ones) == {"causal": False, "window": None}
        assert shape_of(ones.tril()) == {"causal": True, "window": None}
        assert shape_of(ones.tril() & ones.triu(-2)) == {"causal": True, "window": 3}
        assert shape_of(ones.tril(1) & ones.triu(-1)) == {"causal": False, "window": 2}
        strange = ones.clone()
        strange[2, 3] = False
        assert shape_of(strange) is None


class TestBaselines:
    def test_they_keep_what_they_say(self) -> None:
        k = torch.randn(2, 4000, 3, dtype=torch.float64) @ torch.randn(3, 3, dtype=torch.float64) + 2
        generator = torch.Generator().manual_seed(0)
        gaussian, shuffled = gaussian_keys(k, generator), shuffled_keys(k, generator)
        assert torch.equal(shuffled.sort(-2).values, k.sort(-2).values)
        assert not torch.equal(shuffled, k)
        for head in range(2):
            assert torch.allclose(torch.cov(gaussian[head].T), torch.cov(k[head].T), rtol=0.2, atol=0.2)

    def test_a_heavy_key_is_seen_against_both(self) -> None:
        module = blocks.Attention(16, 1)
        x = torch.randn(300, 16)
        x[10] *= 20
        (row,) = probe(module, x).rows
        assert row.coherence > 3 * row.gaussian_coherence
        assert row.participation < 0.2 * row.gaussian_participation
        assert not math.isnan(row.shuffled_participation)


class TestLowRank:
    def test_errors_are_those_of_the_best_approximation(self) -> None:
        q, k = torch.randn(30, 6, dtype=torch.float64), torch.randn(30, 6, dtype=torch.float64)
        (row,) = low_rank(q, k)
        field = q @ (k - k.mean(0)).T * 6**-0.5
        u, s, v = torch.linalg.svd(field)
        for rank, error in row.errors.items():
            approximation = u[:, :rank] * s[:rank] @ v[:rank]
            assert error == pytest.approx(float((field - approximation).norm() / field.norm()))
            assert float((field - approximation).abs().max()) <= float(s[rank]) * (1 + AGREE[torch.float64])

    def test_growth_is_that_of_each_beginning(self) -> None:
        q, k = torch.randn(4, 50, 6, dtype=torch.float64), torch.randn(2, 50, 6, dtype=torch.float64)
        rows = low_rank(q, k, lengths=[3, 10, 17])
        for head, row in enumerate(rows):
            for length, needed in row.growth.items():
                values = energy_field(q[head, :length], k[head // 2, :length]).singular_values
                assert needed == int(directions_needed(values)), length
            assert list(row.growth) == [3, 10, 17, 50]
            for rank, first in row.reaches.items():
                assert first is None or row.growth[first] >= rank

    def test_a_field_of_rank_two(self) -> None:
        q = torch.randn(40, 2, dtype=torch.float64) @ torch.randn(2, 8, dtype=torch.float64)
        (row,) = low_rank(q, torch.randn(40, 8, dtype=torch.float64), tolerance=1e-6)
        assert row.needed == 2
        assert row.errors[4] < 1e-12

    def test_zeros_need_nothing(self) -> None:
        assert truncation_errors(torch.zeros(3, dtype=torch.float64)).tolist() == [0, 0, 0, 0]
        assert int(directions_needed(torch.zeros(3, dtype=torch.float64))) == 0

    def test_of_a_model(self) -> None:
        model = named("Llama").build(dtype=torch.float32, max_position_embeddings=64)
        table = low_rank_table(model, input_ids=torch.randint(5, (2, 40)))
        assert [(row.layer, row.head) for row in table.rows] == [("model.layers.0.self_attn", i) for i in range(2)]
        assert json.dumps(table.record())


@pytest.mark.slow
def test_a_trained_model_on_real_sentences(minilm: Path) -> None:  # noqa: F811
    model = transformers.AutoModel.from_pretrained(minilm, attn_implementation="sdpa")
    tokens = transformers.AutoTokenizer.from_pretrained(minilm)(SENTENCES, padding=True, return_tensors="pt")
    result = probe(model, **tokens)
    assert len(result.rows) == 72
    assert result.verdict.holds, result.verdict
    assert all(row.sequences == len(SENTENCES) for row in result.rows)
    assert all(0 < row.participation <= 1 for row in result.rows)
    alone = transformers.AutoTokenizer.from_pretrained(minilm)(SENTENCES[0], return_tensors="pt")
    eager = transformers.AutoModel.from_pretrained(minilm, attn_implementation="eager")
    with torch.no_grad():
        weights = eager(**alone, output_attentions=True).attentions
    rows = probe(model, **alone, baselines=False).rows
    expected = torch.cat([weights_entropy(layer)[0] for layer in weights])
    assert [row.entropy for row in rows] == pytest.approx(expected.tolist(), abs=1e-4)
