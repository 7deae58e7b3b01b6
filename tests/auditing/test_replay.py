"""A pass that is run again: it gives the same gradients, changes nothing, and tells rounding from defects."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved import Monitor, audit, blocks, gauge, recognize
from conserved.auditing.diagnosis import Origin
from conserved.auditing.kernel_precision import explained_by_rounding
from conserved.auditing.reference_form import PLAIN, wide_forms
from conserved.auditing.replay import ClosureReplay, RecordedPass, ReplayError
from conserved.verdict import Status
from told import told


class Net(nn.Module):
    """Dropout, a batch norm, an attribute that counts calls, and two outputs of which one depends on the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.calls, self.history = 0, ["new"]

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        self.history.append("called")
        logits = self.second(F.dropout(self.norm(self.first(x)).relu(), 0.5, self.training))
        return {"loss": F.cross_entropy(logits, target), "logits": logits}


def recorded(model: nn.Module, run: Callable[[], Tensor]) -> RecordedPass:
    recorder = RecordedPass(model)
    recorder.record()
    run().backward()
    recorder.stop()
    return recorder


@pytest.mark.parametrize("both", [False, True])
def test_a_recorded_pass_gives_the_same_gradients_again_and_changes_nothing(both: bool) -> None:
    torch.manual_seed(0)
    model, x, target = Net(), torch.randn(16, 6), torch.randint(3, (16,))

    def run() -> Tensor:
        out = model(x, target)
        # A loss that also reads the logits: their gradient comes from outside and through the model's own loss.
        return out["loss"] + out["logits"].square().mean() if both else out["loss"]

    replay = recorded(model, run)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    own = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    generator, calls, history = torch.get_rng_state(), model.calls, list(model.history)
    again = replay.gradients(dict(model.named_parameters()))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(again[name], own[name], rtol=1e-5, atol=1e-7)
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, own[name])
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert (model.calls, model.history) == (calls, history)


def test_a_scaled_replay_is_divided_by_its_scale() -> None:
    model, x = nn.Linear(4, 4).double(), torch.randn(3, 4, dtype=torch.float64)
    replay = ClosureReplay(model, lambda: model(x).square().sum())
    names = dict(model.named_parameters())
    for name, gradient in replay.gradients(names, scale=1.37).items():
        torch.testing.assert_close(gradient, replay.gradients(names)[name], rtol=1e-12, atol=0)


def test_a_pass_whose_arguments_were_changed_in_place_is_not_replayed() -> None:
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    replay = recorded(model, lambda: model(x).square().sum())
    assert replay.obstacle == ""
    x.add_(1)
    assert "changed in place" in replay.obstacle
    with pytest.raises(ReplayError, match="changed in place"):
        replay.gradients(dict(model.named_parameters()))


def test_a_closure_that_calls_backward_itself_is_refused_in_words() -> None:
    model, x = nn.Linear(4, 4), torch.randn(3, 4)

    def closure() -> Tensor:
        loss = model(x).square().sum()
        loss.backward()
        return loss.detach()

    with pytest.raises(ReplayError, match="do not call backward"):
        ClosureReplay(model, closure).gradients(dict(model.named_parameters()))


def test_the_wide_form_computes_half_precision_passes_in_single_precision() -> None:
    torch.manual_seed(0)
    model = blocks.DecoderLM(64, 32, 2, 4, 48, max_length=16).bfloat16()
    tokens = torch.randint(64, (2, 16))

    def closure() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    replay, names = ClosureReplay(model, closure), dict(model.named_parameters())
    wide = replay.gradients(names, form=wide_forms(torch.bfloat16)[0])
    twin = blocks.DecoderLM(64, 32, 2, 4, 48, max_length=16)
    twin.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    F.cross_entropy(twin(tokens).flatten(0, 1), tokens.flatten()).backward()
    for name, parameter in twin.named_parameters():
        assert parameter.grad is not None
        # The gradient of a parameter in bfloat16 is rounded once, at the end.
        error = (wide[name].float() - parameter.grad).norm() / parameter.grad.norm()
        assert error < 3e-3, name


class _Halved(torch.autograd.Function):
    """Multiplies; the gradient of its second factor is halved."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        a, b = ctx.saved_tensors
        return grads[0] * b, 0.5 * grads[0] * a


class Gated(nn.Module):
    """A gated network whose product is done by a function of one's choice."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(24, 24, bias=False) for _ in range(3))
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.product(F.silu(self.gate(x)), self.up(x)))


