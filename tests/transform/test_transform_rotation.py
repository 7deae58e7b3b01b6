"""One fingerprint and no distance for checkpoints that differ by every gauge at once, the stream rotated too."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conserved.transform import align, canonical, equalize, exchanges, fingerprint, move, symmetries_of

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "tie_word_embeddings": False,
}


class Centred(nn.Module):
    """A stream that centring norms read, so that rotations that keep (1, …, 1) are left."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.table = nn.Embedding(30, width)
        self.first, self.last = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.back, self.head = nn.Linear(width, 20), nn.Linear(20, width), nn.Linear(width, 30)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        x = x + self.back(nn.functional.gelu(self.mix(self.first(x))))
        return self.head(self.last(x))


def decoder(name: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    tokens = torch.randint(30, (2, 9))
    if name == "centred":
        model: nn.Module = Centred()
        inputs: dict[str, Any] = {"tokens": tokens}
    else:
        config = {"llama": transformers.LlamaConfig, "mistral": transformers.MistralConfig}[name]
        model = transformers.AutoModelForCausalLM.from_config(config(**SIZES, intermediate_size=24))
        inputs = {"input_ids": tokens, "use_cache": False}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.copy_(0.5 + torch.rand_like(parameter))
    return model.eval(), inputs


def in_another_gauge(model: nn.Module, inputs: dict[str, Any]) -> nn.Module:
    """Rotate the stream and the heads, exchange units and scale everything."""
    other = copy.deepcopy(model)
    laws = symmetries_of(model, **inputs)
    generator = torch.Generator().manual_seed(3)
    swaps = exchanges(model, laws=laws, **inputs)
    assert swaps
    done = equalize(other, objective="incoherent", **inputs)
    assert any("rotation" in name for name in done.moved.moved)
    inner = [s for s in swaps if len(s.legs) < 6]
    move(other, {s: s.element(generator=generator) for s in [*inner, *laws.symmetries] if s.exact})
    return other


@pytest.mark.parametrize("name", ["llama", "mistral", "centred"])
def test_every_gauge_at_once_leaves_the_fingerprint_and_is_undone_by_align(name: str) -> None:
    model, inputs = decoder(name)
    other = in_another_gauge(model, inputs)
    prints = [fingerprint(one, **inputs) for one in (model, other)]
    assert prints[0].digest == prints[1].digest
    assert prints[0].difference(prints[1]) < 1e-5
    result = align(model, other, **inputs)
    assert result.after < 1e-5 * result.before


def test_the_canonical_form_does_not_depend_on_the_rotation_of_the_stream() -> None:
    model, inputs = decoder("llama")
    model = model.double()
    other = in_another_gauge(model, inputs)
    a, b = canonical(model, **inputs), canonical(other, **inputs)
    assert max(float((a[n] - b[n]).norm() / a[n].norm()) for n in a) < 1e-6


@pytest.mark.parametrize("change", ["negated", "turned", "scaled"])
def test_a_changed_matrix_has_another_fingerprint(change: str) -> None:
    model, inputs = decoder("llama")
    first = fingerprint(model, **inputs)
    weight: Any = model.get_parameter("model.layers.1.mlp.down_proj.weight")
    with torch.no_grad():
        if change == "turned":
            # The same singular values, in another frame.
            weight.copy_(torch.linalg.qr(torch.randn(16, 16))[0] @ weight)
        else:
            weight.mul_(-1.0 if change == "negated" else 1.01)
    second = fingerprint(model, **inputs)
    assert first.digest != second.digest
