"""Laws are found whatever the storage order of parameters: stacked, fused, transposed, split or flattened."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from conserved import Verdict, certify, discover
from conserved.discovery import find_laws
from conserved.discovery.charges import null_space, sparse_basis
from conserved.discovery.layout import view_of, views_of
from storage import LAYOUTS, grouped, stacked, tied

INPUT = torch.zeros(5, 4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_has_its_twelve_laws_in_every_layout(layout: str) -> None:
    torch.manual_seed(0)
    discovery = discover(LAYOUTS[layout](), INPUT, infer=False)
    assert discovery.complete, discovery
    assert (discovery.count, discovery.explained) == (12, 12)
    assert sorted(law.kind.group(law.n, law.m) for law in discovery.laws) == ["GL(2)"] * 4


SCORES = [
    ("linear", lambda: stacked("hde", scores="linear"), 14),
    ("sigmoid", lambda: stacked("hde", scores="sigmoid"), 12),
    ("ALiBi", lambda: stacked("hde", scores="alibi"), 12),
    ("tied", tied, 6),
    ("tied, sigmoid", lambda: tied("sigmoid"), 6),
    ("grouped", grouped, 6),
    ("rotary, pairs", lambda: stacked("dhe", heads=1, head=4, scores="rotary pairs"), 12),
    ("rotary, halves", lambda: stacked("hde", heads=1, head=4, scores="rotary halves"), 12),
    ("heads of different widths stacked to one", lambda: stacked("hed", heads=3, width=4, head=2), 18),
]


@pytest.mark.parametrize(("build", "laws"), [case[1:] for case in SCORES], ids=[case[0] for case in SCORES])
def test_stacked_attention_of_every_sort_is_complete(build: object, laws: int) -> None:
    torch.manual_seed(0)
    assert callable(build)
    discovery = discover(build(), INPUT, infer=False)
    assert discovery.complete, discovery
    assert discovery.count == laws


def test_rotary_planes_in_a_stack_are_complex() -> None:
    for scores, order in itertools.product(("rotary pairs", "rotary halves"), ("hde", "dhe", "hed")):
        torch.manual_seed(0)
        laws = find_laws(stacked(order, heads=2, width=4, head=4, scores=scores), INPUT)
        kinds = sorted(law.kind.code for law in laws)
        assert kinds == ["complex_scaling", "general_linear", "general_linear"], (scores, order, laws.summary())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_symmetry_found_leaves_the_function_unchanged(layout: str) -> None:
    torch.manual_seed(0)
    model = LAYOUTS[layout]().double()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    before = model(x)
    theta = {name: p.detach() for name, p in model.named_parameters()}
    for law in find_laws(model, INPUT):
        moved = law.act(theta, law.element(generator=generator))
        assert any(not torch.allclose(moved[name], theta[name]) for name in theta)
        after = torch.func.functional_call(model, moved, (x,))
        assert torch.allclose(before, after, rtol=1e-9, atol=1e-9), law


@pytest.mark.parametrize(
    "build",
    [lambda: stacked("hde"), lambda: stacked("hde", scores="sigmoid"), LAYOUTS["flattened"], lambda: tied("alibi")],
    ids=["stacked", "sigmoid", "flattened", "tied with ALiBi"],
)
def test_stacked_attention_is_certified_complete(build: object) -> None:
    torch.manual_seed(0)
    assert callable(build)
    proof = certify(build(), INPUT)
    assert proof.verdict == Verdict.PROVED, proof.verdict
    assert proof.complete


class StackedExperts(nn.Module):
    """Experts in one parameter, softmax over them, and logits in two groups of classes stacked in a third axis."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(3, 4))
        self.up, self.gate = (nn.Parameter(torch.randn(3, 2, 4)) for _ in range(2))
        self.down = nn.Parameter(torch.randn(3, 4, 2))
        self.head = nn.Parameter(torch.randn(2, 3, 4))

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.router @ x, 0)
        inner = torch.nn.functional.silu(torch.einsum("ehd,d->eh", self.gate, x)) * torch.einsum(
            "ehd,d->eh", self.up, x
        )
        y = torch.einsum("e,edh,eh->d", weights, self.down, inner)
        return torch.einsum("gcd,d->gc", self.head, y)


