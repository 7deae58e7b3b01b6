"""Moving along symmetries: the function stays, the inverse undoes, and what cannot be moved is refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import float64
from catalogue import named
from conserved import LawSet, Leg, Symmetry, View, recognize
from conserved.discovery.inputs import tensors_in
from conserved.transform import Exchange, UnmovableError, move, symmetries_of
from law_checks import residuals
from tolerances import IDENTITY

pytestmark = pytest.mark.filterwarnings("ignore")

SAMPLE = [
    "nanoGPT, width 4",
    "llama2.c, width 4",
    "ViT by hand",
    "MLP-Mixer, ReLU",
    "experts, grouped bmm",
    "ResNet, batch norm in use",
    "encoder–decoder",
    "LSTM cell by hand",
    "attention, grouped, QK norm, rotary",
]


def outputs(model: nn.Module, args: Any, kwargs: Any) -> Tensor:
    with torch.no_grad(), float64.kept():
        result = [t.flatten() for t in tensors_in(model(*args, **kwargs)) if t.is_floating_point()]
    return torch.cat([t.double() for t in result])


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / a.norm())


def random_elements(laws: LawSet, spread: float = 0.3) -> dict[Symmetry | str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {s.name: s.element(spread=spread, generator=generator) for s in laws if s.exact}


def mlp() -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)), torch.randn(4, 5)


@pytest.mark.parametrize("name", SAMPLE)
def test_all_symmetries_at_once_leave_the_function_and_the_inverse_brings_the_weights_back(name: str) -> None:
    case = named(name).subject()
    case.model.eval()
    laws = symmetries_of(case.model, *case.args, **case.kwargs)
    before, start = outputs(case.model, case.args, case.kwargs), copy.deepcopy(case.model.state_dict())
    done = move(case.model, random_elements(laws), laws=laws)
    assert done.moved
    far = max(difference(start[n], case.model.state_dict()[n]) for n in done.parameters)
    assert far > 0.05
    assert difference(before, outputs(case.model, case.args, case.kwargs)) < 1e-10
    held = residuals(recognize(case.model, *case.args, **case.kwargs), case)
    assert max(held.values()) < 10 * IDENTITY[torch.float64]
    move(case.model, done.inverse)
    assert max(difference(start[n], case.model.state_dict()[n]) for n in done.parameters) < 1e-13


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_a_move_is_rounded_once_in_the_precision_of_the_weights(dtype: torch.dtype, limit: float) -> None:
    torch.manual_seed(0)
    model, args, kwargs = named("llama2.c, width 4").build()
    model = model.to(dtype).eval()
    laws = symmetries_of(model, *args, **kwargs)
    before = outputs(model, args, kwargs)
    weights = {name: p.detach().double() for name, p in model.named_parameters()}
    elements = random_elements(laws)
    exact = move(weights, elements, laws=laws).state
    move(model, elements, laws=laws)
    assert all(torch.equal(p.detach(), exact[name].to(dtype)) for name, p in model.named_parameters())
    assert difference(before, outputs(model, args, kwargs)) < limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_powers_of_two_are_undone_bit_for_bit(dtype: torch.dtype) -> None:
    model, x = mlp()
    model = model.to(dtype)
    (laws,) = symmetries_of(model, x.to(dtype))
    start = copy.deepcopy(model.state_dict())
    done = move(model, {laws: 2.0 ** torch.arange(-3, 4)})
    assert not torch.equal(model[0].weight, start["0.weight"])
    move(model, done.inverse)
    assert all(torch.equal(value, start[name]) for name, value in model.state_dict().items())


def test_laws_before_and_after_are_those_of_the_weights() -> None:
    model, x = mlp()
    laws = symmetries_of(model, x)
    before = laws.values(dtype=torch.float64)
    s = torch.linspace(0.5, 2, 7, dtype=torch.float64)
    done = move(model, {"neurons": s}, laws=laws)
    rows = torch.cat([model[0].weight, model[0].bias[:, None]], 1).double().square().sum(1)
    torch.testing.assert_close(done.before["neurons"], before["neurons"])
    torch.testing.assert_close(
        done.after["neurons"], rows - model[2].weight.double().square().sum(0), rtol=1e-5, atol=1e-6
    )


def test_a_dictionary_is_left_as_it_is_and_tied_names_move_together() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
            self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            return self.head(x + self.down(self.up(x).relu()))

    torch.manual_seed(0)
    model, ids = Tied(), torch.arange(9)[None]
    laws = symmetries_of(model, ids)
    legs = (Leg(View.of("embed.weight", (9, 4), axes=1)),)
    scale = Symmetry(block="", family="test", kind=laws["neurons"].kind, legs=legs)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for given in (model.state_dict(), state):
        before = {name: value.clone() for name, value in given.items()}
        elements: dict[Symmetry | str, Tensor] = {scale: torch.full((4,), 2.0), "neurons": torch.full((6,), 3.0)}
        done = move(given, elements, laws=laws)
        assert all(torch.equal(given[name], before[name]) for name in before)
        assert torch.equal(done.state["head.weight"], 2 * before["embed.weight"])
        assert torch.equal(done.state["embed.weight"], 2 * before["embed.weight"])
        assert done.state["down.bias"] is given["down.bias"]


def test_equal_units_change_places() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))
    x = torch.randn(4, 5)
    views = View.of("0.weight", (7, 5)), View.of("0.bias", (7,)), View.of("2.weight", (3, 7), axes=1)
    legs = tuple(Leg(view) for view in views)
    units = Symmetry(block="", family="units", kind=Exchange(), legs=legs, source="probed")
    before, start = model(x), model[0].weight.detach().clone()
    done = move(model, {units: torch.tensor([3, 1, 0, 2, 6, 5, 4])})
    assert torch.equal(model[0].weight[0], start[3])
    torch.testing.assert_close(model(x), before)
    assert "not by a proof" in done.notes[0]
    move(model, done.inverse)
    assert torch.equal(model[0].weight, start)


def test_frozen_parameters_are_moved_and_stay_frozen() -> None:
    model, x = mlp()
    model.train().requires_grad_(False)
    laws = symmetries_of(model, x)
    assert [s.name for s in laws] == ["neurons"]
    assert model.training
    move(model, {"neurons": torch.full((7,), 1.5)}, laws=laws)
    assert not any(p.requires_grad for p in model.parameters())


class TestRefused:
    """What cannot be moved, with the name of what it is."""

    @pytest.mark.parametrize(
        ("element", "words"),
        [
            (-torch.ones(7), "positive"),
            (torch.ones(6), "shape"),
            (torch.full((7,), float("nan")), "finite"),
            (torch.ones(7, dtype=torch.complex64), "complex"),
        ],
        ids=["negative", "shape", "nan", "complex"],
    )
    def test_no_element_of_the_group(self, element: Tensor, words: str) -> None:
        model, x = mlp()
        with pytest.raises(UnmovableError, match=f"neurons.*{words}|{words}.*neurons"):
            move(model, {"neurons": element}, laws=symmetries_of(model, x))

    def test_a_singular_matrix(self) -> None:
        model: Any = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
        laws = symmetries_of(model, torch.randn(2, 5))
        with pytest.raises(UnmovableError, match=r"linear_pair.*condition"):
            move(model, {"linear_pair": torch.ones(4, 4)}, laws=laws)

    def test_a_name_that_is_not_there(self) -> None:
        model, x = mlp()
        with pytest.raises(UnmovableError, match=r"no symmetry 'heads' among the 1"):
            move(model, {"heads": torch.ones(7)}, laws=symmetries_of(model, x))
        with pytest.raises(UnmovableError, match=r"Pass laws="):
            move(model, {"neurons": torch.ones(7)})

    @pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
    def test_codes_of_a_quantiser(self, dtype: torch.dtype) -> None:
        model, x = mlp()
        state = model.state_dict() | {"2.weight": model[2].weight.detach().to(dtype)}
        with pytest.raises(UnmovableError, match=rf"2\.weight is stored as {dtype}"):
            move(state, {"neurons": torch.ones(7)}, laws=symmetries_of(model, x))

    def test_weights_without_values_or_missing(self) -> None:
        model, x = mlp()
        laws = symmetries_of(model, x)
        state: dict[str, Tensor] = dict(model.state_dict())
        with pytest.raises(UnmovableError, match=r"got 2\.weight on the meta device"):
            move(state | {"2.weight": state["2.weight"].to("meta")}, {"neurons": torch.ones(7)}, laws=laws)
        with pytest.raises(UnmovableError, match=r"without 0\.weight.*There is module\.0\.weight"):
            move({f"module.{n}": t for n, t in state.items()}, {"neurons": torch.ones(7)}, laws=laws)

    def test_memory_that_is_shared_in_part(self) -> None:
        model, x = mlp()
        laws = symmetries_of(model, x)
        model[2].bias.data = model[0].bias.data[:3]
        with pytest.raises(UnmovableError, match=r"0\.bias shares part of its memory with 2\.bias"):
            move(model, {"neurons": torch.ones(7)}, laws=laws)

    def test_a_weight_that_would_overflow_and_nothing_of_its_group_is_written(self) -> None:
        model, x = mlp()
        laws = symmetries_of(model, x)
        model = model.half()
        start = copy.deepcopy(model.state_dict())
        with pytest.raises(UnmovableError, match=r"0\.weight leaves the range of torch\.float16"):
            move(model, {"neurons": torch.full((7,), 1e6)}, laws=laws)
        assert all(torch.equal(value, start[name]) for name, value in model.state_dict().items())


def test_what_holds_for_the_loss_only_or_up_to_epsilon_is_said() -> None:
    torch.manual_seed(0)
    model, args, kwargs = named("llama2.c, width 4").build()
    laws = recognize(model, *args, loss="cross_entropy", **kwargs)
    chosen = {s.name: s.element() for s in laws if s.family in ("class_shift", "stream_scale")}
    text = " ".join(move(model, chosen, laws=laws).notes)
    assert "up to a norm's ε" in text
    untied = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5))
    laws = recognize(untied, torch.zeros(2, 3), loss="cross_entropy")
    done = move(untied, {s.name: s.element() for s in laws}, laws=laws)
    assert "not the outputs" in done.notes[0]
