"""Laws of a scale against a shift: counted against a naive null space, and used everywhere laws are used."""

import json

import pytest
import torch
from torch import Tensor, nn

import conserved
from conserved import Monitor, audit, certify, recognize, transform
from conserved.symmetry import Symmetry


class Scaled(nn.Module):
    """exp(a) · xWᵀ, with one temperature or one for each row."""

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.w, self.a = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.a.exp() * (x @ self.w.T)


class Autoencoder(nn.Module):
    """The decoder of a VAE reads mean + deviation · noise; with `divergence` a loss reads both as well."""

    def __init__(self, divergence: bool = False) -> None:
        super().__init__()
        self.enc, self.mu, self.logvar, self.dec = (nn.Linear(*s) for s in ((4, 5), (5, 2), (5, 2), (2, 4)))
        self.divergence = divergence

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = torch.tanh(self.enc(x))
        mu, logvar = self.mu(h), self.logvar(h)
        noise = torch.linspace(-1, 1, mu.numel(), dtype=x.dtype).view_as(mu)
        decoded = self.dec(mu + (logvar / 2).exp() * noise)
        return (decoded, mu.square() + logvar.exp() - logvar) if self.divergence else (decoded,)


class Temperature(nn.Module):
    """Scores of one-dimensional queries and keys, under a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, n, bias=False) for n in (1, 1, 2))
        self.t = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.q(x) @ self.k(x).mT * self.t.exp(), -1) @ self.v(x)


class Decay(nn.Module):
    """exp(−Δ · exp(A_log) · x) with a free step size, as in a state-space model without softplus."""

    def __init__(self) -> None:
        super().__init__()
        self.A_log, self.step = nn.Parameter(torch.randn(4)), nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(-self.step * self.A_log.exp() * x)


class Logarithm(nn.Module):
    """exp(x + b + log |w|): a scale that becomes a shift."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.rand(4) + 0.5), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(x + self.b + self.w.abs().log())


class Neurons(nn.Module):
    """ReLU neurons under learned log scales: two laws for each neuron."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.g, self.down = nn.Linear(4, 3), nn.Parameter(torch.randn(3)), nn.Linear(3, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)) * self.g.exp())


class Softmax(nn.Module):
    """A softmax written by hand: the scale of its exponentials cancels."""

    def __init__(self) -> None:
        super().__init__()
        self.b, self.w = nn.Parameter(torch.randn(4)), nn.Linear(4, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        e = torch.exp(x + self.b)
        return self.w(e / e.sum(-1, keepdim=True))


class Differences(nn.Module):
    """Two temperatures of which one difference counts."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(4, 3, bias=False)
        self.a, self.b = nn.Parameter(torch.zeros(())), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.a - 2 * self.b).exp() * self.w(x)


class Added(nn.Module):
    """exp(a) + 1, which is not scaled by anything."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.a = nn.Linear(4, 3, bias=False), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.a.exp() + 1) * self.w(x)


class ReadTwice(nn.Module):
    """exp(a) · xWᵀ + a: the shift is seen elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.a = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.a.exp() * (x @ self.w.T) + self.a