def test_stacked_experts_and_classes_have_their_scalings_and_shifts() -> None:
    torch.manual_seed(0)
    discovery = discover(StackedExperts(), torch.zeros(4), loss="cross_entropy", infer=False)
    assert discovery.complete, discovery.summary()
    # Two gated neurons for each of three experts, GL(4) between all experts' outputs and the head, the router's four
    # sums over experts and four sums over each of two groups of classes.
    assert discovery.count == 6 + 10 + 4 + 8
    assert {law.kind.code for law in discovery.laws} >= {"scaling", "general_linear", "translation"}


def test_deep_linear_chains_in_a_stack_are_separated_into_their_layers() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 3, 3))

        def forward(self, x: Tensor) -> Tensor:
            for w in self.w:
                x = w @ x
            return x

    torch.manual_seed(0)
    discovery = discover(Chain(), torch.zeros(3), infer=False)
    assert discovery.complete, discovery.summary()
    assert sorted(law.kind.group(law.n, law.m) for law in discovery.laws) == ["GL(3)"] * 3
    assert discovery.count == 3 * 6


class TestLayout:
    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 10**6))
    def test_views_see_the_positions_they_were_made_from(self, shape: list[int], seed: int) -> None:
        rng = np.random.default_rng(seed)
        size = int(np.prod(shape))
        n = int(rng.integers(1, min(size, 4) + 1))
        m = int(rng.integers(1, size // n + 1))
        positions = np.sort(rng.permutation(size)[: n * m].reshape(n, m), axis=1)
        values = torch.arange(size).reshape(shape)
        seen = [view.matrix(values).numpy() for view in views_of("w", tuple(shape), positions)]
        assert np.array_equal(np.concatenate(seen, 1), positions)

    @pytest.mark.parametrize("order", list(itertools.permutations("hed")), ids="".join)
    @pytest.mark.parametrize("stored", ["as it is", "flat", "two axes"])
    def test_every_slice_of_a_stack_is_one_view(self, order: tuple[str, ...], stored: str) -> None:
        sizes = {"h": 3, "e": 2, "d": 5}
        shape = tuple(sizes[axis] for axis in order)
        indices = np.arange(30).reshape(shape).transpose([order.index(axis) for axis in "hed"])
        saved = {"as it is": shape, "flat": (30,), "two axes": (shape[0], shape[1] * shape[2])}[stored]
        for index in indices:
            view = view_of("w", saved, index)
            assert view is not None
            assert np.array_equal(view.matrix(torch.arange(30).reshape(saved)).numpy(), index)


class TestNullSpace:
    @pytest.mark.parametrize(("n", "k"), [(5, 0), (40, 1), (120, 50), (300, 37), (64, 64)])
    def test_it_is_that_of_the_singular_value_decomposition(self, n: int, k: int) -> None:
        generator = torch.Generator().manual_seed(n)
        matrix = torch.randn(n + 40, n - k, generator=generator, dtype=torch.float64) @ torch.randn(
            n - k, n, generator=generator, dtype=torch.float64
        )
        result = null_space(matrix / (matrix.norm() + 1))
        assert result.shape == (k, n)
        assert torch.allclose(result @ result.mT, torch.eye(k, dtype=torch.float64), atol=1e-10)
        assert float((matrix @ result.mT).abs().max()) < 1e-9 if k else True

    def test_a_spectrum_that_fades_out_has_none(self) -> None:
        matrix = torch.diag(10.0 ** torch.linspace(0, -14, 60, dtype=torch.float64))
        assert len(null_space(matrix)) == 0

    def test_charges_that_many_entries_share_become_coordinates(self) -> None:
        # Two chained maps: six entries of charge a_i, four of b_k − a_i, six of −b_k.
        a, b = np.eye(2), np.eye(2)
        rows = [np.concatenate((np.repeat(a[i], 3), -np.repeat(a[i][None], 2, 0).ravel(), np.zeros(6))) for i in (0, 1)]
        rows += [np.concatenate((np.zeros(6), np.repeat(b[k], 2), -np.repeat(b[k], 3))) for k in (0, 1)]
        null = np.array(rows)
        mixed = np.random.default_rng(0).standard_normal((4, 4)) @ null
        result = sparse_basis(mixed)
        expected = {tuple(row) for row in null}
        assert {tuple(row) for row in result} | {tuple(-row) for row in result} >= expected
