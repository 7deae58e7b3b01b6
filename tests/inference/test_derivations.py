"""Derivations of laws are written out and checked by rules of their own; spoiled ones are seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import program_grammar
from conserved import LawSet, Verdict, blocks, recognize
from conserved.inference.checker import check, motions_of
from conserved.inference.derivation import Derivation
from conserved.inference.derivation_record import written_law
from conserved.inference.signed_sets import SignedSets
from conserved.verdict import Status
from law_checks import check as check_laws
from law_checks import subject


def derivations(laws: LawSet) -> dict[str, Any]:
    """Every derivation, through a file's text."""
    assert isinstance(laws.derivation, Derivation)
    return {symmetry.name: json.loads(json.dumps(laws.derivation.written(symmetry))) for symmetry in laws}


def decoder() -> LawSet:
    return recognize(blocks.DecoderLM(12, 8, 2, 4, 6, kv_heads=2), torch.zeros(2, 5, dtype=torch.int64))


class Fused(nn.Module):
    """Attention with one map for queries, keys and values, biases, and a learned key."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, add_bias_kv=True)
        self.up, self.down = nn.Linear(4, 3), nn.Linear(3, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention(x, x, x, need_weights=False)[0]
        return self.down(F.relu(self.up(y)))


class Scan(nn.Module):
    """A state that starts at zero, a gate, a convolution that pads, a batch norm, a share, a look-up."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.gate, self.write = nn.Embedding(7, 4), nn.Linear(4, 3), nn.Linear(4, 3, bias=False)
        self.conv, self.norm, self.head = nn.Conv1d(3, 4, 3, padding=1), nn.BatchNorm1d(4), nn.Linear(4, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        state, states = torch.zeros(tokens.shape[0], 3), []
        for t in range(tokens.shape[1]):
            state = torch.sigmoid(self.gate(x[:, t])) * state + self.write(x[:, t])
            states.append(state)
        y = self.norm(self.conv(torch.stack(states, -1))).transpose(1, 2)
        return self.head(F.relu(y))


TOKENS = torch.tensor([[0, 4, 2, 6, 1]])

MODELS: dict[str, Callable[[], LawSet]] = {
    "rotary grouped decoder": decoder,
    "fused attention and ReLU": lambda: recognize(Fused(), torch.randn(2, 3, 4)),
    "layer norm": lambda: recognize(
        nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(5, 3)
    ),
    "rotary attention": lambda: recognize(blocks.Attention(dim=8, heads=2, rotary=True), torch.randn(1, 3, 8)),
    "scan": lambda: recognize(Scan(), TOKENS.expand(3, -1), loss="cross_entropy"),
}


@cache
def inferred(model: str) -> LawSet:
    return MODELS[model]()


@cache
def text_of(model: str) -> str:
    return json.dumps(derivations(inferred(model)))


def written_out(model: str) -> dict[str, Any]:
    """Every derivation of a model; a copy of its own for each test."""
    found: dict[str, Any] = json.loads(text_of(model))
    return found


@pytest.mark.parametrize("model", MODELS)
def test_every_derivation_is_right(model: str) -> None:
    laws, found = inferred(model), written_out(model)
    assert len(found) > 2
    for name, derivation in found.items():
        report = check(derivation)
        assert report.ok, (name, report.wrong, report.unchecked)
        assert report.steps >= 1
        assert laws.proof(name) == Verdict.PROVED


def test_all_kinds_of_laws_occur_among_them() -> None:
    kinds = {d["law"]["kind"] for model in MODELS for d in written_out(model).values()}
    assert kinds == {"general_linear", "complex_scaling", "scaling", "one_scale", "translation"}


def other_number(law: dict[str, Any], generator: np.random.Generator) -> None:
    """A leg moves by another power, or the other way."""
    leg = law["legs"][generator.integers(len(law["legs"]))]
    leg["degree"] *= float(generator.choice([-1.0, 2.0])) if law["kind"] != "general_linear" else -1.0


def leg_left_out(law: dict[str, Any], generator: np.random.Generator) -> None:
    """One of the parameters stays where it is."""
    del law["legs"][generator.integers(len(law["legs"]))]


def entries_left_out(law: dict[str, Any], generator: np.random.Generator) -> None:
    """A leg moves only some of its columns."""
    leg = law["legs"][generator.integers(len(law["legs"]))]
    leg["places"] = [row[:-1] for row in leg["places"]]


def rows_exchanged(law: dict[str, Any], generator: np.random.Generator) -> None:
    """A leg moves two of its rows by each other's numbers."""
    leg = law["legs"][generator.integers(len(law["legs"]))]
    leg["places"] = [*leg["places"][1:], leg["places"][0]]


MUTATIONS = (other_number, leg_left_out, entries_left_out, rows_exchanged)


def still_a_symmetry(mutation: Any, law: dict[str, Any]) -> bool:
    """Mutations that make another law, or the same one: then the checker must not refuse them."""
    legs = law["legs"]
    if mutation is other_number:
        return len(legs) == 1
    if mutation is leg_left_out:
        return len(legs) == 1
    if mutation is entries_left_out:
        # One column of a translation is one of its numbers less.
        return law["kind"] == "translation" or len(legs[0]["places"][0]) == 1
    return law["kind"] in ("one_scale", "translation") or len(legs[0]["places"]) == 1 or len(legs) == 1


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("model", MODELS)
def test_a_tampered_law_is_refused(model: str, mutation: Any) -> None:
    """Unless one backward pass of random weights says that what came out is a law as well."""
    refused = 0
    for derivation in written_out(model).values():
        for seed in range(2):
            law = json.loads(json.dumps(derivation["law"]))
            if not law["legs"] or still_a_symmetry(mutation, law):
                continue
            mutation(law, np.random.default_rng(seed))
            report = check({"law": law, "program": derivation["program"]})
            assert not report.ok, (law["name"], mutation.__name__, seed)
            refused += 1
    assert refused >= 1


@pytest.mark.parametrize("model", MODELS)
def test_a_rule_misapplied_is_refused(model: str) -> None:
    """A product of matrices, or a ReLU, that the motion goes through is exchanged for an exponential."""
    seen = 0
    for derivation in written_out(model).values():
        law, program = derivation["law"], derivation["program"]
        moved = motions_of({"law": law, "program": program})
        for step in program["steps"]:
            former = step["operation"]
            inputs = [given["value"] for given in step["arguments"] if isinstance(given, dict) and "value" in given]
            moving = any(value in moved and not moved[value].still for value in inputs[:1])
            if moving and seen < 12 and former.startswith(("aten::mm", "aten::bmm", "aten::relu")):
                step["operation"] = "aten::exp.default"
                assert not check({"law": law, "program": program}).ok, (law["name"], step["line"])
                step["operation"] = former
                seen += 1
    assert seen >= 1


def spoiled(derivation: dict[str, Any], seed: int) -> dict[str, Any]:
    """The derivation with the written motion of one entry of one tensor changed."""
    generator = np.random.default_rng(seed)
    copy = json.loads(json.dumps(derivation["types"]))
    chosen = copy[list(copy)[generator.integers(len(copy))]]
    array = np.asarray(chosen[0]["array"], dtype=float)
    array.reshape(-1)[generator.integers(array.size)] += 1e6
    chosen[0]["array"] = array.tolist()
    return derivation | {"types": copy}


@pytest.mark.parametrize("model", MODELS)
def test_a_tensor_that_moves_otherwise_than_it_is_written_is_seen(model: str) -> None:
    tried = 0
    for name, derivation in written_out(model).items():
        if derivation["law"]["kind"] == "translation":
            continue
        assert derivation["types"], name
        for seed in range(3):
            assert not check(spoiled(derivation, seed)).ok, (name, seed)
            tried += 1
    assert tried >= 3


def test_a_general_linear_group_does_not_pass_through_relu() -> None:
    """The same charges are right for a linear pair and for a ReLU between: only what is mixed tells them apart."""
    laws = recognize(nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)), torch.randn(5, 3))
    (pair,) = derivations(laws).values()
    assert check(pair).ok
    with_relu = recognize(
        nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 2, bias=False)), torch.randn(5, 3)
    )
    (neurons,) = derivations(with_relu).values()
    legs = [leg | {"parameter": leg["parameter"].replace("1.", "2.")} for leg in pair["law"]["legs"]]
    claimed = pair["law"] | {"legs": legs}
    assert [leg["places"] for leg in legs] == [leg["places"] for leg in neurons["law"]["legs"]]
    assert check({"law": claimed | {"kind": "scaling"}, "program": neurons["program"]}).ok
    assert check({"law": claimed, "program": neurons["program"]}).wrong


