"""How much measured noise explains: few numbers, underflow, and kernels that add in another order every time."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from conserved import recognize
from conserved.auditing.diagnosis import Diagnosis, Origin, SuspectIdentities, diagnose
from conserved.auditing.gradient_peaks import PeakHistory
from conserved.auditing.noise import multiplied, noise_multiples, suspicious
from conserved.auditing.reference_comparison import foreign_gradients
from conserved.auditing.reference_form import AS_RUN, PassForm
from conserved.auditing.replay import Replay
from conserved.laws.identities import balance_of
from conserved.moment import Plan
from conserved.tolerances import SIGMAS
from scale_models import HandWritten


class StoredReplay(Replay):
    """Gives known gradients, rounded to float16 after scaling as a kernel would, and jittered if it is told to."""

    def __init__(self, gradients: Mapping[str, Tensor], *, half: bool = False, jitter: float = 0.0) -> None:
        super().__init__(nn.Identity())
        self._gradients, self._half, self._jitter = gradients, half, jitter
        self._generator = torch.Generator().manual_seed(0)

    def _outputs(self, form: PassForm) -> tuple[list[Tensor], list[Tensor]]:
        raise NotImplementedError

    def gradients(
        self, parameters: Mapping[str, Tensor], *, scale: float = 1.0, form: PassForm = AS_RUN
    ) -> dict[str, Tensor]:
        """Return the gradients of some parameters."""
        return {name: self._one(self._gradients[name], scale, form) for name in parameters}

    def _one(self, gradient: Tensor, scale: float, form: PassForm) -> Tensor:
        if self._half and form.wide is None:
            gradient = (gradient * scale).half().double() / scale
        if self._jitter:
            gradient = gradient + self._jitter * torch.randn(gradient.shape, generator=self._generator)
        return gradient.float().clone()


@pytest.mark.parametrize("samples", [2, 8, 30])
def test_one_number_is_held_against_students_distribution(samples: int) -> None:
    """The root of an F-distributed ratio with one degree of freedom above is Student's t."""
    expected = stats.t.isf(stats.norm.sf(SIGMAS), samples)
    assert noise_multiples(np.array([1]), samples)[0] == pytest.approx(max(expected, SIGMAS), rel=1e-3)


def test_many_numbers_are_held_against_six_deviations() -> None:
    assert noise_multiples(np.array([16, 100, 10**6]), 1).tolist() == [SIGMAS] * 3


def test_one_sample_of_few_numbers_bounds_nothing() -> None:
    assert noise_multiples(np.array([1, 2, 4]), 1).min() > 100


