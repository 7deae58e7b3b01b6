"""How accurate the energy field is on inputs that are hard for it, and that nothing in it waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from conserved.attention import EnergyField, TokenMoments, energy_field, moments
from conserved.attention import energy as energy_module
from conserved.attention.band import Band
from conserved.attention.prefix_sums import Rows, prefix_dots, prefix_squares
from conserved.attention.small_matrices import placed
from conserved.attention.token_passes import centred_as_read, centred_twice
from reference import energy_field as reference
from tolerances import FIELD_ENERGIES, FIELD_LEVERAGES, FIELD_SPECTRUM, FIELD_WINDOW

LENGTH, WIDTH = 150, 16
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
MASKS: dict[str, dict[str, Any]] = {
    "whole": {},
    "causal": {"causal": True},
    "causal window": {"causal": True, "window": 20},
    "window": {"window": 20},
}


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def one_huge_key() -> Tensor:
    k = drawn(1, LENGTH, WIDTH)
    k[40] *= 1e4
    return k


def nearly_rank_four() -> Tensor:
    return drawn(2, LENGTH, 4) @ drawn(3, 4, WIDTH) + 1e-5 * drawn(4, LENGTH, WIDTH)


HARD: dict[str, Callable[[], Tensor]] = {
    "common offset": lambda: drawn(1, LENGTH, WIDTH) + 1e3 * drawn(2, WIDTH),
    "one huge key": one_huge_key,
    "nearly rank 4": nearly_rank_four,
    "drift": lambda: drawn(1, LENGTH, WIDTH) + torch.linspace(-10, 10, LENGTH).double()[:, None] * drawn(2, WIDTH),
    "falling scales": lambda: drawn(1, LENGTH, WIDTH) * torch.logspace(0, -6, WIDTH, dtype=torch.float64),
    "every 16th far away": lambda: drawn(1, LENGTH, WIDTH) + 100.0 * (torch.arange(LENGTH) % 16 == 0)[:, None],
}


def logits(q: Tensor, k: Tensor) -> Tensor:
    return q.double() @ k.double().T * WIDTH**-0.5


def assert_energies(field: EnergyField, head: Any, matrix: Tensor, tolerance: float) -> None:
    squares = matrix.square()
    for found, expected in ((field.row_energies, squares.sum(1)), (field.column_energies, squares.sum(0))):
        worst = float((found[head] - expected).abs().max() / expected.max())
        assert worst <= tolerance


def tolerance_of(dtype: torch.dtype, options: dict[str, Any]) -> float:
    if "window" in options:
        return FIELD_WINDOW
    return FIELD_ENERGIES[torch.float64 if options or dtype == torch.float64 else torch.float32]


class TestHardInputs:
    @pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("keys", HARD.values(), ids=HARD)
    def test_energies(self, keys: Callable[[], Tensor], dtype: torch.dtype, options: dict[str, Any]) -> None:
        q, k = drawn(0, LENGTH, WIDTH).to(dtype), keys().to(dtype)
        seen = reference.visible(LENGTH, LENGTH, causal=options.get("causal", False), window=options.get("window"))
        matrix = reference.field(logits(q, k), seen)
        assert_energies(energy_field(q, k, **options), (), matrix, tolerance_of(dtype, options))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("keys", HARD.values(), ids=HARD)
    def test_spectrum(self, keys: Callable[[], Tensor], dtype: torch.dtype) -> None:
        q, k = drawn(0, LENGTH, WIDTH).to(dtype), keys().to(dtype)
        matrix = reference.field(logits(q, k), torch.ones(LENGTH, LENGTH, dtype=torch.bool))
        expected = torch.linalg.svdvals(matrix)[:WIDTH]
        worst = float((energy_field(q, k).singular_values - expected).abs().max() / expected[0])
        assert worst <= FIELD_SPECTRUM[torch.float64 if dtype == torch.float64 else torch.float32]

    @pytest.mark.parametrize("options", [MASKS["whole"], MASKS["causal"]], ids=["whole", "causal"])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("name", [name for name in HARD if name != "nearly rank 4"])
    def test_leverages(self, name: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
        k = HARD[name]().to(dtype)
        field = energy_field(drawn(0, LENGTH, WIDTH).to(dtype), k, **options)
        expected, rank = reference.leverages(k.double(), 1e-12 if dtype == torch.float64 else 1e-7)
        assert int(field.key_rank) == rank
        worst = float((field.leverages - expected).abs().max())
        assert worst <= FIELD_LEVERAGES[torch.float64 if dtype == torch.float64 else torch.float32]

    @pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_grouped_heads_with_hidden_keys_and_queries(self, dtype: torch.dtype, options: dict[str, Any]) -> None:
        q, k = drawn(0, 4, LENGTH, WIDTH).to(dtype), drawn(1, 2, LENGTH, WIDTH).add(5).to(dtype)
        shown, asks = drawn(2, 2, LENGTH) > -0.5, drawn(3, 4, LENGTH) > -1
        # What is hidden may be anything.
        k[~shown], q[~asks] = torch.nan, torch.nan
        field = energy_field(q, k, key_mask=shown, query_mask=asks, **options)
        band = reference.visible(LENGTH, LENGTH, causal=options.get("causal", False), window=options.get("window"))
        for head in range(4):
            z = logits(q[head].nan_to_num(), k[head // 2].nan_to_num())
            matrix = reference.field(z, band & shown[head // 2] & asks[head][:, None])
            assert_energies(field, head, matrix, tolerance_of(dtype, options))

    def test_sizes_near_the_end_of_single_precision(self) -> None:
        """Their sum is beyond it; the spectrum scales with them."""
        q, k = drawn(0, 64, 4).float(), drawn(1, 64, 4).float().abs()
        expected = energy_field(q, k).singular_values
        found = energy_field(q, k * 2.0**122).singular_values / 2.0**122
        torch.testing.assert_close(found, expected, atol=0, rtol=1e-10)

    def test_moments_of_long_coarse_vectors(self) -> None:
        x = (drawn(0, 2, 3000, 5) + 1e3).float()
        found = TokenMoments.of(x)
        centred = x.double() - x.double().mean(-2, keepdim=True)
        torch.testing.assert_close(found.factor.mT @ found.factor, centred.mT @ centred, rtol=1e-12, atol=1e-9)
        torch.testing.assert_close(found.mean, x.double().mean(-2), rtol=1e-15, atol=0)


class TestWaysOfDevices:
    """What a GPU does in one kernel and a processor in two steps is the same."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_centred_keys(self, dtype: torch.dtype) -> None:
        k = (drawn(0, 2, 50, 4) + 100).to(dtype)
        mean = k.double().mean(-2, keepdim=True)
        exact = k.double() - mean
        for way in (centred_as_read, centred_twice):
            found = way(k, mean, torch.float32)
            assert found.dtype == torch.float32
            torch.testing.assert_close(found.double(), exact, rtol=1.3e-7, atol=0)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_differences_in_double_precision(self, dtype: torch.dtype) -> None:
        x, shift = drawn(0, 2, 50, 4).to(dtype), drawn(1, 2, 1, 4)
        before = x.clone()
        found = moments.double_less(x, shift)
        assert torch.equal(found, torch.sub(x, shift))
        assert found.dtype == torch.float64
        assert torch.equal(x, before)


