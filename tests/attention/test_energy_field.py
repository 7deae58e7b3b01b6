"""The energy field against the naive L × L computation, over random shapes, masks and groupings."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conserved.attention import EnergyField, TokenMoments, energy_field, gaussian_coherence, softmax_statistics
from conserved.attention.band import Band
from conserved.attention.lanczos import leading_values
from conserved.attention.prefix_sums import prefix_squares
from reference import energy_field as reference
from tolerances import FIELD

MASKS = [{}, {"causal": True}, {"causal": True, "window": 1}, {"causal": True, "window": 5}, {"window": 3}]
mask = st.sampled_from(MASKS)
seeds = st.integers(0, 10_000)
sizes = st.integers(1, 40)


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float64, offset: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) + offset).to(dtype)


def naive(q: Tensor, k: Tensor, bias: Tensor | float = 0.0, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, who sees what, and the field of one head, in double precision."""
    logits = q.double() @ k.double().T * q.shape[-1] ** -0.5 + bias
    seen = reference.visible(len(q), len(k), causal=options.get("causal", False), window=options.get("window"))
    return logits, seen, reference.field(logits, seen)


def assert_agrees(field: EnergyField, head: Any, matrix: Tensor, tolerance: float) -> None:
    """Everything that is read off the matrix itself."""
    values = torch.linalg.svdvals(matrix)
    # The logits are of size one: what remains of them in a field of zeros is rounding.
    size = max(float(values[0]), 0.1)
    count = field.singular_values.shape[-1]
    torch.testing.assert_close(field.singular_values[head], values[:count], atol=tolerance * size, rtol=0.0)
    if field.complete:
        assert float(values[count:].sum()) <= tolerance * size
    squares = matrix.square()
    torch.testing.assert_close(field.row_energies[head], squares.sum(1), atol=tolerance * size**2, rtol=0.0)
    torch.testing.assert_close(field.column_energies[head], squares.sum(0), atol=tolerance * size**2, rtol=0.0)
    assert float(field.row_sums[head].abs().max()) <= tolerance * size * len(matrix)


