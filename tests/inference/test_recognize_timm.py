"""Vision transformers of timm: fused projections and a learned scale behind each branch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from conserved import Leg, Symmetry, Verdict, View, discover, recognize
from conserved.laws.independence import rank_of_gradients
from conserved.symmetry import Translation
from test_recognize_blocks import gradients
from timm_like import VisionTransformer
from zoo import Case, case, ids, images


def vision(name: str, conserved: int, **options: object) -> Case:
    def build() -> nn.Module:
        return VisionTransformer(**options)  # type: ignore[arg-type]

    return case(name, build, conserved, sample=images(4), loss="cross_entropy")


CASES = [
    vision("plain", 55),
    vision("layer scale", 54, scaled=True),
    vision("no biases on queries, keys and values", 51, qkv_bias=False),
    vision("ReLU", 58, act=nn.ReLU()),
    vision("query/key norm", 51, qk_norm=True),
    vision("norm behind the pool", 55, pooled_norm=True),
]


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_all_identities_hold_and_there_are_as_many_as_expected(case: Case) -> None:
    model = case.model()
    laws = case.laws(model)
    case.objective()(model).backward()
    wrong = {name: r for name, r in laws.residuals(gradients(model)).items() if not r <= 1e-11}
    assert wrong == {}
    assert laws.independent() == case.conserved


@pytest.mark.parametrize("case", CASES[:2], ids=ids)
def test_there_are_as_many_laws_as_the_lie_closure_has(case: Case) -> None:
    discovery = discover(case.model(), case.sample, loss=case.loss, forms=False)
    assert discovery.verdict == Verdict.VERIFIED, discovery.verdict
    assert discovery.count == case.conserved


def test_a_class_token_has_a_position_of_its_own() -> None:
    one = vision("class token", 0, class_token=True, depth=2)
    model = one.model()
    laws = one.laws(model)
    one.objective()(model).backward()
    assert all(r <= 1e-11 for r in laws.residuals(gradients(model)).values())
    theta = {name: parameter.detach() for name, parameter in model.named_parameters()}
    shape = tuple(theta["pos_embed"].shape)
    legs = (
        Leg(View.of("cls_token", (1, 1, 4), axes=2)),
        Leg(View.of("pos_embed", shape, axes=2, pick={1: (0, 1)}), -1),
    )
    by_hand = Symmetry(block="", family="by_hand", kind=Translation(), legs=legs)
    assert laws.independent() == rank_of_gradients([*laws, by_hand], theta)


def test_timm_itself() -> None:
    try:
        import timm
    except Exception as problem:
        pytest.skip(f"timm cannot be imported here: {type(problem).__name__}: {problem}")
    torch.manual_seed(0)
    model: nn.Module = timm.create_model("vit_tiny_patch16_224", init_values=0.5, num_classes=7).double()
    laws = recognize(model, torch.randn(2, 3, 224, 224, dtype=torch.float64), loss="cross_entropy")
    x = torch.randn(2, 3, 224, 224, dtype=torch.float64)

    def loss() -> Tensor:
        return nn.functional.cross_entropy(model(x), torch.tensor([1, 2]))

    assert laws.verify(loss).holds
