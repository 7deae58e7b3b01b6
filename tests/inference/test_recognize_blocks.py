"""Every symmetry that is recognised in the blocks holds, and there are as many as the theory says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from conserved import LawSet
from conserved.inference.program.capture import capture
from conserved.moment import Direction
from conserved_papers.lab.fits import exponent
from flow import follow
from reference.descent import descend
from sampling import sampled
from tolerances import EXACT_STEP, FLOW, FUNCTION_UNCHANGED, IDENTITY, ORDER
from zoo import CASES, LAWFUL, Case, ids, named


def scales(laws: LawSet, parameters: dict[str, Tensor] | None = None) -> dict[str, float]:
    """The size of each law's terms."""
    return {name: float(torch.linalg.vector_norm(value)) for name, value in laws.reference(parameters).scales.items()}


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_the_conserved_numbers_are_those_of_the_theory(case: Case) -> None:
    assert case.laws(case.model()).independent() == case.conserved - case.missed


@pytest.mark.parametrize("case", LAWFUL, ids=ids)
def test_the_function_is_unchanged_by_a_random_group_element(case: Case) -> None:
    model = case.model()
    theta = {name: parameter.detach() for name, parameter in model.named_parameters()}
    generator = torch.Generator().manual_seed(5)
    x = case.sample(generator)
    before = functional_call(model, theta, (x,))
    if case.loss == "cross_entropy":
        before = before.log_softmax(-1)
    for symmetry in case.known_laws(model):
        # A router of one active expert may move freely only while the same expert stays on top.
        spread = 1e-3 if symmetry.family == "frozen" else 0.3
        g = symmetry.element(spread=spread, generator=generator)
        moved = symmetry.act(theta, g)
        assert any(not torch.allclose(moved[name], theta[name], rtol=1e-6) for name in symmetry.parameters)
        after = functional_call(model, moved, (x,))
        if case.loss == "cross_entropy":
            after = after.log_softmax(-1)
        assert (after - before).norm() <= FUNCTION_UNCHANGED * before.norm(), symmetry


@pytest.mark.parametrize("case", LAWFUL, ids=ids)
def test_the_gradient_identities_hold_for_a_random_loss(case: Case) -> None:
    model = case.model()
    case.objective()(model).backward()
    result = case.known_laws(model).residuals(gradients(model))
    assert {name: r for name, r in result.items() if not r <= IDENTITY[torch.float64]} == {}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", LAWFUL, ids=ids)
def test_the_gradient_identities_hold_in_lower_precision(case: Case, dtype: torch.dtype) -> None:
    model = case.model(dtype=dtype, epsilon=1e-12)
    case.objective(dtype=dtype)(model).backward()
    residuals = {
        name: r for name, r in case.known_laws(model).residuals(gradients(model)).items() if not r <= IDENTITY[dtype]
    }
    assert residuals == {}


@pytest.mark.slow
@pytest.mark.parametrize("case", sampled(LAWFUL, 13), ids=ids)
def test_laws_are_constant_along_the_gradient_flow(case: Case) -> None:
    model = case.model()
    laws = case.known_laws(model)
    objective = case.objective()

    def loss(theta: dict[str, Tensor]) -> Tensor:
        return objective(lambda x: functional_call(model, theta, (x,)))  # type: ignore[arg-type]

    after = follow(loss, dict(model.named_parameters()), time=0.1)
    before = {name: parameter.detach() for name, parameter in model.named_parameters()}
    moved = sum(float((after[n] - before[n]).square().sum()) for n in before) ** 0.5
    assert moved > 1e-2
    start, end, size = laws.values(), laws.values(after), scales(laws)
    for name in start:
        assert float((end[name] - start[name]).norm()) <= FLOW * size[name], name


def watched(case: Case) -> Callable[[nn.Module], LawSet]:
    def both(model: nn.Module) -> LawSet:
        laws = case.known_laws(model)
        return LawSet(symmetries=(*laws, *laws.baselines()), parameters=laws.parameters)

    return both


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        named(name)
        for name in ("attention", "attention, rotary", "SwiGLU", "ReLU attention", "pre-norm block", "decoder, tied")
    ],
    ids=ids,
)
def test_quadratic_laws_drift_to_first_order_and_linear_ones_not_at_all(case: Case) -> None:
    """The order test: at fixed flow time the drift of a law is ∝ τ, of an impostor ∝ τ⁰."""
    model = case.model()
    sizes = [8e-3, 4e-3, 2e-3]
    runs = [descend(model, case.objective(), watched(case), step=size, time=0.4) for size in sizes]
    linear = {symmetry.family for symmetry in case.known_laws(model) if symmetry.kind.linear}
    for family, drift in runs[-1].drift.items():
        order = exponent(sizes, [run.drift[family] for run in runs])
        if family in linear:
            assert drift < 1e-14, family
        elif family.startswith("not_"):
            assert order == pytest.approx(0, abs=ORDER), family
            assert drift > 1e-3, family
        else:
            assert order == pytest.approx(1, abs=ORDER), family
            assert drift > 1e-12, family


