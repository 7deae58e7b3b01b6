"""Two kinds of group that move parameters and conserve nothing: exchanges of equal units, and rotations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from conserved.symmetry import Degree, Kind, RowProducts
from conserved.symmetry.rotations import nearest_rotation, overlap, principal_axes


class _WithoutLaw(Kind):
    """A group without symmetric generators: it moves parameters and leaves no law behind."""

    __slots__ = ()
    products = RowProducts(())


class Exchange(_WithoutLaw):
    """S_n: equal units change places, along all legs at once. The element lists, for every row, the row it was."""

    __slots__ = ()
    code = "exchange"
    title = "exchange of units"

    def act(self, g: Shaped[Tensor, "*element"], a: Float[Tensor, "n m"], degree: Degree) -> Shaped[Tensor, "n m"]:
        return a[g.to(a.device, torch.long)]

    def element(
        self, n: int, m: int, *, spread: float, generator: torch.Generator | None
    ) -> Shaped[Tensor, "*element"]:
        return torch.randperm(n, generator=generator)

    def group(self, n: int, m: int) -> str:
        return f"S_{n}"

    def identity(self, n: int, m: int) -> Shaped[Tensor, "*element"]:
        return torch.arange(n)

    def inverse(self, g: Shaped[Tensor, "*element"]) -> Shaped[Tensor, "*element"]:
        return g.argsort()

    def compose(
        self, later: Shaped[Tensor, "*element"], earlier: Shaped[Tensor, "*element"]
    ) -> Shaped[Tensor, "*element"]:
        return earlier[later]

    def element_problem(self, g: Shaped[Tensor, "*element"], name: str) -> str:
        n = len(g)
        if torch.equal(g.sort().values, torch.arange(n).to(g)):
            return ""
        return f"{name} exchanges {n} units: an element lists each of 0 … {n - 1} once."

    def canonical_element(self, legs: Sequence[Tensor], degrees: Sequence[Degree]) -> Shaped[Tensor, "*element"] | None:
        """Return the order of units by their norms, largest first."""
        sizes = torch.stack([leg.square().sum(1) for leg in legs]).sum(0)
        return sizes.argsort(descending=True, stable=True)

    def nearest_element(
        self, wanted: Sequence[Tensor], legs: Sequence[Tensor], degrees: Sequence[Degree]
    ) -> Shaped[Tensor, "*element"] | None:
        return assignment(overlap(wanted, legs))


class Orthogonal(_WithoutLaw):
    """O(n): a space that only its length is seen of, as a residual stream whose norms have no gains."""

    __slots__ = ()
    code = "orthogonal"
    title = "orthogonal"

    def act(self, g: Shaped[Tensor, "*element"], a: Float[Tensor, "n m"], degree: Degree) -> Shaped[Tensor, "n m"]:
        return g @ a

    def element(
        self, n: int, m: int, *, spread: float, generator: torch.Generator | None
    ) -> Shaped[Tensor, "*element"]:
        noise = torch.randn(n, n, generator=generator, dtype=torch.float64)
        return torch.linalg.matrix_exp(spread * (noise - noise.mT) / max(n, 1) ** 0.5)

    def group(self, n: int, m: int) -> str:
        return f"O({n})"

    def identity(self, n: int, m: int) -> Shaped[Tensor, "*element"]:
        return torch.eye(n, dtype=torch.float64)

    def inverse(self, g: Shaped[Tensor, "*element"]) -> Shaped[Tensor, "*element"]:
        return g.mT

    def compose(
        self, later: Shaped[Tensor, "*element"], earlier: Shaped[Tensor, "*element"]
    ) -> Shaped[Tensor, "*element"]:
        return later @ earlier

    def element_problem(self, g: Shaped[Tensor, "*element"], name: str) -> str:
        error = float((g @ g.mT - torch.eye(len(g)).to(g)).abs().max())
        return "" if error <= 1e-9 else f"The matrix for {name} is not orthogonal: |g gᵀ − 1| is {error:.1e}."

    def rotation_element(self, matrix: Float[Tensor, "n n"]) -> Shaped[Tensor, "*element"]:
        return matrix

    def canonical_element(self, legs: Sequence[Tensor], degrees: Sequence[Degree]) -> Shaped[Tensor, "*element"] | None:
        return principal_axes(legs, degrees)

    def nearest_element(
        self, wanted: Sequence[Tensor], legs: Sequence[Tensor], degrees: Sequence[Degree]
    ) -> Shaped[Tensor, "*element"] | None:
        return nearest_rotation(wanted, legs)


class RotationAboutOnes(Orthogonal):
    """O(n − 1): rotations that keep (1, …, 1), as those of a residual stream whose norms centre."""

    __slots__ = ()
    code = "rotation_about_ones"
    title = "rotation about (1, …, 1)"

    def element(
        self, n: int, m: int, *, spread: float, generator: torch.Generator | None
    ) -> Shaped[Tensor, "*element"]:
        return _keeping_ones(super().element(n - 1, m, spread=spread, generator=generator))

    def group(self, n: int, m: int) -> str:
        return f"O({n - 1})"

    def canonical_element(self, legs: Sequence[Tensor], degrees: Sequence[Degree]) -> Shaped[Tensor, "*element"] | None:
        basis = across_ones(legs[0].shape[0])[1:]
        return _keeping_ones(principal_axes([basis @ leg for leg in legs], degrees))

    def nearest_element(
        self, wanted: Sequence[Tensor], legs: Sequence[Tensor], degrees: Sequence[Degree]
    ) -> Shaped[Tensor, "*element"] | None:
        basis = across_ones(legs[0].shape[0])[1:]
        return _keeping_ones(nearest_rotation([basis @ leg for leg in wanted], [basis @ leg for leg in legs]))


def across_ones(n: int) -> Float[Tensor, "n n"]:
    """Return an orthogonal, symmetric matrix whose first row is parallel to (1, …, 1)."""
    v = torch.full((n,), n**-0.5, dtype=torch.float64)
    v[0] += 1
    return torch.eye(n, dtype=torch.float64) - 2 * torch.outer(v, v) / v.dot(v)


def _keeping_ones(inner: Float[Tensor, "k k"]) -> Float[Tensor, "n n"]:
    """Return the rotation that acts across (1, …, 1) as a smaller one does in the basis of `across_ones`."""
    n = len(inner) + 1
    basis = across_ones(n)[1:]
    return basis.mT @ inner @ basis + torch.full((n, n), 1 / n, dtype=torch.float64)


def assignment(score: Float[Tensor, "n n"]) -> Tensor:
    """Return for every unit of the goal the unit that takes its place, so that the total score is largest."""
    from scipy.optimize import linear_sum_assignment

    _, columns = linear_sum_assignment(-score.cpu().numpy())
    return torch.from_numpy(np.asarray(columns, dtype=np.int64))