class TestAgreement:
    @settings(max_examples=30, deadline=None)
    @given(seed=seeds, queries=sizes, keys=sizes, width=st.integers(1, 9), groups=st.integers(1, 3), options=mask)
    def test_float64(
        self, seed: int, queries: int, keys: int, width: int, groups: int, options: dict[str, Any]
    ) -> None:
        q, k = drawn(seed, 2 * groups, queries, width), drawn(seed + 1, 2, keys, width, offset=2.0)
        field = energy_field(q, k, ridge=0.3, **options)
        softmax = softmax_statistics(q, k, **options)
        for head in range(2 * groups):
            logits, seen, matrix = naive(q[head], k[head // groups], **options)
            assert_agrees(field, head, matrix, FIELD[torch.float64])
            leverages, rank = reference.leverages(k[head // groups])
            assert int(field.key_rank[head]) == rank
            torch.testing.assert_close(field.leverages[head], leverages, atol=1e-10, rtol=0)
            if rank:
                ridged = reference.ridge_leverages(k[head // groups], 0.3)
                assert field.ridge_leverages is not None
                torch.testing.assert_close(field.ridge_leverages[head], ridged, atol=1e-10, rtol=0)
                expected = keys * ridged.max() / ridged.sum()
                torch.testing.assert_close(field.ridge_coherence[head], expected, atol=1e-10, rtol=1e-9)
            torch.testing.assert_close(softmax.entropy[head], reference.entropy(logits, seen), atol=1e-10, rtol=0)
            largest = logits.masked_fill(~seen, -torch.inf).amax(1)
            torch.testing.assert_close(softmax.largest[head], largest, atol=1e-10, rtol=0)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @settings(max_examples=30, deadline=None)
    @given(seed=seeds, queries=sizes, keys=sizes, width=st.integers(1, 9), options=mask)
    def test_coarser_inputs(
        self, dtype: torch.dtype, seed: int, queries: int, keys: int, width: int, options: dict[str, Any]
    ) -> None:
        q, k = drawn(seed, queries, width, dtype=dtype), drawn(seed + 1, keys, width, dtype=dtype, offset=2.0)
        field = energy_field(q, k, **options)
        logits, seen, matrix = naive(q, k, **options)
        assert_agrees(field, (), matrix, FIELD[torch.float32])
        leverages, _ = reference.leverages(k.double(), 1e-7)
        torch.testing.assert_close(field.leverages, leverages, atol=FIELD[torch.float32], rtol=0)
        softmax = softmax_statistics(q, k, **options)
        torch.testing.assert_close(
            softmax.entropy, reference.entropy(logits, seen), atol=FIELD[torch.float32], rtol=FIELD[torch.float32]
        )

    @settings(max_examples=30, deadline=None)
    @given(seed=seeds, length=st.integers(2, 30), options=mask)
    def test_hidden_keys_and_rows_of_minus_infinity(self, seed: int, length: int, options: dict[str, Any]) -> None:
        q, k = drawn(seed, length, 4), drawn(seed + 1, length, 4)
        bias = drawn(seed + 2, length)
        shown = drawn(seed + 3, length) > -0.5
        shown[seed % length] = True
        asks = drawn(seed + 4, length) > -1
        hidden = torch.where(shown, bias, -torch.inf)
        field = energy_field(q, k, key_bias=hidden, query_mask=asks, **options)
        logits, seen, _ = naive(q, k, bias, **options)
        matrix = reference.field(logits, seen & shown & asks[:, None])
        assert_agrees(field, (), matrix, FIELD[torch.float64])
        assert float(field.keys) == int(shown.sum())
        by_mask = energy_field(q, k, key_bias=bias, key_mask=shown, query_mask=asks, **options)
        torch.testing.assert_close(by_mask.column_energies, field.column_energies)

    @settings(max_examples=30, deadline=None)
    @given(seed=seeds, length=st.integers(1, 30), window=st.sampled_from([None, 4, 100]))
    def test_linear_distance_bias(self, seed: int, length: int, window: int | None) -> None:
        q, k = drawn(seed, 4, length, 3), drawn(seed + 1, 2, length, 3)
        slopes = torch.tensor([0.5, 0.25, 0.125, 2.0], dtype=torch.float64)
        field = energy_field(q, k, causal=True, window=window, slope=slopes)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        for head in range(4):
            bias = -slopes[head] * distance
            _, _, matrix = naive(q[head], k[head // 2], bias, causal=True, window=window)
            assert_agrees(field, head, matrix, FIELD[torch.float64])

    def test_rows_that_see_no_key_are_zero(self) -> None:
        q, k = drawn(0, 5, 3), drawn(1, 2, 3)
        field = energy_field(q, k, causal=True)
        assert field.row_energies[:3].tolist() == [0, 0, 0]
        softmax = softmax_statistics(q, k, causal=True)
        assert softmax.entropy[:3].tolist() == [0, 0, 0]
        assert softmax.largest[:3].tolist() == [-torch.inf] * 3
        assert softmax.mean_entropy == softmax.entropy[3:].mean()

    def test_long_masked_fields_by_lanczos(self) -> None:
        q, k = drawn(0, 2, 560, 5), drawn(1, 1, 560, 5)
        field = energy_field(q, k, causal=True, leading=3)
        assert not field.complete
        assert field.rank.isnan().all()
        unasked = energy_field(q, k, causal=True)
        assert unasked.stable_rank.isnan().all()
        torch.testing.assert_close(unasked.participation, field.participation)
        for head in range(2):
            assert_agrees(field, head, naive(q[head], k[0], causal=True)[2], FIELD[torch.float64])

    def test_lanczos_stops_in_a_small_space(self) -> None:
        left, right = drawn(0, 1, 30, 1), drawn(1, 1, 30, 1)
        values = leading_values(left, right, Band(), 4)
        torch.testing.assert_close(values[0, 0], left.norm() * right.norm())
        assert float(values[0, 1:].abs().max()) < 1e-12

    def test_logits_are_never_formed(self) -> None:
        """A length at which one L × L matrix would take 2 TB."""
        q = torch.randn(1, 500_000, 2)
        field = energy_field(q, q)
        assert int(field.rank) == 2


class TestEdges:
    def test_one_key(self) -> None:
        field = energy_field(drawn(0, 1, 4), drawn(1, 1, 4))
        assert (float(field.rank), float(field.effective_rank), float(field.stable_rank)) == (0, 0, 0)
        assert field.row_sums.tolist() == [0]
        assert field.participation.isnan()
        assert field.coherence.isnan()

    def test_two_keys_by_hand(self) -> None:
        """E = (1, 2)ᵀ (−1, 1)."""
        field = energy_field(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [5.0]]))
        torch.testing.assert_close(field.singular_values, torch.tensor([10.0]).double().sqrt())
        assert field.row_energies.tolist() == pytest.approx([2, 8])
        assert field.column_energies.tolist() == pytest.approx([5, 5])
        assert float(field.participation) == pytest.approx(1)
        assert float(field.coherence) == pytest.approx(1)

    def test_fewer_keys_than_dimensions_makes_coherence_vacuous(self) -> None:
        field = energy_field(drawn(0, 6, 16), drawn(1, 6, 16))
        assert float(field.rank) == 5
        assert field.leverages.tolist() == pytest.approx([1 - 1 / 6] * 6)
        assert float(field.coherence) == pytest.approx(1)

    @pytest.mark.parametrize("options", MASKS, ids=str)
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
    def test_equal_keys_leave_nothing(self, dtype: torch.dtype, options: dict[str, Any]) -> None:
        k = drawn(1, 1, 4).expand(9, 4).to(dtype)
        field = energy_field(drawn(0, 9, 4, dtype=dtype), k, **options)
        assert float(field.rank) == 0
        assert float(field.stable_rank) == 0
        assert field.participation.isnan()
        assert field.coherence.isnan()
        assert int(field.key_rank) == 0

    def test_one_key_that_differs(self) -> None:
        k = drawn(1, 1, 4).expand(9, 4).clone()
        k[5] += 1
        field = energy_field(drawn(0, 9, 4), k)
        assert float(field.rank) == 1
        assert float(field.coherence) == pytest.approx(9 * (1 - 1 / 9))
        assert int(field.column_energies.argmax()) == 5

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=["nan", "inf"])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    def test_what_is_not_finite_is_refused(self, bad: float, dtype: torch.dtype) -> None:
        q, k = drawn(0, 5, 3, dtype=dtype), drawn(1, 5, 3, dtype=dtype)
        k[2, 1] = bad
        with pytest.raises(ValueError, match="finite"):
            energy_field(q, k)

    def test_bad_shapes_are_refused(self, as_users_run_it: None) -> None:
        with pytest.raises(ValueError, match="Expected queries"):
            energy_field(torch.randn(4, 3), torch.randn(4, 2))
        with pytest.raises(ValueError, match="multiple of key heads"):
            energy_field(torch.randn(3, 4, 2), torch.randn(2, 4, 2))
        with pytest.raises(ValueError, match="at least one query"):
            energy_field(torch.randn(0, 2), torch.randn(4, 2))
        with pytest.raises(TypeError, match="floating"):
            energy_field(torch.ones(3, 2, dtype=torch.long), torch.randn(4, 2))
        with pytest.raises(ValueError, match="both directions"):
            energy_field(torch.randn(3, 2), torch.randn(4, 2), slope=0.5)
        with pytest.raises(ValueError, match="at least one key"):
            energy_field(torch.randn(3, 2), torch.randn(4, 2), window=0)


class TestStatements:
    """What the docstrings state, on random inputs."""

    @settings(max_examples=30, deadline=None)
    @given(seed=seeds, queries=sizes, keys=sizes, width=st.integers(1, 8))
    def test_rank_is_bounded(self, seed: int, queries: int, keys: int, width: int) -> None:
        field = energy_field(drawn(seed, queries, width), drawn(seed + 1, keys, width))
        assert field.bound == min(width, keys - 1)
        # Random fields reach the bound as far as there are queries.
        assert float(field.rank) == min(field.bound, queries)
        assert float(field.stable_rank) <= float(field.rank) + 1e-9
        assert float(field.stable_rank) <= float(field.effective_rank) ** 2 + 1e-9

    def test_a_stacked_group_has_the_bound_of_one_head(self) -> None:
        q, k = drawn(0, 3, 20, 4), drawn(1, 1, 20, 4)
        stacked = energy_field(q.flatten(0, 1), k[0])
        matrix = torch.cat([naive(head, k[0])[2] for head in q])
        assert_agrees(stacked, (), matrix, FIELD[torch.float64])
        assert float(stacked.rank) == 4

    def test_a_bias_per_key_adds_one(self) -> None:
        field = energy_field(drawn(0, 20, 4), drawn(1, 20, 4), key_bias=drawn(2, 20))
        assert float(field.rank) == field.bound == 5

    @settings(max_examples=30, deadline=None)
    @given(seed=seeds, cut=st.integers(1, 19), slope=st.sampled_from([None, 0.5]))
    def test_causal_blocks_below_the_diagonal(self, seed: int, cut: int, slope: float | None) -> None:
        """Rank ≤ d + 1 with the rows' own means, one more with a distance bias; the whole field is not bounded."""
        q, k = drawn(seed, 20, 2), drawn(seed + 1, 20, 2)
        bias = 0.0 if slope is None else -slope * (torch.arange(20)[:, None] - torch.arange(20))
        matrix = naive(q, k, bias, causal=True)[2]
        block = matrix[cut:, :cut]
        bound = 3 if slope is None else 4
        assert int(torch.linalg.matrix_rank(block, atol=1e-9 * float(matrix.norm()))) <= bound
        assert float(energy_field(q, k, causal=True).rank) > 4

    @settings(max_examples=30, deadline=None)
    @given(seed=seeds, keys=st.integers(2, 60), width=st.integers(1, 8), heavy=st.floats(1, 30))
    def test_incoherent_keys_spread_the_energy(self, seed: int, keys: int, width: int, heavy: float) -> None:
        """participation ≥ stable rank / (coherence · r)."""
        k = drawn(seed, keys, width)
        k[0] *= heavy
        field = energy_field(drawn(seed + 1, 30, width), k)
        bound = field.stable_rank / (field.coherence * field.key_rank)
        assert float(field.participation) >= float(bound) * (1 - 1e-9)
        assert 1 - 1e-9 <= float(field.coherence) <= keys / int(field.key_rank) + 1e-9
        assert float(field.leverages.sum()) == pytest.approx(int(field.key_rank))

    @settings(max_examples=30, deadline=None)
    @given(seed=seeds, options=mask)
    def test_what_softmax_cannot_see_does_not_change_the_field(self, seed: int, options: dict[str, Any]) -> None:
        """A shift of all keys, and a linear map of keys with its inverse on queries."""
        q, k = drawn(seed, 15, 3), drawn(seed + 1, 15, 3)
        g = drawn(seed + 2, 3, 3) + 3 * torch.eye(3, dtype=torch.float64)
        moved = energy_field(q @ torch.linalg.inv(g).T, k @ g + drawn(seed + 3, 3), **options)
        field = energy_field(q, k, **options)
        torch.testing.assert_close(moved.singular_values, field.singular_values, atol=1e-8, rtol=1e-8)
        torch.testing.assert_close(moved.column_energies, field.column_energies, atol=1e-8, rtol=1e-8)
        torch.testing.assert_close(moved.leverages, field.leverages, atol=1e-8, rtol=0)

    def test_the_gaussian_baseline(self) -> None:
        mean, deviation = gaussian_coherence(1024, 64)
        assert mean == pytest.approx(1.65, abs=0.15)
        assert 0 < deviation < 0.2
        k = drawn(0, 1024, 64)
        assert float(energy_field(k, k).coherence) == pytest.approx(mean, abs=5 * deviation)
        k[7] *= 8
        assert float(energy_field(k, k).coherence) > 8
        assert gaussian_coherence(5, 8)[0] == pytest.approx(1)


class TestStreaming:
    @settings(max_examples=40, deadline=None)
    @given(seed=seeds, length=st.integers(2, 40), cuts=st.lists(st.integers(0, 40), max_size=4), coarse=st.booleans())
    def test_shards_combine_exactly(self, seed: int, length: int, cuts: list[int], coarse: bool) -> None:
        dtype = torch.float32 if coarse else torch.float64
        q, k = drawn(seed, 2, length, 3, dtype=dtype), drawn(seed + 1, 2, length, 3, dtype=dtype, offset=5.0)
        places = sorted({0, length, *(min(cut, length) for cut in cuts)})
        merged = []
        for x in (q, k):
            parts = [TokenMoments.of(x[:, a:b]) for a, b in pairwise(places)]
            total = parts[0]
            for part in parts[1:]:
                total = total.merge(part)
            merged.append(total)
        values = torch.linalg.svdvals(merged[0].about_zero() @ merged[1].factor.mT) * 3**-0.5
        expected = energy_field(q.double(), k.double()).singular_values
        near = 1e-12 if not coarse else 1e-7
        torch.testing.assert_close(
            values[:, : expected.shape[-1]], expected, atol=near * float(expected.max()) + 1e-12, rtol=0
        )
        assert float((merged[1].mean - k.double().mean(1)).abs().max()) < 1e-12

    @settings(max_examples=30, deadline=None)
    @given(seed=seeds, rows=sizes, keys=sizes, offset=st.one_of(st.none(), st.integers(-50, 50)))
    def test_prefix_squares(self, seed: int, rows: int, keys: int, offset: int | None) -> None:
        x, y = drawn(seed, 2, rows, 3), drawn(seed + 1, 2, keys, 3)
        squares = (x @ y.mT).square()
        ends = [keys if offset is None else min(max(i + offset, 0), keys) for i in range(rows)]
        expected = torch.stack([squares[:, i, :end].sum(-1) for i, end in enumerate(ends)], -1)
        torch.testing.assert_close(prefix_squares(x, y, offset), expected, atol=1e-10, rtol=1e-10)

    def test_blocks_do_not_change_the_result(self, monkeypatch: pytest.MonkeyPatch) -> None:
        q, k = drawn(0, 3, 400, 4, dtype=torch.float32), drawn(1, 3, 400, 4, dtype=torch.float32)
        whole, causal = energy_field(q, k), energy_field(q, k, causal=True)
        monkeypatch.setattr("conserved.attention.moments.BLOCK", 256)
        again, causal_again = energy_field(q, k), energy_field(q, k, causal=True)
        torch.testing.assert_close(again.singular_values, whole.singular_values)
        torch.testing.assert_close(again.column_energies, whole.column_energies)
        torch.testing.assert_close(causal_again.row_energies, causal.row_energies)
        torch.testing.assert_close(causal_again.column_energies, causal.column_energies)