def diagnosed(model: nn.Module, closure: Callable[[], Tensor], x: Tensor) -> Any:
    laws = recognize(Gated(torch.mul), x)
    closure().backward()
    result = audit(model, laws, closure=closure)
    assert result.verdict == Status.REFUTED
    (diagnosis,) = result.diagnoses.values()
    return diagnosis


def test_a_wrong_backward_of_an_autograd_function_is_named() -> None:
    torch.manual_seed(0)
    x, model = torch.randn(32, 24), Gated(_Halved.apply)
    result = diagnosed(model, lambda: model(x).sin().sum(), x)
    assert result.origin is Origin.KERNEL
    assert "autograd function" in result.message


class _Passed(torch.autograd.Function):
    """Passes a branch on, as regions of tensor parallelism do; the gradient is added up once too often."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 2 * grads[0]


def test_a_backward_of_its_own_behind_an_unchanged_input_is_neither_refuted_nor_ok() -> None:
    torch.manual_seed(0)
    x, model = torch.randn(32, 24), Gated(lambda gate, up: gate * _Passed.apply(up))

    def closure() -> Tensor:
        return model(x).sin().sum()

    laws = recognize(Gated(torch.mul), x)
    closure().backward()
    result = audit(model, laws, closure=closure)
    assert result.verdict == Status.INCONCLUSIVE
    assert not result.ok
    assert "_Passed" in result.reason
    assert "Not ok" in result.summary()


class _HalvedWeight(torch.autograd.Function):
    """A linear map whose weight gets half its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, 0.5 * grads[0].T @ x


@pytest.mark.parametrize("part", ["up", "down"])
def test_a_wrong_backward_is_refuted_where_the_program_holds_a_weight_in_a_closure(part: str) -> None:
    """Weights put in place of the module's are not seen then, so that moving them along a law proves nothing."""
    torch.manual_seed(0)
    x, model = torch.randn(32, 24), Gated(torch.mul)
    layer: Any = getattr(model, part)
    weight = layer.weight
    layer.forward = lambda y: _HalvedWeight.apply(y, weight)

    def closure() -> Tensor:
        return model(x).sin().sum()

    laws = recognize(model, x)
    closure().backward()
    for again in (None, closure):
        assert audit(model, laws, closure=again).verdict == Status.REFUTED


def test_wrong_compiled_code_is_named() -> None:
    def wrong_backend(graph: Any, inputs: Any) -> Any:
        return lambda *args: tuple((0.5 * out + 0.5 * out.detach()) for out in graph(*args))

    torch.manual_seed(0)
    x = torch.randn(32, 24)
    model = Gated(torch.mul)
    model.up = torch.compile(model.up, backend=wrong_backend)  # type: ignore[assignment]
    laws = recognize(Gated(torch.mul), x)
    run: Callable[[], Tensor] = lambda: model(x).sin().sum()  # noqa: E731
    run().backward()
    plain = Gated(torch.mul)
    plain.up = model.up._orig_mod  # type: ignore[assignment]
    plain.gate, plain.down = model.gate, model.down
    result = audit(plain, laws, replay=ClosureReplay(plain, run))
    torch._dynamo.reset()
    (diagnosis,) = result.diagnoses.values()
    assert diagnosis.origin is Origin.KERNEL
    assert "compiled code" in diagnosis.message


def test_a_gradient_hook_is_reproducible_in_reference_form_too() -> None:
    torch.manual_seed(0)
    x, model = torch.randn(32, 24), Gated(torch.mul)
    model.up.weight.register_hook(lambda gradient: 0.5 * gradient)
    assert diagnosed(model, lambda: model(x).sin().sum(), x).origin is Origin.PROGRAM


def test_a_gradient_that_was_written_to_is_not_reproducible() -> None:
    torch.manual_seed(0)
    x, model = torch.randn(32, 24), Gated(torch.mul)
    laws = recognize(model, x)

    def closure() -> Tensor:
        return model(x).sin().sum()

    closure().backward()
    assert model.up.weight.grad is not None
    model.up.weight.grad[3, 5] = 7.0
    result = audit(model, laws, closure=closure)
    assert [one.origin for one in result.diagnoses.values()] == [Origin.TRANSIENT]
    assert "run again satisfies" in result.failures[0].suggests[0]


