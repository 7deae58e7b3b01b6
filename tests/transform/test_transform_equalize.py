"""Equalising: each objective reaches what it says, by formulas a reader can check, and the function stays."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from catalogue import named
from conserved.transform import OBJECTIVES, activation_sizes, equalize, move, symmetries_of
from conserved.transform.incoherent import hadamard
from test_transform_move import difference, mlp, outputs

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("name", ["nanoGPT, width 4", "llama2.c, width 4", "ViT by hand", "experts, grouped bmm"])
def test_the_function_stays_and_the_move_can_be_undone(name: str, objective: str) -> None:
    case = named(name).subject()
    case.model.eval()
    laws = symmetries_of(case.model, *case.args, **case.kwargs)
    batch = case.kwargs or case.args
    before, start = outputs(case.model, case.args, case.kwargs), copy.deepcopy(case.model.state_dict())
    done = equalize(case.model, laws=laws, objective=objective, batches=[batch], spaces="all")
    assert done.moved.moved or objective == "incoherent"
    assert difference(before, outputs(case.model, case.args, case.kwargs)) < 1e-10
    move(case.model, done.moved.inverse)
    assert max((difference(start[n], case.model.state_dict()[n]) for n in done.moved.parameters), default=0) < 1e-12


@pytest.mark.parametrize("name", ["nanoGPT, width 4", "llama2.c, width 4", "MLP-Mixer, ReLU"])
def test_balanced_weights_have_no_laws_left_and_the_smallest_norm(name: str) -> None:
    case = named(name).subject()
    laws = symmetries_of(case.model, *case.args, **case.kwargs)
    done = equalize(case.model, laws=laws)
    assert max(done.before.values()) > 1e-2
    assert max(done.after.values()) < 1e-8
    theta = {n: p.detach() for n, p in case.model.named_parameters()}

    def size(state: dict[str, Tensor]) -> float:
        return sum(float(t.square().sum()) for t in state.values())

    for symmetry in laws:
        if symmetry.exact and symmetry.name in done.after:
            generator = torch.Generator().manual_seed(3)
            near = symmetry.act(theta, symmetry.element(spread=0.02, generator=generator))
            assert size(near) >= size(theta) * (1 - 1e-12), symmetry


def test_degrees_other_than_one_are_balanced_as_well() -> None:
    class Squared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 6, bias=False), nn.Linear(6, 2, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).relu().square())

    torch.manual_seed(0)
    model, x = Squared().double(), torch.randn(3, 4).double()
    before = model(x)
    done = equalize(model, x)
    law = model.a.weight.square().sum(1) - 2 * model.b.weight.square().sum(0)
    assert float(law.abs().max()) < 1e-8
    assert difference(before, model(x)) < 1e-12
    assert done.sweeps < 5


def test_a_factor_of_zeros_is_left_alone_and_said() -> None:
    model: Any = nn.Sequential(nn.Linear(5, 3, bias=False), nn.Linear(3, 4, bias=False))
    nn.init.zeros_(model[1].weight)
    start = model[0].weight.detach().clone()
    done = equalize(model, torch.zeros(2, 5))
    assert torch.equal(model[0].weight, start)
    assert "zero" in done.skipped["linear_pair"]


def test_a_product_of_low_rank_keeps_its_function_where_it_has_no_balanced_point() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(2, 6, bias=False), nn.Linear(6, 4, bias=False)).double()
    x = torch.randn(3, 2)
    before = model(x.double())
    equalize(model, x.double())
    assert difference(before, model(x.double())) < 1e-12
    norms = [float(layer.weight.norm()) for layer in model]
    assert norms[0] == pytest.approx(norms[1])


def test_ranges_of_two_layers_become_equal_unit_by_unit() -> None:
    model, x = mlp()
    rows, columns = model[0].weight.abs().amax(1), model[2].weight.abs().amax(0)
    equalize(model, x, objective="range")
    wanted = (rows * columns).sqrt()
    torch.testing.assert_close(model[0].weight.abs().amax(1), wanted)
    torch.testing.assert_close(model[2].weight.abs().amax(0), wanted)


def test_a_gain_gives_its_readers_columns_of_equal_range() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.RMSNorm(6), nn.Linear(6, 4))
    equalize(model, torch.randn(3, 6), objective="range")
    ranges = model[1].weight.abs().amax(0)
    torch.testing.assert_close(ranges, ranges.mean().expand(6))


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_activations_decide_as_in_smoothquant(alpha: float) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 4))
    x = torch.randn(2, 5, 6)
    nn.init.uniform_(model[0].weight, 0.5, 3)
    nn.init.uniform_(model[0].bias, -1, 1)
    hand = copy.deepcopy(model)
    with torch.no_grad():
        reads = hand[0](x).abs().flatten(0, 1).amax(0)
        s = reads**alpha / hand[1].weight.abs().amax(0) ** (1 - alpha)
        hand[0].weight /= s
        hand[0].bias /= s
        hand[1].weight *= s
    equalize(model, x, objective="activation", batches=[x], alpha=alpha)
    for ours, theirs in zip(model.parameters(), hand.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


class TestActivationSizes:
    """Every product with a parameter is seen, however it is written."""

    def test_linear_maps_transposes_slices_and_einsums(self) -> None:
        class Many(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear, self.conv = nn.Linear(4, 6), nn.Conv1d(6, 4, 3, groups=2)
                self.turned = nn.Parameter(torch.randn(6, 5))
                self.part = nn.Parameter(torch.randn(8, 7))
                self.stack = nn.Parameter(torch.randn(3, 4, 2))

            def forward(self, x: Tensor) -> Any:
                y = self.linear(x)
                each = torch.einsum("btc,ecd->ebtd", x, self.stack)
                return y @ self.turned, y @ self.part[:6], self.conv(y.transpose(1, 2)), each

        torch.manual_seed(0)
        model, x = Many(), torch.randn(2, 5, 4)
        sizes = activation_sizes(model, [x])
        y = model.linear(x)
        close = torch.testing.assert_close
        reads, makes = x.abs().flatten(0, 1).amax(0).double(), y.abs().flatten(0, 1).amax(0).double()
        close(sizes["linear.weight"], reads[None])
        close(sizes["turned"], makes[:, None])
        close(sizes["part"][:6], makes[:, None])
        assert not sizes["part"][6:].any()
        close(sizes["conv.weight"], torch.stack([makes[:3], makes[:3], makes[3:], makes[3:]])[..., None])
        if "stack" in sizes:
            close(sizes["stack"].expand(3, 4, 1), reads[None, :, None].expand(3, 4, 1))

    def test_means_over_batches(self) -> None:
        model = nn.Linear(3, 2)
        batches = [torch.randn(4, 3), torch.randn(4, 3)]
        mean = torch.cat(batches).abs().mean(0).double()
        torch.testing.assert_close(activation_sizes(model, batches, statistic="mean")["weight"][0], mean)

    def test_nothing_to_run_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="at least one batch"):
            activation_sizes(nn.Linear(3, 2), [])


@pytest.mark.parametrize("n", [1, 2, 8, 12, 20, 64])
def test_hadamard_matrices_are_orthogonal_and_spread(n: int) -> None:
    h = hadamard(n, torch.Generator().manual_seed(0))
    torch.testing.assert_close(h @ h.mT, torch.eye(n, dtype=torch.float64))
    if n & (n - 1) == 0:
        torch.testing.assert_close(h.abs(), torch.full((n, n), n**-0.5, dtype=torch.float64))


def test_a_large_channel_of_a_head_is_spread_over_all() -> None:
    model: Any = nn.Sequential(nn.Linear(16, 8, bias=False), nn.Linear(8, 16, bias=False))
    with torch.no_grad():
        model[0].weight[3] *= 40
    done = equalize(model, torch.zeros(1, 16), objective="incoherent")
    assert done.after["linear_pair"] < 0.7 * done.before["linear_pair"]


def test_what_was_done_is_said_in_lines() -> None:
    model: Any = nn.Sequential(nn.RMSNorm(6), nn.Linear(6, 6), nn.Linear(6, 4))
    lines = str(equalize(model, torch.randn(3, 6), objective="incoherent")).splitlines()
    assert lines[0].startswith("incoherent: 1 symmetry moved 3 tensors; objective ")
    assert lines[1] == "  1 left alone (0.gain): the objective has nothing to say about it"


def test_bad_usage_says_what_to_do() -> None:
    model, x = mlp()
    with pytest.raises(ValueError, match="balanced, range, activation, incoherent"):
        equalize(model, x, objective="small")
    with pytest.raises(ValueError, match="batches="):
        equalize(model, x, objective="activation")
    with pytest.raises(ValueError, match="alpha"):
        equalize(model, x, objective="activation", batches=[x], alpha=2)
    with pytest.raises(ValueError, match="laws="):
        equalize(model.state_dict())
