"""Coverage counts what identities see: directions of gradients, and not the entries that a law touches."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved import audit, recognize
from conserved.laws.coverage import constrained_directions
from conserved.symmetry import Symmetry


class Router(nn.Module):
    """A trained softmax router over frozen experts."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(12, experts, bias=False)
        self.experts = nn.Parameter(torch.randn(experts, 12, 5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("ne,nd,edo->no", self.gate(x).softmax(-1), x, self.experts)


class Gated(nn.Module):
    """A gated feedforward, whose up and down projections one identity for each neuron compares."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(a, b, bias=False) for a, b in ((6, 9), (6, 9), (9, 6)))

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return down


def test_a_router_with_gradients_of_other_samples_is_not_ok() -> None:
    """The sum over experts vanishes for any gradient that went through a softmax, whatever the samples were."""
    torch.manual_seed(0)
    model, x, other = Router(8), torch.randn(32, 12), torch.randn(32, 12)
    laws = recognize(model, x)
    model(other).sin().sum().backward()
    result = audit(model, laws)
    assert not result.failures
    assert result.coverage.touched == 1, "what coverage said before: all of it"
    assert result.coverage.parameters == pytest.approx(1 / 8)
    assert result.coverage.directions == pytest.approx(1 / 8)
    assert not result.ok
    assert result.reason == "12 % of the trained entries were tested to 10 % or better; ok needs 50 %."


def test_a_class_shift_over_many_rows_sees_one_direction_in_as_many() -> None:
    head = nn.Linear(3, 4000, bias=False)
    laws = recognize(head, torch.randn(2, 3), loss="cross_entropy")
    assert float(laws.coverage) == 1.0
    assert laws.coverage.directions == pytest.approx(1 / 4000)


def test_identities_of_several_legs_count_for_all_entries_and_say_how_few_directions_they_see() -> None:
    torch.manual_seed(0)
    model, x = Gated(), torch.randn(16, 6)
    laws = recognize(model, x)
    model(x).sin().sum().backward()
    result = audit(model, laws)
    assert result.coverage.seen == pytest.approx({"gate.weight": 0, "up.weight": 1 / 6, "down.weight": 1 / 6})
    assert result.coverage.parameters == pytest.approx(2 / 3)
    assert result.ok
    assert result.reason == ""
    assert "11 % of their gradients' directions" in str(result.coverage)


def _rank(symmetries: tuple[Symmetry, ...], parameters: dict[str, Tensor], name: str) -> int:
    """The rank of G ↦ μ(θ, G) over the gradient of one parameter, by every entry in turn."""
    columns = []
    for index in range(parameters[name].numel()):
        gradients = {key: torch.zeros_like(value) for key, value in parameters.items()}
        gradients[name].view(-1)[index] = 1
        columns.append(torch.cat([each.identity(parameters, gradients).flatten() for each in symmetries]))
    return int(torch.linalg.matrix_rank(torch.stack(columns)))


@pytest.mark.parametrize("heads", [1, 2])
def test_the_count_of_directions_is_the_rank_up_to_few(heads: int) -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, heads, 10, batch_first=True, dtype=torch.float64, dropout=0.0)
    laws = recognize(model, torch.randn(2, 5, 8, dtype=torch.float64))
    for parameter in model.parameters():
        nn.init.normal_(parameter)  # a bias of zeros takes part in fewer identities
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    counts = constrained_directions(laws.symmetries, {name: value.numel() for name, value in parameters.items()})
    exact = {name: _rank(tuple(laws.symmetries), parameters, name) for name in parameters}
    for name, rank in exact.items():
        assert rank <= counts[name] <= 1.1 * rank + 2, (name, rank, counts[name])
