"""Embeddings whose gradient leaves something out: a padding row, renormalised rows, gradients scaled by frequency."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved import Status, audit, recognize

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")

WITH_PADDING = torch.tensor([[5, 3, 1, 0, 7, 1], [2, 2, 6, 1, 0, 4]])
"""Rows 0 and 1 are padding in BERT and OPT, and occur."""

SIZES: dict[str, dict[str, Any]] = {
    "Bert": {"intermediate_size": 24, "pad_token_id": 0},
    "OPT": {"ffn_dim": 24, "pad_token_id": 1, "word_embed_proj_dim": 16},
    "Phi3": {"intermediate_size": 24, "pad_token_id": 0, "num_key_value_heads": 2},
}


def model_of(family: str, perturbed: float) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=12,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=False,
        **SIZES[family],
    )
    head = {"Bert": "BertForMaskedLM"}.get(family, f"{family}ForCausalLM")
    model: nn.Module = getattr(transformers, head)(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(perturbed * torch.randn_like(parameter))
    return model


def loss_of(model: nn.Module) -> Tensor:
    logits = model(input_ids=WITH_PADDING).logits
    return F.cross_entropy(logits.flatten(0, 1), WITH_PADDING.roll(1, 1).flatten())


@pytest.mark.parametrize("family", SIZES)
def test_a_padding_row_that_is_not_zero_and_occurs_refutes_nothing(family: str) -> None:
    model = model_of(family, 0.3)
    laws = recognize(model, loss="cross_entropy")
    assert laws.numbers < recognize(model_of(family, 0.0), loss="cross_entropy").numbers
    assert laws.verify(lambda: loss_of(model)).status is not Status.REFUTED
    loss_of(model).backward()
    result = audit(model, laws)
    assert result.failures == ()


@pytest.mark.parametrize("family", SIZES)
def test_laws_kept_from_when_the_row_was_zero_are_let_go_by_an_audit(family: str) -> None:
    model = model_of(family, 0.0)
    laws = recognize(model, loss="cross_entropy")
    fresh = {item.name for item in laws.dropped}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    loss_of(model).backward()
    result = audit(model, laws)
    assert result.failures == ()
    assert {item.name for item in result.dropped} > fresh


class Looked(nn.Module):
    """A table, a linear map, and nothing in between: a general linear group acts on both."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.Sequential(nn.Embedding(7, 4, **options), nn.Linear(4, 3, bias=False))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({}, 10),
        ({"sparse": True}, 10),
        ({"padding_idx": 2}, 14),  # the row of padding is still
        ({"max_norm": 1.0}, 0),
        ({"scale_grad_by_freq": True}, 0),
    ],
    ids=str,
)
def test_only_tables_with_the_gradient_of_the_loss_keep_their_laws(options: dict[str, Any], numbers: int) -> None:
    torch.manual_seed(0)
    model = Looked(**options).double()
    laws = recognize(model)
    assert laws.numbers == numbers
    tokens = torch.tensor([[2, 2, 5, 6], [0, 2, 2, 1]])
    model(tokens).square().mean().backward()
    result = audit(model)
    assert result.failures == ()
    assert result.ok == (numbers > 0)


def test_a_table_whose_padding_row_was_written_to_loses_its_law() -> None:
    model = Looked(padding_idx=2).double()
    laws = recognize(model)
    with torch.no_grad():
        model.get_parameter("table.0.weight")[2] = 1.0
    assert laws.numbers > recognize(model).numbers == 4