def test_a_law_up_to_epsilon_is_refused_as_an_exact_one() -> None:
    laws = inferred("rotary grouped decoder")
    stream = next(symmetry for symmetry in laws if symmetry.epsilon)
    derivation = written_out("rotary grouped decoder")[stream.name]
    assert check(derivation).ok
    assert "ε" in laws.proof(stream.name).scope
    assert not check({"law": derivation["law"] | {"epsilon": 0.0}, "program": derivation["program"]}).ok


def test_a_motion_that_reaches_the_output_is_refused() -> None:
    laws = recognize(nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)), torch.randn(5, 3))
    (derivation,) = derivations(laws).values()
    law = derivation["law"] | {"legs": derivation["law"]["legs"][1:], "kind": "scaling"}
    law["legs"][0]["places"] = np.asarray(law["legs"][0]["places"]).T.tolist()
    assert "an output moves" in check(derivation | {"law": law, "types": {}}).wrong


def test_an_operation_without_a_rule_leaves_a_law_open() -> None:
    laws = recognize(nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)), torch.randn(5, 3))
    (derivation,) = derivations(laws).values()
    text = json.dumps(derivation["program"]).replace("aten::mm.default", "other::mm_of_mine.default")
    report = check(derivation | {"program": json.loads(text), "types": {}})
    assert report.unchecked
    assert not report.ok


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


