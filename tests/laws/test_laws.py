"""A law set evaluates, compares, counts and stores all its laws at once."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conserved import Leg, Symmetry, Verdict, View, blocks, recognize
from conserved.laws import LawSet
from conserved.symmetry import GeneralLinear, Scaling
from test_recognize_blocks import gradients
from tolerances import AGREE
from zoo import LAWFUL, Case, ids, named


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("case", LAWFUL, ids=ids)
def test_batched_values_are_those_of_one_symmetry_at_a_time(case: Case, dtype: torch.dtype) -> None:
    model = case.model(dtype=dtype)
    laws = case.laws(model)
    theta = {name: parameter.detach() for name, parameter in model.named_parameters()}
    values = laws.values()
    for symmetry in laws:
        alone = symmetry.law(theta)
        assert values[symmetry.name].dtype == dtype
        assert torch.allclose(values[symmetry.name], alone, rtol=AGREE[dtype], atol=AGREE[dtype]), symmetry


@pytest.mark.parametrize("case", LAWFUL, ids=ids)
def test_batched_identities_and_drift_are_those_of_one_symmetry_at_a_time(case: Case) -> None:
    model = case.model()
    laws = case.laws(model)
    theta = {name: parameter.detach() for name, parameter in model.named_parameters()}
    other = {name: torch.randn_like(tensor) for name, tensor in theta.items()}
    identities, drifts = laws.identities(other), laws.drift(other)
    for symmetry in laws:
        assert torch.allclose(identities[symmetry.name], symmetry.identity(theta, other)), symmetry
        assert torch.allclose(drifts[symmetry.name], symmetry.drift(theta, other)), symmetry


def test_symmetries_that_skip_a_head_are_still_evaluated_right() -> None:
    model = named("attention, grouped, four heads on two").model()
    laws = recognize(model).select(lambda s: s.part == "1")
    theta = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert len(laws) == 2
    for name, value in laws.values().items():
        assert torch.allclose(value, laws[name].law(theta))


def test_heads_of_a_layer_and_layers_of_a_shape_are_one_batch() -> None:
    small = recognize(blocks.DecoderLM(16, 8, 6, 2, 8))
    assert len(small.symmetries) == 2 + 6 * (2 + 2 + 2 + 1)
    assert sum(map(len, small.plan.units)) < 10


def test_values_can_be_had_in_another_precision() -> None:
    laws = recognize(named("attention").model(dtype=torch.float32))
    assert {value.dtype for value in laws.values(dtype=torch.float64).values()} == {torch.float64}


def test_values_follow_training() -> None:
    model = named("SwiGLU").model()
    laws = recognize(model)
    before = laws.values()["gated_neurons"]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    assert torch.allclose(laws.values()["gated_neurons"], 4 * before)
    assert not before.requires_grad


class TestBlockErrors:
    """Equation (10), and its rule for reference values that are zero."""

    def pair(self, rows: list[list[float]], columns: list[list[float]]) -> tuple[LawSet, dict[str, Tensor]]:
        theta = {"a": torch.tensor(rows, dtype=torch.float64), "b": torch.tensor(columns, dtype=torch.float64)}
        legs = (Leg(View.of("a", theta["a"].shape)), Leg(View.of("b", theta["b"].shape), -1))
        return LawSet(symmetries=(Symmetry(block="x", family="y", kind=Scaling(), legs=legs),), parameters=theta), theta

    def test_is_the_mean_of_relative_deviations(self) -> None:
        laws, theta = self.pair([[2.0], [3.0]], [[1.0], [1.0]])  # h = 3, 8
        reference = laws.reference()
        theta["a"][:, 0] = torch.tensor([2.5, 3.0])  # h = 5.25, 8
        assert laws.errors(reference) == {"x": pytest.approx((2.25 / 3 + 0) / 2)}

    def test_a_balanced_law_is_measured_against_its_terms(self) -> None:
        laws, theta = self.pair([[2.0]], [[2.0]])  # h = 0, terms 8
        reference = laws.reference()
        theta["a"][0, 0] = 3.0  # h = 5
        assert laws.errors(reference)["x"] == pytest.approx(5 / 8)

    def test_a_law_of_zeros_is_measured_absolutely(self) -> None:
        laws, theta = self.pair([[0.0]], [[0.0]])
        reference = laws.reference()
        assert laws.errors(reference)["x"] == 0
        theta["a"][0, 0] = 0.5
        assert laws.errors(reference)["x"] == pytest.approx(0.25)

    def test_a_factor_that_starts_at_zero_has_an_ordinary_reference(self) -> None:
        laws, theta = self.pair([[2.0]], [[0.0]])  # like the two factors of an adapter: h = 4
        reference = laws.reference()
        theta["b"][0, 0] = 1.0
        assert laws.errors(reference)["x"] == pytest.approx(1 / 4)

    def test_every_law_can_be_measured_against_its_terms(self) -> None:
        laws, theta = self.pair([[2.0]], [[1.0]])  # h = 3, terms 5
        reference = laws.reference()
        theta["a"][0, 0] = 3.0
        assert laws.errors(reference, relative_to="scale")["x"] == pytest.approx(5 / 5)

    def test_a_matrix_law_counts_once_by_its_frobenius_norm(self) -> None:
        theta = {"a": torch.eye(2, dtype=torch.float64)}
        symmetry = Symmetry(block="x", family="y", kind=GeneralLinear(), legs=(Leg(View.of("a", (2, 2))),))
        laws = LawSet(symmetries=(symmetry,), parameters=theta)
        reference = laws.reference()
        theta["a"] *= 2
        assert laws.errors(reference, by="law")["x.y"] == pytest.approx(3)

    def test_errors_are_grouped_by_block_family_or_law(self) -> None:
        laws = recognize(named("pre-norm block").model())
        reference = laws.reference()
        assert set(laws.errors(reference)) == {s.block for s in laws}
        assert set(laws.errors(reference, by="family")) == {s.family for s in laws}
        assert set(laws.errors(reference, by="law").values()) == {0.0}


class TestIndependence:
    """The rank of all gradients, at the parameters."""

    def test_repeated_laws_count_once(self) -> None:
        case = named("decoder, layer norm")
        tokens = case.sample(torch.Generator().manual_seed(0))
        laws = recognize(case.model(), tokens, loss="cross_entropy")
        twice = [replace(symmetry, part=f"{symmetry.part}again") for symmetry in laws]
        both = LawSet(symmetries=(*laws, *twice), parameters=laws.parameters)
        assert both.numbers == 2 * laws.numbers
        assert both.independent() == laws.independent() == case.conserved

    def test_laws_of_parameters_that_are_zero_do_not_count(self) -> None:
        model = blocks.FeedForward(3, 2, "linear")
        torch.nn.init.zeros_(model.down.weight)
        torch.nn.init.zeros_(model.up.weight)
        assert recognize(model).independent() == 0

    def test_a_factor_of_rank_one_gives_fewer_independent_laws(self) -> None:
        model = blocks.FeedForward(3, 3, "linear")
        with torch.no_grad():
            model.up.weight.copy_(torch.ones(3, 3))
            model.down.weight.zero_()
        # Dh[δ] = A δᵀ + δ Aᵀ with A = 1 1ᵀ reaches only the matrices 1 wᵀ + w 1ᵀ.
        assert recognize(model).numbers == 6
        assert recognize(model).independent() == 3

    def test_other_parameters_can_be_given(self) -> None:
        laws = recognize(named("attention").model())
        zeros = {name: torch.zeros_like(p) for name, p in laws.parameters.items()}
        assert laws.independent(zeros) == 0

    def test_too_large_a_model_is_refused_with_its_size(self) -> None:
        with pytest.raises(ValueError, match=r"GB.*narrower model"):
            recognize(blocks.DecoderLM(1000, 256, 2, 4, 512)).independent()


HOSTILE_FILES = {
    "not UTF-8": b'{"format": "\xff"}',
    "nested deeply": b'{"format": ' + b"[" * 200_000,
    "5,000 digits": b'{"format": "conserved/laws/1", "symmetries": ' + b"9" * 5000 + b"}",
    "half a character": b'{"format": "conserved/laws/1", "symmetries": [], "unclaimed": ["\\ud800"], "dropped": []}',
    "a number for a list": b'{"format": "conserved/laws/1", "symmetries": 3, "unclaimed": [], "dropped": []}',
    "a list of lists": b'{"format": "conserved/laws/1", "symmetries": [[]], "unclaimed": [], "dropped": []}',
    "nothing": b"",
}


def _places(data: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every way from the top of a JSON value to something in it."""
    inside = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in inside:
        yield (*way, key)
        yield from _places(value, (*way, key))


