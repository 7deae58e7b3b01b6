"""The softmax gauge: for every head and sequence the gradients of the keys add up to zero, whatever attends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from conserved import Verdict, blocks, gauge
from conserved.auditing import Gauge
from hf_zoo import named

LLAMA = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
}


def llama(implementation: str) -> Any:
    config = transformers.LlamaConfig(**LLAMA, attn_implementation=implementation)
    return transformers.LlamaForCausalLM(config)


def tokens(batch: int = 3, length: int = 10, vocab: int = 32) -> Tensor:
    return torch.randint(vocab, (batch, length))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_transformers_are_watched_in_every_implementation(implementation: str) -> None:
    model = llama(implementation)
    mask = torch.ones(3, 10, dtype=torch.long)
    mask[0, :4] = 0
    with gauge(model) as g:
        model(tokens(), attention_mask=mask).logits.sin().mean().backward()
    assert g.ok
    assert sorted({row.name for row in g.rows}) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert len(g.rows) == 4
    assert 0 < g.worst < 1e-5


def test_keys_are_seen_after_rotary_positions_and_with_one_head_per_group() -> None:
    seen: list[Tensor] = []
    model = blocks.Attention(8, 4, kv_heads=2, rotary=True)
    handle = model.keys.register_forward_hook(lambda module, args, k: seen.append(k))
    with gauge(model) as g:
        model(torch.randn(2, 6, 8)).sin().sum().backward()
    handle.remove()
    assert seen[0].shape == (2, 2, 6, 2)
    assert {row.head for row in g.rows} == {0, 1}


class Calling(nn.Module):
    """Attention that calls torch's function itself."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).movedim(-3, 0).transpose(-2, -3).unbind()
        return F.scaled_dot_product_attention(q, k, v, **self.options)


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"attn_mask": torch.randn(6, 6)}, {"dropout_p": 0.5}],
    ids=["plain", "causal", "bias", "dropout"],
)
def test_any_mask_bias_and_dropout_keep_the_identity(options: dict[str, Any]) -> None:
    model = Calling(**options)
    with gauge(model) as g:
        model(torch.randn(2, 6, 8)).sin().sum().backward()
    assert g.ok
    assert len(g.rows) == 2


def test_torch_multihead_attention_is_watched() -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 5, 8)
    with gauge(model) as g:
        model(x, x, x, need_weights=False)[0].sin().sum().backward()
    assert g.ok
    assert len(g.rows) == 2


def test_a_wrong_key_gradient_is_refuted_with_its_head_and_sequence() -> None:
    model = blocks.Attention(8, 2)

    def spoil(module: nn.Module, args: Any, k: Tensor) -> Tensor:
        out = k.view_as(k)
        out.register_hook(lambda grad: grad + torch.zeros_like(grad).index_fill_(0, torch.tensor(2), 0.1) * mask)
        return out

    mask = torch.zeros(4, 2, 6, 4)
    mask[2, 1, 0] = 1
    with gauge(model) as g:
        # The gauge watches what leaves the hooks before it, so the defect goes behind.
        model.keys.register_forward_hook(spoil)
        model(torch.randn(4, 6, 8)).sin().mean().backward()
    assert not g.ok
    assert g.verdict == Verdict.REFUTED
    assert (g.rows[0].head, g.rows[0].sequence) == (1, 2)
    assert "softmax derivative" in g.summary()
    assert g.record()["ok"] is False


def test_capped_scores_and_sinks_are_left_out_and_said_so() -> None:
    model = named("Gemma 2").build(dtype=torch.float32)
    with gauge(model) as g:
        model(tokens(1, 4, 5)).logits.sin().sum().backward()
    assert g.verdict == Verdict.INCONCLUSIVE
    assert set(g.excluded.values()) == {"its scores are capped"}
    assert "left out" in g.summary()


@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
def test_checkpointed_layers_are_watched(reentrant: bool) -> None:
    model = blocks.Attention(8, 2, rotary=True)
    x = torch.randn(2, 6, 8, requires_grad=True)
    with gauge(model) as g:
        checkpoint(model, x, use_reentrant=reentrant).sin().sum().backward()
    assert g.ok
    assert len(g.rows) == 2


def test_two_calls_of_one_layer_are_two_rows_each_of_which_holds() -> None:
    model = blocks.Attention(8, 1)
    with gauge(model) as g:
        model(model(torch.randn(5, 8))).sin().sum().backward()
    assert g.ok
    assert sorted(row.call for row in g.rows) == [0, 1]


def test_everything_is_undone_afterwards_also_after_an_error() -> None:
    before, interface = F.scaled_dot_product_attention, transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    method = type(interface).get_interface
    model = blocks.Attention(8, 2)

    class Stop(Exception):
        pass

    with pytest.raises(Stop), gauge(model):
        raise Stop
    assert F.scaled_dot_product_attention is before
    assert type(interface).get_interface is method
    assert not model.keys._forward_hooks


def test_gradients_are_what_they_are_without_the_gauge() -> None:
    model = blocks.Attention(8, 2, rotary=True)
    x = torch.randn(5, 8)
    model(x).sin().sum().backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with gauge(model):
        model(x).sin().sum().backward()
    assert all(torch.equal(p.grad, before[name]) for name, p in model.named_parameters() if p.grad is not None)


def test_a_forward_pass_outside_is_said_to_have_been_missed() -> None:
    model = blocks.Attention(8, 2)
    loss = model(torch.randn(5, 8)).sum()
    with pytest.raises(ValueError, match="Run the forward pass inside"), gauge(model):
        loss.backward()


def test_without_a_backward_pass_nothing_is_said() -> None:
    model = blocks.Attention(8, 2)
    with gauge(model) as g:
        model(torch.randn(5, 8))
    assert g.verdict == Verdict.INCONCLUSIVE


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spoiled", [torch.inf, torch.nan])
def test_a_head_that_is_not_finite_does_not_hide_another_that_is_wrong(dtype: torch.dtype, spoiled: float) -> None:
    keys = torch.randn(2, 3, 6, 4).to(dtype).requires_grad_()
    grad = torch.randn(2, 3, 6, 4).to(dtype)
    grad[:, 2] -= grad[:, 2].mean(-2, keepdim=True)
    grad[0, 0, 1, 1] = spoiled
    result = Gauge()
    (result.see("attention", keys, "") * grad).sum().backward()
    assert {row.head: row.ok for row in result.rows} == {0: False, 1: False, 2: True}
    assert not result.ok
