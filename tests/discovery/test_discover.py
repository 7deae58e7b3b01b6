"""Discovery counts the laws of any function and finds them, without knowing what the function is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved import Discovery, LawSet, Verdict, blocks, discover
from conserved.blocks import Attention, FeedForward, SwiGLU, TransformerBlock
from conserved.discovery import UnsuitableError, find_laws
from conserved.discovery.fields import bracket_field, draw_words, one_of
from conserved.discovery.fields import vectors as bracket_vectors
from conserved.discovery.function import function_of, without_fused_kernels
from conserved.laws.independence import rank_of_gradients
from sampling import but_for, names_left_out
from test_lookalikes import PostNorm
from zoo import CASES, COUNTED_ONLY, LAWFUL, Case, ids, named, vectors

CERTIFIED = names_left_out(CASES, 18, always=[*COUNTED_ONLY, "decoder"])
"""Blocks that are left to `--whole` here: they are certified, so counted and proved complete, like one decoder."""


@pytest.mark.parametrize("case", but_for(CASES, "decoder", *CERTIFIED), ids=ids)
def test_every_block_has_as_many_laws_as_the_theory_says_and_all_are_found(case: Case) -> None:
    """And so are those that a search finds without the program; they span the same as those that are recognised."""
    model = case.model()
    discovery = discover(model, case.short_sample, loss=case.loss)
    assert discovery.verdict == Verdict.VERIFIED, discovery.verdict
    assert (discovery.count, discovery.explained, discovery.unexplained) == (case.conserved, case.conserved, 0)
    assert discovery.complete
    assert discovery.approximate == 0
    searched = find_laws(model, case.short_sample, loss=case.loss)
    theta = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if case.conserved:
        assert rank_of_gradients(searched.symmetries, searched.parameters) == case.conserved
    if case in LAWFUL:
        text = case.known_laws(model).symmetries
        assert rank_of_gradients(text, theta) == case.conserved - case.missed
        assert rank_of_gradients([*text, *searched], theta) == case.conserved
        assert rank_of_gradients([*text, *discovery.laws], theta) == case.conserved


def test_laws_can_be_looked_for_without_counting_them() -> None:
    case = named("attention")
    laws = find_laws(case.model(), case.sample, loss=case.loss)
    assert laws.independent() == case.conserved


RANKS = [
    ("linear pair", (8, 9, 9)),
    ("GELU FFN", (24,)),
    ("ReLU FFN", (20, 20)),
    ("SwiGLU", (32, 32)),
    ("attention", (48, 52, 52)),
    ("attention, rotary", (52, 56, 56)),
    ("attention, rotary, one head of four", (44, 52, 52)),
    ("attention, grouped", (40, 42, 42)),
    ("softmax mixture", (54, 54)),
    ("softmax mixture, top 2", (54, 54)),
    ("sigmoid mixture", (57, 57)),
]


@pytest.mark.parametrize(("name", "ranks"), RANKS, ids=[name for name, _ in RANKS])
def test_the_rank_grows_with_brackets_as_it_should(name: str, ranks: tuple[int, ...]) -> None:
    case = named(name)
    discovery = discover(case.model(), case.sample, forms=False)
    assert discovery.ranks == ranks
    assert discovery.gap > 1e6


class PlainAttention(nn.Module):
    """Attention after fixed positions were added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = blocks.SinusoidalPositions()
        self.attention = Attention(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(self.positions(x))


class LowRank(nn.Module):
    """A frozen linear map with a trained update of rank two."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 3).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, 4))
        self.b = nn.Parameter(torch.randn(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.mT @ self.b.mT


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(3, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(x)))


def two_blocks() -> nn.Module:
    def one() -> nn.Module:
        return TransformerBlock(Attention(3, 1, bias=True), FeedForward(3, 2, bias=True))

    return nn.Sequential(one(), one())


def post_norm() -> nn.Module:
    return PostNorm(Attention(4, 2, bias=True), FeedForward(4, 3, bias=True))


@dataclass(frozen=True, kw_only=True)
class Other:
    """A function no recogniser knows, and how many laws it must have."""

    name: str
    build: Callable[[], nn.Module]
    sample: Any
    count: int
    loss: Any = "regression"


class SquaredReLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 4, bias=False), nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)) ** 2)


class Product(nn.Module):
    """Three factors of a product of maps: each pair of neighbours has its own scale, every neuron."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)
        self.c = nn.Parameter(torch.randn(2))
        self.out = nn.Linear(2, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.a(x) * self.b(x) * self.c)


class SoftmaxWeights(nn.Module):
    """A mixture whose weights are a softmax of free numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.randn(4))
        self.values = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.scores.softmax(0) @ self.values)


class Unused(nn.Module):
    """A parameter that no output depends on, beside one that does."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.used)


OTHERS = [
    Other(name="attention, additive positions", build=PlainAttention, sample=vectors(4), count=12),
    # In each block 6 + 6 for the head, 3 key biases and 6 for the norms; and 3 differences between the 4 bias means.
    Other(name="two pre-norm blocks", build=two_blocks, sample=vectors(3, tokens=3), count=45),
    Other(name="post-norm block", build=post_norm, sample=vectors(4, tokens=3), count=26),
    Other(name="low-rank update", build=LowRank, sample=vectors(4, tokens=2), count=3),
    Other(
        name="convolution and ReLU",
        build=lambda: nn.Sequential(nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Flatten(0), nn.Linear(12, 2)),
        sample=torch.zeros(1, 3, 3),
        count=3,
    ),
    Other(
        name="two convolutions and ReLU",
        build=lambda: nn.Sequential(nn.Conv1d(1, 2, 2), nn.ReLU(), nn.Conv1d(2, 2, 2)),
        sample=torch.zeros(1, 4),
        count=2,
    ),
    Other(
        name="classifier, cross-entropy", build=Classifier, sample=vectors(3, tokens=2), count=5, loss="cross_entropy"
    ),
    Other(name="classifier, regression", build=Classifier, sample=vectors(3, tokens=2), count=0),
    Other(name="squared ReLU", build=SquaredReLU, sample=vectors(3), count=4),
    Other(name="product of maps", build=Product, sample=vectors(3), count=6),
    Other(name="free softmax weights", build=SoftmaxWeights, sample=vectors(3, tokens=1), count=1),
    Other(name="unused parameter", build=Unused, sample=vectors(3, tokens=1), count=4),
    Other(
        name="deep linear",
        build=lambda: nn.Sequential(nn.Linear(2, 2, False), nn.Linear(2, 2, False), nn.Linear(2, 2, False)),
        sample=vectors(2),
        count=6,
    ),
    Other(
        name="leaky ReLU",
        build=lambda: nn.Sequential(nn.Linear(3, 2), nn.LeakyReLU(0.2), nn.Linear(2, 3)),
        sample=vectors(3),
        count=2,
    ),
]


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(4)
    model = build().double()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            module.eps = 0.0
    return model


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: other.name)
def test_functions_no_recogniser_knows(other: Other) -> None:
    discovery = discover(seeded(other.build), other.sample, loss=other.loss)
    assert discovery.verdict == Verdict.VERIFIED, discovery.verdict
    assert discovery.count == other.count, discovery.summary()
    assert discovery.complete, discovery.summary()