class TestFiles:
    """Laws can be stored and read back; weights are never part of it."""

    @pytest.mark.parametrize("case", LAWFUL, ids=ids)
    def test_what_is_saved_comes_back(self, case: Case, tmp_path: Path) -> None:
        laws = case.laws(case.model())
        laws.save(tmp_path / "laws.json")
        again = LawSet.load(tmp_path / "laws.json", laws.parameters)
        assert again.symmetries == laws.symmetries
        assert (again.unclaimed, again.dropped) == (laws.unclaimed, laws.dropped)
        assert all(torch.equal(again.values()[name], value) for name, value in laws.values().items())

    @pytest.mark.parametrize(
        ("content", "message"),
        [("not json", "Expected a JSON file"), ("[]", "got a list"), ('{"format": "other/9"}', "Expected a law set")],
        ids=["text", "a list", "another format"],
    )
    def test_other_files_are_refused(self, content: str, message: str, tmp_path: Path) -> None:
        (tmp_path / "laws.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            LawSet.load(tmp_path / "laws.json")

    @pytest.mark.usefixtures("as_users_run_it")
    @pytest.mark.parametrize("content", HOSTILE_FILES.values(), ids=HOSTILE_FILES)
    def test_hostile_files_end_in_one_line_that_names_them(self, content: bytes, tmp_path: Path) -> None:
        (tmp_path / "hostile.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"hostile\.json") as refused:
            LawSet.load(tmp_path / "hostile.json")
        assert "\n" not in str(refused.value)
        assert len(str(refused.value)) < 1000
        str(refused.value).encode()

    @pytest.mark.usefixtures("as_users_run_it")
    def test_a_file_with_one_value_changed_is_read_or_named(self, tmp_path: Path) -> None:
        """Six hundred changes anywhere in a file of every kind of law: nothing but a ValueError that names it."""
        chance = random.Random(0)
        laws = recognize(blocks.DecoderLM(8, 4, 1, 2, 3, kv_heads=1), loss="cross_entropy")
        original = json.dumps(laws.record())
        strange: list[Any] = [None, True, "x", "\ud800", -1, 0, 1.5, 10**400, 1e300, math.nan, [], {}, [[]], [1, 2, 3]]
        refused: list[str] = []
        for _ in range(600):
            data = json.loads(original)
            *way, last = chance.choice(list(_places(data)))
            inside = data
            for step in way:
                inside = inside[step]
            inside[last] = chance.choice(strange)
            (tmp_path / "hostile.json").write_text(json.dumps(data))
            try:
                LawSet.load(tmp_path / "hostile.json").summary()
            except ValueError as problem:
                refused.append(str(problem))
        assert 300 < len(refused) < 600
        assert all("hostile.json" in message for message in refused)

    def test_a_grid_of_many_places_takes_no_memory(self) -> None:
        """Two heads out of 2⁴⁰ are read one by one; the others are not listed to find that out."""
        shape = (1 << 40, 2, 2)
        views = [View.of("w", shape, axes=1, pick={0: head}) for head in (0, 5)]
        laws = LawSet(
            symmetries=tuple(
                Symmetry(block="", family="f", part=str(n), kind=Scaling(), legs=(Leg(view),))
                for n, view in enumerate(views)
            )
        )
        assert len(laws.plan.batches) == 2

    def test_an_unknown_kind_is_named(self) -> None:
        data = recognize(named("attention").model()).record()
        data["symmetries"][0]["kind"] = "affine"
        with pytest.raises(ValueError, match=r"Expected a kind among .*, got 'affine'"):
            LawSet.from_dict(data)

    def test_a_loaded_set_without_parameters_says_what_it_needs(self, tmp_path: Path) -> None:
        recognize(named("SwiGLU").model()).save(tmp_path / "laws.json")
        with pytest.raises(ValueError, match=r"the parameters of gated_neurons, got \d+ tensors without down\.weight"):
            LawSet.load(tmp_path / "laws.json").values()

    def test_the_file_is_plain_data(self) -> None:
        data = recognize(named("attention, rotary").model()).record()
        assert json.loads(json.dumps(data)) == data


class TestVerify:
    """One backward pass tells whether the recognised symmetries are those of the model."""

    @pytest.mark.parametrize("case", LAWFUL, ids=ids)
    def test_a_right_recognition_is_verified(self, case: Case) -> None:
        model = case.model(epsilon=1e-6)
        assert case.laws(model).verify(lambda: case.objective()(model)) == Verdict.VERIFIED

    def test_a_model_that_computes_something_else_is_refuted(self) -> None:
        model = named("SwiGLU").model()
        laws = recognize(model)
        verdict = laws.verify(
            lambda: model(torch.ones(3, dtype=torch.float64)).sum() + model.get_parameter("up.weight").sum()
        )
        assert verdict == Verdict.REFUTED
        assert "gated_neurons" in str(verdict)

    def test_a_leg_without_gradient_is_refuted_when_the_other_has_one(self) -> None:
        model = named("SwiGLU").model()
        verdict = recognize(model).verify(lambda: model.get_parameter("up.weight").square().sum())
        assert verdict == Verdict.REFUTED

    def test_nothing_to_verify_is_inconclusive(self) -> None:
        model = named("GELU FFN").model()
        assert recognize(model).verify(lambda: model(torch.ones(3, dtype=torch.float64)).sum()) == Verdict.INCONCLUSIVE

    def test_a_loss_that_is_not_finite_is_inconclusive(self) -> None:
        model = named("SwiGLU").model()
        verdict = recognize(model).verify(lambda: model(torch.ones(3, dtype=torch.float64)).sum() / 0)
        assert verdict == Verdict.INCONCLUSIVE

    def test_a_loss_that_reaches_no_leg_is_inconclusive(self) -> None:
        model = named("SwiGLU").model()
        verdict = recognize(model).verify(lambda: model.get_parameter("gate.weight").sum())
        assert verdict == Verdict.INCONCLUSIVE
        assert "No gradient reached" in verdict.message


def test_identities_need_a_backward_pass() -> None:
    with pytest.raises(ValueError, match=r"Expected a gradient of .* Call backward"):
        recognize(named("SwiGLU").model()).identities()


def test_identities_read_the_gradients_that_backward_left() -> None:
    case = named("SwiGLU")
    model = case.model()
    case.objective()(model).backward()
    laws = recognize(model)
    assert torch.equal(laws.identities()["gated_neurons"], laws.identities(gradients(model))["gated_neurons"])


def test_an_unknown_law_is_named() -> None:
    with pytest.raises(KeyError, match="the name of a law, got 'nonsense'"):
        recognize(named("SwiGLU").model())["nonsense"]


def test_two_symmetries_of_one_name_are_refused() -> None:
    symmetry = Symmetry(block="x", family="y", kind=Scaling(), legs=(Leg(View.of("a", (2, 2))),))
    with pytest.raises(ValueError, match="Expected unique names of symmetries"):
        LawSet(symmetries=(symmetry, symmetry))


def test_each_law_has_a_name_a_formula_and_a_count() -> None:
    laws = recognize(named("attention").model()).laws
    assert len(laws) == 4
    assert laws[0].formula == "q.weight[0:2]·q.weight[0:2]ᵀ − k.weight[0:2]·k.weight[0:2]ᵀ"
    assert laws[0].exact


def test_the_summary_folds_layers_and_lists_what_is_left_out() -> None:
    model = blocks.DecoderLM(16, 8, 3, 2, 8)
    model.get_submodule("layers.1.feedforward").requires_grad_(False)
    text = recognize(model).summary()
    assert "layers.{0–2}.attention" in text
    assert "layers.{0,2}.feedforward" in text
    assert "embedding.weight: mean in layers.0.norm1." in text
    assert "up to ε" in recognize(blocks.DecoderLM(16, 8, 3, 2, 8)).summary()