def _diagnose(size: float, factor: float) -> Diagnosis:
    """Diagnose the identity of a linear pair whose gradients have a size, and a wrong factor on one leg."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 8, bias=False), nn.Linear(8, 12, bias=False)).double()
    x = torch.randn(64, 12, dtype=torch.float64)
    (model(x) - x.flip(1)).square().mean().backward()
    theta = {name: p.detach() for name, p in model.named_parameters()}
    largest = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    exact = {name: p.grad * (size / largest) for name, p in model.named_parameters() if p.grad is not None}
    exact["0.weight"] = exact["0.weight"] * factor
    replay = StoredReplay(exact, half=True)
    (law,) = recognize(model, x)
    plan = Plan.of([law], kernels=False)
    residuals = balance_of(plan, theta, replay.gradients(exact)).residuals
    floors = suspicious(torch.float16, plan.entries)
    assert residuals[0] > floors[0], "the residual must be suspected, or nothing is tested"
    suspects = SuspectIdentities(
        symmetries=[law],
        residuals=residuals,
        floors=floors,
        theta=theta,
        factors=np.array([False]),
        precision=torch.float16,
    )
    (diagnosis,) = diagnose(suspects, replay)
    return diagnosis


class ExhaustedReplay(StoredReplay):
    """Runs out of memory after a few passes, as a device does that others use as well."""

    left = 3

    def gradients(
        self, parameters: Mapping[str, Tensor], *, scale: float = 1.0, form: PassForm = AS_RUN
    ) -> dict[str, Tensor]:
        """Return gradients until memory is used up."""
        self.left -= 1
        if self.left < 0:
            raise torch.OutOfMemoryError("no memory is left")
        return super().gradients(parameters, scale=scale, form=form)


def test_a_residual_whose_rounding_could_not_be_sampled_is_not_refuted() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 8, bias=False), nn.Linear(8, 12, bias=False))
    x = torch.randn(64, 12)
    (model(x) - x.flip(1)).square().mean().backward()
    theta = {name: p.detach() for name, p in model.named_parameters()}
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    gradients["0.weight"] += 1e-3 * torch.randn(8, 12)
    (law,) = recognize(model, x)
    plan = Plan.of([law], kernels=False)
    suspects = SuspectIdentities(
        symmetries=[law],
        residuals=balance_of(plan, theta, gradients).residuals,
        floors=suspicious(torch.float32, plan.entries),
        theta=theta,
        factors=np.array([False]),
        precision=torch.float32,
    )
    assert diagnose(suspects, StoredReplay(gradients))[0].origin is Origin.PROGRAM
    assert diagnose(suspects, ExhaustedReplay(gradients))[0].origin is Origin.UNKNOWN


def test_residuals_of_underflow_in_float16_are_not_refuted() -> None:
    assert not _diagnose(3e-6, 1.0).wrong


@pytest.mark.parametrize("size", [1.0, 1e-4])
def test_wrong_factors_in_float16_are_refuted_beside_underflow(size: float) -> None:
    assert _diagnose(size, 1.2).wrong


def _foreign(jitter: float, *, selects: bool, wrong: float) -> int:
    generator = torch.Generator().manual_seed(1)
    parameters = {name: torch.randn(40, 24, generator=generator) for name in "wuv"}
    right = {name: p.cos() for name, p in parameters.items()}
    replay = StoredReplay(right, jitter=jitter)
    gradients = replay.gradients(parameters)
    gradients["w"][3] *= wrong
    own = replay.gradients(parameters)
    return len(foreign_gradients(replay, parameters, gradients, own, torch.float32, selects))


def test_a_row_that_the_pass_does_not_give_again_is_foreign() -> None:
    assert _foreign(0.0, selects=True, wrong=2.0) == 1
    assert _foreign(1e-4, selects=False, wrong=2.0) == 1


def test_sums_in_another_order_are_not_foreign() -> None:
    assert _foreign(1e-4, selects=False, wrong=1.0) == 0


@pytest.mark.parametrize(("wrong", "foreign"), [(1.0, 0), (2.0, 1)])
def test_a_pass_that_rounds_otherwise_once_is_not_foreign(wrong: float, foreign: int) -> None:
    generator = torch.Generator().manual_seed(1)
    parameters = {name: torch.randn(40, 24, generator=generator) for name in "wuv"}
    right = {name: p.cos() for name, p in parameters.items()}

    sizes = {name: p.abs() for name, p in right.items()}
    # Little of one row is left by cancellation, so that its rounding is large against it.
    right["w"][5] *= 0.01

    def rounded() -> dict[str, Tensor]:
        return {name: 4e-3 * size * torch.randn(size.shape, generator=generator) for name, size in sizes.items()}

    gradients = {name: right[name] + noise for name, noise in rounded().items()}
    gradients["w"][3] *= wrong
    replay = StoredReplay(right)
    result = foreign_gradients(replay, parameters, gradients, right, torch.bfloat16, rounding=rounded())
    assert [item.parameter for item in result] == ["w"] * foreign


def test_passes_that_select_anew_are_not_compared() -> None:
    assert _foreign(1e-4, selects=True, wrong=2.0) == 0


@pytest.mark.parametrize("how", ["row", "all"])
def test_gradients_changed_inside_the_backward_are_corrupted(how: str) -> None:
    """A flip in the gradient of an output changes one row of the next weight, or multiplies everything before it."""
    generator = torch.Generator().manual_seed(2)
    gradient = torch.randn(64, 48, generator=generator)
    history, replay = PeakHistory(), StoredReplay({"w": gradient, "o": torch.ones(3)})
    parameters = {"w": gradient, "o": torch.ones(3)}
    for _ in range(5):
        assert history.corrupted(parameters, {"w": gradient.clone(), "o": torch.ones(3)}, replay) == ()
    wrong = gradient.clone()
    if how == "row":
        # Half of the norm in one row, spread evenly, so that no single entry sticks out by much.
        wrong[7] += 0.5 * gradient.norm() * torch.ones(48) / 48**0.5
    else:
        wrong = gradient + 30 * torch.randn(64, 48, generator=generator)
    (item,) = history.corrupted(parameters, {"w": wrong, "o": torch.ones(3)}, replay)
    assert item.parameter == "w"
    assert how == "all" or item.index[0] == 7


def test_gradients_that_grow_in_the_replay_too_are_not_corrupted() -> None:
    gradient = torch.randn(16, 16, generator=torch.Generator().manual_seed(3))
    history = PeakHistory()
    for size in (1.0, 1.1, 0.9, 1.0, 50.0):
        replay = StoredReplay({"w": size * gradient})
        assert history.corrupted({"w": gradient}, {"w": size * gradient}, replay) == ()


def test_laws_whose_maps_are_multiplied_are_known_by_their_sides() -> None:
    model = HandWritten(50, 24, 32, 2, 4, 2)
    laws = recognize(model, torch.zeros(1, 6, dtype=torch.long), loss="cross_entropy")
    families = {symmetry.family: set[bool]() for symmetry in laws}
    for symmetry in laws:
        families[symmetry.family].add(multiplied(symmetry))
    assert families.pop("query_key") == {True}
    assert {"value_output", "gated_neurons", "gain"} <= families.keys()
    assert all(flags == {False} for flags in families.values())
