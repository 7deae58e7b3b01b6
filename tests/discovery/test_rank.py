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
from conserved.discovery.function import function_of, without_fused_kernels
from conserved.discovery.rank import closure
from conserved.discovery.span import Basis, Span, largest_value
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


class TestReflections:
    """Blocks that are large enough to become reflections, against a basis of all vectors and against all at once."""

    @pytest.mark.parametrize(("size", "rank", "count"), [(640, 520, 260), (600, 600, 256), (1200, 1150, 900)])
    def test_the_span_is_that_of_a_basis(self, size: int, rank: int, count: int) -> None:
        generator = torch.Generator().manual_seed(size)
        directions = rotation(size, generator)[:rank]
        span, basis = Span(size, torch.device("cpu")), Basis(size, torch.device("cpu"))
        everything = torch.zeros(0, size, dtype=torch.float64)
        for _ in range(2 + rank // count):
            block = unit(torch.randn(count, rank, generator=generator, dtype=torch.float64) @ directions)
            before = block.clone()
            span.add(block)
            assert torch.equal(block, before), "the vectors of the caller stay as they are"
            basis.add(block)
            everything = torch.cat((everything, block))
            assert span.rank == min(rank, len(everything))
        assert len(basis.rows) == rank
        assert span.reflected >= 256
        assert span.gap > 1e6
        mine = span.basis
        assert torch.allclose(mine @ mine.mT, torch.eye(rank, dtype=torch.float64), atol=1e-12)
        assert torch.allclose(mine.mT @ mine, basis.rows.mT @ basis.rows, atol=1e-9)

    @pytest.mark.parametrize("faint", [1e-6, 1e-8, 3e-10])
    def test_directions_seen_faintly_first_and_clearly_later_are_counted_once(self, faint: float) -> None:
        generator = torch.Generator().manual_seed(0)
        directions = rotation(700, generator)
        span = Span(700, torch.device("cpu"))
        scales = torch.cat((torch.ones(600), torch.full((20,), faint))).double()
        for size in (scales, torch.ones(620, dtype=torch.float64)):
            for _ in range(4):
                mix = torch.randn(280, 620, generator=generator, dtype=torch.float64)
                span.add(unit((mix * size) @ directions[:620]))
            assert span.rank == 620
        assert span.reflected >= 280
        assert span.gap > 1e6
        assert float((span.basis @ directions[620:].mT).abs().max()) < 1e-10

    def test_parts_of_rows_inside_and_outside(self) -> None:
        generator = torch.Generator().manual_seed(0)
        directions = rotation(900, generator)
        span = Span(900, torch.device("cpu"))
        for count in (300, 300, 300):
            span.add(unit(torch.randn(count, 640, generator=generator, dtype=torch.float64) @ directions[:640]))
        inside, outside = directions[:3], directions[640:643]
        length, left = span.split(0.6 * inside + 0.8 * outside)
        assert torch.allclose(length, torch.full((3,), 0.6, dtype=torch.float64), atol=1e-11)
        assert torch.allclose(left @ left.mT, 0.64 * torch.eye(3, dtype=torch.float64), atol=1e-11)

    def test_what_is_known_of_faint_directions_counts_as_inside(self) -> None:
        generator = torch.Generator().manual_seed(0)
        directions = rotation(60, generator)
        span = Span(60, torch.device("cpu"))
        span.add(torch.cat((directions[:20], unit(directions[:3] + 1e-3 * directions[20:23]))))
        span.add(unit(directions[:2] + 1e-6 * directions[23:25]))
        assert (span.rank, len(span.basis)) == (25, 20)
        length, _ = span.split(directions[20:26])
        # Directions of the span mix with fainter ones of it, and with none outside.
        assert torch.allclose(length, torch.tensor([1, 1, 1, 0, 0, 0], dtype=torch.float64), atol=1e-2)
        assert float(length[-1]) < 1e-9

    @pytest.mark.parametrize("spread", [0, 1, 30])
    def test_the_bound_of_the_largest_singular_value_is_one_and_is_tight(self, spread: int) -> None:
        generator = torch.Generator().manual_seed(spread)
        rows = 1e-13 * torch.randn(300, 500, generator=generator, dtype=torch.float64)
        rows = rows * torch.exp(-spread * torch.rand(300, 1, generator=generator, dtype=torch.float64))
        largest = float(torch.linalg.matrix_norm(rows, 2))
        assert largest <= largest_value(rows) <= 300 ** (1 / 16) * 1.001 * largest


@pytest.mark.parametrize(
    ("loss", "laws"), [("regression", 51), ("cross_entropy", 55)], ids=["any loss", "cross-entropy"]
)
def test_a_tiny_gpt_with_a_tied_head_and_norms_without_epsilon_has_the_laws_found(loss: str, laws: int) -> None:
    torch.manual_seed(0)
    result = discover(NanoGPT(), TOKENS, loss=loss)
    assert result.verdict == Verdict.VERIFIED, result.verdict
    assert (result.count, result.explained) == (laws, laws)
    assert result.gap > 1e5


def test_brackets_of_that_gpt_are_those_of_ball_arithmetic() -> None:
    torch.manual_seed(0)
    function = function_of(NanoGPT(), TOKENS, loss="cross_entropy", params=None, device=None)
    generator = torch.Generator().manual_seed(0)
    theta = (function.generic_point(generator) * 2**12).round() / 2**12
    word = one_of(draw_words(function, theta, 2, 1, generator), 0)
    with without_fused_kernels():
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
        result = closure(*args, **options)  # type: ignore[arg-type]
        result.span.add(unit(torch.ones(1, result.span.size, dtype=torch.float64)))
        return result

    monkeypatch.setattr(discovery, "closure", spoiled)
    torch.manual_seed(0)
    outcome = discover(NanoGPT(bias=False, hidden=4), TOKENS)
    assert outcome.verdict == Verdict.INCONCLUSIVE
    assert "does not hold for the directions counted" in outcome.verdict.message
