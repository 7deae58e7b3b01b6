"""A new kind of group in one file: quaternions, which act on four rows at a time.

Positions of three coordinates can be written into queries and keys by multiplying from the right with unit quaternions,
as rotary positions multiply with phases. What commutes with that is multiplying from the left: Q ← c·Q, K ← c/|c|²·K
leaves every score ⟨q·p, k·p'⟩ alone. A kind says how elements act and which rows the pairing ⟨ξ·A, B⟩ is made of; laws,
identities, drift, audits and the ledger of a run follow. Its optional methods invert, multiply and choose elements;
`moving_along_my_kind.py` uses them to move weights.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from conserved import Kind, LawSet, Leg, Monitor, Symmetry, View
from conserved.symmetry import RowProducts, Term

REAL = tuple(Term(row, row) for row in range(4))
ONE = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)
IMAGINARY = tuple(
    Term(first, second, number, sign)
    for number, ((a, b), (c, d)) in enumerate([((0, 1), (2, 3)), ((0, 2), (3, 1)), ((0, 3), (1, 2))], start=1)
    for first, second, sign in ((a, b, 1), (b, a, -1), (c, d, 1), (d, c, -1))
)
"""⟨i·A, B⟩, ⟨j·A, B⟩ and ⟨k·A, B⟩: antisymmetric, so that they are identities and no laws."""


def times(a: Tensor, b: Tensor) -> Tensor:
    """The product of quaternions whose parts lie along the second axis from the end."""
    (w, x, y, z), (s, t, u, v) = a.unbind(-2), b.unbind(-2)
    parts = w * s - x * t - y * u - z * v, w * t + x * s + y * v - z * u, w * u - x * v + y * s + z * t
    return torch.stack((*parts, w * v + x * u - y * t + z * s), -2)


def conjugate(q: Tensor) -> Tensor:
    """The quaternions with their imaginary parts negated."""
    return q * (2 * ONE - 1)


class QuaternionScaling(Kind):
    """(H*)^{n/4}: rows 4j … 4j + 3 of a leg are one quaternion row, multiplied from the left."""

    code = "quaternion_scaling"
    title = "quaternion scaling"
    products = RowProducts((*REAL, *IMAGINARY), unit=4)

    def act(self, g: Tensor, a: Tensor, degree: float) -> Tensor:
        """c·A, or c/|c|²·A for a leg of degree −1."""
        c = g if degree > 0 else g / g.square().sum(-1, keepdim=True)
        return times(c.unsqueeze(-1), a.unflatten(0, (-1, 4))).flatten(0, 1)

    def element(self, n: int, m: int, *, spread: float, generator: torch.Generator | None) -> Tensor:
        """A random quaternion near 1 for every four rows."""
        noise = spread * torch.randn(n // 4, 4, generator=generator, dtype=torch.float64)
        return noise + ONE

    def group(self, n: int, m: int) -> str:
        """The group's name."""
        return f"(H*)^{n // 4}"

    def inverse(self, g: Tensor) -> Tensor:
        """1/c, which is the conjugate over the squared length."""
        return conjugate(g) / g.square().sum(-1, keepdim=True)

    def compose(self, later: Tensor, earlier: Tensor) -> Tensor:
        """The product of quaternions."""
        return times(later[..., None], earlier[..., None])[..., 0]

    def scaling_element(self, factors: Tensor) -> Tensor:
        """Real quaternions."""
        return factors[:, None] * ONE

    def canonical_element(self, legs: Sequence[Tensor], degrees: Sequence[float]) -> Tensor:
        """Unit quaternions that make the sums of c|c|² over the columns of the first leg real and positive."""
        rows = legs[0].unflatten(0, (-1, 4))
        return torch.nn.functional.normalize(conjugate((rows * rows.square().sum(1, keepdim=True)).sum(-1)), dim=1)


torch.manual_seed(0)
model = torch.nn.ParameterDict({name: torch.randn(8, 5, dtype=torch.float64) for name in ("q", "k")})
x = torch.randn(5, 7, dtype=torch.float64)
places = torch.nn.functional.normalize(torch.randn(2, 4, 7, dtype=torch.float64), dim=1)


def scores() -> Tensor:
    """⟨q_i·p_i, k_j·p_j⟩ for every two of seven tokens."""
    q, k = (times((model[name] @ x).unflatten(0, (2, 4)), places).flatten(0, 1) for name in ("q", "k"))
    return (q.mT @ k).softmax(-1).square().sum()


legs = (Leg(View.of("q", (8, 5))), Leg(View.of("k", (8, 5)), -1))
law = Symmetry(block="attention", family="quaternions", kind=QuaternionScaling(), legs=legs)
laws = LawSet(symmetries=(law,), parameters=dict(model.named_parameters()))
print(law, law.formula, laws.verify(scores), sep="\n")
assert laws.verify(scores).holds
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
with Monitor(model, optimizer, laws, every=1) as monitor:
    for _ in range(20):
        optimizer.zero_grad()
        scores().backward()
        optimizer.step()
        monitor.step()
assert not monitor.alarms
print(f"after 20 steps the law has drifted by {max(monitor.errors().values()):.1e}, all of it accounted for")
