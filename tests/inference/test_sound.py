"""No wrong law: programs that once got one, and the check on the program that would have left each of them out."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import adversarial_architectures
import adversarial_blind
import adversarial_held_out
import adversarial_programs
import adversarial_structures
from adversarial_held_out import draw
from adversarial_layers import Function
from adversarial_models import Adversary, models
from adversarial_structures import STATEFUL, Stateful
from conserved import LawSet, Symmetry, recognize
from conserved.inference.program.capture import capture
from conserved.inference.program.captured_program import CapturedProgram
from conserved.inference.rules import RULES, Step
from conserved.inference.validation import program_check
from conserved.laws import ProgramCheck
from conserved.symmetry import GeneralLinear, Leg, OneScale, Scaling, Translation, View
from conserved.verdict import Status
from law_checks import check, subject
from operator_samples import cases, operators
from program_grammar import compose


def names(laws: LawSet) -> list[str]:
    """The names of all laws, in order."""
    return [symmetry.name for symmetry in laws]


def true_of(model: nn.Module, *args: Any) -> LawSet:
    """The laws of a model, after holding each against backward passes and finite moves that share no code."""
    laws = recognize(model, *args)
    assert laws.checked is not None
    assert laws.checked.refuted == {}
    if any(symmetry.exact for symmetry in laws):
        assert laws.checked.points == program_check.POINTS
    result = check(laws, subject(lambda: (model, args, {})))
    assert dict(result.wrong) == {}
    return laws


INDEX = torch.tensor([0, 1, 0, 2, 1, 2])


def aggregated(reduce: str, index: Tensor = INDEX[:, None]) -> nn.Module:
    """A graph layer that combines what meets at a node."""

    def function(p: Any, x: Tensor) -> Tensor:
        h = x @ p.a
        nodes = torch.zeros(3, 4, dtype=h.dtype)
        return nodes.scatter_reduce(0, index.expand(6, 4), h, reduce, include_self=False) @ p.b

    return Function(function, a=torch.randn(5, 4), b=torch.randn(4, 3))


@pytest.mark.parametrize(("reduce", "numbers"), [("sum", 10), ("mean", 10), ("amax", 4), ("amin", 4), ("prod", 0)])
def test_how_scatter_reduce_combines_entries_decides_what_passes(reduce: str, numbers: int) -> None:
    torch.manual_seed(0)
    assert true_of(aggregated(reduce), torch.randn(6, 5)).numbers == numbers


def test_an_index_that_differs_from_column_to_column_mixes_none_of_them() -> None:
    torch.manual_seed(0)
    index = torch.tensor([[0, 1, 2, 0], [1, 1, 0, 2], [2, 0, 1, 1], [0, 2, 2, 0], [1, 0, 0, 1], [2, 2, 1, 2]])
    laws = true_of(aggregated("sum", index), torch.randn(6, 5))
    assert laws.numbers == 4


def pairs(function: Callable[[Tensor], Tensor]) -> nn.Module:
    """Complex numbers made of neighbours, a function of them, and a reader."""

    def forward(p: Any, x: Tensor) -> Tensor:
        z = torch.view_as_complex((x @ p.a).reshape(-1, 4, 2))
        return torch.view_as_real(function(z).resolve_conj()).flatten(1) @ p.b

    return Function(forward, a=torch.randn(5, 8), b=torch.randn(8, 3))


@pytest.mark.parametrize(
    "function",
    [lambda z: z / z.abs(), torch.sgn, lambda z: z / torch.linalg.vector_norm(z, dim=-1, keepdim=True)],
    ids=["quotient", "sgn", "normalise"],
)
def test_complex_numbers_of_size_one_forget_scales_and_see_phases(function: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    laws = true_of(pairs(function), torch.randn(6, 5))
    assert len(laws)
    assert all(symmetry.kind.code != "complex_scaling" for symmetry in laws)


def test_a_product_of_a_number_with_a_conjugate_keeps_its_phase() -> None:
    torch.manual_seed(0)

    def forward(p: Any, x: Tensor) -> Tensor:
        q, k = (torch.view_as_complex((x @ w).reshape(-1, 4, 2)) for w in (p.q, p.k))
        return (q * k.conj()).real

    laws = true_of(Function(forward, q=torch.randn(5, 8), k=torch.randn(5, 8)), torch.randn(6, 5))
    assert [symmetry.kind.code for symmetry in laws] == ["complex_scaling"]


def test_a_complex_parameter_has_no_law() -> None:
    def forward(p: Any, x: Tensor) -> Tensor:
        return torch.view_as_real(x.to(p.a.dtype) @ p.a @ p.b)

    model = Function(forward, a=torch.randn(5, 4, dtype=torch.complex64), b=torch.randn(4, 3, dtype=torch.complex64))
    assert not len(recognize(model, torch.randn(6, 5)))


MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "slices": lambda h: h[:, 1:] - h[:, :-1],
    "roll": lambda h: h - h.roll(1, 1),
    "flip": lambda h: h - h.flip(1),
    "permutation": lambda h: h - h[:, torch.tensor([2, 0, 1, 3])],
    "diff with prepend": lambda h: torch.diff(h, dim=1, prepend=h[:, :1]),
    "transpose": lambda h: h[:4] - h[:4].T,
    "windows": lambda h: h.unfold(1, 2, 1)[:, :, 0] - h.unfold(1, 2, 1)[:, :, 1],
    "sort": lambda h: h - h.sort(1).values,
}


@pytest.mark.parametrize("move", MOVES.values(), ids=list(MOVES))
def test_what_is_moved_does_not_cancel_what_is_not(move: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)

    def forward(p: Any, x: Tensor) -> Tensor:
        y = move(x @ p.a + p.c)
        return y @ p.b[: y.shape[1]]

    true_of(Function(forward, a=torch.randn(5, 4), b=torch.randn(4, 3), c=torch.randn(4)), torch.randn(6, 5))


def test_a_mean_that_is_taken_away_still_cancels() -> None:
    torch.manual_seed(0)

    def forward(p: Any, x: Tensor) -> Tensor:
        h = x @ p.a
        return (h - h.mean(1, keepdim=True)) @ p.b

    laws = true_of(Function(forward, a=torch.randn(5, 4), b=torch.randn(4, 3)), torch.randn(6, 5))
    assert any(isinstance(symmetry.kind, Translation) for symmetry in laws)


def test_the_weight_behind_an_orthogonal_map_is_not_inert() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 3))
    nn.utils.parametrizations.orthogonal(model[0])
    assert not len(true_of(model, torch.randn(6, 4)))


@pytest.mark.parametrize(
    ("layer", "passes"),
    [
        (nn.Conv2d(4, 5, 3), True),
        (nn.Conv2d(4, 5, 3, padding=1), False),
        (nn.Conv2d(4, 5, 3, padding="same"), False),
        (nn.Conv2d(4, 5, 1, padding=1), False),
        (nn.Conv2d(4, 5, 3, stride=2, dilation=2), True),
        (nn.ConvTranspose2d(4, 5, 3), False),
        (nn.ConvTranspose2d(4, 5, 2, stride=2), False),
    ],
    ids=["valid", "zeros", "same", "one", "dilated", "transposed", "upsampling"],
)
def test_a_constant_passes_a_convolution_unless_it_ends_at_an_edge(layer: nn.Module, passes: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), layer, nn.InstanceNorm2d(5))
    laws = true_of(model, torch.randn(2, 3, 9, 9))
    assert ("0.inert_bias" in names(laws)) == passes


def test_every_power_of_a_factor_that_is_used_twice_stands_at_its_own_entry() -> None:
    torch.manual_seed(0)

    def forward(p: Any, x: Tensor) -> Tensor:
        return torch.einsum("abc,ia,jb,kc,ni,nj->nk", p.g, p.u, p.v, p.v, x, x)

    model = Function(forward, g=torch.randn(2, 3, 3), u=torch.randn(5, 2), v=torch.randn(5, 3))
    laws = true_of(model, torch.randn(6, 5))
    # GL(2) between u and g, and GL(3) between v and both axes of g that it meets: all 9 that `discover` counts.
    assert [(type(symmetry.kind).__name__, symmetry.parameters[0]) for symmetry in laws] == [
        ("GeneralLinear", "u"),
        ("GeneralLinear", "v"),
    ]


def test_a_rule_that_is_wrong_lists_no_law_and_says_that_it_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3))
    monkeypatch.setitem(RULES, "aten::gelu", RULES["aten::relu"])
    laws = recognize(model, torch.randn(5, 4))
    assert not len(laws)
    assert laws.checked is not None
    assert laws.checked.refuted["neurons"] > 1e-3
    assert any("defect of conserved" in item.reason for item in laws.dropped if item.name == "neurons")


def test_a_wrong_rule_is_seen_at_parameters_that_start_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """At initialisation all rows are equal and biases zero, so that the wrong law holds; at a random point not."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 2, bias=False), nn.Linear(2, 2, bias=False)
            nn.init.ones_(self.a.weight)
            nn.init.ones_(self.b.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.silu(self.a(x)))

    monkeypatch.setitem(RULES, "aten::silu", RULES["aten::relu"])
    laws = recognize(Model(), torch.zeros(4, 3))
    assert not len(laws)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_check_leaves_model_and_random_numbers_as_they_were(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(), nn.Linear(6, 3)).to(dtype)
    x = torch.randn(5, 4, dtype=dtype)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    before = {name: (tensor.data_ptr(), tensor.detach().clone()) for name, tensor in tensors.items()}
    loss = model[4](model[0](x).relu()).square().mean()
    state = torch.get_rng_state()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    laws = recognize(model, x)
    assert laws.checked
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in tensors.items():
        assert tensor.dtype in (dtype, torch.int64)
        assert tensor.data_ptr() == before[name][0]
        assert torch.equal(tensor, buffers.get(name, before[name][1]))
        assert tensor.grad is None
    loss.backward()
    assert model[0].weight.grad is not None
    assert model[0].weight.grad.dtype == dtype


