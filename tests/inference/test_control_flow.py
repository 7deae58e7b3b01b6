"""Control flow that PyTorch has as operators is followed as the Python it stands for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch._ops import HigherOrderOperator

from adversarial_layers import Function
from conserved import certify, discover, recognize
from conserved.discovery import UnsuitableError
from law_checks import check, subject


def halved(p: Any, x: Tensor) -> Tensor:
    return (x @ p.a).relu() / 8 @ p.b


def decayed(p: Any, x: Tensor) -> Tensor:
    rows = [x[0] @ p.a]
    for row in x[1:] @ p.a:
        rows.append(rows[-1] / 2 + row)
    return torch.stack(rows) @ p.b


def while_halved(p: Any, x: Tensor) -> Tensor:
    start = (torch.tensor(0), (x @ p.a).relu())
    return while_loop(lambda n, h: n < 3, lambda n, h: (n + 1, h / 2), start)[1] @ p.b


def scanned(p: Any, x: Tensor) -> Tensor:
    h = x @ p.a
    return scan(lambda c, r: (c / 2 + r, c / 2 + r), torch.zeros_like(h[0]), h)[1] @ p.b


def mapped(p: Any, x: Tensor) -> Tensor:
    over_rows: Any = torch_map
    result: Tensor = over_rows(lambda row: row.relu() / 8, x @ p.a) @ p.b
    return result


def branched(p: Any, x: Tensor) -> Tensor:
    return torch.cond(torch.tensor(True), lambda h: h.relu() / 8, lambda h: h.tanh(), (x @ p.a,)) @ p.b


def model(function: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return Function(function, a=torch.randn(3, 4), b=torch.randn(4, 2))


@pytest.mark.parametrize(
    ("operator", "python"), [(while_halved, halved), (mapped, halved), (branched, halved), (scanned, decayed)]
)
def test_loops_and_branches_as_operators_have_the_laws_of_python(
    operator: Callable[[Any, Tensor], Tensor], python: Callable[[Any, Tensor], Tensor]
) -> None:
    laws = recognize(model(operator), torch.randn(5, 3))
    expected = recognize(model(python), torch.randn(5, 3))
    assert [(symmetry.name, symmetry.source) for symmetry in laws] == [(s.name, s.source) for s in expected]
    assert dict(laws.unknown) == {}
    assert laws.checked is not None
    assert laws.checked.refuted == {}


def test_a_branch_on_data_has_assumed_laws() -> None:
    net = model(lambda p, x: torch.cond(x.sum() > 0, lambda h: h.relu(), lambda h: h.tanh(), (x @ p.a,)) @ p.b)
    assert {symmetry.source for symmetry in recognize(net, torch.randn(5, 3).abs())} == {"assumed"}


def test_what_a_branch_reads_from_around_it_is_read() -> None:
    net = model(lambda p, x: torch.cond(x.sum() > 0, lambda h: h @ p.b, lambda h: -(h @ p.b), (x @ p.a,)))
    python = model(lambda p, x: x @ p.a @ p.b * (1 if x.sum() > 0 else -1))
    args = (torch.randn(5, 3),)
    laws = recognize(net, *args)
    assert {"a", "b"} == {name for symmetry in laws for name in symmetry.parameters}
    assert dict(check(laws, subject(lambda: (python, args, {}))).wrong) == {}


def test_sizes_that_values_decide_are_seen_where_a_compiler_is_loaded_and_inside_of_branches() -> None:
    torch.compiler.reset()
    sized = model(lambda p, x: (x @ p.a).relu() @ p.b * (1 + (len(x[x > 90]) > 0)))
    assert {symmetry.source for symmetry in recognize(sized, torch.randn(5, 3))} == {"assumed"}
    within = model(
        lambda p, x: (
            torch.cond(
                torch.tensor(True), lambda h, y: h.relu() * (1 + (len(y[y > 90]) > 0)), lambda h, y: h, (x @ p.a, x)
            )
            @ p.b
        )
    )
    assert {symmetry.source for symmetry in recognize(within, torch.randn(5, 3))} == {"assumed"}


class Applied(HigherOrderOperator):
    """An operator that calls a function, which inference has never heard of."""

    def __call__(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        result: Tensor = super().__call__(function, x)
        return result


def test_another_operator_that_takes_functions_is_unknown_and_may_read_every_parameter() -> None:
    applied = Applied("applied_in_a_test")
    applied.fallthrough(torch._C.DispatchKey.AutogradCPU)
    applied.py_impl(torch._C.DispatchKey.CompositeExplicitAutograd)(lambda function, x: function(x))
    laws = recognize(model(lambda p, x: applied(lambda h: h @ p.b, x @ p.a)), torch.randn(5, 3))
    assert [symmetry.name for symmetry in laws if "b" in symmetry.parameters] == []
    assert any("applied_in_a_test" in name for name in laws.unknown)
    assert laws.checked is None or dict(laws.checked.refuted) == {}


def test_a_branch_on_data_is_not_certified() -> None:
    net = model(lambda p, x: torch.cond(x.sum() > 0, lambda h: h.relu(), lambda h: h.tanh(), (x @ p.a,)) @ p.b)
    with pytest.raises(UnsuitableError):
        certify(net, torch.randn(3))


def test_laws_of_a_branch_are_found_in_gradients() -> None:
    net = model(lambda p, x: torch.cond(x.sum() > 0, lambda h: h.relu(), lambda h: 2 * h.relu(), (x @ p.a,)) @ p.b)
    assert discover(net, torch.randn(3)).count == 4


def test_the_first_branch_of_a_process_is_read() -> None:
    # The compiler is imported by this very call, in the middle of the pass that is watched.
    program = """
import sys, torch
from torch import nn
from conserved import recognize
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)
    def forward(self, x):
        return self.b(torch.cond(torch.tensor(True), lambda h: h.relu(), lambda h: h.tanh(), (self.a(x),)))
assert "torch._dynamo" not in sys.modules
print(recognize(Net(), torch.randn(5, 3)).numbers)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "4", done.stderr[-1000:]
