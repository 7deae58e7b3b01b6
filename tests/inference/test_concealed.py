"""Laws of programs that depend on the clock, files, counters, chance or values: none is said to be read off them."""

from __future__ import annotations

import cProfile
import importlib
import itertools
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import adversarial_concealed
from adversarial_concealed import Branching, Computing, Concealed, concealed
from adversarial_layers import Function
from conserved import Symmetry, certify, recognize
from conserved.discovery import UnsuitableError
from conserved.discovery.inputs import tensors_in
from conserved.inference.program.caught_errors import is_error_caught
from conserved.inference.program.hidden_inputs import HiddenInputs, tensors_held
from sampling import sampled

pytestmark = [pytest.mark.usefixtures("as_users_run_it"), pytest.mark.filterwarnings("ignore")]

NAMES = [name for name, _ in concealed()]
HIDDEN = [name for name in NAMES if name.startswith(("outside", "counted")) or name.endswith("decides")]


def case(name: str) -> Concealed:
    """Return a model as it is before its first call."""
    return dict(concealed())[name]


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _rate(law: Symmetry, theta: dict[str, Tensor], gradients: dict[str, Tensor]) -> float:
    """The largest relative rate of a law's values under gradient flow, by the derivative of these values."""
    leaves = {name: value.clone().requires_grad_() for name, value in theta.items()}
    values = law.law(leaves)
    grads = torch.autograd.grad(
        (values * torch.randn(values.shape).to(values)).sum(), [leaves[name] for name in law.parameters]
    )
    pairs = [(grad, gradients[name]) for name, grad in zip(law.parameters, grads, strict=True)]
    rate = abs(sum(float((grad * gradient).sum()) for grad, gradient in pairs))
    size = torch.stack([grad.norm() for grad, _ in pairs]).norm() * torch.stack([g.norm() for _, g in pairs]).norm()
    return rate / float(size) if size > 1e-9 else 0.0


def _gradients(model: nn.Module, inputs: Any) -> dict[str, Tensor] | None:
    outputs = [output for output in tensors_in(model(*map(_double, inputs))) if output.requires_grad]
    loss = sum((output * torch.randn(output.shape).to(output)).sin().sum() for output in outputs)
    if not isinstance(loss, Tensor):
        return None
    model.zero_grad()
    loss.backward()
    result = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return result if all(bool(g.isfinite().all()) for g in result.values()) else None


def largest_rate(given: Concealed) -> float:
    """The largest rate of any law that is listed as read off the program, over worlds, inputs and random parameters."""
    laws = recognize(given.model, *given.inputs).select(lambda law: law.source != "assumed" and law.exact)
    given.model.double()
    worst = 0.0
    for world, inputs in itertools.product([lambda _: nullcontext(), *given.worlds], [given.inputs, *given.others]):
        with torch.no_grad():
            for parameter in given.model.parameters():
                parameter.data.copy_(torch.randn_like(parameter))
        with world(given.model):
            try:
                gradients = _gradients(given.model, inputs)
            except RuntimeError:
                # An alias of a parameter stays behind in single precision.
                continue
        theta = {name: parameter.detach() for name, parameter in given.model.named_parameters()}
        if gradients is not None:
            worst = max(worst, *(_rate(law, theta, gradients) for law in laws), 0.0)
    return worst


@pytest.mark.parametrize("name", sampled(NAMES, 40))
def test_every_law_read_off_holds_in_every_world(name: str) -> None:
    torch.manual_seed(0)
    assert largest_rate(case(name)) < 1e-7


@pytest.mark.parametrize("name", sampled(HIDDEN, 20))
def test_nothing_is_verified_of_a_program_with_hidden_inputs(name: str) -> None:
    given = case(name)
    laws = recognize(given.model, *given.inputs)
    assert [law.name for law in laws if laws.verdict(law.name).holds] == []


@pytest.mark.parametrize("name", sampled(HIDDEN, 10, seed=1))
def test_nothing_is_proved_of_a_program_with_hidden_inputs(name: str) -> None:
    given = case(name)
    with pytest.raises(UnsuitableError):
        certify(given.model, given.inputs[0][:1])


class TestWhatIsSeen:
    """One program for each way of seeing it, with the words that say so."""

    def names(self, decide: Callable[[Any, Tensor], Any], **attributes: Any) -> str:
        model = Branching(decide, **attributes)
        laws = recognize(model, torch.randn(6, 4))
        return " ".join(laws.verdict(law.name).message for law in laws)

    def test_the_clock(self) -> None:
        assert "may depend on the clock, in <lambda>" in self.names(lambda m, x: time.time() < 0)

    def test_the_environment(self) -> None:
        assert "the environment" in self.names(lambda m, x: os.environ.get("OTHER") == "1")

    def test_an_iterator_that_a_call_moves_on(self) -> None:
        assert "n, which a call changes" in self.names(lambda m, x: next(m.n) > 99, n=itertools.count())

    def test_a_cache_that_is_filled_once_is_none(self) -> None:
        assert "may depend on" not in self.names(lambda m, x: m.n.setdefault("scale", 1.0) > 2, n={})

    def test_an_attribute_that_stays_what_it_is_is_none(self) -> None:
        assert "may depend on" not in self.names(lambda m, x: setattr(m, "length", len(x)))

    def test_a_time_that_another_asks_for_is_none(self) -> None:
        def imports(m: Any, x: Tensor) -> bool:
            import colorsys  # noqa: F401

            return False

        assert "may depend on" not in self.names(imports)


