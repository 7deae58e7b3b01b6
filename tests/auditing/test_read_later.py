"""An audit that is read later says what it would have said at once, whatever became of the gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from conserved import Audit, audit, blocks, gauge, recognize
from conserved.laws.identities import PendingBalance

Spoil = Callable[[Any], None]


def trained(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = blocks.DecoderLM(64, 32, 2, 4, 48, kv_heads=2, max_length=16, **options)
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, -1).flatten()).backward()
    return model


def nothing(model: Any) -> None:
    """A right backward pass."""


def scaled_head(model: Any) -> None:
    model.layers[0].attention.k.weight.grad[:8] *= 1.1


def lost(model: Any) -> None:
    model.layers[1].attention.o.weight.grad = None


def not_a_number(model: Any) -> None:
    model.layers[0].attention.q.weight.grad[0, 0] = float("nan")


def zero(model: Any) -> None:
    model.layers[0].feedforward.gate.weight.grad.zero_()


def all_zero(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad.zero_()


def clipped(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def overwritten(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.normal_()


def freed(model: nn.Module) -> None:
    model.zero_grad(set_to_none=True)


def said(result: Audit) -> list[object]:
    """Everything but what it would take the gradients again to suggest."""
    numbers = [(row.name, row.residual, row.tolerance, row.status, row.checked) for row in result.rows]
    verdict = result.verdict
    return [verdict.status, verdict.message, result.worst, result.ok, result.conclusive, result.tested,
            result.findings, result.coverage, result.precision, result.known, dict(result.by_family()),
            numbers]  # fmt: skip


@pytest.mark.parametrize("changed", [clipped, overwritten, freed], ids=lambda one: one.__name__)
@pytest.mark.parametrize(
    "spoil", [nothing, scaled_head, lost, not_a_number, zero, all_zero], ids=lambda one: one.__name__
)
def test_gradients_that_change_or_go_afterwards_do_not_change_it(spoil: Spoil, changed: Spoil) -> None:
    model = trained()
    spoil(model)
    # What an error would have to be to be seen is measured at once or not at all.
    at_once, later = audit(model, sized=False), audit(model, wait=False)
    changed(model)
    np.testing.assert_equal(said(later), said(at_once))


def test_it_is_judged_when_it_is_read_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    balance = PendingBalance.balance

    def noted(self: PendingBalance, *args: Any) -> Any:
        read.append(1)
        return balance(self, *args)

    monkeypatch.setattr(PendingBalance, "balance", noted)
    model = trained()
    laws = recognize(model)
    read.clear()
    result = audit(model, laws, wait=False)
    assert result.ready
    assert not read
    assert result.ok
    assert "VERIFIED" in str(result)
    assert len(read) == 1
    assert audit(model, laws).ok
    assert len(read) == 2


def test_a_step_of_the_optimizer_in_between_does_not_make_gradients_stale() -> None:
    model = trained()
    result = audit(model, wait=False)
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    assert result.conclusive
    assert audit(model).failures, "these are out of date"


def test_it_does_not_keep_gradients() -> None:
    model = trained()
    alive = [weakref.ref(p.grad) for p in model.parameters() if p.grad is not None]
    result = audit(model, wait=False)
    model.zero_grad(set_to_none=True)
    assert alive
    assert not any(one() is not None for one in alive)
    assert result.conclusive


def test_a_failure_names_law_and_usual_causes_but_no_factor() -> None:
    model = trained()
    scaled_head(model)
    at_once, later = audit(model), audit(model, wait=False)
    assert any("1.1" in text for text in at_once.failures[0].suggests)
    assert later.failures[0].name == at_once.failures[0].name
    assert later.failures[0].suggests == at_once.failures[0].suggests[1:]


def test_laws_whose_products_underflow_count_as_not_tested_and_never_as_broken() -> None:
    model = trained()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad *= 1e-24
    at_once, later = audit(model), audit(model, wait=False)
    assert at_once.conclusive
    assert later.failures == ()
    assert later.tested < at_once.tested
    assert not later.conclusive


def test_errors_are_raised_where_the_audit_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"Call backward\(\) first"):
        audit(blocks.DecoderLM(64, 32, 2, 4, 48, max_length=16), wait=False)


def test_with_a_gauge_it_is_judged_at_once() -> None:
    torch.manual_seed(0)
    model = blocks.DecoderLM(64, 32, 2, 4, 48, max_length=16, norm="rms")
    tokens = torch.randint(64, (2, 16))
    laws = recognize(model, tokens)
    with gauge(model, laws=laws) as seen:
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, -1).flatten()).backward()
    one, other = (audit(model, laws, gauge=seen, wait=wait) for wait in (True, False))
    freed(model)
    assert said(one) == said(other)


@pytest.mark.parametrize("factor", [0.0, 0.9, 1e3, 1e15, float("nan")])
def test_a_wrong_gradient_is_seen_whatever_became_of_the_parameters(factor: float) -> None:
    model = trained()
    scaled_head(model)
    at_once, result = audit(model), audit(model, wait=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    assert [row.name for row in result.failures] == [row.name for row in at_once.failures]