class CheckpointFunction(Doubled):
    """Called as torch's own is, and nothing like it."""


class Around(Doubled):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return checkpoint(torch.mul, x, 2, use_reentrant=True)


class Within(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.b(self.function(self.a(x)))


@pytest.mark.parametrize("function", [Doubled, CheckpointFunction, Around])
def test_assumed_laws_are_not_proved(function: Any) -> None:
    laws = recognize(Within(function.apply), torch.randn(5, 3))
    assert [laws.proof(symmetry.name).status for symmetry in laws] == [Status.INCONCLUSIVE]
    assert "author" in laws.proof(laws.symmetries[0].name).message


def test_laws_through_checkpoints_of_torch_are_proved() -> None:
    model = Within(lambda x: checkpoint(torch.mul, x, 2, use_reentrant=True))
    laws = recognize(model, torch.randn(5, 3))
    assert [laws.proof(symmetry.name).status for symmetry in laws] == [Status.PROVED]


@pytest.mark.parametrize("seed", range(0, 60, 7))
def test_laws_of_random_programs_are_proved_and_spoiled_ones_are_not(seed: int) -> None:
    """The checker is no rubber stamp: laws with rows paired across, which a backward pass refutes, are refused."""
    program, x, loss, words = program_grammar.compose(seed)
    laws = recognize(program, x, loss=loss)
    assert isinstance(laws.derivation, Derivation)
    for symmetry in laws:
        if symmetry.source == "typed":
            report = laws.derivation.checked(symmetry)
            assert not report.wrong, (symmetry.name, report.wrong, words, str(program))
    prepared = subject(program_grammar.build(seed), loss=loss)
    spoiled_laws = laws.baselines()
    wrong = check_laws(spoiled_laws, prepared, moves=False).wrong
    for symmetry in spoiled_laws:
        if symmetry.name in wrong and symmetry.exact:
            law = written_law(symmetry)
            assert not check({"law": law, "program": laws.derivation._written_program()}).ok, (symmetry.name, words)


@pytest.mark.parametrize("seed", range(20))
def test_sets_of_equal_and_opposite_numbers_are_those_of_a_naive_closure(seed: int) -> None:
    """Merging many at a time against propagating one equation after the other until nothing changes."""
    generator = np.random.default_rng(seed)
    count, equations = 12, int(generator.integers(1, 14))
    left, right = generator.integers(0, count, (2, equations))
    signs = generator.choice([-1, 1], equations)
    sets = SignedSets()
    sets.grow(count)
    torn = [sets.join(left[signs == s], right[signs == s], int(s)) for s in (1, -1)]
    root, sign = sets.roots()
    vanish = np.isin(root, sets.find(np.concatenate(torn))[0])
    rows = np.zeros((equations, count))
    for n, (a, b, s) in enumerate(zip(left, right, signs, strict=True)):
        rows[n, a] += 1
        rows[n, b] -= s
    kernel = np.linalg.svd(rows)[2][np.linalg.matrix_rank(rows) :]
    for a in range(count):
        assert vanish[a] == bool(np.allclose(kernel[:, a], 0))
        if not vanish[a]:
            assert np.allclose(kernel[:, a], sign[a] * kernel[:, root[a]])
    assert len(set(root[~vanish])) == kernel.shape[0]


class SoftmaxWithoutCorrection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        shares = x.softmax(-1)
        ctx.save_for_backward(shares)
        return shares

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        (shares,) = ctx.saved_tensors
        found: Tensor = shares * slopes[0]
        return found


def test_a_shift_that_ends_in_a_function_with_a_backward_of_its_own_is_not_proved() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.head = nn.Linear(4, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(SoftmaxWithoutCorrection.apply(self.router(x)).tanh())

    model, x = Router(), torch.randn(6, 4)
    laws = recognize(model, x)
    model(x).square().mean().backward()
    assert len(laws)
    assert min(laws.residuals().values()) > 0.1
    assert all(symmetry.source == "assumed" for symmetry in laws)
    assert all(laws.proof(symmetry.name).status is Status.INCONCLUSIVE for symmetry in laws)


def test_an_operator_of_another_library_is_not_taken_for_one_that_is_known() -> None:
    derivation = derivations(inferred("fused attention and ReLU"))
    name, law = next((name, law) for name, law in derivation.items() if name.endswith("neurons"))
    assert check(law).ok, name
    steps = [one for one in law["program"]["steps"] if one["operation"].startswith("aten::relu")]
    assert steps
    steps[0]["operation"] = steps[0]["operation"].replace("aten::", "elsewhere::")
    found = check(law)
    assert not found.ok
    assert not found.wrong
    assert any("elsewhere::relu" in one for one in found.unchecked)