def test_where_the_check_was_not_made_the_laws_say_so() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    laws = recognize(model, torch.randn(5, 4, device="meta"))
    assert len(laws)
    assert laws.checked is not None
    assert not laws.checked
    assert "no values" in str(laws.checked)
    assert "not checked on the program in float64" in laws.verdict("neurons").message


def test_a_verdict_says_at_how_many_points_it_was_checked() -> None:
    laws = recognize(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), torch.randn(5, 4))
    verdict = laws.verdict("neurons")
    assert verdict.status is Status.VERIFIED
    assert verdict.evidence[0].samples == program_check.POINTS


def test_a_refuted_law_is_taken_out_of_a_set_by_name() -> None:
    legs = (Leg(View.of("w", (2, 3))),)
    laws = LawSet(symmetries=(Symmetry(block="", family="made_up", kind=Translation(), legs=legs),))
    remaining = laws.with_check(ProgramCheck(points=3, limit=1e-10, refuted={"made_up": 0.5}))
    assert not len(remaining)
    assert [item.name for item in remaining.dropped] == ["made_up"]


def test_a_part_of_one_entry_is_that_entry() -> None:
    torch.manual_seed(0)

    def forward(p: Any, x: Tensor) -> tuple[Tensor, ...]:
        first, second, third = p.a.unbind()
        return first * p.b * x, second * p.c, third * x

    laws = true_of(Function(forward, a=torch.randn(3), b=torch.randn(()), c=torch.randn(())), torch.randn(5))
    assert [str(symmetry.legs[0].view) for symmetry in laws] == ["a[0]", "a[1]"]


