"""Certificates: what is proved, at which tier, and that nothing false can be."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import conserved
import conserved_verify
import zoo
from conserved import Certificate, LawSet, Verdict, blocks, certify, recognize
from conserved.blocks import Attention, FeedForward, SwiGLU, TransformerBlock
from conserved.certificates import certifying
from conserved.certificates.certifying import issue
from conserved.certificates.contents import CertificateContents
from conserved.certificates.form import Form
from conserved.certificates.proof import encloses_zero, enclosure, prove_rank, proved_by_argument, random_fields
from conserved.discovery import UnsuitableError
from conserved.verdict import Status
from sampling import but_for
from zoo import CASES, Case

pytestmark = pytest.mark.usefixtures("as_users_run_it")
"""The arithmetic is checked with types in test_certify_operators; here they would take most of the time."""

BY_NAME = {case.name: case for case in CASES}


@cache
def certified(name: str) -> Certificate:
    case = BY_NAME[name]
    return conserved.certify(case.model(), case.short_sample, loss=case.loss)


class TestCompleteness:
    # Those that are left to `--whole` are counted where discovery is tested.
    @pytest.mark.parametrize("case", but_for(CASES, *zoo.COUNTED_ONLY), ids=lambda case: case.name)
    def test_every_block_has_exactly_the_laws_of_the_theory_and_that_is_proved(self, case: Case) -> None:
        result = certified(case.name)
        assert (result.at_most, result.found) == (case.conserved, case.conserved)
        assert result.complete
        assert result.verdict == Verdict.PROVED
        assert set(result.tiers) <= {Status.PROVED}

    def test_the_sigmoid_mixture_has_no_more_than_six_laws(self) -> None:
        """Theorem 4.7 of the paper lists Σ W_i among nine; the other six are all there are."""
        result = certified("sigmoid mixture")
        assert result.at_most == 6
        names = list(result.contents.parameters)
        start = sum(torch.Size(result.contents.parameters[n]).numel() for n in names[: names.index("router.weight")])
        router = [start + 3 * expert for expert in range(3)]
        impostor = Form(quadratic=(), linear=tuple((i, 1.0) for i in router))
        sampled = random_fields(result.contents.program, result.contents.theta, result.contents.inputs, seed=1)
        assert not encloses_zero(enclosure(impostor, sampled))
        softmax = certified("softmax mixture").contents
        assert encloses_zero(enclosure(impostor, random_fields(softmax.program, softmax.theta, softmax.inputs, seed=1)))

    @pytest.mark.parametrize(
        ("build", "laws"),
        [
            (lambda: TransformerBlock(Attention(4, 2, bias=True), FeedForward(4, 3, bias=True)), 25),
            (lambda: TransformerBlock(Attention(4, 2, rotary=True, qk_norm=True), SwiGLU(4, 3), "rms"), 18),
        ],
        ids=["pre-norm, biases, GELU", "RMS, rotary, query/key norm, SwiGLU"],
    )
    def test_with_the_usual_epsilon_only_the_exact_laws_are_counted(
        self, build: Callable[[], nn.Module], laws: int
    ) -> None:
        certificate = conserved.certify(build().double(), torch.zeros(3, 4))
        assert (certificate.at_most, certificate.found, certificate.verdict.status) == (laws, laws, Status.PROVED)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("block", "dim", "laws"),
        [
            (lambda: TransformerBlock(Attention(3, 1, bias=True), FeedForward(3, 2, bias=True)), 3, 45),
            pytest.param(
                lambda: TransformerBlock(Attention(4, 2, rotary=True, qk_norm=True), SwiGLU(4, 3), "rms"),
                4,
                36,
                marks=pytest.mark.whole,
            ),
        ],
        ids=["pre-norm", "RMS"],
    )
    def test_a_stack_of_two_blocks_is_complete_too(self, block: Callable[[], nn.Module], dim: int, laws: int) -> None:
        stack = nn.Sequential(block(), block()).double()
        certificate = conserved.certify(stack, torch.zeros(3, dim))
        assert (certificate.at_most, certificate.found, certificate.verdict.status) == (laws, laws, Status.PROVED)

    def test_laws_can_come_from_the_recognisers(self) -> None:
        case = BY_NAME["attention, grouped"]
        model = case.model()
        certificate = conserved.certify(model, case.sample, laws=conserved.recognize(model))
        assert certificate.complete

    def test_fewer_laws_than_there_may_be_are_said_to_be_fewer(self) -> None:
        case = BY_NAME["attention"]
        model = case.model()
        some = conserved.recognize(model).select(lambda symmetry: "query_key" in symmetry.family)
        certificate = conserved.certify(model, case.sample, laws=some)
        assert (certificate.at_most, certificate.found, certificate.complete) == (12, 6, False)
        assert "may not be complete" in certificate.verdict.message

    def test_the_statement_says_where_it_holds(self) -> None:
        assert "near θ" in certified("ReLU FFN").verdict.message
        assert "token sequences" in certified("decoder").verdict.message
        assert certified("attention").verdict.message == "Exactly 12 independent laws of 64 parameters, all listed."


class TestTiers:
    def test_a_law_beyond_the_symbolic_argument_is_verified_and_not_called_proved(self) -> None:
        """tanh a = (e^{2a} − 1)/(e^{2a} + 1) is no relation the letters know, so that a is inert is only enclosed."""

        def f(values: dict[str, Tensor], x: Tensor) -> Tensor:
            a, b = values["a"], values["b"]
            return b * x + x * (torch.tanh(a) - (torch.exp(2 * a) - 1) / (torch.exp(2 * a) + 1))

        start = {name: torch.tensor([0.4], dtype=torch.float64) for name in "ab"}
        laws = _inert("a", start)
        certificate = conserved.certify(f, torch.zeros(1), params=start, laws=laws)
        assert (certificate.at_most, certificate.found) == (1, 1)
        assert certificate.verdict == Verdict.VERIFIED
        assert certificate.tiers == (Status.VERIFIED,)
        assert "1 verified at random points" in certificate.verdict.message
        assert certificate.check() == Verdict.VERIFIED

    @pytest.mark.parametrize("name", ["attention, biases", "attention, rotary", "SwiGLU", "softmax mixture"])
    def test_a_mutated_law_is_neither_proved_nor_enclosed(self, name: str) -> None:
        contents = certified(name).contents
        sampled = random_fields(contents.program, contents.theta, contents.inputs, seed=5)
        rng = random.Random(0)
        for group in contents.laws:
            for form in group:
                for mutant in _mutants(form, rng):
                    assert not _proved(contents, mutant)
                    assert not encloses_zero(enclosure(mutant, sampled))

    @pytest.mark.parametrize("name", ["attention", "pre-norm block"])
    def test_an_argument_without_room_for_terms_proves_nothing(self, name: str) -> None:
        contents = certified(name).contents
        assert not any(proved_by_argument(contents.program, g, contents.inputs[0], {}, terms=3) for g in contents.laws)


def _inert(name: str, start: dict[str, Tensor]) -> conserved.LawSet:
    from conserved.symmetry import Translation

    view = conserved.View.of(name, tuple(start[name].shape))
    symmetry = conserved.Symmetry(
        block="", family="inert", part="", kind=Translation(), legs=(conserved.Leg(view=view, degree=1),), epsilon=0.0
    )
    return conserved.LawSet(symmetries=(symmetry,), parameters=start)


def _mutants(form: Form, rng: random.Random) -> list[Form]:
    """A sign turned, a term lost, a coefficient doubled; for linear laws a term lost."""
    if form.linear:
        if len(form.linear) < 2:
            return []
        lost = list(form.linear)
        lost.pop(rng.randrange(len(lost)))
        return [dataclasses.replace(form, linear=tuple(lost))]
    i, j, a = rng.choice(form.quadratic)
    rest = tuple(term for term in form.quadratic if {term[0], term[1]} != {i, j})
    pair = {(i, j), (j, i)}
    turned = rest + tuple((p, q, -a) for p, q in pair)
    doubled = rest + tuple((p, q, 2 * a) for p, q in pair)
    return [dataclasses.replace(form, quadratic=terms) for terms in (rest, turned, doubled)]


def _proved(contents: CertificateContents, form: Form) -> bool:
    from conserved.certificates.proof import decisions_at

    x = contents.inputs[0]
    return proved_by_argument(contents.program, [form], x, decisions_at(contents.program, contents.theta, x, 128))


class TestNothingFalse:
    def test_a_rank_deficient_choice_is_inconclusive(self) -> None:
        contents = certified("attention").contents
        twice = dataclasses.replace(contents, words=(*contents.words, contents.words[0]))
        result = issue(twice)
        assert result.verdict == Verdict.INCONCLUSIVE
        assert not result.complete

    def test_too_few_bits_are_inconclusive(self) -> None:
        contents = certified("attention").contents
        result = prove_rank(contents.program, contents.theta, contents.spelled(), bits=2, most_bits=8)
        assert not result.proved

    def test_bits_are_added_until_they_decide(self) -> None:
        contents = certified("attention").contents
        result = prove_rank(contents.program, contents.theta, contents.spelled(), bits=2)
        assert result.proved
        assert result.bits > 8

    def test_a_kink_at_the_sample_is_inconclusive_and_says_so(self) -> None:
        contents = certified("ReLU FFN").contents
        shape = contents.inputs[0].tensors[0].shape
        dead = dataclasses.replace(contents.inputs[0], tensors=(torch.zeros(*shape, dtype=torch.float64).numpy(),))
        result = issue(dataclasses.replace(contents, inputs=(dead, *contents.inputs[1:])))
        assert result.verdict == Verdict.INCONCLUSIVE
        assert "kink" in result.verdict.message

    @settings(max_examples=6, deadline=None)
    @given(
        name=st.sampled_from(["attention", "linear pair", "SwiGLU", "softmax mixture", "ReLU FFN"]),
        bits=st.integers(2, 128),
        seed=st.integers(0, 10**6),
    )
    def test_no_choice_of_words_and_bits_proves_more_than_the_true_rank(self, name: str, bits: int, seed: int) -> None:
        """Fuzzing for a false proof: more words than the rank, drawn at random, repeated, deeper, at any precision."""
        contents = certified(name).contents
        rng = random.Random(seed)
        rank = contents.program.size - BY_NAME[name].conserved
        words = rng.sample(contents.words, rng.randint(0, rank))
        while len(words) <= rank:
            words.append(tuple(rng.randrange(len(contents.samples)) for _ in range(rng.randint(1, 3))))
        fuzzed = dataclasses.replace(contents, words=tuple(words))
        assert not prove_rank(contents.program, contents.theta, fuzzed.spelled(), bits, most_bits=128).proved

    def test_a_false_law_that_is_given_is_not_listed(self) -> None:
        """Σ W_i of a softmax router, claimed for a sigmoid one."""
        laws = conserved.recognize(BY_NAME["softmax mixture"].model())
        case = BY_NAME["sigmoid mixture"]
        certificate = conserved.certify(case.model(), case.sample, laws=laws)
        assert certificate.complete
        assert not any("router" in formula for formula in certificate.formulas)


def test_a_mask_that_is_an_input_is_a_pattern_of_its_own() -> None:
    """Whole numbers compared as reals decide nothing about θ, and the argument still needs what they gave."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = FeedForward(2, 1, "linear")

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.pair(x).masked_fill((mask.double() > 0.5)[:, None], 0.0)

    def inputs(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(3, 2, generator=generator, dtype=torch.float64)
        return x, torch.randint(2, (3,), generator=generator)

    certificate = conserved.certify(Masked().double(), inputs)
    assert certificate.complete
    assert certificate.verdict == Verdict.PROVED


class TestUnsuitable:
    CASES: tuple[tuple[str, Callable[[], Any], str], ...] = (
        (
            "a loss of one's own",
            lambda: conserved.certify(nn.Linear(2, 2), torch.zeros(2), loss=len),  # type: ignore[arg-type]
            "returns the loss",
        ),
        ("bits", lambda: conserved.certify(nn.Linear(2, 2), torch.zeros(2), bits=1), "bits between 2 and 4096, got 1"),
        ("too large", lambda: conserved.certify(nn.Linear(80, 80), torch.zeros(80)), "got 6,480"),
        ("no rule", lambda: conserved.certify(nn.Sequential(nn.Linear(2, 2), _Digamma()), torch.zeros(2)), "digamma"),
        (
            "own backward",
            lambda: conserved.certify(_Hooked(), torch.zeros(2)),
            "BackwardHookFunction, an autograd function with a backward pass of its own",
        ),
        ("control flow", lambda: conserved.certify(_Branching(), torch.zeros(2)), "control flow"),
        (
            "laws of another model",
            lambda: conserved.certify(
                nn.Linear(2, 2), torch.zeros(2), laws=conserved.recognize(blocks.FeedForward(2, 2, "relu"))
            ),
            "Expected laws of the function's parameters",
        ),
        (
            "unknown loss",
            lambda: conserved.certify(nn.Linear(2, 2), torch.zeros(2), loss="hinge"),
            "Expected loss",
        ),
    )

    @pytest.mark.usefixtures("as_users_run_it")
    @pytest.mark.parametrize(("call", "says"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
    def test_it_says_what_to_change(self, call: Callable[[], Any], says: str) -> None:
        with pytest.raises(UnsuitableError, match=says):
            call()


class _Digamma(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.digamma(x * x + 1)


class _Hooked(nn.Linear):
    """A layer whose gradients a hook changes."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_full_backward_hook(lambda module, into, out: None)


class _Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x if float(x.detach().sum()) > 0 else self.w * x * x


def _pair(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return params["b"] @ (params["a"] @ x)


PAIR = {"a": torch.randn(2, 3, dtype=torch.float64), "b": torch.randn(3, 2, dtype=torch.float64)}


def test_laws_are_read_off_the_program_and_the_certificate_says_so(tmp_path: Path) -> None:
    """What inference finds is listed as polynomials: the file is checked by a program that knows nothing of it."""
    torch.manual_seed(0)
    model = blocks.DecoderLM(3, 2, 1, 1, 2)
    certificate = certify(model, lambda g: torch.randint(3, (1, 2), generator=g), loss="cross_entropy")
    assert certificate.verdict == Verdict.PROVED
    assert certificate.complete
    assert certificate.contents.about["laws"] == "inferred from the program, 7 of 7 verified on it in float64"
    path = tmp_path / "decoder.json"
    certificate.save(path)
    assert conserved_verify.verify(json.loads(path.read_text())).complete


@pytest.mark.parametrize("kept", [0, 1])
def test_laws_that_inference_misses_are_searched_for(monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    full = certifying.read_off

    def some(function: Any, x: Any) -> tuple[LawSet, str]:
        laws, _ = full(function, x)
        return LawSet(symmetries=laws.symmetries[:kept]), "inferred from the program, 1 of 1 verified on it in float64"

    monkeypatch.setattr(certifying, "read_off", some)

    def two(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.cat([_pair(params, x), torch.relu(params["c"] * x) * params["d"]])

    params = PAIR | {name: torch.randn(3, dtype=torch.float64) for name in ("c", "d")}
    certificate = certify(two, torch.randn(3, dtype=torch.float64), params=params)
    assert certificate.verdict == Verdict.PROVED
    assert certificate.complete
    assert sum(map(len, certificate.contents.laws)) == 6
    assert "searched for in gradients" in certificate.contents.about["laws"]


def test_laws_that_were_given_are_called_so() -> None:
    laws = recognize(_pair, PAIR, torch.randn(3, dtype=torch.float64))
    certificate = certify(_pair, torch.randn(3, dtype=torch.float64), params=PAIR, laws=laws)
    assert certificate.contents.about["laws"] == "given"
    assert certificate.complete
