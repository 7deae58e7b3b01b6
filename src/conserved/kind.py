r"""Kinds of group a symmetry can have: how each acts on a leg, and what that makes of the moment map.

A group element moves the n rows of an n × m leg A. Write ξ·A for its infinitesimal action. The moment map
of two legs is defined by pairing with every generator,

    ⟨ξᵀ, μ(A, B)⟩ = ⟨ξ·A, B⟩        for all ξ (the transpose matters for matrices only),

so a kind is fully described by `act` (the group) and `contract` (the adjoint of its generator). `contract`
is written for a leg of degree +1; a leg of degree −1 moves by g^{-T} and contributes −contract(B, A), which
for the general linear group is −(A Bᵀ)ᵀ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from typing import ClassVar

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from conserved.fused import LARGEST
from conserved.grams import (
    dots,
    halves,
    outer_and_spread,
    outer_products,
    row_dots,
    row_dots_and_spread,
    row_grams,
)
from conserved.sheaf import Layout, Legs, RowProduct
from conserved.view import View

Degree = int | float
"""How a leg moves: +1 by g, −1 by g^{-T}, and where a scale acts by any power of it."""


class Kind(ABC):
    """A group that acts on the rows of every leg of a symmetry."""

    __slots__ = ()
    code: ClassVar[str]
    """Stable tag used in files."""
    title: ClassVar[str]
    """What people call the group."""
    weighted: ClassVar[bool] = False
    """Whether legs may have degrees other than +1 and −1."""
    shared: ClassVar[str] = "rows"
    """What the legs must have in common: "rows" (n), "columns" (m) or "nothing"."""
    together: ClassVar[bool] = False
    """Whether the law of one symmetry is one law h_i of equation (10); otherwise each of its numbers is."""
    by_rows: ClassVar[bool] = False
    """Whether its moment map is made of sums over single rows, which `row_products` lists."""
    linear: ClassVar[bool] = False
    """Whether the law is linear in the parameters; gradient descent, with momentum or without, does not move it."""

    def lift(self, a: Float[Tensor, "*batch n m"], *, point: bool) -> Float[Tensor, "*batch n k"]:
        """What generators act on: the leg itself, for every linear action, at points and directions alike."""
        return a

    def in_sheaves(self, n: int) -> bool:
        """Whether `weighed` and `pairings` take legs of n rows that lie in many tensors."""
        return True

    def row_products(self, layout: Layout) -> tuple[RowProduct, ...]:
        """The rows of a leg of degree +1 that `contract` multiplies, for kinds that are `by_rows`."""
        raise NotImplementedError(f"{self.title} does more than multiply single rows.")

    @abstractmethod
    def contract(self, a: Float[Tensor, "*batch n k"], b: Float[Tensor, "*batch n l"]) -> Float[Tensor, "*out"]:
        """The moment map of one leg of degree +1."""

    def bound(self, a: Float[Tensor, "*batch n k"], b: Float[Tensor, "*batch n l"]) -> Float[Tensor, "*out"]:
        """What |contract(a, b)| could be, entry by entry, if nothing cancelled."""
        return self.contract(a.abs(), b.abs())

    @abstractmethod
    def weighed(self, a: Legs, b: Legs) -> tuple[Float[Tensor, "*out"], Float[Tensor, "*batch"]]:
        """contract(a, b), and the sum of the squares of all products that its entries add up.

        The root of the latter is the size contract(a, b) would have if the products had random signs, and, times the
        unit of rounding, what independent rounding errors of b leave in it.
        """

    @abstractmethod
    def act(self, g: Shaped[Tensor, "*element"], a: Float[Tensor, "n m"], degree: Degree) -> Shaped[Tensor, "n m"]:
        """Move one leg by the group element `g`."""

    @abstractmethod
    def element(
        self, n: int, m: int, *, spread: float, generator: torch.Generator | None
    ) -> Shaped[Tensor, "*element"]:
        """A random float64 group element, about `spread` away from the identity."""

    def conserved(self, mu: Float[Tensor, "*out"]) -> Float[Tensor, "*law"]:
        """The part of μ(θ, θ) that is not identically zero: the pairing with symmetric generators."""
        return mu

    def rotation(self, mu: Float[Tensor, "*out"]) -> Float[Tensor, "*part"] | None:
        """The pairing of μ(θ, V) with antisymmetric generators, an angular momentum; None where there are none."""
        return None

    def pairings(
        self, sources: Sequence[Legs], pairs: Sequence[tuple[int, int]], dtype: torch.dtype
    ) -> list[Float[Tensor, "*law"]]:
        """For one leg of degree +1, what `polar` turns into ½(μ(A, B) + μ(B, A)), for every listed pair of directions.

        `polar` is linear and does not depend on the leg, so legs are added up first.
        """
        return row_grams(sources, pairs, dtype)

    def polar(self, pairing: Float[Tensor, "*law"]) -> Float[Tensor, "*law"]:
        """The symmetric bilinear form whose value on (θ, θ) is the law, from a sum of what `pairings` gives."""
        return pairing

    def coordinates(self, law: Float[Tensor, "*law"]) -> Float[Tensor, "*batch numbers"]:
        """The law as a vector without repeated entries; leading axes are batched over."""
        return law

    def multiplicities(self, n: int, m: int) -> Float[Tensor, " numbers"]:
        """How often each coordinate occurs among the entries of the law."""
        return torch.ones(self.numbers(n, m))

    def sizes(self, law: Float[Tensor, "*law"]) -> Float[Tensor, "*batch rows"]:
        """The entries of a law that are sums of squares row by row: its diagonal, or all of it."""
        return law

    def reach(self, sizes: Float[Tensor, "*batch rows"]) -> Float[Tensor, "*batch numbers"]:
        """Upper bounds of all coordinates of a law whose legs have these sizes, if nothing cancelled."""
        return sizes

    @abstractmethod
    def units(self, law: Float[Tensor, "*law"]) -> Float[Tensor, "laws size"]:
        """One row for each law h_i that equation (10) averages over: a matrix law is one, a neuron's is one."""

    @abstractmethod
    def numbers(self, n: int, m: int) -> int:
        """How many conserved numbers the law of one symmetry holds."""

    def terms(self, n: int, m: int) -> int:
        """How many products one n × m leg adds to one number of the law."""
        return m

    @abstractmethod
    def identities(self, n: int, m: int) -> int:
        """How many scalar gradient identities one symmetry gives."""

    @abstractmethod
    def group(self, n: int, m: int) -> str:
        """The group's name, such as GL(64)."""

    @abstractmethod
    def term(self, view: View, *, latex: bool) -> str:
        """How the law of one leg reads."""

    def check(self, degrees: tuple[Degree, ...]) -> None:
        """Refuse degrees the group has no action for."""
        if any(degree == 0 for degree in degrees):
            raise ValueError("A leg of degree 0 does not move; leave it out of the symmetry.")
        if not self.weighted and any(abs(degree) != 1 for degree in degrees):
            raise ValueError(f"{self.title} acts with degrees +1 and −1 only; got {degrees}. Use Scaling for others.")

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))


