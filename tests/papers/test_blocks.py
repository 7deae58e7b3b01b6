"""The blocks compute the papers' formulas."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import reference.blocks as reference
from conserved.blocks import (
    Attention,
    DecoderLM,
    FeedForward,
    MixtureOfExperts,
    ReluAttention,
    SinusoidalPositions,
    SwiGLU,
    VisionTransformer,
)


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("rotary", [False, True, "half"])
@pytest.mark.parametrize(("causal", "bias", "qk_norm"), list(itertools.product([False, True], repeat=3)))
def test_attention_is_the_papers_formula(kv_heads: int, rotary: bool, causal: bool, bias: bool, qk_norm: bool) -> None:
    module = Attention(8, 4, 6, kv_heads, rotary, causal, bias, qk_norm).double()
    if module.q_norm is not None:
        torch.nn.init.normal_(module.q_norm.weight)
    x = torch.randn(3, 8, dtype=torch.float64)
    assert close(module(x), reference.attention(module, x))


def test_attention_treats_a_batch_one_by_one() -> None:
    module = Attention(4, 2, rotary=True).double()
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    assert close(module(x), torch.stack([module(one) for one in x]))


def test_scale_one_gives_equation_5_as_printed() -> None:
    module = Attention(4, 2, scale=1.0).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    assert module.scale == 1
    assert close(module(x), reference.attention(module, x))


def test_swiglu_is_the_papers_formula() -> None:
    module = SwiGLU(3, 4, bias=True).double()
    x = torch.randn(3, dtype=torch.float64)
    assert close(module(x), reference.swiglu(module, x))


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
@pytest.mark.parametrize("top_k", [None, 1, 2, 4])
def test_mixture_is_the_papers_formula(gate: str, top_k: int | None) -> None:
    module = MixtureOfExperts(3, 2, 4, gate, top_k).double()  # type: ignore[arg-type]
    x = torch.randn(6, 3, dtype=torch.float64)
    assert close(module(x), torch.stack([reference.mixture(module, one) for one in x]))


def test_tied_scores_go_to_the_expert_of_lower_index() -> None:
    module = MixtureOfExperts(3, 2, 4, top_k=2).double()
    torch.nn.init.zeros_(module.router.weight)
    assert module.weights(torch.ones(3, dtype=torch.float64)).tolist() == [0.5, 0.5, 0, 0]


@pytest.mark.parametrize(("activation", "at_minus_one"), [("relu", 0.0), ("linear", -1.0)])
def test_feedforward_applies_its_activation(activation: str, at_minus_one: float) -> None:
    module = FeedForward(1, 1, activation)  # type: ignore[arg-type]
    torch.nn.init.ones_(module.up.weight)
    torch.nn.init.ones_(module.down.weight)
    assert module(torch.tensor([-1.0])).item() == at_minus_one


def test_relu_attention_is_the_blogs_formula() -> None:
    module = ReluAttention(3, out=2).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    scores = torch.stack([torch.stack([(a @ module.qk @ b).clamp(min=0) for b in x]) for a in x])
    assert close(module(x), scores @ x @ module.v)


def test_sinusoidal_positions_interleave_sines_and_cosines() -> None:
    added = SinusoidalPositions()(torch.zeros(3, 4, dtype=torch.float64))
    expected = [[torch.tensor(p * 10000 ** (-j / 2)) for j in range(2)] for p in range(3)]
    for p in range(3):
        for j in range(2):
            assert added[p, 2 * j] == pytest.approx(float(expected[p][j].sin()))
            assert added[p, 2 * j + 1] == pytest.approx(float(expected[p][j].cos()))


def test_a_decoder_does_not_see_the_future() -> None:
    model = DecoderLM(7, 8, 2, 2, 8).double()
    tokens = torch.tensor([[1, 2, 3, 4]])
    changed = torch.tensor([[1, 2, 3, 5]])
    assert close(model(tokens)[:, :3], model(changed)[:, :3])


def test_vision_transformer_cuts_images_into_patches_row_by_row() -> None:
    model = VisionTransformer(4, 2, 4, 1, 2, 4, channels=1)
    image = torch.arange(16.0).reshape(1, 1, 4, 4)
    assert model.patches(image)[0].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Attention(5, 2), "dim to be a multiple of heads, got dim 5"),
        (lambda: Attention(4, 2, kv_heads=3), "heads to be a multiple of kv_heads, got 2 and 3"),
        (lambda: Attention(6, 2, rotary=True), "an even head_dim"),
        (lambda: Attention(4, 2, rotary="spiral"), "Expected rotary to be"),  # type: ignore[arg-type]
        (lambda: Attention(0, 1), "at least 1"),
        (lambda: FeedForward(3, 0), "hidden of at least 1"),
        (lambda: FeedForward(3, 4, "tanh"), "Expected activation to be"),  # type: ignore[arg-type]
        (lambda: MixtureOfExperts(3, 2, 3, "hard"), "Expected gate to be"),  # type: ignore[arg-type]
        (lambda: MixtureOfExperts(3, 2, 3, top_k=4), "top_k"),
        (lambda: ReluAttention(3, 0), "at least 1"),
        (lambda: VisionTransformer(5, 2, 4, 1, 2, 4), "multiple of the patch"),
        (lambda: DecoderLM(7, 8, 1, 2, 8, positions="alibi"), "Expected positions to be"),  # type: ignore[arg-type]
        (lambda: DecoderLM(7, 8, 1, 2, 8, norm="batch"), "Expected norm to be"),  # type: ignore[arg-type]
        (lambda: DecoderLM(7, 8, 1, 2, 8, feedforward="tanh"), "Expected feedforward to be"),  # type: ignore[arg-type]
        (
            lambda: DecoderLM(7, 8, 1, 2, 8, positions="learned", max_length=2)(torch.zeros(1, 3, dtype=torch.long)),
            "at most 2 tokens",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.usefixtures("as_users_run_it")
def test_impossible_options_are_refused_in_words(build: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()  # type: ignore[operator]
