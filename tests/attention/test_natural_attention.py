"""Natural attention: the layer, its bounds, its metrics, and how fast its steps converge."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conserved.attention import NaturalAttention, NaturalDescent, token_fisher, value_metric


def layer(dim: int = 4) -> NaturalAttention:
    return NaturalAttention(dim).double()


def half_squares(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum() / (2 * y.shape[:-1].numel())


class TestLayer:
    @settings(max_examples=40, deadline=None)
    @given(seed=st.integers(0, 1000), dim=st.integers(1, 6), length=st.integers(1, 9), size=st.floats(0.01, 10))
    def test_energy_obeys_both_bounds(self, seed: int, dim: int, length: int, size: float) -> None:
        torch.manual_seed(seed)
        module = layer(dim)
        x = size * torch.randn(length, dim, dtype=torch.float64)
        energy = module.energy(x).square().sum()
        assert energy <= module.energy_bound(x) * (1 + 1e-12)
        assert module.energy_bound(x) <= module.note_bound(x) * (1 + 1e-12)

    def test_the_sharper_bound_is_attained(self) -> None:
        module, x = layer(3), torch.eye(3, dtype=torch.float64)
        torch.testing.assert_close(module.energy(x).square().sum(), module.energy_bound(x))

    def test_against_the_definition(self) -> None:
        module, x = layer(), torch.randn(2, 5, 4, dtype=torch.float64)
        logits = torch.einsum("bid,de,fe,bjf->bij", x, module.q, module.k, x) / 2
        torch.testing.assert_close(module(x), torch.einsum("bij,bjd,de->bie", logits.softmax(-1), x, module.v))


class TestMetrics:
    def test_the_value_metric_is_the_hessian(self) -> None:
        module, x = layer(3), torch.randn(2, 5, 3, dtype=torch.float64)
        target = torch.randn(2, 5, 3, dtype=torch.float64)
        with torch.no_grad():
            weights = module.weights(x)

        def loss(v: Tensor) -> Tensor:
            return (weights @ x @ v - target).square().sum() / 2

        hessian = torch.autograd.functional.hessian(loss, module.v.detach())
        expected = torch.einsum("ac,bd->abcd", value_metric(x, weights), torch.eye(3, dtype=torch.float64))
        torch.testing.assert_close(hessian, expected)

    def test_the_notes_metric_is_singular_for_uniform_attention(self) -> None:
        uniform = torch.full((6, 6), 1 / 6, dtype=torch.float64)
        assert int(torch.linalg.matrix_rank(token_fisher(uniform))) == 1
        assert float(torch.linalg.eigvalsh(token_fisher(uniform, 0.1))[0]) == pytest.approx(0.1)

    def test_the_query_metric_is_the_length_of_the_change_of_the_field(self) -> None:
        """The step solves L S R / d = G for one sequence, up to damping."""
        module, x = layer(3), torch.randn(1, 20, 3, dtype=torch.float64)
        optimizer = NaturalDescent(module, lr=1.0, damping=1e-12)
        before = module.q.detach().clone()
        half_squares(module(x), torch.randn_like(x)).backward()
        k = x[0] @ module.k.detach()
        keys = k - k.mean(0)
        optimizer.step()
        move = before - module.q.detach()
        assert module.q.grad is not None
        back = (x[0].T @ x[0] / 20) @ move @ (keys.T @ keys / 20) / 3
        torch.testing.assert_close(back, module.q.grad, rtol=1e-6, atol=1e-10)

    def test_both_metrics_agree_for_orthonormal_tokens(self) -> None:
        x = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64)).Q[None]
        target = torch.randn_like(x)
        ends = []
        for metric in ("gauss-newton", "tokens"):
            torch.manual_seed(0)
            module = layer()
            module.q.requires_grad_(False)
            module.k.requires_grad_(False)
            optimizer = NaturalDescent(module, lr=0.5, damping=1e-13, metric=metric)
            half_squares(module(x), target).backward()
            optimizer.step()
            ends.append(module.v.detach().clone())
        torch.testing.assert_close(ends[0], ends[1], rtol=1e-6, atol=1e-8)


class TestConvergence:
    @pytest.mark.parametrize("rate", [0.1, 0.5, 1.0], ids=str)
    def test_values_converge_geometrically(self, rate: float) -> None:
        """Every step multiplies the error by 1 − rate, whatever the inputs; damping slows small directions."""
        module, x = layer(), torch.randn(3, 7, 4, dtype=torch.float64)
        x = x * torch.tensor([1.0, 0.3, 0.1, 0.03], dtype=torch.float64)
        module.q.requires_grad_(False)
        module.k.requires_grad_(False)
        goal = torch.randn(4, 4, dtype=torch.float64)
        with torch.no_grad():
            target = module.weights(x) @ x @ goal
        optimizer = NaturalDescent(module, lr=rate, damping=1e-12)
        before = module.v.detach() - goal
        half_squares(module(x), target).backward()
        optimizer.step()
        torch.testing.assert_close(module.v.detach() - goal, (1 - rate) * before, rtol=1e-5, atol=1e-6)

    def test_what_the_metric_cannot_see_does_not_converge(self) -> None:
        """Uniform attention on one sequence: one direction converges, the others stay where they are."""
        module, x = layer(), torch.randn(1, 7, 4, dtype=torch.float64)
        module.q.data.zero_()
        module.q.requires_grad_(False)
        module.k.requires_grad_(False)
        before = module.v.detach().clone()
        optimizer = NaturalDescent(module, lr=1.0, damping=1e-9)
        half_squares(module(x), torch.randn_like(x)).backward()
        optimizer.step()
        move = module.v.detach() - before
        assert int(torch.linalg.matrix_rank(move, rtol=1e-6)) == 1

    def test_bad_use_is_refused(self, as_users_run_it: None) -> None:
        with pytest.raises(ValueError, match="positive"):
            NaturalDescent(layer(), lr=0.1, damping=0.0)
        with pytest.raises(ValueError, match="metric"):
            NaturalDescent(layer(), lr=0.1, metric="fisher")  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="backward"):
            NaturalDescent(layer(), lr=0.1).step()