class TestPrefixSums:
    @pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
    @pytest.mark.parametrize("offset", [-700, -130, -1, 0, 1, 65, 300, 700])
    @pytest.mark.parametrize(("rows", "keys"), [(600, 600), (600, 170), (170, 600), (1, 600), (64, 64)])
    def test_against_all_pairs(
        self, rows: int, keys: int, offset: int, after: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("conserved.attention.moments.BLOCK", 4096)
        generator = torch.Generator().manual_seed(rows + keys + offset)
        x, y = (torch.randn(2, n, 3, generator=generator) for n in (rows, keys))
        shift, kept = y.double().mean(1), torch.rand(2, keys, generator=generator) > 0.3
        last = [torch.randn(2, n, generator=generator, dtype=torch.float64) for n in (rows, keys)]
        left, right = Rows(values=x, last=last[0]), Rows(values=y, shift=shift, kept=kept, last=last[1])
        moved = torch.where(kept[..., None], y.double() - shift[:, None], 0.0)
        seen = torch.arange(keys) < torch.arange(rows)[:, None] + offset
        seen = ~seen if after else seen
        products = x.double() @ moved.mT
        expected = (products + last[0][..., None] * last[1][:, None]).square() * seen
        found = prefix_squares(left, right, offset, after=after)
        torch.testing.assert_close(found, expected.sum(-1), atol=1e-10, rtol=1e-11)
        dots = prefix_dots(left, right, offset, after=after)
        torch.testing.assert_close(dots, (products * seen).sum(-1), atol=1e-10, rtol=1e-11)

    def test_many_chunks_are_summed_in_groups(self) -> None:
        x, y = drawn(0, 1, 5000, 2), drawn(1, 1, 5000, 2)
        expected = (x[0] @ y[0].T).square().tril().sum(-1)
        torch.testing.assert_close(Band(upper=1).squares(x, y)[0], expected, rtol=1e-12, atol=1e-12)
        ahead = (y[0].flip(0).cumsum(0).flip(0) * x[0]).sum(-1)
        torch.testing.assert_close(Band(lower=0).dots(x, y)[0], ahead, rtol=1e-9, atol=1e-9)


WAITS = {
    *("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "_linalg_eigh", "_linalg_svd"),
    *("linalg_qr", "linalg_cholesky_ex"),
}


class Device(TorchDispatchMode):
    """Plays a device: what is made of its tensors is on it, and operations that would wait for it are noted."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__()
        # Memory is told by where it lies, so what is held stays alive.
        self.held: dict[int, Tensor] = {}
        self.waits: list[str] = []
        self.fetches = 0
        self.hold(*tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        result = func(*args, **(kwargs or {}))
        if any(self.holds(x) for x in tensors):
            name = func.__name__.split(".")[0]
            if name in WAITS or (name == "index" and any(x.dtype == torch.bool for x in tensors[1:])):
                self.waits.append(name)
            self.hold(*(x for x in tree_leaves(result) if isinstance(x, Tensor)))
        return result

    def hold(self, *tensors: Tensor) -> None:
        self.held.update({x.untyped_storage().data_ptr(): x for x in tensors if x.numel()})

    def holds(self, x: Tensor) -> bool:
        return x.untyped_storage().data_ptr() in self.held

    def fetched(self, x: Tensor, heads: int) -> Callable[[], Tensor]:
        def arrived() -> Tensor:
            self.fetches += 1
            copy = x.clone()
            del self.held[copy.untyped_storage().data_ptr()]
            return copy

        return arrived

    def placed(self, device: torch.device, *tensors: Tensor) -> list[Tensor]:
        result = [x.clone() for x in tensors]
        self.hold(*result)
        return result


class TestNothingWaits:
    @pytest.mark.parametrize(
        ("options", "fetches"),
        [
            ({}, 2),
            ({"ridge": 0.1}, 2),
            ({"causal": True}, 1),
            ({"causal": True, "window": 9}, 1),
            ({"causal": True, "slope": 0.5}, 1),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("masked", [False, True], ids=["all keys", "some keys"])
    def test_only_sums_are_fetched(
        self, options: dict[str, Any], fetches: int, masked: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        q, k = drawn(0, 4, 700, 8).float(), drawn(1, 2, 700, 8).float()
        if options.get("slope") is not None:
            # Double-precision keys are triangularised on the device.
            monkeypatch.setattr(moments, "_triangularised", moments._scatter)
        bias = drawn(2, 700).float() if masked else None
        device = Device(*(x for x in (q, k, bias) if x is not None))
        monkeypatch.setattr(moments, "fetched", device.fetched)
        monkeypatch.setattr(energy_module, "placed", device.placed)
        with device:
            field = energy_field(q, k, key_bias=bias, **options)
        assert device.waits == []
        assert device.fetches == fetches
        assert all(device.holds(x) for x in (field.row_energies, field.column_energies, field.leverages))

    def test_waiting_would_be_noticed(self) -> None:
        q = drawn(0, 5, 3)
        with Device(q) as device:
            bool((q * 2).sum() > 0)
            torch.linalg.eigh(q.T @ q)
            q[q[:, 0] > 0]
        assert device.waits == ["_local_scalar_dense", "_linalg_eigh", "index"]


def test_small_tensors_are_placed_unchanged() -> None:
    first, second = drawn(0, 2, 3), drawn(1, 4)
    found = placed(torch.device("meta"), first, second)
    assert [x.shape for x in found] == [first.shape, second.shape]
    assert all(x.device.type == "meta" for x in found)
    assert placed(torch.device("cpu"), first)[0] is first
