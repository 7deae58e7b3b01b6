"""What claims are judged with: exact algebra, forms of quantities, departures in balls, flows and drifts."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conserved.certificates.proof import departure, enclosure, random_fields
from conserved.verdict import Evidence, Verdict
from conserved_papers.claims import paper_blocks as block
from conserved_papers.claims.balls import ball, scalar_attention
from conserved_papers.claims.certified import certificate, forms_of, gradients, named
from conserved_papers.claims.descents import constant, drifts, exponent, flow, scattered
from conserved_papers.claims.judging import confirm, decide
from conserved_papers.claims.matrix_words import Words, matrices
from conserved_papers.claims.polynomials import (
    Letters,
    arranged,
    determinant,
    exact_determinant,
    fractions,
    identical,
    positive_semidefinite,
    rank,
    squares,
    times,
)

pytestmark = pytest.mark.usefixtures("as_users_run_it")

ENTRIES = st.lists(st.integers(-4, 4), min_size=9, max_size=9)


class TestPolynomials:
    def test_a_derivative_is_the_one_of_calculus(self) -> None:
        letters = Letters(A=(2, 2), b=())
        a, b = letters["A"], letters.scalar("b")
        assert identical(letters.gradient(squares(a) * b, "A"), times(2 * b, a))
        assert identical(letters.gradient(squares(a) * b, "b")[()], squares(a))

    def test_what_differs_in_one_term_is_not_identical(self) -> None:
        letters = Letters(A=(2, 2), B=(2, 2))
        a, b = letters["A"], letters["B"]
        assert identical((a @ b).T, b.T @ a.T)
        assert not identical((a @ b).T, a.T @ b.T)

    @settings(max_examples=30, deadline=None)
    @given(entries=ENTRIES)
    def test_determinant_and_rank_are_those_of_numpy(self, entries: list[int]) -> None:
        plain = np.array(entries, dtype=float).reshape(3, 3)
        exact = fractions(np.array(entries).reshape(3, 3))
        assert float(exact_determinant(exact)) == pytest.approx(float(np.linalg.det(plain)), abs=1e-9)
        assert determinant(exact) == exact_determinant(exact)
        assert rank(exact) == np.linalg.matrix_rank(plain)

    @settings(max_examples=30, deadline=None)
    @given(entries=ENTRIES)
    def test_positive_semidefinite_is_what_eigenvalues_say(self, entries: list[int]) -> None:
        plain = np.array(entries).reshape(3, 3)
        for matrix in (plain + plain.T, plain @ plain.T):
            least = float(np.linalg.eigvalsh(matrix.astype(float))[0])
            if abs(least) > 1e-9 or (matrix == plain @ plain.T).all():
                assert positive_semidefinite(fractions(matrix)) is (least > -1e-9)

    def test_a_determinant_of_letters_is_the_formula(self) -> None:
        a = Letters(a=(2, 2))["a"]
        assert identical(determinant(a), a[0, 0] * a[1, 1] - a[0, 1] * a[1, 0])
        assert arranged([[a[0, 0]]]).shape == (1, 1), "a polynomial is an entry, not a sequence of terms"


class TestBalls:
    def test_attention_contains_the_floating_point_value(self) -> None:
        x = np.array([1.0, -2.0, 0.5])
        logits = np.outer(x, x) * 0.5
        weights = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        result = scalar_attention([Fraction(1), Fraction(-2), Fraction(1, 2)], Fraction(1, 2), 3)
        for exact, plain in zip(result, weights @ x * 3, strict=True):
            assert float(exact.mid()) == pytest.approx(plain, rel=1e-12)

    def test_fractions_are_exact(self) -> None:
        assert ball(Fraction(1, 3)).contains(ball(1) / 3)


class TestForms:
    def test_a_quantity_becomes_the_polynomial_it_is(self) -> None:
        contents = certificate(block.mixture, (4, 3)).contents
        forms = forms_of(block.mixture_invariants, contents.parameters)
        theta = torch.tensor(contents.theta, dtype=torch.float64)
        automatic = torch.func.jacrev(lambda t: block.mixture_invariants(named(t, contents.parameters)))(theta)
        exact = gradients(forms, contents.theta).astype(float)
        np.testing.assert_allclose(exact, automatic.numpy(), atol=1e-12)

    def test_a_departure_is_zero_for_laws_positive_for_others_and_below_the_enclosure(self) -> None:
        contents = certificate(block.swiglu_network, (5, 3)).contents
        sampled = random_fields(contents.program, contents.theta, contents.inputs, seed=7)
        for form in forms_of(block.neuron_differences, contents.parameters):
            assert departure(form, sampled) == 0
        for form in forms_of(lambda theta: theta["gate.weight"].flatten(), contents.parameters):
            assert 0 < departure(form, sampled) <= enclosure(form, sampled)


class TestRuns:
    def test_the_flow_is_of_fourth_order(self) -> None:
        """ẋ = −x for the loss x²/2: the error at time 1 falls sixteenfold when the step is halved."""

        def error(steps: int) -> float:
            model = torch.nn.Linear(1, 1, bias=False).double()
            torch.nn.init.ones_(model.weight)

            def half_square(net: torch.nn.Module) -> Tensor:
                return next(net.parameters()).square().sum() / 2

            end = flow(model, half_square, lambda theta: theta["weight"].flatten(), time=1.0, steps=steps)[-1]
            return abs(float(end) - float(torch.tensor(-1.0, dtype=torch.float64).exp()))

        assert exponent([1 / 4, 1 / 8, 1 / 16], [error(4), error(8), error(16)]) == pytest.approx(4, abs=0.2)

    def test_a_linear_law_does_not_drift_and_a_quadratic_one_does(self) -> None:
        still = drifts(
            block.mixture, (5, 3), lambda t: t["router.weight"].sum(0), constant(0.1), (20,), stochastic=True
        )
        moving = drifts(block.mixture, (5, 3), block.expert_differences, constant(0.1), (20,), stochastic=True)
        assert still[0] < 1e-14 < 1e-6 < moving[0]

    def test_runs_from_one_seed_are_equal(self) -> None:
        first, second = (scattered(block.mixture, seed=3) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_only_a_proof_makes_a_claim_proved() -> None:
    assert confirm("So.", Evidence(what="measured", value=1.0)) == Verdict.VERIFIED
    assert confirm("So.", Evidence(what="shown", proof=True), scope="all sizes") == Verdict.PROVED
    assert decide(False, "So.", "Not so.", Evidence(what="shown", proof=True)) == Verdict.REFUTED


class TestWords:
    """Matrix words agree with matrices of numbers, and see what does not commute."""

    def test_words_are_what_matrices_do(self) -> None:
        rng = np.random.default_rng(0)
        numbers = {name: rng.integers(-3, 4, (3, 3)) for name in "ABM"}

        def value(words: Words) -> Any:
            result = np.zeros((3, 3))
            for word, factor in words.terms.items():
                product = np.eye(3)
                for letter in word:
                    product = product @ (numbers[letter[0]].T if letter.endswith("'") else numbers[letter])
                result = result + float(factor) * product
            return result

        a, b, m = matrices("ABM")
        x, y, z = (numbers[name] for name in "ABM")
        assert np.array_equal(value((a @ b - 2 * m).T @ a), (x @ y - 2 * z).T @ x)
        assert np.trace(value(a @ b @ m)) == np.trace(value((a @ b @ m).trace()))

    def test_what_does_not_commute_is_told_apart_and_the_trace_is_not(self) -> None:
        a, b = matrices("AB")
        assert a @ b != b @ a
        assert (a @ b).trace() == (b @ a).trace() == (a.T @ b.T).trace()
        assert (a @ a @ b @ b).trace() != (a @ b @ a @ b).trace()
        assert not (a - a)
        assert (a @ a).replace({("A", "A"): ("A",)}) == a
