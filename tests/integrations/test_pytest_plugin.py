"""The pytest plugin: a marker, an option and a fixture that audit every backward pass of a test."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from conserved.integrations.backward_audits import BackwardAudits

MODEL = """
import pytest, torch
from torch import nn

class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.T
    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        return dy @ w, 0.5 * dy.T @ x

class Net(nn.Module):
    def __init__(self, wrong):
        super().__init__()
        self.a, self.b, self.wrong = nn.Linear(4, 6, bias=False), nn.Linear(6, 3, bias=False), wrong
    def forward(self, x):
        h = torch.relu(Halved.apply(x, self.a.weight) if self.wrong else self.a(x))
        return self.b(h)

def step(wrong):
    torch.manual_seed(0)
    Net(wrong)(torch.randn(5, 4)).square().sum().backward()
"""

TESTS = (
    MODEL
    + """
@pytest.mark.conserved
def test_right(): step(False)

@pytest.mark.conserved
def test_wrong(): step(True)

def test_unmarked(): step(True)

def test_fixture(conserved_audits):
    step(False)
    assert len(conserved_audits.audits) == 1
"""
)


def pytest_on(folder: Path, *options: str) -> list[str]:
    """What pytest prints with each of the options, one after the other in one process."""
    (folder / "test_models.py").write_text(TESTS)
    script = f"""
import pytest
for option in {options!r}:
    print("with", option, flush=True)
    pytest.main(["-q", "-p", "no:cacheprovider", option, {str(folder)!r}])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, cwd=folder)
    return [done.stderr + part for part in done.stdout.split("with --")[1:]]


@pytest.mark.slow
def test_the_marker_fails_the_test_whose_backward_is_wrong_and_the_option_all_of_them(tmp_path: Path) -> None:
    text, for_all = pytest_on(tmp_path, "--strict-markers", "--conserved")
    assert "1 failed, 3 passed" in text
    assert "FAILED test_models.py::test_wrong" in text
    assert "A backward pass of Net is wrong" in text
    assert "2 failed, 2 passed" in for_all
    assert "FAILED test_models.py::test_unmarked" in for_all


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


def test_gradients_accumulate_as_without_it_and_steps_between_do_no_harm() -> None:
    result: list[list[Tensor]] = []
    for watch in (False, True):
        torch.manual_seed(0)
        model, audits = Net(), BackwardAudits()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        if watch:
            audits.__enter__()
        for _ in range(3):
            model(torch.randn(5, 4)).square().mean().backward()
            optimizer.step()
        if watch:
            audits.__exit__()
            assert len(audits.audits) == 3
            assert all(audit.ok for audit in audits.audits)
        result.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    for with_audits, without in zip(*result, strict=True):
        torch.testing.assert_close(with_audits, without)


def test_everything_is_as_before_afterwards() -> None:
    before = nn.Module.__call__, torch.autograd.backward
    with BackwardAudits():
        assert nn.Module.__call__ is before[0]
        assert torch.autograd.backward is not before[1]
    assert (nn.Module.__call__, torch.autograd.backward) == before


def test_models_that_a_test_drops_are_gone_while_it_runs_and_their_audits_are_there() -> None:
    gone: list[weakref.ref[object]] = []
    with BackwardAudits() as audits:
        for _ in range(3):
            model = Net()
            model(torch.randn(5, 4)).square().mean().backward()
            gone += [weakref.ref(model), weakref.ref(model.a.weight), weakref.ref(model.a.weight.grad)]
            del model
        gc.collect()
        assert [one() for one in gone] == [None] * len(gone)
    assert len(audits.audits) == 3
    for one in audits.audits:
        assert one.conclusive
        assert {row.name for row in one.rows}
        assert one.coverage.parameters > 0.5
        assert one.by_family()
        assert "identities tested" in one.summary()


SESSION = """
import gc, weakref
import torch
from torch import nn

MADE = []

def test_first():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    model(torch.randn(5, 3)).sum().backward()
    MADE.append(weakref.ref(model))

def test_second():
    gc.collect()
    assert MADE and MADE[0]() is None
"""


def test_models_of_one_test_are_gone_in_the_next(tmp_path: Path) -> None:
    (tmp_path / "test_session.py").write_text(SESSION)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--conserved", "test_session.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "2 passed" in done.stdout, done.stdout


def test_a_model_nothing_is_known_of_is_no_failure() -> None:
    with BackwardAudits() as audits:
        model = nn.Sequential(nn.Linear(3, 3), nn.GELU())
        model(torch.ones(2, 3)).sum().backward()
    assert audits.audits == [] or all(not audit.failures for audit in audits.audits)


def test_the_plugin_imports_neither_the_package_nor_torch() -> None:
    script = "import sys, conserved_pytest; print([n for n in ('torch', 'conserved') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