def test_a_tensor_from_which_another_is_taken_moves_with_it() -> None:
    torch.manual_seed(0)
    model = Function(
        lambda p, x: torch.rsub(x @ p.a, p.c) @ p.b, a=torch.randn(5, 4), b=torch.randn(4, 3), c=torch.randn(4)
    )
    laws = true_of(model, torch.randn(6, 5))
    assert [symmetry.numbers for symmetry in laws] == [10]


def test_what_is_divided_by_is_neither_mixed_nor_shifted_alike() -> None:
    torch.manual_seed(0)

    def forward(p: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        h = (x @ p.a).square() + 1 + p.c
        quotient = p.s / h
        return (x[:, :1] / (x @ p.a)) @ p.b, quotient - quotient.mean(1, keepdim=True)

    given = {"a": torch.randn(5, 4), "b": torch.randn(4, 3), "c": torch.rand(1), "s": torch.rand(1)}
    assert not any(
        isinstance(law.kind, GeneralLinear | Translation)
        for law in true_of(Function(forward, **given), torch.randn(6, 5))
    )


def test_a_gain_that_is_computed_moves_what_it_multiplies() -> None:
    torch.manual_seed(0)

    def forward(p: Any, x: Tensor) -> Tensor:
        return torch.stack([F.layer_norm(one @ p.a, (4,), one @ p.g, one @ p.b) for one in x])

    names = {name: torch.randn(5, 4) for name in "agb"}
    laws = true_of(Function(forward, **names), torch.randn(3, 5))
    assert all(symmetry.parameters == ("a",) for symmetry in laws if symmetry.exact)


def test_a_mean_that_a_norm_returns_is_seen() -> None:
    torch.manual_seed(0)
    model = Function(lambda p, x: torch.native_layer_norm(x @ p.a, [4], None, None, 1e-5)[:2], a=torch.randn(5, 4))
    assert not len(true_of(model, torch.randn(6, 5)))


CATALOGUE = ("add", "cat", "cumsum", "gather", "index_add", "index_select", "matmul", "nn.functional.conv1d", "norm")
MORE = ("rsub", "scatter_reduce.amax", "sum", "transpose", "unbind", "where", "nn.functional.max_pool1d", "flip")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*CATALOGUE, *MORE])
def test_rules_tell_the_truth_about_samples_of_their_operator(name: str) -> None:
    """Some operators with two samples each; `benchmarks/operator_catalogue.py` has all with more."""
    tested = 0
    for operator in operators(name):
        if operator.full_name == name:
            for case in cases(operator, samples=3):
                laws = recognize(case.program, torch.ones(1))
                assert laws.checked is not None
                assert laws.checked.refuted == {}, case.name
                tested += laws.checked.points
    assert tested


@pytest.mark.filterwarnings("ignore")
def test_an_argument_that_a_rule_does_not_read_makes_its_samples_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    right = RULES["aten::scatter_reduce"]

    def blind(s: Step) -> Any:
        same = replace(s.operation, name="aten::scatter_add.default", args=s.operation.args[:4], kwargs={})
        return right(replace(s, operation=same))

    monkeypatch.setitem(RULES, "aten::scatter_reduce", blind)
    (operator,) = operators("scatter_reduce.prod")
    checks = (recognize(case.program, torch.ones(1)).checked for case in cases(operator, samples=20))
    assert any(check is not None and check.refuted for check in checks)


