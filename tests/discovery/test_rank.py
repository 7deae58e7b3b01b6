"""The rank of a span whose vectors show some directions only faintly, and counts that depend on it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from conserved import Verdict, discover
from conserved.certificates.arithmetic import Balls, precision
from conserved.certificates.differentiate import Sample, bracket
from conserved.certificates.jets import Jet
from conserved.certificates.trace import trace
from conserved.discovery import discovery
from conserved.discovery.fields import bracket_field, draw_words, one_of
from conserved.discovery.function import function_of, written_out
from conserved.discovery.rank import Span, closure
from nano_gpt import NanoGPT

TOKENS = torch.tensor([[0, 1, 2, 4]])


def rotation(size: int, generator: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q


def unit(rows: Tensor) -> Tensor:
    return rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True)


class TestSpan:
    def test_the_basis_stays_orthonormal_and_faint_directions_are_counted(self) -> None:
        generator = torch.Generator().manual_seed(0)
        directions = rotation(60, generator)
        scales = torch.logspace(0, -9, 60, dtype=torch.float64)
        span = Span(60, torch.device("cpu"))
        for _ in range(6):
            span.add(
                unit((torch.randn(20, 40, generator=generator, dtype=torch.float64) * scales[:40]) @ directions[:40])
            )
        assert span.rank == 40
        assert span.gap > 1e3
        identity = torch.eye(len(span.basis), dtype=torch.float64)
        assert torch.allclose(span.basis @ span.basis.mT, identity, atol=1e-12)

    @pytest.mark.parametrize("seed", range(5))
    @pytest.mark.parametrize("faint", [1e-6, 1e-8, 3e-10])
    def test_directions_seen_faintly_first_and_clearly_later_are_counted_once(self, seed: int, faint: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        directions = rotation(80, generator)
        span = Span(80, torch.device("cpu"))
        scales = torch.cat((torch.ones(30), torch.full((10,), faint))).double()
        for size in (scales, torch.ones(40, dtype=torch.float64)):
            for _ in range(4):
                mix = torch.randn(25, 40, generator=generator, dtype=torch.float64)
                span.add(unit((mix * size) @ directions[:40]))
            assert span.rank == 40
        assert span.gap > 1e8
        assert float((span.basis @ directions[40:].mT).abs().max()) < 1e-10

    def test_the_rank_is_that_of_all_vectors_together(self) -> None:
        generator = torch.Generator().manual_seed(3)
        directions = rotation(50, generator)
        span, everything = Span(50, torch.device("cpu")), []
        for k in range(12):
            scales = 10.0 ** (-8 * torch.rand(30, generator=generator, dtype=torch.float64))
            block = unit((torch.randn(7 + k, 30, generator=generator, dtype=torch.float64) * scales) @ directions[:30])
            everything.append(block)
            span.add(block)
            values = torch.linalg.svdvals(torch.cat(everything))
            assert span.rank == int((values > 1e-11).sum())


@pytest.mark.parametrize(
    ("loss", "laws"), [("regression", 51), ("cross_entropy", 55)], ids=["any loss", "cross-entropy"]
)
def test_a_tiny_gpt_with_a_tied_head_and_norms_without_epsilon_has_the_laws_found(loss: str, laws: int) -> None:
    torch.manual_seed(0)
    found = discover(NanoGPT(), TOKENS, loss=loss)
    assert found.verdict == Verdict.VERIFIED, found.verdict
    assert (found.count, found.explained) == (laws, laws)
    assert found.gap > 1e5


def test_brackets_of_that_gpt_are_those_of_ball_arithmetic() -> None:
    torch.manual_seed(0)
    function = function_of(NanoGPT(), TOKENS, loss="cross_entropy", params=None, device=None)
    generator = torch.Generator().manual_seed(0)
    theta = (function.generic_point(generator) * 2**12).round() / 2**12
    word = one_of(draw_words(function, theta, 2, 1, generator), 0)
    with written_out():
        ours = bracket_field(function, 2)(theta, word).numpy()
    ((x0, v0), (x1, v1)), (x2, v2) = word
    program = trace(function, theta, x0)
    with precision(128):
        numbers = Balls()
        point = Jet({0: numbers.array(theta.tolist(), (function.size,))})
        samples = [Sample((x.numpy(),), numbers.array(v.tolist(), v.shape)) for x, v in ((x0, v0), (x1, v1), (x2, v2))]
        exact = np.array([float(entry.mid()) for entry in bracket(program, numbers, point, samples).value])
    assert np.abs(ours - exact).max() < 1e-11 * np.abs(exact).max()


def test_directions_that_contradict_a_law_that_was_found_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(*args: object, **options: object) -> object:
        found = closure(*args, **options)  # type: ignore[arg-type]
        found.span.add(unit(torch.ones(1, found.span.size, dtype=torch.float64)))
        return found

    monkeypatch.setattr(discovery, "closure", spoiled)
    torch.manual_seed(0)
    found = discover(NanoGPT(bias=False, hidden=4), TOKENS)
    assert found.verdict == Verdict.INCONCLUSIVE
    assert "does not hold for the directions counted" in found.verdict.message
