"""A hostile reading of `certify` and `discover`: nothing false is proved, and what is refused is refused by name."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import conserved
import conserved_verify
from conserved import Verdict
from conserved.certificates import MalformedError
from conserved.discovery import UnsuitableError
from traps import TRAPS, Trap

pytestmark = pytest.mark.usefixtures("as_users_run_it")


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.name)
@pytest.mark.filterwarnings("ignore")
def test_no_trap_ends_in_a_false_proof(trap: Trap) -> None:
    if trap.refused:
        with pytest.raises((UnsuitableError, MalformedError), match=trap.refused):
            conserved.certify(trap.f, trap.x, params=trap.params())
        return
    certificate = conserved.certify(trap.f, trap.x, params=trap.params())
    second = conserved_verify.verify(certificate.record())
    assert (second.status, second.at_most, second.found) == (
        certificate.verdict.status,
        certificate.at_most,
        certificate.found,
    )
    if certificate.verdict.holds and trap.laws is not None:
        assert certificate.at_most >= trap.laws >= certificate.found
        assert certificate.at_most == trap.laws or not trap.sharp


def test_there_are_many_traps() -> None:
    assert len(TRAPS) >= 60
    assert len({trap.name for trap in TRAPS}) == len(TRAPS)


class TestComplex:
    """The phases of two complex numbers are conserved beside their sizes; dropping imaginary parts hides that."""

    def test_a_complex_parameter_is_refused_by_name(self) -> None:
        start = {"a": torch.ones(1, dtype=torch.complex128), "b": torch.ones(1, dtype=torch.complex128)}

        def f(p: Any, x: Tensor) -> Tensor:
            return torch.view_as_real(p["a"] * p["b"] * x).flatten()

        for call in (conserved.certify, conserved.discover):
            with pytest.raises(UnsuitableError, match="got a, which is complex"):
                call(f, torch.zeros(1), params=start)

    def test_a_complex_parameter_of_a_module_is_refused_by_name(self) -> None:
        class Phase(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.turn = nn.Parameter(torch.ones(1, dtype=torch.complex64))

            def forward(self, x: Tensor) -> Tensor:
                return torch.view_as_real(self.turn * x).flatten()

        for call in (conserved.certify, conserved.discover):
            with pytest.raises(UnsuitableError, match="got turn, which is complex"):
                call(Phase(), torch.zeros(1))

    def test_as_pairs_of_reals_all_laws_are_counted(self) -> None:
        """|a|² − |b|² for the common scale, and Re and Im of none: C* acts, its scale gives the one law."""
        start = {"a": torch.ones(1, 2, dtype=torch.float64), "b": torch.ones(1, 2, dtype=torch.float64)}

        def f(p: Any, x: Tensor) -> Tensor:
            product = torch.view_as_complex(p["a"]) * torch.view_as_complex(p["b"])
            return torch.view_as_real(product * x).flatten()

        assert conserved.discover(f, torch.zeros(1), params=start).count == 1

    def test_complex_tables_keep_their_imaginary_part(self) -> None:
        class Rotated(nn.Module):
            turn: Tensor

            def __init__(self) -> None:
                super().__init__()
                self.w = nn.Parameter(torch.ones(2))
                self.register_buffer("turn", torch.polar(torch.ones(1), torch.ones(1)))

            def forward(self, x: Tensor) -> Tensor:
                turned = torch.view_as_complex(self.w[None]) * self.turn
                return torch.view_as_real(turned).flatten()[:1] * x

        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*imaginary.*")
            assert conserved.discover(Rotated(), torch.zeros(1)).count == 1


class TestClasses:
    """Cross-entropy over an axis that is not the last."""

    START: ClassVar = {"W": torch.ones(3, 2, dtype=torch.float64)}

    @staticmethod
    def logits(p: Any, x: Tensor) -> Tensor:
        return p["W"] @ x

    def test_the_axis_of_the_classes_decides_the_count(self) -> None:
        """Outputs (classes, positions): the sums of W over classes are conserved, two numbers."""
        example = torch.zeros(2, 4)
        for call in (conserved.discover, conserved.certify):
            first: Any = call(self.logits, example, params=self.START, loss="cross_entropy", class_axis=0)
            last: Any = call(self.logits, example, params=self.START, loss="cross_entropy")
            laws = [
                result.count if isinstance(result, conserved.Discovery) else result.at_most for result in (first, last)
            ]
            assert laws == [2, 0]

    def test_the_axis_is_said_where_it_could_be_another(self) -> None:
        discovery = conserved.discover(self.logits, torch.zeros(2, 4), params=self.START, loss="cross_entropy")
        assert "cross-entropy over axis -1 of outputs of shape (3, 4)" in discovery.verdict.message
        plain = conserved.discover(self.logits, torch.zeros(2), params=self.START, loss="cross_entropy")
        assert "axis" not in plain.verdict.message

    def test_an_axis_that_is_not_there_is_refused(self) -> None:
        with pytest.raises(UnsuitableError, match="Expected class_axis to be an axis"):
            conserved.discover(self.logits, torch.zeros(2, 4), params=self.START, loss="cross_entropy", class_axis=2)


def test_softplus_is_the_one_of_pytorch_on_both_sides_of_its_threshold() -> None:
    """Above the threshold it is the identity, where a scale can be moved; below it is not."""

    def f(p: Any, x: Tensor) -> Tensor:
        return p["b"] * F.softplus(p["a"] * x, beta=2.0, threshold=-50.0)

    start = {name: torch.ones(1, dtype=torch.float64) for name in "ab"}
    certificate = conserved.certify(f, torch.zeros(1), params=start)
    assert (certificate.at_most, certificate.found, certificate.verdict.status) == (1, 1, Verdict.PROVED)
    assert "near θ" in certificate.verdict.message


def test_a_hook_on_a_parameter_is_refused() -> None:
    layer = nn.Linear(2, 2).double()
    layer.weight.register_hook(lambda g: 0 * g)
    with pytest.raises(UnsuitableError, match="weight, which has a hook"):
        conserved.certify(layer, torch.zeros(2))