@pytest.mark.filterwarnings("ignore")
def test_programs_with_drawn_arguments_get_no_wrong_law() -> None:
    """A few of the two thousand of `benchmarks/inferred_programs.py --arguments`."""
    wrong = {}
    for seed in np.random.default_rng(7).integers(0, 2000, 40).tolist():
        torch.manual_seed(seed)
        program, x, loss, _ = compose(seed, arguments=True)
        laws = recognize(program, x, loss=loss)
        assert laws.checked is not None
        if laws.checked.refuted:
            wrong[seed] = str(program)
    assert wrong == {}


def _sampled(share: int) -> list[Adversary]:
    every = list(models())
    chosen = np.random.default_rng(20261118).permutation(len(every))[: len(every) // share]
    return [every[index] for index in sorted(chosen)]


@pytest.mark.filterwarnings("ignore")
def test_adversarial_models_get_no_wrong_law() -> None:
    """A seeded tenth; `benchmarks/adversarial_laws.py` runs all of them."""
    wrong = {}
    for one in _sampled(10):
        laws = recognize(one.model, *one.args, loss=one.loss)
        assert laws.checked is not None
        if laws.checked.refuted:
            wrong[one.name] = dict(laws.checked.refuted)
    assert wrong == {}


@pytest.mark.parametrize("start", [lambda h: 0, lambda h: 0.0, torch.zeros_like], ids=["0", "0.0", "zeros"])
def test_a_recursion_that_starts_at_zero_keeps_the_scales_of_what_it_adds(start: Callable[[Tensor], Any]) -> None:
    torch.manual_seed(0)

    def forward(p: Any, x: Tensor) -> Tensor:
        state = start(x[:, 0] @ p.a)
        for step in range(x.shape[1]):
            state = 0 - (p.w * state + x[:, step] @ p.a)
        result: Tensor = state.relu() @ p.b
        return result

    model = Function(forward, w=torch.rand(3), a=torch.randn(4, 3), b=torch.randn(3, 2))
    assert true_of(model, torch.randn(5, 4, 4)).numbers == 3


def test_positions_that_are_scaled_move_against_the_embedding() -> None:
    """As x-transformers adds them: E[t] + d^(−1/2) P[p], so that Σ E − √d Σ P is conserved for every feature."""
    torch.manual_seed(0)

    def forward(p: Any, tokens: Tensor) -> Tensor:
        h = F.embedding(tokens, p.e) + p.p[: tokens.shape[1]] * 5**-0.5
        return (h @ p.w).tanh() @ p.v

    tables = {"e": torch.randn(7, 5), "p": torch.randn(4, 5), "w": torch.randn(5, 5), "v": torch.randn(5, 2)}
    laws = true_of(Function(forward, **tables), torch.arange(8).reshape(2, 4) % 7)
    (law,) = [symmetry for symmetry in laws if isinstance(symmetry.kind, Translation)]
    assert law.numbers == 5
    assert sorted(abs(leg.degree) for leg in law.legs) == pytest.approx([1.0, 5**0.5])


def test_laws_are_read_off_in_inference_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    with torch.inference_mode():
        laws = recognize(model, torch.randn(5, 4))
    assert names(laws) == ["neurons"]


@pytest.mark.parametrize("start", range(3))
def test_programs_with_trained_operands_have_no_wrong_law(start: int) -> None:
    """Every sixtieth model; `benchmarks/adversarial_laws.py --programs` has all of them."""
    for name, (model, args) in itertools.islice(adversarial_programs.programs(), 7 + 20 * start, None, 60):
        laws = recognize(model, *args)
        assert laws.checked is not None
        assert dict(laws.checked.refuted) == {}, name
        # Power iteration changes its buffers in every call, so that no two calls can be compared.
        if len(laws) and "spectral" not in name and "author" not in name:
            assert dict(check(laws, subject(partial(_built, model, args))).wrong) == {}, name


def _built(model: nn.Module, args: tuple[Any, ...]) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return model, args, {}


@pytest.mark.parametrize("decay", [torch.sigmoid, lambda r: torch.exp(-r.exp())])
def test_a_state_that_starts_as_the_number_zero_scales_with_everything(decay: Callable[[Tensor], Tensor]) -> None:
    def scan(start: Any) -> Callable[..., Tensor]:
        def forward(p: Any, x: Tensor) -> Tensor:
            h = start(x)
            for step in x:
                h = decay(p.r) * h + step @ p.a
            return torch.as_tensor(h) @ p.b

        return forward

    def model(start: Any) -> nn.Module:
        torch.manual_seed(0)
        return Function(scan(start), r=torch.randn(3), a=torch.randn(4, 3), b=torch.randn(3, 2))

    x = torch.randn(5, 2, 4)
    assert true_of(model(lambda x: 0), x).numbers == 3
    assert true_of(model(lambda x: x.new_zeros(2, 3)), x).numbers == 3


DEPENDENT: dict[str, tuple[Callable[[Any, Tensor], Tensor], int]] = {
    "padded": (lambda p, h: F.pad(h, (0, 1)) @ p.b, 3),
    "repeated": (lambda p, h: torch.cat([h, h[:, :1]], 1) @ p.b, 3),
    "shares and a bias": (lambda p, h: torch.addmm(p.c, h.softmax(1), p.b[:4]), 3),
    "a sum": (lambda p, h: torch.cat([h, h.sum(1, keepdim=True)], 1) @ p.b, 3),
    "tanh of equal entries": (lambda p, h: torch.cat([h, h.flip(1)[:, :1]], 1).tanh() @ p.b, 3),
    "an infinite mask": (
        lambda p, h: (F.pad(h, (0, 1)) + torch.tensor([0.0, 0.0, 0.0, 0.0, -torch.inf])).softmax(1) @ p.b,
        0,
    ),
    "tanh of a sum": (lambda p, h: torch.cat([h, h.sum(1, keepdim=True)], 1).tanh() @ p.b, 0),
    "zeros under a gain": (lambda p, h: (F.pad(h.tanh(), (1, 0)) * p.g).relu(), 1),
}


@pytest.mark.parametrize("case", DEPENDENT)
def test_dependent_inputs_of_a_map_give_linear_laws(case: str) -> None:
    forward, numbers = DEPENDENT[case]
    torch.manual_seed(0)
    parameters = {"b": torch.randn(5, 3), "c": torch.randn(3), "g": torch.randn(5)}
    laws = true_of(Function(lambda p, x: forward(p, x * torch.arange(1.0, 5.0)), **parameters), torch.randn(6, 4))
    assert sum(law.numbers for law in laws if law.family == "dependent_inputs") == numbers


def test_an_inner_product_at_each_position_is_not_called_query_and_key() -> None:
    def forward(p: Any, x: Tensor) -> Tensor:
        return ((x @ p.q) * (x @ p.k)).sum(-1) if x.ndim == 3 else x

    laws = true_of(Function(forward, q=torch.randn(4, 3), k=torch.randn(4, 3)), torch.randn(2, 5, 4))
    assert {law.family for law in laws} == {"inner_product"}

    def scores(p: Any, x: Tensor) -> Tensor:
        return (x @ p.q) @ (x @ p.k).mT

    laws = true_of(Function(scores, q=torch.randn(4, 3), k=torch.randn(4, 3)), torch.randn(2, 5, 4))
    assert {law.family for law in laws} == {"query_key"}


@pytest.mark.parametrize("rows", [lambda p, i: p[: i.shape[1]], lambda p, i: p[-i.shape[1] :]], ids=["first", "last"])
def test_laws_of_sliced_positions_hold_at_other_lengths(rows: Callable[[Tensor, Tensor], Tensor]) -> None:
    """As minGPT adds them: P[:t] with t the length of the inputs, of which the next batch has another."""
    torch.manual_seed(0)

    def forward(p: Any, tokens: Tensor) -> Tensor:
        return (p.e[tokens] + rows(p.p, tokens)) @ p.w

    model = Function(forward, e=torch.randn(5, 4), p=torch.randn(8, 4), w=torch.randn(4, 3))
    laws = recognize(model, torch.randint(5, (3, 4)))
    assert names(laws) == ["gain", "positions"]
    assert [item.name for item in laws.dropped if "sizes of the inputs" in item.reason]
    for length in (1, 4, 6, 8):
        tokens = torch.randint(5, (2, length))
        assert dict(check(laws, subject(partial(_built, model, (tokens,)))).wrong) == {}


def test_laws_of_a_single_sample_are_not_listed() -> None:
    torch.manual_seed(0)

    def forward(p: Any, x: Tensor) -> Tensor:
        return (x @ p.a).flatten().softmax(0)

    laws = recognize(Function(forward, a=torch.randn(4, 5)), torch.randn(1, 4))
    assert not len(laws)
    assert laws.checked is not None
    assert laws.checked.refuted == {}
    assert all("2 instead of 1" in words for words in laws.checked.one_size.values())
    assert laws.checked.one_size


@pytest.mark.parametrize("seed", range(1, 4))
def test_laws_of_one_step_are_not_listed_for_units_that_are_off(seed: int) -> None:
    """The first step reads a state of zeros. At two steps a unit that no sample turns on seems to read none either."""
    torch.manual_seed(seed)
    laws = recognize(nn.RNN(4, 3, nonlinearity="relu", batch_first=True), torch.randn(3, 1, 4))
    assert names(laws) == ["bias_shift"]


def test_experts_that_no_token_chose_are_not_called_unused() -> None:
    torch.manual_seed(0)

    def forward(p: Any, x: Tensor) -> Tensor:
        chosen = (x @ p.r).argmax(1)
        out = torch.zeros(len(x), 2, dtype=x.dtype)
        for expert in range(3):
            (token,) = (chosen == expert).nonzero(as_tuple=True)
            if len(token):
                out = out.index_add(0, token, x[token] @ p.w[expert])
        return out

    model = Function(forward, r=torch.eye(3), w=torch.randn(3, 3, 2))
    laws = recognize(model, torch.tensor([[1.0, 0.0, 0.0], [3.0, 1.0, 0.0]]))
    assert not any("unused" in name for name in names(laws))
    assert laws.checked is not None
    assert laws.checked.refuted == {}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("start", range(2))
def test_held_out_models_have_no_wrong_law_on_any_of_their_inputs(start: int) -> None:
    """Every fiftieth model; `benchmarks/adversarial_laws.py --set held_out` has all of them."""
    for name, (model, inputs) in itertools.islice(adversarial_held_out.held_out(), 11 + 25 * start, None, 50):
        laws = recognize(model, *inputs[0]).select(lambda law: law.source == "typed")
        for args in inputs if len(laws) and "spectral" not in name else ():
            assert dict(check(laws, subject(partial(_built, model, args))).wrong) == {}, name


def test_a_first_power_mixes_entries_and_a_second_does_not() -> None:
    torch.manual_seed(0)
    parameters = {"a": torch.randn(5, 4), "b": torch.randn(4, 3)}
    for exponent, numbers in ((1, 10), (1.0, 10), (2, 4)):
        model = Function(
            lambda p, x, k=exponent: ((x @ p.a) ** k) @ p.b, **{n: t.clone() for n, t in parameters.items()}
        )
        assert true_of(model, torch.randn(6, 5)).numbers == numbers


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("start", range(2))
def test_blind_models_have_no_wrong_law_on_any_of_their_inputs(start: int) -> None:
    """Every fortieth model; `benchmarks/adversarial_laws.py --set blind` has all of them."""
    for name, (model, inputs) in itertools.islice(adversarial_blind.blind(), 7 + 20 * start, None, 40):
        laws = recognize(model, *inputs[0]).select(lambda law: law.source == "typed")
        for args in inputs if len(laws) and "spectral" not in name else ():
            assert dict(check(laws, subject(partial(_built, model, args))).wrong) == {}, name


def test_opposite_shifts_do_not_cancel_in_the_length_of_a_pair() -> None:
    model = Function(lambda p, x: torch.hypot(x @ p.a + p.c, x @ p.b - p.c), a=draw(3, 4), b=draw(3, 4), c=draw(4))
    laws = recognize(model, torch.randn(5, 3))
    assert laws.checked is not None
    assert laws.checked.refuted == {}
    assert not len(laws)


@pytest.mark.parametrize("epsilon", [-0.5, 0.5])
def test_a_norm_with_a_negative_or_large_epsilon_sees_scales(epsilon: float) -> None:
    model = Function(lambda p, x: F.layer_norm(x @ p.a, (4,), eps=epsilon), a=draw(3, 4) * 3)
    assert not any(isinstance(law.kind, OneScale | Scaling) for law in recognize(model, torch.randn(5, 3)))


def test_coefficients_that_are_thirds_hold_in_float64() -> None:
    def forward(p: Any, x: Tensor) -> Tensor:
        flat = torch.einsum("i...->...", p.a + p.b)
        return x * ((flat - flat.mean()) @ p.c)

    laws = recognize(Function(forward, a=draw(3, 3), b=draw(3), c=draw(3, 2)), torch.randn(4, 1))
    degrees = [abs(leg.degree) for law in laws for leg in law.legs if leg.view.parameter == "b"]
    assert laws.checked is not None
    assert laws.checked.refuted == {}
    assert any(0.3 < degree < 0.4 and abs(3 * degree - 1) < 1e-15 for degree in degrees)


@pytest.mark.parametrize("function", [torch.special.erfcx, lambda h: torch.logcumsumexp(h, 1)])
def test_a_function_that_is_homogeneous_far_from_zero_keeps_no_scale(function: Callable[[Tensor], Tensor]) -> None:
    model = Function(lambda p, x: function(60 * (x @ p.a)) @ p.b, a=torch.rand(3, 4), b=draw(4, 2))
    laws = recognize(model, 1 + torch.rand(5, 3))
    assert laws.checked is not None
    assert laws.checked.refuted == {}
    assert not any(law.source == "probed" for law in laws)


def test_rounding_behind_a_norm_of_two_numbers_refutes_no_law_up_to_epsilon() -> None:
    for seed in range(6):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.LayerNorm(2), nn.Linear(2, 3))
        laws = recognize(model, 1e-3 * torch.randn(6, 3))
        assert laws.checked is not None
        assert laws.checked.refuted == {}
        assert any(not law.exact for law in laws)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("start", range(2))