@pytest.mark.slow
def test_the_order_test_tells_the_softmax_gate_from_the_sigmoid_gate() -> None:
    """Σ W_i of the paper's Theorem 4.7: rounding under softmax, the same drift at every step under sigmoid."""
    softmax, sigmoid = named("softmax mixture"), named("sigmoid mixture")
    router = softmax.laws(softmax.model())["router.shift[weight]"]

    def sum_of_rows(model: nn.Module) -> LawSet:
        return LawSet(symmetries=(router,), parameters=dict(model.named_parameters()))

    drifts = {
        case.name: [
            descend(case.model(), case.objective(), sum_of_rows, step=s, time=1.0).drift["shift"] for s in (0.02, 0.01)
        ]
        for case in (softmax, sigmoid)
    }
    assert max(drifts["softmax mixture"]) < 1e-14
    coarse, fine = drifts["sigmoid mixture"]
    assert fine > 1e-3
    assert fine == pytest.approx(coarse, rel=0.05)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", LAWFUL, ids=ids)
def test_the_step_formula_is_exact_for_real_optimizers(case: Case, optimizer: str) -> None:
    model = case.model()
    laws = case.known_laws(model)
    stepper = OPTIMIZERS[optimizer](list(model.parameters()))
    objective = case.objective()
    for _ in range(3):
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        start, size = laws.values(), scales(laws, before)
        stepper.zero_grad()
        objective(model).backward()
        stepper.step()
        updates = {name: before[name] - parameter.detach() for name, parameter in model.named_parameters()}
        accounted, end, later = laws.drift(updates, before), laws.values(), scales(laws)
        for name in start:
            gap = float((end[name] - start[name] - accounted[name]).norm())
            assert gap <= EXACT_STEP * (size[name] + later[name]), name


def test_plain_gradient_descent_drifts_by_the_second_order_term_alone() -> None:
    """Δh = τ² μ(G, G): the identity kills the first-order term."""
    case = named("pre-norm block")
    model = case.model()
    laws = case.known_laws(model)
    case.objective()(model).backward()
    grad = {name: -0.05 * g for name, g in gradients(model).items()}
    drift = laws.drift({name: -s for name, s in grad.items()})
    for symmetry in laws:
        second = symmetry.kind.conserved(symmetry.moment_map(Direction(grad), Direction(grad)))
        assert torch.allclose(drift[symmetry.name], second, atol=1e-14)


