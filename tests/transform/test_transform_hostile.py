"""Moves that must not happen: false symmetries, weights out of range, codes of quantisers, runs that were stopped."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from conserved import recognize
from conserved.symmetry import Leg, Scaling, Symmetry
from conserved.symmetry.view import View
from conserved.transform import (
    Checkpoint,
    Exchange,
    UnmovableError,
    align,
    canonical,
    equalize,
    exchanges,
    fingerprint,
    move,
    symmetries_of,
)
from conserved.transform.coupling import rotatable
from conserved.transform.finding import example_call
from nano_gpt import NanoGPT
from test_cli import run
from test_transform_align import scrambled
from test_transform_checkpoint import saved
from test_transform_move import difference

pytestmark = pytest.mark.filterwarnings("ignore")

IDS = torch.arange(1, 9)[None]
SMALL: dict[str, Any] = {
    "vocab_size": 30,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
}


def from_config(name: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SMALL | changes)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def relu_net(hidden: int = 8, dtype: torch.dtype = torch.float64) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, hidden), nn.ReLU(), nn.Linear(hidden, 3)).to(dtype), torch.randn(5, 6).to(dtype)


class Attention(nn.Module):
    """Two heads, with a norm that has no gain."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(5, 8), nn.Linear(8, 3)
        self.norm = nn.LayerNorm(8, elementwise_affine=False)
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        q, k, v = (f(self.norm(x)).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head(self.norm(x + self.o(mixed)))


def attention() -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    return Attention().double(), torch.randn(2, 5, 5, dtype=torch.float64)


class TestFalseSymmetriesAreNotTaken:
    """What is probed is moved by elements that make the whole group, and outputs have to see it."""

    def test_units_of_two_that_rotary_angles_or_norms_tell_apart(self) -> None:
        model = from_config("Qwen3").double()
        result = exchanges(model, input_ids=IDS)
        before = model(IDS).logits
        for unit in result:
            moved = copy.deepcopy(model)
            move(moved, {unit: torch.arange(unit.n).flip(0)})
            assert difference(before, moved(IDS).logits) < 1e-6, unit.name

    def test_rotations_of_two_rows_inside_a_head(self) -> None:
        model = from_config("Qwen3").double()
        before = model(IDS).logits
        equalize(model, input_ids=IDS, objective="incoherent")
        assert difference(before, model(IDS).logits) < 1e-6

    def test_what_outputs_do_not_see(self) -> None:
        model, x = relu_net()
        nn.init.zeros_(model[2].weight)
        assert exchanges(model, x) == []
        model.requires_grad_(False).apply(lambda m: [p.zero_() for p in m.parameters()])
        assert rotatable(model, example_call(model, (x,), {}), symmetries_of(model, x))[0] == []

    def test_padding_is_a_row_like_any_of_a_function(self) -> None:
        model = from_config("Llama", pad_token_id=0, tie_word_embeddings=False).double()
        ids = torch.tensor([[0, 3, 0, 5]])
        before = model(ids).logits
        done = equalize(model, input_ids=ids, objective="incoherent")
        assert "rotation[0]" in done.moved.moved
        assert difference(before, model(ids).logits) < 1e-6
        assert model.model.embed_tokens.padding_idx == 0
        assert "forward" not in vars(model.model.embed_tokens)

    def test_shifts_of_logits_when_checkpoints_are_compared(self) -> None:
        model, x = relu_net()
        laws = recognize(model, x, loss="cross_entropy")
        assert any(s.family == "class_shift" for s in laws)
        other = copy.deepcopy(model)
        with torch.no_grad():
            other[2].bias.add_(1.0)
        before = other(x)
        align(model, other, laws=laws)
        torch.testing.assert_close(other(x), before)


class TestWeightsOutOfRange:
    """They stay as they are, by name, and so does all that moves with them; the rest is moved."""

    @pytest.mark.parametrize("number", [float("nan"), float("inf")])
    @pytest.mark.parametrize("objective", ["balanced", "range", "incoherent"])
    def test_not_finite(self, objective: str, number: float) -> None:
        model, x = attention()
        laws = symmetries_of(model, x)
        with torch.no_grad():
            model.q.weight[1, 1] = number
        held = copy.deepcopy(model.state_dict())
        done = equalize(model, laws=laws, objective=objective)
        assert any("q.weight has entries that are not finite" in why for why in done.skipped.values())
        assert "v.weight" in done.moved.parameters
        for name in ("q.weight", "k.weight"):
            torch.testing.assert_close(model.state_dict()[name], held[name], rtol=0, atol=0, equal_nan=True)
        (pair, *_) = (s for s in laws if s.family == "query_key")
        with pytest.raises(UnmovableError, match=r"q\.weight has entries that are not finite"):
            move(model, {pair: pair.element()})

    def test_too_large_for_half_precision(self) -> None:
        model, x = relu_net(dtype=torch.float16)
        laws = symmetries_of(copy.deepcopy(model).float(), x.float())
        with torch.no_grad():
            model[0].weight[0] *= 1e-4
            model[0].bias[0] = 3000
            model[2].weight[:, 0] *= 100
        held = copy.deepcopy(model.state_dict())
        done = equalize(model, laws=laws, objective="range")
        assert "0.bias leaves the range of torch.float16" in done.skipped["neurons"]
        assert all(torch.equal(held[name], value) for name, value in model.state_dict().items())

    def test_too_small_for_half_precision(self) -> None:
        model, x = relu_net(dtype=torch.float16)
        (neurons,) = symmetries_of(copy.deepcopy(model).float(), x.float())
        with torch.no_grad():
            model[0].weight[3] *= 1e-3
            model[0].bias[3] *= 1e-3
        scales = torch.ones(8)
        scales[3] = 2.0**-14
        with pytest.raises(UnmovableError, match=r"0\.weight .* too small for torch\.float16"):
            move(model, {neurons: scales})
        scales[3] = 2.0**-2
        move(model, {neurons: scales})

    def test_roots_of_quotients_that_overflow(self) -> None:
        model, x = relu_net()
        with torch.no_grad():
            model[0].weight[3] *= 1e200
            model[2].weight[:, 3] *= 1e-200
        before = model(x)
        done = equalize(model, x, objective="range")
        assert done.after["neurons"] < 1 < done.before["neurons"]
        torch.testing.assert_close(model(x), before)


@pytest.mark.usefixtures("as_users_run_it")
def test_elements_of_another_kind_are_refused() -> None:
    """No types are checked here: people who type by hand have none."""
    model, x = relu_net()
    (neurons,) = symmetries_of(model, x)
    wrong: list[tuple[dict[Any, Any], str]] = [
        ({neurons: torch.ones(8, dtype=torch.complex64)}, "complex"),
        ({neurons: "abc"}, "to be a tensor of numbers"),
        ({neurons: None}, "to be a tensor of numbers"),
        ({3: torch.ones(8)}, "symmetries or their names as keys of elements, got 3"),
    ]
    for elements, sentence in wrong:
        with pytest.raises(ValueError, match=sentence):
            move(model, elements)


def test_orders_are_whole_numbers() -> None:
    model, x = relu_net()
    (units,) = exchanges(model, x)
    assert isinstance(units.kind, Exchange)
    with pytest.raises(UnmovableError, match="lists each of 0 … 7 once"):
        move(model, {units: torch.arange(8) + 0.5})
    move(model, {units: torch.arange(8.0).flip(0)})


def test_dictionaries_may_hold_more_than_weights_and_not_other_shapes() -> None:
    model, x = relu_net()
    laws = symmetries_of(model, x)
    state = {**model.state_dict(), "0._extra_state": "anything"}
    done = equalize(state, laws=laws)
    assert done.state["0._extra_state"] == "anything"
    assert set(canonical(state, laws=laws)) == set(state)
    with pytest.raises(UnmovableError, match=r"0\.weight has shape \(7, 6\), and \(8, 6\) in the model"):
        move(relu_net(7)[0], {s: s.element() for s in laws})
    with pytest.raises(UnmovableError, match=r"has shape \(7, 6\), and \(8, 6\)"):
        align(relu_net(7)[0], model, x)


def test_codes_of_a_quantiser_are_refused_by_name_in_every_way() -> None:
    class Codes(nn.Parameter):
        """A parameter of a kind of its own."""

    model, x = attention()
    laws = symmetries_of(model, x)
    model.v.weight = Codes(model.v.weight.data)
    for go in (lambda: canonical(model, laws=laws), lambda: fingerprint(model, laws=laws)):
        with pytest.raises(UnmovableError, match=r"v\.weight is stored as Codes"):
            go()
    with pytest.raises(UnmovableError, match=r"v\.weight is stored as Codes"):
        align(model, copy.deepcopy(model), laws=laws)
    assert not any("v.weight" in unit.parameters for unit in exchanges(model, x, laws=laws))


def test_batches_are_a_list() -> None:
    model, x = relu_net()
    with pytest.raises(ValueError, match="Put it in a list"):
        equalize(model, x, objective="activation", batches=x)


class TestCheckpointsOfOneOrbit:
    """They have one representative, and are brought together from wherever they are."""

    @pytest.mark.parametrize("name", ["no gains", "GPT"])
    def test_models_on_which_going_round_gets_stuck(self, name: str) -> None:
        if name == "GPT":
            torch.manual_seed(0)
            model: Any = NanoGPT(vocab=20, length=8, width=16, heads=2, hidden=32, depth=2).double().eval()
            x = torch.randint(0, 20, (2, 7))
        else:
            model, x = attention()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        laws, swaps = symmetries_of(model, x), exchanges(model, x)
        other = scrambled(model, laws, swaps)
        a, b = (canonical(one, laws=laws, exchanges=swaps) for one in (model, other))
        assert max(difference(a[n], b[n]) for n in a) < 1e-8
        again = canonical(a, laws=laws, exchanges=swaps)
        assert max(difference(a[n], again[n]) for n in a) < 1e-8
        before = copy.deepcopy(other)
        result = align(model, other, x)
        assert result.after < 1e-7 * result.before
        with torch.no_grad():
            assert difference(model(x), other(x)) < 1e-10
        for symmetry, element in result.steps:
            move(before, {symmetry: element})
        assert max(difference(p, q) for p, q in zip(other.parameters(), before.parameters(), strict=True)) < 1e-9

    def test_two_models_are_enough_and_an_equal_one_stays(self) -> None:
        model, x = relu_net()
        assert align(model, copy.deepcopy(model), x).after == 0
        permuted = copy.deepcopy(model)
        (units,) = exchanges(model, x)
        move(permuted, {units: torch.arange(8).flip(0)})
        assert fingerprint(permuted, x).digest == fingerprint(model, x).digest

    def test_spaces_that_are_wider_than_what_goes_through_them(self) -> None:
        torch.manual_seed(0)
        sizes = [(5, 6), (6, 6), (6, 6), (6, 4)]
        a, b = (nn.Sequential(*(nn.Linear(m, n, bias=False) for m, n in sizes)).double() for _ in range(2))
        x = torch.randn(3, 5, dtype=torch.float64)
        before = b(x)
        result = align(a, b, x)
        assert result.after < result.before
        assert difference(before, b(x)) < 1e-8

    def test_laws_are_zero_at_the_balanced_point_however_many_rounds_it_takes(self) -> None:
        torch.manual_seed(0)
        config = transformers.MambaConfig(vocab_size=30, hidden_size=16, state_size=4, num_hidden_layers=1)
        model: Any = transformers.MambaForCausalLM(config).eval().double()
        done = equalize(model, input_ids=IDS)
        assert done.sweeps > 50
        assert max(done.after.values()) < 1e-6


class TestFoldersThatAreNotComplete:
    """There are none: a folder gets its name at the end."""

    def test_of_a_run_that_was_stopped(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        saved(tmp_path / "in")
        wrote = Checkpoint.write
        calls: list[int] = []

        def stopped(self: Checkpoint, work: Any) -> None:
            if calls:
                raise KeyboardInterrupt
            calls.append(1)
            wrote(self, work)

        monkeypatch.setattr(Checkpoint, "write", stopped)
        assert run(monkeypatch, "equalize", str(tmp_path / "in"), "-o", str(tmp_path / "out")) == 130
        assert "Nothing was written" in capsys.readouterr().err
        assert [folder.name for folder in tmp_path.iterdir()] == ["in"]

    def test_of_a_move_that_was_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        saved(tmp_path / "in")
        words = ["move", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--by"]
        for refused in ("model.norm.gain=1e-320", "nothing=2", "model.norm.gain"):
            assert run(monkeypatch, *words, refused) == 2
            assert [folder.name for folder in tmp_path.iterdir()] == ["in"]
        assert run(monkeypatch, *words, "model.norm.gain=2") == 0
        assert (tmp_path / "out" / "config.json").is_file()
        assert {folder.name for folder in tmp_path.iterdir()} == {"in", "out"}

    def test_a_complete_one_is_not_written_to_again(self, tmp_path: Path) -> None:
        laws = symmetries_of(saved(tmp_path / "in"), IDS)
        weights = Checkpoint(tmp_path / "in", tmp_path / "out", laws.parameters)
        equalize(weights, laws=laws)
        with pytest.raises(UnmovableError, match="open it as a checkpoint of its own"):
            move(weights, {s: s.element() for s in laws if s.exact})

    def test_parts_that_a_model_is_loaded_from_go_along(self, tmp_path: Path) -> None:
        laws = symmetries_of(saved(tmp_path / "in"), IDS)
        for part in ("1_Pooling", "runs"):
            (tmp_path / "in" / part).mkdir()
            (tmp_path / "in" / part / "config.json").write_text("{}")
        parts = [{"path": ""}, {"path": "1_Pooling"}, {"path": "../in"}]
        (tmp_path / "in" / "modules.json").write_text(json.dumps(parts))
        equalize(Checkpoint(tmp_path / "in", tmp_path / "out", laws.parameters), laws=laws)
        assert [part.name for part in (tmp_path / "out").iterdir() if part.is_dir()] == ["1_Pooling"]

    def test_nan_in_the_files_is_named_and_the_answer_is_json(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        model = saved(tmp_path / "in")
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
        model.save_pretrained(tmp_path / "in", max_shard_size="8KB")
        assert run(monkeypatch, "equalize", str(tmp_path / "in"), "--dry-run", "--json") == 0

        def refused(word: str) -> None:
            raise ValueError(word)

        record = json.loads(capsys.readouterr().out, parse_constant=refused)
        assert "not finite" in record["left alone"]["model.layers.0.mlp.gated_neurons"]

    def test_a_name_is_not_found_in_that_of_another_parameter(self, tmp_path: Path) -> None:
        (tmp_path / "in").mkdir()
        save_file({"layers.0.norm.weight": torch.ones(4)}, tmp_path / "in" / "model.safetensors")
        weights = Checkpoint(tmp_path / "in", known=["norm.weight", "layers.0.norm.weight"])
        gain = Symmetry(block="", family="gain", kind=Scaling(), legs=(Leg(View.of("norm.weight", (4,))),))
        with pytest.raises(UnmovableError, match=r"moves norm\.weight, which no file"):
            weights.movable("norm.weight", gain)

    def test_pickled_weights_are_not_read(self, tmp_path: Path) -> None:
        torch.save({}, tmp_path / "pytorch_model.bin")
        with pytest.raises(UnmovableError, match=r"pytorch_model\.bin is not read"):
            Checkpoint(tmp_path)


class Decaying(nn.Module):
    """A weighted average over positions, the weights of which are powers of one number for each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.rate, self.a, self.b = nn.Parameter(torch.rand(2)), nn.Linear(3, 2), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Any:
        powers = self.rate.sigmoid() ** torch.arange(x.shape[1])[:, None]
        return self.b(self.a(x) * powers)


def test_channels_with_powers_of_their_own_may_change_places() -> None:
    model, x = Decaying(), torch.randn(4, 5, 3)
    before = model(x)
    result = exchanges(model, x)
    assert any(set(s.parameters) == {"rate", "a.weight", "a.bias", "b.weight"} for s in result)
    move(model, {s: torch.tensor([1, 0]) for s in result if s.n == 2})
    assert torch.allclose(model(x), before, atol=1e-6)