DRAWS: dict[str, Callable[[], Tensor]] = {
    "bernoulli": lambda: torch.bernoulli(torch.full((5,), 0.5)),
    "bernoulli in place": lambda: torch.zeros(5).bernoulli_(0.5),
    "poisson": lambda: torch.poisson(torch.ones(5)),
    "multinomial": lambda: torch.multinomial(torch.ones(5), 5).float(),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_drawn_numbers_are_no_constants(draw: Callable[[], Tensor]) -> None:
    model = Computing(lambda m, x: (x @ m.a).tanh() @ m.b + (m.c * draw()).sum())
    laws = recognize(model, torch.randn(6, 4))
    assert not any(law.parameters == ("c",) for law in laws if law.source != "assumed")


SIZES: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda t: t.shape[0],
    "len": len,
    "numel": lambda t: t.numel(),
    "unbind": lambda t: len(t.unbind()),
}


@pytest.mark.parametrize("read", SIZES.values(), ids=SIZES)
def test_a_size_that_values_decide_is_a_number_read(read: Callable[[Tensor], Any]) -> None:
    def forward(p: Any, x: Tensor) -> Tensor:
        return (x @ p.a).relu() @ p.b * (1 + (read(x[x > 90]) > 0))

    laws = recognize(Function(forward, a=torch.randn(4, 5), b=torch.randn(5, 2)), torch.randn(6, 4))
    assert {law.source for law in laws} == {"assumed"}


def test_a_size_of_its_own_is_not() -> None:
    def forward(p: Any, x: Tensor) -> Tensor:
        out = torch.zeros(len(x), 2).index_put((x[:, 0] > 0,), (x[x[:, 0] > 0] @ p.a).relu() @ p.b)
        return out.view(out.shape[0], 2)

    laws = recognize(Function(forward, a=torch.randn(4, 5), b=torch.randn(5, 2)), torch.randn(6, 4))
    assert {law.source for law in laws} == {"typed"}


def _in_except(action: Callable[[], Any]) -> bool:
    try:
        return bool(action())
    except ValueError:
        return False


def _in_finally(action: Callable[[], Any]) -> bool:
    try:
        return bool(action())
    finally:
        adversarial_concealed.NAMESPACE.other = 0


def _in_with(action: Callable[[], Any]) -> bool:
    with nullcontext():
        return bool(action())


@pytest.mark.parametrize(("call", "caught"), [(_in_except, True), (_in_finally, False), (_in_with, False)])
def test_whether_an_error_is_caught(call: Callable[[Any], bool], *, caught: bool) -> None:
    import sys

    assert call(lambda: is_error_caught(sys._getframe(), "test_whether_an_error_is_caught", ())) is caught


def test_tensors_in_lists_and_arrays_are_held() -> None:
    model: Any = Branching(None)
    model.kept = [model.a.detach(), {"array": model.b.detach().numpy()}]
    held = tensors_held(model)
    assert {"kept[0]", "kept[1]"} <= held.keys()
    with pytest.raises(UnsuitableError, match="shares memory"):
        certify(_aliased(), torch.randn(4))


def _aliased() -> nn.Module:
    model: Any = Computing(lambda m, x: m.usual(x) * m.kept[0].norm())
    model.kept = [model.a.detach()]
    result: nn.Module = model
    return result


def test_no_gradient_passes_through_an_alias() -> None:
    model = _aliased()
    laws = recognize(model, torch.randn(6, 4))
    assert laws.checked is not None
    assert laws.checked.refuted == {}


def test_a_sum_over_nothing_is_followed() -> None:
    def forward(p: Any, x: Tensor) -> Tensor:
        return (x @ p.a).relu() @ p.b + p.c[:0].sum() + p.c[:0].mean(0, keepdim=True).nan_to_num()

    laws = recognize(Function(forward, a=torch.randn(4, 5), b=torch.randn(5, 2), c=torch.randn(3)), torch.randn(6, 4))
    assert "neurons" in {law.name for law in laws}


def test_a_watch_puts_the_former_profiler_back() -> None:
    import sys

    former = sys.getprofile()
    with HiddenInputs(lambda: None) as hidden:
        time.time()
    assert sys.getprofile() is former
    assert hidden.names


def test_a_profiler_of_the_user_goes_on_after_laws_are_read() -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    laws = recognize(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(2, 3))
    _double(1.0)
    profiler.disable()
    names = [str(getattr(entry.code, "co_name", "")) for entry in profiler.getstats()]
    assert len(laws) == 1
    assert "_double" in names


def test_what_a_module_does_when_it_is_first_imported_is_not_the_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch imports packages of thousands of objects once it needs them; their bodies may ask for anything."""
    body = "import time\nSTART = time.time()\n\n\ndef seconds():\n    return time.time() - START\n"
    (tmp_path / "imported_late.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    with HiddenInputs(lambda: None) as imported:
        module = importlib.import_module("imported_late")
    assert imported.names == []
    with HiddenInputs(lambda: None) as called:
        module.seconds()
    assert called.names
