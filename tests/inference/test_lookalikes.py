"""Models that look like the blocks and are not: whatever is still claimed about them holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from conserved import LawSet, recognize
from conserved.blocks import (
    Attention,
    DecoderLM,
    FeedForward,
    LearnedPositions,
    MixtureOfExperts,
    SwiGLU,
    TransformerBlock,
    VisionTransformer,
)
from test_recognize_blocks import gradients
from test_unusual_models import evaluate
from tolerances import FUNCTION_UNCHANGED, IDENTITY


class GemmaNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, tuple(self.normalized_shape), 1 + self.weight, self.eps)


class Uncentred(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.1 * x.mean(-1, keepdim=True)


class PostNorm(TransformerBlock):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.feedforward(x))


class Doubled(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return 2 * super().forward(tokens)


class Stretched(LearnedPositions):
    def forward(self, x: Tensor) -> Tensor:
        return x + 3 * self.weight[: x.shape[-2]]


def block(**changes: nn.Module) -> nn.Module:
    model = TransformerBlock(Attention(4, 2, bias=True), FeedForward(4, 3, bias=True))
    for name, module in changes.items():
        setattr(model, name, module)
    return model


def decoder(**changes: nn.Module) -> nn.Module:
    model = DecoderLM(5, 4, 2, 2, 3, max_length=4, norm="layer", positions="learned", bias=True, feedforward="relu")
    for name, module in changes.items():
        setattr(model, name, module)
    return model


def attention(**changes: object) -> nn.Module:
    model = Attention(4, 2, bias=True, qk_norm=True)
    for name, value in changes.items():
        setattr(model, name, value)
    return model


def post_norm_layer() -> nn.Module:
    model = decoder()
    layer = PostNorm(Attention(4, 2, bias=True), FeedForward(4, 3, bias=True))
    model.get_submodule("layers").register_module("0", layer)
    return model


def shared_layers() -> nn.Module:
    model = decoder()
    model.get_submodule("layers").register_module("1", model.get_submodule("layers.0"))
    return model


def shared_feedforward() -> nn.Module:
    model = decoder()
    model.get_submodule("layers.1").feedforward = model.get_submodule("layers.0.feedforward")
    return model


def bias_shared_across_kinds() -> nn.Module:
    model = DecoderLM(5, 4, 1, 2, 4, norm="layer", bias=True, feedforward="relu", tie=True)
    model.norm.bias = model.get_parameter("layers.0.feedforward.up.bias")
    return model


def pruned(module: nn.Module, path: str, name: str) -> nn.Module:
    prune.l1_unstructured(module.get_submodule(path), name, 1)
    return module


def parametrised_gain() -> nn.Module:
    model = block()
    parametrize.register_parametrization(model.get_submodule("norm1"), "weight", nn.Identity())
    return model


def own_forward() -> nn.Module:
    model = SwiGLU(4, 3)
    plain = model.forward
    model.forward = lambda x: plain(x) + model.up.weight.sum()  # type: ignore[method-assign]
    return model


def router_with_bias(**options: object) -> nn.Module:
    model = MixtureOfExperts(4, 2, 3, **options)  # type: ignore[arg-type]
    model.router = nn.Linear(4, 3)
    return model


VECTORS = torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
TOKENS = torch.tensor([[0, 1, 2, 3], [4, 3, 0, 0]])
IMAGES = torch.randn(2, 1, 4, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

LOOKALIKES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "hidden layer of one": (lambda: TransformerBlock(Attention(4, 2, bias=True), FeedForward(4, 1)), VECTORS),
    "head and hidden of one": (lambda: TransformerBlock(Attention(4, 1, head_dim=1), FeedForward(4, 1)), VECTORS),
    "one-plus gain": (lambda: block(norm1=GemmaNorm(4)), VECTORS),
    "norm that does not centre": (lambda: block(norm2=Uncentred(4)), VECTORS),
    "norm over two axes": (lambda: block(norm1=nn.LayerNorm((4, 4))), VECTORS),
    "no norm": (lambda: block(norm1=nn.Identity()), VECTORS),
    "gain without a bias": (lambda: block(norm1=nn.LayerNorm(4, bias=False)), VECTORS),
    "norm without parameters": (lambda: block(norm1=nn.LayerNorm(4, elementwise_affine=False)), VECTORS),
    "parametrised gain": (parametrised_gain, VECTORS),
    "norm of queries alone": (lambda: attention(k_norm=None), VECTORS),
    "norm of keys alone": (lambda: attention(q_norm=None), VECTORS),
    "one-plus query gain": (lambda: attention(q_norm=GemmaNorm(2)), VECTORS),
    "layer norm of queries": (lambda: attention(q_norm=nn.LayerNorm(2)), VECTORS),
    "pruned neuron bias": (lambda: pruned(FeedForward(4, 3, "relu", bias=True), "up", "bias"), VECTORS),
    "pruned value bias": (lambda: pruned(Attention(4, 2, bias=True), "v", "bias"), VECTORS),
    "pruned weight": (lambda: pruned(SwiGLU(4, 3), "up", "weight"), VECTORS),
    "forward of its own": (own_forward, VECTORS),
    "router with a bias": (router_with_bias, VECTORS),
    "top-1 router with a bias": (lambda: router_with_bias(top_k=1), VECTORS),
    "all experts active": (lambda: MixtureOfExperts(4, 2, 3, top_k=3), VECTORS),
    "post-norm layer": (post_norm_layer, TOKENS),
    "doubled embedding": (lambda: decoder(embedding=Doubled(5, 4)), TOKENS),
    "stretched positions": (lambda: decoder(positions=Stretched(4, 4)), TOKENS),
    "padded embedding": (lambda: decoder(embedding=nn.Embedding(5, 4, padding_idx=0)), TOKENS),
    "embedding scaled by frequency": (lambda: decoder(embedding=nn.Embedding(5, 4, scale_grad_by_freq=True)), TOKENS),
    "layers that are one": (shared_layers, TOKENS),
    "layers that share a branch": (shared_feedforward, TOKENS),
    "bias shared across kinds": (bias_shared_across_kinds, TOKENS),
    "classifier inside a model": (
        lambda: nn.Sequential(VisionTransformer(4, 2, 4, 1, 2, 3, channels=1, classes=3), nn.Linear(3, 2)),
        IMAGES,
    ),
}


def built(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(3)
    build, x = LOOKALIKES[name]
    model = build().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.6 * torch.randn(parameter.shape, dtype=torch.float64))
    for module in model.modules():
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            module.eps = 0.0
    return model, x


def outputs(model: nn.Module, theta: dict[str, Tensor], x: Tensor) -> Tensor:
    return evaluate(model, theta, x).log_softmax(-1)


@pytest.mark.parametrize("name", LOOKALIKES)
def test_nothing_false_is_claimed(name: str) -> None:
    model, x = built(name)
    laws = recognize(model, x, loss="cross_entropy")
    theta = {n: parameter.detach() for n, parameter in model.named_parameters()}
    before = outputs(model, theta, x)
    for symmetry in laws:
        if symmetry.family in ("frozen", "inert_padding"):
            # Facts about gradients, not about the function.
            continue
        moved = symmetry.act(theta, symmetry.element(generator=torch.Generator().manual_seed(1)))
        after = outputs(model, moved, x)
        assert (after - before).norm() <= FUNCTION_UNCHANGED * before.norm(), symmetry
    (-model(x).log_softmax(-1)[..., 0].mean()).backward()
    grads = gradients(model)
    noise = 1e-12 * max(float(grad.abs().max()) for grad in grads.values())
    # Of a gradient that is zero but for rounding no identity can be weighed against itself.
    text = laws.select(lambda law: any(float(grads[name].abs().max()) > noise for name in law.parameters))
    wrong = {n: r for n, r in text.residuals(grads).items() if not r <= IDENTITY[torch.float64]}
    assert wrong == {}


def test_layers_that_are_one_keep_their_laws() -> None:
    """Sharing a whole layer merges each law with its own copy and loses none inside the layer."""
    model, x = built("layers that are one")
    shared = {s.name for s in recognize(model, x) if s.block.startswith("layers.0.attention") and s.family != "centre"}
    layer = recognize(model.get_submodule("layers.0"), VECTORS)
    alone = {s.name for s in layer if s.block.startswith("attention")}
    assert shared == {f"layers.0.{name}" for name in alone}


class TestCarefulEvaluation:
    """Law sets say what is wrong with what they are given."""

    def laws(self) -> tuple[nn.Module, LawSet]:
        model = Attention(4, 2)
        return model, recognize(model)

    def test_gradients_in_another_precision_are_promoted(self) -> None:
        model, laws = self.laws()
        doubles = {n: torch.randn(p.shape, dtype=torch.float64) for n, p in model.named_parameters()}
        assert {value.dtype for value in laws.identities(doubles).values()} == {torch.float64}
        assert {value.dtype for value in laws.drift(doubles).values()} == {torch.float64}
        assert laws["query_key[0]"].drift(dict(laws.parameters), doubles).dtype == torch.float64

    @pytest.mark.usefixtures("as_users_run_it")
    @pytest.mark.parametrize("given", [{}, {"q.weight": None}], ids=["missing", "none"])
    def test_missing_gradients_and_updates_are_named(self, given: dict[str, Tensor]) -> None:
        _, laws = self.laws()
        for method in (laws.identities, laws.residuals, laws.drift):
            with pytest.raises(ValueError, match=r"a tensor for each parameter, got none for \w\.weight"):
                method(given)

    def test_sparse_gradients_are_read(self) -> None:
        model = DecoderLM(5, 4, 1, 2, 3, positions="learned")
        model.embedding = nn.Embedding(5, 4, sparse=True)
        verdict = recognize(model).verify(lambda: model(TOKENS).square().mean())
        assert verdict.holds, verdict

    @pytest.mark.parametrize(
        "loss",
        [lambda m: 3.0, lambda m: m(VECTORS.float()).sum().detach(), lambda m: m(VECTORS.float())],
        ids=["a float", "detached", "not a scalar"],
    )
    def test_a_loss_that_cannot_be_differentiated_is_refused(self, loss: Callable[[nn.Module], Tensor]) -> None:
        model, laws = self.laws()
        with pytest.raises(ValueError, match="return a scalar tensor"):
            laws.verify(lambda: loss(model))

    def test_parameters_frozen_after_recognition_are_named(self) -> None:
        model, laws = self.laws()
        model.get_parameter("k.weight").requires_grad_(False)
        with pytest.raises(ValueError, match="requires no gradient"):
            laws.verify(lambda: model(VECTORS.float()).sum())

    @pytest.mark.usefixtures("as_users_run_it")
    def test_unknown_groupings_are_refused(self) -> None:
        _, laws = self.laws()
        with pytest.raises(ValueError, match='Expected by="block"'):
            laws.errors(laws.reference(), by="layer")  # type: ignore[arg-type]

    def test_a_reference_of_other_laws_is_refused(self) -> None:
        _, laws = self.laws()
        with pytest.raises(ValueError, match="a reference of these laws"):
            laws.errors(recognize(SwiGLU(3, 4)).reference())

    def test_a_damaged_file_is_refused(self) -> None:
        with pytest.raises(ValueError, match="got one without 'symmetries'"):
            LawSet.from_dict({"format": "conserved/laws/1"})

    def test_residuals_stay_in_the_unit_interval_for_planes(self) -> None:
        _, laws = Attention(4, 1, rotary=True), recognize(Attention(4, 1, rotary=True))
        theta = {n: torch.ones_like(p) for n, p in laws.parameters.items()}
        turned = {n: torch.tensor([[0.01], [-100.0], [100.0], [0.01]]).expand(4, 4) for n in theta}
        assert all(0 <= r <= 1 for r in laws.residuals(turned, theta).values())

    def test_equal_experts_do_not_look_like_a_wrong_gradient(self) -> None:
        """Where the true gradient of a router is zero, what is left of it is rounding."""
        model = MixtureOfExperts(8, 16, 4, top_k=2)
        for expert in model.experts:
            expert.load_state_dict(model.experts[0].state_dict())
        x = torch.randn(32, 8)
        assert recognize(model).verify(lambda: model(x).square().mean()).holds
