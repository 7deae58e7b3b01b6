"""The blocks every check runs over: how to build each, what to feed it, and how many numbers it conserves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved import LawSet, blocks, recognize
from conserved.blocks import Attention, FeedForward, MixtureOfExperts, ReluAttention, SwiGLU, TransformerBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A block, a sampler of inputs, the loss it is trained with, and the conserved numbers SCIENCE.md gives for it."""

    name: str
    build: Callable[[], nn.Module]
    sample: Callable[[torch.Generator], Tensor]
    conserved: int
    loss: str = "regression"
    missed: int = 0
    """Of the conserved numbers, those that inference does not see: which expert is active is decided by values."""

    def model(self, seed: int = 0, *, epsilon: float | None = 0.0, dtype: torch.dtype = torch.float64) -> nn.Module:
        """The block at random parameters, gains and biases included; norms with ε = 0 unless told otherwise."""
        torch.manual_seed(seed)
        model = self.build().to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(0.6 * torch.randn(parameter.shape, dtype=torch.float64))
        for module in model.modules():
            if epsilon is not None and isinstance(module, nn.LayerNorm | nn.RMSNorm):
                module.eps = epsilon
        return model

    def laws(self, model: nn.Module) -> LawSet:
        x = self.sample(torch.Generator().manual_seed(0))
        like = next(model.parameters())
        return recognize(model, x.to(like) if x.is_floating_point() else x.to(like.device), loss=self.loss)

    def short_sample(self, generator: torch.Generator) -> Tensor:
        """One text or image, or three vectors, where `sample` has more: the gradient fields span the same space.

        A text keeps its length: a position that no text has would be a law."""
        x = self.sample(generator)
        return x[:3] if x.ndim == 2 and x.is_floating_point() else x[:1]

    def known_laws(self, model: nn.Module) -> LawSet:
        """The same, read off once for every precision and ε: the parameters of a block at random say nothing more."""
        key = (self.name, next(model.parameters()).dtype, repr(model))
        if key not in _KNOWN:
            _KNOWN[key] = self.laws(model)
        own = dict(model.named_parameters())
        return replace(_KNOWN[key], parameters={name: own[name] for name in _KNOWN[key].parameters})

    def objective(self, seed: int = 1, dtype: torch.dtype = torch.float64) -> Callable[[nn.Module], Tensor]:
        """A random smooth loss on a few random inputs: what no law may depend on."""
        generator = torch.Generator().manual_seed(seed)
        inputs = [self.sample(generator) for _ in range(3)]
        inputs = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
        if self.loss == "cross_entropy":
            return lambda model: torch.stack([_classify(model(x), seed) for x in inputs]).mean()
        return lambda model: torch.stack([_regress(model(x), seed) for x in inputs]).mean()


_KNOWN: dict[tuple[str, torch.dtype, str], LawSet] = {}


def _classify(logits: Tensor, seed: int) -> Tensor:
    flat = logits.flatten(0, -2)
    labels = torch.randint(flat.shape[-1], (len(flat),), generator=torch.Generator().manual_seed(seed))
    return F.cross_entropy(flat, labels)


def _regress(output: Tensor, seed: int) -> Tensor:
    target = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        output.dtype
    )
    return ((output - target) ** 2).mean() + torch.sin(output).mean()


def vectors(dim: int, tokens: int = 5, size: float = 1.0) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: size * torch.randn(tokens, dim, generator=generator, dtype=torch.float64)


