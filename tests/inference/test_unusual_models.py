"""Models that are frozen, shared, on no device, quantised, broken or unknown: each has a defined outcome."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from conserved import LawSet, Status, audit, blocks, recognize
from conserved.blocks import Attention, FeedForward, MixtureOfExperts, SwiGLU, TransformerBlock
from test_recognize_blocks import gradients
from tolerances import FUNCTION_UNCHANGED, IDENTITY
from zoo import named

X4 = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def reasons(laws: LawSet) -> dict[str, str]:
    return {item.name: item.reason for item in laws.dropped}


def evaluate(model: nn.Module, theta: dict[str, Tensor], x: Tensor) -> Tensor:
    """The model at other parameters, put back afterwards; functional_call does not do that for a module used twice."""
    own = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(theta[name])
        output: Tensor = model(x)
        for name, parameter in model.named_parameters():
            parameter.copy_(own[name])
    return output


def holds(model: nn.Module, laws: LawSet, x: Tensor) -> None:
    """Every law of the set is a symmetry of the function and has a vanishing identity."""
    theta = {name: parameter.detach() for name, parameter in model.named_parameters()}
    before = evaluate(model, theta, x)
    for symmetry in laws:
        after = evaluate(model, symmetry.act(theta, symmetry.element()), x)
        assert (after - before).norm() <= FUNCTION_UNCHANGED * before.norm(), symmetry
    model.zero_grad()
    model(x).sin().sum().backward()
    assert max(laws.residuals(gradients(model)).values(), default=0) <= IDENTITY[torch.float64]


class TestFrozen:
    """A frozen leg does not follow the others, so the law is not one of this training run."""

    def test_freezing_a_leg_drops_its_laws_and_says_so(self) -> None:
        model = named("attention").model()
        model.get_parameter("k.weight").requires_grad_(False)
        laws = recognize(model, X4)
        assert {s.family for s in laws} == {"value_output"}
        assert "q.weight" in reasons(laws)
        assert laws.independent() == 6

    def test_the_dropped_law_really_drifts(self) -> None:
        model = named("attention").model()
        full = recognize(model)
        model.get_parameter("k.weight").requires_grad_(False)
        start = full.values()["query_key[0]"]
        step = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        named("attention").objective()(model).backward()
        step.step()
        assert (full.values()["query_key[0]"] - start).norm() > 1e-6

    def test_a_wholly_frozen_model_has_no_laws(self) -> None:
        model = named("pre-norm block").model().requires_grad_(False)
        laws = recognize(model)
        assert len(laws) == 0
        assert laws.independent() == 0
        assert laws.values() == {}


class TestShared:
    """One parameter in two places moves in both."""

    def test_one_module_used_by_two_layers_is_one_symmetry(self) -> None:
        layer = SwiGLU(3, 4).double()
        model = nn.Sequential(layer, layer)
        laws = recognize(model)
        assert len(laws) == 1
        assert laws.independent() == 4
        holds(model, laws, torch.randn(5, 3, dtype=torch.float64))

    def test_two_layers_that_share_a_leg_merge_their_laws(self) -> None:
        first, second = SwiGLU(3, 4).double(), SwiGLU(3, 4).double()
        second.down.weight = first.down.weight
        model = nn.Sequential(first, second)
        laws = recognize(model)
        assert laws.independent() >= 4
        assert any({"0.down.weight", "0.up.weight", "1.up.weight"} <= set(law.parameters) for law in laws)
        holds(model, laws, torch.randn(5, 3, dtype=torch.float64))

    def test_shared_heads_of_different_kinds_lose_the_law(self) -> None:
        first, second = Attention(4, 2).double(), Attention(4, 2, rotary=True).double()
        second.q.weight = first.q.weight
        model = nn.Sequential(first, second)
        laws = recognize(model)
        assert {s.block for s in laws if s.family == "value_output"} == {"0", "1"}
        assert not any(s.family == "query_key" for s in laws)
        holds(model, laws, torch.randn(5, 4, dtype=torch.float64))

    def test_queries_tied_to_keys_keep_no_law(self) -> None:
        model = Attention(4, 2).double()
        model.k.weight = model.q.weight
        laws = recognize(model)
        assert {s.family for s in laws} == {"value_output"}
        assert "q.weight" in reasons(laws)
        holds(model, laws, torch.randn(5, 4, dtype=torch.float64))

    def test_a_parameter_that_is_used_elsewhere_as_well_keeps_no_law(self) -> None:
        class Both(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.ffn, self.other = SwiGLU(3, 4), nn.Linear(3, 4, bias=False)
                self.other.weight = self.ffn.up.weight

            def forward(self, x: Tensor) -> Tensor:
                return torch.cat((self.ffn(x), self.other(x).tanh()), -1)

        assert len(recognize(Both(), torch.randn(5, 3))) == 0

    def test_a_tied_embedding_leaves_the_scale_of_the_stream_against_the_final_gain(self) -> None:
        case = named("decoder, tied")
        laws = case.laws(case.model())
        signs = {leg.view.parameter: leg.degree > 0 for leg in laws["stream_scale"].legs}
        assert signs["embedding.weight"] != signs["norm.weight"] == signs["norm.bias"]
        assert not any(symmetry.name == "norm.gain" for symmetry in laws)


class TestNoValues:
    """Models on the meta device: laws can be listed, not evaluated."""

    def test_laws_are_listed(self) -> None:
        with torch.device("meta"):
            model = blocks.DecoderLM(32_000, 4096, 4, 32, 11_008, kv_heads=8)
        laws = recognize(model)
        assert len(laws) == 4 * (8 + 8 + 1 + 2) + 2
        assert "layers.{0–3}.attention" in laws.summary()

    @pytest.mark.parametrize("method", ["values", "reference", "independent"])
    def test_evaluation_says_what_is_missing(self, method: str) -> None:
        with torch.device("meta"):
            model = SwiGLU(3, 4)
        with pytest.raises(ValueError, match="meta device"):
            getattr(recognize(model), method)()


class TestStorage:
    """Parameters that are not trained as they are stored."""

    def test_a_parametrised_weight_has_the_laws_of_what_it_is_made_of(self) -> None:
        model = SwiGLU(3, 4).double()
        parametrize.register_parametrization(model.up, "weight", nn.Identity())
        laws = recognize(model, torch.randn(5, 3, dtype=torch.float64))
        assert {leg.view.parameter for law in laws for leg in law.legs} == {
            "down.weight",
            "up.parametrizations.weight.original",
        }
        holds(model, laws, torch.randn(5, 3, dtype=torch.float64))

    def test_weight_norm_adds_the_law_that_forgets_a_length(self) -> None:
        model = SwiGLU(3, 4).double()
        nn.utils.parametrizations.weight_norm(model.up)
        laws = recognize(model, torch.randn(5, 3, dtype=torch.float64))
        assert laws.independent() == 4 + 4
        holds(model, laws, torch.randn(5, 3, dtype=torch.float64))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_half_precision_models_are_evaluated_in_float32(self, dtype: torch.dtype) -> None:
        model = named("pre-norm block").model(dtype=dtype)
        values = recognize(model).values()
        single = recognize(named("pre-norm block").model(dtype=dtype).float()).values()
        assert all(torch.allclose(values[name], single[name], rtol=1e-5, atol=1e-6) for name in values)


class TestBroken:
    """NaN and infinite weights do not pass for numbers."""

    def test_values_and_errors_are_nan(self) -> None:
        model = named("SwiGLU").model()
        laws = recognize(model)
        reference = laws.reference()
        with torch.no_grad():
            model.get_parameter("up.weight")[0, 0] = torch.nan
        assert torch.isnan(laws.values()["gated_neurons"][0])
        assert torch.isfinite(laws.values()["gated_neurons"][1:]).all()
        assert laws.errors(reference)[""] != laws.errors(reference)[""]

    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    def test_independence_is_refused(self, value: float) -> None:
        model = named("SwiGLU").model()
        with torch.no_grad():
            model.get_parameter("up.weight")[0, 0] = value
        with pytest.raises(ValueError, match=r"got NaN or infinity in up\.weight"):
            recognize(model).independent()

    def test_a_nan_gradient_is_not_verified(self) -> None:
        model = named("SwiGLU").model()
        x = torch.ones(3, dtype=torch.float64)

        def loss() -> Tensor:
            # sqrt at zero: a finite value with an infinite slope, times zero.
            return model(x).sum() + (0 * model.get_parameter("up.weight")).sqrt().sum()

        assert not recognize(model).verify(loss).holds


class TestUnknown:
    """Programs that conserve little or nothing, and things that are no programs."""

    def test_a_linear_map_alone_has_no_law_and_the_reason_is_given(self) -> None:
        laws = recognize(nn.Linear(2, 3))
        assert (len(laws), laws.independent()) == (0, 0)
        assert set(reasons(laws)) == {"weight", "bias"}
        assert "it makes the output" in laws.summary()

    def test_two_biases_of_a_recurrent_layer_move_against_each_other(self) -> None:
        laws = recognize(nn.LSTM(2, 3), torch.randn(2, 5, 2))
        assert [symmetry.family for symmetry in laws] == ["bias_shift"]
        assert laws.independent() == 12

    def test_a_model_without_parameters_has_an_empty_set(self) -> None:
        laws = recognize(nn.ReLU(), torch.randn(3))
        assert (len(laws), laws.numbers, laws.independent()) == (0, 0, 0)

    def test_a_subclass_that_changes_the_computation_is_not_taken_for_its_base(self) -> None:
        class Squared(SwiGLU):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x) + self.up.weight.square().sum()

        laws = recognize(Squared(3, 4), torch.randn(5, 3))
        assert len(laws) == 0
        assert reasons(laws)["up.weight"].startswith("sum in ")

    def test_a_subclass_that_changes_nothing_is_its_base(self) -> None:
        class Named(SwiGLU):
            def __init__(self) -> None:
                super().__init__(3, 4)

        assert recognize(Named()).independent() == 4

    def test_a_block_with_an_unknown_branch_keeps_what_is_safe(self) -> None:
        class Mystery(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Linear(4, 4)

            def forward(self, x: Tensor) -> Tensor:
                return self.inner(x).tanh()

        block = TransformerBlock(Attention(4, 2), FeedForward(4, 3))
        block.feedforward = Mystery()  # type: ignore[assignment]
        laws = recognize(block, X4.float())
        assert {s.name for s in laws if "attention" not in s.name} == {"norm1.gain", "norm2.gain"}

    @pytest.mark.usefixtures("as_users_run_it")
    def test_other_things_than_modules_are_refused(self) -> None:
        with pytest.raises(TypeError, match="Expected a module or a function, got dict"):
            recognize({})

    def test_an_unknown_loss_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"Expected loss to be one of .*, got 'hinge'"):
            recognize(SwiGLU(3, 4), loss="hinge")


class TestWrapped:
    """Wrappers that leave the modules in place leave the laws in place."""

    def test_a_compiled_model(self) -> None:
        model = torch.compile(SwiGLU(3, 4))
        assert recognize(model).independent() == 4

    def test_a_mixture_of_one_has_a_router_that_never_moves(self) -> None:
        for gate in ("softmax", "sigmoid"):
            model = MixtureOfExperts(3, 2, 1, gate).double()
            model(torch.randn(4, 3, dtype=torch.float64)).sum().backward()
            assert gradients(model)["router.weight"].abs().max() <= 1e-12
            laws = recognize(model, torch.randn(4, 3, dtype=torch.float64))
            assert laws.select(lambda symmetry: symmetry.parameters == ("router.weight",)).independent() == 3


@pytest.mark.parametrize("place", ["parameter", "value"])
def test_a_hook_on_a_gradient_hides_no_law_and_one_that_changes_it_is_seen(place: str) -> None:
    """Loggers put hooks on parameters; so do those who change gradients."""

    class Hooked(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 8, bias=False), nn.Linear(8, 2, bias=False)
            self.factor = factor
            if place == "parameter":
                self.first.weight.register_hook(lambda grad: self.factor * grad)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x).relu()
            if place == "value" and y.requires_grad:
                y.register_hook(lambda grad: self.factor * grad)
            return self.second(y)

    for factor, status in ((1.0, Status.VERIFIED), (0.5, Status.REFUTED)):
        torch.manual_seed(0)
        model, x = Hooked(factor), torch.randn(5, 3)
        laws = recognize(model, x)
        assert [(symmetry.name, symmetry.source) for symmetry in laws] == [("neurons", "assumed")]
        model(x).square().mean().backward()
        assert audit(model, laws).verdict.status is status