class OtherFunctions(nn.Module):
    """softplus, expm1 and powers of two turn no shift into a rational scale."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 3, 4))
        self.a = nn.Parameter(torch.randn(3, 3, 1))

    def forward(self, x: Tensor) -> Tensor:
        gains = (nn.functional.softplus(self.a[0]), torch.expm1(self.a[1]), torch.sinh(self.a[2]))
        return torch.stack([(gain * w) @ x.mT for gain, w in zip(gains, self.w, strict=True)])


MODELS = {
    "one temperature": (Scaled(), 1),
    "a temperature for each row": (Scaled((3,)), 3),
    "log-variances": (Autoencoder(), 2),
    "log-variances under a divergence": (Autoencoder(divergence=True), 0),
    "temperature of scores": (Temperature(), 2),
    "decay": (Decay(), 4),
    "logarithm": (Logarithm(), 4),
    "neurons": (Neurons(), 6),
    "softmax by hand": (Softmax(), 1),
    "two temperatures": (Differences(), 2),
    "one added": (Added(), 0),
    "read twice": (ReadTwice(), 0),
    "other functions": (OtherFunctions(), 0),
}
CASES = pytest.mark.parametrize(("model", "count"), MODELS.values(), ids=MODELS)


def affine_null_space(model: nn.Module) -> int:
    """Return how many motions dθ = a·θ + b, entry by entry with constant a and b, leave all outputs as they are.

    A naive count: the outputs' derivatives along every single entry's scale and shift at many points, as one matrix.
    """
    generator = torch.Generator().manual_seed(0)
    blocks = []
    for _ in range(16):
        theta = {
            name: torch.rand(p.shape, generator=generator, dtype=torch.float64) + 0.3
            for name, p in model.named_parameters()
        }
        x = torch.randn(8, 4, generator=generator, dtype=torch.float64)

        def outputs(values: dict[str, Tensor], x: Tensor = x) -> Tensor:
            result = torch.func.functional_call(model, values, (x,))
            return torch.cat([part.flatten() for part in (result if isinstance(result, tuple) else (result,))])

        jacobian = torch.func.jacrev(outputs)(theta)
        columns = [jacobian[name].reshape(len(jacobian[name]), -1) for name in theta]
        scales = [column * theta[name].reshape(-1) for name, column in zip(theta, columns, strict=True)]
        blocks.append(torch.cat([*scales, *columns], 1))
    matrix = torch.cat(blocks)
    return matrix.shape[1] - int(torch.linalg.matrix_rank(matrix, rtol=1e-10))


@CASES
def test_as_many_laws_are_typed_as_a_naive_null_space_has(model: nn.Module, count: int) -> None:
    laws = recognize(model, torch.randn(8, 4))
    assert laws.independent() == affine_null_space(model.double()) == count
    model.float()
    assert all(laws.verdict(law.name).status == "verified" for law in laws)


@CASES
def test_a_law_moves_the_program_along_itself_exactly(model: nn.Module, count: int) -> None:
    model, x = model.double(), torch.randn(8, 4, dtype=torch.float64)
    theta = {name: p.detach() for name, p in model.named_parameters()}
    before = model(x)
    for law in recognize(model, x):
        after = torch.func.functional_call(model, law.act(theta, law.element(spread=0.7)), (x,))
        pairs = zip(before, after, strict=True) if isinstance(before, tuple) else [(before, after)]
        for own, moved in pairs:
            torch.testing.assert_close(own, moved)
        assert Symmetry.from_dict(json.loads(json.dumps(law.record()))) == law
    model.float()


def test_the_law_of_log_variances_is_the_one_of_the_issue() -> None:
    (law,) = recognize(Autoencoder(), torch.randn(8, 4))
    assert law.formula == "‖mu.weight[i,:]‖² + mu.bias[i]² − ‖dec.weight[:,i]‖² + 4·logvar.bias[i]"
    assert law.name == "log_scale"


def test_drift_is_exact_and_vanishes_to_first_order_under_gradient_flow() -> None:
    torch.manual_seed(1)
    model, x = Autoencoder().double(), torch.randn(8, 4, dtype=torch.float64)
    (law,) = recognize(model, x)
    theta = {name: p.detach() for name, p in model.named_parameters()}
    gradients = dict(zip(theta, torch.autograd.grad(model(x)[0].square().sum(), [*model.parameters()]), strict=True))
    assert float(law.identity(theta, gradients).abs().max()) < 1e-12
    by_step = []
    for rate in (1e-3, 5e-4):
        update = {name: rate * gradient for name, gradient in gradients.items()}
        after = {name: theta[name] - update[name] for name in theta}
        drift = law.drift(theta, update)
        torch.testing.assert_close(drift, law.law(after) - law.law(theta), rtol=1e-6, atol=1e-12)
        by_step.append(drift)
    torch.testing.assert_close(by_step[0], 4 * by_step[1])


def test_discover_lists_them_and_certify_proves_that_there_are_no_others() -> None:
    x = torch.randn(8, 4)
    result = conserved.discover(Scaled(), x)
    assert result.count == 1
    assert [law.formula for law in result.laws] == ["‖w‖² − 2·a"]
    assert certify(Scaled((3,)), x).verdict.status == "proved"


def test_an_audit_refutes_a_wrong_gradient_of_the_shift() -> None:
    torch.manual_seed(0)
    model, x = Scaled((3,)), torch.randn(8, 4)
    laws = recognize(model, x)
    model(x).square().sum().backward()
    assert audit(model, laws).ok
    assert model.a.grad is not None
    model.a.grad[1] *= -1
    assert [row.name for row in audit(model, laws).failures] == ["log_scale"]


def test_a_monitor_accounts_for_them_without_an_alarm() -> None:
    torch.manual_seed(0)
    model, x = Scaled((3,)), torch.randn(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = Monitor(model, optimizer, recognize(model, x), every=1)
    for _ in range(5):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        monitor.step()
    (entry,) = monitor.ledger(step=5, law="log_scale")
    assert not monitor.alarms
    assert entry.residual < 1e-6


def test_moving_along_one_leaves_the_function_and_the_fingerprint() -> None:
    torch.manual_seed(0)
    model, x = Autoencoder(), torch.randn(8, 4)
    laws = recognize(model, x)
    (before,), numbers = model(x), transform.fingerprint(model, x)
    transform.move(model, {"log_scale": laws["log_scale"].element(spread=0.7)}, laws=laws)
    torch.testing.assert_close(model(x)[0], before)
    assert numbers.difference(transform.fingerprint(model, x)) < 1e-4


def test_a_model_moved_along_one_is_brought_back() -> None:
    torch.manual_seed(0)
    model, moved, x = Scaled(), Scaled(), torch.randn(8, 4)
    laws = recognize(model, x)
    moved.load_state_dict(transform.move(dict(model.state_dict()), {"log_scale": torch.tensor(3.0)}, laws=laws).state)
    aligned = transform.align(model, moved, x)
    assert aligned.before > 0.5
    assert aligned.after < 1e-5 * aligned.before


def test_objectives_leave_them_alone() -> None:
    model, x = Autoencoder(), torch.randn(8, 4)
    (before,) = model(x)
    equalized = transform.equalize(model, x, objective="range")
    torch.testing.assert_close(model(x)[0], before)
    assert "log_scale" in equalized.skipped
    assert not transform.mappings(model, x)