def token_ids(vocab: int, length: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randint(vocab, (2, length), generator=generator)


def images(size: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(2, 1, size, size, generator=generator, dtype=torch.float64)


def decoder(**options: object) -> Callable[[], nn.Module]:
    return lambda: blocks.DecoderLM(5, 4, 1, 2, 3, max_length=4, **options)  # type: ignore[arg-type]


def case(
    name: str,
    build: Callable[[], nn.Module],
    conserved: int,
    dim: int = 4,
    sample: Callable[[torch.Generator], Tensor] | None = None,
    loss: str = "regression",
    missed: int = 0,
) -> Case:
    return Case(name=name, build=build, conserved=conserved, sample=sample or vectors(dim), loss=loss, missed=missed)


LAYERED = {"norm": "layer", "bias": True, "positions": "learned", "feedforward": "gelu"}

CASES = [
    case("attention", lambda: Attention(4, 2), 12),
    case("attention, one square head", lambda: Attention(4, 1), 20),
    case("attention, causal", lambda: Attention(4, 2, causal=True), 12),
    case("attention, head wider than its share", lambda: Attention(4, 2, head_dim=3), 24),
    # 12 as without biases, and the four key biases, which softmax cannot see.
    case("attention, biases", lambda: Attention(4, 2, bias=True), 16),
    case("attention, rotary", lambda: Attention(4, 2, rotary=True), 8),
    case("attention, rotary, one head of four", lambda: Attention(4, 1, rotary=True), 12),
    case("attention, rotary half-split", lambda: Attention(4, 1, rotary="half"), 12),
    case("attention, rotary, biases", lambda: Attention(4, 2, rotary=True, bias=True), 8),
    case("attention, grouped", lambda: Attention(4, 2, kv_heads=1), 6),
    case("attention, grouped, four heads on two", lambda: Attention(8, 4, kv_heads=2), 12, dim=8),
    case("attention, grouped, rotary", lambda: Attention(4, 2, kv_heads=1, rotary=True), 4),
    case("attention, rotary, query/key norm", lambda: Attention(4, 2, rotary=True, qk_norm=True), 11),
    case("attention, rotary half-split, query/key norm", lambda: Attention(4, 1, rotary="half", qk_norm=True), 14),
    case("attention, query/key norm", lambda: Attention(4, 2, qk_norm=True), 12),
    case("attention, query/key norm, biases", lambda: Attention(4, 2, qk_norm=True, bias=True), 12),
    case("ReLU attention", lambda: ReluAttention(3), 1, sample=vectors(3, size=0.5)),
    case("ReLU attention, wide output", lambda: ReluAttention(3, out=2), 1, sample=vectors(3, size=0.5)),
    case("GELU FFN", lambda: FeedForward(3, 4, "gelu"), 0, dim=3),
    case("SiLU FFN, biases", lambda: FeedForward(3, 4, "silu", bias=True), 0, dim=3),
    case("ReLU FFN", lambda: FeedForward(3, 4, "relu"), 4, dim=3),
    case("ReLU FFN, biases", lambda: FeedForward(3, 4, "relu", bias=True), 4, dim=3),
    case("linear pair", lambda: FeedForward(3, 2, "linear"), 3, dim=3),
    case("linear pair, wider than its ends", lambda: FeedForward(3, 4, "linear", bias=True), 10, dim=3),
    case("SwiGLU", lambda: SwiGLU(3, 4), 4, dim=3),
    case("SwiGLU, biases", lambda: SwiGLU(3, 4, bias=True), 4, dim=3),
    case("softmax mixture", lambda: MixtureOfExperts(3, 2, 3), 9, dim=3),
    case("softmax mixture, top 2", lambda: MixtureOfExperts(3, 2, 3, top_k=2), 9, dim=3),
    case("sigmoid mixture", lambda: MixtureOfExperts(3, 2, 3, "sigmoid"), 6, dim=3),
    case("sigmoid mixture, top 2", lambda: MixtureOfExperts(3, 2, 3, "sigmoid", top_k=2), 6, dim=3),
    case("softmax mixture, top 1", lambda: MixtureOfExperts(3, 2, 3, top_k=1), 15, dim=3, missed=6),
    case("sigmoid mixture, top 1", lambda: MixtureOfExperts(3, 2, 3, "sigmoid", top_k=1), 15, dim=3, missed=9),
    # Attention with biases 16, the two norms 8, and Σ(o.bias) − Σ(down.bias).
    case("pre-norm block", lambda: TransformerBlock(Attention(4, 2, bias=True), FeedForward(4, 3, bias=True)), 25),
    case(
        "pre-norm block without biases",
        lambda: TransformerBlock(Attention(4, 2), FeedForward(4, 3), bias=False),
        20,
    ),
    case(
        "RMS block, rotary, query/key norm, SwiGLU",
        lambda: TransformerBlock(Attention(4, 2, rotary=True, qk_norm=True), SwiGLU(4, 3), "rms"),
        22,
    ),
    case("decoder", decoder(), 24, sample=token_ids(5, 4)),
    case("decoder, cross-entropy", decoder(), 28, sample=token_ids(5, 4), loss="cross_entropy"),
    case("decoder, layer norm", decoder(**LAYERED), 54, sample=token_ids(5, 4), loss="cross_entropy"),
    case("decoder, tied", decoder(tie=True, **LAYERED), 42, sample=token_ids(5, 4), loss="cross_entropy"),
    case(
        "vision transformer",
        lambda: blocks.VisionTransformer(4, 2, 4, 1, 2, 3, channels=1, classes=3),
        58,
        sample=images(4),
        loss="cross_entropy",
    ),
]

LAWFUL = [case for case in CASES if case.conserved]
"""Those that conserve something."""

COUNTED_ONLY = (
    "decoder, layer norm",
    "decoder, cross-entropy",
    "decoder, tied",
    "vision transformer",
    "softmax mixture, top 2",
    "pre-norm block without biases",
    "attention, grouped, four heads on two",
    "attention, head wider than its share",
    "attention, one square head",
    "attention, rotary, biases",
    "attention, rotary half-split",
    "attention, rotary half-split, query/key norm",
)
"""Cases whose laws are always counted, and proved to be all with `--whole`."""


def named(name: str) -> Case:
    """A case by its name."""
    return next(case for case in CASES if case.name == name)


def ids(case: Case) -> str:
    return case.name
