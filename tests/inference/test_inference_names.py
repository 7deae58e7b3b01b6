"""What inferred laws are called, what is said of parameters without one, and laws that needed a rule of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from conserved import LawSet, recognize
from conserved.symmetry import Symmetry


def law(laws: LawSet, family: str) -> Symmetry:
    """The one law of a family."""
    (result,) = (symmetry for symmetry in laws if symmetry.family == family)
    return result


def test_inert_biases_of_a_fused_map_are_one_law() -> None:
    class Attending(nn.Module):
        def __init__(self, **options: bool) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(4, 2, batch_first=True, **options)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, x, x, need_weights=False)[0]

    x = torch.randn(2, 3, 4)
    plain = law(recognize(Attending(), x), "inert_bias")
    assert (plain.name, plain.numbers) == ("inner.inert_bias", 4)
    extra = law(recognize(Attending(add_bias_kv=True), x), "inert_bias")
    assert [leg.view.parameter for leg in extra.legs] == ["inner.in_proj_bias", "inner.bias_k"]
    assert recognize(Attending(add_zero_attn=True), x).independent() == 12


def test_positions_are_one_law_at_whatever_scale_they_are_added() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.position = nn.Embedding(5, 4), nn.Embedding(3, 4)
            self.out = nn.Linear(4, 2)

        def forward(self, index: Tensor) -> Tensor:
            return self.out((self.token(index) + 0.5 * self.position(torch.arange(3))).tanh())

    result = law(recognize(Tokens(), torch.zeros(2, 3, dtype=torch.int64)), "positions")
    assert result.numbers == 4
    assert sorted(abs(leg.degree) for leg in result.legs) == [1, 2] or sorted(abs(x.degree) for x in result.legs) == [
        0.5,
        1,
    ]


def test_a_partner_that_is_frozen_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model[2].weight.requires_grad_(False)
    laws = recognize(model, torch.randn(3, 4))
    reasons = {dropped.name: dropped.reason for dropped in laws.dropped}
    assert "2.weight is frozen" in reasons["0.weight"]
    assert "is frozen" not in reasons["2.bias"]


def test_entries_whose_scales_are_free_one_by_one_are_inert() -> None:
    """A row with one weight in front of a norm without ε has no gradient at all: a law of shifts, not of scales."""
    model = nn.Sequential(nn.Conv1d(1, 4, 1, bias=False), nn.LayerNorm(6, eps=0.0)).double()
    result = law(recognize(model, torch.randn(2, 1, 6, dtype=torch.float64)), "inert")
    assert result.kind.linear
    assert result.numbers == 4


def test_whole_numbers_among_parameters_are_left_alone() -> None:
    def quantised(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return x @ (p["codes"].double() * p["scale"]).T @ p["out"]

    parameters = {"codes": torch.ones(4, 3, dtype=torch.int8), "scale": torch.ones(4, 1), "out": torch.ones(4, 2)}
    laws = recognize(
        quantised, {k: v if k == "codes" else v.double() for k, v in parameters.items()}, torch.randn(5, 3).double()
    )
    assert laws.numbers == 4


def test_a_threshold_that_is_not_zero_fixes_the_scale() -> None:
    def kept(p: dict[str, Tensor], x: Tensor) -> Tensor:
        y = x * p["a"]
        y = torch.where(y > 0.2, y, torch.zeros_like(y))
        return y / y.norm()

    assert recognize(kept, {"a": torch.ones(1)}, torch.randn(5)).numbers == 0


def test_parts_of_a_stack_of_experts_are_used_one_by_one() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Parameter(torch.randn(3, 4, 2)), nn.Parameter(torch.randn(3, 2, 4))

        def forward(self, x: Tensor) -> Tensor:
            return sum((x @ self.up[n]) @ self.down[n] for n in range(3))  # type: ignore[return-value]

    assert recognize(Experts(), torch.randn(5, 4)).independent() == 9