def test_structures_have_no_wrong_law_on_any_of_their_inputs(start: int) -> None:
    """Every thirtieth model; `benchmarks/adversarial_laws.py --set structures` has all of them."""
    for name, (model, inputs) in itertools.islice(adversarial_structures.structures(), 4 + 15 * start, None, 30):
        laws = recognize(model, *inputs[0]).select(lambda law: law.source == "typed")
        # A finite move says nothing about a program that changes with every call.
        for args in inputs if len(laws) and not name.startswith("state") else ():
            assert dict(check(laws, subject(partial(_built, model, args))).wrong) == {}, name


def test_architectures_have_no_wrong_law_on_any_of_their_inputs() -> None:
    """Every fortieth model; `benchmarks/adversarial_laws.py --set architectures` has all of them."""
    for name, (model, inputs) in itertools.islice(adversarial_architectures.architectures(), 9, None, 40):
        laws = recognize(model, *inputs[0]).select(lambda law: law.source == "typed")
        for args in inputs if len(laws) else ():
            assert dict(check(laws, subject(partial(_built, model, args))).wrong) == {}, name


def _halved(gradient: Tensor) -> Tensor:
    return gradient / 2


class _DoubledForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


def _hooked_weight(p: Any, x: Tensor) -> Tensor:
    weight = p.a * 1.0
    weight.register_hook(_halved)
    return (x @ weight).relu() @ p.b