@pytest.mark.parametrize("epsilon", [1e-4, 1e-6, 1e-8])
def test_laws_up_to_epsilon_are_violated_by_exactly_what_they_say(epsilon: float) -> None:
    """⟨Q, G⟩ = Σ_t ε/(s_t + ε) ⟨y_t, ∂L/∂y_t⟩, with y the norm's output and s the mean square of its input."""
    case = named("attention, rotary, query/key norm")
    model = case.model(epsilon=epsilon)
    nearly = case.known_laws(model).select(lambda symmetry: not symmetry.exact)
    seen: list[tuple[str, Tensor, Tensor]] = []

    def remember(name: str) -> Callable[[nn.Module, tuple[Tensor], Tensor], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
            output.retain_grad()
            seen.append((name, inputs[0].detach(), output))

        return hook

    for name in ("query", "key"):
        model.get_submodule(f"{name[0]}_norm").register_forward_hook(remember(name))
    case.objective()(model).backward()
    values = nearly.identities(gradients(model))
    assert {symmetry.epsilon for symmetry in nearly} == {epsilon}
    assert set(values) == {f"{name}_scale[{head}]" for name in ("query", "key") for head in (0, 1)}
    for name in ("query", "key"):
        predicted = torch.zeros(2, dtype=torch.float64)
        for which, inputs, output in seen:
            if which == name:
                assert output.grad is not None
                fraction = epsilon / (inputs.square().mean(-1) + epsilon)
                predicted += (fraction * (output.detach() * output.grad).sum(-1)).sum(-1)
        for head in (0, 1):
            assert float(values[f"{name}_scale[{head}]"]) == pytest.approx(float(predicted[head]), rel=1e-6, abs=1e-16)


def test_exact_laws_are_counted_apart_from_approximate_ones() -> None:
    case = named("attention, rotary, query/key norm")
    laws = case.laws(case.model(epsilon=1e-6))
    assert (laws.independent(), laws.independent(exact=True)) == (11, 7)


def test_hand_written_laws_of_attention() -> None:
    """QᵀQ − KᵀK and VᵀV − OᵀO with the paper's matrices, sliced by hand."""
    case = named("attention, biases")
    model = case.model()
    values = case.known_laws(model).values()
    p = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for head, rows in enumerate((slice(0, 2), slice(2, 4))):
        q, k, v = (torch.cat((p[f"{n}.weight"][rows], p[f"{n}.bias"][rows, None]), 1) for n in "qkv")
        o = p["o.weight"][:, rows]
        assert torch.allclose(values[f"query_key[{head}]"], q @ q.T - k @ k.T)
        assert torch.allclose(values[f"value_output[{head}]"], v @ v.T - o.T @ o)
    assert torch.equal(values["k.inert_bias"], p["k.bias"])


def test_hand_written_laws_of_grouped_rotary_attention() -> None:
    case = named("attention, grouped, rotary")
    model = case.model()
    p = {name: parameter.detach() for name, parameter in model.named_parameters()}
    length = p["q.weight"].square().sum() - p["k.weight"].square().sum()
    assert torch.allclose(case.known_laws(model).values()["query_key[0]"], length[None])


def test_hand_written_laws_of_the_other_blocks() -> None:
    def squares(tensor: Tensor, dim: int) -> Tensor:
        return tensor.detach().square().sum(dim)

    relu = named("ReLU FFN, biases").model()
    p = dict(relu.named_parameters())
    expected = squares(p["up.weight"], 1) + p["up.bias"].detach() ** 2 - squares(p["down.weight"], 0)
    assert torch.allclose(named("ReLU FFN, biases").laws(relu).values()["neurons"], expected)
    swiglu = named("SwiGLU").model()
    p = dict(swiglu.named_parameters())
    expected = squares(p["down.weight"], 0) - squares(p["up.weight"], 1)
    assert torch.allclose(named("SwiGLU").laws(swiglu).values()["gated_neurons"], expected)
    mixture = named("softmax mixture").model()
    assert torch.allclose(
        named("softmax mixture").laws(mixture).values()["router.shift[weight]"],
        dict(mixture.named_parameters())["router.weight"].detach().sum(0),
    )
    blog = named("ReLU attention").model()
    p = dict(blog.named_parameters())
    expected = p["qk"].detach().square().sum() - p["v"].detach().square().sum()
    (value,) = named("ReLU attention").laws(blog).values().values()
    assert torch.allclose(value.abs(), expected.abs())


def test_blocks_are_found_inside_any_container() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.ModuleDict({"mixer": named("attention").model(), "mlp": named("SwiGLU").model()})

        def forward(self, x: Tensor) -> Tensor:
            return self.inside["mlp"](self.inside["mixer"](x)[..., :3].tanh())

    laws = named("attention").laws(Wrapper())
    # The last row of the output map is cut off: its four entries stay as they are.
    assert laws.independent() == 12 + 4 + 4
    assert {symmetry.block for symmetry in laws} == {"inside.mixer", "inside.mixer.o", "inside.mlp"}


def test_constants_of_a_program_are_brought_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotations are decided on the host; angles left on a GPU would hide every rotary plane's rotation."""
    brought = []

    def cpu(tensor: Tensor) -> Tensor:
        brought.append(tensor.clone())
        return brought[-1]

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    model = nn.Linear(4, 4, bias=False)
    angles = torch.linspace(0, 1, 12).reshape(3, 4)
    model.register_buffer("angles", angles)
    program = capture(lambda: model(torch.ones(3, 4)) * angles.cos(), dict(model.named_parameters()), model)
    constants = [value.constant for value in program.values if value.constant is not None]
    assert len(constants) >= 2, "angles and their cosines"
    assert all(any(constant is one for one in brought) for constant in constants)
