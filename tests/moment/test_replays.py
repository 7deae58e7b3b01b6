"""Work that comes again on a GPU is recorded once; what is replayed gives the numbers of what is queued."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from conserved import audit, recognize
from conserved.blocks import DecoderLM
from conserved.moment import Memory, memory_of, replays
from conserved.moment.launches import KeptTable, tables_held
from conserved.moment.replays import Replays

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are recorded on a GPU")


MEMORY = Memory(torch.device("cpu"), (), (), ())


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[Hashable]:
    """Recordings that do nothing but note their key when they are replayed."""
    found: list[Hashable] = []

    def recorded(key: tuple[Memory, Hashable], device: torch.device, work: Callable[[], Any]) -> Any:
        return replays._Recording(key, lambda: found.append(key[1]), work(), [])

    monkeypatch.setattr(replays, "_recorded", recorded)
    return found


def test_work_is_recorded_when_it_comes_again_and_queued_when_memory_is_elsewhere(replayed: list[Hashable]) -> None:
    kept, ran = Replays[str](), []

    def work(name: str) -> Callable[[], str]:
        return lambda: ran.append(name) or name  # type: ignore[func-returns-value]

    answers = [kept.run(MEMORY, name, work(name)) for name in "aaaabaabbb"]
    assert answers == [*"aaaabaabbb"]
    # Queued, recorded, replayed; then another, the first from its recording; and the other takes its place.
    assert ran == ["a", "a", "b", "b"]
    assert replayed == [*"aaaaabbb"]


def test_work_that_cannot_be_recorded_is_queued_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(replays, "_recorded", refuse)
    kept = Replays[int]()
    assert kept.run(MEMORY, "a", lambda: 1) == 1
    with pytest.warns(RuntimeWarning, match="cannot be recorded"):
        assert kept.run(MEMORY, "a", lambda: 2) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kept.run(MEMORY, "a", lambda: 3) == 3


def test_memory_is_told_apart_by_place_type_and_shape_and_odd_tensors_have_none() -> None:
    entries = torch.arange(12.0)
    known = memory_of([entries.view(3, 4)])
    assert known == memory_of([entries.view(3, 4)])
    others = [entries.view(4, 3), entries.view(3, 4).clone(), entries.view(torch.int32).view(3, 4)]
    assert all(memory_of([other]) not in (known, None) for other in others)
    odd = [
        entries.view(3, 4).T,
        torch.eye(3).to_sparse(),
        torch.zeros(3, device="meta").as_subclass(nn.UninitializedParameter),
    ]
    assert all(memory_of([entries, other]) is None for other in odd)
    assert memory_of([entries, torch.zeros(3, device="meta")]) is None


def test_a_table_is_sent_once_for_the_same_numbers_and_held_by_who_asks() -> None:
    table, numbers = KeptTable(), np.array([1, 2, 3])
    first = table.sent(numbers, torch.device("cpu"))
    with tables_held() as held:
        assert table.sent(numbers.copy(), torch.device("cpu")) is first
        other = table.sent(np.array([4, 5]), torch.device("cpu"))
    assert [*map(id, held)] == [id(first), id(other)]
    assert other.tolist() == [4, 5]
    assert table.sent(numbers, torch.device("cpu")).tolist() == [1, 2, 3]


def gradient_of(model: nn.Module, name: str) -> Tensor:
    """The gradient of a parameter."""
    found = model.get_parameter(name).grad
    assert found is not None
    return found


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wait", [True, False], ids=["at once", "later"])
def test_a_replayed_audit_has_the_residuals_of_one_that_is_queued(dtype: torch.dtype, wait: bool) -> None:
    torch.manual_seed(0)
    model = DecoderLM(vocab=97, dim=64, depth=3, heads=4, hidden=96, kv_heads=2).to("cuda", dtype)
    laws, queued = recognize(model), recognize(model)
    queued.plan.replays.refused = True
    for number in range(8):
        model.zero_grad()
        model(torch.randint(97, (2, 33), device="cuda")).float().square().mean().backward()
        if number == 6:
            gradient_of(model, "layers.1.attention.k.weight").mul_(1.1)
        replayed, expected = (audit(model, which, wait=wait) for which in (laws, queued))
        found, right = ({row.name: row for row in one.rows} for one in (replayed, expected))
        assert found.keys() == right.keys()
        assert all(abs(found[name].residual - right[name].residual) <= 1e-6 for name in right)
        assert replayed.ok is expected.ok is (number != 6)
        assert (laws.plan.replays._recording is not None) == (number > 0)
        # Memory of gradients elsewhere: queued again, with the right numbers.
        spare = [torch.empty_like(p) for p in model.parameters()] if number == 3 else None
        del spare