def _hooked_node(p: Any, x: Tensor) -> Tensor:
    hidden = (x @ p.a).relu()
    assert hidden.grad_fn is not None
    hidden.grad_fn.register_prehook(lambda gradients: tuple(map(_halved, gradients)))
    return hidden @ p.b


def _doubled_weight(p: Any, x: Tensor) -> Tensor:
    return (x @ _DoubledForward.apply(p.a)).relu() @ p.b


@pytest.mark.parametrize("function", [_hooked_weight, _hooked_node, _doubled_weight])
def test_laws_through_a_gradient_of_the_authors_before_a_weights_first_use_are_assumed(function: Any) -> None:
    laws = recognize(Function(function, a=draw(3, 4), b=draw(4, 2)), torch.randn(5, 3))
    assert len(laws)
    assert {law.source for law in laws} == {"assumed"}


def test_a_weight_without_hooks_is_not_assumed() -> None:
    laws = recognize(Function(lambda p, x: (x @ (p.a * 1.0)).relu() @ p.b, a=draw(3, 4), b=draw(4, 2)), draw(5, 3))
    assert {law.source for law in laws} == {"typed"}


def test_a_program_that_trusts_its_lengths_is_not_run_at_other_sizes() -> None:
    sizes = []

    def segments(p: Any, x: Tensor) -> Tensor:
        sizes.append(len(x))
        return torch.segment_reduce(x @ p.a, "sum", lengths=torch.tensor([2, 1, 3]), unsafe=True) @ p.b

    def rows(p: Any, x: Tensor) -> Tensor:
        sizes.append(len(x))
        return x @ p.a @ p.b

    recognize(Function(rows, a=draw(4, 4), b=draw(4, 2)), draw(6, 4))
    assert set(sizes) != {6}
    sizes.clear()
    recognize(Function(segments, a=draw(4, 4), b=draw(4, 2)), draw(6, 4))
    assert set(sizes) == {6}


