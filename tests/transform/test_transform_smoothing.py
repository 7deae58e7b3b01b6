"""Activation-aware scaling: what people write by hand, noise as it comes out, and no space moved for nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conserved.transform import equalize, symmetries_of
from conserved.transform.activations import ChannelSizes, channel_sizes
from conserved.transform.rounding import Noise, reader_noise
from test_transform_move import difference

pytestmark = pytest.mark.filterwarnings("ignore")


class Gated(nn.Module):
    """A norm, a gate and two weights: one space that a gain makes, one that a weight makes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.up = nn.RMSNorm(12), nn.Linear(12, 20), nn.Linear(12, 20)
        self.down = nn.Linear(20, 12)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def gated() -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    model, x = Gated().double(), torch.randn(64, 12).double()
    nn.init.uniform_(model.norm.weight, 0.3, 3)
    return model, x


def by_hand(model: Any, x: Tensor, alpha: float, *, weights: bool) -> None:
    """The two mappings as people write them."""
    with torch.no_grad():
        y = model.norm(x)
        z = nn.functional.silu(model.gate(y)) * model.up(y)
        w = torch.maximum(model.gate.weight.abs().amax(0), model.up.weight.abs().amax(0))
        s = y.abs().amax(0) ** alpha / w ** (1 - alpha)
        model.norm.weight /= s
        model.gate.weight *= s
        model.up.weight *= s
        if weights:
            s = z.abs().amax(0) ** alpha / model.down.weight.abs().amax(0) ** (1 - alpha)
            model.up.weight /= s[:, None]
            model.up.bias /= s
            model.down.weight *= s


@pytest.mark.parametrize("alpha", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("spaces", ["gains", "all"])
def test_the_same_spaces_and_sizes_give_what_is_written_by_hand(spaces: str, alpha: float) -> None:
    model, x = gated()
    hand = copy.deepcopy(model)
    by_hand(hand, x, alpha, weights=spaces == "all")
    equalize(model, x, objective="activation", batches=[x], alpha=alpha, spaces=spaces)
    for (name, ours), theirs in zip(model.named_parameters(), hand.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, msg=name)


def test_predicted_noise_is_a_sum_over_entries() -> None:
    torch.manual_seed(1)
    weight, x = torch.randn(3, 4, dtype=torch.float64), torch.randn(50, 4, dtype=torch.float64)
    sizes = ChannelSizes(
        largest={"w": x.abs().amax(0)[None]},
        mean={"w": x.abs().mean(0)[None]},
        squares={"w": x.square().mean(0)[None]},
        outputs={"w": (0,)},
    )
    result = reader_noise("w", weight, sizes)
    m, top = x.square().mean(0), float(weight.abs().max())
    signal = sum(float(weight[i, j] ** 2 * m[j]) for i in range(3) for j in range(4))
    whole = sum(top**2 * float(m[j]) for _ in range(3) for j in range(4)) / signal
    rows = sum(float(weight[i].abs().max() ** 2 * m[j]) for i in range(3) for j in range(4)) / signal
    inputs = sum(float(x.abs().max() ** 2 * weight[i, j] ** 2) for i in range(3) for j in range(4)) / signal
    assert [result.tensor, result.output, result.inputs] == pytest.approx([whole, rows, inputs])


@pytest.mark.parametrize("way", ["tensor", "output", "inputs"])
def test_predicted_noise_is_what_rounding_makes(way: str) -> None:
    torch.manual_seed(2)
    model, x = nn.Linear(300, 200, bias=False).double(), torch.randn(500, 300).double() * torch.rand(300).double()
    with torch.no_grad():
        model.weight *= torch.rand(200, 1).double()
    sizes = channel_sizes(model, [x])
    predicted = getattr(reader_noise("weight", model.weight.detach(), sizes), way) / (12 * 127**2)

    def rounded(t: Tensor, top: Tensor) -> Tensor:
        return (t * 127 / top).round() * top / 127

    weight = model.weight.detach()
    tops = {"tensor": weight.abs().max(), "output": weight.abs().amax(1, keepdim=True)}
    y = x @ weight.mT
    noisy = rounded(x, x.abs().max()) @ weight.mT if way == "inputs" else x @ rounded(weight, tops[way]).mT
    assert float((noisy - y).square().sum() / y.square().sum()) == pytest.approx(predicted, rel=0.05)


def test_a_space_between_weights_is_moved_only_where_rounding_is_predicted_to_gain() -> None:
    model, x = gated()
    with torch.no_grad():
        # The gate makes one channel of what down reads large. Rounding what down reads gains if the channel is divided;
        # rounding weights loses, for up's row gets small and down's column large.
        model.gate.bias[3] += 40
    laws = symmetries_of(model, x)
    result = {
        rounded: equalize(copy.deepcopy(model), laws=laws, objective="activation", batches=[x], rounded=rounded)
        for rounded in ("both", "weights", "any")
    }
    assert "gated_neurons" in result["both"].moved.moved
    assert result["both"].after["gated_neurons"] < 0.5 * result["both"].before["gated_neurons"]
    for rounded in ("weights", "any"):
        assert "noisier" in result[rounded].skipped["gated_neurons"]
        assert "norm.gain" in result[rounded].moved.moved


def test_what_improves_is_what_is_rounded() -> None:
    now = Noise(tensor=1.0, output=1.0, inputs=10.0)
    traded = Noise(tensor=2.0, output=1.0, inputs=5.0)
    assert traded.improves(now, "both")
    assert not traded.improves(now, "weights")
    assert not traded.improves(now, "any")
    assert Noise(tensor=0.5, output=1.0, inputs=20.0).improves(now, "weights")
    assert not now.improves(now, "both")


def test_each_expert_is_measured_on_its_own_tokens() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = nn.Parameter(torch.randn(3, 4, 8))

        def forward(self, x: Tensor) -> Tensor:
            return torch._grouped_mm(x, self.stack, offs=torch.tensor([2, 2, 6], dtype=torch.int32))

    torch.manual_seed(0)
    x = torch.randn(6, 4)
    try:
        sizes = channel_sizes(Experts(), [x])
    except (RuntimeError, NotImplementedError) as problem:
        pytest.skip(f"grouped products do not run here: {problem}")
    wanted = torch.stack([x[:2].abs().amax(0), torch.zeros(4), x[2:].abs().amax(0)]).double()
    torch.testing.assert_close(sizes.largest["stack"][..., 0], wanted)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [("spaces", "some", "predicted, gains, all"), ("rounded", "x", "any, weights, both"), ("statistic", "min", "mean")],
)
def test_unknown_words_are_refused_before_the_model_runs(option: str, value: str, said: str) -> None:
    model, x = gated()
    unknown: dict[str, Any] = {option: value}
    with pytest.raises(ValueError, match=said):
        equalize(model, x, objective="activation", batches=["the model would fail on this"], **unknown)


def test_the_function_stays() -> None:
    model, x = gated()
    before = model(x)
    done = equalize(model, x, objective="activation", batches=[x])
    assert done.moved.moved
    assert difference(before, model(x)) < 1e-12
