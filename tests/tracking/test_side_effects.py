"""Passes of a monitor leave nothing behind that code of the program would write: in hooks, closures and globals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conserved import Monitor
from conserved._torch_compat import COMPILED_CODE_RUNS_INSIDE_MODES
from conserved.inference.program.undone_writes import writes_undone

pytestmark = pytest.mark.usefixtures("as_users_run_it")

SHARED = torch.zeros(3)
"""A tensor outside of every model."""


class Writing(nn.Module):
    """A network whose forward pass writes to tensors that are no buffers of it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body: Any = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
        self.kind, self.mean, self.steps = kind, torch.zeros(4), [torch.zeros(2)]

    def forward(self, x: Tensor) -> Tensor:
        written = {"attribute": self.mean, "list": self.steps[0], "global": SHARED}.get(self.kind)
        if written is not None:
            written += x.detach().mean()
        out = self.body(x)
        return out if written is None else out * (1 + written.sum() / 100)


def put_hooks(body: Any, kind: str) -> dict[str, Any]:
    """Put hooks of one kind on a layer; return what they write to."""
    seen: dict[str, Any] = {"sizes": [], "nested": {"calls": [0]}, "total": torch.zeros(2)}
    count = 0

    def note(value: Tensor) -> None:
        nonlocal count
        count += 1
        seen["sizes"].append(len(value))
        seen["nested"]["calls"].append(count)
        seen["total"] += value.detach().mean()

    if kind == "forward hook":
        body[2].register_forward_hook(lambda module, given, out: note(out))
    if kind == "backward hook":
        body[2].register_full_backward_hook(lambda module, given, coming: note(coming[0]))
    if kind == "gradient hook":
        body[2].weight.register_hook(note)
    if kind == "step in a hook":
        for p in body.parameters():
            p.register_hook(lambda g, p=p: torch.zeros_like(p.data.add_(g, alpha=-0.02)))
    return seen


def trained(kind: str, *, watched: bool) -> tuple[list[Tensor], dict[str, Any]]:
    """Train; a gradient is corrupted once, so that its pass is run again. Return losses, weights, what was written."""
    torch.manual_seed(0)
    SHARED.zero_()
    model = Writing(kind)
    seen = put_hooks(model.body, kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    monitor = Monitor(model, optimizer) if watched else None
    losses = []
    for number in range(5):
        x, y = torch.randn(8, 8) + 1, torch.randint(4, (8,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x) * (1 + seen["total"].sum() / 100), y)
        loss.backward()
        if number == 2:
            model.body[2].weight.grad[0, 0] += 3.0
        optimizer.step()
        if monitor is not None:
            monitor.step(loss=loss)
        losses.append(loss.detach().clone())
    if monitor is not None:
        monitor.close()
        assert len(monitor.audits) > 1
    return [*losses, *model.parameters(), model.mean, *model.steps, SHARED.clone(), seen.pop("total")], seen


KINDS = ["attribute", "list", "global", "forward hook", "backward hook", "gradient hook", "step in a hook"]
inside_modes = pytest.mark.skipif(not COMPILED_CODE_RUNS_INSIDE_MODES, reason="this torch runs it eagerly in modes")


@pytest.fixture(params=[False, pytest.param(True, marks=inside_modes)], ids=["nothing compiled", "others compiled"])
def process(request: pytest.FixtureRequest) -> None:
    """A process in which nothing was compiled, or something that has no part in the program."""
    torch.compiler.reset()
    if request.param:
        torch.compile(lambda x: x.sin(), backend="eager")(torch.ones(3))


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_program_writes_is_what_it_would_write_unwatched(kind: str) -> None:
    plain, noted = trained(kind, watched=False)
    result, seen = trained(kind, watched=True)
    assert all(map(torch.equal, plain, result))
    assert seen == noted


@inside_modes
@pytest.mark.parametrize("first_inside", [False, True])
def test_compiled_code_runs_as_such_and_is_compiled_once_where_writes_are_undone(*, first_inside: bool) -> None:
    torch.compiler.reset()
    compiled, runs = 0, 0

    def backend(graph: Any, examples: Any) -> Any:
        nonlocal compiled
        compiled += 1

        def run(*given: Any) -> Any:
            nonlocal runs
            runs += 1
            return graph(*given)

        return run

    model: Any = torch.compile(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), backend=backend)
    x, total = torch.ones(2, 3), torch.zeros(3)
    if not first_inside:
        model(x).sum().backward()
    with writes_undone():
        total += 1
        model(x).sum().backward()
    model(x).sum().backward()
    assert (compiled, runs) == (1, 2 if first_inside else 3)
    assert not total.any()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention_that_is_an_operator_of_its_own_runs_where_writes_are_undone() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    q = torch.randn(1, 1, 16, 16)
    expected = flex.flex_attention(q, q, q)
    with writes_undone():
        assert torch.equal(flex.flex_attention(q, q, q), expected)