def test_only_indices_made_of_floats_count_as_computed() -> None:
    def captured(function: Callable[[Tensor], Tensor]) -> CapturedProgram:
        weight = nn.Parameter(draw(4, 4))
        return capture(lambda: function(weight), {"w": weight})

    x, chosen = draw(5, 4), torch.tensor([0, 3, 1])
    assert program_check._computes_indices(captured(lambda w: w[(x @ w)[:, 0].long().clamp(0, 3)]))
    assert not program_check._computes_indices(captured(lambda w: w[(x @ w).argmax(1)] + w[chosen].sum()))
    assert not program_check._computes_indices(captured(lambda w: (x @ w).long() + w.sum()))


@pytest.mark.parametrize("name", STATEFUL)
def test_laws_do_not_rest_on_what_state_holds_before_the_first_call(name: str) -> None:
    torch.manual_seed(0)
    model, x = Stateful(STATEFUL[name]), draw(5, 4)
    laws = recognize(model, x).select(lambda law: law.source == "typed")
    assert not any(law.parameters == ("c",) for law in laws)
    assert not any(law.parameters == ("t",) and "row" in name for law in laws)
    for _ in range(3):
        model.zero_grad()
        model(x).square().sum().backward()
        grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
        balance = laws.balance(grads, dict(model.named_parameters())) if len(laws) else None
        assert balance is None or max(map(float, balance.residuals)) < 1e-3


@pytest.mark.parametrize("name", STATEFUL)
def test_reading_laws_leaves_the_state_of_a_module_alone(name: str) -> None:
    model = Stateful(STATEFUL[name])
    mean, count = model.mean, model.count
    recognize(model, draw(5, 4))
    assert model.mean is mean
    assert model.count is count
    assert float(mean.abs().sum()) == 0
    assert int(count) == 0
    assert float(model.kept.abs().sum()) == 0
    assert model.calls == 0


def _skip_by_chance(p: Any, x: Tensor) -> Tensor:
    hidden = (x @ p.a).relu()
    return hidden @ p.b if random.random() < 0.99 else (hidden @ p.q).relu() @ p.b


INPUT_DECIDES: dict[str, tuple[Callable[..., Tensor], dict[str, Tensor], tuple[Any, ...]]] = {
    "a row": (lambda p, i: p.t[int(i[0])].relu() @ p.b, {"t": draw(6, 3), "b": draw(3, 2)}, (torch.tensor([2, 2]),)),
    "a length": (
        lambda p, x, mask: (p.t[: mask.sum()] * x).relu() @ p.b,
        {"t": draw(6, 3), "b": draw(3, 2)},
        (draw(3, 3), torch.tensor([1, 1, 1, 0, 0])),
    ),
    "a list": (
        lambda p, x, i: (x @ p.a + p.t[: max(i.tolist())].sum(0)).relu() @ p.b,
        {"a": draw(4, 3), "t": draw(6, 3), "b": draw(3, 2)},
        (draw(5, 4), torch.tensor([2, 1])),
    ),
    "a factor": (
        lambda p, x: (x @ p.a + p.c * int((x > 100).sum())).relu() @ p.b,
        {"a": draw(4, 3), "c": draw(3), "b": draw(3, 2)},
        (draw(5, 4),),
    ),
    "chance": (_skip_by_chance, {"a": draw(4, 3), "q": draw(3, 3), "b": draw(3, 2)}, (draw(5, 4),)),
}