def test_heads_rotary_planes_and_degrees_are_found_and_named() -> None:
    attention = {s.formula for s in find_laws(named("attention").model(), vectors(4))}
    assert "q.weight[0:2]·q.weight[0:2]ᵀ − k.weight[0:2]·k.weight[0:2]ᵀ" in attention
    (rotary,) = [s for s in find_laws(Attention(4, 1, rotary="half"), vectors(4)) if s.kind.code == "complex_scaling"]
    assert [leg.view.rows for leg in rotary.legs] == [(0, 2, 1, 3)] * 2
    (squared,) = find_laws(seeded(SquaredReLU), vectors(3))
    assert sorted(squared.degrees) in ([-2, 1], [-1, 2])


def test_a_callable_with_named_tensors() -> None:
    """The toy example of the paper's Section 3: f = a·b·x conserves a² − b²."""

    def f(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return params["a"] * params["b"] * x

    params = {"a": torch.tensor([1.5]), "b": torch.tensor([0.5])}
    discovery = discover(f, torch.zeros(1), params=params)
    assert (discovery.parameters, discovery.count, discovery.complete) == (2, 1, True)
    assert [s.formula for s in discovery.laws] == ["a² − b²"]
    searched = discover(f, torch.zeros(1), params=params, infer=False)
    assert [s.formula for s in searched.laws] == ["a[i]² − b[i]²"]


def test_outputs_and_inputs_of_other_shapes() -> None:
    """Token ids, several inputs, keyword inputs; tuples, mappings and objects with logits as outputs."""

    @dataclass
    class Output:
        logits: Tensor
        steps: int

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(4, 3), nn.Linear(3, 4)

        def forward(self, tokens: Tensor, scale: Tensor) -> Output:
            return Output(self.head(torch.tanh(self.table(tokens)) * scale), 3)

    example = torch.tensor([0, 3])
    inputs = (example, torch.zeros(1)), {"tokens": example, "scale": torch.zeros(1)}
    by_place, by_name = (discover(Model(), x, loss="cross_entropy", forms=False) for x in inputs)
    regression = discover(Model(), inputs[0], forms=False)
    # Σ over classes of the head's weights and of its biases.
    assert by_place.count == by_name.count == regression.count + 3 + 1
    pair = discover(
        lambda p, x: {"left": (p["w"] * x,), "right": [x.long()]}, torch.zeros(2), params={"w": torch.ones(2)}
    )
    assert pair.count == 0


def test_a_loss_function_decides_which_laws_there_are() -> None:
    def cross_entropy(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z.reshape(-1, 3), y.reshape(-1, 3).softmax(-1))

    discovery = discover(seeded(Classifier), vectors(3, tokens=2), loss=cross_entropy)
    assert (discovery.count, discovery.complete) == (5, True)


class TestApproximateLaws:
    """Laws up to a norm's ε are not part of the count and are reported with how far they are off."""

    def test_they_are_counted_apart(self) -> None:
        case = named("attention, rotary, query/key norm")
        discovery = discover(case.model(epsilon=1e-6), case.sample)
        assert (discovery.count, discovery.explained, discovery.approximate) == (7, 7, 4)
        assert discovery.complete
        nearly = [s for s in discovery.laws if not s.exact]
        assert all(1e-8 < s.epsilon < 1e-2 for s in nearly)
        assert {d for s in nearly for d in s.degrees} == {1}

    def test_a_smaller_epsilon_is_a_smaller_violation(self) -> None:
        worst = []
        for epsilon in (1e-6, 1e-8):
            laws = find_laws(Attention(6, 1, qk_norm=True, eps=epsilon), vectors(6))
            nearly = [symmetry for symmetry in laws if not symmetry.exact]
            assert sum(symmetry.numbers for symmetry in nearly) == 2
            worst.append(max(symmetry.epsilon for symmetry in nearly))
        assert worst[1] == pytest.approx(worst[0] / 100, rel=0.5)


class TestUnsuitable:
    """What cannot be studied is refused with what to do."""

    @pytest.mark.parametrize(
        ("build", "inputs", "options", "message"),
        [
            (lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), torch.zeros(3), {}, "got two that differ"),
            (
                lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)),
                torch.zeros(4, 3),
                {},
                "statistics of its batch",
            ),
            (lambda: nn.Linear(3, 3), torch.zeros(2), {}, "failed on a random input"),
            (lambda: nn.Linear(3, 3), lambda generator: torch.ones(3), {}, "Every input drawn is the same"),
            (lambda: nn.Embedding(3, 3), torch.zeros(4, dtype=torch.long), {}, "must show their range"),
            (lambda: nn.Linear(3, 3).requires_grad_(False), torch.zeros(3), {}, "at least one trainable parameter"),
            (lambda: nn.Linear(3, 3), torch.zeros(3), {"loss": "hinge"}, "Expected loss to be"),
            (lambda: nn.Linear(3, 3), torch.zeros(3), {"params": {"w": torch.ones(1)}}, "Expected params= only"),
            (lambda: nn.Linear(3, 3, device="meta"), torch.zeros(3), {}, "meta device"),
            (lambda: lambda p, x: x, torch.zeros(3), {}, "Expected params="),
            (
                lambda: lambda p, x: x,
                torch.zeros(3),
                {"params": {"w": torch.ones(1)}},
                "output that depends on the parameters",
            ),
            (
                lambda: lambda p, x: x / (p["w"] - p["w"]),
                torch.ones(3),
                {"params": {"w": torch.ones(1)}},
                "NaN or infinity",
            ),
            (
                lambda: lambda p, x: (p["w"] * x).long(),
                torch.ones(3),
                {"params": {"w": torch.ones(1)}},
                "with a floating-point tensor",
            ),
            (
                lambda: lambda p, x: torch.from_numpy((p["w"] * x).detach().numpy()),
                torch.ones(3),
                {"params": {"w": torch.ones(1)}},
                "not differentiable|output that depends",
            ),
        ],
        ids=[
            "dropout",
            "batch norm in training",
            "wrong input",
            "one input",
            "one token",
            "all frozen",
            "unknown loss",
            "params of a module",
            "meta",
            "callable without params",
            "constant",
            "NaN",
            "integers",
            "detached",
        ],
    )
    def test_says_why(self, build: Callable[[], Any], inputs: Any, options: dict[str, Any], message: str) -> None:
        with pytest.raises(UnsuitableError, match=message):
            discover(build(), inputs, **options)

    def test_batch_norm_with_running_statistics_is_studied(self) -> None:
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 3)).eval()
        assert discover(model, torch.zeros(2, 3), forms=False).verdict == Verdict.VERIFIED

    def test_too_many_parameters_are_refused_with_the_memory_they_need(self) -> None:
        with pytest.raises(UnsuitableError, match=r"needs about [\d,.]+ GB .* free on cpu"):
            discover(nn.Linear(2000, 2000), torch.zeros(2000))

    def test_directions_of_very_different_size_are_all_counted(self) -> None:
        """Eleven orders apart: small gradients that can be reproduced are told from rounding."""

        def f(params: dict[str, Tensor], x: Tensor) -> Tensor:
            return params["a"] * x[0] + 1e-11 * params["b"] * x[1] + 3e-12 * params["c"] * x[2]

        params = {name: torch.ones(1) for name in "abc"}
        discovery = discover(f, torch.zeros(3, 1), params=params, forms=False)
        assert discovery.verdict == Verdict.VERIFIED
        assert discovery.count == 0

    def test_too_shallow_brackets_are_not_called_complete(self) -> None:
        """With plain fields only, four more laws seem to exist than do; no form explains them."""
        case = named("attention")
        discovery = discover(case.model(), case.sample, depth=0)
        assert discovery.count == 16
        assert discovery.unexplained == 4
        assert not discovery.complete


