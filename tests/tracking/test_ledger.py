"""The account of every step adds up: observed change = first order by cause + second order, to rounding."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from conserved import Monitor, recognize
from conserved.moment import torch_backend
from conserved.moment.forms import WantedNumbers, forms
from conserved.symmetry import KINDS, Kind, moment_map
from conserved.tracking import ledger
from conserved.tracking.step_expansion import SlotWeights, StepWeights
from tolerances import AGREE
from training import OPTIMIZERS, OptimizerCase, decoder, exact_text_loss, ids, image_loss, stepping, train, vision

ADDS_UP = 1e-12
"""|observed − accounted| over the size of a law's terms, in float64."""
MODELS = {"decoder": (decoder, exact_text_loss), "vision": (vision, image_loss)}


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("case", OPTIMIZERS, ids=ids)
@pytest.mark.parametrize("kind", MODELS)
def test_the_ledger_adds_up_over_many_steps_of_every_optimizer(
    kind: str, case: OptimizerCase, request: pytest.FixtureRequest
) -> None:
    """A ledger that misses a part of a step misses it in the first ones; with `--whole` the run is one of 500."""
    steps = 500 if request.config.getoption("--whole") else 12
    build, loss = MODELS[kind]
    model = build().double()
    optimizers = case.build(model)
    monitor = Monitor(model, optimizers, loss="cross_entropy")
    train(model, optimizers, loss, steps, after=stepping(monitor))
    scales = {name: float(scale.abs().max()) for name, scale in monitor.reference.scales.items()}
    entries = monitor.ledger()
    last = [entry for entry in entries if entry.step == steps]
    assert len(entries) == steps * len(monitor.laws)
    assert len(last) == len(monitor.laws)
    assert max(abs(entry.residual) / scales[entry.law] for entry in entries) <= ADDS_UP
    assert max(abs(entry.drift - entry.predicted) / scales[entry.law] for entry in last) <= ADDS_UP
    assert max(entry.excess for entry in entries) <= 1
    assert {cause for entry in entries for cause, amount in entry.causes.items() if amount} == case.causes
    assert not monitor.alarms
    drift = max(abs(entry.drift) / scales[entry.law] for entry in last)
    assert drift > 1e-6, "a run in which nothing drifts shows nothing"


PAIRS = ((0, 0), (0, 1), (1, 1), (0, 2), (1, 2), (2, 2))