def saturated(factor: float) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A decoder in bfloat16 whose softmax is saturated, so that rounding is large against gradients of dQ and dK."""
    torch.manual_seed(0)
    model = blocks.DecoderLM(256, 64, 3, 4, 96, max_length=64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q.weight", "k.weight")):
                parameter.mul_(factor)
    model.bfloat16()
    tokens = torch.randint(256, (2, 64))
    return model, lambda: F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.roll(-1, 1).flatten())


@pytest.mark.parametrize("factor", [1.0, 8.0, 40.0])
def test_rounding_of_a_saturated_softmax_is_measured_and_not_refuted(factor: float) -> None:
    model, closure = saturated(factor)
    closure().backward()
    for again in (None, closure):
        result = audit(model, loss="cross_entropy", closure=again)
        assert not result.failures, result.summary()
    assert result.conclusive


@pytest.mark.parametrize("factor", [1.0, 8.0, 40.0])
@pytest.mark.parametrize("wrong", [-1.0, 0.0, 1.02, 1.05])
def test_a_wrong_factor_is_refuted_in_half_precision_with_and_without_a_replay(factor: float, wrong: float) -> None:
    model, closure = saturated(factor)
    closure().backward()
    model.layers[1].attention.v.weight.grad[:16] *= wrong  # type: ignore[index, union-attr]
    for again in (None, closure):
        result = audit(model, loss="cross_entropy", closure=again)
        assert "layers.1.attention.value_output[0]" in {row.name for row in result.failures}, result.summary()


def test_half_as_much_again_as_the_stated_sensitivity_is_refuted_and_a_third_is_not() -> None:
    model, closure = saturated(1.0)
    laws = recognize(model, loss="cross_entropy")
    closure().backward()
    clean = audit(model, laws)
    assert clean.sensitivity is not None
    tried = 0
    for symmetry in laws:
        if len(symmetry.legs) < 2 or symmetry.identities < 16 or not symmetry.exact:
            continue
        view = symmetry.legs[-1].view
        size = clean.sensitivity.legs[symmetry.name, view.parameter]
        gradient = model.get_parameter(view.parameter).grad
        assert gradient is not None
        saved = gradient.clone()
        for times, refuted in ((1.5, True), (0.3, False)):
            # In float32: a factor near one is lost if the gradient is rounded to bfloat16 after it.
            model.get_parameter(view.parameter).data = model.get_parameter(view.parameter).data.float()
            wrong = saved.float()
            view.matrix(wrong).mul_(1 + times * size)
            model.get_parameter(view.parameter).grad = wrong
            names = {row.name for row in audit(model, laws, precision=torch.bfloat16).failures}
            assert (symmetry.name in names) is refuted, (symmetry.name, times)
        model.get_parameter(view.parameter).data = model.get_parameter(view.parameter).data.bfloat16()
        model.get_parameter(view.parameter).grad = saved
        tried += 1
        if tried == 8:
            break
    assert tried == 8


@pytest.mark.parametrize("confidence", [12, 16, 20, 24])
def test_class_sums_of_an_overfitted_head_are_called_precision_and_not_wrong(confidence: float) -> None:
    """Where p ≈ 1 is rounded, dlogits do not sum to zero in float32; in float64 they do."""
    torch.manual_seed(0)
    model, x, target = nn.Linear(20, 512, bias=False), torch.randn(6, 20), torch.arange(6)
    with torch.no_grad():
        model.weight.zero_()
        model.weight[:6] = confidence * torch.linalg.pinv(x).T

    def closure() -> Tensor:
        return F.cross_entropy(model(x), target)

    laws = recognize(model, x, loss="cross_entropy")
    closure().backward()
    assert audit(model, laws).verdict == Status.INCONCLUSIVE
    result = audit(model, laws, closure=closure)
    assert [one.origin for one in result.diagnoses.values()] == [Origin.PRECISION]
    assert result.verdict == Status.INCONCLUSIVE


def test_predicting_the_rounding_of_attention_keeps_no_graph() -> None:
    """Graphs that only the garbage collector frees fill a device, because it does not know how large they are."""
    torch.manual_seed(0)
    model, x = Biased(30.0).bfloat16(), torch.randn(2, 16, 64).bfloat16()
    # Lists that hooks fill are put back after a replay; a deque is not.
    saved: deque[weakref.ref[Any]] = deque()

    def mark(module: nn.Module, args: Any, output: Tensor) -> None:
        node: Any = output.grad_fn
        mine = nn.Identity()
        node.metadata["mine"] = mine
        saved.append(weakref.ref(mine))

    model.qkv.register_forward_hook(mark)
    gc.collect()
    gc.disable()
    try:
        explained_by_rounding([], ClosureReplay(model, lambda: model(x).float().sum()), dict(model.named_parameters()))
        assert saved
        assert all(reference() is None for reference in saved)
    finally:
        gc.enable()


class Biased(nn.Module):
    """Attention whose keys and values have large common parts: half precision rounds what softmax does not see."""

    def __init__(self, common: float) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(64, 192), nn.Linear(64, 64)
        with torch.no_grad():
            self.qkv.bias[64:] = common * torch.randn(128)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def test_rounding_of_a_fused_attention_kernel_is_told_from_a_wrong_backward() -> None:
    torch.manual_seed(0)
    model, x = Biased(30.0).bfloat16(), torch.randn(2, 64, 64).bfloat16()

    def closure() -> Tensor:
        return model(x).float().sin().sum()

    laws = recognize(model, x)
    with gauge(model, laws) as watched:
        closure().backward()
    assert not watched.ok
    assert audit(model, laws, gauge=copy.copy(watched)).verdict != Status.REFUTED, (
        "predictions of the pass tell them apart"
    )
    result = audit(model, laws, gauge=watched, closure=closure)
    assert result.verdict != Status.REFUTED
    assert watched.rounded
    assert watched.ok


def test_a_factor_on_a_sum_that_is_zero_is_not_stated_as_visible() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(20, 10), torch.randn(64, 20)
    laws = recognize(model, x, loss="cross_entropy")

    def closure() -> Tensor:
        return F.cross_entropy(model(x), torch.arange(64) % 10)

    closure().backward()
    assert model.weight.grad is not None
    model.weight.grad *= -1
    result = audit(model, laws, closure=closure)
    assert not result.failures
    seen = result.sensitivity
    assert seen is not None
    assert seen.typical == float("inf")
    assert seen.sums["class_shift"] < 0.01
    assert "no factor on a leg" in str(seen)


def test_a_class_shift_counts_as_the_directions_it_constrains_and_is_not_ok_alone() -> None:
    """Its identity holds for a gradient of other samples too: it must not certify the classifier."""
    torch.manual_seed(0)
    model, x, other = nn.Linear(20, 10), torch.randn(64, 20), torch.randn(64, 20)
    laws = recognize(model, x, loss="cross_entropy")
    F.cross_entropy(model(other), torch.randint(10, (64,))).backward()
    result = audit(model, laws)
    assert result.coverage.parameters == pytest.approx(0.1)
    assert result.coverage.touched == 1
    assert not result.ok
    assert "Not ok: 10 % of the trained entries were tested" in result.summary()
    assert result.reason in repr(result)


def test_reference_form_is_undone() -> None:
    below = torch.autograd.Function.__mro__[1]
    with PLAIN.applied():
        assert "apply" in vars(below)
    assert "apply" not in vars(below)


class Concatenated(nn.Module):
    """A gain whose scale two batch norms forget up to ε, so that its gradient is rounding and what ε leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.norm1, self.conv1 = nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3, padding=1)
        self.norm2, self.head = nn.BatchNorm2d(12), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.norm(self.conv(x)).relu(), 2)
        y = self.conv1(self.norm1(x).relu())
        return self.head(self.norm2(torch.cat([x, y], 1)).relu().mean((2, 3)))


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_rounding_of_a_law_up_to_epsilon_is_told_from_a_wrong_gradient(factor: float) -> None:
    torch.manual_seed(0)
    model = Concatenated()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if factor != 1.0:
        model.norm.weight.register_hook(lambda gradient: factor * gradient)
    monitor = Monitor(model, optimizer, audit=1)
    # Laws become known within the first pass, which counts twice then: its sums stay open.
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.arange(4))
        loss.backward()
        optimizer.step()
        monitor.step(loss=loss)
    assert any("norm.gain" in alarm.message for alarm in told(monitor)) is (factor != 1.0)