class TestBrackets:
    """The fields and their brackets themselves."""

    def test_the_bracket_is_the_commutator_of_flows(self) -> None:
        """Moving along X, Y, −X, −Y by t ends at −t² [X, Y] up to third order."""
        function = function_of(seeded(SquaredReLU), vectors(3), loss="regression", params=None, device=None)
        generator = torch.Generator().manual_seed(0)
        theta = function.generic_point(generator)
        words = draw_words(function, theta, 1, 1, generator)
        first, second = one_of(words, 0)
        field, bracket = bracket_field(function, 0), bracket_field(function, 1)

        def moved(point: Tensor, sample: Any, t: float) -> Tensor:
            for _ in range(20):
                k1 = field(point, sample)
                k2 = field(point + t / 40 * k1, sample)
                point = point + t / 20 * k2
            return point

        t = 1e-3
        with without_fused_kernels():
            end = theta
            for sample, sign in ((first, 1), (second, 1), (first, -1), (second, -1)):
                end = moved(end, sample, sign * t)
            predicted = t * t * bracket(theta, (first, second))
        assert torch.allclose(end - theta, predicted, atol=0.05 * float(predicted.abs().max()))

    def test_a_bracket_that_vanishes_is_not_scaled_up(self) -> None:
        """Linear functions of the parameters have constant fields: all brackets are zero, and stay zero."""
        function = function_of(nn.Linear(2, 2), vectors(2), loss="regression", params=None, device=None)
        generator = torch.Generator().manual_seed(0)
        theta = function.generic_point(generator)
        words = draw_words(function, theta, 1, 8, generator)
        assert float(bracket_vectors(function, theta, 1, words, 8).abs().max()) < 1e-12

    def test_the_written_out_layer_norm_has_the_right_third_derivative(self) -> None:
        """Against finite differences; brackets of brackets need it, and fused operators cannot be trusted with it."""
        x = torch.randn(3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        direction = torch.randn(3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

        def third(f: Callable[[Tensor], Tensor]) -> float:
            g = f
            for _ in range(3):
                g = along(g)
            return float(g(x))

        def along(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            return lambda t: torch.func.jvp(f, (t,), (direction,))[1]

        def native(t: Tensor) -> Tensor:
            return F.layer_norm(t, (3,), eps=0.1)[0]

        def differences(f: Callable[[Tensor], Tensor], step: float = 2e-3) -> float:
            weights = {2: 0.5, 1: -1.0, -1: 1.0, -2: -0.5}
            return sum(w * float(f(x + k * step * direction)) for k, w in weights.items()) / step**3

        with without_fused_kernels():
            ours = third(native)
        assert ours == pytest.approx(differences(native), rel=1e-3)


def test_the_result_reads_well() -> None:
    discovery = discover(named("attention").model(), vectors(4))
    assert repr(discovery) == "<Discovery: 12 laws of 64 parameters, all found; verified>"
    assert "12 independent laws of 64 parameters, all found." in discovery.summary()
    assert r"\begin{tabular}" in discovery.latex()
    assert discovery.latex().count(r"\\") == 6
    record = discovery.record()
    assert record["complete"] is True
    assert record["ranks"] == [48, 52, 52]
    assert math.isfinite(record["gap"])


def test_the_same_seed_gives_the_same_result() -> None:
    def run(seed: int) -> Discovery:
        return discover(seeded(SquaredReLU), vectors(3), seed=seed)

    assert run(1).record() == run(1).record()
    assert run(1).count == run(2).count


def test_a_module_used_twice_and_a_tied_parameter_are_one() -> None:
    layer = nn.Linear(3, 3, bias=False)
    assert discover(nn.Sequential(layer, nn.ReLU(), layer), vectors(3), forms=False).parameters == 9
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    model = nn.Sequential(first, nn.Tanh(), second)
    assert discover(model, vectors(3), forms=False).parameters == 9
    assert isinstance(model[0].weight, nn.Parameter)


@pytest.mark.slow
def test_forms_are_found_at_real_width() -> None:
    laws = find_laws(Attention(64, 4, kv_heads=2), torch.zeros(6, 64))
    assert isinstance(laws, LawSet)
    assert laws.numbers == 2 * 2 * (16 * 17 // 2)
    neurons = find_laws(SwiGLU(48, 96), torch.zeros(2, 48))
    assert neurons.numbers == 96