@cache
def _upper(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    row, column = torch.triu_indices(n, n, device=device)
    return row, column


def _norm_squared(face: str, latex: bool) -> str:
    return rf"\lVert {face} \rVert^{{2}}" if latex else f"‖{face}‖²"


class GeneralLinear(Kind):
    """GL(n): a query and its key, a value and its output projection, two linear maps in a row."""

    __slots__ = ()
    code = "general_linear"
    title = "general linear"
    together = True

    def in_sheaves(self, n: int) -> bool:
        return n <= LARGEST

    def contract(self, a: Float[Tensor, "*batch n k"], b: Float[Tensor, "*batch n l"]) -> Float[Tensor, "*out"]:
        return a @ b.mT

    def weighed(self, a: Legs, b: Legs) -> tuple[Float[Tensor, "*out"], Float[Tensor, "*batch"]]:
        return outer_and_spread(a, b)

    def act(self, g: Shaped[Tensor, "*element"], a: Float[Tensor, "n m"], degree: Degree) -> Shaped[Tensor, "n m"]:
        return g @ a if degree > 0 else torch.linalg.solve(g.mT, a)

    def element(
        self, n: int, m: int, *, spread: float, generator: torch.Generator | None
    ) -> Shaped[Tensor, "*element"]:
        noise = torch.randn(n, n, generator=generator, dtype=torch.float64)
        return torch.linalg.matrix_exp(spread * noise / max(n, 1) ** 0.5)

    def rotation(self, mu: Float[Tensor, "*out"]) -> Float[Tensor, "*part"] | None:
        return mu - mu.mT

    def pairings(
        self, sources: Sequence[Legs], pairs: Sequence[tuple[int, int]], dtype: torch.dtype
    ) -> list[Float[Tensor, "*law"]]:
        return outer_products(sources, pairs, dtype)

    def polar(self, pairing: Float[Tensor, "*law"]) -> Float[Tensor, "*law"]:
        return (pairing + pairing.mT) / 2

    def coordinates(self, law: Float[Tensor, "*law"]) -> Float[Tensor, "*batch numbers"]:
        row, column = _upper(law.shape[-1], law.device)
        return law[..., row, column]

    def multiplicities(self, n: int, m: int) -> Float[Tensor, " numbers"]:
        row, column = torch.triu_indices(n, n)
        return torch.where(row == column, 1.0, 2.0)

    def sizes(self, law: Float[Tensor, "*law"]) -> Float[Tensor, "*batch rows"]:
        return law.diagonal(dim1=-2, dim2=-1)

    def reach(self, sizes: Float[Tensor, "*batch rows"]) -> Float[Tensor, "*batch numbers"]:
        # |Σ_k a_ik a_jk| ≤ ‖a_i‖ ‖a_j‖.
        root = sizes.sqrt()
        return self.coordinates(root.unsqueeze(-1) * root.unsqueeze(-2))

    def units(self, law: Float[Tensor, "n n"]) -> Float[Tensor, "1 size"]:
        return law.reshape(1, -1)

    def numbers(self, n: int, m: int) -> int:
        return n * (n + 1) // 2

    def identities(self, n: int, m: int) -> int:
        return n * n

    def group(self, n: int, m: int) -> str:
        return f"GL({n})"

    def term(self, view: View, *, latex: bool) -> str:
        face, t, dot = view.text(latex=latex), r"^{\top}" if latex else "ᵀ", " " if latex else "·"
        return f"{face}{t}{dot}{face}" if view.transposed else f"{face}{dot}{face}{t}"


class ComplexScaling(Kind):
    r"""(C*)^{n/2}: rows (2j, 2j+1) of a leg are the real and imaginary part of one complex row.

    Rotary position encoding multiplies such a row by a phase, so only complex numbers commute with it. A leg of
    degree −1 moves by g^{-T}, which is c / |c|²: the same phase, the inverse length. Hence a conserved length
    and, for each pair, two identities: the trace of its 2 × 2 block of A Bᵀ and the part along J.
    """

    __slots__ = ()
    code = "complex_scaling"
    title = "complex scaling"
    by_rows = True

    def row_products(self, layout: Layout) -> tuple[RowProduct, ...]:
        real, imaginary = layout.halves()
        return (
            RowProduct(real, real, start=0, step=2),
            RowProduct(imaginary, imaginary, start=0, step=2),
            RowProduct(real, imaginary, start=1, step=2),
            RowProduct(imaginary, real, start=1, step=2, sign=-1),
        )

    def contract(self, a: Float[Tensor, "*batch n k"], b: Float[Tensor, "*batch n l"]) -> Float[Tensor, "*out"]:
        same = a is b
        a, b = a.unflatten(-2, (-1, 2)), b.unflatten(-2, (-1, 2))
        a0, a1, b0, b1 = a[..., 0, :], a[..., 1, :], b[..., 0, :], b[..., 1, :]
        real = row_dots(a0, b0) + row_dots(a1, b1)
        # The part along J is antisymmetric: of a leg with itself it is zero.
        imaginary = torch.zeros_like(real) if same else row_dots(a0, b1) - row_dots(a1, b0)
        return torch.stack((real, imaginary), -1)

    def bound(self, a: Float[Tensor, "*batch n k"], b: Float[Tensor, "*batch n l"]) -> Float[Tensor, "*out"]:
        a, b = a.abs().unflatten(-2, (-1, 2)), b.abs().unflatten(-2, (-1, 2))
        real = row_dots(a[..., 0, :], b[..., 0, :]) + row_dots(a[..., 1, :], b[..., 1, :])
        imaginary = row_dots(a[..., 0, :], b[..., 1, :]) + row_dots(a[..., 1, :], b[..., 0, :])
        return torch.stack((real, imaginary), -1)

    def weighed(self, a: Legs, b: Legs) -> tuple[Float[Tensor, "*out"], Float[Tensor, "*batch"]]:
        x, y = halves(a), halves(b)
        found = [row_dots_and_spread(x[i], y[j]) for i, j in ((0, 0), (1, 1), (0, 1), (1, 0))]
        (aa, bb, ab, ba), squares = [dots for dots, _ in found], [spread for _, spread in found]
        return torch.stack((aa + bb, ab - ba), -1), squares[0] + squares[1] + squares[2] + squares[3]

    def conserved(self, mu: Float[Tensor, "*out"]) -> Float[Tensor, "*law"]:
        return mu[..., 0]

    def rotation(self, mu: Float[Tensor, "*out"]) -> Float[Tensor, "*part"] | None:
        return mu[..., 1]

    def pairings(
        self, sources: Sequence[Legs], pairs: Sequence[tuple[int, int]], dtype: torch.dtype
    ) -> list[Float[Tensor, "*law"]]:
        return [rows.unflatten(-1, (-1, 2)).sum(-1) for rows in row_grams(sources, pairs, dtype)]

    def act(self, g: Shaped[Tensor, "*element"], a: Float[Tensor, "n m"], degree: Degree) -> Shaped[Tensor, "n m"]:
        pairs = a.unflatten(0, (-1, 2))
        factor = g if degree > 0 else 1 / g.conj()
        moved = factor[:, None] * torch.complex(pairs[:, 0], pairs[:, 1])
        return torch.stack((moved.real, moved.imag), 1).flatten(0, 1)

    def element(
        self, n: int, m: int, *, spread: float, generator: torch.Generator | None
    ) -> Shaped[Tensor, "*element"]:
        logarithm = spread * torch.randn(n // 2, 2, generator=generator, dtype=torch.float64)
        return torch.exp(torch.complex(logarithm[:, 0], logarithm[:, 1]))

    def units(self, law: Float[Tensor, "*law"]) -> Float[Tensor, "laws size"]:
        return law.unsqueeze(-1)

    def numbers(self, n: int, m: int) -> int:
        return n // 2

    def terms(self, n: int, m: int) -> int:
        return 2 * m

    def identities(self, n: int, m: int) -> int:
        return n

    def group(self, n: int, m: int) -> str:
        return f"(C*)^{n // 2}"

    def term(self, view: View, *, latex: bool) -> str:
        return _norm_squared(view.text(latex=latex) + ("^{(j)}" if latex else "⁽ʲ⁾"), latex)


class Scaling(Kind):
    """(R₊)^n: row i of a leg of degree p is multiplied by s_i^p. Degrees other than ±1 come from homogeneity."""

    __slots__ = ()
    code = "scaling"
    title = "positive scaling"
    weighted = True
    by_rows = True

    def row_products(self, layout: Layout) -> tuple[RowProduct, ...]:
        return (RowProduct(layout, layout),)

    def contract(self, a: Float[Tensor, "*batch n k"], b: Float[Tensor, "*batch n l"]) -> Float[Tensor, "*out"]:
        return row_dots(a, b)

    def weighed(self, a: Legs, b: Legs) -> tuple[Float[Tensor, "*out"], Float[Tensor, "*batch"]]:
        return row_dots_and_spread(a, b)

    def act(self, g: Shaped[Tensor, "*element"], a: Float[Tensor, "n m"], degree: Degree) -> Shaped[Tensor, "n m"]:
        return g[:, None] ** degree * a

    def element(
        self, n: int, m: int, *, spread: float, generator: torch.Generator | None
    ) -> Shaped[Tensor, "*element"]:
        return torch.exp(spread * torch.randn(n, generator=generator, dtype=torch.float64))

    def units(self, law: Float[Tensor, "*law"]) -> Float[Tensor, "laws size"]:
        return law.unsqueeze(-1)

    def numbers(self, n: int, m: int) -> int:
        return n

    def identities(self, n: int, m: int) -> int:
        return n

    def group(self, n: int, m: int) -> str:
        return f"(R₊)^{n}"

    def term(self, view: View, *, latex: bool) -> str:
        return _norm_squared(view.row("i", latex=latex), latex)


class OneScale(Kind):
    """R₊: every entry of a leg of degree p is multiplied by s^p; legs of any shapes."""

    __slots__ = ()
    code = "one_scale"
    title = "one scale"
    weighted = True
    shared = "nothing"
    by_rows = True

    def row_products(self, layout: Layout) -> tuple[RowProduct, ...]:
        return (RowProduct(layout, layout, step=0),)

    def contract(self, a: Float[Tensor, "*batch n k"], b: Float[Tensor, "*batch n l"]) -> Float[Tensor, "*out"]:
        if b.stride(-2) < b.stride(-1):
            a, b = a.mT, b.mT
        x, y = a.flatten(-2), b.flatten(-2)
        return x @ y if x.ndim == 1 else (x.unsqueeze(-2) @ y.unsqueeze(-1))[..., 0, 0]

    def pairings(
        self, sources: Sequence[Legs], pairs: Sequence[tuple[int, int]], dtype: torch.dtype
    ) -> list[Float[Tensor, "*law"]]:
        return dots(sources, pairs, dtype)

    def coordinates(self, law: Float[Tensor, "*law"]) -> Float[Tensor, "*batch numbers"]:
        return law.unsqueeze(-1)

    def sizes(self, law: Float[Tensor, "*law"]) -> Float[Tensor, "*batch rows"]:
        return law.unsqueeze(-1)

    def weighed(self, a: Legs, b: Legs) -> tuple[Float[Tensor, "*out"], Float[Tensor, "*batch"]]:
        dots, spread = row_dots_and_spread(a, b)
        return dots.sum(-1), spread

    def act(self, g: Shaped[Tensor, "*element"], a: Float[Tensor, "n m"], degree: Degree) -> Shaped[Tensor, "n m"]:
        return g**degree * a

    def element(
        self, n: int, m: int, *, spread: float, generator: torch.Generator | None
    ) -> Shaped[Tensor, "*element"]:
        return torch.exp(spread * torch.randn((), generator=generator, dtype=torch.float64))

    def units(self, law: Float[Tensor, "*law"]) -> Float[Tensor, "laws size"]:
        return law[None, None]

    def numbers(self, n: int, m: int) -> int:
        return 1

    def terms(self, n: int, m: int) -> int:
        return n * m

    def identities(self, n: int, m: int) -> int:
        return 1

    def group(self, n: int, m: int) -> str:
        return "R₊"

    def term(self, view: View, *, latex: bool) -> str:
        return _norm_squared(view.text(latex=latex), latex)


class Translation(Kind):
    r"""(R^m, +): a leg of degree p gets p·c added to each of its rows. Its law is linear: p times the sum of the rows.

    In homogeneous coordinates a point carries a 1 and a direction (a gradient, an update) a 0, and the generator
    is linear in that coordinate: ξ·A = 1 ξᵀ at a point, 0 at a direction. With this `lift` the formulas for the
    law, the identity and the drift are the ones of every other kind.
    """

    __slots__ = ()
    code = "translation"
    title = "translation"
    together = True
    weighted = True
    shared = "columns"
    linear = True

    def in_sheaves(self, n: int) -> bool:
        return False

    def lift(self, a: Float[Tensor, "*batch n m"], *, point: bool) -> Float[Tensor, "*batch n k"]:
        return a.new_full((1,) * a.ndim, float(point)).expand(*a.shape[:-1], 1)

    def contract(self, a: Float[Tensor, "*batch n k"], b: Float[Tensor, "*batch n l"]) -> Float[Tensor, "*out"]:
        return (a.mT @ b).flatten(-2)

    def pairings(
        self, sources: Sequence[Legs], pairs: Sequence[tuple[int, int]], dtype: torch.dtype
    ) -> list[Float[Tensor, "*law"]]:
        """A direction's lift is zero, and so is every pairing of directions."""
        *batch, _, m = sources[0].shape
        zero = torch.zeros((*batch, m), dtype=dtype, device=sources[0].device)
        return [zero] * len(pairs)

    def column_sizes(
        self, sources: Sequence[Float[Tensor, "*batch n m"]], dtype: torch.dtype
    ) -> list[Float[Tensor, "*batch m"]]:
        """Upper bounds of the sums of absolute values of every column: Σ|a_i| ≤ (n Σ a_i²)^½."""
        squares = row_grams([source.mT for source in sources], [(k, k) for k in range(len(sources))], dtype)
        return [(sources[0].shape[-2] * square).sqrt() for square in squares]

    def weighed(self, a: Legs, b: Legs) -> tuple[Float[Tensor, "*out"], Float[Tensor, "*batch"]]:
        # One of the two is the lifted column of ones, or of zeros, which no parameter is.
        assert isinstance(a, Tensor)
        assert isinstance(b, Tensor)
        sizes = torch.linalg.vector_norm(a, dim=-1) * torch.linalg.vector_norm(b, dim=-1)
        return self.contract(a, b), sizes.square().sum(-1)

    def act(self, g: Shaped[Tensor, "*element"], a: Float[Tensor, "n m"], degree: Degree) -> Shaped[Tensor, "n m"]:
        return a + degree * g

    def element(
        self, n: int, m: int, *, spread: float, generator: torch.Generator | None
    ) -> Shaped[Tensor, "*element"]:
        return spread * torch.randn(m, generator=generator, dtype=torch.float64)

    def units(self, law: Float[Tensor, "*law"]) -> Float[Tensor, "laws size"]:
        return law[None]

    def numbers(self, n: int, m: int) -> int:
        return m

    def terms(self, n: int, m: int) -> int:
        return n

    def identities(self, n: int, m: int) -> int:
        return m

    def group(self, n: int, m: int) -> str:
        return f"(R^{m}, +)"

    def term(self, view: View, *, latex: bool) -> str:
        if view.n == 1:
            return view.text(latex=latex)
        return (r"\sum_{i} " if latex else "Σᵢ ") + view.row("i", latex=latex)


KINDS: dict[str, Kind] = {
    kind.code: kind for kind in (GeneralLinear(), ComplexScaling(), Scaling(), OneScale(), Translation())
}
"""Every kind by its code."""
