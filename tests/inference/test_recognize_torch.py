"""Layers of torch.nn: every law that is recognised holds, and there are as many as there can be."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from conserved import LawSet, Verdict, discover, recognize
from sampling import sampled
from test_recognize_blocks import gradients
from tolerances import FUNCTION_UNCHANGED, IDENTITY
from torch_zoo import SEEDS, TORCH_CASES, encoder
from zoo import Case, ids


def built(case: Case) -> nn.Module:
    return case.model().eval()


@pytest.mark.parametrize("case", TORCH_CASES, ids=ids)
def test_all_identities_hold_and_there_are_as_many_as_expected(case: Case) -> None:
    model = built(case)
    laws = case.laws(model)
    case.objective()(model).backward()
    wrong = {name: r for name, r in laws.residuals(gradients(model)).items() if not r <= IDENTITY[torch.float64]}
    assert wrong == {}
    assert laws.independent() == case.conserved - case.missed


@pytest.mark.parametrize("case", TORCH_CASES, ids=ids)
def test_the_model_computes_the_same_after_any_group_element(case: Case) -> None:
    model = built(case)
    theta = {name: parameter.detach() for name, parameter in model.named_parameters()}
    generator = torch.Generator().manual_seed(5)
    x = case.sample(generator)
    seen = (lambda z: z.log_softmax(-1)) if case.loss == "cross_entropy" else (lambda z: z)
    before = seen(functional_call(model, theta, (x,)))
    for symmetry in case.laws(model):
        moved = symmetry.act(theta, symmetry.element(generator=generator))
        after = seen(functional_call(model, moved, (x,)))
        assert (after - before).norm() <= FUNCTION_UNCHANGED * before.norm(), symmetry


@pytest.mark.parametrize("case", sampled(TORCH_CASES, 7), ids=ids)
def test_there_are_as_many_laws_as_the_lie_closure_has(case: Case) -> None:
    seed = SEEDS.get(case.name, 0)
    discovery = discover(built(case), case.sample, loss=case.loss, forms=False, seed=seed)
    assert discovery.verdict == Verdict.VERIFIED, discovery.verdict
    assert discovery.count == case.conserved


def names(laws: LawSet) -> set[str]:
    return {symmetry.name for symmetry in laws}


def checked(model: nn.Module, *inputs: Tensor) -> LawSet:
    """The laws of a model, after making sure that each of them holds."""
    laws = recognize(model, *inputs)
    out = model(*inputs)
    (out.sin() * torch.linspace(0.3, 1.7, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
    wrong = {name: r for name, r in laws.residuals(gradients(model)).items() if not r <= 1e-11}
    assert wrong == {}
    return laws


def random(model: nn.Module) -> nn.Module:
    for parameter in model.double().parameters():
        nn.init.normal_(parameter, std=0.6)
    for module in model.modules():
        if hasattr(module, "eps"):
            setattr(module, "eps", 1e-30 if isinstance(module, nn.BatchNorm1d) else 0.0)  # noqa: B010
    return model


class TestStacks:
    x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def test_norms_behind_branches_chain_from_layer_to_layer(self) -> None:
        laws = checked(random(encoder(layers=2)), self.x)
        # The first sum holds the input itself, which no scale can follow.
        assert {name for name in names(laws) if "sum_scale" in name} == {
            "layers.0.sum_scale",
            "layers.sum_scale",
            "layers.1.sum_scale",
        }

    def test_a_final_norm_forgets_the_mean_of_every_writer(self) -> None:
        with_norm = checked(random(encoder(layers=2, norm=True, norm_first=True)), self.x)
        without = checked(random(encoder(layers=2, norm_first=True)), self.x)
        centred = {name for name in names(with_norm) if ".centre" in name}
        assert len(centred) == 8
        assert not centred & names(without)

    @pytest.mark.filterwarnings("ignore:enable_nested_tensor")
    def test_the_encoders_last_norm_is_read_by_every_cross_attention(self) -> None:
        model = random(nn.Transformer(4, 2, 1, 2, 3, dropout=0.0))
        laws = checked(model, self.x, self.x[:3])
        readers = [leg.view.parameter for leg in laws["encoder.norm.gain"].legs if leg.degree < 0]
        assert readers == [f"decoder.layers.{layer}.multihead_attn.in_proj_weight" for layer in (0, 0, 1, 1)]

    def test_dropout_takes_the_laws_it_breaks(self) -> None:
        layer = nn.TransformerEncoderLayer(4, 2, 3, dropout=0.3)
        laws = checked(random(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)), self.x)
        assert not any(symmetry.family == "centre" for symmetry in laws)


class TestChains:
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def test_statistics_of_a_batch_forget_each_channels_scale_and_bias(self) -> None:
        model = random(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2)))
        laws = checked(model, self.x)
        assert [symmetry.numbers for symmetry in laws] == [3, 3, 3]
        assert {"0.inert_bias", "1.gain"} < names(laws)

    def test_running_statistics_forget_nothing(self) -> None:
        model = random(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2))).eval()
        assert names(checked(model, self.x)) == {"1.gain"}

    def test_dropout_leaves_scalings_of_a_linear_pair(self) -> None:
        model = random(nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.4), nn.Linear(3, 2)))
        assert [symmetry.kind.code for symmetry in checked(model, self.x)] == ["scaling"]

    ACROSS: ClassVar[dict[str, tuple[Callable[[], nn.Module], int]]] = {
        "a norm over positions": (lambda: nn.Sequential(nn.Conv1d(1, 4, 2), nn.LayerNorm(3), nn.Conv1d(4, 2, 1)), 9),
        "a map over positions": (lambda: nn.Sequential(nn.Conv1d(1, 4, 1), nn.ReLU(), nn.Linear(4, 4)), 1),
        "pooled features": (lambda: nn.Sequential(nn.Linear(4, 4), nn.MaxPool1d(1), nn.Linear(4, 2)), 1),
        "grouped channels": (lambda: nn.Sequential(nn.Conv1d(1, 4, 1), nn.ReLU(), nn.Conv1d(4, 4, 1, groups=2)), 4),
        "a smooth activation": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), 0),
        "a softmax": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 2)), 7),
    }
    """Chains, and how many numbers they conserve: what mixes positions, or sees more than a scale, leaves less."""

    @pytest.mark.parametrize("name", ACROSS)
    def test_what_is_claimed_across_holds(self, name: str) -> None:
        build, numbers = self.ACROSS[name]
        assert checked(random(build()), self.x[:, None]).numbers == numbers

    def test_what_stands_in_the_way_is_named(self) -> None:
        class Unknown(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inside = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 4))
                self.mix = nn.Linear(4, 2, bias=False)

            def forward(self, x: Tensor) -> Tensor:
                return torch.cdist(self.inside(x), self.mix.weight)

        laws = checked(random(Unknown()), self.x)
        assert names(laws) == {"inside.neurons"}
        why = {item.name: item.reason for item in laws.dropped}
        assert why["mix.weight"].startswith("cdist_forward in ")


def test_packed_projections_are_cut_where_the_heads_are() -> None:
    model = random(nn.MultiheadAttention(4, 2))
    x = torch.randn(5, 4, dtype=torch.float64)
    values = list(recognize(model, x, x, x).values().values())
    p = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for rows in (slice(0, 2), slice(2, 4)):
        q, k, v = (
            torch.cat((p["in_proj_weight"][start:][rows], p["in_proj_bias"][start:][rows, None]), 1)
            for start in (0, 4, 8)
        )
        out = p["out_proj.weight"][:, rows]
        expected, other = q @ q.T - k @ k.T, v @ v.T - out.T @ out
        for law in (expected, other):
            assert any(value.shape == law.shape and torch.allclose(value, law) for value in values)