@pytest.mark.parametrize("case", INPUT_DECIDES)
def test_laws_of_a_program_that_reads_whole_numbers_or_draws_its_own_are_assumed(case: str) -> None:
    function, parameters, inputs = INPUT_DECIDES[case]
    laws = recognize(Function(function, **parameters), *inputs)
    assert {law.source for law in laws} <= {"assumed"}


def test_rows_that_a_mask_leaves_out_are_not_called_unused() -> None:
    def forward(p: Any, x: Tensor, mask: Tensor) -> Tensor:
        rows = x[mask]
        return (rows @ p.a + p.t[: len(rows)]).relu() @ p.b

    mask = torch.tensor([True, True, True, False, False])
    laws = recognize(Function(forward, a=draw(4, 3), t=draw(6, 3), b=draw(3, 2)), draw(5, 4), mask)
    assert not any(law.source == "typed" and law.parameters == ("t",) for law in laws)


@pytest.mark.parametrize(
    "function",
    [lambda p, x: torch.dist(p.a[0, 0], p.a) * x, lambda p, x: torch.prod(p.a[0, 0], 0) * x],
)
def test_numbers_without_axes_are_followed(function: Callable[..., Tensor]) -> None:
    laws = recognize(Function(function, a=draw(3, 4)), draw(5))
    assert laws.checked is not None
    assert laws.checked.refuted == {}


GRID = torch.linspace(-1.2, 1.2, 32).reshape(1, 4, 4, 2)
EDGES = torch.tensor([[0, 1, 2, 3, 4, 4], [1, 0, 3, 2, 4, 0]])


def _interpolated(p: Any, x: Tensor) -> Tensor:
    h = torch.einsum("nchw,cd->ndhw", x, p.a).relu()
    sampled = F.grid_sample(h, GRID.to(x.dtype).expand(len(x), -1, -1, -1), align_corners=False)
    return torch.einsum("nchw,cd->ndhw", sampled, p.b)


def _unpooled(p: Any, x: Tensor) -> Tensor:
    pooled, places = F.max_pool2d(torch.einsum("nchw,cd->ndhw", x, p.a).relu(), 2, return_indices=True)
    return torch.einsum("nchw,cd->ndhw", F.max_unpool2d(pooled, places, [2, 2]), p.b)


def _bagged(mode: str, act: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda p, x: act(F.embedding_bag(EDGES, p.a, mode=mode)) @ p.b * x


def _summed_over_edges(p: Any, x: Tensor) -> Tensor:
    matrix = torch.sparse_coo_tensor(EDGES, torch.ones(6, dtype=x.dtype), (5, 5))
    return torch.sparse.mm(matrix, (x @ p.a).relu()) @ p.b


def _written_zero(p: Any, x: Tensor) -> Tensor:
    h = (x @ p.a).clone()
    h[h < 0] = 0.0
    return h @ p.b


IMAGE, ROWS = (2, 5, 4, 4), (5, 5)
LINEAR: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], int]] = {
    "sampled images": (_interpolated, IMAGE, 4),
    "unpooled images": (_unpooled, IMAGE, 4),
    "sum of a bag": (_bagged("sum", lambda h: h), (2, 1), 10),
    "mean of a bag": (_bagged("mean", torch.relu), (2, 1), 4),
    "maximum of a bag": (_bagged("max", lambda h: h), (2, 1), 4),
    "largest so far": (lambda p, x: (x @ p.a).cummax(0).values @ p.b, ROWS, 4),
    "smallest so far of channels": (lambda p, x: (x @ p.a).cummin(1).values @ p.b, ROWS, 1),
    "spectrum over rows": (lambda p, x: torch.fft.rfft((x @ p.a).relu(), dim=0).abs() @ p.b, ROWS, 4),
    "spectrum and back": (lambda p, x: torch.fft.irfft(torch.fft.rfft(x @ p.a, dim=0), n=5, dim=0) @ p.b, ROWS, 10),
    "spectrum over channels": (lambda p, x: torch.fft.fft((x @ p.a).relu()).abs() @ p.b, ROWS, 1),
    "neighbours of a sparse graph": (_summed_over_edges, ROWS, 4),
    "zero written where negative": (_written_zero, ROWS, 4),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", LINEAR)
def test_laws_pass_operators_that_read_entries_at_given_places(case: str) -> None:
    torch.manual_seed(0)
    function, shape, numbers = LINEAR[case]
    assert true_of(Function(function, a=draw(5, 4), b=draw(4, 3)), draw(*shape)).numbers == numbers