def polar_by_definition(kind: Kind, a: Tensor, b: Tensor) -> Tensor:
    """½(μ(A, B) + μ(B, A)) of directions."""
    both = [moment_map(kind, (1,), (x,), (y,)) for x, y in ((a, b), (b, a))]
    # A translation acts on points alone.
    return kind.conserved(both[0] + both[1]) / 2 * (not kind.linear)


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("layout", ["rows", "columns", "strided"])
@pytest.mark.parametrize("code", KINDS)
def test_pairings_are_the_polar_form_of_the_moment_map(
    code: str, layout: str, dtype: torch.dtype, device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over every path: in one piece and in slices, as processors and as other devices take them."""
    if device:
        monkeypatch.setattr(torch_backend, "in_cache", lambda like: False)
    one = KINDS[code]
    for size in (1 << 20, 256, 40):
        monkeypatch.setattr(torch_backend, "_SLICE", size)
        monkeypatch.setattr(torch_backend, "_DEVICE_SLICE", size)
        shape = (3, 6, 17) if layout != "columns" else (3, 17, 6)
        legs = [torch.randn(*shape, dtype=dtype) for _ in range(3)]
        legs = [leg.mT if layout == "columns" else leg for leg in legs]
        if layout == "strided":
            legs = [torch.randn(6, 3, 17, dtype=dtype).transpose(0, 1) for _ in range(3)]
        directions, law = (0.0, 0.0, 0.0), WantedNumbers(law=True)
        values, _ = forms(torch_backend.TORCH, one.products, 1, legs, PAIRS, directions, dtype, law)
        for form, (i, j) in zip(one.products.polar(values), PAIRS, strict=True):
            torch.testing.assert_close(form, polar_by_definition(one, legs[i], legs[j]), rtol=AGREE[dtype], atol=1e-5)


def test_the_path_for_other_devices_gives_the_same_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    ledgers = []
    for device in (False, True):
        monkeypatch.setattr(torch_backend, "in_cache", lambda like, device=device: not device)
        torch.manual_seed(0)
        model = decoder(positions="none").double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
        monitor = Monitor(model, optimizer, loss="cross_entropy")
        train(model, optimizer, exact_text_loss, 3, after=stepping(monitor))
        ledgers.append(monitor.ledger())
    for ours, theirs in zip(*ledgers, strict=True):
        assert ours.law == theirs.law
        for name in ("observed", "first_order", "second_order", "error"):
            assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-9, abs=1e-14)


def test_coordinates_multiplicities_and_reach_describe_the_law() -> None:
    model = vision().double()
    laws = recognize(model, torch.ones(2, 1, 4, 4, dtype=torch.float64), loss="cross_entropy")
    values, reference = laws.values(), laws.reference()
    for symmetry in laws:
        law, one = values[symmetry.name], symmetry.kind
        coordinates = one.coordinates(law)
        assert coordinates.shape == (symmetry.numbers,)
        weights = one.products.multiplicities(symmetry.n, symmetry.m)
        assert float((weights * coordinates.square()).sum()) == pytest.approx(float(law.square().sum()))
        assert (len(one.units(law)) == 1) or not one.together
        if not one.linear:
            # |Σ ± a·b| ≤ Σ |a||b| ≤ ‖a‖‖b‖, entry by entry.
            terms = sum(abs(leg.degree) * leg.view.matrix(laws.parameters[leg.view.parameter]).detach().square().sum(-1)
                        for leg in symmetry.legs if one.code in ("scaling", "general_linear"))  # fmt: skip
            if isinstance(terms, Tensor):
                reach = one.products.reach(terms)
                assert bool((one.coordinates(reference.scales[symmetry.name]) <= reach * (1 + 1e-12)).all())


@pytest.mark.parametrize("decay", [0.0, 0.1], ids=["plain", "decayed"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW], ids=lambda one: one.__name__)
def test_laws_of_a_gain_of_one_plus_gamma_add_up_too(optimizer: type[torch.optim.Optimizer], decay: float) -> None:
    """Decay pulls γ and not 1 + γ, so the law sees a constant beside the parameter."""
    import hf_zoo

    family = hf_zoo.named("Gemma 2")
    model = family.build()
    steps = optimizer(model.parameters(), lr=0.01, weight_decay=decay)  # type: ignore[call-arg]
    monitor = Monitor(model, steps)
    watched = [s.name for s in family.laws(model) if any(leg.view.offset for leg in s.legs)]
    for seed in range(5):
        steps.zero_grad()
        family.objective(model, seed=seed).backward()
        steps.step()
        monitor.step()
    rows = [row for row in monitor.ledger() if row.law in watched]
    assert len(rows) == 5 * len(watched)
    assert max(abs(row.observed) for row in rows) > 1e-4
    assert max(abs(row.residual) for row in rows) <= ADDS_UP * 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("on_device", [False, True], ids=["numbers", "tensors"])
def test_all_quantities_of_a_step_are_the_sums_of_their_slots(dtype: torch.dtype, on_device: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    slots = ((0, 0), (0, 1), (1, 1))
    sums = torch.randn(3, 5, 4, generator=generator, dtype=dtype)
    named: dict[str, SlotWeights] = {"first": {(0, 1): -2.0, (1, 1): 0.25}, "second": {(1, 1): 3.0}, "nothing": {}}
    if on_device:
        named["first"][0, 1] = torch.tensor(-2.0)
    nothing = StepWeights(first={}, gradient_term={}, second={}, steepness={})
    result = ledger._SlotWeights(nothing, slots, 1.0).combined(sums, named)
    expected = {
        "first": -2 * sums[1].double() + 0.25 * sums[2].double(),
        "second": 3 * sums[2].double(),
        "nothing": torch.zeros(5, 4, dtype=torch.float64),
    }
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        assert result[name].dtype == dtype
        torch.testing.assert_close(result[name].double(), value, rtol=0, atol=50 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("broken", [math.inf, -math.inf, math.nan], ids=str)
def test_a_gradient_that_is_not_finite_spoils_only_what_it_is_part_of(broken: float) -> None:
    """A scaler that skips a step leaves an infinite gradient and parameters that did not move."""
    sums = torch.ones(2, 3)
    sums[1, 2] = broken
    nothing = StepWeights(first={}, gradient_term={}, second={}, steepness={})
    named: dict[str, SlotWeights] = {"without": {(0, 0): 2.0}, "with": {(0, 0): 2.0, (0, 1): 1.0}}
    result = ledger._SlotWeights(nothing, ((0, 0), (0, 1)), 1.0).combined(sums, named)
    assert result["without"].tolist() == [2.0, 2.0, 2.0]
    assert result["with"][:2].tolist() == [3.0, 3.0]
    assert not result["with"][2].isfinite()
